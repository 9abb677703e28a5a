"""Exact updates of parameters whose state is on the host."""

from .gradients import Gradients
from .host_chunks import HostChunk
from .host_tensors import HostMemory
from .noted import states_of
from .pending import Surroundings
from .reduction import GradientReduction
from .states import state_bytes
from .updates import Updates, kind_of
