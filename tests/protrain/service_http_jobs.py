"""What tests of the service's HTTP protocol run in forks."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from httpx import ASGITransport, AsyncClient
from hypothesis import HealthCheck, given, settings, strategies as st
from service_jobs import create, rows, saved, service, step
from starlette.testclient import TestClient

from axolotl.integrations.protrain.service.http import app_of
from axolotl.integrations.protrain.service.messages import MESSAGES

BASE = "models/llama"
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
            "save_weights": {"model_id": "a", "path": "x"},
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
        }
        protobuf = as_protobuf("a", 1)
        with TestClient(app_of(served, None)) as client:

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
                answer = client.post(f"/api/v1/{route}", content=body, headers=headers)
                status = answer.status_code
                statuses[status] = statuses.get(status, 0) + 1

            attack()
        # gradients of what was valid aside
        after = {k: v for k, v in saved(served, "a").items() if k[:4] != "grad"}
        changed = [key for key, v in after.items() if not torch.equal(before[key], v)]
    return {"statuses": statuses, "changed": changed}


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
            at = {"transport": ASGITransport(app), "base_url": "http://test"}
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


def remote_training(client: str, path: str, address: str) -> None:
    """`axolotl train` of a YAML by Axolotl's hatchery integration; `client` is a folder
    with the package that it needs."""
    sys.path.append(client)
    os.environ |= {"TINKER_BASE_URL": address, "TINKER_API_KEY": "tml-test"}
    from axolotl.cli.train import do_cli

    do_cli(path)
