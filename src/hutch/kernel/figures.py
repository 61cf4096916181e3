"""matplotlib's backend in a kernel: draws into memory, and `show` shows in the result.

matplotlib loads it by name, so it is the one module here that is imported when matplotlib says so.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from . import charts, display

_bases = import_module("matplotlib.backend_bases")
_agg = import_module("matplotlib.backends.backend_agg")


class FigureManager(_bases.FigureManagerBase):  # type: ignore[misc, name-defined]
    def show(self) -> None:
        """Of one figure: `figure.show()`."""
        display.show_figure(self.canvas.figure)


class FigureCanvas(_agg.FigureCanvasAgg):  # type: ignore[misc, name-defined]
    manager_class = FigureManager


def show(*args: Any, **options: Any) -> None:
    """Of all that is open: `pyplot.show()`. What has been shown is closed, as a window would be."""
    for figure in charts.open_figures():
        display.show_figure(figure)
    charts.close_figures()
