"""A planner's forecast is the search's plan with what the cost model says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st
from search_cases import ALMOST, PLENTY, Case, cases, few, missing

from axolotl.integrations.protrain.args import FORCED, ProTrainArgs
from axolotl.integrations.protrain.core.errors import BudgetError, ConfigError
from axolotl.integrations.protrain.core.planner.cards import gpu_hardware
from axolotl.integrations.protrain.core.planner.job import (
    choose,
    keep_peak,
    peak_seen,
)
from axolotl.integrations.protrain.core.planner.memory import MemoryModel
from axolotl.integrations.protrain.core.planner.planner import Forecast, Planner
from axolotl.integrations.protrain.core.planner.search import ONLY_A
from axolotl.integrations.protrain.core.sizes import format_bytes
from axolotl.integrations.protrain.core.types import (
    Budget,
    Generation,
    Knobs,
    Work,
    Workload,
    World,
)
from axolotl.integrations.protrain.job import (
    choice_of,
    uncomputed,
)

NOTHING = -1
"""A device that not even an empty model fits."""


def planner(
    case: Case, device_bytes: int = PLENTY, host_bytes: int = PLENTY
) -> Planner:
    return Planner(
        case.memory,
        case.times,
        Budget(device_bytes, 0, host_bytes),
        redone_if_paged=case.redone_if_paged,
    )


@given(cases(), st.integers(0, 20_000))
def test_a_forecast_is_of_the_fastest_plan(case: Case, device_bytes: int) -> None:
    search = case.search(device_bytes)
    try:
        plan = search.fastest()
    except BudgetError as error:
        with pytest.raises(BudgetError) as refusal:
            planner(case, device_bytes).fastest()
        assert str(refusal.value) == str(error)
        return
    ours = planner(case, device_bytes)
    forecast = ours.forecast(ours.fastest())
    # what follows from the trace is added
    swap_bytes = case.memory.activations(plan.policies).moved.out
    order = forecast.plan.gradient_order
    update = case.workload.update
    assert forecast.plan == replace(
        plan,
        swap_bytes=swap_bytes,
        gradient_order=order,
        update=update,
        staging_bytes=forecast.device.states.operands,
    )
    assert forecast.step == search.simulate(plan)
    assert forecast.device == case.memory.device(plan)
    assert forecast.device.peak_bytes <= device_bytes
    assert forecast.host == case.memory.host(plan)
    tokens = case.workload.tokens * case.workload.accumulation
    tokens *= case.workload.world.size
    assert forecast.tokens_per_s * forecast.step.total_s == pytest.approx(tokens)


@given(cases())
def test_what_does_not_fit_is_forecast_as_well(case: Case) -> None:
    nothing = planner(case, NOTHING)
    nearest = nothing.forecast(nothing.nearest())
    with pytest.raises(BudgetError) as refusal:
        nothing.fastest()
    lack = nearest.device.peak_bytes - NOTHING
    assert missing(refusal.value) == format_bytes(lack)
    enough = planner(case, nearest.device.peak_bytes)
    assert enough.forecast(enough.fastest()).step.total_s > 0
    assert not nothing.nearest(ONLY_A).paged


@given(cases(), st.booleans())
def test_training_without_a_pager(case: Case, recompute: bool) -> None:
    blocks = len(case.layout.blocks)
    plan = planner(case, NOTHING).plain(blocks * recompute)
    assert not plan.paged
    assert all(placement.value == "resident" for placement in plan.placements)
    again = tuple(policy.recomputes for policy in plan.policies)
    assert again == (recompute,) * len(case.layout.blocks)


def sampling(case: Case, **known: Any) -> Case:
    """The same with a few sequences that are sampled between two steps."""
    work = (Work(num_kernels=1),) * (len(case.layout.blocks) + 1)
    sizes = {"row_bytes": 30, "cache_bytes": 20, **known}
    generation = Generation(6, 3, 4, prefill=work, decode=work, **sizes)
    return replace(case, workload=replace(case.workload, generation=generation))


@given(cases(), st.integers(0, 20_000))
def test_training_without_a_pager_samples_all_at_once(
    case: Case, device_bytes: int
) -> None:
    """Only this sees a verdict on plain training with waves that it does not have."""
    case = sampling(case, away_bytes=10)
    forecast = planner(case, device_bytes).plainly(0)
    assert forecast.generation is not None
    assert (forecast.generation.rows, forecast.generation.waves) == (6, 1)
    assert forecast.device == case.memory.device(forecast.plan, 6 * 20, 6 * 10)
    assert forecast.host == case.memory.host(forecast.plan)


@given(cases(), st.sampled_from([0.0, 0.5, 1.0, 4.0]))
def test_tokens_a_second_count_the_time_of_answers(case: Case, steps: float) -> None:
    """Only this sees a card called the fastest that samples slowest."""
    forecast = planner(sampling(case, steps=steps)).plainly(0)
    assert forecast.generation is not None
    seconds = forecast.step.total_s
    # at any time: nobody knows how often
    seconds += forecast.generation.total_s / steps if steps else 0.0
    tokens = case.workload.tokens * case.workload.accumulation
    tokens *= case.workload.world.size
    assert forecast.tokens_per_s * seconds == pytest.approx(tokens)


@given(cases(worlds=[World(2, 2), World(4, 2)]), st.integers(0, 400))
def test_each_rank_of_a_node_has_a_cache_on_the_host(
    case: Case, spare_bytes: int
) -> None:
    """Only this sees caches of two ranks where the host has room for one."""
    # only more rows at once take less time, and the device has room for one
    fast = replace(case.hardware, kernel_s=1, fetch_bytes_s=1e9, offload_bytes_s=1e9)
    case = sampling(replace(case, hardware=fast), row_bytes=PLENTY, away_bytes=10)
    plan = planner(case).plain(0)
    host = case.memory.host(plan).phases["train"]
    forecast = planner(case, PLENTY, host + spare_bytes).forecast(plan)
    assert forecast.generation is not None
    rows, away = forecast.generation.rows, forecast.generation.away_bytes
    assert away == (20 * rows if rows > 1 else 0) <= spare_bytes // 2
    assert (rows > 1) == (spare_bytes >= 2 * 2 * 20)
    assert not away or forecast.host.phases["generation"] == host + 2 * away


@given(cases(), st.data())
def test_knobs_by_hand(case: Case, data: st.DataObject) -> None:
    roomy = planner(case)
    recomputed = data.draw(st.integers(0, len(case.layout.blocks)))
    knobs = Knobs(len(case.layout.pageable), 0, 0, recomputed)
    plan = roomy.by_hand(knobs)
    assert (plan.n_persist, plan.n_buffer) == (len(case.layout.pageable), 0)
    assert plan.n_checkpoint == recomputed
    assert roomy.asked(knobs) == plan

    short = planner(case, NOTHING)
    with pytest.raises(BudgetError, match="the plan of the overrides needs"):
        short.by_hand(knobs)
    assert short.asked(knobs).n_checkpoint == recomputed
    blocks, chunks = len(case.layout.blocks), len(case.layout.pageable)
    for impossible, key, highest in (
        (replace(knobs, n_persist=-1), "n_persist", chunks),
        (replace(knobs, n_persist=chunks + 1), "n_persist", chunks),
        (replace(knobs, n_buffer=1), "n_buffer", 0),
        (replace(knobs, n_checkpoint=blocks + 1), "n_checkpoint", blocks),
    ):
        message = f"protrain_{key}_override: .*legal range 0 to {highest}\\b"
        with pytest.raises(ConfigError, match=message):
            short.by_hand(impossible)
        with pytest.raises(ConfigError, match=message):
            short.asked(impossible)


@few
@given(cases(), st.data())
def test_a_smaller_plan_is_the_fastest_plan_that_can_be_reached(
    case: Case, data: st.DataObject
) -> None:
    """Against all plans: lower by what was asked for, with room for the unplanned."""
    judged = case.plans()
    before = data.draw(st.sampled_from(judged))
    device_bytes = before.device_bytes + data.draw(st.integers(0, 500))
    unplanned = data.draw(st.integers(-200, 500))
    asked = data.draw(st.integers(1, 300))
    movable = data.draw(st.sets(st.integers(0, 20)) | st.just(set(range(99))))
    room = device_bytes - max(unplanned, 0)

    def reached(below: int) -> list[float]:
        return [
            plan.step.total_s
            for plan in judged
            if plan.device_bytes <= min(room, below)
            and plan.plan.shards == before.plan.shards
            and all(
                old.on_host == new.on_host or (new.on_host and index in movable)
                for index, (old, new) in enumerate(
                    zip(before.plan.placements, plan.plan.placements, strict=True)
                )
            )
        ]

    # where others use the device the plan had less than it was promised
    had = before.device_bytes + min(unplanned, 0)
    lower = reached(had - asked) or reached(had - 1) or reached(before.device_bytes - 1)

    def replan() -> Forecast:
        return planner(case, device_bytes).replan(
            before.plan, unplanned, asked, movable
        )

    if not lower:
        with pytest.raises(BudgetError):
            replan()
        return
    forecast = replan()
    assert min(lower) / ALMOST <= forecast.step.total_s <= min(lower) * ALMOST
    assert forecast.device.peak_bytes < before.device_bytes
    assert forecast.plan.origin == "notch"
    assert forecast.budget.usable_bytes == device_bytes


@given(cases(), st.integers(0, 100))
def test_an_evaluation_keeps_what_training_did_not_need(
    case: Case, spare_bytes: int
) -> None:
    memory, plan = case.memory, planner(case).fastest()
    known = memory.hardware
    spare_bytes = min(spare_bytes, known.unseen_bytes)
    taught = replace(
        known,
        unseen_bytes=known.unseen_bytes - spare_bytes,
        unneeded_bytes=known.unneeded_bytes + spare_bytes,
    )
    learned = MemoryModel(memory.layout, memory.trace, memory.workload, taught)
    before, after = memory.device(plan).phases, learned.device(plan).phases
    kept = {"evaluation": spare_bytes}
    assert after == {
        phase: nbytes - spare_bytes + kept.get(phase, 0)
        for phase, nbytes in before.items()
    }


@few
@given(cases())
def test_a_peak_is_learned_for_runs_that_have_the_same(case: Case) -> None:
    """Only this sees a run that plans with what another optimizer's has shown."""
    forecast = planner(case).forecast(planner(case).fastest())
    device, workload = torch.device("cpu"), forecast.workload
    others = [
        replace(workload, accumulation=workload.accumulation + 1),
        replace(workload, state_bytes={"weight": (1,)}),
        replace(workload, update_copies=7.0),
    ]
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:

        def seen(workload: Workload, compiled: dict[str, Any] | None = None) -> bool:
            traced = case.layout, case.trace, workload
            return peak_seen(folder, device, *traced, compiled) is not None

        keep_peak(folder, device, forecast, None, 5)
        assert seen(workload)
        # no other plan of the same run, nor what is on the host alone
        assert seen(replace(workload.on_host(), mapped_bytes=9, loader_bytes=9))
        assert not any(seen(other) for other in others)
        assert not seen(workload, compiled={"backend": "inductor"})
        package = Path(folder) / "axolotl_protrain-9.9.9.dist-info"
        package.mkdir()
        (package / "METADATA").write_text("Name: axolotl-protrain\nVersion: 9.9.9\n")
        patch.syspath_prepend(folder)
        assert not seen(workload)


@few
@given(cases(), st.sampled_from(list(FORCED)))
def test_a_mode_is_had_or_its_key_is_named(case: Case, key: str) -> None:
    args, mode = ProTrainArgs.model_construct(**{key: True}), FORCED[key]
    assume(case.layout.pageable and not case.workload.fp32_master)
    if mode == "C" and case.workload.world.local_size == 1:
        with pytest.raises(ConfigError, match=f"`{key}: true` .* Remove the key"):
            choose(choice_of(args), planner(case))
        return
    assert choose(choice_of(args), planner(case)).plan.mode == mode
    least = choose(
        choice_of(args), planner(case, NOTHING), anyway=True
    ).device.peak_bytes
    assert choose(choice_of(args), planner(case, least)).plan.mode == mode
    short = planner(case, least - 1)
    try:
        other = short.fastest().mode
    except BudgetError:
        with pytest.raises(BudgetError, match="^protrain_capacity_bytes"):
            choose(choice_of(args), short)
        return
    with pytest.raises(BudgetError, match=f"`{key}: true`.* mode {other} does"):
        choose(choice_of(args), short)


@given(cases())
def test_what_is_not_to_be_shared_is_not(case: Case) -> None:
    args = ProTrainArgs.model_construct(protrain_zero3_shard=False)
    plan = choose(choice_of(args), planner(case)).plan
    assert plan.shards == 1


@given(cases())
def test_a_way_to_page_and_nothing_to_page(case: Case) -> None:
    roomy = planner(case)
    by_hand = {"n_persist": len(case.layout.pageable), "n_buffer": 0}
    knobs = {f"protrain_{knob}_override": value for knob, value in by_hand.items()}
    args = ProTrainArgs.model_construct(
        protrain_force_replicated_cpu_offload=True, **knobs
    )
    with pytest.raises(ConfigError, match="leaves nothing to page"):
        choose(choice_of(args), roomy)


# what a YAML could ask otherwise


class Keys(dict[str, Any]):
    """A YAML's keys as Axolotl hands them out."""

    __getattr__ = dict.get


@pytest.mark.parametrize(
    ("card", "keys", "lacking"),
    [
        ("T4", {"bf16": True}, "no bf16"),
        ("V100", {"bf16": "full"}, "`tf32: false`"),
        ("2080 Ti", {"attn_implementation": "flash_attention_2"}, "flash_attention_2"),
        ("A100-80GB", {"attn_implementation": "flash_attention_4"}, "8.0"),
        ("T4", {"bf16": False, "attn_implementation": "sdpa"}, None),
        ("3090", {"bf16": True, "attn_implementation": "flash_attention_2"}, None),
        ("MI300X", {"bf16": True, "attn_implementation": "flash_attention_2"}, None),
    ],
)
def test_what_a_card_cannot_compute_is_said_with_the_way_out(
    card: str, keys: dict[str, Any], lacking: str | None
) -> None:
    why = uncomputed(Keys(keys), gpu_hardware(card, None, 0))
    assert (why is None) is (lacking is None)
    if lacking and why:
        assert lacking in why
        assert ("fp16" in why) is bool(keys.get("bf16"))
