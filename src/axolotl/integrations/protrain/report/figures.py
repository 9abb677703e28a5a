"""Figures of the plan page: fit, memory over a step, residency, step time.

Bars and areas are SVG stretched to their box; texts stay HTML, so they are as large on
a phone as on paper.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import accumulate, groupby
from typing import Any

from .forecast import PLACEMENTS, POLICIES, POLICY_LETTERS, format_bytes

Forecast = Mapping[str, Any]
Colours = Mapping[str, str]
Part = tuple[str, float, str]
"""Style, length and name of a piece of a bar."""

WIDTH, HEIGHT = 1000, 400
"""Units of a drawing: bars are `WIDTH` wide, the timeline is `HEIGHT` high as well."""
NUM_COLOURS = 8


def fit_figure(forecasts: Sequence[Forecast], colours: Colours) -> str:
    """Peak by term against budget, all cards on one scale."""
    title = "Does it fit?"
    known = [f["device_bytes"] for f in forecasts if f["device_bytes"]]
    if not known:
        return figure(title, "No memory forecast was made.", "")
    unit = WIDTH / max(max(d["peak"], d["budget"] + d["reserve"], 1) for d in known)
    rows = "".join(
        fit_row(escape(f["hardware"]["name"]), f["device_bytes"], colours, unit)
        for f in forecasts
    )
    keys = dict.fromkeys(
        (style, name)
        for device in known
        for style, _, name in parts(device["terms"], device["peak"], colours)
    )
    keys[("reserve", "reserve, left free")] = None
    if any(device["peak"] > device["budget"] for device in known):
        keys[("over", "over the budget")] = None
    text = "GPU memory at the peak of the run. The upright line is the budget."
    return figure(title, text, f'{legend(keys)}<div class="rows">{rows}</div>')


def fit_row(
    name: str, device: Mapping[str, Any] | None, colours: Colours, unit: float
) -> str:
    """One card's bar, `unit` wide for each byte; the name is HTML."""
    if not device:
        return f"<div>{name}</div><div>no memory forecast</div><div>–</div>"
    peak, budget, reserve = (device[part] for part in ("peak", "budget", "reserve"))
    tip = f"reserve {format_bytes(reserve)}"
    marks = rect(0, budget * unit, "track")
    marks += rect(budget * unit, reserve * unit, "reserve", tip)
    marks += stack(parts(device["terms"], peak, colours), unit, format_bytes)
    if peak > budget:
        tip = f"{format_bytes(peak - budget)} over the budget"
        marks += rect(budget * unit, (peak - budget) * unit, "over", tip)
    text = f"{format_bytes(peak)} of {format_bytes(budget)}"
    marks += line(budget * unit)
    return f"<div>{name}</div>{bar(marks, f'peak {text}')}<div>{text}</div>"


def timeline_figure(forecast: Forecast, colours: Colours) -> str:
    """Device memory over a step as a stacked area under the budget line."""
    title, device = "GPU memory over one step", forecast["device_bytes"]
    points = forecast["timeline"]
    if not points or not device:
        return figure(title, "No timeline: the step was not walked.", "")
    names = list(dict.fromkeys(name for point in points for name in point["bytes"]))
    rows = [[point["bytes"].get(name, 0) for name in names] for point in points]
    totals, budget = [sum(row) for row in rows], device["budget"]
    peak = max(totals)
    at, top = totals.index(peak), 1.08 * max(peak, budget, 1)
    ticks = tick_bytes(top)
    labels = "".join(
        f'<span class="tick" style="bottom:{tick / top:.2%}">'
        f"{tick / 2**30:g}{' GiB' if tick == ticks[-1] else ''}</span>"
        for tick in ticks
    )
    data = {
        "names": names,
        "budget": budget,
        "points": [
            [p["label"], p["phase"], *row] for p, row in zip(points, rows, strict=True)
        ],
    }
    text = f"Highest point {format_bytes(peak)} at {escape(points[at]['label'])} (the ring). "
    if device["peak"] > peak:
        phase = max(device["phases"], key=device["phases"].__getitem__)
        text += f"The whole run peaks at {format_bytes(device['peak'])}, in {escape(phase)}. "
    left = at / max(len(points) - 1, 1)
    body = (
        f'{legend([(colours[name], name) for name in names])}<div class="chart">'
        f'<div class="plot" tabindex="0" aria-label="{title}: arrow keys go along">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="stacked area by term">'
        f"{''.join(rule(height(tick, top), 'grid') for tick in ticks)}"
        f"{areas(rows, top, [colours[name] for name in names])}"
        f"{rule(height(budget, top), 'budget')}</svg>{labels}"
        f'<span class="limit" style="bottom:{budget / top:.2%}">'
        f"budget {format_bytes(budget)}</span>"
        f'<span class="peak" style="left:{left:.2%};bottom:{peak / top:.2%}"></span>'
        f'<span class="cross"></span></div>'
        f'<div class="band">{phase_band([point["phase"] for point in points])}</div>'
        f'<script type="application/json">{script_json(data)}</script></div>'
    )
    return figure(title, f"{text}In order of execution, not to scale in time.", body)


def areas(rows: Sequence[Sequence[int]], top: float, styles: Sequence[str]) -> str:
    """One polygon a term over all points, stacked in the order of `styles`."""
    if len(rows) == 1:  # an area needs a width
        rows = [rows[0], rows[0]]
    edges = [list(accumulate(row, initial=0)) for row in rows]
    xs = [WIDTH * i / (len(rows) - 1) for i in range(len(rows))]
    text = ""
    for i, style in enumerate(styles):
        roof = [(x, edge[i + 1]) for x, edge in zip(xs, edges, strict=True)]
        floor = [(x, edge[i]) for x, edge in zip(xs, edges, strict=True)]
        corners = " ".join(
            f"{x:.2f},{height(nbytes, top):.2f}" for x, nbytes in roof + floor[::-1]
        )
        text += f'<polygon class="{style}" points="{corners}"></polygon>'
    return text


def phase_band(phases: Sequence[str]) -> str:
    """A strip under each run of points of the same phase, named where there is room."""
    text, start = "", 0.0
    for phase, run in groupby(phases):
        share = len(list(run)) / len(phases)
        name = escape(phase) if share >= 0.08 else ""
        text += f'<span style="left:{start:.2%};width:{share:.2%}">{name}</span>'
        start += share
    return text


def residency_figure(forecast: Forecast) -> str:
    """One cell a block: its chunks by placement, its policy as a letter."""
    title, blocks = "Where the blocks live", forecast["blocks"]
    if not blocks:
        return figure(title, "No blocks were placed.", "")
    chunks = [chunk for block in blocks for chunk in block["chunks"]]
    keys = []
    for place, meaning in PLACEMENTS.items():
        sizes = [c["bytes"] for c in chunks if c["placement"] == place]
        if sizes:
            text = f"{place}, {meaning}: {len(sizes)} of {len(chunks)} chunks"
            keys.append((place, f"{text}, {format_bytes(sum(sizes))}"))
    marks = ""
    for policy, meaning in POLICIES.items():
        if number := sum(block["policy"] == policy for block in blocks):
            mark = f'<span class="mark">{POLICY_LETTERS[policy]}</span>'
            text = f"{policy}, {meaning}: {number} of {len(blocks)} blocks"
            marks += f"<li>{mark} {text}</li>"
    cells = "".join(block_cell(i, block) for i, block in enumerate(blocks))
    return figure(
        title,
        "Blocks in order, divided into their chunks; the letter says what becomes of "
        "their activations.",
        f'{legend(keys, marks)}<div class="map">{cells}</div>',
    )


def block_cell(index: int, block: Mapping[str, Any]) -> str:
    """A block's number, its chunks side by side in proportion, its policy's letter."""
    chunks, policy = block["chunks"], block["policy"]
    tip = "\n".join(
        (
            f"{block['name']}: {policy}",
            *(f"{c['placement']} {format_bytes(c['bytes'])}" for c in chunks),
            f"forward {seconds(block['forward_s'])}",
            f"backward {seconds(block['backward_s'])}",
        )
    )
    width = 32  # as wide as on the screen, or hatchings would be squeezed
    unit = width / max(sum(chunk["bytes"] for chunk in chunks), 1)
    pieces = [(c["placement"], c["bytes"], "") for c in chunks]
    return (
        f'<div class="cell" data-tip="{escape(tip)}"><span class="no">{index}</span>'
        f'{bar(stack(pieces, unit), tip, width)}<span class="mark">'
        f"{POLICY_LETTERS[policy]}</span></div>"
    )


def lanes_figure(step: Mapping[str, Any] | None) -> str:
    """The step as compute and waits, then how long each lane is busy."""
    title = "Step time"
    if not step:
        return figure(title, "No step time: there is no plan to time.", "")
    total, lanes, recompute = step["total"], step["lanes"], step["recompute"]
    waits = {lane: s for lane, s in step["exposed"].items() if lane != "compute" and s}
    compute = [
        ("compute", lanes["compute"] - recompute, "compute"),
        ("recompute", recompute, "recompute"),
    ]
    rest = total - lanes["compute"] - sum(waits.values())
    other = [("other", rest, "other")] if rest > 1e-3 * total else []
    exposed = [("exposed", s, f"wait for {lane}") for lane, s in waits.items()]
    rows: list[tuple[str, list[Part], str]] = [
        ("step", [*compute, *exposed, *other], seconds(total))
    ]
    for lane, busy in lanes.items():
        wait, text = min(waits.get(lane, 0), busy), f"{seconds(busy)} busy"
        pieces = [("hidden", busy - wait, f"{lane}, hidden")]
        pieces.append(("exposed", wait, f"{lane}, exposed"))
        if lane == "compute":
            pieces = compute
            text += f", {seconds(recompute)} of it recompute" if recompute else ""
        elif busy:
            text += f", {seconds(wait)} exposed" if wait else ", hidden"
        rows.append((lane, pieces, text))
    unit = WIDTH / max(total, total - rest, *lanes.values())
    drawn = "".join(
        f"<div>{escape(name)}</div>"
        f"{bar(stack(pieces, unit, seconds), f'{name} {text}')}<div>{text}</div>"
        for name, pieces, text in rows
    )
    keys = [
        ("compute", "compute"),
        ("recompute", "recompute"),
        ("hidden", "behind compute"),
        ("exposed", "exposed: compute waits"),
    ]
    keys += [(style, name) for style, _, name in other]
    text = f"{seconds(total)} a step, {rate(step['tokens_per_s'])}, limited by "
    return figure(
        title,
        f"{text}{escape(step['limiter'])}.",
        f'{legend(keys)}<div class="rows first">{drawn}</div>',
    )


def figure(title: str, text: str, body: str) -> str:
    """A box of the page. `text` and `body` are HTML."""
    sub = f'<p class="sub">{text}</p>' if text else ""
    return f'<figure class="box"><h3>{title}</h3>{sub}{body}</figure>'


def term_colours(forecasts: Sequence[Forecast]) -> Colours:
    """The style of each term, the same on the whole page; hatched from the ninth on."""
    names: dict[str, None] = {}
    for forecast in forecasts:
        for point in forecast["timeline"] or ():
            names.update(dict.fromkeys(point["bytes"]))
    for kind in ("device_bytes", "host_bytes"):
        for forecast in forecasts:
            names.update(dict.fromkeys((forecast[kind] or {"terms": ()})["terms"]))
    return {name: f"t{i % (2 * NUM_COLOURS)}" for i, name in enumerate(names)}


def parts(terms: Mapping[str, int], peak: int, colours: Colours) -> list[Part]:
    """The terms of a peak, and what they leave of it unexplained."""
    pieces: list[Part] = [(colours[name], size, name) for name, size in terms.items()]
    rest = peak - sum(terms.values())
    return [*pieces, ("other", rest, "not broken down")] if rest > 0 else pieces


def bar(marks: str, label: str, width: float = WIDTH) -> str:
    """A drawing of `width` by 20 units that fills its box."""
    return (
        f'<svg class="bar" viewBox="0 0 {width} 20" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(label)}">{marks}</svg>'
    )


def stack(
    pieces: Iterable[Part], unit: float, form: Callable[[float], str] | None = None
) -> str:
    """Pieces one after the other, `unit` wide for each 1 of length; `form` for tips."""
    text, start = "", 0.0
    for style, length, name in pieces:
        if length > 0:
            tip = f"{name} {form(length)}" if form else ""
            text += rect(start * unit, length * unit, f"seg {style}", tip)
            start += length
    return text


def rect(x: float, width: float, style: str, tip: str = "") -> str:
    """A piece of a bar, with a text to show on it."""
    hint = f' data-tip="{escape(tip)}"' if tip else ""
    return f'<rect class="{style}"{hint} x="{x:.2f}" width="{width:.2f}" height="20"></rect>'


def line(x: float) -> str:
    """The budget's line across a bar."""
    return f'<path class="budget" d="M{x:.2f} -4V24"></path>'


def rule(y: float, style: str) -> str:
    """A line across the timeline."""
    return f'<path class="{style}" d="M0 {y:.2f}H{WIDTH}"></path>'


def height(nbytes: float, top: float) -> float:
    """Where `nbytes` lies in the timeline when `top` is its upper edge."""
    return HEIGHT * (1 - nbytes / top)


def tick_bytes(top: float) -> list[float]:
    """At most six round values of GiB up to `top` bytes, zero among them."""
    scale = 2.0**30
    while top < scale:
        scale /= 10
    while top >= 10 * scale:
        scale *= 10
    step = next(step for m in (0.2, 0.5, 1, 2) if top < 6 * (step := m * scale))
    return [step * i for i in range(int(top / step) + 1)]


def key(style: str) -> str:
    """A patch of a style, for legends."""
    return (
        f'<svg class="key" viewBox="0 0 13 13"><rect class="{style}" width="13" '
        'height="13"></rect></svg>'
    )


def legend(keys: Iterable[tuple[str, str]], more: str = "") -> str:
    """Styles with their names; `more` is HTML."""
    items = "".join(f"<li>{key(style)}{escape(name)}</li>" for style, name in keys)
    return f'<ul class="legend">{items}{more}</ul>'


def patterns() -> str:
    """Hatchings, for what colour alone should not say."""
    lines = {f"h{i}": (f"--t{i}", "--card", 2.5) for i in range(NUM_COLOURS)}
    lines["reserve"] = "--card", "--soft", 1
    lines["over"] = "--none", "--bad", 3
    lines["recompute"] = "--resident", "--card", 2
    lines["exposed"] = "--wait", "--card", 2
    lines["host-state"] = "--paged", "--resident", 3
    drawn = "".join(
        f'<pattern id="{name}" width="7" height="7" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="7" height="7" '
        f'style="fill:var({ground})"></rect><path d="M0 0V7" '
        f'style="stroke:var({stroke});stroke-width:{width}"></path></pattern>'
        for name, (ground, stroke, width) in lines.items()
    )
    return (
        '<svg width="0" height="0" style="position:absolute" aria-hidden="true">'
        f"<defs>{drawn}</defs></svg>"
    )


def script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def seconds(value: float) -> str:
    """Seconds in s or ms."""
    if value >= 1 or not value:
        return f"{value:.{0 if value >= 100 else 2}f} s"
    return f"{1e3 * value:.{0 if value >= 0.1 else 1 if value >= 1e-3 else 3}f} ms"


def rate(tokens_per_s: float) -> str:
    """Tokens per second with separators."""
    return f"{tokens_per_s:,.{0 if tokens_per_s >= 100 else 1}f} tokens/s"
