"""Tool calls as commands: which argv does what a model asked for.

A builder has a method `build_<name>(args) -> argv` for each tool that is a command of its own. A
tool of ours for which it has none is called as it is declared: its argv begins with `TOOL`, which
is no program, and `carry_out` knows it by that. So contents of any size, and any name of a file,
never pass through a command line.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from hutch.errors import InvalidRequest, NotFound

from . import shell
from .declare import Answer, Tool, ToolContext
from .toolbox import TOOLS, AsyncToolbox

TOOL = "hutch-tool"
Arguments = Mapping[str, Any]
Build = Callable[[Arguments], list[str]]


class CommandBuilder:
    """Subclass it, or one of the two below, to change what a tool runs, or to add tools:

        class WithLint(Condensed):
            schemas = {"lint": {"type": "object", "properties": {"path": {"type": "string"}}}}

            def build_lint(self, args):
                '''Check a file or folder with ruff.'''
                return ["ruff", "check", args.get("path", ".")]

    What a model reads of a tool that is not ours is the method's docstring, and its entry in
    `schemas`: the JSON Schema of its arguments. Without an entry it takes whatever it is given.
    """

    condenses: ClassVar[bool] = True  # what commands print is made shorter, with nothing lost
    schemas: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    # Of tools of ours that are commands here, the parameters that these heed; else, all.
    heeds: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def build(self, name: str, arguments: Arguments | None = None) -> list[str]:
        """The argv of a call; InvalidRequest if there is no such tool, or if it cannot be built."""
        given = {key: value for key, value in (arguments or {}).items() if value is not None}
        if build := self._builder(name):
            if name in TOOLS and name not in self.schemas:
                given = self._ours(name).checked(given)
            try:
                argv = build(given)
            except KeyError as exc:
                raise InvalidRequest(f"{name} needs {exc.args[0]!r}") from None
            return [str(word) for word in argv]
        if name in TOOLS:
            return [TOOL, name, json.dumps(given)]
        raise InvalidRequest(f"there is no tool {name!r}, only {', '.join(self.names())}")

    def names(self) -> list[str]:
        """All tools: ours, and those that only this builder has."""
        built = [name.removeprefix("build_") for name in dir(self) if name.startswith("build_")]
        return [*TOOLS, *(name for name in built if name not in TOOLS)]

    def builds(self, name: str) -> bool:
        """Whether a tool is a command here, and not a call of ours."""
        return self._builder(name) is not None

    def definition(self, name: str) -> dict[str, Any]:
        """What a model reads of a tool: name, description, parameters (a JSON Schema)."""
        if name in TOOLS and name not in self.schemas:
            ours = self._ours(name)
            description, parameters = ours.description, ours.parameters
        else:
            build = self._builder(name)
            description = inspect.getdoc(build) or f"Run {name}."
            parameters = dict(self.schemas.get(name, {"type": "object", "properties": {}}))
        return {"name": name, "description": description, "parameters": parameters}

    def _ours(self, name: str) -> Tool:
        ours = TOOLS[name]
        if name not in self.heeds:
            return ours
        known = ours.parameters["properties"]
        heeded = {each: known[each] for each in self.heeds[name]}
        return replace(ours, parameters={**ours.parameters, "properties": heeded})

    def _builder(self, name: str) -> Build | None:
        found: Build | None = getattr(self, f"build_{name}", None)
        return found


class Condensed(CommandBuilder):
    """Our own tools as they are, and what they print made shorter."""


class Native(CommandBuilder):
    """The plain commands of a Unix, and what they print exactly as it is.

    Contents of files are still written, edited and deleted by our own tools.
    """

    condenses = False
    heeds: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "read": ("path", "offset", "limit"),
        "ls": ("path",),
        "grep": ("pattern", "path", "type"),
        "find": ("path", "name", "type"),
        "git": ("args",),
        "diff": ("file_a", "file_b"),
        "bash": ("command", "timeout"),
    }

    def build_read(self, args: Arguments) -> list[str]:
        path = _operand(args["path"])
        if not args.get("offset") and not args.get("limit"):
            return ["cat", "-n", path]
        # One program, and no pipe: what cannot be read is an exit code, and not an empty answer.
        first = args.get("offset", 0) + 1
        last = first + args["limit"] - 1 if args.get("limit") else 0
        script = 'last && NR > last {exit} NR >= first {printf "%6d\\t%s\\n", NR, $0}'
        return ["awk", "-v", f"first={first}", "-v", f"last={last}", script, path]

    def build_ls(self, args: Arguments) -> list[str]:
        return ["ls", "-la", _operand(args.get("path", "."))]

    def build_grep(self, args: Arguments) -> list[str]:
        only = [f"--include=*.{args['type']}"] if args.get("type") else []
        where = _operand(args.get("path", "."))
        return ["grep", "-rnE", *only, "-e", args["pattern"], where]

    def build_find(self, args: Arguments) -> list[str]:
        argv = ["find", _operand(args.get("path", "."))]
        if args.get("name"):
            argv += ["-name", args["name"]]
        if args.get("type"):
            argv += ["-type", args["type"]]
        return argv

    def build_git(self, args: Arguments) -> list[str]:
        return ["git", *words(args["args"])]

    def build_diff(self, args: Arguments) -> list[str]:
        return ["diff", "-u", _operand(args["file_a"]), _operand(args["file_b"])]

    def build_bash(self, args: Arguments) -> list[str]:
        return ["sh", "-c", args["command"]]


async def carry_out(
    toolbox: AsyncToolbox,
    argv: Sequence[str],
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> Answer:
    """Do what a builder built: a program, or a call of a tool of ours. Raises as these do.

    `env` is for this one command, and leaves no trace: so a shell or git with an `env` is not the
    kept one.
    """
    call = tool_of(argv)
    if call and not (env and call[0] in ("bash", "git")):
        return await toolbox.call(*call)
    if call:
        name, given = call
        heeded = {each: given[each] for each in Native.heeds[name] if each in given}
        argv = Native().build(name, heeded)
    return await _run(toolbox.context, argv, cwd, env, timeout)


async def _run(
    ctx: ToolContext,
    argv: Sequence[str],
    cwd: str | None,
    env: Mapping[str, str] | None,
    timeout: float | None,
) -> Answer:
    line = argv[2] if list(argv[:2]) == ["sh", "-c"] and len(argv) == 3 else shlex.join(argv)
    stream = await ctx.box.commands.stream(argv, cwd=cwd, env=env, timeout=timeout, keep=True)
    try:
        return await shell.told(ctx, line, stream, timeout)
    except NotFound as exc:
        return Answer(str(exc), shell.NOT_FOUND, failed=True, details={"error": exc.code})


def words(text: str) -> list[str]:
    """A command line as arguments; InvalidRequest if a quote is missing."""
    try:
        return shlex.split(text)
    except ValueError as exc:
        raise InvalidRequest(f"{text!r:.200}: {exc}; close the quote, or escape it") from None


def tool_of(argv: Sequence[str]) -> tuple[str, dict[str, Any]] | None:
    """The tool of ours that an argv calls, and its arguments; None if it is a program."""
    if len(argv) != 3 or argv[0] != TOOL:
        return None
    arguments: dict[str, Any] = json.loads(argv[2])
    return argv[1], arguments


def _operand(path: str) -> str:
    """A path that no program takes for an option, an assignment, or its stdin."""
    return path if path.startswith(("/", "./", "../")) or path in (".", "..") else f"./{path}"
