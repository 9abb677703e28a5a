"""Loads of a base over a disk that is full, in a process of their own."""

from __future__ import annotations

import resource
from pathlib import Path

import torch
from tiny_models import build_model, model_path
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from axolotl.integrations.protrain.core.errors import DiskError
from axolotl.integrations.protrain.loading import quantise_on

LIMITS = (1000, 20_000, 60_000)
"""Largest sizes of a file: no weight is written, one of some, or not all."""


def load_over_a_full_disk(root: Path) -> list[str]:
    """The error under each limit, and what is left in the folder after it."""
    build_model(root, "llama")
    files = sorted((root / model_path("llama")).glob("*.safetensors"))
    found, (_, hard) = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in LIMITS:
        folder = root / f"disk-{limit}"
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            how = quantise_on(
                torch.device("cpu"), disk=folder, base_files=lambda: files
            )
            with how:
                AutoModelForCausalLM.from_pretrained(
                    root / model_path("llama"),
                    quantization_config=BitsAndBytesConfig(load_in_4bit=True),
                    device_map={"": "cpu"},
                )
            found.append("loaded")
        except DiskError as error:
            found.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        found += [path.name for path in folder.iterdir()]
    return found
