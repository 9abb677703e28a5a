"""Judge what a machine gives to paged training, and say what to do about what is missing.

Each line is a question with an answer, for somebody who has never seen the machine. The
rates are those that a plan would be made from.
"""

from __future__ import annotations

import copy
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from ..core import page
from ..core.engine.chunk_files import read_rate
from ..core.engine.device import Device, open_device
from ..core.engine.host_pool import host_buffer
from ..core.errors import ConfigError
from ..core.host import host_memory, memory_nodes, processors
from ..core.planner.hardware import (
    device_name,
    has_one_memory,
    measure_hardware,
    typical_s,
)
from ..core.planner.search import ONE_MEMORY
from ..core.sizes import format_bytes
from ..core.types import Hardware, Knobs
from ..versions import require_internals, supported

GOOD, POOR, BAD = "good", "poor", "bad"
EXIT_CODES = {GOOD: 0, POOR: 2, BAD: 3}
PACKAGES = ("axolotl", "torch", "transformers", "peft", "bitsandbytes", "triton")

LOW_LINK = 10e9
"""Bytes a second: of PCI Express 3 with 16 lanes and 4 with 8; adapters and switches in
between give less."""
LOW_OVERLAP = 0.7
LOW_HOST_BYTES, LOW_DISK_BYTES = 16 << 30, 40 << 30
LOW_READS = 1e9
LOW_ADAM = 1.5e9
LEAST_HOST_BYTES = 1 << 30
"""Host memory that the measurements here take, and any model does."""
LOCKED_BYTES, LOCKED_AT_ONCE = 4 << 30, 256 << 20


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, how good that is, what to do."""

    name: str
    found: str
    level: str = GOOD
    advice: str = ""


def findings(device: torch.device, disk: Path | None = None) -> Iterator[Finding]:
    """All lines, in an order in which each may explain those below it.

    Args:
        device: Where training would compute.
        disk: A folder whose reads are measured.
    """
    usable = host_memory()
    yield _versions()
    yield _card(device)
    yield from _host(usable)
    yield _memory_nodes(device)
    if usable < LEAST_HOST_BYTES:
        # beyond its limit a container is killed, without a word
        return
    yield _page_locking(device, min(LOCKED_BYTES, usable // 4))
    rates = measure_hardware(device)
    yield from _rates(rates)
    if disk is not None:
        yield _disk_reads(disk)
    if device.type == "cuda":
        yield _overlap(open_device(device))
    yield parity(device, rates)


def as_json(lines: list[Finding]) -> dict[str, Any]:
    """For reports in issues."""
    return {"level": worst(lines), "lines": [asdict(line) for line in lines]}


def worst(lines: list[Finding]) -> str:
    return max((line.level for line in lines), key=list(EXIT_CODES).index)


def _judged(name: str, found: str, good: bool, advice: str) -> Finding:
    return Finding(name, found, *(() if good else (POOR, advice)))


def _versions() -> Finding:
    named = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            named.append(f"{package} {metadata.version(package)}")
    found = ", ".join(named)
    try:
        require_internals()
    except ConfigError as error:
        return Finding("versions", found, BAD, str(error))
    try:
        require_internals(dry_run=True)
        tried = supported()
    except ConfigError as error:
        return Finding("versions", found, POOR, str(error))
    untried = [
        f"{name} {metadata.version(name)}"
        for name, allowed in tried.items()
        if not allowed.specifier.contains(metadata.version(name), prereleases=True)
    ]
    advice = f"the tests have not passed with {' and '.join(untried)}; they have with "
    advice += f"{' and '.join(map(str, tried.values()))}"
    return _judged("versions", found, not untried, advice)


def _card(device: torch.device) -> Finding:
    if device.type == "cpu":
        why = "look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
        if torch.version.cuda is None:
            why = "this build has no CUDA, install one that has (pytorch.org)"
        return Finding(
            "device",
            f"{device_name(device)}, no GPU",
            POOR,
            "Training works, slowly; a GPU that should be here is not seen by torch "
            f"{torch.__version__}: {why}.",
        )
    one, (free, total) = has_one_memory(device), torch.cuda.mem_get_info(device)
    major, minor = torch.cuda.get_device_capability(device)
    found = f"{device_name(device)}, compute capability {major}.{minor}, "
    if one:
        return Finding("device", f"{found}{format_bytes(total)}. {ONE_MEMORY}")
    found += f"{format_bytes(free)} of {format_bytes(total)} free"
    return _judged(
        "device",
        found,
        total - free < 2 << 30,
        "Others hold more than 2 GiB of it (a desktop, a browser, another run): plans "
        "use what is free when training begins.",
    )


def _host(usable: int) -> Iterator[Finding]:
    total = psutil.virtual_memory().total
    line = _judged(
        "host memory",
        f"{format_bytes(usable)} may be used, of {format_bytes(total)}",
        usable >= LOW_HOST_BYTES,
        "The base model has to lie there: two bytes a parameter, half of one in 4 bits, "
        "and optimizer state in a full fine-tune. Ask for more, or raise the container's "
        "limit or `ulimit -v`.",
    )
    yield replace(line, level=BAD) if usable < LEAST_HOST_BYTES else line
    cores, seen = processors(), os.cpu_count() or 1
    yield _judged(
        "processors",
        f"{cores} to be kept busy, {seen} seen",
        cores >= 4,
        "One thread queues work and autograd has its own; dataloaders and updates on the "
        "host share the rest. Rent more, or raise the container's quota or affinity.",
    )
    free = shutil.disk_usage(Path.cwd()).free
    yield _judged(
        "disk",
        f"{format_bytes(free)} free in this folder",
        free >= LOW_DISK_BYTES,
        "A checkpoint of a full fine-tune is as large as weights and optimizer state.",
    )


def _disk_reads(folder: Path) -> Finding:
    rate = read_rate(folder)
    advice = (
        "a chunk from it takes longer than over most links; an NVMe disk reads more"
    )
    return _judged(
        "disk reads", f"{rate / 1e9:.1f} GB/s in {folder}", rate >= LOW_READS, advice
    )


def _memory_nodes(device: torch.device) -> Finding:
    """Sockets; copies between a card and the memory of another one are slower."""
    nodes, opened = memory_nodes(), open_device(device)
    if opened.node is None:
        found = "one" if len(nodes) < 2 else f"{len(nodes)}, the device's is not known"
        return Finding("memory nodes", found)
    return Finding(
        "memory nodes",
        f"{len(nodes)}, the device's is {opened.node}: start training with `numactl "
        f"--preferred={opened.node}`, and copies do not cross to another socket",
    )


def _page_locking(device: torch.device, asked: int) -> Finding:
    if device.type == "cpu":
        return Finding("page-locking", "not needed without a GPU")
    # piece by piece, as chunks are
    opened, pieces = open_device(device), host_buffer(asked).split(LOCKED_AT_ONCE)
    began = time.perf_counter()
    for piece in pieces:
        opened.pin(piece)
    seconds, pageable = time.perf_counter() - began, opened.pageable_bytes
    for piece in pieces:
        opened.unpin(piece)
    return _judged(
        "page-locking",
        f"{format_bytes(asked - pageable)} of {format_bytes(asked)} tried, "
        f"{seconds:.1f} s",
        pageable == 0,
        "Copies from memory that is not locked take several times as long: raise "
        "`ulimit -l`, start the container with `--ulimit memlock=-1`; WSL2 locks a part "
        "of its memory only.",
    )


def _rates(rates: Hardware) -> Iterator[Finding]:
    fetch, offload = rates.fetch_bytes_s, rates.offload_bytes_s
    both = rates.fetch_both_bytes_s, rates.offload_both_bytes_s
    yield _judged(
        "copies",
        f"{fetch / 1e9:.1f} GB/s to the device, {offload / 1e9:.1f} back; "
        f"{both[0] / 1e9:.1f} and {both[1] / 1e9:.1f} at once",
        not rates.overlaps or min(fetch, offload) >= LOW_LINK,
        "Paging moves the model across this link for each micro-batch. Look at "
        "`nvidia-smi -q -d PCIE` under load: a slot with fewer lanes, a riser or a "
        "virtual machine may hold it back.",
    )
    yield Finding(
        "compute",
        f"{rates.flops_16 / 1e12:.3g} TFLOP/s in bf16, {rates.flops_32 / 1e12:.3g} in "
        f"fp32, attention {rates.attention_16 / 1e12:.3g}; memory "
        f"{rates.memory_bytes_s / 1e9:.0f} GB/s; {rates.kernel_s * 1e6:.0f} µs a launch",
    )
    yield _judged(
        "updates on the host",
        f"AdamW {rates.adam_bytes_s / 1e9:.1f} GB/s of bf16 weights",
        not rates.overlaps or rates.adam_bytes_s >= LOW_ADAM,
        "protrain_cpu_optimizer would be slow here; by default the device updates.",
    )


def _overlap(device: Device) -> Finding:
    """Return how much of a copy hides behind products that take as long."""
    where, nbytes = device.torch_device, 256 << 20
    left = torch.randn(2048, 2048, device=where, dtype=torch.bfloat16)
    host, target = host_buffer(nbytes), device.allocate(nbytes)

    def products() -> None:
        for _ in range(num):
            left @ left

    def copy_in() -> None:
        device.fetch.wait(device.compute.record())
        device.fetch.copy(target, host)
        device.compute.wait(device.fetch.record())

    def both() -> None:
        event = device.compute.record()
        device.fetch.wait(event)
        device.fetch.copy(target, host)
        products()
        device.compute.wait(device.fetch.record())

    with ExitStack() as undo:
        device.pin(host)
        undo.callback(device.unpin, host)
        undo.callback(device.synchronize)
        num = 1
        copy_s = typical_s(where, copy_in)
        num = max(1, round(copy_s / typical_s(where, products)))
        work_s, together_s = typical_s(where, products), typical_s(where, both)
    hidden = (copy_s + work_s - together_s) / min(copy_s, work_s)
    return _judged(
        "overlap",
        f"{max(0.0, min(hidden, 1.0)):.0%} of a copy hides behind compute",
        hidden >= LOW_OVERLAP,
        "Paging waits for what does not hide. CUDA_LAUNCH_BLOCKING=1, a profiler, or "
        "memory that could not be page-locked serialise copies.",
    )


def parity(device: torch.device, rates: Hardware) -> Finding:
    """Three steps of a tiny model, all its blocks paged, beside the plain ones."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(3, 8, _Tower.WIDTH, generator=generator).to(device)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        paged = _Tower()
    plain = copy.deepcopy(paged).to(device)
    wanted = _trained(plain, torch.optim.AdamW(plain.parameters()), rows)
    optimizer = torch.optim.AdamW(paged.parameters())
    with page(
        paged,
        optimizer,
        example=rows[0],
        budget="1GiB",
        host_budget="1GiB",
        device=device,
        knobs=Knobs(n_persist=0, n_buffer=2, n_swap=0, n_checkpoint=3),
        hardware=rates,
    ):
        got = _trained(paged, optimizer, rows)
    got += [param.detach().cpu() for param in paged.parameters()]
    wanted += [param.detach().cpu() for param in plain.parameters()]
    odd = sum(not torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    found = (
        f"{len(got) - odd} of {len(got)} losses and weights of paged steps are equal"
    )
    if not odd:
        return Finding("parity", found)
    advice = "Paging changes numbers here: please report these lines with --json."
    return Finding("parity", found, BAD, advice)


class _Tower(nn.Module):
    WIDTH = 64

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(self.WIDTH), nn.Linear(self.WIDTH, self.WIDTH), nn.GELU()
            )
            for _ in range(6)
        )
        self.head = nn.Linear(self.WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().mean()


def _trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor
) -> list[Tensor]:
    losses = []
    for x in rows:
        loss = model(x)
        loss.backward()
        losses.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    return losses
