"""ProTrain without Axolotl: layout, cost, search, runtime, optimizer, checkpoints.

Nothing below this folder imports axolotl, transformers or peft. Imports point one
way: types <- layout <- cost <- search; layout <- runtime <- optim <- checkpoint;
all of them <- session.
"""
