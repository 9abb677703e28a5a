"""One training run: from the validated YAML to an open session and a report.

The trainer's subclass calls in here; everything that is decided is decided by core.
"""

from __future__ import annotations

import platform
import resource
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerState

from .args import ProTrainArgs, overrides
from .batches import autocast_dtype, sample_batch
from .core.checkpoint import checkpoint_bytes, require_space
from .core.cost import block_times
from .core.errors import BudgetError, ConfigError, DeviceMemoryError, ProTrainError
from .core.layout import build_layout, find_blocks
from .core.planner import Forecast, Planner, with_measured
from .core.profile import (
    Target,
    block_key,
    cached,
    cached_hardware,
    device_memory,
    host_memory,
    measure_blocks,
    measure_collectives,
    meta_copy,
    weakest,
)
from .core.runtime import CheckedDevice, Ranks, open_device
from .core.session import Options, Session
from .core.types import Hardware, World
from .data_parallel import (
    ignore_in_ddp,
    plan_hash,
    require_same,
    require_same_keys,
)
from .planning import adapter_names, budget_of, choose, trace_model, workload_of
from .recovery import Result, Shortage, StepRecovery
from .report import WATCHED_STEPS, RunReport, format_bytes, summary
from .stand_ins import make_experts_traceable

if TYPE_CHECKING:
    from .loading import LoadShare

T = TypeVar("T")

CHECKED_STEP = 4
"""After this step prediction and measurement are compared."""
BYTES_APART, SECONDS_APART = 0.05, 0.3
"""Relative differences worth a line in the log."""


class TrainingRun:
    """Opens and closes the session of one `Trainer.train`, and keeps its report.

    Args:
        args: The plugin's keys.
        cfg: Axolotl's validated configuration.
        recompute_all: The YAML asks for gradient checkpointing, which is taken over.
        log: Prints a line.
        share: What this rank has loaded of a base that a node's ranks quantise
            together; None for all of it.
    """

    def __init__(
        self,
        args: ProTrainArgs,
        cfg: Any,
        recompute_all: bool,
        log: Any,
        share: LoadShare | None = None,
    ) -> None:
        self._share = share
        self.args = args
        self.session: Session | None = None
        self.report: RunReport | None = None
        self._cfg = cfg
        self.ranks: Ranks | None = None
        self._recompute_all = recompute_all
        self._output_dir = Path(cfg.output_dir)
        self._log = log
        self._logged: dict[str, float] = {}
        self._watching = ExitStack()
        self._planner: Planner | None = None
        self._recovery: StepRecovery | None = None
        self._hooks: list[RemovableHandle] = []
        self._hidden = ExitStack()
        self._plan_hash = ""
        self._number = self._step = 0
        self._repeated = self._updating = False
        self._is_adapter = False
        self._saves_optimizer = False

    def open(
        self, model: nn.Module, device: torch.device, saves_optimizer: bool
    ) -> None:
        """Plan for `model` and move it; `requires_grad` is final by now.

        Args:
            model: Not wrapped, on the host.
            device: Where to train it.
            saves_optimizer: Checkpoints with optimizer state will be written.

        Raises:
            ProTrainError: It cannot be trained so, or not twice with one trainer.
        """
        if self.report is not None:
            raise ProTrainError(
                "this trainer has trained paged before; build a new one for another run"
            )
        if dist.is_initialized() and dist.get_world_size() > 1:
            # who is gone is noticed here; making a group would wait for it
            dist.barrier()
            self.ranks = Ranks(device.type)
        self._on_all(partial(_refuse_quantised, model))
        self._is_adapter = bool(adapter_names(model))
        forecast, notes = self._plan(model, device)
        notes += self._warnings(forecast)
        self.report = RunReport(forecast=forecast, device=str(device), notes=notes)
        self._saves_optimizer = saves_optimizer
        if self._is_first:
            self._log.info("\n" + self.report.table())
        self._on_all(self._require_space)
        opened = open_device(device)
        self.session = Session(
            model,
            forecast.layout,
            forecast.plan,
            CheckedDevice(opened) if self.args.protrain_check_races else opened,
            Options(
                poison=self.args.protrain_check_races,
                fp32_master=self.args.protrain_fp32_master,
                cpu_optimizer=self.args.protrain_cpu_optimizer,
            ),
            self.ranks,
            self._absent(model),
        )
        if self.ranks is not None:
            self._hidden.callback(ignore_in_ddp(model, self.session.host_kept))
        self._logged = {}
        self._recovery = StepRecovery(device, self._shortage, self._lower)

    def close(self, failed: bool = False) -> None:
        """Give the model back and write the report; does nothing when not open.

        Args:
            failed: Training ended by an error, so that the other ranks may never come
                to what ranks do together.
        """
        session, self.session = self.session, None
        ranks, self.ranks = self.ranks, None
        if failed:
            ranks = None
        self._recovery = None
        # the last one first, and each of them whatever the others raise
        with ExitStack() as undo:
            if ranks is not None:
                undo.callback(ranks.close)
            if session is not None and self.report is not None:
                undo.callback(self._finish, session, self.report, ranks)
                undo.callback(session.close)
            undo.callback(self._hidden.close)
            undo.callback(self._watching.close)
            while self._hooks:
                undo.callback(self._hooks.pop().remove)

    def begin_micro_batch(self, synchronises: bool) -> None:
        """A forward and backward of one rank begins; the last of a step is told so."""
        if self.session is not None:
            self.session.begin_micro_batch(synchronises)

    def begin_step(self, number: int, state: TrainerState) -> None:
        """An optimizer step begins, the `number`-th of this run."""
        if self.session is None or self._recovery is None:
            return
        self._number, self._step = number, state.global_step + 1
        self._repeated = False
        self._recovery.begin(state)
        self._watch()

    def end_step(self, seconds: float) -> None:
        """It has ended."""
        self._watching.close()
        self._step = 0
        if self.session is None or self.report is None or self._recovery is None:
            return
        self._recovery.begin(None)
        self.report.step_s.append(seconds)
        if len(self.report.step_s) == CHECKED_STEP:
            self._compare(self.report)

    def attempt(self, act: Callable[[], Result], phase: str) -> Result:
        """Do a part of a step, under a smaller plan if the device has no room.

        Raises:
            DeviceMemoryError: The step cannot be repeated.
            torch.OutOfMemoryError: It failed again; see `explain`.
        """
        return self._recovery.attempt(act, phase) if self._recovery else act()

    def guard_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Look for room before an update, not while it changes weights."""

        def before(*_: Any) -> None:
            self.attempt(self._probe_update, "update")
            self._updating = True

        def after(*_: Any) -> None:
            self._updating = False

        self._hooks = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        ]

    def explain(self, error: torch.OutOfMemoryError) -> None:
        """Raise what an error means that no smaller plan has averted.

        Raises:
            DeviceMemoryError: There was a plan.
        """
        if self.report is None:
            return
        phase, why = "forward", "the step was under a smaller plan already"
        if self._updating:
            phase, why = "update", "the update was half done, so it cannot be repeated"
        elif not self._repeated:
            phase = "loading" if self.session is None else "what is no training step"
            why = "only forward, backward and update can be repeated"
        shortage = self._shortage(error, phase)
        # they hold what the device has no room for
        traceback.clear_frames(error.__traceback__)
        raise self._refusal(shortage, why) from error

    def _probe_update(self) -> None:
        assert self.session is not None and self.report is not None
        update = next(
            point
            for point in self.report.forecast.device.timeline
            if point.phase == "update"
        )
        made = self.session.measured().device_optimizer_bytes
        self.session.device.probe(max(update.moments - made, 0) + update.working)

    def _shortage(self, error: torch.OutOfMemoryError, phase: str) -> Shortage:
        assert self.report is not None
        in_use = self.session.device.used_bytes() if self.session else 0
        return Shortage.of(error, self.report.forecast, in_use, phase)

    def _lower(self, shortage: Shortage) -> None:
        """Take the fastest plan that has room for what was missing.

        Raises:
            DeviceMemoryError: There is none, or the step has been repeated before.
        """
        if self._repeated:
            raise self._refusal(shortage, "the step was under a smaller plan already")
        if self.ranks is not None:
            raise self._refusal(
                shortage, "a step of several ranks cannot be repeated by one of them"
            )
        session, report, planner = self.session, self.report, self._planner
        assert session is not None and report is not None and planner is not None
        force = self.args.protrain_force_all_persistent
        before = report.forecast.plan
        try:
            forecast = planner.notch(
                before,
                shortage.unplanned_bytes,
                shortage.asked_bytes,
                frozenset() if force else session.movable,
            )
        except BudgetError as error:
            raise self._refusal(shortage, "no smaller plan leaves that room") from error
        self._repeated = True
        # what moves now is not the step's
        self._watching.close()
        session.replan(forecast.plan)
        report.notch(self._step, asdict(shortage), forecast)
        self._log.warning(
            f"Step {self._step}: {shortage}. It is repeated under a smaller plan.\n"
            + report.table()
        )
        self._watch()

    def _refusal(self, shortage: Shortage, why: str) -> DeviceMemoryError:
        assert self.report is not None
        forecast = self.report.forecast
        terms = forecast.device.terms
        largest = max(terms, key=lambda name: terms[name])
        missing = max(shortage.unplanned_bytes, shortage.asked_bytes, 1)
        where = f"Step {self._step}" if self._step else "Outside the steps"
        return DeviceMemoryError(
            f"protrain_capacity_bytes: {where}: {shortage}, and {why}. The largest part "
            f"is {largest}, {format_bytes(terms[largest])}. Set protrain_capacity_bytes "
            f"to {forecast.budget.device_bytes - missing:,} or less, or lower "
            "micro_batch_size, sequence_len or the adapter's rank."
        )

    def _watch(self) -> None:
        watched = self._number < WATCHED_STEPS or self.args.protrain_check_races
        if self.session is not None and watched:
            self._watching.enter_context(self.session.watch())

    def _compare(self, report: RunReport) -> None:
        """Say once how far the first steps are from their prediction."""
        assert self.session is not None
        measured = self.session.measured()
        for what, predicted, seen, apart in (
            (
                "device peak, bytes",
                report.forecast.device.peak_bytes,
                measured.device_peak_bytes,
                BYTES_APART,
            ),
            (
                "step, seconds",
                report.forecast.step.total_s,
                report.median_step_s() or 0.0,
                SECONDS_APART,
            ),
        ):
            if abs(seen - predicted) > apart * predicted:
                line = f"{what}: {predicted:.6g} predicted, {seen:.6g} measured."
                report.notes.append(line)
                self._log.warning(f"ProTrain's prediction is off. {line}")

    def _finish(self, session: Session, report: RunReport, ranks: Ranks | None) -> None:
        measured = session.measured()
        if ranks is not None:
            own = {
                "plan": self._plan_hash,
                **asdict(measured),
                "host_peak_bytes": host_peak_bytes(),
                "step_s": report.median_step_s(),
            }
            report.ranks = ranks.collect(own)
        if not self._is_first:
            return
        self._log.info(summary(measured, report))
        try:
            report.write(self._output_dir, measured, host_peak_bytes())
        except OSError as error:
            # the run's own error, a full disk perhaps, must not be hidden by this one
            self._log.error(f"output_dir: report.json was not written ({error}).")

    def clip_grad_norm(self, max_norm: float) -> Tensor | None:
        """See `Session.clip_grad_norm`; None outside a session."""
        return self.session.clip_grad_norm(max_norm) if self.session else None

    def _absent(self, model: nn.Module) -> frozenset[str]:
        return self._share.absent(model) if self._share else frozenset()

    @property
    def _is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return not dist.is_initialized() or dist.get_rank() == 0

    def _on_all(self, act: Callable[[], T]) -> T:
        """What `act` returns, unless it raises on any rank."""
        return act() if self.ranks is None else self.ranks.together(act)

    def _require_space(self) -> None:
        if self._is_first:
            require_space(self._output_dir, self.checkpoint_bytes())

    def require_final_space(self) -> None:
        """Refuse Axolotl's save after training if the weights alone do not fit."""
        if not self._cfg.local_rank:
            require_space(self._output_dir, self.checkpoint_bytes(final=True), slack=0)

    def checkpoint_bytes(self, final: bool = False) -> int:
        """Bytes of one checkpoint of this run; the final one has weights only."""
        if self.report is None:
            return 0
        return checkpoint_bytes(
            self.report.forecast.layout,
            self.report.forecast.plan,
            self._is_adapter,
            self._saves_optimizer and not final,
            self.args.protrain_fp32_master,
        )

    def log_values(self) -> dict[str, float]:
        """Counters since the last call, and peaks, for the Trainer's log."""
        if self.session is None:
            return {}
        now = asdict(self.session.measured())
        since = {
            key: now[key] - self._logged.get(key, 0)
            for key in (
                "fetched_bytes",
                "offloaded_bytes",
                "swapped_out_bytes",
                "swapped_in_bytes",
                "stall_s",
            )
        }
        self._logged = now
        since["device_peak_bytes"] = now["device_peak_bytes"]
        since["host_peak_bytes"] = host_peak_bytes()
        return {f"protrain/{key}": value for key, value in since.items()}

    def _plan(
        self, model: nn.Module, device: torch.device
    ) -> tuple[Forecast, list[str]]:
        """One plan for all ranks, made by the first of them for the weakest.

        Raises:
            ProTrainError: There is none, or the ranks do not have the same model.
        """
        # a model without blocks is refused before anything else
        self._on_all(partial(find_blocks, model))
        if self.ranks is not None:
            keys = self.args.model_dump(exclude={"protrain_cache_dir"})
            require_same_keys(self.ranks.collect(keys))
        hardware = self._on_all(partial(self._hardware, model, device))
        ranks = self.ranks
        if ranks is None:
            return self._plan_for(hardware, model, device, World())
        gather, reduce, across = measure_collectives(ranks, device)
        hardware = replace(
            hardware,
            gather_bytes_s=gather,
            reduce_bytes_s=reduce,
            across_bytes_s=across,
        )
        hardware = weakest(ranks.collect(hardware))
        forecast, notes = ranks.from_first(
            lambda: self._plan_for(hardware, model, device, ranks.world)
        )
        order = tuple(block.name for block in forecast.layout.blocks)
        own = ranks.together(lambda: build_layout(model, adapter_names(model), order))
        ranks.together(partial(require_same, own, forecast.layout))
        self._plan_hash = plan_hash(forecast.plan, own)
        notes.append(
            f"{ranks.world.size} ranks, {ranks.world.local_size} a node, run plan "
            f"{self._plan_hash}."
        )
        return forecast, notes

    def _plan_for(
        self, hardware: Hardware, model: nn.Module, device: torch.device, world: World
    ) -> tuple[Forecast, list[str]]:
        cfg, args = self._cfg, self.args
        copied = meta_copy(model)
        notes: list[str] = []
        batch = sample_batch(cfg, copied, notes)
        make_experts_traceable(copied, cfg.experts_implementation, notes)
        target = Target(device.type, autocast_dtype(cfg))
        subject = trace_model(copied, batch, target, args)
        layout = build_layout(model, adapter_names(model), subject.traced.trace.blocks)
        workload, assumed = workload_of(cfg, args, batch, device.type)
        workload = replace(workload, world=world)
        measured = measure_blocks(
            model,
            subject.traced.trace.blocks,
            subject.traced.samples,
            device,
            target.autocast_dtype,
            self._cached(model, device, target.autocast_dtype),
        )
        times = with_measured(
            block_times(subject.traced.trace, layout, hardware), measured
        )
        budget = budget_of(args, subject, hardware.device_bytes, hardware.host_bytes)
        planner = self._planner = Planner(
            layout,
            subject.traced.trace,
            workload,
            hardware,
            times,
            budget,
            subject.redone_if_paged,
        )
        notes += [*subject.assumptions, *assumed]
        return choose(args, planner), notes

    def _cached(
        self, model: Any, device: torch.device, autocast_dtype: torch.dtype | None
    ) -> Callable[[Mapping[str, Any], Callable[[], dict[str, Any]]], dict[str, Any]]:
        """Block times from the cache, under everything that changes them."""

        def cached_times(
            block: Mapping[str, Any], measure: Callable[[], dict[str, Any]]
        ) -> dict[str, Any]:
            key = block_key(
                device,
                versions(),
                block=block,
                autocast_dtype=autocast_dtype,
                attention=str(getattr(model.config, "_attn_implementation", None)),
                kernels={k: bool(v) for k, v in self._cfg.items() if "kernel" in k},
            )
            return cached(cache_folder(self.args), key, measure)

        return cached_times

    def _hardware(self, model: nn.Module, device: torch.device) -> Hardware:
        absent = self._absent(model)
        on_host = sum(
            param.nbytes
            for name, param in model.named_parameters()
            if param.device.type == "cpu" and name not in absent
        )
        if self.ranks is not None:
            # the arena of a node takes the place of what each of its ranks has loaded
            on_host *= self.ranks.world.local_size
        capacity = self.args.protrain_capacity_bytes
        if device.type != "cpu":
            free = device_memory(device)
            # what kernels take unseen grows with what may be used
            capacity = min(free, capacity or free)
        if capacity is None:
            raise missing_capacity()
        return cached_hardware(
            cache_folder(self.args),
            device,
            host_memory() + on_host,
            capacity,
            versions(),
            together=self.ranks.world.local_size if self.ranks else 1,
        )

    def _warnings(self, forecast: Forecast) -> list[str]:
        notes = []
        plan, accumulation = forecast.plan, forecast.workload.accumulation
        by_hand = overrides(self.args)
        if by_hand is not None and by_hand.filled:
            filled = ", ".join(f"{k} {getattr(plan, k)}" for k in by_hand.filled)
            notes.append(f"Overrides completed with defaults: {filled}.")
            self._log.warning(notes[-1])
        if self._recompute_all:
            notes.append(
                "gradient_checkpointing is taken over: "
                f"{plan.n_checkpoint} of {len(plan.policies)} blocks recompute."
            )
        effective = self._cfg.micro_batch_size * accumulation
        if plan.paged and effective < 4:
            notes.append(
                f"An effective batch of {effective} is under 4: the transfer "
                "of the weights is not amortised. Raise gradient_accumulation_steps."
            )
            self._log.warning(notes[-1])
        return notes


def cache_folder(args: ProTrainArgs) -> Path | None:
    """Where measurements are kept; None for the platform's folder."""
    folder = args.protrain_cache_dir
    return Path(folder) if folder is not None else None


def versions() -> dict[str, str]:
    """Of what takes part in a measurement beside torch."""
    return {
        "python": platform.python_version(),
        **{
            name: version(name)
            for name in ("transformers", "peft", "bitsandbytes", "axolotl")
        },
    }


def _refuse_quantised(model: nn.Module) -> None:
    """Only bitsandbytes' 4-bit weights keep all their bytes where they can be moved."""
    config = getattr(model, "config", None)
    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        return
    settings = quantised if isinstance(quantised, dict) else quantised.to_dict()
    if settings.get("load_in_4bit"):
        return
    method = settings.get("quant_method")
    method = getattr(method, "value", method)
    raise ConfigError(
        f"base_model: {getattr(config, 'name_or_path', '')} holds weights quantised by "
        f"{method}{' in 8 bits' if settings.get('load_in_8bit') else ''}, which cannot "
        "be paged. Name the unquantised model; `load_in_4bit: true` with `adapter: "
        "qlora` makes it small."
    )


def missing_capacity() -> ConfigError:
    """This machine has no accelerator and the YAML gives the CPU device no budget."""
    return ConfigError(
        "protrain_capacity_bytes: this machine has no accelerator, so ProTrain trains "
        "on its CPU device and needs that device's budget, for example "
        '`protrain_capacity_bytes: "2GiB"`.'
    )


def host_peak_bytes() -> int:
    """Highest resident set size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def args_from(cfg: Mapping[str, Any]) -> ProTrainArgs:
    """The plugin's keys out of a validated Axolotl configuration."""
    known = ProTrainArgs.model_fields
    return ProTrainArgs.model_construct(
        **{key: cfg[key] for key in known if cfg.get(key) is not None}
    )
