"""Fills a folder with packages, by uv, so that it is an environment once a box sees it at /opt/env.

The packages are not ours and not trusted, so none of their code runs on this machine: wheels only
(building one from source means running it), and the interpreter that asks about itself and
compiles is the plain one, which does not look into the folder. What uv is told is a short list of
variables: where packages come from, and how to get there.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hutch.errors import BackendUnavailable, HutchError, InvalidRequest

from .environment import ENVIRONMENT, VERSION, Image, base_interpreter, interpreter_in_box

SITE_PACKAGES = f"lib/python{VERSION}/site-packages"
RECORD = "hutch.json"

# Where packages come from and how to get there; nothing else of the environment reaches uv.
PASSED_ON = re.compile(
    r"UV_(DEFAULT_INDEX|INDEX.*|EXTRA_INDEX_URL|FIND_LINKS|NO_INDEX|INSECURE_HOST|KEYRING_PROVIDER"
    r"|NATIVE_TLS|SYSTEM_CERTS|OFFLINE|HTTP_.*|CONCURRENT_.*|EXCLUDE_NEWER|CACHE_DIR|CONFIG_FILE"
    r"|NO_CONFIG|TORCH_BACKEND)"
    r"|SSL_CERT_(FILE|DIR)|SSL_CLIENT_CERT|NETRC|XDG_(CACHE|CONFIG)_HOME|XDG_CONFIG_DIRS|TMPDIR"
    r"|(HTTPS?|ALL|NO)_PROXY|(https?|all|no)_proxy"
)
# pip's variables, for those who have set only them: (its name, uv's name, what uv puts between)
FROM_PIP = [
    ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", " "),
    ("PIP_EXTRA_INDEX_URL", "UV_INDEX", " "),
    ("PIP_FIND_LINKS", "UV_FIND_LINKS", ","),
    ("PIP_TRUSTED_HOST", "UV_INSECURE_HOST", " "),
    ("PIP_CERT", "SSL_CERT_FILE", " "),
]


@dataclass(frozen=True)
class Progress:
    """How far a build is. `done` of `total` packages, or modules when it compiles; 0: unknown."""

    stage: str  # waiting, resolving, downloading, installing, compiling, done
    package: str | None = None
    done: int = 0
    total: int = 0


Report = Callable[[Progress], None]


def install(image: Image, folder: Path, lock: int, report: Report) -> None:
    """Make `folder`, which is there and empty, the environment of this image.

    `lock` is a descriptor that the programs we start inherit, so that it stays locked while any
    of them is at work, even if we are killed. Raises InvalidRequest if the packages cannot be had,
    together or at all, and BackendUnavailable if the reason is this machine or its network.
    """
    if sys.platlibdir != "lib":
        (folder / sys.platlibdir).symlink_to("lib")
    _run_uv(image, folder, lock, report)
    _take_out_what_tells_of_this_machine(folder)
    _compile(folder, lock, report)
    _add_interpreter(folder)
    installed = [_name_of(path) for path in (folder / SITE_PACKAGES).glob("*.dist-info")]
    about = {
        "packages": image.described(),
        "installed": sorted(installed),
        "python": sys.version.partition(" ")[0],
        "bytes": _make_readable(folder),
    }
    (folder / RECORD).write_text(json.dumps(about, indent=2) + "\n")
    (folder / RECORD).chmod(0o644)


# --- uv ----------------------------------------------------------------------------------


def _run_uv(image: Image, folder: Path, lock: int, report: Report) -> None:
    # No links to uv's cache: whoever changed a file here would change it for everybody.
    options = ["--link-mode", "copy", "--only-binary", ":all:", "--no-python-downloads",
               "--color", "never", "--no-progress"]  # fmt: skip
    python = str(base_interpreter())
    argv = [_find_uv(), "pip", "install", "--prefix", str(folder), "--python", python, *options]
    report(Progress("resolving"))
    said = []
    progress = Progress("resolving")
    # In /, for uv would take settings from any project around the folder it is started in.
    with _started([*argv, "--", "pip", *image.packages], _variables(), lock) as (process, lines):
        for line in lines:
            said.append(line)
            after = _after(progress, line)
            if after != progress:
                progress = after
                report(progress)
    if process.returncode:
        raise _explained(said, process.returncode)


def _after(now: Progress, line: str) -> Progress:
    """The progress that a line of uv's tells. What it says in other words tells none."""
    words = line.split()
    match words:
        case ["Resolved", count, *_] if count.isdigit():
            return Progress("downloading", None, 0, int(count))
        case ["Downloading", package, *_]:
            return Progress("downloading", package, now.done, now.total)
        case ["Downloaded", package]:
            return Progress("downloading", package, now.done + 1, now.total)
        case ["Prepared", *_]:
            return Progress("installing", None, 0, now.total)
        case ["Installed", *_]:
            return Progress("installing", None, now.total, now.total)
    return now


def _find_uv() -> str:
    try:
        import uv

        return os.fspath(uv.find_uv_bin())
    except (ImportError, FileNotFoundError):
        raise BackendUnavailable("images are built with uv: pip install uv") from None


def _variables() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
    for pip, uv, between in FROM_PIP:
        if pip in os.environ and uv not in env:
            env[uv] = between.join(map(_absolute, os.environ[pip].split()))
    return env | {"HOME": str(Path.home()), "LC_ALL": "C.UTF-8"}


def _absolute(place: str) -> str:
    return os.path.abspath(place) if os.path.exists(place) else place


# Becomes another program, which is killed when we are (PR_SET_PDEATHSIG, SIGKILL).
_BOUND = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@contextmanager
def _started(
    argv: list[str], env: dict[str, str], lock: int
) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """A program and the lines it says, on either output. It has ended when the `with` is left."""
    bound = [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid())]
    process = subprocess.Popen(
        [*bound, *argv], cwd="/", env=env, pass_fds=[lock], text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout
    with process.stdout as output:
        try:
            yield process, (line.rstrip() for line in output)
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()


# --- why it failed -----------------------------------------------------------------------

_REASONS = [
    (r"[Ww]heels are required for `(?P<what>[^`]+)`",
     "{what} comes as source only, and none is built here: a wheel (.whl) of it would do"),
    (r"(?P<what>\S+) has no (usable wheels|wheels with a matching .*? tag)",
     "{what} has no wheel for this machine and Python " + VERSION),
    (r"Building source distributions for `(?P<what>[^`]+)` is disabled",
     "{what} comes as source only, and none is built here: a wheel (.whl) of it would do"),
    (r"(?P<what>\S+) was not found in (the package registry|the provided package locations)",
     "there is no package {what}"),
    (r"(?P<what>\S+) has an invalid (package format|metadata)|Failed to read `(?P<file>[^`]+)`",
     "{what} is not a wheel that can be read"),
    (r"(?P<what>\S+) requires Python (?P<more>\S+?),? and",
     "{what} needs Python {more}, and this is " + VERSION),
    (r"only (?P<what>\S+?)(?P<more>[<=>]\S+) (is|are) available and you require (?P<asked>\S+?),",
     "there is no {asked}: only {what}{more} can be had"),
    (r"there (is|are) no versions? of (?P<what>\S+?),? and", "there is no {what}"),
    (r"Failed to install: \S+ \((?P<what>[^)]+)\) cause: (?P<more>(?!.*os error).*)",
     "{what} cannot be installed: {more}"),
    (r"(?P<what>Failed to parse): `(?P<asked>[^`]+)`", "no package can be called {asked!r}"),
]  # fmt: skip


def _explained(said: list[str], code: int) -> HutchError:
    """One error for what uv said, with the package that failed, or the host, in front."""
    told = [line for line in said if not line.startswith(("Using ", "Resolved ", "warning: "))]
    text = re.sub(r"[\s×╰─▶├│]+", " ", " ".join(told)).strip().removeprefix("error: ")
    if "Hash mismatch" in text:
        name = text.partition("`")[2].partition(" @ ")[0]
        return InvalidRequest(f"the wheel of {name} has changed since the image was described")
    host = re.search(r"[Ff]ailed to (?:fetch|download)\W+https?://(?:[^/@\s]*@)?([^/\s`]+)", text)
    if host:
        last = text.rpartition("cause: ")[2].rpartition("Caused by: ")[2]
        return BackendUnavailable(f"{host[1]} gave no packages: {last}")
    if "was not found in the cache" in text:
        return BackendUnavailable("uv is told to stay offline, and its cache has not all packages")
    why = text.partition("cause: ")[2] or text
    for pattern, message in _REASONS:
        found = re.search(pattern, text)
        if found:
            parts = {name: value for name, value in found.groupdict().items() if value}
            if "file" in parts:
                parts["what"] = parts["file"].partition(" @ ")[0]
            # In a long chain of reasons, the one we understand need not be the one that counts.
            more = f" ({why})" if text.count("conclude") > 2 else ""
            return InvalidRequest(message.format(**parts) + more)
    if "unsatisfiable" in text:
        return InvalidRequest(f"these packages do not go together: {why}")
    return BackendUnavailable(f"uv could not install the packages (exit code {code}): {text}")


# --- the folder --------------------------------------------------------------------------


def _take_out_what_tells_of_this_machine(folder: Path) -> None:
    """Links (no wheel has any, and we follow none), uv's own notes, and paths in scripts."""
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(parent, name)
            if path.is_symlink() and path != folder / sys.platlibdir:
                path.unlink()
    (folder / ".lock").unlink(missing_ok=True)
    outer, inner = str(base_interpreter()).encode(), f"{ENVIRONMENT}/bin/python3".encode()
    scripts = {}
    for script in filter(Path.is_file, (folder / "bin").glob("*")):
        lines = script.read_bytes().split(b"\n", 3)
        head, rest = lines[:3], lines[3:]  # three, for a long path is hidden in a line of sh
        if head[0].startswith(b"#!") and any(outer in line for line in head):
            content = b"\n".join([*(line.replace(outer, inner) for line in head), *rest])
            script.write_bytes(content)
            scripts[f"../../../bin/{script.name}"] = content
    for record in (folder / SITE_PACKAGES).glob("*.dist-info/RECORD"):
        _mend(record, scripts)


def _mend(record: Path, scripts: dict[str, bytes]) -> None:
    """Say in pip's list of files what is there now: scripts as changed, no notes of uv's."""
    with record.open(newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    kept = []
    for row in rows:
        name = row[0]
        if re.fullmatch(r"[^/]+\.dist-info/(direct_url|uv_cache|uv_build)\.json", name):
            (record.parent.parent / name).unlink(missing_ok=True)
            continue
        if name in scripts:
            digest = base64.urlsafe_b64encode(hashlib.sha256(scripts[name]).digest())
            row = [name, f"sha256={digest.decode().rstrip('=')}", str(len(scripts[name]))]
        kept.append(row)
    with record.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(kept)


def _compile(folder: Path, lock: int, report: Report) -> None:
    """Byte code for all modules, which names them as a box sees them and is never checked."""
    place = folder / SITE_PACKAGES
    total = sum(1 for _ in place.rglob("*.py"))
    report(Progress("compiling", None, 0, total))
    script = str(Path(__file__).with_name("compile.py"))
    argv = [
        str(base_interpreter()),
        "-I",
        "-S",
        script,
        str(place),
        f"{ENVIRONMENT}/{SITE_PACKAGES}",
    ]
    with _started([*argv, str(os.cpu_count() or 1)], {}, lock) as (process, lines):
        for done, line in enumerate(lines, 1):
            package = line.partition("/")[0]
            report(Progress("compiling", package, min(done, total), total))
    if process.returncode:
        raise BackendUnavailable("compiling the packages was cut short: is there room enough?")


def _add_interpreter(folder: Path) -> None:
    inner = interpreter_in_box()
    (folder / "bin").mkdir(exist_ok=True)
    links = {"python3": inner, "python": "python3", f"python{VERSION}": "python3"}
    for name, target in links.items():
        (folder / "bin" / name).unlink(missing_ok=True)
        (folder / "bin" / name).symlink_to(target)
    settings = folder / "pyvenv.cfg"
    settings.unlink(missing_ok=True)
    settings.write_text(
        f"home = {os.path.dirname(inner)}\n"
        "include-system-site-packages = false\n"
        f"version = {sys.version.partition(' ')[0]}\n"
    )


def _make_readable(folder: Path) -> int:
    """Let every user read it, whatever our umask is. How many bytes it takes on disk."""
    size = 0
    for parent, _, files in os.walk(folder):
        os.chmod(parent, 0o755)
        for name in files:
            path = Path(parent, name)
            status = path.lstat()
            size += status.st_blocks * 512
            if not path.is_symlink():
                path.chmod(0o755 if status.st_mode & 0o100 else 0o644)
    return size


def _name_of(info: Path) -> str:
    name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
    return f"{name.replace('_', '-').lower()}=={version}"
