"""One file a system: `open(setup)` takes a model over and returns how to train it."""

LABELS = {
    "ours": "ProTrain (this plugin)",
    "equal": "ProTrain, a peer's memory",
    "uncapped": "plain, memory not capped",
    "plain": "plain, resident",
    "plain_recompute": "plain, recompute, not capped",
    "layer_offloading": "Axolotl layer_offloading",
    "fsdp2": "FSDP2 CPUOffloadPolicy",
    "zero3": "DeepSpeed ZeRO-3 offload",
    "torchao": "torchao CPUOffloadOptimizer",
}
"""Module of the adapter, and the name in tables."""

COMPILED = ("zero3",)
"""Systems that compile kernels when they are first used; `build` does it before."""

PEERS = ("fsdp2", "zero3")
"""Systems that move weights, as this one does; `equal` may use what the first one takes."""

EXACT = ("ours", "uncapped", "plain", "plain_recompute", "equal")
"""Systems that promise plain training's numbers to the last bit on one device."""

EQUAL = "equal"
"""This plugin at the memory of a peer."""

REFERENCE = "uncapped"
"""Whose losses the others are compared with: it always fits, if the machine does."""

UNCAPPED = (REFERENCE, "plain_recompute")
"""Systems that may take all the memory there is: what others lose by their limit, and by
recomputing, shows beside them."""
