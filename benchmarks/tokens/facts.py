"""What an output says, found in it by rules: for samples whose facts were not written down.

A rule reads what was printed, and knows nothing of what filters make of it. A finding is several
facts (the file's name, the place, the message), since a list by file says the file once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

MOST = 40  # facts of one rule; of more, some from everywhere
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def found(rules: Iterable[str], raw: bytes) -> tuple[str, ...]:
    text = _ESCAPE.sub("", raw.decode("utf-8", "replace")).replace("\r\n", "\n")
    facts: list[str] = []
    for rule in rules:
        facts += _some([fact for fact in dict.fromkeys(RULES[rule](text)) if fact.strip()])
    return tuple(dict.fromkeys(facts))


def _some(facts: list[str]) -> list[str]:
    step = max(1, -(-len(facts) // MOST))
    return facts[::step]


def _all(pattern: str) -> Callable[[str], list[str]]:
    """Every group of every match; a group `at` is a number that stands alone."""
    compiled = re.compile(pattern, re.MULTILINE)

    def rule(text: str) -> list[str]:
        return [
            rf"re:(?<!\d){re.escape(value)}(?!\d)" if name == "at" else value.strip()
            for match in compiled.finditer(text)
            for name, value in match.groupdict().items()
            if value and value.strip()
        ]

    return rule


def _any(*rules: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    return lambda text: [fact for rule in rules for fact in rule(text)]


def _last(text: str) -> list[str]:
    """The last line, without the rules and marks around it."""
    lines = [line.strip("=- \t") for line in text.split("\n") if line.strip("=- \t")]
    return lines[-1:]


def _changes(text: str) -> list[str]:
    """Names of files, and the lines that changed; of files that went, no lines."""
    facts: list[str] = []
    for part in re.split(r"^(?=diff --git |--- )", text, flags=re.MULTILINE):
        facts += re.findall(r"^(?:diff --git a/|--- |\+\+\+ )\S*?([^/\s]+)(?=\s|$)", part, re.M)[:1]
        if "\ndeleted file mode" not in part and "+++ /dev/null" not in part:
            facts += [line for line in re.findall(r"^[+-](?![+-]{2} ).*\S", part, re.M)]
    return facts


def _deleted(text: str) -> list[str]:
    return [*_changes(text), *re.findall(r"^deleted file", text, re.M)]


def _leaves(text: str) -> list[str]:
    def walk(value: object) -> Iterable[str]:
        if isinstance(value, dict):
            for key, part in value.items():
                yield key
                yield from walk(part)
        elif isinstance(value, list):
            for part in value:
                yield from walk(part)
        else:
            yield json.dumps(value, ensure_ascii=False)

    value, _ = json.JSONDecoder().raw_decode(re.sub(r"\A[^\[{]*", "", text))
    return list(walk(value))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\s│├└─]*\w{3,}[^\s│├└─]*", text)


def _names(text: str) -> list[str]:
    """The last part of each path."""
    return re.findall(r"([\w.@+-]*[A-Za-z][\w.@+-]*)/?$", text, re.MULTILINE)


_FINDING = _all(r"^(?:\S*/)?(?P<file>[\w.+-]+\.\w+):(?P<at>\d+(?::\d+)?):? (?P<message>.*[^\s:])")
_FRAMED = _all(
    r"^ *--> (?:\S*/)?(?P<file>[\w.-]+):(?P<at>\d+:\d+)$"
    r"|^(?P<message>(?:[A-Z]+\d+ (?:\[\*\] )?|error|warning).*)$"
)
RULES: dict[str, Callable[[str], list[str]]] = {
    "last": _last,
    "tail": lambda text: [line for line in text.split("\n") if len(line) > 30],
    "words": _words,
    "names": _names,
    "json": _leaves,
    "diff": _changes,
    "diffnames": _deleted,
    "finding": _any(_FINDING, _FRAMED),
    "rustc": _any(
        _all(r"^(?P<message>(?:error|warning)(?:\[\w+\])?: .*)$"),
        _all(r"^ *--> (?:\S*/)?(?P<file>[\w.-]+):(?P<at>\d+:\d+)$"),
        _all(r"^ *\| *[|_ ]*[\^-]+ (?P<label>\S.*)$"),
    ),
    "stylish": _all(r"^ +(?P<at>\d+:\d+) +(?:error|warning) +(?P<message>\S.*?) {2,}(?P<rule>\S+)$"
                    r"|^/\S*/(?P<file>[^/\s]+)$"),
    "tsc": _all(r"^(?:\S*/)?(?P<file>[\w.-]+)[(:](?P<line>\d+)[,:]\d+\)?(?::| -) error"
                r" (?P<code>TS\d+): (?P<message>.*)$"),
    "pytest": _any(
        _all(r"^(?:FAILED|ERROR) \S*?(?P<test>[^/\s:]+(?:::\S+)?)(?: - |$)"),
        _all(r"^E {3,}(?P<why>\w[\w.]*(?:Error|Exception|Exit)\b.*|assert .*)$"),
        _all(r"^(?:\S*/)?(?P<file>[\w.-]+\.py):(?P<at>\d+): (?:\w+(?:Error|Exception)|in )"),
        _last,
    ),
    "unittest": _any(
        _all(r"^(?:FAIL|ERROR): (?P<test>\w+)"), _all(r"^(?P<why>\w+(?:Error|Exception): .*)$"),
        _all(r'^ +File "(?:[^"]*/)?(?P<file>[^"/]+)", line (?P<at>\d+), in (?P<name>\S+)'), _last,
    ),
    "traceback": _any(
        _all(r'^ +File "(?:[^"]*/)?(?P<file>[^"/]+)", line (?P<at>\d+), in (?P<name>\S+)'),
        _all(r"^(?P<why>[\w.]*(?:Error|Exception): .*)$"), _last,
    ),
    "coverage": _all(r"^(?:\S*/)?(?P<file>\w+\.py) +\d+ +(?P<at>[1-9]\d*) .*?(?P<part>\d+%)"
                     r" *(?P<lines>[\d, -]+)$|^TOTAL.* (?P<all>\d+%)"),
    "mocha": _all(r"^ +(?P<number>\d+ (?:passing|failing))|^ +\d+\) (?P<test>\S.*)$"
                  r"|^ +(?P<why>\w*Error.*)$"),
    "tap": _all(r"^ *not ok \d+ (?:- )?(?P<test>.*)$|^# (?P<count>(?:tests|pass|fail) +\d+)$"),
    "nodecrash": _all(r"^ +at (?P<name>\S+) \((?:\S*/)?(?P<file>[\w.]+):(?P<line>\d+):\d+\)$"
                      r"|^(?P<why>\w+Error: .*)$"),
    "jest": _all(r"^ +● (?P<test>.*)$|^(?P<count>Tests: .*)$|^ +(?P<why>Expected.*|Received.*)$"),
    "npm": _all(r"^(?P<count>(?:added|removed|changed|audited) \d+ packages?)"
                r"|^(?P<holes>\d+ .*vulnerabilities.*)$|^npm (?:ERR!|error) (?P<why>\S.*)$"
                r"|^npm (?:warn|WARN) deprecated (?P<old>[^:\s]+@[\d.]+)"),
    "npmls": _all(r"(?P<package>[@\w/.-]+@\d[\w.-]*)"),
    "pip": _all(r"(?P<package>[\w.-]+-\d+(?:\.\d+)+)(?= |$)|^ *(?P<why>(?:ERROR|error): .*)$"),
    "uv": _all(r"^ \+ (?P<package>\S+)$|^(?P<count>Installed .*?packages)"),
    "cargotest": _any(
        _all(r"^test (?P<test>\S+) \.\.\. FAILED$|^(?P<where>thread '[^']+')"
             r"|^ *(?P<sides>(?:left|right): .*)$|^(?P<count>test result: FAILED\. \d+ passed; "
             r"\d+ failed)"),
        _all(r"panicked at (?:\S*/)?(?P<place>[\w.]+:\d+:\d+)"),
    ),
    "gotest": _all(r"^ *--- FAIL: (?P<test>\S+)|^ +(?P<place>\w+\.go:\d+): (?P<why>.*)$"
                   r"|^(?P<end>(?:FAIL|ok|panic:?)\s+\S+)"),
    "make": _all(r"^make(?:\[\d+\])?: (?P<why>\*\*\* .*)$|(?P<symbol>undefined reference to .*)$"),
    "cmake": _all(r"^(?P<why>CMake (?:Error|Warning).*)$|^-- (?P<end>(?:Config|Gener|Build files).*"
                  r")$|^(?P<target>\[100%\] Built .*)$|(?P<stop>\*\*\* .*)$"),
    "mvn": _any(
        _all(r"^\[ERROR\] +\S*/(?P<file>\w+\.java):\[(?P<place>[\d,]+)\] (?P<why>.*)$"
             r"|^\[ERROR\] +(?P<test>\w+\.\w+):(?P<at>\d+) (?P<said>.*)$"
             r"|(?P<count>Tests run: \d+, Failures: \d+, Errors: \d+, Skipped: \d+)$"),
        _all(r"(?P<end>BUILD \w+)$"),
    ),
    "gitlog": _any(
        _all(r"^commit (?P<hash>[0-9a-f]{7})|^Author: +(?P<author>[^<\n]+) <"),
        _all(r"^Date:.*\n\n {4}(?P<subject>\S.*)$"), _all(r"^ (?P<stat>\S*?[\w.-]+) +\| +\d+"),
    ),
    "oneline": _all(r"^(?P<hash>[0-9a-f]{7,}) (?P<subject>.*)$"),
    "blame": _all(r"^\^?(?P<hash>[0-9a-f]{7})[0-9a-f]* \((?P<author>.*?) +\d{4}-"
                  r"|\d+\) (?P<code>.*)$"),
    "ls": _all(r"^[-dl][-rwx]{9}.? +\d+ +\S+ +\S+ +(?P<at>\d+) +\w+ +\d+ +[\d:]+ (?P<name>.*)$"),
    "grep": _all(r"^(?:\S*/)?(?P<file>[\w.-]+)[:-](?P<at>\d+)[:-] *(?P<text>.*)$"),
}  # fmt: skip
