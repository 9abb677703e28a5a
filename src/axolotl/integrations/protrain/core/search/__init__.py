"""From layout, trace and budget to the fastest plan that fits."""

from .plans import block_policies, make_plan, place
from .search import MAX_EXTRA_SLOTS, MODES, ONLY_A, Search

__all__ = [
    "MAX_EXTRA_SLOTS",
    "MODES",
    "ONLY_A",
    "Search",
    "block_policies",
    "make_plan",
    "place",
]
