"""Composition root: opens a model for paged training and closes it again.

Wires layout, plan, runtime and optimizer together and holds what must be undone.
The model's modules, names and parameters stay the objects they were.

# Note [Closing]

Everything is undone in the reverse order, each step whatever the others raise: updates end,
windows close, copies end (after that nobody needs memory that is page-locked, in a slot or
in a region), hooks go, parameters leave the slots, and only then the hooks that told
readers of the state where weights are (Note [Who reads the state] in residence.py). torch
keeps the ready nodes of a backward that failed, with their graph, in a queue of the calling
thread until another backward comes past: `drop_ended_backward` is that one, after the copies
and before the weights move. A failed background task is raised once, by whoever waits first.

# Note [Another plan in the middle of a step]

After an out-of-memory error `forget_gradients` leaves what the step has begun, and `replan`
may bind parameters anew, because no graph is alive between two attempts. Chunks in the
arena stay where they are, those that move to the host get a mapping of their own, and
optimizer state is handed over, not copied. A rank takes another
plan only where it is alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import Direction
from ..layout.tensors import model_bindings
from ..types import Chunk, Counters, Layout, Placement, Plan, Update, main_grads_in_fp32
from .compiled import CompiledForward
from .device import Device
from .embedding import HostEmbedding
from .full_params import FullParams, show_to_hooks
from .gradients import Gradients
from .hooks import (
    AroundCall,
    Hook,
    Removable,
    StateAccess,
    Window,
    announce_copies,
    attach_entry,
    drop_ended_backward,
)
from .host_chunks import HostChunk
from .host_pool import HostPool
from .host_tensors import HostMemory
from .lanes import LaneClock, LaneTimes
from .optimizer import Updates
from .pager import Pager, Ring
from .param_store import ParamStore
from .pending import Surroundings
from .ranks import Alone, Ranks
from .recompute import Recompute
from .recorded_step import states_of
from .reduction import GradientReduction
from .slots import InBuffer, InSlot
from .staging import Staging
from .state import state_bytes
from .swap import Swap, SwapBlock
from .worker import HostWorker


@dataclass(frozen=True)
class Options:
    """How to run a plan."""

    fp32_master: bool = False
    """Update 16-bit weights through fp32 masters."""
    accumulates: bool = True
    """Steps have several micro-batches: under masters their sums are in fp32. Without,
    a gradient that is looked at once it is clipped is rounded as `.grad` is."""
    compiled: Mapping[str, Any] | None = None
    """Arguments of `torch.compile` for the forward of each block; None for none."""
    progress: Callable[[str, int, int], None] = lambda what, done, total: None
    """Told how many of the host's bytes are where they will be while a model moves."""


@dataclass(kw_only=True)
class Measured(Counters):
    """Counters since the session was opened; bytes and seconds."""

    stall_s: float
    device_peak_bytes: int
    device_placed_bytes: int
    device_optimizer_bytes: int
    host_arena_bytes: int
    host_optimizer_bytes: int
    host_swap_bytes: int


class Session:
    """A model under a plan, from construction to `close`.

    Construction moves the model: host-kept chunks into the arena, the rest to the
    device. Between, the model is trained as usual with the optimizer that
    `wrap_optimizer` returns. `close` gives the model back as plain host tensors.

    Args:
        model: On the host; `requires_grad` final, not wrapped; `layout` is of it.
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
        self._ranks = ranks = ranks or Alone()
        if plan.shards not in (1, ranks.world.local_size):
            raise ValueError(
                f"{plan.shards} shards are not one for each rank of a node"
            )
        self.model, self.layout, self.plan, self.device = model, layout, plan, device
        self.counters = ranks.counters = Counters()
        self._options = options
        self._params = dict(model.named_parameters())
        self._optimizer: torch.optim.Optimizer | None = None
        self._stale: set[int] = set()
        self.closed = self._watched = False
        self._placed_bytes = self._host_optimizer_bytes = 0
        self._handles: list[Removable] = []
        self._pinned: list[Tensor] = []
        self._swap: Swap | None = None
        self._host_chunks: list[HostChunk] = []
        self._worker = HostWorker(device)
        self._staging = Staging(device, self.counters)
        masters = options.fp32_master
        self.pool = HostPool(ranks=ranks, shards=plan.shards, shows=masters)
        widens = main_grads_in_fp32(
            masters, options.accumulates, ranks.world, plan.update
        )
        self._memory = HostMemory(self.pool, device, ranks, masters, widens)
        self._ring = Ring(layout, plan, self.pool, device, ranks)
        access = StateAccess(
            self._before_read,
            self._before_load,
            self._loaded,
            lambda: self._full_params.takes,
            lambda module: self._full_params.copying(module),
        )
        self._store = ParamStore(
            model,
            self.pool,
            device,
            access,
            ranks,
            absent,
            self.counters,
            self._written,
        )
        self._full_params = FullParams(
            self._params,
            self._store,
            ranks,
            # a plan in the middle of a step brings others
            lambda: (self.plan, self._pager, self._gradients),
            self.settle,
            self._settle_all,
        )
        around = Surroundings(
            self._in_use,
            self._stays,
            self._before_update,
            self._stale.__contains__,
            self._before_step,
            self._full_params.show_again,
        )
        on_host = plan.update is Update.HOST
        self._updates = Updates(
            self._memory, self._staging, self._worker, around, on_host
        )
        self._gradients = self._new_gradients()
        self._pager = self._new_pager()
        try:
            self._open()
            self._attach()
            self._placed_bytes = device.used_bytes()
        except BaseException:
            # an interrupt too must leave a plain model; raised again as it is
            self.close()
            raise

    @property
    def host_kept(self) -> frozenset[str]:
        """Every name of every parameter that is on the host: none of DDP's business."""
        names = {spec.name for chunk in self._on_host() for spec in chunk.tensors}
        kept = {id(p) for name, p in self._params.items() if name in names}
        every = self.model.named_parameters(remove_duplicate=False)
        return frozenset(name for name, p in every if id(p) in kept)

    def wrap_optimizer(self, plain: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer to train with: `plain` itself, which from here on pages its state.

        Raises:
            ConfigError: Some state is on the host, and this optimizer is not one that
                updates parameters independently of each other.
        """
        self._optimizer, self._kind = plain, type(plain)
        if self._host_chunks:
            self._updates.wrap(plain, self._host_chunks, self._gradients)
        show_to_hooks(plain, self._full_params)
        return plain

    def gathered_state(self) -> AbstractContextManager[None]:
        """Inside, which all ranks have to enter, the optimizer of the first of each node
        has the state of all weights, to be saved; alone it always has."""
        return self._updates.gathered()

    def weights(self) -> AbstractContextManager[None]:
        """Inside, parameters and gradients are plain tensors with their true values, and
        what is written there counts, as without paging; see Note [Who looks between two
        passes]. What trains paged is on the host then. All ranks have to enter.

        Raises:
            AccessError: A forward or backward pass runs, or a parameter was replaced by
                a tensor of another kind.
        """
        return self._full_params.weights()

    def begin_micro_batch(self, synchronises: bool) -> None:
        """A micro-batch of training begins; several ranks have to say so, and which
        one `synchronises`: the last of a step, after which gradients are averaged."""
        self._pager.begin_micro_batch()
        self._gradients.begin_micro_batch(synchronises)

    def clip_grad_norm(self, max_norm: float) -> Tensor | None:
        """Clip over device and host gradients; None if the plain way sees them all."""
        self._full_params.hide()
        self._pager.close_any()
        norm = self._updates.clip_grad_norm([*self.model.parameters()], max_norm)
        self._full_params.show_again()
        return norm

    @property
    def movable(self) -> frozenset[int]:
        """Chunks that `replan` may move to the host: those that train only if the
        optimizer has a side there from the start."""
        trains = bool(self._host_chunks)
        return frozenset(
            c.index for c in self.layout.chunks if trains or not c.trainable
        )

    def replan(self, plan: Plan) -> None:
        """Go on under another plan, before a step or in the middle of one.

        Gradients so far are forgotten. What is on the host stays there, where it is.
        After an error the session can only be closed.

        Raises:
            ValueError: The plan moves a chunk that may not move.
        """
        pairs = zip(self.plan.placements, plan.placements, strict=True)
        for index, (old, new) in enumerate(pairs):
            if old.on_host != new.on_host and (
                old.on_host or index not in self.movable
            ):
                raise ValueError(f"chunk {index} cannot go from {old} to {new}")
        # what is noted of a step is of one plan
        self.device.clock = None
        # where a chunk moves, what is shown is not its place
        self._full_params.hide()
        self.forget_gradients()
        self.settle()
        self.device.synchronize()
        used_bytes = self.device.used_bytes()
        _remove(self._handles)
        self._swap = None
        self._store.unload(self.plan.paged)
        for slot in self._ring.slots:
            slot.release()
        self._gradients.close()
        before, self.plan = self.plan, plan
        self._open(before)
        self._gradients = self._new_gradients()
        self._attach()
        self._placed_bytes += self.device.used_bytes() - used_bytes
        if self._optimizer is not None and self._host_chunks:
            self._updates.take_chunks(self._host_chunks, self._gradients)
        self._full_params.show_again()

    def forget_gradients(self) -> None:
        """Undo the forward and backward passes since the last update."""
        drop_ended_backward(self.device.torch_device)
        if self._swap is not None:
            # what was under way for backward keeps its memory until then
            self._swap.settle()
        self._pager.close_any()
        self._gradients.discard()
        self._worker.drain()
        self._staging.forget()
        self._updates.forget_gradients()
        for param in self._params.values():
            param.grad = None

    def ready(self) -> None:
        """Make weights that stay on the device current after a host update."""
        for index in sorted(self._stale):
            self._worker.wait(index)
            self._store.refresh(self.layout.chunks[index], self._ring)
            self._stale.discard(index)

    def settle(self) -> None:
        """Return once no host update is pending: what is read next is the truth."""
        self._worker.drain()
        self._updates.flush()
        if self.plan.shards == 1:
            # a gather waits for the ranks that do not ask now
            self.ready()

    def watch(self) -> AbstractContextManager[object]:
        """Count device bytes exactly inside, a step for example."""
        already = 0 if self._watched else self.device_optimizer_bytes()
        self._watched = True
        return self.device.watch(already)

    def device_optimizer_bytes(self) -> int:
        """Device bytes of optimizer state now; looks at each tensor of it."""
        host = {id(p) for host in self._host_chunks for p in host.params}
        # a copy: the host thread may add to it
        state = {**states_of(self._optimizer)} if self._optimizer is not None else {}
        return state_bytes({p: own for p, own in state.items() if id(p) not in host})

    def begin_timing(self) -> None:
        """Note from here on when each lane works, until `end_timing`."""
        self.device.synchronize()
        self._stalled_s = self.stall_s
        self.device.clock = LaneClock(self.device.moment)

    def end_timing(self) -> LaneTimes | None:
        """The times of all lanes since `begin_timing`; None without it."""
        clock, self.device.clock = self.device.clock, None
        if clock is None:
            return None
        end = self.device.moment()
        self.device.synchronize()
        stalled_s = self.stall_s - self._stalled_s
        # updates of this step run beside the next one
        self._worker.drain()
        return clock.read(end, stalled_s)

    @property
    def stall_s(self) -> float:
        """Seconds that compute, or the calling thread, has waited for copies and host."""
        return self.device.stall_s + self._worker.waited_s

    def measured(self) -> Measured:
        """Counters so far; looks at each tensor of the optimizer's state."""
        swap = self._swap
        if not self.closed:
            self._count_host_optimizer()
        return Measured(
            **asdict(self.counters),
            stall_s=self.stall_s,
            device_peak_bytes=self.device.peak_bytes(),
            device_placed_bytes=self._placed_bytes,
            device_optimizer_bytes=self.device_optimizer_bytes(),
            host_arena_bytes=self.pool.nbytes,
            host_optimizer_bytes=self._host_optimizer_bytes,
            host_swap_bytes=swap.host_bytes if swap is not None else 0,
        )

    def _count_host_optimizer(self) -> None:
        held = self._updates.host_bytes() + self._gradients.host_bytes
        self._host_optimizer_bytes = held

    def close(self) -> None:
        """Finish queued work, remove the hooks, give plain host tensors back."""
        if self.closed:
            return
        self.closed = self._full_params.closed = True
        # other ranks may not come to what all do together
        self._full_params.takes &= self._ranks.world.size == 1
        # the last one first: see Note [Closing]
        with ExitStack() as undo:
            for slot in self._ring.slots:
                undo.callback(slot.release)
            while self._pinned:
                undo.callback(self.device.unpin, self._pinned.pop())
            undo.callback(self._gradients.close)
            undo.callback(self._staging.close)
            if self._optimizer is not None:
                undo.callback(setattr, self._optimizer, "__class__", self._kind)
            undo.callback(self._updates.close)
            undo.callback(self._store.detach_state)
            undo.callback(self._store.move_out)
            undo.callback(_remove, self._handles)
            undo.callback(drop_ended_backward, self.device.torch_device)
            undo.callback(self.device.synchronize)
            undo.callback(self._pager.close_any)
            # once no thread adds to it, and before any of it is let go of
            undo.callback(self._count_host_optimizer)
            undo.callback(self._worker.close)
            undo.callback(self._updates.flush)
            undo.callback(self._full_params.hide)
            self._worker.drain()

    # opening

    def _on_host(self) -> list[Chunk]:
        return [c for c in self.layout.chunks if self.plan.placements[c.index].on_host]

    def _open(self, before: Plan | None = None) -> None:
        """Move the model to where the plan has it; `before` says where it was."""
        plan, ranks, on_host = self.plan, self._ranks, self._on_host()
        at, was = plan.placements, before.placements if before is not None else ()
        state = {
            c.index for c in on_host if at[c.index] is Placement.OPTIMIZER_OFFLOADED
        }
        stay = {index for index in state if was and was[index] is at[index]}
        new = [chunk for chunk in on_host if chunk.index not in self.pool]
        trained = [chunk for chunk in new if chunk.trainable]
        moving = [chunk for chunk in on_host if chunk.index not in stay]
        self._ring.take(plan)
        self.pool.add(new)
        progress, total = self._options.progress, sum(c.nbytes for c in moving)
        moved = 0

        def buffer_of(chunk: Chunk) -> Tensor:
            nonlocal moved
            progress("copied", moved, total)
            moved += chunk.nbytes
            return self._ring.buffer_of(chunk)

        ranks.together(partial(self._store.move_in, moving, buffer_of))
        if ranks.world.num_nodes > 1:
            # what trains begins everywhere as it does on rank 0, as under DDP
            ranks.spread([self.pool.chunk(chunk.index) for chunk in trained])
        # not before: pages are committed as chunks move in
        if plan.shards > 1:
            self.pool.forget_pages()
        # of what trains each rank sends whole tensors home; rows are copied once more
        regions = [
            self.pool.chunk(chunk.index) if chunk.trainable else self.pool.share(chunk)
            for chunk in new
            if chunk.trainable or plan.placements[chunk.index] is not _ROWS
        ]
        regions += self._memory.add(trained)
        total, locked = sum(region.nbytes for region in regions), 0
        for region in regions:
            progress("page-locked", locked, total)
            locked += region.nbytes
            self.device.pin(region)
            self._pinned.append(region)
        made = [HostChunk(chunk, self._params, self._memory) for chunk in trained]
        # in the order of their updates: what lies outside blocks is read first
        self._host_chunks = sorted(
            [*self._host_chunks, *made],
            key=lambda host: (_block(host.chunk), host.chunk.index),
        )
        for chunk in moving:
            if chunk.index in state:
                self._store.refresh(chunk, self._ring)

    def _new_gradients(self) -> Gradients:
        staging, counters = self._staging, self.counters
        if self._ranks.world.size == 1:
            return Gradients(self.device, staging, counters)
        order = self.plan.gradient_order
        return GradientReduction(self._memory, staging, counters, self._worker, order)

    def _new_pager(self) -> Pager:
        return self._ring.pager(
            self._worker,
            opened=self._opened,
            before_backward=self._before_backward,
            before_forward=self._before_forward,
            counters=self.counters,
        )

    def _attach(self) -> None:
        """Hook the model, which is where the plan has it."""
        blocks = [self.model.get_submodule(block.name) for block in self.layout.blocks]
        swap: Swap | None = None
        if any(policy.swaps for policy in self.plan.policies):
            # parameters of paged chunks are views of slots
            weights = [bound.tensor for bound in model_bindings(self.model).values()]
            self._swap = swap = Swap(
                self.device,
                [*weights, *self.model.buffers()],
                dict(enumerate(self.plan.swap_bytes)),
                self.counters,
            )
            # what follows the blocks is often the peak of a step
            settle = blocks[-1].register_forward_hook(Hook(lambda *_: swap.settle()))
            self._handles += [swap, settle]
        self._pager, full_params = self._new_pager(), self._full_params
        has_windows = (
            bool(self.plan.paged)
            or any(host.chunk.block is not None for host in self._host_chunks)
            or self._swap is not None
        )
        for index, block in enumerate(blocks):
            policy = self.plan.policies[index]
            if swap is not None and policy.swaps and not policy.recomputes:
                self._handles.append(SwapBlock(block, index, swap))
            if has_windows:
                announced = announce_copies(block, partial(full_params.copying, block))
                left, ended = self._gradients.left, full_params.show_again
                window = Window(block, index, self._pager, left, ended)
                self._handles += announced, window
            if policy.recomputes:
                # around the window, which a recomputation opens again
                saving = partial(swap.saving, index) if swap and policy.swaps else None
                self._handles.append(Recompute(block, saving))
        # before buffers are taken, which may fail
        self._handles += self._gradients.attach(self._host_chunks)
        looked_up = [i for i, at in enumerate(self.plan.placements) if at is _ROWS]
        if self._handles or looked_up:
            self._handles += attach_entry(
                self.model,
                self.layout,
                self._enter,
                full_params.left,
                full_params.copying,
            )
        for index in looked_up:
            spec = self.layout.chunks[index].tensors[0]
            owner = self.model.get_submodule(spec.name.rpartition(".")[0])
            table = self.pool.tensor(index, spec)
            self._handles.append(
                HostEmbedding(owner, table, self.device, self.counters)
            )
        how = self._options.compiled
        if how is not None:
            self._handles += (CompiledForward(block, how) for block in blocks)

    # running

    def _settle_all(self) -> None:
        """Return once weights and gradients are what is read next, on all ranks."""
        self._gradients.settle()
        self._pager.close_any()
        self._worker.drain()
        self._updates.settle_gradients()
        self.ready()
        # copies to slots read what may be written now
        self.device.synchronize()

    def _before_backward(self, block: int) -> None:
        self._full_params.before_backward()
        self._gradients.reach(block)

    def _before_forward(self) -> None:
        self._full_params.hide()
        self._updates.finish()

    def _opened(self, block: int, direction: Direction) -> None:
        backward = direction is Direction.BACKWARD
        self._begin_phase("backward" if backward else "forward")
        if backward:
            if self._swap is not None:
                self._swap.open_backward(block)
            return
        for index in self.layout.blocks[block].chunks:
            self._updates.use(index)
        self._updates.fetch_ahead(block + 1)

    def _in_use(self, host: HostChunk) -> InBuffer:
        """Where the weights of a chunk are that is in use."""
        slot = self._ring.slot_of(host.chunk.index)
        if slot is None:
            return self._on_device(host)
        return InSlot(self.device, slot, host.weights.memory)

    def _stays(self, host: HostChunk) -> InBuffer | None:
        """See `Surroundings`."""
        away = host.chunk.index in self.plan.away
        return None if away else self._on_device(host)

    def _on_device(self, host: HostChunk) -> InBuffer:
        """Where this rank updates the weights of a chunk that do not leave the device."""
        weights = host.weights
        buffer = self._store.buffer_of(host.chunk)[weights.within_chunk]
        # several ranks refresh them together, before they are used
        alone = self._ranks.world.size == 1
        refresh = partial(self._store.refresh, host.chunk, self._ring)
        renew = refresh if alone else lambda: None
        return InBuffer(self.device, buffer, weights.memory, renew)

    def _enter(self, module: nn.Module) -> None:
        """A forward begins above the blocks; nothing of an earlier one is open."""
        self._full_params.enter(module)
        for handle in self._handles:
            if isinstance(handle, AroundCall):
                handle.require_bound()
        self._pager.close_any()
        self._updates.finish()
        self._updates.fetch_ahead(0)
        for chunk in self.layout.chunks:
            if chunk.block is None:
                looked_up = self.plan.placements[chunk.index] is _ROWS
                updates = self._updates
                (updates.land if looked_up else updates.use)(chunk.index)
        # or gradients would stay on the device until backward sends the next ones
        self._gradients.retire()
        self.ready()

    def _before_step(self) -> None:
        self._begin_phase("update")
        self._full_params.hide()
        self._pager.close_any()

    def _begin_phase(self, name: str) -> None:
        if (clock := self.device.clock) is not None:
            clock.phase(name)

    def _before_update(self, host: HostChunk) -> None:
        index = host.chunk.index
        if index in self._ring.numbers:
            self._pager.forget(self._ring.numbers[index])
        elif self.plan.placements[index] is not _ROWS:
            self._stale.add(index)

    def _before_read(self, host: Collection[Tensor]) -> None:
        self.settle()
        self.device.reads(host)

    def _before_load(self, host: Collection[Tensor]) -> None:
        """Nobody may still read or write the arena."""
        self.settle()
        self.device.synchronize()
        self.device.writes(host)

    def _written(self, chunk: Chunk, where: Mapping[str, Tensor] | None = None) -> None:
        """Somebody wrote weights, all or those that were shown."""
        for host in self._host_chunks:
            if host.chunk is chunk:
                host.masters.renew(where)

    def _loaded(self, chunk: Chunk) -> None:
        """A load wrote the host copy of `chunk`, and through its slot views."""
        self._store.remember()
        self._written(chunk)
        self._pager.forget_all()


_ROWS = Placement.HOST_LOOKUP


def _block(chunk: Chunk) -> int:
    return -1 if chunk.block is None else chunk.block


def _remove(handles: list[Removable]) -> None:
    """Undo bindings, the last one first, each whatever the others raise."""
    with ExitStack() as undo:
        while handles:
            undo.callback(handles.pop(0).remove)
