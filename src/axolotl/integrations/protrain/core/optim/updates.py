"""What a session asks of whoever updates weights whose optimizer state is on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from .host_chunks import HostChunk


class Updates:
    """Those of a session without such weights, and the face of all others."""

    def take_chunks(self, chunks: Sequence[HostChunk], gradients: Any) -> None:
        """These are on the host from now on, known ones and more; nothing is pending."""

    def clip_grad_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float
    ) -> Tensor | None:
        """Total 2-norm of all gradients; scales them as `clip_grad_norm_` would.

        `parameters` come in the order of the plain run, which fixes the last bit. None
        if all gradients are on the device, where the plain way sees them.
        """
        return None

    def settle_gradients(self) -> None:
        """Return once every gradient is where it is read, and clipped."""

    def forget_gradients(self) -> None:
        """Nothing is left of the gradients since the last update."""

    def use(self, chunk: int, weights: Callable[[], Any]) -> None:
        """A chunk is about to be used where `weights` says: make its noted step."""

    def fetch_ahead(self, block: int) -> None:
        """Bring what the next updates read, from a block on, as far as there is room."""

    def finish(self) -> None:
        """Send home what an interrupt has kept from it, before slots are filled."""

    def flush(self) -> None:
        """Return once nothing is pending: the host's copy is the truth."""

    def gathered(self) -> AbstractContextManager[None]:
        """Inside, which all ranks enter, the first of each node has the state of all."""
        return nullcontext()

    def memory(self) -> list[Tensor]:
        """Host memory of weights and their state, chunk by chunk as they are updated:
        nobody writes there without a `Device.before_write`."""
        return []

    def host_bytes(self) -> int:
        """Host bytes of gradients, masters and optimizer state."""
        return 0

    def close(self) -> None:
        """Let go of all memory; no copy may be in flight."""
