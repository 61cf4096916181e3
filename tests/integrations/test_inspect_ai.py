"""Hutch as a sandbox of Inspect: its self-check, an evaluation, and what an interrupt leaves."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import basic_agent
from inspect_ai.tool import bash
from inspect_ai.util import OutputLimitExceededError, SandboxEnvironment, SandboxEnvironmentSpec
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.environment import SandboxUnavailableError
from inspect_ai.util._sandbox.limits import override_sandbox_output_limit
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *  # noqa: F403
from leaving import new_mark, running, wait_until

import hutch
from hutch.adapters.inspect_ai import HutchConfig, HutchSandboxEnvironment

FRAMEWORK = "Inspect"
PACKAGE = "inspect-ai"
PLUGGED = "sandbox environment `hutch`"
SUITE = (
    "inspect_ai.util._sandbox.self_check, 44 of 44 in an image to which we add an `adduser`; "
    "43 in the default image, where no users can be added"
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Stands in for an image's own `adduser`: a line in each list of users, and a home. Root in a box
# has no capabilities and cannot give the home away, which Debian's program insists on. It names
# BusyBox because the self-check then calls it the short way: `adduser -D NAME`.
ADDUSER = """#!/bin/sh
if [ "$1" = --help ]; then echo "BusyBox-like: adduser -D NAME"; exit 0; fi
name=$2
echo "$name:x:1234:" >> /etc/group && echo "$name:x:1234:1234::/home/$name:/bin/sh" >> /etc/passwd
mkdir -p "/home/$name"
"""


def image_with_users(where: Path) -> Path:
    """A root file system in which root can add users: busybox, and the program above."""
    programs = subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True)
    links = [f"usr/bin/{name}" for name in programs.stdout.split() if name != "busybox"]
    people = "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
    files = {"etc/passwd": (people, 0o644), "etc/group": ("root:x:0:\nuser:x:1000:\n", 0o644),
             "usr/bin/adduser": (ADDUSER, 0o755)}  # fmt: skip
    tar = where / "root.tar"
    with tarfile.open(tar, "w") as archive:
        archive.add("/bin/busybox", "usr/bin/busybox")
        for name, target in [("bin", "usr/bin"), *((link, "busybox") for link in links)]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
        for name, (text, mode) in files.items():
            info = tarfile.TarInfo(name)
            info.mode, info.size = mode, len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return tar


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def environment(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[HutchSandboxEnvironment]:
    folder = tmp_path_factory.mktemp("inspect")
    before = os.environ.get("HUTCH_DATA_DIR")
    os.environ["HUTCH_DATA_DIR"] = str(folder / "data")
    tar = image_with_users(folder)
    subprocess.run(
        [sys.executable, "-m", "hutch", "image", "import", tar, "users"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    cls = registry_find_sandboxenv("hutch")  # by the entry point
    assert cls is HutchSandboxEnvironment
    made = await cls.sample_init("t", HutchConfig(image="users"), {})
    yield made["default"].as_type(HutchSandboxEnvironment)
    await cls.sample_cleanup("t", None, made, interrupted=False)
    if before is None:
        del os.environ["HUTCH_DATA_DIR"]
    else:
        os.environ["HUTCH_DATA_DIR"] = before


@pytest.fixture
def sandbox_env(environment: HutchSandboxEnvironment) -> SandboxEnvironment:
    return environment


async def test_nothing_of_the_self_check_is_left_out() -> None:
    assert len(self_check.__all__) == 44


async def test_in_the_default_image_all_of_it_passes_but_adding_a_user() -> None:
    made = await HutchSandboxEnvironment.sample_init("t", None, {})
    failed = {}
    for name in self_check.__all__:
        try:
            await getattr(self_check, name)(made["default"])
        except Exception as exc:
            failed[name] = str(exc)
    await HutchSandboxEnvironment.sample_cleanup("t", None, made, interrupted=False)
    message = failed.pop("test_exec_as_user")
    assert message.startswith("Failed to add user: ") and failed == {}


async def test_output_beyond_the_limit_stops_the_command(sandbox_env: SandboxEnvironment) -> None:
    limit = override_sandbox_output_limit(100_000, "exec")
    with limit, pytest.raises(OutputLimitExceededError) as caught:
        await sandbox_env.exec(["sh", "-c", "yes"])
    assert len(caught.value.truncated_output or "") == 100_000


async def test_a_command_of_any_length_runs_and_leaves_no_file(
    sandbox_env: SandboxEnvironment,
) -> None:
    line = f"echo {'x' * 200_000} | wc -c; echo $0 $1"
    done = await sandbox_env.exec(["sh", "-e", "-c", line, "name", "first"])
    assert done.stdout.split() == ["200001", "name", "first"]
    done = await sandbox_env.exec(["printf", "%s", *["x" * 1000] * 300])
    assert done.stdout == "x" * 300_000
    assert "hutch-script" not in (await sandbox_env.exec(["ls", "-A", "/tmp"])).stdout


async def test_cancelling_a_command_kills_the_whole_tree(sandbox_env: SandboxEnvironment) -> None:
    mark = new_mark()
    line = f"sleep {mark} & touch started; sleep {mark}"
    work = asyncio.ensure_future(sandbox_env.exec(["sh", "-c", line]))
    while not (await sandbox_env.exec(["test", "-e", "started"])).success:
        await asyncio.sleep(0.02)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not running(mark)


async def test_a_box_that_died_is_told_apart_from_a_command_that_failed() -> None:
    made = await HutchSandboxEnvironment.sample_init("t", None, {})
    environment = made["default"].as_type(HutchSandboxEnvironment)
    assert (await environment.exec(["false"])).returncode == 1
    assert (await environment.exec(["no-such-program"])).returncode == 127
    await environment.box.close()
    for command in (["true"], ["sh", "-c", f": {'x' * 200_000}"]):
        with pytest.raises(SandboxUnavailableError):
            await environment.exec(command)
    with pytest.raises(SandboxUnavailableError):
        await environment.read_file("x")
    await HutchSandboxEnvironment.sample_cleanup("t", None, made, interrupted=False)


async def test_a_config_survives_a_log() -> None:
    config = HutchConfig(image="host", memory="512m", env={"A": "b"})
    assert HutchSandboxEnvironment.config_deserialize(config.model_dump()) == config
    made = await HutchSandboxEnvironment.sample_init("t", config, {})
    environment = made["default"].as_type(HutchSandboxEnvironment)
    assert (await environment.exec(["sh", "-c", "echo $A"])).stdout == "b\n"
    await HutchSandboxEnvironment.task_cleanup("t", config, cleanup=True)
    assert environment.box.id not in {info.id for info in await hutch.AsyncSandbox.list()}


# --- whole evaluations ----------------------------------------------------------------


def said(output: ModelOutput) -> ModelOutput:
    output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    return output


def call(name: str, **arguments: str) -> ModelOutput:
    return said(ModelOutput.for_tool_call("mockllm/model", name, arguments))


def scripted(command: str, samples: int) -> dict[str, Any]:
    """An agent that runs a command in its box and is done, for some samples, one by one."""
    files = {"data.txt": "40 2"}
    task = Task(
        dataset=[Sample(input="count", target="42", files=files) for _ in range(samples)],
        solver=basic_agent(tools=[bash(timeout=600)]),
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("hutch", HutchConfig(memory="512m", env={"A": "b"})),
    )
    outputs = [call("bash", command=command), call("submit", answer="42")] * samples
    model = get_model("mockllm/model", custom_outputs=outputs)
    return {"tasks": task, "model": model, "max_samples": 1}


async def test_an_evaluation_has_a_box_for_each_sample(tmp_path: Path) -> None:
    command = "cat data.txt; ls | wc -l; touch mark"
    [log] = await eval_async(**scripted(command, 2), log_dir=str(tmp_path))
    assert log.status == "success", log.error
    for sample in log.samples or []:
        assert sample.scores["includes"].value == "C"
        [told] = [message.text for message in sample.messages if message.role == "tool"][:1]
        assert told.strip() == "40 21"  # no sample sees the mark of another
    assert not HutchSandboxEnvironment._open


async def test_an_interrupted_evaluation_leaves_nothing(tmp_path: Path) -> None:
    mark, script = new_mark(), tmp_path / "script.py"
    script.write_text(
        # A process in the background may have been told to ignore it.
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from inspect_ai import eval\nfrom test_inspect_ai import scripted\n"
        f"eval(**scripted('sleep {mark}', 1), log_dir={str(tmp_path)!r})"
    )
    run = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(True, mark)
        run.send_signal(signal.SIGINT)
        run.wait(60)
    finally:
        run.kill()
        run.wait()
    wait_until(False, mark)


async def test_what_its_entry_point_loads_has_no_engine_and_no_client() -> None:
    code = "import sys, hutch.adapters.inspect_ai; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"hutch.engine", "hutch.client", "hutch.tools"} & set(done.stdout.split())
