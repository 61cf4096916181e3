"""A box that lives as long as one command."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from hutch import factory
from hutch import operations as op
from hutch.client.transport import AsyncTransport
from hutch.engine.engine import Engine
from hutch.errors import InvalidRequest
from hutch.types import BoxInfo

from .place import use_its_images
from .program import Launcher
from .screen import complain

# How a box reports a limit that is not enforced, by the option that sets it.
NOT_ENFORCED = {"--memory": "memory is watched", "--cpus": "cpu is not bounded"}

SHORT = {"--memory": "-m"}

CLOSE_TIMEOUT = 5  # seconds; after that, the launcher cleans up once our process is gone


@asynccontextmanager
async def open_box(
    operation: op.OpenSession, launcher: Launcher
) -> AsyncIterator[tuple[AsyncTransport, BoxInfo]]:
    """A new box and its transport. The box is gone when the `with` is left, however it is."""
    name = operation.backend or factory.default()
    if name != "namespaces":
        dismiss(launcher)
        launcher = None
    backend = factory.backend(name, launcher=launcher)
    engine = Engine(backend, factory.image_source(name), factory.data_folder)
    try:
        yield engine, await engine.perform(operation)
    finally:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                if launcher:
                    # The engine would end the box first, then the launcher. Ending the launcher
                    # ends both, in half the time.
                    await backend.close()
                await engine.close()
        except TimeoutError:
            pass


def box_for(
    args: argparse.Namespace, operation: op.OpenSession, launcher: Launcher
) -> AbstractAsyncContextManager[tuple[AsyncTransport, BoxInfo]]:
    """A new box here; or, if a server is named, a session there, new or existing."""
    session = getattr(args, "session", None)
    if not (session or args.url or os.environ.get("HUTCH_URL")):
        if operation.image not in ("", "host"):
            use_its_images()
        return open_box(operation, launcher)
    dismiss(launcher)
    from . import server  # imports an HTTP client, which takes longer than making a box

    if session:
        return server.in_session(args.url, session)
    return server.open_session(args.url, operation)


def refuse_box_options(options: Iterable[str], fine: Iterable[str]) -> None:
    """Refuse options that only a new box can have. Raises InvalidRequest."""
    for word in options:
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        if name.startswith("-") and name not in ("--session", "--url", *fine):
            raise InvalidRequest(f"{name} is for a new box: an existing session cannot be changed")


def warn_of_limits(options: Iterable[str], info: BoxInfo) -> None:
    """Warn of each limit that was set by an option and is not enforced on this machine."""
    for option, beginning in NOT_ENFORCED.items():
        given = any(
            word.partition("=")[0] == option or word[:2] == SHORT.get(option) for word in options
        )
        for why in info.degraded if given else ():
            if why.startswith(beginning):
                complain(f"{option} is not enforced here: {why}")


def as_ended(info: BoxInfo) -> BoxInfo:
    """The record of a box that ended with its command."""
    return replace(info, status="destroyed", ended_at=time.time())


def dismiss(launcher: Launcher) -> None:
    """End a launcher that was started early and is not needed."""
    if launcher:
        pid, control = launcher
        os.close(control)
        os.waitpid(pid, 0)
