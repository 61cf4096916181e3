"""Tests, installs, checks, builds, containers: what a model still reads of what they printed."""

from __future__ import annotations

import json

import pytest

from hutch.tools.condense import FAMILIES, condense
from hutch.tools.condense.family import CommandLine, Hidden


def read(command: str, *lines: str, exit_code: int = 0) -> str:
    return condense(command, ("\n".join(lines) + "\n").encode(), exit_code, recall="k7f3").text


def family_of(*argv: str) -> str:
    return next((f.name for f in FAMILIES if f.knows(CommandLine(argv, 0))), "")


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ("pytest -q", "pytest"), ("jest", "jest"), ("vitest run", "jest"), ("go test .", "go test"),
        ("go vet ./...", "checks"), ("go build ./...", ""), ("cargo test", "cargo test"),
        ("cargo nextest run", "cargo test"), ("cargo clippy", "cargo build"), ("cargo -V", ""),
        ("pip install x", "pip install"), ("uv pip install x", "pip install"),
        ("uv add x", "pip install"), ("pip list", "pip list"), ("npm ci", "npm install"),
        ("yarn", "npm install"), ("npm ls", "npm ls"), ("npm run build", ""), ("pip show x", ""),
        ("ruff check .", "checks"), ("ruff format .", ""), ("mypy .", "checks"), ("tsc", "checks"),
        ("docker build .", "docker build"), ("docker ps", "containers"),
        ("docker logs web", "container logs"), ("kubectl get pods", "containers"),
        ("kubectl -n shop logs web", "container logs"), ("docker ps -q", ""), ("make -j8", "make"),
        ("kubectl get pods -o yaml", ""), ("cmake --build .", "make"), ("gcc a.c", "make"),
    ],
)  # fmt: skip
def test_a_call_has_the_family_of_its_program_and_action(argv: str, name: str) -> None:
    assert family_of(*argv.split()) == name


# ------------------------------------------------------------------------------------- pytest


def test_passed_tests_are_counted_and_a_failed_one_is_shown_where_it_stood() -> None:
    passed = [f"tests/test_a.py::test_{n} PASSED       [ {n}%]" for n in range(60)]
    text = read(
        "pytest -v", "=== test session starts ===", "rootdir: /w", "collected 61 items",
        *passed[:30], "tests/test_a.py::test_bad FAILED   [ 50%]", *passed[30:],
        "== 1 failed, 60 passed in 1.2s ==",
        exit_code=1,
    )  # fmt: skip
    assert "60 lines of passed and skipped tests hidden: recall" in text
    assert "tests/test_a.py::test_bad FAILED" in text and "1 failed, 60 passed" in text
    assert "test_7 PASSED" not in text


def test_a_test_that_passed_may_be_called_what_it_likes() -> None:
    names = [f"tests/test_a.py::test_it[ValueError: invalid {n}] PASSED" for n in range(60)]
    text = read("pytest -v", "=== test session starts ===", *names, "=== 60 passed in 1s ===")
    assert len(text) < 200


def test_of_a_test_that_failed_the_statement_the_reason_and_the_place_are_shown() -> None:
    body = [f"        step_{n}()" for n in range(40)]
    text = read(
        "pytest", "=== FAILURES ===", "____ test_long ____", "", "    def test_long():", *body,
        ">       assert 1 == 2", "E       assert 1 == 2", "", "tests/test_a.py:44: AssertionError",
        "=== 1 failed in 1s ===", exit_code=1,
    )  # fmt: skip
    for kept in ("test_long", ">       assert 1 == 2", "E       assert 1 == 2", "test_a.py:44"):
        assert kept in text
    assert "[41 lines of source hidden" in text and "step_20()" not in text


def test_a_short_traceback_of_pytest_keeps_each_statement() -> None:
    frames = [
        line
        for n in range(12)
        for line in (
            f"src/part_{n}.py:{n}: in call_{n}",
            f"    return next_{n}()",
            "    ^^^^^^^^^^",
        )
    ]
    text = read(
        "pytest --tb=short", "=== FAILURES ===", "____ test_a ____", *frames, "E   assert 1 == 2",
        "=== short test summary info ===", "FAILED a.py::test_a - assert 1 == 2",
        "=== 1 failed in 1s ===", exit_code=1,
    )  # fmt: skip
    assert all(f"in call_{n}\n    return next_{n}()\n" in text for n in range(12))
    assert "^^^" not in text and "FAILED a.py::test_a\n" in text


RUSTC = """\
error[E0308]: mismatched types
  --> src/main.rs:7:35
   |
7  |     let names: Vec<String> = vec![1, 2]; // as many as there are, in the order they came
   |                                   ^ expected `String`, found integer
   |
help: try using a conversion method
   |
7  |     let names: Vec<String> = vec![1.to_string(), 2];
   |                                    ++++++++++++

warning: length comparison to zero
 --> src/main.rs:6:16
  |
6 |     let x = if names.len() == 0 { true } else { false }; // so that what follows can tell
  |                ^^^^^^^^^^^^^^^^ help: using `is_empty` is clearer: `names.is_empty()`
  |
  = help: for further information visit https://rust-lang.github.io/rust-clippy/index.html#len_zero
  = note: `#[warn(clippy::len_zero)]` on by default
""".splitlines()


def test_what_rustc_says_stays_and_the_source_around_it_goes() -> None:
    end = 'error: could not compile `app` (bin "app") due to 1 previous error; 1 warning emitted'
    assert read("cargo clippy", *RUSTC, end, exit_code=101).splitlines() == [
        "error[E0308]: mismatched types", "  --> src/main.rs:7:35",
        "  expected `String`, found integer", "help: try using a conversion method",
        "  let names: Vec<String> = vec![1.to_string(), 2];", "",
        "warning: length comparison to zero", " --> src/main.rs:6:16",
        "  help: using `is_empty` is clearer: `names.is_empty()`", "  = clippy::len_zero", end,
        "[10 lines of source around these places, 1 line of advice, and notes that are above "
        'hidden: recall("k7f3")]',
    ]  # fmt: skip


# As ruff 0.15 prints it: lines that it would remove have no number.
RUFF = """\
E711 Comparison to `None` should be `cond is None`
 --> app.py:9:17
   |
 8 | class A:
 9 |     if a == None: return True
   |             ^^^^
10 |     last = 0  # with a remark that is longer than all that is said of the line above it
11 |               # so that all of this is longer than what is shown as it is
   |
help: Replace with `cond is None`
   |
 8 | class A:
   -     if a == None: return True
9  +     if a is None: return True
10 |     last = 0  # with a remark that is longer than all that is said of the line above it
11 |               # so that all of this is longer than what is shown as it is
   |
note: This is an unsafe fix and may change runtime behavior

F401 [*] `os` imported but unused
 --> app.py:1:8
  |
1 | import os
  |        ^^
  |
help: Remove unused import
  |
  - import os
1 | from typing import TypeVar
  |

D100 Missing docstring in public module
--> app.py:1:1

""".splitlines()


def test_of_what_ruff_would_change_no_line_is_taken_for_a_message() -> None:
    assert read("ruff check", *RUFF, "Found 3 errors.", exit_code=1).splitlines() == [
        "app.py",
        "  9:17: E711 Comparison to `None` should be `cond is None`",
        "  1:8: F401 [*] `os` imported but unused",
        "  1:1: D100 Missing docstring in public module",
        '[25 lines of source around these places hidden: recall("k7f3")]',
        "Found 3 errors.",
    ]


def test_of_a_change_that_rustc_suggests_the_new_lines_are_shown() -> None:
    moved = ["error[E0382]: borrow of moved value: `name`", "  --> src/main.rs:7:35"]
    source = ["   |", *(f"LL |     let name{n} = String::new();" for n in range(30)), "   |"]
    advice = [
        "help: consider borrowing", "   |", "LL |     let kept = 1;", "LL -     take(name);",
        "LL +     take(&name);", "LL |     let other = 2;", "   |",
    ]  # fmt: skip
    text = read("cargo build", *moved, *source, *advice, exit_code=101)
    assert text.splitlines()[:-1] == [*moved, "help: consider borrowing", "  take(&name);"]
    assert text.splitlines()[-1].startswith("[37 lines of source around these places hidden")


def test_frames_of_rusts_own_library_are_hidden() -> None:
    library = "/rustc/59807616e1fa2540724bfbac14d7976d7e4a3860/library/core/src"
    crates = "/home/ann/.cargo/registry/src/index-1949cf8c6b5b557f/rayon-1.10.0/src"
    frames = [
        ("0: core::result::unwrap_failed", f"{library}/result.rs:1867:5"),
        ("1: app::tests::refuses", "./src/lib.rs:9:50"),
        ("2: rayon::join", f"{crates}/join.rs:3:1"),
        *(
            (f"{n}: core::ops::function::FnOnce::call", f"{library}/f.rs:{n}:5")
            for n in range(3, 9)
        ),
    ]
    text = read(
        "cargo test", "running 1 test", "test tests::refuses ... FAILED",
        "---- tests::refuses stdout ----", "thread 'tests::refuses' panicked at src/lib.rs:9:50:",
        *(line for name, at in frames for line in (f"   {name}", f"             at {at}")),
        "test result: FAILED. 0 passed; 1 failed; 0 ignored; finished in 0.8s", exit_code=101,
    )  # fmt: skip
    assert "panicked at src/lib.rs:9:50:\n   1: app::tests::refuses\n             at ./src" in text
    assert text.count(" at ") == 2 and "16 lines of frames of libraries" in text


def test_what_gcc_says_stays_and_the_source_around_it_goes() -> None:
    found = [
        (f"a.c:{n}:5: error: unknown type name ‘word{n}’", f"  {n} |     word{n} x;", "    |     ^")
        for n in range(10, 30)
    ]
    text = read("gcc -c a.c", *(line for lines in found for line in lines), exit_code=1)
    assert text.splitlines()[:-1] == [message for message, *_ in found]
    assert text.splitlines()[-1].startswith("[40 lines of source around these places hidden")


def test_a_traceback_names_every_frame_and_shows_the_source_that_is_ones_own() -> None:
    library = [
        line
        for n in range(12)
        for line in (
            f'  File "/usr/lib/python3.11/urllib/request.py", line {n}, in open_{n}',
            f"    return self.do_{n}()", "           ^^^^^^^^^^",
        )
    ]  # fmt: skip
    text = read(
        "python app.py", "Traceback (most recent call last):",
        '  File "/workspace/app.py", line 3, in main', "    fetch(url)", *library,
        "urllib.error.URLError: <urlopen error [Errno 111] Connection refused>", exit_code=1,
    )  # fmt: skip
    assert "\n  /workspace/app.py:3 in main: fetch(url)\n" in text
    assert all(f"request.py:{n} in open_{n}" in text for n in range(12))
    assert "request.py:11 in open_11: return self.do_11()\nurllib.error.URLError" in text
    assert "do_3()" not in text and "[11 lines of frames of libraries, source hidden" in text


def test_maven_tells_each_error_once_and_gives_no_advice() -> None:
    error = "[ERROR] /w/src/Ring.java:[7,20] incompatible types: String cannot be converted to int"
    text = read(
        "mvn compile", *["[INFO] --- maven-resources-plugin:3.3.1:resources (default) ---"] * 9,
        error, "[INFO] 1 error", "[INFO] BUILD FAILURE", error, "[ERROR] -> [Help 1]",
        "[ERROR] Re-run Maven using the -X switch to enable full debug logging.", exit_code=1,
    )  # fmt: skip
    assert text.count("Ring.java") == 1 and "BUILD FAILURE" in text and "Re-run" not in text


def test_points_of_tap_that_passed_go_with_what_is_below_them() -> None:
    passed = [
        line
        for n in range(30)
        for line in (f"ok {n} - adds {n}", "  ---", "  type: 'test'", "  ...")
    ]
    failed = ["not ok 30 - takes", "  ---", "  error: 'full'", "  ...", "# pass 30", "# fail 1"]
    text = read("node --test", "TAP version 13", *passed, *failed, exit_code=1)
    assert text.splitlines()[:4] == [
        "not ok 30 - takes", "  error: 'full'", "# pass 30", "# fail 1",
    ]  # fmt: skip


def test_tests_of_unittest_that_passed_are_counted() -> None:
    passed = [f"test_{n} (tests.test_a.Case.test_{n}) ... ok" for n in range(40)]
    rule = "-" * 70
    text = read(
        "python -m unittest -v", *passed, "test_bad (tests.test_a.Case.test_bad) ... FAIL",
        rule, "Ran 41 tests in 0.1s", "", "FAILED (failures=1)", exit_code=1,
    )  # fmt: skip
    assert "test_bad" in text and "FAILED (failures=1)" in text and "test_7" not in text


def test_a_diff_under_an_assertion_is_never_cut() -> None:
    diff = [f"E         - expected line {n}" for n in range(80)]
    text = read("pytest", "=== FAILURES ===", "____ test_a ____", *diff, "=== 1 failed in 1s ===",
                exit_code=1)  # fmt: skip
    assert all(line in text for line in diff)


def test_the_same_is_recognised_behind_a_make_target() -> None:
    dots = [f"tests/test_{n}.py ....................   [ {n}%]" for n in range(40)]
    text = read("make test", "python -m pytest", "=== test session starts ===", *dots,
                "=== 800 passed in 3.20s ===")  # fmt: skip
    assert "800 passed" in text and "test_17.py" not in text


# ---------------------------------------------------------------------------- the other runners


def test_what_a_passed_suite_printed_is_kept() -> None:
    checks = [f"    ✓ adds {n} (1 ms)" for n in range(40)]
    text = read(
        "npx jest", "PASS src/a.test.js", "  cart", *checks, "", "  console.warn",
        "    old browser", "", "FAIL src/b.test.js", "  ● cart › pays", "", "    Expected: 1", "",
        "Tests: 1 failed, 40 passed",
        exit_code=1,
    )  # fmt: skip
    for kept in (
        "console.warn",
        "old browser",
        "FAIL src/b.test.js",
        "● cart › pays",
        "Expected: 1",
    ):
        assert kept in text
    assert "adds 7" not in text


def test_events_of_go_are_told_as_go_would() -> None:
    def event(action: str, test: str, output: str = "") -> str:
        return json.dumps({"Action": action, "Package": "p", "Test": test, "Output": output})

    good = [line for n in range(40) for line in (
        event("run", f"TestGood{n}"), event("output", f"TestGood{n}", f"--- PASS: TestGood{n}\n"),
        event("pass", f"TestGood{n}"))]  # fmt: skip
    bad = [event("output", "TestBad", "    a_test.go:7: got 1\n"),
           event("output", "TestBad", "--- FAIL: TestBad\n"), event("fail", "TestBad")]  # fmt: skip
    text = read("go test -json ./...", *good, *bad, exit_code=1)
    assert "    a_test.go:7: got 1\n--- FAIL: TestBad" in text and "TestGood7" not in text
    assert "recall" in text


def test_a_test_that_never_ended_is_not_taken_for_one_that_passed() -> None:
    stuck = [
        json.dumps({"Action": "output", "Package": "p", "Test": "TestA", "Output": f"at {n}\n"})
        for n in range(30)
    ]
    assert "at 29" in read("go test -json", *stuck, exit_code=1)


# Lines that could be taken for something that went well, and are none.
LOUD = (
    "a.py::bad FAILED but PASSED", "FATAL ERROR: db lost, 0 of 9 PASSED", "panic: lost ... ok",
    "test a ... FAILED ... ok", "ok  \tpkg\t0.1s  FATAL ERROR: db lost", "PASS a.js: fatal error",
    "--- PASS: A (0.0s) then panic: lost", "FATAL ERROR, 0 failed", "a_b_c.py FATAL ERROR SKIPPED",
    "  PASS [ 0.1s] a b: segmentation fault", "12-FATAL-ERROR", "Counting objects: fatal error",
    "Collecting a: fatal error", "Compiling a: fatal error", "npm notice: fatal error",
    "gcc -c a.c: fatal error", "#1 DONE fatal error", "at noon a fatal error: PASSED",
    "a.b: x fatal error.txt",
)  # fmt: skip
AROUND = {
    "pytest -v": "a.py::test_{} PASSED [ 1%]", "npx jest": "    ✓ adds {}",
    "go test": "=== RUN T{}",
    "cargo test": "test t{} ... ok", "pip install x": "Collecting a{}", "npm ci": "npm notice {}",
    "make": "gcc -c -o a{0}.o a{0}.c", "docker build .": "#1 DONE {}",
    "docker logs x": "2024-01-02T12:00:00Z INFO request {}",
    "kubectl get pods": "web-{} 1/1 Running 0 3d",
    "git push": "Counting objects: {}%", "ruff check": "a.py:{}:1: E501 Line too long",
    "./run": "{}-ok", "cat x.log": "2024-01-02 12:00:00 INFO request {}",
    "cargo build": "Compiling a{} v1.0",
}  # fmt: skip
AFTER = (
    "Tests: 600 passed",
    "ok  \tp\t0.1s",
    "test result: ok. 600 passed; 0 failed",
    "600 passed in 1.0s",
)


@pytest.mark.parametrize("command", AROUND)
def test_a_loud_line_stays_whatever_else_it_says(command: str) -> None:
    quiet = [AROUND[command].format(n) for n in range(300)]
    for exit_code in (0, 1):
        text = read(command, *quiet, *LOUD, *quiet, *AFTER, exit_code=exit_code)
        assert "hidden" in text or command == "ruff check"
        gone = [line for line in LOUD if line not in text and " ".join(line.split()) not in text]
        assert not gone


def test_what_go_tells_of_a_test_that_passed_is_shown_if_it_is_a_failure() -> None:
    def event(action: str, test: str, output: str = "") -> str:
        return json.dumps({"Action": action, "Package": "p", "Test": test, "Output": output})

    good = [event("output", f"T{n}", f"--- PASS: TestError{n} (0.00s)\n") for n in range(40)]
    text = read("go test -json", *good, event("output", "TA", "fatal error: db lost\n"),
                event("pass", "TA"), *[event("pass", f"T{n}") for n in range(40)])  # fmt: skip
    assert text.startswith("fatal error: db lost\n[") and "TestError" not in text


def test_a_line_of_a_log_is_not_said_twice() -> None:
    lines = [f"2024-01-02T12:00:{n % 60:02}.123456789Z INFO request {n}" for n in range(200)]
    bad = "2024-01-02T12:00:17.123456789Z ERROR disk full"
    for command in ("docker logs web", "kubectl logs web"):
        text = read(command, *lines, bad, *lines)
        assert text.count("ERROR disk full") == 1 and "among what is hidden" not in text


def test_what_ends_like_a_file_name_is_not_lost_among_findings() -> None:
    found = [f"src/a.py:{n}:5: E501 Line too long" for n in range(1, 60)]
    assert "Look at the rules.toml" in read("ruff check", *found, "Look at the rules.toml", *found)


# ---------------------------------------------------------------- installs, checks, builds, tables


def test_a_failed_install_is_word_for_word_from_its_first_error_on() -> None:
    fetched = [f"Collecting package{n}" for n in range(60)]
    error = ["ERROR: Failed building wheel for x", "Collecting nothing more", "  gcc: not found"]
    text = read("pip install x", *fetched, *error, exit_code=1)
    assert "\n".join(error) in text and "package17" not in text


def test_warnings_of_an_install_that_went_well_stay() -> None:
    noise = [f"npm warn deprecated thing{n}@1.0.0: no longer supported" for n in range(40)]
    text = read(
        "npm install", *noise, "npm warn EBADENGINE wanted: node >= 22", "added 40 packages"
    )
    assert "EBADENGINE" in text and "added 40 packages" in text and "thing9" not in text


def test_every_finding_keeps_its_place_code_and_message() -> None:
    found = [f"src/a.py:{n}:5: E501 Line too long" for n in range(1, 40)]
    text = read("ruff check", *found, "src/b.py:3:1: F401 `os` imported but unused",
                "Found 40 errors.", exit_code=1)  # fmt: skip
    assert "F401 `os` imported but unused" in text and "src/b.py" in text and "Found 40" in text
    assert all(f" {n}:5" in text for n in range(1, 40)) and text.count("E501") == 1
    assert "hidden" not in text


def test_a_message_of_several_lines_stays_together() -> None:
    found = [
        f"src/a.ts({n},3): error TS2322: Type 'A' is wrong.\n  Because of {n}." for n in range(20)
    ]
    text = read("tsc --noEmit", *found, exit_code=2)
    assert "Because of 17." in text and "17:3: error TS2322: Type 'A' is wrong." in text


def test_a_command_of_make_stays_if_the_compiler_spoke_about_it() -> None:
    quiet = [f"gcc -O2 -c -o part{n}.o part{n}.c" for n in range(60)]
    text = read("make", *quiet, "gcc -O2 -c -o bad.o bad.c",
                "bad.c:3:1: warning: control reaches end", "    3 | }", "ar r a b.o")  # fmt: skip
    assert "-o bad.o" in text and "bad.c:3:1: warning" in text and "part17.o" not in text


def test_the_last_command_of_a_make_that_failed_stays() -> None:
    quiet = [f"gcc -O2 -c -o part{n}.o part{n}.c" for n in range(60)]
    text = read("make", *quiet, "make: *** [Makefile:3: part59.o] Error 139", exit_code=2)
    assert "part59.c" in text and "Error 139" in text and "part17.c" not in text


def test_of_many_pods_those_in_trouble_are_shown() -> None:
    pods = [f"web-{n:<12} 1/1     Running            0          3d" for n in range(60)]
    bad = "pay-1            0/1     CrashLoopBackOff   17         3h"
    half = "pay-2            1/2     Running            0          3h"
    text = read("kubectl get pods", "NAME             READY   STATUS             RESTARTS   AGE",
                *pods, bad, half)  # fmt: skip
    assert "pay-1  0/1  CrashLoopBackOff  17  3h" in text and "pay-2  1/2" in text
    assert "[60 lines of rows that are well hidden" in text


def test_an_empty_cell_is_still_a_column() -> None:
    rows = [f"id{n:<10}  nginx       Up 2 hours               web{n}" for n in range(30)]
    head = "CONTAINER     IMAGE       STATUS       PORTS       NAMES"
    assert "id7  nginx  Up 2 hours  -  web7" in read("docker ps", head, *rows)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_returns_what_it_does_not_know_without_a_loss(family: object) -> None:
    lines = ["", "what is this", "\t", "a" * 500, "==", "{", "[", "│", "--", "1:2", "Error", "|"]
    for exit_code in (0, 1, None):
        call = CommandLine((*family.programs[:1],), exit_code)  # type: ignore[attr-defined]
        shown = family.shorten(call, list(lines))  # type: ignore[attr-defined]
        hidden = sum(each.lines for each in shown if isinstance(each, Hidden))
        assert sum(isinstance(each, str) and bool(each.strip()) for each in shown) + hidden >= 8
