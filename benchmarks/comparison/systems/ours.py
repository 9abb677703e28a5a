"""This plugin's own run: it traces, plans, and trains under the fastest plan that fits.

What the plugin's trainer calls is called here, so that a step out of memory is repeated
and report.json is written as in `axolotl train`.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from axolotl.utils.dict import DictDefault
from axolotl.utils.logging import get_logger
from torch import Tensor
from transformers import TrainerState

from axolotl.integrations.protrain.args import ProTrainArgs
from axolotl.integrations.protrain.core.planner.hardware import measure_hardware
from axolotl.integrations.protrain.core.types import Hardware
from axolotl.integrations.protrain.run import TrainingRun

from ..cases import SHAPES
from ..roofline import median, roofline
from ..setup import HOST, Batch, Setup, Training, nothing


def open(setup: Setup) -> Training:
    case = setup.case
    folder = Path(tempfile.mkdtemp(prefix="protrain-compare-"))
    args = ProTrainArgs(
        protrain_auto_memory=True,
        protrain_capacity_bytes=case.capacity_bytes,
        # rates of now, which the roofline needs, not those of another day
        protrain_cache_dir=str(folder),
    )
    cfg = DictDefault(
        micro_batch_size=case.rows,
        sequence_len=case.length,
        pad_to_sequence_len=False,
        gradient_accumulation_steps=1,
        optimizer="adamw_torch_fused",
        bf16=case.precision == "bf16",
        output_dir=str(folder),
        **args.model_dump(exclude_none=True),
    )
    model = setup.model(HOST)
    run = TrainingRun(cfg, (), get_logger(__name__))
    run.open(model, setup.device, saves_optimizer=False)
    session, report = run.session, run.report
    assert session is not None and report is not None
    optimizer = run.wrap_optimizer(setup.optimizer(model))

    state = TrainerState()
    trainer: Any = SimpleNamespace(state=state)

    def step(batch: Batch) -> Tensor:
        def forward_backward() -> Tensor:
            loss = setup.loss(model, batch)
            loss.backward()
            return loss.detach()

        # the first steps are watched in there
        run.begin_step(trainer)
        loss = run.recovery.attempt(forward_backward, "forward")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.end_step()
        state.global_step += 1
        return loss

    def moved() -> tuple[int, int]:
        measured = session.measured()
        return (
            measured.fetched_bytes + measured.swapped_in_bytes,
            measured.offloaded_bytes + measured.swapped_out_bytes,
        )

    def pinned_bytes() -> int:
        own = sum(region.nbytes for region in session._pinned)
        return own + session.measured().host_swap_bytes

    shape = SHAPES[case.shape]
    seen: list[Hardware] = []

    def measure_again() -> None:
        # a shared machine is another one at every step
        size = (case.tokens, shape.hidden, shape.intermediate)
        seen.append(measure_hardware(setup.device, matmul=size))

    def record() -> dict[str, Any]:
        forecast = report.forecast
        floor = roofline(forecast, median(seen) if seen else forecast.hardware)
        plan = forecast.plan
        measured = asdict(session.measured())
        run.close()
        return {
            "roofline": {**asdict(floor), "floor_s": floor.floor_s},
            "plan": {
                "n_persist": plan.n_persist,
                "n_buffer": plan.n_buffer,
                "n_swap": plan.n_swap,
                "n_checkpoint": plan.n_checkpoint,
                "mode": plan.mode,
            },
            "predicted": {
                "step_s": forecast.step.total_s,
                "device_peak_bytes": forecast.device.peak_bytes,
            },
            "measured": measured,
            "notes": report.notes,
        }

    return Training(
        step,
        args.model_dump(
            exclude_none=True, exclude_defaults=True, exclude={"protrain_cache_dir"}
        ),
        peak_bytes=lambda: session.measured().device_peak_bytes,
        moved=moved,
        pinned_bytes=pinned_bytes if not setup.on_cpu else int,
        # on a GPU it would reset torch's memory statistics, and is not needed
        between=measure_again if setup.on_cpu else nothing,
        record=record,
    )
