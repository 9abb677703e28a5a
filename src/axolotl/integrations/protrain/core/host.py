"""What the host gives this process: memory and processors, as cgroups limit them.

A container sees the machine's memory and processors, and is stopped or killed beyond its
own: rented ones show 96 processors for a quota of 8.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
from torch import Tensor

RESERVE_BYTES = 1 << 30
"""Left to the operating system, the dataloader and the tokenizer."""
_MOUNTED, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_MEMORY = {
    # by version: the limit, what is taken, how keys of its pages begin
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def host_memory(mounted: Path = _MOUNTED, own: Path = _OWN) -> int:
    """Bytes that this process may still take: the machine's or those of its cgroups.

    Pages of files, weights for example, are given up where memory is asked for.
    """
    available = [psutil.virtual_memory().available, *_cgroups_leave(mounted, own)]
    return max(min(available) - RESERVE_BYTES, 0)


def processors(mounted: Path = _MOUNTED, own: Path = _OWN) -> int:
    """Cores that this process can keep busy: those it may run on, physical ones, and its
    cgroups' quota of time."""
    limits = [float(len(os.sched_getaffinity(0)))]
    if physical := psutil.cpu_count(logical=False):
        limits.append(physical)
    for version, folder in _cgroups("cpu", mounted, own):
        names = (
            ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        )
        if all((folder / name).is_file() for name in names):
            text = " ".join((folder / name).read_text() for name in names)
            quota, period = text.split()
            # "max" or -1 where there is none
            if quota.isdigit():
                limits.append(int(quota) / int(period))
    return max(int(min(limits)), 1)


def mapped_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of those host tensors that are pages of files: nothing is freed with them."""
    listing, found = Path("/proc/self/maps"), []
    for line in listing.read_text().splitlines() if listing.is_file() else ():
        addresses, _, _, _, _, *path = line.split(maxsplit=5)
        # a file without a name is memory that processes share
        if path and path[0].startswith("/") and not path[0].endswith(" (deleted)"):
            found.append([int(address, 16) for address in addresses.split("-")])
    ends = [end for _, end in found]

    def is_mapped(address: int) -> bool:
        at = bisect_right(ends, address)
        return at < len(found) and found[at][0] <= address

    return sum(t.nbytes for t in tensors if is_mapped(t.data_ptr()))


def _cgroups(controller: str, mounted: Path, own: Path) -> Iterator[tuple[int, Path]]:
    """Version and folder of this process's cgroup and of those above it."""
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mounted / controller if controllers else mounted
        below = Path(path.lstrip("/"))
        # in a container the path may be the host's: then the root is its own
        for part in (below, *below.parents):
            yield (1 if controllers else 2), root / part


def _cgroups_leave(mounted: Path, own: Path) -> Iterator[int]:
    """Bytes that each cgroup with a limit leaves."""
    for version, folder in _cgroups("memory", mounted, own):
        limited, taken, prefix = _MEMORY[version]
        files = [folder / name for name in (limited, taken, "memory.stat")]
        if not all(file.is_file() for file in files):
            continue
        limit, used, stat = (file.read_text() for file in files)
        # "max" where there is none
        if limit.strip().isdigit():
            pages = dict(line.split() for line in stat.splitlines())
            active, inactive = (
                int(pages.get(f"{prefix}{kind}_file", 0))
                for kind in ("active", "inactive")
            )
            yield int(limit) - max(int(used) - active - inactive, 0)
