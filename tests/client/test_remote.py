"""The SDK and a real server: boxes that are elsewhere, and outlive the process that made them."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest

from daemon_of_tests import Daemon
from hutch import (
    AsyncSandbox,
    AsyncWorkspace,
    BoxLost,
    Chunk,
    CommandFailed,
    Conflict,
    InvalidRequest,
    NoSession,
    NotFound,
    NotPermitted,
    Result,
    Sandbox,
    SessionEnded,
    TimedOut,
    Unauthorized,
    Workspace,
)
from hutch.client._sync_http import POOLS

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _at_the_server(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HUTCH_URL", daemon.url)
    monkeypatch.setenv("HUTCH_API_KEY", daemon.key)
    yield
    POOLS.close()


# The tests of the embedded SDK, run as they are: `HUTCH_URL` alone makes the difference. Left
# out is what HTTP bounds more tightly, what is only true a moment later there, and what takes long
# because of the box alone.
SAME = {
    # Two requests on two connections may overtake each other; commands still run one at a time.
    "client/test_commands.py": "not queue_in_order",
    "client/test_code.py": "",
    "files/test_reading_and_writing.py": "",
    "files/test_folders.py": "not thousand",
    "files/test_transfer.py": "not upload_that_is_cancelled",
    "files/test_watching.py": "",
    "files/test_hostile_names_and_paths.py": "",
}


@pytest.mark.parametrize("file", SAME)
def test_what_holds_in_this_process_holds_over_http(file, daemon):
    chosen = [str(TESTS / file), *(["-k", SAME[file]] if SAME[file] else [])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen],
        env={**daemon.environment, "HUTCH_URL": daemon.url},
        capture_output=True, text=True, timeout=600, cwd=TESTS.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]


# --- boxes ------------------------------------------------------------------------------


def test_a_box_at_a_server_keeps_its_shell_and_its_kernel():
    with Sandbox.create(labels={"who": "me"}, ttl=300) as box:
        box.shell.run("cd /tmp && export A=1 && f() { echo $A; }", check=True)
        result = box.shell.run("f; pwd; echo oops >&2; exit 3")
        assert (result.stdout, result.stderr) == ("1\n/tmp\n", "oops\n")
        assert (result.exit_code, result.cwd) == (3, "/tmp")
        box.run_code("x = 41")
        assert box.run_code("x + 1").text == "42"
        assert box.info.labels == {"who": "me"} and box.info.status == "running"
    assert box.refresh().status == "destroyed"
    with pytest.raises(BoxLost):
        box.shell.run("true")


def test_output_arrives_while_the_command_runs():
    wait = "while [ ! -e go ]; do sleep 0.02; done"
    with Sandbox.create() as box, box.shell.stream(f"echo one; {wait}; echo two") as stream:
        first = next(stream)
        assert isinstance(first, Chunk) and first.text == "one\n"
        box.files.write("go", "")
        second, last = stream
        assert second.text == "two\n" and last.exit_code == 0


def test_leaving_a_stream_stops_its_command():
    with Sandbox.create() as box:
        with box.shell.stream("touch began; sleep 600 & sleep 600") as stream:
            reader = threading.Thread(target=lambda: list(stream))
            reader.start()
            until(lambda: box.files.exists("began"))
            stream.close()
            reader.join(60)
        until(lambda: "sleep" not in box.commands.run("ps -A -o comm= || true").stdout)


def test_check_raises_with_the_result_attached():
    with Sandbox.create() as box:
        with pytest.raises(CommandFailed) as caught:
            box.shell.run("echo out; exit 5", check=True)
        assert caught.value.result.exit_code == 5 and caught.value.result.stdout == "out\n"
        with pytest.raises(TimedOut) as late:
            box.commands.run("echo out; sleep 60", timeout=3, check=True)
        assert late.value.result.stdout == "out\n"
        handle = box.commands.run("echo so far; sleep 60", background=True)
        with pytest.raises(TimedOut) as waited:
            handle.wait(timeout=3)
        assert waited.value.result.stdout == "so far\n"
        handle.kill()


def test_connect_finds_a_box_and_leaves_it_alone():
    made = Sandbox.create()
    made.shell.run("X=5")
    with Sandbox.connect(made.id) as again:
        assert again.shell.run("echo $X").stdout == "5\n"
    assert Sandbox.connect(made.id).shell.run("echo $X").stdout == "5\n"
    made.close()
    with pytest.raises(SessionEnded):
        Sandbox.connect(made.id)
    with pytest.raises(NoSession):
        Sandbox.connect("00000000-0000")


def test_a_folder_of_this_machine_is_answered_with_what_a_server_has_instead():
    for folder in ("notes", "/usr/share"):
        with pytest.raises(InvalidRequest, match="workspace_id="):
            Sandbox.create(workspace=folder)


def test_list_shows_what_lives_and_what_was_asked_for():
    with Sandbox.create(labels={"a": "1"}) as one, Sandbox.create(labels={"a": "2"}) as two:
        assert {one.id, two.id} <= {info.id for info in Sandbox.list()}
        assert [info.id for info in Sandbox.list(label="a=2")] == [two.id]
        assert [info.id for info in Sandbox.list(label="a")] == [two.id, one.id]
    assert Sandbox.list(label="a") == []


def test_a_deadline_is_moved_and_never_earlier():
    with Sandbox.create(ttl=100) as box:
        before = box.info.expires_at
        assert before and abs(before - time.time() - 100) < 60
        assert box.extend(10).expires_at == pytest.approx(before, abs=1)
        later = box.extend(1000).expires_at
        assert later and later > before + 800 and box.info.expires_at == later


def test_what_happened_is_in_the_journal():
    with Sandbox.create() as box:
        box.shell.run("echo hi")
        box.run_code("1")
        box.files.write("f", "x")
        entries = box.journal()
        kinds = [entry.kind for entry in entries]
        assert {"start", "command", "cell", "file"} <= {*kinds}
        later = box.journal(after=entries[-2].number)
        assert [entry.number for entry in later] == [entries[-1].number]
        with box.follow_journal() as following:
            assert next(following) == entries[0]


def test_the_whole_of_a_long_output_can_be_read_from_its_line_in_the_journal():
    with Sandbox.create() as box:
        box.shell.run("seq 1000000")
        [line] = [entry for entry in box.journal() if entry.kind == "command"]
        kept = str(line.body["kept"])
        assert box.read_output(kept, 0, 6).data == b"1\n2\n3\n"
        assert box.read_output(kept, 0, 1).total == 6_888_896


def test_ports_that_listen_are_listed():
    with Sandbox.create() as box:
        assert box.ports() == []
        box.commands.run("python3 -m http.server 8123 --bind 127.0.0.1", background=True)
        until(lambda: [port.port for port in box.ports()] == [8123])


def test_a_key_is_needed_and_must_be_the_right_one(daemon, monkeypatch):
    monkeypatch.delenv("HUTCH_API_KEY")
    with pytest.raises(Unauthorized):
        Sandbox.create()
    with pytest.raises(Unauthorized):
        Sandbox.list(url=daemon.url, api_key="wrong")


def test_the_unix_socket_needs_no_key_of_its_owner(daemon, monkeypatch):
    monkeypatch.delenv("HUTCH_URL")
    monkeypatch.delenv("HUTCH_API_KEY")
    with Sandbox.create(url=daemon.socket) as box:
        assert box.shell.run("echo hi").stdout == "hi\n"


def test_folders_of_the_server_are_refused_unless_it_allows_them():
    with pytest.raises((InvalidRequest, NotPermitted), match="mount"):
        Sandbox.create(workspace="/etc")


def test_many_tasks_share_a_server():
    async def one() -> str:
        async with await AsyncSandbox.create() as box:
            return (await box.shell.run("echo $((6*7))")).stdout

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(one() for _ in range(10)))

    assert asyncio.run(all_of_them()) == ["42\n"] * 10


def test_an_asynchronous_stream_is_cancelled_with_its_task():
    async def use() -> None:
        async with await AsyncSandbox.create() as box:
            running = asyncio.create_task(box.shell.run("touch began; sleep 600"))
            while not await box.files.exists("began"):
                await asyncio.sleep(0.02)
            running.cancel()
            await asyncio.wait([running])
            assert (await box.shell.run("echo free")).stdout == "free\n"

    asyncio.run(asyncio.wait_for(use(), 60))


# --- workspaces -------------------------------------------------------------------------


def test_a_workspace_outlives_its_boxes(tmp_path):
    workspace = Workspace("papers")
    with Sandbox.create(workspace_id="papers") as box:
        box.files.write("a.txt", "from a box")
        assert box.info.workspace_id == "papers"
    assert workspace.files.read("a.txt") == "from a box"
    workspace.files.write("b/c.txt", b"\xff\x00")
    with Sandbox.create(workspace_id="papers") as box:
        assert box.files.read("b/c.txt", "bytes") == b"\xff\x00"
        with pytest.raises(Conflict):
            workspace.remove()
    assert workspace.export(tmp_path / "out.tar") > 0
    with tarfile.open(tmp_path / "out.tar") as tar:
        assert {"a.txt", "b/c.txt"} <= {name.removeprefix("./") for name in tar.getnames()}
    other = Workspace("copies")
    assert other.import_(tmp_path / "out.tar") == 2
    assert other.files.read("a.txt") == "from a box"
    assert {"papers", "copies"} <= {info.id for info in Workspace.list()}
    assert other.info().size is not None
    for each in (workspace, other):
        each.remove()
    with pytest.raises(NotFound):
        workspace.info()


def test_a_workspace_is_for_one_at_a_time_if_one_says_so():
    with Sandbox.create(workspace_id="mine-alone", exclusive=True), pytest.raises(Conflict):
        Sandbox.create(workspace_id="mine-alone")
    Workspace("mine-alone").remove()


def test_a_tar_is_taken_from_memory_too():
    async def use() -> str:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            entry = tarfile.TarInfo("x")
            entry.size = 2
            tar.addfile(entry, io.BytesIO(b"hi"))
        workspace = AsyncWorkspace("from-memory")
        assert await workspace.import_(buffer.getvalue()) == 1
        text = await workspace.files.read("x")
        await workspace.remove()
        return text

    assert asyncio.run(use()) == "hi"


# --- a server that dies -----------------------------------------------------------------


def test_a_server_that_was_killed_has_everything_when_it_is_back(tmp_path_factory, monkeypatch):
    with Daemon(tmp_path_factory.mktemp("crash")) as daemon:
        monkeypatch.setenv("HUTCH_URL", daemon.url)
        box = Sandbox.create(ttl=600)
        box.shell.run("X=kept; cd /tmp")
        box.run_code("y = 'kept too'")
        daemon.crash()
        results: list[Result] = []
        waiting = threading.Thread(target=lambda: results.append(box.shell.run("echo $X $PWD")))
        waiting.start()  # while no server runs
        daemon.start()
        waiting.join(60)
        assert results and results[0].stdout == "kept /tmp\n"
        assert box.run_code("y").text == "'kept too'"
        POOLS.close()


def until(happens, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)
