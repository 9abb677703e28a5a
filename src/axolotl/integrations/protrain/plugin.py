"""Axolotl's hooks, translated to core calls and back; decides nothing."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from axolotl.integrations.base import BasePlugin
from axolotl.utils.logging import get_logger

from .args import (
    ProTrainArgs,
    args_from,
    lists_plugin,
    unknown_keys,
    without_traceback,
)
from .before_loading import joined, require_plan
from .checks import base_faults, require_sound
from .core.checkpoint import (
    checkpoints,
    fault_of,
    has_state,
    locked,
    require_whole,
    restore,
)
from .core.engine.device import expand_segments, require_known, this_device
from .core.engine.ranks import Ranks
from .core.errors import ConfigError
from .core.planner.job import missing_capacity
from .job import disk_dir, started_on_host, without_gpu
from .refusals import TAKEN_OVER, as_yaml
from .run import TrainingRun
from .versions import forget_other_names, require_internals, skip_peer_check

if TYPE_CHECKING:
    from .loading import LoadShare

LOG = get_logger(__name__)

_READ_THE_BASE = ("peft_use_dora", "peft_init_lora_weights", "peft")
"""Keys under which adapters may begin with what they read from the base's weights."""
_SET = ("1", "true", "yes", "y", "t", "on")
"""Values of environment variables that accelerate takes for true."""
_ON_GPUS = ("flash", "sage", "xformers")
"""Attention that has no form for the CPU."""


class ProTrainPlugin(BasePlugin):
    """Trains models larger than the device; see README.md for the YAML keys."""

    _claim: ClassVar[ExitStack] = ExitStack()
    """Holds the folder of this process's run."""

    def __init__(self) -> None:
        super().__init__()
        self._pages = self._asks_fp16 = False
        self._taken_over: list[str] = []
        self._is_listed = True
        self._run: TrainingRun | None = None
        self._loading, self._saving = ExitStack(), ExitStack()
        self._share: LoadShare | None = None
        self._notes: list[str] = []

    def register(self, cfg: Any) -> None:
        """Refuse what is wrong while the raw YAML is still there to see.

        From 0.21 on Axolotl registers every installed plugin for every YAML (entry
        points `axolotl.plugins`). One that does not list this plugin has to ask for it.
        """
        self._pages = False
        # a load that has not come to its end leaves no file
        with suppress(InterruptedError), self._loading:
            raise InterruptedError
        self._saving.close()
        self._share = None
        asked = [*map(str, cfg), *map(str, cfg.get("plugins") or ())]
        if any("protrain" in name.lower() for name in asked) and (
            sys.excepthook is sys.__excepthook__
        ):
            sys.excepthook = without_traceback
        self._is_listed = lists_plugin(cfg.get("plugins"))
        # as they are spelt, before validation and defaults
        self._asks_fp16 = bool(cfg.get("fp16"))
        self._taken_over = [as_yaml(k, cfg[k]) for k in TAKEN_OVER if cfg.get(k)]
        if not self._is_listed:
            cfg.setdefault("protrain_auto_memory", False)
        if cfg.get("protrain_auto_memory", True):
            require_internals()
            require_sound(cfg)
            # before Axolotl asks the GPU what it can
            expand_segments()
            skip_peer_check()
        elif lines := unknown_keys(cfg):
            raise ConfigError("\n".join(lines))
        forget_other_names(self)

    def get_input_args(self) -> str:
        return f"{ProTrainArgs.__module__}.{ProTrainArgs.__qualname__}"

    def get_training_args_mixin(self) -> str:
        return "axolotl.integrations.protrain.trainer.ProTrainTrainingArguments"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """First hook of a training process with the final configuration.

        What does not train does not come by here. Last chance to say where the model is
        loaded to and that nobody else turns gradient checkpointing on.
        """
        if preprocess:
            return
        if not args_from(cfg).protrain_auto_memory:
            if self._is_listed:
                LOG.info("ProTrain is listed but off (protrain_auto_memory: false).")
            return
        self.begin(cfg)

    def begin(self, cfg: Any, has_run: bool = True) -> None:
        """Look at everything that can be known before the base is loaded.

        Args:
            cfg: Axolotl's validated configuration; changed so that the base is loaded to
                the host.
            has_run: Checkpoints are written to `output_dir`; a service has a folder of its
                own.
        """
        # fetched meanwhile, maybe
        if lines := [*base_faults(cfg)]:
            raise ConfigError("\n".join(lines))
        on_cpu = not torch.cuda.is_available()
        for note in without_gpu(cfg, self._asks_fp16) if on_cpu else ():
            LOG.warning(note)
        _check_machine(cfg, trains=has_run)
        device = _device(cfg)
        ranks = joined(cfg, device)
        if ranks is not None:
            if has_run:
                self._claim_run(Path(cfg.output_dir), ranks)
                _check_checkpoints(cfg)
            require_plan(cfg, device, LOG, ranks)
            ranks.close()
        for note in () if on_cpu else started_on_host(cfg):
            self._notes.append(note)
            LOG.info(note)
        self._pages = True
        cfg.update(dict.fromkeys(TAKEN_OVER), gradient_checkpointing=False)
        cfg.device_map = "cpu"
        # a YAML that says false has Axolotl move all of it to the GPU on several ranks
        cfg.experimental_skip_move_to_device = True
        # Axolotl asks each item for `model_dump`: every key of its own mapping is
        # there, as None, so it calls that. Plain mappings it reads as it means to.
        if cfg.role_boundaries:
            cfg.role_boundaries = [dict(item) for item in cfg.role_boundaries]

    def _claim_run(self, run_dir: Path, ranks: Ranks) -> None:
        """Take the run's folder, and only then remove what an earlier run has left there.

        Raises:
            ConfigError: Another run writes there; on all ranks.
        """

        def claim() -> str:
            try:
                lock, missing = locked(run_dir)
            except BlockingIOError as error:
                raise ConfigError(
                    f"output_dir: another run writes to {run_dir} ({error}). Wait for its "
                    "end, or choose another output_dir."
                ) from error
            except OSError as error:
                raise ConfigError(
                    f"output_dir: nothing can be written to {run_dir} ({error})."
                ) from error
            self._claim.enter_context(lock)
            return missing

        # an earlier run of this process has ended
        self._claim.close()
        self._notes = []
        if missing := ranks.from_first(claim):
            self._notes.append(
                f"output_dir: nothing keeps a second run away from {run_dir}, whose file "
                f"system has no locks ({missing})."
            )
            LOG.warning(self._notes[0])
        if not ranks.local_rank:
            restore(run_dir)
        ranks.collect(None)

    def pre_model_load(self, cfg: Any) -> None:
        if self._pages and (cfg.load_in_4bit or cfg.load_in_8bit):
            # imported here: the command line reads this module without transformers
            from .loading import LoadShare, base_files, quantise_on

            if cfg.load_in_4bit and not any(cfg[key] for key in _READ_THE_BASE):
                num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
                self._share = LoadShare(cfg.local_rank, num_local)
            how: dict[str, Any] = {"experts": bool(cfg.quantize_moe_experts)}
            if folder := disk_dir(args_from(cfg)):
                how |= {"disk": folder, "base_files": partial(base_files, cfg)}
            self._loading.enter_context(quantise_on(_device(cfg), self._share, **how))
        if self._pages and cfg.model_quantization_config:
            # imported here, as above
            from .loading import keep_packed, keeps_packed, load_fp8

            way = keep_packed if keeps_packed(cfg) else load_fp8
            self._loading.enter_context(way())

    def post_model_build(self, cfg: Any, model: Any) -> None:
        self._loading.close()

    def post_model_load(self, cfg: Any, model: Any) -> None:
        if self._pages and cfg.model_quantization_config:
            # imported here, as above
            from .loading import unpack_unpaged

            unpack_unpaged(model)
            if not cfg.adapter:
                # how it was read, by which transformers would save it without experts
                model._weight_conversions = None

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        if not self._pages:
            return {}
        args: dict[str, Any] = {"protrain_active": True}
        args |= {} if torch.cuda.is_available() else {"use_cpu": True}
        if not args_from(cfg).protrain_save_optimizer_state:
            LOG.info("Checkpoints hold no optimizer state: a resumed run restarts it.")
            args["save_only_model"] = True
        return args

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        if not self._pages:
            return
        if trainer.accelerator.num_processes != (cfg.world_size or 1):
            # without a process group each would train for itself
            raise ConfigError(
                f"protrain_auto_memory: {cfg.world_size} processes were launched, and "
                "each would train alone: accelerate has joined none of them. On a "
                "machine without GPUs set ACCELERATE_USE_CPU=true in the environment "
                "of the launcher."
            )
        # imported here: the command line reads this module without a trainer
        from .saving import in_place
        from .trainer import page_trainer

        self._saving.enter_context(in_place())
        self._run = TrainingRun(cfg, self._taken_over, LOG, self._share, self._notes)
        page_trainer(trainer, self._run)

    def post_train(self, cfg: Any, model: Any) -> None:
        """Axolotl saves the model next, and calls this once more after that."""
        run, self._run = self._run, None
        if run is None:
            self._saving.close()
            self._claim.close()
        else:
            run.require_final_space()


def _device(cfg: Any) -> torch.device:
    on_cuda = torch.cuda.is_available()
    return torch.device(f"cuda:{cfg.local_rank}" if on_cuda else "cpu")


def _check_checkpoints(cfg: Any) -> None:
    """Choose what to resume from, and refuse before the base is loaded what is not whole."""
    run_dir = Path(cfg.output_dir)
    keeps_state = args_from(cfg).protrain_save_optimizer_state
    weights_only = bool(cfg.save_only_model or not keeps_state)
    if cfg.auto_resume_from_checkpoints and cfg.resume_from_checkpoint is None:
        # Axolotl takes the newest, whole or not
        cfg.auto_resume_from_checkpoints = False
        for folder in checkpoints(run_dir):
            fault = fault_of(folder, weights_only)
            if fault is None:
                cfg.resume_from_checkpoint = str(folder)
                LOG.info(f"Resuming from {folder}, the last whole checkpoint.")
                break
            LOG.warning(f"{folder} is passed over: {fault}.")
    if cfg.resume_from_checkpoint is not None:
        folder = Path(cfg.resume_from_checkpoint)
        require_whole(folder, weights_only)
        if not has_state(folder):
            LOG.warning(
                f"{folder} has weights only: optimizer and learning rate begin anew."
            )


def _check_machine(cfg: Any, trains: bool) -> None:
    """Check what the YAML alone cannot tell; without a run of its own nobody `trains` by
    a trainer that scales losses."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not num_gpus:
        require_known(this_device())
    lines = [
        f"ACCELERATE_USE_{name}: the launcher's configuration, of `accelerate config`, asks "
        f"for {name}, which decides where weights live. Choose MULTI_GPU or NO there, or "
        "launch with `--launcher torchrun`."
        for name in ("FSDP", "DEEPSPEED")
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in _SET
    ]
    if not num_gpus and args_from(cfg).protrain_capacity_bytes is None:
        lines.append(str(missing_capacity()))
    attention = str(cfg.attn_implementation)
    if not num_gpus and any(name in attention for name in _ON_GPUS):
        lines.append(
            f"attn_implementation: {attention} runs on a GPU alone, and this machine has "
            "none. Set `attn_implementation: sdpa`."
        )
    if lines:
        raise ConfigError("\n".join(lines))
    if (cfg.world_size or 1) == 1 and num_gpus > 1:
        raise ConfigError(
            f"protrain_auto_memory: one process sees {num_gpus} GPUs and transformers "
            "would copy the model to each. Launch a process for each (--launcher "
            f"torchrun -- --nproc_per_node {num_gpus}), or set CUDA_VISIBLE_DEVICES=0."
        )
    if cfg.fp16 and not (cfg.adapter and trains):
        # set by Axolotl where bf16 is left to it and no GPU offers bf16
        raise ConfigError(
            "fp16: only an adapter is trained in it, by `axolotl train`, and it is what "
            "Axolotl chooses on this machine. Set `bf16: true`, or for fp32 both "
            "`bf16: false` and `fp16: false`."
        )
