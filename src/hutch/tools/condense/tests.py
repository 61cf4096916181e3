"""Test runs: what passed is counted, what failed is shown with its name, reason and place."""

from __future__ import annotations

import json
import re

from .builds import diagnostics, shorten_cargo
from .family import CommandLine, Family, Gap, Hidden, Shown, count
from .frames import frameless, traces
from .sift import gathered, is_like, like, looks_like_failure, tight, without

STATEMENT = 4  # lines of a failing statement that are shown

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
_PASSED = re.compile(  # lines of these that look like failures stay all the same
    r"\S.*? (?:PASSED|SKIPPED|XFAIL)(?: +\(.*)?(?: +\[ *\d+%\])?$"  # -v
    r"|\[gw\d+\] \[ *\d+%\] (?:PASSED|SKIPPED|XFAIL) "  # -v -n 2
    r"|[^\s:]+\.py::\S.* $"  # a test has begun
    r"|(?:\S+ )?[.sx]+(?: +\[ *(?:\d+%|\d+/\d+)\])?$"  # dots
)
_PROGRESS = re.compile(r"(?:\S+ )?[.sxXEFR]+(?: +\[ *(?:\d+%|\d+/\d+)\])?$")
_NOTHING = re.compile(
    r"E\s*$|E +(?:Use -v+ to get|Full diff:$)|\w+ = <.* object at 0x[0-9a-f]+>$|\s+[~^]+$"
)
_SHORT_FRAME = re.compile(r'\S+:\d+: in |\s+File "')  # of --tb=short and --tb=native
_COVERED = re.compile(r"\S+\s+\d+\s+0\s+(?:\d+\s+0\s+)?100%\s*$|-{3,}$")
_SECTION = re.compile(r"=+ (?P<title>.+?) =+$")
_TEST_ID = re.compile(r"[^\s:]+\.py(?:::[^\s\[]+(?:\[.*\])?|: \d+ warnings?)$")


def shorten_pytest(call: CommandLine, lines: list[str]) -> Shown:
    if not is_pytest(lines) and not any(is_like(_PASSED, line) for line in lines):
        return list(lines)
    shown: Shown = []
    section, part = "", list[str]()
    failed = any(line.startswith(("FAILED ", "ERROR ")) for line in lines)
    reasons = "\n".join(line[1:].lstrip() for line in lines if line.startswith("E "))
    for line in [*lines, "=== end ==="]:
        found = like(_SECTION, line) if line.startswith("=") else None
        if not found:
            part.append(line)
            continue
        shown += _pytest_section(section, part, failed)
        section, part = found["title"], [line]
    brief = [line if isinstance(line, Hidden) else _reasonless(line, reasons) for line in shown]
    return gathered(without(brief, lambda line: is_like(_SET_UP, line), "set-up"))


def _reasonless(line: str, reasons: str) -> str:
    """`FAILED a.py::test - why` without the reason, if that is shown above."""
    if not line.startswith(("FAILED ", "ERROR ")):
        return line
    test, dash, why = line.partition(" - ")
    return test if dash and why.removesuffix("...") in reasons else line


def is_pytest(lines: list[str]) -> bool:
    return any(is_like(_STARTS, line) for line in lines[:40]) or any(
        is_like(_ENDS, line) for line in lines[-5:]
    )


def _pytest_section(title: str, lines: list[str], is_listed: bool) -> Shown:
    """`is_listed`: failed tests are listed at the end."""
    if title in ("FAILURES", "ERRORS") or title.startswith("rerun"):
        return _pytest_failures([tight(line) for line in lines])
    if title == "warnings summary":
        return _warnings([tight(line) for line in lines])
    if title in ("", "test session starts"):
        return without(
            lines,
            lambda line: is_like(_PASSED, line) or (is_listed and is_like(_PROGRESS, line)),
            "passed and skipped tests",
        )
    return without(map(tight, lines), lambda line: is_like(_COVERED, line), "files covered whole")


def _pytest_failures(lines: list[str]) -> Shown:
    """Each failure with the failing statement, the reason and the place, without other source."""
    shown: Shown = []
    hidden = 0
    since = -1  # lines since the failing statement began; -1 outside of one
    is_source = True  # indented lines are source, not output of the test
    is_named = True  # the next `def` is the function that the title names
    for line in lines:
        if line.startswith(">") or is_like(_SHORT_FRAME, line):
            since = 0
        elif line.startswith("    ") or not line:
            since += since >= 0
            is_part = 0 <= since < STATEMENT
            if line.startswith("    def "):
                is_part, is_named = not is_named, False
            if is_source and line and not is_part:
                hidden += count(line)
                continue
            if not line:
                continue
        else:
            since = -1
            is_named = is_named or line.startswith("___ ")
            is_source = not line.startswith("---") and (is_source or line.startswith("_"))
        if is_like(_NOTHING, line):
            hidden += count(line)
        else:
            shown.append(line)
    return [*shown, Hidden(hidden, "source")] if hidden else shown


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
_JEST_COUNTS = re.compile(
    r"(?:Tests:|Test Suites:)\s+\d|\s*(?:Test Files|Tests)\s+\d+ \w+|\s+\d+ (?:passing|failing)\b"
)


def shorten_jest(call: CommandLine, lines: list[str]) -> Shown:
    if not is_jest(lines):
        return list(lines)
    boring: list[bool] = []
    is_passed = False  # inside the output of a suite that passed
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
    kept = traces(frameless(without(lines, lambda line: next(marks), "passed tests")))
    return gathered([line if isinstance(line, Hidden) else tight(line) for line in kept])


def is_jest(lines: list[str]) -> bool:
    return any(is_like(_JEST_COUNTS, line) for line in lines) and any(
        is_like(_SUITE, line) or is_like(_CHECKED, line) for line in lines
    )


# --------------------------------------------------------------- unittest, and what speaks TAP

_CASE_OK = re.compile(r"(?:\w+ \([\w.]+\)|.*) \.\.\. (?:ok|skipped .*|expected failure)$|[.sx]+$")
_RAN = re.compile(r"Ran \d+ tests? in [\d.]+s$")
_TAP = re.compile(r"TAP version 1[34]$")
_TAP_NOISE = re.compile(
    r"TAP version|\s+(?:duration_ms|type|location): |\s+(?:\.\.\.|---)$|# (?!fail)\w+ 0$"
)
_TAP_OK = re.compile(r"(\s*)ok \d+(?! .*# TODO)|(\s*)# Subtest: ")


def shorten_unittest(call: CommandLine, lines: list[str]) -> Shown:
    if not is_unittest(lines):
        return list(lines)
    kept = without(lines, lambda line: is_like(_CASE_OK, line), "passed tests")
    return gathered(traces(line if isinstance(line, Hidden) else tight(line) for line in kept))


def is_unittest(lines: list[str]) -> bool:
    return any(is_like(_RAN, line) for line in lines[-6:])


def shorten_tap(call: CommandLine, lines: list[str]) -> Shown:
    """Points that passed go, each with what is indented below it."""
    boring: list[bool] = []
    is_passed, depth = False, 0
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if found := like(_TAP_OK, line):
            depth = len(found[1] or found[2] or "")
            is_passed = found[1] is not None
            boring.append(True)
        else:
            is_passed = is_passed and indent > depth
            boring.append(is_passed or is_like(_TAP_NOISE, line))
    marks = iter(boring)
    return gathered(traces(without(lines, lambda line: next(marks), "passed tests")))


def is_tap(lines: list[str]) -> bool:
    return any(is_like(_TAP, line) for line in lines[:20])


# ------------------------------------------------------------------------------------- go test

_GO_NOISE = re.compile(
    r"\s*(?:=== (?:RUN|PAUSE|CONT|NAME) |--- (?:PASS|SKIP): )|PASS$|\?\s+\S+\s+\["
)
_GO_RESULT = re.compile(r"(?:ok|FAIL)\s+\S+\s+[\d.(\[]|\s*--- (?:PASS|FAIL|SKIP): ")
_GO_OK = re.compile(r"ok\s+\S+\s+(?:[\d.]+s|\(cached\))")
MANY_PACKAGES = 20


def shorten_go_test(call: CommandLine, lines: list[str]) -> Shown:
    events, total = _go_events(lines)
    if events is not None:
        kept = without(events, lambda line: is_like(_GO_NOISE, line), "")
        text = [line for line in kept if isinstance(line, str)]
        return [*text, Hidden(total, "events, those of passed tests and those told above,")]
    if not is_go_test(lines):
        return list(lines)
    many = sum(is_like(_GO_OK, line) for line in lines) > MANY_PACKAGES

    def boring(line: str) -> bool:
        return is_like(_GO_NOISE, line) or (many and is_like(_GO_OK, line))

    return gathered(traces(without(lines, boring, "passed tests")))


def is_go_test(lines: list[str]) -> bool:
    return any(is_like(_GO_RESULT, line) for line in lines[-400:])


def _go_events(lines: list[str]) -> tuple[list[str] | None, int]:
    """The output of `go test -json` as `go test` prints it: failures, and a line per package."""
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
            output = "".join(printed.pop(key, [])).splitlines()
            text += filter(looks_like_failure, output)
    for parts in printed.values():  # of tests that failed or never ended, and of packages
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
_CARGO_SUITE = re.compile(r"\s+(?:Running (?:unittests )?|Doc-tests )\S+(?= \(|$)")
_NONE = re.compile(r"(?<=failed); 0 ignored; 0 measured; 0 filtered out(?=; finished)")
_NEXTEST_RESULT = re.compile(r"\s+Summary \[.*\] \d+ tests? run")
_CARGO_RESULT = re.compile(r"test result: (?P<how>\w+)\. (?P<passed>\d+) passed; (?P<failed>\d+)")


def shorten_cargo_test(call: CommandLine, lines: list[str]) -> Shown:
    if not is_cargo_test(lines):
        return shorten_cargo(call, lines)
    kept = without(lines, lambda line: is_like(_CARGO_NOISE, line), "passed tests and building")
    return gathered(_without_empty_suites(traces(diagnostics(kept))))


def is_cargo_test(lines: list[str]) -> bool:
    return any(is_like(_CARGO_RESULT, line) for line in lines) or any(
        is_like(_NEXTEST_RESULT, line) for line in lines[-40:]
    )


def _without_empty_suites(lines: Shown) -> Shown:
    """Leave out suites in which no test was run."""
    shown: Shown = []
    start, empty = -1, 0
    for line in lines:
        if isinstance(line, str) and (suite := like(_CARGO_SUITE, line)):
            start = len(shown)
            line = line[: suite.end()]
        shown.append(_NONE.sub("", line) if isinstance(line, str) else line)
        found = like(_CARGO_RESULT, line) if isinstance(line, str) else None
        if found and start >= 0 and found["how"] == "ok" and found["passed"] == "0":
            if not any(isinstance(each, Hidden) for each in shown[start:]):
                empty += sum(map(count, shown[start:]))
                del shown[start:]
            start = -1
    return [*shown, Hidden(empty, "suites without tests")] if empty else shown


TESTS = (
    Family(
        "pytest",
        ("pytest", "py.test"),
        shorten_pytest,
        looks_like=is_pytest,
        is_content=True,  # what it hides is names of tests that passed, and source
        has_failures=True,
    ),
    Family("unittest", ("unittest",), shorten_unittest, looks_like=is_unittest, has_failures=True),
    Family(
        "jest", ("jest", "vitest", "mocha"), shorten_jest, looks_like=is_jest, has_failures=True
    ),
    Family("tap", ("tape", "tap"), shorten_tap, looks_like=is_tap, has_failures=True),
    Family(
        "go test",
        ("go", "gotestsum"),
        shorten_go_test,
        matches=lambda call: call.program == "gotestsum" or call.action == "test",
        looks_like=is_go_test,
        is_content=True,  # what it hides is of tests that passed, or told as text
        has_failures=True,
    ),
    Family(
        "cargo test",
        ("cargo",),
        shorten_cargo_test,
        matches=lambda call: call.action in ("test", "t", "nextest"),
        looks_like=is_cargo_test,
        has_failures=True,
    ),
)
