"""One training run: from the validated YAML to an open session and a report."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from .args import args_from, overrides
from .background_save import BackgroundSave
from .callbacks import CallbackAccess, merged_on_device
from .core.checkpoint import (
    SLACK_BYTES,
    TOKEN_BYTES,
    Snapshot,
    checkpoint_bytes,
    require_space,
)
from .core.engine.data_parallel import ignore_in_ddp
from .core.engine.device import allocator_note, open_device
from .core.engine.ranks import LIMIT, Alarm, Alone, Ranks
from .core.engine.scaling import finds_all_gradients
from .core.engine.session import Options, Session
from .core.errors import CheckpointError, ProTrainError
from .core.host import host_memory
from .core.layout.tensors import may_repack
from .core.planner.job import adapter_names
from .core.planner.planner import Forecast
from .core.sizes import format_bytes
from .interrupts import DeferredSignals
from .job import about, batch_tokens, compile_keys, disk_dir, plan_here
from .prediction import CHECKED_STEP, UNCOUNTED, Prediction
from .pushing import pushing
from .recovery import Recovery
from .report.run import WATCHED_STEPS, RunReport
from .waves import Waves

if TYPE_CHECKING:
    from .generation import Asked
    from .loading import LoadShare
from .objective import Objective

NOT_REPACKED = (
    "bitsandbytes repacks 4-bit weights in the first evaluation on this CPU "
    "(AVX512-BF16) and trains without their gradients from then on. It does not in "
    "this run, so a plain one differs, in evaluation by its rounding."
)
LOGGED = (
    "fetched_bytes offloaded_bytes swapped_out_bytes swapped_in_bytes stall_s".split()
)
"""Counters that the Trainer's log shows, as they grew since its last line."""
PROGRESS_S = 10.0
"""Between two lines about what takes long."""


class Notices:
    """Lines for a person who waits, on the first rank.

    Args:
        log: Prints a line.
    """

    def __init__(self, log: Any) -> None:
        self._log, self._said, self._told = log, set[str](), 0.0

    def once(self, line: str) -> None:
        """Print a line that was not printed before."""
        if line not in self._said and is_first():
            self._said.add(line)
            self._log.info(line)

    def progress(self, what: str, done: int, total: int) -> None:
        """Print a line every few seconds; none where the whole takes less."""
        now = time.perf_counter()
        if not done:
            self._told = now
        elif now - self._told > PROGRESS_S:
            self._told = now
            done_text, total_text = map(format_bytes, (done, total))
            self.once(f"ProTrain: {done_text} of {total_text} {what}.")


class TrainingRun:
    """Opens and closes the session of one `Trainer.train`, and keeps its report.

    Args:
        cfg: Axolotl's validated configuration.
        taken_over: Keys of the YAML, with their values, that the plan answers instead.
        log: Prints a line.
        share: What this rank has loaded of a base that a node's ranks quantise
            together; None for all of it.
        notes: Of what came before, for the report.
    """

    recovery: Recovery
    """From `open` on."""
    checkpoint_bytes = _final_bytes = 0
    """On disk; the last one, after training, has weights only."""
    _unscale: Callable[[], object]

    def __init__(
        self,
        cfg: Any,
        taken_over: Sequence[str],
        log: Any,
        share: LoadShare | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.args = args_from(cfg)
        self.log = log
        self.signals = DeferredSignals(log)
        self.session: Session | None = None
        self.report: RunReport | None = None
        self.ranks: Ranks = Alone()
        self.alarm: Alarm | None = None
        self._cfg = cfg
        self.saves_when_asked = bool(cfg.dynamic_checkpoint or cfg.save_first_step)
        self._share = share
        self._notes = notes
        self._taken_over = taken_over
        self._output_dir = Path(cfg.output_dir)
        self._logged: dict[str, float] = {}
        self.saves = BackgroundSave()
        self._notices = Notices(log)
        self._num_evaluated = 0
        self._waves: Waves | None = None
        self._started = 0.0
        self._watching = ExitStack()
        self._undo = ExitStack()

    def open(
        self,
        model: nn.Module,
        device: torch.device,
        saves_optimizer: bool,
        objective: Objective | None = None,
        adapter_bytes: int = 0,
        asked: Asked | None = None,
    ) -> None:
        """Plan for `model` and move it to train on `device`.

        Args:
            model: Not wrapped, on the host, `requires_grad` final.
            device: Where to train it.
            saves_optimizer: Checkpoints with optimizer state will be written.
            objective: Of a trainer whose loss is more than one forward.
            adapter_bytes: See `plan_here`.
            asked: See `traced_job`.

        Raises:
            ProTrainError: It cannot be trained so, or not twice with one trainer.
        """
        if self.report is not None:
            raise ProTrainError(
                "this trainer has trained paged before; build a new one for another run"
            )
        self._join_ranks(device)
        absent = self._share.absent(model) if self._share else frozenset()
        self._notices.once(
            "ProTrain traces a micro-batch and measures what this machine gives."
        )
        forecast, planner, notes, self._plan_hash = plan_here(
            self._cfg,
            model,
            device,
            self.ranks,
            absent,
            objective,
            adapter_bytes,
            asked,
        )
        adapter, masters = bool(adapter_names(model)), self.args.protrain_fp32_master
        nbytes = partial(checkpoint_bytes, forecast.layout, adapter)
        # a tokenizer has a word for each row of the embedding
        tables = (m for m in model.modules() if isinstance(m, nn.Embedding))
        tokens = max((table.num_embeddings for table in tables), default=0)
        self.checkpoint_bytes = nbytes(saves_optimizer, masters)
        self.checkpoint_bytes += SLACK_BYTES + TOKEN_BYTES * tokens
        self._final_bytes = nbytes(False, masters)
        notes += [*self._notes, *self._warnings(forecast, model, device)]
        self.report = RunReport(forecast, str(device), notes, about(self._cfg))
        self.recovery = Recovery(self, self.report, device, planner)
        compiled = compile_keys(self._cfg)
        self._prediction = Prediction(self.args, self.report, self.log, compiled)
        self._access = CallbackAccess(self.full_params, self.ranks, self.log)
        if is_first():
            self.log.info("\n" + self.report.table())
        space = partial(require_space, self._output_dir, self.checkpoint_bytes)
        self.ranks.from_first(space)
        opened, args = open_device(device), self.args
        host = format_bytes(forecast.host.phases["train"])
        self._notices.once(
            f"ProTrain moves the model to its places; {host} stay on the host."
        )
        self.session = Session(
            model,
            forecast.layout,
            forecast.plan,
            opened,
            Options(
                fp32_master=args.protrain_fp32_master,
                accumulates=forecast.workload.accumulation > 1,
                compiled=compiled,
                disk=disk_dir(args),
                progress=self._notices.progress,
            ),
            self.ranks,
            absent,
        )
        if self._cfg.relora:
            self._undo.enter_context(merged_on_device(self.session))
        if pageable := opened.pageable_bytes:
            line = (
                f"{format_bytes(pageable)} of host memory could not be page-locked: "
                "copies from and to them take several times as long. Raise the limit "
                "(`ulimit -l`, `--ulimit memlock=-1` of a container; WSL2 locks a part "
                "of its memory only), or page less."
            )
            self.report.notes.append(line)
            self.log.warning(line)
        if self.ranks.world.size > 1:
            self._undo.enter_context(ignore_in_ddp(model, self.session.host_kept))

    def _join_ranks(self, device: torch.device) -> None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            # who is gone is noticed here; making a group would wait for it
            dist.barrier()
            limit = self._cfg.ddp_timeout
            self.ranks = Ranks(
                device.type, timedelta(seconds=limit) if limit else LIMIT
            )
            self.alarm = Alarm(self.ranks, self._hear)

    def close(self, failed: bool = False) -> None:
        """Give the model back and write the report; does nothing when not open.

        After a failure the other ranks may never come to what ranks do together.
        """
        session, self.session = self.session, None
        # it has the session, whose host memory goes with it
        self._waves = None
        ranks, self.ranks = self.ranks, Alone()
        if failed:
            ranks = Alone()
        if self.report is not None:
            self.recovery.begin(None)
            if failed:
                whole = len(self.report.step_s)
                self.report.notes.append(
                    f"Ended by an error or a signal after {whole} whole steps: what is "
                    "measured holds what ran after them too."
                )
        # the last one first, and each of them whatever the others raise
        with ExitStack() as undo:
            if self.alarm is not None:
                undo.callback(self.alarm.close)
            undo.callback(ranks.close)
            if session is not None and self.report is not None:
                undo.callback(self._finish, session, self.report, ranks)
                undo.callback(self._close, session)
            undo.callback(self._undo.close)
            undo.callback(self._watching.close)
            undo.callback(self._end_save, failed)

    def _close(self, session: Session) -> None:
        try:
            session.close()
        except RuntimeError:
            # what was under way between ranks broke off
            self.recovery.raise_heard()
            raise

    def _end_save(self, failed: bool) -> None:
        try:
            self.saves.settle()
        except CheckpointError as error:
            if not failed:
                raise
            # the run's own error must not be hidden by this one
            self.log.error(str(error))

    @contextmanager
    def full_params(
        self, whom: str = "trainer.protrain.full_params()"
    ) -> Iterator[None]:
        """See `Session.full_params`; does nothing outside a session. `whom` they are shown to
        is named where a step cannot be repeated because of it."""
        if self.session is None:
            yield
            return
        with self.session.full_params(), self.recovery.showing(whom):
            yield

    # its name before, which trainers of users may call
    weights = full_params

    def for_event(
        self, event: str, callbacks: Sequence[TrainerCallback]
    ) -> AbstractContextManager[None]:
        """Enter `full_params` where one of the callbacks may look at weights in an event."""
        if self.session is None:
            return nullcontext()
        return self._access.during(event, callbacks)

    def _hear(self, words: str) -> None:
        """A rank has no room for a step, this one or another: all of them end."""
        said = json.loads(words)
        # not to the log, which only the first rank writes
        print(f"\n{said['error']}", file=sys.stderr, flush=True)
        beyond = max(self.recovery.unplanned_bytes, said["unplanned_bytes"])
        self.recovery.unplanned_bytes = beyond
        # who plans the next run
        if is_first():
            self._prediction.learn((), beyond)

    def begin_micro_batch(self, synchronises: bool, batch: Any) -> None:
        """See `Session.begin_micro_batch`."""
        assert self.session is not None
        tokens = batch_tokens(batch)
        self._prediction.most_tokens = max(self._prediction.most_tokens, tokens)
        self.session.begin_micro_batch(synchronises)

    def begin_step(self, trainer: Trainer) -> None:
        """An optimizer step begins."""
        self.saves.settle(blocks=False)
        self.note_peak()
        assert self.session is not None
        params = self.session.model.parameters()
        has_gradients = any(param.grad is not None for param in params)
        self.recovery.begin(trainer, has_gradients)
        self._watch()
        self._started = time.perf_counter()
        self.signals.hold()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A batch of an evaluation, whose peak counts from now on; the first ones are
        watched and measured as the first steps are."""
        session, report = self.session, self.report
        if session is None or report is None:
            yield
            return
        self._prediction.evaluates = True
        self.signals.hold()
        if self._num_evaluated == WATCHED_STEPS:
            yield
        else:
            self._num_evaluated += 1
            with session.watch():
                session.device.restart_peak()
                yield
                nbytes = session.device.peak_since()
            report.evaluation_bytes = max(report.evaluation_bytes, nbytes)
        self.signals.release()

    def end_step(self) -> None:
        """An optimizer step has ended."""
        assert self.session is not None and self.report is not None
        seconds = time.perf_counter() - self._started
        self.note_peak()
        self._watching.close()
        self.recovery.begin(None)
        self.report.step_s.append(seconds)
        if len(self.report.step_s) == CHECKED_STEP:
            peak = self.session.device.peak_bytes()
            self._prediction.compare(peak, self.recovery.unplanned_bytes)
        self.signals.release()

    def wrap_optimizer(
        self, plain: torch.optim.Optimizer, accelerator: Any = None
    ) -> torch.optim.Optimizer:
        """The optimizer to train with, guarded; `plain` itself outside a session. The scaler
        of a trainer in fp16 finds all gradients of it."""
        if self.session is None:
            return plain
        if accelerator is not None:
            self._unscale = accelerator.unscale_gradients
            if (scaler := accelerator.scaler) is not None:
                self._undo.enter_context(finds_all_gradients(scaler, self.session))
        optimizer = self.session.wrap_optimizer(plain)
        for handle in self.recovery.guard(optimizer):
            self._undo.callback(handle.remove)
        return optimizer

    def snapshot(self, readers: Sequence[str]) -> Snapshot | None:
        """Return what writes a checkpoint beside training; None where training has to
        wait, for `readers` too."""
        wanted = self.args.protrain_async_save and self.ranks.world.size == 1
        if self.session is None or self.report is None or not wanted:
            return None
        if readers:
            self._notices.once(
                f"protrain_async_save: training waits for checkpoints, which "
                f"{', '.join(readers)} may read as soon as they are saved."
            )
            return None
        forecast = self.report.forecast
        planned = forecast.host.peak_bytes
        taken = int(self.report.host_bytes(self.session.measured()))
        free = host_memory() - max(planned - taken, 0)
        return Snapshot(min(free, forecast.budget.host_bytes - planned))

    def replan(self, forecast: Forecast) -> None:
        """Go on with the step under another plan."""
        assert self.session is not None and self.report is not None
        # what moves now is not the step's
        self._watching.close()
        self.session.replan(forecast.plan)
        self.report.watched_steps = len(self.report.step_s) + WATCHED_STEPS
        self._watch()

    def _watch(self) -> None:
        assert self.session is not None and self.report is not None
        if len(self.report.step_s) < self.report.watched_steps:
            self._watching.enter_context(self.session.watch())

    def _finish(self, session: Session, report: RunReport, ranks: Ranks) -> None:
        measured = session.measured()
        if ranks.world.size > 1:
            own = {"plan": self._plan_hash, **asdict(measured)}
            own["host_peak_bytes"] = host_peak_bytes()
            own["step_s"] = report.median_step_s()
            report.ranks = ranks.collect(own)
        peaks = [rank["device_peak_bytes"] for rank in report.ranks]
        if not is_first():
            return
        peaks = peaks or [measured.device_peak_bytes]
        self._prediction.learn(peaks, self.recovery.unplanned_bytes)
        try:
            report.write(self._output_dir, measured, host_peak_bytes())
        except OSError as error:
            # the run's own error, a full disk perhaps, must not be hidden by this one
            self.log.error(f"output_dir: report.json was not written ({error}).")
        self.log.info(report.summary(measured, self._output_dir))

    def say_saved(self, checkpoint: Path) -> None:
        """A checkpoint has its name: all of it is on disk."""
        self._notices.once(f"ProTrain: {checkpoint.name} is complete.")

    @contextmanager
    def sampling(self, trainer: Any) -> Iterator[None]:
        """Inside, a trainer may let the model generate, or a server; see `Waves`, `Push`."""
        session, report = self.session, self.report
        if session is None or report is None:
            yield
            return
        server = getattr(trainer, "vllm_generation", None)
        if server is not None:
            changed = self.recovery.changed
            around = pushing(session, server, self.full_params, report.sent, changed)
        else:
            self._waves = self._waves or Waves(session, report, self.ranks, self.log)
            around = self._waves.around(trainer.model)
        started = time.perf_counter()
        with around:
            yield
        # no part of what a step is predicted to take
        self._started += time.perf_counter() - started

    def clip_grad_norm(self, max_norm: float) -> Tensor | None:
        """See `Session.clip_grad_norm`; None outside a session."""
        if self.session is None:
            return None
        if self.session.takes_gradients:
            # what accelerate's own begins with
            self._unscale()
        return self.session.clip_grad_norm(max_norm)

    def require_final_space(self) -> None:
        """Refuse Axolotl's save after training if the weights alone do not fit."""
        if not self._cfg.local_rank:
            require_space(self._output_dir, self._final_bytes)

    def note_peak(self) -> None:
        """Read the device's peak before a log resets the allocator's record of it."""
        if self.session is not None:
            self.session.device.peak_bytes()

    def log_values(self, step: int, loss: float) -> dict[str, float]:
        """Collect what has moved since the last call, and peaks, in GiB and seconds,
        for the Trainer's log; nothing that is 0. The report keeps the loss."""
        if self.session is None or self.report is None:
            return {}
        self.report.losses.append((step, loss))
        session = self.session
        now = {**asdict(session.counters), "stall_s": session.stall_s}
        since = {key: now[key] - self._logged.get(key, 0) for key in LOGGED}
        self._logged = now
        since["device_peak_bytes"] = session.device.peak_bytes()
        since["process_peak_bytes"] = host_peak_bytes()
        return {
            f"protrain/{key.replace('_bytes', '_gib')}": round(
                value / 2**30 if key.endswith("_bytes") else value, 6
            )
            for key, value in since.items()
            if value
        }

    def _warnings(
        self, forecast: Forecast, model: nn.Module, device: torch.device
    ) -> list[str]:
        notes = []
        plan = forecast.plan
        _, left_out = overrides(self.args) or (None, ())
        if left_out:
            filled = ", ".join(f"{k} {getattr(plan, k)}" for k in left_out)
            notes.append(f"Overrides completed with defaults: {filled}.")
            self.log.warning(notes[-1])
        if self._taken_over:
            notes.append(
                f"Taken over: {', '.join(self._taken_over)}. {plan.n_checkpoint} of "
                f"{len(plan.policies)} blocks recompute, {plan.n_swap} swap."
            )
        sampled, asked = forecast.generation, forecast.workload.generation
        # a service draws for each sequence alone
        if sampled and sampled.waves > 1 and asked and asked.steps:
            notes.append(
                f"Answers are generated {sampled.rows} at once, in {sampled.waves} waves: "
                "random numbers are drawn in another order than for all at once, so that "
                "they are other ones than on a card that holds them all."
            )
        evaluates = self._cfg.val_set_size or self._cfg.test_datasets
        if evaluates and device.type == "cpu" and may_repack(model):
            notes.append(NOT_REPACKED)
        if compile_keys(self._cfg) and device.type == "cpu":
            notes.append(UNCOUNTED)
        if device.type == "cuda":
            notes.append(allocator_note(os.environ))
        return notes


def is_first() -> bool:
    """Tell whether this is the first of all ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0


def host_peak_bytes() -> int:
    """Highest resident set size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
