"""From layout and budget to a plan."""

from .fill import Budget, all_resident, fill_budget, plan_by_hand

__all__ = ["Budget", "all_resident", "fill_budget", "plan_by_hand"]
