"""What a plan costs. Pure functions over layout and plan; never sees a tensor."""

from .compute import block_times, update_seconds, work_s
from .memory import DeviceEstimate, HostEstimate, MemoryModel, Point
from .states import StateBytes, host_bytes, state_bytes
from .time import StepTime, closed_form_s, lower_bound_s, simulate_step

__all__ = [
    "DeviceEstimate",
    "HostEstimate",
    "MemoryModel",
    "Point",
    "StateBytes",
    "StepTime",
    "block_times",
    "closed_form_s",
    "host_bytes",
    "lower_bound_s",
    "simulate_step",
    "state_bytes",
    "update_seconds",
    "work_s",
]
