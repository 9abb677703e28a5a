"""Answers that TRL's GRPO trainers generate, for a plan: how many, how long, what they take.

Such a trainer makes its batches itself: it samples answers to prompts, has them judged,
and computes losses of what came out. Its largest micro-batch is a prompt of the data, the
longest, and `max_completion_length` tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from datasets import Dataset
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from .core.errors import ConfigError
from .core.planner.job import trace_loss
from .core.planner.memory import inference_bytes
from .core.types import Generation, Served, Trace, Work

if TYPE_CHECKING:
    from transformers import Trainer

SAMPLED_BYTES = 40
"""Bytes of each entry of the vocabulary of a row while its token is drawn: logits and scores
in fp32, both sorted with their places, and probabilities twice."""
TOKEN_BYTES = 64
"""Bytes of each token of a row: its number, mask and position as int64, which grow by
copies."""
_TOKENISED = 64
"""Number of prompts, the longest as text, of which one has the most tokens."""


class Sampled(NamedTuple):
    """A micro-batch that a trainer has sampled already."""

    batch: Any


def generates(trainer: Trainer) -> bool:
    """Tell whether a trainer makes its batches by sampling from its model."""
    # by name: importing TRL takes seconds, which a dry run need not spend
    return any(
        kind.__name__ == "GRPOTrainer" and kind.__module__.startswith("trl.")
        for kind in type(trainer).__mro__
    )


def longest_prompt(trainer: Any, dataset: Iterable[Mapping[str, Any]]) -> int:
    """Count the tokens of the longest prompt of the data, as the trainer makes them."""
    if isinstance(dataset, Dataset):
        # without the other columns
        dataset = dataset.select_columns("prompt")
    prompts = [row["prompt"] for row in dataset]
    prompts.sort(key=lambda prompt: len(str(prompt)), reverse=True)
    prompts, processing = prompts[:_TOKENISED], trainer.processing_class
    if isinstance(prompts[0], str):
        ids = processing(text=prompts)["input_ids"]
    else:
        ids = processing.apply_chat_template(
            conversation=prompts,
            tools=getattr(trainer, "tools", None) or None,
            chat_template=getattr(trainer, "chat_template", None),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **(getattr(trainer, "chat_template_kwargs", None) or {}),
        )["input_ids"]
    return max(map(len, ids))


def sampled_batch(trainer: Any, asked: Asked) -> dict[str, Any]:
    """A micro-batch of the most tokens that the trainer's loss can get, with the values
    that the sampler gives it: rows x prompt tokens, rows x completion tokens."""
    rows = trainer.args.per_device_train_batch_size
    prompt, completion = (
        _padded(trainer, n) for n in (asked.prompt_tokens, asked.new_tokens)
    )
    batch: dict[str, Any] = {
        "prompt_ids": torch.ones(rows, prompt, dtype=torch.int64),
        "prompt_mask": torch.ones(rows, prompt, dtype=torch.int64),
        "completion_ids": torch.ones(rows, completion, dtype=torch.int64),
        "completion_mask": torch.ones(rows, completion, dtype=torch.int64),
        "advantages": torch.ones(rows),
        "num_items_in_batch": torch.tensor(rows * completion),
    }
    # prompts differ in length, for which models build a mask
    batch["prompt_mask"][0, 0] = 0
    if trainer.args.gradient_accumulation_steps % _micro_batches(trainer):
        batch["old_per_token_logps"] = torch.zeros(rows, completion)
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        whole = str(trainer.vllm_importance_sampling_mode).startswith("sequence")
        batch["old_per_token_logps"] = torch.zeros(rows, completion)
        batch["importance_sampling_ratio"] = torch.ones(
            rows, 1 if whole else completion
        )
    if trainer.beta != 0.0:
        batch["ref_per_token_logps"] = torch.zeros(rows, completion)
    return batch


def _micro_batches(trainer: Any) -> int:
    """From one generation to the next."""
    return int(trainer.args.steps_per_generation * trainer.num_iterations)


def _padded(trainer: Any, tokens: int) -> int:
    multiple = getattr(trainer, "pad_to_multiple_of", None) or 1
    return -(-tokens // multiple) * multiple


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters into which adapters are merged together, or one of which nothing is.

    Attributes:
        layers: Of adapters, in the order of their modules.
        is_shared: Layers that are apart in the model share a weight.
    """

    params: tuple[nn.Parameter, ...]
    layers: tuple[Any, ...] = ()
    is_shared: bool = False

    @property
    def visiting_bytes(self) -> int:
        """Device bytes while it is there, with what merging makes: the product of two
        small matrices, and the same scaled."""
        widest = max(param.itemsize for param in self.params)
        product = widest * max(param.numel() for param in self.params)
        return sum(p.nbytes for p in self.params) + 2 * product * bool(self.layers)


def units_of(model: nn.Module) -> list[Unit]:
    """Divide the parameters of a model by what has to be on the device at once."""
    tops: dict[nn.Parameter, list[nn.Module]] = {}
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer) and module not in inside:
            inside.update(module.modules())
            own = [*module.parameters()]
            sharing = {id(tops[p]): tops[p] for p in own if p in tops}
            top = [*(m for each in sharing.values() for m in each), module]
            tops.update((p, top) for m in top for p in m.parameters())
    units = []
    for top in {id(each): each for each in tops.values()}.values():
        params = dict.fromkeys(p for m in top for p in m.parameters())
        layers = (m for t in top for m in t.modules() if isinstance(m, BaseTunerLayer))
        units.append(Unit(tuple(params), tuple(layers), len(top) > 1))
    return units + [Unit((p,)) for p in model.parameters() if p not in tops]


def served_by(trainer: Any) -> Served | None:
    """Describe what a trainer sends to a server that answers; None where the model does."""
    if not trainer.use_vllm:
        return None
    every, num_steps = _micro_batches(trainer), trainer.args.gradient_accumulation_steps
    model, units = trainer.model, units_of(trainer.model)
    # as TRL does
    aside = "original_module", getattr(model, "prefix", "original_module")
    sent = (p for n, p in model.named_parameters() if not any(a in n for a in aside))
    return Served(
        sum(param.nbytes for param in sent),
        max(unit.visiting_bytes for unit in units),
        every % num_steps != 0,
        max(every / num_steps, 1.0),
        any(unit.layers for unit in units),
    )


_TRACED: dict[Any, Generation] = {}


@dataclass(frozen=True)
class Asked:
    """Sequences that a trainer has sampled between two steps, by a rank.

    Attributes:
        rows: Each time.
        prompt_tokens, new_tokens: Of each, at most.
        amid_step: Whether that may be between two micro-batches of a step.
        steps: Optimizer steps from one time to the next; 0 for any time.
    """

    rows: int
    prompt_tokens: int
    new_tokens: int
    amid_step: bool = False
    steps: float = 0.0

    def traced(
        self, model: nn.Module, device_type: str, autocast: torch.dtype | None
    ) -> Generation:
        """Trace a wave of a model on the meta device; once of equal models, because a dry
        run asks for each change of a YAML.

        Raises:
            TraceError: It cannot be run without weights.
        """
        shapes = ((n, p.shape, p.dtype) for n, p in model.named_parameters())
        key = self, device_type, autocast, type(model), tuple(shapes)
        if key not in _TRACED:
            _TRACED[key] = self._traced(model, device_type, autocast)
        return _TRACED[key]

    def _traced(
        self, model: nn.Module, device_type: str, autocast: torch.dtype | None
    ) -> Generation:
        trace = partial(trace_loss, model, device_type, autocast=autocast, skips=False)
        return trace_generation(
            lambda run: trace(run).trace, partial(_fed, model, self.rows), **vars(self)
        )


def asked_of(
    trainer: Any, dataset: Iterable[Mapping[str, Any]], length: int | None
) -> Asked:
    """Read what a GRPO trainer samples each time; rows are of `length` tokens where data
    are not there.

    Raises:
        ConfigError: Answers have no longest length.
    """
    args, num_steps = trainer.args, trainer.args.gradient_accumulation_steps
    every, new_tokens = _micro_batches(trainer), trainer.max_completion_length
    if new_tokens is None:
        raise ConfigError(
            "trl.max_completion_length: it is not set, and Axolotl then gives TRL no limit, "
            "so that nobody knows how much memory answers take. Set it, for example to 256."
        )
    if length is not None:
        prompt_tokens = max(1, length - new_tokens)
    else:
        prompt_tokens = longest_prompt(trainer, dataset)
    return Asked(
        args.per_device_train_batch_size * args.steps_per_generation,
        prompt_tokens,
        new_tokens,
        every % num_steps != 0,
        every / num_steps,
    )


def _keeps_logits(model: Any) -> bool:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "logits_to_keep" in inspect.signature(base.forward).parameters


def _fed(model: Any, rows: int, tokens: int, cache: Any) -> tuple[Any, Tensor]:
    """One forward of a wave as `generate` makes it, on the meta device."""
    before = 0 if cache is None else int(cache.get_seq_length())
    ids = torch.ones(rows, tokens, dtype=torch.int64)
    mask = torch.ones(rows, before + tokens, dtype=torch.int64)
    # prompts differ in length
    mask[0, 0] = 0
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    given = {name: value.to("meta") for name, value in given.items()}
    if _keeps_logits(model):
        given["logits_to_keep"] = 1
    out = model(**given, past_key_values=cache, use_cache=True)
    return out.past_key_values, out.logits


def trace_generation(
    trace: Callable[[Callable[[], Tensor]], Trace],
    forward: Callable[[int, Any], tuple[Any, Tensor]],
    rows: int,
    prompt_tokens: int,
    new_tokens: int,
    amid_step: bool = False,
    steps: float = 1.0,
) -> Generation:
    """Run a prefill and the last decoding step of a wave without weights.

    Args:
        trace: Traces a forward and backward of the model, each block as it comes.
        forward: Feeds each of `rows` so many tokens, after the cache that it gets, or None
            for an empty one; returns the cache and the logits of the last ones.
        rows: Sequences of a rank.
        prompt_tokens: Of each, at most.
        new_tokens: Sampled for each, at most.
        amid_step: See `Generation`; so is `steps`.

    Raises:
        TraceError: It cannot be run without weights.
    """
    kept: list[tuple[Any, Tensor]] = []

    def fed(tokens: int, cache: Any) -> Trace:
        def run() -> Tensor:
            with torch.no_grad():
                kept.append(forward(tokens, cache))
            return torch.zeros((), device="meta", requires_grad=True) * 1

        return trace(run)

    prefill = fed(prompt_tokens, None)
    fed(prompt_tokens + new_tokens - 1, None)
    cache, logits = kept[-1]
    layers = getattr(cache, "layers", ())
    moves = bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
    decode = fed(1, cache)
    sampled = SAMPLED_BYTES * rows * logits.shape[-1]
    sampled += TOKEN_BYTES * rows * (prompt_tokens + new_tokens)
    # what a block has is still there while it is copied to what is longer
    grown, prompts = _kept_bytes(decode), _kept_bytes(prefill)
    num_blocks = max(len(decode.blocks), 1)
    decoding = inference_bytes(decode) + grown // num_blocks
    prefilling = inference_bytes(prefill)
    highest = max(prefilling, decoding) + sampled
    # of a cache on the host: two layers come while one is joined, prompts of three leave
    away = max(
        decoding - grown + 2 * grown // num_blocks,
        prefilling - prompts + 4 * prompts // num_blocks,
    )
    return Generation(
        rows,
        prompt_tokens,
        new_tokens,
        row_bytes=-(-highest // rows),
        cache_bytes=-(-grown // rows),
        prefill=_work(prefill),
        decode=_work(decode),
        away_bytes=-(-(away + sampled) // rows) if moves else 0,
        amid_step=amid_step,
        steps=steps,
    )


def _kept_bytes(trace: Trace) -> int:
    """Bytes that a forward has made and that are there at its end: a cache."""
    begun = next(i for i, s in enumerate(trace.segments) if s.backward)
    return sum(each.nbytes for each in trace.lifetimes if each.forgotten >= begun)


def _work(trace: Trace) -> tuple[Work, ...]:
    """Work of each block and last of what is outside of them."""
    works = [Work()] * (len(trace.blocks) + 1)
    for segment in trace.segments:
        works[-1 if segment.block is None else segment.block] += segment.work
    return tuple(works)
