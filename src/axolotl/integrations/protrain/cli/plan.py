"""`axolotl protrain plan`: what a YAML would need and take, on any card, without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, partial
from operator import sub
from pathlib import Path
from typing import Any

import torch

from ..args import FORCED, ProTrainArgs, args_from
from ..core.errors import BudgetError, ConfigError, LayoutError, TraceError
from ..core.host import host_memory
from ..core.layout.packed import stored_bytes
from ..core.planner.cards import GPUS, Gpu, gpu_hardware
from ..core.planner.job import (
    TracedJob,
    about_disk,
    about_memory,
    this_machine,
)
from ..core.planner.memory import DeviceEstimate, HostEstimate, MemoryModel
from ..core.planner.planner import Forecast, Planner
from ..core.sizes import format_bytes
from ..core.types import PAGING_GAIN, Budget, Hardware, World
from ..job import about, choice_of, plan_for, traced_job, uncomputed
from ..loading import is_of_experts
from ..offline.fake_kernels import without_logits
from ..offline.meta_model import load_meta_model
from ..options import (
    BATCH,
    EIGHT_BITS,
    FUSED_LOSS,
    LENGTH,
    LOSS,
    NOTEWORTHY,
    QUICK,
    RANK,
    UPDATES,
    Keys,
    Number,
    batch_note,
    first_fitting,
    has_plain_loss,
    large_parts,
    named,
)
from ..refusals import cautions
from ..report import forecast as report

DEFAULT_DISK_BYTES_S = 3e9
"""Rate of a solid-state disk on PCIe 3, the slowest beside such cards."""
DEFAULT_RAM_GIB = 64
"""Host memory of a machine that is not here: the most common beside one or two 24 GB cards."""

_MOST_TOKENS = 1 << 20
"""`--max` tries no larger micro-batch: a trace knows the values of as many ids."""
_MOST_RANK = 4096
_RAM_GIB = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Sizes that memory is sold in."""


class DryRun:
    """Traces the model of a YAML and plans for every card that was asked about.

    Args:
        config: The YAML.
        gpus: As `gpu_hardware` reads each card; this machine if empty.
        num_gpus: How many of each.
        ram_gib: Of the host; None for this one's, or `DEFAULT_RAM_GIB` beside `gpus`.
        link: Between host and card; None for each card's fastest.
        disk_bytes_s: What a disk reads, for frozen weights; None for that of the YAML's
            folder, or `DEFAULT_DISK_BYTES_S` beside `gpus`.
        table: Where cards are looked up.
        prices: Dollars per hour of cards, by their names in `gpus`.
        card: Known already, with the device to trace for.

    Attributes:
        cfg: Axolotl's validated configuration.
        cards: What it plans for.
        device_type: "cuda" or "cpu".

    Raises:
        ConfigError: A key, an option or a file is at fault.
        TraceError: The model cannot be run without weights.
        LayoutError: Nothing in it can be paged.
    """

    def __init__(
        self,
        config: Path,
        gpus: tuple[str, ...],
        num_gpus: int,
        ram_gib: float | None,
        link: str | None,
        disk_bytes_s: float | None = None,
        table: Sequence[Gpu] = GPUS,
        prices: Mapping[str, float] | None = None,
        card: Hardware | None = None,
        device_type: str | None = None,
    ) -> None:
        self._is_here, self._num_gpus, self._ram_gib = not gpus, num_gpus, ram_gib
        self._table = table
        has_gpu = gpus or torch.cuda.is_available()
        self.device_type = device_type or ("cuda" if has_gpu else "cpu")
        host_bytes = int((ram_gib or DEFAULT_RAM_GIB) * 2**30)
        named = partial(
            _card, link=link, host_bytes=host_bytes, num_gpus=num_gpus, table=table
        )
        self._meta = load_meta_model(config, self.device_type)
        self.cfg = self._meta.cfg
        self._args = args_from(self.cfg)
        if gpus or disk_bytes_s is not None:
            # the folder says nothing of another machine's disk
            folder, self._args = (
                self._args.protrain_disk_dir,
                self._args.model_copy(update={"protrain_disk_dir": None}),
            )
            if disk_bytes_s is None and folder is not None:
                disk_bytes_s = DEFAULT_DISK_BYTES_S
        self.cards = [named(gpu, tf32=self.cfg.tf32 is True) for gpu in gpus]
        self._prices = [(prices or {}).get(gpu) for gpu in gpus] or [None]
        if card is not None:
            self.cards = [card]
        elif not gpus:
            host_bytes = host_memory() if ram_gib is None else host_bytes
            device = torch.device(self.device_type)
            self.cards = [
                this_machine(
                    choice_of(self._args),
                    device,
                    host_bytes,
                    self._args.protrain_cache_dir,
                    fp32_master=self._args.protrain_fp32_master,
                )
            ]
        if disk_bytes_s is not None:
            self.cards = [replace(c, disk_bytes_s=disk_bytes_s) for c in self.cards]
        self._subject = cache(self._traced)

    def forecasts(
        self,
        changes_keys: bool = True,
        briefly: bool = False,
        say: Callable[[str], object] = str,
    ) -> list[dict[str, Any]]:
        """One object for each card, as `--json` prints it, and what the page shows.

        Unless it `changes_keys` no other keys are priced beside the YAML's; `briefly`
        nothing is but for the card that `report.best` chooses. `say` is told how far it is.
        """
        planned = []
        answers: list[dict[str, Any]] = []
        for card, price in zip(self.cards, self._prices, strict=True):
            say(f"planning for {card.name}, {len(answers)} of {len(self.cards)} done")
            planned.append((card, *self._plan(card)))
            answers.append(self._answer(*planned[-1], price))
        best = report.best(answers)[0]
        for answer, (card, forecast, planner) in zip(answers, planned, strict=True):
            if answer is best or not briefly:
                say(f"pricing changes for {card.name}")
                others = self._alternatives(card, planner, forecast, changes_keys)
                answer["alternatives"][:0] = others
                answer["avoidable"] = self._avoidable(card, forecast)
        return answers

    def first_fitting(self, changes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The price of the first of `changes` that fits the first card, or of the last.

        Beside its price: the bytes that it `lacks`, the terms of the plan that takes the
        `least`, and seconds a row.
        """
        (card,) = self.cards
        plan = cache(lambda index: self._forecast(card, **changes[index]))
        index = first_fitting(
            len(changes), lambda index: report.lack(plan(index)) is None
        )
        forecast, change = plan(index), changes[index]
        no_room = self._args.model_copy(update={"protrain_capacity_bytes": 1})
        least, _ = plan_for(no_room, self._subject(**change), card, anyway=True)
        budget, fits = forecast.budget, report.lack(forecast) is None
        over = (
            forecast.device.peak_bytes - budget.usable_bytes,
            forecast.host.peak_bytes - budget.host_bytes,
        )
        rows = change.get("micro_batch_size", self.cfg.micro_batch_size)
        samples = rows * forecast.workload.accumulation * self._num_gpus
        seconds = forecast.step.total_s + forecast.sampling_s
        price = report.price_dict(forecast if fits else None)
        return {
            "verdict": report.FITS if fits else report.DOES_NOT_FIT,
            **price,
            "sample_s": seconds / samples if fits else None,
            "lacks": (max if card.one_memory else sum)(max(n, 0) for n in over),
            "least_device_bytes": least.device.peak_bytes,
            "host_peak_bytes": forecast.host.peak_bytes,
            "least": {"device": least.device.terms, "host": forecast.host.terms},
            "change": change,
        }

    def largest(
        self, what: str, say: Callable[[str], object] = str
    ) -> list[dict[str, Any]]:
        """For each card the largest `seq`, `batch` or `rank` that some plan fits.

        Raises:
            ConfigError: The YAML has no such number to raise.
        """
        number = QUICK[what]
        if not number.is_set(self.cfg):
            raise ConfigError(f"--max {what}: the YAML sets no {number.key} to raise.")
        return [self._largest(card, number, say) for card in self.cards]

    def _largest(
        self, card: Hardware, number: Number, say: Callable[[str], object]
    ) -> dict[str, Any]:
        key, most = number.key, _MOST_RANK
        if number is not RANK:
            other = LENGTH if number is BATCH else BATCH
            most = _MOST_TOKENS // self.cfg[other.key]
        found: dict[int, Forecast] = {}

        def fits(value: int) -> bool:
            say(f"trying {key} {value} on {card.name}")
            found[value] = self._forecast(card, **{key: value})
            return report.lack(found[value]) is None

        lacking = uncomputed(self.cfg, card)
        value = 0 if lacking else number.largest(most, fits)
        notes = [lacking] if lacking else []
        config: Any = self._meta.model.config
        known = getattr(config.get_text_config(), "max_position_embeddings", None)
        if number is LENGTH and known and value > known:
            notes.append(f"config.json says max_position_embeddings {known}")
        if value + number.stride > most:
            notes.append("more was not tried")
        verdict = report.UNSUPPORTED if lacking else report.DOES_NOT_FIT
        return {
            "verdict": report.FITS if value else verdict,
            "hardware": report.hardware_dict(card),
            "max": {
                "key": key,
                "value": value or None,
                "now": self.cfg[key],
                "note": "; ".join(notes) or None,
            },
            **report.price_dict(found.get(value)),
        }

    # one card

    def _answer(
        self, card: Hardware, forecast: Forecast, planner: Planner, price: float | None
    ) -> dict[str, Any]:
        """Describe one plan, with plain training as its only alternative."""
        lacking = uncomputed(self.cfg, card)
        answer = report.answer_dict(forecast, lacking)
        return answer | {
            "about": about(self.cfg),
            "alternatives": [] if lacking else [_without_plugin(planner)],
            "avoidable": None,
            "cost": price
            and report.cost_dict(price * self._num_gpus, answer["step_s"]),
            "assumptions": [
                *self._meta.assumptions,
                *self._subject().assumptions,
                *self._cautions(),
                *about_memory(forecast),
                *about_disk(forecast),
                *self._unknowns(card, forecast),
            ],
        }

    def _avoidable(self, card: Hardware, forecast: Forecast) -> dict[str, Any] | None:
        """Find the largest part of this plan's memory that an option takes away, under
        the same plan: of the device, or else of the host."""
        plan, found = forecast.plan, []
        for part, keys in large_parts(self.cfg, forecast, self.device_type == "cuda"):
            # what cannot run removes nothing
            with suppress(ConfigError, LayoutError, TraceError):
                other = self._subject(**keys)
                if len(other.layout.chunks) != len(plan.placements):
                    continue
                memory = MemoryModel(
                    other.layout, other.traced.trace, other.workload, card
                )
                before = _taken(part, forecast.device, forecast.host)
                after = _taken(part, memory.device(plan), memory.host(plan))
                device, host = map(sub, before, after)
                is_large = device >= NOTEWORTHY * forecast.device.peak_bytes
                found.append((is_large, device if is_large else host, part, keys))
        on_device, nbytes, part, keys = max(
            found, key=lambda way: way[:2], default=(False, 0, "", {})
        )
        if nbytes <= 0:
            return None
        (option,) = (f"{key}: {str(value).lower()}" for key, value in keys.items())
        where = "device" if on_device else "host"
        return {"part": part, "option": option, "bytes": nbytes, "where": where}

    def _cautions(self) -> list[str]:
        model: Any = self._meta.model
        experts = any(
            is_of_experts(name, param)
            and param.is_floating_point()
            and not param.requires_grad
            for name, param in model.named_parameters()
        )
        config = model.config.get_text_config()
        tied = bool(getattr(config, "tie_word_embeddings", False))
        return cautions(self.cfg, experts, tied)

    def _unknowns(self, card: Hardware, forecast: Forecast) -> Iterator[str]:
        args, name = self._args, card.name
        if not args.protrain_auto_memory:
            yield "protrain_auto_memory is false: training does not follow this plan"
        yield f"{name}: {card.source}"
        if card.unseen_bytes:
            yield (
                f"{name}: {format_bytes(card.unseen_bytes)} of its memory go to "
                "the context, to workspaces of kernels and to rounding"
            )
        if card.desktop_bytes:
            size = card.device_bytes / 2**30
            yield (
                f"{name}: {format_bytes(card.desktop_bytes)} left free for a "
                f"desktop and for allocation; --gpu '{name}:{size:.2f}' plans without"
            )
        chosen = forecast.plan.mode == "A" and forecast.plan.origin == "search"
        if chosen and not card.one_memory:
            yield (
                "nothing pages where that saves less than "
                f"{PAGING_GAIN:.0%} of a step: predictions are no better"
            )
        yield "block times follow from counted operations; training measures them"
        if self._is_here:
            return
        if card.one_memory:
            if self._ram_gib is not None:
                yield f"--ram does not count for {name}: its memory is all there is"
            return
        yield from self._limits(card, forecast.budget)
        if self._ram_gib is None and args.protrain_cpu_capacity_bytes is None:
            yield f"{DEFAULT_RAM_GIB} GiB of host memory; --ram says otherwise"
        if self._num_gpus > 1:
            yield (
                f"{self._num_gpus} GPUs on one host, each on {card.link} of its own "
                "(--link names another); AdamW on the host, where it is asked for, "
                "shares its memory"
            )

    def _limits(self, card: Hardware, budget: Budget) -> Iterator[str]:
        args, name = self._args, card.name
        for key, used, has in (
            ("protrain_capacity_bytes", budget.device_bytes, card.device_bytes),
            ("protrain_cpu_capacity_bytes", budget.host_bytes, card.host_bytes),
        ):
            if used == getattr(args, key):
                yield f"{key}: {format_bytes(used)} may be used on {name}'s machine"
            elif getattr(args, key) is not None:
                yield f"{key} asks for more than the {format_bytes(has)} beside {name}"

    def _alternatives(
        self, card: Hardware, planner: Planner, forecast: Forecast, changes_keys: bool
    ) -> Iterator[dict[str, Any]]:
        """Other settings and their price, but for plain training: what helps comes first,
        and of that what changes the training least."""
        cfg = self.cfg
        numbers = [n for n in QUICK.values() if changes_keys and n.is_set(cfg)]
        if uncomputed(cfg, card):
            yield from self._larger_machine(card, forecast)
            return
        if report.lack(forecast) is None:
            for number in numbers:
                yield self._other(card, number.at(2 * cfg[number.key], cfg))
            if forecast.plan.on_disk and not self._is_here:
                yield from self._more_host_memory(replace(card, disk_bytes_s=0.0))
        else:
            others = self._ways_out(card, forecast, numbers)
            yield from sorted(others, key=lambda other: other["verdict"] != report.FITS)
        if self._num_gpus > 1:
            for key, mode in FORCED.items():
                one_mode = partial(_in_mode, planner, mode)
                yield _alternative(f"mode {mode}", one_mode, f"{key}: true")
        elif forecast.plan.mode == "B":
            resident = _alternative(
                "protrain_force_all_persistent: true",
                partial(_in_mode, planner, "A"),
                "nothing pages",
            )
            if resident["verdict"] == report.FITS:
                yield resident
            if planner.memory.workload.host_can_update:
                yield _alternative(
                    "protrain_cpu_optimizer: torch", partial(self._on_host, card)
                )

    def _ways_out(
        self, card: Hardware, lacking: Forecast, numbers: Sequence[Number]
    ) -> Iterator[dict[str, Any]]:
        """Ways to make it fit, the least change first; another machine is the last."""
        yield from self._whole_card(card)
        if (
            not card.disk_bytes_s
            and lacking.host.peak_bytes > lacking.budget.host_bytes
        ):
            yield from self._on_disk(card)
        yield from self._fused(card, lacking)
        for number in numbers:
            yield from self._lowered(card, number)
            if number is BATCH:
                ways = EIGHT_BITS(self.cfg, self.device_type == "cuda")
                priced = (self._other(card, keys, UPDATES) for keys in ways)
                yield from (
                    other for other in priced if other["verdict"] == report.FITS
                )
        yield from self._larger_machine(card, lacking)

    def _on_host(self, card: Hardware) -> Forecast:
        """With AdamW on the host for weights whose state is there."""
        subject = self._subject()
        subject = replace(subject, workload=subject.workload.on_host())
        return plan_for(self._args_on(card), subject, card, anyway=True)[0]

    def _on_disk(self, card: Hardware) -> Iterator[dict[str, Any]]:
        """Frozen weights for which the host has no room on a disk, if that is enough."""

        def plan() -> Forecast:
            subject = self._subject().loaded_with(self._base_bytes())
            there = replace(card, disk_bytes_s=DEFAULT_DISK_BYTES_S)
            return plan_for(self._args_on(card), subject, there, anyway=True)[0]

        other = _alternative(
            "protrain_disk_dir",
            plan,
            "frozen weights on a disk that reads "
            f"{DEFAULT_DISK_BYTES_S / 1e9:g} GB/s; --disk has the price of another",
        )
        if other["verdict"] == report.FITS:
            yield other

    def _base_bytes(self) -> int:
        return sum(map(stored_bytes, self._meta.model.parameters()))

    def _fused(self, card: Hardware, lacking: Forecast) -> Iterator[dict[str, Any]]:
        """A loss without logits, where these are in the way."""
        on_cuda = self.device_type == "cuda"
        if lacking.device.peak.in_loss and has_plain_loss(self.cfg, on_cuda):
            other = _alternative(
                f"{FUSED_LOSS}: true",
                partial(self._forecast, card, **{FUSED_LOSS: True}),
                "no logits of all tokens; the same training, rounded otherwise. So does "
                "liger_fused_linear_cross_entropy; --levers has the keys to paste",
            )
            if other["verdict"] != report.UNSUPPORTED:
                yield other

    def _lowered(self, card: Hardware, number: Number) -> Iterator[dict[str, Any]]:
        """The largest lower setting that fits, or the least, which does not."""
        ways = number.lowered(self.cfg)
        price = cache(lambda index: self._other(card, ways[index]))
        if ways:
            yield price(
                first_fitting(
                    len(ways), lambda index: price(index)["verdict"] == report.FITS
                )
            )

    def _other(
        self, card: Hardware, keys: Keys, note: str | None = None
    ) -> dict[str, Any]:
        plan = partial(self._forecast, card, **keys)
        note = note or batch_note(keys, self.cfg)
        return _alternative(named(keys, self.cfg), plan, note)

    def _whole_card(self, card: Hardware) -> Iterator[dict[str, Any]]:
        if card.desktop_bytes:
            whole = _alternative(
                f"--gpu '{card.name}:{card.device_bytes / 2**30:.2f}'",
                partial(self._forecast, replace(card, desktop_bytes=0)),
                "nothing else on the card, no desktop",
            )
            if whole["verdict"] == report.FITS:
                yield whole

    def _larger_machine(
        self, card: Hardware, lacking: Forecast
    ) -> Iterator[dict[str, Any]]:
        """The least host memory, and the smallest card, that would do."""
        if self._is_here:
            return
        refused = uncomputed(self.cfg, card)
        limited = self._args.protrain_cpu_capacity_bytes is not None
        if not (refused or limited or card.one_memory):
            yield from self._more_host_memory(card)
        device, host, budget = lacking.device, lacking.host, lacking.budget
        if refused or device.peak_bytes > budget.usable_bytes:
            # no plan lacks less, of both together, so none needs less of a card
            needed = device.peak_bytes - card.unseen_bytes
            on_host = max(host.peak_bytes - budget.host_bytes, 0)
            needed += 0 if card.one_memory else on_host
            if report.lack(lacking) is None:
                needed = 0
            for gpu in sorted(self._table, key=lambda gpu: gpu.device_bytes):
                small = gpu.device_bytes <= card.device_bytes and not refused
                # what comes with its memory is no card for this machine
                if small or gpu.one_memory:
                    continue
                ranks = self._num_gpus
                larger = gpu_hardware(
                    gpu.name, None, card.host_bytes, num_gpus=ranks, table=self._table
                )
                if refused and (uncomputed(self.cfg, larger) or not gpu.capability):
                    continue
                if larger.device_bytes - larger.unseen_bytes < needed:
                    continue
                other = _alternative(
                    f"--gpu {gpu.name!r}",
                    partial(self._forecast, larger),
                    "the smallest card known here that fits",
                )
                if other["verdict"] == report.FITS:
                    yield other
                    return

    def _more_host_memory(self, card: Hardware) -> Iterator[dict[str, Any]]:
        larger = [gib for gib in _RAM_GIB if gib << 30 > card.host_bytes]

        def priced(gib: int) -> dict[str, Any]:
            roomy = replace(card, host_bytes=gib << 30)
            return _alternative(f"--ram {gib}", partial(self._forecast, roomy))

        # where the most does not help, nothing does
        if larger and priced(larger[-1])["verdict"] == report.FITS:
            others = map(priced, larger)
            yield next(other for other in others if other["verdict"] == report.FITS)

    # plans; `change`: keys of the YAML that are others

    def _forecast(self, card: Hardware, **change: Any) -> Forecast:
        return self._plan(card, **change)[0]

    def _plan(self, card: Hardware, **change: Any) -> tuple[Forecast, Planner]:
        """The one that lacks the least where none fits."""
        return plan_for(self._args_on(card), self._subject(**change), card, anyway=True)

    def _args_on(self, card: Hardware) -> ProTrainArgs:
        """The keys; of a card that is not here they allow no more than it has."""
        has = {}
        if not self._is_here:
            has["protrain_capacity_bytes"] = card.device_bytes
            if self._ram_gib is not None:
                has["protrain_cpu_capacity_bytes"] = card.host_bytes
        limits = {key: getattr(self._args, key) for key in has}
        lower = {key: min(n, has[key]) for key, n in limits.items() if n is not None}
        return self._args.model_copy(update=lower)

    def _traced(self, **change: Any) -> TracedJob:
        world = World(self._num_gpus, self._num_gpus)
        # what trains is the same, and so is its state
        same = bool(change) and not change.keys() & {"lora_r", "optimizer"}
        with ExitStack() as undo:
            undo.enter_context(self._meta.changed(change))
            if FUSED_LOSS in change:
                undo.enter_context(without_logits(self._meta.model))
            subject = traced_job(
                self.cfg,
                self._meta.model,
                self.device_type,
                world,
                objective=self._meta.objective(self._num_gpus),
                optimizer=self._subject().optimizer if same else None,
            )
        packed = self.cfg.load_in_4bit or self.cfg.load_in_8bit
        if same and packed:
            # bitsandbytes casts biases while they run: one model, one layout
            rows = {c.tensors[0].name: c.rows_bytes for c in subject.layout.chunks}
            layout = self._subject().layout
            chunks = tuple(
                replace(chunk, rows_bytes=rows.get(chunk.tensors[0].name, 0))
                for chunk in layout.chunks
            )
            subject = replace(subject, layout=replace(layout, chunks=chunks))
        if any(card.disk_bytes_s for card in self.cards):
            # what goes to a disk is in files while it loads, too
            subject = subject.loaded_with(self._base_bytes())
        return subject


def _taken(part: str, device: DeviceEstimate, host: HostEstimate) -> tuple[int, int]:
    """Bytes of a part on the device and on the host."""
    if part == LOSS:
        # all that is there, for what stays is there before and after
        return max((p.total for p in device.timeline if p.in_loss), default=0), 0
    return device.states.moments, host.states.moments


def _card(gpu: str, **known: Any) -> Hardware:
    card = gpu_hardware(gpu, **known)
    if ":" not in gpu:
        return card
    return replace(card, name=f"{card.name}, {card.device_bytes / 2**30:g} GiB")


def _alternative(
    change: str, plan: Callable[[], Forecast], note: str | None = None
) -> dict[str, Any]:
    try:
        forecast = plan()
        why = report.lack(forecast)
        verdict = report.DOES_NOT_FIT if why else report.FITS
    except (ConfigError, LayoutError, TraceError) as error:
        verdict, why = report.UNSUPPORTED, str(error)
    return {
        "change": change,
        "verdict": verdict,
        **report.price_dict(None if why else forecast),
        "note": ": ".join(filter(None, (note, why))) or None,
    }


def _without_plugin(planner: Planner) -> dict[str, Any]:
    def plain() -> Forecast:
        numbers = 0, len(planner.memory.layout.blocks)
        kept, recomputed = map(planner.plainly, numbers)
        return kept if report.lack(kept) is None else recomputed

    other = _alternative(report.WITHOUT_PLUGIN, plain)
    if other["verdict"] == report.FITS:
        recomputes = other["plan"]["n_checkpoint"] > 0
        key = f"gradient_checkpointing: {str(recomputes).lower()}"
        other["note"] = f"it fits with {key}"
    return other


def _in_mode(planner: Planner, mode: str) -> Forecast:
    modes = frozenset(mode)
    try:
        return planner.forecast(planner.fastest(modes))
    except BudgetError:
        return planner.forecast(planner.nearest(modes))
