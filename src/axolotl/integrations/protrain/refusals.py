"""Combinations of YAML keys that cannot work, as a table: key, reason, way out.

What a table's row has besides is what `axolotl protrain migrate` writes instead.
"""

import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from .core.errors import ConfigError


class Refusal(NamedTuple):
    """Values of one key that cannot work; ``why`` continues a sentence about it.

    ``instead`` is the line of a YAML that trains the same, ``""`` none; without it the
    choice is a person's.
    """

    key: str
    why: str
    way_out: str = "Remove the key"
    when: Callable[[Any], bool] = bool
    instead: str | None = None

    def message(self, value: object) -> str:
        """The line for the person: key and value, the reason, the way out."""
        return f"{as_yaml(self.key, value)} {self.why}. {self.way_out}."


def as_yaml(key: str, value: object) -> str:
    """``key: value`` as in the YAML; mappings and lists are left out for length."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        value = str(value).lower()
    return f"`{key}: {value}`" if isinstance(value, str | int | float) else f"`{key}`"


def _each(keys: str, *row: Any, **when: Any) -> list[Refusal]:
    return [Refusal(key, *row, **when) for key in keys.split()]


def _one_of(*values: str) -> Callable[[object], bool]:
    return lambda value: value in values


def _several(value: object) -> bool:
    return isinstance(value, int) and value > 1


def _entry(mapping: object, key: str, default: object = None) -> object:
    return mapping.get(key, default) if isinstance(mapping, Mapping) else default


def _names(value: object) -> list[str]:
    """The names of a list, or one alone; none of what Axolotl will refuse."""
    listed = [value] if isinstance(value, str) else value
    return [str(name) for name in listed] if isinstance(listed, list | tuple) else []


def is_off(value: object) -> bool:
    """As pydantic reads it."""
    return str(value).lower() in ("false", "off", "no", "f", "n", "0")


def _has_range(patterns: object) -> bool:
    """Tell whether an entry ends like ``name[:100]``, which Axolotl trains row by row.

    ``layers.[0-9]+`` and ``layers.[0-9]`` are regular expressions, not ranges.
    """
    listed = patterns if isinstance(patterns, list) else []
    return any(re.search(r".\[[0-9]*(:[0-9]*)?\]$", str(text)) for text in listed)


_PARALLEL = "spreads the model over ranks in a way that ProTrain does not follow"
_QUANTISED = "gives weights of a kind that ProTrain cannot page"

PLACES = (
    "deepspeed fsdp fsdp_config layer_offloading lora_on_cpu ple_cpu_offload".split()
)
"""Keys that decide where weights live."""
TAKEN_OVER = (
    "gradient_checkpointing activation_offloading selective_checkpointing "
    "device_map max_memory gpu_memory_limit auto_find_batch_size".split()
)
"""Keys whose question the plan answers: what recomputes, waits on the host, and fits."""
LORA_KERNELS = tuple(f"lora_{what}_kernel" for what in "mlp qkv o embedding".split())
"""Axolotl's fused LoRA layers, on by themselves where a YAML does not say."""
_ANSWERED = "the plan says what recomputes, what waits on the host and what fits"
_REMOVED = "not in Axolotl any more"
_MIGRATED = (
    *_each(" ".join(PLACES), "where weights live is ProTrain's task", instead=""),
    # `true` stays, for runs without the plugin; `gpu_memory_limit` is the budget
    Refusal(
        "gradient_checkpointing",
        _ANSWERED,
        when=lambda value: isinstance(value, str),
        instead="",
    ),
    *_each(" ".join(TAKEN_OVER[1:5]), _ANSWERED, instead=""),
    Refusal("auto_find_batch_size", _ANSWERED, instead=""),
    *(
        Refusal(f"unsloth_{kernel}", _REMOVED, instead=f"{kernel}_kernel: true")
        for kernel in ("lora_mlp", "lora_qkv", "lora_o")
    ),
    *_each("unsloth_rope unsloth_rms_norm", _REMOVED, instead=""),
    Refusal("unsloth_cross_entropy_loss", _REMOVED, instead=""),
    Refusal(
        "protrain_auto_memory",
        "trains without ProTrain",
        when=is_off,
        instead="protrain_auto_memory: true",
    ),
)
"""Keys that training refuses in one line, takes over or never sees, and `migrate` changes."""

EXCLUDED = (
    *_each("tensor_parallel_size context_parallel_size", _PARALLEL, when=_several),
    *_each("sequence_parallel_degree expert_parallel_size", _PARALLEL, when=_several),
    *_each("dp_shard_size dp_replicate_size", _PARALLEL, when=_several, instead=""),
    Refusal(
        "use_ray",
        "starts ranks in a way that ProTrain has not been tried with",
        "Launch with torchrun or accelerate",
    ),
    *_each("gptq nvfp4_merge_aware", _QUANTISED),
    Refusal(
        "use_onebitllms",
        "makes layers that ask for a CUDA device, which a plan, made without weights, "
        "does not have",
    ),
    *_each("gemma4_fp8_nonexpert gemma4_nf4_nonexpert", _QUANTISED),
    *_each("nonexpert_quantization", _QUANTISED, when=_one_of("fp8_blockwise", "nf4")),
    Refusal(
        "model_quantization_config",
        _QUANTISED,
        "Add `model_quantization_config_kwargs: {dequantize: true}`",
        lambda config: config is not None,
    ),
    Refusal("nf4_backend", _QUANTISED, when=_one_of("torchao")),
    Refusal(
        "rl",
        "reads hidden states of the model and of a copy between two steps, which no plan "
        "counts",
        "Use grpo, gdpo, dpo, ipo, orpo, kto or simpo",
        _one_of("ebft"),
    ),
    Refusal(
        "precompute_ref_log_probs",
        "runs the model before training begins, when it is on the host",
        instead="",
    ),
    Refusal(
        "torch_compile_options",
        "has `triton.cudagraphs`, whose results the next block overwrites",
        "Remove it from the options",
        lambda options: bool(_entry(options, "triton.cudagraphs")),
    ),
    Refusal(
        "torch_compile_backend",
        "has not been tried with blocks that page their weights",
        "Use inductor",
        lambda name: name not in (None, "inductor", "aot_eager", "eager"),
    ),
    Refusal(
        "tiled_mlp",
        "adds up the gradients of the MLP's weights itself, while they leave for the host",
        "Train an adapter, or remove the key",
        instead="",
    ),
    Refusal("fp8", "replaces modules after ProTrain has laid them out"),
    Refusal(
        "wandb_watch",
        "reads weights after each forward, when those of most blocks are paged out",
        "Use `wandb_watch: gradients`, or log norms in an event of a callback",
        _one_of("all", "parameters"),
        "wandb_watch: gradients",
    ),
    Refusal(
        "lisa_n_layers",
        "asks for gradients of the base's weights, which no optimizer has",
        "Remove it, or the adapter",
    ),
    Refusal(
        "fp16",
        "without an adapter loads the weights that train in fp16, whose gradients torch's "
        "GradScaler refuses: the plain run ends in its first step",
        "Train an adapter, use `bf16: true`, or `bf16: false` with `fp16: false` for fp32",
    ),
    Refusal(
        "unfrozen_parameters",
        "has a range such as `name[:100]`, which masks gradients where they are not",
        "Name whole parameters",
        _has_range,
    ),
)
HOST_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
_INSEPARABLE = {
    "lomo": "updates weights inside of backward",
    "adalomo": "updates weights inside of backward",
    "galore_adamw_layerwise": "updates weights inside of backward",
    "galore_adamw_8bit_layerwise": "updates weights inside of backward",
    "galore_adafactor_layerwise": "updates weights inside of backward",
    "apollo_adamw_layerwise": "updates weights inside of backward",
    "q_galore_adamw8bit": "turns weights into integers",
    "polora": "looks at several weights together",
    "dion": "draws random numbers for all weights in turn",
    "grokadamw": "slows momentum down by the place of a weight among all of its group",
    "sinkgd": "draws random numbers for all weights in turn",
}
"""Optimizers whose update of a weight alone would not be that of the plain run."""


def _considered(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that work because of an adapter, or without any."""
    works = ("tiled_mlp", "fp16") if settings.get("adapter") else ("lisa_n_layers",)
    return {key: value for key, value in settings.items() if key not in works}


def placing(settings: Mapping[str, Any]) -> list[str]:
    """Keys that decide where weights live, FSDP's own among them."""
    # `fsdp_version` has a value in 0.21 where nothing is sharded
    sharded = settings.get("fsdp") or settings.get("fsdp_config")
    return [
        key
        for key, value in settings.items()
        if value and (key in PLACES or (sharded and str(key).startswith("fsdp_")))
    ]


def changes(raw: Mapping[str, Any]) -> list[Refusal]:
    """Rows for keys of a YAML, as it is spelt, that `migrate` takes out or replaces."""
    known = [row for row in (*_MIGRATED, *EXCLUDED) if row.instead is not None]
    keys = _considered(raw)
    found = [row for row in known if row.key in keys and row.when(keys[row.key])]
    named = {row.key for row in found}
    places = [_MIGRATED[0]._replace(key=key) for key in placing(raw)]
    return found + [row for row in places if row.key not in named]


def unlike_on_ranks(settings: Mapping[str, Any]) -> str | None:
    """Name a key under which some ranks run the model more often than others, for answers
    that a log shows; None without any."""
    for key in ("generate_samples", "do_causal_lm_eval"):
        if settings.get(key):
            return key
    for key in ("diffusion", "diffusion_lm"):
        own = settings.get(key)
        if own and _entry(own, "generate_samples", True):
            return f"{key}.generate_samples"
    if _entry(settings.get("diffusion_lm"), "unroll"):
        # each rank draws how often it runs the model
        return "diffusion_lm.unroll"
    logs = any(settings.get(f"use_{name}") for name in ("wandb", "mlflow", "comet"))
    return "eval_table_size" if logs and settings.get("eval_table_size") else None


def refusals(settings: Mapping[str, Any]) -> list[str]:
    """One line for every setting, ours or Axolotl's, that ProTrain cannot work with."""
    # of a YAML as it is spelt, too: pydantic takes "false" for false
    settings = {k: v for k, v in _considered(settings).items() if not is_off(v)}
    lines = _of_sampling(settings)
    if _entry(settings.get("model_quantization_config_kwargs"), "dequantize"):
        # plain weights once they are loaded
        config = settings.get("model_quantization_config")
        settings = {**settings, "model_quantization_config": None}
        if config == "FineGrainedFP8Config" and not settings.get("adapter"):
            lines.append(
                "`model_quantization_config: FineGrainedFP8Config` without an adapter: each "
                "save would round what has trained to FP8 again. Train an adapter, or the "
                "base that `python examples/merge_packed.py BASE OUTPUT` unpacks."
            )
    if not settings.get("torch_compile"):
        settings = {
            k: v for k, v in settings.items() if str(k)[:14] != "torch_compile_"
        }
    lines += [
        row.message(settings[row.key])
        for row in EXCLUDED
        if row.key in settings and row.when(settings[row.key])
    ]
    if keys := placing(settings):
        lines.append(
            "Where weights live is ProTrain's task here. Remove all that decides it: "
            f"{', '.join(f'`{key}`' for key in keys)}."
        )
    lines += _of_pairs(settings)
    optimizer = settings.get("optimizer") or HOST_OPTIMIZERS[0]
    trains_paged_weights = not (
        settings.get("adapter") or settings.get("protrain_force_all_persistent")
    )
    plugins = str(settings.get("plugins")).lower()
    if not settings.get("protrain_force_all_persistent") and "llmcompressor" in plugins:
        lines.append(
            "`plugins`: LLMCompressorPlugin writes weights from inside of passes, where "
            "those of most blocks are paged out. Remove it, or set "
            "`protrain_force_all_persistent: true`."
        )
    name = str(getattr(optimizer, "value", optimizer))
    key = "protrain_cpu_optimizer"
    if trains_paged_weights and settings.get(key) and name not in HOST_OPTIMIZERS:
        lines.append(
            f"{as_yaml('optimizer', optimizer)} cannot update weights on the host, "
            f"which `{key}` asks for. Use {' or '.join(HOST_OPTIMIZERS)}, train an "
            f"adapter, or remove `{key}`."
        )
    if trains_paged_weights and name in _INSEPARABLE:
        lines.append(
            f"{as_yaml('optimizer', optimizer)} {_INSEPARABLE[name]}, and here a part of "
            "them is updated at a time. Use adamw_bnb_8bit, adafactor or another of those "
            "in docs/compatibility.md, or train an adapter."
        )
    return lines


def _of_pairs(settings: Mapping[str, Any]) -> list[str]:
    """A line for each two keys that do not work together."""
    lines = []
    if settings.get("torch_compile") and settings.get("load_in_8bit"):
        lines.append(
            "`torch_compile: true` with `load_in_8bit: true` gives other numbers when "
            "weights are paged than when they are not. Use load_in_4bit, or remove one."
        )
    if settings.get("relora") and (
        settings.get("load_in_4bit") or settings.get("load_in_8bit")
    ):
        lines.append(
            "`relora: true` merges adapters into weights that bitsandbytes does not "
            "quantise again: at the first restart the plain run ends (4 bits), or goes on "
            "without what has trained (8 bits). Use it without load_in_4bit and "
            "load_in_8bit."
        )
    unlike = unlike_on_ranks(settings)
    if settings.get("protrain_zero3_shard") and unlike:
        lines.append(
            f"`{unlike}` runs the model on some ranks more often than on others, and with "
            "`protrain_zero3_shard: true` all have to do it together. Remove one of the "
            "two."
        )
    if settings.get("relora") and settings.get("protrain_disk_dir"):
        lines.append(
            "`relora: true` merges adapters into weights that `protrain_disk_dir` keeps on "
            "a disk, from which they are only read. Remove one of the two."
        )
    return lines


_SAMPLING = (
    Refusal(
        "sync_ref_model",
        "mixes weights of a reference on the device with ones that are on the host",
    ),
    *_each(
        "async_prefetch use_data_producer",
        "generates on a thread of its own while the model trains",
    ),
)


_COLOCATED = Refusal(
    "trl.vllm_mode",
    "has a second copy of the weights and a cache on the card that trains, which no plan "
    "counts",
    "Use `server`, with vLLM on another card, or remove `trl.use_vllm`: the model that "
    "trains answers",
)
_SENT_PACKED = _each(
    "load_in_4bit load_in_8bit",
    "with `trl.use_vllm: true` sends the server packed bytes: TRL merges into them, and "
    "does not unpack",
    "Load the base in 16 bits, or remove `trl.use_vllm`: the model that trains answers",
)
"""Keys under which a server would be sent what is no weight."""
_READ_ONLY = _each(
    "model_quantization_config protrain_disk_dir",
    "with `trl.use_vllm: true` and an adapter keeps a base that nobody can write, and "
    "merging and unmerging the adapter rounds it",
    "Remove one of them: without `trl.use_vllm` the model that trains answers",
    when=lambda value: value is not None,
)
"""Keys under which an adapter cannot be merged into the base for a server."""


def _of_sampling(settings: Mapping[str, Any]) -> list[str]:
    """A line for each key of `trl`, a mapping or validated, under which answers come in
    another way than ProTrain follows."""
    trl = settings.get("trl") or {}
    if not isinstance(trl, Mapping) and not hasattr(trl, "__dict__"):
        return [
            f"{as_yaml('trl', trl)} has no keys of its own. Write them below it, for "
            "example `  max_completion_length: 256`."
        ]
    trl = trl if isinstance(trl, Mapping) else vars(trl)
    trl = {key: value for key, value in trl.items() if value and not is_off(value)}
    lines = [
        row._replace(key=f"trl.{row.key}").message(trl[row.key])
        for row in _SAMPLING
        if row.key in trl
    ]
    if "use_vllm" not in trl:
        return lines
    if trl.get("vllm_mode") == "colocate":
        lines.append(_COLOCATED.message("colocate"))
    served = _SENT_PACKED + (_READ_ONLY if settings.get("adapter") else [])
    return lines + [
        row.message(settings[row.key])
        for row in served
        if row.when(settings.get(row.key))
    ]


def quantised_by(settings: Mapping[str, Any]) -> str | None:
    """The method of a `quantization_config` whose weights ProTrain cannot page; None for
    bitsandbytes', of which it knows where all bytes are."""
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return None
    method = settings.get("quant_method")
    return str(getattr(method, "value", method) or "a method without a name")


_COPIED = {"embed_tokens", "lm_head"}


def cautions(
    settings: Mapping[str, Any], experts_in_16_bits: bool, tied: bool
) -> list[str]:
    """Lines about what Axolotl does with a base, quietly, under keys that work.

    Args:
        settings: Keys of the YAML.
        experts_in_16_bits: The base is a mixture of experts that is not packed already.
        tied: Its embedding and head are one weight.
    """
    lines = []
    packed = settings.get("load_in_4bit") or settings.get("load_in_8bit")
    if experts_in_16_bits and packed and not settings.get("quantize_moe_experts"):
        lines.append(
            "quantize_moe_experts is not set: experts stay in 16 bits, whatever the rest "
            "of the base is loaded in"
        )
    if not settings.get("adapter") or settings.get("merge_method") == "legacy":
        return lines
    kwargs = settings.get("model_quantization_config_kwargs")
    if settings.get("model_quantization_config") and _entry(kwargs, "dequantize"):
        lines.append(
            "model_quantization_config: `axolotl merge-lora` leaves the experts of such a "
            "base as they were and rounds other weights to its bits again. "
            "`python examples/merge_packed.py BASE ADAPTER OUTPUT` merges with the values "
            "that trained, into 16 bits"
        )
        return lines
    targets = _names(settings.get("lora_target_parameters"))
    merge = "`axolotl merge-lora` under its default, `merge_method: memory_efficient`,"
    way_out = "Set `merge_method: legacy`, and compare what is merged"
    if any("expert" in name for name in targets):
        lines.append(
            f"lora_target_parameters: {merge} leaves the experts of some models, Mixtral "
            f"for one, as they were. {way_out}"
        )
    copies = _COPIED.intersection(_names(settings.get("lora_modules_to_save")))
    if tied and copies and not settings.get("peft_ensure_weight_tying"):
        lines.append(
            f"lora_modules_to_save: embedding and head, one weight in the base, train as "
            f"copies, which {merge} writes as one. {way_out}, or set "
            "`peft_ensure_weight_tying: true`"
        )
    return lines


def refuse_quantised(model: Any) -> None:
    """Refuse a loaded model whose weights are quantised by others than bitsandbytes."""
    config = getattr(model, "config", None)
    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        return
    method = quantised_by(
        quantised if isinstance(quantised, dict) else quantised.to_dict()
    )
    if method is not None:
        name = getattr(config, "name_or_path", "")
        raise quantised_base(name, method, "the base it was made from")


def quantised_base(name: str, method: str, origin: str) -> ConfigError:
    """The refusal of a base whose weights are quantised already; `origin` is not."""
    way_out = (
        f"Give {origin}; `load_in_4bit: true` with `adapter: qlora` makes it small."
    )
    if method == "fp8":
        way_out = (
            "Add `model_quantization_config: FineGrainedFP8Config` and "
            "`model_quantization_config_kwargs: {dequantize: true}`; under an adapter it "
            "stays packed on the host."
        )
    return ConfigError(
        f"base_model: {name} holds weights quantised by {method}, which cannot be "
        f"trained. {way_out}"
    )
