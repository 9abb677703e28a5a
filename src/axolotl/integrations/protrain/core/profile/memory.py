"""Memory that may be used on this machine."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

_CGROUP_FILES = (
    # unified hierarchy, then the memory controller of version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)

HOST_RESERVE_BYTES = 1 << 30
"""Left to the operating system, the dataloader and the tokenizer."""


def device_memory(device: torch.device) -> int:
    """Free bytes of a CUDA device; memory cached by torch counts as free."""
    free, _total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached


def host_memory() -> int:
    """Bytes that this process may still take: the machine's or its cgroup's."""
    available = [psutil.virtual_memory().available]
    for limit_file, used_file in _CGROUP_FILES:
        limit, used = _read_number(limit_file), _read_number(used_file)
        if limit is not None and used is not None:
            available.append(limit - used)
    return max(min(available) - HOST_RESERVE_BYTES, 0)


def _read_number(path: str) -> int | None:
    file = Path(path)
    if not file.is_file():
        return None
    text = file.read_text().strip()
    return int(text) if text.isdigit() else None
