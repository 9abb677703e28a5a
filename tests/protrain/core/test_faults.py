"""What is left after an error in a pass: a session that goes on or closes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from checked_device import CheckedDevice
from core_models import (
    ALL,
    HOST_STATE,
    adamw,
    assert_same,
    batches,
    before_updates,
    freeze,
    hook_counts,
    open_session,
    stack,
    train,
    twin,
    weights,
    wrapped,
)
from torch import nn
from torch.utils import _python_dispatch

from axolotl.integrations.protrain.core.engine.device import CpuDevice
from axolotl.integrations.protrain.core.types import Update


@contextmanager
def fault(layer: nn.Module, where: str, error: BaseException) -> Iterator[None]:
    """`layer` raises once, in its forward or backward."""
    setattr(layer, f"raise_in_{where}", error)
    with pytest.raises(type(error), match="on purpose"):
        yield
    setattr(layer, f"raise_in_{where}", None)


FAULTS = [RuntimeError("on purpose"), KeyboardInterrupt("on purpose")]


@pytest.mark.parametrize("recompute", [(), ALL], ids=["keep", "recompute"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "full"])
def test_training_goes_on_after_a_fault(
    frozen: bool, where: str, recompute: Any
) -> None:
    """A batch that failed is dropped in both runs; what follows is equal."""
    model = stack()
    keep = freeze(model, ["extra", "embed"]) if frozen else ()
    plain = twin(model)
    session = open_session(model, keep, recompute=recompute)
    first, bad, second = batches(3)
    numbers = []
    for own, optimizer, run in (
        (plain, adamw(plain), None),
        (model, wrapped(session), session),
    ):
        losses = train(own, optimizer, [[first]], run)
        with fault(own.layers[3], where, FAULTS[0]):
            own(bad).backward()
        optimizer.zero_grad()
        numbers.append(losses + train(own, optimizer, [[second], [first]], run))
    assert numbers[0] == numbers[1]
    assert_same(model.state_dict(), plain.state_dict())
    session.close()


@pytest.mark.parametrize("recompute", [(), ALL], ids=["keep", "recompute"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", FAULTS, ids=lambda e: type(e).__name__)
def test_a_session_closes_after_a_fault(
    error: BaseException, where: str, recompute: Any
) -> None:
    """Weights are those before the fault; torch and the model are left as found."""
    model = stack()
    hooks, threads = hook_counts(model), set(threading.enumerate())
    session = open_session(model, recompute=recompute, outside=HOST_STATE)
    optimizer = wrapped(session)
    train(model, optimizer, [batches(1)], session)
    before = weights(model)
    with fault(model.layers[3], where, error):
        model(batches(1)[0]).backward()
    session.close()
    assert_same(model.state_dict(), before)
    assert hook_counts(model) == hooks
    assert set(threading.enumerate()) <= threads
    # what autograd saves goes where it always goes
    other = stack(seed=7)
    train(other, adamw(other), [batches(1)])
    model.layers[3].raise_in_backward = None
    train(model, adamw(model), [batches(1)])


def test_a_watch_ends_after_an_interrupt_between_two_modes() -> None:
    """It arrives where torch has put its modes aside for a moment, and loses them."""
    device = CheckedDevice(CpuDevice())
    buffer = device.allocate(8)
    lost = patch.object(_python_dispatch, "_push_mode", side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), device.watch(0), lost:
        device.compute.fill(buffer, 0)
    assert not _python_dispatch._get_current_dispatch_mode_stack()


def failing() -> None:
    raise RuntimeError("no update")


def test_a_failed_update_ends_training() -> None:
    model = stack()
    session = open_session(model, update=Update.HOST)
    optimizer = wrapped(session)
    with before_updates(failing):
        model(batches(1)[0]).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="no update"):
            model(batches(1)[0])
        # there is one more for each of the other chunks
        with pytest.raises(RuntimeError, match="no update"):
            session.close()


def test_close_cleans_up_after_a_failed_update() -> None:
    """It raises what the update raised, with everything undone all the same."""
    model = stack()
    hooks, threads = hook_counts(model), set(threading.enumerate())
    before = weights(model)
    session = open_session(model, outside=HOST_STATE, update=Update.HOST)
    with before_updates(failing):
        model(batches(1)[0]).backward()
        # a step waits for weights outside of blocks, and for no others
        with pytest.raises(RuntimeError, match="no update"):
            wrapped(session).step()
        with pytest.raises(RuntimeError, match="no update"):
            session.close()
    assert session.closed
    assert hook_counts(model) == hooks
    assert set(threading.enumerate()) <= threads
    assert_same(model.state_dict(), before)


def test_close_keeps_updates_queued_behind_one_that_failed() -> None:
    """Only this sees host memory that is given back before the last of them has ended."""
    model = stack()
    plain = twin(model)
    session = open_session(model, update=Update.HOST)
    optimizer = wrapped(session)
    (tokens,) = batches(1)
    errors = iter([RuntimeError("no update")])

    def fail_once() -> None:
        for error in errors:
            raise error

    with before_updates(fail_once):
        model(tokens).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="no update"):
            session.close()
    train(plain, adamw(plain), [[tokens]])
    after = weights(plain)
    unlike = {n for n, own in weights(model).items() if not own.equal(after[n])}
    assert unlike == {f"layers.0.{n}" for n, _ in plain.layers[0].named_parameters()}
