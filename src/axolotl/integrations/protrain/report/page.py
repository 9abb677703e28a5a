"""Draw what `axolotl protrain plan --json` prints as one page that loads nothing else.

Here is computed what is drawn; `page.html` draws it and has every tag. Bars and areas are
SVG stretched to their box; texts stay HTML, as large on a phone as on paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import accumulate, groupby
from math import isfinite
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from ..core.planner.memory import moment
from ..core.sizes import format_bytes
from . import forecast as words
from .forecast import FITS, LANES, format_seconds, speed

Values = Mapping[str, Any]
"""One card's answer, or a part of it."""
Colours = Mapping[str, str]
Piece = tuple[str, float, str]
"""Style, length and name of a piece of a bar."""
Mark = tuple[str, float, float, str]
"""Style, start, length and text of what is drawn in a bar."""

MEMORIES = ("device_bytes", "host_bytes")
WIDTH, HEIGHT, NUM_COLOURS = 1000, 400, 8
"""Units of a drawing: bars are `WIDTH` wide, the timeline is `HEIGHT` high as well."""


def plan_page(answers: Sequence[Values]) -> str:
    """Draw the page that compares the cards and shows each one's plan.

    Args:
        answers: The objects of `plan --json`.

    Raises:
        ValueError: There is no answer.
    """
    if not answers:
        raise ValueError("a plan page needs at least one forecast")
    return _page(f"ProTrain plan for {answers[0]['about']['model']}", answers)


def report_page(reports: Mapping[str, Values]) -> str:
    """Draw the page of finished runs, from each one's report.json by its name."""
    answers = [
        {
            **r,
            "hardware": {**r["hardware"], "name": f"{name} on {r['hardware']['name']}"},
        }
        for name, r in reports.items()
    ]
    return _page(f"ProTrain report of {', '.join(reports)}", answers)


def _page(title: str, answers: Sequence[Values]) -> str:
    answers = [{**answer, "tokens_per_s": speed(answer)} for answer in answers]
    fitting = [a for a in answers if a["verdict"] == FITS and a["tokens_per_s"]]
    best = max(fitting, key=lambda a: a["tokens_per_s"], default=None)
    colours = _term_colours(answers)
    panels = [
        {
            **answer,
            "timeline": _timeline(answer, colours),
            "cells": [_cell(block) for block in answer["blocks"]],
            "bars": _step_bars(answer["step_s"]),
            "losses": _line(answer.get("losses", ())),
            "speeds": _line(_speeds(answer)),
            "terms": {k: _terms(answer[k], colours) for k in MEMORIES},
        }
        for answer in answers
    ]
    return _template().render(
        title=title,
        answers=answers,
        best=best,
        fit=_fit(answers, colours),
        panels=panels,
    )


@cache
def _template() -> Template:
    page = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = files(__package__).joinpath("page.html").read_text("utf-8")
    return page.from_string(text, globals=_WORDS)


_POLICY_LETTERS = {"keep": "K", "recompute": "R", "swap": "S", "swap-input": "I"}
_WORDS: dict[str, Any] = {
    name: getattr(words, name)
    for name in "FITS MODES PLACEMENTS POLICIES UPDATES VERDICTS compared_rows "
    "format_about format_bytes format_generation format_keys format_limiter format_losses "
    "format_lowers format_pace format_seconds format_served format_speed "
    "highest_phase".split()
}
_WORDS |= {"HEIGHT": HEIGHT, "WIDTH": WIDTH, "NUM_COLOURS": NUM_COLOURS}
_WORDS["POLICY_LETTERS"] = _POLICY_LETTERS
"""All that page.html asks for by name, beside what it draws."""


def _fit(answers: Sequence[Values], colours: Colours) -> Values | None:
    """Peak by term against budget, each card on its own scale."""
    known = [a["device_bytes"] for a in answers if a["device_bytes"]]
    if not known:
        return None
    keys = [(style, name) for d in known for style, _, name in _terms(d, colours)]
    keys.append(("reserve", "reserve, left free"))
    if any(device["peak"] > device["budget"] for device in known):
        keys.append(("over", "over the budget"))
    bars: list[list[Mark]] = []
    for answer in answers:
        bars.append([])  # where nothing is known
        if device := answer["device_bytes"]:
            budget, reserve = device["budget"], device["reserve"]
            over = max(device["peak"] - budget, 0)
            bars[-1] = [
                ("track", 0, budget, ""),
                ("reserve", budget, reserve, f"reserve {format_bytes(reserve)}"),
                *_stacked(_terms(device, colours), format_bytes),
                ("over", budget, over, f"{format_bytes(over)} over the budget"),
            ]
    memories = [
        a["device_bytes"] or {"peak": 0, "budget": 0, "reserve": 0} for a in answers
    ]
    spans = [max(d["peak"], d["budget"] + d["reserve"], 1) for d in memories]
    return {"legend": keys, "bars": bars, "spans": spans}


def _timeline(answer: Values, colours: Colours) -> Values | None:
    """Device memory over a step as stacked areas; shares are of the drawing's size."""
    device, points = answer["device_bytes"], answer["timeline"]
    if not points or not device:
        return None
    names = list(dict.fromkeys(name for point in points for name in point["bytes"]))
    rows = [[point["bytes"].get(name, 0) for name in names] for point in points]
    totals, budget = [sum(row) for row in rows], device["budget"]
    peak = max(totals)
    at, top = totals.index(peak), 1.08 * max(peak, budget, 1)
    hover = [[p["label"], p["phase"], *r] for p, r in zip(points, rows, strict=True)]
    phases, start = [], 0.0
    for phase, run in groupby(point["phase"] for point in points):
        share = len(list(run)) / len(points)
        phases.append((phase if share >= 0.08 else "", start, share))
        start += share
    styles = [colours[name] for name in names]
    return {
        "legend": list(zip(styles, names, strict=True)),
        "areas": list(zip(styles, _areas(rows, top), strict=True)),
        "ticks": [(n / top, f"{n / 2**30:g}") for n in _ticks(top)],
        "budget": budget / top,
        "peak": peak,
        "peak_at": (at / max(len(points) - 1, 1), peak / top),
        "moment": moment(points[at]["label"]),
        "phases": phases,
        "hover": {"names": names, "budget": budget, "points": hover},
    }


def _speeds(answer: Values) -> Iterator[tuple[int, float]]:
    """Tokens per second of each step of a finished run."""
    step = answer["step_s"]
    for number, seconds in enumerate(answer.get("steps", ()) if step else (), start=1):
        yield number, speed({**answer, "measured": {"step_s": seconds}})


def _line(points: Iterable[Sequence[float]]) -> Values | None:
    """A line over the steps, from the lowest value to the highest, and its axes; without
    the points that are no number, which are counted."""
    points = [*points]
    finite = [(step, value) for step, value in points if isfinite(value)]
    missing = len(points) - len(finite)
    if len(finite) < 2:
        return {"missing": missing} if missing else None
    (steps, values) = zip(*finite, strict=True)
    low, high = min(values), max(values)
    across, up = max(steps[-1] - steps[0], 1), max(high - low, 1e-9)
    corners = (
        f"{WIDTH * (step - steps[0]) / across:.2f},{HEIGHT * (1 - (n - low) / up):.2f}"
        for step, n in finite
    )
    return {
        "missing": missing,
        "line": " ".join(corners),
        "ticks": [(at, low + at * (high - low)) for at in (0, 0.5, 1)],
        "steps": (steps[0], steps[-1]),
    }


def _areas(rows: Sequence[Sequence[int]], top: float) -> Iterator[str]:
    """The corners of one polygon a term over all points, one on top of the other."""
    if len(rows) == 1:  # an area needs a width
        rows = [rows[0], rows[0]]
    xs = [f"{WIDTH * i / (len(rows) - 1):.2f}" for i in range(len(rows))]
    lines = [
        [f"{x},{HEIGHT * (1 - n / top):.2f}" for x, n in zip(xs, edge, strict=True)]
        for edge in zip(*(accumulate(row, initial=0) for row in rows), strict=True)
    ]
    for floor, roof in zip(lines, lines[1:], strict=False):
        yield " ".join(roof + floor[::-1])


def _ticks(top: float) -> list[float]:
    """At most six round values of GiB up to `top` bytes, zero among them."""
    steps = (m * 10.0**k * 2**30 for k in range(-9, 9) for m in (1, 2, 5))
    step = next(step for step in steps if top < 6 * step)
    return [step * i for i in range(int(top / step) + 1)]


def _cell(block: Values) -> Values:
    """A block's chunks side by side in proportion."""
    chunks, policy = block["chunks"], block["policy"]
    tip = [f"{block['name']}: {policy}"]
    tip += [f"{c['placement']} {format_bytes(c['bytes'])}" for c in chunks]
    tip += [
        f"{way} {format_seconds(block[f'{way}_s'])}" for way in ("forward", "backward")
    ]
    marks = list(_stacked((c["placement"], c["bytes"], "") for c in chunks))
    span = max(sum(c["bytes"] for c in chunks), 1)
    return {"tip": "\n".join(tip), "marks": marks, "span": span, "policy": policy}


def _step_bars(step: Values | None) -> Values | None:
    """The step as compute and waits, then how long each lane is busy."""
    if not step:
        return None
    total, lanes, recompute = step["total"], step["lanes"], step["recompute"]
    names = {lane: LANES.get(lane, lane) for lane in lanes}
    waits = {lane: s for lane, s in step["exposed"].items() if lane != "compute" and s}
    compute = [
        ("compute", lanes["compute"] - recompute, "compute"),
        ("recompute", recompute, "recompute"),
    ]
    exposed = [("exposed", s, f"wait for {names[lane]}") for lane, s in waits.items()]
    rest = total - lanes["compute"] - sum(waits.values())
    other = [("other", rest, "other")] if rest > 1e-3 * total else []
    bars = [("step", [*compute, *exposed, *other], format_seconds(total))]
    for lane, busy in lanes.items():
        wait, text = min(waits.get(lane, 0), busy), f"{format_seconds(busy)} busy"
        pieces = compute
        if lane != "compute":
            pieces = [("hidden", busy - wait, f"{names[lane]}, hidden")]
            pieces.append(("exposed", wait, f"{names[lane]}, exposed"))
            if busy:
                text += f", {format_seconds(wait)} exposed" if wait else ", hidden"
        elif recompute:
            text += f", {format_seconds(recompute)} of it recompute"
        bars.append((names[lane], pieces, text))
    keys = [(style, style) for style, _, _ in [*compute, *other]]
    keys[2:2] = [("hidden", "behind compute"), ("exposed", "exposed: compute waits")]
    rows = [
        (name, list(_stacked(row, format_seconds)), text) for name, row, text in bars
    ]
    return {
        "legend": keys,
        "rows": rows,
        "span": max(total, total - rest, *lanes.values()),
    }


def _stacked(
    pieces: Iterable[Piece], form: Callable[[float], str] | None = None
) -> Iterator[Mark]:
    """Pieces one after the other; `form` gives their length in the text."""
    start = 0.0
    for style, length, name in pieces:
        yield f"seg {style}", start, length, f"{name} {form(length)}" if form else ""
        start += max(length, 0)


def _term_colours(answers: Sequence[Values]) -> Colours:
    """The style of each term, the same on the whole page; hatched from the ninth on."""
    names = [n for a in answers for point in a["timeline"] for n in point["bytes"]]
    names += [n for k in MEMORIES for a in answers if a[k] for n in a[k]["terms"]]
    return {n: f"t{i % (2 * NUM_COLOURS)}" for i, n in enumerate(dict.fromkeys(names))}


def _terms(memory: Values | None, colours: Colours) -> list[Piece]:
    """The terms of a peak, and what they leave of it unexplained."""
    if not memory:
        return []
    terms = memory["terms"]
    pieces = [(colours[name], size, name) for name, size in terms.items() if size > 0]
    rest = memory["peak"] - sum(terms.values())
    return [*pieces, ("other", rest, "not broken down")] if rest > 0 else pieces
