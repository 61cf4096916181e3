"""Which programs' output this is, found in an untrusted command line.

A command line is a chain of pipelines. A pipeline prints what its last program prints, except for
programs like `tail` that only pass on what another printed. Nothing here runs a program, raises, or
takes more than one pass; what cannot be understood is not recognised.
"""

from __future__ import annotations

import re

MAX_COMMAND = 8 * 1024  # characters that are looked at
_DEPTH = 4  # of `sh -c` in `sh -c`

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|\\\n)"""
    r"""|(?P<comment>\#[^\n]*)"""
    r"""|(?P<redirect>(?:\d+|&)?(?:>>|>\||>&|>|<<<|<<-?|<&|<)[ \t]*)"""
    r"""|(?P<end>&&|\|\||;;|[;\n&()]|\{(?=\s)|(?<=[\s;])\}(?=[\s;|&)]|$))"""
    r"""|(?P<pipe>\|&?)"""
    r"""|(?P<word>(?:'[^']*'|"(?:[^"\\]|\\.)*"|\\.|\$\([^()]*\)|`[^`]*`|[^\s|&;()<>'"\\`]"""
    r"""|['"`\\])+)""",
    re.DOTALL,
)
_QUOTED = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)""", re.DOTALL)
_TO_FILE = re.compile(r"[1&]?(?:>>|>\||>)\s*$")
_ELSEWHERE = "\0>"  # among the words: the output goes to a file
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_HEREDOC = re.compile(
    r"<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n(?:(?:.*?\n)??[ \t]*\2[ \t]*(?:\n|$)|.*)", re.DOTALL
)

_KEYWORDS = frozenset({"if", "then", "else", "elif", "while", "until", "do", "!", "time"})
_ENDINGS = frozenset({"fi", "done", "esac", "for", "case", "select", "function", "in"})
# Programs that print nothing when all is well: the output of a chain is that of the others.
_SILENT = frozenset({
    "cd", "export", "unset", "set", "source", ".", "mkdir", "rm", "rmdir", "touch", "cp", "mv",
    "ln", "chmod", "chown", "sleep", "true", ":", "test", "[", "[[", "pushd", "popd", "wait",
    "trap", "umask", "ulimit", "shopt", "alias", "local", "read", "kill", "exit", "return", "false",
    "break", "continue", "hash", "sync", "fi", "done", "esac",
})  # fmt: skip
# Programs that print a line or two between the output of others.
_BRIEF = frozenset({"echo", "printf", "pwd", "date", "whoami", "which", "hostname", "uname", "id"})
# Programs that pass lines on unchanged.
_FILTERS = frozenset({"tail", "head", "cat", "tee", "less", "more", "ts", "sort"})
# Programs that run another one, and those of their options that take a value.
_WRAPPERS: dict[str, frozenset[str]] = {
    "sudo": frozenset({"-u", "-g", "-C", "-h", "-p"}), "doas": frozenset({"-u"}),
    "env": frozenset({"-u", "-C", "-S"}), "time": frozenset({"-f", "-o"}),
    "timeout": frozenset({"-s", "-k", "--signal", "--kill-after"}),
    "nice": frozenset({"-n"}), "ionice": frozenset({"-c", "-n"}), "nohup": frozenset(),
    "stdbuf": frozenset({"-i", "-o", "-e"}), "command": frozenset(), "exec": frozenset({"-a"}),
    "builtin": frozenset(), "setsid": frozenset(), "unbuffer": frozenset(),
    "xvfb-run": frozenset({"-s", "-n"}), "chronic": frozenset(), "npx": frozenset({"-p", "-c"}),
    "bunx": frozenset(), "pnpx": frozenset(), "uvx": frozenset({"--from", "--with", "-p"}),
    "xargs": frozenset({"-I", "-n", "-P", "-L", "-d", "-a"}), "watch": frozenset({"-n"}),
    "strace": frozenset({"-e", "-o"}), "catchsegv": frozenset(), "eatmydata": frozenset(),
}  # fmt: skip
_RUNNERS = {
    ("uv", "run"),
    ("poetry", "run"),
    ("pipenv", "run"),
    ("pdm", "run"),
    ("hatch", "run"),
    ("rye", "run"),
    ("bundle", "exec"),
    ("pnpm", "exec"),
    ("pnpm", "dlx"),
    ("yarn", "dlx"),
    ("yarn", "exec"),
    ("npm", "exec"),
    ("conda", "run"),
    ("mise", "exec"),
    ("coverage", "run"),
}
_RUNNER_VALUES = frozenset({
    "--with", "--extra", "--group", "--python", "-p", "-n", "--project", "--directory",
    "--env-file", "-m", "--source", "--rcfile", "--package", "-C", "--only-group",
})  # fmt: skip
_INSIDE = frozenset({"docker", "podman", "nerdctl", "kubectl", "oc"})
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ash", "ksh", "busybox"})
_PYTHON = re.compile(r"(?:python|pypy)(?:\d(?:\.\d+)?)?$")


def calls(command: str) -> list[tuple[str, ...]]:
    """The argv of each program whose output is seen, in order; names are without their folder."""
    return _calls(command[:MAX_COMMAND], _DEPTH)


def _calls(command: str, depth: int) -> list[tuple[str, ...]]:
    here: list[tuple[str, ...]] = []
    elsewhere: list[tuple[str, ...]] = []
    if "<<" in command and "\n" in command:
        command = _HEREDOC.sub(r"<<_ \3\n", command)
    for pipeline in _pipelines(command):
        words = _printing(pipeline)
        into = elsewhere if words[:1] == [_ELSEWHERE] else here
        into += _unwrapped([word for word in words if word is not _ELSEWHERE], depth)
    printing = [argv for argv in here if argv[0] not in _SILENT]
    return [argv for argv in printing if argv[0] not in _BRIEF] or printing or elsewhere


def _printing(pipeline: list[list[str]]) -> list[str]:
    """The last program of a pipeline that prints lines of its own."""
    for words in reversed(pipeline):
        if not words:
            continue
        is_filter = _base(words[0]) in _FILTERS
        # `cat x.json` does, `… | cat` does not.
        if is_filter and words is not pipeline[0]:
            continue
        return words
    return []


def _pipelines(command: str) -> list[list[list[str]]]:
    """A chain of pipelines of programs of words, without redirections."""
    chain: list[list[list[str]]] = [[[]]]
    skip = False  # the next word is the target of a redirection
    position = 0
    while position < len(command):
        token = _TOKEN.match(command, position)
        if token is None:
            position += 1
            continue
        position = token.end()
        kind, text = token.lastgroup, token[0]
        words = chain[-1][-1]
        if kind == "end":
            chain.append([[]])
            skip = False
        elif kind == "pipe":
            chain[-1].append([])
            skip = False
        elif kind == "redirect":
            skip = True
            if _TO_FILE.match(text):
                words.insert(0, _ELSEWHERE)
        elif kind == "word":
            if skip:
                skip = False
            elif words not in ([], [_ELSEWHERE]) or not _is_before(text):
                words.append(_bare(text))
    return chain


def _is_before(word: str) -> bool:
    """Whether the word precedes a command: a keyword or an assignment."""
    return word in _KEYWORDS or bool(_ASSIGNMENT.match(word))


def _bare(word: str) -> str:
    if not ("'" in word or '"' in word or "\\" in word):
        return word
    return _QUOTED.sub(lambda m: m[1] if m[1] is not None else (m[2] or m[3] or ""), word)


def _base(word: str) -> str:
    return word.rsplit("/", 1)[-1]


def _unwrapped(words: list[str], depth: int) -> list[tuple[str, ...]]:
    """The program itself, without those that only run it."""
    for _ in range(8):
        if not words:
            return []
        name = _base(words[0])
        if name in _ENDINGS:
            return []
        if _PYTHON.match(name) and "-m" in words[:4]:
            words = words[words.index("-m") + 1 :]
        elif name in _WRAPPERS and len(words) > 1:
            words = _after_options(words[1:], _WRAPPERS[name])
            if name in ("timeout", "watch") and words and words[0][:1].isdigit():
                words = words[1:]
        elif tuple(words[:2]) in _RUNNERS or (name, *words[1:2]) in _RUNNERS:
            if "-m" in words[2:4]:
                words = words[words.index("-m") + 1 :]
            else:
                words = _after_options(words[2:], _RUNNER_VALUES)
        elif name in _SHELLS and (script := _script(words)) is not None:
            return _calls(script, depth - 1) if depth > 0 else []
        elif name in _INSIDE and (inner := _in_container(words)):
            words = inner
        else:
            return [(name, *words[1:])]
    return [(_base(words[0]), *words[1:])]


def _after_options(words: list[str], with_value: frozenset[str]) -> list[str]:
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            return words[position + 1 :]
        if word in with_value:
            position += 2
        elif word.startswith("-") or _ASSIGNMENT.match(word):
            position += 1
        else:
            break
    return words[position:]


def _script(words: list[str]) -> str | None:
    for position, word in enumerate(words[1:4], 1):
        if word.startswith("-") and word.endswith("c") and position + 1 < len(words):
            return words[position + 1]
    return None


def _in_container(words: list[str]) -> list[str]:
    """`docker exec -it web pytest -q` runs pytest."""
    if "exec" not in words[:4]:
        return []
    rest = words[words.index("exec") + 1 :]
    if "--" in rest:
        return rest[rest.index("--") + 1 :]
    values = frozenset({"-e", "--env", "-u", "--user", "-w", "--workdir", "-n", "-c"})
    return _after_options(rest, values)[1:]
