"""HTTPS: the certificate of a server, and connections that are encrypted with it.

The certificate's files are read again when they change. New connections use the new certificate,
and those that are open keep theirs. Files that cannot be used are reported, and the certificate
from before stays in use.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import stat
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hutch.errors import InvalidRequest

from .limits import ConnectionLimits

if TYPE_CHECKING:
    from .http_protocol import HTTPProtocol

LOOK = 1.0  # seconds between two looks at the files
EXPIRES_SOON = 14 * 86_400  # seconds
READ = 16 * 1024  # bytes at once, which is one record of TLS
# What asyncio holds for an answer before it makes us wait, as for connections without TLS.
WRITE_AHEAD = 64 * 1024
HANDSHAKE_RECORD = 0x16  # the first byte of every TLS connection
# Not decided here, but by `WriteBuffer`, which closes a connection whose peer reads too slowly.
SHUTDOWN_TIME = 3600.0
# What OpenSSL says of a key of the same kind as the certificate's, and of one of another kind.
MISMATCH = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
EXPIRED, NOT_YET_VALID = 10, 9  # what OpenSSL calls X509_V_ERR_CERT_…
log = logging.getLogger("hutch")

_BODY = msgspec.json.encode(
    {
        "error_code": "INVALID_REQUEST",
        "message": "this server speaks HTTPS: its address begins with https://",
        "code": "invalid_request",
    }
)
_NOT_TLS = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_BODY), _BODY)
)


class Certificate:
    """A certificate and its key, in PEM. Raises InvalidRequest if a file cannot be used."""

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert, self._key = cert, key
        self._seen = self._look()
        self.context, self.expires_at = load(cert, key)
        self._warn()

    def __repr__(self) -> str:
        return f"<Certificate {self._cert}>"

    async def follow(self) -> None:
        """Read the files again whenever they change, until cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            try:
                await asyncio.to_thread(self.refresh)
            except Exception:
                log.exception("cannot look for a new certificate in %s; trying again", self._cert)

    def refresh(self) -> None:
        """Read the files again if they have changed since the last look."""
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self.context, self.expires_at = load(self._cert, self._key)
        except InvalidRequest as exc:
            # Also while one of the two files is new and the other is not yet. The next change is
            # another try.
            log.warning("%s; the certificate from before stays in use", exc)
        else:
            log.info("the certificate in %s changed and is in use now", self._cert)
            self._warn()

    def _look(self) -> tuple[object, ...]:
        """A value that changes when a file is written or replaced; links are followed."""
        seen: list[object] = []
        for path in (self._cert, self._key):
            try:
                info = path.stat()
            except OSError as exc:
                seen.append(exc.errno)
            else:
                seen.append((info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns))
        return tuple(seen)

    def _warn(self) -> None:
        if self.expires_at - time.time() < EXPIRES_SOON:
            day = time.strftime("%Y-%m-%d", time.gmtime(self.expires_at))
            log.warning("the certificate in %s expires on %s", self._cert, day)
        try:
            mode = self._key.stat().st_mode
        except OSError:
            return
        if mode & stat.S_IROTH:
            log.warning("all users of this machine can read %s: chmod 600", self._key)


def load(cert: Path, key: Path) -> tuple[ssl.SSLContext, float]:
    """A context for a server, and when its certificate expires. Raises InvalidRequest."""
    for name, path in (("certificate", cert), ("key", key)):
        try:
            with open(path, "rb") as file:
                is_pem = b"-----BEGIN" in file.read(1 << 20)
        except OSError as exc:
            raise InvalidRequest(f"cannot read the TLS {name} {path}: {exc.strerror}") from None
        if not is_pem:
            raise InvalidRequest(f"the TLS {name} {path} is not a PEM file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without a function OpenSSL would ask for a passphrase at the terminal.
        context.load_cert_chain(cert, key, password=lambda: b"")
    except ssl.SSLError as exc:
        raise InvalidRequest(_why(exc, cert, key)) from None
    except OSError as exc:  # replaced since it was opened above
        raise InvalidRequest(f"cannot read the TLS files: {exc.strerror}") from None
    return context, _check_dates(context, cert)


def _why(exc: ssl.SSLError, cert: Path, key: Path) -> str:
    if exc.reason in MISMATCH:
        return f"the TLS key {key} does not belong to the certificate {cert}"
    try:
        text = key.read_text(errors="replace")
    except OSError:
        text = ""
    if "ENCRYPTED" in text:
        return f"the TLS key {key} has a passphrase: the server needs a file without one"
    if "PRIVATE KEY-----" not in text:
        return f"there is no private key in {key}"
    if exc.reason is None:
        return f"the TLS certificate {cert}, or its key {key}, is damaged"
    return f"the TLS certificate {cert} and key {key} cannot be used: {_words(exc)}"


def _words(exc: ssl.SSLError) -> str:
    return (exc.reason or str(exc)).replace("_", " ").lower()


def _check_dates(server: ssl.SSLContext, cert: Path) -> float:
    """When the certificate expires. OpenSSL checks the dates in a handshake with ourselves."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust it, no matter who signed it
    try:
        client.load_verify_locations(cert)
    except OSError as exc:  # also SSLError: the file was replaced since the server loaded it
        raise InvalidRequest(f"cannot read the TLS certificate {cert}: {exc.strerror}") from None
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server)
    try:
        while not _shake_hands(theirs):
            _shake_hands(ours)
    except ssl.SSLCertVerificationError as exc:
        if exc.verify_code == EXPIRED:
            raise InvalidRequest(f"the TLS certificate {cert} has expired: renew it") from None
        if exc.verify_code == NOT_YET_VALID:
            raise InvalidRequest(f"the TLS certificate {cert} is not valid yet") from None
        raise InvalidRequest(
            f"clients will not accept the TLS certificate {cert}: {exc.verify_message}"
        ) from None
    except ssl.SSLError as exc:
        raise InvalidRequest(f"the TLS certificate {cert} cannot be used: {_words(exc)}") from None
    expires = (theirs.getpeercert() or {}).get("notAfter")
    return ssl.cert_time_to_seconds(expires) if isinstance(expires, str) else float("inf")


def _shake_hands(side: ssl.SSLObject) -> bool:
    """Continue the handshake. Returns whether this side is done."""
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


class TlsProtocol(SSLProtocol):
    """A connection that is encrypted, below the one that speaks HTTP.

    It counts against its address from the first packet on, not from the end of the handshake:
    otherwise a client could have any number of handshakes in progress.
    """

    max_size = READ  # asyncio gives each connection a buffer of this size

    def __init__(
        self, protocol: HTTPProtocol, context: ssl.SSLContext, limits: ConnectionLimits
    ) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            protocol,
            context,
            None,  # type: ignore[arg-type]  # no future for the handshake
            server_side=True,
            ssl_handshake_timeout=limits.head_time,  # type: ignore[arg-type]  # any number
            ssl_shutdown_timeout=SHUTDOWN_TIME,
        )
        self._protocol, self._limits = protocol, limits
        self._raw: asyncio.Transport | None = None
        self._buffer = memoryview(b"")
        self._is_first = True
        self.is_idle, self.in_reserve = True, False
        protocol.before = self

    def __repr__(self) -> str:
        return f"<TlsProtocol below {self._protocol!r}>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._raw = transport
        peer = transport.get_extra_info("peername")
        if peer is None:  # it has disconnected already
            transport.abort()
            return
        self.in_reserve = not self._limits.enter(peer[0], self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._limits.leave(self)  # where no handshake was completed
        if self._protocol.transport is None and self._raw is not None:
            self._limits.ended["tls_handshake"] += 1
        self._raw = None
        super().connection_lost(exc)

    def get_buffer(self, n: int) -> memoryview:
        self._buffer = super().get_buffer(n)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        is_first, self._is_first = self._is_first, False
        if is_first and self._buffer[0] != HANDSHAKE_RECORD and self._raw is not None:
            self._raw.write(_NOT_TLS)  # most likely a client that uses http://
            self._raw.close()
            return
        super().buffer_updated(nbytes)

    def unsent(self) -> int:
        """Bytes that were encrypted and not sent. asyncio counts only what comes before that."""
        return self._raw.get_write_buffer_size() if self._raw is not None else 0

    def cut(self) -> None:
        if self._raw is not None:
            self._raw.abort()


def protocol_factory(
    make: Callable[[], HTTPProtocol], certificate: Certificate | None, limits: ConnectionLimits
) -> Callable[[], asyncio.BaseProtocol]:
    """A function that makes the protocol of a new connection."""
    if certificate is None:
        return make
    return lambda: TlsProtocol(make(), certificate.context, limits)
