"""Who trains together, and all that processes say to each other.

Everything is carried by torch.distributed. Device collectives run on a group of the
node's ranks and on one across nodes, apart from the group that DDP uses; what the host
has to say goes over gloo. Each group sees the same calls in the same order on all ranks.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError, ProTrainError
from ..types import Counters, World

Result = TypeVar("Result")


class Ranks:
    """The process groups of one run.

    Args:
        device_type: `cpu` or `cuda`: whose memory the device collectives work on.

    Attributes:
        world: How many train together.
        rank: Of this process among all.
        local_rank: The same on its node.
        counters: Where collectives are counted.

    Raises:
        ConfigError: Nodes with different numbers of processes.
    """

    def __init__(self, device_type: str) -> None:
        self.rank = dist.get_rank()
        self._host = dist.new_group(backend="gloo")
        nodes = _by_node(self.collect(_node()))
        own = next(node for node in nodes if self.rank in node)
        self.world = World(dist.get_world_size(), len(own))
        self.local_rank = own.index(self.rank)
        backend = "nccl" if device_type == "cuda" else "gloo"
        across = [list(ranks) for ranks in zip(*nodes, strict=True)]
        self._node = self._one_of(nodes, backend)
        self._node_host = self._one_of(nodes, "gloo")
        self._updates = self._one_of(nodes, "gloo")
        self._across = self._one_of(across, backend)
        self._own_node = own
        self.counters = Counters()

    # device memory, on the current stream

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        """Fill `whole` with the `part` of each rank of the node, in their order.

        `part` may be this rank's range of `whole`.
        """
        self.counters.num_gathers += 1
        self.counters.gathered_bytes += whole.nbytes
        dist.all_gather_into_tensor(whole, part, group=self._node)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> None:
        """Sum `whole` over all ranks; `part` is this rank's range of it, in place."""
        self.counters.num_reduces += 1
        self.counters.reduced_bytes += whole.nbytes
        if self.world.local_size > 1:
            dist.reduce_scatter_tensor(part, whole, group=self._node)
        if self.world.num_nodes > 1:
            dist.all_reduce(part, group=self._across)

    # host memory

    def updated(self) -> dist.Work | None:
        """This rank has updated its share; done when all of the node have theirs."""
        return dist.barrier(group=self._updates, async_op=True)

    def node_sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks of the node, in place."""
        dist.all_reduce(values, group=self._node_host)
        return values

    def maximum(self, values: Tensor) -> Tensor:
        """Maximum over all ranks, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._host)
        return values

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite host tensors with those of rank 0."""
        for tensor in tensors:
            dist.broadcast(tensor, src=0, group=self._host)

    def spread_on_node(self, tensor: Tensor, source: int) -> None:
        """Overwrite a host tensor with that of a local rank."""
        source = self._own_node[source]
        dist.broadcast(tensor, src=source, group=self._node_host)

    def holders(self, absent: Collection[str]) -> dict[str, int]:
        """For each name that a rank of the node lacks the first local rank with it."""
        every = self.collect(frozenset(absent))
        lacks = [every[rank] for rank in self._own_node]
        return {
            name: next(r for r, missing in enumerate(lacks) if name not in missing)
            for name in sorted(frozenset().union(*lacks))
        }

    def collect(self, value: Any) -> list[Any]:
        """The value of each rank, in their order."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._host)
        return values

    def from_first(self, make: Callable[[], Result]) -> Result:
        """What rank 0 makes; all ranks raise what it raises."""
        return self._from(0, self._host, make)

    def from_first_of_node(self, make: Callable[[], Result]) -> Result:
        """What the first rank of the node makes; the node's ranks raise what it does."""
        return self._from(self._own_node[0], self._node_host, make)

    def together(self, act: Callable[[], Result]) -> Result:
        """What this rank's `act` returns, once all have acted.

        Raises:
            ProTrainError: Another rank failed; what it raised, named by its rank.
        """
        outcome = _Outcome.of(act)
        for rank, failure in enumerate(self.collect(outcome.failure)):
            if failure is not None and outcome.error is None:
                raise failure.seen_from_another(rank)
        return outcome.result()

    def _from(self, source: int, group: Any, make: Callable[[], Result]) -> Result:
        if self.rank == source:
            outcome = _Outcome.of(make)
            sent = [outcome.value, outcome.failure]
            dist.broadcast_object_list(sent, src=source, group=group)
            return outcome.result()
        received: list[Any] = [None, None]
        dist.broadcast_object_list(received, src=source, group=group)
        value, failure = received
        if failure is not None:
            raise failure.seen_from_another(source)
        return value

    def close(self) -> None:
        """Leave the groups."""
        for group in {
            self._host,
            self._node,
            self._node_host,
            self._updates,
            self._across,
        }:
            dist.destroy_process_group(group)

    def _one_of(self, members: Sequence[Sequence[int]], backend: str) -> Any:
        # every rank has to take part in making every group
        made = [dist.new_group(list(ranks), backend=backend) for ranks in members]
        return next(
            group
            for group, ranks in zip(made, members, strict=True)
            if self.rank in ranks
        )


class Alone(Ranks):
    """A world of one: every exchange is the identity."""

    def __init__(self) -> None:
        self.world, self.rank, self.local_rank = World(), 0, 0
        self.counters = Counters()

    def updated(self) -> None:
        return None

    def node_sum(self, values: Tensor) -> Tensor:
        return values

    def holders(self, absent: Collection[str]) -> dict[str, int]:
        return {}

    def collect(self, value: Any) -> list[Any]:
        return [value]

    def from_first(self, make: Callable[[], Result]) -> Result:
        return make()

    def together(self, act: Callable[[], Result]) -> Result:
        return act()

    def close(self) -> None:
        """There is no group to leave."""


@dataclass(frozen=True)
class _Failure:
    """An error in words that other processes can read."""

    kind: type[ProTrainError]
    text: str

    def seen_from_another(self, rank: int) -> ProTrainError:
        return self.kind(f"rank {rank}: {self.text}")


@dataclass(frozen=True)
class _Outcome(Generic[Result]):
    """What an act returned or raised."""

    value: Result | None
    error: Exception | None

    @classmethod
    def of(cls, act: Callable[[], Result]) -> _Outcome[Result]:
        try:
            return cls(act(), None)
        # whatever it is: the others wait to hear of it before it is raised again
        except Exception as error:  # noqa: BLE001
            return cls(None, error)

    @property
    def failure(self) -> _Failure | None:
        if self.error is None:
            return None
        if isinstance(self.error, ProTrainError):
            return _Failure(type(self.error), str(self.error))
        return _Failure(ProTrainError, f"{type(self.error).__name__}: {self.error}")

    def result(self) -> Result:
        if self.error is not None:
            raise self.error
        return cast(Result, self.value)


def _node() -> str:
    """What the processes of one node have in common, and of no other."""
    return os.environ.get("GROUP_RANK") or platform.node()


def _by_node(nodes: Sequence[str]) -> list[list[int]]:
    """Ranks of each node.

    Raises:
        ConfigError: Nodes with different numbers of processes.
    """
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    if len({len(ranks) for ranks in members.values()}) > 1:
        counts = ", ".join(f"{node}: {len(ranks)}" for node, ranks in members.items())
        raise ConfigError(
            f"protrain_auto_memory: nodes run different numbers of processes ({counts}). "
            "Launch the same number on each (--nproc_per_node)."
        )
    return list(members.values())
