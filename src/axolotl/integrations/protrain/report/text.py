"""A plan as text for a terminal, from the objects that `--json` prints."""

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
    LANES,
    MODES,
    VERDICTS,
    forecast_dict,
    format_bytes,
    format_policies,
    format_rate,
    format_runs,
    format_terms,
)

WIDTH = 100


def plan_text(answers: Sequence[Mapping[str, Any]]) -> str:
    """All cards: a line for each, then what each of them needs and takes."""
    text = StringIO()
    console = Console(file=text, width=WIDTH, highlight=False)
    if len(answers) > 1:
        console.print(_overview(answers))
    for answer in answers:
        _one(console, answer)
    console.print("Assumed and not known:")
    for line in dict.fromkeys(line for a in answers for line in a["assumptions"]):
        console.print(_item(line))
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
        line = f"{name}: {found['key']} up to {found['value']} (now {found['now']})"
        line += f", then {_speed(answer['step_s'], answer['tokens_per_s'])}"
        line += f", {format_bytes(answer['device_peak_bytes'])} of the device"
        lines.append(f"{line}; {found['note']}" if found["note"] else line)
    return "\n".join(lines)


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    return table


def _overview(answers: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("card", "verdict", "device", "of", "host", "of", "step", "tokens/s")
    for answer in answers:
        device, host = answer["device_bytes"], answer["host_bytes"]
        step = answer["step_s"]
        table.add_row(
            answer["hardware"]["name"],
            VERDICTS[answer["verdict"]],
            format_bytes(device["peak"]),
            format_bytes(device["budget"]),
            format_bytes(host["peak"]),
            format_bytes(host["budget"]),
            f"{step['total']:.3g} s" if step else "-",
            format_rate(step["tokens_per_s"]) if step else "-",
        )
    return table


def _one(console: Console, answer: Mapping[str, Any]) -> None:
    plan, step, hardware = answer["plan"], answer["step_s"], answer["hardware"]
    head = hardware["name"] + (f" on {hardware['link']}" if hardware["link"] else "")
    head += f": {VERDICTS[answer['verdict']]}"
    fits = answer["verdict"] == "fits"
    if fits:
        head += f", {_speed(step['total'], step['tokens_per_s'])}"
    console.print(head, markup=False)
    if answer["reason"]:
        console.print(answer["reason"], markup=False)
    if not fits:
        _print_alternatives(console, answer)
    console.print(
        f"{'Plan' if fits else 'The plan that comes nearest'}: mode {plan['mode']} "
        f"({MODES[plan['mode']]}), {_ranks(plan)}n_persist {plan['n_persist']} of "
        f"{plan['num_chunks']} chunks, n_buffer {plan['n_buffer']}, n_swap "
        f"{plan['n_swap']}, n_checkpoint {plan['n_checkpoint']} of "
        f"{plan['num_blocks']} blocks ({format_policies(plan['block_policies'])})",
        markup=False,
    )
    side_by_side = Table.grid(padding=(0, 6, 0, 0))
    each, every = "device", "host"
    if plan["num_ranks"] > 1:
        each, every = "each device", "host of all ranks"
    side_by_side.add_row(
        _device(each, answer["device_bytes"]), _host(every, answer["host_bytes"])
    )
    console.print(side_by_side)
    if step:
        console.print(_lanes(step))
    if fits:
        _print_alternatives(console, answer)


def _speed(step_s: float, tokens_per_s: float) -> str:
    return f"{step_s:.3g} s a step, {format_rate(tokens_per_s)} tokens/s"


def _ranks(plan: Mapping[str, Any]) -> str:
    return f"{plan['num_ranks']} ranks, " if plan["num_ranks"] > 1 else ""


def _device(name: str, memory: Mapping[str, Any]) -> Table:
    return _memory(f"{name}, at {memory['peak_at']}", memory, "peak")


def _host(name: str, memory: Mapping[str, Any]) -> Table:
    """Its terms are those of training; loading may take more."""
    phases = memory["phases"]
    highest = max(phases, key=phases.__getitem__)
    return _memory(f"{name}, while training", memory, f"peak ({highest})")


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
    for lane, seconds in step["lanes"].items():
        if seconds:
            waits = step["exposed"].get(lane)
            waited = "" if waits is None else f"{waits:.3g} s"
            table.add_row(LANES[lane], f"{seconds:.3g} s", waited)
            if lane == "compute" and step["recompute"]:
                table.add_row("  recomputing", f"{step['recompute']:.3g} s", "")
    table.add_section()
    limiter = f"limited by {LANES[step['limiter']]}"
    table.add_row("together", f"{step['total']:.3g} s", limiter)
    return table


def _print_alternatives(console: Console, answer: Mapping[str, Any]) -> None:
    if not answer["alternatives"]:
        return
    table = _table("instead", "verdict", "device", "step", "tokens/s", "note")
    table.columns[1].justify = table.columns[5].justify = "left"
    table.columns[5].overflow = "fold"
    for column in table.columns[:5]:
        column.no_wrap = True
    for other in answer["alternatives"]:
        fits = other["step_s"] is not None
        table.add_row(
            other["change"],
            VERDICTS[other["verdict"]],
            format_bytes(other["device_peak_bytes"]) if fits else "-",
            f"{other['step_s']:.3g} s" if fits else "-",
            format_rate(other["tokens_per_s"]) if fits else "-",
            other["note"] or "",
        )
    console.print(table)


def _item(text: str) -> Table:
    """A line of a list, hanging."""
    item = Table.grid()
    item.add_row("  - ", Padding(text, 0))
    return item


def forecast_table(forecast: Forecast, device: str) -> str:
    """A plan and what it will cost, for the log of a training."""
    layout, placements = forecast.layout, forecast.plan.placements
    world = forecast.workload.world
    shown = forecast_dict(forecast)
    plan, step = shown["plan"], shown["step_s"]
    on_device, on_host = shown["device_bytes"], shown["host_bytes"]
    outside = [placements[c.index].value for c in layout.chunks if not c.pageable]
    table = Table(title=f"ProTrain plan ({plan['origin']})", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("detail")
    for row in (
        ("mode", plan["mode"], MODES[plan["mode"]]),
        ("ranks", str(plan["num_ranks"]), f"{world.local_size} on each node"),
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
            f"{forecast.device.peak.label}: {format_terms(on_device['terms'])}",
        ),
        (
            "host (all its ranks)" if world.local_size > 1 else "host",
            format_bytes(on_host["peak"]),
            f"of {format_bytes(on_host['budget'])}: {format_terms(on_host['terms'])}",
        ),
        (
            "step",
            f"{step['total']:.3g} s",
            f"{format_rate(step['tokens_per_s'])} tokens/s, limited by "
            f"{LANES[step['limiter']]}; "
            + ", ".join(f"{LANES[k]} {s:.3g} s" for k, s in step["lanes"].items() if s),
        ),
    ):
        table.add_row(*row)
    text = StringIO()
    Console(file=text, width=110).print(table)
    return text.getvalue().rstrip()
