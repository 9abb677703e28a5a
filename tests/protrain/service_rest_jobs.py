"""What tests of the service's runs and checkpoints run in forks."""

from __future__ import annotations

import asyncio
import shutil
import tarfile
import time
from io import BytesIO
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import torch
import yaml
from safetensors.torch import load_file
from service_http_jobs import BASE, HERE, a_pass
from service_jobs import ADAM, create, rows, service, step
from starlette.testclient import TestClient

from axolotl.integrations.protrain.service import client_sessions, states
from axolotl.integrations.protrain.service.adapters import EXTERNAL, WEIGHTS, folder_of
from axolotl.integrations.protrain.service.downloads import ARCHIVE, sent
from axolotl.integrations.protrain.service.http import app_of
from axolotl.integrations.protrain.service.sampling import SamplingParams
from axolotl.integrations.protrain.service.turns import Ticket

AT = "/api/v1/training_runs/{}/checkpoints/{}"
BAD = (
    *(
        "%2e%2e",
        "..%2f..%2fx",
        "a%00b",
        "%2fetc",
        "*",
        "[a]",
        "a*",
        "~",
        "_last%0a",
    ),
    *("_evicted", "_samplers", "_expires", "_incomplete", "x" * 300, "%ff", "a b", "ä"),
)
"""Names that are none, as they stand in an address; clients resolve a plain `..`."""
QUERIES = (
    "limit=0",
    "limit=1001",
    "offset=-1",
    "limit=x",
    "project_id=p",
    "base_model=x",
)
SEARCHES: tuple[Any, ...] = (
    [],
    *({"limit": limit} for limit in (0, 201, "x")),
    {"display_name": ""},
    {"project_ids": []},
    {"unknown": 1},
    {"owner": {"type": "user"}},
    {"owner": {"type": "own", "owner_urns": ["x"]}},
    {"statuses": []},
    {"statuses": [{"type": "active", "reasons": ["success"]}]},
    {"statuses": [{"type": "client_finished", "reasons": []}]},
    {"cursor": {"last_session_id": "x"}},
    {"cursor": {"last_session_id": "x", "last_created_at": "2026-01-01T00:00:00"}},
)
WRONG = (
    *((f"{what}?{q}", None) for what in ("checkpoints", "sessions") for q in QUERIES),
    *((f"training_runs?{query}", None) for query in QUERIES),
    *((f"{what}/a?limit=1", None) for what in ("training_runs", "sessions")),
    ("training_runs/a/checkpoints?limit=1", None),
    *(("sessions/search", asked) for asked in SEARCHES),
    *(("sessions/s/finish", body) for body in ({}, {"reason": {}}, {"reason": 1})),
)
"""Addresses, each with its body if it has one, that ask for what there is not."""


def _tree(folder: Path) -> dict[str, bytes]:
    return {
        str(at.relative_to(folder)): at.read_bytes()
        for at in sorted(folder.rglob("*"))
        if at.is_file()
    }


def abused(path: Path) -> dict[str, Any]:
    """Names in every place of every address: which answers were no refusals, and what has
    changed on the disk; then addresses that nobody has signed."""
    found: dict[str, Any] = {"passed": [], "statuses": []}
    secret = path.parent / "state.json"
    secret.write_text("{}")
    with service(path) as served:
        create(served, "a")
        served.save("a", "x").result()
        served.save("a", "s", whole=False).result()
        outside = served.folder.parent / "weights" / "x"
        shutil.copytree(served.folder / "a/weights/x", outside)
        before = _tree(path.parent / "state"), _tree(outside)
        with TestClient(
            app_of(served, None), HERE, raise_server_exceptions=False
        ) as ask:

            def send(method: str, at: str, **given: Any) -> None:
                answer = ask.request(method, at, **given)
                found["statuses"].append(answer.status_code)
                if not 400 <= answer.status_code < 500:
                    found["passed"].append([method, at, answer.status_code])

            for bad in BAD:
                send("GET", f"/api/v1/training_runs/{bad}/checkpoints")
                send("GET", f"/api/v1/sessions/{bad}")
                done = {"reason": {"type": "success"}}
                send("POST", f"/api/v1/sessions/{bad}/finish", json=done)
                names = (bad, "weights/x"), ("a", f"{bad}/x"), ("a", f"weights/{bad}")
                for at in (AT.format(*pair) for pair in names):
                    send("DELETE", at)
                    send("PUT", f"{at}/ttl", json={"ttl_seconds": 1})
                    for what in ("archive", "external_weights_urls"):
                        send("GET", f"{at}/{what}")
                    for what in (bad, WEIGHTS):
                        signed = "?until=99999999999&signature=0"
                        place = at.replace("training_runs", "downloads")
                        place = place.replace("checkpoints/", "")
                        send("GET", f"{place}/{what}{signed}")
            for seconds in (0, -1, 2**70, "x", 1.5):
                send(
                    "PUT",
                    AT.format("a", "weights/x/ttl"),
                    json={"ttl_seconds": seconds},
                )
            for at, wrong in WRONG:
                send("GET" if wrong is None else "POST", f"/api/v1/{at}", json=wrong)
            one = ask.get(AT.format("a", "weights/x/external_weights_urls")).json()[
                "urls"
            ]
            url = one["state.json"]
            for wrong in (
                url.replace("state.json", WEIGHTS),
                url.replace("weights/x", "sampler_weights/s"),
                url.replace("until=", "until=1"),
                url.split("?")[0],
                f"{url}0",
            ):
                send("GET", wrong)
            found["right"] = ask.get(url).status_code
            with patch("axolotl.integrations.protrain.service.downloads.time") as now:
                now.return_value = time.time() + 3601
                send("GET", url)
            served.save("a", "x").result()
            send("GET", url)
        with TestClient(app_of(served, "secret"), HERE) as ask:
            found["keyless"] = [
                ask.request(method, at).status_code
                for method, at in (
                    ("GET", "/api/v1/checkpoints"),
                    ("GET", "/api/v1/training_runs"),
                    ("GET", AT.format("a", "weights/x/archive")),
                    ("DELETE", AT.format("a", "weights/x")),
                )
            ]
        after = _tree(path.parent / "state"), _tree(outside)
        changed = [name for name in before[0] if name not in after[0]]
        found["changed"] = changed + [
            n for n in before[1] if after[1][n] != before[1][n]
        ]
    return found


async def _all(answer: Any) -> int:
    return sum([len(piece) async for piece in answer.body_iterator])


def as_models(path: Path) -> dict[str, Any]:
    """What OpenAI's clients are told of states of each kind, beside one that is deleted and
    one that is damaged: ids, and the status of a completion by each."""
    with service(path) as served:
        create(served, "a")
        for name in ("x", "gone", "damaged"):
            served.save("a", name).result()
        served.save("a", "s", whole=False).result()
        served.save("a", "e", whole=False, kept=states.Kept(kind=EXTERNAL)).result()
        (served.folder / "a/weights/damaged/state.json").write_text("{")
        served.states.delete("tinker://a/weights/gone")
        with TestClient(app_of(served, None), HERE) as ask:
            listed = ask.get("/v1/models").json()["data"]
            ids, answers = [one["id"] for one in listed], {}
            for model in ids:
                body = {"model": model, "prompt": [5, 6], "max_tokens": 1}
                answers[model] = ask.post("/v1/completions", json=body).status_code
            each = (ids[-1], "tinker://a/weights/damaged")
            retrieved = [ask.get(f"/v1/models/{one}").status_code for one in each]
    found = {"listed": ids, "answers": answers, "retrieved": retrieved}
    return {**found, "created": listed[-1]["created"]}


def in_use(path: Path) -> dict[str, Any]:
    """Deletes while somebody needs what goes, and what they are answered."""
    told: dict[str, Any] = {}
    with (
        service(path) as served,
        TestClient(app_of(served, None), HERE) as ask,
    ):

        def delete(what: str, model: str, at: str) -> None:
            answer = ask.delete(AT.format(model, at))
            told[what] = answer.status_code, answer.text

        create(served, "a")
        for asked in step(served, "a", 0):
            asked.result()
        loaded = served.save("a", "x").result()
        sampled = served.save("a", "s", whole=False).result()
        # its weights are read after they are deleted
        session = served.sessions.make("c:sample:0", sampled)
        greedy = SamplingParams(max_tokens=4, temperature=0.0)
        tokens = [int(token) for token in rows(1)[0].tokens[:3]]
        delete("sampled", "a", "sampler_weights/s")
        answer = served.sampler.sample(session.name, tokens, greedy, 1).result()
        told["tokens"] = len(answer.samples[0].tokens)
        delete("gone", "a", "sampler_weights/s")
        hold = Event()
        served.turns.add("a", None, Ticket(hold.wait, None))
        waits = served.create_from("b", loaded, True)
        delete("waited for", "a", "weights/x")
        hold.set()
        told["loaded"] = waits.result()
        fetched = sent(served.states.one(loaded), ARCHIVE)
        delete("free", "a", "weights/x")
        told["fetched"] = (
            int(fetched.headers["content-length"]),
            asyncio.run(_all(fetched)),
        )
        last = served.folder / "a/weights/_last"
        served.save("a", "y").result()
        shutil.copytree(last.with_name("y"), last)
        delete("last", "a", "weights/_last")
        served.unload("a")
        delete("last of nobody", "a", "weights/_last")
        told["left"] = sorted(at.name for at in last.parent.glob("[!_]*"))
    return told


def kept(path: Path) -> dict[str, Any]:
    """What clients say about models and states, and states whose time is over."""
    told: dict[str, Any] = {}
    with service(path) as served, TestClient(app_of(served, None), HERE) as ask:

        def post(route: str, **body: Any) -> Any:
            answer = ask.post(f"/api/v1/{route}", json=body)
            assert answer.status_code == 200, answer.text
            found = ask.post("/api/v1/retrieve_future", json=answer.json())
            return found.json()

        def names() -> list[str]:
            found = ask.get("/api/v1/checkpoints").json()["checkpoints"]
            return sorted(one["checkpoint_id"] for one in found)

        lora = {"base_model": BASE, "lora_config": {"rank": 2}}
        named = {"session_id": "s", "model_seq_id": 0, "user_metadata": {"n": 1}}
        model = post("create_model", **named, **lora)["model_id"]
        post("forward_backward", **a_pass(model, 1))
        save = {"model_id": model, "path": "x"}
        about = {"user_metadata": {"k": "v"}}
        post("save_weights", **save, **about, ttl_seconds=100)
        post("save_weights", model_id=model, path="y")
        post("save_weights_for_sampler", model_id=model, path="z", ttl_seconds=100)
        post("save_weights_external", model_id=model, path="e", ttl_seconds=50)
        told["run"] = ask.get(f"/api/v1/training_runs/{model}").json()
        listed = ask.get(AT.format(model, "")[:-1]).json()["checkpoints"]
        told["listed"] = {one["checkpoint_id"]: one for one in listed}
        archive = ask.get(AT.format(model, "weights/x/archive")).json()
        packed = ask.get(archive["url"])
        told["length"] = int(packed.headers["content-length"]), len(packed.content)
        with tarfile.open(fileobj=BytesIO(packed.content)) as tar:
            told["members"] = {one.name: one.size for one in tar.getmembers()}
        told["files"] = {
            at.name: at.stat().st_size
            for at in folder_of(served.folder, f"tinker://{model}/weights/x").iterdir()
        }
        # a state that replaces another does not inherit its end
        post("save_weights", **save, overwrite=True)
        with patch.object(states, "time", lambda: time.time() + 60):
            told["after 60 s"] = names()
        with patch.object(states, "time", lambda: time.time() + 200):
            # nobody lists: the service has nothing else to do
            served.optim_step(model, ADAM).result()
            served.forward_backward(model, rows(1), forward_only=True).result()
            until = time.time() + 20
            while (served.folder / model / "sampler_weights/z").exists():
                assert time.time() < until
                time.sleep(0.01)
        told["after 200 s"] = names()
        success = {"reason": {"type": "success"}}
        answer = ask.post("/api/v1/sessions/s/finish", json=success)
        told["unsaved"] = [answer.status_code, model in served.turns]
        post("save_weights", **save, overwrite=True)
        ask.post("/api/v1/sessions/s/finish", json=success)
        told["finished"] = model in served.turns
    with service(path) as served, TestClient(app_of(served, None), HERE) as ask:
        told["restarted"] = ask.get(f"/api/v1/training_runs/{model}").json()
    return told


def searched(path: Path) -> dict[str, Any]:
    """Sessions of three servers, one after another, over the same folder: pages of a search,
    and what the last server knows of sessions that began before."""
    told: dict[str, Any] = {}
    search = "/api/v1/sessions/search"

    def post(ask: TestClient, route: str, **body: Any) -> Any:
        answer = ask.post(f"/api/v1/{route}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def pages(ask: TestClient, limit: int) -> list[list[str]]:
        found, asked = [], {"limit": limit}
        while True:
            page = ask.post(search, json=asked).json()
            found.append([one["session_id"] for one in page["sessions"]])
            if page["next_cursor"] is None:
                return found
            asked["cursor"] = page["next_cursor"]

    with service(path) as served, TestClient(app_of(served, None), HERE) as ask:
        # two of them began at once
        with patch.object(client_sessions, "time", lambda: time.time() // 60 * 60):
            ids = [
                post(ask, "create_session", display_name=name)["session_id"]
                for name in ("Nightly one", "nightly two")
            ]
        named = {"display_name": "other", "user_metadata": {"n": 1}}
        ids.append(post(ask, "create_session", **named)["session_id"])
        told["ids"] = ids
        told["pages"] = {limit: pages(ask, limit) for limit in (1, 2, 3, 4)}
        at = {"limit": 2, "offset": 1}
        told["cut"] = ask.get("/api/v1/sessions", params=at).json()["sessions"]
        at["offset"] = 3
        told["behind"] = ask.get("/api/v1/sessions", params=at).json()["sessions"]
        lora = {"base_model": BASE, "lora_config": {"rank": 2}}
        new = post(ask, "create_model", session_id=ids[2], model_seq_id=0, **lora)
        post(ask, "retrieve_future", **new)
        served.save(new["model_id"], "x").result()
        for reason in ("errored", "success"):
            body = {"reason": {"type": reason}, "detail": reason}
            ask.post(f"/api/v1/sessions/{ids[1]}/finish", json=body)
        told["active"] = _ids(ask, statuses=[{"type": "active"}])
        with patch.object(client_sessions, "monotonic", lambda: time.monotonic() + 200):
            told["quiet"] = _ids(ask, statuses=[{"type": "active"}])
        folder = served.folder / "_sessions"
        (folder / "damaged.json").write_text("{")
    with service(path) as served, TestClient(app_of(served, None), HERE) as ask:
        found = ask.post(search, json={}).json()["sessions"]
        told["later"] = {one["session_id"]: one for one in found}
        told["by words"] = _ids(ask, user_metadata={"n": "1"})
        told["errored"] = _ids(
            ask, statuses=[{"type": "client_finished", "reasons": ["errored"]}]
        )
        post(ask, "session_heartbeat", session_id=ids[0])
        told["heard"] = _ids(ask, statuses=[{"type": "active"}])
    shutil.rmtree(folder)
    with (
        service(path) as served,
        TestClient(app_of(served, None), HERE) as ask,
        patch.object(client_sessions, "MOST_KNOWN", 2),
    ):
        told["of states"] = ask.post(search, json={}).json()["sessions"]
        for _ in range(3):
            post(ask, "create_session")
        told["kept"] = len([*folder.glob("*.json")]), len(served.clients.every())
    return told


def _ids(ask: TestClient, **asked: Any) -> list[str]:
    found = ask.post("/api/v1/sessions/search", json=asked).json()["sessions"]
    return [one["session_id"] for one in found]


def loads_in_peft(config: str, folder: str) -> bool:
    """Tell whether PEFT has the weights of a folder."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = yaml.safe_load(Path(config).read_text())["base_model"]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, folder)
    saved = load_file(Path(folder) / WEIGHTS)
    found = {k.replace(".default.", "."): v for k, v in model.state_dict().items()}
    lora = {k: v for k, v in found.items() if "lora_" in k}
    return lora.keys() == saved.keys() and all(
        v.equal(saved[k]) for k, v in lora.items()
    )
