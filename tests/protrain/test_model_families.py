"""Families of transformers that were hard to trace or to page: all others are alike."""

from __future__ import annotations

import pytest
from fork_server import call


def stages(family: str) -> list[str]:
    from sweep import sweep

    said: list[str] = []
    sweep(family, said.append)
    return said


@pytest.mark.parametrize(
    "family",
    [
        # how many tokens an expert gets decides shapes
        "jetmoe",
        # an operator that only GPUs have for integers
        "deepseek_v4",
        # a cache under another name
        "xlm",
    ],
)
def test_paged_is_plain(family: str) -> None:
    assert call(stages, family)[-3:] == ["paged", "recomputed", ""]
