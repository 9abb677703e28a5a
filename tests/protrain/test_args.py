"""The YAML keys: what is read, what is refused, and what the person is told.

The combinations are tried on Axolotl's real config class with ProTrainArgs mixed in,
the way Axolotl does it, so a renamed or retyped field upstream shows up here.
"""

import warnings

import pytest
from axolotl.integrations.base import PluginManager
from axolotl.integrations.expert_parallel.args import ExpertParallelArgs
from axolotl.integrations.kernels.args import KernelsArgs
from axolotl.utils.config import prepare_plugins, validate_config
from axolotl.utils.dict import DictDefault
from axolotl.utils.schemas.config import AxolotlInputConfig
from hypothesis import given, strategies as st
from pydantic import ValidationError

from axolotl.integrations import base
from axolotl.integrations.protrain.args import (
    ProTrainArgs,
    args_from,
    overrides,
    parse_bytes,
    unknown_keys,
)
from axolotl.integrations.protrain.core.errors import ConfigError, ProTrainError
from axolotl.integrations.protrain.core.types import Knobs
from axolotl.integrations.protrain.plugin import ProTrainPlugin
from axolotl.integrations.protrain.refusals import (
    EXCLUDED,
    PLACES,
    refusals,
)

PLUGIN = "axolotl.integrations.protrain.ProTrainPlugin"
PLAIN = {
    "base_model": "tiny-llama",
    "datasets": [{"path": "data.jsonl", "ds_type": "json", "type": "completion"}],
    "sequence_len": 128,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.0005,
    "bf16": False,
    "fp16": False,
    "attn_implementation": "sdpa",
    "gradient_checkpointing": True,
}
LORA = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_modules": ["q_proj"],
    "lora_mlp_kernel": False,
}
QLORA = {**LORA, "adapter": "qlora", "load_in_4bit": True}
SERVED = {"rl": "grpo", "trl": {"use_vllm": True}}


class Merged(AxolotlInputConfig, ExpertParallelArgs, KernelsArgs, ProTrainArgs):
    """What ``merge_input_args`` builds, with two more plugins that have our keys."""


def validate(**settings):
    """A full YAML with ``settings`` on top, through Axolotl's own validators."""
    return Merged(**{**PLAIN, **settings})


def complaint(config=validate, **settings):
    """The text of the one error that ``settings`` causes."""
    with pytest.raises(ValidationError) as caught:
        config(**settings)
    (error,) = caught.value.errors()
    assert isinstance(error["ctx"]["error"], ConfigError)
    return str(error["ctx"]["error"])


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"plugins": [PLUGIN]}, None),
        ({"plugins": [PLUGIN.replace(".ProTrain", ":ProTrain")]}, None),
        (
            {"plugins": ["protrain.ProTrainPlugin"], "protrain_auto_memory": False},
            False,
        ),
        ({}, False),
        ({"plugins": None}, False),
        ({"plugins": ["axolotl.integrations.liger.LigerPlugin"]}, False),
        ({"protrain_auto_memory": True}, True),
    ],
)
def test_an_installed_plugin_that_is_not_listed_has_to_be_asked_for(settings, wanted):
    """Axolotl 0.21 registers every installed plugin for every YAML."""
    raw = DictDefault({"base_model": "tiny-llama", **settings})
    ProTrainPlugin().register(raw)
    assert raw.get("protrain_auto_memory") is wanted


# --------------------------------------------------------------------------- values


def test_defaults_are_those_of_the_contract():
    assert ProTrainArgs().model_dump() == {
        "protrain_auto_memory": True,
        "protrain_auto_mode": True,
        "protrain_force_all_persistent": False,
        "protrain_force_replicated_cpu_offload": False,
        "protrain_zero3_shard": None,
        "protrain_n_persist_override": None,
        "protrain_n_buffer_override": None,
        "protrain_n_swap_override": None,
        "protrain_n_checkpoint_override": None,
        "protrain_capacity_bytes": None,
        "protrain_cpu_capacity_bytes": None,
        "protrain_vision_headroom_bytes": 4 * 2**30,
        "protrain_lora_mlp_forbid_offload": False,
        "protrain_cpu_optimizer": None,
        "protrain_fp32_master": False,
        "protrain_save_optimizer_state": True,
        "protrain_async_save": True,
        "protrain_cache_dir": None,
        "protrain_disk_dir": None,
        "protrain_learn_peak": True,
    }


def test_every_key_is_described_and_carries_the_prefix():
    for key, field in ProTrainArgs.model_fields.items():
        assert key.startswith("protrain_")
        assert field.description


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        (1 << 20, 1 << 20),
        ("22.5B", 22),
        (" 22 gib ", 22 * 2**30),
        ("0.5TiB", 2**39),
    ],
)
def test_byte_sizes(value, num_bytes):
    assert parse_bytes(value) == num_bytes
    args = ProTrainArgs(protrain_capacity_bytes=value)
    assert args.protrain_capacity_bytes == num_bytes


NOT_BYTES = [-1, True, 1.5e9, float("nan"), [22], {"GiB": 22}]
NOT_BYTES += ["", "0.1B", "-22GiB", "nan", "1e9", "22G", "22GiB or so", "1.GiB"]
NOT_BYTES += ["1,5GB", "٣GiB"]
BUDGET, HEADROOM = "protrain_capacity_bytes", "protrain_vision_headroom_bytes"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in (BUDGET, HEADROOM) for value in NOT_BYTES),
        (BUDGET, 0),
        (BUDGET, "0"),
    ],
)
def test_what_is_not_a_byte_size(key, value):
    with pytest.raises(ConfigError):
        parse_bytes(value)
    text = complaint(ProTrainArgs, **{key: value})
    assert key in text and repr(value) in text
    assert f'for example `{key}: "' in text


@pytest.mark.parametrize("value", [22, "22", (1 << 20) - 1])
@pytest.mark.parametrize("key", [BUDGET, "protrain_cpu_capacity_bytes"])
def test_a_size_without_the_unit_that_was_meant(key, value):
    text = complaint(ProTrainArgs, **{key: value})
    assert text.startswith(f"`{key}` cannot be {value!r}: allowed is")
    assert text.endswith(
        f'from 1048576, which is 1 MiB, up, for example `{key}: "22GiB"`'
    )


@pytest.mark.parametrize("value", [0, "0"])
def test_no_headroom_can_be_asked_for(value):
    args = ProTrainArgs(protrain_vision_headroom_bytes=value)
    assert args.protrain_vision_headroom_bytes == 0


UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@given(
    count=st.integers(1, 10**9),
    unit=st.sampled_from(sorted(UNITS)),
    gap=st.sampled_from(["", " "]),
    fold=st.sampled_from([str.lower, str.upper, str]),
)
def test_byte_text_is_read_back_exactly(count, unit, gap, fold):
    assert parse_bytes(f"{count}{gap}{fold(unit)}") == count * UNITS[unit]


@given(
    thousandths=st.integers(1, 10**9), unit=st.sampled_from(["KB", "MB", "GB", "TB"])
)
def test_byte_text_with_decimals_loses_nothing(thousandths, unit):
    text = f"{thousandths // 1000}.{thousandths % 1000:03d}{unit}"
    assert parse_bytes(text) == thousandths * UNITS[unit] // 1000


@given(st.integers(max_value=0) | st.floats() | st.booleans() | st.none())
def test_no_other_value_passes_for_a_byte_size(value):
    with pytest.raises(ConfigError):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("key", "value", "allowed", "example"),
    [
        ("protrain_auto_memory", "maybe", "true or false", "true"),
        ("protrain_auto_memory", None, "true or false", "true"),
        ("protrain_auto_mode", 2, "true or false", "true"),
        ("protrain_force_all_persistent", [], "true or false", "true"),
        ("protrain_zero3_shard", "auto", "true or false", "true"),
        ("protrain_fp32_master", "fp32", "true or false", "true"),
        ("protrain_save_optimizer_state", "5GB", "true or false", "true"),
        ("protrain_async_save", "disk", "true or false", "true"),
        ("protrain_n_persist_override", -1, "from 0 up", "2"),
        ("protrain_n_persist_override", 1.5, "from 0 up", "2"),
        ("protrain_n_buffer_override", True, "from 0 up", "2"),
        ("protrain_n_swap_override", "all", "from 0 up", "2"),
        ("protrain_n_checkpoint_override", [1], "from 0 up", "2"),
        ("protrain_cpu_optimizer", "jax", "torch", "torch"),
        ("protrain_cpu_optimizer", True, "torch", "torch"),
        ("protrain_cache_dir", 5, "the path of a folder", "/scratch/protrain"),
        ("protrain_cache_dir", "", "the path of a folder", "/scratch/protrain"),
    ],
)
def test_a_bad_value_gets_one_message(key, value, allowed, example):
    for config in (ProTrainArgs, validate):
        text = complaint(config, **{key: value})
        assert text.startswith(f"`{key}` cannot be {value!r}: allowed is ")
        assert allowed in text
        assert text.endswith(f"for example `{key}: {example}`")


def test_a_wrong_type_is_an_error_even_when_switched_off():
    off = {"protrain_auto_memory": False, "protrain_n_buffer_override": "two"}
    assert "protrain_n_buffer_override" in complaint(ProTrainArgs, **off)


# ---------------------------------------------------------------------- accepted as is


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"protrain_auto_mode": True},
        {"protrain_zero3_shard": False},
        {"protrain_lora_mlp_forbid_offload": False},
        {"protrain_force_replicated_cpu_offload": False},
        {"protrain_force_all_persistent": True},
        {"protrain_force_all_persistent": True, "protrain_auto_mode": False},
        {"protrain_n_swap_override": 0},
        {"protrain_n_buffer_override": 3, "protrain_auto_mode": False},
        {"protrain_n_persist_override": 3, "protrain_auto_mode": True},
        {"protrain_fp32_master": True},
        {"gradient_checkpointing": False},
        {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"bf16": True, "fp16": None},
        {"bf16": "auto", "fp16": None},
        {**LORA, "bf16": "auto", "fp16": True},
        {**QLORA, "bf16": False, "fp16": True},
        {"optimizer": "adamw_torch"},
        {"optimizer": None},
        {**LORA, "optimizer": "muon"},
        {**LORA, "optimizer": "adamw_bnb_8bit"},
        {"optimizer": "muon", "protrain_force_all_persistent": True},
        {"tensor_parallel_size": 1, "context_parallel_size": 1},
        {"expert_parallel_size": 1, "dp_shard_size": 1},
        {"deepspeed": None, "fsdp": None, "fsdp_config": None},
        {"torch_compile": False, "layer_offloading": False, "load_in_4bit": False},
        {"torch_compile": True, "torch_compile_backend": "inductor"},
        {"torch_compile": True, "torch_compile_mode": "max-autotune"},
        {"unfrozen_parameters": ["^lm_head.weight$", "layers.[0-9]", "layers.2[0-9]+"]},
        {"nonexpert_quantization": "bf16"},
        {"sample_packing": False, "neftune_noise_alpha": 5.0},
        {**LORA, "lora_qkv_kernel": True, "peft_use_dora": False},
        QLORA,
        {**LORA, "load_in_4bit": True},
        {**QLORA, "bnb_config_kwargs": {"bnb_4bit_use_double_quant": True}},
        {**LORA, **SERVED},
        {"rl": "grpo", "trl": {"use_vllm": False, "vllm_mode": "colocate"}},
    ],
    ids=str,
)
def test_accepted(settings):
    assert validate(**settings).protrain_auto_memory


def test_reading_axolotl_fields_raises_no_deprecation_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        validate()


# ---------------------------------------------------------------- refused combinations

NVFP4 = {**LORA, "lora_mlp_kernel": None, "use_sonicmoe": True}

REFUSED_IN_AXOLOTL = [
    ("deepspeed", {"deepspeed": "zero3.json"}),
    ("deepspeed", {"deepspeed": {"zero_optimization": {"stage": 3}}}),
    ("fsdp_config", {"fsdp_config": {"offload_params": True}, "fsdp_version": 2}),
    ("tensor_parallel_size", {"tensor_parallel_size": 2}),
    ("dp_shard_size", {"dp_shard_size": 2}),
    ("dp_replicate_size", {"dp_replicate_size": 2}),
    ("layer_offloading", {"layer_offloading": True}),
    ("tiled_mlp", {"tiled_mlp": True}),
    (
        "torch_compile_backend",
        {"torch_compile": True, "torch_compile_backend": "onnxrt"},
    ),
    (
        "torch_compile_options",
        {"torch_compile": True, "torch_compile_options": {"triton.cudagraphs": True}},
    ),
    ("load_in_8bit", {**LORA, "torch_compile": True, "load_in_8bit": True}),
    ("fp8", {"fp8": True}),
    ("fp16", {"fp16": True}),
    ("fp16", {"fp16": True, "bf16": "auto"}),
    ("gptq", {**LORA, "gptq": True}),
    ("model_quantization_config", {"model_quantization_config": "Mxfp4Config"}),
    (
        "model_quantization_config",
        {"model_quantization_config": "FineGrainedFP8Config"},
    ),
    (
        "model_quantization_config",
        {
            "model_quantization_config": "FineGrainedFP8Config",
            "model_quantization_config_kwargs": {"dequantize": True},
        },
    ),
    ("use_onebitllms", {"use_onebitllms": True}),
    ("nvfp4_merge_aware", {**NVFP4, "nvfp4_merge_aware": True}),
    ("gemma4_fp8_nonexpert", {"gemma4_fp8_nonexpert": True}),
    ("gemma4_nf4_nonexpert", {"gemma4_nf4_nonexpert": True}),
    ("nonexpert_quantization", {"nonexpert_quantization": "nf4"}),
    ("ple_cpu_offload", {**QLORA, "ple_cpu_offload": True}),
    ("lora_on_cpu", {**LORA, "lora_on_cpu": True}),
    ("relora", {**QLORA, "relora": True, "jagged_restart_steps": 10}),
    (
        "relora: true` merges adapters into weights that `protrain_disk_dir`",
        {**LORA, "relora": True, "jagged_restart_steps": 10, "protrain_disk_dir": "/d"},
    ),
    (
        "do_causal_lm_eval` runs the model on some ranks",
        {"do_causal_lm_eval": True, "protrain_zero3_shard": True},
    ),
    ("use_ray", {"use_ray": True, "ray_num_workers": 2}),
    ("lisa_n_layers", {**LORA, "lisa_n_layers": 2, "lisa_step_interval": 20}),
    ("wandb_watch: all", {"wandb_watch": "all"}),
    ("wandb_watch: parameters", {"wandb_watch": "parameters"}),
    ("unfrozen_parameters", {"unfrozen_parameters": ["model.embed_tokens[:100]"]}),
    ("unfrozen_parameters", {"unfrozen_parameters": ["lm_head", "^emb$[5:]"]}),
    ("unfrozen_parameters", {"unfrozen_parameters": ["embed_tokens.weight$[7]"]}),
    *(
        (f"trl.{key}: true", {"rl": "grpo", "trl": {key: True}})
        for key in ("sync_ref_model", "async_prefetch", "use_data_producer")
    ),
    (
        "trl.vllm_mode: colocate",
        {"rl": "grpo", "trl": {"use_vllm": True, "vllm_mode": "colocate"}},
    ),
    ("load_in_4bit: true` with `trl.use_vllm: true", {**QLORA, **SERVED}),
    (
        "protrain_disk_dir: /disk` with `trl.use_vllm: true",
        {**LORA, **SERVED, "protrain_disk_dir": "/disk"},
    ),
    (
        "model_quantization_config: FineGrainedFP8Config` with `trl.use_vllm: true",
        {
            **LORA,
            **SERVED,
            "model_quantization_config": "FineGrainedFP8Config",
            "model_quantization_config_kwargs": {"dequantize": True},
        },
    ),
    ("rl: ebft", {"rl": "ebft", "ebft": {"mode": "structured"}}),
    ("precompute_ref_log_probs", {"rl": "dpo", "precompute_ref_log_probs": True}),
    ("optimizer: lomo", {"optimizer": "lomo"}),
    ("optimizer: apollo_adamw_layerwise", {"optimizer": "apollo_adamw_layerwise"}),
    ("optimizer: q_galore_adamw8bit", {"optimizer": "q_galore_adamw8bit"}),
    ("optimizer: sgd", {"optimizer": "sgd", "protrain_cpu_optimizer": "torch"}),
]

# Axolotl itself stops these before our turn, some on a machine without ring_flash_attn,
# some from 0.20 on, or does not know them in every version.
REFUSED_AFTER_AXOLOTL = [
    ("context_parallel_size: 2` spreads", {"context_parallel_size": 2}),
    ("sequence_parallel_degree: 2` spreads", {"sequence_parallel_degree": 2}),
    ("expert_parallel_size: 2` spreads", {"expert_parallel_size": 2}),
    ("Where weights live is ProTrain's task here", {"fsdp": ["full_shard"]}),
    ("nf4_backend: torchao` gives weights", {"nf4_backend": "torchao"}),
]
OF_SOME_VERSIONS = {"fsdp", "nf4_backend"}


@pytest.mark.parametrize(
    ("named", "settings"),
    REFUSED_IN_AXOLOTL,
    ids=[named for named, _ in REFUSED_IN_AXOLOTL],
)
def test_refused(named, settings):
    text = complaint(**settings)
    assert f"`{named}" in text
    assert "`protrain_auto_memory: false` trains without ProTrain." in text
    assert validate(**settings, protrain_auto_memory=False)


@pytest.mark.parametrize(("said", "settings"), REFUSED_AFTER_AXOLOTL)
def test_refused_where_axolotl_would_let_it_pass(said, settings):
    (line,) = refusals(settings)
    assert line.lstrip("`").startswith(said)


def test_every_row_of_the_tables_is_tried_and_names_a_real_field():
    rows = {row.key for row in EXCLUDED} | set(PLACES)
    assert rows - OF_SOME_VERSIONS <= set(Merged.model_fields)
    cases = REFUSED_IN_AXOLOTL + REFUSED_AFTER_AXOLOTL
    tried = {key for _, settings in cases for key in settings}
    assert rows <= tried


@pytest.mark.parametrize(
    ("settings", "shards"),
    [
        ({"do_causal_lm_eval": True}, False),
        ({"generate_samples": True}, False),
        ({"use_wandb": True, "eval_table_size": 5}, False),
        ({"use_wandb": True, "eval_table_size": 0}, None),
        ({"diffusion": {"mask_token_id": 16}}, False),
        ({"diffusion": {"generate_samples": False}}, None),
        ({"diffusion_lm": {"from_causal_lm": True}}, False),
        ({"diffusion_lm": {"generate_samples": False, "unroll": {"k_max": 4}}}, False),
        ({"generate_samples": False, "protrain_zero3_shard": True}, True),
    ],
    ids=str,
)
def test_ranks_that_run_the_model_unlike_share_no_chunks(settings, shards):
    assert args_from(settings).protrain_zero3_shard is shards


def test_all_that_is_wrong_is_said_at_once():
    fsdp = {"fsdp_config": {"offload_params": True}, "fsdp_version": 2}
    text = complaint(**fsdp, layer_offloading=True, optimizer="lomo")
    first, _, last = text.splitlines()
    assert first.endswith(": `layer_offloading`, `fsdp_config`, `fsdp_version`.")
    assert last.endswith("trains without ProTrain.")


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": "offload"},
        {"gradient_checkpointing": "offload_disk"},
        *({"activation_offloading": v} for v in (True, "legacy", "hidden_states")),
        {"selective_checkpointing": {"save": ["attention"]}},
        {"device_map": "auto"},
        {"device_map": {"": 0}},
        {"max_memory": {0: "20GiB"}},
        {"auto_find_batch_size": True},
    ],
    ids=str,
)
def test_what_the_plan_answers_is_not_refused(settings):
    assert validate(**settings).protrain_capacity_bytes is None


@pytest.mark.parametrize(
    ("settings", "num_bytes"),
    [
        ({"gpu_memory_limit": 20}, 20 * 2**30),
        ({"gpu_memory_limit": "20GB"}, 20 * 10**9),
        ({"gpu_memory_limit": 20, "protrain_capacity_bytes": 1 << 20}, 1 << 20),
    ],
)
def test_the_memory_limit_is_the_budget(settings, num_bytes):
    assert validate(**settings).protrain_capacity_bytes == num_bytes
    off = validate(**settings, protrain_auto_memory=False)
    assert off.protrain_capacity_bytes == settings.get("protrain_capacity_bytes")


def test_a_memory_limit_that_is_no_number_of_bytes():
    assert "`gpu_memory_limit`: 'most of it' is not" in complaint(
        gpu_memory_limit="most of it"
    )


def test_full_precision_bf16_is_unknown_to_axolotl():
    """The reason why there is no row for ``bf16: full``."""
    with pytest.raises(ValidationError, match="bf16"):
        validate(bf16="full", protrain_auto_memory=False)


def test_a_plugin_that_writes_weights_inside_of_passes_is_refused():
    plugins = ["axolotl.integrations.llm_compressor.LLMCompressorPlugin"]
    (line,) = refusals({"plugins": plugins})
    assert "LLMCompressor" in line and "protrain_force_all_persistent" in line
    assert not refusals({"plugins": plugins, "protrain_force_all_persistent": True})


def test_masters_need_state_on_the_host():
    text = complaint(
        ProTrainArgs, protrain_fp32_master=True, protrain_force_all_persistent=True
    )
    assert "protrain_fp32_master" in text and "Drop one" in text


# --------------------------------------------------------------- ways to choose a plan

ALL_PERSISTENT = {"protrain_force_all_persistent": True}
REPLICATED = {"protrain_force_replicated_cpu_offload": True}
SHARDED = {"protrain_zero3_shard": True}


@pytest.mark.parametrize("force", [ALL_PERSISTENT, REPLICATED, SHARDED], ids=str)
def test_a_force_flag_beside_an_explicit_search(force):
    (key,) = force
    text = complaint(**force, protrain_auto_mode=True)
    assert f"`protrain_auto_mode: true` excludes `{key}`. Drop one of them." in text


@pytest.mark.parametrize(
    "force",
    [
        {**ALL_PERSISTENT, **REPLICATED},
        {**ALL_PERSISTENT, **SHARDED},
        {**REPLICATED, **SHARDED},
        {**ALL_PERSISTENT, **REPLICATED, **SHARDED},
    ],
    ids=str,
)
def test_two_force_flags(force):
    text = complaint(**force)
    assert " and ".join(f"`{key}`" for key in force) in text
    assert "exclude each other. Keep one." in text


def test_no_way_to_choose_a_plan():
    text = complaint(protrain_auto_mode=False)
    assert text.startswith("`protrain_auto_mode: false` leaves no plan.")


@pytest.mark.parametrize("force", [REPLICATED, SHARDED], ids=str)
def test_a_way_to_page_and_knobs_by_hand(force):
    cfg = validate(**force, protrain_n_buffer_override=3)
    assert overrides(cfg)[0].n_buffer == 3 and not cfg.protrain_auto_mode


@pytest.mark.parametrize("knob", ["n_persist", "n_buffer", "n_swap", "n_checkpoint"])
def test_overrides_of_a_resident_model(knob):
    text = complaint(**ALL_PERSISTENT, **{f"protrain_{knob}_override": 0})
    assert "Drop one or the other." in text


def test_a_force_flag_alone_replaces_the_search():
    once = validate(**ALL_PERSISTENT)
    assert not once.protrain_auto_mode
    # Axolotl's dump holds the defaults too; validating it again must not trip on them.
    again = Merged(**once.model_dump(exclude_none=True))
    assert again.model_dump() == once.model_dump()


@pytest.mark.parametrize(
    "settings",
    [
        {**ALL_PERSISTENT, **SHARDED},
        {**ALL_PERSISTENT, "protrain_auto_mode": True},
        {**ALL_PERSISTENT, "protrain_n_buffer_override": 2},
        {"protrain_auto_mode": False},
        {"protrain_cpu_optimizer": "torch"},
    ],
    ids=str,
)
def test_switched_off_nothing_is_refused(settings):
    assert not validate(**settings, protrain_auto_memory=False).protrain_auto_memory


# -------------------------------------------------------------------------- overrides


def test_no_override():
    assert overrides(ProTrainArgs()) is None
    assert overrides(DictDefault()) is None


@pytest.mark.parametrize(
    ("given_knobs", "expected"),
    [
        (
            {"n_persist": 7},
            (Knobs(7, 2, 0, 0), ("n_buffer", "n_swap", "n_checkpoint")),
        ),
        (
            {"n_buffer": 0},
            (Knobs(0, 0, 0, 0), ("n_persist", "n_swap", "n_checkpoint")),
        ),
        (
            {"n_swap": 0},
            (Knobs(0, 2, 0, 0), ("n_persist", "n_buffer", "n_checkpoint")),
        ),
        (
            {"n_checkpoint": 4},
            (Knobs(0, 2, 0, 4), ("n_persist", "n_buffer", "n_swap")),
        ),
        (
            {"n_persist": 1, "n_buffer": 3, "n_swap": 0, "n_checkpoint": 4},
            (Knobs(1, 3, 0, 4), ()),
        ),
    ],
    ids=str,
)
def test_a_partial_set_is_completed(given_knobs, expected):
    keys = {f"protrain_{knob}_override": value for knob, value in given_knobs.items()}
    assert overrides(ProTrainArgs(**keys)) == expected
    assert overrides(DictDefault(keys)) == expected


# ---------------------------------------------------------------------- misspelt keys

MISSPELT = [
    ("protrain_capcity_bytes", "protrain_capacity_bytes"),
    ("protrain_n_persist", "protrain_n_persist_override"),
    ("protrain-auto-memory", "protrain_auto_memory"),
    ("pro_train_cpu_optimizer", "protrain_cpu_optimizer"),
    ("ProTrain_Auto_Mode", "protrain_auto_mode"),
    ("protrain_zero_3_shard", "protrain_zero3_shard"),
    ("protrainautomemory", "protrain_auto_memory"),
    ("pro_train_fp32_master", "protrain_fp32_master"),
    ("protrain_cpu_optimiser", "protrain_cpu_optimizer"),
]


@pytest.mark.parametrize(("key", "nearest"), MISSPELT)
def test_a_misspelt_key_is_named_with_the_nearest_real_one(key, nearest):
    (line,) = unknown_keys({**PLAIN, key: 1})
    assert line == f"`{key}`: did you mean `{nearest}`?"


def test_all_misspelt_keys_are_named():
    lines = unknown_keys({key: 1 for key, _ in MISSPELT})
    assert lines == [f"`{key}`: did you mean `{near}`?" for key, near in MISSPELT]


def test_a_key_that_is_gone_is_named() -> None:
    (line,) = unknown_keys({"protrain_check_races": True})
    assert line.startswith("`protrain_check_races` is no key any more")


def test_what_the_host_cannot_update_is_told_what_it_can() -> None:
    keys = {"optimizer": "adamw_bnb_8bit", "protrain_cpu_optimizer": "torch"}
    assert (
        "`optimizer: adamw_bnb_8bit` cannot update weights on the host, which "
        "`protrain_cpu_optimizer` asks for. Use adamw_torch or adamw_torch_fused, "
        "train an adapter, or remove `protrain_cpu_optimizer`."
    ) in complaint(**keys)


@pytest.mark.parametrize("block", ["protrain", "pro_train", "ProTrain"])
def test_a_nested_block_is_told_to_be_flat(block):
    (line,) = unknown_keys({block: {"auto_memory": True, "capacity": "22GiB"}})
    assert "keys are flat: `protrain_auto_memory`, `protrain_" in line


@pytest.mark.parametrize("empty", [{}, None])
def test_an_empty_block_is_refused_too(empty):
    assert unknown_keys({"protrain": empty})


def test_a_key_does_not_steer_the_terminal() -> None:
    keys = {"protrain_\x1b[31mred\u202e\r": 1, "protrain_größe": 1}
    text = str(ConfigError("\n".join(unknown_keys(keys))))
    assert "`protrain_\\x1b[31mred\\u202e\\r`: did" in text
    assert "`protrain_größe`: did" in text


def test_real_and_foreign_keys_pass():
    ours = dict.fromkeys(ProTrainArgs.model_fields)
    assert not unknown_keys({**PLAIN, **ours, "train_on_inputs": True, 5: "five"})


def test_one_handler_catches_both_kinds():
    assert issubclass(ConfigError, ProTrainError)
    assert issubclass(ConfigError, ValueError)


# ------------------------------------------- through the plugin, as axolotl train does


@pytest.fixture
def fresh_plugin_manager(monkeypatch):
    """Axolotl's manager is a process singleton that remembers earlier configs."""
    monkeypatch.setattr(PluginManager, "_instance", None)
    monkeypatch.setattr(PluginManager, "_cfg", None)


MODULE = PLUGIN.replace(".ProTrain", ".plugin.ProTrain")
NEW = pytest.mark.skipif(
    not hasattr(base, "get_builtin_plugins"),
    reason="before 0.21 Axolotl loads only the plugins that a YAML lists",
)


@pytest.mark.usefixtures("fresh_plugin_manager")
@pytest.mark.parametrize(
    ("settings", "pages"),
    [
        pytest.param({"plugins": None}, False, marks=NEW),
        pytest.param({"plugins": None, "protrain_auto_memory": True}, True, marks=NEW),
        pytest.param({"plugins": [PLUGIN]}, True, marks=NEW),
        pytest.param(
            {"plugins": [PLUGIN.replace(".ProTrain", ":ProTrain")]}, True, marks=NEW
        ),
        pytest.param({"plugins": [MODULE]}, True, marks=NEW),
        ({"plugins": [MODULE, PLUGIN]}, True),
    ],
    ids=["not asked for", "asked for", "listed", "entry point", "module", "twice"],
)
def test_an_installed_plugin_is_found_and_loaded_once(settings, pages):
    """As `load_cfg` does it; examples (test_demo.py) and trainings go through it too."""
    cfg = DictDefault({**PLAIN, "plugins": [PLUGIN], **settings})
    prepare_plugins(cfg)
    assert validate_config(cfg, None, None).protrain_auto_memory is pages
    plugins = PluginManager.get_instance().plugins.values()
    assert [type(plugin) for plugin in plugins].count(ProTrainPlugin) == 1
