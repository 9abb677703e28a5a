"""The service without HTTP: one base under a plan, one thread that makes all steps.

Requests are checked by the thread that brings them and answered by a future. The one
thread shows the adapter of whose turn it is (`turns`), runs, and keeps the next one out:
nothing of the model is touched anywhere else.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import os
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from axolotl.cli.config import load_cfg
from axolotl.integrations.base import PluginManager
from axolotl.train import setup_model_and_tokenizer
from axolotl.utils.dict import DictDefault
from axolotl.utils.logging import get_logger
from torch import Tensor

from ..args import PLUGIN, lists_plugin
from ..core.errors import (
    FOREIGN_ERRORS,
    CheckpointError,
    ConfigError,
    DeviceMemoryError,
    ProTrainError,
    RequestError,
)
from ..core.runtime import is_shortage
from ..planning import autocast_dtype
from ..plugin import ProTrainPlugin
from ..run import TrainingRun
from .adapters import (
    AdapterSpec,
    AdapterState,
    AdapterStore,
    claimed,
    folder_of,
    path_of,
)
from .live import AdamParams, LiveAdapter
from .losses import LOSSES, TARGETS, Datum, Settings, check_data, checked_settings
from .turns import Turns

LOG = get_logger(__name__)

LAST = "_last"
"""Name under which `close` saves what has changed since its last save."""
MOST_ANSWERS = 512
"""Answers of one model that are kept for a client that asks again."""
_DROPPED = frozenset(
    "auto_resume_from_checkpoints resume_from_checkpoint lora_model_dir "
    "val_set_size test_datasets lora_dropout rl torch_compile".split()
)
_KERNELS = ("mlp", "qkv", "o", "embedding")
_FAULTS = (ProTrainError, OSError, MemoryError, *FOREIGN_ERRORS)
"""What ends one request, and not the service."""
_DEFAULTS = {
    "lora_r": 32,
    "lora_alpha": 32,
    "datasets": [{"path": "none", "type": "completion"}],
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1,
    "learning_rate": 1e-4,
    "optimizer": "adamw_torch_fused",
    "sequence_len": 2048,
}


class Ticket(Future[Any]):
    """The answer to a request, its number, and what tells it from others of this number
    (None where it could not be read)."""

    number = 0
    asks: Any = None


def derive(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The YAML that is loaded for a service: an adapter of the largest rank on every layer
    that one may train.

    Raises:
        ConfigError: It asks for another kind of adapter.
    """
    adapter = "qlora" if raw.get("load_in_4bit") else "lora"
    if raw.get("adapter") not in (None, "lora", "qlora"):
        raise ConfigError(f"adapter: {raw['adapter']}; the service trains lora, qlora.")
    keys = {key: value for key, value in raw.items() if key not in _DROPPED}
    keys = {**_DEFAULTS, "adapter": adapter, **keys}
    plugins = list(raw.get("plugins") or ())
    if not lists_plugin(plugins):
        keys["plugins"] = [*plugins, PLUGIN]
    if not raw.get("lora_target_modules"):
        keys |= {"lora_target_linear": True, "lora_target_modules": ["lm_head"]}
    # fused kernels are chosen for layers that all have adapters
    own = dict.fromkeys((f"lora_{what}_kernel" for what in _KERNELS), False)
    own |= {"protrain_auto_memory": True, "sample_packing": False}
    return {**keys, **own, "lora_dropout": 0.0, "save_strategy": "no"}


def _multiple(cfg: Any) -> int:
    """Of what Axolotl's collator makes the length of rows a multiple."""
    multiple = int(cfg.pad_to_multiple_of or 64)
    if cfg.pad_to_sequence_len is None:
        return multiple
    return -(-cfg.sequence_len // multiple) * multiple if cfg.pad_to_sequence_len else 1


class AdapterService:
    """Trains adapters of one base, each asked for by the id of its model.

    Every method that changes a model returns a future at once and takes its turn after
    those of the same model that came before, by `number` if given (Tinker's `seq_id`).
    Any thread may call them. What has changed is saved when it closes, at the latest when
    Python ends.

    Args:
        config: An Axolotl YAML; the largest adapter and micro-batch to expect are its
            lora_r, lora_target_modules (all linear layers and the head, if unset),
            sequence_len and micro_batch_size.
        folder: For what is saved; by default `service` in its output_dir.
        adapter_bytes: Of the host, for all adapters; by default a quarter of what is free
            once the base is loaded.

    Raises:
        ProTrainError: The base cannot be loaded, no plan fits, or another server has the
            folder.
    """

    def __init__(
        self,
        config: Path,
        folder: Path | None = None,
        adapter_bytes: int | None = None,
    ) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "WORLD_SIZE: the service trains on one rank. Start it without torchrun or "
                "accelerate launch; on several cards, one server each, with folders of "
                "their own."
            )
        with ExitStack() as held:
            self._load_base(config, folder, adapter_bytes, held)
            self._held = held.pop_all()
        self._turns: Turns[tuple[Callable[[], Any], Ticket]] = Turns()
        self._answers: dict[str, OrderedDict[int, Ticket]] = {}
        self._unsaved: set[str] = set()
        self._lost: list[str] = []
        self._passes = 0
        self._closing = False
        self._changed = threading.Condition()
        # one that is never closed must not keep Python from ending
        self._thread = threading.Thread(
            target=self._serve, name="adapter-service", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    def _load_base(
        self,
        config: Path,
        folder: Path | None,
        adapter_bytes: int | None,
        held: ExitStack,
    ) -> None:
        try:
            raw = yaml.safe_load(config.read_text("utf-8"))
        except (yaml.YAMLError, UnicodeError) as error:
            raise ConfigError(f"{config} is no YAML: {error}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{config} is not an Axolotl YAML.")
        cfg = load_cfg(DictDefault(derive(raw)))
        self.folder = folder or Path(cfg.output_dir) / "service"
        held.enter_context(claimed(self.folder))
        plugins = PluginManager.get_instance().plugins.values()
        next(p for p in plugins if isinstance(p, ProTrainPlugin)).load_datasets(cfg)
        model, tokenizer, _, _ = setup_model_and_tokenizer(cfg)
        # without dropout, and the same in every pass
        self._model: Any = model.eval()
        self.base_model = str(raw["base_model"])
        self.tokenizer = str(cfg.tokenizer_config or cfg.base_model_config)
        self.sequence_len = int(cfg.sequence_len)
        self.alpha = float(cfg.lora_alpha)
        self._rows = int(cfg.micro_batch_size)
        self._multiple = _multiple(cfg)
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._autocast = autocast_dtype(cfg)
        on_cuda = torch.cuda.is_available()
        self._device = torch.device("cuda:0" if on_cuda else "cpu")
        self.live = LiveAdapter(self._model)
        self._run = TrainingRun(cfg, (), LOG)
        self._run.open(
            self._model, self._device, False, reserve_bytes=self.live.reserve_bytes
        )
        assert self._run.session is not None and self._run.report is not None
        self.session, self.report = self._run.session, self._run.report
        self.live.open(self.session.device)
        if adapter_bytes is None:
            adapter_bytes = self.report.forecast.hardware.host_bytes // 4
        self.store = AdapterStore(
            self.folder / "_evicted",
            adapter_bytes,
            self.session.device,
            self.live.layout,
            self.live.write_config,
        )

    def __enter__(self) -> AdapterService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # what clients ask for; any thread

    def create(
        self,
        model: str,
        rank: int,
        kinds: Sequence[str] | None = None,
        seed: int | None = None,
    ) -> Ticket:
        """A new adapter; `kinds` of `adapters.KINDS`, by default all. Asked again, the
        answer is the first one.

        Raises:
            RequestError: It is larger than what the server plans for, or another one has
                this id.
        """
        spec = AdapterSpec(
            rank, self.alpha, tuple(self.live.kinds if kinds is None else kinds)
        )
        self.live.layout(spec)
        return self._begin(
            model, (spec, seed), partial(self._create, model, spec, seed)
        )

    def create_from(self, model: str, path: str, with_optimizer: bool) -> Ticket:
        """A new adapter that begins as a saved one.

        Raises:
            RequestError: The path is not one, or another model has this id.
        """
        folder_of(self.folder, path)
        act = partial(self._load, model, path, with_optimizer)
        return self._begin(model, (path, with_optimizer), act)

    def forward_backward(
        self,
        model: str,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        settings: Mapping[str, Any] | None = None,
        number: int | None = None,
        forward_only: bool = False,
    ) -> Ticket:
        """Add gradients of a loss, which is a sum over tokens, to those that wait.

        Returns:
            The loss, and for each row the log-probabilities of its targets, float32.

        Raises:
            RequestError: The data are not such that a pass may see them.
        """

        def check() -> Callable[[], Any]:
            given = checked_settings(loss_fn, settings or {})
            check_data(data, loss_fn, self._vocabulary, self.sequence_len)
            return partial(self._pass, model, data, loss_fn, given, forward_only)

        sent = None if number is None else _digest(data)
        asks = (loss_fn, {**(settings or {})}, forward_only, sent)
        return self._ask(model, number, asks, check)

    def optim_step(
        self, model: str, adam: AdamParams, number: int | None = None
    ) -> Ticket:
        """Update an adapter by AdamW; the norm of its gradients, before clipping."""
        return self._ask(
            model, number, adam, lambda: partial(self._update, model, adam)
        )

    def save(
        self,
        model: str,
        name: str,
        number: int | None = None,
        whole: bool = True,
        overwrite: bool = True,
    ) -> Ticket:
        """Save an adapter as PEFT does, if `whole` with its optimizer state; the path to
        load it by. Without `overwrite`, a name that is there is refused."""

        def check() -> Callable[[], Any]:
            path = path_of(model, "weights" if whole else "sampler_weights", name)
            return partial(self._save, model, path, whole, overwrite)

        return self._ask(model, number, (name, whole, overwrite), check)

    def load(
        self, model: str, path: str, with_optimizer: bool, number: int | None = None
    ) -> Ticket:
        """Make an adapter equal to a saved one of the same rank and layers."""

        def check() -> Callable[[], Any]:
            folder_of(self.folder, path)
            return partial(self._load, model, path, with_optimizer)

        return self._ask(model, number, (path, with_optimizer), check)

    def refuse(self, model: str, number: int, error: RequestError) -> None:
        """Use up the number of a request that could not be read: those after it would
        wait for ever.

        Raises:
            RequestError: `error`, or why the number cannot be used.
        """

        def check() -> Callable[[], Any]:
            raise error

        self._ask(model, number, None, check)
        raise error

    def unload(self, model: str) -> None:
        """Forget a model; what it has saved stays. Its requests that wait are refused.

        Raises:
            RequestError: There is no such model.
        """
        with self._changed:
            self._require(model)
            for _, future in self._turns.close(model):
                future.set_exception(RequestError(f"{model} was unloaded.", 410))
            del self._answers[model]
            # its bytes are the other thread's to free
            self._changed.notify()

    def missing(self, model: str, number: int) -> int | None:
        """The number of a request that has not arrived and that this one waits for."""
        with self._changed:
            return self._turns.missing(model, number)

    def answer(self, model: str, number: int) -> Ticket:
        """The future of a request that has arrived.

        Raises:
            RequestError: There is none, or it is too old.
        """
        with self._changed:
            self._require(model)
            future = self._answers[model].get(number)
            if future is None:
                raise RequestError(f"{model} has no request {number}.", 404)
            return future

    def spec(self, model: str) -> AdapterSpec:
        """What a model's adapter is.

        Raises:
            RequestError: There is no such model.
        """
        layout = self.store.layouts.get(model)
        if layout is None:
            raise RequestError(f"model_id: there is no model {model}.", 404)
        return layout.spec

    def status(self) -> dict[str, Any]:
        """Adapters, bytes and the plan, for people and as JSON."""
        store, live = self.store, self.live
        adapters = [
            {
                "model_id": model,
                "rank": layout.spec.rank,
                "layers": list(layout.spec.kinds),
                "bytes": layout.nbytes,
                "on_host": store.cached(model) is not None,
            }
            for model, layout in [*store.layouts.items()]
        ]
        return {
            "base_model": self.base_model,
            "adapters": adapters,
            "host_bytes": store.used_bytes,
            "switches": live.switches,
            "prefetched": live.prefetched,
            "moved_bytes": live.moved_bytes,
            "plan": self.report.table(),
        }

    def close(self) -> None:
        """Finish the request that runs, refuse those that wait, and save each adapter that
        has changed since its last save as `_last`.

        Raises:
            CheckpointError: One could not be saved.
        """
        atexit.unregister(self.close)
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        lost, self._lost = self._lost, []
        if lost:
            raise CheckpointError(
                f"what these have learned is lost: {'; '.join(lost)}."
            )

    @property
    def is_serving(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive() and not self._closing

    # the queue; under its lock

    def _require(self, model: str) -> None:
        if model not in self._answers:
            raise RequestError(f"model_id: there is no model {model}.", 404)

    def _begin(self, model: str, asks: Any, act: Callable[[], Any]) -> Ticket:
        # its first save would be refused
        path_of(model, "weights", "first")
        with self._changed:
            if model not in self._answers and not self._closing:
                self._turns.open(model)
                self._answers[model] = OrderedDict()
            return self._ask(model, 0, asks, lambda: act)

    def _ask(
        self,
        model: str,
        number: int | None,
        asks: Any,
        check: Callable[[], Callable[[], Any]],
    ) -> Ticket:
        """Queue a request; one that is refused uses up its number."""
        known = self._known(model, number, asks)
        if known is not None:
            return known
        try:
            act: Callable[[], Any] | None = check()
        except RequestError as error:
            act, refusal = None, error
        future = Ticket()
        # nobody can cancel it
        future.set_running_or_notify_cancel()
        with self._changed:
            # it may have come twice at once
            known = self._known(model, number, asks)
            if known is not None:
                return known
            if number is None:
                number = self._turns.number(model)
            self._turns.add(model, number, None if act is None else (act, future))
            answers = self._answers[model]
            answers[number], future.number, future.asks = future, number, asks
            while len(answers) > MOST_ANSWERS and answers[next(iter(answers))].done():
                answers.popitem(last=False)
            self._changed.notify()
        if act is None:
            future.set_exception(refusal)
            raise refusal
        return future

    def _known(self, model: str, number: int | None, asks: Any) -> Ticket | None:
        with self._changed:
            if self._closing:
                raise RequestError("the server is stopping.", 409)
            self._require(model)
            if number is None or self._turns.is_new(model, number):
                return None
            known = self._answers[model].get(number)
            if known is None:
                raise RequestError(f"seq_id {number} was answered long ago.", 410)
            if known.asks is not None and asks is not None and known.asks != asks:
                raise RequestError(
                    f"seq_id {number}: {model} has had another request of this number. "
                    "Count on from the last one."
                )
            return known

    # the one thread

    def _serve(self) -> None:
        try:
            while (turn := self._next()) is not None:
                act, future = turn
                try:
                    result = act()
                except _FAULTS as error:
                    if not isinstance(error, ProTrainError):
                        LOG.error(traceback.format_exc())
                    future.set_exception(error)
                else:
                    future.set_result(result)
        finally:
            with self._changed:
                self._closing = True
                self._turns = Turns()
                asked = [f for all_ in self._answers.values() for f in all_.values()]
            for future in asked:
                if not future.done():
                    future.set_exception(RequestError("the server has stopped.", 409))
            self._save_all()
            self.live.leave()
            self.store.close()
            self._run.close()
            self._held.close()

    def _next(self) -> tuple[Callable[[], Any], Ticket] | None:
        while True:
            with self._changed:
                gone = {*self.store.layouts} - {*self._answers}
                if not gone and self._closing:
                    return None
                turn = None if gone else self._turns.take()
                if turn is not None:
                    return turn[2]
                if not gone:
                    self._changed.wait()
            for model in gone:
                self.live.leave()
                self.store.drop(model)
                self._unsaved.discard(model)

    def _create(self, model: str, spec: AdapterSpec, seed: int | None) -> str:
        self.live.leave()
        state = self.store.new(self.live.layout(spec))
        self.live.initialise(state, seed)
        self.store.put(model, state)
        return model

    def _state(self, model: str) -> AdapterState:
        if model not in self.store.layouts:
            raise RequestError(f"model_id: {model} could not be created.", 404)
        if self.store.cached(model) is None:
            # what is shown may have to leave for it
            self.live.leave()
        return self.store.get(model)

    def _prefetch(self) -> None:
        """Copy the adapter of the next turn while this one computes."""
        with self._changed:
            model = self._turns.peek()
        state = self.store.cached(model) if model else None
        if state is not None:
            self.live.prefetch(state)

    def _update(self, model: str, adam: AdamParams) -> float:
        self.live.show(self._state(model))
        self._prefetch()
        norm = self.live.update(adam)
        self._unsaved.add(model)
        return norm

    def _save(self, model: str, path: str, whole: bool, overwrite: bool = True) -> str:
        state, folder = self._state(model), folder_of(self.folder, path)
        if not overwrite and folder.exists():
            raise RequestError(
                f"path: {path} is there already. Choose another name, or set overwrite."
            )
        self.live.put_back()
        self.store.write(folder, state, whole)
        if whole:
            self._unsaved.discard(model)
            self.store.keep_copy(path, state)
        return path

    def _load(self, model: str, path: str, with_optimizer: bool) -> str:
        # what is shown may have to leave
        self.live.leave()
        kept = self.store.cached(path) if with_optimizer else None
        folder, read = folder_of(self.folder, path), self.store.read
        state = self.store.copied(kept) if kept else read(folder, with_optimizer)
        known = self.store.layouts.get(model)
        if known is not None and known != state.layout:
            self.store.discard(state)
            raise RequestError(
                f"path: {path} has rank {state.layout.spec.rank} on "
                f"{', '.join(state.layout.spec.kinds)}, and {model} rank "
                f"{known.spec.rank} on {', '.join(known.spec.kinds)}. Create a model "
                "from the state instead."
            )
        self.store.put(model, state)
        self._unsaved.discard(model)
        return path

    def _save_all(self) -> None:
        for model in sorted(self._unsaved & {*self.store.layouts}):
            path = f"tinker://{model}/weights/{LAST}"
            try:
                LOG.info(f"saved as {self._save(model, path, True)}")
            except _FAULTS as error:
                self._lost.append(f"{model} ({error})")

    def _pass(
        self,
        model: str,
        data: Sequence[Datum],
        loss_fn: str,
        settings: Settings,
        forward_only: bool,
    ) -> tuple[float, list[Tensor]]:
        state = self._state(model)
        self.live.show(state)
        self.live.begin_pass()
        self._passes += 1
        began: list[bool] = []

        def run() -> tuple[float, list[Tensor]]:
            if began:
                self.live.leave()
                self.live.show(state)
            began.append(True)
            total, rows = 0.0, []
            for first in range(0, len(data), self._rows):
                some = data[first : first + self._rows]
                loss, logprobs = self._micro_batch(
                    some, loss_fn, settings, forward_only
                )
                total += loss
                rows += logprobs
            if not math.isfinite(total):
                raise RequestError(
                    f"data: the loss is {total}. Look at the logprobs and advantages."
                )
            return total, rows

        # the part of a trainer that a repeated step is named by
        step = SimpleNamespace(state=SimpleNamespace(global_step=self._passes - 1))
        self._run.recovery.begin(step)  # type: ignore[arg-type]
        try:
            result = self._run.recovery.attempt(run, "forward")
        except _FAULTS as error:
            # the adapter is as it was before: the host has it, and is shown again
            traceback.clear_frames(error.__traceback__)
            self.session.forget_gradients()
            self.live.leave()
            short = isinstance(error, RuntimeError) and is_shortage(error)
            if short or isinstance(error, DeviceMemoryError):
                raise RequestError(
                    f"data: the device has no room for this request: {error}", 413
                ) from error
            raise
        if not forward_only:
            self.live.passed()
            self._unsaved.add(model)
        return result

    def _micro_batch(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        settings: Settings,
        forward_only: bool,
    ) -> tuple[float, list[Tensor]]:
        """As a training step of Axolotl has it: rows of one length, in which there is
        room for the token that the client has shifted away."""
        longest = max(datum.tokens.numel() for datum in data)
        longest = min(longest + 1, self.sequence_len)
        length = -(-longest // self._multiple) * self._multiple
        tokens = torch.zeros(len(data), length, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        targets = torch.full_like(tokens, -100)
        given = {
            name: torch.zeros(len(data), length) for name in LOSSES[loss_fn].inputs
        }
        for row, datum in enumerate(data):
            end = datum.tokens.numel()
            tokens[row, :end] = datum.tokens
            mask[row, : end + 1] = 1
            targets[row, :end] = datum.inputs[TARGETS]
            for name, values in given.items():
                values[row, :end] = datum.inputs[name]
        device = self._device
        given = {name: values.to(device) for name, values in given.items()}
        autocast = (
            torch.autocast(device.type, self._autocast)
            if self._autocast
            else nullcontext()
        )
        with torch.set_grad_enabled(not forward_only):
            with autocast:
                output = self._model(
                    input_ids=tokens.to(device),
                    attention_mask=mask.to(device),
                    use_cache=False,
                )
            logits = output.logits.float().flatten(0, 1)
            flat = targets.flatten().to(device)
            nll = torch.nn.functional.cross_entropy(logits, flat, reduction="none")
            logprobs = -nll.view(targets.shape)
            loss = LOSSES[loss_fn].of(logprobs, given, settings)
        # the copies of this forward go first
        self._prefetch()
        if not forward_only:
            loss.backward()
        found = logprobs.detach().cpu()
        rows = [found[row, : d.tokens.numel()].clone() for row, d in enumerate(data)]
        return float(loss.detach()), rows


def _digest(data: Sequence[Datum]) -> bytes:
    found = hashlib.sha256()
    for datum in data:
        for name, values in [("", datum.tokens), *sorted(datum.inputs.items())]:
            found.update(f"{name} {values.dtype} {values.numel()} ".encode())
            found.update(values.numpy().tobytes())
    return found.digest()
