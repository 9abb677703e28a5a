"""The steps that the one thread of a service makes with a base and its adapters."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from axolotl.utils.logging import get_logger
from torch import Tensor

from ..core.engine.device import is_shortage
from ..core.errors import DeviceMemoryError, ProTrainError, RequestError
from ..recovery import ServedStep
from ..run import TrainingRun
from .adapters import AdapterSpec, AdapterState, AdapterStore, folder_of
from .decoding import Decoder
from .full import FullModel
from .live import LiveAdapter
from .optimizers import AdamParams
from .passes import Passes
from .samples import Samples
from .sessions import SavedSession, Sessions
from .states import LAST, Kept, States
from .turns import Ticket, Turns

LOG = get_logger(__name__)

NOBODY = ""
"""In place of a model: whose requests are the service's own."""


class Steps:
    """Makes each step of a request, with the adapter of its model shown.

    Args:
        cfg: Axolotl's validated configuration.
        run: Open, with the base.
        live: Shows an adapter, or trains the base itself.
        store: Has them all.
        turns: Say whose turn is next.
        folder: For what is saved.
        pad: A token that nothing reads.

    Attributes:
        passes: Forward and backward.
        samples: The rows that wait to be sampled.
        sessions: Who samples with which weights.
        states: What is saved.
    """

    def __init__(
        self,
        cfg: Any,
        run: TrainingRun,
        live: LiveAdapter | FullModel,
        store: AdapterStore,
        turns: Turns,
        folder: Path,
        pad: int,
    ) -> None:
        assert run.session is not None
        self._run, self._session, self._live = run, run.session, live
        self._store, self._turns, self._folder = store, turns, folder
        self.states = States(folder, turns)
        self.passes = Passes(cfg, run.session, self._prefetch)
        self.sessions = Sessions(store, folder, turns, self.forget_later)
        self.samples = Samples(
            Decoder(cfg, run, pad),
            self.passes,
            turns,
            self.sample,
            self._prefetch,
            self._session.forget_gradients,
        )
        self._unsaved: set[str] = set()
        self._num_passes = 0

    def forget_later(self) -> None:
        """Let `forget` have its turn."""
        # nobody knows how much the server's own line has when it stops
        if not self._turns.stopped:
            self._turns.add(NOBODY, None, Ticket(self.forget, None))

    def forget(self) -> None:
        """Drop the models that were unloaded, and weights that no session has."""
        for model in [name for name in self._store.layouts if name not in self._turns]:
            self._drop(model)
        self.sessions.sweep(self._drop_sampler)

    def _drop_sampler(self, key: str) -> None:
        self._live.leave()
        self._store.drop_sampler(key)
        self.samples.drop(key)
        if key in self._turns:
            self._turns.close(key)

    def sample(self, key: str) -> None:
        """Make a turn of sampling with the weights of a key."""
        try:
            self._live.show(self._sampler(key))
            self._prefetch()
            self.samples.turn(key)
        except Exception as error:
            if not isinstance(error, ProTrainError):
                LOG.error(traceback.format_exc())
            self._undo(error)
            if isinstance(error, RuntimeError) and is_shortage(error):
                error = RequestError(
                    f"prompt: the device has no room for this request: {error}", 413
                )
            self.samples.fail(key, error)
        if not self._turns.stopped:
            self.samples.ended(key)

    def _undo(self, error: BaseException) -> None:
        """The adapter is as it was before: the host has it, and it is shown again. Where that
        cannot be, the service stops."""
        traceback.clear_frames(error.__traceback__)
        try:
            self._session.forget_gradients()
            self._live.leave()
        except BaseException:
            # later requests would be computed with nobody knows what
            self._turns.stop()
            raise

    def _sampler(self, key: str) -> AdapterState:
        if self._store.cached(key) is None:
            self._live.leave()
        return self._store.sampler(key, self.sessions.weights_of(key))

    def save_own(self, model: str, session: str) -> SavedSession:
        """Save an adapter for a sampling session alone."""
        folder, state = self.sessions.folder_for(session), self._state(model)
        self._live.put_back()
        self._store.write_own(folder, state)
        return self.sessions.add_own(session)

    def _drop(self, model: str) -> None:
        self._live.leave()
        self._store.drop(model)
        self._unsaved.discard(model)

    def begin(self, model: str, act: Callable[[], Any]) -> Any:
        """Make the first state of a model."""
        # one of this id that was unloaded may not be forgotten yet, nor others
        self._drop(model)
        self.forget()
        self._store.require_free()
        return act()

    def create(self, model: str, spec: AdapterSpec, seed: int | None) -> str:
        """Draw a new adapter."""
        self._live.leave()
        state = self._store.new(self._live.layout(spec))
        self._live.initialise(state, seed)
        self._store.put(model, state)
        return model

    def _state(self, model: str) -> AdapterState:
        if model not in self._store.layouts:
            raise RequestError(f"model_id: {model} could not be created.", 404)
        if self._store.cached(model) is None:
            # what is shown may have to leave for it
            self._live.leave()
        return self._store.get(model)

    def _prefetch(self) -> None:
        """Copy the adapter of the next turn while this one computes."""
        model = self._turns.peek()
        state = self._store.cached(model) if model else None
        if state is not None:
            self._live.prefetch(state)

    def update(self, model: str, adam: AdamParams) -> float:
        """Make an update; the norm of the gradients before clipping."""
        self._live.show(self._state(model))
        self._prefetch()
        try:
            norm = self._live.update(adam)
        except (RuntimeError, DeviceMemoryError) as error:
            if isinstance(error, RuntimeError) and not is_shortage(error):
                raise
            raise RequestError(
                f"optim_step: the device has no room for an update: {error} Its gradients "
                "are gone. Set a smaller micro_batch_size in the server's YAML.",
                413,
            ) from error
        self._unsaved.add(model)
        return norm

    def changed(self, model: str) -> bool:
        """Tell whether a model has learned anything since its last save."""
        return model in self._unsaved

    def save(
        self,
        model: str,
        path: str,
        whole: bool,
        overwrite: bool = True,
        kept: Kept = Kept(),  # noqa: B008
    ) -> str:
        """Write an adapter to the disk."""
        state, folder = self._state(model), folder_of(self._folder, path)
        if not overwrite and folder.exists():
            raise RequestError(
                f"path: {path} is there already. Choose another name, or set overwrite."
            )
        self._live.put_back()
        self._store.write(folder, state, whole, self.states.about(model, kept))
        self.states.keep(path, kept.seconds)
        if whole:
            self._unsaved.discard(model)
        return path

    def load(self, model: str, path: str, with_optimizer: bool) -> str:
        """Read an adapter from the disk."""
        # what is shown may have to leave
        self._live.leave()
        state = self._store.read(folder_of(self._folder, path), with_optimizer)
        known = self._store.layouts.get(model, state.layout)
        if known != state.layout:
            self._store.discard(state)
            raise RequestError(
                f"path: {path} has {state.layout.spec}, and {model} "
                f"{known.spec}. Create a model from the state instead."
            )
        self._store.put(model, state)
        self._unsaved.discard(model)
        return path

    def save_all(self) -> list[str]:
        """Save each adapter that has changed as `LAST`; returns those that could not be."""
        lost = []
        for model in sorted(m for m in self._unsaved if m in self._turns):
            path = f"tinker://{model}/weights/{LAST}"
            try:
                LOG.info(f"saved as {self.save(model, path, True)}")
            except Exception as error:
                lost.append(f"{model} ({error})")
        return lost

    def close(self) -> None:
        """Give the memory of all adapters back, and the base."""
        self._live.leave()
        self.sessions.close()
        self._store.close()
        self._run.close()

    def pass_over(
        self,
        model: str,
        run: Callable[[], tuple[float, list[Tensor]]],
        forward_only: bool,
        nbytes: int,
    ) -> tuple[float, list[Tensor]]:
        """Run forward and backward for an adapter, again if a smaller plan is needed."""
        state, repeats = self._state(model), count()
        self._live.show(state)
        self._live.begin_pass(0 if forward_only else nbytes)

        def attempt() -> tuple[float, list[Tensor]]:
            if next(repeats):
                self._live.leave()
                self._live.show(state)
            return run()

        self._run.recovery.begin(ServedStep(self._num_passes))
        self._num_passes += 1
        try:
            result = self._run.recovery.attempt(attempt, "forward")
        except Exception as error:
            self._undo(error)
            short = isinstance(error, RuntimeError) and is_shortage(error)
            if short or isinstance(error, DeviceMemoryError):
                raise RequestError(
                    f"data: the device has no room for this request: {error}", 413
                ) from error
            if isinstance(error, RequestError):
                self._live.require_finite()
            raise
        finally:
            # it would keep the rows until the next pass
            self._run.recovery.begin(None)
        if not forward_only:
            self._live.passed(run, nbytes)
            self._unsaved.add(model)
        return result
