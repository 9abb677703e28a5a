"""What the model needs, and what the machine gives."""

from .block_times import BlockSeconds, measure_blocks
from .cache import block_key, cached, cached_hardware
from .cards import GPUS, gpu_hardware
from .emulation import Emulation, Target, outputs_as_fp32
from .hardware import (
    device_memory,
    host_memory,
    mapped_bytes,
    measure_collectives,
    measure_hardware,
    measured_unseen_bytes,
    weakest,
)
from .meta import meta_copy
from .trace import TracedStep, trace_step

__all__ = [
    "GPUS",
    "BlockSeconds",
    "Emulation",
    "Target",
    "TracedStep",
    "block_key",
    "cached",
    "cached_hardware",
    "device_memory",
    "gpu_hardware",
    "host_memory",
    "mapped_bytes",
    "measure_blocks",
    "measure_collectives",
    "measure_hardware",
    "measured_unseen_bytes",
    "meta_copy",
    "outputs_as_fp32",
    "trace_step",
    "weakest",
]
