"""`axolotl protrain …`: commands beside `axolotl train`.

`axolotl --help` reads this module, so commands import what they need.
"""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import (
    ExitStack,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from ..core.errors import ConfigError, ProTrainError, printable
from ..core.sizes import format_bytes, parse_bytes, parse_gib

if TYPE_CHECKING:
    from ..core.planner.cards import Gpu
    from .doctor import Finding


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    package_name="axolotl-protrain", message="%(package)s %(version)s"
)
def protrain() -> None:
    """Page a model that is larger than the device.

    \b
    axolotl-protrain plan config.yaml --gpu 4090
    axolotl-protrain migrate config.yaml --write
    """


class _Unplanned(click.ClickException):
    """A question that has no answer: on stderr, a line for each reason."""

    exit_code = 3

    def __init__(self, message: str) -> None:
        lines = (" ".join(line.split()) for line in message.splitlines())
        super().__init__(printable("\n".join(filter(None, lines))))


class _Command(click.Command):
    """Says without a traceback what a person can put right, and ends with 3 where that
    is the YAML, else with 1."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            raise self.failure(error.format_message()) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # who reads has enough: click ends in silence
            raise
        except (ProTrainError, OSError) as error:
            unusable = isinstance(error, ConfigError)
            kind = _Unplanned if unusable else self.failure
            raise kind(str(error)) from error

    def failure(self, message: str) -> click.ClickException:
        return click.ClickException(printable(message))


class _AnswerCommand(_Command):
    """Ends with 3 then; 2 is an answer: it does not fit, it differs."""

    def failure(self, message: str) -> click.ClickException:
        return _Unplanned(message)


@protrain.command("selftest", cls=_Command)
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Optimizer steps of each run.",
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for both runs, kept afterwards; a temporary one by default.",
)
def _selftest(config: Path, steps: int, keep: Path | None) -> None:
    """Train CONFIG for a few steps with and without paging and compare.

    Exit code 0: losses, grad norms and weights agree; 1: they do not, or a run failed;
    3: CONFIG cannot be trained.

    \b
    axolotl-protrain selftest config.yaml --steps 8
    """
    from ..checks import checked_yaml

    # before the seconds that Axolotl's imports take
    checked_yaml(config)
    from .selftest import run_selftest

    verdict = run_selftest(config, steps, keep, click.echo)
    click.echo(verdict.text())
    sys.exit(0 if verdict.passed else 1)


@protrain.command("doctor", cls=_AnswerCommand)
@click.option("--json", "as_json", is_flag=True, help="Print an object for reports.")
@click.option(
    "--disk",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder as `protrain_disk_dir`: measure what it reads, with 128 MiB.",
)
def _doctor(as_json: bool, disk: Path | None) -> None:
    """Look at this machine: what paged training gets from it, and what is in the way.

    Takes a minute at most. Exit code 0: nothing is; 2: training would work, but badly;
    3: it would not.

    \b
    axolotl-protrain doctor
    axolotl-protrain doctor --disk /scratch/protrain --json
    """
    lines: list[Finding] = []
    with _Progress(sys.stderr) as say, _silence():
        say("looking at this machine")
        import torch

        from ..core.engine.device import require_known, this_device
        from . import doctor

        device = this_device()
        require_known(device)
        for line in doctor.findings(device, disk):
            say(f"{len(lines) + 1} looked at, the last one: {line.name}")
            lines.append(line)
    if as_json:
        click.echo(json.dumps(doctor.as_json(lines), indent=2))
    else:
        for line in lines:
            click.echo(f"{line.level:4} {line.name}: {line.found}")
            if line.advice:
                click.echo(textwrap.indent(textwrap.fill(line.advice, 74), " " * 6))
    sys.exit(doctor.EXIT_CODES[doctor.worst(lines)])


def _rate(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> float | None:
    """Bytes per second, as people write them."""
    if text is None:
        return None
    try:
        return float(parse_bytes(text.removesuffix("/s")))
    except ConfigError as error:
        raise click.BadParameter(f"{error}. Write 7GB/s, for example.") from None


def _gib(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> float | None:
    if text is None:
        return None
    with suppress(ConfigError):
        gib = parse_gib(text)
        if gib <= 1 << 20:
            return gib
    raise click.BadParameter("not a size above 0: GiB, or for example 112GiB.")


def _table(cards: Path | None) -> tuple[Gpu, ...]:
    """The cards of a file, then those that are known."""
    from ..core.planner.cards import GPUS
    from .own_cards import own_cards

    return (*(own_cards(cards) if cards else ()), *GPUS)


def _prices(texts: Sequence[str], names: Mapping[str, str]) -> dict[str, float]:
    """Dollars per hour of one card by what `--gpu` says; `names` has the card's for each."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, figure = text.rpartition("=")
        usd = 0.0
        with suppress(ValueError):
            usd = float(figure)
        # false for nan too
        if not name or not 0 < usd < 1e6:
            raise ConfigError(
                f"--price {text!r}: write NAME=0.34, the dollars per hour of one card."
            )
        same = {g for g, own in names.items() if name in (own, g.partition(":")[0])}
        if not (meant := {name} & names.keys() or same):
            raise ConfigError(f"--price {text!r}: no --gpu is of this name.")
        found.update(dict.fromkeys(meant, usd))
    return found


def _card_names(
    raw: Mapping[Any, Any],
    gpus: tuple[str, ...],
    num_gpus: int,
    link: str | None,
    table: Sequence[Gpu],
) -> dict[str, str]:
    """Name the card of each `--gpu`, and refuse what can be told before the seconds that
    Axolotl's imports take."""
    import torch

    from ..core.planner.cards import gpu_hardware

    named = partial(gpu_hardware, link=link, host_bytes=0, num_gpus=num_gpus)
    names = {gpu: named(gpu, table=table).name for gpu in gpus}
    if gpus:
        return names
    if link is not None:
        raise ConfigError("--link: that of this machine is measured; add --gpu.")
    if num_gpus > 1:
        raise ConfigError(
            f"--gpus {num_gpus}: how fast several cards exchange data is "
            "known of cards by name; add --gpu."
        )
    keys = ("protrain_capacity_bytes", "gpu_memory_limit")
    if not torch.cuda.is_available() and not any(raw.get(key) for key in keys):
        raise ConfigError(
            "--gpu: this machine has no GPU; name the card to plan for, for example "
            "--gpu 4090."
        )
    return names


def _check_page(html: Path | None) -> None:
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise ConfigError(f"--html: {html} is no file in a folder that exists.")


def _check_options(
    html: Path | None, write: Path | None, largest: str | None, levers: bool, cards: int
) -> None:
    if html is not None and largest:
        raise ConfigError("--html draws a plan and --max gives a number: drop one.")
    _check_page(html)
    if levers and (largest or cards > 1):
        raise ConfigError("--levers and --write: for one card, and without --max.")
    if write is not None and (write.exists() or not write.parent.is_dir()):
        raise ConfigError(f"--write: {write} is no new file in a folder that exists.")


@protrain.command("plan", cls=_AnswerCommand)
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="NAME[:GiB]",
    help="A card to plan for, with other memory if given; again for several. Any card: "
    "NAME:48GiB:91TFLOPs:864GB/s. "
    "This machine by default.",
)
@click.option(
    "--gpus",
    "num_gpus",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many of each, on one host.",
)
@click.option(
    "--ram",
    "ram_gib",
    callback=_gib,
    metavar="GiB",
    help="Host memory that may be used, for example 112 or 112GiB. [default: that of this machine; 64 beside "
    "--gpu]",
)
@click.option(
    "--link",
    metavar="NAME",
    help="Between host and card, for example pcie4x16. [default: the card's fastest]",
)
@click.option(
    "--disk",
    "disk_bytes_s",
    callback=_rate,
    metavar="RATE",
    help="What a disk reads that may have frozen weights, for example 7GB/s. [default: measured where "
    "protrain_disk_dir is; 3GB/s beside --gpu]",
)
@click.option(
    "--cards",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A YAML with cards of your own, for --gpu; docs/plan.md has their fields.",
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="NAME=USD",
    help="Dollars per hour of one such card, for example 4090=0.34; again for several.",
)
@click.option(
    "--download",
    is_flag=True,
    help="Fetch the base model's config.json if it is not here, and nothing else.",
)
@click.option("--json", "as_json", is_flag=True, help="Print objects for programs.")
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write a page with the memory over a step and all cards side by side.",
)
@click.option(
    "--max",
    "largest",
    type=click.Choice(["seq", "batch", "rank"]),
    help="Ask for the largest sequence, micro-batch or adapter rank that fits.",
)
@click.option(
    "--levers",
    is_flag=True,
    help="Also price what Axolotl can change: loss, kernels, optimizer, rows, adapter.",
)
@click.option(
    "--explain", is_flag=True, help="Say what of the memory each option lowers."
)
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="If it does not fit, write a YAML that does, with as little changed as can be.",
)
def _plan(
    config: Path,
    gpus: tuple[str, ...],
    num_gpus: int,
    ram_gib: float | None,
    link: str | None,
    disk_bytes_s: float | None,
    cards: Path | None,
    prices: tuple[str, ...],
    download: bool,
    as_json: bool,
    html: Path | None,
    largest: str | None,
    levers: bool,
    explain: bool,
    write: Path | None,
) -> None:
    """Say whether CONFIG fits, with which settings, and how fast it will be.

    Nothing is loaded: the base model's config.json is enough, in the Hugging Face cache
    or in a folder. Exit code 0: it fits every card, or what was written does; 2: it does
    not fit one; 3: it cannot be planned.

    \b
    axolotl-protrain plan config.yaml --gpu 4090 --ram 64
    axolotl-protrain plan config.yaml --gpu 4090 --gpu H100 --price 4090=0.34 --price H100=1.99
    axolotl-protrain plan config.yaml --gpu 3080 --write fits.yaml
    axolotl-protrain plan config.yaml --gpu 4090 --max seq
    axolotl-protrain plan config.yaml --gpu mine --cards cards.yaml --json
    """
    from unittest.mock import patch

    from ..checks import checked_yaml
    from ..offline.worker import Worker, alone, lean_imports

    try:
        # what can be said before a minute of work
        levers = levers or explain or write is not None
        _check_options(html, write, largest, levers, len(gpus))
        raw = checked_yaml(config, here=True, download=download)
        table = _table(cards)
        names = _card_names(raw, gpus, num_gpus, link, table)
        per_hour = _prices(prices, names)
        asked = (gpus, num_gpus, ram_gib, link, disk_bytes_s, table, per_hour)
        # libraries warn of what a plan does not use; the answer alone is printed
        with (
            _Progress(sys.stderr) as say,
            _silence(),
            lean_imports(),
            patch.dict(os.environ, alone(), clear=True),
            ExitStack() as undo,
        ):
            say("importing Axolotl")
            # a tenth of the imports' time is the search for garbage that is not there
            gc.disable()
            if levers:
                # imports meanwhile what is imported here too
                worker = undo.enter_context(Worker(f"{__package__}.fitting:price"))
            from ..report.forecast import FITS
            from ..report.text import largest_text, plan_text
            from .fitting import Fitting
            from .plan import DryRun

            fitting = Fitting(worker, config, say) if levers else None
            say(f"building the model of {config.name} without weights")
            ask = DryRun(config, *asked)
            if largest:
                answers = ask.largest(largest, say)
            else:
                briefly = not as_json and html is None and len(gpus) > 1
                answers = ask.forecasts(fitting is None, briefly, say)
            if fitting is not None:
                fitting.add_to(answers[0], ask, asked, write)
        if html is not None:
            from ..report.page import plan_page

            html.write_text(plan_page(answers), "utf-8")
    except (ProTrainError, OSError) as error:
        if as_json:
            why = {"verdict": "unsupported", "reason": _Unplanned(str(error)).message}
            _print_json([{**why, "hardware": {"name": gpu}} for gpu in gpus or [""]])
        raise
    if as_json:
        _print_json(answers)
    else:
        text = largest_text(answers) if largest else plan_text(answers, explain)
        click.echo(printable(text))
    fits = (answer["verdict"] == FITS or answer.get("fixed") for answer in answers)
    sys.exit(0 if all(fits) else 2)


def _print_json(answers: Sequence[Mapping[str, Any]]) -> None:
    click.echo(json.dumps(answers if len(answers) > 1 else answers[0], indent=2))


class _Progress:
    """Says on a terminal how far a long command is, in one line that is gone afterwards."""

    def __init__(self, stream: TextIO) -> None:
        # one that is not silenced
        self._stream, self._shows = stream, stream.isatty()

    def __call__(self, text: str) -> None:
        if self._shows:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_exception: object) -> None:
        self("")


@contextmanager
def _silence() -> Iterator[None]:
    """Keep everything that is not an error away from both streams."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    unread = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(unread),
            redirect_stderr(unread),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@protrain.command("report", cls=_AnswerCommand)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--html", type=click.Path(path_type=Path), metavar="FILE", help="Also write a page."
)
def _report(runs: tuple[Path, ...], html: Path | None) -> None:
    """Show what finished runs did beside what was predicted; RUNS are their output_dir.

    Several are compared. Exit code 3: one of them has no report.

    \b
    axolotl-protrain report outputs/run
    axolotl-protrain report outputs/before outputs/after --html runs.html
    """
    _check_page(html)
    with _Progress(sys.stderr) as say:
        say("reading")
        from ..report.run import read_reports
        from ..report.text import report_text

        reports = read_reports(runs)
    if html is not None:
        from ..report.page import report_page

        html.write_text(report_page(reports), "utf-8")
    click.echo(printable(report_text(reports)))


@protrain.command("migrate", cls=_AnswerCommand)
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--write", is_flag=True, help="Change the file, not only show how.")
def _migrate(config: Path, write: bool) -> None:
    """Show what makes CONFIG, a YAML for plain Axolotl, one for this plugin.

    Adds two lines, and takes out or replaces what decides where weights live. Exit code
    0: that is all; 2: something is left for you to decide; 3: it cannot be edited.

    \b
    axolotl-protrain migrate config.yaml
    axolotl-protrain migrate config.yaml --write
    """
    from .migrate import migrate_file

    found, name = migrate_file(config, write), config.name
    lines = ["Nothing to change."]
    if found.reasons:
        lines = [found.difference(name, f"{name}, migrated")]
    lines += (f"* {reason}" for reason in found.reasons)
    lines += (f"! left to you: {line}" for line in found.undecided)
    lines += (f"? {line}" for line in found.notes)
    click.echo(printable("\n".join(lines)))
    sys.exit(2 if found.undecided else 0)


@protrain.command("verify", cls=_AnswerCommand)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print an object for programs.")
def _verify(folder: Path, as_json: bool) -> None:
    """Compare the bytes of checkpoint FOLDER, or of each one in it, with those written.

    Exit code 0: they are the same; 2: a file or tensor is missing, differs or is not
    listed; 3: one has no list of them (protrain.json), or there is none.

    \b
    axolotl-protrain verify outputs/run
    axolotl-protrain verify outputs/run --json
    """
    # imported here: keys and help need neither
    from ..core.manifest import MANIFEST, checkpoints, differences

    found: dict[str, list[str] | None] = {}
    with _Progress(sys.stderr) as say:
        for path in checkpoints(folder) or [folder]:
            say(f"reading {path}")
            found[str(path)] = differences(path)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        for name, faults in found.items():
            lines = [f"no {MANIFEST}"] if faults is None else faults or ["whole"]
            click.echo(printable("\n".join(f"{name}: {line}" for line in lines)))
    sys.exit(2 if any(found.values()) else 3 if None in found.values() else 0)


@protrain.command("disk", cls=_Command)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--remove", is_flag=True, help="Delete them.")
@click.option(
    "--unused-for",
    "days",
    type=click.IntRange(0),
    default=0,
    metavar="DAYS",
    help="Only those that no run has opened for so long.",
)
def _disk(folder: Path, remove: bool, days: int) -> None:
    """Show the frozen weights that runs have left in FOLDER, a `protrain_disk_dir`.

    Runs that train go on after `--remove`: they have their files open. What a run was
    killed over while it wrote is always deleted.

    \b
    axolotl-protrain disk /scratch/protrain
    axolotl-protrain disk /scratch/protrain --unused-for 30 --remove
    """
    from ..core.engine.chunk_files import remove_unfinished, stored

    found, unfinished = stored(folder, days * 86_400), remove_unfinished(folder)
    size, last = format_bytes(found.nbytes), datetime.fromtimestamp(found.used)
    said = [f"{len(found.paths)} files, {size}"]
    if found.paths:
        said[0] += f", last used {last:%Y-%m-%d %H:%M}"
    if unfinished:
        said.append(f"{unfinished} unfinished files: deleted")
    if remove:
        for path in found.paths:
            path.unlink(missing_ok=True)
        said.append("deleted")
    click.echo(printable("\n".join(said)))


@protrain.command("serve", cls=_Command)
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="For what clients save. [default: service in output_dir]",
)
@click.option(
    "--adapter-memory",
    metavar="BYTES",
    help="Of the host, for all adapters, for example 8GiB. [default: a quarter of what "
    "is free]",
)
@click.option(
    "--request-memory",
    metavar="BYTES",
    help="Of the host, for requests that arrive and wait. [default: an eighth of what "
    "is free]",
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="By which clients may call it, beside --host and this machine's; again for "
    "several.",
)
@click.option("--status", metavar="URL", help="Show what a server has, and end.")
def _serve(
    config: Path | None,
    host: str,
    port: int,
    folder: Path | None,
    adapter_memory: str | None,
    request_memory: str | None,
    hosts: tuple[str, ...],
    status: str | None,
) -> None:
    """Train many adapters of CONFIG's base, or all of it, for Tinker clients.

    The first line says where it listens. Clients send the key in PROTRAIN_API_KEY, if it
    is set; see docs/service.md.

    \b
    axolotl-protrain serve config.yaml --port 8000
    axolotl-protrain serve --status http://127.0.0.1:8000
    """
    if status is not None:
        from .status import status_text

        click.echo(printable(status_text(status)))
        return
    if config is None:
        raise ConfigError("CONFIG: missing; it is an Axolotl YAML.")
    from ..checks import require_servable

    # before the seconds that Axolotl's imports take
    require_servable(config)
    adapters, requests = (
        None if text is None else parse_bytes(text)
        for text in (adapter_memory, request_memory)
    )
    try:
        # libraries warn on standard output, whose first line is ours
        with _Progress(sys.stderr) as say, _silence():
            say("importing Axolotl")
            from .serve import serve
    except ModuleNotFoundError as error:
        advice = "pip install 'axolotl-protrain[serve]'"
        raise click.ClickException(f"{error}: {advice}") from error
    serve(config, host, port, folder, adapters, requests, hosts)


@protrain.command()
def keys() -> None:
    """List every key of the YAML with its default and meaning.

    \b
    axolotl-protrain keys
    """
    from ..args import ProTrainArgs

    for name, field in ProTrainArgs.model_fields.items():
        default = "unset" if field.default is None else str(field.default).lower()
        click.echo(f"{name} (default: {default})")
        click.echo(click.wrap_text(field.description or "", 88, "    ", "    "))
