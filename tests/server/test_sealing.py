"""Secrets in the environment of a session: in its box, and nowhere that can be read beside it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import os
import sqlite3
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from services import ADMIN, opened, run, service

from hutch import operations as op
from hutch.engine.hibernate import Saved
from hutch.engine.sealing import KEY_FILE, MARK, Sealer, Unreadable
from hutch.errors import Conflict, IncompatibleBox, ServerUnavailable
from hutch.server.requests import digest_of
from hutch.server.store import SessionRecord, Store
from hutch.server.stored_requests import environment_in, request_of
from hutch.types import BoxInfo, Limits

SECRET = "sk-very-secret-5f1c9e7d"


def forms() -> list[bytes]:
    """As it is, and as base64 of it would be found, wherever it begins."""
    coded = [base64.b64encode(b"x" * n + SECRET.encode())[4:-4] for n in range(3)]
    return [SECRET.encode(), *coded]


def leaks(folder: Path) -> list[str]:
    found = []
    paths = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    for path in paths:
        # Files come and go: a launcher copies its code into the folder.
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and any(form in path.read_bytes() for form in forms()):
                found.append(str(path))
    return found


def processes_with_it() -> list[str]:
    """Of this machine and of the zygotes. In a box, programs have it: that is what it is for."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            status = (place / "status").read_text()
            depth = status.partition("NSpid:")[2].partition("\n")[0].split()
            names = ("cmdline", "environ") if len(depth) <= 2 else ("cmdline",)
            found += [
                str(place / name)
                for name in names
                if SECRET.encode() in (place / name).read_bytes()
            ]
        except OSError:
            continue
    return found


@pytest.mark.namespaces("the service of these tests has that backend")
def test_a_secret_of_a_session_is_nowhere_in_the_data_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def is_hidden(made: Any, id: str) -> None:
        await made._sessions.write_down()
        assert leaks(tmp_path) == [] and processes_with_it() == []

    async def shows(made: Any, id: str) -> None:
        assert (await run(made, id, 'echo "${#TOKEN}"')).stdout == f"{len(SECRET)}\n"

    async def main() -> str:
        async with service(tmp_path, kill=False) as made:
            info = await opened(made, env={"TOKEN": SECRET}, ttl_seconds=600)
            await shows(made, info.id)
            shell = await made.perform(op.OpenShell(info.id, env={"MORE": SECRET}), ADMIN)
            await made.perform(op.OpenContext(info.id, "lab", env={"MORE": SECRET}), ADMIN)
            await is_hidden(made, info.id)
        async with service(tmp_path, kill=False) as made:  # adopted while awake
            await shows(made, info.id)
            await made.perform(op.Hibernate(info.id), ADMIN)
            await is_hidden(made, info.id)
        assert leaks(tmp_path) == []
        async with service(tmp_path) as made:  # adopted while asleep
            await is_hidden(made, info.id)
            await shows(made, info.id)
            result = await made.perform(op.RunShell(info.id, "echo ${#MORE}", shell=shell), ADMIN)
            assert result.stdout == f"{len(SECRET)}\n"
            await is_hidden(made, info.id)
            await made.perform(op.CloseSession(info.id), ADMIN)
            record = await made._store.get(info.id)
            assert record.request["env"] == {}
        return info.id

    asyncio.run(main())
    assert leaks(tmp_path) == [] and SECRET not in caplog.text


def record(id: str, status: str = "running") -> SessionRecord:
    info = BoxInfo(id, "namespaces", "host", "ns", Limits(), "/", "user", 1.0, owner="ada")
    request = asdict(op.OpenSession(env={"TOKEN": SECRET, "EMPTY": "", "ü": "ß"}))
    return SessionRecord(replace(info, status=status), "box", request)  # type: ignore[arg-type]


def test_an_older_database_is_scrubbed_with_its_log_and_its_copies(tmp_path: Path) -> None:
    path = tmp_path / "hutch.db"

    async def old() -> None:
        store = await Store.open(path)
        for id, status in (("s1", "running"), ("s2", "asleep"), ("s3", "destroyed")):
            await store.insert(record(id, status))
        await store.close()

    asyncio.run(old())
    plain = json.dumps(record("s").request, separators=(",", ":"), default=asdict)
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("UPDATE sessions SET request = ?", (plain,))
    db.execute("PRAGMA application_id = 0")
    db.commit()
    copy = sqlite3.connect(tmp_path / "hutch.db.v1.bak")
    db.backup(copy)
    copy.close()
    files = [path, path.with_name("hutch.db-wal")]
    as_killed = [file.read_bytes() for file in files]
    db.close()
    for file, data in zip(files, as_killed, strict=True):  # as a server that was killed leaves them
        file.write_bytes(data)
    assert len(leaks(tmp_path)) >= 2

    async def new() -> None:
        store = await Store.open(path)
        try:
            assert leaks(tmp_path) == []
            for id in ("s1", "s2"):
                found = await store.get(id)
                assert found and found.request["env"].encode().startswith(MARK)
                env = {"TOKEN": SECRET, "EMPTY": "", "ü": "ß"}
                assert environment_in(found.request, store.sealer) == env
                same = await store.update(id, why="changed")
                assert environment_in(same.request, store.sealer) == env
            ended = await store.get("s3")
            assert ended and ended.request["env"] == {}
        finally:
            await store.close()

    asyncio.run(new())
    assert leaks(tmp_path) == []


def test_a_database_is_scrubbed_until_it_and_each_copy_are_clean(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, copy = tmp_path / "hutch.db", tmp_path / "hutch.db.v1.bak"

    async def open_and_close() -> None:
        await (await Store.open(path)).close()

    def run(*statements: str) -> object:
        with contextlib.closing(sqlite3.connect(path)) as db:
            for statement in statements:
                answer = db.execute(statement).fetchone()
            db.commit()
            return answer

    asyncio.run(open_and_close())
    run(
        "PRAGMA secure_delete = OFF",
        f"CREATE TABLE freed AS SELECT '{SECRET}' || hex(zeroblob(9999))",
        "DROP TABLE freed",
        "PRAGMA application_id = 0",
    )
    copy.write_bytes(b"no database" * 1000)
    assert leaks(tmp_path)
    asyncio.run(open_and_close())
    assert leaks(tmp_path) == []
    assert copy.name in caplog.text and run("PRAGMA application_id") == (0,)
    copy.unlink()
    asyncio.run(open_and_close())
    assert run("PRAGMA application_id") != (0,)


@pytest.mark.namespaces("the service of these tests has that backend")
def test_a_repeated_create_is_known_by_a_digest_that_nobody_can_guess_from(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"env": {"PIN": "1234"}, "idempotency_key": "k1", "ttl_seconds": 600}

    async def main() -> None:
        async with service(tmp_path, kill=False) as made:
            info = await opened(made, **asked)
            record = await made._store.get(info.id)
            assert record
            # What anybody could try with each PIN, who has the database and knows the rest.
            request = request_of(record.request, made._store.sealer)
            guess = digest_of(request, made._store.sealer)
            assert record.digest == guess
            unkeyed = hashlib.sha256(repr(request).encode()).hexdigest()
            other = Sealer(bytes(32))
            assert record.digest not in (unkeyed, other.digest(unkeyed), other.digest(guess))
        async with service(tmp_path) as made:  # a server that was started again
            assert (await opened(made, **asked)).id == info.id
            with pytest.raises(Conflict, match="used for another request"):
                await opened(made, **asked | {"env": {"PIN": "1235"}})

    asyncio.run(main())


def test_digests_of_an_older_database_are_keyed_and_still_known(tmp_path: Path) -> None:
    path = tmp_path / "hutch.db"
    request = op.OpenSession(env={"PIN": "1234"}, idempotency_key="k1")
    unkeyed = hashlib.sha256(repr(request).encode()).hexdigest()

    async def opened_store() -> Store:
        return await Store.open(path)

    async def old() -> None:
        store = await opened_store()
        await store.insert(replace(record("s1"), idempotency_key="k1", digest=unkeyed))
        await store.close()

    async def new() -> None:
        store = await opened_store()
        found = await store.by_idempotency_key("ada", "k1")
        assert found and found.digest == digest_of(request, store.sealer)
        await store.close()

    asyncio.run(old())
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA application_id = 0x48555431")  # sealed, before digests were keyed
        db.commit()
        with contextlib.closing(sqlite3.connect(tmp_path / "hutch.db.v1.bak")) as copy:
            db.backup(copy)
    asyncio.run(new())
    for file in tmp_path.iterdir():
        assert unkeyed.encode() not in file.read_bytes(), file


def test_what_was_sealed_is_read_with_its_key_only_and_not_if_it_was_changed(
    tmp_path: Path,
) -> None:
    one = Sealer.open(tmp_path)
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    for text in (b"", b"x", b"\0\0\0", os.urandom(100_000)):
        sealed = one.seal(text)
        assert Sealer.open(tmp_path).unseal(sealed) == text and sealed != one.seal(text)
    sealed = one.seal(b"text")
    for wrong in (sealed[:-2], sealed[:-1] + b"0", sealed.removeprefix(MARK), b"", MARK, b"zz"):
        if wrong != sealed:
            with pytest.raises(Unreadable):
                one.unseal(wrong)
    (tmp_path / "other").mkdir()
    with pytest.raises(Unreadable):
        Sealer.open(tmp_path / "other").unseal(sealed)
    (tmp_path / KEY_FILE).write_bytes(b"short")
    with pytest.raises(ServerUnavailable, match="damaged"):
        Sealer.open(tmp_path)


def test_without_its_key_an_environment_is_lost_and_it_is_said_why(tmp_path: Path) -> None:
    async def main() -> None:
        store = await Store.open(tmp_path / "hutch.db")
        await store.insert(record("s1"))
        await store.close()
        (tmp_path / KEY_FILE).unlink()
        store = await Store.open(tmp_path / "hutch.db")
        found = await store.get("s1")
        assert found
        with pytest.raises(IncompatibleBox, match=KEY_FILE):
            environment_in(found.request, store.sealer)
        await store.close()

    asyncio.run(main())


def test_what_an_older_version_saved_is_read_and_left_as_it_was(tmp_path: Path) -> None:
    files = tmp_path / "asleep-1-files"
    files.touch()
    manifest = Saved(files).write_down()
    before = manifest.read_bytes()
    assert Saved.found(manifest, Sealer.open(tmp_path)).files == files
    assert manifest.read_bytes() == before
    manifest.unlink()
    assert Saved(files).write_down(Sealer.open(tmp_path)).read_bytes().startswith(MARK)
