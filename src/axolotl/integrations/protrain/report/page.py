"""The forecasts of `axolotl protrain plan` as one HTML page, nothing loaded from outside.

The page around what is made here is `page.html`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from .figures import (
    WIDTH,
    Colours,
    Forecast,
    bar,
    figure,
    fit_figure,
    key,
    lanes_figure,
    line,
    parts,
    patterns,
    rate,
    rect,
    residency_figure,
    seconds,
    term_colours,
    timeline_figure,
)
from .forecast import MODES, format_bytes

VERDICTS = {
    "fits": "✓ fits",
    "does-not-fit": "✕ does not fit",
    "unsupported": "✕ unsupported",
}


def plan_page(forecasts: Sequence[Forecast], config_name: str) -> str:
    """The page that compares the cards and shows each one's plan.

    Args:
        forecasts: One JSON object of `axolotl protrain plan --json` for each card. A
            device's `budget` is what its peak may reach, `reserve` lies beyond it.
        config_name: What was planned, for the heading.

    Raises:
        ValueError: There is no forecast.
    """
    if not forecasts:
        raise ValueError("a plan page needs at least one forecast")
    colours = term_colours(forecasts)
    best = fastest(forecasts)
    shown = forecasts.index(best) if best else 0
    several = len(forecasts) > 1
    hint = '<p class="sub screen">Choose a card to see its plan below.</p>'
    title = f"ProTrain plan for {escape(config_name)}"
    body = [
        patterns(),
        f'<header><h1>{title}</h1><p class="lead">{summary(forecasts)}</p></header>',
        hint if several else "",
        '<div class="cards">',
        *(
            card(i, forecast, best, several, i == shown)
            for i, forecast in enumerate(forecasts)
        ),
        "</div>",
        fit_figure(forecasts, colours),
        *(panel(i, forecast, colours) for i, forecast in enumerate(forecasts)),
        "<footer>Every figure is a forecast: bytes are counted from a trace of the "
        "model, times from the rates of the hardware. 1 GiB is 2<sup>30</sup> bytes."
        "</footer>",
    ]
    template = files(__package__).joinpath("page.html").read_text("utf-8")
    return Template(template).substitute(title=title, body="\n".join(body))


def fastest(forecasts: Sequence[Forecast]) -> Forecast | None:
    """The fitting forecast with most tokens per second, None if none fits."""
    fitting = [f for f in forecasts if f["verdict"] == "fits" and f["step_s"]]
    return max(fitting, key=lambda f: f["step_s"]["tokens_per_s"], default=None)


def summary(forecasts: Sequence[Forecast]) -> str:
    """One sentence: how many cards fit and which is fastest."""
    num_fits = sum(f["verdict"] == "fits" for f in forecasts)
    text = f"{num_fits} of {len(forecasts)} cards fit"
    if len(forecasts) == 1:
        (only,) = forecasts
        text = f"{only['hardware']['name']} {VERDICTS[only['verdict']]}"
    elif best := fastest(forecasts):
        speed = rate(best["step_s"]["tokens_per_s"])
        text += f"; the fastest is {best['hardware']['name']} at {speed}"
    return f"{escape(text)}."


def card(
    index: int, forecast: Forecast, best: Forecast | None, choice: bool, shown: bool
) -> str:
    """The verdict of one card; a button that chooses it when there are several."""
    hardware, step = forecast["hardware"], forecast["step_s"]
    lines = [
        f'<span class="name">{escape(hardware["name"])}</span>',
        f'<span class="soft">{escape(hardware["link"])}</span>',
        verdict(forecast["verdict"]),
    ]
    if step:
        number, unit = rate(step["tokens_per_s"]).split()
        lines.append(
            f'<span class="big">{number} <small>{unit}</small></span>'
            f"<span>{seconds(step['total'])} a step, limited by "
            f"{escape(step['limiter'])}</span>"
        )
        if choice and best and forecast["verdict"] == "fits":
            share = step["tokens_per_s"] / best["step_s"]["tokens_per_s"]
            text = "fastest" if forecast is best else f"{share:.0%} of the fastest"
            lines.append(f'<span class="soft">{text}</span>')
    else:
        lines.append('<span class="big">–<small> no step time</small></span>')
    if forecast["device_bytes"]:
        lines.append(f"<span>GPU: {margin(forecast['device_bytes'])}</span>")
    if not choice:
        return f'<div class="card">{"".join(lines)}</div>'
    return (
        f'<button type="button" class="card" aria-controls="card-{index}" '
        f'aria-pressed="{str(shown).lower()}">{"".join(lines)}</button>'
    )


def panel(index: int, forecast: Forecast, colours: Colours) -> str:
    """Everything about one card."""
    hardware = forecast["hardware"]
    head = (
        f'<div class="box"><h2>{escape(hardware["name"])} '
        f"{verdict(forecast['verdict'])}</h2>"
        f'<p class="soft">{escape(hardware["link"])}; {escape(hardware["source"])}</p>'
        f"{missing(forecast)}{knobs(forecast)}</div>"
    )
    tables = "".join(
        memory_tables(title, forecast[kind], colours)
        for title, kind in (
            ("GPU memory", "device_bytes"),
            ("Host memory", "host_bytes"),
        )
    )
    return (
        f'<section class="panel" id="card-{index}">{head}'
        f"{timeline_figure(forecast, colours)}{residency_figure(forecast)}"
        f'{lanes_figure(forecast["step_s"])}<div class="pair">{tables}</div>'
        f"{alternatives_table(forecast)}{assumptions(forecast)}</section>"
    )


def missing(forecast: Forecast) -> str:
    """Why a card cannot do it and how much it lacks; nothing when it can."""
    if forecast["verdict"] == "fits":
        return ""
    lines = [escape(forecast["reason"])] if forecast["reason"] else []
    for kind, where in (("device_bytes", "GPU"), ("host_bytes", "host")):
        memory = forecast[kind]
        if memory and memory["peak"] > memory["budget"]:
            lines.append(
                f"Missing: {format_bytes(memory['peak'] - memory['budget'])} "
                f"of {where} memory."
            )
    if not forecast["plan"]:
        lines.append("There is no plan for this card.")
    return f'<div class="reason">{"".join(f"<p>{text}</p>" for text in lines)}</div>'


def knobs(forecast: Forecast) -> str:
    """The plan's numbers with what they count."""
    plan = forecast["plan"]
    if not plan:
        return ""
    chunks, blocks = (
        f"of {plan['num_chunks']} chunks",
        f"of {plan['num_blocks']} blocks",
    )
    facts = (
        ("mode", plan["mode"], MODES[plan["mode"]]),
        ("ranks", plan["num_ranks"], "on one host"),
        ("n_persist", plan["n_persist"], f"{chunks} stay on the GPU"),
        ("n_buffer", plan["n_buffer"], "slots that paged chunks share"),
        ("n_checkpoint", plan["n_checkpoint"], f"{blocks} recompute"),
        ("n_swap", plan["n_swap"], f"{blocks} send activations to the host"),
        ("decided by", plan["origin"], ""),
    )
    items = "".join(
        f"<div><dt>{name}</dt><dd>{escape(str(value))}<small>{escape(text)}</small></dd></div>"
        for name, value, text in facts
    )
    return f'<dl class="facts">{items}</dl>'


def memory_tables(
    title: str, memory: Mapping[str, Any] | None, colours: Colours
) -> str:
    """Bytes at the peak by term, and the highest of each phase of the run."""
    if not memory:
        return figure(title, "No forecast was made.", "")
    peak, budget = memory["peak"], memory["budget"]
    rows = [
        (
            f"{key(style)}{escape(name)}",
            format_bytes(nbytes),
            f"{nbytes / (peak or 1):.0%}",
        )
        for style, nbytes, name in parts(memory["terms"], peak, colours)
    ]
    rows.append(("peak", format_bytes(peak), margin(memory)))
    terms = table(("At the peak", "Bytes", "Share"), rows, "terms")
    unit = WIDTH / max(budget, *memory["phases"].values(), 1)
    phases = [
        (
            escape(phase),
            format_bytes(nbytes),
            bar(rect(0, nbytes * unit, "phase") + line(budget * unit), phase),
        )
        for phase, nbytes in memory["phases"].items()
    ]
    text = f"Budget {format_bytes(budget)}"
    if memory.get("reserve"):
        text += f", and {format_bytes(memory['reserve'])} in reserve"
    return figure(
        title,
        f"{text}.",
        terms + table(("Highest in", "Bytes", "Against the budget"), phases, "phases"),
    )


def alternatives_table(forecast: Forecast) -> str:
    """What else could be set, and its price next to this plan."""
    options = forecast["alternatives"]
    if not options:
        return ""
    step, device = forecast["step_s"] or {}, forecast["device_bytes"] or {}
    now = {
        "change": "as configured",
        "verdict": forecast["verdict"],
        "device_peak_bytes": device.get("peak"),
        "step_s": step.get("total"),
        "tokens_per_s": step.get("tokens_per_s"),
        "note": "",
    }
    rows = []
    for option in (now, *options):
        cells = [escape(option["change"]), verdict(option["verdict"])]
        for name, form in (
            ("device_peak_bytes", format_bytes),
            ("step_s", seconds),
            ("tokens_per_s", rate),
        ):
            value, base = option[name], now[name]
            text = "–" if value is None else form(value)
            if value is not None and base and option is not now:
                text += f" <small>{value / base - 1:+.0%}</small>"
            cells.append(text)
        rows.append((*cells, escape(option["note"] or "")))
    heads = ("Change", "Verdict", "GPU peak", "Step", "Speed", "Note")
    text = "Each alone, everything else as it is; small figures compare with this plan."
    return figure("Alternatives and their price", text, table(heads, rows, "options"))


def assumptions(forecast: Forecast) -> str:
    """What the forecast takes for granted."""
    if not forecast["assumptions"]:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in forecast["assumptions"])
    return figure("Assumptions", "", f'<ul class="assume">{items}</ul>')


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], style: str) -> str:
    """Rows of ready HTML; all but the first column and notes are set to the right."""
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-head="{name}">{cell}</td>'
            for name, cell in zip(heads, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<table class="{style}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )


def verdict(name: str) -> str:
    """The verdict in words, coloured."""
    return f'<span class="verdict {name}">{VERDICTS[name]}</span>'


def margin(memory: Mapping[str, Any]) -> str:
    """How far the peak stays below the budget, or goes above it."""
    free = memory["budget"] - memory["peak"]
    return f"{format_bytes(abs(free))} {'free' if free >= 0 else 'over budget'}"


__all__ = ["plan_page"]
