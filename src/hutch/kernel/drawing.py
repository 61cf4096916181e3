"""Pictures of matplotlib's figures, for as long as matplotlib is loaded and no sooner."""

from __future__ import annotations

import io
import sys
from typing import Any

PADDING = 0.1  # inches
MOST_GROWTH = 4  # how much larger than the figure a picture of it may be, with legends and such


def is_figure(thing: object) -> bool:
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(thing, getattr(module, "Figure", ()))


def open_figures() -> list[Any]:
    """The figures that pyplot has open, oldest first."""
    pylab = sys.modules.get("matplotlib._pylab_helpers")
    if pylab is None or not pylab.Gcf.figs:
        return []
    return [pylab.Gcf.figs[number].canvas.figure for number in sorted(pylab.Gcf.figs)]


def close_figures() -> None:
    pylab = sys.modules.get("matplotlib._pylab_helpers")
    if pylab is not None and pylab.Gcf.figs:
        pylab.Gcf.destroy_all()


def picture_of(figure: Any) -> bytes:
    """As PNG, cropped to what is drawn. Raises what matplotlib raises."""
    to = io.BytesIO()
    figure.savefig(to, format="png", dpi="figure", bbox_inches=_crop(figure))
    return to.getvalue()


def _crop(figure: Any) -> Any:
    """The part that something is drawn on. All of it, if something far outside makes that huge."""
    try:
        figure.draw_without_rendering()
        box = figure.get_tightbbox().padded(PADDING)
    except Exception:
        return None  # savefig will say what is wrong
    own = figure.bbox_inches
    growth = box.width * box.height / (own.width * own.height)
    return box if 0 < growth <= MOST_GROWTH else None
