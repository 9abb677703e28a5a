"""A model trained twice in one process, plain and under a plan, in turns."""

from __future__ import annotations

import argparse
import copy
import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from axolotl.integrations.protrain.core.engine.device import Device, open_device
from axolotl.integrations.protrain.core.engine.host_pool import HostPool
from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.layout import build_layout
from axolotl.integrations.protrain.core.planner.job import adapter_names
from axolotl.integrations.protrain.core.planner.plans import make_plan
from axolotl.integrations.protrain.core.types import Chunk, Layout, Placement, Plan


@dataclass(frozen=True)
class Size:
    """The model and its batch."""

    hidden: int
    layers: int
    tokens: int
    vocab: int = 2048

    def model(self, method: str, device: torch.device) -> nn.Module:
        """On the host, equal for equal arguments; bf16 on a GPU, fp32 on a CPU."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            max_position_embeddings=self.tokens,
            use_cache=False,
        )
        model: nn.Module = LlamaForCausalLM(config)
        if device.type == "cuda":
            model.to(torch.bfloat16)
        if method == "LoRA":
            lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
            model = get_peft_model(model, lora)
        return model.train()

    def batch(self, number: int, device: torch.device) -> Tensor:
        """Token ids, [1, tokens]."""
        source = torch.Generator().manual_seed(number)
        shape = (1, self.tokens)
        return torch.randint(self.vocab, shape, generator=source).to(device)


@dataclass(frozen=True)
class Step:
    """Seconds of one training step, and its loss."""

    wall_s: float
    cpu_s: float
    update_s: float
    waited_s: float
    loss: float


class Trainer:
    """One model in training.

    Args:
        model: Where it is trained.
        optimizer: Its optimizer.
        batch: Token ids of a step, by its number.
        finish: Waits until the device is done with a step.
        settle: Waits until the host is done with the last update too.
        waited_s: How long the calling thread has waited for the host so far.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Callable[[int], Tensor],
        finish: Callable[[], None],
        settle: Callable[[], None] = lambda: None,
        waited_s: Callable[[], float] = float,
    ) -> None:
        self.model, self._optimizer = model, optimizer
        self._batch, self._finish, self._settle = batch, finish, settle
        self.waited_s = waited_s
        self._num_steps = 0

    def step(self) -> Step:
        tokens = self._batch(self._num_steps)
        self._num_steps += 1
        waited_s = self.waited_s()
        cpu, start = time.process_time(), time.perf_counter()
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        backward = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._finish()
        end = time.perf_counter()
        return Step(
            wall_s=end - start,
            cpu_s=time.process_time() - cpu,
            update_s=end - backward,
            waited_s=self.waited_s() - waited_s,
            loss=loss.item(),
        )

    def run(self, num_steps: int) -> list[Step]:
        """Steps that each begin with the update of the one before still running."""
        steps = [self.step() for _ in range(num_steps)]
        self._settle()
        return steps

    def run_beside(self, work: Callable[[], object], num_steps: int) -> list[Step]:
        """Steps that each begin with other work on another thread."""
        steps = []
        with ThreadPoolExecutor(1) as pool:
            for _ in range(num_steps):
                other = pool.submit(work)
                steps.append(self.step())
                other.result()
        return steps


@dataclass(frozen=True)
class Case:
    """What is trained under which plan; without one both are plain."""

    method: str
    name: str
    plan: Callable[[Layout], Plan] | None
    resident: bool


def resident(layout: Layout) -> Plan:
    return make_plan(layout, len(layout.pageable), 0, 0, 0, False)


def slot_each(layout: Layout) -> Plan:
    return make_plan(layout, 0, len(layout.pageable), 0, 0, False)


def state_on_host(layout: Layout) -> Plan:
    plan = resident(layout)
    placements = tuple(
        Placement.OPTIMIZER_OFFLOADED if chunk.pageable else placement
        for chunk, placement in zip(layout.chunks, plan.placements, strict=True)
    )
    return Plan(**{**vars(plan), "placements": placements})


def nothing_resident(layout: Layout) -> Plan:
    return make_plan(layout, 0, 2, 0, 0, False)


CASES = [
    Case("LoRA", "plain again", None, True),
    Case("LoRA", "mode A", resident, True),
    Case("LoRA", "mode B, a slot for each chunk", slot_each, True),
    Case("full", "plain again", None, True),
    Case("full", "mode A", resident, True),
    Case("LoRA", "nothing resident, 2 slots", nothing_resident, False),
    Case("full", "nothing resident, 2 slots", nothing_resident, False),
    Case("full", "state on the host", state_on_host, False),
]


class Pair:
    """The same training twice, plain and under a plan."""

    def __init__(
        self,
        case: Case,
        size: Size,
        device: torch.device,
        swapped: bool = False,
    ) -> None:
        model = size.model(case.method, device)
        plain = copy.deepcopy(model).to(device)
        if swapped:
            model, plain = plain, model.to(device)
        self.layout = build_layout(model, adapter_names(model))
        self.session: Session | None = None
        batch = partial(size.batch, device=device)
        opened = open_device(device)
        if case.plan is None:
            model.to(device)
        else:
            self.session = Session(model, self.layout, case.plan(self.layout), opened)
        optimizer: torch.optim.Optimizer = adamw(model)
        settle: Callable[[], None] = opened.synchronize
        if self.session is not None:
            optimizer = self.session.wrap_optimizer(optimizer)
            settle = self.session.settle
        self.plain = Trainer(plain, adamw(plain), batch, opened.synchronize)
        self.ours = Trainer(
            model, optimizer, batch, opened.synchronize, settle, self._waited_s
        )
        self.num_hooks = sum(map(_num_hooks, model.modules())) + sum(
            len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()
        )
        trained = sum(p.nbytes for p in plain.parameters() if p.requires_grad)
        self.moved = [
            chunk
            for chunk in self.layout.chunks
            if self.session and self.session.plan.placements[chunk.index].on_host
        ]
        updated = sum(chunk.nbytes for chunk in self.moved if chunk.trainable)
        self.updated_share = updated / trained
        self.update = None
        if self.session and self.session.plan.paged and updated:
            self.update = host_update(self.moved)

    def moved_bytes(self) -> tuple[int, int]:
        """Fetched and offloaded so far."""
        if self.session is None:
            return 0, 0
        now = self.session.measured()
        return now.fetched_bytes, now.offloaded_bytes

    def _waited_s(self) -> float:
        if self.session is None:
            return 0.0
        # the other part of it is copies
        return self.session.measured().stall_s - self.session.device.stall_s

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


def _num_hooks(module: nn.Module) -> int:
    return len(module._forward_pre_hooks) + len(module._forward_hooks)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-4, fused=True)


@dataclass(frozen=True)
class Rate:
    """Bytes a second from the host, to it, and a second of cpu time."""

    fetch: float
    offload: float
    cpu: float


class Memcpy:
    """Copies between chunks on the host and two device buffers, both ways."""

    def __init__(self, pair: Pair, device: Device) -> None:
        self._device = device
        arena = HostPool()
        arena.add(pair.moved)
        self._nbytes = sum(chunk.nbytes for chunk in pair.moved)
        largest = max(chunk.nbytes for chunk in pair.moved)
        slots = [device.allocate(largest) for _ in range(2)]
        self.copies = []
        for number, chunk in enumerate(pair.moved):
            host = arena.chunk(chunk.index).fill_(1)
            device.pin(host)
            self.copies.append((slots[number % 2][: chunk.nbytes], host))

    def rate(self) -> Rate:
        """Both ways once; the device buffers are the least of what is cached."""
        stream, device = self._device.fetch, self._device
        cpu, start = time.process_time(), time.perf_counter()
        for buffer, host in self.copies:
            stream.copy(buffer, host)
        device.synchronize()
        fetched = time.perf_counter()
        for buffer, host in self.copies:
            device.offload.copy(host, buffer)
        device.synchronize()
        end = time.perf_counter()
        return Rate(
            self._nbytes / (fetched - start),
            self._nbytes / (end - fetched),
            2 * self._nbytes / (time.process_time() - cpu),
        )

    def close(self) -> None:
        for _, host in self.copies:
            self._device.unpin(host)


def host_update(chunks: Sequence[Chunk]) -> Callable[[], object]:
    """An update of as many weights as the host updates, which are nobody's."""
    leaves = []
    for chunk in chunks:
        for spec in chunk.tensors:
            leaf = torch.zeros(spec.shape, dtype=spec.dtype)
            leaf.grad = torch.zeros_like(leaf)
            leaves.append(leaf)
    return torch.optim.AdamW(leaves, lr=1e-4, fused=True).step


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, as a GPU's caching allocator does.

    Else every gradient of a plain step is page faults (1.4 GB/s here), while a paged one
    frees and reuses memory block by block: it was 16 % faster than explained.
    """
    if sys.platform == "linux":
        trim_threshold, mmap_threshold = -1, -3
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**25)


def size_option(parser: argparse.ArgumentParser, name: str, default: Size) -> None:
    """Three numbers, for which `Size(*args.NAME)` stands."""
    parser.add_argument(
        name,
        type=int,
        nargs=3,
        metavar=("HIDDEN", "LAYERS", "TOKENS"),
        default=[default.hidden, default.layers, default.tokens],
        help="size of the model and of a step; hidden is a multiple of 64 "
        "(default: %(default)s)",
    )


def common_arguments(description: str | None) -> argparse.ArgumentParser:
    """What several benchmarks ask for; few tokens, so that copies weigh more."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=default)
    size_option(parser, "--paged", Size(hidden=1024, layers=8, tokens=16))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="folder for Markdown and JSON")
    return parser
