"""ProTrain without Axolotl: layout, engine, planner, checkpoints.

Nothing below this folder imports axolotl, transformers or peft. Imports point one way:
types <- layout <- engine <- planner; layout <- checkpoint.
"""
