"""Decode rows together: a forward for each token, with keys and values of what was read.

Prompts are padded on the left, as transformers' `generate` has them, and a wave keeps the
shape that it began with, so that its numbers are those of `generate` for the same rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import DynamicCache

from ..core.engine.device import is_shortage
from ..core.errors import RequestError
from ..core.planner.generation import GenerationPlan
from ..job import autocast_dtype
from ..run import TrainingRun
from .sampling import Row


def _base_of(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


class Decoder:
    """Forwards of an open model that keep what they have read.

    Args:
        cfg: Axolotl's validated configuration.
        run: Open, with a model without dropout; its plan says how many rows have room, and
            what is held meanwhile.
        pad: A token for places that nothing reads.

    Attributes:
        why_not: What keeps this base from sampling; empty for nothing.
        most_rows: Of a wave.
    """

    def __init__(self, cfg: Any, run: TrainingRun, pad: int) -> None:
        assert run.session is not None and run.report is not None
        self._session, self._report = run.session, run.report
        model: Any = run.session.model
        self._model = model
        self.device = run.session.device.torch_device
        self.pad = pad
        self._autocast = autocast_dtype(cfg)
        base: Any = _base_of(model)
        self._takes = inspect.signature(base.forward).parameters.keys()
        self._config = base.config
        self.why_not = ""
        if "past_key_values" not in self._takes:
            self.why_not = "its forward keeps no keys and values (past_key_values)"
        # of a base whose samples cannot be traced
        self.most_rows = int(cfg.micro_batch_size)
        self._planned: GenerationPlan | None = None
        self._held: tuple[int, ...] = ()

    def follow_plan(self) -> None:
        """Read the plan of sampling, where it is another one than before."""
        planned = self._report.forecast.generation
        if planned is not None and planned is not self._planned:
            self._planned = planned
            self.most_rows, self._held = planned.rows, planned.held

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, chunks of the base that the plan of sampling holds stay on the device."""
        with ExitStack() as stack:
            try:
                stack.enter_context(self._session.holding(self._held))
            except RuntimeError as error:
                if not is_shortage(error):
                    raise
                self._held = ()
            yield

    def let_go(self) -> bool:
        """Hold nothing from the next turn on; tells whether anything was held."""
        held, self._held = self._held, ()
        return bool(held)

    def require_cache(self) -> None:
        """Refuse what this base cannot do.

        Raises:
            RequestError: It does not keep what it has read as transformers does.
        """
        if self.why_not:
            name = type(_base_of(self._model)).__name__
            raise RequestError(
                f"sampling: {name} trains here and does not sample: {self.why_not}. Use "
                "save_weights_for_sampler and a server that has this model."
            )

    def new_cache(self) -> DynamicCache:
        """Return one that has nothing yet."""
        return DynamicCache(config=self._config)

    @torch.no_grad()
    def logits(self, tokens: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Read tokens, and return logits after the last one, float32 of shape
        [rows, vocabulary].

        Args:
            tokens: int64 of shape [rows, new].
            mask: Of all tokens so far, int64 of shape [rows, read + new].
            cache: Of what was read.
        """
        places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
        more: dict[str, Any] = {
            "position_ids": places[:, -tokens.shape[1] :],
            "logits_to_keep": 1,
        }
        more = {name: value for name, value in more.items() if name in self._takes}
        kind, dtype = self.device.type, self._autocast
        with torch.autocast(kind, dtype, enabled=dtype is not None):
            output = self._model(
                input_ids=tokens,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                **more,
            )
        # not a view, which would keep logits of the whole prompt
        return output.logits[:, -1].to(copy=True, dtype=torch.float32)


class Wave:
    """Rows that decode together until the last one has ended.

    Args:
        rows: Some may have tokens already, which are read again with their prompts.
    """

    def __init__(self, decoder: Decoder, rows: Sequence[Row]) -> None:
        self._decoder, self.rows = decoder, list(rows)
        self._cache = decoder.new_cache()
        self._mask: Tensor | None = None
        self._away = False

    @property
    def going(self) -> list[Row]:
        """Rows that have not ended."""
        return [row for row in self.rows if row.reason is None]

    @property
    def nbytes(self) -> int:
        """Return the bytes of what was read."""
        parts = [part for layer in self._cache.layers for part in vars(layer).values()]
        # layers of linear attention have theirs in mappings
        parts += [p for part in parts if isinstance(part, dict) for p in part.values()]
        return sum(part.nbytes for part in parts if isinstance(part, Tensor))

    def logits(self) -> Tensor:
        """Read what each row has new; see `Decoder.logits`."""
        if self._away:
            for layer in self._cache.layers:
                layer.prefetch()
            self._away = False
        decoder, mask = self._decoder, self._mask
        if mask is None:
            read = [[*row.prompt, *row.tokens] for row in self.rows]
            longest = max(map(len, read))
            gaps = [longest - len(one) for one in read]
            each = zip(gaps, read, strict=True)
            padded = [[decoder.pad] * gap + one for gap, one in each]
            marks = [[0] * gap + [1] * (longest - gap) for gap in gaps]
            tokens, mask = torch.tensor([padded, marks], device=decoder.device)
        else:
            last = [decoder.pad if row.reason else row.tokens[-1] for row in self.rows]
            tokens = torch.tensor(last, device=decoder.device)[:, None]
            mask = torch.cat([mask, torch.ones_like(tokens)], -1)
        found = decoder.logits(tokens, mask, self._cache)
        self._mask = mask
        return found

    def leave(self) -> None:
        """Give the device's room back until the next token; the host has what was read."""
        for layer in self._cache.layers:
            layer.offload()
        self._away = True
