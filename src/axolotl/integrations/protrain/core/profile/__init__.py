"""What the model needs, and what the machine gives."""

from .block_times import measure_blocks, time_outside
from .cache import PeakSeen, cached_hardware, keep, measurement_key, recall
from .cards import GPUS, gpu_hardware
from .emulation import Emulation, outputs_as_fp32
from .hardware import (
    device_memory,
    measure_collectives,
    measure_hardware,
    measured_unseen_bytes,
    weakest,
)
from .meta import meta_copy, without_global_hooks
from .trace import TracedStep, trace_step
