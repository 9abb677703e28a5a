"""benchmarks/compare.py: what it says of figures, and that it measures real systems."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import first_table  # noqa: E402 - benchmarks are no package
from comparison import report  # noqa: E402
from comparison.cases import CASES, GPU, QUICK, SLOW  # noqa: E402
from comparison.roofline import Roofline  # noqa: E402
from comparison.system_run import NOT_IN_TIME, own_words  # noqa: E402
from comparison.systems import EXACT, LABELS, REFERENCE  # noqa: E402

CASE = QUICK[0]
MACHINE = {"device": "a test", "commit": "abc"}
ROOF = Roofline(0.5, 0.2, 0.1, 0.4, True, 10**12, 2**20, 2**19)


def measured(system: str, *losses: float, **other: Any) -> dict[str, Any]:
    return {
        "case": asdict(CASE),
        "system": system,
        "tokens": 1000,
        "step_s": [1.0, 2.0, 4.0],
        "losses": list(losses),
        "first_step_s": 9.0,
        "device_allocated_bytes": 3 * 2**20,
        "device_reserved_bytes": None,
        "host_resident_bytes": 2**30,
        "host_pinned_bytes": 0,
        "moved_bytes": None,
        "copied_bytes": None,
        "arithmetic": "",
        "config": {},
        "record": {},
        **other,
    }


def excused(system: str, why: str) -> dict[str, Any]:
    return {"case": asdict(CASE), "system": system, "excuse": why}


OURS = measured(
    "ours",
    3.0,
    2.0,
    record={
        "roofline": {**asdict(ROOF), "floor_s": ROOF.floor_s},
        "plan": dict.fromkeys(
            ("mode", "n_persist", "n_buffer", "n_swap", "n_checkpoint"), 1
        ),
        "predicted": {"step_s": 1.9, "device_peak_bytes": 3 * 2**20},
    },
)
PLAIN = measured(REFERENCE, 3.0, 2.0)


def written(folder: Path, *records: Mapping[str, Any]) -> str:
    path = folder / "day-cpu-compare.md"
    new = {"machine": MACHINE, "command": "compare", "records": list(records)}
    report.write(path, report.merge(path.with_suffix(".json"), [new]))
    assert path.with_suffix(".svg").read_text().count("<svg") == 1
    return path.read_text()


def test_the_table_has_medians_and_excuses(tmp_path: Path) -> None:
    text = written(tmp_path, PLAIN, OURS, excused("torchao", "`AssertionError: no`"))
    row = next(line for line in text.splitlines() if line.startswith("| ProTrain"))
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[2] == "500" and cells[4] == "3 MiB" and cells[-2] == "equal"
    assert "torchao CPUOffloadOptimizer: `AssertionError: no`" in text
    # the larger of compute, transfer and update, beside the median step
    assert "floor 0.500 s, ours 2.000 s: 25% of it" in text


def test_a_later_call_replaces_its_own_rows_only(tmp_path: Path) -> None:
    written(tmp_path, PLAIN, excused("fsdp2", "no time"))
    text = written(tmp_path, measured("fsdp2", 3.0, 2.0, step_s=[0.5, 0.5]), OURS)
    assert "no time" not in text
    assert "| 2,000 |" in text and f"| {LABELS[REFERENCE]} |" in text


def test_what_was_measured_outlives_a_call_without_time(tmp_path: Path) -> None:
    written(tmp_path, PLAIN, OURS)
    text = written(tmp_path, excused("ours", NOT_IN_TIME))
    assert "| ProTrain" in text and NOT_IN_TIME not in text
    assert NOT_IN_TIME in written(tmp_path, excused("zero3", NOT_IN_TIME))


def test_who_recomputes_is_named(tmp_path: Path) -> None:
    recomputed = measured(REFERENCE, 3.0, 2.0, config={"recompute": True})
    text = written(tmp_path, recomputed, OURS)
    assert f"| {LABELS[REFERENCE]}, recompute |" in text
    assert f"| {LABELS['ours']} |" in text


@pytest.mark.parametrize("system", EXACT[2:] + EXACT[:1])
def test_a_loss_that_differs_is_named(system: str) -> None:
    wrong = measured(system, 3.0, 2.0000001)
    assert report.unequal([PLAIN, wrong]) == [f"{CASE.name}: {LABELS[system]}"]
    assert not report.unequal([PLAIN, measured(system, 3.0, 2.0)])
    assert report.unequal([PLAIN, measured(system, 3.0, float("nan"))])
    # unless it says that it rounds otherwise, and then by little
    rounded = measured(system, 3.0, 2.0001, arithmetic="rounds")
    assert not report.unequal([PLAIN, rounded])
    assert report.unequal([PLAIN, measured(system, 3.0, 2.1, arithmetic="rounds")])
    # others may add in another order
    assert not report.unequal([PLAIN, measured("zero3", 3.0, 2.0000001)])


def test_floors() -> None:
    assert ROOF.floor_s == 0.5
    assert Roofline(0.1, 0.2, 0.3, 0.1, True, 0, 0, 0).floor_s == 0.3
    assert Roofline(0.1, 0.2, 0.3, 0.1, False, 0, 0, 0).floor_s == pytest.approx(0.6)


@pytest.mark.parametrize(
    "said, exit_code, words",
    [
        ("Traceback\n  x\na.b.OutError: no room\n", 1, "`a.b.OutError: no room`"),
        ("[rank0]: ValueError: bad\n[rank0]:   more\n", 1, "`ValueError: bad`"),
        ("working\n", -9, "ended by SIGKILL"),
        ("usage: what\n", 2, "exit code 2: `usage: what`"),
    ],
)
def test_an_excuse_is_in_the_systems_own_words(
    said: str, exit_code: int, words: str
) -> None:
    assert own_words(said, exit_code) == words


def test_cases_cover_what_is_asked() -> None:
    assert len(CASES) == len(QUICK) + len(SLOW) + len(GPU)
    assert {512, 16384} <= {case.length for case in SLOW}
    for cases in (QUICK, GPU):
        assert {case.method for case in cases} == {"lora", "qlora", "full"}
        assert {1024, 8192} <= {case.length for case in cases}
        assert {True, False} == {case.name.endswith("-fits") for case in cases}


@pytest.mark.full
def test_an_empty_table_is_an_error(tmp_path: Path) -> None:
    run = subprocess.run(
        [
            *(sys.executable, str(BENCHMARKS / "compare.py"), "--case", CASE.name),
            *("--systems", "ours", "--minutes", "0", "--output", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1 and "Error: nothing was measured" in run.stderr
    (path,) = tmp_path.glob("*.md")
    assert NOT_IN_TIME in path.read_text()


@pytest.mark.full
def test_real_systems(tmp_path: Path) -> None:
    """Plain and ours are equal, and what needs a GPU says so itself."""
    subprocess.run(
        [
            *(sys.executable, str(BENCHMARKS / "compare.py"), "--case", CASE.name),
            *("--systems", f"ours,{REFERENCE},layer_offloading"),
            *("--output", str(tmp_path)),
        ],
        check=True,
    )
    (path,) = tmp_path.glob("*.json")
    records = {r["system"]: r for r in json.loads(path.read_text())["records"]}
    assert records["ours"]["losses"] == records[REFERENCE]["losses"]
    assert "no CUDA parameters" in records["layer_offloading"]["excuse"]


def test_the_readme_says_what_the_newest_results_say(tmp_path: Path) -> None:
    """Written by `compare.py --readme FILE`."""
    newest = max((BENCHMARKS / "results").glob("*-cpu-compare.json"))
    readme = tmp_path / "README.md"
    said = (BENCHMARKS.parent / "README.md").read_text()
    readme.write_text(said)
    report.write_readme(readme, newest)
    assert readme.read_text() == said


def test_the_picture_shows_what_the_newest_results_say() -> None:
    """If not, run `python tools/pictures.py comparison.svg`."""
    sys.path.insert(0, str(BENCHMARKS.parent / "tools"))
    import pictures

    drawn = pictures.IMAGES / "comparison.svg"
    assert drawn.read_text() == pictures.comparison()


def test_a_busy_machine_gives_no_ratio() -> None:
    steady = measured(REFERENCE, 1.0, step_s=[1.0, 1.05, 1.1])
    ours = measured("ours", 1.0, step_s=[2.0, 2.1, 2.2])
    assert report.ratio([steady, ours], "ours", REFERENCE) == pytest.approx(0.5)
    assert report.ratio([PLAIN, ours], "ours", REFERENCE) is None
    assert report.ratio([steady], "ours", REFERENCE) is None


def test_the_first_table_of_the_readme_is_what_plan_says(tmp_path: Path) -> None:
    """Written by `first_table.py --write`; the example that takes least is planned again."""
    said = (BENCHMARKS.parent / "README.md").read_text()
    _, table, _ = said.split(first_table.MARK)
    lines = [line for line in table.splitlines() if line.startswith("| [")]
    assert first_table.written(lines).strip() == table.strip()
    pairs = list(zip(first_table.ROWS, lines, strict=True))
    for row, line in pairs:
        assert line.startswith(f"| [{row.label}][{row.example}] | {row.card} |")
    cheap = {row: line for row, line in pairs if row.example == "8b-full"}
    assert first_table.Table(tmp_path, [*cheap]).lines == [*cheap.values()]
