"""What happened in a session: one line for each thing, bounded, and never in the way."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from must_work import need

from hutch import operations as op
from hutch.server.journal import (
    END,
    MAX_COMMAND,
    Journal,
    cell_entry,
    command_entry,
    file_entry,
    program_entry,
)
from hutch.serving import JournalEntry
from hutch.types import CellError, CellResult, Execution, Logs, MiB, Process, Result


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def numbers(journal: Journal, after: int = 0) -> list[int]:
    return [entry.number for entry in journal.read(after, 10**9)]


def test_what_was_added_is_read_in_order(path: Path) -> None:
    journal = Journal(path, MiB)
    assert journal.read() == [] and not path.exists()
    before = time.time()
    added = [journal.add("command", n=n, text="ü\n\0") for n in range(10)]
    assert [entry.number for entry in added] == list(range(1, 11))
    assert journal.read() == added == Journal(path, MiB).read()
    assert journal.read(after=7) == added[7:] and journal.read(limit=2) == added[:2]
    assert all(before <= entry.happened_at <= time.time() for entry in added)
    assert path.stat().st_mode & 0o077 == 0


def test_numbers_go_on_in_a_new_process(path: Path) -> None:
    Journal(path, MiB).add("start")
    Journal(path, MiB).add("command", output="x" * 200_000)  # longer than what is looked at first
    assert Journal(path, MiB).add("adopt").number == 3


@pytest.mark.parametrize("torn", [b'{"number":4,"happened_at":1', b"\xff", b"{}", b"x" * 300_000])
def test_a_line_that_a_crash_tore_is_ignored_and_numbers_go_on(path: Path, torn: bytes) -> None:
    journal = Journal(path, MiB)
    for _ in range(3):
        journal.add("command")
    with open(path, "ab") as file:
        file.write(torn)
    assert numbers(Journal(path, MiB)) == [1, 2, 3]
    again = Journal(path, MiB)
    assert again.add("adopt").number == 4
    assert numbers(again) == [1, 2, 3, 4]


def test_a_file_that_is_one_torn_line_begins_anew(path: Path) -> None:
    path.write_bytes(b'{"numb')
    journal = Journal(path, MiB)
    assert journal.add("start").number == 1 and numbers(journal) == [1]


def test_lines_that_are_none_are_passed_over(path: Path) -> None:
    journal = Journal(path, MiB)
    journal.add("start")
    with open(path, "ab") as file:
        file.write(b'\0\0\n[]\n"x"\n{"number":"7"}\n\n')
    assert Journal(path, MiB).add("adopt").number == 2
    assert numbers(journal) == [1, 2]


def test_past_its_limit_the_older_half_goes_and_a_line_says_so(path: Path) -> None:
    limit = 64 * 1024
    journal = Journal(path, limit)
    for n in range(1, 2001):
        journal.add("command", n=n, output="x" * 500)
        assert path.stat().st_size <= limit
    first, *rest = journal.read(limit=10**9)
    assert first.kind == "dropped" and first.body == {"entries": first.number}
    assert [entry.number for entry in rest] == list(range(first.number + 1, 2001))
    assert limit / 4 < path.stat().st_size
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert Journal(path, limit).add("end").number == 2001


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 3000) | st.integers(1900, 2000), min_size=1, max_size=80))
def test_whatever_is_added_the_file_is_bounded_and_nothing_goes_uncounted(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    journal = Journal(path, 4096)
    for n, size in enumerate(sizes):
        if n % 7 == 0:
            journal = Journal(path, 4096)  # another process takes over
        journal.add("command", output="x" * size)
        assert path.stat().st_size <= 4096
    entries = journal.read(limit=10**9)
    kept = [entry for entry in entries if entry.kind != "dropped"]
    assert kept[-1].number == len(sizes)
    gone = sum(entry.body["entries"] for entry in entries if entry.kind == "dropped")
    assert len(kept) + gone == len(sizes)


def test_an_entry_that_is_too_large_is_told_of(path: Path) -> None:
    journal = Journal(path, 64 * 1024)
    journal.add("cell", output="x" * 50_000)
    (entry,) = journal.read()
    assert entry.kind == "cell" and entry.body["too_large"] > 50_000


def test_what_is_no_unicode_or_no_json_is_told_all_the_same(path: Path) -> None:
    journal = Journal(path, MiB)
    deep: list[object] = []
    for _ in range(10_000):
        deep = [deep]
    for body in ({"path": "a\udcff"}, {"what": object()}, {"n": 1 << 80}, {"deep": deep}):
        journal.add("file", **body)
    assert numbers(journal) == [1, 2, 3, 4]
    assert "udcff" in journal.read()[0].body["text"]


def test_a_folder_that_is_gone_fails_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "session"
    folder.mkdir()
    journal = Journal(folder / "journal.jsonl", 4096)
    journal.add("start")
    shutil.rmtree(folder)
    for _ in range(200):
        journal.add("command", output="x" * 100)
    assert journal.dropped == 200 and journal.read() == []
    folder.mkdir()
    journal.add("command")
    assert [(entry.number, entry.kind) for entry in journal.read()] == [
        (201, "dropped"), (202, "command"),
    ]  # fmt: skip
    assert journal.read()[0].body == {"entries": 200} and journal.dropped == 0


def test_a_file_that_cannot_be_opened_fails_nobody(path: Path) -> None:
    path.mkdir()
    journal = Journal(path, MiB)
    journal.add("start")
    assert journal.dropped == 1 and journal.read() == []
    path.rmdir()
    assert journal.add("command").number == 2
    assert [entry.body for entry in journal.read()] == [{"entries": 1}, {}]


def test_a_full_disk_fails_nobody_and_is_told_when_there_is_room_again(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "hutch-test", str(place)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount).returncode:
        need("mount", "a small file system cannot be mounted here")
    try:
        journal = Journal(place / "journal.jsonl", MiB)
        journal.add("start")
        filler = place / "filler"
        filler.write_bytes(b"x" * 100 * 1024)
        added = 1
        while journal.dropped < 20:
            journal.add("command", output="x" * 3000)
            added += 1
        filler.unlink()
        journal.add("command")
        entries = journal.read(limit=10**9)
        assert [entry.kind for entry in entries[-2:]] == ["dropped", "command"]
        gone = sum(entry.body["entries"] for entry in entries if entry.kind == "dropped")
        kept = sum(entry.kind != "dropped" for entry in entries)
        assert gone == 20 and gone + kept == added + 1
        for line in journal.path.read_bytes().splitlines():
            json.loads(line)
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_process_that_is_killed_while_it_adds_loses_nothing_that_it_told_of(path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from hutch.server.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]), 100_000)\n"
        "while True: print(journal.add('command', output='x' * 500).number, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        told = 0
        while told < 1000:
            told = int(process.stdout.readline())
        process.kill()
        lines = process.stdout.read().splitlines()
        told = max([told, *(int(line) for line in lines if line)])
    journal = Journal(path, 100_000)
    found = numbers(journal)
    assert found == list(range(found[0], found[-1] + 1)) and found[-1] in (told, told + 1)
    assert journal.add("adopt").number == found[-1] + 1


# --- following --------------------------------------------------------------------------


async def collect_one(journal: Journal) -> JournalEntry:
    stream = journal.follow()
    try:
        return await anext(stream)
    finally:
        await stream.aclose()


async def collect(journal: Journal, after: int = 0) -> list[JournalEntry]:
    return [entry async for entry in journal.follow(after)]


def test_who_follows_gets_what_was_and_what_comes_until_it_is_closed(path: Path) -> None:
    async def main() -> None:
        journal = Journal(path, MiB)
        journal.add("start")
        journal.add("command")
        stream = journal.follow(1)
        assert (await anext(stream)).number == 2
        coming = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        journal.add("cell")
        assert (await asyncio.wait_for(coming, 10)).kind == "cell"
        rest = asyncio.create_task(collect(journal, 3))
        journal.add("end")
        journal.close()
        assert [entry.kind for entry in await asyncio.wait_for(rest, 10)] == ["end"]
        assert [entry.kind async for entry in stream] == ["end"]
        assert not journal._followers

    asyncio.run(main())


def test_who_follows_a_journal_that_is_closed_gets_all_of_it(path: Path) -> None:
    async def main() -> None:
        Journal(path, MiB).add("start")
        ended = Journal(path, MiB)
        ended.close()
        assert [entry.number for entry in await asyncio.wait_for(collect(ended), 10)] == [1]
        nothing = Journal(path.with_name("none"), MiB)
        nothing.close()
        assert await asyncio.wait_for(collect(nothing), 10) == []

    asyncio.run(main())


def test_who_follows_misses_nothing_while_the_older_half_goes(path: Path) -> None:
    async def main() -> None:
        journal = Journal(path, 8192)
        following = asyncio.create_task(collect(journal))
        for n in range(2000):
            journal.add("command", n=n)
            if n % 20 == 0:
                await asyncio.sleep(0.001)
        journal.close()
        entries = await asyncio.wait_for(following, 120)
        seen = [entry.number for entry in entries]
        assert seen == sorted(set(seen)) and seen[-1] == 2000
        # Where it was too slow, a line says how far the journal begins after what it had read.
        for before, entry in zip([None, *entries], entries, strict=False):
            if before is not None and entry.number != before.number + 1:
                assert entry.kind == "dropped"

    asyncio.run(main())


def test_who_leaves_early_leaves_nothing_open(path: Path) -> None:
    async def main() -> None:
        journal = Journal(path, MiB)
        journal.add("start")
        await collect_one(journal)  # a thread to read in is there from now on
        open_before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            stream = journal.follow()
            await anext(stream)
            waiting = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await stream.aclose()
            reading = asyncio.create_task(collect_one(journal))
            await asyncio.sleep(0)
            reading.cancel()  # while a thread reads
            await asyncio.gather(reading, return_exceptions=True)
        assert len(os.listdir("/proc/self/fd")) == open_before and not journal._followers

    asyncio.run(main())


# --- what a line says -------------------------------------------------------------------


def result(output: str, **more: object) -> Result:
    return Result(0, output, "", output, cwd="/workspace", duration_ms=5, **more)  # type: ignore[arg-type]


def test_a_command_is_told_with_its_two_ends() -> None:
    said = command_entry(op.RunShell("s1", "seq 9"), result("1\n2\n"))
    assert said == {
        "shell": "main", "command": "seq 9", "exit_code": 0, "cwd": "/workspace",
        "duration_ms": 5, "timed_out": False, "truncated": False, "output": "1\n2\n",
    }  # fmt: skip
    long = "a" * END + "b" * 100_000 + "c" * END
    said = command_entry(op.RunShell("s1", "x" * 10**6), result(long))
    assert said["truncated"] and len(said["output"]) < 2 * END + 100
    assert said["output"].startswith("a" * END) and said["output"].endswith("c" * END)
    assert "100000 characters not kept" in said["output"]
    assert len(said["command"]) < MAX_COMMAND + 100
    assert "kept" not in said


def test_a_line_names_the_whole_output_if_there_is_more_of_it() -> None:
    said = command_entry(op.RunShell("s1", "seq 9"), result("1\n", truncated=True, kept="o7"))
    assert (said["truncated"], said["kept"]) == (True, "o7")
    assert (
        cell_entry(op.RunCode("s1", "1"), Execution((), truncated=True, kept="o8"))["kept"] == "o8"
    )


def test_a_program_is_told_as_it_would_be_typed() -> None:
    said = command_entry(op.RunProgram("s1", ("echo", "a b")), result("a b\n"))
    assert said["shell"] is None and said["command"] == "echo 'a b'"
    process = Process("p1", 7, ("sleep", "9"), 1.0)
    said = program_entry(op.StartProgram("s1", ("sleep", "9")), process)
    assert said == {"argv": ["sleep", "9"], "id": "p1", "cwd": None}
    said = program_entry(op.StartProgram("s1", ("x" * 10**6,) * 5000), process)
    assert len(json.dumps(said)) < 2 * MAX_COMMAND


def test_a_cell_is_told_with_its_results_as_far_as_they_fit() -> None:
    execution = Execution(
        results=(
            CellResult(text="<Figure>", png="iVBO", extra={"application/x": "y"}),
            CellResult(text="x" * 300_000, html="<b>1</b>", json={"a": [1]}, is_main=True),
        ),
        logs=Logs("out", "err"),
        error=CellError("ValueError", "no", "Traceback\nValueError: no"),
        execution_count=3,
        duration_ms=12,
    )
    said = cell_entry(op.RunCode("s1", "plot()"), execution)
    assert said["results"] == [
        {
            "is_main": False,
            "forms": {"text/plain": "<Figure>", "image/png": "iVBO", "application/x": "y"},
        },
        {
            "is_main": True,
            "forms": {"text/html": "<b>1</b>", "application/json": {"a": [1]}},
            "left_out": ["text/plain"],
        },
    ]
    assert (said["stdout"], said["stderr"], said["count"]) == ("out", "err", 3)
    assert said["error"]["traceback"] == "Traceback\nValueError: no"


@pytest.mark.parametrize("each", [1, 1000, 250_000])
def test_however_many_results_there_are_the_line_is_bounded(each: int) -> None:
    results = (CellResult(text="x" * each),) * (100_000 if each == 1 else 5000)
    said = cell_entry(op.RunCode("s1", "1"), Execution(results))
    assert len(said["results"]) > 0 and len(json.dumps(said)) < 2 * MiB


def test_a_change_of_files_is_told_without_what_is_in_them() -> None:
    assert file_entry(op.WriteFile("s1", "a.txt", b"secret"), 6) == {
        "do": "write", "path": "a.txt", "size": 6,
    }  # fmt: skip
    assert file_entry(op.EditFile("s1", "a.txt", "old", "new"), 3) == {
        "do": "edit", "path": "a.txt",
    }  # fmt: skip
    moved = file_entry(op.MoveFile("s1", "a", "b"), None)
    assert moved == {"do": "move", "path": "a", "to": "b"}


@given(st.text(st.characters(), max_size=50))
def test_whatever_was_printed_becomes_a_line(output: str) -> None:
    said = command_entry(op.RunShell("s1", output, shell=output), result(output + "\udcff"))
    json.dumps(said, ensure_ascii=False).encode()
