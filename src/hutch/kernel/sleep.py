"""Gentle hibernation: large arrays and tables go to disk under the feet of those who hold them.

No variable is replaced. The pages of a buffer are written to a file, and then a private view of
that file is mapped at the very same addresses. The object, its aliases, its views, and whatever
else points into it are as they were; the memory goes back to the system, and the first touch of a
page reads it from the disk again. So there is nothing to get wrong about identity, types or order,
but three things must hold, and each is checked rather than hoped for:

- Nothing writes to a page between its copy and its mapping. Every other thread is blocked until
  this one wakes it, signals wait, and the garbage collector is off.
- Nothing relies on a page being other than memory. Only private memory from the allocator of the C
  library is moved: that never expects freed memory to hold zeros. Shared memory, files, and the
  allocators of other libraries are left alone.
- Nothing changes the file under a view. Space is used again only if no process maps it.
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
from typing import Any

from . import pages, reach
from .pages import PAGE, Area, Layout, Span, Spans, merged

# Written, made durable and mapped at a time. A request waits for one of these at the most.
PIECE = 16 << 20
# Mappings in one go: the system allows 65530 in all.
MOST_STEPS = 8192
_LOWEST_FD = 200
_FOREIGN = (
    "its memory is not from the C library's allocator"
    " (Arrow's is if ARROW_DEFAULT_MEMORY_POOL=system)"
)

# A namespace of a million odd frames need not be told in full.
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
    """What to do, and why the rest is left. Reasons are by the range of memory they are about."""

    steps: list[MoveStep] = field(default_factory=list)
    asleep: list[Span] = field(default_factory=list)
    reasons: list[tuple[Span, str]] = field(default_factory=list)


class Swap:
    """A part of a file that memory of this process may sleep in."""

    # The one that has something in it, for `asleep`.
    current: Swap | None = None

    def __init__(self, fd: int, offset: int, size: int) -> None:
        # Out of the way of user code that closes descriptors from below.
        self._fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LOWEST_FD)
        os.close(fd)
        self._status = os.fstat(self._fd)
        self._first = -(-offset // PAGE) * PAGE
        self._last = (offset + size) // PAGE * PAGE
        self._file: tuple[str, int] = ("", 0)
        self._detached = Spans([])

    def sleep(
        self,
        namespace: dict[str, Any],
        frame_bytes: int,
        array_bytes: int,
        pending: Callable[[], bool],
    ) -> dict[str, Any]:
        """Put the large arrays and tables of a namespace to sleep, and say which.

        Stops early once `pending` says that someone waits. What could not sleep is as it was.
        """
        if not reach.large(namespace, frame_bytes, array_bytes):
            return {"slept": [], "bytes": 0, "awake": []}
        gc.collect()
        with undisturbed():
            found = reach.large(namespace, frame_bytes, array_bytes)
            try:
                with pages.open_to_itself():
                    why = someone_else_runs()
                if why:
                    return _report(found, SleepPlan(reasons=[((0, 1 << 64), why)]), 0)
                self._check_file()
                plan = self._plan(found)
                moved = self._carry_out(plan, pending)
            except (OSError, ImportError) as error:
                return _report(found, SleepPlan(reasons=[((0, 1 << 64), _why(error))]), 0)
            self._free_unused()
            pages.trim()
            Swap.current = self
            return _report(found, plan, moved)

    def asleep(self) -> Spans:
        """The memory that is on disk now, and has for the most part not been touched since."""
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
        """Get the file back from parts of the heap that do not sleep for anyone.

        Memory that is freed within the heap is not unmapped, and would hold its space in the file
        forever. With copies of its pages it needs the file no more. The allocator may drop those
        copies later, but only where nothing is stored, so it does not matter what is read there.
        """
        stale = [(a.start, a.end) for a in layout.areas if self._mine(a) and a.plain]
        stale = [one for one in stale if layout.in_heap(one[0]) and not wanted.meet(one)]
        self._detached = Spans([one for one in stale if pages.make_own(one[0], one[1] - one[0])])

    def _carry_out(self, todo: SleepPlan, pending: Callable[[], bool]) -> int:
        """Do the steps in order, up to the first that fails. Gives the bytes now on disk."""
        moved = 0
        for number, step in enumerate(todo.steps):
            try:
                if number and pending():  # one step at least, or who asks often keeps it awake
                    raise InterruptedError(errno.EINTR, "a request came in between")
                self._move(step) if step.write else self._drop(step)
            except OSError as error:
                left = todo.steps[number:]
                todo.reasons += [((one.start, one.end), _why(error)) for one in left]
                break
            moved += step.end - step.start
            todo.asleep.append((step.start, step.end))
        return moved

    def _move(self, step: MoveStep) -> None:
        size = step.end - step.start
        view = pages.at(step.start, size)
        done = 0
        while done < size:
            done += os.pwrite(self._fd, view[done:], step.offset + done)
        # Only what the disk has can be dropped from the page cache, which counts as memory too.
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
    """What to move where, so that these spans sleep. Touches nothing."""
    made = SleepPlan()
    space = list(reversed(free))
    for start, end in spans:
        for area in layout.overlapping(start, end):
            span = (max(start, area.start), min(end, area.end))
            slept = mine(area) and area.plain
            if slept and not area.own:
                _plan_clean(made, span, area)
            elif not (slept or (area.anonymous and area.plain)):
                made.reasons.append((span, _what_it_is(area)))
            elif not (slept or known.cover(span)):
                made.reasons.append((span, _FOREIGN))
            else:
                _plan_write(made, span, area, space)
    return made


def _plan_clean(made: SleepPlan, span: Span, area: Area) -> None:
    if area.resident:
        offset = area.offset + span[0] - area.start
        made.steps.append(MoveStep(*span, offset, write=False))
    else:
        made.asleep.append(span)


def _plan_write(made: SleepPlan, span: Span, area: Area, space: list[Span]) -> None:
    whole = area.resident >= area.end - area.start
    for start, end in [span] if whole else pages.stretches(*span):
        while start < end:
            if not space or len(made.steps) >= MOST_STEPS:
                why = "the swap space is full" if not space else "it is in too many pieces"
                made.reasons.append(((start, end), why))
                break
            first, last = space.pop()
            size = min(end - start, last - first, PIECE)
            made.steps.append(MoveStep(start, start + size, first, write=True))
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


def _report(found: list[reach.Large], done: SleepPlan, moved: int) -> dict[str, Any]:
    slept, awake = [], []
    asleep = Spans(done.asleep)
    texts = dict.fromkeys(reason for _, reason in done.reasons)
    reasons = {text: Spans([span for span, why in done.reasons if why == text]) for text in texts}
    for one in found:
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
    found: list[Area] = []
    for process in os.listdir("/proc"):
        if process.isdigit() and int(process) != os.getpid():
            try:
                found += [area for area in pages.areas(process) if area.file == file]
            except OSError:
                pass  # ended, or of another user: then it is no child of ours
    return found


# Workers that have just finished look around for more for a few milliseconds before they wait.
SETTLING = 0.2
_FUTEX = {"x86_64": "202", "aarch64": "98"}
_WAIT, _WAIT_BITSET = 0, 9


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold back signal handlers and finalizers. Signals that come are handled afterwards."""
    # To block signals would not do: a native thread takes them then, and Python runs the handler
    # in this one all the same.
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers = {number: one for number, one in handlers.items() if callable(one)}
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
        for one in dict.fromkeys(came):
            _raise(one)


def _raise(number: int) -> None:
    """Raise the signal again, and print what its handler raises: no user code could catch it."""
    try:
        signal.raise_signal(number)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)


def someone_else_runs() -> str:
    """Why another thread could write to memory while it is moved; empty if none can.

    A thread that waits on a futex of its own process without a time limit is woken by another
    thread only. If all others wait like that, as idle workers of BLAS and Arrow do, then none runs
    before we wake it.
    """
    deadline = time.monotonic() + SETTLING
    while True:
        # Twice, and alike: so there was a moment in between at which all of them waited.
        before, after = _waiting(), _waiting()
        # Last, for a thread that has only just begun is not counted.
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
    """The other threads: how often each has begun to wait, or nothing if it does not."""
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
