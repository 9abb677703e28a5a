"""Composition root: opens a model for paged training and closes it again.

Wires layout, plan, engine and optimizer together and holds what must be undone; the order
of a step is in step.py. The model's modules, names and parameters stay the objects they were.

# Note [Closing]

Everything is undone in the reverse order, each step whatever the others raise: updates end,
blocks are no longer in use, copies end (after that nobody needs memory that is page-locked,
in a slot or in a region), hooks go, parameters leave the slots, and only then the hooks that
told readers of the state where weights are (Note [Who reads the state] in param_store.py).
torch keeps the ready nodes of a backward that failed, with their graph, in a queue of the
calling thread until another backward comes past: `drop_ended_backward` is that one, after
the copies and before the weights move. A failed background task is raised once, by whoever
waits first.

# Note [Another plan in the middle of a step]

After an out-of-memory error `forget_gradients` undoes the passes of the step, and `replan`
may bind parameters anew, because no graph is alive between two attempts. Chunks in host
memory stay where they are, those that move there get a mapping of their own, and optimizer
state is handed over, not copied. A rank takes another plan only where it is alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import PIECE_NUMEL
from ..layout.tensors import model_bindings
from ..types import Chunk, Counters, Layout, Placement, Plan, main_grads_in_fp32
from .access import StateAccess
from .apply import Updates
from .calls import Hook, drop_ended_backward
from .compiled import CompiledForward
from .device import POISON_BYTE, Device
from .embedding import HostEmbedding
from .full_params import FullParams
from .gradients import Gradients
from .holding import Holding
from .hooks import (
    AroundBlock,
    GradientHooks,
    StateHooks,
    announce_copies,
    attach_entry,
)
from .host_chunks import HostChunk, HostMemory
from .host_pool import HostPool
from .optimizer import page_optimizer, show_to_hooks
from .param_store import ParamStore
from .ranks import Alone, Ranks
from .recompute import Recompute
from .recorded_step import states_of
from .reduction import GradientReduction
from .slots import Slots
from .staging import Staging
from .state import state_bytes
from .step import Step
from .swap import Swap, SwapBlock
from .visiting import Visiting
from .worker import HostWorker


@dataclass(frozen=True)
class Options:
    """Options of running a plan."""

    fp32_master: bool = False
    """Update 16-bit weights through fp32 masters."""
    accumulates: bool = True
    """Steps have several micro-batches: under masters their sums are in fp32. Without,
    a gradient that is looked at once it is clipped is rounded as `.grad` is."""
    piece_numel: int = PIECE_NUMEL
    """Elements of a chunk that are updated at once."""
    compiled: Mapping[str, Any] | None = None
    """Arguments of `torch.compile` for the forward of each block; None for none."""
    disk: Path | None = None
    """Folder for the files of chunks that a plan has on the disk."""
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

    Construction moves the model: chunks that the plan keeps on the host into pinned
    memory, the rest to the device. Between, the model is trained as usual with the
    optimizer that `wrap_optimizer` returns. `close` gives the model back as plain host
    tensors.

    Args:
        model: On the host; `requires_grad` final, not wrapped; `layout` is of it.
        ranks: Who trains together; all of them then open, step and close alike. What
            trains on the device is DistributedDataParallel's to average.
        absent: Names of frozen parameters that this rank has in name only; another of
            the node has their bytes.

    Attributes:
        holding: Keeps chunks that page on the device for many forwards in a row.
        visiting: Brings some weights to the device inside of `full_params`.

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
        self._optimizer: torch.optim.Optimizer | None = None
        self.closed = self._watched = False
        self._placed_bytes = self._host_optimizer_bytes = 0
        self._pinned: list[Tensor] = []
        masters, world = options.fp32_master, ranks.world
        widens = main_grads_in_fp32(masters, options.accumulates, world, plan.update)
        self.pool = HostPool(ranks=ranks, shards=plan.shards, disk=options.disk)
        self._memory = HostMemory(
            self.pool, device, ranks, masters, widens, options.piece_numel
        )
        staging, worker = Staging(device, self.counters), HostWorker(device)
        updates = Updates(self._memory, staging, plan.update)
        store = ParamStore(model, self.pool, device, ranks, absent)
        self._step = Step(
            model,
            layout,
            device,
            self._memory,
            store,
            updates,
            staging,
            worker,
            self.counters,
        )
        self._full_params = self._step.full_params = FullParams(self._step)
        self.holding = Holding(self._step, self._full_params)
        self.visiting = Visiting(self._step, self._full_params)
        self._access = StateAccess(self._step, self._full_params)
        self._state_hooks: list[StateHooks] = []
        self._take_gradients()
        self._step.take_plan(plan, self._new_slots())
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
        kept = {id(p) for name, p in self._step.params.items() if name in names}
        every = self.model.named_parameters(remove_duplicate=False)
        return frozenset(name for name, p in every if id(p) in kept)

    @property
    def takes_gradients(self) -> bool:
        """Some gradients leave for the host, where others see placeholders."""
        return bool(self._step.hosts)

    def wrap_optimizer(self, plain: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer to train with: `plain` itself, whose state is paged.

        Raises:
            ConfigError: Some state is on the host, and this optimizer is not one that
                updates parameters independently of each other.
        """
        self._optimizer, self._kind = plain, type(plain)
        if self._step.hosts:
            page_optimizer(plain, self._step, self._access)
            self._step.updates.take_optimizer(plain, self._kind)
            self._step.updates.take_chunks(self._step.hosts)
        show_to_hooks(plain, self._step, self._full_params)
        return plain

    def gathered_state(self) -> AbstractContextManager[None]:
        """Give the first rank of each node the optimizer state of all weights inside,
        which all ranks have to enter, to be saved; a rank alone always has it."""
        self._step.due.apply_all()
        return self._access.saved_state.gathered()

    def full_params(self) -> AbstractContextManager[None]:
        """Show parameters and gradients as plain tensors with their true values inside;
        writes count, as without paging. See Note [Who looks between two passes] in
        full_params.py. Offloaded parameters are on the host then. All ranks enter.

        Raises:
            AccessError: A forward or backward pass runs, or a parameter was replaced by
                a tensor of another kind.
        """
        return self._full_params.inside()

    def begin_micro_batch(self, synchronises: bool) -> None:
        """A micro-batch of training begins; several ranks have to say so, and which
        one `synchronises`: the last of a step, after which gradients are averaged."""
        self._step.begin_micro_batch(synchronises)

    def clip_grad_norm(
        self, max_norm: float, params: Sequence[nn.Parameter] | None = None
    ) -> Tensor | None:
        """Clip over device and host gradients, in the order of `params` if given; None if
        the plain way sees them all."""
        every = [*self.model.parameters()] if params is None else params
        return self._step.clip_grad_norm(every, max_norm)

    def waiting_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Gradients, on the host, for which no step has been made yet."""
        spent = {
            param
            for host in self._step.hosts
            for index, param in enumerate(host.params)
            if host.grads.is_spent(index)
        }
        every = set(self.model.parameters()) - spent
        if all(param.grad is None for param in every):
            return {}
        with self.full_params():
            shown = ((param, param.grad) for param in every)
            return {param: g.cpu().clone() for param, g in shown if g is not None}

    @property
    def movable(self) -> frozenset[int]:
        """Chunks that `replan` may move to the host: those that train only if the
        optimizer has a side there from the start."""
        trains = bool(self._step.hosts)
        return frozenset(
            c.index for c in self.layout.chunks if trains or not c.trainable
        )

    def replan(self, plan: Plan) -> None:
        """Switch to another plan without closing, before a step or in the middle of one.

        Accumulated gradients are discarded; chunks in host memory keep their memory.
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
        step = self._step
        # where a chunk moves, what is shown is not its place
        self._full_params.hide()
        self.forget_gradients()
        self.settle()
        self.device.synchronize()
        used_bytes = self.device.used_bytes()
        _remove(step.handles)
        step.swap = None
        step.store.unload(self.plan.paged)
        step.slots.release()
        step.gradients.close()
        before, self.plan = self.plan, plan
        step.take_plan(plan, self._new_slots())
        self._open(before)
        self._take_gradients()
        self._attach()
        self._placed_bytes += self.device.used_bytes() - used_bytes
        if self._optimizer is not None and step.hosts:
            step.updates.take_chunks(step.hosts)
        self._full_params.show_again()

    def forget_gradients(self) -> None:
        """Undo the forward and backward passes since the last update, of a rank alone."""
        self._step.forget_gradients()

    def settle(self) -> None:
        """Return once no update is pending: what is read next is the truth."""
        self._step.due.settle()

    def watch(self) -> AbstractContextManager[object]:
        """Count device bytes exactly inside, a step for example."""
        already = 0 if self._watched else self.device_optimizer_bytes()
        self._watched = True
        return self.device.watch(already)

    def device_optimizer_bytes(self) -> int:
        """Device bytes of optimizer state now; looks at each tensor of it."""
        host = {id(p) for host in self._step.hosts for p in host.params}
        # a copy: the host thread may add to it
        state = {**states_of(self._optimizer)} if self._optimizer is not None else {}
        return state_bytes({p: own for p, own in state.items() if id(p) not in host})

    @property
    def stall_s(self) -> float:
        """Seconds that compute, or the calling thread, has waited for copies and host."""
        return self.device.stall_s + self._step.worker.waited_s

    def measured(self) -> Measured:
        """Counters so far; looks at each tensor of the optimizer's state."""
        swap = self._step.swap
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
        held = self._step.updates.host_bytes() + self._step.gradients.host_bytes
        self._host_optimizer_bytes = held

    def close(self) -> None:
        """Finish queued work, remove the hooks, give plain host tensors back."""
        if self.closed:
            return
        step = self._step
        self.closed = step.closed = True
        # other ranks may not come to what all do together
        self._full_params.shows_writes &= self._ranks.world.size == 1
        # the last one first: see Note [Closing]
        with ExitStack() as undo:
            undo.callback(step.slots.release)
            while self._pinned:
                undo.callback(self.device.unpin, self._pinned.pop())
            undo.callback(step.gradients.close)
            undo.callback(step.staging.close)
            if self._optimizer is not None:
                undo.callback(setattr, self._optimizer, "__class__", self._kind)
                # accelerate keeps the paged one there beside a GradScaler
                undo.callback(vars(self._optimizer).pop, "step", None)
            undo.callback(self._access.saved_state.close)
            undo.callback(_remove, self._state_hooks)
            undo.callback(step.store.move_out)
            undo.callback(_remove, step.handles)
            undo.callback(drop_ended_backward, self.device.torch_device)
            undo.callback(self.device.synchronize)
            undo.callback(step.slots.end_use)
            # once no thread adds to it, and before any of it is let go of
            undo.callback(self._count_host_optimizer)
            undo.callback(step.worker.close)
            undo.callback(step.due.apply_all)
            self._full_params.hide()

    # opening

    def _on_host(self) -> list[Chunk]:
        return [c for c in self.layout.chunks if self.plan.placements[c.index].on_host]

    def _open(self, before: Plan | None = None) -> None:
        """Move the model to where the plan has it; `before` says where it was."""
        plan, ranks, on_host = self.plan, self._ranks, self._on_host()
        step, at = self._step, plan.placements
        was = before.placements if before is not None else ()
        offloaded = Placement.OPTIMIZER_OFFLOADED
        stays = {c.index for c in on_host if at[c.index] is offloaded}
        there = {index for index in stays if was and was[index] is at[index]}
        new = [chunk for chunk in on_host if chunk.index not in self.pool]
        trained = [chunk for chunk in new if chunk.trainable]
        moving = [chunk for chunk in on_host if chunk.index not in there]
        step.slots.allocate()
        self.pool.add(new, plan.on_disk)
        progress, total = self._options.progress, sum(c.nbytes for c in moving)
        moved = 0

        def buffer_for(chunk: Chunk) -> Tensor:
            nonlocal moved
            progress("copied", moved, total)
            moved += chunk.nbytes
            if at[chunk.index] is not _LOOKUP:
                return step.slots.buffer_for(chunk)
            # an element of poison: the device never has the weight
            element = self.device.allocate(chunk.tensors[0].dtype.itemsize)
            self.device.compute.fill(element, POISON_BYTE)
            return element

        move_in = partial(step.store.move_in, moving, buffer_for, self._attach_state)
        ranks.together(move_in)
        if ranks.world.num_nodes > 1:
            # what trains begins everywhere as it does on rank 0, as under DDP
            ranks.spread([self.pool.chunk(chunk.index) for chunk in trained])
        # not before: pages are committed as chunks move in
        if plan.shards > 1:
            self.pool.forget_pages()
        # of what trains each rank sends whole tensors to the host; what is looked up is copied
        # once more
        regions = [
            self.pool.chunk(chunk.index) if chunk.trainable else self.pool.share(chunk)
            for chunk in new
            if at[chunk.index] is not _LOOKUP and chunk.index not in self.pool.files
        ]
        regions += self._memory.add(trained)
        total, locked = sum(region.nbytes for region in regions), 0
        for region in regions:
            progress("page-locked", locked, total)
            locked += region.nbytes
            self.device.pin(region)
            self._pinned.append(region)
        made = [HostChunk(chunk, step.params, self._memory) for chunk in trained]
        # in the order of their updates: weights outside blocks are read first
        step.hosts = sorted(
            [*step.hosts, *made],
            key=lambda host: (_block(host.chunk), host.chunk.index),
        )
        for chunk in moving:
            if chunk.index in stays:
                step.slots.refresh(chunk, step.store.buffer_of(chunk))
        step.slots.open_disk()

    def _new_slots(self) -> Slots:
        plan, device, ranks = self.plan, self.device, self._ranks
        return Slots(self.layout, plan, self.pool, device, ranks, self.counters)

    def _attach_state(self, chunk: Chunk) -> None:
        """Hook readers and writers of a chunk's state, which is in host memory."""
        for module, host in self._step.store.state_of(chunk):
            self._state_hooks.append(StateHooks(module, chunk, host, self._access))

    def _take_gradients(self) -> None:
        """Give the step gradients of the plan."""
        step = self._step
        if self._ranks.world.size == 1:
            gradients = Gradients(self.device, step.staging, self.counters)
        else:
            order = self.plan.gradient_order
            gradients = GradientReduction(
                self._memory, step.staging, self.counters, step.worker, order
            )
        step.gradients = step.due.gradients = gradients

    def _attach(self) -> None:
        """Hook the model, which is where the plan has it."""
        step, policies = self._step, self.plan.policies
        blocks = [self.model.get_submodule(block.name) for block in self.layout.blocks]
        swap: Swap | None = None
        if any(policy.swaps for policy in policies):
            # parameters of paged chunks are views of slots
            weights = [bound.tensor for bound in model_bindings(self.model).values()]
            step.swap = swap = Swap(
                self.device,
                [*weights, *self.model.buffers()],
                dict(enumerate(self.plan.swap_bytes)),
                self.counters,
            )
            # what follows the blocks is often the peak of a step
            settle = blocks[-1].register_forward_hook(Hook(lambda *_: swap.settle()))
            step.handles += [swap, settle]
        needs_step = bool(self.plan.paged) or bool(step.hosts) or swap is not None
        for index, block in enumerate(blocks):
            policy = policies[index]
            swaps = swap if policy.swaps else None
            if swaps is not None and not policy.recomputes:
                step.handles.append(SwapBlock(block, index, swaps))
            if needs_step:
                around = AroundBlock(block, index, step, policy.recomputes)
                step.handles += announce_copies(block, self._access), around
            if policy.recomputes:
                # around the block's own, which a recomputation calls again
                step.handles.append(
                    Recompute(block, index, self.device.torch_device, swaps)
                )
        # before buffers are taken, which may fail
        step.gradients.attach(step.hosts)
        step.handles += (GradientHooks(host, step) for host in step.hosts)
        looked_up = [i for i, at in enumerate(self.plan.placements) if at is _LOOKUP]
        if step.handles or looked_up:
            step.handles += attach_entry(self.model, self.layout, step, self._access)
        for index in looked_up:
            spec = self.layout.chunks[index].tensors[0]
            owner = self.model.get_submodule(spec.name.rpartition(".")[0])
            table = self.pool.tensor(index, spec)
            step.handles.append(HostEmbedding(owner, table, self.device, self.counters))
        how = self._options.compiled
        if how is not None:
            step.handles += (CompiledForward(block, how) for block in blocks)


_LOOKUP = Placement.HOST_LOOKUP


def _block(chunk: Chunk) -> int:
    return -1 if chunk.block is None else chunk.block


def _remove(handles: list[Any]) -> None:
    """Undo bindings, the last one first, each whatever the others raise."""
    with ExitStack() as undo:
        while handles:
            undo.callback(handles.pop(0).remove)
