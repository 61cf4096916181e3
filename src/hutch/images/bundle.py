"""The runtime bundle: a Python that runs in any image, even one with nothing but busybox.

The guest is written in Python, and an image may have neither Python nor glibc. So the interpreter
that runs Hutch is copied once to a folder, with everything that it needs, and that folder is
mounted read-only in the box:

    aliases/python               a link to the image's /usr/bin/python3; last on PATH
    bin/python3                  the interpreter
    lib/ld-linux-x86-64.so.2     its dynamic loader (PT_INTERP); the name depends on the machine
    lib/*.so*                    every shared library that it or an extension module needs
    lib/python3.11/              the standard library, compiled; lib-dynload/ for extension modules
    lib/python3.11/hutch         a link to ../../site/hutch
    site/hutch/                  hutch.guest, hutch.wire and hutch.tar, and nothing else of hutch
    methods                      the generated methods of the guest's dataclasses, compiled
    kernel/                      hutch_kernel and cloudpickle, for the image's own python3 to import
    NAME                         an extra file, passed to `build`

sys.path is right without any setting: the loader passes `/.hutch/bin/python3` as argv[0], and
CPython searches upwards from there for `lib/python3.11/os.py` and `lib/python3.11/lib-dynload`. It
finds those of the bundle, and takes the bundle as its prefix. With -I and -S, nothing else is
added: no variables, no current directory, no site-packages. So hutch is found through a link in the
folder of the standard library. It is in `site/` so that the image's own Python can import it
without also finding the os.py of the bundle.

Neither the box nor its image is trusted: nothing is loaded from a path that either can write.
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

# The guest does not use these, and they are three quarters of the standard library.
UNUSED = re.compile(
    r"__pycache__|config-.*|dist-packages|distutils|ensurepip|idlelib|lib2to3|lib-dynload|"
    r"pydoc_data|site-packages|sqlite3|tests?|tkinter|turtledemo|unittest"
)

# asyncio tries to import it in three modules, and without _ssl (see below) each attempt would fail.
UNUSED_MODULES = ("ssl.py",)

# Nor these; most need a large library (OpenSSL alone is 5 MiB). Without _hashlib, hashlib falls
# back on the digests that CPython implements itself.
UNUSED_EXTENSIONS = re.compile(
    r"(_crypt|_ctypes_test|_curses.*|_g?dbm|_hashlib|_sqlite3|_ssl|_test.*|_tkinter|_?xx.*|"
    r"nis|ossaudiodev|readline)\..*"
)

# glibc opens these by name at run time, so no file lists them as needed: libgcc_s when a thread is
# ended (without it, a daemon thread at exit aborts the process), libnss_files when a user or a host
# is looked up (before glibc 2.34, which has it built in).
OPENED_BY_NAME = "libgcc_s.so.1 libnss_files.so.2"

# The loader reads this file of the image, and no option turns that off.
PRELOAD = b"/etc/ld.so.preload\0"

PT_INTERP = 3


@dataclass(frozen=True)
class Bundle:
    """A finished bundle. `path` is the folder to mount read-only in the box."""

    path: Path

    def command(self, module: str, *args: str, at: str = "/.hutch") -> list[str]:
        """The argv that runs `python -m module args...` in a box with the bundle mounted at `at`.

        It needs no variables, no /proc, no /dev and no file outside `at`.
        """
        loader = loader_of(self.path / "bin/python3").name
        start = [f"{at}/lib/{loader}", "--library-path", f"{at}/lib", f"{at}/bin/python3"]
        # UTF-8, whatever the locale of the image: file names come from the user of the box.
        return [*start, "-I", "-S", "-X", "utf8", "-m", module, *args]


def build(into: Path, extra: Mapping[str, bytes] | None = None) -> Bundle:
    """Build the bundle of the running interpreter and the guest under `into`, unless it exists.

    `extra`: the content of additional files, by name.

    The folder is named by a hash of everything it is made from, so a bundle never changes while
    boxes use it; a new interpreter or guest gets a new bundle. Several processes may call this at
    once: one builds, the others wait. A build that fails or is killed leaves nothing at that name.
    Raises BackendUnavailable if this Python cannot be bundled.
    """
    # In a venv, use the Python that it was made from, which has the standard library.
    interpreter = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    extra = extra or {}
    finished = into / _digest(interpreter, loader_of(interpreter), extra)
    if not finished.is_dir():
        into.mkdir(parents=True, exist_ok=True)
        with _alone(into):
            if not finished.is_dir():
                _build(interpreter, finished, extra)
    return Bundle(finished)


def _paths(folder: Path) -> Iterator[Path]:
    """All paths but links: `chmod` and `open` would follow them to the host's python3."""
    return (path for path in [folder, *folder.rglob("*")] if not path.is_symlink())


def _build(interpreter: Path, finished: Path, extra: Mapping[str, bytes]) -> None:
    folder = Path(tempfile.mkdtemp(prefix=BUILDING, dir=finished.parent))
    try:
        _lay_out(interpreter, folder)
        for name, content in extra.items():
            (folder / name).write_bytes(content)
        for path in _paths(folder):
            # Boxes read it under other uids, so our umask must not matter.
            path.chmod(0o755 if path.is_dir() or path.parent.name in ("bin", "lib") else 0o644)
        _write_methods(Bundle(folder))
        for path in _paths(folder):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # or a power cut could keep the name and lose the content
            os.close(descriptor)
        folder.rename(finished)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _alone(into: Path) -> Iterator[None]:
    """Hold the lock on `into`, and remove partial bundles.

    The kernel releases the lock of a process that dies, so with the lock held, they are stale.
    """
    with open(into / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in into.glob(BUILDING + "*"):
            shutil.rmtree(stale)
        yield


def _digest(interpreter: Path, loader: Path, extra: Mapping[str, bytes]) -> str:
    """A hash of everything that decides the content; this file too, as it decides the layout."""
    digest = hashlib.sha256(f"{os.uname().machine} {sys.version}".encode())
    for binary in (interpreter, loader):  # the loader changes whenever libc does
        stat = binary.stat()
        digest.update(f"\0{binary}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    ours = {name: source.read_bytes() for name, source in _our_files()}
    for name, content in [("", Path(__file__).read_bytes()), *ours.items(), *sorted(extra.items())]:
        digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:32]


def _our_files() -> list[tuple[str, Path]]:
    """The files that do not belong to the interpreter: the path in the bundle, and the source."""
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
        copy_file(source, folder / name)
    init = folder / "site/hutch/__init__.py"  # empty: the real one is the API for the host
    init.touch()
    _compile(init, init)
    (home / "hutch").symlink_to("../../site/hutch")
    (folder / "aliases/python").symlink_to("/usr/bin/python3")  # the image's
    for source in _stdlib_files(stdlib):
        copy_file(source, home / source.relative_to(stdlib))

    loader = loader_of(interpreter)
    (folder / "bin/python3").write_bytes(trimmed(interpreter.read_bytes()))
    libraries = needed_libraries(loader, interpreter)
    if libraries is None:
        raise BackendUnavailable(f"{interpreter} needs a library that is not there; see ldd")
    for source in sorted(extensions.glob("*.so")):
        needed = (
            None if UNUSED_EXTENSIONS.fullmatch(source.name) else needed_libraries(loader, source)
        )
        if needed is not None:  # if a library is missing, the host cannot import it either
            libraries |= needed
            (home / "lib-dynload" / source.name).write_bytes(trimmed(source.read_bytes()))
    for name, source in (libraries | {loader.name: loader}).items():
        content = trimmed(source.read_bytes())
        if name == loader.name:
            # With an empty path, the loader finds no file to preload from.
            content = content.replace(PRELOAD, bytes(len(PRELOAD)))
        (folder / "lib" / name).write_bytes(content)


def _write_methods(bundle: Bundle) -> None:
    """Compile the methods of the guest's dataclasses, with the bundle itself: see guest/quick.py.

    Raises BackendUnavailable if the bundle does not run.
    """
    argv = bundle.command("hutch.guest.quick", at=str(bundle.path))
    try:
        ran = subprocess.run(argv, env={}, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        stderr = getattr(exc, "stderr", b"").decode(errors="replace").strip()[-500:]
        where = bundle.path.parent
        raise BackendUnavailable(f"Python does not run from {where}: {stderr or exc}") from exc
    (bundle.path / METHODS).write_bytes(ran.stdout)
    (bundle.path / METHODS).chmod(0o644)


def _stdlib_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not UNUSED.fullmatch(path.name):
            yield from _stdlib_files(path)
        elif path.suffix == ".py" and path.name not in UNUSED_MODULES and path.is_file():
            yield path


def copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())
    if source.suffix == ".py":
        _compile(source, target)


def _compile(source: Path, target: Path) -> None:
    """Write byte code for `target` that is used without checking the source."""
    # The loader reads the host's cached byte code if it can: 0.6 s instead of 1.7 s for a bundle.
    code = SourceFileLoader(source.stem, str(source)).get_code(source.stem)
    # PEP 552: flag 1 means a hash of the source instead of its date, and that it is not checked.
    head = MAGIC_NUMBER + struct.pack("<I", 1) + source_hash(target.read_bytes())
    cached = target.parent / "__pycache__" / f"{target.stem}.{sys.implementation.cache_tag}.pyc"
    cached.parent.mkdir(exist_ok=True)
    cached.write_bytes(head + marshal.dumps(code))


def needed_libraries(loader: Path, binary: Path) -> dict[str, Path] | None:
    """Name and file of all libraries that `binary` loads; None if one is missing.

    The loader itself lists them, as only it knows all the rules. No code of the binary runs.
    """
    # Preloaded libraries are listed, too.
    argv, env = [str(loader), "--list", str(binary)], os.environ | {"LD_PRELOAD": OPENED_BY_NAME}
    ran = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    if ran.returncode or "not found" in ran.stdout:
        return None
    found = re.findall(r"^\s+(?:(\S+) => )?(/\S+) \(0x", ran.stdout, re.MULTILINE)
    return {Path(name or file).name: Path(file) for name, file in found}


def _segments(elf: bytes | mmap) -> list[tuple[int, int, int]]:
    """Kind, offset and size of each program header: the parts that are used at run time."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise BackendUnavailable("only a 64-bit little-endian Linux Python can be bundled")
    (table,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    return [struct.unpack_from("<I4xQ16xQ", elf, table + n * size) for n in range(count)]


def loader_of(binary: Path) -> Path:
    with open(binary, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as elf:
        for kind, offset, size in _segments(elf):
            if kind == PT_INTERP:
                return Path(os.fsdecode(elf[offset : offset + size].rstrip(b"\0")))
    raise BackendUnavailable("a statically linked Python cannot be bundled; use another one")


def trimmed(elf: bytes) -> bytes:
    """The file without symbols and debug information: 6 MB instead of 23 if built from source."""
    end = max(offset + size for _, offset, size in _segments(elf))
    # The section headers are cut off, so clear what refers to them: e_shoff, e_shnum, e_shstrndx.
    return elf[:40] + bytes(8) + elf[48:60] + bytes(4) + elf[64:end]
