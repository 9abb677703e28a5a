"""Trace one micro-batch, forward and backward, without weights and without a device.

Every storage that an operator makes is followed to its end, and so is, apart from it,
every reason that autograd has to keep it. That gives what each block keeps, what it
would keep if it were computed again, and how high memory rises inside it, from one run.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TraceError
from ..nested import map_tensors, tensors_in
from ..types import SMALLEST_SWAP_BYTES, Lifetime, Save, Segment, Trace, Work
from .block_times import BlockSample
from .emulation import autocast_on_meta
from .meta import MetaMode
from .operators import may_multiply, work_of
from .repeats import Repeats


@dataclass(frozen=True)
class TracedStep:
    """A trace, and one call of each block to time it with.

    `uncounted` names operators that take weights and may multiply them, and of which
    nobody knows how many operations they do: they count as the bytes they move.
    """

    trace: Trace
    samples: Mapping[int, BlockSample]
    uncounted: tuple[str, ...] = ()


def trace_step(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    loss_of: Callable[[], Tensor],
    every_block: bool = False,
) -> TracedStep:
    """Run `loss_of` and its backward on a model without weights.

    Args:
        model: On the meta device, `requires_grad` final, nothing recomputed.
        blocks: From `find_blocks(model)`.
        loss_of: Runs the forward and returns the loss.
        every_block: Run blocks of a kind that has run before, too.

    Raises:
        TraceError: The model asks for values that only real weights give.
    """
    recorder = _Recorder(model, blocks, every_block)
    try:
        with recorder, autocast_on_meta():
            loss = loss_of()
            recorder.begin(_Open(None, backward=True))
            loss.backward()
            del loss
    except (NotImplementedError, RuntimeError) as error:
        # what torch raises for an operator that has no shape rule, or a wrong shape
        raise TraceError(
            f"{type(model).__name__} cannot be run without weights, which a plan needs: "
            f"{error}. Train it without ProTrain (protrain_auto_memory: false)."
        ) from error
    return recorder.result()


class _Open:
    """A segment while it runs. Bytes are relative to its start."""

    def __init__(self, block: int | None, backward: bool) -> None:
        self.block = block
        self.backward = backward
        self.index = -1
        self.kept = self.dropped = self.swapped = 0
        self.peak = self.dropped_peak = self.swapped_peak = 0
        self.redone_peak = self.first_peak = 0
        self.gradient_bytes = 0
        # of a block's backward: what it has made when it first asks for a saved tensor
        self.kept_at_unpack: int | None = None
        self.gradients: list[tuple[str, int]] = []
        self.work = Work()
        self.operators: list[tuple[str, int]] = []
        self.merged_into: _Open | None = None
        # of a block's forward: the segment in which its backward runs, and the
        # storages that came in and went out
        self.undone_in: _Open | None = None
        self.inputs: list[_Record | None] = []
        self.outputs: list[_Record | None] = []

    def grow(self, kept: int, dropped: int, swapped: int) -> None:
        self.kept += kept
        self.dropped += dropped
        self.swapped += swapped
        if kept > 0:
            self.peak = max(self.peak, self.kept)
            self.dropped_peak = max(self.dropped_peak, self.dropped)
            self.swapped_peak = max(self.swapped_peak, self.swapped)
            self.first_peak = max(self.first_peak, self.kept + self.gradient_bytes)

    def absorb(self, later: _Open) -> None:
        """Take in the segment that followed this one."""
        self.peak = max(self.peak, self.kept + later.peak)
        self.dropped_peak = max(self.dropped_peak, self.dropped + later.dropped_peak)
        self.swapped_peak = max(self.swapped_peak, self.swapped + later.swapped_peak)
        self.first_peak = max(
            self.first_peak, self.kept + self.gradient_bytes + later.first_peak
        )
        self.operators += [(name, self.kept + live) for name, live in later.operators]
        self.kept += later.kept
        self.dropped += later.dropped
        self.swapped += later.swapped
        self.gradient_bytes += later.gradient_bytes
        self.gradients += later.gradients
        self.work += later.work
        later.merged_into = self

    def copy(self, other: _Open, rename: Callable[[str], str]) -> None:
        """Take what `other`, a block of the same kind, has shown."""
        self.peak, self.dropped_peak = other.peak, other.dropped_peak
        self.swapped_peak = other.swapped_peak
        self.redone_peak, self.first_peak = other.redone_peak, other.first_peak
        self.kept_at_unpack = other.kept_at_unpack
        self.gradients = [(rename(name), nbytes) for name, nbytes in other.gradients]
        self.work = other.work
        self.operators = other.operators

    @property
    def final(self) -> _Open:
        return self.merged_into.final if self.merged_into else self

    def closed(self, number: Mapping[int | None, int]) -> Segment:
        return Segment(
            block=number.get(self.block),
            backward=self.backward,
            work=self.work,
            peak_bytes=self.peak,
            dropped_peak_bytes=self.dropped_peak,
            swapped_peak_bytes=self.swapped_peak,
            redone_peak_bytes=self.redone_peak,
            first_peak_bytes=self.first_peak,
            gradients=tuple(self.gradients),
            operators=tuple(self.operators),
        )


@dataclass(eq=False)
class _Record:
    """The life of one storage."""

    nbytes: int
    made: _Open
    alive: bool = True
    forgotten: _Open | None = None
    saved: dict[int | None, int] = field(default_factory=dict)
    shadows: dict[int | None, weakref.ref] = field(default_factory=dict)
    released: list[tuple[int | None, _Open]] = field(default_factory=list)
    # the block's forward, and whether by position
    inputs: list[tuple[_Open, bool]] = field(default_factory=list)

    @property
    def large(self) -> bool:
        return self.nbytes >= SMALLEST_SWAP_BYTES

    @property
    def kept(self) -> tuple[bool, bool, bool]:
        """Whether it is there: everything saved, nothing in blocks, only what is small."""
        kept, dropped = self.alive or bool(self.saved), self.alive or None in self.saved
        return kept, dropped, dropped if self.large else kept


class _Recorder(MetaMode):
    """Follows storages; the running segment is that of the last hook that fired."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        every_block: bool,
    ) -> None:
        super().__init__()
        self._model = model
        self._blocks = blocks
        self._records: dict[int, _Record] = {}
        self._all: list[_Record] = []
        self._now = _Open(None, backward=False)
        self._segments = [self._now]
        self._inside: int | None = None
        self._order: dict[int, None] = {}
        self._samples: dict[int, BlockSample] = {}
        self._lists = [name.rpartition(".")[0] for name, _ in blocks]
        self._handles: list[Any] = []
        self._saving = torch.autograd.graph.saved_tensors_hooks(
            self._pack, self._unpack
        )
        self._busy = False
        self._weights = {
            param.untyped_storage()._cdata
            for param in model.parameters()
            if param.ndim > 1
        }
        self._uncounted: dict[str, None] = {}
        self._forwards: dict[int, _Open] = {}
        self._copies: list[tuple[_Open, _Open]] = []
        repeated = () if every_block else blocks
        self._repeats = Repeats(repeated, self._skipped)

    def __enter__(self) -> _Recorder:
        self._repeats.__enter__()
        for index, (_name, block) in enumerate(self._blocks):
            self._handles += [
                block.register_forward_pre_hook(
                    self._before(index), with_kwargs=True, prepend=True
                ),
                block.register_forward_hook(self._after(index)),
            ]
        for name, param in self._model.named_parameters():
            if param.requires_grad:
                self._handles.append(
                    param.register_post_accumulate_grad_hook(self._arrived(name))
                )
        super().__enter__()
        self._saving.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._saving.__exit__(*error)
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._repeats.__exit__(*error)

    def begin(self, segment: _Open) -> None:
        """Everything from here on belongs to `segment`."""
        self._now = segment
        self._segments.append(segment)

    # operators

    def ran(self, func: Any, args: Any, output: Any) -> None:
        if self._busy or func.is_view:
            return
        now = self._now
        made = [output] if isinstance(output, Tensor) else list(tensors_in(output))
        read = list(tensors_in(args))
        given = {tensor.untyped_storage()._cdata for tensor in read}
        for tensor in made:
            # an operator in place may change a parameter, which is no activation
            if tensor.untyped_storage()._cdata not in given:
                self._follow(tensor)
        now.operators.append((func._overloadpacket.__name__, now.kept))
        now.work += work_of(func, args, output, read, made)
        if not self._weights.isdisjoint(given) and may_multiply(func):
            self._uncounted[func._overloadpacket._qualified_op_name] = None

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._records or storage.nbytes() == 0:
            return
        record = _Record(storage.nbytes(), self._now)
        self._records[key] = record
        self._all.append(record)
        weakref.finalize(storage, self._forget, key).atexit = False
        self._now.grow(record.nbytes, record.nbytes, record.nbytes)

    def _forget(self, key: int) -> None:
        """The model's last reference to a storage is gone."""
        record = self._records.pop(key)
        before = record.kept
        record.alive = False
        record.forgotten = self._now
        self._shrink(record, before)

    def _shrink(self, record: _Record, before: tuple[bool, ...]) -> None:
        pairs = zip(before, record.kept, strict=True)
        self._now.grow(*(-record.nbytes * (was and not now) for was, now in pairs))

    # what autograd keeps

    def _pack(self, tensor: Tensor) -> Tensor:
        """Give autograd a stand-in, so that it does not keep the tensor itself."""
        if not tensor.is_meta:
            return tensor
        record = self._records.get(tensor.untyped_storage()._cdata)
        if record is None:
            # a parameter, or a view of one
            return tensor
        holder = self._inside
        reference = record.shadows.get(holder)
        shadow = reference() if reference is not None else None
        if shadow is None:
            shadow = torch.UntypedStorage(record.nbytes, device="meta")
            record.shadows[holder] = weakref.ref(shadow)
            record.saved[holder] = record.saved.get(holder, 0) + 1
            weakref.finalize(shadow, self._release, record, holder).atexit = False
        self._busy = True
        stand_in = torch.empty(0, dtype=tensor.dtype, device="meta").set_(
            shadow, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        self._busy = False
        now = self._now
        if holder is not None:
            now.redone_peak = max(now.redone_peak, now.peak)
        return stand_in

    def _unpack(self, stand_in: Tensor) -> Tensor:
        if self._now.kept_at_unpack is None:
            self._now.kept_at_unpack = self._now.kept
        return stand_in

    def _release(self, record: _Record, holder: int | None) -> None:
        before = record.kept
        record.saved[holder] -= 1
        if not record.saved[holder]:
            del record.saved[holder]
        record.released.append((holder, self._now))
        self._shrink(record, before)

    # segments

    def _before(self, index: int) -> Callable[..., None]:
        def before_forward(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._follows(index):
                self._segments.pop()
                self._segments[-1].absorb(self._now)
            self.begin(_Open(index, backward=False))
            self._order.setdefault(index)
            self._inside = index
            self._entered = torch.autograd._get_sequence_nr()
            if index not in self._samples:
                self._busy = True
                self._samples[index] = BlockSample(_detached(args), _detached(kwargs))
                self._busy = False
            by_position = {id(arg) for arg in args if isinstance(arg, Tensor)}
            nested = [arg for arg in args if not isinstance(arg, Tensor)]
            by_position -= {id(tensor) for tensor in tensors_in((nested, kwargs))}
            for tensor in tensors_in((args, kwargs)):
                record = self._records.get(tensor.untyped_storage()._cdata)
                self._now.inputs.append(record)
                if record is not None:
                    record.inputs.append((self._now, id(tensor) in by_position))
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(self._leave_backward(index))

        return before_forward

    def _follows(self, index: int) -> bool:
        """Whether only the step from one block to the next has run since."""
        if len(self._segments) < 2 or self._now.block is not None:
            return False
        before = self._segments[-2].block
        return (
            before is not None
            and before + 1 == index
            and self._lists[before] == self._lists[index]
        )

    def _after(self, index: int) -> Callable[..., None]:
        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            forward = self._now
            self._inside = None
            # a skipped block ran in the place of the first of its kind
            self._forwards.setdefault(index, forward)
            for tensor in tensors_in(output):
                storage = tensor.untyped_storage()
                forward.outputs.append(self._records.get(storage._cdata))
                node = tensor.grad_fn
                if node is not None and node._sequence_nr() >= self._entered:
                    node.register_prehook(self._enter_backward(index, forward))
            self.begin(_Open(None, backward=False))

        return after_forward

    def _enter_backward(self, index: int, forward: _Open) -> Callable[[Any], None]:
        def enter(_gradients: Any) -> None:
            if forward.undone_in is None:
                self.begin(_Open(index, backward=True))
                forward.undone_in = self._now

        return enter

    def _leave_backward(self, index: int) -> Callable[[Any], None]:
        def leave(_gradients: Any) -> None:
            if self._now.block == index:
                self.begin(_Open(None, backward=True))

        return leave

    def _skipped(self, index: int, ran: int) -> None:
        self._copies.append((self._now, self._forwards[ran]))

    def _arrived(self, name: str) -> Callable[[Tensor], None]:
        def arrived(param: Tensor) -> None:
            gradient, param.grad = param.grad, None
            if gradient is None:
                return
            now = self._now
            now.gradients.append((name, gradient.nbytes))
            now.gradient_bytes += gradient.nbytes

        return arrived

    # the result

    def result(self) -> TracedStep:
        """What was recorded, blocks numbered in the order of first use."""
        unused = (i for i in range(len(self._blocks)) if i not in self._order)
        order = [*self._order, *unused]
        number: dict[int | None, int] = {old: new for new, old in enumerate(order)}
        segments = [s for s in self._segments if s.merged_into is None]
        for index, segment in enumerate(segments):
            segment.index = index
        self._fill_in(segments)
        for segment in segments:
            if segment.undone_in is not None:
                # it is computed again only then
                segment.redone_peak += segment.undone_in.final.kept_at_unpack or 0
        fates: Counter[tuple[int, int, tuple[Save, ...], bool]] = Counter()
        for record in self._all:
            fates[_fate(record, len(segments), number)] += record.nbytes
        trace = Trace(
            segments=tuple(segment.closed(number) for segment in segments),
            lifetimes=tuple(
                Lifetime(made, forgotten, saves, nbytes, large)
                for (made, forgotten, saves, large), nbytes in fates.items()
                if forgotten > made or any(save.segment > made for save in saves)
            ),
            blocks=tuple(self._blocks[index][0] for index in order),
        )
        samples = {number[old]: sample for old, sample in self._samples.items()}
        return TracedStep(trace, samples, tuple(self._uncounted))

    def _fill_in(self, segments: Sequence[_Open]) -> None:
        """Give skipped blocks what the block of their kind has shown."""
        after = dict(zip(segments, segments[1:], strict=False))
        made: dict[_Open, list[_Record]] = {}
        for record in self._all:
            made.setdefault(record.made, []).append(record)
        for skipped, ran in self._copies:
            assert skipped.block is not None and ran.block is not None
            old, new = self._blocks[ran.block][0], self._blocks[skipped.block][0]

            def rename(name: str, old: str = old, new: str = new) -> str:
                return new + name.removeprefix(old)

            moved = {ran: skipped, after.get(ran.final): after.get(skipped.final)}
            skipped.final.copy(ran.final, rename)
            back, back_ran = skipped.undone_in, ran.undone_in
            if back is not None and back_ran is not None:
                back.final.copy(back_ran.final, rename)
                moved[back_ran.final] = back.final
                moved[after.get(back_ran.final)] = after.get(back.final)
            self._copy_records(made.get(ran, []), skipped, ran, moved)

    def _copy_records(
        self,
        records: Sequence[_Record],
        skipped: _Open,
        ran: _Open,
        moved: Mapping[_Open | None, _Open | None],
    ) -> None:
        def place(segment: _Open | None) -> _Open | None:
            final = segment.final if segment is not None else None
            return moved.get(final, final)

        passed = {id(record) for record in ran.outputs}
        for record in records:
            if id(record) in passed:
                continue
            twin = _Record(record.nbytes, skipped, alive=record.alive)
            twin.forgotten = place(record.forgotten)
            twin.released = [
                (skipped.block if holder == ran.block else holder, segment)
                for holder, where in record.released
                if (segment := place(where)) is not None
            ]
            self._all.append(twin)
        handed = (*zip(skipped.inputs, ran.inputs, strict=True),)
        handed += (*zip(skipped.outputs, ran.outputs, strict=True),)
        for own, theirs in handed:
            if own is None or theirs is None:
                continue
            own.released += [
                (skipped.block, segment)
                for holder, where in theirs.released
                if holder == ran.block and (segment := place(where)) is not None
            ]


def _fate(
    record: _Record, num_segments: int, number: Mapping[int | None, int]
) -> tuple[int, int, tuple[Save, ...], bool]:
    """When a storage was made, when forgotten, what saved it, and whether it is large."""
    forgotten = record.forgotten
    end = forgotten.final.index if forgotten is not None else num_segments
    saves = {
        Save(segment.final.index, number.get(block))
        for block, segment in record.released
    }
    inputs: dict[tuple[int, int | None], bool] = {}
    for forward, by_position in record.inputs:
        if forward.undone_in is not None:
            key = forward.undone_in.final.index, number.get(forward.block)
            # another reference to it stays on the device
            inputs[key] = inputs.get(key, True) and by_position
    saves |= {
        Save(*key, as_input=True, by_position=each) for key, each in inputs.items()
    }
    ordered = sorted(saves, key=lambda s: (s.segment, s.block or -1, s.as_input))
    return record.made.final.index, end, tuple(ordered), record.large


def _detached(value: Any) -> Any:
    """The same structure without autograd's graph; keeps `requires_grad`."""

    def detached(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        ).requires_grad_(tensor.requires_grad)

    return map_tensors(value, detached)
