"""How far a build is, for people: one line on stderr that changes, or a line for each stage."""

from __future__ import annotations

import os
import time

from .install import Progress

REDRAW = 0.05  # seconds


class Display:
    """Shows how far a build is, on stderr: one line that changes, or a line for each stage.

    Nothing is shown of an image that is there. Leave the `with`, and the line is gone.
    """

    def __init__(self, name: str | None) -> None:
        self._name = printable(name or "image")
        self._changing = os.isatty(2)
        self._last = self._stage = ""
        self._drawn = 0.0

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._stage:
            self._write("\r\x1b[K")

    def __call__(self, progress: Progress) -> None:
        if self._changing:
            self._draw(progress)
            return
        # Thousands of modules would be as many lines.
        counted = progress.stage == "downloading"
        told = progress if counted else Progress(progress.stage, total=progress.total)
        text = self._text(told)
        if text != self._last:
            self._write(text + "\n")
        self._last = text

    def _draw(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.stage == self._stage and now < self._drawn + REDRAW:
            return
        self._stage, self._drawn = progress.stage, now
        self._write("\r\x1b[K" + self._text(progress)[: columns() - 1])

    def _text(self, progress: Progress) -> str:
        return f"hutch: {self._name}: {describe(progress)}"

    def _write(self, text: str) -> None:
        try:
            os.write(2, text.encode(errors="backslashreplace"))
        except OSError:
            pass  # nobody looks


def columns() -> int:
    try:
        return os.get_terminal_size(2).columns or 80
    except OSError:
        return 80


def describe(progress: Progress) -> str:
    """What a build is doing, for people."""
    package = f" {printable(progress.package)}" if progress.package else ""
    counted = f" ({progress.done} of {progress.total})" if progress.done else ""
    match progress.stage:
        case "waiting":
            return "waiting for another process that builds the same"
        case "resolving":
            return "choosing versions"
        case "installing":
            return f"installing {progress.total} packages"
        case "done":
            return "built"
    return f"{progress.stage}{package}{counted}"


def printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)
