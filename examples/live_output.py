"""Follow the output of a command, and stop it when you have seen enough. Install: pip install .

For builds, test runs and servers: output is shown while it is made, and leaving the stream early
ends the command with everything that it started.
"""

from hutch import Chunk, Sandbox

# A test run that goes on although its third test hangs.
TESTS = """
for number in 1 2; do echo "test $number: passed"; sleep 0.1; done
echo "test 3: FAILED" >&2
sleep 1000
"""


def main() -> None:
    with Sandbox.create(memory="256m") as box:
        stream = box.commands.stream(TESTS, timeout=60)
        for item in stream:
            if not isinstance(item, Chunk):  # the last item is the Result
                print(f"ended by itself: exit code {item.exit_code}, timed out: {item.timed_out}")
                break
            print(f"{item.stream}: {item.text}", end="", flush=True)
            if "FAILED" in item.text:
                stream.close()
                print("stopped at the first failure")
                break
        running = [process for process in box.commands.list() if process.exit_code is None]
        print(f"still running in the sandbox: {len(running)}")


if __name__ == "__main__":
    main()
