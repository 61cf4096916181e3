"""Which cluster, and who we are there: what kubectl is configured with.

A kubeconfig is looked for as kubectl does, in this order:

    KUBECONFIG (several files, separated by colons) > ~/.kube/config > the service account of a Pod

Foreign text is checked before it is used, and an error names the file and the key. Nothing is
contacted here, but a credential plugin of the kubeconfig is run when credentials are asked for.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import os
import re
import shutil
import signal
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from hutch.errors import BackendUnavailable

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_CONFIG = 4 << 20  # bytes
MAX_OUTPUT = 1 << 20  # bytes of a credential plugin
PLUGIN_PATIENCE = 60.0  # seconds; some ask a cloud
FRESH = 60.0  # seconds for which a token from a file is used before it is read again
EARLY = 30.0  # seconds before it expires, a credential is replaced
NAMESPACE = re.compile("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
EXEC_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
T = TypeVar("T")


class ExecVariable(msgspec.Struct):
    name: str
    value: str


class ExecPlugin(msgspec.Struct, rename="camel"):
    """A program that prints credentials."""

    command: str
    api_version: str
    args: list[str] | None = None
    env: list[ExecVariable] | None = None
    install_hint: str = ""
    interactive_mode: str = "IfAvailable"
    provide_cluster_info: bool = False


class KubeCluster(msgspec.Struct, rename="kebab"):
    server: str
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False
    tls_server_name: str = ""
    proxy_url: str = ""


class KubeUser(msgspec.Struct, rename="kebab"):
    token: str = ""
    token_file: str = msgspec.field(default="", name="tokenFile")
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    username: str = ""
    password: str = ""
    plugin: ExecPlugin | None = msgspec.field(default=None, name="exec")
    auth_provider: dict[str, object] | None = None
    as_: str = msgspec.field(default="", name="as")


class KubeContext(msgspec.Struct):
    cluster: str
    user: str = ""
    namespace: str = ""


class NamedCluster(msgspec.Struct):
    name: str
    cluster: KubeCluster


class NamedUser(msgspec.Struct):
    name: str
    user: KubeUser


class NamedContext(msgspec.Struct):
    name: str
    context: KubeContext


class KubeConfig(msgspec.Struct, rename="kebab"):
    current_context: str = ""
    clusters: list[NamedCluster] | None = None
    users: list[NamedUser] | None = None
    contexts: list[NamedContext] | None = None


class CredentialStatus(msgspec.Struct, rename="camel"):
    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: str = ""


class ExecCredential(msgspec.Struct, rename="camel"):
    api_version: str
    kind: str
    status: CredentialStatus


@dataclass(frozen=True)
class Access:
    """What one request needs: headers, and how to speak TLS (None: not at all)."""

    headers: tuple[tuple[str, str], ...]
    tls: ssl.SSLContext | None


class ClusterAddress:
    """A cluster, and our credentials there. Belongs to one event loop."""

    def __init__(
        self,
        cluster: KubeCluster,
        user: KubeUser,
        *,
        namespace: str,
        origin: str,
        cluster_folder: Path,
        user_folder: Path,
    ) -> None:
        """`origin`: for messages. The folders are those that relative paths start from."""
        self.server = cluster.server.rstrip("/")
        self.namespace, self.origin = namespace, origin
        self._cluster, self._user = cluster, user
        self._cluster_folder, self._user_folder = cluster_folder, user_folder
        self._access: Access | None = None
        self._contexts: dict[tuple[bytes, bytes], ssl.SSLContext] = {}
        self._until = 0.0  # as time.time() gives it
        self._asking = asyncio.Lock()

    @property
    def host(self) -> str:
        return urlsplit(self.server).hostname or ""

    @property
    def port(self) -> int:
        url = urlsplit(self.server)
        return url.port or (443 if url.scheme == "https" else 80)

    @property
    def netloc(self) -> str:
        """Host and port, as they are written in a request."""
        return urlsplit(self.server).netloc

    @property
    def server_name(self) -> str:
        """The name that the certificate of the server has to have."""
        return self._cluster.tls_server_name or self.host

    def __str__(self) -> str:
        return f"{self.server} ({self.origin})"

    def expire(self) -> None:
        """Get new credentials for the next request: the cluster did not take these."""
        self._until = 0.0

    @property
    def renews(self) -> bool:
        """Whether `expire` can lead to other credentials."""
        return bool(self._user.plugin or self._user.token_file)

    async def access(self) -> Access:
        """Raises BackendUnavailable if credentials cannot be read, or a plugin gives none."""
        if self._access and time.time() < self._until:
            return self._access
        async with self._asking:
            if not self._access or time.time() >= self._until:
                self._access, self._until = await self._renew()
            return self._access

    async def _renew(self) -> tuple[Access, float]:
        user = self._user
        if user.plugin:
            found = await _run_plugin(user.plugin, self._cluster, self._user_folder)
            until = _moment(found.expiration_timestamp, user.plugin.command)
            tls = self._tls(found.client_certificate_data.encode(), found.client_key_data.encode())
            return Access(_bearer(found.token, f"{user.plugin.command}: token"), tls), until
        certificate = _content(
            user.client_certificate_data, user.client_certificate, self._user_folder,
            "client-certificate",
        )  # fmt: skip
        key = _content(user.client_key_data, user.client_key, self._user_folder, "client-key")
        tls = self._tls(certificate, key)
        if user.token_file:
            path = self._user_folder / user.token_file
            token = _read(path, "tokenFile").decode("ascii", "replace").strip()
            return Access(_bearer(token, str(path)), tls), time.time() + FRESH
        if user.token:
            return Access(_bearer(user.token, f"{self.origin}: token"), tls), float("inf")
        if user.username:
            basic = base64.b64encode(f"{user.username}:{user.password}".encode()).decode()
            return Access((("Authorization", f"Basic {basic}"),), tls), float("inf")
        return Access((), tls), float("inf")

    def _tls(self, certificate: bytes, key: bytes) -> ssl.SSLContext | None:
        if not self.server.startswith("https:"):
            return None
        if bool(certificate) != bool(key):
            raise BackendUnavailable(
                f"{self.origin}: a client certificate and its key belong together, and there is "
                f"only the {'certificate' if certificate else 'key'}"
            )
        if (certificate, key) not in self._contexts:
            cluster, context = self._cluster, None
            authority = _content(
                cluster.certificate_authority_data, cluster.certificate_authority,
                self._cluster_folder, "certificate-authority",
            )  # fmt: skip
            try:
                # An ssl context takes certificates from files only, but an authority also as text.
                context = ssl.create_default_context(
                    cadata=authority.decode("ascii", "replace") if authority else None
                )
            except (OSError, ValueError) as exc:  # SSLError is an OSError
                raise BackendUnavailable(
                    f"{self.origin}: certificate-authority: it has no certificate ({exc})"
                ) from None
            if cluster.insecure_skip_tls_verify:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if certificate:
                try:
                    with _in_memory(certificate + b"\n" + key) as path:
                        # Without an answer, OpenSSL would ask the terminal for a passphrase.
                        context.load_cert_chain(path, password=lambda: "")
                except (OSError, ValueError) as exc:
                    raise BackendUnavailable(
                        f"{self.origin}: client-certificate and client-key cannot be used ({exc})"
                    ) from None
            self._contexts = {(certificate, key): context}
        return self._contexts[certificate, key]


def find(
    env: Mapping[str, str],
    *,
    context: str = "",
    namespace: str = "",
    service_account: Path = SERVICE_ACCOUNT,
) -> ClusterAddress:
    """Find the cluster. `context` and `namespace` take the place of those of the kubeconfig.

    Raises BackendUnavailable if no cluster is found (the error says where we looked), or if a
    kubeconfig cannot be used.
    """
    if namespace and not NAMESPACE.fullmatch(namespace):
        raise BackendUnavailable(f"invalid namespace {namespace!r:.100}: use a-z, 0-9 and '-'")
    named = [Path(name) for name in (env.get("KUBECONFIG") or "").split(":") if name]
    files = named or [Path(env.get("HOME") or "/") / ".kube/config"]
    configs = [(path, _parse(path)) for path in files if path.exists()]
    if not configs:
        if named:
            raise BackendUnavailable(f"KUBECONFIG: there is no file {', '.join(map(str, named))}")
        if host := env.get("KUBERNETES_SERVICE_HOST"):
            port = env.get("KUBERNETES_SERVICE_PORT") or "443"
            return _in_cluster(host, port, namespace, service_account)
        raise BackendUnavailable(
            f"no cluster: there is no {files[0]}, KUBECONFIG names none, and this is not a Pod. "
            "Say which kubeconfig to use: KUBECONFIG=FILE"
        )
    wanted = context or next((c.current_context for _, c in configs if c.current_context), "")
    if not wanted:
        raise BackendUnavailable(
            f"{configs[0][0]}: current-context is empty: `kubectl config get-contexts` shows which "
            "there are, and `kubectl config use-context NAME` sets it"
        )
    contexts = [(path, item) for path, config in configs for item in config.contexts or ()]
    path, found = _named(contexts, wanted, "context", configs)
    chosen = found.context
    if not namespace and chosen.namespace and not NAMESPACE.fullmatch(chosen.namespace):
        raise BackendUnavailable(f"{path}: context {wanted!r}: invalid namespace")
    clusters = [(path, item) for path, config in configs for item in config.clusters or ()]
    cluster_path, cluster = _named(clusters, chosen.cluster, "cluster", configs)
    users = [(path, item) for path, config in configs for item in config.users or ()]
    user_path, user = path, KubeUser()
    if chosen.user:
        user_path, named_user = _named(users, chosen.user, "user", configs)
        user = named_user.user
    _check_cluster(f"{cluster_path}: cluster {cluster.name!r}", cluster.cluster)
    _check_user(f"{user_path}: user {chosen.user!r}", user)
    return ClusterAddress(
        cluster.cluster,
        user,
        namespace=namespace or chosen.namespace or "default",
        origin=f"context {wanted!r} of {path}",
        cluster_folder=cluster_path.parent,
        user_folder=user_path.parent,
    )


def _in_cluster(host: str, port: str, namespace: str, folder: Path) -> ClusterAddress:
    if not namespace:
        namespace = _read(folder / "namespace", "namespace").decode("ascii", "replace").strip()
        if not NAMESPACE.fullmatch(namespace):
            raise BackendUnavailable(f"{folder}/namespace: invalid namespace")
    cluster = KubeCluster(
        f"https://{f'[{host}]' if ':' in host else host}:{port}",
        certificate_authority=str(folder / "ca.crt"),
    )
    _check_cluster("KUBERNETES_SERVICE_HOST", cluster)
    return ClusterAddress(
        cluster,
        KubeUser(token_file=str(folder / "token")),
        namespace=namespace,
        origin="the service account of this Pod",
        cluster_folder=folder,
        user_folder=folder,
    )


Named = TypeVar("Named", NamedCluster, NamedUser, NamedContext)


def _named(
    found: list[tuple[Path, Named]], name: str, what: str, configs: list[tuple[Path, KubeConfig]]
) -> tuple[Path, Named]:
    for path, item in found:
        if item.name == name:
            return path, item
    files = ", ".join(str(path) for path, _ in configs)
    names = ", ".join(item.name for _, item in found)[:300] or "none"
    raise BackendUnavailable(f"{files}: there is no {what} {name!r}: there is {names}")


def _parse(path: Path) -> KubeConfig:
    # Here, as it takes longer to load than all of this package.
    import yaml

    content = _read(path, "kubeconfig")
    try:
        return msgspec.convert(yaml.safe_load(content) or {}, KubeConfig)
    except msgspec.ValidationError as exc:
        # "Expected `str`, got `int` - at `$.users[0].user.token`"
        reason, _, place = str(exc).partition(" - at ")
        key = place.strip("`").removeprefix("$.") or "the file"
        raise BackendUnavailable(f"{path}: {key}: {reason}") from None
    except yaml.MarkedYAMLError as exc:
        where = f"line {exc.problem_mark.line + 1}" if exc.problem_mark else "the file"
        raise BackendUnavailable(f"{path}: {where}: invalid YAML ({exc.problem})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise BackendUnavailable(f"{path}: invalid YAML ({str(exc)[:200]})") from None


def _check_cluster(where: str, cluster: KubeCluster) -> None:
    """Raises BackendUnavailable if it cannot be used as it is."""
    try:
        url = urlsplit(cluster.server)
        is_plain = bool(url.hostname) and not (url.query or url.fragment or "@" in url.netloc)
        port = url.port  # a number, or ValueError
    except ValueError:
        is_plain, port = False, None
    is_text = re.fullmatch(r"https?://[!-~]+", cluster.server)
    if not is_plain or not is_text or port == 0:
        raise BackendUnavailable(
            f"{where}: server: {cluster.server!r:.200} is not an address like https://HOST:PORT"
        )
    if cluster.proxy_url:
        raise BackendUnavailable(f"{where}: proxy-url: a proxy cannot be used yet: remove it")


def _check_user(where: str, user: KubeUser) -> None:
    """Raises BackendUnavailable if it needs what we do not do."""
    if user.auth_provider:
        raise BackendUnavailable(
            f"{where}: auth-provider: kubectl has removed these: use a credential plugin (exec)"
        )
    if user.as_:
        raise BackendUnavailable(f"{where}: as: another user cannot be impersonated")
    if user.plugin is None:
        return
    if user.plugin.api_version not in EXEC_VERSIONS:
        raise BackendUnavailable(
            f"{where}: exec.apiVersion: {user.plugin.api_version!r:.100} is not known: "
            f"{' and '.join(EXEC_VERSIONS)} are"
        )
    if user.plugin.interactive_mode == "Always":
        raise BackendUnavailable(
            f"{where}: exec.interactiveMode: a plugin that needs a terminal cannot be used"
        )


def _bearer(token: str, where: str) -> tuple[tuple[str, str], ...]:
    if not token:
        return ()
    if not re.fullmatch("[!-~]+", token):
        raise BackendUnavailable(f"{where}: a token is one line of printable ASCII")
    return (("Authorization", f"Bearer {token}"),)


def _content(data: str, path: str, folder: Path, key: str) -> bytes:
    """The content of a file that is in the kubeconfig (`data`, which wins) or beside it."""
    if data:
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise BackendUnavailable(f"{folder}: {key}-data: invalid base64") from None
    return _read(folder / path, key) if path else b""


def _read(path: Path, key: str) -> bytes:
    try:
        # Non-blocking, for it may be a FIFO.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            content = file.read(MAX_CONFIG + 1)
    except OSError as exc:
        raise BackendUnavailable(f"{key}: cannot read {path}: {exc.strerror}") from None
    if len(content) > MAX_CONFIG:
        raise BackendUnavailable(f"{key}: {path} is larger than {MAX_CONFIG >> 20} MiB")
    return content


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """The path of a file that is on no disk, for a library that reads keys from files only."""
    fd = os.memfd_create("hutch-key", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


# --- credential plugins ---------------------------------------------------------------------


async def _run_plugin(plugin: ExecPlugin, cluster: KubeCluster, folder: Path) -> CredentialStatus:
    """Run a plugin. Raises BackendUnavailable if it gives no credentials."""
    program = plugin.command
    if "/" in program:
        program = str(folder / program)
    elif not (program := shutil.which(program) or ""):
        raise BackendUnavailable(
            f"exec.command: there is no program {plugin.command!r:.200}"
            + (f": {plugin.install_hint.strip()[:500]}" if plugin.install_hint else "")
        )
    wanted: dict[str, object] = {"interactive": False}
    if plugin.provide_cluster_info:
        wanted["cluster"] = {
            "server": cluster.server,
            "certificate-authority-data": cluster.certificate_authority_data,
            "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
            "tls-server-name": cluster.tls_server_name,
        }
    info = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": wanted}
    env = {**os.environ, "KUBERNETES_EXEC_INFO": json.dumps(info)}
    env |= {variable.name: variable.value for variable in plugin.env or ()}
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            *(plugin.args or ()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise BackendUnavailable(f"exec.command: cannot run {program}: {reason}") from None
    try:
        async with asyncio.timeout(PLUGIN_PATIENCE):
            printed, complaint = await asyncio.gather(
                _drain(process.stdout), _drain(process.stderr)
            )
            code = await process.wait()
    except TimeoutError:
        raise BackendUnavailable(
            f"exec.command: {program} did not end in {PLUGIN_PATIENCE:g} seconds"
        ) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if code:
        text = complaint.decode(errors="replace").strip()[-500:]
        raise BackendUnavailable(f"exec.command: {program} ended with {code}: {text}")
    try:
        found = msgspec.json.decode(printed, type=ExecCredential)
    except (msgspec.DecodeError, ValueError) as exc:
        raise BackendUnavailable(f"exec.command: {program} printed no credential ({exc})") from None
    if (found.api_version, found.kind) != (plugin.api_version, "ExecCredential"):
        raise BackendUnavailable(
            f"exec.command: {program} printed a {found.kind!r:.50} of {found.api_version!r:.100}"
        )
    if not found.status.token and not found.status.client_certificate_data:
        raise BackendUnavailable(f"exec.command: {program} printed neither token nor certificate")
    return found.status


async def _drain(stream: asyncio.StreamReader | None) -> bytes:
    """Read to the end, and keep what is not too much."""
    kept = b""
    while stream and (data := await stream.read(1 << 16)):
        kept += data[: MAX_OUTPUT - len(kept)]
    return kept


def _moment(text: str, program: str) -> float:
    """When a credential is to be replaced. Without a time, when the cluster refuses it."""
    if not text:
        return float("inf")
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() - EARLY
    except ValueError:
        raise BackendUnavailable(
            f"exec.command: {program}: expirationTimestamp: {text!r:.100} is not a time"
        ) from None
