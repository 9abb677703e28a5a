"""What is trained: model shape, method, precision, batch, memory, steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Shape:
    """A Llama by its sizes, heads of 32 to 128 elements; with `experts` a Mixtral, of
    which each token takes two."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    experts: int = 0


SHAPES = {
    "nano": Shape(32, 96, 4, 1, 1, 64),
    "tiny": Shape(192, 576, 6, 3, 1, 256),
    "experts": Shape(192, 192, 6, 3, 1, 256, 8),
    "deep": Shape(512, 1536, 12, 8, 2, 512),
    "wide": Shape(1024, 3072, 12, 16, 4, 512),
    "1b": Shape(2048, 8192, 16, 32, 8, 128256),
    "3b": Shape(3072, 8192, 28, 24, 8, 128256),
    "8b": Shape(4096, 14336, 32, 32, 8, 128256),
    "32b": Shape(5120, 25600, 64, 64, 8, 151936),
    "70b": Shape(8192, 28672, 80, 64, 8, 128256),
}
"""Five for CPUs, then the sizes of Llama 3.2, Llama 3.1, Qwen3 and Llama 3.1."""


@dataclass(frozen=True)
class Case:
    """One row of work, the same for every system.

    Attributes:
        name: Of the case, in files and on the command line.
        shape: Key of `SHAPES`.
        method: Adapters on a 16-bit or 32-bit base, on a 4-bit base, or everything.
        precision: `bf16` is bf16 weights under autocast, adapters in fp32.
        rows: Sequences of a micro-batch, each full: there is no padding.
        length: Tokens of a sequence.
        accumulation: Micro-batches of a step.
        max_norm: To which gradients are clipped; None for not at all.
        capacity_bytes: Memory of the device that may be used.
        recompute: Whether systems that offload recompute every block; ours decides
            for itself.
        warmup: Steps before the clock counts, the first of them included.
        steps: Steps that are timed.
        reference_recomputes: Whether plain training needs recomputation even with
            all memory of a large GPU.
    """

    name: str
    shape: str
    method: Literal["lora", "qlora", "full"]
    precision: Literal["bf16", "fp32"]
    rows: int
    length: int
    capacity_bytes: int
    recompute: bool
    warmup: int = 3
    steps: int = 7
    reference_recomputes: bool = False
    accumulation: int = 1
    max_norm: float | None = None

    @property
    def tokens(self) -> int:
        """Of a step; all of them count."""
        return self.rows * self.length * self.accumulation


SMALL_CARD = 24 * GIB

QUICK = (
    Case("lora-bf16-1k-fits", "nano", "lora", "bf16", 1, 1024, 64 * MIB, False, 2, 8),
    Case("lora-1k", "tiny", "lora", "fp32", 1, 1024, 32 * MIB, True, 2, 8),
    Case("qlora-1k", "tiny", "qlora", "fp32", 1, 1024, 28 * MIB, True, 2, 8),
    Case("full-1k", "tiny", "full", "fp32", 1, 1024, 40 * MIB, True, 2, 8),
    Case("lora-8k", "nano", "lora", "fp32", 1, 8192, 35 * MIB, True, 2, 8),
    Case(
        "full-8x256-clipped",
        *("tiny", "full", "fp32", 1, 256, 24 * MIB, True, 2, 6),
        accumulation=8,
        max_norm=1.0,
    ),
    Case("experts-full-1k", "experts", "full", "fp32", 1, 1024, 64 * MIB, True, 2, 6),
)
"""Two CPU cores, half an hour. Most in fp32: a CPU without bf16 units is a hundred times
slower in bf16."""

SLOW = (
    Case("lora-16k", "nano", "lora", "fp32", 1, 16384, 70 * MIB, True, 2, 4),
    Case("deep-lora-512", "deep", "lora", "fp32", 1, 512, 72 * MIB, True, 2, 5),
    Case("wide-lora-256", "wide", "lora", "fp32", 1, 256, 128 * MIB, True, 2, 5),
)
"""Two CPU cores, each five minutes and more: by `--case`."""

SMALLER_CARD = 12 * GIB

GPU = (
    Case("lora-8b-1k", "8b", "lora", "bf16", 4, 1024, SMALLER_CARD, True, 2, 5),
    Case("lora-8b-1k-fits", "8b", "lora", "bf16", 4, 1024, SMALL_CARD, True),
    Case("lora-32b-1k", "32b", "lora", "bf16", 4, 1024, SMALL_CARD, True, 3, 7, True),
    Case("lora-32b-8k", "32b", "lora", "bf16", 1, 8192, SMALL_CARD, True, 2, 5, True),
    Case("qlora-8b-1k-fits", "8b", "qlora", "bf16", 4, 1024, SMALL_CARD, True),
    Case("qlora-70b-1k", "70b", "qlora", "bf16", 4, 1024, SMALL_CARD, True, 2, 5, True),
    Case("full-1b-1k-fits", "1b", "full", "bf16", 4, 1024, SMALL_CARD, True),
    Case("full-3b-1k", "3b", "full", "bf16", 4, 1024, SMALL_CARD, True),
    Case("full-3b-8k", "3b", "full", "bf16", 1, 8192, SMALL_CARD, True),
    Case("full-8b-8k", "8b", "full", "bf16", 1, 8192, SMALL_CARD, True, 2, 5, True),
)
"""One GPU of which 24 GiB may be used, 16 cores, 128 GB of host memory."""

CASES = {case.name: case for case in (*QUICK, *SLOW, *GPU)}
