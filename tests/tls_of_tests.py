"""Certificates for tests, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from must_work import need


def make_certificate(
    folder: Path, name: str = "server", is_authority: bool = True
) -> tuple[Path, Path]:
    """A certificate for this machine, signed by itself, and its key. Written over what is there.

    rustls, which uv uses, takes none of a server that `is_authority`.
    """
    cert, key = folder / f"{name}-cert.pem", folder / f"{name}-key.pem"
    _openssl(
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "30",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
        *([] if is_authority else ["-addext", "basicConstraints=critical,CA:FALSE"]),
        "-keyout",
        str(key),
        "-out",
        str(cert),
    )
    return cert, key


def make_expired(folder: Path, key: Path) -> Path:
    """A certificate for this key that expired yesterday."""
    request, cert = folder / "expired.csr", folder / "expired-cert.pem"
    _openssl("req", "-new", "-key", str(key), "-subj", "/CN=localhost", "-out", str(request))
    _openssl(
        "x509", "-req", "-in", str(request), "-signkey", str(key), "-days", "-1", "-out", str(cert)
    )
    return cert


def with_passphrase(folder: Path, key: Path) -> Path:
    locked = folder / "locked-key.pem"
    _openssl("pkcs8", "-topk8", "-in", str(key), "-passout", "pass:word", "-out", str(locked))
    return locked


def _openssl(*words: str) -> None:
    if not shutil.which("openssl"):
        need("openssl", "there is no openssl here")
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)
