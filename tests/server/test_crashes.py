"""`kill -9` of the server: nothing is lost, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from services import ADMIN, Victim, clean_up, run, service

from hutch import operations as op
from hutch.errors import NoSession, SessionEnded
from hutch.server.service import Service


def first_word(victim: Victim) -> dict[str, int]:
    assert victim.process.stdout
    line = victim.process.stdout.readline()
    assert line, "it did not start"
    found: dict[str, int] = json.loads(line)
    return found


def adopted(folder: Path, look: Callable[[Service], object]) -> None:
    """What the next server finds."""

    async def main() -> None:
        async with service(folder) as made:
            await look(made)  # type: ignore[misc]

    asyncio.run(main())


def test_shells_kernels_and_programs_go_on_after_the_server_was_killed(tmp_path: Path) -> None:
    with Victim(tmp_path) as victim:
        first_word(victim)
        id = victim.ask("OpenSession", labels={"job": "7"}, ttl_seconds=600)["id"]
        victim.ask("RunShell", session=id, command="cd /tmp; A=kept; f() { echo fun; }")
        victim.ask("RunCode", session=id, code="x = 41")
        slow = "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.1; done"
        started = victim.ask("StartProgram", session=id, argv=["sh", "-c", slow])
        assert started["id"]
        before = victim.ask("GetSession", session=id)
        victim.kill()

    async def look(made: Service) -> None:
        assert made.adoption.adopted == 1
        info = await made.perform(op.GetSession(id), ADMIN)
        assert (info.status, info.labels) == ("running", {"job": "7"})
        assert abs(info.expires_at - before["expires_at"]) < 0.001
        assert (await run(made, id, "echo $A $(f) $PWD")).stdout == "kept fun /tmp\n"
        assert (await made.perform(op.RunCode(id, "x + 1"), ADMIN)).text == "42"
        done = await made.perform(op.WaitProgram(id, started["id"], True, 20), ADMIN)
        assert (done.exit_code, done.stdout) == (0, "1\n2\n3\n4\n5\n6\n7\n8\n")

    adopted(tmp_path, look)


def test_output_that_nobody_had_read_yet_is_not_lost(tmp_path: Path) -> None:
    with Victim(tmp_path) as victim:
        first_word(victim)
        id = victim.ask("OpenSession")["id"]
        much = "i=0; while [ $i -lt 40000 ]; do echo line $i; i=$((i+1)); done"
        started = victim.ask("StartProgram", session=id, argv=["bash", "-c", much])
        victim.kill()

    async def look(made: Service) -> None:
        done = await made.perform(op.WaitProgram(id, started["id"], True, 60), ADMIN)
        assert done.stdout == "".join(f"line {i}\n" for i in range(40000))

    adopted(tmp_path, look)


def test_a_session_that_is_due_while_no_server_runs_is_expired_by_the_next(tmp_path: Path) -> None:
    with Victim(tmp_path) as victim:
        first_word(victim)
        id = victim.ask("OpenSession", ttl_seconds=5)["id"]
        victim.kill()
    time.sleep(5.1)

    async def look(made: Service) -> None:
        assert made.adoption.expired == 1
        assert (await made.perform(op.GetSession(id), ADMIN)).status == "expired"
        with pytest.raises(SessionEnded, match="ttl"):
            await run(made, id, "true")

    adopted(tmp_path, look)


def test_one_that_sleeps_is_found_asleep_and_wakes(tmp_path: Path) -> None:
    with Victim(tmp_path) as victim:
        first_word(victim)
        id = victim.ask("OpenSession")["id"]
        victim.ask("RunShell", session=id, command="A=kept; echo hi > note; cd /tmp")
        victim.ask("RunCode", session=id, code="y = [1, 2]")
        assert "files" in victim.ask("Hibernate", session=id)["kept"]
        victim.kill()

    async def look(made: Service) -> None:
        assert (await made.perform(op.GetSession(id), ADMIN)).status == "asleep"
        result = await run(made, id, "echo $A $PWD; cat /workspace/note")
        assert result.stdout == "kept /tmp\nhi\n"
        assert result.woke
        assert (await made.perform(op.GetSession(id), ADMIN)).status == "running"

    adopted(tmp_path, look)


async def check(made: Service) -> list[str]:
    """Each session that lives can be used; each box is one of theirs. Answers their ids."""
    lives = await made.perform(op.ListSessions(status="live"), ADMIN)
    for info in lives:
        assert info.status in ("running", "asleep"), info
        assert (await run(made, info.id, "echo ok")).stdout == "ok\n"
    boxes = await made._backend.list()
    assert len(boxes) == len(lives), (boxes, lives)
    folders = {path.name for path in made._sessions._folder.iterdir()}
    known = {i.id for i in await made.perform(op.ListSessions(), ADMIN)}
    assert folders <= known, folders - known
    for path in made._sessions._folder.glob("*/asleep-*"):
        raise AssertionError(f"{path} is left of a sleep")
    return [info.id for info in lives]


OPERATIONS = ["OpenSession", "CloseSession", "Hibernate", "Wake", "ExtendSession"]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_crash_between_any_two_steps_leaves_no_orphan(tmp_path: Path, name: str) -> None:
    for step in range(100):
        folder = tmp_path / str(step)
        with Victim(folder) as victim:
            first_word(victim)
            id = victim.ask("OpenSession")["id"]
            victim.ask("RunShell", session=id, command="A=kept")
            if name == "Wake":
                victim.ask("Hibernate", session=id)
            victim.ask("die_at", step=step)
            fields = {} if name == "OpenSession" else {"session": id}
            more = {"ttl_seconds": 7200} if name == "ExtendSession" else {}
            survived = victim.ask(name, **fields, **more)
            victim.kill()

        async def look(made: Service, id: str = id, done: bool = bool(survived)) -> None:
            lives = await check(made)
            if name != "CloseSession":
                assert id in lives
                assert (await run(made, id, "echo $A")).stdout == "kept\n"
            elif done:
                assert id not in lives
            assert len(lives) <= 2

        adopted(folder, look)
        clean_up(folder)
        if survived:
            assert step > 1, "no step was ever died at"
            return
    raise AssertionError("it never came to its end")


def test_a_crash_while_the_pool_is_filled_leaves_no_orphan(tmp_path: Path) -> None:
    died = 0
    for step in range(0, 14, 2):
        folder = tmp_path / str(step)
        with Victim(folder) as victim:
            first_word(victim)
            victim.ask("die_at", step=step)
            died += victim.ask("size_pool", size=2) is None
            victim.kill()

        async def look(made: Service) -> None:
            assert await check(made) == []

        adopted(folder, look)
    assert died >= 2


def test_a_retried_create_makes_one_box_also_after_a_crash(tmp_path: Path) -> None:
    with Victim(tmp_path) as victim:
        first_word(victim)
        first = victim.ask("OpenSession", idempotency_key="k1")["id"]
        assert victim.ask("OpenSession", idempotency_key="k1")["id"] == first
        victim.kill()

    async def look(made: Service) -> None:
        again = await made.perform(op.OpenSession(idempotency_key="k1"), ADMIN)
        assert again.id == first
        assert len(await made.perform(op.ListSessions(status="live"), ADMIN)) == 1
        with pytest.raises(NoSession):
            await made.perform(op.GetSession("00000000-000"), ADMIN)

    adopted(tmp_path, look)


def test_a_hundred_sessions_are_adopted(tmp_path: Path) -> None:
    with Victim(tmp_path) as victim:
        first_word(victim)
        assert len(victim.ask("all_at_once", count=100)) == 100
        victim.kill()
    with Victim(tmp_path) as victim:
        assert first_word(victim) == {
            "adopted": 100,
            "expired": 0,
            "lost": 0,
            "stranded": 0,
            "swept": 0,
        }
    clean_up(tmp_path)
