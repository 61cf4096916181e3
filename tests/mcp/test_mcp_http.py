"""/mcp of a server: the same tools, for callers with keys, in both eras of the protocol."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client, StdioServerParameters, types
from mcp.client.streamable_http import streamable_http_client
from must_work import need
from talk_of_tests import Loop, Talk, facts_of, text_of

from daemon_of_tests import KEY, Daemon, wait_for

MODERN = "2026-07-28"


class Place:
    """A server, and ways to ask it."""

    def __init__(self, daemon: Daemon, loop: Loop) -> None:
        self.daemon, self._loop = daemon, loop

    def rest(self, verb: str, path: str, body: Any = None, key: str = KEY, **headers: str) -> Any:
        status, answer = self.raw(verb, path, json.dumps(body).encode() if body else b"", key,
                                  {"Content-Type": "application/json", **headers})  # fmt: skip
        assert status == 200, answer
        return json.loads(answer)

    def raw(
        self, verb: str, path: str, body: bytes, key: str | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.daemon.url.removeprefix("http://"), timeout=60)
        try:
            who = {"Authorization": f"Bearer {key}"} if key else {}
            connection.request(verb, path, body, {**who, **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def key(self, owner: str, scope: str = "run") -> str:
        return str(self.rest("POST", "/v1/keys", {"owner": owner, "scope": scope})["key"])

    def talk(self, key: str, mode: Any = "auto", query: str = "") -> Talk:
        return Talk(self._loop, lambda: self.client(key, mode, query))

    def client(
        self, key: str, mode: Any = "auto", query: str = ""
    ) -> AbstractAsyncContextManager[Client]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Client]:
            headers = {"Authorization": f"Bearer {key}"}
            async with httpx2.AsyncClient(headers=headers, timeout=60) as line:
                way = streamable_http_client(f"{self.daemon.url}/mcp{query}", http_client=line)
                async with Client(way, mode=mode) as client:
                    yield client

        return opened()

    def sessions(self, key: str = KEY) -> list[str]:
        found = self.rest("GET", "/v1/sessions?status=live", key=key)
        return [each["id"] for each in found]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, loop: Loop) -> Iterator[Place]:
    daemon = Daemon(tmp_path_factory.mktemp("served") / "data")
    try:
        daemon.start()
    except RuntimeError as exc:
        need("namespaces", str(exc))
    with_it = Place(daemon, loop)
    try:
        yield with_it
    finally:
        daemon.__exit__()


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_client_of_either_era_works_in_a_box(place: Place, mode: Any) -> None:
    with place.talk(place.key("either"), mode) as talk:
        first = talk.call("bash", command="echo $((6 * 7)); x=kept")
        assert "42" in text_of(first) and facts_of(first)["box"] in text_of(first)
        assert talk.bash("echo $x").strip() == "kept"
        talk.bash("echo data > /workspace/file")
        (found,) = [
            each for each in talk.do(talk.client.list_resources()).resources if each.name == "file"
        ]
        read = talk.do(talk.client.read_resource(found.uri)).contents[0]
        assert isinstance(read, types.TextResourceContents) and read.text == "data\n"
        tools = {tool.name: tool.input_schema for tool in talk.do(talk.client.list_tools()).tools}
        says = tools["bash"]["properties"]["box"].get("x-mcp-header")
        assert says == ("Box-Id" if mode == "auto" else None)
        assert talk.bash("echo $x", box=facts_of(first)["box"]).strip() == "kept"


def test_strangers_and_pages_of_others_are_refused(place: Place) -> None:
    asked = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping"}).encode()
    usual = {"Content-Type": "application/json",
             "Accept": "application/json, text/event-stream"}  # fmt: skip
    for verb in ("GET", "POST", "DELETE"):
        assert place.raw(verb, "/mcp", asked, None, usual)[0] == 401
        assert place.raw(verb, "/mcp", asked, "hutch_wrong", usual)[0] == 401
    elsewhere = {**usual, "Origin": "http://evil.example"}
    assert place.raw("POST", "/mcp", asked, KEY, elsewhere)[0] == 403
    assert place.raw("POST", "/mcp", asked, KEY, {**usual, "Host": "evil.example"})[0] == 421
    assert place.raw("POST", "/mcp", b" " * (5 << 20), KEY, usual)[0] == 413
    assert place.raw("POST", "/mcp?only=fly", asked, KEY, usual)[0] == 400
    assert place.raw("POST", "/mcp?key=x", asked, KEY, usual)[0] == 400


def _refused(place: Place, key: str, mode: Any, query: str = "") -> str:
    with pytest.raises(BaseException) as caught, place.talk(key, mode, query):
        pass
    found = caught.value
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return str(found)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_who_is_refused_reads_why_in_their_client(place: Place, mode: Any) -> None:
    assert "key" in _refused(place, "hutch_wrong", mode)
    assert "there is no tool 'fly'" in _refused(place, KEY, mode, "?only=fly")
    assert "timeout is a number" in _refused(place, KEY, mode, "?timeout=soon")


def test_what_one_request_wishes_is_not_done_to_the_next(place: Place) -> None:
    key = place.key("wishes")
    whole = "\n".join(str(n) for n in range(1, 3001))
    for query in ("?raw", "", "?raw"):
        with place.talk(key, query=query) as talk:
            assert talk.bash("seq 3000").startswith(whole) is (query == "?raw")
    assert len(place.sessions(key)) == 1


def test_each_key_has_a_box_and_none_sees_anothers(place: Place) -> None:
    one, other = place.key("one"), place.key("other")
    with place.talk(one) as first, place.talk(one) as again, place.talk(other) as second:
        box = facts_of(first.call("bash", command="echo one > /tmp/mine"))["box"]
        # The protocol has no sessions any more: the key is who it is.
        assert again.bash("cat /tmp/mine").strip() == "one"
        foreign = second.call("bash", command="cat /tmp/mine", box=box)
        assert foreign.is_error and "There is no box" in text_of(foreign)
        assert second.call("close_box", box=box).is_error
        assert box not in text_of(second.call("list_boxes"))
        assert box in text_of(first.call("list_boxes"))
        assert place.sessions(one) == [box] and place.sessions(other) == []


def test_a_session_of_the_older_protocol_has_a_box_that_ends_with_it(place: Place) -> None:
    key = place.key("older")
    with place.talk(key, "legacy") as one, place.talk(key, "legacy") as other:
        boxes = {facts_of(each.call("bash", command="true"))["box"] for each in (one, other)}
        assert len(boxes) == 2 and set(place.sessions(key)) == boxes
    assert wait_for(lambda: place.sessions(key) == [])


def test_a_session_of_the_older_protocol_is_for_its_key_alone(place: Place) -> None:
    hello = {"protocolVersion": "2025-06-18", "capabilities": {},
             "clientInfo": {"name": "tests", "version": "1"}}  # fmt: skip
    asked = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    usual = {"Content-Type": "application/json",
             "Accept": "application/json, text/event-stream"}  # fmt: skip
    connection = http.client.HTTPConnection(place.daemon.url.removeprefix("http://"), timeout=60)
    who = {"Authorization": f"Bearer {place.key('mine')}"}
    connection.request("POST", "/mcp", json.dumps(asked), {**who, **usual})
    answer = connection.getresponse()
    answer.read()
    session = answer.getheader("mcp-session-id")
    connection.close()
    assert session
    ping = json.dumps({"jsonrpc": "2.0", "id": 2, "method": "ping"}).encode()
    theirs = {**usual, "mcp-session-id": session}
    assert place.raw("POST", "/mcp", ping, place.key("thief"), theirs)[0] == 404
    assert session not in place.daemon.complaint()


def test_rights_and_quotas_are_those_of_the_key(place: Place) -> None:
    with place.talk(place.key("looks", "read")) as talk:
        refused = talk.call("bash", command="true")
        assert refused.is_error and 'this key has scope "read"' in text_of(refused)
    key = place.key("small")
    place.rest("PUT", "/v1/quotas/small", {"sessions": 1})
    with place.talk(key) as talk:
        assert not talk.call("bash", command="true").is_error
        more = talk.call("create_box")
        assert more.is_error and facts_of(more)["error"] == "quota_reached"


def test_the_url_says_which_tools(place: Place) -> None:
    with place.talk(place.key("few"), query="?only=bash&structured=yes") as talk:
        assert [tool.name for tool in talk.do(talk.client.list_tools()).tools][:1] == ["bash"]
        assert talk.call("bash", command="exit 2").structured_content["exit_code"] == 2


def _running(mark: str) -> bool:
    paths = Path("/proc").glob("[0-9]*/cmdline")
    return any(_words(path) == mark for path in paths)


def _words(path: Path) -> str:
    try:
        return path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_cancelling_a_call_kills_its_command(place: Place, mode: Any) -> None:
    mark = f"sleep 77{place.daemon.process.pid}{'12'[mode == 'auto']}"
    with place.talk(place.key("cancels"), mode) as talk:
        talk.bash("true")

        async def work() -> None:
            heard = asyncio.Event()

            async def hear(progress: float, total: float | None, message: str | None) -> None:
                heard.set()

            call = asyncio.ensure_future(
                talk.client.call_tool("bash", {"command": mark}, progress_callback=hear)
            )
            await heard.wait()
            assert await asyncio.to_thread(wait_for, lambda: _running(mark))
            call.cancel()
            await asyncio.wait({call})

        talk.do(work())
        assert wait_for(lambda: not _running(mark))


def test_a_key_that_is_revoked_ends_what_runs(place: Place) -> None:
    made = place.rest("POST", "/v1/keys", {"owner": "leaving", "scope": "run"})
    mark = f"sleep 66{place.daemon.process.pid}"
    with place.talk(made["key"], "legacy") as talk:
        talk.bash("true")

        async def start() -> asyncio.Task[Any]:
            heard = asyncio.Event()

            async def hear(progress: float, total: float | None, message: str | None) -> None:
                heard.set()

            call = asyncio.ensure_future(
                talk.client.call_tool("bash", {"command": mark}, progress_callback=hear)
            )
            await heard.wait()
            return call

        call = talk.do(start())
        assert wait_for(lambda: _running(mark))
        place.rest("DELETE", f"/v1/keys/{made['id']}")
        assert wait_for(lambda: not _running(mark))

        async def end() -> None:
            call.cancel()
            await asyncio.wait({call})

        talk.do(end())


def test_a_box_is_found_again_by_its_key_when_the_server_was_killed(place: Place) -> None:
    key = place.key("returns")
    with place.talk(key) as talk:
        box = facts_of(talk.call("bash", command="x=kept"))["box"]
    place.daemon.crash()
    place.daemon.start()
    with place.talk(key) as talk:
        again = talk.call("bash", command="echo $x")
        assert facts_of(again)["box"] == box and "kept" in text_of(again)
        assert "as you left it" in text_of(again)


def test_a_server_that_stops_does_not_wait_for_listeners(place: Place) -> None:
    with place.talk(place.key("listens"), "legacy") as talk:  # it holds a stream open
        talk.bash("true")
        assert place.daemon.signal(signal.SIGTERM) == 0
    assert "Traceback" not in place.daemon.complaint()
    place.daemon.start()


def test_without_the_extra_the_path_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mcp.py").write_text("raise ModuleNotFoundError('no mcp', name='mcp')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    daemon = Daemon(tmp_path / "data")
    try:
        daemon.start()
    except RuntimeError as exc:
        need("namespaces", str(exc))
    try:
        status, answer = Place(daemon, None).raw("POST", "/mcp", b"{}", KEY, {})  # type: ignore[arg-type]
        assert status == 503
        assert "the extra `mcp`" in json.loads(answer)["error"]["message"]
    finally:
        daemon.__exit__()


def test_a_client_that_starts_programs_can_have_its_box_at_the_server(
    place: Place, loop: Loop
) -> None:
    key = place.key("starts")
    how = StdioServerParameters(
        command=sys.executable, args=["-m", "hutch", "mcp", "--url", place.daemon.url],
        env={"HUTCH_API_KEY": key, "PATH": os.environ["PATH"]},
    )  # fmt: skip
    with Talk(loop, lambda: Client(how)) as talk:
        first = talk.call("bash", command="x=kept; echo $((6 * 7))")
        assert "42" in text_of(first) and place.sessions(key) == [facts_of(first)["box"]]
        assert talk.bash("echo $x").strip() == "kept"
    assert wait_for(lambda: place.sessions(key) == [])
