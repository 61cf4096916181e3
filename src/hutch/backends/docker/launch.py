"""Starts a container and connects to its guest. If that fails, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from dataclasses import dataclass, field
from typing import Any

import hutch
from hutch.backends.base import ByteStream, Spec
from hutch.backends.contained import BUNDLE, OWN, GuestConnector, Relays, RuntimeBundle
from hutch.backends.linux import mounts
from hutch.backends.linux.mounts import FoundMount
from hutch.errors import (
    BoxLost,
    Conflict,
    HutchError,
    InvalidRequest,
    NotFound,
    StartFailed,
)

from . import bundled, container, owner_scope, users
from .box import ContainerRecord
from .connect import ContainerRelays, Rendezvous
from .container import ContainerImage, Surroundings
from .engine import HELPER, DockerEngine, Facts, close_stream
from .images import Resolver
from .owner_scope import OwnerScope
from .users import BoxUser, Users

LAST_WORDS = 5  # seconds for a guest that failed to fail again, when we read its output
FOREIGN = "bind source path does not exist"


@dataclass
class ReachedEngine:
    """An engine that we have reached, and what we keep for it."""

    engine: DockerEngine
    scope: OwnerScope
    bundle: RuntimeBundle
    data: str = ""  # the data folder of a server, links resolved; "" without a server
    users: dict[str, Users] = field(default_factory=dict)  # of images, by id
    volume: str = ""  # with the bundle, if the engine is remote
    giving: asyncio.Lock = field(default_factory=asyncio.Lock)
    filling: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.resolver = Resolver(self.engine)


@dataclass(frozen=True)
class Started:
    record: ContainerRecord
    connector: GuestConnector
    folder: str
    first: ByteStream | None  # a connection that is already open


class EngineIsRemote(Exception):
    """The engine does not see the files of this machine, although it seemed to be local."""


async def launch(here: ReachedEngine, spec: Spec, image: ContainerImage, box: str) -> Started:
    """Start a box.

    Raises InvalidRequest if this engine or image cannot do what the spec says, Conflict if a box
    with this id is running, NotFound if the image is gone, and StartFailed if the box does not
    come up.
    """
    container.check_volumes(image)
    facts = await _facts(here.engine, spec.runtime)
    try:
        return await _launch(here, facts, spec, image, box)
    except EngineIsRemote:
        here.engine.treat_as_remote()
        return await _launch(here, await here.engine.facts(), spec, image, box)


async def _launch(
    here: ReachedEngine, facts: Facts, spec: Spec, image: ContainerImage, box: str
) -> Started:
    with mounts.open_mounts(spec.mounts, spec.give, here.data) as found:
        found = await _prepare(here, facts, spec, found)
        return await _launch_with(here, facts, spec, image, box, found)


async def _launch_with(
    here: ReachedEngine,
    facts: Facts,
    spec: Spec,
    image: ContainerImage,
    box: str,
    found: tuple[FoundMount, ...],
) -> Started:
    known = await users_of(here, image)
    who = _who(spec, image, known, found, facts)
    kind = container.connector_for(facts, spec.runtime)
    bundle = str(here.bundle.path) if facts.is_local else await _volume(here, image)
    folder = here.scope.make(box) if facts.is_local else ""
    try:
        if folder:
            _write(folder, "passwd", users.passwd(known, who, spec.user))
            _write(folder, "group", users.group(known, who))
        around = Surroundings(kind, bundle, folder, found, is_swept=bool(here.data))
        labels = {
            owner_scope.BOX: box,
            owner_scope.OWNER_SCOPE: here.scope.id,
            owner_scope.IMAGE: image.name,
            owner_scope.DIGEST: image.digest,
            owner_scope.CONNECTOR: kind,
            owner_scope.FOLDER: os.path.basename(folder),
            owner_scope.VERSION: hutch.__version__,
            owner_scope.DEGRADED: json.dumps(container.degraded(spec, facts, who)),
            owner_scope.RUNTIME: facts.runtime(spec.runtime),
            owner_scope.PLACE: here.data,
        }
        body = container.body(spec, image, who, facts, around, here.bundle.command, labels)
        return await _run(here, facts, body, box, around)
    except BaseException:
        here.scope.clear(folder)
        here.volume = ""  # it may have been removed: look again next time
        raise


async def _run(
    here: ReachedEngine, facts: Facts, body: dict[str, Any], box: str, around: Surroundings
) -> Started:
    engine, id, folder = here.engine, "", around.folder
    connector: Rendezvous | Relays | None = None
    if body["Labels"][owner_scope.CONNECTOR] == "meeting":
        connector = Rendezvous(folder, box)
    try:
        id = await _create(here, body, box, facts)
        await engine.start(id)
        inspected = await engine.inspect(id)
        grade = facts.grade(body["HostConfig"]["Runtime"])
        record = ContainerRecord.of(inspected, grade, is_local=facts.is_local)
        if isinstance(connector, Rendezvous):
            connector.expect(record.guest)
            await connector.ready()
            # This needs /proc/PID/root, which an ordinary user may not read. A server insists.
            if here.data or not os.geteuid():
                users.check_mounted(around.mounts, record.guest)
            return Started(record, connector, folder, None)
        argv = here.bundle.command("hutch.guest.relay", at=BUNDLE)
        connector = Relays(ContainerRelays(engine, id, box, argv), box)
        return Started(record, connector, folder, await connector.connect())
    except BaseException as exc:
        if connector:
            connector.close()
        if id:
            await engine.remove(id)
        if isinstance(exc, StartFailed):
            _check_files(here, facts, exc)
        if isinstance(exc, (BoxLost, NotFound)) and id:
            words = await _last_words(here, body, box)
            raise StartFailed(f"the box did not come up: {words or exc}") from None
        raise


async def _create(here: ReachedEngine, body: dict[str, Any], box: str, facts: Facts) -> str:
    name = here.scope.name_of(box)
    try:
        return await here.engine.create(body, name)
    except Conflict:
        # The other one is running, or was never started, or is being removed.
        with contextlib.suppress(NotFound):
            if (await here.engine.inspect(name))["State"]["Running"]:
                raise Conflict(f"box {box} already exists") from None
        await here.engine.remove(name)
        return await here.engine.create(body, name)
    except NotFound as exc:
        raise NotFound(f"the image was removed just now: {exc}") from None
    except StartFailed as exc:
        _check_files(here, facts, exc)
        raise


def _check_files(here: ReachedEngine, facts: Facts, exc: StartFailed) -> None:
    """Raises a better error if the engine did not find a folder that it should mount.

    EngineIsRemote if that is our bundle, and InvalidRequest if it is a folder of the caller, which
    can disappear at any moment.
    """
    _, is_missing, path = str(exc).partition(f"{FOREIGN}: ")
    if facts.is_local and is_missing:
        if path.startswith(str(here.bundle.path)):
            raise EngineIsRemote from None
        raise InvalidRequest(f"cannot mount {path}: it is not there any more") from None


async def _last_words(here: ReachedEngine, body: dict[str, Any], box: str) -> str:
    """The output of a guest that exited at once: it is started again to read that."""
    again = {**body, "HostConfig": {**body["HostConfig"], "AutoRemove": False}}
    words, id = b"", ""
    try:
        id = await here.engine.create(again, here.scope.name_of(box))
        stream = await here.engine.attach(id)
        try:
            await here.engine.start(id)
            async with asyncio.timeout(LAST_WORDS):
                while message := await stream.read_out():
                    words += message.data
        finally:
            close_stream(stream)
    except (HutchError, OSError) as exc:  # TimeoutError is an OSError
        words = words or str(exc).encode()
    finally:
        if id:
            await here.engine.remove(id)
    return words.decode(errors="replace").strip()[-500:]


async def _facts(engine: DockerEngine, runtime: str) -> Facts:
    """The facts of the engine. Raises InvalidRequest if it has no such runtime."""
    facts = await engine.facts()
    if _has(facts, runtime):
        return facts
    facts = await engine.facts(fresh=True)  # it may have been added since
    if not _has(facts, runtime):
        raise InvalidRequest(no_runtime(facts, runtime))
    return facts


def no_runtime(facts: Facts, runtime: str) -> str:
    text = f"the Docker engine has no runtime {runtime!r}: there are {', '.join(facts.names)}"
    if runtime == "runsc":
        text += (
            f'. To have it, install gVisor on the engine\'s machine, add {{"{runtime}": {{"path": '
            '"/usr/bin/runsc"}} to "runtimes" in /etc/docker/daemon.json, and restart the engine'
        )
    return text


def _has(facts: Facts, runtime: str) -> bool:
    # Any shim of containerd can be used by its full name, without being listed.
    is_shim = runtime.startswith("io.containerd.") and runtime.isprintable()
    return not runtime or is_shim or runtime in facts.runtimes


async def _prepare(
    here: ReachedEngine, facts: Facts, spec: Spec, found: tuple[FoundMount, ...]
) -> tuple[FoundMount, ...]:
    """Check the mounts, and give folders away.

    Raises InvalidRequest if this engine cannot mount them, or if we could not verify what it did.
    """
    if not found:
        return ()
    if not facts.is_local:
        raise InvalidRequest(
            "folders can be mounted only by an engine on this machine: copy the files into the box"
        )
    is_seen = container.connector_for(facts, spec.runtime) == "meeting"
    if here.data and not is_seen and not all(mount.is_given for mount in found):
        raise InvalidRequest(
            f"folders cannot be mounted with runtime {facts.runtime(spec.runtime)!r} at a server, "
            "for it cannot see what the box got: copy the files into the box"
        )
    async with here.giving:  # of two starts with the same folder, one gives it away
        return await asyncio.to_thread(mounts.give_away, found, OWN)


def _who(
    spec: Spec, image: ContainerImage, known: Users, found: tuple[FoundMount, ...], facts: Facts
) -> BoxUser:
    relaxed = "user" in spec.relax
    if spec.user != "user":
        owner = None  # the caller chose a user, and with it what the box may write to
    elif facts.is_rootless and any(m.owner[0] == os.getuid() for m in found if not m.read_only):
        return BoxUser(0, 0)  # outside of the container, this is the user who runs the engine
    else:
        owner = mounts.owner_of_mounts(found, relaxed=relaxed)
        if owner and facts.has_few_users:
            raise InvalidRequest(
                "this engine remaps user ids, so nothing of this machine can be "
                "mounted writable: mount it read-only, or copy the files into the box"
            )
    return users.choose(
        spec.user, image.user, known, owner, few=facts.has_few_users, relaxed=relaxed
    )


async def _volume(here: ReachedEngine, image: ContainerImage) -> str:
    async with here.filling:
        here.volume = here.volume or await bundled.volume_of(here.engine, here.bundle, image.id)
    return here.volume


async def users_of(here: ReachedEngine, image: ContainerImage) -> Users:
    """The users of an image, read once and cached in a file beside the bundle."""
    if (known := here.users.get(image.id)) is not None:
        return known
    kept = here.bundle.path.parent / f"users-{image.id.rpartition(':')[2][:32]}"
    try:
        passwd, group = kept.read_bytes().split(b"\0")
    except (OSError, ValueError):
        passwd, group = await _read_users(here.engine, image)
        part = kept.with_name(f"{kept.name}.{os.getpid()}")
        try:
            part.write_bytes(passwd + b"\0" + group)
            part.replace(kept)
        except OSError:
            pass  # the next process reads them again
    here.users[image.id] = found = users.parse(passwd, group)
    return found


async def _read_users(engine: DockerEngine, image: ContainerImage) -> tuple[bytes, bytes]:
    # A tmpfs in its place keeps the engine from making a volume.
    no_volumes = dict.fromkeys(image.volumes, "")
    body = {
        "Image": image.id,
        "Entrypoint": ["/"],
        "Cmd": [],
        "Labels": {HELPER: owner_scope.name_of_process()},
        "HostConfig": {"NetworkMode": "none", "Tmpfs": no_volumes},
    }
    id = await engine.create(body, f"hutch-users-{os.urandom(8).hex()}")
    try:
        passwd = await engine.read(id, "/etc/passwd", users.MAX_SIZE)
        group = await engine.read(id, "/etc/group", users.MAX_SIZE)
    finally:
        await asyncio.shield(engine.remove(id))
    return passwd.replace(b"\0", b""), group.replace(b"\0", b"")


def _write(folder: str, name: str, text: str) -> None:
    path = os.path.join(folder, name)
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, 0o644)
