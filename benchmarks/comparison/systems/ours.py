"""This plugin's engine by its public face: the fastest plan that fits, in a plain loop."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from axolotl.integrations.protrain.core import page
from axolotl.integrations.protrain.core.planner.hardware import measure_hardware
from axolotl.integrations.protrain.core.types import Hardware

from ..cases import SHAPES
from ..roofline import median, roofline
from ..setup import HOST, Setup, Training, nothing


def open(setup: Setup) -> Training:
    case, shape = setup.case, SHAPES[setup.case.shape]
    size = (case.rows * case.length, shape.hidden, shape.intermediate)
    model = setup.model(HOST)
    optimizer = setup.optimizer(model)
    paged = page(
        model,
        optimizer,
        example=setup.batches(0)[0],
        accumulation=case.accumulation,
        budget=case.capacity_bytes,
        autocast=setup.autocast_dtype,
        device=setup.device,
    )
    plan, seen = paged.forecast.plan, list[Hardware]()

    def moved() -> tuple[int, int]:
        measured = paged.measured()
        return (
            measured.fetched_bytes + measured.swapped_in_bytes,
            measured.offloaded_bytes + measured.swapped_out_bytes,
        )

    def pinned_bytes() -> int:
        now = paged.measured()
        return now.host_arena_bytes + now.host_optimizer_bytes + now.host_swap_bytes

    def record() -> dict[str, Any]:
        forecast = paged.forecast
        floor = roofline(forecast, median(seen) if seen else forecast.hardware)
        measured = asdict(paged.measured())
        paged.close()
        knobs = ("n_persist", "n_buffer", "n_swap", "n_checkpoint", "mode")
        return {
            "roofline": {**asdict(floor), "floor_s": floor.floor_s},
            "plan": {knob: getattr(plan, knob) for knob in knobs},
            "predicted": {
                "step_s": forecast.step.total_s,
                "device_peak_bytes": forecast.device.peak_bytes,
            },
            "measured": measured,
            "notes": paged.notes,
        }

    return Training(
        setup.step(model, optimizer, paged.clip_grad_norm_),
        {"budget": case.capacity_bytes},
        watch=paged.watch,
        peak_bytes=lambda: paged.measured().device_peak_bytes,
        moved=moved,
        pinned_bytes=pinned_bytes if not setup.on_cpu else int,
        # a shared machine is another one at every step; on a GPU it would reset torch's
        # memory statistics, and is not needed
        between=(lambda: seen.append(measure_hardware(setup.device, matmul=size)))
        if setup.on_cpu
        else nothing,
        record=record,
    )
