"""The training service over HTTP: Tinker's clients, Axolotl's own, and worse ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
import service_http_jobs
import service_jobs
import yaml
from axolotl_jobs import BASE
from fork_server import Fork, call
from safetensors.torch import load_file
from service_server import TINKER_NEEDS, by_client, installed, server

from axolotl.integrations.protrain.cli.status import status_text
from axolotl.integrations.protrain.core.errors import ConfigError


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    return call(service_jobs.config, root, at=root)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with an unmodified `tinker` of a version, from the package index."""

    @cache
    def install(version: str) -> Path:
        folder = tmp_path_factory.mktemp(f"tinker-{version}")
        return installed(folder, f"tinker=={version}", *TINKER_NEEDS)

    return install


def train_with(
    client: Path, address: str, script: str = "tinker_client.py"
) -> dict[str, Any]:
    given = {"TINKER_BASE_URL": address, "TINKER_API_KEY": "tml-test"}
    return by_client(script, client, given, service_http_jobs.BASE)


def check_told(told: dict[str, Any], root: Path) -> None:
    """A model that begins as a saved one goes on as the first did, and so on."""
    assert told["losses"][1] < told["losses"][0]
    assert told["losses"][2:] == pytest.approx([-1.0, -1.0])
    assert told["ends"][0] == told["ends"][1] == told["ends"][2]
    assert "token 999" in told["wrong"] and told["rank"] == 4
    model = told["path"].split("/")[2]
    # trained since its last save, and saved when the server was told to stop
    last = load_file(root / "state" / model / "weights/_last/adapter_model.safetensors")
    end = load_file(
        root / "state" / model / "sampler_weights/end/adapter_model.safetensors"
    )
    assert last.keys() == end.keys()
    assert any(not tensor.equal(end[name]) for name, tensor in last.items())


@pytest.mark.full
def test_clients_of_tinker_train(served: Path, client: Callable[[str], Path]) -> None:
    """One speaks JSON and one protobuf, so a field that is read otherwise is another
    number."""
    told = []
    for version in ("0.24.1", "0.38.0"):
        with server(served) as address:
            told.append(train_with(client(version), address))
        check_told(told[-1], served.parent)
    assert told[0]["losses"] == told[1]["losses"]
    assert told[0]["ends"] == told[1]["ends"]


@pytest.mark.full
@pytest.mark.parametrize("version", ["0.24.1", "0.38.0"])
def test_a_client_distils(
    served: Path, client: Callable[[str], Path], version: str
) -> None:
    """Candidates that meet other weights, rows of CSR that are read otherwise and answers
    of another shape are other losses than plain PEFT has."""
    with server(served) as address:
        told = train_with(client(version), address, "tinker_distilling.py")
    assert told["apart"][-1] < told["apart"][0] / 2, told["apart"]
    assert told["shapes"] == [[11, 5], [39, 4], [8, 5], [22, 4]] and told["sparse"]
    job = service_jobs.as_distilled
    losses, differing = call(job, served, told, at=served.parent)
    assert told["losses"] == losses and not differing, (losses, differing)


@pytest.mark.full
def test_a_client_trains_on_four_bits(
    tmp_path: Path, client: Callable[[str], Path]
) -> None:
    keys = {"adapter": "qlora", "load_in_4bit": True, "bf16": True}
    keys |= {"optimizer": "adamw_bnb_8bit"}
    path = call(service_jobs.config_of, tmp_path, keys, at=tmp_path)
    with server(path) as address:
        told = train_with(client("0.38.0"), address)
    check_told(told, tmp_path)


@pytest.mark.full
def test_axolotl_trains_by_its_own_client(
    served: Path, client: Callable[[str], Path]
) -> None:
    """The hatchery integration, unmodified: the loss falls and the adapter is saved."""
    root = served.parent
    remote = {
        **BASE,
        "plugins": ["axolotl.integrations.hatchery.HatcheryPlugin"],
        "base_model": service_http_jobs.BASE,
        "hatchery": {"backend": "tinker", "lora_rank": 4},
        "output_dir": "remote",
        "lr_scheduler": "constant",
        "max_steps": 6,
        "use_tensorboard": False,
    }
    remote = {k: v for k, v in remote.items() if k != "protrain_auto_memory"}
    path = root / "remote.yaml"
    path.write_text(yaml.safe_dump(remote))
    with server(served) as address, (root / "remote.log").open("w") as log:
        job, given = service_http_jobs.remote_training, (str(path), address)
        trained = Fork(
            job, str(client("0.38.0")), *given, folder=root, stdout=log, stderr=log
        )
        assert trained.wait(300) == 0, (root / "remote.log").read_text()[-4000:]
    words = (root / "remote.log").read_text()
    losses = [
        float(part.split()[0]) for part in words.split("loss/tok=")[1:] if part.split()
    ]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert list((root / "state").glob("*/weights/final/optimizer.safetensors"))


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.full)])
def test_malformed_requests_change_nothing(served: Path, count: int) -> None:
    """Whatever a field is, the answer is not a 500, nor has a weight changed."""
    found = call(service_http_jobs.attacked, served, count, at=served.parent)
    refused = sum(n for status, n in found["statuses"].items() if 400 <= status < 500)
    assert not found["changed"]
    assert refused > count / 3, found
    assert all(status < 500 for status in found["statuses"]), found


def test_misuse_of_the_protocol_is_answered(served: Path) -> None:
    """What was taken for something else, waited for ever, or filled the memory."""
    told = call(service_http_jobs.misused, served, at=served.parent)
    for what, (status, words) in {
        "rate": (422, "adam_params.learning_rate"),
        "shape": (422, "one value a token"),
        "a pass after": (200, "a:3"),
        "its answer": (200, "loss:sum"),
        "its wait": (408, "seq_id 4 of a has not arrived"),
        "saved": (200, "tinker://a/weights/x"),
        "otherwise": (422, "another request of this number"),
        "kept": (200, "is there already"),
        "replaced": (200, "tinker://a/weights/x"),
        "ttl": (422, "ttl_seconds: Input should be greater"),
        "unnamed": (422, "kind: Input should be 'snapshot'"),
        "NUL": (422, "cannot be a name"),
        "up": (422, "cannot be a name"),
        "long": (422, "cannot be a name"),
        "token 7.5": (422, "are not integers"),
        "alpha": (422, "lora_config.alpha"),
        "optimizer": (422, "this server trains by adamw_torch_fused"),
        "AdamW": (200, "s:train:0:0"),
        "cut": (422, "not one zstd"),
        "two": (422, "not one zstd"),
        "bomb": (413, "the body is more"),
        "rows": (422, "100000 rows; at most"),
        "deep": (422, "recursion limit"),
        "junk": (422, "forward_input.data.0"),
        "chunked": (413, "the body has more than"),
        "large poll": (413, "the body has more than 65,536 bytes"),
        "packed poll": (413, "the body is more than 65,536 bytes"),
        "beyond": (422, "its indices are none of CSR"),
        "page": (403, "browsers"),
        "damaged": (422, "is damaged"),
    }.items():
        assert told[what][0] == status and words in told[what][1], (what, told[what])
    assert (told["slow"], told["gone"]) == (408, 408)
    assert (told["alive"], told["ended"]) == (200, 503)


def test_no_error_leaves_a_service_that_answers_nobody(served: Path) -> None:
    """The thread that trains was gone, requests waited for ever, and all was said to be
    well."""
    told = call(service_http_jobs.broken, served, at=served.parent)
    assert all("EOFError('cut')" in error for error in told["errors"]), told["errors"]
    assert told["kept"] and not told["after"] and told["samples"] == 1
    for what in ("undone", "ended"):
        assert told[f"{what} health"] == [200, 503], what
        assert told[what][1] == "the server has stopped.", what
    # what its memory has become nobody can save
    assert "what these have learned is lost: b" in told["undone lost"]
    assert not told["ended lost"] and told["saved"]


@pytest.fixture(scope="module")
def numbered(served: Path) -> dict[str, Any]:
    return call(service_http_jobs.numbered, served, at=served.parent)


@pytest.mark.parametrize("what", service_http_jobs.NUMBERS)
def test_a_request_that_cannot_be_uses_its_number_up(
    numbered: dict[str, Any], what: str
) -> None:
    """Each later request of the model would wait for it, for ever."""
    status, said, (answered, future) = numbered[what]
    assert 400 <= status < 500 and said["error"], said
    assert answered == 200 and future["category"] == "user", future
    status, (answered, result) = numbered["after"]
    assert (status, answered) == (200, 200) and "loss:sum" in result["metrics"]


def test_who_calls_and_how_much_is_checked(served: Path) -> None:
    """Pages of other sites would train here, and one client fill the host."""
    told = call(service_http_jobs.called_otherwise, served, at=served.parent)
    good = ("loopback", "by name", "IPv6", "given", "allowed", "anywhere")
    bad = ("rebound", "as an address", "none", "elsewhere", "not allowed")
    for what in (*good, *bad, "anywhere rebound"):
        for route in ("healthz", "api/v1/status"):
            assert told[f"{what} {route}"] == (200 if what in good else 403), what
    assert told["no key"] == 403
    assert (told["bearer"], told["no bearer"]) == (200, 401)
    accepted, refused = told["waiting"]
    # the one that they wait for comes last: half of the room is its own
    assert accepted > 2 and refused > 3 and told["used"] < 1 << 19, told
    assert told["retry"][0] == "1" and "--request-memory" in told["retry"][1]
    assert told["large"] == 413 and told["left"] == 0
    assert told["sparse"][0] == 413 and "2,329,536 bytes" in told["sparse"][1]
    assert told["a poll without room"] == 200
    status, lines = told["polled"]
    assert status == 200 and "/optim_step 200" in lines and "retrieve" not in lines


def test_the_status_of_a_server_needs_no_torch() -> None:
    """It took 20 seconds of imports for one GET."""
    code = (
        "import sys, axolotl.integrations.protrain.cli.status as status\n"
        "assert status.status_text\n"
        "print(*{'torch', 'transformers', 'fastapi', 'pydantic'} & sys.modules.keys())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not ended.stdout.strip()


def test_the_status_of_nobody_says_where_to_ask() -> None:
    with pytest.raises(ConfigError, match="nobody answers there .*refused.*printed"):
        status_text("http://127.0.0.1:1")


def test_the_status_of_another_program_says_so() -> None:
    bodies: list[bytes | None] = [None, b"<html>", b"{}", b"[]"]

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if bodies[0] is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(bodies[0])

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        while bodies:
            Thread(target=server.handle_request, daemon=True).start()
            said = (
                "no server of this package" if bodies[0] else "answered 404 .*another"
            )
            with pytest.raises(ConfigError, match=said):
                status_text(f"http://127.0.0.1:{server.server_port}")
            del bodies[0]
    with pytest.raises(ConfigError, match="no server of this package .*port"):
        status_text("http://127.0.0.1:80x")


def test_a_stop_finishes_what_runs_and_saves(served: Path) -> None:
    """An update that was answered, or that runs when SIGTERM comes, is in `_last`; and
    until then nobody else gets the folder, whose evicted adapters it would remove."""

    def post(route: str, **body: Any) -> Any:
        answer = httpx.post(f"{address}/api/v1/{route}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    with server(served) as address:
        session = post("create_session")["session_id"]
        named = {"session_id": session, "model_seq_id": 0}
        created = {"base_model": service_http_jobs.BASE, "lora_config": {"rank": 2}}
        model = post("create_model", **named, **created)["model_id"]
        weights = served.parent / "state" / model / "weights"
        update = {"model_id": model, "adam_params": {"learning_rate": 0.01}}
        row = service_http_jobs.wire(1)[:1]
        given = {"loss_fn": "cross_entropy", "data": row}
        passed = {"model_id": model, "forward_backward_input": given}
        post("forward_backward", **passed, seq_id=1)
        post("optim_step", **update, seq_id=2)
        done = post("retrieve_future", request_id=f"{model}:2")
        assert "grad_norm" in done["metrics"]
        given["data"] = row * 400
        post("forward_backward", **passed, seq_id=3)
        with served.with_name("second.log").open("w") as words:
            job = service_http_jobs.serve
            second = Fork(job, served, folder=served.parent, stderr=words)
        assert second.wait(120) == 3
        assert "another server uses it" in served.with_name("second.log").read_text()
        given["data"] = row * 401
        post("forward_backward", **passed, seq_id=4)
    assert load_file(weights / "_last/optimizer.safetensors")["steps"].max() == 1


def test_an_address_of_ipv6_is_listened_at(served: Path) -> None:
    """It was taken for one of IPv4, and refused."""
    with server(served, "--host", "::1", host="[::1]") as address:
        assert httpx.get(f"{address}/healthz", timeout=60).status_code == 200


@pytest.mark.full
def test_fifty_clients_are_answered(served: Path) -> None:
    """At once, in the wrong order and twice, as if each were alone."""
    found = call(service_http_jobs.at_once, served, 50, at=served.parent)
    assert found["refused"] == 401
    assert len(found["many"]) == 50
    assert all(client == found["alone"] for client in found["many"][::5])
