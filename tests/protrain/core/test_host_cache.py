"""Keys and values on the host: the tokens of a cache on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_models import checked, open_session
from tiny_models import NUM_BLOCKS, random_model
from transformers import GenerationConfig

from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.types import Counters
from axolotl.integrations.protrain.host_cache import HostCache

NEW = 9


def made_by(model: Any, cache: HostCache | None = None) -> list[list[int]]:
    """Tokens of two prompts, one of them padded, sampled."""
    ids = torch.tensor([[0, 0, 7, 9, 31], [5, 6, 7, 8, 9]])
    config = GenerationConfig(
        max_new_tokens=NEW,
        do_sample=True,
        pad_token_id=0,
        eos_token_id=2,
        disable_compile=True,
    )
    torch.manual_seed(3)
    given = {} if cache is None else {"past_key_values": cache}
    mask = (ids > 0).long()
    return model.generate(
        input_ids=ids, attention_mask=mask, generation_config=config, **given
    ).tolist()


@pytest.mark.parametrize(
    "family", ["llama", "llama-tied", "qwen3", "phi3", "gpt2", "mixtral", "deepseek_v3"]
)
def test_tokens_are_those_of_a_cache_on_the_device(family: str) -> None:
    """Only this sees a layer that reads what has not come, or joins it in another order."""
    model = random_model(family).eval()
    wanted = made_by(model)
    session = open_session(model)
    for held in ((), session.plan.paged):
        cache = new_cache(session)
        with session.holding(held), session.watch(), torch.no_grad():
            assert made_by(model, cache) == wanted
        cache.close()
    # each layer has come back once for each token after the first
    assert session.counters.fetched_bytes > 0 < session.counters.offloaded_bytes
    session.close()


def new_cache(session: Session) -> HostCache:
    return HostCache(NUM_BLOCKS, 5 + NEW, session.device, session.counters)


def test_a_few_layers_are_on_the_device() -> None:
    """Only this sees keys and values that stay there after they have left."""
    device = checked()
    before = device.used_bytes()
    rows, heads, width, tokens, layers = 2, 3, 8, 64, 6
    cache = HostCache(layers, tokens, device, Counters())
    each = 2 * rows * heads * width * tokens * 4
    with device.watch(0):
        device.restart_peak()
        for new in (tokens // 2, 1, 1, 1):
            for number in range(layers):
                states = [torch.rand(rows, heads, new, width) for _ in range(2)]
                keys, values = cache.update(states[0], states[1], number)
                assert keys.shape == values.shape
                del keys, values, states
        assert cache.get_seq_length() == tokens // 2 + 3
        assert device.peak_since() < 5 * each
    cache.close()
    assert device.used_bytes() == before
