"""Keep, recompute, swap: equal numbers, copies counted, nothing kept too long."""

from __future__ import annotations

import copy
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from core_models import (
    ALL,
    adamw,
    batches,
    freeze,
    hook_counts,
    open_session,
    stack,
    twin,
    wrapped,
)
from simulated import DeferredDevice, SimulatedDevice, at_rate
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.device import CpuDevice, Device
from axolotl.integrations.protrain.core.engine.swap import Swap
from axolotl.integrations.protrain.core.errors import AccessError
from axolotl.integrations.protrain.core.types import SMALLEST_SWAP_BYTES

POLICIES: dict[str, dict[str, Any]] = {
    "keep": {},
    "recompute": {"recompute": ALL},
    "swap": {"swap": ALL},
    "swap inputs": {"swap": ALL, "recompute": ALL},
    "mixed": {"swap": (0, 2, 3), "recompute": (1, 3)},
}
DELAYS: dict[str, Callable[[], Device]] = {
    "none": CpuDevice,
    "fixed": lambda: SimulatedDevice(at_rate(1e8), at_rate(5e7)),
    "random": lambda: DeferredDevice(seed=3),
    "latest": DeferredDevice,
}
LENGTH = 40
"""Tokens of a row; the hidden states of a batch are 10 KB then, enough to be swapped."""


@pytest.fixture(params=DELAYS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = DELAYS[request.param]()
    if isinstance(device, SimulatedDevice):
        with closing(device):
            yield device
    else:
        yield device


class Counted(CpuDevice):
    """Lists the source of each copy to the host that is no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[int] = []
        self.offloaded: list[int] = []
        for stream, copies in (
            (self.fetch, self.fetched),
            (self.offload, self.offloaded),
        ):
            self._count_copies(stream, copies)

    @staticmethod
    def _count_copies(stream: Any, copies: list[int]) -> None:
        copy = stream.copy

        def counted(target: Tensor, source: Tensor) -> None:
            copies.append(source.nbytes)
            copy(target, source)

        stream.copy = counted


def saved_storages(model: nn.Module, block: nn.Module, tokens: Tensor) -> list[int]:
    """Bytes of each storage that a block saves, weights and small ones left out."""
    weights = {t.untyped_storage().data_ptr() for t in model.parameters()}
    seen: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    handles = [
        block.register_forward_pre_hook(lambda *_: hooks.__enter__()),
        block.register_forward_hook(lambda *_: hooks.__exit__()),
    ]
    model(tokens).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return [nbytes for nbytes in seen.values() if nbytes >= SMALLEST_SWAP_BYTES]


def test_each_storage_travels_once_each_way() -> None:
    model = stack(width=32)
    (tokens,) = batches(1, length=LENGTH)
    expected = saved_storages(model, model.layers[2], tokens)
    assert len(expected) > 4
    device = Counted()
    with closing(
        open_session(model, device=device, resident=ALL, swap=(2,))
    ) as session:
        model(tokens).backward()
        assert sorted(device.offloaded) == sorted(expected)
        # what the next block keeps need not come back
        measured = session.measured()
        assert measured.swapped_out_bytes == sum(expected)
        assert sorted(device.fetched) == sorted(expected)


@pytest.mark.parametrize("policy", ["keep", "recompute", "swap"])
def test_a_context_that_copies_what_is_written_is_refused(policy: str) -> None:
    """It would copy saved weights when their slot changes, too late."""
    model = stack()
    how: dict[str, Any] = {} if policy == "keep" else {policy: ALL}
    session = open_session(model, **how)
    (tokens,) = batches(1)
    with (
        torch.autograd.graph.allow_mutation_on_saved_tensors(),
        pytest.raises(AccessError, match="block 0 is paged.*saved_tensors"),
    ):
        model(tokens)
    model(tokens).backward()
    session.close()


def test_recompute_costs_one_more_forward_of_each_block() -> None:
    model = stack(width=32)
    runs = [0] * 6
    for index, layer in enumerate(model.layers):

        def count(_module: nn.Module, _args: Any, index: int = index) -> None:
            runs[index] += 1

        layer.up.register_forward_pre_hook(count)
    (tokens,) = batches(1, length=LENGTH)
    with closing(open_session(model, recompute=(0, 1, 3), swap=(1, 2))):
        model(tokens).backward()
        assert runs == [2, 2, 1, 2, 1, 1]
        with torch.no_grad():
            model(tokens)
        assert runs == [3, 3, 2, 3, 2, 2]


def test_two_graphs_at_once(device: Device) -> None:
    """Two forwards before the first backward, and backward in either order."""
    model = stack(width=32)
    keep = freeze(model, ["norm"])
    plain = twin(model)
    one, two = batches(2, length=LENGTH)

    def gradients(of: nn.Module) -> list[Tensor]:
        first, second, third = of(one), of(two), of(one)
        first.backward()
        third.backward()
        second.backward(retain_graph=True)
        second.backward()
        return [p.grad for p in of.parameters() if p.grad is not None]

    expected = gradients(plain)
    with closing(open_session(model, keep, device=device, swap=ALL)):
        got = gradients(model)
        assert len(got) == len(expected) > 0
        assert all(map(torch.equal, got, expected))


def test_a_graph_that_is_dropped_frees_its_memory(device: Device) -> None:
    model = stack(width=32)
    keep = freeze(model, ["norm"])
    (tokens,) = batches(1, length=LENGTH)
    with closing(open_session(model, keep, device=device, swap=ALL)) as session:
        loss = model(tokens)
        taken = session.measured().host_swap_bytes
        for _ in range(5):
            loss = model(tokens)
        del loss
        gc.collect()
        model(tokens).backward()
        # one more than the one that `loss` held while the next was computed
        assert session.measured().host_swap_bytes <= 2 * taken


def test_what_the_last_block_has_sent_is_free_for_what_follows() -> None:
    """Which often is the peak of a step: as much as if copies took no time."""
    used: list[int] = []
    with closing(SimulatedDevice(at_rate(1e9), at_rate(1e6))) as slow:
        for device in (CpuDevice(), slow):

            def look(*_: Any, device: Device = device) -> None:
                # a thread that has copied lets go a moment later
                time.sleep(0.05)
                used.append(device.used_bytes())

            model = stack(width=32)
            model.norm.register_forward_pre_hook(look)
            with closing(open_session(model, device=device, swap=ALL)) as session:
                with session.watch():
                    model(batches(1, length=LENGTH)[0])
    assert used[0] == used[1]


def test_a_result_that_its_node_keeps_is_freed_without_backward() -> None:
    """As `rsqrt` does in every norm: handed to autograd as it is, it would keep its graph,
    and the shape of each weight in it, for good."""
    swap, weight = Swap(CpuDevice(), [], {}), nn.Parameter(torch.ones(2, 3))
    with swap.saving(0):
        dropped = (weight * 2).rsqrt().sum()
    del dropped
    weight.data = torch.ones(5)
    with swap.saving(0):
        kept = (weight * 2).rsqrt().sum()
    kept.backward()
    assert weight.grad is not None and weight.grad.shape == (5,)


def test_a_larger_batch_grows_the_host_memory_once() -> None:
    model = stack(width=32)
    keep = freeze(model, ["norm"])
    small, large = batches(1, length=LENGTH)[0], batches(1, length=2 * LENGTH)[0]
    with closing(open_session(model, keep, swap=ALL)) as session:

        def taken_by(tokens: Tensor) -> int:
            model(tokens).backward()
            return session.measured().host_swap_bytes

        first = taken_by(small)
        grown = taken_by(large)
        assert grown > first
        assert taken_by(small) == taken_by(large) == grown


@pytest.mark.parametrize("policy", POLICIES)
def test_interrupted_forwards_leave_nothing(policy: str) -> None:
    model = stack(width=32)
    before = hook_counts(model)
    (tokens,) = batches(1, length=LENGTH)
    plain = twin(model)
    session = open_session(model, **POLICIES[policy])
    model.layers[3].raise_in_forward = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model(tokens)
    model.layers[3].raise_in_forward = None
    assert model(tokens).item() == plain(tokens).item()
    session.close()
    assert hook_counts(model) == before
    taken = session.measured().swapped_out_bytes
    torch.ones(4096, requires_grad=True).exp().sum().backward()
    assert session.measured().swapped_out_bytes == taken


def test_the_end_of_what_waits_on_the_host_runs_no_python() -> None:
    """Python that runs then would lose what a signal handler raises, as Ctrl-C does."""
    swap = Swap(CpuDevice(), [], {})
    hooks = swap.saving(0)
    kept = [hooks.pack_hook(torch.ones(2048))]
    swap.settle()
    swap.open_backward(0)
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(f"{event} {frame}"))
    kept.clear()
    sys.setprofile(None)
    assert not [entry for entry in called if entry.startswith("call")]
    # its region is free again
    swap.saving(0).pack_hook(torch.ones(2048))
    assert swap.host_bytes == 8192
    swap.remove()


class Counting(nn.Module):
    """A block that writes buffers in its forward, and whose output depends on one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("drift", torch.zeros(width))
        self.register_buffer("mask", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        output = self.norm(self.up(x + self.drift) * self.mask)
        if self.training:
            self.drift.add_(x.detach().mean(0))
            self.mask = self.mask * 0.99
        return x + output


class CountingStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting(16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("swap", ((), (0, 1)))
def test_a_recomputation_writes_no_buffer_a_second_time(swap: tuple[int, ...]) -> None:
    """It finds them as its forward did, though others have come since."""
    torch.manual_seed(0)
    model = CountingStack()
    plain = copy.deepcopy(model)
    data = torch.randn(6, 8, 16)
    with closing(open_session(model, recompute=(0, 1, 2), swap=swap)) as session:
        pairs = (model, wrapped(session)), (plain, adamw(plain))
        losses = []
        for each, optimizer in pairs:
            for two in data.split(2):
                # both graphs are there before either goes backward
                both = [each(rows) for rows in two]
                sum(both).backward()
                losses.append(sum(both).item())
                optimizer.step()
                optimizer.zero_grad()
            each.eval()
            losses.append(each(data[0]).item())
        assert losses[:4] == losses[4:]
        for buffer, other in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(buffer, other)
