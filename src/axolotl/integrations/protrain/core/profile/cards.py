"""GPUs and links by name, for plans made where the GPU is not.

Peaks are those of the data sheets: dense, without sparsity, 16-bit products summed in
fp32 (consumer cards do those at half the rate of fp16 sums). No row has been measured,
and how much of a peak training reaches is assumed by the fractions below.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

from ..errors import ConfigError
from ..types import ADAM_MOVED_BYTES, Hardware

# Assumed, shares of a peak:
MATMUL_FRACTION = 0.7
"""Products as large as those of transformer blocks reach 0.6 to 0.75."""
MEMORY_FRACTION = 0.8
"""Elementwise operators that stream through device memory."""
LINK_FRACTION = 0.8
"""Pinned copies; packet headers and flow control take the rest."""
LINK_BOTH_FRACTION = 0.7
"""Each way while the other is busy; acknowledgements share its lanes."""
GATHER_FRACTION = 0.7
"""Collectives over NVLink. Without it they go through host memory, each way over the
card's link at `LINK_BOTH_FRACTION`."""

KERNEL_S = 4e-6
"""Assumed: launch rate of eager PyTorch on a present-day desktop processor."""

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


class Link(NamedTuple):
    """PCI Express of one generation; bytes per second each way, in theory."""

    pcie: int
    bytes_s: float


LINKS = {
    # bits a lane, of which 130 carry 128 (PCI Express base specification)
    f"pcie{pcie}x{lanes}": Link(pcie, lanes * bits_s * 128 / 130 / 8)
    for pcie, bits_s in {3: 8e9, 4: 16e9, 5: 32e9}.items()
    for lanes in (8, 16)
}


class Gpu(NamedTuple):
    """One row of the table, in the units of data sheets.

    `mib` is what nvidia-smi reports as total. Products are dense: bf16 on tensor cores
    summed in fp32, fp32 outside tensor cores (torch's default), and with `tf32: true`.
    `pcie` is the generation, all have 16 lanes. NVLink is to other cards each way, half
    of what data sheets of SXM cards give for both, 0 without a switch between all.
    Among the aliases is what the driver calls the card.
    """

    name: str
    mib: int
    tflops_16: float
    tflops_32: float
    tflops_tf32: float
    memory_gb_s: float
    pcie: int
    source: str
    nvlink_gb_s: float = 0.0
    aliases: tuple[str, ...] = ()

    @property
    def device_bytes(self) -> int:
        return self.mib << 20

    @property
    def links(self) -> tuple[str, ...]:
        """Links that it can be on, the fastest last."""
        return tuple(name for name, link in LINKS.items() if link.pcie <= self.pcie)


_3060 = "NVIDIA GeForce RTX 3060 product page"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper"
_ADA = "NVIDIA Ada GPU architecture whitepaper"
_5090 = "NVIDIA RTX Blackwell GPU architecture whitepaper"
_A100, _A100_PCIE = "NVIDIA A100 data sheet", "NVIDIA A100 data sheet (80GB PCIe)"
_H100, _H100_PCIE = "NVIDIA H100 data sheet (SXM)", "NVIDIA H100 data sheet (PCIe)"
_H200, _L40S = "NVIDIA H200 data sheet (SXM)", "NVIDIA L40S data sheet"
_A100_40_NAMES = ("A100-SXM4-40GB", "A100-PCIE-40GB")
_A100_80_NAMES = ("A100-SXM4-80GB", "A100 80GB PCIe")
_H100_NAMES = ("H100 SXM", "H100 80GB", "H100 80GB HBM3")

# fmt: off
GPUS = (
    # its 16-bit rate is twice fp32 as in all GA10x, a quarter of the 102 tensor TFLOPS
    # that its page counts in sparse fp16
    Gpu("RTX 3060 12GB", 12288,  25.5,  12.7,  12.7,   360, 4, _3060),
    Gpu("RTX 3090",      24576,  71.0,  35.6,  35.6,   936, 4, _GA102),
    Gpu("RTX 4080",      16376,  97.5,  48.7,  48.7, 716.8, 4, _ADA),
    Gpu("RTX 4090",      24564, 165.2,  82.6,  82.6,  1008, 4, _ADA),
    Gpu("RTX 5090",      32607, 209.5, 104.8, 104.8,  1792, 5, _5090),
    Gpu("A100-40GB",     40960, 312.0,  19.5, 156.0,  1555, 4, _A100, 300, _A100_40_NAMES),
    # SXM and PCIe: only memory differs, 2039 and 1935 GB/s
    Gpu("A100-80GB",     81920, 312.0,  19.5, 156.0,  1935, 4, _A100_PCIE, 300, _A100_80_NAMES),
    Gpu("H100",          81559, 989.0,  67.0, 494.0,  3350, 5, _H100, 450, _H100_NAMES),
    Gpu("H100 PCIe",     81559, 756.0,  51.0, 378.0,  2000, 5, _H100_PCIE),
    Gpu("H200",         143771, 989.0,  67.0, 494.0,  4800, 5, _H200, 450, ("H200 SXM",)),
    Gpu("L40S",          46068, 362.0,  91.6, 183.0,   864, 4, _L40S),
)
# fmt: on


def gpu_hardware(
    text: str, link: str | None, host_bytes: int, tf32: bool = False, num_gpus: int = 1
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
    lost = ROUNDING_FRACTION + DRIVER_FRACTION
    link_name = _find_link(link, gpu) if link is not None else gpu.links[-1]
    peak = LINKS[link_name].bytes_s
    source = f"{gpu.source}; {link_name}; how much of each peak is reached is assumed"
    alone, both = peak * LINK_FRACTION, peak * LINK_BOTH_FRACTION
    exchange = 0.0
    if num_gpus > 1:
        exchange, way = both, "through host memory"
        if gpu.nvlink_gb_s:
            exchange, way = gpu.nvlink_gb_s * 1e9 * GATHER_FRACTION, "over NVLink"
        source += f"; cards exchange {way} at {exchange / 1e9:.0f} GB/s each way"
        # in a ring each card sends and receives all but its own part
        exchange *= num_gpus / (num_gpus - 1)
    return Hardware(
        name=gpu.name,
        source=source,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        unseen_bytes=CONTEXT_BYTES + KERNEL_BYTES + int(lost * device_bytes),
        flops_16=gpu.tflops_16 * 1e12 * MATMUL_FRACTION,
        flops_32=(gpu.tflops_tf32 if tf32 else gpu.tflops_32) * 1e12 * MATMUL_FRACTION,
        memory_bytes_s=gpu.memory_gb_s * 1e9 * MEMORY_FRACTION,
        kernel_s=KERNEL_S,
        fetch_bytes_s=alone,
        offload_bytes_s=alone,
        fetch_both_bytes_s=both,
        offload_both_bytes_s=both,
        adam_bytes_s=ADAM_BYTES_S / num_gpus,
        link=link_name,
        gather_bytes_s=exchange,
        reduce_bytes_s=exchange,
    )


def _find(name: str, text: str) -> Gpu:
    wanted = _plain(name)
    for gpu in GPUS:
        if wanted in map(_plain, (gpu.name, *gpu.aliases)):
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
