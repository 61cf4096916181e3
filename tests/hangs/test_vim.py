"""vim, as an agent types it: without a terminal at which to type `:q`."""

from __future__ import annotations

import shutil

import pytest

from hutch import Sandbox

pytestmark = pytest.mark.skipif(not shutil.which("vim"), reason="vim is not installed")


def test_vim_in_a_shell_gives_up_by_itself(box: Sandbox) -> None:
    result = box.shell.run("vim notes; echo ended with $?", timeout=60)
    assert not result.timed_out and "ended with 1" in result.stdout
    assert box.shell.run("echo next").stdout == "next\n"


def test_vim_as_a_program_gives_up_by_itself(box: Sandbox) -> None:
    result = box.commands.run(["vim", "notes"], timeout=60)
    assert not result.timed_out and result.exit_code in (
        1,
        129,
    )  # it dies of the hang-up, politely or not


def test_a_program_with_its_own_stdin_is_left_alone(box: Sandbox) -> None:
    result = box.commands.run("sleep 1.5; echo done", timeout=60)
    assert result.stdout == "done\n"
