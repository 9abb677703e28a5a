"""Options by which a YAML of Axolotl takes less memory or time, as a table.

`axolotl protrain plan` always prices quick rows, and the others with `--levers`. `--max`,
`--write` and the refusal before a base is loaded search over the table. What Axolotl or a
model refuses falls out when it is priced.
"""

from __future__ import annotations

import importlib.util
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .core.planner.planner import Forecast

ROUNDING = "the same training, rounded otherwise"
UPDATES = "other updates"
TRAINING = "another training"
NUMBERS = (ROUNDING, UPDATES, TRAINING)
"""Changes of the numbers, the least first."""

Keys = Mapping[str, Any]
Settings = Callable[[Any, bool], list[Keys]]
"""Takes a validated configuration and whether it is for CUDA. Returns keys and values, the
least change first; none where that is no option."""


class Number(NamedTuple):
    """A number of the YAML under which a model that is built stays the same.

    `asked` is its name for `--max`, which answers in multiples of `stride`. What is less
    than `least` is no way to make something fit.
    """

    asked: str
    key: str
    stride: int
    least: int

    def is_set(self, cfg: Any) -> bool:
        """Tell whether a YAML has such a number to change."""
        return bool(cfg[self.key]) and (self.key != "lora_r" or bool(cfg.adapter))

    def at(self, value: int, cfg: Any) -> dict[str, Any]:
        """Keys for another value: where they can, the effective batch and the scale of an
        adapter stay."""
        now, beside, kept, rest = cfg[self.key] or 1, "", 0, 0
        if self.key == "micro_batch_size":
            beside = "gradient_accumulation_steps"
            kept, rest = divmod((cfg[beside] or 1) * now, value)
        elif self.key == "lora_r":
            beside = "lora_alpha"
            kept, rest = divmod((cfg[beside] or 0) * value, now)
        return {self.key: value, **({beside: kept} if kept and not rest else {})}

    def lowered(self, cfg: Any, _on_cuda: bool = True) -> list[Keys]:
        """Settings that take less and less: a half, a quarter, and so on."""
        values = (cfg[self.key] >> n for n in range(1, 32)) if self.is_set(cfg) else ()
        ways = (self.at(value, cfg) for value in values if value >= self.least)
        # of micro-batches those of the same effective batch
        return [keys for keys in ways if self is not BATCH or len(keys) > 1]

    def largest(self, most: int, fits: Callable[[int], bool]) -> int:
        """The largest multiple of `stride`, up to `most`, that fits; 0 if none does."""
        high, end = 1, most // self.stride
        while high <= end and fits(high * self.stride):
            high *= 2
        untried = range(high // 2 + 1, min(high, end + 1))
        more = bisect_left(untried, True, key=lambda n: not fits(n * self.stride))
        return (high // 2 + more) * self.stride


BATCH = Number("batch", "micro_batch_size", 1, 1)
RANK = Number("rank", "lora_r", 8, 4)
LENGTH = Number("seq", "sequence_len", 64, 512)
QUICK = {number.asked: number for number in (BATCH, RANK, LENGTH)}


class Option(NamedTuple):
    """A row. A YAML has one at most of the rows of one `group`.

    Only a quick row has a `number`, which its settings lower: it is priced without
    another model. Axolotl does not bring the `package` along.
    """

    group: str
    numbers: str
    settings: Settings
    number: Number | None = None
    package: str | None = None
    note: str | None = None

    @property
    def is_here(self) -> bool:
        """Tell whether what it needs is installed."""
        return not self.package or importlib.util.find_spec(self.package) is not None

    @property
    def hint(self) -> str | None:
        """A note for people."""
        return self.note if self.is_here else f"{self.package} is to be installed first"


_LOSSES = (
    "cut_cross_entropy chunked_cross_entropy liger_cross_entropy "
    "liger_fused_linear_cross_entropy"
).split()
_KERNELS = "lora_mlp_kernel lora_qkv_kernel lora_o_kernel".split()

LOSS = "loss"
FUSED_LOSS = "cut_cross_entropy"
"""Takes the least of those that are priced."""


def has_plain_loss(cfg: Any, on_cuda: bool) -> bool:
    """Tell whether a loss that keeps no logits could take the place of this one."""
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


EIGHT_BITS: Settings = partial(_optimizer, "adamw_bnb_8bit")


def _larger_rows(cfg: Any, _on_cuda: bool) -> list[Keys]:
    ways = (BATCH.at((cfg[BATCH.key] or 1) << n, cfg) for n in range(1, 32))
    return [keys for keys in ways if len(keys) > 1]


def named(keys: Keys, cfg: Any) -> str:
    """`sequence_len 8192 -> 1024`, of the key that says most."""
    key = next(key for key in keys if key != "plugins")
    value, before = keys[key], getattr(cfg[key], "value", cfg[key])
    if value is True:
        return ", ".join(key for key in keys if keys[key] is True)
    return f"{key} {before} -> {value}"


def batch_note(keys: Keys, cfg: Any) -> str | None:
    """Say how accumulation, or else the effective batch, follows the micro-batch."""
    before, key = cfg.gradient_accumulation_steps or 1, "gradient_accumulation_steps"
    if BATCH.key not in keys or key in keys:
        return f"accumulation {before} -> {keys[key]}" if key in keys else None
    return f"the effective batch becomes {before * keys[BATCH.key]}"


def _in_4_bits(cfg: Any, _on_cuda: bool) -> list[Keys]:
    is_plain = cfg.adapter == "lora" and not cfg.load_in_8bit and not cfg.load_in_4bit
    return [{"adapter": "qlora", "load_in_4bit": True}] if is_plain else []


def _packed(cfg: Any, _on_cuda: bool) -> list[Keys]:
    takes = not (cfg.sample_packing or cfg.rl or cfg.reward_model)
    return [{"sample_packing": True, "pad_to_sequence_len": True}] if takes else []


NOTEWORTHY = 0.01
"""A share of the device's peak from which a part of the memory is worth a look."""


def large_parts(
    cfg: Any, forecast: Forecast, on_cuda: bool
) -> Iterator[tuple[str, Keys]]:
    """Parts of a plan's memory that an option may avoid, each with the option's keys."""
    if forecast.device.peak.in_loss and has_plain_loss(cfg, on_cuda):
        yield LOSS, {FUSED_LOSS: True}
    moments = max(forecast.device.states.moments, forecast.host.states.moments)
    if moments >= NOTEWORTHY * forecast.device.peak_bytes:
        yield from (("optimizer state", keys) for keys in EIGHT_BITS(cfg, on_cuda))


def first_fitting(count: int, fits: Callable[[int], bool]) -> int:
    """Find the first that fits, by its number, of settings that take less and less; the
    last one where none does.

    Each asked takes a trace: the last tells whether any fits.
    """
    last = count - 1
    return bisect_left(range(last), True, key=fits) if fits(last) else last


def smaller(cfg: Any) -> Iterator[Keys]:
    """Quick ways to take less: first those under which the training stays the same."""
    least: Keys = {}
    for option in OPTIONS:
        settings = option.settings(cfg, True) if option.number else []
        yield from ({**least, **keys} for keys in settings)
        least = settings[-1] if settings and option.numbers == ROUNDING else least


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
    Option("rows", ROUNDING, BATCH.lowered, BATCH),
    Option("rows", ROUNDING, _larger_rows),
    Option("optimizer", UPDATES, EIGHT_BITS),
    Option("optimizer", UPDATES, partial(_optimizer, "adafactor")),
    Option("base", TRAINING, _in_4_bits),
    Option("adapter", TRAINING, RANK.lowered, RANK),
    Option(
        "packing",
        TRAINING,
        _packed,
        note="how many samples a row then holds is a matter of the data",
    ),
    Option("row", TRAINING, LENGTH.lowered, LENGTH),
)
"""The least change first; of one group, what takes less later."""
