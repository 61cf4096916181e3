"""Makes the root file system of a plain Debian with mmdebstrap, for engines that cannot pull one.

Packages are downloaded with the apt settings of this machine, which are not left in the result. The
content depends on the Debian archive alone, not on when or where it was made.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from hutch.backends.linux import temporary
from hutch.errors import BackendUnavailable

from . import EPOCH

SUITE = "bookworm"
# Not needed in a box, except for copyrights.
LEFT_OUT = (
    "/usr/share/doc/*",
    "/usr/share/man/*",
    "/usr/share/locale/*",
    "/usr/share/info/*",
    "/usr/share/lintian/*",
)
LEFT_IN = ("/usr/share/doc/*/copyright",)
# The result has no apt, as boxes could not use it. Its settings, which may be confidential, and
# other traces of this machine are removed.
NO_TRACE = (
    'rm -rf "$1"/etc/apt/sources.list* "$1"/etc/apt/apt.conf.d/99mmdebstrap '
    '"$1"/var/lib/apt/lists "$1"/var/log/* "$1"/etc/resolv.conf "$1"/etc/hostname'
)

# As root, mmdebstrap mounts what the scripts of packages need. In its own namespaces, these mounts
# are not visible outside, and they and all its processes end with its first process.
APART = (
    ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
    if os.geteuid() == 0
    else []
)

Report = Callable[[str], None]


async def make(
    packages: Iterable[str], architecture: str, why: str, into: BinaryIO, report: Report
) -> None:
    """Write a tar of a Debian with these packages, and rewind it.

    `why`: the reason why it could not be pulled, for the error message. Raises BackendUnavailable
    if mmdebstrap is not installed, or fails.
    """
    program = shutil.which("mmdebstrap")
    if not program:
        raise BackendUnavailable(
            f"{why}; without it, mmdebstrap makes a Debian, which is not installed: "
            "apt install mmdebstrap"
        )
    report("making a Debian with mmdebstrap")
    mirrors, settings = await asyncio.to_thread(apt_settings)
    # With this prefix, it is removed later if this process is killed.
    with TemporaryDirectory(prefix=temporary.prefix(), ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)  # apt fetches as another user
        options = Path(folder, "apt.conf")
        options.write_text(settings)
        argv = [
            *APART,
            program,
            "--variant=essential",
            f"--include={','.join(packages)}",
            f"--architectures={architecture}",
            f"--aptopt={options}",
            "--format=tar",
            *(f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT),
            *(f"--dpkgopt=path-include={pattern}" for pattern in LEFT_IN),
            f"--customize-hook={NO_TRACE}",
            SUITE,
            "-",
            *mirrors,
        ]
        env = {"TMPDIR": folder, "SOURCE_DATE_EPOCH": str(EPOCH), "LC_ALL": "C.UTF-8"}
        # In its own session, so that Ctrl-C does not reach it: `_end` stops it.
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.DEVNULL,
            stdout=into,
            stderr=subprocess.PIPE,
            env={**os.environ, **env},
            start_new_session=True,
        )
        assert process.stderr
        try:
            complaint = await _watch(process.stderr, report)
            if await process.wait():
                raise BackendUnavailable(f"mmdebstrap could not make a Debian: {complaint}")
        finally:
            await _end(process)
    into.seek(0)


async def _watch(stderr: asyncio.StreamReader, report: Report) -> str:
    """Report its progress, and return its first error, as the others only follow from it."""
    complaint = ""
    while line := (await stderr.readline()).decode(errors="replace"):
        kind, _, text = line.strip().partition(": ")
        if kind == "I" and text.endswith("..."):
            report(f"Debian: {text.removesuffix('...')}")
        elif kind == "E" and not complaint:
            complaint = text
    return complaint or "it did not say why"


async def _end(process: asyncio.subprocess.Process) -> None:
    """Stop mmdebstrap. As root, it is killed, and its files are removed with the folder.

    Otherwise it gets SIGTERM, so that it can clean up.
    """
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL if APART else signal.SIGTERM)
    await process.wait()


def apt_settings() -> tuple[list[str], str]:
    """The Debian mirrors of this machine, if it has any for SUITE, and apt's network settings."""
    fields = "$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)"
    listed = _said(["apt-get", "indextargets", "--format", fields, "Created-By: Packages"])
    mirrors = []
    for line in listed.splitlines():
        match line.split():
            case [uri, release, "main", "Debian"] if release.partition("-")[0] == SUITE:
                mirrors.append(f"deb {uri} {release} main")
    has_suite = any(mirror.split()[2] == SUITE for mirror in mirrors)
    dumped = _said(["apt-config", "dump"]).splitlines()
    ways = (
        "Acquire::http",
        "Acquire::https",
        "Acquire::ftp",
        "Acquire::Retries",
        "Acquire::Check-Valid-Until",
    )
    settings = [line for line in dumped if line.startswith(ways)]
    return mirrors if has_suite else [], "\n".join(settings) + "\n"


def _said(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
