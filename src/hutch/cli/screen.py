"""Output to stdout and stderr: unchanged to a file or pipe, sanitized on a terminal.

A program in a box may try to attack your terminal with what it prints:
fill the clipboard, type answers for you, hide one text under another. On a terminal,
therefore, only text gets through; control characters are shown the way `cat -v` shows them.
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
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from hutch.errors import HutchError
from hutch.types import plain, show_size

# Control characters except newline and tab; C1 controls; and characters that change the direction
# of text or are invisible.
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
    """The text with control characters made visible. Newlines and tabs stay."""
    return _UNSAFE.sub(_show, text)


class Visible:
    """`visible` for a stream of bytes, cut anywhere: in a character, or between CR and LF.

    A carriage return becomes a newline; otherwise a line could overwrite itself.
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
    """Our stdout or stderr. With a slow reader `write` waits, without blocking the event loop."""

    def __init__(self, fd: int, *, raw: bool = False) -> None:
        self._fd = fd
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        self._visible = Visible(encoding) if os.isatty(fd) and not raw else None
        self._is_file = stat.S_ISREG(os.fstat(fd).st_mode)

    async def write(self, data: bytes) -> None:
        """Write all of it. Raises BrokenPipeError if the reader is gone."""
        await self._put(self._visible.feed(data) if self._visible else data)

    async def write_json(self, value: object) -> None:
        await self.write(json.dumps(value, indent=2).encode() + b"\n")

    async def finish(self) -> None:
        """Write what is left of an incomplete character."""
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
        # A write that fits into a pipe with room never blocks, and a file never does for long.
        # Anything else is written by a thread: if this one blocked, Ctrl-C could not end the wait.
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
        except BlockingIOError:  # another process made the shared file non-blocking
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
            pass  # the loop is closed, because we were stopped

    # A daemon thread, so that a stuck one does not keep the program from exiting.
    threading.Thread(target=work, daemon=True).start()
    await done


def cannot_go_on(exc: OSError) -> str:
    """An OSError as one line, with the file it is about."""
    name = exc.filename if isinstance(exc.filename, str | bytes) else ""
    place = os.fsdecode(name) if name else "cannot go on"
    return f"{place}: {exc.strerror or exc}"


BOLD, RED, GREEN, YELLOW = "1", "31", "32", "33"


def coloured(text: str, colour: str, fd: int = 1) -> str:
    """In colour on a terminal, unless NO_COLOR is set (see no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return text if plain or not os.isatty(fd) else f"\x1b[{colour}m{text}\x1b[0m"


def complain(message: str, *, error: bool = False) -> None:
    """Print a message to stderr as one line."""
    line = visible(message.replace("\n", " "))
    name = coloured("hutch:", RED, 2) if error else "hutch:"
    try:
        os.write(2, f"{name} {line}\n".encode(errors="backslashreplace"))
    except OSError:
        pass  # stderr is closed


COLOURS = {"running": GREEN, "asleep": YELLOW, "crashed": RED}  # by the value of STATUS

SPANS = [(86_400, "d"), (3600, "h"), (60, "m"), (1, "s")]


def print_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()
) -> None:
    """Print aligned columns. `right`: the names of right-aligned columns."""
    table = [list(header), *([_cell(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        ]
        if row is table[0]:
            cells = [coloured(cell, BOLD) for cell in cells]
        elif "STATUS" in header:
            place = header.index("STATUS")
            if colour := COLOURS.get(row[place]):
                cells[place] = coloured(cells[place], colour)
        line = "  ".join(cells).rstrip() + "\n"
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(line.encode(encoding, "backslashreplace").decode(encoding))


def _cell(text: str) -> str:
    return visible(text).replace("\n", "\\n").replace("\t", "\\t") or "-"


def size(count: int | None) -> str:
    return "" if count is None else show_size(count)


def span(seconds: float) -> str:
    """In the largest unit of which there are at least two: 90 s is 90s, not 1m."""
    for unit, name in SPANS:
        if abs(seconds) >= 2 * unit or unit == 1:
            return f"{max(0, int(abs(seconds) // unit))}{name}"
    raise AssertionError("the last unit is one second")


def local_time(seconds: float) -> str:
    """Local time with its offset, where "3m ago" is not exact enough."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))


def since(then: float | None, now: float) -> str:
    return "" if then is None else f"{span(now - then)} ago"


def until(then: float | None, now: float) -> str:
    if then is None:
        return ""
    return f"in {span(then - now)}" if then > now else "due"


# --- --json ------------------------------------------------------------------------------


def to_json(value: object) -> Any:
    """Like `plain`, but with times (`created_at`) as text: 2027-01-31T12:00:00.000Z."""
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if not is_dataclass(value) or isinstance(value, type):
        return plain(value)
    record = {field.name: getattr(value, field.name) for field in fields(value)}
    return {
        name: moment(it) if name.endswith("_at") and isinstance(it, float) else to_json(it)
        for name, it in record.items()
    }


def print_json(value: object) -> None:
    print(json.dumps(to_json(value), indent=2))


def moment(seconds: float) -> str:
    """RFC 3339 in UTC, to the millisecond, as in the audit log."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{thousandths:03}Z"


def error_to_json(exc: HutchError) -> dict[str, object]:
    return {"error": {"code": exc.code, "message": str(exc)}}
