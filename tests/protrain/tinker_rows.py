"""Rows that scripts of a `tinker` client send, in a process that has it."""

from __future__ import annotations

import random
from typing import Any


def drawn_rows(chance: random.Random) -> list[Any]:
    """Draw five rows of different lengths; the weights of each sum up to 1."""
    from tinker import types

    rows = []
    for _ in range(5):
        length = chance.randint(3, 60)
        tokens = chance.choices(range(3, 288), k=length + 1)
        inputs = {"target_tokens": tokens[1:], "weights": [1 / length] * length}
        given = types.ModelInput.from_ints(tokens[:-1])
        rows.append(types.Datum(model_input=given, loss_fn_inputs=inputs))
    return rows
