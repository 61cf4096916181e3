"""Grade untrusted submissions against hidden tests. Install: pip install .

A submission is a program that reads stdin and prints an answer. Only the input of a test enters the
sandbox. The expected answer stays in this process and is compared here, so a submission can neither
read it nor decide its own grade. Each test has a fresh sandbox: nothing carries over to the next.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hutch import HutchError, Sandbox


@dataclass
class Test:
    stdin: str
    expected: str


HIDDEN_TESTS = [Test("3 4", "7"), Test("-5 5", "0"), Test("1000000 8234567", "9234567")]

SEARCH = """
import os, re
wanted = re.compile(rb'Test."' + re.escape(input()).encode() + rb'", "(.*?)".')
for folder, folders, names in os.walk("/"):
    folders[:] = [name for name in folders if name not in ("proc", "sys", "usr")]
    for path in (os.path.join(folder, name) for name in names):
        if os.path.isfile(path) and os.access(path, os.R_OK):
            if found := wanted.search(open(path, "rb").read()):
                print(found[1].decode())
"""
SUBMISSIONS = {
    "correct": "a, b = map(int, input().split())\nprint(a + b)",
    "wrong for negative numbers": "a, b = map(int, input().split())\nprint(abs(a) + abs(b))",
    "crashes": "raise RuntimeError('not finished')",
    "infinite loop": "while True: pass",
    "fork bomb": "import os\nwhile True: os.fork()",
    "memory hog": "hog = [bytearray(10**6) for _ in range(10**6)]",
    "endless output": "while True: print('7' * 1000)",
    "forged result": "import os\nprint('3 of 3 tests passed', flush=True)\nos._exit(0)",
    "searches for the answers": SEARCH,
}


def run(code: str, test: Test) -> str:
    """The outcome of one test: "passed", or why not."""
    with Sandbox.create(memory="128m", cpus=1, pids=32, disk="16m") as box:
        box.files.write("main.py", code)
        result = box.commands.run(["python3", "main.py"], stdin=test.stdin, timeout=5)
    if result.timed_out:
        return "timed out"
    if result.oom:
        return "out of memory"
    if result.exit_code != 0:
        return f"exit code {result.exit_code}"
    return "passed" if result.stdout.strip() == test.expected else "wrong answer"


def grade(code: str) -> str:
    """How many tests passed, and why the first one failed that did."""
    for passed, test in enumerate(HIDDEN_TESTS):
        try:
            outcome = run(code, test)
        except HutchError as exc:  # the sandbox itself failed: no guess at a grade
            return f"not graded: {exc}"
        if outcome != "passed":
            return f"{passed} of {len(HIDDEN_TESTS)} passed, then: {outcome}"
    return f"all {len(HIDDEN_TESTS)} passed"


def main() -> None:
    with ThreadPoolExecutor(max_workers=4) as workers:
        grades = workers.map(grade, SUBMISSIONS.values())
        for name, outcome in zip(SUBMISSIONS, grades, strict=True):
            print(f"{name:27} {outcome}", flush=True)


if __name__ == "__main__":
    main()
