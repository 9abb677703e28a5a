"""Cells of docs/compatibility.md: kinds of adapters, and what trains beside them."""

from __future__ import annotations

from typing import Any

from axolotl_jobs import LORA, PAGED, PROTRAIN, SEEDING, Job, job, overrides, pair
from matrix import Cell
from matrix_bases import QLORA

TABLE = "Adapters"
BASES = {"LoRA": LORA | {"bf16": True}, "QLoRA": QLORA}


def _on(*modules: str) -> dict[str, Any]:
    return {"lora_target_linear": False, "lora_target_modules": list(modules)}


def _with(plugin: str) -> dict[str, Any]:
    return {"plugins": [PROTRAIN, SEEDING, f"switching_plugin.{plugin}"]}


HEAD = {"lora_modules_to_save": ["embed_tokens", "lm_head"]}
MLP = _on("q_proj") | {"lora_modules_to_save": ["mlp"]}
ADAPTERS: dict[str, dict[str, Any]] = {
    "DoRA (`peft_use_dora`)": {"peft_use_dora": True},
    "rsLoRA (`peft_use_rslora`)": {"peft_use_rslora": True},
    "LoRA+ (`loraplus_lr_ratio`)": {"loraplus_lr_ratio": 16},
    "`lora_dropout`": {"lora_dropout": 0.1},
    "`lora_dropout`, blocks recompute": {
        "lora_dropout": 0.1,
        "gradient_checkpointing": True,
    },
    "`lora_rank_pattern`, `lora_alpha_pattern`": {
        "lora_rank_pattern": {"down_proj": 3},
        "lora_alpha_pattern": {"q_proj": 5},
    },
    "`peft_autocast_adapter_dtype: false`": {"peft_autocast_adapter_dtype": False},
    "On some blocks (`peft_layers_to_transform`)": _on("q_proj", "down_proj")
    | {"peft_layers_to_transform": [0, 3]},
    "Blocks that share weights (`peft_layer_replication`)": {
        "peft_layer_replication": [[0, 3], [1, 4]]
    },
    "On embeddings": _on("embed_tokens", "q_proj", "down_proj"),
    "On the head": _on("lm_head", "q_proj", "down_proj"),
    "Trained embeddings and head (`lora_modules_to_save`)": HEAD,
    "The same with `embedding_lr`": HEAD | {"embedding_lr": 0.001},
    "Trained MLPs (`lora_modules_to_save`)": MLP,
    "`peft_trainable_token_indices`": {"peft_trainable_token_indices": [5, 70]},
    "Trained norms (`unfrozen_parameters`)": {
        "unfrozen_parameters": [
            "base_model.model.model.layers.[0-9].[a-z_.]+lora_",
            "base_model.model.model.layers.[0-9].input_layernorm",
        ]
    },
    "PiSSA (`peft_init_lora_weights: pissa`)": {"peft_init_lora_weights": "pissa"},
    "OLoRA (`peft_init_lora_weights: olora`)": {"peft_init_lora_weights": "olora"},
    "`peft_init_lora_weights: gaussian`": {"peft_init_lora_weights": "gaussian"},
    "`peft_init_lora_weights: orthogonal`": {"peft_init_lora_weights": "orthogonal"},
    "Two adapters, one trains": _with("SecondAdapterPlugin"),
    "Two adapters, switched each step": _with("SwitchingPlugin") | {"max_steps": 5},
}
RELORA = {
    "relora": True,
    "jagged_restart_steps": 2,
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 3,
}
RESET = {"relora_prune_method": "reset", "optimizer": "adamw_torch"}
EXPERTS = {
    "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
}
NO_SUCH_PLAIN_RUN = {
    # PEFT takes the packed bytes for a matrix
    ("PiSSA (`peft_init_lora_weights: pissa`)", "QLoRA"),
    ("Trained MLPs (`lora_modules_to_save`)", "QLoRA"),
}


def _cell(row: str, column: str, family: str, settings: dict[str, Any]) -> Cell:
    base = BASES[column]
    # which adapter trains does not show in what the first one learns
    ignored = row == "Two adapters, one trains"
    return Cell(
        table=TABLE,
        row=row,
        column=column,
        trainings=pair(family, base, settings, plan=overrides(0, 2)),
        without=None if ignored else job(family, base),
    )


def _refused(row: str, column: str, run: Job, reason: str, message: str) -> Cell:
    return Cell(TABLE, row, column, refused=run, reason=reason, message=message)


CELLS = (
    *(
        _cell(row, column, "llama", settings)
        for row, settings in ADAPTERS.items()
        for column in BASES
        if (row, column) not in NO_SUCH_PLAIN_RUN
    ),
    _refused(
        "Trained MLPs (`lora_modules_to_save`)",
        "QLoRA",
        job("llama", QLORA, MLP, PAGED),
        "Packed bytes have no gradient: the plain run would train nothing there.",
        "LayoutError: base_model.model.model.layers.0.mlp.modules_to_save.default."
        "gate_proj.weight: a quantised weight is trainable",
    ),
    *(
        _cell(f"On experts, {name} (`lora_target_parameters`)", column, family, EXPERTS)
        for name, family in {"Mixtral": "mixtral", "Qwen3-MoE": "qwen3_moe"}.items()
        for column in BASES
    ),
    _cell("ReLoRA (`relora`)", "LoRA", "llama", RELORA | {"bf16": False}),
    _cell("ReLoRA, adapters begin anew", "LoRA", "llama", RELORA | RESET),
    _refused(
        "ReLoRA (`relora`)",
        "QLoRA",
        job("llama", BASES["QLoRA"], PAGED, RELORA),
        "Tried: at the first restart the plain run ends with an AssertionError of "
        "bitsandbytes in 4 bits, and goes on with the base it began with in 8 bits.",
        "`relora: true` merges adapters into weights that bitsandbytes does not quantise",
    ),
)
