"""Dry runs in a process of their own.

What Axolotl patches for one YAML stays in its process. A worker imports what a dry run
needs once, and answers each question in a fork of itself, beside others. Training could not
fork: a fork may touch neither the GPU that Axolotl has looked at nor threads of OpenMP.
"""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import os
import pickle  # nosec B403
import subprocess  # nosec B404
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from threading import Timer
from typing import Any

from ..core.errors import ProTrainError

_LAUNCHERS = (
    "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
).split()


def alone() -> dict[str, str]:
    """The environment of a dry run, which joins nobody: a pod may name other ranks."""
    return {k: v for k, v in os.environ.items() if k not in _LAUNCHERS}


class WorkerError(ProTrainError):
    """A worker that has ended, or took too long."""


class Worker:
    """A process that answers questions, each in a fork of its own.

    Args:
        act: `module:function`, which is called with a question; questions and answers
            are pickled.
    """

    def __init__(self, act: str) -> None:
        code = f"from {__name__} import serve; serve({act!r})"
        self._child = subprocess.Popen(  # nosec B603
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # a dry run needs no GPU
            env={**alone(), "CUDA_VISIBLE_DEVICES": ""},
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._child.kill()
        self._child.communicate()

    def ask(self, questions: Sequence[Any], limit_s: float) -> Iterator[Any]:
        """Yield the answers in their order, each as soon as it is there.

        Raises:
            WorkerError: The process has ended, or needs longer for all of them.
        """
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None and stdout is not None  # nosec B101
        timer = Timer(limit_s, self._child.kill)
        timer.start()
        try:
            pickle.dump(questions, stdin)
            stdin.flush()
            for _ in questions:
                yield pickle.load(stdout)  # nosec B301 - from the process above
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            late = timer.finished.is_set()
            why = f"took more than {limit_s} s" if late else "ended without an answer"
            raise WorkerError(f"the dry run {why}") from error
        finally:
            timer.cancel()


def serve(act: str) -> None:
    """Read questions from standard input, write answers to standard output."""
    # imported here: the command line reads this module before it has checked a YAML
    import torch

    from ..core.host import processors

    torch.set_num_threads(1)
    module, _, name = act.partition(":")
    with os.fdopen(os.dup(1), "wb") as answers, open(os.devnull, "wb") as nothing:
        # libraries print
        os.dup2(nothing.fileno(), 1)
        with lean_imports():
            call = getattr(importlib.import_module(module), name)
            # forks share what none of them writes to
            gc.disable()
            gc.freeze()
            for questions in _asked():
                num = min(processors(), 8, len(questions))
                with get_context("fork").Pool(num, maxtasksperchild=1) as pool:
                    for answer in pool.imap(call, questions):
                        pickle.dump(answer, answers)
                        answers.flush()


def _asked() -> Iterator[Any]:
    while True:
        try:
            yield pickle.load(sys.stdin.buffer)  # nosec B301 - from the process above
        except EOFError:
            return


@contextmanager
def lean_imports() -> Iterator[None]:
    """Leave out what libraries prepare while they are imported and a plan never runs.

    bitsandbytes compiles functions, which imports a compiler, transformers looks for
    sklearn, and Axolotl's callbacks evaluate and report: for seconds each.
    """
    from unittest.mock import patch

    import torch
    from transformers import utils

    empty = {
        # with a spec: found by whoever asks whether it is installed
        name: importlib.util.module_from_spec(
            importlib.machinery.ModuleSpec(name, None)
        )
        for name in {"evaluate", "wandb"} - sys.modules.keys()
        if importlib.util.find_spec(name) is not None
    }

    def uncompiled(function: Any = None, **_options: Any) -> Any:
        return function if function is not None else uncompiled

    sys.modules.update(empty)
    try:
        with (
            patch.object(torch, "compile", uncompiled),
            patch.object(utils, "is_sklearn_available", lambda: False),
        ):
            yield
    finally:
        for name in empty:
            del sys.modules[name]
