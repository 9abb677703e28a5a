"""`axolotl protrain plan --levers --write`: what Axolotl can change until a YAML fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from axolotl.utils.dict import DictDefault
from axolotl_jobs import BASE, LORA, PROTRAIN
from fork_server import Fork
from plan_jobs import Plans
from published_models import SMALL
from saving_jobs import run_command
from test_plan import LONG, LORA as SMALL_LORA, SMALL_CARD
from tiny_models import build_inputs, build_model, model_path

from axolotl.integrations.protrain.cli.migrate import with_keys
from axolotl.integrations.protrain.core.errors import ConfigError
from axolotl.integrations.protrain.core.sizes import parse_bytes
from axolotl.integrations.protrain.options import OPTIONS

ROWS = {
    "micro_batch_size": 4,
    "sequence_len": 256,
    "protrain_capacity_bytes": 1_700_000,
}
LITTLE_HOST = {
    "protrain_capacity_bytes": "900KB",
    "protrain_cpu_capacity_bytes": "600KB",
}
LONG_ROWS = LORA | {
    "micro_batch_size": 4,
    "sequence_len": 2048,
    "protrain_capacity_bytes": 4_000_000,
}
UNFIT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rows": (ROWS, {"micro_batch_size": 1, "gradient_accumulation_steps": 4}),
    "host": (LITTLE_HOST, {"optimizer": "adafactor"}),
    "all": (
        LONG_ROWS,
        {
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 4,
            "sequence_len": 512,
        },
    ),
}
"""Keys of a YAML that does not fit, and what is to change."""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plans]:
    plans = Plans(tmp_path_factory.mktemp("levers"))
    build_inputs(plans.folder)
    build_model(plans.folder, "llama")
    try:
        yield plans
    finally:
        plans.close()


@pytest.mark.parametrize(
    "name",
    ["rows", *(pytest.param(n, marks=pytest.mark.full) for n in ("host", "all"))],
)
def test_what_is_written_trains_within_the_limits(name: str, plans: Plans) -> None:
    """The least that has to change, and nothing else of the YAML."""
    keys, change = UNFIT[name]
    own = {"base_model": str(model_path("llama")), "plugins": [PROTRAIN]}
    own |= {"protrain_auto_memory": True, "output_dir": f"out-{name}"}
    before, after = (plans.folder / f"{name}{end}.yaml" for end in ("", "-fixed"))
    text = "# kept\n" + yaml.safe_dump({**BASE, **own, **keys})
    before.write_text(text)
    plans.command(name, before.name, "--write", after.name)
    answer = plans[name]
    assert answer.exit_code == 0 and answer.err == "", answer.err + answer.out
    assert f"{after.name}: fits" in answer.out
    assert "does not fit" in answer.out
    changed = {k: v for k, v in change.items() if k not in keys or keys[k] != v}
    assert yaml.safe_load(after.read_text()) == yaml.safe_load(text) | changed
    assert after.read_text().startswith("# kept\n") and before.read_text() == text
    with (plans.folder / f"{name}.log").open("w+") as log:
        argv = ["axolotl.cli.train", after.name]
        fork = Fork(run_command, argv, folder=plans.folder, stdout=log, stderr=log)
        assert fork.wait(300) == 0, Path(log.name).read_text()[-6000:]
    report = json.loads((plans.folder / f"out-{name}/protrain/report.json").read_text())
    measured = report["measured"]
    assert measured["num_steps"] == BASE["max_steps"]
    assert measured["device_peak_bytes"] <= parse_bytes(keys["protrain_capacity_bytes"])


@pytest.mark.full
def test_what_is_written_was_priced_as_it_is(plans: Plans) -> None:
    """A fused loss: the same training but for rounding, though a shorter row is faster."""
    write = ("--write", "fused.yaml", "--json")
    model, card = SMALL | {"vocab_size": 65536}, ("--gpu", "4090:3")
    plans.add("unfused", model, SMALL_LORA | LONG, *card, *write)
    answer = plans["unfused"]
    assert answer.exit_code == 0, answer.err
    fixed, levers = answer.json["fixed"], answer.json["levers"]
    assert fixed["numbers"] == "the same training, rounded otherwise"
    assert "+liger_fused_linear_cross_entropy: true" in fixed["difference"]
    plans.command("written", "fused.yaml", *card, "--json")
    written = plans["written"].json
    assert written["verdict"] == "fits"
    assert written["device_bytes"]["peak"] == fixed["device_peak_bytes"]
    assert written["step_s"]["total"] == fixed["step_s"]
    speeds = [lever["tokens_per_s"] or 0 for lever in levers]
    assert speeds == sorted(speeds, reverse=True)
    loss = next(v for v in levers if v["change"] == "liger_fused_linear_cross_entropy")
    before, after = loss["lowers"]["device working set"]
    assert before - after > 2 * 8192 * 65536 * 4
    assert all(lever["keys"] for lever in levers)


def test_what_cannot_be_priced_as_it_is_is_said(plans: Plans) -> None:
    """A plugin that runs in the command, and not in the process that prices."""
    listed = {"plugins": [PROTRAIN, "planning_plugin.RunsAlone"]}
    plans.add("alone", SMALL, SMALL_LORA | listed, "--gpu", "4090", "--levers")
    answer = plans["alone"]
    assert answer.exit_code == 3 and not answer.out
    assert "Error: --levers: " in answer.err and "has a parent" in answer.err


def test_no_lever_for_what_a_yaml_has() -> None:
    """Nor one that its kind of training does not take."""

    def groups(on_cuda: bool = True, **keys: Any) -> set[str]:
        rows = {"micro_batch_size": 1, "sequence_len": 512, "optimizer": "adamw_torch"}
        cfg = DictDefault(rows | keys)
        return {option.group for option in OPTIONS if option.settings(cfg, on_cuda)}

    assert groups() == {"loss", "optimizer", "packing"}
    assert "loss" not in groups(on_cuda=False)
    assert "loss" not in groups(liger_cross_entropy=True)
    assert groups(rl="dpo") == {"optimizer"}
    adapter = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16}
    assert groups(**adapter) - groups() == {"kernels", "base", "adapter"}
    assert "kernels" not in groups(**adapter, lora_dropout=0.1)
    assert "base" not in groups(**adapter | {"adapter": "qlora", "load_in_4bit": True})
    assert "optimizer" not in groups(optimizer="adamw_bnb_8bit")
    assert groups(micro_batch_size=2) - groups() == {"rows"}
    assert groups(gradient_accumulation_steps=2) - groups() == {"rows"}


def test_a_halved_adapter_keeps_its_scale() -> None:
    cfg = DictDefault({"adapter": "lora", "lora_r": 16, "lora_alpha": 32})
    (halved,) = (option for option in OPTIONS if option.group == "adapter")
    assert halved.settings(cfg, True) == [
        {"lora_r": 8, "lora_alpha": 16},
        {"lora_r": 4, "lora_alpha": 8},
    ]


def test_keys_are_set_where_they_are() -> None:
    before = "a: 1 # why\nplugins: [x]  # y\n\nb:\n  - 1\n# end\n"
    after = "a: 2 # why\nplugins: [x, z]  # y\nc: true\n\nb: 3\n# end\n"
    keys = {"plugins": ["x", "z"], "a": 2, "b": 3, "c": True}
    assert with_keys(before, keys) == after
    with pytest.raises(ConfigError, match="by hand: `a: 2`"):
        with_keys("a: &x 1\nb: *x\n", {"a": 2})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "3090", "--levers"), "for one card"),
        (("--max", "seq", "--levers"), "without --max"),
        (("--write", "there.yaml"), "no new file"),
    ],
)
def test_what_has_no_answer_is_refused(
    arguments: tuple[str, ...], said: str, plans: Plans
) -> None:
    (plans.folder / "there.yaml").touch()
    name = f"refused {arguments}"
    plans.command(name, "there.yaml", *SMALL_CARD, *arguments)
    answer = plans[name]
    assert answer.exit_code == 3 and said in answer.err and not answer.out
