"""An Axolotl plugin for the tests: the plain run that compiled blocks are compared with.

It compiles each block of a plain run by itself. In both runs it lets torch compile, which
workers otherwise forbid.
"""

from __future__ import annotations

from typing import Any

import torch
from axolotl.integrations.base import BasePlugin

from axolotl.integrations.protrain.core.layout import find_blocks


class CompilingPlugin(BasePlugin):
    """Compiles as `torch_compile_backend` says; `torch_compile` is the paged run's."""

    def pre_model_load(self, cfg: Any) -> None:
        torch.compiler.set_stance("default")
        # torch keeps eight graphs of a function
        torch._dynamo.reset()
        # as Axolotl has it
        torch._dynamo.config.suppress_errors = True

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        if not cfg.protrain_auto_memory and not cfg.torch_compile:
            for _, block in find_blocks(trainer.model):
                backend = cfg.torch_compile_backend or "inductor"
                block.forward = torch.compile(block.forward, backend=backend)
