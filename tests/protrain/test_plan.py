"""`axolotl protrain plan`: what it answers, in which form, and with which exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from axolotl_jobs import PAGED, Job, Result, job, overrides
from fork_server import ENVIRONMENT
from plan_jobs import BASE, PROTRAIN, Plans
from published_models import LLAVA, MIXTRAL, QWEN_VL, SMALL, UNKNOWN_IMAGES
from test_meta_model import IMAGES, VISION_LORA
from tiny_models import TOKENIZER, build_inputs

from axolotl.integrations.protrain.cli.own_cards import own_cards
from axolotl.integrations.protrain.core.errors import ConfigError
from axolotl.integrations.protrain.core.planner.cards import GPUS, gpu_hardware
from axolotl.integrations.protrain.report.page import plan_page

COMMAND = "from axolotl.integrations.protrain.cli import protrain; protrain()"
GIB = 2**30

LORA = {
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "lora_target_linear": True,
}
QLORA = LORA | {"adapter": "qlora", "load_in_4bit": True}
LONG = {"sequence_len": 8192}
PAGES = {"protrain_force_replicated_cpu_offload": True}
MLP_RECOMPUTES = {"protrain_lora_mlp_forbid_offload": True}
LIGER = {
    "plugins": [PROTRAIN, "axolotl.integrations.liger.LigerPlugin"],
    "liger_rms_norm": True,
    "liger_glu_activation": True,
    "liger_fused_linear_cross_entropy": True,
}
PACKED = {
    "sample_packing": True,
    "pad_to_sequence_len": True,
    "attn_implementation": "flash_attention_2",
}
ON_THE_HOST = {"protrain_cpu_optimizer": "torch"}
BY_HAND = overrides(n_persist=1, n_buffer=3, n_checkpoint=7)
TOO_LARGE = overrides(n_persist=8, n_buffer=0)

SHARDED = {"protrain_zero3_shard": True}
REPLICATED = {"protrain_force_replicated_cpu_offload": True}

ON_EXPERTS = {
    "lora_target_linear": False,
    "lora_target_modules": ["q_proj", "v_proj"],
    "lora_target_parameters": ["mlp.experts.gate_up_proj"],
    "lora_modules_to_save": ["embed_tokens", "lm_head"],
}
EVALUATED = {"test_datasets": BASE["datasets"], "eval_batch_size": 4}

LARGE_CARD, SMALL_CARD = ("--gpu", "4090"), ("--gpu", "4090:1")
SIZED_CARD = ("--gpu", "4090:24")
TRAINED = job("llama", PAGED, overrides(1, 2, 2), {"protrain_cache_dir": "measured"})

CASES: dict[str, tuple[Any, ...]] = {
    "resident": (SMALL, LORA, *LARGE_CARD),
    "paged": (SMALL, LORA, *SMALL_CARD),
    "paged_full": (SMALL, ON_THE_HOST, *SMALL_CARD),
    "deferred_full": (SMALL, {}, *SMALL_CARD),
    "two_cards": (
        SMALL,
        LORA | LONG,
        *LARGE_CARD,
        *SMALL_CARD,
        *("--price", "RTX 4090=0.34", "--price", "4090:1=0.05"),
        *("--html", "page.html"),
    ),
    "own_card": (SMALL, LORA, "--gpu", "mine", "--cards", "cards.yaml"),
    # all weights fit where adapters' state is on the host
    "mlp_recomputes": (SMALL, LORA | MLP_RECOMPUTES | PAGES, *SMALL_CARD),
    "mlp_by_hand": (SMALL, LORA | BY_HAND | MLP_RECOMPUTES, *SMALL_CARD),
    "two_resident": (SMALL, LORA, *LARGE_CARD, "--gpus", "2"),
    # NCCL takes a GiB of each
    "two_paged": (SMALL, LORA, "--gpu", "4090:2", "--gpus", "2"),
    "four_paged_full": (SMALL, {}, "--gpu", "4090:2.25", "--gpus", "4"),
    "two_by_hand": (SMALL, LORA | SHARDED | BY_HAND, *LARGE_CARD, "--gpus", "2"),
    "turing": (SMALL, LORA, "--gpu", "T4", *LARGE_CARD),
    "turing, auto": (SMALL, LORA | PACKED | {"bf16": "auto"}, "--gpu", "T4"),
    "turing, largest": (SMALL, LORA, "--gpu", "T4", "--max", "seq"),
    "evaluated": (SMALL, LORA | EVALUATED, *LARGE_CARD),
    "evaluated, longer": (
        SMALL,
        LORA | EVALUATED | {"eval_sequence_len": 1024},
        *LARGE_CARD,
    ),
    "experts": (MIXTRAL, QLORA | ON_EXPERTS, *LARGE_CARD),
    "replicated": (SMALL, LORA | REPLICATED, *LARGE_CARD),
    "little_ram": (SMALL, ON_THE_HOST, *SMALL_CARD, "--ram", "1"),
    "disk": (SMALL, LORA, *SMALL_CARD, "--ram", "0.12", "--disk", "7GB/s"),
    "no_disk": (SMALL, LORA, *SMALL_CARD, "--ram", "0.12"),
    "fast_link": (SMALL, LORA | BY_HAND, *SMALL_CARD),
    "slow_link": (SMALL, LORA | BY_HAND, *SMALL_CARD, "--link", "pcie3x8"),
    "too_large": (SMALL, LORA | TOO_LARGE, *SMALL_CARD),
    "all_resident": (
        SMALL,
        LORA | {"protrain_force_all_persistent": True},
        *SMALL_CARD,
    ),
    "yaml_limits": (
        SMALL,
        LORA | {"protrain_capacity_bytes": "1GiB"},
        *LARGE_CARD,
        "--gpu",
        "3060:1",
    ),
    "not_listed": (SMALL, LORA | {"plugins": None}, *SMALL_CARD),
    "one memory": (SMALL, LORA, "--gpu", "DGX Spark", "--ram", "1"),
    "one memory, limits": (
        SMALL,
        LORA
        | {"protrain_capacity_bytes": "9GiB", "protrain_cpu_capacity_bytes": "8GiB"},
        *("--gpu", "DGX Spark"),
    ),
    "one memory, full": (SMALL, {}, "--gpu", "DGX Spark:1"),
    "one memory, disk": (SMALL, LORA, "--gpu", "DGX Spark:1", "--disk", "7GB/s"),
    "one memory, no disk": (SMALL, LORA, "--gpu", "DGX Spark:1"),
    "qlora_fused": (SMALL, QLORA, *SMALL_CARD),
    "packed": (SMALL, LORA | PACKED, *SMALL_CARD),
    "liger": (SMALL, LORA | LIGER, *SMALL_CARD),
    "max_nothing": (SMALL, LORA | LONG, *SMALL_CARD, "--max", "batch"),
    "qwen_images": (QWEN_VL, VISION_LORA | IMAGES, *SIZED_CARD),
    "llava_images": (LLAVA, VISION_LORA | IMAGES, *SIZED_CARD),
    "text_alone": (QWEN_VL, VISION_LORA, *SIZED_CARD),
    "untraceable": (
        LLAVA | {"image_seq_length": 9},
        VISION_LORA | IMAGES | {"protrain_vision_headroom_bytes": "3GiB"},
        *SIZED_CARD,
    ),
    "unknown_images": (UNKNOWN_IMAGES, VISION_LORA | IMAGES, *SIZED_CARD),
}
"""Model, keys of the YAML and arguments; all are asked for JSON."""

REFUSED: dict[str, tuple[Any, ...]] = {
    "preference training": ("needs a tokenizer", {"rl": "dpo"}, *LARGE_CARD),
    "misspelt": (
        "`protrain_capcity_bytes`: did you mean `protrain_capacity_bytes`?",
        {"protrain_capcity_bytes": 1, "protrain_n_persist": 2},
        *LARGE_CARD,
    ),
    "knob out of range": (
        "protrain_n_persist_override: 99 .* 0 to 8",
        {"protrain_n_persist_override": 99},
        *LARGE_CARD,
    ),
    "unknown card": ("'4091' .* nearest: RTX 4090", {}, "--gpu", "4091"),
    "bad memory": ("--gpu: 'x'", {}, "--gpu", "4090:x"),
    "no memory": ("--ram", {}, *LARGE_CARD, "--ram", "0"),
    "unknown link": ("--link 'pcie9'", {}, *LARGE_CARD, "--link", "pcie9"),
    "link of this machine": ("--link", {}, "--link", "pcie4x16"),
    "shards of one": ("`protrain_zero3_shard: true`", SHARDED, *LARGE_CARD),
    "paging in one memory": (
        "`protrain_force_replicated_cpu_offload: true` .* paging saves nothing",
        REPLICATED,
        *("--gpu", "DGX Spark"),
    ),
    "two of one memory": (
        "--gpus 2: a DGX Spark is a machine with one GPU",
        {},
        *("--gpu", "DGX Spark", "--gpus", "2"),
    ),
    "nothing to page": (
        "n_persist_override: 8 .* `protrain_force_replicated_cpu_offload",
        REPLICATED | TOO_LARGE,
        *LARGE_CARD,
    ),
    "several of this machine": ("--gpus 2: .* add --gpu", {}, "--gpus", "2"),
    "no card": ("--gpus", {}, *LARGE_CARD, "--gpus", "0"),
    "unknown option": ("--frob", {}, "--frob"),
    "no card and no GPU": ("name the card .* --gpu 4090", {}),
    "nothing trains": (
        r"unfrozen_parameters: \['\^none'\] matches no parameter of LlamaForCausalLM",
        {"unfrozen_parameters": ["^none"]},
        *LARGE_CARD,
    ),
    "misspelt optimizer": (
        "optimizer: 'adamw_trch' .* adamw_torch",
        {"optimizer": "adamw_trch"},
        *LARGE_CARD,
    ),
    "no price": ("--price '4090': write NAME=0.34", {}, *LARGE_CARD, "--price", "4090"),
    "price of another": (
        "--price '3090=1': no --gpu",
        {},
        *LARGE_CARD,
        *("--price", "3090=1"),
    ),
    "damaged cards": (
        "--cards bad.yaml: mine mib: .*; mine tflops_16: Field required",
        {},
        *("--gpu", "mine", "--cards", "bad.yaml"),
    ),
    "no adapter": ("--max rank: .*lora_r", {}, *LARGE_CARD, "--max", "rank"),
    "no folder": ("--html", {}, *LARGE_CARD, "--html", "nowhere/page.html"),
    "page of a number": ("--html", {}, "--html", "p.html", "--max", "seq"),
}
"""What the error names, keys of the YAML and arguments.

More mistakes in a YAML are in `yaml_faults.KEYS`, more sizes in test_args.py.
"""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plans]:
    plans = Plans(tmp_path_factory.mktemp("plans"))
    card = {"tflops_32": 20, "memory_gb_s": 500, "pcie": 4}
    for name, more in (("cards", {"mib": 24000, "tflops_16": 80}), ("bad", {"mib": 1})):
        text = yaml.safe_dump({"mine": card | more})
        (plans.folder / f"{name}.yaml").write_text(text)
    try:
        for name, (model, keys, *arguments) in CASES.items():
            plans.add(name, model, keys, *arguments, "--json")
        cards = ("T4", "3060", "4090:1", "4090", "4080", "4070", "4060 ti", "5060 ti")
        cards = [word for card in cards for word in ("--gpu", card)]
        prices = ("--price", "4090=0.34", "--price", "4080=9")
        plans.add("text", SMALL, LORA | LONG, *cards, *prices)
        plans.add("unfit", SMALL, LORA | LONG, *SMALL_CARD)
        slips = {"sequences_of": 4096, "plugins": None}
        plans.add("slips", SMALL, LORA | slips, *LARGE_CARD, "--json")
        red = {"tokenizer_config": "\x1b[31mred"}
        plans.add("steered", SMALL, LORA | red, *LARGE_CARD)
        for name, (_, keys, *arguments) in REFUSED.items():
            plans.add(name, SMALL, keys, *arguments)
        yield plans
    finally:
        plans.close()


def fitting(plans: Plans, name: str) -> dict[str, Any]:
    """The JSON of a command that must say that it fits."""
    answer = plans[name]
    assert answer.exit_code == 0, answer.out + answer.err
    assert answer.json["verdict"] == "fits"
    return answer.json


# ------------------------------------------------------------------------ form

NUMBER = (int, float)
MEMORY = {
    "peak": int,
    "budget": int,
    "reserve": int,
    "terms": {str: int},
    "phases": {str: int},
}
SCHEMA: dict[Any, Any] = {
    "verdict": str,
    "reason": (str, type(None)),
    "hardware": {"name": str, "source": str, "link": str},
    "plan": {
        "n_persist": int,
        "n_buffer": int,
        "n_swap": int,
        "n_checkpoint": int,
        "mode": str,
        "num_ranks": int,
        "num_nodes": int,
        "origin": str,
        "update": str,
        "adapters": (str, type(None)),
        "num_blocks": int,
        "num_chunks": int,
        "resident_chunks": [int],
        "placements": [str],
        "on_disk": [int],
        "block_policies": [str],
    },
    "device_bytes": MEMORY | {"peak_at": str},
    "host_bytes": {k: v for k, v in MEMORY.items() if k != "reserve"},
    # of a trainer that samples, which test_generation.py looks at
    "generation": type(None),
    "served": type(None),
    "step_s": {
        "total": float,
        "lanes": {str: NUMBER},
        "exposed": {str: NUMBER},
        "recompute": NUMBER,
        "limiter": str,
        "tokens_per_s": float,
        "measured_blocks": bool,
    },
    "alternatives": [
        {
            "change": str,
            "verdict": str,
            "device_peak_bytes": (int, type(None)),
            "step_s": (float, type(None)),
            "tokens_per_s": (float, type(None)),
            "plan": object,
            "note": (str, type(None)),
        }
    ],
    "avoidable": object,
    "cost": object,
    "assumptions": [str],
    "about": {str: object},
    "timeline": [{"label": str, "phase": str, "bytes": {str: int}}],
    "blocks": [
        {
            "name": str,
            "policy": str,
            "chunks": [{"bytes": int, "placement": str}],
            "forward_s": float,
            "backward_s": float,
        }
    ],
}


def misfits(value: Any, schema: Any, where: str = "") -> Iterator[str]:
    """Where a JSON value has not the keys and types of a schema."""
    if isinstance(schema, list):
        if not isinstance(value, list):
            yield f"{where}: no list"
            return
        for number, item in enumerate(value):
            yield from misfits(item, schema[0], f"{where}[{number}]")
    elif isinstance(schema, dict) and not isinstance(value, dict):
        yield f"{where}: no object"
    elif isinstance(schema, dict):
        any_key = next(iter(schema)) is str
        if not any_key and value.keys() != schema.keys():
            yield f"{where}: keys differ by {sorted(value.keys() ^ schema.keys())}"
            return
        for key, item in value.items():
            yield from misfits(item, schema[str if any_key else key], f"{where}.{key}")
    elif not isinstance(value, schema):
        yield f"{where}: {value!r}"


@pytest.mark.parametrize("name", ["resident", "paged", "two_paged"])
def test_every_key_of_the_json(name: str, plans: Plans) -> None:
    answer = plans[name].json
    assert not list(misfits(answer, SCHEMA))
    for where in ("device_bytes", "host_bytes"):
        memory = answer[where]
        assert memory["peak"] == max(memory["phases"].values())
    assert sum(answer["device_bytes"]["terms"].values()) == pytest.approx(
        answer["device_bytes"]["peak"]
    )
    plan, step = answer["plan"], answer["step_s"]
    assert len(plan["block_policies"]) == plan["num_blocks"]
    assert len(plan["resident_chunks"]) == plan["n_persist"]
    waits = step["lanes"]["compute"] + sum(step["exposed"].values())
    assert waits == pytest.approx(step["total"])
    assert step["limiter"] in step["lanes"]


def test_nothing_but_the_answer_is_printed(plans: Plans) -> None:
    for name in ("resident", "paged", "liger", "packed", "qlora_fused"):
        assert plans[name].err == ""


def test_several_cards_are_an_array(plans: Plans) -> None:
    answer = plans["two_cards"]
    large, small = answer.json
    assert answer.exit_code == 2
    assert (large["verdict"], small["verdict"]) == ("fits", "does-not-fit")
    without_step = SCHEMA | {"step_s": type(None)}
    assert not list(misfits(large, SCHEMA)) and not list(misfits(small, without_step))
    assert large["hardware"]["name"] == "RTX 4090"
    assert small["hardware"]["name"] == "RTX 4090, 1 GiB"
    assert small["device_bytes"]["budget"] == GIB


def test_the_page_has_the_cards_and_loads_nothing(plans: Plans) -> None:
    page = (plans["two_cards"].folder / "page.html").read_text()
    for card in plans["two_cards"].json:
        assert card["hardware"]["name"] in page
    assert not re.search(r"https?://(?!www\.w3\.org)|<link|@import|src=", page)
    # nothing is drawn that the object does not say
    assert page == plan_page(plans["two_cards"].json)


def test_the_text_says_what_the_json_says(plans: Plans) -> None:
    """Of eight cards a line each and all about the best, within 60 lines."""
    answer = plans["text"]
    assert answer.exit_code == 2 and answer.err == ""
    large, small = plans["two_cards"].json
    text, lines = " ".join(answer.out.split()), answer.out.splitlines()
    assert "RTX 4090 on pcie4x16: fits" in text
    assert "without ProTrain too" in text
    assert large["hardware"]["source"] in text
    assert "RTX 4090 is the cheapest per token that fits" in text
    assert max(map(len, lines)) <= 100 and len(lines) <= 60
    assert lines.index("Assumed and not known:") > len(lines) - 24
    cost = large["cost"]["usd_per_million_tokens"]
    assert cost == pytest.approx(0.34 / 0.0036 / large["step_s"]["tokens_per_s"])
    assert small["cost"] == {"usd_per_hour": 0.05, "usd_per_million_tokens": None}
    rows = {line[:17].strip(): line[17:].split() for line in lines[2:10]}
    assert rows["T4"][:2] == ["unsupported", "no"] and rows["T4"][-1] == "-"
    assert rows["RTX 4090, 1 GiB"][:3] == ["does", "not", "fit"]
    assert rows["RTX 4090"][:2] == ["fits", "yes,"]
    assert float(rows["RTX 4090"][-1]) == pytest.approx(cost, rel=0.01)
    assert float(rows["RTX 4080"][-1]) > 10 * cost and rows["RTX 4070"][-1] == "-"


def test_where_nothing_fits_the_text_begins_with_the_way_out(plans: Plans) -> None:
    small, text = plans["two_cards"].json[1], " ".join(plans["unfit"].out.split())
    assert "RTX 4090, 1 GiB on pcie4x16: does not fit" in text
    assert small["reason"] in text
    for other in small["alternatives"]:
        assert other["change"] in text
    assert "`cut_cross_entropy: true` removes it" in text


def test_a_value_of_the_yaml_does_not_steer_the_terminal(plans: Plans) -> None:
    out = plans["steered"].out
    assert r"no tokenizer in \x1b[31mred" in out and "\x1b" not in out


def shell(*arguments: str, folder: Path | None = None, **variables: str) -> Any:
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        cwd=folder,
        env=os.environ | ENVIRONMENT | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


# --------------------------------------------------------------------- verdicts


WITHOUT = "without ProTrain"


def test_what_fits_without_paging_needs_no_plugin(plans: Plans) -> None:
    answer = fitting(plans, "resident")
    assert answer["plan"]["mode"] == "A"
    (plain,) = (a for a in answer["alternatives"] if a["change"] == WITHOUT)
    assert plain["verdict"] == "fits"
    assert plain["note"] == "it fits with gradient_checkpointing: false"
    assert plain["device_peak_bytes"] == answer["device_bytes"]["peak"]


def test_what_a_card_cannot_compute_is_no_fit(plans: Plans) -> None:
    """However much memory it has; with the way out, in the table of cards too."""
    answer, auto = plans["turing"], plans["turing, auto"]
    old, new = answer.json
    assert (answer.exit_code, auto.exit_code) == (2, 2)
    assert (old["verdict"], new["verdict"]) == ("unsupported", "fits")
    for card in (old, auto.json):
        assert "T4 computes no bf16" in card["reason"] and card["step_s"] is None
        assert "`bf16: false`" in card["reason"] and "7.5" in card["reason"]
        assert [o["verdict"] for o in card["alternatives"]] == ["fits"]
        assert card["alternatives"][0]["change"].startswith("--gpu")
        assert not list(misfits(card, SCHEMA | {"step_s": type(None)}))
    assert "flash_attention_2" not in old["reason"]
    assert "no flash_attention_2" in auto.json["reason"]
    assert "`attn_implementation: sdpa`" in auto.json["reason"]
    largest = plans["turing, largest"]
    assert largest.exit_code == 2 and largest.json["max"]["value"] is None
    assert "no bf16" in largest.json["max"]["note"]


def test_an_evaluation_has_its_own_rows_and_length(plans: Plans) -> None:
    short, long = (
        fitting(plans, name)["device_bytes"]["phases"]["evaluation"]
        for name in ("evaluated", "evaluated, longer")
    )
    logits = 4 * (1024 - 256) * SMALL["vocab_size"] * 4
    assert logits < long - short < 4 * logits


def test_what_axolotl_does_quietly_with_experts_and_merges_is_said(
    plans: Plans,
) -> None:
    assumed = fitting(plans, "experts")["assumptions"]
    for line in ("experts stay in 16 bits", "leaves the experts", "train as copies"):
        assert sum(line in text for text in assumed) == 1, line
    quiet = fitting(plans, "resident")["assumptions"]
    assert not any("experts" in line or "merge" in line for line in quiet)


@pytest.mark.parametrize("name", ["paged", "paged_full", "packed"])
def test_what_does_not_fit_is_paged(name: str, plans: Plans) -> None:
    answer = fitting(plans, name)
    plan, device = answer["plan"], answer["device_bytes"]
    assert plan["mode"] == "B" and plan["n_buffer"] > 0
    assert plan["n_persist"] < plan["num_chunks"] and plan["origin"] == "search"
    assert device["peak"] <= device["budget"] == GIB
    assert answer["step_s"]["lanes"]["fetch"] > 0
    (plain,) = (a for a in answer["alternatives"] if a["change"] == WITHOUT)
    assert plain["verdict"] == "does-not-fit" and "missing" in plain["note"]


def test_a_consumer_card_has_room_for_a_desktop(plans: Plans) -> None:
    """Unless its memory is given; a plan to the last byte fails in practice."""
    named, sized = fitting(plans, "resident"), fitting(plans, "paged")
    assert named["device_bytes"]["reserve"] == GIB
    assert any("desktop" in line for line in named["assumptions"])
    assert sized["device_bytes"]["reserve"] == 0


def test_what_fits_is_offered_more(plans: Plans) -> None:
    answer = fitting(plans, "paged")
    changes = [other["change"] for other in answer["alternatives"]]
    for larger in (
        "sequence_len 256 -> 512",
        "micro_batch_size 2 -> 4",
        "lora_r 8 -> 16",
    ):
        assert larger in changes


def test_the_hosts_adamw_has_its_price_beside_updates_on_the_device(
    plans: Plans,
) -> None:
    change = "protrain_cpu_optimizer: torch"
    others = plans["deferred_full"].json["alternatives"]
    (other,) = (o for o in others if o["change"] == change)
    there = fitting(plans, "paged_full")
    assert other["verdict"] == "fits"
    assert other["step_s"] == there["step_s"]["total"]
    assert all(o["change"] != change for o in there["alternatives"])


def test_what_does_not_fit_is_told_the_way_out(plans: Plans) -> None:
    _, small = plans["two_cards"].json
    missing = small["device_bytes"]["peak"] - small["device_bytes"]["budget"]
    assert f"{missing / GIB:.2f} GiB of device memory missing" in small["reason"]
    others = small["alternatives"]
    assert others[0]["verdict"] == "fits"
    # what changes the YAML least first, of those that help, and another card last
    assert small["device_bytes"]["peak_at"] == "while computing the loss"
    assert "while computing the loss" in small["reason"]
    helping = [o["change"].split()[0] for o in others if o["verdict"] == "fits"]
    assert helping == ["sequence_len", "--gpu"]
    fused, *lacking = (o for o in others if o["verdict"] != "fits")
    assert fused["change"] == "cut_cross_entropy: true"
    assert "liger_fused_linear_cross_entropy" in fused["note"]
    assert lacking[0]["change"] == "micro_batch_size 2 -> 1"
    assert small["avoidable"]["option"] == "cut_cross_entropy: true"
    # the logits in fp32, at least; what is computed is what the option leaves
    lost = small["avoidable"]["bytes"]
    assert lost >= 2 * 8192 * SMALL["vocab_size"] * 4
    peak = fitting(plans, "packed")["device_bytes"]["peak"]
    assert lost < small["device_bytes"]["peak"] - peak // 4
    shorter = next(o for o in others if o["change"].startswith("sequence_len 8192 ->"))
    assert shorter["verdict"] == "fits"
    assert shorter["device_peak_bytes"] <= GIB
    assert any(o["change"] == "--gpu 'RTX 3080'" for o in others)
    plans.add("shorter", SMALL, LORA | {"sequence_len": 1024}, *SMALL_CARD, "--json")
    assert shorter["change"] == "sequence_len 8192 -> 1024"
    answer = fitting(plans, "shorter")
    assert answer["device_bytes"]["peak"] == shorter["device_peak_bytes"]
    assert answer["step_s"]["total"] == shorter["step_s"]


def test_another_rank_is_planned_as_if_the_yaml_said_so(plans: Plans) -> None:
    answer = fitting(plans, "paged")
    other = next(o for o in answer["alternatives"] if o["change"] == "lora_r 8 -> 16")
    plans.add("rank_16", SMALL, LORA | {"lora_r": 16}, *SMALL_CARD, "--json")
    asked = fitting(plans, "rank_16")
    assert other["device_peak_bytes"] == asked["device_bytes"]["peak"]
    assert other["step_s"] == asked["step_s"]["total"]


def test_several_gpus_exchange_what_they_train(plans: Plans) -> None:
    one, two = fitting(plans, "resident"), fitting(plans, "two_resident")
    assert (one["plan"]["num_ranks"], two["plan"]["num_ranks"]) == (1, 2)
    assert one["plan"]["mode"] == two["plan"]["mode"] == "A"
    assert "communicate" not in one["step_s"]["lanes"]
    assert two["step_s"]["lanes"]["communicate"] > 0
    terms = two["device_bytes"]["terms"]
    assert terms["gradient buckets"] == terms["adapters"]
    assert "gradient buckets" not in one["device_bytes"]["terms"]
    assert one["step_s"]["total"] < two["step_s"]["total"]
    assert two["step_s"]["tokens_per_s"] > one["step_s"]["tokens_per_s"]
    assert any("2 GPUs" in line for line in two["assumptions"])
    # a desktop's board
    assert (one["hardware"]["link"], two["hardware"]["link"]) == ("pcie4x16", "pcie4x8")


def test_several_gpus_page_from_one_copy(plans: Plans) -> None:
    """Twice the ranks read the same host memory."""
    one, two = fitting(plans, "paged"), fitting(plans, "two_paged")
    assert one["plan"]["mode"] == "B" and two["plan"]["mode"] in "BC"
    table = 2 * SMALL["vocab_size"] * SMALL["hidden_size"]
    arenas = (
        answer["host_bytes"]["terms"]["arena"]
        - table * ("rows" in answer["plan"]["placements"])
        for answer in (one, two)
    )
    each, both = next(arenas) / len(paged_chunks(one)), next(arenas)
    pages = 4096 * len(paged_chunks(two))
    assert 0 <= both - each * len(paged_chunks(two)) <= 2 * pages
    loader = two["host_bytes"]["terms"]["loader"]
    assert loader == 2 * one["host_bytes"]["terms"]["loader"]


def paged_chunks(answer: Any) -> list[str]:
    return [place for place in answer["plan"]["placements"] if place == "paged"]


def test_every_mode_has_its_price(plans: Plans) -> None:
    for name in ("two_resident", "four_paged_full"):
        answer = fitting(plans, name)
        prices = {
            other["change"].removeprefix("mode "): other
            for other in answer["alternatives"]
            if other["change"].startswith("mode ")
        }
        assert list(prices) == ["A", "B", "C"]
        fit = {m: p for m, p in prices.items() if p["verdict"] == "fits"}
        assert all(price["plan"]["mode"] == mode for mode, price in fit.items())
        best_s = min(price["step_s"] for price in fit.values())
        assert answer["step_s"]["total"] <= best_s * (1 + 1e-9)
    assert prices["A"]["verdict"] == "does-not-fit"
    lacks = "protrain_force_all_persistent: true: .* of device memory missing"
    assert re.fullmatch(lacks, prices["A"]["note"])


def test_gradients_are_reduced_where_weights_page(plans: Plans) -> None:
    answer = fitting(plans, "four_paged_full")
    assert answer["device_bytes"]["terms"]["update operands"] > 0
    assert answer["step_s"]["lanes"]["communicate"] > 0
    assert answer["plan"]["num_ranks"] == 4


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("two_by_hand", "C"),
        ("replicated", "B"),
    ],
)
def test_a_key_chooses_the_mode(name: str, mode: str, plans: Plans) -> None:
    answer = fitting(plans, name)
    assert answer["plan"]["mode"] == mode and paged_chunks(answer)


def test_too_little_host_memory(plans: Plans) -> None:
    answer = plans["little_ram"]
    assert answer.exit_code == 2
    # the nearest plan lacks the least of both: some megabytes
    memories = answer.json["device_bytes"], answer.json["host_bytes"]
    lacks = sum(max(memory["peak"] - memory["budget"], 0) for memory in memories)
    assert 0 < lacks < 64 << 20 and memories[1]["budget"] == GIB
    assert "memory missing" in answer.json["reason"]
    more = next(o for o in answer.json["alternatives"] if o["change"] == "--ram 16")
    assert more["verdict"] == "fits"


def test_the_link_sets_the_pace_of_copies(plans: Plans) -> None:
    fast, slow = fitting(plans, "fast_link"), fitting(plans, "slow_link")
    assert fast["plan"] == slow["plan"]
    assert (fast["hardware"]["link"], slow["hardware"]["link"]) == (
        "pcie4x16",
        "pcie3x8",
    )
    ratio = slow["step_s"]["lanes"]["fetch"] / fast["step_s"]["lanes"]["fetch"]
    # half the lanes at half the rate, of which copies get another share
    assert ratio == pytest.approx(4 * 0.83 / 0.78)
    assert slow["step_s"]["total"] > fast["step_s"]["total"]


@pytest.mark.full
def test_a_base_that_is_not_here_is_fetched_on_demand(
    tmp_path: Path, plans: Plans
) -> None:
    """Its config.json alone, from whatever hub the environment names."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            if "some/llama" in self.path:
                asked.append(self.path)
            self.send_response(200)
            self.send_header("ETag", '"1"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(body)

    body = json.dumps(SMALL).encode()
    (tmp_path / "x.yaml").write_text(
        yaml.safe_dump({**BASE, **LORA, "base_model": "some/llama"})
    )
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=hub.serve_forever, daemon=True).start()
    there = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "0",
    }
    ask = partial(shell, "plan", "x.yaml", "--gpu", "4090", folder=tmp_path, **there)
    refused = ask()
    assert refused.returncode == 3 and not asked
    assert "hf download some/llama config.json" in refused.stderr
    done = ask("--download", "--json")
    hub.shutdown()
    assert (done.returncode, done.stderr) == (0, "")
    # a command of a shell says what a fork says
    assert json.loads(done.stdout)["plan"] == plans["resident"].json["plan"]
    assert {path.rpartition("/")[2] for path in asked} == {"config.json"}


# ------------------------------------------------------------- keys of the YAML


def test_overrides_are_followed(plans: Plans) -> None:
    plan = fitting(plans, "fast_link")["plan"]
    for key, value in BY_HAND.items():
        knob = key.removeprefix("protrain_").removesuffix("_override")
        assert plan[knob] == value
    assert plan["origin"] == "overrides"
    answer = plans["too_large"]
    assert answer.exit_code == 2 and answer.json["plan"]["n_persist"] == 8
    assert answer.json["plan"]["n_checkpoint"] == 0
    assert "the plan of the YAML" in answer.json["reason"]


def test_a_disk_takes_what_the_host_has_no_room_for(plans: Plans) -> None:
    without = plans["no_disk"].json
    assert without["verdict"] == "does-not-fit"
    ways = {other["change"]: other for other in without["alternatives"]}
    assert ways["protrain_disk_dir"]["verdict"] == "fits"
    answer = fitting(plans, "disk")
    memory = [x for x in answer["alternatives"] if x["change"].startswith("--ram")]
    assert memory[0]["verdict"] == "fits"
    assert memory[0]["step_s"] <= answer["step_s"]["total"]
    plan, step = answer["plan"], answer["step_s"]
    assert plan["on_disk"]
    assert {plan["placements"][index] for index in plan["on_disk"]} == {"paged"}
    assert answer["host_bytes"]["peak"] <= answer["host_bytes"]["budget"]
    assert step["lanes"]["disk"] > 0
    assert any(
        "lie on the disk, which reads 7.0 GB/s" in x for x in answer["assumptions"]
    )


def test_a_machine_with_one_memory_keeps_all_there(plans: Plans) -> None:
    """`--ram` adds none, and of two limits the lower one is for both together."""
    line = "paging saves nothing; recomputation and the disk"
    for name, total in (("one memory", 122548 << 20), ("one memory, limits", 8 * GIB)):
        answer = fitting(plans, name)
        assert answer["plan"]["mode"] == "A" and not answer["plan"]["n_swap"]
        device, host = answer["device_bytes"], answer["host_bytes"]
        assert device["budget"] + device["reserve"] == host["budget"] == total
        assert device["reserve"] >= host["phases"]["train"] > 0
        assert sum(line in text for text in answer["assumptions"]) == 1
        assert not any(
            "where that saves less" in text for text in answer["assumptions"]
        )
    ram = plans["one memory"].json["assumptions"]
    assert any("--ram does not count" in text for text in ram)


def test_what_one_memory_has_no_room_for_lies_on_a_disk(plans: Plans) -> None:
    short, full = plans["one memory, no disk"], plans["one memory, full"]
    for answer in (short, full):
        assert answer.exit_code == 2 and answer.json["plan"]["mode"] == "A"
        assert re.match(r"[\d.]+ MiB of the one memory missing", answer.json["reason"])
        changes = [other["change"] for other in answer.json["alternatives"]]
        assert not any(change.startswith("--ram") for change in changes)
    answer = fitting(plans, "one memory, disk")
    plan = answer["plan"]
    paged = [n for n, at in enumerate(plan["placements"]) if at != "resident"]
    assert plan["on_disk"] == paged != []
    taken = answer["device_bytes"]["peak"] + answer["host_bytes"]["phases"]["train"]
    assert taken <= GIB and answer["host_bytes"]["terms"]["ring"] > 0


def test_everything_resident_by_order(plans: Plans) -> None:
    answer = plans["all_resident"]
    assert answer.exit_code == 2 and answer.json["plan"]["mode"] == "A"


def test_the_yaml_limits_a_larger_card(plans: Plans) -> None:
    large, small = plans["yaml_limits"].json
    paged = plans["paged"].json
    assert large["device_bytes"]["budget"] == small["device_bytes"]["budget"] == GIB
    assert large["plan"]["mode"] == "B"
    assert any("protrain_capacity_bytes" in line for line in large["assumptions"])
    assert paged["device_bytes"]["budget"] == GIB


def test_paged_blocks_under_the_mlp_kernel_recompute_on_demand(plans: Plans) -> None:
    before, after = plans["paged"].json, plans["mlp_recomputes"].json
    num_paged = len(paged_chunks(after))
    assert before["plan"]["n_checkpoint"] < num_paged <= after["plan"]["n_checkpoint"]
    assert after["plan"]["mode"] == "B"
    assert after["step_s"]["total"] > before["step_s"]["total"]
    line = "8 of 8 blocks are under lora_mlp_kernel and recompute where"
    assert any(line in assumption for assumption in after["assumptions"])
    by_hand = plans["mlp_by_hand"]
    assert by_hand.exit_code == 3
    assert "protrain_n_checkpoint_override: 7" in by_hand.err
    assert "protrain_lora_mlp_forbid_offload" in by_hand.err


def test_the_plugin_need_not_be_listed(plans: Plans) -> None:
    assert plans["not_listed"].json["plan"] == plans["paged"].json["plan"]


def test_fused_kernels_are_in_the_plan(plans: Plans) -> None:
    qlora = fitting(plans, "qlora_fused")
    assert any("4-bit" in line for line in qlora["assumptions"])
    packed = fitting(plans, "packed")
    assert any("sample_packing" in line for line in packed["assumptions"])
    assert any("flash_attention_2" in line for line in packed["assumptions"])
    liger, plain = fitting(plans, "liger"), fitting(plans, "paged")
    logits = 2 * 256 * 8192 * 4
    keep_all = [answer["device_bytes"]["terms"] for answer in (liger, plain)]
    assert keep_all[0]["working set"] <= keep_all[1]["working set"] - logits


# ------------------------------------------------------------------- the inverse


@pytest.mark.parametrize(
    "what, key, stride",
    [
        ("seq", "sequence_len", 64),
        pytest.param("batch", "micro_batch_size", 1, marks=pytest.mark.full),
        pytest.param("rank", "lora_r", 8, marks=pytest.mark.full),
    ],
)
def test_the_largest_fits_and_the_next_does_not(
    what: str, key: str, stride: int, plans: Plans
) -> None:
    plans.add(f"max_{what}", SMALL, LORA, *SMALL_CARD, "--max", what, "--json")
    answer = plans[f"max_{what}"]
    found = answer.json["max"]
    assert (answer.exit_code, answer.err) == (0, "")
    assert (found["key"], found["now"]) == (key, (BASE | LORA)[key])
    for step in (0, 1):
        name = f"{what}_{step}"
        value = found["value"] + step * stride
        plans.add(name, SMALL, LORA | {key: value}, *SMALL_CARD, "--json")
    assert [plans[f"{what}_{step}"].exit_code for step in (0, 1)] == [0, 2]
    asked = plans[f"{what}_0"].json
    assert asked["device_bytes"]["peak"] == answer.json["device_peak_bytes"]


def test_no_size_fits(plans: Plans) -> None:
    answer = plans["max_nothing"]
    assert answer.exit_code == 2
    assert answer.json["verdict"] == "does-not-fit"
    assert answer.json["max"]["value"] is None


# ------------------------------------------------------------------------ images


@pytest.mark.parametrize(
    ("name", "blocks"), [("qwen_images", 7), ("llava_images", 6), ("text_alone", 7)]
)
def test_a_tower_that_is_traced_or_sees_no_image_needs_no_headroom(
    name: str, blocks: int, plans: Plans
) -> None:
    answer = fitting(plans, name)
    # those of the tower are planned like any other
    assert answer["plan"]["num_blocks"] == blocks
    assert answer["device_bytes"]["reserve"] == 0
    seen = any("one image of" in line for line in answer["assumptions"])
    assert seen == (name != "text_alone")
    assert not any("headroom" in line for line in answer["assumptions"])


@pytest.mark.parametrize("name, gib", [("unknown_images", 4), ("untraceable", 3)])
def test_a_tower_that_is_not_traced_gets_headroom(
    name: str, gib: int, plans: Plans
) -> None:
    answer = fitting(plans, name)
    device = answer["device_bytes"]
    assert device["reserve"] == gib * GIB
    assert device["budget"] == (24 - gib) * GIB
    (line,) = (line for line in answer["assumptions"] if "headroom" in line)
    assert f"{gib}.00 GiB" in line


# ------------------------------------------------------------------------ errors


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_is_a_line_for_each_reason(name: str, plans: Plans) -> None:
    answer = plans[name]
    assert answer.exit_code == 3
    assert answer.out == ""
    lines = answer.err.splitlines()
    assert re.search(REFUSED[name][0], answer.err), answer.err
    assert lines[0].startswith("Error: ") and "Traceback" not in answer.err
    # each is a reason of its own
    assert len(lines) <= 3, answer.err


def test_what_does_nothing_is_said(plans: Plans) -> None:
    """A key that Axolotl passes over, and a plugin that is not listed."""
    assumed = fitting(plans, "slips")["assumptions"]
    assert "plugins does not list" in assumed[0]
    assert "sequences_of: a key that Axolotl does not know" in assumed[1]
    known = fitting(plans, next(iter(CASES)))["assumptions"]
    assert not any("does not" in line for line in known)


def test_a_plan_of_a_preference_waits_for_nobody(plans: Plans) -> None:
    """In a pod, whose launcher names ranks that do not come."""
    build_inputs(plans.folder)
    pod = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    pod |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    keys = LORA | {"rl": "dpo", "tokenizer_config": str(TOKENIZER)}
    plans.add("pod", SMALL, keys, *LARGE_CARD, "--json", environment=pod)
    assert fitting(plans, "pod")["plan"]["num_ranks"] == 1


def test_an_error_as_json(plans: Plans) -> None:
    plans.command("missing", "missing.yaml", *LARGE_CARD, *SMALL_CARD, "--json")
    answer = plans["missing"]
    assert answer.exit_code == 3 and "missing.yaml" in answer.err
    for card, name in zip(answer.json, ("4090", "4090:1"), strict=True):
        assert card["verdict"] == "unsupported"
        assert "missing.yaml" in card["reason"]
        assert card["hardware"]["name"] == name


OWN = {"mib": 24480, "tflops_16": 197, "tflops_32": 49, "memory_gb_s": 456, "pcie": 5}


def test_a_card_from_a_file(tmp_path: Path) -> None:
    """As the table has it; of one name the file's comes first."""
    raw = {"Arc B60": OWN, "RTX 4090": OWN | {"reach": "RTX", "lanes": 8}}
    file = tmp_path / "cards.yaml"
    file.write_text(yaml.safe_dump(raw))
    table = (*own_cards(file), *GPUS)
    named = partial(gpu_hardware, link=None, host_bytes=GIB)
    found, mine = named("arc b60", table=table), named("4090", table=table)
    assert (found.name, found.device_bytes) == ("Arc B60", 24480 << 20)
    assert found.source.startswith(f"{file}; pcie5x16")
    assert mine.link == "pcie5x8" and mine.flops_16 > found.flops_16
    assert named("3090", table=table) == named("3090")


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ([OWN], ["holds no keys"]),
        ({"A": 3}, ["A: Input"]),
        ({"A": {"mib": 1}, "B:1": OWN}, ["A mib", "A pcie: Field required", "B:1 "]),
        ({"A": OWN | {"tflops": 3}}, ["A tflops: Extra", "it may have tflops_tf32"]),
        ({"A": OWN | {"mib": 24.5, "pcie": True}}, ["A mib", "A pcie"]),
        ({"A": OWN | {"reach": [], "aliases": "B"}}, ["A reach", "A aliases"]),
        ({"A": OWN | {"memory_gb_s": float("nan")}}, ["A memory_gb_s"]),
    ],
)
def test_all_that_is_wrong_with_a_file_of_cards(
    raw: object, parts: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "cards.yaml"
    file.write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError) as refusal:
        own_cards(file)
    for part in (str(file), *parts):
        assert part in str(refusal.value)


# ---------------------------------------------------------------------- training


@pytest.mark.parametrize("trained", [TRAINED])
def test_training_follows_the_plan(
    trained: Job, run: Callable[[Job], Result], plans: Plans
) -> None:
    result = run(trained)
    assert not result.error
    root = result.folder.parent.parent
    config = result.folder / "config-0.yaml"
    plans.command("trained", str(config), "--json", folder=root)
    answer, report = fitting(plans, "trained"), result.report
    assert answer["plan"] == report["plan"]
    for key in ("peak", "budget", "terms", "phases"):
        assert answer["device_bytes"][key] == report["device_bytes"][key]
    assert answer["host_bytes"]["terms"] == report["host_bytes"]["terms"]
    assert not answer["step_s"]["measured_blocks"]
    assert report["step_s"]["measured_blocks"]
