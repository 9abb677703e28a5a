"""Models of which each has something odd about its blocks, weights or calls.

All of them take token ids and give a loss, or are causal models of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from core_models import ALL, VOCAB, Layer, Stack
from counted_steps import as_linear_8_bit
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH = 32
LENGTH = 40
"""Tokens of each of two rows; their hidden states are 10 KB then, enough to be swapped."""
SHAPES = {
    "vocab_size": VOCAB,
    # rows of a multiple of 32, as the repacking for the CPU wants them
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
LOOKED_UP = {
    name: {"embed.weight": 48 * WIDTH * 4} for name in ("looked up", "scaled look-up")
}
"""Embeddings that the host looks up, and most bytes of a micro-batch's rows."""

# blocks


class Odd(nn.Module):
    """A block with some weights, one of them `extra`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Parameter(torch.rand(WIDTH) + 0.5)


class HandsOnBias(Odd):
    """T5's way: the first block makes a bias, the others use it and hand it on."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.bias = nn.Linear(WIDTH, WIDTH) if first else None

    def forward(
        self, x: Tensor, *, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.bias is not None:
            bias = self.bias(x)
        assert bias is not None
        # the product keeps the weights of this block busy late in its backward
        x = x + torch.tanh(self.inner(torch.tanh(self.inner(x * self.extra)) * bias))
        return x, bias


class Identity(Odd):
    """Returns its input, as a skipped layer does."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Views(Odd):
    """Saves views: transposed, expanded, overlapping, of one storage."""

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x, self.inner(x).exp()], -1) * self.extra.repeat(2)
        left, right = both.chunk(2, -1)
        wide = left.sum(0, keepdim=True).expand_as(left)
        windows = right.flatten().unfold(0, 64, 32)
        x = left * right.sigmoid() * wide.tanh()
        x = x + (windows * windows).mean() * (left.mT @ right).mean().tanh()
        return torch.tanh(x * self.extra)


class Changing(Odd):
    """Saves a tensor for a result that nobody uses, changes it and saves it again."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        self.kept = [hidden.sin()]
        hidden.mul_(self.extra)
        return hidden.cos()


class Positions(nn.Module):
    """Adds a view of a weight as large as its input: both gradients are in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.rand(2 * LENGTH * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        whole = x.numel() == self.table.numel()
        return torch.tanh(self.inner(x + self.table.view(x.shape) if whole else x))


class Normed(nn.Module):
    """Has running statistics, which it writes where its norm trains, and a mean that the
    first call leaves at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x))
        self.mean.mul_(0.9).add_(hidden.detach().mean((0, 1)) * self.calls.clamp(max=1))
        self.calls += 1
        return self.norm((hidden + self.mean).transpose(1, 2)).transpose(1, 2)


class View(Layer):
    """What a linear with a bias gives is a view."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x)))) * self.extra.sum().view(())


class Around(nn.Module):
    """A block around another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer(WIDTH, 32)


class InPlace(Around):
    """Writes into its input and returns it: the same tensor, made by another node."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.inner(x.clone()))


class HandsOnInput(Around):
    """Returns its input beside its output, as some models hand on a bias."""

    def forward(self, given: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, first = given if isinstance(given, tuple) else (given, given)
        return self.inner(x + first), first


@dataclass
class Output:
    """Neither a tensor nor a tuple nor a mapping of them."""

    hidden: Tensor


class Boxed(Around):
    """Backward opens its windows where a block's tensors come out."""

    def forward(self, x: Tensor | Output) -> Output:
        return Output(self.inner(x.hidden if isinstance(x, Output) else x))


# models


class Chain(Stack):
    """Other blocks than a `Stack` has, called in a way of their own."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        run: Callable[[Sequence[Any], Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(width=WIDTH)
        self.layers = nn.ModuleList(blocks)
        self.run = run or one_by_one

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(self.run(self.layers, self.embed(tokens)), tokens)


def one_by_one(layers: Sequence[Any], x: Any) -> Tensor:
    for layer in layers:
        x = layer(x)
    x = x.hidden if isinstance(x, Output) else x
    return x[0] + x[1] if isinstance(x, tuple) else x


def with_bias(layers: Sequence[Any], x: Tensor) -> Tensor:
    bias = None
    for layer in layers:
        x, bias = layer(x, bias=bias)
    return x + bias


def added_in_place(layers: Sequence[Any], x: Tensor) -> Tensor:
    for layer in layers:
        y = layer(x)
        y += x
        x = y
    return x


def checkpointed_by_halves(layers: Any, x: Tensor) -> Tensor:
    for half in layers[:3], layers[3:]:
        x = checkpoint(nn.Sequential(*half), x, use_reentrant=True)
    return x


ORDERS = ([0, 2, 3], [*ALL, *ALL], [3, 3, 0], [5, 1, 4], [*ALL], [2])


class Orders(Stack):
    """Skips and repeats layers, in another order in each forward."""

    calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.order = ORDERS[self.calls % len(ORDERS)]
        self.calls += 1
        return super().forward(tokens)


class Sometimes(Stack):
    """Some `extra`s are in the loss of some micro-batches only, one in none."""

    calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        used = ([0, 1], [], [1, 2], [0, 3, 4], [])[self.calls % 5]
        self.calls += 1
        for index, layer in enumerate(self.layers):
            layer.use_extra = index in used
        return super().forward(tokens)


class FreezesNorms(Chain):
    """Its norms keep their statistics in every second forward; the blocks train on."""

    calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            layer.norm.train(self.training and self.calls % 2 == 0)
        return super().forward(tokens)


def sized() -> Stack:
    """Chunks of other sizes share a slot."""
    return Stack(width=WIDTH, inner=(32, 40, 24, 32, 56, 8))


def two_dtypes() -> Stack:
    """Both in one chunk; the forward multiplies with either."""
    model = Stack(width=WIDTH)
    for layer in model.layers:
        layer.extra.data = layer.extra.data.bfloat16()
    return model


def strided() -> Stack:
    model = Stack(width=WIDTH)
    model.layers[1].up.weight = nn.Parameter(torch.randn(32, WIDTH).t())
    return model


def read_outside() -> Stack:
    """Head and norm are tied to weights of layer 0, one of them the layer's own."""
    model = Stack(width=WIDTH, inner=VOCAB)
    model.head.weight = model.layers[0].up.weight
    model.norm.weight = model.layers[0].extra
    return model


# weights that share bytes but are not the same parameter


def of_another(tensor: Tensor, requires_grad: bool = True) -> nn.Parameter:
    """A parameter of its own on bytes of another's."""
    return nn.Parameter(tensor.data, requires_grad)


def tie_whole(model: Any) -> None:
    """As Axolotl's `fix_untrained_tokens` leaves tied embeddings."""
    model.head.weight = of_another(model.embed.weight)


def tie_slice(model: Any) -> None:
    model.layers[1].up.weight = of_another(model.embed.weight[:32])


def tie_transpose(model: Any) -> None:
    model.layers[3].down.weight = of_another(model.layers[1].up.weight.t())


def tie_buffer(model: Any) -> None:
    model.register_buffer("scale", model.layers[0].extra.data[4:12])


def tie_frozen(model: Any) -> None:
    model.layers[4].up.weight = of_another(model.layers[5].up.weight, False)


def tie_both_frozen(model: Any) -> None:
    model.embed.weight.requires_grad = False
    model.head.weight = of_another(model.embed.weight, False)


def tie_expanded(model: Any) -> None:
    row = model.layers[2].up.bias[3:4].expand(WIDTH)
    model.layers[2].norm.bias = of_another(row, False)


TIES: dict[str, Callable[[Any], None]] = {
    "whole": tie_whole,
    "slice": tie_slice,
    "transpose": tie_transpose,
    "buffer": tie_buffer,
    "frozen": tie_frozen,
    "both frozen": tie_both_frozen,
    "expanded": tie_expanded,
}


def tied(name: str) -> Stack:
    model = Stack(width=WIDTH)
    TIES[name](model)
    return model


# embeddings


class Scaled(nn.Embedding):
    """As Gemma's: what the look-up gives is changed, by the dtype of the weight too; and
    the row of padding counted from the end."""

    def forward(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, self.weight, -1)
        return rows.mul_(torch.tensor(1.7).to(self.weight.dtype))


def looked_up(kind: type[nn.Embedding]) -> Stack:
    model = Stack(width=WIDTH)
    weight = model.embed.weight
    model.embed = kind(VOCAB, WIDTH, padding_idx=VOCAB - 1, _weight=weight.data)
    return model


# weights in few bits

FORMATS: dict[str, dict[str, Any]] = {
    "nf4": {"quant_type": "nf4", "compress_statistics": False},
    "nf4-double": {"quant_type": "nf4", "compress_statistics": True},
    "fp4": {"quant_type": "fp4", "compress_statistics": False},
    "fp4-double": {"quant_type": "fp4", "compress_statistics": True},
    "int8": {"in_8_bits": True},
}
DOUBLE = FORMATS["nf4-double"]


def quantise(
    linear: nn.Linear,
    storage: torch.dtype = torch.uint8,
    in_8_bits: bool = False,
    **quantised_as: Any,
) -> Any:
    """The same layer in few bits, computing in the dtype of `linear`."""
    if in_8_bits:
        return as_linear_8_bit(linear)
    layer = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=linear.weight.dtype,
        device="meta",
    )
    packed, state = bnb.functional.quantize_4bit(
        linear.weight.data, quant_storage=storage, **quantised_as
    )
    layer.weight = bnb.nn.Params4bit(
        packed,
        quant_state=state,
        quant_storage=storage,
        module=layer,
        bnb_quantized=True,
        **quantised_as,
    )
    layer.quant_state = state
    layer.bias = linear.bias
    return layer


def quantised_llama(
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    adapter: bool = True,
    **quantised_as: Any,
) -> Any:
    """A Llama with blocks in few bits and, with `adapter`, LoRA on each of their layers."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES, attention_bias=bias)
    model = LlamaForCausalLM(config).to(dtype)
    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, nn.Linear):
            if bias and module.bias is not None:
                # what preparing a model for 4-bit training leaves behind
                module.bias.data = torch.randn_like(module.bias, dtype=torch.float32)
            layer = quantise(module, **quantised_as)
            model.model.layers.set_submodule(name, layer)
    model.requires_grad_(False)
    if not adapter:
        return model
    in_8_bits = "in_8_bits" in quantised_as
    setattr(model, "is_loaded_in_8bit" if in_8_bits else "is_loaded_in_4bit", True)
    return with_lora(model)


def with_lora(model: Any) -> Any:
    """Adapters that change what comes out from the first step on."""
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    model = get_peft_model(model, lora)
    torch.manual_seed(1)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.02)
    return model


def lora() -> Any:
    torch.manual_seed(0)
    return with_lora(LlamaForCausalLM(LlamaConfig(**SHAPES)))


MODELS: dict[str, Callable[[], Any]] = {
    "sized": sized,
    "two dtypes": two_dtypes,
    "strided": strided,
    "one parameter": lambda: Stack(width=WIDTH, tie=True),
    "read outside": read_outside,
    "orders": lambda: Orders(width=WIDTH),
    "sometimes": lambda: Sometimes(width=WIDTH),
    "bias": lambda: Chain([HandsOnBias(n == 0) for n in ALL], with_bias),
    "first is identity": lambda: Chain([Identity(), *(Views() for _ in ALL[1:])]),
    "last is identity": lambda: Chain([*(Views() for _ in ALL[1:]), Identity()]),
    "identity": lambda: Chain([Layer(WIDTH, 32), Identity(), Layer(WIDTH, 32)]),
    "views": lambda: Chain([Views() for _ in ALL]),
    "changing": lambda: Chain([Changing() for _ in ALL]),
    "positions": lambda: Chain([Positions() for _ in ALL]),
    "norms": lambda: FreezesNorms([Normed() for _ in ALL]),
    "in place": lambda: Chain([InPlace() for _ in ALL]),
    "hands on": lambda: Chain([HandsOnInput() for _ in ALL]),
    "dataclass": lambda: Chain([Boxed() for _ in ALL]),
    "added to": lambda: Chain([View(WIDTH, 32) for _ in ALL], added_in_place),
    "reentrant": lambda: Chain([Layer(WIDTH, 32) for _ in ALL], checkpointed_by_halves),
    **{f"tied {name}": partial(tied, name) for name in TIES},
    "looked up": partial(looked_up, nn.Embedding),
    "scaled look-up": partial(looked_up, Scaled),
    "lora": lora,
    **{name: partial(quantised_llama, **how) for name, how in FORMATS.items()},
    "nf4, bf16": partial(quantised_llama, torch.bfloat16, **DOUBLE),
    "int8, bf16": partial(quantised_llama, torch.bfloat16, **FORMATS["int8"]),
    "stored as floats": partial(quantised_llama, storage=torch.bfloat16, **DOUBLE),
}
