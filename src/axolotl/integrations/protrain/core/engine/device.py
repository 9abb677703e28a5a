"""One small interface to the device: memory, four streams, events.

Work on a stream runs in order; between streams only events order it. `CpuDevice`
runs everything at once and counts bytes against a budget, `CudaDevice` uses real
streams and pinned memory. The runtime knows nothing else about where it runs.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, Protocol
from weakref import KeyedRef

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ConfigError
from ..host import memory_nodes, node_of, processors
from ..layout.tensors import tensors_in

BUSY_THREADS = 2
"""Busy threads of each rank: the one that queues work, and autograd's."""
ALLOCATOR_KEYS = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Variables of the environment, read when CUDA begins; the second is the older name."""
POISON_BYTE = 0xFF
"""Read as bf16, fp16, fp32 or fp64, bytes of ones are NaN."""


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Block the calling thread until the stream has passed this point."""
        return

    def query(self) -> bool:
        """True once the stream has passed this point."""
        return True


class _Done(Event):
    """Passed from the start."""


_DONE = _Done()


class Stream(Protocol):
    """A queue of device work."""

    def wait(self, event: Event) -> None:
        """Let later work of this stream start only after `event`."""

    def record(self) -> Event:
        """Mark the end of the work queued so far."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue `target.copy_(source)`. Both must live until an event after it."""

    def fill(self, target: Tensor, byte: int) -> None:
        """Queue a fill of a uint8 tensor."""

    def call(self, work: Callable[[], object], memory: Sequence[Tensor]) -> None:
        """Queue work that reads and writes device memory, a collective for example."""


class Device:
    """Memory and streams of one device; what stands here does for one without queues.

    Attributes:
        torch_device: Where its tensors live.
        fetch: Host to device copies.
        offload: Device to host copies.
        communicate: Collectives with other ranks.
        stall_s: Seconds that compute has waited for a transfer.
        host_threads: Intra-op threads for host updates, None for torch's own number.
        pageable_bytes: Of host memory that should be page-locked and is not: copies from
            and to it take several times as long and hide behind nothing.
        node: The host's memory node that it reaches fastest, None if all alike.
    """

    torch_device: torch.device
    fetch: Stream
    offload: Stream
    communicate: Stream
    host_threads: int | None = None
    stall_s = 0.0
    pageable_bytes = 0
    node: int | None = None

    @property
    def compute(self) -> Stream:
        """The stream that the model's kernels are being queued on right now."""
        raise NotImplementedError

    def allocate(self, nbytes: int) -> Tensor:
        """A new device buffer, uint8 of shape [nbytes]."""
        raise NotImplementedError

    def place(self, tensor: Tensor) -> Tensor:
        """`tensor` on the device."""
        raise NotImplementedError

    def pin(self, host: Tensor) -> None:
        """Page-lock a host buffer so that copies from and to it can overlap.

        What the system refuses stays as it is, in `pageable_bytes`.
        """

    def unpin(self, host: Tensor) -> None:
        """Undo `pin`. No copy may be in flight."""

    def mark(self) -> Event:
        """A point of the calling thread: who waits for it has seen its work so far."""
        return _DONE

    def wait_stalled(self, event: Event) -> None:
        """Let compute wait for a transfer and count what it loses as stall."""
        self.compute.wait(event)

    def watch(self, already: int) -> AbstractContextManager[Any]:
        """Count what operators allocate inside, on devices that do not themselves, beside
        the bytes that they had made `already` and that still are there."""
        return nullcontext()

    def probe(self, nbytes: int) -> None:
        """Raise `torch.OutOfMemoryError` unless there is room for so many more bytes."""
        # an allocator keeps it for what comes next
        self.allocate(nbytes)

    def used_bytes(self) -> int:
        """Device bytes in use now."""
        raise NotImplementedError

    def peak_bytes(self) -> int:
        """Highest number of device bytes in use so far.

        To be asked before anybody else resets the allocator's own record, as Axolotl
        does at every log.
        """
        raise NotImplementedError

    def restart_peak(self) -> None:
        """Let `peak_since` count from now on."""
        raise NotImplementedError

    def peak_since(self) -> int:
        """Highest number of device bytes in use since `restart_peak`."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until every stream is idle."""

    # what the owners of memory say to a device that checks it

    def reads(self, memory: Iterable[Tensor], stream: Stream | None = None) -> None:
        """A stream, or else the calling thread, reads this memory now."""

    def writes(self, memory: Iterable[Tensor], stream: Stream | None = None) -> None:
        """A stream, or else the calling thread, writes this memory now."""

    def begin_use(self, buffer: Tensor) -> None:
        """Compute reads a buffer from here on."""

    def end_use(self, buffer: Tensor) -> None:
        """Compute has queued the last of these reads."""

    def free(self, buffer: Tensor) -> None:
        """Nobody uses what `allocate` gave any more."""


class _ImmediateStream:
    """Runs work when it is queued; the time goes to the device as stall."""

    def __init__(self, device: CpuDevice) -> None:
        self._device = device

    def wait(self, event: Event) -> None:
        event.synchronize()

    def record(self) -> Event:
        return _DONE

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.call(partial(target.copy_, source))

    def fill(self, target: Tensor, byte: int) -> None:
        target.fill_(byte)

    def call(self, work: Callable[[], object], memory: Sequence[Tensor] = ()) -> None:
        start = time.perf_counter()
        work()
        self._device.stall_s += time.perf_counter() - start


def call_operator(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator from a dispatch mode as it would run without the mode.

    A mode runs below autocast. What aten wants of it has happened before; the kernels of
    other libraries (bitsandbytes' 4-bit product) call aten themselves and expect it.
    """
    if func.namespace == "aten":
        return func(*args, **(kwargs or {}))
    with ExitStack() as as_called:
        with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
            active = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
        for kind in active:
            dtype = torch.get_autocast_dtype(kind)
            as_called.enter_context(torch.autocast(kind, dtype))
        return func(*args, **(kwargs or {}))


class OperatorMode(TorchDispatchMode):
    """A dispatch mode around what an interrupt may end anywhere."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torchao's optimizers compile their update: torch would refuse to."""
        return True

    def __exit__(self, *error: Any) -> None:
        # interrupted while it puts modes aside for a moment, torch never puts them back;
        # no more than that, as modes may leave in any order: each takes the topmost
        if not _python_dispatch._get_current_dispatch_mode_stack():
            _python_dispatch._push_mode(self)
        super().__exit__(*error)


class _Watch(OperatorMode):
    """Follows every storage that an operator makes on the calling thread.

    Host work runs on a thread of its own, where no mode is active.
    """

    def __init__(self, device: CpuDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = call_operator(func, args, kwargs)
        if not func.is_view:
            given = {storage._cdata for storage in _storages((args, kwargs))}
            for storage in _storages(output):
                if storage._cdata not in given:
                    self._device.follow(storage)
        return output


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors_in(values):
        if tensor.device.type == "cpu":
            yield tensor.untyped_storage()


class CpuDevice(Device):
    """A device with a budget in host memory, for machines without an accelerator.

    Its peak counts what the plugin places on it, and what operators allocate while it
    is watched; watching takes microseconds an operator. More than `capacity_bytes`
    raises `torch.OutOfMemoryError`; None counts only.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self._capacity_bytes = capacity_bytes
        self._live: dict[int, tuple[KeyedRef[int, torch.UntypedStorage], int]] = {}
        self._ended: list[KeyedRef[int, torch.UntypedStorage]] = []
        self.torch_device = torch.device("cpu")
        self._compute, self.fetch, self.offload, self.communicate = (
            _ImmediateStream(self) for _ in range(4)
        )
        self._used = self._peak = self._since = 0

    @property
    def compute(self) -> Stream:
        return self._compute

    def allocate(self, nbytes: int) -> Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.follow(buffer.untyped_storage())
        return buffer

    def place(self, tensor: Tensor) -> Tensor:
        # memory of its own, as on any device: a view of a mapped shard keeps it mapped
        placed = tensor.clone()
        self.follow(placed.untyped_storage())
        return placed

    def watch(self, already: int) -> AbstractContextManager[Any]:
        self._settle()
        self._count(already)
        return _Watch(self)

    def probe(self, nbytes: int) -> None:
        self._settle()
        capacity = self._capacity_bytes
        if capacity is not None and self._used + nbytes > capacity:
            raise torch.OutOfMemoryError(
                f"CPU device out of memory. Tried to allocate {nbytes} bytes. "
                f"{self._used} of {capacity} bytes are in use."
            )

    def used_bytes(self) -> int:
        self._settle()
        return self._used

    def follow(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is gone."""
        self._settle()
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._live:
            self.probe(nbytes)
            # no Python of ours when it ends: what a signal handler raises there is lost
            self._live[key] = KeyedRef(storage, self._ended.append, key), nbytes
            self._count(nbytes)

    def _settle(self) -> None:
        """Forget the storages that have ended."""
        while self._ended:
            _, nbytes = self._live.pop(self._ended.pop().key)
            self._used -= nbytes

    def _count(self, nbytes: int) -> None:
        self._used += nbytes
        self._peak = max(self._peak, self._used)
        self._since = max(self._since, self._used)

    def peak_bytes(self) -> int:
        return self._peak

    def restart_peak(self) -> None:
        self._since = self.used_bytes()

    def peak_since(self) -> int:
        return self._since


class _CudaStream:
    """A `torch.cuda.Stream`; operators queued here do not touch the current one."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)

    def record(self) -> Event:
        return self._stream.record_event()

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.call(partial(target.copy_, source, non_blocking=True))

    def fill(self, target: Tensor, byte: int) -> None:
        self.call(partial(target.fill_, byte))

    def call(self, work: Callable[[], object], memory: Sequence[Tensor] = ()) -> None:
        with torch.cuda.stream(self._stream):
            work()


def _timed(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class CudaDevice(Device):
    """A CUDA device: streams for copies each way and for collectives beside compute."""

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self.fetch, self.offload, self.communicate = (
            _CudaStream(torch.cuda.Stream(self.torch_device)) for _ in range(3)
        )
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        # launchers set OMP_NUM_THREADS=1, which would make host updates crawl
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.host_threads = max(1, processors() // ranks - BUSY_THREADS)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._peak = 0
        self._pageable: dict[int, int] = {}
        if len(memory_nodes()) > 1:
            at: Any = torch.cuda.get_device_properties(self.torch_device)
            pci = f"{at.pci_domain_id:04x}:{at.pci_bus_id:02x}:{at.pci_device_id:02x}.0"
            self.node = node_of(pci)

    @property
    def compute(self) -> Stream:
        # never cached: the caller may run under another current stream each time
        return _CudaStream(torch.cuda.current_stream(self.torch_device))

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.torch_device)

    def pin(self, host: Tensor) -> None:
        # the stock pinned allocator rounds up to powers of two
        address, nbytes = host.data_ptr(), host.nbytes
        if self._failed(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)):
            self._pageable[address] = nbytes
            self.pageable_bytes += nbytes

    def unpin(self, host: Tensor) -> None:
        address = host.data_ptr()
        if address in self._pageable:
            self.pageable_bytes -= self._pageable.pop(address)
            return
        status = torch.cuda.cudart().cudaHostUnregister(address)
        if self._failed(status):
            name = torch.cuda.cudart().cudaGetErrorString(status)
            raise RuntimeError(f"CUDA: {name} while releasing page-locked host memory.")

    def wait_stalled(self, event: Event) -> None:
        if event.query():
            return
        stream = torch.cuda.current_stream(self.torch_device)
        before = _timed(stream)
        self.compute.wait(event)
        self._waits.append((before, _timed(stream)))
        self._collect_waits(self._waits[:1])

    def used_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.torch_device)

    def peak_bytes(self) -> int:
        newest = torch.cuda.max_memory_allocated(self.torch_device)
        self._peak = max(self._peak, newest)
        return self._peak

    def restart_peak(self) -> None:
        self.peak_bytes()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_since(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        self._collect_waits(self._waits)

    def _collect_waits(
        self, waits: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]
    ) -> None:
        finished = [wait for wait in waits if wait[1].query()]
        self._waits = self._waits[len(finished) :]
        self.stall_s += sum(b.elapsed_time(a) for b, a in finished) / 1000

    def _failed(self, status: Any) -> bool:
        if int(status) == 0:
            return False
        # CUDA remembers the failure until somebody asks, as each launch of torch does:
        # this one, so that the next operator of the model does not raise it
        with suppress(RuntimeError):
            self.allocate(1).fill_(1)
        return True


SHORTAGES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Words of a shortage in errors of the driver, Triton, cuBLAS and cuDNN say where torch's do not."""


def is_shortage(error: RuntimeError) -> bool:
    """Return whether the device had no memory for what failed."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in SHORTAGES)


def asked_bytes(error: RuntimeError) -> int:
    """Return the bytes that could not be allocated, as the error words it; 0 if it does not say."""
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    said = re.search(r"allocate ([\d.]+) (bytes|[KMG]iB)", str(error))
    return round(float(said[1]) * units[said[2]]) if said else 0


def expand_segments() -> None:
    """Have torch grow its segments of GPU memory: a slot or what a block saves then finds
    room wherever as much is free, not only where one piece is.

    Does nothing where the environment says something about the allocator, once CUDA has
    read it, and on WSL2, whose driver fails at the first such segment.
    """
    if (
        torch.version.cuda is not None
        and not torch.cuda.is_initialized()
        and "microsoft" not in platform.release().lower()
        and not any(name in os.environ for name in ALLOCATOR_KEYS)
    ):
        os.environ[ALLOCATOR_KEYS[0]] = "expandable_segments:True"


def allocator_note(environment: Mapping[str, str]) -> str:
    """Describe the settings of torch's allocator of GPU memory, as a line of the plan."""
    said = [f"{n}={environment[n]}" for n in ALLOCATOR_KEYS if n in environment]
    grows = any("expandable_segments:true" in line.lower() for line in said)
    how = "grow" if grows else "do not grow, so pieces of it may be free and of no use"
    return f"Segments of GPU memory {how} ({', '.join(said) or 'PYTORCH_ALLOC_CONF unset'})."


def open_device(torch_device: torch.device) -> Device:
    """The `Device` for a torch device.

    Raises:
        ConfigError: The type is neither cpu nor cuda.
    """
    require_known(torch_device)
    if torch_device.type == "cpu":
        return CpuDevice()
    index = torch_device.index
    return CudaDevice(torch.cuda.current_device() if index is None else index)


def this_device() -> torch.device:
    """Return the device of this machine's accelerator, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else found


def require_known(torch_device: torch.device) -> None:
    """Refuse a type of device that nothing here is written for.

    Raises:
        ConfigError: Names it, and what works.
    """
    if torch_device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"device: ProTrain does not train on {torch_device}. It trains on cuda, as "
            "torch calls NVIDIA's GPUs and, in its ROCm builds, AMD's, and on cpu. Set "
            "`protrain_auto_memory: false` to train there without it, or take a build of "
            "torch without that device to train on the CPU."
        )


def range_of(name: str) -> AbstractContextManager[object]:
    """A range that profilers show; where none runs it would cost more than the work."""
    return record_function(name) if torch.autograd._profiler_enabled() else _NO_RANGE


_NO_RANGE = nullcontext()
