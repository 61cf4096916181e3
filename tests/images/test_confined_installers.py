"""An installer that a package took over reaches nothing of this machine, and does not last."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import packaging
import pytest
import uv
from must_work import need
from wheels_of_tests import children, make_wheel

from hutch.backends.linux import cgroup
from hutch.backends.namespaces import confine, foreign
from hutch.backends.namespaces.confine import Bounds
from hutch.backends.namespaces.confined import BOUNDED
from hutch.backends.namespaces.foreign import check_links, remove_tree
from hutch.errors import BackendUnavailable, InvalidRequest, NoSpace
from hutch.images import uv as images_uv
from hutch.images.environment import base_interpreter, base_prefix
from hutch.images.install import _take_out_what_tells_of_this_machine, make_readable
from hutch.images.installer import cache_for, confinement, outside_usr, started
from hutch.images.locks import locked
from hutch.images.uv import pip_install
from hutch.projects.python import _take_out_links
from hutch.recipes import chain, pack

PATIENCE = 60

# What an attacker would try, run by the plain interpreter in the place of uv.
PROBE = """
import json, os, socket, sys, ctypes
told = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
found = {}

def attempt(name, act):
    try:
        found[name] = act()
    except BaseException as exc:
        found[name] = type(exc).__name__

def abstract(kind):
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.connect("\\0" + told["abstract"])
        return "connected"

def pair():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.sendto(b"x", "\\0" + told["datagram"])
    return "sent"

attempt("secret", lambda: open(told["secret"]).read())
attempt("home", lambda: sorted(os.listdir(told["home"])))
attempt("root", lambda: sorted(os.listdir("/")))
attempt("processes", lambda: os.listdir("/proc"))
attempt("docker", lambda: os.stat("/var/run/docker.sock") and "there")
attempt("path socket", lambda: socket.socket(socket.AF_UNIX).connect(told["path"]) or "connected")
attempt("abstract", lambda: abstract(socket.SOCK_STREAM))
attempt("datagram", lambda: abstract(socket.SOCK_DGRAM))
attempt("pair", pair)
attempt("stream pair", lambda: socket.socketpair() and "made")
attempt("kill", lambda: os.kill(told["pid"], 0) or "there")
attempt("pid", os.getpid)
attempt("root write", lambda: open("/owned", "w") and "written")
attempt("usr write", lambda: open("/usr/owned", "w") and "written")
attempt("wheel write", lambda: open(told["wheels"] + "/owned", "w") and "written")
attempt("target write", lambda: open(told["target"] + "/mine", "w").write("x"))
attempt("unshare", lambda: libc.unshare(0x10000000))
attempt("mount", lambda: libc.mount(b"x", b"/tmp", b"tmpfs", 0, None))
attempt("environment", lambda: sorted(os.environ))
attempt("wheels", lambda: sorted(os.listdir(told["wheels"])))
attempt("netrc", lambda: open(told["home"] + "/.netrc").read())
attempt("network", lambda: socket.create_connection(tuple(told["tcp"]), 10) and "connected")
attempt("privileges", lambda: libc.prctl(39, 0, 0, 0, 0))
print(json.dumps(found))
"""


@pytest.fixture
def lock(tmp_path: Path) -> int:
    return os.open(tmp_path / "x.lock", os.O_RDWR | os.O_CREAT)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def run_python(
    code: str,
    target: Path,
    lock: int,
    *arguments: str,
    bounds: Bounds | None = None,
    checked: bool = True,
    **env: str,
) -> list[str]:
    """What a program says that runs as an installer does."""
    measured = [target] if checked else []
    seen = confinement(env, [target], outside_usr([base_prefix()]), measured, bounds)
    argv = [str(base_interpreter()), "-I", "-S", "-c", code, *arguments]
    with started(argv, env, lock, seen) as (_, lines):
        return [line for line in lines if line]


def test_an_installer_reaches_nothing_but_its_folders(
    tmp_path: Path, target: Path, lock: int
) -> None:
    home, wheels = tmp_path / "home", tmp_path / "wheels"
    for folder in (home, home / ".ssh", wheels):
        folder.mkdir()
    (home / ".ssh/id").write_text("secret")
    (home / ".netrc").write_text("machine h\n")
    make_wheel(wheels, "mine")
    os.chmod(wheels, 0o700)
    with (
        socket.socket(socket.AF_UNIX) as path,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram,
        socket.create_server(("127.0.0.1", 0)) as tcp,
    ):
        path.bind(str(target / "socket"))  # where it could reach the file
        name = f"hutch-test-{os.getpid()}"
        abstract.bind(f"\0{name}")
        datagram.bind(f"\0{name}-datagram")
        for sock in (path, abstract):
            sock.listen()
        told = {
            "secret": str(home / ".ssh/id"),
            "home": str(home),
            "path": str(target / "socket"),
            "abstract": name,
            "datagram": f"{name}-datagram",
            "pid": os.getpid(),
            "wheels": str(wheels),
            "target": str(target),
            "tcp": tcp.getsockname(),
        }
        env = {"HOME": str(home), "UV_FIND_LINKS": str(wheels)}
        (said,) = run_python(PROBE, target, lock, json.dumps(told), checked=False, **env)
        found = json.loads(said)
        control = subprocess.run(
            [sys.executable, "-I", "-S", "-c", PROBE, json.dumps(told | {"wheels": "/x"})],
            capture_output=True,
            check=True,
        )
    bare = json.loads(control.stdout)
    for name in ("secret", "path socket", "abstract", "pair", "kill", "target write"):
        assert bare[name] not in ("FileNotFoundError", "PermissionError", "OSError"), (name, bare)
    for name in ("secret", "processes", "docker"):
        assert found[name] == "FileNotFoundError", name
    for name in (
        "path socket",
        "abstract",
        "datagram",
        "pair",
        "root write",
        "usr write",
        "wheel write",
        "kill",
    ):
        assert found[name] in ("PermissionError", "OSError", "ProcessLookupError"), name
    assert found["home"] == [".netrc"] and found["netrc"] == "machine h\n"
    assert found["wheels"] == ["mine-1.0-py3-none-any.whl"] and found["target write"] == 1
    assert (found["unshare"], found["mount"], found["privileges"], found["pid"]) == (-1, -1, 1, 1)
    assert (found["network"], found["stream pair"]) == ("connected", "made")
    assert {*found["environment"]} <= {"HOME", "UV_FIND_LINKS", "TMPDIR", "LC_CTYPE"}
    assert not {*found["root"]} & {"home", "proc", "run", "sys", "var", "srv", "mnt"}
    assert (target / "mine").stat().st_uid == os.getuid()
    os.close(lock)


def test_an_installer_gets_a_faithful_copy_of_a_private_file(
    tmp_path: Path, target: Path, lock: int
) -> None:
    key, content = tmp_path / "key.der", bytes(range(256)) + b"\r\n\xff"
    key.write_bytes(content)
    key.chmod(0o600)
    read = f"print(open({str(key)!r}, 'rb').read().hex())"
    assert run_python(read, target, lock, SSL_CLIENT_CERT=str(key)) == [content.hex()]
    os.close(lock)


def test_an_installer_reads_a_private_file_in_a_folder_of_the_system(
    tmp_path: Path, target: Path, lock: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "share"
    folder.mkdir(mode=0o755)
    (folder / "ca.pem").write_text("mine")
    (folder / "ca.pem").chmod(0o600)
    monkeypatch.setattr(confine, "SYSTEM", (*confine.SYSTEM, str(folder)))
    code = f"import os; print(os.listdir('{folder}'), open('{folder}/ca.pem').read())"
    said = run_python(code, target, lock, SSL_CERT_FILE=str(folder / "ca.pem"))
    assert said == ["['ca.pem'] mine"]
    os.close(lock)


def test_an_installer_that_takes_too_long_is_stopped(target: Path, lock: int) -> None:
    with pytest.raises(BackendUnavailable, match="longer than 1 seconds"):
        run_python("import time; time.sleep(600)", target, lock, bounds=Bounds(seconds=1))
    os.close(lock)


def test_an_installer_gets_no_more_memory_than_it_may_have(target: Path, lock: int) -> None:
    said = run_python("bytearray(1 << 30)", target, lock, bounds=Bounds(memory=256 << 20))
    assert said[-1] == "MemoryError"
    os.close(lock)


# Eight processes that hold 48 MiB each: how many of them were killed.
HUNGRY = """
import os, signal, time
pids = []
for n in range(8):
    hear, say = os.pipe()
    pids.append(os.fork())
    if not pids[-1]:
        held = b"x" * (48 << 20)
        os.write(say, held[:1])
        time.sleep(600)
    os.close(say)
    os.read(hear, 1)  # it has its memory, or was killed
for pid in pids:
    os.kill(pid, signal.SIGTERM)
print([os.waitpid(pid, 0)[1] for pid in pids].count(signal.SIGKILL))
"""


def groups() -> set[str]:
    """Control groups of installers and boxes."""
    return {
        f"{folder}/{name}"
        for folder in {*cgroup.find().folders.values()}
        for name in os.listdir(folder)
        if name.startswith("hutch-") and not name.endswith("-try")
    }


def need_groups() -> None:
    if missing := {*BOUNDED} & {*cgroup.find().missing}:
        need("namespaces", f"no control groups here for {missing}")


def groups_of(supervisor: int) -> set[str]:
    return {path for path in groups() if f"/hutch-{supervisor}-" in path}


def test_all_processes_of_an_installer_share_a_bound_on_memory(target: Path, lock: int) -> None:
    need_groups()
    (killed,) = run_python(HUNGRY, target, lock, bounds=Bounds(memory=128 << 20))
    assert int(killed) >= 6
    os.close(lock)


def test_an_installer_that_is_stopped_leaves_no_control_group(target: Path, lock: int) -> None:
    need_groups()
    seen = confinement({}, [target], outside_usr([base_prefix()]))
    argv = [str(base_interpreter()), "-I", "-S", "-c", "import time; time.sleep(600)"]
    with suppress(KeyError), started(argv, {}, lock, seen) as (process, _):
        assert groups_of(process.pid)
        raise KeyError
    assert not groups_of(process.pid)
    os.close(lock)


def test_the_next_installer_removes_the_control_group_of_a_killed_one(
    target: Path, lock: int
) -> None:
    need_groups()
    seen = confinement({}, [target], outside_usr([base_prefix()]))
    argv = [str(base_interpreter()), "-I", "-S", "-c", "import time; time.sleep(600)"]
    with started(argv, {}, lock, seen) as (process, lines):
        watched = [os.pidfd_open(pid) for pid in children(process.pid)]
        process.kill()  # the supervisor; all it leaves is the group
        assert not [*filter(None, lines)]
        assert select.select(watched, [], [], PATIENCE)[0] == watched
        os.close(*watched)
    run_python("", target, lock)
    assert not groups_of(process.pid)
    os.close(lock)


def test_an_installer_that_fills_the_disk_is_stopped(target: Path, lock: int) -> None:
    one = f"open({str(target / 'x')!r}, 'wb').write(bytes(8 << 20))"
    said = run_python(one, target, lock, bounds=Bounds(file_bytes=1 << 20))
    assert "File too large" in said[-1]
    many = f"""
        import time
        for n in range(8):
            open({str(target)!r} + f"/{{n}}", "wb").write(bytes(1 << 20))
        time.sleep(600)
    """
    with pytest.raises(NoSpace, match="take more than 4 MiB"):
        run_python(textwrap.dedent(many), target, lock, bounds=Bounds(disk_bytes=4 << 20))
    with pytest.raises(NoSpace, match="are free on the disk"):
        run_python(
            "import time; time.sleep(600)", target, lock, bounds=Bounds(disk_reserve=1 << 60)
        )
    os.close(lock)


def test_an_installer_that_fills_the_disk_with_empty_files_is_stopped(
    target: Path, lock: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = "import time; time.sleep(600)"
    if os.statvfs(target).f_files:  # else its file system does not count them
        with pytest.raises(NoSpace, match="no room for more files"):
            run_python(wait, target, lock, bounds=Bounds(files_reserve=1 << 60))
    monkeypatch.setattr(foreign, "MOST", 100)
    many = f"for n in range(101): open({str(target)!r} + f'/{{n}}', 'x').close()"
    with pytest.raises(InvalidRequest, match="more than 100 files"):
        run_python(f"{many}\n{wait}", target, lock)
    os.close(lock)


def test_an_installer_starts_a_bounded_number_of_processes(target: Path, lock: int) -> None:
    forks = """
        import os, time
        made = 0
        try:
            while made < 200:
                if not os.fork():
                    time.sleep(600)
                made += 1
        except OSError:
            pass
        print(made)
    """
    (said,) = run_python(textwrap.dedent(forks), target, lock, bounds=Bounds(processes=20))
    assert 0 < int(said) < 20  # and the rest dies with the first
    os.close(lock)


def test_an_installer_that_closes_its_output_is_still_bounded(target: Path, lock: int) -> None:
    code = "import os, time; os.close(1); os.close(2); time.sleep(600)"
    with pytest.raises(BackendUnavailable, match="longer than 1 seconds"):
        run_python(code, target, lock, bounds=Bounds(seconds=1))
    os.close(lock)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("for n in range(3000): os.mkdir('d'); os.chdir('d')", "nested too deeply"),
        ("for n in range(50): os.mkdir('d' * 200); os.chdir('d' * 200)", "nested too deeply"),
        ("os.mkfifo('RECORD')", "'RECORD', which is not a file, folder or link"),
    ],
)
def test_what_an_installer_leaves_is_checked_before_it_is_used(
    target: Path, lock: int, code: str, says: str
) -> None:
    try:
        with pytest.raises(InvalidRequest, match=says):
            run_python(f"import os; os.chdir({str(target)!r})\n{code}", target, lock)
    finally:
        remove_tree(target)
    assert not target.exists()
    os.close(lock)


def test_a_tree_is_removed_whatever_is_in_it(tmp_path: Path, target: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("")
    (target / "link").symlink_to(tmp_path / "outside")
    (target / "closed/inner").mkdir(parents=True)
    (target / "closed/inner/file").write_text("")
    os.mkfifo(target / "closed/fifo")
    (target / "closed").chmod(0)
    remove_tree(target)
    remove_tree(target)  # and nothing happens if it does not exist
    assert os.listdir(tmp_path) == ["outside"] and os.listdir(tmp_path / "outside") == ["file"]


def test_a_link_of_a_package_stays_in_its_tree(target: Path) -> None:
    (target / "bin").mkdir()
    (target / "bin/tool").symlink_to("../tool.js")
    check_links(target)
    for place in ("/dev/zero", "../x", str(target.parent)):
        (target / "list.json").symlink_to(place)
        with pytest.raises(InvalidRequest, match=r"list\.json"):
            check_links(target)
        (target / "list.json").unlink()


@pytest.mark.parametrize(
    "use",
    [
        make_readable,
        _take_out_links,
        _take_out_what_tells_of_this_machine,
        lambda site: pack(chain("base")[0], site, io.BytesIO()),
    ],
    ids=["make readable", "take out links", "take out paths", "pack for an engine"],
)
def test_a_folder_that_cannot_be_listed_is_an_error(
    target: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], object]
) -> None:
    (target / "package/closed").mkdir(parents=True)
    (target / "package/closed/module.py").write_text("")
    use(target)
    closed = (target / "package/closed").stat()

    def closes(listed: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def listing(folder: Any) -> Any:
            if os.path.samestat(os.stat(folder), closed):  # checked here: root may list anything
                raise PermissionError(errno.EACCES, "Permission denied", str(folder))
            return listed(folder)

        return listing

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, closes(getattr(os, name)))
    with pytest.raises(PermissionError):
        use(target)


FORBIDDEN = """
import os, sys
from hutch.backends.linux import seccomp
from hutch.errors import BackendUnavailable
from hutch.images.environment import base_interpreter, base_prefix
from hutch.images.installer import confinement, outside_usr, started
seccomp.install(seccomp.build())  # as containers have it: no new namespaces
seen = confinement({}, [sys.argv[1]], outside_usr([base_prefix()]))
argv = [str(base_interpreter()), "-c", f"open({sys.argv[1] + '/ran'!r}, 'w')"]
try:
    with started(argv, {}, 0, seen):
        pass
except BackendUnavailable as exc:
    print(exc)
"""


def test_where_nothing_can_be_confined_nothing_is_installed(target: Path) -> None:
    argv = [sys.executable, "-c", FORBIDDEN, str(target)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE)
    assert "in a confined process only" in done.stdout, done.stderr
    assert not os.listdir(target)


# What works on foreign packages, each for itself, on a machine that allows no new namespaces.
STEPS = """
import os, sys
from pathlib import Path
from hutch.backends.linux import seccomp
from hutch.errors import BackendUnavailable
from hutch.images import git, install, uv, wheels
from hutch.projects import node
step, target, wheel = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
lock = os.open("/dev/null", os.O_RDONLY)

def report(progress):
    pass

steps = {
    "install wheels": lambda: uv.pip_install(
        ["--no-index", "--target", str(target), str(wheel)], target, lock, report,
        shown=[str(wheel)],
    ),
    "install for node": lambda: node.install(
        node.NodeNeeds(b'{"name": "project", "version": "0.0.0"}'), node.NodePlatform(),
        target, lock, report,
    ),
    "compile": lambda: install.compile_modules(target, "/x", lock, report),
    "read a wheel": lambda: wheels.read_wheel(wheel, lock, report),
    "fetch from git": lambda: git.check_out(
        "https://127.0.0.1:9/x", "0" * 40, target / "git", lock, report
    ),
}
if sys.argv[4] == "forbidden":
    seccomp.install(seccomp.build())
try:
    steps[step]()
except BackendUnavailable as exc:
    print(exc)
"""


@pytest.mark.parametrize(
    "step", ["install wheels", "install for node", "compile", "read a wheel", "fetch from git"]
)
def test_no_step_of_an_installation_works_unconfined(
    tmp_path: Path, target: Path, step: str
) -> None:
    programs = {"install for node": "npm", "fetch from git": "git"}
    if step in programs and not shutil.which(programs[step]):
        need(programs[step], f"there is no {programs[step]} here")
    (target / "module.py").write_text("")
    argv = [sys.executable, "-c", STEPS, step, str(target), str(make_wheel(tmp_path, "mine"))]
    env = {**os.environ, "HUTCH_DATA_DIR": str(tmp_path / "data")}
    for where in ("forbidden", "allowed"):
        done = subprocess.run(
            [*argv, where], env=env, capture_output=True, text=True, timeout=PATIENCE
        )
        refused = "in a confined process only" in done.stdout
        assert refused == (where == "forbidden"), done.stdout + done.stderr


NO_IDS = """
import sys
from hutch.backends.namespaces import confined

def fail(*arguments):
    raise OSError("no ids to map")

confined.map_ids = fail
confined.main(*map(int, sys.argv[1:]))
"""


def test_it_is_told_why_user_ids_cannot_be_mapped(
    target: Path, lock: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def boot(module: str, *arguments: int) -> list[str]:
        return [sys.executable, "-c", NO_IDS, *map(str, arguments)]

    monkeypatch.setattr(confine, "boot", boot)
    with pytest.raises(BackendUnavailable, match="no ids to map"):
        run_python("", target, lock)
    os.close(lock)


BUILDER = """
import fcntl, os, sys
from hutch.images.installer import confinement, outside_usr, started
from hutch.images.environment import base_interpreter, base_prefix
code = "import os, time\\nprint('up', flush=True)\\nos.fork()\\ntime.sleep(600)"
lock = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
seen = confinement({}, [sys.argv[1]], outside_usr([base_prefix()]))
with started([str(base_interpreter()), "-c", code], {}, lock, seen) as (process, lines):
    for line in lines:
        print(line, flush=True)
"""


@pytest.mark.parametrize("whom", ["host", "supervisor"])
def test_a_killed_host_leaves_no_installer_behind(tmp_path: Path, target: Path, whom: str) -> None:
    argv = [sys.executable, "-c", BUILDER, str(target), str(tmp_path / "held")]
    # The program inherits the pipe: its end is the end of all who have it.
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as host:
        assert host.stdout
        while host.stdout.readline() not in (b"up\n", b""):
            continue
        (supervisor,) = children(host.pid)
        (program,) = children(supervisor)
        watched = os.pidfd_open(program)
        os.kill(host.pid if whom == "host" else supervisor, signal.SIGKILL)
        assert select.select([watched], [], [], PATIENCE)[0]
        os.close(watched)
        host.wait(PATIENCE)
    shutil.rmtree(target)


def test_an_installer_inherits_no_descriptor_but_the_standard_ones(
    tmp_path: Path, target: Path, lock: int
) -> None:
    code = """
        import os
        found = []
        for fd in range(4096):
            try:
                os.fstat(fd)
                found.append(fd)
            except OSError:
                pass
        print(found)
    """
    with (tmp_path / "mine").open("w") as mine:
        os.set_inheritable(mine.fileno(), True)
        assert run_python(textwrap.dedent(code), target, lock) == ["[0, 1, 2]"]
    os.close(lock)


def test_the_lock_of_a_killed_host_is_free_when_its_installer_is_gone(
    tmp_path: Path, target: Path
) -> None:
    argv = [sys.executable, "-c", BUILDER, str(target), str(tmp_path / "held")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as host:
        assert host.stdout
        while host.stdout.readline() not in (b"up\n", b""):
            continue
        (supervisor,) = children(host.pid)
        made = groups_of(supervisor)
        watched = [os.pidfd_open(pid) for pid in children(supervisor)]
        with (tmp_path / "held").open() as held:
            with pytest.raises(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            host.kill()
            fcntl.flock(held, fcntl.LOCK_EX)
        assert select.select(watched, [], [], 0)[0] == watched
        assert not made & groups()
        for fd in watched:
            os.close(fd)


SOURCE = Path(__file__).parent.parent.parent / "src"
PYTHON = "/usr/bin/python3"  # one that everybody may use, wherever the tests' own lives
ORDINARY = """
import sys
sys.path.insert(0, sys.argv[1])
from hutch.images import store, uv
from hutch.images.environment import Image
uv._find_uv = lambda: sys.argv[1] + "/uv"
print(store.build(Image.python([sys.argv[2]])).folder)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that every user may enter. Of tmp_path, pytest closes the parents at any time."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes an ordinary user")
def test_an_ordinary_user_can_build_an_image(open_folder: Path) -> None:
    if not os.access(PYTHON, os.X_OK):
        need("namespaces", f"no {PYTHON} that an ordinary user could run")
    code, data = open_folder / "src", open_folder / "data"
    shutil.copytree(SOURCE, code, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(Path(packaging.__file__).parent, code / "packaging")
    shutil.copy(uv.find_uv_bin(), code / "uv")
    data.mkdir()
    os.chown(data, 65534, 65534)
    wheel = make_wheel(open_folder, "mine")
    env = {**os.environ, "HOME": str(data), "HUTCH_DATA_DIR": str(data)}
    env.pop("UV_CACHE_DIR", None)
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    argv = [*as_nobody, PYTHON, "-c", ORDINARY, str(code), str(wheel)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, cwd="/")
    if "cannot get packages" in done.stderr:
        need("packages", done.stderr)
    assert done.returncode == 0, done.stderr
    assert list(Path(done.stdout.strip()).rglob("mine.py"))


# Run where mounts are its own: a hostile program, and then a real build, on an overlay.
OVERLAY = """
import json, os, subprocess, sys
from pathlib import Path
from hutch.images import store
from hutch.images.environment import Image, base_interpreter, base_prefix
from hutch.images.installer import confinement, outside_usr, started
top = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "hutch-test", top], check=True)
for name in ("lower", "upper", "work", "merged"):
    (top / name).mkdir()
options = f"lowerdir={top}/lower,upperdir={top}/upper,workdir={top}/work"
subprocess.run(["mount", "-t", "overlay", "-o", options, "hutch-test", top / "merged"], check=True)

os.environ["HUTCH_DATA_DIR"] = str(top / "merged/data")
target, cache, key = (top / "merged" / name for name in ("target", "cache", "key"))
target.mkdir()
cache.mkdir()
(cache / "others").write_text("")
key.write_text("secret")
key.chmod(0o600)
code = f'''
import os
os.mkdir({str(target / "inner")!r})
open({str(target / "inner/file")!r}, "w")
try:
    os.chmod({str(target / "inner/file")!r}, 0o4755)
except PermissionError:
    pass
os.symlink("/etc/passwd", {str(target / "link")!r})
open({str(cache / "mine")!r}, "w")
print(open({str(key)!r}).read(), os.listdir({str(cache)!r}))
'''
seen = confinement({}, [target, cache], [*outside_usr([base_prefix()]), key], [target])
argv = [str(base_interpreter()), "-I", "-S", "-c", code]
with started(argv, {}, os.open(top / "lock", os.O_RDWR | os.O_CREAT), seen) as (process, lines):
    said = [line for line in lines if line]
inside = [target, *target.rglob("*")]
probe = {
    "said": said,
    "owners": [path.lstat().st_uid for path in inside],
    "mode": oct((target / "inner/file").stat().st_mode),
    "others": [os.stat(path).st_uid for path in ("/etc/passwd", cache / "others")],
}
built = [*store.build(Image.python([sys.argv[2]])).folder.rglob("*")]
found = {"owners": [*{path.lstat().st_uid for path in built}], "names": [p.name for p in built]}
print(json.dumps([probe, found]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_root_can_install_on_an_overlay_whose_owners_cannot_be_mapped(tmp_path: Path) -> None:
    wheel, top = make_wheel(tmp_path, "mine"), tmp_path / "top"
    top.mkdir()
    env = {name: value for name, value in os.environ.items() if name != "UV_CACHE_DIR"}
    argv = ["unshare", "--mount", sys.executable, "-c", OVERLAY, str(top), str(wheel)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    if "mount: " in done.stderr:
        need("namespaces", done.stderr)
    if "cannot get packages" in done.stderr:
        need("packages", done.stderr)
    assert done.returncode == 0, done.stderr
    probe, built = json.loads(done.stdout)
    assert probe["said"] == ["secret ['mine']"]  # of the cache, it has a part of its own
    assert {*probe["owners"], *probe["others"]} == {0} and probe["mode"] == "0o100644"
    assert built["owners"] == [0] and "mine.py" in built["names"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_disk_without_room_for_more_files_is_not_called_a_broken_wheel(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "mine", files={f"mine_{n}/x.txt": "" for n in range(100)})
    top, target = tmp_path / "top", tmp_path / "top/target"
    top.mkdir()
    code = textwrap.dedent("""
        import os, subprocess, sys
        from pathlib import Path
        from hutch.errors import NoSpace
        from hutch.images.uv import pip_install
        top, target, wheel = map(Path, sys.argv[1:])
        options = "size=1g,nr_inodes=100"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "hutch-test", top], check=True)
        target.mkdir()
        os.environ["HUTCH_DATA_DIR"] = str(top / "data")
        lock = os.open(top / "lock", os.O_RDWR | os.O_CREAT)
        words = ["--no-index", "--target", str(target), str(wheel)]
        try:
            pip_install(words, target, lock, lambda progress: None, shown=[str(wheel)])
        except NoSpace as exc:
            print(exc)
    """)
    env = {name: value for name, value in os.environ.items() if name != "UV_CACHE_DIR"}
    argv = ["unshare", "--mount", sys.executable, "-c", code, str(top), str(target), str(wheel)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    if "mount: " in done.stderr:
        need("namespaces", done.stderr)
    assert "no room for more files" in done.stdout, done.stderr


def test_an_installer_does_not_write_to_a_cache_that_others_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path / "data"))
    assert cache_for("uv", None) == str(tmp_path / "data/cache/uv")
    assert cache_for("uv", str(tmp_path / "chosen")) == str(tmp_path / "chosen")


def unpack(
    wheel: Path, target: Path, lock: int, monkeypatch: pytest.MonkeyPatch, bounds: Bounds
) -> None:
    monkeypatch.delenv("UV_CACHE_DIR", raising=False)
    monkeypatch.setattr(images_uv, "BOUNDS", bounds)
    words = ["--no-index", "--no-deps", "--target", str(target), str(wheel)]
    try:
        pip_install(words, target, lock, lambda progress: None, shown=[str(wheel)])
    finally:
        os.close(lock)


def make_bomb(folder: Path, size: int, files: int = 1) -> Path:
    """A small wheel that unpacks to much, and whose version no installer takes."""
    good = make_wheel(folder, "mine")
    wheel = (folder / "bomb").joinpath(good.name)
    wheel.parent.mkdir()
    with (
        zipfile.ZipFile(good) as source,
        zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in source.namelist():
            archive.writestr(
                name, source.read(name).replace(b"Wheel-Version: 1", b"Wheel-Version: 9")
            )
        for n in range(files):
            archive.writestr(f"mine_{n}", bytes(size // files))
    return wheel


@pytest.mark.parametrize(
    ("size", "files", "bounds", "error", "says"),
    [
        (64 << 20, 4, Bounds(disk_bytes=16 << 20), NoSpace, "take more than 16 MiB"),
        (64 << 20, 1, Bounds(file_bytes=16 << 20), InvalidRequest, "a file that is larger than"),
        (2000, 2000, Bounds(), InvalidRequest, "more than 1000 files"),
    ],
)
def test_a_wheel_that_unpacks_to_more_than_the_bounds_is_stopped(
    tmp_path: Path, target: Path, lock: int, monkeypatch: pytest.MonkeyPatch,
    size: int, files: int, bounds: Bounds, error: type[Exception], says: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(foreign, "MOST", 1000)
    with pytest.raises(error, match=says) as raised:
        unpack(make_bomb(tmp_path, size, files), target, lock, monkeypatch, bounds)
    assert "\n" not in str(raised.value)


def test_what_is_unpacked_in_the_cache_counts_before_it_is_installed(
    tmp_path: Path, target: Path, lock: int
) -> None:
    cache = tmp_path / "cache"
    (cache / "old").mkdir(parents=True)
    (cache / "old/file").write_bytes(bytes(8 << 20))
    code = f"""
        import os, time
        os.mkdir({str(cache / "new")!r})
        for n in range(8):
            open({str(cache / "new")!r} + f"/{{n}}", "wb").write(bytes(1 << 20))
        time.sleep(600)
    """
    bounds = Bounds(disk_bytes=4 << 20)
    seen = confinement(
        {}, [target, cache], outside_usr([base_prefix()]), [target], bounds, [f"{cache}/*"]
    )
    argv = [str(base_interpreter()), "-I", "-S", "-c"]
    with started([*argv, "print('small')"], {}, lock, seen) as (_, lines):
        assert [*filter(None, lines)] == ["small"]  # what was there does not count
    with (
        pytest.raises(NoSpace, match="take more than 4 MiB"),
        started([*argv, textwrap.dedent(code)], {}, lock, seen) as (_, lines),
    ):
        assert not [*filter(None, lines)]
    os.close(lock)


def test_what_a_stopped_installer_was_unpacking_is_removed(
    tmp_path: Path, target: Path, lock: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path / "data"))
    cache, outside = Path(cache_for("uv", None)), tmp_path / "outside/.tmp-theirs"
    outside.mkdir(parents=True)
    (cache / ".tmp-left/inner").mkdir(parents=True)
    (cache / ".tmp-link").symlink_to(outside)
    (cache / "hutch-installer").symlink_to(outside.parent)
    bomb = make_bomb(tmp_path, 64 << 20)
    with locked(cache, fcntl.LOCK_SH), pytest.raises(InvalidRequest):
        unpack(bomb, target, os.dup(lock), monkeypatch, Bounds(file_bytes=16 << 20))
    assert (cache / ".tmp-left").exists()  # another process may be writing it
    with pytest.raises(InvalidRequest):
        unpack(bomb, target, lock, monkeypatch, Bounds(file_bytes=16 << 20))
    assert not [*cache.glob(".tmp*")] and outside.exists()
