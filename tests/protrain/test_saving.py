"""What a paged run leaves on disk is what a plain one leaves, and either resumes it."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import SafetensorError
from saving_jobs import (
    LORA,
    OFF,
    OTHER_PLAN,
    PAGED,
    REPORT,
    Jobs,
    difference,
    load,
    same_bits,
    tiny_llama,
    wait_for_steps,
    weights,
)
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from axolotl.integrations.protrain.core.checkpoint import (
    require_space,
    whole_or_nothing,
)
from axolotl.integrations.protrain.core.errors import CheckpointError
from axolotl.integrations.protrain.core.layout import build_layout
from axolotl.integrations.protrain.core.runtime import CpuDevice, open_device
from axolotl.integrations.protrain.core.search import Budget, plan_by_hand
from axolotl.integrations.protrain.core.session import Options, Session

LORA_PAGED = {**LORA, **PAGED, "protrain_capacity_bytes": "800KiB"}
BF16 = {**OTHER_PLAN, "bf16": True}
MASTER = {**BF16, "protrain_fp32_master": True}
MASTER_OTHER = {**MASTER, "protrain_n_persist_override": 3}
MASTER_OTHER["protrain_n_buffer_override"] = 1

RESUMED: dict[str, tuple[dict[str, Any], str, str]] = {
    "full_same": (PAGED, "full_paged", "full_plain"),
    "full_other": (OTHER_PLAN, "full_paged", "full_plain"),
    "full_to_plain": (OFF, "full_paged", "full_plain"),
    "full_from_plain": (PAGED, "full_plain", "full_plain"),
    "lora_same": (LORA_PAGED, "lora_paged", "lora_plain"),
    "lora_other": ({**LORA, **OTHER_PLAN}, "lora_paged", "lora_plain"),
    "lora_to_plain": ({**LORA, **OFF}, "lora_paged", "lora_plain"),
    "lora_from_plain": (LORA_PAGED, "lora_plain", "lora_plain"),
    "master_same": (MASTER, "master", "master"),
    "master_other": (MASTER_OTHER, "master", "master"),
}
"""Settings of the second half, the run whose first half it continues, and the run in
one go that both must equal."""

INTERRUPTED = {
    "interrupt_early": (PAGED, 1, 0.0),
    "interrupt_later": (OTHER_PLAN, 4, 0.03),
    "interrupt_lora": (LORA_PAGED, 2, 0.01),
}
"""Settings, logged steps to wait for, seconds to wait after that."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Every run of this file; all of them are started here, in the background."""
    jobs = Jobs(tmp_path_factory.mktemp("saving"))
    jobs.train("full_plain", OFF)
    jobs.train("full_paged", PAGED)
    jobs.train("interrupt_shell", MANY, PAGED, watch=interrupt(2, 0.02), shell=True)
    jobs.train("lora_plain", LORA, OFF)
    jobs.train("lora_paged", LORA_PAGED)
    jobs.train("bf16", BF16)
    jobs.train("master", MASTER)
    for name, (settings, first, _) in RESUMED.items():
        jobs.train(name, settings, resume(first), after=[first])
    jobs.train("to_master", MASTER, resume("bf16"), after=["bf16"])
    jobs.train("from_master", BF16, resume("master"), after=["master"])
    for name, spoil in (("renamed", rename_a_parameter), ("short", drop_a_parameter)):
        jobs.train(
            name,
            PAGED,
            resume(f"{name}_source"),
            before=copy_checkpoint("full_paged", f"{name}_source", spoil),
            after=["full_paged"],
        )
    jobs.train("stateless", PAGED, {"protrain_save_optimizer_state": False})
    jobs.train("from_stateless", PAGED, resume("stateless"), after=["stateless"])
    for name, (settings, steps, delay) in INTERRUPTED.items():
        jobs.train(name, MANY, settings, watch=interrupt(steps, delay))
    add_other_commands(jobs)
    for name, limit in FULL_DISK.items():
        jobs.train(
            name,
            PAGED,
            resume(name),
            before=copy_checkpoint("full_paged", name),
            after=["full_paged"],
            file_limit=limit,
        )
    yield jobs
    jobs.close()


def resume(run: str) -> dict[str, str]:
    return {"resume_from_checkpoint": f"{run}/checkpoint-2"}


def copy_checkpoint(
    run: str, target: str, change: Callable[[Path], None] = lambda folder: None
) -> Callable[[Path], None]:
    """Copies the first half of `run` to the folder `target` before a job."""

    def copy(folder: Path) -> None:
        ours = folder / target / "checkpoint-2"
        shutil.copytree(folder / run / "checkpoint-2", ours)
        change(ours)

    return copy


# ------------------------------------------------------- what a checkpoint consists of


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_checkpoints_are_those_of_the_plain_run(jobs: Jobs, kind: str) -> None:
    ours, plain = jobs[f"{kind}_paged"].finished, jobs[f"{kind}_plain"].finished
    assert ours.paged and not plain.paged
    assert same_checkpoint(ours.folder, plain.folder, step=2) is None
    assert same_checkpoint(ours.folder, plain.folder, step=4) is None
    assert difference(weights(ours.folder), weights(plain.folder)) is None
    assert ours.history(4) == plain.history(4)
    assert files(ours.folder) - files(plain.folder) == {"protrain"}


@pytest.mark.parametrize("step", [2, 4, None])
def test_a_full_checkpoint_loads_without_the_plugin(
    jobs: Jobs, step: int | None
) -> None:
    folder = jobs["full_paged"].finished.folder
    folder = folder / f"checkpoint-{step}" if step else folder
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(loading.values()), loading
    plain = LlamaForCausalLM(tiny_llama())
    assert list(model.state_dict()) == list(plain.state_dict())
    saved = weights(folder)
    assert all(same_bits(p.data, saved[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("step", [2, 4, None])
def test_an_adapter_loads_without_the_plugin(jobs: Jobs, step: int | None) -> None:
    folder = jobs["lora_paged"].finished.folder
    folder = folder / f"checkpoint-{step}" if step else folder
    base = AutoModelForCausalLM.from_pretrained(jobs.folder / "model")
    model = PeftModel.from_pretrained(base, str(folder))
    loaded = {n.replace(".default", ""): p for n, p in model.named_parameters()}
    saved = weights(folder)
    assert saved.keys() == {name for name in loaded if "lora_" in name}
    assert all(same_bits(loaded[name].data, saved[name]) for name in saved)


def same_checkpoint(ours: Path, plain: Path, step: int) -> str | None:
    """The first difference between two checkpoints."""
    ours, plain = (folder / f"checkpoint-{step}" for folder in (ours, plain))
    if files(ours) != files(plain):
        return f"files {files(ours) ^ files(plain)}"
    return (
        difference(weights(ours), weights(plain), "model")
        or difference(optimizer(ours), optimizer(plain), "optimizer")
        or difference(load(ours / "scheduler.pt"), load(plain / "scheduler.pt"))
    )


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def optimizer(checkpoint: Path) -> dict[str, Any]:
    """optimizer.pt without the names, which only a paged run adds for its own check."""
    state = load(checkpoint / "optimizer.pt")
    for group in state["param_groups"]:
        group.pop("param_names", None)
    return state


# ------------------------------------------------------------------------------ resume


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_run_in_one_go(jobs: Jobs, name: str) -> None:
    settings, _, whole = RESUMED[name]
    ours, expected = jobs[name].finished, jobs[whole].finished
    assert ours.paged is settings.get("protrain_auto_memory", True)
    assert ours.history(4) == expected.history(4)
    assert same_checkpoint(ours.folder, expected.folder, step=4) is None
    assert difference(weights(ours.folder), weights(expected.folder)) is None


def test_masters_change_the_result(jobs: Jobs) -> None:
    """Otherwise the tests of resuming with masters show nothing."""
    master, bf16 = jobs["master"].finished, jobs["bf16"].finished
    assert difference(weights(master.folder), weights(bf16.folder)) is not None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "to_master",
            "optimizer.pt was written without fp32 master weights: resume with "
            "protrain_fp32_master: false",
        ),
        (
            "from_master",
            "optimizer.pt was written with fp32 master weights: resume with "
            "protrain_fp32_master: true",
        ),
        ("renamed", "optimizer.pt belongs to other parameters"),
        ("short", "optimizer.pt belongs to other parameters"),
    ],
)
def test_a_state_of_another_kind_is_refused(
    jobs: Jobs, name: str, message: str
) -> None:
    refused = jobs[name]
    assert refused.exit_code == 1
    assert f"CheckpointError: {message}" in refused.log
    assert not (refused.folder / "checkpoint-4").exists()


def rename_a_parameter(checkpoint: Path) -> None:
    state = load(checkpoint / "optimizer.pt")
    state["param_groups"][0]["param_names"][3] += "_of_another_model"
    torch.save(state, checkpoint / "optimizer.pt")


def drop_a_parameter(checkpoint: Path) -> None:
    state = load(checkpoint / "optimizer.pt")
    group = state["param_groups"][0]
    del state["state"][group["params"].pop()]
    group["param_names"].pop()
    torch.save(state, checkpoint / "optimizer.pt")


def test_the_optimizer_state_may_be_left_out(jobs: Jobs) -> None:
    ours, plain = jobs["stateless"].finished, jobs["full_plain"].finished
    assert ours.paged
    assert "hold no optimizer state: a resumed run restarts it" in ours.log
    assert not list(ours.folder.rglob("optimizer.pt"))
    assert difference(weights(ours.folder), weights(plain.folder)) is None


def test_resuming_without_optimizer_state_trains_on(jobs: Jobs) -> None:
    first, second = jobs["stateless"].finished, jobs["from_stateless"].finished
    assert second.paged
    assert [entry["step"] for entry in second.history(4)] == [1, 2, 3, 4]
    assert second.history(4)[2]["loss"] == first.history(4)[2]["loss"]
    assert second.history(4)[3]["loss"] != first.history(4)[3]["loss"]


# ------------------------------------------------------------------------------ Ctrl-C

MANY = {"max_steps": 500, "save_strategy": "no"}


def interrupt(num_steps: int, delay_s: float) -> Callable[[int, Path], None]:
    """A person who presses Ctrl-C that long after that many steps were logged."""

    def press(process_id: int, log: Path) -> None:
        wait_for_steps(log, num_steps, process_id)
        time.sleep(delay_s)
        os.kill(process_id, signal.SIGINT)

    return press


@pytest.mark.parametrize("name", ["interrupt_shell", *INTERRUPTED])
def test_ctrl_c_saves_the_weights_of_the_moment(jobs: Jobs, name: str) -> None:
    ended = jobs[name]
    assert ended.exit_code == 0, ended.log[-3000:]
    assert 1 <= ended.log.count("'loss'") < 100
    assert ended.paged
    adapter = name == "interrupt_lora"
    saved = weights(ended.folder)
    initial = weights(jobs.folder / ("adapter" if adapter else "model"))
    assert saved.keys() == initial.keys()
    for tensor in saved.values():
        # poison is on: a slot read in place of the host copy would be NaN
        assert torch.isfinite(tensor).all() and tensor.abs().max() < 10
    changed = [name for name in saved if not same_bits(saved[name], initial[name])]
    assert changed == list(saved)
    base = AutoModelForCausalLM.from_pretrained(
        jobs.folder / "model" if adapter else ended.folder
    )
    if adapter:
        PeftModel.from_pretrained(base, str(ended.folder))


# ---------------------------------------------------------------------- other commands


def add_other_commands(jobs: Jobs) -> None:
    """The same YAML with other commands than train."""
    for method in ("memory_efficient", "legacy"):
        adapter = {"lora_model_dir": "lora_paged"}
        jobs.command(
            f"merge_{method}",
            "merge_lora",
            LORA_PAGED,
            adapter,
            arguments=[f"--merge_method={method}"],
            after=["lora_paged"],
        )
    split = {"val_set_size": 0.2}
    jobs.command("evaluate_on", "evaluate", PAGED, split)
    jobs.command("evaluate_off", "evaluate", OFF, split, after=["evaluate_on"])
    jobs.command("inference", "inference", PAGED, stdin="7 squared is\n")


@pytest.mark.parametrize(
    "name",
    ["prepare", "merge_memory_efficient", "merge_legacy", "evaluate_on", "inference"],
)
def test_only_training_pages(jobs: Jobs, name: str) -> None:
    ended = jobs[name].finished
    assert "Plugin loaded successfully" in ended.log
    assert "ProTrain plan" not in ended.log
    assert not (ended.folder / REPORT).exists()


def test_preprocess_prepares_the_data(jobs: Jobs) -> None:
    assert list((jobs["prepare"].finished.folder.parent / "prepared").glob("*/*.arrow"))
    log = jobs["full_paged"].finished.log
    assert "Loading prepared dataset from disk" in log


@pytest.mark.parametrize("method", ["memory_efficient", "legacy"])
def test_an_adapter_merges(jobs: Jobs, method: str) -> None:
    merged = weights(jobs[f"merge_{method}"].finished.folder / "merged")
    base = weights(jobs.folder / "model")
    adapter = weights(jobs["lora_paged"].folder)
    assert merged.keys() == base.keys()
    for name, tensor in base.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in adapter:
            a, b = (adapter[f"{prefix}.lora_{half}.weight"] for half in "AB")
            scale = LORA["lora_alpha"] / LORA["lora_r"]
            tensor = tensor + scale * b @ a
            assert not torch.equal(merged[name], base[name])
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-6)


def test_evaluation_is_that_of_the_plain_command(jobs: Jobs) -> None:
    losses = [
        {row["metric"]: row for row in csv.DictReader(stream)}["loss"]
        for name in ("evaluate_on", "evaluate_off")
        for stream in (jobs[name].finished.folder / "eval_summary.csv").open(),
    ]
    assert losses[0] == losses[1]
    assert 0 < float(losses[0]["validation"]) < 10


def test_inference_answers(jobs: Jobs) -> None:
    log = jobs["inference"].finished.log
    assert "Give me an instruction" in log and "7 squared is" in log


# --------------------------------------------------------------------------- full disk

FULL_DISK = {"full_at_model": 500_000, "full_at_optimizer": 1_000_000}
"""Bytes that a file may have; the model has 729,000, the optimizer state 1,480,000."""


@pytest.mark.parametrize("name", FULL_DISK)
def test_a_full_disk_leaves_no_half_checkpoint(jobs: Jobs, name: str) -> None:
    ended = jobs[name]
    assert ended.exit_code == 1
    (line,) = {x for x in ended.log.splitlines() if "CheckpointError: " in x}
    assert "output_dir: writing" in line and f"{name}/checkpoint-4 failed" in line
    assert "resume from the last one" in line
    assert {"checkpoint-2", "protrain"} <= files(ended.folder)
    assert "checkpoint-4" not in files(ended.folder)
    plain = jobs["full_plain"].finished.folder
    assert same_checkpoint(ended.folder, plain, step=2) is None
    AutoModelForCausalLM.from_pretrained(ended.folder / "checkpoint-2")


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), RuntimeError("x"), SafetensorError("x")],
    ids=lambda error: type(error).__name__,
)
def test_a_failed_write_removes_its_folder_only(
    tmp_path: Path, error: Exception
) -> None:
    earlier, folder = tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"
    earlier.mkdir()
    with pytest.raises(CheckpointError, match=f"output_dir: writing {folder} failed"):
        with whole_or_nothing(folder):
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(b"half")
            raise error
    assert files(tmp_path) == {"checkpoint-2"}


@pytest.mark.parametrize("folder", [".", "not/there/yet"])
def test_room_is_asked_for_before_training(tmp_path: Path, folder: str) -> None:
    require_space(tmp_path / folder, 0)
    with pytest.raises(CheckpointError) as caught:
        require_space(tmp_path / folder, 1 << 60)
    message = str(caught.value)
    assert message.startswith("output_dir: ") and f"{1 << 60:,}"[:5] in message
    for way_out in ("save_total_limit", "protrain_save_optimizer_state: false"):
        assert way_out in message


# ------------------------------------------------------- the model object as one has it

PLANS = [(0, 1, 0), (1, 2, 2), (2, 2, 4)]
ROOMY = Budget(device_bytes=1 << 40, reserve_bytes=0, host_bytes=1 << 40)
TOKENS = torch.arange(3, 35).reshape(2, 16)


class Pair:
    """A model and its paged twin, each with its optimizer, treated alike."""

    def __init__(
        self,
        knobs: tuple[int, int, int] = (0, 2, 0),
        device: CpuDevice | None = None,
        capacity: Budget = ROOMY,
    ) -> None:
        self.plain, self.paged = llama(seed=1), llama(seed=1)
        layout = build_layout(self.paged)
        plan = plan_by_hand(layout, capacity, *knobs, fp32_master=False)
        device = device or open_device(torch.device("cpu"))
        self.session = Session(
            self.paged, layout, plan, device, Options(poison=True)
        )
        self._optimizers = (
            adamw(self.plain),
            self.session.wrap_optimizer(adamw(self.paged)),
        )

    def on_both(self, action: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
        return action(self.paged), action(self.plain)

    def backward(self) -> None:
        self.on_both(lambda model: loss(model).backward())

    def step(self) -> None:
        for optimizer, model in zip(
            self._optimizers, (self.plain, self.paged), strict=True
        ):
            optimizer.step()
            model.zero_grad()


def llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(tiny_llama())


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def loss(model: nn.Module) -> Tensor:
    return model(input_ids=TOKENS, labels=TOKENS).loss


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=TOKENS).logits


def generated(model: Any) -> Tensor:
    return model.generate(TOKENS[:, :4], max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("knobs", PLANS)
def test_after_training_the_model_is_an_ordinary_one(
    tmp_path: Path, knobs: tuple[int, int, int]
) -> None:
    pair = Pair(knobs)
    before = dict(pair.paged.named_parameters())
    for _ in range(2):
        pair.backward()
        pair.step()
    pair.session.close()
    after = dict(pair.paged.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert all(p.device.type == "cpu" and p.is_leaf for p in after.values())
    assert len({p.untyped_storage().data_ptr() for p in after.values()}) == len(after)
    assert difference(*pair.on_both(lambda model: dict(model.state_dict()))) is None
    pair.paged.save_pretrained(tmp_path)
    assert difference(weights(tmp_path), dict(pair.plain.state_dict())) is None
    pair.backward()
    assert difference(*pair.on_both(gradients)) is None


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("trained_before", [False, True])
def test_loading_reaches_the_host_copies(trained_before: bool) -> None:
    pair = Pair()
    if trained_before:
        pair.backward()
        pair.step()
    other = llama(seed=2).state_dict()
    pair.on_both(lambda model: model.load_state_dict(other))
    assert difference(dict(pair.paged.state_dict()), dict(other)) is None
    assert difference(*pair.on_both(logits)) is None
    pair.backward()
    pair.step()
    assert difference(*pair.on_both(logits)) is None
    pair.session.close()
    assert difference(*pair.on_both(lambda model: dict(model.state_dict()))) is None


def test_part_of_a_state_can_be_loaded() -> None:
    pair = Pair()
    other = {k: v for k, v in llama(seed=2).state_dict().items() if ".2.mlp" in k}
    pair.on_both(lambda model: model.load_state_dict(other, strict=False))
    assert difference(*pair.on_both(lambda model: dict(model.state_dict()))) is None
    assert difference(*pair.on_both(logits)) is None
    pair.session.close()


@pytest.mark.parametrize("read", ["state_dict", "logits", "host_weight", "close"])
def test_reading_waits_for_queued_updates(read: str) -> None:
    pair = Pair()
    pair.backward()
    # each host update is long enough to be caught pending
    slow = register_optimizer_step_pre_hook(lambda *_: time.sleep(0.05))
    try:
        pair.step()
        if read == "close":
            pair.session.close()
        if read == "logits":
            assert difference(*pair.on_both(logits)) is None
        elif read == "host_weight":
            for name, param in pair.plain.named_parameters():
                assert same_bits(pair.session.host_weight(name), param.data)
        else:
            states = pair.on_both(lambda model: dict(model.state_dict()))
            assert difference(*states) is None
    finally:
        slow.remove()
        pair.session.close()


@pytest.mark.parametrize("knobs", PLANS)
def test_evaluation_and_generation_fit_in_anywhere(
    knobs: tuple[int, int, int],
) -> None:
    pair = Pair(knobs)

    def look() -> None:
        for action in (logits, generated, logits, loss):
            assert difference(*pair.on_both(action)) is None

    for _ in range(2):
        look()
        held = pair.on_both(loss)
        look()
        for value in held:
            value.backward()
        look()
        pair.backward()
        # one block alone, as a probe would run it
        assert difference(*pair.on_both(last_block)) is None
        pair.step()
        look()
    assert difference(*pair.on_both(lambda model: dict(model.state_dict()))) is None
    pair.session.close()
    look()


@torch.no_grad()
def last_block(model: Any) -> Tensor:
    hidden = torch.linspace(-1, 1, 2 * 16 * 64).reshape(2, 16, 64)
    positions = model.model.rotary_emb(hidden, torch.arange(16)[None])
    return model.model.layers[3](hidden, position_embeddings=positions)


class Onlooker(CpuDevice):
    """A signal handler that saves the model at each step of opening and closing."""

    def __init__(self) -> None:
        super().__init__()
        self.look: Callable[[], None] = lambda: None

    def allocate(self, nbytes: int) -> Tensor:
        self.look()
        return super().allocate(nbytes)

    def place(self, tensor: Tensor) -> Tensor:
        self.look()
        return super().place(tensor)

    def pin(self, host: Tensor) -> None:
        self.look()

    def unpin(self, host: Tensor) -> None:
        self.look()

    def synchronize(self) -> None:
        self.look()


def test_the_state_is_true_while_the_session_opens_and_closes() -> None:
    """Ctrl-C saves whatever the state dict says at that moment."""
    device = Onlooker()
    model = llama(seed=1)
    true = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen: list[str | None] = []
    device.look = lambda: seen.append(difference(dict(model.state_dict()), true))
    layout = build_layout(model)
    plan = plan_by_hand(layout, ROOMY, 0, 2, 0, fp32_master=False)
    session = Session(model, layout, plan, device, Options(poison=True))
    session.close()
    assert len(seen) > 10
    assert set(seen) == {None}
