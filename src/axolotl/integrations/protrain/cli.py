"""`axolotl protrain …`: commands beside `axolotl train`."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import click

from .core.errors import ProTrainError


@click.group()
def protrain() -> None:
    """Page a model that is larger than the device."""


@protrain.command()
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--steps", default=4, show_default=True, help="Optimizer steps of each run."
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for both runs, kept afterwards; a temporary one by default.",
)
def selftest(config: Path, steps: int, keep: Path | None) -> None:
    """Train CONFIG for a few steps with and without paging and compare.

    Exit code 0: losses, grad norms and weights agree; 1: they do not, or a run failed.
    """
    # imported here: `axolotl --help` reads this module
    from .selftest import run_selftest

    try:
        verdict = run_selftest(config, steps, keep, click.echo)
    except ProTrainError as error:
        raise click.ClickException(str(error)) from error
    click.echo(verdict.text())
    sys.exit(0 if verdict.passed else 1)


@protrain.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="NAME[:GiB]",
    help="A card to plan for, with other memory if given; again for several. "
    "This machine by default.",
)
@click.option(
    "--gpus",
    "num_gpus",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many of them.",
)
@click.option(
    "--ram",
    "ram_gib",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GiB",
    help="Host memory that may be used.",
)
@click.option("--link", help="Between host and card, for example pcie4x16.")
@click.option("--json", "as_json", is_flag=True, help="Print objects for programs.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page with the memory over a step and all cards side by side.",
)
@click.option(
    "--max",
    "largest",
    type=click.Choice(["seq", "batch", "rank"]),
    help="Ask for the largest sequence, micro-batch or adapter rank that fits.",
)
def plan(
    config: Path,
    gpus: tuple[str, ...],
    num_gpus: int,
    ram_gib: float | None,
    link: str | None,
    as_json: bool,
    html: Path | None,
    largest: str | None,
) -> None:
    """Say whether CONFIG fits, with which settings, and how fast it will be.

    Nothing is loaded or downloaded: the base model's config.json is enough. Exit
    code 0: it fits every card; 2: it does not fit one; 3: it cannot be planned.
    """
    # a tenth of the imports' time is the search for garbage that is not there
    gc.disable()
    # imported here: `axolotl --help` reads this module
    from .dry_run import EXIT_CODES, UNSUPPORTED, DryRun, Question, worst
    from .plan_text import largest_text, plan_text

    question = Question(config, gpus, num_gpus, ram_gib, link)
    try:
        dry_run = DryRun(question)
        answers = dry_run.largest(largest) if largest else dry_run.forecasts()
    except ProTrainError as error:
        if as_json:
            reason = {"verdict": UNSUPPORTED, "reason": str(error)}
            click.echo(json.dumps(reason, indent=2))
        else:
            click.echo(f"Error: {error}", err=True)
        sys.exit(EXIT_CODES[UNSUPPORTED])
    if html is not None and not largest:
        from .plan_page import plan_page

        html.write_text(plan_page(answers, config.name), "utf-8")
    drawn = ("timeline", "blocks")
    shown = [{k: v for k, v in a.items() if k not in drawn} for a in answers]
    if as_json:
        click.echo(json.dumps(shown if len(shown) > 1 else shown[0], indent=2))
    else:
        click.echo(largest_text(shown) if largest else plan_text(shown))
    if not largest:
        sys.exit(worst(answers))


@protrain.command()
def keys() -> None:
    """List every key of the YAML with its default and meaning."""
    from .args import ProTrainArgs

    for name, field in ProTrainArgs.model_fields.items():
        default = "unset" if field.default is None else str(field.default)
        click.echo(f"{name} (default: {default.lower()})")
        click.echo(click.wrap_text(field.description or "", 88, "    ", "    "))
