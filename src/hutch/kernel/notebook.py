"""`IPython.display` for kernels without IPython, because that is how code asks for `HTML`.

Comes last among the finders of `sys.meta_path`: an IPython that is installed is always used. There
is no IPython shell here, and nothing pretends that there is one: `get_ipython()` gives None.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .display import display

MODULES = {
    "IPython": True,  # is it a package?
    "IPython.display": False,
    "IPython.core": True,
    "IPython.core.display": False,
}


class DisplayObject:
    """Content of a type that is known, from a text, bytes or a file."""

    mime = "text/plain"
    binary = False

    def __init__(self, data: Any = None, url: str | None = None, filename: Any = None, **_: Any):
        if isinstance(data, os.PathLike):
            data, filename = None, data
        if data is None and filename is not None:
            with open(filename, "rb") as file:
                data = file.read() if self.binary else file.read().decode()
        self.data, self.url, self.filename = data, url, filename

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {self.mime: self.data}

    def __repr__(self) -> str:
        return f"<IPython.display.{type(self).__name__} object>"


class HTML(DisplayObject):
    mime = "text/html"


class Markdown(DisplayObject):
    mime = "text/markdown"


class Latex(DisplayObject):
    mime = "text/latex"


class Math(DisplayObject):
    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/latex": f"$\\displaystyle {self.data}$"}


class SVG(DisplayObject):
    mime = "image/svg+xml"


class Javascript(DisplayObject):
    mime = "application/javascript"


class JSON(DisplayObject):
    mime = "application/json"


class Image(DisplayObject):
    binary = True
    SIGNS = ((b"\x89PNG", "image/png"), (b"\xff\xd8", "image/jpeg"), (b"GIF8", "image/gif"))

    def __init__(self, data: Any = None, url: str | None = None, filename: Any = None, **_: Any):
        if isinstance(data, str):  # a path or an address: bytes are what a picture is made of
            remote = data.startswith(("http:", "https:"))
            data, url, filename = None, (data if remote else url), (None if remote else data)
        super().__init__(data, url, filename)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        if self.data is None:
            return {"text/html": f'<img src="{self.url}"/>'}
        for sign, mime in self.SIGNS:
            if self.data.startswith(sign):
                return {mime: self.data}
        return {"image/png": self.data}


class DisplayHandle:
    """What `display(…, display_id=True)` gives. Showing again is all there is to an update."""

    def display(self, thing: Any, **ignored: Any) -> None:
        display(thing)

    update = display


def display_or_handle(*things: Any, display_id: Any = None, **options: Any) -> DisplayHandle | None:
    display(*things, **options)
    return DisplayHandle() if display_id else None


def clear_output(wait: bool = False) -> None:
    """Accepted: what was printed stays, for there is no screen to clear."""


def get_ipython() -> None:
    """There is no IPython shell here."""


_OFFERED = {
    "display": display_or_handle,
    "clear_output": clear_output,
    "DisplayHandle": DisplayHandle,
    "DisplayObject": DisplayObject,
    **{kind.__name__: kind for kind in DisplayObject.__subclasses__()},
}
for _kind in (DisplayHandle, DisplayObject, *DisplayObject.__subclasses__()):
    _kind.__module__ = "IPython.display"  # where a pickle will look for it


class Standin:
    """Finds `IPython.display` if no other finder does."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Below a real IPython, what is missing is missing.
        root = sys.modules.get("IPython")
        if name not in MODULES or (root and getattr(root, "__loader__", None) is not self):
            return None
        return ModuleSpec(name, self, is_package=MODULES[name])  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "IPython":
            vars(module).update(
                get_ipython=get_ipython, version_info=(9, 0, 0, ""), __version__="9.0.0"
            )
        elif module.__name__.endswith("display"):
            vars(module).update(_OFFERED)
