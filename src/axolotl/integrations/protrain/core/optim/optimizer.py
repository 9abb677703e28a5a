"""One torch optimizer for all trainable parameters, wherever their state lives.

A step has three phases: gradients settle, the device part updates, the host part is
queued and overlaps the next forward. `state_dict` has the format and the order of the
plain run's AdamW, order and dtypes included, so a checkpoint moves freely between plans
and to a run without paging and back. Parameter names travel along and are compared.

# Note [The norm of all gradients]

It is that of `get_total_norm`, to the last bit: a norm for each gradient, in its dtype, and
the norm of those in the order of the plain run's parameters, wherever each of them is.
Device gradients are scaled at once, host gradients by the host thread just before their
update. Several ranks have host gradients in shards, in memory that they share: each takes
the norms of some whole gradients, and one sum over the node tells them to all; what is on
the device is the same on all. Norms of pieces would not do: torch's fp32 norm of 1.5 million
numbers is 2e-5 from the fp64 one, and in bf16 the plain norm is rounded twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, ConfigError
from ..runtime import Alone, Device, HostWorker, Ranks
from .gradients import Gradients
from .host_adamw import HostAdamW, Hyperparameters, optimizer_bytes
from .host_chunks import HostChunk
from .updates import Updates


class PagedAdamW(Updates, torch.optim.Optimizer):
    """AdamW over device and host parameters.

    Args:
        plain: The optimizer that the run would have used without paging, as built by
            the trainer: its groups, their order and hyperparameters are kept.
        names: Full name of each parameter, by `id(parameter)`; written into
            checkpoints and compared when one is loaded.
        chunks: Host chunks in the order of the next forward.
        kind: Host implementation, `torch` or `deepspeed`.
        before_update: Called for each host chunk whose weights are about to change.
        ranks: Those of the node, each with a shard of every host chunk.

    Raises:
        ConfigError: `plain` is not a `torch.optim.AdamW`, or keeps a third moment
            although several ranks train.
    """

    def __init__(
        self,
        plain: torch.optim.Optimizer,
        names: Mapping[int, str],
        chunks: Sequence[HostChunk],
        gradients: Gradients,
        device: Device,
        worker: HostWorker,
        kind: str,
        before_update: Callable[[HostChunk], None],
        ranks: Ranks | None = None,
    ) -> None:
        if type(plain) is not torch.optim.AdamW:
            raise ConfigError(
                f"optimizer: {type(plain).__name__} cannot update parameters whose "
                "state is on the host. Use adamw_torch_fused or adamw_torch, an "
                "adapter, or protrain_force_all_persistent: true."
            )
        self._ranks = ranks or Alone()
        shared = self._ranks.world.size > 1
        if shared and any(group.get("amsgrad") for group in plain.param_groups):
            raise ConfigError(
                "optim_args: amsgrad keeps a third moment, which several ranks do not "
                "share. Remove it, or set protrain_force_all_persistent: true."
            )
        super().__init__([dict(group) for group in plain.param_groups], plain.defaults)
        self._names, self._kind = names, kind
        self._device, self._worker = device, worker
        self._before_update = before_update
        self._place(chunks, gradients)
        self._resident = self._without_host(plain)
        self._clip: tuple[float, Tensor] | None = None

    def clip_grad_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float
    ) -> Tensor:
        """Total 2-norm of all gradients; scales them as `clip_grad_norm_` would.

        Device gradients are scaled here, host gradients by the worker just before
        their update, by the same function of torch. `parameters` come in the order of
        the plain run, which fixes the last bit.
        """
        self.settle_gradients()
        on_device = [p for p in parameters if id(p) not in self._places]
        total_norm = self._total_norm(parameters)
        if math.isinf(max_norm):
            return total_norm
        torch.nn.utils.clip_grads_with_norm_(on_device, max_norm, total_norm)
        self._clip = (max_norm, total_norm)
        return total_norm

    def forget_gradients(self) -> None:
        self.zero_grad()

    def settle_gradients(self) -> None:
        """Return once every gradient is where the update reads it, and clipped."""
        self._settle()
        self._apply_clipping()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Host gradients are consumed."""
        if closure is not None:
            raise ConfigError("PagedAdamW takes no closure")
        self._settle()
        hyperparameters = self._hyperparameters()
        if self._resident is not None:
            for group, values in zip(
                self._resident.param_groups, hyperparameters, strict=True
            ):
                group.update(values)
            self._resident.step()
        self._host.submit(
            hyperparameters,
            self._device.fetch.record(),
            self._clipping(),
            self._before_update,
        )
        self._gradients.spend()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients that no queued update still needs."""
        # what is on its way is dropped because `.grad` is None
        super().zero_grad(set_to_none)
        self._clip = None
        for host in self._chunks:
            if not self._worker.pending(host.chunk.index):
                host.clear()

    def state_dict(self) -> dict[str, Any]:
        """State in the plain AdamW's format; host tensors stay on the host."""
        self._worker.drain()
        self._device.reads(self._mains())
        self.state.clear()
        host_state = self._host.state()
        for param in _params(self):
            if id(param) in self._places:
                host, index = self._places[id(param)]
                state = host.whole_state(index, host_state)
            else:
                state = self._resident.state.get(param) if self._resident else None
            if state is not None:
                self.state[param] = state
        packed = super().state_dict()
        self.state.clear()
        for group, own in zip(packed["param_groups"], self.param_groups, strict=True):
            group["param_names"] = [self._names[id(p)] for p in own["params"]]
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over state written by any plan, or by a plain AdamW.

        Raises:
            CheckpointError: It belongs to other parameters or another precision.
        """
        self._worker.drain()
        # their moments are replaced, which no update may be using
        self._device.reads(self._mains())
        self._check_names(state_dict["param_groups"])
        super().load_state_dict({**state_dict, "state": {}})
        params = _params(self)
        on_host: dict[int, dict[str, Any]] = {}
        on_device: dict[Tensor, dict[str, Any]] = {}
        for number, state in state_dict["state"].items():
            param = params[number]
            if id(param) in self._places:
                host, index = self._places[id(param)]
                on_host.update(host.load_state(index, state))
            else:
                on_device[param] = state
        self._host.load(on_host)
        if self._resident is not None:
            packed, own = self._resident.state_dict(), _params(self._resident)
            packed["state"] = {
                n: on_device[p] for n, p in enumerate(own) if p in on_device
            }
            self._resident.load_state_dict(packed)

    def take_chunks(self, chunks: Sequence[HostChunk], gradients: Gradients) -> None:
        """Go on with more chunks on the host; no gradient and no update is pending.

        State comes along without a second copy of what is on the host. Chunks known
        already are the same objects.
        """
        state = self._host.state()
        self._place(chunks, gradients)
        if self._resident is not None:
            before, self._resident = self._resident, self._without_host(self._resident)
            for param in list(before.state):
                # popped: its device memory goes tensor by tensor
                own = before.state.pop(param)
                if id(param) in self._places:
                    host, index = self._places[id(param)]
                    moved = {key: _on_host(own.pop(key)) for key in list(own)}
                    state[id(host.mains[index])] = moved
                elif self._resident is not None:
                    self._resident.state[param] = own
        self._host.load({main: own for main, own in state.items() if own}, copy=False)

    def host_bytes(self) -> int:
        """Host bytes of gradients, masters and moments."""
        own = sum(host.host_bytes() for host in self._chunks)
        return own + self._host.state_bytes()

    def device_bytes(self) -> int:
        """Device bytes of optimizer state."""
        return optimizer_bytes(self._resident)

    def _settle(self) -> None:
        self._gradients.settle()
        self._gradients.take_back(self._worker.pending, self._worker.wait)

    def _place(self, chunks: Sequence[HostChunk], gradients: Gradients) -> None:
        self._chunks, self._gradients = chunks, gradients
        # by id of a parameter: its chunk and index there
        self._places = {
            id(param): (host, index)
            for host in chunks
            for index, param in enumerate(host.params)
        }
        group_of = {
            id(param): index
            for index, group in enumerate(self.param_groups)
            for param in group["params"]
        }
        for param in self._places:
            if param not in group_of:
                raise ConfigError(
                    f"optimizer: {self._names[param]} requires a gradient but is in no "
                    "parameter group. Freeze it or give it to a group."
                )
        self._host = HostAdamW(
            chunks, group_of, self._hyperparameters(), self._kind, self._worker
        )

    def _without_host(
        self, optimizer: torch.optim.Optimizer
    ) -> torch.optim.Optimizer | None:
        """The same one, group by group, over parameters that have no state on the host;
        None without any."""
        groups = [dict(group) for group in optimizer.param_groups]
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) not in self._places]
        # each group carries every hyperparameter, so defaults do not matter
        return torch.optim.AdamW(groups) if any(g["params"] for g in groups) else None

    def _mains(self) -> list[Tensor]:
        return [main for host in self._chunks for main in host.mains]

    def _hyperparameters(self) -> list[Hyperparameters]:
        return [
            {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for group in self.param_groups
        ]

    def _total_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """See Note [The norm of all gradients]."""
        # on the worker, which has the host's threads
        own = self._worker.submit(self._own_norms).result()
        every = self._ranks.node_sum(torch.cat(own)).split([*map(len, own)])
        of_host = {
            id(host.params[index]): norms[index].to(host.gradient_dtype(index))
            for host, norms in zip(self._chunks, every, strict=True)
            for index in host.used
        }
        where, norms = parameters[0].device, []
        for param in parameters:
            norm = of_host.get(id(param))
            if norm is None and param.grad is not None:
                # by the kernel that the plain run takes
                norm = torch.nn.utils.get_total_norm([param.grad])
            if norm is not None:
                norms.append(norm.to(where))
        # that of a number is the number: its order of dtypes is torch's affair
        return torch.nn.utils.get_total_norm(norms)

    def _own_norms(self) -> list[Tensor]:
        """For each chunk norms of gradients that fall to this rank, fp64; 0 for others."""
        rank, size = self._ranks.local_rank, self._ranks.world.local_size
        found = []
        for host in self._chunks:
            self._device.reads(host.gradients)
            norms = torch.zeros(len(host.params), dtype=torch.float64)
            for index in host.used.intersection(range(rank, len(norms), size)):
                norms[index] = torch.linalg.vector_norm(host.whole_gradient(index))
            found.append(norms)
        return found

    def _apply_clipping(self) -> None:
        """Scale the host gradients now: they are clipped again before the step."""
        scale = self._clipping()
        if scale is not None:
            for host in self._chunks:
                self._device.writes(host.gradients)
                scale(host.with_gradients())
            # the norms that follow read what other ranks have scaled
            self._ranks.node_sum(torch.zeros(1))

    def _clipping(self) -> Callable[[Sequence[Tensor]], None] | None:
        clip, self._clip = self._clip, None
        if clip is None:
            return None
        max_norm, total_norm = clip
        norm = total_norm.cpu()
        if _factor(max_norm, norm) == 1:
            # spares a pass over all gradients
            return None
        clip_grads = torch.nn.utils.clip_grads_with_norm_
        return partial(clip_grads, max_norm=max_norm, total_norm=norm)

    def _check_names(self, saved_groups: Sequence[Mapping[str, Any]]) -> None:
        for saved, own in zip(saved_groups, self.param_groups, strict=False):
            names = saved.get("param_names")
            mine = [self._names[id(p)] for p in own["params"]]
            if names is not None and list(names) != mine:
                odd = next(
                    (f"{a} / {b}" for a, b in zip(names, mine, strict=False) if a != b),
                    f"{len(names)} / {len(mine)} parameters",
                )
                raise CheckpointError(
                    "optimizer.pt belongs to other parameters than this run trains: "
                    f"saved / trained differ first at {odd}. Resume with the YAML "
                    "that wrote it."
                )


def _factor(max_norm: float, total_norm: Tensor) -> Tensor:
    """What `clip_grads_with_norm_` multiplies gradients with, as it computes it."""
    one = torch.ones(1)
    one.grad = torch.ones(1)
    torch.nn.utils.clip_grads_with_norm_(one, max_norm, total_norm)
    return one.grad


def _params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _on_host(value: Any) -> Any:
    # a copy on the CPU device too, whose bytes are counted apart
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value
