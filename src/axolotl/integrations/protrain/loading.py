"""Weights that are quantised while they load, by the kernels of the plain run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers.integrations.bitsandbytes import Bnb4bitQuantize

from .core.runtime import return_freed_memory
from .stand_ins import replaced

LARGE_BYTES = 1 << 20
"""Of a weight in 4 bits: what worked on it is worth returning to the system."""


def quantise_on(device: torch.device) -> AbstractContextManager[None]:
    """Let transformers quantise to 4 bits on `device`, one weight at a time.

    A paged base loads to the host, where quantising takes a minute for a billion
    parameters and rounds by other kernels than the GPU's, which the plain run uses.
    Where there is no other device, holes in the heap are all that this saves.
    """
    plain: Any = Bnb4bitQuantize.convert

    def convert(self: Any, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        there = {
            name: (value[0] if isinstance(value, list) else value).to(device)
            for name, value in input_dict.items()
        }
        quantised = plain(self, there, **kwargs)
        for param in quantised.values():
            # `to` would make another parameter, which its module does not know
            param.data = param.data.cpu()
            param.quant_state.to("cpu")
        if any(param.nbytes > LARGE_BYTES for param in quantised.values()):
            del there
            return_freed_memory()
        return quantised

    return replaced(Bnb4bitQuantize, "convert", convert)
