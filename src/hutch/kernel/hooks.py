"""Adapts other packages to the kernel when they are first imported.

    matplotlib   draws into results
    plotly       `show()` shows a result, and opens no browser
    IPython      `display()` shows a result, although there is no IPython shell
    pandas       shows as many columns as in a notebook: there is no terminal to fit them to

Not by environment variables: programs that a cell starts would inherit them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import display
from .pretty import cut, safe_repr

BACKEND = f"module://{__package__}.figures"


def _matplotlib(module: Any) -> None:
    module.rcParams["backend"] = BACKEND
    if hasattr(module.use, "__wrapped__"):
        return

    @functools.wraps(module.use)
    def use(backend: str, **options: Any) -> None:
        # Code often selects Agg because it has no screen. Our backend is Agg that can show.
        chosen = BACKEND if str(backend).lower() == "agg" else backend
        use.__wrapped__(chosen, **options)

    module.use = use


def _pandas(module: Any) -> None:
    if module.get_option("display.max_columns") == 0:
        module.set_option("display.max_columns", 20)


def _plotly(module: Any) -> None:
    class Results(module.base_renderers.ExternalRenderer):  # type: ignore[misc]
        def render(self, figure: dict[str, Any]) -> None:
            names = [trace.get("type", "scatter") for trace in figure.get("data", ())]
            display.publish(
                {
                    "text/plain": f"<plotly Figure: {cut(', '.join(names) or 'empty', 200)}>",
                    "text/html": module.to_html(figure, include_plotlyjs="cdn", full_html=False),
                    "application/vnd.plotly.v1+json": module.to_json(figure, validate=False),
                }
            )

    module.renderers["hutch"] = Results()
    module.renderers.default = "hutch"


def _ipython(module: Any) -> None:
    module.display = display_or_handle
    module.clear_output = clear_output


AFTER: dict[str, Callable[[Any], None]] = {
    "IPython.core.display_functions": _ipython,
    "matplotlib": _matplotlib,
    "pandas": _pandas,
    "plotly.io": _plotly,
}


class ImportHook:
    """The first finder: lets the others find a module, and adds a step after its import."""

    def __init__(self) -> None:
        self._looking: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in AFTER or name in self._looking:
            return None
        self._looking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, AFTER[name])  # type: ignore[assignment]
        return spec


class _Then:
    def __init__(self, loader: Any, step: Callable[[Any], None]) -> None:
        self._loader, self._step = loader, step

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Later users, such as importlib.resources, need the real loader.
        module.__loader__ = self._loader
        if module.__spec__:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _take(self._step, module)


def _take(step: Callable[[Any], None], module: ModuleType) -> None:
    try:
        step(module)
    except Exception as exc:  # an unknown version: it is used unchanged
        print(f"{module.__name__} could not be adapted: {safe_repr(exc)}", file=sys.stderr)


def install() -> None:
    """Watch imports, and adapt what is already loaded. Safe to call twice."""
    if not any(isinstance(finder, ImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, ImportHook())
    if not any(isinstance(finder, Standin) for finder in sys.meta_path):
        sys.meta_path.append(Standin())
    for name, step in AFTER.items():
        module = sys.modules.get(name)
        if module is not None:
            _take(step, module)


# `IPython.display` for kernels without IPython, because code imports `HTML` from there.
#
# Its finder is the last of `sys.meta_path`, so an installed IPython is always used. There is no
# IPython shell, and nothing pretends that there is one: `get_ipython()` returns None.


MODULES = {  # and whether each is a package
    "IPython": True,
    "IPython.display": False,
    "IPython.core": True,
    "IPython.core.display": False,
}


class DisplayObject:
    """Content of a known type: text, bytes or a file."""

    mime = "text/plain"
    binary = False

    def __init__(self, data: Any = None, url: str | None = None, filename: Any = None, **_: Any):
        if isinstance(data, os.PathLike):
            data, filename = None, data
        if data is None and filename is not None:
            with open(filename, "rb") as file:
                data = file.read() if self.binary else file.read().decode()
        self.data, self.url, self.filename = data, url, filename

    def _repr_mimebundle_(self, include: Any = None, exclude: object = None) -> dict[str, object]:
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
    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
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

    def __init__(self, data: object = None, url: str | None = None, filename: Any = None, **_: Any):
        if isinstance(data, str):  # a path or URL: the content of a picture is bytes
            remote = data.startswith(("http:", "https:"))
            data, url, filename = None, (data if remote else url), (None if remote else data)
        super().__init__(data, url, filename)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        if self.data is None:
            return {"text/html": f'<img src="{self.url}"/>'}
        for sign, mime in self.SIGNS:
            if self.data.startswith(sign):
                return {mime: self.data}
        return {"image/png": self.data}


class DisplayHandle:
    """The result of `display(…, display_id=True)`. An update shows the thing again."""

    def display(self, thing: object, **ignored: object) -> None:
        display.display(thing)

    update = display


def display_or_handle(*things: Any, display_id: Any = None, **options: Any) -> DisplayHandle | None:
    display.display(*things, **options)
    return DisplayHandle() if display_id else None


def clear_output(wait: bool = False) -> None:
    """Has no effect: there is no screen to clear."""


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
    _kind.__module__ = "IPython.display"  # where pickle looks for it


class Standin:
    """Finds `IPython.display` if no other finder does."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # A real IPython is not extended.
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
