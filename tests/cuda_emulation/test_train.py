"""`axolotl train` on the emulated device: the demo, and the allocator beside predictions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from axolotl.integrations.protrain.core.planner.hardware import measured_unseen_bytes

CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples/.demo"
WITHIN = 0.03
ENV = {
    **os.environ,
    "FAKECUDA_RANDOM_COPY_US": "0",
    "FAKECUDA_RANDOM_WORK_US": "0",
    "HF_HUB_OFFLINE": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
}
LORA: dict[str, Any] = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16}
# no Triton here
LORA |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
LORA |= {"lora_target_linear": True}
PLANS: dict[str, dict[str, Any]] = {
    "two slots": {"n_persist": 0, "n_buffer": 2, "n_swap": 0, "n_checkpoint": 0},
    "three slots": {"n_persist": 0, "n_buffer": 3, "n_swap": 0, "n_checkpoint": 0},
    "recompute": {"n_persist": 0, "n_buffer": 2, "n_swap": 0, "n_checkpoint": 12},
    "some recompute": {"n_persist": 0, "n_buffer": 2, "n_swap": 0, "n_checkpoint": 5},
    "swap": {"n_persist": 0, "n_buffer": 2, "n_swap": 3, "n_checkpoint": 0},
    "swap, recompute": {"n_persist": 0, "n_buffer": 2, "n_swap": 2, "n_checkpoint": 6},
    "half resident": {"n_persist": 6, "n_buffer": 2, "n_swap": 0, "n_checkpoint": 6},
    "LoRA": {"n_persist": 0, "n_buffer": 2, "n_swap": 0, "n_checkpoint": 0, **LORA},
    "LoRA, recompute": {"n_persist": 4, "n_buffer": 2, "n_checkpoint": 12, **LORA},
    "LoRA, half resident": {"n_persist": 6, "n_buffer": 2, **LORA},
}


@pytest.fixture(scope="session")
def demo() -> dict[str, Any]:
    """Paged beside plain by the demo itself; the YAML of its paged run."""
    subprocess.run(
        [sys.executable, str(ROOT / "examples/demo.py"), "--steps", "3"],
        env=ENV,
        check=True,
    )
    keys = yaml.safe_load((DEMO / "paged.yaml").read_text("utf-8"))
    return {k: v for k, v in keys.items() if not k.endswith("capacity_bytes")}


def trained(keys: dict[str, Any], folder: Path, plan: str) -> tuple[int, int]:
    """Bytes of the peak that torch's allocator should count, and those that it does."""
    keys = {**keys, "output_dir": str(folder / "out"), "max_steps": 4}
    for key, value in PLANS[plan].items():
        keys[f"protrain_{key}_override" if key.startswith("n_") else key] = value
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(keys), "utf-8")
    axolotl = [str(Path(sys.executable).parent / "axolotl"), "train", str(path)]
    subprocess.run(
        [sys.executable, *axolotl, "--launcher=python"],
        env={**ENV, "CUDA_VISIBLE_DEVICES": "0"},
        cwd=ROOT,
        check=True,
    )
    report = json.loads((folder / "out/protrain/report.json").read_text())
    told = report["device_bytes"]
    unseen = measured_unseen_bytes(CUDA, told["budget"] + told["reserve"])
    predicted = told["peak"] - unseen
    counted = report["measured"]["device_peak_bytes"]
    print(f"{plan}: predicted {predicted:,}, counted {counted:,}")
    return predicted, counted


@pytest.mark.parametrize("plan", PLANS)
def test_the_allocator_counts_what_was_predicted(
    plan: str, demo: dict[str, Any], tmp_path: Path
) -> None:
    predicted, counted = trained(demo, tmp_path, plan)
    assert counted == pytest.approx(predicted, rel=WITHIN)


def test_a_run_plans_with_the_peak_of_an_earlier_one(
    demo: dict[str, Any], tmp_path: Path
) -> None:
    plugins = [*demo["plugins"], "failing_plugin.TakeUnseen"]
    keys = {**demo, "plugins": plugins, "protrain_cache_dir": str(tmp_path / "cache")}
    predicted, counted = trained(keys, tmp_path, "two slots")
    assert counted > (1 + WITHIN) * predicted
    predicted, counted = trained(keys, tmp_path, "two slots")
    assert counted == pytest.approx(predicted, rel=WITHIN)


ROWS = [
    {"prompt": prompt, "chosen": "", "rejected": "", "completion": "", "label": True}
    for prompt in ("page slot", "host", "copy the chunk", "stream of events")
]
SAMPLING: dict[str, Any] = {
    "rl": "grpo",
    "datasets": [
        {
            "path": "rows.jsonl",
            "ds_type": "json",
            "split": "train",
            "type": "answers.rows",
        }
    ],
    "trl": {
        "reward_funcs": ["answers.vowels"],
        "num_generations": 4,
        "max_completion_length": 24,
        "beta": 0.1,
    },
    "remove_unused_columns": False,
    "sample_packing": False,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_steps": 3,
    "dataset_prepared_path": "prepared",
}


def both(
    demo: dict[str, Any], folder: Path, keys: dict[str, Any], *plugins: str
) -> list[list[Any]]:
    """What a paged run and a plain one have logged."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    keys = {k: v for k, v in demo.items() if k != "test_datasets"} | SAMPLING | keys
    keys |= {k: str(ROOT / v) for k, v in keys.items() if "demo/" in str(v)}
    keys |= {"val_set_size": 0, "plugins": [*keys["plugins"], *plugins]}
    modes: dict[str, dict[str, Any]] = {
        "paged": {"protrain_n_persist_override": 0, "protrain_n_buffer_override": 2},
        "plain": {"protrain_auto_memory": False},
    }
    found = []
    for name, mode in modes.items():
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(keys | mode | {"output_dir": name}), "utf-8")
        axolotl = [str(Path(sys.executable).parent / "axolotl"), "train", str(path)]
        modules = os.pathsep.join([str(ROOT / "tests/protrain"), *sys.path])
        subprocess.run(
            [sys.executable, *axolotl, "--launcher=python"],
            env={**ENV, "CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": modules},
            cwd=folder,
            check=True,
        )
        states = sorted((folder / name).glob("checkpoint-*/trainer_state.json"))
        history = json.loads(states[-1].read_text())["log_history"]
        found.append(
            [(e.get("loss"), e.get("reward"), e.get("grad_norm")) for e in history]
        )
    return found


def test_answers_are_those_of_plain(demo: dict[str, Any], tmp_path: Path) -> None:
    """Only this sees a token drawn from logits of a chunk that was let go too early."""
    paged, plain = both(demo, tmp_path, LORA, "sampling_plugin.TorchScores")
    assert paged == plain
    report = json.loads((tmp_path / "paged/protrain/report.json").read_text())
    assert report["generated"]["phases"] == 3


@pytest.mark.parametrize("base", [{}, LORA], ids=["full", "LoRA"])
def test_a_server_gets_the_weights_of_plain(
    base: dict[str, Any], demo: dict[str, Any], tmp_path: Path
) -> None:
    """Only this sees weights that are sent, or merged, before they are on the device."""
    trl = SAMPLING["trl"] | {"use_vllm": True, "vllm_mode": "server"}
    plugins = "sampling_plugin.TorchScores", "served_plugin.ServedPlugin"
    paged, plain = both(demo, tmp_path, base | {"trl": trl}, *plugins)
    assert paged == plain
    got, wanted = (
        json.loads((tmp_path / name / "served.json").read_text())
        for name in ("paged", "plain")
    )
    assert got == wanted and len(got["syncs"]) == 3
    report = json.loads((tmp_path / "paged/protrain/report.json").read_text())
    assert report["sent"]["times"] == 3
    told = report["device_bytes"]
    if base:
        # without a reference, which counts as what no trace sees
        unseen = measured_unseen_bytes(CUDA, told["budget"] + told["reserve"])
        predicted = told["phases"]["sending"] - unseen
        assert 0.9 < report["sent"]["device_bytes"] / predicted < 1 + WITHIN


FP16: dict[str, Any] = LORA | {"fp16": True, "max_steps": 6}
MODES: dict[str, dict[str, Any]] = {
    "paged": {"protrain_n_persist_override": 0, "protrain_n_buffer_override": 2},
    "plain": {"protrain_auto_memory": False},
}


def launched(keys: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    """`axolotl train` in a folder."""
    paths = {k: v for k, v in keys.items() if str(v).startswith("examples/")}
    keys |= {k: str(ROOT / v) for k, v in paths.items()}
    keys["datasets"] = [d | {"path": str(ROOT / d["path"])} for d in keys["datasets"]]
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(keys | {"output_dir": str(folder / "out")}), "utf-8")
    axolotl = [str(Path(sys.executable).parent / "axolotl"), "train", str(path)]
    return subprocess.run(
        [sys.executable, *axolotl, "--launcher=python"],
        env={
            **ENV,
            "CUDA_VISIBLE_DEVICES": "0",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/protrain"), *sys.path]),
        },
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_a_base_for_several_ranks_is_loaded_to_the_host(
    demo: dict[str, Any], tmp_path: Path
) -> None:
    """A YAML may ask Axolotl to move it to the card; on a CPU nobody sees that."""
    keys = {"max_steps": 1, "plugins": [*demo["plugins"], "scaling_plugin.OnTheHost"]}
    keys |= {"ddp": True, "experimental_skip_move_to_device": False}
    ran = launched(demo | LORA | MODES["paged"] | keys, tmp_path)
    assert not ran.returncode, ran.stderr[-3000:]


def test_fp16_scales_as_plain_does(demo: dict[str, Any], tmp_path: Path) -> None:
    """First steps overflow and are left out, on a card whose scaler is accelerate's."""
    scaling = ["scaling_plugin.OverflowingPlugin", "scaling_plugin.SeededPlugin"]
    histories, states = [], []
    for name, mode in MODES.items():
        folder = tmp_path / name
        folder.mkdir()
        own = {"plugins": demo["plugins"] + scaling, "save_only_model": False}
        ran = launched(demo | FP16 | mode | own, folder)
        assert not ran.returncode, ran.stderr[-3000:]
        (saved,) = (folder / "out").glob("checkpoint-*")
        log = json.loads((saved / "trainer_state.json").read_text())["log_history"]
        histories.append([(e.get("loss"), e.get("grad_norm")) for e in log])
        files = "adapter_model.safetensors", "scaler.pt"
        states.append([(saved / file).read_bytes() for file in files])
    assert histories[0] == histories[1] and states[0] == states[1]
    assert None in [norm for loss, norm in histories[0] if loss and loss < 100]


def test_fp16_without_an_adapter_is_refused_by_torch(
    demo: dict[str, Any], tmp_path: Path
) -> None:
    """Why ProTrain refuses it, too."""
    ran = launched(demo | {"fp16": True, "max_steps": 1} | MODES["plain"], tmp_path)
    assert "Attempting to unscale FP16 gradients" in ran.stderr
