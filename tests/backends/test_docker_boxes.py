"""Boxes of a real engine: what they are from the inside, and what is left of them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.server
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from docker_of_tests import BUSYBOX, DEBIAN, RUNTIME, Client, own_engine
from hutch import factory, wire
from hutch import operations as op
from hutch.backends.base import Spec
from hutch.backends.contained import OWN
from hutch.backends.docker import DockerBackend, bundled, owner_scope
from hutch.backends.docker.box import DockerBox
from hutch.backends.docker.config import find
from hutch.backends.docker.engine import HELPER, DockerEngine
from hutch.backends.docker.images import Resolver
from hutch.engine.engine import Engine
from hutch.engine.link import Link
from hutch.errors import (
    BackendUnavailable,
    BoxLost,
    HutchError,
    InvalidRequest,
    NotFound,
    StartFailed,
)
from hutch.testing.contract import running, sh
from hutch.types import Limits, Mount

SPEC = Spec(image=BUSYBOX)


@contextlib.asynccontextmanager
async def backend(host: str, **more: Any) -> AsyncIterator[DockerBackend]:
    made = DockerBackend(more.pop("bundle", factory.bundle), docker_host=host, **more)
    try:
        async with asyncio.timeout(100):
            yield made
    finally:
        await made.close()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def containers(engine: Client) -> list[dict[str, Any]]:
    """All that exist, whichever run of the tests they belong to."""
    found = json.loads(engine.call("GET", "/containers/json?all=1"))
    return [each for each in found if _owner(each) == os.getpid()]


def _owner(container: dict[str, Any]) -> int:
    parts = (container["Labels"] or {}).get(owner_scope.OWNER_SCOPE, "").split("/")
    return int(parts[2]) if len(parts) == 5 else 0


@pytest.fixture
def engine(docker_engine: Client) -> Iterator[Client]:
    yield docker_engine
    assert containers(docker_engine) == []


# --- inside -----------------------------------------------------------------------------


def test_a_box_has_no_rights_and_no_network(engine: Client) -> None:
    async def test() -> None:
        async with backend(engine.host) as made, running(made, SPEC) as (box, link):
            _, said = await sh(link, "cat /proc/self/status; id -u; cat /proc/net/dev")
            lines = said.decode().splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
                assert int(status[name], 16) == 0
            assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
            assert int(lines[-4]) in OWN and lines[-1].strip().startswith("lo:")
            assert (box.isolation, box.runtime, box.degraded) == ("ns", "runc", ())

    run(test)


def test_the_root_is_read_only_and_there_is_room_where_programs_expect_it(engine: Client) -> None:
    async def test() -> None:
        async with backend(engine.host) as made, running(made, SPEC) as (_, link):
            for path in ("/workspace", "/tmp", "/var/tmp", "/home/user", "/run", "/dev/shm"):
                assert (await sh(link, f"echo x > {path}/x"))[0] == 0, path
            for path in ("/", "/etc", "/bin", "/.hutch", "/.hutch-host"):
                assert (await sh(link, f"echo x > {path}/x"))[0] != 0, path
            assert await sh(link, "whoami; echo $HOME ~") == (0, b"user\n/home/user /home/user\n")

    run(test)


def test_variables_of_an_image_reach_programs_and_not_the_guest(engine: Client) -> None:
    name = "hutch-test/variables"
    tar = io.BytesIO(subprocess.run(["tar", "-cf-", "-T/dev/null"], capture_output=True).stdout)
    engine.import_image(name, tar, ["ENV LD_PRELOAD=/evil.so LD_TRACE_LOADED_OBJECTS=1 A=b"])

    async def test() -> None:
        async with backend(engine.host) as made, running(made, Spec(image=name)) as (box, link):
            async with Probe(engine) as probe:
                variables = Path(f"/proc/{await probe.pid(box)}/environ").read_text()
            assert "LD_" not in variables and "A=b" not in variables
            # There is no program in this image, so the guest itself is asked what it would give.
            with pytest.raises(NotFound):
                await link.ask(wire.Exec(["/bin/true"]))

    try:
        run(test)
    finally:
        engine.call("DELETE", f"/images/{name}")


class Probe:
    """The engine, asked beside the backend."""

    def __init__(self, engine: Client) -> None:
        self._host = engine.host

    async def __aenter__(self) -> Probe:
        self.engine = DockerEngine(find(self._host, {}))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.engine.close()

    async def pid(self, box: Any) -> int:
        return int((await self.engine.inspect(box.container))["State"]["Pid"])


def test_relaxing_the_user_and_the_root_makes_a_root_that_can_write(engine: Client) -> None:
    async def test() -> None:
        spec = replace(SPEC, user="root", relax=("user", "writable-root", "capabilities"))
        async with backend(engine.host) as made, running(made, spec) as (_, link):
            assert await sh(link, "id -u; echo x > /etc/x && cat /etc/x") == (0, b"0\nx\n")

    run(test)


def test_a_program_of_the_box_cannot_pose_as_its_guest(engine: Client) -> None:
    dial = (
        "import socket\n"
        "for n in range(50):\n"
        "    s = socket.socket(socket.AF_UNIX); s.settimeout(20)\n"
        "    s.connect('/.hutch-host/sock'); assert s.recv(1) == b'', n; s.close()\n"
        "print('refused')"
    )

    async def test() -> None:
        async with backend(engine.host) as made:
            box = await made.start(Spec(image=DEBIAN))
            link = await Link.open(await box.connect())
            async with link.call(wire.Exec(["python3", "-c", dial])) as call:
                said = [event.data async for event in call if isinstance(event, wire.Data)]
            assert said == [b"refused\n"]
            await link.close()
            link = await Link.open(await box.connect())
            assert await sh(link, "echo ok") == (0, b"ok\n")
            await link.close()

    run(test)


def test_a_program_of_the_box_cannot_pose_as_a_relay(engine: Client) -> None:
    dial = (
        "import socket\ns = socket.socket(socket.AF_UNIX); s.settimeout(20)\n"
        "try:\n    s.connect('\\0hutch'); s.send(b'r'); s.send(b'c'); print(s.recv(1))\n"
        "except OSError as exc: print('refused', exc)"
    )

    async def test() -> None:
        async with far(engine.host) as made, running(made, Spec(image=DEBIAN)) as (_, link):
            async with link.call(wire.Exec(["python3", "-c", dial])) as call:
                said = b"".join([e.data async for e in call if isinstance(e, wire.Data)])
            assert b"b''" in said or b"refused" in said
            assert await sh(link, "echo ok") == (0, b"ok\n")

    run(test)


def test_a_box_that_is_full_of_processes_still_answers(engine: Client) -> None:
    async def test() -> None:
        spec = replace(SPEC, limits=Limits(pids=16))
        async with backend(engine.host) as made, running(made, spec) as (box, link):
            bomb = "while true; do sleep 600 & done"
            call = link.call(wire.Exec(["sh", "-c", bomb]))
            async with call:
                try:
                    async with asyncio.timeout(3):
                        async for _ in call:
                            pass  # "can't fork"
                except TimeoutError:
                    pass
                assert (await box.stats()).pids is not None
                await link.ask(wire.Activity())
            assert await sh(link, "echo alive") == (0, b"alive\n")

    run(test)


def test_memory_that_runs_out_kills_the_program_and_is_counted(engine: Client) -> None:
    async def test() -> None:
        spec = Spec(image=DEBIAN, limits=Limits(memory=64 << 20))
        async with backend(engine.host) as made, running(made, spec) as (box, link):
            before = box.oom_kills()
            eater = "x = []\nwhile True: x.append(bytearray(1 << 20))"
            ended = await link.ask(wire.Exec(["python3", "-c", eater]))
            assert ended["exit_code"] == 137 and box.oom_kills() > before
            assert await sh(link, "echo alive") == (0, b"alive\n")

    run(test)


def test_a_box_whose_rooms_are_all_full_still_answers(engine: Client) -> None:
    async def test() -> None:
        spec = replace(SPEC, limits=Limits(memory=64 << 20))
        async with backend(engine.host) as made, running(made, spec) as (box, link):
            for path in ("/workspace", "/tmp", "/var/tmp", "/home/user", "/run", "/dev/shm"):
                code, said = await sh(link, f"cat /dev/zero > {path}/x")
                assert code == 1 and b"No space left" in said, path
            assert box.oom_kills() == 0
            assert await sh(link, "rm /tmp/x && echo alive > /tmp/x && cat /tmp/x") == (
                0, b"alive\n")  # fmt: skip

    run(test)


# --- images -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["--privileged", ";$(id)", "a\nb", "../containers/json", "A B"])
def test_what_is_no_image_is_refused_and_makes_nothing(engine: Client, name: str) -> None:
    async def test() -> None:
        async with backend(engine.host) as made:
            with pytest.raises(InvalidRequest):
                await made.start(Spec(image=name))

    run(test)


def test_an_image_that_cannot_be_had_says_why_and_what_to_do(engine: Client) -> None:
    async def test() -> None:
        async with backend(engine.host) as made:
            with pytest.raises(NotFound, match=r"'127\.0\.0\.1:9/no/such'.*could not pull"):
                await made.start(Spec(image="127.0.0.1:9/no/such"))

    run(test)


def test_an_image_of_ours_that_is_not_built_is_never_pulled(engine: Client) -> None:
    async def test() -> None:
        class Offline(DockerEngine):
            async def pull(self, reference: str) -> AsyncIterator[dict[str, Any]]:
                raise AssertionError(f"{reference} was pulled")
                yield {}

        class Strict(DockerBackend):
            def _engine(self) -> DockerEngine:
                return Offline(find(engine.host, {}))

        made = Strict(factory.bundle, docker_host=engine.host)
        try:
            with pytest.raises(NotFound, match="`hutch image build --backend docker node`"):
                await made.start(Spec(image="hutch/node"))
            with pytest.raises(NotFound, match="is not pulled"):
                await made.start(Spec(image="docker.io/hutch/mine:1"))
            with pytest.raises(NotFound, match="gone from the engine"):
                await made.start(Spec(image="hutch/node", digest=f"sha256:{'0' * 64}"))
        finally:
            await made.close()

    run(test)


def test_an_image_that_is_ours_under_another_name_is_suggested(engine: Client) -> None:
    class Offline(DockerEngine):
        async def pull(self, reference: str) -> AsyncIterator[dict[str, Any]]:
            raise NotFound("there is no such repository")
            yield {}

    async def test() -> None:
        offline = Offline(find(engine.host, {}))
        try:
            with pytest.raises(NotFound, match=r"Did you mean hutch/node\? `hutch image build"):
                await Resolver(offline).image("node", None)
            with pytest.raises(NotFound, match=r"Did you mean hutch/mine\?$"):
                await Resolver(offline).image("mine", None)
            with pytest.raises(NotFound, match="`docker pull` may say more"):
                await Resolver(offline).image("team/other", None)
        finally:
            await offline.close()

    engine.tag(BUSYBOX, "hutch/mine")
    try:
        run(test)
    finally:
        engine.call("DELETE", "/images/hutch/mine")


def test_a_pin_is_found_by_the_digest_of_any_registry(engine: Client) -> None:
    pin = f"sha256:{'d' * 64}"

    class Pushed(DockerEngine):
        """One whose image was pushed somewhere, as it would say."""

        async def images(self) -> list[dict[str, Any]]:
            id = (await self.image(BUSYBOX))["Id"]
            found = await super().images()
            there = [f"registry.example/x@{pin}"]
            return [{**each, "RepoDigests": there if each["Id"] == id else []} for each in found]

    async def test() -> None:
        pushed = Pushed(find(engine.host, {}))
        try:
            image = await Resolver(pushed).image(BUSYBOX, pin)
            assert image.id == (await pushed.image(BUSYBOX))["Id"]
        finally:
            await pushed.close()

    run(test)


class _Closed(http.server.BaseHTTPRequestHandler):
    """A registry that wants a password, and has nothing."""

    said: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "")
        self.said.add(given)
        self.send_response(404 if given else 401)
        self.send_header("WWW-Authenticate", 'Basic realm="here"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        return


def test_a_pull_has_the_password_that_docker_login_wrote_down(
    engine: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    config, password = tmp_path / "config.json", base64.b64encode(b"ann:secret").decode()

    async def test() -> None:
        async with backend(engine.host) as made:
            config.write_text(json.dumps({"auths": {host: {"auth": password}}}))
            with pytest.raises(NotFound, match="could not pull"):
                await made.start(Spec(image=f"{host}/private"))
            assert f"Basic {password}" in _Closed.said
            config.write_text(json.dumps({"credsStore": "desktop"}))
            with pytest.raises(NotFound, match="credential helper"):
                await made.start(Spec(image=f"{host}/private"))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Closed) as registry:
        host = f"127.0.0.1:{registry.server_port}"
        serving = threading.Thread(target=registry.serve_forever)
        serving.start()
        try:
            run(test)
        finally:
            registry.shutdown()
            serving.join()


def test_a_runtime_that_is_not_there_is_refused_with_those_that_are(engine: Client) -> None:
    async def test() -> None:
        async with backend(engine.host) as made:
            with pytest.raises(InvalidRequest, match=r"no runtime 'fast'.*runc"):
                await made.start(replace(SPEC, runtime="fast"))

    run(test)


def test_an_image_for_another_machine_is_refused(engine: Client) -> None:
    name = "hutch-test/foreign"
    other = "arm64" if os.uname().machine == "x86_64" else "amd64"
    layer = io.BytesIO()
    tarfile.open(fileobj=layer, mode="w").close()
    config = json.dumps(
        {
            "architecture": other,
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer.getvalue())]},
        }
    )
    manifest = json.dumps([{"Config": "c.json", "RepoTags": [f"{name}:latest"],
                            "Layers": ["l.tar"]}])  # fmt: skip
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for file, content in (("c.json", config.encode()), ("l.tar", layer.getvalue()),
                              ("manifest.json", manifest.encode())):  # fmt: skip
            entry = tarfile.TarInfo(file)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    made.seek(0)
    engine.call("POST", "/images/load", body=made)

    async def test() -> None:
        async with backend(engine.host) as made:
            with pytest.raises(InvalidRequest, match=f"for {other}"):
                await made.start(Spec(image=name))

    try:
        run(test)
    finally:
        engine.call("DELETE", f"/images/{name}")


def _digest(content: bytes) -> str:
    import hashlib

    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@contextlib.contextmanager
def with_volumes(engine: Client, *volumes: str) -> Iterator[str]:
    """An image in which the bundle's folder is the image's own, and with these volumes."""
    name, made = "hutch-test/volumes", io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for path in ("data/theirs", ".hutch/site/hutch/__init__.py"):
            tar.addfile(tarfile.TarInfo(path))
    made.seek(0)
    engine.import_image(name, made, [f"VOLUME {json.dumps(volumes)}"])
    try:
        yield name
    finally:
        engine.call("DELETE", f"/images/{name}")


def volumes_of(engine: Client) -> set[str]:
    return {each["Name"] for each in json.loads(engine.call("GET", "/volumes"))["Volumes"] or []}


@pytest.mark.parametrize(
    "volumes",
    [("/.hutch/site",), ("//.hutch/site",), ("/data/../.hutch/site",), ("/.hutch-host",),
     tuple(f"/v{n}" for n in range(17))],
    ids=["ours", "ours with slashes", "ours by a detour", "the meeting", "too many"],
)  # fmt: skip
def test_an_image_whose_volumes_would_hide_what_is_ours_is_refused_and_makes_nothing(
    engine: Client, volumes: tuple[str, ...]
) -> None:
    async def test() -> None:
        async with backend(engine.host) as made:
            with pytest.raises(InvalidRequest, match="volume"):
                await made.start(Spec(image=name))

    before = volumes_of(engine)
    with with_volumes(engine, *volumes) as name:
        run(test)
        assert volumes_of(engine) == before


def test_a_volume_of_an_image_is_a_room_and_none_of_the_engine_s(engine: Client) -> None:
    async def test() -> None:
        async with backend(engine.host) as made, running(made, Spec(image=name)) as (_, link):
            with pytest.raises(NotFound):
                await link.ask(wire.Stat("/data/theirs"))
            await link.ask(wire.Mkdir("/data/ours"))
            assert volumes_of(engine) == before

    before = volumes_of(engine)
    with with_volumes(engine, "/data") as name:
        run(test)


def test_a_box_starts_from_the_very_image_that_it_is_pinned_to(engine: Client) -> None:
    name = "hutch-test/moving"

    def import_(content: bytes) -> None:
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w") as tar:
            entry = tarfile.TarInfo("what")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        made.seek(0)
        engine.import_image(name, made)

    async def content(link: Link) -> bytes:
        async with link.call(wire.Read("/what")) as call:
            return b"".join([e.data async for e in call if isinstance(e, wire.Data)])

    async def test() -> None:
        async with backend(engine.host) as made:
            import_(b"one")
            async with running(made, Spec(image=name)) as (box, link):
                assert await content(link) == b"one"
                pin = box.digest
            import_(b"two")
            async with running(made, Spec(image=name, digest=pin)) as (box, link):
                assert await content(link) == b"one" and box.digest == pin
            async with backend(engine.host) as other, running(other, Spec(image=name)) as (box, _):
                assert box.digest != pin
            engine.call("DELETE", f"/images/{pin}?force=1")
            async with backend(engine.host) as other:
                with pytest.raises(NotFound):
                    await other.start(Spec(image=name, digest=pin))

    try:
        run(test)
    finally:
        engine.call("DELETE", f"/images/{name}?force=1")


# --- folders of this machine ------------------------------------------------------------


def test_files_in_a_mounted_folder_keep_its_owner(engine: Client, tmp_path: Path) -> None:
    os.chown(tmp_path, 4321, 4322)

    async def test() -> None:
        spec = replace(SPEC, mounts=(Mount(str(tmp_path), "/workspace"),
                                     Mount("/usr", "/data", read_only=True)))  # fmt: skip
        async with backend(engine.host) as made, running(made, spec) as (box, link):
            assert await sh(link, "echo hi > new; id -u; whoami") == (0, b"4321\nuser\n")
            assert (await sh(link, "echo x > /data/x"))[0] != 0
            assert "uid 4321" in box.degraded[0]

    run(test)
    info = (tmp_path / "new").stat()
    assert (info.st_uid, info.st_gid) == (4321, 4322)


def test_a_folder_of_root_s_is_refused_and_nothing_is_made(engine: Client, tmp_path: Path) -> None:
    async def test() -> None:
        async with backend(engine.host) as made:
            with pytest.raises(InvalidRequest, match="belongs to root"):
                await made.start(replace(SPEC, mounts=(Mount(str(tmp_path), "/workspace"),)))

    run(test)


def test_sessions_of_a_server_share_a_workspace_of_its_own(engine: Client, tmp_path: Path) -> None:
    place = tmp_path / "workspaces/w"
    place.mkdir(parents=True)
    (place / "old").write_text("old")

    async def test() -> None:
        spec = replace(SPEC, mounts=(Mount(str(place), "/workspace"),), give=(str(place),))
        async with backend(engine.host, lasting=str(tmp_path / "run")) as made:
            one, two = await asyncio.gather(made.start(spec), made.start(spec))
            for number, box in enumerate((one, two)):
                link = await Link.open(await box.connect())
                assert (await sh(link, f"echo {number} >> old"))[0] == 0
                await link.close()

    run(test)
    assert (place / "old").read_text() == "old0\n1\n" and (place / "old").stat().st_uid in OWN


# --- through the engine -----------------------------------------------------------------


class _Far(DockerBackend):
    def _engine(self) -> DockerEngine:
        engine = super()._engine()
        engine.treat_as_remote()
        return engine


@contextlib.asynccontextmanager
async def far(host: str, **more: Any) -> AsyncIterator[DockerBackend]:
    made = _Far(more.pop("bundle", factory.bundle), docker_host=host, **more)
    try:
        async with asyncio.timeout(100):
            yield made
    finally:
        await made.close()


def test_a_far_engine_gets_the_bundle_once_and_no_folder(engine: Client, tmp_path: Path) -> None:
    volume = f"hutch-bundle-{factory.bundle().path.name}"
    with contextlib.suppress(Exception):
        engine.call("DELETE", f"/volumes/{volume}")

    async def test() -> None:
        async with far(engine.host) as one, far(engine.host) as two:
            boxes = await asyncio.gather(*(made.start(SPEC) for made in (one, two, one)))
            for box in boxes:
                link = await Link.open(await box.connect())
                assert await sh(link, "ls /.hutch/lib | grep -c ld-linux") == (0, b"1\n")
                assert (await sh(link, "ls /.hutch-host"))[0] != 0
                await link.close()
            with pytest.raises(InvalidRequest, match="on this machine"):
                mounts = (Mount(str(tmp_path), "/workspace", read_only=True),)
                await one.start(replace(SPEC, mounts=mounts))

    run(test)
    engine.call("DELETE", f"/volumes/{volume}")  # it still exists, and is unused


@contextlib.asynccontextmanager
async def over_tcp(
    path: str, connections: list[asyncio.StreamWriter] | None = None
) -> AsyncIterator[str]:
    """The address of an engine's socket, as if it were on another machine.

    `connections`: a list that gets those that are made.
    """

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
            target.write_eof()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if connections is not None:
            connections.append(writer)
        far_reader, far_writer = await asyncio.open_unix_connection(path)
        try:
            await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))
        finally:
            far_writer.close()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def test_an_engine_behind_tcp_is_a_far_one(engine: Client) -> None:
    async def test() -> None:
        async with (
            over_tcp(engine.host.removeprefix("unix://")) as url,
            backend(url) as made,
            running(made, SPEC) as (_, link),
        ):
            code, out = await sh(link, "head -c 5000000 /dev/zero")
            assert (code, len(out)) == (0, 5_000_000)
            assert (await sh(link, "ls /.hutch-host"))[0] != 0

    run(test)


def test_a_session_goes_on_when_the_way_to_a_far_engine_broke(engine: Client) -> None:
    async def test() -> None:
        ways: list[asyncio.StreamWriter] = []
        async with over_tcp(engine.host.removeprefix("unix://"), ways) as url:
            sessions = Engine(DockerBackend(factory.bundle, docker_host=url))
            try:
                id = (await sessions.perform(op.OpenSession(image=BUSYBOX))).id
                await sessions.perform(op.RunShell(id, "WORD=kept; cd /tmp"))
                argv = ("sh", "-c", "read line; echo got $line; exit 7")
                program = await sessions.perform(op.StartProgram(id, argv))
                session = sessions._sessions[id]._session
                assert session
                first = session.link
                for way in ways:
                    way.transport.abort()
                async with asyncio.timeout(60):
                    await session.links.after(first)
                result = await sessions.perform(op.RunShell(id, "echo $WORD $PWD"))
                assert result.stdout == "kept /tmp\n"
                await sessions.perform(op.SendInput(id, program.id, b"it\n"))
                result = await sessions.perform(op.WaitProgram(id, program.id, ended=True))
                assert (result.exit_code, result.stdout) == (7, "got it\n")
            finally:
                await sessions.close()

    run(test)


def test_a_box_that_ends_under_a_relay_is_lost_at_once(engine: Client) -> None:
    async def test() -> None:
        async with far(engine.host) as made:
            box = await made.start(SPEC)
            link = await Link.open(await box.connect())
            engine.call("DELETE", f"/containers/{box.container}?force=1")  # type: ignore[attr-defined]
            async with asyncio.timeout(120):
                await link.over.wait()
            with pytest.raises(BoxLost):
                await box.connect()
            await box.kill()
            await link.close()

    run(test)


class _Watched(DockerEngine):
    waits = 0

    async def wait(self, container: str) -> None:
        type(self).waits += 1
        await super().wait(container)


class _FarAndWatched(DockerBackend):
    def _engine(self) -> DockerEngine:
        engine = _Watched(find(self._docker_host, {}))
        engine.treat_as_remote()
        return engine


def test_a_far_box_is_watched_again_after_its_engine_was_gone(tmp_path: Path) -> None:
    with own_engine(live_restore=True) as engine:

        async def test() -> None:
            made = _FarAndWatched(
                factory.bundle, docker_host=engine.host, lasting=str(tmp_path / "run")
            )
            try:
                box = await made.start(SPEC)
                await box.outlive(600)
                link = await Link.open(await box.connect())
                await asyncio.to_thread(engine.stop)
                async with asyncio.timeout(60):
                    await link.over.wait()
                await link.close()
                engine.start()  # not from a thread: it would end with that
                link = await Link.open(await box.connect())
                assert await sh(link, "echo ok") == (0, b"ok\n")
                assert _Watched.waits == 2
                await link.close()
            finally:
                await made.close()

        run(test)
        assert json.loads(engine.call("GET", "/containers/json?all=1")) == []


def test_a_kill_that_failed_can_be_tried_again(tmp_path: Path) -> None:
    with own_engine(live_restore=True) as engine:

        async def test() -> None:
            async with far(engine.host, lasting=str(tmp_path / "run")) as made:
                box = await made.start(SPEC)
                await asyncio.to_thread(engine.stop)
                with pytest.raises(BackendUnavailable):
                    await box.kill()
                with pytest.raises(BoxLost):
                    await box.connect()
                engine.start()  # not from a thread: it would end with that
                await box.kill()
                assert json.loads(engine.call("GET", "/containers/json?all=1")) == []
                await box.kill()

        run(test)


# --- what becomes of boxes --------------------------------------------------------------


def test_a_container_that_is_removed_behind_our_back_is_a_lost_box(engine: Client) -> None:
    async def test() -> None:
        async with backend(engine.host) as made:
            box = await made.start(SPEC)
            link = await Link.open(await box.connect())
            engine.call("DELETE", f"/containers/{box.container}?force=1")  # type: ignore[attr-defined]
            async with asyncio.timeout(120):
                await link.over.wait()
            for ask in (box.connect, box.stats):
                with pytest.raises(BoxLost):
                    await ask()
            assert await made.list() == []
            await box.kill()
            await link.close()

    run(test)


def test_a_start_that_is_cancelled_at_any_moment_leaves_nothing(
    engine: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    async def test() -> None:
        async with backend(engine.host) as made:
            await (await made.start(SPEC)).kill()
            for pause in (0.0, 0.01, 0.03, 0.06, 0.1, 0.2):
                start = asyncio.create_task(made.start(SPEC))
                await asyncio.sleep(pause)
                start.cancel()
                await asyncio.gather(start, return_exceptions=True)

    run(test)
    assert containers(engine) == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [backend, far])
def test_a_box_of_a_backend_that_was_closed_is_gone(engine: Client, kind: Any) -> None:
    async def test() -> None:
        async with kind(engine.host) as made:
            box = await made.start(SPEC)
        await box.kill()
        with pytest.raises(BoxLost):
            await box.connect()

    run(test)


def test_a_number_of_a_process_that_has_ended_kills_nobody(engine: Client) -> None:
    async def test() -> None:
        async with backend(engine.host) as made:
            box = await made.start(SPEC)
            assert isinstance(box, DockerBox)
            with subprocess.Popen(["sleep", "600"]) as stranger:
                # Later, the guest's number may be a stranger's.
                box._record = replace(box._record, guest=stranger.pid)
                box._engine = DockerEngine(
                    find("unix:///nowhere", {})
                )  # so that it must do it itself
                await box.kill()
                await box._engine.close()
                assert stranger.poll() is None
                stranger.kill()

    run(test)


@pytest.mark.parametrize("kind", [backend, far])
def test_a_backend_that_is_closed_while_a_box_starts_leaves_nothing(
    engine: Client, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    async def test() -> None:
        for pause in (0.0, 0.01, 0.1, 0.3):
            async with kind(engine.host) as made:
                start = asyncio.create_task(made.start(SPEC))
                await asyncio.sleep(pause)
                await made.close()
                ended = (await asyncio.gather(start, return_exceptions=True))[0]
                if isinstance(ended, BaseException):
                    assert isinstance(ended, BackendUnavailable) and "closed" in str(ended)
                else:
                    await ended.kill()  # it came before that
                assert containers(engine) == []

    run(test)
    assert list(tmp_path.iterdir()) == []


def test_a_backend_that_is_closed_while_it_pulls_says_so(engine: Client) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as registry:
            registry.setblocking(False)
            name = f"127.0.0.1:{registry.getsockname()[1]}/slow"
            async with backend(engine.host) as made:
                start = asyncio.create_task(made.start(Spec(image=name)))
                asked, _ = await asyncio.get_running_loop().sock_accept(registry)
                with asked:  # and no answer, ever
                    await made.close()
                    with pytest.raises(BackendUnavailable, match="closed"):
                        await start

    run(test)


def test_a_folder_that_was_tidied_away_does_not_keep_a_backend_from_closing(
    engine: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    async def test() -> None:
        async with backend(engine.host) as made:
            await made.start(SPEC)
            for path in tmp_path.iterdir():
                shutil.rmtree(path)

    run(test)
    assert containers(engine) == []


def test_boxes_started_at_once_are_all_there_and_all_go(engine: Client) -> None:
    async def test() -> None:
        async with backend(engine.host) as made:
            boxes = await asyncio.gather(*(made.start(SPEC) for _ in range(6)))
            assert sorted(await made.list()) == sorted(box.id for box in boxes)

    run(test)


@pytest.mark.parametrize("kind", [backend, far])
@pytest.mark.parametrize(
    ("module", "orders", "words"),
    [("nothing", {}, "No module named"),
     ("contained", {"limits": None}, "could not start: orders"),
     ("contained", {"private": "/proc/x"}, "could not start: private folder: No such file")],
)  # fmt: skip
def test_a_guest_that_does_not_come_up_is_heard(
    engine: Client, kind: Any, module: str, orders: dict[str, Any], words: str
) -> None:
    class Broken:
        def __init__(self) -> None:
            self.whole = factory.bundle()
            self.path = self.whole.path

        def command(self, wanted: str, *args: str, at: str = "/.hutch") -> list[str]:
            if wanted != "hutch.guest.contained":
                return self.whole.command(wanted, *args, at=at)
            changed = json.dumps({**json.loads(args[0]), **orders})
            return self.whole.command(f"hutch.guest.{module}", changed, at=at)

    async def test() -> None:
        async with kind(engine.host, bundle=Broken) as made:
            with pytest.raises(StartFailed, match=words):
                await made.start(SPEC)

    run(test)


HOST = """
import asyncio, sys
from hutch import factory
from hutch.backends.base import Spec
from hutch.backends.docker import DockerBackend
from hutch.engine.link import Link
from hutch import wire
async def main(host, image, lasting):
    made = DockerBackend(factory.bundle, docker_host=host, lasting=lasting or None)
    box = await made.start(Spec(image=image))
    await box.outlive(60)
    link = await Link.open(await box.connect())
    await link.ask(wire.ShellCommand("main", "A=1"))
    print(box.id, box.container, flush=True)
    await asyncio.sleep(600)
asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.contextmanager
def killed_host(engine: Client, lasting: str = "") -> Iterator[tuple[str, str]]:
    """The box and the container of a process that was killed."""
    argv = [sys.executable, "-c", HOST, engine.host, BUSYBOX, lasting]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout
        box, container = host.stdout.readline().split()
        host.send_signal(signal.SIGKILL)
    yield box, container


def test_nothing_is_left_of_a_process_that_is_killed(engine: Client) -> None:
    with killed_host(engine) as (_, container):
        deadline = time.monotonic() + 60
        while f'"{container}"' in engine.call("GET", "/containers/json?all=1").decode():
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_what_a_killed_server_leaves_the_next_one_adopts(engine: Client, tmp_path: Path) -> None:
    async def test(box: str) -> None:
        async with backend(engine.host, lasting=str(tmp_path / "run")) as made:
            assert await made.list() == [box]
            link = await Link.open(await (await made.adopt(box)).connect())
            said = await link.ask(wire.ShellCommand("main", "test $A = 1"))
            assert said["exit_code"] == 0
            await link.close()
        assert os.listdir(tmp_path / "run/docker") == []

    async def seen(box: str) -> owner_scope.FoundContainer:
        async with Probe(engine) as probe:
            return next(each for each in await owner_scope.boxes(probe.engine) if each.id == box)

    with killed_host(engine, str(tmp_path / "run")) as (box, container):
        left = asyncio.run(seen(box))
        assert (left.owner, left.is_waiting) == (f"server {tmp_path.resolve()}", True)
        asyncio.run(test(box))
    assert f'"{container}"' not in engine.call("GET", "/containers/json?all=1").decode()


def name_of_a_dead_process() -> str:
    return subprocess.run(
        [sys.executable, "-c",
         "from hutch.backends.docker import owner_scope; print(owner_scope.name_of_process())"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip


def test_what_the_dead_made_for_a_moment_is_removed_too(engine: Client) -> None:
    async def test() -> None:
        async with Probe(engine) as probe:
            made = {}
            for owner in (name_of_a_dead_process(), owner_scope.name_of_process()):
                image = await probe.engine.empty_image(owner)
                body = {"Image": image, "Cmd": ["x"], "Labels": {HELPER: owner}}
                helper = await probe.engine.create(body, f"hutch-users-{os.urandom(8).hex()}")
                other = await probe.engine.create(body, f"hutch-test-{os.urandom(8).hex()}")
                made[owner] = helper, other, image
            (dead, _, old), (living, other, image) = made.values()
            await probe.engine.remove(made[next(iter(made))][1])
            try:
                assert len(await owner_scope.remove_abandoned(probe.engine)) >= 2
                for id in (living, other):
                    assert await probe.engine.inspect(id)
                assert await probe.engine.image(image)
                with pytest.raises(NotFound):
                    await probe.engine.inspect(dead)
                with pytest.raises(NotFound):
                    await probe.engine.image(old)
            finally:
                for id in (dead, living, other):
                    await probe.engine.remove(id)
                await probe.engine.remove_image(image)
                await probe.engine.remove_image(old)

    run(test)


def test_what_cannot_be_removed_does_not_keep_the_rest(engine: Client) -> None:
    class Stubborn(DockerEngine):
        async def remove(self, container: str) -> None:
            if container == first:
                raise BackendUnavailable("it stays")
            await super().remove(container)

    first, owner = "", name_of_a_dead_process()

    async def test() -> None:
        nonlocal first
        stubborn = Stubborn(find(engine.host, {}))
        image = await stubborn.empty_image(owner)
        body = {"Image": image, "Cmd": ["x"], "Labels": {HELPER: owner}}
        names = [f"hutch-users-{os.urandom(8).hex()}" for _ in range(3)]
        made = [await stubborn.create(body, name) for name in names]
        try:
            first = made[1]
            with pytest.raises(BackendUnavailable, match="it stays"):
                await owner_scope.remove_abandoned(stubborn)
            for id in (made[0], made[2]):
                with pytest.raises(NotFound):
                    await stubborn.inspect(id)
        finally:
            first = ""
            for id in made:
                await stubborn.remove(id)
            await stubborn.remove_image(image)
            await stubborn.close()

    run(test)


def test_a_volume_is_filled_by_another_if_who_began_it_is_dead(engine: Client) -> None:
    async def test() -> None:
        async with Probe(engine) as probe:
            image = (await probe.engine.image(BUSYBOX))["Id"]
            name = f"hutch-bundle-test-{os.urandom(4).hex()}"
            body = {"Image": image, "Cmd": ["x"], "Labels": {HELPER: name_of_a_dead_process()}}
            await probe.engine.create(body, name)
            living = await bundled._lock(probe.engine, name, image)
            waiter = asyncio.create_task(bundled._lock(probe.engine, name, image))
            try:
                await asyncio.wait([waiter], timeout=1)  # the one who is at it now is not
                assert not waiter.done() and await probe.engine.inspect(living)
            finally:
                await probe.engine.remove(living)
                async with asyncio.timeout(60):
                    await probe.engine.remove(await waiter)
                await probe.engine.remove_volume(name)

    run(test)


def test_leftovers_of_the_dead_are_removed_and_of_nobody_else(engine: Client) -> None:
    dead = name_of_a_dead_process()

    async def test() -> None:
        async with backend(engine.host) as made, Probe(engine) as probe:
            box = await made.start(SPEC)
            # A backend looks for leftovers when it starts: these are for us to find.
            while made._errands:
                await asyncio.wait(list(made._errands))
            image = (await probe.engine.image(BUSYBOX))["Id"]

            async def create(name: str, owner: str, id: str) -> str:
                labels = {owner_scope.OWNER_SCOPE: owner, owner_scope.BOX: id}
                return await probe.engine.create(
                    {"Image": image, "Cmd": ["x"], "Labels": labels}, name
                )

            ours = await create(owner_scope.OwnerScope(dead, "").name_of("old"), dead, "old")
            theirs = await create("hutch-test-not-ours", dead, "old2")
            try:
                seen = {each.id: each for each in await owner_scope.boxes(probe.engine)}
                assert seen["old"].is_abandoned and not seen[box.id].is_abandoned
                assert seen[box.id].owner == f"pid {os.getpid()}" and "old2" not in seen
                assert (seen[box.id].runtime, seen[box.id].is_waiting) == (RUNTIME, False)
                await owner_scope.remove_abandoned(probe.engine)
                assert "old" not in {each.id for each in await owner_scope.boxes(probe.engine)}
                assert await made.list() == [box.id]
                assert await probe.engine.inspect(theirs)
            finally:
                await probe.engine.remove(ours)
                await probe.engine.remove(theirs)

    run(test)


def test_the_doctor_looks_at_a_box_from_the_inside(engine: Client) -> None:
    async def test() -> None:
        async with backend(engine.host) as made:
            report = await made.report()
            states = {layer.name: layer.status.value for layer in report.layers}
            for name in ("engine", "box", "user", "capabilities", "no new privileges",
                         "system calls", "root file system", "network"):  # fmt: skip
                assert states[name] == "active", report
            assert report.grade == "ns" and all(layer.why for layer in report.layers)
            words = {layer.name: layer.why for layer in report.layers}
            assert words["memory"].startswith("288 MiB") and words["processes"] == "128 at most"

    run(test)


def test_the_doctor_says_what_it_removed_and_whether_there_is_a_default_image(
    engine: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    dead = name_of_a_dead_process()
    make = "from hutch.backends.linux import temporary; temporary.new_folder()"
    subprocess.run([sys.executable, "-c", make], check=True)

    class Bare(DockerBackend):
        default_image = "hutch/node"

    async def test() -> None:
        async with Probe(engine) as probe:
            image = (await probe.engine.image(BUSYBOX))["Id"]
            labels = {owner_scope.OWNER_SCOPE: dead, owner_scope.BOX: "old"}
            body = {"Image": image, "Cmd": ["x"], "Labels": labels}
            old = await probe.engine.create(body, owner_scope.OwnerScope(dead, "").name_of("old"))
            made = Bare(factory.bundle, docker_host=engine.host)
            try:
                layers = {layer.name: layer for layer in (await made.report()).layers}
            finally:
                await made.close()
                await probe.engine.remove(old)
        said = layers["leftovers"].why
        assert re.fullmatch(r"removed \d+ containers?, .*\b1 folder\b.* of dead owners", said), said
        missing = layers["default image"]
        assert (missing.status.value, missing.required) == ("degraded", False)
        assert missing.fix == "hutch image build --backend docker node"

    run(test)


# --- engines that go away ---------------------------------------------------------------


def test_an_engine_that_is_not_there_is_told(tmp_path: Path) -> None:
    async def test() -> None:
        async with backend(f"unix://{tmp_path}/none") as made:
            with pytest.raises(BackendUnavailable, match="systemctl start docker"):
                await made.start(SPEC)
            report = await made.report()
            assert (report.grade, report.layers[0].status.value) == ("none", "missing")

    run(test)


def test_an_engine_that_restarts_with_live_restore_is_not_noticed(tmp_path: Path) -> None:
    with own_engine(live_restore=True) as engine:

        async def test() -> None:
            folder = str(tmp_path / "run")
            async with (
                backend(engine.host, lasting=folder) as made,
                running(made, SPEC) as (box, link),
            ):
                await sh(link, "echo kept > note")
                await asyncio.to_thread(engine.stop)
                assert await sh(link, "cat note") == (0, b"kept\n")
                with pytest.raises(HutchError):
                    await made.start(SPEC)
                engine.start()  # not from a thread: it would end with that
                assert await sh(link, "cat note") == (0, b"kept\n")
                assert await made.list() == [box.id] and (await box.stats()).pids
                await (await made.start(SPEC)).kill()

        run(test)
        assert json.loads(engine.call("GET", "/containers/json?all=1")) == []


def test_an_engine_that_restarts_without_live_restore_loses_its_boxes() -> None:
    with own_engine() as engine:

        async def test() -> None:
            async with backend(engine.host) as made:
                box = await made.start(SPEC)
                link = await Link.open(await box.connect())
                await asyncio.to_thread(engine.stop)
                async with asyncio.timeout(120):
                    await link.over.wait()
                with pytest.raises(BoxLost):
                    await box.connect()
                engine.start()  # not from a thread: it would end with that
                assert await made.list() == []
                await box.kill()
                await link.close()

        run(test)


def test_a_box_can_be_killed_while_its_engine_is_stopped() -> None:
    with own_engine() as engine:

        async def test() -> None:
            async with backend(engine.host) as made:
                box = await made.start(SPEC)
                link = await Link.open(await box.connect())
                assert engine.process
                engine.process.send_signal(signal.SIGSTOP)
                try:
                    async with asyncio.timeout(50):  # an answer is waited for for 60
                        await box.kill()
                        await link.over.wait()
                finally:
                    engine.process.send_signal(signal.SIGCONT)
                await link.close()

        run(test)
        assert json.loads(engine.call("GET", "/containers/json?all=1")) == []


def test_a_box_can_be_killed_while_its_engine_is_gone() -> None:
    with own_engine(live_restore=True) as engine:

        async def test() -> None:
            async with backend(engine.host) as made:
                box = await made.start(SPEC)
                link = await Link.open(await box.connect())
                await asyncio.to_thread(engine.stop)
                await box.kill()
                async with asyncio.timeout(120):
                    await link.over.wait()
                await link.close()

        run(test)
