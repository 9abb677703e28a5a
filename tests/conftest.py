"""How several processes share the tests."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from typing import Any

import pytest

# read when torch is imported, here and in processes that tests start: the models are so
# small that threads of several processes only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:
    # with this process ends the fork server that all of them share
    os.environ["PROTRAIN_TESTS_OWNER"] = str(os.getpid())
    # nobody's rates and settings, and none left behind
    folder = tempfile.mkdtemp(prefix="protrain-home-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        os.environ[name] = os.path.join(folder, name)
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        os.environ.pop(name, None)

TRAININGS = (
    "test_features.py",
    "test_parity.py",
    "test_compatibility.py",
    "test_kernels.py",
    "test_prediction.py",
    "test_recovery.py",
    "test_several_ranks.py",
    "test_vision.py",
)
"""Files that share their trainings, which run in the background."""
LONG = (
    *TRAININGS,
    "test_saving.py",
    "core/test_ranks.py",
    "test_plan.py",
    "test_qlora.py",
    "test_launching.py",
    "test_blueprint.py",
    "test_bad_input.py",
    "test_selftest.py",
)
"""The longest first, so that nobody waits for one of them at the end."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    turns = {name: turn for turn, name in enumerate(LONG)}

    def turn(item: pytest.Item) -> int:
        found = [turns[n] for n in turns if item.path.as_posix().endswith(f"/{n}")]
        return min(found, default=len(LONG))

    items.sort(key=turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """File by file in the order of collection, and trainings in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "trainings" if file.endswith(TRAININGS) else file

    config.option.loadscopereorder = False
    return ByFile(config, log)
