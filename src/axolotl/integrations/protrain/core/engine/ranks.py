"""The processes that train together, and all that they say to each other.

Everything is carried by torch.distributed. Device collectives run on a group of the
node's ranks and on one across nodes, apart from the group that DDP uses; what the host
has to say goes over gloo. Each group sees the same calls in the same order on all ranks.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError, ProTrainError
from ..layout import Direction
from ..types import Counters, World

Result = TypeVar("Result")

LOOK_S = 0.2
"""Between two looks of a rank for what another has to say."""
HEARD_S = 10.0
"""The longest that a rank waits for others to hear it, and then for itself to end."""
_WORDS, _HEARD = "words", "heard"
_DIRECTIONS = tuple(Direction)
LIMIT = timedelta(minutes=30)
"""The longest that torch waits for a rank, and transformers (`ddp_timeout`), unless told."""


class Ranks:
    """The process groups of one run. Device collectives work on memory of `device_type`,
    "cpu" or "cuda".

    `rank` is that of this process among all of `world`, `local_rank` that on its node;
    collectives are counted in `counters`. Nobody waits for another longer than `limit`.

    Raises:
        ConfigError: Nodes with different numbers of processes.
    """

    def __init__(self, device_type: str, limit: timedelta = LIMIT) -> None:
        self.rank, self._limit = dist.get_rank(), limit
        self._host = dist.new_group(backend="gloo", timeout=limit)
        # what the processes of one node have in common, and of no other
        node = os.environ.get("GROUP_RANK") or platform.node()
        nodes = _by_node(self.collect(node))
        own = next(ranks for ranks in nodes if self.rank in ranks)
        self.world = World(dist.get_world_size(), len(own))
        self.local_rank = own.index(self.rank)
        backend = "nccl" if device_type == "cuda" else "gloo"
        self._node = self._one_of(nodes, backend)
        self._node_host = self._one_of(nodes, "gloo")
        self._updates = self._one_of(nodes, "gloo")
        self._passes = self._one_of(nodes, "gloo")
        self._across = self._one_of([*zip(*nodes, strict=True)], backend)
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

    def reduce(self, tensor: Tensor, local_rank: int) -> None:
        """Sum over all ranks, in place, for that rank of each node; of use to no other."""
        self.counters.num_reduces += 1
        self.counters.reduced_bytes += tensor.nbytes
        if self.world.local_size > 1:
            dist.reduce(tensor, dst=self._own_node[local_rank], group=self._node)
        if self.world.num_nodes > 1 and self.local_rank == local_rank:
            dist.all_reduce(tensor, group=self._across)

    # host memory

    def updated(self) -> dist.Work | None:
        """This rank has updated its share; done when all of the node have theirs."""
        return dist.barrier(group=self._updates, async_op=True)

    def begin_pass(self, direction: Direction) -> None:
        """Return once all ranks of the node begin a pass, whose gathers have no end where
        one of them does not come.

        Raises:
            ProTrainError: Some have not come in time, or go the other way, by their
                numbers.
        """
        since = time.monotonic()
        here = torch.tensor([_DIRECTIONS.index(direction)], device="cpu")
        others = [rank for rank in self._own_node if rank != self.rank]
        sent = [dist.isend(here, rank, group=self._passes) for rank in others]
        told = {rank: torch.empty_like(here) for rank in others}
        heard = {
            rank: dist.irecv(told[rank], rank, group=self._passes) for rank in others
        }
        missing = [rank for rank, work in heard.items() if not self._comes(work, since)]
        if missing:
            raise ProTrainError(
                f"ddp_timeout: rank {', '.join(map(str, missing))} runs no block in a pass "
                f"for which rank {self.rank} has waited {self._limit.total_seconds():g} s. "
                "Where chunks are sharded every rank has to run the model as often as the "
                "others. Give each rank a batch, raise ddp_timeout where one is slow, or "
                "set protrain_force_all_persistent: true."
            )
        for work in filter(None, sent):
            work.wait()
        for rank in others:
            way = _DIRECTIONS[int(told[rank])]
            if way is not direction:
                raise ProTrainError(
                    "protrain_zero3_shard: ranks run the model unlike each other: rank "
                    f"{self.rank} goes {direction.value}, and rank {rank} {way.value}. "
                    "Where chunks are sharded every rank has to run it as often as the "
                    "others, and a callback, maybe, runs it on some alone. Set "
                    "`protrain_zero3_shard: false`."
                )

    def _comes(self, work: dist.Work | None, since: float) -> bool:
        """Return whether a rank comes to a pass within the time limit.

        Raises:
            RuntimeError: Its process has ended, in gloo's words.
        """
        assert work is not None
        try:
            return work.wait(self._limit)
        except RuntimeError:
            # gloo's word for a time limit, too
            if time.monotonic() - since < self._limit.total_seconds():
                raise
            return False

    def node_sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks of the node, in place."""
        dist.all_reduce(values, group=self._node_host)
        return values

    def meet_on_node(self) -> None:
        """Return once all ranks of the node are here."""
        self.node_sum(torch.zeros(1, device="cpu"))

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
        dist.broadcast(tensor, src=self._own_node[source], group=self._node_host)

    def holders(self, absent: Collection[str]) -> dict[str, int]:
        """For each name that a rank of the node lacks the first local rank with it."""
        lacks = self.collect_on_node(frozenset(absent))
        return {
            name: next(r for r, missing in enumerate(lacks) if name not in missing)
            for name in sorted(frozenset().union(*lacks))
        }

    def collect(self, value: Any) -> list[Any]:
        """The value of each rank, in their order."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._host)
        return values

    def collect_on_node(self, value: Any) -> list[Any]:
        """The value of each rank of the node, in their order."""
        values: list[Any] = [None] * self.world.local_size
        dist.all_gather_object(values, value, group=self._node_host)
        return values

    def from_first(self, act: Callable[[], Result]) -> Result:
        """Return what rank 0's `act` returns; all ranks raise what it raises."""
        return self._from(0, self._host, act)

    def from_first_of_node(self, act: Callable[[], Result]) -> Result:
        """Return what `act` returns on the first rank of the node, on all of its ranks."""
        return self._from(self._own_node[0], self._node_host, act)

    def together(self, act: Callable[[], Result]) -> Result:
        """Return what this rank's `act` returns, once all have acted.

        Raises:
            ProTrainError: Another rank failed; what it raised, named by its rank.
        """
        value, error = _outcome(act)
        failures = self.collect(_in_words(error))
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            _raise_failure(rank, failure)
        return value

    def _from(self, source: int, group: Any, act: Callable[[], Result]) -> Result:
        value, error = _outcome(act) if self.rank == source else (None, None)
        sent: list[Any] = [value, _in_words(error)]
        dist.broadcast_object_list(sent, src=source, group=group)
        if error is not None:
            raise error
        value, failure = sent
        _raise_failure(source, failure)
        return value

    def close(self) -> None:
        """Leave the groups."""
        host = self._host, self._node_host, self._updates, self._passes
        for group in {*host, self._node, self._across}:
            dist.destroy_process_group(group)

    def _one_of(self, members: Sequence[Sequence[int]], backend: str) -> Any:
        # every rank has to take part in making every group
        made = [
            dist.new_group(list(ranks), timeout=self._limit, backend=backend)
            for ranks in members
        ]
        return made[next(n for n, ranks in enumerate(members) if self.rank in ranks)]


class Alone(Ranks):
    """A world of one: every exchange is the identity."""

    def __init__(self) -> None:
        self.world, self.rank, self.local_rank = World(), 0, 0
        self.counters = Counters()

    def updated(self) -> None:
        return None

    def node_sum(self, values: Tensor) -> Tensor:
        return values

    maximum = node_sum

    def meet_on_node(self) -> None:
        """Nobody else is on its way."""

    def collect(self, value: Any) -> list[Any]:
        return [value]

    collect_on_node = collect

    def together(self, act: Callable[[], Result]) -> Result:
        return act()

    from_first = from_first_of_node = together

    def close(self) -> None:
        """There is no group to leave."""


class Alarm:
    """Brings the words of a rank that ends to all ranks, whatever they wait for.

    A rank that waits in a collective hears nothing of a peer that has left it: gloo waits
    until that process is gone, NCCL until a time limit, and a launcher kills who waits. So a
    thread of each rank looks into a store, and ends its process where nothing else does.

    Args:
        ranks: Who trains together; all of them make one at the same point.
        heard: Called with the words, once and on every rank, by the thread.

    Attributes:
        words: What was said; None as long as nobody has spoken.
    """

    def __init__(self, ranks: Ranks, heard: Callable[[str], None]) -> None:
        self.words: str | None = None
        self._heard, self._num_ranks = heard, ranks.world.size
        host, store = os.environ.get("MASTER_ADDR") or platform.node(), None
        if ranks.rank == 0:
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        host, port = ranks.collect((host, store.port if store else 0))[0]
        self._store = store or dist.TCPStore(host, port, wait_for_workers=False)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def tell(self, words: str) -> str:
        """Return the words of whoever spoke first, once all ranks have heard them.

        Who does not hear them in `HEARD_S` seconds is not waited for.
        """
        words = self._store.compare_set(_WORDS, "", words).decode()
        end = time.monotonic() + HEARD_S
        # a launcher ends the others as soon as this rank has ended
        while self._store.add(_HEARD, 0) < self._num_ranks and time.monotonic() < end:
            time.sleep(LOOK_S)
        return words

    def close(self) -> None:
        """This rank has nothing to wait for any longer."""
        self._closed.set()
        self._thread.join()

    def _listen(self) -> None:
        try:
            while not self._store.check([_WORDS]):
                if self._closed.wait(LOOK_S):
                    return
            self.words = self._store.get(_WORDS).decode()
            self._heard(self.words)
            self._store.add(_HEARD, 1)
        except dist.DistError:
            # rank 0, which has the store, is gone
            return
        if not self._closed.wait(HEARD_S):
            os._exit(1)


def _outcome(act: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return the result of an act, and what it raised."""
    try:
        return act(), None
    # whatever it is: the others wait to hear of it before it is raised again
    except Exception as error:  # noqa: BLE001
        return None, error


_Failure = tuple[type[ProTrainError], str]
"""An error in words that other processes can read."""


def _in_words(error: Exception | None) -> _Failure | None:
    if error is None:
        return None
    if isinstance(error, ProTrainError):
        return type(error), str(error)
    return ProTrainError, f"{type(error).__name__}: {error}"


def _raise_failure(rank: int, failure: _Failure | None) -> None:
    if failure is not None:
        kind, text = failure
        raise kind(f"rank {rank}: {text}")


def _by_node(nodes: Sequence[str]) -> list[list[int]]:
    """Ranks of each node; refuses nodes with different numbers of processes."""
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
