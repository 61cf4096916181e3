"""The `hutch` command. Each command is a module of this package, loaded when it is asked for."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from hutch import __version__
from hutch.backends.spawn import spawn_launcher
from hutch.factory import NAMES

TYPE_CHECKING = False  # `typing` itself takes 5 ms, and there is a launcher to be started first
if TYPE_CHECKING:
    from typing import NoReturn

BOXES = {
    "run": "run a command in a fresh box",
    "python": "run Python as a notebook would, in a fresh box or a session",
    "shell": "open a terminal in a fresh box or a session",
    "mcp": "serve tools to an agent's client (Model Context Protocol)",
    "gain": "show how much less agents had to read",
    "kernel": "keep a Python kernel behind a UNIX socket, as KernelLite did",
    "image": "build, pull, import and list images",
    "doctor": "show how well this machine can isolate, and how to improve it",
    "completion": "print the completion for a shell: bash, zsh or fish",
}
SERVER = {
    "init": "write a config file for a server, and make the first key",
    "config": "check the settings of a server",
    "serve": "serve sessions over HTTP",
    "stop": "stop the server of this machine; sessions go on",
    "key": "make, list, extend, rotate and revoke keys to a server",
    "audit": "show who did what at a server, and check the log",
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
LOADS_SSL = ("image", "mcp", "completion")
COMMANDS = {**BOXES, **SERVER, **SESSIONS}
# What other programs call it.
OF_OTHERS = {
    "build": "image build", "images": "image ls", "info": "doctor", "inspect": "ps --json",
    "kill": "rm", "list": "ps", "ls": "ps", "pull": "image pull", "start": "serve",
    "volume": "workspace",
}  # fmt: skip
FAILED, INTERRUPTED, BROKEN_PIPE = 125, 130, 141

HELP = """\
usage: hutch COMMAND [options]

Runs code that you do not trust in a box: a place with files and programs of its
own, with limits, without network, and with no way to your files or secrets.

commands:
{boxes}

a server, and sessions on it:
{server}

{sessions}

options:
  --help       show this, or the help of a command: hutch run --help
  --version    show the version, as does `hutch version`

examples:
  hutch run -- python3 -c "print('hello from a box')"
  hutch run --workspace . --timeout 60 -- make test
  hutch python -c "sum(range(10))"
  hutch shell
"""


def main() -> NoReturn:
    """Carry out the command line, and end the process with its exit code."""
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
    # Not sys.exit: everything is closed, and Python would take 30 ms to take itself apart.
    os._exit(code)


def _main(words: list[str]) -> int:
    _open_standard_files()
    first, rest = (words[0], words[1:]) if words else ("--help", [])
    if first == "help":
        first, rest = (rest[0], [*rest[1:], "--help"]) if rest else ("--help", [])
    if first in ("-h", "--help"):
        print(_help(), end="")
        return 0
    if first in ("-V", "--version", "version"):
        print("hutch", __version__)
        return 0
    if first not in COMMANDS:
        import_module(".screen", __name__).complain(_unknown(first), error=True)
        return FAILED
    # Before anything else is imported: it gets warm on another core while we do.
    launcher = _start_launcher() if _makes_a_box(first, rest) else None
    if first in BOXES and first not in LOADS_SSL and not _is_elsewhere(first, rest):
        sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]  # asyncio loads it for nothing
    command = import_module(f".{first}", __name__)
    code: int = command.main(rest, launcher)
    return code


def _start_launcher() -> tuple[int, int] | None:
    try:
        return spawn_launcher()
    except OSError:
        return None  # whoever needs it tries again, and can say what is wrong


def _makes_a_box(command: str, words: list[str]) -> bool:
    if words[:1] in (["-h"], ["--help"]) or _is_elsewhere(command, words):
        return False
    return command in ("shell", "python") or (command == "run" and bool(words))


def _is_elsewhere(command: str, words: list[str]) -> bool:
    """Whether somebody else makes the box: a server, or another backend.

    A guess, before options are read: it costs only time.
    """
    if os.environ.get("HUTCH_URL") or os.environ.get("HUTCH_BACKEND", NAMES[0]) != NAMES[0]:
        return True
    named = {word.partition("=")[0] for word in words}
    if named & {"--url", "--session", "--backend"}:
        return True
    return command == "shell" and any(map(may_be_session, words))


def is_session(word: str) -> bool:
    """Whether it has the form of a session's id, which no program has."""
    return len(word) in (12, 36) and set(word) <= set("0123456789abcdef-") and "-" in word


def may_be_session(word: str) -> bool:
    """Whether it can be the beginning of one, and is no name that programs have."""
    return set(word) <= set("0123456789abcdef-") and any(map(str.isdigit, word))


def _open_standard_files() -> None:
    """Give 0, 1 and 2 a meaning where they are closed, or our next descriptor would be one."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # Output that is asked for and cannot be had must not vanish: writing to 1 fails.
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
        return f"there is no option {word!r} here; see hutch --help"
    near = OF_OTHERS.get(word)
    if near is None:
        matches = import_module("difflib").get_close_matches(word, COMMANDS, n=1, cutoff=0.7)
        near = matches[0] if matches else None
    if near:
        return f"there is no command {word!r}: did you mean `hutch {near}`?"
    return f"there is no command {word!r}; to run it in a box: hutch run -- {word}"
