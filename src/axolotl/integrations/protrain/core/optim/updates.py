"""The plain optimizer, of which a step is noted first and made chunk by chunk later.

# Note [The norm of all gradients]

It is that of `get_total_norm`, to the last bit: a norm for each gradient, in its dtype, and
the norm of those in the order of the plain run's parameters, wherever each of them is. Each
is taken on the device, by the rank that updates the weight, and one sum over the node tells
them to all. Norms of pieces would not do: torch's fp32 norm of 1.5 million numbers is 2e-5
from the fp64 one, and in bf16 the plain norm is rounded twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import AccessError, CheckpointError, ConfigError
from .chunk_update import ChunkUpdate
from .gradients import Gradients
from .host_chunks import MASTER_KEY, HostChunk
from .host_tensors import GradientSums
from .masters import Masters
from .noted import (
    Clip,
    Noted,
    marks,
    require_separable,
    states_of,
    without_hooks,
)
from .pending import PendingUpdates
from .state_memory import StateMemory, unpack
from .states import HostedState, Leaf


class Updates(PendingUpdates):
    """Notes steps, and knows everything of the weights that they will change.

    Without weights whose state is on the host, and before `wrap`, it does nothing.

    Attributes:
        kind: The class of `plain`.
    """

    _clip: Clip | None = None
    # there may be state
    _stepped = False
    # code of the optimizer runs, which has asked for nothing
    _own_code = False
    # how many there were when they were put in order
    _num_ordered = 0

    def wrap(
        self,
        plain: torch.optim.Optimizer,
        chunks: Sequence[HostChunk],
        gradients: Gradients,
    ) -> torch.optim.Optimizer:
        """The optimizer to train with: `plain` itself, in front of its class another.

        Raises:
            ConfigError: See `require_separable`.
        """
        require_separable(plain)
        self.plain, self.kind = plain, type(plain)
        several = self._ranks.world.local_size > 1
        self._memory = StateMemory(self._device, not self._on_host, several)
        # on one of several ranks, who has the state of all
        self._gathered = not several
        self.take_chunks(chunks, gradients)
        name = f"Paged{self.kind.__name__}"
        bases = (PagedOptimizer, self.kind)
        switches = {
            method: staticmethod(partial(self.switch, method))
            for method in ("train", "eval")
            if hasattr(self.kind, method)
        }
        self.plain.__class__ = type(name, bases, {"updates": self, **switches})
        return self.plain

    def take_chunks(self, chunks: Sequence[HostChunk], gradients: Gradients) -> None:
        """These are on the host from now on, known ones and more; nothing is pending."""
        self._gradients, gradients.arrives = gradients, self._arrives
        where = torch.device("cpu") if self._on_host else self._device.torch_device
        new = [host for host in chunks if host.chunk.index not in self._own]
        for host in new:
            params = [host.params[index] for index in host.span]
            state = HostedState(self.plain, params, where, self._memory)
            self._own[host.chunk.index] = ChunkUpdate(self.plain, host, state)
        self._all = [self._own[host.chunk.index] for host in chunks]
        self._places: dict[int, tuple[ChunkUpdate, int]] = {
            id(param): (own, index)
            for own in self._all
            for index, param in enumerate(own.host.params)
        }
        self.adopt([self._own[host.chunk.index] for host in new])

    def adopt(self, chunks: Sequence[ChunkUpdate]) -> None:
        """Bring state home that was made or loaded elsewhere."""
        groups = {id(p): g for g in self.plain.param_groups for p in g["params"]}
        for own in chunks:
            self._drop_others(own)

            def stays(leaf: Leaf, own: ChunkUpdate = own) -> bool:
                if self._on_host:
                    return False
                group = groups[id(own.host.params[own.host.span[leaf.path[0]]])]
                # the rule of torch.optim.Optimizer.load_state_dict
                on_device = group.get("fused") or group.get("capturable")
                return leaf.key == "step" and not on_device

            own.state.adopt(stays)

    # gradients

    def clip_grad_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float
    ) -> Tensor | None:
        """Total 2-norm of all gradients; scales them as `clip_grad_norm_` would, on the
        host as they are updated.

        `parameters` come in the order of the plain run, which fixes the last bit. None
        if all gradients are on the device, where the plain way sees them.
        """
        if not self._all:
            return None
        if self._clip is not None:
            # once more without a step: the second one sees what the first has scaled
            self.settle_gradients()
        self._settle()
        self._share_norms()
        norms, here = [], []
        for param in parameters:
            own, index = self._places.get(id(param), (None, 0))
            if own is not None and index in own.sums.present:
                norms.append(own.sums.norms[index])
            elif own is None and param.grad is not None:
                norms.append(torch.nn.utils.get_total_norm([param.grad]))
                here.append(param)
        # that of a number is the number: its order of dtypes is torch's affair
        total_norm = torch.nn.utils.get_total_norm(norms)
        if max_norm != float("inf"):
            torch.nn.utils.clip_grads_with_norm_(here, max_norm, total_norm)
            self._clip = (max_norm, total_norm)
        return total_norm

    def settle_gradients(self) -> None:
        """Return once every gradient is where it is read, and clipped."""
        if not self._all:
            return
        self.flush()
        self._settle()
        self._scale()
        for own in self._all:
            if own.clip is not None:
                # what the last step has used, while it is still there
                _clip(own, set(own.used) - own.sums.present, own.clip)
                own.clip = None
        # what other ranks have scaled is read next
        self._ranks.node_sum(torch.zeros(1))

    def _scale(self) -> None:
        """Scale on the host what was to be scaled by the update."""
        if self._clip is not None:
            for own in self._all:
                _clip(own, own.sums.present, self._clip)
            self._clip = None

    def _arrives(self, chunk: int) -> None:
        """A gradient comes in backward, and finds those so far as the plain run has them."""
        if self.pending(chunk):
            name = self._own[chunk].host.chunk.tensors[0].name
            raise AccessError(
                f"{name}: this weight has a gradient, but it has been used since the last "
                "step without a forward of the model that would have updated it. Call the "
                "model, not functions of its weights."
            )
        self._scale()

    def _replaced(self, chunk: int) -> None:
        """Somebody has set a gradient, which is not to be scaled by what was before."""
        self.flush_chunk(chunk)
        self._with_device.settle()
        self._scale()

    def forget_clip(self) -> None:
        """Gradients that were to be scaled are gone."""
        self._clip = None

    def forget_gradients(self) -> None:
        """Nothing is left of the gradients since the last update."""
        self._clip = None
        for own in self._all:
            own.sums.present.clear()
            own.sums.norms.clear()

    # steps

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Around the plain step, which must see only what it has to update now."""
        # what is shown would be taken for what somebody has written after it
        self._around.hide()
        self._settle()
        self.flush()
        stood: list[tuple[nn.Parameter, Tensor]] = []
        self._own_code = True
        try:
            noted, self._stepped = self._noted(), True
            for own in self._all:
                params = own.host.params
                stood.extend((p, p.grad) for p in params if p.grad is not None)
                for param in params:
                    param.grad = None
                self._hide_states(params)
                if own.sums.present:
                    own.used = tuple(sorted(own.sums.present))
                    own.sums.present.clear()
                    own.sums.norms.clear()
                    own.noted = noted
            yield
        finally:
            self._own_code = False
            self.show_states()
            for param, stand_in in stood:
                param.grad = stand_in
            for shown in self._gradients.shown:
                shown.spend()
        self._note()
        self._around.show_again()

    def complete_states(self) -> None:
        """Somebody is about to read or change them, unless it is the step itself."""
        if not self._own_code:
            self.flush()
            self.require_gathered()
            if len(self._states) != self._num_ordered:
                self.order_states()

    def switch(self, method: str) -> None:
        """`train` or `eval` of a schedule-free optimizer, wherever weights are."""
        self.flush()
        noted = Noted(self.plain, self.kind, method=method)
        before = [dict(group) for group in self.plain.param_groups]
        moved = self._all if self._stepped else []
        for own in moved:
            self._hide_states(own.host.params)
        self._own_code = True
        try:
            getattr(self.kind, method)(self.plain)
        finally:
            self._own_code = False
            self.show_states()
        if before != [dict(group) for group in self.plain.param_groups]:
            self.settle_gradients()
            for own in moved:
                own.noted = noted
            self.flush()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around the load of a state, which lands where the main parameters are then."""
        self.flush()
        mains = {p: main for own in self._all for p, main in own.mains.items()}
        try:
            for main in mains.values():
                main.data = main.data.cpu()
            self._exchange(mains)
            self._own_code = True
            yield
        finally:
            self._own_code = False
            self._exchange({main: param for param, main in mains.items()})
        self._stepped = True
        self.adopt(self._all)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, which all ranks enter, the first of each node has the state of all
        weights; the others may end sooner."""
        self.flush()
        if self._ranks.world.local_size == 1 or not self._all:
            yield
            return
        params = {p: number for number, p in enumerate(_params(self.plain))}
        own = {
            params[p]: self._states[p]
            for update in self._all
            for p in update.params.values()
            if p in self._states
        }
        every = self._ranks.collect_on_node(self._memory.pack(own))
        self._gathered = self._ranks.local_rank == 0
        by_number = [*params]
        others: dict[Tensor, Any] = {}
        for packed in every[1:] if self._gathered else ():
            others.update((by_number[n], own) for n, own in unpack(packed).items())
        before = {p: self._states[p] for p in others if p in self._states}
        self._states.update(others)
        try:
            yield
        finally:
            self._gathered = False
            for param in others:
                self._states.pop(param, None)
            self._states.update(before)
            # nobody changes what the first one reads
            self._ranks.node_sum(torch.zeros(1))

    def require_gathered(self) -> None:
        """Raise AccessError where this rank has only a part of the state."""
        if not self._gathered and any(self._states.values()):
            raise AccessError(
                "optimizer: each rank has the state of the weights that it updates. Read "
                "`state` or `state_dict` on the first rank of a node, inside `with "
                "session.gathered_state():`, which all ranks enter."
            )

    def add_masters(self, packed: dict[str, Any]) -> None:
        """Complete what `state_dict` has made: each state has its master beside it."""
        states = packed["state"]
        for number, param in enumerate(_params(self.plain)):
            masters, index = self._masters_of(param)
            # one that was never updated is its weight
            if masters is not None and (number in states or masters.any(index)):
                state = states.get(number, {})
                states[number] = {**state, MASTER_KEY: masters.join(index)}

    def without_masters(
        self, saved: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[nn.Parameter, Tensor]]:
        """A state as the plain optimizer has it, and the masters in it.

        Raises:
            CheckpointError: It has masters and this run none, or the other way round.
        """
        states = {number: dict(state) for number, state in saved["state"].items()}
        found: dict[nn.Parameter, Tensor] = {}
        for number, param in enumerate(_params(self.plain)):
            if number in states:
                master = states[number].pop(MASTER_KEY, None)
                was = master is not None
                if was != (self._masters_of(param)[0] is not None):
                    raise CheckpointError(
                        f"optimizer.pt was written {'with' if was else 'without'} "
                        "fp32 master weights: resume with protrain_fp32_master: "
                        f"{str(was).lower()}."
                    )
                if master is not None:
                    found[param] = master
        return {**saved, "state": states}, found

    def load_masters(self, saved: Mapping[nn.Parameter, Tensor]) -> None:
        """Overwrite masters, and weights with them; nothing is pending."""
        self._around.hide()
        for param, master in saved.items():
            masters, index = self._masters_of(param)
            assert masters is not None
            own, _ = self._places[id(param)]
            self._around.rewrites(own.host)
            if index in own.params:
                masters.load(index, master)
        self._ranks.node_sum(torch.zeros(1))
        self._around.show_again()

    def _masters_of(self, param: nn.Parameter) -> tuple[Masters | None, int]:
        """Where the master of a parameter is, if it has one."""
        own, index = self._places.get(id(param), (None, 0))
        if own is None or index not in own.host.masters:
            return None, 0
        return own.host.masters, index

    def _exchange(self, other: Mapping[Any, nn.Parameter]) -> None:
        """Let groups and state be of other parameters."""
        for group in self.plain.param_groups:
            group["params"] = [other.get(p, p) for p in group["params"]]
        for param in [p for p in self._states if p in other]:
            self._states[other[param]] = self._states.pop(param)

    def order_states(self) -> None:
        """Let them be in the order in which the plain run makes them."""
        state, every = self._states, _params(self.plain)
        state.update([(p, state.pop(p)) for p in every if p in state])
        self._num_ordered = len(state)

    def close(self) -> None:
        """Let go of all memory; no copy may be in flight."""
        if not self._all:
            return
        self.show_states()
        self.order_states()
        self.plain.__class__ = self.kind
        with ExitStack() as rest:
            for own in self._all:
                rest.callback(own.state.release)

    def host_bytes(self) -> int:
        """Host bytes of gradients, masters and optimizer state."""
        every = (source.memory for own in self._all for source in own.sources())
        return sum(memory.nbytes for memory in every)

    def _noted(self) -> Noted:
        """The step that is being made now."""
        clip, self._clip = self._clip, None
        if not self._on_host:
            return Noted(self.plain, self.kind, clip)
        if clip is not None:
            clip = clip[0], clip[1].cpu()
        # how a device computes is its affair
        fused = self._device.torch_device.type != "cpu"
        # or None: spares a pass over all gradients
        scaling = clip if _scales(clip) else None
        return Noted(self.plain, self.kind, scaling, fused=fused)

    def _settle(self) -> None:
        self._gradients.settle()
        for shown in self._gradients.shown:
            shown.take_back(partial(self._replaced, shown.host.chunk.index))

    def _share_norms(self) -> None:
        """Let all ranks know the norm of every gradient; see Note [The norm of all gradients]."""
        known: list[tuple[GradientSums, int]] = []
        for own in self._all:
            sums = own.sums
            for index in sorted(sums.present):
                known.append((sums, index))
                if index in own.params and index not in sums.norms:
                    # somebody has changed it on the host
                    gradient = sums[index].to(self._device.torch_device)
                    sums.norms[index] = sums.norm(gradient)
        if self._ranks.world.local_size == 1 or not known:
            return
        of_others = torch.zeros(len(known), dtype=torch.float64)
        for number, (sums, index) in enumerate(known):
            if index in sums.norms:
                of_others[number] = sums.norms[index]
        for norm, (sums, index) in zip(
            self._ranks.node_sum(of_others), known, strict=True
        ):
            if index not in sums.norms:
                dtype = sums.norm(sums[index].new_empty(0)).dtype
                sums.norms[index] = norm.to(self._device.torch_device, dtype)

    def _drop_others(self, own: ChunkUpdate) -> None:
        """Of weights that other ranks update keep what is no tensor."""
        states = self._states
        for index, param in enumerate(own.host.params):
            if index not in own.params and param in states:
                states[param] = marks(states.pop(param))
                if not states[param]:
                    del states[param]


class PagedOptimizer(torch.optim.Optimizer):
    """Put in front of the plain optimizer's class while its weights are paged."""

    updates: ClassVar[Updates]

    @property  # type: ignore[override]
    def state(self) -> dict[Any, Any]:
        """That of every parameter, once nothing is pending."""
        self.updates.complete_states()
        return states_of(self)

    @state.setter
    def state(self, states: dict[Any, Any]) -> None:
        self.updates.complete_states()
        vars(self)["state"] = states

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise ConfigError(
                "optimizer: a closure cannot be called while weights are paged. Call "
                "`step` without one, after backward."
            )
        with self.updates.noting():
            # hooks are called around this one: nothing is hidden from them
            return without_hooks(self.updates.kind.step)(self)

    # torch is not to call them once more
    step.hooked = True  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        _require_no_hooks(self, "state_dict")
        self.updates.flush()
        self.updates.require_gathered()
        self.updates.order_states()
        packed = super().state_dict()
        self.updates.add_masters(packed)
        return packed

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        _require_no_hooks(self, "load_state_dict")
        others, masters = self.updates.without_masters(state_dict)
        with self.updates.loading():
            super().load_state_dict(others, *args, **kwargs)
        self.updates.load_masters(masters)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad(*args, **kwargs)
        self.updates.forget_clip()


def kind_of(optimizer: torch.optim.Optimizer | type) -> type:
    """The class of an optimizer, without what this package puts in front of it."""
    package = __name__.partition(".core.")[0]
    kinds = (optimizer if isinstance(optimizer, type) else type(optimizer)).__mro__
    return next(kind for kind in kinds if not kind.__module__.startswith(package))


def _require_no_hooks(optimizer: torch.optim.Optimizer, method: str) -> None:
    for when in ("pre", "post"):
        if getattr(optimizer, f"_optimizer_{method}_{when}_hooks", None):
            raise AccessError(
                f"optimizer: a hook that `register_{method}_{when}_hook` has added would "
                "see other parameters than the model's while their state is on the host. "
                "Do it in an event of a callback (on_train_begin, on_save)."
            )


def _params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _clip(own: ChunkUpdate, indices: Collection[int], clip: Clip) -> None:
    sums, holders = own.sums, []
    for index in indices:
        sums.norms.pop(index, None)
        if index not in own.params:
            continue
        holder = sums[index].detach()
        holder.grad = sums[index]
        holders.append(holder)
    torch.nn.utils.clip_grads_with_norm_(holders, *clip)


def _scales(clip: Clip | None) -> bool:
    """Whether `clip_grads_with_norm_` changes anything, as it computes it."""
    one = torch.ones(1)
    one.grad = torch.ones(1)
    if clip is not None:
        torch.nn.utils.clip_grads_with_norm_(one, *clip)
    return bool(one.grad != 1)
