"""What a box is made of, without making one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hutch.backends.linux.folders import check_mounts
from hutch.backends.namespaces.plan import (
    OTHER_IDS,
    UID_BASE,
    UIDS_PER_BOX,
    BoxImage,
    BoxPlan,
    id_maps,
    plan,
    uid_of,
    uid_range,
)
from hutch.errors import InvalidRequest
from hutch.types import GiB, Limits, MiB, Mount

IMAGE = BoxImage(("/usr",), {"/bin": "usr/bin"}, {"/etc/passwd": b""})


def make(limits: Limits | None = None, **changed: object) -> BoxPlan:
    wishes: dict[str, object] = {
        "mounts": (), "files": frozenset(), "user": "user", "workdir": "/workspace",
        "slot": 0, "cgroup": True,
    }  # fmt: skip
    return plan(IMAGE, limits or Limits(), **(wishes | changed))  # type: ignore[arg-type]


def steps(made: BoxPlan, do: str) -> list[str]:
    return [step.path for step in made.steps if step.do == do]


def test_no_box_is_ever_mapped_to_the_host_s_root() -> None:
    assert UID_BASE > 0
    for slot in (0, 1, 23_999):
        inside, zygote_uid, count = map(int, id_maps(slot)[0].split())
        assert (inside, count) == (0, UIDS_PER_BOX) and zygote_uid > 0


def test_two_boxes_share_no_user_id() -> None:
    ranges = [int(id_maps(slot)[0].split()[1]) for slot in range(100)]
    assert all(b - a == UIDS_PER_BOX for a, b in pairwise(ranges))


def test_every_user_id_fits_what_is_set_aside_for_containers() -> None:
    last = UID_BASE + int(id_maps(23_999)[0].split()[1]) + UIDS_PER_BOX
    assert last <= 0x70000000


def test_where_mounts_cannot_be_id_mapped_only_the_user_of_a_box_is_their_owner() -> None:
    for user, owner in (((1000, 1000), (0, 7)), ((0, 0), (1001, 0)), ((65534, 65533), (0, 0))):
        for text, id, owns in zip(id_maps(3, user, owner), user, owner, strict=True):
            extents = [tuple(map(int, line.split())) for line in text.splitlines()]
            assert [e for e in extents if e[1] >= OTHER_IDS] == [(id, OTHER_IDS + owns, 1)]
            assert sum(count for _, _, count in extents) == UIDS_PER_BOX
            own = [(first, outside) for first, outside, _ in extents if first != id]
            assert all(outside - first == uid_range(3) for first, outside in own)


def test_every_file_system_that_a_box_can_write_to_has_a_size_and_a_number_of_inodes() -> None:
    for step in make().steps:
        if step.do in ("disk", "shm"):
            assert "size=" in step.text and "nr_inodes=" in step.text


def test_what_is_kept_in_memory_fits_in_memory() -> None:
    for memory in (16 * MiB, 100 * MiB, GiB, 64 * GiB):
        limits = Limits(memory=memory)
        assert limits.disk_size + limits.shared_memory < memory


def test_a_disk_larger_than_memory_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="kept in memory"):
        Limits(memory=64 * MiB, disk=64 * MiB)


def test_proc_is_masked_after_it_is_mounted() -> None:
    order = [step.do for step in make().steps]
    assert order.index("proc") < order.index("mask") < order.index("freeze")


def test_there_is_no_sys() -> None:
    assert not [step for step in make().steps if step.path.startswith("/sys")]


def test_the_workspace_is_the_box_s_own_unless_a_folder_is_given() -> None:
    assert "/workspace" in steps(make(), "room")
    given = make(mounts=(Mount("/home/me/project", "/workspace"),))
    assert "/workspace" not in steps(given, "room") and given.attach == ("/workspace",)


def test_a_read_only_mount_is_not_writable_for_landlock_either() -> None:
    made = make(mounts=(Mount("/a", "/a", read_only=True), Mount("/b", "/b")))
    assert "/b" in made.writable and "/a" not in made.writable


def test_without_cgroups_rlimits_bound_processes_and_memory() -> None:
    limits = dict(make(cgroup=False).rlimits)
    assert limits["NPROC"] == 512 and limits["DATA"] == GiB
    assert make(cgroup=False).place["memory"] == GiB
    assert "NPROC" not in dict(make().rlimits)


@pytest.mark.parametrize(
    "target", ["/", "/proc", "/proc/1", "/dev/null", "/etc", "/usr/lib", "/.hutch", "relative",
               "/a/../b", "/a//b", "/a\0b", ""],
)  # fmt: skip
def test_a_mount_cannot_hide_what_isolates_the_box(target: str) -> None:
    with pytest.raises(InvalidRequest):
        check_mounts((Mount("/tmp", target),))


def test_two_mounts_cannot_be_at_one_place() -> None:
    with pytest.raises(InvalidRequest, match="two mounts"):
        check_mounts((Mount("/a", "/x"), Mount("/b", "/x")))


@pytest.mark.parametrize(("user", "uid"), [("user", 1000), ("root", 0), ("1234", 1234)])
def test_a_user_is_a_known_name_or_a_number(user: str, uid: int) -> None:
    assert uid_of(user, ranged=True) == uid


@pytest.mark.parametrize("user", ["65533", "hutch", "", "-1", "65534", "70000", "²", "us er"])
def test_a_user_that_cannot_be_is_refused(user: str) -> None:
    with pytest.raises(InvalidRequest):
        uid_of(user, ranged=True)


def test_with_one_user_id_there_is_one_user() -> None:
    assert uid_of("user", ranged=False) == 1000
    with pytest.raises(InvalidRequest, match="range of uids"):
        uid_of("root", ranged=False)
