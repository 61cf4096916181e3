"""What we say to a kept shell, in bash and in sh. Touches nothing.

A shell reads its script from a socket: first a prelude, then one line per command. The line
evaluates the command with stdin, stdout and stderr of its own, then answers elsewhere.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass

# In bash, a backslash keeps an alias of the user's away, and `builtin` a function.
#
# The first trap stops a command (see shell.py): it sets another, for every command that follows,
# and so unwinds functions, loops and all up to loop.sh, which is sourced for no other reason than
# to be returned from. Both do nothing between commands, so one that comes late does no harm.
# Any process of the box can send the signal, so the line itself removes the second trap: the
# signal stops at most the command that runs, whichever process sent it.
_BASH = r"""\shopt -s expand_aliases
\builtin trap '[[ $__hutch_busy ]] && { __hutch_stopped=1; \builtin set -T
  \builtin trap "[[ \$__hutch_busy ]] && \builtin return 130" DEBUG; \builtin return 130; }' RTMIN+7
\builtin trap LAST_WORDS EXIT
__hutch_last=0 __hutch_busy= __hutch_stopped=
__hutch_status() { return "$1"; }
__hutch_answer() { { \builtin printf '%s\0%d\0%s\0' "$1" "$__hutch_last" "${PWD-}"
  \builtin export -p; \builtin printf '\0'; } >&254; }
\builtin eval EXPORTS
PWD=CWD
"""
_BASH_LAST_WORDS = r"""{ \builtin printf '%s\0%s\0' TOKEN "${PWD-}"; \builtin export -p; } >|PATH"""
# After `set -a`, a long command would be too long a variable for every program that it starts.
_BASH_LINE = (
    r"__hutch_command=COMMAND;\builtin export -n __hutch_command;"
    r"\. LOOP;__hutch_last=$? __hutch_busy=;"
    r"[[ ${__hutch_stopped-} ]]&&{ \builtin trap - DEBUG;\builtin set +T;__hutch_stopped=;};"
    r"__hutch_answer TOKEN"
)

# `command` keeps a syntax error from ending the shell. dash knows only one-digit descriptors.
_SH = r"""trap LAST_WORDS 0
__hutch_last=0
__hutch_status() { return "$1"; }
__hutch_answer() { { printf '%s\0%d\0%s\0' "$1" "$__hutch_last" "${PWD-}"
  export -p; printf '\0'; } >&9; }
command eval EXPORTS
PWD=CWD
"""
_SH_LAST_WORDS = r"""{ printf '%s\0%s\0' TOKEN "${PWD-}"; export -p; } >|PATH"""
_SH_LINE = (
    r"__hutch_command=COMMAND;"
    r'case $- in *e*) ;; *) __hutch_status "$__hutch_last";; esac;'
    r'command eval "$__hutch_command" </dev/null >&7 2>&8 7>&- 8>&- 9>&-;'
    r"__hutch_last=$?;__hutch_answer TOKEN"
)


@dataclass(frozen=True)
class Dialect:
    """A shell we can talk to, and the descriptors it finds our ends at."""

    argv: tuple[str, ...]
    out: int
    err: int
    answers: int
    can_abort: bool  # a command can be stopped without losing the shell
    _prelude: str
    _last_words: str
    _line: str

    def prelude(self, cwd: str, exports: str, last_words: str, token: str) -> bytes:
        """Sets a shell up: when it exits, it will leave the token and its state in a file.

        `last_words` is that file. Only the shell knows its name and the token, until it writes
        it: what a child put there before can be told from what the shell wrote itself.
        """
        trap = _fill(self._last_words, PATH=last_words, TOKEN=token)
        return os.fsencode(_fill(self._prelude, LAST_WORDS=trap, CWD=cwd, EXPORTS=exports))

    def line(self, command: str, token: str, loop: str) -> bytes:
        """Runs one command, and answers with the token."""
        text = _fill(self._line, TOKEN=token, LOOP=loop, COMMAND=command)
        return os.fsencode(text + "\n")


def _fill(template: str, **words: str) -> str:
    """A template with its words put in, quoted: all at once, for one may contain another."""
    return re.sub("|".join(words), lambda found: shlex.quote(words[found[0]]), template)


# What `export -p` prints, in bash, dash and busybox: one variable per statement, its value quoted,
# with nothing in it that a shell would expand. An integer variable (-i) is evaluated as arithmetic
# when it is assigned, and that can run a command: it must be a number.
_VALUE = r"""(?:"(?:[^"\\$`]|\\[\s\S])*"|\$'(?:[^'\\]|\\[\s\S])*'|'[^']*'|\\')*"""
_NAME = "(?!__hutch)[A-Za-z_][A-Za-z0-9_]*"
_EXPORT = re.compile(
    rf"(?:export|declare -[rxlut]+) {_NAME}(?:={_VALUE})?\n"
    rf'|declare -[rxluti]+ {_NAME}="-?[0-9]+"\n'
)


def only_exports(text: str) -> str:
    """Of what `export -p` is said to have printed, the statements that can only set a variable.

    For text that other programs could have written: the next shell evaluates it, and a function in
    there could take the place of a builtin.
    """
    kept, at = [], 0
    while at < len(text):
        if found := _EXPORT.match(text, at):
            kept.append(found[0])
            at = found.end()
        else:
            at = text.find("\n", at) + 1 or len(text)
    return "".join(kept)


def find() -> Dialect:
    """bash if this place has one, else sh."""
    for path in ("/bin/bash", "/usr/bin/bash"):
        if os.access(path, os.X_OK):
            return Dialect(
                (path, "--norc", "--noprofile"), 251, 252, 254, True,
                _BASH, _BASH_LAST_WORDS, _BASH_LINE,
            )  # fmt: skip
    return Dialect(("/bin/sh",), 7, 8, 9, False, _SH, _SH_LAST_WORDS, _SH_LINE)
