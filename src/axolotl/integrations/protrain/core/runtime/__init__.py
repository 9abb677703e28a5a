"""Run a plan: device and streams, host arena, slots, schedule, hooks.

Decides nothing: imports neither cost nor search nor profile.
"""

from .arena import Arena, return_freed_memory
from .device import CpuDevice, CudaDevice, Device, open_device
from .hooks import attach_block, attach_entry, attach_state_dict
from .pager import Pager
from .recompute import attach_recompute
from .schedule import Direction, Schedule
from .slots import Slot
from .updates import HostWorker

__all__ = [
    "Arena",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "Direction",
    "HostWorker",
    "Pager",
    "Schedule",
    "Slot",
    "attach_block",
    "attach_entry",
    "attach_recompute",
    "attach_state_dict",
    "open_device",
    "return_freed_memory",
]
