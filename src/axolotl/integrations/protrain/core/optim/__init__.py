"""Exact updates of parameters whose state is on the host."""

from .deferred import DeferredUpdates, Surroundings, kind_of
from .device_sums import DeviceSums
from .gradients import GradientOffload, Gradients
from .host_adamw import HostAdamW, optimizer_bytes
from .host_chunks import HostChunk, HostMemory
from .optimizer import PagedAdamW
from .reduction import GradientReduction
from .states import state_bytes
from .updates import Updates
