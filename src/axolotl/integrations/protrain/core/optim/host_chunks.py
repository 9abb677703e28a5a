"""The host side of trainable chunks: weights, gradients, and what the optimizer sees.

# Note [Main parameters]

The host optimizer never reaches a weight through `param.data`, which a fetch may be
filling. It owns main parameters: views of the arena, or fp32 masters of them. A rank alone
has one for each parameter, as large as that. Where a node's ranks share the memory, each
updates the elements in its own shard of the chunk's bytes, so a main parameter is a piece
of a parameter, flat unless whole, and there is none for parameters in other shards.
Moments then lie in shared memory, too: any rank can write the state of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..layout import Piece, Reduction, aligned, main_chunk, reductions, rest_chunk
from ..layout.shards import PAGE_BYTES
from ..runtime import Alone, Arena, Device, Ranks
from ..runtime.device import Event
from ..types import Chunk, TensorSpec
from .masters import join, renew, split

MASTER_KEY = "master"
"""Key of the fp32 master weight beside exp_avg and exp_avg_sq."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Keys of AdamW's moments in its state."""


class HostMemory:
    """What trainable chunks take on the host beside their weights, which the arena has.

    The `ranks` of a node share it; None for a rank alone. With `splits` masters are what
    weights lack of them (masters.py), for updates on the device, and gradients add up in
    fp32 only if the run accumulates.
    """

    def __init__(
        self,
        weights: Arena,
        device: Device,
        fp32_master: bool = False,
        ranks: Ranks | None = None,
        splits: bool = False,
        accumulates: bool = True,
    ) -> None:
        self.weights, self.device = weights, device
        self.fp32_master, self.splits = fp32_master and not splits, splits
        self.has_rests = fp32_master and splits
        self._sums_fp32 = fp32_master and (accumulates or not splits)
        self.ranks = ranks or Alone()
        self.reduces = self.ranks.world.size > 1
        """Whether gradients come in parts of a reduction."""
        self.masters, self.gradients = Arena(ranks=ranks), Arena(ranks=ranks)
        self.rests = Arena()
        self.moments = {key: Arena(ranks=ranks) for key in MOMENTS}

    def add(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Take memory for further chunks; returns what this rank has to page-lock.

        Gradients of chunks with masters arrive in staging buffers and add up in fp32,
        in memory that no copy reaches.
        """
        mains = {c.index: main_chunk(c, self.fp32_master) for c in chunks}
        mastered = [c.index for c in chunks if c.has_masters(self.fp32_master)]
        self.masters.add([mains[index] for index in mastered])
        if self.splits:
            rests = [rest_chunk(c) for c in chunks if c.has_masters(self.has_rests)]
            summed = [self.summed(chunk) for chunk in chunks]
            regions = self.rests.add(rests), self.gradients.add(summed)
            return [region for region in regions if region is not None]
        if not self.reduces:
            self.gradients.add([mains[index] for index in mastered])
            copied = [own for index, own in mains.items() if index not in mastered]
            region = self.gradients.add(copied)
            return [] if region is None else [region]
        for moment in self.moments.values():
            moment.add([*mains.values()])
        size, rank = self.ranks.world.local_size, self.ranks.local_rank
        received = [parts_chunk(chunk, size, self.fp32_master) for chunk in chunks]
        self.gradients.add(received)
        return [self.gradients.shard(parts, size, rank) for parts in received]

    def summed(self, chunk: Chunk) -> Chunk:
        """A chunk in the dtypes of the sums of its gradients on a rank alone."""
        return main_chunk(chunk, self._sums_fp32)


class GradientSums:
    """Gradients of a whole chunk that add up on the host of one rank.

    Args:
        chunk: Whose gradients they are.
        summed: The same in the dtypes of the sums.
        memory: uint8, all sums as `summed` lays them out.
        buffers: The same, for each parameter with a storage of its own.

    Attributes:
        present: Indices of parameters that have a sum.
        arrived: What autograd has produced but nobody has sent, by index.
        norms: Of sums, on the device, as far as they are known.
        sent: After the last copy into `memory`.
        has_masters: Norms of 16-bit ones are taken in fp32, as they are used.
    """

    has_masters = False

    def __init__(
        self,
        chunk: Chunk,
        summed: Chunk,
        memory: Tensor,
        buffers: Sequence[Tensor],
        device: Device,
    ) -> None:
        self.chunk, self._summed, self.memory = chunk, summed, memory
        self.present: set[int] = set()
        self.arrived: dict[int, Tensor] = {}
        self.norms: dict[int, Tensor] = {}
        self.sent: Event | None = None
        self._device, self._buffers = device, buffers

    def first_buffer(self, index: int, dtype: torch.dtype) -> Tensor | None:
        """Where a first gradient may be copied as it is; None if it must be added."""
        same = self._buffers[index].dtype is dtype
        return self._buffers[index] if same and index not in self.present else None

    def within(self, buffer: Tensor, index: int) -> Tensor:
        """The sum of a parameter in a copy of the memory."""
        return tensor_in(buffer, self._summed.tensors[index])

    def norm(self, gradient: Tensor) -> Tensor:
        """That of one of them, by the kernel that the plain run takes."""
        if self.has_masters and gradient.dtype is not torch.float32:
            return torch.linalg.vector_norm(gradient, dtype=torch.float32)
        return torch.nn.utils.get_total_norm([gradient])

    def total(self, index: int) -> Tensor:
        """The sum of a parameter."""
        return self._buffers[index]

    def replace(self, index: int, gradient: Tensor) -> None:
        """Overwrite the sum of a parameter."""
        self._buffers[index].copy_(gradient)
        self.norms.pop(index, None)

    def add(self, index: int, gradient: Tensor) -> None:
        """Add a host gradient to that of a parameter."""
        total = self._buffers[index]
        self._device.reads((gradient,))
        self._device.writes((total,))
        self.norms.pop(index, None)
        if index in self.present:
            total.add_(gradient)
        else:
            total.copy_(gradient)
            self.present.add(index)


class Masters:
    """What the fp32 masters of a chunk have beyond its weights; see masters.py.

    Args:
        memory: uint8, page-locked, laid out as `rest_chunk` says.
        weights: Of the whole chunk, on the host.
    """

    def __init__(
        self, chunk: Chunk, memory: Tensor, weights: Sequence[Tensor], device: Device
    ) -> None:
        self.chunk, self.memory = chunk, memory
        self._specs = rest_chunk(chunk).tensors
        self._weights, self._device = weights, device

    def __contains__(self, index: int) -> bool:
        return self.chunk.tensors[index].is_16_bit

    def within(self, buffer: Tensor, index: int) -> Tensor:
        """That of a parameter in a copy of the memory."""
        return tensor_in(buffer, self._specs[index])

    def any(self, index: int) -> bool:
        """Whether a master is not its weight."""
        return bool(self.within(self.memory, index).any())

    def join(self, index: int) -> Tensor:
        """A master, in memory of its own."""
        self._device.reads((self._weights[index], self.memory))
        return join(self._weights[index], self.within(self.memory, index))

    def load(self, index: int, master: Tensor) -> None:
        """Overwrite a master, and with it the weight."""
        self._device.writes((self._weights[index], self.memory))
        split(
            master.contiguous(), self._weights[index], self.within(self.memory, index)
        )

    def renew(self, written: Mapping[str, Tensor] | None = None) -> None:
        """Weights are their masters now: all, or of those named where they say, bool."""
        self._device.writes((self.memory,))
        for index, spec in enumerate(self.chunk.tensors):
            if spec.is_16_bit and (written is None or spec.name in written):
                where = None if written is None else written[spec.name]
                renew(self._weights[index], self.within(self.memory, index), where)


class HostChunk:
    """Host tensors of one trainable chunk; see Note [Main parameters].

    Args:
        params: The model's parameters by name; as an attribute those of the chunk.
        memory: Where everything lies; `HostMemory.add` has been called with the chunk.

    Attributes:
        owned: Index of the parameter that each main parameter is of.
        weights: Arena views that fetches read, in the dtype of the model, one for each
            main parameter.
        mains: What the optimizer updates: `weights`, or fp32 masters of them.
        used: Parameters that have a gradient since the last `clear`, on any rank.
        sums: Where gradients of this rank add up; alone, the update reads them there,
            with others there are none before micro-batches that do not synchronise.
        reductions: How gradients of several ranks come together.
        parts: For each of them what this rank receives, on the host.
        masters: What masters have beyond `weights`, where the device updates them.
    """

    sums: GradientSums | None = None
    masters: Masters | None = None

    def __init__(
        self, chunk: Chunk, params: Mapping[str, nn.Parameter], memory: HostMemory
    ) -> None:
        self._device, self._ranks = memory.device, memory.ranks
        self.chunk = chunk
        self.params = [params[spec.name] for spec in chunk.tensors]
        specs = main_chunk(chunk, memory.fp32_master).tensors
        weights = [memory.weights.tensor(chunk.index, spec) for spec in chunk.tensors]
        self._has_master = [
            own.dtype is not weight.dtype
            for own, weight in zip(specs, weights, strict=True)
        ]
        self._whole = [
            memory.masters.tensor(chunk.index, own) if mastered else weight
            for own, weight, mastered in zip(
                specs, weights, self._has_master, strict=True
            )
        ]
        self._moments: list[dict[str, Tensor]] = []
        self.used: set[int] = set()
        self.parts: list[Tensor] = []
        self.reductions: tuple[Reduction, ...] = ()
        if memory.reduces:
            self._moments = [
                {k: m.tensor(chunk.index, own) for k, m in memory.moments.items()}
                for own in specs
            ]
            self._take_parts(memory)
        else:
            summed = memory.summed(chunk)
            sums = [memory.gradients.tensor(chunk.index, s) for s in summed.tensors]
            self._pieces = [Piece(n, 0, own.numel, 0) for n, own in enumerate(specs)]
            self._gradients = sums
            self._all = list(zip(self._pieces, sums, strict=True))
            region = memory.gradients.chunk(chunk.index)
            self.sums = GradientSums(chunk, summed, region, sums, self._device)
            self.sums.has_masters = memory.has_rests
            self.used = self.sums.present
        if chunk.has_masters(memory.has_rests):
            rests = memory.rests.chunk(chunk.index)
            self.masters = Masters(chunk, rests, weights, self._device)
        self.owned = [piece.tensor for piece in self._pieces]
        self.weights = [_cut(weights[piece.tensor], piece) for piece in self._pieces]
        self.mains = [
            _cut(self._whole[piece.tensor], piece)
            if self._has_master[piece.tensor]
            else weight
            for piece, weight in zip(self._pieces, self.weights, strict=True)
        ]
        # masters and the weights they are of
        self._mastered = [
            (main, weight)
            for main, weight in zip(self.mains, self.weights, strict=True)
            if main is not weight
        ]
        self._num_updates = [0] * len(self.params)
        for main, weight in self._mastered:
            main.copy_(weight)

    @property
    def gradients(self) -> list[Tensor]:
        """Those of main parameters that have one since the last `clear`."""
        return [gradient for _, gradient in self._with_gradients()]

    def with_gradients(self) -> list[Tensor]:
        """Main parameters that have a gradient, with it as their `.grad`."""
        found = self._with_gradients()
        for main in self.mains:
            main.grad = None
        for main, gradient in found:
            main.grad = gradient.view_as(main)
        return [main for main, _ in found]

    def whole_gradient(self, index: int) -> Tensor:
        """That of a parameter, in the dtype of the sum; no rank may be writing it."""
        found = [gradient for piece, gradient in self._all if piece.tensor == index]
        return found[0] if len(found) == 1 else torch.cat(found)

    def main_dtype(self, index: int) -> torch.dtype:
        """In which a parameter is updated."""
        mastered = self.masters is not None and index in self.masters
        return torch.float32 if mastered else self._whole[index].dtype

    def gradient_dtype(self, index: int) -> torch.dtype:
        """In which a parameter's gradients are summed."""
        return self._whole[index].dtype

    def changes(self) -> None:
        """Weights, masters and gradients are about to be written by this thread."""
        self._device.writes((*self.weights, *self.mains, *self.gradients))

    @property
    def waiting(self) -> set[int]:
        """Parameters with a gradient that an update will read."""
        if self.used or self.sums is None:
            return self.used
        return self.sums.present

    def total(self, index: int) -> Tensor:
        """A parameter's gradient of all micro-batches so far, in the dtype of the sum; no
        rank may be writing it. One of several ranks gets a copy."""
        sums = self._own_sums(index)
        if sums is not None:
            return sums.total(index)
        return self.whole_gradient(index).clone().view(self.params[index].shape)

    def replace(self, index: int, gradient: Tensor) -> None:
        """Overwrite a parameter's gradient; of several ranks each its pieces."""
        sums = self._own_sums(index)
        if sums is not None:
            sums.replace(index, gradient)
            return
        flat = gradient.reshape(-1)
        for piece, own in zip(self._pieces, self._gradients, strict=True):
            if piece.tensor == index:
                own.view(-1).copy_(flat[piece.start : piece.stop])

    def adopt(self) -> None:
        """Weights may have been written from outside: where one is not its master,
        rounded, any longer, it is the master now."""
        for main, weight in self._mastered:
            written = main.to(weight.dtype) != weight
            if written.any():
                self._device.writes((main,))
                main[written] = weight[written].to(main.dtype)

    def renew(self, written: Mapping[str, Tensor]) -> None:
        """The same of masters that cannot be compared: here bytes have changed, bool."""
        if self.masters is not None:
            self.masters.renew(written)

    def reload(self) -> None:
        """The weights were loaded from outside: renew the masters."""
        # not the gradients, which may still add up
        self._device.writes((*self.weights, *self.mains))
        for main, weight in self._mastered:
            main.copy_(weight)
        if self.masters is not None:
            self.masters.renew()

    def clear(self) -> None:
        """Forget the gradients."""
        self.used.clear()
        for main in self.mains:
            main.grad = None

    def publish(self) -> Any:
        """Round the masters into the weights that the next fetch reads.

        Returns:
            What is done once other ranks have published theirs; None without any.
        """
        for main, weight in self._mastered:
            weight.copy_(main)
        for index in tuple(self.used):
            self._num_updates[index] += 1
        return self._ranks.updated()

    def first_state(self, number: int) -> dict[str, Any] | None:
        """AdamW's state of a main parameter before any update; None where AdamW makes
        it, which it does at the first update."""
        if not self._moments:
            return None
        piece = self._pieces[number]
        moments = self._moments[piece.tensor]
        return {key: _cut(moments[key], piece) for key in MOMENTS}

    def whole_state(
        self, index: int, states: Mapping[int, dict[str, Any]]
    ) -> dict[str, Any] | None:
        """State of a whole parameter; None before its first update.

        No rank is asked, and none may be updating. `states` has that of each main
        parameter, by `id`.
        """
        state = states.get(id(self._whole[index]))
        if self._moments:
            step = self._num_updates[index]
            moments = self._moments[index]
            state = {"step": torch.tensor(float(step)), **moments} if step else None
        if state is not None and self._has_master[index]:
            return {**state, MASTER_KEY: self._whole[index]}
        return state

    def load_state(
        self, index: int, state: Mapping[str, Any]
    ) -> dict[int, dict[str, Any]]:
        """Take over the state of a whole parameter.

        Returns:
            What AdamW needs for its main parameter, by `id`; empty if none is here.
        """
        require_masters(MASTER_KEY in state, self._has_master[index])
        self._num_updates[index] = int(state["step"])
        if index not in self.owned:
            return {}
        number = self.owned.index(index)
        own, main = dict(state), self.mains[number]
        for key in own.keys() & {*MOMENTS, MASTER_KEY}:
            own[key] = _cut(own[key], self._pieces[number])
        master = own.pop(MASTER_KEY, None)
        if master is not None:
            self._device.writes((main,))
            main.copy_(master)
        return {id(main): own}

    def host_bytes(self) -> int:
        """Bytes of this rank's masters and gradients; weights are the arena's, moments
        Adam's."""
        masters = [main for main, _ in self._mastered]
        if self.masters is not None:
            masters.append(self.masters.memory)
        held = [*masters, *(self.parts or self._gradients)]
        return sum(tensor.nbytes for tensor in held)

    def _own_sums(self, index: int) -> GradientSums | None:
        """Where this rank has the gradient; None once the ranks have averaged it."""
        alone = not self.parts
        return (
            self.sums if self.sums and (alone or index in self.sums.present) else None
        )

    def _take_parts(self, memory: HostMemory) -> None:
        size = self._ranks.world.local_size
        received = parts_chunk(self.chunk, size, memory.fp32_master)
        self.reductions = reductions(self.chunk, size, memory.fp32_master)
        # of all ranks, in the order of their shards
        self._all = []
        for rank in range(size):
            buffer = memory.gradients.shard(received, size, rank)
            parts, own = _parts(self.reductions, buffer), []
            for reduction, part in zip(self.reductions, parts, strict=True):
                for piece in reduction.pieces[rank]:
                    start = piece.position - rank * reduction.part_numel
                    own.append((piece, part[start : start + piece.numel]))
            self._all += own
            if rank == self._ranks.local_rank:
                self.parts = parts
                self._pieces = [piece for piece, _ in own]
                self._gradients = [gradient for _, gradient in own]

    def _with_gradients(self) -> list[tuple[Tensor, Tensor]]:
        every = zip(self.owned, self.mains, self._gradients, strict=True)
        return [(main, grad) for index, main, grad in every if index in self.used]


def require_masters(saved: bool, has_master: bool) -> None:
    """Refuse a state that was saved with masters for a run without, or the reverse.

    Raises:
        CheckpointError: So it was.
    """
    if saved != has_master:
        raise CheckpointError(
            f"optimizer.pt was written {'with' if saved else 'without'} fp32 master "
            f"weights: resume with protrain_fp32_master: {str(saved).lower()}."
        )


def parts_chunk(chunk: Chunk, ranks: int, fp32_master: bool) -> Chunk:
    """What the ranks of a node receive of a chunk's gradients, a shard for each."""
    received = reductions(chunk, ranks, fp32_master)
    own_bytes = sum(aligned(reduction.part_bytes) for reduction in received)
    return replace(chunk, tensors=(), nbytes=ranks * aligned(own_bytes, PAGE_BYTES))


def tensor_in(buffer: Tensor, spec: TensorSpec) -> Tensor:
    """A tensor of a chunk in its bytes."""
    flat = buffer[spec.offset : spec.offset + spec.nbytes]
    return flat.view(spec.dtype).view(spec.shape)


def _parts(layout: Sequence[Reduction], buffer: Tensor) -> list[Tensor]:
    parts, start = [], 0
    for reduction in layout:
        part = buffer[start : start + reduction.part_bytes]
        parts.append(part.view(reduction.dtype))
        start += aligned(reduction.part_bytes)
    return parts


def _cut(whole: Tensor, piece: Piece) -> Tensor:
    if piece.numel == whole.numel():
        return whole
    return whole.view(-1)[piece.start : piece.stop]
