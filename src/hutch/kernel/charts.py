"""matplotlib figures: which are open, as a picture, and as data (kind of chart, axes, series).

A picture is for people; the data is for models that cannot see it. It is read from the artists of a
figure, without changing them, and is a best guess: matplotlib forgets that a rectangle was a bar.
What is not recognised is "unknown", and reading never raises. Nothing here imports matplotlib.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from .tables import plain

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
    """A PNG, cropped to what is drawn. Raises what matplotlib raises."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi="figure", bbox_inches=_crop(figure))
    return file.getvalue()


def _crop(figure: Any) -> Any:
    """The part with content. None, for the whole figure, if something far outside makes it huge."""
    try:
        figure.draw_without_rendering()
        box = figure.get_tightbbox().padded(PADDING)
    except Exception:
        return None  # savefig will raise the same
    own = figure.bbox_inches
    growth = box.width * box.height / (own.width * own.height)
    return box if 0 < growth <= MOST_GROWTH else None


MOST_POINTS = 1000
MOST_TICKS = 100
MOST_SERIES = 50
MOST_CHARTS = 20

Chart = dict[str, Any]


def chart_of(figure: Any) -> Chart:
    """One chart per axes; several make a superchart."""
    try:
        axes = [one for one in figure.axes if one.get_label() != "<colorbar>"]
        charts = [_chart(one) for one in axes[:MOST_CHARTS]]
        if len(charts) == 1:
            return charts[0]
        if charts:
            title = figure._suptitle.get_text() if figure._suptitle is not None else ""
            return {"type": "superchart", "title": title, "charts": charts}
    except Exception:
        pass  # an unexpected artist: there is still the picture
    return {"type": "unknown", "title": "", "series": []}


def _chart(axes: Any) -> Chart:
    series, more = _series(axes)
    kinds = [one["type"] for one in series]
    chart = {
        "type": kinds[0] if kinds else "unknown",
        "title": axes.get_title(),
        "x_label": axes.get_xlabel(),
        "y_label": axes.get_ylabel(),
        "x_scale": axes.get_xscale(),
        "y_scale": axes.get_yscale(),
        "x_ticks": _ticks(axes.xaxis),
        "y_ticks": _ticks(axes.yaxis),
        "series": series,
    }
    if more:
        chart["truncated"] = True
    return chart


def _series(axes: Any) -> tuple[list[Chart], bool]:
    """The series, most significant first: a line over bars does not make a line chart."""
    boxes, taken = _boxes(axes)
    found = [
        *_pie(axes),
        *boxes,
        *_bars(axes),
        *_heatmaps(axes),
        *_scatters(axes),
        *_lines(axes, taken),
    ]
    return found[:MOST_SERIES], len(found) > MOST_SERIES


def _pie(axes: Any) -> Iterable[Chart]:
    wedges = [patch for patch in axes.patches if type(patch).__name__ == "Wedge"]
    if not wedges:
        return
    elements = []
    for wedge in wedges[:MOST_POINTS]:
        angle = float(abs(wedge.theta2 - wedge.theta1))
        share = {"label": wedge.get_label(), "value": angle / 360, "angle": angle}
        elements.append(share)
    yield {"type": "pie", "label": "", "elements": elements}


def _bars(axes: Any) -> Iterable[Chart]:
    for container in axes.containers:
        if type(container).__name__ != "BarContainer" or not container.patches:
            continue
        bars = container.patches
        sideways = getattr(container, "orientation", "vertical") == "horizontal"
        starts = [float(bar.get_y() if sideways else bar.get_x()) for bar in bars]
        widths = [float(bar.get_height() if sideways else bar.get_width()) for bar in bars]
        values = [float(bar.get_width() if sideways else bar.get_height()) for bar in bars]
        if _touching(starts, widths):
            edges = [*starts, starts[-1] + widths[-1]]
            one = _points("histogram", container.get_label(), starts, values)
            one["edges"] = _thinned(edges)[0]
        else:
            centres = [start + width / 2 for start, width in zip(starts, widths)]  # noqa: B905
            named = _names(axes.yaxis if sideways else axes.xaxis, centres)
            one = _points("bar", container.get_label(), named, values)
        if sideways:
            one["x"], one["y"] = one["y"], one["x"]
            one["orientation"] = "horizontal"
        yield one


def _touching(starts: Sequence[float], widths: Sequence[float]) -> bool:
    if len(starts) < 2:
        return False
    pairs = zip(starts, widths, starts[1:])  # noqa: B905
    return all(math.isclose(at + wide, after, abs_tol=wide / 1e6) for at, wide, after in pairs)


def _names(axis: Any, places: list[float]) -> list[Any]:
    """The labels of the axis at these places, if it has one for each."""
    words = {
        round(float(place), 6): label.get_text()
        for place, label in zip(axis.get_ticklocs(), axis.get_ticklabels())  # noqa: B905
    }
    names = [words.get(round(place, 6), "") for place in places]
    return names if all(names) and not all(map(_is_number, names)) else places


def _is_number(text: str) -> bool:
    try:
        float(text.replace("\N{MINUS SIGN}", "-"))
    except ValueError:
        return False
    return True


def _boxes(axes: Any) -> tuple[list[Chart], set[int]]:
    """Box plots, vertical or horizontal, and the ids of the artists they consist of.

    In matplotlib, a box plot is a rectangle (a line of five points, or a patch), two whiskers, two
    caps and a median, all without labels, and perhaps outliers.
    """
    for lying in (False, True):
        elements, places, taken = [], [], set()
        lines = [(line, _corners(line, lying)) for line in axes.lines if not _label(line)]
        for left, right, low, high, frame in _rectangles(axes, lying):
            inside = [(line, ends) for line, ends in lines if _belongs(ends, left, right)]
            box = _box(low, high, [ends for _, ends in inside])
            if box["median"] is not None:
                places.append((left + right) / 2)
                elements.append(box)
                taken.update([id(frame), *(id(line) for line, _ in inside)])
        if elements:
            axis = axes.yaxis if lying else axes.xaxis
            for element, name in zip(elements, _names(axis, places)):  # noqa: B905
                element["label"] = plain(name)
            return [{"type": "box", "label": "", "elements": elements[:MOST_POINTS]}], taken
    return [], set()


def _corners(artist: Any, lying: bool) -> list[tuple[float, float]]:
    """The points of a line or a patch, as if it were vertical."""
    points = artist.get_xydata() if hasattr(artist, "get_xydata") else artist.get_path().vertices
    return [(float(y), float(x)) if lying else (float(x), float(y)) for x, y in points[:7]]


def _rectangles(axes: Any, lying: bool) -> Iterable[tuple[float, float, float, float, Any]]:
    patches = [patch for patch in axes.patches if type(patch).__name__ == "PathPatch"]
    for artist in [*axes.lines, *patches]:
        corners = _corners(artist, lying)
        xs, ys = {x for x, _ in corners[:5]}, {y for _, y in corners[:5]}
        if 5 <= len(corners) <= 6 and len(xs) == 2 and len(ys) <= 2:
            yield min(xs), max(xs), min(ys), max(ys), artist


def _belongs(ends: list[tuple[float, float]], left: float, right: float) -> bool:
    """Whether a line is a whisker (vertical, in the middle), or a cap or median (level, inside)."""
    if len(ends) != 2:
        return False
    (x0, y0), (x1, y1) = ends
    upright = all(math.isclose(x, (left + right) / 2) for x in (x0, x1))
    level = y0 == y1 and left - 1e-9 <= min(x0, x1) and max(x0, x1) <= right + 1e-9
    return upright or level


def _box(low: float, high: float, inside: list[Any]) -> Chart:
    level = [(abs(x1 - x0), y0) for (x0, y0), (x1, y1) in inside if y0 == y1 and x0 != x1]
    heights = [low, high, *(y for ends in inside for _, y in ends)]
    # A median is as wide as its box, a cap is not.
    _, median = max(((wide, y) for wide, y in level if low <= y <= high), default=(0, None))
    return {
        "min": plain(min(heights)),
        "q1": plain(low),
        "median": plain(median),
        "q3": plain(high),
        "max": plain(max(heights)),
    }


def _heatmaps(axes: Any) -> Iterable[Chart]:
    meshes = [one for one in axes.collections if type(one).__name__ == "QuadMesh"]
    for image in [*axes.images, *meshes]:
        values = image.get_array()
        if values is None or len(values.shape) != 2:
            continue
        rows, columns = values.shape
        side = math.isqrt(MOST_POINTS)
        shown = values[:side, :side].tolist()
        yield {
            "type": "heatmap",
            "label": _label(image),
            "values": [[plain(value) for value in row] for row in shown],
            "shape": [rows, columns],
            "truncated": rows > side or columns > side,
        }


def _scatters(axes: Any) -> Iterable[Chart]:
    for one in axes.collections:
        if type(one).__name__ == "PathCollection" and len(offsets := one.get_offsets()):
            xs, ys = sys.modules["numpy"].ma.getdata(offsets).T.tolist()
            yield _points("scatter", _label(one), _dated(axes.xaxis, xs), _dated(axes.yaxis, ys))


def _lines(axes: Any, taken: set[int]) -> Iterable[Chart]:
    boxed = bool(taken)
    for line in axes.lines:
        xs, ys = line.get_xdata(orig=False), line.get_ydata(orig=False)
        nameless = str(line.get_label()).startswith("_")
        dots = line.get_linestyle() in ("None", "", " ")
        if id(line) in taken or not len(xs) or (boxed and nameless and dots):
            continue  # part of a box, empty, or outliers of a box
        kind = "scatter" if dots and line.get_marker() not in ("None", "", None) else "line"
        x = _named(axes.xaxis, line.get_xdata(orig=True), xs)
        y = _named(axes.yaxis, line.get_ydata(orig=True), ys)
        yield _points(kind, _label(line), x, y)


def _named(axis: object, given: Any, numbers: Any) -> Sequence[Any]:
    """The values as they were given, if those were not numbers: words, dates, periods."""
    if len(given) == len(numbers) and isinstance(plain(given[0]), str):
        return list(given)
    return _dated(axis, numbers.tolist())


def _dated(axis: Any, numbers: list[Any]) -> list[object]:
    """Convert numbers on an axis of dates (days since 1970) or of pandas periods to text."""
    if (frequency := getattr(axis, "freq", None)) and (pandas := sys.modules.get("pandas")):
        return [str(pandas.Period(ordinal=round(number), freq=frequency)) for number in numbers]
    converter = axis.get_converter() if hasattr(axis, "get_converter") else axis.converter
    if converter is None or "Date" not in type(converter).__name__:
        return numbers
    numpy = sys.modules["numpy"]
    shown = _thinned(numbers)[0] if len(numbers) > MOST_POINTS else numbers
    stamps = (numpy.array(shown, dtype=float) * 86_400_000).round().astype("datetime64[ms]")
    return [str(stamp) for stamp in stamps]


def _points(kind: str, label: object, xs: Sequence[object], ys: Sequence[object]) -> Chart:
    x, fewer_x = _thinned(xs)
    y, fewer_y = _thinned(ys)
    one: Chart = {"type": kind, "label": str(label), "x": x, "y": y}
    if one["label"].startswith("_"):
        one["label"] = ""
    if fewer_x or fewer_y:
        one["truncated"], one["points"] = True, len(ys)
    return one


def _thinned(values: Sequence[object]) -> tuple[list[object], bool]:
    """At most MOST_POINTS values, evenly spaced, which keeps the shape of a line."""
    count = len(values)
    if count <= MOST_POINTS:
        return [plain(value) for value in values], False
    step = (count - 1) / (MOST_POINTS - 1)
    return [plain(values[round(at * step)]) for at in range(MOST_POINTS)], True


def _ticks(axis: Any) -> list[object]:
    """The labels of the visible ticks; numbers where there are none."""
    low, high = sorted(axis.get_view_interval())
    slack = (high - low) / 1e6
    pairs = zip(axis.get_ticklocs(), axis.get_ticklabels())  # noqa: B905
    seen = [(at, label) for at, label in pairs if low - slack <= at <= high + slack]
    return [label.get_text() or plain(float(at)) for at, label in seen[:MOST_TICKS]]


def _label(artist: Any) -> str:
    label = str(artist.get_label())
    return "" if label.startswith("_") else label
