"""`axolotl protrain plan`: what a YAML would need and take, on any card, without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from .batches import autocast_dtype, sample_batch
from .blueprint import Blueprint, load_blueprint
from .core.cost import block_times
from .core.errors import BudgetError, ConfigError, LayoutError, TraceError
from .core.planner import Forecast, Planner
from .core.profile import (
    Target,
    cached_hardware,
    device_memory,
    gpu_hardware,
    host_memory,
)
from .core.types import Hardware, Workload
from .planning import Subject, budget_of, choose, trace_model, workload_of
from .report import forecast_dict, page_dict
from .run import args_from, cache_folder, missing_capacity, versions

PLUGIN = "axolotl.integrations.protrain.ProTrainPlugin"
DEFAULT_RAM_GIB = 64
"""Of a machine that is not here; the most common box beside one or two 24 GB cards."""

FITS, DOES_NOT_FIT, UNSUPPORTED = "fits", "does-not-fit", "unsupported"
EXIT_CODES = {FITS: 0, DOES_NOT_FIT: 2, UNSUPPORTED: 3}

SEARCHED = {"seq": "sequence_len", "batch": "micro_batch_size", "rank": "lora_r"}
"""What `--max` may ask for, and its key."""

_STRIDE = {"seq": 64, "batch": 1, "rank": 8}
_LIMIT = {"seq": 1 << 22, "batch": 1 << 12, "rank": 1 << 12}


@dataclass(frozen=True)
class Question:
    """What the command line asks.

    Attributes:
        config: The YAML.
        gpus: `NAME` or `NAME:GiB` of each card; this machine if empty.
        num_gpus: How many of each.
        ram_gib: Memory of the host; None for this one's, or `DEFAULT_RAM_GIB` beside
            a card that is not here.
        link: Between them; None for each card's own.
    """

    config: Path
    gpus: tuple[str, ...] = ()
    num_gpus: int = 1
    ram_gib: float | None = None
    link: str | None = None


class DryRun:
    """Traces the model of a YAML and plans for every card that was asked about.

    Raises:
        ConfigError: A key, an option or a file is at fault.
        TraceError: The model cannot be run without weights.
        LayoutError: Nothing in it can be paged.
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        on_cuda = bool(question.gpus) or torch.cuda.is_available()
        self._device_type = "cuda" if on_cuda else "cpu"
        # before the model is built: a card that is not known is known at once
        cards = [self._card(gpu) for gpu in question.gpus]
        self._blueprint = load_blueprint(
            question.config, self._device_type, _with_plugin(question.config)
        )
        self._args = args_from(self._blueprint.cfg)
        self._cards = cards or [self._this_machine()]
        self._subjects: dict[str, tuple[Subject, Workload, tuple[str, ...]]] = {}

    def forecasts(self) -> list[dict[str, Any]]:
        """One object for each card, as `--json` prints it, and what the page shows."""
        return [self._answer(card) for card in self._cards]

    def largest(self, what: str) -> list[dict[str, Any]]:
        """For each card the largest sequence, batch or rank that some plan fits.

        Args:
            what: A key of `SEARCHED`.

        Raises:
            ConfigError: The YAML has no such number to raise.
        """
        key = SEARCHED[what]
        if not self._blueprint.cfg[key]:
            raise ConfigError(f"--max {what}: the YAML sets no {key}.")
        return [
            {
                "hardware": _hardware_dict(card),
                "max": {"key": key, "value": self._largest(card, what)},
            }
            for card in self._cards
        ]

    def _largest(self, card: Hardware, what: str) -> int | None:
        stride = _STRIDE[what]

        def fits(count: int) -> bool:
            try:
                self._planner(card, {SEARCHED[what]: count * stride}).search()
            except BudgetError:
                return False
            return True

        if not fits(1):
            return None
        low, high = 1, 2
        while high * stride <= _LIMIT[what] and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low * stride

    # one card

    def _answer(self, card: Hardware) -> dict[str, Any]:
        planner = self._planner(card, {})
        subject, _, assumed = self._subject({})
        answer: dict[str, Any] = {
            "verdict": FITS,
            "reason": None,
            "hardware": _hardware_dict(card),
        }
        try:
            forecast = choose(self._args, planner)
        except BudgetError as error:
            answer.update(verdict=DOES_NOT_FIT, reason=str(error))
            forecast = planner.nearest()
        if forecast.plan.paged and self._question.num_gpus > 1:
            answer.update(
                verdict=UNSUPPORTED,
                reason=f"--gpus {self._question.num_gpus}: paging on several GPUs is "
                "not available in this version, and not everything fits on one. Ask "
                "for one GPU.",
            )
        answer.update(forecast_dict(forecast))
        if answer["verdict"] == DOES_NOT_FIT:
            answer.update(step_s=None)
        answer["alternatives"] = list(self._alternatives(card, planner, answer))
        answer["assumptions"] = [
            *self._blueprint.assumptions,
            *subject.assumptions,
            *assumed,
            *self._unknowns(card, forecast),
        ]
        answer.update(page_dict(forecast))
        return answer

    def _unknowns(self, card: Hardware, forecast: Forecast) -> Iterator[str]:
        yield f"{card.name}: {card.source}"
        if forecast.hardware.unseen_bytes:
            yield (
                f"{card.unseen_bytes:,} bytes of the device for context, workspaces "
                "and rounding"
            )
        yield "block times from counted operations, not from running them"
        if self._question.gpus and self._question.ram_gib is None:
            yield f"{DEFAULT_RAM_GIB} GiB of host memory; say otherwise with --ram"
        if self._question.gpus and self._args.protrain_capacity_bytes is not None:
            yield "protrain_capacity_bytes is ignored beside --gpu"

    def _alternatives(
        self, card: Hardware, planner: Planner, answer: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Other settings and their price: larger ones if this fits, else smaller."""
        cfg = self._blueprint.cfg
        fits = answer["verdict"] == FITS
        for key in ("micro_batch_size", "sequence_len", "lora_r"):
            value = cfg[key]
            if not value or (key == "lora_r" and not cfg.adapter):
                continue
            other = value * 2 if fits else value // 2
            if other:
                changed = partial(self._chosen, card, {key: other})
                yield _alternative(f"{key} {value} -> {other}", changed)
        if answer["plan"]["mode"] == "B":
            yield _alternative(
                "everything resident (protrain_force_all_persistent: true)",
                partial(planner.search, all_resident=True),
            )
        elif fits and not answer["plan"]["n_checkpoint"]:
            yield _alternative(
                "you do not need this plugin: it fits without it",
                partial(planner.search, all_resident=True),
            )
        elif fits:
            yield _alternative(
                "you do not need this plugin: it fits with gradient_checkpointing: true",
                planner.recomputing_all,
            )

    def _chosen(self, card: Hardware, change: dict[str, int]) -> Forecast:
        return choose(self._args, self._planner(card, change))

    def _planner(self, card: Hardware, change: dict[str, int]) -> Planner:
        subject, workload, _ = self._subject(change)
        trace, layout = subject.traced.trace, subject.layout
        return Planner(
            layout,
            trace,
            workload,
            card,
            block_times(trace, layout, card),
            budget_of(self._args, subject, card.device_bytes, card.host_bytes),
        )

    def _subject(
        self, change: dict[str, int]
    ) -> tuple[Subject, Workload, tuple[str, ...]]:
        """The model traced with some keys of the YAML changed; each only once."""
        name = repr(change)
        if name not in self._subjects:
            blueprint = self._blueprint
            with _changed(blueprint, change) as (model, batch):
                target = Target(self._device_type, autocast_dtype(blueprint.cfg))
                subject = trace_model(model, batch, target, self._args)
                workload, assumed = workload_of(
                    blueprint.cfg, self._args, batch, self._device_type
                )
            self._subjects[name] = subject, workload, assumed
        return self._subjects[name]

    # cards

    def _card(self, gpu: str) -> Hardware:
        ram = self._question.ram_gib or DEFAULT_RAM_GIB
        return gpu_hardware(gpu, self._question.link, int(ram * 2**30))

    def _this_machine(self) -> Hardware:
        device = torch.device(self._device_type)
        capacity = self._args.protrain_capacity_bytes
        if self._device_type == "cuda":
            capacity = device_memory(device)
        if capacity is None:
            raise missing_capacity()
        ram = self._question.ram_gib
        return cached_hardware(
            cache_folder(self._args),
            device,
            host_memory() if ram is None else int(ram * 2**30),
            capacity,
            versions(),
        )


def _alternative(change: str, plan: Callable[[], Forecast]) -> dict[str, Any]:
    try:
        forecast = plan()
    except (BudgetError, ConfigError, LayoutError, TraceError) as error:
        fits = isinstance(error, BudgetError)
        return {
            "change": change,
            "verdict": DOES_NOT_FIT if fits else UNSUPPORTED,
            "device_peak_bytes": None,
            "step_s": None,
            "tokens_per_s": None,
            "note": str(error),
        }
    plan_ = forecast.plan
    return {
        "change": change,
        "verdict": FITS,
        "device_peak_bytes": forecast.device.peak_bytes,
        "step_s": forecast.step.total_s,
        "tokens_per_s": forecast.tokens_per_s,
        "note": f"n_persist {plan_.n_persist}, n_buffer {plan_.n_buffer}, "
        f"n_checkpoint {plan_.n_checkpoint}",
    }


def _hardware_dict(card: Hardware) -> dict[str, Any]:
    return {"name": card.name, "source": card.source, "link": card.link}


def _with_plugin(config: Path) -> dict[str, object]:
    """The YAML as if it listed the plugin, so that its keys are checked."""
    try:
        raw = yaml.safe_load(config.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}  # reading it again says what is wrong
    listed = raw.get("plugins") if isinstance(raw, dict) else None
    if any("protrain" in str(plugin).lower() for plugin in listed or ()):
        return {}
    return {"plugins": [*(listed or ()), PLUGIN]}


@contextmanager
def _changed(
    blueprint: Blueprint, change: dict[str, int]
) -> Iterator[tuple[nn.Module, dict[str, torch.Tensor]]]:
    """The model and a batch for it with some keys set otherwise inside."""
    cfg, model = blueprint.cfg, blueprint.model
    before = {key: cfg[key] for key in change}
    adapters: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for key, value in change.items():
            cfg[key] = value
            if key == "lora_r":
                adapters = list(_resize_adapters(model, before[key], value))
        batch = sample_batch(cfg, model, []) if change else blueprint.batch
        yield model, batch
    finally:
        for key, value in before.items():
            cfg[key] = value
        for owner, name, param in adapters:
            setattr(owner, name, param)


def _resize_adapters(
    model: nn.Module, old: int, new: int
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Give LoRA weights on the meta device another rank; yields what they were."""
    for path, owner in list(model.named_modules()):
        for name, param in list(owner.named_parameters(path, recurse=False)):
            first = "lora_A" in name or "lora_embedding_A" in name
            dim = 0 if first else 1
            if ".lora_" not in name or param.ndim != 2 or param.shape[dim] != old:
                continue
            shape = list(param.shape)
            shape[dim] = new
            attribute = name.rpartition(".")[2]
            yield owner, attribute, param
            resized = nn.Parameter(param.data.new_empty(shape), param.requires_grad)
            setattr(owner, attribute, resized)


def worst(answers: Sequence[dict[str, Any]]) -> int:
    """Exit code for all cards together: 0 only if every one of them fits."""
    return max(EXIT_CODES[answer["verdict"]] for answer in answers)
