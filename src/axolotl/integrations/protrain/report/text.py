"""A plan as text: a table for the log of a training, pages for `axolotl protrain plan`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import StringIO
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table

from ..core.planner.planner import Forecast
from ..core.sizes import format_bytes
from .forecast import (
    DOES_NOT_FIT,
    FITS,
    LANES,
    MODES,
    UNSUPPORTED,
    VERDICTS,
    best,
    compared_rows,
    forecast_dict,
    format_about,
    format_avoidable,
    format_generation,
    format_keys,
    format_limiter,
    format_losses,
    format_lowers,
    format_pace,
    format_plain,
    format_policies,
    format_rate,
    format_seconds,
    format_served,
    highest_phase,
    plain_pace,
)

NARROWEST, WIDTH, WIDEST = 80, 100, 160
"""Columns of text: `WIDTH` where there is no terminal and no `COLUMNS`."""
MIB = 1 << 20
Answer = Mapping[str, Any]
Row = Sequence[str]


def forecast_text(forecast: Forecast, device: str) -> str:
    """Show what a training on `device` will do and what that will cost."""
    shown = forecast_dict(forecast)
    pace = format_pace(shown["step_s"]["total"], forecast.tokens_per_s)
    head = f"ProTrain plan ({forecast.plan.origin}) on {device}: {pace}"
    return _paragraphs([head, *_plan(shown, "Plan")])


def plan_text(answers: Sequence[Answer], explain: bool = False) -> str:
    """The cards of `--json`: of several a line for each, then all about the best one.

    `explain`: also which terms of the memory an option lowers.
    """
    shown: list[RenderableType] = []
    answer, why = best(answers)
    if len(answers) > 1:
        heads = ["card", "verdict", "plain fits too", "tokens/s", "host, GiB"]
        if any(a["cost"] for a in answers):
            heads.append("$/M tokens")
        shown += _listing(heads, [_overview(a)[: len(heads)] for a in answers])
        shown.append(f"Of these {answer['hardware']['name']} is {why}:")
    shown += [*_card(answer, explain), "", "Assumed and not known:"]
    for line in answer["assumptions"]:
        hanging = Table.grid()
        hanging.add_row("  - ", Padding(line, 0))
        shown.append(hanging)
    texts = (_fixed(answer) for answer in answers if "fixed" in answer)
    return "\n\n".join((_paragraphs(shown), *texts))


def _paragraphs(shown: Iterable[RenderableType]) -> str:
    lines = [line.rstrip() for line in _printed(shown).splitlines()]
    paragraphs = (list(run) for filled, run in groupby(lines, bool) if filled)
    return "\n\n".join("\n".join(paragraph) for paragraph in paragraphs)


def largest_text(answers: Sequence[Answer]) -> str:
    """The answers of `--max`, a line for each card."""
    lines = []
    for answer in answers:
        found, name = answer["max"], answer["hardware"]["name"]
        if found["value"] is None:
            why = f": {found['note']}" if found["note"] else ""
            lines.append(f"{name}: no {found['key']} fits{why}")
            continue
        speed = format_pace(answer["step_s"], answer["tokens_per_s"])
        lines.append(
            f"{name}: {found['key']} up to {found['value']} (now {found['now']}), then "
            f"{speed}, {format_bytes(answer['device_peak_bytes'])} of the device"
            + (f"; {found['note']}" if found["note"] else "")
        )
    return "\n".join(lines)


def report_text(reports: Mapping[str, Answer]) -> str:
    """Finished runs by name: what was predicted and what was, then beside each other."""
    shown: list[RenderableType] = []
    for name, report in reports.items():
        plan = report["plan"]
        shown += [
            f"{name}: {format_about(report['about'])}",
            f"mode {plan['mode']} on {report['hardware']['name']}, {_knobs(plan)}; "
            f"{report['measured']['num_steps']} steps",
            *([f"loss {format_losses(report['losses'])}"] if report["losses"] else []),
            *_listing(("term", "predicted", "measured", "off"), compared_rows(report)),
            _step(report["step_s"], "predicted"),
            *report["notes"],
            "",
        ]
    if len(reports) > 1:
        measured = [
            {row[0]: row[2] for row in compared_rows(r)}
            | ({"last loss": f"{r['losses'][-1][1]:.4f}"} if r["losses"] else {})
            for r in reports.values()
        ]
        names = dict.fromkeys(name for run in measured for name in run)
        rows = [(n, *(run.get(n, "-") for run in measured)) for n in names]
        shown += _listing(("measured", *reports), rows)
    return _paragraphs(shown)


def _fixed(answer: Answer) -> str:
    """Say what `--write` has done."""
    fixed = answer["fixed"]
    if answer["verdict"] != DOES_NOT_FIT:
        fits = answer["verdict"] == FITS
        return f"{'It fits as it is: n' if fits else 'N'}othing is written."
    if fixed is None:
        return (
            "All options together are not enough: nothing is written. A larger card, more "
            "host memory or a smaller base would do."
        )
    pace = format_pace(fixed["step_s"], fixed["tokens_per_s"])
    return (
        f"{fixed['file']}: fits, {pace}, {format_bytes(fixed['device_peak_bytes'])} of "
        f"the device;\n{fixed['numbers']}.\n{fixed['difference']}"
    )


def _card(answer: Answer, explain: bool) -> Iterator[RenderableType]:
    plan, step, hardware = answer["plan"], answer["step_s"], answer["hardware"]
    fits = answer["verdict"] == FITS
    others = answer["alternatives"]
    pace = f", {format_pace(step['total'], step['tokens_per_s'])}" if fits else ""
    plain = format_plain(step["tokens_per_s"], others) if fits else ""
    link = f" on {hardware['link']}" if hardware["link"] else ""
    cards = hardware["name"]
    if (num_ranks := plan["num_ranks"]) > 1:
        cards, link = f"{num_ranks} x {cards}", f"{link} each"
    yield f"{cards}{link}: {VERDICTS[answer['verdict']]}{pace}" + (
        f"; {plain}" if plain else ""
    )
    if answer["reason"]:
        yield answer["reason"]
    heads = ("change", "verdict", "device", "step", "tokens/s")
    levers = answer.get("levers", ())
    named = ("option", "verdict", "at least", "host", "s/sample", "tokens/s")
    priced = [
        *_listing(heads, [_alternative(other) for other in others]),
        *_listing(named, [_option(option, explain) for option in levers]),
    ]
    if answer["verdict"] == DOES_NOT_FIT and "levers" not in answer:
        priced.append("More ways: --levers. A YAML that fits: --write FILE.")
    if answer["verdict"] == DOES_NOT_FIT:
        yield from priced
    if answer["verdict"] == UNSUPPORTED:
        yield from priced
        return
    yield from _plan(answer, "Plan" if fits else "The plan that comes nearest")
    yield f"Largest avoidable part: {format_avoidable(answer['avoidable'])}"
    if fits:
        yield from priced


def _plan(answer: Answer, head: str) -> Iterator[RenderableType]:
    """A plan, its memory by term, and its step by lane."""
    plan, step = answer["plan"], answer["step_s"]
    ranks, device, host = "", "device", "host"
    if plan["num_ranks"] > 1:
        ranks, device = f"{plan['num_ranks']} ranks, ", "each device"
        host = "host of all ranks"
    yield (
        f"{head}: mode {plan['mode']} ({MODES[plan['mode']]}), {ranks}{_knobs(plan)} "
        f"({format_policies(plan['block_policies'])})"
        + (f", adapters {adapters}" if (adapters := plan.get("adapters")) else "")
        + (", updates on the host" if plan["update"] == "host" else "")
    )
    if answer.get("generation"):
        yield format_generation(answer)
    if answer.get("served"):
        yield format_served(answer)
    on_device, on_host = answer["device_bytes"], answer["host_bytes"]
    # the host's terms are those of training; loading or saving may take more
    host_peak = f"peak ({highest_phase(on_host['phases'])})"
    right: list[RenderableType] = [
        _memory(f"{host}, while training", on_host, host_peak)
    ]
    right += ["", _step(step)] if step else []
    yield _beside(
        _memory(f"{device}, {on_device['peak_at']}", on_device, "peak"), Group(*right)
    )


def _knobs(plan: Answer) -> str:
    return (
        f"n_persist {plan['n_persist']} of {plan['num_chunks']} chunks, n_buffer "
        f"{plan['n_buffer']}, n_swap {plan['n_swap']}, n_checkpoint "
        f"{plan['n_checkpoint']} of {plan['num_blocks']} blocks"
    )


def _overview(answer: Answer) -> Row:
    host, step = answer["host_bytes"], answer["step_s"]
    cost = (answer["cost"] or {}).get("usd_per_million_tokens")
    fits = answer["verdict"] == FITS
    return (
        answer["hardware"]["name"],
        VERDICTS[answer["verdict"]],
        plain_pace(step["tokens_per_s"], answer["alternatives"]) if fits else "no",
        format_rate(step["tokens_per_s"]) if fits else "-",
        f"{host['peak'] / 2**30:.1f} of {host['budget'] / 2**30:.1f}",
        "-" if cost is None else f"{cost:.3g}",
    )


def _alternative(other: Answer) -> Row:
    fits = other["step_s"] is not None
    return (
        other["change"],
        VERDICTS[other["verdict"]],
        format_bytes(other["device_peak_bytes"]) if fits else "-",
        format_seconds(other["step_s"]) if fits else "-",
        format_rate(other["tokens_per_s"]) if fits else "-",
        other["note"] or "",
    )


def _option(option: Answer, explain: bool) -> Row:
    fits = option["step_s"] is not None
    notes = [option["numbers"] + (f"; {option['note']}" if option["note"] else "")]
    if explain:
        notes.append(format_lowers(option["lowers"]))
    return (
        option["change"],
        VERDICTS[option["verdict"]],
        format_bytes(option["least_device_bytes"]),
        format_bytes(option["host_peak_bytes"]),
        f"{option['sample_s']:.3g}" if fits else "-",
        format_rate(option["tokens_per_s"]) if fits else "-",
        "\n".join((*notes, format_keys(option["keys"]))),
    )


def _listing(heads: Row, rows: Sequence[Row]) -> Iterator[RenderableType]:
    """Rows under their heads; the first column gives way where the text is too narrow.

    What a row has beyond the heads is its note, in a paragraph of its own below.
    """
    if not rows:
        return
    columns = list(zip(heads, *(row[: len(heads)] for row in rows), strict=True))
    widths = [max(map(len, column)) for column in columns]
    yield ""
    room = text_width() - sum(widths[1:]) - 2 * len(widths[1:])
    widths[0] = max(min(widths[0], room), 8)
    for number, row in enumerate([heads, *rows]):
        line = Table.grid(padding=(0, 2, 0, 0))
        for at, width in enumerate(widths):
            left = not at or heads[at] == "verdict"
            justify: Any = "left" if left else "right"
            line.add_column(width=width, justify=justify, overflow="fold")
        line.add_row(*row[: len(heads)])
        yield line
        if not number:
            yield "-" * (sum(widths) + 2 * len(widths[1:]))
        yield from (Padding(note, (0, 0, 0, 4)) for note in row[len(heads) :] if note)
    yield ""


def _beside(*tables: RenderableType) -> RenderableType:
    """Tables side by side, or one below the other where the text is too narrow."""
    console = Console(width=WIDEST)
    widths = (Measurement.get(console, console.options, t).maximum for t in tables)
    grid = Table.grid(padding=(0, 2, 0, 0))
    if sum(widths) + 2 * (len(tables) - 1) <= text_width():
        grid.add_row(*tables)
    else:
        for table in tables:
            grid.add_row(table)
    return grid


def _memory(title: str, memory: Answer, peak: str) -> Table:
    # beside what fills the memory of a card kilobytes are noise
    least = min(MIB, memory["peak"] >> 10)
    terms = {name: n for name, n in memory["terms"].items() if n >= least}
    table = _table((title, ""), _filled(terms))
    table.add_row(peak, format_bytes(memory["peak"]), style="bold")
    table.add_row("may be used", format_bytes(memory["budget"]))
    if memory.get("reserve"):
        table.add_row("kept in reserve", format_bytes(memory["reserve"]))
    return table


def _step(step: Answer, head: str = "step") -> Table:
    table = _table((head, "busy", "compute waits for it"))
    for lane, busy in _filled(step["lanes"], format_seconds):
        waits = step["exposed"].get(lane)
        table.add_row(LANES[lane], busy, format_seconds(waits) if waits else "")
        if lane == "compute" and step["recompute"]:
            table.add_row("  recomputing", format_seconds(step["recompute"]))
    table.add_row("together", format_seconds(step["total"]), format_limiter(step))
    return table


def _table(heads: Row, rows: Iterable[Row] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _filled(
    values: Mapping[str, float], form: Callable[[float], str] = format_bytes
) -> list[tuple[str, str]]:
    """Rows of the values that are not zero."""
    return [(name, form(value)) for name, value in values.items() if value]


def text_width() -> int:
    """Columns of the terminal or of `COLUMNS`, within what can be read."""
    columns = shutil.get_terminal_size((WIDTH, 0)).columns
    return min(max(columns, NARROWEST), WIDEST)


def _printed(shown: Iterable[RenderableType]) -> str:
    text = StringIO()
    console = Console(file=text, width=text_width(), highlight=False, markup=False)
    for part in shown:
        console.print(part)
    return text.getvalue().rstrip()
