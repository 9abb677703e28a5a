"""The answers of `axolotl protrain plan` as one HTML page, nothing loaded from outside.

Bars and areas are SVG stretched to their box; texts stay HTML, so they are as large on
a phone as on paper. Styles, the script and the larger parts stand in `page.html`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from itertools import accumulate, groupby
from string import Template
from typing import Any

from .forecast import (
    FITS,
    LANES,
    MODES,
    PLACEMENTS,
    POLICIES,
    POLICY_LETTERS,
    VERDICTS,
    format_bytes,
    format_limiter,
    format_pace,
    format_seconds,
    format_speed,
    highest_phase,
)

Answer = Mapping[str, Any]
"""Of one card, or a value of it: its step, its device's bytes, an alternative."""
Colours = Mapping[str, str]
Piece = tuple[str, float, str]
"""Style, length and name of a piece of a bar."""
Mark = tuple[str, float, float, str]
"""Style, start, length and text of what is drawn in a bar."""

WIDTH, HEIGHT, CELL = 1000, 400, 32
"""Units of a drawing: bars are `WIDTH` wide, the timeline is `HEIGHT` high as well;
`CELL` is a block's width on the screen, or its hatchings would be squeezed."""
NUM_COLOURS = 8
PRICE: dict[str, Callable[[float], str]] = {
    "device_peak_bytes": format_bytes,
    "step_s": format_seconds,
    "tokens_per_s": format_speed,
}
"""What `price_dict` says of a setting, in words."""


def plan_page(answers: Sequence[Answer], config_name: str) -> str:
    """The page that compares the cards and shows each one's plan.

    Args:
        answers: An `answer_dict` for each card, with alternatives and assumptions.
        config_name: What was planned, for the heading.

    Raises:
        ValueError: There is no answer.
    """
    if not answers:
        raise ValueError("a plan page needs at least one forecast")
    fitting = [a for a in answers if a["verdict"] == FITS and a["step_s"]]
    best = max(fitting, key=lambda a: a["step_s"]["tokens_per_s"], default=None)
    shown, colours = best or answers[0], _term_colours(answers)
    hint = tag("p", "Choose a card to see its plan below.", "sub screen")
    return part(
        "page",
        title=f"ProTrain plan for {config_name}",
        summary=_summary(answers, best),
        hint=hint if len(answers) > 1 else "",
        cards=[
            part(
                "choice", index=i, pressed=str(a is shown).lower(), card=_card(a, best)
            )
            if len(answers) > 1
            else tag("div", _card(a, None), "card")
            for i, a in enumerate(answers)
        ],
        fit=_fit(answers, colours),
        panels=[_panel(i, answer, colours) for i, answer in enumerate(answers)],
    )


class Html(str):
    """Text that is HTML already; what is not is escaped by `tag` and `part`."""


def tag(
    name: str, content: object = "", css: str = "", /, **attributes: object
) -> Html:
    """An element of the class `css`; `data_tip` is the attribute data-tip, if not ""."""
    given = {"class": css, **attributes}.items()
    said = (f' {k.replace("_", "-")}="{_html(v)}"' for k, v in given if v != "")
    return Html(f"<{name}{''.join(said)}>{_html(content)}</{name}>")


def part(name: str, /, **values: object) -> Html:
    """A part of page.html with its `$names` filled in."""
    texts = {key: _html(value) for key, value in values.items()}
    return Html(_parts()[name].substitute(texts).rstrip("\n"))


@cache
def _parts() -> dict[str, Template]:
    text = files(__package__).joinpath("page.html").read_text("utf-8")
    _, *named = re.split(r"^<!-- (\w+) -->\n", text, flags=re.MULTILINE)
    return dict(zip(named[::2], map(Template, named[1::2]), strict=True))


def _html(value: Any) -> str:
    """HTML of a text, a number, or of many one after the other."""
    if isinstance(value, str | int):
        return value if isinstance(value, Html) else escape(str(value))
    return "".join(map(_html, value))


# one card


def _summary(answers: Sequence[Answer], best: Answer | None) -> str:
    """One sentence: how many cards fit and which is fastest."""
    if len(answers) == 1:
        return f"{answers[0]['hardware']['name']} {_marked(answers[0])}."
    text = f"{sum(a['verdict'] == FITS for a in answers)} of {len(answers)} cards fit"
    if best:
        speed = format_speed(best["step_s"]["tokens_per_s"])
        text += f"; the fastest is {best['hardware']['name']} at {speed}"
    return f"{text}."


def _card(answer: Answer, best: Answer | None) -> Html:
    """The verdict of one card, its speed compared with that of `best`."""
    step, lines = answer["step_s"], []
    number, unit = "–", "no step time"
    if step:
        number, unit = format_speed(step["tokens_per_s"]).split()
        pace = f"{format_seconds(step['total'])} a step, {format_limiter(step)}"
        lines.append(tag("span", pace))
        if best and answer["verdict"] == FITS:
            share = step["tokens_per_s"] / best["step_s"]["tokens_per_s"]
            text = "fastest" if answer is best else f"{share:.0%} of the fastest"
            lines.append(tag("span", text, "soft"))
    if answer["device_bytes"]:
        lines.append(tag("span", f"GPU: {_margin(answer['device_bytes'])}"))
    speed = {"number": number, "unit": unit, "lines": lines}
    return part("card", **answer["hardware"], **speed, verdict=_verdict(answer))


def _panel(index: int, answer: Answer, colours: Colours) -> Html:
    """Everything about one card."""
    plan, assumed = answer["plan"], answer["assumptions"]
    items = tag("ul", [tag("li", text) for text in assumed], "assume")
    return part(
        "panel",
        **answer["hardware"],
        index=index,
        verdict=_verdict(answer),
        missing=_missing(answer),
        facts=part("facts", **plan, meaning=MODES[plan["mode"]]) if plan else "",
        timeline=_timeline(answer, colours),
        residency=_residency(answer["blocks"]),
        lanes=_lanes(answer["step_s"]),
        device=_memory("GPU memory", answer["device_bytes"], colours),
        host=_memory("Host memory", answer["host_bytes"], colours),
        alternatives=_alternatives(answer),
        assumptions=_figure("Assumptions", "", items) if assumed else "",
    )


def _missing(answer: Answer) -> Html:
    """Why a card cannot do it and how much it lacks; nothing when it can."""
    if answer["verdict"] == FITS:
        return Html()
    lines = [answer["reason"]] if answer["reason"] else []
    for kind, where in (("device_bytes", "GPU"), ("host_bytes", "host")):
        memory = answer[kind]
        if memory and memory["peak"] > memory["budget"]:
            lacking = format_bytes(memory["peak"] - memory["budget"])
            lines.append(f"Missing: {lacking} of {where} memory.")
    if not answer["plan"]:
        lines.append("There is no plan for this card.")
    return tag("div", [tag("p", text) for text in lines], "reason")


def _memory(title: str, memory: Answer | None, colours: Colours) -> Html:
    """Bytes at the peak by term, and the highest of each phase of the run."""
    if not memory:
        return _figure(title, "No forecast was made.")
    peak, budget, phases = memory["peak"], memory["budget"], memory["phases"]
    terms: list[Sequence[object]] = [
        ([_key(style), name], format_bytes(size), f"{size / (peak or 1):.0%}")
        for style, size, name in _terms(memory, colours)
    ]
    terms.append(("peak", format_bytes(peak), _margin(memory)))
    unit = WIDTH / max(budget, *phases.values(), 1)
    highest = []
    for phase, size in phases.items():
        bar = _bar(phase, [("phase", 0, size, "")], unit, budget)
        highest.append((phase, format_bytes(size), bar))
    text = f"Budget {format_bytes(budget)}"
    if memory.get("reserve"):
        text += f", and {format_bytes(memory['reserve'])} in reserve"
    return _figure(
        title,
        f"{text}.",
        _table(("At the peak", "Bytes", "Share"), terms, "terms"),
        _table(("Highest in", "Bytes", "Against the budget"), highest, "phases"),
    )


def _alternatives(answer: Answer) -> Html:
    """What else could be set, and its price next to this plan."""
    if not answer["alternatives"]:
        return Html()
    step, device = answer["step_s"] or {}, answer["device_bytes"] or {}
    now = {"device_peak_bytes": device.get("peak"), "step_s": step.get("total")}
    now |= {"tokens_per_s": step.get("tokens_per_s"), "verdict": answer["verdict"]}
    now |= {"change": "as configured", "note": None}
    rows: list[Sequence[object]] = []
    for other in (now, *answer["alternatives"]):
        row = [other["change"], _verdict(other)]
        for figure, form in PRICE.items():
            value, base = other[figure], now[figure]
            cell = ["–" if value is None else form(value)]
            if value is not None and base and other is not now:
                cell += [" ", tag("small", f"{value / base - 1:+.0%}")]
            row.append(cell)
        rows.append([*row, other["note"] or ""])
    text = "Each alone, everything else as it is; small figures compare with this plan."
    heads = ("Change", "Verdict", "GPU peak", "Step", "Speed", "Note")
    return _figure("Alternatives and their price", text, _table(heads, rows, "options"))


# its figures


def _fit(answers: Sequence[Answer], colours: Colours) -> Html:
    """Peak by term against budget, all cards on one scale."""
    known = [a["device_bytes"] for a in answers if a["device_bytes"]]
    if not known:
        return _figure("Does it fit?", "No memory forecast was made.")
    unit = WIDTH / max(max(d["peak"], d["budget"] + d["reserve"], 1) for d in known)
    keys = [(style, name) for d in known for style, _, name in _terms(d, colours)]
    keys.append(("reserve", "reserve, left free"))
    if any(device["peak"] > device["budget"] for device in known):
        keys.append(("over", "over the budget"))
    rows = []
    for answer in answers:
        device, bar, text = answer["device_bytes"], "no memory forecast", "–"
        if device:
            peak, budget, reserve = (device[k] for k in ("peak", "budget", "reserve"))
            over = max(peak - budget, 0)
            marks = [
                ("track", 0, budget, ""),
                ("reserve", budget, reserve, f"reserve {format_bytes(reserve)}"),
                *_stacked(_terms(device, colours), format_bytes),
                ("over", budget, over, f"{format_bytes(over)} over the budget"),
            ]
            text = f"{format_bytes(peak)} of {format_bytes(budget)}"
            bar = _bar(f"peak {text}", marks, unit, budget)
        rows.append((answer["hardware"]["name"], bar, text))
    text = "GPU memory at the peak of the run. The upright line is the budget."
    return _figure("Does it fit?", text, _legend(keys), _rows(rows))


def _timeline(answer: Answer, colours: Colours) -> Html:
    """Device memory over a step as a stacked area under the budget line."""
    title, device = "GPU memory over one step", answer["device_bytes"]
    points = answer["timeline"]
    if not points or not device:
        return _figure(title, "No timeline: the step was not walked.")
    names = list(dict.fromkeys(name for point in points for name in point["bytes"]))
    rows = [[point["bytes"].get(name, 0) for name in names] for point in points]
    totals, budget = [sum(row) for row in rows], device["budget"]
    peak = max(totals)
    at, top = totals.index(peak), 1.08 * max(peak, budget, 1)
    ticks = [(n / top, f"{n / 2**30:g}") for n in _ticks(top)]
    ticks[-1] = (ticks[-1][0], f"{ticks[-1][1]} GiB")
    hover = {
        "names": names,
        "budget": budget,
        "points": [
            [p["label"], p["phase"], *row] for p, row in zip(points, rows, strict=True)
        ],
    }
    text = f"Highest point {format_bytes(peak)} at {points[at]['label']} (the ring). "
    if device["peak"] > peak:
        text += f"The whole run peaks at {format_bytes(device['peak'])}, in "
        text += f"{highest_phase(device['phases'])}. "
    chart = part(
        "timeline",
        size=f"{WIDTH} {HEIGHT}",
        areas=[
            *(_rule(share, "grid") for share, _ in ticks),
            *_areas(rows, top, [colours[name] for name in names]),
            _rule(budget / top, "budget"),
        ],
        ticks=[
            tag("span", label, "tick", style=f"bottom:{share:.2%}")
            for share, label in ticks
        ],
        budget=format_bytes(budget),
        budget_at=f"{budget / top:.2%}",
        peak_at=f"{peak / top:.2%}",
        left=f"{at / max(len(points) - 1, 1):.2%}",
        band=_phase_band([point["phase"] for point in points]),
        # JSON that cannot end the script element it stands in
        hover=Html(json.dumps(hover, separators=(",", ":")).replace("<", "\\u003c")),
    )
    keys = [(colours[name], name) for name in names]
    text += "In order of execution, not to scale in time."
    return _figure(title, text, _legend(keys), chart)


def _areas(
    rows: Sequence[Sequence[int]], top: float, styles: Sequence[str]
) -> Iterable[Html]:
    """One polygon a term over all points, stacked in the order of `styles`."""
    if len(rows) == 1:  # an area needs a width
        rows = [rows[0], rows[0]]
    xs = [f"{WIDTH * i / (len(rows) - 1):.2f}" for i in range(len(rows))]
    edges = zip(*(accumulate(row, initial=0) for row in rows), strict=True)
    lines = [
        [f"{x},{HEIGHT * (1 - n / top):.2f}" for x, n in zip(xs, edge, strict=True)]
        for edge in edges
    ]
    for floor, roof, style in zip(lines, lines[1:], styles, strict=False):
        yield tag("polygon", "", style, points=" ".join(roof + floor[::-1]))


def _phase_band(phases: Sequence[str]) -> Iterable[Html]:
    """A strip under each run of points of the same phase, named where there is room."""
    start = 0.0
    for phase, run in groupby(phases):
        share = len(list(run)) / len(phases)
        where = f"left:{start:.2%};width:{share:.2%}"
        yield tag("span", phase if share >= 0.08 else "", style=where)
        start += share


def _residency(blocks: Sequence[Answer]) -> Html:
    """One cell a block: its chunks by placement, its policy as a letter."""
    title = "Where the blocks live"
    if not blocks:
        return _figure(title, "No blocks were placed.")
    chunks = [chunk for block in blocks for chunk in block["chunks"]]
    keys, marks = [], []
    for placement, meaning in PLACEMENTS.items():
        sizes = [c["bytes"] for c in chunks if c["placement"] == placement]
        if sizes:
            text = f"{placement}, {meaning}: {len(sizes)} of {len(chunks)} chunks"
            keys.append((placement, f"{text}, {format_bytes(sum(sizes))}"))
    for policy, meaning in POLICIES.items():
        if number := sum(block["policy"] == policy for block in blocks):
            mark = tag("span", POLICY_LETTERS[policy], "mark")
            text = f" {policy}, {meaning}: {number} of {len(blocks)} blocks"
            marks.append(tag("li", [mark, text]))
    cells = tag("div", [_cell(i, block) for i, block in enumerate(blocks)], "map")
    text = "Blocks in order, divided into their chunks; the letter says what becomes "
    return _figure(title, f"{text}of their activations.", _legend(keys, marks), cells)


def _cell(index: int, block: Answer) -> Html:
    """A block's number, its chunks side by side in proportion, its policy's letter."""
    chunks, policy = block["chunks"], block["policy"]
    lines = [f"{block['name']}: {policy}"]
    lines += [f"{c['placement']} {format_bytes(c['bytes'])}" for c in chunks]
    ways = {way: format_seconds(block[f"{way}_s"]) for way in ("forward", "backward")}
    tip = "\n".join([*lines, *map(" ".join, ways.items())])
    pieces = _stacked((c["placement"], c["bytes"], "") for c in chunks)
    bar = _bar(tip, pieces, CELL / max(sum(c["bytes"] for c in chunks), 1), width=CELL)
    mark = tag("span", POLICY_LETTERS[policy], "mark")
    return tag("div", [tag("span", index, "no"), bar, mark], "cell", data_tip=tip)


def _lanes(step: Answer | None) -> Html:
    """The step as compute and waits, then how long each lane is busy."""
    if not step:
        return _figure("Step time", "No step time: there is no plan to time.")
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
    unit = WIDTH / max(total, total - rest, *lanes.values())
    rows = [
        (name, _bar(f"{name} {text}", _stacked(pieces, format_seconds), unit), text)
        for name, pieces, text in bars
    ]
    keys = [(style, style) for style, _, _ in [*compute, *other]]
    keys[2:2] = [("hidden", "behind compute"), ("exposed", "exposed: compute waits")]
    text = f"{format_pace(total, step['tokens_per_s'])}, {format_limiter(step)}."
    return _figure("Step time", text, _legend(keys), _rows(rows, "rows first"))


# of which all this is made


def _figure(title: str, text: str, *body: Html) -> Html:
    sub = tag("p", text, "sub") if text else ""
    return tag("figure", [tag("h3", title), sub, *body], "box")


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]], css: str) -> Html:
    """With each cell stands the head of its column, for narrow screens."""
    lines = [
        tag("tr", [tag("td", row[i], data_head=head) for i, head in enumerate(heads)])
        for row in rows
    ]
    head = tag("thead", tag("tr", [tag("th", name) for name in heads]))
    return tag("table", [head, tag("tbody", lines)], css)


def _rows(rows: Iterable[tuple[str, str, str]], css: str = "rows") -> Html:
    """Name, bar and text in columns."""
    return tag("div", [tag("div", cell) for row in rows for cell in row], css)


def _legend(keys: Iterable[tuple[str, str]], more: Iterable[Html] = ()) -> Html:
    """Styles with their names, each once."""
    items = [tag("li", [_key(style), name]) for style, name in dict.fromkeys(keys)]
    return tag("ul", [*items, *more], "legend")


def _key(style: str) -> Html:
    patch = tag("rect", "", style, width=13, height=13)
    return tag("svg", patch, "key", viewBox="0 0 13 13")


def _bar(
    label: str,
    marks: Iterable[Mark],
    unit: float,
    limit: float = -1,
    width: int = WIDTH,
) -> Html:
    """A drawing of `width` by 20 that fills its box; 1 is `unit` long, `limit` a line."""
    drawn = []
    for style, start, length, tip in marks:
        if length > 0:
            at = {"x": f"{start * unit:.2f}", "width": f"{length * unit:.2f}"}
            drawn.append(tag("rect", "", style, data_tip=tip, **at, height=20))
    if limit >= 0:
        drawn.append(tag("path", "", "budget", d=f"M{limit * unit:.2f} -4V24"))
    form = {"viewBox": f"0 0 {width} 20", "preserveAspectRatio": "none", "role": "img"}
    return tag("svg", drawn, "bar", **form, aria_label=label)


def _stacked(
    pieces: Iterable[Piece], form: Callable[[float], str] | None = None
) -> Iterable[Mark]:
    """Pieces one after the other; `form` gives their length in the text."""
    start = 0.0
    for style, length, name in pieces:
        yield f"seg {style}", start, length, f"{name} {form(length)}" if form else ""
        start += max(length, 0)


def _rule(share: float, style: str) -> Html:
    """A line across the timeline, `share` of its height from below."""
    return tag("path", "", style, d=f"M0 {HEIGHT * (1 - share):.2f}H{WIDTH}")


def _ticks(top: float) -> list[float]:
    """At most six round values of GiB up to `top` bytes, zero among them."""
    steps = (m * 10.0**k * 2**30 for k in range(-9, 9) for m in (1, 2, 5))
    step = next(step for step in steps if top < 6 * step)
    return [step * i for i in range(int(top / step) + 1)]


def _term_colours(answers: Sequence[Answer]) -> Colours:
    """The style of each term, the same on the whole page; hatched from the ninth on."""
    names = [n for a in answers for point in a["timeline"] for n in point["bytes"]]
    for kind in ("device_bytes", "host_bytes"):
        names += [n for a in answers if a[kind] for n in a[kind]["terms"]]
    return {n: f"t{i % (2 * NUM_COLOURS)}" for i, n in enumerate(dict.fromkeys(names))}


def _terms(memory: Answer, colours: Colours) -> list[Piece]:
    """The terms of a peak, and what they leave of it unexplained."""
    terms = memory["terms"]
    pieces: list[Piece] = [(colours[name], size, name) for name, size in terms.items()]
    rest = memory["peak"] - sum(terms.values())
    return [*pieces, ("other", rest, "not broken down")] if rest > 0 else pieces


def _marked(answer: Answer) -> str:
    mark = "✓" if answer["verdict"] == FITS else "✕"
    return f"{mark} {VERDICTS[answer['verdict']]}"


def _verdict(answer: Answer) -> Html:
    return tag("span", _marked(answer), f"verdict {answer['verdict']}")


def _margin(memory: Answer) -> str:
    """How far the peak stays below the budget, or goes above it."""
    free = memory["budget"] - memory["peak"]
    return f"{format_bytes(abs(free))} {'free' if free >= 0 else 'over budget'}"
