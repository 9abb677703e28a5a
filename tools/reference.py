"""Write docs/reference/keys.md from the keys' own descriptions, grouped by purpose.

`make reference` runs this; a test holds the page.
"""

import textwrap
from pathlib import Path

from axolotl.integrations.protrain.args import ProTrainArgs

PAGE = Path(__file__).parents[1] / "docs/reference/keys.md"
GROUPS = {
    "On and off": ("auto_memory",),
    "Budgets": (
        "capacity_bytes",
        "cpu_capacity_bytes",
        "disk_dir",
        "vision_headroom_bytes",
    ),
    "Which plan": (
        "auto_mode",
        "force_all_persistent",
        "force_replicated_cpu_offload",
        "zero3_shard",
        "lora_mlp_forbid_offload",
    ),
    "The four knobs by hand": tuple(
        f"n_{knob}_override" for knob in ("persist", "buffer", "swap", "checkpoint")
    ),
    "Updates": ("fp32_master", "cpu_optimizer"),
    "Checkpoints": ("save_optimizer_state", "async_save"),
    "What is remembered": ("cache_dir", "learn_peak"),
}
HEAD = """\
# Keys

Written by `make reference` from the keys' own descriptions: do not edit. None is needed beside
the two lines of the plugin. `axolotl-protrain keys` lists them too; a misspelt one is refused.
"""


def rendered() -> str:
    """The page: a heading for each purpose, a paragraph for each key."""
    parts = [HEAD]
    fields = dict(ProTrainArgs.model_fields)
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        of_it = {f"protrain_{name}": fields.pop(f"protrain_{name}") for name in names}
        said = [(field.description or "").split(". ") for field in of_it.values()]
        # what all of a group end with is said once
        shared = []
        while len(said) > 1 and len({words[-1] for words in said}) == 1:
            shared.insert(0, said[0][-1])
            said = [words[:-1] for words in said]
        if shared:
            parts.append(textwrap.fill(". ".join(shared), 100) + "\n")
        for (name, field), words in zip(of_it.items(), said, strict=True):
            default = "unset" if field.default is None else str(field.default).lower()
            text = f"* `{name}` (default: {default}). {'. '.join(words).rstrip('.')}."
            parts.append(textwrap.fill(text, 100, subsequent_indent="  "))
        parts.append("")
    assert not fields, f"in no group: {', '.join(fields)}"
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(rendered(), "utf-8")
