"""GPUs and links by name, for plans made where the GPU is not.

Peaks are those of the data sheets: dense, without sparsity, 16-bit products summed in
fp32 (consumer cards do those at half the rate of fp16 sums). No row has been measured,
and how much of a peak training reaches is assumed by the fractions below.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from ..errors import ConfigError
from ..types import Hardware

MATMUL_FRACTION = 0.7
"""Assumed: products as large as those of transformer blocks reach 0.6 to 0.75."""
MEMORY_FRACTION = 0.8
"""Assumed: elementwise operators that stream through device memory."""
LINK_FRACTION = 0.8
"""Assumed: pinned copies; packet headers and flow control take the rest."""
LINK_BOTH_FRACTION = 0.7
"""Assumed: each way while the other is busy; acknowledgements share its lanes."""

GATHER_FRACTION = 0.7
"""Assumed: collectives over NVLink. Without it they go through host memory, each way
over the card's link at `LINK_BOTH_FRACTION`."""

KERNEL_S = 4e-6
"""Assumed: launch rate of eager PyTorch on a present-day desktop processor."""

ADAM_MOVED_BYTES = 7
"""Bytes that AdamW moves for each byte of weights, moments in the weights' dtype: it
reads weight, gradient and two moments and writes all but the gradient."""
ADAM_BYTES_S = 51.2e9 * 0.7 / ADAM_MOVED_BYTES
"""Assumed: fused torch AdamW, bound by two channels of DDR4-3200 (51.2 GB/s), of which
it gets 0.7. Servers with more channels are faster. Ranks of one host share it."""

CONTEXT_BYTES = 500 << 20
"""Not measured: CUDA context of a process that runs torch."""
KERNEL_BYTES = 200 << 20
"""Not measured: workspaces of cuBLAS and cuDNN, kernels loaded at first use."""
ROUNDING_FRACTION = 0.02
"""Not measured: share of device memory lost to rounding in torch's allocator."""
DRIVER_FRACTION = 0.015
"""Share of what nvidia-smi calls total that CUDA does not offer: 0.5 to 1.5 %."""

MAX_GPU_GIB = 1024


@dataclass(frozen=True)
class Gpu:
    """One row of the table; rates are peaks per second.

    Attributes:
        name: As a person writes it.
        device_bytes: Total memory as nvidia-smi reports it.
        flops_16: bf16 tensor cores, dense, summed in fp32.
        flops_32: fp32 outside tensor cores, torch's default for fp32 products.
        flops_tf32: The same products with `tf32: true`, dense.
        memory_bytes_s: Device memory.
        pcie: Generation of its PCI Express interface; all have 16 lanes.
        source: Data sheet.
        nvlink_bytes_s: To other cards each way, 0 without a switch between all.
        aliases: Other names, among them what the driver calls it.
    """

    name: str
    device_bytes: int
    flops_16: float
    flops_32: float
    flops_tf32: float
    memory_bytes_s: float
    pcie: int
    source: str
    nvlink_bytes_s: float = 0.0
    aliases: tuple[str, ...] = ()

    @property
    def links(self) -> tuple[str, ...]:
        """Links that it can be on, the fastest last."""
        return tuple(name for name, link in LINKS.items() if link.pcie <= self.pcie)


@dataclass(frozen=True)
class Link:
    """PCI Express of one generation and width.

    Attributes:
        pcie: Generation.
        bytes_s: Each way, in theory (PCI Express base specification).
    """

    pcie: int
    bytes_s: float


_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper"
_ADA = "NVIDIA Ada GPU architecture whitepaper"
# half of what the data sheets of SXM cards give for both ways
_NVLINK_3, _NVLINK_4 = 300e9, 450e9

GPUS = (
    Gpu(
        name="RTX 3060 12GB",
        device_bytes=12288 << 20,
        # not in the whitepaper; twice fp32 as in all GA10x, a quarter of the 102
        # tensor TFLOPS that the product page counts in sparse fp16
        flops_16=25.5e12,
        flops_32=12.7e12,
        flops_tf32=12.7e12,
        memory_bytes_s=360e9,
        pcie=4,
        source="NVIDIA GeForce RTX 3060 product page",
    ),
    Gpu(
        name="RTX 3090",
        device_bytes=24576 << 20,
        flops_16=71e12,
        flops_32=35.6e12,
        flops_tf32=35.6e12,
        memory_bytes_s=936e9,
        pcie=4,
        source=_GA102,
    ),
    Gpu(
        name="RTX 4080",
        device_bytes=16376 << 20,
        flops_16=97.5e12,
        flops_32=48.7e12,
        flops_tf32=48.7e12,
        memory_bytes_s=716.8e9,
        pcie=4,
        source=_ADA,
    ),
    Gpu(
        name="RTX 4090",
        device_bytes=24564 << 20,
        flops_16=165.2e12,
        flops_32=82.6e12,
        flops_tf32=82.6e12,
        memory_bytes_s=1008e9,
        pcie=4,
        source=_ADA,
    ),
    Gpu(
        name="RTX 5090",
        device_bytes=32607 << 20,
        flops_16=209.5e12,
        flops_32=104.8e12,
        flops_tf32=104.8e12,
        memory_bytes_s=1792e9,
        pcie=5,
        source="NVIDIA RTX Blackwell GPU architecture whitepaper",
    ),
    Gpu(
        name="A100-40GB",
        device_bytes=40960 << 20,
        flops_16=312e12,
        flops_32=19.5e12,
        flops_tf32=156e12,
        memory_bytes_s=1555e9,
        pcie=4,
        source="NVIDIA A100 data sheet",
        nvlink_bytes_s=_NVLINK_3,
        aliases=("A100-SXM4-40GB", "A100-PCIE-40GB"),
    ),
    Gpu(
        # one row for SXM and PCIe: only memory differs, 2039 and 1935 GB/s
        name="A100-80GB",
        device_bytes=81920 << 20,
        flops_16=312e12,
        flops_32=19.5e12,
        flops_tf32=156e12,
        memory_bytes_s=1935e9,
        pcie=4,
        source="NVIDIA A100 data sheet (80GB PCIe)",
        nvlink_bytes_s=_NVLINK_3,
        aliases=("A100-SXM4-80GB", "A100 80GB PCIe"),
    ),
    Gpu(
        name="H100",
        device_bytes=81559 << 20,
        flops_16=989e12,
        flops_32=67e12,
        flops_tf32=494e12,
        memory_bytes_s=3350e9,
        pcie=5,
        source="NVIDIA H100 data sheet (SXM)",
        nvlink_bytes_s=_NVLINK_4,
        aliases=("H100 SXM", "H100 80GB", "H100 80GB HBM3"),
    ),
    Gpu(
        name="H100 PCIe",
        device_bytes=81559 << 20,
        flops_16=756e12,
        flops_32=51e12,
        flops_tf32=378e12,
        memory_bytes_s=2000e9,
        pcie=5,
        source="NVIDIA H100 data sheet (PCIe)",
    ),
    Gpu(
        name="H200",
        device_bytes=143771 << 20,
        flops_16=989e12,
        flops_32=67e12,
        flops_tf32=494e12,
        memory_bytes_s=4800e9,
        pcie=5,
        source="NVIDIA H200 data sheet (SXM)",
        nvlink_bytes_s=_NVLINK_4,
        aliases=("H200 SXM",),
    ),
    Gpu(
        name="L40S",
        device_bytes=46068 << 20,
        flops_16=362e12,
        flops_32=91.6e12,
        flops_tf32=183e12,
        memory_bytes_s=864e9,
        pcie=4,
        source="NVIDIA L40S data sheet",
    ),
)

_LANE_BITS_S = {3: 8e9, 4: 16e9, 5: 32e9}

LINKS = {
    # 130 bits on the lane carry 128
    f"pcie{pcie}x{lanes}": Link(pcie, lanes * bits_s * 128 / 130 / 8)
    for pcie, bits_s in _LANE_BITS_S.items()
    for lanes in (8, 16)
}


def gpu_hardware(
    text: str,
    link: str | None,
    host_bytes: int,
    tf32: bool = False,
    num_gpus: int = 1,
) -> Hardware:
    """What a GPU of the table would give, one of `num_gpus` on a host.

    Each has a link of its own; copies of all at once are as fast as of one, and host
    AdamW shares the host's memory.

    Args:
        text: `NAME` or `NAME:GiB`; case, spaces, dashes, "NVIDIA", "GeForce" and
            "RTX" do not count, nor later words if the first tell enough. GiB
            replaces its memory.
        link: One of `Gpu.links`, None for the fastest.
        host_bytes: Memory of the host that may be used.
        tf32: Whether fp32 products run on tensor cores (`tf32: true`).
        num_gpus: Cards of this kind on the host.

    Raises:
        ConfigError: Unknown or ambiguous name, unknown link or one that the GPU
            cannot use, or memory that is not a number from 1 to 1024.
    """
    name, colon, gib = text.partition(":")
    gpu = _find(name, text)
    device_bytes = _bytes_of(gib, gpu) if colon else gpu.device_bytes
    link_name = _find_link(link, gpu) if link is not None else gpu.links[-1]
    peak = LINKS[link_name].bytes_s
    source = f"{gpu.source}; {link_name}; how much of each peak is reached is assumed"
    exchange = 0.0
    if num_gpus > 1:
        exchange, way = peak * LINK_BOTH_FRACTION, "through host memory"
        if gpu.nvlink_bytes_s:
            exchange, way = gpu.nvlink_bytes_s * GATHER_FRACTION, "over NVLink"
        source += f"; cards exchange {way} at {exchange / 1e9:.0f} GB/s each way"
        # in a ring each card sends and receives all but its own part
        exchange *= num_gpus / (num_gpus - 1)
    return Hardware(
        name=gpu.name,
        source=source,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        unseen_bytes=CONTEXT_BYTES
        + KERNEL_BYTES
        + int((ROUNDING_FRACTION + DRIVER_FRACTION) * device_bytes),
        flops_16=gpu.flops_16 * MATMUL_FRACTION,
        flops_32=(gpu.flops_tf32 if tf32 else gpu.flops_32) * MATMUL_FRACTION,
        memory_bytes_s=gpu.memory_bytes_s * MEMORY_FRACTION,
        kernel_s=KERNEL_S,
        fetch_bytes_s=peak * LINK_FRACTION,
        offload_bytes_s=peak * LINK_FRACTION,
        fetch_both_bytes_s=peak * LINK_BOTH_FRACTION,
        offload_both_bytes_s=peak * LINK_BOTH_FRACTION,
        adam_bytes_s=ADAM_BYTES_S / num_gpus,
        link=link_name,
        gather_bytes_s=exchange,
        reduce_bytes_s=exchange,
    )


def _find(name: str, text: str) -> Gpu:
    wanted = _plain(name)
    for gpu in GPUS:
        if wanted in (_plain(n) for n in (gpu.name, *gpu.aliases)):
            return gpu
    begun = [gpu for gpu in GPUS if wanted and wanted in _beginnings(gpu.name)]
    if len(begun) == 1:
        return begun[0]
    if begun:
        choice = " or ".join(gpu.name for gpu in begun)
        raise ConfigError(f"--gpu {text!r} is ambiguous: write {choice}")
    _refuse("--gpu", text, wanted, (gpu.name for gpu in GPUS), ", or NAME:GiB")


def _bytes_of(gib: str, gpu: Gpu) -> int:
    try:
        number = float(gib)
    except ValueError:
        number = 0.0
    # false for nan too
    if 1 <= number <= MAX_GPU_GIB:
        return int(number * (1 << 30))
    raise ConfigError(
        f"--gpu: {gib!r} is not a memory size in GiB (a number from 1 to {MAX_GPU_GIB}); "
        f"write for example {gpu.name}:{gpu.device_bytes / 2**30:.0f}"
    )


def _find_link(link: str, gpu: Gpu) -> str:
    wanted = _plain(link)
    if wanted in gpu.links:
        return wanted
    if wanted in LINKS:
        raise ConfigError(
            f"--link {link!r} is more than the {gpu.name} can use; "
            f"allowed: {', '.join(gpu.links)}"
        )
    _refuse("--link", link, wanted, gpu.links)


def _refuse(
    option: str, text: str, wanted: str, names: Iterable[str], also: str = ""
) -> NoReturn:
    by_plain = {_plain(name): name for name in names}
    nearest = difflib.get_close_matches(wanted, by_plain, n=1, cutoff=0.0)[0]
    raise ConfigError(
        f"{option} {text!r} is not known; allowed: {', '.join(by_plain.values())}{also}; "
        f"nearest: {by_plain[nearest]}"
    )


def _beginnings(name: str) -> set[str]:
    # whole words: an H20 is no H200
    words = re.split(r"[\s-]", name)
    return {_plain("".join(words[:num])) for num in range(1, len(words))}


def _plain(name: str) -> str:
    """Lower case letters and digits alone, without words that all cards share."""
    letters = re.sub(r"[\s_-]", "", name.lower())
    return re.sub(r"^(nvidia)?(geforce|tesla)?(rtx)?", "", letters)
