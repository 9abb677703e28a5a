"""An Axolotl plugin for the tests: does in a run what the variable CHAOS says, as JSON.

`does` names what misbehaves, in `CALLBACKS` or `TRAINERS`. `phase`, `call` and
`act` say what happens to the process at that call of a function after a phase began:
the same moment in each run.
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

if TYPE_CHECKING:
    _Trainer = Any
else:
    _Trainer = object

WORDS = "this callback was told to fail"
STRUCK = "struck at the moment that was told"
CALLS_FILE, READ_FILE = "calls.json", "read.json"
"""In the output folder: calls of each phase, numbers that the callback has read."""
STEP = 3
"""Whose phases are attacked."""
WRITES = {"mkdir", "open", "write_record", "serialize_file", "rename", "fsync"}
"""Names of what is written with, in Python, torch and safetensors."""
EVENTS = (
    "on_train_begin on_epoch_begin on_step_begin on_substep_end on_pre_optimizer_step "
    "on_optimizer_step on_step_end on_prediction_step on_evaluate on_log on_save "
    "on_epoch_end on_train_end"
).split()
START, BETWEEN, BEFORE, AFTER, END = EVENTS[2:7]
CREATED = "created"
"""No event: the trainer is there, and has not begun."""
TOKENS = torch.arange(3, 35).reshape(2, 16)
READ: list[float] = []
KEPT: dict[str, Tensor] = {}
Action = Callable[[Any], Any]
"""Gets the trainer."""


def named(t: Any) -> list[tuple[str, Any]]:
    return list(t.model.named_parameters())


def blocks(t: Any) -> list[Any]:
    """Trainable weights of the blocks."""
    return [p for n, p in named(t) if ".layers." in n and p.requires_grad]


def read(tensors: Any) -> None:
    READ.extend(t.detach().double().norm().item() for t in tensors)


def weights(change: Callable[[Any], Any]) -> Action:
    """Calls `change` with each weight."""
    return lambda t: [change(p) for p in blocks(t)]


def gradients(change: Callable[[Any], Any]) -> Action:
    """Calls `change` with each gradient that there is."""
    return lambda t: [change(p.grad) for p in blocks(t) if p.grad is not None]


def _set(p: Any, new: Tensor) -> None:
    p.data = new


def _read_gradients(t: Any) -> None:
    found = [p.grad for p in blocks(t) if p.grad is not None]
    READ.append(len(found))
    read(found)


def _read_optimizer(t: Any) -> None:
    for entries in t.optimizer.state_dict()["state"].values():
        read(value for value in entries.values() if isinstance(value, Tensor))


def _average(t: Any) -> None:
    for name, p in named(t):
        KEPT.setdefault(name, p.detach().clone()).lerp_(p.detach(), 0.1)
    read(KEPT[name] for name, _ in named(t))


def _show_average(t: Any) -> None:
    _average(t)
    if t.control.should_evaluate:
        for name, p in named(t):
            KEPT[f"own {name}"] = p.detach().clone()
            p.data.copy_(KEPT[name])


def _show_own(t: Any) -> None:
    # Axolotl may have evaluated unasked
    for name, p in named(t):
        p.data.copy_(KEPT.pop(f"own {name}", p))


@torch.no_grad()
def _forward(t: Any) -> None:
    read([t.model(input_ids=TOKENS).logits])


def _generate(t: Any) -> None:
    made = t.model.generate(TOKENS[:, :4], max_new_tokens=6, do_sample=False)
    READ.extend(made.flatten().tolist())


@torch.no_grad()
def _copy(t: Any) -> None:
    other = copy.deepcopy(t.model)
    read([other(input_ids=TOKENS).logits, *other.state_dict().values()])


def _load_copy(t: Any) -> None:
    other = copy.deepcopy(t.model)
    other.load_state_dict({n: x * 2 for n, x in other.state_dict().items()})
    read([*other.state_dict().values(), *t.model.state_dict().values()])


def _load(t: Any) -> None:
    t.model.load_state_dict({n: x * 0.99 for n, x in t.model.state_dict().items()})


def _exchange(t: Any) -> None:
    layers = t.model.get_submodule("model.layers")
    pairs = zip(layers[1].parameters(), layers[3].parameters(), strict=True)
    for one, other in pairs:
        one.data, other.data = other.data, one.data


def _noise(t: Any) -> None:
    chance = torch.Generator().manual_seed(3)
    gradients(lambda g: g.add_(torch.randn(g.shape, generator=chance), alpha=0.01))(t)


def _clip_again(t: Any) -> None:
    READ.append(float(nn.utils.clip_grad_norm_(t.model.parameters(), 0.01)))


def _drop_gradients(t: Any) -> None:
    for p in blocks(t)[::2]:
        p.grad = None


def _new_gradients(t: Any) -> None:
    for p in blocks(t):
        p.grad = p.grad * 0.5


def _freeze(t: Any) -> None:
    for p in blocks(t)[:3] if t.state.global_step == 2 else ():
        p.requires_grad_(False)


def _change_groups(t: Any) -> None:
    for group in t.optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] = 0.3


def _save(t: Any) -> None:
    folder = Path(t.args.output_dir) / f"own-{t.state.global_step}"
    t.save_model(str(folder))
    for file in folder.glob("*.safetensors"):
        read(tensor for _, tensor in sorted(load_file(file).items()))


def _train_another(_: Any) -> None:
    model = nn.Linear(4, 4)
    adamw = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        adamw.step()
        READ.append(loss.item())


def _raise(_: Any) -> None:
    raise RuntimeError(WORDS)


def _halve(p: Any) -> None:
    p.grad.mul_(0.5)


def _in_steps(t: Any) -> None:
    """Hooks of the optimizer's step that look at everything, and scale moments."""
    optimizer = getattr(t.optimizer, "optimizer", t.optimizer)

    def look(*_: Any) -> None:
        for entries in optimizer.state.values():
            read(value for value in entries.values() if isinstance(value, Tensor))
        read(p for _, p in named(t))
        _read_gradients(t)

    def scale(*_: Any) -> None:
        for entries in optimizer.state.values():
            entries["exp_avg"].mul_(0.9)

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(scale)
    optimizer.register_step_post_hook(look)


_hook = weights(lambda p: p.register_hook(lambda g: g * 0.5))
_accumulated = weights(lambda p: p.register_post_accumulate_grad_hook(_halve))
_mul = weights(lambda p: p.data.mul_(0.999))
CALLBACKS: dict[str, dict[str, Action]] = {
    "norms of weights in every event": dict.fromkeys(
        EVENTS, lambda t: read(p for _, p in named(t))
    ),
    "state_dict in every event": dict.fromkeys(
        EVENTS, lambda t: read(t.model.state_dict().values())
    ),
    "norms of gradients before the update": {BEFORE: _read_gradients},
    "norms of gradients after the update": {AFTER: _read_gradients},
    "state of the optimizer": {END: _read_optimizer},
    "moving average of weights": {END: _average},
    "moving average, evaluated": {END: _show_average, "on_evaluate": _show_own},
    "forward": {END: _forward},
    "generation": {END: _generate},
    "copy.deepcopy of the model, run": {END: _copy},
    "copy.deepcopy of the model, loaded": {END: _load_copy},
    "load_state_dict": {END: _load},
    "p.mul_ under no_grad": {END: torch.no_grad()(weights(lambda p: p.mul_(0.999)))},
    "p.data.mul_": {END: _mul},
    "p.data.mul_ before a step": {START: _mul},
    "p.data.mul_ between micro-batches": {BETWEEN: _mul},
    "p.data.mul_ before the update": {BEFORE: _mul},
    "p.data.mul_ after the update": {AFTER: _mul},
    "p.data.copy_": {END: weights(lambda p: p.data.copy_(p * 0.5))},
    "p.data.clamp_": {END: weights(lambda p: p.data.clamp_(-0.02, 0.02))},
    "rows set to zero": {END: weights(lambda p: p.data[:2].zero_())},
    "p.data = its clone": {END: weights(lambda p: _set(p, p.data.clone()))},
    "p.data = another tensor": {END: weights(lambda p: _set(p, p.data * 0.9))},
    "weights of two blocks exchanged": {END: _exchange},
    "model.to(its device)": {END: lambda t: t.model.to("cpu")},
    "model.half().float()": {END: lambda t: t.model.half().float()},
    "gradients clipped by value": {BEFORE: gradients(lambda g: g.clamp_(-1e-3, 1e-3))},
    "gradients clipped by norm again": {BEFORE: _clip_again},
    "noise on gradients": {BEFORE: _noise},
    "grad.mul_ between micro-batches": {BETWEEN: gradients(lambda g: g.mul_(2))},
    "p.grad = None for every second": {BEFORE: _drop_gradients},
    "p.grad = another tensor": {BEFORE: _new_gradients},
    "zero_grad before the update": {BEFORE: lambda t: t.optimizer.zero_grad()},
    "zero_grad between micro-batches": {BETWEEN: lambda t: t.optimizer.zero_grad()},
    "requires_grad_(False) for three weights": {END: _freeze},
    "learning rate and weight decay": {START: _change_groups},
    "trainer.save_model": {END: _save},
    "another model trained in between": {END: _train_another},
    "torch.manual_seed": {END: lambda t: torch.manual_seed(t.state.global_step)},
    "gc.collect": {END: lambda _: gc.collect()},
    "raises": {END: _raise},
    "tensor hooks before training": {CREATED: _hook},
    "tensor hooks during training": {EVENTS[0]: _hook},
    "hooks of the optimizer's step": {EVENTS[0]: _in_steps},
    "post-accumulate hooks before training": {CREATED: _accumulated},
    "post-accumulate hooks during training": {EVENTS[0]: _accumulated},
}
"""What a callback does in which of the events; it overrides no other."""


class Twice(_Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        super().training_step(*args, **kwargs)
        return super().training_step(*args, **kwargs)


class Clips(_Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        gradients(lambda g: g.clamp_(-1e-3, 1e-3))(self)
        return loss


class Scales(_Trainer):
    @staticmethod
    @torch.no_grad()
    def scale(t: Any) -> None:
        weights(lambda p: p.mul_(0.999))(t)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.scale(self)
        return super().training_step(*args, **kwargs)


class ScalesInWindow(Scales):
    @staticmethod
    def scale(t: Any) -> None:
        run = getattr(t, "protrain", None)
        with run.full_params() if run is not None else nullcontext():
            _mul(t)


class Schedules(_Trainer):
    """Its learning rate depends on weights."""

    def create_scheduler(self, *_: Any, **__: Any) -> Any:
        def scale(_step: int) -> float:
            norms = [p.detach().double().norm().item() for p in blocks(self)]
            READ.extend(norms)
            return 1 / (1 + sum(norms) / len(norms))

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, scale)
        return self.lr_scheduler


TRAINERS: dict[str, type] = {
    "a trainer that runs each micro-batch twice": Twice,
    "a trainer that clips gradients by value": Clips,
    "a trainer that writes weights": Scales,
    "a trainer that writes in trainer.protrain.full_params()": ScalesInWindow,
    "a trainer whose schedule reads weights": Schedules,
}


class ChaosPlugin(BasePlugin):
    """To be listed last."""

    def __init__(self) -> None:
        super().__init__()
        self._told = json.loads(os.environ.get("CHAOS", "{}"))
        self._does = self._told.get("does", "")
        self._moment = Moment(self._told)

    def get_trainer_cls(self, cfg: Any) -> Any:
        if own := TRAINERS.get(self._does):
            # imported here: it takes along what plugins have added by now
            from axolotl.core.trainers.base import AxolotlTrainer

            return type(own.__name__, (own, AxolotlTrainer), {})

    def pre_model_load(self, cfg: Any) -> None:
        self._moment.begin("loading")

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        self._moment.begin("planning")

    def post_train(self, cfg: Any, model: Any) -> None:
        # before and after Axolotl saves the model
        self._moment.begin("final save")
        Path(cfg.output_dir, CALLS_FILE).write_text(json.dumps(self._moment.calls))

    def add_callbacks_post_trainer(
        self, cfg: Any, trainer: Any
    ) -> list[TrainerCallback]:
        actions = {e: [a] for e, a in CALLBACKS.get(self._does, {}).items()}
        for action in actions.pop(CREATED, []):
            action(trainer)
        if self._does and trainer.is_world_process_zero():
            file = Path(cfg.output_dir, READ_FILE)
            last = actions.setdefault("on_train_end", [])
            last.append(lambda _: file.write_text(json.dumps(READ)))
        if self._moment.wanted is not None:
            actions |= {e: [a] for e, a in self._phases(trainer).items()}

        def called(actions: list[Action], *_: Any, **__: Any) -> None:
            for action in actions:
                action(trainer)

        methods = {
            event: staticmethod(partial(called, a)) for event, a in actions.items()
        }
        return [type("Misbehaving", (TrainerCallback,), methods)()]

    def _phases(self, trainer: Any) -> dict[str, Action]:
        """Begin phases of the step that is attacked."""

        def at(phase: str, step: int) -> Action:
            return lambda t: t.state.global_step == step and self._moment.begin(phase)

        def backward(_model: Any, _inputs: Any, output: Any) -> None:
            begin = at("backward", STEP - 1)
            output.loss.register_hook(lambda _: begin(trainer) or None)

        trainer.model.register_forward_hook(backward)
        return {
            "on_train_begin": lambda _: self._moment.begin("rest"),
            START: at("forward", STEP - 1),
            BEFORE: at("update", STEP - 1),
            END: at("save", STEP),
            "on_save": at("rest", STEP),
        }


class Moment:
    """Counts calls since a phase began, and acts at one of them.

    Args:
        told: `phase`, "" to count all of them; `call`, the number of the call; `act`,
            what happens then; `counted`, " writes" if only calls that write count;
            `rank`, whose moment it is.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        own = told.get("rank", 0) == int(os.environ.get("RANK", "0"))
        self.wanted: str | None = told.get("phase") if own else None
        self._told, self._phase = told, ""
        self.calls: Counter[str] = Counter()

    def begin(self, phase: str) -> None:
        """Another phase begins."""
        ended, self._phase = self._phase, phase
        if self.wanted and ended == self.wanted != phase:
            # it had fewer calls than in the run that counted them
            self._strike()
        # rotation is a part of saving
        outer = "save" if self.wanted == "rotation" else self.wanted
        if self.wanted is not None:
            sys.setprofile(self._called if outer in ("", phase) else None)

    def _called(self, frame: Any, event: str, argument: Any) -> None:
        if self._phase == "save" and frame.f_code.co_name == "rotate_checkpoints":
            self._phase = "rotation"
        writes = event == "c_call" and argument.__name__ in WRITES
        self.calls[self._phase] += event in ("call", "c_call")
        self.calls[f"{self._phase} writes"] += writes
        counted = f"{self.wanted}{self._told.get('counted', '')}"
        if self.calls[counted] >= self._told.get("call", sys.maxsize):
            self._strike()

    def _strike(self) -> None:
        self.wanted = None
        sys.setprofile(None)
        os.write(2, f"{STRUCK}\n".encode())
        ACTS[self._told["act"]]()


def _limit_files(nbytes: int, fault: Any) -> None:
    """From now on no file may grow beyond that; `fault` is the signal for who tries."""
    signal.signal(signal.SIGXFSZ, fault)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


FILE_BYTES = 1_000, 150_000, 300_000
"""Sizes at which the model's file, of 240,000, or the optimizer's, of 480,000, ends."""
ACTS: dict[str, Callable[[], None]] = {
    **{
        name: partial(signal.raise_signal, getattr(signal, name))
        for name in ("SIGKILL", "SIGINT", "SIGTERM")
    },
    "full": partial(_limit_files, 0, signal.SIG_IGN),
    **{f"full at {n}": partial(_limit_files, n, signal.SIG_IGN) for n in FILE_BYTES},
    **{f"kill at {n}": partial(_limit_files, n, signal.SIG_DFL) for n in FILE_BYTES},
}
"""What happens; with a size, within the first write that passes it."""
