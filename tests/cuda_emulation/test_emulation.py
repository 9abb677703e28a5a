"""Plain torch on the fake device: numbers, streams, memory.

Run with the device's environment, under random delays for example (see README.md).
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

CUDA = torch.device("cuda", 0)


def in_process(code: str, **env: str) -> str:
    """What a program prints in a process of its own with these settings."""
    done = subprocess.run(
        [sys.executable, "-c", "import torch\n" + code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: x.to(torch.bfloat16).float() * 3,
        lambda x: x.t() @ x,
        lambda x: x.t().contiguous(),
        lambda x: torch.softmax(x, -1),
        lambda x: x[x > 0],
        lambda x: x.sum(0).sqrt_(),
        lambda x: torch.cat([x, x[:3]], 0),
        lambda x: x.sort(0)[0],
        lambda x: nn.functional.layer_norm(x, x.shape[-1:]),
        lambda x: nn.functional.scaled_dot_product_attention(
            x.view(1, 2, 8, 16), x.view(1, 2, 8, 16), x.view(1, 2, 8, 16)
        ),
        lambda x: nn.functional.conv1d(x.view(2, 8, 16), x.view(8, 8, 4)[:, :, :3]),
        lambda x: torch.where(x > 0, x, x.new_zeros(())),
        lambda x: nn.functional.embedding(torch.arange(4, device=x.device), x),
    ],
)
def test_an_operator_gives_what_it_gives_on_the_cpu(function) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 16).abs() + 0.1
    ours = function(x.cuda())
    assert ours.device == CUDA
    assert torch.equal(ours.cpu(), function(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_equals_the_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)
    ).to(dtype)
    other = copy.deepcopy(model).cuda()

    def train(own: nn.Module, device: str) -> list[tuple[float, float]]:
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2, fused=True)
        numbers = []
        for _ in range(5):
            x = torch.randn(8, 16, dtype=dtype).to(device)
            y = torch.randint(0, 4, (8,)).to(device)
            loss = nn.functional.cross_entropy(own(x).float(), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(own.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            numbers.append((loss.item(), norm.item()))
        return numbers

    assert train(model, "cpu") == train(other, "cuda")
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b.cpu())


def test_autocast_and_the_random_state() -> None:
    layer = nn.Linear(8, 8).cuda()
    x = torch.randn(4, 8, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    torch.cuda.manual_seed(3)
    first = nn.functional.dropout(x, 0.5)
    state = torch.cuda.get_rng_state()
    second = nn.functional.dropout(x, 0.5)
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(nn.functional.dropout(x, 0.5), second)
    assert abs(torch.randn(10000, device="cuda").std().item() - 1) < 0.05


COPY = """
host = torch.ones(1 << 20).pin_memory()
target = torch.zeros(1 << 20, device="cuda")
torch.cuda.synchronize()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    target.copy_(host, non_blocking=True)
    event = side.record_event()
if {wait}:
    torch.cuda.current_stream().wait_event(event)
total = target.sum()
assert not event.query()  # neither the copy nor the sum has been waited for
torch.cuda.current_stream().synchronize()
print(total.item() == 1 << 20)
"""


@pytest.mark.parametrize("wait", [True, False])
def test_a_missing_wait_is_wrong_data(wait: bool) -> None:
    assert in_process(COPY.format(wait=wait), FAKECUDA_COPY_US="200000") == str(wait)


OVERWRITE = """
work = torch.ones(1 << 20, device="cuda")
zeros = torch.zeros(1 << 20).pin_memory()
torch.cuda.synchronize()
total = sum(work.sum() for _ in range(20))
done = torch.cuda.current_stream().record_event()
side = torch.cuda.Stream()
if {wait}:
    side.wait_event(done)
with torch.cuda.stream(side):
    work.copy_(zeros, non_blocking=True)
print(total.item() == 20 << 20)
"""


@pytest.mark.parametrize("wait", [True, False])
def test_compute_is_asynchronous_too(wait: bool) -> None:
    """A copy that does not wait for kernels changes what they read."""
    assert in_process(
        OVERWRITE.format(wait=wait), FAKECUDA_RANDOM_WORK_US="20000"
    ) == str(wait)


REUSE = """
host = torch.empty(1 << 20).pin_memory()
gradient = torch.ones(1 << 20, device="cuda")
torch.cuda.synchronize()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    host.copy_(gradient, non_blocking=True)
if {hold}:
    gradient.record_stream(side)
address = gradient.data_ptr()
del gradient
other = torch.zeros(1 << 20, device="cuda")
assert (other.data_ptr() == address) is not {hold}
torch.cuda.synchronize()
print(bool((host == 1).all()))
"""


@pytest.mark.parametrize("hold", [True, False])
def test_memory_that_is_reused_too_soon_is_wrong_data(hold: bool) -> None:
    """The caching allocator is torch's own."""
    assert in_process(REUSE.format(hold=hold), FAKECUDA_COPY_US="200000") == str(hold)


MEMORY = """
MiB = 1 << 20
assert torch.cuda.mem_get_info() == (64 * MiB, 64 * MiB)
x = torch.empty(30 * MiB, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_allocated() == 30 * MiB
assert torch.cuda.mem_get_info()[0] == 34 * MiB
try:
    torch.empty(40 * MiB, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    assert "40.00 MiB" in str(error), error
else:
    raise AssertionError
del x
torch.empty(40 * MiB, dtype=torch.uint8, device="cuda")
assert torch.cuda.max_memory_allocated() == 40 * MiB
assert torch.cuda.memory_allocated() == 0
torch.cuda.empty_cache()
assert torch.cuda.mem_get_info()[0] == 64 * MiB
print("fine")
"""


def test_memory_is_counted_and_ends() -> None:
    assert in_process(MEMORY, FAKECUDA_MEMORY=str(64 << 20)) == "fine"


def test_page_locking() -> None:
    runtime = torch.cuda.cudart()
    host = torch.empty(1 << 20, dtype=torch.uint8)
    assert int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)) == 0
    assert host.is_pinned()
    assert int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)) == 712
    assert int(runtime.cudaHostUnregister(host.data_ptr())) == 0
    assert int(runtime.cudaHostUnregister(host.data_ptr())) == 713
    assert not host.is_pinned()
    # the runtime keeps an error until somebody asks: the next operator gets it, once
    with pytest.raises(torch.AcceleratorError, match="registered"):
        torch.ones(4, device="cuda")
    torch.ones(4, device="cuda")


def test_events_measure_time() -> None:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    before.record()
    total: Tensor = torch.ones(1 << 20, device="cuda").sum()
    after.record()
    assert total.item() == 1 << 20
    after.synchronize()
    assert before.elapsed_time(after) > 0
