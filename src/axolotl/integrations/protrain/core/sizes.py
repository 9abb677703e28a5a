"""Sizes of memory as people write them."""

from __future__ import annotations

import re
from contextlib import suppress
from fractions import Fraction

from .errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power
_BYTES_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: object) -> int:
    """A positive number of bytes, from an int or from text such as ``"22GiB"``.

    Pydantic's ``ByteSize`` takes ``True``, zero and ``"22GiB or so"`` as well.
    """
    text = "" if isinstance(value, bool) else str(value)
    match = _BYTES_TEXT.fullmatch(text) if isinstance(value, int | str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{value!r} is not a number of bytes")
    num_bytes = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if num_bytes < 1:
        raise ConfigError(f"{value!r} is less than one byte")
    return num_bytes


def parse_gib(text: str) -> float:
    """GiB, from text that `parse_bytes` reads or a bare number of them."""
    with suppress(ValueError):
        text = f"{float(text)} GiB"
    return parse_bytes(text) / 2**30


def format_bytes(nbytes: float) -> str:
    """`nbytes` with a binary unit, three or four significant digits."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
