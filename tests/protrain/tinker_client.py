"""An unmodified `tinker` client, in a process that has it: python tinker_client.py BASE.

Trains an adapter for two steps, saves it, goes on for one step in it and in a new model
that begins as what was saved, and prints what came out as JSON.
"""

from __future__ import annotations

import json
import random
import sys
from functools import partial

from tinker_rows import drawn_rows


def main(base: str) -> None:
    import tinker
    from tinker import types

    data = partial(drawn_rows, random.Random(5))

    adam = types.AdamParams(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=1.0)
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=base, rank=4, seed=3)
    losses = []
    for _ in range(2):
        # as cookbooks do: both are on their way before the first is answered
        passed = client.forward_backward(data(), "cross_entropy")
        stepped = client.optim_step(adam)
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    path = client.save_state("two").result().path
    again = service.create_training_client_from_state_with_optimizer(path)
    again = again.result() if hasattr(again, "result") else again
    last, ends = data(), []
    for one in (client, again, client):
        if ends[1:]:
            # a model may load at any time; this one is a step ahead
            client.load_state_with_optimizer(path).result()
        one.forward_backward(last, "cross_entropy").result()
        one.optim_step(adam).result()
        out = one.forward(last, "cross_entropy").result()
        ends.append([record["logprobs"].tolist() for record in out.loss_fn_outputs])
    old = [
        types.Datum(
            model_input=datum.model_input,
            loss_fn_inputs={
                "target_tokens": datum.loss_fn_inputs["target_tokens"],
                "logprobs": logprobs,
                "advantages": [1.0] * len(logprobs),
            },
        )
        for datum, logprobs in zip(last, ends[0], strict=True)
    ]
    tokens = sum(len(logprobs) for logprobs in ends[0])
    for loss in ("importance_sampling", "ppo"):
        # nothing has changed since: every ratio is 1
        found = client.forward_backward(old, loss).result().metrics["loss:sum"]
        losses.append(found / tokens)
    sampler = client.save_weights_for_sampler("end").result().path
    wrong = ""
    try:
        client.forward_backward(
            [
                types.Datum(
                    model_input=types.ModelInput.from_ints([999]),
                    loss_fn_inputs={"target_tokens": [1], "weights": [1.0]},
                )
            ],
            "cross_entropy",
        ).result()
    except Exception as error:
        wrong = str(error)
    client.optim_step(adam).result()
    rank = client.get_info().lora_rank
    told = {"losses": losses, "path": path, "sampler": sampler, "ends": ends}
    print(json.dumps({**told, "wrong": wrong, "rank": rank}))


if __name__ == "__main__":
    main(sys.argv[1])
