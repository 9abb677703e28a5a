"""What the machine gives."""

from .memory import DeviceMemory, device_memory, host_memory

__all__ = ["DeviceMemory", "device_memory", "host_memory"]
