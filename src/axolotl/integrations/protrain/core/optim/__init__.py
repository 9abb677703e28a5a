"""Exact updates of parameters whose state is on the host."""

from .gradients import GradientOffload
from .host_adamw import HOST_OPTIMIZERS, HostAdamW
from .host_chunks import HostChunk, ShardedChunk, SharedMemory, parts_chunk
from .optimizer import PagedAdamW, optimizer_bytes
from .reduction import GradientReduction

__all__ = [
    "HOST_OPTIMIZERS",
    "GradientOffload",
    "GradientReduction",
    "HostAdamW",
    "HostChunk",
    "PagedAdamW",
    "ShardedChunk",
    "SharedMemory",
    "optimizer_bytes",
    "parts_chunk",
]
