"""ProTrain without Axolotl: `page` and `plan`, over layout, engine, planner, checkpoints.

Nothing below this folder imports axolotl, transformers or peft. Imports point one way:
types <- layout <- engine <- planner <- api; layout <- checkpoint.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Paged, gpu, page, plan

__all__ = ["Paged", "gpu", "page", "plan"]


def __getattr__(name: str) -> Any:
    # each import of a part of core comes past here, and the face imports nearly all parts
    if name in __all__:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
