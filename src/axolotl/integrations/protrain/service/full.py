"""The one model of a service whose YAML has no adapter: all of the base trains.

# Note [One model has the base]

The session holds one set of weights. It is that of the model that trains, from its creation
until it is unloaded; before and after, anyone may sample with any weights that are saved, and
the base is one of these. Each set has a version: a hash of what is saved, or a new name after
an update. So who wants what is there already gets it, and nothing is read.

# Note [Gradients that are made again]

Gradients add up in the session, and a pass that fails takes those of earlier passes with it,
as a smaller plan does. What these passes were given is kept until the update: they are run
again, from the same weights, and come to the same bits.
"""

from __future__ import annotations

import math
import uuid
from bisect import bisect_right
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from axolotl.utils.logging import get_logger
from huggingface_hub.serialization import StateDictSplit
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from transformers import modeling_utils

from ..core.checkpoint import OPTIMIZER
from ..core.errors import ConfigError, RequestError
from ..recovery import ServedStep
from ..run import TrainingRun
from ..saving import in_place, write_safetensors
from .adapters import KINDS, REST, AdapterLayout, AdapterSpec, AdapterState
from .optimizers import AdamParams

LOG = get_logger(__name__)

_LOAD = "Load a state (load_weights), or create a model."
_LOST = {
    True: f"model_id: its weights are lost since a load or an update failed. {_LOAD}",
    False: "model: its weights were those of a model that has learned since. Make another "
    "sampling client, or save them under a name (save_weights_for_sampler).",
}
"""Why weights are no longer there, of a model and of who samples."""
_CONVERTED = (
    "is saved as another tensor than it is in the model, and could not be read back while "
    "it trains. Serve an adapter of this base."
)


@dataclass(eq=False)
class FullState(AdapterState):
    """Weights of all of the base; no memory of the host is theirs.

    Attributes:
        source: The folder that they are read from; None once the model alone has them.
        whole: With the optimizer's state, buffers and gradients.
        version: See Note [One model has the base].
    """

    source: Path | None = None
    whole: bool = False
    version: str = ""


class Files(NamedTuple):
    """A model's own tensors as its files have them.

    Attributes:
        tensors: By the keys of files.
        trained: Keys of those that train.
        state: What of the model's `state_dict` they lie in.
    """

    tensors: Mapping[str, Tensor]
    trained: Set[str]
    state: Mapping[str, Tensor]


class FullModel:
    """Trains all weights of a base that may train, for one model at a time.

    Args:
        run: Open, with the base.
        optimizer: Paged, of all that trains.

    Attributes:
        versions: Of the weights that the model has: Note [One model has the base].
        switches, prefetched, moved_bytes: See `LiveAdapter`; nothing switches here.
    """

    kinds = KINDS
    start: Path
    """The folder of the base, as a model begins with it."""
    switches = prefetched = moved_bytes = 0

    def __init__(self, run: TrainingRun, optimizer: Optimizer) -> None:
        assert run.session is not None and run.report is not None
        self._run, self._session, self._optimizer = run, run.session, optimizer
        self._model: Any = run.session.model
        named = self._model.named_parameters()
        self._params = {name: p for name, p in named if p.requires_grad}
        self._masters = run.args.protrain_fp32_master
        self._decays = [group["weight_decay"] > 0 for group in optimizer.param_groups]
        self._holder: FullState | None = None
        self.versions: set[str] = set()
        self._passes: list[Callable[[], object]] = []
        self._pass_bytes = 0
        self._most_bytes = run.report.forecast.hardware.host_bytes // 8

    def layout(self, spec: AdapterSpec) -> AdapterLayout:
        """Lay out nothing: the weights are the session's.

        Raises:
            RequestError: A model of this server is no such one.
        """
        if spec.rank:
            raise RequestError(
                f"lora_config: rank {spec.rank}; this server trains all of its base, as "
                "its YAML has no adapter: rank 0 is allowed. Set `adapter: lora` there "
                "for others."
            )
        if {*spec.kinds} != {*KINDS}:
            raise RequestError(
                "lora_config: train_attn, train_mlp and train_unembed are about LoRA; "
                "unfrozen_parameters of the server's YAML says what trains. Leave them "
                "out."
            )
        return AdapterLayout(spec, (), self._model.dtype)

    def initialise(self, state: Any, seed: int | None) -> None:
        """Draw nothing: a new model begins as the base."""

    def show(self, state: Any) -> None:
        """Let the model have these weights, and what else is theirs.

        Raises:
            RequestError: Another model trains, or they are lost.
        """
        if state is self._holder:
            self.put_back()
        elif state.trains:
            self._load(state)
        elif state.version not in self.versions:
            if self._holder is not None and state.source is not None:
                raise RequestError(
                    "model: a model trains, and it alone can be sampled from, with the "
                    "weights that it has now. Save them again (save_weights_for_sampler, "
                    "save_weights_and_get_sampling_client), or unload it first.",
                    409,
                )
            self._load(state)

    def prefetch(self, state: Any) -> None:
        """Fetch nothing: weights come as blocks need them."""

    def begin_pass(self, nbytes: int) -> None:
        """A pass over rows of so many bytes begins, which are kept until the update.

        Raises:
            RequestError: So much cannot be kept.
        """
        if self._pass_bytes + nbytes > self._most_bytes:
            raise RequestError(
                f"data: rows of {self._pass_bytes:,} bytes have gradients that wait for "
                f"optim_step, and {self._most_bytes:,} may. Send it first.",
                413,
            )

    def passed(self, run: Callable[[], object], nbytes: int) -> None:
        """A backward pass has added to the gradients; `run` would do so again."""
        self._passes.append(run)
        self._pass_bytes += nbytes

    def put_back(self) -> None:
        """Make gradients again that are lost: Note [Gradients that are made again]."""
        if self._passes and all(p.grad is None for p in self._params.values()):
            try:
                for run in self._passes:
                    run()
            except BaseException:
                # whatever it is: a part of them would be taken for all the next time
                self._session.forget_gradients()
                raise

    def leave(self) -> None:
        """Keep what there is: nothing else can be shown."""

    def release(self, state: Any) -> None:
        """A model is forgotten; its weights stay until others come."""
        if state is self._holder:
            self._forget()

    def _forget(self) -> None:
        """Nobody trains any longer."""
        self._holder, self._passes, self._pass_bytes = None, [], 0
        self._session.forget_gradients()

    def _load(self, state: FullState) -> None:
        """Read weights; of a model that trains also what it goes on from."""
        source = state.source
        if source is None:
            raise RequestError(_LOST[state.trains], 410)
        self._forget()
        self.versions.clear()
        with TemporaryDirectory() as aside:
            files = self.files(Path(aside))
        if self._masters:
            # or those that round to what comes would stay
            for tensor in files.state.values():
                tensor.fill_(math.nan)
            self._model.load_state_dict(files.state, strict=False)
        for name in source.glob("model-*.safetensors"):
            with safe_open(name, framework="pt") as file:
                for key in files.trained & {*file.keys()}:
                    files.tensors[key].copy_(file.get_tensor(key))
        # the host's weights, which these are, are told of by hooks
        self._model.load_state_dict(files.state, strict=False)
        self.versions.add(state.version)
        if state.trains:
            self._load_rest(source if state.whole else self.start)
            self._holder, state.source = state, None

    def require_rest(self, folder: Path) -> None:
        """Look at what `_load_rest` reads, before anything is changed.

        Raises:
            ValueError: A tensor is missing, or has another shape.
        """
        optimizer_in(folder)
        own = {f"grad.{name}": p for name, p in self._params.items()}
        buffers = {f"buffer.{n}": b for n, b in self._model.named_buffers()}
        with safe_open(folder / REST, framework="pt") as file:
            for name in sorted({*file.keys()} & own.keys() | buffers.keys()):
                wanted = [*(own | buffers)[name].shape]
                there = name in file.keys()
                found = file.get_slice(name).get_shape() if there else None
                if found != wanted:
                    raise ValueError(f"{REST}: {name} is {found}, not {wanted}")

    def _load_rest(self, folder: Path) -> None:
        """Read what `save_rest` has written."""
        self._optimizer.load_state_dict(optimizer_in(folder))
        file = safe_open(folder / REST, framework="pt")
        for name, buffer in self._model.named_buffers():
            buffer.copy_(file.get_tensor(f"buffer.{name}"))
        if any(key.startswith("grad.") for key in file.keys()):
            again = partial(self._set_gradients, file)
            again()
            self.passed(again, 0)

    def _set_gradients(self, file: Any) -> None:
        """Gradients of a state, which stays open: it may be deleted meanwhile."""
        with self._session.full_params():
            for name, param in self._params.items():
                if f"grad.{name}" in file.keys():
                    param.grad = file.get_tensor(f"grad.{name}").to(param.device)

    def update(self, adam: AdamParams) -> float:
        """Make a step of the optimizer; the norm of all gradients before it was clipped.

        Raises:
            RequestError: There are no gradients, or they are not finite, and are dropped
                then; or the step has failed, and the weights are lost.
        """
        if not self._passes:
            raise RequestError("optim_step: no forward_backward came before it.")
        try:
            self._run.recovery.begin(ServedStep(0))
            self._run.recovery.probe_update()
            self.put_back()
            norm = self._clipped(adam.grad_clip_norm)
            if not math.isfinite(norm):
                raise RequestError(f"optim_step: the norm of the gradients is {norm}.")
            self._step(adam)
        finally:
            self._drop_gradients()
        return norm

    def _clipped(self, most: float) -> float:
        found = self._session.clip_grad_norm(most or math.inf)
        if found is None:
            params = self._params.values()
            found = nn.utils.clip_grad_norm_(params, most or math.inf)
        return float(found)

    def _step(self, adam: AdamParams) -> None:
        """Update the weights, or lose them: there is no copy to go back to."""
        pairs = zip(self._optimizer.param_groups, self._decays, strict=True)
        for group, decays in pairs:
            group["lr"] = adam.learning_rate
            group["weight_decay"] = adam.weight_decay if decays else 0.0
            if "betas" in group:
                group["betas"] = (adam.beta1, adam.beta2, *group["betas"][2:])
            if isinstance(group.get("eps"), float):
                group["eps"] = adam.eps
        self.versions = {uuid.uuid4().hex}
        holder, self._holder = self._holder, None
        try:
            self._optimizer.step()
        except RuntimeError as error:
            raise RequestError(
                f"optim_step: it failed when some weights had changed ({error}). {_LOAD}",
                413,
            ) from error
        self._holder = holder

    def _drop_gradients(self) -> None:
        self._passes, self._pass_bytes = [], 0
        # not those that a step waits to read
        self._optimizer.zero_grad()

    def require_finite(self) -> None:
        """Say so where it is the weights that make a loss which is not finite.

        Raises:
            RequestError: They are not; no copy of those before the update was kept.
        """
        with self._session.full_params():
            for name, param in self._params.items():
                if not param.isfinite().all():
                    raise RequestError(
                        f"{name} is not finite since the last optim_step. {_LOAD}", 410
                    )

    def files(self, folder: Path) -> Files:
        """The tensors of transformers' files; what it writes beside them goes to a folder.

        Raises:
            ConfigError: One is no view of a weight, so it could not be read back.
        """
        tensors: dict[str, Tensor] = {}

        def keep(every: Mapping[str, Tensor], **_: Any) -> StateDictSplit:
            tensors.update(every)
            return StateDictSplit({}, {}, {})

        split, state = "split_torch_state_dict_into_shards", self._model.state_dict()
        with in_place(), patch.object(modeling_utils, split, keep):
            self._model.save_pretrained(folder, state_dict={**state})
        every = self._model.named_parameters(remove_duplicate=False)
        trains = {name for name, param in every if param.requires_grad}
        spans = sorted(
            (t.data_ptr(), t.data_ptr() + t.nbytes, n) for n, t in state.items()
        )
        trained, names = set(), set()
        for key, tensor in tensors.items():
            at = tensor.data_ptr()
            start, stop, name = spans[bisect_right(spans, (at, math.inf, "")) - 1]
            if not start <= at < stop:
                raise ConfigError(f"base_model: {key} {_CONVERTED}")
            if name in trains:
                trained.add(key)
                names.add(start)
        missing = {state[name].data_ptr() for name in trains} - names
        if missing:
            raise ConfigError(f"base_model: {len(missing)} weights {_CONVERTED}")
        return Files(tensors, trained, {name: state[name] for name in trains})

    def save_rest(self, folder: Path, anyway: bool) -> None:
        """Write what training goes on from beside weights; `anyway` without gradients that
        nobody can have.

        Raises:
            RequestError: There are such.
        """
        rest = {f"buffer.{n}": b for n, b in self._model.named_buffers()}
        waits = {name for name, p in self._params.items() if p.grad is not None}
        if waits and self._masters:
            if not anyway:
                raise RequestError(
                    "save_weights: gradients wait, whose sums of protrain_fp32_master are "
                    "not to be had outside of an update. Send optim_step first."
                )
            LOG.warning("gradients that waited for an update are not saved")
            waits.clear()
        with self._session.full_params():
            for name in waits:
                rest[f"grad.{name}"] = self._params[name].grad
            write_safetensors(rest, str(folder / REST))
            rest.clear()
        torch.save(self._optimizer.state_dict(), folder / OPTIMIZER)


def optimizer_in(folder: Path) -> Any:
    """Read the optimizer's state in a folder, from a mapping of the file."""
    at = folder / OPTIMIZER
    return torch.load(at, map_location="cpu", weights_only=True, mmap=True)
