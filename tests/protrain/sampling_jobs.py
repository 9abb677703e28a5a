"""What tests of sampling run in forks, on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from service_jobs import create, service, step

from axolotl.integrations.protrain.service.adapters import folder_of
from axolotl.integrations.protrain.service.engine import AdapterService
from axolotl.integrations.protrain.service.sampling import SamplingParams

PROMPTS = [[5, 9, 40], [7] * 11, [100, 3, 250, 17, 8, 61, 90]]
GREEDY = SamplingParams(temperature=0, max_tokens=20, stop=[])


def trained(of: AdapterService, name: str, steps: int = 2) -> None:
    """An adapter that differs from the base."""
    create(of, name)
    for number in range(steps):
        for asked in step(of, name, number):
            asked.result()


def session_of(of: AdapterService, model: str, name: str) -> str:
    """A sampling session with an adapter as it is now."""
    return of.save_session(model, name).result().session


def all_of(of: AdapterService, session: str, params: Any, **more: Any) -> list[Any]:
    """Answers to all prompts, which wait for one another's wave."""
    asked = [of.sampler.sample(session, one, params, **more) for one in PROMPTS]
    return [one.result() for one in asked]


def as_generate(path: Path) -> dict[str, Any]:
    """Greedy tokens of the service, all rows at once, and of transformers and PEFT from
    the export, of an adapter and of the base alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    found: dict[str, Any] = {}
    with service(path) as served:
        trained(served, "c")
        save = served.save("c", "end", whole=False).result()
        folder = folder_of(served.folder, save)
        for name, from_path in (("adapter", save), ("base", None)):
            session = served.sessions.make(name, from_path).name
            # together in a wave: a request that waits holds them up
            answers = all_of(served, session, GREEDY)
            found[name] = [a.samples[0].tokens.tolist() for a in answers]
    base = yaml.safe_load(path.read_text())["base_model"]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    def generated(model: Any) -> list[list[int]]:
        longest = max(map(len, PROMPTS))
        tokens = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
        out = model.generate(
            input_ids=tokens,
            attention_mask=mask,
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
        )
        return out[:, longest:].tolist()

    found["plain base"] = generated(plain)
    found["plain adapter"] = generated(PeftModel.from_pretrained(plain, folder))
    return found
