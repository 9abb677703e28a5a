"""Exact updates of parameters whose state is on the host."""

from .gradients import GradientOffload
from .host_adamw import HOST_OPTIMIZERS, HostAdamW
from .host_chunks import HostChunk, has_masters
from .optimizer import PagedAdamW, optimizer_bytes

__all__ = [
    "HOST_OPTIMIZERS",
    "GradientOffload",
    "HostAdamW",
    "HostChunk",
    "PagedAdamW",
    "has_masters",
    "optimizer_bytes",
]
