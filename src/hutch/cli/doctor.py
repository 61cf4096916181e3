"""`hutch doctor`: test the isolation of this machine, and say how to improve it."""

from __future__ import annotations

import json
import os
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

from hutch import __version__, factory
from hutch.errors import HutchError
from hutch.images.store import data_dir
from hutch.server.trees import sees_what_moves
from hutch.server.volumes import obstacle
from hutch.settings.reading import load
from hutch.types import GRADES, Layer, Report, Status, plain

from .options import Parser, make_parser
from .program import FAILED, Launcher, run_to_end
from .screen import RED, coloured, complain, visible
from .selftest import NAME as BOUNDARIES
from .selftest import try_boundaries

WIDTH = 80
NAME, STATUS = 19, 10
MEASURED = "measured, not enforced by the kernel"
COLOURS = {Status.ACTIVE: "32", Status.DEGRADED: "33", Status.MISSING: "31"}


def build_parser() -> Parser:
    parser = make_parser(
        "hutch doctor",
        "hutch doctor [--backend NAME] [--json]",
        "Try each layer of isolation on this machine, and show which hold, why others\n"
        "do not, and the command that would fix them. Nothing is changed, but that\n"
        "containers whose owner is dead are removed (--backend docker).",
        "exit codes: 0 if boxes can be made here (grade ns or better), 1 if not; 125 for\n"
        "a wrong option.",
    )
    parser.add_argument(
        "--backend",
        default="",
        metavar="NAME",
        help=f"what makes the boxes: {', '.join(factory.NAMES)} (default: "
        "HUTCH_BACKEND, or namespaces)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    try:
        args = build_parser().parse_args(words)
    except HutchError as exc:
        complain(str(exc), error=True)
        return FAILED
    code = run_to_end(_examine(args.backend or factory.default(), as_json=args.json))
    return 1 if code == FAILED else code


async def _examine(name: str, *, as_json: bool) -> int:
    backend = factory.backend(name)
    try:
        report = await backend.report()
    finally:
        await backend.close()
    if name == "namespaces":
        report = await _with_boundaries(report)
    report = replace(report, layers=(*report.layers, _quotas()))
    if as_json:
        print(json.dumps({"version": __version__, **plain(report)}, indent=2))
    else:
        print(render(report, colour=_wants_colour()))
    return 0 if GRADES.index(report.grade) >= GRADES.index("ns") else 1


async def _with_boundaries(report: Report) -> Report:
    if report.grade == "none":
        why = "could not be tried: no box can be made"
        return replace(report, layers=(*report.layers, Layer(BOUNDARIES, Status.MISSING, why)))
    boundaries = await try_boundaries()
    grade = "none" if boundaries.status is Status.MISSING else report.grade
    return replace(report, grade=grade, layers=(*report.layers, boundaries))


def _quotas() -> Layer:
    """How a server on this machine would enforce quotas of workspaces."""
    folder = data_dir()
    try:
        is_kernel = load(folder, {}).settings.workspace_quota_mode == "kernel"
    except HutchError:
        is_kernel = False  # `hutch serve` reports what is wrong with the settings
    while not folder.exists():
        folder = folder.parent
    name = "workspace quotas"
    try:
        with tempfile.TemporaryDirectory() as place:
            why_not = obstacle(Path(place))
    except OSError as exc:
        why_not = exc.strerror or str(exc)
    if is_kernel and why_not:
        fix = 'or set workspace.quota_mode = "measured"'
        return Layer(name, Status.MISSING, f"no kernel quotas: {why_not}", fix, required=False)
    if is_kernel:
        return Layer(
            name, Status.ACTIVE, "enforced by the kernel, in new workspaces", required=False
        )
    can = "cannot be enforced" if why_not else 'could be: workspace.quota_mode = "kernel"'
    if sees_what_moves(folder):
        why = f"{MEASURED} ({can}); removed files that are open and moved ones count"
        return Layer(name, Status.ACTIVE, why, required=False)
    why = f"{MEASURED} ({can}); files that are moved about may be missed"
    fix = "run the server as root" if os.geteuid() else ""
    return Layer(name, Status.DEGRADED, why, fix, required=False)


def _wants_colour() -> bool:
    return coloured("x", RED) != "x"


def render(report: Report, *, colour: bool) -> str:
    """A table of 80 columns, a line that sums it up, and fixes without which no box can be made.

    A fix that several layers share is printed once.
    """
    missing = [lay for lay in report.layers if lay.required and lay.status is Status.MISSING]
    said = {layer.fix for layer in missing}
    rows = []
    for layer in report.layers:
        rows += _row(layer, colour=colour)
        if layer.fix not in said:
            rows += _fix(layer.fix)
            said.add(layer.fix)
    fixes = [row for fix in dict.fromkeys(layer.fix for layer in missing) for row in _fix(fix)]
    return "\n".join([*rows, "", _summary(report), *fixes])


def _row(layer: Layer, *, colour: bool) -> list[str]:
    status = layer.status.value.ljust(STATUS)
    if colour:
        status = f"\x1b[{COLOURS[layer.status]}m{status}\x1b[0m"
    first, *more = textwrap.wrap(visible(layer.why), WIDTH - NAME - STATUS) or [""]
    return [layer.name.ljust(NAME) + status + first, *(" " * (NAME + STATUS) + m for m in more)]


def _fix(text: str) -> list[str]:
    rows = []
    for number, line in enumerate(visible(text).splitlines()):
        rows += _folded("  fix: " if number == 0 else "       ", line)
    return rows


def _folded(before: str, line: str) -> list[str]:
    """A long command, split into lines with trailing backslashes."""
    parts = textwrap.wrap(
        line,
        WIDTH - len(before) - 2,
        break_long_words=False,
        break_on_hyphens=False,
        subsequent_indent="  ",
    )
    indent = " " * len(before)
    ends = [" \\"] * (len(parts) - 1) + [""]
    return [
        (indent if number else before) + part + end
        for number, (part, end) in enumerate(zip(parts, ends, strict=True))
    ]


def _summary(report: Report) -> str:
    missing = [lay.name for lay in report.layers if lay.required and lay.status is Status.MISSING]
    weak = [lay.name for lay in report.layers if lay.status is not Status.ACTIVE]
    if missing:
        text = f"No boxes here (grade none): {', '.join(missing)} missing."
    elif weak:
        text = f"Boxes can be made here (grade {report.grade}). Could be better: {', '.join(weak)}."
    else:
        text = f"Boxes can be made here (grade {report.grade}). Nothing is missing."
    return "\n".join(textwrap.wrap(text, WIDTH))
