"""What the model needs, and what the machine gives."""

from .block_times import BlockSample, measure_blocks, time_block
from .cache import block_key, cached, cached_hardware, environment_key
from .emulation import Emulation, Target, outputs_as_fp32
from .hardware import measure_collectives, measure_hardware, weakest
from .memory import device_memory, host_memory
from .meta import meta_twin
from .presets import GPUS, LINKS, gpu_hardware
from .trace import TracedStep, trace_step

__all__ = [
    "GPUS",
    "LINKS",
    "BlockSample",
    "Emulation",
    "Target",
    "TracedStep",
    "block_key",
    "cached",
    "cached_hardware",
    "device_memory",
    "environment_key",
    "gpu_hardware",
    "host_memory",
    "measure_blocks",
    "measure_collectives",
    "measure_hardware",
    "meta_twin",
    "outputs_as_fp32",
    "time_block",
    "trace_step",
    "weakest",
]
