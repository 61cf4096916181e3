"""A zoo of what makes other sandboxes hang. Here each ends by itself, and says how.

`ends` is run as it is. `hangs` is the same thing with an end that never comes, for a timeout in
the middle of it. Both print "so far" first, and after both the same shell takes its next command.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import pytest

from docker_of_tests import RUNTIME
from hutch import Sandbox

GUARD = 60  # seconds: a test that fails here would otherwise never come back
SOON = 0.6 if RUNTIME == "runc" else 1.5  # seconds in which a program has begun


@dataclass(frozen=True)
class Animal:
    name: str
    ends: str
    hangs: str
    code: int = 0
    out: str = "so far\n"
    needs: str = "bash"

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


def _git(then: str) -> str:
    make = "git init -q r && cd r && git -c user.name=a -c user.email=a@b commit -qm first "
    return f"{make} --allow-empty && echo so far && git -c core.pager='less' --paginate {then}"


ZOO = [
    Animal("a heredoc without an end", "cat <<EOF\nso far", "cat <<EOF; sleep 1000\nso far"),
    Animal("an unclosed quote", "echo so far\necho 'abc",
           "echo so far; eval \"echo 'a\"; sleep 1000", code=2),
    Animal("set -e", "echo so far; set -e; false; echo no", "set -e; echo so far; sleep 1000", 1),
    Animal("exit", "echo so far; exit 3", "trap 'sleep 1000' EXIT; echo so far; exit 3", 3),
    Animal("exec bash", "echo so far; exec bash", "echo so far; exec bash -c 'sleep 1000; :'"),
    Animal("exec true", "echo so far; exec true", "echo so far; exec sleep 1000"),
    Animal("exec of something slow", "echo so far; exec sleep 2", ""),
    Animal("exec to nowhere", "echo so far; exec >/dev/null; echo no",
           "echo so far; exec >/dev/null; sleep 1000"),
    Animal("a child in the background", "sleep 1000 & echo so far",
           "sleep 1000 & echo so far; wait"),
    Animal("a child in a session of its own", "setsid sleep 1000 & echo so far",
           "setsid sleep 1000 & echo so far; setsid -w sleep 1000"),
    Animal("nohup", "nohup sleep 1000 & echo so far", "echo so far; nohup sleep 1000"),
    Animal("a child that holds stdout", "(sleep 1000; echo late) & echo so far",
           "echo so far; (sleep 1000; echo late) | cat"),
    Animal("a program that reads stdin", "echo so far; cat", "echo so far; cat; tail -f /dev/null"),
    Animal("read", "echo so far; read x", "echo so far; read x; read y < <(sleep 1000)", 1),
    Animal("vim", "echo so far; vim 2>&1 | tail -c 0; echo", "echo so far; vim; sleep 1000",
           out="so far\n\n", needs="vim"),
    Animal("less", "echo so far | less", "echo so far | less; (sleep 1000) | less", needs="less"),
    Animal("git log with a pager", _git("log -1 --format=%s"), _git("log -1; sleep 1000"),
           out="so far\nfirst\n", needs="git"),
    Animal("yes", "echo so far; yes | head -n 1 >/dev/null", "echo so far; yes"),
    Animal("a megabyte without a newline", "echo so far; head -c 1000000 /dev/zero | tr '\\0' x",
           "echo so far; head -c 1000000 /dev/zero; sleep 1000", out="so far\n" + "x" * 1_000_000),
    Animal("bytes that are no text", "echo so far; printf '\\377\\376'",
           "echo so far; while :; do printf '\\377'; sleep 0.1; done", out="so far\n\ufffd\ufffd"),
    Animal("a trap that ignores TERM", "trap '' TERM; kill $$; echo so far; trap - TERM",
           "trap '' TERM INT HUP; echo so far; sleep 1000"),
    Animal("stopping oneself", "echo so far; kill -STOP $$",
           "echo so far; kill -STOP $$; sleep 1000"),
    Animal("a child that stops itself", "sh -c 'kill -STOP $$; echo so far'",
           "echo so far; sh -c 'kill -STOP $$; sleep 1000'"),
    Animal("killing oneself", "echo so far; kill -9 $$",
           "echo so far; (sleep 1000; kill -9 $$)", code=137),
    Animal("killing everyone", "echo so far; kill -9 -1", "echo so far; kill -9 -1; sleep 1000"),
    Animal("closed stdout", "echo so far; exec >&-; echo no",
           "echo so far; exec >&- 2>&-; sleep 1000", code=1),
    Animal("a job that prints too late", "(sleep 0.2; echo late) & echo so far",
           "(sleep 0.2; echo late) & echo so far; sleep 1000"),
    Animal("no PROMPT_COMMAND", "unset PROMPT_COMMAND PS1 PS2; echo so far",
           "unset PROMPT_COMMAND; echo so far; sleep 1000"),
    Animal("PS1 that prints megabytes", "PS1='$(head -c 9000000 /dev/zero)'; echo so far",
           "PS1='$(yes)'; PROMPT_COMMAND=yes; echo so far; sleep 1000"),
    Animal("a loop of functions", "f() { echo so far; return 4; }; f",
           "f() { sleep 1000; }; g() { while :; do f; done; }; echo so far; while :; do g; done",
           code=4),
    Animal("a pipe without a reader", "echo so far; mkfifo p; echo x <>p >p",
           "echo so far; mkfifo p; echo x >p"),
    Animal("break and return", "echo so far; break 9 2>/dev/null; return 5",
           "echo so far; while :; do break 9; done; while :; do :; done", 5),
    Animal("a shell that closes every descriptor",
           "echo so far; for ((i = 3; i < 300; i++)); do eval \"exec $i>&-\"; done", "", code=1),
    Animal("a shell that can no longer answer", "echo so far; set -n", "", code=137),
]  # fmt: skip

# Particular to a kept shell: as a program it would be something else.
SHELL_ONLY = (
    "break and return",
    "a shell that closes every descriptor",
    "a shell that can no longer answer",
)
PROGRAMS = [animal for animal in ZOO if animal.name not in SHELL_ONLY]
HANGING = [animal for animal in ZOO if animal.hangs]


def _must_be_there(animal: Animal) -> None:
    if not shutil.which(animal.needs):
        pytest.skip(f"{animal.needs} is not on this machine")


def _takes_a_command(box: Sandbox) -> None:
    result = box.shell.run("echo next", timeout=GUARD)
    assert result.stdout.endswith("next\n") and result.exit_code == 0


@pytest.mark.parametrize("animal", ZOO, ids=str)
def test_a_command_ends_by_itself_in_a_shell(box: Sandbox, animal: Animal) -> None:
    _must_be_there(animal)
    result = box.shell.run(animal.ends, timeout=GUARD)
    assert not result.timed_out
    assert (result.exit_code, result.stdout) == (animal.code, animal.out)
    _takes_a_command(box)


@pytest.mark.parametrize("animal", PROGRAMS, ids=str)
def test_a_program_ends_by_itself(box: Sandbox, animal: Animal) -> None:
    _must_be_there(animal)
    result = box.commands.run(["bash", "-c", animal.ends], timeout=GUARD)
    assert not result.timed_out
    assert (result.exit_code, result.stdout) == (animal.code, animal.out)


@pytest.mark.parametrize("animal", HANGING, ids=str)
def test_a_timeout_in_the_middle_is_a_result(box: Sandbox, animal: Animal) -> None:
    _must_be_there(animal)
    with Sandbox.create() as other:  # for some of them kill all they can reach
        for soon in (SOON, 8 * SOON, GUARD):  # a busy machine needs more to begin
            program = other.commands.run(
                ["bash", "-c", animal.hangs], background=True, timeout=soon
            )
            results = (box.shell.run(animal.hangs, timeout=soon), program.wait(timeout=2 * GUARD))
            if all(result.stdout for result in results):
                break
        for result in results:
            assert (result.timed_out, result.exit_code) == (True, 124)
            assert result.stdout.startswith("so far\n")
    _takes_a_command(box)
