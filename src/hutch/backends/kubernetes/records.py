"""What several servers share, as objects of the cluster. See `SharedRecords` in backends/base.py.

Each record is one ConfigMap, or a Secret if it helps to get in. Its name is a hash, and what it is
about is data, so nothing that a caller names becomes a name or a label. The cluster decides between
two servers: an object is replaced only if it still has the version that was read.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import UTC, datetime
from urllib.parse import urlencode

import msgspec

from hutch.backends.base import SharedChange, SharedRecord
from hutch.errors import BackendUnavailable, Conflict, HutchError, InvalidRequest, NotFound

from .cluster import (
    LONG_PAUSE,
    PAGE,
    PAUSE,
    ApiAnswer,
    KubernetesCluster,
    ListMetadata,
    Metadata,
    Refused,
)
from .pod import MANAGED, OURS

KIND = "hutch.dev/kind"  # a label; its values are words of ours
SECRETS = ("key", "secret")  # kinds that are kept as Secrets
RESOURCES = ("configmaps", "secrets")
MAX_TEXT = 900_000  # bytes; a cluster takes objects of 1 MiB
ANSWERED = "the cluster answered with what is no record of ours"


class StoredObject(msgspec.Struct):
    """A ConfigMap or a Secret; the data of the latter is in base64."""

    metadata: Metadata
    data: dict[str, str] | None = None


class StoredObjects(msgspec.Struct):
    metadata: ListMetadata
    items: list[StoredObject]


class LeaseSpec(msgspec.Struct, rename="camel"):
    holder_identity: str = ""


class ClusterLease(msgspec.Struct):
    metadata: Metadata
    spec: LeaseSpec = msgspec.field(default_factory=LeaseSpec)


class ClusterRecords:
    """The records in one namespace. A SharedRecords."""

    def __init__(self, cluster: KubernetesCluster) -> None:
        self._cluster = cluster
        # Of each lease: the version that was seen last, and when that was, on our own clock.
        self._seen: dict[str, tuple[str, float]] = {}

    def now(self) -> float:
        return self._cluster.now()

    async def get(self, kind: str, key: str) -> SharedRecord | None:
        path, what = f"{self._path(kind)}/{_name(kind, key)}", _resource(kind)
        try:
            answer = await self._cluster.call("GET", path, verb="get", what=what)
        except NotFound:
            return None
        return _record(answer.decode(StoredObject), what)

    async def create(self, kind: str, key: str, text: str) -> SharedRecord:
        return await self._write("POST", kind, key, text, "")

    async def replace(self, record: SharedRecord, text: str) -> SharedRecord:
        kind, key = record.kind, record.key
        try:
            return await self._write("PUT", kind, key, text, str(record.version))
        except (Conflict, NotFound) as exc:
            # The answer to an attempt before this one may have been lost.
            there = await self.get(kind, key)
            if there is not None and there.text == text:
                return there
            raise Conflict(f"{kind} {key} was changed or removed: {exc}") from None

    async def _write(
        self, method: str, kind: str, key: str, text: str, version: str
    ) -> SharedRecord:
        if len(text.encode()) > MAX_TEXT:
            raise InvalidRequest(
                f"the record of {kind} {key:.100} is too large to be kept in the cluster: it may "
                f"have {MAX_TEXT} bytes; give less in env, labels and packages"
            )
        what, name = _resource(kind), _name(kind, key)
        data = {"kind": kind, "key": key, "text": text}
        body: dict[str, object] = {
            "apiVersion": "v1",
            "kind": "Secret" if what == "secrets" else "ConfigMap",
            "metadata": {
                "name": name,
                "labels": {MANAGED: OURS, KIND: kind},
                **({"resourceVersion": version} if version else {}),
            },
            "stringData" if what == "secrets" else "data": data,
        }
        path, verb = self._path(kind), "create"
        if method == "PUT":
            path, verb = f"{path}/{name}", "update"
        answer = await self._cluster.call(method, path, body, verb=verb, what=what)
        return _checked(_record(answer.decode(StoredObject), what))

    async def remove(self, record: SharedRecord) -> None:
        body: dict[str, object] = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"resourceVersion": str(record.version)},
        }
        path = f"{self._path(record.kind)}/{_name(record.kind, record.key)}"
        with contextlib.suppress(NotFound):
            await self._cluster.call(
                "DELETE", path, body, verb="delete", what=_resource(record.kind)
            )

    # --- what changes -----------------------------------------------------------------------

    async def follow(self) -> AsyncGenerator[SharedChange | None, None]:
        changes: asyncio.Queue[SharedChange | BackendUnavailable | None] = asyncio.Queue(10_000)
        tasks = [asyncio.create_task(self._follow(what, changes)) for what in RESOURCES]
        unlisted = len(tasks)
        try:
            while True:
                change = await changes.get()
                if isinstance(change, BackendUnavailable):
                    raise change
                if change is None:
                    unlisted -= 1
                if change is not None or not unlisted:
                    yield change
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(
        self, what: str, changes: asyncio.Queue[SharedChange | BackendUnavailable | None]
    ) -> None:
        known: dict[str, SharedRecord] = {}
        pause, is_first = PAUSE, True
        while True:
            began = time.monotonic()
            try:
                version = await self._list(what, known, changes)
                if is_first:
                    is_first = False
                    await changes.put(None)
                await self._watch(what, version, known, changes)
            except Refused as exc:
                await changes.put(exc)
                return
            except HutchError:
                pass  # it is away, or fails for now
            pause = PAUSE if time.monotonic() - began > LONG_PAUSE else min(2 * pause, LONG_PAUSE)
            await asyncio.sleep(pause)

    async def _list(
        self,
        what: str,
        known: dict[str, SharedRecord],
        changes: asyncio.Queue[SharedChange | BackendUnavailable | None],
    ) -> str:
        """Tell what is there, and what is gone. Returns the version to watch from."""
        path = f"{self._of(what)}?labelSelector={MANAGED}%3D{OURS}&limit={PAGE}"
        listed: set[str] = set()
        more = ""
        while True:
            answer = await self._cluster.call("GET", path + more, verb="list", what=what)
            page = answer.decode(StoredObjects)
            for item in page.items:
                listed.add(item.metadata.name)
                await self._tell(item, what, known, changes)
            if not page.metadata.continue_:
                break
            more = f"&{urlencode({'continue': page.metadata.continue_})}"
        version = page.metadata.resource_version
        for name in known.keys() - listed:
            gone = known.pop(name)
            # It may have changed after we saw it last, and was gone by the version of this list.
            seen = max(gone.version, int(version) if version.isdigit() else 0)
            await changes.put(SharedChange(replace(gone, version=seen), is_gone=True))
        return version

    async def _watch(
        self,
        what: str,
        version: str,
        known: dict[str, SharedRecord],
        changes: asyncio.Queue[SharedChange | BackendUnavailable | None],
    ) -> None:
        watch = self._cluster.watch(self._of(what), f"{MANAGED}={OURS}", version, what)
        async with contextlib.aclosing(watch) as events:
            async for event in events:
                if event.type == "ERROR":  # our version is too old: list again
                    return
                if event.type in ("ADDED", "MODIFIED", "DELETED"):
                    item = ApiAnswer(200, bytes(event.object)).decode(StoredObject)
                    await self._tell(item, what, known, changes, event.type == "DELETED")

    async def _tell(
        self,
        item: StoredObject,
        what: str,
        known: dict[str, SharedRecord],
        changes: asyncio.Queue[SharedChange | BackendUnavailable | None],
        is_gone: bool = False,
    ) -> None:
        record = _record(item, what)
        if record is None:
            return  # somebody else's, or damaged
        name, before = item.metadata.name, known.get(item.metadata.name)
        if is_gone:
            known.pop(name, None)
        elif before is not None and before.version == record.version:
            return
        else:
            # Without the text: it may be large, and what is needed later is which one it was.
            known[name] = SharedRecord(record.kind, record.key, "", record.version)
        await changes.put(SharedChange(record, is_gone))

    # --- leases -----------------------------------------------------------------------------

    async def lead(self, name: str, who: str, seconds: int) -> bool:
        try:
            return await self._lead(name, who, seconds)
        except Conflict:
            return False  # another one was faster

    async def _lead(self, name: str, who: str, seconds: int) -> bool:
        try:
            lease = await self._lease(name)
        except NotFound:
            await self._put_lease("POST", name, who, seconds, "")
            return True
        version, now = lease.metadata.resource_version, time.monotonic()
        seen, since = self._seen.get(name, ("", now))
        if seen != version:
            # It was renewed since we looked. What time it says it was does not matter: clocks of
            # other machines may be wrong.
            self._seen[name] = version, now
            since = now
        is_free = not lease.spec.holder_identity or now - since >= seconds
        if lease.spec.holder_identity != who and not is_free:
            return False
        await self._put_lease("PUT", name, who, seconds, version)
        return True

    async def resign(self, name: str, who: str) -> None:
        with contextlib.suppress(HutchError):
            lease = await self._lease(name)
            if lease.spec.holder_identity == who:
                await self._put_lease("PUT", name, "", 1, lease.metadata.resource_version)

    async def _lease(self, name: str) -> ClusterLease:
        answer = await self._cluster.call(
            "GET", f"{self._leases}/{name}", verb="get", what="leases"
        )
        return answer.decode(ClusterLease)

    async def _put_lease(
        self, method: str, name: str, who: str, seconds: int, version: str
    ) -> None:
        body: dict[str, object] = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": name,
                "labels": {MANAGED: OURS},
                **({"resourceVersion": version} if version else {}),
            },
            "spec": {
                "holderIdentity": who,
                "leaseDurationSeconds": seconds,
                "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            },
        }
        path, verb = self._leases, "create"
        if method == "PUT":
            path, verb = f"{path}/{name}", "update"
        await self._cluster.call(method, path, body, verb=verb, what="leases")

    # --- where ------------------------------------------------------------------------------

    @property
    def _leases(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self._cluster.namespace}/leases"

    def _of(self, what: str) -> str:
        return f"/api/v1/namespaces/{self._cluster.namespace}/{what}"

    def _path(self, kind: str) -> str:
        return self._of(_resource(kind))


def _resource(kind: str) -> str:
    return "secrets" if kind in SECRETS else "configmaps"


def _name(kind: str, key: str) -> str:
    return f"hutch-{kind}-" + hashlib.sha256(f"{kind}\0{key}".encode()).hexdigest()[:40]


def _record(item: StoredObject, what: str) -> SharedRecord | None:
    """None for an object that is not one of ours."""
    data = item.data or {}
    try:
        kind, key, text = data["kind"], data["key"], data["text"]
        if what == "secrets":
            kind, key, text = (base64.b64decode(part).decode() for part in (kind, key, text))
    except (KeyError, ValueError):
        return None
    version = item.metadata.resource_version
    if item.metadata.name != _name(kind, key) or not version.isdigit():
        return None
    return SharedRecord(kind, key, text, int(version))


def _checked(record: SharedRecord | None) -> SharedRecord:
    if record is None:
        raise BackendUnavailable(ANSWERED)
    return record
