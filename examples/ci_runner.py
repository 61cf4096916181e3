"""Run the steps of a CI pipeline, each in a fresh sandbox. Install: pip install .

    python examples/ci_runner.py [PIPELINE.toml [PROJECT]]

Steps share a copy of the project's files and nothing else: no processes, no variables, no network.
The first step that fails ends the run, and its exit code is the exit code of this program.
"""

import shutil
import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from hutch import Sandbox

DEMO = """
[[step]]
name = "build"
run = "mkdir -p build && echo 'print(6 * 7)' > build/app.py && echo built"

[[step]]
name = "test"
run = "test $(python3 build/app.py) = $EXPECTED && echo 'the answer is right'"
env = { EXPECTED = "42" }
timeout = 60
memory = "256m"

[[step]]
name = "package"
run = "tar -czf app.tar.gz build && tar -tzf app.tar.gz"
"""


@dataclass
class Step:
    name: str
    run: str
    timeout: float = 600
    memory: str = "1g"
    env: dict[str, str] = field(default_factory=dict)


def show(text: str) -> None:
    print(text, end="", flush=True)


def run_step(step: Step, workspace: Path) -> int:
    """Run one step and show its output as it comes. Returns its exit code."""
    show(f"--- {step.name}: {step.run}\n")
    with Sandbox.create(workspace=workspace, env=step.env, memory=step.memory) as box:
        result = box.commands.run(step.run, timeout=step.timeout, on_stdout=show, on_stderr=show)
    if result.timed_out:
        show(f"--- {step.name}: stopped after {step.timeout:g} seconds\n")
    elif result.oom:
        show(f"--- {step.name}: out of memory ({step.memory})\n")
    else:
        show(f"--- {step.name}: exit code {result.exit_code}, {result.duration_ms} ms\n")
    return result.exit_code


def main() -> int:
    pipeline = tomllib.loads(Path(sys.argv[1]).read_text() if sys.argv[1:] else DEMO)
    steps = [Step(**table) for table in pipeline["step"]]
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder, "project")
        if sys.argv[2:]:
            shutil.copytree(sys.argv[2], workspace, symlinks=True)
        else:
            workspace.mkdir()
        for step in steps:
            if exit_code := run_step(step, workspace):
                print(f"pipeline failed at {step.name}")
                return exit_code
        print("pipeline passed; files:", *sorted(path.name for path in workspace.iterdir()))
        return 0


if __name__ == "__main__":
    sys.exit(main())
