"""API keys: who a caller is, and what they may do.

A key is shown once, when it is made; its SHA-256 is stored, which is enough for a random secret.
Keys are looked up in memory, so that no request waits for the disk.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hutch.engine.clock import SteadyClock
from hutch.errors import Conflict, InvalidRequest, NotFound, NotPermitted, Unauthorized
from hutch.serving import SCOPES, Key, Scope
from hutch.types import BoxInfo

from .store import Store
from .times import parse_duration, parse_expiry, show_duration, show_moment
from .workspaces import check_owner, checked_id

OPERATOR = "local"  # the owner for requests without a stored key
# Any name that a backend can give an image: python, debian:12, ghcr.io/org/tool@sha256:...
_PART = r"[a-z0-9][a-z0-9._-]*"
IMAGE = re.compile(
    rf"(?=.{{1,255}}\Z)(?:[A-Za-z0-9\[][A-Za-z0-9.:\]-]*/)?{_PART}(?:/{_PART})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]*)?(?:@sha256:[0-9a-f]{64})?"
)
LETTERS = string.ascii_letters + string.digits
KEY = re.compile(r"hutch_([a-z0-9]{8})_[A-Za-z0-9]{40}")
MAX_LABEL = 200
MAX_NAMES = 64  # images, or workspaces, that a key is limited to
MAX_OVERLAP = 30 * 86_400.0  # seconds
MAX_CHILDREN = 100  # temporary keys of one parent; with one more, the oldest is revoked
KEEP_TEMPORARY = 3600.0  # seconds for which an ended temporary key is still listed


# The parents of temporary keys that no stored key asked for:
LOCAL = "local"  # the server's own user, over the Unix socket
OPEN = "open"  # anyone, while the server has no key
CONFIGURED = "configured:"  # the operator's key of the settings; a keyed digest of it follows


class KeyExpired(Unauthorized):
    """Raised only for the whole key: anything else is an unknown key."""

    def __init__(self, key: Key) -> None:
        what = f"this key expired at {show_moment(key.expires_at or 0)}: "
        super().__init__(
            what + "log in again, with a key or with `hutch dashboard`"
            if key.parent
            else what + "ask the operator of the server for a new one "
            f"(`hutch key rotate {key.id}` or `hutch key extend {key.id}`)"
        )
        self.key = key


@dataclass(frozen=True)
class Caller:
    """Who sends a request. What they open belongs to their owner."""

    owner: str
    scope: Scope
    key: str | None = None  # its id
    images: tuple[str, ...] = ()  # that the key is limited to; empty: all
    workspaces: tuple[str, ...] = ()  # likewise
    # Without a stored key, where the rights come from: LOCAL, OPEN or CONFIGURED.
    root: str = field(default="", compare=False)
    is_local: bool = field(default=False, compare=False)  # it came over the Unix socket
    # Of the request, for the audit log; two requests of one caller are of the same caller.
    peer: str = field(default="", compare=False)
    request: str = field(default="", compare=False)
    is_forwarded: bool = field(default=False, compare=False)  # another server has checked it

    def may(self, needs: Scope) -> bool:
        return SCOPES.index(self.scope) >= SCOPES.index(needs)

    def require(self, needs: Scope) -> None:
        """Raises NotPermitted unless the key's scope is enough."""
        if not self.may(needs):
            article = "an" if needs == "admin" else "a"
            raise NotPermitted(f'needs {article} {needs} key; this key has scope "{self.scope}"')

    @property
    def seen_owner(self) -> str | None:
        """Whose sessions this caller sees; None: those of all owners."""
        return None if self.scope == "admin" else self.owner

    def check_owner(self, owner: str | None, what: str) -> None:
        """Raises NotPermitted if it is another owner's, and this caller is not an admin.

        `what`: such as "sessions need".
        """
        if owner not in (None, self.owner) and not self.may("admin"):
            raise NotPermitted(f"another owner's {what} an admin key")

    def reaches(self, session: BoxInfo) -> bool:
        """Whether the key's limits include this session."""
        return self.may_see(session.image, session.workspace_id)

    def may_see(self, image: str, workspace_id: str | None) -> bool:
        """Whether the key's limits include sessions with this image and workspace."""
        return (not self.images or image in self.images) and (
            not self.workspaces or workspace_id is None or workspace_id in self.workspaces
        )

    def check_image(self, image: str) -> None:
        """Raises NotPermitted if the key is limited to other images."""
        if self.images and image not in self.images:
            raise NotPermitted(
                f"this key is limited to image {' or '.join(self.images)}, not {image[:64]!r}"
            )

    def check_workspace(self, workspace: str | None) -> None:
        """Raises NotPermitted if the key is limited to other workspaces."""
        if self.workspaces and workspace is not None and workspace not in self.workspaces:
            raise NotPermitted(
                f"this key is limited to workspace {' or '.join(self.workspaces)}, "
                f"not {workspace[:64]!r}"
            )


class Keys:
    """`await Keys.open(store, configured)` makes one. Keys are made and revoked only here.

    `default_ttl` and `max_ttl` are seconds that new keys live, and may live; None: forever.
    """

    def __init__(
        self,
        store: Store,
        keys: list[tuple[Key, bytes]],
        configured: str | None,
        default_ttl: float | None = None,
        max_ttl: float | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._store = store
        self._default_ttl, self._max_ttl = default_ttl, max_ttl
        self._now = clock or SteadyClock()
        self._keys = {key.id: key for key, _ in keys}
        self._digests = {key.id: digest for key, digest in keys if key.revoked_at is None}
        self._revoked = {key.id: digest for key, digest in keys if key.revoked_at is not None}
        self._configured = secret_digest(configured) if configured else None
        # Not a plain digest: this is stored, and the key may be a word that can be guessed.
        self._root = CONFIGURED + store.sealer.digest(configured)[-16:] if configured else ""
        self._is_closed = any(not key.parent for key in self._keys.values())
        self._used: dict[str, float] = {}  # not written down yet
        self._open: dict[str, list[Callable[[], None]]] = {}  # by key: what to call at its end

    @classmethod
    async def open(
        cls,
        store: Store,
        configured: str | None = None,
        *,
        default_ttl: float | None = None,
        max_ttl: float | None = None,
        clock: Callable[[], float] | None = None,
    ) -> Keys:
        """`configured` is one more key of the operator's, which is never stored."""
        return cls(store, await store.list_keys(), configured, default_ttl, max_ttl, clock)

    @property
    def is_open(self) -> bool:
        """Whether no key was ever made. A revoked key does not open the server again.

        Temporary keys do not count: opening a dashboard must not shut others out.
        """
        return not self._is_closed and self._configured is None

    async def make(
        self,
        owner: str,
        scope: Scope = "run",
        label: str = "",
        *,
        expires: str = "",
        images: tuple[str, ...] = (),
        workspaces: tuple[str, ...] = (),
    ) -> Key:
        """Only this answer contains the key itself. `expires` empty: after the default time.

        Raises InvalidRequest.
        """
        check_owner(owner)
        if scope not in SCOPES:
            raise InvalidRequest(f"a scope is one of {', '.join(SCOPES)}, not {scope!r}")
        if len(label) > MAX_LABEL or not label.isprintable():
            raise InvalidRequest(f"a label has at most {MAX_LABEL} characters, all printable")
        _check_limits(images, workspaces)
        if scope not in ("read", "run") and (images or workspaces):
            raise InvalidRequest(
                "only read and run keys can be limited to images or workspaces: an admin key can "
                "make other keys, and a metrics key opens no session"
            )
        return await self._insert(
            Key(
                "",
                owner,
                scope,
                "",
                label,
                expires_at=self._first_expiry(expires) if expires else self._default_expiry(),
                images=images,
                workspaces=workspaces,
            )
        )

    async def _insert(self, like: Key) -> Key:
        """A new key with the attributes of `like`, but its own id, secret and times."""
        id = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))
        text = f"hutch_{id}_{''.join(secrets.choice(LETTERS) for _ in range(40))}"
        key = replace(
            like,
            id=id,
            prefix=f"hutch_{id}",
            created_at=time.time(),
            last_used_at=None,
            revoked_at=None,
        )
        await self._store.insert_key(key, secret_digest(text))
        self._keys[id], self._digests[id] = key, secret_digest(text)
        if not key.parent and not self._is_closed:
            self._is_closed = True
            for child in self._children(OPEN):
                await self.revoke(child)
        return replace(key, key=text)

    async def make_temporary(self, caller: Caller, seconds: float, label: str) -> Key:
        """A key with the caller's rights, which ends with what they come from.

        Raises Unauthorized if the caller's key has ended, and as `check_not_temporary`.
        """
        self.check_not_temporary(caller)
        expires_at = self._now() + seconds
        if self._max_ttl is not None:
            expires_at = min(expires_at, self._now() + self._max_ttl)
        if caller.key is not None and (key := self._keys.get(caller.key)) is not None:
            expires_at = min(expires_at, self._expiry_of(key) or expires_at)
        like = Key(
            "",
            caller.owner,
            caller.scope,
            "",
            label,
            expires_at=expires_at,
            images=caller.images,
            workspaces=caller.workspaces,
            parent=caller.key or caller.root,
        )
        for child in self._children(like.parent)[MAX_CHILDREN - 1 :]:
            await self.revoke(child)
        if not self._is_cut_off(like) and not self._has_expired(like):
            temporary = await self._insert(like)
            if not self._is_cut_off(temporary):
                return temporary
            await self.revoke(temporary.id)  # its parent was revoked while the store was written
        raise Unauthorized("the key that asked for this ticket has ended: log in again")

    def check_not_temporary(self, caller: Caller) -> None:
        """Raises NotPermitted if the caller's key is itself a temporary one.

        Otherwise keys of keys could be as many as a caller likes, and a chain of them so long that
        revoking the first would not get to the end of it.
        """
        if self.is_temporary(caller):
            raise NotPermitted(
                "a temporary key makes no tickets: use the key, or the `hutch dashboard`, that it "
                "comes from"
            )

    def is_temporary(self, caller: Caller) -> bool:
        """Whether the caller's key is one that a ticket was redeemed for."""
        key = self._keys.get(caller.key or "")
        return key is not None and key.parent != ""

    def _children(self, parent: str) -> list[str]:
        """The ids of temporary keys with this parent that were not revoked, newest first."""
        return [
            id for id, key in self._keys.items() if key.parent == parent and id in self._digests
        ][::-1]

    def _is_cut_off(self, key: Key) -> bool:
        """Whether it is a temporary key, and what it came from has ended."""
        if key.parent in ("", LOCAL):
            return False
        if key.parent == OPEN:
            return not self.is_open
        if key.parent.startswith(CONFIGURED):
            return key.parent != self._root
        return key.parent not in self._digests

    def _expiry_of(self, key: Key) -> float | None:
        """When it expires: a temporary key no later than the key that it came from."""
        parent = self._keys.get(key.parent)
        if parent is None or parent.expires_at is None:
            return key.expires_at
        return min(parent.expires_at, key.expires_at or parent.expires_at)

    async def extend(self, id: str, expires: str) -> Key:
        """Change when it expires. Raises NotFound, and Conflict if it was revoked."""
        key = self._not_revoked(id)
        expires_at = self._expiry(expires)
        await self._store.set_key_expiry(id, expires_at)
        # Read again: it may have been used, or revoked, while the store was written.
        self._keys[id] = replace(self._keys[id], expires_at=expires_at)
        return replace(key, expires_at=expires_at)

    async def rotate(self, id: str, overlap: str = "1h", expires: str = "") -> Key:
        """A new key that replaces this one, which expires after `overlap`. Raises as `extend`."""
        old = self._not_revoked(id)
        try:
            seconds = parse_duration(overlap)
        except ValueError:
            raise InvalidRequest(
                f"overlap must be like 0s, 30m or 7d, not {overlap[:64]!r}"
            ) from None
        if seconds > MAX_OVERLAP:
            raise InvalidRequest(f"overlap can be at most {show_duration(MAX_OVERLAP)}")
        now = self._now()
        if expires:
            expires_at = self._first_expiry(expires)
        elif old.expires_at is None:
            expires_at = self._default_expiry()
        elif old.expires_at <= now:
            raise InvalidRequest("this key has expired: set `expires` for the new one")
        else:
            longest = old.expires_at if self._max_ttl is None else now + self._max_ttl
            expires_at = min(old.expires_at, longest)
        new = await self._insert(replace(old, expires_at=expires_at))
        if id not in self._digests:  # it was revoked while the store was written
            await self.revoke(new.id)
            self._not_revoked(id)
        # The new one exists before the old one ends, so a crash in between locks no client out.
        if not seconds:
            await self.revoke(id)
        elif old.expires_at is None or old.expires_at > now + seconds:
            await self._store.set_key_expiry(id, now + seconds)
            self._keys[id] = replace(self._keys[id], expires_at=now + seconds)
        return new

    def learn(self, key: Key, digest: bytes | None) -> None:
        """Note what another server has written. `digest` None: the key was removed."""
        if digest is None or key.revoked_at is not None:
            for id in (key.id, *self._children(key.id)):
                if known := self._digests.pop(id, None):
                    self._revoked[id] = known
                for end in self._open.pop(id, []):
                    end()
        if digest is None:
            for kept in (self._keys, self._revoked, self._used):
                kept.pop(key.id, None)
            return
        is_new = key.id not in self._keys
        self._keys[key.id] = key
        if key.revoked_at is not None:
            self._revoked[key.id] = digest
        elif is_new:  # one that we have revoked stays so, whatever was written before
            self._digests[key.id] = digest
        self._is_closed |= not key.parent

    def _not_revoked(self, id: str) -> Key:
        key = self._keys.get(id)
        if key is None:
            raise NotFound(f"there is no key {id[:64]!r}: `hutch key ls` lists them")
        if id not in self._digests:
            raise Conflict(f"key {id} was revoked: make a new one")
        if key.parent:
            raise Conflict(f"key {id} is a temporary one, of a browser: make a key of its own")
        return key

    def _first_expiry(self, text: str) -> float | None:
        """The expiry of a new key. An existing one may expire at once, and be extended later."""
        expires_at = self._expiry(text)
        if expires_at is not None and expires_at <= self._now():
            raise InvalidRequest(
                f"a key that expires after {text[:64]} would be useless: use a duration such as "
                "12h or 30d, or never"
            )
        return expires_at

    def _expiry(self, text: str) -> float | None:
        now = self._now()
        expires_at = parse_expiry(text, now)
        most = self._max_ttl
        # A second of grace: `--expires 90d` is allowed where 90d is, whenever it arrives.
        if most is not None and (expires_at is None or expires_at > now + most + 1):
            raise InvalidRequest(
                f"keys can live at most {show_duration(most)} here (setting keys.max_ttl), "
                f"not {text[:64]!r}"
            )
        return expires_at

    def _default_expiry(self) -> float | None:
        ttl = self._default_ttl if self._default_ttl is not None else self._max_ttl
        return None if ttl is None else self._now() + ttl

    def list(self) -> list[Key]:
        """Every key, revoked ones too, oldest first."""
        return [
            replace(key, last_used_at=self._used.get(key.id, key.last_used_at))
            for key in self._keys.values()
        ]

    async def revoke(self, id: str) -> None:
        """Revoke a key, and end what it has open. Revoking twice is not an error.

        Raises NotFound.
        """
        if id not in self._keys:
            raise NotFound(f"there is no key {id[:64]!r}: `hutch key ls` lists them")
        ids = [id, *self._children(id)]
        for key_id in ids:  # first here: they stay out if the disk is full
            if digest := self._digests.pop(key_id, None):
                self._revoked[key_id] = digest
            for end in self._open.pop(key_id, []):
                end()
        now = time.time()
        # The parent first: without it, its temporary keys open nothing after a restart, either.
        for key_id in ids:
            if self._keys[key_id].revoked_at is None and await self._store.revoke_key(key_id, now):
                self._keys[key_id] = replace(self._keys[key_id], revoked_at=now)

    def find(self, text: str) -> Caller | None:
        """The caller with this key, or None. Raises KeyExpired."""
        digest = secret_digest(text)
        shape = KEY.fullmatch(text)
        if shape is None or shape[1] not in self._keys:
            # A stored key stays what it is, even if it is also configured as the operator's.
            matches = self._configured is not None and hmac.compare_digest(digest, self._configured)
            return Caller(OPERATOR, "admin", root=self._root) if matches else None
        known = self._digests.get(shape[1])
        if known is None or not hmac.compare_digest(digest, known):
            return None
        key = self._keys[shape[1]]
        if self._has_expired(key):
            raise KeyExpired(replace(key, expires_at=self._expiry_of(key)))
        if self._is_cut_off(key):
            return None
        self._used[key.id] = time.time()
        return Caller(key.owner, key.scope, key.id, key.images, key.workspaces)

    def find_revoked(self, text: str) -> Key | None:
        """The revoked key, for the audit log. To callers it is an unknown key."""
        shape = KEY.fullmatch(text)
        known = None if shape is None else self._revoked.get(shape[1])
        if shape is None or known is None or not hmac.compare_digest(secret_digest(text), known):
            return None
        return self._keys[shape[1]]

    def _has_expired(self, key: Key) -> bool:
        expires_at = self._expiry_of(key)
        return expires_at is not None and expires_at <= self._now()

    def end_expired(self) -> None:
        """End what expired keys have open. To be called every second."""
        # Those of forwarded requests may be of keys that this server was not told of yet.
        known = [key for id in self._open if (key := self._keys.get(id))]
        for id in [key.id for key in known if self._has_expired(key)]:
            for end in self._open.pop(id):
                end()

    async def forget_temporary(self) -> None:
        """Forget temporary keys that ended a while ago. To be called from time to time."""
        before = self._now() - KEEP_TEMPORARY
        ended = [
            id
            for id, key in self._keys.items()
            if key.parent and (key.revoked_at or self._expiry_of(key) or before) < before
        ]
        if not ended:
            return
        await self._store.delete_keys(ended)
        for id in ended:
            for known in (self._keys, self._digests, self._revoked, self._used):
                known.pop(id, None)

    def get(self, id: str) -> Key | None:
        """A key, with the time at which it really ends. None if there is no such key."""
        key = self._keys.get(id)
        return key and replace(key, expires_at=self._expiry_of(key))

    def is_valid(self, caller: Caller) -> bool:
        """Whether the key of a caller still opens what it did: not revoked, and not expired."""
        if caller.key is None:
            return self.is_open or caller.root != OPEN
        key = self._keys.get(caller.key)  # a temporary one may be forgotten by now
        if key is None or key.id not in self._digests:
            return False
        return not self._has_expired(key) and not self._is_cut_off(key)

    def has_ended(self, caller: Caller) -> bool:
        """Whether the key of a caller is known to open nothing any more.

        Another server may have made it just now, so one that is not known is no reason.
        """
        is_known = caller.key is None or caller.key in self._keys
        return is_known and not self.is_valid(caller)

    def watch(self, caller: Caller, end: Callable[[], None]) -> Callable[[], None]:
        """Call `end` when the caller's key is revoked or expires.

        Returns a function that stops watching.
        """
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
        """Store when keys were last used. Call it from time to time, and at the end."""
        used, self._used = self._used, {}
        if not used:
            return
        for id, at in used.items():
            self._keys[id] = replace(self._keys[id], last_used_at=at)
        await self._store.touch_keys(used)


def _check_limits(images: tuple[str, ...], workspaces: tuple[str, ...]) -> None:
    """Names that can exist; they need not exist yet."""
    for what, names in (("images", images), ("workspaces", workspaces)):
        if len(names) > MAX_NAMES:
            raise InvalidRequest(f"a key can be limited to at most {MAX_NAMES} {what}")
    for image in images:
        if not IMAGE.fullmatch(image):
            raise InvalidRequest(
                f"no image can be called {image[:80]!r}: use its whole name, without wildcards, "
                "as in `hutch image ls`"
            )
    for workspace in workspaces:
        checked_id(workspace)


def secret_digest(text: str) -> bytes:
    """What is kept of a secret. Enough for a random one, which cannot be guessed."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
