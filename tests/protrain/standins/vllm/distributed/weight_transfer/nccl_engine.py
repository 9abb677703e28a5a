"""What TRL's client uses from 1.14 on: the trainer is the first rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..device_communicators.pynccl import PyNcclCommunicator
from ..utils import StatelessProcessGroup


@dataclass
class NCCLTrainerSendWeightsArgs:
    """Whom weights go to."""

    group: PyNcclCommunicator
    packed: bool = False


class NCCLWeightTransferEngine:
    """The trainer's side."""

    @staticmethod
    def trainer_init(init_info: Mapping[str, Any]) -> PyNcclCommunicator:
        """Meet the workers."""
        group = StatelessProcessGroup.create(
            init_info["master_address"],
            init_info["master_port"],
            0,
            init_info["world_size"],
        )
        return PyNcclCommunicator(group, "cuda")

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, Tensor]], trainer_args: NCCLTrainerSendWeightsArgs
    ) -> None:
        """Broadcast one after the other."""
        for _, weights in iterator:
            trainer_args.group.broadcast(weights, src=0)
