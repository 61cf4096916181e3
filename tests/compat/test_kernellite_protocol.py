"""What goes over the socket, word for word; and whatever else may come."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from typing import Any

import pytest
from asking import Served, ask, receive, send, wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def raw(shared: Served, data: bytes, *, close: bool = True) -> dict[str, Any]:
    with shared.connect() as sock:
        sock.sendall(data)
        if close:
            sock.shutdown(socket.SHUT_WR)
        return receive(sock)


def framed(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


# --- the words -----------------------------------------------------------------------------


def test_a_cell_gives_three_fields_and_no_more(shared: Served) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr)"
    assert shared.exec(code) == {"status": "[OK] exec", "stdout": "out\n", "stderr": "err\n"}


def test_a_cell_that_raises_has_its_traceback_in_stderr(shared: Served) -> None:
    answer = shared.exec("print('so far')\n1 / 0")
    assert (answer["status"], answer["stdout"]) == ("[ERROR] exec", "so far\n")
    assert answer["stderr"].startswith("\nTraceback") and "1 / 0" in answer["stderr"]
    assert answer["stderr"].endswith("ZeroDivisionError: division by zero\n")


def test_ping_is_answered(shared: Served) -> None:
    assert shared.ask(op="ping") == {"status": "[OK] pong"}


@pytest.mark.parametrize("op", ["dance", "EXEC", "", None, 1, ["exec"], {"op": "exec"}])
def test_what_is_no_op_is_a_bad_op(shared: Served, op: Any) -> None:
    assert shared.ask(op=op) == {"status": "[ERROR] bad_op"}


@pytest.mark.parametrize("body", [b"{}", b"null", b"[]", b'""', b"0", b""])
def test_a_request_without_anything_is_empty(shared: Served, body: bytes) -> None:
    assert raw(shared, framed(body)) == {"status": "[ERROR] empty"}


def test_a_connection_without_a_request_is_empty(shared: Served) -> None:
    assert raw(shared, b"") == {"status": "[ERROR] empty"}


def test_a_cell_without_code_does_nothing(shared: Served) -> None:
    assert shared.ask(op="exec") == {"status": "[OK] exec", "stdout": "", "stderr": ""}


@pytest.mark.parametrize("code", [1, None, ["print(1)"], "\ud800"])
def test_code_that_is_no_text_is_an_error_of_the_cell(shared: Served, code: Any) -> None:
    answer = shared.ask(op="exec", code=code)
    assert answer["status"] == "[ERROR] exec" and answer["stdout"] == "" and answer["stderr"]


def test_code_that_is_too_long_is_an_error_of_the_cell(shared: Served) -> None:
    answer = shared.exec("#" * 17_000_000)
    assert answer["status"] == "[ERROR] exec" and "too long" in answer["stderr"]


@pytest.mark.parametrize("timeout", [0, -1, "5", True, float("nan"), float("inf"), [1]])
def test_a_timeout_that_is_none_is_refused_and_nothing_is_run(shared: Served, timeout: Any) -> None:
    answer = shared.exec("print('ran')", timeout=timeout)
    assert answer["status"] == "[ERROR] exec" and answer["stdout"] == ""
    assert "timeout" in answer["stderr"]


# --- pieces and noise ----------------------------------------------------------------------


def test_a_request_can_come_byte_by_byte(shared: Served) -> None:
    with shared.connect() as sock:
        for byte in framed(b'{"op": "ping"}'):
            sock.sendall(bytes([byte]))
        assert receive(sock) == {"status": "[OK] pong"}


def test_large_code_and_large_answers_arrive_whole(shared: Served) -> None:
    text = "x" * 900_000
    assert shared.exec(f"print({text!r})")["stdout"] == text + "\n"


@pytest.mark.parametrize("data", [b"\0", b"\0\0\0", b"\0\0\0\x10", b'\0\0\0\x10{"op"'])
def test_a_request_that_breaks_off_is_told_so(shared: Served, data: bytes) -> None:
    answer = raw(shared, data)
    assert answer["status"] == "[ERROR] server" and "broke off" in answer["stderr"]


@pytest.mark.parametrize("body", [b"ping", b"{", b"\xff\xfe", b"[" * 100_000, b"1" * 10_000])
def test_what_is_no_json_is_told_so(shared: Served, body: bytes) -> None:
    answer = raw(shared, framed(body))
    assert answer["status"] == "[ERROR] server" and "JSON" in answer["stderr"]


@pytest.mark.parametrize("body", [b"[1]", b'"exec"', b"7", b"true"])
def test_json_that_is_no_request_is_told_so(shared: Served, body: bytes) -> None:
    assert raw(shared, framed(body))["status"] == "[ERROR] server"


@pytest.mark.parametrize("length", [0xFFFFFFFF, 64 * 1024 * 1024 + 1])
def test_a_huge_length_is_refused_before_anything_is_read(shared: Served, length: int) -> None:
    answer = raw(shared, struct.pack("!I", length) + b"x", close=False)
    assert answer["status"] == "[ERROR] server" and str(length) in answer["stderr"]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(noise=st.binary(max_size=200))
def test_noise_is_answered_and_the_next_is_served(shared: Served, noise: bytes) -> None:
    if len(noise) >= 4:
        noise = struct.pack("!I", len(noise) - 4) + noise[4:]
    with contextlib.suppress(ConnectionError):  # it may have heard enough before we ended
        assert raw(shared, noise)["status"].startswith("[")
    assert shared.ask(op="ping") == {"status": "[OK] pong"}


# --- clients that behave oddly -------------------------------------------------------------


def test_clients_that_say_nothing_keep_nobody_waiting(shared: Served) -> None:
    with contextlib.ExitStack() as silent:
        for _ in range(50):
            silent.enter_context(shared.connect()).sendall(b"\0\0")
        assert shared.exec("1 + 1")["stdout"] == "2\n"


def test_too_many_clients_are_sent_away_and_not_kept_waiting(shared: Served) -> None:
    with contextlib.ExitStack() as silent:
        for _ in range(256):
            sock = silent.enter_context(shared.connect())
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(b"\0")  # one of an earlier test may still be counted
        answer = shared.ask(op="ping")
        assert answer["status"] == "[ERROR] server" and "try again later" in answer["stderr"]
    wait_until(lambda: shared.ask(op="ping") == {"status": "[OK] pong"})


def test_a_client_that_never_reads_keeps_nobody_waiting(shared: Served) -> None:
    with shared.start("print('x' * 900_000)"):
        assert shared.exec("'next'")["stdout"] == "'next'\n"


def test_clients_that_vanish_at_any_point_leave_nothing_behind(shared: Served) -> None:
    whole = framed(json.dumps({"op": "exec", "code": "1"}).encode())
    for size in range(len(whole) + 1):
        with shared.connect() as sock:
            sock.sendall(whole[:size])
    assert shared.exec("'here'")["stdout"] == "'here'\n"


def test_a_client_may_stop_sending_and_wait_for_its_answer(shared: Served) -> None:
    with shared.connect() as sock:
        send(sock, {"op": "exec", "code": "import time; time.sleep(0.3); print('still here')"})
        sock.shutdown(socket.SHUT_WR)
        assert receive(sock)["stdout"] == "still here\n"


def test_only_the_first_request_of_a_connection_is_answered(shared: Served) -> None:
    with shared.connect() as sock:
        sock.sendall(framed(b'{"op": "ping"}') * 2)
        with contextlib.suppress(ConnectionError):
            assert ask(sock, {"op": "ping"}) == {"status": "[OK] pong"}
    assert shared.ask(op="ping") == {"status": "[OK] pong"}
