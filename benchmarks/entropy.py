"""How much smaller frozen weights could cross the link without a loss, and what a decoder
on the device would have to reach for that to pay.

A bf16 weight has a sign and 7 bits of mantissa that look random, and 8 bits of exponent that
do not. Measured on tensors of the shapes that weights have: the entropy of all 16 bits, and
what two codes of it need that many threads can decode at once: `window`, 3 bits for the seven
most frequent exponents of a tensor, the others listed beside it (8 + 3 bits and 32 a rarity),
and `huffman`, one code for the exponents of a tensor (DFloat11, Zhang et al. 2025). Of NF4
the codes and their scales. The second table is arithmetic from `core/planner/cards.py`.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable
from pathlib import Path

import torch
from bitsandbytes.functional import quantize_4bit
from rich.console import Console
from tables import Page
from torch import Tensor

from axolotl.integrations.protrain.core.planner.cards import gpu_hardware

SHAPE = 4096, 4096
WINDOW = 7
RARITY_BITS = 32
"""Position inside its tile, and the exponent."""


def heavy(freedom: float) -> Tensor:
    return torch.distributions.StudentT(freedom).sample(SHAPE) * 0.02


def by_channel() -> Tensor:
    """Rows and columns of different sizes, as training makes them."""
    rows, columns = (torch.randn(size).mul(0.5).exp() for size in SHAPE)
    return torch.randn(SHAPE) * 0.02 * rows[:, None] * columns


def merged() -> Tensor:
    """An adapter of rank 16 in it."""
    up, down = torch.randn(SHAPE[0], 16), torch.randn(16, SHAPE[1])
    return (torch.randn(SHAPE) * 0.02).bfloat16() + 0.002 * (up @ down)


WEIGHTS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: torch.randn(SHAPE) * 0.02,
    "uniform (Kaiming)": lambda: torch.empty(SHAPE).uniform_(-0.0156, 0.0156),
    "Student-t, 4 degrees": lambda: heavy(4),
    "Student-t, 2 degrees": lambda: heavy(2),
    "normal by channel": by_channel,
    "adapter merged": merged,
    "one in ten pruned": lambda: torch.randn(SHAPE) * (torch.rand(SHAPE) > 0.1),
}
LINKS = (("4090", "pcie3x16"), ("4090", "pcie4x16"), ("5090", "pcie5x16"))


def shares(values: Tensor, num: int) -> Tensor:
    counts = torch.bincount(values.flatten().int(), minlength=num)
    return counts[counts > 0] / values.numel()


def entropy(values: Tensor, num: int) -> float:
    """Bits a value."""
    found = shares(values, num).double()
    return float(-(found * found.log2()).sum())


def huffman_bits(values: Tensor, num: int) -> float:
    """Mean length of an optimal prefix code: the sum of all inner nodes."""
    heap = shares(values, num).tolist()
    heapq.heapify(heap)
    total = 0.0
    while len(heap) > 1:
        node = heapq.heappop(heap) + heapq.heappop(heap)
        heapq.heappush(heap, node)
        total += node
    return total


def code_sizes(weights: Tensor) -> list[str]:
    """Shares of 16 bits: the entropy, `window`, `huffman`."""
    bits = weights.bfloat16().view(torch.int16).int() & 0xFFFF
    exponents = bits >> 7 & 0xFF
    kept = shares(exponents, 256).sort(descending=True).values[:WINDOW].sum()
    window = 8 + 3 + RARITY_BITS * (1 - float(kept))
    sizes = entropy(bits, 1 << 16), window, 8 + huffman_bits(exponents, 256)
    return [f"{size / 16:.3f}" for size in sizes]


def nf4_sizes(weights: Tensor) -> list[str]:
    packed, state = quantize_4bit(weights.bfloat16(), blocksize=64, quant_type="nf4")
    codes = torch.stack([packed >> 4, packed & 15])
    scales = state.absmax.view(torch.int32) >> 16 & 0x7FFF
    found = entropy(codes, 16) / 4, huffman_bits(codes, 16) / 4
    return [f"{found[0]:.3f}", f"{found[1]:.3f}", f"{entropy(scales, 1 << 15):.1f}"]


def decoder_rows(ratio: float) -> list[list[str]]:
    """What a byte of weights costs on the link, and what a decoder may cost."""
    rows = []
    for gpu, link in LINKS:
        card = gpu_hardware(gpu, link, host_bytes=0)
        saved_s = (1 - ratio) / card.fetch_bytes_s
        best = card.memory_bytes_s / (1 + ratio)
        figures = card.fetch_bytes_s / ratio, 1 / saved_s, best
        told = (f"{figure / 1e9:.0f}" for figure in figures)
        rows.append([f"{card.name}, {link}", *told, f"{1 / saved_s / best:.0%}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="Markdown file")
    options = parser.parse_args()
    torch.manual_seed(0)
    made = {name: make() for name, make in WEIGHTS.items()}
    pages = [
        Page(
            "bf16 and NF4, shares of their size",
            [
                "weights",
                "entropy",
                "window",
                "huffman",
                "NF4",
                "huffman",
                "bits a scale",
            ],
            [[name, *code_sizes(w), *nf4_sizes(w)] for name, w in made.items()],
        ),
        Page(
            "a decoder of 0.7: GB/s of weights that come out",
            ["card", "to keep up", "to pay", "bound by memory", "share of that"],
            decoder_rows(0.7),
        ),
    ]
    for page in pages:
        page.show(Console(width=120))
    if options.output:
        about = " ".join((__doc__ or "").split())
        text = "\n".join(page.markdown() for page in pages)
        options.output.write_text(f"# entropy\n\n{about}\n\n{text}", "utf-8")


if __name__ == "__main__":
    main()
