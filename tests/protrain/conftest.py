"""Fixtures for tests that train: `run(job)` gives the result of a training.

Every `Pair`, `Job` and `Cell` in the parameters of the selected tests is known before the
first test starts, so that the workers are never idle while a test waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from axolotl_jobs import Job, Pair, Result, Workers
from matrix import Cell

SELECTED_JOBS = pytest.StashKey[list[Job]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[SELECTED_JOBS] = [
        job
        for item in session.items
        for value in getattr(getattr(item, "callspec", None), "params", {}).values()
        for job in _jobs_of(value)
    ]


@pytest.fixture(scope="session")
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Job], Result]]:
    """Train a job, or wait for it, or look up what it gave."""
    workers = Workers(
        tmp_path_factory.mktemp("trainings"),
        request.config.stash.get(SELECTED_JOBS, []),
    )
    try:
        yield workers.run
    finally:
        workers.close()


def _jobs_of(value: Any) -> tuple[Job, ...]:
    if isinstance(value, Pair):
        return value.paged, value.plain
    if isinstance(value, Cell):
        return value.jobs
    return (value,) if isinstance(value, Job) else ()
