"""Two boxes know nothing of each other, also when one comes after the other."""

from __future__ import annotations

from typing import Any

from .hosts import FarThing, Operator

# Everywhere a program can leave something for another.
LEAVE = """
import ctypes, os, socket, sys, time
token, key = sys.argv[1], int(sys.argv[2])
for folder in ("/tmp", "/var/tmp", "/dev/shm", "/workspace", "/home/user", "/.hutch/run"):
    open(f"{folder}/{token}", "w").write(token)
kept = [socket.socket(socket.AF_UNIX), socket.socket()]
kept[0].bind("\\0" + token)
kept[1].bind(("127.0.0.1", 20000 + key % 10000))
[s.listen() for s in kept]
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
address = libc.shmat(libc.shmget(key, 4096, 0o1666), None, 0)
ctypes.memmove(ctypes.c_void_p(address), token.encode(), len(token))
libc.msgget(key, 0o1666)
print("left", flush=True)
time.sleep(1000)
"""
FIND = """
import ctypes, os, socket, sys
token, key = sys.argv[1], int(sys.argv[2])
for top in ("/tmp", "/var", "/dev/shm", "/workspace", "/home", "/.hutch", "/run", "/srv"):
    for folder, names, files in os.walk(top):
        if token in files + names: print("file", folder)
for family, address in ((socket.AF_UNIX, "\\0" + token),
                        (socket.AF_INET, ("127.0.0.1", 20000 + key % 10000))):
    try: socket.socket(family).connect(address); print("socket", address)
    except OSError: pass
if token in open("/proc/net/unix").read(): print("listed")
libc = ctypes.CDLL(None)
if libc.shmget(key, 0, 0) >= 0: print("shared memory")
if libc.msgget(key, 0) >= 0: print("queue")
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        text = open(f"/proc/{pid}/environ").read() + open(f"/proc/{pid}/cmdline").read()
    except OSError: continue
    if token in text and int(pid) != os.getpid(): print("process", pid)
print("done")
"""


def leave(box: FarThing, token: str) -> Any:
    handle = box.commands.run(["python3", "-c", LEAVE, token, "4711"], background=True)
    # With its output unbuffered, the line and its end may come one after the other.
    for item in iter(lambda: handle.stdout(), "left\n"):
        assert item in ("", "left")
    return handle


def find(box: FarThing, token: str) -> list[str]:
    result = box.commands.run(["python3", "-c", FIND, token, "4711"])
    *found, last = result.stdout.splitlines()
    assert last == "done", result.output
    return [str(line) for line in found]


def test_what_one_box_leaves_it_finds_again_itself(box: FarThing) -> None:
    leave(box, "mark-of-the-first")
    assert len(find(box, "mark-of-the-first")) == 12


def test_a_box_finds_nothing_of_another_that_runs_beside_it(operator: Operator) -> None:
    with operator.box(env={"TOKEN": "mark-of-the-first"}) as first, operator.box() as second:
        leave(first, "mark-of-the-first")
        assert find(second, "mark-of-the-first") == []


def test_a_box_finds_nothing_of_one_that_was_there_before_it(operator: Operator) -> None:
    with operator.box() as first:
        leave(first, "mark-of-the-first")
    with operator.box() as second:
        assert find(second, "mark-of-the-first") == []
        assert second.id != first.id


def test_a_box_starts_pristine(box: FarThing) -> None:
    listing = box.commands.run("ls -A /tmp /var/tmp /dev/shm /workspace /home/user /.hutch/run")
    assert [line for line in listing.stdout.split() if not line.startswith("/")] == []
    processes = box.commands.run("cat /proc/[0-9]*/comm").stdout.split()
    assert set(processes) <= {"hutch-zygote", "hutch-guest", "hutch-subreaper", "sh", "cat"}


def test_a_box_is_named_the_same_as_all_others_and_is_told_apart_by_its_machine_id(
    operator: Operator,
) -> None:
    with operator.box() as first, operator.box() as second:
        names = [box.commands.run("hostname; cat /etc/hostname").stdout for box in (first, second)]
        ids = [box.commands.run("cat /etc/machine-id").stdout for box in (first, second)]
    assert names == ["box\nbox\n"] * 2
    assert ids[0] != ids[1]
