"""Who a box runs as, whatever its image says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hutch.backends.docker import users
from hutch.backends.docker.users import OWN, OWN_OF_FEW, BoxUser, Users, choose, parse
from hutch.errors import InvalidRequest
from hutch.types import Mount

IMAGE = parse(
    b"root:x:0:0:root:/root:/bin/bash\nnode:x:1000:1001::/home/node:/bin/zsh\n"
    b"relay:x:65533:65533::/:/bin/sh\n",
    b"root:x:0:\nnode:x:1001:\nstaff:x:50:node\n",
)


def who(
    asked: str = "user",
    image: str = "",
    owner: tuple[int, int] | None = None,
    *,
    few: bool = False,
    relaxed: bool = False,
) -> BoxUser:
    return choose(asked, image, IMAGE, owner, few=few, relaxed=relaxed)


def test_a_box_has_a_user_of_its_own() -> None:
    one, two = who(), who()
    assert one.uid in OWN and one.gid == one.uid and one.is_own and one != two


@pytest.mark.parametrize("image", ["", "root", "0", "root:root", "0:50"])
def test_a_root_of_the_image_s_is_not_taken(image: str) -> None:
    assert who(image=image).uid in OWN


def test_where_the_engine_has_few_user_ids_it_gets_one_of_those() -> None:
    assert who(few=True).uid in OWN_OF_FEW


@pytest.mark.parametrize(
    ("image", "expected"),
    [("node", "1000:1001"), ("1000", "1000:1001"), ("node:staff", "1000:50"), ("7:8", "7:8"),
     ("1234", "1234:1234")],
)  # fmt: skip
def test_a_user_of_the_image_s_is_taken_but_not_root_s_group(image: str, expected: str) -> None:
    found = who(image=image)
    assert str(found) == expected and not found.is_own


@pytest.mark.parametrize("image", ["nobody-knows", "node:nobody-knows", "a b", "-1", "4294967295"])
def test_a_user_that_the_image_does_not_have_is_an_error(image: str) -> None:
    with pytest.raises(InvalidRequest, match="user="):
        who(image=image)


def test_who_owns_what_is_mounted_goes_before_the_image() -> None:
    assert str(who(image="node", owner=(501, 20))) == "501:20"


def test_root_must_be_asked_for_twice() -> None:
    for asked in ("root", "0"):
        with pytest.raises(InvalidRequest, match="relax user"):
            who(asked)
    assert str(who("root", relaxed=True)) == "0:0"
    assert str(who(image="", relaxed=True)) == "0:0"
    assert str(who(image="node", relaxed=True)) == "1000:1001"
    assert str(who(image="root", owner=(0, 0), relaxed=True)) == "0:0"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("root", "0:0"), ("root:root", "0:0"), ("nobody", "65534:65534"),
     ("nobody:nogroup", "65534:65534")],
)  # fmt: skip
def test_some_users_need_no_passwd(asked: str, expected: str) -> None:
    assert str(choose(asked, "", Users(), None, few=False, relaxed=True)) == expected


def test_a_uid_that_another_box_may_have_is_not_the_box_s_own() -> None:
    shared = OWN[5]  # the owner of a workspace, in which two sessions may be
    assert not who(owner=(shared, shared)).is_own and not who(str(shared)).is_own


@pytest.mark.parametrize("asked", ["relay", "65533"])
def test_nobody_is_who_the_relay_is(asked: str) -> None:
    with pytest.raises(InvalidRequest, match="reserved"):
        who(asked)
    with pytest.raises(InvalidRequest, match="reserved"):
        who(image=asked)


def test_a_passwd_of_any_size_is_read_in_part() -> None:
    line = b"u:x:1:1::/:/bin/sh\n"
    assert len(parse(line * 100_000, b"").users) <= users.MAX_LINES
    assert parse(b"a" * 10_000_000 + b":x:1:1::/:/x", b"") == Users()


@pytest.mark.parametrize(
    "line",
    ["a:x:4294967296:0::/:/s", "a:x:-1:0::/:/s", "a:x:1:1::/:/s:", "a b:x:1:1::/:/s",
     "a:x:1:1::/h\x00:/s", "a:x:1:1::relative:/s", "+::::::", "a:x:٣:1::/:/s", "a:x:1:1::/é:/s"],
)  # fmt: skip
def test_lines_of_a_passwd_that_make_no_sense_are_left_out(line: str) -> None:
    assert parse(line.encode(), b"").users == ()


def test_the_box_s_user_has_a_name_and_a_home_that_can_be_written_to() -> None:
    lines = users.passwd(IMAGE, BoxUser(7, 7), "user").splitlines()
    assert lines[0] == "user:x:7:7::/home/user:/bin/sh"
    assert "node:x:1000:1001::/home/node:/bin/zsh" in lines
    lines = users.passwd(IMAGE, BoxUser(1000, 1001), "user").splitlines()
    assert lines[0] == "node:x:1000:1001::/home/user:/bin/zsh" and len(lines) == 3
    assert users.passwd(Users(), BoxUser(7, 7), "a:b\nc").startswith("user:x:7:7:")
    assert "user:x:7:\n" in users.group(IMAGE, BoxUser(7, 7))


# --- folders of this machine ------------------------------------------------------------


def found(*wanted: Mount, **more: Any) -> tuple[users.FoundMount, ...]:
    with users.open_mounts(wanted, **more) as looked_at:
        return looked_at


def test_a_box_runs_as_who_owns_what_it_may_write_to(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.chown(tmp_path / "a", 501, 20)
    both = found(Mount(f"{tmp_path}/a", "/a"), Mount("/usr", "/b", read_only=True))
    assert users.owner_of_mounts(both, relaxed=False) == (501, 20)


def test_nothing_writable_has_no_owner() -> None:
    one = found(Mount("/usr", "/b", read_only=True))
    assert users.owner_of_mounts(one, relaxed=False) is None


def test_what_belongs_to_root_cannot_be_mounted_writable(tmp_path: Path) -> None:
    os.chown(tmp_path, 0, 0)
    one = found(Mount(str(tmp_path), "/a"))
    with pytest.raises(InvalidRequest, match=r"chown -R.*read-only.*relax user"):
        users.owner_of_mounts(one, relaxed=False)
    assert users.owner_of_mounts(one, relaxed=True) == (0, 0)


def test_folders_of_two_owners_cannot_both_be_written_to(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        os.chown(tmp_path / name, 501 + number, 20)
    both = found(Mount(f"{tmp_path}/a", "/a"), Mount(f"{tmp_path}/b", "/b"))
    with pytest.raises(InvalidRequest, match=r"uid 501.*uid 502"):
        users.owner_of_mounts(both, relaxed=False)


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
    with users.open_mounts(wanted, (str(ours),)) as looked_at:
        given = users.give_away(looked_at)
        again = users.give_away(looked_at)
    uid = given[0].owner[0]
    assert uid in OWN and given[1].owner == (0, 0)
    inside = (ours, *(ours / name for name in ("sub", "sub/file", "link", "gone")))
    assert {os.lstat(path).st_uid for path in inside} == {uid}
    outside = (theirs, theirs / "sub", theirs / "sub/file", tmp_path / "data", tmp_path)
    assert {os.lstat(path).st_uid for path in outside} == {0}
    assert again[0].owner[0] == uid
