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

from ..args import PLUGIN, lists_plugin, unknown_keys
from ..checks import base_faults, key_faults
from ..core.errors import ConfigError
from ..offline.base_files import base_config
from ..offline.yaml_file import parsed, read_text
from ..refusals import Refusal, as_yaml, cautions, changes, refusals

SWITCH = "protrain_auto_memory"

Edit = tuple[int, int, list[str]]
"""First line, the one after the last, and what takes their place."""


@dataclass(frozen=True)
class Migration:
    """A YAML before and after, why its lines changed, what a person has to decide, and
    what is good to know."""

    before: str
    after: str
    reasons: tuple[str, ...]
    undecided: tuple[str, ...]
    notes: tuple[str, ...] = ()

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
    text = read_text(config)
    try:
        found = migrate(text)
    except ConfigError as error:
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
    faults = [*key_faults(raw), *(base_faults(raw) if raw.get("base_model") else ())]
    if unknown_keys(raw):
        raise ConfigError("\n".join(faults))
    rows = changes(raw)
    wanted = {key: raw[key] for key in raw.keys() - {row.key for row in rows}}
    plugins, switches = wanted.get("plugins") or [], SWITCH not in raw
    lines = text.splitlines(keepends=True)
    spans, nodes = dict(_spans(root, lines)), {k.value: v for k, v in root.value}
    edits: list[Edit] = []
    for row in rows:
        put = [row.instead] if row.instead else []
        for key, value in parsed(row.instead)[0].items() if row.instead else ():
            put = put if key not in wanted else []
            wanted.setdefault(key, value)
        if row.key in spans:
            edits.append(_replaced(lines, spans[row.key], nodes[row.key], put))
    reasons = _reasons(rows, raw)
    if not lists_plugin(plugins):
        wanted["plugins"] = [*plugins, PLUGIN]
        reasons.append(f"`plugins` lists {PLUGIN}")
    if switches:
        wanted[SWITCH] = True
        reasons.append(f"`{SWITCH}: true` plans and pages")
    switch = [f"{SWITCH}: true"] if switches else []
    plugin = None if lists_plugin(plugins) else PLUGIN
    places = _listed(root, lines, spans, plugin, switch)
    after = _edited(text, edits, places, wanted, reasons) if reasons else text
    undecided = (*faults, *refusals(wanted))
    return Migration(text, after, tuple(reasons), undecided, tuple(_notes(wanted)))


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _notes(raw: Mapping[str, Any]) -> list[str]:
    """Warn of what Axolotl does quietly, as far as a base that is here tells."""
    config = base_config(raw)
    if config is None:
        return []
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    counts = [text.get(key) for key in _EXPERTS]
    experts = any(isinstance(count, int) and count > 1 for count in counts)
    return cautions(raw, experts, bool(text.get("tie_word_embeddings", True)))


def with_keys(text: str, keys: Mapping[str, Any]) -> str:
    """A YAML in which these keys have these values; what `plugins` has stays.

    Raises:
        ConfigError: As `migrate`.
    """
    raw, root = _parsed(text)
    lines = text.splitlines(keepends=True)
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
        edits.append(_replaced(lines, spans[key], nodes[key], [line]))
    listed = raw.get("plugins") or []
    more = [plugin for plugin in keys.get("plugins", ()) if plugin not in listed]
    if "plugins" in keys:
        wanted["plugins"] = [*listed, *more]
    places = _listed(root, lines, spans, more[0] if more else None, put)
    by_hand = [as_yaml(*item) for item in keys.items()]
    return _edited(text, edits, places, wanted, by_hand)


def _parsed(text: str) -> tuple[dict[str, Any], yaml.MappingNode]:
    raw, root = parsed(text)
    if root.flow_style:
        raise ConfigError("has to be an Axolotl YAML, each key on a line of its own.")
    return raw, root


def _edited(
    text: str,
    edits: Sequence[Edit],
    places: Iterator[Edit],
    wanted: Mapping[str, Any],
    by_hand: Sequence[str],
) -> str:
    """The text after all edits and the first of `places` that changes nothing else."""
    first = text.splitlines(keepends=True)[0]
    newline = first[len(first.splitlines()[0]) :] or "\n"
    for place in places:
        lines = text.splitlines(keepends=True)
        # from the end on, so that the numbers of lines stay true
        for start, end, put in sorted([*edits, place], reverse=True):
            lines[start:end] = [_ended(line, newline) for line in put]
        # what was the last line may be one no more
        *others, last = lines
        after = "".join(_ended(line, newline) for line in others) + last
        if _says(after, wanted):
            return after
    raise ConfigError(
        "keys that are there twice, share anchors or `<<`, do not begin their line, or "
        "follow a `|+` cannot be edited. Make these changes by hand: "
        + "; ".join(by_hand)
    )


def _ended(line: str, newline: str) -> str:
    has_end = line.splitlines() != line.splitlines(keepends=True)
    return line if has_end else line + newline


def _replaced(
    lines: Sequence[str], span: tuple[int, int], node: yaml.Node, put: Sequence[str]
) -> Edit:
    """Put other lines where a key is, the first before the comment on its line."""
    start, end = span
    if not put or node.end_mark.line != start:
        return start, end, [*put]
    return start, end, [put[0] + lines[start][node.end_mark.column :], *put[1:]]


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
) -> Iterator[Edit]:
    """List a plugin, if there is one to list, and then `put`, at `plugins` or else after
    a key, the last if it can be: a line more may belong to the text of a `|`."""
    if "plugins" not in spans:
        new = ["", "plugins:", f"  - {plugin}"] if plugin else []
        # each is tried with a reading of the file, which may have thousands of keys
        ends = sorted({end for _, end in spans.values()}, reverse=True)[:3]
        for at in (*ends, min(start for start, _ in spans.values())):
            yield at, at, [*new, *put]
        return
    start, end = spans["plugins"]
    value = next(v for k, v in reversed(root.value) if k.value == "plugins")
    if plugin is None:
        yield end, end, [*put]
    elif not isinstance(value, yaml.SequenceNode) or not value.value:
        yield start, end, ["plugins:", f"  - {plugin}", *put]
    elif not value.flow_style:
        indent = " " * value.start_mark.column
        yield end, end, [f"{indent}- {plugin}", *put]
    else:
        # at the last entry: a comma and a comment may follow it
        mark = value.value[-1].end_mark
        rest = list(lines[mark.line : end])
        rest[0] = f"{rest[0][: mark.column]}, {plugin}{rest[0][mark.column :]}"
        yield mark.line, end, [*rest, *put]


def _says(text: str, wanted: Mapping[str, Any]) -> bool:
    try:
        return parsed(text)[0] == wanted
    except ConfigError:
        return False
