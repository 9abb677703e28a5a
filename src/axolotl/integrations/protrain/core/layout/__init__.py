"""Parameters into chunks: find the blocks, lay their parameters out, count the slots."""

from .blocks import find_blocks, has_vision_tower
from .chunks import ALIGNMENT_BYTES, aligned, build_layout
from .shards import (
    Piece,
    Reduction,
    main_chunk,
    padded_bytes,
    reduce_bytes,
    reductions,
    shard_bytes,
)
from .slots import (
    Direction,
    Schedule,
    check_slots,
    slot_bytes,
    slot_floor,
    spread_order,
)

__all__ = [
    "ALIGNMENT_BYTES",
    "Direction",
    "Piece",
    "Reduction",
    "Schedule",
    "aligned",
    "build_layout",
    "check_slots",
    "find_blocks",
    "has_vision_tower",
    "main_chunk",
    "padded_bytes",
    "reduce_bytes",
    "reductions",
    "shard_bytes",
    "slot_bytes",
    "slot_floor",
    "spread_order",
]
