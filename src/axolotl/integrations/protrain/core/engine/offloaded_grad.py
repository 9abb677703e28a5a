"""Placeholders in `.grad` of parameters whose gradients are in host memory.

See Note [Who looks between two passes] in full_params.py.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import AccessError
from ..layout.tensors import tensors_in

if TYPE_CHECKING:
    from .gradients import Gradients
    from .host_chunks import HostChunk


class OffloadedGrad(Tensor):
    """A tensor without memory, `.grad` of a parameter whose gradient is on the host.

    Raises:
        AccessError: Somebody computes with it.
    """

    parameter_name: str
    awaited_by: int = -1
    """The backward pass that is about to add a gradient."""
    arrived: Tensor | None = None
    """That gradient."""

    @staticmethod
    def __new__(cls, name: str, param: Tensor) -> OffloadedGrad:
        made = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device
        )
        made.parameter_name = name
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"OffloadedGrad({self.parameter_name!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = args[0] if func is torch.ops.aten.add_.Tensor else None
        backward = torch._C._current_graph_task_id()
        if isinstance(own, cls) and own.arrived is None:
            if own.awaited_by == backward != -1:
                own.arrived = args[1].clone()
                return own
        name = next(
            t.parameter_name
            for t in tensors_in([args, kwargs or {}])
            if isinstance(t, cls)
        )
        raise AccessError(
            f"{name}: the gradient of this weight is on the host. Read or change "
            "gradients in an event of a callback (on_pre_optimizer_step), or inside "
            "`with trainer.protrain.full_params():`."
        )


class GradPlaceholders:
    """Keeps the `.grad` of a chunk's parameters: placeholders, or for a while gradients.

    A parameter without a gradient has None, as without paging; who sets `.grad` to None
    or to a tensor is taken at their word.

    Attributes:
        placeholders: One for each parameter.
    """

    def __init__(self, host: HostChunk) -> None:
        self.host = host
        self.placeholders = [
            OffloadedGrad(spec.name, param)
            for spec, param in zip(host.chunk.tensors, host.params, strict=True)
        ]
        self._spent: set[int] = set()
        # where a placeholder made room
        self._emptied: set[int] = set()
        self._shown: dict[int, Tensor] = {}
        self._lent: dict[int, weakref.ref[Any]] = {}

    def put_agreed(self) -> None:
        """Put placeholders where all ranks have agreed that there is a gradient."""
        for index in self.host.main_grads.present:
            if self.host.params[index].grad is None:
                self._spent.discard(index)
                self.put(index)

    def put(self, index: int) -> None:
        """Let the `.grad` of a parameter be its placeholder."""
        param = self.host.params[index]
        if self.placeholders[index].device != param.device:
            # torch takes no other; a shown parameter may be on the host
            self.placeholders[index] = OffloadedGrad(
                self.placeholders[index].parameter_name, param
            )
        param.grad = self.placeholders[index]

    def make_room(self, index: int, gradients: Gradients, is_last: bool) -> None:
        """Let `.grad` be None, or autograd would add to what stands there; where hooks
        of others come before it does, a placeholder that takes what is added.

        A gradient that somebody has set replaces what `gradients` has sent, and None
        drops it.
        """
        param = self.host.params[index]
        if param.grad is not self.placeholders[index]:
            if param.grad is not None:
                gradients.settle_own()
            self.hide_one(index)
            if param.grad is None:
                gradients.drop(self.host, index)
        self.require_unspent(index)
        self._emptied.discard(index)
        if param.grad is not None and is_last:
            self._emptied.add(index)
            param.grad = None
        elif param.grad is not None:
            self.placeholders[index].awaited_by = torch._C._current_graph_task_id()

    def arrived(self, index: int) -> Tensor | None:
        """The gradient that autograd has made, None where a node gave none."""
        gradient, placeholder = self.host.params[index].grad, self.placeholders[index]
        if gradient is placeholder:
            gradient, placeholder.arrived = placeholder.arrived, None
            placeholder.awaited_by = -1
            return gradient
        if gradient is not None or index in self._emptied:
            self.put(index)
        return gradient

    @property
    def is_replaced(self) -> bool:
        """Whether some `.grad` is a tensor that somebody has set."""
        return any(
            param.grad is not None and param.grad is not placeholder
            for param, placeholder in zip(
                self.host.params, self.placeholders, strict=True
            )
        )

    def take_back(self) -> None:
        """Take over what `.grad` was set to, None included; no update reads the sums."""
        for index, param in enumerate(self.host.params):
            self.hide_one(index)
            if param.grad is None:
                self.host.main_grads.present.discard(index)

    def spend(self) -> None:
        """An update has what there is: on the host it is gone then."""
        for index, param in enumerate(self.host.params):
            if param.grad is not None:
                self.require_unspent(index)
                self._spent.add(index)

    def require_unspent(self, index: int) -> None:
        """Raise AccessError if a gradient, still there, is that of the last update."""
        if index in self._spent:
            raise AccessError(
                f"{self.placeholders[index].parameter_name}: the gradient of the last "
                "update is still there, and on the host it is not used twice. Call "
                "`zero_grad` after each step."
            )

    def show(self) -> None:
        """Let `.grad` be the gradient, clipped or not, where there is one."""
        for index, param in enumerate(self.host.params):
            if param.grad is self.placeholders[index]:
                total = self.host.total(index)
                # it may be changed in place
                self.host.main_grads.norms.pop(index, None)
                if not self.host.shared:
                    total, self._lent[index] = _lend(total)
                param.grad = None
                # a copy, where the parameter is on the device or has a master
                self._shown[index] = total.to(param.device, param.dtype)
                param.grad = self._shown[index]

    def keep_replaced(self) -> None:
        """What stands in for another gradient may be that of a third parameter."""
        for index, shown in self._shown.items():
            param = self.host.params[index]
            if param.grad is not None and param.grad is not shown:
                param.grad = param.grad.clone()

    def hide(self) -> None:
        """`hide_one` of all parameters."""
        for index in range(len(self.placeholders)):
            self.hide_one(index)

    def hide_one(self, index: int) -> None:
        """Take over what a parameter's `.grad` was set or changed to.

        Raises:
            AccessError: It was set where no update will read it, or somebody keeps a
                tensor whose memory is that of the next gradient.
        """
        param, placeholder = self.host.params[index], self.placeholders[index]
        now, shown = param.grad, self._shown.pop(index, None)
        if now is placeholder:
            return
        if now is not shown or now is None:
            self._spent.discard(index)
        if now is None and shown is None:
            return
        self._accept(index, now, now is shown)
        param.grad = None
        if now is not None:
            self.put(index)
        lent = self._lent.pop(index, None)
        del now, shown
        if lent is not None and lent() is not None:
            gc.collect()
            if lent() is not None:
                raise AccessError(
                    f"{placeholder.parameter_name}: somebody keeps its gradient, or a view "
                    "of it, whose memory the next gradient takes. Keep a clone."
                )

    def _accept(self, index: int, now: Tensor | None, was_shown: bool) -> None:
        host, waits = self.host, index in self.host.waiting
        if now is None:
            host.waiting.discard(index)
        elif waits:
            total = host.total(index)
            if not torch.equal(now, total.to(now.device, now.dtype)):
                host.replace(index, now)
        elif not was_shown:
            if host.shared:
                raise AccessError(
                    f"{self.placeholders[index].parameter_name}: its `.grad` was set where "
                    "the ranks have no gradients. Set it after backward."
                )
            host.main_grads.add(index, now.cpu())


def _lend(tensor: Tensor) -> tuple[Tensor, weakref.ref[Any]]:
    """The same memory as a storage of its own, and what tells whether that still lives."""
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    # it must not outlive the memory
    memory.owner = tensor
    lent = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return lent, weakref.ref(memory)
