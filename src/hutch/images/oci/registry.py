"""Images in a registry: authentication, the manifest for this machine, and downloads.

Content is addressed by digest. What does not match its digest is never kept.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urlencode

from hutch.docker_logins import entries_of, leaves_to_helper
from hutch.errors import BackendUnavailable, InvalidRequest, NoSpace, NotFound, Unauthorized

from .http import HttpClient, Response, RetryLater, check_hop, origin
from .layers import partial_of
from .manifest import (
    INDEXES,
    MANIFESTS,
    MAX_DOCUMENT,
    Blob,
    ImageDescription,
    ImageLayer,
    Manifest,
    choose,
    describe,
    digest_of,
    parse_document,
)
from .plain import PIECE, Room
from .reference import Reference, is_digest, is_local

MAX_BLOB = 16 << 30  # bytes of a layer, compressed
MAX_TOKEN = 64 * 1024
MAX_INDEXES = 3  # nested
_PARAMETER = re.compile(r'([a-zA-Z]+)="([^"]*)"')


class Registry:
    """A LayerSource: one image in a registry.

    The constructor and `open` raise NotFound, Unauthorized, BackendUnavailable if the registry
    cannot be reached or does not answer properly, and InvalidRequest if the image is malformed.
    """

    stage = "downloading"

    def __init__(self, reference: Reference, web: HttpClient | None = None) -> None:
        """`web`: a client to be used for this alone. Its `stop` interrupts also the constructor."""
        self._reference = reference
        scheme = "http" if is_local(reference.api) else "https"
        self._url = f"{scheme}://{reference.api}/v2/{reference.path}"
        self._web = web or HttpClient()
        self._permit = ""  # the value of the Authorization header
        self._asking = threading.Lock()
        try:
            self.image = self._describe()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def stop(self) -> None:
        self._web.stop()

    def close(self) -> None:
        self._web.close()

    @contextmanager
    def open(
        self, layer: ImageLayer, folder: Path, tell: Callable[[int], None]
    ) -> Iterator[BinaryIO]:
        """Download a layer. A partial download is kept, and the next one resumes it."""
        if layer.size > MAX_BLOB:
            raise InvalidRequest(f"this image has a layer of more than {MAX_BLOB >> 30} GiB")
        path = partial_of(layer)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "r+b") as file:
            try:
                part = _Part(file, tell)

                def download() -> None:
                    try:
                        self._download(layer, part, folder, tell)
                    except RetryLater as exc:
                        exc.reached = part.size
                        raise

                self._web.patiently(download)
                file.seek(0)
                yield file
            except BaseException as exc:
                # Also raised by the caller, if the layer cannot be unpacked.
                is_bad = isinstance(exc, InvalidRequest | NoSpace | OSError)
                if is_bad or not file.seek(0, os.SEEK_END):
                    path.unlink(missing_ok=True)
                raise
            path.unlink(missing_ok=True)

    # --- content -------------------------------------------------------------------------

    def _describe(self) -> ImageDescription:
        wanted = self._reference.digest or self._reference.tag
        data = self._manifest(wanted)
        digest = digest_of(data)
        for _ in range(MAX_INDEXES):
            found = parse_document(data)
            if isinstance(found, Manifest):
                return describe(digest, found, self._small(found.config))
            data = self._manifest(choose(found).digest)
        raise InvalidRequest("this image is an index of indexes, and too many of them")

    def _manifest(self, wanted: str) -> bytes:
        accept = ", ".join([*INDEXES, *MANIFESTS])

        def read() -> bytes:
            with self._ask(f"manifests/{quote(wanted, safe=':')}", accept) as answer:
                said = answer.header("docker-content-digest")
                return _checked(answer.body(MAX_DOCUMENT), wanted if is_digest(wanted) else said)

        return self._web.patiently(read)

    def _small(self, blob: Blob) -> bytes:
        def read() -> bytes:
            with self._ask(f"blobs/{blob.digest}", "*/*") as answer:
                return _checked(answer.body(MAX_DOCUMENT), blob.digest)

        return self._web.patiently(read)

    def _download(
        self, layer: ImageLayer, part: _Part, folder: Path, tell: Callable[[int], None]
    ) -> None:
        begun, room = part.size, Room(folder, layer.size)
        if part.size < layer.size:
            with self._ask(f"blobs/{layer.blob}", "*/*", start=part.size) as answer:
                if answer.status == 200:  # the whole blob: the range was ignored, or not sent
                    part.clear()
                    begun = 0
                elif not answer.header("content-range").startswith(f"bytes {part.size}-"):
                    part.clear()
                    raise RetryLater(
                        f"{self._reference.host} sent a different range than was requested"
                    )
                for piece in answer.pieces():
                    if part.size + len(piece) > layer.size:
                        raise InvalidRequest(
                            f"{self._reference.host} sent more bytes than it announced"
                        )
                    room.take(len(piece))
                    part.add(piece)
                    tell(part.size)
        if part.size < layer.size:
            raise RetryLater(f"{self._reference.host} broke off in the middle")
        if part.size > layer.size or part.digest != layer.blob:
            part.clear()
            if begun:
                # The part from an earlier download may be the wrong one: start over.
                raise RetryLater("the partial download does not match the layer")
            raise _wrong(layer.blob)

    # --- authentication ------------------------------------------------------------------

    @contextmanager
    def _ask(self, what: str, accept: str, start: int = 0) -> Iterator[Response]:
        """Send a request, and authenticate if the registry asks for it.

        `start`: the first byte to request. The status is 206 if the answer starts there, or 200.
        Raises NotFound, Unauthorized, BackendUnavailable and RetryLater.
        """
        permit = self._permit
        with self._get(what, accept, permit, start) as answer:
            # Only the registry itself may ask for credentials, not a host that it redirects to.
            if answer.status != 401 or origin(answer.url) != origin(self._url):
                yield self._good(answer, start)
                return
            challenge = answer.header("www-authenticate")
        with self._asking:  # several layers are requested in parallel; one token is enough
            if self._permit == permit:
                self._permit = self._get_permit(challenge)
        with self._get(what, accept, self._permit, start) as answer:
            yield self._good(answer, start)

    def _get(
        self, what: str, accept: str, permit: str, start: int
    ) -> AbstractContextManager[Response]:
        headers = {"Accept": accept, "User-Agent": "hutch"}
        if start:
            headers["Range"] = f"bytes={start}-"
        if permit:
            headers["Authorization"] = permit
        return self._web.get(f"{self._url}/{what}", headers)

    def _good(self, answer: Response, start: int = 0) -> Response:
        name, host, status = self._reference.familiar, self._reference.host, answer.status
        if status == 200 or (status == 206 and start):
            return answer
        if status in (401, 403):
            hint = credentials_of(host).hint or f"if it is private: docker login {host}"
            raise Unauthorized(f"{host} has no image {name}, or does not let us have it; {hint}")
        if status == 404:
            raise NotFound(f"{host} has no image {name}")
        if status == 429 or status >= 500:
            raise RetryLater(f"{host} answers {status}", _seconds(answer.header("retry-after")))
        raise BackendUnavailable(f"unexpected answer from {host}: status {status}")

    def _get_permit(self, challenge: str) -> str:
        basic = credentials_of(self._reference.host).basic
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            return f"Basic {basic}" if basic else ""
        if scheme.lower() != "bearer":
            raise Unauthorized(
                f"{self._reference.host} asks for an unsupported kind of authentication"
            )
        parameters = dict(_PARAMETER.findall(rest))
        realm = parameters.get("realm", "")
        check_hop(self._url, realm)
        query = {"service": parameters.get("service", "")}
        query["scope"] = parameters.get("scope") or f"repository:{self._reference.path}:pull"
        headers = {"User-Agent": "hutch"}
        if basic:
            headers["Authorization"] = f"Basic {basic}"
        with self._web.get(
            f"{realm}{'&' if '?' in realm else '?'}{urlencode(query)}", headers
        ) as a:
            return f"Bearer {_token(self._good(a).body(MAX_TOKEN))}"


class _Part:
    """The file of a partial download, hashed as it grows."""

    def __init__(self, file: BinaryIO, tell: Callable[[int], None]) -> None:
        self._file, self._hashed, self.size = file, hashlib.sha256(), 0
        while piece := file.read(PIECE):
            self._hashed.update(piece)
            self.size += len(piece)
            tell(self.size)

    @property
    def digest(self) -> str:
        return f"sha256:{self._hashed.hexdigest()}"

    def add(self, piece: bytes) -> None:
        self._file.write(piece)
        self._hashed.update(piece)
        self.size += len(piece)

    def clear(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._hashed, self.size = hashlib.sha256(), 0


def _token(data: bytes) -> str:
    try:
        found = json.loads(data)
        token = found.get("token") or found.get("access_token")
    except (ValueError, RecursionError, AttributeError):
        token = None
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise BackendUnavailable("invalid token from the registry")
    return token


def _checked(data: bytes, digest: str) -> bytes:
    if digest and digest_of(data) != digest:
        raise _wrong(digest)
    return data


def _wrong(digest: str) -> InvalidRequest:
    return InvalidRequest(
        f"what came for {digest[:19]} does not match that digest; nothing was kept"
    )


def _seconds(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() else 0


@dataclass(frozen=True)
class Credentials:
    basic: str = ""  # as in the header: base64 of user:password
    hint: str = ""  # why there are none, if known


def credentials_of(host: str) -> Credentials:
    """The credentials for a host. Raises InvalidRequest if the file cannot be read."""
    path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return Credentials()
    except (OSError, ValueError, RecursionError) as exc:
        raise InvalidRequest(f"{path} cannot be read: {exc}") from None
    for entry in entries_of(found, host):
        if basic := _basic(entry):
            return Credentials(basic)
    if leaves_to_helper(found, host):
        return Credentials(
            hint=f"{path} leaves passwords to a credential helper, a program which hutch does not "
            "run: put this one into `auths`"
        )
    return Credentials()


def _basic(entry: Mapping[str, object]) -> str:
    auth, user, password = (entry.get(key) for key in ("auth", "username", "password"))
    if not auth and user and password:
        auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    try:
        plain = base64.b64decode(str(auth or ""), validate=True)
    except ValueError:
        return ""
    return str(auth) if b":" in plain else ""
