"""An unmodified `tinker` client, in a process that has it: python tinker_full.py BASE.

Trains all of a base for two steps, saves it, goes on, goes back and goes on alike, samples,
and prints what came out as JSON.
"""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from typing import Any

from tinker_rows import drawn_rows


def main(base: str) -> None:
    import tinker
    from tinker import types

    data = partial(drawn_rows, random.Random(5))

    def end(of: Any) -> list[Any]:
        of.forward_backward(last, "cross_entropy").result()
        of.optim_step(adam).result()
        out = of.forward(last, "cross_entropy").result()
        return [record["logprobs"].tolist() for record in out.loss_fn_outputs]

    def refused(act: Any) -> str:
        try:
            act()
        except Exception as error:
            return str(error)
        return ""

    adam = types.AdamParams(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=1.0)
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=base, rank=0)
    losses, same = [], data()
    for _ in range(2):
        passed = client.forward_backward(same, "cross_entropy")
        stepped = client.optim_step(adam)
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    path, last = client.save_state("two").result().path, data()
    told: dict[str, Any] = {"losses": losses, "ends": [end(client)]}
    client.load_state_with_optimizer(path).result()
    told["ends"].append(end(client))
    params = types.SamplingParams(max_tokens=5, temperature=0.0)
    sampler = client.save_weights_and_get_sampling_client()

    def sample() -> Any:
        prompt = types.ModelInput.from_ints([5, 9, 40])
        return sampler.sample(prompt, 1, params).result()

    told["sampled"] = len(sample().sequences[0].tokens)
    client.optim_step(adam)
    client.forward_backward(last, "cross_entropy").result()
    client.optim_step(adam).result()
    told["stale"] = refused(sample)
    second = service.create_lora_training_client(base_model=base, rank=0)
    told["second"] = refused(lambda: second.get_info())
    info = client.get_info()
    told["lora"] = [info.is_lora, info.lora_rank]
    client.load_state_with_optimizer(path).result()
    print(json.dumps({**told, "again": end(client)}))


if __name__ == "__main__":
    main(sys.argv[1])
