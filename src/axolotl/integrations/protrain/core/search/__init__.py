"""From layout and budget to a plan."""

from .fill import all_resident, fill_budget, plan_by_hand
from .plans import make_plan, place, slot_range
from .search import Search

__all__ = [
    "Search",
    "all_resident",
    "fill_budget",
    "make_plan",
    "place",
    "plan_by_hand",
    "slot_range",
]
