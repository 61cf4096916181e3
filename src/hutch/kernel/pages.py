"""The memory map of this process, and the system calls that change it.

`sleep` decides what to move.
"""

from __future__ import annotations

import bisect
import functools
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

PAGE = mmap.PAGESIZE
# The unit in which pages are examined and moved: a huge page, so that none is split needlessly.
STRETCH = 512 * PAGE

_PRIVATE, _FIXED = 0x02, 0x10
_READ, _WRITE = 1, 2
_DONTNEED, _POPULATE_WRITE = 4, 23
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_SET_PDEATHSIG = 1

# VmFlags of areas whose physical pages matter: locked, of a device, pinned for one, reserved huge
# pages, not inherited by children (which is how memory that hardware writes to is marked).
_SPECIAL = {"lo", "io", "pf", "ht", "dc", "mm"}


@dataclass(frozen=True)
class Area:
    """One line of the memory map. Sizes are in bytes; `own` is what differs from the file."""

    start: int
    end: int
    rights: str
    offset: int
    file: tuple[str, int]
    name: str
    resident: int = 0
    own: int = 0
    special: bool = False

    @property
    def private(self) -> bool:
        return self.rights.endswith("p")

    @property
    def anonymous(self) -> bool:
        """Not of a file: the heap, or an anonymous mapping."""
        return not self.file[1] and (self.name in ("", "[heap]") or self.name.startswith("[anon:"))

    @property
    def plain(self) -> bool:
        """Ordinary memory: private, readable and writable, and not special."""
        return self.rights.startswith("rw") and self.private and not self.special


def areas(process: str = "self") -> list[Area]:
    """The memory map of a process, without sizes."""
    with open(f"/proc/{process}/maps", "rb") as lines:
        return [_area(line.decode("utf-8", "replace")) for line in lines]


def areas_with_sizes() -> list[Area]:
    """The memory map of this process, with how much of each area is in memory."""
    with open("/proc/self/smaps", "rb") as lines:
        return _with_sizes([line.decode("utf-8", "replace") for line in lines])


def _area(line: str) -> Area:
    span, rights, offset, device, inode, *name = line.split(None, 5)
    start, _, end = span.partition("-")
    file = (device, int(inode))
    return Area(int(start, 16), int(end, 16), rights, int(offset, 16), file, "".join(name).strip())


def _with_sizes(lines: list[str]) -> list[Area]:
    parsed: list[Area] = []
    sizes = {"Rss:": 0, "Anonymous:": 0, "Swap:": 0}
    special = False
    for line in reversed(lines):  # the sizes of an area follow its line
        word, _, rest = line.partition(" ")
        if word in sizes:
            sizes[word] = int(rest.split()[0]) * 1024
        elif word == "VmFlags:":
            special = not _SPECIAL.isdisjoint(rest.split())
        elif not word.endswith(":"):
            own = sizes["Anonymous:"] + sizes["Swap:"]
            plain = _area(line).__dict__
            plain.update(resident=sizes["Rss:"], own=own, special=special)
            parsed.append(Area(**plain))
    return parsed[::-1]


@functools.cache
def _libc() -> Any:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    number, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_int64]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    libc.mincore.argtypes = [pointer, size, pointer]
    libc.fallocate.argtypes = [number, number, ctypes.c_int64, ctypes.c_int64]
    libc.prctl.argtypes = [number, ctypes.c_ulong]
    return libc


def death_signal() -> Callable[[int], object]:
    """A function that makes the kernel send this process a signal when its parent ends.

    Looked up before a fork: the child of a process with threads should not load a library.
    """
    try:
        prctl = _libc().prctl
    except Exception:  # there is no ctypes, or another module of that name
        return lambda number: None
    return lambda number: prctl(_SET_PDEATHSIG, number)


def _check(good: bool) -> None:
    if not good:
        import ctypes

        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def at(address: int, size: int) -> memoryview:
    """The bytes at an address, which must stay mapped while this is used."""
    import ctypes

    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def words(address: int) -> tuple[int, int]:
    """Two machine words at an address."""
    two = at(address, 16).cast("L")
    return two[0], two[1]


def map_file(address: int, size: int, fd: int, offset: int) -> None:
    """Replace the memory at an address by a private mapping of a file, atomically."""
    flags = _PRIVATE | _FIXED
    where = _libc().mmap(address, size, _READ | _WRITE, flags, fd, offset)
    _check(where == address)


def make_own(address: int, size: int) -> bool:
    """Copy all pages of a private mapping, as if each was written: they no longer need the file.

    One system call, so that nothing can write in between. False before Linux 5.14.
    """
    return bool(_libc().madvise(address, size, _POPULATE_WRITE) == 0)


def identity(fd: int) -> tuple[str, int]:
    """Device and inode of a file in the memory map. Those of stat may differ (overlays, btrfs)."""
    where = _libc().mmap(None, PAGE, _READ, _PRIVATE, fd, 0)
    _check(where != 2**64 - 1)
    try:
        return next(area.file for area in areas() if area.start <= where < area.end)
    finally:
        _libc().munmap(where, PAGE)


def drop(address: int, size: int) -> None:
    """Drop pages of a private mapping of a file: the next access reads the file."""
    _check(_libc().madvise(address, size, _DONTNEED) == 0)


def stretches(start: int, end: int) -> list[tuple[int, int]]:
    """The parts of a range, in units of STRETCH, that have a page in memory."""
    seen = bytearray((end - start) // PAGE)
    view = memoryview(seen)
    if _libc().mincore(start, end - start, _address(seen)) != 0:
        return [(start, end)]
    parts: list[tuple[int, int]] = []
    for first in range(start, end, STRETCH):
        last = min(first + STRETCH, end)
        if any(view[(first - start) // PAGE : (last - start) // PAGE]):
            if parts and parts[-1][1] == first:
                first = parts.pop()[0]
            parts.append((first, last))
    return parts


def _address(of: bytearray) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(of))


def punch(fd: int, offset: int, size: int) -> None:
    """Free the disk space of a part of a file. Ignored if the file system does not support it."""
    _libc().fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, size)


@contextmanager
def open_to_itself() -> Iterator[None]:
    """Make the process dumpable: one that has changed its user cannot read its own /proc files."""
    GET_DUMPABLE, SET_DUMPABLE = 3, 4
    hidden = _libc().prctl(GET_DUMPABLE, 0) == 0
    if hidden:
        _libc().prctl(SET_DUMPABLE, 1)
    try:
        yield
    finally:
        if hidden:
            _libc().prctl(SET_DUMPABLE, 0)


def trim() -> None:
    """Make the C library return its free memory to the system."""
    if hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(0)


# --- ranges of memory -------------------------------------------------------------------


Span = tuple[int, int]

# The allocator of glibc has a header of two words before each allocation. The second is its size,
# and in the lowest bits whether it is a mapping of its own, or in the heap of a thread.
_HEADER = 16
_OWN_MAPPING, _OF_A_THREAD = 2, 4
# Heaps of threads start at multiples of this, and are not larger.
_THREAD_HEAP = 64 << 20


def merged(spans: list[Span]) -> list[Span]:
    """Sorted, and overlapping ones joined. Adjacent ones are not: their owners may differ."""
    out: list[Span] = []
    for start, end in sorted(set(spans)):
        if out and start < out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        elif start < end:
            out.append((start, end))
    return out


class Spans:
    """A set of ranges with fast lookup."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans = merged(spans)
        self._starts = [start for start, _ in self._spans]

    def __bool__(self) -> bool:
        return bool(self._spans)

    def meet(self, span: Span) -> bool:
        """Is any of a range in one of them?"""
        at = bisect.bisect_left(self._starts, span[1]) - 1
        return at >= 0 and self._spans[at][1] > span[0]

    def cover(self, span: Span) -> bool:
        """Is all of a range in one of them?"""
        at = bisect.bisect_right(self._starts, span[0]) - 1
        return at >= 0 and self._spans[at][1] >= span[1]

    def leave(self, span: Span) -> list[Span]:
        """The parts of a range that are in none of them."""
        left, start = [], span[0]
        for first, last in self._spans:
            if first >= span[1]:
                break
            if first > start:
                left.append((start, first))
            start = max(start, last)
        return [*left, (start, span[1])] if start < span[1] else left


class Layout:
    """The memory map at one moment."""

    def __init__(self, areas: list[Area]) -> None:
        self.areas = areas
        self._starts = [area.start for area in areas]
        heap = [area for area in areas if area.name == "[heap]"]
        # From first to last: parts of it that sleep have another name.
        self._heap = (heap[0].start, heap[-1].end) if heap else (0, 0)

    def overlapping(self, start: int, end: int) -> Iterator[Area]:
        at = max(bisect.bisect_right(self._starts, start) - 1, 0)
        while at < len(self.areas) and self.areas[at].start < end:
            if self.areas[at].end > start:
                yield self.areas[at]
            at += 1

    def in_heap(self, address: int) -> bool:
        return self._heap[0] <= address < self._heap[1]

    def from_malloc(self, address: int, size: int) -> bool:
        """Whether this memory is from malloc of the GNU C library, judging by its header."""
        header = address - _HEADER
        if address % _HEADER or not self._readable(header):
            return False
        before, word = words(header)
        flags, whole = word & 7, word & ~7
        # The size counts the header of 16 bytes, but an allocation may use the first 8 bytes of the
        # next header. Memory of another allocator hardly ever has a number here that fits.
        if whole < size + 8:
            return False
        if self.in_heap(header):
            return not flags & (_OWN_MAPPING | _OF_A_THREAD)
        if flags & _OWN_MAPPING:
            # With the padding before it, for alignment, it is whole pages.
            first, last = header - before, header + whole
            aligned = before < 1 << 32 and first % PAGE == 0 and last % PAGE == 0
            return aligned and self._readable(first) and self._readable(last - 1)
        return bool(flags & _OF_A_THREAD) and self._in_thread_heap(header, header + whole)

    def _in_thread_heap(self, start: int, end: int) -> bool:
        """Check the header of a thread's heap: its arena, its size, and its largest size so far."""
        heap = start - start % _THREAD_HEAP
        if not self._readable(heap):
            return False
        # struct heap_info of glibc: arena, previous heap, size, and how much was ever accessible.
        arena, _ = words(heap)
        size, ever = words(heap + 16)
        sound = end <= heap + size and size <= ever <= _THREAD_HEAP and ever % PAGE == 0
        return sound and arena % _HEADER == 0 and self._readable(arena)

    def _readable(self, address: int) -> bool:
        area = next(self.overlapping(address, address + 1), None)
        return area is not None and area.rights.startswith("rw")
