"""Sandkasten's own SDK, unmodified, and the faults of its daemon that ours has not."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from http_of_tests import Running
from sandkasten import SandboxClient, SandkastenStreamError, Session

from hutch.server.http.sandkasten import Cleaner, timeout_of
from hutch.server.rules import Rules

Work = Callable[[SandboxClient, Session], Awaitable[None]]


def with_session(server: Running, work: Work) -> None:
    async def main() -> None:
        url = f"http://127.0.0.1:{server.port}"
        client = SandboxClient(base_url=url, api_key=server.key or "")
        try:
            async with await client.create_session(image="host") as session:
                await work(client, session)
        finally:
            await client.close()

    asyncio.run(main())


def test_its_sdk_runs_commands_and_state_stays(server: Running) -> None:
    async def work(client: SandboxClient, session: Session) -> None:
        await session.exec("cd /tmp && export FOO=1")
        result = await session.exec("pwd; echo $FOO; echo err >&2; exit 4")
        assert (result.exit_code, result.cwd, result.truncated) == (4, "/tmp", False)
        assert result.output == "/tmp\n1\nerr\n"
        assert session.id in [info.id for info in await client.list_sessions()]
        assert (await session.info()).status == "running"
        assert (await session.stats()).memory_limit > 0

    with_session(server, work)


def test_its_sdk_streams_while_the_command_runs(server: Running) -> None:
    async def work(client: SandboxClient, session: Session) -> None:
        chunks = session.exec_stream("echo one; while [ ! -e go ]; do sleep 0.05; done; echo é two")
        first = await anext(chunks)
        assert (first.output, first.done) == ("one\n", False)
        await session.write("go", "")  # an empty file is a file
        rest = [chunk async for chunk in chunks]
        assert "".join(chunk.output for chunk in rest) == "é two\n"
        assert (rest[-1].done, rest[-1].exit_code, rest[-1].cwd) == (True, 0, "/workspace")

    with_session(server, work)


def test_no_event_of_a_stream_is_longer_than_8_kib(server: Running) -> None:
    """Its SDK for TypeScript drops an event that arrives in two reads."""
    text = "a" * 50_000 + "é" * 20_000 + "\U0001f407" * 20_000 + "\n"
    with httpx.Client(
        base_url=f"http://127.0.0.1:{server.port}", headers={"X-API-Key": server.key or ""}
    ) as client:
        made = client.post("/v1/sessions", json={"image": "host"}).json()
        session = f"/v1/sessions/{made['id']}"
        assert client.post(f"{session}/fs/write", json={"path": "f", "text": text}).is_success
        with client.stream("POST", f"{session}/exec/stream", json={"cmd": "cat f"}) as answer:
            body = answer.read()
        client.delete(session)
    events = body.removesuffix(b"\n\n").split(b"\n\n")
    assert max(len(event) + 2 for event in events) <= 8192
    chunks = [json.loads(event.partition(b"data: ")[2]) for event in events if b"chunk" in event]
    assert "".join(chunk["chunk"] for chunk in chunks) == text


def test_its_names_of_images_are_understood(tmp_path: Path) -> None:
    rules = Rules(allowed_images=("sandbox-runtime:base",), pool={"sandbox-runtime:base": 1})
    with closing(Running(tmp_path, rules=rules)) as server:
        made = server.ask("POST", "/v1/sessions", {"image": "sandbox-runtime:base"})
        assert (made.status, made.json["image"]) == (201, "host")
        refused = server.ask("POST", "/v1/sessions", {"image": "sandbox-runtime:python"})
        assert b"'python' is not allowed" in refused.body
        (pool,) = server.ask("GET", "/v1/pool").json
        assert pool["image"] == "host"


def test_its_sdk_writes_reads_and_uploads_any_bytes(server: Running, tmp_path: Path) -> None:
    data = bytes(range(256)) * 30_000  # beyond 5 MB, and not UTF-8

    async def work(client: SandboxClient, session: Session) -> None:
        await session.write("a/text", "hello")
        assert (await session.read("a/text")).content == b"hello"
        assert (await session.read("a/text", max_bytes=2)).truncated
        file = tmp_path / "bytes.bin"
        file.write_bytes(data)
        assert await session.upload(file) == ["/workspace/bytes.bin"]
        assert (await session.read("bytes.bin")).content == data
        named = await session.upload(
            io.BytesIO(b"x"), dest_path="/workspace/deep", filename="../../etc/y"
        )
        assert named == ["/workspace/deep/y"]

    with_session(server, work)


def test_a_command_that_takes_too_long_is_killed_and_told_so(server: Running) -> None:
    async def work(client: SandboxClient, session: Session) -> None:
        with pytest.raises(httpx.HTTPStatusError) as caught:
            await session.exec("echo so far; sleep 1000", timeout_ms=300)
        assert caught.value.response.status_code == 504
        body = caught.value.response.json()
        assert body["error_code"] == "COMMAND_TIMEOUT"
        assert body["details"]["output"] == "so far\n"
        assert (await session.exec("pgrep -x sleep || echo none")).output == "none\n"
        with pytest.raises(SandkastenStreamError):
            async for _ in session.exec_stream("sleep 1000", timeout_ms=300):
                pass

    with_session(server, work)


def test_a_workspace_outlives_its_sessions(server: Running) -> None:
    async def main() -> None:
        url = f"http://127.0.0.1:{server.port}"
        client = SandboxClient(base_url=url, api_key=server.key or "")
        for command, output in (("echo kept > f", ""), ("cat f", "kept\n")):
            async with await client.create_session(image="host", workspace_id="lasting") as s:
                assert (await s.exec(command)).output == output
        assert "lasting" in [each.id for each in await client.list_workspaces()]
        await client.delete_workspace("lasting")
        await client.close()

    asyncio.run(main())


def test_the_files_of_a_workspace_have_its_routes_too(server: Running) -> None:
    base = "/v1/workspaces/sandkasten-ws-files/fs"  # with the prefix that it once had
    assert server.ask("POST", f"{base}/write", {"path": "d/a", "text": "x"}).json == {"ok": True}
    assert server.ask("GET", base).json == {"entries": [{"name": "d", "is_dir": True}]}
    read = server.ask("GET", f"{base}/read", path="d/a").json
    assert read == {"path": "d/a", "content_base64": "eA==", "truncated": False}
    assert server.ask("GET", f"{base}/read", path="nothing").status == 404
    assert server.ask("DELETE", "/v1/workspaces/files").json == {"ok": True}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("exec", {}),
        ("exec", {"cmd": ""}),
        ("exec", {"cmd": "x" * ((1 << 20) + 1)}),
        ("exec", {"cmd": "true", "timeout_ms": 600_001}),
        ("exec", {"cmd": "true", "timeout_ms": -1}),
        ("exec", {"cmd": "true", "timeout_ms": "1"}),
        ("exec", {"cmd": "true", "raw_output": 1}),
        ("fs/write", {"path": "/etc/x", "text": ""}),
        ("fs/write", {"path": "../x", "text": ""}),
        ("fs/write", {"path": "a"}),
        ("fs/write", {"path": "a", "text": "", "content_base64": ""}),
        ("fs/write", {"path": "a", "content_base64": "%"}),
    ],
)
def test_what_it_refuses_we_refuse(server: Running, session: str, route: str, body: object) -> None:
    answer = server.ask("POST", f"/v1/sessions/{session}/{route}", body)
    assert (answer.status, answer.error) == (400, "INVALID_REQUEST")


def test_the_name_that_a_volume_had_is_the_name_of_its_workspace(server: Running) -> None:
    session = server.session(workspace_id="sandkasten-ws-old")
    assert server.ask("GET", f"/v1/sessions/{session}").json["workspace_id"] == "old"
    for name in ("old", "sandkasten-ws-old"):
        found = server.ask("GET", "/v1/sessions", workspace_id=name, status="live").json
        assert [each["id"] for each in found] == [session]
    assert server.ask("POST", "/v1/workspaces", {"id": "sandkasten-ws-old"}).status == 409
    server.ask("DELETE", f"/v1/sessions/{session}")
    assert server.ask("DELETE", "/v1/workspaces/sandkasten-ws-old").json == {"ok": True}
    assert server.ask("GET", "/v1/workspaces/old").status == 404


@pytest.mark.parametrize(
    ("asked", "allowed", "given"),
    [(0, 120, 120), (300, 120, 0.3), (600_000, 120, 120), (3_600_000, 3600, 3600)],
)
def test_a_timeout_is_what_was_asked_for_if_the_operator_allows_it(
    asked: int, allowed: float, given: float
) -> None:
    assert timeout_of(asked, allowed) == given


def test_the_statuses_that_it_had_wrong_are_right(server: Running, session: str) -> None:
    assert server.ask("DELETE", "/v1/sessions/00000000-0000").status == 404
    assert server.ask("GET", f"/v1/sessions/{session}/fs/read", path="no").status == 404
    assert server.ask("DELETE", "/v1/workspaces/nowhere").status == 404
    image = server.ask("POST", "/v1/sessions", {"image": "nonesuch"})
    assert (image.status, image.error) == (400, "INVALID_IMAGE")


def test_nothing_asked_for_is_the_default(server: Running) -> None:
    made = server.ask("POST", "/v1/sessions", {"image": "", "ttl_seconds": 0})
    assert (made.status, made.json["image"]) == (201, "host")
    assert made.json["expires_at"] is not None
    server.ask("DELETE", f"/v1/sessions/{made.json['id']}")


def test_a_command_in_the_background_is_answered_at_once(server: Running, session: str) -> None:
    body = {"cmd": "echo done > later", "background": True}
    answer = server.ask("POST", f"/v1/sessions/{session}/exec", body)
    assert answer.status == 202
    path = f"/v1/sessions/{session}/processes/{answer.json['id']}/follow"
    assert server.ask("GET", path).json["exit_code"] == 0


def form(*parts: tuple[str, bytes]) -> tuple[bytes, dict[str, str]]:
    body = b""
    for head, content in parts:
        body += (
            f"--B\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + content + b"\r\n"
        )
    return body + b"--B--\r\n", {"Content-Type": "multipart/form-data; boundary=B"}


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([('name="file"; filename="a"', b"x")], 200),
        ([('name="path"', b"/etc"), ('name="file"; filename="a"', b"x")], 400),
        ([('name="file"; filename="a"', b"x"), ('name="path"', b"d")], 400),
        ([('name="file"; filename=".."', b"x")], 400),
        ([('name="other"; filename="a"', b"x")], 400),
        ([('name="x"', b"y" * 5000)], 400),
        ([], 400),
        ([(f'name="files"; filename="{n}"', b"") for n in range(101)], 400),
        ([('name="file"; filename="a"', b"x" * (11 << 20))], 413),
    ],
)
def test_a_form_is_checked(
    server: Running, session: str, parts: list[tuple[str, bytes]], status: int
) -> None:
    body, headers = form(*parts)
    path = f"/v1/sessions/{session}/fs/upload"
    assert server.ask("POST", path, data=body, headers=headers).status == status
    if status == 200:
        assert server.ask("POST", path, data=body[:-8], headers=headers).status == 400
        assert server.ask("POST", path, data=body).status == 415


@pytest.mark.parametrize("cut", range(1, 30))
def test_colours_are_taken_out_however_the_text_is_cut(cut: int) -> None:
    text = "a\x1b[1;31mred\x1b[0m\r\nb\x1b]0;title\x07c\r\n"
    cleaner = Cleaner()
    pieces = [text[i : i + cut] for i in range(0, len(text), cut)]
    assert "".join(map(cleaner.feed, pieces)) + cleaner.end() == "ared\nbc\n"
