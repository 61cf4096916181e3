"""What an agent does: run, look, correct, run again. The model is played by a list."""

from hutch import Sandbox

ATTEMPTS = [
    "print(sum(range(1, 11))",  # models forget brackets
    "print(sum(range(1, 11)))",
]

with Sandbox.create(memory="256m") as box:
    for attempt in ATTEMPTS:
        box.files.write("answer.py", attempt)
        result = box.shell.run("python3 answer.py", timeout=20)
        print(f"exit {result.exit_code}: {result.output.strip().splitlines()[-1]}")
        if result.ok:
            break
