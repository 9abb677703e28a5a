"""Tables of what is used of other packages beyond what they promise, and where they differ.

`doctor` looks for all of it. A version that has moved something is refused before anything
is loaded, and only by what uses it: training as the plugin is registered, a dry run as it
begins.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from operator import attrgetter
from typing import Any

import torch
from axolotl.integrations.base import PluginManager
from axolotl.loaders import adapter
from axolotl.utils import trainer as axolotl_trainer
from axolotl.utils.config import prepare_plugins
from packaging.requirements import Requirement

from .core.errors import FOREIGN_ERRORS, ConfigError, first_complaint

NAMES = {
    "torch": "_foreach_norm _fused_sdp_choice",
    "copyreg": "_reconstructor",
    "torch:Tensor": "_backward_hooks _base _is_view _make_subclass _make_wrapper_subclass "
    "_post_accumulate_grad_hooks _version",
    "torch:UntypedStorage": "_cdata",
    "torch:ops.aten.add.default": "_schema",
    "torch._C": "PyTorchFileReader _DisableFuncTorch _DisableTorchDispatch "
    "_RestorePythonTLSSnapshot _storage_Use_Count "
    "_current_graph_task_id _disabled_torch_function_impl _will_engine_execute_node",
    "torch._C._autograd": "_top_saved_tensors_default_hooks",
    "torch.autograd.graph": "_allow_mutation_on_saved_tensors_enabled",
    "torch.autograd": "_get_sequence_nr _profiler_enabled",
    "torch._C._dynamo.eval_frame": "_set_lru_cache",
    "torch._dynamo.config": "optimize_ddp",
    "torch.fx.experimental._config": "meta_nonzero_assume_all_nonzero",
    "torch._C:_FunctionBase": "_sequence_nr _set_sequence_nr",
    "torch.autograd:Variable._execution_engine": "queue_callback",
    "torch.nn:Module": "_call_impl _compiled_call_impl _wrapped_call_impl",
    "torch.nn.parallel:DistributedDataParallel": "_get_active_ddp_module",
    "torch.nn.modules.module": "_global_forward_hooks _global_forward_pre_hooks",
    "torch.optim.optimizer": "_global_optimizer_post_hooks _global_optimizer_pre_hooks",
    "torch.serialization": "skip_data",
    "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes "
    "_get_current_dispatch_mode_stack _push_mode",
    "torch.utils._pytree": "tree_leaves",
    "axolotl.kernels.quantize": "_ctypes_nf4_dequant",
    "axolotl.monkeypatch.attention.sdpa_varlen": "_PATCH_APPLIED",
    "axolotl.monkeypatch.moe_quant": "_moe_load_state",
    "bitsandbytes.autograd._functions": "MatMul8bitFp",
    "bitsandbytes.functional": "name2qmap",
    "bitsandbytes.nn:Int8Params": "_quantize",
    "bitsandbytes.nn:Params4bit": "_quantize",
    "bitsandbytes.optim:GlobalOptimManager": "_instance",
    "peft.peft_model": "safe_save_file",
    "transformers:PreTrainedConfig": "_attn_implementation _experts_implementation",
    "transformers.modeling_utils": "safe_save_file split_torch_state_dict_into_shards",
    "transformers.quantizers.quantizer_finegrained_fp8:FineGrainedFP8HfQuantizer": "update"
    "_tp_plan",
    "transformers.trainer_utils": "shutil",
}
"""Names that must be there, by their owner. What Axolotl imports later is not asked for."""

PARAMETERS = {
    "torch.nn.utils.parametrize:_inject_new_class": "module",
    "torch.nn.utils.parametrize:_inject_property": "module tensor_name",
    "accelerate:Accelerator.prepare_model": "self model device_placement evaluation_mode",
    "axolotl.monkeypatch.moe_quant:replace_parameter_8bit": "module param_name",
    "axolotl.monkeypatch.relora:find_lora_modules": "model",
    "bitsandbytes.nn.parametrize:replace_parameter_4bit": "module param_name "
    "compress_statistics quant_type",
    "torch.amp:GradScaler._unscale_grads_": "self optimizer inv_scale found_inf",
    "transformers:Trainer._clip_grad_norm": "self model",
    "transformers:Trainer._get_grad_norm": "self model grad_norm",
    "transformers:Trainer._get_output_dir": "self trial",
    "transformers:Trainer._load_best_model": "self",
    "transformers:Trainer._load_optimizer_and_scheduler": "self checkpoint",
    "transformers:Trainer._prepare_inputs": "self inputs",
    "transformers:Trainer._prepare_for_training": "self max_steps train_dataloader",
    "transformers:Trainer._push_from_checkpoint": "self checkpoint_folder",
    "transformers:Trainer._save_checkpoint": "self model trial",
    "transformers.core_model_loading:_materialize_copy": "tensor device dtype",
    "transformers.core_model_loading:set_param_for_module": "model target_name "
    "param_value",
    "transformers.integrations.bitsandbytes:Bnb4bitQuantize.convert": "self input_dict",
    "transformers.integrations.bitsandbytes:Bnb8bitQuantize.convert": "self input_dict",
    "transformers.integrations.finegrained_fp8:Fp8Dequantize._dequantize_one": "self "
    "quantized scales output_dtype",
    "transformers.integrations.mxfp4:dequantize_convertops": "blocks scales",
    "transformers.modeling_utils:revert_weight_conversion": "model state_dict",
    "transformers.trainer_callback:CallbackHandler.call_event": "self event",
    "transformers.trainer_utils:rotate_checkpoints": "output_dir save_total_limit "
    "best_model_checkpoint use_mtime",
}
"""Functions that are called or overridden, with their first parameters in order."""

DRY_RUN_NAMES = {
    "axolotl.integrations.base:PluginManager": "_cfg get_training_args register",
    "axolotl.loaders.model:ModelLoader": "_apply_pre_model_load_setup _build_model "
    "_configure_experts_implementation _load_adapters "
    "_reinitialize_classification_head",
    "axolotl.loaders.patch_manager:PatchManager": "_apply_flash_attention_patches "
    "_apply_sageattn_patches _apply_sdpa_varlen_patch",
    "axolotl.monkeypatch.attention.sdpa_varlen": "patch_sdpa_varlen",
    "bitsandbytes:torch.ops.bitsandbytes": "gemm_4bit int8_mixed_scaled_mm "
    "int8_vectorwise_quant",
    "transformers:PreTrainedModel": "_get_dtype_plan _initialize_missing_keys "
    "_move_missing_keys_from_meta_to_device",
    "transformers.core_model_loading": "build_glob_alternation",
    "transformers.modeling_utils": "lazy_import_flash_attention",
    "transformers.models.auto.auto_factory": "_get_model_class",
}
DRY_RUN_PARAMETERS = {
    "axolotl.loaders.model:ModelLoader._load_model_from_config": "self "
    "model_loader_class",
    "axolotl.loaders.model:ModelLoader._load_model_from_pretrained": "self "
    "model_loader_class",
}
"""Names and functions that a dry run uses and training does not."""

LATER_NAMES = {
    "axolotl.core.builders:HFCausalTrainerBuilder": "_set_base_training_args",
    "axolotl.core.trainers.grpo:GRPOStrategy": "get_reward_func",
    "trl.trainer.dpo_trainer": "create_model_from_path",
    "trl.trainer.grpo_trainer": "VLLMGeneration create_model_from_path",
    "trl.trainer.kto_trainer": "create_model_from_path",
}
"""Names of modules that are imported after all plugins are registered, whose arguments are
merged in, by what builds trainers and optimizers without weights."""

COUNTERS = (
    *("tokens", "_tkps_trainable_acc", "_tkps_total_acc"),
    *("_metrics", "_stored_metrics", "_total_train_tokens"),
    # by which GRPO takes its answers
    *("_step", "_current_train_step_time"),
    # whether a GradScaler has unscaled gradients already
    "_per_optimizer_states",
)
"""Counters of Axolotl, TRL and torch in a step: in the state, or beside it."""


_NOTHING = object()

DRAWS_BY_NAME = hasattr(adapter, "reinit_lora_from_seed")
"""From 0.20 on Axolotl draws each adapter by the name of its layer, not in their order."""


def seed_of_layer(seed: int, name: str) -> int:
    """Return the seed that `reinit_lora_from_seed` gives a layer's ``default`` adapter."""
    digest = hashlib.sha256(f"{name}.default".encode()).digest()
    return (seed + int.from_bytes(digest[:4], "little")) % (2**63 - 1)


def supported() -> dict[str, Requirement]:
    """Read from this package's metadata which versions the suite has passed with.

    Axolotl pins the exact versions of transformers, peft and bitsandbytes.

    Raises:
        ConfigError: It is on Python's path and not installed.
    """
    try:
        ours = map(Requirement, requires("axolotl-protrain") or ())
    except PackageNotFoundError as error:
        raise ConfigError(
            "axolotl-protrain is on Python's path and not installed, so the versions that "
            "it was tried with are not known. Run `pip install .` in its folder."
        ) from error
    return {one.name: one for one in ours if one.specifier and one.marker is None}


def skip_peer_check() -> None:
    """Keep Axolotl from asking CUDA about peers on a machine without a GPU.

    It expects an AssertionError there, and a CUDA build of torch raises a RuntimeError.
    """
    if not torch.cuda.is_available():
        axolotl_trainer.check_cuda_p2p_ib_support = lambda: True


def require_internals(dry_run: bool = False) -> None:
    """Refuse versions in which something that training uses is missing or another; or,
    for a `dry_run`, something that only that uses.

    Raises:
        ConfigError: Names what, the versions here and those it works with.
    """
    tables = (DRY_RUN_NAMES, DRY_RUN_PARAMETERS) if dry_run else (NAMES, PARAMETERS)
    _require(*tables, dry_run)


def require_later(module: str = "") -> None:
    """As `require_internals` of `LATER_NAMES`: of all, or of those in a module.

    Raises:
        ConfigError: As there.
    """
    names = {owner: n for owner, n in LATER_NAMES.items() if owner.startswith(module)}
    # training looks at its optimizer so, too
    _require(names, {}, dry_run=not module)


def _require(names: dict[str, str], parameters: dict[str, str], dry_run: bool) -> None:
    if missing := list(_missing(names, parameters)):
        allowed = " and ".join(map(str, supported().values()))
        here = ", ".join(f"{n} {version(n)}" for n in (*supported(), "transformers"))
        otherwise = "set `protrain_auto_memory: false` to train without it"
        if dry_run:
            otherwise = "train without a plan before: training does not use this"
        raise ConfigError(
            f"plugins: ProTrain does not find what it uses in {here}: "
            f"{'; '.join(missing)}. It works with {allowed}. Install one of these, or "
            f"{otherwise}."
        )


def _missing(tabled: dict[str, str], parameters: dict[str, str]) -> Iterator[str]:
    for owner, names in tabled.items():
        for name in names.split():
            path = f"{owner}{'.' if ':' in owner else ':'}{name}"
            if _found(path) is _NOTHING:
                yield path.replace(":", ".")
    for path, names in parameters.items():
        spoken, wanted = path.replace(":", "."), names.split()
        if (found := _found(path)) is _NOTHING:
            yield spoken
            continue
        given = list(inspect.signature(found).parameters.values())[: len(wanted)]
        # what takes anything is a wrapper that another package has put there
        if any(param.kind is param.VAR_POSITIONAL for param in given):
            continue
        if [param.name for param in given] != wanted:
            yield f"{spoken}({', '.join(wanted)})"


def _found(path: str) -> Any:
    """Return what is at ``module:attribute.attribute``, or `_NOTHING`."""
    module, _, attributes = path.partition(":")
    try:
        return attrgetter(attributes)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return _NOTHING


def import_plugins(cfg: Any) -> None:
    """Register the plugins of a YAML: 0.19 and 0.20 go on without one that they cannot
    import.

    Raises:
        ConfigError: Names it.
    """
    error: Exception | None = None
    # of two names for this plugin it is the dict of before that has both
    registered = PluginManager.get_instance().plugins
    try:
        prepare_plugins(cfg)
    except ConfigError:
        # of a plugin that is there
        raise
    except (ImportError, SyntaxError, *FOREIGN_ERRORS) as raised:
        error = raised
    for name in cfg.plugins or ():
        if name.replace(":", ".") not in registered:
            why = (
                f": {type(error).__name__}: {first_complaint(error)}" if error else "."
            )
            raise ConfigError(
                f"plugins: {name} cannot be imported here{why}"
            ) from error
    if error is not None:
        raise error


def forget_other_names(plugin: Any) -> None:
    """Leave one of the plugins of a class that a YAML lists under several names.

    Axolotl would take the keys of all of them.
    """
    manager = PluginManager.get_instance()
    if plugin in manager.plugins.values():
        # a new dict, because 0.19 and 0.20 are going through this one
        manager.plugins = type(manager.plugins)(
            (name, known)
            for name, known in manager.plugins.items()
            if known is plugin or type(known) is not type(plugin)
        )
