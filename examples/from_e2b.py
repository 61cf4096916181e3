"""Move a program from E2B to Hutch, line by line. Install: pip install .

Each "E2B:" comment is the line as it was, with e2b-code-interpreter 2; below it is the line that
replaces it. No account and no API key: the sandbox runs on this machine, or on your own server with
HUTCH_URL and HUTCH_API_KEY set. There is no network in a sandbox: packages come with the image.
"""

# E2B: from e2b_code_interpreter import CommandExitException, Sandbox, TimeoutException
from hutch import CommandFailed, Sandbox


def main() -> None:
    # E2B: with Sandbox.create(timeout=300, envs={"STAGE": "test"}, metadata={"u": "ada"}) as sbx:
    with Sandbox.create(ttl=300, env={"STAGE": "test"}, labels={"u": "ada"}) as sbx:
        # E2B: sbx.files.write("/home/user/numbers.txt", "1\n2\n3\n")
        # Relative paths start at /workspace, and so do programs.
        sbx.files.write("numbers.txt", "1\n2\n3\n")
        print("files:", [entry.name for entry in sbx.files.list(".")])  # the same

        sbx.run_code("numbers = [int(line) for line in open('numbers.txt')]")  # the same
        execution = sbx.run_code("print('adding'); sum(numbers)")
        # E2B: print("".join(execution.logs.stdout), execution.text)
        print(execution.logs.stdout, execution.text)  # text, not a list of texts
        execution = sbx.run_code("numbers[7]")
        if execution.error:  # the same: name, value, traceback
            print(f"error: {execution.error.name}: {execution.error.value}")

        # E2B: execution = sbx.run_code("while True: pass", timeout=1)   # raises TimeoutException
        execution = sbx.run_code("while True: pass", timeout=1)
        print("timed out:", execution.timed_out, "and numbers are still", numbers_in(sbx))

        # E2B: try: sbx.commands.run("exit 3")                  # every failure raises
        # E2B: except CommandExitException as exc: print(exc.exit_code)
        print("exit code:", sbx.commands.run("exit 3").exit_code)  # a failure is a result
        try:
            sbx.commands.run("echo no >&2; exit 3", check=True)  # or raise, if you ask for it
        except CommandFailed as exc:
            print(f"failed: exit code {exc.result.exit_code}, {exc.result.stderr.strip()}")
        # E2B: commands end after 60 seconds by default; here they have no timeout unless you say.
        print("stage:", sbx.commands.run("echo $STAGE", timeout=60).stdout.strip())

        # E2B: handle = sbx.commands.run("sleep 1000", background=True); handle.kill()   # the same
        handle = sbx.commands.run("sleep 1000", background=True)
        handle.kill()

        # E2B: sbx.set_timeout(600)
        sbx.extend(600)
        # E2B: sbx.pause(); sbx = Sandbox.connect(sbx.sandbox_id)
        sbx.hibernate()  # the next call wakes it
        print("after sleep:", numbers_in(sbx), "in sandbox", sbx.id)
        # E2B: sbx.kill()   # the same; the end of the `with` does it, too


def numbers_in(sbx: Sandbox) -> str | None:
    return sbx.run_code("numbers").text


if __name__ == "__main__":
    main()
