"""What a kernel changes in other packages, at the moment they are first imported.

    matplotlib   draws into results
    plotly       `show()` shows a result, and opens no browser
    IPython      `display()` shows a result, though there is no shell of IPython's
    pandas       as many columns as in a notebook, not as fit a terminal that is not there

Nothing goes by environment variables: programs that a cell starts would inherit them.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import display, notebook
from .pretty import cut, safe_repr

BACKEND = f"module://{__package__}.figures"


def _matplotlib(module: Any) -> None:
    module.rcParams["backend"] = BACKEND
    if hasattr(module.use, "__wrapped__"):
        return

    @functools.wraps(module.use)
    def use(backend: str, **options: Any) -> None:
        # Much code chooses Agg so as to need no screen. Ours is Agg, and can show.
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
    module.display = notebook.display_or_handle
    module.clear_output = notebook.clear_output


AFTER: dict[str, Callable[[Any], None]] = {
    "IPython.core.display_functions": _ipython,
    "matplotlib": _matplotlib,
    "pandas": _pandas,
    "plotly.io": _plotly,
}


class ImportHook:
    """Comes first, lets the others find, and adds a step after the import."""

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
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        # The true loader is what resources and the like are asked for later.
        module.__loader__ = self._loader
        if module.__spec__:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _take(self._step, module)


def _take(step: Callable[[Any], None], module: ModuleType) -> None:
    try:
        step(module)
    except Exception as exc:  # another version of it: it works as it comes
        print(f"{module.__name__} could not be adapted: {safe_repr(exc)}", file=sys.stderr)


def install() -> None:
    """Watch imports, and adapt what is loaded already. Safe to call twice."""
    if not any(isinstance(finder, ImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, ImportHook())
    if not any(isinstance(finder, notebook.Standin) for finder in sys.meta_path):
        sys.meta_path.append(notebook.Standin())
    for name, step in AFTER.items():
        module = sys.modules.get(name)
        if module is not None:
            _take(step, module)
