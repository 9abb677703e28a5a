"""An unmodified `tinker` client that distils, in a process that has it: python
tinker_distilling.py BASE.

A teacher learns a few rows by heart; a student learns from the likeliest tokens that the
teacher tells of them. Prints the data, the student's beginning and end and how far it was
from the teacher after each step as JSON.
"""

from __future__ import annotations

import json
import math
import random
import sys
from typing import Any

MOST = 5


def main(base: str) -> None:
    import tinker
    import torch
    from tinker import types

    chance = random.Random(5)
    rows = [chance.choices(range(3, 288), k=n) for n in (12, 40, 9, 23)]
    service = tinker.ServiceClient()

    def datum(tokens: list[int], targets: Any, weights: Any) -> Any:
        inputs = {"target_tokens": targets, "weights": weights}
        given = types.ModelInput.from_ints(tokens[:-1])
        return types.Datum(model_input=given, loss_fn_inputs=inputs)

    adam = types.AdamParams(
        learning_rate=0.01, weight_decay=0.1, grad_clip_norm=1.0, beta2=0.95, eps=1e-12
    )
    teacher = service.create_lora_training_client(base_model=base, rank=8, seed=9)
    for _ in range(6):
        data = [datum(row, row[1:], [1 / len(row)] * (len(row) - 1)) for row in rows]
        teacher.forward_backward(data, "cross_entropy").result()
        teacher.optim_step(adam).result()
    asked = teacher.save_weights_and_get_sampling_client()
    asked = asked.result() if hasattr(asked, "result") else asked

    data, entropy, tables = [], 0.0, []
    for number, row in enumerate(rows):
        # of unlike numbers of candidates, and the first tokens of a prompt without any:
        # clients send such tensors as CSR
        most, skipped = MOST - number % 2, 30 * (number == 1)
        greedy = types.SamplingParams(max_tokens=1, temperature=0.0)
        told = asked.sample(
            types.ModelInput.from_ints(row),
            1,
            greedy,
            include_prompt_logprobs=True,
            topk_prompt_logprobs=most,
        ).result()
        targets = torch.zeros(len(row) - 1, most, dtype=torch.int64)
        weights = torch.zeros(len(row) - 1, most)
        for place, best in enumerate(told.topk_prompt_logprobs[1:]):
            if place < skipped:
                continue
            targets[place] = torch.tensor([token for token, _ in best])
            weights[place] = torch.tensor([logprob for _, logprob in best]).softmax(-1)
        weights /= len(row)
        entropy -= float((weights * weights.clamp(min=1e-30).log()).sum())
        entropy -= float(weights.sum()) * math.log(len(row))
        data.append(datum(row, targets, weights))
        tables.append([row[:-1], targets.tolist(), weights.tolist()])
    sparse = data[1].loss_fn_inputs["target_tokens"].sparse_crow_indices is not None

    student = service.create_lora_training_client(base_model=base, rank=8, seed=3)
    begin = student.save_weights_for_sampler("begin").result().path
    apart, losses, shapes = [], [], []
    for _ in range(16):
        passed = student.forward_backward(data, "cross_entropy").result()
        student.optim_step(adam).result()
        losses.append(passed.metrics["loss:sum"])
        apart.append(losses[-1] - entropy)
        outputs = [out["logprobs"].to_torch() for out in passed.loss_fn_outputs]
        shapes = [[*out.shape] for out in outputs]
    end = student.save_weights_for_sampler("end").result().path
    told = {"rows": tables, "begin": begin, "end": end, "losses": losses}
    print(json.dumps({**told, "apart": apart, "shapes": shapes, "sparse": sparse}))


if __name__ == "__main__":
    main(sys.argv[1])
