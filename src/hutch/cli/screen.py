"""Where output goes: as it is to a file or a pipe, made harmless on a terminal.

What a program in a box prints may be written by somebody who would like to have your terminal:
to fill the clipboard, to type answers for you, to hide one text under another. On a terminal,
therefore, nothing but text gets through; the rest is shown, the way `cat -v` shows it.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import re
import select
import stat
import sys
import threading

# Control characters but newline and tab; C1 controls; and what turns the direction of writing or
# cannot be seen at all.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f\x80-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


def _show(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x80:
        return "^" + chr(code ^ 0x40)
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )


def visible(text: str) -> str:
    """Text that is all text, in one line or more."""
    return _UNSAFE.sub(_show, text)


class Visible:
    """The same for bytes in pieces, cut anywhere: also in a character, or between CR and LF.

    A carriage return starts a new line. On its own it would let a line write over itself.
    """

    def __init__(self, encoding: str = "utf-8") -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._encoding = encoding
        self._returned = False

    def feed(self, data: bytes, *, last: bool = False) -> bytes:
        text = self._decoder.decode(data, last)
        if not text:
            return b""
        if self._returned:
            text = text.removeprefix("\n")
        self._returned = data.endswith(b"\r")
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        return visible(text).encode(self._encoding, "backslashreplace")


class OutputStream:
    """One of our own outputs. A slow reader makes `write` wait, and signals are heard meanwhile."""

    def __init__(self, fd: int, *, raw: bool = False) -> None:
        self._fd = fd
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        self._visible = Visible(encoding) if os.isatty(fd) and not raw else None
        self._is_file = stat.S_ISREG(os.fstat(fd).st_mode)

    async def write(self, data: bytes) -> None:
        """Returns when all of it is written. Raises BrokenPipeError if nobody reads any more."""
        await self._put(self._visible.feed(data) if self._visible else data)

    async def write_json(self, value: object) -> None:
        await self.write(json.dumps(value, indent=2).encode() + b"\n")

    async def finish(self) -> None:
        """Show what may have been the beginning of a character."""
        if self._visible:
            await self._put(self._visible.feed(b"", last=True))

    async def _put(self, data: bytes) -> None:
        try:
            await self._put_all(data)
        except BrokenPipeError:
            raise
        except OSError as exc:
            name = "stdout" if self._fd == 1 else "stderr"
            raise OSError(exc.errno, f"{name}: {exc.strerror}") from None

    async def _put_all(self, data: bytes) -> None:
        if not data:
            return
        # What fits into a pipe that has room never blocks; a file never does for long. For the
        # rest there is a thread: were it this one that waits, no Ctrl-C could end the wait.
        if self._is_file or (len(data) <= select.PIPE_BUF and _has_room(self._fd)):
            _write_all(self._fd, data)
        else:
            await _in_thread(self._fd, data)


def _has_room(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # somebody who has it too has set it so
            select.select([], [fd], [])


async def _in_thread(fd: int, data: bytes) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: OSError | None) -> None:
        if not done.done():
            done.set_exception(error) if error else done.set_result(None)

    def work() -> None:
        error = None
        try:
            _write_all(fd, data)
        except OSError as exc:
            error = exc
        try:
            loop.call_soon_threadsafe(settle, error)
        except RuntimeError:
            pass  # we were told to stop, and the loop is closed

    # A daemon, so that one that is stuck does not keep the program from ending.
    threading.Thread(target=work, daemon=True).start()
    await done


def cannot_go_on(exc: OSError) -> str:
    """An error of the system in one line, with the file that it is about."""
    name = exc.filename if isinstance(exc.filename, str | bytes) else ""
    place = f"{os.fsdecode(name)}: " if name else ""
    return f"cannot go on: {place}{exc.strerror or exc}"


BOLD, RED, GREEN, YELLOW = "1", "31", "32", "33"


def coloured(text: str, colour: str, fd: int = 1) -> str:
    """In colour on a terminal, unless NO_COLOR is set (see no-color.org); else as it is."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return text if plain or not os.isatty(fd) else f"\x1b[{colour}m{text}\x1b[0m"


def complain(message: str, *, error: bool = False) -> None:
    """One line on stderr, whatever is in the message."""
    line = visible(message.replace("\n", " "))
    name = coloured("hutch:", RED, 2) if error else "hutch:"
    try:
        os.write(2, f"{name} {line}\n".encode(errors="backslashreplace"))
    except OSError:
        pass  # nobody to complain to
