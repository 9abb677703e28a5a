"""`generate` of transformers under paging: the tokens of the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_models import open_session
from odd_models import DOUBLE, quantise
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, random_model
from torch import nn

from axolotl.integrations.protrain.core.layout import build_layout, find_blocks

GENERATING = (
    *FAMILIES,
    *("deepseek_v3", "gpt_oss", "qwen3_next", "falcon_h1", "mamba2", "lfm2"),
)
HELD: dict[str, tuple[dict[str, Any], float]] = {
    "resident": ({"resident": range(99)}, 0.0),
    "paged": ({"n_buffer": 2}, 0.0),
    "mixed": ({"resident": (1,), "n_buffer": 2}, 0.0),
    "half held": ({"n_buffer": 2}, 0.5),
    "all held": ({"n_buffer": 2}, 1.0),
}
"""Plans, and which part of what they page is held."""


def made_by(model: Any) -> list[list[list[int]]]:
    """Tokens of two prompts, one of them padded: greedy ones and sampled ones."""
    ids = torch.tensor([[0, 0, 7, 9, 31], [5, 6, 7, 8, 9]])
    found = []
    for how in ({"do_sample": False}, {"do_sample": True, "top_k": 9}):
        torch.manual_seed(3)
        made = model.generate(
            input_ids=ids,
            attention_mask=(ids > 0).long(),
            max_new_tokens=6,
            pad_token_id=0,
            disable_compile=True,
            **how,
        )
        found.append(made.tolist())
    return found


def plainly_made_by(model: Any) -> list[list[list[int]]]:
    """The tokens of the model before it is paged; skip where it makes none here."""
    try:
        return made_by(model)
    except (RuntimeError, ValueError) as error:
        # of Triton, where flash-linear-attention can be imported; else torch does it
        if not any(words in str(error) for words in ("active drivers", "cpu tensor")):
            raise
        pytest.skip("plain generation fails too: flash-linear-attention asks for a GPU")


def in_four_bits(model: Any) -> None:
    """Quantise the linear layers of all blocks, as a loader does."""
    for _, block in find_blocks(model):
        for name, layer in list(block.named_modules()):
            if type(layer) is nn.Linear:
                packed = quantise(layer, **DOUBLE)
                # its kernels for a CPU with AVX512-BF16 take no layers as small as these
                packed.support_avx512bf16_for_cpu = False
                block.set_submodule(name, packed)
    model.is_loaded_in_4bit = True


@pytest.mark.parametrize(
    "family, adapter",
    [
        pytest.param(family, adapter, id=f"{family}-{adapter or 'full'}")
        for family in GENERATING
        for adapter in ("", "LoRA", "QLoRA")
        # PEFT refuses their projections
        if not (adapter and family in ("falcon_h1", "mamba2"))
    ],
)
@pytest.mark.sampled(10)
def test_tokens_are_those_of_plain(family: str, adapter: str) -> None:
    """Only this sees a family whose cache or state is made by a block that is not there."""
    model: Any = random_model(family).eval()
    if adapter == "QLoRA":
        in_four_bits(model)
    if adapter:
        torch.manual_seed(5)
        layers = LoraConfig(target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, layers).eval()
    wanted = plainly_made_by(model)
    keep = [name for name, _ in model.named_parameters() if "lora_" in name]
    for name, (plan, share) in HELD.items():
        most = len(build_layout(model, keep).pageable)
        places = [n for n in plan.get("resident", ()) if n < most]
        session = open_session(model, keep, **{**plan, "resident": places})
        paged = session.plan.paged
        with session.watch(), session.holding(paged[: round(share * len(paged))]):
            assert made_by(model) == wanted, name
        session.close()
