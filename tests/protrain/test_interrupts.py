"""Signals that come in a step are taken at its end."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest

from axolotl.integrations.protrain.interrupts import SIGNALS, DeferredSignals

LOG = logging.getLogger(__name__)


@pytest.fixture
def taken() -> Iterator[list[int]]:
    """The signals that the handlers of others have taken."""
    found: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, lambda number, _frame: found.append(number))
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_waits_for_the_end_of_its_step(number: int, taken: list[int]) -> None:
    signals = DeferredSignals(LOG)
    with signals.installed():
        send(number)
        assert taken == [number]
        signals.hold()
        send(number)
        assert taken == [number]
        signals.release()
        assert taken == [number, number]
        signals.hold()
        signals.release()
    assert taken == [number, number]


def test_a_second_signal_is_taken_at_once(taken: list[int]) -> None:
    signals = DeferredSignals(LOG)
    with signals.installed():
        signals.hold()
        send(signal.SIGINT)
        send(signal.SIGTERM)
        assert taken == [signal.SIGTERM]
        signals.release()
    assert taken == [signal.SIGTERM]


def test_a_step_that_fails_loses_no_signal(taken: list[int]) -> None:
    signals = DeferredSignals(LOG)
    with pytest.raises(KeyError), signals.installed():
        signals.hold()
        send(signal.SIGINT)
        raise KeyError
    assert taken == [signal.SIGINT]
    send(signal.SIGTERM)
    assert taken == [signal.SIGINT, signal.SIGTERM]
