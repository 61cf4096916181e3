"""Images made to attack what unpacks them or makes a box of them."""

from __future__ import annotations

import io
import os
import stat
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest

from hutch.backends.namespaces.plan import STORE_BASE
from hutch.backends.namespaces.unpack import unpack
from hutch.errors import InvalidRequest, NoSpace, StartFailed
from hutch.tree import remove
from layers_of_tests import (
    Entry,
    Inside,
    busybox,
    file,
    folder,
    hard_link,
    in_box,
    layer_of,
    link,
    root_of,
    special,
    tar_of,
    unpack_bytes,
)

ROOT = os.geteuid() == 0
PLACES = ("proc", "sys", "dev", "tmp", "var", "etc", "workspace", "home", ".hutch", "run")
INNER = ("var/tmp", "home/user", "dev/null", "dev/pts", "dev/shm", ".hutch/run", ".hutch/lib",
         "etc/passwd", "etc/group", "etc/hosts", "etc/hostname", "etc/resolv.conf")  # fmt: skip


def tree(top: Path) -> dict[str, tuple[int, int, int]]:
    """All that is in a folder, and whose it is."""
    found = {}
    for path in (top, *top.rglob("*")):
        info = path.lstat()
        found[str(path)] = (info.st_mode, info.st_uid, info.st_size)
    return found


# --- I01: what a box mounts and writes, where an image has links ------------------------------


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A folder of the host's that no image may reach."""
    top = tmp_path / "canary"
    for name in ("tmp", "user", "null", "pts", "run", "lib"):
        (top / name).mkdir(parents=True)
    for name in ("passwd", "group", "hosts", "hostname", "resolv.conf"):
        (top / name).write_text("of the host\n")
    for path in (top, *top.iterdir()):
        path.chmod(0o777)
    return top


async def is_as_it_should(box: Inside) -> None:
    """Whether what isolates and serves a box is in its place."""
    assert await box.sh("cat /proc/1/comm") == "hutch-guest\n"
    assert await box.sh("stat -c '%F %t %T' /dev/null") == "character special file 1 3\n"
    for place in ("/tmp", "/var/tmp", "/workspace", "/home/user"):
        assert await box.sh(f"touch {place}/x && readlink {place}") == "", place
    mounts = {line.split()[2]: line for line in (await box.sh("mount")).splitlines()}
    for place in ("/", "/proc", "/dev", "/.hutch", "/tmp", "/var/tmp", "/workspace"):
        assert place in mounts, place
    assert " ro," in mounts["/proc/sys"].replace("(", " ") and "nodev" in mounts["/"]
    assert await box.sh("cat /etc/hostname; readlink /etc; readlink /etc/passwd") == "box\n"
    assert "user:x:1000" in await box.sh("cat /etc/passwd")


@pytest.mark.parametrize(
    "target", ["/", "../../..", "/proc/self/fd", "/proc/1/root", "canary", "."]
)
def test_links_in_the_place_of_folders_lead_nowhere(
    target: str, canary: Path, tmp_path: Path
) -> None:
    where = str(canary) if target == "canary" else target
    layer = layer_of(tmp_path / "layer", *busybox(), *(link(name, where) for name in PLACES))
    before = tree(canary)
    in_box(root_of([layer]), is_as_it_should)
    assert tree(canary) == before


@pytest.mark.parametrize("target", ["/", "../../../..", "/proc/self/fd", "canary"])
def test_links_further_inside_lead_nowhere_either(
    target: str, canary: Path, tmp_path: Path
) -> None:
    where = str(canary) if target == "canary" else target
    links = (link(name, f"{where}/{name.rpartition('/')[2]}") for name in INNER)
    layer = layer_of(tmp_path / "layer", *busybox(), *links)
    before = tree(canary)
    in_box(root_of([layer]), is_as_it_should)
    assert tree(canary) == before


def test_files_and_fifos_in_the_place_of_folders_give_way(tmp_path: Path) -> None:
    files = [file(name, "in the way") for name in PLACES[:5]]
    pipes = [special(name, tarfile.FIFOTYPE) for name in PLACES[5:]]
    in_box(root_of([layer_of(tmp_path / "layer", *busybox(), *files, *pipes)]), is_as_it_should)


def test_a_folder_in_the_place_of_a_file_is_refused_by_name(tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "layer", *busybox(), folder("etc/hosts"), file("etc/hosts/x"))
    with pytest.raises(StartFailed, match="/etc/hosts"):
        in_box(root_of([layer]), is_as_it_should)


def test_the_image_s_own_things_in_our_folder_are_not_seen(tmp_path: Path) -> None:
    entries = [file(".hutch/bash", "echo evil"), file(".hutch/lib/hutch_kernel/main.py", "evil"),
               file(".hutch/evil")]  # fmt: skip

    async def work(box: Inside) -> None:
        await is_as_it_should(box)
        assert "evil" not in await box.sh("ls /.hutch /.hutch/lib; cat /.hutch/bash")

    in_box(root_of([layer_of(tmp_path / "layer", *busybox(), *entries)]), work)


# --- I04: what is read of an image on the host ----------------------------------------------


@pytest.mark.parametrize(
    "passwd",
    [
        b"x" * (10 << 20),
        b"user:x:4294967296:0::/:/bin/sh\nuser:x:-1:0::/:/bin/sh\n",
        b"user:x:99999999999999999999:1000::/:/bin/sh\n",
        b"\xff\xfe\0\n" * 1000,
        b"+::::::\n+@all::::::\nuser\n:::::::\n",
        b"../../x:x:5:5::/:/bin/sh\na\x1b[2Jb:x:6:6::/:/bin/sh\n",
        "².:x:²:²::/:/bin/sh\n".encode(),
    ],
    ids=["long", "beyond", "far", "noise", "nis", "names", "digits"],
)
def test_a_list_of_users_that_makes_no_sense_is_as_good_as_none(
    passwd: bytes, tmp_path: Path
) -> None:
    layer = layer_of(
        tmp_path / "layer", *busybox(), file("etc/passwd", passwd), file("etc/group", passwd)
    )

    async def work(box: Inside) -> None:
        names = [line.split(":")[0] for line in (await box.sh("cat /etc/passwd")).splitlines()]
        assert sorted(names) == ["hutch", "nobody", "root", "user"]
        assert await box.sh("id -u") == "1000\n"

    in_box(root_of([layer]), work)


@pytest.mark.parametrize("kind", ["fifo", "link", "folder above"])
def test_a_list_of_users_that_is_no_file_is_not_opened(
    kind: str, canary: Path, tmp_path: Path
) -> None:
    (canary / "passwd").write_text("stolen:x:1234:1234::/:/bin/sh\n")
    entries = {
        "fifo": [special("etc/passwd", tarfile.FIFOTYPE)],
        "link": [link("etc/passwd", str(canary / "passwd"))],
        "folder above": [link("etc", str(canary))],
    }[kind]
    root = root_of([layer_of(tmp_path / "layer", *busybox(), *entries)], user="stolen")
    if ROOT:
        with pytest.raises(InvalidRequest, match="no user 'stolen'"):
            in_box(root, is_as_it_should)
    else:
        in_box(root, is_as_it_should)


# --- I02 and H10: layers that try to get out --------------------------------------------------


def pax(name: str, **headers: str) -> Entry:
    info, data = file(name, "x")
    info.pax_headers = headers
    return info, data


def outside(tmp_path: Path) -> Path:
    """What is beside the folder that a layer is unpacked to."""
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside/secret").write_text("secret")
    (tmp_path / "layer").mkdir()
    return tmp_path / "layer"


REFUSED = {
    "out": [file("../x")],
    "out, inside": [file("a/../../x")],
    "out, by pax": [pax("fine", path="../../x")],
    "hard link out": [hard_link("x", "../beside/secret")],
    "hard link out, absolute": [hard_link("x", "/etc/passwd")],
    "hard link through a link": [link("l", "../beside"), hard_link("x", "l/secret")],
    "hard link to a folder": [folder("a"), hard_link("b", "a")],
    "through a link out": [link("l", "../beside"), file("l/x")],
    "through an absolute link": [link("l", "/etc"), file("l/x")],
    "through links in a circle": [link("a", "b"), link("b", "a"), file("a/x")],
    "through a file": [file("a"), file("a/../a/x")],
    "a removal without a name": [file(".wh.")],
    "a removal of itself": [file("a/.wh..")],
    "a removal of what is above": [file("a/.wh...")],
    "no name": [file(".")],
    "a name that is too long": [file("x" * 300)],
    "a path that is too long": [file("/".join(["d" * 200] * 30))],
    "holes": [special("s", tarfile.GNUTYPE_SPARSE)],
    "holes, by pax": [pax("s", **{"GNU.sparse.major": "1", "GNU.sparse.realsize": "1" + "0" * 12})],
    "an unknown kind": [special("s", b"Z")],
    "an invalid owner": [pax("s", uid="a")],
}


@pytest.mark.parametrize("entries", REFUSED.values(), ids=REFUSED.keys())
def test_a_layer_that_leads_out_or_nowhere_is_refused(entries: list[Entry], tmp_path: Path) -> None:
    layer = outside(tmp_path)
    before = tree(tmp_path / "beside")
    with pytest.raises(InvalidRequest):
        unpack_bytes(tar_of(file("first"), *entries), layer)
    assert os.listdir(layer) == []
    assert tree(tmp_path / "beside") == before
    assert sorted(os.listdir(tmp_path)) == ["beside", "layer"]


def test_folders_whose_links_lead_ever_deeper_do_not_lead_out(tmp_path: Path) -> None:
    layer = outside(tmp_path)
    long, entries, path = "d" * 247, [], ""
    for letter in "abcdefghijklmnop":
        entries += [folder(f"{path}{long}"), link(f"{path}{letter}", long)]
        path += letter + "/"
    entries += [link(f"{path}{'l' * 254}", "../" * 16), link("escape", f"{path}{'l' * 254}/../..")]
    try:
        unpack_bytes(tar_of(*entries, file("escape/x")), layer)
    except InvalidRequest:
        assert os.listdir(layer) == []
    assert sorted(os.listdir(tmp_path)) == ["beside", "layer"]
    assert os.listdir(tmp_path / "beside") == ["secret"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no tar at all",
        os.urandom(4096),
        tar_of(file("a", b"x" * 5000))[:2000],
        b"\x1f\x8b" * 600,
    ],
    ids=["empty", "text", "noise", "cut", "gzip"],
)
def test_what_is_no_tar_is_refused_or_empty(data: bytes, tmp_path: Path) -> None:
    layer = outside(tmp_path)
    if data:
        with pytest.raises(InvalidRequest):
            unpack_bytes(data, layer)
    else:
        unpack_bytes(data, layer)
    assert os.listdir(layer) == []


def test_names_that_begin_at_the_root_begin_at_the_layer(tmp_path: Path) -> None:
    layer = outside(tmp_path)
    unpack_bytes(tar_of(file("/etc/x", "x"), file("//y", "y"), file("./z")), layer)
    assert (layer / "etc/x").read_text() == "x" and sorted(os.listdir(layer)) == ["etc", "y", "z"]


def test_a_link_that_stays_inside_is_followed_as_in_the_image(tmp_path: Path) -> None:
    layer = outside(tmp_path)
    unpack_bytes(tar_of(folder("usr/lib"), link("lib", "/usr/lib"), file("lib/x", "x")), layer)
    assert (layer / "usr/lib/x").read_text() == "x"


def test_set_id_bits_are_dropped_and_the_sticky_one_kept(tmp_path: Path) -> None:
    layer = outside(tmp_path)
    entries = [file("s", mode=0o6755), folder("d", mode=0o7777), folder("tmp", mode=0o1777)]
    unpack_bytes(tar_of(*entries), layer)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in layer.iterdir()}
    assert modes == {"s": 0o755, "d": 0o1777, "tmp": 0o1777}


def test_devices_are_left_out(tmp_path: Path) -> None:
    layer = outside(tmp_path)
    devices = [special("null", tarfile.CHRTYPE, devmajor=1, devminor=3),
               special("disk", tarfile.BLKTYPE, devmajor=8, devminor=0),
               special("removed", tarfile.CHRTYPE)]  # fmt: skip
    unpack_bytes(tar_of(*devices, file("x")), layer)
    assert os.listdir(layer) == ["x"]


def test_owners_are_of_the_store_s_range_and_strangers_are_nobody(tmp_path: Path) -> None:
    if not ROOT:
        pytest.skip("needs a range of user ids: run by root")
    layer = outside(tmp_path)
    entries = [file("a"), file("b", uid=7, gid=8), file("c", uid=1000670000, gid=65536),
               link("l", "a", uid=9)]  # fmt: skip
    unpack_bytes(tar_of(*entries), layer)
    owners = {p.name: (p.lstat().st_uid, p.lstat().st_gid) for p in (layer, *layer.iterdir())}
    nobody = STORE_BASE + 65534
    assert owners == {
        "layer": (STORE_BASE, STORE_BASE), "a": (STORE_BASE, STORE_BASE),
        "b": (STORE_BASE + 7, STORE_BASE + 8), "c": (nobody, nobody),
        "l": (STORE_BASE + 9, STORE_BASE),
    }  # fmt: skip


def test_what_is_said_last_of_a_name_holds(tmp_path: Path) -> None:
    layer = outside(tmp_path)
    entries = [
        file("a", "first"), file("a", "last"), folder("b"), file("b/x"), file("b", "a file"),
        file("c", "a file"), folder("c"), link("d", "a"), file("d", "no link"),
        folder("e"), link("e", "../beside"), link("f", "../beside"), folder("f"), file("f/x"),
    ]  # fmt: skip
    unpack_bytes(tar_of(*entries), layer)
    assert (layer / "a").read_text() == "last" and (layer / "b").read_text() == "a file"
    assert (layer / "c").is_dir() and (layer / "d").read_text() == "no link"
    assert (layer / "e").is_symlink() and (layer / "f/x").is_file()
    assert os.listdir(tmp_path / "beside") == ["secret"]


def test_attributes_that_would_speak_to_the_overlay_are_dropped(tmp_path: Path) -> None:
    layer = outside(tmp_path)
    headers = {f"SCHILY.xattr.{name}": "y" for name in (
        "user.overlay.opaque", "user.overlay.redirect", "trusted.overlay.opaque",
        "security.capability", "system.posix_acl_access", "user.mine")}  # fmt: skip
    unpack_bytes(tar_of(pax("x", **headers)), layer)
    assert os.listxattr(layer / "x") == ["user.mine"]


def test_a_layer_that_is_larger_than_it_may_be_is_refused_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    layer = outside(tmp_path)
    with pytest.raises(NoSpace):
        unpack_bytes(tar_of(file("a", b"x" * 60_000), file("b", b"x" * 60_000)), layer,
                     max_bytes=100_000)  # fmt: skip
    assert os.listdir(layer) == []


def test_a_size_that_nobody_has_room_for_is_refused_before_it_is_read(tmp_path: Path) -> None:
    layer = outside(tmp_path)
    info, _ = file("a")
    info.size = 1 << 50
    with pytest.raises(NoSpace):
        unpack_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(4096), layer)
    assert os.listdir(layer) == []


def test_a_layer_is_read_to_its_end(tmp_path: Path) -> None:
    """The sender must be able to send all of it, whatever follows the end of the tar."""
    layer = outside(tmp_path)
    hear, say = os.pipe()

    def send() -> None:
        with open(say, "wb") as out:
            out.write(tar_of(file("a", "a")) + bytes(1 << 20))

    sender = threading.Thread(target=send)
    sender.start()
    try:
        unpack(hear, str(layer))
    finally:
        os.close(hear)
        sender.join(30)
    assert not sender.is_alive() and (layer / "a").read_text() == "a"


# --- the process that unpacks ------------------------------------------------------------------


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


def unpacker() -> int | None:
    """The process that reads the tar: the child of a child of ours."""
    for child in children(os.getpid()):
        if b"unpacker" in Path(f"/proc/{child}/cmdline").read_bytes():
            for inner in children(child):
                status = Path(f"/proc/{inner}/status").read_text()
                if "Seccomp:\t2" in status:
                    return inner
    return None


def test_what_unpacks_has_next_to_no_rights(tmp_path: Path) -> None:
    if not ROOT:
        pytest.skip("only root can look into it")
    layer = outside(tmp_path)
    hear, say = os.pipe()
    worker = threading.Thread(target=lambda: unpack(hear, str(layer)))
    worker.start()
    try:
        deadline = time.monotonic() + 60
        while (pid := unpacker()) is None:
            assert worker.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        text = Path(f"/proc/{pid}/status").read_text()
        status = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
        assert status["NoNewPrivs"] == "1"
        assert [int(status["Cap" + kind], 16) for kind in ("Inh", "Bnd", "Amb")] == [0, 0, 0]
        assert [int(status["Cap" + kind], 16) for kind in ("Prm", "Eff")] == [0b1011, 0b1011]
        assert status["Uid"].split() == [str(STORE_BASE)] * 4 and not status["Groups"].strip()
        for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
            ours, theirs = (os.readlink(f"/proc/{p}/ns/{name}") for p in ("self", pid))
            assert ours != theirs, name
        assert os.path.samestat(os.stat(f"/proc/{pid}/root"), layer.stat())
        assert Path(f"/proc/{pid}/environ").read_bytes() == b""
        assert len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines()) <= 2
        assert "lo" in Path(f"/proc/{pid}/net/dev").read_text()
    finally:
        os.close(say)
        worker.join(60)
        os.close(hear)
    assert not worker.is_alive()


def test_what_unpacks_ends_with_whoever_wanted_it(tmp_path: Path) -> None:
    """Killed, it says so, and what it made is gone."""
    layer = outside(tmp_path)
    hear, say = os.pipe()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            unpack(hear, str(layer))
        except BaseException as exc:
            failed.append(exc)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        os.write(say, tar_of(file("a", "a"))[:1024])
        deadline = time.monotonic() + 60
        while not (layer / "a").exists():
            assert worker.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        for child in children(os.getpid()):
            if b"unpacker" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(child, 9)
        worker.join(60)
        assert not worker.is_alive() and os.listdir(layer) == []
        assert "unpacked" in str(failed[0])
    finally:
        os.close(say)
        os.close(hear)


# --- R13: layers that are hard to remove -------------------------------------------------------


def test_a_layer_of_any_depth_can_be_removed(tmp_path: Path) -> None:
    layer = outside(tmp_path)
    entries, start, deep = [], "", "/".join(["d"] * 60)
    for number in range(15):  # each begins where a link to the one before it ends
        entries += [folder(start + deep), link(f"at{number}", start + deep)]
        start = f"at{number}/"
    unpack_bytes(tar_of(*entries), layer)
    fd = os.open(layer, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("deeper", dir_fd=fd)
        inner = os.open("deeper", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    assert sys.getrecursionlimit() < 3000
    remove(str(layer))
    assert not layer.exists() and (tmp_path / "beside/secret").exists()


def test_a_layer_whose_links_lead_out_is_removed_alone(tmp_path: Path) -> None:
    layer = outside(tmp_path)
    entries = [
        link("l", str(tmp_path / "beside")), folder("d", mode=0), link("d/l", "/"),
        file("d/.wh.x"), special("d/pipe", tarfile.FIFOTYPE), hard_link("h", "l"),
    ]  # fmt: skip
    unpack_bytes(tar_of(*entries), layer)
    remove(str(layer))
    assert os.listdir(tmp_path) == ["beside"] and os.listdir(tmp_path / "beside") == ["secret"]


def test_a_folder_with_very_many_files_is_made_and_removed(tmp_path: Path) -> None:
    layer = outside(tmp_path)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for number in range(20_000):
            archive.addfile(tarfile.TarInfo(f"d/{number}"))
    unpack_bytes(out.getvalue(), layer)
    assert len(os.listdir(layer / "d")) == 20_000
    remove(str(layer))
    assert not layer.exists()
