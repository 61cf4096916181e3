"""What holds for every output, whatever printed it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hutch.tools.condense import FAMILIES, Condenser, condense
from hutch.tools.condense.detect import calls
from hutch.tools.condense.sift import looks_like_failure

COMMANDS = [
    "./run", "git status", "git diff", "git log", "git show", "git blame x", "git push", "ls -la",
    "tree", "find .", "grep -rn x .", "rg x", "diff -u a b", "jq . x", "curl -s x", "env",
    "journalctl", "cat x.log", "cat x", "pytest", "npm ci", "go test ./...", "cargo build", "make",
    "ruff check", "tsc", "pip install x", "docker ps", "kubectl get pods", "npm test && npm run x",
]  # fmt: skip
PIECES = [
    "error: no such file", "Traceback (most recent call last):", "ok", "", "\x1b[31mred\x1b[0m",
    " 10%\r 20%\r done", "PASSED", "tests/test_a.py::test_b FAILED", "commit 1234567890abcdef",
    "Author: Ann <ann@example.org>", "diff --git a/x b/x", "@@ -1 +1 @@", "+new", "-old",
    "src/a.py:12:text", "-rw-r--r-- 1 u u 12 Jan  2 12:00 name", "├── a", "│   └── b", "{", "}",
    '{"a": [1, 2.10]}', "2024-01-02 12:00:00 INFO 17 things", "warning: unused", "\ufffd\0\0\0",
    "[",
    "On branch main", "Changes not staged for commit:", "\tmodified:   a.py", "x" * 300, "same",
]  # fmt: skip
LINES = st.lists(st.sampled_from(PIECES) | st.text(max_size=40), max_size=60)
OUTPUTS = st.one_of(
    st.binary(max_size=3000),
    st.builds(
        lambda lines, times, end: ("\n".join(lines * times) + end).encode("utf-8", "replace"),
        LINES, st.integers(1, 30), st.sampled_from(["\n", ""]),
    ),
)  # fmt: skip
a_few_hundred = settings(max_examples=250, deadline=None)


@given(st.sampled_from(COMMANDS), OUTPUTS, st.sampled_from([0, 1, None]))
@example("./run", "ࠀ\n".encode() * 16, 0)  # fewer characters than bytes
@a_few_hundred
def test_it_is_never_longer_than_what_was_printed(command: str, data: bytes, code: int) -> None:
    found = condense(command, data, code, recall="o1")
    assert len(found.text) <= len(data.decode("utf-8", "replace"))
    assert len(found.text.encode("utf-8", "replace")) <= len(data)
    assert found.raw_bytes == len(data)


@given(st.sampled_from(COMMANDS), OUTPUTS, st.lists(st.integers(0, 3000), max_size=6))
@a_few_hundred
def test_it_is_the_same_however_the_bytes_were_split(
    command: str, data: bytes, places: list[int]
) -> None:
    condenser = Condenser(command)
    for start, end in zip([0, *sorted(places)], [*sorted(places), len(data)], strict=True):
        condenser.feed(data[start:end])
    assert condenser.finish(0).text == condense(command, data).text


@pytest.mark.parametrize("step", [1000, 65_536, 65_537, 400_000])
def test_a_long_one_is_the_same_in_pieces_of_any_size(step: int) -> None:
    lines = [f"{n} {'y' * (n * 7919 % 300)}" for n in range(6000)]
    data = "\n".join([*lines, "z" * 1_500_000, *lines, "\x1b[1mend\r\n"]).encode()
    condenser = Condenser("./run")
    for at in range(0, len(data), step):
        condenser.feed(data[at : at + step])
    assert condenser.finish(0) == condense("./run", data)


@given(st.sampled_from(COMMANDS), OUTPUTS)
@a_few_hundred
def test_a_line_that_speaks_of_a_failure_stays(command: str, data: bytes) -> None:
    wrong = "zork_1.c:12: error: the frobnicator is missing"
    found = condense(command, data + b"\n" + wrong.encode() + b"\n" + data, 1, recall="o1")
    for part in ("zork_1.c", "12", "error: the frobnicator is missing"):
        assert part in found.text


@given(st.text(max_size=200))
@example("'" * 99)
@example("$(" * 99)
@example("a <<E\n" * 30)
@a_few_hundred
def test_no_command_line_is_too_odd(command: str) -> None:
    for argv in calls(command):
        assert argv and all(isinstance(word, str) for word in argv)


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        ("FOO=1 sudo timeout 10 python3 -m pytest -q 2>&1", "pytest -q"),
        ("cd x && pytest -q | tail -50", "pytest -q"),
        ("cat x.json | jq .", "jq ."),
        ("bash -lc 'cd a; cargo build 2>&1 | tee log'", "cargo build"),
        ("docker exec -it web pytest -q", "pytest -q"),
        ("uv run --with x pytest -k 'a b'", "pytest -k a b"),
        ("for f in *.py; do ruff check $f; done", "ruff check $f"),
        ("(cd a && env B=1 nice -n 5 make -j4)", "make -j4"),
        ("cat > x <<'EOF'\ngrep a | b && c\nEOF\nls -l; echo done", "ls -l"),
        ("npx --yes eslint .", "eslint ."),
        ("/usr/bin/git -C a status", "git -C a status"),
        ("find . -name '*.py' -exec grep -l x {} \\;", "find . -name *.py -exec grep -l x {} ;"),
    ],
)
def test_the_program_is_found_behind_what_is_around_it(command: str, argv: str) -> None:
    assert [" ".join(words) for words in calls(command)] == [argv]


def test_a_chain_of_programs_is_known_by_what_it_printed() -> None:
    status = "On branch main\nUntracked files:\n" + "".join(
        f"\tfolder/of/files/name-{n}\n" for n in range(60)
    )
    found = condense("git fetch; git status", status.encode())
    assert found.family == "git status"


def test_little_is_left_as_it_is() -> None:
    found = condense("pytest", b"1 passed in 0.01s\n")
    assert (found.text, found.family) == ("1 passed in 0.01s\n", "")


def test_colours_and_progress_are_not_shown() -> None:
    assert condense("x", b"\x1b[1;32mok\x1b[0m\r\n 1%\r 99%\rdone\n").text == "ok\ndone\n"


def test_what_was_drawn_over_stays_if_it_speaks_of_a_failure() -> None:
    assert condense("x", b"error: disk full\r 99%\rdone\n").text == "error: disk full\ndone\n"


def test_a_line_printed_a_million_times_is_said_once() -> None:
    found = condense("yes", b"y\n" * 1_000_000 + b"end\n", recall="o1")
    assert found.text == "y\n[the line above 999999 times more]\nend\n"


def test_what_is_hidden_is_counted_and_named() -> None:
    data = "".join(f"step {n} of 500 done\n" for n in range(500)).encode()
    found = condense("./run", data, recall="o7")
    assert '[497 lines of the same kind hidden: recall("o7")]' in found.text
    assert found.hidden_lines == 497


def test_a_failure_among_lines_of_its_own_shape_is_shown() -> None:
    for command, stamp in (("./run", ""), ("cat x.log", "2024-01-02 12:00:00 ")):
        lines = [f"{stamp}{n}-all-is-well" for n in range(300)]
        lines[150] = f"{stamp}150-FATAL-ERROR"
        found = condense(command, "\n".join(lines), recall="o1")
        assert "150-FATAL-ERROR" in found.text and len(found.text) < 400


def test_failures_in_the_midst_of_a_very_long_output_are_shown() -> None:
    lines = [f"all is well with part {n} {'x' * (n % 50)}" for n in range(60_000)]
    lines[30_000] = "fatal: part 30000 is on fire"
    found = condense("./run", "\n".join(lines).encode(), 1, recall="o1")
    assert "fatal: part 30000 is on fire" in found.text
    assert len(found.text) < 40_000


def test_failures_among_a_great_many_short_lines_are_shown_in_their_order() -> None:
    lines = [str(n * 7919 % 9973) for n in range(160_000)]
    places = (20, 5_000, 80_000, 150_000, 153_000, 159_990)
    for at in places:
        lines[at] = f"killed {at}" if at % 1000 else f"error {at}"
    found = condense("./run", "\n".join(lines).encode(), 1, recall="o1")
    shown = [int(at) for at in re.findall(r"(?:killed|error) (\d+)$", found.text, re.MULTILINE)]
    assert sorted(shown) == list(places)
    assert [at for at in shown if 4_000 < at < 152_000] == [5_000, 80_000, 150_000]


def test_every_line_is_shown_or_counted_once() -> None:
    lines = [f"{n} {'same ' * (n // 400 % 3)}" if n // 400 % 3 else "run" for n in range(60_000)]
    found = condense("cat x", "\n".join(lines).encode(), recall="o1")
    shown = found.text.split("\n")
    runs = [int(times) for times in re.findall(r"above (\d+) times", found.text)]
    plain = sum(not line.startswith("[") for line in shown)
    assert plain + found.hidden_lines + sum(runs) == len(lines)


def test_colours_go_from_text_that_stands_beside_binary_data() -> None:
    data = b"\x1b[1mheader\x1b[0m\n" + bytes(range(256)) * 200 + b"\n 1%\r 99%\rdone\n"
    found = condense("./run", data, recall="o1")
    assert found.text.startswith("header\n") and found.text.endswith("]\ndone\n")


def test_a_line_as_long_as_a_file_is_shown_in_part() -> None:
    found = condense("./run", b"a" + b"x" * 3_000_000 + b"z\n", recall="o1")
    assert 'characters of this line hidden: recall("o1")]' in found.text
    assert found.text.startswith("axxx") and found.text.endswith("xz\n")


def test_what_is_no_text_is_only_counted() -> None:
    data = b"header\n" + bytes(range(256)) * 200 + b"\nthe end\n"
    found = condense("cat x", data, recall="o1")
    assert found.text.startswith("header\n") and found.text.endswith("the end\n")
    assert "of binary data hidden" in found.text


def test_text_may_be_given_as_text() -> None:
    assert condense("ls", "café\n") == condense("ls", "café\n".encode())


def test_both_streams_can_be_had_apart() -> None:
    condenser = Condenser("./run", apart=True)
    condenser.feed(b"out\n", "stdout")
    condenser.feed(b"oops\n", "stderr")
    found = condenser.finish(1)
    assert (found.text, found.stdout, found.stderr) == ("out\noops\n", "out\n", "oops\n")


@pytest.mark.parametrize(
    "line",
    ["ValueError: x", "3 failed, 10 passed", "E   assert 1 == 2", "sh: x: command not found",
     "error[E0308]: mismatched", "OOMKilled", "npm ERR! code E404", "make: *** [all] Error 1"],
)  # fmt: skip
def test_this_speaks_of_a_failure(line: str) -> None:
    assert looks_like_failure(line)


@pytest.mark.parametrize(
    "line",
    ["0 errors, 0 warnings", "Compiling thiserror v1.0", "Collecting exceptiongroup", "living room",
     "tests/errors.py::test_x PASSED [ 3%]", "--- PASS: TestError (0.00s)", "found no errors"],
)  # fmt: skip
def test_this_does_not(line: str) -> None:
    assert not looks_like_failure(line)


def test_every_family_has_a_name_and_is_found_by_it() -> None:
    assert all(family.name and family.programs for family in FAMILIES)


def test_the_fuzz_target_holds_for_what_it_starts_from() -> None:
    target = runpy.run_path(str(Path(__file__).parents[2] / "fuzz" / "condense.py"))
    for seed in target["seeds"]():
        target["one_input"](seed)
        target["one_input"](seed[:-1] + b"\xff")


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_character_that_was_cut_makes_an_output_no_longer(cut: int) -> None:
    for data in ("🐇".encode()[:cut], ("hop 🐇\n" * 300).encode()[: -5 + cut]):
        found = condense("head -c 9 file", data)
        assert len(found.text.encode()) <= len(data)
