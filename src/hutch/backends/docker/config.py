"""What Docker's own clients are configured with: the engine's address, and registry logins.

The engine is looked for as Docker's clients do, and then as Podman's do. In this order:

    explicit address > DOCKER_HOST > DOCKER_CONTEXT > the current context of config.json
    > sockets of Docker (system, rootless, Desktop) > CONTAINER_HOST > sockets of Podman

Nothing is contacted here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import ssl
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hutch.docker_logins import (
    DEFAULT_HOST,
    LEGACY_HOST,
    canonical_host,
    entries_of,
    leaves_to_helper,
)
from hutch.errors import BackendUnavailable

TLS_FILES = ("ca.pem", "cert.pem", "key.pem")
HERE = ("localhost", "127.0.0.1", "[::1]")
START_ONE = (
    "start Docker (systemctl start docker) or Podman (systemctl --user start podman.socket), "
    "or say where one is with DOCKER_HOST"
)
OFFICIAL = "library"  # the namespace of images with a single name, such as python


@dataclass(frozen=True)
class Tls:
    """Certificate files. Without `ca`, those of the system are used to verify the engine.

    Without `cert` and `key`, we have no certificate of our own.
    """

    ca: str | None
    cert: str | None
    key: str | None
    verify: bool = True

    def context(self) -> ssl.SSLContext:
        """Raises BackendUnavailable if a file cannot be read, or is not a certificate or key."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if not self.verify:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if self.cert and self.key:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as exc:
            files = ", ".join(file for file in (self.ca, self.cert, self.key) if file)
            raise BackendUnavailable(
                f"cannot use the certificates of the Docker engine ({files}): {exc}"
            ) from None
        return context


@dataclass(frozen=True)
class EngineAddress:
    url: str  # "unix:///path" or "tcp://host:port"
    origin: str  # where we got it from, for messages
    tls: Tls | None = None

    @property
    def path(self) -> str | None:
        """The path of its socket on this machine, or None."""
        return self.url.removeprefix("unix://") if self.url.startswith("unix://") else None

    @property
    def advice(self) -> str:
        """What to do if it does not answer."""
        host = self.url.removeprefix("tcp://").rpartition(":")[0]
        is_here = self.path is not None or host in HERE
        return START_ONE if is_here else "check that it runs there and can be reached"

    def __str__(self) -> str:
        return f"{self.url} ({self.origin})"


def is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def find(
    explicit: str | None,
    env: Mapping[str, str],
    is_there: Callable[[str], bool] = is_socket,
) -> EngineAddress:
    """Find the address of the engine. `explicit` comes before everything else.

    Raises BackendUnavailable if no engine is found (the error says where we looked), or if the
    address or the Docker context cannot be used.
    """
    home = env.get("HOME") or "/"
    config = config_folder(env)
    if explicit:
        return _parse(explicit, "as asked for", _tls_of(env, config))
    if host := env.get("DOCKER_HOST"):
        return _parse(host, "DOCKER_HOST", _tls_of(env, config))
    if (name := env.get("DOCKER_CONTEXT") or _current_context(config)) and name != "default":
        return _of_context(name, config)
    runtime = env.get("XDG_RUNTIME_DIR")
    docker = [
        "/var/run/docker.sock",
        *([f"{runtime}/docker.sock"] if runtime else []),
        f"{home}/.docker/run/docker.sock",
    ]
    for path in docker:
        if is_there(path):
            return EngineAddress(f"unix://{path}", "found there")
    if host := env.get("CONTAINER_HOST"):
        return _parse(host, "CONTAINER_HOST", None)
    podman = [*([f"{runtime}/podman/podman.sock"] if runtime else []), "/run/podman/podman.sock"]
    for path in podman:
        if is_there(path):
            return EngineAddress(f"unix://{path}", "found there")
    tried = ", ".join(["DOCKER_HOST", "Docker's contexts", *docker, "CONTAINER_HOST", *podman])
    raise BackendUnavailable(
        f"no Docker engine found (looked at {tried}). To have one: {START_ONE}"
    )


def config_folder(env: Mapping[str, str]) -> Path:
    """Where Docker's clients keep their settings."""
    return Path(env.get("DOCKER_CONFIG") or f"{env.get('HOME') or '/'}/.docker")


def _parse(url: str, origin: str, tls: Tls | None) -> EngineAddress:
    scheme, has_scheme, rest = url.partition("://")
    if not has_scheme:
        scheme, rest = "tcp", url  # Docker accepts "host:2375" too
    if scheme == "unix" and rest.startswith("/"):
        return EngineAddress(f"unix://{rest}", origin)
    if scheme in ("tcp", "http", "https") and rest:
        if scheme == "https" and tls is None:
            tls = Tls(None, None, None)
        return EngineAddress(f"tcp://{rest.rstrip('/')}", origin, tls)
    if scheme == "ssh":
        raise BackendUnavailable(
            f"{origin}: {url}: an engine behind ssh is reached through a forwarded socket: "
            f"ssh -nNT -L /tmp/engine.sock:/var/run/docker.sock {rest}, "
            "then DOCKER_HOST=unix:///tmp/engine.sock"
        )
    raise BackendUnavailable(
        f"{origin}: unsupported address {url!r}; use unix:///PATH or tcp://HOST:PORT"
    )


def _tls_of(env: Mapping[str, str], config: Path) -> Tls | None:
    """From DOCKER_TLS_VERIFY and DOCKER_TLS: any value that is not empty, even "0", means yes."""
    verify = bool(env.get("DOCKER_TLS_VERIFY"))
    if not verify and not env.get("DOCKER_TLS"):
        return None
    return _tls_in(Path(env.get("DOCKER_CERT_PATH") or config), verify=verify)


def _tls_in(folder: Path, *, verify: bool) -> Tls:
    ca, cert, key = (str(folder / name) if (folder / name).exists() else None for name in TLS_FILES)
    return Tls(ca, cert, key, verify)


def _current_context(config: Path) -> str:
    try:
        found = read_object(config / "config.json").get("currentContext")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as exc:
        raise BackendUnavailable(f"cannot read {config}/config.json: {exc}") from None
    return found if isinstance(found, str) else ""


def _of_context(name: str, config: Path) -> EngineAddress:
    # Docker names the folder of a context after the hash of its name.
    folder = hashlib.sha256(name.encode()).hexdigest()
    try:
        meta = read_object(config / "contexts/meta" / folder / "meta.json")
        endpoint = meta["Endpoints"]["docker"]
        host, verify = endpoint["Host"], not endpoint.get("SkipTLSVerify", False)
        if not isinstance(host, str):
            raise TypeError(host)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise BackendUnavailable(
            f"there is no usable Docker context {name!r} in {config}: `docker context ls` shows "
            "which there are, and DOCKER_CONTEXT=default uses none"
        ) from None
    files = config / "contexts/tls" / folder / "docker"
    tls = _tls_in(files, verify=verify) if files.is_dir() or not verify else None
    return _parse(host, f"context {name!r}", tls)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises OSError or ValueError."""
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


# --- logins ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Login:
    """Credentials as `docker login` stored them, for an engine that pulls for us."""

    auth: dict[str, str] | None = None  # in the format of the engine
    hint: str = ""  # why there are no credentials, if known


def host_of(reference: str) -> str:
    """The registry host in a reference."""
    first, has_more, _ = reference.partition("/")
    is_host = has_more and ("." in first or ":" in first or first == "localhost")
    return first if is_host else DEFAULT_HOST


def whole(reference: str) -> str:
    """The full reference of the same image, with its registry."""
    host = host_of(reference)
    path = reference.removeprefix(f"{host}/")
    if host == LEGACY_HOST:
        host = DEFAULT_HOST
    if host == DEFAULT_HOST and "/" not in path:
        path = f"{OFFICIAL}/{path}"
    return f"{host}/{path}"


def login_at(host: str, env: Mapping[str, str]) -> Login:
    """The credentials for a registry. Errors become a hint, as most images need no login."""
    path = config_folder(env) / "config.json"
    try:
        found = read_object(path)
    except FileNotFoundError:
        return Login()
    except (OSError, ValueError, RecursionError) as exc:
        return Login(hint=f"not logged in: cannot read {path}: {exc}")
    host = canonical_host(host)
    for entry in entries_of(found, host):
        if auth := _auth(entry):
            return Login({**auth, "serveraddress": host})
    if leaves_to_helper(found, host):
        return Login(
            hint=f"{path} leaves passwords to a credential helper, a program which hutch does not "
            f"run: `docker pull` does; or put the password for {host} into `auths`"
        )
    return Login()


def _auth(entry: Mapping[str, object]) -> dict[str, str]:
    """Empty if the entry has no usable credentials."""
    if token := entry.get("identitytoken"):
        return {"identitytoken": str(token)}
    user, password = entry.get("username"), entry.get("password")
    try:
        plain = base64.b64decode(str(entry.get("auth") or ""), validate=True).decode()
    except ValueError:
        plain = ""
    if ":" in plain:
        user, _, password = plain.partition(":")
    return {"username": str(user), "password": str(password)} if user and password else {}
