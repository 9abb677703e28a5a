"""The public face of core: page a model in any torch loop, or plan one that is not here.

    with page(model, optimizer, example=batch, budget="22GiB") as paged:
        for batch in data:
            model(**batch).loss.backward()
            paged.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

`page` and `plan` check what they are given, make a `Job` of it (planner/job.py) and plan
that; `page` then opens a `Session` (engine/session.py), which `Paged` holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from .engine.data_parallel import (
    ignore_in_ddp,
    reduced_by_ddp,
    spread_rest,
    without_ddp,
)
from .engine.device import (
    allocator_note,
    expand_segments,
    open_device,
    require_known,
    this_device,
)
from .engine.optimizer import ShowingOptimizer
from .engine.ranks import Alone, Ranks
from .engine.recorded_step import clone_for, states_of
from .engine.scaling import finds_all_gradients
from .engine.session import Measured, Options, Session
from .errors import AccessError, BudgetError, ConfigError
from .host import host_memory, mapped_bytes
from .layout.tensors import is_quantised, map_tensors, tensors_in
from .planner.cards import gpu_hardware
from .planner.hardware import has_one_memory, measured_unseen_bytes
from .planner.job import (
    Choice,
    Job,
    TracedJob,
    device_budget,
    laid_out,
    loss_in,
    plan_for,
    plan_here,
    this_machine,
    trace_loss,
    with_disk_rate,
)
from .planner.meta import meta_copy
from .planner.optimizer_bytes import ADAMW, optimizer_bytes
from .planner.planner import Forecast
from .sizes import format_bytes, parse_bytes
from .types import ALONE, Hardware, Knobs, Workload, World

Loss = Callable[[nn.Module, Any], Tensor]
_META = torch.device("meta")


def gpu(name: str, ram: str | int = "64GiB", link: str | None = None) -> Hardware:
    """Describe a machine that is not here, for `plan`: a card, its host's memory, its link.

    Args:
        name: As `axolotl protrain plan --gpu` takes it, "RTX 4090" for example.
        ram: Memory of the host.
        link: Between both, "pcie4x16" for example; None for the card's fastest.
    """
    return gpu_hardware(name, link, _bytes("ram", ram))


def plan(
    model: nn.Module,
    *,
    example: Any,
    optimizer: Optimizer | None = None,
    hardware: Hardware | None = None,
    budget: str | int | None = None,
    host_budget: str | int | None = None,
    loss: Loss | None = None,
    accumulation: int = 1,
    autocast: torch.dtype | None = None,
    evaluates: float = 0.0,
    device: str | torch.device | None = None,
) -> Forecast:
    """Predict memory and speed of a paged training, without weights and without a device.

    Args:
        model: On the meta device or any other; nothing of it changes.
        optimizer: Over parameters of the model; None counts the state of AdamW.
        hardware: From `gpu`; None for this machine, which is measured.
        device: Type to trace for; by default "cuda" beside `hardware`.

    The rest is as for `page`.

    Raises:
        ProTrainError: As for `page`.
    """
    if device is None and hardware is not None:
        device = "cuda"
    where = _device(device) if hardware is None else torch.device(device or "cuda")
    step = _Step(example, loss, accumulation, autocast, evaluates)
    choice = _choice(budget, host_budget)
    _require_trained(model, optimizer)
    if hardware is None:
        _require_budget(where, choice)
        hardware = this_machine(choice, where, host_memory())
    with _named_here():
        subject = step.traced(meta_copy(model), model, optimizer, where.type)
        return plan_for(subject, hardware, choice)[0]


def page(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    example: Any,
    budget: str | int | None = None,
    host_budget: str | int | None = None,
    disk: str | Path | None = None,
    loss: Loss | None = None,
    accumulation: int = 1,
    autocast: torch.dtype | None = None,
    evaluates: float = 0.0,
    device: str | torch.device | None = None,
    knobs: Knobs | None = None,
    hardware: Hardware | None = None,
) -> Paged:
    """Move a model to where it trains under a budget, and page it until `Paged.close`.

    The loop stays as it is, but for two things: gradients are clipped by
    `Paged.clip_grad_norm_`, and who looks at weights or gradients does it in
    `Paged.full_params()`. Losses, norms and weights are those of the plain loop.

    Args:
        model: In host memory, `requires_grad` final, not compiled and not wrapped.
        optimizer: Over parameters of the model; any state it has is kept.
        example: The largest micro-batch there will be: a mapping is given to the model by
            name, a tuple by position. Only its shapes and integers count.
        budget: Device memory, as bytes or "22GiB"; by default what a GPU has free.
        host_budget: Host memory; by default what is free.
        disk: Folder on a fast disk for frozen weights for which the host has no room.
        loss: Computes the loss from model and example; by default what the model returns.
            Needed where the loop adds what it computes of weights, as a penalty.
        accumulation: Micro-batches of an optimizer step.
        autocast: Dtype of the region in which the loop runs the model, bfloat16, None, or
            float16, for whose GradScaler call `paged.adapt(scaler)`.
        evaluates: Tokens of an evaluation's batch over those of the example; 0 for none.
        device: Where to compute; by default the GPU, or without one the CPU. On a GPU call
            this before anything uses it: torch's allocator is then told to let segments
            grow, as small budgets need, unless PYTORCH_ALLOC_CONF says otherwise.
        knobs: The plan by hand instead of the fastest.
        hardware: Rates of this machine, known already; nothing is measured then.

    Raises:
        ConfigError: An argument is at fault.
        BudgetError: No plan fits; the message has the least budget.
        DiskError: The folder cannot be written, or a disk fails while training.
        LayoutError: The model has no repeated layers that could be paged.
        TraceError: The model cannot be run without weights.
    """
    expand_segments()
    where, choice = _device(device), _choice(budget, host_budget, knobs)
    choice = replace(choice, disk=_folder(disk))
    step = _Step(example, loss, accumulation, autocast, evaluates)
    _require_pageable(model, optimizer)
    _require_budget(where, choice)
    several = dist.is_initialized() and dist.get_world_size() > 1
    ranks = Ranks(where.type) if several else Alone()
    if hardware is not None:
        on_host = host_memory()
        has = device_budget(choice.device_bytes, where, on_host)
        hardware = replace(
            hardware,
            device_bytes=has,
            host_bytes=on_host,
            unseen_bytes=measured_unseen_bytes(where, has),
            desktop_bytes=0,
            one_memory=has_one_memory(where),
        )
        hardware = with_disk_rate(hardware, choice, ranks.world.local_size)

    def traced(meta: nn.Module) -> TracedJob:
        found = step.traced(meta, model, optimizer, where.type, ranks.world)
        # of a model that came from files nothing has to be freed
        return found.loaded_with(mapped_bytes(model.parameters()))

    job = Job(
        traced,
        partial(step.loss, where.type),
        choice,
        autocast,
        hardware=hardware,
    )
    with ExitStack() as undo:
        undo.callback(ranks.close)
        with _named_here():
            forecast, _planner, notes, _hash = plan_here(job, model, where, ranks)
        if where.type == "cuda":
            notes.append(allocator_note(os.environ))
        options = Options(accumulates=accumulation > 1, disk=choice.disk)
        paged = Paged(model, optimizer, forecast, notes, where, ranks, options)
        undo.pop_all()
    return paged


_OPEN: set[Paged] = set()
"""Not weak: a model stays paged when nobody holds what `page` returned."""


class Paged:
    """A model while it is paged, from `page` to `close` or the end of its `with`.

    Attributes:
        model: The same object as before, with its parameters.
        module: To be called on several ranks: the model, or its DistributedDataParallel
            where weights are left that this has to reduce.
        forecast: The plan and what it is predicted to cost.
        notes: What the plan was made without knowing.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        forecast: Forecast,
        notes: list[str],
        device: torch.device,
        ranks: Ranks,
        options: Options,
    ) -> None:
        self.model, self.forecast, self.notes = model, forecast, notes
        self._optimizer, self._ranks, self._undo = optimizer, ranks, ExitStack()
        self.module: nn.Module = model
        self._measured: Measured | None = None
        opened = open_device(device)
        layout, plan = forecast.layout, forecast.plan
        self._session = session = Session(model, layout, plan, opened, options, ranks)
        with ExitStack() as undo:
            undo.callback(session.close)
            kept = {p for n, p in model.named_parameters() if n in session.host_kept}
            _move_state(optimizer, without=kept)
            session.wrap_optimizer(optimizer)
            self._several = ranks.world.size > 1
            if self._several:
                undo.enter_context(ignore_in_ddp(model, session.host_kept))
                spread_rest(model)
                if reduced_by_ddp(model):
                    self.module = DistributedDataParallel(model)
            self._undo = undo.pop_all()
        _OPEN.add(self)

    def __enter__(self) -> Paged:
        self._require_open("entered")
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.close(failed=kind is not None)

    def close(self, failed: bool = False) -> None:
        """Give the model back in host memory, with all steps applied, and the optimizer;
        gradients for which no step was made are in `.grad`.

        After a failure the other ranks may never come to what ranks do together.
        """
        if self in _OPEN:
            _OPEN.discard(self)
            self.module = self.model
            waiting: dict[nn.Parameter, Tensor] = {}
            with ExitStack() as undo:
                undo.callback(_set_gradients, waiting)
                undo.callback(self._let_go)
                if not failed:
                    undo.callback(self._ranks.close)
                undo.callback(_move_state, self._optimizer)
                undo.push(self._undo)
                if not failed:
                    # last: an error in it closes all the same
                    waiting.update(self._session.waiting_gradients())

    def _let_go(self) -> None:
        # host memory of gradients and masters goes with the session
        self._measured = self._session.measured()
        del self._session

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all parameters of the model, as `torch.nn.utils` does, and
        return their norm; gradients in host memory are among them."""
        return self._clip(max_norm, norm_type, [*self.model.parameters()])

    def _clip(
        self, max_norm: float, norm_type: float, params: list[nn.Parameter]
    ) -> Tensor:
        self._require_open("clipped")
        if norm_type != 2.0:
            raise ConfigError(
                f"norm_type: {norm_type} cannot be had of gradients that are in host "
                "memory. Use 2.0, or compute it in `with paged.full_params():`."
            )
        norm = self._session.clip_grad_norm(max_norm, params)
        if norm is None:
            norm = nn.utils.clip_grad_norm_(params, max_norm)
        return norm

    def full_params(self) -> AbstractContextManager[None]:
        """Show weights and gradients as plain tensors with their true values inside, those
        that page in host memory; what is written there counts. All ranks enter."""
        if self not in _OPEN:
            return nullcontext()
        return self._session.full_params()

    @contextmanager
    def micro_batch(self, last: bool = True) -> Iterator[None]:
        """Surround forward and backward of a micro-batch; several ranks have to, and say
        which one is the `last` of a step: gradients are averaged in it."""
        self._require_open("trained")
        self._session.begin_micro_batch(last)
        with ExitStack() as undo:
            if isinstance(self.module, DistributedDataParallel):
                hook = self.model.register_forward_pre_hook(_require_wrapper)
                undo.callback(hook.remove)
                if not last:
                    undo.enter_context(self.module.no_sync())
            yield

    def adapt(self, accelerator: Any) -> None:
        """Let an `accelerate.Accelerator`, a Trainer's for example, train this model: it
        leaves placement to us and clips over all gradients; or let a `GradScaler` find
        them. Ends with `close`."""
        self._require_open("adapted")
        model, undo = self.model, self._undo
        is_scaler = isinstance(accelerator, torch.amp.GradScaler)
        scaler = accelerator if is_scaler else accelerator.scaler
        if scaler is not None:
            undo.enter_context(finds_all_gradients(scaler, self._session))
        if is_scaler:
            return
        plain = accelerator.clip_grad_norm_
        own = {id(param) for param in model.parameters()}

        def clip(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
            one = isinstance(parameters, Tensor)
            params: list[Any] = [parameters] if one else [*parameters]
            given = set(map(id, params))
            if not self._session.host_kept or not own & given:
                return plain(params, max_norm, norm_type)
            trained = (p for p in model.parameters() if p.requires_grad)
            if given - own or not given.issuperset(map(id, trained)):
                raise AccessError(
                    "parameters: gradients in host memory are clipped together, and these "
                    f"{len(params)} are not the parameters of the paged model. Give "
                    "`model.parameters()`, or clip inside `with paged.full_params():`."
                )
            # what the plain one begins with
            accelerator.unscale_gradients()
            return self._clip(max_norm, norm_type, params)

        undo.enter_context(patch.object(accelerator, "clip_grad_norm_", clip))
        undo.enter_context(patch.object(accelerator, "device_placement", False))
        if self._several:
            if not reduced_by_ddp(model):
                undo.enter_context(without_ddp(accelerator, model))

            def begins(*_: Any) -> None:
                if model.training and torch.is_grad_enabled():
                    self._session.begin_micro_batch(accelerator.sync_gradients)

            undo.callback(model.register_forward_pre_hook(begins, prepend=True).remove)

    def gathered_state(self) -> AbstractContextManager[None]:
        """Give the first rank of each node all optimizer state inside, to be saved; all
        ranks enter. A rank alone always has it."""
        return self._session.gathered_state() if self in _OPEN else nullcontext()

    def measured(self) -> Measured:
        """Bytes moved, peaks and seconds waited so far."""
        return self._measured or self._session.measured()

    def watch(self) -> AbstractContextManager[object]:
        """Count device bytes exactly inside, a step for example: on the CPU device the
        peak is known of what ran inside alone."""
        self._require_open("watched")
        return self._session.watch()

    def _require_open(self, what: str) -> None:
        if self not in _OPEN:
            raise AccessError(
                f"paged: it is closed and cannot be {what}; the model is a plain one in "
                "host memory again. Call `page` once more to go on."
            )


@dataclass(frozen=True)
class _Step:
    """The objective of a step of the caller's loop."""

    example: Any
    loss_of: Loss | None
    accumulation: int
    autocast: torch.dtype | None
    evaluates: float

    def __post_init__(self) -> None:
        tensors = list(tensors_in(self.example))
        if not tensors:
            raise ConfigError(
                f"example: {type(self.example).__name__} holds no tensor. Give a micro-batch "
                "as the model takes it: a dict by name, a tuple by position, or a tensor."
            )
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise ConfigError(
                f"autocast: {self.autocast} is no dtype that autocast computes in. Use "
                "torch.bfloat16, None, or torch.float16 with a GradScaler."
            )
        if not isinstance(self.accumulation, int) or self.accumulation < 1:
            raise ConfigError(
                f"accumulation: {self.accumulation!r} is no number of micro-batches from 1"
            )

    def loss(self, device_type: str, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch, as the loop runs it."""
        dtype, loss_of = self.autocast, self.loss_of or _returned
        with torch.autocast(device_type, dtype, enabled=dtype is not None):
            found = loss_of(model, batch)
        if not isinstance(found, Tensor) or found.ndim or not found.requires_grad:
            raise ConfigError(
                f"loss: {type(model).__name__} gives no number with a gradient for the "
                "example. Add labels to the example, or give `loss=lambda model, batch: "
                "...` that returns one."
            )
        return found

    def traced(
        self,
        meta: nn.Module,
        real: nn.Module,
        optimizer: Optimizer | None,
        device_type: str,
        world: World = ALONE,
    ) -> TracedJob:
        """A `Job`'s trace, of a model on the meta device."""
        if not real.training:
            meta.train()
        batch = self.example
        if isinstance(batch, Mapping):
            batch = dict(batch)

        def loss() -> Tensor:
            # moved inside: its values stay known
            there = map_tensors(batch, lambda tensor: tensor.to(_META))
            return self.loss("meta", meta, there)

        traced = trace_loss(meta, device_type, loss, self.autocast)
        notes, held = list[str](), ADAMW
        if optimizer is not None:
            there = zip(real.parameters(), meta.parameters(), strict=True)
            make, name = partial(clone_for, optimizer, dict(there)), type(optimizer)
            on_cpu = device_type == "cpu"
            held = optimizer_bytes(make, name.__name__, meta, on_cpu, notes)
        waits = held.separable and world.size == 1
        layout, said = laid_out(real, traced, waits)
        tensors = list(tensors_in(batch))
        workload = Workload(
            accumulation=self.accumulation,
            tokens=max(
                (t.numel() for t in tensors if not t.is_floating_point()), default=0
            ),
            host_is_exact=device_type == "cpu"
            and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW),
            **held.in_workload,
            eval_ratio=float(self.evaluates),
            loader_bytes=sum(tensor.nbytes for tensor in tensors),
            world=world,
        )
        own = None if any(t.is_meta for t in tensors) else batch
        return TracedJob(
            traced, layout, workload, own, frozenset(), 0, (*notes, *said), held
        )


def _returned(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        outputs = model(**batch)
    else:
        outputs = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    if isinstance(outputs, Mapping) and "loss" not in outputs:
        raise ConfigError(
            f"example: {type(model).__name__} returns no loss for it. Add labels, or give "
            "`loss=lambda model, batch: ...`."
        )
    return loss_in(outputs)


# at the border


def _bytes(name: str, value: str | int) -> int:
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ConfigError(f'{name}: {error}. Write for example "22GiB".') from None


def _choice(
    budget: str | int | None, host_budget: str | int | None, knobs: Knobs | None = None
) -> Choice:
    return Choice(
        None if budget is None else _bytes("budget", budget),
        None if host_budget is None else _bytes("host_budget", host_budget),
        knobs=knobs,
    )


def _folder(disk: str | Path | None) -> Path | None:
    if disk is None:
        return None
    if not isinstance(disk, (str, Path)) or not str(disk):
        raise ConfigError(f"disk: {disk!r} is no folder. Give the path of one.")
    return Path(disk).expanduser()


def _device(device: str | torch.device | None) -> torch.device:
    found = this_device() if device is None else torch.device(device)
    require_known(found)
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def _require_budget(device: torch.device, choice: Choice) -> None:
    if device.type == "cpu" and choice.device_bytes is None:
        raise ConfigError(
            "budget: the CPU device has no memory of its own that would limit it. Say how "
            'much it may use, for example budget="2GiB".'
        )


def _require_wrapper(model: nn.Module, _args: Any) -> None:
    active = DistributedDataParallel._get_active_ddp_module()
    if torch.is_grad_enabled() and active is None:
        raise AccessError(
            f"micro_batch: {type(model).__name__} is called without its "
            "DistributedDataParallel, and gradients that stay on the device would not be "
            "averaged over the ranks. Call `paged.module`."
        )


def _require_trained(model: nn.Module, optimizer: Optimizer | None) -> None:
    if isinstance(model, (DistributedDataParallel, OptimizedModule)):
        raise ConfigError(
            f"model: a {type(model).__name__} wraps it. Give the plain model, `.module` or "
            "`._orig_mod`, and call that in the loop."
        )
    trained = {param for param in model.parameters() if param.requires_grad}
    if not trained:
        raise ConfigError(
            f"model: no parameter of {type(model).__name__} requires a gradient, so that "
            "nothing trains. Set `requires_grad` of what does before."
        )
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer) or hasattr(optimizer, "optimizer"):
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} is no torch.optim.Optimizer, or wraps "
            "one. Give the plain one, and let others wrap it inside of `with page(...)`."
        )
    own = {param for group in optimizer.param_groups for param in group["params"]}
    if foreign := own - {*model.parameters()}:
        raise ConfigError(
            f"optimizer: {len(foreign)} of its {len(own)} parameters are not the model's, "
            "made of another one or before the model was moved or wrapped. Give it "
            "parameters of this model, and others an optimizer of their own."
        )
    if left := [n for n, p in model.named_parameters() if p in trained - own]:
        raise ConfigError(
            f"optimizer: {len(left)} parameters that require a gradient are not among those "
            f"that it updates, {left[0]} for example. Give it all of them, or freeze these "
            "by `requires_grad_(False)`."
        )


def _require_pageable(model: nn.Module, optimizer: Optimizer) -> None:
    if optimizer is None:
        raise ConfigError("optimizer: page needs the one that trains the model")
    params = dict(model.named_parameters())
    held = {id(param) for paged in _OPEN for param in paged.model.parameters()}
    if isinstance(optimizer, ShowingOptimizer) or held.intersection(
        map(id, params.values())
    ):
        raise ConfigError(
            "model: it is paged already, or its optimizer is. Close the first "
            "`page(...)` before the next one."
        )
    _require_trained(model, optimizer)
    for name, param in params.items():
        if param.is_meta:
            raise ConfigError(
                f"model: {name} has no values, it is on the meta device. Load the weights "
                "into host memory first; `plan` needs none."
            )
        if param.device.type != "cpu":
            raise ConfigError(
                f"model: {name} is on {param.device}. Leave the model in host memory "
                "(`model.cpu()`): page moves it to where the plan has it. What places "
                "models, a Trainer for example, is made inside of `with page(...)`."
            )
        if param.grad is not None:
            raise ConfigError(
                f"model: {name} has a gradient already. Page between two steps, after "
                "`optimizer.zero_grad()`."
            )
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is not None and not any(map(is_quantised, params.values())):
        raise ConfigError(
            "model: it is quantised by another library than bitsandbytes, whose weights "
            "cannot be paged. Give the base that it was made from."
        )


@contextmanager
def _named_here() -> Iterator[None]:
    """Errors of the planner by the names of this module's arguments."""
    try:
        yield
    except BudgetError as error:
        name = "budget" if error.of_device else "host_budget"
        least, host = -(-error.needs // 2**20), -(-error.or_host // 2**20)
        raise BudgetError(
            f"{name}: no plan fits {format_bytes(error.has)}; the one that lacks least "
            f'needs {format_bytes(error.needs)}. Give {name}="{least}MiB" if the '
            f"{'device' if error.of_device else 'host'} has it, "
            + f'host_budget="{host}MiB" if the host has that, ' * bool(host)
            + "else a smaller example or an adapter instead of a full fine-tune."
        ) from error


def _set_gradients(gradients: Mapping[nn.Parameter, Tensor]) -> None:
    for param, gradient in gradients.items():
        param.grad = gradient


def _move_state(optimizer: Optimizer, without: Any = ()) -> None:
    """Move the state of parameters to where these are, by torch's own rule."""
    states = states_of(optimizer)
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for param in group["params"]:
            for key, value in states.get(param, {}).items():
                if param not in without and (key != "step" or on_device):
                    there = map_tensors(value, lambda t, p=param: t.to(p.device))  # type: ignore[misc]
                    states[param][key] = there
