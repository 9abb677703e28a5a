"""Trains one YAML after another in one process, as `axolotl train` would each.

A fork that calls `main`, or `python axolotl_worker.py FOLDER`: reads one JSON line a
job, answers with one JSON line; all printing goes to the log of the job.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import sys
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from fork_server import ENVIRONMENT

INTERPRETED = {
    # read when Triton is imported; without a GPU its kernels can run in no other way
    "TRITON_INTERPRET": "1",
}


RANK, RANKS = (
    int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1))
)


def main(root: Path) -> None:
    os.chdir(root)
    requests, replies = _take_standard_streams()
    for line in requests:
        request = json.loads(line)
        start = time.perf_counter()
        os.environ["MASTER_PORT"] = str(request.pop("port"))
        error = (_run_alone if request.pop("alone") else _run)(root, **request)
        seconds = time.perf_counter() - start
        print(json.dumps({"error": error, "seconds": seconds}), file=replies)
        replies.flush()
        if error and RANKS > 1:
            # the other ranks notice that this one is gone
            os._exit(1)


def _take_standard_streams() -> tuple[TextIO, TextIO]:
    """Keep the pipes for the protocol and give everyone else /dev/null."""
    requests = os.fdopen(os.dup(0))
    replies = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "r+b") as nothing:
        for standard in (0, 1, 2):
            os.dup2(nothing.fileno(), standard)
    return requests, replies


def _run_alone(root: Path, name: str, **request: Any) -> str:
    """Train in a fork, which takes what it changes in libraries along when it ends."""
    folder = _start_log(root, name)
    _import_all(root)
    process_id = os.fork()
    failure = folder / "failure.txt"
    if not process_id:
        failure.write_text(_attempt(root, folder, **request))
        os._exit(0)
    _, status = os.waitpid(process_id, 0)
    return failure.read_text() if not status else f"its process ended with {status}"


def _run(root: Path, name: str, family: str, settings: dict[str, Any]) -> str:
    return _attempt(root, _start_log(root, name), family, settings)


@cache
def _import_all(root: Path) -> None:
    """Train once what is nobody's job: its imports need not be repeated in each fork."""
    from axolotl_jobs import job

    name = f"jobs/{os.getpid()}"
    (root / name).mkdir()
    settings = job("llama", {"output_dir": f"{name}/out"}).settings
    error = _attempt(root, root / name, "llama", settings)
    assert not error, error


def _start_log(root: Path, name: str) -> Path:
    """Make the folder of a job and print into its log from here on."""
    folder = root / "jobs" / name
    folder.mkdir(parents=True, exist_ok=RANKS > 1)
    with (folder / (f"log-{RANK}.txt" if RANK else "log.txt")).open("w") as log:
        for standard in (1, 2):
            os.dup2(log.fileno(), standard)
    return folder


def _attempt(root: Path, folder: Path, family: str, settings: dict[str, Any]) -> str:
    """Train and return the traceback of what went wrong, empty if nothing did."""
    try:
        _train(root, folder, family, settings)
        return ""
    except (Exception, SystemExit):
        return traceback.format_exc()
    finally:
        gc.collect()
        # what lives on is Axolotl's: no later collection needs to look through it
        gc.freeze()


def _train(root: Path, folder: Path, family: str, settings: dict[str, Any]) -> None:
    # imported here: what they print belongs into the log of a job
    import tiny_models
    import torch
    import yaml
    from axolotl.cli.train import do_cli
    from axolotl.integrations.base import PluginManager, load_plugin

    torch.set_num_threads(1)
    _keep_schemas()
    # a compiler takes seconds for each shape of a weight
    torch.compiler.set_stance("force_eager")
    # Axolotl leaves it behind
    os.environ.pop("ACCELERATE_DYNAMO_BACKEND", None)
    if RANKS > 1:
        _forget_last_group()
    with (root / "inputs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / tiny_models.DATA).exists():
            tiny_models.build_inputs(root)
        if not (root / tiny_models.model_path(family)).exists():
            tiny_models.build_model(root, family)
    config = folder / f"config-{RANK}.yaml"
    config.write_text(yaml.safe_dump(settings))
    for plugin in settings["plugins"]:
        # Axolotl itself trains on without a plugin that cannot be imported
        load_plugin(plugin)
    # modules keep the manager itself, so that it is emptied, not replaced
    PluginManager.get_instance().plugins.clear()
    do_cli(str(config))


@cache
def _keep_schemas() -> None:
    """Axolotl builds the schema of the same keys anew for each YAML, in 0.1 s."""
    from axolotl.integrations.base import PluginManager
    from axolotl.utils import config

    build, kept = config.merge_input_args, {}

    def schemas() -> Any:
        names = tuple(PluginManager.get_instance().get_input_args())
        if names not in kept:
            kept[names] = build()
        return kept[names]

    config.merge_input_args = schemas


def _forget_last_group() -> None:
    """Axolotl leaves the process group when a training ends, and remembers its state."""
    from accelerate.state import AcceleratorState
    from axolotl.utils import distributed

    AcceleratorState._reset_state(reset_partial_state=True)
    distributed.distributed_state = None


if __name__ == "__main__":
    os.environ |= ENVIRONMENT | INTERPRETED
    main(Path(sys.argv.pop(1)))
