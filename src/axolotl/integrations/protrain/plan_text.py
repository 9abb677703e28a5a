"""A plan as text for a terminal, from the objects that `--json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from .report import format_bytes

WIDTH = 100


def plan_text(answers: Sequence[Mapping[str, Any]]) -> str:
    """All cards: a line for each, then what each of them needs and takes."""
    text = StringIO()
    console = Console(file=text, width=WIDTH, highlight=False)
    if len(answers) > 1:
        console.print(_overview(answers))
    for answer in answers:
        _one(console, answer)
    lines = dict.fromkeys(line for a in answers for line in a["assumptions"])
    console.print("Assumed:")
    for line in lines:
        console.print(f"  - {line}", markup=False)
    return text.getvalue().rstrip()


def largest_text(answers: Sequence[Mapping[str, Any]]) -> str:
    """The answers of `--max`."""
    return "\n".join(
        f"{a['hardware']['name']}: {a['max']['key']} up to {a['max']['value']}"
        if a["max"]["value"] is not None
        else f"{a['hardware']['name']}: no {a['max']['key']} fits"
        for a in answers
    )


def _overview(answers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("card", "verdict", "device", "of", "host", "step", "tokens/s")
    for answer in answers:
        device, step = answer["device_bytes"], answer["step_s"]
        table.add_row(
            answer["hardware"]["name"],
            answer["verdict"],
            format_bytes(device["peak"]),
            format_bytes(device["budget"]),
            format_bytes(answer["host_bytes"]["peak"]),
            f"{step['total']:.3g} s" if step else "-",
            f"{step['tokens_per_s']:.4g}" if step else "-",
        )
    return table


def _one(console: Console, answer: Mapping[str, Any]) -> None:
    plan, step = answer["plan"], answer["step_s"]
    console.print()
    console.print(f"{answer['hardware']['name']}: {answer['verdict']}", style="bold")
    if answer["reason"]:
        console.print(answer["reason"], markup=False)
    console.print(
        f"mode {plan['mode']}: n_persist {plan['n_persist']} of {plan['num_chunks']} "
        f"chunks, n_buffer {plan['n_buffer']}, n_swap {plan['n_swap']}, n_checkpoint "
        f"{plan['n_checkpoint']} of {plan['num_blocks']} blocks"
    )
    console.print(f"blocks: {_row(plan['block_policies'])}")
    for where in ("device", "host"):
        console.print(_terms(where, answer[f"{where}_bytes"]))
    if step:
        console.print(_lanes(step))
    if answer["alternatives"]:
        console.print(_alternatives(answer["alternatives"]))


def _row(policies: Sequence[str]) -> str:
    """`keep keep recompute` as `2 keep, 1 recompute`."""
    runs: list[list[Any]] = []
    for policy in policies:
        if runs and runs[-1][1] == policy:
            runs[-1][0] += 1
        else:
            runs.append([1, policy])
    return ", ".join(f"{count} {policy}" for count, policy in runs)


def _terms(where: str, memory: Mapping[str, Any]) -> Table:
    table = Table(where, "bytes", title_justify="left")
    for name, nbytes in memory["terms"].items():
        if nbytes:
            table.add_row(name, format_bytes(nbytes))
    table.add_section()
    table.add_row("peak", format_bytes(memory["peak"]))
    table.add_row("may be used", format_bytes(memory["budget"]))
    phases = ", ".join(
        f"{phase} {format_bytes(nbytes)}" for phase, nbytes in memory["phases"].items()
    )
    table.caption = phases
    return table


def _lanes(step: Mapping[str, Any]) -> Table:
    table = Table("step", "busy", "compute waits")
    for lane, seconds in step["lanes"].items():
        if seconds:
            waits = step["exposed"].get(lane)
            table.add_row(
                lane, f"{seconds:.3g} s", f"{waits:.3g} s" if waits is not None else ""
            )
    table.add_section()
    table.add_row("total", f"{step['total']:.3g} s", f"bound by {step['limiter']}")
    table.add_row("", f"{step['tokens_per_s']:.4g} tokens/s", "")
    return table


def _alternatives(alternatives: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("instead", "verdict", "device", "step", "tokens/s")
    for other in alternatives:
        fits = other["step_s"] is not None
        table.add_row(
            other["change"],
            other["verdict"],
            format_bytes(other["device_peak_bytes"]) if fits else "-",
            f"{other['step_s']:.3g} s" if fits else "-",
            f"{other['tokens_per_s']:.4g}" if fits else "-",
        )
    return table
