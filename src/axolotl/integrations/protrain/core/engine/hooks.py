"""Translate torch's hooks into calls of `Step`, which knows what has to happen.

Forward: `AroundBlock` surrounds the call of a block, hooks of others included. Backward: a
hook on the nodes of the block's outputs says that backward has reached it; only on nodes
younger than the block's forward, because a tensor that it merely hands on belongs to the
backward of its producer. A recomputation calls the block again inside the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import AccessError
from ..layout import Direction
from ..layout.packed import memory_of
from ..layout.tensors import Binding, map_tensors, tensors_in
from ..types import Chunk, Layout
from .access import StateAccess
from .calls import (
    AroundCall,
    Hook,
    Removable,
    inside_backward,
    nothing,
)
from .host_chunks import HostChunk
from .step import Step


class AroundBlock(AroundCall):
    """Tells `Step` of each forward, backward and recomputation of a block."""

    def __init__(
        self, block: nn.Module, index: int, step: Step, recomputes: bool
    ) -> None:
        self._index, self._step, self._recomputes = index, step, recomputes
        super().__init__(block)

    def around(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        index, step = self._index, self._step
        trains = torch.is_grad_enabled()
        if inside_backward():
            with step.block_inside_backward(index, stays=trains):
                entered = torch.autograd._get_sequence_nr()
                output = call(*args, **kwargs)
            if trains:
                # a reentrant checkpoint goes backward through what it has made
                step.loss_graph.pass_made(entered)
                output = self._await_backward(output, entered)[0]
            return output
        direction = Direction.FORWARD if trains else Direction.INFERENCE
        try:
            step.before_block(index, direction)
            entered = torch.autograd._get_sequence_nr()
            output = call(*args, **kwargs)
        finally:
            step.after_block(index, direction)
        if trains:
            reads = step.slots.is_paged(index) and not self._recomputes
            step.loss_graph.block_called(
                entered, self._backward_reaches if reads else None
            )
            if not step.inside_forward:
                step.loss_graph.pass_made(entered)
            output, newest = self._await_backward(output, entered)
            if newest < 0:
                self._require_no_graph(entered, (args, kwargs))
        return output

    def _await_backward(self, output: Any, entered: int) -> tuple[Any, int]:
        """Hook the nodes of a block's output; returns it and its newest node's number.

        What a hook of somebody else's has computed after the output goes backward before
        it: an alias of the output is younger, and makes backward come to the block first.
        """
        newest = self._hook_nodes(output, entered)
        made = torch.autograd._get_sequence_nr()
        if 0 <= newest < made - 1 and self._step.slots.is_paged(self._index):
            output = map_tensors(output, _alias)
            newest = self._hook_nodes(output, made)
        return output, newest

    def _hook_nodes(self, output: Any, entered: int) -> int:
        newest = -1
        for tensor in (output,) if type(output) is Tensor else tensors_in(output):
            # a view that is changed in place afterwards has another node, of its base
            every = (tensor, tensor._base) if tensor._is_view() else (tensor,)
            for own in every:
                node = own.grad_fn if own is not None else None
                # an older node is not this block's: it only hands the tensor on
                if node is not None and node._sequence_nr() >= entered:
                    # a node's hook costs half of a tensor's and runs at the same time
                    node.register_prehook(self._backward_reaches)
                    newest = max(newest, node._sequence_nr())
        return newest

    def _require_no_graph(self, entered: int, given: Any) -> None:
        made = torch.autograd._get_sequence_nr() > entered
        # a recomputation says by itself that backward has come
        if not made or self._recomputes or not self._step.slots.is_paged(self._index):
            return
        # a function of one's own takes a number even where nothing needs a gradient
        read = (*tensors_in(given), *self._module.parameters())
        if any(tensor.requires_grad for tensor in read):
            raise AccessError(
                f"block {self._index} is paged, and nothing that it returns comes from "
                "its own computation with gradients. Return tensors, in tuples, lists, "
                "mappings or dataclasses, not through an argument or attribute, or use "
                "protrain_force_all_persistent: true."
            )

    def _backward_reaches(self, _gradients: Any) -> None:
        self._step.backward_reaches(self._index)


def _alias(tensor: Tensor) -> Tensor:
    return tensor if tensor.grad_fn is None else tensor.view_as(tensor)


class GradientHooks:
    """Tells `Step` of each gradient of a chunk, before and after autograd adds it."""

    def __init__(self, host: HostChunk, step: Step) -> None:
        self._host, self._step = host, step
        self._backward, self._accumulates = -1, True
        for spec, param in zip(host.chunk.tensors, host.params, strict=True):
            if param._post_accumulate_grad_hooks:
                raise AccessError(
                    f"{spec.name}: a post-accumulate hook of somebody else's is there, "
                    "but the sum of this gradient is on the host. Use "
                    "`register_hook`, which sees each micro-batch, or an event of a "
                    "callback (on_pre_optimizer_step)."
                )
        self._before = list[RemovableHandle]()
        self._after = list[RemovableHandle]()
        for index, param in enumerate(host.params):
            trains = param.requires_grad
            # torch hooks nothing that is frozen, as LISA has blocks for some steps
            param.requires_grad = True
            arrives = partial(self._arrives, index, param)
            self._before.append(param.register_hook(arrives))
            is_ready = partial(self._is_ready, index)
            self._after.append(param.register_post_accumulate_grad_hook(is_ready))
            param.requires_grad = trains

    def remove(self) -> None:
        """Undo the binding."""
        for handle in (*self._before, *self._after):
            handle.remove()

    def _arrives(self, index: int, param: nn.Parameter, _gradient: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if self._backward != backward:
            self._backward, self._accumulates = backward, _accumulates(param)
        if self._accumulates:
            # a hook that looks at `.grad` finds it as it is before the pass
            last = next(reversed(param._backward_hooks or {}))
            is_last = last == self._before[index].id
            self._step.gradient_arrives(self._host, index, is_last)

    def _is_ready(self, index: int, _param: Tensor) -> None:
        self._step.gradient_ready(self._host, index)


def _accumulates(param: Tensor) -> bool:
    """Return whether the backward pass that runs ends in `.grad`; `torch.autograd.grad` calls
    the hooks of a leaf, too."""
    node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # so it answers for a leaf whose gradient is the result
        return False


def attach_entry(
    model: nn.Module, layout: Layout, step: Step, access: StateAccess
) -> list[Removable]:
    """Tell `step` of each forward of a module through which weights can be reached.

    Those are ancestors of the blocks, because a fused loss reads the head without calling
    it, and the owners of weights outside blocks, for direct calls. Nothing inside a block
    is among them: its weights may be tied to others outside.
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
        hook = Hook(
            lambda module, *_: step.forward_begins(module),
            partial(access.copying, module),
        )
        # before those of others, which may look at weights
        handles.append(module.register_forward_pre_hook(hook, prepend=True))
        hook = Hook(lambda module, *_: step.forward_ended(module))
        handles.append(module.register_forward_hook(hook, always_call=True))
    handles.append(step.loss_graph.watch())
    return handles


def announce_copies(module: nn.Module, access: StateAccess) -> Removable:
    """Tell `access` when a module is about to be copied."""
    # a table that no forward reads
    hook = Hook(nothing, partial(access.copying, module))
    return module.register_state_dict_pre_hook(hook)


class StateHooks:
    """Binds the parameters of a module to host tensors while its state is read or loaded.

    Hooks of others find the true values then, and a load writes them. Tensors of
    quantised weights' state, which are no parameters, are bound too.

    Args:
        owner: The module that registers the parameters.
        chunk: In host memory.
        host: What is bound meanwhile, with its host tensor.
        access: Settles before a read or a load.
    """

    def __init__(
        self,
        owner: nn.Module,
        chunk: Chunk,
        host: list[tuple[Binding, Tensor]],
        access: StateAccess,
    ) -> None:
        self._chunk, self._host, self._access = chunk, host, access
        self._memory = [part for _, tensor in host for part in memory_of(tensor)]
        # a stack: a read may run inside a read
        self._bound: list[list[tuple[Binding, Tensor]]] = []
        copying = partial(access.copying, owner)
        self._handles: list[Removable] = [
            owner.register_state_dict_pre_hook(Hook(self._before_read)),
            owner.register_state_dict_post_hook(Hook(self._after_read, copying)),
            owner.register_load_state_dict_pre_hook(Hook(self._before_load)),
            owner.register_load_state_dict_post_hook(Hook(self._after_load)),
        ]
        # before those of others, which may look at the parameters
        tables: Any = owner._state_dict_pre_hooks, owner._load_state_dict_pre_hooks
        for hooks in tables:
            hooks.move_to_end(next(reversed(hooks)), last=False)

    def remove(self) -> None:
        """Undo the binding."""
        while self._handles:
            self._handles.pop().remove()

    def _before_read(self, _module: nn.Module, _prefix: str, keep_vars: bool) -> None:
        self._access.before_read(self._memory)
        self._keeps_vars = keep_vars
        self._bind()

    def _after_read(
        self, _module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        if self._keeps_vars and not self._access.shows_writes:
            # parameters would show their slots again
            for binding, tensor in self._host:
                name = prefix + binding.name.rpartition(".")[2]
                if state.get(name) is binding.owner:
                    state[name] = tensor
        self._unbind()

    def _before_load(self, *_: Any) -> None:
        self._access.before_load(self._memory)
        self._bind()

    def _after_load(self, *_: Any) -> None:
        self._unbind()
        self._access.after_load(self._chunk)

    def _bind(self) -> None:
        shown = self._access.shows_writes
        host = [] if shown else self._host
        self._bound.append([(binding, binding.tensor) for binding, _ in host])
        for binding, tensor in host:
            binding.bind(tensor)

    def _unbind(self) -> None:
        for binding, tensor in self._bound.pop():
            binding.bind(tensor)
        # no others: somebody may have written one of them
        self._access.remember(binding.name for binding, _ in self._host)
