"""Looks at the files of a YAML's base model before anybody else is asked about it."""

from __future__ import annotations

import difflib
import json
import os
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..refusals import quantised_base, quantised_by

_WEIGHTS = re.compile(r"(?!adapter_|training_args|optimizer).*\.(safetensors|bin|pth?)")
_OTHERS = {
    ".gguf": "GGUF",
    ".npz": "MLX",
    ".mlx": "MLX",
    ".onnx": "ONNX",
    ".nemo": "NeMo",
    ".h5": "Keras",
    ".msgpack": "Flax",
}
"""Formats that transformers does not train, by how their files end."""
_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?", re.ASCII)
"""A repository of the Hub."""
_FROM = "; give the safetensors model it was made from"


def require_base(raw: Mapping[str, Any], *, here: bool) -> None:
    """Refuse a base that its own files show to be of no use.

    Args:
        raw: The keys of a YAML.
        here: Whether config.json has to be on this machine: nothing will be fetched.

    Raises:
        ConfigError: Says what it is, and what to give instead.
    """
    source = raw.get("base_model_config") or raw.get("base_model")
    if not source:
        raise ConfigError("base_model: missing; it names the folder with config.json.")
    path, name = Path(str(source)), f"base_model: {source}"
    # unlike a Path's own methods these answer for names of any length
    if os.path.isfile(path):
        if path.suffix == ".gguf":
            raise ConfigError(f"{name} is GGUF, which cannot be trained{_FROM}.")
        raise ConfigError(f"{name} is a file; give the folder it is in.")
    is_folder = os.path.isdir(path)
    folder = path if is_folder else _cached(raw, str(source))
    if folder is not None:
        _require_trainable(folder, name, raw)
        return
    if _is_path(str(source)):
        raise ConfigError(f"{name}: there is no such path{_nearest(path)}")
    if re.search("gguf", str(source), re.IGNORECASE):
        raise ConfigError(
            f"{name} is GGUF by its name, which cannot be trained{_FROM}."
        )
    if here:
        raise ConfigError(
            f"{name}: no config.json, neither as a folder nor in the Hugging Face "
            f"cache. Fetch that one file with `hf download {source} config.json` or "
            "`axolotl-protrain plan … --download`, or give a folder that holds it."
        )


def base_config(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Read the config.json of a YAML's base; None where it is not here, or damaged."""
    source = str(raw.get("base_model_config") or raw.get("base_model") or "")
    try:
        folder = Path(source) if os.path.isdir(source) else _cached(raw, source)
        return None if folder is None else _read(folder / "config.json", source)
    except ConfigError:
        # `require_base` says so
        return None


def download_config(raw: Mapping[str, Any]) -> None:
    """Fetch the config.json of a YAML's base model unless it is here.

    Raises:
        ConfigError: It is not to be had.
    """
    source = str(raw.get("base_model_config") or raw.get("base_model") or "")
    if os.path.exists(source) or _cached(raw, source) or _is_path(source):
        return
    # imported here: half a second, and most often nothing is fetched
    from httpx import HTTPError
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(source, "config.json", revision=raw.get("revision_of_model"))
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        raise ConfigError(
            f"base_model: config.json of {source!r} was not fetched ({_line(error)}). "
            "Without a network point base_model to a folder that holds it; a gated "
            "model needs `hf auth login`."
        ) from error


def _is_path(source: str) -> bool:
    """Tell whether a name that is not in the cache is none of the Hub's."""
    owner, slash, _ = source.partition("/")
    return not _NAME.fullmatch(source) or (bool(slash) and os.path.isdir(owner))


def _nearest(path: Path) -> str:
    if path.parts[:1] == ("~",):
        return f"; `~` is not read as your home, write {path.expanduser()}."
    names: list[str] = []
    if os.path.isdir(path.parent):
        names = [other.name for other in path.parent.iterdir() if other.is_dir()]
    close = difflib.get_close_matches(path.name, names, 1)
    return f"; did you mean {path.parent / close[0]}?" if close else "."


def _cached(raw: Mapping[str, Any], source: str) -> Path | None:
    """The folder of a repository in the Hugging Face cache, with a config.json or GGUF."""
    # imported here, as above
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if not _NAME.fullmatch(source):
        return None
    revision = raw.get("revision_of_model")
    if not isinstance(revision, str | None):
        raise ConfigError(
            f"revision_of_model: {revision!r} is no text; write it in quotes, for example "
            f'`revision_of_model: "{revision}"`.'
        )
    try:
        folder = Path(
            snapshot_download(source, revision=revision, local_files_only=True)
        )
    except (LocalEntryNotFoundError, ValueError):
        return None
    is_of_use = (folder / "config.json").is_file() or [*folder.glob("*.gguf")]
    return folder if is_of_use else None


def _require_trainable(folder: Path, name: str, raw: Mapping[str, Any]) -> None:
    files = {file.name for file in folder.iterdir()}
    has_weights = any(map(_WEIGHTS.fullmatch, files))
    if not has_weights:
        if "adapter_config.json" in files:
            raise ConfigError(_of_adapter(folder, name))
        kinds = {_OTHERS.get(Path(file).suffix) for file in files} - {None}
        if kind := min(map(str, kinds), default=None):
            raise ConfigError(f"{name} is {kind}, which cannot be trained{_FROM}.")
    if "config.json" not in files:
        raise ConfigError(f"{name} has no config.json; it is no model of transformers.")
    config = _read(folder / "config.json", name)
    settings = _quantisation(config)
    method = None if settings is None else quantised_by(settings)
    if method is None or method == "mxfp4" or _is_unpacked(raw):
        return
    source = name.removeprefix("base_model: ")
    raise quantised_base(source, method, _origin(config, source))


def _read(file: Path, name: str) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name}: its config.json is damaged ({_line(error)}); fetch it again."
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{name}: its config.json is no model configuration.")
    return config


def _quantisation(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Read the key where transformers looks for it, and MLX, which has no
    `quant_method`."""
    text = config.get("text_config")
    for owner in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(settings := owner.get(key), dict) and settings:
                mlx = {"quant_method": "mlx"} if "quantization" in config else {}
                return {**mlx, **settings}
    return {"quant_method": "mlx"} if config.get("quantization") else None


def _is_unpacked(raw: Mapping[str, Any]) -> bool:
    """Tell whether the YAML asks transformers for plain weights of an MXFP4 or FP8
    base."""
    kwargs = raw.get("model_quantization_config_kwargs")
    asked = isinstance(kwargs, Mapping) and bool(kwargs.get("dequantize"))
    return asked and bool(raw.get("model_quantization_config"))


def _origin(config: Mapping[str, Any], source: str) -> str:
    """The model that a base was made from, where it says so."""
    for key in ("base_model_name_or_path", "_name_or_path"):
        name = str(config.get(key) or "")
        # a path is one of the machine that made it
        is_known = name and name != source and not name.startswith((".", "/", "~"))
        if is_known and not re.search("gptq|awq|fp8|-4bit|-8bit", name, re.IGNORECASE):
            return f"`base_model: {name}`"
    return "the base it was made from"


def _of_adapter(folder: Path, name: str) -> str:
    settings = _read(folder / "adapter_config.json", name)
    base = settings.get("base_model_name_or_path") or "the base that it was trained on"
    return (
        f"{name} is a PEFT adapter, not a model. Write `base_model: {base}`, and "
        f"`lora_model_dir: {folder}` to train the adapter on."
    )


def _line(error: Exception) -> str:
    return textwrap.shorten(str(error), 300)
