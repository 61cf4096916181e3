"""Runs of tests: what passed is counted, what failed is shown with its name, reason and place."""

from __future__ import annotations

import json
import re

from .builds import notes_once
from .failures import looks_like_failure
from .family import Call, Family, Gap, Hidden, Shown, count
from .sift import is_like, like, squeezed, tight, without

MAX_FRAME = 10  # lines of source in a traceback; of more, the first and the last are shown
FRAME_TAIL = 4

# ------------------------------------------------------------------------------------- pytest

_STARTS = re.compile(r"=+ test session starts =+$")
_ENDS = re.compile(
    r"(?:=+ )?(?:no tests ran|\d+ (?:passed|failed|errors?|skipped|deselected|warnings?|xfailed"
    r"|xpassed)\b.*?) in [\d.:]+ ?s"
)
_SET_UP = re.compile(
    r"(?:=+ test session starts =+|platform \w+ -- |rootdir: |configfile: |cachedir: |testpaths: "
    r"|plugins: |hypothesis profile |asyncio: |created: \d+/\d+ workers|\d+ workers \["
    r"|scheduling tests via |bringing up nodes|-- Docs: https://docs\.pytest)"
)
_PASSED = re.compile(  # of which those that speak of a failure stay
    r"\S.*? (?:PASSED|SKIPPED|XFAIL)(?: +\(.*)?(?: +\[ *\d+%\])?$"  # -v
    r"|\[gw\d+\] \[ *\d+%\] (?:PASSED|SKIPPED|XFAIL) "  # -v -n 2
    r"|[^\s:]+\.py::\S.* $"  # a test has begun
    r"|(?:\S+ )?[.sx]+(?: +\[ *(?:\d+%|\d+/\d+)\])?$"  # dots
)
_SECTION = re.compile(r"=+ (?P<title>.+?) =+$")
_TEST_ID = re.compile(r"[^\s:]+\.py(?:::[^\s\[]+(?:\[.*\])?|: \d+ warnings?)$")


def shorten_pytest(call: Call, lines: list[str]) -> Shown:
    if not is_pytest(lines) and not any(is_like(_PASSED, line) for line in lines):
        return list(lines)
    shown: Shown = []
    section, part = "", list[str]()
    for line in [*lines, "=== end ==="]:
        found = like(_SECTION, line) if line.startswith("=") else None
        if not found:
            part.append(line)
            continue
        shown += _pytest_section(section, part)
        section, part = found["title"], [line]
    return squeezed(without(shown, lambda line: is_like(_SET_UP, line), "set-up"))


def is_pytest(lines: list[str]) -> bool:
    return any(is_like(_STARTS, line) for line in lines[:40]) or any(
        is_like(_ENDS, line) for line in lines[-5:]
    )


def _pytest_section(title: str, lines: list[str]) -> Shown:
    if title in ("FAILURES", "ERRORS") or title.startswith("rerun"):
        return _shorter_frames([tight(line) for line in lines])
    if title == "warnings summary":
        return _warnings([tight(line) for line in lines])
    if title in ("", "test session starts"):
        return without(lines, lambda line: is_like(_PASSED, line), "passed and skipped tests")
    return [tight(line) for line in lines]


def _shorter_frames(lines: list[str]) -> Shown:
    """Without the middle of long functions: the line that failed, and why, stay as they are."""
    shown: Shown = []
    frame: list[str] = []
    for line in [*lines, ""]:
        if line.startswith("    ") or (not line and frame):
            frame.append(line)
            continue
        if line.startswith(">") and len(frame) > MAX_FRAME:
            middle = frame[1:-FRAME_TAIL]
            shown += [frame[0], Hidden(len(middle), "source"), *frame[-FRAME_TAIL:]]
        else:
            shown += frame
        frame = []
        shown.append(line)
    return [*shown, *frame][:-1] if shown and shown[-1] == "" else [*shown, *frame]


def _warnings(lines: list[str]) -> Shown:
    """Each warning, with the first two tests that raised it."""
    shown: Shown = []
    ids: list[str] = []
    for line in [*lines, ""]:
        if is_like(_TEST_ID, line):
            ids.append(line)
            continue
        shown += ids[:2] if len(ids) > 3 else ids
        if len(ids) > 3:
            shown.append(Hidden(len(ids) - 2, "more tests with this warning"))
        ids = []
        shown.append(line)
    return shown[:-1]


# ----------------------------------------------------------------------------- jest and vitest

_CHECKED = re.compile(r"\s*[✓✔√↓○] |\s*✎ todo ")
_SUITE = re.compile(r"(?P<how>PASS|FAIL) \S*\.\w+|(?P<vitest>\s*RUN\s+v\d)")
_JEST_COUNTS = re.compile(r"(?:Tests:|Test Suites:)\s+\d|\s*(?:Test Files|Tests)\s+\d+ \w+")


def shorten_jest(call: Call, lines: list[str]) -> Shown:
    if not is_jest(lines):
        return list(lines)
    boring: list[bool] = []
    is_passed = False  # inside what a suite that passed has printed
    for line in lines:
        if found := like(_SUITE, line):
            is_passed = found["how"] == "PASS"
            boring.append(is_passed)
        elif not line.strip():
            boring.append(is_passed)
            is_passed = False
        elif line.lstrip().startswith(("console.", "●", "✕", "×")) or looks_like_failure(line):
            is_passed = False
            boring.append(False)
        else:
            boring.append(is_like(_CHECKED, line) or (is_passed and line.startswith("  ")))
    marks = iter(boring)
    kept = without(lines, lambda line: next(marks), "passed tests")
    return squeezed([line if isinstance(line, Hidden) else tight(line) for line in kept])


def is_jest(lines: list[str]) -> bool:
    return any(is_like(_JEST_COUNTS, line) for line in lines[-14:]) and any(
        is_like(_SUITE, line) or is_like(_CHECKED, line) for line in lines
    )


# ------------------------------------------------------------------------------------- go test

_GO_NOISE = re.compile(
    r"\s*(?:=== (?:RUN|PAUSE|CONT|NAME) |--- (?:PASS|SKIP): )|PASS$|\?\s+\S+\s+\["
)
_GO_RESULT = re.compile(r"(?:ok|FAIL|---)(?:\s*:)?\s+\S+\s+[\d.(\[]|\s*--- (?:PASS|FAIL|SKIP): ")
_GO_OK = re.compile(r"ok\s+\S+\s+(?:[\d.]+s|\(cached\))")
MANY_PACKAGES = 20


def shorten_go_test(call: Call, lines: list[str]) -> Shown:
    events, total = _go_events(lines)
    if events is not None:
        kept = without(events, lambda line: is_like(_GO_NOISE, line), "")
        told = [line for line in kept if isinstance(line, str)]
        return [*told, Hidden(total, "events, those of passed tests and those told above,")]
    if not is_go_test(lines):
        return list(lines)
    many = sum(is_like(_GO_OK, line) for line in lines) > MANY_PACKAGES

    def boring(line: str) -> bool:
        return is_like(_GO_NOISE, line) or (many and is_like(_GO_OK, line))

    return squeezed(without(lines, boring, "passed tests"))


def is_go_test(lines: list[str]) -> bool:
    return any(is_like(_GO_RESULT, line) for line in lines[-400:])


def _go_events(lines: list[str]) -> tuple[list[str] | None, int]:
    """What `go test -json` tells, as `go test` would: what failed, and how each package went."""
    printed: dict[tuple[str, str], list[str]] = {}
    text: list[str] = []
    total = 0
    for line in lines:
        event = _event(line)
        if event is None:
            if line.startswith("{"):
                return None, 0
            text.append(line)
            continue
        total += 1
        key = (str(event.get("Package") or event.get("ImportPath")), str(event.get("Test") or ""))
        if event["Action"] in ("output", "build-output"):
            printed.setdefault(key, []).append(str(event.get("Output", "")))
        if event["Action"] in ("pass", "skip") and key[1]:
            said = "".join(printed.pop(key, [])).splitlines()
            text += filter(looks_like_failure, said)
    for parts in printed.values():  # of what failed, of what never ended, and of packages
        text += "".join(parts).splitlines()
    return (text, total) if total else (None, 0)


def _event(line: str) -> dict[str, object] | None:
    if not line.startswith("{") or '"Action":' not in line or isinstance(line, Gap):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("Action"), str) else None


# ---------------------------------------------------------------------------------- cargo test

_CARGO_NOISE = re.compile(
    r"\s*(?:Compiling|Downloaded|Downloading|Blocking|Locking|Updating|Adding|Fresh|Checking) \S"
    r"|test .+ \.\.\. (?:ok|ignored\b.*)$|running \d+ tests?$"
    r"|\s+(?:PASS|SKIP|START|SLOW) \[ "  # nextest
)
_CARGO_SUITE = re.compile(r"\s+(?:Running|Doc-tests) \S")
_NEXTEST_RESULT = re.compile(r"\s+Summary \[.*\] \d+ tests? run")
_CARGO_RESULT = re.compile(r"test result: (?P<how>\w+)\. (?P<passed>\d+) passed; (?P<failed>\d+)")


def shorten_cargo_test(call: Call, lines: list[str]) -> Shown:
    if not is_cargo_test(lines):
        return list(lines)
    kept = without(lines, lambda line: is_like(_CARGO_NOISE, line), "passed tests and building")
    return squeezed(_without_empty_suites(squeezed(notes_once(kept))))


def is_cargo_test(lines: list[str]) -> bool:
    return any(is_like(_CARGO_RESULT, line) for line in lines) or any(
        is_like(_NEXTEST_RESULT, line) for line in lines[-40:]
    )


def _without_empty_suites(lines: Shown) -> Shown:
    """Suites in which no test was run say nothing."""
    shown: Shown = []
    start, empty = -1, 0
    for line in lines:
        if isinstance(line, str) and is_like(_CARGO_SUITE, line):
            start = len(shown)
        shown.append(line)
        found = like(_CARGO_RESULT, line) if isinstance(line, str) else None
        if found and start >= 0 and found["how"] == "ok" and found["passed"] == "0":
            suite = shown[start:]
            if not any(isinstance(each, Hidden) for each in suite):
                empty += sum(map(count, suite))
                del shown[start:]
            start = -1
    return [*shown, Hidden(empty, "suites without tests")] if empty else shown


TESTS = (
    Family(
        "pytest", ("pytest", "py.test"), shorten_pytest, looks_like=is_pytest,
        is_content=True,  # what it hides is names of tests that passed, and source
        has_failures=True,
    ),
    Family("jest", ("jest", "vitest"), shorten_jest, looks_like=is_jest),
    Family(
        "go test", ("go", "gotestsum"), shorten_go_test,
        matches=lambda call: call.program == "gotestsum" or call.action == "test",
        looks_like=is_go_test,
        is_content=True,  # what it hides is of tests that passed, or told as text
        has_failures=True,
    ),
    Family(
        "cargo test", ("cargo",), shorten_cargo_test,
        matches=lambda call: call.action in ("test", "t", "nextest"), looks_like=is_cargo_test,
    ),
)  # fmt: skip
