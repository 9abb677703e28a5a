"""Callbacks that see true weights and gradients, and those that are known not to look."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from axolotl.monkeypatch import relora
from torch import nn
from transformers import TrainerCallback

from .core.engine.ranks import Ranks
from .core.engine.session import Session
from .core.errors import ConfigError

BLIND = ("transformers", "axolotl")
"""Packages whose callbacks look at no weights; others that do are refused."""
_SEEING = ("axolotl.integrations.grokfast", "axolotl.monkeypatch.relora")
EVENTS = sorted(name for name in vars(TrainerCallback) if name.startswith("on_"))


def looking(event: str, callbacks: Sequence[TrainerCallback]) -> list[str]:
    """Name the callbacks that may look at weights or gradients in an event.

    Those of transformers and Axolotl do not, or are refused.
    """
    found = []
    for callback in callbacks:
        act = getattr(callback, event)
        home = getattr(act, "__module__", None) or ""
        sees = home.startswith(_SEEING) or home.partition(".")[0] not in BLIND
        if sees and getattr(callback, "looks_at_weights", True):
            found.append(type(callback).__name__)
    return found


class _Visiting(dict[str, nn.Module]):
    """Layers of a model, each of which visits the device while it is looked at."""

    def __init__(self, layers: dict[str, nn.Module], session: Session) -> None:
        super().__init__(layers)
        self._session = session

    def items(self) -> Any:
        for name, layer in super().items():
            with self._session.visiting(layer.parameters(), writes=True):
                yield name, layer


@contextmanager
def merged_on_device(session: Session) -> Iterator[None]:
    """Inside, ReLoRA merges each adapter into its weight where the adapter is: on the
    device."""
    find = relora.find_lora_modules

    def found(model: nn.Module) -> _Visiting:
        return _Visiting(find(model), session)

    with patch.object(relora, "find_lora_modules", found):
        yield


class CallbackAccess:
    """Enters `full_params` for events in which a callback may look at weights.

    Args:
        full_params: Takes the name of whom weights are shown to.
        ranks: Agree on the events, because all of them enter.
        log: Prints a line, on the first rank.
    """

    def __init__(
        self,
        full_params: Callable[[str], AbstractContextManager[None]],
        ranks: Ranks,
        log: logging.Logger | logging.LoggerAdapter[Any],
    ) -> None:
        self._full_params, self._ranks, self._log = full_params, ranks, log
        self._events: set[str] | None = None

    def during(
        self, event: str, callbacks: Sequence[TrainerCallback]
    ) -> AbstractContextManager[None]:
        """Return `full_params` where a callback may look at weights, else nothing.

        Raises:
            ConfigError: Only some ranks have such a callback, added while training.
        """
        if self._events is None:
            self._events = self._agreed(callbacks)
        looks = looking(event, callbacks)
        if looks and event not in self._events:
            if self._ranks.world.size > 1:
                raise ConfigError(
                    f"plugins: {looks[0]} was added while training. Add callbacks "
                    "before, on all ranks, so that they agree on when weights are shown."
                )
            self._events |= {event}
        if event not in self._events:
            return nullcontext()
        return self._full_params(f"{event} of {', '.join(looks)}")

    def _agreed(self, callbacks: Sequence[TrainerCallback]) -> set[str]:
        own = {e: names for e in EVENTS if (names := looking(e, callbacks))}
        named = "; ".join(f"{e}: {', '.join(names)}" for e, names in own.items())
        if named and self._ranks.rank == 0:
            self._log.info(
                "ProTrain shows weights and gradients to callbacks, and waits for host "
                f"updates before ({named}). Set `looks_at_weights = False` on the class "
                "of one that looks at neither."
            )
        return set().union(*self._ranks.collect({*own}))
