"""A journal as the recording of a terminal, and as a notebook."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hutch import operations as op
from hutch.server.journal import (
    as_asciicast,
    as_notebook,
    broken_off_entry,
    cell_entry,
    command_entry,
    program_entry,
)
from hutch.serving import JournalEntry
from hutch.types import CellError, CellResult, Execution, Logs, Process, Result


def command(line: str, output: str, exit_code: int = 0, ms: int = 500) -> dict[str, Any]:
    ran = Result(exit_code, output, "", output, cwd="/workspace", duration_ms=ms)
    return command_entry(op.RunShell("s1", line), ran)


def cell(code: str, **more: Any) -> dict[str, Any]:
    return cell_entry(op.RunCode("s1", code), Execution(duration_ms=250, **more))


FIGURE = CellResult(text="<Figure>", png="iVBO")
MAIN = CellResult(text="2", html="<b>2</b>", json={"a": [1, None]}, is_main=True)
JOURNAL = [
    JournalEntry(1, 1000.0, "start", {"image": "host"}),
    JournalEntry(2, 1002.0, "command", command("for i in 1 2\ndo echo $i\ndone", "1\n2\n")),
    JournalEntry(3, 1003.0, "command", command("false", "no newline", exit_code=1)),
    JournalEntry(4, 1010.0, "program", program_entry(
        op.StartProgram("s1", ("sleep", "a b")), Process("p1", 9, ("sleep", "a b"), 1.0))),
    JournalEntry(5, 1011.0, "cell", cell(
        "1 + 1\n", results=(FIGURE, MAIN), logs=Logs("out\n", "err\n"), execution_count=1)),
    JournalEntry(6, 1012.0, "cell", cell(
        "1 / 0", error=CellError("ZeroDivisionError", "division by zero", "Trace\nback"))),
    JournalEntry(7, 1012.5, "file", {"do": "write", "path": "/workspace/a\nb", "size": 3}),
    JournalEntry(8, 1013.0, "dropped", {"entries": 4}),
    JournalEntry(9, 1013.1, "program", program_entry(
        op.StartProgram("s1", ("bash", "-l"), terminal=(80, 24)),
        Process("p2", 10, ("bash", "-l"), 1.0, tty=True))),
    JournalEntry(10, 1013.2, "broken_off", broken_off_entry(op.RunShell("s1", "sleep 600"))),
    JournalEntry(11, 1013.3, "broken_off", broken_off_entry(op.RunCode("s1", "wait()"))),
    JournalEntry(12, 1013.4, "command", command("true", "")),
    JournalEntry(13, 1014.0, "end", {"status": "destroyed", "why": "it was closed"}),
]  # fmt: skip


def test_a_recording_shows_what_was_typed_and_printed_at_its_time() -> None:
    header, *events = [json.loads(line) for line in as_asciicast(JOURNAL)]
    assert header["version"] == 2 and (header["width"], header["height"]) == (80, 24)
    assert header["timestamp"] == 1000
    assert events[1] == [1.5, "o", "$ for i in 1 2\r\n> do echo $i\r\n> done\r\n"]
    assert events[2] == [2.0, "o", "1\r\n2\r\n"]
    assert events[3] == [2.5, "o", "$ false\r\n"] and events[4] == [3.0, "o", "no newline\r\n"]
    shown = "".join(text for _, _, text in events)
    assert "$ sleep 'a b' &\r\n" in shown and "# end status: destroyed, why: it was" in shown
    assert ">>> 1 + 1\r\nout\r\nerr\r\n<Figure>\r\n2\r\n" in shown
    assert "# terminal: bash -l\r\n" in shown and "$ bash" not in shown
    assert "$ sleep 600\r\n# broken off\r\n>>> wait()\r\n# broken off\r\n" in shown
    assert all(text for _, _, text in events)
    assert ">>> 1 / 0\r\nTrace\r\nback\r\n" in shown and "# 4 entries are not kept\r\n" in shown


def check_asciicast(pieces: Iterator[bytes]) -> None:
    header, *events = [json.loads(line) for line in pieces]
    assert header["version"] == 2
    last = 0.0
    for at, kind, text in events:
        assert at >= last and kind == "o" and isinstance(text, str)
        assert not re.search(r"(?<!\r)\n", text)
        last = at


def check_notebook(pieces: Iterator[bytes]) -> dict[str, Any]:
    """By what the format asks for; and by its own package, where that is installed."""
    data = b"".join(pieces)
    made: dict[str, Any] = json.loads(data)
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    assert {"metadata", "cells", "nbformat", "nbformat_minor"} == set(made)
    ids = [found["id"] for found in made["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", i) for i in ids)
    fields = {
        "stream": {"name", "text"},
        "display_data": {"data", "metadata"},
        "execute_result": {"data", "metadata", "execution_count"},
        "error": {"ename", "evalue", "traceback"},
    }
    for found in made["cells"]:
        assert isinstance(found["source"], str)
        if found["cell_type"] == "markdown":
            assert set(found) == {"id", "cell_type", "metadata", "source"}
            continue
        assert set(found) == {
            "id", "cell_type", "metadata", "source", "outputs", "execution_count",
        }  # fmt: skip
        for output in found["outputs"]:
            assert set(output) == {"output_type", *fields[output["output_type"]]}
    if importlib.util.find_spec("nbformat"):
        nbformat = importlib.import_module("nbformat")
        nbformat.validate(nbformat.reads(data.decode(), as_version=4))
    return made


def test_a_notebook_has_cells_with_their_outputs_and_commands_as_bash() -> None:
    cells = check_notebook(as_notebook(JOURNAL))["cells"]
    assert [found["source"] for found in cells] == [
        "%%bash\nfor i in 1 2\ndo echo $i\ndone", "%%bash\nfalse", "%%bash\nsleep 'a b' &",
        "1 + 1\n", "1 / 0", "4 entries are not kept", "%%bash\nsleep 600", "wait()",
        "%%bash\ntrue",
    ]  # fmt: skip
    assert cells[0]["outputs"] == [{"output_type": "stream", "name": "stdout", "text": "1\n2\n"}]
    assert cells[1]["outputs"][1]["text"] == "exit code 1\n"
    kinds = [output["output_type"] for output in cells[3]["outputs"]]
    assert kinds == ["stream", "stream", "display_data", "execute_result"]
    assert cells[3]["outputs"][2]["data"] == {"text/plain": "<Figure>", "image/png": "iVBO"}
    assert cells[3]["outputs"][3]["data"]["application/json"] == {"a": [1, None]}
    assert cells[3]["outputs"][3]["execution_count"] == cells[3]["execution_count"] == 1
    assert cells[4]["outputs"] == [
        {
            "output_type": "error",
            "ename": "ZeroDivisionError",
            "evalue": "division by zero",
            "traceback": ["Trace", "back"],
        }
    ]


def test_an_empty_journal_is_an_empty_recording_and_an_empty_notebook() -> None:
    check_asciicast(as_asciicast([]))
    assert check_notebook(as_notebook([]))["cells"] == []


ANY_TEXT = st.text(st.characters(), max_size=40)


@given(
    st.lists(
        st.tuples(ANY_TEXT, ANY_TEXT, st.integers(0, 255), st.integers(0, 10_000), st.booleans()),
        max_size=10,
    ),
    st.lists(st.floats(0, 1e9), min_size=10, max_size=10),
)
def test_whatever_was_done_can_be_exported(
    steps: list[tuple[str, str, int, int, bool]], times: list[float]
) -> None:
    entries = [
        JournalEntry(
            n + 1,
            at,
            "command" if is_command else "cell",
            command(typed, said, code, ms)
            if is_command
            else cell(typed, logs=Logs(said), error=CellError(said, said, "") if code else None),
        )
        for n, ((typed, said, code, ms, is_command), at) in enumerate(
            zip(steps, times, strict=False)
        )
    ]
    check_asciicast(as_asciicast(entries))
    check_notebook(as_notebook(entries))


def test_an_entry_of_which_only_its_kind_is_left_can_be_exported() -> None:
    bare = [
        JournalEntry(n, float(n), kind, {"too_large": 9})
        for n, kind in enumerate(("command", "program", "cell", "file", "new-kind"), 1)
    ]
    check_asciicast(as_asciicast(bare))
    check_notebook(as_notebook(bare))
