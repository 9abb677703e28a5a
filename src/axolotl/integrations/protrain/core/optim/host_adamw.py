"""AdamW on the host, chunk by chunk, on the worker thread.

The arithmetic is that of `torch.optim.AdamW(fused=True)` on CPU tensors, one tensor a
parameter as in the plain run, so the result has the same bits.

# Note [Updates beside the next forward]

A step queues one update a chunk, in the order in which the next forward needs them, and
returns. An update waits for the fetches that were queued before it, which may still read
the weights, scales its gradients (clipping), steps, rounds masters into the weights and
forgets the gradients. A slot that holds the chunk is stale from the moment the update is
queued. Who reads the weights next waits for the update of that very chunk and of no other:
a fetch of the pager, or, for weights that stay on the device, `Session.ready` when a module
above the blocks is entered. Where a node's ranks share the weights, an update has landed
when all of them have updated their shards: each then enters a barrier, asynchronously, and
a fetch waits for that one too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..runtime import HostWorker
from ..runtime.device import Event
from .host_chunks import HostChunk

Hyperparameters = dict[str, Any]
"""A param group without its params: lr, betas, eps, weight_decay, …"""

_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


class FusedAdamW(torch.optim.AdamW):
    """Fused AdamW of CPU tensors that calls the kernel at once.

    What torch does around it takes longer than the update of a small chunk, and needs
    the interpreter lock. `step` in the state is an int.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            amsgrad = group["amsgrad"]
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            states = [self._counted(param, amsgrad) for param in params]
            counts = {
                count: torch.tensor(float(count))
                for count in {state["step"] for state in states}
            }
            beta1, beta2 = group["betas"]
            torch._fused_adamw_(
                params,
                [param.grad for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["max_exp_avg_sq"] for state in states] if amsgrad else [],
                [counts[state["step"]] for state in states],
                lr=group["lr"],
                beta1=float(beta1),
                beta2=float(beta2),
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=amsgrad,
                maximize=group["maximize"],
            )

    def _counted(self, param: Tensor, amsgrad: bool) -> dict[str, Any]:
        """The state of a parameter whose next update begins."""
        state = self.state[param]
        if not state:
            names = ("exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * amsgrad)
            state.update(step=0, **{name: torch.zeros_like(param) for name in names})
        state["step"] += 1
        return state


class HostAdamW:
    """Updates the main parameters of host chunks, on the worker.

    Args:
        chunks: In the order in which the next forward needs them.
        group_of: Index of the param group of each parameter, by `id`.
        kind: `torch` or `deepspeed`.
    """

    def __init__(
        self,
        chunks: Sequence[HostChunk],
        group_of: Mapping[int, int],
        groups: Sequence[Hyperparameters],
        kind: str,
        worker: HostWorker,
    ) -> None:
        self._worker = worker
        make = _deepspeed_adam if kind == "deepspeed" else _torch_adamw
        # for each chunk also the indices of the groups of its optimizer
        self._parts: list[
            tuple[HostChunk, torch.optim.Optimizer | None, list[int]]
        ] = []
        for host in chunks:
            members: dict[int, list[Tensor]] = {}
            for index, main in zip(host.owned, host.mains, strict=True):
                group = group_of[id(host.params[index])]
                members.setdefault(group, []).append(main)
            own = [{**groups[g], "params": mains} for g, mains in members.items()]
            # the shard of a small chunk may be empty
            self._parts.append((host, make(own) if own else None, list(members)))
        self.load({})

    def submit(
        self,
        groups: Sequence[Hyperparameters],
        fetches: Event,
        prepare: Callable[[Sequence[Tensor]], None] | None,
        queued: Callable[[HostChunk], None],
    ) -> None:
        """Queue one update of every chunk that has gradients.

        Args:
            groups: Hyperparameters of this step; copied, the scheduler moves on.
            fetches: After the last copy out of the arena that was queued.
            prepare: Applied first to what has a gradient (clipping).
            queued: Called on the caller's thread for each chunk, just before.
        """
        frozen = _as_fused(groups)
        for host, optimizer, indices in self._parts:
            if host.used:
                queued(host)
                values = [frozen[index] for index in indices]
                update = partial(_update, host, optimizer, values, fetches, prepare)
                self._worker.submit(update, changes=host.chunk.index)

    def state(self) -> dict[int, dict[str, Any]]:
        """Optimizer state by `id` of a main parameter; drain the worker first."""
        return {
            id(main): {**state, "step": torch.tensor(float(state["step"]))}
            for _, optimizer, _ in self._parts
            if optimizer is not None
            for main, state in optimizer.state.items()
        }

    def load(self, state: Mapping[int, dict[str, Any]], copy: bool = True) -> None:
        """Replace all state, by `id` of a main parameter, whose dtype moments take.

        Without `copy`, moments on the host are taken over as they are.
        """
        for host, optimizer, _ in self._parts:
            if optimizer is None:
                continue
            optimizer.state.clear()
            for number, main in enumerate(host.mains):
                first = host.first_state(number)
                own = state.get(id(main))
                if first is not None:
                    # they stay where the other ranks can read them
                    given = own or {"step": 0.0}
                    for key, place in first.items():
                        place.copy_(given[key]) if key in given else place.zero_()
                    own = {**given, **first}
                if own is not None:
                    optimizer.state[main] = {
                        key: _own(key, value, main, copy and first is None)
                        for key, value in own.items()
                    }

    def state_bytes(self) -> int:
        """Bytes of the moments held on the host."""
        return sum(optimizer_bytes(optimizer) for _, optimizer, _ in self._parts)


def _update(
    host: HostChunk,
    optimizer: torch.optim.Optimizer | None,
    hyperparameters: Sequence[Hyperparameters],
    fetches: Event,
    prepare: Callable[[Sequence[Tensor]], None] | None,
) -> Any:
    # a fetch ahead may still be reading these weights
    fetches.synchronize()
    host.changes()
    mains = host.with_gradients()
    if prepare is not None:
        prepare(mains)
    if optimizer is not None:
        for group, own in zip(optimizer.param_groups, hyperparameters, strict=True):
            group.update(own)
        optimizer.step()
    published = host.publish()
    host.clear()
    return published


def optimizer_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of the tensors in an optimizer's state."""
    return sum(
        value.nbytes
        for state in (optimizer.state.values() if optimizer is not None else ())
        for value in state.values()
        if isinstance(value, Tensor)
    )


def _own(key: str, value: Any, main: Tensor, copy: bool) -> Any:
    if key == "step":
        return int(value)
    if isinstance(value, Tensor):
        return value.detach().to(device="cpu", dtype=main.dtype, copy=copy)
    return value


def _as_fused(groups: Sequence[Hyperparameters]) -> list[Hyperparameters]:
    # how the plain run computes is its affair; here it is fused
    return [
        {k: v for k, v in group.items() if k not in _IMPLEMENTATION} for group in groups
    ]


def _torch_adamw(groups: Sequence[Hyperparameters]) -> torch.optim.Optimizer:
    return FusedAdamW(_as_fused(groups))


def _deepspeed_adam(groups: Sequence[Hyperparameters]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    known = ("params", "lr", "betas", "eps", "weight_decay")
    return DeepSpeedCPUAdam(
        [{key: group[key] for key in known} for group in groups],
        adamw_mode=True,
        # moments in the dtype of what they update, as the plain run has them
        fp32_optimizer_states=False,
    )
