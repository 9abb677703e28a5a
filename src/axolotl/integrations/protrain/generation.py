"""Answers that are generated while training: TRL's GRPO trainers, and all who call
`generate` of a model that trains.

Such a trainer makes its batches itself: it samples answers to prompts, has them judged,
and computes losses of what came out. Its largest micro-batch is a prompt of the data, the
longest, and `max_completion_length` tokens.
"""

from __future__ import annotations

import gc
import inspect
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .core.engine.device import is_shortage
from .core.engine.ranks import Ranks
from .core.engine.session import Session
from .core.planner.generation import GenerationPlan, trace_generation
from .core.planner.job import trace_loss
from .core.types import Generation
from .report.run import WATCHED_STEPS, RunReport

if TYPE_CHECKING:
    from transformers import Trainer

_TOKENISED = 64
"""Of the prompts of the data, the longest as text, of which one has the most tokens."""


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
    prompts = [row["prompt"] for row in dataset]
    prompts.sort(key=lambda prompt: len(str(prompt)), reverse=True)
    ids = trainer._tokenize_prompts(prompts[:_TOKENISED])[0]
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
    if trainer.beta != 0.0:
        batch["ref_per_token_logps"] = torch.zeros(rows, completion)
    return batch


def _micro_batches(trainer: Any) -> int:
    """From one generation to the next."""
    return int(trainer.args.steps_per_generation * trainer.num_iterations)


def _padded(trainer: Any, tokens: int) -> int:
    multiple = getattr(trainer, "pad_to_multiple_of", None) or 1
    return -(-tokens // multiple) * multiple


_TRACED: dict[Any, Generation] = {}


@dataclass(frozen=True)
class Asked:
    """Sequences that a trainer has sampled between two steps, by a rank.

    Attributes:
        rows: Each time.
        prompt_tokens, new_tokens: Of each, at most.
        amid_step: Whether that may be between two micro-batches of a step.
        steps: Optimizer steps from one time to the next.
    """

    rows: int
    prompt_tokens: int
    new_tokens: int
    amid_step: bool
    steps: float

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
    are not there."""
    args, num_steps = trainer.args, trainer.args.gradient_accumulation_steps
    every, new_tokens = _micro_batches(trainer), trainer.max_completion_length
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


class Waves:
    """Lets `generate` of a model that trains sample as many sequences at once as the
    device has room for, one wave after the other.

    # Note [Waves]

    A wave is a call of the plain `generate` with a part of the rows, on the same model and
    with the random numbers that follow: its tokens are those of that call without paging.
    What a plan holds on the device is held around all of them. A wave for which there is
    no room is sampled again in halves, from the random numbers it began with. Several
    ranks do not halve: each of them would have another number of waves.

    Args:
        session: Of the model.
        report: Gets what was sampled.
        ranks: Who trains together.
        log: Prints a line.
    """

    def __init__(
        self, session: Session, report: RunReport, ranks: Ranks, log: Any
    ) -> None:
        self._session, self._report = session, report
        self._ranks, self._log = ranks, log
        self._planned: GenerationPlan | None = None

    @contextmanager
    def around(self, model: Any) -> Iterator[None]:
        """Inside, `generate` of the model samples in waves."""
        planned = self._report.forecast.generation
        if planned is None:
            yield
            return
        self._held = planned.held
        if planned is not self._planned:
            self._planned, self._rows = planned, planned.rows
        with patch.object(model, "generate", partial(self._generate, model.generate)):
            yield

    def _generate(self, plain: Callable[..., Any], *args: Any, **given: Any) -> Any:
        session, seen = self._session, self._report.generated
        if session.plan.shards > 1:
            # each rank runs as many forwards: a fetch is a gather
            given["synced_gpus"] = True
        started = time.perf_counter()
        with ExitStack() as stack:
            if seen.phases < WATCHED_STEPS:
                stack.enter_context(session.watch())
                session.device.restart_peak()
            stack.enter_context(session.holding(self._held))
            output = self._in_waves(partial(plain, *args), given)
            if seen.phases < WATCHED_STEPS:
                peak = session.device.peak_since()
                seen.device_bytes = max(seen.device_bytes, peak)
        seen.seconds += time.perf_counter() - started
        seen.phases += 1
        return output

    def _in_waves(self, plain: Callable[..., Any], given: dict[str, Any]) -> Any:
        total, seen = _rows_in(given), self._report.generated
        if total is None:
            # what has no rows is sampled as it is
            seen.waves += 1
            return plain(**given)
        made: list[Tensor] = []
        first = 0
        while first < total:
            last = min(first + self._rows, total)
            wave = {
                name: _cut(value, total, first, last) for name, value in given.items()
            }
            output = self._attempt(partial(plain, **wave), last - first)
            if output is None:
                continue
            made.append(output)
            seen.waves, seen.sequences = seen.waves + 1, seen.sequences + last - first
            prompt = given["input_ids"].shape[1]
            seen.tokens += output.shape[0] * (output.shape[1] - prompt)
            first = last
        longest = max(output.shape[1] for output in made)
        filler = _pad_token(given)
        return torch.cat(
            [pad(o, (0, longest - o.shape[1]), value=filler) for o in made]
        )

    def _attempt(self, wave: Callable[[], Any], rows: int) -> Any:
        """Sample a wave; None where there is no room, and the next one is half of it."""
        device = self._session.device.torch_device
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        try:
            return wave()
        except RuntimeError as error:
            alone = self._ranks.world.size == 1
            if not is_shortage(error) or rows == 1 or not alone:
                raise
            traceback.clear_frames(error.__traceback__)
        gc.collect()
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.set_rng_state(states[1], device)
        self._rows = -(-rows // 2)
        line = (
            f"No room for {rows} sequences at once; from here on {self._rows} are "
            "generated together."
        )
        self._report.notes.append(line)
        self._log.warning(f"ProTrain: {line}")
        return None


def _rows_in(given: Mapping[str, Any]) -> int | None:
    """Rows of what `generate` gets; None where it cannot be cut by rows."""
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or given.get("return_dict_in_generate"):
        return None
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    rows = ids.shape[0]
    return rows if all(t.ndim and t.shape[0] == rows for t in tensors) else None


def _cut(value: Any, total: int, first: int, last: int) -> Any:
    return (
        value[first:last]
        if isinstance(value, Tensor) and last - first < total
        else value
    )


def _pad_token(given: Mapping[str, Any]) -> int:
    token = getattr(given.get("generation_config"), "pad_token_id", None)
    return int(given.get("pad_token_id", token) or 0)
