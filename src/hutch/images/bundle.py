"""The runtime bundle: a Python that runs in any image, even one that holds only busybox.

The guest is Python, and an image may have no Python, no glibc, nothing. So the interpreter that
runs Hutch is laid out once in a folder, with all it needs, and mounted read-only in the box:

    aliases/python               a link to the image's /usr/bin/python3; last on PATH
    bin/python3                  the interpreter
    lib/ld-linux-x86-64.so.2     the loader it asks for (its PT_INTERP), whatever its name here
    lib/*.so*                    every shared library that it or an extension module needs
    lib/python3.11/              the standard library, compiled; lib-dynload/ for extension modules
    lib/python3.11/hutch         a link to ../../site/hutch
    site/hutch/                  hutch.guest, hutch.wire and hutch.tar, and nothing else of ours
    methods                      what the guest's dataclasses consist of, compiled
    kernel/                      hutch_kernel and cloudpickle, for the image's own python3 to import
    NAME                         a file that whoever builds it gives along

How sys.path comes out right, with no help: the loader hands over `/.hutch/bin/python3` as argv[0];
CPython looks upwards from there for `lib/python3.11/os.py` and `lib/python3.11/lib-dynload`, finds
ours, and takes that for its prefix. With -I and -S nothing else is added: no variable, no current
folder, no site-packages. That is also why hutch is reached through the standard library's folder.
It lives in `site/` so that an image's own Python can be pointed at it without meeting our os.py.

The box is hostile, and so is its image: nothing here is loaded from a path that either can write.
"""

from __future__ import annotations

import fcntl
import hashlib
import marshal
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, find_spec, source_hash
from mmap import ACCESS_READ, mmap
from pathlib import Path

from hutch.errors import BackendUnavailable

HUTCH = Path(__file__).parent.parent
OURS = ("guest", "tar.py", "wire")
PICKLER = "cloudpickle"
METHODS = "methods"
BUILDING = ".building-"

# A guest has no use for these, and they are three quarters of the standard library.
UNUSED = re.compile(
    r"__pycache__|config-.*|dist-packages|distutils|ensurepip|idlelib|lib2to3|lib-dynload|"
    r"pydoc_data|site-packages|sqlite3|tests?|tkinter|turtledemo|unittest"
)

UNUSED_MODULES = ("ssl.py",)  # asyncio tries it three times, and it fails each time: see below

# Nor for these; most would bring a large library along (OpenSSL alone is 5 MiB). Without _hashlib,
# hashlib falls back on the digests that CPython carries itself.
UNUSED_EXTENSIONS = re.compile(
    r"(_crypt|_ctypes_test|_curses.*|_g?dbm|_hashlib|_sqlite3|_ssl|_test.*|_tkinter|_?xx.*|"
    r"nis|ossaudiodev|readline)\..*"
)

# glibc opens these by name at run time, so no file says that it needs them: libgcc_s when a thread
# is ended (without it, a daemon thread at exit aborts the process), libnss_files when a user or a
# host is looked up (until glibc 2.34, which has it built in).
OPENED_BY_NAME = "libgcc_s.so.1 libnss_files.so.2"

# The loader obeys this file of the image, and no option stops it.
PRELOAD = b"/etc/ld.so.preload\0"

PT_INTERP = 3


@dataclass(frozen=True)
class Bundle:
    """A finished bundle. `path` is the folder to mount, read-only, in the box."""

    path: Path

    def command(self, module: str, *args: str, at: str = "/.hutch") -> list[str]:
        """The argv that runs `python -m module args...` in a box where we are mounted at `at`.

        It needs no variable, no /proc, no /dev and no file outside `at`.
        """
        loader = _loader(self.path / "bin/python3").name
        start = [f"{at}/lib/{loader}", "--library-path", f"{at}/lib", f"{at}/bin/python3"]
        # UTF-8 whatever the image's locale is: file names come from the box's user, not from it.
        return [*start, "-I", "-S", "-X", "utf8", "-m", module, *args]


def build(into: Path, extra: Mapping[str, bytes] | None = None) -> Bundle:
    """The bundle of the running interpreter and the guest, laid out under `into`.

    `extra` are files to go along, by name; they belong to what decides its name.

    At once if it is already there. Its name tells its content, so a bundle never changes and the
    boxes that use it may go on; a new interpreter or a new guest gets a new one. Many processes
    may call this together: one builds, the others wait for it. However a build ends, there is
    either the whole bundle or none. Raises BackendUnavailable if this Python cannot be bundled.
    """
    # In a venv, the Python it was made from: that one has the standard library beside it.
    interpreter = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    extra = extra or {}
    finished = into / _digest(interpreter, _loader(interpreter), extra)
    if not finished.is_dir():
        into.mkdir(parents=True, exist_ok=True)
        with _alone(into):
            if not finished.is_dir():
                _build(interpreter, finished, extra)
    return Bundle(finished)


def _paths(folder: Path) -> Iterator[Path]:
    """All but links: `chmod` and `open` would follow them, and one leads to the host's python3."""
    return (path for path in [folder, *folder.rglob("*")] if not path.is_symlink())


def _build(interpreter: Path, finished: Path, extra: Mapping[str, bytes]) -> None:
    folder = Path(tempfile.mkdtemp(prefix=BUILDING, dir=finished.parent))
    try:
        _lay_out(interpreter, folder)
        for name, content in extra.items():
            (folder / name).write_bytes(content)
        for path in _paths(folder):
            # Boxes read it under other uids, whatever our umask is.
            path.chmod(0o755 if path.is_dir() or path.parent.name in ("bin", "lib") else 0o644)
        _write_methods(Bundle(folder))
        for path in _paths(folder):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # or a power cut could keep the name and lose what is in it
            os.close(descriptor)
        folder.rename(finished)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _alone(into: Path) -> Iterator[None]:
    """Hold the lock on `into`, which a dead process lets go of: what lies half-built is stale."""
    with open(into / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in into.glob(BUILDING + "*"):
            shutil.rmtree(stale)
        yield


def _digest(interpreter: Path, loader: Path, extra: Mapping[str, bytes]) -> str:
    """All that decides what goes in; this file too, for it decides the layout."""
    digest = hashlib.sha256(f"{os.uname().machine} {sys.version}".encode())
    for binary in (interpreter, loader):  # the loader changes whenever libc does
        stat = binary.stat()
        digest.update(f"\0{binary}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    ours = {name: source.read_bytes() for name, source in _our_files()}
    for name, content in [("", Path(__file__).read_bytes()), *ours.items(), *sorted(extra.items())]:
        digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:32]


def _our_files() -> list[tuple[str, Path]]:
    """What is not the interpreter's: where in the bundle, and the file."""
    pickler = find_spec(PICKLER)
    if not pickler or not pickler.origin:
        raise BackendUnavailable(f"{PICKLER} is not installed: pip install {PICKLER}")
    parts = {f"site/hutch/{part}": HUTCH / part for part in OURS}
    parts["kernel/hutch_kernel"] = HUTCH / "kernel"
    parts[f"kernel/{PICKLER}"] = Path(pickler.origin).parent
    files = [(name, part) for name, part in parts.items() if part.is_file()]
    files += [
        (f"{name}/{path.relative_to(folder)}", path)
        for name, folder in parts.items()
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    ]
    return sorted(files)


def _lay_out(interpreter: Path, folder: Path) -> None:
    stdlib = Path(sysconfig.get_path("stdlib"))
    extensions = Path(sys.base_exec_prefix, sys.platlibdir, stdlib.name, "lib-dynload")
    home = folder / sys.platlibdir / stdlib.name  # where getpath looks; "lib64" on some systems
    for new in ("aliases", "bin", "lib", "site/hutch", home / "lib-dynload"):
        (folder / new).mkdir(parents=True)

    for name, source in _our_files():
        _copy_file(source, folder / name)
    init = folder / "site/hutch/__init__.py"  # empty: the real one is a door for the host's users
    init.touch()
    _compile(init, init)
    (home / "hutch").symlink_to("../../site/hutch")
    (folder / "aliases/python").symlink_to("/usr/bin/python3")  # the image's
    for source in _stdlib_files(stdlib):
        _copy_file(source, home / source.relative_to(stdlib))

    loader = _loader(interpreter)
    (folder / "bin/python3").write_bytes(_trimmed(interpreter.read_bytes()))
    libraries = _needed(loader, interpreter)
    if libraries is None:
        raise BackendUnavailable(f"{interpreter} needs a library that is not there; see ldd")
    for source in sorted(extensions.glob("*.so")):
        needed = None if UNUSED_EXTENSIONS.fullmatch(source.name) else _needed(loader, source)
        if needed is not None:  # what lacks a library could not be imported on the host either
            libraries |= needed
            (home / "lib-dynload" / source.name).write_bytes(_trimmed(source.read_bytes()))
    for name, source in (libraries | {loader.name: loader}).items():
        content = _trimmed(source.read_bytes())
        if name == loader.name:
            content = content.replace(PRELOAD, bytes(len(PRELOAD)))
        (folder / "lib" / name).write_bytes(content)


def _write_methods(bundle: Bundle) -> None:
    """Have the guest's dataclasses compiled by the bundle itself: see guest/quick.py."""
    argv = bundle.command("hutch.guest.quick", at=str(bundle.path))
    try:
        ran = subprocess.run(argv, env={}, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        said = getattr(exc, "stderr", b"").decode(errors="replace").strip()[-500:]
        where = bundle.path.parent
        raise BackendUnavailable(f"Python does not run from {where}: {said or exc}") from exc
    (bundle.path / METHODS).write_bytes(ran.stdout)
    (bundle.path / METHODS).chmod(0o644)


def _stdlib_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not UNUSED.fullmatch(path.name):
            yield from _stdlib_files(path)
        elif path.suffix == ".py" and path.name not in UNUSED_MODULES and path.is_file():
            yield path


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())
    if source.suffix == ".py":
        _compile(source, target)


def _compile(source: Path, target: Path) -> None:
    """Put byte code beside `target` that is used without a look at the source."""
    # What the host has cached, if it has: 0.6 s for the whole bundle instead of 1.7 s.
    code = SourceFileLoader(source.stem, str(source)).get_code(source.stem)
    # PEP 552: 1 stands for a hash of the source in place of its date, not to be checked.
    head = MAGIC_NUMBER + struct.pack("<I", 1) + source_hash(target.read_bytes())
    cached = target.parent / "__pycache__" / f"{target.stem}.{sys.implementation.cache_tag}.pyc"
    cached.parent.mkdir(exist_ok=True)
    cached.write_bytes(head + marshal.dumps(code))


def _needed(loader: Path, binary: Path) -> dict[str, Path] | None:
    """Name and file of all libraries that `binary` loads; None if one is missing.

    Asked of the loader itself, which alone knows all the rules. It runs nothing of the binary.
    """
    argv, env = [str(loader), "--list", str(binary)], os.environ | {"LD_PRELOAD": OPENED_BY_NAME}
    ran = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    if ran.returncode or "not found" in ran.stdout:
        return None
    found = re.findall(r"^\s+(?:(\S+) => )?(/\S+) \(0x", ran.stdout, re.MULTILINE)
    return {Path(name or file).name: Path(file) for name, file in found}


def _segments(elf: bytes | mmap) -> list[tuple[int, int, int]]:
    """Kind, offset and size of each part of the file that is used at run time."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise BackendUnavailable("only a 64-bit little-endian Linux Python can be bundled")
    (table,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    return [struct.unpack_from("<I4xQ16xQ", elf, table + n * size) for n in range(count)]


def _loader(binary: Path) -> Path:
    with open(binary, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as elf:
        for kind, offset, size in _segments(elf):
            if kind == PT_INTERP:
                return Path(os.fsdecode(elf[offset : offset + size].rstrip(b"\0")))
    raise BackendUnavailable("a statically linked Python cannot be bundled; use another one")


def _trimmed(elf: bytes) -> bytes:
    """The file without symbols and debug information: 6 MB instead of 23 if built from source."""
    end = max(offset + size for _, offset, size in _segments(elf))
    # The table of sections is behind the end: say that there is none (e_shoff, e_shnum, e_shstrndx)
    return elf[:40] + bytes(8) + elf[48:60] + bytes(4) + elf[64:end]
