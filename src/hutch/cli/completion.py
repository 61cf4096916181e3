"""`hutch completion`: completion scripts for shells, generated from the parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from hutch.factory import NAMES

from . import COMMANDS
from .options import Parser, make_parser
from .program import Launcher

# Shell commands that list the possible values.
SESSIONS, IMAGES = "hutch ps -q 2>/dev/null", "hutch image ls -q 2>/dev/null"
KEYS, WORKSPACES = (
    f'hutch {command} ls 2>/dev/null | sed 1d | cut -d" " -f1' for command in ("key", "workspace")
)
# For fish, which shows what stands behind a tab.
DESCRIBED = {
    IMAGES: 'hutch image ls 2>/dev/null | sed -e "1d; /^- /d" -e "s/  */ /g; s/ /\\t/"',
}
CHOICES = {"--backend": NAMES}
VALUES = {"--session": SESSIONS, "--image": IMAGES, "--workspace-id": WORKSPACES}
ARGUMENTS = {
    SESSIONS: ("exec", "logs", "cp", "stats", "rm", "shell"),
    IMAGES: ("image build", "image rm"),
    KEYS: ("key extend", "key rotate", "key revoke"),
    WORKSPACES: ("workspace rm", "workspace import", "workspace export"),
}
# Those of these that take no file, beside the values of options.
NO_FILES = {"logs", "stats", "rm", "image build", "image rm", "workspace rm", *ARGUMENTS[KEYS]}


def build_parser() -> Parser:
    parser = make_parser(
        "hutch completion",
        "hutch completion bash|zsh|fish",
        "Print what a shell needs to complete commands, options, sessions, images, keys\n"
        "and workspaces.",
        "exit codes: 0, or 125 if hutch failed.\n"
        "\n"
        "to have it in every shell (zsh: it must come after compinit):\n"
        "  bash   echo 'source <(hutch completion bash)' >> ~/.bashrc\n"
        "  zsh    echo 'source <(hutch completion zsh)' >> ~/.zshrc\n"
        "  fish   mkdir -p ~/.config/fish/completions\n"
        "         hutch completion fish > ~/.config/fish/completions/hutch.fish",
    )
    parser.add_argument("action", choices=SCRIPTS, help=argparse.SUPPRESS)
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    parser = build_parser()
    if not words:
        parser.print_help()
        return 0
    args = parser.parse_args([word for word in words if word != "-s"])  # gh completion -s bash
    print(SCRIPTS[args.action](_commands()), end="")
    return 0


@dataclass(frozen=True)
class Option:
    names: tuple[str, ...]
    about: str
    takes_value: bool
    choices: tuple[str, ...]

    @property
    def values(self) -> str | None:
        """A shell command that lists the possible values."""
        return next((VALUES[name] for name in self.names if name in VALUES), None)


@dataclass(frozen=True)
class Command:
    """A command, or one of its actions: `image`, `image build`."""

    name: str
    about: str
    options: tuple[Option, ...]
    actions: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        return [name for option in self.options for name in option.names]


def _commands() -> list[Command]:
    commands = []
    for name, about in COMMANDS.items():
        parser: Parser = import_module(f".{name}", __package__).build_parser()
        actions = tuple(parser.actions())
        commands.append(Command(name, about, _options(parser), actions))
        commands += [
            Command(f"{name} {action}", "", _options(parser, action)) for action in actions
        ]
    return commands


def _options(parser: Parser, action: str | None = None) -> tuple[Option, ...]:
    return tuple(
        Option(
            tuple(option.option_strings),
            re.split(r"; | \(", option.help or "")[0],
            option.nargs != 0,
            tuple(map(str, option.choices or ())) or CHOICES.get(option.option_strings[-1], ()),
        )
        for option in parser.options_of(action)
    )


# --- shells ------------------------------------------------------------------------------

BASH = """\
# Completion of hutch for bash. Made by `hutch completion bash`.
_hutch_lines() {{
  # The lines of stdin that begin with $1. Not with compgen -W, which would expand them.
  local line
  while IFS= read -r line; do
    [[ "$line" == "$1"* ]] && COMPREPLY+=("$line")
  done
}}
_hutch() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}}
  local command=${{COMP_WORDS[1]}} options= actions= word
  COMPREPLY=()
  if [ "$COMP_CWORD" = 1 ]; then
    COMPREPLY=($(compgen -W "{commands} help version --help --version" -- "$cur"))
    return
  fi
  if [ "$command" = help ]; then
    [ "$COMP_CWORD" = 2 ] && COMPREPLY=($(compgen -W "{commands}" -- "$cur"))
    return
  fi
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    [ "$word" = -- ] && return
  done
  case "$command" in
{actions}
  esac
  if [ -n "$actions" ] && [ "$COMP_CWORD" = 2 ] && [[ "$cur" != -* ]]; then
    COMPREPLY=($(compgen -W "$actions" -- "$cur"))
    return
  fi
  word=${{COMP_WORDS[2]}}
  [ -n "$actions" ] && [[ " $actions " == *" $word "* ]] && command="$command $word"
  case "$command" in
{options}
  esac
  case "$command:$prev" in
{values}
  esac
  if [[ "$cur" == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$cur"))
    return
  fi
  case "$command" in
{arguments}
  esac
}}
complete -o default -F _hutch hutch
"""


def bash(commands: list[Command]) -> str:
    values = []
    for command in commands:
        for option in command.options:
            if option.takes_value:
                reply = ""
                if option.values:
                    reply = f'_hutch_lines "$cur" < <({option.values}); '
                elif option.choices:
                    words = " ".join(option.choices)
                    reply = f'COMPREPLY=($(compgen -W "{words}" -- "$cur")); '
                where = "|".join(_quoted(f"{command.name}:{name}") for name in option.names)
                values.append(f"    {where}) {reply}return ;;")
    return BASH.format(
        commands=" ".join(COMMANDS),
        actions="\n".join(
            f'    {it.name}) actions="{" ".join(it.actions)}" ;;' for it in commands if it.actions
        ),
        options="\n".join(
            f'    {_quoted(it.name)}) options="{" ".join(it.words)}" ;;' for it in commands
        ),
        values="\n".join(values),
        arguments=_arguments('_hutch_lines "$cur" < <({})'),
    )


ZSH = """\
#compdef hutch
# Completion of hutch for zsh. Made by `hutch completion zsh`.
_hutch() {{
  local -a options actions commands names
  local command=$words[2]
  if (( CURRENT == 2 )) || [[ $command == help && CURRENT -eq 3 ]]; then
    commands=(
{commands}
    )
    _describe 'command' commands
    return
  fi
  if (( ${{words[(I)--]}} && ${{words[(I)--]}} < CURRENT )); then
    _files
    return
  fi
  case $command in
{actions}
  esac
  if (( $#actions && CURRENT == 3 )) && [[ $PREFIX != -* ]]; then
    _describe 'action' actions
    return
  fi
  (( ${{actions[(Ie)$words[3]]}} )) && command="$command $words[3]"
  case $command in
{options}
  esac
  case "$command:$words[CURRENT-1]" in
{values}
  esac
  if [[ $PREFIX == -* ]]; then
    _describe -o 'option' options
    return
  fi
  case $command in
{arguments}
  esac
  _files
}}
if [ "$funcstack[1]" = _hutch ]; then _hutch "$@"; else compdef _hutch hutch; fi
"""


def zsh(commands: list[Command]) -> str:
    values = []
    for command in commands:
        for option in command.options:
            if option.takes_value:
                words = " ".join(option.choices)
                given = f'${{(f)"$({option.values})"}}' if option.values else words
                reply = f"compadd -- {given}" if given else "_files"
                where = "|".join(_quoted(f"{command.name}:{name}") for name in option.names)
                values.append(f"    {where}) {reply}; return ;;")
    described = {
        it.name: " ".join(
            _quoted(f"{name}:{_plain(option.about)}")
            for option in it.options
            for name in option.names
        )
        for it in commands
    }
    return ZSH.format(
        commands="\n".join(f"      {_quoted(f'{name}:{it}')}" for name, it in COMMANDS.items()),
        actions="\n".join(
            f"    {it.name}) actions=({' '.join(it.actions)}) ;;" for it in commands if it.actions
        ),
        options="\n".join(
            f"    {_quoted(name)}) options=({words}) ;;" for name, words in described.items()
        ),
        values="\n".join(values),
        arguments=_arguments(
            'names=(${{(f)"$({})"}}); compadd -a names && [[ $command != cp ]] && return'
        ),
    )


FISH = """\
# Completion of hutch for fish. Made by `hutch completion fish`.
function __hutch_is
    set -l typed (commandline -opc)
    contains -- -- $typed; and return 1
    test "$typed[2..]" = "$argv"; and return 0
    string match -q -- "$argv *" "$typed[2..]"
end
function __hutch_begins
    test (count (commandline -opc)) -eq $argv[1]
end
"""


def fish(commands: list[Command]) -> str:
    lines = [
        f"complete -c hutch -n '__hutch_begins 1' -f -a {name} -d {_fish(about)}"
        for name, about in COMMANDS.items()
    ]
    asked = "-n '__hutch_begins 2; and __hutch_is help'"
    lines += [
        f"complete -c hutch {asked} -f -a {name} -d {_fish(about)}"
        for name, about in COMMANDS.items()
    ]
    for command in commands:
        here = f"-n '__hutch_is {command.name}'"
        if command.actions:
            actions = " ".join(command.actions)
            where = f"-n '__hutch_begins 2; and __hutch_is {command.name}'"
            lines.append(f"complete -c hutch {where} -f -a '{actions}'")
            continue  # the options are those of the actions
        for listing, takers in ARGUMENTS.items():
            if command.name in takers:
                only = " -f" if command.name in NO_FILES else ""
                values = DESCRIBED.get(listing, listing)
                lines.append(f"complete -c hutch {here}{only} -a '({values})'")
        for option in command.options:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.names
            )
            values = " ".join(option.choices)
            if option.values:
                values = f"({DESCRIBED.get(option.values, option.values)})"
            given = f" -x -a '{values}'" if values else " -r" if option.takes_value else ""
            lines.append(f"complete -c hutch {here} {names}{given} -d {_fish(option.about)}")
    return FISH + "\n".join(lines) + "\n"


def _arguments(reply: str) -> str:
    """The branches of a `case $command`, for bash and zsh."""
    return "\n".join(
        f"    {'|'.join(map(_quoted, takers))}) {reply.format(listing)} ;;"
        for listing, takers in ARGUMENTS.items()
    )


def _plain(text: str) -> str:
    return text.replace(":", " ")


def _quoted(text: str) -> str:
    """For bash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: dict[str, Callable[[list[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
