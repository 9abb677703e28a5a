"""Weights that are quantised while they load, by the kernels of the plain run, and those
that stay packed as they are published."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from axolotl.monkeypatch import moe_quant
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from torch import Tensor, nn
from transformers import core_model_loading
from transformers.integrations import mxfp4
from transformers.integrations.bitsandbytes import Bnb4bitQuantize, Bnb8bitQuantize
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import cached_file

from .core.engine.host_pool import host_buffer, return_freed_memory
from .core.errors import ConfigError, DiskError
from .core.layout import find_blocks
from .core.layout.packed import Packed, form_of, from_fp8, from_mxfp4
from .core.layout.tensors import (
    bindings,
    own_quant_states,
    quantisation_tables_apart,
)
from .core.planner.hardware import device_name
from .core.planner.job import library_versions
from .core.types import Encoding, Form
from .quantised_file import QuantisedFile, SpillFile

LARGE_BYTES = 1 << 20
"""Size of a 4-bit weight from which freed memory is worth returning to the system."""


class LoadShare:
    """The 4-bit weights that rank `rank` of a node's `size` quantises while a base
    loads.

    The others are there in name only, on pages that nobody has touched: their bytes
    come from the rank that has them when the model is moved to its place.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._absent: list[nn.Parameter] = []

    @property
    def part(self) -> tuple[int, int]:
        """Rank and number of ranks."""
        return self._rank, self._size

    def takes(self, name: str) -> bool:
        """Tell whether this rank quantises a weight; of one name on all ranks."""
        return zlib.crc32(name.encode()) % self._size == self._rank

    def leave(self, param: nn.Parameter) -> None:
        """Note that a weight is there in name only."""
        self._absent.append(param)

    def absent(self, model: nn.Module) -> frozenset[str]:
        """Names of the weights that are there in name only."""
        absent = set(map(id, self._absent))
        return frozenset(n for n, p in model.named_parameters() if id(p) in absent)


@contextmanager
def quantise_on(
    device: torch.device,
    share: LoadShare | None = None,
    experts: bool = False,
    disk: Path | None = None,
    base_files: Callable[[], Sequence[Path]] = tuple,
) -> Iterator[None]:
    """Let transformers quantise to 4 or 8 bits on `device`, one weight at a time.

    A paged base loads to the host, where quantising takes a minute for a billion
    parameters and rounds by other kernels than the GPU's, which the plain run uses.
    Where there is no other device, holes in the heap are all that this saves.
    `share` is this rank's part of the weights in 4 bits, None for all of them; with
    `experts` weights of all experts of a block are quantised too. With a folder of a
    `disk` what is quantised waits there until the model moves; linear layers in 4 bits
    stay there for the next start that has the same `base_files`.

    Raises:
        DiskError: The folder cannot be written.
    """
    faults = list[DiskError]()
    spill = SpillFile(disk) if disk is not None else _as_it_is

    def keep(tensor: Tensor) -> Tensor:
        with _told_later(faults):
            return spill(tensor)
        return tensor

    four_bits = _FourBits(device, share, keep, faults)
    if disk is not None:
        four_bits.keep_for_later(disk, base_files)

    def convert(op: Any, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {
            name: four_bits.quantise(op, name, value, kwargs)
            for name, value in input_dict.items()
        }

    set_plain: Any = core_model_loading.set_param_for_module

    def set_param(model: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if faults:
            raise faults[0]
        set_plain(model, name, value, *args, **kwargs)
        if experts and is_of_experts(name, value):
            model.get_parameter(name).data = value.to(device)
            unpacked = quantise_experts(model, name)
            own_quant_states(unpacked)
            for binding in bindings("", unpacked.original):
                binding.bind(keep(binding.tensor.cpu()))
            unpacked.cpu()
            return_freed_memory()

    with (
        patch.object(Bnb4bitQuantize, "convert", convert),
        patch.object(Bnb8bitQuantize, "convert", _to_8_bits(device, keep)),
        patch.object(core_model_loading, "set_param_for_module", set_param),
    ):
        try:
            yield
        except BaseException:
            # raised again as it is
            four_bits.close(whole=False)
            raise
        four_bits.close(whole=not faults)
        if faults:
            # of what came last, behind which no weight asks
            raise faults[0]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def _told_later(faults: list[DiskError]) -> Iterator[None]:
    """Note an error of the disk in a conversion, where transformers makes a line of a report
    of any; it is raised by what comes after."""
    try:
        yield
    except DiskError as error:
        faults.append(error)


class _FourBits:
    """Quantises weights to 4 bits on a device, one at a time, this rank's part of them."""

    def __init__(
        self,
        device: torch.device,
        share: LoadShare | None,
        keep: Callable[[Tensor], Tensor],
        faults: list[DiskError],
    ) -> None:
        self._device, self._share, self._keep = device, share, keep
        self._faults = faults
        self._plain: Any = Bnb4bitQuantize.convert
        self._open: Callable[[Any], QuantisedFile | None] = lambda _quantizer: None
        self._file: QuantisedFile | None = None

    def keep_for_later(
        self, disk: Path, base_files: Callable[[], Sequence[Path]]
    ) -> None:
        """Keep what is quantised in a folder, and take what is there already."""

        def opened(quantizer: Any) -> QuantisedFile | None:
            if not (files := base_files()):
                return None
            about = [
                quantizer.quantization_config.to_dict(),
                device_name(self._device),
                self._share and self._share.part,
                library_versions(),
            ]
            return QuantisedFile(disk, _identity(files, about))

        self._open = opened

    def quantise(
        self, op: Any, name: str, values: Any, kwargs: dict[str, Any]
    ) -> nn.Parameter:
        """Quantise a weight, in place of the step `op` of transformers."""
        value: Tensor = values[0] if isinstance(values, list) else values
        if self._share is not None and not self._share.takes(name):
            return _in_name_only(self._empty(op, name, value, kwargs), self._share)
        if self._file is None:
            with _told_later(self._faults):
                self._file = self._open(op.hf_quantizer)
        file, key = self._file, f"{name} {value.dtype} {tuple(value.shape)}"
        if file is not None and (found := file.find(key)) is not None:
            empty = self._empty(op, name, value, kwargs)
            return _with_bytes(empty, iter(found).__next__)
        there = {name: value.to(self._device)}
        param: nn.Parameter = self._plain(op, there, **kwargs)[name]
        sides = bindings("", param)
        tensors = [side.tensor.cpu() for side in sides]
        pages = tensors
        if file is None or file.is_whole:
            # of what is whole nothing is missing, unless it was damaged
            pages = [self._keep(tensor) for tensor in tensors]
        else:
            with _told_later(self._faults):
                pages = file.keep(key, tensors)
        for side, tensor in zip(sides, pages, strict=True):
            # `to` would make another parameter, which its module does not know
            side.bind(tensor)
        if param.nbytes > LARGE_BYTES:
            del there, tensors
            return_freed_memory()
        return param

    def close(self, whole: bool) -> None:
        """End the file; `whole` if all of the base has come by."""
        if self._file is not None:
            self._file.close(whole)

    def _empty(self, op: Any, name: str, value: Tensor, kwargs: dict[str, Any]) -> Any:
        """Quantise a weight on the meta device."""
        with quantisation_tables_apart():
            (param,) = self._plain(op, {name: value.to("meta")}, **kwargs).values()
            # `to` leaves what is on this device as it is
            param._quantize(torch.device("meta"))
        return param


def base_files(cfg: Any) -> list[Path]:
    """Files of a base, as far as they are here; none if they are not, or only an adapter
    of another one is."""
    name, revision = str(cfg.base_model), cfg.revision_of_model
    there = cached_file(
        name,
        "config.json",
        revision=revision,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
    )
    folder = Path(there).parent if there else None
    if folder is None or (folder / "adapter_config.json").exists():
        return []
    # whichever of them transformers reads
    every = sorted(folder.iterdir())
    weights = [f for f in every if f.suffix in (".safetensors", ".bin", ".pt", ".pth")]
    return weights and [*weights, *folder.glob("*.json")]


def _identity(files: Sequence[Path], about: Any) -> str:
    """Name files as they are now, and what is made of them: who writes one changes its
    time, whatever time a tool sets."""
    stats = [(str(f.resolve()), f.stat()) for f in files]
    facts = [(f, s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for f, s in stats]
    said = json.dumps([facts, about], default=str, sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()


def _to_8_bits(device: torch.device, keep: Callable[[Tensor], Tensor]) -> Any:
    plain: Any = Bnb8bitQuantize.convert

    def convert(self: Any, input_dict: dict[str, Any], **kwargs: Any) -> Any:
        there = {
            name: (value[0] if isinstance(value, list) else value).to(device)
            for name, value in input_dict.items()
        }
        quantised = plain(self, there, **kwargs)
        found = {name: param.to("cpu") for name, param in quantised.items()}
        for param in found.values():
            param.data = keep(param.data)
        return found

    return convert


_FP8 = "F8_E4M3", torch.float8_e4m3fn
"""An e4m3 number, as safetensors and torch name it."""


@contextmanager
def keep_packed() -> Iterator[None]:
    """Let transformers leave a base in MXFP4 or FP8 packed where `dequantize` is asked for.

    What it would unpack becomes a `Packed` weight, whose bytes are pages of the base's
    files until somebody copies them. Other encodings are unpacked as before.
    """
    unpack: Any = Fp8Dequantize._dequantize_one
    copy: Any = core_model_loading._materialize_copy

    def pack_mxfp4(blocks: Tensor, scales: Tensor) -> nn.Parameter:
        # in bf16 whatever the model's dtype, as transformers unpacks it
        return nn.Parameter(from_mxfp4(blocks, scales, torch.bfloat16))

    def pack_fp8(
        self: Any, codes: Tensor, scales: Tensor, output_dtype: Any = None
    ) -> Tensor:
        if codes.dtype not in _FP8 or output_dtype is None:
            return unpack(self, codes, scales, output_dtype)
        block = self.hf_quantizer.quantization_config.weight_block_size
        if _cuts_matrices(codes.shape, block):
            return unpack(self, codes, scales, output_dtype)
        return from_fp8(codes, scales, output_dtype, block and tuple(block))

    def copy_packed(read: Any, device: Any = None, dtype: Any = None) -> Tensor:
        kind = read.get_dtype() if hasattr(read, "get_dtype") else read.dtype
        # transformers would widen the codes first, all of them ahead of their unpacking
        return copy(read, device, None if kind in _FP8 else dtype)

    with (
        patch.object(mxfp4, "dequantize_convertops", pack_mxfp4),
        patch.object(Fp8Dequantize, "_dequantize_one", pack_fp8),
        patch.object(core_model_loading, "_materialize_copy", copy_packed),
        load_fp8(),
    ):
        yield


def load_fp8() -> AbstractContextManager[Any]:
    """Let transformers 5.16.1 load an FP8 base, where it plans for parallel tensors, of
    which there are none, and fails."""
    return patch.object(
        FineGrainedFP8HfQuantizer, "update_tp_plan", lambda _, config: config
    )


def _cuts_matrices(shape: Sequence[int], block: Sequence[int] | None) -> bool:
    """Tell whether blocks of scales end inside of several matrices: no form has that."""
    return len(shape) > 2 and block is not None and bool(shape[-2] % block[0])


def keeps_packed(cfg: Any) -> bool:
    """Tell whether `keep_packed` is for a configuration: what trains has values."""
    unpacks = (cfg.model_quantization_config_kwargs or {}).get("dequantize")
    # what is written into the base before it trains
    writes = cfg.peft_init_lora_weights or cfg.peft or cfg.relora
    return bool(
        cfg.adapter and cfg.model_quantization_config and unpacks and not writes
    )


def unpack_unpaged(model: nn.Module) -> None:
    """Unpack weights that page no better packed, or drop their form: those that train, as
    copies of a base's modules do, those outside of blocks, and those that were converted.

    Raises:
        ConfigError: FP8 weights of the base have no scales that anybody knows.
    """
    inside = tuple(f"{name}." for name, _ in find_blocks(model))
    for path, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                name = f"{path}.{key}"
                trains = param.requires_grad
                _unpack(module, key, param, trains or not name.startswith(inside))
    lost = [n for n, p in model.named_parameters() if p.dtype in _WITHOUT_SCALE]
    lost = [n for n in lost if not isinstance(model.get_parameter(n), Packed)]
    if lost:
        raise ConfigError(
            f"base_model: {lost[0]} and {len(lost) - 1} more weights are in FP8 and have no "
            "scale by a name that transformers knows, so that they cannot be unpacked. "
            "Give the base that they were made from."
        )


_WITHOUT_SCALE = torch.float8_e4m3fn, torch.float8_e5m2


def _unpack(module: nn.Module, key: str, param: nn.Parameter, plain: bool) -> None:
    if not isinstance(param, Packed):
        if plain and form_of(param) is not None:
            del vars(param)["form"]
        return
    values = param.written
    if values is None and plain:
        values = Packed.unpacked(param)
    if values is not None:
        module._parameters[key] = nn.Parameter(values, param.requires_grad)


def unpack_all(model: nn.Module) -> None:
    """Unpack every weight, one at a time."""
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None:
                _unpack(module, key, param, True)


def name_forms(model: nn.Module, settings: Mapping[str, Any]) -> int:
    """Give weights on the meta device the forms in which `keep_packed` leaves a base.

    Args:
        model: Has the weights.
        settings: The base's own `quantization_config`.

    Returns:
        Their bytes once they are unpacked.
    """
    is_fp8, block = (
        settings.get("quant_method") == "fp8",
        settings.get("weight_block_size"),
    )
    skipped = settings.get("modules_to_not_convert") or []
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if is_fp8
        and isinstance(module, nn.Linear)
        and should_convert_module(name, skipped)
    }
    named = 0
    for name, param in model.named_parameters():
        if name not in linear and not is_of_experts(name, param):
            continue
        rows, columns = param.shape[-2:]
        if is_fp8 and _cuts_matrices(param.shape, block):
            continue
        if not is_fp8:
            form = Form(Encoding.E2M1, (1, 32), transposed=True)
        elif block is None:
            form = Form(Encoding.E4M3, (rows, columns))
        else:
            own = min(block[0], rows), min(block[1], columns)
            form = Form(Encoding.E4M3, own)
        vars(param)["form"] = form
        named += param.nbytes
    return named


def is_of_experts(name: str, weight: torch.Tensor) -> bool:
    """Tell whether Axolotl's `quantize_moe_experts` is about a weight."""
    return weight.ndim >= 3 and "expert" in name.lower()


def quantise_experts(model: nn.Module, name: str) -> Any:
    """Give a weight of all experts the packed form that Axolotl gives it on a GPU.

    In 4 or 8 bits, as the YAML says. Returns what unpacks it for the module.
    """
    path, _, own = name.rpartition(".")
    module, state = model.get_submodule(path), moe_quant._moe_load_state
    # the order in which PEFT will wrap them
    order: Any = state["expert_param_order"]
    order.setdefault(path, list(module._parameters))
    if state["mode"] == "4bit":
        form = {key: state[key] for key in ("compress_statistics", "quant_type")}
        replace_parameter_4bit(module, own, **form)
    else:
        moe_quant.replace_parameter_8bit(module, own)
    state["count"] += 1
    return module.get_submodule(f"parametrizations.{own}")


def _in_name_only(param: Any, share: LoadShare) -> nn.Parameter:
    """Move a 4-bit weight from the meta device to pages that nobody has touched."""
    sizes = iter([side.tensor for side in bindings("", param)])

    def untouched() -> Tensor:
        tensor = next(sizes)
        return host_buffer(tensor.nbytes).view(tensor.dtype).view(tensor.shape)

    there = _with_bytes(param, untouched)
    share.leave(there)
    return there


def _with_bytes(param: Any, give: Callable[[], Tensor]) -> nn.Parameter:
    """Move a 4-bit weight from the meta device to these tensors, its data the first."""
    data = give()
    for side in bindings("", param)[1:]:
        side.bind(give())
    there: nn.Parameter = type(param)(data, requires_grad=False, **vars(param))
    return there
