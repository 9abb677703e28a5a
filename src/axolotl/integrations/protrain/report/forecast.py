"""A forecast as one dict, and every word about it: for tables, page, JSON and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import yaml

from ..core.planner.planner import Forecast
from ..core.sizes import format_bytes
from ..core.types import PAGING_GAIN, Hardware, Knobs, Plan

FITS, DOES_NOT_FIT, UNSUPPORTED = "fits", "does-not-fit", "unsupported"
VERDICTS = {FITS: "fits", DOES_NOT_FIT: "does not fit", UNSUPPORTED: "unsupported"}
MODES = {
    "A": "everything on the device",
    "B": "from a copy on the host, whole chunks to each device",
    "C": "from a copy on the host, to each device a shard, gathered there",
}
LANES = {
    "compute": "compute",
    "fetch": "fetch",
    "offload": "offload",
    "host": "host work",
    "communicate": "collectives",
    "disk": "disk",
}
"""Lanes work at once: copies to the device are fetched, those to the host offloaded; the
host updates weights, or queues the work of each trained tensor whose state it has."""
WITHOUT_PLUGIN = "without ProTrain"
PLACEMENTS = {
    "resident": "weights and optimizer state on the device",
    "host-state": "weights on the device, optimizer state on the host",
    "paged": "all on the host, weights pass through a slot",
    "rows": "all on the host, which looks up the rows of a micro-batch",
}
UPDATES = {
    "device": "weights with state on the host: on the device, as they are used next",
    "host": "weights with state on the host: there, by AdamW",
}
POLICIES = {
    "keep": "activations stay on the device",
    "recompute": "activations are computed again in backward",
    "swap": "activations go to the host and come back",
    "swap-input": "inputs go to the host, the rest is computed again",
}
HOST_PHASES = {
    "load": "while the model is loaded, when all of it is on the host",
    "train": "while it trains",
    "generation": "while answers are generated",
    "save": "while a checkpoint is saved",
}
POINT_TERMS = {
    "weights": "weights",
    "slots": "slots",
    "operands": "update operands",
    "moments": "optimizer state",
    "gradients": "gradients",
    "activations": "saved activations",
    "working": "working set",
}
"""Fields of a point of the timeline, and their names."""


def forecast_dict(forecast: Forecast) -> dict[str, Any]:
    """A plan and what it will cost, as report.json and `--json` have it."""
    plan, layout, step = forecast.plan, forecast.layout, forecast.step
    device, host, budget = forecast.device, forecast.host, forecast.budget
    world = forecast.workload.world
    return {
        "plan": {
            **knobs_dict(plan),
            "mode": plan.mode,
            "num_ranks": world.size,
            "num_nodes": world.num_nodes,
            "origin": plan.origin,
            "update": plan.update.value,
            "adapters": next(
                (plan.placements[c.index].value for c in layout.chunks if c.adapter),
                None,
            ),
            "num_blocks": len(layout.blocks),
            "num_chunks": len(layout.pageable),
            "resident_chunks": [
                c.index for c in layout.pageable if c.index not in plan.paged
            ],
            "placements": [placement.value for placement in plan.placements],
            "on_disk": [*plan.on_disk],
            "block_policies": [policy.value for policy in plan.policies],
        },
        "device_bytes": {
            "peak": device.peak_bytes,
            "peak_at": device.peak.moment,
            "budget": budget.usable_bytes,
            "reserve": budget.reserve_bytes,
            "terms": device.terms,
            "phases": device.phases,
        },
        "host_bytes": {
            "peak": host.peak_bytes,
            "budget": budget.host_bytes,
            "terms": host.terms,
            "phases": host.phases,
        },
        "generation": generation_dict(forecast),
        "served": served_dict(forecast),
        "step_s": {
            "total": step.total_s,
            "lanes": dict(step.busy_s),
            "exposed": dict(step.exposed_s),
            "recompute": step.recompute_s,
            "limiter": step.limiter,
            "tokens_per_s": forecast.tokens_per_s,
            "measured_blocks": forecast.times.measured,
        },
    }


def generation_dict(forecast: Forecast) -> dict[str, Any] | None:
    """Describe how answers are sampled between steps, and what that costs; None without."""
    plan, asked = forecast.generation, forecast.workload.generation
    if plan is None or asked is None:
        return None
    return {
        "sequences": asked.rows,
        "prompt_tokens": asked.prompt_tokens,
        "new_tokens": asked.new_tokens,
        "every_steps": asked.steps,
        "at_once": plan.rows,
        "waves": plan.waves,
        "held": [*plan.held],
        "held_bytes": plan.held_bytes,
        "cache_bytes": plan.cache_bytes,
        "host_cache_bytes": plan.away_bytes,
        "prefill_s": plan.prefill_s,
        "token_s": plan.decode_s,
        "total_s": plan.total_s,
        "tokens_per_s": plan.tokens_per_s,
    }


def served_dict(forecast: Forecast) -> dict[str, Any] | None:
    """Describe what goes to a server that answers, and what that costs here; None without."""
    served, plan = forecast.workload.served, forecast.plan
    if served is None:
        return None
    chunks = [forecast.layout.chunks[index] for index in plan.away]
    fetched = sum(chunk.payload_bytes for chunk in chunks)
    frozen = (chunk.payload_bytes for chunk in chunks if not chunk.trainable)
    offloaded = sum(frozen) if served.merged else 0
    hardware = forecast.hardware
    return {
        "every_steps": served.steps,
        "sent_bytes": served.nbytes,
        "visiting_bytes": served.visiting_bytes,
        "fetched_bytes": fetched,
        "offloaded_bytes": offloaded,
        "copies_s": fetched / hardware.fetch_bytes_s
        + offloaded / hardware.offload_bytes_s,
    }


def format_served(answer: Mapping[str, Any]) -> str:
    """Say who answers and what is sent there, of a report or an answer of `plan --json`."""
    made = answer["served"]
    every = made["every_steps"]
    return (
        "Answers: a server gives them, so that nothing is held here for them, no keys and "
        f"values either. {format_bytes(made['sent_bytes'])} of weights go there every "
        f"{'step' if every == 1 else f'{every:g} steps'}, of which at most "
        f"{format_bytes(made['visiting_bytes'])} are on the device at once; copies here "
        f"take {format_seconds(made['copies_s'])}, the network is not known"
    )


def format_generation(answer: Mapping[str, Any]) -> str:
    """Say how answers are sampled, of a report or an answer of `plan --json`."""
    made, plan = answer["generation"], answer["plan"]
    waves = "at once"
    if made["waves"] > 1:
        waves = f"in {made['waves']} waves of {made['at_once']}"
    paged = sum(at == "paged" for at in plan["placements"])
    held = f"{len(made['held'])} of {paged} paged chunks held on the device, "
    every, when = made["every_steps"], ""
    if every:
        when = f" every {'step' if every == 1 else f'{every:g} steps'}"
    cache = f"cache {format_bytes(made['cache_bytes'])}"
    if made["host_cache_bytes"]:
        cache = f"cache {format_bytes(made['host_cache_bytes'])} on the host"
    return (
        f"Answers: {made['sequences']} sequences {waves}, {made['prompt_tokens']} + "
        f"{made['new_tokens']} tokens each, {held * bool(paged)}"
        f"{cache}; {format_seconds(made['total_s'])}{when}, "
        f"{format_speed(made['tokens_per_s'])} ({format_seconds(made['prefill_s'])} for "
        f"prompts, {format_seconds(made['token_s'])} a token of each sequence)"
    )


def knobs_dict(plan: Plan) -> dict[str, int]:
    """The four knobs by name."""
    return {knob.name: getattr(plan, knob.name) for knob in fields(Knobs)}


def answer_dict(forecast: Forecast, uncomputed: str | None = None) -> dict[str, Any]:
    """Describe one card as `plan --json` does.

    `uncomputed` says what the card cannot compute. `about`, `alternatives`, `avoidable`,
    `cost` and `assumptions` are for the caller to add.
    """
    plan, times, layout = forecast.plan, forecast.times, forecast.layout
    fits = lack(forecast) is None
    verdict, reason = (
        FITS if fits else DOES_NOT_FIT,
        None if fits else shortfall(forecast),
    )
    if uncomputed:
        verdict, reason = UNSUPPORTED, uncomputed
    answer = {
        "verdict": verdict,
        "reason": reason,
        "hardware": hardware_dict(forecast.hardware),
        **forecast_dict(forecast),
    }
    if verdict != FITS:
        answer["step_s"] = None
    answer["timeline"] = [
        {
            "label": point.label,
            "phase": point.phase,
            "bytes": {name: getattr(point, kind) for kind, name in POINT_TERMS.items()},
        }
        for point in forecast.device.timeline
    ]
    chunks = [
        {"bytes": chunk.nbytes, "placement": placement.value}
        for chunk, placement in zip(layout.chunks, plan.placements, strict=True)
    ]
    answer["blocks"] = [
        {
            "name": block.name,
            "policy": plan.policies[block.index].value,
            "chunks": [chunks[chunk] for chunk in block.chunks],
            "forward_s": times.forward_s[block.index],
            "backward_s": times.backward_s[block.index],
        }
        for block in layout.blocks
    ]
    return answer


def hardware_dict(card: Hardware) -> dict[str, str]:
    """Name the machine that a forecast is of."""
    return {"name": card.name, "source": card.source, "link": card.link}


def price_dict(forecast: Forecast | None) -> dict[str, Any]:
    """Price a setting for a table; without a plan that fits all is None."""
    if forecast is None:
        return dict.fromkeys(("device_peak_bytes", "step_s", "tokens_per_s", "plan"))
    return {
        "device_peak_bytes": forecast.device.peak_bytes,
        "step_s": forecast.step.total_s,
        "tokens_per_s": forecast.tokens_per_s,
        "plan": {**knobs_dict(forecast.plan), "mode": forecast.plan.mode},
    }


def cost_dict(usd_per_hour: float, step: Mapping[str, Any] | None) -> dict[str, Any]:
    """Say what the cards of a plan cost; no rate without a step that fits."""
    rate = step and usd_per_hour / 3600 / step["tokens_per_s"] * 1e6
    return {"usd_per_hour": usd_per_hour, "usd_per_million_tokens": rate}


def best(answers: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], str]:
    """The card to show of several, and why: the cheapest per token that fits or, without
    prices, the fastest; where none fits the one that lacks least."""
    fitting = [a for a in answers if a["verdict"] == FITS]
    if priced := [a for a in fitting if a["cost"]]:
        cheapest = min(priced, key=lambda a: a["cost"]["usd_per_million_tokens"])
        return cheapest, "the cheapest per token that fits"
    if fitting:
        fastest = max(fitting, key=lambda a: a["step_s"]["tokens_per_s"])
        return fastest, "the fastest that fits"

    def lacking(answer: Mapping[str, Any]) -> tuple[bool, int]:
        memories = answer["device_bytes"], answer["host_bytes"]
        missing = sum(max(m["peak"] - m["budget"], 0) for m in memories)
        return answer["verdict"] == UNSUPPORTED, missing

    return min(answers, key=lacking), "the one that comes nearest"


def lack(forecast: Forecast) -> str | None:
    """Return how much a plan lacks, of the device first; None if it fits."""
    budget = forecast.budget
    missing = {
        "device": forecast.device.peak_bytes - budget.usable_bytes,
        "host": forecast.host.peak_bytes - budget.host_bytes,
    }
    if forecast.hardware.one_memory:
        missing = {"the one": max(missing.values())}
    lacking = [
        f"{format_bytes(nbytes)} of {where} memory"
        for where, nbytes in missing.items()
        if nbytes > 0
    ]
    return f"{' and '.join(lacking)} missing" if lacking else None


def shortfall(forecast: Forecast) -> str:
    """Say what a plan lacks, with the moment at which it is missing."""
    device, host, budget = forecast.device, forecast.host, forecast.budget
    searched = forecast.plan.origin == "search"
    which = "the nearest plan" if searched else "the plan of the YAML"
    needed, has = host.peak_bytes, budget.host_bytes
    moment, where = HOST_PHASES[highest_phase(host.phases)], "host"
    if device.peak_bytes > budget.usable_bytes:
        needed, has = device.peak_bytes, budget.usable_bytes
        moment, where = device.peak.moment, "device"
    return (
        f"{lack(forecast)}: {which} takes {format_bytes(needed)} of the {where} {moment}, "
        f"{format_bytes(has)} may be used."
    )


def compared_rows(report: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """List each term of a report.json with its prediction, what it was, and how far off."""
    rows = []
    for name, pair in report["compared"].items():
        predicted, seen = pair["predicted"], pair["measured"]
        if seen is None or not (predicted or seen):
            continue
        form = format_seconds if "seconds" in name else format_bytes
        off = f"{seen / predicted - 1:+.1%}" if predicted else ""
        label = (
            name.replace(" bytes", "").replace(", seconds", "").replace(" seconds", "")
        )
        rows.append((label, form(predicted), form(seen), off))
    if (rate := speed(report)) and report["measured"]["step_s"]:
        predicted = report["step_s"]["tokens_per_s"]
        off = f"{rate / predicted - 1:+.1%}"
        rows.append(("tokens/s", format_rate(predicted), format_rate(rate), off))
    planned, made = report.get("generation"), report.get("generated")
    if planned and made and made["seconds"]:
        predicted, rate = planned["tokens_per_s"], made["tokens"] / made["seconds"]
        off = f"{rate / predicted - 1:+.1%}"
        named = "answers, tokens/s"
        rows.append((named, format_rate(predicted), format_rate(rate), off))
    return rows


def speed(answer: Mapping[str, Any]) -> float:
    """Tokens per second, as measured where that is known; 0 where nothing is."""
    step = answer["step_s"]
    if not step:
        return 0.0
    predicted = step["total"]
    seconds = answer.get("measured", {}).get("step_s") or predicted
    planned, made = answer.get("generation"), answer.get("generated")
    if planned and (every := planned["every_steps"]):
        predicted += planned["total_s"] / every
        each_s = planned["total_s"]
        if made and made["phases"]:
            each_s = made["seconds"] / made["phases"]
        seconds += each_s / every
    return float(step["tokens_per_s"] * predicted / seconds)


def format_keys(keys: Mapping[str, Any]) -> str:
    """Keys of a YAML, to paste."""
    return yaml.safe_dump(dict(keys), sort_keys=False).rstrip()


def format_lowers(lowers: Mapping[str, Sequence[int]]) -> str:
    """Say what an option takes from which term of the memory."""
    changed = (
        f"{term} {format_bytes(before)} -> {format_bytes(after)}"
        for term, (before, after) in lowers.items()
    )
    return f"lowers {', '.join(changed) or 'nothing'}"


def format_about(about: Mapping[str, Any]) -> str:
    """Say what was trained or planned, with which versions, and when."""
    versions = ", ".join(
        f"{name} {number}" for name, number in about["versions"].items()
    )
    head = ", ".join(about[key] for key in ("model", "adapter", "rows", "optimizer"))
    return f"{head}; {versions}; {about['date']}"


def format_losses(losses: Sequence[Sequence[float]]) -> str:
    """First and last, with their steps."""
    ends = [losses[0], losses[-1]] if losses else []
    return " -> ".join(f"{loss:.4f} (step {step})" for step, loss in ends)


def highest_phase(phases: Mapping[str, int]) -> str:
    """The phase of a run in which most memory is taken."""
    return max(phases, key=phases.__getitem__)


def format_avoidable(part: Mapping[str, Any] | None) -> str:
    """Name the largest part of a plan's memory that an option removes."""
    if part is None:
        return "none that a fused loss or AdamW with 8 bits would remove."
    where = " of the host" if part["where"] == "host" else ""
    nbytes = format_bytes(part["bytes"])
    return f"{part['part']} {nbytes}{where}; `{part['option']}` removes it."


def plain_pace(tokens_per_s: float, others: Iterable[Mapping[str, Any]]) -> str:
    """Compare plain training with a plan's speed: `yes, 24% slower`, or `no`."""
    plain = next((o for o in others if o["change"] == WITHOUT_PLUGIN), None)
    if plain is None or plain["verdict"] != FITS:
        return "no"
    faster = plain["tokens_per_s"] / tokens_per_s - 1
    if abs(faster) < 5e-3:
        return "yes, as fast"
    return f"yes, {abs(faster):.0%} {'faster' if faster > 0 else 'slower'}"


def format_plain(tokens_per_s: float, others: Iterable[Mapping[str, Any]]) -> str:
    """Say what plain training needs beside a plan; empty if it does not fit."""
    pace = plain_pace(tokens_per_s, others).partition(", ")[2]
    if not pace:
        return ""
    plain = next(o for o in others if o["change"] == WITHOUT_PLUGIN)
    needless = tokens_per_s <= (1 + PAGING_GAIN) * plain["tokens_per_s"]
    return (
        f"{WITHOUT_PLUGIN} too: {format_bytes(plain['device_peak_bytes'])}, {pace}"
        + ("; you do not need it" if needless else "")
    )


def format_seconds(seconds: float) -> str:
    """`seconds` in s or ms."""
    if seconds >= 1 or not seconds:
        return f"{seconds:.{0 if seconds >= 100 else 2}f} s"
    digits = 0 if seconds >= 0.1 else 1 if seconds >= 1e-3 else 3
    return f"{1e3 * seconds:.{digits}f} ms"


def format_rate(tokens_per_s: float) -> str:
    """Tokens per second, for a column that says so."""
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.3g}"


def format_speed(tokens_per_s: float) -> str:
    """With the unit."""
    return f"{format_rate(tokens_per_s)} tokens/s"


def format_pace(step_s: float, tokens_per_s: float) -> str:
    """Return how long a step takes and how fast that is."""
    return f"{format_seconds(step_s)} a step, {format_speed(tokens_per_s)}"


def format_limiter(step: Mapping[str, Any]) -> str:
    """Say what limits a step, of `step_s`."""
    return f"limited by {LANES.get(step['limiter'], step['limiter'])}"


def format_policies(policies: Sequence[str]) -> str:
    """`keep keep recompute` as `2 keep, 1 recompute`; `block_policies` says which."""
    return ", ".join(f"{number} {name}" for name, number in Counter(policies).items())
