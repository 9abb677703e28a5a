"""Seconds of blocks, forward and backward, timed on the device with made-up inputs; and
of what runs outside them, in a copy of the model whose blocks take no time.

What is left out: adding a gradient to one that is already there, from the second
micro-batch on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint
from xxhash import xxh3_64_hexdigest

from ..engine.compiled import CompiledForward
from ..engine.side_effects import keeping_generators
from ..layout.packed import Packed
from ..layout.tensors import map_tensors, tensors_in
from ..types import BlockSeconds
from .cache import JSON, cached
from .hardware import timed, typical
from .meta import empty_like, meta_copy, without_global_hooks
from .repeats import plain_attributes

REPEATS = 3
"""Timed runs of a block."""
INPUT_SCALE = 0.02
"""Spread of made-up floats: small enough for any block to stay finite."""


@dataclass(frozen=True)
class BlockSample:
    """One call of a block.

    Tensors may be on the meta device: shape, stride, dtype and `requires_grad` count.
    They may be nested in tuples, lists and mappings; other values are passed as they
    are. `output` is what it returned.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any = None


def time_block(
    module: nn.Module,
    sample: BlockSample,
    device: torch.device,
    autocast_dtype: torch.dtype | None,
    repeats: int = REPEATS,
) -> BlockSeconds:
    """Seconds of the block's forward and backward, as training runs them, and of what a
    checkpoint around it adds.

    Meta tensors become small random floats, integers become 0 and masks all true;
    real ones are copied. Leaves gradients and random state as they were; no gradient is
    accumulated, so hooks on accumulation do not fire.

    Args:
        module: A copy of the block, on `device`, in the mode that training uses.
        sample: What it is called with.
        device: Where it runs.
        autocast_dtype: Dtype of the autocast region, None for none.
        repeats: Timed runs, after one that does not count.
    """
    made: dict[int, Tensor] = {}

    def real(tensor: Tensor) -> Tensor:
        # a tensor that is passed twice stays one
        if id(tensor) not in made:
            made[id(tensor)] = _real(tensor, device)
        return made[id(tensor)]

    with _apart(device):
        args, kwargs = map_tensors((sample.args, dict(sample.kwargs)), real)
        leaves = [t for t in (*made.values(), *module.parameters()) if t.requires_grad]

        def forward(run: Callable[..., Any] = module) -> list[Tensor]:
            with torch.autocast(
                device.type, autocast_dtype, enabled=autocast_dtype is not None
            ):
                result = run(*args, **kwargs)
            return [t for t in tensors_in(result) if t.requires_grad]

        seconds = _timed(device, forward, leaves, repeats)
        if not seconds.backward_s:
            return seconds
        kept = partial(checkpoint, module, use_reentrant=False)
        try:
            both = _timed(device, partial(forward, kept), leaves, repeats)
        except CheckpointError:
            # no plan that recomputes it would train
            return seconds
        queue_s = both.queue_s - seconds.queue_s
        return replace(
            seconds,
            # Python around the first forward included
            recompute_s=max(both.total_s - seconds.total_s, 0.0),
            queue_recompute_s=max(queue_s, 0.0),
        )


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Random numbers that are drawn inside are drawn again afterwards, and no global
    hook is called."""
    random_devices = [device] if device.type == "cuda" else []
    forked = torch.random.fork_rng(random_devices, device_type="cuda")
    with forked, keeping_generators(), without_global_hooks(), torch.enable_grad():
        yield


def _timed(
    device: torch.device,
    forward: Callable[[], list[Tensor]],
    leaves: Sequence[Tensor],
    repeats: int,
) -> BlockSeconds:
    """Time a forward that gives what backward begins with, and backward to `leaves`."""

    def once() -> tuple[float, float, float, float]:
        outputs: list[Tensor] = []
        forward_s, queue_s = timed(device, lambda: outputs.extend(forward()))
        if not outputs:
            return forward_s, 0.0, queue_s, 0.0
        # a loss has the gradient that `backward` gives it
        gradients = [torch.randn_like(t) if t.ndim else None for t in outputs]
        backward = partial(
            torch.autograd.grad, outputs, leaves, gradients, allow_unused=True
        )
        backward_s, queue_backward_s = timed(device, backward)
        return forward_s, backward_s, queue_s, queue_backward_s

    once()
    rounds = [once() for _ in range(repeats)]
    forward_s, backward_s, queue_forward_s, queue_backward_s = (
        typical(device, seconds) for seconds in zip(*rounds, strict=True)
    )
    return BlockSeconds(
        forward_s,
        backward_s,
        queue_forward_s=queue_forward_s,
        queue_backward_s=queue_backward_s,
    )


def measure_blocks(
    model: nn.Module,
    names: Sequence[str],
    samples: Mapping[int, BlockSample],
    device: torch.device,
    autocast_dtype: torch.dtype | None,
    folder: str | Path | None,
    key: Callable[..., dict[str, JSON]],
    compiled: Mapping[str, Any] | None = None,
) -> dict[int, BlockSeconds]:
    """Forward and backward seconds of every block that has a sample.

    Blocks of one class with equal attributes, parameters and inputs are timed once.

    Args:
        model: With its weights, on the host.
        names: Of its blocks.
        samples: One call of each, by index.
        device: Where to time; a copy of one block at a time goes there, without hooks of
            others, on a CPU with the same weights.
        autocast_dtype: As for `time_block`.
        folder: Where they are kept, as for `cached`.
        key: A `measurement_key` but for the `block`.
        compiled: As in `Options`.
    """

    def measure(block: nn.Module, sample: BlockSample) -> BlockSeconds:
        here = _copy_on(device, block)
        with ExitStack() as undo:
            if compiled is not None:
                undo.callback(CompiledForward(here, compiled).remove)
            return time_block(here, sample, device, autocast_dtype)

    known: dict[str, BlockSeconds] = {}
    times = {}
    blocks = {index: model.get_submodule(names[index]) for index in samples}
    numbers = _own_numbers({names[index]: blocks[index] for index in samples})
    for index, sample in samples.items():
        block = blocks[index]
        kind = _kind(block, sample, numbers)
        text = json.dumps(kind)
        if text not in known:
            timed = partial(measure, block, sample)
            known[text] = cached(folder, key(block=kind), timed, BlockSeconds)
        times[index] = known[text]
    return times


class _HandOn(torch.autograd.Function):
    """Other tensors for those that came in, and in backward the other way round."""

    @staticmethod
    def forward(ctx: Any, given: Sequence[Tensor], *inputs: Tensor) -> Any:
        # of one number each: what is read of them outside the blocks is next to nothing
        ctx.gradients = [t.new_zeros(()).expand_as(t) for t in inputs]
        fixed = [not tensor.requires_grad for tensor in given]
        outputs = [tensor.detach() for tensor in given]
        ctx.mark_non_differentiable(*compress(outputs, fixed))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients


def time_outside(
    model: nn.Module,
    samples: Mapping[str, BlockSample],
    batch: Mapping[str, Any],
    loss_of: Callable[[nn.Module, Mapping[str, Any]], Tensor],
    device: torch.device,
) -> BlockSeconds:
    """Seconds of what runs outside the blocks: embedding, head and loss, by the
    kernels that training uses.

    A copy of the model runs whose blocks hand on made-up tensors; the model and the
    random state stay as they were.

    Args:
        model: With its weights, on the host; those outside the blocks are copied.
        samples: One call of each block, by its name.
        batch: Tensors as in a `BlockSample`.
        loss_of: Runs the forward of such a copy on the batch and returns the loss.
        device: Where to time.
    """
    with _apart(device):
        copied = _without_blocks(model, samples, device)
        given = map_tensors(dict(batch), lambda tensor: _real(tensor, device))
        leaves = [p for p in copied.parameters() if p.requires_grad and not p.is_meta]
        return _timed(device, lambda: [loss_of(copied, given)], leaves, REPEATS)


def _without_blocks(
    model: nn.Module, samples: Mapping[str, BlockSample], device: torch.device
) -> nn.Module:
    """A copy on the device whose blocks hand on what they are told by samples."""
    copied = _copy_on(device, model, without=tuple(f"{name}." for name in samples))
    # backward goes through the head whatever trains
    leaf = nn.Parameter(torch.zeros((), device=device))
    copied.register_parameter("protrain_leaf", leaf)
    made: dict[Any, Tensor] = {}

    def like(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return _real(tensor, device)
        # all blocks hand on the same ones: nobody writes to them
        key = tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
        if key not in made:
            made[key] = _real(tensor, device)
        return made[key]

    def forward_of(output: Any) -> Callable[..., Any]:
        result = map_tensors(output, like)
        given = list(tensors_in(result))

        def forward(*args: Any, **kwargs: Any) -> Any:
            inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
            outputs = iter(_HandOn.apply(given, leaf, *inputs))
            return map_tensors(result, lambda _: next(outputs))

        return forward

    for name, sample in samples.items():
        vars(copied.get_submodule(name))["forward"] = forward_of(sample.output)
    return copied


def _copy_on(
    device: torch.device, model: nn.Module, without: tuple[str, ...] = ()
) -> nn.Module:
    """A copy on the device; on meta what of its weights has a name that begins so."""

    def moved(name: str, weight: Tensor) -> Tensor:
        if name.startswith(without):
            return empty_like(weight)
        if isinstance(weight, Packed):
            return weight.unpacked(device)
        return weight.to(device)

    copied = meta_copy(model, moved)
    for buffer in copied.buffers():
        buffer.data = buffer.data.to(device)
    return copied


def _own_numbers(blocks: Mapping[str, nn.Module]) -> set[tuple[str, str]]:
    """Modules and attributes of theirs that hold, in each block that has them, its number
    in its list."""
    numbers, others = set[tuple[str, str]](), set[tuple[str, str]]()
    for name, block in blocks.items():
        position = name.rpartition(".")[2]
        for path, module in block.named_modules():
            for key, value in plain_attributes(module):
                found = numbers if str(value) == position else others
                found.add((path, key))
    return numbers - others


def _kind(
    block: nn.Module, sample: BlockSample, numbers: Set[tuple[str, str]]
) -> dict[str, Any]:
    """Return what blocks that take the same time have in common; `numbers` are their own."""

    def described(tensor: Tensor) -> list[Any]:
        return [list(tensor.shape), str(tensor.dtype), tensor.requires_grad]

    inputs = list(tensors_in((sample.args, sample.kwargs)))
    whole = [t for t in inputs if not (t.is_meta or t.is_floating_point())]

    return {
        "modules": [
            [
                path,
                f"{type(module).__module__}.{type(module).__qualname__}",
                *(
                    [key, repr(value)]
                    for key, value in plain_attributes(module)
                    if (path, key) not in numbers
                ),
            ]
            for path, module in block.named_modules()
        ],
        "parameters": [
            [name, *described(param)] for name, param in block.named_parameters()
        ],
        "inputs": [described(t) for t in inputs],
        "values": [xxh3_64_hexdigest(t.cpu().numpy().tobytes()) for t in whole],
    }


def _real(tensor: Tensor, device: torch.device) -> Tensor:
    if not tensor.is_meta:
        made = tensor.detach().to(device, copy=True)
    else:
        # a flat buffer below the strides: expanded tensors cannot be written to
        reach = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((num - 1) * step for num, step in reach)
        flat = _fill(last + 1 if tensor.numel() else 0, tensor.dtype, device)
        made = flat.as_strided(tensor.shape, tensor.stride())
    return made.requires_grad_(tensor.requires_grad)


def _fill(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(length, device=device).mul_(INPUT_SCALE).to(dtype)
    if dtype is torch.bool:
        return torch.ones(length, dtype=dtype, device=device)
    return torch.zeros(length, dtype=dtype, device=device)
