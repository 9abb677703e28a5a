"""The LoRA layers of a loaded model, and the adapter that they show.

# Note [One set of layers for all adapters]

The model has one LoRA of the largest rank on every layer that any adapter may have. To
show an adapter, its buffer is copied to the device, the parameters of these layers become
views of it, with the adapter's own shapes, and layers that it lacks are off, where PEFT
calls the base layer alone. So products have the shapes of a model with this adapter only,
and its numbers, and a switch moves the adapter's bytes and none of the base.

# Note [Two places for adapters]

The device has room for two. While one computes, the next comes into the other place on the
fetch stream, and what computed before goes to the host from there on the offload stream:

    compute waits for the arrival; offload waits for compute; fetch waits for offload,
    and so for the last kernel that has used the place.

Gradients that wait for an update are in the place, too, so no switch allocates anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import nn

from ..core.engine.device import Device, Event
from ..core.errors import ConfigError, RequestError
from ..versions import DRAWS_BY_NAME, seed_of_layer
from .adapters import KINDS, AdapterLayout, AdapterSpec, AdapterState
from .optimizers import AdamParams, AdapterOptimizer

_SLOT = "default"
"""PEFT's name of the one adapter that the model has."""


class _Place:
    """Device memory for an adapter.

    Attributes:
        parts: See `AdapterLayout.views`.
        holds: What it was filled with and has not been shown since.
        arrival: After its filling.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.memory = memory = device.allocate(nbytes)
        self.parts = cache(lambda layout: layout.views(memory))
        self.holds: AdapterState | None = None
        self.arrival: Event = device.compute.record()


class LiveAdapter:
    """See Note [One set of layers for all adapters].

    Args:
        model: With LoRA layers.
        optimizer: Updates their weights.

    Attributes:
        moved_bytes, switches: So far, both ways.
        prefetched: Switches to what had been copied before.

    Raises:
        ConfigError: Something else trains in it.
    """

    def __init__(self, model: PeftModel, optimizer: AdapterOptimizer) -> None:
        self.optimizer = optimizer
        self._config = cast(Any, model.peft_config[_SLOT])
        found = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, LoraLayer) and _SLOT in module.lora_A
        }
        self._layers: dict[str, Any] = found
        own = {id(p) for name in found for p in self._weights(name).values()}
        for name, param in model.named_parameters():
            if param.requires_grad and id(param) not in own:
                raise ConfigError(
                    f"{name} trains and is no LoRA weight of a linear layer, which is "
                    "all that adapters of the service have. Remove the key that adds it "
                    "(lora_modules_to_save, lora_target_parameters, peft_use_dora)."
                )
        head = model.get_output_embeddings()
        self._kinds = {
            name: "unembed" if layer is head else _kind(name)
            for name, layer in found.items()
        }
        if any(isinstance(layer, ParamWrapper) for layer in found.values()):
            others = {
                n.rpartition(".")[2] for n, kind in self._kinds.items() if kind != "mlp"
            }
            allowed = ", ".join(sorted(others)) or "those of attention"
            raise ConfigError(
                "lora_target_modules: PEFT puts LoRA on this model's experts too, and "
                "adapters of the service are on linear layers alone. Set it to names "
                f"that no expert has ({allowed}), and remove lora_target_linear."
            )
        self._dtype = next(iter(self._weights(next(iter(found))).values())).dtype
        self.largest = self.layout(
            AdapterSpec(self._config.r, self._config.lora_alpha, self.kinds)
        )
        self._state: AdapterState | None = None
        self._updated = self._regraded = False
        self.moved_bytes = self.switches = self.prefetched = 0

    @property
    def reserve_bytes(self) -> int:
        """Bytes of the device, beside one adapter with the state of AdamW, which a plan
        has."""
        return 2 * self.largest.nbytes - 3 * self.largest.weight_bytes

    def open(self, device: Device) -> None:
        """Let the model compute with adapters on its device."""
        self._device = device
        self._place, self._next = (
            _Place(device, self.largest.nbytes) for _ in range(2)
        )
        self._sent = self._place.arrival
        # frees what was loaded
        self._bind(self.largest)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that the model has layers of."""
        return tuple(kind for kind in KINDS if kind in self._kinds.values())

    def layout(self, spec: AdapterSpec) -> AdapterLayout:
        """Lay out an adapter on this base.

        Raises:
            RequestError: It is larger than what the server plans for.
        """
        if not 1 <= spec.rank <= self._config.r:
            raise RequestError(
                f"lora_config: rank {spec.rank}; allowed are 1 to {self._config.r}, "
                "lora_r of the server's YAML. 0, a full fine-tune, is served by a YAML "
                "without `adapter`."
            )
        unknown = {*spec.kinds} - {*self._kinds.values()}
        if unknown or not spec.kinds:
            raise RequestError(
                f"lora_config: {', '.join(sorted(unknown)) or 'no layer'} cannot train; "
                f"the server plans for {', '.join(self.kinds)}. Set train_attn, "
                "train_mlp and train_unembed accordingly."
            )
        shapes: list[tuple[str, tuple[int, int]]] = []
        for name, layer in self._layers.items():
            if self._kinds[name] in spec.kinds:
                shapes.append((f"{name}.lora_A.weight", (spec.rank, layer.in_features)))
                shapes.append(
                    (f"{name}.lora_B.weight", (layer.out_features, spec.rank))
                )
        state = [
            (part, name, *each)
            for name, shape in shapes
            for part, each in self.optimizer.parts(shape, self._dtype).items()
        ]
        return AdapterLayout(spec, tuple(shapes), self._dtype, tuple(state))

    def initialise(self, state: AdapterState, seed: int | None) -> None:
        """Weights as this Axolotl draws them: from `seed` by the layer's name, or as PEFT
        does, in its order, where `torch.manual_seed` was called with it before. None draws
        another one each time."""
        # not the generator that other threads draw from
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        spec = state.layout.spec
        for name, layer in self._layers.items():
            if self._kinds[name] not in spec.kinds:
                continue
            down = torch.empty(spec.rank, layer.in_features)
            drawn = state.parts["weight"][f"{name}.lora_A.weight"]
            if DRAWS_BY_NAME:
                own = torch.Generator().manual_seed(
                    seed_of_layer(generator.initial_seed(), name)
                )
                drawn.copy_(nn.init.kaiming_uniform_(down, a=5**0.5, generator=own))
                continue
            # as `nn.Linear` draws both, and PEFT the first one again
            for part in (down, torch.empty(layer.out_features, spec.rank), down):
                nn.init.kaiming_uniform_(part, a=5**0.5, generator=generator)
            base = layer.get_base_layer()
            dtype = getattr(base, "compute_dtype", None) or base.weight.dtype
            # PEFT rounds them to the dtype of the base first
            drawn.copy_(down.to(dtype) if dtype.is_floating_point else down)

    def show(self, state: AdapterState) -> None:
        """From here on the model computes with an adapter and keeps its gradients; what
        it has shown goes to the host meanwhile."""
        if self._state is state:
            return
        self._send()
        self._hide()
        self.prefetched += self._next.holds is state
        self.prefetch(state)
        self._place, self._next = self._next, self._place
        self._place.holds = self._next.holds = None
        self._device.wait_stalled(self._place.arrival)
        self._device.reads([self._place.memory], self._device.compute)
        self.switches += 1
        self._state = state
        self._bind(state.layout)
        grads = self._place.parts(state.layout)["grad"]
        for name, param in self._shown().items():
            param.grad = grads[name] if name in state.graded else None

    def prefetch(self, state: AdapterState) -> None:
        """Copy an adapter that is shown next, while another one computes."""
        if state is not self._state and state is not self._next.holds:
            self._fetch(self._next, state)

    def begin_pass(self, nbytes: int) -> None:
        """The host gets what is shown, before a pass changes its gradients."""
        if self._updated or self._regraded:
            self._send()
            self._device.compute.wait(self._sent)
        self._device.reads([self._place.memory], self._device.compute)

    def passed(self, run: Callable[[], object], nbytes: int) -> None:
        """A backward pass has added to the gradients."""
        assert self._state is not None
        grads = self._place.parts(self._state.layout)["grad"]
        for name, param in self._shown().items():
            if param.grad is not None and param.grad is not grads[name]:
                param.grad = grads[name].copy_(param.grad)
        self._device.writes([self._place.memory], self._device.compute)
        self._regraded = True

    def require_finite(self) -> None:
        """Weights are: `update` refuses others."""

    def put_back(self) -> None:
        """The host has what is shown, gradients too, and all that was shown before."""
        self._send()
        self._sent.synchronize()

    def leave(self) -> None:
        """Nothing is shown or fetched any more. The host has it, without what a pass that
        failed has added to the gradients since `begin_pass`."""
        self.put_back()
        # their memory may be freed next
        for place in (self._place, self._next):
            place.arrival.synchronize()
            place.holds = None
        self._hide()

    def _fetch(self, place: _Place, state: AdapterState) -> None:
        stream, nbytes = self._device.fetch, state.used_bytes
        stream.wait(self._sent)
        stream.copy(place.memory[:nbytes], state.memory[:nbytes])
        place.holds, place.arrival = state, stream.record()
        self.moved_bytes += nbytes

    def _send(self) -> None:
        """Copy to the host what has changed since the last time, once it is computed."""
        stream, state = self._device.offload, self._state
        stream.wait(self._device.compute.record())
        if state is not None:
            if self._regraded:
                shown = self._shown().items()
                state.graded = frozenset(n for n, p in shown if p.grad is not None)
            kept = state.layout.kept_bytes
            start = 0 if self._updated else kept
            stop = state.used_bytes if self._regraded else kept
            source = self._place.memory[start:stop]
            stream.copy(state.memory[start:stop], source)
            self.moved_bytes += source.nbytes
            self._updated = self._regraded = False
        self._sent = stream.record()

    def update(self, adam: AdamParams) -> float:
        """Make a step of the optimizer; the norm of all gradients before it was clipped.

        Raises:
            RequestError: There are no gradients, or they or the weights after the step
                are not finite; the gradients are dropped, and nothing else has changed.
        """
        assert self._state is not None
        graded = {n: p for n, p in self._shown().items() if p.grad is not None}
        params = [*graded.values()]
        if not params:
            raise RequestError("optim_step: no forward_backward came before it.")
        most = adam.grad_clip_norm if adam.grad_clip_norm > 0 else float("inf")
        norm, self._regraded = math.nan, True
        try:
            norm = float(torch.nn.utils.clip_grad_norm_(params, most))
            if math.isfinite(norm):
                views = self._place.parts(self._state.layout)
                self.optimizer.step(graded, views, adam)
                self._updated = bool(torch.nn.utils.get_total_norm(params).isfinite())
        finally:
            self._device.writes([self._place.memory], self._device.compute)
            self._drop_gradients()
            if not self._updated:
                # the host has had it before each pass
                self._send()
                self._fetch(self._place, self._state)
                self._device.wait_stalled(self._place.arrival)
        if not math.isfinite(norm):
            raise RequestError(f"optim_step: the norm of the gradients is {norm}.")
        if not self._updated:
            raise RequestError(
                f"optim_step: learning_rate {adam.learning_rate} makes weights that are "
                "not finite."
            )
        return norm

    def write_config(self, spec: AdapterSpec, folder: Path) -> None:
        """PEFT's adapter_config.json of an adapter."""
        config = deepcopy(self._config)
        config.r, config.lora_alpha = spec.rank, spec.alpha
        config.target_modules = {
            name.removeprefix("base_model.model.")
            for name, kind in self._kinds.items()
            if kind in spec.kinds
        }
        config.inference_mode = True
        config.save_pretrained(str(folder))

    def _weights(self, name: str) -> dict[str, nn.Parameter]:
        layer = self._layers[name]
        sides = {"lora_A": layer.lora_A, "lora_B": layer.lora_B}
        return {f"{name}.{k}.weight": v[_SLOT].weight for k, v in sides.items()}

    def _shown(self) -> dict[str, nn.Parameter]:
        """Weights that train now, in the model's order."""
        if self._state is None:
            return {}
        kinds = self._state.layout.spec.kinds
        names = (name for name in self._layers if self._kinds[name] in kinds)
        return {k: v for name in names for k, v in self._weights(name).items()}

    def _bind(self, layout: AdapterLayout) -> None:
        """Let the layers of an adapter compute with what is shown, and no others."""
        weights, spec = self._place.parts(layout)["weight"], layout.spec
        for name, layer in self._layers.items():
            has = self._kinds[name] in spec.kinds
            if layer.disable_adapters is has:
                layer.enable_adapters(has)
            if has:
                layer.r[_SLOT], layer.scaling[_SLOT] = spec.rank, spec.alpha / spec.rank
                for saved, param in self._weights(name).items():
                    param.data = weights[saved]

    def _hide(self) -> None:
        self._drop_gradients()
        self._state = None

    def _drop_gradients(self) -> None:
        for param in self._shown().values():
            param.grad = None


def _kind(name: str) -> str:
    # attention, self_attn, cross_attn, linear_attn: every family has it in the name
    return "attn" if "att" in name.rpartition("layers")[2] else "mlp"
