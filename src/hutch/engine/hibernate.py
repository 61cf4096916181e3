"""Deep hibernation: the box goes, and the next call brings back what was in it.

Saved are the files of the box's own disk, each kernel's variables, each shell's directory,
variables and functions. All of it is bytes to the host: a box made them, and only a box ever
looks into them. What cannot be kept (a socket, a thread, a running program) is told, with why.

Nothing is given up before everything else is safe: a box is killed after all was written,
flushed to disk, read back and compared, and what was written is removed after a new box has
taken all of it and checked it again. If a check fails, the box stays awake, or stays saved.
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
from typing import Any

from hutch import wire
from hutch.errors import (
    BoxLost,
    CallerError,
    Conflict,
    HutchError,
    IncompatibleBox,
    LimitReached,
    NoSpace,
)
from hutch.types import Hibernation, Limits

from .link import Link
from .sealing import Sealer, Unreadable, is_sealed

# Of all that is saved: the manifest, the archive of files (guest/archive.py) and the state of
# kernels (kernel/state.py). A change that versions of before cannot read gets the next number.
FORMAT = 2
MAIN = "main"  # the context, and the shell, that are there without being opened
PIECE = 4 << 20  # bytes that are read, or written, at once: in a thread, for a disk may be slow
# A kernel, and a shell, run user code while they are saved. A shell that takes longer is lost; for
# a kernel that takes longer, the box is not put to sleep.
CONTEXT_PATIENCE, SHELL_PATIENCE = 120, 10  # seconds
MAX_PASSES = 8  # over the state of one context
EVERYTHING = "everything"  # is what a kernel calls lost if it could load nothing at all
MAX_LOST = 1000  # entries; what a guest tells is bounded
MAX_SHELL = 4 << 20  # bytes of one shell's variables and functions
SLACK = 64 << 20  # bytes that names, and the like, may take beside the content
SHELL_FILE = "/tmp/.hutch-shell"
ARCHIVE_END, MAX_END = b'{"kind": "end"', 1024  # how its last line begins, and its most bytes

# Run in a subshell, so that it leaves no trace. What is left out belongs to the shell itself. A
# backslash keeps an alias of the user's away, and `builtin` a function.
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
    """What is left of a box that sleeps."""

    files: Path
    contexts: dict[str, Path] = field(default_factory=dict)
    opened: dict[str, wire.StartKernel] = field(default_factory=dict)  # all but the main one
    shells: dict[str, SavedShell] = field(default_factory=dict)
    report: Hibernation = field(default_factory=Hibernation)
    manifest: Path | None = None  # where all of this is written down, if it is
    sums: dict[str, str] = field(
        default_factory=dict
    )  # SHA-256 by file name; earlier builds kept none

    @property
    def paths(self) -> set[Path]:
        return {*([self.manifest] if self.manifest else []), self.files, *self.contexts.values()}

    def remove(self) -> None:
        for path in self.paths:
            path.unlink(missing_ok=True)

    def write_down(self, sealer: Sealer | None = None) -> Path:
        """So that another process can find it again: sealed, for shells have secrets in them."""
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
        """What was written down. Raises BoxLost if it is not all there any more.

        IncompatibleBox, if it is all there, in a format that only a newer version reads, or
        sealed with another key. OSError if the disk cannot be read: it may be there.
        """
        folder = manifest.parent
        try:
            text = manifest.read_bytes()
            # One that an older version wrote is left as it is: that version may come back, and a
            # full disk must not cost a session. It goes when the session wakes.
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
                {name: wire.StartKernel(**each) for name, each in body["opened"].items()},
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
    """Everything of a box that can be kept. The box goes on; raises without a trace.

    `opened`: how contexts were asked for, by name; `shells`: by name, the user of each.
    """
    began = time.monotonic()
    stem = folder / f"asleep-{os.urandom(8).hex()}"
    saved = Saved(Path(f"{stem}-files"), opened=dict(opened))
    kept: list[str] = []
    lost: list[tuple[str, str]] = []
    try:
        contexts = (await link.ask(wire.ListKernels()))["contexts"]
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
            kept += [prefix + each for each in answer["kept"]]
            lost += [(prefix + what, why) for what, why in _pairs(answer["lost"])]
        for name, user in shells.items():
            saved.shells[name] = await _save_shell(link, name, user, lost)
            kept.append(f"shell {name}")
        packed = await _receive(link, wire.Pack(), saved.files, limits.disk_size + SLACK)
        if packed.answer.get("exit_code") != 0:
            raise NotVerified("the files of this box could not be saved: packing them was killed")
        _check_archive(packed.content)
        saved.sums[saved.files.name] = packed.sha256
        lost += _told(packed.told)
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
    """Compare a file with what its kernel says that it has sent. Raises HutchError."""
    answer, content = received.answer, received.content
    if answer.get("size") is None:
        return  # a guest of an older version, or a context without a kernel
    found = content.size, zlib.crc32(content.tail, content.crc)
    if found != (answer["size"], answer.get("checksum")):
        raise Conflict("what was written is not what the kernel has sent")


async def restore(link: Link, saved: Saved, give_up: bool = False) -> Hibernation:
    """Into a fresh box. What a kernel could not take back is added to what was lost.

    Raises RestoreFailed if all of a context fails, unless told to `give_up` on it.
    """
    began = time.monotonic()
    for path in (saved.files, *saved.contexts.values()):
        if expected := saved.sums.get(path.name):
            await asyncio.to_thread(_read_back, path, expected)
    lost = list(saved.report.lost)
    answer, told = await _send(link, wire.Unpack(), saved.files)
    if answer.get("exit_code") != 0:
        why = "; ".join(f"{path}: {why}" for path, why in _told(told)[:3]) or "it was killed"
        raise NotVerified(f"the files of this box could not be brought back: {why}")
    lost += _told(told)
    for name, request in saved.opened.items():
        try:
            await link.ask(request)
        except CallerError as exc:  # its folder may be one that could not be kept
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
    lost = list(dict.fromkeys(lost))  # a kernel tells again what it told when it was saved
    gone = {what for what, _ in lost}
    kept = tuple(each for each in saved.report.kept if each not in gone)
    return Hibernation(kept, tuple(lost[:MAX_LOST]), saved.report.size, _since(began))


async def _load(link: Link, name: str, path: Path) -> list[tuple[str, str]]:
    """What of a context was lost. A kernel may want to hear the same more than once."""
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
    lost = _pairs(answer["lost"])
    if lost and lost[0][0] == EVERYTHING and not answer["kept"]:
        raise RestoreFailed(name, lost[0][1])
    return [(prefix + what, why) for what, why in lost]


def _all_of(context: str) -> str:
    return f"all variables of context {context}"


async def _save_shell(
    link: Link, name: str, user: str | None, lost: list[tuple[str, str]]
) -> SavedShell:
    jobs, _ = await _collect(link, wire.Shell(name, JOBS, SHELL_PATIENCE))
    for line in jobs.decode(errors="replace").splitlines():
        lost.append((f"shell {name}: {line.strip()}"[:200], "a running program cannot be kept"))
    script, answer = await _collect(link, wire.Shell(name, SAVE_SHELL, SHELL_PATIENCE))
    if not script.endswith(WHOLE):
        lost.append((f"shell {name}: variables and functions", "it did not tell all of them"))
        script = b""
    cwd = answer.get("cwd")
    return SavedShell(user, cwd if isinstance(cwd, str) else "/", script)


async def _restore_shell(link: Link, name: str, shell: SavedShell) -> None:
    if name != MAIN:
        await link.ask(wire.StartShell(name, user=shell.user))
    path = f"{SHELL_FILE}-{os.urandom(6).hex()}"
    call = link.call(wire.Write(path, 0o644))
    async with call:
        await call.feed(f"\\command rm -f {path}\n".encode() + shell.script)
        async for _ in call:
            pass
    back = f"\\cd -- {shlex.quote(shell.cwd)}; . {path} 2>/dev/null"
    await _collect(link, wire.Shell(name, back, SHELL_PATIENCE))


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
    """More than there can be."""


class NotVerified(HutchError):
    """What was saved is incomplete or damaged. The box stays as it was: awake, or saved."""


@dataclass(frozen=True)
class FileSummary:
    """What is in a file, read once."""

    size: int
    crc: int  # of all but the tail
    tail: bytes  # MAX_END bytes at most: the last line of an archive is in it


@dataclass(frozen=True)
class Received:
    answer: dict[str, Any]
    told: bytes
    sha256: str
    content: FileSummary  # of the file, as the disk has it


async def _receive(link: Link, request: wire.GuestRequest, path: Path, most: int) -> Received:
    """Write what the guest sends to a file, flush it, and read it back. Answers its stderr too.

    Raises NotVerified if the disk holds something else than what was sent.
    """
    told, size, digest = b"", 0, hashlib.sha256()
    _made(path).close()
    async with link.call(request) as call, Appending(path) as file:
        async for event in call:
            if not isinstance(event, wire.Data):
                continue
            if event.channel == wire.STDERR:
                told = (told + event.data)[: MAX_LOST * 256]
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
    return Received(answer, told, sha256, content)


class Appending:
    """Writes to the end of a file in a thread, a piece at a time, while the next one comes."""

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
        raise NoSpace(f"nothing can be kept on this machine: {exc.strerror}") from None


def _append(path: Path, data: bytearray) -> None:
    # Opened for each piece: who gives up while a thread writes leaves nothing open. And not made
    # again: they have removed it by now.
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
                    # So that reading it back asks the disk, not memory.
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
    except OSError as exc:
        raise NoSpace(f"no room on this machine to hibernate: {exc.strerror}") from None


def _read_back(path: Path, sha256: str) -> FileSummary:
    """Raises NotVerified if the disk holds something else."""
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
    told = b""
    async with link.call(request) as call:
        feeding = asyncio.ensure_future(call.feed(_pieces(path)))
        try:
            async for event in call:
                if isinstance(event, wire.Data) and event.channel == wire.STDERR:
                    told = (told + event.data)[: MAX_LOST * 256]
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        return call.result, told


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    offset = 0
    while data := await asyncio.to_thread(_read, path, offset):
        yield data
        offset += len(data)


def _read(path: Path, offset: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), PIECE, offset)


def _names(contexts: Any) -> list[str]:
    names = [each["context"] for each in contexts if isinstance(each, dict)]
    if not all(isinstance(name, str) for name in names):
        raise HutchError("the guest named a context that is none")
    return names


def _pairs(lost: Any) -> list[tuple[str, str]]:
    return [(_plain(what, 200), _plain(why, 500)) for what, why in lost[:MAX_LOST]]


def _plain(text: Any, most: int) -> str:
    """Text that can be printed: names of files are any bytes."""
    return str(text)[:most].encode("utf-8", "backslashreplace").decode()


def _told(lines: bytes) -> list[tuple[str, str]]:
    found = []
    for line in lines.splitlines()[:MAX_LOST]:
        try:
            what, why = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue  # the end of it was cut off, or it is not ours
        found.append((_plain(what, 200), _plain(why, 500)))
    return found


def _since(began: float) -> int:
    return int((time.monotonic() - began) * 1000)
