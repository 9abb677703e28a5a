"""Tie the pager to a model: around the calls of its blocks, and with torch's hooks.

Forward: a block's window is open while it is called, hooks of others included. Backward:
a hook on the nodes of the block's outputs opens it, the next block's opening closes it
(Note [The end of a window in backward] in pager.py); only on nodes younger than the
block's forward, because a tensor that it merely hands on belongs to the backward of its
producer. Under recompute the block is called again inside the backward pass and finds the
window open.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..errors import AccessError
from ..layout import Direction
from ..layout.tensors import tensors_in
from ..types import Chunk, Layout
from .pager import Pager


class Removable(Protocol):
    """What undoes a binding, as torch's hook handles do."""

    def remove(self) -> None:
        """Undo it."""


class Hook:
    """A module's hook, which a copy of the module does not take along.

    `copying` is called before: the parameters of the module's children are not copied
    yet, its own are.
    """

    def __init__(
        self, call: Callable[..., Any], copying: Callable[[], None] = lambda: None
    ) -> None:
        self._call, self._copying = call, copying

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, _memo: Any) -> Hook:
        self._copying()
        return Hook(_nothing)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """What is left of a hook in a copy."""


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
        """Raises: AccessError: `compile` of a module has taken the place since."""
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


class Window(AroundCall):
    """Opens a block's window for its forward and backward.

    `left` is called when backward has come past a block, with that block's number, and
    `ended` after a forward.
    """

    def __init__(
        self,
        block: nn.Module,
        index: int,
        pager: Pager,
        left: Callable[[int], None],
        ended: Callable[[], None],
    ) -> None:
        self._index, self._pager = index, pager
        self._left, self._ended = left, ended
        super().__init__(block)

    def around(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        index, pager = self._index, self._pager
        if _inside_backward():
            # a recomputation; the next block's opening closes the window
            pager.open(index, Direction.BACKWARD)
            return call(*args, **kwargs)
        trains = torch.is_grad_enabled()
        direction = Direction.FORWARD if trains else Direction.INFERENCE
        try:
            pager.open(index, direction)
            entered = torch.autograd._get_sequence_nr()
            output = call(*args, **kwargs)
        finally:
            pager.close(index, direction)
            self._ended()
        if not trains:
            return output
        for tensor in (output,) if type(output) is Tensor else tensors_in(output):
            node = tensor.grad_fn
            # an older node is not this block's: it only hands the tensor on
            if node is not None and node._sequence_nr() >= entered:
                # a node's hook costs half of a tensor's and runs at the same time
                node.register_prehook(self._open_backward)
        return output

    def _open_backward(self, _gradients: Any) -> None:
        _require_first_order(self._index, self._pager)
        before = self._pager.window
        if before != self._index:
            self._pager.open(self._index, Direction.BACKWARD)
            if before is not None:
                self._left(before)


def announce_copies(module: nn.Module, copying: Callable[[], None]) -> Removable:
    """Call `copying` when a module is about to be copied."""
    # a table that no forward reads
    return module.register_state_dict_pre_hook(Hook(_nothing, copying))


def _require_first_order(index: int, pager: Pager) -> None:
    # with gradients enabled this backward pass has a graph of its own
    if torch.is_grad_enabled() and pager.pages(index):
        raise AccessError(
            f"block {index} is paged, and `create_graph=True` would let a second "
            "backward pass read its weights when they have left. Use "
            "protrain_force_all_persistent: true."
        )


def attach_entry(
    model: nn.Module,
    layout: Layout,
    enter: Callable[[nn.Module], None],
    leave: Callable[[nn.Module], None],
    copying: Callable[[nn.Module], None],
) -> list[Removable]:
    """Call `enter` before any module through which a forward can reach the weights, and
    `leave` after it; `copying` before such a module is copied.

    Ancestors of the blocks, because a fused loss reads the head without calling it, and
    the owners of weights outside blocks, for direct calls. Nothing inside a block, where
    a window is open: its weights may be tied to others outside.
    """

    inside = tuple(f"{block.name}." for block in layout.blocks)
    names: list[str] = []
    for block in layout.blocks:
        parts = block.name.split(".")
        names += (".".join(parts[:depth]) for depth in range(len(parts)))
    for chunk in layout.chunks:
        if chunk.block is None and chunk.trainable:
            owners = (spec.name.rpartition(".")[0] for spec in chunk.tensors)
            names += (o for o in owners if not f"{o}.".startswith(inside))
    handles: list[Removable] = []
    for module in map(model.get_submodule, dict.fromkeys(names)):
        hook = Hook(lambda module, *_: enter(module), partial(copying, module))
        handles.append(module.register_forward_pre_hook(hook))
        hook = Hook(lambda module, *_: leave(module))
        handles.append(module.register_forward_hook(hook, always_call=True))
    return handles


class StateAccess(NamedTuple):
    """What is called around reads and loads of the state of host-kept chunks.

    Attributes:
        before_read: With the host tensors that will be read.
        before_load: With those that a load will change.
        loaded: With their chunk, after a load, which has also written through the
            parameters into whatever slot they point at.
        is_shown: Whether the parameters themselves show the truth now.
        copying: With a module whose parameters have been copied as they are.
    """

    before_read: Callable[[Collection[Tensor]], None]
    before_load: Callable[[Collection[Tensor]], None]
    loaded: Callable[[Chunk], None]
    is_shown: Callable[[], bool]
    copying: Callable[[nn.Module], None]


def attach_state_dict(
    owner: nn.Module, chunk: Chunk, host: Mapping[str, Tensor], access: StateAccess
) -> list[Removable]:
    """Let reads and writes of a module's state reach the host copies of a chunk.

    `host` has them by parameter name relative to `owner`.
    """

    def hidden() -> Mapping[str, Tensor]:
        return {} if access.is_shown() else host

    def settle(_module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        access.before_read(host.values())

    def read(
        _module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        for name, tensor in hidden().items():
            if prefix + name in state:
                state[prefix + name] = tensor

    @torch.no_grad()
    def write(
        _module: nn.Module, state: Mapping[str, Any], prefix: str, *_rest: Any
    ) -> None:
        access.before_load(host.values())
        for name, tensor in hidden().items():
            if prefix + name in state:
                tensor.copy_(state[prefix + name])

    def after_write(_module: nn.Module, _incompatible: Any) -> None:
        access.loaded(chunk)

    return [
        owner.register_state_dict_pre_hook(Hook(settle)),
        owner.register_state_dict_post_hook(Hook(read, partial(access.copying, owner))),
        owner.register_load_state_dict_pre_hook(Hook(write)),
        owner.register_load_state_dict_post_hook(Hook(after_write)),
    ]


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


def _inside_backward() -> bool:
    """True on a thread that the autograd engine is running (as in torch.utils.checkpoint)."""
    return torch._C._current_graph_task_id() != -1
