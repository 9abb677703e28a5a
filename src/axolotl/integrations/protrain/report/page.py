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
    DOES_NOT_FIT,
    FITS,
    MODES,
    PLACEMENTS,
    POLICIES,
    POLICY_LETTERS,
    UNSUPPORTED,
    VERDICTS,
    format_bytes,
    format_rate,
    highest_phase,
)

Answer = Mapping[str, Any]
"""Of one card, or a value of it: its step, its device's bytes, an alternative."""
Colours = Mapping[str, str]
Piece = tuple[str, float, str]
"""Style, length and name of a piece of a bar."""

WIDTH, HEIGHT, CELL = 1000, 400, 32
"""Units of a drawing: bars are `WIDTH` wide, the timeline is `HEIGHT` high as well;
`CELL` is a block's width on the screen, or its hatchings would be squeezed."""
NUM_COLOURS = 8
MARKS = {FITS: "✓", DOES_NOT_FIT: "✕", UNSUPPORTED: "✕"}


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
    """An element of the class `css`; `data_tip` stands for the attribute data-tip."""
    given = {"class": css, **attributes} if css else attributes
    said = (f' {k.replace("_", "-")}="{_html(text)}"' for k, text in given.items())
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
        text += (
            f"; the fastest is {best['hardware']['name']} at {_speed(best['step_s'])}"
        )
    return f"{text}."


def _card(answer: Answer, best: Answer | None) -> Html:
    """The verdict of one card, its speed compared with that of `best`."""
    step, device, lines = answer["step_s"], answer["device_bytes"], []
    number, unit = _speed(step).split() if step else ("–", "no step time")
    if step:
        lines.append(tag("span", f"{_pace(step)}, limited by {step['limiter']}"))
        if best and answer["verdict"] == FITS:
            share = step["tokens_per_s"] / best["step_s"]["tokens_per_s"]
            text = "fastest" if answer is best else f"{share:.0%} of the fastest"
            lines.append(tag("span", text, "soft"))
    if device:
        lines.append(tag("span", f"GPU: {_margin(device)}"))
    verdict = _verdict(answer)
    return part(
        "card",
        **answer["hardware"],
        verdict=verdict,
        number=number,
        unit=unit,
        lines=lines,
    )


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
    highest = [
        (
            phase,
            format_bytes(size),
            _bar([_rect(0, size * unit, "phase"), limit], phase),
        )
        for limit in [_limit(budget * unit)]
        for phase, size in phases.items()
    ]
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
    forms: dict[str, Callable[[Any], str]] = {
        "device_peak_bytes": format_bytes,
        "step_s": _seconds,
        "tokens_per_s": lambda _: _speed(other),
    }
    rows = []
    for other in (
        {**now, "change": "as configured", "note": ""},
        *answer["alternatives"],
    ):
        cells: list[object] = [other["change"], _verdict(other)]
        for name, form in forms.items():
            value, base = other[name], now[name] if rows else None
            change = tag("small", f"{value / base - 1:+.0%}") if value and base else ""
            text = "–" if value is None else form(value)
            cells.append([text, " ", change] if change else text)
        rows.append((*cells, other["note"] or ""))
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
            text = f"{format_bytes(device['peak'])} of {format_bytes(device['budget'])}"
            bar = _bar(_fit_marks(device, colours, unit), f"peak {text}")
        rows.append((answer["hardware"]["name"], bar, text))
    text = "GPU memory at the peak of the run. The upright line is the budget."
    return _figure("Does it fit?", text, _legend(keys), _rows(rows))


def _fit_marks(device: Answer, colours: Colours, unit: float) -> list[Html]:
    budget, reserve = device["budget"], device["reserve"]
    marks = [
        _rect(0, budget * unit, "track"),
        _rect(
            budget * unit, reserve * unit, "reserve", f"reserve {format_bytes(reserve)}"
        ),
        *_stack(_terms(device, colours), unit, format_bytes),
    ]
    over = device["peak"] - budget
    if over > 0:
        tip = f"{format_bytes(over)} over the budget"
        marks.append(_rect(budget * unit, over * unit, "over", tip))
    return [*marks, _limit(budget * unit)]


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
    ticks = _ticks(top)
    labels = [f"{n / 2**30:g}" for n in ticks]
    labels[-1] += " GiB"
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
            *(_rule(n / top, "grid") for n in ticks),
            *_areas(rows, top, [colours[name] for name in names]),
            _rule(budget / top, "budget"),
        ],
        ticks=[
            tag("span", label, "tick", style=f"bottom:{n / top:.2%}")
            for n, label in zip(ticks, labels, strict=True)
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
) -> list[Html]:
    """One polygon a term over all points, stacked in the order of `styles`."""
    if len(rows) == 1:  # an area needs a width
        rows = [rows[0], rows[0]]
    edges = [list(accumulate(row, initial=0)) for row in rows]
    polygons = []
    for term, style in enumerate(styles):
        roof, floor = (
            [
                f"{WIDTH * i / (len(rows) - 1):.2f},{HEIGHT * (1 - edge[n] / top):.2f}"
                for i, edge in enumerate(edges)
            ]
            for n in (term + 1, term)
        )
        corners = " ".join(roof + floor[::-1])
        polygons.append(tag("polygon", "", style, points=corners))
    return polygons


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
    text = (
        "Blocks in order, divided into their chunks; the letter says what becomes of "
    )
    return _figure(title, f"{text}their activations.", _legend(keys, marks), cells)


def _cell(index: int, block: Answer) -> Html:
    """A block's number, its chunks side by side in proportion, its policy's letter."""
    chunks, policy = block["chunks"], block["policy"]
    lines = [f"{block['name']}: {policy}"]
    lines += [f"{c['placement']} {format_bytes(c['bytes'])}" for c in chunks]
    lines += [f"{way} {_seconds(block[f'{way}_s'])}" for way in ("forward", "backward")]
    tip = "\n".join(lines)
    unit = CELL / max(sum(chunk["bytes"] for chunk in chunks), 1)
    bar = _bar(
        _stack([(c["placement"], c["bytes"], "") for c in chunks], unit), tip, CELL
    )
    mark = tag("span", POLICY_LETTERS[policy], "mark")
    return tag("div", [tag("span", index, "no"), bar, mark], "cell", data_tip=tip)


def _lanes(step: Answer | None) -> Html:
    """The step as compute and waits, then how long each lane is busy."""
    if not step:
        return _figure("Step time", "No step time: there is no plan to time.")
    total, lanes, recompute = step["total"], step["lanes"], step["recompute"]
    waits = {lane: s for lane, s in step["exposed"].items() if lane != "compute" and s}
    compute = [
        ("compute", lanes["compute"] - recompute, "compute"),
        ("recompute", recompute, "recompute"),
    ]
    exposed = [("exposed", s, f"wait for {lane}") for lane, s in waits.items()]
    rest = total - lanes["compute"] - sum(waits.values())
    other = [("other", rest, "other")] if rest > 1e-3 * total else []
    bars = [("step", [*compute, *exposed, *other], _seconds(total))]
    for lane, busy in lanes.items():
        wait = min(waits.get(lane, 0), busy)
        pieces, more = compute, f", {_seconds(recompute)} of it recompute"
        if lane != "compute":
            more = f", {_seconds(wait)} exposed" if wait else ", hidden"
            pieces = [("hidden", busy - wait, f"{lane}, hidden")]
            pieces.append(("exposed", wait, f"{lane}, exposed"))
        elif not recompute:
            more = ""
        bars.append((lane, pieces, f"{_seconds(busy)} busy{more if busy else ''}"))
    unit = WIDTH / max(total, total - rest, *lanes.values())
    rows = [
        (name, _bar(_stack(pieces, unit, _seconds), f"{name} {text}"), text)
        for name, pieces, text in bars
    ]
    keys = [
        ("compute", "compute"),
        ("recompute", "recompute"),
        ("hidden", "behind compute"),
        ("exposed", "exposed: compute waits"),
        *((style, name) for style, _, name in other),
    ]
    text = f"{_pace(step)}, {_speed(step)}, limited by {step['limiter']}."
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


def _bar(marks: Iterable[Html], label: str, width: int = WIDTH) -> Html:
    """A drawing of `width` by 20 units that fills its box."""
    form = {"viewBox": f"0 0 {width} 20", "preserveAspectRatio": "none", "role": "img"}
    return tag("svg", marks, "bar", **form, aria_label=label)


def _stack(
    pieces: Iterable[Piece], unit: float, form: Callable[[float], str] | None = None
) -> Iterable[Html]:
    """Pieces one after the other, `unit` wide for each 1 of length; `form` for tips."""
    start = 0.0
    for style, length, name in pieces:
        if length > 0:
            tip = f"{name} {form(length)}" if form else ""
            yield _rect(start * unit, length * unit, f"seg {style}", tip)
            start += length


def _rect(x: float, width: float, style: str, tip: str = "") -> Html:
    hint = {"data_tip": tip} if tip else {}
    return tag("rect", "", style, **hint, x=f"{x:.2f}", width=f"{width:.2f}", height=20)


def _limit(x: float) -> Html:
    """The budget's line across a bar."""
    return tag("path", "", "budget", d=f"M{x:.2f} -4V24")


def _rule(share: float, style: str) -> Html:
    """A line across the timeline, `share` of its height from below."""
    return tag("path", "", style, d=f"M0 {HEIGHT * (1 - share):.2f}H{WIDTH}")


def _ticks(top: float) -> list[float]:
    """At most six round values of GiB up to `top` bytes, zero among them."""
    scale = 2.0**30
    while top < scale:
        scale /= 10
    while top >= 10 * scale:
        scale *= 10
    step = next(step for m in (0.2, 0.5, 1, 2) if top < 6 * (step := m * scale))
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
    return f"{MARKS[answer['verdict']]} {VERDICTS[answer['verdict']]}"


def _verdict(answer: Answer) -> Html:
    return tag("span", _marked(answer), f"verdict {answer['verdict']}")


def _margin(memory: Answer) -> str:
    """How far the peak stays below the budget, or goes above it."""
    free = memory["budget"] - memory["peak"]
    return f"{format_bytes(abs(free))} {'free' if free >= 0 else 'over budget'}"


def _pace(step: Answer) -> str:
    return f"{_seconds(step['total'])} a step"


def _speed(step: Answer) -> str:
    return f"{format_rate(step['tokens_per_s'])} tokens/s"


def _seconds(value: float) -> str:
    """Seconds in s or ms."""
    if value >= 1 or not value:
        return f"{value:.{0 if value >= 100 else 2}f} s"
    return f"{1e3 * value:.{0 if value >= 0.1 else 1 if value >= 1e-3 else 3}f} ms"
