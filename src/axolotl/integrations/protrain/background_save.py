"""The checkpoint that is written while training goes on, of which there is one at most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from .core.checkpoint import Snapshot


class BackgroundSave:
    """Starts a checkpoint's snapshot, and calls back once the checkpoint has its name."""

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None
        self._afterwards: list[Callable[[], object]] = []

    @property
    def is_running(self) -> bool:
        """Tell whether a checkpoint is on its way, and may not have its name yet."""
        return self._snapshot is not None

    def start(
        self,
        snapshot: Snapshot,
        checkpoint: Path,
        then: Callable[[], None],
        meant: Sequence[str],
    ) -> None:
        """Write what a snapshot holds, name the checkpoint, and `then` rotate."""
        self._snapshot = snapshot
        snapshot.start(checkpoint, then, meant)

    def call_afterwards(self, act: Callable[[], object]) -> None:
        """Do something on this thread once the checkpoint on its way has its name."""
        self._afterwards.append(act)

    def settle(self, blocks: bool = True) -> None:
        """Return once no checkpoint is being written; or, if not `blocks`, at once.

        Raises:
            CheckpointError: The last one was not written.
        """
        snapshot = self._snapshot
        if snapshot is not None and (blocks or snapshot.over):
            # first: a wait that a signal interrupts is begun again
            snapshot.join()
            self._snapshot = None
            acts, self._afterwards = self._afterwards, []
            snapshot.check()
            for act in acts:
                act()
