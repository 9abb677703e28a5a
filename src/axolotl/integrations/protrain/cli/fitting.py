"""`plan --levers` and `--write`: every option of a YAML with its price, and those together
under which it fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..core.errors import ConfigError, ProTrainError
from ..offline.worker import Worker, WorkerError
from ..options import NUMBERS, OPTIONS, Keys, Option, named
from ..report import forecast as report
from .migrate import migrate_file, with_keys
from .plan import DryRun

SLOWEST_S = 600
"""Longest wait for all that is priced beside each other."""

Priced = dict[str, Any]
Row = tuple[Option, list[Keys]]
"""An option, and what it sets for a YAML."""


class Fitting:
    """The options of one YAML on one card.

    Args:
        worker: Answers `price`.
        config: The YAML.
        say: Shows how far it is.

    Raises:
        ConfigError: The file cannot be edited; names it.
    """

    def __init__(
        self, worker: Worker, config: Path, say: Callable[[str], None]
    ) -> None:
        self._worker, self._config, self._say, self._done = worker, config, say, 0
        self._migration = migrate_file(config, write=False)

    def add_to(
        self, answer: Priced, dry_run: DryRun, asked: tuple[Any, ...], file: Path | None
    ) -> None:
        """Add the priced `levers` and, with a `file`, what is `fixed` there.

        Args:
            answer: Of the one card.
            dry_run: Has made it.
            asked: The arguments of `DryRun` beside the YAML.
            file: Where to write a YAML that fits, if this one does not.
        """
        (card,) = dry_run.cards
        self._given = (*asked, card, dry_run.device_type)
        if answer["verdict"] != report.UNSUPPORTED:
            answer["levers"] = self._levers(dry_run.cfg, dry_run.device_type == "cuda")
        if file is not None:
            wanted = answer["verdict"] == report.DOES_NOT_FIT
            answer["fixed"] = self._write(file) if wanted else None

    def _levers(self, cfg: Any, on_cuda: bool) -> list[Priced]:
        """Each option with its price: the fastest that fits first, then who lacks least."""
        rows = [
            (option, found)
            for option in OPTIONS
            if (found := option.settings(cfg, on_cuda))
        ]
        self._as_it_is, *priced = self._priced([[], *([row] for row in rows)])
        if self._as_it_is["verdict"] == report.UNSUPPORTED:
            # a plugin may look at where it runs
            raise ConfigError(f"--levers: {self._as_it_is['note']}")
        self._singles = [
            (row, one)
            for row, one in zip(rows, priced, strict=True)
            if one["verdict"] != report.UNSUPPORTED
        ]
        for (option, _), one in self._singles:
            one["change"] = named(one["keys"], cfg)
            one["note"] = option.hint
            one["lowers"] = {
                f"{where} {term}": [nbytes, one["least"][where].get(term, 0)]
                for where, terms in self._as_it_is["least"].items()
                for term, nbytes in terms.items()
                if one["least"][where].get(term, 0) < 0.99 * nbytes
            }
        lacks = self._as_it_is["lacks"]
        helping = (one for _, one in self._singles if one["lacks"] <= 0.99 * lacks)
        return [_shown(one) for one in sorted(helping, key=_rank)]

    def _write(self, file: Path) -> Priced | None:
        """Write the YAML that fits by the least change; None if all options together are
        not enough."""
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
        """Find what changes the numbers least: one option, or several in the table's order."""
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
        """Price the YAML under rows together, for each of these ways."""
        after, asked = self._migration.after, [_together(way) for way in ways]
        questions = [
            (with_keys(after, keys), self._given, quick) for keys, quick in asked
        ]
        answers: list[Priced] = []
        try:
            for answer in self._worker.ask(questions, SLOWEST_S):
                answers.append(answer)
                self._done += 1
                left = len(questions) - len(answers)
                self._say(f"{self._done} settings priced, {left} to go")
        except WorkerError as error:
            raise ConfigError(
                f"--levers: {error}; is there host memory for it? Plan without."
            ) from error
        for way, (keys, _), answer in zip(ways, asked, answers, strict=True):
            answer["keys"] = {**keys, **answer.pop("change", {})}
            numbers = (option.numbers for option, _ in way)
            answer["numbers"] = max(numbers, key=NUMBERS.index, default=None)
        return answers


def _together(way: Sequence[Row]) -> tuple[Keys, Sequence[Keys]]:
    """Keys to build with, and quick ones, of which the first that fit are taken: those
    of an option come after the most that the ones before it can do."""
    keys: dict[str, Any] = {}
    quick: list[Keys] = [{}]
    for option, settings in way:
        if option.number:
            quick = [{**quick[-1], **more} for more in settings]
            continue
        plugins = [*keys.get("plugins", ()), *settings[0].get("plugins", ())]
        keys |= {**settings[0], "plugins": plugins} if plugins else settings[0]
    return keys, quick


def _shown(one: Priced) -> Priced:
    return {key: value for key, value in one.items() if key != "least"}


def _rank(one: Priced) -> tuple[float, int]:
    return -(one["tokens_per_s"] or 0), one["lacks"]


def price(question: tuple[str, tuple[Any, ...], Sequence[Keys]]) -> Priced:
    """Price a YAML under the first of some quick settings that fits, or the last.

    Called in a fork of a `Worker`.
    """
    text, given, quick = question
    with TemporaryDirectory() as folder:
        file = Path(folder, "levers.yaml")
        file.write_text(text, "utf-8")
        try:
            return DryRun(file, *given).first_fitting(quick)
        except ProTrainError as error:
            return {"verdict": report.UNSUPPORTED, "note": str(error)}
