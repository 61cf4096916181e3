"""Programs in the background, whose host goes away and comes again."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from must_work import need

from hutch import operations as op
from hutch import wire
from hutch.backends.base import Box, Spec
from hutch.backends.namespaces import NamespacesBackend
from hutch.engine.link import Link
from hutch.engine.outputs import Outputs
from hutch.engine.session import KEPT_PROCESSES, Numbers, Session
from hutch.engine.survey import survey
from hutch.errors import BackendUnavailable, BoxLost, Conflict, NotFound
from hutch.types import BoxInfo, Chunk, Limits, Port, Result

MiB = 1024 * 1024
CLOCK = 1.0  # seconds by which clocks of one machine may differ


class Hosts:
    """One box, and the hosts that it has one after another."""

    def __init__(self, box: Box, folder: Path, limit: int) -> None:
        self.box, self._folder, self._limit = box, folder, limit
        self._sessions: list[Session] = []
        self.outputs: list[Outputs] = []

    @property
    def now(self) -> Session:
        return self._sessions[-1]

    async def come(self) -> Session:
        outputs = Outputs(self._folder, self._limit, persistent=True)
        numbers = Numbers(outputs.recover())
        info = BoxInfo(
            self.box.id, "namespaces", "host", "ns", Limits(), "/workspace", "user", time.time()
        )
        link = await Link.open(await self.box.connect())
        session = Session(info, self.box, link, outputs, wire.SetIdle(None, 0, 0), numbers)
        self._sessions.append(session)
        self.outputs.append(outputs)
        await session.adopt()
        return session

    async def crash(self) -> Session:
        """The host dies without a word, and another takes its place."""
        session = self.now
        session._watch.cancel()
        for job in session._jobs.values():
            await job.stop()
        session.link._stream.close()
        return await self.come()

    async def end(self) -> None:
        for session in self._sessions:
            await session.leave()
        await self.box.kill()


@asynccontextmanager
async def _hosts(folder: Path, limit: int) -> AsyncIterator[Hosts]:
    backend = NamespacesBackend()
    try:
        try:
            hosts = Hosts(await backend.start(Spec()), folder, limit)
        except BackendUnavailable as exc:
            need("namespaces", str(exc))
        try:
            await hosts.come()
            yield hosts
        finally:
            await hosts.end()
    finally:
        await backend.close()


def with_hosts(
    folder: Path, work: Callable[[Hosts], Awaitable[None]], limit: int = 256 * MiB
) -> None:
    """`limit`: bytes of output on disk."""

    async def main() -> None:
        async with asyncio.timeout(60), _hosts(folder, limit) as hosts:
            await work(hosts)

    asyncio.run(main())


async def start(session: Session, script: str, **more: object) -> str:
    o = op.StartProgram("x", ("sh", "-c", script), **more)  # type: ignore[arg-type]
    return (await session.start_program(o)).id


async def shell(session: Session, command: str) -> str:
    items = [item async for item in await session.run_shell(op.RunShell("x", command))]
    assert isinstance(items[-1], Result)
    return items[-1].stdout


async def printed(session: Session, id: str, text: bytes) -> None:
    """Returns when it has printed this."""
    while text not in session.job(id).output.both.data():
        await asyncio.sleep(0.01)


def test_a_program_its_output_and_its_input_survive_their_host(tmp_path: Path) -> None:
    async def work(hosts: Hosts) -> None:
        before, began = time.time(), time.monotonic()
        id = await start(hosts.now, "echo one; echo err >&2; read x; echo two $x; exit 5")
        await printed(hosts.now, id, b"one\n")
        await printed(hosts.now, id, b"err\n")
        session = await hosts.crash()
        (known,) = await session.list_programs()
        assert (known.id, known.argv[0], known.exit_code) == (id, "sh", None)
        assert before - CLOCK <= known.started_at <= time.time() + CLOCK
        await session.job(id).send(b"more\n")
        result = await session.job(id).wait()
        assert (result.exit_code, result.stdout, result.stderr) == (5, "one\ntwo more\n", "err\n")
        session = await hosts.crash()  # it has ended, and the next one knows how
        result = await session.job(id).wait()
        assert (result.exit_code, result.stdout, result.stderr) == (5, "one\ntwo more\n", "err\n")
        assert result.duration_ms / 1000 <= time.monotonic() - began + CLOCK
        assert await start(session, "true") == f"p{int(id[1:]) + 1}"

    with_hosts(tmp_path, work)


def test_every_byte_is_there_once_however_often_its_host_dies(tmp_path: Path) -> None:
    async def work(hosts: Hosts) -> None:
        id = await start(hosts.now, "seq 1 1000000")
        for _ in range(8):
            before = hosts.now.job(id).output.total
            while hosts.now.job(id).output.total == before and not hosts.now.job(id).is_over:
                await asyncio.sleep(0.001)
            await hosts.crash()
        await hosts.now.job(id).wait()
        whole = b"".join(b"%d\n" % n for n in range(1, 1_000_001))
        read = b""
        while len(read) < len(whole):
            piece = hosts.now.job(id).output.read(len(read), 4 * MiB)
            assert piece.start == len(read) and piece.data
            read += piece.data
        assert read == whole

    with_hosts(tmp_path, work)


def test_a_follower_of_the_next_host_sees_all_of_it(tmp_path: Path) -> None:
    async def work(hosts: Hosts) -> None:
        id = await start(hosts.now, "echo past; read x; echo future")
        await printed(hosts.now, id, b"past\n")
        session = await hosts.crash()
        seen = b""
        async for item in await session.job(id).follow(None):
            if isinstance(item, Chunk):
                seen += item.data
                if seen == b"past\n":
                    await session.job(id).end_input()
            else:
                assert item.exit_code == 0
        assert seen == b"past\nfuture\n"
        with pytest.raises(Conflict):
            await session.job(id).send(b"late")

    with_hosts(tmp_path, work)


def test_a_follower_goes_on_at_its_byte_with_the_next_host(tmp_path: Path) -> None:
    """Also if that host knows less, because the guest sends again what was not stored."""

    async def work(hosts: Hosts) -> None:
        whole = b"".join(b"%d\n" % n for n in range(1, 300_001))
        id = await start(hosts.now, "seq 1 300000; read x; echo end")
        seen = b""
        session = hosts.now
        while len(seen) < len(whole):
            before = len(seen)
            async for item in await session.job(id).follow(None, len(seen)):
                assert isinstance(item, Chunk)
                seen += item.data
                if len(seen) >= min(before + 400_000, len(whole)):
                    break
            session = await hosts.crash()
        await session.job(id).end_input()
        items = [item async for item in await session.job(id).follow(None, len(seen))]
        assert seen + b"".join(i.data for i in items if isinstance(i, Chunk)) == whole + b"end\n"

    with_hosts(tmp_path, work)


def test_a_follower_that_knows_more_is_not_told_it_again(tmp_path: Path) -> None:
    async def work(hosts: Hosts) -> None:
        job = hosts.now.job(await start(hosts.now, "read x; printf 0123456789"))
        following = await job.follow(None, 4)
        first = asyncio.ensure_future(anext(following))
        await asyncio.sleep(0)  # it waits for output now
        await job.send(b"\n")
        items = [await first, *[item async for item in following]]
        assert b"".join(item.data for item in items if isinstance(item, Chunk)) == b"456789"

    with_hosts(tmp_path, work)


def test_an_offset_that_is_not_kept_is_told(tmp_path: Path) -> None:
    async def work(hosts: Hosts) -> None:
        id = await start(hosts.now, "head -c 40000000 /dev/zero")
        await hosts.now.job(id).wait()
        with pytest.raises(NotFound, match="byte 1000000 of the output is not kept any more"):
            async for _ in await hosts.now.job(id).follow(None, 1_000_000):
                pass

    with_hosts(tmp_path, work, 8 * MiB)


def test_an_input_that_was_closed_stays_closed(tmp_path: Path) -> None:
    async def work(hosts: Hosts) -> None:
        id = await start(hosts.now, "cat; sleep 1000")
        await hosts.now.job(id).end_input()
        await shell(hosts.now, "true")
        session = await hosts.crash()
        with pytest.raises(Conflict, match="closed"):
            await session.job(id).send(b"x")
        await session.job(id).kill()
        assert (await session.job(id).wait()).exit_code == 137

    with_hosts(tmp_path, work)


def test_shells_contexts_and_their_numbers_are_known_to_the_next_host(tmp_path: Path) -> None:
    async def work(hosts: Hosts) -> None:
        await shell(hosts.now, "x=7")
        name = await hosts.now.open_shell(op.OpenShell("x"))
        await hosts.now.code.open(op.OpenContext("x", context="lab", env={"A": "1"}))
        session = await hosts.crash()
        assert session.shells == {"main": None, name: None}
        assert session.code.opened == {"lab": wire.StartKernel("lab", None, {"A": "1"})}
        assert await shell(session, "echo $x") == "7\n"
        assert await session.open_shell(op.OpenShell("x")) != name

    with_hosts(tmp_path, work)


def test_the_last_ended_programs_are_known_and_older_ones_are_forgotten(tmp_path: Path) -> None:
    async def work(hosts: Hosts) -> None:
        for n in range(KEPT_PROCESSES + 6):
            id = await start(hosts.now, f"echo {n}")
            await hosts.now.job(id).wait()
        await start(hosts.now, "sleep 1000")
        for _ in range(2):
            known = await hosts.now.list_programs()
            assert len(known) == KEPT_PROCESSES + 1
            assert (await hosts.now.job(known[0].id).wait()).stdout == "6\n"
            with pytest.raises(NotFound):
                hosts.now.job("p1")
            assert not (tmp_path / "p1").exists() and (tmp_path / known[0].id).exists()
            await hosts.crash()

    with_hosts(tmp_path, work)


def test_programs_that_are_started_at_once_all_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hutch.engine.session.KEPT_PROCESSES", 2)

    async def work(hosts: Hosts) -> None:
        for _ in range(10):  # enough that have ended for each start to find some to forget
            await hosts.now.job(await start(hosts.now, ":")).wait()
        ids = await asyncio.gather(*(start(hosts.now, ":") for _ in range(60)))
        assert len(set(ids)) == 60
        for job in list(hosts.now._jobs.values()):
            await job.wait()
        assert await start(hosts.now, ":") not in ids
        assert len(await hosts.now.list_programs()) == 3
        in_guest = await survey(hosts.now.link)
        assert len(in_guest.jobs) == 3, "the guest still knows programs that were forgotten"

    with_hosts(tmp_path, work)


def test_input_that_is_sent_at_once_is_neither_mixed_nor_cut_off(tmp_path: Path) -> None:
    async def work(hosts: Hosts) -> None:
        job = hosts.now.job(await start(hosts.now, "sleep 0.2; uniq -c | tr -s ' '"))
        lines = [letter * 9 + b"\n" for letter in (b"a", b"b")]
        sending = [asyncio.create_task(job.send(line * 300_000)) for line in lines]
        await asyncio.sleep(0)  # both wait for room in the guest by now
        await asyncio.gather(*sending, job.end_input())
        assert (await job.wait()).stdout == " 300000 aaaaaaaaa\n 300000 bbbbbbbbb\n"
        with pytest.raises(Conflict):
            await job.send(b"more")

    with_hosts(tmp_path, work)


def test_a_host_that_leaves_keeps_nothing_open_and_the_box_goes_on(tmp_path: Path) -> None:
    async def work(hosts: Hosts) -> None:
        id = await start(hosts.now, "while :; do echo tick; sleep 0.05; done")
        await printed(hosts.now, id, b"tick\n")
        open_files = len(list(Path("/proc/self/fd").iterdir()))
        await hosts.now.leave()
        assert len(list(Path("/proc/self/fd").iterdir())) < open_files
        with pytest.raises(BoxLost):
            await hosts.now.job(id).wait()
        before = hosts.now.job(id).output.total
        session = await hosts.come()
        assert session.job(id).output.total >= before
        await printed(session, id, b"tick\n" * (before // 5 + 3))

    with_hosts(tmp_path, work)


def test_a_guest_that_hangs_up_takes_its_box_with_it(tmp_path: Path) -> None:
    async def work(hosts: Hosts) -> None:
        other = await hosts.box.connect()  # its guest hangs up on the one before
        await hosts.now.link.over.wait()
        other.close()
        with pytest.raises(BoxLost):
            while True:
                await hosts.box.stats()
                await asyncio.sleep(0.01)

    with_hosts(tmp_path, work)


def test_a_start_that_nobody_waits_for_any_more_is_undone(tmp_path: Path) -> None:
    async def work(hosts: Hosts) -> None:
        for pause in (0, 0, 0.001, 0.002, 0.003, 0.005):
            starting = asyncio.create_task(start(hosts.now, "sleep 1000"))
            await asyncio.sleep(pause)
            if starting.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await starting
        while hosts.now._undoing:
            await asyncio.sleep(0.01)
        listed = await hosts.now.list_programs()
        count = "grep -sc '^sleep' /proc/[0-9]*/comm | grep -c ':1$'"
        while int(await shell(hosts.now, count)) != len(listed):
            await asyncio.sleep(0.05)
        session = await hosts.crash()
        assert {p.id for p in await session.list_programs()} == {p.id for p in listed}

    with_hosts(tmp_path, work)


def test_ports_of_a_box_can_be_listed_and_talked_to(tmp_path: Path) -> None:
    server = (
        "import socket; s = socket.create_server(('127.0.0.1', 8080)); print('up', flush=True)\n"
        "while True:\n c, _ = s.accept(); c.sendall(c.recv(100).upper()); c.close()"
    )

    async def work(hosts: Hosts) -> None:
        session = hosts.now
        o = op.StartProgram("x", ("python3", "-c", server))
        id = (await session.start_program(o)).id
        await printed(session, id, b"up")
        assert await session.list_ports() == [Port(8080, "127.0.0.1")]
        for _ in range(2):
            tunnel = await hosts.now.dial(8080)
            await tunnel.write(b"hello")
            assert await tunnel.read(100) == b"HELLO" and await tunnel.read(100) == b""
            tunnel.close()
            await hosts.crash()
        with pytest.raises(NotFound):
            await hosts.now.dial(8081)

    with_hosts(tmp_path, work)


def test_the_working_directory_goes_out_and_in_as_a_tar_with_the_user_s_rights(
    tmp_path: Path,
) -> None:
    async def work(hosts: Hosts) -> None:
        session = hosts.now
        await shell(session, "mkdir -p d; echo hello > d/file; chmod 750 d; ln -s d/file link")
        data = b"".join([piece async for piece in session.tar()])
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            assert archive.getnames() == ["d", "link", "d/file"]
        await shell(session, "rm -r d link")

        async def slowly() -> AsyncIterator[bytes]:
            for at in range(0, len(data), 100):
                yield data[at : at + 100]

        assert await session.untar(slowly()) == 2
        assert await shell(session, "cat link; stat -c '%U %a' d") == "hello\nuser 750\n"

        async def broken() -> AsyncIterator[bytes]:
            yield data[:100]
            raise ValueError("the client went away")

        with pytest.raises(ValueError, match="went away"):
            await session.untar(broken())
        assert await shell(session, "echo fine") == "fine\n"

    with_hosts(tmp_path, work)


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def test_programs_that_have_ended_share_one_command_s_worth_of_disk(tmp_path: Path) -> None:
    async def work(hosts: Hosts) -> None:
        running = await start(hosts.now, "head -c 1500000 /dev/zero; sleep 1000")
        while hosts.now.job(running).output.total < 1_500_000:
            await asyncio.sleep(0.01)
        ids = []
        for _ in range(10):
            ids.append(await start(hosts.now, "head -c 1500000 /dev/zero"))
            result = await hosts.now.job(ids[-1]).wait()
            assert (result.total_bytes, result.kept) == (1_500_000, ids[-1])
            assert on_disk(tmp_path) < 1_500_000 + 2 * MiB + 256 * 1024
        for _ in range(2):
            session = hosts.now
            oldest, newest = session.job(ids[0]), session.job(ids[-1])
            result = await oldest.wait()
            assert (result.total_bytes, result.truncated, result.kept) == (1_500_000, True, None)
            assert "bytes not shown ..." in result.output, "nor told to read them"
            with pytest.raises(NotFound, match=f"{ids[0]!r} is not kept any more.*2 MiB"):
                await session.read_output(op.ReadOutput("x", ids[0], 0, 1))
            piece = await session.read_logs(op.ReadLogs("x", ids[0], 0, 2 * MiB))
            assert piece.start == piece.total - len(piece.data) > 0 and piece.total == 1_500_000
            assert len(newest.output.read(0, 2 * MiB).data) == 1_500_000
            assert len(session.job(running).output.read(0, 2 * MiB).data) == 1_500_000
            await hosts.crash()

    with_hosts(tmp_path, work, limit=2 * MiB)


def test_what_a_program_printed_is_no_room_for_others_while_nobody_hears_it(
    tmp_path: Path,
) -> None:
    async def work(hosts: Hosts) -> None:
        running = await start(hosts.now, "head -c 1500000 /dev/zero; sleep 1000")
        while hosts.now.job(running).output.total < 1_500_000:
            await asyncio.sleep(0.01)
        for _ in range(3):
            await hosts.now.job(await start(hosts.now, "head -c 1500000 /dev/zero")).wait()
        await hosts.now.leave()
        session = await hosts.come()
        assert len(session.job(running).output.read(0, 2 * MiB).data) == 1_500_000
        await session.close()
        assert session.job(running).is_over and on_disk(tmp_path) < 2 * MiB + 256 * 1024

    with_hosts(tmp_path, work, limit=2 * MiB)


@pytest.mark.parametrize("how", ["leave", "close"])
def test_an_adoption_that_fails_midway_leaves_no_task_and_no_socket(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hutch.engine.session.KEPT_PROCESSES", 1)

    async def work(hosts: Hosts) -> None:
        await start(hosts.now, "while :; do echo tick; sleep 0.05; done")
        ended = [await start(hosts.now, "read x") for _ in range(3)]
        for id in ended:
            await hosts.now.job(id).end_input()
        for id in ended:
            await hosts.now.job(id).wait()
        await hosts.now.leave()
        before = hosts.now
        tasks, files = asyncio.all_tasks(), len(list(Path("/proc/self/fd").iterdir()))
        coming = asyncio.create_task(hosts.come())
        while hosts.now is before or not hosts.now.running:
            await asyncio.sleep(0)
        coming.cancel()  # it has begun to read from the first, and has yet to forget the others
        with pytest.raises(asyncio.CancelledError):
            await coming
        await (hosts.now.leave() if how == "leave" else hosts.now.close())
        assert asyncio.all_tasks() == tasks
        assert len(list(Path("/proc/self/fd").iterdir())) <= files

    with_hosts(tmp_path, work)
