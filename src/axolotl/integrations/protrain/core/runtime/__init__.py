"""Run a plan: device and streams, host arena, slots, schedule, hooks.

Decides nothing: imports neither cost nor search nor profile.
"""

from .arena import Arena, host_buffer
from .device import CpuDevice, CudaDevice, Device, asked_bytes, open_device
from .hooks import (
    Removable,
    attach_block,
    attach_entry,
    attach_state_dict,
    drop_ended_backward,
)
from .pager import Pager
from .recompute import Recompute
from .residence import Residence
from .simulated import SimulatedDevice, at_random, at_rate
from .slots import Slot
from .updates import HostWorker

__all__ = [
    "Arena",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "HostWorker",
    "Pager",
    "Recompute",
    "Removable",
    "Residence",
    "SimulatedDevice",
    "Slot",
    "asked_bytes",
    "at_random",
    "at_rate",
    "attach_block",
    "attach_entry",
    "attach_state_dict",
    "drop_ended_backward",
    "host_buffer",
    "open_device",
]
