"""Weights that a trainer sends to a server which answers in the place of its model.

# Note [What is sent]

TRL walks over the parameters, gives each the name that the server knows, and hands its
values to the client. All of that runs as it is, on weights that `full_params` shows. Only
the client's calls are caught: a weight visits the device when its turn comes, and goes on
from there. Adapters are merged by PEFT's own code, on the device, one layer after the other
instead of all at once: in place, so that merging and unmerging round the base as they do in
the plain run, and the host gets what they leave. Layers that share a weight are merged
together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from .core.engine.session import Session
from .generation import Unit, units_of
from .report.run import WATCHED_STEPS, Sent


class Push:
    """One walk over all weights, inside of `full_params`.

    Args:
        session: Of the model.
        generation: TRL's, which calls the server.

    Attributes:
        nbytes: That were sent.
        rounds: Whether weights of the base were rounded by merging.
    """

    def __init__(self, session: Session, generation: Any) -> None:
        self._session, self._model = session, generation.model
        self._client = getattr(generation, "vllm_client", None)
        units = units_of(self._model)
        self._merged = [unit for unit in units if unit.layers]
        self._unit = {param: unit for unit in units for param in unit.params}
        self._at = {p.data_ptr(): p for p in self._unit}
        self._open: Unit | None = None
        self._merges = self._sends = False
        self._visited: set[Unit] = set()
        self._visit, self._shared = ExitStack(), ExitStack()
        self.nbytes, self.rounds = 0, False

    def run(self, sync: Callable[[], None]) -> None:
        """Call what walks over the weights."""
        model, client = self._model, self._client
        with ExitStack() as undo:
            undo.enter_context(torch.no_grad())
            undo.callback(self._close)
            if self._merged:
                undo.enter_context(patch.object(model, "merge_adapter", self._merge))
                undo.enter_context(
                    patch.object(model, "unmerge_adapter", self._unmerge)
                )
            caught: dict[str, Callable[..., None]] = {
                "update_named_param": self._send,
                "batch_update_named_params": self._send_all,
                "update_named_params": self._stream,
            }
            for name, instead in caught.items():
                if hasattr(client, name):
                    plain = getattr(client, name)
                    call = partial(self._unless_sending, plain, instead)
                    undo.enter_context(patch.object(client, name, call))
            self._plain = getattr(type(client), "update_named_param", None)
            sync()

    def _unless_sending(
        self,
        plain: Callable[..., Any],
        instead: Callable[..., Any],
        *args: Any,
        **k: Any,
    ) -> Any:
        """The client's calls call each other."""
        return (plain if self._sends else instead)(*args, **k)

    def _merge(self) -> None:
        self._merges = True
        self._visited.clear()

    def _unmerge(self) -> None:
        # those that nobody asked for are rounded too
        for unit in self._merged:
            if unit not in self._visited:
                self._enter(unit)
        self._close()
        self._merges = False

    def _close(self) -> None:
        self._open = None
        self._visit.close()
        self._shared.close()

    def _enter(self, unit: Unit) -> None:
        if unit is self._open or unit.is_shared and unit in self._visited:
            return
        self._open = None
        self._visit.close()
        # shared ones stay as they are until all are sent
        stack = self._shared if unit.is_shared else self._visit
        merges = self._merges and bool(unit.layers)
        stack.enter_context(self._session.visiting(unit.params, writes=merges))
        if merges:
            # in the order of the plain run: those that share a weight round it in turn;
            # known before the first is merged, as the next may have no room for it
            for layer in reversed(unit.layers):
                stack.callback(_unmerge, layer)
            for layer in unit.layers:
                layer.merge()
            self.rounds = True
            self._session.device.synchronize()
        self._visited.add(unit)
        self._open = unit

    def _send(self, name: str, weights: Tensor) -> None:
        param = self._at.get(weights.data_ptr())
        if param is not None and param.numel():
            self._enter(self._unit[param])
            weights = param.data
        self.nbytes += weights.nbytes
        self._sends = True
        try:
            assert self._plain is not None
            self._plain(self._client, name, weights)
        finally:
            self._sends = False

    def _send_all(self, params: Iterable[tuple[str, Tensor]], **_: Any) -> None:
        for name, weights in params:
            self._send(name, weights)

    def _stream(self, _metadata: Any, params: Iterator[tuple[str, Tensor]]) -> None:
        with getattr(self._client, "weight_update", nullcontext)():
            self._send_all(params)


def _unmerge(layer: Any) -> None:
    if layer.merged:
        layer.unmerge()


@contextmanager
def pushing(
    session: Session,
    generation: Any,
    showing: Callable[[str], Any],
    sent: Sent,
    changed: Callable[[str], None],
) -> Iterator[None]:
    """Inside, what TRL sends to a server are the true weights; see Note [What is sent].

    Args:
        session: Of the model.
        generation: TRL's, which calls the server.
        showing: `TrainingRun.full_params`.
        sent: Counts.
        changed: Told what has changed weights.
    """
    plain = generation.sync_weights

    def sync() -> None:
        started = time.perf_counter()
        with ExitStack() as stack:
            watched = sent.times < WATCHED_STEPS
            if watched:
                stack.enter_context(session.watch())
            stack.enter_context(showing("sending weights to the server"))
            session.device.restart_peak()
            push = Push(session, generation)
            push.run(plain)
            if push.rounds:
                changed("merging adapters for the server")
            if watched:
                peak = session.device.peak_since()
                sent.device_bytes = max(sent.device_bytes, peak)
        sent.seconds += time.perf_counter() - started
        sent.times, sent.nbytes = sent.times + 1, sent.nbytes + push.nbytes

    with patch.object(generation, "sync_weights", sync):
        yield
