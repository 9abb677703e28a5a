"""Optimizer state of chunks in host memory, as others read, save and load it."""

from __future__ import annotations

import io
import mmap
import os
import pickle  # nosec B403 - between ranks of one run
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AccessError, CheckpointError
from .apply import ChunkUpdate, Updates
from .host_chunks import MASTER_KEY, HostMemory
from .host_pool import StateMemory, open_of
from .recorded_step import states_of
from .state import Place, form_of


class SavedState:
    """Reads, gathers and loads the optimizer state of chunks in host memory.

    Args:
        updates: Have the state.
        memory: Says which ranks share it.
    """

    def __init__(self, updates: Updates, memory: HostMemory) -> None:
        self._updates, self._ranks = updates, memory.ranks
        # on one of several ranks: whether it has the state of all weights
        self._gathered = self._ranks.world.local_size == 1
        # how many there were when they were put in order
        self._num_ordered = 0

    @property
    def _plain(self) -> torch.optim.Optimizer:
        return self._updates.plain

    def order(self) -> None:
        """Put states in the order in which the plain run makes them."""
        state, every = states_of(self._plain), _params(self._plain)
        state.update([(p, state.pop(p)) for p in every if p in state])
        self._num_ordered = len(state)

    def order_new(self) -> None:
        """Put states in that order if some have come since."""
        if len(states_of(self._plain)) != self._num_ordered:
            self.order()

    def require_gathered(self) -> None:
        """Raise AccessError where this rank has only a part of the state."""
        if not self._gathered and any(states_of(self._plain).values()):
            raise AccessError(
                "optimizer: each rank has the state of the weights that it updates. Read "
                "`state` or `state_dict` on the first rank of a node, inside `with "
                "session.gathered_state():`, which all ranks enter. A transformers Trainer "
                "around `page` saves without it: save_only_model=True."
            )

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Give the first rank of each node the state of all weights, inside; all ranks
        enter, with no step recorded, and the others may end sooner."""
        updates = self._updates
        if self._ranks.world.local_size == 1 or not updates.all:
            yield
            return
        states = states_of(self._plain)
        params = {p: number for number, p in enumerate(_params(self._plain))}
        own = {
            params[p]: states[p]
            for update in updates.all
            for p in update.params.values()
            if p in states
        }
        every = self._ranks.collect_on_node(_pack(own, updates.state_memory))
        self._gathered = self._ranks.local_rank == 0
        by_number = [*params]
        others: dict[Tensor, Any] = {}
        for packed in every[1:] if self._gathered else ():
            others.update((by_number[n], own) for n, own in _unpack(packed).items())
        before = {p: states[p] for p in others if p in states}
        states.update(others)
        try:
            yield
        finally:
            self._gathered = False
            for param in others:
                states.pop(param, None)
            states.update(before)
            # nobody changes what the first one reads
            self._ranks.meet_on_node()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around the load of a state, which lands where the master parameters are then."""
        updates = self._updates
        mains = {
            p: main for own in updates.all for p, main in own.master_params.items()
        }
        try:
            for main in mains.values():
                main.data = main.data.cpu()
            self._exchange(mains)
            updates.own_code = True
            yield
        finally:
            updates.own_code = False
            self._exchange({main: param for param, main in mains.items()})
        updates.adopt(updates.all)

    def _exchange(self, other: Mapping[Any, nn.Parameter]) -> None:
        """Let groups and state be of other parameters."""
        states = states_of(self._plain)
        for group in self._plain.param_groups:
            group["params"] = [other.get(p, p) for p in group["params"]]
        for param in [p for p in states if p in other]:
            states[other[param]] = states.pop(param)

    def add_masters(self, packed: dict[str, Any]) -> None:
        """Complete a state dict: each state has its master beside it."""
        states = packed["state"]
        for number, param in enumerate(_params(self._plain)):
            own, index = self._with_master(param)
            if own is None:
                continue
            master, weight = (
                own.host.masters.tensors[index],
                own.host.weights.tensors[index],
            )
            # one that was never updated is its weight
            if number in states or not torch.equal(master, weight.float()):
                states[number] = {**states.get(number, {}), MASTER_KEY: master}

    def without_masters(
        self, saved: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[nn.Parameter, Tensor]]:
        """Split a state dict into the plain optimizer's and the masters in it.

        Raises:
            CheckpointError: It has masters and this run none, or the other way round.
        """
        states = {number: dict(state) for number, state in saved["state"].items()}
        found: dict[nn.Parameter, Tensor] = {}
        for number, param in enumerate(_params(self._plain)):
            if number in states:
                master = states[number].pop(MASTER_KEY, None)
                was = master is not None
                if was != (self._with_master(param)[0] is not None):
                    raise CheckpointError(
                        f"optimizer.pt was written {'with' if was else 'without'} "
                        "fp32 master weights: resume with protrain_fp32_master: "
                        f"{str(was).lower()}."
                    )
                if master is not None:
                    found[param] = master
        return {**saved, "state": states}, found

    def load_masters(self, saved: Mapping[nn.Parameter, Tensor]) -> None:
        """Overwrite masters, and weights with them; no step is recorded."""
        for param, master in saved.items():
            own, index = self._with_master(param)
            if own is not None and index in own.params:
                own.host.load_master(index, master)
        self._ranks.meet_on_node()

    def close(self) -> None:
        """Let go of all memory; no copy may be in flight."""
        if not self._updates.all:
            return
        self.order()
        with ExitStack() as rest:
            for own in self._updates.all:
                for state in own.every_state:
                    rest.callback(state.release)

    def _with_master(self, param: nn.Parameter) -> tuple[ChunkUpdate | None, int]:
        own, index = self._updates.place_of(param)
        return (own, index) if own and index in own.host.masters.tensors else (None, 0)


def _params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


_InFile = tuple[int, int, int, Place]
"""A tensor of another process: its number, descriptor, bytes of the file, and place."""


def _pack(states: Mapping[int, Any], memory: StateMemory) -> bytes:
    """Pack states, which do not change meanwhile, for another rank of the node."""

    def place_of(value: Any) -> Tensor | _InFile | None:
        if type(value) is not Tensor:
            return None
        if value.device.type != "cpu":
            # its device is not the other rank's
            return value.cpu()
        found = memory.file_of(value.data_ptr())
        if found is None:
            return None
        descriptor, nbytes, offset = found
        return os.getpid(), descriptor, nbytes, Place(offset, *form_of(value))

    packed = io.BytesIO()
    pickler = pickle.Pickler(packed)
    pickler.persistent_id = place_of  # type: ignore[method-assign]
    pickler.dump(dict(states))
    return packed.getvalue()


def _unpack(packed: bytes) -> dict[int, Any]:
    """The states of another rank: copy-on-write, as long as somebody holds them."""
    regions: dict[tuple[int, int], Tensor] = {}

    def load(lies: Tensor | _InFile) -> Tensor:
        if isinstance(lies, Tensor):
            return lies
        process, descriptor, nbytes, place = lies
        if (process, descriptor) not in regions:
            file = open_of(process, descriptor)
            memory = mmap.mmap(file, nbytes, flags=mmap.MAP_PRIVATE)
            os.close(file)
            regions[process, descriptor] = torch.frombuffer(memory, dtype=torch.uint8)
        return place.on_host(regions[process, descriptor])

    unpickler = pickle.Unpickler(io.BytesIO(packed))  # nosec B301 - of another rank
    unpickler.persistent_load = load  # type: ignore[method-assign]
    return unpickler.load()
