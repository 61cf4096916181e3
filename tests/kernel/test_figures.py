"""Figures: shown without being asked, once, as a picture and as data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kernels_of_tests import Kernel, Ran


@pytest.fixture
def kernel(data_kernel: Kernel) -> Iterator[Kernel]:
    data_kernel.run("%reset -f\nimport pandas as pd, numpy as np, matplotlib.pyplot as plt")
    yield data_kernel


def figures(ran: Ran) -> list[dict[str, Any]]:
    return [result for result in ran.results if "image/png" in result["mime"]]


def chart(kernel: Kernel, code: str) -> dict[str, Any]:
    ran = kernel.run(code)
    assert ran.error is None, ran.error["traceback"]
    assert not ran.err, ran.err
    (figure,) = figures(ran)
    found: dict[str, Any] = figure["chart"]
    return found


def series(kernel: Kernel, code: str) -> dict[str, Any]:
    (one,) = chart(kernel, code)["series"]
    found: dict[str, Any] = one
    return found


# when


def test_a_figure_is_shown_without_being_asked(kernel: Kernel) -> None:
    ran = kernel.run("plt.plot([1, 2]);")
    assert ran.picture().startswith(b"\x89PNG")
    assert figures(ran)[0]["mime"]["text/plain"] == "<Figure size 640x480 with 1 Axes>"
    assert not kernel.run("1").results[0]["chart"]


@pytest.mark.parametrize(
    "code",
    [
        "fig, ax = plt.subplots(); ax.plot([1]); fig",
        "plt.plot([1]); plt.show()",
        "plt.plot([1]); plt.show(block=False); plt.show()",
        "fig, ax = plt.subplots(); fig.show()",
        "fig, ax = plt.subplots(); ax.plot([1]); display(fig)",
        "plt.plot([1]); 1/0",
        "%matplotlib inline\nplt.plot([1]);",
        "import matplotlib; matplotlib.use('Agg'); plt.plot([1]); plt.show()",
        "pd.Series([1, 2]).plot();",
        "from matplotlib.figure import Figure; Figure()",
    ],
)
def test_a_figure_is_shown_once(kernel: Kernel, code: str) -> None:
    ran = kernel.run(code)
    assert len(figures(ran)) == 1
    assert "non-interactive" not in ran.err
    assert not figures(kernel.run("None"))


def test_show_shows_at_that_moment(kernel: Kernel) -> None:
    ran = kernel.run("plt.plot([1]); plt.show(); display('after'); plt.plot([2]);")
    assert ["image/png" in result["mime"] for result in ran.results] == [True, False, True]


def test_a_figure_that_was_drawn_on_since_is_shown_again(kernel: Kernel) -> None:
    ran = kernel.run("fig, ax = plt.subplots(); display(fig); ax.set_title('new');")
    assert [one["chart"]["title"] for one in figures(ran)] == ["", "new"]


def test_a_figure_can_be_shown_in_a_later_cell(kernel: Kernel) -> None:
    kernel.run("fig, ax = plt.subplots(); ax.plot([1]);")
    ran = kernel.run("ax.set_title('later'); fig")
    assert figures(ran)[0]["main"] and figures(ran)[0]["chart"]["title"] == "later"


def test_a_figure_that_cannot_be_drawn_is_told(kernel: Kernel) -> None:
    ran = kernel.run("plt.title('$\\\\frac{$');")
    assert ran.error is None and "savefig failed" in ran.err
    assert len(ran.results) == 1


def test_something_far_outside_does_not_make_the_picture_huge(kernel: Kernel) -> None:
    ran = kernel.run("plt.plot([0, 1]); plt.text(0, 100, 'far');")
    assert len(ran.picture()) < 100_000


def test_programs_that_draw_are_not_told_to_draw_here(kernel: Kernel) -> None:
    ran = kernel.run(
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c',"
        " 'import matplotlib.pyplot as p; p.plot([1]); p.savefig(\"a.png\")']).returncode"
    )
    assert ran.text == "0"


# what


def test_a_line_chart(kernel: Kernel) -> None:
    assert chart(
        kernel,
        "plt.plot([1, 2, 4], [1, 10, 100], label='growth'); plt.title('T'); plt.xlabel('X');"
        "plt.ylabel('Y'); plt.yscale('log'); plt.xticks([1, 2, 4]); plt.yticks([1, 10, 100],"
        " ['one', 'ten', 'hundred']); plt.minorticks_off();",
    ) == {
        "type": "line",
        "title": "T",
        "x_label": "X",
        "y_label": "Y",
        "x_scale": "linear",
        "y_scale": "log",
        "x_ticks": ["1", "2", "4"],
        "y_ticks": ["one", "ten", "hundred"],
        "series": [{"type": "line", "label": "growth", "x": [1, 2, 4], "y": [1, 10, 100]}],
    }


def test_a_scatter_chart(kernel: Kernel) -> None:
    for code in ("plt.scatter([1, 2], [3, np.nan]);", "plt.plot([1, 2], [3, np.nan], 'o');"):
        one = series(kernel, code)
        assert (one["type"], one["x"], one["y"]) == ("scatter", [1, 2], [3, None])


def test_a_bar_chart(kernel: Kernel) -> None:
    one = series(kernel, "plt.bar(['a', 'b'], [3, 4], label='n');")
    assert one == {"type": "bar", "label": "n", "x": ["a", "b"], "y": [3, 4]}
    one = series(kernel, "plt.bar([10, 20], [3, 4]);")
    assert one["x"] == [10, 20]
    one = series(kernel, "plt.barh(['a', 'b'], [3, 4]);")
    assert (one["x"], one["y"], one["orientation"]) == ([3, 4], ["a", "b"], "horizontal")


def test_a_histogram(kernel: Kernel) -> None:
    one = series(kernel, "plt.hist([1, 1, 2, 4], bins=3);")
    assert (one["type"], one["y"], one["edges"]) == ("histogram", [2, 1, 1], [1, 2, 3, 4])


def test_a_pie(kernel: Kernel) -> None:
    one = series(kernel, "plt.pie([1, 3], labels=['a', 'b'], autopct='%d');")
    assert one["type"] == "pie"
    assert [(e["label"], e["value"], e["angle"]) for e in one["elements"]] == [
        ("a", 0.25, 90), ("b", 0.75, 270),
    ]  # fmt: skip


@pytest.mark.parametrize("options", ["", ", orientation='horizontal'", ", patch_artist=True"])
def test_a_box_plot(kernel: Kernel, options: str) -> None:
    code = f"plt.boxplot([[1, 2, 3, 4, 10], [2, 3, 4, 5, 6]], tick_labels=['p', 'q']{options});"
    one = series(kernel, code)
    assert one["type"] == "box"
    assert one["elements"] == [
        {"label": "p", "min": 1, "q1": 2, "median": 3, "q3": 4, "max": 4},
        {"label": "q", "min": 2, "q1": 3, "median": 4, "q3": 5, "max": 6},
    ]


def test_a_heatmap(kernel: Kernel) -> None:
    for draw in ("imshow", "pcolormesh"):
        one = series(kernel, f"plt.{draw}([[1, 2], [3, 4]]); plt.colorbar();")
        assert (one["type"], one["values"]) == ("heatmap", [[1, 2], [3, 4]])


def test_dates_are_dates(kernel: Kernel) -> None:
    kernel.run("days = pd.date_range('2024-01-01', periods=3)")
    for code in ("plt.plot(days, [1, 2, 3]);", "plt.scatter(days, [1, 2, 3]);"):
        assert series(kernel, code)["x"][0].startswith("2024-01-01T00:00:00")
    one = series(kernel, "pd.Series([1, 2, 3], index=days).plot();")
    assert one["x"] == ["2024-01-01", "2024-01-02", "2024-01-03"]


def test_several_axes_are_a_superchart(kernel: Kernel) -> None:
    found = chart(
        kernel,
        "fig, (a, b) = plt.subplots(1, 2); a.plot([1]); b.bar(['x'], [1]); fig.suptitle('both');",
    )
    assert (found["type"], found["title"]) == ("superchart", "both")
    assert [one["type"] for one in found["charts"]] == ["line", "bar"]


def test_many_points_are_thinned_evenly(kernel: Kernel) -> None:
    one = series(kernel, "plt.plot(np.arange(100_000));")
    assert (one["truncated"], one["points"], len(one["x"])) == (True, 100_000, 1000)
    assert (one["y"][0], one["y"][-1]) == (0, 99_999)
    one = series(kernel, "plt.imshow(np.zeros((500, 500)));")
    assert (one["truncated"], one["shape"]) == (True, [500, 500])


@pytest.mark.parametrize(
    "code",
    [
        "plt.figure();",
        "plt.axes(projection='3d').plot([1], [2], [3]);",
        "plt.polar([1, 2], [3, 4]);",
        "plt.contourf([[1, 2], [3, 4]]);",
        "plt.stackplot([1, 2], [3, 4]);",
        "plt.plot([], []);",
        "plt.bar([], []);",
        "plt.errorbar([1, 2], [3, 4], yerr=1);",
        "plt.violinplot([1, 2, 3]);",
        "plt.quiver([1], [2], [3], [4]);",
        "plt.text(0, 0, 'x');",
        "plt.hist([1, 2], histtype='step');",
        "plt.axhline(3); plt.axvspan(1, 2);",
        "ax = plt.axes(); ax.lines; ax.add_artist(plt.Circle((0, 0)));",
        "fig = plt.figure(); fig.subfigures(1, 2)[0].subplots();",
    ],
)
def test_whatever_is_drawn_has_a_chart(kernel: Kernel, code: str) -> None:
    assert chart(kernel, code)["type"]


# the others


def test_plotly_shows_results_and_no_browser(kernel: Kernel) -> None:
    kernel.run("import plotly.express as px; fig = px.line(x=[1, 2], y=[3, 4])")
    for code, main in (("fig", True), ("fig.show()", False), ("display(fig)", False)):
        ran = kernel.run(code)
        assert ran.error is None, ran.error["traceback"]
        (result,) = ran.results
        assert result["main"] is main
        assert {"text/html", "application/vnd.plotly.v1+json"} <= set(result["mime"])
        assert result["mime"]["text/plain"] == "<plotly Figure: scatter>"


def test_altair_shows_itself(kernel: Kernel) -> None:
    kernel.run("import altair as alt")
    ran = kernel.run("alt.Chart(pd.DataFrame({'a': [1]})).mark_bar().encode(x='a')")
    assert ran.error is None and "vega" in ran.results[0]["mime"]["text/html"]
    assert kernel.run("alt.Chart(pd.DataFrame({'a': [1]})).mark_bar().show()").results
