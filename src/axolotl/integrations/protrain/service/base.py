"""Open the YAML of a service: its base, with LoRA layers, under a plan."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from axolotl.cli.config import load_cfg
from axolotl.integrations.base import PluginManager
from axolotl.train import setup_model_and_tokenizer
from axolotl.utils.dict import DictDefault
from axolotl.utils.logging import get_logger
from safetensors import safe_open

from ..args import PLUGIN, lists_plugin
from ..core.errors import FOREIGN_ERRORS, ConfigError, first_complaint
from ..generation import Asked
from ..offline.batches import find_file
from ..offline.optimizer_state import plain_optimizer
from ..offline.yaml_file import read_yaml
from ..plugin import ProTrainPlugin
from ..refusals import refusals
from ..run import TrainingRun
from .full import FullModel
from .live import LiveAdapter
from .optimizers import AdapterOptimizer

LOG = get_logger(__name__)

ROWS_AT_ONCE = 64
"""Rows that decode together where the plan finds room for them, half of each a prompt."""
NO_EFFECT = {
    "saving": "save_* saves_per_epoch hub_* *resume_from_checkpoint* lora_model_dir "
    "dynamic_checkpoint merge_lora merge_method load_best_model_at_end push_*_to_hub",
    "evaluation": "eval_* evals_per_epoch evaluation_strategy val_set_size test_datasets "
    "do_causal_lm_eval do_bench_eval bench_* metric_for_best_model greater_is_better "
    "early_stopping_patience generate_samples num_generation_samples generation_* "
    "lm_eval_*",
    "logs": "logging_* use_tensorboard *wandb* *mlflow* *comet* *trackio* *otel_* "
    "*swanlab* gradio_* profiler_* include_tkps include_tokens_per_second debug "
    "loss_watchdog_*",
    "a schedule of steps": "num_epochs max_steps batch_size gradient_accumulation_steps "
    "auto_find_batch_size gc_* torch_empty_cache_steps warmup_* lr_* cosine_* eta_min jagged_* relora*",
    "numbers of the optimizer, which clients set": "optim_target_modules learning_rate "
    "embedding_lr* "
    "weight_decay adam_* dion_* qgalore_* grokfast_* loraplus_* lisa_* max_grad_norm "
    "torchdistx_path",
    "the loss, which clients name": "rl rl_* trl vllm ebft* dpo_* orpo_* simpo_* cpo_* "
    "kto_* rpo_* kd_* precompute_ref_log_probs neftune_noise_alpha "
    "noisy_embedding_alpha use_eaft eaft_* nemo_gym_* diffusion hatchery "
    "cut_cross_entropy chunked_cross_entropy* liger_*cross_entropy "
    "liger_use_token_scaling flash_attn_cross_entropy",
    "data": "datasets pretraining_dataset dataset_* shuffle_* skip_prepare_dataset "
    "streaming* pretrain_* pretraining_* *sample_packing* multipack_* batch_flattening "
    "max_packed_sequence_len group_by_length curriculum_sampling min_sample_len "
    "max_prompt_len excess_length_strategy train_on_inputs remove_unused_columns "
    "total_*_tokens dataloader_* use_pose pose_* eot_tokens "
    "default_system_message processor_type processor_kwargs image_* role_boundaries",
    "what trains, and where": "lora_dropout unfrozen_parameters freeze_mm_modules "
    "spectrum_* lora_*_kernel torch_compile* *gradient_checkpointing* "
    "activation_offloading selective_checkpointing device_map max_memory ddp ddp_* "
    "world_size local_rank accelerator_config",
}
"""Keys of a YAML that mean nothing to a service, by what they are about; patterns."""
_NO_EFFECT = tuple(chain.from_iterable(map(str.split, NO_EFFECT.values())))
_OF_FULL = ("unfrozen_parameters", "freeze_mm_modules")
"""Keys among these that mean something to a full fine-tune."""
_PLUGINS = re.compile(
    r"integrations\.(cut_cross_entropy|diffusion|grokfast|hatchery|kd|lm_eval|nemo_gym|"
    r"spectrum|swanlab)\."
)
"""Axolotl's own for such keys."""
_REFUSED = (
    (
        "reward_model process_reward_model num_labels",
        "makes a model that scores rows; the service trains models that predict tokens",
    ),
    ("fp16", "needs losses that are scaled, which the service leaves to nobody"),
    (
        "qat reinit_weights use_mora mora",
        "computes with other weights than the base has",
    ),
    (
        "lora_modules_to_save lora_target_parameters peft_use_dora "
        "peft_layer_replication peft_trainable_token_indices",
        "trains something other than LoRA weights of linear layers, which is all that "
        "adapters of the service have",
    ),
    (
        "peft peft_init_lora_weights peft_use_rslora lora_rank_pattern "
        "lora_alpha_pattern",
        "gives adapters another rank, scale or beginning than clients ask for",
    ),
)
"""Keys that adapters of a service cannot have, each with the reason."""
_DEFAULTS = {"micro_batch_size": 1, "sequence_len": 2048}
_FIXED = {
    "protrain_auto_memory": True,
    "datasets": [{"path": "none", "type": "completion"}],
    "num_epochs": 1,
    "learning_rate": 1e-4,
    "sample_packing": False,
    "save_strategy": "no",
}
_ADAPTER: dict[str, Any] = {
    "gradient_accumulation_steps": 1,
    # that of adapters is made by this package, not by a trainer
    "optimizer": "adamw_torch_fused",
    "optim_args": None,
    "lora_dropout": 0.0,
    # fused kernels are chosen for layers that all have adapters
    **{f"lora_{what}_kernel": False for what in ("mlp", "qkv", "o", "embedding")},
}
# of a client's passes nobody knows which is the last; and tells groups that decay
_FULL = {"gradient_accumulation_steps": 2, "weight_decay": 1.0}


def derive(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The YAML that is loaded for a service, an adapter of the largest rank on every
    layer that one may train, or none where the base itself trains, and which keys of the
    given one have no effect on it.

    Raises:
        ConfigError: It asks for what a service cannot do.
    """
    given = {str(key): value for key, value in raw.items() if value is not None}
    if not given.get("base_model"):
        raise ConfigError("base_model: missing; it names the model to serve.")
    if given.get("adapter") not in (None, "lora", "qlora"):
        raise ConfigError(f"adapter: {raw['adapter']}; the service trains lora, qlora.")
    lists_us = lists_plugin(given.get("plugins"))
    plugins = [str(plugin) for plugin in given.get("plugins") or ()]
    unused = {plugin for plugin in plugins if _PLUGINS.search(plugin)}
    adapts = any(map(given.get, ("adapter", "load_in_4bit", "load_in_8bit")))
    unread = _NO_EFFECT if adapts else (*_NO_EFFECT, "lora_*")
    dropped = {k for k in given if any(fnmatchcase(k, wild) for wild in unread)}
    if not adapts:
        dropped -= {*_OF_FULL}
    keys = {k: v for k, v in given.items() if k not in dropped and k[:5] != "optim"}
    keys["plugins"] = [plugin for plugin in plugins if plugin not in unused]
    if not lists_us:
        keys["plugins"].append(PLUGIN)
    wrong = [
        f"`{key}` {why}. Remove the key."
        for names, why in _REFUSED
        for key in names.split()
        if keys.get(key)
    ]
    if wrong := wrong + refusals(keys):
        raise ConfigError("\n".join(wrong))
    told = sorted(key for key in dropped if given[key] not in (False, "", [], {}))
    told += sorted(f"plugins: {plugin.rpartition('.')[2]}" for plugin in unused)
    if not adapts:
        for key in ("optimizer", "optim_args"):
            keys[key] = given.get(key, _ADAPTER[key])
        return {**_DEFAULTS, **keys, **_FIXED, **_FULL}, told
    if not given.get("lora_target_modules"):
        keys |= {"lora_target_linear": True, "lora_target_modules": ["lm_head"]}
    adapter = "qlora" if given.get("load_in_4bit") else "lora"
    made = {"lora_r": 32, "lora_alpha": 32, "adapter": adapter, **_DEFAULTS}
    return {**made, **keys, **_FIXED, **_ADAPTER}, told


def read(config: Path) -> tuple[str, Any, list[str], AdapterOptimizer]:
    """The name of the base in a YAML, what Axolotl validates of it for a service, which
    of its keys have no effect, and the optimizer of adapters.

    Raises:
        ConfigError: It is none, Axolotl refuses it, or this is one of several ranks.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "WORLD_SIZE: the service trains on one rank. Start it without torchrun or "
            "accelerate launch; on several cards, one server each, with folders of "
            "their own."
        )
    raw = read_yaml(config)
    keys, unused = derive(raw)
    optimizer = AdapterOptimizer(raw.get("optimizer"), raw.get("optim_args"))
    try:
        cfg = load_cfg(DictDefault(keys))
    except ConfigError:
        raise
    except (OSError, ImportError, Warning, *FOREIGN_ERRORS) as error:
        raise ConfigError(
            f"{config}: Axolotl refuses it: {first_complaint(error)}"
        ) from error
    return str(raw["base_model"]), cfg, unused, optimizer


def identity(cfg: Any) -> dict[str, str]:
    """Hashes that tell a base from others: of what its config.json computes, and of one
    row of each weight in its safetensors files, rounded to bf16.

    So they are the same in 4 bits, in other dtypes and shards, and in another folder. The
    second is missing for a base in other files.
    """
    config = json.loads(
        (_folder(cfg, cfg.base_model_config) / "config.json").read_text()
    )
    config |= {"overrides": cfg.overrides_of_model_config or {}}
    plain = json.dumps(_computing(config), sort_keys=True).encode()
    found, rows = {"config": hashlib.sha256(plain).hexdigest()}, {}
    for path in (files := base_files(cfg)):
        with safe_open(path, framework="pt") as file:
            for weight in file.keys():
                rows[weight] = _row(file.get_slice(weight))
    digest = hashlib.sha256()
    for weight, (shape, row) in sorted(rows.items()):
        digest.update(f"{weight} {shape} ".encode() + row)
    return found | ({"weights": digest.hexdigest()} if files else {})


def base_files(cfg: Any) -> list[Path]:
    """List the safetensors files of a base; none where it is in other ones."""
    folder = _folder(cfg, cfg.base_model)
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = {*json.loads(index.read_text())["weight_map"].values()}
    files = [folder / name for name in sorted(names)]
    return files if all(file.is_file() for file in files) else []


def _folder(cfg: Any, source: str) -> Path:
    config = find_file(source, "config.json", cfg.revision_of_model)
    if config is None:
        raise ConfigError(f"base_model: {source} has no config.json in the cache.")
    return config.parent


_BESIDE = frozenset(
    "_name_or_path transformers_version torch_dtype dtype use_cache architectures "
    "quantization_config auto_map".split()
)


def _computing(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {k: _computing(v) for k, v in config.items() if k not in _BESIDE}


def _row(weight: Any) -> tuple[list[int], bytes]:
    shape = weight.get_shape()
    middle = [slice(size // 2, size // 2 + 1) for size in shape[:-1]]
    place = (*middle, slice(0, 4096))
    row = weight[place] if shape else torch.empty(0)
    if row.is_floating_point() and row.itemsize > 1:
        row = row.bfloat16()
    return shape, row.contiguous().view(torch.uint8).numpy().tobytes()


def opened(
    cfg: Any, optimizer: AdapterOptimizer
) -> tuple[TrainingRun, LiveAdapter | FullModel, Any]:
    """The base of a YAML that was `read`, under a plan, what shows adapters in it or
    trains it, and its tokenizer.

    Raises:
        ProTrainError: It cannot be loaded, or no plan fits.
    """
    plugins = PluginManager.get_instance().plugins.values()
    next(p for p in plugins if isinstance(p, ProTrainPlugin)).begin(cfg, False)
    model, tokenizer, _, _ = setup_model_and_tokenizer(cfg)
    # without dropout, and the same in every pass
    model.eval()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    run = TrainingRun(cfg, (), LOG)
    longest = int(cfg.sequence_len)
    prompt = max(1, longest // 2)
    asked = Asked(ROWS_AT_ONCE, prompt, longest + 1 - prompt)
    if not cfg.adapter:
        run.open(model, device, False, asked=asked)
        # some make their state at once, which belongs where the weights are
        with run.full_params():
            plain = plain_optimizer(cfg, model)
        return run, FullModel(run, run.wrap_optimizer(plain)), tokenizer
    live = LiveAdapter(model, optimizer)
    run.open(model, device, False, adapter_bytes=live.reserve_bytes, asked=asked)
    assert run.session is not None
    live.open(run.session.device)
    return run, live, tokenizer
