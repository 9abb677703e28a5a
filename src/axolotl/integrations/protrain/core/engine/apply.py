"""Apply recorded optimizer steps to chunks whose state is in host memory.

# Note [One way to update]

`Updates.apply` brings gradient, state and masters of a chunk beside its weights, lets the
optimizer's own class make the recorded step there, and takes weights and state back. *When*
is decided in step.py: at the next use of the chunk for a rank alone, at the step for
several. *Where* is a value, the device or the host. *Whose* tensors is a span of the chunk
(Note [Who updates what] in host_chunks.py), all of it for a rank alone.

# Note [An update that fails]

Nothing on the host changes before an update has been made without an error. An error
before that, a shortage of memory for example, restores the structure of the state, which
an optimizer changes as it goes; the caller gives the weights on the device up, and the step
stays recorded. Copies to the host take no memory; where one fails the run ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ProTrainError
from ..types import IN_FLIGHT, Update
from .device import Event
from .host_chunks import HostChunk, HostMemory, MainGrads
from .recorded_step import Clip, RecordedStep, non_tensor_state, states_of
from .slots import Slot
from .staging import Source, Staging
from .state import Change, OffloadedState, StateTensor, state_tensors, structure
from .state_memory import StateMemory


class ChunkUpdate:
    """The span of a chunk that this rank updates: its state, and the step it waits for.

    Attributes:
        params: Parameters of the span, by index.
        master_params: The parameters that the optimizer changes in their place.
        recorded: The step that is still to be applied.
        used: Indices of parameters that had a gradient in it.
        clip: How the last step has scaled gradients that are unscaled on the host.
        written_back: The event after the last D2H copy of weights and state.
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
        self.clip: Clip | None = None
        self.written_back: Event | None = None

    @property
    def block(self) -> int:
        """The block of the chunk, -1 outside of blocks."""
        block = self.host.chunk.block
        return -1 if block is None else block

    def changes(self) -> list[int]:
        """Indices of the parameters that the recorded step changes here."""
        if self.recorded is None:
            return []
        touched = self.used if self.recorded.method == "step" else self.params
        return [index for index in touched if index in self.params]

    def operands(self, weights: bool) -> list[Source]:
        """Host bytes that an update reads: gradients, masters, state, and `weights`."""
        host, after = self.host, self.written_back
        sources = [Source(self.main_grads.memory, self.main_grads.sent)]
        sources += (Source(m, after) for m in self._masters_and_state() if m.numel())
        if weights:
            sources.append(Source(host.weights.memory, after))
        return sources

    def host_bytes(self) -> int:
        """Host bytes beside the weights."""
        own = self.main_grads.memory, *self._masters_and_state()
        return sum(memory.nbytes for memory in own)

    def _masters_and_state(self) -> tuple[Tensor, Tensor]:
        return self.host.masters.memory, self.state.region

    def split(
        self, parts: list[Tensor], weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Weights, gradients, masters and state among the parts of `operands`."""
        left = [*parts]
        gradients = left.pop(0)
        masters = left.pop(0) if self.host.masters.memory.numel() else gradients[:0]
        state = left.pop(0) if self.state.region.numel() else None
        return left[0] if weights is None else weights, gradients, masters, state

    def make(self, weights: Tensor, gradients: Tensor, masters: Tensor) -> None:
        """Make the recorded step on operands, uint8 of the span each."""
        recorded, host = self.recorded, self.host
        assert recorded is not None
        together: dict[nn.Parameter, nn.Parameter] = {}
        rounded: list[tuple[Tensor, Tensor]] = []
        try:
            for index in self.changes():
                param = self.params[index]
                main = self.master_params[param]
                main.data = weight = host.weights.within(weights, index)
                if index in host.masters:
                    main.data = master = host.masters.within(masters, index)
                    rounded.append((weight, master))
                if recorded.method != "step":
                    together[param] = main
                    continue
                gradient = self.main_grads.within(gradients, index)
                main.grad = gradient.to(main.dtype)
                if main.dtype is gradient.dtype:
                    together[param] = main
                else:
                    # one after the other: a copy of the gradient takes memory
                    recorded.replay(self._plain, {param: main})
                    main.grad = None
            if together:
                recorded.replay(self._plain, together)
            for weight, master in rounded:
                weight.copy_(master)
        finally:
            for main in self.master_params.values():
                main.grad = None
                main.data = main.new_empty(0)

    def remember(self) -> Callable[[], None]:
        """Return a function that puts the state of the chunk back to what it is now."""
        states = states_of(self._plain)
        before: dict[Tensor, Any] = {
            p: states[p] for p in self.params.values() if p in states
        }
        bound = [(place, place.tensor) for place in state_tensors(before)]
        on_host = self.state.is_on_host
        kept = {
            p: structure(s, lambda t: t if on_host(t) else t.clone())
            for p, s in before.items()
        }

        def undo() -> None:
            for place, tensor in bound:
                place.bind(tensor)
            for param in self.params.values():
                states.pop(param, None)
            states.update(kept)

        return undo


class Updates:
    """Records optimizer steps and applies them to chunks; see Note [One way to update].

    Args:
        memory: Host memory of the chunks.
        staging: Brings operands to the device.
        where: The place where weights are updated.

    Attributes:
        plain: The optimizer that the run would have used without paging.
        kind: Its class.
        all: The updates of all chunks, in the order in which the next step uses them.
        defers: Whether a recorded step is applied when its chunk is used next.
    """

    plain: torch.optim.Optimizer
    kind: Any

    def __init__(self, memory: HostMemory, staging: Staging, where: Update) -> None:
        self._device, self._ranks = memory.device, memory.ranks
        self._staging, self.on_host = staging, where is Update.HOST
        self.defers = not self.on_host and self._ranks.world.size == 1
        self.all: list[ChunkUpdate] = []
        self.of_chunk: dict[int, ChunkUpdate] = {}
        # code of the optimizer runs, which reads its state as it is
        self.own_code = False
        # state that the plain step, being recorded, must not change
        self._hidden: dict[Any, Any] = {}
        # recorded steps of blocks, in the order of their use
        self._in_blocks: list[ChunkUpdate] = []
        # tensors of a change, until they have been copied to the host
        self._leaving: deque[tuple[Event, Change]] = deque()
        self._clip: Clip | None = None
        self._state_memory: StateMemory | None = None

    @property
    def states(self) -> dict[Any, Any]:
        """The optimizer's state as it is: steps may be recorded and not applied."""
        return states_of(self.plain)

    def take_optimizer(self, plain: torch.optim.Optimizer, kind: Any) -> None:
        """Record the steps of this optimizer, of class `kind`, from here on."""
        self.plain, self.kind = plain, kind

    def take_chunks(self, chunks: Sequence[HostChunk]) -> None:
        """Take over the state of these chunks, known ones and more; nothing is recorded."""
        if self._state_memory is None:
            several = self._ranks.world.local_size > 1
            self._state_memory = StateMemory(self._device, not self.on_host, several)
        where = torch.device("cpu") if self.on_host else self._device.torch_device
        new = [host for host in chunks if host.chunk.index not in self.of_chunk]
        for host in new:
            params = [host.params[index] for index in host.span]
            state = OffloadedState(self.plain, params, where, self._state_memory)
            self.of_chunk[host.chunk.index] = ChunkUpdate(self.plain, host, state)
        self.all = [self.of_chunk[host.chunk.index] for host in chunks]
        self._places = {
            id(param): (own, index)
            for own in self.all
            for index, param in enumerate(own.host.params)
        }
        self.adopt([self.of_chunk[host.chunk.index] for host in new])

    def adopt(self, chunks: Sequence[ChunkUpdate]) -> None:
        """Move state that was created on the device, or loaded, into host memory."""
        groups = {id(p): g for g in self.plain.param_groups for p in g["params"]}
        for own in chunks:
            self._drop_others(own)

            def stays(place: StateTensor, own: ChunkUpdate = own) -> bool:
                if self.on_host:
                    return False
                group = groups[id(own.host.params[own.host.span[place.path[0]]])]
                # the rule of torch.optim.Optimizer.load_state_dict
                on_device = group.get("fused") or group.get("capturable")
                return place.key == "step" and not on_device

            own.state.adopt(stays)

    def place_of(self, param: nn.Parameter) -> tuple[ChunkUpdate | None, int]:
        """The update of a parameter's chunk, None where no host has it, and its index."""
        return self._places.get(id(param), (None, 0))

    def _drop_others(self, own: ChunkUpdate) -> None:
        """Keep only non-tensor state of weights that other ranks update."""
        states = self.states
        for index, param in enumerate(own.host.params):
            if index not in own.params and param in states:
                states[param] = non_tensor_state(states.pop(param))
                if not states[param]:
                    del states[param]

    # recording

    def pack(self, states: Mapping[int, Any]) -> bytes:
        """Pack states for another rank; see `StateMemory.pack`."""
        assert self._state_memory is not None
        return self._state_memory.pack(states)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the plain step: record it for all chunks, of which it must see nothing."""
        stood: list[tuple[nn.Parameter, Tensor]] = []
        clip, self._clip = self._clip, None
        self.own_code = True
        try:
            recorded = self._recorded_now(clip)
            for own in self.all:
                params = own.host.params
                stood.extend((p, p.grad) for p in params if p.grad is not None)
                for param in params:
                    param.grad = None
                self._hide_states(params)
                if own.main_grads.present:
                    own.used = tuple(sorted(own.main_grads.present))
                    own.main_grads.present.clear()
                    own.main_grads.norms.clear()
                    own.recorded = recorded
            yield
        finally:
            self.own_code = False
            self._show_states()
            for param, placeholder in stood:
                param.grad = placeholder
            for own in self.all:
                own.host.grads.spend()
        if self.defers:
            self._in_blocks = [o for o in self.all if o.recorded and o.block >= 0]

    @contextmanager
    def recording_call(self, method: str) -> Iterator[None]:
        """Around `train` or `eval` of a schedule-free optimizer: record it for all chunks
        if it changes the groups."""
        recorded = RecordedStep(self.plain, self.kind, method=method)
        before = [dict(group) for group in self.plain.param_groups]
        moved = [own for own in self.all if self.states]
        for own in moved:
            self._hide_states(own.host.params)
        self.own_code = True
        try:
            yield
        finally:
            self.own_code = False
            self._show_states()
        if before != [dict(group) for group in self.plain.param_groups]:
            for own in moved:
                own.recorded = recorded

    def _recorded_now(self, clip: Clip | None) -> RecordedStep:
        if not self.on_host:
            return RecordedStep(self.plain, self.kind, clip)
        if clip is not None:
            clip = clip[0], clip[1].cpu()
        # how a device computes is its affair
        fused = self._device.torch_device.type != "cpu"
        # or None: spares a pass over all gradients
        scaling = clip if _scales(clip) else None
        return RecordedStep(self.plain, self.kind, scaling, fused=fused)

    def _hide_states(self, params: Sequence[nn.Parameter]) -> None:
        states = self.states
        for param in params:
            if param in states:
                self._hidden[param] = state = states[param]
                states[param] = non_tensor_state(state)

    def _show_states(self) -> None:
        self.states.update(self._hidden)
        self._hidden = {}

    # applying

    def prefetch(self, block: int) -> None:
        """Bring operands of the next updates, from a block on, while there is room."""
        every = self._in_blocks
        # a search: blocks that nobody has used since would be looked at by each later one
        at = bisect_left(every, block, key=lambda own: own.block)
        while at < len(every):
            own = every[at]
            if own.recorded is None:
                del every[at]
            elif self._staging.fetch(own.key, own.operands(not self.defers)):
                at += 1
            else:
                return

    def apply(
        self,
        own: ChunkUpdate,
        weights: Tensor | None = None,
        slot: Slot | None = None,
    ) -> Event | None:
        """Apply the recorded step of a chunk.

        Args:
            weights: Those of the span on the device, uint8; by default they come from the
                host with the other operands.
            slot: The slot in use where they are.

        Returns:
            The event after everything is back in host memory; None if nothing changes.
        """
        if own.recorded is None or not own.changes():
            own.recorded = None
            return None
        if self.on_host:
            self._apply_in_place(own)
            return None
        device, staging = self._device, self._staging
        if own.written_back is not None:
            # the last way home may still read what is written now
            device.compute.wait(own.written_back)
        parts = staging.take(own.key, own.operands(weights is None), own.block >= 0)
        weights, gradients, masters, state = own.split(parts, weights)
        undo = own.remember()
        try:
            with _updating(device.torch_device):
                if state is not None:
                    own.state.to_device(state)
                own.make(weights, gradients, masters)
                change = own.state.changed(gradients if state is None else state)
        except BaseException:
            # see Note [An update that fails]; raised again as it is
            undo()
            device.writes(parts, device.compute)
            staging.give_back(own.key)
            raise
        device.writes(parts, device.compute)
        if slot is not None:
            slot.changed()
        else:
            device.writes([weights], device.compute)
        event = self._write_back(own, weights, masters, change)
        if slot is not None:
            slot.write_back_ends(event)
        return event

    def _write_back(
        self, own: ChunkUpdate, weights: Tensor, masters: Tensor, change: Change
    ) -> Event:
        """Queue the D2H copies of all that an update has left on the device."""
        own.state.take(change)
        host, offload = own.host, self._device.offload
        copies = [(host.weights.memory, weights), *change.copies]
        if masters.numel():
            copies.append((host.masters.memory, masters))
        try:
            offload.wait(self._device.compute.record())
            for target, source in copies:
                offload.copy(target, source)
            own.written_back = own.main_grads.sent = event = offload.record()
        except BaseException as error:
            # whatever it is, an exit too: the step can neither be made again nor undone
            own.recorded = None
            self._staging.give_back(own.key)
            if not isinstance(error, RuntimeError):
                raise
            # or a shortage of memory would have the step repeated
            name = host.chunk.tensors[0].name
            raise ProTrainError(
                f"{name}: its update could not be copied to the host ({error}), where "
                "some of it is old now. Resume from the last checkpoint."
            ) from error
        self._staging.counters.offloaded_bytes += sum(t.nbytes for t, _ in copies)
        self._staging.give_back(own.key, [event])
        # what an update has made stays until it has been copied
        self._leaving.append((event, change))
        while len(self._leaving) > IN_FLIGHT or (
            self._leaving and self._leaving[0][0].query()
        ):
            self._retire()
        assert own.recorded is not None
        own.clip, own.recorded = own.recorded.clip, None
        return event

    def _apply_in_place(self, own: ChunkUpdate) -> None:
        """Apply a step where its operands lie, on the calling thread."""
        host = own.host
        operands = host.weights.memory, own.main_grads.memory, host.masters.memory
        self._device.writes((*operands, own.state.region))
        # gradients are scaled where they are read: nothing is left to be clipped
        with _updating(host.weights.memory.device):
            own.make(*operands)
            change = own.state.changed(own.state.region)
            for target, source in change.copies:
                if target.data_ptr() != source.data_ptr():
                    target.copy_(source)
        own.state.take(change)
        own.clip, own.recorded = None, None

    def settle(self) -> None:
        """Return once everything that updates have changed is in host memory."""
        while self._leaving:
            self._retire()
        self._staging.retire()

    def _retire(self) -> None:
        event, _change = self._leaving.popleft()
        event.synchronize()

    # gradients

    def clip_grad_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float
    ) -> Tensor:
        """Return the total 2-norm of all gradients and scale them as `clip_grad_norm_`
        would, in host memory when they are read.

        `parameters` come in the order of the plain run, which fixes the last bit.

        # Note [The norm of all gradients]

        It is that of `get_total_norm`, to the last bit: a norm for each gradient, in its
        dtype, and the norm of those in the order of the plain run's parameters, wherever
        each of them is. Each is taken on the device, by the rank that updates the weight,
        and one sum over the node tells them to all. Norms of pieces would not do: torch's
        fp32 norm of 1.5 million numbers is 2e-5 from the fp64 one, and in bf16 the plain
        norm is rounded twice.
        """
        self._share_norms()
        norms, here = [], []
        for param in parameters:
            own, index = self.place_of(param)
            if own is not None and index in own.main_grads.present:
                norms.append(own.main_grads.norms[index])
            elif own is None and param.grad is not None:
                norms.append(torch.nn.utils.get_total_norm([param.grad]))
                here.append(param)
        # that of a number is the number: its order of dtypes is torch's affair
        total_norm = torch.nn.utils.get_total_norm(norms)
        if max_norm != float("inf"):
            torch.nn.utils.clip_grads_with_norm_(here, max_norm, total_norm)
            self._clip = (max_norm, total_norm)
        return total_norm

    @property
    def clips(self) -> bool:
        """Whether gradients in host memory are still to be scaled."""
        return self._clip is not None

    def scale(self) -> None:
        """Scale gradients in host memory that the next step was to scale."""
        if self._clip is not None:
            for own in self.all:
                _clip(own, own.main_grads.present, self._clip)
            self._clip = None

    def scale_used(self) -> None:
        """Scale gradients that the last step has used, while they are still there."""
        for own in self.all:
            if own.clip is not None:
                _clip(own, set(own.used) - own.main_grads.present, own.clip)
                own.clip = None

    def forget_clip(self) -> None:
        """Forget how gradients were to be scaled, which are gone."""
        self._clip = None

    def forget_gradients(self) -> None:
        """Forget the gradients since the last step."""
        self._clip = None
        for own in self.all:
            own.main_grads.present.clear()
            own.main_grads.norms.clear()

    def _share_norms(self) -> None:
        """Tell all ranks the norm of every gradient; see Note [The norm of all gradients]."""
        known: list[tuple[MainGrads, int]] = []
        for own in self.all:
            grads = own.main_grads
            for index in sorted(grads.present):
                known.append((grads, index))
                if index in own.params and index not in grads.norms:
                    # somebody has changed it on the host
                    gradient = grads[index].to(self._device.torch_device)
                    grads.norms[index] = grads.norm(gradient)
        if self._ranks.world.local_size == 1 or not known:
            return
        of_others = torch.zeros(len(known), dtype=torch.float64)
        for number, (grads, index) in enumerate(known):
            if index in grads.norms:
                of_others[number] = grads.norms[index]
        totals = self._ranks.node_sum(of_others)
        for norm, (grads, index) in zip(totals, known, strict=True):
            if index not in grads.norms:
                dtype = grads.norm(grads[index].new_empty(0)).dtype
                grads.norms[index] = norm.to(self._device.torch_device, dtype)

    def host_bytes(self) -> int:
        """Host bytes of gradients, masters and optimizer state."""
        return sum(own.host_bytes() for own in self.all)


@contextmanager
def _updating(device: torch.device) -> Iterator[None]:
    """As `step` is called, whoever uses the weights that it changes."""
    with (
        torch.inference_mode(False),
        # nor inside of a transform: weights are no part of it
        torch._C._DisableFuncTorch(),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


def _clip(own: ChunkUpdate, indices: Iterable[int], clip: Clip) -> None:
    grads, holders = own.main_grads, []
    for index in indices:
        grads.norms.pop(index, None)
        if index not in own.params:
            continue
        holder = grads[index].detach()
        holder.grad = grads[index]
        holders.append(holder)
    torch.nn.utils.clip_grads_with_norm_(holders, *clip)


def _scales(clip: Clip | None) -> bool:
    """Whether `clip_grads_with_norm_` changes anything, as it computes it."""
    one = torch.ones(1)
    one.grad = torch.ones(1)
    if clip is not None:
        torch.nn.utils.clip_grads_with_norm_(one, *clip)
    return bool(one.grad != 1)
