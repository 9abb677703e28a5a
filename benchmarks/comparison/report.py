"""Results of one machine and day: raw JSON, Markdown, and a plot of time and memory."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .cases import CASES, MIB, Case
from .system_run import NOT_IN_TIME
from .systems import EQUAL, EXACT, LABELS, PEERS, REFERENCE

Record = Mapping[str, Any]

OTHER_ROUNDING = 1e-3
"""Relative difference that a loss may have where one update rounds otherwise."""
NOISE = 0.2
"""Of the reference's quartiles over its median: beyond, a ratio would be the machine's."""


def merge(path: Path, new: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Add results to a JSON file, records in the place of those of the same case and
    system; returns all of it.

    Args:
        path: The file; need not exist.
        new: Each with `machine`, `command` and `records`, the last one winning, unless
            it had no time.
    """
    results = [json.loads(path.read_text())] if path.exists() else []
    results += new
    by_key = {}
    for result in results:
        for record in result["records"]:
            # calls of one day may be of several commits
            own = {"commit": result["machine"]["commit"], **record}
            key = record["case"]["name"], record["system"]
            if key not in by_key or record.get("excuse") != NOT_IN_TIME:
                by_key[key] = own
    merged = {
        "machine": results[-1]["machine"],
        "command": results[-1]["command"],
        "records": sorted(by_key.values(), key=_order),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(merged, indent=1))
    return merged


def _order(record: Record) -> tuple[int, int]:
    return (
        list(CASES).index(record["case"]["name"]),
        list(LABELS).index(record["system"]),
    )


def write(path: Path, results: Mapping[str, Any]) -> None:
    """The Markdown file at `path` and the plot beside it, where matplotlib is."""
    records = results["records"]
    commits = ", ".join(dict.fromkeys(record["commit"] for record in records))
    machine = {**results["machine"], "commit": commits}
    if importlib.util.find_spec("matplotlib") is None:
        figure = f"No plot: matplotlib is not installed; `--redraw {path.stem}.json`."
    else:
        plot(path.with_suffix(".svg"), records)
        figure = f"![seconds of a step against device memory]({path.stem}.svg)"
    lines = [
        f"# {path.stem}",
        "",
        "; ".join(f"{name} {value}" for name, value in machine.items()) + ".",
        "",
        f"Command: `{results['command']}`. Raw figures, step by step, and each system's "
        f"configuration: [{path.stem}.json]({path.stem}.json).",
        "How to read the columns: [README](../README.md#how-to-read-comparepy).",
        "",
        figure,
        "",
    ]
    for case, of_case in by_case(records):
        lines += [f"## {case.name}", "", _sentence(case), "", *_table(of_case), ""]
        lines += [*_ratios(of_case), *_excuses(of_case), *_roofline(of_case)]
    path.write_text("\n".join(lines).rstrip() + "\n")


def plot(path: Path, records: Sequence[Record]) -> None:
    """Time against memory, one point a system, one field a case."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "protrain"})
    cases = by_case(records)
    columns = min(3, len(cases))
    rows = -(-len(cases) // columns)
    figure, fields = pyplot.subplots(
        rows, columns, figsize=(4.6 * columns, 3.6 * rows), squeeze=False
    )
    for field in fields.flat[len(cases) :]:
        field.set_visible(False)
    for field, (case, of_case) in zip(fields.flat, cases, strict=False):
        field.set_title(case.name, fontsize=10)
        field.axvline(case.capacity_bytes / MIB, color="0.8", zorder=0)
        for number, (system, label) in enumerate(LABELS.items()):
            for record in of_case:
                if record["system"] == system and "excuse" not in record:
                    _draw(field, record, label, f"C{number}")
        field.set_xlabel("device peak, MiB")
        field.set_ylabel("seconds a step")
        # points at an edge would be cut in half
        field.set_ylim(0, 1.1 * field.get_ylim()[1])
        field.set_xlim(0, 1.1 * field.get_xlim()[1])
        field.legend(fontsize=6, loc="best")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw(field: Any, record: Record, label: str, colour: str) -> None:
    seconds = statistics.median(record["step_s"])
    peak = record["device_allocated_bytes"]
    if peak is None:
        # device and host are one memory to it, so only its time is known
        field.axhline(seconds, color=colour, linestyle=":", label=label)
    else:
        field.plot([peak / MIB], [seconds], "o", color=colour, label=label)


def by_case(records: Sequence[Record]) -> list[tuple[Case, list[Record]]]:
    """Group records by their case, in the order of their first ones."""
    names = dict.fromkeys(record["case"]["name"] for record in records)
    return [
        (
            Case(**next(r["case"] for r in records if r["case"]["name"] == name)),
            [r for r in records if r["case"]["name"] == name],
        )
        for name in names
    ]


def _sentence(case: Case) -> str:
    recompute = "recompute every block" if case.recompute else "recompute nothing"
    return (
        f"{case.shape} Llama, {case.method}, {case.precision}, {case.rows} x "
        f"{case.length} tokens a step, device memory capped at "
        f"{size(case.capacity_bytes)}; peers that offload {recompute}. {case.warmup} steps of "
        f"warm-up, {case.steps} timed."
    )


def size(nbytes: float | None) -> str:
    if nbytes is None:
        return "–"
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


_HEAD = (
    "system",
    "tokens/s",
    "quartiles",
    "device peak",
    "reserved",
    "host resident",
    "pinned",
    "first step",
    "to device",
    "from device",
    "last loss",
    "losses against plain",
)


def _table(of_case: Sequence[Record]) -> list[str]:
    measured = [record for record in of_case if "excuse" not in record]
    reference = next((r for r in measured if r["system"] == REFERENCE), None)
    lines = [_row(_HEAD), _row(["---", *["---:"] * (len(_HEAD) - 2), "---"])]
    for record in measured:
        seconds = record["step_s"]
        low, middle, high = (
            statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
        )
        tokens = record["tokens"]
        to, back = record["copied_bytes"] or record["moved_bytes"] or (None, None)
        lines.append(
            _row(
                (
                    _label(record),
                    f"{tokens / middle:,.0f}",
                    f"{tokens / high:,.0f} – {tokens / low:,.0f}",
                    _peak(record),
                    size(record["device_reserved_bytes"]),
                    size(record["host_resident_bytes"]),
                    size(record["host_pinned_bytes"] or None),
                    f"{record['first_step_s']:.1f} s",
                    size(to),
                    size(back),
                    f"{record['losses'][-1]:.6f}",
                    agreement(record, reference),
                )
            )
        )
    return lines


def _peak(record: Record) -> str:
    """Device peak, marked where it is beyond what the case allows."""
    peak, case = record["device_allocated_bytes"], record["case"]
    over = peak is not None and peak > case["capacity_bytes"]
    return size(peak) + " (over)" * over


def ratio(of_case: Sequence[Record], ours: str, other: str) -> float | None:
    """Tokens per second of one system over another's in a case; None where one has none,
    or where the reference's steps vary by more than `NOISE`."""
    seconds = {r["system"]: r["step_s"] for r in of_case if "excuse" not in r}
    if not {ours, other, REFERENCE} <= seconds.keys():
        return None
    low, middle, high = statistics.quantiles(seconds[REFERENCE], n=4)
    if high - low > NOISE * middle:
        return None
    return statistics.median(seconds[other]) / statistics.median(seconds[ours])


def _ratios(of_case: Sequence[Record]) -> list[str]:
    lines = []
    for ours in ("ours", EQUAL):
        if not any(r["system"] == ours and "excuse" not in r for r in of_case):
            continue
        found = [
            f"{LABELS[other]} {'open' if value is None else format(value, '.2f')}"
            for other in (REFERENCE, "plain_recompute", *PEERS)
            if any(r["system"] == other and "excuse" not in r for r in of_case)
            for value in [ratio(of_case, ours, other)]
        ]
        if found:
            lines.append(f"{LABELS[ours]} over {', '.join(found)}.  ")
    return [*lines, ""] if lines else []


README_MARK = "<!-- compared -->"


def write_readme(readme: Path, results: Path) -> None:
    """Write what a file of results says between the marks of README."""
    before, _, after = readme.read_text().split(README_MARK)
    said = sentence(results.name[:10], json.loads(results.read_text())["records"])
    readme.write_text(f"{before}{README_MARK}{said}{README_MARK}{after}")


def sentence(day: str, records: Sequence[Record]) -> str:
    """Say in one sentence how this plugin compares, by ratios of medians of cases in
    which plain training does not fit."""
    tight = [
        of_case
        for _, of_case in by_case(records)
        if any(
            r["system"] == "plain" and "OutOfMemoryError" in r.get("excuse", "")
            for r in of_case
        )
    ]

    def span(ours: str, other: str) -> str:
        found = [r for case in tight if (r := ratio(case, ours, other)) is not None]
        if not found:
            return "an open number"
        return f"{min(found):.2f} to {max(found):.2f} (median {statistics.median(found):.2f})"

    count = sum(ratio(case, "ours", REFERENCE) is not None for case in tight)
    busy = f" ({len(tight) - count} more while others used the machine: open)"
    said = (
        f"on {day}, two CPU cores, {count} trainings{busy * (count < len(tight))} with "
        "equal losses, at limits of memory that plain training does not fit under: "
        f"{span('ours', REFERENCE)} of the speed of plain training without a limit, "
        f"{span('ours', 'fsdp2')} times FSDP2, {span('ours', 'zero3')} times ZeRO-3, "
        "which are held to no limit; with the memory of FSDP2 "
        f"{span(EQUAL, 'fsdp2')} times FSDP2 and {span(EQUAL, 'zero3')} times ZeRO-3 "
        "([benchmarks](benchmarks/README.md))."
    )
    return f"\n{textwrap.fill(said, 100, break_on_hyphens=False)}\n"


def _label(record: Record) -> str:
    recomputes = record["config"].get("recompute") is True
    return LABELS[record["system"]] + ", recompute" * recomputes


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def difference(record: Record, reference: Record) -> float:
    """Largest relative difference of a loss; infinite if one is not a number."""
    pairs = zip(record["losses"], reference["losses"], strict=True)
    apart = [abs(loss - plain) / abs(plain) for loss, plain in pairs]
    return math.inf if any(map(math.isnan, apart)) else max(apart)


def agreement(record: Record, reference: Record | None) -> str:
    """How the losses compare, and the system's own reason to differ."""
    if reference is None:
        return "no reference"
    apart = difference(record, reference)
    text = "equal" if apart == 0 else f"{apart:.1e} apart"
    return f"{text}; {record['arithmetic']}" if record["arithmetic"] else text


def unequal(records: Sequence[Record]) -> list[str]:
    """Cases and systems that promise plain training's losses and have others.

    To the last bit, unless the system names arithmetic of its own.
    """
    wrong = []
    for case, of_case in by_case(records):
        measured = {r["system"]: r for r in of_case if "excuse" not in r}
        reference = measured.get(REFERENCE)
        if reference is None:
            continue
        wrong += [
            f"{case.name}: {LABELS[system]}"
            for system in EXACT
            if system in measured
            and difference(measured[system], reference)
            > (OTHER_ROUNDING if measured[system]["arithmetic"] else 0)
        ]
    return wrong


def _excuses(of_case: Sequence[Record]) -> list[str]:
    excused = [record for record in of_case if "excuse" in record]
    if not excused:
        return []
    lines = [f"- {LABELS[record['system']]}: {record['excuse']}" for record in excused]
    return ["Not measured, in their own words:", "", *lines, ""]


def _roofline(of_case: Sequence[Record]) -> list[str]:
    ours = next(
        (r for r in of_case if r["system"] == "ours" and "excuse" not in r), None
    )
    if ours is None:
        return []
    record = ours["record"]
    roof, plan = record["roofline"], record["plan"]
    step_s = statistics.median(ours["step_s"])
    return [
        f"Roofline: compute {roof['compute_s']:.3f} s ({roof['flops'] / 1e12:.3f} TFLOP), "
        f"to the device {roof['fetch_s']:.3f} s ({size(roof['fetched_bytes'])}), from it "
        f"{roof['offload_s']:.3f} s ({size(roof['offloaded_bytes'])}), host update "
        f"{roof['update_s']:.3f} s; floor {roof['floor_s']:.3f} s, ours "
        f"{step_s:.3f} s: {roof['floor_s'] / step_s:.0%} of it. Plan: mode "
        f"{plan['mode']}, n_persist {plan['n_persist']}, n_buffer {plan['n_buffer']}, "
        f"n_swap {plan['n_swap']}, n_checkpoint {plan['n_checkpoint']}; predicted step "
        f"{record['predicted']['step_s']:.3f} s, peak "
        f"{size(record['predicted']['device_peak_bytes'])}.",
        "",
    ]
