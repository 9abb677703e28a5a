"""Weights in the few bits in which they are published, and how they become weights again.

MXFP4 has two e2m1 numbers a byte, the even column in the low half, and a power of two
(e8m0, its exponent) for 32 columns of a row. FP8 has an e4m3 number a byte and a factor
for a block of rows and columns: 128 by 128, one row (a channel), the whole matrix.
Unpacked they have the bits that transformers gives them while it loads a base with
`dequantize`: a product in fp32, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..errors import LayoutError
from ..types import Encoding, Form, TensorSpec
from .pieces import PIECE_NUMEL

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127
_aten = torch.ops.aten


CODES = {Encoding.E2M1: torch.uint8, Encoding.E4M3: torch.float8_e4m3fn}
SCALES = {Encoding.E2M1: torch.uint8, Encoding.E4M3: torch.float32}


_WRITTEN = (
    "would write a weight that is packed, which has no room for other values. Load the "
    "base unpacked to change its weights."
)


def form_of(param: object) -> Form | None:
    """The form in which host memory has a parameter; one without values names it, too.

    Raises:
        LayoutError: Somebody has set `.data` of a packed one.
    """
    if isinstance(param, Packed):
        param.require_unwritten()
    form = getattr(param, "form", None)
    return form if isinstance(form, Form) else None


def memory_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that have its bytes: itself, or what is packed."""
    return tuple(chain(*tensor.parts)) if isinstance(tensor, Packed) else (tensor,)


def stored_bytes(param: Tensor) -> int:
    """Bytes of a parameter as host memory has it, with or without values."""
    form = form_of(param)
    spec = TensorSpec("", tuple(param.shape), param.dtype, 0, form)
    return sum(stored.nbytes for stored in stored_specs(spec))


def stored_specs(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """A tensor as it lies in host memory: itself, or its codes and then its scales."""
    if spec.form is None:
        return (spec,)
    codes, scales = spec.form.stored(spec.shape)
    encoding = spec.form.encoding
    return (
        TensorSpec(f"{spec.name}.codes", codes, CODES[encoding], 0),
        TensorSpec(f"{spec.name}.scales", scales, SCALES[encoding], 0),
    )


def room_bytes(form: Form, numel: int, dtype: torch.dtype) -> int:
    """Bytes of what is between codes and weight while so many numbers are unpacked."""
    if form.encoding is Encoding.E4M3:
        return 4 * numel
    # a look-up for each pair, and what it finds
    return 2 * numel + numel * dtype.itemsize


def unpack(
    form: Form,
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    first: int,
    room: Tensor | None = None,
    table: Tensor | None = None,
) -> None:
    """Unpack a piece into its place in a whole weight.

    Args:
        form: Its storage form.
        codes: Rows of codes, contiguous.
        scales: Rows of scales for them.
        out: The weight, contiguous.
        first: Number of the first of the rows in the weight.
        room: uint8, `room_bytes` or more, at an address as that of any tensor.
        table: `table_of` its numbers, on the device of the codes.
    """
    height, columns = form.matrix(out.shape)
    if form.transposed:
        matrix, start = divmod(first, height)
        all_of_it = out.view(-1, columns, height)[matrix].t()
    else:
        all_of_it, start = out.view(-1, columns), first
    rows = all_of_it[start : start + len(codes)]
    if room is None:
        nbytes = room_bytes(form, rows.numel(), rows.dtype)
        room = torch.empty(nbytes, dtype=torch.uint8, device=codes.device)
    if form.encoding is Encoding.E2M1:
        pairs = table_of(rows.dtype).to(codes.device) if table is None else table
        numbers = _from_e2m1(codes, scales, pairs, rows.dtype, room)
    else:
        numbers = room[: 4 * rows.numel()].view(torch.float32).view(rows.shape)
        _multiplied(numbers.copy_(codes), scales, form.block)
    rows.copy_(numbers.view(rows.shape))


def _from_e2m1(
    codes: Tensor, scales: Tensor, pairs: Tensor, dtype: torch.dtype, room: Tensor
) -> Tensor:
    num = codes.numel()
    which = room[: 4 * num].view(torch.int32)
    found = room[4 * num :][: 2 * num * dtype.itemsize].view(pairs.dtype)
    grouped = which.view(*scales.shape, -1).copy_(codes.view(*scales.shape, -1))
    grouped.add_(scales.unsqueeze(-1), alpha=256)
    return torch.index_select(pairs, 0, which, out=found).view(dtype)


def _multiplied(numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> None:
    """Multiply the numbers of each block, of which the last may be cut off."""
    height = block[0] if len(scales) > 1 else len(numbers)
    for rows, down, of_rows in _runs(len(numbers), height):
        for columns, across, of_columns in _runs(numbers.shape[1], block[1]):
            blocks = numbers[rows, columns].unflatten(1, (-1, across))
            blocks = blocks.unflatten(0, (-1, down))
            blocks.mul_(scales[of_rows, None, of_columns, None])


def _runs(length: int, block: int) -> Iterator[tuple[slice, int, slice]]:
    """Yield whole blocks and then one that is cut off: where, how long, their scales."""
    whole = length // block
    if whole:
        yield slice(0, whole * block), block, slice(0, whole)
    if cut := length % block:
        yield slice(whole * block, length), cut, slice(whole, whole + 1)


@lru_cache(maxsize=None)
# an evaluation in inference mode may be the first to need it, training the next
@torch.inference_mode(False)
def table_of(dtype: torch.dtype) -> Tensor:
    """Both numbers of an e2m1 byte under an exponent, as one integer, by exponent and
    byte: 65,536 of them, in host memory.

    A table, because two numbers are then one look-up, with the same bits on every device.
    """
    numbers = torch.tensor([*_E2M1, *(-n for n in _E2M1)], dtype=dtype, device="cpu")
    exponents = torch.arange(256, dtype=torch.int32, device="cpu")[:, None] - _E8M0_BIAS
    scaled = numbers.expand(256, 16).clone()
    torch.ldexp(scaled, exponents, out=scaled)
    low, high = scaled[:, None, :].expand(256, 16, 16), scaled[:, :, None]
    both = torch.stack([low, high.expand(256, 16, 16)], dim=-1)
    kinds = {2: torch.int32, 4: torch.int64}
    return both.contiguous().view(kinds[dtype.itemsize]).view(-1)


Part = tuple[Tensor, Tensor]
"""Rows of codes and their scales."""


class Packed(Tensor):
    """A weight in its storage form, with shape and dtype of the unpacked one.

    An operator that reads it gets the unpacked values, and one that writes is an error.
    Joining several, or taking it off a graph, leaves it packed.

    Attributes:
        form: Tells how to unpack it.
        parts: Codes and scales of consecutive rows, all of them together.
    """

    form: Form
    parts: tuple[Part, ...]

    @staticmethod
    def __new__(
        cls, form: Form, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[Part]
    ) -> Packed:
        device = parts[0][0].device
        made: Any = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device
        )
        made.form, made.parts = form, tuple(parts)
        return made

    @property
    def written(self) -> Tensor | None:
        """Values that somebody has set as its `.data`, in place of those of its parts."""
        try:
            storage = Tensor.untyped_storage(self)
            storage.data_ptr()
        except RuntimeError:
            # as made: it has no memory
            return None
        plain = torch.empty(0, dtype=self.dtype, device=storage.device)
        return plain.set_(storage, 0, self.shape, self.stride())

    def require_unwritten(self) -> None:
        """Raise LayoutError if somebody has set `.data`, by `.to(dtype)` for example."""
        if self.written is not None:
            raise LayoutError(f"`.data =` or `.to(dtype)` {_WRITTEN}")

    def unpack_into(self, out: Tensor, numel: int = PIECE_NUMEL) -> Tensor:
        """Fill a contiguous tensor of this shape, on any device, piece by piece."""
        self.require_unwritten()
        form, above, table = self.form, 0, None
        if form.encoding is Encoding.E2M1:
            table = table_of(self.dtype).to(out.device)
        for codes, scales in self.parts:
            for first, stop in form.pieces(self.shape, len(codes), numel):
                there = codes[first:stop].to(out.device)
                factors = scales[form.scale_rows(first, stop)].to(out.device)
                unpack(form, there, factors, out, above + first, table=table)
            above += len(codes)
        return out

    def unpacked(self, device: torch.device | None = None) -> Tensor:
        """A plain tensor with the values of this one, on its device or another."""
        where = device or self.device
        return self.unpack_into(torch.empty(self.shape, dtype=self.dtype, device=where))

    def copies_to(self, whole: Packed) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield targets and sources of copies into a weight of one part."""
        (targets,) = whole.parts
        for target, sources in zip(targets, zip(*self.parts, strict=True), strict=True):
            rows = target.split([len(source) for source in sources])
            yield from zip(rows, sources, strict=True)

    def with_parts(self, parts: Sequence[Part], shape: Sequence[int] = ()) -> Packed:
        """A weight of the same form from other parts."""
        return Packed(self.form, shape or self.shape, self.dtype, parts)

    # what asks for memory, and would find none

    def contiguous(self, *_: Any, **__: Any) -> Tensor:
        """The unpacked weight: who asks is about to read its bytes."""
        return self.unpacked()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Raise LayoutError: who asks is about to write its bytes to a file."""
        raise LayoutError(
            "a packed weight has no memory of its own. `.contiguous()` gives its values."
        )

    def share_memory_(self) -> Any:
        """Raise LayoutError: what is packed is pages of a file."""
        raise LayoutError("a packed weight cannot be shared. Load the base unpacked.")

    def tolist(self) -> Any:
        """As of a plain tensor."""
        return self.unpacked().tolist()

    def numpy(self, **how: Any) -> Any:
        """As of a plain tensor, but a copy."""
        return self.unpacked().numpy(**how)

    def data_ptr(self) -> int:
        """The address of the first codes."""
        return self.parts[0][0].data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        parts = [(codes.clone(), scales.clone()) for codes, scales in self.parts]
        copied: Tensor = self.with_parts(parts)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.unpacked().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Packed({self.form}, {list(self.shape)}, {self.dtype})"

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tree_map_only(Packed, Packed.require_unwritten, (args, kwargs))
        keeps = _KEEPS.get(func)
        if keeps and (kept := keeps(*args, **kwargs)) is not None:
            return kept
        _require_read(func, args, kwargs)
        args, kwargs = tree_map_only(Packed, Packed.unpacked, (args, kwargs))
        result = func(*args, **kwargs)
        if func.is_view:
            # who writes it would write a copy
            return tree_map_only(Tensor, _ViewOfPacked.of, result)
        return result


class _ViewOfPacked(Tensor):
    """Values of a packed weight, or some of them, which nobody may write."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def of(cls, values: Tensor) -> Tensor:
        """Show them."""
        return Tensor._make_subclass(cls, values)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        _require_read(func, args, kwargs)
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
        return tree_map_only(Tensor, cls.of, result) if func.is_view else result

    def tolist(self) -> Any:
        """As of a plain tensor."""
        return self.clone().tolist()

    def numpy(self, **how: Any) -> Any:
        """As of a plain tensor, but a copy."""
        return self.clone().numpy(**how)


def _require_read(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse an operator that writes a packed weight, or what shows its values."""
    for number, said in enumerate(func._schema.arguments):
        writes = said.alias_info is not None and said.alias_info.is_write
        given = args[number] if number < len(args) else kwargs.get(said.name)
        if writes and any(
            isinstance(t, (Packed, _ViewOfPacked)) for t in _listed(given)
        ):
            raise LayoutError(f"{func} {_WRITTEN}")


def from_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Packed:
    """Pack experts as gpt-oss publishes them: their columns in groups of 32 numbers.

    Args:
        blocks: uint8, [experts, rows, groups, 16].
        scales: uint8, [experts, rows, groups].
        dtype: Of the unpacked weight, whose matrices are the transposed ones.
    """
    experts, rows, groups, half = blocks.shape
    form = Form(Encoding.E2M1, (1, 2 * half), transposed=True)
    part = blocks.reshape(-1, groups * half), scales.reshape(-1, groups)
    return Packed(form, (experts, 2 * half * groups, rows), dtype, [part])


def from_fp8(
    codes: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    block: tuple[int, int] | None = None,
) -> Packed:
    """Pack a weight in e4m3 as it is published.

    Args:
        codes: float8_e4m3fn, a matrix or several.
        scales: A factor for each block, or for all; e8m0 exponents also as uint8.
        dtype: Of the unpacked weight.
        block: Rows and columns of a block as its base says, if these scales are for such
            blocks, of which the last ones may be cut off; otherwise all are equal.

    Raises:
        LayoutError: The scales are not those of equal blocks, or a block would reach
            into the next matrix.
    """
    size = rows, columns = codes.shape[-2:]
    if scales.ndim < 2 or scales.numel() == 1:
        # one for all, or one for each matrix
        each = scales.view(-1, 1, 1)
        scales = each.expand(*codes.shape[:-2], 1, 1) if codes.ndim > 2 else each[0]
    grid = tuple(scales.shape[-2:])
    if block is None or grid != tuple(map(_covering, size, block)):
        if rows % grid[0] or columns % grid[1]:
            raise LayoutError(
                f"{rows} by {columns} numbers are not {grid[0]} by {grid[1]} equal blocks"
            )
        block = rows // grid[0], columns // grid[1]
    if codes.ndim > 2 and rows % min(block[0], rows):
        raise LayoutError(
            f"{rows} rows of each matrix are not whole blocks of {block[0]}"
        )
    # a matrix in one block has one of any size, so that like matrices are alike
    block = min(block[0], rows), min(block[1], columns)
    if scales.dtype == torch.uint8:
        factors = (scales.float() - _E8M0_BIAS).exp2()
    else:
        factors = scales.float()
    part = codes.reshape(-1, columns), factors.reshape(-1, grid[1])
    return Packed(Form(Encoding.E4M3, block), codes.shape, dtype, [part])


def _covering(size: int, block: int) -> int:
    return -(-size // block)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _detached(packed: Packed) -> Packed:
    return packed.with_parts(packed.parts)


def _set_to_itself(packed: Packed, source: Tensor) -> Packed | None:
    """A parametrization, as PEFT makes around experts, sets a weight to what it has."""
    same = isinstance(source, Packed) and source.parts is packed.parts
    return packed if same else None


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> Packed | None:
    if dim or not _alike(tensors):
        return None
    first: Any = tensors[0]
    if any(tensor.shape != first.shape for tensor in tensors):
        return None
    parts = [part for packed in tensors for part in packed.parts]  # type: ignore[attr-defined]
    return first.with_parts(parts, (len(tensors), *first.shape))


def _joined(tensors: Sequence[Tensor], dim: int = 0) -> Packed | None:
    """Join along a dimension of rows: matrix by matrix the parts of each."""
    first: Any = tensors[0]
    dim %= first.ndim
    if not _alike(tensors) or dim == first.ndim - 1 or first.form.transposed:
        return None
    above, parts = prod(first.shape[:dim]), []
    shapes = {(*t.shape[:dim], *t.shape[dim + 1 :]) for t in tensors}
    if len(shapes) > 1 or any(len(packed.parts) % above for packed in tensors):  # type: ignore[attr-defined]
        return None
    for number in range(above):
        for packed in tensors:
            own: Any = packed.parts  # type: ignore[attr-defined]
            each = len(own) // above
            parts += own[number * each : (number + 1) * each]
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return first.with_parts(parts, shape)


def _alike(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    kinds = {(type(t), t.dtype, getattr(t, "form", None)) for t in tensors}
    if len(kinds) > 1 or not isinstance(first, Packed):
        return False
    # blocks of rows that are cut off can only be the last ones
    block = 1 if first.form.transposed else first.form.block[0]
    return not any(tensor.shape[-2] % block for tensor in tensors)


_KEEPS: dict[Any, Callable[..., Packed | None]] = {
    _aten.detach.default: _detached,
    _aten.alias.default: _detached,
    _aten.set_.source_Tensor: _set_to_itself,
    _aten.stack.default: _stacked,
    _aten.cat.default: _joined,
}
"""Operators that leave a packed weight packed, where they can."""
