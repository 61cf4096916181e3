"""How far an image is, for people: a line for each layer that is at work, or lines that stay."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hutch.images.progress import REDRAW, columns, printable

UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True)
class Step:
    """How far a layer is, in bytes; or, if it is of no layer, the whole: in layers, or in bytes."""

    layer: str  # its digest
    stage: str  # waiting, downloading, checking, unpacking, done; of the whole: reading, layers
    done: int = 0
    total: int = 0


Report = Callable[[Step], None]


class Display:
    """Shows it on stderr. Leave the `with`, and of lines that change nothing is left."""

    def __init__(self, name: str) -> None:
        self._name = printable(name)
        self._changing = os.isatty(2)
        self._mutex = threading.Lock()  # layers are at work at the same time
        self._at_work: dict[str, Step] = {}
        self._whole = Step("", "reading")
        self._lines = 0  # that are drawn
        self._drawn = 0.0

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exc: object) -> None:
        with self._mutex:
            if self._lines:
                self._write(self._back())

    def __call__(self, step: Step) -> None:
        with self._mutex:
            before = self._at_work.get(step.layer) if step.layer else self._whole
            if not step.layer:
                self._whole = step
            elif step.stage == "done":
                self._at_work.pop(step.layer, None)
            else:
                self._at_work[step.layer] = step
            is_news = before is None or before.stage != step.stage
            if self._changing:
                self._draw(at_once=is_news)
            elif is_news and step.layer:
                self._write(f"hutch: {self._name}: {_short(step)}{step.stage}{_size(step)}\n")

    def _draw(self, *, at_once: bool) -> None:
        now = time.monotonic()
        if not at_once and now < self._drawn + REDRAW:
            return
        self._drawn = now
        whole = self._whole
        lines = [f"hutch: {self._name}: {whole.stage}{_count(whole)}"]
        lines += [f"  {_short(step)}{step.stage}{_part(step)}" for step in self._at_work.values()]
        width = columns() - 1
        self._write(self._back() + "\n".join(line[:width] for line in lines))
        self._lines = len(lines)

    def _back(self) -> str:
        up = f"\x1b[{self._lines - 1}A" if self._lines > 1 else ""
        return f"\r{up}\x1b[J"

    def _write(self, text: str) -> None:
        try:
            os.write(2, text.encode(errors="backslashreplace"))
        except OSError:
            pass  # nobody looks


def _count(whole: Step) -> str:
    if whole.total:
        return f" {whole.done} of {whole.total}"
    return f" {_say(whole.done)}" if whole.done else ""


def _short(step: Step) -> str:
    return step.layer.removeprefix("sha256:")[:12] + " " if step.layer else ""


def _size(step: Step) -> str:
    return f" {_say(step.total)}" if step.total and step.stage == "downloading" else ""


def _part(step: Step) -> str:
    return f" {_say(step.done)} of {_say(step.total)}" if step.total and step.done else ""


def _say(count: int) -> str:
    for unit, name in UNITS:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"
