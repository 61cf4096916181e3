"""Gentle hibernation: the memory of large arrays and tables goes to disk, in place.

No variable is replaced. The pages of a buffer are written to a file, and a private mapping of that
file takes their place at the same addresses. The object, its aliases and views, and other pointers
into it do not change. The memory goes back to the system, and the first access to a page reads it
from disk again. So identity, types and order cannot go wrong, but three conditions must hold, and
each is checked:

- Nothing writes to a page between its copy and its mapping. Every other thread is blocked until
  this one wakes it, signal handlers wait, and the garbage collector is off.
- Nothing depends on what kind of mapping a page is. Only private memory from the allocator of the C
  library is moved, which never expects freed memory to hold zeros. Shared memory, files, and the
  allocators of other libraries are left alone.
- Nothing changes the file under a mapping. Space is reused only if no process maps it.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from . import pages, reach
from .pages import PAGE, Area, Layout, Span, Spans, merged

# Bytes that are written, synced and mapped at a time. A request waits for at most one piece.
PIECE = 16 << 20
# Mappings made by one sleep: the system allows 65530 in a process.
MOST_STEPS = 8192
_LOWEST_FD = 200
_FOREIGN = (
    "its memory is not from the C library's allocator"
    " (Arrow's is if ARROW_DEFAULT_MEMORY_POOL=system)"
)

# Entries of a report.
MOST_REASONS = 200


@dataclass(frozen=True)
class MoveStep:
    """Move the pages [start, end) to `offset` of the file, or drop them if it has them already."""

    start: int
    end: int
    offset: int
    write: bool


@dataclass
class SleepPlan:
    """The steps to take, and for other ranges of memory the reasons why they stay."""

    steps: list[MoveStep] = field(default_factory=list)
    asleep: list[Span] = field(default_factory=list)
    reasons: list[tuple[Span, str]] = field(default_factory=list)


class Swap:
    """A part of a file that takes the sleeping memory of this process."""

    # The one in use, for `asleep`.
    current: Swap | None = None

    def __init__(self, fd: int, offset: int, size: int) -> None:
        # A high number, as user code may close low descriptors.
        self._fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LOWEST_FD)
        os.close(fd)
        self._status = os.fstat(self._fd)
        self._first = -(-offset // PAGE) * PAGE
        self._last = (offset + size) // PAGE * PAGE
        self._file: tuple[str, int] = ("", 0)
        self._detached = Spans([])

    def sleep(
        self,
        namespace: dict[str, object],
        frame_bytes: int,
        array_bytes: int,
        pending: Callable[[], bool],
    ) -> dict[str, object]:
        """Put the large arrays and tables of a namespace to sleep, and report which.

        Stops early once `pending` says that a request waits. What could not sleep is unchanged.
        """
        if not reach.large(namespace, frame_bytes, array_bytes):
            return {"slept": [], "bytes": 0, "awake": []}
        gc.collect()
        with uninterrupted():
            large = reach.large(namespace, frame_bytes, array_bytes)
            try:
                with pages.open_to_itself():
                    why = other_threads_run()
                if why:
                    return _report(large, SleepPlan(reasons=[((0, 1 << 64), why)]), 0)
                self._check_file()
                plan = self._plan(large)
                moved = self._carry_out(plan, pending)
            except (OSError, ImportError) as error:
                return _report(large, SleepPlan(reasons=[((0, 1 << 64), _why(error))]), 0)
            self._free_unused()
            pages.trim()
            Swap.current = self
            return _report(large, plan, moved)

    def asleep(self) -> Spans:
        """The memory that is on disk now: areas of which less than half is resident."""
        areas = [area for area in pages.areas_with_sizes() if self._mine(area)]
        return Spans([(a.start, a.end) for a in areas if a.resident < (a.end - a.start) // 2])

    def _check_file(self) -> None:
        now = os.fstat(self._fd)
        if (now.st_dev, now.st_ino) != (self._status.st_dev, self._status.st_ino):
            raise OSError(errno.EBADF, "the swap file was closed")
        if not self._file[1]:
            self._file = pages.identity(self._fd)

    def _mine(self, area: Area) -> bool:
        return area.file == self._file and area.private and self._first <= area.offset < self._last

    def _plan(self, found: list[reach.Large]) -> SleepPlan:
        layout = Layout(pages.areas_with_sizes())
        buffers = {(buffer.address, buffer.size): buffer for one in found for buffer in one.buffers}
        ours = [
            buffer for buffer in buffers.values() if layout.from_malloc(buffer.address, buffer.size)
        ]
        spans = merged([_whole_pages(buffer) for buffer in buffers.values()])
        known = Spans([_whole_pages(buffer) for buffer in ours])
        self._detach(layout, Spans(spans))
        return plan(spans, layout, known, self._free(layout.areas), self._mine)

    def _detach(self, layout: Layout, wanted: Spans) -> None:
        """Release the file space of heap parts that no wanted buffer uses any more.

        Memory that is freed within the heap stays mapped, and would hold its space in the file
        forever. With private copies of its pages it does not need the file. The allocator may drop
        those copies later, but only where nothing is stored, so what is then read does not matter.
        """
        stale = [(a.start, a.end) for a in layout.areas if self._mine(a) and a.plain]
        stale = [span for span in stale if layout.in_heap(span[0]) and not wanted.meet(span)]
        self._detached = Spans(
            [span for span in stale if pages.make_own(span[0], span[1] - span[0])]
        )

    def _carry_out(self, todo: SleepPlan, pending: Callable[[], bool]) -> int:
        """Do the steps in order, up to the first that fails. Returns how many bytes were moved."""
        moved = 0
        for number, step in enumerate(todo.steps):
            try:
                if number and pending():  # one step at least, or frequent requests prevent sleep
                    raise InterruptedError(errno.EINTR, "a request came in between")
                self._move(step) if step.write else self._drop(step)
            except OSError as error:
                left = todo.steps[number:]
                todo.reasons += [((rest.start, rest.end), _why(error)) for rest in left]
                break
            moved += step.end - step.start
            todo.asleep.append((step.start, step.end))
        return moved

    def _move(self, step: MoveStep) -> None:
        size = step.end - step.start
        view = pages.at(step.start, size)
        written = 0
        while written < size:
            written += os.pwrite(self._fd, view[written:], step.offset + written)
        # Only synced pages can be dropped from the page cache, which counts as memory too.
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, step.offset, size, os.POSIX_FADV_DONTNEED)
        if os.fstat(self._fd).st_size < step.offset + size:
            raise OSError(errno.EIO, "the swap file is shorter than what was written to it")
        pages.map_file(step.start, size, self._fd, step.offset)

    def _drop(self, step: MoveStep) -> None:
        pages.drop(step.start, step.end - step.start)
        size = step.end - step.start
        os.posix_fadvise(self._fd, step.offset, size, os.POSIX_FADV_DONTNEED)

    def _free(self, mine: list[Area]) -> list[Span]:
        """The parts of the file that neither this process nor a child of it needs."""
        spans = [
            (area.offset + start - area.start, area.offset + end - area.start)
            for area in mine
            if self._mine(area)
            for start, end in self._detached.leave((area.start, area.end))
        ]
        spans += [
            (area.offset, area.offset + area.end - area.start)
            for area in _of_others(self._file)
            if self._mine(area)
        ]
        return Spans(spans).leave((self._first, self._last))

    def _free_unused(self) -> None:
        length = os.fstat(self._fd).st_size
        for start, end in self._free(pages.areas()):
            if start < length:
                pages.punch(self._fd, start, min(end, length) - start)


def plan(
    spans: list[Span],
    layout: Layout,
    known: Spans,
    free: list[Span],
    mine: Callable[[Area], bool],
) -> SleepPlan:
    """What to move where, so that these spans sleep. Changes nothing."""
    todo = SleepPlan()
    space = list(reversed(free))
    for start, end in spans:
        for area in layout.overlapping(start, end):
            span = (max(start, area.start), min(end, area.end))
            slept = mine(area) and area.plain
            if slept and not area.own:
                _plan_clean(todo, span, area)
            elif not (slept or (area.anonymous and area.plain)):
                todo.reasons.append((span, _what_it_is(area)))
            elif not (slept or known.cover(span)):
                todo.reasons.append((span, _FOREIGN))
            else:
                _plan_write(todo, span, area, space)
    return todo


def _plan_clean(todo: SleepPlan, span: Span, area: Area) -> None:
    """Drop what was read back since, and not changed: the file still has it."""
    if area.resident:
        offset = area.offset + span[0] - area.start
        todo.steps.append(MoveStep(*span, offset, write=False))
    else:
        todo.asleep.append(span)


def _plan_write(todo: SleepPlan, span: Span, area: Area, space: list[Span]) -> None:
    whole = area.resident >= area.end - area.start
    for start, end in [span] if whole else pages.stretches(*span):
        while start < end:
            if not space or len(todo.steps) >= MOST_STEPS:
                why = "the swap space is full" if not space else "it is in too many pieces"
                todo.reasons.append(((start, end), why))
                break
            first, last = space.pop()
            size = min(end - start, last - first, PIECE)
            todo.steps.append(MoveStep(start, start + size, first, write=True))
            start += size
            if first + size < last:
                space.append((first + size, last))


def _what_it_is(area: Area) -> str:
    if area.file[1] or not area.private:
        return f"its memory is shared or of a file ({area.name or 'no name'})"
    return "its memory is read-only, locked, or of a device"


def _whole_pages(buffer: reach.Buffer) -> Span:
    start = -(-buffer.address // PAGE) * PAGE
    return start, max(start, (buffer.address + buffer.size) // PAGE * PAGE)


def _report(variables: list[reach.Large], plan: SleepPlan, moved: int) -> dict[str, object]:
    slept, awake = [], []
    asleep = Spans(plan.asleep)
    texts = dict.fromkeys(reason for _, reason in plan.reasons)
    reasons = {text: Spans([span for span, why in plan.reasons if why == text]) for text in texts}
    for one in variables:
        spans = [_whole_pages(buffer) for buffer in one.buffers]
        if any(map(asleep.meet, spans)):
            slept.append(one.name)
        why = [text for text, where in reasons.items() if any(map(where.meet, spans))]
        awake += [[one.name, text] for text in why + one.remarks]
    return {"slept": slept, "bytes": moved, "awake": awake[:MOST_REASONS]}


def _why(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "this Python has no ctypes"
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return "the disk is full, or the swap file may not grow"
    return getattr(error, "strerror", None) or str(error)


def _of_others(file: tuple[str, int]) -> list[Area]:
    """What other processes map of a file: children that were forked while memory slept."""
    mapped: list[Area] = []
    for process in os.listdir("/proc"):
        if process.isdigit() and int(process) != os.getpid():
            try:
                mapped += [area for area in pages.areas(process) if area.file == file]
            except OSError:
                pass  # ended, or of another user: then it is not a child of ours
    return mapped


# Seconds for workers to settle: those that have just finished spin for a moment before they wait.
SETTLING = 0.2
_FUTEX = {"x86_64": "202", "aarch64": "98"}
_WAIT, _WAIT_BITSET = 0, 9


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back signal handlers and garbage collection. Signals that come are handled after it."""
    # Blocking signals would not do: a native thread would take them, and Python would run the
    # handler in this thread all the same.
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    came: list[int] = []
    collecting = gc.isenabled()
    gc.disable()
    for number in handlers:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if collecting:
            gc.enable()
        for missed in dict.fromkeys(came):
            _raise(missed)


def _raise(number: int) -> None:
    """Send the signal again, and print what its handler raises: no user code could catch it."""
    try:
        signal.raise_signal(number)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)


def other_threads_run() -> str:
    """Why another thread could write to memory while it is moved; empty if none can.

    A thread that waits on a private futex without a time limit can only be woken by a thread of its
    process. If all others wait like that, as idle workers of BLAS and Arrow do, then none runs
    before we wake it.
    """
    deadline = time.monotonic() + SETTLING
    while True:
        # Two equal looks: so there was a moment in between at which all of them waited.
        before, after = _waiting(), _waiting()
        # Last, as it does not count a thread that has only just started.
        others = len(sys._current_frames()) - 1
        if others:
            return "a thread is running" if others == 1 else f"{others} threads are running"
        if before == after and all(after.values()):
            return ""
        if time.monotonic() > deadline:
            busy = [task for task in after if not after[task] or after[task] != before.get(task)]
            return f"a native thread is running ({', '.join(map(_name_of, busy))})"
        time.sleep(0.005)


def _waiting() -> dict[str, str]:
    """For each other thread, how often it has started to wait; empty if it does not wait."""
    tasks = [task for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
    return {task: _waits_for_us(task) and _times_waited(task) for task in tasks}


def _waits_for_us(task: str) -> str:
    number, *arguments = _read(task, "syscall").split() or [""]
    if number != _FUTEX.get(platform.machine()):
        return ""
    operation, limit = int(arguments[1], 16), int(arguments[3], 16)
    kind, private = operation & 0x7F, operation & 0x80
    return "yes" if kind in (_WAIT, _WAIT_BITSET) and private and not limit else ""


def _times_waited(task: str) -> str:
    return _read(task, "status").partition("voluntary_ctxt_switches:")[2].partition("\n")[0]


def _name_of(task: str) -> str:
    return _read(task, "comm").strip() or "one that has ended"


def _read(task: str, what: str) -> str:
    try:
        with open(f"/proc/self/task/{task}/{what}") as file:
            return file.read()
    except OSError:
        return ""  # it has ended, or this process may not look at itself
