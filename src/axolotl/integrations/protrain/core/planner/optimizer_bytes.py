"""The state that an optimizer holds for each parameter, and what its update takes.

The optimizer itself takes steps over parameters on the meta device: the shapes of its state
do not depend on values, whatever its class.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..engine.recorded_step import is_elementwise, require_separable
from ..engine.state import state_tensors
from ..errors import FOREIGN_ERRORS, ConfigError
from .meta import without_global_hooks

_MANAGED_NUMEL = 100_000
"""From here on bitsandbytes' paged optimizers take managed memory."""
_OF_PARAMETERS = ("state", "param_groups")


@dataclass(frozen=True)
class OptimizerBytes:
    """See the attributes of the same names of `Workload`, and `require_separable`."""

    state_bytes: dict[str, tuple[int, ...]] | None
    managed_bytes: dict[str, int]
    update_copies: float
    update_parameter_copies: float
    elementwise: bool = True
    separable: bool = False

    @property
    def in_workload(self) -> dict[str, Any]:
        """Return what a `Workload` has of it."""
        return {key: value for key, value in vars(self).items() if key != "separable"}


ADAMW = OptimizerBytes(None, {}, 1.0, 0.0, separable=True)
"""Two copies of what trains, and one more during the update."""


def optimizer_bytes(
    make: Callable[[], torch.optim.Optimizer],
    name: str,
    model: nn.Module,
    on_cpu: bool,
    assumptions: list[str],
    mastered: Collection[str] = (),
) -> OptimizerBytes:
    """Measure the optimizer that `make` builds over what trains of a model on meta.

    It is taken for as large as AdamW where it cannot be built or run there; `assumptions`
    says so. What is `mastered` of 16 bits is updated in fp32.
    """
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    narrow = {n: p.data for n, p in named.items() if n in mastered and p.itemsize == 2}
    try:
        for weight in narrow:
            named[weight].data = narrow[weight].float()
        with _without_values(), without_global_hooks():
            optimizer = make()
            found = _probed(optimizer, model, named, on_cpu)
        found = replace(found, elementwise=is_elementwise(type(optimizer)))
        with suppress(ConfigError):
            require_separable(optimizer)
            found = replace(found, separable=True)
        return found
    except (*FOREIGN_ERRORS, ImportError) as error:
        assumptions.append(
            f"optimizer {name}: as large as AdamW, two copies of what trains and one "
            f"more during the update, for it gave {type(error).__name__} without weights"
        )
        return replace(ADAMW, separable=False)
    finally:
        for weight, param in named.items():
            param.grad = None
            param.data = narrow.get(weight, param.data)


def _probed(
    optimizer: Any, model: nn.Module, named: Mapping[str, nn.Parameter], on_cpu: bool
) -> OptimizerBytes:
    """Probe two parameters of each kind and two more: others would be the same again.

    Temporaries that come one after the other are highest between two large neighbours.
    """
    managed = getattr(optimizer, "is_paged", False) and not on_cpu
    fused = _prepare(optimizer, on_cpu)
    kinds = _kinds(optimizer, model, named)
    firsts = [named[names[0]] for names in kinds]
    few, every = (
        [named[name] for names in kinds for name in names[:most]] for most in (2, 4)
    )
    _taken(optimizer, every)
    own = {k: v for k, v in vars(optimizer).items() if k not in _OF_PARAMETERS}
    shared = {id(tensor) for tensor in state_tensors(own).values()}
    state_bytes, managed_bytes = {}, {}
    for names, param in zip(kinds, firsts, strict=True):
        found = state_tensors(optimizer.state.get(param, {})).values()
        # a step count that no kernel reads is a number of the host's
        tensors = [
            tensor
            for tensor in found
            if id(tensor) not in shared and (on_cpu or fused or tensor.is_meta)
        ]
        state_bytes.update(dict.fromkeys(names, tuple(t.nbytes for t in tensors)))
        if managed and param.numel() >= _MANAGED_NUMEL:
            nbytes = sum(t.nbytes for t in tensors if t.shape == param.shape)
            managed_bytes.update(dict.fromkeys(names, nbytes))
    if fused:
        return OptimizerBytes(state_bytes, managed_bytes, 0.0, 0.0)
    if not on_cpu and type(optimizer).__module__.startswith("torchao"):
        # compiled into kernels that may hold both moments in fp32
        return OptimizerBytes(state_bytes, managed_bytes, 0.0, 4.0)
    if len(few) == len(every):
        few = firsts
    # where others have no gradient, these are neighbours
    pair = sorted(few, key=lambda param: param.nbytes)[-2:]
    taken = [(_taken(optimizer, params), _nbytes(params)) for params in (few, pair)]
    added = _taken(optimizer, every) - taken[0][0]
    copies = max(0, added) / (_nbytes(every) - _nbytes(few) or 1)
    rest = max(0.0, *(there - copies * nbytes for there, nbytes in taken))
    largest = max(param.nbytes for param in firsts)
    return OptimizerBytes(state_bytes, managed_bytes, copies, rest / largest)


def _kinds(
    optimizer: Any, model: nn.Module, named: Mapping[str, nn.Parameter]
) -> list[list[str]]:
    """Names of parameters that every optimizer treats alike."""
    group_of = {
        param: index
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    kinds: dict[Any, list[str]] = {}
    for name, param in named.items():
        module, _, attribute = name.rpartition(".")
        owner = type(model.get_submodule(module))
        what = param.shape, param.stride(), param.dtype, group_of.get(param)
        kinds.setdefault((owner, attribute, *what), []).append(name)
    return list(kinds.values())


def _nbytes(params: Iterable[nn.Parameter]) -> int:
    return sum(param.nbytes for param in params)


def _taken(optimizer: Any, params: Iterable[nn.Parameter]) -> int:
    """Take a step with gradients of these alone: what its temporaries take at most."""
    params = list(params)
    for param in params:
        param.grad = torch.empty_like(param)
    with _Temporaries() as temporaries:
        optimizer.step()
    for param in params:
        param.grad = None
    return temporaries.peak


def _prepare(optimizer: Any, on_cpu: bool) -> bool:
    """Let it run without weights; True where one kernel does the whole update."""
    fused = False
    if hasattr(optimizer, "is_paged"):
        # there is no managed memory here
        optimizer.is_paged = False
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    for group in optimizer.param_groups:
        if "triton" in group:
            fused |= not on_cpu and group["triton"] is not False
            group["triton"] = False
        elif "foreach" in group:
            fused |= bool(group.get("fused"))
            # as torch does on a GPU where nobody asks for either
            group["foreach"] = not on_cpu and group["foreach"] is not False
            if "fused" in group:
                group["fused"] = False
    return fused


@contextmanager
def _without_values() -> Iterator[None]:
    """Nothing is compiled, and generators are the CPU's."""
    generator = torch.Generator
    with (
        patch.object(torch, "Generator", lambda device=None: generator()),
        torch.compiler.set_stance("force_eager"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


class _Temporaries(TorchDispatchMode):
    """Bytes that operators make on the meta device and that end; reads give 1."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        output = func(*args, **(kwargs or {}))
        if not func.is_view:
            given = {t.untyped_storage()._cdata for t in _on_meta((args, kwargs))}
            for tensor in _on_meta(output):
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._ended, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return output

    def _ended(self, nbytes: int) -> None:
        self.live -= nbytes


def _on_meta(values: Any) -> Iterator[Tensor]:
    leaves = tree_leaves(values)
    return (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_meta)
