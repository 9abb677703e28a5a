"""Updates on the device, as late as the weights are used: what the plain run computes.

Every optimizer, and what may happen between a step and its updates.
"""

from __future__ import annotations

import copy
import io
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from core_models import (
    ALL,
    HOST_STATE,
    adamw,
    assert_same,
    batches,
    checked,
    open_session,
    stack,
    train,
    twin,
)
from grid import OPTIMIZERS, Make, assert_same_content, leaves
from simulated import DeferredDevice
from torch import Tensor, nn

from axolotl.integrations.protrain.core.engine.session import Session
from axolotl.integrations.protrain.core.engine.staging import Source, Staging
from axolotl.integrations.protrain.core.errors import AccessError
from axolotl.integrations.protrain.core.types import Counters, Placement, Update

SIZES: dict[str, Any] = {"num_layers": 3, "width": 16, "inner": 16}

PAGED: dict[str, Any] = {"n_buffer": 2}
MIXED: dict[str, Any] = {
    "resident": [1],
    "inside": HOST_STATE,
    "n_buffer": 1,
    "outside": HOST_STATE,
}


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    matrices = [p for p in params if p.ndim > 1]
    others = [p for p in params if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]


def by_number(packed: dict[str, Any]) -> dict[str, Any]:
    """What `state_dict` gives, with states in the order of their parameters: where they
    have been cleared they come in that of their making, which loads do not go by."""
    return {**packed, "state": dict(sorted(packed["state"].items()))}


def assert_same_state(
    ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, in_order: bool = True
) -> None:
    states = [optimizer.state_dict() for optimizer in (ours, theirs)]
    assert_same_content(*(leaves(s if in_order else by_number(s)) for s in states))


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """torchao compiles its step, which takes a minute and changes no number."""
    with torch.compiler.set_stance("force_eager"):
        yield


DATA = [batches(2, seed, length=6) for seed in range(6)]


class Run:
    """A model with its optimizer, plain or paged; `plan` is for `open_session`."""

    def __init__(
        self, model: Any, make: Make, plan: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.model, self.dtype = model, torch.float32
        self.session: Session | None = None
        if plan is not None:
            self.session = open_session(model, **plan, **options)
        self.optimizer = make(grouped(model))
        if self.session is not None:
            self.optimizer = self.session.wrap_optimizer(self.optimizer)
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def backward(self, number: int) -> list[float]:
        """Two micro-batches; their losses."""
        losses = []
        for tokens in DATA[number]:
            loss = self.model(tokens) / 2
            loss.backward()
            losses.append(loss.item())
        return losses

    def clip(self, max_norm: float) -> float:
        if self.session is not None:
            norm = self.session.clip_grad_norm(max_norm)
        else:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        assert norm is not None
        return norm.item()

    def step(self, number: int, clip: float | None = 0.5) -> list[float]:
        """Losses, and the norm before clipping."""
        numbers = self.backward(number)
        if clip is not None:
            numbers.append(self.clip(clip))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return numbers

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


# between a step and its updates


def flat(value: Any) -> list[Tensor]:
    """Copies of the tensors in a state or a list."""
    found = torch.utils._pytree.tree_leaves(leaves(value))
    return [x.clone() for x in found if isinstance(x, Tensor)]


def steps(run: Run) -> Any:
    return run.step(5)


def steps_without_clipping(run: Run) -> Any:
    return run.step(5, None)


def steps_again(run: Run) -> Any:
    run.optimizer.step()


def evaluates(run: Run) -> Any:
    with torch.inference_mode():
        loss = run.model.eval()(DATA[4][0]).item()
    run.model.train()
    return loss


def evaluates_a_part(run: Run) -> Any:
    run.model.order = [1]
    with torch.no_grad():
        loss = run.model(DATA[4][0]).item()
    run.model.order = range(3)
    return loss


def leaves_out_blocks(run: Run) -> Any:
    """Their updates wait for another step, and that one finds gradients of others."""
    run.model.order = [2, 0]
    numbers = run.step(4)
    run.model.order = range(3)
    return numbers


def uses_blocks_in_one_micro_batch(run: Run) -> Any:
    """A sum is there, and an update still to come, when the second one begins."""
    numbers = []
    for order, tokens in zip(([0], [2, 1, 0]), DATA[3], strict=True):
        run.model.order = order
        loss = run.model(tokens)
        loss.backward()
        numbers.append(loss.item())
    run.model.order = range(3)
    numbers.append(run.clip(0.3))
    run.optimizer.step()
    run.optimizer.zero_grad()
    return numbers


def edits_groups(run: Run) -> Any:
    for group in run.optimizer.param_groups:
        group["weight_decay"] = 0.3
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(0.5)
        elif group["lr"] is not None:
            group["lr"] *= 0.5


def reads_the_state(run: Run) -> Any:
    return flat(by_number(run.optimizer.state_dict()))


def reads_weights(run: Run) -> Any:
    return flat(run.model.state_dict())


def looks(run: Run) -> Any:
    with run.session.full_params() if run.session else nullcontext():
        return [p.detach().clone() for p in run.model.parameters()]


def writes(run: Run) -> Any:
    with run.session.full_params() if run.session else nullcontext(), torch.no_grad():
        for param in run.model.parameters():
            param.mul_(0.9)


def copies(run: Run) -> Any:
    with torch.no_grad():
        return copy.deepcopy(run.model)(DATA[4][0]).item()


def loads_weights(run: Run) -> Any:
    run.model.load_state_dict(stack(seed=3, dtype=run.dtype, **SIZES).state_dict())


def loads_the_state(run: Run) -> Any:
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    run.step(3)
    run.optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue())))


def trains_under_autocast(run: Run) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return run.step(4)


def drops_gradients(run: Run) -> Any:
    numbers = [*run.backward(4), run.clip(0.01)]
    run.optimizer.zero_grad()
    return numbers


def clips_each_micro_batch(run: Run) -> Any:
    """What is added to a sum is not to be scaled by what was before it."""
    numbers = []
    for number in (3, 4):
        numbers += [*run.backward(number), run.clip(0.05)]
    numbers += run.backward(5)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return numbers


def sets_gradients_after_clipping(run: Run) -> Any:
    numbers = [*run.backward(4), run.clip(0.01)]
    for weight in (run.model.layers[1].up.weight, run.model.head.weight):
        weight.grad = torch.ones_like(weight)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return numbers


def drops_clipped_gradients_of_the_model(run: Run) -> Any:
    numbers = [*run.backward(4), run.clip(0.01)]
    run.model.zero_grad()
    numbers += run.backward(3)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return numbers


def looks_at_used_gradients(run: Run) -> Any:
    """As a callback does in on_optimizer_step."""
    numbers = [*run.backward(4), run.clip(0.01)]
    run.optimizer.step()
    with run.session.full_params() if run.session else nullcontext():
        found = [p.grad.clone() for p in run.model.parameters()]
    run.optimizer.zero_grad()
    return [*numbers, *found]


def regroups(run: Run) -> Any:
    """The step before goes by the groups that it was made with."""
    few, many = run.optimizer.param_groups
    few["params"].insert(0, many["params"].pop())
    numbers = run.step(4)
    many["params"].append(few["params"].pop(0))
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    numbers += run.step(3)
    run.optimizer.param_groups.pop()
    return numbers


def replaces_states(run: Run) -> Any:
    with run.session.full_params() if run.session else nullcontext():
        for state in run.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.clone().mul_(2)


def changes_states(run: Run) -> Any:
    """Without asking for anything to be made first."""
    found = []
    for param in run.model.parameters():
        for value in run.optimizer.state[param].values():
            if isinstance(value, Tensor) and value.shape == param.shape:
                found.append(value.clone())
                value.div_(
                    2, rounding_mode=None if value.is_floating_point() else "floor"
                )
    return found


def forgets_states(run: Run) -> Any:
    run.optimizer.state = defaultdict(dict)


def drops_one_gradient(run: Run) -> Any:
    numbers = run.backward(4)
    run.model.layers[1].up.weight.grad = None
    numbers += [run.clip(0.5), run.clip(0.2)]
    run.optimizer.step()
    run.optimizer.zero_grad()
    return numbers


ACTS = [
    steps,
    steps_without_clipping,
    steps_again,
    evaluates,
    evaluates_a_part,
    leaves_out_blocks,
    uses_blocks_in_one_micro_batch,
    edits_groups,
    reads_the_state,
    reads_weights,
    looks,
    writes,
    copies,
    loads_weights,
    loads_the_state,
    trains_under_autocast,
    drops_gradients,
    drops_one_gradient,
    clips_each_micro_batch,
    sets_gradients_after_clipping,
    drops_clipped_gradients_of_the_model,
    looks_at_used_gradients,
    regroups,
    replaces_states,
    changes_states,
    forgets_states,
]
KINDS = ["fused", "tensor lr", "momentum", "AdamW8bit", "relative Adafactor", "NAdam"]


def play(
    acts: Sequence[Callable[[Run], Any]], kind: str, *args: Any, **kw: Any
) -> None:
    """What is done to a paged run and to a plain one gives the same in both."""
    dtype = kw.pop("dtype", torch.float32)
    model = stack(dtype=dtype, **SIZES)
    plain = Run(twin(model), OPTIMIZERS[kind])
    ours = Run(model, OPTIMIZERS[kind], *args, **kw)
    for run in (plain, ours):
        run.dtype = dtype
    for act in acts:
        assert_same_content(act(ours), act(plain), act.__name__)
    ours.close()
    assert_same(model.state_dict(), plain.model.state_dict())
    in_order = forgets_states not in acts
    assert_same_state(ours.optimizer, plain.optimizer, in_order)


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
@pytest.mark.sampled(12)
def test_after_a_step(act: Callable[[Run], Any]) -> None:
    for plan in (MIXED, PAGED):
        play([steps, act, steps, act, steps_without_clipping], "fused", plan)


def play_at_random(seed: int) -> None:
    draw = random.Random(seed)
    moments = draw.choice([None, seed, seed])
    place = draw.choice([HOST_STATE, Placement.RESIDENT])
    plan = {
        "resident": (resident := draw.sample(range(3), draw.randint(0, 2))),
        "inside": HOST_STATE if place is HOST_STATE else draw.choice([*Placement][:2]),
        "n_buffer": draw.randint(1, 3 - len(resident)),
        "outside": place,
        "recompute": draw.sample(range(3), draw.randint(0, 3)),
    }
    acts = [steps, *draw.choices(ACTS, k=6), steps]
    try:
        play(
            acts,
            draw.choice(KINDS),
            plan,
            dtype=draw.choice([torch.float32, torch.bfloat16]),
            device=DeferredDevice(moments),
        )
    except Exception as error:
        names = [act.__name__ for act in acts]
        raise AssertionError(f"play_at_random({seed}): {names}") from error


def test_any_order() -> None:
    """On queues that are carried out late or at any moment; every access is checked."""
    for seed in range(12):
        play_at_random(seed)


@pytest.mark.full
def test_many_orders() -> None:
    for seed in range(12, 500):
        play_at_random(seed)


def test_a_staging_buffer_that_is_too_small_goes_after_its_copy() -> None:
    device = checked(DeferredDevice())
    staging = Staging(device, Counters())
    small, large = (torch.ones(size, dtype=torch.uint8) for size in (256, 512))
    assert staging.fetch("ahead", [Source(small, None)])
    assert staging.take("now", [Source(large, None)])[0].equal(large)
    staging.give_back("now")
    device.synchronize()
    staging.close()


@pytest.mark.parametrize("update", Update)
def test_a_weight_that_is_used_without_its_model_is_named(update: Update) -> None:
    """Its gradient would take the place of one that waits for its update."""
    model = stack()
    plan = {"resident": ALL, "inside": HOST_STATE, "update": update}
    session = open_session(model, **plan)
    optimizer = session.wrap_optimizer(adamw(model))
    train(model, optimizer, [batches(1)], session)
    with pytest.raises(AccessError, match=r"layers\.2\..*: this weight has a gradient"):
        model.layers[2].up.weight.square().sum().backward()
    session.close()


@pytest.mark.parametrize("update", Update)
def test_a_weight_outside_of_blocks_is_current_after_the_step(update: Update) -> None:
    """Methods other than a forward may read it: no hook of ours comes before them."""
    model = stack()
    plain = twin(model)
    session = open_session(model, n_buffer=2, outside=HOST_STATE, update=update)
    seen = []
    for net, optimizer in (
        (model, session.wrap_optimizer(adamw(model))),
        (plain, adamw(plain)),
    ):
        for tokens in batches(3):
            loss = net(tokens) + net.embed.weight[:2].sum() * 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append((loss.item(), net.head.weight.detach().clone().tolist()))
    session.close()
    assert seen[:3] == seen[3:]


def test_state_that_is_read_has_come_home() -> None:
    """Copies come as late as events let them, and nothing pages that would wait."""
    model = stack(**SIZES)
    plain = twin(model)
    ours = open_session(
        model,
        device=DeferredDevice(),
        resident=range(3),
        inside=HOST_STATE,
        outside=HOST_STATE,
    )
    states = []
    for net, session in ((model, ours), (plain, None)):
        optimizer = adamw(net)
        if session is not None:
            optimizer = session.wrap_optimizer(optimizer)
        train(net, optimizer, [batches(1)], session)
        states.append(
            [
                tensor.clone()
                for param in net.parameters()
                for tensor in optimizer.state[param].values()
            ]
        )
    assert all(map(torch.equal, *states))
    ours.close()
