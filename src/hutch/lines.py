"""Text from elsewhere that becomes a line of a file, an argument or a header.

Programs disagree about what ends a line: `\\n` does everywhere, uv's requirement files also take
`\\r`, Python's `splitlines` knows eight more. A foreign string that holds one of them can add
a line, and with it an option or a header. So such a string is refused, never cleaned up.
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
    """The text, if it is a single line. Raises InvalidRequest, which starts with `what`."""
    found = _FORBIDDEN.search(text)
    if found:
        raise InvalidRequest(
            f"{what}: control characters and line separators are not allowed: {text!a:.200}"
        )
    return text
