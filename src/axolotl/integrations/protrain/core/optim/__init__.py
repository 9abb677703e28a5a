"""Exact updates of parameters whose state is on the host."""

from .gradients import GradientOffload
from .host_adamw import HOST_OPTIMIZERS, HostAdamW
from .host_chunks import HostChunk
from .optimizer import PagedAdamW, optimizer_bytes

__all__ = [
    "HOST_OPTIMIZERS",
    "GradientOffload",
    "HostAdamW",
    "HostChunk",
    "PagedAdamW",
    "optimizer_bytes",
]
