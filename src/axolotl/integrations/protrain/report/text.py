"""A plan as text: a table for the log of a training, pages for `axolotl protrain plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from ..core.planner import Forecast
from .forecast import (
    FITS,
    LANES,
    MODES,
    VERDICTS,
    forecast_dict,
    format_bytes,
    format_limiter,
    format_pace,
    format_policies,
    format_rate,
    format_runs,
    format_seconds,
    format_speed,
    highest_phase,
)

WIDTH, LOG_WIDTH = 100, 110


def forecast_table(forecast: Forecast, device: str) -> str:
    """What a training on `device` will do and what that will cost."""
    layout, placements = forecast.layout, forecast.plan.placements
    local_size = forecast.workload.world.local_size
    shown = forecast_dict(forecast)
    plan, step = shown["plan"], shown["step_s"]
    on_device, on_host = shown["device_bytes"], shown["host_bytes"]
    outside = [placements[c.index].value for c in layout.chunks if not c.pageable]
    busy = ((LANES[lane], s) for lane, s in step["lanes"].items() if s)
    table = Table(title=f"ProTrain plan ({plan['origin']})", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("detail")
    for row in (
        ("mode", plan["mode"], MODES[plan["mode"]]),
        ("ranks", str(plan["num_ranks"]), f"{local_size} on each node"),
        (
            "resident chunks",
            f"{plan['n_persist']} of {plan['num_chunks']}",
            format_runs(plan["resident_chunks"]),
        ),
        ("slots", str(plan["n_buffer"]), format_bytes(forecast.device.states.slots)),
        (
            "activations",
            f"n_swap {plan['n_swap']}, n_checkpoint {plan['n_checkpoint']}",
            f"of {plan['num_blocks']} blocks: {format_policies(plan['block_policies'])}",
        ),
        (
            "outside blocks",
            ", ".join(sorted(set(outside))) or "frozen, resident",
            f"{len(outside)} trainable",
        ),
        (
            f"device ({device})",
            format_bytes(on_device["peak"]),
            f"of {format_bytes(on_device['budget'])}, at "
            f"{forecast.device.peak.label}: {_listed(on_device['terms'])}",
        ),
        (
            "host (all its ranks)" if local_size > 1 else "host",
            format_bytes(on_host["peak"]),
            f"of {format_bytes(on_host['budget'])}: {_listed(on_host['terms'])}",
        ),
        (
            "step",
            format_seconds(step["total"]),
            f"{format_speed(step['tokens_per_s'])}, {format_limiter(step)}; "
            + ", ".join(f"{lane} {format_seconds(s)}" for lane, s in busy),
        ),
    ):
        table.add_row(*row)
    text = StringIO()
    Console(file=text, width=LOG_WIDTH).print(table)
    return text.getvalue().rstrip()


def plan_text(answers: Sequence[Mapping[str, Any]]) -> str:
    """All cards: a line for each, then what each of them needs and takes.

    Args:
        answers: What `--json` prints.
    """
    text = StringIO()
    console = Console(file=text, width=WIDTH, highlight=False, markup=False)
    if len(answers) > 1:
        console.print(_overview(answers))
    for answer in answers:
        _print_card(console, answer)
    console.print("Assumed and not known:")
    for line in dict.fromkeys(line for a in answers for line in a["assumptions"]):
        hanging = Table.grid()
        hanging.add_row("  - ", Padding(line, 0))
        console.print(hanging)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    paragraphs = (list(run) for filled, run in groupby(lines, bool) if filled)
    return "\n\n".join("\n".join(paragraph) for paragraph in paragraphs)


def largest_text(answers: Sequence[Mapping[str, Any]]) -> str:
    """The answers of `--max`, a line for each card."""
    lines = []
    for answer in answers:
        found, name = answer["max"], answer["hardware"]["name"]
        if found["value"] is None:
            lines.append(f"{name}: no {found['key']} fits")
            continue
        speed = format_pace(answer["step_s"], answer["tokens_per_s"])
        lines.append(
            f"{name}: {found['key']} up to {found['value']} (now {found['now']}), then "
            f"{speed}, {format_bytes(answer['device_peak_bytes'])} of the device"
            + (f"; {found['note']}" if found["note"] else "")
        )
    return "\n".join(lines)


def _print_card(console: Console, answer: Mapping[str, Any]) -> None:
    plan, step, hardware = answer["plan"], answer["step_s"], answer["hardware"]
    fits = answer["verdict"] == FITS
    head = hardware["name"] + (f" on {hardware['link']}" if hardware["link"] else "")
    head += f": {VERDICTS[answer['verdict']]}"
    console.print(
        f"{head}, {format_pace(step['total'], step['tokens_per_s'])}" if fits else head
    )
    if answer["reason"]:
        console.print(answer["reason"])
    if not fits and answer["alternatives"]:
        console.print(_alternatives(answer["alternatives"]))
    ranks, device, host = "", "device", "host"
    if plan["num_ranks"] > 1:
        ranks, device = f"{plan['num_ranks']} ranks, ", "each device"
        host = "host of all ranks"
    console.print(
        f"{'Plan' if fits else 'The plan that comes nearest'}: mode {plan['mode']} "
        f"({MODES[plan['mode']]}), {ranks}n_persist {plan['n_persist']} of "
        f"{plan['num_chunks']} chunks, n_buffer {plan['n_buffer']}, n_swap "
        f"{plan['n_swap']}, n_checkpoint {plan['n_checkpoint']} of "
        f"{plan['num_blocks']} blocks ({format_policies(plan['block_policies'])})"
    )
    on_device, on_host = answer["device_bytes"], answer["host_bytes"]
    side_by_side = Table.grid(padding=(0, 6, 0, 0))
    # the host's terms are those of training; loading or saving may take more
    side_by_side.add_row(
        _memory(f"{device}, at {on_device['peak_at']}", on_device, "peak"),
        _memory(
            f"{host}, while training",
            on_host,
            f"peak ({highest_phase(on_host['phases'])})",
        ),
    )
    console.print(side_by_side)
    if step:
        console.print(_lanes(step))
    if fits and answer["alternatives"]:
        console.print(_alternatives(answer["alternatives"]))


def _overview(answers: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("card", "verdict", "device", "of", "host", "of", "step", "tokens/s")
    for answer in answers:
        memories = (answer["device_bytes"], answer["host_bytes"])
        step = answer["step_s"]
        table.add_row(
            answer["hardware"]["name"],
            VERDICTS[answer["verdict"]],
            *(
                format_bytes(m[figure])
                for m in memories
                for figure in ("peak", "budget")
            ),
            format_seconds(step["total"]) if step else "-",
            format_rate(step["tokens_per_s"]) if step else "-",
        )
    return table


def _memory(title: str, memory: Mapping[str, Any], peak: str) -> Table:
    table = _table(title, "")
    for name, nbytes in memory["terms"].items():
        if nbytes:
            table.add_row(name, format_bytes(nbytes))
    table.add_section()
    table.add_row(peak, format_bytes(memory["peak"]))
    table.add_row("may be used", format_bytes(memory["budget"]))
    if memory.get("reserve"):
        table.add_row("kept in reserve", format_bytes(memory["reserve"]))
    return table


def _lanes(step: Mapping[str, Any]) -> Table:
    table = _table("step", "busy", "compute waits for it")
    for lane, busy in step["lanes"].items():
        if busy:
            waits = step["exposed"].get(lane)
            waited = "" if waits is None else format_seconds(waits)
            table.add_row(LANES[lane], format_seconds(busy), waited)
            if lane == "compute" and step["recompute"]:
                table.add_row("  recomputing", format_seconds(step["recompute"]), "")
    table.add_section()
    table.add_row("together", format_seconds(step["total"]), format_limiter(step))
    return table


def _alternatives(others: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("instead", "verdict", "device", "step", "tokens/s", "note")
    table.columns[1].justify = table.columns[5].justify = "left"
    table.columns[5].overflow = "fold"
    for column in table.columns[:5]:
        column.no_wrap = True
    for other in others:
        fits = other["step_s"] is not None
        table.add_row(
            other["change"],
            VERDICTS[other["verdict"]],
            format_bytes(other["device_peak_bytes"]) if fits else "-",
            format_seconds(other["step_s"]) if fits else "-",
            format_rate(other["tokens_per_s"]) if fits else "-",
            other["note"] or "",
        )
    return table


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    return table


def _listed(terms: Mapping[str, int]) -> str:
    present = ((name, nbytes) for name, nbytes in terms.items() if nbytes)
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in present)
