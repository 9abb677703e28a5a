"""The values that flow from layout to plan to runtime. Frozen, no behaviour beyond arithmetic.

`Counters` alone changes: what a session has moved.

Words are those of DESIGN.md: a *chunk* is the unit of residency and transfer, a
*block* the unit of compute, a *slot* a device buffer that paged chunks share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from operator import add
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # the command line checks a YAML without it
    import torch

IN_FLIGHT = 2
"""Chunks of gradients between device and host: sent, staged or packed."""

STATE_ALIGNMENT_BYTES = 16
"""Tensors of optimizer state begin at multiples of it, as wide as the widest load of a
kernel."""

ADAM_MOVED_BYTES = 7
"""Bytes that AdamW moves for each byte it updates, moments in the weights' dtype: reads
weight, gradient and two moments, writes all but the gradient. Other work on them is
charged by its bytes."""


class Placement(Enum):
    """Places of the parts of a chunk. The members say which memory is in use."""

    RESIDENT = "resident"
    """Weights, gradients and optimizer state on the device."""
    OPTIMIZER_OFFLOADED = "host-state"
    """Weights on the device; a host copy, gradients and optimizer state on the host."""
    PARAM_OFFLOADED = "paged"
    """All of it on the host; the weights pass through a slot while a block computes."""
    HOST_LOOKUP = "rows"
    """A frozen embedding on the host, which looks up what a micro-batch asks for."""

    @property
    def on_host(self) -> bool:
        """True when the host pool holds the chunk's bytes and is their truth."""
        return self is not Placement.RESIDENT


class Update(Enum):
    """Device that updates weights whose optimizer state is on the host."""

    DEVICE = "device"
    """On the device that computes: state comes with their next fetch and goes back changed, and
    the optimizer of the plain run does it."""
    HOST = "host"
    """On the host, where their state is."""


class Encoding(Enum):
    """Encodings of the numbers of a packed weight."""

    E2M1 = "two e2m1 numbers a byte, under uint8 exponents"
    E4M3 = "an e4m3 number a byte, under fp32 factors"


@dataclass(frozen=True)
class Form:
    """The storage form of a weight: rows of codes, all its matrices one below the other.

    Attributes:
        encoding: Says what a code and a scale are.
        block: Rows and columns that share a scale; those at the end may be cut off.
        transposed: The unpacked matrices have the rows as columns.
    """

    encoding: Encoding
    block: tuple[int, int]
    transposed: bool = False

    def matrix(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of one matrix of codes, for the shape of the weight."""
        rows, columns = shape[-2:]
        return (columns, rows) if self.transposed else (rows, columns)

    def stored(self, shape: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of all codes and of all scales of a weight."""
        _, columns = self.matrix(shape)
        rows = math.prod(shape) // columns
        halves = 2 if self.encoding is Encoding.E2M1 else 1
        blocks = -(-rows // self.block[0]), -(-columns // self.block[1])
        return (rows, columns // halves), blocks

    def scale_rows(self, first: int, stop: int) -> slice:
        """Rows of scales for these rows of codes, which are a piece."""
        return slice(first // self.block[0], -(-stop // self.block[0]))

    def pieces(
        self, shape: Sequence[int], rows: int, numel: int
    ) -> Iterator[tuple[int, int]]:
        """Cut the first `rows` rows of codes into first and last ones of pieces.

        A piece has about `numel` elements at most. It lies in one matrix if that is
        transposed, and has whole blocks or lies in one row of them.
        """
        height, columns = self.matrix(shape)
        block, step = self.block[0], max(1, numel // columns)
        step = step // block * block or step
        wall = height if self.transposed else rows
        for above in range(0, rows, wall):
            below = min(above + wall, rows)
            for first in range(above, below, block if step < block else wall):
                stop = min(first + block, below) if step < block else below
                for start in range(first, stop, step):
                    yield start, min(start + step, stop)


@dataclass(frozen=True)
class TensorSpec:
    """One parameter of a chunk: its full name from the model root, and its first byte
    inside the chunk, a multiple of the alignment; its `form` in host memory if it is
    packed there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    form: Form | None = None

    # cached: each step asks
    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_16_bit(self) -> bool:
        """True for the dtypes that an fp32 master is kept of."""
        return self.dtype.is_floating_point and self.dtype.itemsize == 2


@dataclass(frozen=True)
class Chunk:
    """Parameters laid out back to back that move together, in registration order; all
    of them trained, or none. `index` is the position in `Layout.chunks`, `block` None
    for weights outside blocks; `nbytes` has the alignment gaps in it. Those of an `adapter`
    stay on the device. `rows_bytes` are those of the rows that a micro-batch takes of a
    frozen embedding which is only looked up, so that the host can do it; otherwise 0.
    `stored` has the tensors as they lie in host memory, where some are packed there."""

    index: int
    block: int | None
    trainable: bool
    tensors: tuple[TensorSpec, ...]
    nbytes: int
    adapter: bool = False
    rows_bytes: int = 0
    stored: Chunk | None = None

    @property
    def in_pool(self) -> Chunk:
        """The chunk as it lies in host memory and crosses the link."""
        return self.stored or self

    # cached: a search asks thousands of times
    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of the parameters alone, without alignment gaps."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def payload_16_bit_bytes(self) -> int:
        """The trained tensors that an fp32 master is kept of."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor.is_16_bit)

    def has_masters(self, fp32_master: bool) -> bool:
        """True when any of its parameters is updated through an fp32 master."""
        return fp32_master and self.payload_16_bit_bytes > 0

    @property
    def pageable(self) -> bool:
        """Only a block's chunks page: fused losses read the head without calling it."""
        return self.block is not None and not self.adapter


@dataclass(frozen=True)
class Block:
    """One repeated layer: its name from the model root and the chunks it reads."""

    index: int
    name: str
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Division of the parameters of a model into chunks.

    Attributes:
        blocks: In the order of use.
        chunks: Of blocks first, in block order, then of their adapters, then one for each
            parameter outside the blocks that trains or is only looked up.
        fixed_frozen_bytes: Frozen weights and buffers that never leave the device, less
            what several weights share, so that sums of weights count it once.
        fixed_trainable_bytes: Trainable weights that never leave it, nor does their state
            (other adapters), of `num_fixed_trainable` parameters.
    """

    blocks: tuple[Block, ...]
    chunks: tuple[Chunk, ...]
    fixed_frozen_bytes: int
    fixed_trainable_bytes: int
    num_fixed_trainable: int = 0

    @cached_property
    def pageable(self) -> tuple[Chunk, ...]:
        return tuple(chunk for chunk in self.chunks if chunk.pageable)

    @cached_property
    def chunk_of(self) -> dict[str, int]:
        """The chunk of each parameter, by its name."""
        chunks = self.chunks
        return {spec.name: chunk.index for chunk in chunks for spec in chunk.tensors}


class Policy(Enum):
    """The fate of the tensors that a block saves for backward."""

    KEEP = "keep"
    """Saved tensors stay on the device."""
    RECOMPUTE = "recompute"
    """Only the block's inputs stay; backward computes the rest again."""
    SWAP = "swap"
    """Saved tensors go to the host in forward and come back for backward."""
    SWAP_INPUT = "swap-input"
    """As RECOMPUTE, and the inputs passed by position go to the host meanwhile."""

    def __init__(self, value: str) -> None:
        # plain attributes: a search asks thousands of times
        self.recomputes = value in ("recompute", "swap-input")
        """True when backward computes the block again."""
        self.swaps = value in ("swap", "swap-input")
        """True when tensors of the block wait on the host for backward."""


SMALLEST_SWAP_BYTES = 4096
"""Storages below this stay on the device: a copy costs more than their room."""


@dataclass(frozen=True)
class Moved:
    """Bytes of activations that a micro-batch moves, for each block.

    A storage that several blocks swap leaves with the first of them, into whose region
    on the host it goes, and comes back for the last, unless it is still there.
    """

    out: tuple[int, ...]
    back: tuple[int, ...]


@dataclass(frozen=True)
class Knobs:
    """The paper's four knobs, by its names.

    Attributes:
        n_persist: Pageable chunks that stay on the device.
        n_buffer: Slots.
        n_swap: Blocks that send activations to the host: what they save or, where they
            recompute as well, their inputs.
        n_checkpoint: Blocks that recompute their activations.
    """

    n_persist: int
    n_buffer: int
    n_swap: int
    n_checkpoint: int


@dataclass(frozen=True)
class Plan(Knobs):
    """Instructions to the runtime, decided once: all that follows from the knobs.

    Attributes:
        placements: Of each chunk; `policies` of each block.
        origin: What decided the knobs, for the report.
        shards: Ranks that each keep and fetch one shard of every host-kept chunk, all
            those of a node; 1 where each rank fetches whole chunks.
        swap_bytes: For each block what it is expected to send to the host in a
            micro-batch; what is missing is found out in the first one.
        gradient_order: Chunks in the order in which backward is done with them; what is
            missing comes last. Only several ranks ask for it.
        update: Where weights with state on the host are updated.
        in_pieces: Operands of an update come a piece of a chunk ahead, not a chunk.
        staging_bytes: Device memory through which they come, and sums of gradients; the
            engine takes more where that is too little.
        on_disk: Frozen chunks that pass through slots and lie in files, not in host
            memory; they are read ahead into `disk_buffers` buffers.
    """

    placements: tuple[Placement, ...]
    policies: tuple[Policy, ...]
    origin: str
    shards: int = 1
    swap_bytes: tuple[int, ...] = ()
    gradient_order: tuple[int, ...] = ()
    update: Update = Update.DEVICE
    in_pieces: bool = False
    staging_bytes: int = 0
    on_disk: tuple[int, ...] = ()
    disk_buffers: int = 3

    @property
    def paged(self) -> tuple[int, ...]:
        """Chunk indices that pass through slots, in the order of use."""
        pairs = enumerate(self.placements)
        return tuple(index for index, at in pairs if at is Placement.PARAM_OFFLOADED)

    @cached_property
    def away(self) -> tuple[int, ...]:
        """Chunk indices whose weights the device does not have between two passes."""
        pairs = enumerate(self.placements)
        away = Placement.PARAM_OFFLOADED, Placement.HOST_LOOKUP
        return tuple(index for index, at in pairs if at in away)

    @cached_property
    def mode(self) -> str:
        """A is resident, B keeps a host copy that a node's ranks share, C shards it."""
        if not any(placement.on_host for placement in self.placements):
            return "A"
        return "C" if self.shards > 1 else "B"


@dataclass(frozen=True)
class Work:
    """Work of operators, enough to say how long they take on some device: the
    operations of matrix products in 16-bit types and in fp32 and of fused attention
    in 16 bits, the bytes that all others read and write, and how many kernels they
    launch."""

    flops_16: int = 0
    flops_32: int = 0
    attention_16: int = 0
    moved_bytes: int = 0
    num_kernels: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*map(add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class Segment:
    """A stretch of forward or backward: one block, or what runs between blocks.

    Bytes are those of activations: parameters and gradients of parameters are not in
    them unless stated. Peaks are relative to the start of the segment.

    Attributes:
        block: Index of the block, None for what runs outside blocks.
        peak_bytes: Highest rise, saved tensors kept. Gradients of parameters count
            from their making to their accumulation.
        dropped_peak_bytes: Forward of a block: the same when nothing is saved.
        swapped_peak_bytes: Forward of a block: the same when only storages below
            `SMALLEST_SWAP_BYTES` are.
        redone_peak_bytes: Forward of a block: highest rise when backward computes it
            again, up to the last saved tensor.
        first_peak_bytes: Backward: the peak with every gradient of the segment that
            has been made, as in the first micro-batch.
        widened_peak_bytes: Backward: the same where each gradient of 16 bits becomes one
            of fp32 as it arrives.
        gradients: Names and bytes of the parameters' gradients it makes, in order.
        operators: Name of each operator and the rise after it, saved tensors kept.
    """

    block: int | None
    backward: bool
    work: Work
    peak_bytes: int
    dropped_peak_bytes: int = 0
    swapped_peak_bytes: int = 0
    redone_peak_bytes: int = 0
    first_peak_bytes: int = 0
    widened_peak_bytes: int = 0
    gradients: tuple[tuple[str, int], ...] = ()
    operators: tuple[tuple[str, int], ...] = ()

    @property
    def peak_operator(self) -> str:
        """Name of the operator at which the segment is highest, empty without any."""
        return max(self.operators, key=lambda ran: ran[1], default=("", 0))[0]


@dataclass(frozen=True)
class Save:
    """Why autograd keeps bytes beyond the segment in which the model forgets them.

    Attributes:
        segment: Index of the segment in which the reason ends.
        block: Whose saved tensor or input it is, None outside blocks.
        as_input: True for what only a recomputed block keeps: its inputs.
        by_position: Of an input, that it is a positional argument and nothing else.
    """

    segment: int
    block: int | None
    as_input: bool = False
    by_position: bool = False


@dataclass(frozen=True)
class Lifetime:
    """Activation bytes that outlive the segment that made them, of all tensors with one
    fate: the model's own references end in segment `forgotten`, autograd keeps them for
    `saves`. Each of them is `large`, of at least `SMALLEST_SWAP_BYTES`, or none."""

    made: int
    forgotten: int
    saves: tuple[Save, ...]
    nbytes: int
    large: bool = True


@dataclass(frozen=True)
class Trace:
    """One micro-batch of a model, forward and then backward, run without weights.

    `blocks` are names in the order of first use, unused ones last; indices of blocks are
    positions in it.
    """

    segments: tuple[Segment, ...]
    lifetimes: tuple[Lifetime, ...]
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class World:
    """Processes that train together, one device each: all of them, and those of one
    node, which share its host memory; every node has as many."""

    size: int = 1
    local_size: int = 1

    @property
    def num_nodes(self) -> int:
        return self.size // self.local_size


ALONE = World()
"""One process."""


@dataclass(frozen=True)
class Generation:
    """Sequences that a rank samples from the model between two steps, without gradients.

    Attributes:
        rows: How many, before each of them is trained with.
        prompt_tokens: Of each, at most; so are `new_tokens`.
        row_bytes: Of the device, for one of them: its cache and what a forward takes.
        cache_bytes: Keys and values of one of them at its end.
        away_bytes: As `row_bytes`, where they wait on the host; 0 where they cannot.
        prefill: Work of all prompts, for each block and last outside of them.
        decode: The same of one more token of all of them, the last one.
        amid_step: Whether gradients of a step that has begun may be there.
        steps: Optimizer steps from one time to the next.
    """

    rows: int
    prompt_tokens: int
    new_tokens: int
    row_bytes: int
    cache_bytes: int
    prefill: tuple[Work, ...]
    decode: tuple[Work, ...]
    away_bytes: int = 0
    amid_step: bool = False
    steps: float = 1.0


@dataclass(frozen=True)
class Served:
    """Weights that go to a server, which samples in the place of the model that trains.

    Attributes:
        nbytes: Of all of them, each time.
        visiting_bytes: Of the device, for the largest that are there at once.
        amid_step: As in `Generation`; so is `steps`.
        merged: Adapters are merged into them first, which changes them.
    """

    nbytes: int
    visiting_bytes: int
    amid_step: bool = False
    steps: float = 1.0
    merged: bool = False


@dataclass(frozen=True)
class Workload:
    """Settings of a step in the YAML, beside the model and its batch.

    Attributes:
        accumulation: Micro-batches of an optimizer step.
        tokens: Tokens of a micro-batch, padding included.
        fp32_master: bf16 weights on the host are updated through fp32 masters.
        state_bytes: Of each trained parameter the bytes of the tensors of its optimizer
            state, by its name; None for those of AdamW.
        managed_bytes: What of them lies in managed memory where a device updates it.
        update_copies: Copies of all the weights that a device updates at once which
            that takes on top.
        update_parameter_copies: The same for the largest single one of them.
        update: Where weights with state on the host are updated.
        host_can_update: Whether the device does that, and AdamW on the host could.
        host_is_exact: Whether it would give the device's bits: the device is the CPU.
        elementwise: Whether the optimizer updates each element of a parameter
            independently of others.
        eval_ratio: Tokens of an evaluation batch over those of a micro-batch; 0 without
            evaluation.
        generation: What the model samples between two steps; None for nothing.
        served: What a server is sent that samples instead; None without one.
        loader_bytes: Batches that the dataloader of each rank holds on the host.
        mapped_bytes: Weights that are pages of their files until they move.
        world: Who trains together; the rest is of one rank.
    """

    accumulation: int = 1
    tokens: int = 0
    fp32_master: bool = False
    state_bytes: Mapping[str, tuple[int, ...]] | None = None
    managed_bytes: Mapping[str, int] = field(default_factory=dict)
    update_copies: float = 0.0
    update_parameter_copies: float = 0.0
    update: Update = Update.DEVICE
    host_can_update: bool = False
    host_is_exact: bool = False
    elementwise: bool = True
    eval_ratio: float = 0.0
    generation: Generation | None = None
    served: Served | None = None
    loader_bytes: int = 0
    mapped_bytes: int = 0
    world: World = ALONE

    def on_host(self) -> Workload:
        """This step with weights updated on the host, where their state is there."""
        return replace(
            self, update=Update.HOST, host_can_update=False, host_is_exact=False
        )


def main_grads_in_fp32(
    fp32_master: bool, accumulates: bool, world: World, update: Update
) -> bool:
    """Tell whether gradients of weights with masters add up in fp32: where several are
    added, and where the host reads them where they lie."""
    return fp32_master and (accumulates or world.size > 1 or update is Update.HOST)


@dataclass(frozen=True)
class Hardware:
    """Rates and memory of one machine, measured or looked up. Rates are per second.

    Attributes:
        source: Where the figures come from, for people.
        host_bytes: Memory of the host that may be used.
        unseen_bytes: Taken on the device by what no trace sees: context, workspaces
            of kernels, rounding of the allocator.
        unneeded_bytes: By how much that was lowered since training showed it takes less,
            which an evaluation did not show.
        desktop_bytes: Left free beside it, for what else a consumer card shows and for
            what an allocator wastes near the brim.
        flops_16: Matrix products in bf16, achieved; `flops_32` those in fp32, and
            `attention_16` what fused attention achieves in bf16.
        memory_bytes_s: Device memory, achieved.
        kernel_s: Shortest time between two kernels.
        fetch_bytes_s: Host to device, alone; `offload_bytes_s` is the other way.
        fetch_both_bytes_s: The same while the other way is busy.
        adam_bytes_s: Host AdamW: bytes of weights updated, in the dtype that it updates.
        overlaps: Whether copies run beside compute.
        link: Name of the link between host and device, if known.
        capability: CUDA's of the device, 75 for 7.5; 0 where it is not known.
        gather_bytes_s: All-gather between the ranks of a node: bytes of the result on
            each rank; 0 with one rank.
        reduce_bytes_s: Reductions to one after the other of them: bytes on each rank.
        across_bytes_s: All-reduce between nodes, bytes of its input; 0 with one node.
        shares_link: Whether ranks exchange over the link between host and device.
        disk_bytes_s: Large direct reads of the disk that frozen weights may lie on, of
            all ranks of a node together; 0 without one.
        one_memory: Whether the device has no memory of its own: `device_bytes` and
            `host_bytes` are the same memory, and the lower of them is all there is.
    """

    name: str
    source: str
    device_bytes: int
    host_bytes: int
    unseen_bytes: int
    flops_16: float
    flops_32: float
    attention_16: float
    memory_bytes_s: float
    kernel_s: float
    fetch_bytes_s: float
    offload_bytes_s: float
    fetch_both_bytes_s: float
    offload_both_bytes_s: float
    adam_bytes_s: float
    overlaps: bool = True
    link: str = ""
    gather_bytes_s: float = 0.0
    reduce_bytes_s: float = 0.0
    across_bytes_s: float = 0.0
    desktop_bytes: int = 0
    unneeded_bytes: int = 0
    capability: int = 0
    shares_link: bool = False
    disk_bytes_s: float = 0.0
    one_memory: bool = False


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of a block, or of what is outside them all, in one micro-batch; backward
    takes none where nothing trains.

    Attributes:
        recompute_s: What a checkpoint around it adds to forward and backward; None where
            it was not timed: as much as forward.
        queue_forward_s: Of the thread that queues forward, part of it or all of it.
        queue_backward_s: Of the one that queues backward.
        queue_recompute_s: Of the one that queues what a checkpoint adds.
    """

    forward_s: float
    backward_s: float = 0.0
    recompute_s: float | None = None
    queue_forward_s: float = 0.0
    queue_backward_s: float = 0.0
    queue_recompute_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward, nothing recomputed."""
        return self.forward_s + self.backward_s

    @property
    def queue_s(self) -> float:
        """Seconds of the thread that queues both."""
        return self.queue_forward_s + self.queue_backward_s


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of compute for one micro-batch, nothing waiting for a copy.

    Of each block, backward without recomputation; of all that runs outside blocks; of
    the optimizer step of what lives on the device. The blocks' are `measured` on the
    device or else computed. Those of `queue` are the calling thread's, as in
    `BlockSeconds`; none where they are not known.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    outside_forward_s: float
    outside_backward_s: float
    update_s: float
    measured: bool
    recompute_s: tuple[float, ...] = ()
    queue_forward_s: tuple[float, ...] = ()
    queue_backward_s: tuple[float, ...] = ()
    queue_recompute_s: tuple[float, ...] = ()

    @property
    def again_s(self) -> tuple[float, ...]:
        """Seconds of recomputing each block."""
        return self.recompute_s or self.forward_s


@dataclass(frozen=True)
class Budget:
    """Memory that a plan may use. `reserve_bytes` of the device must stay free; the
    host's are for the pinned pool and what trains on it; on a disk frozen weights may lie
    for which the host has no room."""

    device_bytes: int
    reserve_bytes: int
    host_bytes: int
    disk_bytes: int = 0

    @property
    def usable_bytes(self) -> int:
        """Device bytes that the plan's peak may reach."""
        return self.device_bytes - self.reserve_bytes


PAGING_GAIN = 0.05
"""Share of a step that paging must save where everything fits on the device: less is
within what a prediction is wrong by."""


@dataclass
class Counters:
    """Bytes that a session has moved so far. Each mover counts here.

    Attributes:
        fetched_bytes: Weights, sums of gradients and optimizer state, to the device.
        offloaded_bytes: Gradients to the host, weights and optimizer state that were
            updated on the device; activations are `swapped`.
        disk_bytes: Frozen weights, from files to host memory.
        disk_wait_s: Time for which the calling thread has waited for them.
        num_fetches: Chunks that went into slots.
        num_misses: Those of them that were not there when their block opened.
        gathered_bytes: Results of all-gathers.
        reduced_bytes: Inputs of reduce-scatters.
    """

    fetched_bytes: int = 0
    offloaded_bytes: int = 0
    num_fetches: int = 0
    num_misses: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    num_gathers: int = 0
    num_reduces: int = 0
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    disk_bytes: int = 0
    disk_wait_s: float = 0.0
