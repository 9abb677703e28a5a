"""Plans and finished runs as page and text: what they say, and in which proportions."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from axolotl.integrations.protrain.core.errors import ConfigError
from axolotl.integrations.protrain.core.sizes import format_bytes
from axolotl.integrations.protrain.report.forecast import (
    format_plain,
    plain_pace,
    speed,
)
from axolotl.integrations.protrain.report.page import plan_page, report_page
from axolotl.integrations.protrain.report.run import REPORT_FILE, read_reports
from axolotl.integrations.protrain.report.text import plan_text, report_text

GIB = 2**30
VOID = {"meta"}
HOSTILE = "</script><script>alert('x')</script><b a=\"&amp;\">$title"


class Node:
    """An element of a parsed page."""

    def __init__(self, tag: str, attrs: dict[str, str]) -> None:
        self.tag, self.attrs = tag, attrs
        self.children: list[Node | str] = []

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def all(self, tag: str = "", style: str = "") -> list[Node]:
        """Elements below with this tag and this class."""
        return [
            node
            for node in self.walk()
            if tag in ("", node.tag)
            and (not style or style in node.attrs.get("class", "").split())
        ]

    def one(self, tag: str = "", style: str = "") -> Node:
        (node,) = self.all(tag, style)
        return node

    @property
    def text(self) -> str:
        """What a person reads; not what scripts and styles say."""
        if self.tag in ("script", "style"):
            return ""
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    @property
    def width(self) -> float:
        return float(self.attrs["width"])


class Tree(HTMLParser):
    """Builds nodes and insists that every tag is closed in its turn."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open = [Node("", {})]
        self.feed(page)
        self.close()
        assert [node.tag for node in self.open] == [""]

    @property
    def root(self) -> Node:
        return self.open[0]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def page_of(*forecasts: dict[str, Any]) -> Node:
    return Tree(plan_page(forecasts)).root


def figure(root: Node, title: str) -> Node:
    (found,) = (
        node
        for node in root.all("figure")
        if [head.text for head in node.all("h3")] == [title]
    )
    return found


def bars(figure: Node) -> list[Node]:
    return figure.all("svg", "bar")


def pieces(bar: Node) -> float:
    """Width of a bar's pieces together, which lie side by side."""
    end = 0.0
    for piece in bar.all("rect", "seg"):
        assert float(piece.attrs["x"]) == pytest.approx(end, abs=0.05)
        end += piece.width
    return end


ABOUT = {
    "model": "meta-llama/Meta-Llama-3-8B",
    "adapter": "qlora, rank 16",
    "rows": "2 x 2048 tokens, accumulation 4",
    "optimizer": "adamw_bnb_8bit",
    "versions": {"torch": "2.9.1"},
    "date": "2026-11-23T05:00:00+00:00",
}


def forecast(
    name: str = "RTX 4090",
    *,
    budget_gib: float = 22.0,
    num_blocks: int = 32,
    num_resident: int = 9,
    speed: float = 1.0,
    fill: float = 0.93,
) -> dict[str, Any]:
    """What the planner says of one card, in proportions of a 7B model with LoRA."""
    fits = fill <= 1
    block_bytes = 13 * GIB // num_blocks
    resident = [i * num_blocks // num_resident for i in range(num_resident)]
    policies = [
        "swap" if i < 3 else "recompute" if i < num_blocks - 4 else "keep"
        for i in range(num_blocks)
    ]
    weights = GIB + num_resident * block_bytes
    fixed = {
        "weights": weights,
        "slots": 4 * block_bytes,
        "optimizer": 400 * 2**20,
    }
    rest = fill * budget_gib * GIB - sum(fixed.values())
    saved_bytes = int(rest / (2 * num_blocks + 16))
    forward: list[dict[str, Any]] = [
        {
            "label": f"forward {i // 2}",
            "phase": "forward",
            "bytes": {**fixed, "gradients": 0, "activations": (i + 4) * saved_bytes},
        }
        for i in range(2 * num_blocks)
    ]
    highest = (2 * num_blocks + 4) * saved_bytes
    backward: list[dict[str, Any]] = [
        {
            "label": f"backward {num_blocks - 1 - i // 2}",
            "phase": "backward",
            "bytes": {
                **fixed,
                "gradients": min(i, 12) * (saved_bytes // 2),
                "activations": highest + (i % 2) * 8 * saved_bytes - i * saved_bytes,
            },
        }
        for i in range(2 * num_blocks)
    ]
    update: list[dict[str, Any]] = [
        {
            "label": "update",
            "phase": "update",
            "bytes": {**fixed, "gradients": 12 * (saved_bytes // 2), "activations": 0},
        }
    ]
    timeline = forward + backward + update
    terms = max((p["bytes"] for p in timeline), key=lambda b: sum(b.values()))
    peak = sum(terms.values())
    return {
        "hardware": {
            "name": name,
            "source": "preset of the data sheet",
            "link": "pcie4x16",
        },
        "verdict": "fits" if fits else "does-not-fit",
        "reason": None if fits else "the activations of one block exceed the budget",
        "plan": {
            "n_persist": num_resident,
            "n_buffer": 4,
            "n_swap": 3,
            "n_checkpoint": policies.count("recompute"),
            "mode": "B",
            "num_ranks": 2,
            "num_nodes": 1,
            "resident_chunks": resident,
            "num_chunks": num_blocks,
            "num_blocks": num_blocks,
            "block_policies": policies,
            "origin": "search",
            "update": "device",
            "adapters": "host-state",
            "placements": ["paged"] * num_blocks,
        }
        if fits
        else None,
        "device_bytes": {
            "peak": peak,
            "budget": int(budget_gib * GIB),
            "reserve": 3 * GIB // 2,
            "terms": terms,
            "phases": {
                "load": 3 * GIB,
                "forward": max(sum(p["bytes"].values()) for p in forward),
                "backward": peak,
                "update": sum(update[0]["bytes"].values()),
                "evaluation": 7 * GIB,
                "save": 5 * GIB,
            },
        },
        "host_bytes": {
            "peak": 21 * GIB,
            "budget": 58 * GIB,
            "terms": {
                "arena": 13 * GIB,
                "swapped activations": 7 * GIB,
                "process": GIB,
            },
            "phases": {"load": 18 * GIB, "forward": 21 * GIB, "save": 16 * GIB},
        },
        "step_s": {
            "total": 2.125 / speed,
            "lanes": {
                "compute": 1.75 / speed,
                "fetch": 1.25 / speed,
                "offload": 0.25 / speed,
                "host": 0.5 / speed,
            },
            "exposed": {"fetch": 0.25 / speed, "offload": 0, "host": 0.125 / speed},
            "recompute": 0.375 / speed,
            "limiter": "compute",
            "tokens_per_s": 3855.0 * speed,
        }
        if fits
        else None,
        "alternatives": [
            {
                "change": "micro_batch_size 2 -> 1",
                "verdict": "fits",
                "device_peak_bytes": peak - 3 * GIB,
                "step_s": 1.5 / speed,
                "tokens_per_s": 2730.0 * speed,
                "note": "doubles the steps of an epoch",
            },
            {
                "change": "gradient_checkpointing true -> false",
                "verdict": "does-not-fit",
                "device_peak_bytes": peak + 9 * GIB,
                "step_s": None,
                "tokens_per_s": None,
                "note": "activations of all blocks at once",
            },
        ],
        "assumptions": [
            "attention saves its output and log-sum-exp, as flash attention does",
            "pinned copies reach 85 % of the link's data sheet rate",
        ],
        "about": ABOUT,
        "timeline": timeline,
        "blocks": [
            {
                "name": f"model.layers.{i}",
                "policy": policies[i],
                "chunks": [
                    {
                        "bytes": block_bytes,
                        "placement": "resident" if i in resident else "paged",
                    }
                ],
                "forward_s": 0.0125 / speed,
                "backward_s": 0.025 / speed,
            }
            for i in range(num_blocks)
        ],
    }


def unfit() -> dict[str, Any]:
    return forecast("RTX 3060", budget_gib=10.5, fill=1.25)


def unsupported() -> dict[str, Any]:
    """Nothing was computed."""
    nothing = {"plan": None, "device_bytes": None, "host_bytes": None, "step_s": None}
    empty: dict[str, Any] = {"timeline": [], "blocks": [], "alternatives": []}
    return {
        **forecast("RX 7900"),
        **nothing,
        **empty,
        "verdict": "unsupported",
        "reason": "no pinned copies",
        "assumptions": [],
    }


def four() -> list[dict[str, Any]]:
    return [
        forecast("A10G", budget_gib=20.5, speed=0.25),
        unfit(),
        forecast("H100", budget_gib=76, speed=8, num_resident=30),
        forecast(),
    ]


def hostile(value: Any, key: str = "") -> Any:
    """The same forecast with every name and text replaced that is not one of a few."""
    if isinstance(value, dict):
        prefix = HOSTILE if key in ("terms", "phases", "bytes") else ""
        return {prefix + name: hostile(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [hostile(item, key) for item in value]
    one_of_few = (
        "verdict",
        "mode",
        "update",
        "adapters",
        "policy",
        "placement",
        "block_policies",
    )
    return (
        HOSTILE + value if isinstance(value, str) and key not in one_of_few else value
    )


PAGES = {
    "one": [forecast()],
    "four": four(),
    "unfit": [unfit()],
    "unsupported": [unsupported()],
    "mixed": [unsupported(), unfit(), forecast()],
    "80 blocks": [forecast(num_blocks=80, num_resident=40)],
    "one point": [{**forecast(), "timeline": forecast()["timeline"][:1]}],
}


@pytest.mark.parametrize("forecasts", PAGES.values(), ids=PAGES)
def test_page_is_balanced_and_loads_nothing(forecasts: list[dict[str, Any]]) -> None:
    page = plan_page(forecasts)
    nodes = list(Tree(page).root.walk())
    ids = [node.attrs["id"] for node in nodes if "id" in node.attrs]
    assert len(ids) == len(set(ids))
    assert "://" not in page and "@import" not in page
    links = re.findall(r"url\(([^)]*)\)", page)
    assert links and {link.removeprefix("#") for link in links} <= set(ids)
    assert not {node.tag for node in nodes} & {"link", "img", "iframe", "base", "a"}
    assert not any({"src", "href", "onload"} & node.attrs.keys() for node in nodes)
    assert "nan" not in page and "None" not in page


def test_texts_are_escaped() -> None:
    harmless = page_of(*four())
    root = page_of(*hostile(four()))
    assert [n.tag for n in root.walk()] == [n.tag for n in harmless.walk()]
    assert (
        root.one("h1").text
        == root.one("title").text
        == f"ProTrain plan for {HOSTILE}{ABOUT['model']}"
    )
    for style in ("name", "reason", "assume", "options", "terms", "phases", "band"):
        for node in root.all(style=style):
            assert HOSTILE in node.text, style


def test_every_figure_is_shown() -> None:
    card = forecast()
    text = page_of(card).text
    device, host = card["device_bytes"], card["host_bytes"]
    sizes = [device["reserve"], *(a["device_peak_bytes"] for a in card["alternatives"])]
    for memory in (device, host):
        sizes += [memory["peak"], memory["budget"], memory["budget"] - memory["peak"]]
        sizes += [*memory["terms"].values(), *memory["phases"].values()]
    for nbytes in sizes:
        assert format_bytes(nbytes) in text
    for name in (*device["terms"], *host["terms"], *device["phases"]):
        assert name in text
    for words in (
        "3,855 tokens/s",
        "2.12 s a step, limited by compute",
        "1.75 s busy, 375 ms of it recompute",
        "1.25 s busy, 250 ms exposed",
        "250 ms busy, hidden",
        "500 ms busy, 125 ms exposed",
        "of 32 chunks stay on the device",
        "9 of 32 chunks, 3.66 GiB",
        "23 of 32 chunks, 9.34 GiB",
        "25 of 32 blocks",
        "3 of 32 blocks",
        "1.50 s -29%",
        "2,730 tokens/s -29%",
        "doubles the steps of an epoch",
        *card["assumptions"],
    ):
        assert words in text, words


def test_timeline_is_to_scale() -> None:
    card = forecast()
    drawn = figure(page_of(card), "Device memory over one step")
    points, budget = card["timeline"], card["device_bytes"]["budget"]
    svg = drawn.one(style="plot").one("svg")
    _, _, width, height = map(float, svg.attrs["viewbox"].split())
    line = float(svg.one(style="budget").attrs["d"].split()[1].split("H")[0])
    unit = (height - line) / budget
    totals = [0.0] * len(points)
    polygons = svg.all("polygon")
    assert len(polygons) == len(points[0]["bytes"])
    for polygon, name in zip(polygons, points[0]["bytes"], strict=True):
        corners = [
            tuple(map(float, c.split(","))) for c in polygon.attrs["points"].split()
        ]
        roof, floor = corners[: len(points)], corners[len(points) :][::-1]
        assert [x for x, _ in roof] == [x for x, _ in floor]
        assert roof[0][0] == 0 and roof[-1][0] == width
        for i, ((_, high), (_, low)) in enumerate(zip(roof, floor, strict=True)):
            thick = points[i]["bytes"][name] * unit
            assert low - high == pytest.approx(thick, abs=0.011)
            assert height - low == pytest.approx(totals[i] * unit, abs=0.011)
            totals[i] += points[i]["bytes"][name]
    assert max(totals) == card["device_bytes"]["peak"]
    dot = drawn.one(style="peak").attrs["style"]
    left, bottom = map(float, re.findall(r"([\d.]+)%", dot))
    assert bottom / 100 == pytest.approx(max(totals) * unit / height, abs=1e-4)
    at = totals.index(max(totals)) / (len(points) - 1)
    assert left / 100 == pytest.approx(at, abs=1e-4)


def test_timeline_hover_has_every_point() -> None:
    card = forecast()
    script = figure(page_of(card), "Device memory over one step").one("script")
    data = json.loads(str(script.children[0]))
    assert data["budget"] == card["device_bytes"]["budget"]
    read = [
        {
            "label": label,
            "phase": phase,
            "bytes": dict(zip(data["names"], sizes, strict=True)),
        }
        for label, phase, *sizes in data["points"]
    ]
    assert read == card["timeline"]


def test_fit_bars_fill_their_own_card() -> None:
    """A small card beside a large one must not shrink to a line."""
    cards = four()
    drawn = bars(figure(page_of(*cards), "Does it fit?"))
    for bar, card in zip(drawn, cards, strict=True):
        device = card["device_bytes"]
        whole = max(device["peak"], device["budget"] + device["reserve"])
        unit = float(bar.attrs["viewbox"].split()[2]) / whole
        assert bar.one(style="track").width == pytest.approx(
            device["budget"] * unit, abs=0.01
        )
        assert pieces(bar) == pytest.approx(device["peak"] * unit, abs=0.05)
        assert bar.one(style="reserve").width == pytest.approx(
            device["reserve"] * unit, abs=0.01
        )
        excess = max(device["peak"] - device["budget"], 0) * unit
        over = sum(mark.width for mark in bar.all(style="over"))
        assert over == pytest.approx(excess, abs=0.01)


def test_what_terms_leave_unexplained_is_drawn() -> None:
    card = forecast()
    del card["device_bytes"]["terms"]["slots"]
    root = page_of(card)
    (bar,) = bars(figure(root, "Does it fit?"))
    whole = card["device_bytes"]["peak"] / card["device_bytes"]["budget"]
    assert pieces(bar) / bar.one(style="track").width == pytest.approx(whole, abs=1e-3)
    assert "not broken down 1.62 GiB" in bar.one(style="other").attrs["data-tip"]


def test_step_bars_add_up() -> None:
    card = forecast()
    whole, *lanes = bars(figure(page_of(card), "Step time"))
    unit = pieces(whole) / card["step_s"]["total"]
    assert sum(p.width for p in whole.all(style="exposed")) == pytest.approx(
        0.375 * unit, abs=0.02
    )
    assert whole.one(style="recompute").width == pytest.approx(0.375 * unit, abs=0.02)
    for bar, (lane, busy) in zip(lanes, card["step_s"]["lanes"].items(), strict=True):
        assert pieces(bar) == pytest.approx(busy * unit, abs=0.02)
        if lane != "compute":
            exposed = sum(p.width for p in bar.all(style="exposed"))
            assert exposed == pytest.approx(
                card["step_s"]["exposed"][lane] * unit, abs=0.02
            )


def test_map_of_eighty_blocks_with_two_chunks() -> None:
    card = forecast(num_blocks=80, num_resident=40)
    for block in card["blocks"]:
        block["chunks"].append({"bytes": 2**25, "placement": "host-state"})
    drawn = figure(page_of(card), "Where the blocks live")
    cells = drawn.all(style="cell")
    for cell, block in zip(cells, card["blocks"], strict=True):
        first, second = cell.all("rect")
        sizes = [chunk["bytes"] for chunk in block["chunks"]]
        assert first.width / second.width == pytest.approx(
            sizes[0] / sizes[1], rel=0.01
        )
        assert block["chunks"][0]["placement"] in first.attrs["class"].split()
        assert "host-state" in second.attrs["class"].split()
        assert cell.one(style="mark").text == block["policy"][0].upper()
        assert cell.attrs["data-tip"].startswith(f"{block['name']}: {block['policy']}")
    assert "80 of 160 chunks, 2.50 GiB" in drawn.one(style="legend").text


def test_card_that_does_not_fit_says_what_is_missing() -> None:
    card = unfit()
    root = page_of(card)
    over = card["device_bytes"]["peak"] - card["device_bytes"]["budget"]
    reason = root.one(style="reason").text
    assert card["reason"] in reason and "There is no plan for this card." in reason
    assert f"Missing: {format_bytes(over)} of device memory." in reason
    assert root.one(style="lead").text == "RTX 3060 ✕ does not fit."
    assert "n_persist" not in root.text and "tokens/s" not in root.one("header").text
    assert "no plan to time" in figure(root, "Step time").text
    card["host_bytes"]["budget"] = 16 * GIB
    assert "Missing: 5.00 GiB of host memory." in page_of(card).one(style="reason").text


def test_card_without_any_forecast() -> None:
    root = page_of(unsupported())
    assert "no pinned copies" in root.one(style="reason").text
    assert "unsupported" in root.one("header").text
    assert [node.text for node in root.all(style="sub")] == [
        "No memory forecast was made.",
        "No timeline: the step was not walked.",
        "No blocks were placed.",
        "No step time: there is no plan to time.",
        "No forecast was made.",
        "No forecast was made.",
    ]


def test_four_cards_side_by_side() -> None:
    cards = four()
    root = page_of(*cards)
    buttons, panels = root.all("button", "card"), root.all("section", "panel")
    assert len(buttons) == len(panels) == 4
    for button, panel, card in zip(buttons, panels, cards, strict=True):
        name = card["hardware"]["name"]
        assert button.attrs["aria-controls"] == panel.attrs["id"]
        assert name in button.text and name in panel.one("h2").text
        assert format_bytes(card["device_bytes"]["peak"]) in panel.text
    pressed = [b.attrs["aria-pressed"] for b in buttons]
    assert pressed == ["true", "false", "false", "false"]
    assert "3 of 4 cards fit; the fastest is H100 at 30,840 tokens/s." in root.text
    assert "12% of the fastest" in buttons[3].text
    alone = page_of(cards[0])
    assert not alone.all("button") and len(alone.all("section", "panel")) == 1


def test_terms_keep_their_colour_and_many_stay_distinct() -> None:
    cards = [forecast(), forecast("A10G", budget_gib=20.5)]
    for i in range(7):
        cards[1]["device_bytes"]["terms"][f"term {i}"] = GIB // 8
    root = page_of(*cards)
    drawn = figure(root, "Does it fit?")
    styles = {}
    for item in drawn.one(style="legend").all("li"):
        styles[item.text] = item.one("rect").attrs["class"]
    assert len(set(styles.values())) == len(styles)
    for bar in bars(drawn):
        for piece in bar.all("rect", "seg"):
            name = piece.attrs["data-tip"].rsplit(" ", 2)[0]
            assert styles[name] in piece.attrs["class"].split()


def test_the_text_takes_no_name_for_markup() -> None:
    card = forecast("RTX [4090]") | {"avoidable": None, "cost": None}
    card["device_bytes"]["peak_at"] = "at backward [3]"
    card["assumptions"] = ["no tokenizer in runs/[red]model"]
    card["alternatives"][0]["note"] = "as [bold] as before"
    text = plan_text([card])
    for words in ("RTX [4090] on", "backward [3]", "[red]model", "[bold]"):
        assert words in text


def longest() -> list[dict[str, Any]]:
    """Cards with the longest names, labels and notes that `plan` writes."""
    fits, misses = forecast(), unfit()
    misses |= {"plan": fits["plan"]}
    misses["hardware"] |= {"name": "RTX 4060 Ti 16GB, 12.5 GiB"}
    price = fits["alternatives"][0] | {"note": "nothing pages"}
    key = "protrain_force_all_persistent: true"
    fits["alternatives"] += [
        price | {"change": key},
        price
        | {
            "change": "without ProTrain",
            "step_s": 2.2,
            "tokens_per_s": 3855.0 * 2.125 / 2.2,
        },
    ]
    misses["alternatives"][1]["note"] = (
        f"{key}: 12.34 GiB of device memory missing: the smallest plan takes 36.33 GiB "
        "at forward 12, block 3 (recompute), 23.99 GiB may be used."
    )
    lever = price | {
        "change": "liger_fused_linear_cross_entropy",
        "keys": {
            "plugins": ["axolotl.integrations.liger.LigerPlugin"],
            "liger_fused_linear_cross_entropy": True,
        },
        "numbers": "the same training, rounded otherwise",
        "note": None,
        "sample_s": 0.75,
        "host_peak_bytes": 20 * GIB,
        "least_device_bytes": 9 * GIB,
        "lowers": {"device working set": [9 * GIB, 4 * GIB]},
    }
    lacks = {"verdict": "does-not-fit", "step_s": None, "lowers": {}, "note": "a note"}
    misses["levers"] = [lever, lever | lacks]
    difference = "--- a.yaml\n+++ b.yaml\n@@ -1 +1 @@\n-a: 1\n+a: 2"
    misses["fixed"] = lever | {"file": "b.yaml", "difference": difference}
    for card, usd in ((fits, 0.125), (misses, None)):
        card["cost"] = {"usd_per_hour": 1.0, "usd_per_million_tokens": usd}
        card["device_bytes"]["peak_at"] = "while computing the loss"
        card["avoidable"] = {
            "part": "optimizer state",
            "option": "optimizer: adamw_bnb_8bit",
            "bytes": 7 * GIB // 2,
            "where": "host",
        }
    return [fits, misses]


def test_levers_are_priced_with_keys_to_paste() -> None:
    card = longest()[1]
    drawn = figure(page_of(card), "What Axolotl can change")
    priced, lacking = (
        [cell.text for cell in line.all("td")] for line in drawn.all("tr")[1:]
    )
    fused, changes = card["levers"][0], "lowers device working set 9.00 GiB -> 4.00 GiB"
    assert priced[0] == fused["change"] and priced[1].endswith("fits")
    assert priced[2:5] == ["9.00 GiB", "20.00 GiB", "750 ms"]
    assert priced[6] == f"{fused['numbers']}; {changes}"
    for line in priced, lacking:
        assert yaml.safe_load(line[7]) == fused["keys"]
    assert lacking[4:6] == ["–", "–"] and "a note" in lacking[6]
    card["levers"][0]["note"] = HOSTILE
    assert HOSTILE in figure(page_of(card), "What Axolotl can change").text


@pytest.mark.parametrize("columns", ["80", "160", ""])
def test_text_of_the_longest_labels(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a terminal of 80 and 160 columns, and piped without either."""
    # empty: as if it were not there
    monkeypatch.setenv("COLUMNS", columns)
    cards = longest()
    text = "\n\n".join(plan_text(c, explain=True) for c in (cards, cards[1:]))
    assert max(map(len, text.splitlines())) <= int(columns or 100)
    shown = Path(__file__).parent / "shown" / f"plan-{columns or 'piped'}.txt"
    assert text + "\n" == shown.read_text("utf-8")


def finished(loss: float) -> dict[str, Any]:
    """What report.json holds of a run of `forecast`."""
    return {
        **forecast(),
        "about": ABOUT,
        "alternatives": [],
        "compared": {
            "device peak bytes": {"predicted": 20 * GIB, "measured": 19 * GIB},
            "swapped out bytes a step": {"predicted": 0, "measured": 0},
            "step seconds": {"predicted": 2.0, "measured": 2.5},
        },
        "losses": [[1, 2.5], [2, loss]],
        "steps": [4.0, 2.5],
        "lanes": None,
        "measured": {"num_steps": 2, "step_s": 2.5},
        "notes": ["Taken over: gradient_checkpointing."],
    }


def test_report_has_predicted_beside_measured(tmp_path: Path) -> None:
    for name, loss in (("one", 1.25), ("two", 1.5)):
        file = tmp_path / name / REPORT_FILE
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(finished(loss)))
    reports = read_reports([tmp_path / "one", tmp_path / "two"])
    text = report_text(reports)
    for words in (
        "one: meta-llama/Meta-Llama-3-8B, qlora, rank 16",
        "device peak  20.00 GiB  19.00 GiB   -5.0%",
        "loss 2.5000 (step 1) -> 1.2500 (step 2)",
        "last loss       1.2500     1.5000",
        # of steps that take 2.5 s instead of 2.125
        "tokens/s         3,855      3,277  -15.0%",
        "tokens/s         3,277      3,277\n",
    ):
        assert words in text, text
    assert "swapped out" not in text
    root = Tree(report_page(reports)).root
    assert (
        "+25.0%"
        in figure(root.all("section", "panel")[1], "Predicted and measured").text
    )
    axes = [
        [node.text for node in figure(panel, title).all("span")]
        for panel in root.all("section", "panel")[:1]
        for title in ("Loss", "Tokens per second")
    ]
    assert axes[0] == ["1.25", "1.875", "2.5", "step 1", "step 2"]
    assert axes[1] == ["2048", "2662", "3277", "step 1", "step 2"]
    step = forecast()["step_s"]
    rate = step["tokens_per_s"] * step["total"] / 2.5
    assert f"{rate:,.0f}" in root.all(style="big")[0].text
    with pytest.raises(ConfigError, match="no report of a finished run"):
        read_reports([tmp_path])


@pytest.mark.parametrize(("losses", "ends"), [([2.5, 2.0], 1), ([2.5], 0), ([], 0)])
def test_the_page_counts_losses_that_are_no_number(
    losses: list[float], ends: int
) -> None:
    """Only this sees a line that goes on as if there had been no NaN."""
    report = finished(1.0)
    numbers = [*losses, float("nan"), float("inf")]
    report["losses"] = [[step, loss] for step, loss in enumerate(numbers, start=1)]
    drawn = figure(Tree(report_page({"run": report})).root, "Loss")
    assert "Steps that are no number: 2." in drawn.text
    assert len(drawn.all("polyline")) == ends
    speeds = figure(Tree(report_page({"run": report})).root, "Tokens per second")
    assert "no number" not in speeds.text


def test_the_page_says_on_how_many_nodes() -> None:
    card = forecast()
    assert "on one node" in page_of(card).text
    card["plan"] |= {"num_ranks": 16, "num_nodes": 2}
    assert "on 2 nodes" in page_of(card).text


def test_the_page_says_who_answers() -> None:
    """Only this sees a page without what the text says of answers."""
    generation = {
        "sequences": 8,
        "prompt_tokens": 100,
        "new_tokens": 200,
        "every_steps": 4,
        "at_once": 4,
        "waves": 2,
        "held": [3],
        "cache_bytes": GIB,
        "host_cache_bytes": 0,
        "prefill_s": 0.5,
        "token_s": 0.25,
        "total_s": 9.0,
        "tokens_per_s": 150.0,
    }
    served = {
        "every_steps": 1,
        "sent_bytes": 3 * GIB,
        "visiting_bytes": GIB,
        "copies_s": 2.0,
    }
    shown = forecast() | {"generation": generation, "served": served}
    text = page_of(shown).text
    assert "Answers: 8 sequences in 2 waves of 4" in text
    assert "3.00 GiB of weights go there every step" in text
    neither = forecast() | {"generation": None, "served": None}
    assert "Answers" not in page_of(neither).text


def test_tokens_a_second_count_the_answers_of_a_run() -> None:
    """Only this sees a measured speed without what was sampled between its steps."""
    run, generation = finished(1.25), {"every_steps": 2.0, "total_s": 8.0}
    tokens = run["step_s"]["tokens_per_s"] * (2.125 + 8.0 / 2)
    assert speed(run | {"generation": generation, "measured": {}}) == pytest.approx(
        tokens / (2.125 + 8.0 / 2)
    )
    made = {"phases": 3, "seconds": 30.0}
    sampled = run | {"generation": generation, "generated": made}
    assert speed(sampled) == pytest.approx(tokens / (2.5 + 10.0 / 2))
    # whenever clients ask
    asked = sampled | {"generation": generation | {"every_steps": 0.0}}
    assert speed(asked) == speed(run)


def test_plain_training_is_compared_with_the_time_of_its_answers() -> None:
    """The step alone takes as long."""
    plain = {
        "change": "without ProTrain",
        "verdict": "fits",
        "device_peak_bytes": GIB,
        "step_s": 2.0,
        "tokens_per_s": 200.0,
    }
    assert plain_pace(100.0, [plain]) == "yes, 100% faster"
    assert format_plain(100.0, [plain]).endswith("you do not need it")
    assert plain_pace(400.0, [plain]) == "yes, 50% slower"
    assert "do not need" not in format_plain(400.0, [plain])


OTHER = "no report of a finished run"


@pytest.mark.parametrize(
    ("damage", "lacks", "said"),
    [
        ({"plan": {"mode": "B"}}, "", OTHER),
        ({"losses": None}, "", OTHER),
        ({"verdict": "perhaps"}, "", OTHER),
        ({"blocks": [{}]}, "", OTHER),
        *(
            ({}, key, f"lacks {key}, as another")
            for key in ("hardware", "notes", "plan", "step_s", "verdict")
        ),
    ],
    ids=str,
)
def test_a_report_of_other_versions_is_refused(
    damage: dict[str, Any], lacks: str, said: str, tmp_path: Path
) -> None:
    """One that lacks a key names it; with other contents it is none."""
    report, file = finished(1.0) | damage, tmp_path / "report.json"
    report.pop(lacks, None)
    file.write_text(json.dumps(report))
    with pytest.raises(ConfigError, match=said):
        read_reports([file])


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs a browser")
def test_a_browser_draws_the_report(tmp_path: Path) -> None:
    """Its script ends: the first run is shown, the other can be chosen."""
    page = tmp_path / "report.html"
    page.write_text(report_page({"one": finished(1.0), "two": finished(2.0)}), "utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    done = subprocess.run(
        [*command, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    panels = re.findall(r'<section class="panel" id="card-\d"([^>]*)>', done.stdout)
    assert [("hidden" in attributes) for attributes in panels] == [False, True]
