"""The least time that a step can take, whoever runs it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from axolotl.integrations.protrain.core.planner.planner import Forecast
from axolotl.integrations.protrain.core.types import Hardware


@dataclass(frozen=True)
class Roofline:
    """Seconds of one step, each resource alone at its measured rate.

    Attributes:
        compute_s: FLOPs of forward and backward, nothing repeated, over the rate of
            matrix products; 16-bit ones over that of fp32 where it is higher, as on
            a CPU without 16-bit units, whose kernels may convert.
        fetch_s: Bytes that the plan moves to the device over the link's rate.
        offload_s: Bytes that it moves back.
        update_s: Weights that the host updates over the rate of its AdamW.
        overlaps: Whether copies can run beside compute; else the floor is their sum.
        flops: Counted FLOPs of a step.
        fetched_bytes: What the plan moves to the device.
        offloaded_bytes: What it moves back.
    """

    compute_s: float
    fetch_s: float
    offload_s: float
    update_s: float
    overlaps: bool
    flops: int
    fetched_bytes: int
    offloaded_bytes: int

    @property
    def floor_s(self) -> float:
        """The larger of compute and transfer where they overlap, else their sum.

        The host's update runs beside both.
        """
        transfer_s = max(self.fetch_s, self.offload_s)
        if self.overlaps:
            return max(self.compute_s, transfer_s, self.update_s)
        return max(self.compute_s + self.fetch_s + self.offload_s, self.update_s)


def roofline(forecast: Forecast, hardware: Hardware) -> Roofline:
    """Of the plan's own traffic: another plan may move less and compute more."""
    moved = forecast.moved
    work = [segment.work for segment in forecast.trace.segments]
    accumulation = forecast.workload.accumulation
    flops_16 = accumulation * sum(w.flops_16 for w in work)
    flops_32 = accumulation * sum(w.flops_32 for w in work)
    fetched = forecast.step.fetched_bytes + accumulation * sum(moved.back)
    offloaded = forecast.step.offloaded_bytes + accumulation * sum(moved.out)
    fastest_16 = max(hardware.flops_16, hardware.flops_32)
    return Roofline(
        compute_s=flops_16 / fastest_16 + flops_32 / hardware.flops_32,
        fetch_s=fetched / hardware.fetch_bytes_s,
        offload_s=offloaded / hardware.offload_bytes_s,
        update_s=_updated_bytes(forecast) / hardware.adam_bytes_s,
        overlaps=hardware.overlaps,
        flops=flops_16 + flops_32,
        fetched_bytes=fetched,
        offloaded_bytes=offloaded,
    )


def _updated_bytes(forecast: Forecast) -> int:
    placements = forecast.plan.placements
    return sum(
        chunk.nbytes
        for chunk in forecast.layout.chunks
        if chunk.trainable and placements[chunk.index].on_host
    )


def median(measured: Sequence[Hardware]) -> Hardware:
    """One machine measured several times: the median of each rate."""
    rates = {
        name: statistics.median(getattr(hardware, name) for hardware in measured)
        for name in _RATES
    }
    return replace(measured[0], **rates)


_RATES = ("flops_16", "flops_32", "fetch_bytes_s", "offload_bytes_s", "adam_bytes_s")
