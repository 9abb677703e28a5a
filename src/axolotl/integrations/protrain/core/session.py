"""Composition root: opens a model for paged training and closes it again.

Wires layout, plan, runtime and optimizer together and holds what must be undone.
The model's modules, names and parameters stay the objects they were.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from .layout import Schedule, slot_bytes
from .optim import GradientOffload, HostChunk, PagedAdamW, optimizer_bytes
from .runtime import (
    Arena,
    Device,
    HostWorker,
    Pager,
    Recompute,
    Removable,
    Residence,
    Slot,
    attach_block,
    attach_entry,
    attach_state_dict,
)
from .types import Chunk, Layout, Placement, Plan


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
    stall_s: float
    device_peak_bytes: int
    device_placed_bytes: int
    device_optimizer_bytes: int
    host_arena_bytes: int
    host_optimizer_bytes: int


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
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        plan: Plan,
        device: Device,
        options: Options = Options(),  # noqa: B008 - a frozen value
    ) -> None:
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
        self._recomputes: list[Recompute] = []
        self._pinned: list[Tensor] = []

        on_host = [c for c in layout.chunks if plan.placements[c.index].on_host]
        trained = tuple(c for c in on_host if c.trainable)
        self._numbers = {index: n for n, index in enumerate(plan.paged)}
        self._worker = HostWorker(device)
        self._arena = Arena(tuple(on_host))
        self._gradient_arena = Arena(
            tuple(c for c in trained if not c.has_masters(options.fp32_master))
        )
        self._slots = [
            Slot(device.allocate(nbytes), device, options.poison)
            for nbytes in slot_bytes(layout, plan.placements, plan.n_buffer)
        ]
        self._residence = Residence(
            model,
            on_host,
            self._arena,
            {chunk.index: self._device_bytes(chunk) for chunk in on_host},
            device,
            announce=self._attach_state,
        )
        self._pager = self._build_pager()
        self._host_chunks: list[HostChunk] = []
        self._gradients = GradientOffload(device, self._worker)
        try:
            self._open(trained)
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return self._closed

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
        )
        return self._optimizer

    def clip_grad_norm(self, max_norm: float) -> Tensor | None:
        """Clip over device and host gradients; None if the plain way sees them all."""
        if not isinstance(self._optimizer, PagedAdamW):
            return None
        self._pager.close_any()
        return self._optimizer.clip_grad_norm(list(self._params.values()), max_norm)

    def ready(self) -> None:
        """Make weights that stay on the device current after a host update."""
        for index in sorted(self._stale):
            self._worker.wait(index)
            self._residence.refresh(self.layout.chunks[index])
        self._stale.clear()

    def settle(self) -> None:
        """Return once no host update is pending: what is read next is the truth."""
        self._worker.drain()
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

    def measured(self) -> Measured:
        """Counters so far."""
        optimizer = self._optimizer
        return Measured(
            fetched_bytes=self._pager.fetched_bytes + self._residence.refreshed_bytes,
            offloaded_bytes=self._gradients.offloaded_bytes,
            num_fetches=self._pager.num_fetches,
            num_misses=self._pager.num_misses,
            stall_s=self.device.stall_s + self._worker.waited_s,
            device_peak_bytes=self.device.peak_bytes(),
            device_placed_bytes=self._placed_bytes,
            device_optimizer_bytes=self._device_optimizer_bytes(),
            host_arena_bytes=self._arena.nbytes,
            host_optimizer_bytes=(
                optimizer.host_bytes() if isinstance(optimizer, PagedAdamW) else 0
            ),
        )

    def close(self) -> None:
        """Finish queued work, remove the hooks, give plain host tensors back."""
        if self._closed:
            return
        self._closed = True
        try:
            self._worker.drain()
        finally:
            self._worker.close()
            self._pager.close_any()
            self.device.synchronize()
            _remove(self._handles)
            self._residence.move_out()
            # last: until here a reader of the state had to be told where it is
            _remove(self._state_handles)
            self._gradients.close()
            while self._pinned:
                self.device.unpin(self._pinned.pop())
            for slot in self._slots:
                slot.release()

    # opening

    def _open(self, trained: Sequence[Chunk]) -> None:
        self._residence.move_in()
        for arena in (self._arena, self._gradient_arena):
            memory = arena.whole()
            if memory is not None:
                self.device.pin(memory)
                self._pinned.append(memory)
        self._host_chunks = [
            HostChunk(
                chunk,
                self._params,
                self._arena,
                self._gradient_arena,
                self._options.fp32_master,
                self.device,
            )
            for chunk in _needed_first(trained)
        ]
        for chunk in self.layout.chunks:
            if self.plan.placements[chunk.index] is Placement.HOST_STATE:
                self._residence.refresh(chunk)
        self._placed_bytes = self.device.used_bytes()
        self._attach()

    def _device_bytes(self, chunk: Chunk) -> Tensor:
        number = self._numbers.get(chunk.index)
        if number is None:
            return self.device.allocate(chunk.nbytes)
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
        return Pager(
            schedule,
            self._slots,
            [self._arena.chunk(index) for index in paged],
            wait_update=lambda number: self._worker.wait(paged[number]),
            update_pending=lambda number: self._worker.pending(paged[number]),
        )

    def _attach(self) -> None:
        needs_windows = bool(self.plan.paged) or any(
            host.chunk.pageable for host in self._host_chunks
        )
        left = self._gradients.send_left if self._host_chunks else None
        for block, recompute in zip(
            self.layout.blocks, self.plan.recompute, strict=True
        ):
            module = self._modules[block.name]
            if recompute:
                self._recomputes.append(Recompute(module))
            if needs_windows:
                self._handles += attach_block(module, block.index, self._pager, left)
        self._handles += self._gradients.attach(self._host_chunks)
        self._handles += self._recomputes
        if self._handles:
            self._handles += attach_entry(self._entries(), self._enter)

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
        for recompute in self._recomputes:
            recompute.unwind()
        self._pager.close_any()
        self.ready()

    def _before_update(self, host: HostChunk) -> None:
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


def _needed_first(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Order of host updates: weights outside blocks are read before the first block."""
    return sorted(chunks, key=lambda c: (c.block is not None, c.index))
