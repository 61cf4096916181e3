"""HTTPS: what holds for connections without TLS holds for those with it."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from http_of_tests import KEY, Running, eventually, read_all
from websockets.sync.client import connect

from hutch.errors import InvalidRequest
from hutch.server.http import tls
from hutch.server.http.http_protocol import MAX_PIPELINED, ConnectionLimits, HTTPProtocol
from hutch.server.http.tls import Certificate, load
from tls_of_tests import make_certificate, make_expired, with_passphrase

AUTH = f"Authorization: Bearer {KEY}\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
OK = b"HTTP/1.1 200 OK"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory, files: tuple[Path, Path]) -> Iterator[Running]:
    """A server with HTTPS, and few connections."""
    folder = tmp_path_factory.mktemp("secure")
    limits = ConnectionLimits(max_connections=10)
    running = Running(folder, limits=limits, certificate=Certificate(*files))
    yield running
    running.close()


@pytest.fixture(autouse=True)
def nobody_is_left(secure: Running) -> Iterator[None]:
    yield
    eventually(lambda: not secure.server._limits.count)


def trusting(cert: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(cert))


@pytest.fixture
def dial(secure: Running, files: tuple[Path, Path]) -> Iterator[Callable[..., ssl.SSLSocket]]:
    """A connection with TLS. `small`: one that holds little that was not read."""
    opened = []

    def dial(*, small: bool = False) -> ssl.SSLSocket:
        raw = socket.socket()
        raw.settimeout(30)
        if small:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", secure.port))
        sock = trusting(files[0]).wrap_socket(raw, server_hostname="localhost")
        opened.append(sock)
        return sock

    yield dial
    for sock in opened:
        sock.close()


@pytest.fixture
def impatient(secure: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server waits half a second for a handshake and for a head."""
    monkeypatch.setattr(secure.server._limits, "head_time", 0.5)


def send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError:
        pass  # the server hung up


def test_requests_events_and_files_go_over_tls(secure: Running, files: tuple[Path, Path]) -> None:
    line = http.client.HTTPSConnection(
        "localhost", secure.port, timeout=60, context=trusting(files[0])
    )
    headers = {"Authorization": f"Bearer {KEY}"}

    def ask(verb: str, path: str, body: bytes | None = None, **more: str) -> bytes:
        line.request(verb, path, body, {**headers, **more})
        return line.getresponse().read()

    made = json.loads(ask("POST", "/v1/sessions"))
    base = f"/v1/sessions/{made['id']}"
    data = bytes(range(256)) * 8192
    ask("PUT", f"{base}/files/content?path=x", data)
    assert ask("GET", f"{base}/files/content?path=x") == data
    kind = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    events = ask("POST", f"{base}/shells/main/run", b'{"command": "echo hello"}', **kind)
    assert b"event: chunk" in events and b"event: done" in events
    url = f"wss://localhost:{secure.port}{base}/pty?command=echo+over+tls"
    with connect(
        url, ssl=trusting(files[0]), additional_headers=headers, compression=None, proxy=None
    ) as ws:
        assert b"over tls" in b"".join(said for said in ws if isinstance(said, bytes))
    assert secure.server.url == f"https://127.0.0.1:{secure.port}"
    for origin, status in (("http", 403), ("https", 200)):
        line.request("GET", "/healthz", headers={"Origin": f"{origin}://localhost:{secure.port}"})
        answer = line.getresponse()
        answer.read()
        assert answer.status == status
    ask("DELETE", base)
    line.close()


def test_who_speaks_plain_http_is_told_to_use_https(secure: Running) -> None:
    answer = secure.raw(HEALTH)
    assert answer.startswith(b"HTTP/1.1 400") and b"https://" in answer


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_versions_of_tls_are_refused(secure: Running, files: tuple[Path, Path]) -> None:
    context = trusting(files[0])
    context.set_ciphers("DEFAULT@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", secure.port), timeout=30) as raw,
        pytest.raises((ssl.SSLError, OSError)),
    ):
        context.wrap_socket(raw, server_hostname="localhost")


HELLO = b"\x16\x03\x01\x02\x00\x01\x00"  # the beginning of a handshake


def test_handshakes_that_do_not_go_on_keep_nobody_out(
    secure: Running, dial: Callable[..., ssl.SSLSocket]
) -> None:
    limits = secure.server._limits
    before = limits.ended["tls_handshake"]
    half = []
    for _ in range(30):
        half.append(socket.create_connection(("127.0.0.1", secure.port), timeout=30))
        half[-1].sendall(HELLO)
    sock = dial()
    assert limits.count <= 10
    sock.sendall(HEALTH)
    assert sock.recv(65536).startswith(OK)
    eventually(lambda: limits.ended["tls_handshake"] >= before + 21)
    for each in half:
        each.close()


@pytest.mark.usefixtures("impatient")
def test_a_handshake_that_does_not_go_on_is_not_waited_for(secure: Running) -> None:
    assert secure.raw(HELLO) == b""
    assert secure.raw(b"") == b""


def test_a_head_that_does_not_come_after_a_handshake_is_not_waited_for(
    secure: Running, dial: Callable[..., ssl.SSLSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    sock = dial()
    sock.sendall(HEALTH)
    assert sock.recv(65536).startswith(OK)
    monkeypatch.setattr(secure.server._limits, "head_time", 0.5)
    sock.sendall(HEALTH[:10])
    assert read_all(sock).startswith(b"HTTP/1.1 408")


def test_pipelined_requests_over_tls_do_not_pile_up(
    secure: Running, dial: Callable[..., ssl.SSLSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server reads nothing more, so it waits as long for a goodbye that it cannot see.
    monkeypatch.setattr(secure.server._limits, "write_stall", 2.0)
    sock = dial()
    sock.sendall(HEALTH)
    assert sock.recv(65536).startswith(OK)
    writer = threading.Thread(target=send, args=(sock, HEALTH * 20_000), daemon=True)
    writer.start()
    answers = b""
    try:
        while piece := sock.recv(65536):
            answers += piece
            for guard in list(secure.server._state.connections):
                assert isinstance(guard, HTTPProtocol) and len(guard.pipeline) <= MAX_PIPELINED
    except OSError:
        pass  # a reset takes answers with it that were not read yet, perhaps all
    assert answers.count(OK) <= MAX_PIPELINED
    writer.join()


@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"])
def test_who_does_not_read_over_tls_is_cut_off(
    secure: Running,
    dial: Callable[..., ssl.SSLSocket],
    close: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secure.server._limits, "write_stall", 0.5)
    sock = dial(small=True)
    one = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n"
    sock.sendall((one + b"\r\n") * 90 + one + close + b"\r\n")
    assert sock.recv(12) == b"HTTP/1.1 200"
    [guard] = eventually(lambda: [*secure.server._state.connections])
    eventually(lambda: guard.write_buffer.get_write_buffer_size())
    assert guard.write_buffer.get_write_buffer_size() < 4 << 20
    eventually(lambda: not secure.server._limits.count)  # while we still hold our end


def test_who_says_no_goodbye_is_not_waited_for(
    secure: Running, dial: Callable[..., ssl.SSLSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure.server._limits, "write_stall", 0.5)
    sock = dial()
    sock.sendall(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert sock.recv(65536).startswith(OK)
    eventually(lambda: not secure.server._limits.count)  # while we still hold our end


def test_a_slow_reader_over_tls_gets_everything(dial: Callable[..., ssl.SSLSocket]) -> None:
    sock = dial(small=True)
    one = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n"
    sock.sendall((one + b"\r\n") * 30 + one + b"Connection: close\r\n\r\n")
    got = b""
    for _ in range(20):
        got += sock.recv(4096)
        time.sleep(0.01)
    got += read_all(sock)
    assert got.count(OK) == 31 and got.endswith(b"}")


def test_nonsense_over_tls_is_no_line_in_the_log(
    secure: Running, dial: Callable[..., ssl.SSLSocket], caplog: pytest.LogCaptureFixture
) -> None:
    for data in (b"\x16" * 5000, b"\x16\x03\x01\xff\xff" + bytes(70_000), bytes(100)):
        secure.raw(data)
    for data in (b"\xff" * 1000, HEALTH * 50):
        sock = dial()
        sock.sendall(data)
        raw = socket.socket(fileno=sock.detach())
        raw.settimeout(30)
        send(raw, b"\x17\x03\x03\x00\x20" + bytes(32))  # a record that cannot be decrypted
        read_all(raw)
        raw.close()
    eventually(lambda: not secure.server._limits.count)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


# --- files ----------------------------------------------------------------------------------


@pytest.fixture
def spoiled(tmp_path: Path, files: tuple[Path, Path]) -> dict[str, tuple[Path, Path]]:
    cert, key = files
    (tmp_path / "text").write_text("hello")
    (tmp_path / "damaged").write_text(cert.read_text().replace("A", "B"))
    return {
        "cannot read the TLS certificate .*nowhere: No such file": (tmp_path / "nowhere", key),
        "cannot read the TLS key .*nowhere: No such file": (cert, tmp_path / "nowhere"),
        "the TLS certificate .*text is not a PEM file": (tmp_path / "text", key),
        "does not belong to the certificate": (cert, make_certificate(tmp_path, "other")[1]),
        "there is no private key in": (cert, cert),
        "has expired: renew it": (make_expired(tmp_path, key), key),
        "has a passphrase": (cert, with_passphrase(tmp_path, key)),
        "is damaged|cannot be used": (tmp_path / "damaged", key),
    }


def test_files_that_cannot_be_used_are_told_apart(
    spoiled: dict[str, tuple[Path, Path]],
) -> None:
    for why, (cert, key) in spoiled.items():
        with pytest.raises(InvalidRequest, match=why):
            load(cert, key)


def test_spoiled_files_leave_the_certificate_from_before_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = make_certificate(tmp_path)
    certificate = Certificate(cert, key)
    first = certificate.context
    new_cert, new_key = make_certificate(tmp_path, "new")
    certificate.refresh()
    assert certificate.context is first and caplog.records == []
    new_cert.replace(cert)
    certificate.refresh()  # when the key is not there yet
    assert certificate.context is first
    assert "does not belong to the certificate" in caplog.text
    caplog.clear()
    certificate.refresh()
    assert caplog.records == []  # nothing changed, and it was said already
    new_key.replace(key)
    certificate.refresh()
    assert certificate.context is not first
    cert.unlink()
    certificate.refresh()
    assert "No such file" in caplog.text


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text("no PEM")])
def test_a_file_that_changes_while_it_is_loaded_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    cert, key = make_certificate(tmp_path)
    certificate = Certificate(cert, key)
    first, check_dates = certificate.context, tls._check_dates

    def change_and_check(context: ssl.SSLContext, path: Path) -> float:
        change(path)
        return check_dates(context, path)

    with monkeypatch.context() as patched:
        patched.setattr(tls, "_check_dates", change_and_check)
        cert.touch()
        certificate.refresh()
    assert certificate.context is first
    for new, old in zip(make_certificate(tmp_path, "new"), (cert, key), strict=True):
        new.replace(old)
    certificate.refresh()
    assert certificate.context is not first


def test_a_certificate_is_followed_whatever_happens(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = Certificate(*files)
    looks = 0

    def fail() -> None:
        nonlocal looks
        looks += 1
        raise RuntimeError("a bug")

    monkeypatch.setattr(certificate, "refresh", fail)
    monkeypatch.setattr(tls, "LOOK", 0.001)

    async def main() -> None:
        follow = asyncio.create_task(certificate.follow())
        while looks < 3 and not follow.done():
            await asyncio.sleep(0.001)
        assert not follow.done()
        follow.cancel()

    asyncio.run(main())
