"""What a plan costs. Pure functions over layout and plan; never sees a tensor."""

from .states import StateBytes, host_bytes, state_bytes

__all__ = ["StateBytes", "host_bytes", "state_bytes"]
