"""K12, K13: sockets of every family. N: the network. S: what others share."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from typing import Any

from .base import CANARY, Blocked, call, family, first_of, libc, probe


def _socket(domain: int, kind: int, protocol: int = 0) -> str:
    socket.socket(domain, kind, protocol).close()
    return "a socket"


FAMILIES = {
    "ax25": 3, "ipx": 4, "appletalk": 5, "x25": 9, "key": 15, "packet": 17, "rds": 21,
    "pppox": 24, "can": 29, "tipc": 30, "bluetooth": 31, "rxrpc": 33, "ieee802154": 36,
    "alg": 38, "nfc": 39, "vsock": 40, "kcm": 41, "qipcrtr": 42, "smc": 43, "xdp": 44, "mctp": 45,
}  # fmt: skip


def _any_type(domain: int) -> str:
    failure: OSError | None = None
    for kind in (1, 2, 3, 5):
        try:
            return _socket(domain, kind)
        except OSError as exc:
            # Not of this type, but of another: the family itself was found.
            if exc.errno == errno.ESOCKTNOSUPPORT:
                return "reached the family"
            failure = failure or exc
    assert failure
    raise failure


family("K12", {name: lambda n=number: _any_type(n) for name, number in FAMILIES.items()})
family("K12", {
    "raw": lambda: _socket(2, 3, 1),
    "raw6": lambda: _socket(10, 3, 58),
    "old_packet": lambda: _socket(2, 10, 0x0300),
    "sctp": lambda: _socket(2, 1, 132),
    "udplite": lambda: _socket(2, 2, 136),
    "l2tp": lambda: _socket(2, 2, 115),
    "pair": lambda: _pair(30),
})  # fmt: skip


def _pair(domain: int) -> str:
    try:
        return f"{call('socketpair', domain, 1, 0, None)}"
    except OSError as exc:
        if exc.errno == errno.EFAULT:
            return "reached the kernel: EFAULT"
        raise


NETLINK = {"socket_diagnosis": 4, "xfrm": 6, "audit": 9, "netfilter": 12, "uevent": 15,
           "generic": 16, "crypto": 21}  # fmt: skip
family("K13", {name: lambda n=number: _socket(16, 3, n) for name, number in NETLINK.items()})


@probe("K13.change_a_link")
def _() -> str:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        # RTM_DELLINK of a link that does not exist, and ask for an answer.
        body = struct.pack("=BxHiII", 0, 0, 2**31 - 2, 0, 0)
        sock.send(struct.pack("=IHHII", 16 + len(body), 17, 1 | 4, 1, 0) + body)
        code = -struct.unpack_from("=i", sock.recv(4096), 16)[0]
    if code == errno.EPERM:
        raise OSError(code, "netlink")
    return errno.errorcode[code]


def _connect(domain: int, address: Any, kind: int = socket.SOCK_STREAM) -> str:
    with socket.socket(domain, kind) as sock:
        sock.settimeout(2)
        sock.connect(address)  # of a datagram socket: nothing is sent, but a route is looked up
    return "connected"


INET, INET6, UNIX, DATAGRAM = socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.SOCK_DGRAM
family("N01", {
    "loopback": lambda: _connect(INET, ("127.0.0.1", CANARY["port"])),
    "loopback_elsewhere": lambda: _connect(INET, ("127.9.9.9", CANARY["port"])),
    "address_of_the_host": lambda: _connect(INET, (CANARY["address"], CANARY["port"])),
    "metadata": lambda: _connect(INET, ("169.254.169.254", 80), DATAGRAM),
    "metadata6": lambda: _connect(INET6, ("fd00:ec2::254", 80), DATAGRAM),
    "internet": lambda: _connect(INET, ("192.0.2.1", 443), DATAGRAM),
    "names": lambda: _connect(INET, ("198.51.100.53", 53), DATAGRAM),
})  # fmt: skip


@probe("N01.interfaces")
def _() -> str:
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    if not names:
        raise Blocked("lo only")
    return " ".join(names)


@probe("N02.abstract_socket")
def _() -> str:
    return _connect(UNIX, "\0" + CANARY["token"])


@probe("N02.sockets_are_listed")
def _() -> str:
    with open("/proc/net/unix") as file:
        if CANARY["token"] not in file.read():
            raise Blocked("not listed")
    return "listed"


family("N03", {
    "socket_of_the_host": lambda: _connect(UNIX, CANARY["unix"]),
    "services": lambda: first_of(
        lambda path: f"{os.stat(path).st_ino}", "/run/docker.sock", "/var/run/docker.sock",
        "/run/containerd/containerd.sock", "/run/dbus/system_bus_socket", "/run/systemd/private",
        "/run/hutch", "/run/udev/control", "/run/lock",
    ),
})  # fmt: skip


@probe("S01.shared_memory")
def _() -> str:
    libc.shmat.restype = ctypes.c_void_p
    number = libc.shmget(CANARY["shm_key"], 0, 0)
    if number < 0:
        raise OSError(ctypes.get_errno(), "shmget")
    address = libc.shmat(number, None, 0o10000)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "shmat")
    if ctypes.string_at(address, len(CANARY["token"])).decode() != CANARY["token"]:
        raise Blocked("another one")
    return "the token"
