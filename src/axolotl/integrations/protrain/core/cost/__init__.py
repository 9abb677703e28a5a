"""What a plan costs. Pure functions over layout and plan; never sees a tensor."""

from .memory import MemoryModel
from .time import StepTime, block_times, work_s
