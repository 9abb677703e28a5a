"""Run a plan: one training step is in `step.py`, everything else is called by it."""
