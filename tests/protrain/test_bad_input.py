"""Every mistake a person can make in the YAML or on the machine ends in one message.

It names the key at fault and the way out, the exit code tells a script, and nothing
half done stays behind.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from axolotl.integrations.base import PluginManager, load_plugin
from axolotl.integrations.config import merge_input_args
from axolotl.utils.dict import DictDefault
from axolotl_jobs import LORA, PROTRAIN, SEEDING, overrides
from click.testing import CliRunner
from huggingface_hub import constants
from saving_jobs import (
    FLAT_MODEL,
    FLAT_WITHOUT_WEIGHTS,
    PAGED,
    REPORT,
    WITHOUT_WEIGHTS,
    Jobs,
    Outcome,
    difference,
    weights,
)
from torch import nn
from yaml_faults import BASES, COMMANDS, KEYS, TEXTS, USABLE

from axolotl.integrations.protrain.args import ProTrainArgs
from axolotl.integrations.protrain.checks import base_faults, key_faults, require_sound
from axolotl.integrations.protrain.cli import _Progress, protrain
from axolotl.integrations.protrain.core.errors import ConfigError, LayoutError
from axolotl.integrations.protrain.core.layout import build_layout
from axolotl.integrations.protrain.offline.known_keys import known_keys
from axolotl.integrations.protrain.offline.yaml_file import read_yaml
from axolotl.integrations.protrain.plugin import ProTrainPlugin
from axolotl.integrations.protrain.refusals import LORA_KERNELS

EXAMPLES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("examples.yaml").read_text("utf-8")
)
INTEGRATIONS = [
    f"axolotl.integrations.{name}Plugin"
    for name in "liger.Liger cut_cross_entropy.CutCrossEntropy kd.KD kernels.Kernels "
    "spectrum.Spectrum swanlab.SwanLab lm_eval.LMEval grokfast.Grokfast mora.Mora "
    "diffusion.Diffusion nemo_gym.NemoGym densemixer.DenseMixer "
    "expert_parallel.ExpertParallel".split()
]

ROOM = {"protrain_auto_memory": True, "protrain_capacity_bytes": "1GiB"}
RESIDENT = {**ROOM, "protrain_force_all_persistent": True}
NO_BUDGET = {"protrain_auto_memory": True}

REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "several": (
        {
            **ROOM,
            "base_model": "models/lama",
            "plugins": ["axolotl.integrations.protrain.ProTrainPlugin", SEEDING],
            "protrain_capcity_bytes": "1GiB",
            "protrain_n_swap_override": -1,
            "lora_target_linaer": True,
            "micro_batch_size": 0,
            "adapter": "lora",
            "tensor_parallel_size": 2,
        },
        [
            "`protrain_capcity_bytes`: did you mean `protrain_capacity_bytes`?\n"
            "`protrain_n_swap_override` cannot be -1: allowed is a whole number",
            "`lora_target_linaer` is no key of Axolotl; did you mean `lora_target_linear`?"
            "\nmicro_batch_size: 0 is no whole number from 1 on.\n"
            "lora_r: not set, and `adapter: lora` needs it, for example `lora_r: 16`.\n"
            "lora_alpha: not set, ",
            "`tensor_parallel_size: 2` spreads the model over ranks",
            "base_model: models/lama: there is no such path; did you mean models/",
        ],
    ),
    "attention": (
        {**NO_BUDGET, "attn_implementation": "flash_attention_2"},
        [
            "ConfigError: protrain_capacity_bytes: this machine has no accelerator",
            "\nattn_implementation: flash_attention_2 runs on a GPU alone, and this "
            "machine has none. Set `attn_implementation: sdpa`.",
        ],
    ),
    "no_slot": (
        {**ROOM, **overrides(0, 0)},
        ["ConfigError: protrain_n_buffer_override: 0 slots", "legal range 1 to 4"],
    ),
    "no_blocks": (
        {**ROOM, **FLAT_MODEL},
        [
            "LayoutError: FlatModel has no recognisable blocks",
            "Train it without paging (protrain_auto_memory: false).",
        ],
    ),
}
"""Settings, and what the message about them says.

The first one is known before anything is loaded, and each of its mistakes alone is in
test_args.py and `yaml_faults.KEYS`; the others once the machine and the model are.
"""

FOR_A_GPU: dict[str, Any] = {
    **PAGED,
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_linear": True,
    "bf16": "auto",
    "fp16": None,
}
"""What a YAML for a GPU leaves to Axolotl."""

BUDGETS: dict[str, tuple[dict[str, Any], dict[str, int], list[str]]] = {
    "device": (
        {**ROOM, "micro_batch_size": 4},
        {"protrain_capacity_bytes": 700_000},
        [
            "protrain_capacity_bytes: the smallest plan needs ",
            "of 683.6 KiB may be used, ",
            "If the device has it, set `protrain_capacity_bytes: ",
            # the same batch in more steps, before anything that changes the training
            "would make it fit:\nmicro_batch_size: 1\ngradient_accumulation_steps: 8\n",
        ],
    ),
    "host": (
        PAGED,
        {"protrain_cpu_capacity_bytes": 512000},
        [
            "protrain_cpu_capacity_bytes: the plan of the overrides needs ",
            "500.0 KiB may be used, ",
            "If the host has it, set `protrain_cpu_capacity_bytes: ",
        ],
    ),
}
"""Trainings, limits under which no plan fits them, and what the message says."""
RATES_DECIDE: dict[str, Any] = {
    "protrain_auto_memory": True,
    "protrain_capacity_bytes": "708KB",
    "protrain_cpu_capacity_bytes": "1005KB",
    "protrain_cpu_optimizer": "torch",
    "gradient_accumulation_steps": 1,
}
"""With a fast link two blocks would swap, for which the host has no room: one does."""
ON_DISK = LORA | PAGED | {"protrain_cpu_capacity_bytes": "160KiB"}
"""Less than the base takes, and enough for the ring of a disk."""
STATE_ON_HOST = PAGED | {
    "unfrozen_parameters": ["^model.layers.[0-9].mlp"],
    "protrain_cpu_capacity_bytes": "221KiB",
}
"""The base has room while it loads; what trains has none but where the rest is on a disk."""
PARTIAL = {"partial": 1, "partial_resident": 4}
"""Resident chunks asked for, with the other knobs left out."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Every run of this file; all of them begin here, in the background."""
    jobs = Jobs(tmp_path_factory.mktemp("bad_input"))
    jobs.train("off", {"protrain_auto_memory": False})
    jobs.train("absent", {"protrain_auto_memory": None, "plugins": [SEEDING]})
    base = {"base_model": WITHOUT_WEIGHTS}
    jobs.train("on_disk", ON_DISK, base, {"protrain_disk_dir": "disk"})
    jobs.train("no_disk", ON_DISK, base)
    jobs.train("state", STATE_ON_HOST, base)
    for name, (settings, _) in REFUSED.items():
        jobs.train(name, settings)
    for name, (settings, limits, _) in BUDGETS.items():
        without = {k: f"{num_bytes}B" for k, num_bytes in limits.items()}
        without["base_model"] = WITHOUT_WEIGHTS
        jobs.train(f"{name}_before", settings, without)
        later = {"plugins": [PROTRAIN, SEEDING, "saving_jobs.LaterBudgetPlugin"]}
        environment = {"LATER_BUDGET": json.dumps(limits)}
        jobs.train(f"{name}_after", settings, later, environment=environment)
    flat = {**FLAT_MODEL, "base_model": FLAT_WITHOUT_WEIGHTS}
    jobs.train("flat", ROOM, flat)
    looks = {"plugins": [PROTRAIN, SEEDING, "planning_plugin.LooksAtWeights"]}
    jobs.train("looked_at", ROOM, base, looks)
    for name, n_persist in PARTIAL.items():
        jobs.train(name, ROOM, {"protrain_n_persist_override": n_persist})
    jobs.train("for_a_gpu", FOR_A_GPU)
    switched = dict.fromkeys(LORA_KERNELS, False) | {"bf16": True, "fp16": False}
    jobs.train("for_a_cpu", FOR_A_GPU, switched)
    yield jobs
    jobs.close()


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_explained(jobs: Jobs, name: str) -> None:
    _, expected = REFUSED[name]
    refused = jobs[name]
    assert refused.exit_code == 1
    for text in expected:
        # among the last lines, where a person looks
        assert text in refused.log[-6000:], refused.log[-6000:]
    assert left_behind(refused) == set()
    if name == "several":
        # what is wrong with the YAML alone, before data and base are loaded
        assert "Pre-saving" not in refused.log
        assert "Loading prepared dataset" not in refused.log


def left_behind(refused: Outcome) -> set[str]:
    """What a run that did not train has no business to write."""
    written = {path.name for path in refused.folder.rglob("*")}
    return {
        name
        for name in written
        if re.match(r"checkpoint|report.json|.*\.(safetensors|pt|bin)$", name)
    }


@pytest.mark.parametrize("name", BUDGETS)
def test_too_small_a_budget_is_refused_before_loading(jobs: Jobs, name: str) -> None:
    """With the figures that stop the same training once it has been loaded."""
    before, after = (jobs[f"{name}_{when}"] for when in ("before", "after"))
    refusals = [re.findall("BudgetError: (.*)", job.log) for job in (before, after)]
    assert refusals[0] and refusals[0] == refusals[1], before.log[-6000:]
    *_, expected = BUDGETS[name]
    assert all(text in before.log[-6000:] for text in expected), before.log[-6000:]
    assert "Pre-saving" not in before.log and "Pre-saving" in after.log
    assert left_behind(before) == set()


def test_a_base_that_goes_to_a_disk_is_not_refused_before_loading(jobs: Jobs) -> None:
    loads = jobs["on_disk"].log
    for refused in (jobs["no_disk"].log, jobs["state"].log):
        assert "BudgetError: protrain_cpu_capacity_bytes" in refused[-6000:]
        assert "Pre-saving" not in refused
    assert "BudgetError" not in loads
    assert "no file named model.safetensors" in loads


@pytest.mark.full
def test_what_depends_on_rates_is_left_to_the_loaded_model(jobs: Jobs) -> None:
    jobs.train("rates_decide", RATES_DECIDE, {"base_model": WITHOUT_WEIGHTS})
    log = jobs["rates_decide"].log
    said = "known once the base is loaded: it depends on rates that are measured then"
    assert log.index(said) < log.index("no file named model.safetensors")


def test_what_cannot_be_told_without_weights_stops_nothing(jobs: Jobs) -> None:
    for name, why in (
        ("flat", "FlatModel has no recog"),
        (
            "looked_at",
            "plugins: planning_plugin.LooksAtWeights.post_model_build does not",
        ),
    ):
        log = jobs[name].log
        said = f"Whether it fits is known once the base is loaded: {why}"
        assert log.index(said) < log.index("no file named model.safetensors")


@pytest.mark.parametrize("name", PARTIAL)
def test_knobs_that_were_left_out_are_said(jobs: Jobs, name: str) -> None:
    trained = jobs[name].finished
    plan = trained.report["plan"]
    assert plan["n_persist"] == PARTIAL[name]
    filled = [f"{knob} {plan[knob]}" for knob in ("n_buffer", "n_swap", "n_checkpoint")]
    said = f"Overrides completed with defaults: {', '.join(filled)}."
    warnings = [line for line in trained.log.splitlines() if "[WARNING]" in line]
    assert sum(said in line for line in warnings) == 1


def test_what_axolotl_chooses_for_a_gpu_is_switched_off_without_one(jobs: Jobs) -> None:
    trained, asked = jobs["for_a_gpu"].finished, jobs["for_a_cpu"].finished
    assert trained.history == asked.history
    assert difference(weights(trained.folder), weights(asked.folder)) is None
    notes = [line for line in trained.log.splitlines() if "on the CPU device" in line]
    kernels, precision = (note.partition("[WARNING]")[2] for note in notes)
    assert "lora_mlp_kernel, lora_qkv_kernel, lora_o_kernel" in kernels
    assert "bf16: true on the CPU device" in precision
    assert "on the CPU device, where" not in asked.log


# ------------------------------------------------------------------------ switched off


def test_switched_off_it_says_so_and_nothing_else(jobs: Jobs) -> None:
    spoken = [
        line
        for line in jobs["off"].finished.log.splitlines()
        if "[axolotl.integrations.protrain" in line
    ]
    assert len(spoken) == 1
    assert spoken[0].endswith("is listed but off (protrain_auto_memory: false).")


def test_switched_off_it_changes_nothing(jobs: Jobs) -> None:
    off, absent = jobs["off"].finished, jobs["absent"].finished
    # from 0.21 on Axolotl itself says that it loads every plugin that is installed
    assert not re.search(r"\[axolotl\.integrations\.protrain|protrain/", absent.log)
    assert off.history == absent.history
    assert difference(weights(off.folder), weights(absent.folder)) is None
    assert tree(off.folder) == tree(absent.folder)
    assert not (off.folder / REPORT).exists()


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# ------------------------------------------------- known without heavy imports, at once


@pytest.mark.parametrize("kind", BASES)
def test_a_base_that_cannot_be_trained(kind: str, tmp_path: Path) -> None:
    make, expected = BASES[kind]
    (line,) = base_faults({"base_model": make(tmp_path)})
    assert line.startswith("base_model: ") and expected in line
    assert "\n" not in line and "hf download" not in line


@pytest.mark.parametrize("kind", USABLE)
def test_a_base_of_which_nothing_is_known_to_be_wrong(
    kind: str, tmp_path: Path
) -> None:
    make, keys = USABLE[kind]
    assert not [*base_faults({"base_model": make(tmp_path), **keys})]


def test_a_base_that_is_fetched_meanwhile_is_looked_at(tmp_path: Path) -> None:
    """By the first hook after Axolotl has asked the Hub for it."""
    keys = {"base_model": BASES["gptq"][0](tmp_path), "protrain_auto_memory": True}
    with pytest.raises(ConfigError, match="holds weights quantised by gptq"):
        ProTrainPlugin().load_datasets(DictDefault(keys))


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_an_accelerator_that_is_not_known_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A YAML with a limit would train on the CPU there, and say nothing of it."""
    there = torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: there)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    keys = {"base_model": str(tmp_path), "protrain_capacity_bytes": 1 << 30}
    with pytest.raises(ConfigError, match=f"not train on {kind}. .* cuda.* cpu"):
        ProTrainPlugin().load_datasets(DictDefault(keys, protrain_auto_memory=True))


def test_a_base_in_the_cache_is_no_folder_of_its_owners_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    keys = {"base_model": "owner/name", "revision_of_model": "v1"}
    (line,) = base_faults(keys)
    assert "owner/name: there is no such path" in line
    commit, repository = "a" * 40, tmp_path / "hub/models--owner--name"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    (repository / "refs").mkdir()
    (repository / "refs/v1").write_text(commit)
    assert not [*base_faults(keys, here=True)]
    (line,) = base_faults(keys | {"revision_of_model": 123})
    assert line.startswith("revision_of_model: 123 is no text; write it in quotes")


def test_a_base_that_nobody_has_fetched() -> None:
    (line,) = base_faults({"base_model": "owner/name"}, here=True)
    assert "with `hf download owner/name config.json`" in line


@pytest.mark.parametrize("kind", TEXTS)
def test_a_yaml_that_cannot_be_read(kind: str, tmp_path: Path) -> None:
    text, expected = TEXTS[kind]
    config = tmp_path / "train.yaml"
    config.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(config)
    assert str(caught.value).startswith(f"{config}: ") and expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("odd", [os.mkfifo, Path.mkdir])
def test_what_is_no_file_is_not_opened(
    odd: Callable[[Path], None], tmp_path: Path
) -> None:
    odd(tmp_path / "train.yaml")
    with pytest.raises(ConfigError, match="no such file"):
        read_yaml(tmp_path / "train.yaml")


def test_what_people_write_is_read_as_yaml_reads_it(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: [2]}\nb: {<<: *a, x: 3}\n1: 2024-02-29\nc: |\n  *a\nd: *a\n"
    config = tmp_path / "train.yaml"
    config.write_text(text)
    assert read_yaml(config) == yaml.safe_load(text)


@pytest.mark.parametrize("kind", KEYS)
def test_all_that_is_wrong_with_keys(kind: str, tmp_path: Path) -> None:
    keys, expected = KEYS[kind]
    base = USABLE["plain"][0](tmp_path)
    faults = []
    try:
        require_sound({"base_model": base, **keys})
    except ConfigError as error:
        faults = str(error).splitlines()
    assert len(faults) == len(expected), faults
    for line, start in zip(faults, expected, strict=True):
        assert line.startswith(start)


def test_no_key_of_axolotls_own_examples_is_a_slip() -> None:
    for name, keys in EXAMPLES.items():
        alone = {key: value for key, value in keys.items() if key != "plugins"}
        assert not [*key_faults(alone)], name


def test_keys_are_those_of_axolotls_schema() -> None:
    """Read from source, of Axolotl alone and with all plugins that can be imported."""
    manager = PluginManager.get_instance()
    before = dict(manager.plugins)
    try:
        for plugins in ([], INTEGRATIONS):
            manager.plugins.clear()
            for plugin in plugins:
                manager.register(plugin)
            fields = merge_input_args()[-1].model_fields
            names = {*fields, *(f.alias for f in fields.values() if f.alias)}
            known = known_keys(manager.plugins)
            assert known.names - ProTrainArgs.model_fields.keys() == (
                names - ProTrainArgs.model_fields.keys()
            )
            assert known.all_known and not known.missing
            assert len(manager.plugins) >= len(plugins) / 2
    finally:
        manager.plugins.clear()
        manager.plugins.update(before)


def test_every_command_says_it_at_once(tmp_path: Path) -> None:
    """In one process, which has imported nothing heavy when it is through with all."""
    asked: dict[str, tuple[str, int, str]] = {}
    for kind, (text, expected) in TEXTS.items():
        (tmp_path / f"{kind}.yaml").write_text(text)
        asked |= {f"{command} {kind}": (expected, 3, "") for command in COMMANDS}
    for kind in ("gptq", "gguf", "absolute path"):
        make, expected = BASES[kind]
        (tmp_path / kind).mkdir()
        keys = {"base_model": make(tmp_path / kind), "plugins": [PROTRAIN]}
        (tmp_path / f"{kind}.yaml").write_text(yaml.safe_dump(keys))
        asked |= {f"{command} {kind}": (expected, 3, "") for command in COMMANDS}
        asked[f"migrate {kind}"] = (expected, 2, "! left to you: ")
    script = Path(__file__).with_name("yaml_faults.py")
    answer = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    found = json.loads(answer.stdout)
    assert found["imported"] == []
    for name, (expected, code, prefix) in asked.items():
        exit_code, text, seconds = found["said"][name]
        assert exit_code == code and expected in text, (name, text)
        assert prefix in text and "Traceback" not in text
        assert prefix or re.fullmatch("Error: .*\n", text), text
        # of processor time, which a busy machine does not lengthen much
        assert seconds < 3, name


@pytest.mark.parametrize(
    "plugin", ["ProtrainPlugin", "ProTrainplugin", "ProTranPlugin"]
)
def test_a_misspelt_class_is_refused_with_all_else(plugin: str, tmp_path: Path) -> None:
    """Axolotl finds the plugin under it, which then refuses the YAML."""
    module = "axolotl.integrations.protrain"
    found = load_plugin(f"{module}.{plugin}")
    keys = {"plugins": [f"{module}.{plugin}"], "protrain_capcity_bytes": 1}
    with pytest.raises(ConfigError) as caught:
        found.register({"base_model": USABLE["plain"][0](tmp_path), **keys})
    first, second = str(caught.value).splitlines()
    assert f"`{module}.{plugin}` cannot be imported; did you mean" in first
    assert second == "`protrain_capcity_bytes`: did you mean `protrain_capacity_bytes`?"
    with pytest.raises(AttributeError):
        load_plugin(f"{module}.Nothing")


@pytest.mark.parametrize(
    ("interactive", "shown"),
    [
        (True, "\r\x1b[Kone\r\x1b[Ktwo\r\x1b[Kthree\r\x1b[K"),
        (False, ""),
    ],
)
def test_a_long_command_says_how_far_it_is(
    interactive: bool, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: interactive)
    with (say := _Progress(stream)):
        for text in ("one", "two", "three"):
            say(text)
    assert stream.getvalue() == shown


# -------------------------------------------------------------- asked of other commands


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("selftest none.yaml", 3, "none.yaml: no such file"),
        ("serve none.yaml", 3, "none.yaml: no such file"),
        ("plan none.yaml", 3, "none.yaml: no such file"),
        ("migrate none.yaml", 3, "none.yaml: no such file"),
        (
            "report none",
            3,
            r"none/protrain/report.json: .*\(No such file or directory\)",
        ),
        ("report none --html none/x", 3, "--html: none/x is no file in a folder"),
    ],
)
def test_a_path_that_is_not_there(arguments: str, code: int, said: str) -> None:
    ended = CliRunner().invoke(protrain, arguments.split())
    assert ended.exit_code == code
    assert re.fullmatch(f"Error: .*{said}.*\n", ended.stderr)


# ------------------------------------------------------------------- asked of the core


def test_a_plain_stack_of_layers_has_no_blocks() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(LayoutError, match="Sequential has no recognisable blocks"):
        build_layout(plain)
