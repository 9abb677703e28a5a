"""Reads an Axolotl YAML as Axolotl does, within limits: every command begins here.

Aliases share what they name, so that a few lines can stand for more values than memory
holds; deep nesting and huge numbers end parsers in tracebacks.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import yaml

from ..core.errors import FOREIGN_ERRORS, ConfigError

MOST_BYTES = 1 << 20
MOST_VALUES = 10_000
"""Keys and values, each alias counted as all that it stands for."""
MOST_DEPTH = 32
MOST_INTEGER = 2**63


class _Loader(yaml.SafeLoader):
    """Stops at the first node beyond a limit, before anything is built of it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._values = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event, before = self.peek_event(), self._values
        is_alias = isinstance(event, yaml.AliasEvent)
        where = _line_of(event)
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise ConfigError(f"{where} is nested deeper than {MOST_DEPTH} levels.")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            raise ConfigError(f"{where} has an alias inside of what it stands for.")
        self._values += self._sizes[id(node)] if is_alias else 1
        self._sizes[id(node)] = self._values - before
        if self._values > MOST_VALUES:
            raise ConfigError(
                f"{where} is beyond {MOST_VALUES:,} keys and values, each alias counted "
                "as all that it stands for."
            )
        if isinstance(node, yaml.MappingNode) and not is_alias:
            _refuse_repeated(node)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        is_int = node.tag == "tag:yaml.org,2002:int"
        try:
            # more digits than any base needs for 64 bits take long to convert
            is_huge = is_int and len(node.value) > 100
            value = 0 if is_huge else super().construct_object(node, deep)
        except ConfigError:
            raise
        except FOREIGN_ERRORS as error:
            # no day of the calendar, or a tag whose text is none of its kind
            raise ConfigError(f"{_line_of(node)} cannot be read: {error}.") from error
        if is_huge or (is_int and abs(value) >= MOST_INTEGER):
            raise ConfigError(f"{_line_of(node)} has an integer beyond 64 bits.")
        return value


def _line_of(at: Any) -> str:
    return f"line {at.start_mark.line + 1}"


def _refuse_repeated(mapping: yaml.MappingNode) -> None:
    """PyYAML and Axolotl take the last one in silence."""
    first: dict[tuple[str, str], yaml.Node] = {}
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
            continue
        other = first.setdefault((key.tag, key.value), key)
        if other is not key:
            raise ConfigError(
                f"`{textwrap.shorten(key.value, 60)}` is there twice, in {_line_of(other)} "
                f"and {_line_of(key)}; keep one."
            )


def read_text(config: Path) -> str:
    """Read a YAML's text; its line ends stay.

    Raises:
        ConfigError: There is no such file, or it cannot be a YAML.
    """
    # neither pipes nor devices, which may have no end
    if not config.is_file():
        raise ConfigError(f"{config}: no such file; CONFIG is an Axolotl YAML.")
    try:
        if config.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{config}: larger than {MOST_BYTES >> 20} MiB.")
        return config.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{config}: not a readable YAML: {error}") from error


def parsed(text: str) -> tuple[dict[Any, Any], yaml.MappingNode]:
    """Parse a YAML of keys; the nodes say where each of them stands.

    Raises:
        ConfigError: It is no YAML, has no keys, or is beyond a limit.
    """
    try:
        loader: Any = _Loader(text)
        root = loader.get_single_node()
        raw = None if root is None else loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ConfigError(f"not a readable YAML: {_syntax(error)}.") from error
    if not isinstance(raw, dict):
        raise ConfigError("holds no keys; it has to be an Axolotl YAML.")
    return raw, root


def _syntax(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return textwrap.shorten(str(error), 300)
    return f"line {mark.line + 1}: {getattr(error, 'problem', None)}"


def read_yaml(config: Path) -> dict[Any, Any]:
    """Read a YAML of keys.

    Raises:
        ConfigError: As `read_text` and `parsed`; names the file.
    """
    text = read_text(config)
    try:
        return parsed(text)[0]
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}") from error
