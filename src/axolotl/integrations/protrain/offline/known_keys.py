"""Axolotl's keys, read out of its source: to import its schema takes ten seconds."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

from ..args import ProTrainArgs

_INPUT = ("axolotl.utils.schemas.config", "AxolotlInputConfig")
_OUR_PLUGIN = "axolotl.integrations.protrain.plugin"
_NO_SCHEMA = ("pydantic", "typing", "enum")


class KnownKeys(NamedTuple):
    """Keys that some plugins and Axolotl read from a YAML.

    Attributes:
        names: With aliases.
        missing: Plugins that are certainly not there, each with the classes of its
            module.
        all_known: Whether every plugin says in its source which keys it adds.
    """

    names: frozenset[str]
    missing: dict[str, list[str]]
    all_known: bool


class _Class(NamedTuple):
    module: str
    node: ast.ClassDef


def known_keys(plugins: Iterable[str]) -> KnownKeys:
    """The keys that Axolotl accepts in a YAML which lists these plugins."""
    names = {*ProTrainArgs.model_fields, *_fields(*_INPUT)}
    missing: dict[str, list[str]] = {}
    all_known = len(names) > len(ProTrainArgs.model_fields)
    for plugin in dict.fromkeys((*plugins, *_of_every_yaml())):
        module, _, name = plugin.replace(":", ".").rpartition(".")
        # Axolotl looks among its integrations for what is nowhere else
        places = [module, f"axolotl.integrations.{module}"]
        found = next((place for place in places if _source(place)), None)
        plugin_class = found and _find(found, name)
        if plugin_class and plugin_class.module == _OUR_PLUGIN:
            continue
        if found and plugin_class:
            args = _input_args(plugin_class)
            all_known = all_known and args is not None
            names.update(_fields(*args.rsplit(".", 1)) if args else ())
        elif (found or module).startswith("axolotl.integrations."):
            missing[plugin] = [*_classes(found), *_imported(found)] if found else []
        else:
            # a module of others may make its classes as it is imported
            all_known = False
    return KnownKeys(frozenset(names), missing, all_known)


def _of_every_yaml() -> Iterator[str]:
    """Plugins that Axolotl registers without being asked, from 0.21 on."""
    tree = _source("axolotl.integrations.base")
    for node in tree.body if tree else ():
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id == "BUILTIN_PLUGINS":
            assert isinstance(node, ast.Assign)
            yield from ast.literal_eval(node.value)
            yield from (point.value for point in entry_points(group="axolotl.plugins"))


@cache
def _file(module: str) -> Path | None:
    """Find, as an import would, the source of a module, without importing anything."""
    top, *inner = module.split(".")
    loaded = getattr(sys.modules.get(top), "__path__", None)
    if loaded is None or not inner:
        loaded, inner = sys.path, [top, *inner]
    for folder in loaded:
        path = Path(folder, *inner)
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file
    return None


@cache
def _source(module: str) -> ast.Module | None:
    file = _file(module)
    try:
        return ast.parse(file.read_bytes(), str(file)) if file else None
    except (SyntaxError, ValueError):
        # of a plugin of somebody's: an import says what is wrong
        return None


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    tree = _source(module)
    return {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)} if tree else {}


@cache
def _imported(module: str) -> dict[str, tuple[str, str]]:
    """Names of a module that come from others."""
    found: dict[str, tuple[str, str]] = {}
    tree = _source(module)
    for node in ast.walk(tree) if tree else ():
        if not isinstance(node, ast.ImportFrom):
            continue
        origin = [node.module] if node.module else []
        if node.level:
            # from a package's `__init__` one level less
            file, parts = _file(module), module.split(".")
            up = node.level - (file is not None and file.name == "__init__.py")
            origin = parts[: len(parts) - up] + origin
        for alias in node.names:
            found[alias.asname or alias.name] = (".".join(origin), alias.name)
    return found


def _find(module: str, name: str) -> _Class | None:
    """A class by its name in a module, there or where the module has it from."""
    for _ in range(8):
        if name in _classes(module):
            return _Class(module, _classes(module)[name])
        if name not in _imported(module):
            return None
        module, name = _imported(module)[name]
    return None


def _bases(found: _Class) -> Iterator[_Class | None]:
    for base in found.node.bases:
        name = ast.unparse(base)
        origin, _ = _imported(found.module).get(name, (found.module, ""))
        if origin.split(".")[0] not in _NO_SCHEMA and name not in ("str", "object"):
            yield _find(found.module, name)


def _fields(module: str, name: str) -> set[str]:
    """Fields of a pydantic model and of those it extends, with their aliases."""
    names: set[str] = set()
    found = _find(module, name)
    for node in found.node.body if found else ():
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and "ClassVar" not in ast.unparse(node.annotation)
        ):
            names.add(node.target.id)
            names.update(_aliases(node))
    for base in _bases(found) if found else ():
        names |= _fields(base.module, base.node.name) if base else set()
    return names


def _aliases(field: ast.AnnAssign) -> Iterator[str]:
    for node in ast.walk(field):
        if isinstance(node, ast.keyword) and node.arg in ("alias", "validation_alias"):
            for value in ast.walk(node.value):
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value


def _input_args(plugin: _Class) -> str | None:
    """The model of a plugin's keys; "" without any, None if its source does not say."""
    for node in plugin.node.body:
        if isinstance(node, ast.FunctionDef) and node.name == "get_input_args":
            if plugin.module == "axolotl.integrations.base":
                return ""
            returns = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
            values = [getattr(value, "value", None) for value in returns]
            only = values[0] if len(values) == 1 else None
            return only if isinstance(only, str) else None
    for base in _bases(plugin):
        if base is None:
            return None
        if args := _input_args(base):
            return args
    return ""
