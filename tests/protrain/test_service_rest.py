"""Runs, checkpoints and sessions over HTTP: what lists, fetches and removes them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import service_jobs
import service_rest_jobs
from fork_server import call
from service_http_jobs import BASE
from service_server import TINKER_NEEDS, by_client, installed, server

from axolotl.integrations.protrain.service import client_sessions
from axolotl.integrations.protrain.service.client_sessions import ClientSessions


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    return call(service_jobs.config, root, at=root)


@pytest.mark.full
def test_the_command_line_of_tinker_lists_fetches_and_deletes(
    tmp_path: Path, served: Path
) -> None:
    """A field of another name or type, or an address that wants a key, would end the
    unmodified client, or it would fetch what PEFT cannot load."""
    folder = installed(tmp_path / "tinker", "tinker==0.38.0", *TINKER_NEEDS)
    given = {"TINKER_API_KEY": "tml-test", "HOME": str(tmp_path)}
    with server(served) as address:
        given["TINKER_BASE_URL"] = address
        told = by_client("tinker_rest.py", folder, given, BASE, str(tmp_path))
    path, sampled, other = told["paths"]
    runs = [one.split("/")[2] for one in (path, other)]
    listed = {one["training_run_id"]: one for one in told["runs"]["runs"]}
    assert listed.keys() == {*runs}
    assert told["run"] == listed[runs[0]]
    assert told["run"]["lora_rank"] == 4 and told["run"]["base_model"] == BASE
    assert told["run"]["user_metadata"] == {"purpose": "a test"}
    assert told["run"]["last_sampler_checkpoint"]["tinker_path"] == sampled
    assert "there is no model nobody" in told["no run"]
    paths = [one["tinker_path"] for one in told["list"]["checkpoints"]]
    # the newest first
    assert paths == [other, sampled, path]
    assert told["all"] == told["list"]
    assert [one["tinker_path"] for one in told["short"]["checkpoints"]] == [other]
    of_run = told["of run"]["checkpoints"]
    assert [one["tinker_path"] for one in of_run] == [sampled, path]
    assert told["info"]["user_metadata"] == {"score": "7"}
    assert told["info"]["lora_rank"] == 4 and told["info"]["expires_at"]
    saved = Path(told["download"]["destination"])
    assert call(
        service_rest_jobs.loads_in_peft, str(served), str(saved), at=served.parent
    )
    assert not (saved / "optimizer.safetensors").exists()
    assert told["kept"] is None and "no accounts" in told["publish"]
    assert told["delete"] == {"deleted_count": 2, "failed": []}
    assert "no longer" in told["again"]["failed"][0]["error"]
    # the export that was fetched is gone, too
    assert [one["tinker_path"] for one in told["left"]["checkpoints"]] == [path]
    assert told["page"] == 0 and told["base"] == BASE
    session = runs[0].split(":")[0]
    assert session in told["sessions"]
    assert {*told["session"]["training_run_ids"]} == {*runs}
    assert told["session"]["display_name"] == "Nightly Run 7"
    for asked, found in told["searched"].items():
        assert (session in found) is not asked.startswith("no "), asked
    pages = {one["session_id"]: one for one in told["pages"]}
    assert [*pages] == told["searched"]["all"] == told["sessions"]
    summary = pages[session]
    assert summary["checkpoints_count"] == 1
    assert summary["checkpoint_storage_bytes"] > 0 and summary["owner"]
    assert summary["user_metadata"] == {"team": "a"}
    reason = {"type": "success"}
    ended = {"type": "client_finished", "reason": reason, "detail": "done"}
    # the other one exported what was fetched
    assert told["ended"][-1] == ended


@pytest.mark.full
def test_an_older_client_fetches_an_archive(tmp_path: Path, served: Path) -> None:
    """Its command line wants one tar; a length that is wrong would cut it short."""
    folder = installed(tmp_path / "tinker", "tinker==0.24.1", *TINKER_NEEDS)
    given = {"TINKER_API_KEY": "tml-test", "HOME": str(tmp_path)}
    with server(served) as address:
        given["TINKER_BASE_URL"] = address
        told = by_client("tinker_archive.py", folder, given, BASE, str(tmp_path))
    saved = Path(told["destination"])
    assert call(
        service_rest_jobs.loads_in_peft, str(served), str(saved), at=served.parent
    )


def test_no_name_leads_out_of_the_folder(tmp_path: Path) -> None:
    """`..`, a pattern or a folder of the service's own in an address would delete or show
    what is nobody's state; an address that nobody signed would need no key."""
    path = call(service_jobs.config, tmp_path, at=tmp_path)
    found = call(service_rest_jobs.abused, path, at=tmp_path)
    assert not found["passed"] and not found["changed"], found
    assert len(found["statuses"]) > 300
    assert found["right"] == 200 and found["keyless"] == [401] * 4


def test_every_state_is_a_model_of_openai(tmp_path: Path) -> None:
    """A client that asks for the list would not find what it may sample with, or find what
    it may not."""
    path = call(service_jobs.config, tmp_path, at=tmp_path)
    told = call(service_rest_jobs.as_models, path, at=tmp_path)
    base, *states = told["listed"]
    assert base == BASE and [told["answers"][one] for one in states] == [200] * 3
    kinds = [state.split("/")[3] for state in states]
    assert kinds == ["external_weights", "sampler_weights", "weights"]
    assert told["retrieved"] == [200, 404] and told["created"] > 1_700_000_000


def test_what_is_used_is_not_deleted(tmp_path: Path) -> None:
    """A load that waits would find nothing, a session sample with other weights or none, a
    download be cut short, and a model that goes on lose what was saved of it last."""
    path = call(service_jobs.config, tmp_path, at=tmp_path)
    told = call(service_rest_jobs.in_use, path, at=tmp_path)
    assert told["sampled"][0] == 204 and told["tokens"] > 0
    assert told["gone"][0] == 404 and "or no longer" in told["gone"][1]
    status, words = told["waited for"]
    assert status == 409 and "a request of b waits to load or save" in words
    assert told["loaded"] == "tinker://a/weights/x"
    assert told["free"][0] == 204 and told["fetched"][0] == told["fetched"][1]
    assert told["last"][0] == 409 and "Unload it first" in told["last"][1]
    assert told["last of nobody"][0] == 204
    assert told["left"] == ["y"]


def test_sessions_are_searched_and_outlive_a_server(tmp_path: Path) -> None:
    """A page that begins one too early or late would show a session twice or never; a name
    that ends with the server could be searched for on the day itself only."""
    path = call(service_jobs.config, tmp_path, at=tmp_path)
    told = call(service_rest_jobs.searched, path, at=tmp_path)
    first, second, third = told["ids"]
    # the newest first; two that began at once have the order of their ids
    every = [third, *sorted((first, second), reverse=True)]
    assert told["pages"][1] == [[one] for one in every]
    assert told["pages"][2] == [every[:2], every[2:]]
    assert told["pages"][3] == told["pages"][4] == [every]
    assert told["cut"] == every[1:] and told["behind"] == []
    assert {*told["active"]} == {first, third} and told["quiet"] == []
    later = told["later"]
    assert [*later] == every and later[first]["status"] is None
    reason = {"type": "errored"}
    ended = {"type": "client_finished", "reason": reason, "detail": "errored"}
    assert later[second]["status"] == ended and told["errored"] == [second]
    assert later[third]["checkpoints_count"] == 1
    assert later[third]["user_metadata"] == {"n": "1"} and told["by words"] == [third]
    assert told["heard"] == [first]
    (bare,) = told["of states"]
    assert bare["session_id"] == third and bare["display_name"] is None
    assert bare["created_at"][:4] != "1970" and told["kept"] == (2, 2)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("kept")
    path = call(service_jobs.config, root, at=root)
    return call(service_rest_jobs.kept, path, at=root)


def test_words_about_models_and_states_are_kept(kept: dict[str, Any]) -> None:
    """They would be another state's, or gone when the server starts again."""
    listed, run = kept["listed"], kept["run"]
    assert listed["weights/x"]["user_metadata"] == {"k": "v"}
    assert listed["weights/y"]["user_metadata"] is None
    assert run["user_metadata"] == {"n": "1"}
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/y"
    again = kept["restarted"]
    assert again["user_metadata"] == {"n": "1"} and again["lora_rank"] == 2
    assert again["last_request_time"] == again["last_checkpoint"]["time"]


def test_states_go_when_their_time_is_over(kept: dict[str, Any]) -> None:
    """One without an end would go with the one that it has replaced, or one with an end
    stay until somebody lists."""
    ends = {name for name, one in kept["listed"].items() if one["expires_at"]}
    assert ends == {"weights/x", "sampler_weights/z", "external_weights/e"}
    kinds = {name: one["checkpoint_type"] for name, one in kept["listed"].items()}
    assert kinds["external_weights/e"] == "external"
    assert kept["after 60 s"] == ["sampler_weights/z", "weights/x", "weights/y"]
    assert kept["after 200 s"] == ["weights/x", "weights/y"]


def test_an_archive_has_every_file(kept: dict[str, Any]) -> None:
    """Padding that is miscounted would shift each file after the first."""
    assert kept["members"] == kept["files"] and kept["length"][0] == kept["length"][1]


def test_a_session_that_ends_leaves_nothing_unsaved(kept: dict[str, Any]) -> None:
    """What a client has not saved would be lost, or each download leave a model behind."""
    assert kept["unsaved"] == [204, True] and not kept["finished"]


@pytest.mark.parametrize("created", [1e300, -1e15, float("inf"), float("nan")])
def test_a_session_of_no_date_keeps_no_list_from_clients(
    created: float, tmp_path: Path
) -> None:
    (tmp_path / "damaged.json").write_text(json.dumps({"created": created}))
    (tmp_path / "whole.json").write_text(json.dumps({"created": 1.0}))
    assert [*ClientSessions(tmp_path).every()] == ["whole"]


def test_sessions_end_while_others_push_them_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_sessions, "MOST_KNOWN", 2)
    sessions = ClientSessions(tmp_path)

    def live(_: int) -> None:
        for _number in range(50):
            sessions.finish(sessions.begin(None, None), {"reason": "success"})

    with ThreadPoolExecutor(6) as clients:
        list(clients.map(live, range(6)))
    assert len(sessions.every()) == 2
