"""Files as they are: whoever asks for one wants its very words. Only what is very long is cut."""

from __future__ import annotations

from .family import CommandLine, Family, Shown


def _as_it_is(call: CommandLine, lines: list[str]) -> Shown:
    return list(lines)


READING = (
    Family("file", ("cat", "head", "tail", "sed", "bat", "nl", "less", "more", "awk", "xxd", "od"),
           _as_it_is, is_content=True),
)  # fmt: skip
