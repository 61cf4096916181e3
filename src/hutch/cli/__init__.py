"""The `hutch` command. Each subcommand is a module of this package, imported on demand."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from hutch import __version__
from hutch.backends.spawn import spawn_launcher
from hutch.factory import NAMES

TYPE_CHECKING = False  # importing `typing` takes 5 ms, and the launcher should start first
if TYPE_CHECKING:
    from typing import NoReturn

BOXES = {
    "run": "run a command in a fresh box",
    "python": "run Python as a notebook would, in a fresh box or a session",
    "shell": "open a terminal in a fresh box or a session",
    "mcp": "serve tools to an agent's client (Model Context Protocol)",
    "gain": "show how much output agents did not have to read",
    "kernel": "keep a Python kernel behind a UNIX socket, as KernelLite did",
    "image": "build, pull, import and list images",
    "kubernetes": "prepare a cluster for boxes, and for a server that makes them",
    "doctor": "show how well this machine can isolate, and how to improve it",
    "completion": "print the completion for a shell: bash, zsh or fish",
}
SERVER = {
    "init": "write a config file for a server, and make the first key",
    "config": "check the settings of a server",
    "serve": "serve sessions over HTTP",
    "stop": "stop the server of this machine; sessions keep running",
    "dashboard": "open the dashboard of a server in a browser, logged in",
    "key": "make, list, extend, rotate and revoke keys of a server",
    "audit": "show who did what on a server, and verify the log",
}
SESSIONS = {
    "create": "open a session",
    "ps": "list sessions",
    "exec": "run a command in a session",
    "logs": "show what happened in a session",
    "cp": "copy files between this machine, sessions and workspaces",
    "stats": "show what sessions use now",
    "rm": "end sessions",
    "workspace": "list, fill and remove folders that outlive sessions",
}
LOADS_SSL = ("image", "kubernetes", "mcp", "completion")
COMMANDS = {**BOXES, **SERVER, **SESSIONS}
# What similar programs call these commands.
OTHER_NAMES = {
    "attach": "shell SESSION",
    "build": "image build",
    "delete": "rm",
    "events": "audit -f",
    "generate-shell-completion": "completion",
    "images": "image ls",
    "info": "doctor",
    "inspect": "ps --json",
    "kill": "rm",
    "list": "ps",
    "ls": "ps",
    "prune": "image prune",
    "pull": "image pull",
    "remove": "rm",
    "rmi": "image rm",
    "session": "ps",
    "sessions": "ps",
    "start": "serve",
    "sync": "run --project . -- COMMAND",
    "system": "image prune",
    "top": "stats",
    "volume": "workspace",
}
DESTRUCTIVE = ("rm", "stop")  # suggested last
FAILED, INTERRUPTED, BROKEN_PIPE = 125, 130, 141

HELP = """\
usage: hutch COMMAND [options]

Runs untrusted code in a box: a sandbox with its own files and programs, with
limits, without network, and without access to your files or secrets.

commands:
{boxes}

a server, and sessions on it:
{server}

{sessions}

options:
  --help       show this, or the help of a command: hutch run --help
  --version    show the version

examples:
  hutch run -- python3 -c "print('hello from a box')"
  hutch run --workspace . --timeout 60 -- make test
  hutch python -c "sum(range(10))"
  hutch shell
"""


def main() -> NoReturn:
    """Run the command line and exit the process with its exit code."""
    try:
        code = _main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        code = BROKEN_PIPE
    except OSError as exc:
        screen = import_module(".screen", __name__)
        screen.complain(screen.cannot_go_on(exc), error=True)
        code = FAILED
    # Not sys.exit: everything is closed, and the interpreter's shutdown would take 30 ms.
    os._exit(code)


def _main(words: list[str]) -> int:
    _open_standard_files()
    first, rest = (words[0], words[1:]) if words else ("--help", [])
    if first == "help":
        first, rest = (rest[0], [*rest[1:], "--help"]) if rest else ("--help", [])
    if first in ("-h", "--help"):
        print(_help(), end="")
        return 0
    if first in ("-v", "-V", "--version", "version"):
        print("hutch", __version__)
        return 0
    if first not in COMMANDS:
        import_module(".screen", __name__).complain(_unknown(first), error=True)
        return FAILED
    # Before anything else is imported, so that it starts on another core at the same time.
    launcher = _start_launcher() if _makes_a_box(first, rest) else None
    if first in BOXES and first not in LOADS_SSL and not _is_elsewhere(first, rest):
        sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]  # asyncio imports it needlessly
    command = import_module(f".{first}", __name__)
    HutchError = import_module("hutch.errors").HutchError  # the command has loaded it already
    try:
        code: int = command.main(rest, launcher)
    except HutchError as exc:
        import_module(".screen", __name__).complain(str(exc), error=True)
        return FAILED
    return code


def _start_launcher() -> tuple[int, int] | None:
    try:
        return spawn_launcher()
    except OSError:
        return None  # the backend tries again later, and reports the error


def _makes_a_box(command: str, words: list[str]) -> bool:
    if words[:1] in (["-h"], ["--help"]) or _is_elsewhere(command, words):
        return False
    return command in ("shell", "python") or (command == "run" and bool(words))


def _is_elsewhere(command: str, words: list[str]) -> bool:
    """Whether a server or another backend makes the box.

    A guess, made before options are parsed; a wrong guess only costs time.
    """
    if os.environ.get("HUTCH_URL") or os.environ.get("HUTCH_BACKEND", NAMES[0]) != NAMES[0]:
        return True
    named = {word.partition("=")[0] for word in words}
    if named & {"--url", "--session", "--backend"}:
        return True
    return command == "shell" and any(map(may_be_session, words))


def is_session(word: str) -> bool:
    """Whether the word has the form of a session id, which no program name has."""
    return len(word) in (12, 36) and set(word) <= set("0123456789abcdef-") and "-" in word


def may_be_session(word: str) -> bool:
    """Whether the word may be the start of a session id rather than a program's name."""
    return set(word) <= set("0123456789abcdef-") and any(map(str.isdigit, word))


def _open_standard_files() -> None:
    """Open 0, 1 and 2 if they are closed, so that no other file gets one of these numbers."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # Read-only, so that writing to a closed stdout fails instead of losing output.
            os.open("/dev/null", os.O_RDONLY if fd == 1 else os.O_RDWR)
            if fd == 1:
                sys.stdout = open(1, "w", closefd=False)


def _help() -> str:
    parts = {"boxes": BOXES, "server": SERVER, "sessions": SESSIONS}
    rows = {
        part: "\n".join(f"  {name:12} {what}" for name, what in commands.items())
        for part, commands in parts.items()
    }
    return HELP.format(**rows)


def _unknown(word: str) -> str:
    if word.startswith("-"):
        return f"unknown option {word!r}; see hutch --help"
    near = OTHER_NAMES.get(word)
    if near is None:
        near = _nearest(word)
    if near:
        return f"unknown command {word!r}: did you mean `hutch {near}`?"
    return f"unknown command {word!r}; to run it in a box: hutch run -- {word}"


def _nearest(word: str) -> str | None:
    near = import_module("difflib").get_close_matches
    matches: list[str] = near(word, COMMANDS, n=1, cutoff=0.7)
    if matches and matches[0] in DESTRUCTIVE:
        harmless = [name for name in COMMANDS if name not in DESTRUCTIVE]
        matches = near(word, harmless, n=1, cutoff=0.6) or matches
    return matches[0] if matches else None
