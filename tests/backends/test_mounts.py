"""Which folders of this machine a container may have, and whose they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hutch.backends.contained import OWN
from hutch.backends.linux.mounts import FoundMount, give_away, open_mounts, owner_of_mounts
from hutch.errors import InvalidRequest
from hutch.types import Mount


def found(*wanted: Mount, **more: Any) -> tuple[FoundMount, ...]:
    with open_mounts(wanted, **more) as looked_at:
        return looked_at


def test_a_box_runs_as_who_owns_what_it_may_write_to(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.chown(tmp_path / "a", 501, 20)
    both = found(Mount(f"{tmp_path}/a", "/a"), Mount("/usr", "/b", read_only=True))
    assert owner_of_mounts(both, relaxed=False) == (501, 20)


def test_nothing_writable_has_no_owner() -> None:
    one = found(Mount("/usr", "/b", read_only=True))
    assert owner_of_mounts(one, relaxed=False) is None


def test_what_belongs_to_root_cannot_be_mounted_writable(tmp_path: Path) -> None:
    os.chown(tmp_path, 0, 0)
    one = found(Mount(str(tmp_path), "/a"))
    with pytest.raises(InvalidRequest, match=r"chown -R.*read-only.*relax user"):
        owner_of_mounts(one, relaxed=False)
    assert owner_of_mounts(one, relaxed=True) == (0, 0)


def test_folders_of_two_owners_cannot_both_be_written_to(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        os.chown(tmp_path / name, 501 + number, 20)
    both = found(Mount(f"{tmp_path}/a", "/a"), Mount(f"{tmp_path}/b", "/b"))
    with pytest.raises(InvalidRequest, match=r"uid 501.*uid 502"):
        owner_of_mounts(both, relaxed=False)


@pytest.mark.parametrize(
    "source", ["/", "/proc/self", "/sys", "/dev/null", "/no/such", "/tmp/../proc", "a\0b", "tmp"]
)
def test_some_folders_are_never_mounted(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot mount|a link is on the way"):
        found(Mount(source, "/a"))


@pytest.mark.parametrize(
    "target", ["/.hutch-host", "/.hutch-host/sock", "/.hutch/x", "/etc/passwd", "/a/../etc", "a"]
)
def test_what_a_box_is_made_of_cannot_be_hidden(tmp_path: Path, target: str) -> None:
    with pytest.raises(InvalidRequest):
        found(Mount(str(tmp_path), target, read_only=True))


def test_no_link_is_followed_wherever_it_is_and_whatever_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "folder/inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("folder")
    for source in ("link", "link/inner", "link/"):
        with pytest.raises(InvalidRequest, match="a link is on the way"):
            found(Mount(f"{tmp_path}/{source}", "/a"))


def test_what_was_looked_at_is_let_go_of(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    found(Mount(str(tmp_path), "/a"))
    with pytest.raises(InvalidRequest):
        found(Mount(str(tmp_path), "/a"), Mount("/no/such", "/b"))
    assert os.listdir("/proc/self/fd") == before


def test_of_a_server_s_folder_nothing_is_mounted_but_what_is_given(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "workspaces/w").mkdir(parents=True)
    (data / "workspaces/other").mkdir()
    given = {"give": (f"{data}/workspaces/w",), "data": str(data)}
    assert found(Mount(f"{data}/workspaces/w", "/a"), **given)[0].is_given
    for source in (data, data / "workspaces", data / "workspaces/other", tmp_path):
        with pytest.raises(InvalidRequest, match="the server lives there"):
            found(Mount(str(source), "/a"), **given)


def test_at_a_server_no_mount_is_inside_another(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    wanted = (Mount("/usr", "/a/inner"), Mount("/usr", "/ab"), Mount("/usr", "/a"))
    assert len(found(*wanted)) == 3
    with pytest.raises(InvalidRequest, match="/a/inner is inside /a"):
        found(*wanted, data=f"{tmp_path}/data")


def test_only_what_is_to_be_given_is_given_away(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "data/w", tmp_path / "data/other"
    for folder in (ours, theirs):
        (folder / "sub").mkdir(parents=True)
        (folder / "sub/file").touch()
        (folder / "link").symlink_to(tmp_path)
        (folder / "gone").symlink_to("nowhere")
    wanted = (Mount(str(ours), "/a"), Mount(str(theirs), "/b"))
    with open_mounts(wanted, (str(ours),)) as looked_at:
        given = give_away(looked_at, OWN)
        again = give_away(looked_at, OWN)
    uid = given[0].owner[0]
    assert uid in OWN and given[1].owner == (0, 0)
    inside = (ours, *(ours / name for name in ("sub", "sub/file", "link", "gone")))
    assert {os.lstat(path).st_uid for path in inside} == {uid}
    outside = (theirs, theirs / "sub", theirs / "sub/file", tmp_path / "data", tmp_path)
    assert {os.lstat(path).st_uid for path in outside} == {0}
    assert again[0].owner[0] == uid
