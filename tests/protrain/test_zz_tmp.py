import re, sys
sys.path[:0]=["/work/main/tests/protrain","/work/main/tests/protrain/core"]
from test_bad_input import *
def test_scan(tmp_path):
    jobs = Jobs(tmp_path)
    vals = [(d,v) for d in (715_000, 724_000) for v in range(1_035_000, 1_105_000, 10_000)]
    for d,v in vals:
        jobs.train(f"r{d}{v}", {**RATES_DECIDE, "protrain_capacity_bytes": d, "protrain_cpu_capacity_bytes": v}, {"base_model": WITHOUT_WEIGHTS})
    for d,v in vals:
        log = jobs[f"r{d}{v}"].log
        print(d,v, "RATES" if "it depends on rates" in log else ("REF" if "BudgetError" in log else "fits?"), re.findall("BudgetError: (.{0,100})", log)[:1])
    jobs.close()
