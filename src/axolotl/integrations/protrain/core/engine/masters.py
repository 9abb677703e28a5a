"""fp32 masters of 16-bit weights, as what the weights lack of them.

# Note [What a weight lacks]

A bf16 weight is the upper half of its master, rounded: by one more than that half, where
rounding has gone up. So the lower half and one bit for whether it has give the master
back, every bit of it, infinities and minus zero too (of a NaN, that it is one). That is
2.125 bytes instead of 4, all zero for a master that is its weight. An fp16 weight has other
exponents: there the whole master is kept. Both are made in pieces: what they take on the
way does not grow with the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..layout import rest_chunk
from ..types import SPLIT_NUMEL, Chunk
from .host_tensors import HostMemory, HostTensors


class Masters(HostTensors):
    """What the fp32 masters of a chunk have beyond its weights; see `rest_chunk`. Without
    masters, which `memory` knows, it is empty.

    Args:
        memory: Has it, page-locked.
        weights: Of the chunk.
        span: Parameters that this rank updates.
    """

    def __init__(
        self, chunk: Chunk, memory: HostMemory, weights: HostTensors, span: range
    ) -> None:
        super().__init__(rest_chunk(chunk, memory.masters), memory.rests, span)
        self.chunk, self._weights, self._device = chunk, weights, memory.device

    def __contains__(self, index: int) -> bool:
        return index in self._tensors

    def any(self, index: int) -> bool:
        """Whether a master is not its weight."""
        return bool(self[index].any())

    def join(self, index: int) -> Tensor:
        """A master, in memory of its own."""
        self._device.reads((self._weights[index], self[index]))
        return join(self._weights[index], self[index])

    def load(self, index: int, master: Tensor) -> None:
        """Overwrite a master, and with it the weight."""
        self._device.writes((self._weights[index], self[index]))
        split(master.contiguous(), self._weights[index], self[index])

    def renew(self, written: Mapping[str, Tensor] | None = None) -> None:
        """Weights were written from outside and are their masters now: all, or of those
        named where they say, bool."""
        for index, spec in enumerate(self.chunk.tensors):
            if index in self and (written is None or spec.name in written):
                self._device.writes((self[index],))
                where = None if written is None else written[spec.name]
                renew(self._weights[index], self[index], where)


def split(master: Tensor, weight: Tensor, rest: Tensor) -> None:
    """Round an fp32 master into a 16-bit weight, and what is lost into `rest`, uint8."""
    weight.copy_(master)
    if weight.dtype is not torch.bfloat16:
        rest.view(torch.float32).copy_(master.view(-1))
        return
    for upper, lower, bits, ups in _pieces(master, weight, rest):
        lower.copy_(upper[:, 0])
        _pack(bits - upper[:, 1], ups)


def join(weight: Tensor, rest: Tensor) -> Tensor:
    """The fp32 master of a 16-bit weight."""
    if weight.dtype is not torch.bfloat16:
        return rest.view(torch.float32).view(weight.shape).clone()
    master = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    for halves, lower, bits, ups in _pieces(master, weight, rest):
        halves[:, 0].copy_(lower)
        torch.sub(bits, _unpack(ups)[: len(bits)], out=halves[:, 1])
    return master


def renew(weight: Tensor, rest: Tensor, where: Tensor | None = None) -> None:
    """Let a weight be its master from here on; with `where`, bool, only there."""
    if weight.dtype is not torch.bfloat16:
        master, known = rest.view(torch.float32).view(weight.shape), weight.float()
        master.copy_(known if where is None else torch.where(where, known, master))
    elif where is None:
        rest.zero_()
    else:
        numel, flat = weight.numel(), where.view(-1)
        rest[: 2 * numel].view(torch.int16).masked_fill_(flat, 0)
        ups = rest[2 * numel :]
        _pack(_unpack(ups)[:numel].masked_fill_(flat, 0), ups)


def _pieces(
    master: Tensor, weight: Tensor, rest: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Halves of masters, lower first, lower halves, bits of weights, packed bits."""
    numel = weight.numel()
    halves = master.view(-1).view(torch.int16).view(-1, 2)
    lower, ups = rest[: 2 * numel].view(torch.int16), rest[2 * numel :]
    bits = weight.view(-1).view(torch.int16)
    for start in range(0, numel, SPLIT_NUMEL):
        own = slice(start, start + SPLIT_NUMEL)
        yield halves[own], lower[own], bits[own], ups[start // 8 : own.stop // 8]


def _pack(ups: Tensor, packed: Tensor) -> None:
    ones = pad(ups.to(torch.uint8).bitwise_and_(1), (0, -len(ups) % 8)).view(-1, 8)
    ones.bitwise_left_shift_(_places(packed))
    torch.sum(ones, 1, dtype=torch.uint8, out=packed)


def _unpack(packed: Tensor) -> Tensor:
    return (packed[:, None] >> _places(packed)).bitwise_and_(1).view(-1)


def _places(packed: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=packed.device)
