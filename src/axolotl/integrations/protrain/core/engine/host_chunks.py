"""The host side of trainable chunks: weights, gradients and fp32 master weights.

# Note [Who updates what]

A rank alone updates every tensor of a chunk, the ranks of a node each a span of them
(`layout.spans`): whole tensors, because some optimizers look at whole tensors, and norms of
pieces would have other last bits. All of it lies in memory that the ranks share, so what
one of them has updated all of them fetch.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AccessError
from ..layout import (
    PIECE_NUMEL,
    Piece,
    main_chunk,
    master_chunk,
    pieces,
    span_bytes,
    spans,
)
from ..layout.tensors import tensors_in
from ..types import Chunk
from .device import Device, Event
from .host_pool import HostPool
from .ranks import Alone, Ranks
from .staging import Source, views_of

MASTER_KEY = "master"
"""Key of the fp32 master weight beside the optimizer's own in a state dict."""


@dataclass
class HostMemory:
    """Host memory of trainable chunks: `weights` lie in the pool of all chunks, gradients
    and masters in pools of their own.

    The `ranks` of a node share it. With `has_masters` 16-bit weights have fp32 masters,
    and with `main_grads_fp32` their gradients add up in fp32. Pieces of a chunk have so many
    elements.
    """

    weights: HostPool
    device: Device
    ranks: Ranks = field(default_factory=Alone)
    has_masters: bool = False
    main_grads_fp32: bool = False
    piece_numel: int = PIECE_NUMEL
    spans: dict[int, tuple[range, ...]] = field(default_factory=dict)
    """For each chunk the indices of the tensors that each rank of the node updates."""

    def __post_init__(self) -> None:
        self.masters = HostPool(ranks=self.ranks)
        self.gradients = HostPool(ranks=self.ranks)

    def add(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Take memory for further chunks; returns the regions to be page-locked."""
        every = spans(chunks, self.ranks.world.local_size)
        self.spans.update((c.index, own) for c, own in zip(chunks, every, strict=True))
        regions = (
            self.masters.add([master_chunk(c, self.has_masters) for c in chunks]),
            self.gradients.add([main_chunk(c, self.main_grads_fp32) for c in chunks]),
        )
        return [region for region in regions if region is not None]


class HostTensors:
    """One host tensor for each parameter of a chunk.

    Args:
        laid: The chunk as its tensors lie in `pool`.
        span: Parameters that this rank updates.

    Attributes:
        tensors: The tensor of each parameter that has elements, by index; any rank may
            update it.
        within_chunk: Where those of the span lie in the bytes of the chunk.
        memory: uint8, these bytes.
    """

    def __init__(self, laid: Chunk, pool: HostPool, span: range) -> None:
        self._laid = laid
        # on storages of their own, that live as long as copies of them
        self.tensors = {
            number: pool.tensor(laid.index, spec)
            for number, spec in enumerate(laid.tensors)
            if spec.numel
        }
        self.within_chunk = span_bytes(laid, span)
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        if laid.nbytes:
            self.memory = pool.chunk(laid.index)[self.within_chunk]

    def where(self, piece: Piece) -> slice:
        """Return the bytes of a piece within `memory`."""
        own = span_bytes(self._laid, piece.span)
        start, stop = own.start, own.stop
        if piece.elements is not None and own.start < own.stop:
            size = self._laid.tensors[piece.span.start].dtype.itemsize
            stop = start + piece.elements.stop * size
            start += piece.elements.start * size
        first = self.within_chunk.start
        return slice(start - first, stop - first)

    def in_piece(
        self, buffer: Tensor, piece: Piece, indices: Sequence[int]
    ) -> dict[int, Tensor]:
        """Tensors of parameters, or elements of the only one, in a copy of a piece's bytes."""
        laid = self._laid.tensors
        if piece.elements is not None:
            return {index: buffer.view(laid[index].dtype) for index in indices}
        specs, first = [laid[index] for index in indices], laid[piece.span.start].offset
        places = ((s.offset - first, s.shape, None, s.dtype) for s in specs)
        return dict(zip(indices, views_of(buffer, places), strict=True))


class MainGrads(HostTensors):
    """Gradients of a chunk on the host, summed over micro-batches (Megatron's main_grad).

    Args:
        chunk: Whose gradients they are.
        pool: Has them.
        memory: Says in which dtype they add up. Under masters norms of 16-bit ones are
            taken in fp32, as they are used.
        span: Parameters of which this rank brings sums to the device.

    Attributes:
        present: Indices of parameters that have a sum.
        arrived: Gradients that autograd has produced but nobody has sent, by index.
        pieces: Parts of the sums that come to the device at once.
        pieces_of: The numbers of a parameter's pieces, by index.
        order: Numbers of the pieces in the order in which backward needs them.
        unread: Pieces to whose sums the micro-batch that runs has not added yet.
        norms: Norms of sums, on the device, as far as they are known.
        sent: The event after the last copy into `memory`.
    """

    def __init__(
        self, chunk: Chunk, pool: HostPool, memory: HostMemory, span: range
    ) -> None:
        super().__init__(main_chunk(chunk, memory.main_grads_fp32), pool, span)
        self.chunk = chunk
        self.present: set[int] = set()
        self.arrived: dict[int, Tensor] = {}
        self.norms: dict[int, Tensor] = {}
        self.sent: Event | None = None
        self._device, self._norms_fp32 = memory.device, memory.has_masters
        # sums are added to element by element, whatever the optimizer
        self.pieces = pieces(chunk, span, splits=True, numel=memory.piece_numel)
        self.pieces_of: dict[int, list[int]] = {index: [] for index in span}
        for number, piece in enumerate(self.pieces):
            for index in piece.span:
                self.pieces_of[index].append(number)
        self.order = [*range(len(self.pieces))][::-1]
        self.unread: set[int] = set()

    def key(self, number: int) -> tuple[str, int, int]:
        """The key of a piece's sums on the device."""
        return "sum", self.chunk.index, number

    def source(self, number: int) -> Source:
        """The host bytes of a piece's sums."""
        return Source(self.memory[self.where(self.pieces[number])], self.sent)

    def sent_in_order(self, indices: Iterable[int]) -> None:
        """Note that sums of these parameters, in the order of backward, are under way."""
        numbers = dict.fromkeys(n for index in indices for n in self.pieces_of[index])
        self.unread.update(numbers)
        self.order = [*numbers, *(n for n in self.order if n not in numbers)]

    def take_norms(self, gradients: Mapping[int, Tensor]) -> None:
        """Take the 2-norm of each gradient, by the kernel that the plain run takes."""
        of_dtype: dict[torch.dtype, list[int]] = {}
        for index, gradient in gradients.items():
            of_dtype.setdefault(gradient.dtype, []).append(index)
        for dtype, indices in of_dtype.items():
            every = [gradients[index] for index in indices]
            if self._norms_fp32 and dtype is not torch.float32:
                norms = [
                    torch.linalg.vector_norm(g, dtype=torch.float32) for g in every
                ]
            else:
                # what `get_total_norm` calls
                norms = [*torch._foreach_norm(every)]
            self.norms.update(zip(indices, norms, strict=True))

    def replace(self, index: int, gradient: Tensor) -> None:
        """Overwrite the sum of a parameter."""
        self.tensors[index].copy_(gradient)
        self.norms.pop(index, None)

    def add(self, index: int, gradient: Tensor) -> None:
        """Add a host gradient to the sum of a parameter."""
        total = self.tensors[index]
        self._device.reads((gradient,))
        self._device.writes((total,))
        self.norms.pop(index, None)
        if index in self.present:
            total.add_(gradient)
        else:
            total.copy_(gradient)
            self.present.add(index)


class OffloadedGrad(Tensor):
    """A tensor without memory, `.grad` of a parameter whose gradient is on the host.

    Raises:
        AccessError: Somebody computes with it.
    """

    parameter_name: str
    awaited_by: int = -1
    """The backward pass that is about to add a gradient."""
    arrived: Tensor | None = None
    """The gradient that autograd has added."""

    @staticmethod
    def __new__(cls, name: str, param: Tensor) -> OffloadedGrad:
        made = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device
        )
        made.parameter_name = name
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"OffloadedGrad({self.parameter_name!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = args[0] if func is torch.ops.aten.add_.Tensor else None
        backward = torch._C._current_graph_task_id()
        if isinstance(own, cls) and own.arrived is None:
            if own.awaited_by == backward != -1:
                own.arrived = args[1].clone()
                return own
        name = next(
            t.parameter_name
            for t in tensors_in([args, kwargs or {}])
            if isinstance(t, cls)
        )
        raise AccessError(
            f"{name}: the gradient of this weight is on the host. Read or change "
            "gradients in an event of a callback (on_pre_optimizer_step), or inside "
            "`with trainer.protrain.full_params():`."
        )


class GradPlaceholders:
    """Keeps the `.grad` of a chunk's parameters: placeholders, or for a while gradients.

    A parameter without a gradient has None, as without paging; who sets `.grad` to None
    or to a tensor is taken at their word.

    Attributes:
        placeholders: One for each parameter.
    """

    def __init__(self, host: HostChunk) -> None:
        self.host = host
        self.placeholders = [
            OffloadedGrad(spec.name, param)
            for spec, param in zip(host.chunk.tensors, host.params, strict=True)
        ]
        self._spent: set[int] = set()
        # where a placeholder made room
        self._emptied: set[int] = set()
        self._shown: dict[int, Tensor] = {}
        self._lent: dict[int, weakref.ref[Any]] = {}

    def put_agreed(self) -> None:
        """Put placeholders where all ranks have agreed that there is a gradient."""
        for index in self.host.main_grads.present:
            if self.host.params[index].grad is None:
                self._spent.discard(index)
                self.put(index)

    def put(self, index: int) -> None:
        """Let the `.grad` of a parameter be its placeholder."""
        param = self.host.params[index]
        if self.placeholders[index].device != param.device:
            # torch takes no other; a shown parameter may be on the host
            self.placeholders[index] = OffloadedGrad(
                self.placeholders[index].parameter_name, param
            )
        param.grad = self.placeholders[index]

    def make_room(self, index: int, is_last: bool) -> None:
        """Let `.grad` be None, or autograd would add to what stands there; where hooks
        of others come before it does, a placeholder that takes what is added."""
        param = self.host.params[index]
        self.require_unspent(index)
        self._emptied.discard(index)
        if param.grad is not None and is_last:
            self._emptied.add(index)
            param.grad = None
        elif param.grad is not None:
            self.placeholders[index].awaited_by = torch._C._current_graph_task_id()

    def arrived(self, index: int) -> Tensor | None:
        """The gradient that autograd has made, None where a node gave none."""
        gradient, placeholder = self.host.params[index].grad, self.placeholders[index]
        if gradient is placeholder:
            gradient, placeholder.arrived = placeholder.arrived, None
            placeholder.awaited_by = -1
            return gradient
        if gradient is not None or index in self._emptied:
            self.put(index)
        return gradient

    @property
    def is_replaced(self) -> bool:
        """True if some `.grad` is a tensor that somebody has set."""
        return any(
            param.grad is not None and param.grad is not placeholder
            for param, placeholder in zip(
                self.host.params, self.placeholders, strict=True
            )
        )

    def take_back(self) -> None:
        """Take over what `.grad` was set to, None included; no update reads the sums."""
        for index, param in enumerate(self.host.params):
            self.hide_one(index)
            if param.grad is None:
                self.host.main_grads.present.discard(index)

    def spend(self) -> None:
        """An update has what there is: on the host it is gone then."""
        for index, param in enumerate(self.host.params):
            if param.grad is not None:
                self.require_unspent(index)
                self._spent.add(index)

    def is_spent(self, index: int) -> bool:
        """Return whether a gradient, still there, is that of the last update."""
        return index in self._spent

    def require_unspent(self, index: int) -> None:
        """Raise AccessError if a gradient, still there, is that of the last update."""
        if self.is_spent(index):
            raise AccessError(
                f"{self.placeholders[index].parameter_name}: the gradient of the last "
                "update is still there, and on the host it is not used twice. Call "
                "`zero_grad` after each step."
            )

    def show(self) -> None:
        """Let `.grad` be the gradient, clipped or not, where there is one."""
        for index, param in enumerate(self.host.params):
            if param.grad is self.placeholders[index]:
                total = self.host.total(index)
                # it may be changed in place
                self.host.main_grads.norms.pop(index, None)
                if not self.host.shared:
                    total, self._lent[index] = _lend(total)
                param.grad = None
                # a copy, where the parameter is on the device or has a master
                self._shown[index] = total.to(param.device, param.dtype)
                param.grad = self._shown[index]

    def keep_replaced(self) -> None:
        """Copy gradients that somebody has set: they may be those of a third parameter."""
        for index, shown in self._shown.items():
            param = self.host.params[index]
            if param.grad is not None and param.grad is not shown:
                param.grad = param.grad.clone()

    def hide(self) -> None:
        """`hide_one` of all parameters."""
        for index in range(len(self.placeholders)):
            self.hide_one(index)

    def hide_one(self, index: int) -> None:
        """Take over what a parameter's `.grad` was set or changed to.

        Raises:
            AccessError: It was set where no update will read it, or somebody keeps a
                tensor whose memory is that of the next gradient.
        """
        param, placeholder = self.host.params[index], self.placeholders[index]
        now, shown = param.grad, self._shown.pop(index, None)
        if now is placeholder:
            return
        if now is not shown or now is None:
            self._spent.discard(index)
        if now is None and shown is None:
            return
        if now is not None:
            self._accept(index, now, now is shown)
            param.grad = None
            self.put(index)
        lent = self._lent.pop(index, None)
        del now, shown
        if lent is not None and lent() is not None:
            gc.collect()
            if lent() is not None:
                raise AccessError(
                    f"{placeholder.parameter_name}: somebody keeps its gradient, or a view "
                    "of it, whose memory the next gradient takes. Keep a clone."
                )

    def _accept(self, index: int, now: Tensor, was_shown: bool) -> None:
        host = self.host
        if index in host.waiting:
            total = host.total(index)
            if not torch.equal(now, total.to(now.device, now.dtype)):
                host.replace(index, now)
        elif not was_shown:
            if host.shared:
                raise AccessError(
                    f"{self.placeholders[index].parameter_name}: its `.grad` was set where "
                    "the ranks have no gradients. Set it after backward."
                )
            host.main_grads.add(index, now.cpu())


def _lend(tensor: Tensor) -> tuple[Tensor, weakref.ref[Any]]:
    """Return a tensor's memory as a storage of its own, and a reference to its life."""
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    # it must not outlive the memory
    memory.owner = tensor
    lent = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return lent, weakref.ref(memory)


class HostChunk:
    """Host tensors of one trainable chunk; see Note [Who updates what].

    Args:
        params: The model's parameters by name; as an attribute those of the chunk.
        memory: Where everything lies; `HostMemory.add` has been called with the chunk.

    Attributes:
        owners: For each rank of the node the indices of the tensors that it updates, and
            as `span` those of this one.
        weights: In the pool of all chunks.
        main_grads: Sums over ranks and micro-batches, which the update reads.
        earlier: One of several ranks' own sums of micro-batches before the last.
        masters: fp32, of 16-bit weights; empty without masters.
        grads: What `.grad` of the parameters is.
        shared: Several ranks write here.
    """

    earlier: MainGrads | None = None

    def __init__(
        self, chunk: Chunk, params: Mapping[str, nn.Parameter], memory: HostMemory
    ) -> None:
        ranks = memory.ranks
        self.chunk, self.shared, self._device = (
            chunk,
            ranks.world.size > 1,
            memory.device,
        )
        self.params = [params[spec.name] for spec in chunk.tensors]
        self.owners = memory.spans[chunk.index]
        self.span = self.owners[ranks.local_rank]
        self.weights = HostTensors(chunk, memory.weights, self.span)
        self.main_grads = MainGrads(chunk, memory.gradients, memory, self.span)
        masters = master_chunk(chunk, memory.has_masters)
        self.masters = HostTensors(masters, memory.masters, self.span)
        self.grads = GradPlaceholders(self)
        self.renew_masters(self.span)

    def main_dtype(self, index: int) -> torch.dtype:
        """The dtype in which a parameter is updated."""
        own = self.chunk.tensors[index].dtype
        return torch.float32 if index in self.masters.tensors else own

    def renew_masters(self, indices: Iterable[int]) -> None:
        """Set masters to weights that somebody wrote: where a weight is not its master
        rounded, the weight counts."""
        for index in indices:
            if index not in self.masters.tensors:
                continue
            weight, master = self.weights.tensors[index], self.masters.tensors[index]
            self._device.reads((weight,))
            self._device.writes((master,))
            rounded = master.to(weight.dtype)
            # as bits: a NaN is equal to itself
            same = rounded.view(torch.int16) == weight.view(torch.int16)
            if not same.all():
                master.copy_(torch.where(same, master, weight.float()))

    def load_master(self, index: int, master: Tensor) -> None:
        """Overwrite a master, and with it the weight."""
        weight, own = self.weights.tensors[index], self.masters.tensors[index]
        self._device.writes((weight, own))
        own.copy_(master)
        weight.copy_(own)

    @property
    def waiting(self) -> set[int]:
        """Parameters with a gradient that an update will read."""
        if self.main_grads.present or self.earlier is None:
            return self.main_grads.present
        return self.earlier.present

    def total(self, index: int) -> Tensor:
        """A parameter's gradient of all micro-batches so far, in the dtype of the sum; no
        rank may be writing it. One of several ranks gets a copy."""
        if self.earlier is not None and index in self.earlier.present:
            return self.earlier.tensors[index]
        total = self.main_grads.tensors[index]
        return total.clone() if self.shared else total

    def replace(self, index: int, gradient: Tensor) -> None:
        """Overwrite a parameter's gradient; the sum over all ranks is its owner's."""
        if self.earlier is not None and index in self.earlier.present:
            self.earlier.replace(index, gradient)
            return
        self.main_grads.norms.pop(index, None)
        if index in self.span:
            self.main_grads.replace(index, gradient)
