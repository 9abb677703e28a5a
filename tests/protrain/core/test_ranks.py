"""Several processes on the CPU device with gloo, beside plain DistributedDataParallel."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from covering import covering
from fork_server import Fork
from rank_cases import ACTS, CASES, MOMENTS, grid, main, special

Started = list[Fork]


def start(folder: Path, ranks: int, names: Sequence[str], nodes: int = 1) -> Started:
    """The processes that do what has these names, their output into `folder`."""
    local = ranks // nodes
    started = []
    for rank in range(ranks):
        place = {
            "RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_RANK": rank % local,
            "LOCAL_WORLD_SIZE": local,
            "GROUP_RANK": rank // local,
        }
        with (folder / f"{rank}.log").open("w") as log:
            started.append(
                Fork(
                    main,
                    folder / "found.json",
                    names,
                    environment={key: str(value) for key, value in place.items()},
                    stdout=log,
                    stderr=log,
                )
            )
    return started


def finish(folder: Path, started: Started, within_s: float) -> dict[str, Any]:
    """What was found; fails with the first rank's last words."""
    end = time.monotonic() + within_s
    for process in started:
        try:
            process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            for other in started:
                other.kill()
            process.wait()
    words = "\n".join(
        f"rank {rank}:\n" + (folder / f"{rank}.log").read_text()[-3000:]
        for rank, process in enumerate(started)
        if process.returncode
    )
    assert not words, words
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, str], dict[str, Any]]:
    """What a case gave with so many ranks; all selected ones run at the first question."""
    asked: dict[int, set[str]] = {}
    for item in request.session.items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if item.fspath == request.fspath and {"ranks", "case"} <= set(params):
            asked.setdefault(params["ranks"], set()).add(params["case"])
    known: dict[int, dict[str, Any]] = {}

    def of(ranks: int, case: str) -> dict[str, Any]:
        if ranks not in known:
            folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
            names = sorted(asked[ranks])
            started = start(folder, ranks, names)
            known[ranks] = finish(folder, started, within_s=200 + 10 * len(names))
        return known[ranks][case]

    return of


PAIRS = covering([tuple(case.name.split("-")) for case in grid()])
RACING = ("slow", "skips", "looks", "mixed", "host-state", "packed", "disk")
ELSEWHERE = ("adafactor", "adamw8bit", "host-8bit", "swap", "evaluates")
"""What one rank does in other tests, and several do alike."""
QUICK = {
    2: {
        *map("-".join, PAIRS),
        # what fetches may race with in both modes that page, the others in turns
        *(f"{mode}-{name}" for name in RACING for mode in "BC"),
        *(
            f"{'BC'[number % 2]}-{name}"
            for number, name in enumerate(dict.fromkeys(c.name[2:] for c in special()))
            if name not in ELSEWHERE
        ),
        "B-host-skips",
    },
    4: {"C-mixed"},
}
GRID = [
    pytest.param(ranks, case, marks=[] if case in QUICK[ranks] else pytest.mark.full)
    for ranks in (2, 4)
    for case in CASES
]


@pytest.mark.parametrize(("ranks", "case"), GRID)
@pytest.mark.sampled(24)
def test_equals_plain_ddp(
    ranks: int, case: str, found: Callable[[int, str], dict[str, Any]]
) -> None:
    got = found(ranks, case)
    # sums of more than two depend on their order
    exact = ranks == 2
    far = 2e-3 if CASES[case].dtype.itemsize == 2 or "dtypes" in case else 1e-6
    assert got["agree"]
    assert got["losses"] <= (0 if exact else far)
    looks = CASES[case].looks or CASES[case].hooks
    # those of weights, too, where somebody looks at them
    assert got["norms"] <= (0 if exact else 20 * far if looks else far)
    assert got["weights"] <= (0 if exact else 20 * far)
    # what all ranks map of the base's file is read there
    assert bool(got["chunk_files"]) == (
        case[2:] in ("disk", "disk-qlora", "disk-packed")
    )


@pytest.mark.parametrize(("ranks", "case"), GRID)
def test_collectives_are_as_few_as_what_is_trained(
    ranks: int, case: str, found: Callable[[int, str], dict[str, Any]]
) -> None:
    """None where nothing is sharded or trained."""
    got, steps, accumulation = found(ranks, case), 3, CASES[case].accumulation
    assert got["reduces"] == steps * got["host_tensors"]
    passes = 2 * accumulation + CASES[case].evaluates
    if CASES[case].looks or CASES[case].hooks:
        # what somebody may have written is fetched again
        return
    if case.startswith("C"):
        # with each step, and after it where an optimizer switches what weights are
        changes = 1 + steps * (1 + (CASES[case].optimizer == "schedule-free"))
        at_opening_and_updates = changes * got["host_state"]
        most = steps * passes * got["chunks"] + at_opening_and_updates
        # what is still in one of two slots does not come again
        assert steps * passes * (got["chunks"] - 2) < got["gathers"] <= most
    else:
        assert got["gathers"] == 0


@pytest.mark.parametrize("case", ["collectives"])
@pytest.mark.parametrize("ranks", [2])
def test_torch_counts_the_same_collectives(
    ranks: int, case: str, found: Callable[[int, str], dict[str, Any]]
) -> None:
    """By torch's profiler, of a plain and a paged training of three steps each."""
    got = found(ranks, case)
    chunks, tensors = 6, 6 * 7
    for name in ("A-full-3-clip", "B-lora-3-clip"):
        assert got[f"{name} _allgather_base_"] == 0
        assert got[f"{name} reduce_"] == 0
        # one bucket a step, in either, and whether hooks look where something is paged
        assert got[f"{name} allreduce_"] == (2 + name.startswith("B")) * 3
    for name in ("B-full-3-clip", "C-full-3-clip"):
        assert got[f"{name} reduce_"] == 3 * tensors
        # used flags, norms and whether hooks look beside DDP's bucket
        assert got[f"{name} allreduce_"] == 2 * 3 + 3 * 3
    assert got["B-full-3-clip _allgather_base_"] == 0
    # accumulation 3, both ways; what two slots still hold does not come again
    assert 18 * (chunks - 2) < got["C-full-3-clip _allgather_base_"] <= 18 * chunks


@pytest.mark.parametrize("case", ["memory"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_host_copy_for_all(
    ranks: int, case: str, found: Callable[[int, str], dict[str, Any]]
) -> None:
    got = found(ranks, case)
    assert 0.95 < got["B all"] < 1.05
    assert 0.95 < got["C all"] < 1.05
    # all of the weights, its share of gradients and moments
    assert 0.95 < got["B resident"] / ((1 + 3 / ranks) / 4) < 1.05
    # a shard of the weights, those that it updates, and its share of the rest
    assert 0.95 < got["C resident"] * ranks < 5 / 4 + 0.15


@pytest.mark.parametrize("case", ["peaks"])
@pytest.mark.parametrize("ranks", [2])
def test_peaks_of_several_ranks_were_predicted(
    ranks: int, case: str, found: Callable[[int, str], dict[str, Any]]
) -> None:
    """Notices gradients that wait for their reduction longer than is planned for."""
    for name, ratio in found(ranks, case).items():
        assert 0.97 < ratio < 1.01, name


@pytest.mark.parametrize("case", ["resume"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_modes_and_numbers_of_ranks_continue_one_curve(
    ranks: int, case: str, found: Callable[[int, str], dict[str, Any]]
) -> None:
    got = found(ranks, case)
    assert got["losses"] <= 1e-6
    assert got["scale"] > 1


@pytest.mark.parametrize("case", ["master"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_masters_on_several_ranks_equal_those_of_one(
    ranks: int, case: str, found: Callable[[int, str], dict[str, Any]]
) -> None:
    got = found(ranks, case)
    assert max(got.values()) <= 1e-6


@pytest.mark.parametrize("case", ["loads"])
@pytest.mark.parametrize("ranks", [2])
def test_a_load_waits_for_ranks_in_a_pass(
    ranks: int, case: str, found: Callable[[int, str], dict[str, Any]]
) -> None:
    got = found(ranks, case)
    assert got.pop("model changed") and got.pop("optimizer changed")
    assert got == {"model": 0.0, "optimizer": 0.0, "missing": 0}


@pytest.mark.parametrize("case", ["twice"])
@pytest.mark.parametrize("ranks", [2])
def test_two_backward_passes_at_once_are_refused(
    ranks: int, case: str, found: Callable[[int, str], dict[str, Any]]
) -> None:
    assert (
        "in the last micro-batch of a step when that of this weight"
        in found(ranks, case)["said"]
    )


@pytest.mark.parametrize("case", ["drops"])
@pytest.mark.parametrize("ranks", [2])
def test_a_gradient_that_one_rank_sets_to_none_is_in_no_average(
    ranks: int, case: str, found: Callable[[int, str], dict[str, Any]]
) -> None:
    assert found(ranks, case)["apart"] == 0


TWO_NODES = ["B-full-3-clip", "B-skips", "C-full-3-clip", "C-mixed"]


@pytest.mark.parametrize("local", [1, 2])
@pytest.mark.sampled(1)
def test_two_nodes_equal_plain_ddp(local: int, tmp_path: Path) -> None:
    """A host copy on each, shards inside a node, averages across."""
    names = [n for n in TWO_NODES if local > 1 or n.startswith("B")]
    started = start(tmp_path, 2 * local, [*names, "memory"], nodes=2)
    got = finish(tmp_path, started, within_s=300)
    memory = got.pop("memory")
    if local > 1:
        assert 1.9 < memory["B all"] < 2.1
    for case in got.values():
        assert case["agree"]
        assert max(case["losses"], case["norms"], case["weights"]) <= 2e-6


QUICK = ("forward", "backward")
DEATHS = [
    pytest.param(
        moment,
        mode,
        how,
        marks=[] if mode == "C" and moment in QUICK else pytest.mark.full,
    )
    for moment in MOMENTS
    for mode in "BC"
    for how in ("kill", "raise")
]


@pytest.mark.parametrize(("moment", "mode", "how"), DEATHS)
def test_a_rank_that_ends_ends_the_others(
    moment: str, mode: str, how: str, tmp_path: Path
) -> None:
    started = start(tmp_path, 3, ["death", mode, moment, how])
    end = time.monotonic() + 60
    codes = [process.wait(max(1.0, end - time.monotonic())) for process in started]
    assert all(codes), codes
    if how == "raise":
        assert f"ends in {moment}" in (tmp_path / "2.log").read_text()
    words = "".join((tmp_path / f"{rank}.log").read_text() for rank in range(2))
    # gloo's own words for it
    assert re.search("Connection (closed|reset) by peer|Broken pipe", words)
    assert "has waited" not in words


IDLE = [
    pytest.param(moment, rank, ranks, marks=[] if quick else pytest.mark.full)
    for moment, rank, ranks, quick in (
        ("forward", 1, 2, True),
        ("forward", 0, 2, False),
        ("backward", 0, 2, False),
        ("evaluation", 1, 3, True),
    )
]


@pytest.mark.parametrize(("moment", "rank", "ranks"), IDLE)
def test_who_runs_no_block_is_named_by_all_others(
    moment: str, rank: int, ranks: int, tmp_path: Path
) -> None:
    """In mode C, where fetches are collectives."""
    started = start(tmp_path, ranks, ["idle", str(rank), moment])
    end = time.monotonic() + 60
    for number, process in enumerate(started):
        code = process.wait(max(1.0, end - time.monotonic()))
        words = (tmp_path / f"{number}.log").read_text()
        assert code, words
        if number != rank:
            assert f"ddp_timeout: rank {rank} runs no block in a pass" in words


def test_a_pass_that_a_rank_runs_alone_is_named_by_all(tmp_path: Path) -> None:
    """The others would gather chunks of another block, of equal size, into its place."""
    for number, process in enumerate(start(tmp_path, 2, ["unlike", "0"])):
        code = process.wait(60)
        words = (tmp_path / f"{number}.log").read_text()
        assert code, words
        ways = {0: "forward, to be followed by another forward", 1: "forward, to be"}
        assert (
            f"protrain_zero3_shard: ranks run the model unlike each other: rank {number} "
            f"goes {ways[number]}" in words
        )


def test_names_of_cases_and_acts_differ() -> None:
    assert not set(ACTS) & set(CASES)
