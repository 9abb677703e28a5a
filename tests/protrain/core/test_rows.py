"""Frozen embeddings that the host looks up: the plain run's numbers without their weight."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checked_device import CheckedDevice
from core_models import (
    ALL,
    CPU,
    VOCAB,
    Stack,
    adamw,
    assert_same,
    batches,
    freeze,
    open_session,
    stack,
    train,
    twin,
    weights,
)
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.device import CpuDevice
from axolotl.integrations.protrain.core.layout import build_layout, find_blocks
from axolotl.integrations.protrain.core.planner.memory import MemoryModel
from axolotl.integrations.protrain.core.planner.meta import meta_copy
from axolotl.integrations.protrain.core.planner.search import Search
from axolotl.integrations.protrain.core.planner.seconds import block_times
from axolotl.integrations.protrain.core.planner.trace import trace_step
from axolotl.integrations.protrain.core.types import Budget, Placement, Workload

WIDTH = 32
NAME = "embed.weight"
ROWS = {NAME: 12 * WIDTH * 4}
DATA = [[batches(2, seed, length=6 + seed)[n] for n in range(2)] for seed in range(3)]


def built(embedding: type[nn.Embedding] = nn.Embedding, **sizes: Any) -> Stack:
    model = stack(width=WIDTH, **sizes)
    weight = model.embed.weight
    model.embed = embedding(VOCAB, WIDTH, padding_idx=VOCAB - 1, _weight=weight.data)
    return model


def test_the_weight_takes_no_room_on_the_device() -> None:
    used = []
    for rows in ({}, ROWS):
        model = built()
        with closing(open_session(model, freeze(model, ["extra"]), rows=rows)) as open_:
            used.append(open_.device.used_bytes())
            weight = model.embed.weight
            assert (weight.shape, weight.dtype) == ((VOCAB, WIDTH), torch.float32)
            # whoever reads it gets no plausible numbers
            assert torch.isnan(weight).all() == bool(rows)
    assert used[0] - used[1] == VOCAB * WIDTH * 4 - 4


def test_an_interrupted_look_up_leaves_nothing_behind() -> None:
    model = built()
    keep = freeze(model, ["extra"])
    plain = twin(model)
    with closing(open_session(model, keep, rows=ROWS)):

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        handle = model.embed.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(DATA[0][0])
        handle.remove()
        assert model(DATA[0][0]) == plain(DATA[0][0])
        # a look-up in another weight is its own
        table = torch.rand(VOCAB, 2)
        assert torch.equal(F.embedding(DATA[0][0], table), table[DATA[0][0]])


def test_another_plan_in_the_middle_of_training() -> None:
    model = built()
    keep = freeze(model, ["extra"])
    plain = twin(model)
    session = open_session(model, keep, rows=ROWS, resident=ALL)
    with closing(session):
        away = session.plan
        at = away.placements.index(Placement.HOST_LOOKUP)
        there = list(away.placements)
        there[at] = Placement.RESIDENT
    # begins with the weight on the device
    model = twin(plain)
    session = open_session(model, keep, rows={}, resident=ALL)
    session.close()
    layout = build_layout(model, keep, rows=ROWS)
    from axolotl.integrations.protrain.core.engine.session import Session

    first = replace(away, placements=tuple(there))
    with closing(Session(model, layout, first, CheckedDevice(CpuDevice()))) as session:
        optimizers = session.wrap_optimizer(adamw(model)), adamw(plain)
        ours = train(model, optimizers[0], DATA[:1], session)
        session.replan(away)
        ours += train(model, optimizers[0], DATA[1:], session)
        assert torch.isnan(model.embed.weight).all()
        assert ours == train(plain, optimizers[1], DATA)
    assert_same(weights(model), weights(plain))


# which embeddings those are


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__(tie=True)


class Functional(Stack):
    def forward(self, tokens: Tensor) -> Tensor:
        # without a call of the module
        return super().forward(tokens) + F.embedding(tokens, self.embed.weight).sum()


class ReadBeside(Stack):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.embed.weight.detach().norm()


class Twice(Stack):
    """Another module looks up in the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Embedding(VOCAB, 16, _weight=self.embed.weight)
        self.again.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.again(tokens).sum()


class Bounded(Stack):
    """The look-up writes the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.max_norm = 1.0


@pytest.mark.parametrize(
    "kind, found",
    [
        (Stack, {NAME: 24 * 16 * 4}),
        (Tied, {}),
        (Functional, {}),
        (ReadBeside, {}),
        (Twice, {}),
        (Bounded, {}),
    ],
)
def test_only_what_is_looked_up_alone(kind: type[Stack], found: Any) -> None:
    model = kind()
    freeze(model, ["extra"])
    assert traced(model).rows == found
    freeze(model, ["embed"])
    assert traced(model).rows == {}


def test_what_a_micro_batch_takes_most_of_stays() -> None:
    model = Stack()
    freeze(model, ["extra"])
    layout = build_layout(model, rows={NAME: model.embed.weight.nbytes})
    assert all(chunk.pageable or chunk.trainable for chunk in layout.chunks)


def traced(model: nn.Module) -> Any:
    copied = meta_copy(model)
    tokens = batches(1)[0].to("meta")
    return trace_step(copied, find_blocks(copied), lambda: copied(tokens))


# what decides


def test_a_plan_has_it_on_the_device_where_there_is_room() -> None:
    model = built()
    keep = freeze(model, ["extra"])
    step = traced(model)
    layout = build_layout(model, keep, step.trace.blocks, rows=step.rows)
    card = replace(CPU, adam_bytes_s=1e9, fetch_bytes_s=1e9, offload_bytes_s=1e9)
    memory = MemoryModel(layout, step.trace, Workload(), card)
    times = block_times(step.trace, layout, card)
    roomy = Search(memory, times, Budget(1 << 30, 0, 1 << 30))
    fastest = roomy.fastest()
    assert fastest.mode == "A"
    peak = memory.device(fastest).peak_bytes
    # one element stands for all
    saved = (VOCAB * WIDTH - 1) * 4
    tight = Search(memory, times, Budget(peak - saved, 0, 1 << 30)).fastest()
    assert tight.away == (layout.chunks[-1].index,)
    assert memory.device(tight).peak_bytes == peak - saved
    assert memory.host(tight).states.rows == step.rows[NAME]
    slower = roomy.simulate(tight).total_s - roomy.simulate(fastest).total_s
    rows = step.rows[NAME]
    assert slower == pytest.approx(rows / 1e9 + 2 * rows / 7e9, rel=1e-4)
