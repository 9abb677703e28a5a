"""From layout, trace and budget to the fastest plan that fits."""

from .plans import make_plan, place, slot_range
from .search import Search

__all__ = ["Search", "make_plan", "place", "slot_range"]
