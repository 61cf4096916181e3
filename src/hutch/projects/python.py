"""Packages of Python for the interpreter of a box, in a folder that is shown to it."""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from hutch.images.environment import VERSION
from hutch.images.install import compile_modules, errors_of_packages, is_script, make_readable
from hutch.images.requirements import local_wheels, requirements_file
from hutch.images.uv import Report, pip_install

from .needs import PythonNeeds

FORMAT = 1  # of the folder; a new number, and all are installed anew


@dataclass(frozen=True)
class Interpreter:
    """Which wheels fit. Without a platform: those of the interpreter that runs Hutch."""

    version: str = VERSION
    platform: str = ""  # as uv calls it


def key_of(needs: PythonNeeds, python: Interpreter) -> str:
    """The name of the folder that holds this."""
    about = [f"python {FORMAT}", python.version, python.platform or " ".join(sys.version.split())]
    about += [*needs.packages, "", *needs.bounds]
    return hashlib.sha256("\0".join(about).encode()).hexdigest()[:32]


def install(
    needs: PythonNeeds, python: Interpreter, inside: str, folder: Path, lock: int, report: Report
) -> list[str]:
    """Fill `folder`, which is there and empty and is `inside` in a box. Answers notes.

    Raises what `pip_install` raises.
    """
    words = ["--target", str(folder)]
    if python.platform:
        words += ["--python-version", python.version, "--python-platform", python.platform]
    for option, lines in (("-r", needs.packages), ("-c", needs.bounds)):
        file = folder / f"{option}.txt"
        file.write_text(requirements_file(lines), encoding="utf-8", newline="")
        words += [option, str(file)]
    wheels = local_wheels((*needs.packages, *needs.bounds))
    pip_install(words, folder, lock, report, python.version, wheels)
    with errors_of_packages():
        for name in ("-r.txt", "-c.txt", ".lock"):
            (folder / name).unlink(missing_ok=True)
        _take_out_links(folder)
        _mend_scripts(folder / "bin")
    if python.version == VERSION:
        compile_modules(folder, inside, lock, report)
    make_readable(folder)
    return []


def _take_out_links(folder: Path) -> None:
    """No wheel has any."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            path.unlink()


def _mend_scripts(place: Path) -> None:
    """Scripts name the interpreter of this machine, and are to be run by the box's."""
    for script in filter(is_script, place.glob("*")):
        text = script.read_bytes()
        # The second form is for a path that is too long for a first line.
        body = re.sub(rb"\A#!(/bin/sh\n'''exec' [^\n]*\n' '''|[^\n]*python[^\n]*)\n", b"", text)
        if body != text:
            script.write_bytes(b"#!/usr/bin/env python3\n" + body)
