"""From layout and budget to a plan."""

from .fill import Budget, fill_budget, plan_by_hand

__all__ = ["Budget", "fill_budget", "plan_by_hand"]
