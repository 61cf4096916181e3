"""Move a program from Sandkasten to Hutch, in two steps. Install: pip install .

First: point Sandkasten's client at `hutch serve`, and change nothing else. Second, when you like:
use Hutch's own SDK. The same work is done in both ways here. The server is the one of HUTCH_URL and
HUTCH_API_KEY, or one that this program starts and stops.
"""

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from hutch import AsyncSandbox

# Or keep the original, from PyPI: from sandkasten import SandboxClient
from hutch.compat.sandkasten import SandboxClient

SLOW = "echo begun; sleep 60"


async def with_sandkasten(url: str, key: str) -> None:
    # Was: SandboxClient(base_url="http://your-sandkasten:8080", api_key="sk-...")
    client = SandboxClient(base_url=url, api_key=key)
    async with client, await client.create_session(image="host", ttl_seconds=300) as session:
        await session.exec("cd /tmp && export NAME=world")
        result = await session.exec("echo hello $NAME in $PWD; exit 3")
        print(result.exit_code, result.output, end="")
        async for chunk in session.exec_stream("echo one; echo two"):
            print(chunk.output, end="")
        await session.write("notes.txt", "some notes")
        print((await session.read("notes.txt")).content.decode())
        try:
            await session.exec(SLOW, timeout_ms=500)
        except Exception as exc:  # its class depends on the client
            print(f"timed out: {type(exc).__name__}")


async def with_hutch(url: str, key: str) -> None:
    async with await AsyncSandbox.create(url=url, api_key=key, image="host", ttl=300) as box:
        await box.shell.run("cd /tmp && export NAME=world")
        result = await box.shell.run("echo hello $NAME in $PWD; exit 3")
        print(result.exit_code, result.output, end="")  # and .stdout, .stderr, apart
        await box.shell.run("echo one; echo two", on_stdout=lambda text: print(text, end=""))
        await box.files.write("notes.txt", "some notes")
        print(await box.files.read("notes.txt"))
        result = await box.shell.run(SLOW, timeout=0.5)
        print(f"timed out: {result.timed_out}, it printed {result.output!r}")  # a result


@contextmanager
def server() -> Iterator[tuple[str, str]]:
    """The address of a server, and a key."""
    if "HUTCH_URL" in os.environ:
        yield os.environ["HUTCH_URL"], os.environ["HUTCH_API_KEY"]
        return
    with tempfile.TemporaryDirectory() as folder:
        serve = [sys.executable, "-m", "hutch", "serve", "--listen", "127.0.0.1:0"]
        env = {**os.environ, "HUTCH_API_KEY": (key := secrets.token_urlsafe())}
        with subprocess.Popen(
            [*serve, "--data-dir", folder], env=env, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout
            try:
                yield process.stdout.readline().split()[-1], key  # serving at http://...
            finally:
                process.terminate()


def main() -> None:
    with server() as (url, key):
        print("--- with Sandkasten's client")
        asyncio.run(with_sandkasten(url, key))
        print("--- with Hutch's SDK")
        asyncio.run(with_hutch(url, key))


if __name__ == "__main__":
    main()
