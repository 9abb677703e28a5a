"""Host memory that the ranks of a node share."""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack

from ..errors import ConfigError
from .ranks import Ranks


def map_shared(nbytes: int, ranks: Ranks) -> mmap.mmap:
    """Map zeros that all ranks of a node see; every rank has to call it.

    It has no name in any file system, so nothing is left when the last rank ends, in
    whatever way, and the size of /dev/shm does not matter.

    Raises:
        ConfigError: The system cannot share memory so.
    """
    with ExitStack() as opened:

        def make() -> tuple[int, int]:
            if not hasattr(os, "memfd_create"):
                raise ConfigError(
                    "protrain_auto_memory: ranks share host memory by memfd_create, "
                    "which this system does not have. Train with one process, or set "
                    "protrain_force_all_persistent: true."
                )
            descriptor = os.memfd_create("protrain", os.MFD_CLOEXEC)
            opened.callback(os.close, descriptor)
            os.ftruncate(descriptor, nbytes)
            return os.getpid(), descriptor

        process, number = ranks.from_first_of_node(make)

        def map_it() -> mmap.mmap:
            own = number
            if ranks.local_rank:
                own = _open(process, number)
                opened.callback(os.close, own)
            return mmap.mmap(own, nbytes, flags=mmap.MAP_SHARED)

        # the first rank keeps it open until the others have it
        return ranks.together(map_it)


def _open(process: int, number: int) -> int:
    path = f"/proc/{process}/fd/{number}"
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"protrain_auto_memory: {path} cannot be opened ({error.strerror}), through "
            "which the ranks of a node share host memory. Run them as one user in one "
            "container, or set protrain_force_all_persistent: true."
        ) from error
