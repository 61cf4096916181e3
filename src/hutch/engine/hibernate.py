"""Deep hibernation: the box is closed, and the next call restores its state in a new one.

Saved are the files on the box's own disk, the variables of each kernel, and the directory,
variables and functions of each shell. To the host all of it is opaque bytes: a box wrote them, and
only a box reads them. What cannot be saved (a socket, a thread, a running program) is reported,
with the reason.

Nothing is removed before its copy is safe. A box is killed after everything was written, flushed to
disk, read back and compared; what was saved is removed after a new box has restored all of it and
checked it again. If a check fails, the box stays awake, or stays saved.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import shlex
import time
import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hutch import wire
from hutch.errors import (
    BoxLost,
    CallerError,
    Conflict,
    GuestMisbehaved,
    HutchError,
    IncompatibleBox,
    LimitReached,
    NoSpace,
)
from hutch.types import Hibernation, Limits

from .check import guest_field
from .link import Link
from .sealing import Sealer, Unreadable, is_sealed

# The format of everything that is saved: the manifest, the archive of files (guest/archive.py) and
# the state of kernels (kernel/state.py). A change that earlier versions cannot read gets the next
# number.
FORMAT = 2
MAIN = "main"  # the context, and the shell, that exist without being opened
PIECE = 4 << 20  # bytes that are read or written at once, in a thread, as disks may be slow
# Kernels and shells run user code while they are saved. If a shell takes longer, its state is lost;
# if a kernel takes longer, the box is not hibernated.
CONTEXT_PATIENCE, SHELL_PATIENCE = 120, 10  # seconds
MAX_PASSES = 8  # over the state of one context
EVERYTHING = "everything"  # what a kernel reports as lost if it could load nothing at all
MAX_LOST = 1000  # entries that a guest may report
MAX_SHELL = 4 << 20  # bytes of one shell's variables and functions
SLACK = 64 << 20  # bytes that names and other metadata may take besides the content
SHELL_FILE = "/tmp/.hutch-shell"
ARCHIVE_END, MAX_END = b'{"kind": "end"', 1024  # the start and the maximum size of its last line

# Run in a subshell, so that it changes nothing. What is left out belongs to the shell itself. A
# backslash bypasses aliases of the user, and `builtin` bypasses functions.
_BASH = r"""
__hutch_ifs=$IFS IFS=$' \t\n'
for __hutch_v in $(\builtin compgen -v); do
  case $__hutch_v in
    BASH*|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|HISTCMD|IFS|LINENO|PIPESTATUS|PPID|RANDOM|SRANDOM|\
SECONDS|SHELLOPTS|UID|PWD|OLDPWD|SHLVL|_|__hutch*) ;;
    *) __hutch_d=$(\builtin declare -p "$__hutch_v" 2>/dev/null) &&
       \builtin printf '%s\n' "${__hutch_d/#declare/declare -g}" ;;
  esac
done
for __hutch_v in $(\builtin compgen -A function); do
  case $__hutch_v in __hutch*) ;; *) \builtin declare -f "$__hutch_v" ;; esac
done
\builtin printf 'IFS=%q\n' "$__hutch_ifs"
\builtin alias -p
\builtin umask -p
\builtin shopt -p
\builtin set +o
\builtin echo '# whole'
"""
_ANY_SHELL = "export -p; umask; echo '# whole'"
SAVE_SHELL = f'if [ -n "$BASH_VERSION" ]; then (eval {shlex.quote(_BASH)}); else ({_ANY_SHELL}); fi'
WHOLE = b"# whole\n"
JOBS = 'if [ -n "$BASH_VERSION" ]; then \\builtin jobs; fi'


@dataclass(frozen=True)
class SavedShell:
    user: str | None
    cwd: str
    script: bytes


@dataclass
class Saved:
    """The saved state of a box."""

    files: Path
    contexts: dict[str, Path] = field(default_factory=dict)
    opened: dict[str, wire.StartKernel] = field(default_factory=dict)  # all but the main one
    shells: dict[str, SavedShell] = field(default_factory=dict)
    report: Hibernation = field(default_factory=Hibernation)
    manifest: Path | None = None  # the file that has all of this, once it is written
    # SHA-256 by file name; empty in manifests of earlier versions.
    sums: dict[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> set[Path]:
        return {*([self.manifest] if self.manifest else []), self.files, *self.contexts.values()}

    def remove(self) -> None:
        for path in self.paths:
            path.unlink(missing_ok=True)

    def write_down(self, sealer: Sealer | None = None) -> Path:
        """Write the manifest, so that another process can find it.

        It is sealed, because variables of shells may be secrets. Raises NoSpace.
        """
        body = {
            "format": FORMAT,
            "files": self.files.name,
            "contexts": {name: path.name for name, path in self.contexts.items()},
            "opened": {name: asdict(request) for name, request in self.opened.items()},
            "shells": {
                name: [shell.user, shell.cwd, base64.b64encode(shell.script).decode()]
                for name, shell in self.shells.items()
            },
            "report": asdict(self.report),
            "sums": self.sums,
        }
        self.manifest = self.files.with_name(self.files.name.removesuffix("-files") + ".json")
        with _made(self.manifest) as file:
            text = json.dumps(body).encode()
            _write(file, sealer.seal(text) if sealer else text)
        _flush(self.manifest)
        return self.manifest

    @classmethod
    def found(cls, manifest: Path, sealer: Sealer | None = None) -> Saved:
        """Read a manifest. Raises BoxLost if something that it names is missing.

        Raises IncompatibleBox if it has a format that only a newer version reads, or was sealed
        with another key, and OSError if the disk cannot be read: then it may all still be there.
        """
        folder = manifest.parent
        try:
            text = manifest.read_bytes()
            # A manifest of an older version is not rewritten: that version may run again, and a
            # full disk must not cost a session. It is removed when the session wakes.
            if sealer and is_sealed(text):
                text = sealer.unseal(text)
            body = json.loads(text)
            if body.get("format", 1) > FORMAT:
                raise IncompatibleBox(
                    f"it was saved in format {body['format']}, and this version of Hutch reads up "
                    f"to {FORMAT}"
                )
            report = body["report"]
            saved = cls(
                folder / body["files"],
                {name: folder / file for name, file in body["contexts"].items()},
                {name: wire.StartKernel(**request) for name, request in body["opened"].items()},
                {
                    name: SavedShell(user, cwd, base64.b64decode(script))
                    for name, (user, cwd, script) in body["shells"].items()
                },
                Hibernation(
                    tuple(report["kept"]),
                    tuple((what, why) for what, why in report["lost"]),
                    report["size"],
                    report["duration_ms"],
                ),
                manifest,
                dict(body.get("sums", {})),
            )
            for path in (saved.files, *saved.contexts.values()):
                path.stat()
        except Unreadable:
            raise IncompatibleBox(
                f"what was saved of this box was sealed with another key: {manifest}"
            ) from None
        except (FileNotFoundError, ValueError, KeyError, TypeError) as exc:
            raise BoxLost(f"what was saved of this box cannot be found again: {exc}") from None
        return saved


async def save(
    link: Link,
    folder: Path,
    opened: Mapping[str, wire.StartKernel],
    shells: Mapping[str, str | None],
    limits: Limits,
) -> Saved:
    """Save everything that can be saved. The box keeps running.

    `opened`: the requests that contexts were opened with, by name. `shells`: the user of each, by
    name. Raises SaveFailed, NotVerified, NoSpace and IncompatibleBox, and then leaves no files.
    """
    began = time.monotonic()
    stem = folder / f"asleep-{os.urandom(8).hex()}"
    saved = Saved(Path(f"{stem}-files"), opened=dict(opened))
    kept: list[str] = []
    lost: list[tuple[str, str]] = []
    try:
        contexts = guest_field(await link.ask(wire.ListKernels()), "contexts", list)
        for number, name in enumerate(_names(contexts)):
            path = saved.contexts[name] = Path(f"{stem}-{number}")
            try:
                async with asyncio.timeout(CONTEXT_PATIENCE):
                    most = 2 * limits.memory + SLACK
                    received = await _receive(link, wire.SaveKernel(name), path, most)
                    answer, saved.sums[path.name] = received.answer, received.sha256
                    _verify(received)
            except (TimeoutError, CallerError, TooMuch) as exc:
                raise SaveFailed(name, str(exc) or "it took too long") from None
            prefix = "" if name == MAIN else f"{name}: "
            kept += [prefix + str(variable) for variable in guest_field(answer, "kept", list)]
            lost += [(prefix + what, why) for what, why in _pairs(answer)]
        for name, user in shells.items():
            saved.shells[name] = await _save_shell(link, name, user, lost)
            kept.append(f"shell {name}")
        packed = await _receive(link, wire.Pack(), saved.files, limits.disk_size + SLACK)
        if packed.answer.get("exit_code") != 0:
            raise NotVerified("the files of this box could not be saved: packing them was killed")
        _check_archive(packed.content)
        saved.sums[saved.files.name] = packed.sha256
        lost += _lost_in(packed.stderr)
        kept.append("files")
    except BaseException:
        saved.remove()
        raise
    size = sum(path.stat().st_size for path in (saved.files, *saved.contexts.values()))
    saved.report = Hibernation(tuple(kept), tuple(lost[:MAX_LOST]), size, _since(began))
    return saved


class SaveFailed(Conflict):
    """The variables of a context could not be saved, so the box was not put to sleep."""

    def __init__(self, context: str, why: str) -> None:
        text = f"the variables of context {context!r} could not be saved: {why}"
        super().__init__(f"{text} (the box stays awake)")


class RestoreFailed(Conflict):
    """The variables of a context could not be loaded. What was saved is still there."""

    def __init__(self, context: str, why: str) -> None:
        text = f"the variables of context {context!r} could not be loaded: {why}"
        super().__init__(f"{text} (they are still saved, and the next call tries again)")


def _verify(received: Received) -> None:
    """Compare a file with the size and checksum that its kernel reports. Raises Conflict."""
    answer, content = received.answer, received.content
    if answer.get("size") is None:
        return  # a guest of an older version, or a context without a kernel
    written = content.size, zlib.crc32(content.tail, content.crc)
    if written != (answer["size"], answer.get("checksum")):
        raise Conflict("what was written is not what the kernel sent")


async def restore(link: Link, saved: Saved, give_up: bool = False) -> Hibernation:
    """Restore saved state in a new box. What a kernel could not load is added to what was lost.

    Raises NotVerified if the saved state is damaged. Raises RestoreFailed if nothing of a context
    can be loaded; with `give_up`, its variables are reported as lost instead.
    """
    began = time.monotonic()
    for path in (saved.files, *saved.contexts.values()):
        if expected := saved.sums.get(path.name):
            await asyncio.to_thread(_read_back, path, expected)
    lost = list(saved.report.lost)
    answer, stderr = await _send(link, wire.Unpack(), saved.files)
    if answer.get("exit_code") != 0:
        why = "; ".join(f"{path}: {why}" for path, why in _lost_in(stderr)[:3]) or "it was killed"
        raise NotVerified(f"the files of this box could not be brought back: {why}")
    lost += _lost_in(stderr)
    for name, request in saved.opened.items():
        try:
            await link.ask(request)
        except CallerError as exc:  # its folder may be one that could not be saved
            await link.ask(wire.StartKernel(name))
            lost.append((f"the folder of context {name}", str(exc)))
    for name, path in saved.contexts.items():
        try:
            lost += await _load(link, name, path)
        except RestoreFailed as exc:
            if not give_up:
                raise
            lost.append((_all_of(name), str(exc)))
    for name, shell in saved.shells.items():
        try:
            await _restore_shell(link, name, shell)
        except (CallerError, LimitReached) as exc:
            lost.append((f"shell {name}", str(exc)))
    lost = list(dict.fromkeys(lost))  # a kernel repeats what it reported when it was saved
    gone = {what for what, _ in lost}
    kept = tuple(name for name in saved.report.kept if name not in gone)
    return Hibernation(kept, tuple(lost[:MAX_LOST]), saved.report.size, _since(began))


async def _load(link: Link, name: str, path: Path) -> list[tuple[str, str]]:
    """Load a context, and return what was lost. A kernel may ask for the same data again."""
    prefix = "" if name == MAIN else f"{name}: "
    try:
        async with asyncio.timeout(CONTEXT_PATIENCE):
            for _ in range(MAX_PASSES):
                answer, _ = await _send(link, wire.LoadKernel(name), path)
                if answer.get("again") is not True:
                    break
            else:
                raise RestoreFailed(name, f"it was not loaded after {MAX_PASSES} passes")
    except (TimeoutError, CallerError) as exc:
        raise RestoreFailed(name, str(exc) or "it took too long") from None
    lost = _pairs(answer)
    if lost and lost[0][0] == EVERYTHING and not answer.get("kept"):
        raise RestoreFailed(name, lost[0][1])
    return [(prefix + what, why) for what, why in lost]


def _all_of(context: str) -> str:
    return f"all variables of context {context}"


async def _save_shell(
    link: Link, name: str, user: str | None, lost: list[tuple[str, str]]
) -> SavedShell:
    jobs, _ = await _collect(link, wire.ShellCommand(name, JOBS, SHELL_PATIENCE))
    for line in jobs.decode(errors="replace").splitlines():
        lost.append((f"shell {name}: {line.strip()}"[:200], "a running program cannot be kept"))
    script, answer = await _collect(link, wire.ShellCommand(name, SAVE_SHELL, SHELL_PATIENCE))
    if not script.endswith(WHOLE):
        lost.append((f"shell {name}: variables and functions", "it did not list all of them"))
        script = b""
    cwd = answer.get("cwd")
    return SavedShell(user, cwd if isinstance(cwd, str) else "/", script)


async def _restore_shell(link: Link, name: str, shell: SavedShell) -> None:
    if name != MAIN:
        await link.ask(wire.StartShell(name, user=shell.user))
    path = f"{SHELL_FILE}-{os.urandom(6).hex()}"
    call = link.call(wire.Write(path, 0o644))
    async with call:
        # The script first removes its own file, whatever the rest of it does.
        await call.feed(f"\\command rm -f {path}\n".encode() + shell.script)
        async for _ in call:
            pass
    back = f"\\cd -- {shlex.quote(shell.cwd)}; . {path} 2>/dev/null"
    await _collect(link, wire.ShellCommand(name, back, SHELL_PATIENCE))


async def _collect(link: Link, request: wire.GuestRequest) -> tuple[bytes, dict[str, object]]:
    parts, size = [], 0
    async with link.call(request) as call:
        async for event in call:
            if isinstance(event, wire.Data) and event.channel == wire.STDOUT:
                size += len(event.data)
                if size <= MAX_SHELL:
                    parts.append(event.data)
        return b"".join(parts), call.result


class TooMuch(NoSpace):
    """A box sent more than its limits allow."""


class NotVerified(HutchError):
    """What was saved is incomplete or damaged. The box stays as it was: awake, or saved."""


@dataclass(frozen=True)
class FileSummary:
    """Size, checksum and end of a file, read once."""

    size: int
    crc: int  # of all but the tail
    tail: bytes  # MAX_END bytes at most: the last line of an archive is in it


@dataclass(frozen=True)
class Received:
    answer: dict[str, object]
    stderr: bytes
    sha256: str
    content: FileSummary  # of the file, as the disk has it


async def _receive(link: Link, request: wire.GuestRequest, path: Path, most: int) -> Received:
    """Write what the guest sends to a file, flush it, and read it back.

    Raises NotVerified if the disk does not hold what was sent, and TooMuch beyond `most` bytes.
    """
    stderr, size, digest = b"", 0, hashlib.sha256()
    _made(path).close()
    async with link.call(request) as call, Appending(path) as file:
        async for event in call:
            if not isinstance(event, wire.Data):
                continue
            if event.channel == wire.STDERR:
                stderr = (stderr + event.data)[: MAX_LOST * 256]
                continue
            size += len(event.data)
            if size > most:
                raise TooMuch("it is more than the box's limits allow")
            digest.update(event.data)
            await file.add(event.data)
        await file.finish()
        answer, sha256 = call.result, digest.hexdigest()
    await asyncio.to_thread(_flush, path)
    content = await asyncio.to_thread(_read_back, path, sha256)
    return Received(answer, stderr, sha256, content)


class Appending:
    """Appends to a file in a thread, one piece at a time, while the next one arrives."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = bytearray()
        self._writing: asyncio.Future[None] | None = None

    async def add(self, data: bytes) -> None:
        self._next += data
        if len(self._next) >= PIECE:
            await self._turn()

    async def finish(self) -> None:
        await self._turn()
        assert self._writing
        await self._writing

    async def _turn(self) -> None:
        if self._writing:
            await self._writing
        piece, self._next = self._next, bytearray()
        self._writing = asyncio.ensure_future(asyncio.to_thread(_append, self._path, piece))

    async def __aenter__(self) -> Appending:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._writing:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)


def _made(path: Path) -> io.FileIO:
    try:
        return io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")
    except OSError as exc:
        raise NoSpace(f"cannot save anything on this machine: {exc.strerror}") from None


def _append(path: Path, data: bytearray) -> None:
    # Opened for each piece, so that a caller who gives up while a thread writes leaves nothing
    # open; and without O_CREAT, because that caller has removed the file.
    with io.FileIO(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), "w") as file:
        _write(file, data)


def _write(file: io.FileIO, data: bytes | bytearray) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as exc:
        raise NoSpace(f"no room on this machine to hibernate: {exc.strerror}") from None


def _flush(path: Path) -> None:
    """Make a file, and its name, survive a power cut."""
    try:
        for place in (path, path.parent):
            fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
                if place == path:
                    # So that reading it back reads the disk, not the page cache.
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
    except OSError as exc:
        raise NoSpace(f"no room on this machine to hibernate: {exc.strerror}") from None


def _read_back(path: Path, sha256: str) -> FileSummary:
    """Read a file once. Raises NotVerified if it does not have this SHA-256."""
    digest, size, crc, tail = hashlib.sha256(), 0, 0, b""
    try:
        with path.open("rb", buffering=0) as file:
            while data := file.read(PIECE):
                digest.update(data)
                size += len(data)
                data = tail + data
                cut = max(0, len(data) - MAX_END)
                crc, tail = zlib.crc32(memoryview(data)[:cut], crc), data[cut:]
    except OSError as exc:
        raise NotVerified(f"what was saved of this box cannot be read: {exc.strerror}") from None
    if digest.hexdigest() != sha256:
        raise NotVerified(f"what was saved of this box is damaged: the SHA-256 of {path.name}")
    return FileSummary(size, crc, tail)


def _check_archive(content: FileSummary) -> None:
    """Compare the size and CRC-32 in the last line with what is before it (guest/archive.py)."""
    tail = content.tail
    start = max(0, tail.rfind(ARCHIVE_END))  # content has no newline after it
    try:
        end = json.loads(tail[start:])
        claimed = end["kind"], end.get("size"), end.get("crc")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NotVerified("the files of this box were not saved completely") from None
    if claimed == ("end", None, None):
        raise IncompatibleBox(
            "this session's box was started by an older version of Hutch, which packs files "
            "without checksums, so it cannot be hibernated: copy its files to a new session"
        )
    size = content.size - len(tail) + start
    if claimed != ("end", size, zlib.crc32(tail[:start], content.crc)):
        raise NotVerified("the files of this box were saved with errors: size or CRC-32 differ")


async def _send(
    link: Link, request: wire.GuestRequest, path: Path
) -> tuple[dict[str, object], bytes]:
    stderr = b""
    async with link.call(request) as call:
        # In the background: the guest reports while it reads, and may end before it has read all.
        feeding = asyncio.ensure_future(call.feed(_pieces(path)))
        try:
            async for event in call:
                if isinstance(event, wire.Data) and event.channel == wire.STDERR:
                    stderr = (stderr + event.data)[: MAX_LOST * 256]
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        return call.result, stderr


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    offset = 0
    while data := await asyncio.to_thread(_read, path, offset):
        yield data
        offset += len(data)


def _read(path: Path, offset: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), PIECE, offset)


def _names(contexts: list[object]) -> list[str]:
    return [guest_field(body, "context", str) for body in contexts if isinstance(body, dict)]


def _pairs(answer: dict[str, object]) -> list[tuple[str, str]]:
    """What a kernel reports as lost, and why."""
    try:
        lost = guest_field(answer, "lost", list)[:MAX_LOST]
        return [(_plain(what, 200), _plain(why, 500)) for what, why in lost]
    except (TypeError, ValueError):
        raise GuestMisbehaved("malformed report from guest: not pairs of text") from None


def _plain(text: object, most: int) -> str:
    """Text that can be encoded: names of files can be any bytes."""
    return str(text)[:most].encode("utf-8", "backslashreplace").decode()


def _lost_in(lines: bytes) -> list[tuple[str, str]]:
    lost = []
    for line in lines.splitlines()[:MAX_LOST]:
        try:
            what, why = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue  # the line was cut off, or is not ours
        lost.append((_plain(what, 200), _plain(why, 500)))
    return lost


def _since(began: float) -> int:
    return int((time.monotonic() - began) * 1000)
