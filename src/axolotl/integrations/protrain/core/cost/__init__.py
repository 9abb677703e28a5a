"""What a plan costs. Pure functions over layout and plan; never sees a tensor."""

from .compute import block_times, update_seconds, work_s
from .memory import (
    Activations,
    DeviceEstimate,
    HostEstimate,
    MemoryModel,
    Parameters,
    Point,
)
from .states import StateBytes, host_bytes, state_bytes
from .time import (
    ALONE,
    COMMUNICATE,
    Collectives,
    HostWork,
    StepTime,
    closed_form_s,
    host_work,
    lower_bound_s,
    seconds_per_byte,
    simulate_step,
)

__all__ = [
    "ALONE",
    "COMMUNICATE",
    "Activations",
    "Collectives",
    "DeviceEstimate",
    "HostEstimate",
    "HostWork",
    "MemoryModel",
    "Parameters",
    "Point",
    "StateBytes",
    "StepTime",
    "block_times",
    "closed_form_s",
    "host_bytes",
    "host_work",
    "lower_bound_s",
    "seconds_per_byte",
    "simulate_step",
    "state_bytes",
    "update_seconds",
    "work_s",
]
