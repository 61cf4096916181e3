"""Shows the progress of a pull or an import, or tells it to the caller of a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hutch.images.progress import ProgressLines, amount, bar, printable
from hutch.serving import BuildProgress

TELL = 0.25  # seconds between two reports of a server on the same stages
_MOST = 2**53 - 1  # the sizes in a manifest are any numbers, and JSON carries numbers up to this


@dataclass(frozen=True)
class LayerProgress:
    """The progress of a layer in bytes; or, without a layer, of the image in layers or bytes."""

    layer: str  # its digest
    stage: str  # waiting, downloading, checking, unpacking, done; of the image: reading, layers
    done: int = 0
    total: int = 0


Report = Callable[[LayerProgress], None]


class LayersDisplay:
    """Shows progress on stderr. Leaving the `with` block clears the lines it drew."""

    def __init__(self, name: str) -> None:
        self._name = printable(name)
        self._screen = ProgressLines()
        self._mutex = threading.Lock()  # layers report from several threads
        self._at_work: dict[str, LayerProgress] = {}
        self._bytes: dict[str, tuple[int, int]] = {}  # of layers that were downloaded or read
        self._whole = LayerProgress("", "reading")

    def __enter__(self) -> LayersDisplay:
        return self

    def __exit__(self, *exc: object) -> None:
        with self._mutex:
            self._screen.clear()

    def __call__(self, step: LayerProgress) -> None:
        with self._mutex:
            before = self._at_work.get(step.layer) if step.layer else self._whole
            if not step.layer:
                self._whole = step
            elif step.stage == "done":
                self._at_work.pop(step.layer, None)
            else:
                self._at_work[step.layer] = step
            if step.layer and step.total:
                self._bytes[step.layer] = step.done, step.total
            is_news = before is None or before.stage != step.stage
            if is_news and step.layer and not self._screen.is_terminal:
                size = f" {amount(step.total)}" if step.stage == "downloading" else ""
                self._screen.say(f"hutch: {self._name}: {_short(step)} {step.stage}{size}")
            self._screen.show(self._lines(), is_news=is_news and self._screen.is_terminal)

    def _lines(self) -> list[str]:
        return [
            f"{self._screen.head(self._name)}{self._total()}",
            *(f"  {_short(step)} {_described(step)}" for step in self._at_work.values()),
        ]

    def _total(self) -> str:
        whole = self._whole
        layers = f"{whole.done} of {whole.total} layers" if whole.stage == "layers" else ""
        if not self._bytes:
            # Until it has bytes, it does what its first layer does, as waiting for another pull.
            stage = next((step.stage for step in self._at_work.values()), whole.stage)
            return layers or (f"{stage} {amount(whole.done)}" if whole.done else stage)
        done, total = (sum(column) for column in zip(*self._bytes.values(), strict=True))
        drawn = f"{bar(done, total)} " if self._screen.is_terminal else ""
        return f"{drawn}{amount(done, total)}{layers and ', '}{layers}"


def _short(step: LayerProgress) -> str:
    return step.layer.removeprefix("sha256:")[:12]


def _described(step: LayerProgress) -> str:
    if step.total:
        return f"{step.stage} {bar(step.done, step.total)} {amount(step.done, step.total)}"
    return f"{step.stage} {amount(step.done)}" if step.done else step.stage


class PullProgress:
    """Makes a BuildProgress of the progress of layers, unless it says nothing new."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()  # layers report from several threads
        self._stages: dict[str, str] = {}
        self._bytes: dict[str, int] = {}  # of layers that were downloaded
        self._total = 0
        self._told = 0.0

    def expect(self, sizes: dict[str, int]) -> None:
        """`sizes`: of the layers that are to be downloaded."""
        with self._mutex:
            self._total = sum(sizes.values())

    def __call__(self, step: LayerProgress) -> BuildProgress | None:
        with self._mutex:
            if step.layer and step.total:
                self._bytes[step.layer] = step.done
            is_news = self._stages.get(step.layer) != step.stage or not step.layer
            self._stages[step.layer] = step.stage
            # What follows "done" is the number of layers, which says the same.
            if step.stage == "done" or not (is_news or time.monotonic() >= self._told + TELL):
                return None
            self._told = time.monotonic()
            text = f"{step.stage} {_short(step)}"
            if not step.layer:
                text = f"{step.done} of {step.total} layers"
            done, total = min(sum(self._bytes.values()), _MOST), min(self._total, _MOST)
            return BuildProgress(text, False, done, total) if total else BuildProgress(text)
