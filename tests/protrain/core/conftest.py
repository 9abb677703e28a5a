"""Hypothesis settings, and one test's failure kept from the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo  # by the first optimizer, otherwise in some test
from hypothesis import HealthCheck, settings

# a busy machine is no reason for a property to fail
settings.register_profile(
    "core", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("core")


@pytest.fixture(autouse=True)
def no_hooks_left_for_the_next_test() -> Iterator[None]:
    """A test that fails half-way through a checkpointed forward fails alone."""
    yield
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
