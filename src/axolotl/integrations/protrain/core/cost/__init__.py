"""What a plan costs. Pure functions over layout and plan; never sees a tensor."""

from .memory import (
    Activations,
    DeviceEstimate,
    HostEstimate,
    MemoryModel,
    Parameters,
    Point,
    walk,
)
from .time import (
    StepTime,
    block_times,
    host_work,
    simulate_step,
    update_seconds,
    work_s,
)

__all__ = [
    "Activations",
    "DeviceEstimate",
    "HostEstimate",
    "MemoryModel",
    "Parameters",
    "Point",
    "StepTime",
    "block_times",
    "host_work",
    "simulate_step",
    "update_seconds",
    "walk",
    "work_s",
]
