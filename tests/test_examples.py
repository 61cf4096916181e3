"""Every program in examples/ runs as its reader would run it, and prints what it is about.

Those that use an agent framework are run in the environment that has it, by
tests/integrations/test_examples.py.
"""

from __future__ import annotations

import ast
import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from daemon_of_tests import wait_for

FOLDER = Path(__file__).parent.parent / "examples"
PROGRAMS = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.py"))}
WITH_FRAMEWORK = [name for name, text in PROGRAMS.items() if "from hutch.adapters." in text]
# The others, with what they print among other things: patterns, in this order.
SAYS = {
    "agent_loop.py": ["SyntaxError", "exit code 124", r"exit code 0: \[2, 3, 5", "answer: The pr"],
    "ci_runner.py": ["--- build: ", "the answer is right", "pipeline passed; files: app.tar.gz"],
    "data_analysis.py": ["AttributeError: ", "Turin +153803", r'chart-4.png: \{"type": "bar'],
    "from_e2b.py": ["adding\n 6", "IndexError", r"True and .* \[1, 2, 3\]", r"after sleep: \[1, 2"],
    "from_sandkasten.py": 2 * ["3 hello world in /tmp\none\ntwo\nsome notes\ntimed out: "],
    "grader.py": [
        "correct +all 3 passed\n",
        "wrong for negative numbers +1 of 3 passed, then: wrong answer",
        "crashes +0 of 3 passed, then: exit code 1",
        "infinite loop +0 of 3 passed, then: timed out",
        "fork bomb +0 of 3 passed, then: ",
        "memory hog +0 of 3 passed, then: (out of memory|exit code 1)",
        "endless output +0 of 3 passed, then: timed out",
        "forged result +0 of 3 passed, then: wrong answer",
        "searches for the answers +0 of 3 passed, then: wrong answer",
    ],
    "live_output.py": ["stdout: test 1", "stderr: test 3", "stopped at", "still running.*: 0"],
    "parallel_rollouts.py": ["'solved': 6", "mean reward 0.50 of 12 rollouts"],
    "pull_request_reviewer.py": [
        "round.patch: APPROVE: ",
        "broken.patch: REJECT: before: 2 passed, exit code 0; after: 1 passed, exit code 1",
        "hangs.patch: REJECT: .*after: timed out",
        "cheats.patch: REJECT: .*after: 0 passed, exit code 0",
    ],
}  # fmt: skip


def run(name: str, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(FOLDER / name), *words], capture_output=True,
        text=True, timeout=240, cwd=cwd, env=without_a_server(), check=False,
    )  # fmt: skip


def without_a_server() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HUTCH_")}
    return {**kept, "HUTCH_GAIN": "off"}


def assert_says(printed: str, patterns: list[str]) -> None:
    assert re.search(".*".join(patterns), printed, re.DOTALL), printed


@pytest.mark.parametrize(
    "name", [name for name in PROGRAMS if name not in (*WITH_FRAMEWORK, "web_service.py")]
)
def test_an_example_prints_what_it_is_about(name: str, tmp_path: Path) -> None:
    done = run(name, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_says(done.stdout, SAYS[name])
    made = {"data_analysis.py": ["chart-4.png"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == made.get(name, [])


def test_the_ci_runner_stops_at_the_first_failure_with_its_exit_code(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "input").write_text("from the project\n")
    step = '[[step]]\nname = "{}"\nrun = "{}"\n'
    (tmp_path / "steps.toml").write_text(
        step.format("read", "cat input > output; cat output")
        + step.format("fail", "echo because >&2; exit 7")
        + step.format("never", "echo not reached")
    )
    done = run("ci_runner.py", tmp_path, "steps.toml", "project")
    assert done.returncode == 7
    assert_says(done.stdout, ["from the project", "because", "pipeline failed at fail\n$"])
    assert [path.name for path in project.iterdir()] == ["input"]


def test_the_reviewer_tells_what_does_not_apply_and_what_changes_tests(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=me", "-c", "user.email=me@example.com"]
    (tmp_path / "test_it.py").write_text("VALUE = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "A test"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    diff = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-VALUE = 1\n+VALUE = 2\n"
    (tmp_path / "a").write_text(diff.format("test_it.py"))
    (tmp_path / "b").write_text(diff.format("no_such_file.py"))
    done = run("pull_request_reviewer.py", tmp_path, ".", "a", "b")
    assert done.returncode == 0, done.stderr
    assert_says(done.stdout, ["a: ASK A PERSON: it changes tests", "b: REJECT: it does not apply"])


def test_the_client_of_sandkasten_can_stay_as_it_is(tmp_path: Path) -> None:
    text = PROGRAMS["from_sandkasten.py"]
    theirs = text.replace("\nfrom hutch.compat.sandkasten import", "\nfrom sandkasten import")
    assert theirs != text
    (tmp_path / "unchanged.py").write_text(theirs)
    done = run(str(tmp_path / "unchanged.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert_says(done.stdout, SAYS["from_sandkasten.py"])


def test_the_web_service_keeps_visitors_apart(tmp_path: Path) -> None:
    with web_service(tmp_path, idle=3600) as port:
        ada, bob = Visitor(port), Visitor(port)
        assert ada.post("x = 41") == (200, "\n")
        assert bob.post("x") == (200, "NameError: name 'x' is not defined\n")
        assert ada.post("print('more'); x + 1") == (200, "more\n42\n")
        assert ada.cookie != bob.cookie
        assert ada.get() == "sandboxes: 2\n"
        assert ada.post("x" * 70_000)[0] == 413


def test_the_web_service_ends_idle_sandboxes(tmp_path: Path) -> None:
    with web_service(tmp_path, idle=1) as port:
        ada = Visitor(port)
        assert ada.post("x = 41")[0] in (200, 503)  # 503 if it was idle before its code came
        before = ada.cookie
        assert wait_for(lambda: ada.get() == "sandboxes: 0\n", 60)
        assert ada.post("x")[0] in (200, 503)
        assert before and ada.cookie not in ("", before)


@contextmanager
def web_service(folder: Path, idle: float) -> Iterator[int]:
    """Its port. It must end with Ctrl-C, and without a traceback."""
    process = subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, str(FOLDER / "web_service.py")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        env={**without_a_server(), "PORT": "0", "IDLE": str(idle)},
    )  # fmt: skip
    with process:
        try:
            assert process.stdout
            yield int(process.stdout.readline().rpartition(":")[2])
            process.send_signal(signal.SIGINT)
            printed, complaint = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, complaint
    assert "stopped; sandboxes that end now: " in printed and "Traceback" not in complaint


class Visitor:
    """A browser, as far as cookies go."""

    def __init__(self, port: int) -> None:
        self._port, self.cookie = port, ""

    def get(self) -> str:
        return self._ask("GET")[1]

    def post(self, code: str) -> tuple[int, str]:
        return self._ask("POST", code)

    def _ask(self, method: str, body: str | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request(method, "/", body, {"Cookie": self.cookie})
        answer = connection.getresponse()
        if given := answer.getheader("Set-Cookie"):
            self.cookie = given.partition(";")[0]
        return answer.status, answer.read().decode()


def test_every_example_is_in_the_index_and_run_by_a_test() -> None:
    index = (FOLDER / "README.md").read_text()
    assert [name for name in PROGRAMS if f"]({name})" not in index] == []
    assert {*SAYS, *WITH_FRAMEWORK, "web_service.py"} == set(PROGRAMS)
    others = {path.name for path in FOLDER.iterdir()} - {*PROGRAMS, "README.md"}
    assert others <= {"__pycache__", ".mypy_cache"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_is_short_and_says_how_to_install_what_it_needs(name: str) -> None:
    lines = PROGRAMS[name].splitlines()
    assert 30 <= len(lines) <= 90
    first = (ast.get_docstring(ast.parse(PROGRAMS[name])) or "").splitlines()[0]
    extra = re.search(r"from hutch\.adapters\.(\w+) import", PROGRAMS[name])
    wanted = f"'.[{extra[1].replace('_', '-')}]'" if extra else "."
    assert first.endswith(f" Install: pip install {wanted}")
