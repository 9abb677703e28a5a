"""Fetches of packed weights and of the same weights in bf16, as a ratio.

A weight of MXFP4 or FP8 is copied in its pieces and unpacked; beside it, taking turns, the
unpacked one is copied: on the GPU, or without one on the CPU device, where a copy is one of
its memory and unpacking uses its processor, so that the ratio is no GPU's. For cards that
are not here the arithmetic follows: seconds of the link, and of what unpacking moves in
device memory, for as many numbers.

`--plans` asks `axolotl-protrain plan` instead: published bases on cards that are not here,
packed and as they are unpacked.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV3Config, Glm4MoeConfig, GptOssConfig

from axolotl.integrations.protrain.core.engine.device import (
    CpuDevice,
    CudaDevice,
    Device,
)
from axolotl.integrations.protrain.core.engine.host_pool import HostPool
from axolotl.integrations.protrain.core.engine.slots import Slot, Transport
from axolotl.integrations.protrain.core.layout import build_layout
from axolotl.integrations.protrain.core.layout.moves import MOVED_BYTES, moves_of
from axolotl.integrations.protrain.core.layout.packed import (
    Packed,
    from_fp8,
    from_mxfp4,
)
from axolotl.integrations.protrain.core.planner.cards import gpu_hardware

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "protrain")]
from plan_jobs import Answer, Plans  # noqa: E402

CARDS = ("RTX 3060 12GB", "RTX 4090", "RTX 5090")
HOST_GIB = (64, 96, 192)
ENOUGH_GIB = 2048
GIB = 2**30
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PUBLISHED = {
    # the classes' own sizes are those of the published bases
    "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    "gpt-oss-120b": GptOssConfig(),
    "GLM-4.5-Air": Glm4MoeConfig(quantization_config=FP8),
    "DeepSeek-V3.1": DeepseekV3Config(quantization_config=FP8),
}
LORA: dict[str, Any] = {
    "adapter": "lora",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "sequence_len": 2048,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 8,
    # Axolotl's kernels do not know these models
    **dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False),
}


def packed(kind: str, rows: int) -> Packed:
    """A weight of `rows` times 2,880 (MXFP4) or 2,048 (FP8) numbers."""
    if kind == "MXFP4":
        blocks = torch.randint(256, (1, rows, 90, 16), dtype=torch.uint8)
        scales = torch.randint(110, 130, (1, rows, 90), dtype=torch.uint8)
        return from_mxfp4(blocks, scales, torch.bfloat16)
    codes = torch.randint(256, (rows, 2048), dtype=torch.uint8)
    factors = torch.rand(rows // 128, 16)
    return from_fp8(codes.view(torch.float8_e4m3fn), factors, torch.bfloat16)


class Block(nn.Module):
    """A block of one frozen weight, as a layout finds it."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.inner = nn.ParameterDict()
        self.inner["weight"] = nn.Parameter(weight, requires_grad=False)


def fetch_of(weight: torch.Tensor, device: Device) -> Callable[[], None]:
    """Return what fetches the weight into a slot and waits for it."""
    model = nn.Module()
    model.layers = nn.ModuleList([Block(weight)])
    (chunk,) = build_layout(model).chunks
    pool = HostPool()
    pool.add([chunk])
    (spec,) = chunk.tensors
    home = pool.tensor(chunk.index, spec)
    pairs = weight.copies_to(home) if isinstance(weight, Packed) else [(home, weight)]
    for target, source in pairs:
        target.copy_(source)
    device.pin(pool.share(chunk))
    transport = Transport(device)
    transport.reserve([chunk])
    slot = Slot(device.allocate(chunk.nbytes), device, transport)
    moves = [] if chunk.stored is None else [*moves_of(chunk)]

    def fetch() -> None:
        slot.fetch(chunk.index, pool.share(chunk), moves)
        device.synchronize()

    return fetch


def seconds(acts: list[Callable[[], None]], rounds: int) -> list[float]:
    """Median of each, in turns."""
    found: list[list[float]] = [[] for _ in acts]
    for _ in range(rounds):
        for act, times in zip(acts, found, strict=True):
            start = time.perf_counter()
            act()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in found]


def planned() -> Iterator[str]:
    """Yield the lines of a table: host memory and seconds per step by free memory."""
    sizes = [*(f"{gib} GiB free" for gib in HOST_GIB), "enough"]
    yield f"| base | card | stays packed | {' | '.join(sizes)} |"
    yield "|---|---|---" + "|---" * len(sizes) + "|"
    with TemporaryDirectory() as folder:
        plans, every = Plans(Path(folder)), (*HOST_GIB, ENOUGH_GIB)
        for (name, config), gib in product(PUBLISHED.items(), every):
            model = config.to_dict()
            is_fp8 = bool(model.pop("quantization_config", None))
            del model["dtype"]
            keys = LORA | {"attn_implementation": "sdpa" if is_fp8 else "eager"}
            cards = [word for card in CARDS for word in ("--gpu", card)]
            asked = [*cards, "--ram", str(gib), "--json"]
            plans.add(f"{name} {gib} no", model, keys, *asked)
            model["quantization_config"] = FP8 if is_fp8 else {"quant_method": "mxfp4"}
            keys["model_quantization_config"] = "FineGrainedFP8Config"
            if not is_fp8:
                keys["model_quantization_config"] = "Mxfp4Config"
            keys["model_quantization_config_kwargs"] = {"dequantize": True}
            plans.add(f"{name} {gib} yes", model, keys, *asked)
        for name, card, way in product(PUBLISHED, range(len(CARDS)), ("yes", "no")):
            told = [_told(plans[f"{name} {gib} {way}"], card) for gib in every]
            yield f"| {name} | {CARDS[card]} | {way} | {' | '.join(told)} |"
        plans.close()


def _told(answer: Answer, number: int) -> str:
    found = answer.json
    found = found[number] if isinstance(found, list) else found
    if found["verdict"] != "fits":
        return found["verdict"].replace("does-not-fit", "no")
    host = found["host_bytes"]["peak"] / GIB
    return f"{host:.0f} GiB, {found['step_s']['total']:.1f} s"


def main() -> None:
    """Print a line for each form, and one for each card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", action="store_true", help="plans of published bases")
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.plans:
        for line in planned():
            print(line, flush=True)
        return
    device = CudaDevice(0) if torch.cuda.is_available() else CpuDevice()
    for kind in ("MXFP4", "FP8"):
        weight = packed(kind, args.rows)
        fetches = [fetch_of(w, device) for w in (weight, weight.unpacked())]
        for fetch in fetches:
            fetch()
        own, plain = seconds(fetches, args.rounds)
        bits = 8 * sum(t.nbytes for part in weight.parts for t in part) / weight.numel()
        print(
            f"{kind}: {bits:.2f} bits a number, {own / plain:.2f} times bf16 here, ",
            end="",
        )
        print(f"{own * 1e3:.2f} and {plain * 1e3:.2f} ms")
        for name in CARDS:
            card = gpu_hardware(name, None, 64 << 30)
            link, bf16 = (n / 8 / card.fetch_bytes_s for n in (bits, 16))
            unpack = MOVED_BYTES[weight.form.encoding] / card.memory_bytes_s
            print(f"  {name}: {max(link, unpack) / bf16:.2f} times bf16", end="")
            print(f" (link {link / bf16:.2f}, unpacking {unpack / bf16:.2f})")


if __name__ == "__main__":
    main()
