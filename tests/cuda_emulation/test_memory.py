"""Shortages and limits of a card: what a run survives, and what it says."""

from __future__ import annotations

import pytest
from test_emulation import in_process

SESSIONS = "from test_paging import *\n"


@pytest.mark.parametrize("limit", ["60000", "200000"])
def test_what_cannot_be_page_locked_trains_all_the_same(limit: str) -> None:
    code = """
print([equals_plain(PLANS[name]) for name in ("one slot", "some state on the host")])
session = opened(stack(**SIZES), n_buffer=2)
print(session.device.pageable_bytes > 0)
session.close()
"""
    assert (
        in_process(SESSIONS + code, FAKECUDA_PINNED_LIMIT=limit) == "[True, True]\nTrue"
    )


def test_a_shortage_in_mid_step_leaves_the_step_to_be_repeated() -> None:
    """The gradients of the step are forgotten, the plan shrinks, the step runs again."""
    code = """
model = stack(**SIZES)
plain = twin(model).to(CUDA)
session = opened(model, n_buffer=2, resident=(0, 1, 2))
own, reference = session.wrap_optimizer(adamw(model)), adamw(plain)
hog = []
theirs = [train(plain, reference, DATA[:1]) for _ in range(3)]
ours = [train(model, own, DATA[:1], session)]
for nbytes in (1 << 24, 1 << 21, 1 << 18, 1 << 14, 512):
    try:
        while True:
            hog.append(torch.empty(nbytes, dtype=torch.uint8, device=CUDA))
    except torch.OutOfMemoryError:
        pass
try:
    train(model, own, DATA[:1], session)
    print("no shortage")
except torch.OutOfMemoryError:
    pass
hog.clear()
session.forget_gradients()
session.replan(make_plan(session.layout, n_buffer=2, resident=(0,)))
ours += [train(model, own, DATA[:1], session) for _ in range(2)]
session.close()
same = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(model.parameters(), plain.parameters()))
print(ours == theirs, same)
"""
    assert in_process(SESSIONS + code, FAKECUDA_MEMORY=str(64 << 20)) == "True True"


@pytest.mark.parametrize("integrated", [True, False])
def test_a_device_without_memory_of_its_own_is_seen(integrated: bool) -> None:
    """Its free memory is the host's, whatever the driver says, and nothing pages there."""
    code = """
from axolotl.integrations.protrain.cli import doctor
from axolotl.integrations.protrain.core import page
from axolotl.integrations.protrain.core.planner.hardware import device_memory
model = stack(**SIZES)
plain = twin(model).to(CUDA)
hog = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
print(device_memory(CUDA, 5 << 29) >> 29)
lines = doctor.findings(CUDA)
print("shares the host's memory" in [next(lines), next(lines)][1].found)
optimizer, reference = adamw(model), adamw(plain)
theirs = train(plain, reference, DATA[:1])
example, several = DATA[0][0].cpu(), len(DATA[0])
with page(model, optimizer, example=example, budget="1GiB", accumulation=several) as paged:
    print(paged.forecast.hardware.one_memory, any("Both together" in n for n in paged.notes))
    print(paged.forecast.plan.mode, train(model, optimizer, DATA[:1]) == theirs)
"""
    limits = {
        "FAKECUDA_INTEGRATED": str(int(integrated)),
        "FAKECUDA_MEMORY": str(3 << 30),
    }
    seen = f"{5 if integrated else 3}\n{integrated}\n{integrated} {integrated}\nA True"
    assert in_process(SESSIONS + code, **limits) == seen


def test_a_backward_that_fails_leaves_nothing_on_the_device() -> None:
    """Its nodes wait in queues of torch's threads, with all that they have saved."""
    code = """
model = stack(**SIZES)
session = opened(model, n_buffer=2, recompute=(1, 3), swap=(0,))
optimizer = session.wrap_optimizer(adamw(model))
train(model, optimizer, DATA[:3], session)
session.forget_gradients()
torch.cuda.synchronize()
before, left = torch.cuda.memory_allocated(), []
for block in (0, 2, 3, 5):
    layer = model.layers[block]
    layer.raise_in_backward = RuntimeError("here")
    try:
        train(model, optimizer, DATA[3:], session)
    except RuntimeError:
        pass
    layer.raise_in_backward = None
    session.forget_gradients()
    torch.cuda.synchronize()
    left.append(torch.cuda.memory_allocated() - before)
session.close()
print(left)
"""
    assert in_process(SESSIONS + code) == "[0, 0, 0, 0]"


def test_what_is_on_the_device_comes_home_in_pieces() -> None:
    """Empty, of one element, in another order, and larger than a piece."""
    code = """
from checked_device import CheckedDevice
model = stack(**SIZES)
sizes = {"empty": (0,), "one": (), "wide": (34_000_001,), "ordered": (6, 4)}
for name, size in sizes.items():
    model.register_parameter(name, nn.Parameter(torch.randn(size), requires_grad=False))
model.ordered.data = model.ordered.data.t()
before = {name: value.clone() for name, value in model.state_dict().items()}
layout = build_layout(model)
plan = make_plan(layout, resident=(0, 1, 2))
session = Session(model, layout, plan, CheckedDevice(devices.CudaDevice(0)))
model(DATA[0][0])
session.close()
print(all(
    torch.equal(value, before[name])
    and value.stride() == before[name].stride()
    and not value.is_pinned()
    for name, value in model.state_dict().items()
))
"""
    assert in_process(SESSIONS + code) == "True"
