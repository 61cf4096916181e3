"""Who may come in, and with which rights.

A key is shown once, when it is made; what is kept is its SHA-256, which is enough for a secret
that nobody could guess. Keys are looked up in memory: no request waits for the disk.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from hutch.errors import InvalidRequest, NotFound
from hutch.serving import SCOPES, Key, Scope

from .store import Store

OPERATOR = "local"  # the owner of what comes in without a key of the store's
OWNER = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
LETTERS = string.ascii_letters + string.digits
KEY = re.compile(r"hutch_([a-z0-9]{8})_[A-Za-z0-9]{40}")
MAX_LABEL = 200


@dataclass(frozen=True)
class Caller:
    """Who asks. Everything that they open is their owner's."""

    owner: str
    scope: Scope
    key: str | None = None  # its id

    def may(self, needs: Scope) -> bool:
        return SCOPES.index(self.scope) >= SCOPES.index(needs)


class Keys:
    """`await Keys.open(store, configured)` makes one. Keys are made and revoked only here."""

    def __init__(self, store: Store, keys: list[tuple[Key, bytes]], configured: str | None) -> None:
        self._store = store
        self._keys = {key.id: key for key, _ in keys}
        self._digests = {key.id: digest for key, digest in keys if key.revoked_at is None}
        self._configured = _digest(configured) if configured else None
        self._used: dict[str, float] = {}  # not written down yet
        self._open: dict[str, list[Callable[[], None]]] = {}  # what ends with which key

    @classmethod
    async def open(cls, store: Store, configured: str | None = None) -> Keys:
        """`configured` is one more key of the operator's, which is never stored."""
        return cls(store, await store.list_keys(), configured)

    @property
    def is_open(self) -> bool:
        """Whether no key was ever made. One that was revoked does not open the door again."""
        return not self._keys and self._configured is None

    async def make(self, owner: str, scope: Scope = "run", label: str = "") -> Key:
        """The key itself is in the answer, this once."""
        check_owner(owner)
        if scope not in SCOPES:
            raise InvalidRequest(f"a scope is one of {', '.join(SCOPES)}, not {scope!r}")
        if len(label) > MAX_LABEL or not label.isprintable():
            raise InvalidRequest(f"a label is printable and at most {MAX_LABEL} letters long")
        id = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))
        text = f"hutch_{id}_{''.join(secrets.choice(LETTERS) for _ in range(40))}"
        key = Key(id, owner, scope, f"hutch_{id}", label, created_at=time.time())
        await self._store.insert_key(key, _digest(text))
        self._keys[id], self._digests[id] = key, _digest(text)
        return replace(key, key=text)

    def list(self) -> list[Key]:
        """Every key, revoked ones too, oldest first."""
        return [
            replace(key, last_used_at=self._used.get(key.id, key.last_used_at))
            for key in self._keys.values()
        ]

    async def revoke(self, id: str) -> None:
        """From now on it opens nothing, and what it has open ends. Revoking twice is no error.
        NotFound if there is none."""
        if id not in self._keys:
            raise NotFound(f"there is no key {id[:64]!r}: `hutch key ls` has them")
        self._digests.pop(id, None)  # first here: it stays out even if the disk is full
        for end in self._open.pop(id, []):
            end()
        now = time.time()
        if self._keys[id].revoked_at is None and await self._store.revoke_key(id, now):
            self._keys[id] = replace(self._keys[id], revoked_at=now)

    def find(self, text: str) -> Caller | None:
        """Whose key this is, if it is one."""
        digest = _digest(text)
        shape = KEY.fullmatch(text)
        if shape is None or shape[1] not in self._keys:
            # One of the store's is what the store says, also where somebody configured it.
            is_it = self._configured is not None and hmac.compare_digest(digest, self._configured)
            return Caller(OPERATOR, "admin") if is_it else None
        known = self._digests.get(shape[1])
        if known is None or not hmac.compare_digest(digest, known):
            return None
        key = self._keys[shape[1]]
        self._used[key.id] = time.time()
        return Caller(key.owner, key.scope, key.id)

    def watch(self, caller: Caller, end: Callable[[], None]) -> Callable[[], None]:
        """Have `end` called when the key that they came with is revoked. Answers with what to call
        once there is nothing left to end."""
        key = caller.key
        if key is None:
            return lambda: None
        ends = self._open.setdefault(key, [])
        ends.append(end)

        def forget() -> None:
            ends.remove(end)
            if not ends and self._open.get(key) is ends:
                del self._open[key]

        return forget

    async def write_down(self) -> None:
        """When keys were last used. To be called now and then, and at the end."""
        used, self._used = self._used, {}
        if not used:
            return
        for id, at in used.items():
            self._keys[id] = replace(self._keys[id], last_used_at=at)
        await self._store.touch_keys(used)


def check_owner(owner: str) -> str:
    if not OWNER.fullmatch(owner):
        raise InvalidRequest(
            "an owner is 1 to 63 of a-z, 0-9, '_', '.' and '-', and begins with a letter or "
            f"digit, not {owner[:80]!r}"
        )
    return owner


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
