"""An unmodified `openai` client, in a process that has it: python openai_client.py BASE
MODEL, where MODEL is a path of saved weights. Prints what came out as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any


def main(base: str, path: str) -> None:
    import openai

    client = openai.OpenAI()
    told: dict[str, Any] = {"models": [one.id for one in client.models.list()]}
    told["model"] = client.models.retrieve(path).id
    common: dict[str, Any] = {"model": path, "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(prompt="Ab c", logprobs=2, **common)
    told["text"] = whole.choices[0].text
    told["reason"] = whole.choices[0].finish_reason
    told["logprobs"] = len(whole.choices[0].logprobs.token_logprobs)
    told["usage"] = whole.usage.total_tokens
    parts = [*client.completions.create(prompt="Ab c", stream=True, **common)]
    told["parts"] = len(parts)
    told["streamed"] = "".join(part.choices[0].text for part in parts)
    told["ended"] = parts[-1].choices[0].finish_reason

    # what the text above has from its fourth letter on
    stop = told["text"][3:5]
    short = client.completions.create(prompt="Ab c", stop=[stop], **common)
    told["stopped"] = [short.choices[0].text, short.choices[0].finish_reason, stop]
    some = client.completions.create(prompt="Ab c", stop=stop, stream=True, **common)
    told["streamed short"] = "".join(part.choices[0].text for part in some)
    many = client.completions.create(
        model=base, prompt=["x", "yz"], n=3, seed=5, max_tokens=4
    )
    told["many"] = [choice.index for choice in many.choices]
    again = client.completions.create(
        model=base, prompt=["x", "yz"], n=3, seed=5, max_tokens=4
    )
    told["again"] = [c.text for c in many.choices] == [c.text for c in again.choices]

    messages: Any = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(
        messages=messages, logprobs=True, top_logprobs=2, **common
    )
    told["chat"] = chat.choices[0].message.content
    told["chat top"] = len(chat.choices[0].logprobs.content[0].top_logprobs)
    stream = client.chat.completions.create(
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
        **common,
    )
    chunks = [*stream]
    told["chat streamed"] = "".join(
        chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
    )
    told["chat usage"] = chunks[-1].usage.completion_tokens
    for what, wrong in {
        "no model": {"model": "none", "prompt": "x"},
        "long": {"model": base, "prompt": "x" * 900},
        "penalty": {"model": base, "prompt": "x", "presence_penalty": 1},
        "empty": {"model": base, "prompt": []},
    }.items():
        try:
            client.completions.create(**wrong)
        except openai.APIStatusError as error:
            told[what] = [error.status_code, error.message]
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
