"""Programs that belong to no connection: nothing that they print or read is lost."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from direct import Guest, with_guest

from hutch import wire
from hutch.engine.link import GuestCall
from hutch.errors import BoxLost, Conflict, HutchError, InvalidRequest, NotFound

MiB = 1024 * 1024


async def start(guest: Guest, name: str, script: str, **more: Any) -> int:
    answer = await guest.link.ask(wire.Start(name, ["sh", "-c", script], **more))
    return int(answer["pid"])


async def rest(call: GuestCall) -> bytes:
    """All that is still to come."""
    return b"".join([event.data async for event in call if isinstance(event, wire.Data)])


async def collect(guest: Guest, name: str, offset: int = 0) -> tuple[int, bytes]:
    async with guest.link.call(wire.Attach(name, offset)) as call:
        printed = await rest(call)
        return call.result["exit_code"], printed


async def job(guest: Guest, name: str) -> dict[str, Any]:
    """What a survey says of it."""
    async with guest.link.call(wire.Survey()) as call:
        found = [e.body["job"] async for e in call if isinstance(e, wire.Note) and "job" in e.body]
    return next(each for each in found if each["name"] == name)


async def ended(guest: Guest, name: str) -> dict[str, Any]:
    while not (known := await job(guest, name))["result"]:
        await asyncio.sleep(0.01)
    return known


async def stuck(guest: Guest, name: str) -> int:
    """How much it had printed when it could print no more."""
    before = -1
    while (total := (await job(guest, name))["total"]) != before or not total:
        before = total
        await asyncio.sleep(0.2)
    return total


def _sleepers(guest: Guest) -> set[int]:
    found = set()
    for pid in guest.tree():
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == "sleep\n":
                found.add(pid)
    return found


def test_what_a_program_prints_can_be_read_whenever_that_is(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        pid = await start(guest, "p1", "echo out; echo err >&2; exit 3")
        known = await ended(guest, "p1")
        assert (known["pid"], known["total"], known["input"]) == (pid, 8, False)
        assert known["result"]["exit_code"] == 3
        channels = {}
        async with guest.link.call(wire.Attach("p1")) as call:
            note = await anext(call)
            assert isinstance(note, wire.Note) and note.body == {"pid": pid, "offset": 0}
            async for event in call:
                assert isinstance(event, wire.Data)
                channels[event.channel] = event.data
            assert (call.result["exit_code"], call.result["timed_out"]) == (3, False)
        assert channels == {wire.STDOUT: b"out\n", wire.STDERR: b"err\n"}
        assert (await collect(guest, "p1", 5))[1] in (b"rr\n", b"ut\n")
        await guest.link.ask(wire.Forget("p1"))
        with pytest.raises(NotFound):
            await collect(guest, "p1")

    with_guest(tmp_path, work)


def test_what_a_host_read_and_did_not_keep_the_next_one_is_given_again(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await start(guest, "p1", "seq 1 20000; read go; seq 20001 30000")
        whole = b"".join(b"%d\n" % n for n in range(1, 30001))
        async with guest.link.call(wire.Attach("p1")) as call:
            async for event in call:
                if isinstance(event, wire.Data):
                    break
        kept = len(event.data) // 2  # the host dies here, and has half of it on disk
        await guest.connect()
        async with guest.link.call(wire.Attach("p1", kept)) as call:
            await call.send(b"go\n")
            assert await rest(call) == whole[kept:]

    with_guest(tmp_path, work)


def test_what_was_acknowledged_is_gone_and_the_guest_says_so(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        size = 3 * MiB
        await start(guest, "p1", f"head -c {size} /dev/zero; sleep 1000")
        got = 0
        async with guest.link.call(wire.Attach("p1")) as call:
            while got < size:
                event = await anext(call)
                got += len(event.data) if isinstance(event, wire.Data) else 0
        async with guest.link.call(wire.Attach("p1", 0)) as call:
            note = await anext(call)
            assert isinstance(note, wire.Note)
            assert size - MiB <= note.body["offset"] < size
        with pytest.raises(InvalidRequest):
            await collect(guest, "p1", size + 1)

    with_guest(tmp_path, work)


def test_a_program_that_nobody_reads_blocks_and_then_goes_on(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        size = 8 * MiB
        await start(guest, "p1", f"head -c {size} /dev/zero && touch {tmp_path}/done")
        total = await stuck(guest, "p1")
        assert MiB <= total < 2 * MiB and not (tmp_path / "done").exists()
        code, printed = await collect(guest, "p1")
        assert (code, len(printed)) == (0, size) and (tmp_path / "done").exists()

    with_guest(tmp_path, work)


def test_a_million_lines_cost_the_guest_no_more_than_their_bytes(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        def memory() -> int:
            status = Path(f"/proc/{guest.process.pid}/status").read_text()
            return int(status.partition("VmRSS:")[2].split()[0])

        await guest.warm()
        before = memory()
        await start(guest, "p1", "while :; do echo x; echo y >&2; done")
        await stuck(guest, "p1")
        assert memory() - before < 16 * 1024
        async with guest.link.call(wire.Attach("p1")) as call:
            call.tell(signal=9, tree=True)
            await rest(call)

    with_guest(tmp_path, work)


def test_input_reaches_a_program_through_any_connection(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await start(guest, "p1", "cat")
        async with guest.link.call(wire.Attach("p1")) as call:
            await call.send(b"one\n")
            async for event in call:
                if isinstance(event, wire.Data):
                    break
        await guest.connect()
        async with guest.link.call(wire.Attach("p1", 4)) as call:
            await call.send(b"two\n")
            call.end_input()
            assert await rest(call) == b"two\n"
            assert call.result["exit_code"] == 0

    with_guest(tmp_path, work)


def test_input_that_had_arrived_is_not_lost_with_its_connection(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await start(guest, "p1", f"until [ -e {tmp_path}/go ]; do sleep 0.01; done; wc -c")
        data = b"x" * 500_000  # a pipe holds 65536 of them
        async with guest.link.call(wire.Attach("p1")) as call:
            await anext(call)
            await call.send(data)
            call.end_input()
            await guest.program("true")  # all of that is there by now
        await guest.link.close()
        await guest.connect()
        (tmp_path / "go").touch()
        assert await collect(guest, "p1") == (0, b"500000\n")

    with_guest(tmp_path, work)


def test_signals_reach_it_and_a_kill_takes_the_whole_tree(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        trap = "trap 'echo got it; kill $!; exit 7' TERM"
        await start(guest, "p1", f"{trap}; echo ready; sleep 1000 & wait")
        async with guest.link.call(wire.Attach("p1")) as call:
            async for event in call:
                if isinstance(event, wire.Data) and event.data == b"ready\n":
                    call.tell(signal=int(signal.SIGTERM))
            assert call.result["exit_code"] == 7
        await start(guest, "p2", "setsid sleep 1000 & sleep 1000")
        async with guest.link.call(wire.Attach("p2")) as call:
            call.tell(signal=9, tree=True)
            await rest(call)
            assert call.result["exit_code"] == 137

    with_guest(tmp_path, work)


def test_a_deadline_passes_with_or_without_a_reader(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await start(guest, "p1", "echo begun; sleep 1000", timeout=3)
        known = await ended(guest, "p1")
        assert known["result"]["exit_code"] == 124 and known["result"]["timed_out"]
        assert await collect(guest, "p1") == (124, b"begun\n")

    with_guest(tmp_path, work)


def test_a_terminal_is_one_for_the_next_reader_too(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        script = "stty size; read x; stty size; echo $x"
        await start(guest, "p1", script, tty=[80, 24])
        async with guest.link.call(wire.Attach("p1")) as call:
            seen = b""
            while not seen.endswith(b"\r\n"):
                event = await anext(call)
                seen += event.data if isinstance(event, wire.Data) else b""
        async with guest.link.call(wire.Attach("p1", len(seen))) as call:
            call.tell(size=[100, 30])
            await guest.program("true")
            await call.send(b"hello\n")
            assert (await rest(call)).split() == [b"hello", b"30", b"100", b"hello"]

    with_guest(tmp_path, work)


def test_the_newest_reader_is_the_one_and_the_other_is_told(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await start(guest, "p1", "read x; echo $x")
        first = guest.link.call(wire.Attach("p1"))
        await anext(first)
        async with guest.link.call(wire.Attach("p1")) as second:
            await anext(second)
            with pytest.raises(Conflict):
                await anext(first)
            await second.send(b"mine\n")
            assert await rest(second) == b"mine\n"

    with_guest(tmp_path, work)


def test_a_name_is_taken_until_it_is_forgotten_and_only_an_end_can_be(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await start(guest, "p1", "read x")
        with pytest.raises(Conflict):
            await start(guest, "p1", "true")
        with pytest.raises(Conflict):
            await guest.link.ask(wire.Forget("p1"))
        async with guest.link.call(wire.Attach("p1")) as call:
            call.end_input()
            await rest(call)
        await guest.link.ask(wire.Forget("p1"))
        await start(guest, "p1", "true")
        with pytest.raises(NotFound):
            await guest.link.ask(wire.Start("p2", ["no-such-program"]))
        await start(guest, "p2", "true")  # its name was not lost
        with pytest.raises(InvalidRequest):
            await start(guest, "../p3", "true")

    with_guest(tmp_path, work)


def test_what_was_forgotten_holds_nothing_even_if_it_was_never_read(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await guest.warm()
        before = guest.open_files()
        for n in range(64):
            await start(guest, f"p{n + 1}", "head -c 1500000 /dev/zero & exit 0")
        for n in range(64):
            while True:
                try:
                    await guest.link.ask(wire.Forget(f"p{n + 1}"))
                    break
                except Conflict:
                    await asyncio.sleep(0.01)
        await guest.warm()
        while guest.open_files() != before:
            await asyncio.sleep(0.05)
            await guest.warm()  # what it keeps warm goes after a few seconds

    with_guest(tmp_path, work)


def test_a_survey_tells_what_the_next_host_must_know(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await start(guest, "p1", "sleep 1000")
        await start(guest, "p2", "true", tty=[80, 24])
        await guest.link.ask(wire.StartShell("two"))
        await guest.shell("true")
        await guest.link.ask(wire.StartKernel("other", cwd="/tmp", env={"A": "1"}))
        await guest.cell("1")
        await guest.link.ask(wire.StartKernel("closed"))
        await guest.link.ask(wire.EndKernel("closed"))
        await guest.connect()
        async with guest.link.call(wire.Survey()) as call:
            notes = [event.body async for event in call if isinstance(event, wire.Note)]
        jobs = [note["job"] for note in notes if "job" in note]
        assert [(each["name"], each["tty"]) for each in jobs] == [("p1", False), ("p2", True)]
        assert jobs[0]["argv"] == ["sh", "-c", "sleep 1000"] and jobs[0]["input"]
        shells = [note["shell"] for note in notes if "shell" in note]
        assert shells == [{"name": "two", "user": None}, {"name": "main", "user": None}]
        contexts = [note["context"] for note in notes if "context" in note]
        assert contexts == [{"name": "other", "cwd": "/tmp", "env": {"A": "1"}}]
        await guest.link.ask(wire.EndShell("two"))

    with_guest(tmp_path, work)


def test_a_start_whose_host_died_is_either_known_or_undone(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        for n in range(20):
            call = guest.link.call(wire.Start(f"p{n + 1}", ["sleep", "1000"]))
            await asyncio.sleep(0.002 * n / 10)
            await guest.link.close()
            with pytest.raises((BoxLost, HutchError)):
                await guest.link.ask(wire.Survey())
            call.close()
            await guest.connect()
        async with guest.link.call(wire.Survey()) as call:
            known = [e.body["job"] async for e in call if isinstance(e, wire.Note)]
        while _sleepers(guest) != {each["pid"] for each in known}:
            await asyncio.sleep(0.02)  # what is being undone takes its time

    with_guest(tmp_path, work)
