"""States of full fine-tunes on the disk: whole models, of which only changed files are new.

A folder has the model as transformers and vLLM load it. Its tensors are in the files that
those of the base are in, what trains apart from what does not; a file with the same tensors
as one of another state, or of the base, is a hard link to that one, so deleting either
leaves the other whole. `state.json` has a hash of the tensors of each file, and which files
are new.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from xxhash import xxh3_128

from ..core.checkpoint.files import bytes_of
from ..core.errors import FOREIGN_ERRORS, CheckpointError, RequestError
from ..saving import write_safetensors
from .adapters import (
    ABOUT,
    INDEX,
    KINDS,
    TRAINING,
    AdapterLayout,
    AdapterSpec,
    AdapterStore,
    linked,
)
from .full import FullModel, FullState
from .states import LAST


class FullStore(AdapterStore):
    """The one model that trains a base, and states of it and of earlier ones.

    Args:
        full: The model, which is the base now.
        root: The folder of all states.
        base_files: Of the base, where they are safetensors.
        given: As for `AdapterStore`.
    """

    def __init__(
        self, full: FullModel, root: Path, base_files: Iterable[Path], **given: Any
    ) -> None:
        super().__init__(layout_of=full.layout, write_config=_nothing, **given)
        self._full, self._root = full, root
        # key of a tensor, and the file of the base that has it
        self._base_files: dict[str, Path] = {}
        for path in base_files:
            with safe_open(path, framework="pt") as file:
                self._base_files.update(dict.fromkeys(file.keys(), path))
        self._version = self._trains = ""
        full.start = root / "_base" / TRAINING / "start"
        spec = AdapterSpec(0, 0.0, KINDS)
        self.write(full.start, self.new(full.layout(spec)))
        said = _said(full.start)
        self._version, self._trains = said["version"], said["trains"]

    def new(self, layout: AdapterLayout, trains: bool = True) -> FullState:
        """Weights of the base, which are not read yet."""
        nothing, at = torch.zeros(0, dtype=torch.uint8), self._full.start
        return FullState(layout, nothing, frozenset(), trains, at, True, self._version)

    def put(self, model: str, state: Any) -> None:
        """Read the weights of a state, and let a model have them."""
        self._full.show(state)
        super().put(model, state)

    def discard(self, state: Any) -> None:
        """Let go of what a model has beside weights."""
        super().discard(state)
        self._full.release(state)

    def require_free(self) -> None:
        """Refuse a second model.

        Raises:
            RequestError: One has the base.
        """
        for model in self.layouts:
            raise RequestError(
                f"create_model: {model} trains all of the base, and one model can at a "
                "time. Unload it first (unload_model, or end its client's session once it "
                "is saved), or serve adapters.",
                409,
            )

    def write_own(self, folder: Path, state: Any) -> None:
        """Write nothing but which weights they are: they can be sampled from until the
        next update."""
        self._full.show(state)
        folder.mkdir(parents=True, exist_ok=True)
        self._write_about(folder, state, {"version": min(self._full.versions)})

    def _write_parts(self, aside: Path, state: Any, whole: bool) -> Mapping[str, Any]:
        """Write what the model has, which has to be this state."""
        if self._version:
            self._full.show(state)
        files: dict[str, str] = {}
        index: dict[str, str] = {}
        new, known = [], self._known()
        tensors, trained, _ = self._full.files(aside)
        shards = self._shards(tensors, trained)
        for number, keys in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            part = {key: tensors[key] for key in keys}
            if keys[0] in trained:
                _require_finite(part)
            files[name] = digest = _digest(part.items())
            index |= dict.fromkeys(keys, name)
            same = known.get(digest) or self._base_file(keys, digest)
            if same is None or not linked(same, aside / name):
                write_safetensors(part, str(aside / name), {"format": "pt"})
                new.append(name)
        total = sum(tensor.nbytes for tensor in tensors.values())
        forms = "".join(_form(key, tensors[key]) for key in sorted(trained))
        if whole:
            self._full.save_rest(aside, aside.name == LAST)
        words = {"metadata": {"total_size": total}, "weight_map": index}
        (aside / INDEX).write_text(json.dumps(words, indent=2))
        version = _hash("".join(files.values()))
        self._full.versions.add(version)
        trains = _hash(forms)
        return {"files": files, "new": new, "version": version, "trains": trains}

    def _shards(self, keys: Iterable[str], trained: Set[str]) -> list[list[str]]:
        """Keys by file: those of a file of the base, what trains apart from what does not."""
        found: dict[tuple[str, bool], list[str]] = {}
        for key in sorted(keys):
            at = str(self._base_files.get(key, ""))
            found.setdefault((at, key in trained), []).append(key)
        return [found[place] for place in sorted(found)]

    def _known(self) -> dict[str, Path]:
        """Files of all states by the hash of their tensors."""
        found: dict[str, Path] = {}
        for about in self._root.glob(f"*/*weights/*/{ABOUT}"):
            # a state may be deleted meanwhile, or damaged, and is no source then
            with suppress(CheckpointError):
                files = _said(about.parent).get("files", {}).items()
                found |= {digest: about.parent / name for name, digest in files}
        return found

    def _base_file(self, keys: list[str], digest: str) -> Path | None:
        """The file of the base with just these tensors, before any of them is trained."""
        path = self._base_files.get(keys[0])
        if self._version or path is None:
            return None
        with safe_open(path, framework="pt") as file:
            own = sorted(file.keys())
            same = own == keys and _digest((k, file.get_tensor(k)) for k in own)
            return path if same == digest else None

    def _names(self, folder: Path) -> Iterable[str]:
        return *_index(folder).values(), INDEX, ABOUT

    def _read_into(self, folder: Path, state: Any, with_optimizer: bool) -> None:
        """Look at all that is read when the state is shown: what is damaged changes
        nothing."""
        said = _said(folder)
        state.version, state.whole = said["version"], with_optimizer
        state.source = folder if "files" in said else None
        if state.source is None:
            return
        if said["trains"] != self._trains:
            raise RequestError(
                f"path: {folder.parent.parent.name}/{folder.parent.name}/{folder.name} "
                "was saved by a server that trains other weights, or in another dtype "
                "(unfrozen_parameters, bf16 of its YAML). Serve that one."
            )
        names = {*_index(folder).values()}
        if names != said["files"].keys():
            raise ValueError(f"{INDEX} names other files than {ABOUT}")
        for name, digest in said["files"].items():
            with safe_open(folder / name, framework="pt") as file:
                found = ((k, file.get_tensor(k)) for k in sorted(file.keys()))
                if _digest(found) != digest:
                    raise ValueError(f"{name} is not what was written")
        if with_optimizer:
            self._full.require_rest(folder)


def _nothing(*_: object) -> None:
    """transformers writes the configuration of a model with it."""


def _said(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / ABOUT).read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no object")
        return found
    except (OSError, *FOREIGN_ERRORS) as error:
        raise CheckpointError(f"{folder / ABOUT} is damaged ({error}).") from error


def _index(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]


def _hash(text: str) -> str:
    return xxh3_128(text.encode()).hexdigest()


def _form(key: str, tensor: Tensor) -> str:
    return f"{key} {tensor.dtype} {[*tensor.shape]} "


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of tensors that come in the order of their keys."""
    found = xxh3_128()
    for key, tensor in tensors:
        found.update(_form(key, tensor).encode())
        found.update(bytes_of(tensor).numpy().data)
    return found.hexdigest()


def _require_finite(tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise RequestError(
                f"{key} is not finite since the last optim_step, and is not saved. Load "
                "an earlier state (load_weights).",
                410,
            )
