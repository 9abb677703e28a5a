"""AdamW on the host, chunk by chunk, on the worker thread.

The arithmetic is that of `torch.optim.AdamW(fused=True)` on CPU tensors, one tensor a
parameter as in the plain run, so the result has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..runtime import HostWorker
from ..runtime.device import Event
from .host_chunks import HostChunk, ShardedChunk

Hyperparameters = dict[str, Any]
"""A param group without its params: lr, betas, eps, weight_decay, …"""

HOST_OPTIMIZERS = ("torch", "deepspeed")

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
    """Updates the leaves of host chunks.

    Args:
        chunks: In the order in which the next forward needs them.
        group_of: Index of the param group of each leaf, by `id(leaf)`.
        groups: Hyperparameters of each param group.
        kind: `torch` or `deepspeed`.
        worker: Where updates run.
    """

    def __init__(
        self,
        chunks: Sequence[HostChunk | ShardedChunk],
        group_of: Mapping[int, int],
        groups: Sequence[Hyperparameters],
        kind: str,
        worker: HostWorker,
    ) -> None:
        self._chunks = chunks
        self._worker = worker
        make = _maker(kind)
        self._optimizers: list[torch.optim.Optimizer | None] = []
        self._group_indices: list[list[int]] = []
        for host in chunks:
            members: dict[int, list[Tensor]] = {}
            for leaf in host.leaves:
                members.setdefault(group_of[id(leaf)], []).append(leaf)
            self._group_indices.append(list(members))
            own = [{**groups[g], "params": leaves} for g, leaves in members.items()]
            # the shard of a small chunk may be empty
            self._optimizers.append(make(own) if own else None)
        self.load({})

    def submit(
        self,
        groups: Sequence[Hyperparameters],
        fetches: Event,
        prepare: Callable[[Sequence[Tensor]], None] | None,
        queued: Callable[[HostChunk | ShardedChunk], None],
    ) -> None:
        """Queue one update of every chunk that has gradients.

        Args:
            groups: Hyperparameters of this step; copied, the scheduler moves on.
            fetches: After the last copy out of the arena that was queued.
            prepare: Applied to the chunk's leaves first (clipping).
            queued: Called on the caller's thread for each chunk, just before.
        """
        # how the plain run computes is its affair; here it is fused
        frozen = [
            {k: v for k, v in group.items() if k not in _IMPLEMENTATION}
            for group in groups
        ]
        for host, optimizer, indices in zip(
            self._chunks, self._optimizers, self._group_indices, strict=True
        ):
            if not host.has_gradients:
                continue

            def update(
                host: HostChunk | ShardedChunk = host,
                optimizer: torch.optim.Optimizer | None = optimizer,
                indices: Sequence[int] = indices,
            ) -> Any:
                # a fetch ahead may still be reading these weights
                fetches.synchronize()
                host.changes()
                if prepare is not None:
                    prepare(host.leaves)
                if optimizer is not None:
                    groups = zip(optimizer.param_groups, indices, strict=True)
                    for group, index in groups:
                        group.update(frozen[index])
                    optimizer.step()
                published = host.publish()
                host.clear()
                return published

            queued(host)
            self._worker.submit(update, changes=host.chunk.index)

    def state(self) -> dict[int, dict[str, Any]]:
        """Optimizer state by `id(leaf)`; drain the worker first."""
        return {
            id(leaf): {**state, "step": torch.tensor(float(state["step"]))}
            for optimizer in filter(None, self._optimizers)
            for leaf, state in optimizer.state.items()
        }

    def load(self, state: Mapping[int, dict[str, Any]], copy: bool = True) -> None:
        """Replace the state of all leaves, by `id(leaf)`; moments take the leaf's dtype.

        Without `copy`, moments on the host are taken over as they are.
        """
        for host, optimizer in zip(self._chunks, self._optimizers, strict=True):
            if optimizer is None:
                continue
            optimizer.state.clear()
            for number, leaf in enumerate(host.leaves):
                first = host.first_state(number)
                own = state.get(id(leaf))
                if first is not None:
                    # they stay where the other ranks can read them
                    given = own or {"step": 0.0}
                    for key, place in first.items():
                        place.copy_(given[key]) if key in given else place.zero_()
                    own = {**given, **first}
                if own is not None:
                    optimizer.state[leaf] = {
                        key: _own(key, value, leaf, copy and first is None)
                        for key, value in own.items()
                    }

    def state_bytes(self) -> int:
        """Bytes of the moments held on the host."""
        return sum(
            value.nbytes
            for optimizer in filter(None, self._optimizers)
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )


def _own(key: str, value: Any, leaf: Tensor, copy: bool) -> Any:
    if key == "step":
        return int(value)
    if isinstance(value, Tensor):
        return value.detach().to(device="cpu", dtype=leaf.dtype, copy=copy)
    return value


def _maker(kind: str) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    if kind == "torch":
        return _torch_adamw
    if kind == "deepspeed":
        return _deepspeed_adam
    raise ConfigError(
        f"protrain_cpu_optimizer: {kind!r} is not one of {', '.join(HOST_OPTIMIZERS)}"
    )


def _torch_adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    own = [
        {k: v for k, v in group.items() if k not in _IMPLEMENTATION} for group in groups
    ]
    return FusedAdamW(own)


def _deepspeed_adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError as error:
        raise ConfigError(
            "protrain_cpu_optimizer: deepspeed needs the package deepspeed "
            "(pip install 'axolotl-protrain[deepspeed]')"
        ) from error
    known = ("params", "lr", "betas", "eps", "weight_decay")
    return DeepSpeedCPUAdam(
        [{key: group[key] for key in known} for group in groups],
        adamw_mode=True,
        # moments in the dtype of what they update, as the plain run has them
        fp32_optimizer_states=False,
    )
