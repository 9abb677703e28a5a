"""transformers' and PEFT's own save, with what it converts seen in place.

# Note [Experts one by one]

transformers fuses the experts of a block as it loads them, and undoes that for the whole
model before it writes anything: half the model once more. But what it does to undo it is
to take views: only `contiguous` copies. Left out, each expert is a view of its block's
tensor, and the executor brings one at a time into one piece, where it is not. Which tensor
becomes which keys is still transformers' affair, by its own tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from huggingface_hub import (
    get_torch_storage_id,
    get_torch_storage_size,
    split_state_dict_into_shards_factory,
)
from peft import peft_model
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import modeling_utils

from .core.checkpoint import (
    OPTIMIZER,
    FilePlan,
    Snapshot,
    plan_safetensors,
    save_without_bytes,
    spec_of,
    write_file,
)

Write = Callable[[Path, FilePlan, Mapping[str, Tensor]], None]


class _Views(TorchFunctionMode):
    """Tensors stay views where they would be copied only for the order of their bytes;
    of which copy each would be a view is known, because shards are cut by storages."""

    def __init__(self) -> None:
        super().__init__()
        # by its id a tensor, and the one that would be a copy
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first: Any = args[0] if args else None
        if func is Tensor.contiguous and not first.is_contiguous() and not kwargs:
            copy = first.detach()
            self._copies[id(copy)] = copy, copy
            return copy
        if func is Tensor.view and not isinstance(args[1], torch.dtype):
            func = Tensor.reshape
        result = func(*args, **(kwargs or {}))
        if id(first) in self._copies:
            for view in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(view, Tensor) and view._base is not None:
                    self._copies[id(view)] = view, self._copies[id(first)][1]
        return result

    def revert(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """transformers' way from a model's tensors to those of its files."""
        with self:
            self._copies.clear()
            return plain(*args, **kwargs)

    def split(self, tensors: dict[str, Tensor], **how: Any) -> Any:
        """Into shards, as if what would be copied were."""

        def storage(tensor: Tensor) -> Any:
            _, copy = self._copies.get(id(tensor), (None, None))
            return get_torch_storage_id(tensor) if copy is None else id(copy)

        def size(tensor: Tensor) -> int:
            _, copy = self._copies.get(id(tensor), (None, None))
            return get_torch_storage_size(tensor) if copy is None else copy.nbytes

        shards = split_state_dict_into_shards_factory(
            tensors, get_storage_id=storage, get_storage_size=size, **how
        )
        self._copies.clear()
        return shards


def write_safetensors(
    tensors: Mapping[str, Tensor],
    path: str,
    metadata: dict[str, str] | None = None,
    write: Write = write_file,
) -> None:
    """Do what `safetensors.torch.save_file` does, of views too, and without copies."""
    specs = [spec_of(key, tensor) for key, tensor in tensors.items()]
    known = [spec for spec in specs if spec is not None]
    if len(known) < len(specs):
        save_file(dict(tensors), path, metadata)
        return
    write(Path(path), plan_safetensors(known, metadata or {}), tensors)


@contextmanager
def in_place() -> Iterator[None]:
    """Inside, models are written without a second copy; see Note [Experts one by one]."""
    views, plain = _Views(), modeling_utils.revert_weight_conversion
    with (
        patch.object(
            modeling_utils, "revert_weight_conversion", partial(views.revert, plain)
        ),
        patch.object(modeling_utils, "split_torch_state_dict_into_shards", views.split),
        patch.object(modeling_utils, "safe_save_file", write_safetensors),
        patch.object(peft_model, "safe_save_file", write_safetensors),
    ):
        yield


@contextmanager
def later(snapshot: Snapshot, folder: Path) -> Iterator[None]:
    """Inside, what is saved of a model and its optimizer in a folder is left to a
    snapshot."""

    def write(path: Path, plan: FilePlan, tensors: Mapping[str, Tensor]) -> None:
        # a signal handler may save the model elsewhere
        (snapshot.add if path.parent == folder else write_file)(path, plan, tensors)

    def save(value: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        if target != str(folder / OPTIMIZER):
            plain(value, target, *args, **kwargs)
            return
        snapshot.add(Path(target), *save_without_bytes(value, Path(target)))

    plain, planned = torch.save, partial(write_safetensors, write=write)
    with (
        patch.object(modeling_utils, "safe_save_file", planned),
        patch.object(peft_model, "safe_save_file", planned),
        patch.object(torch, "save", save),
    ):
        yield
