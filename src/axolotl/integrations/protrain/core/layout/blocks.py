"""Find the repeated layers of a model by structure, never by a list of names."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..errors import LayoutError

VISION_MODULES = ("visual", "vision_tower", "vision_model")
CACHES = frozenset(
    "past_key_values past_key_value layer_past cache_params cache".split()
)
"""Names that transformers gives the argument that a block writes its keys and values to."""


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the repeated layers of `model` as (name, module) in definition order.

    A block is a child of an outermost `nn.ModuleList` that itself has children and
    parameters. Lists inside a block (experts, for example) belong to the block; a
    list of bare leaves (several heads) holds no blocks because nothing guarantees
    that a leaf is called rather than read.

    Raises:
        LayoutError: No such list exists.
    """
    blocks = [
        (f"{list_name}.{child_name}" if list_name else child_name, child)
        for list_name, module_list in _outermost_lists(model, "")
        for child_name, child in module_list.named_children()
        if _is_block(child)
    ]
    if not blocks:
        raise LayoutError(
            f"{type(model).__name__} has no recognisable blocks: ProTrain pages the "
            "children of a torch.nn.ModuleList of layers and found none with "
            "parameters. Train it without paging (protrain_auto_memory: false)."
        )
    return blocks


def has_vision_tower(model: nn.Module) -> bool:
    """True for a model with a `vision_config` or a module named like a vision tower."""
    if getattr(getattr(model, "config", None), "vision_config", None) is not None:
        return True
    return any(
        name.rpartition(".")[2] in VISION_MODULES for name, _ in model.named_modules()
    )


def _outermost_lists(
    module: nn.Module, prefix: str
) -> Iterator[tuple[str, nn.ModuleList]]:
    if isinstance(module, nn.ModuleList):
        if any(_is_block(child) for child in module.children()):
            yield prefix, module
        return
    for name, child in module.named_children():
        yield from _outermost_lists(child, f"{prefix}.{name}" if prefix else name)


def _is_block(module: nn.Module) -> bool:
    has_children = next(module.children(), None) is not None
    return has_children and next(module.parameters(), None) is not None
