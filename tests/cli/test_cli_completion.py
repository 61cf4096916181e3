"""Completion, in the shells that it is for."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from must_work import need
from prompt import PATIENCE, hutch

# What is typed, and what must be among the answers.
TYPED = [
    ("hutch ru", "run"), ("hutch run --mem", "--memory"), ("hutch image bu", "build"),
    ("hutch image build --pac", "--packages"), ("hutch run --image dat", "data"),
    ("hutch create --on-idle hib", "hibernate"), ("hutch image rm dat", "data"),
    ("hutch key revoke 1f4", "1f4c9a02"), ("hutch workspace rm not", "notes"),
    ("hutch create --workspace-id not", "notes"), ("hutch run --backend dock", "docker"),
    ("hutch help doc", "doctor"),
]  # fmt: skip


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With this `hutch` on the PATH."""
    folder = tmp_path_factory.mktemp("bin")
    # What a server would list is made up, so that no server is needed.
    (folder / "hutch").write_text(f"""#!/bin/sh
case "$*" in
  "key ls") printf 'KEY       OWNER\\n1f4c9a02  ada\\n' ;;
  "workspace ls") printf 'WORKSPACE  SIZE\\nnotes      3 B\\n' ;;
  *) exec {shlex.quote(sys.executable)} -m hutch "$@" ;;
esac
""")
    (folder / "hutch").chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(folder), "HUTCH_DATA_DIR": str(folder)}


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The file that `hutch completion` prints for the shell that the test is named after."""
    shell = request.node.name.removeprefix("test_").partition("_")[0]
    if not shutil.which(shell):
        need(shell, f"there is no {shell} here")
    done = hutch("completion", shell)
    assert (done.returncode, done.stderr) == (0, b"")
    (tmp_path / shell).write_bytes(done.stdout)
    return str(tmp_path / shell)


def answers(argv: list[str], env: dict[str, str]) -> list[str]:
    done = subprocess.run(
        argv, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_bash_completes_what_is_typed(script: str, env: dict[str, str]) -> None:
    ask = "\n".join(
        f"COMP_WORDS=({typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _hutch; "
        'echo "${COMPREPLY[@]}"'
        for typed, _ in [*TYPED, ("hutch run -- --mem", "")]
    )
    found = answers(["bash", "-c", f"source {script}\n{ask}"], env)
    assert found == [*(wanted for _, wanted in TYPED), ""]  # the last is an option of another


def test_bash_runs_nothing_of_what_a_server_answers(
    script: str, env: dict[str, str], tmp_path: Path
) -> None:
    lines = shlex.quote(f"$(touch {tmp_path}/run)")
    ask = f"hutch() {{ echo {lines}; }}; COMP_WORDS=(hutch exec ''); COMP_CWORD=2; _hutch"
    found = answers(["bash", "-c", f'source {script}\n{ask}; echo "${{COMPREPLY[@]}}"'], env)
    assert found == [f"$(touch {tmp_path}/run)"] and not (tmp_path / "run").exists()


def test_fish_completes_what_is_typed(script: str, env: dict[str, str]) -> None:
    ask = "; ".join(f"complete -C {shlex.quote(typed)}" for typed, _ in TYPED)
    found = answers(["fish", "-c", f"source {script}; {ask}"], env)
    assert [line.partition("\t")[0] for line in found] == [wanted for _, wanted in TYPED]


def test_fish_describes_options_and_images(script: str, env: dict[str, str]) -> None:
    asked = ("hutch run --workd", "hutch run --image dat", "hutch serve --back")
    ask = "; ".join(f"complete -C {shlex.quote(typed)}" for typed in asked)
    workdir, image, backend = answers(["fish", "-c", f"source {script}; {ask}"], env)
    assert image.startswith("data\tpackages not built matplotlib")
    assert backend == "--backend\twhat makes the boxes: namespaces, docker or kubernetes"
    assert workdir.startswith("--workdir\tthe folder to run in")


def test_fish_names_no_files_where_only_sessions_go(
    script: str, env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    ask = f"cd {tmp_path}; complete -C 'hutch rm '; complete -C 'hutch cp '"
    (tmp_path / "hutch").write_text("#!/bin/sh\necho 1f4c9a02\n")
    (tmp_path / "hutch").chmod(0o755)
    made_up = env | {"PATH": f"{tmp_path}:{env['PATH']}"}
    found = answers(["fish", "-c", f"source {script}; {ask}"], made_up)
    assert found[0] == "1f4c9a02" and found.count("file") == 1


def test_zsh_completes_what_is_typed(script: str, env: dict[str, str]) -> None:
    pid, terminal = pty.fork()
    if not pid:
        os.execvpe("zsh", ["zsh", "-f"], env)
    try:
        expect(
            terminal, f"autoload -U compinit; compinit -D -u; . {script}; echo rea''dy\n", "ready"
        )
        for typed, wanted in TYPED:
            whole = f"{typed.rpartition(' ')[0]} {wanted}"
            expect(terminal, f"\x15{typed}\t", whole)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)


def expect(terminal: int, keys: str, text: str) -> None:
    os.write(terminal, keys.encode())
    screen, deadline = b"", time.monotonic() + PATIENCE
    while text.encode() not in screen:
        left = deadline - time.monotonic()
        assert left > 0 and select.select([terminal], [], [], left)[0], screen
        screen += os.read(terminal, 65536)


def test_the_lines_of_the_help_can_be_pasted(env: dict[str, str], tmp_path: Path) -> None:
    text = hutch("completion", "--help").stdout.decode().partition("compinit):\n")[2]
    lines = [line[len("  bash   ") :] for line in text.splitlines()]
    assert "#" not in text  # no comment in a zsh that reads from a terminal
    pasted = "\n".join(["set -e", *lines])
    done = subprocess.run(["bash", "-c", pasted], env=env | {"HOME": str(tmp_path)}, check=True,
                          capture_output=True, timeout=PATIENCE)  # fmt: skip
    assert (done.stdout, done.stderr) == (b"", b"")
    assert (tmp_path / ".bashrc").read_text() == "source <(hutch completion bash)\n"
    assert (tmp_path / ".zshrc").read_text() == "source <(hutch completion zsh)\n"
    assert (tmp_path / ".config/fish/completions/hutch.fish").stat().st_size


def test_the_help_of_a_shell_is_that_of_the_command() -> None:
    assert hutch("completion", "-s", "bash").stdout == hutch("completion", "bash").stdout
    assert hutch("completion", "bash", "--help").stdout == hutch("completion", "--help").stdout


def test_a_shell_without_completion_is_refused() -> None:
    done = hutch("completion", "tcsh")
    assert done.returncode == 125 and b"known: bash, zsh, fish" in done.stderr
