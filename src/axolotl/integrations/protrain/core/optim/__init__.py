"""Exact updates of parameters whose state is on the host."""

from .gradients import GradientOffload, Gradients
from .host_adamw import HostAdamW, optimizer_bytes
from .host_chunks import HostChunk, HostMemory
from .optimizer import PagedAdamW
from .reduction import GradientReduction

__all__ = [
    "GradientOffload",
    "GradientReduction",
    "Gradients",
    "HostAdamW",
    "HostChunk",
    "HostMemory",
    "PagedAdamW",
    "optimizer_bytes",
]
