"""How far the work on an image is: a bar on a terminal, a line now and then without one."""

from __future__ import annotations

import math
import os
import pty
import re
import subprocess
import sys
import termios

import pytest

from hutch.images import progress
from hutch.images.oci.progress import LayerProgress, LayersDisplay
from hutch.images.progress import Display, Progress, amount, bar, describe
from hutch.images.uv import _after

MiB = 1 << 20
# What uv says when its output is no terminal.
UV = """\
Using CPython 3.11.7 interpreter at: /usr/bin/python3
Resolved 3 packages in 1.15s
Downloading pyarrow (52.5MiB)
Downloading numpy (16.1MiB)
 Downloaded numpy
 Downloaded pyarrow
Prepared 3 packages in 16.54s
Installed 3 packages in 4.89s
 + numpy==2.4.6
"""


def test_what_uv_says_is_counted_in_packages_and_bytes() -> None:
    now, sizes, told = Progress("resolving"), dict[str, int](), list[str]()
    for line in UV.splitlines():
        now = _after(now, line, sizes)
        told.append(describe(now))
    assert told == [
        "choosing versions",
        "downloading 0 of 3 packages",
        "downloading 0.0 of 52.5 MiB, 0 of 3 packages, pyarrow",
        "downloading 0.0 of 68.6 MiB, 0 of 3 packages, numpy",
        "downloading 16.1 of 68.6 MiB, 1 of 3 packages, numpy",
        "downloading 68.6 of 68.6 MiB, 2 of 3 packages, pyarrow",
        *["installing 3 packages"] * 3,
    ]


@pytest.mark.parametrize("size", ["(1e9MiB)", "(-1MiB)", "(MiB)", "1.0MiB", "(99999999MiB)", "x"])
def test_what_is_no_size_counts_nothing(size: str) -> None:
    now = _after(Progress("downloading", total=1), f"Downloading a {size}", {})
    assert (now.package, now.total_bytes) == ("a", 0)


def test_a_bar_is_as_long_as_the_work_that_is_done() -> None:
    assert bar(0, 10) == "[" + "-" * 20 + "]" and bar(10, 10) == "[" + "#" * 20 + "]"
    assert bar(5, 10).count("#") == 10 and bar(20, 10) == bar(10, 10) and bar(0, 0) == bar(0, 1)
    compiling = Progress("compiling", "scipy", 50, 100)
    assert describe(compiling, bar_width=20) == f"compiling {bar(1, 2)} 50 of 100, scipy"
    written = Progress("downloading", "x\x1b[2J", 1, 2, 3 * MiB, 4 * MiB, 9 * MiB)
    assert describe(written) == (
        "downloading 3.0 of 4.0 MiB (9.0 MiB unpacked), 1 of 2 packages, x?[2J"
    )
    assert (amount(1), amount(1, 2), amount(3 << 30)) == ("1 B", "1 of 2 B", "3.0 GiB")


@pytest.mark.parametrize(
    ("every", "is_patient", "said"),
    [
        (math.inf, False, ["compiling 1 of 3", "built"]),
        (0, False, ["compiling 1 of 3", "compiling 2 of 3", "compiling 3 of 3", "built"]),
        (0, True, ["compiling 1 of 3", "compiling 2 of 3", "compiling 3 of 3", "built"]),
        (math.inf, True, []),  # what takes but a moment
    ],
)
def test_without_a_terminal_there_is_a_line_for_news_and_one_now_and_then(
    every: float, is_patient: bool, said: list[str],
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(progress, "EVERY", every)
    with Display("mine", is_patient=is_patient) as display:
        for done in (1, 2, 2, 3):
            display(Progress("compiling", done=done, total=3))
        display(Progress("done"))
    assert capfd.readouterr().err.splitlines() == [f"hutch: mine: {line}" for line in said]


def test_without_a_terminal_a_pull_tells_of_each_layer_and_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0)
    a, b = "sha256:" + "a" * 64, "sha256:" + "b" * 64
    with LayersDisplay("x") as display:
        display(LayerProgress(a, "downloading", 1 * MiB, 4 * MiB))
        display(LayerProgress(b, "downloading", 0, 4 * MiB))
        display(LayerProgress("", "layers", 1, 2))
    assert capfd.readouterr().err.splitlines() == [
        f"hutch: x: {'a' * 12} downloading 4.0 MiB",
        "hutch: x: 1.0 of 4.0 MiB",
        f"hutch: x: {'b' * 12} downloading 4.0 MiB",
        "hutch: x: 1.0 of 8.0 MiB",
        "hutch: x: 1.0 of 8.0 MiB, 1 of 2 layers",
    ]


def test_a_pull_of_layers_that_are_here_counts_them(capfd: pytest.CaptureFixture[str]) -> None:
    with LayersDisplay("x") as display:
        display(LayerProgress("", "layers", 1, 2))
    assert capfd.readouterr().err == "hutch: x: 1 of 2 layers\n"


def test_a_pull_that_waits_for_another_one_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0)
    with LayersDisplay("x") as display:
        display(LayerProgress("sha256:" + "a" * 64, "waiting"))
    assert capfd.readouterr().err.splitlines() == [
        f"hutch: x: {'a' * 12} waiting",
        "hutch: x: waiting",
    ]


def drawn_by(program: str, columns: int = 80, term: str = "xterm") -> str:
    """What a program draws on a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    argv, env = [sys.executable, "-c", program], os.environ | {"TERM": term}
    subprocess.run(argv, env=env, stderr=theirs, check=True, timeout=60)
    os.close(theirs)
    drawn = os.read(ours, 65536).decode()
    os.close(ours)
    return drawn


def test_what_moves_is_seen_in_80_columns() -> None:
    # uv tells of a package when it is complete: until then, only what is unpacked grows.
    draw = """
from hutch.images.progress import Display, Progress
with Display("project") as display:
    display(Progress("downloading", "torch", 0, 125, 0, 212 << 20, 54 << 20))
"""
    assert "] 0.0 of 212.0 MiB (54.0 MiB unpacked)" in drawn_by(draw)


DRAW = """
from hutch.images.progress import Display, Progress
from hutch.images.oci.progress import LayerProgress, LayersDisplay as Layers
with Display("mine") as display:
    display(Progress("compiling", "scipy", 1, 2))
with Layers("x") as display:
    display(LayerProgress("sha256:" + "a" * 64, "downloading", 1 << 20, 2 << 20))
"""


def test_a_terminal_has_bars_and_nothing_is_left_of_them() -> None:
    drawn = drawn_by(DRAW)
    half = "[" + "#" * 10 + "-" * 10 + "]"
    assert "hutch: mine: compiling [#####-----] 1 of 2, scipy" in drawn
    assert f"scipy\r\x1b[K\r\x1b[Khutch: x: {half} 1.0 of 2.0 MiB" in drawn
    assert f"  {'a' * 12} downloading {half} 1.0 of 2.0 MiB" in drawn
    assert drawn.endswith("\x1b[J")


def test_what_moves_is_seen_in_20_columns_and_no_line_is_wrapped() -> None:
    drawn = drawn_by(DRAW, columns=20)
    assert "compiling [#####---" in drawn and "hutch: x: [########" in drawn
    shown = re.sub(r"\x1b\[\d*[A-Z]", "", drawn)
    assert max(len(line.strip("\r")) for line in re.split(r"[\r\n]+", shown)) < 20


def test_a_terminal_that_cannot_redraw_gets_lines_that_stay() -> None:
    assert drawn_by(DRAW, term="dumb").splitlines() == [
        "hutch: mine: compiling 1 of 2, scipy",
        f"hutch: x: {'a' * 12} downloading 2.0 MiB",
    ]
