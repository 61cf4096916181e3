"""Packages of npm for tests: installed once, into a cache outside of the checkout."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
SDK = ROOT / "packages" / "sdk"
NOT_SOURCE = shutil.ignore_patterns("node_modules", "dist", "build", "api.ts")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hutch-tests"


def run(*command: object, env: dict[str, str] | None = None, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )
    said = f"{done.stdout[-8000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, f"{' '.join(str(word) for word in command)}\n{said}"
    return done.stdout


def packages_of(folder: Path) -> Path:
    """node_modules for a lock file, installed once. No script of a package is run."""
    lock = (folder / "package-lock.json").read_bytes()
    home = CACHE / f"npm-{hashlib.sha256(lock).hexdigest()[:16]}"
    if not home.exists():
        fresh = Path(f"{home}.{os.getpid()}")
        fresh.mkdir(parents=True)
        try:
            for name in ("package.json", "package-lock.json", ".npmrc"):
                shutil.copy(folder / name, fresh)
            run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", cwd=fresh)
            if not home.exists():  # another run may have been faster
                fresh.rename(home)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return home / "node_modules"


def build_sdk(folder: Path) -> Path:
    """The SDK for TypeScript, built below `folder` as npm would."""
    package = folder / "hutch"
    shutil.copytree(SDK, package, ignore=NOT_SOURCE)
    (package / "node_modules").symlink_to(packages_of(SDK))
    run("node", "scripts/types.mjs", ROOT / "openapi.json", cwd=package)
    run("node", "node_modules/typescript/bin/tsc", "-p", "tsconfig.build.json", cwd=package)
    return package
