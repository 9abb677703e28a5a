"""How several processes share the tests."""

from __future__ import annotations

import os
from typing import Any

import pytest

# read when torch is imported, here and in processes that tests start: the models are so
# small that threads of several processes only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:
    # with this process ends the fork server that all of them share
    os.environ["PROTRAIN_TESTS_OWNER"] = str(os.getpid())

ALONE = ("test_plan.py", "test_selftest.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files that own what they start one by one; all others in one process, which owns
    the trainings that they share."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            alone = "/core/" in file or file.endswith(ALONE)
            return file if alone else "with axolotl"

    return ByFile(config, log)
