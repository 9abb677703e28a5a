"""ProTrain for Axolotl: fine-tune models larger than the device, with the same results.

Names are loaded on first use (PEP 562), so that importing `core` loads neither axolotl
nor transformers.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .args import ProTrainArgs
    from .plugin import ProTrainPlugin

_HOME = {"ProTrainArgs": ".args", "ProTrainPlugin": ".plugin"}

__all__ = ["ProTrainArgs", "ProTrainPlugin"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        # with the name nearly right, the plugin refuses the YAML, all faults at once
        near = difflib.get_close_matches(name.lower(), ("protrainplugin",), 1, 0.85)
        if not near:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        name = "ProTrainPlugin"
    return getattr(importlib.import_module(_HOME[name], __name__), name)
