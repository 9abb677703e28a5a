"""Sampling over HTTP: unmodified clients of Tinker and OpenAI, and those who go."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import axolotl_jobs
import httpx
import pytest
import sampling_jobs
import service_http_jobs
import yaml
from fork_server import Fork, call
from service_http_jobs import BASE
from service_server import (
    OPENAI_NEEDS,
    TINKER_NEEDS,
    by_client,
    installed,
    server,
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    return call(sampling_jobs.config_of, root, "llama", {}, at=root)


@pytest.mark.full
@pytest.mark.parametrize("version", ["0.24.1", "0.38.0"])
def test_clients_of_tinker_learn_from_samples(
    served: Path, tmp_path: Path, version: str
) -> None:
    """Rewards rise; a field that is read otherwise, or weights of another step, would be
    no ratio of 1, and a handed-on client would get another one's answers."""
    folder = installed(tmp_path, f"tinker=={version}", *TINKER_NEEDS)
    with server(served) as address:
        given = {"TINKER_BASE_URL": address, "TINKER_API_KEY": "tml-test"}
        told = by_client("tinker_sampling.py", folder, given, BASE)
    rewards = told["rewards"]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards
    assert told["ratio"] < 1e-5 and told["kept"] == pytest.approx(rewards[0])
    assert told["greedy"][0] != told["greedy"][1]
    assert told["logprobs"] == told["scored"] == [None, *told["forward"]]
    assert told["top"][0] is None and [len(row) for row in told["top"][1:]] == [3] * 4
    assert told["alike"]
    for what in ("long", "empty", "token"):
        assert "prompt: " in told[what], what
    newer = told.get("newer")
    assert (newer is None) == (version == "0.24.1")
    if newer is not None:
        wanted = [0.0] * 8
        wanted[3], wanted[6] = told["forward"][1], told["forward"][3]
        assert newer["from_torch"] == newer["from_torch_sparse"] == wanted
        assert [len(row) for row in newer["top"]] == [2] * 5
        assert newer["last"] == [True] * 3 + [False] * 2
        assert newer["handed on"] == told["greedy"][0]
        assert newer["ids"].endswith(":0")


@pytest.mark.full
def test_axolotl_learns_from_samples_by_its_own_client(
    served: Path, tmp_path: Path
) -> None:
    """The hatchery integration, unmodified: prompts of its data are sampled and scored."""
    root = served.parent
    remote = {
        **axolotl_jobs.BASE,
        "plugins": ["axolotl.integrations.hatchery.HatcheryPlugin"],
        "base_model": BASE,
        "hatchery": {
            "backend": "tinker",
            "lora_rank": 4,
            "loss_fn": "importance_sampling",
            "reward_funcs": ["service_http_jobs.reward"],
            "max_sample_tokens": 8,
            "num_samples": 4,
        },
        "output_dir": "remote",
        "sequence_len": 32,
        "pad_to_sequence_len": False,
        "max_steps": 3,
        "use_tensorboard": False,
    }
    remote = {k: v for k, v in remote.items() if k != "protrain_auto_memory"}
    path, log = root / "remote.yaml", root / "remote.log"
    path.write_text(yaml.safe_dump(remote))
    folder = installed(tmp_path, "tinker==0.38.0", *TINKER_NEEDS)
    with server(served) as address, log.open("w") as words:
        given = (str(folder), str(path), address)
        job = service_http_jobs.remote_training
        trained = Fork(job, *given, folder=root, stdout=words, stderr=words)
        assert trained.wait(300) == 0, log.read_text()[-4000:]
    assert log.read_text().count("Sampled 8 completions") == 3


@pytest.mark.full
def test_a_client_of_openai_reads_and_streams(served: Path, tmp_path: Path) -> None:
    """What is streamed would differ from what comes whole, or show a stop text."""
    folder = installed(tmp_path, "openai", *OPENAI_NEEDS)
    with server(served) as address:
        post = Posting(address)
        model = post.model("o")
        path = post.saved(model, "end")
        given = {"OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": "any"}
        told = by_client("openai_client.py", folder, given, BASE, path)
    assert told["models"][0] == BASE and path in told["models"]
    assert told["model"] == path
    assert told["streamed"] == told["text"] and told["parts"] > 2
    assert told["ended"] == told["reason"] == "length"
    assert (told["logprobs"], told["usage"]) == (12, 16)
    text, reason, stop = told["stopped"]
    assert reason == "stop" and told["text"].startswith(text + stop)
    assert told["streamed short"] == text
    assert told["many"] == [*range(6)] and told["again"]
    assert told["chat streamed"] == told["chat"] and told["chat"]
    assert (told["chat usage"], told["chat top"]) == (12, 2)
    for what, (status, words) in {
        "no model": (404, "/v1/models lists"),
        "long": (422, "900 tokens"),
        "penalty": (422, "presence_penalty is not served"),
        "empty": (422, "0 prompts"),
    }.items():
        assert told[what][0] == status and words in told[what][1], what


class Posting:
    """A client that waits for each answer.

    Args:
        address: Of a server.
    """

    def __init__(self, address: str) -> None:
        self.client = httpx.Client(base_url=address, timeout=60)

    def __call__(self, route: str, **body: Any) -> Any:
        answer = self.client.post(f"/api/v1/{route}", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        if "request_id" not in found:
            return found
        asked = {"request_id": found["request_id"]}
        while True:
            answer = self.client.post("/api/v1/retrieve_future", json=asked)
            if answer.status_code != 408:
                return answer.json()

    def model(self, session: str) -> str:
        """A new model of a client's session."""
        lora = {"base_model": BASE, "lora_config": {"rank": 4, "seed": 1}}
        named = {"session_id": session, "model_seq_id": 0}
        return self("create_model", **named, **lora)["model_id"]

    def saved(self, model: str, name: str) -> str:
        """The path of weights to sample with."""
        return self("save_weights_for_sampler", model_id=model, path=name)["path"]

    def sampling(self) -> dict[str, int]:
        """What the server samples."""
        return self.client.get("/api/v1/status").json()["sampling"]


LONG = {"model": BASE, "prompt": "ab", "max_tokens": 60, "n": 1000}


def _streams(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as got:
        lines = (line for line in got.iter_lines() if line)
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["object"] == "text_completion"


def _waits(client: httpx.Client) -> None:
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=LONG, timeout=1)


def test_who_goes_is_not_sampled_for(served: Path) -> None:
    """Rows of a client that has closed its connection, or cancelled, would decode to their
    end before anybody else's."""
    with server(served) as address:
        post = Posting(address)
        for go in (_streams, _waits):
            before = post.sampling()["tokens"]
            with httpx.Client(base_url=address, timeout=60) as client:
                go(client)
            until = time.monotonic() + 10
            while (now := post.sampling())["decoding"] or now["waiting"]:
                assert time.monotonic() < until, now
                time.sleep(0.05)
            assert 0 < now["tokens"] - before < 30_000, go.__name__
        made = {"session_id": "s", "sampling_session_seq_id": 0, "base_model": BASE}
        session = post("create_sampling_session", **made)["sampling_session_id"]
        asked = {
            "sampling_session_id": session,
            "seq_id": 10**18,
            "prompt": {"chunks": [{"tokens": [5, 6]}]},
            "sampling_params": {"max_tokens": 60, "stop": []},
            "num_samples": 1000,
        }
        answer = post.client.post("/api/v1/asample", json=asked).json()
        assert len(answer["sample_sequence_ids"]) == 1000
        asking = {"request_id": answer["request_id"]}
        post.client.post("/api/v1/cancel_future", json=asking)
        gone = post.client.post("/api/v1/retrieve_future", json=asking).json()
        assert "the client has gone" in gone["error"]


def test_a_stop_ends_streams(served: Path) -> None:
    """A server that waits for a stream would be killed, and lose what was learned."""
    told: list[str] = []

    def streams(address: str, began: Callable[[], object]) -> None:
        body = {**LONG, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body) as got:
            try:
                for line in got.iter_lines():
                    began()
                    told.append(line)
            except httpx.HTTPError:
                told.append("cut")

    began = threading.Event()
    with server(served) as address:
        thread = threading.Thread(target=streams, args=(address, began.set))
        thread.start()
        assert began.wait(30)
    thread.join(30)
    assert not thread.is_alive()
    assert "[DONE]" not in told[-1]
