"""Bytes that were meant for a terminal, as the lines that it would show in the end.

Colours and other escapes go; of a line that was drawn again and again, what it came to. Whatever
comes is first cut into blocks at the same places, however it was split on its way: so the result
depends on the bytes alone. Work is done on whole blocks, by what Python has in C.
"""

from __future__ import annotations

import re

from .failures import failing

BLOCK = 64 * 1024
MAX_LINE = 1024 * 1024  # longer ones are broken
WIDE = 400  # characters: no terminal draws over so many; it is output that a meter ran into
COLOURS = 16  # in a block
_TEXT = bytes({*b"\a\b\t\n\v\f\r\x0e\x0f\x1b", *range(32, 256)})  # what text may have

_ESCAPE = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor
    rb"|\][^\x07\x1b\n]{0,4096}(?:\x07|\x1b\\)"  # OSC: titles, links
    rb"|[PX^_][^\x1b\n]{0,4096}\x1b\\"
    rb"|[ -/]*[0-~])?"
)
_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
_OVERSTRUCK = re.compile(rb"[^\n\x08]\x08")


class Screen:
    """Bytes in, blocks of whole lines out: the last line of each without its end."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._searched = 0  # so much of it has no end of line
        self.ends_in_newline = False

    def feed(self, data: bytes) -> list[bytes]:
        self._pending += data
        blocks: list[bytes] = []
        done = 0
        while end := self._block_end(done):
            blocks.append(_cleaned(bytes(self._pending[done:end])))
            done = end
        if done:
            self.ends_in_newline = self._pending[done - 1] == ord("\n")
            del self._pending[:done]
        return blocks

    def end(self) -> list[bytes]:
        """What is left."""
        rest, self._pending = bytes(self._pending), bytearray()
        if not rest:
            return []
        self.ends_in_newline = rest.endswith(b"\n")
        return [_cleaned(rest)]

    def _block_end(self, start: int) -> int:
        """Where the block that starts there ends; 0 while nobody can say."""
        size = len(self._pending) - start
        if size <= BLOCK:
            return 0
        if end := self._pending.rfind(b"\n", start, start + BLOCK) + 1:
            return end
        limit = start + MAX_LINE
        end = self._pending.find(b"\n", start + max(BLOCK, self._searched), limit) + 1
        self._searched = 0 if end or size >= MAX_LINE else size
        return end or (limit if size >= MAX_LINE else 0)


def _cleaned(block: bytes) -> bytes:
    block = block.removesuffix(b"\n")
    if not _is_binary(block):
        return _shown(block)
    # What looks like escapes in it is none, and there is much of that.
    return b"\n".join(line if _is_binary(line) else _shown(line) for line in block.split(b"\n"))


def _is_binary(data: bytes) -> bool:
    odd = len(data.translate(None, _TEXT))
    return odd > 2 and odd * 20 > len(data)


def _shown(data: bytes) -> bytes:
    if b"\x1b" in data:
        data = _ESCAPE.sub(b"", _uncoloured(data))
    if b"\x08" in data:
        data = _OVERSTRUCK.sub(b"", data).replace(b"\x08", b"")
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    return _drawn(data) if b"\r" in data else data


def _uncoloured(data: bytes) -> bytes:
    """Without the colours that are used most: quicker than one by one."""
    for _ in range(COLOURS):
        if not (found := _COLOUR.search(data)):
            break
        data = data.replace(found[0], b"")
    return data


def _drawn(data: bytes) -> bytes:
    """Of each line what was drawn last; and before it, what must not be drawn over."""
    text = data.decode("utf-8", "replace")
    is_failure = failing(dict.fromkeys(text.replace("\r", "\n").split("\n")))
    lines: list[str] = []
    for line in text.split("\n"):
        *earlier, last = [part for part in line.split("\r") if part.strip()] or [""]
        lines += (part for part in dict.fromkeys(earlier) if len(part) > WIDE or is_failure(part))
        lines.append(last)
    return "\n".join(lines).encode()
