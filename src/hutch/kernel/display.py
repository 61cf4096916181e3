"""Results: what a cell displays, in every form that it has.

An object defines its forms with the methods of notebooks (`_repr_html_` and the like,
`_repr_mimebundle_`, `_ipython_display_`). They are sent to the guest in one note:

    {"mime": {type: text}, "main": …, "data": …, "chart": …, "files": {type: path}}

All forms are text: pictures in base64, JSON as JSON. A form that is too large to send is written to
a file, whose path is sent. Plain text is always there.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import sys
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from . import charts, tables
from .pretty import error_text, pretty

FOLDER = "/tmp/hutch-results"
TEXT = "text/plain"
MOST_TEXT = 256 * 1024
MOST_FORM = 4 << 20
MOST_RESULT = 12 << 20

METHODS = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_pdf_": "application/pdf",
    "_repr_latex_": "text/latex",
    "_repr_json_": "application/json",
    "_repr_javascript_": "application/javascript",
}
ENDINGS = {
    TEXT: "txt",
    "text/html": "html",
    "text/markdown": "md",
    "text/latex": "tex",
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/gif": "gif",
    "image/svg+xml": "svg",
    "application/pdf": "pdf",
    "application/javascript": "js",
}

Result = dict[str, object]


class Stage:
    """Where results go: to the guest while a cell runs, otherwise to stdout as text."""

    def __init__(self) -> None:
        self.cell = 0
        self.send: Callable[[Result], None] | None = None
        self.main = False  # whether the value of the cell is being shown
        self.shown: set[int] = set()  # figures that this cell has shown

    def begin(self, cell: int, send: Callable[[Result], None]) -> None:
        self.cell, self.send, self.main = cell, send, False
        self.shown.clear()

    def end(self) -> None:
        self.send = None


# Global, because `display` is one function for everything in the process.
stage = Stage()


def display(*things: object, raw: bool = False, **ignored: object) -> None:
    """Show things in every form they have. `raw`: they are already forms, {type: content}."""
    for thing in things:
        if raw:
            publish(_forms(thing))
        else:
            show(thing)


def show_value(value: object) -> None:
    """Show the value of the last expression of a cell."""
    stage.main = True
    try:
        show(value)
    finally:
        stage.main = False


def show(thing: Any) -> None:
    kind = type(thing)
    if getattr(kind, "_ipython_display_", None) is not None:
        try:
            thing._ipython_display_()
            return
        except NotImplementedError:
            pass
        except Exception as exc:
            _report(kind, "_ipython_display_", exc)
    if charts.is_figure(thing):
        show_figure(thing)
    else:
        publish({TEXT: _text_of(thing), **_rich(thing)}, data=_data_of(thing))


def show_figure(figure: Any) -> None:
    """Show a figure as a picture, with the data that is in it."""
    forms = {TEXT: pretty(figure)}
    try:
        forms["image/png"] = base64.b64encode(charts.picture_of(figure)).decode()
    except Exception as exc:
        _report(type(figure), "savefig", exc)
    publish(forms, chart=charts.chart_of(figure))
    stage.shown.add(id(figure))
    figure.stale = False  # until something is drawn on it again


def show_open_figures() -> None:
    """Show open figures that were not shown yet, or changed since; then close all."""
    try:
        for figure in charts.open_figures():
            if id(figure) not in stage.shown or figure.stale:
                show_figure(figure)
    finally:
        charts.close_figures()


def publish(forms: dict[str, str], *, data: object = None, chart: object = None) -> None:
    """Send one result. Forms that are too large are written to files."""
    forms.setdefault(TEXT, "")
    if stage.send is None:
        print(forms[TEXT])
        return
    files: dict[str, str] = {}
    forms = {kind: _fitted(kind, text, files) for kind, text in forms.items()}
    result = {"mime": forms, "main": stage.main, "data": data, "chart": chart, "files": files}
    sizes = {kind: _size(text) for kind, text in forms.items()}
    while sum(sizes.values()) > MOST_RESULT:
        largest = max(sizes, key=lambda kind: sizes[kind])
        del sizes[largest]
        _keep(largest, forms[largest], files)
        forms[largest] = ""
    result["mime"] = {kind: text for kind, text in forms.items() if text or kind == TEXT}
    stage.send(result)


# --- forms ------------------------------------------------------------------------------


def _text_of(thing: object) -> str:
    if type(thing).__name__ == "Styler":
        thing = getattr(thing, "data", thing)  # its own repr is only an address
    return pretty(thing, MOST_FORM)


def _data_of(thing: object) -> object:
    try:
        return tables.as_data(thing)
    except Exception as exc:
        _report(type(thing), "its data", exc)
        return None


def _rich(thing: object) -> dict[str, str]:
    """Every form that the class of `thing` has a method for."""
    kind = type(thing)
    forms: dict[str, str] = {}
    # Of the class, not of the object: some objects have every attribute.
    if getattr(kind, "_repr_mimebundle_", None) is not None:
        forms.update(_forms(_ask(thing, "_repr_mimebundle_", include=None, exclude=None)))
    for method, mime in METHODS.items():
        if mime not in forms and getattr(kind, method, None) is not None:
            forms.update(_forms({mime: _ask(thing, method)}))
    if "text/html" not in forms and kind.__name__ == "Series":
        frame = tables.as_frame(sys.modules.get("pandas"), thing)
        if frame is not None:
            forms.update(_forms({"text/html": _ask(frame, "_repr_html_")}))
    return forms


def _ask(thing: object, method: str, **arguments: object) -> object:
    try:
        answer = getattr(thing, method)(**arguments)
    except NotImplementedError:
        return None
    except Exception as exc:
        _report(type(thing), method, exc)
        return None
    # A pair is the content and its metadata.
    return answer[0] if isinstance(answer, tuple) and len(answer) == 2 else answer


def _forms(bundle: object) -> dict[str, str]:
    """The forms of a library as text by type. Content of unknown types is left out."""
    if not isinstance(bundle, Mapping):
        return {}
    forms = {str(mime): _as_text(str(mime), content) for mime, content in bundle.items()}
    return {mime: text for mime, text in forms.items() if text is not None}


def _as_text(mime: str, content: object) -> str | None:
    if isinstance(content, str):
        return content
    if isinstance(content, (bytes, bytearray, memoryview)):
        if mime.startswith("text/") or mime.endswith(("+xml", "json", "javascript")):
            return bytes(content).decode("utf-8", "replace")
        return base64.b64encode(content).decode()
    if content is not None and mime.endswith("json"):
        return json.dumps(content, default=str)
    return None


def _report(kind: type, what: str, exc: BaseException) -> None:
    try:
        print(f"{kind.__name__}: {what} failed: {error_text(exc)}", file=sys.stderr)
    except Exception:
        pass  # user code may have replaced stderr


# --- sizes ------------------------------------------------------------------------------


def _size(text: str) -> int:
    """The size of `text` as JSON. Short texts are not encoded: they fit in any case."""
    if len(text) < MOST_TEXT // 6:  # a character takes at most six bytes
        return len(text)
    return len(json.dumps(text, ensure_ascii=False).encode("utf-8", "replace"))


def _fitted(mime: str, text: str, files: dict[str, str]) -> str:
    limit = MOST_TEXT if mime == TEXT else MOST_FORM
    if _size(text) <= limit:
        return text
    _keep(mime, text, files)
    if mime != TEXT:
        return ""
    head = text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")
    while _size(head) > limit:
        head = head[: len(head) // 2]
    return f"{head}… ({len(text) - len(head):,} more characters)"


def _keep(mime: str, text: str, files: dict[str, str]) -> None:
    """Write a form to a new file, and add its path to `files`."""
    content = text.encode("utf-8", "backslashreplace")
    if mime.startswith(("image/", "audio/", "video/")) or mime == "application/pdf":
        try:
            content = base64.b64decode(text, validate=True)
        except binascii.Error:
            pass  # it is text, like SVG
    ending = ENDINGS.get(mime, "json" if mime.endswith("json") else "bin")
    try:
        os.makedirs(FOLDER, mode=0o700, exist_ok=True)
        files[mime] = _new_file(ending, content)
    except OSError as exc:
        print(
            f"{mime} of {len(content):,} bytes could not be kept: {error_text(exc)}",
            file=sys.stderr,
        )


def _new_file(ending: str, content: bytes) -> str:
    for number in count(1):
        path = f"{FOLDER}/cell{stage.cell}-{number}.{ending}"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        try:
            with open(fd, "wb") as file:
                file.write(content)
        except OSError:
            os.unlink(path)
            raise
        return path
    raise AssertionError
