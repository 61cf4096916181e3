"""A server, and what a client can ask of it: run by an interpreter whose packages are tested.

It needs nothing but what Hutch itself requires, for it is run with the oldest versions of that.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib import import_module, metadata
from pathlib import Path

from websockets.client import ClientProtocol
from websockets.frames import Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from hutch import AsyncSandbox, Sandbox, pidfile
from hutch.types import Chunk, Result

PATIENCE = 120  # seconds for a server to start, or to stop


def main() -> None:
    for name in [name for name in os.environ if name.startswith("HUTCH_")]:
        del os.environ[name]  # they would win over the config file
    with tempfile.TemporaryDirectory(prefix="hutch-round-trip-") as place:
        folder = Path(place, "data")
        config = Path(place, "hutch.yaml")
        config.write_text(f'listen: "127.0.0.1:0"\ndata_dir: {folder}\n')
        server = subprocess.Popen([sys.executable, "-m", "hutch", "serve", "--config", str(config)])
        try:
            end = time.monotonic() + PATIENCE
            while pidfile.server_of(folder) is None:
                assert server.poll() is None, "the server ended"
                assert time.monotonic() < end, "the server does not start"
                time.sleep(0.05)
            found = pidfile.server_of(folder)
            assert found
            asyncio.run(talk(found.url))
            use(found.url)
        finally:
            try:
                subprocess.run(
                    [sys.executable, "-m", "hutch", "stop", "--kill", "--data-dir", str(folder)],
                    check=True,
                    timeout=PATIENCE,
                )
                server.wait(PATIENCE)
            finally:
                server.kill()
    print("all of it works")


async def talk(url: str) -> None:
    async with await AsyncSandbox.create(url=url) as box:
        assert (await box.shell.run("echo async")).stdout == "async\n"


def use(url: str) -> None:
    with Sandbox.create(url=url, env={"GIVEN": "here"}, labels={"of": "round-trip"}) as box:
        assert box.shell.run("cd /tmp; echo $GIVEN").stdout == "here\n"
        assert box.run_code("6 * 7").text == "42"
        with box.shell.stream("echo one; pwd") as stream:
            items = list(stream)
        assert isinstance(items[0], Chunk) and isinstance(items[-1], Result)
        assert items[-1].stdout == "one\n/tmp\n"
        box.files.write("/workspace/a", b"\0" * 3_000_000)
        assert len(box.files.read("/workspace/a", format="bytes")) == 3_000_000
        assert [entry.path for entry in box.files.list("/workspace")] == ["/workspace/a"]
        _upload(f"{url}/v1/sessions/{box.id}/fs/upload")
        assert bytes(box.files.read("/workspace/form.txt", format="bytes")) == b"from a form"
        _terminal(f"{url.replace('http', 'ws', 1)}/v1/sessions/{box.id}/pty")
        background = box.commands.run("read x; echo got $x", background=True)
        background.send_stdin("it\n")
        assert background.wait().stdout == "got it\n"
        _port(box, f"{url}/v1/sessions/{box.id}/ports/8000/http/")
        box.hibernate()
        assert box.shell.run("echo $GIVEN; pwd").stdout == "here\n/tmp\n"
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            assert b"hutch_sessions_running 1.0" in answer.read()
        packages = {package.name for package in metadata.distributions()}
        if "mcp" in packages:
            _mcp(f"{url}/mcp")
        if "aiodocker" in packages:
            import_module("hutch.backends.docker")
        with urllib.request.urlopen(f"{url}/openapi.json", timeout=30) as answer:
            assert json.load(answer)["openapi"].startswith("3.")
    assert Sandbox.list(url=url) == []


def _upload(url: str) -> None:
    body = io.BytesIO()
    body.write(b"--edge\r\nContent-Disposition: form-data; ")
    body.write(b'name="file"; filename="form.txt"\r\n\r\nfrom a form\r\n--edge--\r\n')
    headers = {"Content-Type": "multipart/form-data; boundary=edge"}
    request = urllib.request.Request(url, body.getvalue(), headers, method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200


def _mcp(url: str) -> None:
    client = {"name": "round trip", "version": "1"}
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
    }
    request = urllib.request.Request(url, json.dumps(hello).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert b"serverInfo" in answer.read()


def _terminal(url: str) -> None:
    # Without I/O of its own: the threaded client of websockets 14 drops what came before a close.
    uri = parse_uri(url)
    protocol = ClientProtocol(uri)
    protocol.send_request(protocol.connect())
    shown, texts, said = b"", [], False
    with socket.create_connection((uri.host, uri.port), timeout=60) as connection:
        while True:
            for data in protocol.data_to_send():
                connection.sendall(data)
            if protocol.close_expected():
                break
            protocol.receive_data(connection.recv(65536))
            for event in protocol.events_received():
                if isinstance(event, Response):
                    assert event.status_code == 101
                elif event.opcode is Opcode.TEXT:
                    texts.append(json.loads(event.data))
                elif event.opcode is Opcode.BINARY:
                    shown += event.data
            if texts and not said:
                said = True
                protocol.send_text(json.dumps({"resize": [100, 30]}).encode())
                protocol.send_binary(b"stty size; exit 7\n")
    assert "process" in texts[0] and texts[-1] == {"exit_code": 7}, texts
    assert b"30 100" in shown, shown


def _port(box: Sandbox, url: str) -> None:
    serving = box.commands.run("python3 -m http.server 8000", background=True, cwd="/workspace")
    end = time.monotonic() + PATIENCE
    while not any(port.port == 8000 for port in box.ports()):
        assert time.monotonic() < end, "nothing listens in the box"
        time.sleep(0.05)
    with urllib.request.urlopen(f"{url}form.txt", timeout=30) as answer:
        assert answer.read() == b"from a form"
    serving.kill()


if __name__ == "__main__":
    main()
