"""What a YAML of a service opens: its base, with LoRA layers, under a plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from axolotl.cli.config import load_cfg
from axolotl.integrations.base import PluginManager
from axolotl.train import setup_model_and_tokenizer
from axolotl.utils.dict import DictDefault
from axolotl.utils.logging import get_logger

from ..args import PLUGIN, lists_plugin
from ..core.errors import ConfigError
from ..plugin import ProTrainPlugin
from ..run import TrainingRun
from .live import LiveAdapter

LOG = get_logger(__name__)

_DROPPED = frozenset(
    "auto_resume_from_checkpoints resume_from_checkpoint lora_model_dir "
    "val_set_size test_datasets lora_dropout rl torch_compile".split()
)
_KERNELS = ("mlp", "qkv", "o", "embedding")
_DEFAULTS = {
    "lora_r": 32,
    "lora_alpha": 32,
    "datasets": [{"path": "none", "type": "completion"}],
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1,
    "learning_rate": 1e-4,
    "optimizer": "adamw_torch_fused",
    "sequence_len": 2048,
}


def derive(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The YAML that is loaded for a service: an adapter of the largest rank on every layer
    that one may train.

    Raises:
        ConfigError: It asks for another kind of adapter.
    """
    adapter = "qlora" if raw.get("load_in_4bit") else "lora"
    if raw.get("adapter") not in (None, "lora", "qlora"):
        raise ConfigError(f"adapter: {raw['adapter']}; the service trains lora, qlora.")
    keys = {key: value for key, value in raw.items() if key not in _DROPPED}
    keys = {**_DEFAULTS, "adapter": adapter, **keys}
    plugins = raw.get("plugins") or ()
    if not lists_plugin(plugins):
        keys["plugins"] = [*plugins, PLUGIN]
    if not raw.get("lora_target_modules"):
        keys |= {"lora_target_linear": True, "lora_target_modules": ["lm_head"]}
    # fused kernels are chosen for layers that all have adapters
    own = dict.fromkeys((f"lora_{what}_kernel" for what in _KERNELS), False)
    own |= {"protrain_auto_memory": True, "sample_packing": False}
    return {**keys, **own, "lora_dropout": 0.0, "save_strategy": "no"}


def read(config: Path) -> tuple[str, Any]:
    """The name of the base in a YAML, and what Axolotl validates of it for a service.

    Raises:
        ConfigError: It is none, or this is one of several ranks.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "WORLD_SIZE: the service trains on one rank. Start it without torchrun or "
            "accelerate launch; on several cards, one server each, with folders of "
            "their own."
        )
    try:
        raw = yaml.safe_load(config.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeError) as error:
        raise ConfigError(f"{config} is no YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{config} is not an Axolotl YAML.")
    return str(raw["base_model"]), load_cfg(DictDefault(derive(raw)))


def opened(cfg: Any) -> tuple[TrainingRun, LiveAdapter]:
    """The base of a YAML that was `read`, under a plan, and what shows adapters in it.

    Raises:
        ProTrainError: It cannot be loaded, or no plan fits.
    """
    plugins = PluginManager.get_instance().plugins.values()
    next(p for p in plugins if isinstance(p, ProTrainPlugin)).begin(cfg, False)
    model, _, _, _ = setup_model_and_tokenizer(cfg)
    # without dropout, and the same in every pass
    live = LiveAdapter(model.eval())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    run = TrainingRun(cfg, (), LOG)
    run.open(model, device, False, adapter_bytes=live.reserve_bytes)
    assert run.session is not None
    live.open(run.session.device)
    return run, live
