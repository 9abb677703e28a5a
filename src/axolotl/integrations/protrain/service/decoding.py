"""Decode rows together: a forward for each token, with keys and values of what was read.

Prompts are padded on the left, as transformers' `generate` has them, and a wave keeps the
shape that it began with, so that its numbers are those of `generate` for the same rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import DynamicCache

from ..core.engine.session import Session
from ..core.errors import RequestError
from ..job import autocast_dtype
from .sampling import Row

_TRAINED_LOGIT_BYTES = 8
"""Bytes of a logit in a training pass, which has it and its gradient in float32."""


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the device for keys and values of one token of one row.

    Args:
        config: Of a model of transformers.
        dtype: That it computes in.
    """
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    keys = getattr(text, "qk_head_dim", None) or size
    values = getattr(text, "v_head_dim", None) or size
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return text.num_hidden_layers * kv_heads * (keys + values) * dtype.itemsize


def rows_at_once(cfg: Any, config: Any, dtype: torch.dtype) -> int:
    """Rows that may decode together without taking more of the device than training does.

    A pass of training has logits of each token and their gradients, which a step of
    decoding has of one token a row: that room is for keys and values. The plan does not
    count them, so this is the one place that says how many rows there may be.
    """
    logits = config.get_text_config(decoder=True).vocab_size * _TRAINED_LOGIT_BYTES
    fits = logits // kv_bytes_per_token(config, dtype)
    return int(cfg.micro_batch_size) * max(1, fits)


def _base_of(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


class Decoder:
    """Forwards of an open model that keep what they have read.

    Args:
        cfg: Axolotl's validated configuration.
        session: Of a model without dropout.
        pad: A token for places that nothing reads.

    Attributes:
        why_not: What keeps this base from sampling; empty for nothing.
        kv_bytes: For each token of a row.
        rows_at_once: See `rows_at_once`.
    """

    def __init__(self, cfg: Any, session: Session, pad: int) -> None:
        model: Any = session.model
        self._model = model
        self.device = session.device.torch_device
        self.pad = pad
        self._autocast = autocast_dtype(cfg)
        base: Any = _base_of(model)
        self._takes = inspect.signature(base.forward).parameters.keys()
        self._config = base.config
        self.why_not = ""
        self.kv_bytes, self.rows_at_once = 0, int(cfg.micro_batch_size)
        if "past_key_values" not in self._takes:
            self.why_not = "its forward keeps no keys and values (past_key_values)"
            return
        dtype: torch.dtype = self._autocast or base.dtype
        try:
            self.kv_bytes = kv_bytes_per_token(base.config, dtype)
            self.rows_at_once = rows_at_once(cfg, base.config, dtype)
        except (AttributeError, TypeError) as error:
            # it trains all the same
            self.why_not = f"its config does not say how large these are ({error})"

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
        with torch.autocast(kind, dtype) if dtype else nullcontext():
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
        read = 0 if self._mask is None else self._mask.numel()
        return self._decoder.kv_bytes * read

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
