"""What a YAML of Axolotl can change to take less memory or time, as a table.

`axolotl protrain plan --levers` prices each row that is one for a YAML; `cli/fitting.py`
puts them together. What Axolotl or a model refuses falls out when it is priced.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .core.planner.planner import Forecast

ROUNDING = "the same training, rounded otherwise"
UPDATES = "other updates"
TRAINING = "another training"
NUMBERS = (ROUNDING, UPDATES, TRAINING)
"""What becomes of the numbers, the least change first."""

Keys = Mapping[str, Any]
Settings = Callable[[Any, bool], list[Keys]]
"""Of a validated configuration and whether it is for CUDA: keys and values, the least
change first; none where that is no lever."""


class Option(NamedTuple):
    """A row. Of rows of one ``group`` a YAML has one at most.

    ``is_quick``: takes less, by numbers under which a model that is built stays the
    same. ``package``: what Axolotl does not bring along.
    """

    group: str
    numbers: str
    settings: Settings
    is_quick: bool = False
    package: str | None = None
    note: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether what it needs is installed."""
        return not self.package or importlib.util.find_spec(self.package) is not None

    @property
    def hint(self) -> str | None:
        """What a person has to know of it."""
        return self.note if self.is_here else f"{self.package} is to be installed first"


_LOSSES = (
    "cut_cross_entropy chunked_cross_entropy liger_cross_entropy "
    "liger_fused_linear_cross_entropy"
).split()
_KERNELS = "lora_mlp_kernel lora_qkv_kernel lora_o_kernel".split()
_LEAST = {"sequence_len": 512, "lora_r": 4}


FUSED_LOSS = "cut_cross_entropy"
"""Takes the least of those that are priced."""


def has_plain_loss(cfg: Any, on_cuda: bool) -> bool:
    """Whether a loss that keeps no logits could take the place of this one."""
    has_own = cfg.rl or cfg.reward_model or cfg.process_reward_model
    return not (has_own or any(cfg[loss] for loss in _LOSSES)) and on_cuda


def _loss(key: str, plugin: str | None, cfg: Any, on_cuda: bool) -> list[Keys]:
    if not has_plain_loss(cfg, on_cuda):
        return []
    plugins = {"plugins": [f"axolotl.integrations.{plugin}"]} if plugin else {}
    return [{**plugins, key: True}]


def _kernels(cfg: Any, on_cuda: bool) -> list[Keys]:
    off = {key: True for key in _KERNELS if not cfg[key]}
    return [off] if off and on_cuda and cfg.adapter and not cfg.lora_dropout else []


def _optimizer(name: str, cfg: Any, _on_cuda: bool) -> list[Keys]:
    now = str(getattr(cfg.optimizer, "value", cfg.optimizer))
    is_other = now.startswith("adamw") and "8bit" not in now
    return [{"optimizer": name}] if is_other else []


def _rows(more: int, less: int, cfg: Any, _on_cuda: bool) -> list[Keys]:
    """The same effective batch in other micro-batches, further and further away."""
    rows, steps = cfg.micro_batch_size or 1, cfg.gradient_accumulation_steps or 1
    found: list[Keys] = []
    while rows % less == 0 and steps % more == 0:
        rows, steps = rows * more // less, steps * less // more
        keys = {"micro_batch_size": rows, "gradient_accumulation_steps": steps}
        found.append(keys)
    return found


def _halved(key: str, cfg: Any, _on_cuda: bool) -> list[Keys]:
    if not cfg[key] or (key == "lora_r" and not cfg.adapter):
        return []
    values = (cfg[key] >> n for n in range(1, 32))
    return [{key: n, **_scale(cfg, key, n)} for n in values if n >= _LEAST[key]]


def _scale(cfg: Any, key: str, value: int) -> Keys:
    """`lora_alpha` over `lora_r` stays."""
    alpha, rest = divmod((cfg.lora_alpha or 0) * value, cfg[key])
    return {"lora_alpha": alpha} if key == "lora_r" and alpha and not rest else {}


def _in_4_bits(cfg: Any, _on_cuda: bool) -> list[Keys]:
    is_plain = cfg.adapter == "lora" and not cfg.load_in_8bit and not cfg.load_in_4bit
    return [{"adapter": "qlora", "load_in_4bit": True}] if is_plain else []


def _packed(cfg: Any, _on_cuda: bool) -> list[Keys]:
    takes = not (cfg.sample_packing or cfg.rl or cfg.reward_model)
    return [{"sample_packing": True, "pad_to_sequence_len": True}] if takes else []


NOTEWORTHY = 0.05
"""Share of the device's peak from which an avoidable part of it is worth a line."""


def largest_part(cfg: Any, forecast: Forecast, on_cuda: bool) -> dict[str, Any] | None:
    """What most can be avoided of the device's peak or, where that is little, of the
    host: what it is, the option, how many bytes that avoids, and where."""
    device, host, states = forecast.device, forecast.host, forecast.device.states
    peak, on_host = device.peak, host.states
    # what it is, the option, which share of it goes, bytes of it on device and host
    parts: list[tuple[str, str, float, int, int]] = []
    if has_plain_loss(cfg, on_cuda):
        logits = peak.working * peak.in_loss
        parts.append(("the loss", f"{FUSED_LOSS}: true", 1.0, logits, 0))
    if keys := _optimizer("adamw_bnb_8bit", cfg, on_cuda):
        option = f"optimizer: {keys[0]['optimizer']}"
        moments = peak.moments, on_host.moments
        parts.append(("optimizer state", option, 0.75, *moments))
    if _in_4_bits(cfg, on_cuda):
        option = "adapter: qlora, load_in_4bit: true"
        weights = states.resident + states.slots
        parts.append(("16-bit weights", option, 0.75, weights, on_host.arena))
    ways = [
        (int(share * nbytes), where, part, option)
        for part, option, share, *both in parts
        for nbytes, where in zip(both, ("device", "host"), strict=True)
        if where == "host" or share * nbytes >= NOTEWORTHY * device.peak_bytes
    ]
    # of the device first
    nbytes, where, part, option = max(
        ways, key=lambda way: (way[1] == "device", way[0]), default=(0, "", "", "")
    )
    if not nbytes:
        return None
    return {"part": part, "option": option, "bytes": nbytes, "where": where}


def smaller(cfg: Any) -> Iterator[Keys]:
    """Quick ways to take less: first those under which the training stays the same."""
    least: Keys = {}
    for lever in OPTIONS:
        settings = lever.settings(cfg, True) if lever.is_quick else []
        yield from ({**least, **keys} for keys in settings)
        least = settings[-1] if settings and lever.numbers == ROUNDING else least


_LIGER, _CUT = "liger.LigerPlugin", "cut_cross_entropy.CutCrossEntropyPlugin"
OPTIONS = (
    Option("loss", ROUNDING, partial(_loss, "chunked_cross_entropy", None)),
    Option(
        "loss", ROUNDING, partial(_loss, "liger_fused_linear_cross_entropy", _LIGER)
    ),
    Option(
        "loss",
        ROUNDING,
        partial(_loss, "cut_cross_entropy", _CUT),
        package="cut_cross_entropy",
    ),
    Option("kernels", ROUNDING, _kernels),
    Option("rows", ROUNDING, partial(_rows, 1, 2), is_quick=True),
    Option("rows", ROUNDING, partial(_rows, 2, 1)),
    Option("optimizer", UPDATES, partial(_optimizer, "adamw_bnb_8bit")),
    Option("optimizer", UPDATES, partial(_optimizer, "adafactor")),
    Option("base", TRAINING, _in_4_bits),
    Option("adapter", TRAINING, partial(_halved, "lora_r"), is_quick=True),
    Option(
        "packing",
        TRAINING,
        _packed,
        note="how many samples a row then holds is a matter of the data",
    ),
    Option("row", TRAINING, partial(_halved, "sequence_len"), is_quick=True),
)
"""The least change first; of one group, what takes less later."""
