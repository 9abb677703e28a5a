"""Bindings to modules, hooks and autograd that know nothing of a training step."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
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
    one made is the outermost, and is removed first. Code that somebody compiles calls
    it as it is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._inner: Callable[..., Any] | None = module._compiled_call_impl
        # without one, Dynamo puts the module's `forward` in the place of its call
        self._hook = module.register_forward_pre_hook(Hook(nothing))
        self._set(self)

    @torch.compiler.disable
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
        self._hook.remove()
        outermost: Any = self._module._compiled_call_impl
        if outermost is self:
            self._set(self._inner)

    def _set(self, call: Callable[..., Any] | None) -> None:
        if call is not None:
            self._module._compiled_call_impl = call
        else:
            # the class has None
            del self._module._compiled_call_impl


Reached = Callable[[Any], None]
"""Hook of a node, of which it gets the gradients."""
_MOST_CALLS = 1 << 16


class LossGraph:
    """Looks at the graph of each loss that `torch.autograd.backward` is given, until `remove`.

    It refuses one that reads paged weights outside of the passes through the model, as a
    penalty does. Where one comes into a paged block in its middle, because what the block
    returns is not in it, backward says so there.

    Attributes:
        paged: Names of trained weights whose values are elsewhere between two passes.
    """

    _all: ClassVar[list[LossGraph]] = []

    def __init__(self) -> None:
        self.paged: dict[Tensor, str] = {}
        # sequence numbers between which nodes lie that a pass since the last step has made
        self._passes: list[tuple[int, int]] = []
        # the same of calls of blocks, in order
        self._calls: list[tuple[int, int, Reached | None]] = []
        # each thread has numbers of its own
        self._threads = set[int]()

    def watch(self) -> LossGraph:
        """Look at each backward from here on."""
        if not self._all and torch.autograd.backward is not _looked_at:
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
        if made > entered and (self.paged or self._calls):
            self._passes.append((entered, made))

    def block_called(self, entered: int, reached: Reached | None) -> None:
        """Know the nodes of a block's call; `reached` is told when backward comes to them."""
        made = torch.autograd._get_sequence_nr()
        if made > entered:
            # a loop may go forward for ever without a step
            del self._calls[:-_MOST_CALLS]
            self._calls.append((entered, made, reached))
            self._threads.add(threading.get_ident())

    def drop_passes(self) -> None:
        """Let go of passes: a step of the optimizer ends the use of their graphs."""
        self._passes.clear()
        self._calls.clear()
        self._threads.clear()

    def look_at(self, roots: Sequence[Tensor | GradientEdge]) -> None:
        """Hook where a loss comes into blocks.

        Raises:
            AccessError: Some node apart from passes reads a paged weight.
        """
        nodes: list[Any] = [
            root.node if isinstance(root, GradientEdge) else root.grad_fn
            for root in (roots if self.paged or self._calls else ())
        ]
        seen = {None, *nodes}
        while nodes:
            node: Any = nodes.pop()
            if node is None:
                continue
            name = self.paged.get(getattr(node, "variable", None))  # type: ignore[arg-type]
            if name is not None:
                raise AccessError(
                    f"{name}: the loss reads this weight outside of the model's forward, "
                    "as a penalty does, and it is paged: its values were not there. "
                    "Compute it in the forward, let `page` know it by `loss=`, or use "
                    "protrain_force_all_persistent: true."
                )
            number = node._sequence_nr()
            call = self._call_of(number)
            if call is not None:
                if (reached := call[2]) is not None:
                    node.register_prehook(reached)
                continue
            new = {following for following, _ in node.next_functions} - seen
            if any(first <= number < end for first, end in self._passes):
                # a pass reads weights where they are
                new = {own for own in new if not hasattr(own, "variable")}
            seen |= new
            nodes += new

    def _call_of(self, number: int) -> tuple[int, int, Reached | None] | None:
        """The call that made the node of this number, if a block did."""
        at = bisect_right(self._calls, number, key=itemgetter(0)) - 1
        if at < 0 or number >= self._calls[at][1] or len(self._threads) > 1:
            return None
        return self._calls[at]


_PLAIN = torch.autograd.backward


class _Looking(threading.local):
    """Graph task in which this thread has looked at a loss, -1 outside of a backward."""

    task: int | None = None


_looking = _Looking()


def _looked_at(tensors: Any, *args: Any, **kwargs: Any) -> None:
    is_one = isinstance(tensors, (Tensor, GradientEdge))
    roots = (tensors,) if is_one else tuple(tensors)
    task, outer = torch._C._current_graph_task_id(), _looking.task
    if task == outer:
        # called by a wrapper that somebody has kept around it
        _PLAIN(roots, *args, **kwargs)
        return
    # a reentrant checkpoint goes backward in a graph that a pass has made
    for graph in () if inside_backward() else LossGraph._all:
        graph.look_at(roots)
    _looking.task = task
    try:
        vars(_looked_at)["plain"](roots, *args, **kwargs)
    finally:
        _looking.task = outer


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
        # of no loss, and its number is that of another node
        _PLAIN(end, end.detach())


def inside_backward() -> bool:
    """True on a thread that the autograd engine is running (as in torch.utils.checkpoint)."""
    return torch._C._current_graph_task_id() != -1
