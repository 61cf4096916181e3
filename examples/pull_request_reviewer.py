"""Review patches to a git repository: tests before and after. Install: pip install .

    python examples/pull_request_reviewer.py REPOSITORY PATCH...

Without arguments it reviews patches to a small repository that it makes itself. The code runs only
in sandboxes, on copies of the last commit. Passing tests are evidence, not proof: code can fool the
tests that run it. A patch that changes tests is left to a person.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from hutch import CommandFailed, Result, Sandbox

RUN_TESTS = ["python3", "-m", "unittest", "-v"]
TESTS = """import unittest, shop
class ShopTest(unittest.TestCase):
    def test_total(self): self.assertEqual(shop.total([1, 2]), 3)
    def test_empty(self): self.assertEqual(shop.total([]), 0)
"""
PATCH = """--- a/shop.py
+++ b/shop.py
@@ -1,2 +1,2 @@
 def total(prices):
-    return sum(prices)
+    {}
"""
DEMO_PATCHES = {
    "round.patch": PATCH.format("return round(sum(prices), 2)"),
    "broken.patch": PATCH.format("return prices[0] + sum(prices[1:])"),
    "hangs.patch": PATCH.format("while True: pass"),
    "cheats.patch": PATCH.format("import os; os._exit(0)"),
}


def run_tests(repository: Path, patch: str = "") -> tuple[Result, str]:
    """The tests of a copy with the patch applied, and the names of the files that it changed."""
    with Sandbox.create(memory="512m", cpus=1, pids=128) as box:
        files = subprocess.check_output(["git", "-C", repository, "archive", "HEAD"])
        box.commands.run(["tar", "-x"], stdin=files, check=True)
        apply = ["git", "apply", "--allow-empty", "--numstat", "--apply", "-"]
        changed = box.commands.run(apply, stdin=patch, timeout=20, check=True).stdout
        return box.commands.run(RUN_TESTS, timeout=5), changed


def passed(result: Result) -> int:
    return result.output.count(" ... ok\n")


def summary(result: Result) -> str:
    why = "timed out" if result.timed_out else "out of memory" if result.oom else ""
    return why or f"{passed(result)} passed, exit code {result.exit_code}"


def review(repository: Path, before: Result, patch: str) -> str:
    """The verdict, and why."""
    try:
        after, changed = run_tests(repository, patch)
    except CommandFailed as exc:
        return f"REJECT: it does not apply: {exc.result.stderr.strip()}"
    tests = f"before: {summary(before)}; after: {summary(after)}"
    if "test" in changed:
        return f"ASK A PERSON: it changes tests; {tests}"
    # An exit code of 0 is not enough: no test may be missing.
    verdict = "APPROVE" if after.ok and passed(after) >= passed(before) else "REJECT"
    return f"{verdict}: {tests}"


def make_demo(repository: Path) -> None:
    (repository / "shop.py").write_text("def total(prices):\n    return sum(prices)\n")
    (repository / "test_shop.py").write_text(TESTS)
    git = ["git", "-C", str(repository), "-c", "user.name=me", "-c", "user.email=me@example.com"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "A shop"]):
        subprocess.run([*git, *words], check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_demo(Path(folder))
        repository, *names = map(Path, sys.argv[1:] or [folder])
        patches = {str(name): name.read_text() for name in names} if sys.argv[1:] else DEMO_PATCHES
        before, _ = run_tests(repository)
        for name, patch in patches.items():
            print(f"{name}: {review(repository, before, patch)}", flush=True)


if __name__ == "__main__":
    main()
