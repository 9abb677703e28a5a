"""What the machine gives."""

from .memory import device_memory, host_memory

__all__ = ["device_memory", "host_memory"]
