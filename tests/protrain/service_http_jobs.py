"""What tests of the service's HTTP protocol run in forks."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import zstandard
from httpx import ASGITransport, AsyncClient
from hypothesis import HealthCheck, given, settings, strategies as st
from service_jobs import (
    ADAM,
    create,
    differences,
    refusal,
    rows,
    saved,
    saved_at,
    service,
    step,
)
from starlette.testclient import TestClient

from axolotl.integrations.protrain.cli.serve import _Hosts
from axolotl.integrations.protrain.service import http
from axolotl.integrations.protrain.service.engine import AdapterService
from axolotl.integrations.protrain.service.http import app_of
from axolotl.integrations.protrain.service.messages import MESSAGES
from axolotl.integrations.protrain.service.sampling import SamplingParams
from axolotl.integrations.protrain.service.states import Kept

BASE = "models/llama"
HERE = "http://127.0.0.1"
PROTOBUF = {"content-type": "application/x-protobuf"}


def wire(seed: int) -> list[dict[str, Any]]:
    """`rows` as JSON."""
    data = []
    for datum in rows(seed):
        inputs = {
            name: {
                "data": values.tolist(),
                "dtype": str(values.dtype).removeprefix("torch."),
                "shape": [*values.shape],
            }
            for name, values in datum.inputs.items()
        }
        chunk = {"type": "encoded_text", "tokens": datum.tokens.tolist()}
        data.append({"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs})
    return data


def a_pass(model: str, seed: int, **more: Any) -> dict[str, Any]:
    given = {"data": wire(seed), "loss_fn": "cross_entropy"}
    return {"model_id": model, "forward_backward_input": given, **more}


def as_protobuf(model: str, seed: int) -> bytes:
    message = MESSAGES["ForwardBackwardRequest"](
        model_id=model, loss_fn="cross_entropy", forward_only=True
    )
    for datum in rows(seed):
        row = message.data.add()
        tokens = datum.tokens.to(torch.int32).numpy().tobytes()
        row.model_input.add().encoded_text.tokens = tokens
        for name, values in datum.inputs.items():
            row.loss_fn_inputs[name].dense = values.numpy().tobytes()
            row.loss_fn_inputs[name].dtype = 2 if values.dtype == torch.int64 else 1
    return message.SerializeToString()


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-5, 999), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside: Any = value.items() if isinstance(value, dict) else ()
    inside = enumerate(value) if isinstance(value, list) else inside
    found = []
    for key, item in inside:
        found += [(*at, key), *_places(item, (*at, key))]
    return found


SAMPLED: dict[str, Any] = {
    "create_sampling_session": {
        "session_id": "s",
        "sampling_session_seq_id": 0,
        "model_path": "tinker://a/weights/now",
    },
    "join_sampling_session": {"sampling_session_id": "s:sample:0"},
    "asample": {
        "model_path": "tinker://a/weights/now",
        "prompt": {"chunks": [{"tokens": [5, 6, 7]}]},
        "sampling_params": {
            "max_tokens": 2,
            "seed": 1,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.5,
            "stop": [8],
        },
        "num_samples": 1,
        "prompt_logprobs": True,
        "prompt_logprobs_last_n": 1,
        "topk_prompt_logprobs": 1,
        "topk_sample_logprobs": 1,
        "target_prompt_logprobs": {
            "data": [5, 6],
            "dtype": "int64",
            "shape": [2, 2],
            "sparse_crow_indices": [0, 1, 2],
            "sparse_col_indices": [0, 1],
        },
    },
    "cancel_future": {"request_id": "@s:sample:0:0"},
    "/v1/completions": {
        "model": "tinker://a/weights/now",
        "prompt": [5, 6],
        "max_tokens": 2,
        "temperature": 1,
        "n": 1,
        "stop": ["x"],
        "logprobs": 1,
        "stream": False,
    },
    "/v1/chat/completions": {
        "model": BASE,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
        "stream_options": {"include_usage": True},
    },
}
"""Requests to sample, by route."""


def attacked(path: Path, count: int) -> dict[str, Any]:
    """Send malformed requests; how many got which status, and whether the adapter that
    they were about has changed."""
    statuses: dict[int, int] = {}
    with service(path) as served:
        for name in "ab":
            create(served, name)
            for asked in step(served, name, 0):
                asked.result()
        before = saved(served, "a")
        session = {"session_id": "s"}
        adam = {"learning_rate": 0.1, "beta1": 0.9}
        good = {
            "forward_backward": a_pass("a", 1),
            "forward": a_pass("a", 1),
            # the other one: what is valid may change it
            "optim_step": {"model_id": "b", "adam_params": adam, "seq_id": 4},
            "save_weights": {
                "model_id": "a",
                "path": "x",
                "ttl_seconds": 3600,
                "user_metadata": {"k": "v"},
            },
            "load_weights": {
                "model_id": "b",
                "path": "tinker://a/weights/now",
                "optimizer": True,
            },
            "create_model": {
                **session,
                "model_seq_id": 0,
                "base_model": BASE,
                "lora_config": {"rank": 4},
            },
            "get_info": {"model_id": "a"},
            "retrieve_future": {"request_id": "a:1"},
            "session_heartbeat": session,
            "weights_info": {"tinker_path": "tinker://a/weights/now"},
            **SAMPLED,
        }
        protobuf = as_protobuf("a", 1)
        with TestClient(app_of(served, None), HERE) as client:

            @settings(
                max_examples=count,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=[*HealthCheck],
            )
            @given(st.data())
            def attack(draw: st.DataObject) -> None:
                route = draw.draw(st.sampled_from([*good, "protobuf"]))
                headers: dict[str, str] = {}
                if route == "protobuf":
                    route, headers = "forward_backward", dict(PROTOBUF)
                    at = draw.draw(st.integers(0, len(protobuf) - 1))
                    junk = draw.draw(st.binary(max_size=4))
                    body = protobuf[:at] + junk + protobuf[at + len(junk) :]
                    if draw.draw(st.booleans()):
                        headers["content-encoding"] = "zstd"
                elif draw.draw(st.integers(0, 4)) == 0:
                    body = draw.draw(st.binary(max_size=20))
                else:
                    value = copy.deepcopy(good[route])
                    where = draw.draw(st.sampled_from(_places(value)))
                    inside: Any = value
                    for key in where[:-1]:
                        inside = inside[key]
                    if draw.draw(st.booleans()):
                        del inside[where[-1]]
                    else:
                        inside[where[-1]] = draw.draw(JUNK)
                    body = json.dumps(value).encode()
                at = route if route.startswith("/") else f"/api/v1/{route}"
                answer = client.post(at, content=body, headers=headers)
                status = answer.status_code
                statuses[status] = statuses.get(status, 0) + 1

            attack()
        # gradients of what was valid aside
        after = {k: v for k, v in saved(served, "a").items() if k[:4] != "grad"}
        changed = [key for key, v in after.items() if not torch.equal(before[key], v)]
    return {"statuses": statuses, "changed": changed}


def misused(path: Path) -> dict[str, Any]:
    """Status and words of answers to those who misuse the protocol."""
    told: dict[str, Any] = {}
    with (
        service(path) as served,
        TestClient(app_of(served, None), HERE) as client,
        patch.object(http, "WAIT_S", 0.2),
        patch.object(http, "BODY_S", 0.2),
    ):

        def post(what: str, route: str, **given: Any) -> Any:
            answer = client.post(f"/api/v1/{route}", **given)
            told[what] = (answer.status_code, answer.text)
            return answer.json()

        create(served, "a")
        rate = {"model_id": "a", "adam_params": {"learning_rate": -1}, "seq_id": 1}
        post("rate", "optim_step", json=rate)
        rows_of_two = a_pass("a", 1, seq_id=2)
        ranks = rows_of_two["forward_backward_input"]["data"][0]["loss_fn_inputs"]
        ranks["weights"]["shape"] = [1, 2]
        post("shape", "forward_backward", json=rows_of_two)
        post("a pass after", "forward_backward", json=a_pass("a", 1, seq_id=3))
        post("its answer", "retrieve_future", json={"request_id": "a:3"})
        post("a gap", "forward_backward", json=a_pass("a", 1, seq_id=5))
        post("its wait", "retrieve_future", json={"request_id": "a:5"})
        post("fills it", "save_weights", json={**NAMED, "seq_id": 4})
        post("saved", "retrieve_future", json={"request_id": "a:4"})
        post("otherwise", "save_weights", json={**NAMED, "path": "y", "seq_id": 4})
        post("same name", "save_weights", json={**NAMED, "seq_id": 6})
        post("kept", "retrieve_future", json={"request_id": "a:6"})
        post("replaces", "save_weights", json={**NAMED, "seq_id": 7, "overwrite": True})
        post("replaced", "retrieve_future", json={"request_id": "a:7"})
        post("ttl", "save_weights", json={**NAMED, "ttl_seconds": 0})
        unnamed = {"model_id": "a", "sampling_session_seq_id": 0, "kind": "inflight"}
        post("unnamed", "save_weights_for_sampler", json=unnamed)
        for what, name in (("NUL", "a\0b"), ("up", "../x"), ("long", "n" * 4096)):
            post(what, "save_weights", json={**NAMED, "path": name})
        broken = a_pass("a", 1)
        fields = broken["forward_backward_input"]["data"][0]["loss_fn_inputs"]
        fields["target_tokens"]["data"][0] = 7.5
        post("token 7.5", "forward_backward", json=broken)
        lora = {"rank": 4, "alpha": 8}
        asked = {"session_id": "s", "model_seq_id": 0, "base_model": BASE}
        post("alpha", "create_model", json={**asked, "lora_config": lora})
        asked |= {"lora_config": {"rank": 4}, "optimizer_config": {"type": "dimuon"}}
        post("optimizer", "create_model", json=asked)
        asked["optimizer_config"] = {"type": "adamw"}
        post("AdamW", "create_model", json=asked)
        body, zstd = as_protobuf("a", 1), {**PROTOBUF, "content-encoding": "zstd"}
        packed = zstandard.ZstdCompressor().compress(body)
        for what, cut in (("cut", packed[:-9]), ("two", packed * 2)):
            post(what, "forward_backward", content=cut, headers=zstd)
        bomb = zstandard.ZstdCompressor().compress(bytes(http.MOST_BYTES + 1))
        post("bomb", "forward_backward", content=bomb, headers=zstd)
        beyond = {"data": [5], "dtype": "int64", "shape": [2, 2]}
        beyond |= {"sparse_crow_indices": [0, 2**70, 1], "sparse_col_indices": [0]}
        sampled = {**SAMPLED["asample"], "target_prompt_logprobs": beyond}
        post("beyond", "asample", json={**sampled, "model_path": None})
        post(
            "rows",
            "forward",
            content=b"\x0a\x01a" + b"\x1a\0" * 10**5,
            headers=PROTOBUF,
        )
        post("deep", "optim_step", content=b'{"a":' * 10**5)
        junk = b'{"model_id":"a","forward_input":{"loss_fn":"x","data":[%s0]}}'
        post("junk", "forward", content=junk % (b"0," * 10**6))
        chunks = (bytes(1 << 20) for _ in range(65))
        post("chunked", "forward_backward", content=chunks)
        post("large poll", "retrieve_future", content=bytes(http.LITTLE_BYTES + 1))
        packed = zstandard.ZstdCompressor().compress(bytes(http.LITTLE_BYTES + 1))
        post("packed poll", "retrieve_future", content=packed, headers=zstd)
        post("page", "get_info", json={"model_id": "a"}, headers={"origin": "x"})

        async def slowly(message: dict[str, Any] | None) -> None:
            async def receive() -> Any:
                if message is None:
                    await asyncio.sleep(60)
                return message

            async def send(message: Any) -> None:
                told.setdefault("slow" if slow else "gone", message.get("status"))

            slow = message is None
            scope = {"type": "http", "method": "POST", "path": "/api/v1/get_info"}
            scope |= {"query_string": b"", "headers": [(b"host", b"localhost:1")]}
            await app_of(served, None)(scope, receive, send)

        (served.folder / "a/weights/x/state.json").write_text("{")
        damaged = {"tinker_path": "tinker://a/weights/x"}
        post("damaged", "weights_info", json=damaged)
        for message in (None, {"type": "http.disconnect"}):
            asyncio.run(slowly(message))
        told["alive"] = client.get("/healthz").status_code
    told["ended"] = client.get("/healthz").status_code
    return told


NAMED = {"model_id": "a", "path": "x"}


def broken(path: Path) -> dict[str, Any]:
    """What is told of errors that no request should meet, and what differs afterwards; and
    of those after which nothing more can run, with what is saved then."""
    told: dict[str, Any] = {}

    def raising(of: AdapterService, error: BaseException, spoil: bool = False) -> Any:
        def fail(*_: Any) -> None:
            if spoil:
                state = of.store.cached("b")
                assert state is not None
                state.memory = torch.zeros(())
            raise error

        head = of.session.model.get_output_embeddings()
        return head.register_forward_pre_hook(fail)

    glob = Path.glob

    def unreadable(folder: Path, pattern: str) -> Any:
        if "_expires" in pattern:
            raise OSError("no disk")
        return glob(folder, pattern)

    for what, error in (("undone", EOFError("cut")), ("ended", SystemExit())):
        served = service(path)
        create(served, "b")
        for asked in step(served, "b", 0):
            asked.result()
        before = saved(served, "b")
        served.forward_backward("b", rows(1)).result()
        waits = saved(served, "b")
        if what == "undone":
            hook = raising(served, error)
            made = served.sessions.of_path(None).name
            greedy = SamplingParams(temperature=0, max_tokens=2)
            asked = [
                served.forward_backward("b", rows(2)),
                served.sampler.sample(made, [5], greedy),
            ]
            told["errors"] = [repr(one.exception(60)) for one in asked]
            hook.remove()
            # the time of a state is over, and the disk does not say of which
            at = served.save("b", "short", kept=Kept(1e-3)).result()
            with patch.object(Path, "glob", unreadable):
                served.save("b", "then").result()
            told["kept"] = served.states.get(at) is not None
            told["after"] = differences(saved(served, "b"), waits)
            told["samples"] = len(
                served.sampler.sample(made, [5], greedy).result().samples
            )
        served.optim_step("b", ADAM).result()
        with TestClient(app_of(served, None), HERE) as client:
            status = [client.get("/healthz").status_code]
            raising(served, error, spoil=what == "undone")
            asked = [
                served.forward_backward("b", rows(2)),
                served.optim_step("b", ADAM),
            ]
            told[what] = [str(one.exception(60)) for one in asked]
            told[f"{what} lost"] = refusal(served.close)
            status.append(client.get("/healthz").status_code)
            told[f"{what} health"] = status
    last = saved_at(served, "tinker://b/weights/_last")
    told["saved"] = len(differences(last, before)) > 0
    return told


def _row(tokens: list[Any], targets: list[Any], weights: list[Any]) -> dict[str, Any]:
    inputs = {
        "target_tokens": {"data": targets, "dtype": "int64"},
        "weights": {"data": weights, "dtype": "float32"},
    }
    chunks = [{"type": "encoded_text", "tokens": tokens}]
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}


def _shaped(shape: list[int], *indices: list[int]) -> dict[str, Any]:
    """A row of one token whose weights have a shape, and indices of CSR."""
    row = _row([5], [5], [1])
    names = ("sparse_crow_indices", "sparse_col_indices")
    more = dict(zip(names, indices, strict=False))
    row["loss_fn_inputs"]["weights"] |= {"shape": shape, **more}
    return row


NUMBERS: dict[str, Any] = {
    "beyond 64 bits": _row([2**70], [5], [1]),
    "at 64 bits": _row([2**63], [5], [1]),
    "below 64 bits": _row([-(2**63) - 1], [5], [1]),
    "negative": _row([-1], [5], [1]),
    "beyond the vocabulary": _row([5], [10**6], [1]),
    "a target beyond": _row([5], [2**70], [1]),
    "a target without end": _row([5], [float("inf")], [1]),
    "float": _row([5.5], [5], [1]),
    "NaN": _row([5], [5], [float("nan")]),
    "no weight": _row([5], [5], [10**400]),
    "empty": _row([], [], []),
    "lengths": _row([5, 6], [5], [1]),
    "too long": _row([5] * 9000, [5] * 9000, [1] * 9000),
    "text": _row(["x"], [5], [1]),
    "nothing": None,
    "nested": _row([[5]], [5], [1]),
    "no inputs": {"model_input": {"chunks": []}, "loss_fn_inputs": {}},
    "settings": {"loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 10**400}},
    "a shape": _row([5], [5], [1])
    | {
        "loss_fn_inputs": {"weights": {"data": [1], "dtype": "int64", "shape": [2**70]}}
    },
    "a negative shape": _shaped([-1, -1]),
    "three dimensions": _shaped([1, 1, 1]),
    "more rows": _shaped([2, 1], [0, 0, 1], [0]),
    "a wide sparse one": _shaped([1, 2**40], [0, 1], [0]),
    "no CSR": _shaped([1, 2], [0, 5], [0]),
    "indices beyond 64 bits": _shaped([1, 2], [0, 2**70], [0]),
}
"""Rows of a request that cannot be, or more of it."""


def numbered(path: Path) -> dict[str, Any]:
    """Requests that cannot be, each of its own number: status, and what its future and
    that of the next request say."""
    told: dict[str, Any] = {}
    with (
        service(path) as served,
        TestClient(app_of(served, None), HERE, raise_server_exceptions=False) as client,
        patch.object(http, "WAIT_S", 20),
    ):
        create(served, "a")

        def post(route: str, **body: Any) -> tuple[int, Any]:
            # as Python writes it, NaN and all
            answer = client.post(f"/api/v1/{route}", content=json.dumps(body))
            return answer.status_code, answer.json()

        number = 0
        for what, row in NUMBERS.items():
            number += 1
            given: dict[str, Any] = {"data": [row], "loss_fn": "cross_entropy"}
            if row is not None and "loss_fn" in row:
                given = {"data": [_row([5], [5], [1])], **row}
            asked = {"model_id": "a", "seq_id": number}
            status, said = post(
                "forward_backward", **asked, forward_backward_input=given
            )
            future = post("retrieve_future", request_id=f"a:{number}")
            told[what] = status, said, future
        number += 1
        passed = a_pass("a", 1, seq_id=number)
        told["after"] = (
            post("forward_backward", **passed)[0],
            post("retrieve_future", request_id=f"a:{number}"),
        )
    return told


def called_otherwise(path: Path) -> dict[str, Any]:
    """How requests fare by the name that they call the server by, by its key, and by the
    bytes that it has room for; and what is logged of polls."""
    told: dict[str, Any] = {}
    with service(path, request_bytes=1 << 20) as served:
        create(served, "a")
        served.turns.answer("a", 0).result()
        hosts = _Hosts("192.168.7.9", ["Box.example"])
        named = {
            "loopback": ("127.0.0.1:8000", app_of(served, None)),
            "by name": ("LOCALHOST", app_of(served, None)),
            "IPv6": ("[::1]:8000", app_of(served, None)),
            "rebound": ("evil.example:8000", app_of(served, None)),
            "as an address": ("127.0.0.1.evil.example", app_of(served, None)),
            "none": ("", app_of(served, None)),
            "elsewhere": ("192.168.7.9", app_of(served, None)),
            "given": ("192.168.7.9:1", app_of(served, None, hosts)),
            "allowed": ("box.example", app_of(served, None, hosts)),
            "not allowed": ("192.168.7.8", app_of(served, None, hosts)),
            "anywhere": ("192.168.7.8:1", app_of(served, None, _Hosts("0.0.0.0", ()))),
            "anywhere rebound": ("evil", app_of(served, None, _Hosts("0.0.0.0", ()))),
        }
        for what, (host, app) in named.items():
            with TestClient(app, HERE) as client:
                for route in ("healthz", "api/v1/status"):
                    answer = client.get(f"/{route}", headers={"host": host})
                    told[f"{what} {route}"] = answer.status_code
        with TestClient(app_of(served, "secret"), HERE) as client:
            for what, given in (("bearer", "secret"), ("no bearer", "other")):
                bearer = {"authorization": f"Bearer {given}"}
                status = client.get("/v1/models", headers=bearer).status_code
                told[what] = status
        lines: list[str] = []
        with (
            TestClient(app_of(served, ""), HERE) as client,
            patch.object(http.LOG, "info", lines.append),
            patch.object(http, "PARSED_BYTES", 4),
        ):
            page = {"origin": "https://evil.example"}
            told["no key"] = client.get("/api/v1/status", headers=page).status_code
            waiting = []
            for number in range(2, 60):
                given = {"data": wire(1) * 20, "loss_fn": "cross_entropy"}
                body = {"model_id": "a", "seq_id": number, "forward_input": given}
                answer = client.post("/api/v1/forward", json=body)
                waiting.append(answer.status_code)
            told["waiting"] = [waiting.count(200), waiting.count(429)]
            told["retry"] = answer.headers["retry-after"], answer.text
            told["used"] = served.turns.used_bytes
            large = {**body, "seq_id": 60, "forward_input": {"data": wire(1) * 4000}}
            told["large"] = client.post("/api/v1/forward", json=large).status_code
            row = _row([5] * 3000, [], [])
            empty = {"shape": [3000, 64], "sparse_crow_indices": [0] * 3001}
            for values in row["loss_fn_inputs"].values():
                values |= {**empty, "sparse_col_indices": []}
            given = {"data": [row], "loss_fn": "cross_entropy"}
            sparse = {"model_id": "a", "seq_id": 61, "forward_input": given}
            answer = client.post("/api/v1/forward", json=sparse)
            told["sparse"] = answer.status_code, answer.text
            lines.clear()
            update = {"model_id": "a", "seq_id": 1, "adam_params": {}}
            client.post("/api/v1/optim_step", json=update)
            polled = client.post("/api/v1/retrieve_future", json={"request_id": "a:1"})
            told["polled"] = polled.status_code, "".join(lines)
            rest = served.turns.most_bytes - served.turns.used_bytes
            served.turns.reserve(rest)
            poll = client.post("/api/v1/retrieve_future", json={"request_id": "a:1"})
            told["a poll without room"] = poll.status_code
            served.turns.release(rest)
            served.turns.answer("a", waiting.count(200) + 1).result()
            client.post("/api/v1/unload_model", json={"model_id": "a"})
            told["left"] = served.turns.used_bytes
    return told


def at_once(path: Path, clients: int) -> dict[str, Any]:
    """Clients that train at the same time, each request sent twice and each update before
    its pass; their losses, and those of one alone."""
    with service(path, adapter_bytes=1 << 20) as served:
        app = app_of(served, "secret")

        async def one(client: AsyncClient, seed: int) -> list[Any]:
            async def post(route: str, **body: Any) -> Any:
                answer = await client.post(f"/api/v1/{route}", json=body)
                assert answer.status_code == 200, answer.text
                return answer.json()

            session = (await post("create_session"))["session_id"]
            created = {"base_model": BASE, "lora_config": {"rank": 2, "seed": 1}}
            named = {"session_id": session, "model_seq_id": 0}
            model = (await post("create_model", **named, **created))["model_id"]
            asked = []
            for number in (1, 3):
                update = {"adam_params": {"learning_rate": 0.01}, "seq_id": number + 1}
                for _ in range(2):
                    stepped = await post("optim_step", model_id=model, **update)
                    body = a_pass(model, seed, seq_id=number)
                    passed = await post("forward_backward", **body)
                asked += [passed["request_id"], stepped["request_id"]]
            found = [await post("retrieve_future", request_id=a) for a in asked]
            return [answer["metrics"] for answer in found]

        async def all_of_them() -> list[Any]:
            at = {"transport": ASGITransport(app), "base_url": HERE}
            async with AsyncClient(**at, timeout=300) as client:
                refused = await client.post("/api/v1/create_session", json={})
                client.headers["X-API-Key"] = "secret"
                many = await asyncio.gather(
                    *(one(client, n % 5) for n in range(clients))
                )
                return [refused.status_code, many, [await one(client, 0)]]

        refused, many, alone = asyncio.run(all_of_them())
    return {"refused": refused, "many": many, "alone": alone[0]}


def serve(path: Path, *options: str) -> None:
    """The command."""
    from axolotl.integrations.protrain.cli import protrain

    torch.set_num_threads(1)
    protrain(["serve", str(path), "--port", "0", "--folder", "state", *options])


def reward(prompts: list[str], completions: list[str]) -> list[float]:
    """One of a reinforcement learning: the share of small letters."""
    return [sum(c.islower() for c in one) / max(len(one), 1) for one in completions]


def remote_training(client: str, path: str, address: str) -> None:
    """`axolotl train` of a YAML by Axolotl's hatchery integration; `client` is a folder
    with the package that it needs."""
    sys.path.append(client)
    os.environ |= {"TINKER_BASE_URL": address, "TINKER_API_KEY": "tml-test"}
    from axolotl.cli.train import do_cli

    do_cli(path)
