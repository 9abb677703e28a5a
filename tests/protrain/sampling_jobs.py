"""What tests of sampling run in forks, on tiny models."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch
import yaml
from service_jobs import ADAM, config, create, rows, service, step
from tiny_models import TOKENIZER, VOCABULARY

from axolotl.integrations.protrain.core.errors import ProTrainError
from axolotl.integrations.protrain.service import sessions
from axolotl.integrations.protrain.service.adapters import WEIGHTS, folder_of
from axolotl.integrations.protrain.service.answers import Asked, Sampled, Wanted
from axolotl.integrations.protrain.service.engine import AdapterService
from axolotl.integrations.protrain.service.losses import Datum
from axolotl.integrations.protrain.service.samples import TURN_STEPS
from axolotl.integrations.protrain.service.sampling import SamplingParams
from axolotl.integrations.protrain.service.text import Text, TextStream

PROMPTS = [[5, 9, 40], [7] * 11, [100, 3, 250, 17, 8, 61, 90], [33, 4], [260] * 5]
GREEDY = SamplingParams(temperature=0, max_tokens=20, stop=[])
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"


def config_of(root: Path, family: str, keys: Mapping[str, Any]) -> Path:
    """The YAML of a server, whose tokenizer knows how chats are written."""
    path = config(root, family, **keys)
    (root / TOKENIZER / "chat_template.jinja").write_text(TEMPLATE)
    return path


def trained(of: AdapterService, name: str, steps: int = 2) -> str:
    """An adapter that differs from the base."""
    create(of, name)
    for number in range(steps):
        for asked in step(of, name, number):
            asked.result()
    return name


def session_of(of: AdapterService, model: str, name: str) -> str:
    """A sampling session with an adapter as it is now."""
    return of.save_session(model, name).result().session


def base_of(of: AdapterService) -> str:
    return of.sessions.of_path(None).name


def held(of: AdapterService, asks: Callable[[], list[Any]]) -> list[Any]:
    """What is asked while a long request runs, so that it waits together."""
    model = f"b-held-{time.monotonic_ns()}"
    create(of, model)
    of.turns.answer(model, 0).result()
    running = of.forward_backward(model, rows(1, 60), forward_only=True)
    asked = asks()
    running.result()
    found = [one.result() for one in asked]
    of.unload(model)
    return found


def told(answer: Sampled) -> Any:
    """An answer as plain values."""
    return [(s.tokens.tolist(), s.logprobs.tolist(), s.reason) for s in answer.samples]


def refusal(act: Callable[[], Any]) -> str:
    """Why something is refused, at once or by its future; empty if it is not."""
    try:
        found = act()
        if hasattr(found, "exception"):
            return str(found.exception() or "")
    except (ProTrainError, ValueError) as error:
        return str(error)
    return ""


def as_generate(path: Path, name: str = "b") -> dict[str, Any]:
    """Greedy tokens of the service, all rows at once, and of transformers and PEFT from
    the export, each with the log-probabilities of its tokens. Not of rank 2: products so
    narrow are rounded by where their operands lie."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    found: dict[str, Any] = {}
    with service(path) as served:
        save = served.save(trained(served, name), "end", whole=False).result()
        folder = folder_of(served.folder, save)
        for what, saved in (("adapter", save), ("base", None)):
            made = served.sessions.make(what, saved).name
            sample = served.sampler.sample

            def ask(made: str = made, sample: Any = sample) -> list[Any]:
                return [sample(made, prompt, GREEDY) for prompt in PROMPTS]

            found[what] = [told(answer)[0][:2] for answer in held(served, ask)]
    base = yaml.safe_load(path.read_text())["base_model"]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    def generated(model: Any) -> list[tuple[list[int], list[float]]]:
        longest = max(map(len, PROMPTS))
        tokens = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
        mask = [[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS]
        out = model.generate(
            input_ids=tokens,
            attention_mask=torch.tensor(mask),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logprobs = torch.stack(out.logits, 1).log_softmax(-1)
        new = out.sequences[:, longest:]
        chosen = logprobs.gather(-1, new[..., None])[..., 0]
        return [*zip(new.tolist(), chosen.tolist(), strict=True)]

    found["plain base"] = generated(plain)
    found["plain adapter"] = generated(PeftModel.from_pretrained(plain, folder))
    return found


def waves(path: Path) -> dict[str, Any]:
    """Rows and chunks of the plan, and those of a wave of many rows: how many it had, which
    chunks were held, and what was sampled."""
    found: dict[str, Any] = {"rows": set(), "held": set()}
    with service(path) as served:
        plan = served.report.forecast.generation
        assert plan is not None
        found["plan"] = plan.rows, plan.held
        found["table"] = served.status()["plan"]
        holding = served.session.holding

        def hold(chunks: Any) -> Any:
            found["held"].add(chunks)
            return holding(chunks)

        def note(_: Any, args: Any) -> None:
            found["rows"].add(args[0].shape[0])

        head = served.session.model.get_output_embeddings()
        head.register_forward_pre_hook(note)
        params = SamplingParams(max_tokens=30, seed=1, stop=[])
        with patch.object(served.session, "holding", hold):
            made = base_of(served)
            answer = served.sampler.sample(made, [5] * 35, params, 70).result()
        found["samples"] = [a[0] for a in told(answer)]
    return found


def choices(path: Path) -> dict[str, Any]:
    """What seeds, temperatures, top-k and top-p come to."""
    found: dict[str, Any] = {}
    with service(path) as served:
        made = session_of(served, trained(served, "c"), "s")
        sample = served.sampler.sample
        warm = SamplingParams(max_tokens=12, seed=7, stop=[])

        def ask(params: SamplingParams, count: int = 1, **more: Any) -> Any:
            return sample(made, PROMPTS[0], params, count, **more).result()

        alone = told(ask(warm, 4))
        found["alike"] = len({tuple(tokens) for tokens, _, _ in alone})
        found["again"] = told(ask(warm, 4)) == alone

        def together() -> list[Any]:
            others = [sample(made, p, SamplingParams(max_tokens=9)) for p in PROMPTS]
            return [*others, sample(made, PROMPTS[0], warm, 4)]

        *_, shared = held(served, together)
        found["shared"] = [a[0] for a in told(shared)] == [a[0] for a in alone]
        unseeded = SamplingParams(max_tokens=12, stop=[])
        found["unseeded"] = told(ask(unseeded)) != told(ask(unseeded))
        greedy = told(ask(SamplingParams(temperature=0, max_tokens=12, stop=[])))
        for name, more in {
            "top_k": {"top_k": 1},
            "top_p": {"top_p": 1e-6},
            "cold": {"temperature": 1e-4},
        }.items():
            same = told(ask(SamplingParams(max_tokens=12, stop=[], seed=3, **more)))
            found[name] = same == greedy
        two = SamplingParams(max_tokens=12, stop=[], seed=3, top_k=2, temperature=5)
        tops = [s for s in ask(two, 8, num_top=2).samples]
        found["of two"] = all(
            bool((s.tokens[:, None] == s.top.tokens).any(-1).all()) for s in tops
        )
        found["both"] = {
            int(place) for s in tops for place in (s.tokens == s.top.tokens[:, 1])
        }
        # the model's own, whatever a token was drawn by
        data = [_datum(PROMPTS[0], s.tokens.tolist()) for s in tops]
        _, rows_ = served.forward_backward("c", data, forward_only=True).result()
        skipped = len(PROMPTS[0]) - 1
        apart = [
            float((row[skipped:] - s.logprobs).abs().max())
            for row, s in zip(rows_, tops, strict=True)
        ]
        found["apart"] = max(apart)
    return found


def _datum(prompt: list[int], tokens: list[int]) -> Datum:
    whole = torch.tensor([*prompt, *tokens])
    inputs = {"target_tokens": whole[1:], "weights": torch.ones(len(whole) - 1)}
    return Datum(whole[:-1], inputs)


def stopped(path: Path) -> dict[str, Any]:
    """Lengths and reasons of samples by what ends them."""
    found: dict[str, Any] = {}
    with service(path) as served:
        made, prompt = base_of(served), PROMPTS[0]
        sample = served.sampler.sample
        free = told(sample(made, prompt, GREEDY).result())[0][0]
        decode = served.sampler.text.text
        found["free"] = free

        def ask(stop: Any, most: int | None = 20, tokens: Any = prompt) -> Any:
            params = SamplingParams(temperature=0, max_tokens=most, stop=stop)
            answer = told(sample(made, tokens, params).result())[0]
            return len(answer[0]), answer[2]

        found["token"] = ask([free[4]]), free.index(free[4]) + 1
        found["sequence"] = ask([free[3:6]]), 6
        # two letters, which are a token each
        hot = {"temperature": 5.0, "max_tokens": 60}
        for seed in range(1000):
            warm = SamplingParams(seed=seed, stop=[], **hot)
            tokens = told(sample(made, prompt, warm).result())[0][0]
            words = [decode([token]) for token in tokens]
            pairs = [a + b for a, b in zip(words, words[1:], strict=False)]
            stop = next((p for p in pairs if p.isascii() and p.isalpha()), "")
            if len(stop) == 2:
                break
        params = SamplingParams(seed=seed, stop=["never", stop], **hot)
        answer = told(sample(made, prompt, params).result())[0]
        found["text"] = (len(answer[0]), answer[2]), pairs.index(stop) + 2
        found["most"] = ask([], 3)
        found["sequence_len"] = ask([], None), ask([], None, [5] * 64)
        # what the model says third is the end of a sequence
        ends = served.sampler.text
        with patch.object(ends, "ends", frozenset({free[2]})):
            found["end"], found["no end"] = ask(None), ask([])
            found["beside"] = ask(["never there"])
    return found


def scored(path: Path) -> dict[str, Any]:
    """Log-probabilities of prompts against those of a pass, and what else is told."""
    found: dict[str, Any] = {}
    with service(path) as served:
        made = session_of(served, trained(served, "c"), "s")
        prompts = [p * 3 for p in PROMPTS]
        data = [_datum(p[:1], p[1:]) for p in prompts]
        _, wanted = served.forward_backward("c", data, forward_only=True).result()
        one = SamplingParams(temperature=0, max_tokens=1, stop=[])
        many = SamplingParams(temperature=0, max_tokens=4, stop=[])
        for name, params in (("one", one), ("many", many)):

            def ask(params: SamplingParams = params) -> list[Any]:
                about = Asked(logprobs=True, num_top=3)
                ask = served.sampler.sample
                return [ask(made, p, params, 2, about=about) for p in prompts]

            answers = held(served, ask)
            found[name] = [
                a.prompt_logprobs[1:].equal(row)
                for a, row in zip(answers, wanted, strict=True)
            ]
            found[f"first {name}"] = [
                bool(a.prompt_logprobs[0].isnan()) for a in answers
            ]
            found[f"tokens {name}"] = [told(a)[0][0][0] for a in answers]
            # two samples of one prompt are read once, and alike
            found[f"twice {name}"] = [
                one[0] == two[0] for one, two in map(told, answers)
            ]
            tops = answers[0].prompt_top
            found[f"top {name}"] = list(tops.tokens.shape), int(tops.tokens[0].sum())
        lone = Asked(logprobs=True, num_top=2, wanted=Wanted(torch.zeros(0, 1).long()))
        answer = served.sampler.sample(made, [5], many, about=lone).result()
        found["one token"] = answer.prompt_logprobs.isnan().tolist()
        length = len(prompts[0])
        places = torch.full((length - 1, 2), -1)
        places[2, 1] = prompts[0][3]

        def logits(*_: Any) -> None:
            every = (t for t in gc.get_objects() if isinstance(t, torch.Tensor))
            counts[-1] = max(counts[-1], sum(t.shape == (VOCABULARY,) for t in every))

        counts = [0]
        served.sampler.sample(made, [5] * 9, many, show=logits).result()
        counts.append(0)
        reads = Asked(logprobs=True)
        served.sampler.sample(made, [5] * 9, many, about=reads, show=logits).result()
        found["logits"] = counts
        running = served.forward_backward("c", rows(1, 60), forward_only=True)
        before = served.turns.used_bytes
        asked = served.sampler.sample(made, [7] * 9, many, num_top=2)
        found["tops"] = served.turns.used_bytes - before
        found["prompt kept"] = "7, 7" in str(asked.asks)
        running.result()
        last = served.sampler.sample(
            made,
            prompts[0],
            one,
            about=Asked(logprobs=True, last_n=2, wanted=Wanted(places)),
        ).result()
        found["last"] = last.prompt_logprobs.isnan().sum().item() == length - 2
        values = last.wanted.values
        found["wanted"] = float(values[2, 1]) == float(wanted[0][2])
        found["others"] = int(values.count_nonzero())
    return found


def kept(path: Path) -> dict[str, Any]:
    """What sessions sample after their adapter was trained, replaced and unloaded, beside
    one of another adapter, in a host that has room for one."""
    found: dict[str, Any] = {}
    with service(path, adapter_bytes=1 << 19) as served:
        sample = served.sampler.sample
        trained(served, "c")
        own = session_of(served, "c", "own")
        saved = served.save("c", "end", whole=False).result()
        named = served.sessions.make("named", saved).name
        trained(served, "b")
        other = session_of(served, "b", "other")

        def both() -> list[Any]:
            each = (own, named, other, base_of(served))
            asked = [
                sample(name, prompt, GREEDY) for prompt in PROMPTS for name in each
            ]
            # who shares a wave, and so how sums are rounded, is a matter of time
            return [told(one.result())[0][0] for one in asked]

        before = both()
        found["apart"] = len({str(answer) for answer in before[:4]})
        for asked in step(served, "c", 5):
            asked.result()
        file = served.sessions.weights_of(served.sessions.of(own).key) / WEIGHTS
        weights = file.read_bytes()
        found["taken"] = refusal(lambda: served.save_session("c", own))
        found["not written"] = file.read_bytes() == weights
        found["no base"] = refusal(lambda: served.sessions.make(own, None))
        found["trained"] = both() == before
        served.save("c", "end", whole=False).result()
        found["replaced"] = both() == before
        newer = served.sessions.make("newer", saved).name
        fresh = told(sample(newer, PROMPTS[0], GREEDY).result())[0][0]
        found["newer"] = fresh != before[1]
        for name in "bc":
            served.unload(name)
        # models that need the room
        for number in range(4):
            create(served, f"b-{number}")
        served.turns.answer("b-3", 0).result()
        found["on the disk"] = sum(
            served.store.cached(served.sessions.of(name).key) is None
            for name in (own, named, other)
        )
        found["unloaded"] = both() == before
        found["trains"] = refusal(lambda: served.create_from("n", saved, True))
        found["without"] = refusal(lambda: served.create_from("o", saved, False))
    return found


def kept_plainly(path: Path) -> int | None:
    """Bytes that transformers keeps of the tokens of `aside`; None where it needs a GPU."""
    from transformers import AutoModelForCausalLM, DynamicCache

    base = yaml.safe_load(path.read_text())["base_model"]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    cache = DynamicCache(config=plain.config)
    read = len(PROMPTS[0]) + TURN_STEPS - 1
    try:
        with torch.no_grad():
            plain(torch.full((4, read), 5), past_key_values=cache, use_cache=True)
    except RuntimeError as error:
        # of Triton, where flash-linear-attention can be imported; else torch does it
        if "0 active drivers" not in str(error):
            raise
        return None
    parts = [part for layer in cache.layers for part in vars(layer).values()]
    for part in [*parts]:
        parts += part.values() if isinstance(part, dict) else ()
    return sum(p.nbytes for p in parts if isinstance(p, torch.Tensor))


def aside(path: Path) -> tuple[int, int] | None:
    """Bytes that are counted of a wave which waits on the host, and those of what
    transformers keeps of the same tokens; None where that needs a GPU."""
    used: list[int] = []
    if (kept := kept_plainly(path)) is None:
        return None
    with service(path) as served:
        made, params = base_of(served), SamplingParams(max_tokens=60, stop=[])
        served.create("d", 2)
        running = served.forward_backward("d", rows(1, 60), forward_only=True)
        asked = served.sampler.sample(made, PROMPTS[0], params, 4)
        between = served.forward_backward("d", rows(1, 1), forward_only=True)

        def note(_: Any) -> None:
            others = (running, asked, between)
            used.append(served.turns.used_bytes - sum(one.nbytes for one in others))

        between.add_done_callback(note)
        asked.result()
    (counted,) = used
    return counted, kept


def many_sessions(path: Path) -> dict[str, Any]:
    """What is left of sessions that nobody uses, and of one that somebody does."""
    found: dict[str, Any] = {}
    with service(path) as served, patch.object(sessions, "MOST_WEIGHTS", 4):
        sample = served.sampler.sample
        trained(served, "c")
        first = session_of(served, "c", "s0")
        busy = session_of(served, "c", "busy")
        asked = sample(busy, PROMPTS[0], SamplingParams(max_tokens=50, stop=[]), 200)
        for number in range(1, 9):
            session_of(served, "c", f"s{number}")
        found["busy"] = refusal(lambda: asked)
        found["first"] = refusal(lambda: sample(first, PROMPTS[0], GREEDY))
        found["last"] = refusal(lambda: sample("s7", PROMPTS[0], GREEDY))
        served.save("c", "now").result()
        own = served.folder / "_samplers/unnamed"
        found["folders"] = len([*own.glob("[!_]*")])
        # somebody has removed the weights: who waits is told, and no turn is left over
        for folder in own.glob("[!_]*"):
            (folder / WEIGHTS).unlink()
        waiting = [sample("s8", prompt, GREEDY) for prompt in PROMPTS]
        found["removed"] = [refusal(lambda one=one: one) for one in waiting]
        served.save("c", "then").result()
        found["left"] = served.sampler.counts()["waiting"]
        # one that was let go comes again under its name
        again = session_of(served, "c", "s0")
        found["again"] = refusal(lambda: sample(again, PROMPTS[0], GREEDY))
    found["closed"] = (served.folder / "_samplers").exists()
    return found


def turns(path: Path) -> dict[str, Any]:
    """How training and sampling share a device: tokens that were sampled between two
    requests of a training, requests that ran before a sample was answered, and whether
    either has other numbers than alone."""
    found: dict[str, Any] = {}
    with service(path) as served:
        sample = served.sampler.sample
        trained(served, "c")
        made, rest = session_of(served, "c", "s"), base_of(served)
        params = SamplingParams(max_tokens=50, seed=1, stop=[])
        alone = told(sample(made, PROMPTS[0], params, 100).result())
        create(served, "b-alone")
        losses = [step(served, "b-alone", n)[0].result()[0] for n in range(6)]

        create(served, "b")
        marks: list[int] = []
        waits: list[bool] = []

        def mark(_: Any) -> None:
            marks.append(served.sampler.counts()["tokens"])
            waits.append(not asked[0].done())

        first = served.sampler.counts()["tokens"]
        asked = [sample(made, PROMPTS[0], params, 100), sample(rest, [5], params, 100)]
        answers = [step(served, "b", n) for n in range(6)]
        for answer in (one for some in answers for one in some):
            answer.add_done_callback(mark)
        found["same losses"] = [some[0].result()[0] for some in answers] == losses
        found["same samples"] = told(asked[0].result()) == alone
        asked[1].result()
        gaps = [b - a for a, b in zip([first, *marks], marks, strict=False)]
        # two sets of weights sample, each for a turn of 32 tokens of all rows
        found["most"] = max(gaps), 2 * 32 * 64
        found["before"] = sum(waits)

        # where the host has no room for what goes aside, it is read again
        asked = [sample(made, PROMPTS[0], params, 100), sample(rest, [5], params, 100)]
        with patch.object(served.turns, "most_bytes", served.turns.used_bytes):
            again = told(asked[0].result())
            asked[1].result()
        found["same read again"] = [a[0] for a in again] == [a[0] for a in alone]
        found["left"] = served.turns.used_bytes < 1 << 20

        # the other way round: a line of training, and one sample
        done: list[bool] = []
        waiting = [served.optim_step("b", ADAM) for _ in range(200)]
        one = sample(made, PROMPTS[0], GREEDY)
        one.add_done_callback(lambda _: done.append(waiting[-1].done()))
        one.result()
        found["before the last"] = not done[0]
        waiting[-1].exception()
    return found


def short_of_memory(path: Path) -> dict[str, Any]:
    """Waves whose device has room for few rows, for one, and for none."""
    found: dict[str, Any] = {}
    with service(path) as served:
        made = session_of(served, trained(served, "c"), "s")
        sample = served.sampler.sample
        params = SamplingParams(max_tokens=30, seed=1, stop=[])
        wanted = told(sample(made, PROMPTS[0], params, 8).result())
        log_softmax, times = torch.Tensor.log_softmax, [1]

        def choosing(logits: torch.Tensor, *given: Any) -> torch.Tensor:
            if times[0]:
                times[0] -= 1
                raise torch.OutOfMemoryError("Tried to allocate 1024 bytes")
            return log_softmax(logits, *given)

        with patch.object(torch.Tensor, "log_softmax", choosing):
            answer = told(sample(made, PROMPTS[0], params, 8).result())
        found["choosing"] = [a[0] for a in answer] == [a[0] for a in wanted]

        def reading(_: Any, args: Any) -> None:
            # as a pass does, and no wave
            if args[0].shape[1] == 64 and (args[0][:, :5] == 260).all(-1).any():
                raise torch.OutOfMemoryError("Tried to allocate 1024 bytes")

        words = served.session.model.get_input_embeddings()
        handle = words.register_forward_pre_hook(reading)
        running = served.forward_backward("c", rows(1, 60), forward_only=True)
        about = Asked(logprobs=True)
        asked = [sample(made, p, GREEDY, about=about) for p in PROMPTS[3:]]
        asked.append(sample(made, PROMPTS[0], GREEDY))
        found["read"] = [refusal(lambda one=one: one) for one in asked]
        running.result()
        handle.remove()
        room = [0, 0]

        def fail(_: Any, args: Any) -> None:
            # rows that have read so much
            if args[0].shape[0] > room[0] and room[1] > 0:
                room[1] -= 1
                raise torch.OutOfMemoryError("Tried to allocate 1024 bytes")

        head, holding = served.session.model.get_output_embeddings(), []
        handle = head.register_forward_pre_hook(fail)
        plain = served.session.holding

        def hold(chunks: Any) -> Any:
            holding.append(bool(chunks))
            return plain(chunks)

        for name, most in (("few", 3), ("one", 1)):
            room[:] = most, 1000
            answer = sample(made, PROMPTS[0], params, 8)
            found[name] = [a[0] for a in told(answer.result())] == [
                a[0] for a in wanted
            ]
        room[:] = 0, 1000
        with patch.object(served.session, "holding", hold):
            found["none"] = refusal(lambda: sample(made, PROMPTS[0], params, 4))
        # what a row alone has no room beside is not held any longer
        found["held"] = [holding[0], holding[-1]]
        room[:] = 0, 0
        handle.remove()
        found["after"] = refusal(lambda: sample(made, PROMPTS[0], params, 4))
        found["a pass"] = refusal(lambda: step(served, "c", 9)[-1])

        key = served.sessions.of(made).key

        def lose(_: Any) -> None:
            # while the wave is aside, as where others need the room
            found["aside"] = served.turns.used_bytes
            served.store.drop_sampler(key)
            (served.sessions.weights_of(key) / WEIGHTS).unlink()

        found["idle"] = served.turns.used_bytes
        create(served, "d")
        served.forward_backward("d", rows(1, 60), forward_only=True)
        lost = sample(made, PROMPTS[0], params, 8)
        between = served.forward_backward("d", rows(1, 1), forward_only=True)
        between.add_done_callback(lose)
        found["lost"] = refusal(lambda: lost)
        served.unload("d")
        found["left"] = served.turns.used_bytes
    return found


def ends(path: Path) -> dict[str, Any]:
    """What those are told whose server ends while it samples, or who go themselves, and
    how long the end took."""
    found: dict[str, Any] = {}
    served = service(path)
    sample, long = served.sampler.sample, SamplingParams(max_tokens=60, stop=[])
    made = base_of(served)
    gone = sample(made, PROMPTS[0], long, 1000)
    while served.sampler.counts()["tokens"] < 20:
        time.sleep(0.01)
    served.sampler.cancel(gone)
    other = sample(made, PROMPTS[1], GREEDY)
    other.result()
    found["cancelled"] = refusal(lambda: gone), served.sampler.counts()["tokens"] < 5000
    sent = sample(made, PROMPTS[0], GREEDY, number=10**18)
    found["twice"] = sample(made, PROMPTS[0], GREEDY, number=10**18) is sent
    found["otherwise"] = refusal(lambda: sample(made, [5], GREEDY, number=10**18))
    waits = [sample(made, PROMPTS[0], long, 1000) for _ in range(3)]
    before = time.monotonic()
    thread = Thread(target=served.close)
    thread.start()
    found["ended"] = [refusal(lambda one=one: one) for one in waits]
    thread.join()
    found["seconds"] = time.monotonic() - before
    found["later"] = refusal(lambda: sample(made, PROMPTS[0], GREEDY))
    return found


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"prompt": []}, "prompt: 0 tokens; allowed are 1 to 64"),
    "long": ({"prompt": [5] * 65}, "prompt: 65 tokens"),
    "beyond": ({"prompt": [288]}, "token 288; the vocabulary has 0 to 287"),
    "negative": ({"prompt": [-1]}, "token -1"),
    "no samples": ({"num_samples": 0}, "num_samples: 0"),
    "samples": ({"num_samples": 10**6}, "num_samples: 1000000"),
    "session": ({"session": "none"}, "there is no session none"),
    "top": ({"num_top": 1000}, "topk_sample_logprobs: 1000"),
    "last": ({"about": Asked(logprobs=True, last_n=3)}, "prompt_logprobs_last_n: 3"),
    "targets": (
        {"about": Asked(wanted=Wanted(torch.zeros(5, 1, dtype=torch.int64)))},
        "target_prompt_logprobs has shape (5, 1)",
    ),
    "a target": (
        {"about": Asked(wanted=Wanted(torch.full((2, 1), 999)))},
        "target_prompt_logprobs: tokens are -1 to 287",
    ),
}
"""Requests that cannot be, over an ordinary one, and what their senders are told."""


def refused(path: Path) -> dict[str, str]:
    """What is said to each of `WRONG`, to paths that are none, and to weights of another
    base."""
    found = {}
    with service(path) as served:
        made = base_of(served)
        for name, (more, _) in WRONG.items():
            given = {"session": made, "prompt": PROMPTS[0], "params": GREEDY, **more}
            found[name] = refusal(lambda given=given: served.sampler.sample(**given))
        make = served.sessions.make
        found["no path"] = refusal(lambda: make("x", "tinker://c/sampler_weights/no"))
        found["a file"] = refusal(lambda: make("x", "/etc/passwd"))
        found["after"] = refusal(lambda: served.sampler.sample(made, [5], GREEDY))
    return found


def written(root: Path) -> dict[str, Any]:
    """Text of letters that are several tokens each, pushed one token at a time."""
    from transformers import AutoTokenizer

    class Model:
        generation_config = None

    text = Text(AutoTokenizer.from_pretrained(root / TOKENIZER), Model())
    words = "a fünfte Größe 日本語 <stop> and more"
    tokens = text.tokens(words)

    def pushed(*stops: str) -> tuple[str, bool]:
        stream, shown = TextStream(text, stops), []
        for token in tokens:
            shown.append(stream.push([token]))
        shown.append(stream.push([], last=True))
        whole = TextStream(text, stops).push(tokens, last=True)
        assert "".join(shown) == whole
        assert not any("\ufffd" in part for part in shown)
        return whole, any(stop[:2] in "".join(shown) for stop in stops)

    return {
        "all": pushed()[0] == text.text(tokens, False),
        "cut": pushed("<stop>"),
        "first": pushed("Größe", "<stop>")[0],
        "begun": pushed("<stop it>")[0].endswith("<stop> and more"),
        "at the end": pushed("more!")[0].endswith("more"),
    }
