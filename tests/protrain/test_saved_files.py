"""Files written in place are those of transformers and safetensors, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from tiny_models import MODEL_NAMES, random_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from axolotl.integrations.protrain.core.checkpoint import (
    Piece,
    plan_safetensors,
    spec_of,
    write_file,
)
from axolotl.integrations.protrain.core.checkpoint.plans import PIECE_BYTES
from axolotl.integrations.protrain.saving import in_place

EXPERT_BYTES = 4 * 36 * 56
DTYPES = (
    "bool uint8 int8 float8_e5m2 float8_e4m3fn int16 uint16 float16 bfloat16 int32 "
    "uint32 float32 float64 int64 uint64".split()
)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def saved(model: Any, folder: Path, shard: str) -> tuple[Any, Any]:
    """What transformers writes, and what is written in place."""
    model.save_pretrained(folder / "theirs", max_shard_size=shard)
    with in_place():
        model.save_pretrained(folder / "ours", max_shard_size=shard)
    return contents(folder / "theirs"), contents(folder / "ours")


@pytest.mark.parametrize("family", MODEL_NAMES)
def test_every_family_is_written_as_transformers_does(
    family: str, tmp_path: Path
) -> None:
    # small ones: what would be copies decides into which shard a tensor goes
    theirs, ours = saved(random_model(family), tmp_path, "60KB")
    assert len(theirs) > 3 and ours == theirs


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "gemma3"])
def test_what_was_loaded_is_written_as_transformers_does(
    family: str, tmp_path: Path
) -> None:
    random_model(family).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.bfloat16
    )
    theirs, ours = saved(model, tmp_path, "50GB")
    assert "model.safetensors" in theirs and ours == theirs


class Largest(TorchDispatchMode):
    """The most bytes that one operator has made."""

    nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.nbytes = max(self.nbytes, made.nbytes)
        return made


def test_a_save_never_holds_more_than_one_expert(tmp_path: Path) -> None:
    model = random_model("mixtral")
    with Largest() as plain:
        model.save_pretrained(tmp_path)
    with in_place(), Largest() as ours:
        model.save_pretrained(tmp_path)
    assert ours.nbytes <= EXPERT_BYTES < plain.nbytes


def test_a_file_is_planned_as_safetensors_writes_it(tmp_path: Path) -> None:
    tensors = {
        f"{name}.é{number}": torch.ones(2, number).to(getattr(torch, name))
        for number, name in enumerate((*DTYPES, *reversed(DTYPES)))
    }
    tensors["scalar"], tensors["of none"] = torch.tensor(3.0), torch.ones(0, 7)
    tensors["turned"] = torch.arange(35.0).reshape(5, 7).T
    specs = [spec for key in tensors if (spec := spec_of(key, tensors[key]))]
    plan = plan_safetensors(specs, {"format": "pt"})
    write_file(tmp_path / "file", plan, tensors)
    whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
    assert (tmp_path / "file").read_bytes() == save(whole, {"format": "pt"})


def test_a_plan_is_a_value_that_covers_each_tensor_once() -> None:
    long = spec_of("b", torch.empty(PIECE_BYTES + 1, dtype=torch.uint8, device="meta"))
    short = spec_of("a", torch.empty(2, device="meta"))
    assert long is not None and short is not None
    plan = plan_safetensors([long, short], {})
    assert plan == plan_safetensors([short, long], {})
    start = len(plan.header)
    assert plan.pieces == (
        Piece("a", 0, 8, start),
        Piece("b", 0, PIECE_BYTES, start + 8),
        Piece("b", PIECE_BYTES, PIECE_BYTES + 1, start + 8 + PIECE_BYTES),
    )
    assert plan.nbytes == start + 8 + PIECE_BYTES + 1


def test_what_a_file_cannot_hold_has_no_spec() -> None:
    assert spec_of("a", torch.zeros(2, dtype=torch.complex64)) is None
    assert spec_of("a", torch.eye(2).to_sparse()) is None
