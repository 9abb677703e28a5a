"""The trainer's side: when to open and close, whose optimizer, whose gradient norm."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast
from unittest.mock import patch

import torch
from accelerate.utils import DynamoBackend, send_to_device
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, TrainerCallback, trainer_utils
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from .callbacks import BLIND
from .core.checkpoint import (
    OPTIMIZER,
    SCHEDULER,
    discard,
    has_state,
    load_states,
    publish,
    require_space,
    require_whole,
    restore,
    restored_on_failure,
    staged,
)
from .core.engine.data_parallel import reduced_by_ddp, without_ddp
from .core.engine.ranks import Ranks
from .core.errors import ConfigError
from .generation import Sampled, generates
from .objective import objective_of
from .run import TrainingRun
from .saving import later

_UPLOADERS = (
    "TrainerCallback WandbCallback MLflowCallback TrackioCallback ClearMLCallback "
    "SwanLabCallback"
).split()
"""Callbacks whose `on_save` does nothing, or sends the folder of the state's step and looks at
nothing else that training changes: they may wait for the folder."""


@dataclass
class ProTrainTrainingArguments:
    """Mixed into Axolotl's training arguments while the plugin is listed."""

    protrain_active: bool = False

    @property
    def place_model_on_device(self) -> bool | None:
        """False keeps `Trainer.__init__` from moving a model that does not fit."""
        if self.protrain_active:
            return False
        return super().place_model_on_device  # type: ignore[misc]


if TYPE_CHECKING:
    _Mixed = Trainer
    _MixedHandler = CallbackHandler
    _MixedScheduler = LRScheduler
else:
    _Mixed = _MixedHandler = _MixedScheduler = object


class ProTrainTrainerMixin(_Mixed):
    """Put in front of whatever trainer class Axolotl built.

    A subclass made by `page_trainer` carries the run; the instance gets no attribute.
    """

    protrain: ClassVar[TrainingRun]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self.protrain.signals.installed():
            failed = True
            try:
                result = super().train(*args, **kwargs)
                failed = False
                return result
            except RuntimeError as error:
                if self.protrain.report is not None:
                    self.protrain.recovery.explain(error)
                raise
            finally:
                self.protrain.close(failed)

    def _prepare_for_training(self, max_steps: int, loader: Any, *args: Any) -> Any:
        # weights are loaded, requires_grad and hooks are final, nothing is wrapped yet
        model: Any = self.model
        modes = [(module, module.training) for module in model.modules()]
        # as each step does: what looked at a reference before may have left it in eval
        model.train()
        saves = self.args.save_strategy != "no" or self.protrain.saves_when_asked
        saves = saves and not self.args.save_only_model
        objective = objective_of(cast(Any, self), loader.dataset, loader.collate_fn)
        self.protrain.open(model, self.args.device, saves, objective)
        # callbacks find them as under the plain run, until the first step begins
        for module, mode in modes:
            module.training = mode
        with ExitStack() as undo:
            # accelerate must neither move the model nor the optimizer's host state
            undo.enter_context(
                patch.object(self.accelerator, "device_placement", False)
            )
            # nor compile the model: the session compiles its blocks
            dynamo = cast(Any, self.accelerator.state).dynamo_plugin
            undo.enter_context(patch.object(dynamo, "backend", DynamoBackend.NO))
            several = self.protrain.ranks.world.size > 1
            if several and not reduced_by_ddp(model):
                undo.enter_context(without_ddp(self.accelerator, model))
            return super()._prepare_for_training(max_steps, loader, *args)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        # some make their state at once, which belongs where the weights are
        with self.protrain.full_params():
            self.optimizer = super().create_optimizer(*args, **kwargs)
        self.optimizer = self.protrain.wrap_optimizer(self.optimizer, self.accelerator)
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        # it makes a first step at once
        with self.protrain.full_params():
            scheduler: Any = super().create_scheduler(*args, **kwargs)
        foreign = any(self.protrain.ranks.collect(_is_foreign(scheduler)))
        if foreign and not isinstance(scheduler, ShowingSchedulerMixin):
            _put_in_front(scheduler, ShowingSchedulerMixin, protrain=self.protrain)
        return scheduler

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if generates(cast(Any, self)):
            inputs = self._sampled(model, inputs)
        # when it is repeated the last one of its step may be under way
        synchronises, plain = self.accelerator.sync_gradients, super().training_step

        def step() -> Any:
            self.protrain.begin_micro_batch(synchronises, inputs)
            return plain(model, inputs, *args, **kwargs)

        return self.protrain.recovery.attempt(step, "forward")

    def _sampled(self, model: nn.Module, inputs: Any) -> Sampled:
        """Sample before the step begins, as `Trainer.training_step` would inside of it: a
        step that is repeated has the same answers, and asks nobody for rewards again."""
        model.train()
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
        return Sampled(self._prepare_inputs(inputs))

    def _prepare_inputs(self, inputs: Any) -> Any:
        if isinstance(inputs, Sampled):
            return inputs.batch
        sampling = self.protrain.sampling(self) if generates(cast(Any, self)) else None
        with sampling or nullcontext():
            prepared = super()._prepare_inputs(inputs)
        if self.protrain.session is None:
            # before and after training the model is on the host
            return send_to_device(prepared, cast(Any, self.model).device)
        return prepared

    def _clip_grad_norm(self, model: Any) -> Any:
        plain = super()._clip_grad_norm

        def clip() -> Any:
            norm = self.protrain.clip_grad_norm(self.args.max_grad_norm)
            return norm if norm is not None else plain(model)

        return self.protrain.recovery.attempt(clip, "update")

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        plain = super()._get_grad_norm

        def norm() -> Any:
            if grad_norm is not None:
                return plain(model, grad_norm=grad_norm)
            return plain(model, grad_norm=self.protrain.clip_grad_norm(float("inf")))

        return self.protrain.recovery.attempt(norm, "update")

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self.protrain.note_peak()
        if "loss" in logs:
            step = self.state.global_step
            logs.update(self.protrain.log_values(step, logs["loss"]))
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any, **kwargs: Any) -> None:
        """As plain, but in a folder aside; older ones go when this one has its name."""
        ranks, run = self.protrain.ranks, self._get_output_dir(trial=trial)
        session = self.protrain.session
        run_dir = Path(run)
        self.protrain.saves.settle()
        final = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            require_space(run_dir, self.protrain.checkpoint_bytes)
        snapshot = self.protrain.snapshot(self._readers())
        with restored_on_failure(run_dir, publishes=ranks.rank == 0):
            if ranks.local_rank == 0:
                restore(run_dir)
            ranks.collect(None)
            folder = staged(final)
            with (
                patch.object(self, "_get_output_dir", lambda trial: str(folder.parent)),
                patch.object(self, "_push_from_checkpoint", lambda _folder: None),
                session.gathered_state() if session else nullcontext(),
                later(snapshot, folder) if snapshot else nullcontext(),
            ):
                super()._save_checkpoint(model, trial, **kwargs)
            best = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best == final.name or (run_dir / best).exists():
                self.state.best_model_checkpoint = os.path.join(run, best)
                if self.args.should_save:
                    self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
            saves_state = self.args.should_save and not self.args.save_only_model
            meant = (OPTIMIZER, SCHEDULER) if saves_state else ()
            if snapshot is None:
                publish_together(ranks, final, meant)
        best_model = self.state.best_model_checkpoint
        said = partial(self.protrain.say_saved, final)

        def rotate() -> None:
            removal = SimpleNamespace(rmtree=discard)
            with patch.object(trainer_utils, "shutil", removal):
                rotate_checkpoints(
                    output_dir=run,
                    save_total_limit=self.args.save_total_limit,
                    best_model_checkpoint=best_model,
                    use_mtime=True,
                )

        if snapshot is not None:
            saves = self.protrain.saves
            saves.start(snapshot, final, rotate, meant)
            saves.call_afterwards(said)
            # at the end the Trainer removes checkpoints too
            saves.settle(blocks=self.control.should_training_stop)
            return
        said()
        if self.args.push_to_hub:
            self._push_from_checkpoint(os.path.join(run, final.name))
        if self.args.should_save:
            rotate()

    def _readers(self) -> list[str]:
        """Name all who may read a checkpoint as soon as it is saved."""
        readers = [
            type(callback).__name__
            for callback in self.callback_handler.callbacks
            if _saver(callback) not in _UPLOADERS
        ]
        return readers + ["push_to_hub"] * self.args.push_to_hub

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As plain, but looked at first, and each rank reads from one mapping of the file,
        not to its GPU."""
        if checkpoint is not None:
            require_whole(Path(checkpoint), self.args.save_only_model)
        # in the place of transformers' own alone: Axolotl and others do more around it
        loads = "_load_optimizer_and_scheduler"
        with patch.object(Trainer, loads, _load_optimizer_and_scheduler):
            super()._load_optimizer_and_scheduler(checkpoint)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        where = next(cast(Any, self.model).parameters()).device
        if self.protrain.session is None and where.type != self.args.device.type:
            raise ConfigError(
                f"trainer.evaluate: the model is on the host, and batches go to "
                f"{self.args.device}. It is evaluated paged while it trains "
                "(`eval_strategy`); before and after that call "
                "`trainer.model.to(trainer.args.device)`, where it fits."
            )
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.protrain.evaluating():
            return super().prediction_step(*args, **kwargs)

    def _load_best_model(self, *args: Any, **kwargs: Any) -> Any:
        # training is over; from here on the model is an ordinary one
        self.protrain.close()
        return super()._load_best_model(*args, **kwargs)


def _load_optimizer_and_scheduler(trainer: Any, checkpoint: str | None) -> None:
    if checkpoint is not None and has_state(Path(checkpoint)):
        load_states(Path(checkpoint), trainer.optimizer, trainer.lr_scheduler)


def publish_together(ranks: Ranks, checkpoint: Path, meant: Sequence[str]) -> None:
    """`publish` a checkpoint once all ranks have written their part of it."""
    ranks.collect(None)
    if ranks.rank == 0:
        publish(checkpoint, meant)
    ranks.collect(None)
    if ranks.rank != 0 and ranks.local_rank == 0:
        # gone already where nodes share the folder
        with suppress(FileNotFoundError):
            publish(checkpoint, meant)


class ShowingHandlerMixin(_MixedHandler):
    """Put in front of the trainer's callback handler: shows weights to who may look, and
    tells the run where steps begin and end.

    Holds no trainer: one in a cycle is there until the interpreter ends, and its progress
    bar then asks for modules that are gone.
    """

    protrain: ClassVar[TrainingRun]
    trainer: ClassVar[Trainer]

    def call_event(
        self, event: str, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Any:
        call = partial(super().call_event, event, args, control=control, **kwargs)
        if event == "on_save" and self.protrain.saves.is_running:
            self.protrain.saves.call_afterwards(partial(call, state=copy(state)))
            return control
        if event == "on_pre_optimizer_step" and self.protrain.session is not None:
            self.protrain.recovery.probe_update()
        with self.protrain.for_event(event, self.callbacks):
            control = call(state=state)
            if event == "on_step_begin":
                self.protrain.begin_step(self.trainer)
            elif event == "on_step_end":
                self.protrain.end_step()
        return control


class ShowingSchedulerMixin(_MixedScheduler):
    """Put in front of a learning-rate scheduler of somebody else's: its steps are shown
    weights, gradients and state."""

    protrain: ClassVar[TrainingRun]

    def step(self, *args: Any, **kwargs: Any) -> None:
        with self.protrain.full_params():
            super().step(*args, **kwargs)


def page_trainer(trainer: Trainer, run: TrainingRun) -> None:
    """Put the mixin in front of the trainer's own class, whichever that is."""
    held = {"protrain": run, "trainer": weakref.proxy(trainer)}
    _put_in_front(trainer, ProTrainTrainerMixin, **held)
    _put_in_front(trainer.callback_handler, ShowingHandlerMixin, **held)


def _put_in_front(owner: Any, mixin: type, **held: Any) -> None:
    own = type(owner)
    owner.__class__ = type(f"ProTrain{own.__name__}", (mixin, own), held)


def _is_foreign(scheduler: Any) -> bool:
    """Tell whether neither torch, transformers nor Axolotl has made what a scheduler
    calls, or one that it is made of."""
    parts = [type(scheduler), *getattr(scheduler, "lr_lambdas", ())]
    parts = [part.func if isinstance(part, partial) else part for part in parts]
    homes = {(part.__module__ or "").partition(".")[0] for part in parts}
    held = [*vars(scheduler).values(), *getattr(scheduler, "_schedulers", ())]
    inner = [one for one in held if isinstance(one, LRScheduler)]
    blind = {*BLIND, "torch", "accelerate"}
    return not homes <= blind or any(map(_is_foreign, inner))


def _saver(callback: TrainerCallback) -> str:
    """Name of the class that says what a callback does at a save; empty if it does."""
    if "on_save" in vars(callback):
        return ""
    return next(c.__name__ for c in type(callback).__mro__ if "on_save" in vars(c))
