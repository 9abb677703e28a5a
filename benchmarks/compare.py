"""The same training under this plugin and under what people would use instead.

Each system trains the same model on the same batches in a process of its own. What
cannot run here is listed with its own error. Results go to a dated JSON file, which
later calls of the same day add to, and from it to Markdown and a plot.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from json import loads
from pathlib import Path
from typing import Any

import click
import torch
from comparison import report
from comparison.cases import CASES, GPU, QUICK, Case
from comparison.system_run import EXTENSIONS, SystemRun, build, prepare
from comparison.systems import COMPILED, EQUAL, LABELS, PEERS
from machine import command, describe

HERE = Path(__file__).parent
LARGE = ("32b", "70b", "8b")
"""Shapes whose systems do not all fit into one command of the GPU set."""
MINUTES = 30.0
GPU_MINUTES = 8.0
"""Of a command of the GPU set; what starts before them and ends after takes the rest."""
_FIRST, _SECOND = tuple(LABELS)[:4], tuple(LABELS)[4:]


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Cases for two CPU cores, half an hour.")
@click.option("--gpu", is_flag=True, help="Print the commands of the GPU set.")
@click.option("--case", "cases", multiple=True, type=click.Choice(list(CASES)))
@click.option(
    "--systems", default=",".join(LABELS), help="With commas; default: all of them."
)
@click.option(
    "--minutes", default=MINUTES, help="A command ends within these, or says why."
)
@click.option("--output", default=HERE / "results", type=click.Path(path_type=Path))
@click.option("--label", default="", help="Goes into the names of the files.")
@click.option(
    "--readme",
    type=click.Path(exists=True, path_type=Path),
    help="Measure nothing: write README's sentence from this JSON file.",
)
@click.option(
    "--redraw",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Measure nothing: put these JSON files together.",
)
def main(
    quick: bool,
    gpu: bool,
    cases: Sequence[str],
    systems: str,
    minutes: float,
    output: Path,
    label: str,
    readme: Path | None,
    redraw: Sequence[Path],
) -> None:
    if readme:
        report.write_readme(HERE.parent / "README.md", readme)
        return
    if gpu:
        for line in gpu_commands():
            click.echo(line)
        return
    if redraw:
        _publish(output / redraw[0].name, [loads(path.read_text()) for path in redraw])
        return
    chosen = QUICK if quick else tuple(CASES[name] for name in cases)
    if not chosen:
        raise click.UsageError("say --quick, --gpu or --case")
    names = systems.split(",")
    unknown = set(names) - set(LABELS)
    if unknown:
        raise click.BadParameter(
            f"{', '.join(sorted(unknown))}: not among {', '.join(LABELS)}",
            param_hint="--systems",
        )
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ.update(_environment())
    prepare(device_type)
    for name in set(names) & set(COMPILED):
        click.echo(f"building the kernels of {LABELS[name]} (minutes the first time)")
        build(name, device_type)
    deadline = time.monotonic() + minutes * 60
    stem = "-".join(
        part
        for part in (date.today().isoformat(), device_type, "compare", label)
        if part
    )
    path = output / f"{stem}.json"
    about = {"machine": describe(), "command": command()}
    num_measured = 0
    for record in _measure_all(chosen, names, device_type, deadline):
        num_measured += "excuse" not in record
        # at once: what comes next may end this process too
        report.merge(path, [{**about, "records": [record]}])
    _publish(path, [])
    if not num_measured:
        raise click.ClickException("nothing was measured; the table says why")


def _publish(path: Path, new: Sequence[dict[str, Any]]) -> None:
    """Add results to a JSON file and write the Markdown and the plot beside it."""
    results = report.merge(path, new)
    report.write(path.with_suffix(".md"), results)
    click.echo(f"written to {path.with_suffix('.md')}")
    wrong = report.unequal(results["records"])
    if wrong:
        raise click.ClickException(f"losses differ: {'; '.join(wrong)}")


def gpu_commands() -> Iterator[str]:
    """Each ends within 9 minutes on one GPU, 16 cores and 128 GB of host memory."""
    for case in GPU:
        for systems in (_FIRST, _SECOND) if case.shape in LARGE else (tuple(LABELS),):
            yield (
                f"python benchmarks/compare.py --case {case.name} "
                f"--systems {','.join(systems)} --minutes {GPU_MINUTES:g}"
            )


def _measure_all(
    cases: Sequence[Case], systems: Sequence[str], device_type: str, deadline: float
) -> Iterator[dict[str, Any]]:
    """Case by case; on a CPU the systems of a case take turns, step by step."""
    for case in cases:
        # what slows the machine for a while slows them all; a GPU has room for one
        size = len(systems) if device_type == "cpu" else 1
        for first in range(0, len(systems), size):
            group = systems[first : first + size]
            for record in _in_turns(case, group, device_type, deadline):
                _say(case, record)
                yield record


def _in_turns(
    case: Case, systems: Sequence[str], device_type: str, deadline: float
) -> list[dict[str, Any]]:
    with ExitStack() as ends:
        runs: dict[str, SystemRun] = {}

        def start(system: str, case: Case) -> None:
            runs[system] = run = SystemRun(case, system, device_type)
            ends.callback(run.close)
            # alone until it is warm: time to the first step is one of the figures
            run.wait(deadline)
            for _ in range(case.warmup):
                run.begin_step()
                run.wait(deadline)

        for system in systems:
            if system != EQUAL:
                start(system, case)
        if EQUAL in systems:
            start(EQUAL, replace(case, capacity_bytes=_of_peer(runs, case)))
        for _ in range(case.steps):
            for run in runs.values():
                run.begin_step()
                run.wait(deadline)
        return [run.record() for run in runs.values()]


def _of_peer(runs: Mapping[str, SystemRun], case: Case) -> int:
    """Device memory of the first peer that runs."""
    peaks = (runs[peer].peak_bytes for peer in PEERS if peer in runs)
    return next((peak for peak in peaks if peak), case.capacity_bytes)


def _say(case: Case, record: dict[str, Any]) -> None:
    said = record.get("excuse")
    if said is None:
        tokens_s = case.tokens / statistics.median(record["step_s"])
        peak = report.size(record["device_allocated_bytes"])
        said = f"{tokens_s:,.0f} tokens/s, device peak {peak}"
    click.echo(f"{case.name:18} {LABELS[record['system']]:28} {said}")


def _environment() -> dict[str, str]:
    """Of all systems alike."""
    cores = len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": str(cores),
        # those whose turn it is not must not spin
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
        # products must round alike wherever a weight lies
        "MKL_CBWR": "AUTO,STRICT",
        # what deterministic cuBLAS asks for
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # else pieces of a small limit are free and of no use
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
    }


if __name__ == "__main__":
    main()
