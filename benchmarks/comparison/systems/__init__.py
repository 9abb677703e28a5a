"""One file a system: `open(setup)` takes a model over and returns how to train it."""

LABELS = {
    "ours": "ProTrain (this plugin)",
    "uncapped": "plain, memory not capped",
    "plain": "plain, resident",
    "plain_recompute": "plain, resident, recompute",
    "layer_offloading": "Axolotl layer_offloading",
    "fsdp2": "FSDP2 CPUOffloadPolicy",
    "zero3": "DeepSpeed ZeRO-3 offload",
    "torchao": "torchao CPUOffloadOptimizer",
}
"""Module of the adapter, and the name in tables."""

COMPILED = ("zero3",)
"""Systems that compile kernels when they are first used; `build` does it before."""

EXACT = ("ours", "uncapped", "plain", "plain_recompute")
"""Systems that promise plain training's numbers to the last bit on one device."""

REFERENCE = "uncapped"
"""Whose losses the others are compared with: it always fits, if the machine does."""
