"""The public face: `page` around a plain torch loop, and `plan` without weights."""

from __future__ import annotations

import copy
import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from api_on_ranks import CASES, Loop, by_trainer, scaled
from core_models import (
    Stack,
    adamw,
    assert_same,
    batches,
    freeze,
    hook_counts,
    stack,
    twin,
    weights,
)
from torch import Tensor, nn

from axolotl.integrations.protrain.core import Paged, gpu, page, plan
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.errors import (
    AccessError,
    BudgetError,
    ConfigError,
    LayoutError,
    ProTrainError,
)
from axolotl.integrations.protrain.core.types import Knobs, Update

ALL_PAGED = Knobs(n_persist=0, n_buffer=2, n_swap=0, n_checkpoint=3)
EXAMPLE = batches(1)[0]


@pytest.fixture(autouse=True)
def cache_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def paged(model: nn.Module, optimizer: torch.optim.Optimizer, **other: Any) -> Paged:
    """All blocks paged, and no rate measured."""
    known = {
        "example": EXAMPLE,
        "budget": "1GiB",
        "host_budget": "1GiB",
        "knobs": ALL_PAGED,
        "hardware": gpu("RTX 4090"),
        "device": "cpu",
    }
    return page(model, optimizer, **{**known, **other})


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[float], Tensor] | None,
    data: list[Tensor],
    accumulation: int = 1,
    autocast: bool = False,
) -> list[float]:
    """A plain loop; losses and norms."""
    numbers = []
    model.train()
    for number, tokens in enumerate(data, 1):
        region = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
        with region:
            loss = model(tokens) / accumulation
        loss.backward()
        numbers.append(loss.item())
        if number % accumulation == 0:
            if clip is not None:
                numbers.append(clip(0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    return numbers


def plain_clip(model: nn.Module) -> Callable[[float], Tensor]:
    return lambda most: nn.utils.clip_grad_norm_(model.parameters(), most)


def test_frozen_weights_may_lie_on_a_disk(tmp_path: Path) -> None:
    """`host_budget` is a byte short of what keeps them in memory."""
    model = stack()
    freeze(model)
    other = twin(model)
    optimizer, plain = adamw(model), adamw(other)
    with paged(model, optimizer) as run:
        needed = run.forecast.host.peak_bytes
    with paged(model, optimizer, disk=tmp_path, host_budget=needed - 1) as run:
        assert run.forecast.plan.on_disk
        ours = steps(model, optimizer, run.clip_grad_norm_, batches(3))
        assert run.measured().disk_bytes
    assert ours == steps(other, plain, plain_clip(other), batches(3))
    assert_same(weights(model), weights(other))


def test_host_memory_of_gradients_goes_with_the_end() -> None:
    """Though its name lives on, as in a notebook, whose next `page` needs the room."""
    model = stack()
    optimizer = adamw(model)
    with paged(model, optimizer) as run:
        steps(model, optimizer, run.clip_grad_norm_, batches(2))
        fetched = run.measured().fetched_bytes
    gc.collect()
    assert not any(isinstance(each, Session) for each in gc.get_objects())
    assert run.measured().fetched_bytes >= fetched


def test_a_default_device_changes_nothing() -> None:
    model = stack()
    other = twin(model)
    optimizer, plain = adamw(model), adamw(other)
    with torch.device("meta"):
        run = paged(model, optimizer)
    ours = steps(model, optimizer, run.clip_grad_norm_, batches(2))
    with torch.device("meta"):
        run.close()
    assert ours == steps(other, plain, plain_clip(other), batches(2))
    assert_same(weights(model), weights(other))


def test_the_fastest_plan_under_a_budget_trains_as_the_plain_loop() -> None:
    """Measured, planned and opened as in README: nothing given but text and a batch."""
    model = stack(width=64, inner=256)
    other = twin(model)
    optimizer, plain = adamw(model), adamw(other)
    least = plan(
        model, example=EXAMPLE, optimizer=optimizer, budget="1GiB", device="cpu"
    )
    resident = least.device.peak_bytes
    hooks = hook_counts(model)
    room = int(0.8 * resident)
    with page(
        model, optimizer, example=EXAMPLE, budget=room, host_budget="1GiB", device="cpu"
    ) as run:
        assert run.forecast.plan.mode == "B"
        assert run.forecast.device.peak_bytes <= 0.8 * resident
        assert "n_persist" in str(run.forecast) and "device:" in str(run.forecast)
        ours = steps(model, optimizer, run.clip_grad_norm_, batches(4))
        state = weights(model)
    theirs = steps(other, plain, plain_clip(other), batches(4))
    assert ours == theirs
    assert_same(state, weights(other))
    assert_same(weights(model), weights(other))
    assert hook_counts(model) == hooks and type(optimizer) is type(plain)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["full", "frozen", "tied", "16 bits"])
def test_bits_of_a_loop(kind: str, autocast: bool) -> None:
    model = stack(
        tie=kind == "tied", dtype=torch.bfloat16 if kind == "16 bits" else torch.float32
    )
    if kind == "frozen":
        freeze(model)
    other = twin(model)
    optimizer, plain = adamw(model), adamw(other)
    dtype = torch.bfloat16 if autocast else None
    with paged(model, optimizer, accumulation=2, autocast=dtype) as run:
        ours = steps(model, optimizer, run.clip_grad_norm_, batches(6), 2, autocast)
        with torch.no_grad():
            evaluated = model.eval()(EXAMPLE)
    theirs = steps(other, plain, plain_clip(other), batches(6), 2, autocast)
    assert ours == theirs
    with torch.no_grad():
        assert torch.equal(evaluated, other.eval()(EXAMPLE))
    assert_same(weights(model), weights(other))


@pytest.mark.parametrize("clips", [True, False], ids=["clips", "does not clip"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.parametrize("kind", ["full", "frozen", "tied"])
def test_bits_under_a_scaler(kind: str, fused: bool, clips: bool) -> None:
    """Steps that overflow are left out, the scale grows: in the plain loop and in ours."""
    model = stack(tie=kind == "tied")
    if kind == "frozen":
        freeze(model)
    other = twin(model)
    optimizer, plain = adamw(model, fused=fused), adamw(other, fused=fused)
    found = []
    for scale in (2.0**30, 2.0**16):
        scalers = [torch.amp.GradScaler("cpu", scale, growth_interval=2) for _ in "ab"]
        with paged(model, optimizer, accumulation=2, autocast=torch.float16) as run:
            loop = Loop(model, model, optimizer, run)
            ours = scaled(loop, batches(12), scalers[0], clips)
        theirs = scaled(Loop(other, other, plain), batches(12), scalers[1], clips)
        assert ours == theirs
        found += [number for number in theirs if number > 2.0**10]
    assert found[0] > found[5] and max(found[6:]) > found[6]
    assert_same(weights(model), weights(other))
    states = optimizer.state_dict()["state"], plain.state_dict()["state"]
    for ours, theirs in zip(*map(dict.values, states), strict=True):
        assert_same(ours, theirs)


def test_a_scaler_that_was_not_adapted_is_told_how() -> None:
    model = stack()
    scaler, optimizer = torch.amp.GradScaler("cpu"), adamw(model)
    with paged(model, optimizer, autocast=torch.float16) as run:
        scaler.scale(model(EXAMPLE)).backward()
        with pytest.raises(AccessError, match="gradient of this weight is on the host"):
            scaler.step(optimizer)
        run.adapt(scaler)
        scaler.unscale_(optimizer)
    assert "_unscale_grads_" not in vars(scaler)


@pytest.mark.parametrize("scale", [2.0**10, 2.0**30], ids=["finite", "overflows"])
def test_gradients_that_a_step_has_used_are_those_of_the_plain_loop(
    scale: float,
) -> None:
    """A fused step unscales them in place, or leaves them where it skips; a norm that lacks
    those on the host is refused."""
    found = []
    for pages in (True, False):
        model = stack()
        optimizer, scaler = adamw(model, fused=True), torch.amp.GradScaler("cpu", scale)
        with paged(model, optimizer) if pages else nullcontext() as run:
            if run is not None:
                run.adapt(scaler)
            with torch.autocast("cpu", torch.float16):
                loss = model(EXAMPLE)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            with run.full_params() if run is not None else nullcontext():
                found.append({n: p.grad.clone() for n, p in model.named_parameters()})
            if run is not None:
                with pytest.raises(AccessError, match="is not used twice"):
                    run.clip_grad_norm_(0.5)
                optimizer.zero_grad()
                assert run.clip_grad_norm_(0.5) == 0
    for name, gradient in found[1].items():
        assert torch.equal(*(g.nan_to_num() for g in (found[0][name], gradient))), name


def test_training_goes_on_paged_and_plain(tmp_path: Path) -> None:
    """Plain steps, paged ones, a checkpoint of these, and plain ones again: state of the
    optimizer comes along at each border."""
    model = stack()
    other = twin(model)
    optimizer, plain = adamw(model), adamw(other)
    data = batches(8)
    ours = steps(model, optimizer, plain_clip(model), data[:2])
    with paged(model, optimizer) as run:
        ours += steps(model, optimizer, run.clip_grad_norm_, data[2:4])
        file = tmp_path / "checkpoint.pt"
        torch.save((model.state_dict(), optimizer.state_dict()), file)
    ours += steps(model, optimizer, plain_clip(model), data[4:])
    theirs = steps(other, plain, plain_clip(other), data)
    assert ours == theirs
    resumed = stack(seed=1)
    again = adamw(resumed)
    saved = torch.load(file)
    with paged(resumed, again) as run:
        resumed.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
        steps(resumed, again, run.clip_grad_norm_, data[4:])
    assert_same(weights(resumed), weights(other))


def test_a_trainer_resumes(tmp_path: Path) -> None:
    """Paged, from a checkpoint of itself or of a plain run."""

    def trained(folder: str, pages: bool, resumes_from: str = "") -> Any:
        model = stack(seed=bool(resumes_from))
        optimizer = adamw(model)
        with paged(model, optimizer) if pages else nullcontext() as run:
            loop = Loop(model, model, optimizer, run)
            checkpoint = str(tmp_path / resumes_from / "checkpoint-2")
            numbers = by_trainer(
                loop,
                str(tmp_path / folder),
                checkpoint if resumes_from else None,
                save_strategy="steps",
                save_steps=2,
            )
            state = copy.deepcopy(optimizer.state_dict()["state"])
        return numbers, weights(model), state

    numbers, found, state = trained("plain", pages=False)
    assert len(numbers) == 8
    for folder, resumes_from in (
        ("paged", ""),
        ("from paged", "paged"),
        ("from plain", "plain"),
    ):
        ours, own, its = trained(folder, True, resumes_from)
        assert ours == numbers
        assert_same(own, found)
        for number, tensors in state.items():
            assert_same(its[number], tensors)


@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_a_trainer_in_fp16(clip: float, tmp_path: Path) -> None:
    """Its optimizer is a plain one again afterwards, though accelerate has replaced `step`."""
    found = []
    for pages in (True, False):
        model = stack()
        optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", 2.0**27)
        with paged(model, optimizer) if pages else nullcontext() as run:
            loop = Loop(model, model, optimizer, run)
            numbers = by_trainer(
                loop, str(tmp_path), None, scaler, fp16=True, max_grad_norm=clip
            )
        numbers.append(scaler.get_scale())
        numbers += steps(model, optimizer, plain_clip(model), batches(2))
        found.append((str(numbers), weights(model)))
    assert found[0][0] == found[1][0] and numbers[-5] < 2.0**27
    assert_same(found[0][1], found[1][1])


def test_what_is_looked_at_is_true_and_what_is_written_counts() -> None:
    model = stack()
    other = twin(model)
    optimizer, plain = adamw(model), adamw(other)
    with paged(model, optimizer) as run:
        for each, step, look in (
            (model, optimizer, run.full_params),
            (other, plain, nullcontext),
        ):
            each(EXAMPLE).backward()
            with look():
                for param in each.parameters():
                    param.grad.mul_(0.5)
            step.step()
            step.zero_grad()
            with look(), torch.no_grad():
                each.layers[3].up.weight.add_(1.0)
        with run.full_params():
            assert_same(dict(model.named_parameters()), dict(other.named_parameters()))
        assert_same(weights(copy.deepcopy(model)), weights(other))
        assert steps(model, optimizer, None, batches(2)) == steps(
            other, plain, None, batches(2)
        )
    with run.full_params():
        assert_same(dict(model.named_parameters()), dict(other.named_parameters()))


def test_an_example_may_be_a_mapping_with_a_loss_of_its_own() -> None:
    model = stack()
    other = twin(model)
    optimizer, plain = adamw(model), adamw(other)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["tokens"]) * batch["weight"]

    batch = {"tokens": EXAMPLE, "weight": torch.tensor(2.0)}
    with paged(model, optimizer, example=batch, loss=loss):
        loss(model, batch).backward()
        optimizer.step()
    loss(other, batch).backward()
    plain.step()
    assert_same(weights(model), weights(other))


def test_an_error_in_the_loop_gives_the_model_back() -> None:
    model = stack()
    other = twin(model)
    optimizer, plain = adamw(model), adamw(other)
    with pytest.raises(RuntimeError, match="mine"):
        with paged(model, optimizer) as run:
            steps(model, optimizer, run.clip_grad_norm_, batches(2))
            model(EXAMPLE).backward()
            raise RuntimeError("mine")
    steps(other, plain, plain_clip(other), batches(2))
    assert_same(weights(model), weights(other))
    optimizer.zero_grad()
    ours = steps(model, optimizer, None, batches(2))
    assert ours == steps(other, plain, None, batches(2))


def test_two_models_at_once() -> None:
    models = [stack(seed) for seed in range(2)]
    others = [twin(model) for model in models]
    optimizers, plain = ([adamw(m) for m in each] for each in (models, others))
    with paged(models[0], optimizers[0]) as one, paged(models[1], optimizers[1]) as two:
        for tokens in batches(3):
            for model, optimizer, run in zip(
                models, optimizers, (one, two), strict=True
            ):
                steps(model, optimizer, run.clip_grad_norm_, [tokens])
    for other, optimizer in zip(others, plain, strict=True):
        steps(other, optimizer, plain_clip(other), batches(3))
    for model, other in zip(models, others, strict=True):
        assert_same(weights(model), weights(other))


def test_a_scheduler_of_before_goes_on() -> None:
    model = stack()
    other = twin(model)
    found = []
    for each in (model, other):
        optimizer = adamw(each)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
        with paged(model, optimizer) if each is model else nullcontext():
            for tokens in batches(3):
                found.append(steps(each, optimizer, None, [tokens]))
                rates.step()
    assert found[:3] == found[3:]
    assert_same(weights(model), weights(other))


def test_a_dry_run_needs_no_weights() -> None:
    """The forecast for a card is that of the model with weights, of which nothing changes."""
    real = stack(width=64)
    with torch.device("meta"):
        meta = Stack(width=64)
    card = gpu("RTX 4090", ram="32GiB")
    forecasts = [
        plan(m, example=EXAMPLE, hardware=card, budget="2GiB") for m in (meta, real)
    ]
    assert forecasts[0].plan == forecasts[1].plan
    assert forecasts[0].device == forecasts[1].device
    assert forecasts[0].budget.host_bytes == 32 << 30
    assert all(param.is_meta for param in meta.parameters())
    held = plan(real, example=EXAMPLE, hardware=card, optimizer=adamw(real))
    sgd = torch.optim.SGD(real.parameters())
    less = plan(real, example=EXAMPLE, hardware=card, optimizer=sgd)
    assert less.device.peak_bytes < held.device.peak_bytes
    assert not sgd.state


def test_the_least_budget_that_is_named_is_enough() -> None:
    model = stack(width=64)
    optimizer = adamw(model)
    with pytest.raises(BudgetError, match="budget: no plan fits 64.0 KiB") as refused:
        page(
            model,
            optimizer,
            example=EXAMPLE,
            budget="64KiB",
            host_budget="1GiB",
            device="cpu",
        )
    least = str(refused.value).split('budget="')[1].split('"')[0]
    with page(
        model,
        optimizer,
        example=EXAMPLE,
        budget=least,
        host_budget="1GiB",
        device="cpu",
    ):
        pass
    with pytest.raises(BudgetError, match='host_budget="'):
        page(
            model, optimizer, example=EXAMPLE, budget=least, host_budget=1, device="cpu"
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"budget": None}, "^budget: the CPU device"),
        ({"budget": "22 apples"}, "^budget: .* is not a number of bytes"),
        ({"budget": 0}, "^budget: .* less than one byte"),
        ({"host_budget": "much"}, "^host_budget"),
        ({"example": {}}, "^example: dict holds no tensor"),
        ({"example": "text"}, "^example: str holds no tensor"),
        ({"autocast": torch.float64}, "^autocast"),
        ({"accumulation": 0}, "^accumulation"),
        ({"device": "mps"}, "^device: .* mps.* cuda"),
        ({"loss": lambda model, batch: model(batch).detach()}, "^loss"),
        ({"loss": lambda model, batch: model.norm.weight}, "^loss"),
    ],
)
def test_an_argument_that_cannot_be_is_named(
    arguments: dict[str, Any], words: str
) -> None:
    model = stack()
    before = weights(model)
    with pytest.raises(ConfigError, match=words):
        paged(model, adamw(model), **arguments)
    assert_same(weights(model), before)


def test_another_accelerator_is_not_passed_over_for_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who has an Arc and names no device would train a hundred times slower than asked."""
    there = torch.device("xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: there)
    model = stack()
    with pytest.raises(ConfigError, match="^device: .* not train on xpu"):
        paged(model, adamw(model), device=None)


def test_a_model_that_cannot_be_paged_is_refused() -> None:
    model = stack()
    optimizer = adamw(model)
    with torch.device("meta"):
        meta = Stack()
    with pytest.raises(ConfigError, match="^model: .* meta device.*`plan` needs none"):
        paged(meta, adamw(meta))
    with pytest.raises(ConfigError, match="^optimizer: .* not the model's"):
        paged(model, adamw(stack()))
    with pytest.raises(
        ConfigError, match="^optimizer: NoneType|^optimizer: page needs"
    ):
        paged(model, None)  # type: ignore[arg-type]
    model(EXAMPLE).backward()
    with pytest.raises(ConfigError, match="^model: .* has a gradient already"):
        paged(model, optimizer)
    optimizer.zero_grad()
    with pytest.raises(ConfigError, match="^model: a OptimizedModule wraps it"):
        paged(torch.compile(model), optimizer)  # type: ignore[arg-type]
    with paged(model, optimizer):
        with pytest.raises(ConfigError, match="paged already"):
            paged(model, adamw(model))
        with pytest.raises(ConfigError, match="paged already"):
            paged(model.layers, optimizer)
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing trains"):
        paged(model, optimizer)
    bare = nn.Linear(4, 1)
    with pytest.raises(LayoutError, match="no recognisable blocks"):
        paged(bare, adamw(bare), example=torch.ones(1, 4), loss=lambda m, x: m(x).sum())


def test_a_model_stays_paged_when_nobody_holds_its_page() -> None:
    """Or another one would take what is in the slots for its weights."""
    model = stack()
    paged(model, adamw(model))
    gc.collect()
    with pytest.raises(ConfigError, match="paged already"):
        paged(model, adamw(model))


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What two ranks say to each case."""
    script = Path(__file__).with_name("api_on_ranks.py")
    store = tmp_path_factory.mktemp("ranks") / "store"
    environment = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(store)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=300)[0].splitlines() for rank in ranks]
    return [dict(re.findall(r"^(.*?): (.*)$", "\n".join(s), re.M)) for s in said]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(4)
def test_two_ranks_train_as_plain_ones(
    on_ranks: list[dict[str, str]], case: str
) -> None:
    """Beside DistributedDataParallel: by hand, measured, with weights that this reduces."""
    for said in on_ranks:
        assert said.get(case, str(said)).startswith("equal")
    if case == "adapter":
        assert on_ranks[0][case].endswith("DistributedDataParallel")


def test_what_is_closed_says_so() -> None:
    model = stack()
    run = paged(model, adamw(model))
    run.close()
    run.close()
    for act in (
        lambda: run.clip_grad_norm_(1.0),
        run.__enter__,
        run.watch,
        run.micro_batch().__enter__,
    ):
        with pytest.raises(AccessError, match="^paged: it is closed"):
            act()


def test_a_norm_of_placeholders_is_an_error() -> None:
    """The plain function would sum over half of the gradients."""
    model = stack()
    with paged(model, adamw(model)) as run:
        model(EXAMPLE).backward()
        with pytest.raises((RuntimeError, ProTrainError)):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(ConfigError, match="norm_type"):
            run.clip_grad_norm_(1.0, norm_type=1.0)


def test_a_loop_on_another_thread() -> None:
    model = stack()
    other = twin(model)
    optimizer, plain = adamw(model), adamw(other)
    with paged(model, optimizer) as run:
        loop = threading.Thread(
            target=steps, args=(model, optimizer, run.clip_grad_norm_, batches(2))
        )
        loop.start()
        loop.join()
    steps(other, plain, plain_clip(other), batches(2))
    assert_same(weights(model), weights(other))


def test_the_host_updates_where_the_device_has_no_room_and_bits_are_equal() -> None:
    """On the CPU device either place gives them, so neither has to be asked for."""
    model = stack(width=64, inner=256)
    other = twin(model)
    optimizer, plain = adamw(model), adamw(other)
    here: dict[str, Any] = {"host_budget": "1GiB", "device": "cpu"}
    with pytest.raises(BudgetError) as refusal:
        page(model, optimizer, example=EXAMPLE, budget=4096, **here)
    least = refusal.value.__cause__.needs  # type: ignore[union-attr]
    with page(model, optimizer, example=EXAMPLE, budget=least, **here) as run:
        assert run.forecast.plan.update is Update.HOST
        ours = steps(model, optimizer, run.clip_grad_norm_, batches(4), 2)
    assert ours == steps(other, plain, plain_clip(other), batches(4), 2)
    assert_same(weights(model), weights(other))


def test_gradients_without_a_step_stay_when_the_model_is_given_back() -> None:
    model = stack()
    other = twin(model)
    optimizer, plain = adamw(model), adamw(other)
    with paged(model, optimizer, accumulation=3) as run:
        steps(model, optimizer, run.clip_grad_norm_, batches(3), 3)
        model(EXAMPLE).backward()
        run.clip_grad_norm_(0.1)
        model(EXAMPLE).backward()
    steps(other, plain, plain_clip(other), batches(3), 3)
    other(EXAMPLE).backward()
    nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    other(EXAMPLE).backward()
    for name, param in other.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, param.grad)  # type: ignore[arg-type]
    # what a step has used is no gradient of the next one
    model = stack()
    optimizer = adamw(model)
    with paged(model, optimizer):
        model(EXAMPLE).backward()
        optimizer.step()
    assert model.layers[0].up.weight.grad is None


def test_a_graph_that_outlives_its_page_is_an_error() -> None:
    model = stack()
    with paged(model, adamw(model)):
        loss = model(EXAMPLE)
    with pytest.raises(AccessError, match="given back in between"):
        loss.backward()


def test_a_part_of_the_gradients_is_not_clipped_alone() -> None:
    accelerator = Accelerator(cpu=True)
    model = stack()
    other = twin(model)
    optimizer, plain = adamw(model), adamw(other)
    # the order of a norm's sum is that of who asks
    ordered = [
        [p for group in o.param_groups for p in group["params"]]
        for o in (optimizer, plain)
    ]
    with paged(model, optimizer) as run:
        run.adapt(accelerator)
        model(EXAMPLE).backward()
        with pytest.raises(AccessError, match="these 2 are not the parameters"):
            accelerator.clip_grad_norm_(ordered[0][:2], 0.5)
        norm = accelerator.clip_grad_norm_(ordered[0], 0.5)
        optimizer.step()
    other(EXAMPLE).backward()
    assert norm == nn.utils.clip_grad_norm_(ordered[1], 0.5)
    plain.step()
    assert_same(weights(model), weights(other))


@pytest.mark.parametrize("fused", (False, True))
def test_a_base_that_is_unfrozen_in_training_is_refused(fused: bool) -> None:
    """A fused step would write it without leaving a trace."""
    model = stack()
    model.layers[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    with paged(model, optimizer):
        model(EXAMPLE).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.layers[1].requires_grad_(True)
        with pytest.raises(AccessError, match=r"layers\.1\..*: it was frozen when"):
            model(EXAMPLE)
        with torch.no_grad():
            model(EXAMPLE)


def added(model: Stack, tokens: Tensor) -> Tensor:
    return model(tokens) + 0.1 * penalty(model)


def added_before(model: Stack, tokens: Tensor) -> Tensor:
    return 0.1 * penalty(model) + model(tokens)


def between_two_passes(model: Stack, tokens: Tensor) -> Tensor:
    return model(tokens) + penalty(model) + model(tokens)


def penalty(model: Stack) -> Tensor:
    return sum((p.abs().sum() for p in model.layers[3].parameters()), torch.zeros(()))


@pytest.mark.parametrize("loss", (added, added_before, between_two_passes))
def test_a_penalty_that_nobody_has_seen_is_an_error(loss: Any) -> None:
    """It would be of another block's weights; whose weights stay may be read."""
    model = stack()
    with (
        paged(model, adamw(model)),
        pytest.raises(
            AccessError, match=r"layers\.3\..*outside of the model's forward"
        ),
    ):
        loss(model, EXAMPLE).backward()
    model = stack()
    other = twin(model)
    optimizer, plain = adamw(model), adamw(other)
    with paged(model, optimizer, loss=loss) as run:
        assert run.forecast.plan.n_persist == 0
        for each, its in ((model, optimizer), (other, plain)):
            for tokens in batches(2):
                loss(each, tokens).backward()
                its.step()
                its.zero_grad()
    assert_same(weights(model), weights(other))


def test_other_graphs_and_calls_of_parts_are_not_in_the_way() -> None:
    """A loss of several passes, of a block alone and of another model; once all pages have
    closed, in any order, torch is as it was."""
    backward = torch.autograd.backward
    first, second = stack(), stack()
    head = nn.Linear(16, 1)
    one, two = paged(first, adamw(first)), paged(second, adamw(second))
    hidden = torch.ones(2, 5, 16, requires_grad=True)
    for model in (first, second):
        loss = model(EXAMPLE) * 2 + model(EXAMPLE) + head(model.layers[2](hidden)).sum()
        loss.backward()
        model.zero_grad()
    one.close()
    second(EXAMPLE).backward()
    two.close()
    assert torch.autograd.backward is backward
