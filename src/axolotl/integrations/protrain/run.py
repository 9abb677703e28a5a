"""One training run: from the validated YAML to an open session and a report.

The trainer's subclass calls in here; everything that is decided is decided by core.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .args import ProTrainArgs, overrides
from .core.checkpoint import checkpoint_bytes, require_space
from .core.cost import host_bytes, state_bytes
from .core.errors import ConfigError, ProTrainError
from .core.layout import build_layout, has_vision_tower
from .core.profile import device_memory, host_memory
from .core.runtime import open_device
from .core.search import all_resident, fill_budget, plan_by_hand
from .core.session import Measured, Options, Session
from .core.types import Budget, Layout, Plan
from .report import RunReport, summary

ACTIVATION_SHARE = 0.5
"""Of an accelerator's free memory, kept from the states for activations.

A stated guess that holds until a trace measures what activations need."""


class TrainingRun:
    """Opens and closes the session of one `Trainer.train`, and keeps its report.

    Args:
        args: The plugin's keys.
        recompute_all: The YAML asks for gradient checkpointing.
        micro_batches: `micro_batch_size` times `gradient_accumulation_steps`.
        output_dir: Where report.json goes.
        log: Prints a line.
    """

    def __init__(
        self,
        args: ProTrainArgs,
        recompute_all: bool,
        micro_batches: int,
        output_dir: Path,
        log: Any,
    ) -> None:
        self.args = args
        self.session: Session | None = None
        self.report: RunReport | None = None
        self._recompute_all = recompute_all
        self._micro_batches = micro_batches
        self._output_dir = output_dir
        self._log = log
        self._logged: dict[str, float] = {}
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
        _refuse_quantised(model)
        adapters = adapter_names(model)
        self._is_adapter = bool(adapters)
        layout = build_layout(model, adapters)
        budget, notes = self._budget(model, device)
        plan = self._plan(layout, budget)
        notes += self._warnings(plan)
        fp32_master = self.args.protrain_fp32_master
        self.report = RunReport(
            layout=layout,
            plan=plan,
            budget=budget,
            predicted=state_bytes(layout, plan.placements, plan.n_buffer),
            predicted_host_bytes=host_bytes(layout, plan.placements, fp32_master),
            device=str(device),
            notes=notes,
        )
        self._saves_optimizer = saves_optimizer
        require_space(self._output_dir, self.checkpoint_bytes())
        self._log.info("\n" + self.report.table())
        self.session = Session(
            model,
            layout,
            plan,
            open_device(device),
            Options(
                poison=self.args.protrain_check_races,
                fp32_master=fp32_master,
                cpu_optimizer=self.args.protrain_cpu_optimizer,
            ),
        )
        self._logged = {}

    def close(self) -> None:
        """Give the model back and write the report; does nothing when not open."""
        session, self.session = self.session, None
        if session is None or self.report is None:
            return
        try:
            session.close()
        finally:
            self._finish(session.measured(), self.report)

    def _finish(self, measured: Measured, report: RunReport) -> None:
        self._log.info(summary(measured, report))
        try:
            report.write(self._output_dir, measured, host_peak_bytes())
        except OSError as error:
            # the run's own error, a full disk perhaps, must not be hidden by this one
            self._log.error(f"output_dir: report.json was not written ({error}).")

    def clip_grad_norm(self, max_norm: float) -> Tensor | None:
        """See `Session.clip_grad_norm`; None outside a session."""
        return self.session.clip_grad_norm(max_norm) if self.session else None

    def require_final_space(self) -> None:
        """Refuse Axolotl's save after training if the weights alone do not fit."""
        require_space(self._output_dir, self.checkpoint_bytes(final=True), slack=0)

    def checkpoint_bytes(self, final: bool = False) -> int:
        """Bytes of one checkpoint of this run; the final one has weights only."""
        if self.report is None:
            return 0
        return checkpoint_bytes(
            self.report.layout,
            self.report.plan,
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
            for key in ("fetched_bytes", "offloaded_bytes", "stall_s")
        }
        self._logged = now
        since["device_peak_bytes"] = now["device_peak_bytes"]
        since["host_peak_bytes"] = host_peak_bytes()
        return {f"protrain/{key}": value for key, value in since.items()}

    def _plan(self, layout: Layout, budget: Budget) -> Plan:
        args = self.args
        n_checkpoint = len(layout.blocks) if self._recompute_all else 0
        if args.protrain_force_all_persistent:
            return all_resident(layout, budget, n_checkpoint)
        by_hand = overrides(args)
        if by_hand is not None:
            n_buffer = by_hand.n_buffer
            if "n_buffer" in by_hand.filled:
                # what nobody asked for must not be refused as too many
                n_buffer = min(n_buffer, len(layout.pageable) - by_hand.n_persist)
            return plan_by_hand(
                layout,
                budget,
                by_hand.n_persist,
                n_buffer,
                by_hand.n_checkpoint,
                args.protrain_fp32_master,
            )
        return fill_budget(layout, budget, n_checkpoint, args.protrain_fp32_master)

    def _budget(
        self, model: nn.Module, device: torch.device
    ) -> tuple[Budget, list[str]]:
        notes = []
        capacity = self.args.protrain_capacity_bytes
        reserve = 0
        if device.type != "cpu":
            capacity = capacity or device_memory(device)
            reserve = int(capacity * ACTIVATION_SHARE)
            notes.append(
                f"{ACTIVATION_SHARE:.0%} of the device is kept for activations."
            )
        elif capacity is None:
            raise missing_capacity()
        if has_vision_tower(model):
            headroom = self.args.protrain_vision_headroom_bytes
            reserve += headroom
            notes.append(f"Vision tower: {headroom:,} bytes of headroom reserved.")
        on_host = sum(p.nbytes for p in model.parameters() if p.device.type == "cpu")
        host = self.args.protrain_cpu_capacity_bytes or host_memory() + on_host
        return Budget(capacity, reserve, host), notes

    def _warnings(self, plan: Plan) -> list[str]:
        notes = []
        by_hand = overrides(self.args)
        if by_hand is not None and by_hand.filled:
            filled = ", ".join(f"{k} {getattr(plan, k)}" for k in by_hand.filled)
            notes.append(f"Overrides completed with defaults: {filled}.")
            self._log.warning(notes[-1])
        if self._recompute_all:
            notes.append(
                "gradient_checkpointing is taken over: "
                f"{sum(plan.recompute)} of {len(plan.recompute)} blocks recompute."
            )
        if plan.paged and self._micro_batches < 4:
            notes.append(
                f"An effective batch of {self._micro_batches} is under 4: the transfer "
                "of the weights is not amortised. Raise gradient_accumulation_steps."
            )
            self._log.warning(notes[-1])
        return notes


def adapter_names(model: nn.Module) -> frozenset[str]:
    """Names of a PEFT model's adapter weights; empty without an adapter.

    Copies of whole modules (`modules_to_save`) are not among them: those are as large
    as what they copy.
    """
    if getattr(model, "peft_config", None) is None:
        return frozenset()
    return frozenset(
        name
        for name, p in model.named_parameters()
        if p.requires_grad and ".modules_to_save." not in name
    )


def _refuse_quantised(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"base_model: {getattr(config, 'name_or_path', '')} holds quantised weights, "
            "which cannot be paged in this version. Name the unquantised model."
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
