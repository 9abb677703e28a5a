"""Adapters as values on the host, within a budget, and on the disk.

All that an adapter is lies in one buffer: weights, the state of their optimizer, a count of
updates for each, and at the end gradients that wait for an update. So it moves in one
copy. On the disk it is a folder that PEFT can load, with the rest of the buffer beside
the weights: safetensors and JSON, whole or absent.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError  # nosec B403
from threading import Lock
from typing import Any, TextIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core.checkpoint import locked, publish, restore, restored_on_failure, staged
from ..core.engine.device import Device
from ..core.errors import FOREIGN_ERRORS, CheckpointError, ConfigError, RequestError
from ..core.layout.chunks import aligned

LOG = logging.getLogger(__name__)

KINDS = ("attn", "mlp", "unembed")
"""Groups of linear layers: of attention, all others of the blocks, the head."""
SAMPLERS = "sampler_weights"
"""Folder of a model for weights that were saved to sample with."""
EXTERNAL = "external_weights"
"""And for those that were saved to be fetched."""
TRAINING = "weights"
"""And for states that training may go on from."""
WEIGHTS = "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"
"""In place of it: where the weights of a full fine-tune are."""
REST, ABOUT = "optimizer.safetensors", "state.json"
ADAMW = "adamw"
"""The optimizer of states that name none: earlier versions had no other."""
_UNREADABLE = (OSError, EOFError, SafetensorError, UnpicklingError)
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
_MODEL = r"[A-Za-z0-9][A-Za-z0-9_:-]{0,99}"
_PATH = re.compile(f"tinker://({_MODEL})/({TRAINING}|{SAMPLERS}|{EXTERNAL})/({_NAME})")


@dataclass(frozen=True)
class AdapterSpec:
    """An adapter as a client asks for it: LoRA of one rank on layers of some
    `KINDS`."""

    rank: int
    alpha: float
    kinds: tuple[str, ...]

    def __str__(self) -> str:
        return f"rank {self.rank}, alpha {self.alpha:g} on {', '.join(self.kinds)}"


@dataclass(frozen=True)
class AdapterLayout:
    """Offsets of the parts of an adapter in its buffer.

    Attributes:
        shapes: Of the weights, by the names that PEFT saves them under.
        dtype: Of weights and gradients.
        state: Of the optimizer, beside counts: part, name of the weight, shape and dtype.
    """

    spec: AdapterSpec
    shapes: tuple[tuple[str, tuple[int, int]], ...]
    dtype: torch.dtype
    state: tuple[tuple[str, str, tuple[int, ...], torch.dtype], ...] = ()

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the weights alone, which come first."""
        return sum(aligned(_bytes_of(shape, self.dtype)) for _, shape in self.shapes)

    @cached_property
    def kept_bytes(self) -> int:
        """Without gradients, which come last."""
        state = sum(aligned(_bytes_of(at, dtype)) for _, _, at, dtype in self.state)
        return self.weight_bytes + state + aligned(4 * len(self.shapes))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.kept_bytes + self.weight_bytes

    def views(self, buffer: Tensor) -> dict[str, dict[str, Tensor]]:
        """Tensors of a buffer by part and name; `step` are scalars, float32."""
        found: dict[str, dict[str, Tensor]] = {"weight": self.weights(buffer)}
        found["grad"] = self.weights(buffer[self.kept_bytes :])
        found["step"], start = {}, self.weight_bytes
        for part, name, shape, dtype in self.state:
            nbytes = _bytes_of(shape, dtype)
            flat = buffer[start : start + nbytes].view(dtype)
            found.setdefault(part, {})[name] = flat.view(shape)
            start += aligned(nbytes)
        steps = buffer[start:][: 4 * len(self.shapes)].view(torch.float32).unbind()
        for (name, _), step in zip(self.shapes, steps, strict=True):
            found["step"][name] = step
        return found

    def weights(self, buffer: Tensor) -> dict[str, Tensor]:
        """Weights by name, of a buffer that need not have more."""
        found, start = {}, 0
        for name, shape in self.shapes:
            nbytes = _bytes_of(shape, self.dtype)
            found[name] = buffer[start : start + nbytes].view(self.dtype).view(shape)
            start += aligned(nbytes)
        return found


@dataclass
class AdapterState:
    """An adapter on the host.

    Attributes:
        memory: uint8 of shape [layout.nbytes], or [layout.weight_bytes] of one that only
            samples.
        graded: Names of the weights that have a gradient.
        trains: It has more than weights.
    """

    layout: AdapterLayout
    memory: Tensor
    graded: frozenset[str] = frozenset()
    trains: bool = True

    @property
    def used_bytes(self) -> int:
        """Bytes of `memory`, without gradients where there are none."""
        if self.graded:
            return self.layout.nbytes
        return min(self.layout.kept_bytes, self.memory.nbytes)

    @cached_property
    def parts(self) -> dict[str, dict[str, Tensor]]:
        """See `AdapterLayout.views`; of one that trains."""
        return self.layout.views(self.memory)


class AdapterStore:
    """Adapters of models within a budget of host memory; the least recently used go to
    the disk and come back.

    Args:
        folder: For what leaves; emptied.
        budget_bytes: Of all adapters together.
        device: Page-locks their memory.
        layout_of: Of what is on the disk.
        write_config: Writes PEFT's configuration of an adapter into a folder.
        base: What tells the base of these adapters from others, and its `name`.
        optimizer: What tells states that training can go on from.
    """

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        device: Device,
        layout_of: Callable[[AdapterSpec], AdapterLayout],
        write_config: Callable[[AdapterSpec, Path], None],
        base: Mapping[str, str],
        optimizer: str,
    ) -> None:
        self._folder, self._budget_bytes, self._device = folder, budget_bytes, device
        self._layout_of, self._write_config = layout_of, write_config
        self._base, self._optimizer = base, optimizer
        self._cached: OrderedDict[str, AdapterState] = OrderedDict()
        # nobody links files of a folder that is being renamed
        self._renaming = Lock()
        self.used_bytes = 0
        self.layouts: dict[str, AdapterLayout] = {}
        """Layouts of the models by name, wherever they are."""
        shutil.rmtree(folder, ignore_errors=True)

    def new(self, layout: AdapterLayout, trains: bool = True) -> AdapterState:
        """Zeros, for which others make room; weights alone of one that never `trains`.

        Raises:
            RequestError: It does not fit into the budget.
        """
        nbytes = layout.nbytes if trains else layout.weight_bytes
        if nbytes > self._budget_bytes:
            raise RequestError(
                f"lora_config: an adapter of rank {layout.spec.rank} takes {nbytes:,} "
                f"bytes of the host, and {self._budget_bytes:,} may be used for all "
                "(--adapter-memory). Ask for a smaller rank, or fewer layers."
            )
        while self.used_bytes + nbytes > self._budget_bytes:
            model, state = next(iter(self._cached.items()))
            # what only samples is on the disk already
            if state.trains:
                self.write(self._folder / model, state)
            self.discard(self._cached.pop(model))
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        if nbytes:
            self._device.pin(memory)
        self.used_bytes += nbytes
        return AdapterState(layout, memory, trains=trains)

    def put(self, model: str, state: AdapterState) -> None:
        """Let a model have a state that `new` has made, instead of what it had."""
        self.drop(model)
        self._cached[model], self.layouts[model] = state, state.layout

    def get(self, model: str) -> AdapterState:
        """The adapter of a model, read back if it has left."""
        if model not in self._cached:
            self._cached[model] = self.read(self._folder / model)
        self._cached.move_to_end(model)
        return self._cached[model]

    def sampler(self, key: str, folder: Path | None) -> AdapterState:
        """Weights to sample with, read from a folder if they are not on the host; without
        a folder those of the base alone, an adapter of no layers.

        Args:
            key: A name that no model has, always of the same weights.
            folder: Nobody writes it.

        Raises:
            RequestError: They do not fit into the budget.
            CheckpointError: The folder is damaged.
        """
        if key not in self._cached:
            layout = self.layout_at(folder) if folder else self._bare
            state = self.new(layout, trains=False)
            if folder is not None:
                self._fill(folder, state, False)
            self._cached[key] = state
        self._cached.move_to_end(key)
        return self._cached[key]

    def drop_sampler(self, key: str) -> None:
        """Forget weights of `sampler`."""
        state = self._cached.pop(key, None)
        if state is not None:
            self.discard(state)

    def cached(self, model: str) -> AdapterState | None:
        """The adapter of a model, or of a key of `sampler`, if it is on the host now."""
        return self._cached.get(model)

    def link(self, source: Path, target: Path) -> None:
        """Let another folder have the weights of one, which may be replaced afterwards.

        Raises:
            RequestError: There are none.
            CheckpointError: The folder cannot be made.
        """
        try:
            target.mkdir(parents=True, exist_ok=True)
            with self._renaming:
                for name in self._names(source):
                    own = target / name
                    if not (own.exists() or linked(source / name, own)):
                        # a copy is nobody else's either
                        shutil.copyfile(source / name, own)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RequestError(
                f"path: there are no weights to sample with at {source.parent.name}/"
                f"{source.name} of {source.parent.parent.name}.",
                404,
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"{target} cannot be made ({error}). Free some space."
            ) from error

    def drop(self, model: str) -> None:
        """Forget a model, wherever its adapter is."""
        state = self._cached.pop(model, None)
        if state is not None:
            self.discard(state)
        if self.layouts.pop(model, None) is not None:
            shutil.rmtree(self._folder / model, ignore_errors=True)

    def close(self) -> None:
        """Give all memory back; what was on the disk for lack of it goes too."""
        for model in [*self.layouts]:
            self.drop(model)
        for key in [*self._cached]:
            self.drop_sampler(key)

    def write(
        self,
        folder: Path,
        state: AdapterState,
        whole: bool = True,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Write an adapter; the folder is there when all of it is, and replaces an old one.

        Args:
            folder: Its parent holds nothing but such folders.
            state: What to write.
            whole: With optimizer state and gradients, so that training can go on from it
                as if it had not ended.
            more: To keep in `ABOUT`, as JSON.

        Raises:
            CheckpointError: A file could not be written.
        """
        with restored_on_failure(folder.parent, True, "--folder"):
            restore(folder.parent)
            aside = staged(folder)
            aside.mkdir(parents=True)
            said = self._write_parts(aside, state, whole)
            self._write_about(aside, state, {**said, **(more or {})})
            with self._renaming:
                publish(folder)

    def write_own(self, folder: Path, state: AdapterState) -> None:
        """Write weights for a sampling session alone.

        Raises:
            CheckpointError: A file could not be written.
        """
        self.write(folder, state, False)

    def require_free(self) -> None:
        """Refuse another model where there can be none; adapters make room."""

    def _write_parts(
        self, aside: Path, state: AdapterState, whole: bool
    ) -> Mapping[str, Any]:
        """Write all but `ABOUT`, and return what that says of it."""
        save_file(state.parts["weight"], aside / WEIGHTS, {"format": "pt"})
        self._write_config(state.layout.spec, aside)
        if whole:
            save_file(_rest(state), aside / REST)
        return {}

    def _write_about(
        self, folder: Path, state: AdapterState, more: Mapping[str, Any]
    ) -> None:
        about = {"format": 2, "base": {**self._base}, "optimizer": self._optimizer}
        about |= {"spec": asdict(state.layout.spec), **more}
        (folder / ABOUT).write_text(json.dumps(about))

    def read(self, folder: Path, with_optimizer: bool = True) -> AdapterState:
        """A new state from the disk.

        Raises:
            RequestError: There is none, or not of this base.
            CheckpointError: It is damaged.
        """
        layout = self.layout_at(folder)
        kind = folder.parent.name
        if with_optimizer and kind in (SAMPLERS, EXTERNAL):
            raise RequestError(
                f"path: {folder.parent.parent.name}/{kind}/{folder.name} was saved "
                "without an optimizer. Load it without, or use save_weights."
            )
        saved = _about(folder)[2]
        if with_optimizer and saved != self._optimizer:
            raise RequestError(
                f"path: {folder.parent.parent.name}/{kind}/{folder.name} has a state of "
                f"{saved}, and this server trains by {self._optimizer} (optimizer of its "
                "YAML). Load it without an optimizer, or serve with that one."
            )
        state = self.new(layout)
        self._fill(folder, state, with_optimizer)
        return state

    def _fill(self, folder: Path, state: AdapterState, with_optimizer: bool) -> None:
        try:
            self._read_into(folder, state, with_optimizer)
        except (*_UNREADABLE, *FOREIGN_ERRORS) as error:
            self.discard(state)
            raise CheckpointError(
                f"{folder} cannot be read: {error}. It is damaged, or of another base."
            ) from error

    def _read_into(
        self, folder: Path, state: AdapterState, with_optimizer: bool
    ) -> None:
        _fill_from(folder, state, with_optimizer)

    def _names(self, folder: Path) -> Iterable[str]:
        """Name the files of a state that sampling reads."""
        return WEIGHTS, ABOUT

    @cached_property
    def _bare(self) -> AdapterLayout:
        return AdapterLayout(AdapterSpec(0, 0.0, ()), (), torch.float32)

    def spec_of(self, folder: Path) -> AdapterSpec:
        """Read the spec of the adapter in a folder.

        Raises:
            RequestError: Nothing to train on from, or it was saved over another base.
            CheckpointError: It is damaged.
        """
        spec, base, _ = _about(folder)
        known = base.keys() & self._base.keys() - {"name"}
        differs = [key for key in sorted(known) if base[key] != self._base[key]]
        path = f"{folder.parent.parent.name}/{folder.parent.name}/{folder.name}"
        if differs:
            raise RequestError(
                f"path: {path} was saved over another base, {base.get('name')}: its "
                f"{' and '.join(differs)} differ from those of {self._base['name']}, "
                "which this server has. Serve that one, or train a new adapter."
            )
        if not known:
            LOG.warning(
                f"{path} does not say over which base it was saved (an earlier version "
                f"wrote it): it is taken to be {self._base['name']}."
            )
        return spec

    def layout_at(self, folder: Path) -> AdapterLayout:
        """Lay out the adapter in a folder.

        Raises:
            RequestError: See `spec_of`; or it is larger than what the server plans for.
        """
        return self._layout_of(self.spec_of(folder))

    def discard(self, state: AdapterState) -> None:
        """Give the memory of a state back."""
        if state.memory.nbytes:
            self._device.unpin(state.memory)
        self.used_bytes -= state.memory.nbytes


def claimed(folder: Path) -> TextIO:
    """A folder of states for this server alone, as long as the file is open, and without
    what an earlier one has left half-done.

    Raises:
        ConfigError: Another server has it, or it cannot be written.
    """
    try:
        lock, _ = locked(folder)
    except BlockingIOError as error:
        raise ConfigError(
            f"--folder {folder}: another server uses it ({error}). Stop that one, or give "
            "this one a folder of its own."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"--folder {folder}: nothing can be saved there ({error}). Choose another."
        ) from error
    for states in folder.glob("*/*weights"):
        restore(states)
    return lock


def weights_in(folder: Path) -> Path:
    """The file that is written last of the weights of a state: its time is the state's."""
    own = folder / WEIGHTS
    return own if own.exists() else folder / INDEX


def path_of(model: str, kind: str, name: str) -> str:
    """The path of a state that a client saves.

    Raises:
        RequestError: The name is not one.
    """
    if not re.fullmatch(_MODEL, model):
        raise RequestError(
            f"model_id: {model!r} cannot be one; allowed are 1 to 100 letters, digits, "
            "'_', ':' and '-', of which the first is a letter or a digit."
        )
    path = f"tinker://{model}/{kind}/{name}"
    if not re.fullmatch(_NAME, name) or name.startswith("_"):
        raise RequestError(
            f"path: {name!r} cannot be a name; allowed are 1 to 100 letters, digits, "
            "'.', '-' and '_', of which the first is a letter or a digit."
        )
    return path


def folder_of(root: Path, path: str) -> Path:
    """Return where a path lies on the disk, always below `root`.

    Raises:
        RequestError: It is not a path.
    """
    parts = _PATH.fullmatch(path)
    if parts is None:
        raise RequestError(
            f"path: {path!r} is not tinker://MODEL/weights/NAME, as a save answers."
        )
    return root / parts[1] / parts[2] / parts[3]


def _rest(state: AdapterState) -> dict[str, Tensor]:
    parts = state.parts
    found = {"steps": torch.stack([*parts["step"].values()])}
    for part, name, *_ in state.layout.state:
        found[f"{part}.{name}"] = parts[part][name]
    return found | {f"grad.{name}": parts["grad"][name] for name in state.graded}


def _bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _about(folder: Path) -> tuple[AdapterSpec, dict[str, str], str]:
    try:
        about = json.loads((folder / ABOUT).read_text("utf-8"))
        spec, base = about["spec"], dict(about.get("base") or {})
        kinds = tuple(map(str, spec["kinds"]))
        optimizer = str(about.get("optimizer", ADAMW))
        return (
            AdapterSpec(int(spec["rank"]), float(spec["alpha"]), kinds),
            base,
            optimizer,
        )
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RequestError(
            f"path: there is no state at {folder.parent.name}/{folder.name} of "
            f"{folder.parent.parent.name}.",
            404,
        ) from error
    except FOREIGN_ERRORS as error:
        raise CheckpointError(f"{folder / ABOUT} is damaged ({error}).") from error


def _fill_from(folder: Path, state: AdapterState, with_optimizer: bool) -> None:
    weights = state.layout.weights(state.memory)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        _fill(weights, file, "")
        more = {*file.keys()} - weights.keys()
        if more:
            raise ValueError(f"{min(more)} belongs to no layer of this adapter")
    if not with_optimizer:
        return
    parts = state.parts
    with safe_open(folder / REST, framework="pt") as file:
        graded = {n.removeprefix("grad.") for n in file.keys() if n[:5] == "grad."}
        steps = file.get_tensor("steps")
        for step, value in zip(parts["step"].values(), steps, strict=True):
            step.copy_(value)
        for part in {part for part, *_ in state.layout.state}:
            _fill(parts[part], file, f"{part}.")
        _fill({n: parts["grad"][n] for n in graded}, file, "grad.")
        state.graded = frozenset(graded)


def linked(source: Path, target: Path) -> bool:
    """Make a hard link to a file, and tell whether there is one."""
    try:
        # a file of the cache is a link to another one
        os.link(source.resolve(), target)
    except OSError:
        # it has gone, or lies elsewhere, or there are no links
        return False
    return True


def _fill(targets: dict[str, Tensor], file: safe_open, prefix: str) -> None:
    for name, target in targets.items():
        saved = file.get_tensor(prefix + name)
        if (saved.shape, saved.dtype) != (target.shape, target.dtype):
            raise ValueError(f"{name} is {saved.dtype} of shape {tuple(saved.shape)}")
        target.copy_(saved)
