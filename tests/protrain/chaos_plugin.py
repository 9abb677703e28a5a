"""An Axolotl plugin for the tests: does in a run what the variable CHAOS says, as JSON.

Either a callback or a trainer that misbehaves, by its name in `CALLBACKS`, `HOOKS` or
`TRAINERS`, or what happens to the process at a moment: the n-th call of a function after
a phase began, which is the same moment in each run.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from axolotl.integrations.base import BasePlugin
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import TrainerCallback

WORDS = "this callback was told to fail"
STRUCK = "struck at the moment that was told"
READ_FILE = "read.json"
"""In the output folder: every number that the callback has read."""
STEP = 3
"""Of four, which all save: where steps and saves are attacked."""
ROTATION = "rotate_checkpoints"
WRITES = {"mkdir", "open", "write", "write_record", "serialize_file", "rename", "fsync"}
"""Names of what is written with, in Python, torch and safetensors."""
EVENTS = (
    "on_train_begin on_epoch_begin on_step_begin on_substep_end on_pre_optimizer_step "
    "on_optimizer_step on_step_end on_prediction_step on_evaluate on_log on_save "
    "on_epoch_end on_train_end"
).split()


class Case:
    """What a callback gets in an event, and what it keeps between them."""

    model: Any
    optimizer: Any
    state: Any
    control: Any

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.read: list[float] = []
        self.kept: dict[str, Tensor] = {}

    def see(self, event: str, action: Callable[[Case], None]) -> Callable[..., None]:
        def called(_: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.state, self.control = state, control
            self.model = self.trainer.model
            self.optimizer = kwargs.get("optimizer") or self.trainer.optimizer
            action(self)

        return called

    @property
    def all(self) -> list[tuple[str, Any]]:
        return list(self.model.named_parameters())

    @property
    def blocks(self) -> list[Any]:
        """Trainable weights of the blocks."""
        named = self.model.named_parameters()
        return [p for n, p in named if ".layers." in n and p.requires_grad]

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.blocks if p.grad is not None]

    def note(self, tensors: Any) -> None:
        """Read them."""
        self.read += [t.detach().double().norm().item() for t in tensors]


def _norms(c: Case) -> None:
    c.note(p for _, p in c.all)


def _state(c: Case) -> None:
    c.note(c.model.state_dict().values())


def _gradient_norms(c: Case) -> None:
    c.note(c.gradients)
    c.read.append(len(c.gradients))


def _optimizer_state(c: Case) -> None:
    for entries in c.optimizer.state_dict()["state"].values():
        c.note(v for v in entries.values() if isinstance(v, Tensor))


def _average(c: Case) -> None:
    for name, p in c.all:
        kept = c.kept.setdefault(name, p.detach().clone())
        kept.lerp_(p.detach(), 0.1)
    c.note(c.kept.values())


def _swap_in(c: Case) -> None:
    _average(c)
    if c.control.should_evaluate:
        for name, p in c.all:
            c.kept[f"own {name}"] = p.detach().clone()
            p.data.copy_(c.kept[name])


def _swap_back(c: Case) -> None:
    for name, p in c.all:
        p.data.copy_(c.kept.pop(f"own {name}"))


TOKENS = torch.arange(3, 35).reshape(2, 16)


@torch.no_grad()
def _forward(c: Case) -> None:
    c.note([c.model(input_ids=TOKENS).logits])


def _generate(c: Case) -> None:
    tokens = c.model.generate(TOKENS[:, :4], max_new_tokens=6, do_sample=False)
    c.read += tokens.flatten().tolist()


@torch.no_grad()
def _copy(c: Case) -> None:
    other = copy.deepcopy(c.model)
    c.note([other(input_ids=TOKENS).logits, *other.state_dict().values()])


def _load_copy(c: Case) -> None:
    other = copy.deepcopy(c.model)
    other.load_state_dict({n: t * 2 for n, t in other.state_dict().items()})
    c.note(other.state_dict().values())
    _state(c)


def _load(c: Case) -> None:
    c.model.load_state_dict({n: t * 0.99 for n, t in c.model.state_dict().items()})


@torch.no_grad()
def _multiply(c: Case) -> None:
    for p in c.blocks:
        p.mul_(0.999)


def data(change: Callable[[Tensor], Any]) -> Callable[[Case], None]:
    """Calls `change` with the data of each weight."""

    def act(c: Case) -> None:
        for p in c.blocks:
            change(p.data)

    return act


def replaced(change: Callable[[Tensor], Tensor]) -> Callable[[Case], None]:
    """Gives each weight another tensor as its data."""

    def act(c: Case) -> None:
        for p in c.blocks:
            p.data = change(p.data)

    return act


def _swap_blocks(c: Case) -> None:
    layers = c.model.get_submodule("model.layers")
    pairs = zip(layers[1].parameters(), layers[3].parameters(), strict=True)
    for one, other in pairs:
        one.data, other.data = other.data, one.data


def _to_device(c: Case) -> None:
    c.model.to("cpu")


def _half(c: Case) -> None:
    c.model.half().float()


def gradient(change: Callable[[Tensor], Any]) -> Callable[[Case], None]:
    """Calls `change` with each gradient."""

    def act(c: Case) -> None:
        for tensor in c.gradients:
            change(tensor)

    return act


def _noise(c: Case) -> None:
    generator = torch.Generator().manual_seed(3)
    for g in c.gradients:
        g.add_(torch.randn(g.shape, generator=generator, dtype=g.dtype), alpha=0.01)


def _clip_again(c: Case) -> None:
    c.read.append(float(nn.utils.clip_grad_norm_(c.model.parameters(), 0.01)))


def _drop_gradients(c: Case) -> None:
    for p in c.blocks[::2]:
        p.grad = None


def _new_gradients(c: Case) -> None:
    for p in c.blocks:
        p.grad = p.grad * 0.5


def _zero_gradients(c: Case) -> None:
    c.optimizer.zero_grad()


def _freeze(c: Case) -> None:
    if c.state.global_step == 2:
        for p in c.blocks[:3]:
            p.requires_grad_(False)


def _groups(c: Case) -> None:
    for group in c.optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] = 0.3


def _save(c: Case) -> None:
    folder = Path(c.trainer.args.output_dir) / f"own-{c.state.global_step}"
    c.trainer.save_model(str(folder))
    for file in sorted(folder.glob("*.safetensors")):
        c.note(tensor for _, tensor in sorted(load_file(file).items()))


def _train_another(c: Case) -> None:
    model = nn.Linear(4, 4)
    adamw = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        adamw.step()
        c.read.append(loss.item())


def _raise(c: Case) -> None:
    raise RuntimeError(WORDS)


BEFORE, AFTER, END = "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"
CALLBACKS: dict[str, dict[str, Callable[[Case], None]]] = {
    "norms of weights in every event": dict.fromkeys(EVENTS, _norms),
    "state_dict in every event": dict.fromkeys(EVENTS, _state),
    "norms of gradients before the update": {BEFORE: _gradient_norms},
    "norms of gradients after the update": {AFTER: _gradient_norms},
    "state of the optimizer": {END: _optimizer_state},
    "moving average of weights": {END: _average},
    "moving average shown to the evaluation": {END: _swap_in, "on_evaluate": _swap_back},
    "forward": {END: _forward},
    "generation": {END: _generate},
    "copy.deepcopy of the model, run": {END: _copy},
    "copy.deepcopy of the model, loaded": {END: _load_copy},
    "load_state_dict": {END: _load},
    "p.mul_ under no_grad": {END: _multiply},
    "p.data.mul_": {END: data(lambda d: d.mul_(0.999))},
    "p.data.mul_ before a step": {"on_step_begin": data(lambda d: d.mul_(0.999))},
    "p.data.mul_ between micro-batches": {"on_substep_end": data(lambda d: d.mul_(0.9))},
    "p.data.mul_ before the update": {BEFORE: data(lambda d: d.mul_(0.999))},
    "p.data.mul_ after the update": {AFTER: data(lambda d: d.mul_(0.999))},
    "p.data.copy_": {END: data(lambda d: d.copy_(d * 0.5))},
    "p.data.clamp_": {END: data(lambda d: d.clamp_(-0.02, 0.02))},
    "rows set to zero": {END: data(lambda d: d[:2].zero_())},
    "p.data = its clone": {END: replaced(lambda d: d.clone())},
    "p.data = another tensor": {END: replaced(lambda d: d * 0.9)},
    "weights of two blocks exchanged": {END: _swap_blocks},
    "model.to(its device)": {END: _to_device},
    "model.half().float()": {END: _half},
    "gradients clipped by value": {BEFORE: gradient(lambda g: g.clamp_(-1e-3, 1e-3))},
    "gradients clipped by norm again": {BEFORE: _clip_again},
    "noise on gradients": {BEFORE: _noise},
    "grad.mul_ between micro-batches": {"on_substep_end": gradient(lambda g: g.mul_(2))},
    "p.grad = None for every second": {BEFORE: _drop_gradients},
    "p.grad = another tensor": {BEFORE: _new_gradients},
    "zero_grad before the update": {BEFORE: _zero_gradients},
    "zero_grad between micro-batches": {"on_substep_end": _zero_gradients},
    "requires_grad_(False) for three weights": {END: _freeze},
    "learning rate and weight decay": {"on_step_begin": _groups},
    "trainer.save_model": {END: _save},
    "another model trained in between": {END: _train_another},
    "torch.manual_seed": {END: lambda c: torch.manual_seed(c.state.global_step) and None},
    "gc.collect": {END: lambda c: gc.collect() and None},
    "raises": {END: _raise},
}
"""What misbehaves: a function for each event that the callback overrides."""


def _halve(tensor: Tensor) -> Tensor:
    return tensor * 0.5


def _halve_in_place(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def _hook(c: Case, method: str, function: Callable[[Tensor], Any]) -> None:
    c.model = c.trainer.model
    for p in c.blocks:
        getattr(p, method)(function)


_ACCUMULATED = "register_post_accumulate_grad_hook", _halve_in_place
HOOKS: dict[str, tuple[str, str, Callable[[Tensor], Any]]] = {
    "tensor hooks before training": ("created", "register_hook", _halve),
    "tensor hooks during training": ("on_train_begin", "register_hook", _halve),
    "post-accumulate hooks before training": ("created", *_ACCUMULATED),
    "post-accumulate hooks during training": ("on_train_begin", *_ACCUMULATED),
}
"""When hooks are registered, with which method, and what they do."""


if TYPE_CHECKING:
    _Trainer = Any
else:
    _Trainer = object


class Twice(_Trainer):
    """Two backward passes a micro-batch."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        super().training_step(*args, **kwargs)
        return super().training_step(*args, **kwargs)


class Clips(_Trainer):
    """Clips gradients by value after each backward pass."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.clamp_(-1e-3, 1e-3)
        return loss


class Scales(_Trainer):
    """Writes weights outside of all events."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.window():
            for p in self.model.parameters():
                p.data.mul_(0.999)
        return super().training_step(*args, **kwargs)

    def window(self) -> Any:
        return nullcontext()


class ScalesInWindow(Scales):
    """As one should."""

    def window(self) -> Any:
        run = getattr(self, "protrain", None)
        return run.session.weights() if run is not None else nullcontext()


TRAINERS: dict[str, type] = {
    "a trainer that runs each micro-batch twice": Twice,
    "a trainer that clips gradients by value": Clips,
    "a trainer that writes weights": Scales,
    "a trainer that writes weights in session.weights()": ScalesInWindow,
}


class ChaosPlugin(BasePlugin):
    """To be listed last."""

    def __init__(self) -> None:
        super().__init__()
        self._told = json.loads(os.environ.get("CHAOS", "{}"))
        own = self._told.get("rank", 0) == int(os.environ.get("RANK", "0"))
        phase = self._told.get("phase") if own else None
        self._begin = Moment(phase, self._told).begin
        self._counting = "phase" in self._told

    def get_trainer_cls(self, cfg: Any) -> Any:
        if own := TRAINERS.get(self._told.get("does", "")):
            # imported here: it takes along what plugins have added by now
            from axolotl.core.trainers.base import AxolotlTrainer

            return type(own.__name__, (own, AxolotlTrainer), {})

    def pre_model_load(self, cfg: Any) -> None:
        self._begin("loading")

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        self._begin("planning")

    def post_train(self, cfg: Any, model: Any) -> None:
        # before and after Axolotl saves the model
        self._begin("final save")

    def add_callbacks_post_trainer(
        self, cfg: Any, trainer: Any
    ) -> list[TrainerCallback]:
        case, does = Case(trainer), self._told.get("does", "")
        events: dict[str, list[Callable[..., None]]] = {}
        for event, action in CALLBACKS.get(does, {}).items():
            events[event] = [case.see(event, action)]
        if does in HOOKS:
            when, method, function = HOOKS[does]
            hook = partial(_hook, case, method, function)
            if when == "created":
                hook()
            else:
                events[when] = [lambda *_, **__: hook()]
        if self._counting:
            for event, action in self._phases(trainer).items():
                events[event] = [action]
        elif does:
            events.setdefault("on_train_end", []).append(
                lambda *_, **__: Path(cfg.output_dir, READ_FILE).write_text(
                    json.dumps(case.read)
                )
            )

        def method_of(actions: list[Callable[..., None]]) -> Callable[..., None]:
            def called(*args: Any, **kwargs: Any) -> None:
                for action in actions:
                    action(*args, **kwargs)

            return called

        methods = {event: method_of(actions) for event, actions in events.items()}
        return [type("Misbehaving", (TrainerCallback,), methods)()]

    def _phases(self, trainer: Any) -> dict[str, Callable[..., None]]:
        """Begin phases of the step that is attacked."""

        def at(phase: str, step: int) -> Callable[..., None]:
            def event(_: Any, args: Any, state: Any, *__: Any, **___: Any) -> None:
                if state.global_step == step:
                    self._begin(phase)

            return event

        def backward(_model: Any, _inputs: Any, output: Any) -> None:
            if trainer.state.global_step == STEP - 1 and output.loss.requires_grad:
                output.loss.register_hook(lambda _: self._begin("backward"))

        trainer.model.register_forward_hook(backward)
        return {
            "on_train_begin": lambda *_, **__: self._begin("rest"),
            "on_step_begin": at("forward", STEP - 1),
            BEFORE: at("update", STEP - 1),
            END: at("save", STEP),
            "on_save": at("rest", STEP),
            "on_train_end": at("final save", STEP + 1),
        }


class Moment:
    """Counts calls since a phase began, and acts at one of them.

    Args:
        wanted: Name of the phase; None for none, "" to count them all.
        told: `call`, the number of the call; `act`, what happens then; `writes`, whether
            only calls that write count; `counts`, the file that gets the numbers.
    """

    def __init__(self, wanted: str | None, told: dict[str, Any]) -> None:
        self._wanted, self._told = wanted, told
        self._phase = ""
        self._calls: Counter[str] = Counter()
        self._done = False

    def begin(self, phase: str) -> None:
        """Another phase begins."""
        self._phase = phase
        if self._wanted is not None and not self._done:
            # rotation begins inside of saving
            counts = phase == (self._wanted or phase)
            inside = self._wanted == "rotation" and phase == "save"
            sys.setprofile(self._called if counts or inside else None)
        if "counts" in self._told:
            Path(self._told["counts"]).write_text(json.dumps(self._calls))

    def _called(self, frame: Any, event: str, argument: Any) -> None:
        if self._phase == "save" and frame.f_code.co_name == ROTATION:
            self._phase = "rotation"
        if "return" in event or self._done:
            return
        self._calls[self._phase] += 1
        if event == "c_call" and argument.__name__ in WRITES:
            self._calls[f"{self._phase} writes"] += 1
        counted = f"{self._wanted}{' writes' if self._told.get('writes') else ''}"
        if self._calls[counted] >= self._told.get("call", sys.maxsize):
            self._done = True
            sys.setprofile(None)
            os.write(2, f"{STRUCK}\n".encode())
            ACTS[self._told["act"]]()


def _fill_disk(limit: int = 0, fault: Any = signal.SIG_IGN) -> None:
    """From now on no file may grow beyond `limit`; `fault` is for who tries."""
    signal.signal(signal.SIGXFSZ, fault)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def _signal(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


ACTS: dict[str, Callable[[], None]] = {
    "kill": _signal(signal.SIGKILL),
    "interrupt": _signal(signal.SIGINT),
    "terminate": _signal(signal.SIGTERM),
    "full": _fill_disk,
    **{
        f"{what} at {size}": partial(_fill_disk, size, fault)
        for what, fault in (("full", signal.SIG_IGN), ("kill", signal.SIG_DFL))
        for size in (1_000, 150_000, 300_000)
    },
}
"""By name; with a size, within the first write that passes it."""
