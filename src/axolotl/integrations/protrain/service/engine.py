"""The service without HTTP: one base under a plan, one thread that makes all steps.

Requests are checked by the thread that brings them and answered by a future. The one
thread shows the adapter of whose turn it is (`turns`), runs, and keeps the next one out:
nothing of the model is touched anywhere else.
"""

from __future__ import annotations

import atexit
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from axolotl.utils.logging import get_logger

from ..core.errors import (
    CheckpointError,
    ProTrainError,
    RequestError,
)
from .adapters import (
    TRAINING,
    AdapterSpec,
    AdapterStore,
    claimed,
    folder_of,
    path_of,
)
from .base import base_files, identity, opened, read
from .client_sessions import ClientSessions
from .full import FullModel
from .full_states import FullStore
from .losses import Datum, checked_settings, digest
from .optimizers import AdamParams
from .sampler import Sampler
from .states import Kept
from .steps import NOBODY, Steps
from .text import Text
from .turns import Ticket, Turns

LOG = get_logger(__name__)


class AdapterService:
    """Trains adapters of one base, each asked for by the id of its model; or all of the base,
    where the YAML has no adapter, for one model at a time.

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
        sampler: Samples from adapters that were saved, and from the base.
        sessions: Who samples with which of them.
        states: What is saved.
        clients: Their sessions.
        optimizer: That of all adapters.

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
        self.base_model, cfg, self._unused, self.optimizer = read(config)
        LOG.info(f"Keys without effect on a service: {', '.join(self._unused) or '-'}.")
        self.folder = folder or Path(cfg.output_dir) / "service"
        self.tokenizer = str(cfg.tokenizer_config or cfg.base_model_config)
        self.sequence_len = int(cfg.sequence_len)
        self.alpha = float(cfg.lora_alpha or 0)
        with ExitStack() as held:
            held.enter_context(claimed(self.folder))
            run, self.live, tokenizer = opened(cfg, self.optimizer)
            self._held = held.pop_all()
        assert run.session is not None and run.report is not None
        self.session, self.report = run.session, run.report
        host_bytes = self.report.forecast.hardware.host_bytes
        if adapter_bytes is None:
            adapter_bytes = host_bytes // 4
        given: dict[str, Any] = {
            "folder": self.folder / "_evicted",
            "budget_bytes": adapter_bytes,
            "device": self.session.device,
            "base": {"name": self.base_model, **identity(cfg)},
            "optimizer": self.optimizer.family,
        }
        self.store: AdapterStore
        if isinstance(live := self.live, FullModel):
            self.store = FullStore(live, self.folder, base_files(cfg), **given)
        else:
            given |= {"layout_of": live.layout, "write_config": live.write_config}
            self.store = AdapterStore(**given)
        self._lost: list[str] = []
        self.clients = ClientSessions(self.folder / "_sessions")
        self.turns = Turns(request_bytes or host_bytes // 8)
        text = Text(tokenizer, run.session.model)
        self._steps = steps = Steps(
            cfg, run, self.live, self.store, self.turns, self.folder, text.pad
        )
        self.sessions, self.states = steps.sessions, steps.states
        self.sampler = Sampler(
            self.sessions, steps.samples, steps.passes, self.turns, text
        )
        self.turns.begin(NOBODY, Ticket(steps.forget, None))
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
        act = partial(self._steps.create, model, spec, seed)
        return self._begin(model, (spec, seed), act)

    def create_from(self, model: str, path: str, with_optimizer: bool) -> Ticket:
        """A new adapter that begins as a saved one.

        Raises:
            RequestError: The path is not one, or another model has this id.
        """
        folder_of(self.folder, path)
        act = partial(self._steps.load, model, path, with_optimizer)
        return self._begin(model, (path, with_optimizer), act, path)

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
            passes = self._steps.passes
            given = checked_settings(loss_fn, settings or {})
            passes.check(data, loss_fn)
            run = partial(passes.run, data, loss_fn, given, not forward_only)
            return partial(self._steps.pass_over, model, run, forward_only, nbytes)

        sent = None if number is None else digest(data)
        nbytes = sum(datum.nbytes for datum in data)
        asks = (loss_fn, {**(settings or {})}, forward_only, sent)
        return self._ask(model, number, asks, check, nbytes)

    def optim_step(
        self, model: str, adam: AdamParams, number: int | None = None
    ) -> Ticket:
        """Update an adapter; the norm of its gradients, before clipping.

        Raises:
            RequestError: The server's optimizer has no such setting.
        """

        def check() -> Callable[[], Any]:
            self.optimizer.check(adam)
            return partial(self._steps.update, model, adam)

        return self._ask(model, number, adam, check)

    def save(
        self,
        model: str,
        name: str,
        number: int | None = None,
        whole: bool = True,
        overwrite: bool = True,
        kept: Kept = Kept(),  # noqa: B008
    ) -> Ticket:
        """Save an adapter as PEFT does, if `whole` with its optimizer state; the path to
        load it by. Without `overwrite`, a name that is there is refused."""
        kind = TRAINING if whole else kept.kind

        def check() -> Callable[[], Any]:
            path = path_of(model, kind, name)
            return partial(self._steps.save, model, path, whole, overwrite, kept)

        asks, path = (name, whole, overwrite, kept), f"tinker://{model}/{kind}/{name}"
        return self._ask(model, number, asks, check, path=path)

    def save_session(
        self, model: str, session: str, number: int | None = None
    ) -> Ticket:
        """Make a sampling session with an adapter as it is then, which is saved for that
        session alone; a `SavedSession`."""
        act = partial(self._steps.save_own, model, session)
        return self._ask(model, number, ("session", session), lambda: act)

    def load(
        self, model: str, path: str, with_optimizer: bool, number: int | None = None
    ) -> Ticket:
        """Make an adapter equal to a saved one of the same rank and layers."""

        def check() -> Callable[[], Any]:
            folder_of(self.folder, path)
            return partial(self._steps.load, model, path, with_optimizer)

        return self._ask(model, number, (path, with_optimizer), check, path=path)

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
        self.states.forget(model)
        # its bytes are the other thread's to free
        self._steps.forget_later()

    def finish(self, session: str) -> None:
        """Unload the models of a client's session that has ended, but for those that have
        learned something since their last save, which is not lost so."""
        for model in [*self.store.layouts]:
            ours = model.startswith(f"{session}:train:") and model in self.turns
            if ours and not self.turns.waits(model) and not self._steps.changed(model):
                self.unload(model)

    def spec(self, model: str) -> AdapterSpec:
        """Return what a model's adapter is.

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
            "optimizer": self.optimizer.name,
            "adapters": adapters,
            "host_bytes": store.used_bytes,
            "switches": live.switches,
            "prefetched": live.prefetched,
            "moved_bytes": live.moved_bytes,
            "sampling": {"sessions": len(self.sessions), **self.sampler.counts()},
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

    def _begin(
        self, model: str, asks: Any, act: Callable[[], Any], path: str | None = None
    ) -> Ticket:
        # its first save would be refused
        path_of(model, TRAINING, "first")
        first = partial(self._steps.begin, model, act)
        return self.turns.begin(model, Ticket(first, asks, path=path))

    def _ask(
        self,
        model: str,
        number: int | None,
        asks: Any,
        check: Callable[[], Callable[[], Any]],
        nbytes: int = 0,
        path: str | None = None,
    ) -> Ticket:
        try:
            act = check()
        except Exception as error:
            # whatever it is: those after it would wait for this number
            self.refuse(model, number, as_refusal(error), asks)
        return self.turns.add(model, number, Ticket(act, asks, nbytes, path))

    def _serve(self) -> None:
        try:
            while (ticket := self.turns.take()) is not None:
                act, ticket.act = ticket.act, None
                assert act is not None
                try:
                    result = act()
                except Exception as error:
                    # its step has undone what it did, or has stopped the service
                    if not isinstance(error, ProTrainError):
                        LOG.error(traceback.format_exc())
                    traceback.clear_frames(error.__traceback__)
                    ticket.settle(error=error)
                else:
                    ticket.settle(result)
                # nothing of a request is left while the next one is waited for
                act = result = ticket = None
                if self.states.due() and self.turns.peek() is None:
                    self.states.expire()
        finally:
            # whatever has ended it: nobody waits for this thread from here on
            self.turns.stop()
            self.turns.refuse_all()
            with self._held:
                self._lost = self._steps.save_all()
                self._steps.close()


def as_refusal(error: BaseException) -> RequestError:
    """Return what a client is told of an error that its request has met."""
    if isinstance(error, RequestError):
        return error
    return RequestError(
        f"the request cannot be read ({type(error).__name__}: {error})."
    )
