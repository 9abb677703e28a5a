"""GPUs and links by name, for plans made where the GPU is not.

Peaks are those of the data sheets: dense, without sparsity, 16-bit products summed in
fp32 (consumer cards do those at half the rate of fp16 sums). How much of them training
reaches is taken from what others have measured, `benchmarks/published/` with
`benchmarks/published.py`; cards of which nobody has published anything are taken as their relatives.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple

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
SPARK = Reach(0.5, 0.5, 0.7, 0.35)
"""DGX Spark: about 60 TFLOPS of bf16 products were seen in October 2025 (J. Carmack, A.
Hannun); the rest is assumed."""
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

HOST_BYTES_S = 51.2e9 * 0.7
"""Assumed: two channels of DDR4-3200 (51.2 GB/s), of which 0.7 is reached. Servers with
more channels are faster."""
ADAM_BYTES_S = HOST_BYTES_S / ADAM_MOVED_BYTES
"""Fused torch AdamW, bound by the host's memory, which the ranks of one host share."""

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
SYSTEM_BYTES = 6 << 30
"""Taken by the system of a machine whose card has no memory of its own: 113.5 of 119.7 GiB
were free on a DGX Spark."""
DRIVER_FRACTION = 0.015
"""Share of what nvidia-smi calls total that CUDA does not offer: 0.5 to 1.5 %."""

MAX_GPU_GIB = 1024
MAX_NAMED = 4
"""Cards that are named to someone whose own is not known."""


class Link(NamedTuple):
    """A link between host and card: the generation of PCI Express, bytes per second each
    way, in theory, and the shares of it that pinned copies reach alone and beside copies
    the other way."""

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
# NVLink between Grace and Hopper (GH200 data sheet). Copies reach 346 GB/s to the device,
# 15 % less from it, and half in both ways at once: issues 23 and 41 of NVIDIA/nvbandwidth
LINKS["c2c"] = Link(0, 450e9, 0.65, 0.33)
# inside of one memory, whose rate is the card's: a copy reads and writes it (assumed)
LINKS["memory"] = Link(0, 0.0, 0.45, 0.22)


class Gpu(NamedTuple):
    """One row of the table, in the units of data sheets.

    `mib` is what nvidia-smi reports as total. Products are dense: bf16 on tensor cores
    summed in fp32, fp32 outside tensor cores (torch's default), and with `tf32: true`.
    `pcie` is the generation; cards with fewer than 16 `lanes` say so. `capability` is
    CUDA's, 75 for 7.5, 0 for other makers. NVLink is to other cards each way, half of what
    data sheets of SXM cards give for both, 0 without a switch between all. Among the
    aliases is what the driver calls the card. `host_link` replaces PCI Express. Of a card
    with `one_memory` that of its host is its own, and `mib` is all of it that torch sees.
    """

    name: str
    mib: int
    tflops_16: float
    tflops_32: float
    tflops_tf32: float
    memory_gb_s: float
    pcie: int
    capability: int
    reach: Reach
    source: str
    nvlink_gb_s: float = 0.0
    aliases: tuple[str, ...] = ()
    lanes: int = 16
    host_link: str = ""
    one_memory: bool = False

    @property
    def device_bytes(self) -> int:
        return self.mib << 20

    @property
    def is_consumer(self) -> bool:
        """Tell whether a desktop is likely to be on it, and its board a desktop's."""
        return re.match(r"RTX \d0[5-9]0|RX ", self.name) is not None

    @property
    def links(self) -> tuple[str, ...]:
        """Links that it can be on, the fastest last."""
        if self.one_memory:
            return ("memory",)
        slots = (
            f"pcie{n}x{lanes}" for n in range(3, self.pcie + 1) for lanes in (8, 16)
        )
        fits = (name for name in slots if int(name.partition("x")[2]) <= self.lanes)
        return (self.host_link,) if self.host_link else tuple(fits)


_PAGE = "NVIDIA GeForce product page"
_LAPTOP = "NVIDIA GeForce laptop product page"
_TURING = "NVIDIA Turing GPU architecture whitepaper"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper"
_ADA = "NVIDIA Ada GPU architecture whitepaper"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper"
_SHEET = "NVIDIA {} data sheet"
_A100_40_NAMES = ("A100-SXM4-40GB", "A100-PCIE-40GB")
_A100_80_NAMES = ("A100-SXM4-80GB", "A100 80GB PCIe")
_H100_NAMES = ("H100 SXM", "H100 80GB", "H100 80GB HBM3")
_V100_NAMES = ("V100-SXM2-32GB", "V100-SXM3-32GB")
_SPARK_PAGE = "NVIDIA DGX Spark product page, bf16 as an eighth of sparse FP4"
_AGX = "NVIDIA Jetson AGX {}"
_STRIX_NAMES = ("Ryzen AI Max+ 395", "Radeon 8060S", "AMD Radeon 8060S")
_6000_NAMES = ("RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell")

# fmt: off
GPUS = (
    # of Turing tensor cores compute fp16 alone
    Gpu("RTX 2080 Ti",   11264,  53.8,  13.4,  13.4,   616, 3,  75, OTHERS, _TURING),
    # its 16-bit rate is twice fp32 as in all GA10x, a quarter of the 102 tensor TFLOPS
    # that its page counts in sparse fp16
    Gpu("RTX 3060 12GB", 12288,  25.5,  12.7,  12.7,   360, 4,  86, RTX, _PAGE),
    Gpu("RTX 3080",      10240,  59.5,  29.8,  29.8,   760, 4,  86, RTX, _GA102),
    Gpu("RTX 3080 Ti",   12288,  68.2,  34.1,  34.1,   912, 4,  86, RTX, _PAGE),
    Gpu("RTX 3090",      24576,  71.0,  35.6,  35.6,   936, 4,  86, RTX, _GA102),
    Gpu("RTX 3090 Ti",   24564,  80.0,  40.0,  40.0,  1008, 4,  86, RTX, _PAGE),
    Gpu("RTX 4060 Ti 16GB", 16380, 44.1, 22.1, 22.1,   288, 4,  89, RTX, _PAGE, lanes=8),
    Gpu("RTX 4070",      12282,  58.3,  29.1,  29.1,   504, 4,  89, RTX, _PAGE),
    Gpu("RTX 4070 SUPER", 12282, 71.0,  35.5,  35.5,   504, 4,  89, RTX, _PAGE),
    Gpu("RTX 4070 Ti",   12282,  80.2,  40.1,  40.1,   504, 4,  89, RTX, _PAGE),
    Gpu("RTX 4070 Ti SUPER", 16376, 88.2, 44.1, 44.1,  672, 4,  89, RTX, _PAGE),
    Gpu("RTX 4080",      16376,  97.5,  48.7,  48.7, 716.8, 4,  89, RTX, _ADA),
    Gpu("RTX 4080 SUPER", 16376, 104.4, 52.2,  52.2,   736, 4,  89, RTX, _PAGE),
    Gpu("RTX 4090",      24564, 165.2,  82.6,  82.6,  1008, 4,  89, RTX, _ADA),
    Gpu("RTX 5060 Ti 16GB", 16311, 47.4, 23.7, 23.7,   448, 5, 120, RTX, _PAGE, lanes=8),
    Gpu("RTX 5070",      12227,  61.7,  30.9,  30.9,   672, 5, 120, RTX, _BLACKWELL),
    Gpu("RTX 5070 Ti",   16303,  87.9,  43.9,  43.9,   896, 5, 120, RTX, _BLACKWELL),
    Gpu("RTX 5080",      16303, 112.6,  56.3,  56.3,   960, 5, 120, RTX, _BLACKWELL),
    Gpu("RTX 5090",      32607, 209.5, 104.8, 104.8,  1792, 5, 120, RTX, _BLACKWELL),
    # at the highest boost clock, which 150 W give; thinner laptops are slower
    Gpu("RTX 4080 Laptop", 12282, 67.7, 33.9,  33.9,   432, 4,  89, RTX, _LAPTOP, 0, ("RTX 4080 Laptop GPU",)),
    Gpu("RTX 4090 Laptop", 16376, 79.4, 39.7,  39.7,   576, 4,  89, RTX, _LAPTOP, 0, ("RTX 4090 Laptop GPU",)),
    Gpu("RTX 5080 Laptop", 16303, 70.3, 35.1,  35.1,   896, 5, 120, RTX, _LAPTOP, 0, ("RTX 5080 Laptop GPU",)),
    Gpu("RTX 5090 Laptop", 24463, 90.7, 45.3,  45.3,   896, 5, 120, RTX, _LAPTOP, 0, ("RTX 5090 Laptop GPU",)),
    # workstations and servers without NVLink: fp32 sums at the full rate
    Gpu("RTX A4000",     16376,  76.7,  19.2,  38.3,   448, 4,  86, RTX, _SHEET.format("RTX A4000")),
    Gpu("RTX A5000",     24564, 111.1,  27.8,  55.6,   768, 4,  86, RTX, _SHEET.format("RTX A5000")),
    Gpu("RTX A6000",     49140, 154.8,  38.7,  77.4,   768, 4,  86, RTX, _GA102),
    Gpu("RTX 4000 Ada",  20475, 106.9,  26.7,  53.5,   360, 4,  89, RTX, _SHEET.format("RTX 4000 Ada"), 0, ("RTX 4000 Ada Generation",)),
    Gpu("RTX 4500 Ada",  24570, 158.5,  39.6,  79.3,   432, 4,  89, RTX, _SHEET.format("RTX 4500 Ada"), 0, ("RTX 4500 Ada Generation",)),
    Gpu("RTX 5000 Ada",  32760, 261.1,  65.3, 130.6,   576, 4,  89, RTX, _SHEET.format("RTX 5000 Ada"), 0, ("RTX 5000 Ada Generation",)),
    Gpu("RTX 6000 Ada",  49140, 364.2,  91.1, 182.1,   960, 4,  89, RTX, _ADA, 0, ("RTX 6000 Ada Generation",)),
    Gpu("RTX PRO 6000",  97887, 503.8, 126.0, 251.9,  1792, 5, 120, RTX, _BLACKWELL, 0, _6000_NAMES),
    Gpu("T4",            15360,  65.0,   8.1,   8.1,   320, 3,  75, OTHERS, _SHEET.format("T4")),
    Gpu("L4",            23034, 121.0,  30.3,  60.0,   300, 4,  89, OTHERS, _SHEET.format("L4")),
    Gpu("A10",           23028, 125.0,  31.2,  62.5,   600, 4,  86, PASSIVE, _SHEET.format("A10")),
    Gpu("A10G",          23028,  70.0,  35.0,  35.0,   600, 4,  86, PASSIVE, _SHEET.format("A10G")),
    Gpu("A40",           46068, 149.7,  37.4,  74.8,   696, 4,  86, PASSIVE, _SHEET.format("A40")),
    Gpu("L40",           46068, 181.0,  90.5,  90.5,   864, 4,  89, PASSIVE, _SHEET.format("L40")),
    Gpu("L40S",          46068, 362.0,  91.6, 183.0,   864, 4,  89, PASSIVE, _SHEET.format("L40S")),
    Gpu("V100-32GB",     32768, 125.0,  15.7,  15.7,   900, 3,  70, OTHERS, _SHEET.format("V100"), 150, _V100_NAMES),
    Gpu("A30",           24576, 165.0,  10.3,  82.0,   933, 4,  80, AMPERE, _SHEET.format("A30")),
    Gpu("A100-40GB",     40960, 312.0,  19.5, 156.0,  1555, 4,  80, AMPERE, _SHEET.format("A100"), 300, _A100_40_NAMES),
    # SXM and PCIe: only memory differs, 2039 and 1935 GB/s
    Gpu("A100-80GB",     81920, 312.0,  19.5, 156.0,  1935, 4,  80, AMPERE, _SHEET.format("A100 (80GB PCIe)"), 300, _A100_80_NAMES),
    Gpu("H100",          81559, 989.0,  67.0, 494.0,  3350, 5,  90, HOPPER, _SHEET.format("H100 (SXM)"), 450, _H100_NAMES),
    Gpu("H100 PCIe",     81559, 756.0,  51.0, 378.0,  2000, 5,  90, HOPPER, _SHEET.format("H100 (PCIe)")),
    Gpu("H200",         143771, 989.0,  67.0, 494.0,  4800, 5,  90, HOPPER, _SHEET.format("H200 (SXM)"), 450, ("H200 SXM",)),
    # one module: 96 GB beside the 480 GB of its Grace
    Gpu("GH200",         97871, 990.0,  67.0, 494.0,  4000, 5,  90, HOPPER, _SHEET.format("GH200"), 0, ("GH200-96GB", "GH200 480GB"), 16, "c2c"),
    Gpu("B200",         183359, 2250.0, 75.0, 1125.0, 8000, 5, 100, OTHERS, _SHEET.format("HGX B200"), 900),
    # of eight 36 PFLOPS sparse, 18 in TF32; 288 GB each
    Gpu("B300",         274658, 2250.0, 75.0, 1125.0, 8000, 5, 103, OTHERS, _SHEET.format("HGX B300"), 900, ("B300 SXM6",)),
    # with ROCm, where nothing of this has run
    Gpu("RX 7900 XTX",   24560, 122.8,  61.4,  61.4,   960, 4,   0, OTHERS, "AMD Radeon RX 7900 XTX product page", 0, ("7900 XTX", "AMD Radeon RX 7900 XTX")),
    Gpu("MI300X",       196592, 1307.4, 163.4, 653.7, 5300, 5,   0, OTHERS, "AMD Instinct MI300X data sheet", 448, ("AMD Instinct MI300X",)),
    # one memory for CPU and GPU; nothing of this has run on any of them. Of 128 GB torch
    # sees 119.7 GiB on a DGX Spark; as much of the others is assumed, TF32 as half of bf16.
    # bf16 is an eighth of what is claimed for sparse FP4; NVIDIA says 31 TFLOPS in fp32
    Gpu("DGX Spark",    122548, 125.0,  31.0,  62.5,   273, 5, 121, SPARK, _SPARK_PAGE, 0, ("GB10",), one_memory=True),
    # half of 2070 in FP4 is dense; fp32 of 2560 cores at 1.57 GHz
    Gpu("Jetson AGX Thor", 122548, 258.0, 8.0, 129.0,  273, 5, 110, SPARK, _AGX.format("Thor product page"), 0, ("Thor", "Jetson T5000"), one_memory=True),
    # a quarter of 170 sparse INT8 TOPS
    Gpu("Jetson AGX Orin 64GB", 61274, 42.5, 5.3, 21.2, 204.8, 4, 87, OTHERS, _AGX.format("Orin technical brief"), 0, ("AGX Orin 64GB",), one_memory=True),
    # 40 units at 2.9 GHz; with ROCm, and all of the memory given to the GPU
    Gpu("Strix Halo",   122548,  59.4,  29.7,  29.7,   256, 4,   0, OTHERS, "AMD Ryzen AI Max+ 395 product page", 0, _STRIX_NAMES, one_memory=True),
)
# fmt: on
UNMODELLED = {
    r"apple|mac|^m[1-9](pro|max|ultra)?$": (
        "torch calls its GPU mps, on which ProTrain does not train"
    ),
    r"jetson|strix|ryzenai": (
        "its figures are not known here; write them into a file for --cards, with "
        "`one_memory: true`"
    ),
    r"gb[23]00|grace": (
        "how fast its NVLink to the host's memory is, is not known here; --gpu B200 "
        "plans such a GPU on PCI Express, which is slower"
    ),
}
"""Machines that people ask for, as `_plain` writes them, and why there is no plan."""
OWN_FIGURES = "NAME:48GiB:91TFLOPs:864GB/s"
"""A card that is not in the table: memory, bf16 products summed in fp32, its bandwidth."""


def gpu_hardware(
    text: str,
    link: str | None,
    host_bytes: int,
    tf32: bool = False,
    num_gpus: int = 1,
    table: Sequence[Gpu] = GPUS,
) -> Hardware:
    """Return the rates of a GPU of the table, one of `num_gpus` on a host.

    Each has a link of its own, and host AdamW shares the host's memory. Several consumer
    cards without a `link` are on a desktop's board: eight lanes each, and what copies of
    all together move is bound by its two channels of memory. Cards without NVLink
    exchange over the links that their copies use.

    Args:
        text: `NAME`, `NAME:GiB`, or as `OWN_FIGURES` for any other card; case, spaces,
            dashes, "NVIDIA", "GeForce" and "RTX" do not count, nor later words if the
            first tell enough. GiB replaces its memory.
        link: One of `Gpu.links`, None for the fastest.
        host_bytes: Memory of the host that may be used; a card with one memory has its own.
        tf32: Whether fp32 products run on tensor cores (`tf32: true`).
        num_gpus: Cards of this kind on the host.
        table: Where names are looked up.

    Raises:
        ConfigError: Unknown or ambiguous name, unknown link or one that the GPU
            cannot use, a figure that is not in its range, or several of a card that a
            machine has one of.
    """
    name, *figures = text.split(":")
    gpu = _described(name, figures) if len(figures) > 1 else _find(name, text, table)
    device_bytes = gpu.device_bytes
    if len(figures) == 1:
        device_bytes = int(_figure(figures[0], "GiB", MAX_GPU_GIB, gpu) * (1 << 30))
    if gpu.one_memory:
        host_bytes = device_bytes
        if num_gpus > 1:
            raise ConfigError(
                f"--gpus {num_gpus}: a {gpu.name} is a machine with one GPU. Leave --gpus "
                "out, or name cards."
            )
    lost = ROUNDING_FRACTION + DRIVER_FRACTION
    on_desktop = link is None and num_gpus > 1 and gpu.is_consumer
    if link is not None:
        link_name = _find_link(link, gpu)
    elif on_desktop:
        link_name = f"pcie{gpu.pcie}x8"
    else:
        link_name = gpu.links[-1]
    lanes = LINKS[link_name]
    source = f"{gpu.source}; {link_name}; how much of each peak is reached is assumed"
    bytes_s = lanes.bytes_s or gpu.memory_gb_s * 1e9
    alone, both = bytes_s * lanes.alone, bytes_s * lanes.both
    if on_desktop:
        source += "; a desktop's board, whose two channels of memory they share"
        alone = min(alone, HOST_BYTES_S / num_gpus)
        both = min(both, HOST_BYTES_S / num_gpus / 2)
    unseen = CONTEXT_BYTES + KERNEL_BYTES + int(lost * device_bytes)
    exchange = 0.0
    if num_gpus > 1:
        exchange, way = both, f"through host memory, on the {link_name} of their copies"
        if gpu.nvlink_gb_s:
            exchange, way = gpu.nvlink_gb_s * 1e9 * GATHER_FRACTION, "over NVLink"
        source += f"; cards exchange {way} at {exchange / 1e9:.0f} GB/s each way"
        # in a ring each card sends and receives all but its own part
        exchange *= num_gpus / (num_gpus - 1)
        unseen += COLLECTIVES_BYTES
    reach, tera = gpu.reach, 1e12
    others = SYSTEM_BYTES if gpu.one_memory else DESKTOP_BYTES * gpu.is_consumer
    fp32 = gpu.tflops_tf32 * reach.tf32 if tf32 else gpu.tflops_32 * reach.flops_32
    return Hardware(
        name=gpu.name,
        source=source,
        desktop_bytes=0 if figures else others,
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
        link="" if gpu.one_memory else link_name,
        one_memory=gpu.one_memory,
        capability=gpu.capability,
        gather_bytes_s=exchange,
        reduce_bytes_s=exchange,
        shares_link=num_gpus > 1 and not gpu.nvlink_gb_s,
    )


def _described(name: str, figures: list[str]) -> Gpu:
    """A card by its figures, on any link; fp32 as far behind 16 bits as on most."""
    if len(figures) != 3 or not name.strip():
        raise ConfigError(
            f"--gpu {':'.join([name, *figures])!r}: a card that is not in the table is "
            f"written {OWN_FIGURES}"
        )
    example = Gpu(
        name, 48 << 10, 91, 23, 46, 864, 5, 0, OTHERS, "figures given by hand"
    )
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


def _find(name: str, text: str, table: Sequence[Gpu]) -> Gpu:
    wanted = _plain(name)
    for gpu in table:
        if wanted in map(_plain, (gpu.name, *gpu.aliases)):
            return gpu
    begun = [gpu for gpu in table if wanted and wanted in _beginnings(gpu.name)]
    if len(begun) == 1:
        return begun[0]
    if begun:
        choice = " or ".join(gpu.name for gpu in begun[:MAX_NAMED])
        raise ConfigError(f"--gpu {text!r} is ambiguous: write for example {choice}")
    for pattern, why in UNMODELLED.items():
        if re.search(pattern, wanted):
            raise ConfigError(f"--gpu {text!r} cannot be planned: {why}")
    several = re.fullmatch(r"(?P<n>[1-9]\d?)x(?P<card>.+)", wanted)
    several = several or re.fullmatch(r"(?P<card>.+)x(?P<n>[1-9]\d?)", wanted)
    if several:
        raise ConfigError(
            f"--gpu {text!r} names several cards: write --gpu {several['card']} "
            f"--gpus {several['n']}"
        )
    close = _nearest(wanted, [gpu.name for gpu in table], MAX_NAMED)
    nearest = f"; nearest: {', '.join(close)}" if close else ""
    raise ConfigError(
        f"--gpu {text!r} is not known{nearest}. Write a name as 4090 or A100-80GB, "
        f"NAME:GiB for other memory, or any card as {OWN_FIGURES}"
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
    close = _nearest(wanted, gpu.links, 1)
    nearest = f"; nearest: {close[0]}" if close else ""
    raise ConfigError(
        f"--link {link!r} is not known; allowed: {', '.join(gpu.links)}{nearest}"
    )


def _nearest(wanted: str, names: Sequence[str], most: int) -> list[str]:
    by_plain = {_plain(name): name for name in names}
    return [by_plain[n] for n in difflib.get_close_matches(wanted, by_plain, n=most)]


def _beginnings(name: str) -> set[str]:
    # whole words: an H20 is no H200
    words = re.split(r"[\s-]", name)
    return {_plain("".join(words[:num])) for num in range(1, len(words))}


def _plain(name: str) -> str:
    """Lower case letters and digits alone, without words that all cards share."""
    letters = re.sub(r"[\s_-]", "", name.lower())
    return re.sub(r"^(nvidia)?(geforce|tesla)?(rtx)?", "", letters)
