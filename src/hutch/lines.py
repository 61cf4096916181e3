"""Untrusted text that becomes a line of a file, an argument or a header.

Programs disagree about what ends a line: `\\n` does everywhere, `\\r` also in requirement files of
uv, and Python's `splitlines` knows eight more. A string that contains one of them could add a line,
and with it an option or a header. So such a string is refused, never cleaned up.
"""

from __future__ import annotations

import re

from .errors import InvalidRequest

# Control characters (C0 without the tab, DEL, C1 with NEL), the line and paragraph separators, and
# lone surrogates, which have no encoding.
_FORBIDDEN = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def is_single_line(text: str) -> bool:
    """Whether the text stays one line for every program that may read it."""
    return _FORBIDDEN.search(text) is None


def single_line(text: str, what: str) -> str:
    """Return the text if it is a single line.

    Raises InvalidRequest otherwise, with a message that starts with `what`.
    """
    found = _FORBIDDEN.search(text)
    if found:
        raise InvalidRequest(
            f"{what}: control characters and line separators are not allowed: {text!a:.200}"
        )
    return text
