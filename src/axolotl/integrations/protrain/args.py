"""The ``protrain_…`` keys of the YAML: their types and what they exclude.

Axolotl adds :class:`ProTrainArgs` as one more base class of its own config, so the
validator here sees every Axolotl field beside ours. Deprecated spellings are rewritten
by then (``gradient_checkpointing: offload``); what depends on the run (the fp16 fallback,
a quantised checkpoint, the ranks) is checked when the model loads.
"""

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from .core.errors import BudgetError, ConfigError
from .core.sizes import parse_bytes
from .core.types import Knobs
from .refusals import as_yaml, changes, is_off, refusals, unlike_on_ranks

PLUGIN = "axolotl.integrations.protrain.ProTrainPlugin"
OURS = re.compile("pro[-_]?train", re.IGNORECASE)
"""Beginning of the keys that are meant for us."""
DROPPED = {
    "protrain_check_races": "the tests check accesses, a training does not",
    "protrain_snapshot_bytes": "a save copies what has room",
}
"""Keys of earlier versions, each with why it is gone."""


def _not_bool(value: object) -> object:
    """Pydantic reads ``true`` as 1; as a count it is a slip."""
    if isinstance(value, bool):
        raise ConfigError("a count is not true or false")
    return value


def _not_gib(value: object) -> int:
    """Without a unit so few bytes are GiB or MiB, of which the unit was forgotten."""
    num_bytes = parse_bytes(value)
    if num_bytes < 1 << 20 and str(value).strip().isdecimal():
        raise ConfigError(f"{value} bytes")
    return num_bytes


def _explain(allowed: str, example: str) -> WrapValidator:
    """One message for every way a value can be wrong."""

    def check(
        value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise ConfigError(
                f"`{info.field_name}` cannot be {value!r}: allowed is {allowed}, "
                f"for example `{info.field_name}: {example}`"
            ) from None

    return WrapValidator(check)


Flag = Annotated[bool, _explain("true or false", "true")]
Count = Annotated[
    int,
    Field(ge=0),
    BeforeValidator(_not_bool),
    _explain("a whole number from 0 up", "2"),
]
Bytes = Annotated[
    int,
    BeforeValidator(_not_gib),
    _explain(
        "a positive number of bytes, with a unit (B; KiB, MiB, GiB, TiB: powers of "
        "1024; KB, MB, GB, TB: powers of 1000) or from 1048576, which is 1 MiB, up",
        '"22GiB"',
    ),
]
Headroom = Annotated[
    int,
    BeforeValidator(lambda value: 0 if str(value) == "0" else parse_bytes(value)),
    _explain("0, or a number of bytes, bare or with a unit", '"4GiB"'),
]
HostAdam = Annotated[Literal["torch"], _explain("torch", "torch")]
Folder = Annotated[
    str, Field(min_length=1), _explain("the path of a folder", "/scratch/protrain")
]

_COMPLETION = {"n_persist": 0, "n_buffer": 2, "n_swap": 0, "n_checkpoint": 0}
FORCED = {
    "protrain_force_all_persistent": "A",
    "protrain_force_replicated_cpu_offload": "B",
    "protrain_zero3_shard": "C",
}
"""The key that asks for each mode."""
_OVERRIDE_NOTE = (
    "Any of the four overrides skips the search; those left out become n_persist 0, "
    "n_buffer 2, n_swap 0, n_checkpoint 0, with a warning. A set that this model or "
    "machine cannot run is an error with the legal range."
)


class ProTrainArgs(BaseModel):
    """The YAML interface. Only ``protrain_auto_memory`` is meant for daily use."""

    protrain_auto_memory: Flag = Field(
        default=True, description="Master switch; false leaves training untouched."
    )
    protrain_auto_mode: Flag = Field(
        default=True,
        description="Search for the fastest plan that fits. Becomes false beside a "
        "force flag.",
    )
    protrain_force_all_persistent: Flag = Field(
        default=False,
        description="Everything resident: plain training, plain DDP on several ranks.",
    )
    protrain_force_replicated_cpu_offload: Flag = Field(
        default=False,
        description="Page whole chunks from a host copy that the ranks of a node share.",
    )
    protrain_zero3_shard: Flag | None = Field(
        default=None,
        description="Page with each chunk sharded over the ranks of a node (two or "
        "more). False: never. Unset: if it is faster.",
    )
    protrain_n_persist_override: Count | None = Field(
        default=None,
        description="Number of chunks that stay on the device for good; more is faster "
        f"and takes more device memory. {_OVERRIDE_NOTE}",
    )
    protrain_n_buffer_override: Count | None = Field(
        default=None,
        description="Number of device slots that the paged chunks share; at "
        "least as many as one block has chunks, one more lets copies run ahead. "
        f"{_OVERRIDE_NOTE}",
    )
    protrain_n_swap_override: Count | None = Field(
        default=None,
        description="Number of blocks whose activations wait on the host between "
        "forward and backward; more takes less device memory and more of the link. With "
        "n_checkpoint more than there are blocks: that many of them recompute and send "
        f"only their inputs. {_OVERRIDE_NOTE}",
    )
    protrain_n_checkpoint_override: Count | None = Field(
        default=None,
        description="Number of blocks that recompute their activations in backward; "
        f"more is slower and takes less device memory. {_OVERRIDE_NOTE}",
    )
    protrain_capacity_bytes: Bytes | None = Field(
        default=None,
        description="Device budget. Unset: Axolotl's gpu_memory_limit, or what the "
        "device has free, less a reserve. Required on a machine without an accelerator.",
    )
    protrain_cpu_capacity_bytes: Bytes | None = Field(
        default=None,
        description="Host budget of a node. Unset: the lower of available memory and "
        "the cgroup limit, less a reserve.",
    )
    protrain_vision_headroom_bytes: Headroom = Field(
        default=4 * 1024**3,
        description="Reserved on the device for a vision tower that could not be "
        "traced; 0 reserves nothing.",
    )
    protrain_lora_mlp_forbid_offload: Flag = Field(
        default=False,
        description="Refuse plans in which a block under lora_mlp_kernel has paged "
        "weights and no recompute.",
    )
    protrain_cpu_optimizer: HostAdam | None = Field(
        default=None,
        description="Update weights whose optimizer state is on the host there, by torch's "
        "AdamW. Without it the device updates them.",
    )
    protrain_fp32_master: Flag = Field(
        default=False,
        description="Update bf16 trainable weights through fp32 masters, with fp32 "
        "state. Off, the update is that of the plain run.",
    )
    protrain_save_optimizer_state: Flag = Field(
        default=True, description="Write optimizer state into each checkpoint."
    )
    protrain_async_save: Flag = Field(
        default=True,
        description="Copy what a checkpoint holds, as far as the host has free room, and "
        "write it while training goes on, where one process trains and nobody looks at "
        "weights in `on_save`. False: training waits.",
    )
    protrain_cache_dir: Folder | None = Field(
        default=None,
        description="Folder for what is measured: rates, block times and peaks. Unset: the "
        "platform's cache folder.",
    )
    protrain_disk_dir: Folder | None = Field(
        default=None,
        description="Folder on a fast disk for frozen weights for which the host has no "
        "room. They are read from the base's own files where these lie on that disk, else "
        "written there once, and read ahead while blocks compute.",
    )
    protrain_learn_peak: Flag = Field(
        default=True,
        description="Plan with the peak that an earlier run of the same model and rows "
        "had on this device, beside the predicted one.",
    )

    # The name is long because a method of the same name in Axolotl's config would
    # silently replace this one.
    @model_validator(mode="after")
    def protrain_check_combinations(self) -> "ProTrainArgs":
        """Refuse what cannot work, all of it in one message."""
        if not self.protrain_auto_memory:
            return self
        # vars, not getattr: reading one of Axolotl's deprecated fields warns.
        problems = mode_conflicts(self) + refusals(vars(self))
        if problems:
            raise ConfigError("\n".join([*problems, ways_out(vars(self))]))
        # Written down, so that validating the validated config again agrees.
        if any(getattr(self, key) for key in FORCED):
            self.protrain_auto_mode = False
        if self.protrain_capacity_bytes is None:
            self.protrain_capacity_bytes = memory_limit(vars(self))
        return self


def memory_limit(settings: Mapping[str, Any]) -> int | None:
    """The bytes of Axolotl's key for the device, of which bare numbers are GiB.

    Raises:
        ConfigError: It is no size.
    """
    limit = settings.get("gpu_memory_limit")
    try:
        text = f"{limit}GiB" if isinstance(limit, int) else limit
        return None if limit is None else parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(
            f"`gpu_memory_limit`: {error}. Set `protrain_capacity_bytes`."
        ) from None


def without_traceback(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """`sys.excepthook`: refusals are for the person who wrote the YAML, in a sentence."""
    refused: list[object] = [error]
    if isinstance(error, ValidationError):
        # of several complaints some may be Axolotl's
        refused = [each.get("ctx", {}).get("error") for each in error.errors()]
    if all(isinstance(one, ConfigError | BudgetError) for one in refused):
        lines = (f"{type(one).__name__}: {one}" for one in refused)
        print("\n".join(lines), file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


def ways_out(settings: Mapping[str, Any]) -> str:
    """The last line of a refusal: what helps against more than one of its lines."""
    migrates = "`axolotl protrain migrate YOUR.yaml` shows what to write instead; "
    without = "`protrain_auto_memory: false` trains without ProTrain."
    return (migrates if changes(settings) else "") + without


def mode_conflicts(args: ProTrainArgs) -> list[str]:
    """Ways of choosing the plan that exclude each other."""
    # of a YAML as it is spelt, too
    flags = (*FORCED, "protrain_auto_mode", "protrain_fp32_master")
    on = {key for key in flags if getattr(args, key) and not is_off(getattr(args, key))}
    forced = [key for key in FORCED if key in on]
    names = " and ".join(f"`{key}`" for key in forced)
    resident = "protrain_force_all_persistent" in on
    searches = "protrain_auto_mode" in on
    by_hand = overrides(args)
    lines = []
    if len(forced) > 1:
        lines.append(f"{names} exclude each other. Keep one.")
    if forced and searches and "protrain_auto_mode" in args.model_fields_set:
        lines.append(f"`protrain_auto_mode: true` excludes {names}. Drop one of them.")
    if resident and by_hand:
        lines.append(
            "`protrain_force_all_persistent` leaves nothing for the "
            "`protrain_n_…_override` keys to set. Drop one or the other."
        )
    if resident and "protrain_fp32_master" in on:
        lines.append(
            "`protrain_fp32_master` keeps state on the host, which "
            "`protrain_force_all_persistent` excludes. Drop one of them."
        )
    if not (searches or forced or by_hand):
        lines.append(
            "`protrain_auto_mode: false` leaves no plan. Remove it, or set a "
            "`protrain_n_…_override` key or `protrain_force_all_persistent: true`."
        )
    return lines


def overrides(args: object) -> tuple[Knobs, tuple[str, ...]] | None:
    """Knobs set by hand, in either form of the keys, and which were filled in."""
    given = {knob: getattr(args, f"protrain_{knob}_override") for knob in _COMPLETION}
    filled = tuple(knob for knob, value in given.items() if value is None)
    if len(filled) == len(given):
        return None
    return Knobs(**given | {knob: _COMPLETION[knob] for knob in filled}), filled


def args_from(cfg: Mapping[str, Any]) -> ProTrainArgs:
    """The plugin's keys out of a validated Axolotl configuration."""
    keys = ((key, cfg.get(key)) for key in ProTrainArgs.model_fields)
    given = {key: value for key, value in keys if value is not None}
    if unlike_on_ranks(cfg):
        given["protrain_zero3_shard"] = False
    return ProTrainArgs.model_construct(**given)


def lists_plugin(plugins: Iterable[object] | None) -> bool:
    """Tell whether the key `plugins` has this one, under whichever of its names.

    Raises:
        ConfigError: It is no list.
    """
    if plugins and not isinstance(plugins, list | tuple):
        raise ConfigError(
            f"{as_yaml('plugins', plugins)} is no list; write each plugin on a line of "
            "its own that begins with `- `."
        )
    return any("protrain" in str(plugin).lower() for plugin in plugins or ())


def unknown_keys(raw: Mapping[Any, object]) -> list[str]:
    """One line for every ``protrain…`` key that does not exist.

    Axolotl drops unknown keys in silence, so this has to see the unvalidated YAML.
    """
    return [
        _correction(str(key), value)
        for key, value in raw.items()
        if OURS.match(str(key)) and key not in ProTrainArgs.model_fields
    ]


def bad_values(raw: Mapping[Any, object]) -> list[str]:
    """One line for every value of a ``protrain_…`` key that is none of its kind."""
    given = {key: raw.get(key) for key in ProTrainArgs.model_fields}
    try:
        ProTrainArgs(**{key: v for key, v in given.items() if v is not None})
    except ValidationError as error:
        # without a place: combinations, which are asked for together with Axolotl's
        found = [each for each in error.errors() if each["loc"]]
        return [str(each["ctx"]["error"]) for each in found]
    return []


def _correction(key: str, value: object) -> str:
    if key in DROPPED:
        return f"`{key}` is no key any more: {DROPPED[key]}. Remove it."
    if isinstance(value, Mapping) and value:
        inner = ", ".join(f"`{_nearest(f'protrain_{name}')}`" for name in value)
        return f"`{key}` is a block, but ProTrain's keys are flat: {inner}"
    return f"`{key}`: did you mean `{_nearest(key)}`?"


def _nearest(key: str) -> str:
    flat = re.sub(r"^pro_?train_?", "protrain_", key.lower().replace("-", "_"))
    return difflib.get_close_matches(flat, ProTrainArgs.model_fields, 1, cutoff=0.0)[0]
