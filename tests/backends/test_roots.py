"""Boxes whose root is an image from elsewhere: what is in it, whose it is, and what stays."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from must_work import need

from hutch import wire
from hutch.backends.base import Spec
from hutch.backends.namespaces import NamespacesBackend
from hutch.backends.namespaces.plan import MAX_LAYERS, STORE_BASE, UID_BASE, UIDS_PER_BOX
from hutch.errors import InvalidRequest, NotFound, StartFailed
from hutch.types import Limits, MiB, Mount, Root
from layers_of_tests import (
    BUSYBOX,
    Inside,
    busybox,
    file,
    folder,
    in_box,
    in_boxes,
    layer_of,
    root_of,
)

ROOT = os.geteuid() == 0
only_root = pytest.mark.skipif(not ROOT, reason="needs a range of user ids: run by root")

PASSWD = """\
root:x:0:0:root:/root:/bin/ash
daemon:x:1:1:daemon:/usr/sbin:/bin/false
redis:x:999:998::/data:/bin/sh
"""
GROUP = "root:x:0:\nredis:x:998:\nstaff:x:50:redis\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A layer with a shell, some users, and folders of root's and of another user's."""
    return layer_of(
        tmp_path_factory.mktemp("layers") / "base", *busybox(),
        folder("etc"), file("etc/passwd", PASSWD), file("etc/group", GROUP),
        file("etc/hosts", "10.0.0.1 elsewhere\n"), folder("usr"), folder("usr/share"),
        file("usr/share/text", "from the image\n"), folder("data", uid=999, gid=998),
        folder("old"), file("old/a", "a"), file("old/b", "b"), folder("old/inner"),
        file("old/inner/c", "c"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def root(base: str) -> Root:
    return root_of([base])


def test_an_image_with_a_shell_and_nothing_else_is_enough(root: Root) -> None:
    async def work(box: Inside) -> None:
        assert (
            await box.sh("id -u; pwd; cat /usr/share/text") == "1000\n/workspace\nfrom the image\n"
        )
        assert await box.sh("x=1; cd /tmp") == ""
        assert await box.sh("echo $x $PWD $HOME $USER") == "1 /tmp /home/user user\n"
        result, _ = await box.run(wire.Exec(["sh", "-c", "exit 3"]))
        assert result["exit_code"] == 3

    in_box(root, work)


def test_an_image_without_python_says_so_when_a_cell_is_run(root: Root) -> None:
    async def work(box: Inside) -> None:
        with pytest.raises(NotFound, match="no python3"):
            await box.run(wire.RunCell(code="1", context="main"))
        assert await box.sh("echo still here") == "still here\n"

    in_box(root, work)


def test_a_box_knows_the_digest_of_its_image(root: Root) -> None:
    async def work(box: Inside) -> None:
        assert box.box.digest == root.digest

    in_box(root, work)


def test_a_box_that_is_adopted_still_knows_it(root: Root, tmp_path: Path) -> None:
    async def main() -> None:
        first, second = (NamespacesBackend(lasting=str(tmp_path / "run")) for _ in range(2))
        try:
            box = await first.start(Spec(image="test", root=root))
            await box.outlive(60)
            await first.leave()
            assert (await second.adopt(box.id)).digest == root.digest
        finally:
            await second.close()

    asyncio.run(main())


def test_proc_and_dev_are_those_of_a_box(root: Root) -> None:
    async def work(box: Inside) -> None:
        assert await box.sh("cat /proc/1/comm") == "hutch-guest\n"
        names = set((await box.sh("ls /dev")).split())
        assert names == {"fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin",
                         "stdout", "tty", "urandom", "zero"}  # fmt: skip
        assert await box.sh("stat -c '%t %T' /dev/null") == "1 3\n"
        assert await box.sh("ls /sys 2>/dev/null; cat /etc/hostname") == "box\n"
        assert "elsewhere" not in await box.sh("cat /etc/hosts")

    in_box(root, work)


def test_an_empty_folder_in_the_place_of_a_file_of_ours_is_replaced(
    base: str, tmp_path: Path
) -> None:
    empty = layer_of(tmp_path / "empty", file("etc/.wh.hosts"), folder("etc/hosts"))

    async def work(box: Inside) -> None:
        assert "localhost" in await box.sh("cat /etc/hosts")

    in_box(root_of([base, empty]), work)
    full = layer_of(tmp_path / "full", folder("etc/hosts"), file("etc/hosts/x"))
    with pytest.raises(StartFailed, match="hosts is a folder in this image"):
        in_box(root_of([base, full]), _nothing)


# --- layers -----------------------------------------------------------------------------------


def test_an_upper_layer_replaces_and_removes_what_is_below(base: str, tmp_path: Path) -> None:
    upper = layer_of(
        tmp_path / "upper", file("usr/share/text", "from above\n"), file("old/.wh.a"),
        folder("old/inner"), file("old/inner/.wh..wh..opq"), file("old/inner/d", "d"),
    )  # fmt: skip

    async def work(box: Inside) -> None:
        assert await box.sh("cat /usr/share/text") == "from above\n"
        assert await box.sh("ls /old /old/inner") == "/old:\nb\ninner\n\n/old/inner:\nd\n"
        assert await box.sh("cat /old/a") == "cat: can't open '/old/a': No such file or directory\n"

    in_box(root_of([base, upper]), work)


def test_a_folder_that_was_removed_and_made_again_is_another(base: str, tmp_path: Path) -> None:
    after = layer_of(tmp_path / "after", file(".wh.old"), folder("old"), file("old/new"))
    before = layer_of(tmp_path / "before", folder("old"), file("old/new"), file(".wh.old"))
    inside = layer_of(tmp_path / "inside", file(".wh.old"), file("old/new"))

    async def work(box: Inside) -> None:
        assert await box.sh("ls /old") == "new\n"

    for upper in (after, before, inside):
        in_box(root_of([base, upper]), work)


def test_a_file_that_was_removed_is_back_when_a_layer_above_brings_it(
    base: str, tmp_path: Path
) -> None:
    gone = layer_of(tmp_path / "gone", file("old/.wh.a"), file(".wh.usr"))
    back = layer_of(tmp_path / "back", file("old/a", "again"))

    async def work(box: Inside) -> None:
        assert await box.sh("cat /old/a; ls /usr") == "againls: /usr: No such file or directory\n"

    in_box(root_of([base, gone, back]), work)


def test_a_layer_can_hide_all_that_is_below_it(base: str, tmp_path: Path) -> None:
    alone = layer_of(tmp_path / "alone", file(".wh..wh..opq"), *busybox(), file("new"))

    async def work(box: Inside) -> None:
        assert await box.sh("ls -d /new /old /etc/hosts") == (
            "ls: /old: No such file or directory\n/etc/hosts\n/new\n"
        )
        assert "redis" not in await box.sh("cat /etc/passwd")

    in_box(root_of([base, alone]), work)


def test_more_layers_than_any_builder_makes_can_be_used(base: str, tmp_path: Path) -> None:
    one = Path(layer_of(tmp_path / "0", folder("many"), file("many/0")))
    layers = [base, str(one)]
    for number in range(1, MAX_LAYERS - 1):
        where = tmp_path / str(number)
        (where / "many").mkdir(parents=True)
        (where / "many" / str(number)).touch()
        if ROOT:
            for path in (where, where / "many", where / "many" / str(number)):
                os.chown(path, STORE_BASE, STORE_BASE)
        layers.append(str(where))

    async def work(box: Inside) -> None:
        assert len((await box.sh("ls /many")).split()) == MAX_LAYERS - 1

    in_box(root_of(layers), work)


def test_too_many_layers_are_refused(base: str) -> None:
    with pytest.raises(InvalidRequest, match="layers"):
        in_box(root_of([base] * (MAX_LAYERS + 1)), _nothing)


def test_a_layer_that_is_gone_is_an_error_that_says_so(base: str, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="Pull it again"):
        in_box(root_of([base, str(tmp_path / "gone")]), _nothing)


async def _nothing(box: Inside) -> None:
    return


# --- what a box writes -------------------------------------------------------------------------


@only_root
def test_root_of_a_box_can_change_the_image_s_files_and_the_image_stays(
    base: str, root: Root
) -> None:
    text = Path(base, "usr/share/text")
    digest = hashlib.sha256(text.read_bytes()).hexdigest()
    before = sorted(str(path) for path in Path(base).rglob("*"))

    async def work(box: Inside) -> None:
        assert await box.sh("echo mine > /usr/share/text && cat /usr/share/text") == "mine\n"
        assert await box.sh("rm -r /old && touch /usr/new /new && ls /usr") == "new\nshare\n"
        assert await box.sh("chmod 600 /bin/busybox && ls /old; echo $?") == (
            "ls: /old: No such file or directory\n1\n"
        )

    in_box(root, work, user="root")
    assert hashlib.sha256(text.read_bytes()).hexdigest() == digest
    assert sorted(str(path) for path in Path(base).rglob("*")) == before
    assert Path(base, "bin/busybox").stat().st_mode & 0o777 == 0o755


@only_root
def test_the_user_of_a_box_cannot_change_what_is_root_s(root: Root) -> None:
    async def work(box: Inside) -> None:
        said = await box.sh("echo x > /usr/share/text; touch /usr/x /x /etc/passwd; rm /bin/ls")
        assert said.count("Permission denied") == 5, said
        assert await box.sh("touch /tmp/x /workspace/x /home/user/x /dev/shm/x && echo y") == "y\n"

    in_box(root, work)


def test_two_boxes_of_a_root_do_not_see_what_the_other_wrote(root: Root) -> None:
    async def work(one: Inside, other: Inside) -> None:
        await one.sh("echo 1 > /tmp/x; echo 1 > /usr/share/x; rm /old/a")
        assert await other.sh("ls /tmp /usr/share; cat /old/a") == "/tmp:\n\n/usr/share:\ntext\na"

    in_boxes(root, work, user="root" if ROOT else "user")


def test_what_is_written_over_an_image_is_bounded_by_the_disk(root: Root) -> None:
    async def work(box: Inside) -> None:
        said = await box.sh("dd if=/dev/zero of=/usr/share/big bs=1M count=64 2>&1")
        assert "No space left" in said
        size = int(await box.sh("stat -c %s /usr/share/big"))
        assert size <= 8 * MiB

    limits = Limits(memory=128 * MiB, disk=8 * MiB)
    in_box(root, work, user="root" if ROOT else "user", limits=limits)


def test_the_rooms_of_a_box_can_be_packed_and_unpacked_in_another(root: Root) -> None:
    async def work(one: Inside, other: Inside) -> None:
        await one.sh("echo kept > /workspace/a; mkdir /home/user/b; ln -s a /tmp/c")
        packed = b""
        async with one.link.call(wire.Pack()) as call:
            async for event in call:
                if isinstance(event, wire.Data) and event.channel == wire.STDOUT:
                    packed += event.data
        async with other.link.call(wire.Unpack()) as call:
            await call.send(packed)
            call.end_input()
            async for _ in call:
                pass
        assert await other.sh("cat /workspace/a; ls /home/user; readlink /tmp/c") == "kept\nb\na\n"

    in_boxes(root, work)


# --- who is who --------------------------------------------------------------------------------


def test_the_image_s_users_are_there_and_ours(root: Root) -> None:
    async def work(box: Inside) -> None:
        names = [line.split(":")[0] for line in (await box.sh("cat /etc/passwd")).splitlines()]
        assert set(names) == {"root", "daemon", "redis", "user", "nobody", "hutch"}
        assert len(names) == 6
        assert "staff:x:50:redis\n" in await box.sh("cat /etc/group")

    in_box(root, work)


@only_root
@pytest.mark.parametrize(
    ("said", "ids"),
    [("redis", "999 998"), ("999", "999 998"), ("redis:staff", "999 50"), ("7:8", "7 8"),
     ("", "1000 1000"), ("root", "1000 1000"), ("0:0", "1000 1000")],
)  # fmt: skip
def test_a_box_runs_as_the_image_s_user_unless_that_is_root(base: str, said: str, ids: str) -> None:
    async def work(box: Inside) -> None:
        assert await box.sh("echo $(id -u) $(id -g); touch /workspace/x") == ids + "\n"

    in_box(root_of([base], user=said), work)


@only_root
@pytest.mark.parametrize("said", ["", "user", "toor", "toor:staff", "00"])
def test_a_box_does_not_run_as_root_by_another_name(base: str, said: str, tmp_path: Path) -> None:
    users = "root:x:0:0::/root:/bin/sh\nuser:x:0:0::/root:/bin/sh\ntoor:x:0:0::/root:/bin/sh\n"
    upper = layer_of(tmp_path / "upper", file("etc/passwd", users))

    async def work(box: Inside) -> None:
        assert await box.sh("id -u; whoami; echo $HOME") == "1000\nuser\n/home/user\n"

    in_box(root_of([base, upper], user=said), work)


@only_root
def test_the_image_s_user_owns_what_the_image_says(base: str) -> None:
    async def work(box: Inside) -> None:
        assert await box.sh("touch /data/x && stat -c '%u %g' /data/x") == "999 998\n"
        assert await box.sh("echo $HOME $USER") == "/data redis\n"

    in_box(root_of([base], user="redis"), work)


@only_root
@pytest.mark.parametrize(("user", "uid"), [("root", 0), ("redis", 999), ("1234", 1234)])
def test_a_caller_s_wish_comes_before_the_image_s(base: str, user: str, uid: int) -> None:
    async def work(box: Inside) -> None:
        assert await box.sh("id -u") == f"{uid}\n"

    in_box(root_of([base], user="daemon"), work, user=user)


@only_root
@pytest.mark.parametrize("user", ["nobody-here", "70000", "65533", "-1", "a b", "1000670000"])
def test_a_user_that_cannot_be_is_refused(base: str, user: str) -> None:
    with pytest.raises(InvalidRequest):
        in_box(root_of([base], user=user), _nothing)


def test_the_image_s_variables_are_there_but_not_who_its_user_is(base: str) -> None:
    env = (("PATH", "/opt/x:/bin"), ("LANG", "de_DE"), ("HOME", "/root"), ("X", "a b\n'"))

    async def work(box: Inside) -> None:
        said = await box.sh('echo "$PATH|$LANG|$HOME|$X"')
        assert said == "/opt/x:/bin:/.hutch/aliases|de_DE|/home/user|a b\n'\n"

    in_box(root_of([base], env=env), work)


# --- mounts ------------------------------------------------------------------------------------


@only_root
def test_a_folder_of_the_host_belongs_to_the_image_s_user(base: str, tmp_path: Path) -> None:
    project, other = tmp_path / "project", tmp_path / "other"
    for path in (project, other):
        path.mkdir()
        os.chown(path, 4321, 4322)
    (other / "a").write_text("a")

    async def work(box: Inside) -> None:
        said = await box.sh("touch new && stat -c '%u %g' new && cat /old/deep/er/a /old/a/file")
        assert said == "999 998\naa", said
        assert "Read-only" in await box.sh("touch /old/deep/er/x")

    mounts = (
        Mount(str(project), "/workspace"), Mount(str(other), "/old/deep/er", read_only=True),
        Mount(str(other / "a"), "/old/a/file"),
    )  # fmt: skip
    in_box(root_of([base], user="redis"), work, mounts=mounts)
    made = (project / "new").stat()
    assert (made.st_uid, made.st_gid) == (4321, 4322)


# --- Python ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def python(base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A layer with this machine's own Python, as another image might have it."""
    if not Path("/usr/bin/python3").exists():
        need("python3", "needs a Python below /usr")
    ask = "import sysconfig, sys; print(sysconfig.get_path('stdlib'), sys.executable)"
    found = subprocess.run(
        ["/usr/bin/python3", "-I", "-c", ask], capture_output=True, text=True, check=True
    )
    library, program = map(Path, found.stdout.split())
    entries = [file("usr/bin/python3", program.read_bytes(), 0o755)]
    shared = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    modules = [path for path in library.rglob("*") if path.is_file() and _is_needed(path, library)]
    for path in (*map(Path, {w for w in shared.split() if w.startswith("/")}), *modules):
        entries.append(file(str(path), path.read_bytes(), 0o755))
    return layer_of(tmp_path_factory.mktemp("python") / "layer", *entries)


def _is_needed(path: Path, library: Path) -> bool:
    top = path.relative_to(library).parts[0]
    skipped = {"test", "idlelib", "lib2to3", "dist-packages", "site-packages", "ensurepip"}
    return top not in skipped and not top.startswith("config-") and "__pycache__" not in path.parts


def test_a_cell_runs_in_the_image_s_own_python(base: str, python: str) -> None:
    async def work(box: Inside) -> None:
        code = (
            "import sys, os\nprint(sys.executable, os.getcwd(), os.path.exists('/usr/share/text'))"
        )
        result, printed = await box.run(wire.RunCell(code=code, context="main"))
        assert result["answer"]["error"] is None
        assert printed == "/usr/bin/python3 /workspace True\n"

    in_box(root_of([base, python]), work)


def test_an_image_that_has_only_python3_has_a_python_in_its_boxes(base: str, python: str) -> None:
    async def work(box: Inside) -> None:
        assert await box.sh("[ -e /usr/bin/python ] || python -c 'print(6 * 7)'") == "42\n"

    in_box(root_of([base, python]), work)


# --- run by an ordinary user -------------------------------------------------------------------

SOURCE = Path(__file__).parent.parent.parent / "src"
PYTHON = "/usr/bin/python3"
DRIVER = """
import asyncio, json, os, sys
sys.path[:0] = sys.argv[1:3]
import layers_of_tests as made
from pathlib import Path

here = Path(sys.argv[3])
base = made.layer_of(here / "base", *made.busybox(), made.folder("a", mode=0o500, uid=7),
                     made.file("a/x", "x", mode=0o000), made.file("a/y"), made.folder("b"))
upper = made.layer_of(here / "upper", made.file("a/.wh.y"), made.file(".wh.b"))

async def work(box):
    assert box.box.digest
    print(json.dumps(await box.sh(
        "id -u; ls /; ls -l /a; rm /bin/ls; echo x > /a/new && cat /a/new; cat /a/x")))

made.in_box(made.root_of([base, upper], user="walter"), work)
from hutch.tree import remove
for layer in (base, upper):
    remove(layer)
print(json.dumps(os.listdir(here)))
"""


@only_root
def test_an_ordinary_user_has_boxes_of_images_too() -> None:
    if not os.access(PYTHON, os.X_OK) or not BUSYBOX.exists():
        need("namespaces", f"needs {PYTHON}, for everybody, and busybox-static")
    with tempfile.TemporaryDirectory() as name:
        here, tests = Path(name), Path(__file__).parent.parent
        here.chmod(0o755)
        shutil.copytree(SOURCE, here / "src", ignore=shutil.ignore_patterns("__pycache__"))
        (here / "tests").mkdir()
        for module in ("layers_of_tests.py", "must_work.py"):
            shutil.copy(tests / module, here / "tests")
        (here / "tests/pytest.py").touch()  # not everybody has it, and it is not called
        (here / "mine").mkdir()
        os.chown(here / "mine", 65534, 65534)
        as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        done = subprocess.run(
            [*as_nobody, PYTHON, "-c", DRIVER, *(here / n for n in ("src", "tests", "mine"))],
            capture_output=True, text=True, timeout=120, env={"PATH": os.environ["PATH"]},
            cwd="/", check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said, left = map(json.loads, done.stdout.splitlines())
    assert said.startswith("1000\n") and "\nb\n" not in said and "y\n" not in said
    assert said.endswith("x\ncat: can't open '/a/x': Permission denied\n") and left == []


def test_no_box_has_the_ids_of_the_store() -> None:
    assert STORE_BASE > 0 and STORE_BASE + UIDS_PER_BOX <= UID_BASE
