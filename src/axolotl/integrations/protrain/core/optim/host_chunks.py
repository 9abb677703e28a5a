"""The host side of trainable chunks: weights, gradients, and what the optimizer sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layout import Piece, Reduction, aligned, leaf_chunk, reductions
from ..layout.shards import PAGE_BYTES
from ..runtime import Arena, Device, Ranks
from ..types import Chunk

MASTER_KEY = "master"
"""Key of the fp32 master weight beside exp_avg and exp_avg_sq."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Keys of AdamW's moments in its state."""


class _Leaves:
    """What the optimizer updates of a chunk, beside the weights that fetches read."""

    _device: Device
    weights: list[Tensor]
    leaves: list[Tensor]

    @property
    def gradients(self) -> list[Tensor]:
        """Those of the leaves that have one since the last clear."""
        return [leaf.grad for leaf in self.leaves if leaf.grad is not None]

    def changes(self) -> None:
        """Weights, leaves and gradients are about to be written by this thread."""
        self._device.writes((*self.weights, *self.leaves, *self.gradients))

    def reload(self) -> None:
        """The weights were loaded from outside: renew the masters."""
        self.changes()
        for leaf, weight in self._mastered():
            leaf.copy_(weight)

    def _round(self) -> None:
        for leaf, weight in self._mastered():
            weight.copy_(leaf)

    def _mastered(self) -> list[tuple[Tensor, Tensor]]:
        pairs = zip(self.leaves, self.weights, strict=True)
        return [(leaf, weight) for leaf, weight in pairs if leaf is not weight]

    def _load_master(self, leaf: Tensor, state: dict[str, Any]) -> None:
        master = state.pop(MASTER_KEY, None)
        if master is not None:
            self._device.writes((leaf,))
            leaf.copy_(master)

    def _bytes(self, gradients: Iterable[Tensor]) -> int:
        masters = (leaf for leaf, _ in self._mastered())
        return sum(tensor.nbytes for tensor in (*masters, *gradients))


class HostChunk(_Leaves):
    """Private host tensors of one trainable chunk.

    Args:
        chunk: The chunk.
        params: The model's parameters by name.
        arena: Holds the chunk's weights.
        gradients: Holds buffers for its gradients, unless it has masters: those add
            up in fp32, in memory of their own.
        fp32_master: Update 16-bit weights through fp32 masters.
        device: Is told what is read and written.

    The optimizer never reaches a weight through `param.data`, which a fetch may be
    filling; it owns views of the arena.

    Attributes:
        chunk: What it is the host side of.
        params: The model's parameters.
        owned: Indices of the tensors that have a leaf here; all of them.
        weights: Arena views that fetches read, in the dtype of the model, one for each
            leaf.
        leaves: What the optimizer updates: `weights`, or fp32 masters of them. A
            leaf's `.grad` is None until a gradient has arrived since the last clear.
    """

    def __init__(
        self,
        chunk: Chunk,
        params: Mapping[str, nn.Parameter],
        arena: Arena,
        gradients: Arena,
        fp32_master: bool,
        device: Device,
    ) -> None:
        self._device = device
        buffered = chunk.index in gradients
        self.chunk = chunk
        self.params = [params[spec.name] for spec in chunk.tensors]
        self.owned = list(range(len(self.params)))
        self.weights = [arena.tensor(chunk.index, spec) for spec in chunk.tensors]
        self.leaves = [
            weight.to(torch.float32) if fp32_master and spec.is_16_bit else weight
            for weight, spec in zip(self.weights, chunk.tensors, strict=True)
        ]
        self._grads = [
            gradients.tensor(chunk.index, spec)
            if buffered
            else torch.empty(spec.shape, dtype=leaf.dtype)
            for leaf, spec in zip(self.leaves, chunk.tensors, strict=True)
        ]

    @property
    def has_gradients(self) -> bool:
        """Whether an update would change anything."""
        return any(leaf.grad is not None for leaf in self.leaves)

    def accumulate(self, index: int, gradient: Tensor) -> None:
        """Add a host gradient to that of leaf `index`."""
        self._device.reads((gradient,))
        self._device.writes((self._grads[index],))
        leaf = self.leaves[index]
        if leaf.grad is None:
            leaf.grad = self._grads[index].copy_(gradient)
        else:
            leaf.grad.add_(gradient)

    def first_buffer(self, index: int) -> Tensor | None:
        """Where a first gradient may be copied as it is; None if it must be added."""
        buffer = self._grads[index]
        if (
            self.leaves[index].grad is None
            and buffer.dtype == self.weights[index].dtype
        ):
            return buffer
        return None

    def arrived(self, index: int) -> None:
        """The copy into `first_buffer` has been queued."""
        self.leaves[index].grad = self._grads[index]

    def clear(self) -> None:
        """Forget the gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def publish(self) -> Any:
        """Round the masters into the weights that the next fetch reads.

        Returns:
            What is done once other ranks have published theirs; None without any.
        """
        self._round()

    def has_master(self, index: int) -> bool:
        """Whether a parameter is updated through an fp32 master."""
        return self.leaves[index] is not self.weights[index]

    def first_state(self, number: int) -> dict[str, Any] | None:
        """AdamW's state of a leaf before any update; None where AdamW makes it."""

    def whole_state(
        self, index: int, states: Mapping[int, dict[str, Any]]
    ) -> dict[str, Any] | None:
        """State of a whole parameter; None before its first update.

        Args:
            index: Of the parameter.
            states: That of each leaf, by `id(leaf)`.
        """
        state = states.get(id(self.leaves[index]))
        if state is not None and self.leaves[index] is not self.weights[index]:
            return {**state, MASTER_KEY: self.leaves[index]}
        return state

    def load_state(
        self, index: int, state: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Any]] | None:
        """Take over the state of a whole parameter.

        Returns:
            The leaf and what AdamW needs for it; None if no leaf is here.
        """
        own, leaf = dict(state), self.leaves[index]
        self._load_master(leaf, own)
        return leaf, own

    def host_bytes(self) -> int:
        """Bytes of masters and gradients; weights are the arena's, moments Adam's."""
        return self._bytes(self._grads)


class SharedMemory(NamedTuple):
    """Host memory that the ranks of a node share.

    Attributes:
        weights: The arena.
        masters: fp32 masters of the chunks that have any.
        moments: AdamW's two, in the dtype of the leaves.
        gradients: Each rank's parts of the reductions; see `parts_chunk`.
    """

    weights: Arena
    masters: Arena
    moments: tuple[Arena, Arena]
    gradients: Arena


class ShardedChunk(_Leaves):
    """The host side of a trainable chunk of which each rank updates a shard.

    Its face is that of `HostChunk`, but a leaf is a piece of a parameter, flat, and
    there is none for parameters that lie in other shards.

    Args:
        chunk: The chunk.
        params: The model's parameters by name.
        memory: Where weights, masters, moments and gradients are.
        ranks: Those of the node share it.
        fp32_master: Update 16-bit weights through fp32 masters.
        device: Is told what is read and written.

    Attributes:
        reductions: How its gradients come together.
        parts: For each of them what this rank receives, on the host.
    """

    def __init__(
        self,
        chunk: Chunk,
        params: Mapping[str, nn.Parameter],
        memory: SharedMemory,
        ranks: Ranks,
        fp32_master: bool,
        device: Device,
    ) -> None:
        self._device = device
        self._ranks = ranks
        self.chunk = chunk
        self.params = [params[spec.name] for spec in chunk.tensors]
        size = ranks.world.local_size
        self.reductions = reductions(chunk, size, fp32_master)
        received = parts_chunk(chunk, size, fp32_master)
        self._every_part = [
            _parts(self.reductions, memory.gradients.shard(received, size, rank))
            for rank in range(size)
        ]
        self.parts = self._every_part[ranks.local_rank]
        own_leaves = leaf_chunk(chunk, fp32_master).tensors
        whole_weights = [memory.weights.tensor(chunk.index, s) for s in chunk.tensors]
        self._whole_leaves = [
            memory.masters.tensor(chunk.index, leaf)
            if leaf.dtype is not spec.dtype
            else weight
            for spec, leaf, weight in zip(
                chunk.tensors, own_leaves, whole_weights, strict=True
            )
        ]
        self._whole_moments = [
            {
                key: arena.tensor(chunk.index, leaf)
                for key, arena in zip(MOMENTS, memory.moments, strict=True)
            }
            for leaf in own_leaves
        ]
        self._masters = [
            leaf is not weight
            for leaf, weight in zip(self._whole_leaves, whole_weights, strict=True)
        ]
        self._pieces: list[Piece] = []
        self._grads: list[Tensor] = []
        for reduction, part in zip(self.reductions, self.parts, strict=True):
            for piece in reduction.pieces[ranks.local_rank]:
                start = piece.position - ranks.local_rank * reduction.part_numel
                self._pieces.append(piece)
                self._grads.append(part[start : start + piece.numel])
        self.weights = [_cut(whole_weights[p.tensor], p) for p in self._pieces]
        self.leaves = [
            _cut(self._whole_leaves[piece.tensor], piece)
            if self._masters[piece.tensor]
            else weight
            for piece, weight in zip(self._pieces, self.weights, strict=True)
        ]
        self.owned = [piece.tensor for piece in self._pieces]
        self._used: frozenset[int] = frozenset()
        self._num_updates = [0] * len(self.params)
        for leaf, weight in self._mastered():
            leaf.copy_(weight)

    @property
    def has_gradients(self) -> bool:
        """Whether an update would change anything, on whatever rank."""
        return bool(self._used)

    def is_used(self, index: int) -> bool:
        """Whether any rank has a gradient of a parameter."""
        return index in self._used

    def gradient_dtype(self, index: int) -> torch.dtype:
        """In which a parameter's gradients are summed."""
        return self._whole_leaves[index].dtype

    def norms(self) -> Tensor:
        """Norms of the gradients that fall to this rank, fp64; 0 for all others.

        Of whole gradients, as without paging: in pieces the last bits would differ.
        """
        found = torch.zeros(len(self.params), dtype=torch.float64)
        mine = range(self._ranks.local_rank, len(found), self._ranks.world.local_size)
        for index in self._used.intersection(mine):
            found[index] = torch.linalg.vector_norm(self._whole_gradient(index))
        return found

    def _whole_gradient(self, index: int) -> Tensor:
        pieces = [
            parts[number][start : start + piece.numel]
            for rank, parts in enumerate(self._every_part)
            for number, reduction in enumerate(self.reductions)
            for piece in reduction.pieces[rank]
            if piece.tensor == index
            for start in [piece.position - rank * reduction.part_numel]
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def arrived(self, used: Iterable[int]) -> None:
        """The averages are in `parts`; `used` are the parameters that have any."""
        self._used = frozenset(used)
        for index, leaf, gradient in zip(
            self.owned, self.leaves, self._grads, strict=True
        ):
            leaf.grad = gradient if index in self._used else None

    def clear(self) -> None:
        """Forget the gradients."""
        self._used = frozenset()
        for leaf in self.leaves:
            leaf.grad = None

    def publish(self) -> Any:
        """Round the masters into the weights; see `HostChunk.publish`."""
        self._round()
        for index in self._used:
            self._num_updates[index] += 1
        return self._ranks.updated()

    def has_master(self, index: int) -> bool:
        """Whether a parameter is updated through an fp32 master."""
        return self._masters[index]

    def first_state(self, number: int) -> dict[str, Any] | None:
        """See `HostChunk.first_state`: here moments are in shared memory."""
        piece = self._pieces[number]
        moments = self._whole_moments[piece.tensor]
        return {key: _cut(moments[key], piece) for key in MOMENTS}

    def whole_state(
        self, index: int, _states: Mapping[int, dict[str, Any]]
    ) -> dict[str, Any] | None:
        """See `HostChunk.whole_state`; no rank is asked, none may be updating."""
        if not self._num_updates[index]:
            return None
        step = torch.tensor(float(self._num_updates[index]))
        state = {"step": step, **self._whole_moments[index]}
        if self._masters[index]:
            state[MASTER_KEY] = self._whole_leaves[index]
        return state

    def load_state(
        self, index: int, state: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Any]] | None:
        """See `HostChunk.load_state`: of the whole, this rank's piece."""
        self._num_updates[index] = int(state["step"])
        if index not in self.owned:
            return None
        number = self.owned.index(index)
        own = dict(state)
        for key in own.keys() & {*MOMENTS, MASTER_KEY}:
            own[key] = _cut(own[key], self._pieces[number])
        self._load_master(self.leaves[number], own)
        return self.leaves[number], own

    def host_bytes(self) -> int:
        """Bytes of this rank's masters and gradients."""
        return self._bytes(self.parts)


def parts_chunk(chunk: Chunk, ranks: int, fp32_master: bool) -> Chunk:
    """What the ranks of a node receive of a chunk's gradients, a shard for each."""
    received = reductions(chunk, ranks, fp32_master)
    own_bytes = sum(aligned(reduction.part_bytes) for reduction in received)
    return replace(chunk, tensors=(), nbytes=ranks * aligned(own_bytes, PAGE_BYTES))


def _parts(layout: Sequence[Reduction], buffer: Tensor) -> list[Tensor]:
    parts, start = [], 0
    for reduction in layout:
        part = buffer[start : start + reduction.part_bytes]
        parts.append(part.view(reduction.dtype))
        start += aligned(reduction.part_bytes)
    return parts


def _cut(whole: Tensor, piece: Piece) -> Tensor:
    return whole.view(-1)[piece.start : piece.stop]


def leaves_by_param(chunks: Sequence[HostChunk | ShardedChunk]) -> dict[int, Tensor]:
    """Map `id(parameter)` to the tensor that the optimizer updates in its place."""
    return {
        id(host.params[index]): leaf
        for host in chunks
        for index, leaf in zip(host.owned, host.leaves, strict=True)
    }
