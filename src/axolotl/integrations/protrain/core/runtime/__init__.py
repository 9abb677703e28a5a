"""Run a plan: device and streams, host arena, slots, schedule, hooks.

Decides nothing: imports neither cost nor search nor profile.
"""

from .arena import Arena, host_buffer, return_freed_memory
from .compiled import CompiledForward
from .device import (
    CpuDevice,
    CudaDevice,
    Device,
    Event,
    allocator_note,
    asked_bytes,
    expand_segments,
    is_shortage,
    open_device,
)
from .hooks import (
    AroundCall,
    Hook,
    Removable,
    StateAccess,
    Window,
    announce_copies,
    attach_entry,
    drop_ended_backward,
)
from .lanes import LaneClock, LaneTimes
from .pager import Pager, Ring
from .races import CheckedDevice
from .ranks import HEARD_S, LIMIT, Alarm, Alone, Ranks
from .recompute import Recompute
from .residence import Residence
from .rows import HostRows, LookUp
from .slots import InBuffer, InSlot, Slot
from .staging import Source, Staging
from .swap import Swap, SwapBlock
from .updates import HostTask, HostWorker
