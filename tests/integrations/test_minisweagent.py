"""Hutch as an environment of mini-swe-agent, with its deterministic model."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from leaving import assert_nothing_is_left_when_killed
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.exceptions import Submitted
from minisweagent.models.test_models import DeterministicModel

from hutch import BoxLost
from hutch.adapters.minisweagent import HutchEnvironment

FRAMEWORK = "mini-swe-agent"
PACKAGE = "mini-swe-agent"
PLUGGED = "Environment"


@pytest.fixture(scope="module")
def environment() -> Iterator[HutchEnvironment]:
    name = "hutch.adapters.minisweagent.HutchEnvironment"
    made = get_environment({"environment_class": name, "env": {"COLOUR": "green"}})
    assert isinstance(made, HutchEnvironment)
    with made:
        yield made


def step(command: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "extra": {"actions": [{"command": command}]}}


def test_an_agent_solves_its_task_in_a_box(environment: HutchEnvironment) -> None:
    submit = "printf 'COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\\n'; cat answer"
    model = DeterministicModel(outputs=[step("echo $COLOUR 42 > answer; false"), step(submit)])
    templates = {"system_template": "on {{system}}", "instance_template": "{{task}}"}
    agent = DefaultAgent(model, environment, **templates)
    result = agent.run("find the answer")
    assert (result["exit_status"], result["submission"]) == ("Submitted", "green 42\n")
    assert agent.messages[0]["content"] == "on Linux"
    assert "<returncode>1</returncode>" in str(agent.messages)


def test_both_streams_come_in_their_order(environment: HutchEnvironment) -> None:
    result = environment.execute({"command": "echo a; echo b >&2; echo c; exit 5"}, cwd="/tmp")
    assert result == {"output": "a\nb\nc\n", "returncode": 5, "exception_info": ""}
    assert environment.execute({"command": "pwd"}, cwd="/tmp")["output"] == "/tmp\n"


def test_a_timeout_kills_the_tree_and_is_said(environment: HutchEnvironment) -> None:
    command = "echo so far; setsid sleep 4401 & sleep 4401"
    result = environment.execute({"command": command}, timeout=1)
    assert (result["output"], result["returncode"]) == ("so far\n", -1)
    assert "killed after 1 seconds" in result["exception_info"]
    found = environment.execute({"command": "ps -eo args | grep -c '^sleep 4401'"})
    assert found["output"] == "0\n"


def test_a_submission_is_raised(environment: HutchEnvironment) -> None:
    command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo done"
    with pytest.raises(Submitted):
        environment.execute({"command": command})
    assert environment.execute({"command": f"{command}; false"})["returncode"] == 1


def test_a_directory_that_is_not_there_is_said(environment: HutchEnvironment) -> None:
    result = environment.execute({"command": "true"}, cwd="/nothing")
    assert result["returncode"] == -1 and "directory" in result["exception_info"]


def test_a_box_that_died_ends_the_run() -> None:
    with HutchEnvironment() as environment:
        assert environment.execute({"command": "exit 1"})["returncode"] == 1
        environment.box.close()
        agent = DefaultAgent(
            DeterministicModel(outputs=[step("true")]), environment,
            system_template="s", instance_template="t",
        )  # fmt: skip
        with pytest.raises(BoxLost):
            agent.run("go")


def test_closing_a_box_ends_the_command_that_runs_in_it() -> None:
    environment = HutchEnvironment(timeout=600)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            environment.execute({"command": "touch go; sleep 4402"})
        except BaseException as exc:
            failures.append(exc)

    thread = threading.Thread(target=work)
    assert environment.box.id
    thread.start()
    while not environment.box.files.exists("go"):
        time.sleep(0.02)
    environment.close()
    thread.join(30)
    assert isinstance(failures[0], BoxLost)


def test_what_is_serialized_says_how_to_make_it_again(environment: HutchEnvironment) -> None:
    config = environment.serialize()["info"]["config"]
    assert config["environment_type"] == "hutch.adapters.minisweagent.HutchEnvironment"
    assert HutchEnvironment(**config["environment"]).config == environment.config


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    script = """
from hutch.adapters.minisweagent import HutchEnvironment
HutchEnvironment(timeout=600).execute({"command": "sleep SECONDS & sleep SECONDS"})
"""
    assert_nothing_is_left_when_killed(script, tmp_path)
