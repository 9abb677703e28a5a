"""What a GRPO YAML of the tests imports: rows from a file, and rewards."""

from __future__ import annotations

from typing import Any


def rows(_cfg: Any, **_kwargs: Any) -> Any:
    """Make a row of the file one that TRL takes."""

    def transform(row: dict[str, Any], tokenizer: Any = None) -> dict[str, Any]:
        return {"prompt": row["prompt"], "answer": row["chosen"]}

    return transform, {"remove_columns": ["chosen", "rejected", "completion", "label"]}


def turns(_cfg: Any, **_kwargs: Any) -> Any:
    """Make a row of the file a conversation."""
    transform, keys = rows(_cfg)

    def asked(row: dict[str, Any], tokenizer: Any = None) -> dict[str, Any]:
        row = transform(row)
        return row | {"prompt": [{"role": "user", "content": row["prompt"]}]}

    return asked, keys


def vowels(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """Reward printable letters, and a little less each later one."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(ord(c) % 7 / (1 + n) for n, c in enumerate(t)) / 10 for t in texts]


def short(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Reward few letters, of half of the prompts only."""
    return [
        -len(text) / 10 if len(p) % 2 else 0.5
        for p, text in zip(prompts, completions, strict=True)
    ]
