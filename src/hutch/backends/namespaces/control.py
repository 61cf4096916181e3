"""The host's connection to a launcher: requests go out, answers and descriptors come back."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from typing import Any

from hutch.errors import (
    TOO_MANY_FILES,
    BackendUnavailable,
    HutchError,
    InvalidRequest,
    NoCapacity,
    from_code,
)

from .rights import ADVICE

Answer = tuple[dict[str, Any], list[int]]  # the body, and the descriptors that came with it


class LauncherGone(BackendUnavailable):
    """The launcher ended, or was killed, without an answer."""


class Control:
    """A connection to one launcher, which may end before us."""

    def __init__(self, sock: socket.socket, child: int | None = None) -> None:
        """`child`: the launcher's pid, if it is our child."""
        sock.setblocking(False)
        self._sock, self._child = sock, child
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._requests = 0
        self._sending = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._room: asyncio.Future[None] = self._loop.create_future()
        self.refusal: HutchError | None = None  # it could not start, or serves another host
        self.is_over = False
        self._loop.add_reader(sock, self._read_answer)

    async def ask(self, do: str, **body: object) -> Answer:
        """Send a request and wait for its answer.

        Raises the error that the launcher answered with, LauncherGone if it ended before, and
        InvalidRequest for a request that is too long for one message.
        """
        self._requests += 1
        number = self._requests
        message = json.dumps({"request": number, "do": do, **body}).encode()
        if len(message) > 200 * 1024:
            raise InvalidRequest("too much environment, or too many mounts, for one box")
        if self.is_over:
            raise self.refusal or LauncherGone("the launcher hung up")
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._answers[number] = answer
        try:
            # One at a time: an event loop has one writer per socket.
            async with self._sending:
                await self._send(message)
            return await answer
        except OSError as exc:
            self._read_answer()  # a launcher that cannot start says why before it ends
            raise self.refusal or LauncherGone(f"the launcher hung up: {exc}") from exc
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and not answer.exception():
                for fd in answer.result()[1]:  # it arrived in the same moment
                    os.close(fd)
            raise
        finally:
            self._answers.pop(number, None)
            answer.cancel()  # otherwise asyncio logs an exception that was never retrieved

    async def _send(self, message: bytes) -> None:
        while True:
            try:
                self._sock.send(message)
                return
            except BlockingIOError:
                self._room = self._loop.create_future()
                self._loop.add_writer(self._sock, self._stir)
                await self._room

    def _stir(self) -> None:
        self._loop.remove_writer(self._sock)
        if not self._room.done():
            self._room.set_result(None)

    async def close(self, why: HutchError) -> None:
        """Hang up. Requests without an answer fail with `why`."""
        self._end(why)
        if self._child:
            child, self._child = self._child, None
            await asyncio.to_thread(reap, child)

    def _read_answer(self) -> None:
        if self.is_over:
            return
        try:
            message, fds, got = self._receive()
        except BlockingIOError:
            return
        if not message:
            self._lose_launcher()
            return
        body = json.loads(message)
        number = body.pop("request")
        if number == 0:
            self.refusal = from_code(body["code"], body["message"])
            self._fail(self.refusal)
            return
        waiting = self._answers.pop(number, None)
        if waiting is None or waiting.done():
            for fd in fds:
                os.close(fd)
        elif got & socket.MSG_CTRUNC:  # this process has no descriptor left
            for fd in fds:
                os.close(fd)
            waiting.set_exception(NoCapacity(f"this process has {TOO_MANY_FILES}"))
        elif "code" in body:
            waiting.set_exception(from_code(body["code"], body["message"]))
        else:
            waiting.set_result((body, list(fds)))

    def _receive(self) -> tuple[bytes, list[int], int]:
        """A message, its descriptors and flags; an empty one at the end. Raises BlockingIOError."""
        for _ in range(2):
            try:
                flags = socket.MSG_CMSG_CLOEXEC
                return socket.recv_fds(self._sock, 256 * 1024, 4, flags)[:3]
            except ConnectionResetError:
                # It ended with a request unread. Its last message can still be read after this.
                continue
            except BlockingIOError:
                raise
            except OSError:
                break
        return b"", [], 0

    def _lose_launcher(self) -> None:
        """The launcher was killed, and every box with it. The next start makes a new one."""
        self._end(self.refusal or LauncherGone(f"the launcher ended unexpectedly. {ADVICE}"))
        if self._child:
            child, self._child = self._child, None
            self._loop.run_in_executor(None, reap, child)

    def _end(self, why: HutchError) -> None:
        if not self.is_over:
            self.is_over = True
            self._loop.remove_reader(self._sock)
            self._stir()
            self._sock.close()
        self._fail(why)

    def _fail(self, error: Exception) -> None:
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._answers.clear()


def reap(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass  # the program that embeds us collects its children itself
