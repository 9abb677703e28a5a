"""All that is wrong with a YAML and can be told without heavy imports, said at once.

Each command and the plugin begin with it: a line for a fault, with the key and the way
out. What only Axolotl's validation, the machine or the model can tell comes later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .args import (
    OURS,
    PLUGIN,
    ProTrainArgs,
    bad_values,
    lists_plugin,
    memory_limit,
    mode_conflicts,
    unknown_keys,
    ways_out,
)
from .core.errors import ConfigError
from .offline.base_files import download_config, require_base
from .offline.known_keys import KnownKeys, known_keys
from .offline.yaml_file import read_yaml
from .refusals import as_yaml, refusals

_CLOSE = 0.85
"""Least likeness of a key that Axolotl does not know to the one that was meant."""
_MOST_MISSPELT = 100
"""Keys beyond these are not compared: it takes milliseconds a key."""
_FROM_ONE = "sequence_len", "micro_batch_size", "gradient_accumulation_steps"
_OF_LORA = {"lora_r": 16, "lora_alpha": 32}
"""Keys that an adapter needs, each with an example."""


def checked_yaml(
    config: Path, *, here: bool = False, download: bool = False
) -> dict[Any, Any]:
    """Read a YAML of which nothing is known to be wrong.

    Args:
        config: The file.
        here: Whether its base's config.json has to be on this machine.
        download: Whether to fetch that if it is not.

    Raises:
        ConfigError: A line for each fault.
    """
    raw = read_yaml(config)
    require_sound(raw, here=here, download=download)
    return raw


def require_sound(
    raw: Mapping[Any, Any], *, here: bool = False, download: bool = False
) -> None:
    """Refuse the keys of a YAML with all that is known to be wrong with them.

    Raises:
        ConfigError: A line for each fault.
    """
    lines = [*key_faults(raw), *_setting_faults(raw)]
    lines += base_faults(raw, here=here, download=download)
    if lines:
        raise ConfigError("\n".join(lines))


def require_servable(config: Path) -> None:
    """Refuse a YAML whose base cannot be served; most settings are the service's own.

    Raises:
        ConfigError: A line for each fault.
    """
    raw = read_yaml(config)
    if lines := [*key_faults(raw), *base_faults(raw)]:
        raise ConfigError("\n".join(lines))


def key_faults(raw: Mapping[Any, Any]) -> Iterator[str]:
    """Plugins that are not there, misspelt keys, and values of ours that cannot be."""
    try:
        lists_plugin(raw.get("plugins"))
    except ConfigError as error:
        yield str(error)
    known = _known(raw)
    for plugin, classes in known.missing.items():
        module = plugin.replace(":", ".").rpartition(".")[0]
        names = [PLUGIN, *(f"{module}.{name}" for name in classes)]
        close = get_close_matches(plugin, names, 1, _CLOSE)
        meant = (
            f"did you mean `{close[0]}`?" if close else "Axolotl has no such plugin."
        )
        yield f"`plugins`: `{plugin}` cannot be imported; {meant}"
    yield from unknown_keys(raw)
    yield from bad_values(raw)
    if known.all_known:
        for key, meant in _misspelt(raw, known).items():
            yield f"`{key}` is no key of Axolotl; did you mean `{meant}`?"


def _known(raw: Mapping[Any, Any]) -> KnownKeys:
    plugins = raw.get("plugins")
    return known_keys(map(str, plugins if isinstance(plugins, list | tuple) else ()))


def _misspelt(raw: Mapping[Any, Any], known: KnownKeys) -> dict[str, str]:
    """Keys that Axolotl passes over, each with the one that it is nearly alike."""
    unknown = [
        key
        for key in raw
        if isinstance(key, str) and key not in known.names and not OURS.match(key)
    ]
    found = {
        key: get_close_matches(key, known.names, 1, _CLOSE)
        for key in unknown[:_MOST_MISSPELT]
    }
    return {key: close[0] for key, close in found.items() if close}


def _setting_faults(raw: Mapping[Any, Any]) -> list[str]:
    """Numbers out of range, what an adapter lacks, and what cannot be trained paged."""
    lines = []
    for key in _FROM_ONE:
        value = raw.get(key)
        if isinstance(value, (int, float)) and value < 1:
            lines.append(f"{key}: {value} is no whole number from 1 on.")
    lines += _of_adapter(raw)
    try:
        memory_limit(raw)
    except ConfigError as error:
        lines.append(str(error))
    given = {key: raw.get(key) for key in ProTrainArgs.model_fields}
    ours = ProTrainArgs.model_construct(
        **{key: value for key, value in given.items() if value is not None}
    )
    excluded = mode_conflicts(ours) + refusals(raw)
    return lines + excluded + ([ways_out(raw)] if excluded else [])


def _of_adapter(raw: Mapping[Any, Any]) -> Iterator[str]:
    """PEFT fails on what is missing in words of its own."""
    adapter = raw.get("adapter")
    if adapter not in ("lora", "qlora") or raw.get("lora_model_dir"):
        return
    known = _known(raw)
    misspelt = _misspelt(raw, known).values()
    for key, example in _OF_LORA.items():
        if raw.get(key) or key in misspelt:
            continue
        unknown = [str(other) for other in raw if other not in known.names]
        near = get_close_matches(key, unknown, 1)
        yield (
            f"{key}: not set, and {as_yaml('adapter', adapter)} needs it, for example "
            f"`{key}: {example}`."
            + (f" `{near[0]}` is no key of Axolotl's." if near else "")
        )


def base_faults(
    raw: Mapping[Any, Any], *, here: bool = False, download: bool = False
) -> Iterator[str]:
    """A base that cannot be trained, as its files show."""
    try:
        if download:
            download_config(raw)
        require_base(raw, here=here)
    except ConfigError as error:
        yield str(error)
