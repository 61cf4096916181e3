"""Options that describe a box, the same for every command that makes one."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import NoReturn

from hutch import operations as op
from hutch.choose import NAMES
from hutch.client.parse import parse_mounts, parse_size
from hutch.errors import InvalidRequest
from hutch.types import GRADES, RELAXATIONS, Limits, Mount

# Of output that has been shown, how much is kept on disk: nobody can ask for it afterwards.
OUTPUT = 1024 * 1024

_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ms|s|m|h)?")
_SECONDS = {"ms": 0.001, None: 1, "s": 1, "m": 60, "h": 3600}


class Parser(argparse.ArgumentParser):
    """Complains in one line, as InvalidRequest, and guesses what was meant."""

    def error(self, message: str) -> NoReturn:
        raise InvalidRequest(f"{message}; see {self.prog} --help")

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        chosen, rest = self.parse_known_intermixed_args(args)  # options may stand anywhere
        if rest and rest[0].partition("=")[0] in ("--network", "--net"):
            raise InvalidRequest(f"{self.prog} has no option {rest[0]}: boxes have no network yet")
        if rest:
            near = get_close_matches(rest[0].partition("=")[0], self.options(), n=1)
            guess = f": did you mean {near[0]}?" if near else f"; see {self.prog} --help"
            raise InvalidRequest(f"{self.prog} has no option {rest[0]}{guess}")
        return chosen

    def options(self) -> list[str]:
        return [word for action in self._actions for word in action.option_strings]

    def with_value(self) -> set[str]:
        """Options that take the next word, if there is no `=` in them."""
        taking = [action for action in self._actions if action.nargs is None]
        return {word for action in taking for word in action.option_strings}


def make_parser(prog: str, usage: str, description: str, epilog: str) -> Parser:
    return Parser(
        prog=prog, usage=usage, description=description, epilog=epilog, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip


_IMAGES = {
    "": "what is in it: host (the /usr of this machine), one that `hutch image ls` shows, or with "
    "--backend docker any that the engine has or can pull (default: host, or hutch/python)",
    "python": "what is in it (default: python; data has pandas and its like, host is the /usr of "
    "this machine)",
}


def add_box_options(parser: Parser, *, image: str = "") -> None:
    default = op.OpenSession()
    box = parser.add_argument_group("the box")
    box.add_argument("--image", default=image, metavar="NAME", help=_IMAGES[image])
    box.add_argument("--workspace", metavar="DIR",
                     help="show this folder of yours at /workspace; what the box writes there "
                     "keeps the folder's owner")  # fmt: skip
    box.add_argument("--mount", action="append", default=[], metavar="HOST:BOX[:ro]",
                     help="show a file or folder of yours at BOX; may be repeated")  # fmt: skip
    box.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]",
                     help="set a variable; without a value, yours is passed on; may be "
                     "repeated")  # fmt: skip
    box.add_argument("--workdir", default=default.workdir, metavar="PATH",
                     help="where to start; made if it is not there (default: "
                     "/workspace)")  # fmt: skip
    box.add_argument("--user", default=default.user, metavar="NAME",
                     help="who to be: user, root, nobody or a number (default: user); the box's "
                     "root has no power either")  # fmt: skip
    box.add_argument("--backend", default="", metavar="NAME",
                     help=f"what makes it: {', '.join(NAMES)} (default: HUTCH_BACKEND, or "
                     "namespaces)")  # fmt: skip
    box.add_argument("--runtime", default="", metavar="NAME",
                     help="of a container: runsc for gVisor (default: the engine's)")  # fmt: skip
    box.add_argument("--relax", action="append", default=[], metavar="NAME",
                     help="leave this out of a container's hardening: "
                     f"{', '.join(RELAXATIONS)}; may be repeated")  # fmt: skip
    box.add_argument("--url", metavar="URL",
                     help="on this server, with the key in HUTCH_API_KEY (default: HUTCH_URL, or "
                     "here)")  # fmt: skip
    limits = parser.add_argument_group("its limits (sizes like 512m or 2g)")
    limits.add_argument("--memory", default="1g", metavar="SIZE", help="memory (default: 1g)")
    limits.add_argument("--cpus", default="2", metavar="N",
                        help="processors' worth of time (default: 2)")  # fmt: skip
    limits.add_argument("--pids", default="512", metavar="N",
                        help="processes and threads (default: 512)")  # fmt: skip
    limits.add_argument("--disk", metavar="SIZE",
                        help="files outside of workspace and mounts; kept in memory (default: "
                        "half of --memory)")  # fmt: skip
    limits.add_argument("--min-isolation", default="ns", metavar="GRADE",
                        help=f"fail if less can be had: {', '.join(GRADES)} "
                        "(default: ns)")  # fmt: skip


def split(words: list[str], with_value: set[str]) -> tuple[list[str], list[str]]:
    """Our options, and the command: after `--`, or from the first word that is no option on."""
    place = 0
    while place < len(words):
        word = words[place]
        if word == "--":
            return words[:place], words[place + 1 :]
        if not word.startswith("-"):
            return words[:place], words[place:]
        place += 2 if word in with_value else 1
    return words, []


def to_operation(chosen: argparse.Namespace) -> op.OpenSession:
    """The box that was asked for. Raises InvalidRequest."""
    try:
        mounts = parse_mounts(chosen.mount, chosen.workspace)
    except FileNotFoundError:
        raise InvalidRequest("the folder that you are in is not there any more") from None
    limits = Limits(
        memory=parse_size("--memory", chosen.memory),
        cpus=_number("--cpus", chosen.cpus),
        pids=_whole_number("--pids", chosen.pids),
        disk=None if chosen.disk is None else parse_size("--disk", chosen.disk),
        output=OUTPUT,
    )
    return op.OpenSession(
        image=chosen.image, limits=limits, env=variables(chosen.env),
        workdir=chosen.workdir, user=chosen.user,
        mounts=mounts, min_isolation=chosen.min_isolation, warm=False,
        backend=chosen.backend, runtime=chosen.runtime, relax=tuple(chosen.relax),
    )  # fmt: skip


def seconds(text: str, option: str = "--timeout") -> float:
    """ "90", "1.5s", "2m" or "1h" in seconds."""
    found = _DURATION.fullmatch(text.strip())
    if not found or not float(found[1]):
        raise InvalidRequest(f"{option} is a number of seconds, or like 90s, 5m, 1h: not {text!r}")
    return float(found[1]) * _SECONDS[found[2]]


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(f"{option} is a number, not {text!r}") from None


def _whole_number(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise InvalidRequest(f"{option} is a whole number, not {text!r}")
    return int(text)


def variables(words: Iterable[str]) -> dict[str, str]:
    """What --env says. Raises InvalidRequest."""
    return dict(map(_variable, words))


def _variable(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if given:
        return name, value
    if name not in os.environ:
        raise InvalidRequest(
            f"--env {name}: you have no such variable; give it: --env {name}=VALUE"
        )
    return name, os.environ[name]
