"""Docker and Kubernetes: tables without their padding, builds without their bookkeeping."""

from __future__ import annotations

import re

from .family import CommandLine, Family, Hidden, Shown
from .logs import shorten as shorten_logs
from .sift import is_like, looks_like_failure, squeezed, table, without

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
