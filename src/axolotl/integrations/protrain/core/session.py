"""Composition root: opens a model for paged training and closes it again.

Wires layout, plan, runtime and optimizer together and holds what must be undone.
The model's modules, names and parameters stay the objects they were.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from .layout import Schedule, leaf_chunk, padded_bytes, slot_bytes
from .layout.tensors import model_bindings
from .optim import (
    GradientOffload,
    GradientReduction,
    HostChunk,
    PagedAdamW,
    ShardedChunk,
    SharedMemory,
    optimizer_bytes,
    parts_chunk,
)
from .runtime import (
    Arena,
    Carrier,
    Device,
    HostWorker,
    Lockstep,
    Pager,
    Ranks,
    Recompute,
    Removable,
    Residence,
    Slot,
    Swap,
    SwapBlock,
    attach_block,
    attach_entry,
    attach_state_dict,
    drop_ended_backward,
)
from .types import Chunk, Layout, Placement, Plan, Policy


@dataclass(frozen=True)
class Options:
    """How to run a plan.

    Attributes:
        poison: Fill a slot with NaN bytes when its chunk leaves.
        fp32_master: Update bf16 weights through fp32 masters on the host.
        cpu_optimizer: Host AdamW, `torch` or `deepspeed`.
    """

    poison: bool = False
    fp32_master: bool = False
    cpu_optimizer: str = "torch"


@dataclass(frozen=True)
class Measured:
    """Counters since the session was opened; bytes and seconds."""

    fetched_bytes: int
    offloaded_bytes: int
    num_fetches: int
    num_misses: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    stall_s: float
    device_peak_bytes: int
    device_placed_bytes: int
    device_optimizer_bytes: int
    host_arena_bytes: int
    host_optimizer_bytes: int
    host_swap_bytes: int
    num_gathers: int = 0
    num_reduces: int = 0
    gathered_bytes: int = 0
    reduced_bytes: int = 0


class Session:
    """A model under a plan, from construction to `close`.

    Construction moves the model: host-kept chunks into the arena, the rest to the
    device. Between, the model is trained as usual with the optimizer that
    `wrap_optimizer` returns. `close` gives the model back as plain host tensors.

    Args:
        model: On the host; `requires_grad` final, not wrapped.
        layout: From `build_layout(model)`.
        plan: What to run.
        device: Where to run it.
        options: How to run it.
        ranks: Who trains together; all of them then open, step and close alike. What
            trains on the device is DistributedDataParallel's to average.
        absent: Names of frozen parameters that this rank has in name only; another of
            the node has their bytes.

    Raises:
        ValueError: The plan shards chunks over other ranks than a node has.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        plan: Plan,
        device: Device,
        options: Options = Options(),  # noqa: B008 - a frozen value
        ranks: Ranks | None = None,
        absent: Collection[str] = (),
    ) -> None:
        if plan.shards not in (1, ranks.world.local_size if ranks else 1):
            raise ValueError(
                f"{plan.shards} shards are not one for each rank of a node"
            )
        self._ranks = ranks
        self.model = model
        self.layout = layout
        self.plan = plan
        self.device = device
        self._options = options
        self._params = dict(model.named_parameters())
        self._modules = dict(model.named_modules())
        self._optimizer: torch.optim.Optimizer | None = None
        self._stale: set[int] = set()
        self._closed = False
        self._watched = False
        self._placed_bytes = 0
        self._handles: list[Removable] = []
        self._state_handles: list[Removable] = []
        self._running: list[Recompute | SwapBlock] = []
        self._pinned: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._slots: list[Slot] = []
        self._swap: Swap | None = None
        self._host_chunks: list[HostChunk | ShardedChunk] = []
        self._worker = HostWorker(device)
        self._arena = Arena(ranks=ranks, shards=plan.shards)
        self._gradient_arena = Arena(ranks=ranks)
        self._masters = Arena(ranks=ranks)
        self._moments = Arena(ranks=ranks), Arena(ranks=ranks)
        self._carrier = Carrier(device, ranks if plan.shards > 1 else None)
        self._residence = Residence(
            model,
            self._arena,
            device,
            announce=self._attach_state,
            ranks=ranks,
            holders=ranks.holders(absent) if ranks else None,
        )
        self._gradients = self._new_gradients()
        self._pager = self._build_pager()
        try:
            self._open()
            self._pager = self._build_pager()
            self._attach()
            self._placed_bytes = device.used_bytes()
        except BaseException:
            # an interrupt too must leave a plain model; raised again as it is
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def host_kept(self) -> frozenset[str]:
        """Every name of every parameter that is on the host: none of DDP's business."""
        names = {
            spec.name
            for chunk in self.layout.chunks
            if self.plan.placements[chunk.index].on_host
            for spec in chunk.tensors
        }
        kept = {id(p) for name, p in self._params.items() if name in names}
        every = self.model.named_parameters(remove_duplicate=False)
        return frozenset(name for name, p in every if id(p) in kept)

    def host_weight(self, name: str) -> Tensor:
        """The true value of a host-kept parameter, whatever its slot holds."""
        self.settle()
        for chunk in self.layout.chunks:
            for spec in chunk.tensors:
                if spec.name == name and self.plan.placements[chunk.index].on_host:
                    return self._arena.tensor(chunk.index, spec)
        raise KeyError(name)

    def wrap_optimizer(self, plain: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer to train with: `plain` itself if all state is on the device.

        Raises:
            ConfigError: Host-kept state needs AdamW.
        """
        if not self._host_chunks:
            self._optimizer = plain
            return plain
        names = {id(p): name for name, p in self._params.items()}
        self._optimizer = PagedAdamW(
            plain,
            names,
            self._host_chunks,
            self._gradients,
            self.device,
            self._worker,
            self._options.cpu_optimizer,
            self._before_update,
            self._ranks,
        )
        return self._optimizer

    def begin_micro_batch(self, synchronises: bool) -> None:
        """A micro-batch of training begins; several ranks have to say so.

        Args:
            synchronises: It is the last one of a step, after which gradients are
                averaged over the ranks.
        """
        if isinstance(self._gradients, GradientReduction):
            self._gradients.begin_micro_batch(synchronises)

    def clip_grad_norm(self, max_norm: float) -> Tensor | None:
        """Clip over device and host gradients; None if the plain way sees them all."""
        if not isinstance(self._optimizer, PagedAdamW):
            return None
        self._pager.close_any()
        return self._optimizer.clip_grad_norm(list(self._params.values()), max_norm)

    @property
    def movable(self) -> frozenset[int]:
        """Chunks that `replan` may move to the host.

        What trains may only if the optimizer has a side there from the start.
        """
        trains = isinstance(self._optimizer, PagedAdamW)
        return frozenset(
            c.index for c in self.layout.chunks if trains or not c.trainable
        )

    def replan(self, plan: Plan) -> None:
        """Go on under another plan, before a step or in the middle of one.

        Gradients so far are forgotten. What is on the host stays there, where it is.
        After an error the session can only be closed.

        Args:
            plan: The other plan.

        Raises:
            ValueError: The plan moves a chunk that may not move, or several ranks train.
        """
        if self._ranks is not None:
            raise ValueError("several ranks train under the plan they began with")
        pairs = zip(self.plan.placements, plan.placements, strict=True)
        for index, (old, new) in enumerate(pairs):
            if old.on_host != new.on_host and (
                old.on_host or index not in self.movable
            ):
                raise ValueError(f"chunk {index} cannot go from {old} to {new}")
        self.forget_gradients()
        self.settle()
        self.device.synchronize()
        used_bytes = self.device.used_bytes()
        _remove(self._handles)
        self._running.clear()
        swap, self._swap = self._swap, None
        if swap is not None:
            swap.close()
        self._residence.unload(self.plan.paged)
        for slot in self._slots:
            slot.release()
        self._gradients.close()
        pager, gradients, old_plan = self._pager, self._gradients, self.plan
        self.plan = plan
        self._open(old_plan)
        self._pager = self._build_pager()
        for counter in ("fetched_bytes", "num_fetches", "num_misses"):
            setattr(self._pager, counter, getattr(pager, counter))
        assert isinstance(gradients, GradientOffload)
        self._gradients = GradientOffload(self.device, self._worker)
        self._gradients.offloaded_bytes = gradients.offloaded_bytes
        self._attach()
        if swap is not None and self._swap is not None:
            self._swap.count_on(swap)
        self._placed_bytes += self.device.used_bytes() - used_bytes
        if isinstance(self._optimizer, PagedAdamW):
            self._optimizer.rehost(_alone(self._host_chunks), self._gradients)

    def forget_gradients(self) -> None:
        """Undo the forward and backward passes since the last update."""
        for block in self._running:
            block.unwind()
        drop_ended_backward()
        self._pager.close_any()
        self._gradients.discard()
        self._worker.drain()
        if isinstance(self._optimizer, PagedAdamW):
            self._optimizer.zero_grad()
        for param in self._params.values():
            param.grad = None

    def ready(self) -> None:
        """Make weights that stay on the device current after a host update."""
        for index in sorted(self._stale):
            self._worker.wait(index)
            self._refresh(self.layout.chunks[index])
        self._stale.clear()

    def settle(self) -> None:
        """Return once no host update is pending: what is read next is the truth."""
        self._worker.drain()
        if self.plan.shards == 1:
            # a gather waits for the ranks that do not ask now
            self.ready()

    def watch(self) -> AbstractContextManager[object]:
        """Count device bytes exactly inside, a step for example."""
        already = 0 if self._watched else self._device_optimizer_bytes()
        self._watched = True
        return self.device.watch(already)

    def _device_optimizer_bytes(self) -> int:
        if isinstance(self._optimizer, PagedAdamW):
            return self._optimizer.device_bytes()
        return optimizer_bytes(self._optimizer) if self._optimizer is not None else 0

    def pinned_bytes(self) -> int:
        """Host memory that is page-locked now, on a device that has it."""
        swap = self._swap.host_bytes if self._swap else 0
        own = sum(region.nbytes for region in self._pinned)
        return own + self._gradients.host_bytes + swap

    def measured(self) -> Measured:
        """Counters so far."""
        optimizer = self._optimizer
        return Measured(
            fetched_bytes=(
                self._pager.fetched_bytes
                + self._residence.refreshed_bytes
                + self._gradients.fetched_bytes
            ),
            offloaded_bytes=self._gradients.offloaded_bytes,
            num_fetches=self._pager.num_fetches,
            num_misses=self._pager.num_misses,
            swapped_out_bytes=self._swap.offloaded_bytes if self._swap else 0,
            swapped_in_bytes=self._swap.fetched_bytes if self._swap else 0,
            stall_s=self.device.stall_s + self._worker.waited_s,
            device_peak_bytes=self.device.peak_bytes(),
            device_placed_bytes=self._placed_bytes,
            device_optimizer_bytes=self._device_optimizer_bytes(),
            host_arena_bytes=self._arena.nbytes,
            host_optimizer_bytes=(
                optimizer.host_bytes() + self._gradients.host_bytes
                if isinstance(optimizer, PagedAdamW)
                else 0
            ),
            host_swap_bytes=self._swap.host_bytes if self._swap else 0,
            num_gathers=self._ranks.num_gathers if self._ranks else 0,
            num_reduces=self._ranks.num_reduces if self._ranks else 0,
            gathered_bytes=self._ranks.gathered_bytes if self._ranks else 0,
            reduced_bytes=self._ranks.reduced_bytes if self._ranks else 0,
        )

    def close(self) -> None:
        """Finish queued work, remove the hooks, give plain host tensors back."""
        if self._closed:
            return
        self._closed = True
        # the last one first, and each of them whatever the others raise
        with ExitStack() as undo:
            for slot in self._slots:
                undo.callback(slot.release)
            while self._pinned:
                undo.callback(self.device.unpin, self._pinned.pop())
            if self._swap is not None:
                undo.callback(self._swap.close)
            for host in self._host_chunks:
                undo.callback(host.clear)
            undo.callback(self._gradients.close)
            # until they are back a reader of the state had to be told where weights are
            undo.callback(_remove, self._state_handles)
            undo.callback(self._residence.move_out)
            undo.callback(_remove, self._handles)
            undo.callback(drop_ended_backward)
            undo.callback(self.device.synchronize)
            undo.callback(self._pager.close_any)
            undo.callback(self._worker.close)
            self._worker.drain()

    # opening

    def _open(self, before: Plan | None = None) -> None:
        """Move the model to where the plan has it; `before` is where it was."""
        plan, masters = self.plan, self._options.fp32_master
        on_host = [c for c in self.layout.chunks if plan.placements[c.index].on_host]
        new = [chunk for chunk in on_host if chunk.index not in self._arena]
        trained = [chunk for chunk in new if chunk.trainable]
        self._numbers = {index: n for n, index in enumerate(plan.paged)}
        sizes = slot_bytes(self.layout, plan.placements, plan.n_buffer, plan.shards)
        self._slots = [
            Slot(
                self.device.allocate(nbytes),
                self.device,
                self._options.poison,
                self._carrier,
            )
            for nbytes in sizes
        ]
        regions = [self._arena.add(new)]
        if self._ranks is None:
            unmastered = [c for c in trained if not c.has_masters(masters)]
            regions.append(self._gradient_arena.add(unmastered))
        state = Placement.HOST_STATE
        moving = [
            chunk
            for chunk in on_host
            if plan.placements[chunk.index] is not state
            or before is None
            or before.placements[chunk.index] is not state
        ]
        move_in = partial(self._residence.move_in, moving, self._device_bytes)
        if self._ranks is None:
            move_in()
        else:
            self._ranks.together(move_in)
            self._agree(trained, self._ranks)
            if plan.shards > 1:
                self._arena.forget_pages()
                regions = [self._source(chunk.index) for chunk in new]
        for region in regions:
            if region is not None:
                # not before: pages are committed as chunks move in
                self._pin(region)
        self._host_chunks = _needed_first(
            [*self._host_chunks, *self._new_host_chunks(trained)]
        )
        for chunk in moving:
            if plan.placements[chunk.index] is state:
                self._refresh(chunk)

    def _agree(self, trained: Iterable[Chunk], ranks: Ranks) -> None:
        """What trains begins everywhere as it does on rank 0, as under DDP."""
        if ranks.world.num_nodes > 1:
            ranks.spread([self._arena.chunk(chunk.index) for chunk in trained])

    def _new_host_chunks(
        self, trained: Sequence[Chunk]
    ) -> Sequence[HostChunk | ShardedChunk]:
        params, masters, device = self._params, self._options.fp32_master, self.device
        if self._ranks is None:
            arenas = self._arena, self._gradient_arena
            return [HostChunk(c, params, *arenas, masters, device) for c in trained]
        ranks = self._ranks
        leaves = [leaf_chunk(chunk, masters) for chunk in trained]
        self._masters.add(
            [
                leaf
                for chunk, leaf in zip(trained, leaves, strict=True)
                if chunk.has_masters(masters)
            ]
        )
        for moment in self._moments:
            moment.add(leaves)
        size = ranks.world.local_size
        received = [parts_chunk(chunk, size, masters) for chunk in trained]
        self._gradient_arena.add(received)
        for parts in received:
            self._pin(self._gradient_arena.shard(parts, size, ranks.local_rank))
        memory = SharedMemory(
            self._arena, self._masters, self._moments, self._gradient_arena
        )
        return [
            ShardedChunk(chunk, params, memory, ranks, masters, device)
            for chunk in trained
        ]

    def _pin(self, region: Tensor) -> None:
        self.device.pin(region)
        self._pinned.append(region)

    def _source(self, index: int) -> Tensor:
        """What a fetch of a chunk copies: all of it, or this rank's shard."""
        if self._ranks is None or self.plan.shards == 1:
            return self._arena.chunk(index)
        chunk, rank = self.layout.chunks[index], self._ranks.local_rank
        return self._arena.shard(chunk, self.plan.shards, rank)

    def _refresh(self, chunk: Chunk) -> None:
        self._residence.refresh(chunk, self._source(chunk.index), self._carrier)

    def _new_gradients(self) -> GradientOffload | GradientReduction:
        if self._ranks is None:
            return GradientOffload(self.device, self._worker)
        return GradientReduction(
            self.device,
            self._worker,
            self._ranks,
            self.plan.gradient_order or _backward_order(self.layout),
            self._options.fp32_master,
        )

    def _device_bytes(self, chunk: Chunk) -> Tensor:
        number = self._numbers.get(chunk.index)
        if number is None:
            return self.device.allocate(padded_bytes(chunk, self.plan.shards))
        return self._slots[number % self.plan.n_buffer].buffer

    def _build_pager(self) -> Pager:
        paged = self.plan.paged
        schedule = Schedule(
            [
                [self._numbers[c] for c in block.chunks if c in self._numbers]
                for block in self.layout.blocks
            ],
            self.plan.n_buffer,
        )
        kind = Pager if self.plan.shards == 1 else Lockstep
        return kind(
            schedule,
            self._slots,
            [self._source(index) for index in self._numbers],
            wait_update=lambda number: self._worker.wait(paged[number]),
            update_pending=lambda number: self._worker.pending(paged[number]),
            before_ahead=self._open_backward if self._swaps else None,
            before_backward=(
                self._gradients.reach
                if isinstance(self._gradients, GradientReduction) and self._host_chunks
                else None
            ),
        )

    @property
    def _swaps(self) -> bool:
        return any(policy.swaps for policy in self.plan.policies)

    def _open_backward(self, block: int) -> None:
        assert self._swap is not None
        self._swap.open_backward(block)

    def _build_swap(self) -> Swap:
        # parameters of paged chunks are views of slots
        weights = [binding.tensor for binding in model_bindings(self.model).values()]
        return Swap(
            self.device,
            [*weights, *self.model.buffers()],
            dict(enumerate(self.plan.swap_bytes)),
        )

    def _attach(self) -> None:
        if self._swaps:
            self._swap = swap = self._build_swap()
            last = self._modules[self.layout.blocks[-1].name]
            # what follows the blocks is often the peak of a step
            settle = last.register_forward_hook(lambda *_: swap.settle())
            self._handles.append(settle)
        needs_windows = (
            bool(self.plan.paged)
            or any(host.chunk.pageable for host in self._host_chunks)
            or self._swaps
        )
        gradients = self._gradients
        left = (
            gradients.send_left
            if isinstance(gradients, GradientOffload) and self._host_chunks
            else None
        )
        for block, policy in zip(self.layout.blocks, self.plan.policies, strict=True):
            module = self._modules[block.name]
            self._running += self._run_with(policy, module, block.index)
            if needs_windows:
                self._handles += attach_block(module, block.index, self._pager, left)
        if isinstance(gradients, GradientOffload):
            self._handles += gradients.attach(_alone(self._host_chunks))
        elif self._host_chunks:
            self._handles += gradients.attach(_sharded(self._host_chunks))
        self._handles += self._running
        if self._handles:
            self._handles += attach_entry(self._entries(), self._enter)

    def _run_with(
        self, policy: Policy, module: nn.Module, index: int
    ) -> list[Recompute | SwapBlock]:
        if policy is Policy.KEEP:
            return []
        if policy is Policy.RECOMPUTE:
            return [Recompute(module)]
        assert self._swap is not None
        if policy is Policy.SWAP_INPUT:
            return [Recompute(module, partial(self._swap.saving, index))]
        return [SwapBlock(module, index, self._swap)]

    def _attach_state(self, chunk: Chunk) -> None:
        """Let `state_dict` and `load_state_dict` reach a chunk's host copy.

        Bound to the modules that register its parameters, tied names included.
        """
        host = {
            id(self._params[spec.name]): spec
            for spec in chunk.tensors
            if spec.name in self._params
        }
        for module in self._modules.values():
            own = {
                name: host[id(param)]
                for name, param in module.named_parameters(recurse=False)
                if id(param) in host
            }
            if own:
                tensors = {
                    name: self._arena.tensor(chunk.index, spec)
                    for name, spec in own.items()
                }
                self._state_handles += self._residence.attach_side_state(
                    module, chunk, [spec.name for spec in own.values()]
                )
                self._state_handles += attach_state_dict(
                    module,
                    tensors,
                    before_read=partial(self._before_read, tensors.values()),
                    before_write=partial(self._before_load, tensors.values()),
                    written=partial(self._after_load, chunk),
                )

    def _entries(self) -> list[nn.Module]:
        """Every module through which a forward can reach the model's weights.

        Ancestors of the blocks, because a fused loss reads the head without calling
        it, and the owners of weights outside blocks, for direct calls. Nothing inside
        a block, where a window is open: its weights may be tied to others outside.
        """
        inside = tuple(f"{block.name}." for block in self.layout.blocks)
        names: dict[str, None] = {}
        for block in self.layout.blocks:
            parts = block.name.split(".")
            names.update((".".join(parts[:depth]), None) for depth in range(len(parts)))
        for chunk in self.layout.chunks:
            if chunk.block is None:
                owners = (spec.name.rpartition(".")[0] for spec in chunk.tensors)
                names.update(
                    (owner, None)
                    for owner in owners
                    if not f"{owner}.".startswith(inside)
                )
        return [self._modules[name] for name in names]

    # running

    def _enter(self) -> None:
        """A forward begins above the blocks; nothing of an earlier one is open."""
        for block in self._running:
            block.unwind()
        self._pager.close_any()
        # or gradients would stay on the device until backward sends the next ones
        self._gradients.retire()
        self.ready()

    def _before_update(self, host: HostChunk | ShardedChunk) -> None:
        self._pager.close_any()
        index = host.chunk.index
        if index in self._numbers:
            self._pager.forget(self._numbers[index])
        else:
            self._stale.add(index)

    def _before_read(self, host: Collection[Tensor]) -> None:
        self.settle()
        self.device.reads(host)

    def _before_load(self, host: Collection[Tensor]) -> None:
        """Nobody may still read or write the arena."""
        self.settle()
        self.device.synchronize()
        self.device.writes(host)

    def _after_load(self, chunk: Chunk) -> None:
        """A load wrote the host copy of `chunk`, and through its slot views."""
        for host in self._host_chunks:
            if host.chunk is chunk:
                host.reload()
        self._pager.forget_all()


def _remove(handles: list[Removable]) -> None:
    while handles:
        handles.pop().remove()


def _alone(chunks: Iterable[HostChunk | ShardedChunk]) -> list[HostChunk]:
    return [host for host in chunks if isinstance(host, HostChunk)]


def _sharded(chunks: Iterable[HostChunk | ShardedChunk]) -> list[ShardedChunk]:
    return [host for host in chunks if isinstance(host, ShardedChunk)]


def _backward_order(layout: Layout) -> tuple[int, ...]:
    """Chunks in the order of backward, as far as a layout tells."""
    inside = [index for block in layout.blocks for index in block.chunks]
    outside = [chunk.index for chunk in layout.chunks if chunk.block is None]
    return (*reversed(inside), *outside)


def _needed_first(
    chunks: Iterable[HostChunk | ShardedChunk],
) -> list[HostChunk | ShardedChunk]:
    """Order of host updates: weights outside blocks are read before the first block."""
    return sorted(chunks, key=lambda h: (h.chunk.block is not None, h.chunk.index))
