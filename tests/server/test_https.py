"""`hutch serve` with a certificate, as a process, and clients that trust it."""

from __future__ import annotations

import http.client
import ssl
import subprocess
from pathlib import Path

import pytest

from daemon_of_tests import HUTCH, KEY, Daemon, wait_for
from hutch import Sandbox
from tls_of_tests import make_certificate


class Secure(Daemon):
    def __init__(self, folder: Path, cert: Path, key: Path) -> None:
        super().__init__(folder, tls_cert=str(cert), tls_key=str(key))

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def shown_certificate(self) -> str:
        """The one that a new connection gets, in PEM."""
        return ssl.get_server_certificate(("127.0.0.1", self.port), timeout=20)


def hutch(command: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HUTCH, command], env=environment, text=True, capture_output=True, timeout=60
    )


def test_clients_use_https_and_a_new_certificate_is_used_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = make_certificate(tmp_path)
    new_cert, new_key = make_certificate(tmp_path, "new")
    first, second = cert.read_text(), new_cert.read_text()
    trusted = tmp_path / "trusted.pem"
    trusted.write_text(first + second)
    with Secure(tmp_path / "data", cert, key) as daemon:
        assert daemon.url.startswith("https://127.0.0.1:")
        environment = {**daemon.environment, "HUTCH_URL": daemon.url}
        refused = hutch("ps", environment)
        assert "certificate is not accepted: self-signed certificate" in refused.stderr
        assert "SSL_CERT_FILE" in refused.stderr
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        with Sandbox.create(url=daemon.url, api_key=KEY) as box:
            assert box.shell.run("echo over tls").stdout == "over tls\n"
            shown = hutch("ps", {**environment, "SSL_CERT_FILE": str(trusted)})
            assert box.id in shown.stdout, shown.stderr

            open_line = http.client.HTTPSConnection("localhost", daemon.port, timeout=60)
            open_line.request("GET", "/healthz")
            assert open_line.getresponse().read() == b'{"status":"ok"}'
            assert daemon.shown_certificate() == first

            new_cert.replace(cert)
            assert wait_for(lambda: "does not belong to the certificate" in daemon.complaint())
            assert daemon.shown_certificate() == first  # and goes on with what it has
            new_key.replace(key)
            assert wait_for(lambda: daemon.shown_certificate() == second)

            open_line.request("GET", "/healthz")  # on the connection from before
            assert open_line.getresponse().read() == b'{"status":"ok"}'
            open_line.close()
            assert box.shell.run("echo still").stdout == "still\n"


def test_a_server_does_not_start_with_a_certificate_that_it_cannot_use(tmp_path: Path) -> None:
    cert, _ = make_certificate(tmp_path)
    other = make_certificate(tmp_path, "other")[1]
    with pytest.raises(RuntimeError, match="does not belong to the certificate"):
        Secure(tmp_path / "data", cert, other).start()
    with pytest.raises(RuntimeError, match=r"cannot read the TLS key .*nowhere: No such file"):
        Secure(tmp_path / "data", cert, tmp_path / "nowhere").start()
    with pytest.raises(RuntimeError, match=r"tls\.key is missing"):
        Daemon(tmp_path / "data", tls_cert=str(cert)).start()
