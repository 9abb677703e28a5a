"""`axolotl protrain plan`: what a YAML would need and take, on any card, without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from ..args import FORCED, PLUGIN, ProTrainArgs, args_from, lists_plugin
from ..core.errors import BudgetError, ConfigError, LayoutError, TraceError
from ..core.planner import Forecast, Planner
from ..core.profile import GPUS, gpu_hardware, host_memory
from ..core.types import Budget, Hardware, World
from ..offline.meta_model import load_meta_model
from ..planning import Subject, plan_for, subject_of, this_machine
from ..report.forecast import (
    DOES_NOT_FIT,
    FITS,
    UNSUPPORTED,
    answer_dict,
    format_bytes,
    hardware_dict,
    lack,
    price_dict,
)

DEFAULT_RAM_GIB = 64
"""Of a machine that is not here; the most common box beside one or two 24 GB cards."""

EXIT_CODES = {FITS: 0, DOES_NOT_FIT: 2, UNSUPPORTED: 3}


class _Setting(NamedTuple):
    """A number of the YAML that alternatives and `--max` change.

    Attributes:
        key: Its name there.
        stride: `--max` answers in multiples of it.
        least: Smaller ones are no way to make something fit.
    """

    key: str
    stride: int
    least: int


_SETTINGS = {
    "seq": _Setting("sequence_len", 64, 512),
    "batch": _Setting("micro_batch_size", 1, 1),
    "rank": _Setting("lora_r", 8, 4),
}
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
        self._machines = [self._gpu(gpu) for gpu in question.gpus]
        self._meta = load_meta_model(
            question.config, self._device_type, _with_plugin(question.config)
        )
        self._cfg = self._meta.cfg
        self._args = args_from(self._cfg)
        self._subjects: dict[str, Subject] = {}
        self._machines = [self._gpu(gpu, self._cfg.tf32) for gpu in question.gpus]
        if not question.gpus:
            ram = question.ram_gib
            host_bytes = host_memory() if ram is None else int(ram * 2**30)
            device = torch.device(self._device_type)
            self._machines = [this_machine(self._args, device, host_bytes)]

    def forecasts(self) -> list[dict[str, Any]]:
        """One object for each card, as `--json` prints it, and what the page shows."""
        return [self._answer(card) for card in self._machines]

    def largest(self, what: str) -> list[dict[str, Any]]:
        """For each card the largest sequence, batch or rank that some plan fits.

        Args:
            what: `seq`, `batch` or `rank`.

        Raises:
            ConfigError: The YAML has no such number to raise.
        """
        if not self._is_set(_SETTINGS[what].key):
            raise ConfigError(
                f"--max {what}: the YAML sets no {_SETTINGS[what].key} to raise."
            )
        return [self._largest(card, what) for card in self._machines]

    def _is_set(self, key: str) -> bool:
        return bool(self._cfg[key]) and (key != "lora_r" or bool(self._cfg.adapter))

    def _largest(self, card: Hardware, what: str) -> dict[str, Any]:
        key, stride, _ = _SETTINGS[what]
        limit = self._limit(what) // stride
        found: dict[int, Forecast] = {}

        def fits(count: int) -> bool:
            try:
                found[count] = self._fitting(card, {key: count * stride})
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
                "now": self._cfg[key],
                "note": self._limit_note(what, low * stride),
            },
            **price_dict(forecast),
        }

    def _limit(self, what: str) -> int:
        """Where the search for the largest ends, fit or not."""
        if what == "rank":
            return _MOST_RANK
        other = "sequence_len" if what == "batch" else "micro_batch_size"
        return _MOST_TOKENS // self._cfg[other]

    def _limit_note(self, what: str, value: int) -> str | None:
        model: Any = self._meta.model
        config = model.config.get_text_config()
        known = getattr(config, "max_position_embeddings", None)
        notes = []
        if what == "seq" and known and value > known:
            notes.append(f"config.json says max_position_embeddings {known}")
        if value + _SETTINGS[what].stride > self._limit(what):
            notes.append("more was not tried")
        return "; ".join(notes) or None

    # one card

    def _answer(self, card: Hardware) -> dict[str, Any]:
        forecast, planner = self._plan(card)
        answer = answer_dict(forecast, fits=lack(forecast) is None)
        answer["alternatives"] = list(self._alternatives(card, planner, forecast))
        answer["assumptions"] = [
            *self._meta.assumptions,
            *self._subject().assumptions,
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
        yield from _limits(args, card, forecast.budget)
        if question.ram_gib is None and args.protrain_cpu_capacity_bytes is None:
            yield f"{DEFAULT_RAM_GIB} GiB of host memory; --ram says otherwise"
        if question.num_gpus > 1:
            yield (
                f"{question.num_gpus} GPUs on one host, each on a link of its own "
                "(--link names the narrower one where they share it); AdamW on the host "
                "shares its memory"
            )

    def _alternatives(
        self, card: Hardware, planner: Planner, forecast: Forecast
    ) -> Iterator[dict[str, Any]]:
        """Other settings and their price, the fastest that fits first."""
        fits = lack(forecast) is None
        others: list[dict[str, Any]] = []
        for key, _, least in _SETTINGS.values():
            if self._is_set(key):
                if fits:
                    others.append(self._other(card, key, 2 * self._cfg[key]))
                else:
                    others += self._halved(card, key, least)
        if not fits:
            others += self._larger_machine(card, forecast)
            others.sort(key=lambda other: -(other["tokens_per_s"] or 0))
        yield from others
        if self._question.num_gpus > 1:
            for key, mode in FORCED.items():
                yield _alternative(
                    f"mode {mode}", partial(_in_mode, planner, mode), f"{key}: true"
                )
        elif forecast.plan.mode == "B":
            resident = _alternative(
                "protrain_force_all_persistent: true (no paging)",
                partial(_in_mode, planner, "A"),
            )
            if resident["verdict"] == FITS:
                yield resident
        yield _without_plugin(planner)

    def _halved(self, card: Hardware, key: str, least: int) -> Iterator[dict[str, Any]]:
        """The largest half, quarter, … that fits, or the smallest, which does not."""
        value = self._cfg[key] // 2
        while value >= least:
            other = self._other(card, key, value)
            if other["verdict"] == FITS or value // 2 < least:
                yield other
                return
            value //= 2

    def _other(self, card: Hardware, key: str, value: int) -> dict[str, Any]:
        cfg = self._cfg
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
        return _alternative(text, partial(self._fitting, card, change), note)

    def _larger_machine(
        self, card: Hardware, lacking: Forecast
    ) -> Iterator[dict[str, Any]]:
        """The smallest card, or the least host memory, that would do."""
        if not self._question.gpus:
            return
        if lacking.device.peak_bytes > lacking.budget.usable_bytes:
            for gpu in sorted(GPUS, key=lambda gpu: gpu.device_bytes):
                if gpu.device_bytes <= card.device_bytes:
                    continue
                ranks = self._question.num_gpus
                larger = gpu_hardware(gpu.name, None, card.host_bytes, num_gpus=ranks)
                other = _alternative(
                    f"--gpu {gpu.name!r}",
                    partial(self._fitting, larger),
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
                yield _alternative(f"--ram {ram_gib}", partial(self._fitting, roomy))
                return

    # plans

    def _fitting(
        self, card: Hardware, change: dict[str, int] | None = None
    ) -> Forecast:
        """The plan with some keys of the YAML changed.

        Raises:
            BudgetError: It does not fit; says how much is missing.
        """
        return _fitting(self._plan(card, change)[0])

    def _plan(
        self, card: Hardware, change: dict[str, int] | None = None
    ) -> tuple[Forecast, Planner]:
        """The one that lacks the least where none fits."""
        return plan_for(self._args_on(card), self._subject(change), card, anyway=True)

    def _args_on(self, card: Hardware) -> ProTrainArgs:
        """The keys; of a card that is not here they allow no more than it has."""
        has = {}
        if self._question.gpus:
            has["protrain_capacity_bytes"] = card.device_bytes
            if self._question.ram_gib is not None:
                has["protrain_cpu_capacity_bytes"] = card.host_bytes
        limits = {key: getattr(self._args, key) for key in has}
        lower = {key: min(n, has[key]) for key, n in limits.items() if n is not None}
        return self._args.model_copy(update=lower)

    def _subject(self, change: dict[str, int] | None = None) -> Subject:
        """The model traced with some keys of the YAML changed; each only once."""
        name = repr(change or {})
        if name not in self._subjects:
            ranks = self._question.num_gpus
            world = World(ranks, ranks)
            with self._meta.changed(change or {}):
                subject = subject_of(
                    self._cfg, self._meta.model, self._device_type, world
                )
            if change and "lora_r" not in change:
                # bitsandbytes casts biases while they run: one model, one layout
                subject = replace(subject, layout=self._subject().layout)
            self._subjects[name] = subject
        return self._subjects[name]

    def _gpu(self, gpu: str, tf32: bool | None = None) -> Hardware:
        question = self._question
        host_bytes = int((question.ram_gib or DEFAULT_RAM_GIB) * 2**30)
        card = gpu_hardware(
            gpu, question.link, host_bytes, tf32 is True, question.num_gpus
        )
        if ":" not in gpu:
            return card
        return replace(card, name=f"{card.name}, {card.device_bytes / 2**30:g} GiB")


def _alternative(
    change: str, plan: Callable[[], Forecast], note: str | None = None
) -> dict[str, Any]:
    forecast, verdict = None, FITS
    try:
        forecast = plan()
    except (BudgetError, ConfigError, LayoutError, TraceError) as error:
        verdict = DOES_NOT_FIT if isinstance(error, BudgetError) else UNSUPPORTED
        note = f"{note}: {error}" if note else str(error)
    return {"change": change, "verdict": verdict, **price_dict(forecast), "note": note}


def _without_plugin(planner: Planner) -> dict[str, Any]:
    def plain() -> Forecast:
        try:
            return _fitting(planner.without_paging(recompute=False))
        except BudgetError:
            return _fitting(planner.without_paging(recompute=True))

    other = _alternative("without this plugin", plain)
    if other["verdict"] == FITS:
        recomputes = other["plan"]["n_checkpoint"] > 0
        key = f"gradient_checkpointing: {str(recomputes).lower()}"
        other["note"] = f"you do not need this plugin: it fits with {key}"
    return other


def _in_mode(planner: Planner, mode: str) -> Forecast:
    modes = frozenset(mode)
    try:
        return planner.search(modes=modes)
    except BudgetError:
        return _fitting(planner.nearest(modes=modes))


def _fitting(forecast: Forecast) -> Forecast:
    """The forecast, unless it lacks something.

    Raises:
        BudgetError: It does.
    """
    lacking = lack(forecast)
    if lacking is not None:
        raise BudgetError(lacking)
    return forecast


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
    return {} if lists_plugin(listed) else {"plugins": [*(listed or ()), PLUGIN]}


def worst(answers: Sequence[dict[str, Any]]) -> int:
    """Exit code for all cards together: 0 only if every one of them fits."""
    return max(EXIT_CODES[answer["verdict"]] for answer in answers)
