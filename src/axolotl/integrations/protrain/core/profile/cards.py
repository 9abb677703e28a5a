"""GPUs and links by name, for plans made where the GPU is not.

Peaks are those of the data sheets: dense, without sparsity, 16-bit products summed in
fp32 (consumer cards do those at half the rate of fp16 sums). How much of them training
reaches is taken from what others have measured, `benchmarks/published/` with
`benchmarks/published.py`; cards of which nobody has published anything are taken as their relatives.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

from ..errors import ConfigError
from ..sizes import parse_gib
from ..types import ADAM_MOVED_BYTES, Hardware


class Reach(NamedTuple):
    """Shares of a peak that products in 16 bits, TF32 and fp32 reach in training, and
    fused attention in 16 bits, causal halves left out."""

    flops_16: float
    tf32: float
    flops_32: float
    attention: float


RTX = Reach(0.97, 1.0, 0.65, 0.85)
"""RTX 3090, 4090, 5090 and A6000; they exceed the boost clock that their sheets count."""
PASSIVE = Reach(0.7, 0.7, 0.51, 0.6)
"""L40S: the same units with less power for each."""
AMPERE = Reach(0.78, 0.7, 0.95, 0.6)
"""A100."""
HOPPER = Reach(0.65, 0.81, 0.78, 0.35)
"""H100 and H200: 0.8 in short runs, limited by power in training."""
OTHERS = Reach(0.65, 0.65, 0.7, 0.35)
"""Assumed."""

MEMORY_FRACTION = 0.9
"""Elementwise operators that stream through device memory: 0.91 and 0.89 measured."""
GATHER_FRACTION = 0.7
"""Assumed: collectives over NVLink. Without it they go through host memory, each way
over the card's link beside the other."""

KERNEL_S = 30e-6
"""An operator of a model in PyTorch's eager mode with its share of Python around it: 36
to 51 µs follow from small published batches."""

ADAM_BYTES_S = 51.2e9 * 0.7 / ADAM_MOVED_BYTES
"""Assumed: fused torch AdamW, bound by two channels of DDR4-3200 (51.2 GB/s), of which
it gets 0.7. Servers with more channels are faster. Ranks of one host share it."""

CONTEXT_BYTES = 500 << 20
"""Not measured: CUDA context of a process that runs torch."""
KERNEL_BYTES = 200 << 20
"""Not measured: workspaces of cuBLAS and cuDNN, kernels loaded at first use."""
ROUNDING_FRACTION = 0.02
"""Share of device memory lost to rounding in torch's allocator, which lets go of what it
has cached where memory ends; on cards with room to spare 7 % of a job were seen."""
COLLECTIVES_BYTES = 1 << 30
"""NCCL's buffers and streams on each of several cards: 0.7 to 1.5 GiB measured."""
DESKTOP_BYTES = 1 << 30
"""Assumed: what a desktop, its browser and an allocator near the brim take of a consumer
card whose memory is not given."""
DRIVER_FRACTION = 0.015
"""Share of what nvidia-smi calls total that CUDA does not offer: 0.5 to 1.5 %."""

MAX_GPU_GIB = 1024


class Link(NamedTuple):
    """PCI Express of one generation; bytes per second each way, in theory, and the shares
    of it that pinned copies reach alone and beside copies the other way."""

    pcie: int
    bytes_s: float
    alone: float
    both: float


LINKS = {
    # bits a lane, of which 130 carry 128 (PCI Express base specification)
    f"pcie{pcie}x{lanes}": Link(pcie, lanes * bits_s * 128 / 130 / 8, *shares)
    for pcie, bits_s, *shares in (
        (3, 8e9, 0.78, 0.71),
        (4, 16e9, 0.83, 0.60),
        (5, 32e9, 0.89, 0.80),
    )
    for lanes in (8, 16)
}


class Gpu(NamedTuple):
    """One row of the table, in the units of data sheets.

    `mib` is what nvidia-smi reports as total. Products are dense: bf16 on tensor cores
    summed in fp32, fp32 outside tensor cores (torch's default), and with `tf32: true`.
    `pcie` is the generation; cards with fewer than 16 `lanes` say so. NVLink is to other
    cards each way, half of what data sheets of SXM cards give for both, 0 without a
    switch between all. Among the aliases is what the driver calls the card.
    """

    name: str
    mib: int
    tflops_16: float
    tflops_32: float
    tflops_tf32: float
    memory_gb_s: float
    pcie: int
    reach: Reach
    source: str
    nvlink_gb_s: float = 0.0
    aliases: tuple[str, ...] = ()
    lanes: int = 16

    @property
    def device_bytes(self) -> int:
        return self.mib << 20

    @property
    def is_consumer(self) -> bool:
        """Whether a desktop is likely to be on it."""
        return re.match(r"RTX \d0[5-9]0", self.name) is not None

    @property
    def links(self) -> tuple[str, ...]:
        """Links that it can be on, the fastest last."""
        return tuple(
            name
            for name, link in LINKS.items()
            if link.pcie <= self.pcie and int(name.partition("x")[2]) <= self.lanes
        )


_PAGE = "NVIDIA GeForce product page"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper"
_ADA = "NVIDIA Ada GPU architecture whitepaper"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper"
_SHEET = "NVIDIA {} data sheet"
_A100_40_NAMES = ("A100-SXM4-40GB", "A100-PCIE-40GB")
_A100_80_NAMES = ("A100-SXM4-80GB", "A100 80GB PCIe")
_H100_NAMES = ("H100 SXM", "H100 80GB", "H100 80GB HBM3")
_V100_NAMES = ("V100-SXM2-32GB", "V100-SXM3-32GB")
_6000_NAMES = ("RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell")

# fmt: off
GPUS = (
    # its 16-bit rate is twice fp32 as in all GA10x, a quarter of the 102 tensor TFLOPS
    # that its page counts in sparse fp16
    Gpu("RTX 3060 12GB", 12288,  25.5,  12.7,  12.7,   360, 4, RTX, _PAGE),
    Gpu("RTX 3080",      10240,  59.5,  29.8,  29.8,   760, 4, RTX, _GA102),
    Gpu("RTX 3090",      24576,  71.0,  35.6,  35.6,   936, 4, RTX, _GA102),
    Gpu("RTX 4060 Ti 16GB", 16380, 44.1, 22.1, 22.1,   288, 4, RTX, _PAGE, lanes=8),
    Gpu("RTX 4070",      12282,  58.3,  29.1,  29.1,   504, 4, RTX, _PAGE),
    Gpu("RTX 4080",      16376,  97.5,  48.7,  48.7, 716.8, 4, RTX, _ADA),
    Gpu("RTX 4090",      24564, 165.2,  82.6,  82.6,  1008, 4, RTX, _ADA),
    Gpu("RTX 5080",      16303, 112.6,  56.3,  56.3,   960, 5, RTX, _BLACKWELL),
    Gpu("RTX 5090",      32607, 209.5, 104.8, 104.8,  1792, 5, RTX, _BLACKWELL),
    # workstations and servers without NVLink: fp32 sums at the full rate
    Gpu("RTX A6000",     49140, 154.8,  38.7,  77.4,   768, 4, RTX, _GA102),
    Gpu("RTX 6000 Ada",  49140, 364.2,  91.1, 182.1,   960, 4, RTX, _ADA, 0, ("RTX 6000 Ada Generation",)),
    Gpu("RTX PRO 6000",  97887, 503.8, 126.0, 251.9,  1792, 5, RTX, _BLACKWELL, 0, _6000_NAMES),
    Gpu("T4",            15360,  65.0,   8.1,   8.1,   320, 3, OTHERS, _SHEET.format("T4")),
    Gpu("L4",            23034, 121.0,  30.3,  60.0,   300, 4, OTHERS, _SHEET.format("L4")),
    Gpu("A10G",          23028,  70.0,  35.0,  35.0,   600, 4, PASSIVE, _SHEET.format("A10G")),
    Gpu("L40S",          46068, 362.0,  91.6, 183.0,   864, 4, PASSIVE, _SHEET.format("L40S")),
    Gpu("V100-32GB",     32768, 125.0,  15.7,  15.7,   900, 3, OTHERS, _SHEET.format("V100"), 150, _V100_NAMES),
    Gpu("A100-40GB",     40960, 312.0,  19.5, 156.0,  1555, 4, AMPERE, _SHEET.format("A100"), 300, _A100_40_NAMES),
    # SXM and PCIe: only memory differs, 2039 and 1935 GB/s
    Gpu("A100-80GB",     81920, 312.0,  19.5, 156.0,  1935, 4, AMPERE, _SHEET.format("A100 (80GB PCIe)"), 300, _A100_80_NAMES),
    Gpu("H100",          81559, 989.0,  67.0, 494.0,  3350, 5, HOPPER, _SHEET.format("H100 (SXM)"), 450, _H100_NAMES),
    Gpu("H100 PCIe",     81559, 756.0,  51.0, 378.0,  2000, 5, HOPPER, _SHEET.format("H100 (PCIe)")),
    Gpu("H200",         143771, 989.0,  67.0, 494.0,  4800, 5, HOPPER, _SHEET.format("H200 (SXM)"), 450, ("H200 SXM",)),
    Gpu("B200",         183359, 2250.0, 75.0, 1125.0, 8000, 5, OTHERS, _SHEET.format("HGX B200"), 900),
    # with ROCm, where nothing of this has run
    Gpu("MI300X",       196592, 1307.4, 163.4, 653.7, 5300, 5, OTHERS, "AMD Instinct MI300X data sheet", 448, ("AMD Instinct MI300X",)),
)
# fmt: on
OWN_FIGURES = "NAME:48GiB:91TFLOPs:864GB/s"
"""A card that is not in the table: memory, bf16 products summed in fp32, its bandwidth."""


def gpu_hardware(
    text: str, link: str | None, host_bytes: int, tf32: bool = False, num_gpus: int = 1
) -> Hardware:
    """What a GPU of the table would give, one of `num_gpus` on a host.

    Each has a link of its own; copies of all at once are as fast as of one, and host
    AdamW shares the host's memory.

    Args:
        text: `NAME`, `NAME:GiB`, or as `OWN_FIGURES` for any other card; case, spaces,
            dashes, "NVIDIA", "GeForce" and "RTX" do not count, nor later words if the
            first tell enough. GiB replaces its memory.
        link: One of `Gpu.links`, None for the fastest.
        host_bytes: Memory of the host that may be used.
        tf32: Whether fp32 products run on tensor cores (`tf32: true`).
        num_gpus: Cards of this kind on the host.

    Raises:
        ConfigError: Unknown or ambiguous name, unknown link or one that the GPU
            cannot use, or a figure that is not in its range.
    """
    name, *figures = text.split(":")
    gpu = _described(name, figures) if len(figures) > 1 else _find(name, text)
    device_bytes = gpu.device_bytes
    if len(figures) == 1:
        device_bytes = int(_figure(figures[0], "GiB", MAX_GPU_GIB, gpu) * (1 << 30))
    lost = ROUNDING_FRACTION + DRIVER_FRACTION
    link_name = _find_link(link, gpu) if link is not None else gpu.links[-1]
    lanes = LINKS[link_name]
    source = f"{gpu.source}; {link_name}; how much of each peak is reached is assumed"
    alone, both = lanes.bytes_s * lanes.alone, lanes.bytes_s * lanes.both
    unseen = CONTEXT_BYTES + KERNEL_BYTES + int(lost * device_bytes)
    exchange = 0.0
    if num_gpus > 1:
        exchange, way = both, "through host memory"
        if gpu.nvlink_gb_s:
            exchange, way = gpu.nvlink_gb_s * 1e9 * GATHER_FRACTION, "over NVLink"
        source += f"; cards exchange {way} at {exchange / 1e9:.0f} GB/s each way"
        # in a ring each card sends and receives all but its own part
        exchange *= num_gpus / (num_gpus - 1)
        unseen += COLLECTIVES_BYTES
    reach, tera = gpu.reach, 1e12
    fp32 = gpu.tflops_tf32 * reach.tf32 if tf32 else gpu.tflops_32 * reach.flops_32
    return Hardware(
        name=gpu.name,
        source=source,
        desktop_bytes=DESKTOP_BYTES if gpu.is_consumer and not figures else 0,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        unseen_bytes=unseen,
        flops_16=gpu.tflops_16 * tera * reach.flops_16,
        flops_32=fp32 * tera,
        attention_16=gpu.tflops_16 * tera * reach.attention,
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


def _described(name: str, figures: list[str]) -> Gpu:
    """A card by its figures, on any link; fp32 as far behind 16 bits as on most."""
    if len(figures) != 3 or not name.strip():
        raise ConfigError(
            f"--gpu {':'.join([name, *figures])!r}: a card that is not in the table is "
            f"written {OWN_FIGURES}"
        )
    example = Gpu(name, 48 << 10, 91, 23, 46, 864, 5, OTHERS, "figures given by hand")
    gib, tflops, gb_s = (
        _figure(figure, unit, most, example)
        for figure, unit, most in zip(
            figures, ("GiB", "TFLOPs", "GB/s"), (MAX_GPU_GIB, 1e5, 1e5), strict=True
        )
    )
    return example._replace(
        mib=int(gib * 1024),
        tflops_16=tflops,
        tflops_32=tflops / 4,
        tflops_tf32=tflops / 2,
        memory_gb_s=gb_s,
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
    _refuse(
        "--gpu",
        text,
        wanted,
        (gpu.name for gpu in GPUS),
        f", NAME:GiB or {OWN_FIGURES}",
    )


def _figure(text: str, unit: str, most: float, gpu: Gpu) -> float:
    try:
        if unit == "GiB":
            number = parse_gib(text)
        else:
            number = float(re.sub(rf"\s*{unit}$", "", text, flags=re.IGNORECASE))
    except ValueError:
        number = 0.0
    # false for nan too
    if 1 <= number <= most:
        return number
    what = "a memory size" if unit == "GiB" else "a figure"
    raise ConfigError(
        f"--gpu: {text!r} is not {what} from 1 to {most:.0f} {unit}; "
        f"write for example {gpu.name}:{gpu.device_bytes / 2**30:.0f}, or {OWN_FIGURES}"
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
    close = difflib.get_close_matches(wanted, by_plain, n=1)
    nearest = "".join(f"; nearest: {by_plain[name]}" for name in close)
    raise ConfigError(
        f"{option} {text!r} is not known; allowed: {', '.join(by_plain.values())}{also}"
        f"{nearest}"
    )


def _beginnings(name: str) -> set[str]:
    # whole words: an H20 is no H200
    words = re.split(r"[\s-]", name)
    return {_plain("".join(words[:num])) for num in range(1, len(words))}


def _plain(name: str) -> str:
    """Lower case letters and digits alone, without words that all cards share."""
    letters = re.sub(r"[\s_-]", "", name.lower())
    return re.sub(r"^(nvidia)?(geforce|tesla)?(rtx)?", "", letters)
