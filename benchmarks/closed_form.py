"""The paper's closed form for the time of a step, to compare the simulation with."""

from __future__ import annotations

from collections.abc import Iterable

from axolotl.integrations.protrain.core.planner.demand import Demand, Traffic
from axolotl.integrations.protrain.core.planner.trained_bytes import TrainedBytes
from axolotl.integrations.protrain.core.types import (
    BlockTimes,
    Hardware,
    Layout,
    Plan,
    Workload,
)


def closed_form_s(
    layout: Layout, plan: Plan, times: BlockTimes, hardware: Hardware
) -> float:
    """Seconds of a step of one micro-batch, without masters or clipping.

    Equations 2 to 7 with one rank (no gather, no reduce), a block's chunks taken
    together, and the two directions of the link side by side.
    """
    d = Demand(TrainedBytes(layout, Workload()), plan, times, hardware)

    def upload_s(block: int, chunks: Iterable[int], traffic: Traffic) -> float:
        if not 0 <= block < len(d.bounds):
            return 0.0
        start, stop = d.bounds[block]
        return traffic.fetch_s * sum(
            d.chunk_bytes[c] for c in chunks if start <= c < stop
        )

    every, gone = range(d.num_chunks), range(d.num_chunks - d.num_slots)
    forward_s = sum(
        max(seconds, upload_s(block + 1, every, d.first))
        for block, seconds in enumerate(d.forward_s)
    )
    backward_s = sum(
        max(
            seconds,
            upload_s(block - 1, gone, d.backward),
            d.backward.offload_s * sum(g.nbytes for g in d.gradients[block]),
        )
        for block, seconds in enumerate(d.backward_s)
    )
    host_s = sum(work.update_s for work in d.works)
    return (
        forward_s
        + times.outside_forward_s
        + max(backward_s + times.outside_backward_s + times.update_s, host_s)
    )
