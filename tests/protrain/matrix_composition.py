"""Paging beside what else a YAML switches on: losses, packing, evaluation, objectives."""

from __future__ import annotations

from typing import Any

from axolotl_jobs import (
    BASE,
    COMPILING,
    DISTILLING,
    LIGER,
    LORA,
    PAGED,
    PROTRAIN,
    SEEDING,
    SERVED,
    TORCH_KERNELS,
    job,
    overrides,
    pair,
)
from matrix import Cell
from tiny_models import ANSWERS, TAUGHT

Keys = dict[str, Any]

HALF = overrides(1, 2, 2)
"""All but one chunk pass through two slots; half of the blocks recompute."""
EVALUATE: Keys = {"val_set_size": 0.2, "eval_steps": 1}
IN_TORCH: Keys = {
    "plugins": [PROTRAIN, SEEDING, TORCH_KERNELS, LIGER],
    # an interpreter takes milliseconds for each row
    "micro_batch_size": 1,
    "sequence_len": 16,
    "max_steps": 2,
}
ONE_STEP: Keys = IN_TORCH | {"max_steps": 1}
PROMPTED: Keys = {
    "datasets": [
        {
            "path": "data.jsonl",
            "ds_type": "json",
            "type": {
                "field_instruction": "text",
                "field_output": "text",
                "format": "{instruction} ",
                "no_input_format": "{instruction} ",
            },
        }
    ],
    "dataset_prepared_path": "prepared-prompts",
    "sequence_len": 256,
}

QLORA: Keys = {**LORA, "adapter": "qlora", "load_in_4bit": True, "bf16": True}
BASES: dict[str, Keys] = {"full": {}, "LoRA": LORA}
COMPOSED: dict[str, Keys] = {
    "NEFTune": {"neftune_noise_alpha": 5},
    "Sample packing": {"sample_packing": True, "sequence_len": 96},
    "Sample packing, packed evaluation": {
        **EVALUATE,
        "sample_packing": True,
        "eval_sample_packing": True,
    },
    "Eager attention": {"attn_implementation": "eager"},
    "Generation in evaluation": {
        **EVALUATE,
        **PROMPTED,
        "do_causal_lm_eval": True,
        "eval_causal_lm_metrics": ["perplexity"],
        "eval_max_new_tokens": 4,
    },
    "Chunked cross entropy": {**IN_TORCH, "chunked_cross_entropy": True},
    "Liger fused linear cross entropy": {
        **IN_TORCH,
        "liger_fused_linear_cross_entropy": True,
    },
    "Liger cross entropy": {**IN_TORCH, "liger_cross_entropy": True},
    "Liger RMS norm": ONE_STEP | {"liger_rms_norm": True},
    "Liger rope": ONE_STEP | {"liger_rope": True},
    "Liger GLU": ONE_STEP | {"liger_glu_activation": True},
}
INSIDE = ("Liger RMS norm", "Liger rope", "Liger GLU")
"""Inside the blocks; slow here, so that an adapter is trained alone."""
TIED = ("Chunked cross entropy", "Liger fused linear cross entropy")
"""They read the head without calling it, tied or not."""

ANSWERED: dict[str, dict[str, Any]] = {
    "`gradient_checkpointing: offload`": {"gradient_checkpointing": "offload"},
    **{
        f"`activation_offloading: {str(value).lower()}`": {
            "gradient_checkpointing": True,
            "activation_offloading": value,
        }
        for value in (True, "legacy", "disk", "hidden_states")
    },
    "`selective_checkpointing`": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "selective_checkpointing": {"save": ["attention"]},
    },
    "`device_map: auto`": {"device_map": "auto"},
    "`auto_find_batch_size`": {"auto_find_batch_size": True},
    "`max_memory`": {"max_memory": {"cpu": "1GiB"}},
    "`gpu_memory_limit`": {"gpu_memory_limit": 1, "protrain_capacity_bytes": None},
}
"""Keys that the plan answers; the plain run is without them."""

PREFERENCES: Keys = {
    "datasets": [
        {
            "path": str(ANSWERS),
            "ds_type": "json",
            "split": "train",
            "type": {"field_prompt": "prompt"},
        }
    ],
    "sequence_len": 128,
    "remove_unused_columns": False,
}
"""Pairs of answers for most, single ones for KTO."""
OBJECTIVES: dict[str, Keys] = {
    "dpo": {},
    "ipo": {},
    "orpo": {},
    "simpo": {"simpo_gamma": 0.5},
    "kto": {},
}
PREFERRED = {
    f"rl: {name}": PREFERENCES
    | {"rl": name, "dataset_prepared_path": f"prepared-{name}"}
    | keys
    for name, keys in OBJECTIVES.items()
}
OWN_LOSS: dict[str, Keys] = {
    "`trainer_cls` with two forwards": {"trainer_cls": "own_trainer.Consistent"},
    "`kd_trainer` (distillation)": {
        "plugins": [*BASE["plugins"], DISTILLING],
        "kd_trainer": True,
        "kd_ce_alpha": 0.1,
        "kd_alpha": 0.9,
        "kd_temperature": 1.0,
        "chat_template": "chatml",
        "datasets": [
            {
                "path": str(TAUGHT),
                "ds_type": "json",
                "split": "train",
                "type": "axolotl.integrations.kd.chat_template",
                "field_messages": "messages",
                "logprobs_field": "logprobs",
            }
        ],
        "dataset_prepared_path": "prepared-taught",
        "remove_unused_columns": False,
        "sequence_len": 256,
    },
}
"""Trainers whose loss is more than the model's."""
SAMPLING: Keys = {
    "rl": "grpo",
    "datasets": [
        {
            "path": str(ANSWERS),
            "ds_type": "json",
            "split": "train",
            "type": "answers.rows",
        }
    ],
    "dataset_prepared_path": "prepared-sampled",
    "remove_unused_columns": False,
    "micro_batch_size": 4,
    "trl": {
        "reward_funcs": ["answers.vowels", "answers.short"],
        "num_generations": 2,
        "max_completion_length": 12,
        "beta": 0.1,
    },
}
"""Four answers to two prompts for each micro-batch, judged by two rewards."""


def _trl(**keys: Any) -> Keys:
    return {"trl": SAMPLING["trl"] | keys}


ASKING: Keys = (
    SAMPLING
    | _trl(use_vllm=True, vllm_mode="server")
    | {"plugins": [PROTRAIN, SEEDING, SERVED]}
)
"""A server answers, that a plugin has started."""
SAMPLED: dict[str, Keys] = {
    "rl: grpo": SAMPLING,
    "rl: gdpo": SAMPLING | {"rl": "gdpo"},
    "rl: grpo, two iterations a batch, accumulated": SAMPLING
    | _trl(num_iterations=2, beta=0.0)
    | {"gradient_accumulation_steps": 3, "max_steps": 4},
}
"""Trainers that sample answers from the model that trains."""
NOT_SAMPLED: dict[str, tuple[Keys, str, str]] = {
    "rl: ebft": (
        {"rl": "ebft", "ebft": {"mode": "structured"}},
        "`rl: ebft` reads hidden states of the model and of a copy",
        "a full fine-tune copies the model for its features, others read hidden states of "
        "it between two passes: memory and reads that no plan counts. Not tried",
    ),
    "rl: gdpo": (
        SAMPLING | {"rl": "gdpo"},
        "You passed a `PeftModel` instance together with a `peft_config`",
        "Axolotl gives TRL the adapter's configuration beside a model that has it, for gdpo "
        "alone: the plain run ends so too",
    ),
    "`trl.use_vllm`, `vllm_mode: colocate`": (
        SAMPLING | _trl(use_vllm=True, vllm_mode="colocate"),
        "`trl.vllm_mode: colocate` has a second copy of the weights and a cache on the card",
        "vLLM takes its memory of the card by itself, as a part of all of it. Not tried",
    ),
}
COMPILED: Keys = {"plugins": [PROTRAIN, SEEDING, COMPILING]}
COMPILE: Keys = {"torch_compile": True}
ROUNDS = (
    "the plain run compiles the whole model, where kernels cross the borders of blocks; "
    "compiled, plain runs differ as much from ones that are not"
)

INT4: Keys = {"weight_dtype": "int4", "activation_dtype": "int8", "group_size": 32}
QAT: dict[str, Keys] = {
    "`qat`, int4 weights, int8 activations": INT4,
    "`qat` after two steps": INT4 | {"fake_quant_after_n_steps": 2},
    "`qat`, ternary weights": {"weight_dtype": "ternary"},
}
NVFP4 = {"weight_dtype": "nvfp4", "activation_dtype": "nvfp4", "group_size": 16}

LISA: Keys = {
    "lisa_n_layers": 1,
    "lisa_step_interval": 2,
    "lisa_layers_attribute": "model.layers",
    "max_steps": 6,
}
LISAS: dict[str, tuple[Keys, Keys]] = {
    "all paged, recomputed": ({}, overrides(0, 2, 4)),
    "swapped, accumulation, clipping": (
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        overrides(0, 2, 0, n_swap=2),
    ),
    "another choice each step": (
        {"lisa_step_interval": 1, "weight_decay": 0.1},
        HALF,
    ),
    "adafactor": ({"optimizer": "adafactor"}, HALF),
    "updates on the host": ({}, HALF | {"protrain_cpu_optimizer": "torch"}),
}
TILED: Keys = {"tiled_mlp": True, "tiled_mlp_num_shards": 2} | {
    "tiled_mlp_use_original_mlp": True
}
TILINGS: dict[str, tuple[Keys, Keys]] = {
    "LoRA": (LORA | {"gradient_accumulation_steps": 2}, overrides(0, 2, 0)),
    "LoRA, recomputed": (LORA | {"max_grad_norm": 0.1}, overrides(0, 2, 4)),
    "QLoRA": (QLORA, HALF),
}

SCALED: dict[str, str] = {
    "`fp16`, with a GPU's scaler": "scaling_plugin.ScalingPlugin",
    "`fp16`, steps that overflow": "scaling_plugin.OverflowingPlugin",
    "`fp16` as on a CPU, without scaler": SEEDING,
}
FP16: Keys = {"fp16": True, "bf16": False, "max_steps": 6}

EXPERT_PARALLEL = "axolotl.integrations.expert_parallel.ExpertParallelPlugin"
COMPRESSING = "switching_plugin.LLMCompressorPlugin"
REFUSED: dict[str, tuple[Keys, str, str]] = {
    "`expert_parallel_size`, `context_parallel_size`": (
        {"plugins": [PROTRAIN, EXPERT_PARALLEL], "expert_parallel_size": 2},
        "spreads the model over ranks in a way that ProTrain does not follow",
        "ranks of one model exchange experts or keys inside of blocks, and a plan is of "
        "a rank that has the whole model; only data parallel ranks are followed",
    ),
    "`fp8`": (
        {"fp8": True},
        "`fp8: true` replaces modules after ProTrain has laid them out",
        "accelerate swaps linear layers when it prepares the model, after the hooks are "
        "there; its kernels are for GPUs: not tried",
    ),
    "`tiled_mlp`": (
        {"tiled_mlp": True, "adapter": None},
        "`tiled_mlp: true` adds up the gradients of the MLP's weights itself",
        "its backward takes each `.grad` of the MLP away and sets it, part by part, while "
        "gradients leave for the host: tried, it ends with the error that names the first "
        "one",
    ),
    "`fp16`": (
        {"fp16": True, "bf16": False, "adapter": None},
        "`fp16: true` without an adapter loads the weights that train in fp16",
        "Axolotl loads all weights in fp16, whose gradients torch's GradScaler refuses: "
        "tried, the plain run ends with `Attempting to unscale FP16 gradients`",
    ),
    "`use_onebitllms`": (
        {"use_onebitllms": True, "adapter": None},
        "`use_onebitllms: true` makes layers that ask for a CUDA device",
        "tried: the plain run ends on a CPU with `Expected a cuda device`, and so does the "
        "trace; with its two kernels written in torch, paged and plain were equal",
    ),
    "LISA (`lisa_n_layers`)": (
        LISA,
        "`lisa_n_layers: 1` asks for gradients of the base's weights",
        "it lets all weights of a block train, those of the base among them, whose "
        "gradients nobody uses",
    ),
    "`precompute_ref_log_probs`": (
        {"rl": "dpo", "precompute_ref_log_probs": True},
        "`precompute_ref_log_probs: true` runs the model before training begins",
        "the trainer runs the whole model where it was loaded, on the host, while it is "
        "built; on the CPU device that gives the bits of the plain run, on a GPU the batch "
        "is elsewhere",
    ),
    "`use_ray`": (
        {"use_ray": True, "ray_num_workers": 1},
        "`use_ray: true` starts ranks in a way that ProTrain has not been tried with",
        "not tried: a launcher of its own, which says otherwise which ranks share a node",
    ),
}
"""Keys, part of the refusal, and the reason."""

CELLS: tuple[Cell, ...] = (
    *(
        Cell(
            "LISA",
            how,
            "full",
            pair("llama", LISA, more, plan=plan),
            without=job("llama", {"max_steps": 6}, more),
        )
        for how, (more, plan) in LISAS.items()
    ),
    *(
        # Axolotl takes one of its classes from there
        Cell(
            "Tiled MLP",
            "Llama",
            how,
            pair("llama", TILED, keys, plan=plan),
            without=job("llama", keys),
            needs="deepspeed",
        )
        for how, (keys, plan) in TILINGS.items()
    ),
    *(
        Cell("Compositions", row, base, pair("llama", keys, more, plan=HALF))
        for row, more in COMPOSED.items()
        for base, keys in BASES.items()
        if base == "LoRA" or row not in INSIDE
    ),
    *(
        Cell("Compositions", row, "full, tied", pair("llama-tied", keys, plan=HALF))
        for row, keys in COMPOSED.items()
        if row in TIED
    ),
    *(
        Cell(
            "Keys that the plan answers",
            row,
            base,
            pair("llama", keys, plan=HALF | more),
        )
        for row, more in ANSWERED.items()
        for base, keys in BASES.items()
    ),
    *(
        Cell(
            "Trainers with a loss of their own",
            row,
            base,
            pair("llama", keys, more, plan=HALF),
        )
        for row, more in PREFERRED.items()
        for base, keys in (*BASES.items(), ("QLoRA", QLORA))
    ),
    *(
        Cell(
            "Trainers with a loss of their own",
            row,
            base,
            pair("llama", keys, more, plan=HALF),
        )
        for row, more in OWN_LOSS.items()
        for base, keys in BASES.items()
    ),
    *(
        Cell(
            "Trainers that sample",
            row,
            base,
            pair("llama", keys, more, plan=HALF),
        )
        for row, more in SAMPLED.items()
        for base, keys in (*BASES.items(), ("QLoRA", QLORA))
        if base == "full" or more.get("rl") != "gdpo"
    ),
    *(
        Cell(
            "Trainers that sample",
            "`trl.use_vllm`, `vllm_mode: server`",
            base,
            pair("llama", keys, ASKING, plan=HALF),
        )
        for base, keys in BASES.items()
    ),
    Cell(
        "Trainers that sample",
        "`trl.use_vllm`, `vllm_mode: server`",
        "QLoRA",
        refused=job("llama", QLORA, PAGED, ASKING),
        reason="TRL sends the packed bytes of such a base under the names of its weights, "
        "into which no server can load them: the plain run does so too",
        message="`load_in_4bit: true` with `trl.use_vllm: true` sends the server packed "
        "bytes",
    ),
    *(
        Cell(
            "Trainers that sample",
            row,
            "LoRA",
            refused=job("llama", LORA, PAGED, keys),
            reason=reason,
            message=message,
        )
        for row, (keys, message, reason) in NOT_SAMPLED.items()
    ),
    *(
        Cell(
            "Compositions",
            row,
            "LoRA" if adapted.get("adapter") else "full",
            refused=job("llama", adapted, PAGED),
            reason=reason,
            message=message,
        )
        for row, (keys, message, reason) in REFUSED.items()
        for adapted in [LORA | keys]
    ),
    *(
        Cell(
            "Compositions",
            row,
            base,
            pair(
                "llama", keys, FP16, {"plugins": [PROTRAIN, SEEDING, plugin]}, plan=HALF
            ),
            without=job("llama", keys, {"max_steps": 6}),
        )
        for row, plugin in SCALED.items()
        for base, keys in (("LoRA", LORA), ("QLoRA", QLORA))
    ),
    *(
        Cell(
            "Compositions",
            row,
            base,
            pair("llama-wide", keys | {"qat": qat, "bf16": True}, plan=HALF),
        )
        for row, qat in QAT.items()
        for base, keys in BASES.items()
        if base == "full" or qat is INT4
    ),
    Cell(
        "Compositions",
        "`qat`, NVFP4",
        "full",
        refused=job("llama-wide", {"qat": NVFP4, "bf16": True}),
        reason="torchao has no such fake quantisation without the GPUs that compute so: "
        "the plain run ends so too",
        message="Unexpected base config: NVFP4WeightOnlyConfig",
        called="CUDA only",
    ),
    Cell(
        "Compositions",
        "LLMCompressorPlugin",
        "full",
        refused=job("llama", PAGED, {"plugins": [PROTRAIN, COMPRESSING]}),
        reason="it writes masked weights from inside of passes, when those of most "
        "blocks are paged out",
        message="LLMCompressorPlugin writes weights from inside of passes",
    ),
    *(
        Cell(
            "Compiled blocks",
            row,
            base,
            pair("llama", keys, COMPILED, more, plan=plan | COMPILE),
        )
        for row, more, plan in (
            ("beside a plain run that compiles each block", {}, HALF),
            ("blocks swap", {}, overrides(0, 2, n_swap=4)),
            (
                "two micro-batches, clipped, evaluated",
                {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1} | EVALUATE,
                HALF,
            ),
        )
        for base, keys in (*BASES.items(), ("QLoRA", QLORA))
        if base != "QLoRA" or plan is HALF
    ),
    Cell(
        "Compiled blocks",
        "beside a plain run with `torch_compile: true`",
        "full",
        pair("llama", COMPILED, COMPILE, plan=HALF),
        tolerance=2e-5,
        reason=ROUNDS,
    ),
    *(
        Cell(
            "Compiled blocks",
            "two ranks",
            base,
            pair("llama", keys, COMPILED, plan=HALF | COMPILE, num_ranks=2),
        )
        for base, keys in BASES.items()
    ),
    Cell(
        "Compiled blocks",
        "`load_in_8bit`",
        "LoRA",
        refused=job("llama", LORA, PAGED, COMPILE, {"load_in_8bit": True}),
        reason="tried: losses differ by 2e-5 from those of a plain run with compiled blocks",
        message="`torch_compile: true` with `load_in_8bit: true` gives other numbers",
    ),
    Cell(
        "Compiled blocks",
        "`torch_compile_mode: reduce-overhead`, without its CUDA graphs",
        "full",
        pair(
            "llama",
            COMPILED,
            plan=HALF | COMPILE | {"torch_compile_mode": "reduce-overhead"},
        ),
    ),
)
