"""What a cell shows, and in which forms."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kernels_of_tests import Kernel

KINDS = """
class Everything:
    def __repr__(self): return 'everything'
    def _repr_html_(self): return '<b>html</b>'
    def _repr_markdown_(self): return '*markdown*'
    def _repr_svg_(self): return '<svg/>'
    def _repr_png_(self): return b'png'
    def _repr_jpeg_(self): return 'anBlZw=='
    def _repr_pdf_(self): return b'pdf', {'pages': 1}
    def _repr_latex_(self): return '$latex$'
    def _repr_json_(self): return {'a': [1, None]}
    def _repr_javascript_(self): return 'alert()'
"""


@pytest.fixture(autouse=True)
def _no_folder_is_left() -> Iterator[None]:
    folder = Path("/tmp/hutch-results")
    known = folder.exists()
    yield
    if not known:
        shutil.rmtree(folder, ignore_errors=True)


def mime(ran: Any) -> dict[str, str]:
    assert ran.error is None, ran.error
    (result,) = ran.results
    found: dict[str, str] = result["mime"]
    return found


def test_an_object_is_shown_in_every_form_it_has(kernel: Kernel) -> None:
    kernel.run(KINDS)
    assert mime(kernel.run("Everything()")) == {
        "text/plain": "everything",
        "text/html": "<b>html</b>",
        "text/markdown": "*markdown*",
        "image/svg+xml": "<svg/>",
        "image/png": base64.b64encode(b"png").decode(),
        "image/jpeg": "anBlZw==",
        "application/pdf": base64.b64encode(b"pdf").decode(),
        "text/latex": "$latex$",
        "application/json": '{"a": [1, null]}',
        "application/javascript": "alert()",
    }


def test_a_bundle_comes_before_the_single_forms(kernel: Kernel) -> None:
    kernel.run(
        KINDS + "class Bundle(Everything):\n"
        "    def _repr_mimebundle_(self, include=None, exclude=None):\n"
        "        return {'text/html': 'mine', 'application/x+json': {'b': 1}}, {}"
    )
    forms = mime(kernel.run("Bundle()"))
    assert (forms["text/html"], forms["application/x+json"]) == ("mine", '{"b": 1}')
    assert forms["text/markdown"] == "*markdown*"


def test_an_object_may_display_itself(kernel: Kernel) -> None:
    kernel.run("class Own:\n    def _ipython_display_(self): display('one'); print('two')")
    ran = kernel.run("Own()")
    assert ran.out == "two\n"
    assert [(r["mime"]["text/plain"], r["main"]) for r in ran.results] == [("'one'", True)]


def test_classes_are_not_their_instances(kernel: Kernel) -> None:
    kernel.run(KINDS)
    assert mime(kernel.run("Everything")) == {"text/plain": "<class '__main__.Everything'>"}


def test_an_object_that_answers_to_any_name_has_no_forms(kernel: Kernel) -> None:
    ran = kernel.run("class Any:\n    def __getattr__(self, name): return lambda *a, **k: 7\nAny()")
    assert list(mime(ran)) == ["text/plain"]


def test_a_form_that_fails_is_left_out_and_told(kernel: Kernel) -> None:
    kernel.run(
        "class A:\n    def _repr_html_(self): raise ValueError('no')\n"
        "    def _repr_latex_(self): raise NotImplementedError\n"
        "    def _repr_png_(self): return 5\n    def _repr_svg_(self): return None"
    )
    ran = kernel.run("A()")
    assert list(mime(ran)) == ["text/plain"]
    assert ran.err == "A: _repr_html_ failed: ValueError: no\n"


def test_display_shows_at_once_and_in_order(kernel: Kernel) -> None:
    ran = kernel.run("display(1, 'two')\ndisplay({'text/html': '<i>'}, raw=True)\n3")
    assert [r["mime"].get("text/html", r["mime"]["text/plain"]) for r in ran.results] == [
        "1", "'two'", "<i>", "3",
    ]  # fmt: skip
    assert [r["main"] for r in ran.results] == [False, False, False, True]


def test_results_before_an_error_are_kept(kernel: Kernel) -> None:
    ran = kernel.run("display(1)\n1/0")
    assert len(ran.results) == 1 and ran.error


def test_a_thread_can_display_in_the_middle_of_others(kernel: Kernel) -> None:
    ran = kernel.run(
        "import threading\n"
        "def show(): [display('x' * 5000) for _ in range(50)]\n"
        "threads = [threading.Thread(target=show) for _ in range(4)]\n"
        "[t.start() for t in threads]; show(); [t.join() for t in threads];"
    )
    assert ran.error is None
    assert len(ran.results) == 250


def test_what_is_displayed_after_its_cell_is_printed(kernel: Kernel) -> None:
    kernel.run(
        "import threading\nover = threading.Event()\n"
        "def late(): over.wait(); display('late')\n"
        "thread = threading.Thread(target=late); thread.start()"
    )
    kernel.ask("variables")
    ran = kernel.run("over.set(); thread.join()")
    assert len(ran.results) + ran.out.count("'late'") == 1


# text


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("[]", "[]"),
        ("()", "()"),
        ("(1,)", "(1,)"),
        ("{1}", "{1}"),
        ("set()", "set()"),
        ("frozenset({2})", "frozenset({2})"),
        ("{'a': [1, 2], 'b': {'c': None}}", "{'a': [1, 2], 'b': {'c': None}}"),
        ("b'x\\n'", r"b'x\n'"),
        ("'é\\n'", r"'é\n'"),
        ("x = [1]; x.append(x); x", "[1, [...]]"),
        ("class L(list): pass\nL([1])", "[1]"),
        ("class S(set): pass\nS([1])", "S({1})"),
        ("import collections; collections.namedtuple('P', 'x y')(1, [2])", "P(x=1, y=[2])"),
    ],
)
def test_short_things_look_as_python_shows_them(kernel: Kernel, code: str, text: str) -> None:
    assert kernel.run(code).text == text


def test_long_containers_go_over_lines(kernel: Kernel) -> None:
    assert kernel.run("{'first': 'x' * 50, 'second': ['y' * 40] * 2}").text == (
        "{'first': '" + "x" * 50 + "',\n"
        " 'second': ['" + "y" * 40 + "',\n"
        "            '" + "y" * 40 + "']}"
    )
    lines = (kernel.run("list(range(100))").text or "").split("\n")
    assert len(lines) < 6 and max(map(len, lines)) <= 90


@pytest.mark.parametrize(
    "code",
    [
        "list(range(10_000_000))",
        "{i: [i] * 100 for i in range(100_000)}",
        "'x' * 200_000_000",
        "b'x' * 200_000_000",
        "['y' * 1_000_000] * 1000",
        "[['z' * 1000] * 1000] * 1000",
        "set(range(1_000_000))",
        "x = []\nfor _ in range(100_000): x = [x]\nx",
    ],
)
def test_text_is_bounded_whatever_there_is_to_show(kernel: Kernel, code: str) -> None:
    ran = kernel.run(code, timeout=30)
    assert ran.error is None
    assert ran.text and len(ran.text.encode()) < 300_000
    remove(ran.results[0]["files"])


def remove(files: dict[str, str]) -> None:
    for path in files.values():
        os.unlink(path)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("raise ValueError('no')", "<A object: repr failed: ValueError: no>"),
        ("return 5", "<A object: repr failed: TypeError: __repr__ returned non-string (type int)>"),
        ("return repr(self)", "<A object: repr failed: RecursionError: "),
    ],
)
def test_a_repr_that_fails_is_told(kernel: Kernel, body: str, text: str) -> None:
    kernel.run(f"class A:\n    def __repr__(self): {body}")
    assert (kernel.run("A()").text or "").startswith(text)
    assert text in (kernel.run("[A()]").text or "")


def test_text_that_is_no_text_does_no_harm(kernel: Kernel) -> None:
    ran = kernel.run("class A:\n    def __repr__(self): return 'a\\udc80b\\x00'\nA()")
    assert ran.text == "a?b\x00"


# sizes


def test_a_form_too_large_to_send_is_a_file(kernel: Kernel) -> None:
    kernel.run(
        "class A:\n    def __repr__(self): return 'a'\n    def _repr_html_(self): return html"
    )
    ran = kernel.run("html = 'é' * 3_000_000\nA()")
    (result,) = ran.results
    assert result["mime"] == {"text/plain": "a"}
    path = Path(result["files"]["text/html"])
    assert path.name.startswith("cell2-") and path.suffix == ".html"
    assert path.read_text() == "é" * 3_000_000
    assert path.stat().st_mode & 0o777 == 0o600
    remove(result["files"])


def test_a_picture_too_large_to_send_is_a_picture(kernel: Kernel) -> None:
    ran = kernel.run("class A:\n    def _repr_png_(self): return b'\\x89PNG' * 2_000_000\nA()")
    path = Path(ran.results[0]["files"]["image/png"])
    assert path.read_bytes() == b"\x89PNG" * 2_000_000
    remove(ran.results[0]["files"])


def test_text_too_large_is_cut_and_whole_in_a_file(kernel: Kernel) -> None:
    ran = kernel.run("class A:\n    def __repr__(self): return 'ab' * 500_000\nA()")
    (result,) = ran.results
    assert "more characters)" in result["mime"]["text/plain"]
    assert len(result["mime"]["text/plain"]) < 263_000
    assert Path(result["files"]["text/plain"]).read_text() == "ab" * 500_000
    remove(result["files"])


def test_a_result_is_bounded_as_a_whole(kernel: Kernel) -> None:
    ran = kernel.run(
        "display({f'text/x{i}': '\\x01' * 600_000 for i in range(9)}, raw=True)"  # 3.6 MB each
    )
    (result,) = ran.results
    assert len(json.dumps(result)) < 13 << 20
    assert len(result["mime"]) - 1 + len(result["files"]) == 9
    remove(result["files"])


# IPython, without IPython


def test_code_that_asks_ipython_for_display_gets_it(kernel: Kernel) -> None:
    ran = kernel.run(
        "from IPython.display import display, HTML, Markdown, Image, SVG, JSON, Latex, Javascript\n"
        "from IPython.display import clear_output\n"
        "from IPython.core.display import HTML as H2\n"
        "clear_output(wait=True)\n"
        "display(HTML('<b>'), Markdown('*'), Image(b'\\x89PNG1'), SVG('<svg/>'), JSON({'a': 1}),"
        " Latex('$'), Javascript('1'), H2('2'))"
    )
    assert ran.error is None, ran.error
    forms = [{k: v for k, v in r["mime"].items() if k != "text/plain"} for r in ran.results]
    assert forms == [
        {"text/html": "<b>"},
        {"text/markdown": "*"},
        {"image/png": base64.b64encode(b"\x89PNG1").decode()},
        {"image/svg+xml": "<svg/>"},
        {"application/json": '{"a": 1}'},
        {"text/latex": "$"},
        {"application/javascript": "1"},
        {"text/html": "2"},
    ]


def test_an_image_can_come_from_a_file(kernel: Kernel) -> None:
    (kernel.folder / "a.jpg").write_bytes(b"\xff\xd8jpeg")
    ran = kernel.run("from IPython.display import Image\nImage('a.jpg')")
    assert base64.b64decode(mime(ran)["image/jpeg"]) == b"\xff\xd8jpeg"


def test_there_is_no_shell_of_ipythons(kernel: Kernel) -> None:
    ran = kernel.run("get_ipython()")
    assert ran.error and ran.error["name"] == "NameError"
    assert kernel.run("import IPython; IPython.get_ipython() is None").text == "True"
    ran = kernel.run("import IPython.terminal")
    assert ran.error and ran.error["name"] == "ModuleNotFoundError"
