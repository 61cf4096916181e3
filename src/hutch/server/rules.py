"""The rules of a server: what its operator allows, and defaults for sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hutch.serving import Quota
from hutch.types import GiB, Limits, MiB, Relaxation


@dataclass(frozen=True)
class Rules:
    default_image: str = ""  # none: the backend's
    allowed_images: tuple[str, ...] = ()  # none: all
    default_ttl: float = 1800  # seconds
    max_ttl: float = 86_400
    default_idle: float | None = None
    default_limits: Limits = field(default_factory=Limits)
    max_limits: Limits = field(
        default_factory=lambda: Limits(memory=64 * GiB, cpus=64, pids=32_768, open_files=65_536)
    )
    max_exec_timeout: float = 600  # seconds, of a command over Sandkasten's routes
    pool: Mapping[str, int] = field(default_factory=dict)  # image: how many boxes
    pool_max_age: float = 3600  # seconds
    quota: Quota = field(default_factory=Quota)  # of an owner that has none of its own
    workspace_quota: int | None = None  # bytes
    workspace_quota_mode: str = "measured"  # or "kernel"
    mounts: tuple[str, ...] = ()  # folders of the host below which callers may mount
    runtime: str = ""  # of containers; none: the engine's default, or what a caller asks for
    relax: tuple[Relaxation, ...] = ()  # what of their hardening callers may leave out
    key_default_ttl: float | None = None  # seconds; None: a key that does not say never expires
    key_max_ttl: float | None = None
    audit_size: int = 1 << 30  # bytes
    audit_age: float = 365 * 86_400  # seconds
    journal_size: int = 4 * MiB  # bytes on disk, of each session
    history: float = 30 * 86_400  # seconds for which a session that ended is remembered
    no_dashboard: str = ""  # why the server has none, and makes no tickets; empty: it has one
    edit_settings: bool = False  # whether admin keys may change settings over the network
    max_sessions: int = 1000  # that are not ended, of all owners
    max_starts: int | None = None  # boxes that are started at once; None: what fits the machine
    max_waiting: int = 256  # requests that wait for the start of a box
