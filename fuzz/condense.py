"""Fuzz what shortens output: whatever is printed, it raises nothing and makes nothing longer.

    pip install atheris                                  # has wheels for Python 3.11
    mkdir -p corpus && python fuzz/condense.py -max_total_time=60 corpus

The first line of an input is the command, the rest is what it printed.
"""

from __future__ import annotations

from collections.abc import Iterator

try:
    import atheris
except ImportError:  # the same is promised, and checked, in tests/tools/test_condense.py
    atheris = None

if atheris:
    with atheris.instrument_imports(include=["hutch.tools.condense"]):
        from hutch.tools.condense import Condenser, condense
else:
    from hutch.tools.condense import Condenser, condense

COMMANDS = (b"pytest -v", b"git status", b"git log", b"grep -rn x .", b"ls -la", b"jq . | head")


def one_input(data: bytes) -> None:
    first, _, printed = data.partition(b"\n")
    command = first.decode("utf-8", "replace")
    for code in (0, 1, None):
        found = condense(command, printed, code, recall="o1")
        assert len(found.text) <= len(printed.decode("utf-8", "replace")), found
    step = len(first) + 1
    condenser = Condenser(command)
    for at in range(0, len(printed), step):
        condenser.feed(printed[at : at + step])
    assert condenser.finish(None, recall="o1") == found


def seeds() -> Iterator[bytes]:
    """A few outputs of each kind that the families know."""
    lines = (
        b"On branch main", b"\tmodified:   a.py", b"commit 1234567890", b"src/a.py:1:x",
        b"-rw-r--r-- 1 u u 12 Jan  2 12:00 name", b'{"a": 1}', b"E   assert 1", b" 1%\r 2%\r3%",
        b"\x1b[31mred\x1b[0m", b"2024-01-02 12:00:00 INFO 1",
    )  # fmt: skip
    for command in COMMANDS:
        yield command + b"\n" + b"\n".join(lines) * 20


if __name__ == "__main__":
    from _main import main

    main(one_input, seeds())
