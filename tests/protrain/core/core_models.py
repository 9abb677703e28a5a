"""Small real models and plans that the tests of core share.

`Stack` is a language model of plain torch modules that runs in milliseconds and can be
told to misbehave: to skip layers, to leave a parameter out of the loss, to raise.
"""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from checked_device import CheckedDevice
from hypothesis import strategies as st
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.device import CpuDevice, Device
from axolotl.integrations.protrain.core.engine.session import Options, Session
from axolotl.integrations.protrain.core.layout import (
    PIECE_NUMEL,
    build_layout,
    check_slots,
)
from axolotl.integrations.protrain.core.layout.packed import (
    Packed,
    from_fp8,
    from_mxfp4,
)
from axolotl.integrations.protrain.core.types import (
    Block,
    Chunk,
    Hardware,
    Layout,
    Placement,
    Plan,
    Policy,
    TensorSpec,
    Update,
)

VOCAB = 64
ALL = range(6)
"""Blocks of a `Stack` as it is by default."""

HOST_STATE = Placement.OPTIMIZER_OFFLOADED

CPU = Hardware(
    name="cpu",
    source="nothing is timed",
    device_bytes=0,
    host_bytes=0,
    unseen_bytes=0,
    flops_16=1.0,
    flops_32=1.0,
    attention_16=1.0,
    memory_bytes_s=1.0,
    kernel_s=0.0,
    fetch_bytes_s=1.0,
    offload_bytes_s=1.0,
    fetch_both_bytes_s=1.0,
    offload_both_bytes_s=1.0,
    adam_bytes_s=1.0,
    overlaps=False,
)
"""The CPU device for predictions of bytes: no rate of it matters."""


class Fuse(torch.autograd.Function):
    """The identity, whose backward raises what the layer was told to raise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.layer.raise_in_backward is not None:
            raise ctx.layer.raise_in_backward
        return grads[0], None


class Layer(nn.Module):
    """A pre-norm MLP with one parameter, `extra`, that a forward may leave out."""

    def __init__(self, width: int, inner: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.extra = nn.Parameter(torch.rand(width) + 0.5)
        self.use_extra = True
        self.raise_in_forward: BaseException | None = None
        self.raise_in_backward: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.up(Fuse.apply(self.norm(x), self)))
        if self.raise_in_forward is not None:
            raise self.raise_in_forward
        if self.dropout:
            hidden = torch.nn.functional.dropout(hidden, self.dropout, self.training)
        x = x + self.down(hidden)
        return x * self.extra if self.use_extra else x


class Stack(nn.Module):
    """Embedding, layers, norm, head; returns the loss of predicting the next token."""

    def __init__(
        self,
        num_layers: int = 6,
        width: int = 16,
        inner: Sequence[int] | int = 32,
        tie: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = [inner] * num_layers if isinstance(inner, int) else inner
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Layer(width, size, dropout) for size in sizes)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.register_buffer("scale", torch.ones(8))
        if tie:
            self.head.weight = self.embed.weight
        self.order: Sequence[int] = range(num_layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index in self.order:
            x = self.layers[index](x)
        return self.loss(x, tokens)

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Of the hidden states after the last layer."""
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        )


def stack(seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any) -> Stack:
    """A `Stack` with the same weights at each call."""
    torch.manual_seed(seed)
    return Stack(**sizes).to(dtype)


def freeze(model: nn.Module, trained: Iterable[str] = ("norm",)) -> set[str]:
    """Train only parameters with one of these words in their name; return them."""
    names = set()
    for name, param in model.named_parameters():
        param.requires_grad = any(word in name.split(".") for word in trained)
        if param.requires_grad:
            names.add(name)
    return names


class Mixing(Layer):
    """A layer with two more matrices in one parameter, as experts have them."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + (x @ self.mix[0]).relu() @ self.mix[1].t()


def packed_stack(packed: bool = True) -> Any:
    """A `Stack` with FP8 in `up` and MXFP4 in `mix` of each layer, packed or not, whose
    norms train."""
    torch.manual_seed(0)
    made = Stack(width=32, inner=64).bfloat16()
    for layer in made.layers:
        layer.__class__ = Mixing
        codes = torch.randn(64, 32).to(torch.float8_e4m3fn)
        factors = torch.rand(4, 4) / 9
        blocks = torch.randint(256, (2, 64, 1, 16), dtype=torch.uint8)
        exponents = torch.randint(118, 124, (2, 64, 1), dtype=torch.uint8)
        own: dict[Any, Packed] = {
            (layer.up, "weight"): from_fp8(codes, factors, torch.bfloat16),
            (layer, "mix"): from_mxfp4(blocks, exponents, torch.bfloat16),
        }
        for (module, name), weight in own.items():
            value = weight if packed else weight.unpacked()
            setattr(module, name, nn.Parameter(value, requires_grad=False))
    freeze(made, ("norm", "extra"))
    return made


def make_plan(
    layout: Layout,
    resident: Collection[int] = (),
    n_buffer: int = 2,
    recompute: Collection[int] = (),
    swap: Collection[int] = (),
    outside: Placement = Placement.RESIDENT,
    inside: Placement = Placement.RESIDENT,
    shards: int = 1,
    update: Update = Update.DEVICE,
    on_disk: Collection[int] = (),
    disk_buffers: int = 3,
) -> Plan:
    """A plan from what is resident and which blocks recompute, swap, or both.

    `outside` is where the trainable weights outside blocks go, `inside` where the
    chunks named in `resident` go; the host looks up what a layout lets it. Of the chunks
    named in `on_disk` those count that are frozen and paged.
    """

    def place(chunk: Chunk) -> Placement:
        if chunk.pageable:
            return inside if chunk.index in resident else Placement.PARAM_OFFLOADED
        return Placement.HOST_LOOKUP if chunk.rows_bytes else outside

    placements = tuple(map(place, layout.chunks))
    if Placement.PARAM_OFFLOADED not in placements:
        n_buffer = 0
    check_slots(layout, placements, n_buffer)
    blocks = range(len(layout.blocks))
    return Plan(
        n_persist=len(resident),
        n_buffer=n_buffer,
        n_swap=len(swap),
        n_checkpoint=len(recompute),
        placements=placements,
        policies=tuple(_POLICY[index in swap, index in recompute] for index in blocks),
        origin="test",
        shards=shards,
        update=update,
        on_disk=tuple(
            chunk.index
            for chunk, at in zip(layout.chunks, placements, strict=True)
            if chunk.index in on_disk
            and at is Placement.PARAM_OFFLOADED
            and not chunk.trainable
        ),
        disk_buffers=disk_buffers,
    )


_POLICY = {
    (False, False): Policy.KEEP,
    (False, True): Policy.RECOMPUTE,
    (True, False): Policy.SWAP,
    (True, True): Policy.SWAP_INPUT,
}


def checked(device: Device | None = None) -> CheckedDevice:
    """A device, the CPU's unless given, that raises on every race."""
    return CheckedDevice(device or CpuDevice())


def open_session(
    model: nn.Module,
    keep: Collection[str] = (),
    fp32_master: bool = False,
    accumulates: bool = True,
    device: Device | None = None,
    rows: Mapping[str, int] = MappingProxyType({}),
    piece_numel: int = PIECE_NUMEL,
    disk: Path | None = None,
    **plan: Any,
) -> Session:
    """A session on a checked device, the CPU's unless given; `plan` goes to
    `make_plan`."""
    layout = build_layout(model, keep, rows=rows)
    options = Options(fp32_master, accumulates, piece_numel, disk=disk)
    plan_ = make_plan(layout, **plan)
    return Session(model, layout, plan_, checked(device), options)


def adamw(model: nn.Module, **defaults: Any) -> torch.optim.AdamW:
    """Fused AdamW with matrices in a decayed group and the rest in one without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, **{"lr": 1e-2, "fused": True, **defaults})


def host_weight(session: Session, name: str) -> Tensor:
    """The true value of a host-kept parameter, whatever its slot holds."""
    session.settle()
    chunk, spec = next(
        (chunk, spec)
        for chunk in session.layout.chunks
        for spec in chunk.tensors
        if spec.name == name
    )
    return session.pool.tensor(chunk.index, spec)


def wrapped(session: Session, **defaults: Any) -> torch.optim.Optimizer:
    """The session's optimizer around `adamw`."""
    return session.wrap_optimizer(adamw(session.model, **defaults))


def batches(num: int, seed: int = 1, length: int = 12) -> list[Tensor]:
    """Token ids, each [2, length]."""
    generator = torch.Generator().manual_seed(seed)
    shape = 2, length
    return [torch.randint(0, VOCAB, shape, generator=generator) for _ in range(num)]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Sequence[Sequence[Tensor]],
    session: Session | None = None,
    clip: float | None = None,
) -> list[float]:
    """One step for each list of micro-batches; losses and, with `clip`, grad norms."""
    numbers = []
    model.train()
    for micro_batches in data:
        with session.watch() if session else nullcontext():
            for tokens in micro_batches:
                loss = model(tokens) / len(micro_batches)
                loss.backward()
                numbers.append(loss.item())
            if clip is not None:
                norm = session.clip_grad_norm(clip) if session else None
                if norm is None:
                    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
                numbers.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
    return numbers


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of what `state_dict` gives."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Equal names, and equal bits (NaN is not expected in either)."""
    assert list(ours) == list(theirs)
    odd = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not odd, f"different: {odd}"


def hook_counts(model: nn.Module) -> dict[str, int]:
    """Sizes of every hook table of every module and parameter."""
    counts = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if "hooks" in key and value is not None:
                counts[f"{name}:{key}"] = len(value)
    for name, param in model.named_parameters():
        counts[name] = len(param._post_accumulate_grad_hooks or ())
    return counts


@contextmanager
def before_updates(act: Callable[[], None], on_host: bool = True) -> Iterator[None]:
    """`act` before each update of Adam's, on the host thread or on any."""
    module = sys.modules["torch.optim.adam"]
    adam = vars(module)["adam"]

    def update(*args: Any, **kwargs: Any) -> None:
        if not on_host or threading.current_thread() is not threading.main_thread():
            act()
        adam(*args, **kwargs)

    with patch.object(module, "adam", update):
        yield


def slowly() -> None:
    time.sleep(0.005)


def twin(model: nn.Module) -> Any:
    """An independent copy, taken before a session is opened."""
    return copy.deepcopy(model)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts straight from their types: sizes, trainability, chunks outside blocks."""
    chunks: list[Chunk] = []

    def add(block: int | None, adapter: bool = False) -> int:
        index, numel = len(chunks), draw(st.integers(1, 40))
        dtypes = [torch.float32] if adapter else [torch.float32, torch.bfloat16]
        spec = TensorSpec(f"p{index}", (numel,), draw(st.sampled_from(dtypes)), 0)
        trainable = block is None or adapter or draw(st.booleans())
        chunks.append(Chunk(index, block, trainable, (spec,), spec.nbytes, adapter))
        return index

    blocks = [
        Block(b, f"layers.{b}", tuple(add(b) for _ in range(draw(st.integers(0, 3)))))
        for b in range(draw(st.integers(1, 6)))
    ]
    if draw(st.booleans()):
        blocks = [replace(b, chunks=(*b.chunks, add(b.index, True))) for b in blocks]
    for _ in range(draw(st.integers(0, 2))):
        add(None)
    fixed = st.integers(0, 50)
    return Layout(tuple(blocks), tuple(chunks), draw(fixed), draw(fixed))
