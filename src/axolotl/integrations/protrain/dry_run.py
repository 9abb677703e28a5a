"""`axolotl protrain plan`: what a YAML would need and take, on any card, without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from .args import ProTrainArgs
from .batches import autocast_dtype, sample_batch
from .blueprint import Blueprint, load_blueprint
from .core.cost import block_times
from .core.errors import BudgetError, ConfigError, LayoutError, TraceError
from .core.planner import Forecast, Planner
from .core.profile import (
    GPUS,
    Target,
    cached_hardware,
    device_memory,
    gpu_hardware,
    host_memory,
)
from .core.types import Budget, Hardware, Workload, World
from .planning import (
    FORCED,
    Subject,
    budget_of,
    choose,
    nearest,
    trace_model,
    workload_of,
)
from .report.forecast import (
    DOES_NOT_FIT,
    FITS,
    UNSUPPORTED,
    answer_dict,
    format_bytes,
    hardware_dict,
    lack,
    price_dict,
)
from .run import args_from, cache_folder, missing_capacity, versions

PLUGIN = "axolotl.integrations.protrain.ProTrainPlugin"
DEFAULT_RAM_GIB = 64
"""Of a machine that is not here; the most common box beside one or two 24 GB cards."""

EXIT_CODES = {FITS: 0, DOES_NOT_FIT: 2, UNSUPPORTED: 3}

SEARCHED = {"seq": "sequence_len", "batch": "micro_batch_size", "rank": "lora_r"}
"""What `--max` may ask for, and its key."""

_STRIDE = {"seq": 64, "batch": 1, "rank": 8}
_LEAST = {"sequence_len": 512, "micro_batch_size": 1, "lora_r": 4}
"""Smaller settings than these are no way to make something fit."""
_MOST_TOKENS = 1 << 20
"""`--max` tries no larger micro-batch: a trace knows the values of as many ids."""
_MOST_RANK = 4096
_RAM_GIB = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Sizes that memory is sold in."""


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
        if question.link is not None and not question.gpus:
            raise ConfigError("--link: that of this machine is measured; add --gpu.")
        if question.num_gpus > 1 and not question.gpus:
            raise ConfigError(
                f"--gpus {question.num_gpus}: how fast several cards exchange data is "
                "known of cards by name; add --gpu."
            )
        # before the model is built: a card that is not known is known at once
        self._gpus = [self._gpu(gpu) for gpu in question.gpus]
        self._blueprint = load_blueprint(
            question.config, self._device_type, _with_plugin(question.config)
        )
        self._args = args_from(self._blueprint.cfg)
        self._subjects: dict[str, tuple[Subject, Workload, tuple[str, ...]]] = {}
        tf32 = self._blueprint.cfg.tf32 is True
        self._gpus = [self._gpu(gpu, tf32) for gpu in question.gpus]
        self._machines = self._gpus or [self._this_machine()]

    def forecasts(self) -> list[dict[str, Any]]:
        """One object for each card, as `--json` prints it, and what the page shows."""
        return [self._answer(card) for card in self._machines]

    def largest(self, what: str) -> list[dict[str, Any]]:
        """For each card the largest sequence, batch or rank that some plan fits.

        Args:
            what: A key of `SEARCHED`.

        Raises:
            ConfigError: The YAML has no such number to raise.
        """
        key, cfg = SEARCHED[what], self._blueprint.cfg
        if not cfg[key] or (key == "lora_r" and not cfg.adapter):
            raise ConfigError(f"--max {what}: the YAML sets no {key} to raise.")
        return [self._largest(card, what) for card in self._machines]

    def _largest(self, card: Hardware, what: str) -> dict[str, Any]:
        key, stride = SEARCHED[what], _STRIDE[what]
        limit = self._limit(what) // stride
        found: dict[int, Forecast] = {}

        def fits(count: int) -> bool:
            try:
                found[count] = self._chosen(card, {key: count * stride})
            except BudgetError:
                return False
            return True

        low, high = 0, 1
        while high <= limit and fits(high):
            low, high = high, 2 * high
        high = min(high, limit + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        forecast = found.get(low)
        return {
            "verdict": FITS if forecast else DOES_NOT_FIT,
            "hardware": hardware_dict(card),
            "max": {
                "key": key,
                "value": low * stride if forecast else None,
                "now": self._blueprint.cfg[key],
                "note": self._limit_note(what, low * stride),
            },
            **price_dict(forecast),
        }

    def _limit(self, what: str) -> int:
        """Where the search for the largest ends, fit or not."""
        cfg = self._blueprint.cfg
        if what == "rank":
            return _MOST_RANK
        return (
            _MOST_TOKENS
            // cfg["sequence_len" if what == "batch" else "micro_batch_size"]
        )

    def _limit_note(self, what: str, value: int) -> str | None:
        model: Any = self._blueprint.model
        config = model.config.get_text_config()
        known = getattr(config, "max_position_embeddings", None)
        notes = []
        if what == "seq" and known and value > known:
            notes.append(f"config.json says max_position_embeddings {known}")
        if value + _STRIDE[what] > self._limit(what):
            notes.append("more was not tried")
        return "; ".join(notes) or None

    # one card

    def _answer(self, card: Hardware) -> dict[str, Any]:
        planner = self._planner(card, {})
        subject, _, assumed = self._subject({})
        fits = True
        try:
            forecast = choose(self._args, planner)
        except BudgetError:
            fits = False
            forecast = nearest(self._args, planner)
        answer = answer_dict(forecast, fits)
        answer["alternatives"] = list(self._alternatives(card, planner, answer))
        answer["assumptions"] = [
            *self._blueprint.assumptions,
            *subject.assumptions,
            *assumed,
            *self._unknowns(card, forecast),
        ]
        return answer

    def _unknowns(self, card: Hardware, forecast: Forecast) -> Iterator[str]:
        question, args = self._question, self._args
        if not args.protrain_auto_memory:
            yield "protrain_auto_memory is false: training does not follow this plan"
        yield f"{card.name}: {card.source}"
        if card.unseen_bytes:
            yield (
                f"{card.name}: {format_bytes(card.unseen_bytes)} of its memory go to "
                "the context, to workspaces of kernels and to rounding"
            )
        yield "block times follow from counted operations; training measures them"
        if not question.gpus:
            return
        yield from _limits(args, card, self._budget(card))
        if question.ram_gib is None and args.protrain_cpu_capacity_bytes is None:
            yield f"{DEFAULT_RAM_GIB} GiB of host memory; --ram says otherwise"
        if question.num_gpus > 1:
            yield (
                f"{question.num_gpus} GPUs on one host, each on a link of its own "
                "(--link names the narrower one where they share it); AdamW on the host "
                "shares its memory"
            )

    def _alternatives(
        self, card: Hardware, planner: Planner, answer: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Other settings and their price, the fastest that fits first."""
        fits = answer["verdict"] == FITS
        others: list[dict[str, Any]] = []
        for key in _LEAST:
            value = self._blueprint.cfg[key]
            if value and (key != "lora_r" or self._blueprint.cfg.adapter):
                others += self._doubled(card, key) if fits else self._halved(card, key)
        if not fits:
            others += self._larger_machine(card, planner)
            others.sort(key=lambda other: -(other["tokens_per_s"] or 0))
        yield from others
        if self._question.num_gpus > 1:
            for key, mode in FORCED.items():
                yield _alternative(
                    f"mode {mode}", partial(_in_mode, planner, mode), f"{key}: true"
                )
        elif answer["plan"]["mode"] == "B":
            resident = _alternative(
                "protrain_force_all_persistent: true (no paging)",
                partial(planner.search, frozenset("A")),
            )
            if resident["verdict"] == FITS:
                yield resident
        yield self._without_plugin(planner)

    def _doubled(self, card: Hardware, key: str) -> Iterator[dict[str, Any]]:
        value = self._blueprint.cfg[key]
        yield self._other(card, key, 2 * value)

    def _halved(self, card: Hardware, key: str) -> Iterator[dict[str, Any]]:
        """The largest half, quarter, … that fits, or the smallest, which does not."""
        value = self._blueprint.cfg[key] // 2
        while value >= _LEAST[key]:
            other = self._other(card, key, value)
            if other["verdict"] == FITS or value // 2 < _LEAST[key]:
                yield other
                return
            value //= 2

    def _other(self, card: Hardware, key: str, value: int) -> dict[str, Any]:
        cfg = self._blueprint.cfg
        change, note = {key: value}, None
        if key == "micro_batch_size":
            # the same effective batch, so that training stays the same
            before = cfg.gradient_accumulation_steps or 1
            steps, rest = divmod(before * cfg[key], value)
            if rest or not steps:
                note = f"the effective batch becomes {before * value}"
            else:
                change["gradient_accumulation_steps"] = steps
                note = f"accumulation {before} -> {steps}"
        text = f"{key} {cfg[key]} -> {value}"
        return _alternative(text, partial(self._chosen, card, change), note)

    def _larger_machine(
        self, card: Hardware, planner: Planner
    ) -> Iterator[dict[str, Any]]:
        """The smallest card, or the least host memory, that would do."""
        if not self._question.gpus:
            return
        lacking = nearest(self._args, planner)
        if lacking.device.peak_bytes > lacking.budget.usable_bytes:
            for gpu in sorted(GPUS, key=lambda gpu: gpu.device_bytes):
                if gpu.device_bytes <= card.device_bytes:
                    continue
                larger = gpu_hardware(
                    gpu.name,
                    None,
                    card.host_bytes,
                    num_gpus=self._question.num_gpus,
                )
                other = _alternative(
                    f"--gpu {gpu.name!r}",
                    partial(self._chosen, larger, {}),
                    "the smallest card known here that fits",
                )
                if other["verdict"] == FITS:
                    yield other
                    return
            return
        if self._args.protrain_cpu_capacity_bytes is not None:
            return
        for ram_gib in _RAM_GIB:
            if ram_gib << 30 >= lacking.host.peak_bytes:
                roomy = replace(card, host_bytes=ram_gib << 30)
                yield _alternative(f"--ram {ram_gib}", partial(self._chosen, roomy, {}))
                return

    def _without_plugin(self, planner: Planner) -> dict[str, Any]:
        def plain() -> Forecast:
            for recompute in (False, True):
                forecast = planner.without_paging(recompute)
                lacking = lack(forecast)
                if lacking is None:
                    return forecast
            raise BudgetError(lacking)

        other = _alternative("without this plugin", plain)
        if other["verdict"] == FITS:
            recomputes = other["plan"]["n_checkpoint"] > 0
            key = f"gradient_checkpointing: {str(recomputes).lower()}"
            other["note"] = f"you do not need this plugin: it fits with {key}"
        return other

    def _chosen(self, card: Hardware, change: dict[str, int]) -> Forecast:
        planner = self._planner(card, change)
        try:
            return choose(self._args, planner)
        except BudgetError:
            raise BudgetError(lack(nearest(self._args, planner))) from None

    def _budget(self, card: Hardware) -> Budget:
        """The YAML's limits; of a card that is not here not more than it has."""
        subject, _, _ = self._subject({})
        budget = budget_of(self._args, subject, card.device_bytes, card.host_bytes)
        if not self._question.gpus:
            return budget
        host_bytes = budget.host_bytes
        if self._question.ram_gib is not None:
            host_bytes = min(host_bytes, card.host_bytes)
        return replace(
            budget,
            device_bytes=min(budget.device_bytes, card.device_bytes),
            host_bytes=host_bytes,
        )

    def _planner(self, card: Hardware, change: dict[str, int]) -> Planner:
        subject, workload, _ = self._subject(change)
        trace, layout = subject.traced.trace, subject.layout
        return Planner(
            layout,
            trace,
            workload,
            card,
            block_times(trace, layout, card),
            self._budget(card),
            subject.redone_if_paged,
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
                layout = None
                if change and "lora_r" not in change:
                    layout = self._subject({})[0].layout
                subject = trace_model(model, batch, target, self._args, layout)
                ranks = self._question.num_gpus
                workload, assumed = workload_of(
                    blueprint.cfg,
                    self._args,
                    batch,
                    self._device_type,
                    World(ranks, ranks),
                )
            self._subjects[name] = subject, workload, assumed
        return self._subjects[name]

    # cards

    def _gpu(self, gpu: str, tf32: bool = False) -> Hardware:
        ram = self._question.ram_gib or DEFAULT_RAM_GIB
        question = self._question
        card = gpu_hardware(
            gpu, question.link, int(ram * 2**30), tf32, question.num_gpus
        )
        if ":" not in gpu:
            return card
        return replace(card, name=f"{card.name}, {card.device_bytes / 2**30:g} GiB")

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


def _alternative(
    change: str, plan: Callable[[], Forecast], note: str | None = None
) -> dict[str, Any]:
    forecast = None
    verdict = FITS
    try:
        forecast = plan()
    except BudgetError as error:
        verdict, note = DOES_NOT_FIT, _and(note, str(error))
    except (ConfigError, LayoutError, TraceError) as error:
        verdict, note = UNSUPPORTED, _and(note, str(error))
    return {"change": change, "verdict": verdict, **price_dict(forecast), "note": note}


def _in_mode(planner: Planner, mode: str) -> Forecast:
    modes = frozenset(mode)
    try:
        return planner.search(modes=modes)
    except BudgetError:
        raise BudgetError(lack(planner.nearest(modes=modes))) from None


def _and(note: str | None, error: str) -> str:
    return f"{note}: {error}" if note else error


def _limits(args: ProTrainArgs, card: Hardware, budget: Budget) -> Iterator[str]:
    """Keys of the YAML that hold on a card that is not here."""
    for key, used, has in (
        ("protrain_capacity_bytes", budget.device_bytes, card.device_bytes),
        ("protrain_cpu_capacity_bytes", budget.host_bytes, card.host_bytes),
    ):
        if getattr(args, key) is None:
            continue
        if used == getattr(args, key):
            yield f"{key}: {format_bytes(used)} may be used on {card.name}'s machine"
        else:
            yield (
                f"{key} asks for more than the {format_bytes(has)} beside {card.name}"
            )


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
