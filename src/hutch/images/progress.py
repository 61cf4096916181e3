"""Shows the progress of an image: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

REDRAW = 0.05  # seconds
EVERY = 5.0  # seconds between two lines, without a terminal
BAR = 20  # characters; half of it where the terminal is narrower than WIDE
WIDE = 100  # columns

UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True)
class Progress:
    """The progress of a build.

    `done` and `total` count packages, or modules while compiling; a `total` of 0 is unknown.
    `bytes` of `total_bytes` were downloaded, as far as uv reports them; `written` bytes are on
    disk.
    """

    stage: str  # such as waiting, resolving, downloading, installing, compiling, done
    package: str | None = None
    done: int = 0
    total: int = 0
    bytes: int = 0
    total_bytes: int = 0
    written: int = 0


Report = Callable[[Progress], None]


class ProgressLines:
    """Lines on stderr that are redrawn. Without a terminal, only the first, every few seconds."""

    def __init__(self, *, is_patient: bool = False) -> None:
        """`is_patient`: without a terminal, print nothing in the first EVERY seconds."""
        # One that is called dumb cannot go back to the start of a line that it shows.
        self.is_terminal = os.isatty(2) and os.environ.get("TERM") != "dumb"
        self._is_patient = is_patient
        self._lines = 0  # on the screen now
        self._last = ""
        self._drawn = time.monotonic() if is_patient else 0.0

    def head(self, name: str) -> str:
        """What a line starts with: not so much that what moves has no place on a terminal."""
        head = f"hutch: {name}: "
        return "" if self.is_terminal and len(head) > columns() // 2 else head

    def show(self, lines: list[str], *, is_news: bool) -> None:
        """Draw the lines. Without news, not if lines were drawn a moment ago."""
        now = time.monotonic()
        at_once = is_news and (self.is_terminal or not self._is_patient)
        if not at_once and now < self._drawn + (REDRAW if self.is_terminal else EVERY):
            return
        self._drawn = now
        if self.is_terminal:
            width = columns() - 1
            _write(self._back() + "\n".join(line[:width] for line in lines))
            self._lines = len(lines)
        else:
            self.say(lines[0])

    def say(self, line: str) -> None:
        """Print a line that stays, unless it equals the last one."""
        if line != self._last:
            _write(line + "\n")
        self._last, self._drawn = line, time.monotonic()

    def clear(self) -> None:
        if self._lines:
            _write(self._back())
            self._lines = 0

    def _back(self) -> str:
        return f"\r\x1b[{self._lines - 1}A\x1b[J" if self._lines > 1 else "\r\x1b[K"


class Display:
    """Shows the progress of a build. Leaving the `with` block clears the lines it drew.

    For an image that is already built, nothing is shown.
    """

    def __init__(self, name: str | None, *, is_patient: bool = False) -> None:
        self._name = printable(name or "image")
        self._screen = ProgressLines(is_patient=is_patient)
        self._stage = ""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exc: object) -> None:
        self._screen.clear()

    def __call__(self, progress: Progress) -> None:
        is_news, self._stage = progress.stage != self._stage, progress.stage
        bar_width = (BAR if columns() >= WIDE else BAR // 2) if self._screen.is_terminal else 0
        line = f"{self._screen.head(self._name)}{describe(progress, bar_width=bar_width)}"
        self._screen.show([line], is_news=is_news)


def describe(progress: Progress, *, bar_width: int = 0) -> str:
    """What a build is doing, as text for a user."""
    match progress.stage:
        case "waiting":
            return "waiting for another process that builds the same"
        case "resolving":
            return "choosing versions"
        case "installing":
            on_disk = f"{amount(progress.written)} on disk" if progress.written else ""
            return _listed(f"installing {progress.total} packages", on_disk)
        case "done":
            return "built"
    share = amount(progress.bytes, progress.total_bytes) if progress.total_bytes else ""
    counted = f"{progress.done} of {progress.total}" if progress.total else ""
    if progress.stage == "downloading":
        if counted:
            counted += " packages"
        if progress.written:  # the only number that moves while one large package comes
            unpacked = f"{amount(progress.written)} unpacked"
            share = f"{share} ({unpacked})" if share else unpacked
    drawn = ""
    if bar_width and (progress.total_bytes or progress.total):
        done = progress.bytes if progress.total_bytes else progress.done
        drawn = f" {bar(done, progress.total_bytes or progress.total, bar_width)}"
    package = printable(progress.package or "")
    rest = _listed(share, counted, package)
    return f"{progress.stage}{drawn}{' ' + rest if rest else ''}"


def _listed(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def bar(done: int, total: int, width: int = BAR) -> str:
    filled = min(width, width * done // total) if total else 0
    return f"[{'#' * filled}{'-' * (width - filled)}]"


def amount(count: int, total: int = 0) -> str:
    """`3.1 MiB`, or `3.1 of 20.0 MiB`."""
    for unit, name in UNITS:
        if max(count, total) >= unit:
            of = f" of {total / unit:.1f}" if total else ""
            return f"{count / unit:.1f}{of} {name}"
    return f"{count} of {total} B" if total else f"{count} B"


def columns() -> int:
    try:
        return os.get_terminal_size(2).columns or 80
    except OSError:
        return 80


def printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)


def _write(text: str) -> None:
    try:
        os.write(2, text.encode(errors="backslashreplace"))
    except OSError:
        pass  # stderr is closed
