"""The distance of a run from its forecast: said once, and learned for the next run."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .args import ProTrainArgs
from .core.errors import ConfigError
from .core.planner.hardware import measured_unseen_bytes
from .core.planner.job import keep_peak, peak_seen
from .core.sizes import format_bytes
from .report.forecast import format_seconds
from .report.run import RunReport

UNCOUNTED = (
    "torch_compile: the CPU device does not see what compiled kernels allocate: its "
    "measured peak is too low."
)
CHECKED_STEP = 4
"""After this step prediction and measurement are compared."""
BYTES_APART, SECONDS_APART = 0.05, 0.3
"""Relative differences worth a line in the log."""
LOADED = 1.25
"""Load for each processor from which steps are slow for no fault of a prediction."""


class Prediction:
    """Compares what a run measures with its forecast.

    Args:
        args: The plugin's keys.
        report: Its forecast is of the plan that runs.
        log: Prints a line.
        compiled: As in `Job`.

    Attributes:
        evaluates: An evaluation has run, whose peak counts.
        most_tokens: Of a micro-batch so far.
    """

    def __init__(
        self,
        args: ProTrainArgs,
        report: RunReport,
        log: logging.Logger | logging.LoggerAdapter[Any],
        compiled: Mapping[str, Any] | None,
    ) -> None:
        self._args, self._report, self._log = args, report, log
        self._compiled = compiled
        self._device = torch.device(report.device)
        self.evaluates, self.most_tokens = False, 0

    def compare(self, peak: int, unplanned_bytes: int) -> None:
        """Say how far the first steps are from their prediction, and learn their peak."""
        report = self._report
        forecast, seconds = report.forecast, report.median_step_s() or 0.0
        planned = self._counted_bytes()
        lines = []
        learned = self.learn([peak], unplanned_bytes)
        # answers may be shorter than the cache that is planned
        short = forecast.generation is not None and peak < planned
        if (
            abs(peak - planned) > BYTES_APART * planned
            and UNCOUNTED not in report.notes
            and not short
        ):
            advice = "Lower protrain_capacity_bytes by that much if a step runs out."
            if peak < planned:
                advice = "Training is safe."
            if learned:
                advice = "The next run of this model and these rows plans with it."
            usable = format_bytes(forecast.budget.usable_bytes)
            lines.append(
                f"device peak: {format_bytes(planned)} predicted, {format_bytes(peak)} "
                f"measured, {usable} may be used. {advice}"
            )
        predicted = forecast.step.total_s
        if (
            abs(seconds - predicted) > SECONDS_APART * predicted
            and len(report.step_s) > report.watched_steps
            and os.getloadavg()[0] <= LOADED * (os.cpu_count() or 1)
        ):
            lines.append(
                f"step: {format_seconds(predicted)} predicted, {format_seconds(seconds)} "
                "measured. Results are the same; where it is slower, `axolotl protrain "
                "doctor` says what copies and page-locking get on this machine."
            )
        for line in lines:
            report.notes.append(line)
            self._log.warning(f"ProTrain's prediction is off: {line}")

    def learn(self, peaks: Sequence[int], unplanned_bytes: int) -> bool:
        """Let later runs plan with a peak that is far from its prediction.

        Args:
            peaks: Of all ranks.
            unplanned_bytes: What an attempt that had no room wanted beyond its trace.

        Returns:
            Whether they will.
        """
        report, device, apart = self._report, self._device, 0.0
        forecast, beyond = report.forecast, unplanned_bytes
        if not beyond:
            # of a step and the next, of all ranks, and a prediction that counts all
            if (
                len(report.step_s) < 2
                or len(peaks) < forecast.workload.world.size
                or UNCOUNTED in report.notes
            ):
                return False
            apart = BYTES_APART * self._counted_bytes()
            traced = self._predicted_bytes() - forecast.hardware.unseen_bytes
            beyond = max(peaks) - traced
            if (self.evaluates or forecast.generation) and beyond <= apart:
                # whose peak it is does not show; answers may be short
                return False
        folder = self._args.protrain_cache_dir
        step = forecast.layout, forecast.trace, forecast.workload
        seen = peak_seen(folder, device, *step, self._compiled)
        known = seen.beyond_bytes if seen else 0
        if self.most_tokens < forecast.workload.tokens and beyond < max(known, 0):
            return False
        if beyond < 0:
            # another plan may need it
            beyond //= 2
        if abs(beyond - known) <= apart or not self._args.protrain_learn_peak:
            return False
        try:
            keep_peak(folder, device, forecast, self._compiled, beyond)
        except ConfigError as error:
            self._log.warning(str(error))
            return False
        return True

    def _predicted_bytes(self) -> int:
        """The predicted peak of what has run."""
        forecast = self._report.forecast
        phases = {**forecast.device.phases}
        evaluation = phases.pop("evaluation", 0) - forecast.hardware.unneeded_bytes
        if self.evaluates:
            phases["evaluation"] = evaluation
        return max(phases.values())

    def _counted_bytes(self) -> int:
        """The part of it that torch's allocator counts."""
        total = self._report.forecast.hardware.device_bytes
        return self._predicted_bytes() - measured_unseen_bytes(self._device, total)
