"""A server that speaks as `trl vllm-serve`, `axolotl vllm-serve` and, for TRL from 1.14 on,
`vllm serve` do, with a plain model.

It holds a model of its own, takes weights as TRL's client sends them, samples with `generate`
of transformers, and writes down what it got: for each time the hash of every weight, and
the tokens of each answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup

Body = Mapping[str, Any]


class Worker:
    """The model, and what becomes of it; one call at a time.

    Args:
        base: Folder of the model.
        record: File for what was received.
    """

    def __init__(self, base: str, record: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(base).eval()
        self._record = record
        self._communicator: PyNcclCommunicator | None = None
        self._updates = False
        self._received: dict[str, list[Any]] = {}
        self._syncs: list[dict[str, list[Any]]] = []
        self._answers: list[list[int]] = []

    def init_communicator(self, body: Body) -> dict[str, Any]:
        group = StatelessProcessGroup.create(body["host"], body["port"], 0, 2)
        self._communicator = PyNcclCommunicator(group, "cpu")
        return {"message": "initializing"}

    def init_weight_transfer_engine(self, body: Body) -> dict[str, Any]:
        info = body["init_info"]
        meeting = info["master_address"], info["master_port"]
        group = StatelessProcessGroup.create(*meeting, rank=1, world_size=2)
        self._communicator = PyNcclCommunicator(group, "cpu")
        return {}

    def start_weight_update(self, _body: Body) -> dict[str, Any]:
        self._updates = True
        return {}

    def finish_weight_update(self, _body: Body) -> dict[str, Any]:
        self._updates = False
        return {}

    def update_weights(self, body: Body) -> dict[str, Any]:
        assert self._updates
        info = body["update_info"]
        columns = info["names"], info["dtype_names"], info["shapes"]
        for name, weight in [*map(partial(self._received_from, 0), *columns)]:
            self._load(name, weight)
        return {}

    def update_named_param(self, body: Body) -> dict[str, Any]:
        return self.batch_update_named_params({"params": [body]})

    def batch_update_named_params(self, body: Body) -> dict[str, Any]:
        each = ((p["name"], p["dtype"], p["shape"]) for p in body["params"])
        arrived = [self._received_from(1, *one) for one in each]
        assert self._communicator is not None
        self._communicator.group.barrier()
        for name, weight in arrived:
            self._load(name, weight)
        return {"message": "updated"}

    def _received_from(
        self, rank: int, name: str, dtype: str, shape: list[int]
    ) -> tuple[str, Tensor]:
        weight = torch.empty(shape, dtype=getattr(torch, dtype.split(".")[-1]))
        assert self._communicator is not None
        self._communicator.broadcast(weight, src=rank)
        return name, weight

    def _load(self, name: str, weight: Tensor) -> None:
        data = weight.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(data).hexdigest()
        assert name not in self._received, name
        self._received[name] = [str(weight.dtype), [*weight.shape], digest]
        own = dict(self._model.named_parameters(remove_duplicate=False)).get(name)
        # as vLLM's loaders, which raise for what does not fit
        if own is not None and own.shape == weight.shape:
            own.data.copy_(weight)

    def reset_prefix_cache(self, _body: Body) -> dict[str, Any]:
        self._syncs.append(self._received)
        self._received = {}
        self._write()
        return {"message": "reset"}

    def close_communicator(self, _body: Body) -> dict[str, Any]:
        self._communicator = None
        return {"message": "closing"}

    @torch.no_grad()
    def generate(self, body: Body) -> dict[str, Any]:
        # other requests, other numbers, and the same ones in each run
        torch.manual_seed(len(self._answers))
        prompts: list[list[int]] = body["prompts"]
        answers, logprobs = [], []
        for prompt in prompts:
            output = self._model.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=True,
                num_return_sequences=body["n"],
                max_new_tokens=body["max_tokens"],
                temperature=body["temperature"],
                top_p=body["top_p"],
                top_k=max(body["top_k"], 0),
                return_dict_in_generate=True,
                output_scores=True,
                pad_token_id=0,
            )
            scores = torch.stack(output.scores, 1).log_softmax(-1)
            for row, score in zip(output.sequences, scores, strict=True):
                tokens = _until(row[len(prompt) :].tolist(), self._ends())
                answers.append(tokens)
                logprobs.append([[score[n, t].item()] for n, t in enumerate(tokens)])
        self._answers += answers
        self._write()
        return {
            "prompt_ids": prompts,
            "completion_ids": answers,
            "logprobs": logprobs,
            "logprob_token_ids": [[[t] for t in tokens] for tokens in answers],
        }

    def v1_completions(self, body: Body) -> dict[str, Any]:
        answer = self.generate(body | {"prompts": body["prompt"]})
        choices = []
        for number, tokens in enumerate(answer["completion_ids"]):
            named = [f"token_id:{token}" for token in tokens]
            logprobs = [each for (each,) in answer["logprobs"][number]]
            tops = [{n: p} for n, p in zip(named, logprobs, strict=True)]
            choices.append(
                {
                    "prompt_token_ids": answer["prompt_ids"][number // body["n"]],
                    "token_ids": tokens,
                    "logprobs": {
                        "tokens": named,
                        "token_logprobs": logprobs,
                        "top_logprobs": tops,
                    },
                }
            )
        return {"choices": choices}

    def _ends(self) -> set[int]:
        end = self._model.generation_config.eos_token_id
        return {end} if isinstance(end, int) else set(end or ())

    def _write(self) -> None:
        record = {"syncs": self._syncs, "answers": self._answers}
        self._record.write_text(json.dumps(record))


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    for number, token in enumerate(tokens):
        if token in ends:
            return tokens[: number + 1]
    return tokens


AT_ONCE = {"init_communicator", "update_named_param", "batch_update_named_params"}
"""Requests that are answered before they are done: what follows is a broadcast."""


class _Handler(BaseHTTPRequestHandler):
    calls: Queue[tuple[Callable[[], Any], Future[Any]]]
    worker: Worker

    def do_GET(self) -> None:
        answers: dict[str, Any] = {
            "health": {"status": "ok"},
            "get_world_size": {"world_size": 1},
            "v1/models": {"data": [{"id": "model"}]},
        }
        self._answer(answers.get(self.path.strip("/")))

    def do_POST(self) -> None:
        name = self.path.strip("/").replace("/", "_")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        method = getattr(self.worker, name, None)
        if name.startswith("_") or method is None:
            self._answer(None)
            return
        done: Future[Any] = Future()
        self.calls.put((partial(method, json.loads(body or "{}")), done))
        self._answer({"message": name} if name in AT_ONCE else done.result())

    def _answer(self, answer: Any) -> None:
        data = json.dumps(answer).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: it would be in the trainer's log."""


def serve(base: str, port: int, record: Path) -> None:
    """Answer until the process that trains has ended, or ends this one."""
    torch.set_num_threads(1)
    calls: Queue[tuple[Callable[[], Any], Future[Any]]] = Queue()
    held = {"calls": calls, "worker": Worker(base, record)}
    handler = type("Handler", (_Handler,), held)
    http = ThreadingHTTPServer(("127.0.0.1", port), handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    trainer = os.getppid()
    while os.getppid() == trainer:
        try:
            call, done = calls.get(timeout=1)
        except Empty:
            continue
        try:
            done.set_result(call())
        except Exception as error:  # the client learns of it
            done.set_exception(error)
            raise
