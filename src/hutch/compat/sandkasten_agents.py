"""Sandkasten's tools for the OpenAI Agents SDK, by their own names.

`agents` (`pip install openai-agents`) is imported when the first tool is made.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .sandkasten import ExecResult, SandboxClient, Session

__all__ = [
    "SandkastenContext",
    "create_sandkasten_tools",
    "sandbox_tools_for_workspace",
    "sandkasten_tools",
]


@dataclass
class SandkastenContext:
    """The context of a run that uses `sandkasten_tools()`."""

    session: Session
    workspace_id: str | None = None


def sandkasten_tools() -> list[Any]:
    """Tools that use the session of the run's context, which is a SandkastenContext.

    Raises ImportError if the Agents SDK is not installed.
    """
    return _tools(lambda ctx: ctx.context.session)


def create_sandkasten_tools(session: Session) -> list[Any]:
    """The same tools, bound to one session."""
    return _tools(lambda ctx: session)


@asynccontextmanager
async def sandbox_tools_for_workspace(
    client: SandboxClient,
    workspace_id: str,
    *,
    image: str = "python",
    ttl_seconds: int | None = None,
) -> AsyncIterator[tuple[Session, list[Any]]]:
    """A session on this workspace, and its tools, for the duration of a `with`."""
    session = await client.create_session(
        image=image, ttl_seconds=ttl_seconds, workspace_id=workspace_id
    )
    async with session:
        yield session, create_sandkasten_tools(session)


def _tools(session_of: Callable[[Any], Session]) -> list[Any]:
    try:
        agents = import_module("agents")
    except ImportError as exc:
        message = "these tools are for the OpenAI Agents SDK: pip install openai-agents"
        raise ImportError(message) from exc

    # The model reads the docstrings.
    async def sandbox_exec(ctx: Any, cmd: str, timeout_ms: int = 30000) -> str:
        """Run a shell command in the sandbox. Directory and variables stay for the next call.

        Args:
            cmd: The command, as you would type it.
            timeout_ms: Milliseconds after which it is stopped.
        """
        return _text(await session_of(ctx).exec(cmd, timeout_ms=timeout_ms))

    async def sandbox_write_file(ctx: Any, path: str, content: str) -> str:
        """Write a text file in the sandbox.

        Args:
            path: Absolute, or relative to /workspace.
            content: The whole text.
        """
        await session_of(ctx).write(path, content)
        return f"wrote {path}"

    async def sandbox_read_file(ctx: Any, path: str, max_bytes: int | None = None) -> str:
        """Read a text file of the sandbox.

        Args:
            path: Absolute, or relative to /workspace.
            max_bytes: Read at most so many bytes.
        """
        file = await session_of(ctx).read(path, max_bytes=max_bytes)
        return file.content.decode("utf-8", "replace") + ("\n(truncated)" if file.truncated else "")

    async def sandbox_list_files(ctx: Any, path: str = ".") -> str:
        """List a folder of the sandbox.

        Args:
            path: The folder; without one, where the shell is.
        """
        where = "" if path in ("", ".") else f" -- {shlex.quote(path)}"
        return _text(await session_of(ctx).exec(f"ls -la{where}"))

    async def sandbox_stats(ctx: Any) -> str:
        """How much memory and CPU the sandbox uses."""
        stats = await session_of(ctx).stats()
        used, limit = stats.memory_bytes / 2**20, stats.memory_limit / 2**20
        return (
            f"memory_bytes={stats.memory_bytes} ({used:.2f} MB), "
            f"memory_limit={stats.memory_limit} ({limit:.2f} MB), "
            f"cpu_usage_usec={stats.cpu_usage_usec}"
        )

    functions: list[Callable[..., Any]] = [
        sandbox_exec,
        sandbox_write_file,
        sandbox_read_file,
        sandbox_list_files,
        sandbox_stats,
    ]
    for function in functions:
        # By its type the SDK tells the context from an argument of the tool.
        function.__annotations__["ctx"] = agents.RunContextWrapper[Any]
    return [agents.function_tool(function) for function in functions]


def _text(result: ExecResult) -> str:
    return f"exit_code={result.exit_code}\ncwd={result.cwd}\n---\n{result.output}"
