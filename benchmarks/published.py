"""What others measured on GPUs, beside what `axolotl protrain plan` says of the same YAML.

`published/measurements.csv` holds the rows with their sources, `primitives.csv` the rates of
links, products and memory from which the shares in `core/planner/cards.py` are taken. A
row's model is a configuration, its plan by hand: all on the card, recomputed as published,
or, where the run offloaded, the fastest that fits. `other_program` says where the bytes that
were measured are those of a program or a plan that no YAML of Axolotl has. Nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from tables import Page

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "protrain")]
from axolotl_jobs import LIGER, LORA, PROTRAIN, overrides  # noqa: E402
from plan_jobs import Answer, Plans  # noqa: E402

from axolotl.integrations.protrain.core.planner.cards import gpu_hardware  # noqa: E402

ROWS = Path(__file__).parent / "published" / "measurements.csv"
RESERVED = 1.07
"""Reserved by torch's allocator for what is allocated, median of 11 published runs."""
NO_LIMIT_GIB = 1000
"""For what fits in no single card: the run was spread over several."""
GPUS = {"H100 96GB 500W": "H100"}


def decoder(
    hidden: int, layers: int, heads: int, kv: int, inner: int, words: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": inner,
        "vocab_size": words,
        "max_position_embeddings": 131072,
        **more,
    }


def qwen(*sizes: int, kind: str = "qwen2", **more: Any) -> dict[str, Any]:
    return decoder(*sizes, model_type=kind, **more)


def gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 32768,
        "vocab_size": 50368,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        "num_hidden_layers": layers,
    }


TIED = {"tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama3-8b": decoder(4096, 32, 32, 8, 14336, 128256),
    "llama3.2-3b": decoder(3072, 28, 24, 8, 8192, 128256, head_dim=128, **TIED),
    "llama2-7b": decoder(4096, 32, 32, 32, 11008, 32000),
    "llama2-13b": decoder(5120, 40, 40, 40, 13824, 32000),
    "llama2-70b": decoder(8192, 80, 64, 8, 28672, 32000),
    "yi-34b": decoder(7168, 60, 56, 8, 20480, 64000),
    "mistral-7b": decoder(4096, 32, 32, 8, 14336, 32000),
    "mistral-24b": decoder(5120, 40, 32, 8, 32768, 131072, head_dim=128),
    "ministral-8b": decoder(4096, 36, 32, 8, 12288, 131072, head_dim=128),
    "tinyllama": decoder(2048, 22, 32, 4, 5632, 32000),
    "qwen2.5-0.5b": qwen(896, 24, 14, 2, 4864, 151936, **TIED),
    "qwen2.5-1.5b": qwen(1536, 28, 12, 2, 8960, 151936, **TIED),
    "qwen2.5-3b": qwen(2048, 36, 16, 2, 11008, 151936, **TIED),
    "qwen2.5-7b": qwen(3584, 28, 28, 4, 18944, 152064),
    "qwen3-1.7b": qwen(
        2048, 28, 16, 8, 6144, 151936, kind="qwen3", head_dim=128, **TIED
    ),
    "mp-1b": gpt2(2048, 24, 16),
    "mp-3b": gpt2(2560, 32, 20),
    "mp-7b": gpt2(4096, 32, 32),
}
LIGER_KEYS = {
    "plugins": [PROTRAIN, LIGER],
    "liger_rms_norm": True,
    "liger_glu_activation": True,
    "liger_fused_linear_cross_entropy": True,
}


@dataclass(frozen=True)
class Row:
    """One published run; the fields are those of the table."""

    facts: Mapping[str, str]

    @property
    def settings(self) -> dict[str, Any]:
        f = self.facts
        keys: dict[str, Any] = {
            "sequence_len": int(f["seq"]),
            "micro_batch_size": int(f["micro_batch"]),
            "gradient_accumulation_steps": 1,
            # without padding, which published rows do not have, sdpa is a flash kernel too
            "attn_implementation": "flash_attention_2",
            "sample_packing": True,
            "optimizer": f["optimizer"],
            "pad_to_sequence_len": True,
            "bf16": f["autocast"] == "True",
            "bfloat16": f["autocast"] != "True",
        }
        if f["attention"] == "sdpa" and f["micro_batch"] == "1":
            # one row has no padding; norms and embeddings stay in fp32 under sdpa
            keys |= {"attn_implementation": "sdpa", "sample_packing": False}
            keys["pad_to_sequence_len"] = False
        if f["method"] != "full":
            keys |= LORA | {"lora_r": int(f["lora_r"]), "adapter": f["method"]}
            keys["load_in_4bit"] = f["method"] == "qlora"
        if f["fused_loss"] == "True":
            keys |= LIGER_KEYS
        if f["plan"] == "plain":
            blocks = MODELS[f["model"]]["num_hidden_layers"]
            redone = blocks if f["checkpointing"] == "True" else 0
            keys |= overrides(n_persist=blocks, n_buffer=0, n_checkpoint=redone)
        return keys

    @property
    def arguments(self) -> list[str]:
        f = self.facts
        gpu = GPUS.get(f["gpu"], f["gpu"])
        # whole cards: on those that were measured was no desktop
        whole = gpu_hardware(gpu, None, host_bytes=0).device_bytes / 2**30
        limit = f":{NO_LIMIT_GIB if f['plan'] == 'plain' else whole}"
        several = ["--gpus", f["cards"]] if f["cards"] != "1" else []
        return ["--gpu", gpu + limit, *several, "--ram", "1024", "--json"]

    def memory_ratio(self, answer: Answer) -> float | None:
        """Predicted by published bytes."""
        published, planned = self.facts["published_GiB"], answer.json["device_bytes"]
        if not published:
            return None
        nbytes = planned["peak"] - planned["terms"]["context and workspaces"]
        if self.facts["peak_kind"] != "alloc":
            nbytes *= RESERVED
        return nbytes / 2**30 / float(published)

    def speed_ratio(self, answer: Answer) -> float | None:
        """Predicted by published tokens a second."""
        published, step = self.facts["published_tok_s"], answer.json.get("step_s")
        if not published or step is None:
            return None
        return step["tokens_per_s"] / float(published)


def rows(only: Sequence[str]) -> list[Row]:
    with ROWS.open(newline="") as file:
        found = [Row(facts) for facts in csv.DictReader(file)]
    chosen = [r for r in found if r.facts["model"] in MODELS]
    return [r for r in chosen if not only or r.facts["id"].startswith(tuple(only))]


def errors(ratios: Iterable[float | None]) -> str:
    apart = sorted(abs(ratio - 1) for ratio in ratios if ratio is not None)
    if not apart:
        return "-"
    return (
        f"median {statistics.median(apart):.1%}, worst {apart[-1]:.0%} of {len(apart)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="beginnings of ids")
    parser.add_argument("--output", type=Path, help="Markdown file")
    options = parser.parse_args()
    chosen, lines = rows(options.only), []
    speeds: list[float | None] = []
    sizes: dict[bool, list[float | None]] = {True: [], False: []}
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # a published row is one document
        plans = Plans(Path(folder), documents=1)
        for row in chosen:
            model = MODELS[row.facts["model"]]
            plans.add(row.facts["id"], model, row.settings, *row.arguments)
        for row in chosen:
            f, answer = row.facts, plans[row.facts["id"]]
            if "device_bytes" not in answer.out:
                sys.exit(f"{f['id']}: {answer.out}{answer.err}")
            speeds.append(row.speed_ratio(answer))
            nbytes, other = row.memory_ratio(answer), f["other_program"]
            sizes[not other].append(nbytes)
            what = f"{f['method']}, {f['micro_batch']} x {f['seq']}"
            ratios = ("" if r is None else f"{r:.2f}" for r in (nbytes, speeds[-1]))
            lines.append([f["id"], f["model"], what, f["gpu"], *ratios, other])
        plans.close()
    columns = ["row", "model", "training", "card", "bytes", "tokens/s", "whose bytes"]
    page = Page("predicted / published", columns, lines)
    page.show(Console(width=110))
    found = (
        f"tokens/s: {errors(speeds)}; bytes: {errors(sizes[True])}, where another "
        f"program or plan was measured {errors(sizes[False])}"
    )
    print(found)
    if options.output:
        text = " ".join((__doc__ or "").split())
        options.output.write_text(
            f"# published\n\n{text}\n\n{found}.\n\n{page.markdown()}", "utf-8"
        )


if __name__ == "__main__":
    main()
