"""Measure this machine: free device memory, and rates measured in a second or two.

Rates are timed with the objects that training uses: the streams and pinned
memory of `core/engine`, its host thread, and fused torch AdamW. Figures are `typical`.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ..engine.device import Device, Stream, open_device
from ..engine.host_pool import host_buffer
from ..engine.ranks import Ranks
from ..engine.worker import HostWorker
from ..types import Hardware
from .cards import KERNEL_BYTES, ROUNDING_FRACTION

_REPEATS = {"cuda": 3, "cpu": 10}
MATMUL_SIZES = {"cpu": (128, 512, 512), "cuda": (4096, 4096, 4096)}
"""By device type: rows of the input, its columns, columns of the output."""

_COPY_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Larger than the caches, small enough for the time this may take."""
_NUM_KERNELS = 300
_EMULATED_FLOPS = 2e11


def measure_hardware(
    torch_device: torch.device,
    *,
    matmul: tuple[int, int, int] | None = None,
    weight_dtype: torch.dtype = torch.bfloat16,
) -> Hardware:
    """Measure copies, products, elementwise operators, launches and host AdamW; no memory.

    On the CPU device copies run in turn with compute, so both ways together are as
    fast as each alone and nothing overlaps. fp32 products are timed as torch is set,
    with or without TF32. Resets torch's peak memory statistics of a CUDA device.

    Args:
        torch_device: The device that will compute.
        matmul: Rows, inner size and columns of the products; None for `MATMUL_SIZES`.
        weight_dtype: Dtype of the weights, moments and gradients of host AdamW.
    """
    device = open_device(torch_device)
    torch_device = device.torch_device
    kind = torch_device.type
    with torch.no_grad():
        small = _matmul_rate(torch_device, MATMUL_SIZES["cpu"], torch.float32)
        # of an emulated card those of a card would take minutes
        scale = kind if small > _EMULATED_FLOPS else "cpu"
        size, nbytes = matmul or MATMUL_SIZES[scale], _COPY_BYTES[scale]
        fetch, offload, fetch_both, offload_both = _copy_rates(device, nbytes)
        flops_16 = _matmul_rate(torch_device, size, torch.bfloat16)
        flops_32 = _matmul_rate(torch_device, size, torch.float32)
        memory_bytes_s = _elementwise_rate(torch_device, nbytes)
    # rows of 8,192 tokens take a CPU that emulates bf16 minutes
    length = min(size[0], MATMUL_SIZES[scale][0])
    attention_16 = _attention_rate(torch_device, length)
    kernel_s = _kernel_s(torch_device)
    adam_bytes_s = _adam_rate(device, nbytes // 2, weight_dtype)
    if kind == "cuda":
        torch.cuda.empty_cache()
    return Hardware(
        name=device_name(torch_device),
        source=f"measured {date.today().isoformat()}",
        device_bytes=0,
        host_bytes=0,
        unseen_bytes=0,
        flops_16=flops_16,
        flops_32=flops_32,
        attention_16=attention_16,
        memory_bytes_s=memory_bytes_s,
        kernel_s=kernel_s,
        fetch_bytes_s=fetch,
        offload_bytes_s=offload,
        fetch_both_bytes_s=fetch_both,
        offload_both_bytes_s=offload_both,
        adam_bytes_s=adam_bytes_s,
        overlaps=kind == "cuda",
        capability=_capability(torch_device),
        one_memory=has_one_memory(torch_device),
    )


def has_one_memory(torch_device: torch.device) -> bool:
    """Tell whether a device has no memory but the host's, as CUDA and HIP know it."""
    if torch_device.type != "cuda":
        return False
    return bool(torch.cuda.get_device_properties(torch_device).is_integrated)


def device_memory(device: torch.device, host_bytes: int) -> int:
    """Free bytes of a CUDA device beside a host with so many; memory cached by torch
    counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    if has_one_memory(device):
        # the driver takes pages of files for used, and does not know what is given back
        return min(total, host_bytes)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached


_HIGHEST = ("kernel_s", "unseen_bytes", "one_memory")
"""Figures of several machines of which the highest counts; of all others the lowest."""


def weakest(hardware: Sequence[Hardware]) -> Hardware:
    """Return what each of several machines gives at least: one plan suits them all.

    Named after the first, with how many are called otherwise.
    """
    first = hardware[0]
    figures = {
        name: (max if name in _HIGHEST else min)(getattr(m, name) for m in hardware)
        for name, own in asdict(first).items()
        if not isinstance(own, str)
    }
    others = sum(machine.name != first.name for machine in hardware)
    differ = f" ({others} of {len(hardware)} differ)" if others else ""
    return replace(first, name=first.name + differ, **figures)


def measure_collectives(
    ranks: Ranks, torch_device: torch.device
) -> tuple[float, float, float]:
    """`gather_bytes_s`, `reduce_bytes_s` and `across_bytes_s` of a `Hardware`.

    All ranks have to call it. Between nodes of several ranks only reductions inside of
    a node and what follows them can be timed together: the first are taken for as fast as
    a gather.
    """
    world = ranks.world
    numel = _COPY_BYTES[torch_device.type] // 4 // world.local_size
    whole = torch.ones(numel * world.local_size, device=torch_device)
    part = torch.ones(numel, device=torch_device) if world.local_size > 1 else whole

    def seconds(collective: Callable[[], object]) -> float:
        # nobody begins before all are there
        ranks.collect(None)
        return typical_s(torch_device, collective)

    gather_s = gather = reduce = across = 0.0
    if world.local_size > 1:
        gather_s = seconds(lambda: ranks.all_gather(whole, part))
        gather = whole.nbytes / gather_s

    def reduce_parts() -> None:
        for rank, own in enumerate(whole.split(numel)):
            ranks.reduce(own, rank)

    reduce_s = seconds(reduce_parts)
    if world.num_nodes > 1:
        across_s = max(reduce_s - gather_s, reduce_s / 10)
        across = part.nbytes / across_s
        reduce_s -= across_s
    if world.local_size > 1:
        reduce = whole.nbytes / reduce_s
    return gather, reduce, across


def measured_unseen_bytes(torch_device: torch.device, device_bytes: int) -> int:
    """`Hardware.unseen_bytes` of a device whose free memory was read.

    The context exists by then and is not in what is free; the rest is assumed as for
    GPUs of the table. 0 on a CPU, where it is the host's.
    """
    if torch_device.type == "cpu":
        return 0
    return KERNEL_BYTES + int(ROUNDING_FRACTION * device_bytes)


def device_name(torch_device: torch.device) -> str:
    if torch_device.type == "cuda":
        return torch.cuda.get_device_name(torch_device)
    return cpu_name()


def _capability(torch_device: torch.device) -> int:
    # of AMD's cards torch gives another number
    if torch_device.type != "cuda" or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(torch_device)
    return 10 * major + minor


def cpu_name() -> str:
    """The processor's model as Linux names it, elsewhere what Python knows."""
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def elapsed_s(torch_device: torch.device, work: Callable[[], object]) -> float:
    """Seconds that `work` takes on the device."""
    return timed(torch_device, work)[0]


def timed(
    torch_device: torch.device, work: Callable[[], object]
) -> tuple[float, float]:
    """Seconds that `work` takes on the device, and those of this thread to queue it."""
    if torch_device.type == "cuda":
        stream = torch.cuda.current_stream(torch_device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        began = time.perf_counter()
        work()
        queued_s = time.perf_counter() - began
        end.record(stream)
        end.synchronize()
        return start.elapsed_time(end) / 1000, queued_s
    began = time.perf_counter()
    work()
    elapsed = time.perf_counter() - began
    return elapsed, elapsed


def typical(torch_device: torch.device, seconds: Sequence[float]) -> float:
    """Return the figure that counts of several: a GPU's median, or a CPU's least, whose
    threads others hold up for longer than most work takes."""
    return (min if torch_device.type == "cpu" else statistics.median)(seconds)


def typical_s(torch_device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of `work` that count, after one call that does not."""
    work()
    repeats = _REPEATS[torch_device.type]
    return typical(
        torch_device, [elapsed_s(torch_device, work) for _ in range(repeats)]
    )


def _copy_rates(device: Device, nbytes: int) -> tuple[float, float, float, float]:
    """Bytes per second to the device and back, alone, then each beside the other."""
    hosts = [host_buffer(nbytes).zero_() for _ in range(2)]
    fetch = (device.fetch, device.allocate(nbytes).zero_(), hosts[0])
    offload = (device.offload, hosts[1], device.allocate(nbytes).zero_())
    with ExitStack() as pinned:
        for host in hosts:
            device.pin(host)
            pinned.callback(device.unpin, host)
        # before memory is unpinned, an error on the way included
        pinned.callback(device.synchronize)
        there, back = (nbytes / _copy_s(device, copy)[0] for copy in (fetch, offload))
        if device.torch_device.type == "cpu":
            return there, back, there, back
        both = _copy_s(device, fetch, offload)
    # nothing is faster beside another copy: the search relies on it
    return there, back, min(there, nbytes / both[0]), min(back, nbytes / both[1])


def _copy_s(device: Device, *copies: tuple[Stream, Tensor, Tensor]) -> list[float]:
    """Seconds of each of the copies when they are queued together."""

    def once() -> list[float]:
        device.synchronize()
        start = time.perf_counter()
        for stream, target, source in copies:
            stream.copy(target, source)
        ends = []
        for stream, _, _ in copies:
            # a later copy that ends first is taken as slow as the one before
            stream.record().synchronize()
            ends.append(time.perf_counter() - start)
        return ends

    once()
    where = device.torch_device
    rounds = [once() for _ in range(_REPEATS[where.type])]
    return [typical(where, seconds) for seconds in zip(*rounds, strict=True)]


def _matmul_rate(
    torch_device: torch.device, size: tuple[int, int, int], dtype: torch.dtype
) -> float:
    """Rate of forward and the two products of backward, which read other layouts."""
    rows, inner, columns = size
    # random: a GPU multiplies zeros at less power, hence faster
    random = torch.Generator(torch_device).manual_seed(0)
    inputs, weight, gradient = (
        torch.randn(*shape, device=torch_device, generator=random).to(dtype)
        for shape in ((rows, inner), (columns, inner), (rows, columns))
    )

    def products() -> None:
        torch.mm(inputs, weight.t())
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), inputs)

    return 3 * 2 * rows * inner * columns / typical_s(torch_device, products)


def _attention_rate(torch_device: torch.device, length: int) -> float:
    """Rate of forward and backward of one causal row in bf16, of the half that is
    computed."""
    one = torch.ones(1, 8, length, 128, device=torch_device, dtype=torch.bfloat16)
    query, key, value = (one.clone().requires_grad_() for _ in range(3))

    def attention() -> None:
        output = scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(output, (query, key, value), one)

    with torch.enable_grad():
        # two products of all pairs in forward, five in backward
        return 7 * length * query.numel() / typical_s(torch_device, attention)


def _elementwise_rate(torch_device: torch.device, nbytes: int) -> float:
    first = torch.ones(nbytes // 4, device=torch_device)
    second, total = torch.ones_like(first), torch.ones_like(first)
    seconds = typical_s(torch_device, lambda: torch.add(first, second, out=total))
    return 3 * nbytes / seconds


def _kernel_s(torch_device: torch.device) -> float:
    """Seconds of one operator that has next to nothing to do, recorded by autograd."""
    tiny = torch.ones(8, device=torch_device, requires_grad=True)

    def launch() -> None:
        for _ in range(_NUM_KERNELS):
            tiny * tiny

    with torch.enable_grad():
        return typical_s(torch_device, launch) / _NUM_KERNELS


def _adam_rate(device: Device, nbytes: int, dtype: torch.dtype) -> float:
    """On the thread that makes updates on the host."""
    weights = nn.Parameter(torch.full((nbytes // dtype.itemsize,), 0.5, dtype=dtype))
    weights.grad = torch.full_like(weights, 0.1)
    optimizer = torch.optim.AdamW([weights], fused=True)
    worker = HostWorker(device)
    try:
        step = partial(typical_s, weights.device, optimizer.step)
        return weights.nbytes / worker.submit(step).result()
    finally:
        worker.close()
