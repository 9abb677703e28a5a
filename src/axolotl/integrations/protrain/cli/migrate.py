"""`axolotl protrain migrate`: a YAML for plain Axolotl becomes one for this plugin.

Edits whole lines at the marks of YAML's parser, so that comments and order stay, and
reads the result back: what cannot be edited so is left to the person.
"""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..args import PLUGIN, lists_plugin, reject_unknown_keys
from ..core.errors import ConfigError
from ..refusals import Refusal, as_yaml, changes, refusals

SWITCH = "protrain_auto_memory"

Edit = tuple[int, int, list[str]]
"""First line, the one after the last, and what takes their place."""


@dataclass(frozen=True)
class Migration:
    """A YAML before and after, why its lines changed, and what a person has to decide."""

    before: str
    after: str
    reasons: tuple[str, ...]
    undecided: tuple[str, ...]

    def difference(self, name: str, new: str) -> str:
        """As `diff -u` prints it, of two names."""
        before, after = self.before.splitlines(), self.after.splitlines()
        return "\n".join(difflib.unified_diff(before, after, name, new, lineterm=""))


def migrate_file(config: Path, write: bool) -> Migration:
    """`migrate` a file, and replace it if it is to be written.

    Raises:
        ConfigError: As `migrate`; names the file.
        OSError: It cannot be read or written.
    """
    try:
        # bytes: line ends stay
        found = migrate(config.read_bytes().decode("utf-8"))
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"{config}: {error}") from error
    if write and found.reasons:
        _replace(config.resolve(), found.after.encode("utf-8"))
    return found


def _replace(file: Path, content: bytes) -> None:
    """Write all of a file or nothing, under its mode."""
    aside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(content)
        shutil.copymode(file, aside)
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)


def migrate(text: str) -> Migration:
    """List the plugin, and take out or replace what training with it would refuse.

    Raises:
        ConfigError: It is no Axolotl YAML, or its keys are not on lines of their own.
    """
    raw, root = _parsed(text)
    reject_unknown_keys(raw)
    rows = changes(raw)
    wanted = {key: raw[key] for key in raw.keys() - {row.key for row in rows}}
    plugins, switches = wanted.get("plugins") or [], SWITCH not in raw
    # what is no list is replaced, which reading back finds
    plugins = plugins if isinstance(plugins, list) else [plugins]
    lines = text.splitlines()
    spans = dict(_spans(root, lines))
    edits: list[Edit] = []
    for row in rows:
        put = [row.instead] if row.instead else []
        for key, value in yaml.safe_load(row.instead or "{}").items():
            put = put if key not in wanted else []
            wanted.setdefault(key, value)
        if row.key in spans:
            edits.append((*spans[row.key], put))
    reasons = _reasons(rows, raw)
    if not lists_plugin(plugins):
        wanted["plugins"] = [*plugins, PLUGIN]
        reasons.append(f"`plugins` lists {PLUGIN}")
    if switches:
        wanted[SWITCH] = True
        reasons.append(f"`{SWITCH}: true` plans and pages")
    switch = [f"{SWITCH}: true"] if switches else []
    plugin = None if lists_plugin(plugins) else PLUGIN
    edits.append(_listed(root, lines, spans, plugin, switch))
    after = _edited(text, edits, wanted, reasons) if reasons else text
    return Migration(text, after, tuple(reasons), tuple(refusals(wanted)))


def with_keys(text: str, keys: Mapping[str, Any]) -> str:
    """A YAML in which these keys have these values; what `plugins` has stays.

    Raises:
        ConfigError: As `migrate`.
    """
    raw, root = _parsed(text)
    lines = text.splitlines()
    spans, nodes = dict(_spans(root, lines)), {k.value: v for k, v in root.value}
    edits: list[Edit] = []
    wanted, put = {**raw, **keys}, []
    for key, value in keys.items():
        if key == "plugins":
            continue
        (line,) = yaml.safe_dump({key: value}).splitlines()
        if key not in spans:
            put.append(line)
            continue
        start, end, node = *spans[key], nodes[key]
        # what follows on the line is a comment
        rest = lines[start][node.end_mark.column :] if end == start + 1 else ""
        edits.append((start, end, [line + rest]))
    listed = raw.get("plugins") or []
    more = [plugin for plugin in keys.get("plugins", ()) if plugin not in listed]
    if "plugins" in keys:
        wanted["plugins"] = [*listed, *more]
    edits.append(_listed(root, lines, spans, more[0] if more else None, put))
    return _edited(text, edits, wanted, [as_yaml(*item) for item in keys.items()])


def _parsed(text: str) -> tuple[dict[str, Any], yaml.MappingNode]:
    try:
        raw, root = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"not a readable YAML: {error}") from error
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise ConfigError("has to be an Axolotl YAML, each key on a line of its own.")
    return raw, root


def _edited(
    text: str, edits: Sequence[Edit], wanted: Mapping[str, Any], by_hand: Sequence[str]
) -> str:
    lines = text.splitlines()
    # from the end on, so that the numbers of lines stay true
    for start, end, put in sorted(edits, reverse=True):
        lines[start:end] = put
    newline = "\r\n" if "\r\n" in text else "\n"
    after = "".join(line + newline for line in lines)
    if not _says(after, wanted):
        raise ConfigError(
            "keys that are there twice, share anchors or `<<`, or do not begin their "
            "line cannot be edited. Make these changes by hand: " + "; ".join(by_hand)
        )
    return after


def _reasons(rows: Sequence[Refusal], raw: Mapping[str, Any]) -> list[str]:
    """Keys of one reason together, those that are replaced each with its line."""
    keys: dict[str, list[str]] = {}
    for row in rows:
        why = row.why + (f"; now `{row.instead}`" if row.instead else "; left out")
        keys.setdefault(why, []).append(as_yaml(row.key, raw[row.key]))
    return [f"{', '.join(named)}: {why}" for why, named in keys.items()]


def _spans(
    root: yaml.MappingNode, lines: Sequence[str]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Each key with its first line and the one after its last.

    What follows and is of no key stays: blank lines, comments in the first column.
    """
    for key, value in root.value:
        start, end = key.start_mark.line, value.end_mark.line
        # the mark of a block is where the next key begins
        end += value.end_mark.column > 0
        while end > start + 1 and (
            not lines[end - 1].strip() or lines[end - 1].startswith(("#", "..."))
        ):
            end -= 1
        yield key.value, (start, max(end, start + 1))


def _listed(
    root: yaml.MappingNode,
    lines: Sequence[str],
    spans: Mapping[str, tuple[int, int]],
    plugin: str | None,
    put: Sequence[str],
) -> Edit:
    """List a plugin, if there is one to list, and then `put`, at `plugins` or the end."""
    if "plugins" not in spans:
        end = max((end for _, end in spans.values()), default=len(lines))
        return end, end, [*(["", "plugins:", f"  - {plugin}"] if plugin else []), *put]
    start, end = spans["plugins"]
    value = next(v for k, v in reversed(root.value) if k.value == "plugins")
    if plugin is None:
        return end, end, [*put]
    if not isinstance(value, yaml.SequenceNode) or not value.value:
        return start, end, ["plugins:", f"  - {plugin}", *put]
    if not value.flow_style:
        indent = " " * value.start_mark.column
        return end, end, [f"{indent}- {plugin}", *put]
    # at the last entry: a comma and a comment may follow it
    mark = value.value[-1].end_mark
    rest = list(lines[mark.line : end])
    rest[0] = f"{rest[0][: mark.column]}, {plugin}{rest[0][mark.column :]}"
    return mark.line, end, [*rest, *put]


def _says(text: str, wanted: Mapping[str, Any]) -> bool:
    try:
        return yaml.safe_load(text) == wanted
    except yaml.YAMLError:
        return False
