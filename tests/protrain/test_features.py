"""What people switch on in a YAML trains as it does without paging.

Each feature is trained paged and plain and compared bit by bit, and plain with and
without the feature: one that Axolotl ignored would be equal for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from axolotl_jobs import (
    LORA,
    PAGED,
    PROTRAIN,
    SEEDING,
    Job,
    Pair,
    Result,
    assert_equal,
    history_differences,
    job,
    overrides,
    pair,
    same_bits,
)
from tiny_models import NUM_BLOCKS, SKIPPING, random_model
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.device import CpuDevice
from axolotl.integrations.protrain.core.engine.session import Options, Session
from axolotl.integrations.protrain.core.layout import build_layout
from axolotl.integrations.protrain.core.planner.plans import make_plan

Run = Callable[[Job], Result]
Settings = dict[str, Any]

MIXED_PLAN = overrides(n_persist=1, n_buffer=2)
WARM_UP = {"warmup_steps": 2, "max_steps": 5}
EVALUATE = {"val_set_size": 0.2, "eval_steps": 1}
GROUPS = [
    {"name": "attention", "modules": ["q_proj", "v_proj"], "lr": 0.002},
    {"name": "down", "modules": ["down_proj"], "lr": 0.03},
]

FULL: dict[str, Settings] = {
    "adam_betas": {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-5},
    "attention_eager": {"attn_implementation": "eager"},
    "bf16": {"bf16": True},
    "bf16_recompute": {"bf16": True, "gradient_checkpointing": True},
    "embedding_lr": {"embedding_lr": 0.001},
    "embedding_lr_scale": {"embedding_lr_scale": 0.5},
    "evaluation": {**EVALUATE, "max_grad_norm": 0.1},
    "grokfast": {
        "plugins": [PROTRAIN, SEEDING, "axolotl.integrations.grokfast.GrokfastPlugin"],
        "grokfast_alpha": 0.5,
        "max_grad_norm": 0.5,
    },
    "last_accumulation_is_short": {
        "max_steps": None,
        "num_epochs": 2,
        "gradient_accumulation_steps": 7,
    },
    "lr_groups": {"lr_groups": GROUPS, "weight_decay": 0.1},
    "neftune": {"neftune_noise_alpha": 5},
    "packing": {"sample_packing": True, "sequence_len": 96},
    "packing_and_evaluation": {**EVALUATE, "sample_packing": True},
    "rows_of_any_length": {"pad_to_sequence_len": False, "micro_batch_size": 3},
    "scheduler_constant": {"lr_scheduler": "constant_with_warmup", **WARM_UP},
    "scheduler_cosine_floor": {"cosine_min_lr_ratio": 0.3, **WARM_UP},
    "scheduler_linear": {"lr_scheduler": "linear", **WARM_UP},
    "scheduler_one_cycle": {"lr_scheduler": "one_cycle", **WARM_UP},
    "scheduler_rex": {"lr_scheduler": "rex", **WARM_UP},
    "unfrozen_blocks": {"unfrozen_parameters": ["^model.layers.[13].", "lm_head"]},
    "unfrozen_halves_of_blocks": {
        "unfrozen_parameters": [
            "^model.layers.[0-9].mlp.",
            "^model.layers.2.self_attn.q_proj.weight$",
        ]
    },
    "unfrozen_outside": {"unfrozen_parameters": ["^model.norm.weight$", "lm_head"]},
    "weight_decay": {"weight_decay": 0.5},
    "weight_decay_none": {"weight_decay": 0.0},
}
SELDOM = {
    "embedding_lr_scale",
    "packing_and_evaluation",
    "scheduler_linear",
    "scheduler_one_cycle",
    "weight_decay_none",
}
"""Near enough to another one that the whole set alone tries them."""
ADAPTER: dict[str, Settings] = {
    "bf16": {"bf16": True},
    "evaluation": EVALUATE,
    "neftune": {"neftune_noise_alpha": 5},
    "packing": {"sample_packing": True, "sequence_len": 96},
}


def features(plan: Settings) -> list[Any]:
    """Paged and plain, and plain without the feature."""
    tables: dict[str, tuple[Settings, dict[str, Settings]]] = {
        "full": ({}, FULL),
        "lora": (LORA, ADAPTER),
    }
    return [
        pytest.param(
            pair("llama", base, settings, plan=plan),
            job("llama", base),
            id=f"{kind}-{name}",
            marks=pytest.mark.full if name in SELDOM else (),
        )
        for kind, (base, table) in tables.items()
        for name, settings in table.items()
    ]


@pytest.mark.parametrize(("trainings", "without"), features(MIXED_PLAN))
@pytest.mark.sampled(10)
def test_feature(run: Run, trainings: Pair, without: Job) -> None:
    paged, plain = run(trainings.paged), run(trainings.plain)
    assert_equal(paged, plain)
    assert paged.report["measured"]["fetched_bytes"] > 0
    assert history_differences(plain.history, run(without).history, 0.0)


OFFLOADS = pair(
    "llama",
    {"gradient_checkpointing": "offload", "gpu_memory_limit": 1},
    plan=overrides(1, 2, 2, n_swap=1) | {"protrain_capacity_bytes": None},
)


@pytest.mark.parametrize("trainings", [OFFLOADS])
def test_what_the_plan_answers_instead_is_said(run: Run, trainings: Pair) -> None:
    report = run(trainings.paged).report
    said = "`gradient_checkpointing: offload`, `gpu_memory_limit: 1`"
    assert (
        f"Taken over: {said}. 2 of {NUM_BLOCKS} blocks recompute, 1 swap."
        in report["notes"]
    )
    assert report["device_bytes"]["budget"] == 2**30


BEST = {
    **EVALUATE,
    "save_strategy": None,
    "save_steps": 1,
    "load_best_model_at_end": True,
    "lr_scheduler": "constant",
}
TOO_HIGH: dict[str, Settings] = {
    "full": {"learning_rate": 0.3},
    "lora": LORA | {"learning_rate": 0.1, "max_steps": 2},
}


@pytest.mark.parametrize(
    "trainings",
    [
        pytest.param(pair("llama", BEST, base, plan=MIXED_PLAN), id=kind)
        for kind, base in TOO_HIGH.items()
    ],
)
def test_the_best_model_is_loaded_at_the_end(run: Run, trainings: Pair) -> None:
    """The rate is so high that the first checkpoint is the best one."""
    paged, plain = run(trainings.paged), run(trainings.plain)
    assert_equal(paged, plain)
    for result in (paged, plain):
        assert result.state["best_global_step"] < result.state["global_step"]


@pytest.mark.parametrize(
    "trainings",
    [
        pytest.param(
            pair(
                SKIPPING,
                base,
                {"gradient_accumulation_steps": accumulation, "max_steps": 4},
                plan=plan,
            ),
            id=f"{name}-accumulate{accumulation}-{list(plan.values())}",
        )
        for name, base in {"full": {}, "lora": LORA}.items()
        for accumulation in (1, 3)
        for plan in (overrides(0, 2), overrides(0, 1, NUM_BLOCKS), overrides(2, 2))
    ],
)
@pytest.mark.sampled(4)
def test_blocks_that_are_skipped_at_random(run: Run, trainings: Pair) -> None:
    """Half of the blocks are left out of each forward, others each time: what was
    fetched ahead is not used, and gradients of a whole block do not arrive."""
    assert_equal(run(trainings.paged), run(trainings.plain))


TIED = {"full": {}, "lora": LORA | {"lora_modules_to_save": ["embed_tokens"]}}


@pytest.mark.parametrize(
    "trainings",
    [
        pytest.param(
            pair("llama-tied", base, {"embedding_lr": 0.02}, plan=MIXED_PLAN), id=name
        )
        for name, base in TIED.items()
    ],
)
def test_tied_embeddings_are_one_weight(run: Run, trainings: Pair) -> None:
    assert_equal(run(trainings.paged), run(trainings.plain))


CAPACITY = {"full": "1200KiB", "lora": "880KiB"}
UNPLANNED: Settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}


def unplanned(kind: str, plan: Settings) -> Any:
    settings = UNPLANNED | (LORA if kind == "lora" else {})
    return pytest.param(pair("llama", settings, plan=plan), id=kind)


def capacity(kind: str, size: str | None = None) -> Settings:
    return {"protrain_capacity_bytes": size or CAPACITY[kind]}


@pytest.mark.parametrize(
    "trainings", [unplanned(kind, capacity(kind)) for kind in CAPACITY]
)
def test_a_budget_is_kept(run: Run, trainings: Pair) -> None:
    """Without overrides, where not everything fits that could stay on the device."""
    paged = run(trainings.paged)
    assert_equal(paged, run(trainings.plain))

    plan, budget = paged.report["plan"], paged.report["device_bytes"]["budget"]
    assert plan["origin"] == "search"
    assert plan["mode"] == "B" or plan["n_swap"] + plan["n_checkpoint"] > 0
    paged_blocks = plan["placements"][:NUM_BLOCKS].count("paged")
    assert NUM_BLOCKS - paged_blocks == plan["n_persist"]
    assert paged.report["device_bytes"]["peak"] <= budget
    assert 0 < paged.report["measured"]["device_peak_bytes"] <= budget

    refused = run(trainings.paged.but(overrides(NUM_BLOCKS, 0)))
    assert "BudgetError: protrain_capacity_bytes" in refused.error


@pytest.mark.parametrize(
    "trainings",
    [
        pytest.param(
            pair("llama", UNPLANNED, base, recompute, plan=plan),
            id=f"{kind}-{way}{'-recompute' * bool(recompute)}",
        )
        for kind, base in {"full": {}, "lora": LORA}.items()
        for way, plan in {
            "fits": capacity(kind, "4MiB"),
            "forced": {"protrain_force_all_persistent": True},
        }.items()
        for recompute in ({}, {"gradient_checkpointing": True})
        # where the host updates weights it may pay to page some that would fit
        if (kind, way) != ("full", "fits")
    ],
)
@pytest.mark.sampled(3)
def test_everything_resident_is_mode_a(run: Run, trainings: Pair) -> None:
    """Because it fits, or because the YAML says so: nothing is paged or fetched."""
    resident = run(trainings.paged)
    assert_equal(resident, run(trainings.plain))

    plan, measured = resident.report["plan"], resident.report["measured"]
    assert plan["mode"] == "A"
    assert set(plan["placements"]) == {"resident"}
    assert plan["n_buffer"] == 0
    assert measured["fetched_bytes"] == measured["num_fetches"] == 0
    assert measured["offloaded_bytes"] == measured["host_arena_bytes"] == 0


MASTER: Settings = {
    "bf16": True,
    "protrain_fp32_master": True,
    "gradient_accumulation_steps": 2,
}


@pytest.mark.parametrize(
    "trainings",
    [
        pytest.param(
            Pair(
                job("llama", PAGED, MASTER, overrides(0, 2)),
                job("llama", PAGED, MASTER, overrides(*other)),
            ),
            id=f"resident{other[0]}",
        )
        for other in ((2, 2, NUM_BLOCKS), (NUM_BLOCKS, 0))
    ],
)
def test_fp32_masters_do_not_depend_on_the_plan(run: Run, trainings: Pair) -> None:
    """Axolotl has no plain run with masters: below is one written by hand."""
    one, other = run(trainings.paged), run(trainings.plain)
    assert_equal(one, other)
    without = run(trainings.paged.but({"protrain_fp32_master": False}))
    assert history_differences(one.history, without.history, 0.0)


NUM_STEPS = 4
MICRO_BATCHES = 3
LIMIT = 0.5


def mixed_model() -> nn.Module:
    """bf16 with fp32 norms and embeddings, as Axolotl makes them for bf16 training."""
    model = random_model("llama").to(torch.bfloat16).train()
    for name, module in model.named_modules():
        if "norm" in name or isinstance(module, nn.Embedding):
            module.to(torch.float32)
    return model


def micro_batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(5)
    while True:
        yield torch.randint(3, 250, (2, 24), generator=generator)


def backward(model: nn.Module, rows: Tensor) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    (loss / MICRO_BATCHES).backward()
    return loss.item()


def groups(named: list[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """Weight decay for matrices only, and fast norms: two groups to tell apart."""
    return [
        {"params": [t for _, t in named if t.ndim > 1], "weight_decay": 0.1},
        {"params": [t for _, t in named if t.ndim == 1], "lr": 0.03},
    ]


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


@dataclass
class Trace:
    """What a loop went through: each loss and norm, and masters and weights at last."""

    numbers: list[float]
    masters: dict[str, Tensor]
    weights: dict[str, Tensor]


def by_hand() -> Trace:
    """fp32 masters in a dozen lines of plain torch."""
    model = mixed_model()
    named = dict(model.named_parameters())
    masters = {name: p.detach().float().clone() for name, p in named.items()}
    optimizer = torch.optim.AdamW(groups([*masters.items()]), lr=0.01, fused=True)
    scheduler = schedule(optimizer)
    rows, numbers = micro_batches(), []
    for _ in range(NUM_STEPS):
        for master in masters.values():
            master.grad = torch.zeros_like(master)
        for _ in range(MICRO_BATCHES):
            numbers.append(backward(model, next(rows)))
            for name, p in named.items():
                masters[name].grad += p.grad.float()
                p.grad = None
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), LIMIT)
        numbers.append(norm.item())
        optimizer.step()
        scheduler.step()
        for name, p in named.items():
            p.data.copy_(masters[name])
    return Trace(numbers, masters, model.state_dict())


def through_session(n_persist: int) -> Trace:
    """The same loop with weights paged and masters on the host."""
    model = mixed_model()
    layout = build_layout(model)
    n_buffer = min(2, NUM_BLOCKS - n_persist)
    plan = make_plan(layout, n_persist, n_buffer, 0, 0, fp32_master=True)
    options = Options(fp32_master=True)
    session = Session(model, layout, plan, CpuDevice(), options)
    plain = torch.optim.AdamW(groups([*model.named_parameters()]), lr=0.01, fused=True)
    optimizer = session.wrap_optimizer(plain)
    scheduler = schedule(optimizer)
    rows, numbers = micro_batches(), []
    for _ in range(NUM_STEPS):
        numbers += [backward(model, next(rows)) for _ in range(MICRO_BATCHES)]
        norm = session.clip_grad_norm(LIMIT)
        assert norm is not None
        numbers.append(norm.item())
        optimizer.step()
        scheduler.step()
        model.zero_grad()
    saved = optimizer.state_dict()
    name_of = {id(param): name for name, param in model.named_parameters()}
    names = [name_of[id(p)] for group in plain.param_groups for p in group["params"]]
    masters = {
        names[index]: state["master"].clone()
        for index, state in saved["state"].items()
        if "master" in state
    }
    session.close()
    return Trace(numbers, masters, model.state_dict())


@pytest.mark.parametrize("n_persist", [0, 2, NUM_BLOCKS])
def test_fp32_masters_are_those_of_a_loop_by_hand(n_persist: int) -> None:
    """Gradients add up in fp32, are clipped there, and move fp32 weights."""
    paged, plain = through_session(n_persist), by_hand()
    assert paged.numbers == plain.numbers
    for name, weight in plain.weights.items():
        assert same_bits(paged.weights[name], weight), name
        # what is fp32 anyway needs no master
        assert (name in paged.masters) == (weight.dtype == torch.bfloat16), name
    for name, master in paged.masters.items():
        assert same_bits(master, plain.masters[name]), name
