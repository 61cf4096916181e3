"""The settings of a server: one list of keys for files, environment and options.

A key is `pool.max_age_seconds` in a file, HUTCH_POOL_MAX_AGE_SECONDS in the environment, and
`pool_max_age_seconds` here. Where Sandkasten has a key for the same thing, ours has its name.
`reading.py` finds the values and remembers where each came from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from hutch.errors import InvalidRequest
from hutch.server.rules import Rules
from hutch.server.times import show_duration
from hutch.serving import Quota
from hutch.types import RELAXATIONS, ClusterSettings, GiB, Limits, MiB, Relaxation

from .values import (
    ADDRESS,
    COUNT,
    COUNTS,
    DURATION,
    FILE,
    FOLDER,
    IMAGE,
    OBJECT_NAME,
    SECONDS,
    SECRET,
    SIZE,
    TEXT,
    YES_NO,
    Kind,
    ListenAddress,
    choice,
    list_of,
    number,
    optional,
    size,
    whole,
)

SECTIONS = (
    "tls",
    "defaults",
    "limits.max",
    "quotas",
    "connections",
    "pool",
    "kubernetes",
    "workspace",
    "journal",
    "keys",
    "audit",
    "security",
    "dashboard",
)
T = TypeVar("T")
_RULES, _LIMITS = Rules(), Limits()


def _set(kind: Kind[T], default: T | Callable[[], T], about: str, *, sample: str = "") -> T:
    meta = {"kind": kind, "about": about, "sample": sample}
    if callable(default):
        return field(default_factory=default, metadata=meta)
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class Settings:
    """How a server is set up. Its fields are listed in docs/reference/config.md."""

    data_dir: Path = field(
        metadata={
            "kind": FOLDER,
            "sample": '"/srv/hutch"',
            "about": "where everything is stored: sessions, workspaces, keys, images",
        }
    )
    listen: ListenAddress = _set(  # noqa: RUF009  # nothing here can be changed
        ADDRESS,
        ListenAddress("127.0.0.1", 8080),
        "where to listen; port 0: any free port",
        sample='"127.0.0.1:8080"',
    )
    api_key: str | None = _set(
        optional(SECRET),
        None,
        "an admin key, besides those of `hutch key`",
        sample='""',
    )
    allowed_hosts: tuple[str, ...] = _set(
        list_of(TEXT, "names"),
        (),
        "names that clients may use for this server, besides localhost",
        sample='["hutch.example.org"]',
    )
    backend: str = _set(
        choice("namespaces", "docker", "kubernetes"),
        "namespaces",
        "what makes the boxes",
        sample='"docker"',
    )
    runtime: str | None = _set(
        optional(TEXT),
        None,
        "of all containers; empty: the engine's default, or what a caller names",
        sample='"runsc"',
    )
    relax: tuple[Relaxation, ...] = _set(
        list_of(choice(*RELAXATIONS), "names"),
        (),
        "parts of a container's hardening that callers may leave out; empty: none",
        sample='["network"]',
    )
    drain_seconds: float = _set(
        number(0),
        10.0,
        "how long it waits for running requests when it is stopped; boxes keep running",
    )
    default_image: str | None = _set(
        optional(IMAGE),
        None,
        "for sessions that name no image; empty: host, or hutch/python in containers",
        sample='"host"',
    )
    allowed_images: tuple[str, ...] = _set(
        list_of(IMAGE, "images"),
        (),
        "images that callers may use; empty: all",
        sample='["host", "python"]',
    )
    session_ttl_seconds: float = _set(
        SECONDS, _RULES.default_ttl, "how long a session lives, unless its request says otherwise"
    )
    max_ttl_seconds: float = _set(
        SECONDS,
        _RULES.max_ttl,
        "the longest time that a request may ask for, also to extend a session",
    )
    idle_seconds: float | None = _set(
        optional(SECONDS),
        None,
        "end a session that is idle for this long, unless its request says otherwise",
        sample="900",
    )
    max_sessions: int = _set(COUNT, _RULES.max_sessions, "of all owners together, at once")
    max_starts: int | None = _set(
        optional(COUNT),
        None,
        "boxes that are started at once; empty: 4 for each processor, at least 8",
        sample="16",
    )
    max_waiting: int = _set(
        COUNT,
        _RULES.max_waiting,
        "requests that wait for the start of a box; one more is refused with 503 and Retry-After",
    )
    history_days: float = _set(
        number(0), _RULES.history / 86_400, "how long an ended session is remembered"
    )
    mounts: tuple[Path, ...] = _set(
        list_of(FOLDER, "absolute paths of folders"),
        (),
        "folders of this machine below which callers may mount; empty: none",
        sample='["/srv/datasets"]',
    )

    tls_cert: Path | None = _set(  # noqa: RUF009  # as above
        optional(FILE),
        None,
        "serve HTTPS with this certificate: PEM, with the intermediate ones after it",
        sample='"/etc/hutch/cert.pem"',
    )
    tls_key: Path | None = _set(  # noqa: RUF009  # as above
        optional(FILE),
        None,
        "the private key of the certificate: PEM, without a passphrase",
        sample='"/etc/hutch/key.pem"',
    )

    defaults_cpu_limit: float = _set(
        number(0.01, 4096), _LIMITS.cpus, "processors' worth of time for a box"
    )
    defaults_mem_limit_mb: int = _set(
        size(of_number=MiB), _LIMITS.memory, "memory of a box", sample=str(_LIMITS.memory // MiB)
    )
    defaults_pids_limit: int = _set(whole(4), _LIMITS.pids, "processes and threads in a box")
    defaults_max_exec_timeout_ms: int = _set(
        COUNT, int(_RULES.max_exec_timeout * 1000), "of a command over Sandkasten's routes"
    )

    limits_max_memory: int = _set(
        SIZE, 64 * GiB, "the most that a caller may ask for, per box", sample='"64g"'
    )
    limits_max_cpus: float = _set(number(0.01, 4096), _RULES.max_limits.cpus, "likewise")
    limits_max_pids: int = _set(whole(4), _RULES.max_limits.pids, "likewise")
    limits_max_disk: int | None = _set(
        optional(SIZE), None, "likewise; empty: half of the memory", sample='"8g"'
    )
    limits_max_open_files: int = _set(whole(256), _RULES.max_limits.open_files, "likewise")
    limits_max_output: int = _set(
        SIZE,
        _RULES.max_limits.output,
        "likewise: what is kept of one command's output",
        sample='"1g"',
    )

    quotas_sessions: int | None = _set(
        optional(COUNT), None, "of one owner, at once; empty: no limit", sample="20"
    )
    quotas_memory: int | None = _set(
        optional(SIZE), None, "of one owner's boxes together", sample='"16g"'
    )
    quotas_cpus: float | None = _set(
        optional(number(0.01)), None, "of one owner's boxes together", sample="8"
    )
    quotas_disk: int | None = _set(
        optional(SIZE),
        None,
        "of one owner's workspaces and sleeping sessions together",
        sample='"50g"',
    )
    quotas_rate: float | None = _set(
        optional(number(0.01)), None, "requests per second, of one owner", sample="100"
    )

    connections_per_address: int = _set(
        COUNT, 256, "connections from one address that have sent no key, at once"
    )
    connections_per_owner: int = _set(
        COUNT, 512, "connections of one owner, at once: requests, streams, terminals"
    )
    connections_total: int = _set(
        COUNT, 8192, "connections of all together, at most half of this process's open files"
    )

    pool_enabled: bool = _set(YES_NO, True, "keep boxes ready")
    pool_images: Mapping[str, int] = _set(
        COUNTS, dict, "how many of each image", sample="{ host = 4 }"
    )
    pool_max_age_seconds: float = _set(
        SECONDS, _RULES.pool_max_age, "replace those that waited longer"
    )

    kubernetes_context: str | None = _set(
        optional(TEXT),
        None,
        "of the kubeconfig; empty: the current one",
        sample='"production"',
    )
    kubernetes_namespace: str | None = _set(
        optional(TEXT),
        None,
        "where boxes are made; empty: that of the context",
        sample='"hutch-boxes"',
    )
    kubernetes_runtime_image: str | None = _set(
        optional(TEXT),
        None,
        "what `hutch kubernetes image` wrote, as nodes can pull it",
        sample='"registry.example.org/hutch/runtime:1"',
    )
    kubernetes_bundle: str = _set(
        choice(*ClusterSettings.BUNDLES),
        "auto",
        "how a Pod gets that: as an image volume, by a copy, or what the cluster can do",
        sample='"copy"',
    )
    kubernetes_volume_claim: str | None = _set(
        optional(OBJECT_NAME),
        None,
        "a PersistentVolumeClaim in that namespace, which has the workspaces; empty: there are "
        "none",
        sample='"hutch-data"',
    )
    kubernetes_volume_folder: Path | None = _set(  # noqa: RUF009  # as above
        optional(FOLDER),
        None,
        "the folder of this machine that the claim has; empty: data_dir",
        sample='"/mnt/hutch"',
    )
    kubernetes_user_namespaces: str = _set(
        choice(*ClusterSettings.USER_NAMESPACES),
        "auto",
        "whether a Pod has one; auto: where we may see that each node can",
        sample='"on"',
    )
    kubernetes_replica_url: str | None = _set(
        optional(TEXT),
        None,
        "where other servers reach this one; set, all servers of the namespace share their "
        "sessions, and the cluster keeps them",
        sample='"http://10.0.0.7:8080"',
    )

    workspace_quota: int | None = _set(
        optional(SIZE),
        None,
        "for workspaces without a quota of their own; empty: no limit",
        sample='"10g"',
    )
    workspace_quota_mode: str = _set(
        choice("measured", "kernel"),
        "measured",
        "how quotas are kept; kernel: new workspaces with a quota are file systems of their own",
        sample='"kernel"',
    )
    journal_size: int = _set(SIZE, _RULES.journal_size, "on disk, of one session", sample='"4m"')

    keys_default_ttl: float | None = _set(
        optional(DURATION),
        None,
        "how long a new key is valid by default; empty: keys.max_ttl, or forever",
        sample='"90d"',
    )
    keys_max_ttl: float | None = _set(
        optional(DURATION),
        None,
        "how long any new key may be valid; keys that exist are not changed",
        sample='"365d"',
    )

    audit_size: int = _set(
        SIZE,
        _RULES.audit_size,
        "of the audit log on disk; the oldest lines are removed first",
        sample='"1g"',
    )
    audit_days: float = _set(number(1), _RULES.audit_age / 86_400, "how long the audit log is kept")

    dashboard_enabled: bool = _set(
        YES_NO, True, "serve the dashboard at /; without it, that leads to /docs"
    )
    dashboard_edit_settings: bool = _set(
        YES_NO,
        False,
        "let admin keys change this file over the network; they can then give boxes parts of this "
        "machine",
        sample="true",
    )

    def cluster(self) -> ClusterSettings:
        """Where the kubernetes backend makes boxes."""
        return ClusterSettings(
            context=self.kubernetes_context or "",
            namespace=self.kubernetes_namespace or "",
            runtime_image=self.kubernetes_runtime_image or "",
            bundle=self.kubernetes_bundle,
            volume_claim=self.kubernetes_volume_claim or "",
            volume_folder=str(self.kubernetes_volume_folder or self.data_dir),
            user_namespaces=self.kubernetes_user_namespaces,
            replica_url=self.kubernetes_replica_url or "",
        )

    def rules(self) -> Rules:
        """The settings that the engine needs."""
        return Rules(
            default_image=self.default_image or "",
            allowed_images=self.allowed_images,
            default_ttl=self.session_ttl_seconds,
            max_ttl=self.max_ttl_seconds,
            default_idle=self.idle_seconds,
            default_limits=self.default_limits(),
            max_limits=self.max_limits(),
            max_exec_timeout=self.defaults_max_exec_timeout_ms / 1000,
            pool=dict(self.pool_images) if self.pool_enabled else {},
            pool_max_age=self.pool_max_age_seconds,
            quota=Quota(
                self.quotas_sessions,
                self.quotas_memory,
                self.quotas_cpus,
                self.quotas_disk,
                self.quotas_rate,
            ),
            workspace_quota=self.workspace_quota,
            workspace_quota_mode=self.workspace_quota_mode,
            mounts=tuple(map(str, self.mounts)),
            runtime=self.runtime or "",
            relax=self.relax,
            audit_size=self.audit_size,
            audit_age=self.audit_days * 86_400,
            key_default_ttl=self.keys_default_ttl,
            key_max_ttl=self.keys_max_ttl,
            journal_size=self.journal_size,
            history=self.history_days * 86_400,
            no_dashboard="" if self.dashboard_enabled else "is switched off (dashboard.enabled)",
            edit_settings=self.dashboard_edit_settings,
            max_sessions=self.max_sessions,
            max_starts=self.max_starts,
            max_waiting=self.max_waiting,
        )

    def default_limits(self) -> Limits:
        return Limits(
            memory=self.defaults_mem_limit_mb,
            cpus=self.defaults_cpu_limit,
            pids=self.defaults_pids_limit,
        )

    def max_limits(self) -> Limits:
        return Limits(
            memory=self.limits_max_memory,
            cpus=self.limits_max_cpus,
            pids=self.limits_max_pids,
            disk=self.limits_max_disk,
            open_files=self.limits_max_open_files,
            output=self.limits_max_output,
        )

    @property
    def database(self) -> Path:
        return self.data_dir / "hutch.db"


def key_of(name: str) -> str:
    """The key of a field in a config file."""
    for section in SECTIONS:
        if name.startswith(start := section.replace(".", "_") + "_"):
            return f"{section}.{name.removeprefix(start)}"
    return name


def variable_of(key: str) -> str:
    """The environment variable of a key."""
    return "HUTCH_" + key.replace(".", "_").upper()


FIELDS: dict[str, Field[Any]] = {key_of(setting.name): setting for setting in fields(Settings)}


@dataclass(frozen=True)
class SandkastenKey(Generic[T]):
    """A key of Sandkasten that has no effect here: its allowed values, and a note about it.

    `says` returns None if Hutch behaves that way anyway, and raises InvalidRequest if a caller
    would rely on something that Hutch does not have.
    """

    kind: Kind[T]
    says: Callable[[T], str | None]


def _always(why: str) -> Callable[[object], str | None]:
    return lambda value: why


def _unless(*fine: object, why: str) -> Callable[[object], str | None]:
    return lambda value: None if value in fine else why


def _network(value: str) -> str | None:
    if value != "none":
        raise InvalidRequest("boxes have no network yet; remove the key, or set it to none")
    return None


def _seccomp() -> Kind[str]:
    kind = choice("off", "mvp", "strict")
    # YAML reads a bare `off` as false.
    return Kind(kind.allowed, lambda value: kind.read("off" if value is False else value))


SANDKASTEN_KEYS: dict[str, SandkastenKey[Any]] = {
    "db_path": SandkastenKey(TEXT, _always("the database is in data_dir")),
    "db_max_open_conns": SandkastenKey(COUNT, _always("there is nothing to choose")),
    "playground_config_path": SandkastenKey(
        optional(TEXT), _always("there is no playground to configure")
    ),
    "defaults.network_mode": SandkastenKey(choice("none", "bridge", "host", "full"), _network),
    "defaults.readonly_rootfs": SandkastenKey(
        YES_NO, _unless(True, why="system folders of a box are read-only whatever it says")
    ),
    "defaults.exec_mode": SandkastenKey(
        choice("stateful", "stateless"),
        _unless("stateful", why="a session's shell keeps its state whatever it says"),
    ),
    "defaults.shell_prefer": SandkastenKey(
        choice("bash", "sh"), _unless("bash", why="the shell is bash where the image has it")
    ),
    "workspace.enabled": SandkastenKey(YES_NO, _unless(True, why="workspaces are always there")),
    "workspace.persist_by_default": SandkastenKey(
        YES_NO, _unless(False, why="files last if a session names a workspace, and only then")
    ),
    "security.seccomp": SandkastenKey(
        _seccomp(),
        _unless("strict", why="the filter of system calls is always on, and stricter than strict"),
    ),
}


def contradictions(settings: Settings) -> Iterator[tuple[str, str]]:
    """Keys whose values contradict those of other keys, with the reason."""
    if settings.tls_cert and not settings.tls_key:
        yield "tls.cert", "tls.key is missing: a certificate needs its private key"
    if settings.tls_key and not settings.tls_cert:
        yield "tls.key", "tls.cert is missing: a private key needs its certificate"
    if settings.session_ttl_seconds > settings.max_ttl_seconds:
        yield "session_ttl_seconds", f"more than max_ttl_seconds, {settings.max_ttl_seconds:g}"
    ttl, longest = settings.keys_default_ttl, settings.keys_max_ttl
    if ttl is not None and longest is not None and ttl > longest:
        yield "keys.default_ttl", f"more than keys.max_ttl, {show_duration(longest)}"
    allowed = settings.allowed_images
    for key, images in (
        ("default_image", [settings.default_image] if settings.default_image else []),
        ("pool.images", list(settings.pool_images)),
    ):
        for image in images:
            if allowed and image not in allowed:
                yield key, f"{image} is not in allowed_images: {', '.join(allowed)}"
    for key, limits in (
        ("defaults.mem_limit_mb", settings.default_limits),
        ("limits.max.memory", settings.max_limits),
    ):
        try:
            limits()
        except InvalidRequest as exc:
            yield key, str(exc)
    for default, most in (
        ("defaults_cpu_limit", "limits_max_cpus"),
        ("defaults_mem_limit_mb", "limits_max_memory"),
        ("defaults_pids_limit", "limits_max_pids"),
    ):
        if getattr(settings, default) > getattr(settings, most):
            yield key_of(default), f"more than {key_of(most)}"
    if settings.backend == "kubernetes" and settings.workspace_quota_mode == "kernel":
        yield "workspace.quota_mode", "nodes do not see file systems that the server mounts"
    for folder in settings.mounts:
        if folder == Path(os.sep):
            yield "mounts", "callers could mount anything of this machine: name single folders"
