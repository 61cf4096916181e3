"""The audit log: nothing is lost that can be kept, and nothing is changed unseen."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import itertools
import json
import logging
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hutch import operations as op
from hutch.errors import Conflict, InvalidRequest
from hutch.server import audit as audit_module
from hutch.server.audit import (
    MAX_LINE,
    MAX_TEXT,
    Audit,
    AuditFilter,
    entries,
    read,
    scan,
    verify,
)
from hutch.server.keys import Caller
from hutch.server.quotas import Budget
from hutch.server.recorder import Recorder
from hutch.serving import Key, MakeKey


def filled(folder: Path, count: int = 5) -> Audit:
    audit = Audit(folder)
    for number in range(count):
        audit.add("request", owner="ada", key="k1", operation="MakeKey", target=str(number))
    audit.close()
    return audit


def targets(folder: Path) -> list[str]:
    return [entry.target for entry in read(folder)]


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*.jsonl")
    return path


def test_a_line_says_who_did_what_when_and_to_what(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit")
    audit.add(
        "request",
        owner="ada",
        key="k1",
        operation="OpenSession",
        target="s1",
        outcome="ok",
        peer="10.0.0.7",
        request="r1",
        detail={"image": "host"},
    )
    (entry,) = read(tmp_path / "audit")
    assert (entry.number, entry.event, entry.owner, entry.key) == (1, "request", "ada", "k1")
    assert (entry.operation, entry.target, entry.outcome) == ("OpenSession", "s1", "ok")
    assert (entry.peer, entry.request, entry.detail) == ("10.0.0.7", "r1", {"image": "host"})
    assert abs(entry.happened_at - time.time()) < 60
    path = only_file(tmp_path / "audit")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_it_goes_on_where_it_ended(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    filled(tmp_path, 2)
    assert [entry.number for entry in read(tmp_path)] == [1, 2, 3, 4, 5]
    found = verify(tmp_path)
    assert (found.first, found.last, found.problem) == (1, 5, "")


def changed(data: bytes) -> bytes:
    return data.replace(b'"target":"1"', b'"target":"9"')


def without_a_line(data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(lines[:2] + lines[3:])


def with_a_line_twice(data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[:3], lines[2], *lines[3:]])


def renumbered(data: bytes) -> bytes:
    lines = without_a_line(data).splitlines(keepends=True)
    lines = [line.replace(b'"number":%d' % (n + 2), b'"number":%d' % (n + 1)) if n > 1 else line
             for n, line in enumerate(lines)]  # fmt: skip
    return b"".join(lines)


def with_nonsense(data: bytes) -> bytes:
    return data.replace(b"\n", b"\nnonsense\n", 1)


@pytest.mark.parametrize(
    "tamper", [changed, without_a_line, with_a_line_twice, renumbered, with_nonsense]
)
def test_what_is_changed_afterwards_is_found(
    tmp_path: Path, tamper: Callable[[bytes], bytes]
) -> None:
    filled(tmp_path)
    path = only_file(tmp_path)
    path.write_bytes(tamper(path.read_bytes()))
    assert path.name in verify(tmp_path).problem


def test_a_line_that_was_torn_costs_no_other(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    path = only_file(tmp_path)
    whole = path.read_bytes()
    torn = whole.splitlines()[2]
    for cut in (1, len(torn) // 2, len(torn)):
        path.write_bytes(whole[: len(whole) - len(torn) - 1] + torn[:cut])
        assert targets(tmp_path) == ["0", "1"] and not verify(tmp_path).problem
        filled(tmp_path, 1)
        assert targets(tmp_path) == ["0", "1", "0"] and not verify(tmp_path).problem
    path.write_bytes(whole + b"\0" * 100)  # as a power failure can leave it
    filled(tmp_path, 1)
    assert targets(tmp_path) == ["0", "1", "2", "0"] and not verify(tmp_path).problem


def test_a_writer_can_be_killed_at_any_moment(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hutch.server.audit import Audit\n"
        "audit = Audit(Path(sys.argv[1])); n = 0\n"
        "while True: audit.add('request', target=str(n)); n += 1; print(n, flush=True)"
    )
    for _ in range(3):
        argv = [sys.executable, "-c", code, str(tmp_path)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as writer:
            assert writer.stdout
            before = len(read(tmp_path, limit=10_000_000))
            told = [writer.stdout.readline() for _ in range(50)]
            writer.send_signal(signal.SIGKILL)
            told += writer.stdout.readlines()
        last = int([line for line in told if line.endswith(b"\n")][-1])
        # What was told to be written is there.
        assert len(read(tmp_path, limit=10_000_000)) >= before + last
        filled(tmp_path, 1)
        assert not verify(tmp_path).problem


def test_a_full_disk_stops_nothing_and_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit = Audit(tmp_path)
    audit.add("request", target="before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # In the middle of a line: part of it is written.
    resource.setrlimit(resource.RLIMIT_FSIZE, (only_file(tmp_path).stat().st_size + 20, hard))
    try:
        with caplog.at_level(logging.ERROR, "hutch.audit"):
            for _ in range(3):
                audit.add("request", target="lost")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert audit.dropped == 3
    assert [str(tmp_path) in record.getMessage() for record in caplog.records] == [True]
    audit.add("request", target="after")
    entries = read(tmp_path)
    assert [(e.event, e.target) for e in entries] == [
        ("request", "before"), ("dropped", ""), ("request", "after"),
    ]  # fmt: skip
    assert entries[1].detail == {"lines": "3"}
    assert not verify(tmp_path).problem


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "audit").write_text("in the way")
    audit = Audit(tmp_path / "audit")
    audit.add("request")
    assert audit.dropped == 1


def test_hostile_texts_stay_in_their_line_and_are_bounded(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    hostile = ['"}\n{"event":"forged"', "\x1b[2J\r\0", "\u2028\u202e", "\udcff", "x" * 1_000_000]
    for text in hostile:
        audit.add(text, owner=text, target=text, detail={text: text})
    audit.add("request", detail={f"{n}" + "💥" * 1000: "💥" * 1000 for n in range(10_000)})
    data = only_file(tmp_path).read_bytes()
    lines = data.splitlines()
    assert len(lines) == len(hostile) + 1 and data.isascii() and b"\x1b" not in data
    for line in lines:
        assert len(json.loads(line)["event"]) <= MAX_TEXT
    assert max(map(len, lines[:-1])) < 8192
    assert read(tmp_path)[0].event == hostile[0]
    assert not verify(tmp_path).problem


def test_even_the_longest_line_is_found_again(tmp_path: Path) -> None:
    for _ in range(2):
        audit = Audit(tmp_path)
        audit.add("request", detail={f"{n:03}" + "\x01" * 1000: "\x01" * 1000 for n in range(100)})
        audit.close()
    assert max(map(len, only_file(tmp_path).read_bytes().splitlines())) < MAX_LINE
    assert [entry.number for entry in read(tmp_path)] == [1, 2] and not verify(tmp_path).problem


def test_old_lines_go_when_there_is_no_more_room(tmp_path: Path) -> None:
    audit = Audit(tmp_path, max_size=4 * MAX_LINE)
    for number in range(3000):
        audit.add("request", target=str(number))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size <= 5 * MAX_LINE
    found = verify(tmp_path)
    assert not found.problem and found.first > 1 and found.last == 3000
    assert len(list(tmp_path.iterdir())) > 1
    entries = read(tmp_path, after=2990)
    assert [entry.number for entry in entries] == list(range(2991, 3001))
    middle = sorted(tmp_path.iterdir())[1]
    middle.unlink()
    assert "after" in verify(tmp_path).problem


def test_lines_that_are_too_old_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "FILE_SIZE", 1000)
    audit = Audit(tmp_path, max_age=3600)
    for number in range(20):
        audit.add("request", target=str(number))
    first, second, *_ = sorted(tmp_path.iterdir())
    os.utime(first, (time.time() - 7200,) * 2)
    audit.prune()
    assert not first.exists() and second.exists() and not verify(tmp_path).problem


def test_a_quiet_log_begins_a_file_each_day_and_old_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = Audit(tmp_path, max_age=10 * 86_400)
    now = time.time()

    for days in (0, 0.5, 1.5):
        monkeypatch.setattr(time, "time", lambda days=days: now + days * 86_400)
        audit.add("request", target=str(days))
    asyncio.run(audit.sync())
    first, _ = sorted(tmp_path.iterdir())
    os.utime(first, (now, now))
    audit.prune()
    assert targets(tmp_path) == ["0", "0.5", "1.5"]
    monkeypatch.setattr(time, "time", lambda: now + 10.5 * 86_400)
    audit.prune()
    assert targets(tmp_path) == ["1.5"]
    assert not verify(tmp_path).problem
    audit.close()


def test_files_that_cannot_be_removed_cost_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = Audit(tmp_path, max_size=4 * MAX_LINE)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "immutable")

    monkeypatch.setattr(Path, "unlink", refuse)
    for _ in range(1000):
        audit.add("request", target="x" * 200)
    audit.close()
    assert audit.dropped == 0 and len(list(tmp_path.iterdir())) > 4


def test_it_is_read_by_owner_key_event_and_time_and_in_pages(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    for number in range(10):
        audit.add(
            "denied" if number % 2 else "request", owner=f"o{number % 3}", key=f"k{number % 5}"
        )

    def numbers(only: AuditFilter, **more: int) -> list[int]:
        return [entry.number for entry in read(tmp_path, only=only, **more)]

    assert numbers(AuditFilter(owner="o1")) == [2, 5, 8]
    assert numbers(AuditFilter(key="k0")) == [1, 6]
    assert numbers(AuditFilter(event="denied", owner="o0")) == [4, 10]
    assert numbers(AuditFilter(since=time.time() + 60)) == []
    assert numbers(AuditFilter(since=time.time() - 60), after=4, limit=3) == [5, 6, 7]
    assert numbers(AuditFilter(owner='"o1"')) == []


def test_who_follows_the_log_reads_no_line_twice(tmp_path: Path) -> None:
    filled(tmp_path)
    assert scan(tmp_path, only=AuditFilter(event="denied")) == ([], 5)
    found, last = scan(tmp_path, limit=2)
    assert len(found) == last == 2
    assert scan(tmp_path, after=5) == ([], 5)
    assert scan(tmp_path / "nothing", after=7) == ([], 7)
    with only_file(tmp_path).open("ab") as file:
        file.write(b"nonsense\n")
    found, last = scan(tmp_path)
    assert len(found) == last == 5
    assert scan(tmp_path, after=last) == ([], 5)


def test_each_entry_has_its_line_as_it_is_stored(tmp_path: Path) -> None:
    audit = filled(tmp_path, 2)
    audit.add("request", target="\u2028 ünïcode", detail={"note": '"'})
    found = read(tmp_path)
    assert "".join(f"{e.line}\n" for e in found).encode() == only_file(tmp_path).read_bytes()
    for before, after in itertools.pairwise(found):
        assert hashlib.sha256(f"{before.line}\n".encode()).hexdigest() == after.previous


def test_an_event_that_does_not_exist_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(InvalidRequest, match="no event 'typo': there are request, denied, auth_"):
        AuditFilter(event="typo")


def test_a_log_that_is_followed_is_read_only_when_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "LOOK_AGAIN", 0.01)
    audit, read_after = filled(tmp_path), []

    def counted(folder: Path, after: int, limit: int, only: AuditFilter) -> object:
        found = scan(folder, after, limit, only)
        read_after.append(after)
        return found

    async def follow() -> str:
        following = entries(tmp_path, only=AuditFilter(event="denied"), follow=True)
        coming = asyncio.ensure_future(anext(following))
        while not read_after:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # several looks
        audit.add("denied", target="new")
        entry = await coming
        await following.aclose()
        return entry.target

    monkeypatch.setattr(audit_module, "scan", counted)
    assert asyncio.run(follow()) == "new"
    assert read_after == [0, 5]


def test_a_log_that_somebody_removes_goes_on_in_a_new_file(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    audit.add("request", target="removed")
    only_file(tmp_path).unlink()
    asyncio.run(audit.sync())
    audit.add("request", target="kept")
    assert [(entry.number, entry.target) for entry in read(tmp_path)] == [(2, "kept")]


def test_what_could_not_be_synced_is_synced_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit, synced = Audit(tmp_path), []
    audit.add("request", target="x")

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        asyncio.run(audit.sync())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", synced.append)
        asyncio.run(audit.sync())
        assert synced
        synced.clear()
        asyncio.run(audit.sync())
        assert not synced
    audit.close()


def test_what_its_caller_did_not_wait_for_is_recorded_and_so_is_a_bug(tmp_path: Path) -> None:
    recorder = Recorder(Audit(tmp_path))
    caller = Caller("ada", "run", "k1", peer="10.0.0.7", request="r1")
    recorder.failed(op.CloseSession("s1"), caller, asyncio.CancelledError())
    recorder.failed(op.CloseSession("s2"), caller, ZeroDivisionError())
    recorder.failed(op.CloseSession("s3"), caller, Conflict("not now"))
    recorder.failed(op.GetSession("s4"), caller, Conflict("it only looks"))
    assert [(e.operation, e.target, e.outcome, e.peer, e.request) for e in read(tmp_path)] == [
        ("CloseSession", "s1", "cancelled", "10.0.0.7", "r1"),
        ("CloseSession", "s2", "internal", "10.0.0.7", "r1"),
        ("CloseSession", "s3", "conflict", "10.0.0.7", "r1"),
    ]


def test_an_answer_that_cannot_be_recorded_is_given_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(Audit(tmp_path))
    key = Key("k1", "ada", "run", "hutch_", expires_at=1e15)  # a time that cannot be shown
    recorder.performed(MakeKey("ada"), Caller("ada", "admin"), key)
    assert "cannot record MakeKey" in caplog.text


def test_what_strangers_can_cause_is_bounded_and_counted() -> None:
    budget = Budget(each=(5, 0.0), together=(20, 0.0))
    assert [budget.take("one") for _ in range(1000)].count(True) == 5
    assert budget.take_suppressed() == 995 and budget.take_suppressed() == 0
    # Many addresses, one after another, have no more than all of them together may.
    assert [budget.take(f"peer {n}") for n in range(100_000)].count(True) == 15
    assert len(budget._of) <= 1000
