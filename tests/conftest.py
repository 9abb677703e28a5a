"""How several processes share the tests, and `run(job)`: the result of a training.

Every `Pair`, `Job` and `Cell` in the parameters of the selected tests is known before the
first test starts, so that the workers are never idle while a test waits.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from axolotl_jobs import Job, Result, Workers

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
    *("test_parity.py", "test_prediction.py", "test_recovery.py"),
    *("test_generation.py", "test_served.py"),
)
"""Files that share their trainings, which run in the background."""
LONG = (
    *TRAININGS,
    "test_saving.py",
    "test_chaos.py",
    "test_plan.py",
    "test_ranks.py",
    "test_launching.py",
    "test_meta_model.py",
    "test_bad_input.py",
    "test_selftest.py",
)
"""The longest first, so that nobody waits for one of them at the end."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    sample(items)
    turns = {name: turn for turn, name in enumerate(LONG)}
    items.sort(key=lambda item: turns.get(item.path.name, len(LONG)))


def sample(items: list[pytest.Function]) -> None:
    """Leave all but some cases of a test to the whole set, which are always the same."""
    tests: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("full"):
            tests.setdefault((item.path, item.originalname), []).append(item)
    for cases in tests.values():
        # not every second one, say, which may have one value of an axis only
        cases.sort(key=lambda case: sha256(case.name.encode()).digest())
        for case in cases[cases[0].get_closest_marker("sampled").args[0] :]:
            case.add_marker(pytest.mark.full)


def unit(file: str) -> str:
    """What one process runs: a file, or all files that share their trainings."""
    return "trainings" if file.endswith(TRAININGS) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Units in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid.partition("::")[0])

    config.option.loadscopereorder = False
    return ByUnit(config, log)


@pytest.fixture(scope="module", autouse=True)
def garbage_is_of_this_file() -> None:
    """Each collection would look through everything that is imported."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    # or Triton's bindings complain below the last line
    gc.unfreeze()


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Processes that train."""
    from axolotl_jobs import Workers

    workers = Workers(tmp_path_factory.mktemp("trainings"))
    try:
        yield workers
    finally:
        workers.close()


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, workers: Workers) -> Callable[[Job], Result]:
    """Train a job, or wait for it, or look up what it gave."""
    ours = unit(request.node.path.name)
    for item in request.session.items:
        if unit(item.path.name) == ours:
            params = getattr(getattr(item, "callspec", None), "params", {})
            workers.expect(job for value in params.values() for job in _jobs_of(value))
    return workers.run


def _jobs_of(value: Any) -> tuple[Job, ...]:
    if isinstance(value, sys.modules["axolotl_jobs"].Job):
        return (value,)
    # of a `Pair` or a `Cell`
    return getattr(value, "jobs", ())
