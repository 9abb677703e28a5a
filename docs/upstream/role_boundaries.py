"""Axolotl: `role_boundaries` in a YAML ends in "'NoneType' object is not callable".

A DictDefault answers None for every name, `model_dump` too, so `hasattr` is true of it and
the mapping is never read as one. `dict(spec)` first, or `isinstance(spec, BaseModel)`,
would do.
"""

from axolotl.processing_strategies import _resolve_role_boundary_override
from axolotl.utils.dict import DictDefault


class Words:
    """A tokenizer that has a number for each letter."""

    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]


specs = [{"role": "user", "start": "<|user|>", "end": "<|end|>"}]
print("plain mappings:", _resolve_role_boundary_override(specs, Words()))
cfg = DictDefault({"role_boundaries": specs})
try:
    _resolve_role_boundary_override(cfg.role_boundaries, Words())
except TypeError as error:
    print("as Axolotl hands them over:", f"TypeError: {error}")
    print("reproduced")
