"""From layout and budget to a plan."""

from .fill import all_resident, fill_budget, plan_by_hand

__all__ = ["all_resident", "fill_budget", "plan_by_hand"]
