"""Hooks of others run as often, on the same tensors, as under torch's own checkpointing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial, wraps
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from core_models import (
    Stack,
    adamw,
    assert_same,
    batches,
    freeze,
    open_session,
    stack,
    train,
    wrapped,
)
from covering import pairwise
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2Model

from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.errors import AccessError
from axolotl.integrations.protrain.core.layout import find_blocks
from axolotl.integrations.protrain.core.planner.block_times import (
    BlockSample,
    measure_blocks,
    time_outside,
)
from axolotl.integrations.protrain.core.planner.meta import (
    meta_copy,
    without_global_hooks,
)
from axolotl.integrations.protrain.core.planner.trace import trace_step

Counts = Counter[str]
Handles = list[Any]

BLOCKS = range(4)
POLICIES: dict[str, dict[str, Any]] = {
    "keep": {},
    "recompute": {"recompute": BLOCKS},
    "swap": {"swap": BLOCKS},
    "swap inputs": {"swap": BLOCKS, "recompute": BLOCKS},
}
RESIDENT = {"paged": (), "resident": BLOCKS}
DATA = [batches(2, seed, 40) for seed in range(2)]


class Checkpointed(Stack):
    """Its layers are called as transformers' `GradientCheckpointingLayer` calls itself."""

    checkpoints = by_name = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            args, kwargs = ((), {"x": x}) if self.by_name else ((x,), {})
            call = partial(layer.__call__, **kwargs)
            if self.checkpoints:
                x = checkpoint(call, *args, use_reentrant=False)
            else:
                x = call(*args)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        )


def scaled(name: str, counts: Counts, value: Any) -> Any:
    """Count a call, and scale a tensor, the first of a tuple, or what is named x."""
    counts[name] += 1
    if isinstance(value, Tensor):
        return value * 1.05
    if isinstance(value, dict):
        return {**value, "x": value["x"] * 1.05} if value else value
    return (value[0] * 1.05, *value[1:]) if value else value


def forward_hooks(counts: Counts, block: nn.Module) -> Handles:
    own = partial(scaled, counts=counts)

    def with_kwargs(_module: Any, args: Any, kwargs: Any) -> Any:
        return own("pre, kwargs", value=args), own("pre, kwargs", value=kwargs)

    return [
        block.register_forward_pre_hook(lambda _, args: own("pre", value=args)),
        block.register_forward_pre_hook(
            lambda _, args: own("pre, in front", value=args), prepend=True
        ),
        block.register_forward_pre_hook(with_kwargs, with_kwargs=True),
        block.register_forward_hook(lambda *given: own("hook", value=given[-1])),
        block.register_forward_hook(
            lambda *given: own("hook, in front", value=given[-1]), prepend=True
        ),
        block.register_forward_hook(
            lambda *given: own("hook, kwargs", value=given[-1]), with_kwargs=True
        ),
        block.register_forward_hook(
            lambda *given: own("hook, always", value=given[-1]), always_call=True
        ),
    ]


def hooks_on_children(counts: Counts, block: nn.Module) -> Handles:
    handles = [forward_hooks(counts, child) for child in block.children()]
    return [handle for some in handles for handle in some]


def backward_hooks(counts: Counts, block: nn.Module) -> Handles:
    own = partial(scaled, counts=counts)
    return [
        block.register_full_backward_pre_hook(lambda _, out: own("pre", value=out)),
        block.register_full_backward_hook(lambda *given: own("full", value=given[1])),
        *(
            child.register_full_backward_hook(
                lambda *given: own("of a child", value=given[1])
            )
            for child in block.children()
            if isinstance(child, nn.Linear)
        ),
    ]


def tensor_hooks(counts: Counts, block: nn.Module) -> Handles:
    def before(_module: Any, args: Any) -> None:
        counts["before"] += 1
        if args[0].requires_grad:
            args[0].register_hook(partial(scaled, "gradient of an input", counts))

    def after(_module: Any, _args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(scaled, "gradient of an output", counts))

    return [
        block.register_forward_pre_hook(before),
        block.register_forward_hook(after),
    ]


def global_hooks(counts: Counts, block: nn.Module) -> Handles:
    own = partial(scaled, counts=counts)

    def of_block(name: str, place: int) -> Callable[..., Any]:
        def hook(module: nn.Module, *given: Any) -> Any:
            return own(name, value=given[place]) if module is block else None

        return hook

    return [
        torch_module.register_module_forward_pre_hook(of_block("pre", 0)),
        torch_module.register_module_forward_hook(of_block("hook", 1)),
        torch_module.register_module_forward_hook(
            of_block("always", 1), always_call=True
        ),
        torch_module.register_module_full_backward_hook(of_block("backward", 0)),
        torch_module.register_module_full_backward_pre_hook(of_block("pre", 0)),
    ]


KINDS: dict[str, Callable[[Counts, nn.Module], Handles]] = {
    "forward": forward_hooks,
    "children": hooks_on_children,
    "backward": backward_hooks,
    "tensor": tensor_hooks,
    "global": global_hooks,
}


def model_of(recomputes: bool = False, by_name: bool = False) -> Checkpointed:
    torch.manual_seed(0)
    model = Checkpointed(num_layers=len(BLOCKS), width=32, dropout=0.1)
    model.checkpoints, model.by_name = recomputes, by_name
    return model


def trained(
    model: Checkpointed,
    register: Callable[[Counts, nn.Module], Handles],
    later: bool = False,
    **plan: Any,
) -> tuple[list[float], dict[str, Tensor], Counts]:
    """Losses and norms, weights, and how often each hook ran; plain without a plan."""
    counts: Counts = Counter()
    handles: Handles = []

    def hook_up() -> None:
        for layer in model.layers:
            handles.extend(register(counts, layer))

    if not later:
        hook_up()
    session = open_session(model, **plan) if plan else None
    if later:
        hook_up()
    optimizer = wrapped(session) if session else adamw(model)
    torch.manual_seed(5)
    try:
        numbers = train(model, optimizer, DATA, session, clip=1.0)
    finally:
        for handle in handles:
            handle.remove()
        if session is not None:
            session.close()
    assert all(layer._compiled_call_impl is None for layer in model.layers)
    return numbers, model.state_dict(), counts


def require_same(ours: Any, plain: Any) -> None:
    assert ours[2] == plain[2]
    assert ours[0] == plain[0]
    assert_same(ours[1], plain[1])


@pytest.mark.parametrize(
    ("kind", "policy", "resident", "later"),
    pairwise([*product(KINDS, POLICIES, RESIDENT, (False, True))]),
)
def test_hooks_run_as_under_plain_checkpointing(
    kind: str, policy: str, resident: str, later: bool
) -> None:
    how = POLICIES[policy]
    plain = trained(model_of("recompute" in how), KINDS[kind])
    ours = trained(model_of(), KINDS[kind], later, resident=RESIDENT[resident], **how)
    assert plain[2].total() >= len(BLOCKS) * 4
    require_same(ours, plain)


@pytest.mark.parametrize("policy", POLICIES)
def test_inputs_by_name(policy: str) -> None:
    how = POLICIES[policy]
    plain = trained(model_of("recompute" in how, by_name=True), forward_hooks)
    require_same(
        trained(model_of(by_name=True), forward_hooks, **how, n_buffer=2), plain
    )


def in_place(counts: Counts, block: nn.Module) -> Handles:
    def double(_module: Any, args: Any) -> None:
        counts["in place"] += 1
        # what an embedding gives is no leaf
        args[0].mul_(2)

    return [block.register_forward_pre_hook(double)]


@pytest.mark.parametrize("policy", POLICIES)
def test_inputs_that_a_hook_changes_in_place(policy: str) -> None:
    how = POLICIES[policy]
    if "recompute" in how:
        for model, plan in (model_of(True), {}), (model_of(), {**how, "n_buffer": 2}):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                trained(model, in_place, **plan)
        return
    require_same(
        trained(model_of(), in_place, **how, n_buffer=2), trained(model_of(), in_place)
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("at", ["first forward", "recomputation"])
def test_a_hook_that_raises(policy: str, at: str) -> None:
    """The window closes, and training goes on as the plain one does."""
    how = POLICIES[policy]
    # a recomputation comes to the last block first, when each has been called once
    nth = 3 if at == "first forward" else len(BLOCKS) + 1

    def raising(counts: Counts, block: nn.Module) -> Handles:
        def hook(_module: Any, _args: Any) -> None:
            counts["hook"] += 1
            if counts["hook"] == nth:
                raise ValueError("once")

        return [block.register_forward_pre_hook(hook)]

    def steps(model: Checkpointed, session: Session | None) -> Any:
        counts: Counts = Counter()
        handles = [h for layer in model.layers for h in raising(counts, layer)]
        raised = []
        for tokens in DATA[0]:
            try:
                model(tokens).backward()
            except ValueError:
                raised.append(counts.total())
                model.zero_grad()
                if session is not None:
                    session.forget_gradients()
        for handle in handles:
            handle.remove()
        return raised, counts

    plain = steps(model_of("recompute" in how), None)
    model = model_of()
    session = open_session(model, n_buffer=2, **how)
    assert steps(model, session) == plain
    # which a pass that runs would refuse
    with session.full_params():
        pass
    session.close()


@pytest.mark.parametrize("reads", [False, True])
def test_a_recomputed_block_has_a_cache_only_to_read(reads: bool) -> None:
    """As transformers' `GradientCheckpointingLayer` has it."""
    model, seen = model_of(), []

    def note(_module: Any, _args: Any, kwargs: Any) -> Any:
        seen.append(kwargs.pop("past_key_values"))
        return _args, kwargs

    block = model.layers[0]
    block._can_checkpoint_with_cache = reads
    session = open_session(model, n_buffer=2, recompute=BLOCKS)
    block.register_forward_pre_hook(note, with_kwargs=True)
    x = torch.randn(2, 3, 32, requires_grad=True)
    block(x, past_key_values="cache").sum().backward()
    with torch.no_grad():
        block(x, past_key_values="cache")
    session.close()
    given = "cache" if reads else None
    assert seen == [given, given, "cache"]


def test_a_block_that_somebody_compiles_in_training_is_refused() -> None:
    model = model_of()
    session = open_session(model, n_buffer=2, recompute=(1,))
    model(DATA[0][0]).backward()
    model.layers[1].compile(backend="eager")
    with pytest.raises(AccessError, match="torch_compile: true"):
        model(DATA[0][0])
    session.close()


def test_a_call_that_was_compiled_before_runs_inside() -> None:
    model, seen = model_of(), []

    def compiled(layer: nn.Module, x: Tensor) -> Tensor:
        seen.append(bool(layer.up.weight.isfinite().all()))
        return layer._call_impl(x)

    before = [partial(compiled, layer) for layer in model.layers]
    for layer, call in zip(model.layers, before, strict=True):
        layer._compiled_call_impl = call
    session = open_session(model, n_buffer=2, recompute=BLOCKS)
    model(DATA[0][0]).backward()
    session.close()
    # what is not in its slot is NaN
    assert seen == [True] * 2 * len(BLOCKS)
    assert [layer._compiled_call_impl for layer in model.layers] == before


# traces and timings


class Bound:
    """Counts its calls, as an object and as a method."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts

    def __call__(self, *_: Any) -> None:
        self.counts["object"] += 1

    def method(self, *_: Any) -> None:
        self.counts["method"] += 1

    def around(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def counted(*args: Any) -> Any:
            self.counts["around"] += 1
            return hook(*args)

        return counted


def registering(owner: Any, prefix: str) -> list[str]:
    """What registers hooks, but for the backward hooks of before."""
    names = [n for n in dir(owner) if n.startswith(prefix) and n.endswith("_hook")]
    return [n for n in names if n != f"{prefix}backward_hook"]


def every_hook(model: nn.Module, counts: Counts) -> Handles:
    """Every kind of hook on every module and parameter, and for all."""

    def called(name: str) -> Callable[..., None]:
        def hook(*_args: Any, **_kwargs: Any) -> None:
            counts[name] += 1

        return hook

    handles: Handles = []
    names = registering(nn.Module, "register_")
    assert len(names) >= 8
    decorated, bound = torch.no_grad()(called("decorated")), Bound(counts)
    for module in model.modules():
        handles += [getattr(module, name)(called(name)) for name in names]
        for other in bound, bound.method, partial(called("partial"), 1), decorated:
            handles.append(module.register_forward_hook(other))
    for param in model.parameters():
        if param.requires_grad:
            handles += [
                param.register_hook(called("tensor")),
                param.register_post_accumulate_grad_hook(called("accumulated")),
            ]
    for name in registering(torch_module, "register_module_"):
        handles.append(getattr(torch_module, name)(called(name)))
    for register in register_optimizer_step_pre_hook, register_optimizer_step_post_hook:
        handles.append(register(called("optimizer")))
    return handles


@pytest.fixture
def hooked() -> Iterator[tuple[Stack, Counts]]:
    """A model, and how often its hooks were called."""
    model, counts = stack(num_layers=3), Counter[str]()
    freeze(model, ("up", "norm"))
    handles = every_hook(model, counts)
    yield model, counts
    for handle in handles:
        handle.remove()


def test_a_trace_and_a_timing_leave_no_mark_on_hooks(
    hooked: tuple[Stack, Counts], tmp_path: Path
) -> None:
    model, counts = hooked
    tables = {
        name: dict(table)
        for name, table in vars(torch_module).items()
        if name.startswith("_global_") and isinstance(table, dict)
    }
    tokens = batches(1)[0]
    copied = meta_copy(model)
    step = trace_step(copied, find_blocks(copied), lambda: copied(tokens))
    samples = {name: step.samples[i] for i, name in enumerate(step.trace.blocks)}
    cpu = torch.device("cpu")
    names = step.trace.blocks
    measure_blocks(model, names, step.samples, cpu, None, tmp_path, lambda **_: {})
    time_outside(model, samples, {"tokens": tokens}, lambda m, given: m(**given), cpu)
    with without_global_hooks():
        adamw(model).step()
    assert not counts
    # they are where they were
    assert all(vars(torch_module)[name] == table for name, table in tables.items())
    model(tokens).backward()
    assert counts["register_module_forward_hook"] and counts["accumulated"]
    adamw(model).step()
    assert counts["optimizer"] == 2
    assert counts["method"] == counts["object"] == counts["decorated"]


def test_hooks_of_libraries_are_in_a_trace() -> None:
    """With transformers' hook what a frozen embedding gives requires gradients."""
    config = GPT2Config(vocab_size=8, n_embd=8, n_head=1, n_layer=1, n_positions=8)
    model = GPT2Model(config).requires_grad_(False)
    model.enable_input_require_grads()
    for wrapped_, kept in (False, True), (True, False):
        (key,) = model.wte._forward_hooks
        if wrapped_:
            # its own code runs first
            model.wte._forward_hooks[key] = Bound(Counter()).around(
                model.wte._forward_hooks[key]
            )
        ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
        assert meta_copy(model).wte(ids).requires_grad == kept


def test_a_timed_block_shares_weights_and_keeps_its_buffers(
    tmp_path: Path,
) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            assert self.linear.weight.data_ptr() == address
            self.count += 1
            return self.linear(x)

    model = nn.ModuleList([Counting()])
    address = model[0].linear.weight.data_ptr()
    sample = BlockSample((torch.empty(2, 4, device="meta", requires_grad=True),), {})
    cpu = torch.device("cpu")
    measure_blocks(model, ["0"], {0: sample}, cpu, None, tmp_path, lambda **_: {})
    assert model[0].count == 0
