"""Fixtures for tests that train: `run(job)` gives the result of a training.

Every `Pair`, `Job` and `Cell` in the parameters of the selected tests is known before the
first test starts, so that the workers are never idle while a test waits.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from axolotl_jobs import Job, Result

SELECTED_JOBS = pytest.StashKey["list[Job]"]()


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[SELECTED_JOBS] = [
        job
        for item in session.items
        for value in getattr(getattr(item, "callspec", None), "params", {}).values()
        for job in _jobs_of(value)
    ]


@pytest.fixture(scope="module", autouse=True)
def garbage_is_of_this_file() -> None:
    """Each collection would look through everything that is imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Job], Result]]:
    """Train a job, or wait for it, or look up what it gave."""
    from axolotl_jobs import Workers

    workers = Workers(
        tmp_path_factory.mktemp("trainings"),
        request.config.stash.get(SELECTED_JOBS, []),
    )
    try:
        yield workers.run
    finally:
        workers.close()


def _jobs_of(value: Any) -> tuple[Job, ...]:
    # tests of the core need not wait for what this imports
    known = sys.modules.get("axolotl_jobs")
    if known is None:
        return ()
    if isinstance(value, known.Job):
        return (value,)
    return getattr(value, "jobs", ())
