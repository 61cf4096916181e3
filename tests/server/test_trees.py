"""What a box can leave in a folder, measured and removed."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hutch import tree
from hutch.server import trees
from hutch.server.trees import INODE, WalkStopped, discard, size_of, sweep

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "doomed"
    made.mkdir()
    return made


@pytest.fixture
def trash(tmp_path: Path) -> Path:
    return tmp_path / "trash"


def remove(folder: Path, trash: Path, stop: threading.Event | None = None) -> None:
    discard(folder, trash)
    sweep(trash, stop)


def nest(top: Path, depth: int, name: bytes = b"d") -> None:
    """Folders in folders, deeper than any path can say."""
    here = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        inner = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=here)
        os.close(here)
        here = inner
    fd = os.open("bottom", os.O_WRONLY | os.O_CREAT, dir_fd=here)
    os.write(fd, b"x" * 100_000)
    os.close(fd)
    os.close(here)


def identity(path: Path) -> tuple[int, int]:
    info = path.stat()
    return info.st_dev, info.st_ino


def blocks(path: Path) -> int:
    return path.lstat().st_blocks * 512 + INODE


def test_a_size_is_that_of_files_links_and_folders(folder: Path) -> None:
    (folder / "in").mkdir()
    (folder / "in" / "file").write_bytes(b"x" * 1_000_000)
    (folder / "link").symlink_to("/usr")
    every = [folder, folder / "in", folder / "in" / "file", folder / "link"]
    assert size_of(folder) == sum(map(blocks, every)) > 1_000_000


def test_a_file_with_three_names_counts_once(folder: Path) -> None:
    one = folder / "one"
    one.write_bytes(b"x" * 500_000)
    before = size_of(folder)
    os.link(one, folder / "two")
    (folder / "in").mkdir()
    os.link(one, folder / "in" / "three")
    assert size_of(folder) == before + blocks(folder / "in")


def test_a_file_with_holes_counts_what_is_on_disk(folder: Path) -> None:
    with (folder / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert size_of(folder) < 1_000_000


def test_a_thousand_empty_files_are_not_nothing(folder: Path) -> None:
    for number in range(1000):
        (folder / str(number)).touch()
    assert size_of(folder) >= 1000 * INODE


def test_both_end_when_they_are_told_to_and_can_be_gone_on_with(folder: Path, trash: Path) -> None:
    nest(folder, 100)
    stop = threading.Event()
    stop.set()
    with pytest.raises(WalkStopped):
        size_of(folder, stop)
    with pytest.raises(WalkStopped):
        remove(folder, trash, stop)
    assert not folder.exists() and list(trash.iterdir())
    with pytest.raises(WalkStopped):
        sweep(trash, stop)
    sweep(trash)
    assert not list(trash.iterdir())


def test_what_is_not_there_has_no_size_and_is_removed_already(tmp_path: Path, trash: Path) -> None:
    assert size_of(tmp_path / "nothing") == 0
    remove(tmp_path / "nothing", trash)
    assert discard(tmp_path / "nothing", trash) is None
    assert not list(trash.iterdir())


def test_links_lead_nowhere(folder: Path, trash: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_bytes(b"x" * 1_000_000)
    (folder / "to-folder").symlink_to(precious)
    (folder / "to-file").symlink_to(precious / "file")
    (folder / "to-itself").symlink_to("to-itself")
    (folder / "nowhere").symlink_to("nothing")
    assert size_of(folder) < 100_000
    remove(folder, trash)
    assert (precious / "file").stat().st_size == 1_000_000
    assert not folder.exists() and not list(trash.iterdir())


def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path, trash: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "link").symlink_to("precious")
    with pytest.raises(OSError):
        size_of(tmp_path / "link")
    remove(tmp_path / "link", trash)
    assert (tmp_path / "precious").is_dir() and not (tmp_path / "link").is_symlink()


def test_every_kind_of_file_and_every_name_goes(folder: Path, trash: Path) -> None:
    top = os.fsencode(folder)
    for name in (b"\xff\xfe", b"new\nline", b"-rf", b"*", b"\xe2\x80\xae", b"n" * 255, b" "):
        Path(os.fsdecode(os.path.join(top, name))).mkdir()
        Path(os.fsdecode(os.path.join(top, name, name))).touch()
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
    assert size_of(folder) > 0
    remove(folder, trash)
    assert not folder.exists() and not list(trash.iterdir())


def test_folders_nested_deeper_than_any_path(folder: Path, trash: Path) -> None:
    nest(folder, depth := 10_000)  # beyond PATH_MAX, open files and recursion
    descriptors = len(os.listdir("/proc/self/fd"))
    assert size_of(folder) >= depth * INODE + 100_000
    remove(folder, trash)
    assert not folder.exists() and not list(trash.iterdir())
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_folder_of_ten_thousand_folders(folder: Path, trash: Path) -> None:
    for number in range(10_000):
        (folder / str(number)).mkdir()
        if not number % 10:
            (folder / str(number) / "file").touch()
    assert size_of(folder) >= 11_000 * INODE
    remove(folder, trash)
    assert not list(trash.iterdir())


LOCKED = """
import os, sys
from pathlib import Path
from hutch.server.trees import discard, size_of, sweep
os.chdir(sys.argv[1])
if user := int(sys.argv[2]):
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
deep = Path("doomed/a/b/c")
deep.mkdir(parents=True)
(deep / "file").write_bytes(b"x" * 1_000_000)
for path, mode in ((deep, 0), (deep.parent, 0o444), (Path("doomed/a"), 0o111), (Path("doomed"), 0)):
    path.chmod(mode)
assert size_of(Path("doomed")) > 1_000_000, size_of(Path("doomed"))
Path("doomed/a").chmod(0o555)
Path("doomed").chmod(0)
discard(Path("doomed"), Path("trash"))
sweep(Path("trash"))
assert os.listdir(".") == ["trash"] and not os.listdir("trash"), os.listdir("trash")
"""


@pytest.mark.parametrize("user", [0, pytest.param(NOBODY, marks=needs_root)])
def test_folders_that_nobody_may_open(tmp_path: Path, user: int) -> None:
    if user:
        os.chown(tmp_path, user, user)
    done = subprocess.run(
        [sys.executable, "-c", LOCKED, str(tmp_path), str(user)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@needs_root
def test_another_file_system_is_not_entered(folder: Path, trash: Path) -> None:
    for name in ("one", "one/mount", "two"):
        (folder / name).mkdir()
    (folder / "two" / "file").touch()
    mount = folder / "one" / "mount"
    subprocess.run(["mount", "-t", "tmpfs", "none", mount], check=True)
    where = mount
    try:
        (mount / "precious").write_bytes(b"x" * 1_000_000)
        assert size_of(folder) < 1_000_000
        with pytest.raises(OSError) as failed:
            remove(folder, trash)
        assert failed.value.errno == errno.ENOTEMPTY
        (where,) = trash.glob("*/one/mount")
        assert (where / "precious").exists(), "it was put aside, and left as it is"
        assert len(list(trash.glob("*/*"))) == 1, "all else is gone"
    finally:
        subprocess.run(["umount", where], check=True)
    sweep(trash)
    assert not list(trash.iterdir())


def test_a_removal_that_was_cut_short_is_finished_by_the_next_sweep(
    folder: Path, trash: Path
) -> None:
    nest(folder, 1000)
    (folder / "file").touch()
    doomed = discard(folder, trash)
    assert doomed and not folder.exists(), "from here on the name is free"
    folder.mkdir()
    fd = os.open(doomed, os.O_RDONLY)
    for name in os.listdir(doomed):  # killed after the first step
        tree._remove_entry(name, fd, lambda: None)
    os.close(fd)
    assert list(trash.iterdir())
    sweep(trash)
    assert not list(trash.iterdir()) and folder.exists()


def test_sweeping_where_there_is_no_trash_is_nothing(trash: Path) -> None:
    sweep(trash)


def test_a_removal_cut_short_at_any_step_is_finished(folder: Path, trash: Path) -> None:
    """Killed for real, at moments that only chance chooses."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom hutch.server.trees import discard, sweep\n"
        "sys.stdout.write('x'); sys.stdout.flush()\n"
        "discard(Path(sys.argv[1]), Path(sys.argv[2]))\nsweep(Path(sys.argv[2]))"
    )
    for depth in (10, 1000, 5000):
        folder.mkdir(exist_ok=True)
        nest(folder, depth)
        argv = [sys.executable, "-c", code, str(folder), str(trash)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
            assert process.stdout and process.stdout.read(1) == b"x"
            process.kill()
        sweep(trash)
        remove(folder, trash)
        assert not folder.exists() and (not trash.exists() or not list(trash.iterdir()))


def test_a_tree_that_changes_under_a_measurement_ends_it_no_worse(folder: Path) -> None:
    for side in ("left", "right"):
        (folder / side).mkdir()
        for number in range(20):
            (folder / side / f"{number}").mkdir()
            (folder / side / f"{number}" / "file").write_bytes(b"x" * 10_000)
    over = threading.Event()

    def stir() -> None:
        (folder / "left" / "moving" / "deep").mkdir(parents=True)
        while not over.is_set():
            os.rename(folder / "left" / "moving", folder / "right" / "moving")
            (folder / "right" / "moving" / "deep" / "file").touch()
            (folder / "right" / "moving" / "deep" / "file").unlink()
            os.rename(folder / "right" / "moving", folder / "left" / "moving")

    stirring = threading.Thread(target=stir)
    stirring.start()
    try:
        for _ in range(200):
            assert 400_000 < size_of(folder) < 2_000_000
    finally:
        over.set()
        stirring.join()


STORM = """
import os, sys
os.chdir(sys.argv[1])
print(flush=True)
while True:
    for here, there in (("left", "right"), ("right", "left")):
        for name in ("folder", "file"):
            os.rename(f"{here}/{name}", f"{there}/{name}")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can open files by handle")
def test_what_is_moved_about_all_the_time_is_counted(folder: Path) -> None:
    for side in ("left", "right"):
        for number in range(50):
            (folder / side / f"{number}").mkdir(parents=True)
    inner = folder / "left" / "folder" / "deep" / "er"
    inner.mkdir(parents=True)
    for number in range(10):
        (inner / f"{number}").write_bytes(b"x" * 1_000_000)
    (folder / "left" / "file").write_bytes(b"x" * 10_000_000)
    storm = subprocess.Popen(
        [sys.executable, "-c", STORM, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert storm.stdout
    with storm:
        storm.stdout.readline()
        try:
            sizes = [size_of(folder) for _ in range(30)]
        finally:
            storm.kill()
    assert min(sizes) > 20_000_000 and max(sizes) < 23_000_000, sizes


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can open files by handle")
def test_what_is_removed_during_a_measurement_is_not_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "gone").write_bytes(b"x" * 10_000_000)
    (folder / "stays").write_bytes(b"x" * 1_000_000)
    real = trees._Census._has_changed

    def remove_first(census: trees._Census, handle: bytes) -> bool:
        (folder / "inner" / "gone").unlink(missing_ok=True)
        return real(census, handle)

    monkeypatch.setattr(trees._Census, "_has_changed", remove_first)
    assert 1_000_000 < size_of(folder) < 1_100_000


def test_a_folder_that_moved_away_does_not_take_the_count_with_it(folder: Path) -> None:
    """The same, at the one moment that matters: we are in it, and `..` is another folder now."""
    (folder / "a" / "inner").mkdir(parents=True)
    (folder / "a" / "sibling").mkdir()
    (folder / "b").mkdir()
    measurement = trees._Measurement(os.open(folder, os.O_RDONLY), None)
    a, top = (trees._Level(identity(p), p.name, []) for p in (folder / "a", folder))
    levels = [top, a]
    measurement._go(os.open(folder / "a" / "inner", os.O_RDONLY))
    os.rename(folder / "a" / "inner", folder / "b" / "inner")
    measurement._go_up(levels)
    assert trees._identity(measurement._here) == a.identity and levels == [top, a]

    measurement._go(os.open(folder / "b" / "inner", os.O_RDONLY))
    os.rename(folder / "a", folder / "b" / "a")  # now the folder above it is gone, too
    measurement._go_up(levels)
    assert trees._identity(measurement._here) == top.identity and levels == [top]

    measurement._go(os.open(folder / "b" / "inner", os.O_RDONLY))
    os.rmdir(folder / "b" / "inner")  # and now itself
    measurement._go_up(levels)
    assert trees._identity(measurement._here) == top.identity
    measurement.close()
