"""Limits of this process on its host: memory, its nodes, and processors, as cgroups
limit them.

A container sees the machine's memory and processors, and is stopped or killed beyond its
own: rented ones show 96 processors for a quota of 8.
"""

from __future__ import annotations

import os
import resource
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from torch import Tensor

RESERVE_BYTES = 1 << 30
"""Left to the operating system, the dataloader and the tokenizer."""
_MOUNTED, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# files by version: the limit, what is taken, pages; a quota and its period
_MEMORY = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
    2: ("memory.max", "memory.current", "memory.stat"),
}
_TIME = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}


def host_memory(mounted: Path = _MOUNTED, own: Path = _OWN, given_back: int = 0) -> int:
    """Bytes that this process may still take: the machine's, those of its cgroups, or
    addresses that `ulimit -v` leaves.

    Pages of files, weights for example, are given up where memory is asked for. So are
    those that are `given_back` as others are taken, but their addresses only afterwards.
    """
    available = [psutil.virtual_memory().available, *_cgroups_leave(mounted, own)]
    available = [nbytes + given_back for nbytes in available]
    addresses, _hard = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        available.append(addresses - psutil.Process().memory_info().vms)
    return max(min(available) - RESERVE_BYTES, 0)


def processors(mounted: Path = _MOUNTED, own: Path = _OWN) -> int:
    """Cores that this process can keep busy: those it may run on, physical ones, and its
    cgroups' quota of time."""
    limits = [float(len(os.sched_getaffinity(0)))]
    if physical := psutil.cpu_count(logical=False):
        limits.append(physical)
    for _version, texts in _cgroups("cpu", _TIME, mounted, own):
        quota, period = " ".join(texts).split()
        # "max" or -1 where there is none
        if quota.isdigit():
            limits.append(int(quota) / int(period))
    return max(int(min(limits)), 1)


def memory_nodes(root: Path = Path("/sys")) -> list[int]:
    """The machine's memory by socket (NUMA): a device reaches that of its own fastest."""
    found = (root / "devices/system/node").glob("node[0-9]*")
    return sorted(int(path.name[4:]) for path in found)


def node_of(pci_address: str, root: Path = Path("/sys")) -> int | None:
    """The memory node of a device; None where nobody knows."""
    file = root / "bus/pci/devices" / pci_address / "numa_node"
    node = int(file.read_text()) if file.is_file() else -1
    return node if node in memory_nodes(root) else None


SPILLED = "_spilled-"
"""First letters of a file's name that has weights until they move to their places."""


class MappedFile(NamedTuple):
    """Addresses of this process that are pages of a file."""

    first: int
    end: int
    offset: int
    path: Path


def mapped_files() -> list[MappedFile]:
    """List what this process maps of files with a name, and of what waits on a disk, by
    address; nothing where the system does not tell (/proc/self/maps)."""
    try:
        # bytes: a name may have any, those that end a line elsewhere too
        listing = Path("/proc/self/maps").read_bytes()
    except OSError:
        return []
    found = []
    for line in listing.split(b"\n"):
        # memory that processes share is a file without a name
        is_gone = line.endswith(b" (deleted)") and f"/{SPILLED}".encode() not in line
        if b" /" in line and not is_gone:
            span, _, offset, _, _, name = line.split(None, 5)
            first, _, end = span.partition(b"-")
            path = Path(os.fsdecode(name))
            found.append(
                MappedFile(int(first, 16), int(end, 16), int(offset, 16), path)
            )
    return found


def mapped_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of those host tensors that are pages of files: nothing is freed with them."""
    files = mapped_files()
    return sum(t.nbytes for t in tensors if file_of(t, files) is not None)


def file_of(tensor: Tensor, files: Sequence[MappedFile]) -> MappedFile | None:
    """The one of these in which a tensor's first byte lies."""
    at = bisect_right(files, tensor.data_ptr(), key=lambda file: file.first) - 1
    found = files[at] if at >= 0 else None
    return found if found is not None and tensor.data_ptr() < found.end else None


def _cgroups(
    controller: str, names: Mapping[int, Sequence[str]], mounted: Path, own: Path
) -> Iterator[tuple[int, list[str]]]:
    """Version and texts of these files, of this process's cgroup and of those above it,
    where they are."""
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        root = mounted / controller if controllers else mounted
        below = Path(path.lstrip("/"))
        # in a container the path may be the host's: then the root is its own
        for part in (below, *below.parents):
            files = [root / part / name for name in names[version]]
            if all(file.is_file() for file in files):
                yield version, [file.read_text() for file in files]


def _cgroups_leave(mounted: Path, own: Path) -> Iterator[int]:
    """Bytes that each cgroup with a limit leaves."""
    for version, (limit, used, stat) in _cgroups("memory", _MEMORY, mounted, own):
        # "max" where there is none
        if limit.strip().isdigit():
            prefix = "total_" if version == 1 else ""
            pages = dict(line.split() for line in stat.splitlines())
            active, inactive = (
                int(pages.get(f"{prefix}{kind}_file", 0))
                for kind in ("active", "inactive")
            )
            yield int(limit) - max(int(used) - active - inactive, 0)
