"""`hutch mcp`, as a client starts it: lines of JSON, and nothing left behind."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from must_work import need
from talk_of_tests import Loop, Talk, facts_of

from daemon_of_tests import HUTCH, wait_for
from hutch import BackendUnavailable
from hutch.extras import install_command
from hutch.mcp.stdio import MAX_MESSAGE

HELLO = {"protocolVersion": "2025-06-18", "capabilities": {},
         "clientInfo": {"name": "tests", "version": "1"}}  # fmt: skip


class Lines:
    """A client that hides nothing: what is written and read are lines."""

    def __init__(self, *words: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*HUTCH, "mcp", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, cwd="/", env=env,
        )  # fmt: skip
        assert self.process.stdin and self.process.stdout
        self._in, self._out = self.process.stdin, self.process.stdout

    def send(self, **message: Any) -> None:
        self._in.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self._in.flush()

    def ask(self, id: int, method: str, **params: Any) -> dict[str, Any]:
        self.send(id=id, method=method, params=params)
        return self.answer(id)

    def answer(self, id: int) -> dict[str, Any]:
        for line in self._out:
            found: dict[str, Any] = json.loads(line)
            if found.get("id") == id:
                return found
        raise AssertionError(f"no answer to {id}: {self.process.stderr.read()!r:.2000}")  # type: ignore[union-attr]

    def begin(self) -> None:
        assert self.ask(0, "initialize", **HELLO)["result"]["serverInfo"]["name"] == "hutch"
        self.send(method="notifications/initialized")

    def bash(self, id: int, command: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask(
            id, "tools/call", name="bash", arguments={"command": command}
        )["result"]
        if found["_meta"]["hutch/facts"].get("error") == BackendUnavailable.code:
            need("namespaces", str(found["content"]))
        return found


@contextmanager
def lines(*words: str) -> Iterator[Lines]:
    made = Lines(*words)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        for stream in (made.process.stdin, made.process.stdout, made.process.stderr):
            with suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]


def running(mark: str) -> list[int]:
    """Processes of this machine with these words as their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip() == mark:
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_client_of_either_era_has_its_box(loop: Loop, mode: Any) -> None:
    how = StdioServerParameters(command=sys.executable, args=["-m", "hutch", "mcp"])
    with Talk(loop, lambda: Client(how, mode=mode)) as talk:
        first = talk.call("bash", command="echo $((6 * 7))")
        if facts_of(first).get("error") == BackendUnavailable.code:
            need("namespaces", str(first.content))
        assert facts_of(first)["box"]
        assert "42" in first.content[0].text  # type: ignore[union-attr]
        talk.bash("x=kept")
        assert talk.bash("echo $x").strip() == "kept"


@pytest.mark.parametrize("end", ["eof", signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_client_that_ends(end: Any) -> None:
    mark = f"sleep 98{os.getpid()}"
    with lines() as talk:
        talk.begin()
        talk.bash(1, f"{mark} >/dev/null 2>&1 & echo started")
        talk.send(id=2, method="tools/call",
                  params={"name": "bash", "arguments": {"command": f"setsid {mark}"}})  # fmt: skip
        assert wait_for(lambda: len(running(mark)) == 2)
        if end == "eof":
            talk._in.close()
        else:
            talk.process.send_signal(end)
        code = talk.process.wait(30)
        assert code == {"eof": 0, signal.SIGTERM: 143, signal.SIGKILL: -9}[end]
        assert wait_for(lambda: not running(mark))


def test_stdout_has_the_protocol_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("of the host\n")
    with lines("--workspace", str(tmp_path), "--raw", "--memory", "256m") as talk:
        talk.begin()
        talk._in.write(b"this is no JSON\n\n")
        result = talk.bash(1, "cat here; head -c 200000 /dev/zero | tr '\\0' y; echo; echo odd >&2")
        assert result["content"][0]["text"].startswith("of the host\n")
        talk._in.close()
        assert talk.process.wait(30) == 0
        rest = talk._out.read()
        assert all(json.loads(line) for line in rest.splitlines())


@pytest.mark.parametrize(
    ("begins", "ends"),
    [
        (b'{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"id": 3, "x": "', b'"}}'),
        (b'{"method":"tools/call","params":{"id":3,"x":"', b'"},"jsonrpc":"2.0","id":7}'),
    ],
)
def test_a_message_that_is_too_long_is_answered_and_the_next_one_too(
    begins: bytes, ends: bytes
) -> None:
    with lines() as talk:
        talk.begin()
        talk._in.write(begins + b"x" * MAX_MESSAGE + ends + b"\n")
        assert "64 MiB at most" in talk.answer(7)["error"]["message"]
        assert talk.ask(8, "ping")["result"] == {}
        talk._in.close()
        assert talk.process.wait(30) == 0
        assert b"64 MiB at most" in talk.process.stderr.read()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "bash,fly"], "there is no tool 'fly'"),
        (["--timeout", "soon"], "--timeout must be a time in seconds"),
        (["--url", "http://127.0.0.1:9", "--workspace", "/tmp"], "which a server cannot see"),
        (["--url", "http://127.0.0.1:9"], "cannot reach http://127.0.0.1:9"),
        (["--image", "nosuch"], "there is no image 'nosuch'"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(words: list[str], said: str) -> None:
    done = subprocess.run([*HUTCH, "mcp", *words], capture_output=True, text=True, timeout=60,
                          stdin=subprocess.DEVNULL, check=False)  # fmt: skip
    assert done.returncode == 125 and said in done.stderr and done.stderr.count("\n") == 1


def test_a_person_who_starts_it_is_told_who_speaks_here() -> None:
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen([*HUTCH, "mcp"], stdin=theirs, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE)  # fmt: skip
        assert process.stderr
        with process.stderr:
            assert b"waiting for an MCP client" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
    finally:
        os.close(ours)
        os.close(theirs)


def test_without_the_extra_it_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "mcp.py").write_text("raise ModuleNotFoundError('no mcp', name='mcp')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*HUTCH, "mcp"], capture_output=True, text=True, timeout=60, env=env,
                          stdin=subprocess.DEVNULL, check=False)  # fmt: skip
    assert done.returncode == 125 and install_command("mcp") in done.stderr


def test_a_client_does_not_wait_for_the_engine() -> None:
    code = (
        "import sys, hutch.cli.mcp\n"
        "from hutch.mcp import boxes, server, stdio, clients\n"
        "assert not {'hutch.local', 'hutch.engine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_nobody_else_loads_the_library() -> None:
    code = (
        "import sys, hutch, hutch.mcp, hutch.server.daemon, hutch.cli, hutch.cli.run\n"
        "hutch.AsyncSandbox\n"
        "assert not {'mcp', 'starlette', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
