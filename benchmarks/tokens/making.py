"""`benchmarks/tokens/make`: run every command of the corpus again, and keep what it printed.

In a box, where the command needs nothing but files. What fetches packages runs outside, in a folder
whose path is written /workspace afterwards; what talks to Docker has an engine of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hutch
from benchmarks import docker_engine

from .samples import CORPUS, HERE, UNSEEN, Sample, samples

KITCHEN = Path("/opt/kitchen")  # tools and sources; a fixed place, since scripts name it
RUST = Path("/opt/rust")
PYTHON = sys.base_prefix
PATIENCE = 300.0
PATHS = ":".join(
    f"{folder}/{part}"
    for folder in ("/opt/kitchen", "/opt/kitchen/unseen")
    for part in ("tools/bin", "node/node_modules/.bin", "debs/usr/bin")
)
SYSTEM = "/usr/local/go/bin:/usr/local/bin:/usr/bin:/bin"
SETTINGS = {
    "PATH": f"{PATHS}:/opt/rust/bin:{SYSTEM}",
    "GOMODCACHE": "/opt/kitchen/go/mod",
    "GOPROXY": "off",
    "GOFLAGS": "-mod=mod",
    "GOCACHE": "/tmp/gocache",
    "GOTOOLCHAIN": "local",
    "GIT_AUTHOR_DATE": "2025-03-04T10:00:00Z",
    "GIT_COMMITTER_DATE": "2025-03-04T10:00:00Z",
    "PAGER": "cat",
    "LC_ALL": "C.UTF-8",
    "COLUMNS": "80",
    "GIT_CONFIG_COUNT": "4",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_KEY_1": "user.name",
    "GIT_CONFIG_VALUE_1": "Ada",
    "GIT_CONFIG_KEY_2": "user.email",
    "GIT_CONFIG_VALUE_2": "ada@example.com",
    "GIT_CONFIG_KEY_3": "init.defaultBranch",
    "GIT_CONFIG_VALUE_3": "main",
}

# What tells of the machine it was made on, and nothing of the command.
SCRUBBED = [
    (re.compile(rb"https?://[^\s/\"']*(?:pypi|npm|crates|proxy|index|registry|mirror|artifact)"
                rb"[^\s/\"']*"), b"https://packages.example"),
    (re.compile(rb"^Looking in (?:indexes|links):.*\n", re.M), b""),
    (re.compile(rb"^npm warn Unknown user config.*\n", re.M), b""),
    (re.compile(rb"^\[notice\].*\n", re.M), b""),
    (re.compile(rb"/opt/kitchen(?:/unseen)?"), b"/opt"),
]  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/tokens/make", description=__doc__)
    parser.add_argument("only", nargs="*", help="names of samples, or families")
    parser.add_argument("--unseen", action="store_true", help="those of the unseen corpus")
    chosen = parser.parse_args(arguments)
    wanted = [
        s for s in samples(UNSEEN if chosen.unseen else CORPUS)
        if s.made != "hand" and (not chosen.only or {s.name, s.family} & {*chosen.only})
    ]  # fmt: skip
    KITCHEN.mkdir(exist_ok=True)
    prepare = (UNSEEN if chosen.unseen else HERE / "projects") / "prepare.sh"
    subprocess.run([prepare, KITCHEN], check=True)
    wrong = 0
    with contextlib.ExitStack() as stack:
        if any(s.made == "engine" for s in wanted):
            made = stack.enter_context(docker_engine.engine(bridge=True))
            os.environ["DOCKER_HOST"] = made.host
        for sample in wanted:
            try:
                code, printed = (in_a_box if sample.made == "box" else outside)(sample)
            except (RuntimeError, subprocess.TimeoutExpired) as why:
                print(f"{sample.name:32} {why}", flush=True)
                wrong += 1
                continue
            sample.path.parent.mkdir(exist_ok=True)
            sample.path.write_bytes(printed)
            told = "" if code == sample.exit_code else f"  exit code {code}, not {sample.exit_code}"
            wrong += bool(told)
            print(f"{sample.name:32} {len(printed):8}{told}", flush=True)
    return 1 if wrong else 0


def in_a_box(sample: Sample) -> tuple[int, bytes]:
    rust = _rust()
    mounts = [f"{KITCHEN}:{KITCHEN}:ro", f"{rust}:{RUST}:ro", f"{HERE / 'projects'}:/projects:ro"]
    if not PYTHON.startswith("/usr"):  # what the tools were installed with
        mounts.append(f"{PYTHON}:{PYTHON}:ro")
    with hutch.Sandbox.create(mounts=mounts, env=SETTINGS, memory="4g", cpus=2, pids=2000) as box:
        before = f"exec >&2; cd /workspace; . /projects/{sample.project}.sh; {sample.setup}"
        made = box.commands.run(["bash", "-ec", before], timeout=PATIENCE)
        if made.exit_code:
            raise RuntimeError(f"{sample.name}: {made.stderr}")
        # One pipe for both, so that they stay in order; run in bash, as a model would.
        command = f"cd /workspace; exec 2>&1\n{sample.command}"
        result = box.commands.run(["bash", "-c", command], timeout=PATIENCE)
        printed = result.stdout.encode()
        if result.kept:
            raise RuntimeError(f"{sample.name} printed more than is shown at once")
        return result.exit_code, scrubbed(printed)


def outside(sample: Sample) -> tuple[int, bytes]:
    with _folder() as folder:
        env = {**os.environ, **SETTINGS, "HOME": str(folder / "home"), "GOPROXY": "", "CI": ""}
        env["PATH"] = f"{PATHS}:{_rust()}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
        work = folder / "workspace"
        for part in (work, folder / "home"):
            part.mkdir()
        script = HERE / "projects" / f"{sample.project}.sh"
        before = ["bash", "-ec", f"exec >&2; . {script}; {sample.setup}"]
        made = subprocess.run(before, cwd=work, env=env, capture_output=True, timeout=PATIENCE)
        if made.returncode:
            raise RuntimeError(f"{sample.name}: {made.stderr.decode()}")
        done = subprocess.run(
            ["bash", "-c", f"exec 2>&1\n{sample.command}"],
            cwd=work, env=env, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=PATIENCE,
        )  # fmt: skip
        printed = done.stdout.replace(str(work).encode(), b"/workspace")
        return done.returncode, scrubbed(printed.replace(str(folder).encode(), b""))


def scrubbed(printed: bytes) -> bytes:
    printed = printed.replace(PYTHON.encode(), b"/usr") if PYTHON != "/usr" else printed
    for pattern, instead in SCRUBBED:
        printed = pattern.sub(instead, printed)
    return printed


def _rust() -> Path:
    said = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, check=True)
    return Path(said.stdout.decode().strip())


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="corpus-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
