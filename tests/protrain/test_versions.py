"""A version that lacks what is used of its inside is named when the plugin is registered."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from axolotl.utils.dict import DictDefault
from torch import nn
from transformers import Trainer

from axolotl.integrations.protrain import versions
from axolotl.integrations.protrain.core.errors import ConfigError
from axolotl.integrations.protrain.plugin import ProTrainPlugin

SRC = Path(versions.__file__).parent
LISTED = {"plugins": ["axolotl.integrations.protrain.ProTrainPlugin"]}

ELSEWHERE = {
    # imported after all plugins are registered, whose arguments are merged in
    "_set_base_training_args",
    # of instances
    "_optimizer_step_post_hooks",
    "_optimizer_step_pre_hooks",
    "_parameters",
    "_untyped_storage",
    # public, of os
    "_exit",
}


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        # which is None
        (nn.Module, "_compiled_call_impl", "torch.nn.Module._compiled_call_impl;"),
        (torch.autograd, "_get_sequence_nr", "torch.autograd._get_sequence_nr;"),
        (
            Trainer,
            "_prepare_for_training",
            "transformers.Trainer._prepare_for_training;",
        ),
    ],
)
def test_what_is_missing_is_named_when_the_plugin_is_registered(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, said: str
) -> None:
    monkeypatch.delattr(owner, name)
    # one complaint follows, so the first ends as those of several do
    monkeypatch.delattr(Trainer, "_save_checkpoint")
    with pytest.raises(ConfigError) as caught:
        ProTrainPlugin().register(DictDefault(LISTED))
    text = str(caught.value)
    assert said in text
    assert f"torch {version('torch')}" in text
    assert f"works with {' and '.join(map(str, versions.supported().values()))}" in text
    # what is off needs nothing
    ProTrainPlugin().register(DictDefault(LISTED | {"protrain_auto_memory": False}))
    ProTrainPlugin().register(DictDefault({}))


def test_other_parameters_are_named_but_wrappers_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Trainer, "_save_checkpoint", lambda self, *args: None)
    versions.require_internals()
    monkeypatch.setattr(Trainer, "_save_checkpoint", lambda self, model, metrics: None)
    said = r"transformers\.Trainer\._save_checkpoint\(self, model, trial\)\."
    with pytest.raises(ConfigError, match=said):
        versions.require_internals()


def private_names_of_others() -> Iterator[str]:
    trees = [ast.parse(path.read_text("utf-8")) for path in SRC.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {
        node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(
            node.ctx, ast.Store
        ):
            own.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            # operators are torch's own language
            if owner == "super()" or not (
                node.attr in own or owner in ("_aten", "torch.ops.aten")
            ):
                yield node.attr


def test_all_that_is_used_is_looked_for() -> None:
    known = {
        part
        for table in (versions.NAMES, versions.PARAMETERS)
        for row in table.items()
        for text in row
        for part in text.replace(":", ".").replace(".", " ").split()
    }
    used = set(private_names_of_others())
    private = {name for name in used if name[0] == "_" and name[:2] != "__"}
    assert private
    assert private - known == ELSEWHERE
