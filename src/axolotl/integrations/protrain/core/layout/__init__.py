"""Parameters into chunks: find the blocks, lay their parameters out, count the slots."""

from .blocks import find_blocks, has_vision_tower
from .chunks import ALIGNMENT_BYTES, aligned, build_layout
from .ring import check_slots, slot_bytes, slot_floor, spread_order
from .schedule import Direction, Schedule

__all__ = [
    "ALIGNMENT_BYTES",
    "Direction",
    "Schedule",
    "aligned",
    "build_layout",
    "check_slots",
    "find_blocks",
    "has_vision_tower",
    "slot_bytes",
    "slot_floor",
    "spread_order",
]
