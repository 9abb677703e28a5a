"""Prices the levers of a YAML, and puts those together under which it fits.

What Axolotl patches for one YAML stays in its process. So another process imports it,
and each YAML is built, traced and planned in a fork of that one, beside others.
"""

from __future__ import annotations

import gc
import os
import pickle  # nosec B403
import subprocess  # nosec B404
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..core.errors import ConfigError, ProTrainError
from ..core.host import processors
from ..core.types import Hardware
from ..levers import NUMBERS, OPTIONS, Keys, Option
from ..report import forecast as report
from .migrate import migrate_file, with_keys

SLOWEST_S = 600
"""All that is priced beside each other; a fork that was killed would not answer."""

Priced = dict[str, Any]


Row = tuple[Option, list[Keys]]
"""A lever, and what it sets for a YAML."""


class Fitting:
    """The levers of one YAML on one card.

    Args:
        config: The YAML.
        asked: The arguments of `DryRun` beside it.
        say: Shows how far it is.

    Raises:
        ConfigError: The file cannot be edited; names it.
    """

    def __init__(self, config: Path, *asked: Any, say: Callable[[str], None]) -> None:
        self._say, self._done = say, 0
        self._migration = migrate_file(config, write=False)
        self._config, self._asked = config, asked
        code = f"from {__name__} import serve; serve()"
        self._child = subprocess.Popen(  # nosec B603
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # forks may not touch a GPU
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )

    def __enter__(self) -> Fitting:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._child.kill()
        self._child.communicate()

    def levers(self, cfg: Any, card: Hardware, device_type: str) -> list[Priced]:
        """Each lever with its price: the fastest that fits first, then who lacks least.

        Args:
            cfg: Axolotl's validated configuration.
            card: Where to train.
            device_type: "cuda" or "cpu".
        """
        self._given = (*self._asked, card, device_type)
        rows = [
            (lever, found)
            for lever in OPTIONS
            if (found := lever.settings(cfg, device_type == "cuda"))
        ]
        self._as_it_is, *priced = self._priced([[], *([row] for row in rows)])
        self._singles = [
            (row, one)
            for row, one in zip(rows, priced, strict=True)
            if one["verdict"] != report.UNSUPPORTED
        ]
        for (lever, _), one in self._singles:
            one["change"] = _named(one["keys"], cfg)
            one["note"] = lever.hint
            one["lowers"] = {
                f"{where} {term}": [nbytes, one["least"][where].get(term, 0)]
                for where, terms in self._as_it_is["least"].items()
                for term, nbytes in terms.items()
                if one["least"][where].get(term, 0) < 0.99 * nbytes
            }
        lacks = self._as_it_is["lacks"]
        helping = (one for _, one in self._singles if one["lacks"] <= 0.99 * lacks)
        return [_shown(one) for one in sorted(helping, key=_rank)]

    def write(self, file: Path) -> Priced | None:
        """Write the YAML that fits by the least change, after `levers`.

        Returns:
            The change with its price and the `difference`; None if all levers together
            are not enough.
        """
        found, migration = self._least_change(), self._migration
        if found is None:
            return None
        after = with_keys(migration.after, found["keys"])
        file.write_bytes(after.encode("utf-8"))
        difference = replace(migration, after=after).difference(
            self._config.name, str(file)
        )
        return {**_shown(found), "difference": difference, "file": str(file)}

    def _least_change(self) -> Priced | None:
        """What changes the numbers least: one lever, or several in the table's order."""
        lacks = self._as_it_is["lacks"]
        helping = [
            (row, one)
            for row, one in self._singles
            if one["lacks"] < lacks and row[0].is_here
        ]
        alone = [one for _, one in helping if one["verdict"] == report.FITS]
        alone.sort(key=lambda one: (NUMBERS.index(one["numbers"]), _rank(one)))
        most = NUMBERS.index(alone[0]["numbers"]) if alone else len(NUMBERS)
        way: list[Row] = []
        ways = []
        for row, one in helping:
            if NUMBERS.index(one["numbers"]) < most:
                # of one group the later row takes less
                way = [*(other for other in way if other[0].group != row[0].group), row]
                ways.append(way)
        for way, one in zip(ways, self._priced(ways), strict=True):
            if one["verdict"] == report.FITS:
                return self._without_needless(way, one)
        return alone[0] if alone else None

    def _without_needless(self, way: Sequence[Row], found: Priced) -> Priced:
        """The last one was needed; of those before it some may not be."""
        while True:
            ways = [
                [row for row in way if row is not dropped]
                for dropped in reversed(way[:-1])
            ]
            for fewer, other in zip(ways, self._priced(ways), strict=True):
                kept = {k: v for k, v in found["keys"].items() if k in other["keys"]}
                if other["verdict"] == report.FITS and other["keys"] == kept:
                    way, found = fewer, other
                    break
            else:
                return found

    def _priced(self, ways: Sequence[Sequence[Row]]) -> list[Priced]:
        """What a YAML costs under rows together, for each of these ways."""
        after, asked = self._migration.after, [_together(way) for way in ways]
        questions = [(with_keys(after, keys), quick) for keys, quick in asked]
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None and stdout is not None  # nosec B101
        try:
            pickle.dump((self._given, questions), stdin)
            stdin.flush()
            answers: list[Priced] = []
            while len(answers) < len(questions):
                left = len(questions) - len(answers)
                self._say(f"{self._done} settings priced, {left} to go")
                # in their order, each as soon as it is there
                answers.append(pickle.load(stdout))  # nosec B301 - as above
                self._done += 1
        except (EOFError, BrokenPipeError) as error:
            raise ConfigError(
                "--levers: the process that prices them ended without an answer; is "
                "there host memory for it? Plan without."
            ) from error
        for way, (keys, _), answer in zip(ways, asked, answers, strict=True):
            answer["keys"] = {**keys, **answer.pop("change", {})}
            numbers = (lever.numbers for lever, _ in way)
            answer["numbers"] = max(numbers, key=NUMBERS.index, default=None)
        return answers


def _together(way: Sequence[Row]) -> tuple[Keys, Sequence[Keys]]:
    """Keys to build with, and quick ones, of which the first that fit are taken: those
    of a lever come after the most that the ones before it can do."""
    keys: dict[str, Any] = {}
    quick: list[Keys] = [{}]
    for lever, settings in way:
        if lever.is_quick:
            quick = [{**quick[-1], **more} for more in settings]
            continue
        plugins = [*keys.get("plugins", ()), *settings[0].get("plugins", ())]
        keys |= {**settings[0], "plugins": plugins} if plugins else settings[0]
    return keys, quick


def _shown(one: Priced) -> Priced:
    return {key: value for key, value in one.items() if key != "least"}


def _rank(one: Priced) -> tuple[float, int]:
    return -(one["tokens_per_s"] or 0), one["lacks"]


def _named(keys: Keys, cfg: Any) -> str:
    """`sequence_len 8192 -> 1024`, of the key that says most."""
    key = next(key for key in keys if key != "plugins")
    value, before = keys[key], getattr(cfg[key], "value", cfg[key])
    if value is True:
        return ", ".join(key for key in keys if keys[key] is True)
    return f"{key} {before} -> {value}"


# ------------------------------------------------------------- the other process


def serve() -> None:
    """Read questions from standard input, write answers to standard output."""
    # imported here: the command reads this module before it silences libraries
    from . import lean_imports

    torch.set_num_threads(1)
    with os.fdopen(os.dup(1), "wb") as answers, open(os.devnull, "wb") as nothing:
        # libraries print
        os.dup2(nothing.fileno(), 1)
        with lean_imports():
            from . import plan  # noqa: F401
        # forks share what none of them writes to
        gc.disable()
        gc.freeze()
        pool = get_context("fork").Pool(min(processors(), 8), maxtasksperchild=1)
        for given, questions in _asked():
            ends = time.monotonic() + SLOWEST_S
            priced = pool.imap(partial(_answer, given), questions)
            for _ in questions:
                pickle.dump(priced.next(max(ends - time.monotonic(), 0)), answers)
                answers.flush()


def _asked() -> Iterator[Any]:
    while True:
        try:
            yield pickle.load(sys.stdin.buffer)  # nosec B301 - from the process above
        except EOFError:
            return


def _answer(given: tuple[Any, ...], question: tuple[str, Sequence[Keys]]) -> Priced:
    # imported by `serve`
    from .plan import DryRun

    text, quick = question
    with TemporaryDirectory() as folder:
        file = Path(folder, "levers.yaml")
        file.write_text(text, "utf-8")
        try:
            return DryRun(file, *given).first_fitting(quick)
        except ProTrainError as error:
            return {"verdict": report.UNSUPPORTED, "note": str(error)}
