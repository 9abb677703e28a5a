"""One training step, top to bottom: the only file that knows the order.

hooks.py calls `Step` where torch comes past: before and after a block, when backward
reaches a block, when a gradient is there. The optimizer calls it at its step. Each method
calls passive parts in the order in which things happen:

    Slots       weights of blocks in device buffers         slots.py
    Gradients   gradients on their way to the host          gradients.py, reduction.py
    Updates     recorded optimizer steps, applied           apply.py
    Swap        saved activations on the host               swap.py
    FullParams  weights and gradients for others to see     full_params.py
    HostWorker  updates that are queued                     worker.py

# Note [The deferred update]

`optimizer.step()` updates parameters whose state is on the device; for every other chunk
the step is only recorded (recorded_step.py). A rank alone applies it when the chunk is used
next, outside of blocks at once: gradient and state come beside the weights, the optimizer's
own code runs, and weights and state go back. A reader of the host copy has it applied first (`apply_all`). There is
room for one gradient a chunk, so the next step applies what is recorded first, and refuses
a gradient that has come meanwhile.

Every number is that of the run without paging: the same kernels with the same arguments on
the same device, one use later. Gradients, sums and norms never pass through another
processor.

# Note [Updates beside the next forward]

Where ranks share the weights on the host, each updates its span of every chunk, and where
the plan says so updates happen on the host. Both are queued at the step, chunk by chunk in
the order in which the next forward needs them. A slot that holds the chunk is stale from
then on. A fetch waits for the update of that very chunk and of no other; for weights that
stay on the device `refresh_stale` does. An update has ended when all ranks of the node have
made theirs: each then enters a barrier, asynchronously, on the host thread, and a fetch
waits for that one too. It cannot be deferred: a reader of a weight would need the others.

# Note [The end of a block in backward]

Nothing marks the end of a block's backward: module backward hooks fire before the gradients
of leaves are accumulated, which still may read weights. Autograd runs ready nodes in
reverse order of creation, so once the output gradient of block b-1 is ready, block b is
done, and a gradient of b that has not arrived never will. So the next block's beginning
ends b, and the gradients of b go then (`_backward_left`). After the first block's backward
it stays in use until the optimizer's step or the next forward.

# Note [From forward to backward]

No prefetch is issued from the last block in training: the slots hold the chunks that
backward begins with, and after backward the first chunks are in their slots again. Without
gradients the ring wraps to the first chunk. A chunk that a queued update is about to change
is not prefetched; the prefetch is retried after the forward of the block that issued it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import graph

from ..errors import AccessError, LayoutError
from ..layout import Direction
from ..types import Chunk, Counters, Layout, Plan
from .apply import ChunkUpdate, Updates
from .calls import (
    AroundCall,
    LossGraph,
    Removable,
    drop_ended_backward,
    inside_backward,
)
from .device import Device, range_of
from .gradients import Gradients
from .host_chunks import HostChunk, HostMemory
from .param_store import ParamStore
from .pass_order import PassOrder
from .ranks import Ranks
from .slots import Slots
from .staging import Staging
from .swap import Swap
from .worker import HostWorker


class Shown(Protocol):
    """Parameters that are shown to others between two passes: `FullParams`."""

    shown: frozenset[int] | None
    num_inside: int

    def hide(self) -> None:
        """Bind parameters as a pass needs them."""

    def show_again(self) -> None:
        """Bind them to the host again where somebody still looks."""


class DueUpdates:
    """Decides when the recorded step of a chunk is applied; see Note [The deferred update].

    Args:
        layout: All chunks.
        memory: Host memory of those that train there.
        store: Where parameters live.
        updates: Apply a step to a chunk.
        worker: Ends updates that are queued.

    Attributes:
        stale: Chunks on the device that are older than their host copies.
    """

    plan: Plan
    slots: Slots
    gradients: Gradients

    def __init__(
        self,
        layout: Layout,
        memory: HostMemory,
        store: ParamStore,
        updates: Updates,
        worker: HostWorker,
    ) -> None:
        self._layout, self._device, self._ranks = layout, memory.device, memory.ranks
        self._store, self._updates, self._worker = store, updates, worker
        self.stale: set[int] = set()
        self._failed: BaseException | None = None

    def apply_in_use(self, chunk: int) -> None:
        """Apply the recorded step of a chunk that is about to be used: see Note [The
        deferred update]."""
        own = self._updates.of_chunk.get(chunk)
        if own is not None and own.recorded is not None and self._updates.defers:
            self._apply_on_device(own)

    def apply_outside(self) -> None:
        """Make weights outside of blocks current."""
        outside = {chunk.index for chunk in self._layout.chunks if chunk.block is None}
        for index in sorted(outside):
            self.apply_in_use(index)
        self.refresh_stale(outside)

    def _apply_on_device(self, own: ChunkUpdate) -> None:
        """Apply a recorded step to weights in a slot in use, or on the device for good."""
        chunk = own.host.chunk
        slot = self.slots.slot_of(chunk.index)
        buffer = self._store.buffer_of(chunk) if slot is None else slot.buffer
        weights = buffer[own.host.weights.within_chunk]
        changed = [chunk.tensors[index] for index in own.changes()]
        try:
            with range_of("protrain::update"):
                self._updates.apply(own, weights, slot)
            if slot is None:
                self._store.updated(changed)
        except BaseException:
            # compute has changed some of the weights; raised again as it is
            if own.written_back is not None:
                # pieces before have theirs on the host
                self._device.compute.wait(own.written_back)
            if slot is not None:
                slot.changed(slot.buffer)
                self.slots.forget(chunk.index)
            else:
                self._device.writes([weights], self._device.compute)
                if self._ranks.world.size == 1:
                    self.slots.refresh(chunk, buffer)
            raise

    def remember(self) -> None:
        """Remember weights as a pass has left them; refuse writes that updates would lose."""
        for own in self._updates.all if self._updates.on_host else ():
            if own.host.chunk.index not in self.plan.away:
                # the host copy is updated, and overwrites that of the device
                self._store.require_unwritten(own.host.chunk)
        self._store.remember()

    def apply_all(self) -> None:
        """Apply all recorded steps: the host copies are the truth then."""
        for own in self._updates.all:
            self._apply_now(own)
        self._updates.settle()

    def _apply_now(self, own: ChunkUpdate) -> None:
        index = own.host.chunk.index
        self.wait(index)
        if own.recorded is None:
            return
        if not self._updates.defers:
            self._require_between_passes()
            self._queue_update(own)
            self.wait(index)
            return
        if self.slots.slot_of(index) is None:
            self._apply_on_device(own)
            return
        self._require_between_passes()
        with self.slots.using(index):
            self._apply_on_device(own)

    def _require_between_passes(self) -> None:
        """End the use of a block that backward came to last; inside of a pass nobody looks."""
        if self.slots.in_forward or inside_backward():
            raise AccessError(
                "weights, gradients and optimizer state can be read between two passes "
                "through the model, not inside of one"
            )
        self.slots.end_use()

    def queue_all(self) -> None:
        """Queue the recorded step of all chunks: see Note [Updates beside the next
        forward]."""
        updates = self._updates
        waiting = [own for own in updates.all if own.recorded is not None]
        # what lies outside of blocks is larger than a buffer, and gets memory of its own
        ahead = deque(
            own
            for own in waiting
            if own.block >= 0
            and own.changes()
            and own.host.chunk.index in self.plan.away
        )
        for own in waiting:
            while ahead and not updates.on_host:
                if not updates.prefetch_operands(ahead[0]):
                    break
                ahead.popleft()
            self._queue_update(own)

    def _queue_update(self, own: ChunkUpdate) -> None:
        chunk = own.host.chunk
        if self.slots.slot_of(chunk.index) is not None:
            self.slots.begin_update(chunk.index)
        else:
            self.stale.add(chunk.index)
        # copies of the weights that came before it, those on compute's stream too
        read, event = [self._device.fetch.record()], None
        if chunk.index not in self.plan.away:
            read.append(self._device.compute.record())
        on_host = self._updates.on_host
        if not on_host:
            weights = None
            if chunk.index not in self.plan.away:
                buffer = self._store.buffer_of(chunk)
                weights = buffer[own.host.weights.within_chunk]
            with range_of("protrain::update"):
                event = self._updates.apply(own, weights)

        def end() -> Any:
            if on_host:
                for copied in read:
                    copied.synchronize()
                self._updates.apply(own)
            elif event is not None:
                event.synchronize()

        end_update = partial(self._end_update, end)
        self._worker.submit(end_update, changes=chunk.index)

    def _end_update(self, end: Callable[[], None]) -> Any:
        """End an update and say so to the other ranks, which would take one that comes
        after a failed one for that."""
        if self._failed is not None and self._ranks.world.size > 1:
            raise self._failed
        try:
            end()
        except BaseException as error:
            # for the updates that are queued behind it; raised again as it is
            self._failed = error
            raise
        return self._ranks.updated()

    def wait(self, chunk: int) -> None:
        """Return once the queued update of a chunk is done, if there is one."""
        if not self._updates.defers:
            self._worker.wait(chunk)
            self.slots.end_update(chunk)

    def require_updated(self, chunk: Chunk) -> None:
        """Raise AccessError if a weight that is used has an update that is still due."""
        own = self._updates.of_chunk.get(chunk.index)
        if own is None:
            return
        if self._updates.defers:
            waits = own.recorded is not None
        else:
            waits = self._worker.pending(chunk.index)
        if waits or chunk.index in self.stale:
            raise AccessError(
                f"{chunk.tensors[0].name}: this weight has a gradient, but it has been "
                "used since the last step without a forward of the model that would have "
                "updated it. Call the model, not functions of its weights."
            )

    def refresh_stale(self, among: Set[int] | None = None) -> None:
        """Make weights that stay on the device current after a queued update, of all
        chunks or `among` some."""
        for index in sorted(self.stale if among is None else self.stale & among):
            self._worker.wait(index)
            chunk = self._layout.chunks[index]
            self.slots.refresh(chunk, self._store.buffer_of(chunk))
            self.stale.discard(index)
            self._store.updated(chunk.tensors)

    def settle(self) -> None:
        """Return once no update is pending, without other ranks."""
        self.apply_all()
        if self.plan.shards == 1:
            # a gather waits for the ranks that do not ask now
            self.refresh_stale()

    def settle_gradients(self) -> None:
        """Return once every gradient is where it is read, and clipped."""
        if not self._updates.all:
            return
        self.apply_all()
        self.take_gradients_back()
        self._updates.scale()
        self._updates.scale_used()
        # what other ranks have scaled is read next
        self._ranks.meet_on_node()

    def take_gradients_back(self) -> None:
        """Return once gradients are in host memory, those that somebody has set too."""
        self.gradients.settle()
        for own in self._updates.all:
            if own.host.grads.is_replaced:
                # an update may be reading the sum, whose place it takes, and the clip is
                # not for it
                self._apply_now(own)
                self._updates.settle()
                self._updates.scale()
            own.host.grads.take_back()


class Step:
    """Calls the parts of an open model in the order of a training step.

    `Session` makes it, and gives it the parts of a plan (`plan` to `handles`).

    Attributes:
        hosts: Chunks that train in host memory, in the order of their updates.
        handles: Bindings to the model.
        closed: Nothing is shown any more.
        loss_graph: Knows which nodes the passes of a step have made.
        outermost: Module whose forward runs, above the blocks; None outside of one.
    """

    plan: Plan
    slots: Slots
    gradients: Gradients
    swap: Swap | None = None
    full_params: Shown

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        device: Device,
        memory: HostMemory,
        store: ParamStore,
        updates: Updates,
        staging: Staging,
        worker: HostWorker,
        counters: Counters,
    ) -> None:
        self.layout, self.device, self.counters = layout, device, counters
        self.ranks: Ranks = memory.ranks
        self.store, self.updates = store, updates
        self.staging, self.worker = staging, worker
        self.params = dict(model.named_parameters())
        self.memory = memory
        self.due = DueUpdates(layout, memory, store, updates, worker)
        self.hosts: list[HostChunk] = []
        self.handles: list[Removable] = []
        self.closed = self.inside_forward = False
        self._prefetch_held = self._autocasts = False
        self._order: PassOrder | None = None
        self.outermost: nn.Module | None = None
        self.loss_graph, self._entered = LossGraph(), 0
        # graph task of the backward that runs, or ran last
        self._backward = -1

    def take_plan(self, plan: Plan, slots: Slots) -> None:
        """Run another plan from here on, of which nothing is in use."""
        self.plan, self.slots, self._order = plan, slots, None
        self.due.plan, self.due.slots, self._prefetch_held = plan, slots, False
        self.updates.staging_bytes = plan.staging_bytes
        if plan.shards > 1:
            self._order = PassOrder(len(self.layout.blocks), self.ranks)
        # not by `requires_grad`: what trains may be frozen just now
        trained = {chunk.index for chunk in self.layout.chunks if chunk.trainable}
        chunk_of, paged = self.layout.chunk_of, trained.intersection(plan.paged)
        self.loss_graph.paged = {
            param: name
            for name, param in self.params.items()
            if chunk_of.get(name) in paged
        }

    # forward

    def begin_micro_batch(self, synchronises: bool) -> None:
        """A micro-batch begins, the last one of a step if it `synchronises`."""
        if self._order is not None:
            self._complete_pass()
            self._order.begin(Direction.FORWARD)
        self.gradients.begin_micro_batch(synchronises)

    def forward_begins(self, module: nn.Module) -> None:
        """A forward begins in a module above the blocks."""
        self._hide_params()
        if self.outermost in (None, module):
            # first: after an error the forward that ends remembers nothing
            self.store.verify()
            self.outermost, self.inside_forward = module, True
            self._entered = torch.autograd._get_sequence_nr()
        for handle in self.handles:
            if isinstance(handle, AroundCall):
                handle.require_bound()
        self.updates.prefetch(0)
        self.due.apply_outside()
        # or gradients would stay on the device until backward sends the next ones
        self.gradients.retire()
        self.due.refresh_stale()

    def forward_ended(self, module: nn.Module) -> None:
        """A forward of a module above the blocks has ended, or failed."""
        if module is self.outermost:
            self.outermost, self.inside_forward = None, False
            self.loss_graph.pass_made(self._entered)
            self.due.remember()
            self._show_params_again()

    def before_block(self, block: int, direction: Direction) -> None:
        """Make the weights of a block readable; does nothing if they are.

        Raises:
            AccessError: Somebody would copy its weights later than they are there.
            LayoutError: The forward of another block is still running.
        """
        if self.slots.block == block:
            return
        if graph._allow_mutation_on_saved_tensors_enabled and self.slots.is_paged(
            block
        ):
            raise AccessError(
                f"block {block} is paged, and `allow_mutation_on_saved_tensors` would copy "
                "its weights when its slot has changed already. Leave that context, or "
                "use protrain_force_all_persistent: true."
            )
        alone = not self.inside_forward and self.slots.block is None
        if alone and direction is not Direction.BACKWARD:
            # called without the modules above it, whose forward looks first
            self._hide_params()
            self.store.verify()
        if self._order is not None:
            direction = self._skip_to(block, direction)
        self._use(block, direction)

    def after_block(self, block: int, direction: Direction) -> None:
        """The forward of a block has ended, or failed."""
        if self.slots.block == block:
            self._require_unwritten()
            self.slots.end_use()
            if self._prefetch_held:
                self._prefetch(block, direction)
        self._show_params_again()

    def _use(self, block: int, direction: Direction) -> None:
        backward = direction is Direction.BACKWARD
        self._hide_params()
        if backward:
            task = torch._C._current_graph_task_id()
            # -1 outside of backward, where the rest of a pass is used
            if task not in (self._backward, -1):
                self._backward = task
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._backward_ended)
            for ahead in (block, block - 1):
                self._fetch_sums(ahead)
            self.gradients.reach(block)
        if self.slots.block is not None:
            if self.slots.in_forward and not backward:
                raise LayoutError(
                    f"block {block} is called inside block {self.slots.block}: one of "
                    "them is not a repeated layer, so this model cannot be paged. Set "
                    "protrain_auto_memory: false."
                )
            # see Note [The end of a block in backward]
            self._require_unwritten()
            self.slots.end_use()
        for chunk in self.slots.missing(block):
            self.counters.num_misses += 1
            self.due.wait(chunk)
            self.slots.fetch(chunk)
        self.slots.begin_use(block, in_forward=not backward)
        if not backward:
            kind = self.device.torch_device.type
            self._autocasts = self._autocasts or torch.is_autocast_enabled(kind)
            for chunk in self.layout.blocks[block].chunks:
                self.due.apply_in_use(chunk)
            self.updates.prefetch(block + 1)
        elif self.swap is not None:
            self.swap.open_backward(block)
        self._prefetch(block, direction)

    def _require_unwritten(self) -> None:
        """Refuse writes to the weights of the block in use, which its slots would lose."""
        if self.slots.block is not None:
            for chunk in self.layout.blocks[self.slots.block].chunks:
                if self.slots.slot_of(chunk) is not None:
                    self.store.require_unwritten(self.layout.chunks[chunk])

    def _prefetch(self, block: int, direction: Direction) -> None:
        """Fetch chunks ahead of a block; see Note [From forward to backward]."""
        self._prefetch_held = False
        if self.slots.disk is not None:
            self.slots.read_ahead(block, direction)
        for chunk in self.slots.ahead(block, direction):
            if self.slots.is_updating(chunk):
                if self.worker.pending(chunk):
                    # waiting here would keep the block itself from being queued
                    self._prefetch_held = True
                    return
                self.slots.end_update(chunk)
            self.slots.fetch(chunk)

    def _skip_to(self, block: int, direction: Direction) -> Direction:
        """Use blocks that this rank leaves out; see Note [Fetches that all ranks make]."""
        order = self._order
        assert order is not None
        if order.begins(block, direction):
            self._complete_pass()
            order.begin(direction)
            if order.goes_down:
                # called once all of backward has run
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._complete_pass)
        for skipped in order.skipped(block):
            self._use(skipped, order.direction)
            self.slots.end_use()
        return order.direction

    def _complete_pass(self) -> None:
        assert self._order is not None
        for block in self._order.rest():
            self._use(block, self._order.direction)
            self.slots.end_use()

    # backward

    def backward_reaches(self, block: int) -> None:
        """The gradient of a block's output is ready: its backward begins.

        Raises:
            AccessError: This backward pass has a graph of its own.
        """
        if self.closed:
            raise AccessError(
                "backward comes to a graph whose model was given back in between, and "
                "whose weights were elsewhere. End a step before `close`."
            )
        if torch.is_grad_enabled() and self.slots.is_paged(block):
            raise AccessError(
                f"block {block} is paged, and `create_graph=True` would let a second "
                "backward pass read its weights when they have left. Use "
                "protrain_force_all_persistent: true."
            )
        before = self.slots.block
        if before != block:
            if self.slots.in_forward:
                raise LayoutError(
                    f"backward comes to block {block} inside the forward of block "
                    f"{before}, whose weights would leave. Call it between two blocks, "
                    "or use protrain_force_all_persistent: true."
                )
            self.before_block(block, Direction.BACKWARD)
            if before is not None:
                # see Note [The end of a block in backward]
                self.gradients.send_rest(before)
                self._fetch_sums(before - 2)

    @contextmanager
    def block_inside_backward(self, block: int, stays: bool) -> Iterator[None]:
        """Around a call of a block inside backward: a recomputation, after which the block
        `stays` in use, or a call by a hook, whose own block goes on to read its weights."""
        before = self.slots.block
        self.before_block(block, Direction.BACKWARD)
        try:
            yield
        finally:
            if before is not None and not stays:
                self.before_block(before, Direction.BACKWARD)

    def _fetch_sums(self, block: int) -> None:
        for grads in self.gradients.sums_of(block):
            self.due.require_updated(grads.chunk)
            self.updates.scale()
            self.gradients.fetch_sum(grads)

    def _backward_ended(self) -> None:
        self._require_unwritten()
        self.due.remember()
        self._show_params_again()

    def gradient_arrives(self, host: HostChunk, index: int, is_last: bool) -> None:
        """Autograd is about to add a gradient to `.grad`; `is_last` of its hooks is ours."""
        chunk = host.chunk
        self.due.require_updated(chunk)
        # autocast keeps casts of fp32 weights for later blocks and forwards
        kept = self._autocasts and chunk.tensors[0].dtype is torch.float32
        paged = self.slots.slot_of(chunk.index) is not None
        if paged and self.slots.block != chunk.block and not kept:
            raise AccessError(
                f"{chunk.tensors[0].name}: a gradient of this weight, which is paged, "
                "arrives while its block is not in use: something outside of the block's "
                "forward, or computed in it apart from what it returns, reads the weight. "
                "Return it from the block, or use protrain_force_all_persistent: true."
            )
        # it finds the sum so far as the plain run has it
        self.updates.scale()
        self.gradients.make_room(host, index, is_last)

    def gradient_ready(self, host: HostChunk, index: int) -> None:
        """Autograd has added a gradient to `.grad`: take it away."""
        with range_of("protrain::gradient"):
            gradient = host.grads.arrived(index)
            if gradient is not None:
                self.gradients.take(host, index, gradient)

    # the optimizer

    def clip_grad_norm(
        self, params: Sequence[nn.Parameter], max_norm: float
    ) -> Tensor | None:
        """Clip the 2-norm of all gradients and return it; None if the plain way sees all.

        `params` come in the order of the plain run.
        """
        self._hide_params()
        norm = None
        if self.updates.all:
            if self.updates.clip is not None:
                # once more without a step: it sees what the first one has scaled
                self.due.settle_gradients()
            self.due.take_gradients_back()
            norm = self.updates.clip_grad_norm(params, max_norm)
        self._show_params_again()
        return norm

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Around the plain step, which updates only parameters with state on the device."""
        # what is shown would be taken for what somebody has written after it
        self._hide_params()
        self.slots.end_use()
        self.due.take_gradients_back()
        self.due.apply_all()
        self.loss_graph.drop_passes()
        with self.updates.recording():
            yield
        if self.updates.defers:
            self.updates.prefetch(0)
        else:
            self.due.queue_all()
        # a method of the model other than its forward may read them
        with suppress(torch.OutOfMemoryError):
            # the next forward tries again, where another plan may help
            self.due.apply_outside()
        self._show_params_again()

    def switch_optimizer(self, method: str) -> None:
        """Call `train` or `eval` of a schedule-free optimizer, wherever weights are."""
        # this rank's alone: other ranks may not have begun to make theirs
        self.gradients.settle_own()
        self.due.apply_all()
        updates = self.updates
        with updates.recording_call(method):
            getattr(updates.kind, method)(updates.plain)
        self.due.apply_all()

    # between two passes

    def settle_all(self) -> None:
        """Return once weights and gradients are as the plain run has them, with all ranks."""
        self.due.settle_gradients()
        self.due.refresh_stale()
        # copies to slots read what may be written now
        self.device.synchronize()

    def forget_gradients(self) -> None:
        """Undo the forward and backward passes since the last optimizer step."""
        drop_ended_backward(self.device.torch_device)
        if self.swap is not None:
            # a copy for backward keeps its memory until then
            self.swap.settle()
        self.slots.end_use()
        self.gradients.discard()
        self.updates.forget_gradients()
        for param in self.params.values():
            param.grad = None

    # readers and writers of the state

    def _hide_params(self) -> None:
        # asked before each block: a call would cost more
        if self.full_params.shown is not None:
            self.full_params.hide()

    def _show_params_again(self) -> None:
        if self.full_params.num_inside:
            self.full_params.show_again()
