"""An unmodified `tinker` client that samples, in a process that has it: python
tinker_sampling.py BASE.

A loop of reinforcement learning on a toy task, what a client may ask about samples and
prompts, and requests that cannot be; prints what came out as JSON.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

PROMPT = [5, 9, 40]


def main(base: str) -> None:
    import tinker
    from tinker import types

    service = tinker.ServiceClient()
    trainer = service.create_lora_training_client(base_model=base, rank=8, seed=3)
    prompt = types.ModelInput.from_ints(PROMPT)
    told: dict[str, Any] = {"rewards": [], "ratio": 0.0}
    first = None
    for step in range(12):
        sampler = trainer.save_weights_and_get_sampling_client()
        sampler = sampler.result() if hasattr(sampler, "result") else sampler
        first = first or sampler
        params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=step, stop=[])
        answer = sampler.sample(prompt, 32, params).result()
        # one more for each token of the upper half
        rewards = [sum(t >= 144 for t in s.tokens) / 6 for s in answer.sequences]
        mean = sum(rewards) / len(rewards)
        told["rewards"].append(mean)
        data = []
        for sequence, reward in zip(answer.sequences, rewards, strict=True):
            tokens, length = sequence.tokens, len(PROMPT) - 1
            inputs = {
                "target_tokens": [*PROMPT[1:], *tokens],
                "logprobs": [0.0] * length + sequence.logprobs,
                "advantages": [0.0] * length + [reward - mean] * len(tokens),
            }
            given = types.ModelInput.from_ints([*PROMPT, *tokens[:-1]])
            data.append(types.Datum(model_input=given, loss_fn_inputs=inputs))
        passed = trainer.forward_backward(data, "importance_sampling").result()
        again = [o["logprobs"].tolist()[length:] for o in passed.loss_fn_outputs]
        apart = [
            abs(a - b)
            for one, s in zip(again, answer.sequences, strict=True)
            for a, b in zip(one, s.logprobs, strict=True)
        ]
        told["ratio"] = max(told["ratio"], max(apart))
        trainer.optim_step(types.AdamParams(learning_rate=0.02)).result()

    # the first sampler has the weights that it was made with
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=0, stop=[])
    old = first.sample(prompt, 32, params).result()
    kept = sum(sum(t >= 144 for t in s.tokens) / 6 for s in old.sequences) / 32
    told["kept"] = kept

    path = trainer.save_weights_for_sampler("end").result().path
    named = service.create_sampling_client(model_path=path)
    named = named.result() if hasattr(named, "result") else named
    bare = service.create_sampling_client(base_model=base)
    bare = bare.result() if hasattr(bare, "result") else bare
    greedy = types.SamplingParams(max_tokens=5, temperature=0.0, stop=[])
    both = [one.sample(prompt, 1, greedy).result() for one in (named, bare)]
    told["greedy"] = [one.sequences[0].tokens for one in both]

    row = types.ModelInput.from_ints([*PROMPT, 100, 200])
    told["logprobs"] = named.compute_logprobs(row).result()
    out = trainer.forward(
        [
            types.Datum(
                model_input=types.ModelInput.from_ints([*PROMPT, 100]),
                loss_fn_inputs={
                    "target_tokens": [*PROMPT[1:], 100, 200],
                    "weights": [1.0] * 4,
                },
            )
        ],
        "cross_entropy",
    ).result()
    told["forward"] = out.loss_fn_outputs[0]["logprobs"].tolist()
    scored = named.sample(
        row, 2, greedy, include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    told["scored"] = scored.prompt_logprobs
    told["top"] = scored.topk_prompt_logprobs
    told["alike"] = scored.sequences[0].tokens == scored.sequences[1].tokens
    if hasattr(scored, "target_prompt_logprobs"):
        told["newer"] = newer(types, named, row, greedy)
    for what, wrong in {
        "long": dict(prompt=types.ModelInput.from_ints([5] * 500), num_samples=1),
        "empty": dict(prompt=types.ModelInput.from_ints([]), num_samples=1),
        "token": dict(prompt=types.ModelInput.from_ints([5, 999]), num_samples=1),
    }.items():
        try:
            named.sample(sampling_params=greedy, **wrong).result()
        except Exception as error:
            told[what] = str(error)
    print(json.dumps(told))


def newer(types: Any, sampler: Any, row: Any, params: Any) -> dict[str, Any]:
    """What clients may ask since 0.25."""
    import torch

    ids = torch.full((4, 2), -1, dtype=torch.int64)
    ids[3, 0], ids[1, 1] = 200, 40
    found: dict[str, Any] = {}
    for layout in ("from_torch", "from_torch_sparse"):
        more = {"pad_value": -1} if layout == "from_torch_sparse" else {}
        target = getattr(types.TensorData, layout)(ids, **more)
        answer = sampler.sample(row, 1, params, target_prompt_logprobs=target).result()
        told = answer.target_prompt_logprobs
        found[layout] = [*map(float, told.to_torch().to_dense().flatten())]
    top = sampler.sample(row, 1, params, topk_sample_logprobs=2).result()
    found["top"] = top.sequences[0].topk_logprobs
    last = sampler.compute_logprobs(row, prompt_logprobs_last_n=2).result()
    found["last"] = [one is None or math.isnan(one) for one in last]
    handle = sampler.get_sampler_handle()
    again = type(sampler).from_sampler_handle(handle)
    # of another number than the first client's request
    found["handed on"] = again.sample(row, 1, params).result().sequences[0].tokens
    found["ids"] = top.sequences[0].sequence_id
    return found


if __name__ == "__main__":
    main(sys.argv[1])
