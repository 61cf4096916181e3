"""Which requests are sent again, and what the caller is told of those that are not."""

from __future__ import annotations

import errno
import socket
import ssl
from pathlib import Path

import pytest

from hutch import QuotaReached, ServerBusy, ServerUnavailable
from hutch import operations as op
from hutch.client.http import BUDGET, BUSY_BUDGET, Attempts

SAFE = [op.GetSession("s"), op.ListSessions(), op.OpenSession(), op.CloseSession("s"),
        op.ExtendSession("s", 5), op.ReadFile("s", "p"), op.WaitProgram("s", "p")]  # fmt: skip
NOT_SAFE = [op.RunShell("s", "x"), op.RunCode("s", "x"), op.RunProgram("s", ("x",)),
            op.StartProgram("s", ("x",)), op.WriteFile("s", "p", b""), op.SendInput("s", "p", b""),
            op.MakeDir("s", "p"), op.RemoveFile("s", "p"), op.Hibernate("s")]  # fmt: skip


@pytest.mark.parametrize("operation", [*SAFE, *NOT_SAFE], ids=lambda o: type(o).__name__)
def test_what_was_never_sent_is_sent_again(operation):
    assert 0 < Attempts(operation, "x").after_no_connection(ConnectionRefusedError()) < 1


@pytest.mark.parametrize("operation", SAFE, ids=lambda o: type(o).__name__)
def test_what_cannot_be_done_twice_by_it_is_asked_again(operation):
    assert Attempts(operation, "x").after_loss() > 0


@pytest.mark.parametrize("operation", NOT_SAFE, ids=lambda o: type(o).__name__)
def test_what_might_be_done_twice_is_not_asked_again(operation):
    with pytest.raises(ServerUnavailable, match="was lost"):
        Attempts(operation, "x").after_loss()
    with pytest.raises(QuotaReached, match="busy"):
        Attempts(operation, "x").after_refusal(QuotaReached("busy"), 0)


def test_a_refusal_is_final_unless_it_says_when_to_come_back():
    attempts = Attempts(op.OpenSession(), "x")
    assert attempts.after_refusal(QuotaReached("busy"), 2.0) == 2.0
    with pytest.raises(QuotaReached, match="busy"):
        attempts.after_refusal(QuotaReached("busy"), None)


def test_a_busy_server_is_asked_again_for_longer_also_the_first_time_it_answers():
    attempts, busy = Attempts(op.OpenSession(), "x", reached=False), ServerBusy("busy")
    assert attempts.after_refusal(busy, BUDGET + 1) == BUDGET + 1
    with pytest.raises(ServerBusy, match="busy") as caught:
        attempts.after_refusal(busy, BUSY_BUDGET + 1)
    assert caught.value.retry_after == BUSY_BUDGET + 1


def test_nobody_waits_for_longer_than_the_budget():
    attempts, spent = Attempts(op.ListSessions(), "x"), 0.0
    with pytest.raises(QuotaReached, match="busy"):
        attempts.after_refusal(QuotaReached("busy"), BUDGET + 1)
    attempts._deadline -= BUDGET  # as if that had passed
    with pytest.raises(ServerUnavailable, match=r"cannot reach x: .*`hutch serve`"):
        spent += attempts.after_no_connection(ConnectionRefusedError("refused"))
    assert not spent


@pytest.mark.parametrize("exc", [socket.gaierror(-2, "no such name"), PermissionError("no")])
def test_what_waiting_does_not_help_is_told_at_once(exc):
    outer = OSError("all attempts failed")
    outer.__cause__ = exc
    with pytest.raises(ServerUnavailable, match="cannot reach"):
        Attempts(op.ListSessions(), "x").after_no_connection(outer)


def test_the_pauses_grow():
    attempts = Attempts(op.ListSessions(), "x")
    pauses = [attempts.after_loss() for _ in range(8)]
    assert pauses == sorted(pauses) and pauses[-1] == 1.0 and pauses[0] < 0.1


def test_of_a_command_it_is_told_that_it_was_stopped():
    with pytest.raises(ServerUnavailable, match="server stops a command"):
        Attempts(op.RunShell("s", "x"), "http://h").after_loss()
    with pytest.raises(ServerUnavailable, match="not known whether WriteFile was done"):
        Attempts(op.WriteFile("s", "x", b""), "http://h").after_loss()


def test_a_file_of_trusted_certificates_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = ssl.SSLCertVerificationError("refused")
    refused.verify_message = "self-signed certificate"

    def said() -> str:
        with pytest.raises(ServerUnavailable) as caught:
            Attempts(op.GetSession("s"), "https://h").after_no_connection(refused)
        return str(caught.value)

    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    assert "name it in SSL_CERT_FILE" in said() and "hutch serve" not in said()
    file = tmp_path / "ca.pem"
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    assert f"SSL_CERT_FILE names {file}, which cannot be read: No such file" in said()
    file.write_text("nothing")
    assert f"SSL_CERT_FILE names {file}, which has no PEM certificate" in said()


def test_who_may_not_open_a_socket_is_not_told_to_start_a_server() -> None:
    refused = PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(ServerUnavailable, match="run this as the server") as caught:
        Attempts(op.GetSession("s"), "unix:/x").after_no_connection(refused)
    assert "hutch serve" not in str(caught.value)
