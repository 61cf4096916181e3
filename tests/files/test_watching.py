"""What happens below a folder, told as it happens."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hutch import Change, InvalidRequest, NotFound, Sandbox

pytest_plugins = ["folders_of_tests"]
pytestmark = pytest.mark.usefixtures("shared_box")  # which skips where there can be none


class Watching:
    """A watch, read by a thread of its own."""

    def __init__(self, box: Sandbox, folder: str, **options: bool) -> None:
        self._stream = box.files.watch(folder, **options)
        self._folder = folder
        self._changes: queue.Queue[Change | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for change in self._stream:
            self._changes.put(change)
        self._changes.put(None)

    def until(self, name: str, kind: str) -> list[tuple[str, str]]:
        """Every change up to this one."""
        seen = []
        while not seen or seen[-1] != (name, kind):
            change = self._changes.get(timeout=20)
            assert change is not None, seen
            seen.append((change.path.removeprefix(self._folder + "/"), change.kind))
        return seen

    def ended(self) -> bool:
        while (change := self._changes.get(timeout=20)) is not None:
            del change
        return True

    def close(self) -> None:
        self._stream.close()


@contextmanager
def watching(box: Sandbox, folder: str, **options: bool) -> Iterator[Watching]:
    watch = Watching(box, folder, **options)
    try:
        yield watch
    finally:
        watch.close()


def sh(box: Sandbox, command: str) -> None:
    box.commands.run(command, check=True)


def test_a_watch_tells_of_what_programs_do(shared_box, folder):
    with watching(shared_box, folder) as watch:
        sh(shared_box, f"cd {folder} && echo x > a && echo y >> a && mv a b && rm b && mkdir d")
        seen = watch.until("d", "created")
    assert [change for change in seen if change[1] != "modified"] == [
        ("a", "created"), ("a", "moved_from"), ("b", "moved_to"), ("b", "removed"),
        ("d", "created"),
    ]  # fmt: skip
    assert ("a", "modified") in seen


def test_a_watch_tells_of_our_own_writes_by_their_names(shared_box, folder):
    with watching(shared_box, folder) as watch:
        shared_box.files.write(f"{folder}/f", "1")
        shared_box.files.write(f"{folder}/f", "2")
        shared_box.files.edit(f"{folder}/f", "2", "3")
        shared_box.files.write(f"{folder}/last", "")
        seen = watch.until("last", "created")
    assert seen == [("f", "created"), ("f", "modified"), ("f", "modified"), ("last", "created")]


def test_a_recursive_watch_sees_folders_that_come_later(shared_box, folder):
    with watching(shared_box, folder, recursive=True) as watch:
        sh(shared_box, f"mkdir -p {folder}/a/b/c && echo x > {folder}/a/b/c/f")
        seen = watch.until("a/b/c/f", "created")
        sh(shared_box, f"touch {folder}/a/b/g")
        seen += watch.until("a/b/g", "created")
    assert {name for name, _ in seen} >= {"a", "a/b", "a/b/c", "a/b/c/f", "a/b/g"}


def test_a_watch_that_is_not_recursive_does_not_look_into_folders(shared_box, folder):
    with watching(shared_box, folder) as watch:
        sh(shared_box, f"cd {folder} && mkdir d && touch d/hidden && touch end")
        assert watch.until("end", "created") == [("d", "created"), ("end", "created")]


def test_a_folder_that_is_renamed_is_told_of_under_its_new_name(shared_box, folder):
    sh(shared_box, f"mkdir -p {folder}/old/sub")
    with watching(shared_box, folder, recursive=True) as watch:
        sh(shared_box, f"cd {folder} && mv old new && touch new/sub/f")
        seen = watch.until("new/sub/f", "created")
    assert ("old", "moved_from") in seen and ("new", "moved_to") in seen
    assert not [name for name, _ in seen if name.startswith("old/")]


def test_a_folder_that_is_moved_out_of_sight_is_not_told_of(shared_box, folder):
    sh(shared_box, f"mkdir -p {folder}/d {folder}-out; mkdir {folder}/stay")
    with watching(shared_box, folder, recursive=True) as watch:
        sh(shared_box, f"mv {folder}/d {folder}-out/d && touch {folder}-out/d/f {folder}/stay/end")
        seen = watch.until("stay/end", "created")
    assert seen == [("d", "moved_from"), ("stay/end", "created")]
    shared_box.files.remove(f"{folder}-out", recursive=True)


@pytest.mark.parametrize("end, kind", [("rm -r d", "removed"), ("mv d e", "moved_from")])
def test_a_watch_ends_with_its_folder(shared_box, folder, end, kind):
    sh(shared_box, f"mkdir {folder}/d")
    with watching(shared_box, f"{folder}/d") as watch:
        sh(shared_box, f"cd {folder} && {end}")
        assert watch.until(f"{folder}/d", kind)
        assert watch.ended()


def test_what_cannot_be_watched_is_refused_at_once(shared_box, folder):
    shared_box.files.write(f"{folder}/f", "")
    with pytest.raises(InvalidRequest, match="not a folder"):
        shared_box.files.watch(f"{folder}/f")
    with pytest.raises(NotFound):
        shared_box.files.watch(f"{folder}/none")


def test_a_watch_that_nobody_reads_costs_the_box_nothing(box):
    stream = box.files.watch("/workspace")
    box.commands.run(
        ["python3", "-c", "for n in range(60000): open(f'f{n % 50}', 'w').close()"], check=True
    )
    assert comes_to_rest(box), "the guest spins"
    kinds = set()
    for change in stream:
        kinds.add(change.kind)
        if change.kind == "overflow" or len(kinds) > 1:
            break
    assert kinds
    stream.close()


def comes_to_rest(box: Sandbox) -> bool:
    """Whether the guest uses next to no CPU once it is done with what it had to do."""
    for _ in range(60):
        before = guest_time(box)
        time.sleep(1)
        if guest_time(box) - before < 10:  # of 100 ticks; spinning takes 30 on a busy machine
            return True
    return False


def guest_time(box: Sandbox) -> int:
    """Clock ticks that the guest has used."""
    # The files API does not show the guest's own entries in /proc; a program may read this one.
    stat = box.commands.run(["cat", "/proc/1/stat"], check=True).stdout
    fields = stat.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
