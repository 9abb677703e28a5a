"""One micro-batch as Axolotl's collators would make it, for models without weights.

Integers are real and small, images are on the meta device: a trace needs values where
a model looks at them, and shapes everywhere else.
"""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import Tensor

from ..core.errors import ConfigError

_META = torch.device("meta")

_MASKLESS = ("gemma3", "gemma4", "gemma4_unified", "mamba")
"""Families whose packed rows go without an attention mask."""

DOCUMENTS_PER_ROW = 4
"""Packed rows are assumed to hold this many documents."""


def sample_batch(cfg: Any, model: Any, assumptions: list[str]) -> dict[str, Tensor]:
    """A micro-batch of the largest size that the validated YAML allows.

    Of `model` any copy will do, for its configuration and signature. `assumptions`
    gets a line for everything that the YAML does not say.

    Raises:
        ConfigError: The model takes images in a way that is not known here.
    """
    if cfg.processor_type and cfg.is_multimodal:
        return _image_batch(cfg, model, assumptions)
    # a reward is compared with another: chosen and rejected text are one micro-batch
    rows = cfg.micro_batch_size * (2 if cfg.reward_model else 1)
    length = cfg.sequence_len
    if cfg.pad_to_sequence_len is not False:
        multiple = cfg.pad_to_multiple_of or 64
        length = math.ceil(length / multiple) * multiple
    documents = DOCUMENTS_PER_ROW
    if cfg.sample_packing and not _packs_each_row(cfg):
        documents, rows, length = documents * rows, 1, rows * length
    ids = _token_ids(model.config, rows, length)
    batch = _text(ids, ids.clone())
    if cfg.sample_packing:
        assumptions.append(f"sample_packing: {documents} documents in each row")
        positions = torch.arange(length) % math.ceil(length / documents)
        batch["position_ids"] = positions.repeat(rows, 1)
        if cfg.attn_decontaminates_packing or cfg.model_config_type in _MASKLESS:
            del batch["attention_mask"]
    elif cfg.pad_to_sequence_len is not False or rows > 1:
        _pad_rows(batch, assumptions)
    parameters = _forward_parameters(model)
    if cfg.is_multimodal and "mm_token_type_ids" in parameters:
        batch["mm_token_type_ids"] = torch.zeros_like(ids)
    if cfg.reward_model:
        del batch["labels"]
    if "decoder_attention_mask" in parameters:
        # without it BART makes one of floats, whose values a trace does not know
        batch["decoder_attention_mask"] = torch.ones_like(ids)
    assumptions.append(f"rows as long as sequence_len allows: {rows} x {length} tokens")
    return batch


def _packs_each_row(cfg: Any) -> bool:
    """Otherwise the rows of a micro-batch are one row for the attention kernel."""
    if cfg.multipack_real_batches is None:
        return not cfg.attn_supports_packing
    return bool(cfg.multipack_real_batches)


def _text(ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    ones = torch.ones_like(ids)
    return {"input_ids": ids, "labels": labels, "attention_mask": ones}


def _pad_rows(batch: dict[str, Tensor], assumptions: list[str]) -> None:
    """One token is enough to make models build a mask."""
    batch["labels"][:, -1] = -100
    batch["attention_mask"][:, -1] = 0
    assumptions.append("each row ends in padding, as sample_packing is off")


def _token_ids(config: Any, rows: int, length: int) -> Tensor:
    """Some of the tokens that every vocabulary has."""
    vocabulary = getattr(config.get_text_config(), "vocab_size", 16)
    ids = torch.arange(rows * length) % min(vocabulary - 1, 97) + 1
    return ids.view(rows, length)


def _forward_parameters(model: Any) -> set[str]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return set(inspect.signature(type(base).forward).parameters)


def _image_batch(cfg: Any, model: Any, assumptions: list[str]) -> dict[str, Tensor]:
    """One image of the largest size in each sample, then text up to sequence_len."""
    config, names = model.config, _forward_parameters(model)
    rows = cfg.micro_batch_size
    processor = _processor_settings(cfg)
    vision = getattr(config, "vision_config", None)
    images: dict[str, Tensor] = {}
    num_tokens = _square_tokens(config)
    if "image_grid_thw" in names and hasattr(vision, "spatial_merge_size"):
        text = config.get_text_config()
        images, num_tokens, size = _patch_images(cfg, vision, text, processor, rows)
    elif "pixel_values" in names and num_tokens:
        side = _image_side(cfg, vision, processor)
        images = {"pixel_values": torch.empty(rows, 3, side, side, device=_META)}
        size = f"{side} x {side}"
    else:
        num_tokens = 0
        assumptions.append(
            f"images of model_type {config.model_type} are not known here: a batch of "
            "text only, the vision tower is not in the plan"
        )
    if images:
        assumptions.append(
            f"one image of {size} pixels, {num_tokens} tokens, in each sample"
        )
    length = max(cfg.sequence_len, num_tokens + 64)
    if length > cfg.sequence_len:
        assumptions.append(
            f"an image and its text need {length} tokens: more than sequence_len, to "
            "which Axolotl does not cut samples with images"
        )
    ids = _token_ids(config, rows, length)
    is_image = torch.zeros_like(ids)
    if num_tokens:
        is_image[:, 1 : 1 + num_tokens] = 1
        _put_image_tokens(ids, is_image.bool(), config)
    batch = _text(ids, ids.masked_fill(is_image.bool(), -100))
    if rows > 1:
        _pad_rows(batch, assumptions)
    for name in names & {"token_type_ids", "mm_token_type_ids"}:
        batch[name] = is_image
    return batch | images


def _put_image_tokens(ids: Tensor, is_image: Tensor, config: Any) -> None:
    special = _integer(config, "image_token_id", "image_token_index")
    if special is None:
        raise ConfigError(
            f"base_model: config.json of model_type {config.model_type!r} has no "
            "image_token_id, so a batch with images cannot be made up."
        )
    for name in ("vision_start_token_id", "boi_token_index", "boi_token_id"):
        start = _integer(config, name)
        if start is not None:
            ids[:, 0] = start
    ids[ids == special] += 1
    ids[is_image] = special


def _integer(config: Any, *names: str) -> int | None:
    """The first of the names that the configuration has with a number."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _processor_settings(cfg: Any) -> dict[str, Any]:
    source = str(cfg.processor_config or cfg.base_model)
    settings: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = find_file(source, name, cfg.revision_of_model)
        if file is not None:
            read = json.loads(file.read_text("utf-8"))
            settings |= read.get("image_processor", read)
    return settings | dict(cfg.processor_kwargs or {})


def _image_side(cfg: Any, vision: Any, processor: dict[str, Any]) -> int:
    """Pixels of one side: what the processor resizes to, else what the tower takes."""
    for source in (processor.get("crop_size"), processor.get("size")):
        if isinstance(source, dict) and "height" in source:
            return int(source["height"])
    return _longer(getattr(vision, "image_size", None) or cfg.image_size)


def _longer(size: Any) -> int:
    return max(size) if isinstance(size, (list, tuple)) else int(size)


def _square_tokens(config: Any) -> int | None:
    """Tokens that an image of fixed size becomes; None where sizes differ."""
    if getattr(config, "image_grid_pinpoints", None):
        return None
    return _integer(config, "mm_tokens_per_image", "image_seq_length")


def _patch_images(
    cfg: Any, vision: Any, text: Any, processor: dict[str, Any], rows: int
) -> tuple[dict[str, Tensor], int, str]:
    """Images as rows of patches with a grid, as the Qwen families take them."""
    taken, features = text.hidden_size, getattr(vision, "out_hidden_size", None)
    if features not in (None, taken):
        raise ConfigError(
            f"base_model: in config.json vision_config.out_hidden_size {features} must be "
            f"the hidden_size {taken} of the text model, which takes what the tower gives."
        )
    patch, merge = _longer(vision.patch_size), vision.spatial_merge_size
    unit = patch * merge
    edges = processor.get("size") or {}
    max_pixels = processor.get("max_pixels") or edges.get("longest_edge")
    height, width = _largest_grid(int(max_pixels or 1280 * unit * unit) // unit**2)
    if cfg.image_size is not None:
        side = max(1, round(_longer(cfg.image_size) / unit))
        if side * side <= height * width:
            height = width = side
    channels: Any = getattr(vision, "in_channels", None) or getattr(
        vision, "in_chans", 3
    )
    num_patches = rows * height * width * merge**2
    # of a tower for still images a patch has one frame
    frames = getattr(vision, "temporal_patch_size", 1)
    num_values = channels * frames * patch * patch
    images = {
        "pixel_values": torch.empty(num_patches, num_values, device=_META),
        "image_grid_thw": torch.tensor([[1, height * merge, width * merge]] * rows),
    }
    return images, height * width, f"{height * unit} x {width * unit}"


def _largest_grid(num_tokens: int) -> tuple[int, int]:
    """Height and width, at most 1 to 4, of the most tokens up to `num_tokens`."""
    side = max(1, math.isqrt(num_tokens))
    heights = range(side, side // 2, -1)
    height = max(heights, key=lambda h: h * (num_tokens // h))
    return height, max(1, num_tokens // height)


def find_file(source: str, name: str, revision: str | None = None) -> Path | None:
    """A file of a folder, or of a repository in the Hugging Face cache."""
    folder = Path(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        cached = try_to_load_from_cache(source, name, revision=revision)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None
