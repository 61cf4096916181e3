"""Tool calls as commands: the argv that does what a model asked for.

A builder has a method `build_<name>(args) -> argv` for each tool that is a command. A tool of ours
without such a method is called directly: its argv starts with `TOOL`, which is not a program, and
`carry_out` recognises it by that. So the contents and names of files never pass through a command
line.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from hutch.errors import InvalidRequest, NotFound

from . import running
from .declare import Answer, Tool, ToolContext
from .toolbox import TOOLS, AsyncToolbox

TOOL = "hutch-tool"
Arguments = Mapping[str, Any]
Build = Callable[[Arguments], list[str]]


class CommandBuilder:
    """Subclass this, or one of the two below, to change what a tool runs, or to add tools:

        class WithLint(Condensed):
            schemas = {"lint": {"type": "object", "properties": {"path": {"type": "string"}}}}

            def build_lint(self, args):
                '''Check a file or folder with ruff.'''
                return ["ruff", "check", args.get("path", ".")]

    Of a tool that is not ours, a model reads the method's docstring, and the JSON Schema of its
    arguments in `schemas`. Without a schema, it takes any arguments.
    """

    condenses: ClassVar[bool] = True  # shorten the output of commands
    schemas: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    # Tools of ours that are commands here -> the parameters that these commands use.
    heeds: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def build(self, name: str, arguments: Arguments | None = None) -> list[str]:
        """The argv of a call.

        Raises InvalidRequest if there is no such tool, or an argument is missing or wrong.
        """
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
        """The names of all tools: ours, and those that only this builder has."""
        built = [name.removeprefix("build_") for name in dir(self) if name.startswith("build_")]
        return [*TOOLS, *(name for name in built if name not in TOOLS)]

    def builds(self, name: str) -> bool:
        """Whether this builder turns a tool into a command, rather than a call of our tool."""
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
        heeded = {parameter: known[parameter] for parameter in self.heeds[name]}
        return replace(ours, parameters={**ours.parameters, "properties": heeded})

    def _builder(self, name: str) -> Build | None:
        build: Build | None = getattr(self, f"build_{name}", None)
        return build


class Condensed(CommandBuilder):
    """Our own tools as they are, with shortened output."""


class Native(CommandBuilder):
    """Plain Unix commands, with their output exactly as it is.

    Files are still written, edited and deleted by our own tools.
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
        # One program, not a pipe: a file that cannot be read is an exit code, not an empty answer.
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
    """Run an argv of a builder: a program, or a call of one of our tools. Raises as these do.

    `env` is for this one command only: so bash and git with an `env` do not run in the kept shell.
    """
    call = tool_of(argv)
    if call and not (env and call[0] in ("bash", "git")):
        return await toolbox.call(*call)
    if call:
        name, given = call
        heeded = {key: given[key] for key in Native.heeds[name] if key in given}
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
        return await running.answer_of(ctx, line, stream, timeout)
    except NotFound as exc:
        return Answer(str(exc), running.NOT_FOUND, failed=True, details={"error": exc.code})


def words(text: str) -> list[str]:
    """A command line split into arguments. Raises InvalidRequest if a quote is missing."""
    try:
        return shlex.split(text)
    except ValueError as exc:
        raise InvalidRequest(f"{text!r:.200}: {exc}; close the quote, or escape it") from None


def tool_of(argv: Sequence[str]) -> tuple[str, dict[str, Any]] | None:
    """The tool that an argv calls, and its arguments; None if it runs a program."""
    if len(argv) != 3 or argv[0] != TOOL:
        return None
    arguments: dict[str, Any] = json.loads(argv[2])
    return argv[1], arguments


def _operand(path: str) -> str:
    """The path, written so that no program takes it for an option, an assignment, or stdin."""
    return path if path.startswith(("/", "./", "../")) or path in (".", "..") else f"./{path}"
