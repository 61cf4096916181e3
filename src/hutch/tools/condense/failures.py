"""Which lines report a failure: those are kept, whatever a family makes of them.

A hidden failure is the worst mistake there is here, so this errs on the side of keeping.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import AnyStr

from .family import Gap, Hidden

# These are searched for first, as plain strings: a regular expression of all the words takes
# fifteen times as long on lines that have none.
_STEMS = (
    "error", "fail", "fatal", "panic", "exception", "traceback", "abort", "denied", "refused",
    "cannot", "can't", "unable", "undefined", "unresolved", "segfault", "segmentation", "killed",
    "timed out", "timeout", "conflict", "not found", "no such", "invalid", "missing", "critical",
    "assert", "reject", "unhealthy", "unreachable", "backoff", "out of memory", "oom",
    "err!",
    "✗", "✘", "✖", "×",
)  # fmt: skip
_OF_PYTEST = "E  "  # pytest's prefix of each line of a reason
_ENDING = re.compile(
    r"(?:s|ed|ing|ures?|ked|ion|ions|ionerror|killed| fault|loopbackoff)?(?![a-z0-9_])"
)
_NO_FAILURE = re.compile(
    r"\b(?:0|no) (?:errors?|fail(?:ed|ures?|s)?|warnings?|issues|problems|conflicts)\b"
)
# Lines about a test that passed, or has begun: such a word is only part of its name.
_TEST = r"[^\s:]+(?:::[^\s\[:]+)+(?:\[.*\])?"  # of pytest
_WENT_WELL = re.compile(
    rf"{_TEST} (?:PASSED|SKIPPED|XFAIL)(?: +\[ *\d+%\])?$|(?=[^\s:]+\.py::){_TEST} $"
    rf"|\[gw\d+\] \[ *\d+%\] (?:PASSED|SKIPPED|XFAIL) {_TEST}\s*$"
    r"|\s*[✓✔√↓○] "  # the rest of it is the name
    r"|PASS \S+(?: \([\d.]+ m?s\))?$"
    r"|\s*--- (?:PASS|SKIP): \S+ \([\d.]+s\)$|=== (?:RUN|PAUSE|CONT|NAME) +\S+$"
    r"|ok\s+\S+\s+(?:[\d.]+s|\(cached\))(?:\s+coverage: [\d.]+% of statements)?$"
    r"|\?\s+\S+\s+\[no test files\]$|ok \d+ - "
    r"|test \S+(?: - .*)? \.\.\. (?:ok|ignored)$|\w+ \([\w.]+\) \.\.\. ok$"
    r"|\s+PASS \[ *[\d.]+s\] (?:\( *\d+/\d+\) )?\S+ \S+$"
)
LONGEST = 2000  # characters; regular expressions are not tried on longer lines


def looks_like_failure(line: str) -> bool:
    """Whether the line reports something that went wrong. Such a line is always shown."""
    low = line.lower()
    for stem in _STEMS:
        if stem in low:
            break
    else:
        return line.startswith(_OF_PYTEST)
    if isinstance(line, Gap) or (len(line) <= LONGEST and _WENT_WELL.match(line)):
        return False
    low = _NO_FAILURE.sub("", low)
    return any(_says(stem, low, line) for stem in _STEMS if stem in low)


def _says(stem: str, low: str, line: str) -> bool:
    """Whether the stem begins a word, or ends one as in `ValueError` (not as in `thiserror`)."""
    at = low.find(stem)
    may_end_one = stem.capitalize() in line
    while at >= 0:
        before = low[at - 1] if at else " "
        is_inside = before.isalnum() or before == "_"
        if _ENDING.match(low, at + len(stem)) and (not is_inside or may_end_one):
            return True
        at = low.find(stem, at + len(stem))
    return False


def failing(lines: Iterable[str | Hidden]) -> Callable[[str], bool]:
    """`looks_like_failure` for these lines: searches all of them at once, which is faster."""
    text = "\n".join(line for line in lines if isinstance(line, str))
    low = text.lower()
    if len(low) != len(text):  # a few letters, like İ, become longer in lower case
        return looks_like_failure
    places = [*lines_with(_STEMS, low, "\n"), *lines_with((_OF_PYTEST.lower(),), low, "\n")]
    suspects = {text[start:end] for start, end in places}
    return lambda line: line in suspects and looks_like_failure(line)


def lines_with(words: Iterable[AnyStr], text: AnyStr, newline: AnyStr) -> Iterator[tuple[int, int]]:
    """Start and end of each line that contains one of the words; by word, then by position."""
    for word in words:
        at = text.find(word)
        while at >= 0:
            end = text.find(newline, at)
            end = len(text) if end < 0 else end
            yield text.rfind(newline, 0, at) + 1, end
            at = text.find(word, end)
