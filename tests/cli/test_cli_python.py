"""`hutch python`: code from a file, a word or a pipe, and what is shown of it."""

from __future__ import annotations

import base64
import json
import signal
from pathlib import Path

import pytest
from prompt import PATIENCE, Terminal, Traces, boxes, hutch, start  # noqa: F401

pytestmark = pytest.mark.usefixtures("boxes")
PIXEL = base64.b64encode(b"\x89PNG pretend").decode()
PICTURE = f"""
import base64
class Picture:
    def __repr__(self): return 'a picture'
    def _repr_png_(self): return base64.b64decode('{PIXEL}')
"""


def python(*words: str, **options):
    return hutch("python", "--image", "host", *words, **options)


# --- where code comes from ----------------------------------------------------------------


def test_the_value_of_the_last_expression_is_printed() -> None:
    done = python("-c", "print('hi')\nsum(range(10))")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"hi\n45\n", b"")


def test_code_can_be_a_file_with_arguments(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import sys\nprint(sys.argv[1:], __name__)")
    done = python(str(path), "a b", "--json", "-c")
    assert (done.returncode, done.stdout) == (0, b"['a b', '--json', '-c'] __main__\n")


@pytest.mark.parametrize("words", [["-", "x"], []])
def test_code_can_come_from_a_pipe(words: list[str]) -> None:
    done = python(*words, input="print('é', len(__import__('sys').argv))".encode())
    assert done.stdout == f"é {1 + len(words[1:])}\n".encode()


def test_a_command_line_is_argv_as_python_has_it() -> None:
    assert python("-c", "import sys; sys.argv", "x", "-y").stdout == b"['-c', 'x', '-y']\n"


def test_a_file_that_cannot_be_read_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_bytes(b"\xff\xfe")
    for name, why in (("no.py", b"No such file"), (".", b"directory"), ("bad.py", b"UTF-8")):
        done = python(str(tmp_path / name))
        assert done.returncode == 125 and done.stdout == b""
        assert done.stderr.startswith(b"hutch: cannot read ") and why in done.stderr
        assert done.stderr.count(b"\n") == 1


def test_without_code_at_a_terminal_there_is_advice() -> None:
    with Terminal("python") as terminal:
        assert terminal.end() == 125 and b"no code given" in terminal.screen
    assert b"-c needs code" in python("-c").stderr


# --- what is shown ------------------------------------------------------------------------


def test_output_comes_as_it_is_made() -> None:
    code = "import sys, time\nprint('up')\ntime.sleep(1000)"
    with start("python", "--image", "host", "-c", code) as process:
        assert process.stdout and process.stdout.readline() == b"up\n"
        traces = Traces(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130 and traces.left() == []


def test_pictures_are_written_to_files_that_are_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = python("--out", str(out), "-c", PICTURE + "display(Picture())\nprint('x')\nPicture()")
    assert (done.returncode, done.stdout) == (0, b"x\n")
    assert sorted(path.name for path in out.iterdir()) == ["cell-1.png", "cell-2.png"]
    assert (out / "cell-1.png").read_bytes() == b"\x89PNG pretend"
    assert done.stderr.decode().splitlines() == [
        f"hutch: wrote {out}/cell-1.png",
        f"hutch: wrote {out}/cell-2.png",
    ]


def test_pictures_go_to_a_new_folder_unless_told_otherwise(tmp_path: Path) -> None:
    done = python("-c", PICTURE + "Picture()", env={"TMPDIR": str(tmp_path), "PATH": "/usr/bin"})
    (written,) = tmp_path.glob("hutch-python-*/cell-1.png")
    assert done.stderr.decode() == f"hutch: wrote {written}\n"


def test_what_is_too_large_to_be_sent_is_fetched(tmp_path: Path) -> None:
    code = "class H:\n    def _repr_html_(self): return 'x' * 9_000_000\nH()"
    done = python("--out", str(tmp_path), "-c", code)
    assert done.returncode == 0
    assert (tmp_path / "cell-1.html").stat().st_size == 9_000_000


def test_an_exception_gives_1_and_the_traceback() -> None:
    done = python("-c", "print('so far')\ndef f():\n    return 1 / 0\nf()")
    assert (done.returncode, done.stdout) == (1, b"so far\n")
    assert b"return 1 / 0" in done.stderr
    assert done.stderr.endswith(b"ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    ("code", "status"),
    [("sys.exit(3)", 3), ("sys.exit()", 0), ("exit(0)", 0), ("sys.exit(256)", 0)],
)
def test_sys_exit_is_our_exit(code: str, status: int) -> None:
    done = python("-c", f"import sys\n{code}")
    assert (done.returncode, done.stderr) == (status, b"")


def test_sys_exit_with_a_message_gives_1_and_the_message() -> None:
    done = python("-c", "import sys\nsys.exit('oh no')")
    assert (done.returncode, done.stderr) == (1, b"oh no\n")


def test_a_timeout_gives_124() -> None:
    done = python("--timeout", "500ms", "-c", "print('so far')\nwhile True: pass")
    assert (done.returncode, done.stdout) == (124, b"so far\n")
    assert done.stderr == b"hutch: timed out after 0.5 s, and stopped\n"


def test_a_kernel_that_dies_gives_what_killed_it() -> None:
    done = python("-c", "import os\nos._exit(7)")
    assert (done.returncode, done.stderr) == (7, b"hutch: the kernel ended: exited with code 7\n")
    assert python("-c", "import ctypes\nctypes.string_at(0)").returncode == 139


def test_json_has_everything_and_nothing_else_is_printed() -> None:
    done = python("--json", "-c", "print('out')\n1 / 0")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and done.stderr == b""
    assert report["logs"]["stdout"] == "out\n" and report["error"]["name"] == "ZeroDivisionError"
    assert report["box"]["image"] == "host"
    report = json.loads(python("--json", "-c", "6 * 7").stdout)
    assert report["results"][0]["text"] == "42" and report["error"] is None


def test_json_tells_our_own_failures_too() -> None:
    done = python("--json", "--memory", "1k", "-c", "1")
    assert done.returncode == 125 and json.loads(done.stdout)["error"]["code"] == "invalid_request"


def test_escapes_are_shown_and_not_obeyed() -> None:
    code = "class A:\n    def __repr__(self): return '\\x1b[6n'\nprint('\\x1b[2J')\nA()"
    with Terminal("python", "--image", "host", "-c", code) as terminal:
        assert terminal.end() == 0
        assert b"\x1b" not in terminal.screen and b"^[[2J" in terminal.screen


def test_a_workspace_can_be_worked_on(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def greet(): return 'from a file'")
    done = python("--workspace", str(tmp_path), "-c", "import helper\nhelper.greet()")
    assert done.stdout == b"'from a file'\n"


def test_a_traceback_names_the_file_or_the_first_cell(tmp_path: Path) -> None:
    (tmp_path / "analysis.py").write_text("def f():\n    return 1 / 0\nf()\n")
    done = hutch("python", "--image", "host", "analysis.py", cwd=tmp_path)
    assert b'File "analysis.py", line 3, in <module>' in done.stderr
    assert b'File "analysis.py", line 2, in f' in done.stderr and b"<cell" not in done.stderr
    assert b'File "<cell 1>", line 1' in hutch("python", "--image", "host", "-c", "1/0").stderr
    shown = json.loads(hutch("python", "--image", "host", "--json", "-c", "1/0").stdout)
    assert shown["execution_count"] == 1 and "<cell 1>" in shown["error"]["traceback"]
