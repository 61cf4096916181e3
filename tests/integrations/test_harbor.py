"""Hutch as an environment of Harbor: its oracle solves a task in a box, and is believed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths
from leaving import assert_nothing_is_left_when_killed

from hutch import BoxLost
from hutch.adapters.harbor import HutchEnvironment

FRAMEWORK = "Harbor"
PACKAGE = "harbor"
PLUGGED = "BaseEnvironment; its oracle end to end"

pytestmark = pytest.mark.asyncio(loop_scope="module")

TASK = {
    "task.toml": '[environment]\ndocker_image = "host"\nmemory_mb = 1024\n',
    "instruction.md": "Write hello to /app/hello.txt.\n",
    "environment/seed.txt": "hello\n",
    "solution/solve.sh": "#!/bin/bash\ncp /app/seed.txt /app/hello.txt\n",
    "tests/test.sh": (
        "#!/bin/bash\ncmp /app/hello.txt /tests/expected.txt && reward=1\n"
        "echo ${reward:-0} > /logs/verifier/reward.txt\n"
    ),
    "tests/expected.txt": "hello\n",
}


def leftovers() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("hutch-harbor-")}


async def test_the_oracle_gets_its_reward(tmp_path: Path) -> None:
    before = leftovers()
    for name, text in TASK.items():
        path = tmp_path / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    run = subprocess.run(
        [Path(sys.executable).with_name("harbor"), "run", "-p", tmp_path / "task", "-a", "oracle",
         "-e", "hutch.adapters.harbor:HutchEnvironment", "-o", tmp_path / "jobs"],
        capture_output=True, text=True, timeout=180,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    [trial] = (tmp_path / "jobs").glob("*/*/result.json")
    assert json.loads(trial.read_text())["verifier_result"]["rewards"] == {"reward": 1.0}
    assert leftovers() <= before


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def environment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HutchEnvironment]:
    made = environment_at(tmp_path_factory.mktemp("harbor"))
    await made.start(force_build=False)
    yield made
    await made.stop(delete=True)


def environment_at(folder: Path, **more: object) -> HutchEnvironment:
    (folder / "environment").mkdir()
    return HutchEnvironment(
        folder / "environment", "name", "session", TrialPaths(folder / "trial"),
        EnvironmentConfig(), **{"image": "host", **more},
    )  # fmt: skip


async def test_absolute_paths_are_honoured(environment: HutchEnvironment, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.sh").write_text("echo a\n")
    (tmp_path / "folder" / "a.sh").chmod(0o755)
    await environment.upload_dir(tmp_path / "folder", "/tests")
    await environment.upload_file(tmp_path / "folder" / "a.sh", "/solution/deep/b.sh")
    result = await environment.exec("/tests/a.sh; /bin/sh /solution/deep/b.sh; pwd; id -un")
    assert result.stdout == "a\na\n/app\nroot\n"
    await environment.exec("mkdir -p /logs/x && echo 1 > /logs/x/y", user="root")
    await environment.download_dir("/logs", tmp_path / "logs")
    assert (tmp_path / "logs" / "x" / "y").read_text() == "1\n"
    await environment.download_file("/logs/x/y", tmp_path / "y")
    assert (tmp_path / "y").read_text() == "1\n"
    await environment.empty_dirs(["/tests"])
    assert not await environment.is_file("/tests/a.sh")


async def test_a_command_gives_both_streams_and_its_code(environment: HutchEnvironment) -> None:
    seen: list[tuple[str, str]] = []

    async def hear(text: str, stream: str) -> None:
        seen.append((text, stream))

    with environment.scoped_output_callback(hear):
        result = await environment.exec("echo $A; echo no >&2; exit 4", env={"A": "b"})
    assert (result.stdout, result.stderr, result.return_code) == ("b\n", "no\n", 4)
    assert sorted(seen) == [("b\n", "stdout"), ("no\n", "stderr")]


async def alive(environment: HutchEnvironment, seconds: str) -> bool:
    found = await environment.exec(f"ps -eo args | grep -c '^sleep {seconds}'")
    return (found.stdout or "").strip() != "0"


async def test_a_timeout_kills_the_tree(environment: HutchEnvironment) -> None:
    with pytest.raises(RuntimeError, match="killed after 1 seconds"):
        await environment.exec("setsid sleep 4501 & sleep 4501", timeout_sec=1)
    assert not await alive(environment, "4501")


async def test_a_cancel_kills_the_tree(environment: HutchEnvironment) -> None:
    work = asyncio.ensure_future(environment.exec("sleep 4502 & touch /tmp/go; sleep 4502"))
    while not await environment.is_file("/tmp/go"):
        await asyncio.sleep(0.02)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not await alive(environment, "4502")


async def test_a_box_that_died_is_told_apart_from_a_command_that_failed(tmp_path: Path) -> None:
    environment = environment_at(tmp_path)
    await environment.start(force_build=False)
    assert (await environment.exec("false")).return_code == 1
    await environment.box.close()
    with pytest.raises(BoxLost):
        await environment.exec("true")
    before = leftovers()
    await environment.stop(delete=True)
    assert len(leftovers()) < len(before)


async def test_an_image_that_must_be_built_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hutch image import"):
        environment_at(tmp_path, image=None)


@pytest.mark.parametrize("variable", ["", "http://127.0.0.1:1"])
async def test_only_a_box_of_an_ordinary_user_of_this_machine_has_one_user(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setenv("HUTCH_URL", variable)
    assert environment_at(tmp_path)._has_one_user is not bool(variable)


async def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_harbor import environment_at
async def main():
    environment = environment_at(Path({str(tmp_path)!r}))
    await environment.start(force_build=False)
    await environment.exec("sleep SECONDS & sleep SECONDS")
asyncio.run(main())
"""
    assert_nothing_is_left_when_killed(script, tmp_path)
