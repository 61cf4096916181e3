"""What MCP adds: `hutch mcp` in a process of its own, asked in lines as its clients do.

The client here writes prepared lines and reads answers, so what is measured is the server's.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from hutch import Sandbox

from .measure import Contender, Promise, milliseconds
from .peers import Peers

HELLO = {"protocolVersion": "2025-11-25", "capabilities": {},
         "clientInfo": {"name": "benchmarks", "version": "1"}}  # fmt: skip
TRUE = {"name": "bash", "arguments": {"command": "true"}}


class Talk:
    """A client that does as little as one can."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hutch", "mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._number = 0
        self.ask("initialize", HELLO)
        self._write({"method": "notifications/initialized"})

    def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        self._write({"id": self._number, "method": method, "params": params})
        assert self.process.stdout
        for line in self.process.stdout:
            answer: dict[str, Any] = json.loads(line)
            if answer.get("id") == self._number:
                return answer
        raise RuntimeError("hutch mcp has gone")

    def true(self) -> None:
        result = self.ask("tools/call", TRUE)["result"]
        assert not result.get("isError"), result

    def _write(self, message: dict[str, Any]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.process.stdin.flush()

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@contextlib.contextmanager
def added_to_tool(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    """What the protocol adds to a tool in a warm box."""
    with contextlib.closing(Talk()) as talk, Sandbox.create() as box:

        def here() -> None:
            box.tools.call("bash", {"command": "true"})

        for work in (talk.true, here):
            work()
        turns = size.turns * 5
        yield [
            Contender("hutch over MCP", partial(milliseconds, talk.true), turns),
            Contender("hutch embedded", partial(milliseconds, here), turns),
            Contender("more over MCP than embedded",
                      lambda: -milliseconds(here) + milliseconds(talk.true), turns,
                      promise=Promise(5, of_value=True)),
        ]  # fmt: skip
