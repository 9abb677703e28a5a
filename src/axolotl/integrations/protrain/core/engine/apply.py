"""What a noted step changes of one chunk, and how it is made.

# Note [An update that is interrupted]

Nothing on the host changes before all of an update has been queued without an error. An
error or Ctrl-C before that restores the structure of the state, which an optimizer changes
as it goes, and gives the weights on the device up: the chunk is pending as before. After
it `_done` says that the device has the truth, and copying it home may be repeated. A
signal handler that reads weights in the middle makes the update anew, from what the host
has; the first one then refuses to go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AccessError
from ..types import IN_FLIGHT
from .device import Device, Event
from .host_chunks import HostChunk
from .lanes import LaneClock
from .masters import join, split
from .recorded_step import Clip, RecordedStep, states_of
from .slots import InBuffer
from .staging import Source, Staging
from .state import Change, OffloadedState, leaves, structure


class ChunkUpdate:
    """One chunk, or what this rank updates of it: its state, and the step it waits for.

    Attributes:
        params: Those of the span, by index.
        mains: What is changed in place of each parameter.
        noted: The step that is still to be made.
        used: Indices of parameters that had a gradient then.
        clip: By what the last step has scaled gradients that are unscaled on the host.
        left: After the last copy home.
    """

    def __init__(
        self, plain: torch.optim.Optimizer, host: HostChunk, state: OffloadedState
    ) -> None:
        self._plain = plain
        self.host, self.state, self.main_grads = host, state, host.main_grads
        self.key = "update", host.chunk.index
        self.params = {index: host.params[index] for index in host.span}
        self.master_params = {
            param: nn.Parameter(param.new_empty(0, dtype=host.main_dtype(index)))
            for index, param in enumerate(host.params)
        }
        self.recorded: RecordedStep | None = None
        self.used: tuple[int, ...] = ()
        # while an update is under way, what puts the state back to rest
        self.undo: Callable[[], None] | None = None
        self.clip: Clip | None = None
        self.left: Event | None = None
        self.attempt = object()

    def changes(self, recorded: RecordedStep | None) -> list[int]:
        """Indices of parameters that a noted call changes here, if there is one."""
        if recorded is None:
            return []
        touched = self.used if recorded.method == "step" else self.params
        return [index for index in touched if index in self.params]

    def sources(self, weights: bool = False) -> list[Source]:
        """What an update reads beside the weights, or with them."""
        travelling = filter(Tensor.numel, (self.host.masters.memory, self.state.region))
        changed = [Source(memory, self.left) for memory in travelling]
        brought = [Source(self.host.weights.memory, self.left)] if weights else []
        return [
            Source(self.main_grads.memory, self.main_grads.sent),
            *changed,
            *brought,
        ]

    def step(
        self, recorded: RecordedStep, weights: Tensor, gradients: Tensor, rests: Tensor
    ) -> None:
        """Make a noted call, where its operands are: uint8, of the span.

        All at once; masters, which take memory, one after the other.
        """
        try:
            for master_params in self._steps(recorded, weights, gradients, rests):
                recorded.make(self._plain, master_params)
        finally:
            for main in self.master_params.values():
                main.grad = None
                main.data = main.new_empty(0)

    def _steps(
        self, recorded: RecordedStep, weights: Tensor, gradients: Tensor, rests: Tensor
    ) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
        host, masters = self.host, self.host.masters
        steps = recorded.method == "step"
        together = {}
        for index in self.changes(recorded):
            param = self.params[index]
            main = self.master_params[param]
            weight = host.weights.within(weights, index)
            rest = masters.within(rests, index) if index in masters else None
            main.data = weight if rest is None else join(weight, rest)
            if steps:
                main.grad = self.main_grads.within(gradients, index).to(main.dtype)
            if rest is None:
                together[param] = main
                continue
            yield {param: main}
            main.grad = None
            split(main.data, weight, rest)
            main.data = main.new_empty(0)
        if together:
            yield together

    def remember(self) -> Callable[[], None]:
        """What puts the state of a chunk back to what it is now, at rest."""
        states = states_of(self._plain)
        before: dict[Tensor, Any] = {
            p: states[p] for p in self.params.values() if p in states
        }
        bound = [(leaf, leaf.tensor) for leaf in leaves(before)]
        rests = self.state.is_at_rest
        kept = {
            p: structure(s, lambda t: t if rests(t) else t.clone())
            for p, s in before.items()
        }

        def undo() -> None:
            for leaf, tensor in bound:
                leaf.bind(tensor)
            for param in self.params.values():
                states.pop(param, None)
            states.update(kept)

        return undo


class _Aside(InBuffer):
    """Weights beside their slot, which finds what has gone home."""

    def send_back(self) -> Event:
        event = super().send_back()
        self._device.fetch.wait(event)
        return event


class OnDevice:
    """Makes noted steps on the device; see Note [An update that is interrupted].

    Args:
        staging: Through which gradients and states come, and weights from the host.
        weights: They come together; else weights come alone, when they have to.
    """

    def __init__(self, device: Device, staging: Staging, weights: bool) -> None:
        self._device, self._staging, self._together = device, staging, weights
        self._leaving: deque[tuple[Event, Change]] = deque()
        # what updates have left on the device, until it is on its way home
        self._done: dict[ChunkUpdate, tuple[Change, InBuffer, Clip | None]] = {}

    def fetch(self, own: ChunkUpdate) -> bool:
        """Bring what an update reads; False if there is no room."""
        return self._staging.fetch(own.key, own.sources(self._together))

    def make(self, own: ChunkUpdate, weights: InBuffer | None = None) -> None:
        """Make the step of a chunk, once; without `weights` they come from the host."""
        device, recorded = self._device, own.recorded
        assert recorded is not None
        if own.left is not None:
            # the last way home may still read what is written now
            device.compute.wait(own.left)
        if own.undo is not None:
            # an update under way has changed weights, state and operands
            own.undo()
            self._give_back(own)
            if weights is not None:
                weights.spoilt()
        keep = own.host.chunk.block is not None
        together = weights is None and self._together
        sources = own.sources(together)
        taken = self._staging.take(own.key, sources, keep)
        operands = [*taken]
        if weights is None:
            memory = operands.pop() if together else self._alone(own)
            kind = InBuffer if together else _Aside
            weights = kind(device, memory, own.host.weights.memory, lambda: None)
        own.attempt = attempt = object()
        own.undo = undo = own.remember()
        try:
            change = self._step(own, recorded, weights.buffer, operands)
            if own.attempt is not attempt:
                raise AccessError(
                    "a signal handler has read weights in the middle of their update, "
                    "and training cannot go on after it"
                )
            self._done[own] = change, weights, recorded.clip
        except BaseException:
            # an interrupt too; raised again as it is
            if own.attempt is attempt:
                undo()
                own.undo = None
            device.writes(taken, device.compute)
            self._give_back(own)
            weights.spoilt()
            raise
        device.writes(taken, device.compute)
        weights.changed()
        self.send_home(own)

    def send_home(self, own: ChunkUpdate) -> None:
        """Queue the way home of what an update has left on the device."""
        if own not in self._done:
            return
        change, weights, clip = self._done[own]
        own.undo = None
        own.state.take(change)
        event = weights.send_back()
        offload = self._device.offload
        for target, source in change.copies:
            offload.copy(target, source)
        nbytes = own.host.weights.memory.nbytes
        nbytes += sum(target.nbytes for target, _ in change.copies)
        self._staging.counters.offloaded_bytes += nbytes
        own.left = own.main_grads.sent = offload.record()
        self._give_back(own, [event, own.left])
        # what an update has made stays until it has been copied
        self._leaving.append((own.left, change))
        while len(self._leaving) > IN_FLIGHT:
            self._retire()
        while self._leaving and self._leaving[0][0].query():
            self._retire()
        own.clip, own.recorded = clip, None
        self._done.pop(own, None)

    def finish(self) -> None:
        """Send home what an interrupt has kept from it."""
        for own in [*self._done]:
            self.send_home(own)

    def settle(self) -> None:
        """Return once all of it is at home."""
        while self._leaving:
            self._retire()
        self._staging.retire()

    def _alone(self, own: ChunkUpdate) -> Tensor:
        # memory beside slots and staging is there for one chunk
        self.settle()
        key, home = ("weights", own.host.chunk.index), own.host.weights.memory
        (weights,) = self._staging.take(key, [Source(home, own.left)], keep=False)
        return weights

    def _give_back(self, own: ChunkUpdate, busy: Sequence[Event] = ()) -> None:
        if self._staging.give_back(own.key, busy) is None:
            # sent home once more: nobody else waits for these copies
            for event in busy:
                event.synchronize()
        # the last: a handler may send them home once more, and they do not stay
        self._staging.give_back(("weights", own.host.chunk.index), busy)

    def _retire(self) -> None:
        event, _change = self._leaving.popleft()
        event.synchronize()

    def _step(
        self,
        own: ChunkUpdate,
        recorded: RecordedStep,
        weights: Tensor,
        operands: list[Tensor],
    ) -> Change:
        masters = own.host.masters.memory
        gradients, *others = operands
        rests = others.pop(0) if masters.numel() else masters
        state = others[0] if others else None
        with _updating(weights.device):
            if state is not None:
                own.state.to_device(state)
            own.step(recorded, weights, gradients, rests)
            region = gradients if state is None else state
            change = own.state.changed(region)
        if masters.numel():
            change.copies.append((masters, rests))
        return change


class OnHost:
    """Makes them where all of it rests, on the thread that calls it."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def make(self, own: ChunkUpdate, fetches: Event, clock: LaneClock | None) -> None:
        """Make the step of a chunk after `fetches`, which may be reading its weights;
        on the clock of the step that it is of."""
        fetches.synchronize()
        start = time.perf_counter()
        recorded, own.recorded = own.recorded, None
        # queued again by who came after an interrupt, it has been made
        if recorded is None:
            return
        state, rests, weights = (
            own.state,
            own.host.masters.memory,
            own.host.weights.memory,
        )
        changed = weights, own.main_grads.memory, rests, state.region
        self._device.writes(changed)
        # what it scales, it scales where that is read
        with _updating(weights.device):
            own.step(recorded, weights, own.main_grads.memory, rests)
            change = state.changed(state.region)
            for target, source in change.copies:
                if target.data_ptr() != source.data_ptr():
                    target.copy_(source)
        state.take(change)
        own.clip = None
        if clock is not None:
            clock.note("host", start, time.perf_counter())


@contextmanager
def _updating(device: torch.device) -> Iterator[None]:
    """As `step` is called, whoever uses the weights that it changes."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield
