"""The bundle in a root that holds nothing but busybox: no Python, no libc, no /etc."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import hutch.images.bundle
from hutch.images.bundle import Bundle, build

MiB = 1024 * 1024
BUSYBOX = Path("/bin/busybox")
DEBIAN = Path("/usr/bin/python3")
SOURCES = Path(hutch.images.bundle.__file__).parents[2]
BUILD = "import pathlib, sys; from hutch.images import bundle; p = pathlib.Path(sys.argv[1])"
BUILDER = f"{BUILD}; print(bundle.build(p).path)"

# The mounts are in a namespace of their own, which ends with the program.
ENTER = """
mount --bind "$1" "$2/.hutch" && mount -o remount,bind,ro "$2/.hutch" || exit 99
mount -t proc proc "$2/proc" || exit 99
root=$2; shift 2; exec chroot --userspec=65534:65534 "$root" "$@"
"""

MISSING = (
    "needs root, to mount and to chroot"
    if os.getuid()
    else "needs busybox-static: apt-get install it"
    if not BUSYBOX.exists()
    else ""
)
in_a_root = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return build(tmp_path_factory.mktemp("bundles"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for name in ("bin", "proc", "dev", "tmp", ".hutch"):
        (root / name).mkdir(parents=True)
    shutil.copy(BUSYBOX, root / "bin/busybox")
    return root


@pytest.fixture(autouse=True)
def nothing_is_left_mounted() -> Iterator[None]:
    yield
    assert "/.hutch " not in Path("/proc/self/mountinfo").read_text()


def enter(
    root: Path, bundle: Bundle, argv: list[str], *, given: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `argv` as nobody in `root`, with the bundle mounted and no variable but `env`."""
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "sh"]
    variables = [f"{name}={value}" for name, value in env.items()]
    return subprocess.run(
        [*unshare, bundle.path, root, "/bin/busybox", "env", "-i", *variables, *argv],
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def python(root: Path, bundle: Bundle, code: str, **env: str) -> str:
    """What `code` prints there; it must end well and say nothing on stderr."""
    *start, _, _ = bundle.command("a_module")
    ran = enter(root, bundle, [*start, "-c", textwrap.dedent(code)], **env)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def builder(into: Path, *, by: str | Path = sys.executable, code: str = BUILDER) -> list[str]:
    pickler = find_spec("cloudpickle")  # a package that goes into a bundle
    assert pickler and pickler.origin
    packages = Path(pickler.origin).parents[1]
    return ["env", f"PYTHONPATH={SOURCES}:{packages}", str(by), "-c", code, str(into)]


@in_a_root
def test_a_module_runs_where_there_is_only_busybox(root: Path, bundle: Bundle) -> None:
    ran = enter(root, bundle, bundle.command("json.tool", "--compact"), given='{"a": [1, 2]}')
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, '{"a":[1,2]}\n', "")


@in_a_root
def test_the_path_has_nothing_outside_the_bundle(root: Path, bundle: Bundle) -> None:
    out = python(root, bundle, "import sys; print(*sys.path, sys.prefix, sys.exec_prefix)")
    assert len(out.split()) == 5
    assert all(entry == "/.hutch" or entry.startswith("/.hutch/") for entry in out.split())


@in_a_root
def test_what_a_guest_needs_can_be_imported(root: Path, bundle: Bundle) -> None:
    code = """
        import asyncio, array, ctypes, fcntl, hashlib, json, pty, resource, select, signal, socket
        import struct, subprocess, tarfile, tempfile, termios, zlib
        ctypes.CDLL(None).getpid, ctypes.CDLL("libc.so.6").getpid
        a, b = socket.socketpair()
        asyncio.run(asyncio.sleep(0))
        print(hashlib.sha256(b"").hexdigest()[:8])
    """
    assert python(root, bundle, code) == "e3b0c442\n"


@in_a_root
def test_the_wire_can_be_imported_and_the_rest_of_hutch_is_not_there(
    root: Path, bundle: Bundle
) -> None:
    code = """
        import hutch.wire, importlib.util, sys
        print(hutch.wire.__file__.startswith(sys.prefix), importlib.util.find_spec("hutch.images"))
    """
    assert python(root, bundle, code) == "True None\n"


@in_a_root
def test_every_extension_module_finds_its_libraries(root: Path, bundle: Bundle) -> None:
    code = """
        import importlib, os, sys
        names = {name.split(".")[0] for name in os.listdir(sys.path[-1])}
        for name in names: importlib.import_module(name)
        files = {line.split()[5] for line in open("/proc/self/maps") if "/" in line}
        print(len(names) > 20, [file for file in files if not file.startswith("/.hutch/")])
    """
    assert python(root, bundle, code) == "True []\n"


@in_a_root
def test_a_hostile_image_cannot_put_its_code_into_our_interpreter(
    root: Path, bundle: Bundle
) -> None:
    libraries = [path.name for path in (bundle.path / "lib").iterdir() if path.is_file()]
    triplet = sysconfig.get_config_var("MULTIARCH") or "lib"
    original = f"{sys.base_prefix}/lib".lstrip("/")
    for folder in ("lib", "lib64", "usr/lib", f"lib/{triplet}", f"usr/lib/{triplet}", original):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for library in libraries:
            (root / folder / library).write_text("hostile")
    for folder in ("", f"usr/lib/{Path(os.__file__).parent.name}", "tmp"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for module in ("os.py", "json.py", "encodings.py", "sitecustomize.py", "pyvenv.cfg"):
            (root / folder / module).write_text("raise SystemExit('hostile')")
    (root / "etc").mkdir()
    (root / "etc/ld.so.preload").write_text("/lib/libc.so.6\n")
    (root / "etc/ld.so.cache").write_text("hostile")
    code = "import json, os, sys; print(json.__file__, os.__file__)"
    out = python(root, bundle, code, PYTHONPATH="/tmp", PYTHONHOME="/usr", LC_ALL="hostile")
    assert all(file.startswith("/.hutch/") for file in out.split())


@in_a_root
def test_names_of_files_are_utf_8_in_an_image_that_is_not(root: Path, bundle: Bundle) -> None:
    (root / "tmp/é").touch()
    (root / "usr/lib/locale").mkdir(parents=True)
    locale = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", str(root / "usr/lib/locale/en_US")]
    if not shutil.which("localedef") or subprocess.run(locale, check=False).returncode:
        pytest.skip("needs the sources of a locale (apt-get install locales)")
    code = "import locale, os; print(locale.setlocale(0), ascii(os.listdir('/tmp')))"
    assert python(root, bundle, code, LC_ALL="en_US") == "en_US ['\\xe9']\n"


@in_a_root
def test_a_thread_can_be_ended(root: Path, bundle: Bundle) -> None:
    # As CPython ends daemon threads at exit. glibc opens libgcc_s for it, and aborts without.
    code = """
        import ctypes, os, threading
        end = ctypes.CDLL(None).pthread_exit
        threading.Thread(target=end, args=(None,), daemon=True).start()
        while len(os.listdir("/proc/self/task")) > 1: pass
        print("went on")
    """
    assert python(root, bundle, code) == "went on\n"


@in_a_root
def test_nothing_is_compiled_at_the_start(root: Path, bundle: Bundle) -> None:
    *start, _, _ = bundle.command("a_module")
    ran = enter(root, bundle, [*start, "-v", "-c", "import asyncio, ctypes, hutch.wire"])
    loaded = [line for line in ran.stderr.splitlines() if line.startswith("# code object from")]
    assert len(loaded) > 50
    assert [line for line in loaded if not line.endswith(".pyc'")] == []


@in_a_root
def test_a_traceback_shows_the_source_and_not_where_the_host_keeps_it(
    root: Path, bundle: Bundle
) -> None:
    code = "import json, traceback\ntry: json.loads('{')\nexcept ValueError: traceback.print_exc()"
    *start, _, _ = bundle.command("a_module")
    ran = enter(root, bundle, [*start, "-c", code])
    assert 'File "/.hutch/lib/python' in ran.stderr
    assert "return _default_decoder.decode(s)" in ran.stderr
    assert sys.base_prefix not in ran.stderr


@in_a_root
def test_nothing_is_compiled_when_it_starts(root: Path, bundle: Bundle) -> None:
    code = (
        "import importlib._bootstrap_external as loading\n"
        "loading.SourceLoader.source_to_code = None\n"
        "import asyncio, hutch.guest.main\n"
        "print('started')"
    )
    assert python(root, bundle, code).strip() == "started"


@in_a_root
def test_a_guest_compiles_no_dataclass_when_it_starts(root: Path, bundle: Bundle) -> None:
    code = """
        import sys
        compiled = []
        sys.addaudithook(lambda what, args: compiled.append(args) if what == "compile" else None)
        import hutch.guest.contained
        print([text for text, _ in compiled if b"__create_fn__" in (text or b"")])
    """
    assert python(root, bundle, code) == "[]\n"


def test_it_has_what_a_kernel_of_the_images_own_python_imports(bundle: Bundle) -> None:
    code = "import cloudpickle, hutch_kernel.main; print(cloudpickle.__file__)"
    argv = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = sys.argv[1:]; {code}"]
    ran = subprocess.run(
        [*argv, bundle.path / "kernel"], capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith(str(bundle.path / "kernel"))


def test_files_can_be_given_along_and_belong_to_its_name(tmp_path: Path) -> None:
    plain, one = build(tmp_path), build(tmp_path, {"filter": b"one"})
    other = build(tmp_path, {"filter": b"other"})
    assert len({plain.path, one.path, other.path}) == 3
    assert build(tmp_path, {"filter": b"one"}) == one
    assert (one.path / "filter").read_bytes() == b"one"
    assert (one.path / "filter").stat().st_mode & 0o777 == 0o644


def test_it_is_small(bundle: Bundle) -> None:
    files = [path for path in bundle.path.rglob("*") if path.is_file()]
    assert 5 * MiB < sum(path.stat().st_size for path in files) < 40 * MiB


def test_a_second_build_makes_nothing(tmp_path: Path) -> None:
    first = build(tmp_path)
    before = first.path.stat()
    assert build(tmp_path) == first
    assert first.path.stat() == before


def test_builds_at_the_same_time_give_one_folder(tmp_path: Path) -> None:
    running = [
        subprocess.Popen(builder(tmp_path / "b"), stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    paths = {process.communicate(timeout=60)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0, 0]
    assert {".lock", *(Path(path).name for path in paths)} == set(os.listdir(tmp_path / "b"))
    assert len(paths) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_build_leaves_nothing_that_looks_finished(
    tmp_path: Path, how: signal.Signals
) -> None:
    # At the worst moment: all is laid out, only the new name is missing.
    die = f"pathlib.Path.rename = lambda *_: os.kill(os.getpid(), {int(how)})"
    code = f"import os, pathlib; {die}; {BUILDER}"
    died = subprocess.run(builder(tmp_path, code=code), capture_output=True, check=False)
    assert died.returncode == -how
    left = set(os.listdir(tmp_path)) - {".lock"}
    assert all(name.startswith(".building-") for name in left)
    assert len(left) == (1 if how is signal.SIGKILL else 0)  # who can still tidy up, does

    finished = build(tmp_path).path.name
    assert set(os.listdir(tmp_path)) == {".lock", finished}


def test_a_new_guest_gets_a_new_bundle_and_the_old_one_stays(tmp_path: Path) -> None:
    sources = tmp_path / "src"
    shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
    argv = [sys.executable, "-c", BUILDER, str(tmp_path / "b")]
    env = {**os.environ, "PYTHONPATH": str(sources)}
    old = subprocess.check_output(argv, env=env, text=True).strip()
    (sources / "hutch/guest").mkdir(exist_ok=True)
    (sources / "hutch/guest/brand_new.py").write_text("print('new')")
    new = subprocess.check_output(argv, env=env, text=True).strip()
    assert old != new
    assert Path(old, "site/hutch/__init__.py").exists()
    assert Path(new, "site/hutch/guest/brand_new.py").exists()


@in_a_root
def test_others_can_read_what_a_careful_umask_made(root: Path, tmp_path: Path) -> None:
    code = f"import os; os.umask(0o077); {BUILDER}"
    path = subprocess.check_output(builder(tmp_path / "b", code=code), text=True).strip()
    assert python(root, Bundle(Path(path)), "import json, os; print(os.getuid())") == "65534\n"


def test_in_a_venv_the_interpreter_below_it_is_bundled(tmp_path: Path) -> None:
    venv = [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")]
    subprocess.run(venv, check=True)
    argv = builder(tmp_path / "b", by=tmp_path / "venv/bin/python")
    path = subprocess.check_output(argv, text=True).strip()
    assert Path(path).name == build(tmp_path / "c").path.name
    assert any(Path(path).glob("lib*/python3*/lib-dynload/*.so"))


@in_a_root
@pytest.mark.skipif(not DEBIAN.exists(), reason="needs the system's own /usr/bin/python3")
def test_the_python_of_the_system_can_be_bundled(root: Path, tmp_path: Path) -> None:
    version = subprocess.check_output(
        [DEBIAN, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True
    ).strip()
    if tuple(map(int, version.split("."))) < (3, 11):
        pytest.skip(f"{DEBIAN} is {version}, and Hutch needs 3.11")
    path = subprocess.check_output(builder(tmp_path / "b", by=DEBIAN), text=True).strip()
    code = "import sys, asyncio, json, ctypes, socket; print(sys.path[1], sys.version.split()[0])"
    where, release = python(root, Bundle(Path(path)), code).split()
    assert (where, release[: len(version)]) == (f"/.hutch/lib/python{version}", version)


def test_building_a_bundle_leaves_the_python_of_this_machine_as_it_is(tmp_path: Path) -> None:
    """A bundle has a link to the image's /usr/bin/python3, which exists here too."""
    before = os.stat(DEBIAN)
    made = Bundle(Path(subprocess.check_output(builder(tmp_path / "b"), text=True).strip()))
    assert (made.path / "aliases/python").is_symlink()
    after = os.stat(DEBIAN)
    assert (after.st_mode, after.st_ctime_ns) == (before.st_mode, before.st_ctime_ns)
