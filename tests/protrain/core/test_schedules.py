"""Random schedules on queues that are carried out at any moment, the last one included.

The real pager, slots, host thread, gradient offload and swap, with kernels in place of a
model: each checks that it reads exactly the bytes that its block should have by then.
One failing schedule is run again with `Schedules(seed).run()`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from axolotl.integrations.protrain.core.engine.host_tensors import HostMemory
from axolotl.integrations.protrain.core.engine.pager import Pager
from checked_device import CheckedDevice
from simulated import DeferredDevice
from torch import Tensor

from axolotl.integrations.protrain.core.engine.gradients import Gradients
from axolotl.integrations.protrain.core.engine.host_chunks import HostChunk
from axolotl.integrations.protrain.core.engine.host_pool import HostPool
from axolotl.integrations.protrain.core.engine.slots import Slot
from axolotl.integrations.protrain.core.engine.staging import Staging
from axolotl.integrations.protrain.core.engine.swap import Swap
from axolotl.integrations.protrain.core.engine.worker import HostWorker
from axolotl.integrations.protrain.core.layout import Direction, Schedule
from axolotl.integrations.protrain.core.types import Chunk, Counters, TensorSpec

FORWARD, BACKWARD, INFERENCE = Direction


class Param:
    """A parameter without autograd: `arrive` does what an accumulated gradient does."""

    _post_accumulate_grad_hooks = None

    def __init__(self, spec: TensorSpec) -> None:
        self.shape, self.dtype = spec.shape, spec.dtype
        self.device = torch.device("cpu")
        self.grad: Tensor | None = None
        self.hook: Callable[[Param], None] = lambda param: None
        self.before: Callable[[Tensor], None] = lambda gradient: None

    def register_hook(self, hook: Callable[[Tensor], None]) -> SimpleNamespace:
        self.before = hook
        self._backward_hooks = {0: hook}
        return SimpleNamespace(id=0)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Param], None]) -> None:
        self.hook = hook

    def arrive(self, gradient: Tensor) -> None:
        self.before(gradient)
        self.grad = gradient
        self.hook(self)


class Schedules:
    """One random model, device and run, all drawn from a seed.

    Every tensor is full of one number. `values` has what it should be, `sums` the
    gradients since the last update, `saved` for each block that swaps what autograd
    would keep and what it should be.
    """

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        moments = draw.choice([None, seed, seed])
        self.queues = DeferredDevice(moments, queue_compute=True)
        self.device = CheckedDevice(self.queues)
        self.wrong: list[str] = []
        sizes = [draw.randint(0, 3) for _ in range(draw.randint(1, 5))]
        sizes[draw.randrange(len(sizes))] = draw.randint(1, 3)
        self.num_blocks, num_chunks = len(sizes), sum(sizes)
        block_of = [block for block, size in enumerate(sizes) for _ in range(size)]
        self.chunks = tuple(self._chunk(n, block) for n, block in enumerate(block_of))
        trained = tuple(chunk for chunk in self.chunks if chunk.trainable)
        self.values = {s.name: float(n) for n, s in enumerate(self._specs())}
        self.sums: dict[str, float] = {}
        self.params = {spec.name: Param(spec) for spec in self._specs()}

        self.arena = HostPool()
        whole = self.arena.add(self.chunks)
        memory = HostMemory(self.arena, self.device)
        assert whole is not None
        self.pinned = [whole, *memory.add(trained)]
        for region in self.pinned:
            self.device.pin(region)
        self._write_arena()
        self.worker = HostWorker(self.device)
        self.offload = Gradients(self.device, Staging(self.device, Counters()))
        # a norm is taken at once, of what a kernel fills later
        self.offload.begin_micro_batch(False)
        self.hosts: list[Any] = [
            HostChunk(c, self.params, memory)  # type: ignore[arg-type]
            for c in trained
        ]
        self.offload.attach(self.hosts)
        num_slots = draw.randint(max(sizes), num_chunks)
        self.slots = [
            Slot(
                self.device.allocate(max(c.nbytes for c in self.chunks[n::num_slots])),
                self.device,
            )
            for n in range(num_slots)
        ]
        ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
        schedule = Schedule(
            [range(end - size, end) for end, size in zip(ends, sizes, strict=True)],
            num_slots,
        )
        self.slot_of = schedule.slot_of
        swapping = draw.random() < 0.7
        self.swapping = {
            b for b in range(len(sizes)) if swapping and draw.random() < 0.6
        }
        self.swap = Swap(self.device, [], {})
        self.saved: dict[int, list[tuple[Callable[[], Tensor], float]]] = {}
        self.pager = Pager(
            schedule,
            self.slots,
            [self.arena.chunk(c.index) for c in self.chunks],
            wait_update=self.worker.wait,
            update_pending=self.worker.pending,
            opened=self.opened,
        )

    def run(self) -> None:
        """Some steps, each with its micro-batches, updates and interludes."""
        try:
            for _ in range(self.draw.randint(1, 2)):
                for last in (False, True)[self.draw.randint(0, 1) :]:
                    self.micro_batch(last)
                    self.interlude()
                self.update()
                self.interlude()
        finally:
            self.close()
        assert not self.wrong, self.wrong

    def micro_batch(self, last: bool) -> None:
        """Only the last one has gradients: sums are torch's own, which wait for nothing."""
        drop = self.draw.random() < 0.2
        blocks = [
            block
            for block in range(self.num_blocks)
            if not drop or self.draw.random() < 0.7
        ]
        # what several blocks save
        shared = self.activation()
        for block in blocks:
            self.forward(block, FORWARD)
            if block in self.swapping:
                self.save(block, shared)
        del shared
        self.pager.close_any()
        if self.draw.random() < 0.1:
            # nobody asks for the gradient of this one
            self.saved.clear()
            return
        for block in reversed(blocks):
            self.backward(block, last)

    def interlude(self) -> None:
        act = self.draw.random()
        if act < 0.3:
            self.pager.close_any()
            for block in range(self.num_blocks):
                self.forward(block, INFERENCE)
        elif act < 0.4:
            self.load()
        elif act < 0.5:
            self.settle()

    def opened(self, block: int, direction: Direction) -> None:
        if self.swapping and direction is BACKWARD:
            self.swap.open_backward(block)

    def forward(self, block: int, direction: Direction) -> None:
        self.pager.open(block, direction)
        self.launch(block)
        self.pager.close(block, direction)

    def backward(self, block: int, last: bool) -> None:
        before = self.pager.window
        self.pager.open(block, BACKWARD)
        if before is not None and before != block:
            self.offload.left(before)
        self.launch(block)
        self.read_saved(block)
        for host in self.hosts:
            if host.chunk.block == block and last:
                for spec in host.chunk.tensors:
                    # what the loss does not depend on never arrives
                    if self.draw.random() < 0.9:
                        self.gradient(spec)

    def launch(self, block: int) -> None:
        """A kernel that reads all chunks of a block when it is carried out."""
        expected = [
            (self.slots[self.slot_of(chunk.index)].buffer, spec, self.values[spec.name])
            for chunk in self.chunks
            if chunk.block == block
            for spec in chunk.tensors
        ]

        def kernel() -> None:
            for buffer, spec, value in expected:
                read = buffer[spec.offset : spec.offset + spec.nbytes].view(spec.dtype)
                if not bool((read == value).all()):
                    self.wrong.append(f"{spec.name}: {read.tolist()}, not {value}")

        self.queues.launch(kernel)

    def activation(self) -> tuple[Tensor, float]:
        """A storage that a kernel fills, just large enough to be swapped."""
        value = float(self.draw.randint(1, 99))
        tensor = torch.full((1024,), float("nan"))
        self.queues.launch(partial(torch.Tensor.fill_, tensor, value))
        return tensor, value

    def save(self, block: int, shared: tuple[Tensor, float]) -> None:
        hooks = self.swap.saving(block)
        own = [self.activation() for _ in range(self.draw.randint(0, 2))]
        saved = [shared, *own] if self.draw.random() < 0.5 else own
        self.saved[block] = [
            # a view, as autograd keeps many
            (partial(hooks.unpack_hook, hooks.pack_hook(tensor[8:])), value)
            for tensor, value in saved
        ]

    def read_saved(self, block: int) -> None:
        """Kernels that read what comes back; some of it is never asked for."""
        for unpack, value in self.saved.pop(block, ()):
            if self.draw.random() < 0.9:
                self.queues.launch(partial(self.check_saved, unpack(), value))

    def check_saved(self, tensor: Tensor, value: float) -> None:
        if tensor.shape != (1016,) or not bool((tensor == value).all()):
            self.wrong.append(f"saved: {tensor[:2].tolist()}, not {value}")

    def gradient(self, spec: TensorSpec) -> None:
        value = float(self.draw.randint(1, 9))
        gradient = torch.full(spec.shape, float("nan"))
        self.queues.launch(lambda: gradient.fill_(value))
        self.sums[spec.name] = self.sums.get(spec.name, 0.0) + value
        self.params[spec.name].arrive(gradient)

    def update(self) -> None:
        """Each weight loses its gradient, on the host thread."""
        self.offload.settle()
        fetches = self.device.fetch.record()
        for host in self.hosts:
            names = [s.name for s in host.chunk.tensors if s.name in self.sums]
            if names:
                sums = {name: self.sums.pop(name) for name in names}
                for name, total in sums.items():
                    self.values[name] -= total
                host.main_grads.present.clear()
                self.pager.close_any()
                self.pager.forget(host.chunk.index)
                self.worker.submit(
                    self._task(host, fetches, sums), changes=host.chunk.index
                )

    def _task(self, host: HostChunk, fetches: Any, sums: dict[str, float]) -> Any:
        def update() -> None:
            fetches.synchronize()
            self.device.writes((host.weights.memory, host.main_grads.memory))
            for index, spec in enumerate(host.chunk.tensors):
                if spec.name in sums:
                    gradient, total = host.main_grads[index], sums[spec.name]
                    if not bool((gradient == total).all()):
                        self.wrong.append(f"a sum of {gradient.tolist()}, not {total}")
                    self.arena.tensor(host.chunk.index, spec).sub_(gradient)

        return update

    def settle(self) -> None:
        """As a reader of the state does."""
        self.worker.drain()
        self.device.reads(self._tensors())
        for spec, tensor in zip(self._specs(), self._tensors(), strict=True):
            if not bool((tensor == self.values[spec.name]).all()):
                self.wrong.append(f"{spec.name} on the host: {tensor.tolist()}")

    def load(self) -> None:
        """As `load_state_dict` does."""
        self.worker.drain()
        self.device.synchronize()
        for name in self.values:
            self.values[name] = float(self.draw.randint(10, 99))
        self._write_arena()
        self.pager.forget_all()

    def close(self) -> None:
        self.worker.drain()
        self.worker.close()
        self.pager.close_any()
        self.device.synchronize()
        self.offload.close()
        self.saved.clear()
        self.swap.remove()
        for memory in self.pinned:
            self.device.unpin(memory)
        for slot in self.slots:
            slot.release()

    def _chunk(self, index: int, block: int) -> Chunk:
        specs = tuple(
            TensorSpec(
                f"{index}.{n}", (self.draw.randint(1, 9),), torch.float32, n * 256
            )
            for n in range(self.draw.randint(1, 2))
        )
        last = specs[-1]
        trainable = self.draw.random() < 0.5
        return Chunk(index, block, trainable, specs, last.offset + last.nbytes)

    def _specs(self) -> list[TensorSpec]:
        return [spec for chunk in self.chunks for spec in chunk.tensors]

    def _tensors(self) -> list[Tensor]:
        return [self.arena.tensor(c.index, s) for c in self.chunks for s in c.tensors]

    def _write_arena(self) -> None:
        self.device.writes(self._tensors())
        for spec, tensor in zip(self._specs(), self._tensors(), strict=True):
            tensor.fill_(self.values[spec.name])


def run_all(seeds: range) -> None:
    """Raise with the first schedule that fails, saying its seed."""
    for seed in seeds:
        try:
            Schedules(seed).run()
        except Exception as error:
            raise AssertionError(f"Schedules({seed}).run() fails") from error


def test_schedules() -> None:
    run_all(range(1_000))


@pytest.mark.full
def test_many_schedules() -> None:
    run_all(range(1_000, 10_000))
