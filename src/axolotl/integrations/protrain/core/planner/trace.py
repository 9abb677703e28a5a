"""Trace one micro-batch, forward and backward, without weights and without a device.

Every storage that an operator makes is followed to its end, and so is, apart from it,
every reason that autograd has to keep it. That gives what each block keeps, what it
would keep if it were computed again, and how high memory rises inside it, from one run.

Note [Saved tensors have placeholders]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
What autograd saves is not the tensor but a view into a storage of the same size that
nobody else has, one for each storage and block that saves it. So the end of a tensor
means that the model's own code has let go of it, and the end of a placeholder that
backward has: two events that a real run, and a refcount, would show as one. A block
that recomputes is then the same run with its placeholders not counted, one that swaps the
same with the large ones not counted; what a block saves of parameters, or of their
views, is itself, since it costs nothing.

Note [Ends are recorded, not handled]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Python tells of an end amid whatever line dropped the last reference, and prints and
forgets what is raised there, a KeyboardInterrupt too. So all that runs then is
`deque.append`, in C. `_settle` does the bookkeeping later, in the order of the ends,
and before anything could tell the difference: before a storage is followed or looked
up, because addresses are used again; before what is there is read; and before another
segment begins, because an end belongs to the segment it fell into.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import graph

from ..engine.embedding import LookUp
from ..engine.side_effects import keeping_generators
from ..errors import FOREIGN_ERRORS, TraceError
from ..layout import CACHES
from ..layout.tensors import hold_quantised, map_tensors, tensors_in
from ..types import SMALLEST_SWAP_BYTES, Lifetime, Save, Segment, Trace, Work
from .block_times import BlockSample
from .emulation import autocast_on_meta
from .meta import (
    MetaMode,
    empty_like,
    value_of,
    without_global_hooks,
)
from .operators import may_multiply, qualified_name, work_of, workspace_bytes
from .repeats import skipping_repeats


@dataclass(frozen=True)
class TracedStep:
    """A trace, and one call of each block to time it with.

    `uncounted` names operators that take weights and may multiply them, and of which
    nobody knows how many operations they do: they count as the bytes they move.
    `drew` says that the model read values that depend on weights: Note [Values].
    `rows` has the frozen embeddings outside blocks that were only looked up, with the
    bytes of the rows; `read_outside` names weights of blocks that the forward reads outside
    of their blocks, a penalty of the loss for example: they cannot be paged.
    """

    trace: Trace
    samples: Mapping[int, BlockSample]
    uncounted: tuple[str, ...] = ()
    drew: bool = False
    rows: Mapping[str, int] = field(default_factory=dict)
    read_outside: frozenset[str] = frozenset()


def trace_step(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    loss_of: Callable[[], Tensor],
    skips: bool = True,
) -> TracedStep:
    """Run `loss_of` and its backward on a model without weights; draws no random number
    that training would have drawn.

    Args:
        model: On the meta device, `requires_grad` final, nothing recomputed.
        blocks: From `find_blocks(model)`.
        loss_of: Runs the forward and returns the loss.
        skips: Blocks that are alike run once; not where each leaves something behind.

    Raises:
        TraceError: It does what the meta device cannot.
    """
    try:
        with torch.random.fork_rng(devices=[]), keeping_generators():
            recorder = _recorded(model, blocks, loss_of, skips)
    except (NotImplementedError, RuntimeError) as error:
        # what torch raises for an operator that has no shape rule, or a wrong shape
        raise TraceError(
            f"{type(model).__name__} cannot be run without weights, which a plan needs: "
            f"{error}. Train it without ProTrain (protrain_auto_memory: false)."
        ) from error
    return recorder.result()


def _recorded(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    loss_of: Callable[[], Tensor],
    skips: bool,
) -> _Recorder:
    if skips:
        recorder = _Recorder(model, blocks)
        # the model may want what a skipped block does not give, whatever it says then
        with suppress(*FOREIGN_ERRORS):
            recorder.record(loss_of)
            if not recorder.must_run_all:
                return recorder
    recorder = _Recorder(model, blocks, skips=False)
    recorder.record(loss_of)
    return recorder


@dataclass
class _Level:
    """Bytes that are there, and the most that were; from the start of a segment."""

    now: int = 0
    peak: int = 0

    def absorb(self, later: _Level) -> None:
        self.peak = max(self.peak, self.now + later.peak)
        self.now += later.now


@dataclass(eq=False)
class _Open:
    """A segment while it runs."""

    block: int | None
    backward: bool
    index: int = -1
    # with everything that autograd saves; with nothing that blocks save; with what
    # they save below `SMALLEST_SWAP_BYTES`; and as the first, with all gradients of
    # parameters since the start, as they are and in fp32
    kept: _Level = field(default_factory=_Level)
    dropped: _Level = field(default_factory=_Level)
    swapped: _Level = field(default_factory=_Level)
    first: _Level = field(default_factory=_Level)
    widened: _Level = field(default_factory=_Level)
    gradients: list[tuple[str, int]] = field(default_factory=list)
    work: Work = Work()
    operators: list[tuple[str, int]] = field(default_factory=list)
    # of a stretch between two blocks
    merged_into: _Open | None = None
    # of a block's forward; storages that come in and go out are None for parameters
    redone_peak: int = 0
    undone_in: _Open | None = None
    inputs: list[_Record | None] = field(default_factory=list)
    outputs: list[_Record | None] = field(default_factory=list)
    # of a block's backward: what it has made when it first asks for a saved tensor
    kept_at_unpack: int | None = None

    @property
    def levels(self) -> tuple[_Level, ...]:
        return self.kept, self.dropped, self.swapped, self.first, self.widened

    @property
    def final(self) -> _Open:
        return self.merged_into or self

    def absorb(self, later: _Open) -> None:
        """Take in the stretch that followed this block."""
        there = self.kept.now
        self.operators += [(name, there + rise) for name, rise in later.operators]
        for own, other in zip(self.levels, later.levels, strict=True):
            own.absorb(other)
        self.gradients += later.gradients
        self.work += later.work
        later.merged_into = self

    def copy(self, other: _Open, old: str, new: str) -> None:
        """Take what `other`, a block of the same kind named `old`, has shown."""
        for own, theirs in zip(self.levels, other.levels, strict=True):
            own.peak = theirs.peak
        self.redone_peak, self.kept_at_unpack = other.redone_peak, other.kept_at_unpack
        self.gradients = [
            (new + name.removeprefix(old), nbytes) for name, nbytes in other.gradients
        ]
        self.work, self.operators = other.work, other.operators

    def closed(self, number: Mapping[int | None, int]) -> Segment:
        return Segment(
            block=number.get(self.block),
            backward=self.backward,
            work=self.work,
            peak_bytes=self.kept.peak,
            dropped_peak_bytes=self.dropped.peak,
            swapped_peak_bytes=self.swapped.peak,
            redone_peak_bytes=self.redone_peak,
            first_peak_bytes=self.first.peak,
            widened_peak_bytes=self.widened.peak,
            gradients=tuple(self.gradients),
            operators=tuple(self.operators),
        )


@contextmanager
def _unhooked(
    saving: graph.saved_tensors_hooks,
    disable: Callable[[str], AbstractContextManager[None]],
    message: str,
) -> Iterator[None]:
    """Inside a gradient of torch.func (chunked losses), where hooks are refused: what it
    saves is gone when it ends."""
    saving.__exit__()
    try:
        with disable(message):
            yield
    finally:
        saving.__enter__()


class _End(weakref.ref):
    """The end of a followed storage, or of the placeholder that `holder` saves for it."""

    key: int | None = None
    record: _Record
    holder: int | None


_Released = tuple[int | None, _Open]


@dataclass(eq=False)
class _Record:
    """The life of one storage; blocks are None for what is outside of them."""

    nbytes: int
    made: _Open
    alive: bool = True
    # where the model's last reference ended
    forgotten: _Open | None = None
    # how many placeholders of it each block holds, and the last one of each
    saved: Counter[int | None] = field(default_factory=Counter)
    placeholders: dict[int | None, _End] = field(default_factory=dict)
    # blocks, and where each let go of a placeholder
    released: list[_Released] = field(default_factory=list)
    # forwards of blocks that it came into, and whether by position
    inputs: list[tuple[_Open, bool]] = field(default_factory=list)
    # of the storage; kept, or nothing would tell of it
    end: _End | None = None

    @property
    def large(self) -> bool:
        return self.nbytes >= SMALLEST_SWAP_BYTES

    @property
    def is_there(self) -> tuple[bool, ...]:
        """By the levels of a segment."""
        kept, dropped = self.alive or bool(self.saved), self.alive or None in self.saved
        return kept, dropped, dropped if self.large else kept, kept, kept


class _TracedLookUp(LookUp):
    """Lets a recorder count the rows that an embedding's look-ups ask for."""

    def __init__(self, embedding: nn.Module, name: str, recorder: _Recorder) -> None:
        self._name, self._recorder = name, recorder
        super().__init__(embedding)

    def look_up(self, ids: Tensor) -> Tensor:
        return self._recorder.look_up(self._name, self.weight, ids)


class _Recorder(MetaMode):
    """Follows storages; the running segment is that of the last hook that fired."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        skips: bool = True,
    ) -> None:
        super().__init__()
        self._model = model
        self._blocks = blocks
        self._alike = blocks if skips else ()
        self._lists = [name.rpartition(".")[0] for name, _ in blocks]
        self._weights = {
            param.untyped_storage()._cdata
            for param in model.parameters()
            if param.ndim > 1
        }
        # block and name of each weight of blocks, and names of those read elsewhere
        self._owners = {
            param.untyped_storage()._cdata: (index, f"{prefix}.{name}")
            for index, (prefix, block) in enumerate(blocks)
            for name, param in block.named_parameters()
        }
        self._read_outside: set[str] = set()
        self._uncounted: dict[str, None] = {}
        self._rows: Counter[str] = Counter()
        # weights of embeddings that are or may be only looked up, what else has read,
        # and the one that is being looked up
        self._tables: set[int] = set()
        self._read_whole: set[int] = set()
        self._looked_up: int | None = None
        self._records: dict[int, _Record] = {}
        self._all: list[_Record] = []
        self._ended: deque[_End] = deque()
        self._now = _Open(None, backward=False)
        self._segments = [self._now]
        # in the order of first use
        self._samples: dict[int, BlockSample] = {}
        self._copies: list[tuple[_Open, _Open]] = []
        # blocks whose forward has left a graph; names of the others by their weights,
        # and those of which backward has read some
        self._with_graph: set[int] = set()
        self._without_graph: dict[int, str] = {}
        self._run_again: set[str] = set()
        self._busy = False

    def record(self, loss_of: Callable[[], Tensor]) -> None:
        """Run a micro-batch."""
        with self._recording(), autocast_on_meta(), hold_quantised(self._model):
            loss = loss_of()
            self.begin(_Open(None, backward=True))
            self._without_graph = {
                param.untyped_storage()._cdata: name
                for index in self._samples.keys() - self._with_graph
                for name, block in [self._blocks[index]]
                for param in block.parameters()
            }
            loss.backward()
        if self._run_again:
            raise TraceError(
                f"{type(self._model).__name__}: its own backward reads the weights of "
                f"{min(self._run_again)} and {len(self._run_again) - 1} other blocks, "
                "which may have left the device by then. Train it without ProTrain "
                "(protrain_auto_memory: false)."
            )

    @property
    def must_run_all(self) -> bool:
        """Tell whether any block was skipped, and one went backward more than once, or its
        weights are read outside of it: those of a skipped one may be, too."""
        undone = Counter(s.block for s in self._segments if s.backward)
        undone[None] = 0
        odd = max(undone.values()) > 1 or self._read_outside
        return bool(self._copies and odd)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        saving = graph.saved_tensors_hooks(self._pack, self._unpack)
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(skipping_repeats(self._alike, lambda: self._now, self._skipped))
            for index, (_name, block) in enumerate(self._blocks):
                before = partial(self._before, index)
                enter(
                    block.register_forward_pre_hook(
                        before, with_kwargs=True, prepend=True
                    )
                )
                enter(block.register_forward_hook(partial(self._after, index)))
            for name, module in _tables(self._model, self._blocks):
                self._tables.add(module.weight.untyped_storage()._cdata)
                look_up = _TracedLookUp(module, f"{name}.weight", self)
                stack.callback(look_up.remove)
            for name, param in self._model.named_parameters():
                if param.requires_grad:
                    arrived = partial(self._arrived, name)
                    enter(param.register_post_accumulate_grad_hook(arrived))
            enter(without_global_hooks())
            enter(self)
            # what a model compiles takes no more memory than what it compiles from
            enter(torch.compiler.set_stance("force_eager"))
            enter(saving)
            disable = partial(_unhooked, saving, graph.disable_saved_tensors_hooks)
            enter(patch.object(graph, "disable_saved_tensors_hooks", disable))
            yield

    def begin(self, segment: _Open) -> None:
        """Everything from here on belongs to `segment`."""
        self._settle()
        self._now = segment
        self._segments.append(segment)

    # operators

    def ran(self, func: Any, args: Any, output: Any) -> None:
        if self._busy or func.is_view:
            return
        self._settle()
        now = self._now
        made = [output] if isinstance(output, Tensor) else list(tensors_in(output))
        read = list(tensors_in(args))
        given = {tensor.untyped_storage()._cdata for tensor in read}
        self._read_whole |= self._tables & (given - {self._looked_up})
        if not now.backward:
            for key in given & self._owners.keys():
                index, name = self._owners[key]
                if index != now.block:
                    self._read_outside.add(name)
        for tensor in made:
            # an operator in place may change a parameter, which is no activation
            if tensor.untyped_storage()._cdata not in given:
                self._follow(tensor.untyped_storage())
        workspace = workspace_bytes(func, read)
        for level in now.levels if workspace else ():
            level.peak = max(level.peak, level.now + workspace)
        now.operators.append((func.overloadpacket.__name__, now.kept.now))
        now.work += work_of(func, args, output, read, made)
        if not self._weights.isdisjoint(given) and may_multiply(func):
            self._uncounted[qualified_name(func)] = None
        if self._without_graph and now.backward and now.block is None:
            self._run_again |= {
                self._without_graph[key] for key in given & self._without_graph.keys()
            }

    def look_up(self, name: str, weight: Tensor, ids: Tensor) -> Tensor:
        """Look up rows of an embedding, and count them."""
        self._rows[name] += ids.numel() * weight.shape[1] * weight.itemsize
        self._looked_up = weight.untyped_storage()._cdata
        rows = F.embedding(ids, weight)
        self._looked_up = None
        return rows

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._records or nbytes == 0:
            return
        record = self._records[key] = _Record(nbytes, self._now)
        self._all.append(record)
        record.end = _End(storage, self._ended.append)
        record.end.key, record.end.record = key, record
        for level in self._now.levels:
            level.now += nbytes
            level.peak = max(level.peak, level.now)

    def _record_of(self, tensor: Tensor) -> _Record | None:
        return self._records.get(tensor.untyped_storage()._cdata)

    def _settle(self) -> None:
        """See Note [Ends are recorded, not handled]."""
        while self._ended:
            end = self._ended.popleft()
            record, now = end.record, self._now
            before = record.is_there
            if end.key is not None:
                del self._records[end.key]
                record.alive, record.forgotten = False, now
            else:
                record.saved -= Counter([end.holder])
                record.released.append((end.holder, now))
            for level, was, still in zip(
                now.levels, before, record.is_there, strict=True
            ):
                level.now -= record.nbytes * (was and not still)

    # what autograd keeps

    def _pack(self, tensor: Tensor) -> Tensor:
        """See Note [Saved tensors have placeholders]."""
        self._settle()
        now = self._now
        holder = None if now.backward else now.block
        if holder is not None:
            # recomputing goes as far as the last save, of a parameter too
            now.redone_peak = max(now.redone_peak, now.kept.peak)
        record = self._record_of(tensor) if tensor.is_meta else None
        if record is None:
            # a parameter, or a view of one
            return tensor
        end = record.placeholders.get(holder)
        storage = end() if end is not None else None
        if storage is None:
            storage = torch.UntypedStorage(record.nbytes, device="meta")
            end = record.placeholders[holder] = _End(storage, self._ended.append)
            end.record, end.holder = record, holder
            record.saved[holder] += 1
        self._busy = True
        placeholder = torch.empty(0, dtype=tensor.dtype, device="meta").set_(
            storage, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        self._busy = False
        return placeholder

    def _unpack(self, placeholder: Tensor) -> Tensor:
        self._settle()
        if self._now.kept_at_unpack is None:
            self._now.kept_at_unpack = self._now.kept.now
        return placeholder

    # segments

    def _before(self, index: int, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._settle()
        if self._follows(index):
            self._segments.pop()
            self._segments[-1].absorb(self._now)
        self.begin(_Open(index, backward=False))
        self._entered = torch.autograd._get_sequence_nr()
        if index not in self._samples:
            self._busy = True
            given = {**kwargs, **dict.fromkeys(CACHES & kwargs.keys())}
            self._samples[index] = BlockSample(_detached(args), _detached(given))
            self._busy = False
        by_position = {id(arg) for arg in args if isinstance(arg, Tensor)}
        nested = [arg for arg in args if not isinstance(arg, Tensor)]
        by_position -= {id(tensor) for tensor in tensors_in((nested, kwargs))}
        for tensor in tensors_in((args, kwargs)):
            record = self._record_of(tensor)
            self._now.inputs.append(record)
            if record is not None:
                record.inputs.append((self._now, id(tensor) in by_position))
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self._leave_backward, index))

    def _follows(self, index: int) -> bool:
        """Tell whether only the step from one block to the next has run since."""
        if len(self._segments) < 2 or self._now.block is not None:
            return False
        return (
            self._segments[-2].block == index - 1
            and self._lists[index - 1] == self._lists[index]
        )

    def _after(self, index: int, _module: nn.Module, _args: Any, output: Any) -> None:
        self._settle()
        forward = self._now
        if (sample := self._samples[index]).output is None:
            self._busy = True
            self._samples[index] = replace(sample, output=_detached(output))
            self._busy = False
        for tensor in tensors_in(output):
            forward.outputs.append(self._record_of(tensor))
            node = tensor.grad_fn
            if node is not None and node._sequence_nr() >= self._entered:
                self._with_graph.add(index)
                node.register_prehook(partial(self._enter_backward, index, forward))
        self.begin(_Open(None, backward=False))

    def _enter_backward(self, index: int, forward: _Open, _gradients: Any) -> None:
        if forward.undone_in is None:
            self.begin(_Open(index, backward=True))
            forward.undone_in = self._now

    def _leave_backward(self, index: int, _gradients: Any) -> None:
        if self._now.block == index:
            self.begin(_Open(None, backward=True))

    def _skipped(self, ran: _Open) -> None:
        self._copies.append((self._now, ran))

    def _arrived(self, name: str, param: Tensor) -> None:
        self._settle()
        gradient, param.grad = param.grad, None
        if gradient is not None:
            now, widened = self._now, self._now.widened
            now.gradients.append((name, gradient.nbytes))
            now.first.now += gradient.nbytes
            if gradient.itemsize == 2:
                # for a moment it is there in both
                widened.now += 2 * gradient.nbytes
                widened.peak = max(widened.peak, widened.now)
            else:
                widened.now += gradient.nbytes

    # the result

    def result(self) -> TracedStep:
        """Return what was recorded, blocks numbered in the order of first use."""
        self._settle()
        order = list(dict.fromkeys((*self._samples, *range(len(self._blocks)))))
        number: dict[int | None, int] = {old: new for new, old in enumerate(order)}
        segments = [s for s in self._segments if s.merged_into is None]
        for index, segment in enumerate(segments):
            segment.index = index
        self._fill_in(segments)
        for segment in segments:
            if segment.undone_in is not None:
                # it is computed again only then
                segment.redone_peak += segment.undone_in.kept_at_unpack or 0
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
        rows = {
            name: nbytes
            for name, nbytes in self._rows.items()
            if self._model.get_parameter(name).untyped_storage()._cdata
            not in self._read_whole
        }
        outside = frozenset(self._read_outside)
        uncounted = tuple(self._uncounted)
        return TracedStep(trace, samples, uncounted, self.drew, rows, outside)

    def _fill_in(self, segments: Sequence[_Open]) -> None:
        """Give skipped blocks what the block of their kind has shown."""
        after = dict(zip(segments, segments[1:], strict=False))
        made: defaultdict[_Open, list[_Record]] = defaultdict(list)
        for record in self._all:
            made[record.made].append(record)
        for skipped, ran in self._copies:
            assert skipped.block is not None and ran.block is not None
            names = self._blocks[ran.block][0], self._blocks[skipped.block][0]
            moved: dict[_Open | None, _Open | None] = {}
            for theirs, own in (ran, skipped), (ran.undone_in, skipped.undone_in):
                if theirs is not None and own is not None:
                    own.copy(theirs, *names)
                    moved |= {theirs: own, after.get(theirs): after.get(own)}
            self._all += _copied(made[ran], skipped, ran, moved)


def _tables(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]
) -> Iterator[tuple[str, nn.Embedding]]:
    """Frozen embeddings outside of blocks whose weights have no other owner."""
    inside = tuple(f"{name}." for name, _ in blocks)
    every = model.named_parameters(remove_duplicate=False)
    owners = Counter(id(param) for _, param in every)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and not f"{name}.".startswith(inside):
            if owners[id(module.weight)] == 1 and not module.weight.requires_grad:
                yield name, module


def _copied(
    records: Sequence[_Record],
    skipped: _Open,
    ran: _Open,
    moved: Mapping[_Open | None, _Open | None],
) -> Iterator[_Record]:
    """Storages that `ran` made, as `skipped` would have; segments by `moved`. What came
    in and goes out is saved and released as there."""

    def counterpart(segment: _Open | None) -> _Open | None:
        final = segment.final if segment is not None else None
        return moved.get(final, final)

    def carried(released: Iterable[_Released]) -> list[_Released]:
        return [
            (skipped.block if holder == ran.block else holder, segment)
            for holder, where in released
            if (segment := counterpart(where)) is not None
        ]

    for record in records:
        if record not in ran.outputs:
            end, released = counterpart(record.forgotten), carried(record.released)
            alive = record.alive
            yield _Record(record.nbytes, skipped, alive, end, released=released)
    given, theirs = skipped.inputs + skipped.outputs, ran.inputs + ran.outputs
    for own, other in zip(given, theirs, strict=True):
        if own is not None and other is not None:
            own.released += carried(r for r in other.released if r[0] == ran.block)


def _fate(
    record: _Record, num_segments: int, number: Mapping[int | None, int]
) -> tuple[int, int, tuple[Save, ...], bool]:
    """Return when a storage was made, when forgotten, what saved it, and whether it is
    large."""
    forgotten = record.forgotten
    end = forgotten.final.index if forgotten is not None else num_segments
    saves = {
        Save(segment.final.index, number.get(block))
        for block, segment in record.released
    }
    inputs: dict[tuple[int, int | None], bool] = {}
    for forward, by_position in record.inputs:
        if forward.undone_in is not None:
            key = forward.undone_in.index, number.get(forward.block)
            # another reference to it stays on the device
            inputs[key] = inputs.get(key, True) and by_position
    saves |= {
        Save(*key, as_input=True, by_position=each) for key, each in inputs.items()
    }
    ordered = sorted(
        saves, key=lambda s: (s.segment, -1 if s.block is None else s.block, s.as_input)
    )
    return record.made.final.index, end, tuple(ordered), record.large


def _detached(value: Any) -> Any:
    """Detach a structure of tensors from autograd's graph; keeps `requires_grad`."""

    def detached(tensor: Tensor) -> Tensor:
        # positions and masks decide what a kernel does: zeros are packed rows of one token
        seen = value_of(tensor)
        own = empty_like(tensor) if seen is None else seen.detach().clone()
        return own.requires_grad_(tensor.requires_grad)

    return map_tensors(value, detached)
