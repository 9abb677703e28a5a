"""The service without HTTP: one base under a plan, one thread that makes all steps.

Requests are checked by the thread that brings them and answered by a future. The one
thread shows the adapter of whose turn it is (`turns`), runs, and keeps the next one out:
nothing of the model is touched anywhere else.
"""

from __future__ import annotations

import atexit
import hashlib
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from axolotl.utils.logging import get_logger
from torch import Tensor

from ..core.engine.device import is_shortage
from ..core.errors import (
    FOREIGN_ERRORS,
    CheckpointError,
    DeviceMemoryError,
    ProTrainError,
    RequestError,
)
from .adapters import (
    AdapterSpec,
    AdapterState,
    AdapterStore,
    claimed,
    folder_of,
    path_of,
)
from .base import identity, opened, read
from .live import AdamParams
from .losses import Datum, checked_settings
from .passes import Passes
from .turns import Ticket, Turns

LOG = get_logger(__name__)

LAST = "_last"
"""Name under which `close` saves what has changed since its last save."""
FAULTS = (ProTrainError, OSError, MemoryError, *FOREIGN_ERRORS)
"""What ends one request, and not the service."""
_NOBODY = ""
"""In place of a model: whose requests are the service's own."""


class AdapterService:
    """Trains adapters of one base, each asked for by the id of its model.

    Every method that changes a model returns a future at once and takes its turn after
    those of the same model that came before, by `number` if given (Tinker's `seq_id`).
    Any thread may call them. What has changed is saved when it closes, at the latest when
    Python ends.

    Args:
        config: An Axolotl YAML; the largest adapter and micro-batch to expect are its
            lora_r, lora_target_modules (all linear layers and the head, if unset),
            sequence_len and micro_batch_size.
        folder: For what is saved; by default `service` in its output_dir.
        adapter_bytes: Of the host, for all adapters; by default a quarter of what is free
            once the base is loaded.
        request_bytes: Of the host, for requests that arrive and wait, and answers that
            are kept; by default an eighth of that.

    Attributes:
        turns: The requests that wait, and the last answers.

    Raises:
        ProTrainError: The base cannot be loaded, no plan fits, or another server has the
            folder.
    """

    def __init__(
        self,
        config: Path,
        folder: Path | None = None,
        adapter_bytes: int | None = None,
        request_bytes: int | None = None,
    ) -> None:
        self.base_model, cfg, self._unused = read(config)
        LOG.info(f"Keys without effect on a service: {', '.join(self._unused) or '-'}.")
        self.folder = folder or Path(cfg.output_dir) / "service"
        self.tokenizer = str(cfg.tokenizer_config or cfg.base_model_config)
        self.sequence_len, self.alpha = int(cfg.sequence_len), float(cfg.lora_alpha)
        with ExitStack() as held:
            held.enter_context(claimed(self.folder))
            run, self.live = opened(cfg)
            self._held = held.pop_all()
        assert run.session is not None and run.report is not None
        self._run, self.session, self.report = run, run.session, run.report
        self._passes = Passes(cfg, self.session, self._prefetch)
        host_bytes = self.report.forecast.hardware.host_bytes
        if adapter_bytes is None:
            adapter_bytes = host_bytes // 4
        self.store = AdapterStore(
            self.folder / "_evicted",
            adapter_bytes,
            self.session.device,
            self.live.layout,
            self.live.write_config,
            {"name": self.base_model, **identity(cfg)},
        )
        self._unsaved: set[str] = set()
        self._lost: list[str] = []
        self._num_passes = 0
        self.turns = Turns(request_bytes or host_bytes // 8)
        self.turns.begin(_NOBODY, Ticket(self._forget, None))
        # one that is never closed must not keep Python from ending
        self._thread = threading.Thread(
            target=self._serve, name="adapter-service", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    def __enter__(self) -> AdapterService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # what clients ask for; any thread

    def create(
        self,
        model: str,
        rank: int,
        kinds: Sequence[str] | None = None,
        seed: int | None = None,
    ) -> Ticket:
        """A new adapter; `kinds` of `adapters.KINDS`, by default all. Asked again, the
        answer is the first one.

        Raises:
            RequestError: It is larger than what the server plans for, or another one has
                this id.
        """
        layers = tuple(self.live.kinds if kinds is None else kinds)
        spec = AdapterSpec(rank, self.alpha, layers)
        self.live.layout(spec)
        act = partial(self._create, model, spec, seed)
        return self._begin(model, (spec, seed), act)

    def create_from(self, model: str, path: str, with_optimizer: bool) -> Ticket:
        """A new adapter that begins as a saved one.

        Raises:
            RequestError: The path is not one, or another model has this id.
        """
        folder_of(self.folder, path)
        act = partial(self._load, model, path, with_optimizer)
        return self._begin(model, (path, with_optimizer), act)

    def forward_backward(
        self,
        model: str,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        settings: Mapping[str, Any] | None = None,
        number: int | None = None,
        forward_only: bool = False,
    ) -> Ticket:
        """Add gradients of a loss, which is a sum over tokens, to those that wait.

        Returns:
            The loss, and for each row the log-probabilities of its targets, float32.

        Raises:
            RequestError: The data are not such that a pass may see them.
        """

        def check() -> Callable[[], Any]:
            given = checked_settings(loss_fn, settings or {})
            self._passes.check(data, loss_fn)
            run = partial(self._passes.run, data, loss_fn, given, not forward_only)
            return partial(self._pass, model, run, forward_only)

        sent = None if number is None else _digest(data)
        asks = (loss_fn, {**(settings or {})}, forward_only, sent)
        return self._ask(model, number, asks, check, sum(d.nbytes for d in data))

    def optim_step(
        self, model: str, adam: AdamParams, number: int | None = None
    ) -> Ticket:
        """Update an adapter by AdamW; the norm of its gradients, before clipping."""
        act = partial(self._update, model, adam)
        return self._ask(model, number, adam, lambda: act)

    def save(
        self,
        model: str,
        name: str,
        number: int | None = None,
        whole: bool = True,
        overwrite: bool = True,
    ) -> Ticket:
        """Save an adapter as PEFT does, if `whole` with its optimizer state; the path to
        load it by. Without `overwrite`, a name that is there is refused."""

        def check() -> Callable[[], Any]:
            path = path_of(model, "weights" if whole else "sampler_weights", name)
            return partial(self._save, model, path, whole, overwrite)

        return self._ask(model, number, (name, whole, overwrite), check)

    def load(
        self, model: str, path: str, with_optimizer: bool, number: int | None = None
    ) -> Ticket:
        """Make an adapter equal to a saved one of the same rank and layers."""

        def check() -> Callable[[], Any]:
            folder_of(self.folder, path)
            return partial(self._load, model, path, with_optimizer)

        return self._ask(model, number, (path, with_optimizer), check)

    def refuse(
        self, model: str, number: int | None, error: RequestError, asks: Any = None
    ) -> NoReturn:
        """Use up the number of a request that cannot be, or could not be read: those after
        it would wait for ever.

        Raises:
            RequestError: `error`, or why the number cannot be used.
        """
        refused = Ticket(None, asks)
        # without its traceback, whose frames hold the request
        refused.set_exception(RequestError(str(error), error.status))
        self.turns.add(model, number, refused)
        raise error

    def unload(self, model: str) -> None:
        """Forget a model; what it has saved stays. Its requests that wait are refused.

        Raises:
            RequestError: There is no such model.
        """
        self.turns.close(model)
        # its bytes are the other thread's to free
        self.turns.add(_NOBODY, None, Ticket(self._forget, None))

    def spec(self, model: str) -> AdapterSpec:
        """What a model's adapter is.

        Raises:
            RequestError: There is no such model.
        """
        layout = self.store.layouts.get(model)
        if layout is None:
            raise RequestError(f"model_id: there is no model {model}.", 404)
        return layout.spec

    def status(self) -> dict[str, Any]:
        """Adapters, bytes and the plan, for people and as JSON."""
        store, live = self.store, self.live
        adapters = [
            {
                "model_id": model,
                "rank": layout.spec.rank,
                "layers": list(layout.spec.kinds),
                "bytes": layout.nbytes,
                "on_host": store.cached(model) is not None,
            }
            for model, layout in [*store.layouts.items()]
        ]
        return {
            "base_model": self.base_model,
            "adapters": adapters,
            "host_bytes": store.used_bytes,
            "switches": live.switches,
            "prefetched": live.prefetched,
            "moved_bytes": live.moved_bytes,
            "plan": self.report.table(),
            "without_effect": self._unused,
        }

    def close(self) -> None:
        """Finish the request that runs, refuse those that wait, and save each adapter that
        has changed since its last save as `_last`.

        Raises:
            CheckpointError: One could not be saved.
        """
        atexit.unregister(self.close)
        self.turns.stop()
        self._thread.join()
        lost, self._lost = self._lost, []
        if lost:
            raise CheckpointError(
                f"what these have learned is lost: {'; '.join(lost)}."
            )

    def _begin(self, model: str, asks: Any, act: Callable[[], Any]) -> Ticket:
        # its first save would be refused
        path_of(model, "weights", "first")
        return self.turns.begin(model, Ticket(partial(self._begun, model, act), asks))

    def _ask(
        self,
        model: str,
        number: int | None,
        asks: Any,
        check: Callable[[], Callable[[], Any]],
        nbytes: int = 0,
    ) -> Ticket:
        try:
            act = check()
        except FAULTS as error:
            self.refuse(model, number, as_refusal(error), asks)
        return self.turns.add(model, number, Ticket(act, asks, nbytes))

    # the one thread

    def _serve(self) -> None:
        try:
            while (ticket := self.turns.take()) is not None:
                act, ticket.act = ticket.act, None
                assert act is not None
                try:
                    result = act()
                except FAULTS as error:
                    if not isinstance(error, ProTrainError):
                        LOG.error(traceback.format_exc())
                    traceback.clear_frames(error.__traceback__)
                    ticket.set_exception(error)
                else:
                    ticket.set_result(result)
                # nothing of a request is left while the next one is waited for
                act = result = ticket = None
        finally:
            self.turns.refuse_all()
            self._save_all()
            self.live.leave()
            self.store.close()
            self._run.close()
            self._held.close()

    def _forget(self) -> None:
        for model in [name for name in self.store.layouts if name not in self.turns]:
            self._drop(model)

    def _drop(self, model: str) -> None:
        self.live.leave()
        self.store.drop(model)
        self._unsaved.discard(model)

    def _begun(self, model: str, act: Callable[[], Any]) -> Any:
        # one of this id that was unloaded may not be forgotten yet
        self._drop(model)
        return act()

    def _create(self, model: str, spec: AdapterSpec, seed: int | None) -> str:
        self.live.leave()
        state = self.store.new(self.live.layout(spec))
        self.live.initialise(state, seed)
        self.store.put(model, state)
        return model

    def _state(self, model: str) -> AdapterState:
        if model not in self.store.layouts:
            raise RequestError(f"model_id: {model} could not be created.", 404)
        if self.store.cached(model) is None:
            # what is shown may have to leave for it
            self.live.leave()
        return self.store.get(model)

    def _prefetch(self) -> None:
        """Copy the adapter of the next turn while this one computes."""
        model = self.turns.peek()
        state = self.store.cached(model) if model else None
        if state is not None:
            self.live.prefetch(state)

    def _update(self, model: str, adam: AdamParams) -> float:
        self.live.show(self._state(model))
        self._prefetch()
        norm = self.live.update(adam)
        self._unsaved.add(model)
        return norm

    def _save(self, model: str, path: str, whole: bool, overwrite: bool = True) -> str:
        state, folder = self._state(model), folder_of(self.folder, path)
        if not overwrite and folder.exists():
            raise RequestError(
                f"path: {path} is there already. Choose another name, or set overwrite."
            )
        self.live.put_back()
        self.store.write(folder, state, whole)
        if whole:
            self._unsaved.discard(model)
        return path

    def _load(self, model: str, path: str, with_optimizer: bool) -> str:
        # what is shown may have to leave
        self.live.leave()
        state = self.store.read(folder_of(self.folder, path), with_optimizer)
        known = self.store.layouts.get(model, state.layout)
        if known != state.layout:
            self.store.discard(state)
            raise RequestError(
                f"path: {path} has rank {state.layout.spec.rank} on "
                f"{', '.join(state.layout.spec.kinds)}, and {model} rank "
                f"{known.spec.rank} on {', '.join(known.spec.kinds)}. Create a model "
                "from the state instead."
            )
        self.store.put(model, state)
        self._unsaved.discard(model)
        return path

    def _save_all(self) -> None:
        self._forget()
        for model in sorted(self._unsaved):
            path = f"tinker://{model}/weights/{LAST}"
            try:
                LOG.info(f"saved as {self._save(model, path, True)}")
            except FAULTS as error:
                self._lost.append(f"{model} ({error})")

    def _pass(
        self,
        model: str,
        run: Callable[[], tuple[float, list[Tensor]]],
        forward_only: bool,
    ) -> tuple[float, list[Tensor]]:
        state, repeats = self._state(model), count()
        self.live.show(state)
        self.live.begin_pass()

        def attempt() -> tuple[float, list[Tensor]]:
            if next(repeats):
                self.live.leave()
                self.live.show(state)
            return run()

        # the part of a trainer that a repeated step is named by
        step = SimpleNamespace(state=SimpleNamespace(global_step=self._num_passes))
        self._num_passes += 1
        self._run.recovery.begin(step)  # type: ignore[arg-type]
        try:
            result = self._run.recovery.attempt(attempt, "forward")
        except FAULTS as error:
            # the adapter is as it was before: the host has it, and is shown again
            traceback.clear_frames(error.__traceback__)
            self.session.forget_gradients()
            self.live.leave()
            short = isinstance(error, RuntimeError) and is_shortage(error)
            if short or isinstance(error, DeviceMemoryError):
                raise RequestError(
                    f"data: the device has no room for this request: {error}", 413
                ) from error
            raise
        if not forward_only:
            self.live.passed()
            self._unsaved.add(model)
        return result


def as_refusal(error: BaseException) -> RequestError:
    """What a client is told of an error that its request has met."""
    if isinstance(error, RequestError):
        return error
    return RequestError(
        f"the request cannot be read ({type(error).__name__}: {error})."
    )


def _digest(data: Sequence[Datum]) -> bytes:
    found = hashlib.sha256()
    for datum in data:
        for name, values in [("", datum.tokens), *sorted(datum.inputs.items())]:
            found.update(f"{name} {values.dtype} {values.numel()} ".encode())
            found.update(values.numpy().tobytes())
    return found.digest()
