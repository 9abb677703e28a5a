"""From an Axolotl YAML to the model that it would train, without weights.

Axolotl builds the model: its validation, patches, quantisation, adapters and kernels
run as in training. Only the loading of weights is replaced, so all tensors are on the
meta device. Needs the base model's config.json; uses a tokenizer and a
preprocessor_config.json beside it. Never the network. Importing this module takes
seconds, for it imports Axolotl.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import bitsandbytes as bnb
import torch
import transformers
from accelerate import Accelerator
from axolotl.integrations.base import PluginManager
from axolotl.integrations.config import merge_input_args
from axolotl.loaders.model import ModelLoader
from axolotl.loaders.patch_manager import PatchManager
from axolotl.loaders.tokenizer import load_tokenizer
from axolotl.loaders.utils import load_model_config
from axolotl.monkeypatch.attention import sdpa_varlen
from axolotl.telemetry.manager import TelemetryManager
from axolotl.utils.config import normalize_config, validate_config
from axolotl.utils.dict import DictDefault
from axolotl.utils.freeze import freeze_layers_except, freeze_mm_modules
from axolotl.utils.schemas.enums import CustomSupportedOptimizers
from datasets import Dataset
from huggingface_hub import constants
from huggingface_hub.errors import StrictDataclassError
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    modeling_utils,
)
from transformers.core_model_loading import build_glob_alternation
from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.training_args import OptimizerNames

from ..args import PLUGIN, lists_plugin
from ..checks import checked_yaml
from ..core.errors import FOREIGN_ERRORS, ConfigError, first_complaint
from ..core.layout.tensors import quantisation_tables_apart
from ..core.planner.meta import meta_copy
from ..core.sizes import format_bytes
from ..job import without_gpu
from ..loading import (
    is_of_experts,
    keep_packed,
    keeps_packed,
    name_forms,
    quantise_experts,
    unpack_unpaged,
)
from ..refusals import TAKEN_OVER
from ..versions import import_plugins, require_internals, require_later
from .batches import find_file
from .fake_kernels import (
    PLANNED_ATTENTION,
    attention_kernels,
    fake_cut_cross_entropy,
    make_experts_traceable,
)

if TYPE_CHECKING:
    from ..objective import Objective

_META = torch.device("meta")

CUDA_CAPABILITY = "sm_89"
"""The card that Axolotl's validation is told of: has bf16, fp8 and tf32."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "tekken.json",
)
_HOOKS = (
    "register pre_model_load post_model_build pre_lora_load post_lora_load "
    "post_model_load"
).split()
"""Methods of plugins that are called while a model is built."""
_ACT_OUTSIDE = ("axolotl.integrations.swanlab", "axolotl.integrations.nemo_gym")
"""Plugins whose hooks start a run at a service, or servers, and change no model."""
_FILLERS = ("_move_missing_keys_from_meta_to_device", "_initialize_missing_keys")
"""Methods of transformers for weights that a checkpoint lacks, as here all are."""


@dataclass
class MetaModel:
    """A model as it is when training begins, without weights.

    Attributes:
        cfg: Axolotl's configuration, validated and normalised for the target.
        model: In training mode, on the meta device; `requires_grad` final; nothing
            recomputes its activations. Runs under `fake_kernels`.
        assumptions: What was not known, and what was taken instead.
        trainer: Of an `rl`, whose loss is traced.
    """

    cfg: DictDefault
    model: nn.Module
    assumptions: list[str]
    trainer: Trainer | None = None

    def objective(self, num_ranks: int = 1) -> Objective | None:
        """The loss of the trainer, on rows of `sequence_len`; None for one forward."""
        if self.trainer is None:
            return None
        # imported here: training has this module in a dry run that knows no trainer
        from ..objective import objective_of

        cfg, trainer = self.cfg, self.trainer
        args: Any = trainer.args
        args.per_device_train_batch_size = rows = cfg.micro_batch_size
        args.gradient_accumulation_steps = steps = cfg.gradient_accumulation_steps
        if cfg.trl and cfg.trl.generation_batch_size:
            steps = max(cfg.trl.generation_batch_size // (rows * num_ranks), 1)
        # of GRPO; as it follows them itself when it is built
        args.steps_per_generation = steps
        dataset, collate = trainer.train_dataset, trainer.data_collator
        return objective_of(trainer, dataset, collate, cfg.sequence_len)

    @contextlib.contextmanager
    def changed(self, change: Mapping[str, int]) -> Iterator[None]:
        """Some keys of the YAML are others inside, and adapters of another rank."""
        with contextlib.ExitStack() as undo:
            if "lora_r" in change:
                _resize_adapters(self.model, self.cfg.lora_r, change["lora_r"], undo)
            undo.enter_context(_keys(self.cfg, change))
            yield


def load_meta_model(config: Path, target: str) -> MetaModel:
    """Build what `axolotl train config` would train on "cuda" or "cpu".

    The plugin is listed if it is not, so that its keys are checked.

    Raises:
        ConfigError: The YAML is invalid or cannot be planned; names the key.
    """
    require_internals(dry_run=True)
    manager = PluginManager.get_instance()
    with (
        _offline(),
        # Axolotl's manager is one for the process and keeps what it ever registered
        patch.object(manager, "plugins", type(manager.plugins)()),
        patch.object(manager, "_cfg", None),
    ):
        cfg, assumptions = _validated(config, target)
        meta = meta_model_of(cfg, target, trains=True)
        meta.assumptions[:0] = assumptions
        return meta


def meta_model_of(cfg: DictDefault, target: str, trains: bool = False) -> MetaModel:
    """Build a model from Axolotl's configuration, validated for `target`; the trainer of
    an `rl` only where it `trains`.

    Patches what Axolotl patches for such a model: a process builds one.

    Raises:
        ConfigError: It cannot be planned; names the key.
    """
    assumptions: list[str] = []
    with _offline():
        tokenizer = _tokenizer(cfg, assumptions)
        model, adapter = _built(cfg, tokenizer, target, assumptions)
        if not (cfg.rl and trains):
            return MetaModel(cfg, model, assumptions)
        trainer = _preference_trainer(cfg, model, tokenizer, adapter)
        _put_judges(cfg, trainer, assumptions)
        wrapped: Any = trainer.model
        return MetaModel(cfg, wrapped.train(), assumptions, trainer)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    with (
        patch.object(constants, "HF_HUB_OFFLINE", True),
        patch.object(TelemetryManager.get_instance(), "enabled", False),
    ):
        yield


@contextlib.contextmanager
def _keys(cfg: DictDefault, values: Mapping[str, object]) -> Iterator[None]:
    """No `patch.dict`: Axolotl sets other keys inside, which stay."""
    before = {key: cfg[key] for key in values}
    cfg.update(values)
    try:
        yield
    finally:
        cfg.update(before)


_RANK_DIM = {"A": 0, "embedding_A": 0, "B": 1, "embedding_B": 1}


def _resize_adapters(
    model: nn.Module, old: int, new: int, undo: contextlib.ExitStack
) -> None:
    """Give LoRA weights on the meta device another rank."""
    for path, param in list(model.named_parameters(remove_duplicate=False)):
        layer_path, is_of_layer, kind = path.rpartition(".lora_")
        layer = model.get_submodule(layer_path) if is_of_layer else None
        if not isinstance(layer, LoraLayer) or old not in layer.r.values():
            continue
        dim = _RANK_DIM.get(kind.partition(".")[0])
        if dim is None or param.ndim != 2 or param.shape[dim] % old:
            continue
        shape = list(param.shape)
        # that of experts has rows for each of them
        shape[dim] = shape[dim] // old * new
        module, _, name = path.rpartition(".")
        owner = model.get_submodule(module)
        undo.callback(setattr, owner, name, param)
        resized = nn.Parameter(param.data.new_empty(shape), param.requires_grad)
        setattr(owner, name, resized)


# ---------------------------------------------------------------- configuration


def register_plugins(cfg: DictDefault) -> None:
    """Register the plugins of a YAML, each named in what it raises where it needs weights
    or a GPU.

    Raises:
        ConfigError: One is not there, or does not run.
    """
    manager = PluginManager.get_instance()
    register = manager.register

    def named(name: str, **options: Any) -> None:
        # from 0.21 on with `required`
        register(name, **options)
        plugin: Any = manager.plugins.get(name.replace(":", "."))
        acts = type(plugin).__module__.startswith(_ACT_OUTSIDE)
        for hook in _HOOKS if plugin is not None else ():
            own = _nothing if acts else getattr(plugin, hook)
            setattr(plugin, hook, partial(_called, f"{name}.{hook}", own))

    with patch.object(manager, "register", named):
        import_plugins(cfg)


def _called(name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return hook(*args, **kwargs)
    except (ValueError, NotImplementedError):
        # which say themselves what they refuse
        raise
    except FOREIGN_ERRORS as error:
        raise ConfigError(
            f"plugins: {name} does not run without weights and a GPU, which a plan needs: "
            f"{type(error).__name__}: {first_complaint(error)}"
        ) from error


def _validated(config: Path, target: str) -> tuple[DictDefault, list[str]]:
    """The configuration, and what in the YAML does not do what somebody may expect."""
    raw, assumptions = checked_yaml(config, here=True), []
    given = raw.keys() | {"plugins"}
    plugins = raw.get("plugins") or ()
    if not lists_plugin(plugins):
        raw["plugins"] = [*plugins, PLUGIN]
        assumptions.append(
            f"plugins does not list {PLUGIN}: training does not follow this plan until "
            "`axolotl protrain migrate --write` has added it"
        )
    cfg = DictDefault(raw)
    _require_model_type(cfg)
    on_cuda = target == "cuda"
    capabilities = {
        **dict.fromkeys(("bf16", "fp8", "tf32"), on_cuda),
        "n_gpu": 1,
        "compute_capability": CUDA_CAPABILITY if on_cuda else None,
    }
    environment = {"torch_version": torch.__version__.split("+", maxsplit=1)[0]}
    try:
        register_plugins(cfg)
        cfg = validate_config(cfg, capabilities, environment)
        fields = merge_input_args()[-1].model_fields
        known = {*fields, *(f.alias for f in fields.values() if f.alias)}
        assumptions += map(partial(_unknown_key, known), sorted(given - known, key=str))
        _check_optimizer(cfg)
        if on_cuda and cfg.bf16 == "auto":
            # the machine that plans need not have the card
            cfg.bf16 = not cfg.fp16
        normalize_config(cfg)
        # that of the target, not of the machine that plans
        cfg.device = target
        assumptions += [] if on_cuda else without_gpu(cfg, bool(raw.get("fp16")))
    except ConfigError:
        raise
    except (ValueError, ImportError, NotImplementedError, OSError) as error:
        raise ConfigError(first_complaint(error)) from error
    except (StrictDataclassError, ArithmeticError) as error:
        # a configuration's class checks itself while it reads the file
        raise _gives_no_model(cfg, error) from error
    return cfg, assumptions


def _unknown_key(known: Iterable[str], key: str) -> str:
    close = get_close_matches(key, known, 1)
    meant = f"; {close[0]}, perhaps" if close else ""
    return f"{key}: a key that Axolotl does not know and passes over{meant}"


def _check_optimizer(cfg: DictDefault) -> None:
    """Refuse a name that neither transformers nor Axolotl knows; plugins may bring more."""
    name = getattr(cfg.optimizer, "value", cfg.optimizer)
    known = [o.value for o in (*OptimizerNames, *CustomSupportedOptimizers)]
    others = any(not p.startswith("axolotl.integrations.") for p in cfg.plugins)
    if name and name not in known and not others:
        close = ", ".join(get_close_matches(name, known)) or "adamw_torch_fused"
        raise ConfigError(
            f"optimizer: {name!r} is none that is known; nearest: {close}."
        )


def _require_model_type(cfg: DictDefault) -> None:
    source = str(cfg.base_model_config or cfg.base_model)
    found = find_file(source, "config.json", cfg.revision_of_model)
    model_type = json.loads(found.read_bytes()).get("model_type") if found else None
    if model_type not in CONFIG_MAPPING and not cfg.trust_remote_code:
        raise ConfigError(
            f"base_model: {found} has model_type {model_type!r}, which transformers "
            f"{transformers.__version__} does not know."
        )


def _gives_no_model(cfg: DictDefault, error: Exception) -> ConfigError:
    return ConfigError(
        f"base_model: config.json of {cfg.base_model} gives no model: "
        f"{type(error).__name__}: {first_complaint(error)}"
    )


# ------------------------------------------------------------------------ model


class _Vocabulary:
    """Stands for a tokenizer that is not there: as many tokens as the model has."""

    padding_side = "right"
    chat_template = None

    def __init__(self, text_config: Any, num_added: int) -> None:
        self._size = text_config.vocab_size + num_added
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(self, name, getattr(text_config, name, None))

    def __len__(self) -> int:
        return self._size


def _built(
    cfg: DictDefault, tokenizer: Any, target: str, assumptions: list[str]
) -> tuple[nn.Module, Any]:
    """The model, and the adapter's configuration."""
    loader = _Loader(cfg, tokenizer, target, assumptions)
    with contextlib.ExitStack() as undo:
        # Axolotl collects garbage three times; the imported modules are none
        gc.freeze()
        undo.callback(gc.unfreeze)
        # the trace shows what a block computes once; policies are the plan's affair
        undo.enter_context(_keys(cfg, dict.fromkeys(TAKEN_OVER)))
        undo.enter_context(_keys(cfg, {"experimental_skip_move_to_device": True}))
        if cfg.peft_init_lora_weights:
            assumptions.append(
                f"peft_init_lora_weights: {cfg.peft_init_lora_weights} needs weights; "
                "adapters have the shapes of the default initialisation"
            )
            undo.enter_context(_keys(cfg, {"peft_init_lora_weights": None}))
        try:
            model, adapter = loader.load()
        except ConfigError:
            raise
        except (ValueError, ImportError, NotImplementedError) as error:
            raise ConfigError(
                f"Axolotl refuses this model: {first_complaint(error)}"
            ) from error
        except FOREIGN_ERRORS as error:
            raise _gives_no_model(cfg, error) from error
    _note_unfused(cfg, assumptions)
    if cfg.unfrozen_parameters:
        freeze_layers_except(model, cfg.unfrozen_parameters)
    if cfg.freeze_mm_modules:
        freeze_mm_modules(model)
    if cfg.model_quantization_config:
        unpack_unpaged(model)
    return model.train(), adapter


def _preference_trainer(
    cfg: DictDefault, model: nn.Module, tokenizer: Any, adapter: Any
) -> Trainer:
    """Build the trainer as Axolotl does, for two made-up rows."""
    # imported here: what plugins add to arguments is merged when it is first imported
    from axolotl.core.builders import HFRLTrainerBuilder
    from axolotl.core.trainers.grpo import GRPOStrategy
    from trl.trainer import dpo_trainer, grpo_trainer, kto_trainer

    require_later()
    if isinstance(tokenizer, _Vocabulary):
        raise ConfigError(
            f"tokenizer_config: rl: {cfg.rl.value} needs a tokenizer to be planned, and "
            f"{cfg.tokenizer_config} has none."
        )
    text = dict.fromkeys(("prompt", "chosen", "rejected", "completion"), "a b ")
    builder = HFRLTrainerBuilder(cfg, model, tokenizer)
    builder.train_dataset = Dataset.from_list(
        [text | {"label": n} for n in (True, False)]
    )
    builder.peft_config = adapter
    arguments = {"use_cpu": True}

    def reference(*_args: Any, **_kwargs: Any) -> nn.Module:
        return meta_copy(model)

    manager = PluginManager.get_instance()
    with (
        TemporaryDirectory() as folder,
        _keys(cfg, {"output_dir": folder, "tf32": None, "dataset_num_proc": None}),
        patch.object(manager, "get_training_args", lambda _cfg: arguments),
        patch.object(TrainingArguments, "place_model_on_device", False),
        patch.object(Accelerator, "prepare_model", lambda _self, model, **_: model),
        # the reference of a full fine-tune
        patch.object(dpo_trainer, "create_model_from_path", reference),
        patch.object(kto_trainer, "create_model_from_path", reference),
        patch.object(grpo_trainer, "create_model_from_path", reference),
        # which would wait for a server
        patch.object(grpo_trainer, "VLLMGeneration", _nothing),
        # those of the YAML are somebody's code, which a plan need not run
        patch.object(GRPOStrategy, "get_reward_func", lambda _name: _no_reward),
        _META,
    ):
        try:
            return builder.build(1)
        except FOREIGN_ERRORS as error:
            raise ConfigError(
                f"rl: {cfg.rl.value}: its trainer cannot be built: {first_complaint(error)}"
            ) from error


def _no_reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """Stands for the rewards of a YAML."""
    return [0.0] * len(completions)


def _put_judges(cfg: DictDefault, trainer: Any, assumptions: list[str]) -> None:
    """Build the rewards that are models, as TRL loads them; what `_no_reward` stands for
    besides is code."""
    names = cfg.trl.reward_funcs if hasattr(trainer, "reward_funcs") else ()
    for index, name in enumerate(names or ()):
        found = find_file(name, "config.json")
        if found is None and "/" not in name:
            continue
        try:
            if found is None:
                raise FileNotFoundError("it is not here")
            folder = found.parent
            config = AutoConfig.from_pretrained(folder, num_labels=1)  # nosec B615
            with _META:
                judge = AutoModelForSequenceClassification.from_config(config)
            trainer.reward_funcs[index] = judge
        except (OSError, *FOREIGN_ERRORS) as error:
            assumptions.append(
                f"trl.reward_funcs: {name} is a model, whose bytes are not counted: "
                f"{first_complaint(error)}"
            )


def _tokenizer(cfg: DictDefault, assumptions: list[str]) -> Any:
    source, revision = str(cfg.tokenizer_config), cfg.revision_of_model
    if any(find_file(source, name, revision) for name in _TOKENIZER_FILES):
        try:
            return load_tokenizer(cfg)
        except (ImportError, OSError, *FOREIGN_ERRORS) as error:
            raise ConfigError(
                f"tokenizer_config: {source} gives no tokenizer: {type(error).__name__}: "
                f"{first_complaint(error)}"
            ) from error
    text_config = load_model_config(cfg).get_text_config()
    added = len(cfg.tokens or [])
    assumptions.append(
        f"no tokenizer in {source}: {text_config.vocab_size} tokens, from config.json"
        + (f", and {added} new ones" if added else "")
    )
    return _Vocabulary(text_config, added)


class _Loader(ModelLoader):
    """Axolotl's loader with its one step that reads weights replaced."""

    def __init__(
        self, cfg: DictDefault, tokenizer: Any, target: str, assumptions: list[str]
    ) -> None:
        super().__init__(cfg, tokenizer)
        self._target = target
        self._assumptions = assumptions
        self._fakes_cce = False
        self._packs_sdpa = False
        if target == "cuda":
            patches = self.patch_manager
            patches._apply_sdpa_varlen_patch = self._note_varlen
            # these want the kernel's package, which its replacement does not
            patches._apply_flash_attention_patches = _nothing
            patches._apply_sageattn_patches = _nothing

    def _note_varlen(self) -> None:
        """Packed rows go to a flash kernel on CUDA where Axolotl's rules allow."""

        def note() -> None:
            self._packs_sdpa = True

        with (
            patch.object(sdpa_varlen, "patch_sdpa_varlen", note),
            patch.object(torch.cuda, "is_available", lambda: True),
        ):
            PatchManager._apply_sdpa_varlen_patch(self.patch_manager)

    def _note_attention(self) -> None:
        """Say which attention transformers has taken; packed rows may have their own."""
        asked = self.model_kwargs.get("attn_implementation") or "sdpa"
        taken = name = self.model.config.get_text_config()._attn_implementation
        if taken == FLASH_ATTN_KERNEL_FALLBACK.get(asked):
            name = f"{asked}, or {taken} where that is not installed"
        elif taken != asked:
            name = f"{taken}, which transformers takes in place of {asked} here"
        kernel = "a flash kernel that saves q, k, v, the output and its log-sum-exp"
        if taken == "eager":
            kernel = "torch's operators, which save the scores of all pairs of tokens"
        elif taken == "sdpa" and not self._packs_sdpa:
            kernel = "the kernel that torch has for its mask and types"
        self._assumptions.append(f"attention {name}: {kernel}")
        for module in self.model.modules():
            config: Any = getattr(module, "config", None)
            own = getattr(config, "_attn_implementation", None)
            if self._packs_sdpa and own == "sdpa":
                config._attn_implementation = PLANNED_ATTENTION

    def _apply_pre_model_load_setup(self) -> None:
        super()._apply_pre_model_load_setup()
        is_missing = importlib.util.find_spec("cut_cross_entropy") is None
        if self.cfg.cut_cross_entropy and is_missing:
            # its plugin, called next, would refuse; set again when that is over
            self.cfg.cut_cross_entropy = False
            self._fakes_cce = True

    def _build_model(self) -> bool:
        with contextlib.ExitStack() as undo:
            if self._target == "cuda":
                asked = self.model_kwargs.get("attn_implementation")
                undo.enter_context(attention_kernels([asked] if asked else []))
                # transformers fetches the kernel when it has chosen one
                loads = patch.object(
                    modeling_utils, "lazy_import_flash_attention", _nothing
                )
                undo.enter_context(loads)
            skips = super()._build_model()
        if self._fakes_cce:
            self.cfg.cut_cross_entropy = True
            fake_cut_cross_entropy(self.model, self._assumptions)
        if self._target == "cuda":
            self._note_attention()
        return skips

    def _configure_experts_implementation(self) -> None:
        make_experts_traceable(
            self.model, self._assumptions, self.cfg.experts_implementation
        )

    def _load_model_from_config(self, model_loader_class: Any = None) -> Any:
        with _META:
            return super()._load_model_from_config(model_loader_class)

    def _load_model_from_pretrained(self, model_loader_class: Any = None) -> Any:
        loader, config = model_loader_class or self.auto_model_loader, self.model_config
        classes = getattr(loader, "_model_mapping", None)
        if classes is not None and type(config) not in classes:
            raise ConfigError(
                f"base_model: transformers has no {loader.__name__} for model_type "
                f"{config.model_type!r}."
            )
        model_class = loader if classes is None else _get_model_class(config, classes)
        kwargs = {
            key: value
            for key, value in self.model_kwargs.items()
            if key not in ("device_map", "revision", "torch_dtype")
        }
        unfilled: dict[str, Any] = dict.fromkeys(_FILLERS, _nothing)
        published = {**(getattr(config, "quantization_config", None) or {})}
        with patch.multiple(PreTrainedModel, **unfilled), keep_packed():
            model = model_class.from_pretrained(
                None, config=config, state_dict={}, device_map={"": "meta"}, **kwargs
            )
        _keep_in_fp32(model, self.cfg.torch_dtype)
        if self.cfg.model_quantization_config == "Mxfp4Config":
            # unpacked in bf16 whatever the model's dtype (Mxfp4Dequantize)
            experts = [p for n, p in model.named_parameters() if is_of_experts(n, p)]
            for param in experts:
                param.data = param.data.bfloat16()
            unpacked = format_bytes(sum(param.nbytes for param in experts))
            if not keeps_packed(self.cfg):
                self._assumptions.append(
                    "model_quantization_config: the base is unpacked from MXFP4 while it "
                    f"loads: {unpacked} of experts in bf16"
                )
        if keeps_packed(self.cfg):
            values = format_bytes(name_forms(model, published))
            self._assumptions.append(
                "model_quantization_config: the base stays packed on the host, and what "
                f"is {values} of values crosses the link so"
            )
        _quantize(model)
        if self.cfg.quantize_moe_experts:
            with quantisation_tables_apart():
                for name, param in list(model.named_parameters()):
                    if is_of_experts(name, param):
                        quantise_experts(model, name)
        return model

    def _reinitialize_classification_head(self) -> None:
        """Axolotl looks at the head's values, of which there are none."""

    def _load_adapters(self) -> Any:
        # values that nothing will read take a third of the time
        with _META, patch.object(nn.init, "kaiming_uniform_", lambda x, *_, **__: x):
            return super()._load_adapters()


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Cast weights as transformers does while it reads a checkpoint."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, groups, _ = build_glob_alternation(list(plan))
    for name, param in model.named_parameters():
        match = pattern.search(name)
        if match and match.lastgroup and param.is_floating_point():
            param.data = param.data.to(plan[groups[match.lastgroup]])


def _quantize(model: Any) -> None:
    """Give layers in few bits the weights and quantisation state of a loaded model."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return
    config = quantizer.quantization_config
    if not isinstance(config, BitsAndBytesConfig):
        raise ConfigError(
            f"base_model: quantised by {config.quant_method}, which cannot be planned. "
            "Only load_in_4bit and load_in_8bit can."
        )
    with quantisation_tables_apart():
        for module in model.modules():
            if isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
                weight: Any = module.weight
                weight._quantize(_META)


def _note_unfused(cfg: DictDefault, assumptions: list[str]) -> None:
    """Kernels that are chosen by looking for a GPU while modules are imported."""
    if cfg.fused_attn_kernel and not torch.cuda.is_available():
        assumptions.append("fused_attn_kernel: norm and rope as separate operators")
