"""Bindings to modules, hooks and autograd that know nothing of a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ..errors import AccessError


class Removable(Protocol):
    """A binding that can be undone, as torch's hook handles are."""

    def remove(self) -> None:
        """Undo the binding."""


class Hook:
    """A module's hook, which a copy of the module does not take along.

    `copying` is called before a copy: the parameters of the module's children are not
    copied yet, its own are.
    """

    def __init__(
        self, call: Callable[..., Any], copying: Callable[[], None] = lambda: None
    ) -> None:
        self._call, self._copying = call, copying

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, _memo: Any) -> Hook:
        self._copying()
        return Hook(nothing)

    def __reduce__(self) -> Any:
        self._copying()
        return Hook, (nothing,)


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing: the hook of a copied module."""


class AroundCall:
    """Surrounds each call of a module, hooks included, until `remove`.

    It stands where `nn.Module.compile` puts what a call runs: outside of all hooks,
    global and later ones too, and a copy of the module does not take it along. The last
    one made is the outermost, and is removed first.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._inner: Callable[..., Any] | None = module._compiled_call_impl
        self._set(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self._inner or self._module._call_impl, args, kwargs)

    def around(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make one `call`; may be called again in backward."""
        raise NotImplementedError

    def require_bound(self) -> None:
        """Raise AccessError if `compile` of a module has taken the place since."""
        outer = self._module._compiled_call_impl
        while outer is not self:
            if not isinstance(outer, AroundCall):
                raise AccessError(
                    f"{type(self._module).__name__}.compile() was called on a block in "
                    "the middle of training, which is paged around its calls. Compile "
                    "blocks with `torch_compile: true`, or before training begins."
                )
            outer = outer._inner

    def remove(self) -> None:
        """Undo the binding."""
        if self._module._compiled_call_impl is self:
            self._set(self._inner)

    def _set(self, call: Callable[..., Any] | None) -> None:
        if call is not None:
            self._module._compiled_call_impl = call
        else:
            # the class has None
            del self._module._compiled_call_impl


class LossGraph:
    """Refuses, at each `torch.autograd.backward`, a loss that reads paged weights outside of
    the passes through the model, as a penalty does; until `remove`.

    Attributes:
        paged: Names of trained weights whose values are elsewhere between two passes.
        passes: Sequence numbers between which nodes lie that a pass since the last step has
            made.
    """

    _all: ClassVar[list[LossGraph]] = []

    def __init__(self) -> None:
        self.paged: dict[Tensor, str] = {}
        self.passes: list[tuple[int, int]] = []

    def watch(self) -> LossGraph:
        """Look at each backward from here on."""
        if not self._all:
            vars(_looked_at)["plain"] = torch.autograd.backward
            torch.autograd.backward = _looked_at
        self._all.append(self)
        return self

    def remove(self) -> None:
        """Undo the binding."""
        self._all.remove(self)
        # somebody may have wrapped it since, and calls it still
        if not self._all and torch.autograd.backward is _looked_at:
            torch.autograd.backward = vars(_looked_at)["plain"]

    def pass_made(self, entered: int) -> None:
        """Know the nodes of a pass, which began at this sequence number."""
        made = torch.autograd._get_sequence_nr()
        if made > entered and self.paged:
            self.passes.append((entered, made))

    def require_known(self, roots: Sequence[Tensor | GradientEdge]) -> None:
        """Raise AccessError if some node apart from passes reads a paged weight."""
        nodes: list[Any] = [
            root.node if isinstance(root, GradientEdge) else root.grad_fn
            for root in (roots if self.paged else ())
        ]
        seen = set(nodes)
        while nodes:
            node: Any = nodes.pop()
            name = self.paged.get(getattr(node, "variable", None))  # type: ignore[arg-type]
            if name is not None:
                raise AccessError(
                    f"{name}: the loss reads this weight outside of the model's forward, "
                    "as a penalty does, and it is paged: its values were not there. "
                    "Compute it in the forward, let `page` know it by `loss=`, or use "
                    "protrain_force_all_persistent: true."
                )
            number = -1 if node is None else node._sequence_nr()
            if node is None or any(a <= number < b for a, b in self.passes):
                continue
            new = {following for following, _ in node.next_functions} - seen
            seen |= new
            nodes += new


def _looked_at(tensors: Any, *args: Any, **kwargs: Any) -> None:
    is_one = isinstance(tensors, (Tensor, GradientEdge))
    roots = (tensors,) if is_one else tuple(tensors)
    # a reentrant checkpoint goes backward in a graph that a pass has made
    for graph in () if inside_backward() else LossGraph._all:
        graph.require_known(roots)
    vars(_looked_at)["plain"](roots, *args, **kwargs)


def drop_ended_backward(device: torch.device) -> None:
    """Let go of the graph of a backward pass that an error ended.

    torch keeps its nodes that were ready, in a queue of the calling thread and in one of
    the device's, until some backward comes past them: here one whose only node sorts
    last, without memory, which may be short.
    """
    for queue in (torch.device("cpu"), device):
        with torch.inference_mode(False), torch.enable_grad():
            end = torch.empty(0, device=queue, requires_grad=True) * 1
        end.grad_fn._set_sequence_nr(0)  # type: ignore[union-attr]
        end.backward(end.detach())


def inside_backward() -> bool:
    """True on a thread that the autograd engine is running (as in torch.utils.checkpoint)."""
    return torch._C._current_graph_task_id() != -1
