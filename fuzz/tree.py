"""Fuzz walks and removals of trees: they stay inside, end, and leave nothing.

    pip install atheris                                  # has wheels for Python 3.11
    mkdir -p corpus && python fuzz/tree.py -max_total_time=60 corpus

An input is a list of steps that build a tree, two bytes each: what to make, and its name. Beside
the tree is a folder that no link in it may lead to.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

try:
    import atheris
except ImportError:  # the target itself is still run by tests/test_fuzzing.py
    atheris = None

if atheris:
    with atheris.instrument_imports(include=["hutch.tree"]):
        from hutch import tree
else:
    from hutch import tree

MAX_STEPS = 60
DEPTH, ENTRIES = 10, 30
NAMES = (b"a", b"b", b"-", b" ", b"\xff", b"\n", b"n" * 255, b"...")
# What a link leads to: outside, up, into itself, to nothing.
TARGETS = ("../outside", "/", "..", ".", "a", "nowhere", "/proc/self/fd", "b/../..")
MODES = (0, 0o111, 0o444, 0o500, 0o700, 0o1777)


def one_input(data: bytes) -> None:
    home = Path(tempfile.mkdtemp(prefix="hutch-fuzz-"))
    try:
        top, outside = home / "top", home / "outside"
        outside.mkdir()
        (outside / "precious").write_bytes(b"kept")
        top.mkdir()
        build(top, data[: 2 * MAX_STEPS])
        before = len(os.listdir("/proc/self/fd"))
        walk(top)
        for path in (top, home / "nothing"):
            tree.remove(path)
            assert not os.path.lexists(path), path
        assert os.listdir(home) == ["outside"] and os.listdir(outside) == ["precious"]
        assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"
    finally:
        shutil.rmtree(home)


def build(top: Path, steps: bytes) -> None:
    fd = os.open(top, tree.FOLDER)
    modes: list[tuple[int, int]] = []
    for kind, which in zip(steps[::2], steps[1::2], strict=False):
        name = NAMES[which % len(NAMES)]
        with suppress(OSError):
            if kind % 8 < 3:
                os.mkdir(name, dir_fd=fd)
                inner = os.open(name, tree.FOLDER, dir_fd=fd)
                modes.append((fd, MODES[which % len(MODES)] if kind % 8 == 2 else 0o755))
                fd = inner
            elif kind % 8 == 3:
                os.symlink(TARGETS[which % len(TARGETS)], name, dir_fd=fd)
            elif kind % 8 == 4:
                os.mkfifo(name, dir_fd=fd)
            elif kind % 8 == 5:
                os.close(
                    os.open(name, os.O_CREAT | os.O_EXCL, MODES[which % len(MODES)], dir_fd=fd)
                )
            elif modes:
                os.close(fd)
                fd = modes.pop()[0]
    os.close(fd)
    for folder, mode in reversed(modes):
        os.fchmod(folder, mode)
        os.close(folder)


def walk(top: Path) -> None:
    fd = os.open(top, tree.FOLDER) if not os.geteuid() else open_unlocked(top)
    device, seen = os.fstat(fd).st_dev, {""}
    try:
        for entry in tree.walk(fd, max_depth=DEPTH, max_entries=ENTRIES, onerror=lambda exc: None):
            parent, _, name = entry.path.rpartition("/")
            assert name == entry.name and parent in seen, "a folder comes before what is in it"
            assert entry.path not in seen and entry.status.st_dev == device, entry
            assert entry.path.count("/") < DEPTH and len(seen) <= ENTRIES, entry
            again = os.stat(entry.name, dir_fd=entry.folder, follow_symlinks=False)
            assert os.path.samestat(again, entry.status), entry
            seen.add(entry.path)
            if not stat.S_ISDIR(entry.status.st_mode):
                check_not_entered(fd, entry.path)
    except tree.TreeTooLarge:
        pass
    finally:
        os.close(fd)


def open_unlocked(top: Path) -> int:
    tree.unlock(top, None)
    return os.open(top, tree.FOLDER)


def check_not_entered(top: int, path: str) -> None:
    """Nothing is opened through a link or a file, and nothing above the top."""
    for wrong in (f"{path}/precious", f"{path}/..", "../outside"):
        with suppress(OSError):
            os.close(tree.open_below(top, wrong, tree.READ))
            raise AssertionError(wrong)


def seeds() -> Iterator[bytes]:
    yield bytes([4, 0])
    yield bytes([0, 0, 3, 0, 5, 1, 4, 2, 6, 0, 3, 1])  # a folder with a link, a file and a FIFO
    yield bytes([2, 0] * 5) + bytes([5, 1])  # folders without any permission
    yield bytes([0, 6] * 20) + bytes([3, 0])  # deeper than allowed, and a path that is too long
    yield bytes(step for number in range(30) for step in (5, number % 8, 1, number % 8))


if __name__ == "__main__":
    from _main import main

    main(one_input, seeds())
