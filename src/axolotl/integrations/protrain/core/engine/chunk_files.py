"""Files of frozen chunks on a disk: written once under the name of their content, mapped, and
read around the system's page cache."""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor

from ..errors import DiskError
from ..host import SPILLED
from ..layout import aligned
from ..layout.shards import PAGE_BYTES

SUFFIX = ".chunk"
MEASURED_BYTES = 128 << 20
READ_BYTES, NUM_READERS = 8 << 20, 4
"""Size of one read, and how many are in flight: a solid-state disk wants several large ones."""


def store(folder: Path, content: Tensor) -> Path:
    """Write bytes under the name of their hash, whole or not at all, unless they are there.

    Args:
        folder: Is made where it is missing.
        content: uint8, on the host.

    Raises:
        DiskError: The folder cannot be written, or has no room.
    """
    data = content.numpy().data
    path = folder / f"{hashlib.sha256(data).hexdigest()}{SUFFIX}"
    nbytes = aligned(len(data), PAGE_BYTES)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path.stat().st_size == nbytes:
            return path
        with ExitStack() as on_failure:
            file = NamedTemporaryFile(dir=folder, prefix="_incomplete-", delete=False)
            on_failure.callback(_remove, file.name)
            with file:
                file.write(data)
                file.truncate(nbytes)
                file.flush()
                os.fsync(file.fileno())
            os.replace(file.name, path)
            on_failure.pop_all()
    except OSError as error:
        raise DiskError(
            f"protrain_disk_dir: {path} cannot be written ({error.strerror}). Give a "
            "folder on a disk with room for the frozen weights."
        ) from error
    return path


def _remove(name: str) -> None:
    with suppress(OSError):
        os.unlink(name)


class ChunkFile:
    """A chunk's file, open for reading; a file that gets its name later does not matter.

    Args:
        path: Named by `store`.
        nbytes: Of the chunk, with what its shards are padded by.

    Attributes:
        is_direct: Reads leave the page cache out, which not all file systems can.

    Raises:
        DiskError: It is missing or has another size.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        self.is_direct, flags = True, os.O_RDONLY | os.O_CLOEXEC
        try:
            self._mapped = os.open(path, flags)
            try:
                self._file = os.open(path, flags | os.O_DIRECT)
            except OSError:
                # EINVAL: of tmpfs and some network file systems
                self.is_direct, self._file = False, os.dup(self._mapped)
        except OSError as error:
            raise self._wrong(error.strerror or "it cannot be opened") from error
        self._as_opened = self._stamp()
        self._verified = False

    def map(self) -> mmap.mmap:
        """Pages of the file; who writes them has pages of one's own."""
        memory = mmap.mmap(self._mapped, 0, flags=mmap.MAP_PRIVATE)
        memory.madvise(mmap.MADV_DONTFORK)
        return memory

    def read(self, room: Tensor, start: int, readers: ThreadPoolExecutor) -> None:
        """Fill pages of host memory from the file, by several threads.

        Args:
            room: uint8, from a page on, of whole pages.
            start: Where in the file, from a page on.

        Raises:
            DiskError: The disk fails, or the file is not as it was when it was opened.
        """
        into = room.numpy().data

        def read_part(begin: int) -> None:
            part = into[begin : begin + READ_BYTES]
            while part:
                done = os.preadv(self._file, [part], start + begin)
                if not done:
                    raise self._wrong("it is cut off")
                part, begin = part[done:], begin + done

        try:
            list(readers.map(read_part, range(0, len(into), READ_BYTES)))
            if not self.is_direct:
                where = start, len(into), os.POSIX_FADV_DONTNEED
                os.posix_fadvise(self._file, *where)
            if self._stamp() != self._as_opened:
                raise self._wrong("somebody has changed it")
        except OSError as error:
            raise self._wrong(error.strerror or str(error)) from error
        whole = start == 0 and len(into) >= self.nbytes
        if whole and not self._verified:
            content = hashlib.sha256(into[: self.nbytes]).hexdigest()
            if content != self.path.stem:
                raise self._wrong("its content is not what its name says; delete it")
            self._verified = True

    def close(self) -> None:
        """Close it; what is mapped stays."""
        os.close(self._file)
        os.close(self._mapped)

    def _stamp(self) -> tuple[int, int]:
        stat = os.fstat(self._mapped)
        return stat.st_size, stat.st_mtime_ns

    def _wrong(self, what: str) -> DiskError:
        return DiskError(
            f"protrain_disk_dir: {self.path}: {what}. Training cannot go on without these "
            "weights; its checkpoints are whole. Resume from the last one."
        )


class SpillFile:
    """Keeps host tensors in a file while a model is loaded that the host has no room for.

    The file has no name, so nothing is left of it in whatever way the process ends.

    Raises:
        DiskError: The folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = NamedTemporaryFile(dir=folder, prefix=SPILLED, delete=False)
            os.unlink(self._file.name)
        except OSError as error:
            raise self._wrong(error) from error

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor as pages of the file."""
        data = tensor.contiguous().view(-1).view(torch.uint8)
        if not len(data):
            return tensor
        file = self._file.fileno()
        start = aligned(os.fstat(file).st_size, PAGE_BYTES)
        try:
            os.truncate(file, start)
            self._file.seek(start)
            self._file.write(data.numpy().data)
            self._file.flush()
            memory = mmap.mmap(file, len(data), flags=mmap.MAP_PRIVATE, offset=start)
        except OSError as error:
            raise self._wrong(error) from error
        pages = torch.frombuffer(memory, dtype=tensor.dtype)
        return pages.view(tensor.shape)

    def _wrong(self, error: OSError) -> DiskError:
        return DiskError(
            f"protrain_disk_dir: {self._folder} cannot be written ({error.strerror}). Give "
            "a folder on a disk with room for twice the frozen weights."
        )


def read_rate(folder: Path) -> float:
    """Measure bytes per second of reads as a training makes them, of a file that is written
    for it and goes again.

    Raises:
        DiskError: The folder cannot be written.
    """
    room = torch.frombuffer(mmap.mmap(-1, MEASURED_BYTES), dtype=torch.uint8)
    # of this process alone, which others measure beside, and not of torch's generator,
    # whose next numbers are the training's
    noise = bytearray(os.urandom(MEASURED_BYTES))
    made = store(folder, torch.frombuffer(noise, dtype=torch.uint8))
    file = ChunkFile(made, MEASURED_BYTES)
    made.unlink()
    seconds = list[float]()
    with ThreadPoolExecutor(NUM_READERS) as readers:
        for _ in range(3):
            start = time.perf_counter()
            file.read(room, 0, readers)
            seconds.append(time.perf_counter() - start)
    file.close()
    # the first one looks at the content too, and may find it in the page cache
    return MEASURED_BYTES / min(seconds[1:])


def written(mappings: Sequence[Tensor]) -> list[bool]:
    """Tell of private mappings of files which have bytes that are no longer the file's."""
    spans, span = list[tuple[int, int]](), (0, 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head:
            begin, _, end = head.partition("-")
            span = int(begin, 16), int(end, 16)
        elif head == "Anonymous:" and rest.split()[0] != "0":
            spans.append(span)
    starts = ((m.data_ptr(), m.data_ptr() + m.nbytes) for m in mappings)
    return [any(b < stop and first < e for b, e in spans) for first, stop in starts]
