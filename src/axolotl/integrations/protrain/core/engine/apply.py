"""Apply recorded optimizer steps to chunks whose state is in host memory.

# Note [One way to update]

`Updates.apply` brings gradient, state and masters of a chunk beside its weights, piece by
piece (layout/pieces.py), lets the optimizer's own class make the recorded step there, and
takes weights and state back. *When*
is decided in step.py: at the next use of the chunk for a rank alone, at the step for
several. *Where* is a value, the device or the host. *Whose* tensors is a span of the chunk
(Note [Who updates what] in host_chunks.py), all of it for a rank alone.

# Note [An update that fails]

Nothing on the host changes before the update of a piece has been made without an error. An
error before that, a shortage of memory for example, leaves the step recorded for this piece
and those after it; the caller gives the weights on the device up, and fetches them from the
host, where pieces before have their update. Copies to the host take no memory; where one
fails the run ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ProTrainError
from ..layout import Piece, pieces
from ..types import IN_FLIGHT, Update
from .device import Event
from .host_chunks import HostChunk, HostMemory, MainGrads
from .host_pool import StateMemory
from .recorded_step import (
    Clip,
    RecordedStep,
    is_elementwise,
    non_tensor_state,
    states_of,
)
from .slots import Slot
from .staging import Source, Staging
from .state import OffloadedState, Path


class ChunkUpdate:
    """The span of a chunk that this rank updates: its state, and the step it waits for.

    Args:
        host: The chunk.
        plain: The optimizer, of class `kind`, that has the state.
        where: The device of updates.
        memory: Host memory for the state.
        numel: Elements of a piece.

    Attributes:
        params: Parameters of the span, by index.
        master_params: The parameters that the optimizer changes in their place.
        pieces: The parts of the span that are updated one after another.
        states: The state of each piece, at rest; pieces of one tensor share theirs.
        every_state: These, each once.
        recorded: The step that is still to be applied.
        num_applied: Pieces to which it has been applied.
        used: Indices of parameters that had a gradient in it.
        scaled: The last step, whose scaling of gradients the host has not seen.
        written_back: The event after the last D2H copy of weights and state.
    """

    def __init__(
        self,
        host: HostChunk,
        plain: torch.optim.Optimizer,
        kind: type,
        where: torch.device,
        memory: StateMemory,
        numel: int,
    ) -> None:
        self.host, self.plain, self.main_grads = host, plain, host.main_grads
        self.block = -1 if host.chunk.block is None else host.chunk.block
        self.params = {index: host.params[index] for index in host.span}
        self.master_params = {
            param: nn.Parameter(param.new_empty(0, dtype=host.main_dtype(index)))
            for index, param in enumerate(host.params)
        }
        self.pieces = pieces(host.chunk, host.span, is_elementwise(kind), numel)
        self.states: list[OffloadedState] = []
        self.every_state: list[OffloadedState] = []
        for piece in self.pieces:
            if piece.is_first:
                params = {
                    self.params[i]: host.chunk.tensors[i].name for i in piece.span
                }
                is_cut = piece.elements is not None
                state = OffloadedState(plain, params, where, memory, is_cut)
                self.every_state.append(state)
            self.states.append(state)
        self.recorded: RecordedStep | None = None
        self.num_applied = 0
        self.used: tuple[int, ...] = ()
        self.scaled: RecordedStep | None = None
        self.written_back: Event | None = None

    def changes(self, span: Iterable[int] | None = None) -> list[int]:
        """Indices of the parameters, of a `span`, that the recorded step changes here."""
        if self.recorded is None:
            return []
        touched = self.used if self.recorded.method == "step" else self.params
        within = self.params if span is None else span
        return [index for index in touched if index in within]

    def key(self, number: int) -> tuple[int, int]:
        """The key of a piece's operands on the device."""
        return self.host.chunk.index, number

    def operands(self, number: int, weights: bool) -> list[Source]:
        """Host bytes that the update of a piece reads: gradients, masters, state, and
        `weights`."""
        host, piece, after = self.host, self.pieces[number], self.written_back
        gradients = self.main_grads.memory[self.main_grads.where(piece)]
        sources = [Source(gradients, self.main_grads.sent)]
        for tensors in (host.masters, host.weights) if weights else (host.masters,):
            memory = tensors.memory[tensors.where(piece)]
            if memory.numel():
                sources.append(Source(memory, after))
        state = self.states[number].sources(piece)
        return [*sources, *(Source(memory, after) for memory in state)]

    def host_bytes(self) -> int:
        """Host bytes beside the weights."""
        regions = (state.region.nbytes for state in self.every_state)
        own = self.main_grads.memory.nbytes, self.host.masters.memory.nbytes
        return sum(own) + sum(regions)


class Updates:
    """Records optimizer steps and applies them to chunks; see Note [One way to update].

    Args:
        memory: Host memory of the chunks.
        staging: Brings operands to the device.
        where: The place where weights are updated.

    Attributes:
        plain: The optimizer that the run would have used without paging.
        kind: Its class.
        clip: How gradients in host memory are still to be scaled, None for not at all.
        staging_bytes: Device memory that the plan has for operands.
        all: The updates of all chunks, in the order in which the next step uses them.
        defers: Whether a recorded step is applied when its chunk is used next.
    """

    plain: torch.optim.Optimizer
    kind: Any
    staging_bytes = 0

    def __init__(self, memory: HostMemory, staging: Staging, where: Update) -> None:
        self._numel = memory.piece_numel
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
        # copies to the host, whose tensors stay until they have ended
        self._leaving: deque[tuple[Event, list[tuple[Tensor, Tensor]]]] = deque()
        # how gradients in host memory are still to be scaled
        self.clip: Clip | None = None
        several = self._ranks.world.local_size > 1
        self.state_memory = StateMemory(self._device, not self.on_host, several)

    def take_optimizer(self, plain: torch.optim.Optimizer, kind: Any) -> None:
        """Record the steps of this optimizer, of class `kind`, from here on."""
        self.plain, self.kind = plain, kind

    def take_chunks(self, chunks: Sequence[HostChunk]) -> None:
        """Take over the state of these chunks, known ones and more; nothing is recorded."""
        where = torch.device("cpu") if self.on_host else self._device.torch_device
        new = [host for host in chunks if host.chunk.index not in self.of_chunk]
        for host in new:
            given = self.plain, self.kind, where, self.state_memory, self._numel
            self.of_chunk[host.chunk.index] = ChunkUpdate(host, *given)
        self.all = [self.of_chunk[host.chunk.index] for host in chunks]
        self._places = {
            id(param): (own, index)
            for own in self.all
            for index, param in enumerate(own.host.params)
        }
        self.adopt([self.of_chunk[host.chunk.index] for host in new])

    def adopt(self, chunks: Sequence[ChunkUpdate], again: bool = False) -> None:
        """Move state that was created on the device, or loaded, into host memory; `again`
        where somebody has put other tensors."""
        groups = {id(p): g for g in self.plain.param_groups for p in g["params"]}

        def stays(param: nn.Parameter, path: Path) -> bool:
            # somebody may have taken it out of its group
            group = groups.get(id(param), {})
            # the rule of torch.optim.Optimizer.load_state_dict
            on_device = group.get("fused") or group.get("capturable")
            return not self.on_host and path[-1] == "step" and not on_device

        for own in chunks:
            self._drop_others(own)
            for state in own.every_state:
                state.adopt(stays, again)

    def place_of(self, param: nn.Parameter) -> tuple[ChunkUpdate | None, int]:
        """The update of a parameter's chunk, None where no host has it, and its index."""
        return self._places.get(id(param), (None, 0))

    def _drop_others(self, own: ChunkUpdate) -> None:
        """Keep only non-tensor state of weights that other ranks update."""
        states = states_of(self.plain)
        for index, param in enumerate(own.host.params):
            if index not in own.params and param in states:
                states[param] = non_tensor_state(states.pop(param))
                if not states[param]:
                    del states[param]

    # recording

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the plain step: record it for all chunks, of which it must see nothing."""
        if states_of(self.plain):
            # not before: first updates make state beside the ring
            self._staging.reserve(self.staging_bytes)
        stood: list[tuple[nn.Parameter, Tensor]] = []
        clip, self.clip = self.clip, None
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
        recorded = self._recorded_now(method=method)
        before = [dict(group) for group in self.plain.param_groups]
        moved = [*self.all] if states_of(self.plain) else []
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

    def _recorded_now(
        self, clip: Clip | None = None, method: str = "step"
    ) -> RecordedStep:
        notes = [(own, [state.note() for state in own.every_state]) for own in self.all]
        moved = [own for own, at_rest in notes if not all(at_rest)]
        if moved:
            self.adopt(moved, again=True)
        if not self.on_host:
            return RecordedStep(self.plain, self.kind, clip, method)
        if clip is not None:
            clip = clip[0], clip[1].cpu()
        # how a device computes is its affair
        fused = self._device.torch_device.type != "cpu"
        # or None: spares a pass over all gradients
        scaling = clip if _scales(clip) else None
        return RecordedStep(self.plain, self.kind, scaling, method, fused)

    def _hide_states(self, params: Sequence[nn.Parameter]) -> None:
        states = states_of(self.plain)
        for param in params:
            if param in states:
                self._hidden[param] = state = states[param]
                states[param] = non_tensor_state(state)

    def _show_states(self) -> None:
        states_of(self.plain).update(self._hidden)
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
            elif self.prefetch_operands(own):
                at += 1
            else:
                return

    def prefetch_operands(self, own: ChunkUpdate) -> bool:
        """Bring operands of a chunk's update; False if there was no room for all."""
        return all(
            self._staging.fetch(own.key(n), own.operands(n, not self.defers))
            for n in range(own.num_applied, len(own.pieces))
            if own.changes(own.pieces[n].span)
        )

    def apply(
        self,
        own: ChunkUpdate,
        weights: Tensor | None = None,
        slot: Slot | None = None,
    ) -> Event | None:
        """Apply the recorded step of a chunk, one piece after another.

        Args:
            weights: Those of the span on the device, uint8; by default they come from the
                host with the other operands.
            slot: The slot in use where they are.

        Returns:
            The event after everything is back in host memory; None if nothing changes.
        """
        event, compute = None, self._device.compute
        if own.changes() and own.written_back is not None and not self.on_host:
            # the last copy to the host may still read what is written now
            compute.wait(own.written_back)
        while own.num_applied < len(own.pieces):
            piece = own.pieces[own.num_applied]
            changes = own.changes(piece.span)
            if changes and self.on_host:
                self._apply_in_place(own, piece, changes)
            elif changes:
                event = self._apply_piece(own, piece, changes, weights, slot)
            own.num_applied += 1
        recorded, own.recorded, own.num_applied = own.recorded, None, 0
        if recorded is None or recorded.method != "step":
            return event
        # in place gradients are scaled where they are read: nothing is left to be clipped
        if event is not None:
            own.scaled = recorded
        elif self.on_host:
            own.scaled = None
        return event

    def _apply_piece(
        self,
        own: ChunkUpdate,
        piece: Piece,
        changes: list[int],
        weights: Tensor | None,
        slot: Slot | None,
    ) -> Event:
        """Apply a step to a piece on the device; see Note [An update that fails]."""
        device, staging, host = self._device, self._staging, own.host
        number, where = own.num_applied, host.weights.where(piece)
        key, inside = own.key(number), own.block >= 0
        parts = staging.take(key, own.operands(number, weights is None), inside)
        gradients, *rest = parts
        has_masters = any(index in host.masters.tensors for index in piece.span)
        masters = rest.pop(0) if has_masters else None
        here = rest.pop(0) if weights is None else weights[where]
        state = own.states[number]
        before = state.region
        try:
            with _updating(device.torch_device):
                states = state.on_device(rest, piece)
                _replay(own, piece, changes, (here, gradients, masters), states)
                copies = state.take_back(states, rest, piece)
        except BaseException:
            # see Note [An update that fails]; raised again as it is
            device.writes(parts, device.compute)
            staging.give_back(key)
            raise
        device.writes(parts, device.compute)
        if slot is not None:
            slot.changed(here)
        elif weights is not None:
            device.writes([here], device.compute)
        copies.append((host.weights.memory[where], here))
        if masters is not None:
            copies.append((host.masters.memory[host.masters.where(piece)], masters))
        if rest and state.region is not before:
            # operands of further pieces that came ahead are laid out as they were
            for later in range(number + 1, len(own.pieces)):
                staging.give_back(own.key(later))
        event = self._write_back(own, key, copies)
        if slot is not None:
            slot.write_back_ends(event)
        return event

    def _write_back(
        self, own: ChunkUpdate, key: Hashable, copies: list[tuple[Tensor, Tensor]]
    ) -> Event:
        """Queue the D2H copies of all that the update of a piece has left on the device."""
        offload = self._device.offload
        try:
            offload.wait(self._device.compute.record())
            for target, source in copies:
                offload.copy(target, source)
            own.written_back = own.main_grads.sent = event = offload.record()
        except BaseException as error:
            # whatever it is, an exit too: the step can neither be made again nor undone
            own.recorded, own.num_applied = None, 0
            self._staging.give_back(key)
            if not isinstance(error, RuntimeError):
                raise
            # or a shortage of memory would have the step repeated
            name = own.host.chunk.tensors[0].name
            raise ProTrainError(
                f"{name}: its update could not be copied to the host ({error}), where "
                "some of it is old now. Resume from the last checkpoint."
            ) from error
        self._staging.counters.offloaded_bytes += sum(t.nbytes for t, _ in copies)
        self._staging.give_back(key, [event])
        # what an update has made stays until it has been copied
        self._leaving.append((event, copies))
        self._retire(IN_FLIGHT)
        return event

    def _apply_in_place(
        self, own: ChunkUpdate, piece: Piece, changes: list[int]
    ) -> None:
        """Apply a step to a piece where its operands lie, on the calling thread."""
        host, state = own.host, own.states[own.num_applied]
        every = host.weights, own.main_grads, host.masters
        weights, gradients, masters = (t.memory[t.where(piece)] for t in every)
        parts = state.sources(piece)
        self._device.writes((weights, gradients, masters, *parts))
        with _updating(weights.device):
            states = state.on_device(parts, piece)
            _replay(own, piece, changes, (weights, gradients, masters), states)
            for target, source in state.take_back(states, parts, piece):
                if target.data_ptr() != source.data_ptr():
                    target.copy_(source)

    def settle(self) -> None:
        """Return once everything that updates have changed is in host memory."""
        self._retire(0)
        self._staging.retire()

    def _retire(self, most: int) -> None:
        """Let go of what has arrived on the host; wait until `most` are under way."""
        leaving = self._leaving
        while leaving and (len(leaving) > most or leaving[0][0].query()):
            event, _copies = leaving.popleft()
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
                norm = own.main_grads.norms[index]
            elif own is None and param.grad is not None:
                norm = torch.nn.utils.get_total_norm([param.grad])
                here.append(param)
            else:
                if own is not None:
                    own.host.grads.require_unspent(index)
                continue
            # grouped by the gradients' dtype: the norm of a complex one is real
            norms.append(norm.to(param.dtype) if param.is_complex() else norm)
        # that of a number is the number: its order of dtypes is torch's affair
        total_norm = torch.nn.utils.get_total_norm(norms)
        if max_norm != float("inf"):
            torch.nn.utils.clip_grads_with_norm_(here, max_norm, total_norm)
            self.clip = (max_norm, total_norm)
        return total_norm

    def scale(self) -> None:
        """Scale gradients in host memory that the next step was to scale."""
        if self.clip is not None:
            for own in self.all:
                _clip(own, own.main_grads.present, self.clip)
            self.clip = None

    def scale_used(self) -> None:
        """Scale gradients that the last step has used, while they are still there."""
        for own in self.all:
            if own.scaled is not None:
                used = set(own.used) - own.main_grads.present
                _clip(own, used, own.scaled.clip, own.scaled.divisor)
                own.scaled = None

    def forget_gradients(self) -> None:
        """Forget the gradients since the last step."""
        self.clip = None
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
                    gradient = grads.tensors[index].to(self._device.torch_device)
                    grads.take_norms({index: gradient})
        if self._ranks.world.local_size == 1 or not known:
            return
        of_others = torch.zeros(len(known), dtype=torch.float64, device="cpu")
        for number, (grads, index) in enumerate(known):
            if index in grads.norms:
                of_others[number] = grads.norms[index]
        totals = self._ranks.node_sum(of_others)
        for norm, (grads, index) in zip(totals, known, strict=True):
            if index not in grads.norms:
                grads.take_norms({index: grads.tensors[index].new_empty(0)})
                dtype = grads.norms[index].dtype
                grads.norms[index] = norm.to(self._device.torch_device, dtype)

    def host_bytes(self) -> int:
        """Host bytes of gradients, masters and optimizer state."""
        return sum(own.host_bytes() for own in self.all)


def _replay(
    own: ChunkUpdate,
    piece: Piece,
    changes: list[int],
    operands: tuple[Tensor, Tensor, Tensor | None],
    states: dict[nn.Parameter, Any],
) -> None:
    """Make the recorded step on a piece's weights, gradients and masters, uint8 each."""
    weights, gradients, masters = operands
    host, recorded = own.host, own.recorded
    assert recorded is not None
    used: dict[nn.Parameter, nn.Parameter] = {}
    here, rounded = host.weights.in_piece(weights, piece, changes), dict[int, Tensor]()
    if masters is not None:
        with_master = [index for index in changes if index in host.masters.tensors]
        rounded = host.masters.in_piece(masters, piece, with_master)
    steps = recorded.method == "step"
    due = own.main_grads.in_piece(gradients, piece, changes if steps else ())
    try:
        for index in changes:
            param = own.params[index]
            used[param] = main = own.master_params[param]
            main.data = rounded.get(index, here[index])
            if steps:
                main.grad = due[index].to(main.dtype)
        recorded.replay(own.plain, used, states)
        for index, master in rounded.items():
            here[index].copy_(master)
    finally:
        for main in used.values():
            main.grad = None
            main.data = main.new_empty(0)


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


def _clip(
    own: ChunkUpdate,
    indices: Iterable[int],
    clip: Clip | None,
    divisor: Tensor | None = None,
) -> None:
    grads, holders = own.main_grads, []
    for index in indices:
        grads.norms.pop(index, None)
        if index not in own.params:
            continue
        holder = grads.tensors[index].detach()
        holder.grad = grads.tensors[index]
        holders.append(holder)
    if clip is not None:
        torch.nn.utils.clip_grads_with_norm_(holders, *clip)
    if divisor is not None:
        for holder in holders:
            # of the same memory
            holder.div_(divisor)


def _scales(clip: Clip | None) -> bool:
    """Return whether `clip_grads_with_norm_` changes anything, as it computes it."""
    one = torch.ones(1, dtype=torch.float64, device="cpu")
    one.grad = torch.ones_like(one)
    if clip is not None:
        torch.nn.utils.clip_grads_with_norm_(one, *clip)
    return bool(one.grad != 1)
