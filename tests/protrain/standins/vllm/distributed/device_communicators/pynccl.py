"""Broadcasts between the ranks of a `StatelessProcessGroup`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..utils import StatelessProcessGroup


class PyNcclCommunicator:
    """Carries bytes over the group's store."""

    def __init__(self, group: StatelessProcessGroup, device: Any) -> None:
        self.group = group

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Give all ranks what one of them has."""
        key, store = self.group.key("broadcast"), self.group.store
        if self.group.rank == src:
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            store.set(key, flat.numpy().tobytes())
            return
        flat = torch.frombuffer(bytearray(store.get(key)), dtype=torch.uint8)
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
        store.delete_key(key)
