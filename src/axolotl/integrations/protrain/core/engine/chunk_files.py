"""Files of frozen chunks on a disk: written once under the name of their content, mapped, and
read around the system's page cache."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import re
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from stat import S_ISREG
from tempfile import NamedTemporaryFile
from typing import IO, NamedTuple

import torch
from torch import Tensor

from ..errors import DiskError
from ..host import MappedFile, file_of, mapped_files
from ..layout import aligned
from ..layout.shards import PAGE_BYTES

SUFFIX, QUANTISED, UNFINISHED = ".chunk", ".quantised", "_incomplete-"
MEASURED_BYTES = 128 << 20
READ_BYTES, NUM_READERS = 8 << 20, 4
"""Size of one read, and how many are in flight: a solid-state disk wants several large ones."""


def store(folder: Path, content: Tensor, compares: bool = False) -> Path:
    """Write bytes under the name of their hash, whole or not at all, unless they are there.

    Args:
        folder: Is made where it is missing.
        content: uint8, on the host.
        compares: Look at the bytes that are there, which whoever reads all of them does
            later.

    Raises:
        DiskError: The folder cannot be written, or has no room.
    """
    data = content.numpy().data
    path = folder / f"{hashlib.sha256(data).hexdigest()}{SUFFIX}"
    nbytes = aligned(len(data), PAGE_BYTES)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_there = path.is_file() and path.stat().st_size == nbytes
        if is_there and not (compares and _differs(path, content)):
            # used now, by `stored`; the time of a change is left to `ChunkFile`
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
            return path
        with ExitStack() as on_failure:
            with unfinished(folder) as file:
                on_failure.callback(remove, file.name)
                write(file, data)
                file.truncate(nbytes)
                os.fsync(file.fileno())
                os.replace(file.name, path)
            on_failure.pop_all()
    except OSError as error:
        raise DiskError(
            f"protrain_disk_dir: {path} cannot be written ({error.strerror}). Give a "
            "folder on a disk with room for the frozen weights."
        ) from error
    return path


def _differs(path: Path, content: Tensor) -> bool:
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        found = torch.frombuffer(memory, dtype=torch.uint8, count=len(content))
        is_other = not torch.equal(found, content)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return is_other


def unfinished(folder: Path) -> IO[bytes]:
    """Open a new file without a buffer, which `remove_unfinished` lets be while it is open.

    Raises:
        OSError: The folder cannot be written, or has no locks.
    """
    while True:
        file = NamedTemporaryFile(
            dir=folder, prefix=UNFINISHED, delete=False, buffering=0
        )
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            # another process may have removed it before it was locked
            if os.fstat(file.fileno()).st_nlink:
                return file
        except OSError:
            remove(file.name)
            file.close()
            raise
        file.close()


def write(file: IO[bytes], data: memoryview) -> None:
    """Write all bytes to a file without a buffer, whose end would fail once more over a full
    disk."""
    while data:
        data = data[file.write(data) :]


def remove(name: str | Path) -> None:
    """Delete a file, if it is there and may be."""
    with suppress(OSError):
        os.unlink(name)


class Stored(NamedTuple):
    """Files of a folder, their bytes, and when one of them was last used, in seconds since
    1970; 0 without any."""

    paths: tuple[Path, ...]
    nbytes: int
    used: float


def stored(folder: Path, unused_s: float = 0.0) -> Stored:
    """List the files of weights that no run has opened for so many seconds.

    Raises:
        DiskError: The folder cannot be read.
    """
    try:
        paths = [path for path in folder.iterdir() if _OWN_NAME.fullmatch(path.name)]
    except OSError as error:
        raise DiskError(f"{folder}: {error.strerror}") from error
    old, before = list[tuple[Path, os.stat_result]](), time.time() - unused_s
    for path in sorted(paths):
        # another process may remove it meanwhile
        with suppress(OSError):
            stat = path.lstat()
            if S_ISREG(stat.st_mode) and stat.st_atime <= before:
                old.append((path, stat))
    used = max((stat.st_atime for _, stat in old), default=0.0)
    nbytes = sum(stat.st_size for _, stat in old)
    return Stored(tuple(path for path, _ in old), nbytes, used)


_OWN_NAME = re.compile(rf"[0-9a-f]{{64}}({re.escape(SUFFIX)}|{re.escape(QUANTISED)})")


def remove_unfinished(folder: Path) -> int:
    """Remove what processes have left that were killed while they wrote; count it."""
    count = 0
    for path in folder.glob(f"{UNFINISHED}*"):
        with suppress(OSError), path.open("rb") as file:
            # whoever still writes it has it locked
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            count += 1
    return count


class _File:
    """A file, open for reads that leave the page cache out, where its system can."""

    def __init__(self, path: Path) -> None:
        self.path, flags = path, os.O_RDONLY | os.O_CLOEXEC
        self.is_direct = True
        try:
            self.mapped = os.open(path, flags)
            try:
                self._file = os.open(path, flags | os.O_DIRECT)
            except OSError:
                # EINVAL: of tmpfs and some network file systems
                self.is_direct, self._file = False, os.dup(self.mapped)
        except OSError as error:
            raise self.wrong(error.strerror or "it cannot be opened") from error
        self._num_names = os.fstat(self.mapped).st_nlink
        self._as_opened = self._stamp()

    def read(self, part: memoryview, where: int) -> None:
        """Fill whole pages of memory from a page of the file on."""
        start, nbytes = where, len(part)
        try:
            while part:
                done = os.preadv(self._file, [part], where)
                if not done:
                    raise self.wrong("it is cut off")
                part, where = part[done:], where + done
            if not self.is_direct:
                os.posix_fadvise(self._file, start, nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self.wrong(error.strerror or str(error)) from error

    def read_any(self, part: memoryview, where: int) -> None:
        """Fill memory from any byte of the file on, through pages of this thread's."""
        if not self.is_direct:
            self.read(part, where)
            return
        if not hasattr(_OWN, "pages"):
            _OWN.pages = mmap.mmap(-1, READ_BYTES + 2 * PAGE_BYTES)
        first = where // PAGE_BYTES * PAGE_BYTES
        pages = memoryview(_OWN.pages)[: aligned(where + len(part) - first, PAGE_BYTES)]
        done = 0
        try:
            # the last page of a file may not be whole
            while done < where + len(part) - first:
                new = os.preadv(self._file, [pages[done:]], first + done)
                done += new
                # a part of a page is the end of the file
                if not new or (done % PAGE_BYTES and done < where + len(part) - first):
                    raise self.wrong("it is cut off")
        except OSError as error:
            raise self.wrong(error.strerror or str(error)) from error
        part[:] = pages[where - first :][: len(part)]

    def require_unchanged(self) -> None:
        """Raise DiskError if somebody has written it since it was opened."""
        now = self._stamp()
        if now[:2] != self._as_opened[:2] or now[2] not in (0, self._as_opened[2]):
            raise self.wrong("somebody has changed it")

    def close(self) -> None:
        os.close(self._file)
        os.close(self.mapped)

    def _stamp(self) -> tuple[int, ...]:
        stat = os.fstat(self.mapped)
        # a time of content may be set; that of the status tells of a new name, too, and of
        # our own files that another run has looked at them
        is_own = self.path.suffix in (SUFFIX, QUANTISED)
        told = 0 if is_own or stat.st_nlink != self._num_names else stat.st_ctime_ns
        return stat.st_size, stat.st_mtime_ns, told

    def wrong(self, what: str) -> DiskError:
        """An error that names the file and the way out."""
        return DiskError(
            f"protrain_disk_dir: {self.path}: {what}. Training cannot go on without these "
            "weights; its checkpoints are whole. Resume from the last one."
        )


_OWN = threading.local()
"""Pages of each thread that reads."""


class ChunkFile:
    """A chunk's file, open for reading; a file that gets its name later does not matter.

    Args:
        path: Named by `store`.
        nbytes: Of the chunk, with what its shards are padded by.

    Attributes:
        is_direct: Reads leave the page cache out, which not all file systems can.

    Raises:
        DiskError: It is missing.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._file, self.nbytes = _File(path), nbytes
        self.is_direct, self._verified = self._file.is_direct, False

    def map(self) -> mmap.mmap:
        """Pages of the file; who writes them has pages of one's own."""
        memory = mmap.mmap(self._file.mapped, 0, flags=mmap.MAP_PRIVATE)
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
        file, into = self._file, room.numpy().data

        def read_part(begin: int) -> None:
            file.read(into[begin : begin + READ_BYTES], start + begin)

        list(readers.map(read_part, range(0, len(into), READ_BYTES)))
        file.require_unchanged()
        whole = start == 0 and len(into) >= self.nbytes
        if whole and not self._verified:
            content = hashlib.sha256(into[: self.nbytes]).hexdigest()
            if content != file.path.stem:
                raise file.wrong("its content is not what its name says; delete it")
            self._verified = True

    def close(self) -> None:
        """Close it; what is mapped stays."""
        self._file.close()


SMALL_BYTES = 1 << 20
"""Size up to which a tensor stays in memory where the others of its chunk lie in files: the
norms of a base in 4 bits are widened while it loads."""


class Span(NamedTuple):
    """Bytes of a file that are a tensor of a chunk, from `place` on; without a path those
    of the tensor in memory."""

    path: Path | None
    start: int
    place: int
    tensor: Tensor


class Mappings(NamedTuple):
    """Files that this process maps, and addresses of pages that it has written since."""

    files: list[MappedFile]
    written: list[tuple[int, int]]


def mappings() -> Mappings:
    """Look at the files that this process maps now."""
    return Mappings(mapped_files(), _written_addresses())


def spans_of(
    pairs: Iterable[tuple[int, Tensor]], disk: Path, mapped: Mappings
) -> list[Span] | None:
    """Find the files on the disk of a folder that have the bytes of tensors.

    Args:
        pairs: The place of a tensor in its chunk, and the tensor.
        disk: Folder of that disk.
        mapped: `mappings`, not older than the tensors.

    Returns:
        None if a large one of them is no part of such a file, or no longer has its bytes.
    """
    spans = list[Span]()
    for place, tensor in pairs:
        file = file_of(tensor, mapped.files)
        if not tensor.is_contiguous():
            return None
        if file is None or tensor.data_ptr() + tensor.nbytes > file.end:
            if tensor.nbytes > SMALL_BYTES:
                return None
            spans.append(Span(None, 0, place, tensor))
        else:
            start = file.offset + tensor.data_ptr() - file.first
            spans.append(Span(file.path, start, place, tensor))
    there = next(folder for folder in (disk, *disk.parents) if folder.exists())
    try:
        disks = {os.stat(span.path).st_dev for span in spans if span.path is not None}
        # another one may be slow, and was not measured
        is_there = disks == {os.stat(there).st_dev}
    except OSError:
        return None
    there_now = [span.tensor for span in spans if span.path is not None]
    return spans if is_there and not any(_touch(there_now, mapped.written)) else None


class BaseFiles:
    """The bytes of a chunk where they lie in a base's own files; nothing is written.

    Args:
        spans: From `spans_of`.

    Raises:
        DiskError: A file is missing.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        # copies: who writes the tensors is told, and reads go on as before
        self._in_memory = [
            (span, _bytes_of(span.tensor).clone())
            for span in spans
            if span.path is None
        ]
        self._files: dict[Path, _File] = {}
        self._in_files: list[tuple[Span, _File]] = []
        for span in spans:
            if span.path is not None:
                if span.path not in self._files:
                    self._files[span.path] = _File(span.path)
                self._in_files.append((span, self._files[span.path]))

    def read(self, room: Tensor, start: int, readers: ThreadPoolExecutor) -> None:
        """Fill host memory with a part of the chunk; see `ChunkFile.read`."""
        into = room.numpy().data
        parts = [
            (file, span.start + first - span.place, first - start, nbytes)
            for span, file in self._in_files
            for first, nbytes in _cut(span, start, len(into))
        ]

        def read_part(part: tuple[_File, int, int, int]) -> None:
            file, where, place, nbytes = part
            file.read_any(into[place : place + nbytes], where)

        reads = readers.map(read_part, parts)
        for span, kept in self._in_memory:
            for first, nbytes in _cut(span, start, len(into)):
                own = kept[first - span.place :][:nbytes]
                room[first - start :][:nbytes].copy_(own)
        list(reads)
        for file in self._files.values():
            file.require_unchanged()

    def undo_writes(self) -> bool:
        """Take back what somebody has written over the pages, or over what is in memory;
        tell whether that was other bytes."""
        found = False
        for span, kept in self._in_memory:
            if not torch.equal(_bytes_of(span.tensor), kept):
                _bytes_of(span.tensor).copy_(kept)
                found = True
        flags = written([span.tensor for span, _ in self._in_files])
        for (span, file), is_written in zip(self._in_files, flags, strict=True):
            if not is_written:
                continue
            now = _bytes_of(span.tensor)
            memory = mmap.mmap(file.mapped, 0, flags=mmap.MAP_PRIVATE)
            kept = torch.frombuffer(memory, dtype=torch.uint8)[span.start :][: len(now)]
            if not torch.equal(now, kept):
                now.copy_(kept)
                found = True
        return found

    def close(self) -> None:
        """Close the files; what is mapped stays."""
        for file in self._files.values():
            file.close()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _cut(span: Span, start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut what a span has of a part of a chunk into reads: place and size of each."""
    first = max(span.place, start)
    stop = min(span.place + span.tensor.nbytes, start + nbytes)
    for begin in range(first, stop, READ_BYTES):
        yield begin, min(READ_BYTES, stop - begin)


def read_rate(folder: Path) -> float:
    """Measure bytes per second of reads as a training makes them, one after the other, of a
    file that is written for it and goes again.

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
        for _ in range(7):
            start = time.perf_counter()
            file.read(room, 0, readers)
            seconds.append(time.perf_counter() - start)
    file.close()
    # the first one looks at the content too; a shared disk is fast for a moment
    return MEASURED_BYTES / statistics.fmean(seconds[1:])


def written(tensors: Sequence[Tensor]) -> list[bool]:
    """Tell of private pages of files which have bytes that are no longer the file's."""
    return _touch(tensors, _written_addresses())


def _written_addresses() -> list[tuple[int, int]]:
    """First and last addresses of mappings of which pages were written."""
    spans, span = list[tuple[int, int]](), (0, 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head:
            begin, _, end = head.partition("-")
            span = int(begin, 16), int(end, 16)
        elif head in ("Anonymous:", "Swap:") and rest.split()[0] != "0":
            spans.append(span)
    return spans


def _touch(tensors: Iterable[Tensor], spans: Sequence[tuple[int, int]]) -> list[bool]:
    starts = ((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    return [any(b < stop and first < e for b, e in spans) for first, stop in starts]
