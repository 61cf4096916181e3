"""Who a box runs as, whatever its image says."""

from __future__ import annotations

import pytest

from hutch.backends.contained import OWN, OWN_OF_FEW
from hutch.backends.docker import users
from hutch.backends.docker.users import BoxUser, Users, choose, parse
from hutch.errors import InvalidRequest

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
