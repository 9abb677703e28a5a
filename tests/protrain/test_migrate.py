"""`axolotl protrain migrate`: a YAML for plain Axolotl becomes one for this plugin."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, strategies as st

from axolotl.integrations.protrain.args import PLUGIN
from axolotl.integrations.protrain.cli import protrain
from axolotl.integrations.protrain.cli.migrate import migrate
from axolotl.integrations.protrain.refusals import PLACES, changes, refusals

BEFORE = """\
# a 70B model on two cards
base_model: meta-llama/Meta-Llama-3-70B  # the base

plugins:
- axolotl.integrations.liger.LigerPlugin
# why not deepspeed
datasets:
  - path: alpaca
    # its format
    type: alpaca
gradient_checkpointing: offload
fsdp:
  - full_shard
  # between
  - auto_wrap

# of FSDP
fsdp_config:
  offload_params: true
unsloth_lora_mlp: true
fsdp_version: 2
fsdp_final_state_dict_type: FULL_STATE_DICT  # without an end of line"""
AFTER = f"""\
# a 70B model on two cards
base_model: meta-llama/Meta-Llama-3-70B  # the base

plugins:
- axolotl.integrations.liger.LigerPlugin
- {PLUGIN}
protrain_auto_memory: true
# why not deepspeed
datasets:
  - path: alpaca
    # its format
    type: alpaca

# of FSDP
lora_mlp_kernel: true
"""


def test_comments_and_order_stay() -> None:
    found = migrate(BEFORE)
    assert found.after == AFTER and not found.undecided
    assert migrate(AFTER).reasons == ()
    assert migrate(AFTER).after == AFTER


@pytest.mark.parametrize(
    ("plugins", "after"),
    [
        ("a: 1\n", f"a: 1\n\nplugins:\n  - {PLUGIN}\nprotrain_auto_memory: true\n"),
        ("plugins:\n", f"plugins:\n  - {PLUGIN}\nprotrain_auto_memory: true\n"),
        (
            "plugins: []\r\n",
            f"plugins:\r\n  - {PLUGIN}\r\nprotrain_auto_memory: true\r\n",
        ),
        (
            "plugins: [x]  # y\n",
            f"plugins: [x, {PLUGIN}]  # y\nprotrain_auto_memory: true\n",
        ),
        (
            "plugins: [\n  x,  # y\n]\n",
            f"plugins: [\n  x, {PLUGIN},  # y\n]\nprotrain_auto_memory: true\n",
        ),
        (
            f"protrain_auto_memory: false\nplugins: [{PLUGIN}]",
            f"protrain_auto_memory: true\nplugins: [{PLUGIN}]",
        ),
        (
            f"protrain_auto_memory: 0\n1: a\nplugins: [{PLUGIN}]\n",
            f"protrain_auto_memory: true\n1: a\nplugins: [{PLUGIN}]\n",
        ),
        # a line more would be in the text, or end it
        *(
            (
                f"a: 1\n# c\nb: {text}",
                f"a: 1\n\nplugins:\n  - {PLUGIN}\nprotrain_auto_memory: true\n"
                f"# c\nb: {text}",
            )
            for text in ("|\n  x\n  y", "|+\n  x\n\n\n", "\n  c: |+\n    x\n\n\n")
        ),
        # each line keeps its end, and new ones have that of the first
        (
            f"plugins:\r\n- {PLUGIN}\r\na: 1\nunsloth_lora_mlp: true # u\nb: 2",
            f"plugins:\r\n- {PLUGIN}\r\nprotrain_auto_memory: true\r\n"
            "a: 1\nlora_mlp_kernel: true # u\nb: 2",
        ),
    ],
)
def test_the_plugin_is_listed_however_others_are(plugins: str, after: str) -> None:
    assert migrate(plugins).after == after


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "fsdp: [a]\nfsdp_config: &x {b: 1}\nc: *x\n",
            "by hand: `fsdp`, `fsdp_config`:",
        ),
        (
            "deepspeed: a\nb: 1\ndeepspeed: c\n",
            "`deepspeed` is there twice, in line 1 and line 3",
        ),
        ("{deepspeed: zero3.json}", "each key on a line of its own"),
        ("plugins: x.Y\n", "`plugins: x.Y` is no list"),
        ("- a\n", "has to be an Axolotl YAML"),
        (
            "fsdp_config: &x {b: 1}\nc: *x\n"
            + "".join(f"k{i}: {i}\n" for i in range(3000)),
            "by hand: `fsdp_config`: ",
        ),
        ("a: [\n", "not a readable YAML"),
        ("protrain_capcity_bytes: 1\n", "did you mean `protrain_capacity_bytes`?"),
    ],
)
def test_what_cannot_be_edited_is_left_as_it_is(
    text: str, said: str, tmp_path: Path
) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(text)
    outcome = CliRunner().invoke(protrain, ["migrate", str(config), "--write"])
    assert outcome.exit_code == 3 and said in outcome.stderr
    assert config.read_text() == text


def test_what_a_person_decides_is_said_and_the_rest_is_written(tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.write_text("fp16: true\ndeepspeed: zero3.json\n")
    shown = CliRunner().invoke(protrain, ["migrate", str(config)])
    assert shown.exit_code == 2 and "left to you: `fp16: true`" in shown.stdout
    assert "-deepspeed: zero3.json\n" in shown.stdout
    assert "deepspeed" in config.read_text()
    CliRunner().invoke(protrain, ["migrate", str(config), "--write"])
    assert "deepspeed" not in config.read_text() and "fp16" in config.read_text()


def test_what_axolotl_does_quietly_is_said_of_a_base_that_is_here(
    tmp_path: Path,
) -> None:
    keys = {
        "base_model": str(tmp_path),
        "adapter": "qlora",
        "load_in_4bit": True,
        "lora_target_parameters": ["mlp.experts.down_proj"],
        "lora_modules_to_save": ["lm_head"],
    }
    config = tmp_path / "train.yaml"
    config.write_text(yaml.safe_dump(keys))

    def said() -> list[str]:
        shown = CliRunner().invoke(protrain, ["migrate", str(config)])
        return [line for line in shown.stdout.splitlines() if line.startswith("? ")]

    # no base is here yet
    assert not said()
    base = tmp_path / "config.json"
    base.write_text(json.dumps({"num_local_experts": 8, "tie_word_embeddings": True}))
    experts, merged, copies = said()
    assert "experts stay in 16 bits" in experts
    assert "lora_target_parameters" in merged and "legacy" in merged
    assert "peft_ensure_weight_tying" in copies
    config.write_text(yaml.safe_dump(keys | {"merge_method": "legacy"}))
    assert said() == [experts]
    unpacks = {"model_quantization_config_kwargs": {"dequantize": True}}
    packed = keys | unpacks | {"model_quantization_config": "Mxfp4Config"}
    config.write_text(yaml.safe_dump(packed))
    assert "examples/merge_packed.py" in said()[-1]
    # what Axolotl will refuse is no traceback
    odd = {"lora_target_parameters": 5, "model_quantization_config_kwargs": "x"}
    odd |= {"model_quantization_config": "Mxfp4Config", "lora_modules_to_save": 5}
    config.write_text(yaml.safe_dump(keys | odd))
    assert said() == [experts]
    config.write_text(yaml.safe_dump(keys | odd | {"lora_modules_to_save": "lm_head"}))
    assert said() == [experts, copies]
    config.write_text(yaml.safe_dump(keys | {"merge_method": "legacy"}))
    base.write_text(json.dumps({"tie_word_embeddings": False}))
    assert not said()
    base.write_text("[]")
    assert not said()


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """And a link stays a link, to a file of the same mode."""
    config, link = tmp_path / "train.yaml", tmp_path / "link.yaml"
    text = "deepspeed: zero3.json\n# long\n" + "# comment\n" * 1000
    config.write_text(text)
    config.chmod(0o640)
    link.symlink_to(config.name)
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        full = CliRunner().invoke(protrain, ["migrate", str(link), "--write"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert full.exit_code == 3 and "File too large" in full.stderr
    assert config.read_text() == text and len([*tmp_path.iterdir()]) == 2
    CliRunner().invoke(protrain, ["migrate", str(link), "--write"])
    assert link.is_symlink() and "deepspeed" not in config.read_text()
    assert config.stat().st_mode & 0o777 == 0o640


KEYS = [*PLACES, "tiled_mlp", "optimizer", "fsdp_version", "unfrozen_parameters"]
KEYS += ["model_quantization_config_kwargs", "torch_compile_options"]
VALUES = ["true", "2", "adamw", "[a, b]", "\n  - a\n  # b\n  - c", "\n  a: 1\n\n  b: 2"]


@given(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES), max_size=5))
def test_nothing_is_left_that_migrate_changes(keys: dict[str, str]) -> None:
    text = "".join(f"# of {key}\n{key}: {value}\n\n" for key, value in keys.items())
    found = migrate("z: 0\n" + text)
    after = yaml.safe_load(found.after)
    assert not changes(after) and refusals(after) == list(found.undecided)
    assert [line for line in found.after.splitlines() if line.startswith("#")] == [
        f"# of {key}" for key in keys
    ]


@pytest.mark.full
def test_all_keys_are_refused_at_once_and_without_a_traceback() -> None:
    """Before Axolotl, which knows no `fsdp_…` beside a missing `fsdp_version`."""
    refused = subprocess.run(
        [
            sys.executable,
            "-c",
            "from axolotl.integrations.protrain import ProTrainPlugin\n"
            f"keys = {{'base_model': 'a/b', 'plugins': ['{PLUGIN}'], 'tiled_mlp': True,"
            " 'fsdp': ['full_shard'],"
            " 'fsdp_config': {'a': 1}, 'fsdp_final_state_dict_type': 'FULL'}\n"
            "ProTrainPlugin().register(keys)",
        ],
        capture_output=True,
        text=True,
    )
    first, second, *rest = refused.stderr[
        refused.stderr.index("ConfigError") :
    ].splitlines()
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert first.startswith("ConfigError: `tiled_mlp: true` adds up the gradients")
    assert second.endswith(": `fsdp`, `fsdp_config`, `fsdp_final_state_dict_type`.")
    assert len(rest) == 1 and "axolotl protrain migrate" in rest[0]
