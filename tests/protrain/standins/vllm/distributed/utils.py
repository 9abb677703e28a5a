"""A group of processes that only know where to meet."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import TCPStore


@dataclass
class StatelessProcessGroup:
    """Ranks that meet at a store, which carries what they send, too."""

    rank: int
    world_size: int
    store: TCPStore
    counts: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def create(
        host: str, port: int, rank: int, world_size: int
    ) -> StatelessProcessGroup:
        """Rank 0 has the store."""
        store = TCPStore(
            "127.0.0.1" if host == "0.0.0.0" else host,
            port,
            is_master=rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
        )
        return StatelessProcessGroup(rank, world_size, store)

    def key(self, kind: str) -> str:
        """The next of its kind, which each rank counts for itself."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return f"{kind}-{self.counts[kind]}"

    def barrier(self) -> None:
        """Wait for all ranks."""
        key = self.key("barrier")
        if self.store.add(key, 1) == self.world_size:
            self.store.set(f"{key}-done", "1")
        self.store.wait([f"{key}-done"])
