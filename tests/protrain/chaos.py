"""Attacks trainings and writes docs/reliability.md: `make chaos`.

Each attack ends as the plain run does, or with one error that names the cause. All
trainings are forks of one process that has imported Axolotl, two at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from axolotl_jobs import BASE, LORA, PAGED, PROTRAIN, SEEDING, free_port, overrides
from chaos_plugin import (
    CALLBACKS,
    CALLS_FILE,
    FILE_BYTES,
    READ_FILE,
    STEP,
    STRUCK,
    TRAINERS,
    WORDS,
)
from checked_device import CHECKED
from fork_server import Fork
from saving_jobs import (
    MODEL,
    Outcome,
    build,
    difference,
    load,
    run_command,
    weights,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"
NUM_STEPS = 4
SLOWEST_S = 120
COMMON: dict[str, Any] = {
    **BASE,
    "base_model": str(MODEL),
    "plugins": [PROTRAIN, SEEDING, "chaos_plugin.ChaosPlugin"],
    "max_steps": NUM_STEPS,
    "gradient_accumulation_steps": 2,
}
SAVES = {"save_strategy": "steps", "save_steps": 1}
EVALUATES = {"val_set_size": 4, "eval_steps": 2}
PAGES: dict[str, Any] = {
    **PAGED,
    **overrides(1, 2, 1),
    # as people run it
    CHECKED: False,
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, PAGES),
    "adapter": (LORA, PAGES),
    # nothing but itself computes with masters
    "fp32 masters": ({"bf16": True, **PAGES, "protrain_fp32_master": True}, {}),
}
"""What is trained, and what is added where it is paged."""


FAILS = "**fails**"
"""For the document."""


class Failed(Exception):
    """An attack ended in none of the ways that are allowed."""


@dataclass(frozen=True)
class Attack:
    """One thing that is done to a training.

    Attributes:
        table: Heading in the document.
        row: Line of the table; several attacks may share one.
        judge: Does it and returns how it ended, in the words of the document.
        case: Tells attacks of one row apart.
    """

    table: str
    row: str
    judge: Callable[[Chaos], str] = field(compare=False)
    case: str = ""

    @property
    def name(self) -> str:
        return f"{self.table}/{self.row}" + (f"/{self.case}" if self.case else "")


class Chaos:
    """Trains in `folder`; references and counted calls are made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._names = iter(range(10**6))
        self._known: dict[str, Future[Outcome]] = {}
        assert Fork(build, folder=folder).wait() == 0
        # prepares the data, which two runs must not do at once
        self.train(COMMON)

    def new(self) -> str:
        """Name of a folder that is nobody's."""
        with self._lock:
            return f"run-{next(self._names)}"

    def train(
        self,
        *settings: Mapping[str, Any],
        act: Mapping[str, Any] | None = None,
        ranks: int = 1,
        name: str = "",
        watch: Callable[[list[Fork]], None] | None = None,
    ) -> Outcome:
        """`axolotl train` to the end, in the output folder `name`, `watch`ed by whoever
        may kill it."""
        name = name or self.new()
        merged: dict[str, Any] = {**COMMON, "output_dir": name}
        for layer in settings:
            merged.update(layer)
        config = self.folder / f"{self.new()}.yaml"
        config.write_text(yaml.safe_dump(merged))
        argv = ["axolotl.cli.train", str(config)]
        port, logs, forks = str(free_port()), [], []
        for rank in range(ranks):
            environment = {"CHAOS": json.dumps(act or {})}
            if ranks > 1:
                environment |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "ACCELERATE_USE_CPU": "true",
                }
            # a pipe: it must not count as a file that grows
            ours, theirs = os.pipe()
            run = partial(run_command, argv, environment=environment)
            forks.append(Fork(run, folder=self.folder, stdout=theirs, stderr=theirs))
            os.close(theirs)
            log = Future[str]()
            threading.Thread(target=_read_to_end, args=(ours, log)).start()
            logs.append(log)
        if watch is not None:
            watch(forks)
        _wait(forks)
        codes = [fork.wait() for fork in forks]
        # that of who failed, rather than of who was told to end
        code = max(codes, key=lambda code: (code > 0, code != 0))
        text = "".join(log.result() for log in logs)
        return Outcome(code, text, self.folder / name)

    def once(self, *settings: Mapping[str, Any], **options: Any) -> Outcome:
        """The same, trained by whoever asks first, and it must end well."""
        key = json.dumps([settings, options], sort_keys=True)
        with self._lock:
            mine = key not in self._known
            result = self._known.setdefault(key, Future())
        if mine:
            try:
                result.set_result(self.train(*settings, **options))
            except BaseException as error:
                result.set_exception(error)
                raise
        return result.result().finished


def _read_to_end(descriptor: int, log: Future[str]) -> None:
    with os.fdopen(descriptor, errors="replace") as stream:
        log.set_result(stream.read())


def _wait(forks: list[Fork]) -> None:
    """Until all have ended; like a launcher, when one fails the others are told to."""
    deadline = time.monotonic() + SLOWEST_S
    told = False
    while any(fork.poll() is None for fork in forks):
        late = time.monotonic() > deadline
        if late or (not told and any(fork.returncode for fork in forks)):
            told, deadline = True, time.monotonic() + 10
            for fork in forks:
                if fork.returncode is None:
                    # it may have ended just now
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(fork.pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.02)


def compare(ours: Outcome, plain: Outcome) -> None:
    """Raise with the first difference in losses, norms, rates, weights and reads."""
    plain = plain.finished
    if not ours.paged:
        raise Failed(f"was not paged, exit code {ours.exit_code}: {last_error(ours)}")
    if ours.exit_code:
        raise Failed(
            f"exit code {ours.exit_code}: {last_error(ours) or ours.log[-800:]}"
        )
    if ours.history != plain.history:
        pairs = zip(ours.history, plain.history, strict=False)
        raise Failed(f"steps {next((p for p in pairs if p[0] != p[1]), 'missing')}")
    reads = [json.loads(_text(o.folder / READ_FILE) or "[]") for o in (ours, plain)]
    if reads[0] != reads[1]:
        unequal = sum(a != b for a, b in zip(*reads, strict=False))
        raise Failed(f"reads other values: {unequal} of {len(reads[1])}")
    if found := difference(weights(ours.folder), weights(plain.folder)):
        raise Failed(found)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def last_error(run: Outcome) -> str:
    """The error that ended it, as the last line of a traceback says it."""
    found = re.findall(
        r"^(?:\w+\.)*\w*(?:Error|Exception): .*(?:\n(?!\s*File).+)*", run.log, re.M
    )
    return found[-1] if found else ""


def equal_or_refused(ours: Outcome, cause: str, plain: Callable[[], Outcome]) -> str:
    """How a run ended: one that fails must name the cause, one that does not be equal."""
    error = last_error(ours)
    if ours.exit_code and ours.exit_code > 0 and cause and re.search(cause, error):
        return "refused"
    compare(ours, plain())
    return "equal"


# ------------------------------------------------- callbacks, hooks, other trainers

PARAMETER = r"layers\.\d\.\w+"
"""What an error about a weight must name."""
TWICE = "a trainer that runs each micro-batch twice"
ADAPTER = (
    "norms of weights in every event",
    "state_dict in every event",
    "moving average of weights",
    "copy.deepcopy of the model, run",
    "p.data.mul_",
    "gradients clipped by value",
    "hooks of the optimizer's step",
    "model.to(its device)",
    "trainer.save_model",
)
"""What is done to an adapter over a paged base as well."""
TWO_RANKS = (
    "norms of weights in every event",
    "norms of gradients before the update",
    "p.data.mul_",
    "gradients clipped by value",
)


def misbehaves(
    chaos: Chaos, does: str, kind: str = "full", cause: str = PARAMETER, ranks: int = 1
) -> str:
    """The paged run with it is the plain run with it."""
    settings, pages = KINDS[kind]
    train = partial(chaos.train, EVALUATES, settings, ranks=ranks, act={"does": does})
    return equal_or_refused(train(pages), cause, train)


def _misbehaviours() -> Iterator[Attack]:
    attack = partial(Attack, "Callbacks, hooks and trainers")
    for does in (*CALLBACKS, *TRAINERS):
        judge = partial(misbehaves, does=does)
        if does == "raises":
            judge = partial(judge, cause=WORDS)
        yield attack(does, judge, "full")
        if does in ADAPTER:
            yield attack(does, partial(judge, kind="adapter"), "adapter")
        if does in TWO_RANKS:
            yield attack(f"{does}, two ranks", partial(judge, ranks=2))
    judge = partial(misbehaves, does=TWICE, cause="a second backward pass", ranks=2)
    yield attack(f"{TWICE}, two ranks", judge)


# ------------------------------------------------------------ killed, told, disk full

PHASES = ("loading", "planning", "forward", "backward", "update")
SAVING = ("save", "rotation", "final save")
DISK = "output_dir: writing"
NUM_WRITES = 24


def calls(chaos: Chaos, *settings: Mapping[str, Any]) -> Mapping[str, int]:
    """How many calls each phase of a run has."""
    counting = chaos.once(*settings, act={"phase": ""})
    return json.loads((counting.folder / CALLS_FILE).read_text())


def struck(
    chaos: Chaos,
    act: str,
    phase: str,
    moment: float = 0,
    kind: str = "full",
    limit: int = 1,
    ranks: int = 1,
    cause: str = "",
    counted: str = "",
) -> str:
    """A run that is struck, and another that goes on where it was.

    Args:
        act: Of `chaos_plugin.ACTS`.
        phase: Of `PHASES` or `SAVING`.
        moment: Which of its calls, 0 for the first and 1 for the last.
        limit: `save_total_limit`.
        cause: What the error must name, if there is one.
        counted: " writes" to count only calls that write.
    """
    settings = *KINDS[kind], SAVES, {"save_total_limit": limit}
    call = 1 + int(moment * (calls(chaos, *settings)[phase + counted] - 1))
    # the first one plans and saves
    name, rank = chaos.new(), 0 if phase in ("planning", *SAVING) else ranks - 1
    told = {"phase": phase, "act": act, "call": call, "counted": counted, "rank": rank}
    first = chaos.train(*settings, name=name, ranks=ranks, act=told)
    if STRUCK not in first.log:
        raise Failed("was not struck")
    if cause and not re.search(cause, last_error(first)):
        raise Failed(f"exit {first.exit_code}, {cause!r} not in {last_error(first)!r}")
    plain = chaos.once(KINDS[kind][0], SAVES, ranks=ranks)
    if phase == "final save":
        # a run that resumes at its last step takes another one, plain or not
        last = weights(first.folder / f"checkpoint-{NUM_STEPS}")
        if found := difference(last, weights(plain.folder)):
            raise Failed(found)
        return "last checkpoint equal"
    resume = {"auto_resume_from_checkpoints": True}
    second = chaos.train(*settings, resume, name=name, ranks=ranks)
    compare(second, plain)
    first_step = NUM_STEPS - second.log.count("'loss'") // ranks
    # the other ranks do not wait for the one that saves
    if phase not in PHASES[:2] and first_step < STEP - 1 - (ranks > 1):
        raise Failed(f"goes on from step {first_step}: a whole checkpoint was lost")
    if left := [p.name for p in second.folder.iterdir() if p.name.startswith(".")]:
        raise Failed(f"leaves {left}")
    return "refused, then resumed equal" if cause else "resumed equal"


def _moments(act: str, row: str, count: int, ranks: int = 1) -> Iterator[Attack]:
    """That many of them, spread over phases, kinds and limits; always the same."""
    chance = random.Random(row)  # noqa: S311 - not a secret
    phases = (*PHASES, *SAVING)
    for number in range(count):
        turn, place = divmod(number, len(phases))
        judge = partial(
            struck,
            act=act,
            phase=phases[place],
            moment=chance.random(),
            kind=("full", "adapter", "full", "fp32 masters")[turn % 4],
            limit=1 + turn % 2,
            ranks=ranks,
        )
        row_here = f"{row}, {phases[place]}"
        yield Attack("Struck at a moment", row_here, judge, str(turn))


def _strikes() -> Iterator[Attack]:
    yield from _moments("SIGKILL", "kill -9", 50)
    yield from _moments("SIGKILL", "kill -9 of one of two ranks", 20, ranks=2)
    yield from _moments("SIGINT", "SIGINT", 16)
    yield from _moments("SIGTERM", "SIGTERM", 16)
    for size in FILE_BYTES:
        row = f"kill -9 within a file, after {size:,} bytes"
        judge = partial(struck, act=f"kill at {size}", phase="save")
        yield Attack("Struck at a moment", row, judge)
    full = partial(struck, phase="save", cause=DISK)
    for size in FILE_BYTES:
        row = f"within a file, after {size:,} bytes"
        yield Attack("Disk full in a save", row, partial(full, act=f"full at {size}"))
    for number in range(NUM_WRITES):
        judge = partial(
            full,
            act="full",
            moment=number / NUM_WRITES,
            counted=" writes",
            limit=1 + number % 2,
        )
        yield Attack("Disk full in a save", "before a write", judge, str(number))


# ------------------------------------------------------------------ damaged files

FILES = (
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
)


def _garble(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))  # noqa: S311


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "truncated": lambda path: os.truncate(path, path.stat().st_size * 2 // 3),
    "garbage": _garble,
}


def _state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Changes what `torch.save` wrote."""

    def damage(path: Path) -> None:
        state = load(path)
        change(state)
        torch.save(state, path)

    return damage


def _moment(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """Changes the first moment of a weight that is not square."""

    def spoil(state: dict[str, Any]) -> None:
        entries = state["state"].values()
        entry = next(e for e in entries if len({*e["exp_avg"].shape}) == 2)
        entry["exp_avg"] = change(entry["exp_avg"].clone())

    return _state(spoil)


def _another_models(state: dict[str, Any]) -> None:
    for entry in state["state"].values():
        entry.update(exp_avg=torch.zeros(7, 5), exp_avg_sq=torch.zeros(7, 5))


STATES: dict[str, Callable[[Path], None]] = {
    "moments of another shape": _moment(lambda t: t[:-1]),
    "moments transposed": _moment(lambda t: t.T.contiguous()),
    "moments flat": _moment(torch.flatten),
    "another model's": _state(_another_models),
    "no groups": _state(lambda state: state.pop("param_groups")),
    "a list": lambda path: torch.save([1, 2], path),
}
"""What may be wrong with an optimizer.pt that can be read."""


def resumes(chaos: Chaos, file: str, damage: Callable[[Path], Any], auto: bool) -> str:
    """Goes on from a damaged checkpoint, or past it where it may choose itself."""
    whole, name = chaos.once(PAGES, SAVES), chaos.new()
    for checkpoint in ("checkpoint-1", "checkpoint-2"):
        shutil.copytree(whole.folder / checkpoint, chaos.folder / name / checkpoint)
    damage(chaos.folder / name / "checkpoint-2" / file)
    how = {"resume_from_checkpoint": f"{name}/checkpoint-2"}
    ours = chaos.train(
        PAGES, SAVES, {"auto_resume_from_checkpoints": True} if auto else how, name=name
    )
    if ours.log.count("'loss'") >= NUM_STEPS:
        raise Failed("begins anew")
    cause = f"{re.escape(file)}|its weights are missing"
    return equal_or_refused(ours, cause, lambda: chaos.once({}, SAVES))


def _by_hand(path: Path) -> None:
    content = json.loads(path.read_text())
    for value in content["measured"].values():
        value.update(dict.fromkeys(value, 0))
    path.write_text(json.dumps(content))


CACHES: dict[str, Callable[[Path], Any]] = {
    **{name: DAMAGES[name] for name in ("empty", "truncated", "garbage")},
    "nested 100,000 deep": lambda path: path.write_text("[" * 10**5),
    "0 for each value": _by_hand,
}


def measures_again(chaos: Chaos, damage: Callable[[Path], Any]) -> str:
    """A cache file that cannot be used is named and replaced."""
    searched = {**PAGED, "protrain_force_replicated_cpu_offload": True}
    whole, folder = chaos.folder / "rates", chaos.folder / chaos.new()
    chaos.once(searched, {"protrain_cache_dir": str(whole)})
    shutil.copytree(whole, folder)
    for file in folder.iterdir():
        damage(file)
    ours = chaos.train(searched, {"protrain_cache_dir": str(folder)})
    compare(ours, chaos.once({}))
    if unnamed := [f.name for f in whole.iterdir() if f.name not in ours.log]:
        raise Failed(f"replaces {unnamed} in silence")
    return "equal, with a warning"


def _damages() -> Iterator[Attack]:
    attack = partial(Attack, "Damaged checkpoints")
    for file in FILES:
        damages = {**DAMAGES, **(STATES if file == "optimizer.pt" else {})}
        for what, damage in damages.items():
            judge = partial(resumes, file=file, damage=damage)
            yield attack(f"{file}: {what}", partial(judge, auto=False))
            if what in DAMAGES:
                row = f"{file} of the newest: {what}"
                yield attack(row, partial(judge, auto=True))
    for what, damage in CACHES.items():
        judge = partial(measures_again, damage=damage)
        yield Attack("Damaged cache files", what, judge)


ATTACKS = (*_strikes(), *_damages(), *_misbehaviours())

HEADER = """\
# What was done to it

Written by `make chaos`: do not edit. Each line is something that happens to trainings, done
to real ones of a tiny model on the CPU device: full fine-tunes, adapters, fp32 masters.
A run ends as the plain run does, or with one error that names the cause.

* `equal`: losses, gradient norms, learning rates and weights, and whatever the callback
  has read, are those of the plain run to which the same was done, bit for bit.
* `resumed equal`: the run ended; the next one, with `auto_resume_from_checkpoints`, went on
  from the newest checkpoint that was whole and ended as a plain run that nothing was done to.
  `save_total_limit` is 1 or 2; the moment is a call of a function, drawn at random.
* `last checkpoint equal`: the run ended after its last step, of which it has a checkpoint.
* `refused`: ends with one error that names the file, the key or the parameter.
* **fails**: none of these, in one case at least; to be mended.

One thing is not noticed: a write through `p.data` outside of the events of callbacks and of
`trainer.protrain.full_params()`, which leaves neither another address nor another version behind.
"""


def render(outcomes: Mapping[Attack, str]) -> str:
    """The document: a table for each heading, a line for each row."""
    tables: dict[str, dict[str, list[str]]] = {}
    for attack, outcome in outcomes.items():
        rows = tables.setdefault(attack.table, {})
        rows.setdefault(attack.row, []).append(outcome)
    parts = [HEADER]
    for heading, rows in tables.items():
        lines = [f"## {heading}\n", "| what | cases | ends |", "| --- | --- | --- |"]
        for row, found in rows.items():
            ends = " or ".join(sorted(set(found)))
            lines.append(f"| {row} | {len(found)} | {ends} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def main() -> int:
    words = sys.argv[1:]
    wanted = [a for a in ATTACKS if all(word in a.name for word in words)]
    outcomes: dict[Attack, str] = {}
    with TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        os.environ["XDG_CACHE_HOME"] = f"{name}/cache"
        chaos = Chaos(Path(name))
        for attack, future in [(a, pool.submit(a.judge, chaos)) for a in wanted]:
            try:
                outcomes[attack] = future.result()
                print(f"{attack.name}: {outcomes[attack]}", flush=True)
            # no file or not the expected one where a run should have left it
            except (Failed, AssertionError, OSError, ValueError) as error:
                outcomes[attack] = FAILS
                print(f"FAILED {attack.name}: {error}", flush=True)
    num_failed = list(outcomes.values()).count(FAILS)
    print(f"{num_failed} of {len(wanted)} attacks fail")
    if not words:
        DOCUMENT.write_text(render(outcomes))
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
