"""Real architectures whose blocks are not one chain: two stacks, towers not in use.

Models of transformers themselves in a plain loop, paged and plain, for what Axolotl
cannot train on a CPU. Every session is on a checked device.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from core_models import ALL, adamw, assert_same, checked, open_session, stack
from tiny_models import IMAGE_SIDE, IMAGE_TOKEN, random_model
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.errors import LayoutError
from axolotl.integrations.protrain.core.layout import build_layout, find_blocks
from axolotl.integrations.protrain.core.planner.plans import make_plan

Batch = dict[str, Tensor]


def text(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 250, (2, 14), generator=generator)
    return {"input_ids": ids, "labels": ids}


def pictured(seed: int = 0, rows: int = 2) -> Batch:
    """Rows that begin with an image of two by four patches, which is two tokens."""
    batch = text(seed)
    batch["input_ids"] = batch["input_ids"][:rows].clone()
    batch["input_ids"][:, 0] = IMAGE_TOKEN - 2
    batch["input_ids"][:, 1:3] = IMAGE_TOKEN
    batch["labels"] = batch["input_ids"].clone()
    generator = torch.Generator().manual_seed(seed)
    side = IMAGE_SIDE // 2
    patches = torch.randn(rows * 8, 3 * 2 * side * side, generator=generator)
    grid = torch.tensor([[1, 2, 4]] * rows)
    kinds = (batch["input_ids"] == IMAGE_TOKEN).int()
    return batch | {
        "pixel_values": patches,
        "image_grid_thw": grid,
        "mm_token_type_ids": kinds,
    }


def session_of(model: nn.Module, n_buffer: int, n_checkpoint: int) -> Session:
    layout = build_layout(model)
    plan = make_plan(layout, 0, n_buffer, 0, n_checkpoint, False)
    return Session(model, layout, plan, checked())


def losses(
    model: nn.Module,
    steps: Sequence[Sequence[Batch]],
    session: Session | None,
    use_cache: bool,
) -> list[float]:
    optimizer: Any = adamw(model)
    if session is not None:
        optimizer = session.wrap_optimizer(optimizer)
    torch.manual_seed(1)
    found = []
    model.train()
    for micro_batches in steps:
        for batch in micro_batches:
            loss = model(**batch, use_cache=use_cache).loss
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        model.zero_grad()
    return found


def assert_paged_is_plain(
    model: nn.Module,
    steps: Sequence[Sequence[Batch]],
    n_buffer: int = 2,
    n_checkpoint: int = 0,
    use_cache: bool = False,
) -> Session:
    plain = copy.deepcopy(model)
    session = session_of(model, n_buffer, n_checkpoint)
    ours = losses(model, steps, session, use_cache)
    assert ours == losses(plain, steps, None, use_cache)
    session.close()
    assert_same(model.state_dict(), plain.state_dict())
    return session


PLANS = [(1, 0), (2, 0), (2, 3), (3, 100)]


@pytest.mark.parametrize(("n_buffer", "n_checkpoint"), PLANS)
@pytest.mark.parametrize("family", ["t5-seq2seq", "bart-seq2seq"])
def test_encoder_and_decoder(family: str, n_buffer: int, n_checkpoint: int) -> None:
    """Every block of the decoder reads what the last one of the encoder made."""
    model = random_model(family)
    names = [name for name, _ in find_blocks(model)]
    assert {"encoder" in name for name in names} == {True, False}
    steps = [[text(0), text(1)], [text(2)]]
    assert_paged_is_plain(model, steps, n_buffer, min(n_checkpoint, len(names)))


@pytest.mark.parametrize(("n_buffer", "n_checkpoint"), PLANS)
def test_a_tower_that_some_micro_batches_use(n_buffer: int, n_checkpoint: int) -> None:
    model = random_model("qwen2_5_vl-vision")
    names = [name for name, _ in find_blocks(model)]
    assert {"visual" in name for name in names} == {True, False}
    steps = [
        [text(0), pictured(1)],
        [pictured(2), text(3)],
        [text(4), text(5)],
        [pictured(6, rows=1)],
    ]
    assert_paged_is_plain(model, steps, n_buffer, min(n_checkpoint, len(names)))


def test_a_tower_without_images_is_not_fetched() -> None:
    model = random_model("qwen2_5_vl-vision")
    names = [name for name, _ in find_blocks(model)]
    num_words = sum("visual" not in name for name in names)
    # one slot, so that nothing is fetched ahead; it holds what the second step begins with
    session = assert_paged_is_plain(model, [[text(0)], [text(1)]], n_buffer=1)
    # the last updates bring their chunks once more
    fetched = 2 * (2 * num_words - 1) - 1 + (num_words - 1)
    assert session.measured().num_fetches == fetched


def test_a_frozen_tower_takes_part() -> None:
    """`freeze_mm_modules`: its weights are fetched and no gradient comes back."""
    model = random_model("qwen2_5_vl-vision")
    model.model.visual.requires_grad_(False)
    assert_paged_is_plain(model, [[pictured(0), text(1)], [pictured(2)]], 2, 3)


@pytest.mark.parametrize("family", ["t5-seq2seq", "bart-seq2seq", "llama"])
def test_a_cache_is_not_for_blocks_that_recompute(family: str) -> None:
    """Models make one although they have labels; a recomputation would find it filled."""
    model = random_model(family)
    names = find_blocks(model)
    steps = [[text(0), text(1)], [text(2)]]
    assert_paged_is_plain(model, steps, 2, len(names), use_cache=True)


@pytest.mark.parametrize("n_checkpoint", [0, 2])
def test_a_cache_is_used_outside_of_training(n_checkpoint: int) -> None:
    model = random_model("t5-seq2seq").eval()
    wanted = model(**text(), use_cache=True).loss
    session = session_of(model, 2, n_checkpoint)
    assert torch.equal(model(**text(), use_cache=True).loss, wanted)
    session.close()


class Attributes(nn.Module):
    """Layers that are no list."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = stack().layers[:2]


class Heads(nn.Module):
    """A list of bare leaves, which somebody may read and never call."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


@pytest.mark.parametrize("build", [Attributes, Heads])
def test_a_model_without_lists_of_layers_is_refused(build: type[nn.Module]) -> None:
    with pytest.raises(LayoutError, match=f"{build.__name__} has no recognisable") as e:
        build_layout(build())
    assert "protrain_auto_memory: false" in str(e.value)


def test_a_weight_of_two_blocks_stays_on_the_device() -> None:
    """It is in nobody's chunk, so it need not travel in two of them."""
    model = stack()
    model.layers[2].up.weight = model.layers[1].up.weight
    layout = build_layout(model)
    names = {spec.name for chunk in layout.chunks for spec in chunk.tensors}
    assert "layers.2.up.weight" not in names
    plain = copy.deepcopy(model)
    session = open_session(model, recompute=ALL)
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(model(tokens), plain(tokens))
    session.close()
