"""Axolotl's own examples are accepted, or refused for a reason that is documented.

Validated by Axolotl's config class with the keys of ProTrain and of the plugins that the
examples list. What is refused must be a cell of docs/compatibility.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from axolotl.integrations.cut_cross_entropy.args import CutCrossEntropyArgs
from axolotl.integrations.liger.args import LigerArgs
from axolotl_jobs import (
    LORA,
    PROTRAIN,
    SEEDING,
    Job,
    Pair,
    Result,
    assert_equal,
    overrides,
    pair,
)
from compatibility import CELLS
from pydantic import ValidationError
from test_args import PLAIN, Merged

from axolotl.integrations.protrain.core.errors import ConfigError
from axolotl.integrations.protrain.refusals import TAKEN_OVER, refusals

Run = Callable[[Job], Result]

EXAMPLES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("examples.yaml").read_text()
)
ADAPTED = {"lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}


class Config(CutCrossEntropyArgs, LigerArgs, Merged):
    """What Axolotl makes of a YAML that lists all of these plugins."""


def refused(keys: dict[str, Any]) -> list[str]:
    """The lines of our refusal; another complaint of Axolotl's is an error."""
    adapted = ADAPTED if "adapter" in keys else {}
    try:
        Config(**PLAIN | adapted | {"bf16": True, "micro_batch_size": 1} | keys)
    except ValidationError as error:
        (only,) = error.errors()
        assert isinstance(only["ctx"]["error"], ConfigError), only
        *lines, _way_out = str(only["ctx"]["error"]).splitlines()
        return lines
    except ImportError:
        # a package that Axolotl looks for before our turn
        return refusals(keys)
    return []


def without_values(text: str) -> str:
    """`rl: dpo` as `rl`: one cell stands for all objectives."""
    return re.sub(r"`(\w+): [^`]*`", r"`\1`", text)


FAMILIES = {
    "LiquidAI/lfm2-350m-fft.yaml": "lfm2",
    "archived/qwen/qwen2-moe-qlora.yaml": "qwen2_moe",
    "cohere/command-r-7b-qlora.yml": "cohere",
    "gemma4/31b-qlora.yaml": "gemma3",
    "mistral/mixtral/mixtral.yml": "mixtral",
    "phi/phi3-ft-fsdp.yml": "phi3",
}
"""Tiny models of the families, or of one akin."""


def as_trained(keys: dict[str, Any]) -> dict[str, Any]:
    """What is left without the plugins, whose kernels are for GPUs."""
    adapted = LORA if "adapter" in keys else {}
    mine = {"bf16": True, "gradient_checkpointing": True}
    return adapted | mine | keys | {"plugins": [PROTRAIN, SEEDING]}


def plainly(keys: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(set(TAKEN_OVER) & set(keys)) | {
        "gradient_checkpointing_kwargs": {"use_reentrant": False}
    }


@pytest.mark.parametrize(
    "trainings",
    [
        pytest.param(
            pair(
                family,
                as_trained(EXAMPLES[name]),
                plan=overrides(1, 2, 1),
                plain=plainly(EXAMPLES[name]),
            ),
            id=name,
            # a mask in 16 bits
            marks=() if family == "cohere" else pytest.mark.full,
        )
        for name, family in FAMILIES.items()
    ],
)
def test_an_example_trains_as_without_the_plugin(run: Run, trainings: Pair) -> None:
    assert_equal(run(trainings.paged), run(trainings.plain))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_accepted_or_its_refusal_is_documented(name: str) -> None:
    documented = [without_values(cell.message) for cell in CELLS if cell.refused]
    for line in map(without_values, refused(EXAMPLES[name])):
        assert any(message in line for message in documented), line


def test_no_more_examples_are_refused_than_are_known() -> None:
    assert sum(not refused(keys) for keys in EXAMPLES.values()) >= 137
