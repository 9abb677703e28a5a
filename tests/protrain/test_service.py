"""The training service: adapters over one base, in turns, are the same ones alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import service_jobs
import torch
import yaml
from axolotl_jobs import LORA, Job, Result, job, overrides
from fork_server import Fork, call
from matrix_bases import FP8
from service_jobs import RECORDED, SERVED

from axolotl.integrations.protrain.core.errors import RequestError
from axolotl.integrations.protrain.service.adapters import folder_of
from axolotl.integrations.protrain.service.turns import (
    MOST_ANSWERS,
    MOST_WAITING,
    TENSOR_BYTES,
    Ticket,
    Turns,
)

Run = Callable[[Job], Result]

PLAINLY = {"plugins": [*RECORDED["plugins"], "fp8_plugin.Fp8Plugin"]}
QUICK = ("bf16", "packed", "adafactor", "adamw_bnb_8bit")
LIKE = {
    "llama": job("llama", LORA, RECORDED),
    "bf16": job("llama", LORA, RECORDED, {"bf16": True}),
    "padded to the longest": job(
        "qwen3", LORA, RECORDED, {"pad_to_sequence_len": False}
    ),
    "4 bits": job("llama", LORA, RECORDED, {"adapter": "qlora", "load_in_4bit": True}),
    # the plain run has it unpacked
    "packed": job("qwen3-fp8", LORA, RECORDED, FP8, PLAINLY),
}
# bitsandbytes keeps state of small weights in 32 bits
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: {"lora_r": 64} for name in ("adamw_bnb_8bit", "lion_8bit")},
    **{name: {"lora_r": 64} for name in ("ademamix_8bit", "rmsprop_bnb_8bit")},
    "ademamix": {"optim_args": {"beta3": 0.99, "alpha": 2.0}},
    "sgd": {"optim_args": "momentum=0.9"},
    "rmsprop": {"optim_args": {"momentum": 0.5, "centered": True}},
    **dict.fromkeys(
        "adamw_torch paged_adamw_32bit lion_32bit rmsprop_bnb adafactor adagrad".split(),
        {},
    ),
}
LIKE |= {
    name: job("llama", LORA, RECORDED, {"optimizer": name, **keys})
    for name, keys in OPTIMIZERS.items()
}


@pytest.mark.parametrize(
    "like",
    [
        pytest.param(like, id=name, marks=() if name in QUICK else pytest.mark.full)
        for name, like in LIKE.items()
    ],
)
def test_an_adapter_is_that_of_axolotl_train(run: Run, like: Job) -> None:
    """Rows padded otherwise, losses summed otherwise, adapters drawn otherwise, or another
    AdamW would all differ in the last bits."""
    plain = run(like)
    assert not plain.error, plain.error
    root = plain.folder.parent.parent
    config = root / f"served-{like.name}.yaml"
    keys = {**like.settings, **SERVED, "lora_r": like.settings["lora_r"]}
    keys |= {k: like.settings[k] for k in ("adapter",)}
    config.write_text(yaml.safe_dump({**keys, "output_dir": f"served-{like.name}"}))
    history = [entry for entry in plain.history if "loss" in entry]
    losses, weights = call(
        service_jobs.train_as, plain.folder, history, str(config), at=root
    )
    wanted = [entry["grad_norm"] for entry in history]
    assert [norm for _, norm in losses] == pytest.approx(wanted, rel=1e-6)
    for name, tensor in plain.weights.items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.full)
        for name in OPTIMIZERS
    ],
)
def test_state_of_an_optimizer_moves_and_is_saved(tmp_path: Path, name: str) -> None:
    """A part of the state that a switch, the disk or a save forgets, or a count that begins
    anew, is another number in the next step."""
    keys = {"optimizer": name, **OPTIMIZERS[name]}
    path = call(service_jobs.config_of, tmp_path, keys, at=tmp_path)
    found = call(service_jobs.optimized, path, at=tmp_path)
    assert not found["b-alone"] and not found["b-again"], found
    assert found["away"]
    assert ("torch.uint8" in found["dtypes"]) is ("8bit" in name)


def test_a_state_goes_on_by_its_own_optimizer(tmp_path: Path) -> None:
    """Moments that mean something else, or settings that nobody reads, would be taken in
    silence."""
    path = call(service_jobs.config, tmp_path, at=tmp_path)
    other = tmp_path / "other.yaml"
    keys = {**yaml.safe_load(path.read_text()), "optimizer": "adafactor"}
    other.write_text(yaml.safe_dump({**keys, "output_dir": "other"}))
    told = call(service_jobs.of_another_optimizer, path, other, at=tmp_path)
    assert (
        "has a state of adamw, and this server trains by adafactor" in told["its own"]
    )
    assert not told["earlier"] and not told["without"] and not told["step"], told
    for key in ("beta1", "beta2", "eps"):
        assert f"adam_params.{key}: adafactor, the optimizer of" in told[key], key
    assert told["status"] == "adafactor"


def test_a_base_on_the_disk_serves_as_one_in_memory(tmp_path: Path) -> None:
    """A base that is read anew for each request, or of which a chunk is late, would give
    other losses."""
    path = call(service_jobs.config_of, tmp_path, overrides(0, 2), at=tmp_path)
    in_memory, from_disk = call(service_jobs.from_a_disk, str(path), at=tmp_path)
    assert in_memory[0] == from_disk[0]
    assert (in_memory[1], from_disk[1]) == (False, True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of a server of a tiny Llama."""
    root = tmp_path_factory.mktemp("served")
    return call(service_jobs.config, root, at=root)


def test_adapters_in_turns_are_those_alone(served: Path) -> None:
    """A weight, moment, step or gradient that stays behind in a switch, or that the disk
    loses, is another number in the next step."""
    job = service_jobs.interleaved
    differing, counts = call(job, served, at=served.parent)
    assert not differing
    # some had to leave
    assert counts["away"] > 0


def test_a_switch_moves_its_adapter_alone(served: Path) -> None:
    """Neither the base moves, nor does memory grow."""
    found = call(service_jobs.switched, served, at=served.parent)
    for what in ("fetched", "host", "device"):
        assert found[what][0] == found[what][1], what
    assert found["moved"][1] - found["moved"][0] == 499 * sum(found["a switch"])


def test_the_next_adapter_comes_while_one_computes(tmp_path: Path) -> None:
    """A place that is filled while it computes or leaves, an adapter that computes before
    it is there, a second place that the plan does not know, or one more each time."""
    # waits for slots would order copies of adapters, too
    keys = overrides(4, 0)
    path = call(service_jobs.config_of, tmp_path, keys, at=tmp_path)
    found = call(service_jobs.ahead, path, at=tmp_path)
    assert not found["differing"]
    assert found["prefetched"] == found["switches"] - 1 >= 200
    assert found["bytes"][0] == found["bytes"][1]
    assert found["bytes"][0][0] <= found["planned"]


def test_what_is_replaced_is_not_copied_any_more(served: Path) -> None:
    """Memory of an adapter that is freed while a copy reads or writes it, or a pass that
    reads what comes back after a refused update."""
    told = call(service_jobs.replaced, served, at=served.parent)
    assert "not finite" in told


def test_a_pass_that_runs_out_of_memory_leaves_no_trace(served: Path) -> None:
    """It is repeated under a smaller plan, else refused; gradients that were there before
    would count twice, or be gone."""
    errors, equal, notches, lower = call(
        service_jobs.short_of_memory, served, at=served.parent
    )
    # what is planned for samples is nothing that a training had
    assert lower
    assert errors[:2] == ["", ""] and "no room for this request" in errors[2]
    assert all(equal) and notches[:2] == [0, 1]


def test_an_update_that_runs_out_of_memory_leaves_no_trace(served: Path) -> None:
    """Half of it would stay on the device, and go to the host with the next switch."""
    told, differing = call(
        service_jobs.update_short_of_memory, served, at=served.parent
    )
    assert "no room for an update: Tried to allocate 1024 bytes. Its gradients" in told
    assert not differing


def test_a_loss_that_is_not_finite_is_refused(served: Path) -> None:
    """Its gradients would be NaN in every weight, and JSON has no word for it."""
    error, same, gone = call(service_jobs.not_finite, served, at=served.parent)
    assert "the loss is" in error and same
    # rows of a pass, whose memory nobody counts any longer
    assert gone


def test_an_id_that_comes_again_is_a_new_model(served: Path) -> None:
    """The one that was unloaded would answer, or refuse other layers than its own."""
    made, lacking = call(service_jobs.begun_again, served, at=served.parent)
    assert made == "('mlp', 'unembed')"
    assert lacking == "model_id: b could not be created."


def test_a_model_may_load_at_any_time(served: Path) -> None:
    """Gradients of before, moments or a step that stay, or a request that overtakes the
    load, would be another model than one that is created from the state."""
    found = call(service_jobs.loaded, served, at=served.parent)
    assert not any(found[f"optimizer: {whole}"] for whole in (True, False)), found
    assert "there is no state" in found["none"][0] and not found["refused"]
    for what in ("rank", "alpha"):
        assert "Create a model from the state instead" in found[what][0]
        words = found[what][0].partition(" has ")[2].partition(". ")[0]
        state, _, model = words.partition(", and b ")
        assert state != model


def test_an_export_is_an_adapter_of_peft(served: Path) -> None:
    """Other names, scale or layers in adapter_config.json would give other logits. Rows of
    other shapes do, too, in the last bits: products sum up in another order."""
    found = call(service_jobs.exported, served, at=served.parent)
    assert not any(found["padded"]), found
    assert max(found["alone"]) < 1e-6, found


def test_one_candidate_is_one_target(served: Path) -> None:
    """Soft targets go another way through the logits; filled up to the widest row of a
    micro-batch they would count what nobody weighs."""
    found = call(service_jobs.softened, served, at=served.parent)
    assert found["losses"][0] == found["losses"][1]
    assert all(found["logprobs"]) and all(found["of few"])
    assert not found["differing"] and not found["of few, differing"]
    for what in ("wide", "flat", "none"):
        assert "or (tokens, K) of all, K from 1 to 64" in found[what], what
    assert found["sampled"].endswith("allowed is one value a token, (12,)")


def test_soft_targets_teach_as_in_plain_peft(served: Path) -> None:
    """Weights that meet another token, or one that is padding, would be another loss."""
    found = call(service_jobs.distilled, served, at=served.parent)
    assert found["losses"] == found["plain"] and not found["differing"], found


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.full)])
def test_each_save_outlives_its_process(served: Path, kills: int) -> None:
    """Killed while it writes, a server leaves what was saved before, or all of the new."""
    chance = random.Random(kills)
    for _ in range(kills):
        told = served.parent / "told"
        told.unlink(missing_ok=True)
        running = Fork(service_jobs.save_for_ever, served, told, folder=served.parent)
        while not told.exists() or told.read_text().count("\n") < 4:
            assert running.poll() is None
            time.sleep(0.02)
        time.sleep(chance.random() / 4)
        running.kill()
        running.wait()
        lines = (line.split() for line in told.read_text().splitlines())
        last = {name: int(number) for name, number in lines}
        assert not call(service_jobs.resumed, served, last, at=served.parent)


@pytest.fixture(scope="module")
def derived(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a service says to ordinary YAMLs, by Axolotl's own validation."""
    root = tmp_path_factory.mktemp("derived")
    path = call(service_jobs.config, root, at=root)
    return call(service_jobs.derived, path, at=root)


@pytest.mark.parametrize("name", service_jobs.DERIVED)
def test_an_ordinary_yaml_serves(derived: dict[str, str], name: str) -> None:
    """Axolotl refused most of them beside the keys of a service, in a traceback."""
    keys, refused = service_jobs.DERIVED[name]
    told = derived[name]
    if refused:
        assert refused in told and "\n" not in told, told
    else:
        # what means something to a service
        means = {"optimizer", "load_in_8bit", "lora_qkv_kernel", "chat_template"}
        # without an adapter the base itself trains
        means |= {"unfrozen_parameters"} if name == "no adapter" else set()
        assert {*told.split()} <= means & {*keys}, told


def test_a_state_is_loaded_over_its_own_base(tmp_path: Path) -> None:
    """Over one of equal shapes it would be another model, in silence."""
    path = call(service_jobs.config, tmp_path, at=tmp_path)
    told = call(service_jobs.over_another, path, at=tmp_path)
    for part in ("weights", "config"):
        assert f"another base, models/llama: its {part} differ" in told[part]
    assert not told["the same"] and not told["earlier"] and not told["in other files"]


@pytest.mark.full
def test_experts_that_peft_adapts_are_refused(tmp_path: Path) -> None:
    """They made a server that could create no model and gave no reason."""
    told, loss = call(service_jobs.over_experts, str(tmp_path), at=tmp_path)
    assert "PEFT puts LoRA on this model's experts" in told
    assert "kv_b_proj, lm_head, o_proj" in told and "down_proj" not in told
    assert loss > 0


def test_names_of_clients_are_not_those_of_the_store(served: Path) -> None:
    """A state of such a name could be saved once, and strewed its files then."""
    found = call(service_jobs.names, served, at=served.parent)
    held = found.pop("")
    for name, told in found.items():
        if name.startswith("_"):
            assert all("cannot be a name" in why for why in told), name
        else:
            assert told == ["", ""], name
    assert held == ["old-replaced", "replaced"]


def asking(asks: str, nbytes: int = 0) -> Ticket:
    return Ticket(None, asks, nbytes)


def refused() -> Ticket:
    ticket = Ticket(None, None)
    ticket.set_exception(RequestError("cannot be"))
    return ticket


def test_requests_of_a_model_run_by_number() -> None:
    """Chunks arrive the last one first, and a refused one leaves no gap."""
    turns = Turns()
    first, third = turns.begin("m", asking("0")), asking("2")
    assert turns.take() is first
    turns.add("m", 3, asking("3"))
    turns.add("m", 2, third)
    assert turns.peek() is None
    turns.add("m", 1, refused())
    assert turns.add("m", 2, asking("2")) is third
    assert [turns.take(), turns.peek()] == [third, "m"]
    assert turns.add("m", None, asking("4")).number == 4


def test_models_take_turns() -> None:
    """One that sends a hundred requests does not keep another one waiting."""
    turns, tickets = Turns(), {}
    for model, count in (("busy", 100), ("other", 2)):
        first = turns.begin(model, asking("first"))
        rest = [turns.add(model, None, asking("more")) for _ in range(count)]
        tickets[model] = [first, *rest]
    taken = [turns.take() for _ in range(4)]
    busy, other = tickets.values()
    assert taken == [busy[0], other[0], busy[1], other[1]]


def test_a_gap_cannot_fill_the_memory() -> None:
    turns = Turns()
    turns.begin("m", refused())
    with pytest.raises(RequestError, match="may wait"):
        turns.add("m", MOST_WAITING + 1, asking("far"))


def test_requests_that_wait_are_bounded_in_bytes() -> None:
    """One client could fill the host, whose memory is given back when they have run or
    their model is gone."""
    turns = Turns(1000)
    first = turns.begin("m", asking("0", 400))
    turns.begin("other", asking("0", 400))
    with pytest.raises(RequestError, match="Wait for answers") as told:
        turns.add("m", 1, asking("1", 300))
    assert told.value.status == 429
    with pytest.raises(RequestError, match="fewer rows") as told:
        turns.add("m", 1, asking("1", 1001))
    assert told.value.status == 413
    assert turns.take() is first
    first.set_result("done")
    # that number was not used up
    turns.add("m", 1, asking("1", 300))
    assert turns.used_bytes == 700
    turns.close("m")
    assert turns.used_bytes == 400
    turns.close("other")
    assert turns.used_bytes == 0


def test_answers_make_room_for_requests() -> None:
    """Those of many passes that nobody fetches again would fill the host, too."""
    turns, rows = Turns(10_000), [torch.zeros(1000)]
    turns.begin("m", refused())
    tickets = [turns.add("m", None, asking("pass", 1000)) for _ in range(3)]
    for ticket in tickets:
        assert turns.take() is ticket
        ticket.set_result((1.0, rows))
    assert turns.used_bytes == 3 * (4000 + TENSOR_BYTES)
    turns.reserve(1)
    with pytest.raises(RequestError, match="answered long ago"):
        turns.answer("m", 1)
    assert turns.answer("m", 3).done()
    running = turns.add("m", None, asking("pass", 0))
    assert turns.take() is running
    turns.close("m")
    running.set_result((1.0, rows))
    assert turns.used_bytes == 1


def test_answers_go_only_where_that_makes_room() -> None:
    """A request that is refused all the same would take them from those who wait."""
    turns = Turns(10_000)
    turns.begin("m", refused())
    answered = turns.add("m", None, asking("pass", 1000))
    assert turns.take() is answered
    answered.set_result((1.0, [torch.zeros(1000)]))
    waiting = [turns.add("m", None, asking("waits", 5000))]
    with pytest.raises(RequestError, match="Wait for answers"):
        turns.reserve(5001)
    assert turns.answer("m", 1) is answered
    # nor are those that wait counted among answers
    waiting += [turns.add("m", None, asking("more")) for _ in range(MOST_ANSWERS)]
    assert turns.answer("m", 1) is answered
    turns.reserve(5000)
    with pytest.raises(RequestError, match="answered long ago"):
        turns.answer("m", 1)
    assert turns.used_bytes == 10_000


def test_requests_that_run_ahead_leave_room() -> None:
    """The one that they wait for would never get in."""
    turns = Turns(1000)
    turns.begin("m", refused())
    third = turns.add("m", 2, asking("2", 400))
    with pytest.raises(RequestError, match="for one which has not arrived") as told:
        turns.add("m", 3, asking("3", 400))
    assert told.value.status == 429
    missing = turns.add("m", 1, asking("1", 600))
    for ticket in (missing, third):
        assert turns.take() is ticket
        ticket.set_result("done")
    assert turns.add("m", 3, asking("3", 400)) is turns.take()


def test_a_refused_request_is_kept_until_its_turn() -> None:
    """Forgotten among many answers, its number would be waited for."""
    turns = Turns()
    turns.begin("m", refused())
    turns.add("m", 2, refused())
    last = [turns.add("m", number, refused()) for number in range(3, MOST_ANSWERS + 9)]
    assert turns.missing("m", last[-1].number) == 1
    waiting = turns.add("m", 1, asking("1"))
    assert turns.take() is waiting
    assert turns.add("m", None, asking("more")) is turns.take()


@pytest.mark.parametrize(
    "path",
    [
        "tinker://m/weights/../../x",
        "tinker://../weights/x",
        "tinker://m/weights/.hidden",
        "tinker://m/other/x",
        "/etc/passwd",
        "tinker://m/weights/x\n",
    ],
)
def test_a_path_stays_in_its_folder(path: str) -> None:
    with pytest.raises(RequestError, match="path:"):
        folder_of(Path("root"), path)


@pytest.fixture(scope="module")
def told(served: Path) -> dict[str, Any]:
    """What those are told who misuse a service, and what differs afterwards."""
    root = served.parent / "misused"
    root.mkdir()
    path = call(service_jobs.config, root, at=root)
    return call(service_jobs.misused, path, at=root)


@pytest.mark.parametrize(
    ("misuse", "words"),
    {
        "second server": "another server uses it",
        "id": "model_id: '../x' cannot be one",
        "no layers": "no layer cannot train",
        "eps": "eps",
        "rate": "learning_rate",
        "created otherwise": "has had another request",
        "sent otherwise": "has had another request",
        "another kind": "has had another request",
        "huge rate": "not finite",
        "unloaded": "g was unloaded",
        "after the end": "the server is stopping",
        "ranks": "WORLD_SIZE: the service trains on one rank",
        "lost": "what these have learned is lost: d-lost",
    }.items(),
)
def test_misuse_is_refused(told: dict[str, Any], misuse: str, words: str) -> None:
    """Each of them was taken, waited for ever, or lost what was learned in silence."""
    assert words in told[misuse]


def test_misuse_changes_nothing(told: dict[str, Any]) -> None:
    """A switch that forgets gradients would lose them, and a full disk an adapter."""
    for when in ("a huge rate", "a switch", "a full disk"):
        assert not told[f"after {when}"], when
    assert any("--folder: writing a checkpoint" in w for w in told["full disk"])
    assert not told["created alike"] and told["sent again"] and not told["drawn"]
    assert told["created again"] > 0 and not told["ended twice"]


def test_a_server_mends_what_one_before_it_left(told: dict[str, Any]) -> None:
    """Killed between two renames, a state has only its name of old."""
    assert told["killed"] == service_jobs.SPECS["c"][0]


def test_what_is_never_closed_is_saved(served: Path) -> None:
    """A script without `with` that ends would lose its adapter, or never end."""
    call(service_jobs.never_closed, served, at=served.parent)
    assert (served.parent / "state/f/weights/_last/state.json").is_file()


def test_threads_share_a_service(served: Path) -> None:
    """A pass of one thread would take the number of another one's creation."""
    numbers = call(service_jobs.together, served, at=served.parent)
    assert numbers == [*range(1, 81)]


def test_a_request_that_is_missing_is_named() -> None:
    turns = Turns()
    turns.begin("m", refused())
    turns.add("m", 3, asking("3"))
    assert turns.missing("m", 3) == 1 and turns.missing("m", 1) is None
