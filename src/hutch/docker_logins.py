"""The file in which `docker login` keeps passwords of registries.

Only those in the file itself: credential helpers are programs, and we run none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

DEFAULT_HOST = "docker.io"  # of images whose name has no host
LEGACY_HOST = "index.docker.io"  # the same
# What `docker login` calls the default host.
_OTHER_NAMES = {LEGACY_HOST: DEFAULT_HOST, "registry-1.docker.io": DEFAULT_HOST}


def entries_of(config: object, host: str) -> Iterator[Mapping[str, object]]:
    """The entries for a registry in a parsed `config.json`, which may hold anything."""
    for key, entry in _table(config, "auths").items():
        if canonical_host(key) == host and isinstance(entry, dict):
            yield entry


def leaves_to_helper(config: object, host: str) -> bool:
    """Whether a credential helper has the password for a registry."""
    helpers = map(canonical_host, _table(config, "credHelpers"))
    has_store = isinstance(config, dict) and bool(config.get("credsStore"))
    return host in helpers or has_store


def canonical_host(key: str) -> str:
    """The host in a key of the file, which may be a URL."""
    host = (key.partition("://")[2] or key).partition("/")[0]
    return _OTHER_NAMES.get(host, host)


def _table(config: object, key: str) -> dict[str, object]:
    inner = config.get(key) if isinstance(config, dict) else None
    return inner if isinstance(inner, dict) else {}
