"""A build hook: makes the dashboard from `packages/dashboard`, when something of it has changed.

Hatchling calls it for wheels, sdists and editable installs. Hutch runs without the dashboard, so a
machine without Node.js, or without a network, gets one line about it and an install that works.
HUTCH_DASHBOARD=require makes that an error, as a release does; HUTCH_DASHBOARD=skip builds nothing.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NODE = (20, 19)  # what Vite needs
PATIENCE = 600  # seconds for npm, and for the build
STATIC = "src/hutch/dashboard/static"
# What the built files are made from. The digest of these is kept beside them.
SOURCES = ("packages/dashboard", "packages/sdk", "openapi.json", "hatch_build.py")
NOT_SOURCES = {"node_modules", "dist", "build", "api.ts", "README.md", "tests", "examples"}
PACKED = {".js", ".css", ".svg"}  # also kept compressed
DIGEST = "sources.sha256"


class CannotBuild(Exception):
    """The reason, in a line."""


class DashboardHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("HUTCH_DASHBOARD", "")
        root = Path(self.root)
        if wanted == "skip" or not (root / "packages/dashboard").is_dir():
            return
        try:
            make(root)
        except CannotBuild as exc:
            if wanted == "require":
                raise
            # It was made from other sources, and would talk to a server that it does not fit.
            shutil.rmtree(root / STATIC, ignore_errors=True)
            self.app.display_warning(f"Hutch is installed without its dashboard: {exc}")


def make(root: Path) -> bool:
    """Build what is not up to date; returns whether it was. Raises CannotBuild."""
    static, digest = root / STATIC, digest_of(root)
    if _kept_digest(static) == digest:
        return False
    npm = _npm()
    with tempfile.TemporaryDirectory(prefix="hutch-dashboard-") as folder:
        copy = Path(folder)
        for path in sources(root):
            target = copy / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        _run(npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", cwd=copy)
        _run(npm, "run", "build", cwd=copy)
        made = copy / STATIC
        if not (made / "index.html").is_file():
            raise CannotBuild(f"`npm run build` made no {STATIC}/index.html")
        for path in sorted(made.rglob("*")):
            if path.suffix in PACKED:
                packed = gzip.compress(path.read_bytes(), 9, mtime=0)
                path.with_name(path.name + ".gz").write_bytes(packed)
        (made / DIGEST).write_text(digest + "\n")
        _replace(static, made)
    return True


def sources(root: Path) -> Iterator[Path]:
    """Every file that counts, in an order that does not depend on the file system."""
    for name in SOURCES:
        path = root / name
        if path.is_file():
            yield path
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(each for each in folders if each not in NOT_SOURCES)
            yield from (Path(folder, each) for each in sorted(files) if each not in NOT_SOURCES)


def digest_of(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sources(root):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _kept_digest(static: Path) -> str:
    try:
        return (static / DIGEST).read_text().strip()
    except OSError:
        return ""


def _npm() -> str:
    """The path of npm. Raises CannotBuild if it is missing, or Node.js is too old."""
    least = ".".join(map(str, NODE))
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        missing = "Node.js" if node is None else "npm"
        raise CannotBuild(
            f"there is no {missing} here (it takes Node.js {least} or newer, to build)"
        )
    done = subprocess.run([node, "--version"], capture_output=True, text=True, check=False)
    version = re.match(r"v(\d+)\.(\d+)", done.stdout)
    if version is None or (int(version[1]), int(version[2])) < NODE:
        raise CannotBuild(f"Node.js {done.stdout.strip()} is too old: it takes {least} or newer")
    return npm


def _run(*command: str, cwd: Path) -> None:
    """Run npm in the copy of the dashboard. Raises CannotBuild with what it said last."""
    # Without a network, npm would try for minutes.
    retries = {"npm_config_fetch_retries": "1", "npm_config_fetch_retry_mintimeout": "1000"}
    env = {**os.environ, **retries, "npm_config_update_notifier": "false"}
    what = f"`npm {' '.join(command[1:3])}`"
    try:
        done = subprocess.run(
            command,
            cwd=cwd / "packages/dashboard",
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CannotBuild(f"{what} took longer than {PATIENCE // 60} minutes") from None
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        telling = [line for line in lines if re.search(r"error", line, re.IGNORECASE)] or lines
        raise CannotBuild(f"{what} failed: {' / '.join(telling[:3])[:500]}")


def _replace(static: Path, made: Path) -> None:
    """Put the built files into their place whole: a server may be reading the old ones."""
    static.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = static.with_name(f".static-{os.getpid()}"), static.with_name(f".old-{os.getpid()}")
    shutil.copytree(made, fresh)
    try:
        if static.exists():
            static.rename(old)
        fresh.rename(static)
    except OSError:
        # Another build was faster, with the same files.
        if not static.exists():
            raise
    finally:
        for folder in (fresh, old):
            shutil.rmtree(folder, ignore_errors=True)
