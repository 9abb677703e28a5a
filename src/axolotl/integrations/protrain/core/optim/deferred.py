"""Updates of weights whose optimizer state is on the host, on the device.

# Note [The deferred update]

`step` updates what has its state on the device; for every other chunk it only notes what
it would have done (Note [The ghost] in noted.py). The chunk is then *pending*: before its
weights are used next, gradient and state come beside them, the noted step is made, and
weights and state go back. Who reads the host's copy meanwhile has it made first (`flush`).
There is room for one gradient a chunk, so the next step makes what is pending first, and
refuses a gradient that has come meanwhile.

Every number is that of the run without paging: the same kernels with the same arguments on
the same device, one chunk later. Gradients, sums and norms never pass through another
processor.

# Note [An update that is interrupted]

Nothing on the host changes before all of an update has been queued without an error. An
error or Ctrl-C before that restores the structure of the state, which an optimizer changes
as it goes, and gives the weights on the device up: the chunk is pending as before. After
it `own.done` says that the device has the truth, and copying it home may be repeated. A
signal handler that reads weights in the middle makes the update anew, from what the host
has; the first one then refuses to go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partialmethod
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..errors import AccessError, ConfigError
from ..runtime import Device, Source, Staging
from ..runtime.device import Event
from ..runtime.staging import parts
from ..types import IN_FLIGHT, Chunk
from .device_sums import DeviceSums
from .host_chunks import (
    MASTER_KEY,
    GradientSums,
    HostChunk,
    Masters,
    require_masters,
    tensor_in,
)
from .masters import join, split
from .noted import Clip, Noted, marks, require_separable
from .states import Change, HostedState, Leaf, leaves, structure
from .updates import Updates


class InMemory(Protocol):
    """The weights of a chunk where they compute: all of it in a buffer, uint8."""

    buffer: Tensor

    def changed(self) -> None:
        """Compute has written them."""

    def send_back(self) -> Event:
        """Queue the way home of what compute has changed."""

    def spoilt(self) -> None:
        """They are not to be used: compute has changed some of them."""


class Surroundings(NamedTuple):
    """What the owner of the weights does around updates.

    Attributes:
        beside: Gives the weights of a chunk in device memory where no pass reads them,
            to be updated outside of passes; once the host's copy is there.
        rewrites: The host's copy of some weights is about to be written.
        hide: Nobody looks at gradients from here on.
        show_again: A step is over: whoever looked may go on.
    """

    beside: Callable[[Chunk, Event | None], AbstractContextManager[InMemory]]
    rewrites: Callable[[HostChunk], None]
    hide: Callable[[], None]
    show_again: Callable[[], None]


class _Own:
    """One chunk: its state, and the step it waits for."""

    def __init__(self, host: HostChunk, state: HostedState) -> None:
        assert host.sums is not None
        self.host, self.state, self.sums = host, state, host.sums
        self.key = "update", host.chunk.index
        self.mains = {
            param: nn.Parameter(param.new_empty(0, dtype=host.main_dtype(index)))
            for index, param in enumerate(host.params)
        }
        self.noted: Noted | None = None
        self.used: tuple[int, ...] = ()
        # what an update has left on the device, until it is on its way home
        self.done: tuple[Change, InMemory, Clip | None] | None = None
        # while an update is under way, what puts the state back to rest
        self.undo: Callable[[], None] | None = None
        self.clip: Clip | None = None
        self.left: Event | None = None
        self.attempt = object()

    def sources(self) -> list[Source]:
        masters, region = self.host.masters, self.state.region
        travelling = [] if masters is None else [masters.memory]
        if region.numel():
            travelling.append(region)
        changed = [Source(memory, self.left) for memory in travelling]
        return [Source(self.sums.memory, self.sums.sent), *changed]

    def steps(
        self, noted: Noted, weights: Tensor, gradients: Tensor, rests: Tensor
    ) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
        """Main parameters as a noted call changes them, of buffers of bytes.

        All at once; masters, which take memory, one after the other.
        """
        masters, mains = self.host.masters, [*self.mains.items()]
        steps = noted.method == "step"
        together = {}
        for index in self.used if steps else range(len(mains)):
            param, main = mains[index]
            weight = tensor_in(weights, self.host.chunk.tensors[index])
            mastered = masters is not None and index in masters
            rest = masters.within(rests, index) if masters and mastered else None
            main.data = weight if rest is None else join(weight, rest)
            if steps:
                main.grad = self.sums.within(gradients, index).to(main.dtype)
            if rest is None:
                together[param] = main
                continue
            yield {param: main}
            main.grad = None
            split(main.data, weight, rest)
            main.data = main.new_empty(0)
        if together:
            yield together

    def unbind(self) -> None:
        """Let go of them again."""
        for main in self.mains.values():
            main.grad = None
            main.data = main.new_empty(0)


class DeferredUpdates(Updates):
    """Makes noted steps; see Note [The deferred update].

    Args:
        plain: The optimizer that the run would have used without paging.
        names: Full name of each parameter, by `id(parameter)`.
        staging: Through which gradients and states come.

    Attributes:
        kind: The class of `plain`.

    Raises:
        ConfigError: See `require_separable`.
    """

    def __init__(
        self,
        plain: torch.optim.Optimizer,
        names: Mapping[int, str],
        device: Device,
        staging: Staging,
        around: Surroundings,
    ) -> None:
        require_separable(plain)
        self.plain, self.kind = plain, type(plain)
        self._names, self._device, self._staging = names, device, staging
        self._around = around
        self._all: list[_Own] = []
        self._own: dict[int, _Own] = {}
        self._clip: Clip | None = None
        self._hidden: dict[Any, Any] = {}
        self._leaving: deque[tuple[Event, Change]] = deque()

    def wrapped(self) -> torch.optim.Optimizer:
        """The optimizer to train with: `plain` itself, in front of its class another."""
        name = f"Paged{self.kind.__name__}"
        bases = (PagedOptimizer, self.kind)
        switches = {
            method: partialmethod(PagedOptimizer.switch, method)
            for method in ("train", "eval")
            if hasattr(self.kind, method)
        }
        self.plain.__class__ = type(name, bases, {"updates": self, **switches})
        return self.plain

    def take_chunks(self, chunks: Sequence[HostChunk], gradients: DeviceSums) -> None:
        self._gradients = gradients
        known = {id(own.host): own for own in self._all}
        self._all = [
            known.get(id(host))
            or _Own(host, HostedState(self.plain, host.params, self._device))
            for host in chunks
        ]
        self._own = {own.host.chunk.index: own for own in self._all}
        self._places: dict[int, tuple[_Own, int]] = {
            id(param): (own, index)
            for own in self._all
            for index, param in enumerate(own.host.params)
        }
        self.adopt([own for own in self._all if id(own.host) not in known])

    def adopt(self, chunks: Sequence[_Own] | None = None) -> None:
        """Bring state home that was made or loaded elsewhere, of all chunks or some."""
        shared, groups = self._shared(), self._groups()
        for own in self._all if chunks is None else chunks:

            def stays(leaf: Leaf, own: _Own = own) -> bool:
                group = groups[id(own.host.params[leaf.path[0]])]
                # the rule of torch.optim.Optimizer.load_state_dict
                on_device = group.get("fused") or group.get("capturable")
                return leaf.key == "step" and not on_device

            own.state.adopt(stays, shared)

    # gradients

    def clip_grad_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float
    ) -> Tensor:
        """As `Updates` has it; what is on the host is scaled as it is updated."""
        if self._clip is not None:
            # once more without a step: the second one sees what the first has scaled
            self.settle_gradients()
        self._settle()
        norms, here = [], []
        for param in parameters:
            own, index = self._places.get(id(param), (None, 0))
            if own is not None and index in own.sums.present:
                norms.append(self._norm(own.sums, index))
            elif own is None and param.grad is not None:
                norms.append(torch.nn.utils.get_total_norm([param.grad]))
                here.append(param)
        # that of a number is the number: its order of dtypes is torch's affair
        total_norm = torch.nn.utils.get_total_norm(norms)
        if max_norm != float("inf"):
            torch.nn.utils.clip_grads_with_norm_(here, max_norm, total_norm)
            self._clip = (max_norm, total_norm)
        return total_norm

    def settle_gradients(self) -> None:
        self._settle()
        for own in self._all:
            if self._clip is not None:
                _clip(own.sums, own.sums.present, self._clip)
            if own.clip is not None and own.noted is None:
                # what the last step has used, while it is still there
                _clip(own.sums, set(own.used) - own.sums.present, own.clip)
                own.clip = None
        self._clip = None

    def forget_clip(self) -> None:
        """Gradients that were to be scaled are gone."""
        self._clip = None

    def forget_gradients(self) -> None:
        self._clip = None
        for own in self._all:
            own.sums.present.clear()
            own.sums.norms.clear()

    # steps

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Around the plain step, which must see only what it has to update now."""
        stood: list[tuple[nn.Parameter, Tensor]] = []

        def note(*_: Any) -> None:
            # what is shown would be taken for what somebody has written after it
            self._around.hide()
            self._settle()
            for own in self._all:
                if own.noted is not None and own.sums.present:
                    name = self._names[id(own.host.params[0])]
                    raise AccessError(
                        f"{name}: this weight has a gradient, but it has been used since "
                        "the last step without a forward of the model that would have "
                        "updated it. Call the model, not functions of its weights."
                    )
            self.flush()
            noted = Noted(self.plain, self.kind, self._clip)
            self._clip = None
            for own in self._all:
                params = own.host.params
                stood.extend((p, p.grad) for p in params if p.grad is not None)
                for param in params:
                    param.grad = None
                self._hide_states(params)
                if own.sums.present:
                    own.used = tuple(sorted(own.sums.present))
                    own.sums.present.clear()
                    own.sums.norms.clear()
                    own.noted = noted

        # the last one: others may change groups and gradients
        handle = self.plain.register_step_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()
            self._show_states()
            for param, stand_in in stood:
                param.grad = stand_in
            self._gradients.spend()
        self.fetch_ahead(0)
        self._around.show_again()

    def switch(self, method: str) -> None:
        """`train` or `eval` of a schedule-free optimizer, wherever weights are."""
        self.flush()
        noted = Noted(self.plain, self.kind, method=method)
        before = [dict(group) for group in self.plain.param_groups]
        moved = [own for own in self._all if own.state.region.numel()]
        for own in moved:
            self._hide_states(own.host.params)
        try:
            getattr(self.kind, method)(self.plain)
        finally:
            self._show_states()
        if before != [dict(group) for group in self.plain.param_groups]:
            self.settle_gradients()
            for own in moved:
                own.noted = noted
            self.flush()

    def fetch_ahead(self, block: int) -> None:
        for own in self._all:
            at = own.host.chunk.block
            if own.noted is not None and at is not None and at >= block:
                if not self._staging.fetch(own.key, own.sources()):
                    return

    def is_pending(self, chunk: int) -> bool:
        own = self._own.get(chunk)
        return own is not None and own.noted is not None

    def update(self, chunk: int, weights: InMemory) -> None:
        """A pending chunk is about to be used: make its noted step."""
        self._update(self._own[chunk], weights)

    def finish(self) -> None:
        for own in self._all:
            self._send_home(own)

    def flush_chunk(self, chunk: int) -> None:
        """Make the noted step of one chunk."""
        if self.is_pending(chunk):
            own = self._own[chunk]
            with self._around.beside(own.host.chunk, own.left) as weights:
                self._update(own, weights)

    def flush(self) -> None:
        self.finish()
        for own in self._all:
            self.flush_chunk(own.host.chunk.index)
        for own in self._all:
            if own.left is not None:
                own.left.synchronize()
        self._leaving.clear()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around the load of a state, which lands where the main parameters are then."""
        self.flush()
        mains = {p: main for own in self._all for p, main in own.mains.items()}
        try:
            for main in mains.values():
                main.data = main.data.cpu()
            self._exchange(mains)
            yield
        finally:
            self._exchange({main: param for param, main in mains.items()})
        self.adopt()

    def add_masters(self, packed: dict[str, Any]) -> None:
        """Complete what `state_dict` has made: each state has its master beside it."""
        states = packed["state"]
        for number, param in enumerate(_params(self.plain)):
            masters, index = self._masters_of(param)
            # one that was never updated is its weight
            if masters is not None and (number in states or masters.any(index)):
                state = states.get(number, {})
                states[number] = {**state, MASTER_KEY: masters.join(index)}

    def without_masters(
        self, saved: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[nn.Parameter, Tensor]]:
        """A state as the plain optimizer has it, and the masters in it.

        Raises:
            CheckpointError: It has masters and this run none, or the other way round.
        """
        states = {number: dict(state) for number, state in saved["state"].items()}
        found: dict[nn.Parameter, Tensor] = {}
        for number, param in enumerate(_params(self.plain)):
            if number in states:
                master = states[number].pop(MASTER_KEY, None)
                has_master = self._masters_of(param)[0] is not None
                require_masters(master is not None, has_master)
                if master is not None:
                    found[param] = master
        return {**saved, "state": states}, found

    def load_masters(self, saved: Mapping[nn.Parameter, Tensor]) -> None:
        """Overwrite masters, and weights with them; nothing is pending."""
        for param, master in saved.items():
            masters, index = self._masters_of(param)
            assert masters is not None
            self._around.rewrites(self._places[id(param)][0].host)
            masters.load(index, master)

    def _masters_of(self, param: nn.Parameter) -> tuple[Masters | None, int]:
        """Where the master of a parameter is, if it has one."""
        own, index = self._places.get(id(param), (None, 0))
        masters = None if own is None else own.host.masters
        return (masters, index) if masters and index in masters else (None, 0)

    def _exchange(self, other: Mapping[Any, nn.Parameter]) -> None:
        """Let groups and state be of other parameters."""
        for group in self.plain.param_groups:
            group["params"] = [other.get(p, p) for p in group["params"]]
        for param in [p for p in self.plain.state if p in other]:
            self.plain.state[other[param]] = self.plain.state.pop(param)

    def order_states(self) -> None:
        """Let them be in the order in which the plain run makes them."""
        state = self.plain.state
        every = [p for group in self.plain.param_groups for p in group["params"]]
        state.update([(p, state.pop(p)) for p in every if p in state])

    def close(self) -> None:
        self._show_states()
        self.order_states()
        self.plain.__class__ = self.kind
        with ExitStack() as rest:
            for own in self._all:
                rest.callback(own.state.release)

    def host_bytes(self) -> int:
        return sum(o.host.host_bytes() + o.state.region.numel() for o in self._all)

    def _settle(self) -> None:
        self._gradients.settle()
        self._gradients.take_back(lambda _chunk: False, self.flush_chunk)

    def _norm(self, sums: GradientSums, index: int) -> Tensor:
        if index not in sums.norms:
            # somebody has changed it on the host
            gradient = sums.total(index).to(self._device.torch_device)
            sums.norms[index] = sums.norm(gradient)
        return sums.norms[index]

    def _groups(self) -> dict[int, dict[str, Any]]:
        return {id(p): g for g in self.plain.param_groups for p in g["params"]}

    def _shared(self) -> set[int]:
        """Addresses of what all parameters share with the optimizer."""
        apart = {"state", "param_groups", "defaults"}
        common = {k: v for k, v in vars(self.plain).items() if k not in apart}
        return {x.tensor.data_ptr() for x in leaves(common) if x.tensor.numel()}

    def _hide_states(self, params: Sequence[nn.Parameter]) -> None:
        for param in params:
            if param in self.plain.state:
                self._hidden[param] = state = self.plain.state[param]
                self.plain.state[param] = marks(state)

    def _show_states(self) -> None:
        hidden, self._hidden = self._hidden, {}
        self.plain.state.update(hidden)

    def _update(self, own: _Own, weights: InMemory) -> None:
        """See Note [An update that is interrupted]."""
        self._show_states()
        device, noted = self._device, own.noted
        assert noted is not None
        if own.left is not None:
            # the last way home may still read what is written now
            device.compute.wait(own.left)
        if own.undo is not None:
            # an update under way has changed weights, state and operands
            own.undo()
            self._staging.give_back(own.key)
            weights.spoilt()
        keep = own.host.chunk.pageable
        buffer = self._staging.take(own.key, own.sources(), keep)
        own.attempt = attempt = object()
        own.undo = undo = self._remember(own)
        try:
            change = self._step(own, noted, weights.buffer, buffer)
            if own.attempt is not attempt:
                raise AccessError(
                    "a signal handler has read weights in the middle of their update, "
                    "and training cannot go on after it"
                )
            own.done = change, weights, noted.clip
        except BaseException:
            # an interrupt too; raised again as it is
            if own.attempt is attempt:
                undo()
                own.undo = None
            device.writes([buffer], device.compute)
            self._staging.give_back(own.key)
            weights.spoilt()
            raise
        device.writes([buffer], device.compute)
        weights.changed()
        self._send_home(own)

    def _send_home(self, own: _Own) -> None:
        """Queue the way home of what an update has left on the device."""
        if own.done is None:
            return
        change, weights, clip = own.done
        own.undo = None
        own.state.take(change)
        event = weights.send_back()
        offload = self._device.offload
        for target, source in change.copies:
            offload.copy(target, source)
        own.left = own.sums.sent = offload.record()
        self._staging.give_back(own.key, [event, own.left])
        # what an update has made stays until it has been copied
        self._leaving.append((own.left, change))
        while len(self._leaving) > IN_FLIGHT:
            self._retire()
        while self._leaving and self._leaving[0][0].query():
            self._retire()
        own.clip, own.noted, own.done = clip, None, None

    def _retire(self) -> None:
        event, _change = self._leaving.popleft()
        event.synchronize()

    def _remember(self, own: _Own) -> Callable[[], None]:
        """What puts the state of a chunk back to what it is now, at rest."""
        states = self.plain.state
        before: dict[Tensor, Any] = {
            p: states[p] for p in own.host.params if p in states
        }
        bound = [(leaf, leaf.tensor) for leaf in leaves(before)]
        rests = own.state.is_at_rest
        kept = {
            p: structure(s, lambda t: t if rests(t) else t.clone())
            for p, s in before.items()
        }

        def undo() -> None:
            for leaf, tensor in bound:
                leaf.bind(tensor)
            for param in own.host.params:
                states.pop(param, None)
            states.update(kept)

        return undo

    def _step(self, own: _Own, noted: Noted, weights: Tensor, buffer: Tensor) -> Change:
        masters = own.host.masters
        gradients, *others = parts(buffer, own.sources())
        rests = others.pop(0) if masters is not None else buffer
        state = others[0] if others else None
        kind = self._device.torch_device.type
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(kind, enabled=False),
        ):
            try:
                if state is not None:
                    own.state.to_device(state)
                for mains in own.steps(noted, weights, gradients, rests):
                    noted.make(self.plain, mains)
            finally:
                own.unbind()
            changed = buffer if state is None else state
            change = own.state.changed(changed, self._shared())
        if masters is not None:
            change.copies.append((masters.memory, rests))
        return change


class PagedOptimizer(torch.optim.Optimizer):
    """Put in front of the plain optimizer's class while its weights are paged."""

    updates: ClassVar[DeferredUpdates]

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise ConfigError("optimizer: a closure cannot be called under paging")
        with self.updates.noting():
            return super().step()

    # torch is not to call the hooks around this one, too
    step.hooked = True  # type: ignore[attr-defined]

    def switch(self, method: str) -> None:
        """What `train` and `eval` are, where the plain optimizer has them."""
        self.updates.switch(method)

    def state_dict(self) -> dict[str, Any]:
        self.updates.flush()
        self.updates.order_states()
        packed = super().state_dict()
        self.updates.add_masters(packed)
        return packed

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        others, masters = self.updates.without_masters(state_dict)
        with self.updates.loading():
            super().load_state_dict(others, *args, **kwargs)
        self.updates.load_masters(masters)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad(*args, **kwargs)
        self.updates.forget_clip()


def kind_of(optimizer: torch.optim.Optimizer) -> type:
    """The class of an optimizer, without what is put in front of it here."""
    if isinstance(optimizer, PagedOptimizer):
        return optimizer.updates.kind
    return type(optimizer)


def _params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _clip(sums: GradientSums, indices: Collection[int], clip: Clip) -> None:
    holders = []
    for index in indices:
        sums.norms.pop(index, None)
        holder = sums.total(index).detach()
        holder.grad = sums.total(index)
        holders.append(holder)
    torch.nn.utils.clip_grads_with_norm_(holders, *clip)
