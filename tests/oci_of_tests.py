"""Images for tests, and registries to have them at: a real one, and one that does as it is told."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.client
import io
import json
import shutil
import socket
import ssl
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from must_work import need

from hutch.backends.namespaces import unpack
from hutch.errors import BackendUnavailable
from hutch.images.oci.manifest import MANIFESTS, machine

PATIENCE = 60
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
USER, PASSWORD = "ann", "secret"
_HASHED = "$2b$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW"  # of the password


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def tar(files: Mapping[str, bytes], **options: Any) -> bytes:
    """A plain tar; the same files give the same one."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", **options) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


def zstd(data: bytes) -> bytes:
    """By the program that others use."""
    if not shutil.which("zstd"):
        need("zstd", "needs zstd: apt-get install it")
    argv = ["zstd", "-q", "-c"]
    return subprocess.run(argv, input=data, stdout=subprocess.PIPE, check=True).stdout


@dataclass
class Made:
    """An image, in the way that a registry has it."""

    layers: list[bytes]  # plain tars
    packed: list[bytes]
    config: bytes
    manifest: bytes
    blobs: dict[str, bytes] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)


def make_image(
    *layers: Mapping[str, bytes], zipped: bool | str = True, changes: dict[str, Any] | None = None,
    **config: Any,
) -> Made:  # fmt: skip
    """`config`: what it says of itself. `changes`: what its manifest says instead.

    `zipped`: by gzip, not at all, or by "zstd".
    """
    plain = [tar(files) for files in layers]
    packed = [gzip.compress(each, mtime=0) for each in plain] if zipped else plain
    if zipped == "zstd":
        packed = [zstd(each) for each in plain]
    says: dict[str, Any] = {
        "architecture": machine(),
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [digest_of(each) for each in plain]},
    }
    written = json.dumps(says | config).encode()
    kind = LAYER if zipped else LAYER.removesuffix("+gzip")
    kind = kind.replace("gzip", "zstd") if zipped == "zstd" else kind
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFESTS[0],
        "config": {"mediaType": CONFIG, "digest": digest_of(written), "size": len(written)},
        "layers": [
            {"mediaType": kind, "digest": digest_of(each), "size": len(each)} for each in packed
        ],
    }
    manifest |= changes or {}
    blobs = {digest_of(each): each for each in [*packed, written]}
    return Made(plain, packed, written, json.dumps(manifest).encode(), blobs)


def make_index(images: Mapping[str, Made]) -> bytes:
    """One for several machines: `linux/arm64/v8` and the like."""
    listed = []
    for where, image in images.items():
        names = zip(("os", "architecture", "variant"), where.split("/"), strict=False)
        listed.append({
            "mediaType": MANIFESTS[0], "digest": image.digest, "size": len(image.manifest),
            "platform": dict(names),
        })  # fmt: skip
    return json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": listed}).encode()


def saved(images: Mapping[str, Made], *, link: bool = False) -> bytes:
    """What `docker save` writes. `link`: as it does with layers that are equal."""
    made = io.BytesIO()
    entries = []
    with tarfile.open(fileobj=made, mode="w") as archive:

        def put(name: str, content: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))

        for name, image in images.items():
            config = digest_of(image.config)[7:] + ".json"
            paths = [f"{hashlib.sha256(each).hexdigest()}/layer.tar" for each in image.layers]
            for path, layer in zip(paths, image.layers, strict=True):
                put(path, layer)
            if link:
                member = tarfile.TarInfo("linked/layer.tar")
                member.type, member.linkname = tarfile.SYMTYPE, f"../{paths[0]}"
                archive.addfile(member)
                paths[0] = "linked/layer.tar"
            put(config, image.config)
            entries.append({"Config": config, "RepoTags": [name], "Layers": paths})
        put("manifest.json", json.dumps(entries).encode())
    return made.getvalue()


def layout(folder: Path, image: Made, **index: Any) -> Path:
    """An OCI layout."""
    (folder / "blobs/sha256").mkdir(parents=True)
    for digest, blob in {**image.blobs, image.digest: image.manifest}.items():
        (folder / "blobs/sha256" / digest[7:]).write_bytes(blob)
    listed = {"mediaType": MANIFESTS[0], "digest": image.digest, "size": len(image.manifest)}
    says = {"schemaVersion": 2, "manifests": [listed]} | index
    (folder / "index.json").write_text(json.dumps(says))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what lasts, on a machine that can unpack."""
    folder = tmp_path / "data"
    monkeypatch.setenv("HUTCH_DATA_DIR", str(folder))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture(scope="session")
def unpacks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """For tests that are about nothing where no layer can be unpacked."""
    folder = tmp_path_factory.mktemp("layer")
    source = tmp_path_factory.mktemp("tar") / "tar"
    source.write_bytes(tar({"a": b""}))
    with source.open("rb") as file:
        try:
            unpack.unpack(file.fileno(), str(folder))
        except BackendUnavailable as exc:
            need("namespaces", str(exc))


def left_in(data: Path) -> list[str]:
    """All that is kept of layers and images, but for locks."""
    found = [*data.glob("images/layers/*"), *data.glob("images/oci*/*")]
    return sorted(path.name for path in found if path.suffix != ".lock")


# --- a real registry ---------------------------------------------------------------------


class Registry:
    """Debian's `docker-registry`, for as long as the `with` lasts."""

    def __init__(self, folder: Path, *, locked: bool = False) -> None:
        if not shutil.which("docker-registry"):
            need("registry", "docker-registry is not installed (apt install docker-registry)")
        self._folder, self._locked = folder, locked
        self.host = ""

    def __enter__(self) -> Registry:
        for _ in range(5):  # another program may take the port before it does
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.host = f"127.0.0.1:{free.getsockname()[1]}"
            self._process = subprocess.Popen(
                ["docker-registry", "serve", str(self._configure())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            if self._answers():
                return self
            self.__exit__()
        raise AssertionError("docker-registry does not start")

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()

    def _configure(self) -> Path:
        says: dict[str, Any] = {
            "version": 0.1,
            "storage": {"filesystem": {"rootdirectory": str(self._folder / "kept")}},
            "http": {"addr": self.host},
            "log": {"level": "error"},
        }
        if self._locked:
            (self._folder / "htpasswd").write_text(f"{USER}:{_HASHED}\n")
            path = str(self._folder / "htpasswd")
            says["auth"] = {"htpasswd": {"realm": "tests", "path": path}}
        written = self._folder / "config.yml"
        written.write_text(json.dumps(says))  # which is YAML, too
        return written

    def _answers(self) -> bool:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.ask("GET", "/v2/")
                return True
            except OSError:
                time.sleep(0.02)
        return False

    def ask(self, how: str, path: str, body: bytes = b"", kind: str = "") -> tuple[int, str]:
        headers = {"Content-Type": kind or "application/octet-stream"}
        if self._locked:
            headers["Authorization"] = f"Basic {basic()}"
        connection = http.client.HTTPConnection(self.host, timeout=PATIENCE)
        try:
            connection.request(how, path, body, headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status, answer.headers.get("Location", "")
        finally:
            connection.close()

    def push(self, name: str, tag: str, image: Made) -> str:
        """The name under which it is there."""
        for digest, blob in image.blobs.items():
            _, where = self.ask("POST", f"/v2/{name}/blobs/uploads/")
            where = "/" + where.partition("://")[2].partition("/")[2] if "://" in where else where
            status, _ = self.ask("PUT", f"{where}&digest={digest}", blob)
            assert status == 201
        self.push_manifest(name, tag, image.manifest, MANIFESTS[0])
        return f"{self.host}/{name}:{tag}"

    def push_manifest(self, name: str, tag: str, manifest: bytes, kind: str) -> None:
        status, _ = self.ask("PUT", f"/v2/{name}/manifests/{tag}", manifest, kind)
        assert status == 201


def basic() -> str:
    return base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


def log_in(folder: Path, host: str) -> None:
    """As `docker login` does it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"auths": {host: {"auth": basic()}}}))


# --- one that does as it is told ---------------------------------------------------------


class Asked(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Told

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers)))
        for part, act in self.server.acts.items():
            if part in self.path:
                act(self)
                return
        found = self.server.content.get(self.path.partition("?")[0].rpartition("/")[2])
        self.give(found) if found is not None else self.give(b"{}", 404)

    def give(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


class Told(ThreadingHTTPServer):
    """A registry with the content of one image, and what it does instead for some paths."""

    daemon_threads = True

    def __init__(self, image: Made | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.host = f"127.0.0.1:{self.server_address[1]}"
        self.content: dict[str, bytes] = {}
        self.acts: dict[str, Callable[[Asked], None]] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        if image:
            self.content = dict(image.blobs)
            self.content["latest"] = self.content[image.digest] = image.manifest

    def handle_error(self, *args: object) -> None:
        pass  # those who are badly served hang up

    def paths(self, part: str) -> list[str]:
        return [path for path, _ in self.asked if part in path]


@contextmanager
def told(image: Made | None = None, context: ssl.SSLContext | None = None) -> Iterator[Told]:
    with Told(image) as server:
        if context:
            server.socket = context.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
