"""What runs in the namespaces of a cluster: their first process, and the way in from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from .config import API_SERVICE, NODE_IP, SEEN_BY_KUBELET


def init() -> None:
    """The first process: it prepares mounts and network, and reaps."""
    # Blocked before there are any, so that none is missed between two waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for command in (
        "mount --make-rshared /",
        "mount -t tmpfs -o mode=755 run /run",
        "mount -t tmpfs -o mode=755 log /var/log",
        "mkdir -p /run/lib/upper /run/lib/work /run/lock",
        "mount -t overlay -o lowerdir=/var/lib,upperdir=/run/lib/upper,workdir=/run/lib/work"
        " lib /var/lib",
        "ip link set lo up",
        f"ip address add {API_SERVICE}/32 dev lo",
        "ip link add node type bridge",
        f"ip address add {NODE_IP}/24 dev node",
        "ip link set node up",
    ):
        ran = subprocess.run(command.split(), capture_output=True, text=True)
        if ran.returncode:
            sys.exit(f"{command}: {ran.stderr.strip()}")
    for setting, value in SEEN_BY_KUBELET.items():
        path = Path("/run/sysctl", setting)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    os.write(1, b"1")
    os.close(1)
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigwait({signal.SIGCHLD})


def relay() -> None:
    """Lead a port outside, and the Service of the API server, to the API server."""
    outside = socket.socket(fileno=int(os.environ["LISTENER"]))
    port = outside.getsockname()[1]
    service = socket.create_server((API_SERVICE, 443), backlog=1000)
    threading.Thread(target=_forward, args=(service, port)).start()
    _forward(outside, port)


def _forward(listener: socket.socket, port: int) -> None:
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_connect, args=(client, port)).start()


def _connect(client: socket.socket, port: int) -> None:
    with client, contextlib.suppress(OSError):
        server = socket.create_connection(("127.0.0.1", port))
        with server:
            back = threading.Thread(target=_copy, args=(server, client))
            back.start()
            _copy(client, server)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := source.recv(1 << 17):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one of them was reset, so the other way has ended, too
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
