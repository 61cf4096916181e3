"""The argument parser, and the options shared by every command that makes a box."""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import NoReturn

from hutch import operations as op
from hutch.client.parse import parse_mounts, parse_size
from hutch.errors import InvalidRequest
from hutch.factory import NAMES
from hutch.types import GRADES, RELAXATIONS, Limits, Mount

# How much of a command's output to keep on disk: little, since it cannot be read again.
OUTPUT = 1024 * 1024
WORKSPACE = "/workspace"

# Options of docker that boxes do not have.
DOCKER_OPTIONS = {
    "--network --net -p --publish -P --dns --add-host --link": "boxes have no network yet",
    "--name": "sessions have ids and labels: hutch create --label NAME=VALUE",
    "-d --detach": "`hutch create` makes a session, and `hutch exec` runs commands in it",
    "--env-file": "-e NAME passes one of your variables on",
    "--entrypoint": "name the program after --",
    "--privileged --cap-add": "a box has no privileges on this machine",
    "--gpus --device": "boxes have no devices",
    "--pull": "`hutch image pull` pulls an image, once",
    "--platform": "a box runs the programs of this machine's processor",
    "--hostname": "a box has a host name of its own",
    "--cwd --chdir": "did you mean --workdir?",
}
# Synonyms: whichever of these a command has is suggested for the others.
SAME_ACTIONS = (
    ("add", "new", "make", "create"),
    ("del", "delete", "remove", "revoke", "rm"),
    ("get", "print", "show", "test", "validate", "check"),
    ("list", "show", "ls"),
    ("fetch", "get", "pull"),
    ("create", "make", "build"),
    ("load", "import"),
    ("save", "export"),
    ("clean", "gc", "prune"),
    ("copy", "cp"),
    ("prolong", "renew", "extend"),
)
NO_ACTION = {
    ("hutch config", "set"): "edit the file that `hutch config check` names",
    ("hutch config", "init"): "`hutch init` writes a config file",
    ("hutch workspace", "create"): "a workspace is made when a session first names it: hutch "
    "create --workspace-id NAME",
}
NEVER_SUGGESTED = ("--reset", "--force", "--kill")  # destructive

# argparse's words: "argument -m/--memory: expected one argument".
_WRONG_VALUE = re.compile(r"argument (?:-\w/)?(\S+?)(?:/\S+)?: (expected|ignored) ")
_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ms|s|m|h|d|w)?")
_SECONDS = {"ms": 0.001, None: 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are InvalidRequest, one line long, with a suggestion."""

    def error(self, message: str) -> NoReturn:
        if value := _WRONG_VALUE.match(message):
            problem = "needs a value" if value[2] == "expected" else "takes no value"
            message = f"{value[1]} {problem}"
        elif "required: action" in message:
            message = f"{self.prog} needs an action: {_one_of(self.actions())}"
        elif missing := re.search(r"arguments are required: (.*)", message):
            message = f"{self.prog} needs {missing[1]}"
        elif wrong := re.fullmatch(r"argument (\S+): invalid int value: (.*)", message):
            message = f"{wrong[1]} must be a whole number, not {wrong[2]}"
        raise InvalidRequest(f"{message}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: str) -> None:
        choices = list(map(str, action.choices or ()))
        if not choices or value in choices:
            return
        if action.option_strings:
            self.error(f"{action.option_strings[-1]} must be {_one_of(choices)}, not {value!r}")
        raise InvalidRequest(f"unknown command `{self.prog} {value}`{self._near_action(value)}")

    def _near_action(self, word: str) -> str:
        actions = self.actions()
        if advice := NO_ACTION.get((self.prog, word)):
            return f": {advice}"
        every = ", ".join(actions)
        same = [it for names in SAME_ACTIONS if word in names for it in actions if it in names]
        near = same or get_close_matches(word, actions, n=1, cutoff=0.6)
        guess = f": did you mean `{self.prog} {near[0]}`?" if near else ""
        if len(actions) == 1:
            return guess or f"; there is only `{self.prog} {actions[0]}`"
        return f"{guess} Known: {every}" if near else f"; known: {every}"

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        if {"-h", "--help"} & set(args) and self._usages(args[0]) and args[0] in self.actions():
            self.exit(message=self.help_of(args[0]))
        parsed, rest = self.parse_known_intermixed_args(args)  # options may stand anywhere
        if rest:
            if not rest[0].startswith("-"):
                self.error(f"unexpected argument {rest[0]!r}")
            raise InvalidRequest(f"{self.prog} has no option {rest[0]}{self._instead(rest[0])}")
        return parsed

    def _instead(self, given: str) -> str:
        name = given.partition("=")[0]
        if self.prog in ("hutch run", "hutch create", "hutch exec", "hutch shell"):
            for names, advice in DOCKER_OPTIONS.items():
                if name in names.split():
                    return f": {advice}"
        if name in ("--format", "--output", "-o") and "--json" in self.options():
            return ": did you mean --json?"
        options = [option for option in self.options() if option not in NEVER_SUGGESTED]
        near = get_close_matches(name, options, n=1, cutoff=0.7)
        return f": did you mean {near[0]}?" if near else f"; see {self.prog} --help"

    def options(self) -> list[str]:
        return [word for action in self._actions for word in action.option_strings]

    def actions(self) -> list[str]:
        """The subcommands, such as `build` of `hutch image build`."""
        choices = [action.choices for action in self._actions if action.dest == "action"]
        return list(choices[0] or ()) if choices else []

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            sys.stdout.write(message)
        raise SystemExit(status)

    def help_of(self, action: str) -> str:
        """The help of one action: its usage, options and examples, taken from the whole help."""
        import textwrap

        command = f"{self.prog} {action}"
        whole = self.description or ""
        about = re.search(rf"^  {action} +(.*(?:\n {{11}}.*)*)", whole, re.MULTILINE)
        text = " ".join(about[1].split()) if about else ""
        codes, _, examples = (self.epilog or "").partition("\n\nexamples:\n")
        shown = [line for line in examples.splitlines() if line.strip().startswith(command)]
        sub = argparse.ArgumentParser(
            prog=command,
            usage="\n       ".join(self._usages(action)),
            add_help=False,
            description=textwrap.fill(f"{text[0].upper()}{text[1:]}.", 80) if text else whole,
            epilog="\n".join([codes, *(["", "examples:", *shown] if shown else [])]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for option in self.options_of(action):
            sub._add_action(option)
        return sub.format_help()

    def options_of(self, action: str | None = None) -> list[argparse.Action]:
        """The options of one action, or all of them, without hidden ones."""
        known = [it for it in self._actions if it.option_strings and it.help != argparse.SUPPRESS]
        if action is None:
            return known
        usages, own = self._usages(), self._usages(action)
        # An option that no usage line names belongs to every action.
        return [
            option
            for option in known
            if _names(own, option.option_strings) or not _names(usages, option.option_strings)
        ]

    def _usages(self, action: str = "") -> list[str]:
        usages = re.split(rf"\n +(?={self.prog} )", self.usage or "")
        beginning = f"{self.prog} {action}".strip()
        return [usage for usage in usages if f"{usage} ".startswith(f"{beginning} ")]

    def with_value(self) -> set[str]:
        """Options that take the next word as their value, unless written with `=`."""
        taking = [action for action in self._actions if action.nargs is None]
        return {word for action in taking for word in action.option_strings}


def _one_of(words: Sequence[str], last: str = "or") -> str:
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _names(usages: list[str], options: Sequence[str]) -> bool:
    words = re.findall(r"(?<!\S)\[?(--?[a-z-]+)", " ".join(usages))
    return bool(set(words) & set(options))


def make_parser(prog: str, usage: str, description: str, epilog: str) -> Parser:
    return Parser(
        prog=prog,
        usage=usage,
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


_IMAGES = {
    "": "the image: host (the /usr of this machine), one that `hutch image ls` shows, or with "
    "--backend docker any that the engine has or can pull (default: host, or hutch/python)",
    "python": "the image (default: python; data has pandas and more, host is the /usr of this "
    "machine)",
}


def add_box_options(parser: Parser, *, image: str = "", has_short: bool = True) -> None:
    """`has_short`: also -e, -m, -u, -v and -w, some of which mean something else to `python`."""

    def names(short: str, *long: str) -> tuple[str, ...]:
        return (short, *long) if has_short else long

    default = op.OpenSession()
    box = parser.add_argument_group("the box")
    box.add_argument("--image", default=image, metavar="NAME", help=_IMAGES[image])
    box.add_argument(
        "--workspace",
        metavar="DIR",
        help="show this local folder at /workspace; files that the box writes there "
        "get the folder's owner",
    )
    box.add_argument(
        *names("-v", "--mount", "--volume"),
        action="append",
        default=[],
        metavar="HOST:BOX[:ro]",
        help="show a local file or folder at BOX; may be repeated",
    )
    add_env_option(box, *names("-e", "--env"))
    box.add_argument(
        *names("-w", "--workdir"),
        default=default.workdir,
        metavar="PATH",
        help="the folder to run in, relative to /workspace; created if needed "
        "(default: /workspace)",
    )
    box.add_argument(
        *names("-u", "--user"),
        default=default.user,
        metavar="NAME",
        help="run as user, root, nobody or a user id (default: user); root in a box "
        "has no special rights",
    )
    box.add_argument(
        "--backend",
        default="",
        metavar="NAME",
        help=f"what makes the box: {', '.join(NAMES)} (default: HUTCH_BACKEND, or namespaces)",
    )
    box.add_argument(
        "--runtime",
        default="",
        metavar="NAME",
        help="of a container: runsc for gVisor (default: the engine's)",
    )
    add_relax_option(box)
    box.add_argument(
        "--url",
        metavar="URL",
        help="use this server, with the key in HUTCH_API_KEY (default: HUTCH_URL, or none)",
    )
    limits = parser.add_argument_group("its limits (sizes like 512m or 2g)")
    limits.add_argument(
        *names("-m", "--memory"), default="1g", metavar="SIZE", help="memory (default: 1g)"
    )
    limits.add_argument("--cpus", default="2", metavar="N", help="CPUs (default: 2)")
    limits.add_argument(
        "--pids", default="512", metavar="N", help="processes and threads (default: 512)"
    )
    limits.add_argument(
        "--disk",
        metavar="SIZE",
        help="files outside of workspace and mounts, which are in memory (default: half of "
        "--memory)",
    )
    limits.add_argument(
        "--min-isolation",
        default="ns",
        metavar="GRADE",
        help=f"fail if this machine offers less: {', '.join(GRADES)} (default: ns)",
    )


def add_env_option(parser: argparse._ActionsContainer, *names: str) -> None:
    parser.add_argument(
        *names,
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable; without a value, yours is passed on; may be repeated",
    )


def add_relax_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--relax",
        action="append",
        default=[],
        metavar="NAME",
        help="leave this out of a container's hardening: "
        f"{', '.join(RELAXATIONS)}; may be repeated",
    )


def add_json_option(parser: Parser) -> None:
    """For a command that prints what its program writes, unless this is given."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object at the end, instead of the output",
    )


def as_ls(words: list[str]) -> list[str]:
    """Replace the alias `list` by `ls`."""
    return ["ls", *words[1:]] if words[:1] == ["list"] else words


def add_terminal_options(parser: Parser) -> None:
    parser.add_argument(
        "-i",
        "--stdin",
        "--interactive",
        action="store_true",
        help="pass on your stdin, a terminal or a pipe (default: empty)",
    )
    parser.add_argument(
        "-t", "--tty", action="store_true", help="run it on a terminal, as hutch shell does"
    )


def split(
    words: list[str], with_value: set[str], starts: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Our options, and the command: after `--`, or from the first word that is not an option.

    `starts`: words with which the command may also start.
    """
    place = 0
    while place < len(words):
        word = words[place]
        if word == "--":
            return words[:place], words[place + 1 :]
        if word in starts or not word.startswith("-"):
            return words[:place], words[place:]
        place += 2 if takes_next(word, with_value) else 1
    return words, []


def takes_next(word: str, with_value: set[str]) -> bool:
    """Whether the next word is the value of this option, as for `--env`, `-e` and `-ite`."""
    if word.startswith("--") or len(word) <= 2:
        return word in with_value
    return f"-{word[-1]}" in with_value and not {f"-{letter}" for letter in word[1:-1]} & with_value


def to_operation(args: argparse.Namespace) -> op.OpenSession:
    """The box that the options describe. Raises InvalidRequest."""
    try:
        mounts = parse_mounts(list(map(mount_of, args.mount)), args.workspace)
    except FileNotFoundError:
        raise InvalidRequest("your current folder no longer exists") from None
    limits = Limits(
        memory=parse_size("--memory", args.memory),
        cpus=number("--cpus", args.cpus),
        pids=_whole_number("--pids", args.pids),
        disk=None if args.disk is None else parse_size("--disk", args.disk),
        output=OUTPUT,
    )
    return op.OpenSession(
        image=args.image,
        limits=limits,
        env=variables(args.env),
        workdir=workdir_of(args.workdir),
        user=user_of(args.user),
        mounts=mounts,
        min_isolation=args.min_isolation,
        warm=False,
        backend=args.backend,
        runtime=args.runtime,
        relax=tuple(args.relax),
    )


def workdir_of(path: str) -> str:
    """A folder of the box, relative to /workspace. Raises InvalidRequest."""
    whole = posixpath.normpath(posixpath.join(WORKSPACE, path))
    if not path.startswith("/") and not f"{whole}/".startswith(f"{WORKSPACE}/"):
        raise InvalidRequest(
            f"--workdir {path} is outside {WORKSPACE}; use an absolute path, such as /tmp"
        )
    return whole if path else path


def user_of(name: str) -> str:
    """Raises InvalidRequest for a group, which docker takes."""
    user, colon, group = name.partition(":")
    if colon and group != user:
        raise InvalidRequest(
            f"--user {name}: a box's user has no group but its own; use --user {user}"
        )
    return user


def mount_of(text: str) -> str | Mount:
    """A mount, also as docker writes it. Raises InvalidRequest."""
    if "=" in text.partition(":")[0].partition("/")[0]:
        return _mount_of_fields(text)
    if text.count(":") != 2:
        return text
    host, _, mode = text.rpartition(":")
    kept = [it for it in mode.split(",") if it not in ("z", "Z")]  # for SELinux: of no use here
    return f"{host}:{','.join(kept)}" if kept else host


def _mount_of_fields(text: str) -> Mount:
    """`type=bind,source=DIR,target=DIR,readonly`."""
    fields = dict(field.partition("=")[::2] for field in text.split(","))
    kind = fields.pop("type", "bind")
    source = fields.pop("source", fields.pop("src", ""))
    target = fields.pop("target", fields.pop("dst", fields.pop("destination", "")))
    read_only = [fields.pop(name) for name in ("readonly", "ro") if name in fields]
    if kind != "bind" or not source or not target or fields:
        raise InvalidRequest(
            f"--mount is HOST:BOX[:ro] or type=bind,source=HOST,target=BOX[,readonly], not {text!r}"
        )
    return Mount(source, target, bool(read_only) and read_only[0] not in ("false", "0"))


def seconds(text: str, option: str = "--timeout") -> float:
    """ "90", "1.5s", "2m", "1h", "3d" or "1w" in seconds."""
    match = _DURATION.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise InvalidRequest(
            f"{option} must be a time in seconds, or like 90s, 5m, 1h, 3d, not {text!r}"
        )
    return float(match[1]) * _SECONDS[match[2]]


def number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(f"{option} must be a number, not {text!r}") from None


def _whole_number(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise InvalidRequest(f"{option} must be a whole number, not {text!r}")
    return int(text)


def variables(words: Iterable[str]) -> dict[str, str]:
    """The variables of --env. Raises InvalidRequest."""
    return dict(map(_variable, words))


def _variable(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if given:
        return name, value
    if name not in os.environ:
        raise InvalidRequest(
            f"--env {name}: not set in your environment; set it here: --env {name}=VALUE"
        )
    return name, os.environ[name]
