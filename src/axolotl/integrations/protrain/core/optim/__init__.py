"""Exact updates of parameters whose state is on the host."""

from .deferred import DeferredUpdates
from .gradients import GradientOffload, Gradients
from .host_chunks import HostChunk, HostMemory
from .noted_updates import NotedUpdates, Surroundings, kind_of
from .queued import QueuedUpdates
from .reduction import GradientReduction
from .states import state_bytes
from .updates import Updates
