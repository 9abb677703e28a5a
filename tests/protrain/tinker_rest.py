"""An unmodified `tinker` client and its command line, in a process that has them: python
tinker_rest.py BASE FOLDER.

Trains two adapters and saves them, lists, searches, describes, fetches and deletes what is
there; prints what came out as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def command(*words: str) -> Any:
    """What `tinker` prints as JSON, or as text where that is none."""
    from click.testing import CliRunner
    from tinker.cli.__main__ import main_cli

    ended = CliRunner().invoke(main_cli, ["--format", "json", *words])
    if ended.exit_code:
        why = getattr(ended.exception, "details", None)
        return f"{ended.exit_code}: {ended.output} {ended.exception} {why}"
    try:
        return json.loads(ended.stdout)
    except ValueError:
        return ended.stdout


def searches(session: str) -> dict[str, Any]:
    """Requests that find the session of `main`, and `no` others."""
    from tinker import types

    ask, own = types.SessionSearchRequest, types.UserSearchOwner
    active = types.ActiveSessionStatusQuery()
    return {
        "all": ask(),
        "id": ask(session_id=session),
        "name": ask(display_name="run NIGHT"),
        "either": ask(session_id="nobody", display_name="7"),
        "words": ask(user_metadata={"team": "a"}),
        "owner": ask(owner=own(owner_urns=["axolotl-protrain"])),
        "anybody": ask(owner=types.AccessibleSearchOwner()),
        "active": ask(statuses=[types.FailedSessionStatusQuery(), active]),
        "no id": ask(session_id="nobody"),
        "no name": ask(display_name="nightly 8"),
        "no words": ask(user_metadata={"team": "a", "more": "b"}),
        "no owner": ask(owner=own(owner_urns=["somebody"])),
        "no end": ask(statuses=[types.ClientFinishedSessionStatusQuery()]),
    }


def main(base: str, folder: str) -> None:
    import tinker
    from tinker import types

    def trained(seed: int) -> Any:
        words = {"purpose": "a test"}
        one = service.create_lora_training_client(base, 4, seed, user_metadata=words)
        inputs = {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]}
        given = types.ModelInput.from_ints([5, 6, 7])
        datum = types.Datum(model_input=given, loss_fn_inputs=inputs)
        one.forward_backward([datum], "cross_entropy").result()
        one.optim_step(types.AdamParams(learning_rate=0.01)).result()
        return one

    service = tinker.ServiceClient(
        display_name="Nightly Run 7", user_metadata={"team": "a"}
    )
    first, second = trained(1), trained(2)
    about = {"score": "7"}
    path = first.save_state("one", ttl_seconds=7200, user_metadata=about).result().path
    sampled = first.save_weights_for_sampler("two").result().path
    other = second.save_state("one").result().path
    rest = service.create_rest_client()
    told: dict[str, Any] = {"paths": [path, sampled, other]}
    run = path.split("/")[2]
    told["runs"] = command("run", "list")
    told["run"] = command("run", "info", run)
    told["no run"] = command("run", "info", "nobody")
    told["list"] = command("checkpoint", "list")
    told["short"] = command("checkpoint", "list", "--limit", "1")
    told["all"] = command("checkpoint", "list", "--limit", "0")
    told["of run"] = command("checkpoint", "list", "--run-id", run)
    told["info"] = command("checkpoint", "info", path)
    told["download"] = command("checkpoint", "download", path, "-o", folder)
    told["forever"] = command("checkpoint", "set-ttl", path, "--remove")
    told["kept"] = command("checkpoint", "info", path)["expires_at"]
    told["publish"] = command("checkpoint", "publish", path)
    told["delete"] = command("checkpoint", "delete", "--yes", sampled, other)
    told["again"] = command("checkpoint", "delete", "--yes", other)
    told["left"] = command("checkpoint", "list")
    told["page"] = len(rest.list_user_checkpoints(5, 1).result().checkpoints)
    told["base"] = rest.get_weights_info_by_tinker_path(path).result().base_model
    told["sessions"] = rest.list_sessions().result().sessions
    told["session"] = rest.get_session(run.split(":")[0]).result().model_dump()
    told["searched"] = {
        name: [one.session_id for one in rest.search_sessions(asked).result().sessions]
        for name, asked in searches(run.split(":")[0]).items()
    }
    pages, asked = [], types.SessionSearchRequest(limit=1)
    while asked is not None:
        page = rest.search_sessions(asked).result()
        pages += [one.model_dump(mode="json") for one in page.sessions]
        at = page.next_cursor
        asked = None if at is None else asked.model_copy(update={"cursor": at})
    told["pages"] = pages
    service.close("success", detail="done").result()
    other_rest = tinker.ServiceClient().create_rest_client()
    ended = types.ClientFinishedSessionStatusQuery(reasons=["success"])
    asked = types.SessionSearchRequest(statuses=[ended])
    found = other_rest.search_sessions(asked).result().sessions
    told["ended"] = [one.status.model_dump() for one in found]
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
