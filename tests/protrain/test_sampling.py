"""Sampling with adapters of the service: tokens, log-probabilities, turns and sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sampling_jobs
from fork_server import call

from axolotl.integrations.protrain.service.turns import TENSOR_BYTES

FULL = pytest.mark.full
FAMILIES = [
    "llama",
    pytest.param("mistral", marks=FULL),
    "gemma3",
    pytest.param("mixtral", marks=FULL),
    pytest.param("qwen3", marks=FULL),
]
"""Those that read as far back as they like, and those that do not."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of a server of a tiny Llama."""
    root = tmp_path_factory.mktemp("served")
    return call(sampling_jobs.config_of, root, "llama", {}, at=root)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_samples_are_those_of_generate(tmp_path: Path, family: str) -> None:
    """Other places, masks, scales, or layers that stay on without an adapter, would give
    other log-probabilities in the last bits."""
    path = call(sampling_jobs.config_of, tmp_path, family, {}, at=tmp_path)
    found = call(sampling_jobs.as_generate, path, at=tmp_path)
    for what in ("adapter", "base"):
        assert found[what] == found[f"plain {what}"], what
    assert found["adapter"] != found["base"]


@FULL
@pytest.mark.parametrize(
    "keys", [{"bf16": True}, {"adapter": "qlora", "load_in_4bit": True}]
)
def test_bases_of_few_bits_sample(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Samples would be made in another dtype than the adapter has learned in."""
    path = call(sampling_jobs.config_of, tmp_path, "llama", keys, at=tmp_path)
    found = call(sampling_jobs.choices, path, at=tmp_path)
    assert found["again"] and found["shared"] and found["apart"] < 0.1


@pytest.mark.parametrize(("room", "at_once"), [("1GiB", 64), ("3MiB", 22)])
def test_waves_are_those_of_the_plan(
    tmp_path: Path, served: Path, room: str, at_once: int
) -> None:
    """A wave of more rows would take what the plan has not, one of fewer would fetch the
    base more often, and so would one for which nothing is held."""
    keys = {"protrain_capacity_bytes": room}
    path = call(sampling_jobs.config_of, tmp_path, "llama", keys, at=tmp_path)
    found = call(sampling_jobs.waves, path, at=tmp_path)
    assert found["plan"] == (at_once, (1,))
    assert max(found["rows"]) == at_once and found["held"] == {(1,)}
    assert "Answers: 64 sequences" in found["table"] and "every" not in found["table"]
    # who shares a wave has no part in what is drawn
    plain = call(sampling_jobs.waves, served, at=served.parent)
    assert found["samples"] == plain["samples"]


def test_choices_are_what_was_asked_for(served: Path) -> None:
    """Rows that share a random stream would depend on one another; log-probabilities
    after temperature would be no ratio to a pass."""
    found = call(sampling_jobs.choices, served, at=served.parent)
    assert found.pop("alike") == 4
    assert found.pop("both") == {0, 1}
    assert found.pop("apart") < 1e-5
    assert all(found.values()), found


def test_samples_end_where_they_should(served: Path) -> None:
    """A text whose letters are several tokens was overlooked, or a token too many made."""
    found = call(sampling_jobs.stopped, served, at=served.parent)
    for what in ("token", "sequence", "text"):
        (length, reason), wanted = found[what]
        assert (length, reason) == (wanted, "stop"), what
    assert found["most"] == (3, "length")
    # as many as are read, and the last one
    assert found["sequence_len"] == ((62, "length"), (1, "length"))
    assert found["end"] == (3, "stop") and found["beside"] == (3, "stop")
    assert found["no end"] == (20, "length")


def test_prompts_are_scored_as_a_pass_does(served: Path) -> None:
    """Bits that differ would be a ratio other than 1 where nothing has changed."""
    found = call(sampling_jobs.scored, served, at=served.parent)
    for what in ("one", "many"):
        assert all(found[what]) and all(found[f"first {what}"]), what
        assert all(found[f"twice {what}"]), what
        assert found[f"top {what}"] == ([9, 3], 0)
    assert found["tokens one"] == found["tokens many"]
    assert found["one token"] == [True]
    assert found["last"] and found["wanted"] and found["others"] == 1
    # nor is more kept than is counted
    assert found["logits"][0] == found["logits"][1] > 0
    assert found["tops"] > 4 * 2 * TENSOR_BYTES + 8192 and not found["prompt kept"]


def test_what_waits_on_the_host_is_counted(tmp_path: Path) -> None:
    """States of linear attention lie elsewhere than keys and values."""
    family = "qwen3_5_text"
    path = call(sampling_jobs.config_of, tmp_path, family, {}, at=tmp_path)
    found = call(sampling_jobs.aside, path, at=tmp_path)
    if found is None:
        pytest.skip("plain generation fails too: flash-linear-attention asks for a GPU")
    counted, kept = found
    assert counted == kept


def test_a_session_keeps_the_weights_it_was_made_with(served: Path) -> None:
    """Trained, replaced, unloaded or evicted, they would be others in silence."""
    found = call(sampling_jobs.kept, served, at=served.parent)
    assert found["apart"] == 3
    for when in ("trained", "replaced", "newer", "unloaded"):
        assert found[when], when
    assert "there is a session own already" in found["taken"] and found["not written"]
    assert "own samples with other weights" in found["no base"]
    assert found["on the disk"] > 0
    assert "was saved without an optimizer" in found["trains"]
    assert not found["without"]


def test_sessions_that_nobody_uses_are_let_go(served: Path) -> None:
    """A loop that makes one each step would fill the disk; one that somebody waits for
    would be gone, or never sample again."""
    found = call(sampling_jobs.many_sessions, served, at=served.parent)
    assert not found["busy"] and not found["last"] and not found["again"]
    assert "there is no session s0, or no longer" in found["first"]
    assert found["folders"] == 4 and not found["closed"]
    assert all("cannot be read" in why for why in found["removed"])
    assert found["left"] == 0


def test_training_and_sampling_starve_neither(served: Path) -> None:
    """A long sample would hold up a training for all its waves, or a line of training a
    sample; and a wave that goes aside would come back with other numbers."""
    found = call(sampling_jobs.turns, served, at=served.parent)
    assert found["same losses"] and found["same samples"]
    assert found["same read again"] and found["left"]
    most, allowed = found["most"]
    assert 0 < most <= allowed, found
    assert found["before"] > 1 and found["before the last"]


def test_a_wave_without_room_is_halved(served: Path) -> None:
    """Rows would begin anew, be lost, or take the server with them."""
    found = call(sampling_jobs.short_of_memory, served, at=served.parent)
    assert found["few"] and found["one"] and found["held"] == [True, False]
    assert found["choosing"]
    # of those that are read at once, one has no room
    assert [bool(why) for why in found["read"]] == [False, True, False]
    assert "no room to read 5 tokens" in found["read"][1]
    assert "cannot be read" in found["lost"]
    assert found["aside"] > found["idle"] == found["left"]
    assert "the device has no room for one row of 3 tokens" in found["none"]
    assert not found["after"] and not found["a pass"]


def test_who_waits_is_told_when_a_server_ends(served: Path) -> None:
    """A server that is told to stop would sample to the end, or leave somebody waiting."""
    found = call(sampling_jobs.ends, served, at=served.parent)
    told, few = found["cancelled"]
    assert "the client has gone" in told and few
    assert all("the server has stopped" in why for why in found["ended"])
    assert found["twice"] and "another request of this number" in found["otherwise"]
    assert found["seconds"] < 20 and "the server is stopping" in found["later"]


@pytest.fixture(scope="module")
def told(served: Path) -> dict[str, str]:
    return call(sampling_jobs.refused, served, at=served.parent)


@pytest.mark.parametrize("what", sampling_jobs.WRONG)
def test_what_cannot_be_sampled_is_refused(told: dict[str, str], what: str) -> None:
    """An index out of range would end all requests on the device."""
    assert sampling_jobs.WRONG[what][1] in told[what]
    assert not told["after"]


def test_paths_to_sample_from_are_those_of_saves(told: dict[str, str]) -> None:
    assert "no weights to sample with at sampler_weights/no of c" in told["no path"]
    assert "is not tinker://" in told["a file"]


def test_text_is_shown_as_it_stays(served: Path) -> None:
    """Half a letter would be shown as another, and half a stop text at all."""
    found = call(sampling_jobs.written, served.parent, at=served.parent)
    whole, shows = found["cut"]
    assert whole.endswith("日本語 ") and not shows
    assert found["first"] == "a fünfte "
    assert found["all"] and found["begun"] and found["at the end"]
