"""The SDK and a server that is scripted: what is sent, what is believed, what is sent twice."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from scripted import Answer, Scripted, of_events, of_json, refusal

from hutch import (
    AsyncSandbox,
    Chunk,
    HutchError,
    InvalidRequest,
    NoCapacity,
    NoSession,
    NotFound,
    QuotaReached,
    Result,
    Sandbox,
    ServerUnavailable,
    Unauthorized,
    Workspace,
)
from hutch.client import _sync_http, http
from hutch.client.transport import Server

INFO = {
    "id": "abc", "backend": "namespaces", "image": "host", "isolation": "ns", "limits": {},
    "workdir": "/workspace", "user": "user", "created_at": "2026-01-02T03:04:05.678Z",
    "something_new": [1],
}  # fmt: skip
DONE = {"exit_code": 3, "stdout": "hi\n", "stderr": "", "output": "hi\n", "cwd": "/tmp"}


@pytest.fixture
def server():
    with Scripted() as made:
        made.script = answers
        yield made
        _sync_http.POOLS.close()


def answers(asked) -> Answer:
    if asked.target == "/v1/sessions" and asked.verb == "POST":
        return of_json(INFO, 201)
    if asked.target.startswith("/v1/sessions/abc/shells/main/run"):
        if asked.headers["accept"] == "text/event-stream":
            return of_events(("chunk", {"stream": "stdout", "text": "hi\n"}), ("done", DONE))
        return of_json(DONE)
    if asked.target == "/v1/sessions/abc" and asked.verb == "GET":
        return of_json(INFO)
    return of_json({"ok": True})


def test_a_box_at_a_server_is_used_like_any_other(server):
    with Sandbox.create(url=server.url, api_key="k1", labels={"a": "b"}, ttl=60) as box:
        assert box.id == "abc" and box.info.created_at == 1767323045.678
        result = box.shell.run("echo hi", timeout=2)
        assert (result.exit_code, result.stdout, result.stdout_bytes) == (3, "hi\n", b"hi\n")
        with box.shell.stream("echo hi") as stream:
            first, last = stream
        assert first == Chunk(b"hi\n", "stdout") and isinstance(last, Result)
    opened, ran, streamed, closed = server.asked
    assert opened.json["labels"] == {"a": "b"} and opened.json["ttl_seconds"] == 60
    assert len(opened.json["idempotency_key"]) == 32
    assert ran.json == {"command": "echo hi", "timeout": 2}
    assert ran.headers["accept"] == "application/json"
    assert streamed.headers["accept"] == "text/event-stream"
    assert (closed.verb, closed.target) == ("DELETE", "/v1/sessions/abc")
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer k1"}
    assert not any("k1" in asked.target for asked in server.asked)


def test_the_async_box_too(server):
    async def use() -> Result:
        async with (
            await AsyncSandbox.create(url=server.url) as box,
            await box.shell.stream("x") as stream,
        ):
            return [item async for item in stream][-1]

    assert asyncio.run(use()).exit_code == 3
    assert not any("authorization" in asked.headers for asked in server.asked)


def test_a_box_may_be_used_in_one_loop_after_the_other(server):
    box = asyncio.run(AsyncSandbox.create(url=server.url))
    for _ in range(2):
        assert asyncio.run(box.shell.run("x")).exit_code == 3


def test_a_unix_socket_is_a_server_too(tmp_path):
    with Scripted(str(tmp_path / "s.sock")) as server:
        server.script = answers
        with Sandbox.create(url=server.url) as box:
            assert box.shell.run("x").exit_code == 3
        assert server.asked[0].headers["host"] == "localhost"
        _sync_http.POOLS.close()


def test_the_environment_names_the_server(server, monkeypatch):
    monkeypatch.setenv("HUTCH_URL", server.url + "/")
    monkeypatch.setenv("HUTCH_API_KEY", "from-the-environment")
    Sandbox.create().close()
    assert server.asked[0].headers["authorization"] == "Bearer from-the-environment"


def test_the_key_of_the_environment_is_for_its_own_server_only(server, monkeypatch):
    monkeypatch.setenv("HUTCH_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("HUTCH_API_KEY", "from-the-environment")
    Sandbox.create(url=server.url).close()
    assert "authorization" not in server.asked[0].headers


def test_a_path_before_the_routes_stays_there(server):
    server.script = lambda asked: of_json([])
    assert Sandbox.list(url=server.url + "/boxes/", label="a=b c") == []
    assert server.asked[0].target == "/boxes/v1/sessions?status=live&label=a%3Db%20c&limit=100"


def test_a_key_is_shown_nowhere(server):
    transport = _sync_http.HttpTransport(Server(server.url, "secret"))
    assert "secret" not in repr(transport) + repr(Server(server.url, "secret"))
    transport.close()


@pytest.mark.parametrize(
    "url, why",
    [
        ("ftp://x", "a url is http://"), ("x", "a url is"), ("", "a url is"),
        ("http://x:99999", "a url is"), ("http://", "a url is"),
        ("http://bücher..example", "a url is"),
        ("http://user:pass@x", "give the key as api_key"), ("http://x?key=1", "api_key"),
    ],
)  # fmt: skip
def test_a_url_that_is_none_is_told_at_once(url, why):
    with pytest.raises(InvalidRequest, match=why):
        Sandbox.create(url=url)


@pytest.mark.parametrize("key", ["a b", "a\r\nX: y", "ä", ""])
def test_a_key_cannot_smuggle_a_header(key):
    with pytest.raises(InvalidRequest, match="api_key is not a key") as caught:
        Sandbox.create(url="http://127.0.0.1:1", api_key=key)
    assert not key or key not in str(caught.value)


def test_a_key_without_a_server_is_an_error():
    with pytest.raises(InvalidRequest, match="HUTCH_URL"):
        Sandbox.create(api_key="k")
    with pytest.raises(InvalidRequest, match="HUTCH_URL"):
        Workspace("w")


def test_paths_of_the_server_are_not_looked_for_here(server):
    Sandbox.create(url=server.url, workspace="/not/here", mounts=["/nor/here:/data:ro"])
    assert server.asked[0].json["mounts"] == [
        {"source": "/not/here", "target": "/workspace", "read_only": False},
        {"source": "/nor/here", "target": "/data", "read_only": True},
    ]
    with pytest.raises(InvalidRequest, match="absolute"):
        Sandbox.create(url=server.url, workspace="not/here")


# --- errors -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "status, code, kind",
    [
        (404, "session_not_found", NoSession), (404, "not_found", NotFound),
        (429, "quota_reached", QuotaReached),
        (503, "no_capacity", NoCapacity), (500, "internal", HutchError),
        (500, "os.system", HutchError),
    ],
)  # fmt: skip
def test_an_error_of_the_server_is_raised_here(server, status, code, kind):
    server.script = lambda asked: refusal(status, code)
    with pytest.raises(kind, match="no") as caught:
        Sandbox.create(url=server.url)
    assert type(caught.value) is kind
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, b"<html>"), of_json([]), of_json({"id": 5}), Answer(302, b"elsewhere"),
        Answer(500, b"\xff" * 99), Answer(200, b'{"id": "\xff"}'), Answer(418),
        of_json({**INFO, "limits": {"memory": 1}}), Answer(200, b"[" * 100_000),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_of_ours_is_an_error_of_ours(server, answer):
    server.script = lambda asked: answer
    with pytest.raises(HutchError) as caught:
        Sandbox.create(url=server.url)
    assert not isinstance(caught.value, InvalidRequest)


def test_an_error_in_mid_stream_is_raised_there(server):
    lost = {"code": "box_lost", "message": "the box died"}
    box = Sandbox.create(url=server.url)
    server.script = lambda asked: of_events(
        ("chunk", {"stream": "stdout", "base64": "/w=="}), ("error", lost)
    )
    with box.shell.stream("x") as stream:
        assert next(stream).data == b"\xff"
        with pytest.raises(HutchError, match="the box died"):
            next(stream)


def test_an_answer_without_end_is_not_read_to_it(server, monkeypatch):
    monkeypatch.setattr(_sync_http, "MAX_ANSWER", 1000)
    server.script = lambda asked: Answer(pieces=[b"x" * 600] * 9)
    with pytest.raises(ServerUnavailable, match="more than 1000 bytes"):
        Sandbox.list(url=server.url)


# --- again ------------------------------------------------------------------------------


def in_turn(*answers):
    """Each answer once, then the last for ever."""
    left = list(answers)
    return lambda asked: left.pop(0) if len(left) > 1 else left[0]


def test_a_create_whose_answer_is_lost_is_asked_for_again_under_the_same_key(server):
    server.script = in_turn(None, Answer(body=b"{" * 50, cut=True), of_json(INFO, 201))
    assert Sandbox.create(url=server.url).id == "abc"
    keys = [asked.json["idempotency_key"] for asked in server.asked]
    assert len(keys) == 3 and len(set(keys)) == 1


def test_a_command_is_never_sent_twice(server):
    box = Sandbox.create(url=server.url)
    for script in (in_turn(None), in_turn(refusal(503, "server_unavailable", Retry_After="0"))):
        server.asked.clear()
        server.script = script
        with pytest.raises(ServerUnavailable):
            box.shell.run("x")
        with pytest.raises(ServerUnavailable), box.shell.stream("x") as stream:
            next(stream)
        assert len(server.asked) == 2


def test_a_command_whose_connection_ends_early_has_no_result(server):
    box = Sandbox.create(url=server.url)
    chunk = ("chunk", {"stream": "stdout", "text": "half"})
    for answer in (of_events(chunk, cut=True), of_events(chunk)):
        server.script = in_turn(answer)
        with box.shell.stream("x") as stream:
            assert next(stream).text == "half"
            with pytest.raises(ServerUnavailable, match="before the result came"):
                next(stream)


def test_who_is_told_to_come_back_comes_back(server):
    server.script = in_turn(
        refusal(503, "server_unavailable", Retry_After="0"),
        refusal(429, "quota_reached", retry_after="0"),
        of_json(INFO, 201),
    )
    assert Sandbox.create(url=server.url).id == "abc"


def test_who_is_told_to_come_back_too_late_is_told_so(server):
    server.script = in_turn(refusal(429, "quota_reached", Retry_After="600"))
    with pytest.raises(QuotaReached):
        Sandbox.create(url=server.url)
    assert len(server.asked) == 1


def test_a_server_that_is_started_anew_is_waited_for(server):
    box = Sandbox.create(url=server.url)
    port = server.port
    server.close()
    ran: list[Result] = []
    waiting = threading.Thread(target=lambda: ran.append(box.shell.run("x")))
    waiting.start()
    with Scripted(port=port, script=answers):  # before anybody can ask it
        waiting.join(30)
        assert ran and ran[0].exit_code == 3
        _sync_http.POOLS.close()


def test_a_server_that_never_was_there_is_named_soon_and_in_the_same_words(monkeypatch):
    monkeypatch.setattr("hutch.client.http.BUDGET", 3600)  # one that had answered is waited for
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        said = []
        for ask in (Sandbox.create, lambda url: asyncio.run(AsyncSandbox.create(url=url))):
            with pytest.raises(ServerUnavailable) as refused:
                ask(url=url)
            said.append(str(refused.value))
    wanted = f"cannot reach {url}: nothing listens there. Does `hutch serve` run there?"
    assert said == [wanted, wanted]


def test_a_host_that_is_not_there_is_told_in_the_same_words():
    url = "http://no-such-host.invalid:8080"
    for ask in (Sandbox.create, lambda url: asyncio.run(AsyncSandbox.create(url=url))):
        with pytest.raises(ServerUnavailable, match="no such host"):
            ask(url=url)


def test_who_has_no_key_is_told_where_to_put_one(server):
    server.script = lambda asked: refusal(401, "unauthorized")
    with pytest.raises(Unauthorized, match=r"needs a key: set HUTCH_API_KEY, or api_key="):
        Sandbox.create(url=server.url)
    with pytest.raises(Unauthorized, match="no"):
        Sandbox.create(url=server.url, api_key="another-one")


# httpcore drops the socket with which it tried, and does not close it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_socket_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(http, "SHORT_BUDGET", 0.2)
    with pytest.raises(ServerUnavailable, match=r"cannot reach unix:/no/such: no such socket"):
        Sandbox.create(url="unix:/no/such")
    gc.collect()


def test_a_peer_that_says_nothing_on_a_stream_is_dead(server, monkeypatch):
    monkeypatch.setattr(_sync_http, "SILENCE", 0.3)
    box = Sandbox.create(url=server.url)
    server.script = lambda asked: of_events(hold=threading.Event())
    with pytest.raises(ServerUnavailable, match="lost"), box.shell.stream("x") as stream:
        next(stream)


# --- leaving ----------------------------------------------------------------------------


def endless(asked) -> Answer:
    return of_events(("chunk", {"stream": "stdout", "text": "x"}), hold=threading.Event())


def test_leaving_a_stream_hangs_up(server):
    box = Sandbox.create(url=server.url)
    server.script = endless
    with box.shell.stream("x") as stream:
        next(stream)
        assert not server.gone.is_set()
    assert server.gone.wait(60)


def test_a_stream_that_is_forgotten_hangs_up(server):
    box = Sandbox.create(url=server.url)
    server.script = endless
    stream = box.shell.stream("x")
    next(stream)
    del stream
    gc.collect()
    assert server.gone.wait(60)


def test_a_cancelled_task_hangs_up(server):
    async def use() -> None:
        box = await AsyncSandbox.create(url=server.url)
        server.script = endless
        stream = await box.shell.stream("x")
        await anext(stream)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert await asyncio.to_thread(server.gone.wait, 10)

    asyncio.run(use())


def test_a_stream_may_be_closed_while_another_thread_waits_for_it(server):
    box = Sandbox.create(url=server.url)
    server.script = endless
    stream = box.shell.stream("x")
    items: list[object] = []
    waiting = threading.Thread(target=lambda: items.extend(stream))
    waiting.start()
    while not items:
        time.sleep(0.001)
    stream.close()
    waiting.join(60)
    assert not waiting.is_alive() and len(items) == 1
    assert server.gone.wait(60)


def test_a_stream_may_be_closed_before_its_answer_begins(server):
    box = Sandbox.create(url=server.url)
    asked, go = threading.Event(), threading.Event()

    def slow(request) -> Answer:
        asked.set()
        go.wait(30)
        return endless(request)

    server.script = slow
    stream = box.shell.stream("x")
    items: list[object] = []
    waiting = threading.Thread(target=lambda: items.extend(stream))
    waiting.start()
    assert asked.wait(60)
    threading.Timer(0.1, go.set).start()
    stream.close()
    waiting.join(60)
    assert not waiting.is_alive() and not items
    assert server.gone.wait(60)


def test_a_stream_may_be_closed_while_another_task_waits_for_it(server):
    async def use() -> None:
        box = await AsyncSandbox.create(url=server.url)
        server.script = endless
        stream = await box.shell.stream("x")
        items = []

        async def read() -> None:
            items.extend([item async for item in stream])

        first = await anext(stream)
        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        await stream.aclose()
        await asyncio.wait_for(reading, 60)
        assert first.text == "x" and not items

    asyncio.run(use())


def test_one_connection_serves_call_after_call(server):
    box = Sandbox.create(url=server.url)
    ports = set()
    server.script = lambda asked: (ports.add(threading.get_ident()), answers(asked))[1]
    for _ in range(5):
        box.shell.run("x")
        with box.shell.stream("x") as stream:
            assert len(list(stream)) == 2
        box.shell.run("x", on_stdout=lambda text: None)
    assert len(ports) == 1


def test_threads_share_a_box(server):
    box = Sandbox.create(url=server.url)
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda: codes.extend(box.shell.run("x").exit_code for _ in "12345"))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert codes == [3] * 40


def test_a_fork_has_connections_of_its_own(server):
    box = Sandbox.create(url=server.url)
    box.shell.run("x")
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = box.shell.run("x").exit_code
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert box.shell.run("x").exit_code == 3


# --- files ------------------------------------------------------------------------------


def test_files_go_up_piece_by_piece(server):
    box = Sandbox.create(url=server.url)
    server.script = lambda asked: of_json({"value": len(asked.body)})
    assert box.files.write("a b", iter([b"one", b"two"])) == 6
    assert box.files.write("c", "whole", append=True) == 5
    assert box.files.write("empty", b"") == 0
    first, second, third = server.asked[1:]
    assert first.headers["transfer-encoding"] == "chunked"
    assert (first.verb, first.target, first.body) == (
        "PUT", "/v1/sessions/abc/files/content?path=a%20b", b"onetwo",
    )  # fmt: skip
    assert second.target.endswith("?path=c&append=true") and second.body == b"whole"
    assert third.headers["content-length"] == "0"


def test_an_error_of_the_callers_own_iterator_is_the_callers(server):
    def pieces():
        yield b"one"
        raise KeyError("mine")

    box = Sandbox.create(url=server.url)
    with pytest.raises(KeyError, match="mine"):
        box.files.write("a", pieces())
    assert box.shell.run("x").exit_code == 3


def test_files_of_a_workspace_have_routes_of_their_own(server, tmp_path):
    tar = Answer(pieces=[b"tar", b"ball"])
    server.script = lambda asked: tar if "export" in asked.target else of_json({"value": 2})
    workspace = Workspace("w1", url=server.url)
    workspace.files.write("a", b"x")
    assert workspace.export(tmp_path / "w.tar") == 7
    assert (tmp_path / "w.tar").read_bytes() == b"tarball"
    assert workspace.import_(tmp_path / "w.tar") == 2
    with open(tmp_path / "w.tar", "rb") as file:
        assert workspace.import_(file) == 2
    assert [asked.target for asked in server.asked] == [
        "/v1/workspaces/w1/files/content?path=a", "/v1/workspaces/w1/export",
        "/v1/workspaces/w1/import", "/v1/workspaces/w1/import",
    ]  # fmt: skip
    assert server.asked[-1].body == server.asked[-2].body == b"tarball"


def test_an_export_that_breaks_off_replaces_nothing(server, tmp_path):
    (tmp_path / "w.tar").write_text("old")
    server.script = lambda asked: Answer(pieces=[b"half"], cut=True)
    with pytest.raises(ServerUnavailable):
        Workspace("w1", url=server.url).export(tmp_path / "w.tar")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


# --- what is loaded ---------------------------------------------------------------------


def test_who_needs_no_server_loads_nothing_of_http():
    code = (
        "import sys, hutch; hutch.Sandbox, hutch.AsyncSandbox\n"
        "bad = {'httpcore', 'h11', 'msgspec', 'anyio', 'hutch.codec', 'hutch.serving'}\n"
        "assert not bad & {*sys.modules}, bad & {*sys.modules}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
