"""Run a plan: device and streams, host arena, slots, schedule, hooks.

Decides nothing: imports neither cost nor search nor profile.
"""

from .arena import Arena, host_buffer, return_freed_memory
from .carrier import Carrier
from .device import CpuDevice, CudaDevice, Device, asked_bytes, open_device
from .hooks import (
    Removable,
    attach_block,
    attach_entry,
    attach_state_dict,
    drop_ended_backward,
)
from .lockstep import Lockstep
from .pager import Pager
from .races import CheckedDevice
from .ranks import Ranks
from .recompute import Recompute
from .residence import Residence
from .simulated import DeferredDevice, SimulatedDevice, at_random, at_rate
from .slots import Slot
from .swap import Swap, SwapBlock
from .updates import HostTask, HostWorker

__all__ = [
    "Arena",
    "Carrier",
    "CheckedDevice",
    "CpuDevice",
    "CudaDevice",
    "DeferredDevice",
    "Device",
    "HostTask",
    "HostWorker",
    "Lockstep",
    "Pager",
    "Ranks",
    "Recompute",
    "Removable",
    "Residence",
    "SimulatedDevice",
    "Slot",
    "Swap",
    "SwapBlock",
    "asked_bytes",
    "at_random",
    "at_rate",
    "attach_block",
    "attach_entry",
    "attach_state_dict",
    "drop_ended_backward",
    "host_buffer",
    "open_device",
    "return_freed_memory",
]
