"""Questions of grade-school mathematics and their rewards, for llama3-8b-grpo-24gb.yaml."""

from __future__ import annotations

import re
from typing import Any

ASKED = "Think first, then give the number alone, in <answer></answer>."
_ANSWER = re.compile(r"<answer>\s*([-\d.,]+)\s*</answer>")


def questions(_cfg: Any, **_kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Make a row of GSM8K a prompt with its number."""

    def transform(row: dict[str, Any], tokenizer: Any = None) -> dict[str, Any]:
        return {
            "prompt": [
                {"role": "system", "content": ASKED},
                {"role": "user", "content": row["question"]},
            ],
            "number": row["answer"].rpartition("####")[2].strip().replace(",", ""),
        }

    return transform, {"remove_columns": ["question", "answer"]}


def right_answer(completions: list[Any], number: list[str], **_: Any) -> list[float]:
    """Reward the number of the row with 1."""
    return [
        float(_number(answer) == right)
        for answer, right in zip(completions, number, strict=True)
    ]


def in_the_format(completions: list[Any], **_: Any) -> list[float]:
    """Reward an answer in its tags with a tenth."""
    return [0.1 * bool(_number(answer)) for answer in completions]


def _number(answer: list[dict[str, str]]) -> str:
    found = _ANSWER.findall(answer[-1]["content"])
    return found[-1].replace(",", "").rstrip(".") if found else ""
