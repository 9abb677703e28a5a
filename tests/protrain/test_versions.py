"""A version that lacks what is used of its inside is named when the plugin is registered."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from axolotl.loaders.model import ModelLoader
from axolotl.utils.dict import DictDefault
from torch import nn
from transformers import Trainer

from axolotl.integrations.protrain import versions
from axolotl.integrations.protrain.cli import doctor
from axolotl.integrations.protrain.core.errors import ConfigError
from axolotl.integrations.protrain.offline.optimizer_state import optimizer_bytes
from axolotl.integrations.protrain.plugin import ProTrainPlugin

SRC = Path(versions.__file__).parent
LISTED = {"plugins": ["axolotl.integrations.protrain.ProTrainPlugin"]}

ELSEWHERE = {
    # read where it is, by DDP and by a model's own blocks
    "_can_checkpoint_with_cache",
    "_ddp_params_and_buffers_to_ignore",
    "_model_mapping",
    "_schedulers",
    "_wrapped_by_lr_sched",
    # of instances
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_step_pre_hooks",
    "_parameters",
    "_state_dict_pre_hooks",
    "_untyped_storage",
    # public, of os and of tuples with names
    "_exit",
    "_fields",
    # keys of files of others
    "_last_lr",
    "_name_or_path",
}
PROMISED = set(
    "HF_HUB_OFFLINE Generator __post_init__ autocast backend clip_grad_norm_ compile "
    "disable_saved_tensors_hooks enabled equal forward generate "
    "is_available is_sklearn_available kaiming_uniform_ matmul merge_adapter "
    "place_model_on_device plugins run save sync_weights unmerge_adapter".split()
)
"""Without an underscore, and put in the place of others for a while: documented, or of what
need not be there."""
OURS = set(
    "_deleted _evicted _expires _incomplete _last _lock _replaced _samplers _sessions "
    "_value".split()
)
"""Strings that name files and attributes of this package."""
PARTS = set(
    "_bytes _file _gib _global _global_ _hooks _kernel _optimizer_ _override _sq".split()
)
"""Beginnings and ends of names."""


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


def test_training_is_not_refused_over_what_a_dry_run_alone_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(ModelLoader, "_build_model")
    versions.require_internals()
    with pytest.raises(ConfigError, match=r"ModelLoader\._build_model\. It works with"):
        versions.require_internals(dry_run=True)
    line = next(doctor.findings(torch.device("cpu")))
    assert line.level == "poor" and "ModelLoader._build_model" in line.advice


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
            yield from (node.module or "").split(".")
        elif isinstance(node, ast.Import):
            yield from (part for a in node.names for part in a.name.split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.split()
            # all of a list of names, no sentence
            if all(re.fullmatch(r"_[A-Za-z]\w+", word) for word in words):
                yield from words
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            # operators are torch's own language
            if owner == "super()" or not (
                node.attr in own or owner in ("_aten", "torch.ops.aten")
            ):
                yield node.attr


def replaced_names() -> Iterator[str]:
    """What `patch.object` puts something else in the place of."""
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "patch.object":
                name = node.args[1]
                yield from [name.value] if isinstance(name, ast.Constant) else []


def test_all_that_is_used_is_looked_for() -> None:
    known = {
        part
        for table in (
            versions.NAMES,
            versions.PARAMETERS,
            versions.DRY_RUN_NAMES,
            versions.DRY_RUN_PARAMETERS,
            versions.LATER_NAMES,
        )
        for row in table.items()
        for text in row
        for part in text.replace(":", ".").replace(".", " ").split()
    }
    used = set(private_names_of_others())
    private = {name for name in used if name[0] == "_" and name[:2] != "__"}
    assert private
    assert private - known - OURS - PARTS - {*versions.COUNTERS} == ELSEWHERE
    replaced = {*replaced_names()}
    assert replaced - known == PROMISED


def test_what_is_imported_later_is_looked_for_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its lack passed for an optimizer that cannot be built."""
    from axolotl.core.builders import HFCausalTrainerBuilder

    versions.require_later()
    name = "_set_base_training_args"
    owner = next(kind for kind in HFCausalTrainerBuilder.__mro__ if name in vars(kind))
    monkeypatch.delattr(owner, name)
    cfg, model = DictDefault({"optimizer": "adamw_torch"}), nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"TrainerBuilder\._set_base_training_args\."):
        optimizer_bytes(cfg, model, "cpu", [])


def test_a_package_that_is_not_installed_is_told_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU machine it was on the path alone, and `doctor` ended with a traceback."""

    def unknown(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "requires", unknown)
    line = next(doctor.findings(torch.device("cpu")))
    assert line.level == "poor" and "Run `pip install .`" in line.advice
