"""Sessions on `CudaDevice` over the emulated runtime: the numbers of plain training, to the
bit, while every copy and kernel takes a random time; and memory as the allocator counts it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from api_on_ranks import Loop, scaled
from core_models import (
    ALL,
    HOST_STATE,
    Stack,
    adamw,
    batches,
    freeze,
    make_plan,
    packed_stack,
    stack,
    train,
    twin,
)
from torch import Tensor, nn

from axolotl.integrations.protrain.core import gpu, page
from axolotl.integrations.protrain.core.engine import device as devices
from axolotl.integrations.protrain.core.engine.session import Options, Session
from axolotl.integrations.protrain.core.layout import (
    build_layout,
    moves as moves_module,
)
from axolotl.integrations.protrain.core.types import Counters, Knobs, Update
from axolotl.integrations.protrain.host_cache import HostCache

CUDA = torch.device("cuda", 0)
EMULATED = hasattr(torch.ops.fakecuda, "install")
SIZES: dict[str, Any] = {"width": 64, "inner": 128}
PLANS: dict[str, dict[str, Any]] = {
    "one slot": {"n_buffer": 1},
    "two slots": {"n_buffer": 2},
    "mixed": {"resident": (0, 3), "n_buffer": 2},
    "recompute": {"n_buffer": 2, "recompute": ALL},
    "some state on the host": {"resident": (0, 2, 5), "inside": HOST_STATE},
    "swap": {"n_buffer": 2, "swap": (0, 1, 2)},
    "swap inputs": {"n_buffer": 2, "swap": ALL, "recompute": ALL},
    "outside on the host": {"n_buffer": 2, "outside": HOST_STATE},
    "updates on the host": {"n_buffer": 2, "update": Update.HOST},
    "all resident": {"resident": ALL},
    "rows": {"n_buffer": 2, "rows": {"embed.weight": 24 * 64 * 4}},
    "some held": {"n_buffer": 2, "held": (1, 2, 4)},
    "all held": {"n_buffer": 2, "held": ALL},
}
PACKED: dict[str, dict[str, Any]] = {
    "packed, two slots": {"n_buffer": 2, "packed": True},
    "packed, recompute": {
        "resident": (3,),
        "n_buffer": 3,
        "recompute": ALL,
        "packed": True,
    },
    "packed, swap": {"n_buffer": 2, "swap": (0, 1, 2), "packed": True},
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "AdamW, unfused": lambda model: adamw(model, fused=False),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), 1e-2),
    "Adafactor": lambda model: transformers.Adafactor(
        model.parameters(), 1e-3, relative_step=False, scale_parameter=False
    ),
}
DATA = [[tokens.to(CUDA) for tokens in batches(2, seed)] for seed in range(4)]


def allocated() -> int:
    """Bytes of tensors: what a real card's products keep to work in does not count."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.fixture(autouse=True)
def nothing_stays_on_the_device() -> Any:
    before = allocated()
    yield
    assert allocated() == before


def opened(
    model: nn.Module,
    adapters: Sequence[str] = (),
    rows: Mapping[str, int] = MappingProxyType({}),
    disk: Path | None = None,
    **plan: Any,
) -> Session:
    layout = build_layout(model, adapters=adapters, rows=rows)
    device = devices.CudaDevice(0)
    options = Options(disk=disk)
    return Session(model, layout, make_plan(layout, **plan), device, options)


def scheduled(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    session: Session | None = None,
    clip: float = 0.0,
    between: Callable[[int], None] = lambda step: None,
    held: Sequence[int] = (),
) -> list[float]:
    """Losses and norms of four steps of two micro-batches, under a schedule, with
    evaluations after each, in which some chunks are held."""
    found = []
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step, micro_batches in enumerate(DATA):
        between(step)
        found += train(model, optimizer, [micro_batches], session, clip or None)
        schedule.step()
        holding = session.holding(held) if session else nullcontext()
        with torch.inference_mode(), holding:
            # queued together: the last of them may still run when chunks are let go
            losses = [model(tokens) for tokens in (*micro_batches, *micro_batches)]
        # somebody else gets the memory of those at once
        size = sum(each.numel() for each in model.layers[0].parameters())
        others = [torch.full((size,), torch.nan, device=CUDA) for _ in model.layers]
        del others
        found += [loss.item() for loss in losses]
    return found


def leaves(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu().tolist()
    if isinstance(value, dict):
        return {key: leaves(item) for key, item in value.items()}
    return value


def keeps_busy(copies: int) -> Callable[..., None]:
    """Make a hook after whose block backward begins with copies of up to 10 ms, for which
    what is computed then waits."""

    def keep_busy(_gradient: Tensor) -> None:
        here, there = torch.zeros(1, pin_memory=True), torch.empty(1, device=CUDA)
        for _ in range(copies):
            there.copy_(here, non_blocking=True)

    def hook(_layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(keep_busy)

    return hook


def equals_plain(
    plan: dict[str, Any],
    optimizer: str = "AdamW",
    dtype: torch.dtype = torch.float32,
    clip: float = 0.0,
    frozen: bool = False,
    then: dict[str, Any] | None = None,
    busy: int = 0,
) -> bool:
    """Whether losses, norms, weights and states are; `then` is the plan from the third
    step on; of a plan `held` chunks stay on the device while it is evaluated. A device that is
    `busy` with so many copies per block is behind in every backward, and in evaluations with
    what goes to the host. Of a `packed` plan the frozen weights are packed, but not those of
    the plain model."""
    plan, adapters = {**plan}, ()
    held = plan.pop("held", ())
    if plan.pop("packed", False):
        model, plain = packed_stack(), packed_stack(False).to(CUDA)
    else:
        model = stack(dtype=dtype, **SIZES)
        adapters = tuple(sorted(freeze(model, ["extra"]))) if frozen else ()
        plain = twin(model).to(CUDA)
    for layer in model.layers if busy else ():
        layer.register_forward_hook(keeps_busy(busy))
    session = opened(model, adapters, **plan)
    there, here = torch.zeros(1, pin_memory=True), torch.empty(1, device=CUDA)
    trained: set[nn.Module] = set()

    def goes_late(layer: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled():
            trained.add(layer)
        elif layer in trained:
            # what is sent last leaves when all evaluations have ended
            trained.discard(layer)
            for _ in range(10 * busy):
                session.device.offload.copy(there, here)

    for layer in model.layers[-3:] if busy and held else ():
        layer.register_forward_pre_hook(goes_late, prepend=True)

    def replan(step: int) -> None:
        if then is not None and step == 2:
            session.replan(make_plan(session.layout, **then))

    reference = OPTIMIZERS[optimizer](plain)
    theirs = scheduled(plain, reference, clip=clip)
    try:
        own = session.wrap_optimizer(OPTIMIZERS[optimizer](model))
        ours = scheduled(model, own, session, clip, replan, held)
        saved = {k: v.cpu().clone() for k, v in model.state_dict().items()}
        states = leaves(own.state_dict()["state"])
    finally:
        session.close()
    truth = {name: value.cpu() for name, value in plain.state_dict().items()}
    return (
        ours == theirs
        and states == leaves(reference.state_dict()["state"])
        and all(
            torch.equal(truth[name], value) and torch.equal(truth[name], saved[name])
            for name, value in model.state_dict().items()
        )
    )


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "full"])
@pytest.mark.parametrize("plan", PLANS)
def test_training_equals_plain(plan: str, frozen: bool) -> None:
    if "update" in PLANS[plan] and not frozen and not EMULATED:
        pytest.skip("the host's AdamW rounds otherwise than that of a real card")
    assert equals_plain(
        PLANS[plan], frozen=frozen, busy=5 if "held" in PLANS[plan] else 0
    )


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most packed weights come in several pieces."""
    monkeypatch.setattr(moves_module, "PIECE_NUMEL", 700)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("plan", PACKED)
def test_packed_training_equals_plain(plan: str) -> None:
    assert equals_plain(PACKED[plan], clip=0.1)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("buffers", [1, 3])
def test_training_from_a_disk_equals_plain(
    buffers: int, packed: bool, tmp_path: Path
) -> None:
    plan = {"n_buffer": 3, "on_disk": range(99), "disk": tmp_path, "packed": packed}
    assert equals_plain({**plan, "disk_buffers": buffers}, clip=0.1, frozen=True)


def test_a_read_into_what_is_being_copied_is_noticed(tmp_path: Path) -> None:
    plan = {"n_buffer": 3, "on_disk": range(99), "disk": tmp_path, "disk_buffers": 1}
    with without(torch.cuda.Event, "synchronize", "read", "disk.py"):
        assert any(differs_from_plain(plan, busy, frozen=True) for busy in BUSY)


@pytest.mark.parametrize("clip, dtype", [(0.0, torch.float32), (0.1, torch.bfloat16)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", ["one slot", "mixed", "some state on the host"])
def test_updates_equal_plain(
    plan: str, optimizer: str, clip: float, dtype: torch.dtype
) -> None:
    assert equals_plain(PLANS[plan], optimizer, dtype, clip)


@pytest.mark.parametrize(
    "before, after",
    [("mixed", "one slot"), ("two slots", "recompute"), ("mixed", "swap inputs")],
)
def test_a_smaller_plan_in_the_middle_equals_plain(before: str, after: str) -> None:
    after_ = {**PLANS[after]}
    if before == "mixed":
        # what trains inside its chunk's state stays where the first plan had it
        after_ = {"resident": (0,), **after_}
    assert equals_plain(PLANS[before], clip=0.1, then=after_)


def without(cls: type, method: str, function: str, file: str) -> Any:
    """Calls of `method` from one function do nothing."""
    real: Callable[..., Any] = getattr(cls, method)

    def call(self: Any, *args: Any) -> Any:
        code = sys._getframe(1).f_code
        if code.co_name == function and code.co_filename.endswith(file):
            return None
        return real(self, *args)

    return mock.patch.object(cls, method, call)


STREAM, DEVICE = type(devices.CudaDevice(0).compute), devices.CudaDevice
BUSY = 0, 5, 50
"""Copies that a device has to make beside a block, tried in this order: on a slow machine all
may be in time without a wait."""
WAITS: dict[str, tuple[type, str, str, str, str]] = {
    "compute uses weights before they are here": (
        *(DEVICE, "wait_stalled", "begin_use", "slots.py"),
        "two slots",
    ),
    "a fetch overwrites what compute reads": (
        *(STREAM, "wait", "fetch", "slots.py"),
        "two slots",
    ),
    "weights go home before they are updated": (
        *(STREAM, "wait", "_write_back", "apply.py"),
        "two slots",
    ),
    "gradients leave before they are made": (
        *(STREAM, "wait", "_send", "gradients.py"),
        "two slots",
    ),
    "their memory is used again before they have left": (
        *(torch.cuda.Event, "synchronize", "retire", "gradients.py"),
        "two slots",
    ),
    "state is fetched before it is there, into what is in use": (
        *(STREAM, "wait", "_fill", "staging.py"),
        "two slots",
    ),
    "an update begins before its state is here": (
        *(DEVICE, "wait_stalled", "take", "staging.py"),
        "two slots",
    ),
    "state's memory is used again before it has left": (
        *(torch.cuda.Event, "synchronize", "_retire", "apply.py"),
        "outside on the host",
    ),
    "activations leave before they are made": (
        *(STREAM, "wait", "_send", "swap.py"),
        "swap inputs",
    ),
    "their memory is given to others before they have left": (
        *(STREAM, "wait", "settle", "swap.py"),
        "swap",
    ),
    "they come back into what others use": (
        *(STREAM, "wait", "fetch", "swap.py"),
        "swap",
    ),
    "backward reads them before they are back": (
        *(DEVICE, "wait_stalled", "arrive", "swap.py"),
        "swap inputs",
    ),
    "weights of held chunks are given up before they have left": (
        *(DEVICE, "synchronize", "__call__", "holding.py"),
        "all held",
    ),
    "weights that stayed are given back before they have left": (
        *(torch.cuda.Event, "synchronize", "_fetched_to_host", "param_store.py"),
        "mixed",
    ),
    "codes are unpacked before they are here": (
        *(STREAM, "wait", "_unpack", "slots.py"),
        "packed, two slots",
    ),
}
"""What goes wrong without a wait: whose method it is, which function of which file calls
it, and a plan under which it matters. `tests/mutants.py` takes all of them away."""


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("wait", WAITS)
def test_a_missing_wait_is_noticed(wait: str) -> None:
    *call, plan = WAITS[wait]
    with without(*call):
        assert any(differs_from_plain((PLANS | PACKED)[plan], busy) for busy in BUSY)


def differs_from_plain(plan: dict[str, Any], busy: int, frozen: bool = False) -> bool:
    try:
        return not equals_plain(plan, clip=0.1, busy=busy, frozen=frozen)
    except RuntimeError as error:
        # labels that were overwritten, for example
        assert "failed on the stream" in str(error)
        return True
    finally:
        try:
            # takes what is left of the failure
            torch.zeros(1, device=CUDA).item()
        except RuntimeError:
            pass


def generated(cache: bool, late: str = "fetch", copies: int = 0) -> list[list[int]]:
    """Tokens of a small Llama on the device, its keys and values there or on the host; the
    stream `late` has so many copies to make before each block."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval().to(CUDA)
    ids = torch.randint(3, 64, (3, 24), device=CUDA)
    how = transformers.GenerationConfig(
        max_new_tokens=12,
        do_sample=True,
        pad_token_id=0,
        eos_token_id=2,
        disable_compile=True,
    )
    device = devices.CudaDevice(0)
    here, there = torch.zeros(1, pin_memory=True), torch.empty(1, device=CUDA)
    stream = getattr(device, late)
    for layer in model.model.layers:
        for _ in range(copies):
            layer.register_forward_pre_hook(lambda *_: stream.copy(there, here))
    host = HostCache(6, 36, device, Counters()) if cache else None
    given = {"past_key_values": host} if host is not None else {}
    torch.manual_seed(1)
    try:
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=how,
            **given,
        )
        return made.tolist()
    finally:
        if host is not None:
            host.close()


def test_keys_and_values_on_the_host_give_the_tokens_of_those_on_the_device() -> None:
    wanted = generated(False)
    late = ("fetch", 0), ("fetch", 0), ("fetch", 5), ("compute", 5)
    assert all(generated(True, *each) == wanted for each in late)


@pytest.mark.parametrize(
    "call, late",
    [
        ((STREAM, "wait", "_send", "host_cache.py"), "compute"),
        ((DEVICE, "wait_stalled", "take", "staging.py"), "fetch"),
    ],
    ids=["they leave before they are made", "they are read before they are back"],
)
def test_a_missing_wait_of_the_cache_is_noticed(call: Any, late: str) -> None:
    wanted = generated(False)
    with without(*call):
        assert any(differs(wanted, late, copies) for copies in BUSY)


def differs(wanted: list[list[int]], late: str, copies: int) -> bool:
    try:
        return generated(True, late, copies) != wanted
    except RuntimeError as error:
        # probabilities that are no numbers, for example
        return "probability" in str(error) or "failed on the stream" in str(error)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("first", [2.0**27, 2.0**16])
def test_a_scaler_finds_gradients_on_host_and_device(fused: bool, first: float) -> None:
    """The flag of an overflow is read by the host, and by a fused kernel on the card."""
    model = stack(**SIZES)
    other = twin(model).to(CUDA)
    optimizer, plain = adamw(model, fused=fused), adamw(other, fused=fused)
    data = [tokens.to(CUDA) for tokens in batches(12)]
    scalers = [torch.amp.GradScaler("cuda", first, growth_interval=2) for _ in "ab"]
    with page(
        model,
        optimizer,
        example=data[0],
        budget="400MiB",
        knobs=Knobs(n_persist=1, n_buffer=2, n_swap=0, n_checkpoint=3),
        hardware=gpu("RTX 4090"),
        accumulation=2,
        autocast=torch.float16,
        device=CUDA,
    ) as run:
        ours = scaled(Loop(model, model, optimizer, run), data, scalers[0])
    assert ours == scaled(Loop(other, other, plain), data, scalers[1])
    theirs = other.state_dict()
    assert all(torch.equal(t, theirs[n].cpu()) for n, t in model.state_dict().items())


class ByKeyword(Stack):
    """A model that calls its blocks as vision towers of transformers do."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x=x)
        return self.loss(x, tokens)


@pytest.mark.parametrize("plan", ["recompute", "swap inputs"])
def test_a_block_that_is_called_by_keyword_draws_its_dropout_again(plan: str) -> None:
    """The CPU's random state is always replayed; only a card shows whether its own is."""
    model = stack(dropout=0.3, **SIZES)
    model.__class__ = ByKeyword
    plain = twin(model).to(CUDA)
    torch.cuda.manual_seed(3)
    theirs = train(plain, adamw(plain), DATA, clip=1.0)
    session = opened(model, **PLANS[plan])
    torch.cuda.manual_seed(3)
    try:
        ours = train(model, session.wrap_optimizer(adamw(model)), DATA, session, 1.0)
    finally:
        session.close()
    assert ours == theirs
