"""Bases and YAMLs of no use, a table of their kinds, and commands asked about each.

Run as a script, it prints what every command says of every YAML of a folder, and which
heavy libraries it had to import for that.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
ORIGIN = "meta-llama/Llama-3.1-8B"


def _folder(**files: Any) -> Callable[[Path], str]:
    """A base with these files: config.json has keys or text, others bytes."""

    def make(root: Path) -> str:
        folder = root / "base"
        for name, content in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, dict):
                content = json.dumps(content)
            file.write_bytes(
                content if isinstance(content, bytes) else content.encode()
            )
        return str(folder)

    return make


def _quantised(method: str | None, **others: Any) -> Callable[[Path], str]:
    settings = {"bits": 4} | ({"quant_method": method} if method else {})
    return _folder(
        **{"config.json": LLAMA | {"quantization_config": settings} | others}
    )


def _named(name: str) -> Callable[[Path], str]:
    def make(root: Path) -> str:
        (root / "llama-8b").mkdir()
        return name.replace("ROOT", str(root))

    return make


METHODS = (
    "gptq awq fp8 fbgemm_fp8 compressed-tensors hqq eetq aqlm quanto torchao modelopt"
).split()
BASES: dict[str, tuple[Callable[[Path], str], str]] = {
    **{
        method: (_quantised(method), f"holds weights quantised by {method}, which cann")
        for method in METHODS
    },
    "origin": (
        _quantised("gptq", _name_or_path=ORIGIN),
        f"Give `base_model: {ORIGIN}`; `load_in_4bit: true`",
    ),
    "origin elsewhere": (
        _quantised("awq", _name_or_path="/home/somebody/llama"),
        "Give the base it was made from; ",
    ),
    "inner": (
        _folder(
            **{
                "config.json": {
                    "model_type": "llava",
                    "text_config": LLAMA
                    | {"quantization_config": {"quant_method": "gptq"}},
                }
            }
        ),
        "quantised by gptq",
    ),
    "no method": (_quantised(None), "quantised by a method without a name"),
    "mlx": (_quantised(None, quantization={"bits": 4}), "quantised by mlx"),
    "gguf": (
        _folder(**{"model.Q4_K_M.gguf": b"GGUF"}),
        "is GGUF, which cannot be trained; give the safetensors model it was made from",
    ),
    "gguf with a config": (
        _folder(**{"a.gguf": b"GGUF", "config.json": LLAMA}),
        "is GGUF, which",
    ),
    "gguf file": (
        lambda root: _folder(**{"a.gguf": b"GGUF"})(root) + "/a.gguf",
        "is GGUF, which",
    ),
    "gguf by name": (_named("owner/model-GGUF"), "is GGUF by its name, which"),
    "onnx": (_folder(**{"model.onnx": b"", "config.json": LLAMA}), "is ONNX, which"),
    "npz": (_folder(**{"weights.npz": b"", "config.json": LLAMA}), "is MLX, which"),
    "adapter": (
        _folder(
            **{
                "adapter_config.json": {"base_model_name_or_path": ORIGIN},
                "adapter_model.safetensors": b"",
            }
        ),
        f"is a PEFT adapter, not a model. Write `base_model: {ORIGIN}`, and "
        "`lora_model_dir: ",
    ),
    "absolute path": (
        _named("ROOT/llama-8"),
        "llama-8: there is no such path; did you mean /",
    ),
    "relative path": (_named("./llama"), "base_model: ./llama: there is no such path"),
    "path like a name": (_named("tests/llama"), "tests/llama: there is no such path"),
    "deep path": (_named("a/b/c"), "a/b/c: there is no such path."),
    "home": (_named("~/llama"), "`~` is not read as your home, write /"),
    "long": (_named("/" + "x" * 5000), "there is no such path."),
    "empty folder": (
        _folder(**{"README.md": ""}),
        "has no config.json; it is no model",
    ),
    "damaged": (
        _folder(**{"config.json": '{"model_type": '}),
        "its config.json is dam",
    ),
    "binary": (
        _folder(**{"config.json": b"\xff\xfe\x00"}),
        "its config.json is damaged",
    ),
    "deep": (_folder(**{"config.json": "[" * 200_000}), "its config.json is damaged"),
    "list": (
        _folder(**{"config.json": "[]"}),
        "its config.json is no model configurat",
    ),
    "a file": (
        lambda root: _folder(**{"model.safetensors": b""})(root) + "/model.safetensors",
        "is a file; give the folder it is in",
    ),
    "nothing": (
        _named(""),
        "base_model: missing; it names the folder with config.json",
    ),
}
"""Bases that cannot be trained, and what is said of each."""

USABLE: dict[str, tuple[Callable[[Path], str], dict[str, Any]]] = {
    "plain": (_folder(**{"config.json": LLAMA}), {}),
    "bitsandbytes": (
        _folder(
            **{"config.json": LLAMA | {"quantization_config": {"load_in_4bit": True}}}
        ),
        {},
    ),
    "mxfp4": (_quantised("mxfp4"), {}),
    "unpacked": (
        _quantised("fp8"),
        {
            "model_quantization_config": "FineGrainedFP8Config",
            "model_quantization_config_kwargs": {"dequantize": True},
        },
    ),
    "gguf beside": (
        _folder(**{"a.gguf": b"", "model.safetensors": b"", "config.json": LLAMA}),
        {},
    ),
    "adapter beside": (
        _folder(
            **{
                "adapter_config.json": "{}",
                "pytorch_model-00001-of-00002.bin": b"",
                "config.json": LLAMA,
            }
        ),
        {},
    ),
    "of the Hub": (_named("owner/name"), {}),
}
"""Bases of which nothing is known to be wrong, with keys of their YAML."""

_BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
_MERGES = "a: &a {" + ", ".join(f"k{n}: 1" for n in range(500)) + "}\n"
TEXTS: dict[str, tuple[str, str]] = {
    "bomb": (_BOMB, "line 5 is beyond 10,000 keys and values"),
    "merges": (
        _MERGES + "b: {<<: [" + ", ".join(["*a"] * 500) + "]}",
        "line 2 is beyond",
    ),
    "long": ("a: [" + "1, " * 20_000 + "]", "line 1 is beyond 10,000 keys and values"),
    "large": ("# " + "x" * (1 << 20), "larger than 1 MiB"),
    "itself": ("a: &a\n  b: *a\n", "line 2 has an alias inside of what it stands for"),
    "deep": ("a: " + "[" * 3000 + "]" * 3000, "line 1 is nested deeper than 32 levels"),
    "date": (
        "a: 1\nrun_name: 2024-02-30\n",
        "line 2 cannot be read: day is out of range",
    ),
    "digits": ("a: " + "9" * 5000, "line 1 has an integer beyond 64 bits"),
    "beyond 64 bits": (
        "sequence_len: 18446744073709551616",
        "an integer beyond 64 bits",
    ),
    "twice": (
        "micro_batch_size: 1\na: 2\nmicro_batch_size: 4\n",
        "`micro_batch_size` is there twice, in line 1 and line 3; keep one",
    ),
    "twice inside": (
        "a:\n- {b: 1, b: 2}\n",
        "`b` is there twice, in line 2 and line 2",
    ),
    "tag": ("a: !!timestamp x\n", "line 1 cannot be read: "),
    "object": ("a: !!python/object:os.system x", "could not determine a constructor"),
    "syntax": ("a: 1\nb: [\n", "not a readable YAML: line 3: "),
    "NUL": ("a: \0", "not a readable YAML: unacceptable character"),
    "list": ("- a\n", "holds no keys; it has to be an Axolotl YAML"),
    "empty": ("", "holds no keys; it has to be an Axolotl YAML"),
    "number": ("5", "holds no keys; it has to be an Axolotl YAML"),
}
"""YAMLs that cannot be read, and what is said of each."""

PLUGIN = "axolotl.integrations.protrain.ProTrainPlugin"
KEYS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "several": (
        {
            "plugins": [PLUGIN.replace("ProT", "Prot")],
            "protrain_capcity_bytes": "20GiB",
            "protrain_n_swap_override": -1,
            "lora_target_linaer": True,
            "micro_batch_size": 0,
            "gpu_memory_limit": "most",
            "adapter": "lora",
            "lora_rank": 8,
            "lora_alpha": 16,
            "deepspeed": "zero3.json",
            "tensor_parallel_size": 2,
            "base_model": "/nowhere/llama",
        },
        [
            f"`plugins`: `{PLUGIN.replace('ProT', 'Prot')}` cannot be imported; did you "
            f"mean `{PLUGIN}`?",
            "`protrain_capcity_bytes`: did you mean `protrain_capacity_bytes`?",
            "`protrain_n_swap_override` cannot be -1: allowed is a whole number from 0 up",
            "`lora_target_linaer` is no key of Axolotl; did you mean `lora_target_linear`?",
            "micro_batch_size: 0 is no whole number from 1 on.",
            "lora_r: not set, and `adapter: lora` needs it, for example `lora_r: 16`. "
            "`lora_rank` is no key of Axolotl's.",
            "`gpu_memory_limit`: 'most' is not a number of bytes. Set `protrain_capacity",
            "`tensor_parallel_size: 2` spreads the model over ranks in a way",
            "Where weights live is ProTrain's task here. Remove all that decides it: `deep",
            "`axolotl protrain migrate YOUR.yaml` shows what to write instead; ",
            "base_model: /nowhere/llama: there is no such path.",
        ],
    ),
    "plugins": (
        {
            "plugins": [
                PLUGIN,
                "axolotl.integrations.protain.ProTrainPlugin",
                "axolotl.integrations.liger.LigerPlugn",
                "axolotl.integrations.nothing.Plugin",
                "nobody.knows.Plugin",
            ]
        },
        [
            "`plugins`: `axolotl.integrations.protain.ProTrainPlugin` cannot be imported; "
            f"did you mean `{PLUGIN}`?",
            "`plugins`: `axolotl.integrations.liger.LigerPlugn` cannot be imported; did "
            "you mean `axolotl.integrations.liger.LigerPlugin`?",
            "`plugins`: `axolotl.integrations.nothing.Plugin` cannot be imported; Axolotl "
            "has no such plugin.",
        ],
    ),
    "no list": (
        {"plugins": PLUGIN, "lora_targt_linear": True},
        [
            f"`plugins: {PLUGIN}` is no list; write each plugin on a line of its own",
            "`lora_targt_linear` is no key of Axolotl; did you mean `lora_target_linear`?",
        ],
    ),
    "two modes": (
        {
            "protrain_force_all_persistent": True,
            "protrain_zero3_shard": True,
            "fp16": True,
        },
        [
            "`protrain_force_all_persistent` and `protrain_zero3_shard` exclude each oth",
            "`fp16: true` without an adapter loads the weights that train in fp16",
            "`protrain_auto_memory: false` trains without ProTrain.",
        ],
    ),
    "of another": ({"liger_rop": True, "plugins": ["nobody.knows.Plugin"]}, []),
    "of a plugin": (
        {"liger_rop": True, "plugins": ["axolotl.integrations.liger.LigerPlugin"]},
        ["`liger_rop` is no key of Axolotl; did you mean `liger_rope`?"],
    ),
    "passed over": ({"_anchors": 1, "my_note": 2, "liger_rope": True, 5: 6}, []),
    "quoted": ({"fp16": "false", "tiled_mlp": "no"}, []),
    "quoted of ours": (
        {
            "protrain_force_all_persistent": True,
            "protrain_zero3_shard": "false",
            "protrain_auto_mode": "no",
            "protrain_fp32_master": "off",
        },
        [],
    ),
    "no mapping": (
        {"trl": "grpo"},
        [
            "`trl: grpo` has no keys of its own. Write them below it, for ",
            "`protrain_auto_memory: false` trains without ProTrain.",
        ],
    ),
}
"""Keys beside a good base, and the lines that are said of them."""

COMMANDS = ("plan", "migrate", "selftest", "serve")
HEAVY = ("torch", "transformers", "peft", "axolotl.utils")


def main(folder: Path) -> None:
    """Ask all commands about all YAMLs of `folder`, in this one process."""
    from click.testing import CliRunner

    from axolotl.integrations.protrain.cli import protrain

    said = {}
    for config in sorted(folder.glob("*.yaml")):
        for command in COMMANDS:
            began = time.process_time()
            asked = CliRunner().invoke(protrain, [command, str(config)])
            took = time.process_time() - began
            name = f"{command} {config.stem}"
            text = asked.stdout if command == "migrate" else ""
            said[name] = [asked.exit_code, asked.stderr + text, took]
    imported = [name for name in HEAVY if name in sys.modules]
    print(json.dumps({"said": said, "imported": imported}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
