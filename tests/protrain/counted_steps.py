"""Training steps of small models, their peak predicted and counted byte by byte.

The counter and the prediction share no code: the counter sees the storages that
operators make while a real session trains, the prediction sees a model without weights.
"""

from __future__ import annotations

import weakref
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import bitsandbytes as bnb
import torch
from accelerate.utils.operations import convert_to_fp32
from peft import LoraConfig, get_peft_model
from tiny_models import random_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import T5Config, T5ForConditionalGeneration

from axolotl.integrations.protrain.core.engine.device import CpuDevice
from axolotl.integrations.protrain.core.engine.session import Options, Session
from axolotl.integrations.protrain.core.layout import build_layout, find_blocks
from axolotl.integrations.protrain.core.planner.emulation import (
    Emulation,
    outputs_as_fp32,
)
from axolotl.integrations.protrain.core.planner.memory import MemoryModel
from axolotl.integrations.protrain.core.planner.meta import meta_copy
from axolotl.integrations.protrain.core.planner.plans import make_plan
from axolotl.integrations.protrain.core.planner.trace import TracedStep, trace_step
from axolotl.integrations.protrain.core.types import Hardware, Placement, Workload
from axolotl.integrations.protrain.offline.fake_kernels import fake_kernels

CPU = Hardware(
    name="cpu",
    source="nothing is timed",
    device_bytes=0,
    host_bytes=0,
    unseen_bytes=0,
    flops_16=1.0,
    flops_32=1.0,
    attention_16=1.0,
    memory_bytes_s=1.0,
    kernel_s=0.0,
    fetch_bytes_s=1.0,
    offload_bytes_s=1.0,
    fetch_both_bytes_s=1.0,
    offload_both_bytes_s=1.0,
    adam_bytes_s=1.0,
    overlaps=False,
)


class Counter(TorchDispatchMode):
    """Bytes of every storage that an operator makes on this thread, while it lives.

    May be entered again: what was made inside is followed until it is gone.

    Attributes:
        peak_bytes: The most so far, `base_bytes` included.
        peak_operator: What ran when it was reached.
    """

    def __init__(self, base_bytes: int) -> None:
        super().__init__()
        self._bytes = self.peak_bytes = base_bytes
        self.peak_operator = ""
        self._followed: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Or torch would compile nothing inside."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        there = {storage.data_ptr() for storage in _storages((args, kwargs))}
        for storage in _storages(made):
            address = storage.data_ptr()
            if storage.nbytes() and address not in there | self._followed:
                self._followed.add(address)
                self._add(storage.nbytes(), str(func))
                weakref.finalize(storage, self._gone, address, storage.nbytes())
        return made

    def restart(self) -> int:
        """The peak so far; from here on it is that of what is there and of what comes."""
        highest, self.peak_bytes = self.peak_bytes, self._bytes
        return highest

    def _gone(self, address: int, nbytes: int) -> None:
        self._followed.remove(address)
        self._add(-nbytes, "")

    def _add(self, nbytes: int, operator: str) -> None:
        self._bytes += nbytes
        if self._bytes > self.peak_bytes:
            self.peak_bytes, self.peak_operator = self._bytes, operator


def model_bytes(model: nn.Module) -> int:
    """Bytes of the storages that a model's tensors lie in, quant states included."""
    held: list[Any] = [p.data for p in model.parameters()]
    held += model.buffers()
    for param in model.parameters():
        state = getattr(param, "quant_state", None)
        for part in (state, getattr(state, "state2", None)):
            held += vars(part).values() if part is not None else ()
    return sum({s.data_ptr(): s.nbytes() for s in _storages(held)}.values())


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [
        leaf.untyped_storage()
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu"
    ]


@dataclass(frozen=True)
class Step:
    """What is trained, and how.

    Attributes:
        family: Of `tiny_models`, or t5.
        method: lora, full, qlora, or lora8: LoRA on a base in 8 bits.
        rows: Of a micro-batch.
        length: Of a row.
        resident: Pageable chunks that stay on the device: none, half or all.
        recompute: Blocks that recompute: none, half or all.
        swap: Blocks that send activations to the host: none, half or all.
        accumulation: Micro-batches of a step.
        precision: fp32; bf16 under autocast, adapters in fp32; fp32 under autocast
            ("mixed"); bf16 throughout ("pure").
        dropout: Of the adapters.
        padding: Tokens at the end of the first row.
        fp32_master: Update 16-bit weights through masters on the host.
        outside: Where trainable weights outside the blocks have their state, or that the
            host looks up embeddings.
        compiled: Each block's forward is compiled by inductor.
    """

    family: str
    method: str = "lora"
    rows: int = 1
    length: int = 64
    resident: str = "none"
    recompute: str = "none"
    swap: str = "none"
    accumulation: int = 1
    precision: str = "fp32"
    dropout: float = 0.0
    padding: int = 0
    fp32_master: bool = False
    outside: Placement = Placement.RESIDENT
    compiled: bool = False

    @property
    def name(self) -> str:
        special = {
            "dropout": self.dropout,
            "padding": self.padding,
            "masters": self.fp32_master,
            "compiled": self.compiled,
            f"swap-{self.swap}": self.swap != "none",
            self.outside.value: self.outside is not Placement.RESIDENT,
        }
        return " ".join(
            [
                f"{self.family}-{self.method}-{self.precision}",
                f"{self.accumulation}x{self.rows}x{self.length}",
                f"resident-{self.resident}",
                f"recompute-{self.recompute}",
                *(word for word, used in special.items() if used),
            ]
        )


@dataclass(frozen=True)
class Peaks:
    """Bytes, and the moments at which they were reached."""

    predicted_bytes: int
    counted_bytes: int
    predicted_at: str
    counted_at: str

    @property
    def error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted_bytes / self.counted_bytes - 1


PORTIONS = {"none": 0.0, "half": 0.5, "all": 1.0}


def peaks(step: Step) -> Peaks:
    """Predict the peak, then train three steps and count it: state that has been made in the
    first comes to the device from the third on."""
    # or graphs of earlier steps count against the limit of recompilations
    torch.compiler.reset()
    model = build(step)
    batch = random_batch(step)
    adapters = {
        name
        for name, p in model.named_parameters()
        if p.requires_grad and step.method != "full"
    }
    traced = trace(model, batch, autocast_dtype(step))
    layout = build_layout(model, adapters, traced.trace.blocks, rows=traced.rows)
    plan = make_plan(
        layout,
        n_persist=round(PORTIONS[step.resident] * len(layout.pageable)),
        n_buffer=0 if step.resident == "all" else 2,
        n_swap=round(PORTIONS[step.swap] * len(layout.blocks)),
        n_checkpoint=round(PORTIONS[step.recompute] * len(layout.blocks)),
        fp32_master=step.fp32_master,
        outside=step.outside,
    )
    workload = Workload(accumulation=step.accumulation, fp32_master=step.fp32_master)
    estimate = MemoryModel(layout, traced.trace, workload, CPU).device(plan)
    options = Options(
        fp32_master=step.fp32_master,
        accumulates=step.accumulation > 1,
        compiled={} if step.compiled else None,
    )
    with (
        closing(Session(model, layout, plan, CpuDevice(), options)) as session,
        # compiled kernels take it past every dispatch mode
        patch.object(torch._C._dynamo.guards, "_empty_strided_cpu", _empty_strided),
    ):
        counter = _count(step, session, batch)
    return Peaks(
        estimate.peak_bytes,
        counter.peak_bytes,
        estimate.peak.label,
        counter.peak_operator,
    )


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _count(step: Step, session: Session, batch: dict[str, Tensor]) -> Counter:
    model = session.model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = session.wrap_optimizer(torch.optim.AdamW(trained, fused=True))
    dtype = autocast_dtype(step)
    counter = Counter(model_bytes(model))
    for _ in range(3):
        with counter:
            for number in range(step.accumulation):
                session.begin_micro_batch(number == step.accumulation - 1)
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    outputs = model(**batch)
                if dtype is not None:
                    # as accelerate wraps the forward
                    outputs = convert_to_fp32(outputs)
                loss = outputs.loss
                del outputs
                loss.backward()
                del loss
            optimizer.step()
            optimizer.zero_grad()
    return counter


def trace(
    model: nn.Module,
    batch: dict[str, Tensor],
    autocast: torch.dtype | None = None,
) -> TracedStep:
    """Trace one micro-batch of a model of transformers, as for the CPU."""
    copied = meta_copy(model)

    def loss_of() -> Tensor:
        with Emulation("cpu", autocast):
            outputs = copied(**batch)
        if autocast is not None:
            outputs = outputs_as_fp32(outputs)
        return outputs["loss"]

    with fake_kernels("cpu", copied):
        return trace_step(copied, find_blocks(copied), loss_of)


def autocast_dtype(step: Step) -> torch.dtype | None:
    """Of the region around the forward."""
    return torch.bfloat16 if step.precision in ("bf16", "mixed") else None


def random_batch(step: Step) -> dict[str, Tensor]:
    """Token ids, labels and a mask."""
    ids = torch.randint(3, 200, (step.rows, step.length))
    mask = torch.ones_like(ids)
    mask[0, step.length - step.padding :] = 0
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}


def build(step: Step) -> Any:
    """The model as it is when training begins."""
    model = small_t5() if step.family == "t5" else random_model(step.family)
    model.config.use_cache = False
    if step.precision in ("bf16", "pure"):
        model = model.to(torch.bfloat16)
    if step.method in ("qlora", "lora8"):
        _quantise(model, in_8_bits=step.method == "lora8")
    if step.method != "full":
        adapter = LoraConfig(
            r=4, target_modules="all-linear", lora_dropout=step.dropout
        )
        model = get_peft_model(model, adapter)
    return model.train()


def small_t5() -> Any:
    """An encoder and a decoder, whose first blocks own the position biases."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=288,
        d_model=36,
        d_kv=12,
        d_ff=56,
        num_layers=3,
        num_decoder_layers=4,
        num_heads=3,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def _quantise(model: Any, in_8_bits: bool) -> None:
    """LLM.int8 or double quantised NF4 in the blocks, as bitsandbytes makes it."""
    for _, block in find_blocks(model):
        for name, linear in list(block.named_modules()):
            if not isinstance(linear, nn.Linear) or name.endswith(".wo"):
                # T5 reads the dtype of wo, so transformers never quantises it
                continue
            if in_8_bits:
                layer = as_linear_8_bit(linear)
                block.set_submodule(name, layer)
                continue
            layer = bnb.nn.Linear4bit(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                compute_dtype=linear.weight.dtype,
            )
            layer.weight = bnb.nn.Params4bit(
                linear.weight.data,
                requires_grad=False,
                quant_type="nf4",
                compress_statistics=True,
                module=layer,
            )
            layer.bias = linear.bias
            block.set_submodule(name, layer.to("cpu"))
    setattr(model, "is_loaded_in_8bit" if in_8_bits else "is_loaded_in_4bit", True)


def as_linear_8_bit(linear: nn.Linear) -> Any:
    """The same layer in 8 bits, with the threshold that transformers sets."""
    layer = bnb.nn.Linear8bitLt(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        has_fp16_weights=False,
        threshold=6.0,
        device="meta",
    )
    weight = linear.weight.data
    layer.weight = bnb.nn.Int8Params(
        weight, requires_grad=False, has_fp16_weights=False
    )
    layer.weight._quantize(weight.device)
    layer.bias = linear.bias
    return layer
