"""Magics: `!command`, `%magic` and `name?`, as in notebooks.

Only a cell that is not valid Python is rewritten, and in it only lines that begin a statement: a
`%` in a string or inside an expression is left alone. Each such line becomes a call of
`__magic__`, the Magic of this kernel, on the same line, so that line numbers do not change.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from .signals import undisturbed

# name, name.name, name[0], a, b
_TARGET = r"[A-Za-z_][\w.]*(?:\[[^\]=]*\])?"
_ASSIGNED = re.compile(rf"({_TARGET}(?:\s*,\s*{_TARGET})*)\s*=\s*([!%])(?!=)(.+)", re.DOTALL)
_HELP = re.compile(rf"(\?{{1,2}})?\s*({_TARGET})\s*(\?{{1,2}})?\s*$")
_WORD = re.compile(r"[A-Za-z_]\w*")
_STRING = re.compile(r"\"\"\"|'''|\"|'")


def rewrite(source: str) -> str | None:
    """`source` as Python, or None if there is no magic in it."""
    lines = source.split("\n")
    first = next((at for at, line in enumerate(lines) if line.strip()), 0)
    if lines[first].startswith("%%"):
        return _whole_cell(lines, first)
    changed = False
    statements = _statements(lines)
    for start, end in statements:
        text = "\n".join(lines[start:end])
        body = text.lstrip()
        call = _call(body)
        if call is not None:
            indent = text[: len(text) - len(body)]
            lines[start:end] = [indent + call, *[""] * (end - start - 1)]
            changed = True
    return "\n".join(lines) if changed else None


def _whole_cell(lines: list[str], first: int) -> str:
    name, _, rest = lines[first][2:].strip().partition(" ")
    body = "\n".join(lines[first + 1 :])
    if name == "time":
        # The body stays part of the cell: its last value is shown, and lines keep their numbers.
        clock = "__magic__.start_clock()"
        return "\n".join([*lines[:first], clock, *(rewrite(body) or body).split("\n")])
    return "\n" * first + f"__magic__.cell({name!r}, {rest.strip()!r}, {body!r})"


def _call(body: str) -> str | None:
    """The call for a magic, or None if this statement is not one."""
    if body.startswith(("!", "%")):
        return _invoked(body[0], body[1:])
    if assigned := _ASSIGNED.fullmatch(body):
        targets, sign, rest = assigned.groups()
        return f"{targets} = {_invoked(sign, rest, captured=True)}"
    question = _HELP.fullmatch(body)
    if question and (question[1] or question[3]):
        return f"__magic__.explain({question[2]!r}, {question[1] == '??' or question[3] == '??'})"
    return None


def _invoked(sign: str, rest: str, captured: bool = False) -> str:
    rest = rest.replace("\\\n", " ").strip()
    if sign == "!":
        return f"__magic__.{'lines_of' if captured else 'shell'}({rest!r})"
    name = _WORD.match(rest)
    word = name[0] if name else rest
    return f"__magic__.line({word!r}, {rest[len(word) :].strip()!r})"


def _statements(lines: list[str]) -> Iterator[tuple[int, int]]:
    """The first line of each statement, and the line after it.

    A statement extends over brackets, long strings and backslashes. While this is iterated, lines
    may be replaced, but not added or removed.
    """
    at = 0
    while at < len(lines):
        start, depth, quote = at, 0, ""
        special = _call(lines[at].lstrip()) is not None
        while True:
            line = lines[at]
            at += 1
            if not special:
                depth, quote = _after(line, depth, quote)
            if at >= len(lines) or not (depth or quote or line.endswith("\\")):
                break
        yield start, at


def _after(line: str, depth: int, quote: str) -> tuple[int, str]:
    """How many brackets, and which long string, are still open after a line."""
    at = 0
    while at < len(line):
        character = line[at]
        if quote:
            if character == "\\":
                at += 1
            elif line.startswith(quote, at):
                at += len(quote) - 1
                quote = ""
        elif character == "#":
            break
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth = max(0, depth - 1)
        elif opening := _STRING.match(line, at):
            quote = opening[0]
            at += len(quote) - 1
        at += 1
    # A short string ends with its line, unless a backslash carries it over.
    if len(quote) == 1 and not line.endswith("\\"):
        quote = ""
    return depth, quote


_PLACE = re.compile(r"\{\{([^{}]*)\}\}|\{([^{}]+)\}|\$\$|\$([A-Za-z_]\w*)")
_PIP = re.compile(r"^\s*pip3?(?=\s|$)")

Names = dict[str, object]


class Magic:
    """The magics of one kernel. `namespace` has the variables of the user."""

    def __init__(self, namespace: Names) -> None:
        self._namespace = namespace
        self._started: tuple[float, float] | None = None
        self._before = os.path.expanduser("~")  # where `%cd -` goes
        self._lines: dict[str, Callable[[str, Names], Any]] = {
            "cd": self._cd,
            "env": self._env,
            "pip": self._pip,
            "pwd": lambda rest, names: os.getcwd(),
            "reset": self._reset,
            "time": self._time,
            "timeit": self._timeit,
            "who": self._who,
            # Accepted, but without effect: figures are always shown, and there is no IPython shell.
            **dict.fromkeys(("autoreload", "config", "load_ext", "matplotlib"), lambda r, n: None),
        }
        self._cells: dict[str, Callable[[str, str, Names], Any]] = {
            "bash": self._script,
            "sh": self._script,
            "timeit": lambda rest, body, names: _timed(rest, body, names),
            "writefile": self._write,
        }

    # --- called by rewritten cells ------------------------------------------------------

    def line(self, name: str, rest: str) -> object:
        """`%name rest`"""
        if name not in self._lines:
            known = ", ".join(f"%{magic}" for magic in self._lines)
            raise NameError(f"there is no magic %{name} here; there are {known}")
        return self._lines[name](rest, _names(sys._getframe(1)))

    def cell(self, name: str, rest: str, body: str) -> object:
        """`%%name rest` at the top of a cell."""
        if name not in self._cells:
            known = ", ".join(f"%%{magic}" for magic in [*self._cells, "time"])
            raise NameError(f"there is no magic %%{name} here; there are {known}")
        return self._cells[name](rest, body, self._namespace)

    def shell(self, command: str) -> None:
        """`!command`: run it; its output is the output of the cell."""
        self._run(_filled(command, _names(sys._getframe(1))))

    def lines_of(self, command: str) -> list[str]:
        """`name = !command`: its output as lines."""
        command = _filled(command, _names(sys._getframe(1)))
        return self._run(command, stdout=subprocess.PIPE).splitlines()

    def explain(self, name: str, source: bool) -> None:
        """`name?`, and `name??` with its source."""
        print(_explained(eval(name, _names(sys._getframe(1))), name, source))

    def start_clock(self) -> None:
        """`%%time`: `stop_clock` prints the time after the cell."""
        self._started = time.perf_counter(), time.process_time()

    def stop_clock(self) -> None:
        if self._started:
            started, self._started = self._started, None
            _print_time(*started)

    # --- what they do -------------------------------------------------------------------

    def _run(self, command: str, **options: Any) -> str:
        for name in ("stdout", "stderr"):
            if stream := getattr(sys, name, None):
                stream.flush()
        if _PIP.match(command):
            command = _PIP.sub(f"{shlex.quote(sys.executable)} -m pip", command)
        shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
        program = None
        try:
            with undisturbed():  # an interrupt inside Popen would lose track of the command
                # In a session of its own, so that an interrupt ends all of it, not only the shell.
                program = subprocess.Popen(
                    [shell, "-c", command], start_new_session=True, **options
                )
            output = program.stdout.read() if program.stdout else b""
            code = program.wait()
        except BaseException:
            if program:
                _end(program)
            raise
        finally:
            if program and program.stdout:
                program.stdout.close()
        self._namespace["_exit_code"] = code if code >= 0 else 128 - code
        importlib.invalidate_caches()  # it may have been pip
        return bytes(output).decode("utf-8", "replace")

    def _pip(self, rest: str, names: Names) -> None:
        self._run("pip " + _filled(rest, names))
        if code := self._namespace["_exit_code"]:
            raise RuntimeError(f"pip ended with exit code {code}")

    def _script(self, rest: str, body: str, names: Names) -> None:
        self._run(body)
        if code := self._namespace["_exit_code"]:
            raise RuntimeError(f"the script ended with exit code {code}")

    def _cd(self, rest: str, names: Names) -> None:
        wanted = _filled(rest.strip("\"'"), names) or "~"
        target = self._before if wanted == "-" else os.path.expanduser(wanted)
        try:
            here = os.getcwd()
        except OSError:
            here = self._before  # the folder we are in was deleted
        os.chdir(target)
        self._before = here
        print(os.getcwd())

    def _env(self, rest: str, names: Names) -> Any:
        name, *value = re.split(r"=|\s+", rest, maxsplit=1)
        if not name:
            return dict(os.environ)
        if not value:
            return os.environ.get(name)
        os.environ[name] = _filled(value[0].strip(), names)
        return None

    def _time(self, rest: str, names: Names) -> object:
        started = time.perf_counter(), time.process_time()
        try:
            return _evaluated(rest, names)
        finally:
            _print_time(*started)

    def _timeit(self, rest: str, names: Names) -> None:
        _timed(rest, "", names)

    def _who(self, rest: str, names: Names) -> None:
        mine = [name for name in self._namespace if not name.startswith("_")]
        print("  ".join(mine) or "no names yet")

    def _reset(self, rest: str, names: Names) -> None:
        for name in [name for name in self._namespace if not name.startswith("__")]:
            del self._namespace[name]

    def _write(self, rest: str, body: str, names: Names) -> None:
        words = shlex.split(_filled(rest, names))
        more = bool(words) and words[0] in ("-a", "--append")
        paths = words[1:] if more else words
        if len(paths) != 1:
            raise ValueError("write one file: %%writefile [-a] path")
        path = os.path.expanduser(paths[0])
        known = os.path.exists(path)
        with open(path, "a" if more else "w", encoding="utf-8") as file:
            file.write(body if body.endswith("\n") or not body else body + "\n")
        print(f"{'Appending to' if more else 'Overwriting' if known else 'Writing'} {paths[0]}")


def _names(frame: FrameType) -> Names:
    """The names that are visible where a magic was called."""
    if frame.f_locals is frame.f_globals:
        return frame.f_globals
    return {**frame.f_globals, **frame.f_locals}


def _filled(command: str, names: Names) -> str:
    """Replace `{expression}` and `$name` that Python knows; the shell gets the rest."""

    def fill(place: re.Match[str]) -> str:
        doubled, expression, name = place.groups()
        if place[0] == "$$":
            return "$"
        if doubled is not None:
            return "{" + doubled + "}"
        if name is not None:
            return str(names[name]) if name in names else place[0]
        # A bare name must be one of the user: `{print}` is awk.
        if expression.isidentifier() and expression not in names:
            return place[0]
        try:
            return str(eval(expression, names))
        except Exception:
            return place[0]

    return _PLACE.sub(fill, command)


def _evaluated(code: str, names: Names) -> object:
    """Run one statement. Returns its value if it is an expression."""
    try:
        expression = compile(code, "<magic>", "eval")
    except SyntaxError:
        exec(compile(code, "<magic>", "exec"), names)
        return None
    return eval(expression, names)


def _timed(rest: str, body: str, names: Names) -> None:
    """`%timeit [-n loops] [-r rounds] statement`; of `%%timeit`, the first line is the setup."""
    loops, rounds = 0, 7
    while option := re.match(r"-([nr])\s*(\d+)\s*", rest):
        loops, rounds = (
            (int(option[2]), rounds) if option[1] == "n" else (loops, max(1, int(option[2])))
        )
        rest = rest[option.end() :]
    statement, setup = (body, rest) if body else (rest, "pass")
    ast.parse(statement)  # so that a syntax error is about what the user wrote
    timer = timeit.Timer(statement, setup or "pass", globals=names)
    loops = loops or timer.autorange()[0]
    times = [seconds / loops for seconds in timer.repeat(rounds, loops)]
    mean = sum(times) / len(times)
    spread = (sum((seconds - mean) ** 2 for seconds in times) / len(times)) ** 0.5
    print(
        f"{_duration(mean)} ± {_duration(spread)} per loop "
        f"(mean ± std. dev. of {rounds} runs, {loops:,} loops each)"
    )


def _print_time(started: float, worked: float) -> None:
    wall, cpu = time.perf_counter() - started, time.process_time() - worked
    print(f"CPU times: {_duration(cpu)}\nWall time: {_duration(wall)}")


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _explained(thing: Any, name: str, source: bool) -> str:
    try:
        signature = f"{name}{inspect.signature(thing)}"
    except (TypeError, ValueError):
        signature = name
    about = inspect.getdoc(thing) or "(no documentation)"
    if source:
        try:
            about = inspect.getsource(thing)
        except (OSError, TypeError):
            pass  # built in: it has no source
    return f"{signature}\nType: {type(thing).__name__}\n\n{about}"


def _end(program: subprocess.Popen[bytes]) -> None:
    """End a command and what it started: SIGINT, then SIGKILL."""
    with undisturbed():
        for number in (signal.SIGINT, signal.SIGKILL):
            try:
                os.killpg(program.pid, number)
                program.wait(1)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass
