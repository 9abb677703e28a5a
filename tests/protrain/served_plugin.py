"""An Axolotl plugin for the tests: a server beside the training, which answers for it."""

from __future__ import annotations

import multiprocessing
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

# before TRL is imported, which looks for vLLM then
sys.path.append(str(Path(__file__).parent / "standins"))

import torch
from axolotl.integrations.base import BasePlugin
from axolotl_jobs import free_port
from vllm_server import serve

RECORD = "served.json"


class ServedPlugin(BasePlugin):
    """Starts a server for the first rank, which ends with its process or before the next:
    TRL's client takes leave of it at its own end, and would wait for it a minute."""

    running: ClassVar[ExitStack] = ExitStack()

    def register(self, cfg: Any) -> None:
        # of a training before
        self.running.close()

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        self._ports = {"vllm_server_port": free_port(), "vllm_group_port": free_port()}
        if cfg.local_rank:
            return
        record = Path(cfg.output_dir) / RECORD
        record.parent.mkdir(parents=True, exist_ok=True)
        arguments = cfg.base_model, self._ports["vllm_server_port"], record
        process = multiprocessing.get_context("fork").Process(
            target=serve, args=arguments, daemon=True
        )
        process.start()
        self.running.callback(process.join)
        self.running.callback(process.kill)

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        self._as_cuda = ExitStack()
        if not torch.cuda.is_available():
            # TRL asks for the card that sends, from 1.14 on before it begins
            from trl.generation.vllm_client import VLLMClient

            card, plain = SimpleNamespace(uuid="none"), VLLMClient.init_communicator
            enter = self._as_cuda.enter_context
            enter(patch.object(torch.cuda, "current_device", lambda: 0))
            enter(patch.object(torch.cuda, "get_device_properties", lambda _: card))
            enter(
                patch.object(
                    VLLMClient,
                    "init_communicator",
                    lambda client, device: plain(client, "cuda"),
                )
            )
        return {
            "vllm_server_host": "127.0.0.1",
            "vllm_server_timeout": 60,
            **self._ports,
        }

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        self._as_cuda.close()
