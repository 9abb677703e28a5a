"""Parameters into chunks: find the blocks, lay their parameters out, count the slots."""

from .blocks import CACHES, find_blocks, has_vision_tower
from .chunks import ALIGNMENT_BYTES, aligned, build_layout
from .pieces import PIECE_NUMEL, Piece, pieces
from .shards import (
    main_chunk,
    master_chunk,
    padded_bytes,
    shard_bytes,
    span_bytes,
    spans,
)
from .slots import (
    Direction,
    Schedule,
    check_slots,
    ring_fits,
    slot_bytes,
    slot_floor,
    spread_order,
)
