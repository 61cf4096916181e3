"""The service: what a server adds to an engine. A store, owners, keys, quotas and rules.

Every request goes through `perform` or `stream`, together with its caller. To a caller, the
sessions of another owner do not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar, cast

from hutch import errors, serving
from hutch import operations as op
from hutch.backends.base import Backend, ByteStream
from hutch.engine.box_request import ImageSource
from hutch.engine.engine import SESSION_HANDLERS
from hutch.engine.lifecycle import Lifecycle
from hutch.engine.session import Session
from hutch.errors import (
    Conflict,
    HutchError,
    InvalidRequest,
    NotPermitted,
    QuotaReached,
    ServerUnavailable,
    Unauthorized,
)
from hutch.operations import Handlers, Operation, SessionOperation, StreamOperation
from hutch.serving import (
    SCOPES,
    BuildProgress,
    Identity,
    Key,
    PoolState,
    Preview,
    Quota,
    Ticket,
    Usage,
)
from hutch.types import (
    ENDED,
    STATES,
    BoxInfo,
    Execution,
    Hibernation,
    Port,
    Result,
    State,
    Stats,
)

from .adoption import AdoptionReport, adopt_all
from .audit import Audit
from .journal import Journal, broken_off_entry
from .keys import LOCAL, OPEN, OPERATOR, Caller, KeyExpired, Keys
from .log import ServerLog
from .quotas import Quotas
from .recorder import Dial, Recorder
from .replicas import TOKEN, Connect, PeerLost, Replicas, new_name
from .requests import image_of, ttl_too_long
from .rules import Rules
from .sessions import Sessions
from .shared_store import SharedStore
from .store import LIVE, Store
from .tickets import PreviewedPort, Previews, Tickets
from .watching import WATCH_HANDLERS, SettingsEditor, Watching
from .workspace_files import WORKSPACE_HANDLERS, WorkspaceFiles
from .workspaces import Workspaces

T = TypeVar("T")
ItemT = TypeVar("ItemT")
log = logging.getLogger("hutch")
TICK = 5  # seconds between two rounds of housekeeping
MAX_LIST = 1000
REAP = 5.0  # seconds between two rounds of looking for sessions that nobody has
_RUNS = (op.RunShell, op.RunProgram, op.RunCode)
_FORWARDED = (SessionOperation, serving.WhoAmI)
_UPLOADS = (op.WriteFile, op.UnpackFolder)
_OF_INDEX = (op.GetSession, serving.PreviewPort)  # about sessions that need not be here
_OF_JOURNAL = (serving.ReadJournal, serving.FollowJournal, serving.ExportJournal)


class ImageManager(ImageSource, Protocol):
    """Images that can also be listed, built, pulled and removed."""

    def build(self, o: serving.BuildImage) -> AsyncGenerator[serving.BuildProgress, None]: ...
    def pull(self, o: serving.PullImage) -> AsyncGenerator[serving.BuildProgress, None]: ...
    async def remove(self, name: str) -> None: ...
    def list(self) -> list[serving.ImageInfo]: ...


class Service:
    def __init__(
        self,
        folder: Path,
        backend: Backend,
        images: ImageManager,
        store: Store,
        keys: Keys,
        quotas: Quotas,
        workspaces: Workspaces,
        sessions: Sessions,
        rules: Rules,
        settings: SettingsEditor | None = None,
        log_records: ServerLog | None = None,
    ) -> None:
        """`Service.open` makes one."""
        self._backend, self._images, self._store = backend, images, store
        self._keys, self._quotas, self._workspaces = keys, quotas, workspaces
        self._tickets = Tickets(keys)
        self._sessions, self.rules = sessions, rules
        self._files = WorkspaceFiles(
            backend, workspaces, folder / "run" / "files", sessions.boxes.starts
        )
        self.audit = Audit(folder / "audit", rules.audit_size, rules.audit_age)
        self.watching = Watching(
            sessions, images.list, self.audit, settings, log_records or ServerLog()
        )
        self._recorder = Recorder(self.audit)
        self._previews = Previews(keys, sessions.is_live)
        self._replicas: Replicas | None = None
        self._tickers: list[asyncio.Task[None]] = []
        self.adoption = AdoptionReport()
        self.is_ready = False

    @classmethod
    async def open(
        cls,
        folder: Path,
        backend: Backend,
        images: ImageManager,
        rules: Rules,
        api_key: str | None = None,
        *,
        settings: SettingsEditor | None = None,
        log_records: ServerLog | None = None,
        url: str = "",
        connect: Connect | None = None,
    ) -> Service:
        """Adopt the sessions of an earlier server in this folder, and start. Raises HutchError.

        `settings` are those that operators can look at and change; `log_records` is a handler of
        the loggers that they can read. If the backend has shared records, sessions are shared with
        all servers that have the same: `url` is this one's, for them, and `connect` leads to one.
        """
        for name in ("sessions", "workspaces"):
            (folder / name).mkdir(mode=0o700, exist_ok=True)
        store: Store
        if records := await backend.shared_records():
            store = await SharedStore.join(folder, records, new_name(url))
        else:
            store = await Store.open(folder / "hutch.db")
        try:
            keys = await Keys.open(
                store, api_key, default_ttl=rules.key_default_ttl, max_ttl=rules.key_max_ttl
            )
            quotas = await Quotas.open(store, rules.quota)
            root, kernel = folder / "workspaces", rules.workspace_quota_mode == "kernel"
            workspaces = Workspaces(
                root, store, rules.workspace_quota, quotas.disk_of, kernel=kernel
            )
            await workspaces.recover()
            sessions = Sessions(
                folder / "sessions", backend, images, store, rules, quotas, workspaces
            )
            service = cls(
                folder,
                backend,
                images,
                store,
                keys,
                quotas,
                workspaces,
                sessions,
                rules,
                settings,
                log_records,
            )
            await backend.keep_files()
            if isinstance(store, SharedStore):
                assert connect, "servers that share sessions need a way to each other"
                store.key_changed, store.quota_changed = keys.learn, quotas.learn
                # Nobody was told of what has changed since these were read.
                for key, digest in await store.list_keys():
                    keys.learn(key, digest)
                for owner, quota in (await store.quotas()).items():
                    quotas.learn(owner, quota)
                service._replicas = Replicas(store, sessions, connect)
            else:
                service.adoption = await adopt_all(sessions, folder / "sessions")
        except BaseException:
            await backend.leave()
            await store.close()
            raise
        service._tickers = [
            asyncio.create_task(service._tick()),
            asyncio.create_task(service._tick_each_second()),
            asyncio.create_task(service.watching.sample_when_due()),
            asyncio.create_task(service.audit.sync_each_second()),
        ]
        if service._replicas:
            service._tickers.append(asyncio.create_task(service._tick_replicas(service._replicas)))
        sessions.boxes.pool.fill()
        service.is_ready = True
        return service

    def __repr__(self) -> str:
        return f"<Service {self._backend.name}, {len(self._sessions.lives)} sessions>"

    # --- callers --------------------------------------------------------------------------

    def authenticate(
        self, key: str | None, *, local: bool, peer: str = "", request: str = ""
    ) -> Caller:
        """The caller with this key. `local`: the server's own user, over the Unix socket.

        `peer` and `request` are the address and the id of the request, for the audit log. Raises
        Unauthorized.
        """
        if key is not None and self._replicas and key.startswith(TOKEN):
            try:
                caller = self._replicas.caller_of(key)
            except Unauthorized:
                self._recorder.auth_failed("unknown key", peer, request)
                raise
            if self._keys.has_ended(caller):
                self._recorder.auth_failed("revoked", peer, request)
                raise NotPermitted("the key of this request was revoked, or has expired")
            return replace(caller, peer=peer, request=request)
        if key is None and (local or self._keys.is_open):
            root = LOCAL if local else OPEN
            return Caller(OPERATOR, "admin", root=root, is_local=local, peer=peer, request=request)
        try:
            known = None if key is None else self._keys.find(key)
        except KeyExpired as exc:
            self._recorder.auth_failed("expired", peer, request, exc.key)
            raise
        if known is not None:
            return replace(known, is_local=local, peer=peer, request=request)
        if key is None:
            self._recorder.auth_failed("no key", peer, request)
            raise Unauthorized("this server needs a key: `Authorization: Bearer KEY`")
        revoked = self._keys.find_revoked(key)
        self._recorder.auth_failed("revoked" if revoked else "unknown key", peer, request, revoked)
        raise Unauthorized("unknown or revoked key")

    def stranger(self, peer: str, request: str) -> Caller:
        """A caller for public operations, which check what they are sent themselves."""
        return Caller("", SCOPES[0], peer=peer, request=request)

    def record_failed_auth(self, why: str, peer: str, request: str) -> None:
        """Record a request whose key is malformed, in the audit log."""
        self._recorder.auth_failed(why, peer, request)

    def watch(self, caller: Caller, end: Callable[[], None]) -> Callable[[], None]:
        """Call `end` when the caller's key is revoked, or within two seconds after it expires.

        Returns a function that stops watching.
        """
        return self._keys.watch(caller, end)

    def check_rate(self, caller: Caller) -> None:
        """To be called once for each request. Raises QuotaReached with `retry_after`."""
        if caller.is_forwarded:
            return  # the server that it came to has counted it
        try:
            self._quotas.check_rate(caller.owner)
        except QuotaReached as exc:
            self._recorder.denied(caller, "", "", exc.code)
            raise

    @property
    def is_open(self) -> bool:
        """Whether no key was ever made, so that every caller may do everything."""
        return self._keys.is_open

    async def perform(self, operation: Operation[T], caller: Caller) -> T:
        """Carry out one operation, and return its answer.

        Raises NotPermitted if the caller's key does not allow it, and any other HutchError.
        """
        if isinstance(operation, StreamOperation):
            return await op.last_of(operation, await self.stream(operation, caller))
        return await self._recorded(operation, caller, self._perform(operation, caller))

    async def stream(
        self, operation: StreamOperation[ItemT, T], caller: Caller
    ) -> AsyncGenerator[ItemT, None]:
        """Carry out one operation, item by item. Closing the generator stops it."""
        return await self._recorded(operation, caller, self._stream(operation, caller))

    async def _recorded(
        self, operation: Operation[object], caller: Caller, work: Coroutine[object, object, T]
    ) -> T:
        try:
            with contextlib.closing(work):
                if not operation.is_public:
                    caller.require(operation.needs)
                if caller.is_forwarded and not isinstance(operation, _FORWARDED):
                    raise NotPermitted("servers forward only what is about one session")
                with errors.as_answers():
                    answer = await work
        except BaseException as exc:  # also CancelledError, if the client disconnects
            self._recorder.failed(operation, caller, exc)
            if isinstance(exc, HutchError):
                self._sessions.history.erred(caller.owner)
            raise
        self._recorder.performed(operation, caller, answer)
        return answer

    async def _perform(self, operation: Operation[T], caller: Caller) -> T:
        holder = await self._holder(operation, caller)
        while self._replicas and holder:
            try:
                asked = self._replicas.peer(holder, caller).perform(operation)
                return await self._replicas.watched(holder, asked)
            except PeerLost as exc:
                _check_whole(operation, exc)
                holder = await self._holder(operation, caller, holder)
        return await self._perform_here(operation, caller)

    async def _perform_here(self, operation: Operation[T], caller: Caller) -> T:
        if operation in _HANDLERS:
            return await _HANDLERS.find(operation)(self, operation, caller)
        if operation in WATCH_HANDLERS:
            return await WATCH_HANDLERS.find(operation)(self.watching, operation, caller)
        if operation in WORKSPACE_HANDLERS:
            return await WORKSPACE_HANDLERS.find(operation)(self._files, operation, caller)
        id = _session_of(operation)
        if (workspace := self._workspace_of(id, caller)) is not None:
            handler = SESSION_HANDLERS.find(operation)
            return await self._files.perform(*workspace, operation, handler)
        life = await self._find(id, caller)
        answer = await life.perform(operation, SESSION_HANDLERS.find(operation))
        self._sessions.journal(id).note(operation, answer)
        return answer

    async def _stream(
        self, operation: StreamOperation[ItemT, T], caller: Caller
    ) -> AsyncGenerator[ItemT, None]:
        if holder := await self._holder(operation, caller):
            items = self._forwarded(operation, caller, holder)
            if operation.items is bytes:
                await anext(items)  # so that what is wrong is known before the answer begins
            return items
        return await self._stream_here(operation, caller)

    async def _forwarded(
        self, operation: StreamOperation[ItemT, T], caller: Caller, holder: str
    ) -> AsyncGenerator[ItemT, None]:
        """The items of another server; or of this one, if that is lost before it did anything."""
        while self._replicas and holder:
            stream = self._replicas.peer(holder, caller).stream(operation)
            try:
                async with contextlib.aclosing(stream):
                    while True:
                        yield await self._replicas.watched(holder, anext(stream))
            except StopAsyncIteration:
                return
            except PeerLost:
                holder = await self._holder(operation, caller, holder)
        stream = await self._stream_here(operation, caller)
        async with contextlib.aclosing(stream):
            if operation.items is bytes:
                yield cast(ItemT, b"")
            async for item in stream:
                yield item

    async def _holder(self, operation: Operation[object], caller: Caller, lost: str = "") -> str:
        """The other server that carries out this operation; "" if this one does."""
        if self._replicas is None or not isinstance(operation, SessionOperation):
            return ""
        id = operation.session
        if id.startswith(serving.WORKSPACE_FILES) or isinstance(operation, _OF_INDEX):
            return ""
        await self.watching.info_of(id, caller)
        if isinstance(operation, _OF_JOURNAL):
            return "" if lost else await self._replicas.last_holder(id, caller)
        closes = isinstance(operation, op.CloseSession)
        return await self._replicas.holder(id, caller, lost=lost, closes=closes)

    async def _stream_here(
        self, operation: StreamOperation[ItemT, T], caller: Caller
    ) -> AsyncGenerator[ItemT, None]:
        if operation in _HANDLERS:
            return await _HANDLERS.find_stream(operation)(self, operation, caller)
        if operation in WATCH_HANDLERS:
            return await WATCH_HANDLERS.find_stream(operation)(self.watching, operation, caller)
        if operation in WORKSPACE_HANDLERS:
            return await WORKSPACE_HANDLERS.find_stream(operation)(self._files, operation, caller)
        id, handler = _session_of(operation), SESSION_HANDLERS.find_stream(operation)
        if (workspace := self._workspace_of(id, caller)) is not None:
            life = await self._files.of(*workspace, operation)
            return await life.stream(operation, handler)
        life = await self._find(id, caller)
        items = await life.stream(operation, handler)
        if isinstance(operation, _RUNS):
            items = self._timed(items, life.owner, is_cell=isinstance(operation, op.RunCode))
        return self._noted(items, operation, self._sessions.journal(id))

    def _workspace_of(self, id: str, caller: Caller) -> tuple[str, str] | None:
        """The owner and the name of the workspace that a session id stands for, if it does.

        Raises NotPermitted if it is another owner's, and the caller is not an admin.
        """
        if not id.startswith(serving.WORKSPACE_FILES):
            return None
        owner, _, name = id.removeprefix(serving.WORKSPACE_FILES).rpartition("/")
        caller.check_owner(owner or None, "workspaces need")
        caller.check_workspace(name)
        return owner or caller.owner, name

    async def _find(self, id: str, caller: Caller) -> Lifecycle:
        """A session that has not ended. Raises NotYours if the key may not see it."""
        await self.watching.info_of(id, caller)
        return await self._sessions.find(id, caller.seen_owner)

    async def _noted(
        self, stream: AsyncGenerator[ItemT, None], operation: Operation[object], journal: Journal
    ) -> AsyncGenerator[ItemT, None]:
        is_noted = not isinstance(operation, _RUNS)
        try:
            async for item in stream:
                if isinstance(item, (Result, Execution)):
                    is_noted = True
                    journal.note(operation, item)
                yield item
        finally:
            await stream.aclose()
            if not is_noted:
                journal.add("broken_off", **broken_off_entry(operation))

    async def _timed(
        self, stream: AsyncGenerator[ItemT, None], owner: str, *, is_cell: bool
    ) -> AsyncGenerator[ItemT, None]:
        """The same, counted in the history when the result is there."""
        began = time.perf_counter()
        try:
            async for item in stream:
                if isinstance(item, (Result, Execution)):
                    seconds = time.perf_counter() - began
                    self._sessions.history.ran(owner, seconds, is_cell=is_cell)
                yield item
        except HutchError:
            self._sessions.history.erred(owner)
            raise
        finally:
            await stream.aclose()

    async def dial(self, session: str, port: int, caller: Caller) -> ByteStream:
        """A TCP connection to a port in a box. Raises NotFound if nothing listens there."""
        try:
            caller.require("run")
            tunnel = await self._dial(session, port, caller)
        except BaseException as exc:  # also CancelledError, if the client disconnects
            self._recorder.failed(Dial(session), caller, exc)
            raise
        self._recorder.performed(Dial(session), caller, None)
        return tunnel

    async def _dial(self, session: str, port: int, caller: Caller) -> ByteStream:
        await self.watching.info_of(session, caller)
        lost = ""
        while self._replicas and (
            holder := await self._replicas.holder(session, caller, lost=lost)
        ):
            try:
                return await self._replicas.peer(holder, caller).dial(session, port)
            except PeerLost:
                lost = holder
        life = await self._find(session, caller)
        return await life.use(lambda session: session.dial(port))

    # --- sessions -------------------------------------------------------------------------

    async def _open(self, o: op.OpenSession, caller: Caller) -> BoxInfo:
        if (o.packages or o.preload) and not caller.may("admin"):
            raise NotPermitted(
                "packages and preload need an admin key: the operator decides what a server "
                "downloads and imports (`hutch image build`)"
            )
        _check_packages(o.packages)
        image = image_of(o, self.rules, self._backend.default_image)
        caller.check_image(image)
        caller.check_workspace(o.workspace_id)
        began, history = time.perf_counter(), self._sessions.history
        try:
            info = await self._sessions.open(o, caller.owner)
        except HutchError as exc:
            workspace, why = o.workspace_id, str(exc)
            history.failed(
                caller.owner, "open", why, image=image, code=exc.code, workspace_id=workspace
            )
            raise
        history.opened(caller.owner, time.perf_counter() - began)
        return info

    async def _close(self, o: op.CloseSession, caller: Caller) -> None:
        await self.watching.info_of(o.session, caller)
        await self._sessions.close(o.session, caller.seen_owner)

    async def _get(self, o: op.GetSession, caller: Caller) -> BoxInfo:
        return await self.watching.info_of(o.session, caller)

    async def _extend(self, o: op.ExtendSession, caller: Caller) -> BoxInfo:
        if o.ttl_seconds > self.rules.max_ttl:
            raise InvalidRequest(ttl_too_long(self.rules))
        return await (await self._find(o.session, caller)).extend(o.ttl_seconds)

    async def _list(self, o: op.ListSessions, caller: Caller) -> list[BoxInfo]:
        if not 1 <= o.limit <= MAX_LIST:
            raise InvalidRequest(f"limit is from 1 to {MAX_LIST}, not {o.limit}")
        owner = caller.seen_owner
        if o.before is not None:
            await self.watching.info_of(o.before, caller)
        records = await self._store.list(
            owner=owner or o.owner,
            statuses=_statuses(o.status),
            image=o.image,
            workspace_id=o.workspace_id,
            label=o.label,
            before=o.before,
            limit=o.limit,
            of_images=caller.images,
            of_workspaces=caller.workspaces,
        )
        return [self._sessions.latest(record.info) for record in records]

    async def _hibernate(self, o: op.Hibernate, caller: Caller) -> Hibernation:
        return await (await self._find(o.session, caller)).hibernate()

    async def _wake(self, o: op.Wake, caller: Caller) -> Hibernation | None:
        return await (await self._find(o.session, caller)).wake()

    async def _stats(self, o: op.GetStats, caller: Caller) -> Stats:
        return await (await self._find(o.session, caller)).stats()

    async def _ports(self, o: serving.ListPorts, caller: Caller) -> list[Port]:
        life = await self._find(o.session, caller)
        return await life.use(Session.list_ports)

    # --- keys, quotas, pool, images -------------------------------------------------------

    async def _who_am_i(self, o: serving.WhoAmI, caller: Caller) -> Identity:
        if self._replicas and caller.is_forwarded:
            return Identity(caller.owner, caller.scope, label=self._replicas.proof())
        key = self._keys.get(caller.key) if caller.key else None
        return Identity(
            caller.owner,
            caller.scope,
            caller.key,
            key.label if key else "",
            key.expires_at if key else None,
            caller.images,
            caller.workspaces,
            caller.is_local,
            self.may_edit_settings(caller),
            is_temporary=self._keys.is_temporary(caller),
        )

    def may_edit_settings(self, caller: Caller) -> bool:
        """Whether this caller may change the settings of this server.

        Settings can give boxes parts of the machine, so a key that came over the network is not
        enough, unless the operator says so.
        """
        return caller.may("admin") and (caller.is_local or self.rules.edit_settings)

    async def _make_ticket(self, o: serving.MakeTicket, caller: Caller) -> Ticket:
        if self.rules.no_dashboard:
            raise Conflict(f"the dashboard of this server {self.rules.no_dashboard}")
        return self._tickets.make(caller)

    async def _redeem_ticket(self, o: serving.RedeemTicket, caller: Caller) -> Key:
        return await self._tickets.redeem(o.ticket, caller.peer)

    async def _list_keys(self, o: serving.ListKeys, caller: Caller) -> list[Key]:
        return self._keys.list()

    async def _make_key(self, o: serving.MakeKey, caller: Caller) -> Key:
        return await self._keys.make(
            o.owner, o.scope, o.label, expires=o.expires, images=o.images, workspaces=o.workspaces
        )

    async def _extend_key(self, o: serving.ExtendKey, caller: Caller) -> Key:
        return await self._keys.extend(o.key, o.expires)

    async def _rotate_key(self, o: serving.RotateKey, caller: Caller) -> Key:
        return await self._keys.rotate(o.key, o.overlap, o.expires)

    async def _revoke_key(self, o: serving.RevokeKey, caller: Caller) -> None:
        if o.key != caller.key or not self._keys.is_temporary(caller):
            caller.require("admin")
        await self._keys.revoke(o.key)

    async def _quota(self, o: serving.GetQuota, caller: Caller) -> Usage:
        caller.check_owner(o.owner, "quota needs")
        disk = await self._workspaces.disk_used(o.owner)
        return replace(self._sessions.usage(o.owner), disk=disk)

    async def _set_quota(self, o: serving.SetQuota, caller: Caller) -> Usage:
        await self._quotas.set(o.owner, Quota(o.sessions, o.memory, o.cpus, o.disk, o.rate))
        return await self._quota(serving.GetQuota(o.owner), caller)

    async def _pool(self, o: serving.GetPool, caller: Caller) -> list[PoolState]:
        return self._sessions.boxes.pool.states()

    async def _size_pool(self, o: serving.SizePool, caller: Caller) -> PoolState:
        return self._sessions.boxes.pool.size(o.image, o.size)

    async def _build_image(
        self, o: serving.BuildImage, caller: Caller
    ) -> AsyncGenerator[BuildProgress, None]:
        _check_packages(o.packages)
        return self._images.build(o)

    async def _pull_image(
        self, o: serving.PullImage, caller: Caller
    ) -> AsyncGenerator[BuildProgress, None]:
        return self._images.pull(o)

    async def _remove_image(self, o: serving.RemoveImage, caller: Caller) -> None:
        await self._images.remove(o.name)

    # --- previews of ports ------------------------------------------------------------------

    async def _preview_port(self, o: serving.PreviewPort, caller: Caller) -> Preview:
        if (await self.watching.info_of(o.session, caller)).status in ENDED:
            await self._find(o.session, caller)
        if not o.port.isascii() or not o.port.isdigit() or not 0 < int(o.port[:6]) < 65536:
            raise InvalidRequest(f"a port is a number from 1 to 65535, not {o.port[:64]!r}")
        return self._previews.make(o.session, int(o.port), caller)

    def previewed(self, token: str, peer: str) -> PreviewedPort:
        """What a token of a preview stands for. Raises NotFound.

        `peer`: the address that the request comes from.
        """
        return self._previews.find(token, peer)

    # --- housekeeping ---------------------------------------------------------------------

    async def _tick(self) -> None:
        for turn in range(1 << 62):
            await asyncio.sleep(TICK)
            sessions = self._sessions
            steps = [sessions.stranded.expire, sessions.end_those_over_quota]
            steps += [sessions.write_down, self._keys.write_down]
            hourly = [sessions.purge, self.audit.prune_in_thread, self._keys.forget_temporary]
            for step in [*steps, *(hourly if turn % 720 == 0 else [])]:
                try:
                    await step()
                except HutchError:
                    pass  # a full disk or a locked database: callers see it, and we try again
                except Exception:
                    log.exception("housekeeping failed, and is tried again")

    async def _tick_each_second(self) -> None:
        while True:
            await asyncio.sleep(1)
            try:
                self._keys.end_expired()
                self._recorder.summarize()
            except Exception:
                log.exception("housekeeping failed, and is tried again")

    async def _tick_replicas(self, replicas: Replicas) -> None:
        said = ""
        while True:
            try:
                await replicas.reap()
                said = ""
            except HutchError as exc:
                # Once: the backend may be away for a while, or a right be missing for good.
                if str(exc) != said:
                    said = str(exc)
                    log.warning("sessions that no server has are not looked for now: %s", said)
            except Exception:
                log.exception("looking for sessions that nobody has failed, and is tried again")
            await asyncio.sleep(REAP)

    async def close(self, *, drain: float | None = None, kill: bool = False) -> int:
        """Shut down. Unless `kill`, sessions stay for the next server; returns how many."""
        self.is_ready = False
        for ticker in self._tickers:
            ticker.cancel()
        await self.watching.close()
        if self._replicas:
            await self._replicas.close()
        stay = await self._sessions.leave(drain=drain or 0, kill=kill)
        await self._files.close_all()
        await self._workspaces.close()
        try:
            await self._keys.write_down()
        except HutchError:
            pass  # when a key was last used is not important enough to fail
        await self._backend.leave()
        self._images.close()
        await self._store.close()
        self.audit.close()
        return stay


def _check_packages(packages: Iterable[str]) -> None:
    """Raises InvalidRequest for URLs and paths: callers may not make the server open those."""
    for package in packages:
        if any(mark in package for mark in ("/", "\\", "@", ":")) or package.endswith(".whl"):
            raise InvalidRequest(
                f"{package!r:.100}: a server takes packages by name and version; with a wheel, or "
                "an address, build an image on its own machine: `hutch image build`"
            )


def _statuses(text: str | None) -> tuple[State, ...] | None:
    if text is None or text == "all":
        return None
    if text == "live":
        return LIVE
    words = text.split(",")
    if unknown := [word for word in words if word not in STATES]:
        known = ", ".join(("live", "all", *STATES))
        raise InvalidRequest(f"no status {unknown[0]!r}: there are {known}")
    return tuple(state for state in STATES if state in words)


def _session_of(operation: Operation[object]) -> str:
    assert isinstance(operation, SessionOperation), f"{operation} has no handler"
    return operation.session


def _check_whole(operation: Operation[object], exc: PeerLost) -> None:
    """Raises ServerUnavailable for an upload of which another server may have read a part."""
    was_reached = isinstance(exc.__cause__, Unauthorized)
    if was_reached and isinstance(operation, _UPLOADS) and not isinstance(operation.data, bytes):
        raise ServerUnavailable(
            f"session {operation.session} moved to another server while this was sent, and nothing "
            "was written: send it again"
        ) from None


_HANDLERS = Handlers(
    op.OpenSession.by(Service, Service._open),
    op.CloseSession.by(Service, Service._close),
    op.GetSession.by(Service, Service._get),
    op.ListSessions.by(Service, Service._list),
    op.ExtendSession.by(Service, Service._extend),
    op.Hibernate.by(Service, Service._hibernate),
    op.Wake.by(Service, Service._wake),
    op.GetStats.by(Service, Service._stats),
    serving.ListPorts.by(Service, Service._ports),
    serving.WhoAmI.by(Service, Service._who_am_i),
    serving.MakeTicket.by(Service, Service._make_ticket),
    serving.RedeemTicket.by(Service, Service._redeem_ticket),
    serving.ListKeys.by(Service, Service._list_keys),
    serving.MakeKey.by(Service, Service._make_key),
    serving.RevokeKey.by(Service, Service._revoke_key),
    serving.ExtendKey.by(Service, Service._extend_key),
    serving.RotateKey.by(Service, Service._rotate_key),
    serving.GetQuota.by(Service, Service._quota),
    serving.SetQuota.by(Service, Service._set_quota),
    serving.GetPool.by(Service, Service._pool),
    serving.SizePool.by(Service, Service._size_pool),
    serving.BuildImage.streamed_by(Service, Service._build_image),
    serving.PullImage.streamed_by(Service, Service._pull_image),
    serving.RemoveImage.by(Service, Service._remove_image),
    serving.PreviewPort.by(Service, Service._preview_port),
)
_ALL = {*_HANDLERS, *WATCH_HANDLERS, *WORKSPACE_HANDLERS, *SESSION_HANDLERS}
assert {*op.TABLE.values()} == _ALL, "an operation without a handler"
