"""Which folders of this machine a Pod may have, and as which user. Without a cluster."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hutch.backends.base import Spec
from hutch.backends.contained import OWN_OF_FEW
from hutch.backends.kubernetes.claim import ClaimMount, ClaimMounts, find_mounts
from hutch.errors import BackendUnavailable, InvalidRequest
from hutch.types import ClusterSettings, Mount

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives folders away")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The data folder of a server, with workspaces of two owners."""
    for name in ("ada/thesis", "bob/thesis"):
        (tmp_path / "data/workspaces" / name).mkdir(parents=True)
    return tmp_path / "data"


def found(folder: Path, top: Path, *, claim: str = "data", **more: Any) -> ClaimMounts:
    """As a server asks for a workspace of its own."""
    wanted = {"mounts": (Mount(str(folder), "/workspace"),), "give": (str(folder),), **more}
    return find_mounts(Spec(**wanted), ClusterSettings(volume_claim=claim, volume_folder=str(top)))


@needs_root
def test_a_workspace_is_a_folder_of_the_claim_and_has_a_user_of_its_own(data: Path) -> None:
    thesis = data / "workspaces/ada/thesis"
    (thesis / "inner").mkdir()
    (thesis / "out").symlink_to(data)
    first = found(thesis, data)
    uid = thesis.stat().st_uid
    assert uid in OWN_OF_FEW, "which a Pod in a user namespace can have, too"
    assert first.claim == "data" and first.owner == (uid, uid)
    assert first.mounts == (ClaimMount("workspaces/ada/thesis", "/workspace", False, uid),)
    assert (thesis / "inner").stat().st_uid == (thesis / "out").lstat().st_uid == uid
    assert data.stat().st_uid == thesis.parent.stat().st_uid == 0, "of what is around it, nothing"
    assert found(thesis, data) == first, "the next box has the same user"
    assert found(thesis, data.parent).mounts[0].sub_path == "data/workspaces/ada/thesis"


@needs_root
def test_two_workspaces_have_two_users(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter(OWN_OF_FEW)
    monkeypatch.setattr("secrets.choice", lambda among: next(ids))
    owners = {found(data / f"workspaces/{who}/thesis", data).owner for who in ("ada", "bob")}
    assert len(owners) == 2


@needs_root
def test_a_user_that_the_caller_chose_is_not_replaced_by_the_owner(data: Path) -> None:
    claimed = found(data / "workspaces/ada/thesis", data, user="1000")
    assert claimed.owner is None and claimed.mounts[0].owner in OWN_OF_FEW


def test_without_a_claim_a_workspace_is_refused_with_the_setting_to_set(data: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot be mounted in a Pod.*volume_claim"):
        found(data / "workspaces/ada/thesis", data, claim="")


def test_only_workspaces_of_the_server_can_be_mounted(data: Path) -> None:
    thesis = data / "workspaces/ada/thesis"
    for give in ((), (str(thesis.parent),)):
        with pytest.raises(InvalidRequest, match=r"cannot be mounted in a Pod: copy"):
            found(thesis, data, give=give)
    both = (Mount(str(thesis), "/workspace"), Mount("/usr", "/srv", read_only=True))
    with pytest.raises(InvalidRequest, match=r"cannot be mounted in a Pod: copy"):
        found(thesis, data, mounts=both)


def test_what_is_outside_of_the_claim_or_all_of_it_is_refused(data: Path) -> None:
    thesis = data / "workspaces/ada/thesis"
    for top in (data / "workspaces/bob", data / "workspaces/ada/the", thesis, thesis / "inner"):
        top.mkdir(exist_ok=True)
        with pytest.raises(InvalidRequest, match="claim data has what is below"):
            found(thesis, top)


@pytest.mark.parametrize("name", ["a b", "a:b", "$(HOME)", "ä", "a\nb", '"'])
def test_a_name_that_a_cluster_could_take_for_another_is_refused(data: Path, name: str) -> None:
    folder = data / "workspaces" / name / "thesis"
    folder.mkdir(parents=True)
    with pytest.raises(InvalidRequest, match="claim data has what is below"):
        found(folder, data)


def test_a_workspace_that_was_replaced_by_a_link_is_not_mounted(data: Path) -> None:
    thesis = data / "workspaces/ada/thesis"
    thesis.rmdir()
    thesis.symlink_to("../bob/thesis")
    with pytest.raises(InvalidRequest, match="a link is on the way"):
        found(thesis, data)
    thesis.unlink()
    (data / "workspaces/ada").rmdir()
    (data / "workspaces/ada").symlink_to("bob")
    with pytest.raises(InvalidRequest, match="a link is on the way"):
        found(thesis, data)


def test_the_folder_of_the_claim_may_be_named_by_a_link(data: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(data)
    os.chown(data / "workspaces/ada/thesis", 501, 20)
    claimed = found(data / "workspaces/ada/thesis", tmp_path / "link")
    assert claimed.mounts[0].sub_path == "workspaces/ada/thesis" and claimed.owner == (501, 20)


def test_a_folder_that_is_not_there_is_named(data: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"volume_folder: .*/nowhere: No such file"):
        found(data / "workspaces/ada/thesis", data / "nowhere")


@needs_root
def test_a_file_system_of_its_own_is_not_on_the_claim(data: Path) -> None:
    """As `quota_mode = "kernel"` makes one for each workspace."""
    thesis = data / "workspaces/ada/thesis"
    subprocess.run(["mount", "-t", "tmpfs", "none", thesis], check=True)
    try:
        with pytest.raises(InvalidRequest, match=r"a file system of its own.*quota_mode"):
            found(thesis, data)
    finally:
        subprocess.run(["umount", thesis], check=True)


@needs_root
def test_a_volume_that_does_not_let_root_give_files_away_is_named(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object, **more: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chown", refused)
    with pytest.raises(BackendUnavailable, match=r"ada/thesis cannot be given.*no_root_squash"):
        found(data / "workspaces/ada/thesis", data)


def test_the_name_of_a_claim_is_a_name() -> None:
    for name in ("a/b", "A", "-a", "a-", "a b", "a" * 254, "a\n", "../a"):
        with pytest.raises(InvalidRequest, match="volume claim"):
            ClusterSettings(volume_claim=name)
    ClusterSettings(volume_claim="hutch-data.1")
