"""Logs, and what Docker and Kubernetes print.

Of a log, the day is shown once; of messages that differ only in numbers, the first two, the last,
and the count. Of errors and warnings more are shown, and some of every kind. Tables lose their
padding, and builds their bookkeeping.
"""

from __future__ import annotations

import re
from collections import Counter

from .family import CommandLine, Family, Gap, Hidden, Shown, count
from .generic import shapes
from .sift import failing, is_like, looks_like_failure, squeezed, table, without

_STAMP = re.compile(
    r"\[?(\d{4}[-/]\d\d[-/]\d\d)[T ](\d\d:\d\d:\d\d(?:[.,]\d+)?)(Z|[+-]\d\d:?\d\d)?\]?\s*"
    r"|([A-Z][a-z]{2} [ \d]\d) (\d\d:\d\d:\d\d)\s+"
)
_ACCESS = re.compile(r"\S+ \S+ \S+ \[\d\d/[A-Z][a-z]{2}/\d{4}[: ]\d\d:\d\d:\d\d")
_REFUSED = re.compile(r'" [45]\d\d\b')  # what a web server answered
_SOME = 4  # messages of one shape: so few are all shown
_FAILURES = 8  # messages of one shape that are shown if they report a failure or a warning
_WARNS = re.compile(r"\bwarn(?:ing)?s?\b", re.IGNORECASE)


def shorten_logs(call: CommandLine, lines: list[str]) -> Shown:
    stamps = [_STAMP.match(line) for line in lines]
    if not _are_log(lines, stamps):
        return list(lines)
    days = Counter(stamp[1] or stamp[4] for stamp in stamps if stamp)
    day = next(iter(days)) if len(days) == 1 and sum(days.values()) * 2 > len(lines) else ""
    texts = [_dayless(line, stamp, day) for line, stamp in zip(lines, stamps, strict=True)]
    # A failure is never of the same kind as another message, even if their shapes are equal.
    is_failure = failing(texts)
    pairs = zip(texts, shapes(texts), strict=True)
    shown = _first_and_last(texts, [kind + "!" * is_failure(text) for text, kind in pairs])
    return [f"[all on {day}]", *shown] if day else shown


def _are_log(lines: list[str], stamps: list[re.Match[str] | None]) -> bool:
    if len(lines) < 8:
        return False
    dated = sum(map(bool, stamps)) or sum(is_like(_ACCESS, line) for line in lines)
    return dated * 2 > len(lines)


def _dayless(line: str, stamp: re.Match[str] | None, day: str) -> str:
    if not (stamp and day) or isinstance(line, Gap):
        return line
    time = f"{stamp[2]}{stamp[3] or ''}" if stamp[1] else stamp[5]
    return f"{time} {line[stamp.end() :]}"


def _first_and_last(texts: list[str], kinds: list[str]) -> Shown:
    times, seen = Counter(kinds), Counter[str]()
    shown: Shown = []
    hidden = 0
    for text, kind in zip(texts, kinds, strict=True):
        seen[kind] += 1
        is_end = seen[kind] <= 2 or seen[kind] == times[kind]
        is_rare = times[kind] <= _SOME or (seen[kind] <= _FAILURES and _matters(text))
        if isinstance(text, Gap) or is_end or is_rare:
            if hidden:
                shown.append(Hidden(hidden, "messages like others here"))
                hidden = 0
            shown.append(text)
        else:
            hidden += count(text)
    if hidden:
        shown.append(Hidden(hidden, "messages like others here"))
    return shown


def _matters(line: str) -> bool:
    return bool(looks_like_failure(line) or _WARNS.search(line) or _REFUSED.search(line))


def _reads_log(call: CommandLine) -> bool:
    if call.program in ("journalctl", "dmesg"):
        return True
    files = [word for word in call.argv[1:] if not word.startswith("-")]
    return bool(files) and files[-1].rpartition("/")[2].endswith((".log", "syslog", "messages"))


def _looks_like(lines: list[str]) -> bool:
    some = lines[:200]
    dated = sum(bool(_STAMP.match(line)) or is_like(_ACCESS, line) for line in some)
    return len(some) >= 20 and dated * 10 > len(some) * 8


LOGS = (
    Family(
        "logs",
        ("journalctl", "dmesg", "cat", "tail", "head", "zcat"),
        shorten_logs,
        _reads_log,
        _looks_like,
        is_content=True,
        has_failures=True,
    ),
)


# --- containers ---------------------------------------------------------------------


MANY = 25  # rows of a table; of more, healthy ones are only counted
FEW = 4  # rows; with so few, every column is shown
DULL = ("COMMAND", "CREATED")  # columns that are left out; STATUS says since when it is up
_BOOKKEEPING = re.compile(
    r" ---> (?:Running in |Using cache|[0-9a-f]{12}$)|Removing intermediate container "
    r"|Sending build context|DEPRECATED: The legacy builder|\s+Install the buildx|\s+https://docs"
    r"|#\d+ (?:DONE|CACHED|sha256:|transferring|resolve |extracting |exporting|writing|naming"
    r"|\[internal\]|\.\.\.|pushing|preparing|sending|load )"
    r"|[0-9a-f]{12}: (?:Pull|Download|Verify|Wait|Extract|Already|Push|Layer|Prepar|Mounted)"
)
_STEP = re.compile(r"Step \d+/\d+ : |#\d+ \[[^\]]*\d/\d+\] ")
_HEALTHY = re.compile(
    r"\s(?:(?P<ready>\d+)/(?P<of>\d+)\s+(?:Running)|Completed|Succeeded|Ready|Bound|Active)\s"
)


def shorten_table(call: CommandLine, lines: list[str]) -> Shown:
    """Tables without padding; of many rows, those that need attention."""
    shown: Shown = []
    for block in _blocks(lines):
        tight = table(block, leave_out=DULL if len(block) > FEW else ())
        rows = block if tight is None else tight
        if len(rows) <= MANY or tight is None:
            shown += rows
        else:
            header, *others = rows
            shown += [header, *without(others, _is_well, "rows that are well")]
    if dull := [name for name in DULL if len(lines) > FEW and name in lines[0]]:
        shown.append(Hidden(len(lines), f"the columns {' and '.join(dull)}"))
    return shown


def _is_well(row: str) -> bool:
    found = _HEALTHY.search(f"{row} ")
    return bool(found and found["ready"] == found["of"]) and not looks_like_failure(row)


def _blocks(lines: list[str]) -> list[list[str]]:
    """The tables of an output: `kubectl get all` prints several, with empty lines between them."""
    blocks: list[list[str]] = [[]]
    for line in lines:
        if not line.strip() and blocks[-1]:
            blocks += [[line], []]
        else:
            blocks[-1].append(line)
    return [block for block in blocks if block]


def shorten_build(call: CommandLine, lines: list[str]) -> Shown:
    """Each step, and what a failed one printed; of steps that went well, only warnings."""
    starts = [at for at, line in enumerate(lines) if is_like(_STEP, line)]
    last = starts[-1] if starts and call.failed else len(lines)
    places = iter(range(len(lines)))
    first = starts[0] if starts else 0

    def boring(line: str) -> bool:
        at = next(places)
        if is_like(_BOOKKEEPING, line):
            return True
        inside = first < at < last and not is_like(_STEP, line) and not line.startswith("Success")
        return inside and not looks_like_failure(line) and "warn" not in line.lower()

    return squeezed(without(lines, boring, "steps that went well"))


_TABLES = frozenset({"ps", "images", "container", "image", "volume", "network", "stats", "top"})


def _is_table(call: CommandLine) -> bool:
    if call.has("-o", "--output", "--format", "-q", "--quiet"):
        return call.has("-o") and "wide" in call.argv
    if call.program in ("kubectl", "oc", "k", "helm"):
        return call.action in ("get", "top", "api-resources", "list", "ls")
    return call.action in _TABLES or ("compose" in call.argv[:2] and "ps" in call.argv)


def _is_logs(call: CommandLine) -> bool:
    return call.action == "logs" or (call.action == "compose" and "logs" in call.argv)


ENGINES = (
    Family(
        "docker build",
        ("docker", "podman", "buildah", "nerdctl", "docker-compose"),
        shorten_build,
        matches=lambda call: bool({"build", "buildx", "pull", "push", "bud"} & {*call.argv[1:4]}),
    ),
    Family(
        "container logs",
        ("docker", "podman", "nerdctl", "kubectl", "oc", "k"),
        shorten_logs,
        matches=_is_logs,
        has_failures=True,
    ),
    Family(
        "containers",
        ("docker", "podman", "nerdctl", "kubectl", "oc", "k", "helm"),
        shorten_table,
        matches=_is_table,
    ),
)
