"""Runs uv, reports its progress, and explains a failure in one line.

Of the environment, uv gets only the variables that say where packages come from, and how to get
there.
"""

from __future__ import annotations

import fcntl
import glob
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from hutch.backends.namespaces.confine import Bounds
from hutch.backends.namespaces.confined import OWN_CACHE
from hutch.errors import BackendUnavailable, HutchError, InvalidRequest, NoSpace

from .environment import VERSION, base_interpreter, base_prefix
from .installer import (
    cache_for,
    confinement,
    outside_usr,
    remove_tree,
    size_of_paths,
    started,
)
from .locks import lock as lock_beside
from .locks import locked
from .progress import Progress as Progress
from .progress import Report as Report
from .stopping import WorkStopped

# Where packages come from, and how to get there. No other variables are passed on to uv.
PASSED_ON = re.compile(
    r"UV_(DEFAULT_INDEX|INDEX.*|EXTRA_INDEX_URL|FIND_LINKS|NO_INDEX|INSECURE_HOST|KEYRING_PROVIDER"
    r"|NATIVE_TLS|SYSTEM_CERTS|OFFLINE|HTTP_.*|CONCURRENT_.*|EXCLUDE_NEWER|CACHE_DIR|CONFIG_FILE"
    r"|NO_CONFIG|TORCH_BACKEND)"
    r"|SSL_CERT_(FILE|DIR)|SSL_CLIENT_CERT|NETRC|XDG_CONFIG_HOME|XDG_CONFIG_DIRS"
    r"|(HTTPS?|ALL|NO)_PROXY|(https?|all|no)_proxy"
)
BOUNDS = Bounds()
# In uv's cache: where it unpacks wheels, and where they are once they are complete.
UNFINISHED = (".tmp*", f"{OWN_CACHE}/.tmp*")
UNPACKED = ("archive-v*/*", f"{OWN_CACHE}/archive-v*/*")
KILLED = (256 - 6, 256 - 9)  # exit codes of a process that aborted or was killed
# Variables of pip, used if uv's are not set: (pip's name, uv's name, uv's separator)
FROM_PIP = [
    ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", " "),
    ("PIP_EXTRA_INDEX_URL", "UV_INDEX", " "),
    ("PIP_FIND_LINKS", "UV_FIND_LINKS", ","),
    ("PIP_TRUSTED_HOST", "UV_INSECURE_HOST", " "),
    ("PIP_CERT", "SSL_CERT_FILE", " "),
]


class NoWheel(InvalidRequest):
    """A package cannot be installed without building it."""

    def __init__(self, message: str, package: str, source: bool) -> None:
        """`source`: whether it has no wheels at all, rather than none for this machine."""
        super().__init__(message)
        self.package, self.source = package, source


def pip_install(
    words: list[str],
    folder: Path,
    lock: int,
    report: Report,
    version: str = VERSION,
    shown: Iterable[str] = (),
) -> None:
    """Run `uv pip install`, confined, for wheels only, with the interpreter that runs Hutch.

    `words`: its arguments. `folder`: where they install the packages. `lock`: a descriptor that
    stays locked while uv runs, even if this process is killed. `version`: the Python version that
    the packages are for, if `words` select another one. `shown`: files of this machine that `words`
    name.

    Raises InvalidRequest if the packages are not available, or not together (NoWheel for one that
    would have to be built), BackendUnavailable if the cause is this machine or its network, and
    NoSpace.
    """
    # No hard links to uv's cache: a change to a file here would change it for everyone.
    options = [
        "--link-mode",
        "copy",
        "--only-binary",
        ":all:",
        "--no-python-downloads",
        "--color",
        "never",
        "--no-progress",
    ]
    uv, env = _find_uv(), _variables()
    chosen = env.get("UV_CACHE_DIR")
    env["UV_CACHE_DIR"] = cache = cache_for("uv", chosen)
    readable: list[str | Path] = [*outside_usr([base_prefix(), Path(uv)]), *shown]
    growing = [f"{glob.escape(cache)}/{each}" for each in (*UNPACKED, *UNFINISHED)]
    seen = confinement(env, [folder, cache], readable, [folder], BOUNDS, growing)
    argv = [uv, "pip", "install", "--python", str(base_interpreter()), *options]
    report(Progress("resolving"))
    output, sizes, meter = [], dict[str, int](), _Meter(cache, folder)
    progress = Progress("resolving")
    with ExitStack() as stack:
        if not chosen:
            stack.enter_context(_using(Path(cache)))
        # Started in /, as uv would read the settings of a project around its working directory.
        process, lines = stack.enter_context(started([*argv, *words], env, lock, seen))
        for line in lines:
            output += [line] if line else []
            after = _after(progress, line, sizes)
            after = replace(after, written=meter.measure(after.stage))
            if after != progress or not line:
                progress = after
                report(progress)
    if process.returncode:
        raise _explained(output, process.returncode, version)


def _after(now: Progress, line: str, sizes: dict[str, int]) -> Progress:
    """The progress after a line of uv's output. Lines that are not recognised change nothing.

    `sizes`: of the wheels that are being downloaded. uv prints only the large ones.
    """
    words = line.split()
    match words:
        case ["Resolved", count, *_] if count.isdigit():
            return Progress("downloading", None, 0, int(count))
        case ["Downloading", package, size, *_]:
            sizes[package] = _bytes(size)
            total = now.total_bytes + sizes[package]
            return replace(now, stage="downloading", package=package, total_bytes=total)
        case ["Downloaded", package]:
            done = now.bytes + sizes.pop(package, 0)
            return replace(now, stage="downloading", package=package, done=now.done + 1, bytes=done)
        case ["Prepared", *_]:
            return Progress("installing", None, 0, now.total)
        case ["Installed", *_]:
            return Progress("installing", None, now.total, now.total)
    return now


def _bytes(text: str) -> int:
    """The number of bytes in "(52.5MiB)"; 0 if it is not a size."""
    found = re.fullmatch(r"\((\d{1,6}(?:\.\d{1,3})?)(B|KiB|MiB|GiB)\)", text)
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    return round(float(found[1]) * units[found[2]]) if found else 0


@contextmanager
def _using(cache: Path) -> Iterator[None]:
    """Lock Hutch's own cache for shared use, and remove partial files before, and after errors.

    The lock is beside the cache, not in it, where an installer could replace it with a link.
    Raises BackendUnavailable if it cannot be locked.
    """
    _sweep(cache)
    try:
        held = lock_beside(cache, fcntl.LOCK_SH)
    except OSError as exc:
        raise BackendUnavailable(f"{cache} cannot be used ({exc.strerror})") from None
    try:
        yield
    except HutchError as exc:
        os.close(held)
        held = -1
        if not isinstance(exc, WorkStopped):  # after Ctrl-C, leave that to the next install
            _sweep(cache)
        raise
    finally:
        if held >= 0:
            os.close(held)


def _sweep(cache: Path) -> None:
    """Remove partial files. Best-effort, and only if no other process uses the cache."""
    with suppress(OSError), locked(cache, fcntl.LOCK_EX | fcntl.LOCK_NB) as alone:
        if alone is None:
            return
        for top in (cache, cache / OWN_CACHE):
            for path in top.glob(".tmp*") if not top.is_symlink() else ():
                if path.is_dir() and not path.is_symlink():
                    remove_tree(path)
                else:
                    path.unlink(missing_ok=True)


class _Meter:
    """Measures the bytes that uv has written, as uv reports nothing during a download.

    While it downloads, it unpacks into its cache; while it installs, it copies to the folder.
    """

    def __init__(self, cache: str, folder: Path) -> None:
        self._cache, self._folder = Path(cache), folder
        self._next, self._written, self._stage = 0.0, 0, ""

    def measure(self, stage: str) -> int:
        """Bytes written in this stage, perhaps slightly stale.

        Measuring many files is slow, so it takes at most a tenth of the time.
        """
        began = time.monotonic()
        if stage != self._stage:
            self._stage, self._written = stage, 0
        if stage in ("downloading", "installing") and began >= self._next:
            tops = [self._folder]
            if stage == "downloading":
                tops = [path for each in UNFINISHED for path in self._cache.glob(each)]
            try:
                self._written = size_of_paths(map(str, tops))
            except InvalidRequest:
                pass  # too deeply nested; if it is not from an earlier run, the watch reports it
            after = time.monotonic()
            self._next = after + max(0.5, 10 * (after - began))
        return self._written


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


# --- why it failed -----------------------------------------------------------------------

NO_SPACE = re.compile(r"\(os error (28|122)\)|No space left on device|Disk quota exceeded")
MOST = 300  # characters of a failure that no pattern matches
_SOURCE_ONLY = "{what} comes as source only, and none is built here: a wheel (.whl) of it would do"
_OTHER_WHEELS = "{what} has no wheel for this machine and Python {version}"
_REASONS = [
    (r"[Ww]heels are required for `(?P<what>[^`]+)`",
     _SOURCE_ONLY),
    (r"(?P<what>\S+) has no (usable wheels|wheels with a matching .*? tag)",
     _OTHER_WHEELS),
    (r"Building source distributions for `(?P<what>[^`]+)` is disabled",
     _SOURCE_ONLY),
    (r"(?P<what>\S+) was not found in (the package registry|the provided package locations)",
     "there is no package {what}"),
    (r"(?P<what>\S+) has an invalid (package format|metadata)|Failed to read `(?P<file>[^`]+)`",
     "{what} is not a wheel that can be read"),
    (r"(?P<what>\S+) requires Python (?P<more>\S+?),? and",
     "{what} needs Python {more}, and this is {version}"),
    (r"only (?P<what>\S+?)(?P<more>[<=>]\S+) (is|are) available and you require (?P<asked>\S+?),",
     "there is no {asked}: only {what}{more} is available"),
    (r"there (is|are) no versions? of (?P<what>\S+?),? and", "there is no {what}"),
    (r"Failed to install: \S+ \((?P<what>[^)]+)\) cause: (?P<more>(?!.*os error).*)",
     "{what} cannot be installed: {more}"),
    (r"Failed to install: \S+ \((?P<what>[^)\s]+).*"
     r"(?P<more>File exists|(Is|Not) a directory|File name too long) \(os error",
     "{what} cannot be installed: {more}"),
    (r"no trusted hash was provided for: `?(?P<what>[\w.-]+)",
     "{what} has no hash, and each package must have one (--require-hashes)"),
    (r"must have their versions pinned with `==`, but found: (?P<what>[\w.-]+)",
     "{what} has no version, and each package must have one (--require-hashes)"),
    (r"(?P<what>Failed to parse): `(?P<asked>[^`]+)`", "no package can be called {asked!r}"),
]  # fmt: skip


def _explained(output: list[str], code: int, version: str) -> HutchError:
    """The error for uv's output. Its message names the package or host that failed, if known."""
    messages = [
        line for line in output if not line.startswith(("Using ", "Resolved ", "warning: "))
    ]
    text = re.sub(r"[\s×╰─▶├│]+", " ", " ".join(messages)).strip().removeprefix("error: ")
    if mismatch := re.search(r"Hash mismatch for `([^`]+)`", text):
        name, place, _ = mismatch[1].partition(" @ ")
        if place:
            return InvalidRequest(f"the wheel of {name} has changed since the image was described")
        return InvalidRequest(f"{name.replace('==', ' ')} is not the one that its hash names")
    if "(os error 27)" in text:
        most = BOUNDS.file_bytes >> 20
        return InvalidRequest(f"the packages hold a file that is larger than {most} MiB")
    if NO_SPACE.search(text):  # not the fault of a package or of the network
        return NoSpace("the disk is full, or has no room for more files: uv could not go on")
    host = re.search(r"[Ff]ailed to (?:fetch|download)\W+https?://(?:[^/@\s]*@)?([^/\s`]+)", text)
    if host:
        if "invalid peer certificate" in text:
            return BackendUnavailable(
                f"the certificate of {host[1]} is not trusted: set UV_SYSTEM_CERTS=1 if this "
                "machine trusts it; otherwise, set SSL_CERT_FILE to the file of its CA"
            )
        last = text.rpartition("cause: ")[2].rpartition("Caused by: ")[2]
        return BackendUnavailable(f"cannot get packages from {host[1]}: {last}")
    if "memory allocation of" in text or code % 256 in KILLED:
        return BackendUnavailable("uv was killed, perhaps because it reached its memory limit")
    if "was not found in the cache" in text:
        return BackendUnavailable("uv is set to work offline, and its cache lacks a package")
    why = text.partition("cause: ")[2] or text
    for pattern, message in _REASONS:
        match = re.search(pattern, text)
        if match:
            parts = {name: value for name, value in match.groupdict().items() if value}
            if "file" in parts:
                parts["what"] = parts["file"].partition(" @ ")[0]
            # In a long chain of reasons, the one that matched may not be the decisive one.
            more = f" ({why})" if text.count("conclude") > 2 else ""
            reason = message.format(**parts, version=version) + more
            if message in (_SOURCE_ONLY, _OTHER_WHEELS):
                package = re.split(r"[^\w.-]", parts["what"])[0]
                return NoWheel(reason, package, message == _SOURCE_ONLY)
            return InvalidRequest(reason)
    if "unsatisfiable" in text:
        return InvalidRequest(f"these packages do not go together: {why}")
    short = text if len(text) <= MOST else f"{text[: MOST // 2]} ... {text[-MOST // 2 :]}"
    return BackendUnavailable(f"uv could not install the packages (exit code {code}): {short}")
