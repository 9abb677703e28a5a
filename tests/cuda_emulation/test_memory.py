"""Shortages and limits of a card: what a run survives, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def outcome(code: str, **env: str) -> str:
    """What a program prints in a process of its own with these settings of the device."""
    done = subprocess.run(
        [sys.executable, "-c", "import torch\nfrom test_paging import *\n" + code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("limit", ["60000", "200000"])
def test_what_cannot_be_page_locked_trains_all_the_same(limit: str) -> None:
    code = """
print([equals_plain(PLANS[name]) for name in ("one slot", "some state on the host")])
session = opened(stack(**SIZES), n_buffer=2)
print(session.device.pageable_bytes > 0)
session.close()
"""
    assert outcome(code, FAKECUDA_PINNED_LIMIT=limit) == "[True, True]\nTrue"


def test_a_shortage_in_mid_step_leaves_the_step_to_be_repeated() -> None:
    """The gradients of the step are forgotten, the plan shrinks, the step runs again."""
    code = """
model = stack(**SIZES)
plain = twin(model).to(CUDA)
session = opened(model, n_buffer=2, resident=(0, 1, 2))
own, reference = session.wrap_optimizer(adamw(model)), adamw(plain)
hog = []
def step(of, optimizer):
    losses = []
    for tokens in DATA[0]:
        loss = of(tokens.to(CUDA)) / 2
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses
theirs = [step(plain, reference) for _ in range(3)]
ours = [step(model, own)]
for nbytes in (1 << 24, 1 << 21, 1 << 18, 1 << 14, 512):
    try:
        while True:
            hog.append(torch.empty(nbytes, dtype=torch.uint8, device=CUDA))
    except torch.OutOfMemoryError:
        pass
try:
    step(model, own)
    print("no shortage")
except torch.OutOfMemoryError:
    pass
hog.clear()
session.forget_gradients()
session.replan(make_plan(session.layout, n_buffer=2, resident=(0,)))
ours += [step(model, own) for _ in range(2)]
session.close()
same = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(model.parameters(), plain.parameters()))
print(ours == theirs, same)
"""
    assert outcome(code, FAKECUDA_MEMORY=str(64 << 20)) == "True True"
