"""The matplotlib backend of kernels: draws into memory, and `show` displays a result.

matplotlib imports it by name (see hooks.py). No other module here does.
"""

from __future__ import annotations

from importlib import import_module

from . import charts, display

_bases = import_module("matplotlib.backend_bases")
_agg = import_module("matplotlib.backends.backend_agg")


class FigureManager(_bases.FigureManagerBase):  # type: ignore[misc, name-defined]
    def show(self) -> None:
        """`figure.show()`: show this figure."""
        display.show_figure(self.canvas.figure)


class FigureCanvas(_agg.FigureCanvasAgg):  # type: ignore[misc, name-defined]
    manager_class = FigureManager


def show(*args: object, **options: object) -> None:
    """`pyplot.show()`: show all open figures and close them, like windows."""
    for figure in charts.open_figures():
        display.show_figure(figure)
    charts.close_figures()
