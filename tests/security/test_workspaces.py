"""A folder of the host's in a box: whose files are in it, and what a box can plant there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hutch.errors import HutchError, NotFound, NotPermitted, StartFailed

from .hosts import NOBODY, FarThing, Operator, folder_for


@pytest.fixture
def folder(operator: Operator) -> Path:
    """A folder that belongs to the user who runs Hutch."""
    return Path(folder_for(operator.who))


def mine(operator: Operator) -> int:
    return 0 if operator.ranged else NOBODY if not os.geteuid() else os.getuid()


MAKE = "echo x > file; mkdir -p deep/er; ln -s file link; mkfifo pipe; cp /bin/true program"


def owners(folder: Path) -> set[tuple[int, int]]:
    return {(path.lstat().st_uid, path.lstat().st_gid) for path in folder.rglob("*")}


def test_what_a_box_makes_in_a_workspace_belongs_to_the_folder_s_owner(
    operator: Operator, folder: Path
) -> None:
    with operator.box(workspace=str(folder)) as box:
        assert box.shell.run(MAKE).exit_code == 0
        box.files.write("from-the-host", "x")
    assert {path.name for path in folder.iterdir()} >= {"file", "link", "pipe", "from-the-host"}
    assert owners(folder) == {(mine(operator), mine(operator))}


def test_in_a_folder_of_user_1234_everything_stays_user_1234_s(operator: Operator) -> None:
    if not operator.ranged:
        pytest.skip("an ordinary user has no folder of another's to give")
    folder = Path(folder_for("root"))
    os.chown(folder, 1234, 1235)
    (folder / "before").write_text("x")
    os.chown(folder / "before", 1234, 1235)
    with operator.box(workspace=str(folder)) as box:
        assert box.shell.run(f"{MAKE}; echo y >> before; chmod 600 before").exit_code == 0
    assert owners(folder) == {(1234, 1235)}


def test_a_file_of_somebody_else_in_a_workspace_stays_closed(operator: Operator) -> None:
    if not operator.ranged:
        pytest.skip("needs root, to have files of two owners")
    folder = Path(folder_for("root"))
    os.chown(folder, 1234, 1234)
    (folder / "roots").write_text("secret")
    (folder / "roots").chmod(0o600)
    with operator.box(workspace=str(folder)) as box:
        assert "Permission denied" in box.commands.run("cat roots").stderr
        with pytest.raises(NotPermitted):
            box.files.read("roots")
        assert box.commands.run("chmod 666 roots").exit_code != 0


def test_a_box_cannot_leave_a_set_user_id_program_in_a_workspace(
    operator: Operator, folder: Path
) -> None:
    attempts = (
        "cp /bin/sleep a; chmod 4755 a; chmod u+s a; install -m 6755 /bin/sleep b;"
        "mkdir d; chmod 2755 d; cd d; cp /bin/sleep c; chmod g+s c;"
        "python3 -c \"import os; os.open('e', os.O_CREAT | os.O_WRONLY, 0o4777)\";"
        "tar -C / -cf - --mode=4755 bin/sleep usr/bin/sleep | tar -xpf -"
    )
    with operator.box(workspace=str(folder)) as box:
        box.shell.run(attempts)
        with pytest.raises(HutchError):
            box.files.write("f", "x", mode=0o4755)
    found = [p for p in folder.rglob("*") if p.is_file()]
    assert found
    assert [path for path in found if path.lstat().st_mode & 0o6000] == []


def test_a_box_cannot_leave_a_device_in_a_workspace(operator: Operator, folder: Path) -> None:
    with operator.box(workspace=str(folder)) as box:
        box.shell.run("mknod zero c 1 5; mknod disk b 8 0")
    assert list(folder.iterdir()) == []


def test_a_link_in_a_workspace_leads_to_the_box_s_own_files(
    operator: Operator, folder: Path
) -> None:
    secret = Path(folder_for("root")) / "secret"
    secret.write_text("secret")
    (folder / "absolute").symlink_to(secret)
    (folder / "relative").symlink_to("../" * 20 + str(secret))
    (folder / "users").symlink_to("/etc/passwd")
    with operator.box(workspace=str(folder)) as box:
        for name in ("absolute", "relative"):
            assert box.commands.run(["cat", name]).exit_code == 1
            with pytest.raises(NotFound):
                box.files.read(name)
        assert "hutch" in box.files.read("users")


def test_a_mount_is_never_placed_through_a_link_that_a_box_left_behind(
    operator: Operator, folder: Path
) -> None:
    data = folder_for(operator.who)
    with operator.box(workspace=str(folder)) as first:
        first.shell.run("ln -s /box/usr trap; ln -s /box/proc direct")
    for place in ("/workspace/trap/share", "/workspace/direct"):
        with pytest.raises(StartFailed):
            operator.box(workspace=str(folder), mounts=[f"{data}:{place}:ro"])


def test_a_read_only_mount_cannot_be_written_to(operator: Operator, folder: Path) -> None:
    (folder / "file").write_text("before")
    with operator.box(mounts=[f"{folder}:/srv/data:ro"]) as box:
        result = box.shell.run("cd /srv/data; echo after > file; touch new; rm file")
        assert result.stderr.count("Read-only file system") == 3
        assert box.shell.run("cat file").stdout == "before"


# H08: what lies below a box is shared with the host and with every other box.


def test_a_box_cannot_get_hold_of_a_system_file_by_a_hard_link(box: FarThing) -> None:
    tries = "ln /usr/bin/env x; ln /etc/passwd y; ln /proc/self/fd/0 z; ln -L /proc/self/exe w"
    assert box.shell.run(tries).stderr.count("ln: failed") == 4
    assert box.files.list("/workspace") == []


def test_nothing_asked_of_a_box_changes_the_system_below_it(box: FarThing) -> None:
    env = Path("/usr/bin/env")
    before = (env.stat().st_ino, env.stat().st_mtime_ns, env.stat().st_mode, env.read_bytes())
    box.shell.run("ln -s /usr/bin/env link; chmod 777 link; chown 1000 link; echo x > link")
    for act in (
        lambda: box.files.write("link", "x"),
        lambda: box.files.write("/usr/bin/env", "x", append=True),
        lambda: box.files.remove("/usr/bin/env"),
        lambda: box.files.move("/usr/bin/env", "/workspace/env"),
    ):
        with pytest.raises(HutchError):
            act()
    after = (env.stat().st_ino, env.stat().st_mtime_ns, env.stat().st_mode, env.read_bytes())
    assert after == before
