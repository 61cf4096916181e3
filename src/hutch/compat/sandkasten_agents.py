"""Sandkasten's tools for the OpenAI Agents SDK, by their own names.

`agents` (`pip install openai-agents`) is imported when the first tool is made.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .sandkasten import ExecResult, SandboxClient, Session


@dataclass
class SandkastenContext:
    """The context of a run that uses `sandkasten_tools()`."""

    session: Session
    workspace_id: str | None = None


def sandkasten_tools() -> list[Any]:
    """Tools that use the session of the run's context, which is a SandkastenContext."""

    async def sandbox_exec(ctx: Any, cmd: str, timeout_ms: int = 30000) -> str:
        """Run a shell command in the sandbox. Directory and variables stay for the next call.

        Args:
            cmd: The command, as you would type it.
            timeout_ms: Milliseconds after which it is stopped.
        """
        return await run_command(ctx.context.session, cmd, timeout_ms)

    async def sandbox_write_file(ctx: Any, path: str, content: str) -> str:
        """Write a text file in the sandbox.

        Args:
            path: Absolute, or relative to /workspace.
            content: The whole text.
        """
        return await write_file(ctx.context.session, path, content)

    async def sandbox_read_file(ctx: Any, path: str, max_bytes: int | None = None) -> str:
        """Read a text file of the sandbox.

        Args:
            path: Absolute, or relative to /workspace.
            max_bytes: Read at most so many bytes.
        """
        return await read_file(ctx.context.session, path, max_bytes)

    async def sandbox_list_files(ctx: Any, path: str = ".") -> str:
        """List a folder of the sandbox.

        Args:
            path: The folder; without one, where the shell is.
        """
        return await list_files(ctx.context.session, path)

    async def sandbox_stats(ctx: Any) -> str:
        """How much memory and CPU the sandbox uses."""
        return await tell_stats(ctx.context.session)

    return _made(
        sandbox_exec, sandbox_write_file, sandbox_read_file, sandbox_list_files, sandbox_stats
    )


def create_sandkasten_tools(session: Session) -> list[Any]:
    """The same tools, bound to one session."""

    async def sandbox_exec(cmd: str, timeout_ms: int = 30000) -> str:
        """Run a shell command in the sandbox. Directory and variables stay for the next call."""
        return await run_command(session, cmd, timeout_ms)

    async def sandbox_write_file(path: str, content: str) -> str:
        """Write a text file in the sandbox."""
        return await write_file(session, path, content)

    async def sandbox_read_file(path: str, max_bytes: int | None = None) -> str:
        """Read a text file of the sandbox."""
        return await read_file(session, path, max_bytes)

    async def sandbox_list_files(path: str = ".") -> str:
        """List a folder of the sandbox."""
        return await list_files(session, path)

    async def sandbox_stats() -> str:
        """How much memory and CPU the sandbox uses."""
        return await tell_stats(session)

    return _made(
        sandbox_exec, sandbox_write_file, sandbox_read_file, sandbox_list_files, sandbox_stats
    )


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


async def run_command(session: Session, cmd: str, timeout_ms: int) -> str:
    return _told(await session.exec(cmd, timeout_ms=timeout_ms))


async def write_file(session: Session, path: str, content: str) -> str:
    await session.write(path, content)
    return f"wrote {path}"


async def read_file(session: Session, path: str, max_bytes: int | None) -> str:
    found = await session.read(path, max_bytes=max_bytes)
    return found.content.decode("utf-8", "replace") + ("\n(truncated)" if found.truncated else "")


async def list_files(session: Session, path: str) -> str:
    where = "" if path in ("", ".") else f" -- {shlex.quote(path)}"
    return _told(await session.exec(f"ls -la{where}"))


async def tell_stats(session: Session) -> str:
    found = await session.stats()
    used, limit = found.memory_bytes / 2**20, found.memory_limit / 2**20
    return (
        f"memory_bytes={found.memory_bytes} ({used:.2f} MB), "
        f"memory_limit={found.memory_limit} ({limit:.2f} MB), "
        f"cpu_usage_usec={found.cpu_usage_usec}"
    )


def _told(result: ExecResult) -> str:
    return f"exit_code={result.exit_code}\ncwd={result.cwd}\n---\n{result.output}"


def _made(*functions: Any) -> list[Any]:
    try:
        agents = import_module("agents")
    except ImportError as exc:
        message = "these tools are for the OpenAI Agents SDK: pip install openai-agents"
        raise ImportError(message) from exc
    for function in functions:
        if "ctx" in function.__annotations__:  # by which the SDK tells it from an argument
            function.__annotations__["ctx"] = agents.RunContextWrapper[Any]
    return [agents.function_tool(function) for function in functions]


__all__ = [
    "SandkastenContext",
    "create_sandkasten_tools",
    "sandbox_tools_for_workspace",
    "sandkasten_tools",
]
