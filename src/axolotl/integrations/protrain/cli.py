"""`axolotl protrain …`: commands beside `axolotl train`."""

from __future__ import annotations

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
def keys() -> None:
    """List every key of the YAML with its default and meaning."""
    from .args import ProTrainArgs

    for name, field in ProTrainArgs.model_fields.items():
        default = "unset" if field.default is None else str(field.default)
        click.echo(f"{name} (default: {default.lower()})")
        click.echo(click.wrap_text(field.description or "", 88, "    ", "    "))
