"""Trainings, paged and plain: `Row` says which, `same` compares them bit by bit.

Each row has a model with blocks of some kind, a plan, an optimizer and a device. What the
paged run computes is what the plain one does: losses, norms, weights, optimizer state. While
it runs, addresses stay and every access is checked; when it closes, nothing is left behind.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import bitsandbytes
import schedulefree
import torch
import torchao.optim
import transformers
from axolotl.utils.optimizers.adopt import ADOPT
from core_models import ALL, HOST_STATE, VOCAB, Stack, checked, freeze, make_plan
from odd_models import LENGTH, LOOKED_UP, MODELS
from simulated import DeferredDevice, SimulatedDevice, at_random, at_rate
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.device import CpuDevice
from axolotl.integrations.protrain.core.engine.session import Options, Session
from axolotl.integrations.protrain.core.layout import build_layout
from axolotl.integrations.protrain.core.types import Plan, Update

STEPS = 4

PLACES: dict[str, dict[str, Any]] = {
    "one slot": {"n_buffer": 1},
    "two slots": {"n_buffer": 2},
    "a slot each": {"n_buffer": 6},
    "outside too": {"n_buffer": 2, "outside": HOST_STATE},
    "mixed": {"resident": (0, 3), "n_buffer": 2},
    "mixed states": {"resident": (1, 2, 4), "inside": HOST_STATE},
    "states": {"resident": ALL, "inside": HOST_STATE, "outside": HOST_STATE},
    "resident": {"resident": ALL},
}
"""Where weights and their states are."""
POLICIES: dict[str, dict[str, Any]] = {
    "keep": {},
    "recompute": {"recompute": ALL},
    "swap": {"swap": ALL},
    "swap inputs": {"swap": ALL, "recompute": ALL},
    "each": {"swap": (0, 2, 3), "recompute": (1, 3)},
}
DEVICES: dict[str, Callable[[], CpuDevice]] = {
    "at once": CpuDevice,
    "at a rate": lambda: SimulatedDevice(at_rate(1e8), at_rate(5e7)),
    "at random times": lambda: SimulatedDevice(at_random(1, 3e-3), at_random(2, 3e-3)),
    "at random moments": lambda: DeferredDevice(seed=3),
    "at last": DeferredDevice,
}
"""When copies happen."""

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def of(kind: Any, **defaults: Any) -> Make:
    return lambda groups: kind(groups, **{"lr": 1e-2, **defaults})


def small(name: str, **defaults: Any) -> Make:
    """One of bitsandbytes, with 8-bit state for small tensors too."""
    return of(getattr(bitsandbytes.optim, name), min_8bit_size=16, **defaults)


def at_a_tensor_lr(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    own = [{**group, "lr": torch.tensor(1e-2)} for group in groups]
    return torch.optim.AdamW(own, fused=True)


def in_groups(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Every chunk has members of three groups that share no hyperparameter."""
    params = [param for group in groups for param in group["params"]]
    settings: list[dict[str, Any]] = [
        {"lr": 3e-2, "betas": (0.5, 0.6), "weight_decay": 0.5},
        {"lr": 1e-3, "amsgrad": True, "eps": 1e-3},
        {"maximize": True},
    ]
    split = [{"params": params[n::3], **own} for n, own in enumerate(settings)]
    return torch.optim.AdamW(split, lr=1e-2, fused=True)


OPTIMIZERS: dict[str, Make] = {
    "fused": of(torch.optim.AdamW, fused=True),
    "foreach": of(torch.optim.AdamW, foreach=True),
    "amsgrad": of(torch.optim.AdamW, amsgrad=True, foreach=False),
    "tensor lr": at_a_tensor_lr,
    "groups": in_groups,
    "Adam": of(torch.optim.Adam, weight_decay=0.1),
    "SGD": of(torch.optim.SGD),
    "momentum": of(torch.optim.SGD, momentum=0.9, nesterov=True),
    "RMSprop": of(torch.optim.RMSprop, momentum=0.9, centered=True),
    # has state before its first step
    "Adagrad": of(torch.optim.Adagrad),
    "Adadelta": of(torch.optim.Adadelta),
    "Adamax": of(torch.optim.Adamax),
    "NAdam": of(torch.optim.NAdam, decoupled_weight_decay=True),
    "RAdam": of(torch.optim.RAdam),
    "Rprop": of(torch.optim.Rprop),
    "torch Adafactor": of(torch.optim.Adafactor),
    "AdamW8bit": small("AdamW8bit"),
    "PagedAdamW8bit": small("PagedAdamW8bit"),
    "PagedAdamW32bit": small("PagedAdamW32bit"),
    "Lion8bit": small("Lion8bit"),
    "AdEMAMix8bit": small("AdEMAMix8bit"),
    "RMSprop8bit": small("RMSprop8bit"),
    "LAMB": small("LAMB8bit"),
    "Adafactor": of(
        transformers.Adafactor, relative_step=False, scale_parameter=False, beta1=0.9
    ),
    # the size of a step is that of the weights, and goes with their number
    "relative Adafactor": of(
        transformers.Adafactor, lr=None, relative_step=True, warmup_init=True
    ),
    "torchao 8-bit": of(torchao.optim.AdamW8bit),
    "torchao 4-bit": of(torchao.optim.AdamW4bit, block_size=64),
    # these move all weights outside of a step
    "schedule-free": of(schedulefree.AdamWScheduleFree, warmup_steps=3),
    "schedule-free, one by one": of(schedulefree.AdamWScheduleFree, foreach=False),
    "schedule-free RAdam": of(schedulefree.RAdamScheduleFree),
    "schedule-free SGD": of(schedulefree.SGDScheduleFree, momentum=0.8),
    "ADOPT": of(ADOPT),
}


@dataclass(frozen=True)
class Row:
    """One training. What the plain run knows nothing of stands last.

    Attributes:
        trained: All weights, "adapters" that stay on the device, or "waiting" ones, whose
            state is on the host between steps.
        masters: Weights are 16 bits and updated in fp32; a plain run does so by hand.
        looks: An evaluation comes before each step and after its first backward.
        piece_numel: Elements updated at once; whole vectors, or torch rounds otherwise.
        then: Where weights are after two steps; None for no change. With `resumes` from
            what was saved, otherwise another plan of the session, `inside` of a step.
    """

    model: str = "stack"
    trained: str = "full"
    dtype: torch.dtype = torch.float32
    optimizer: str = "fused"
    accumulation: int = 2
    clip: float | None = 0.5
    dropout: float = 0.0
    autocast: bool = False
    masters: bool = False
    looks: bool = False
    compiled: bool = False
    resumes: bool = False

    place: str = "two slots"
    policy: str = "keep"
    update: Update = Update.DEVICE
    device: str = "at once"
    then: str | None = None
    inside: bool = False
    piece_numel: int = Options.piece_numel

    @property
    def plain(self) -> Row:
        """The row of its plain run."""
        where = ("place", "policy", "update", "device", "then", "inside", "piece_numel")
        return replace(self, **{name: getattr(ORDINARY, name) for name in where})

    def __str__(self) -> str:
        names = (str(getattr(self, f)) for f in self.__dataclass_fields__)
        usual = (str(getattr(ORDINARY, f)) for f in self.__dataclass_fields__)
        fields = zip(self.__dataclass_fields__, names, usual, strict=True)
        told = (f"{f}={v}" if v in "True12" else v for f, v, u in fields if v != u)
        return " ".join(told).replace("torch.", "") or "ordinary"


ORDINARY = Row()


def build(row: Row) -> Any:
    """The model with its weights before the first step."""
    torch.manual_seed(0)
    model = MODELS[row.model]() if row.model != "stack" else Stack(width=32)
    for layer in getattr(model, "layers", ()) if row.dropout else ():
        layer.dropout = row.dropout
    if not hasattr(model, "peft_config"):
        model = model.to(row.dtype)
        if row.trained != "full":
            freeze(model, ["extra", "norm"])
    return model


def data(row: Row, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    shape = row.accumulation, 2, LENGTH
    return [*torch.randint(0, VOCAB, shape, generator=generator)]


def grouped(params: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Matrices in a decayed group and the rest in one without."""
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Run:
    """A model with its optimizer, paged or plain."""

    session: Session | None = None

    def __init__(self, row: Row, paged: bool, saved: Any = None) -> None:
        self.row, self.paged = row, paged
        self.model = build(row)
        self.before = left_behind(self.model)
        if saved is not None:
            self.model.load_state_dict(saved[0])
        if paged:
            self._open()
        else:
            self._stay()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.updated = self.trained
        if row.masters and not paged:
            self.updated = [p.detach().float() for p in self.trained]
        self.optimizer: Any = OPTIMIZERS[row.optimizer](grouped(self.updated))
        if self.session is not None:
            self.optimizer = self.session.wrap_optimizer(self.optimizer)
        if saved is not None:
            self.load(saved[1])
        self.switch("train")

    def _stay(self) -> None:
        for layer in self.model.modules():
            if hasattr(layer, "support_avx512bf16_for_cpu"):
                # or an evaluation repacks weights, which changes numbers
                layer.support_avx512bf16_for_cpu = False
        for layer in self.model.layers if self.row.compiled else ():
            layer.forward = torch.compile(layer.forward, backend="aot_eager")

    def _open(self) -> None:
        row, named = self.row, self.model.named_parameters()
        trained = {name for name, param in named if param.requires_grad}
        kept = {"full": (), "adapters": trained, "waiting": ()}[row.trained]
        waiting = trained if row.trained == "waiting" else ()
        layout = build_layout(
            self.model, kept, adapters=waiting, rows=LOOKED_UP.get(row.model, {})
        )
        self.device = DEVICES[row.device]()
        options = Options(
            row.masters,
            row.accumulation > 1,
            row.piece_numel,
            {"backend": "aot_eager"} if row.compiled else None,
        )
        plan = self.plan(layout, row.place, row.policy)
        self.session = Session(self.model, layout, plan, checked(self.device), options)
        self.addresses = addresses(self.session)

    def plan(self, layout: Any, place: str, policy: str) -> Plan:
        """The blocks of some models are fewer than those of a `Stack`."""
        knobs = {**PLACES[place], **POLICIES[policy]}
        blocks = range(len(layout.blocks))
        for name in knobs.keys() & {"resident", "recompute", "swap"}:
            knobs[name] = [block for block in knobs[name] if block in blocks]
        chunks = {i for b in knobs.pop("resident", ()) for i in layout.blocks[b].chunks}
        if "inside" in knobs:
            # what is frozen has no state
            chunks -= {c.index for c in layout.chunks if not c.trainable}
        most = sum(c.pageable and c.index not in chunks for c in layout.chunks)
        each = (sum(i not in chunks for i in b.chunks) for b in layout.blocks)
        slots = min(most, max(knobs.get("n_buffer", 2), *each))
        return make_plan(
            layout, chunks, **{**knobs, "n_buffer": slots}, update=self.row.update
        )

    # what a loop does

    def switch(self, mode: str) -> None:
        """To where a schedule-free optimizer trains, or to the mean of that."""
        if hasattr(self.optimizer, mode):
            # twice, as transformers does before each micro-batch
            getattr(self.optimizer, mode)()
            getattr(self.optimizer, mode)()

    def loss(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.row.autocast):
            if hasattr(self.model, "config"):
                return self.model(input_ids=tokens, labels=tokens).loss
            return self.model(tokens)

    def evaluate(self, step: int) -> list[float]:
        self.switch("eval")
        self.model.eval()
        with torch.inference_mode():
            losses = [self.loss(data(self.row, 50 + step)[0]).item()]
        self.model.train()
        self.switch("train")
        return losses

    def backward(self, step: int) -> list[float]:
        """The micro-batches of a step; their losses."""
        losses = []
        for tokens in data(self.row, step):
            loss = self.loss(tokens) / self.row.accumulation
            loss.backward()
            losses.append(loss.item())
            if self.updated is not self.trained:
                for master, param in zip(self.updated, self.trained, strict=True):
                    if param.grad is not None:
                        sum_ = 0 if master.grad is None else master.grad
                        master.grad, param.grad = sum_ + param.grad.float(), None
        return losses

    def clip(self, max_norm: float) -> float:
        norm = self.session.clip_grad_norm(max_norm) if self.session else None
        if norm is None:
            norm = nn.utils.clip_grad_norm_(self.updated, max_norm)
        return norm.item()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.updated is not self.trained:
            for master, param in zip(self.updated, self.trained, strict=True):
                param.data.copy_(master)

    def step(self, number: int, clip: float | None = 0.5) -> list[float]:
        """Losses, and the norm before clipping."""
        numbers = self.backward(number)
        if clip is not None:
            numbers.append(self.clip(clip))
        self.update()
        return numbers

    def schedule(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(0.01 / (step + 2))
            elif group["lr"] is not None:
                group["lr"] *= (step + 1) / (step + 2)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Weights and gradients are true inside."""
        with self.session.full_params() if self.session else nullcontext():
            yield

    def watched(self) -> Any:
        return self.session.watch() if self.session else nullcontext()

    def state(self) -> Any:
        """The optimizer's, as far as the plain one has it, and masters apart."""
        state = self.optimizer.state_dict()
        for group in state["param_groups"]:
            group.pop("param_names", None)
        if self.row.model in ("sometimes", "orders"):
            # they come in the order in which they are made
            state["state"] = dict(sorted(state["state"].items()))
        masters = [own.pop("master", None) for own in state["state"].values()]
        order = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.updated is not self.trained:
            masters = [order[number].detach() for number in state["state"]]
        return [leaves(state), masters if self.row.masters else None]

    def save(self) -> Any:
        """Weights, and the bytes of the optimizer's file."""
        file = io.BytesIO()
        masters = self.updated if self.updated is not self.trained else ()
        torch.save((self.optimizer.state_dict(), [*masters]), file)
        return weights(self.model), file.getvalue()

    def load(self, saved: bytes) -> None:
        state, masters = torch.load(io.BytesIO(saved), weights_only=True)
        self.optimizer.load_state_dict(state)
        for own, master in zip(self.updated, masters, strict=False):
            own.copy_(master)

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
            if isinstance(self.device, SimulatedDevice):
                self.device.close()
            assert left_behind(self.model) == self.before


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def addresses(session: Session) -> dict[str, int]:
    """Of weights that pass through slots."""
    params = dict(session.model.named_parameters())
    return {
        spec.name: params[spec.name].data_ptr()
        for index in session.plan.paged
        for spec in session.layout.chunks[index].tensors
        if spec.name in params
    }


def left_behind(model: nn.Module) -> Any:
    """What others see of a model, and threads."""
    return [
        [(name, id(m), type(m)) for name, m in model.named_modules()],
        [(name, id(p), p.requires_grad) for name, p in model.named_parameters()],
        [
            sorted((k, len(v)) for k, v in vars(m).items() if v and k.endswith("hooks"))
            for m in model.modules()
        ],
        [vars(m).keys() & {"forward", "_compiled_call_impl"} for m in model.modules()],
        # those of 8-bit weights have a `quant_state` from the first session on
        [sorted(vars(p).keys() - {"quant_state"}) for p in model.parameters()],
        [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()],
        {thread.name for thread in threading.enumerate()},
    ]


def leaves(value: Any) -> Any:
    """A state with tensors made of tensors as dicts of them."""
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return {name: leaves(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: leaves(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [leaves(item) for item in value]
    return value.clone() if isinstance(value, Tensor) else value


def assert_same_content(ours: Any, theirs: Any, at: str = "") -> None:
    """Equal structure, types and bits."""
    assert type(ours) is type(theirs), at
    if isinstance(ours, dict):
        assert list(ours) == list(theirs), at
        for key, value in ours.items():
            assert_same_content(value, theirs[key], f"{at}.{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), at
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same_content(*pair, f"{at}.{number}")
    elif isinstance(ours, Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), at
        bits = (t.contiguous().reshape(-1).view(torch.uint8) for t in (ours, theirs))
        assert torch.equal(*bits), at
    else:
        assert ours == theirs, at


@dataclass
class Found:
    """What a training gave: numbers by step, weights and state before and after closing."""

    numbers: list[Any] = field(default_factory=list)
    open: Any = None
    closed: Any = None
    state: Any = None
    swapped_bytes: int = 0


def trained(row: Row, paged: bool) -> Found:
    """Train, and see what comes of it."""
    found, run = Found(), Run(row, paged)
    torch.manual_seed(5)
    for step in range(STEPS):
        if step == 2 and row.resumes:
            run = resumed(run, row)
        elif step == 2 and row.then is not None and not row.inside:
            change(run, row)
        with run.watched():
            numbers = run.evaluate(step) if row.looks else []
            if step == 2 and row.then is not None and row.inside:
                # half of it, then all of it again
                change(run, row, tried=True)
            numbers += run.backward(step)
            numbers += run.evaluate(step) if row.looks else []
            if row.clip is not None:
                numbers.append(run.clip(row.clip))
            run.update()
        run.schedule(step)
        found.numbers.append(numbers)
    found.numbers.append(run.evaluate(9))
    run.switch("eval")
    found.open, found.state = weights(run.model), run.state()
    if run.session is not None and row.then is None:
        assert addresses(run.session) == run.addresses
        found.swapped_bytes = run.session.measured().swapped_out_bytes
    run.close()
    found.closed = weights(run.model)
    return found


def change(run: Run, row: Row, tried: bool = False) -> None:
    """Another plan, between two steps or once half of one has been `tried`."""
    if run.session is None:
        return
    if tried:
        drawn = torch.get_rng_state()
        run.loss(data(row, 2)[0]).backward()
        run.loss(data(row, 2)[-1])
        torch.set_rng_state(drawn)
    assert row.then is not None
    run.session.replan(run.plan(run.session.layout, row.then, row.policy))


def resumed(run: Run, row: Row) -> Run:
    """Under another plan, from what was saved."""
    run.switch("eval")
    saved = run.save()
    run.close()
    return Run(replace(row, place=row.then or row.place), run.paged, saved)


@cache
def plain(row: Row) -> Found:
    return trained(row, paged=False)


def same(row: Row) -> None:
    """Fail where the paged run differs from the plain one."""
    theirs, ours = plain(row.plain), trained(row, paged=True)
    assert ours.numbers == theirs.numbers
    assert_same_content(ours.open, theirs.open)
    assert_same_content(ours.closed, theirs.closed)
    assert_same_content(ours.state, theirs.state)
    swaps = "swap" in POLICIES[row.policy] and row.model == "stack"
    if swaps and row.then is None:
        assert ours.swapped_bytes > 0
