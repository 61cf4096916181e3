"""Ranges of memory, and what the map of this process says about them."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from . import pages
from .pages import PAGE, Area

Span = tuple[int, int]

# The allocator's header before each allocation is two words. The second is its size, and in the
# lowest bits whether it is a mapping of its own, and whether it is of a thread's heap.
_HEADER = 16
_OWN_MAPPING, _OF_A_THREAD = 2, 4
# Heaps of threads begin at multiples of this, and are not larger.
_THREAD_HEAP = 64 << 20


def merged(spans: list[Span]) -> list[Span]:
    """Sorted, each address once. Neighbours stay apart: they may be of different owners."""
    out: list[Span] = []
    for start, end in sorted(set(spans)):
        if out and start < out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        elif start < end:
            out.append((start, end))
    return out


class Spans:
    """A set of ranges that can be asked quickly."""

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
        # What sleeps in the middle of the heap has another name.
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
        """Was this memory handed out by the GNU C library? Its own notes about it say so."""
        header = address - _HEADER
        if address % _HEADER or not self._readable(header):
            return False
        before, word = pages.words(header)
        flags, whole = word & 7, word & ~7
        if whole < size + 8:
            return False
        if self.in_heap(header):
            return not flags & (_OWN_MAPPING | _OF_A_THREAD)
        if flags & _OWN_MAPPING:
            # With what lies before it for alignment, it is whole pages.
            first, last = header - before, header + whole
            aligned = before < 1 << 32 and first % PAGE == 0 and last % PAGE == 0
            return aligned and self._readable(first) and self._readable(last - 1)
        return bool(flags & _OF_A_THREAD) and self._in_thread_heap(header, header + whole)

    def _in_thread_heap(self, start: int, end: int) -> bool:
        """A thread's heap begins with where its arena is, and how large it is and ever was."""
        heap = start - start % _THREAD_HEAP
        if not self._readable(heap):
            return False
        arena, _ = pages.words(heap)
        size, ever = pages.words(heap + 16)
        sound = end <= heap + size and size <= ever <= _THREAD_HEAP and ever % PAGE == 0
        return sound and arena % _HEADER == 0 and self._readable(arena)

    def _readable(self, address: int) -> bool:
        area = next(self.overlapping(address, address + 1), None)
        return area is not None and area.rights.startswith("rw")
