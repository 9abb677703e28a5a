"""What a process takes while a step runs: device memory, host memory, bytes moved."""

from __future__ import annotations

import json
import re
import tempfile
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def synchronise(device: torch.device) -> None:
    """Wait for everything queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def limit_memory(device: torch.device, capacity_bytes: int) -> None:
    """Let a large card stand in for a smaller one; the CPU device has its own limit."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(capacity_bytes / total, 1.0), device
        )


def allocated_peak(device: torch.device) -> tuple[int, int] | None:
    """Highest bytes allocated and reserved, of a GPU."""
    if device.type != "cuda":
        return None
    return (
        torch.cuda.max_memory_allocated(device),
        torch.cuda.max_memory_reserved(device),
    )


class DeviceBytes(TorchDispatchMode):
    """Counts the device bytes of a system that keeps its host copy in the same memory.

    What operators read or make while it is active is on the device, but for what `host`
    names. Storages count by the size that they have at the moment: FSDP2 frees its
    parameters by resizing them.

    Attributes:
        peak: Highest count after an operator.
    """

    def __init__(self, host: Callable[[], Iterable[Tensor]]) -> None:
        super().__init__()
        self._host, self.peak = host, 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_iter((args, kwargs, output)):
            if isinstance(value, Tensor) and not value.is_meta:
                storage = local(value).untyped_storage()
                self._seen[storage._cdata] = weakref.ref(storage)
        self._count()
        return output

    def _count(self) -> None:
        elsewhere = {local(tensor).untyped_storage()._cdata for tensor in self._host()}
        nbytes = 0
        for key, seen in [*self._seen.items()]:
            storage = seen()
            if storage is None:
                del self._seen[key]
            elif key not in elsewhere:
                nbytes += storage.nbytes()
        self.peak = max(self.peak, nbytes)


def local(tensor: Any) -> Tensor:
    """Return a tensor of this rank alone."""
    return getattr(tensor, "_local_tensor", tensor)


def torch_pinned_bytes(device: torch.device) -> int:
    """Highest bytes that torch's own allocator has page-locked."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))


def resident_peak_bytes() -> int:
    """Highest resident set of this process, which includes pinned memory."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def copied_bytes(act: Callable[[], Any]) -> tuple[int, int] | None:
    """Bytes to the GPU and back while `act` runs, as the driver counts copies.

    None where the profiler sees nothing, or leaves too little memory for the step.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    try:
        with torch.profiler.profile(activities=activities) as profile:
            act()
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    both = [0, 0]
    for event in events:
        if event.get("cat") == "gpu_memcpy":
            for way, name in enumerate(("HtoD", "DtoH")):
                if name in event["name"]:
                    both[way] += int(event["args"].get("bytes", 0))
    return (both[0], both[1]) if any(both) else None
