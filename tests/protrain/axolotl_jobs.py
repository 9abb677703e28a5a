"""Tiny trainings with Axolotl, and what must be equal between two of them.

A `Job` is a value: a family of models and YAML keys. `Workers` run jobs in the
background, each only once, so that tests share their plain references. `differences`
compares two results to the last bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import select
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from queue import PriorityQueue
from threading import Lock, Thread
from typing import Any

import axolotl_worker
import torch
from checked_device import CHECKED
from fork_server import Fork
from safetensors.torch import load_file
from tiny_models import DATA, TOKENIZER, model_path
from torch import Tensor

NUM_WORKERS = 2
PATIENCE_S = 60.0
"""For the other ranks, once one has failed."""
PORTS = (10_000, 30_000)
"""Below those that Linux gives to connections, which would be taken by then."""
Worker = subprocess.Popen[str] | Fork

PROTRAIN = "axolotl.integrations.protrain.ProTrainPlugin"
SEEDING = "seeding_plugin.SeedingPlugin"
TORCH_KERNELS = "torch_kernels_plugin.TorchKernelsPlugin"
LIGER = "axolotl.integrations.liger.LigerPlugin"
SERVED = "served_plugin.ServedPlugin"
COMPILING = "compiling_plugin.CompilingPlugin"
DISTILLING = "axolotl.integrations.kd.KDPlugin"
BASE: dict[str, Any] = {
    "plugins": [PROTRAIN, SEEDING],
    # the plugin is listed in plain runs too: Axolotl merges what plugins add to its
    # classes once a process
    "protrain_auto_memory": False,
    # or a run would plan with what another test's has shown
    "protrain_learn_peak": False,
    "tokenizer_config": str(TOKENIZER),
    "datasets": [{"path": str(DATA), "ds_type": "json", "type": "completion"}],
    "dataset_prepared_path": "prepared",
    "dataloader_num_workers": 0,
    "val_set_size": 0,
    "sequence_len": 64,
    "sample_packing": False,
    "pad_to_sequence_len": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_steps": 3,
    "optimizer": "adamw_torch_fused",
    "lr_scheduler": "cosine",
    "learning_rate": 0.01,
    "weight_decay": 0.01,
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "attn_implementation": "sdpa",
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "logging_steps": 1,
    "seed": 7,
}
LORA: dict[str, Any] = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_target_linear": True,
    "lora_mlp_kernel": False,
    "lora_qkv_kernel": False,
    "lora_o_kernel": False,
    "lora_embedding_kernel": False,
}
KERNELS: dict[str, Any] = {
    "plugins": [PROTRAIN, SEEDING, TORCH_KERNELS],
    "lora_mlp_kernel": True,
    "lora_qkv_kernel": True,
    "lora_o_kernel": True,
    "lora_embedding_kernel": True,
}
"""To lay over `LORA`: every fused kernel, in torch where it needs a GPU."""
PATCHES = (TORCH_KERNELS, LIGER)
"""Plugins that change libraries for the whole process."""
PATCHING_KEYS = "chunked_cross_entropy", "tiled_mlp"
"""Keys for which Axolotl does."""
PAGED: dict[str, Any] = {
    "protrain_auto_memory": True,
    "protrain_capacity_bytes": "1GiB",
    CHECKED: True,
}
SHARDED: dict[str, Any] = {"protrain_zero3_shard": True}


def overrides(
    n_persist: int, n_buffer: int, n_checkpoint: int = 0, n_swap: int = 0
) -> dict[str, int]:
    """The four knobs by hand."""
    return {
        "protrain_n_persist_override": n_persist,
        "protrain_n_buffer_override": n_buffer,
        "protrain_n_swap_override": n_swap,
        "protrain_n_checkpoint_override": n_checkpoint,
    }


@dataclass(frozen=True, order=True)
class Job:
    """One training. Equal jobs have equal names and are trained once."""

    family: str
    yaml: str
    num_ranks: int = 1

    @property
    def name(self) -> str:
        digest = hashlib.sha256(self.yaml.encode()).hexdigest()[:16]
        ranks = f"-{self.num_ranks}-ranks" if self.num_ranks > 1 else ""
        return f"{self.family}-{digest}{ranks}"

    @property
    def settings(self) -> dict[str, Any]:
        """The whole YAML; paths are relative to the folder of all jobs."""
        merged = {
            **BASE,
            "base_model": str(model_path(self.family)),
            "output_dir": f"jobs/{self.name}/out",
            **json.loads(self.yaml),
        }
        return {key: value for key, value in merged.items() if value is not None}

    @property
    def patches(self) -> bool:
        """Whether it leaves its process in another state than it found it."""
        patches = not set(PATCHES).isdisjoint(self.settings["plugins"])
        return patches or any(map(self.settings.get, PATCHING_KEYS))

    @property
    def interpreted(self) -> bool:
        """Whether kernels for Triton run, without a GPU."""
        return LIGER in self.settings["plugins"]

    @property
    def distils(self) -> bool:
        """Whether it has arguments that a process knows whose first job has them."""
        return DISTILLING in self.settings["plugins"]

    @property
    def served(self) -> bool:
        """Whether its process finds vLLM, for which TRL looks once."""
        return SERVED in self.settings["plugins"]

    def but(self, *settings: Mapping[str, Any]) -> Job:
        """The same training with other keys."""
        other = job(self.family, json.loads(self.yaml), *settings)
        return replace(other, num_ranks=self.num_ranks)


def job(family: str, *settings: Mapping[str, Any]) -> Job:
    """A plain training with `settings` laid over `BASE`; None removes a key."""
    merged: dict[str, Any] = {}
    for layer in settings:
        merged.update(layer)
    return Job(family, json.dumps(merged, sort_keys=True))


@dataclass(frozen=True)
class Pair:
    """Two trainings that must come out equal."""

    paged: Job
    plain: Job

    @property
    def jobs(self) -> tuple[Job, Job]:
        return self.paged, self.plain


def pair(
    family: str,
    *settings: Mapping[str, Any],
    plan: Mapping[str, Any],
    plain: Mapping[str, Any] | None = None,
    num_ranks: int = 1,
) -> Pair:
    """The training that `settings` ask for, paged by `plan` and plain.

    Args:
        family: Of the model.
        settings: Of both.
        plan: Keys of the paged training alone.
        plain: Keys of the plain one alone.
        num_ranks: Processes of each.
    """
    paged = job(family, *settings, PAGED, plan)
    reference = job(family, *settings, plain or {})
    return Pair(*(replace(j, num_ranks=num_ranks) for j in (paged, reference)))


@dataclass(frozen=True)
class Result:
    """What a job left behind; `error` is its traceback, empty when it finished."""

    folder: Path
    error: str
    seconds: float
    errors: tuple[str, ...] = ()
    """That of each rank."""

    @property
    def log(self) -> str:
        """Everything it printed."""
        return (self.folder / "log.txt").read_text(errors="replace")

    @property
    def output(self) -> Path:
        return self.folder / "out"

    @cached_property
    def report(self) -> dict[str, Any]:
        """The paged run's report.json."""
        return json.loads((self.output / "protrain" / "report.json").read_text())

    @property
    def peak_errors(self) -> list[float]:
        """By how much the device peak of each rank is above its prediction, relative."""
        device = self.report["device_bytes"]
        predicted = device["peak"] - device["terms"]["context and workspaces"]
        measured = self.report["ranks"] or [self.report["measured"]]
        return [rank["device_peak_bytes"] / predicted - 1 for rank in measured]

    @cached_property
    def state(self) -> dict[str, Any]:
        """The Trainer's state at the end."""
        return json.loads((self.output / "trainer_state.json").read_text())

    @property
    def history(self) -> list[dict[str, float]]:
        """The Trainer's log: one entry a step, and one an evaluation."""
        return self.state["log_history"]

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """What was saved at the end: the model, the adapter alone, or both."""
        names = ("model.safetensors", "adapter_model.safetensors")
        paths = [self.output / n for n in names if (self.output / n).exists()]
        return {k: v for path in paths for k, v in load_file(path).items()}


COMPARED = ("loss", "grad_norm", "learning_rate", "eval_loss")


def differences(got: Result, wanted: Result, tolerance: float = 0.0) -> list[str]:
    """Every difference between two trainings, as lines to read.

    Args:
        got: The result in question.
        wanted: The reference.
        tolerance: Largest relative difference; 0 compares bits.
    """
    failed = [f"{r.folder.name} failed:\n{r.error}" for r in (got, wanted) if r.error]
    if failed:
        return failed
    return [
        *history_differences(got.history, wanted.history, tolerance),
        *weight_differences(got.weights, wanted.weights, tolerance),
    ]


def assert_equal(got: Result, wanted: Result, tolerance: float = 0.0) -> None:
    """Fail with every difference between two trainings; see `differences`."""
    found = differences(got, wanted, tolerance)
    assert not found, "\n".join(found)


def history_differences(
    got: list[dict[str, float]], wanted: list[dict[str, float]], tolerance: float
) -> list[str]:
    """Steps at which loss, gradient norm or learning rate differ."""
    ours, theirs = _compared(got), _compared(wanted)
    if [entry.keys() for entry in ours] != [entry.keys() for entry in theirs]:
        return [f"logged {ours}, not {theirs}"]
    if not ours:
        return ["nothing was logged"]
    return [
        f"step {reference['step']}: {key} {entry[key]!r}, not {reference[key]!r}"
        for entry, reference in zip(ours, theirs, strict=True)
        for key in reference
        if not _close(entry[key], reference[key], tolerance)
    ]


def weight_differences(
    got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float
) -> list[str]:
    """Names of weights that are missing, too many, or other bits."""
    lines = [f"{name}: only in one of them" for name in got.keys() ^ wanted.keys()]
    for name in got.keys() & wanted.keys():
        ours, theirs = got[name], wanted[name]
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            lines.append(f"{name}: {ours.dtype} {ours.shape} not {theirs.dtype}")
        elif not same_bits(ours, theirs):
            apart = _distance(ours, theirs)
            if not apart <= tolerance or tolerance == 0:
                lines.append(f"{name}: apart by {apart:.3g} of its norm")
    return sorted(lines)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal as bytes: -0.0 is not 0.0, and NaN is itself."""
    as_bytes = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(*as_bytes)


def _compared(history: list[dict[str, float]]) -> list[dict[str, float]]:
    kept = [{k: e[k] for k in ("step", *COMPARED) if k in e} for e in history]
    return [entry for entry in kept if len(entry) > 1]


def _close(one: float, other: float, tolerance: float) -> bool:
    # a NaN is not close to anything: none of these trainings may produce one
    return abs(one - other) <= tolerance * abs(other)


def _distance(one: Tensor, other: Tensor) -> float:
    scale = other.double().norm().item() or 1.0
    return (one.double() - other.double()).norm().item() / scale


@dataclass(order=True)
class _Task:
    turn: tuple[int, int]
    job: Job | None = field(compare=False)
    result: Future[Result] = field(compare=False, default_factory=Future)


class Workers:
    """Processes that train jobs in the background.

    Args:
        root: Gets models, data and one folder a job.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tasks: dict[str, _Task] = {}
        self._queue: PriorityQueue[_Task] = PriorityQueue()
        self._lock = Lock()
        self._processes: list[Worker] = []
        self._closed = False
        self._threads = [
            Thread(target=self._serve, daemon=True) for _ in range(NUM_WORKERS)
        ]
        for thread in self._threads:
            thread.start()

    def expect(self, jobs: Iterable[Job]) -> None:
        """Begin with these, in the order in which results will be asked for."""
        for wanted in jobs:
            self._add(wanted, urgency=1)

    def run(self, wanted: Job) -> Result:
        """The job's result; trained next unless it is known already."""
        return self._add(wanted, urgency=0).result.result()

    def close(self) -> None:
        """End the processes, in the middle of a job if need be."""
        self._closed = True
        for number in range(NUM_WORKERS):
            self._queue.put(_Task((-1, number), None))
        with self._lock:
            for process in self._processes:
                process.kill()
        for thread in self._threads:
            thread.join()

    def _add(self, wanted: Job, urgency: int) -> _Task:
        if wanted.name not in self._tasks:
            task = _Task((urgency, len(self._tasks)), wanted)
            self._tasks[wanted.name] = task
            self._queue.put(task)
        return self._tasks[wanted.name]

    def _serve(self) -> None:
        groups: dict[tuple[int, bool, bool, bool], list[Worker]] = {}
        while True:
            task = self._queue.get()
            if task.job is None:
                return
            size, interpreted = task.job.num_ranks, task.job.interpreted
            kind = size, interpreted, task.job.distils, task.job.served
            group = groups.get(kind, [])
            if not group or any(process.poll() is not None for process in group):
                for process in group:
                    process.kill()
                group = [self._start(rank, size, interpreted) for rank in range(size)]
                groups[kind] = group
            try:
                result = self._train(group, task.job)
                if result.error and size > 1:
                    # ranks end after an error, some of them later than others
                    for process in groups.pop(kind):
                        process.kill()
                task.result.set_result(result)
            except Exception as error:  # a test waits for it in another thread
                task.result.set_exception(error)

    def _start(self, rank: int, size: int, interpreted: bool) -> Worker:
        launched = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "ACCELERATE_USE_CPU": "true",
        }
        environment = launched if size > 1 else {}
        pipe = subprocess.PIPE
        process: Worker
        if interpreted:
            # Triton has to be imported anew, with its interpreter
            process = subprocess.Popen(
                [sys.executable, axolotl_worker.__file__, str(self._root)],
                env=os.environ | environment,
                stdin=pipe,
                stdout=pipe,
                text=True,
            )
        else:
            process = Fork(
                axolotl_worker.main,
                self._root,
                environment=environment,
                stdin=pipe,
                stdout=pipe,
            )
        with self._lock:
            self._processes.append(process)
            if self._closed:
                process.kill()
        return process

    def _train(self, group: list[Worker], wanted: Job) -> Result:
        folder = self._root / "jobs" / wanted.name
        request = {
            "name": wanted.name,
            "family": wanted.family,
            "settings": wanted.settings,
            "alone": wanted.patches,
            # ranks of each training meet at another one
            "port": free_port(),
        }
        for process in group:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                print(json.dumps(request), file=process.stdin, flush=True)
        answers: dict[int, tuple[str, float]] = {}
        while waiting := [r for r in range(len(group)) if r not in answers]:
            failed = any(error for error, _ in answers.values())
            streams = [group[rank].stdout for rank in waiting]
            ready, _, _ = select.select(streams, [], [], PATIENCE_S if failed else None)
            for rank, stream in zip(waiting, streams, strict=True):
                if not ready:
                    # it waits for a rank that is gone: gloo does so for half an hour
                    group[rank].kill()
                if not ready or stream in ready:
                    answers[rank] = _answer(group[rank])
        errors = tuple(answers[rank][0] for rank in range(len(group)))
        first = next((answers[rank][0] for rank in answers if answers[rank][0]), "")
        seconds = max(seconds for _, seconds in answers.values())
        return Result(folder, first, seconds, errors)


def _answer(process: Worker) -> tuple[str, float]:
    """Its error and its seconds, when one of them is there."""
    assert process.stdout is not None
    if reply := process.stdout.readline():
        answer = json.loads(reply)
        return answer["error"], answer["seconds"]
    return f"the worker process died with code {process.wait()}", 0.0


def free_port() -> int:
    """Of this machine, at this moment, and none that a connection gets by itself."""
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
