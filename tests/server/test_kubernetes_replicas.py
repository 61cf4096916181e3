"""Several `hutch serve` for the Pods of one cluster: killed, hung and stopped under clients."""

from __future__ import annotations

import json
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from cluster_of_tests import ask
from daemon_of_tests import KEY, Daemon, wait_for
from docker_of_tests import DEBIAN
from hutch import HutchError, Sandbox
from hutch.errors import ServerUnavailable, SessionEnded
from kubernetes_of_tests import Boxes
from kubernetes_of_tests import boxes as boxes
from kubernetes_of_tests import with_runtime as with_runtime


def replica(folder: Path, boxes: Boxes, **more: str) -> Daemon:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = boxes.settings()
    wanted = {
        "backend": "kubernetes",
        "default_image": f"{DEBIAN}:latest",
        "kubernetes_namespace": settings.namespace,
        "kubernetes_runtime_image": settings.runtime_image,
        "kubernetes_replica_url": f"http://127.0.0.1:{port}",
        "pool_enabled": "false",
        "drain_seconds": "1",
        **more,
    }
    return Daemon(folder, port=port, **wanted)


@pytest.fixture
def three(tmp_path: Path, boxes: Boxes) -> Iterator[list[Daemon]]:
    with ExitStack() as stack:
        made = [stack.enter_context(replica(tmp_path / name, boxes)) for name in "abc"]
        yield made
        for daemon in made:
            daemon.process.send_signal(signal.SIGCONT)


def connected(id: str, daemon: Daemon) -> Sandbox:
    return Sandbox.connect(id, url=daemon.url, api_key=KEY)


def created(daemon: Daemon) -> Sandbox:
    return Sandbox.create(url=daemon.url, api_key=KEY, ttl=900, memory="192m")


def status_of(id: str, daemon: Daemon) -> str:
    """Asking for it does not count as use."""
    request = Request(f"{daemon.url}/v1/sessions/{id}", headers={"Authorization": f"Bearer {KEY}"})
    with urlopen(request) as answer:
        return str(json.load(answer)["status"])


def patiently(box: Sandbox, command: str) -> str:
    """At a server that may just find out that another one has the session, and says so."""
    for _ in range(20):
        try:
            return box.shell.run(command).stdout
        except ServerUnavailable as exc:
            assert "was taken over by another server" in str(exc)
            time.sleep(0.2)
    raise AssertionError("it never found out")


def held(boxes: Boxes, id: str) -> str:
    """The holder in the record of a session."""
    maps = ask(boxes.cluster, "GET", f"{boxes.path}/configmaps")["items"]
    (text,) = [m["data"]["text"] for m in maps if m.get("data", {}).get("key") == id]
    return str(text.partition('"holder":"')[2].partition("#")[0])


def test_a_session_goes_on_at_any_server_whatever_happens_to_the_one_that_had_it(
    three: list[Daemon], boxes: Boxes
) -> None:
    a, b, c = three
    box = created(a)
    box.shell.run("A=1; cd /tmp")
    box.run_code("x = 2")
    other = connected(box.id, b)
    assert other.shell.run("echo $A $PWD").stdout == "1 /tmp\n"
    other.files.write("/tmp/note", "hi")
    assert other.files.read("/tmp/note") == "hi" and held(boxes, box.id) == a.url
    a.crash()
    began = time.monotonic()
    assert other.shell.run("echo $A $PWD").stdout == "1 /tmp\n"
    took = time.monotonic() - began
    assert other.run_code("x").text == "2" and held(boxes, box.id) == b.url
    assert connected(box.id, c).shell.run("A=2; echo $A").stdout == "2\n"
    # One that hangs counts as gone; when it goes on, it finds out, and leaves the session alone.
    b.process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)  # an answer counts for a second
    assert connected(box.id, c).shell.run("echo $A").stdout == "2\n"
    assert held(boxes, box.id) == c.url
    b.process.send_signal(signal.SIGCONT)
    assert patiently(connected(box.id, b), "echo $A") == "2\n"
    a.start()
    assert [info.id for info in Sandbox.list(url=a.url, api_key=KEY)] == [box.id]
    assert c.signal(signal.SIGTERM) == 0
    assert connected(box.id, a).shell.run("echo $A").stdout == "2\n"
    connected(box.id, b).kill()
    assert wait_for(lambda: not boxes.pods(), 60)
    with pytest.raises(SessionEnded):
        connected(box.id, a).shell.run("true")
    print(f"taken over in {took:.2f} s")


def test_what_nobody_asks_for_ends_in_time_though_its_server_is_gone(
    three: list[Daemon], boxes: Boxes
) -> None:
    a, b, _ = three
    box = Sandbox.create(url=a.url, api_key=KEY, ttl=900, idle=8, memory="192m")
    a.crash()

    assert status_of(box.id, b) == "running"
    assert wait_for(lambda: status_of(box.id, b) == "expired", 120), status_of(box.id, b)
    assert wait_for(lambda: not boxes.pods(), 60)


def test_twenty_clients_lose_no_session_while_servers_are_killed(
    three: list[Daemon], boxes: Boxes
) -> None:
    sessions = [created(daemon) for daemon in three for _ in range(2)]
    for number, box in enumerate(sessions):
        box.shell.run(f"N={number}")
    wrong: list[str] = []
    failures: list[str] = []
    counts = [0] * 20
    is_over = threading.Event()

    def client(me: int) -> None:
        luck = random.Random(me)
        while not is_over.is_set():
            number = luck.randrange(len(sessions))
            try:
                box = connected(sessions[number].id, luck.choice(three))
                said = box.shell.run("echo $N")
                counts[me] += 1
            except SessionEnded as exc:
                wrong.append(f"{me}: {exc}")
            except HutchError as exc:
                failures.append(f"{type(exc).__name__}: {exc}")  # its server was killed under it
                continue
            if said.stdout != f"{number}\n":
                wrong.append(f"session {number} said {said.output!r}")

    clients = [threading.Thread(target=client, args=(n,)) for n in range(20)]
    for thread in clients:
        thread.start()
    luck = random.Random(7)
    for _ in range(4):
        time.sleep(3)
        victim = luck.choice(three)
        victim.crash()
        time.sleep(1)
        victim.start()
    time.sleep(3)
    is_over.set()
    for thread in clients:
        thread.join()
    assert not wrong and min(counts) > 0, (wrong[:3], counts, failures[-5:])
    print(f"{sum(counts)} commands, {len(failures)} failed with a server")
    for number, box in enumerate(sessions):
        assert connected(box.id, three[0]).shell.run("echo $N").stdout == f"{number}\n"
        connected(box.id, three[1]).kill()
    assert wait_for(lambda: not boxes.pods(), 90)
