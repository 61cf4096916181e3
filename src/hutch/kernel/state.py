"""Deep hibernation: all of a namespace as a stream of bytes, and back in another process.

Values that others may need while they are loaded are written first: modules and simple values, then
functions and classes, then the rest, each in the order of creation. Loading sets each name as soon
as its value is loaded. State is streamed, never held as a whole (`stream` has the format).

If a value fails to load, the state is requested once more and read by an unpickler that survives
failures (`Salvage`). What still fails may need a global that is set later, so that is repeated
until no more values can be loaded.
"""

from __future__ import annotations

import gc
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional, Union

from . import surroundings
from .examine import Places, Root, examine, written
from .pickling import (
    Bad,
    CannotBeSaved,
    Lost,
    StatePickler,
    StateUnpickler,
    Views,
    _Cached,
    in_short,
    set_namespace,
)
from .reach import Kinds, Walk
from .stream import FIRST_MAGIC, MAGIC, BadState, FirstFormat, StateReader, StateWriter, Trial
from .surroundings import Losses

_PYTHON = [sys.implementation.name, *sys.version_info[:2]]
_OWN = {
    "__name__",
    "__doc__",
    "__package__",
    "__loader__",
    "__spec__",
    "__builtins__",
    "__warningregistry__",
}
_SIMPLE = (int, float, complex, str, bytes, bool, type(None), types.ModuleType)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, _Cached)
MOST_PASSES = 5

Source = Union[StateReader, FirstFormat]  # noqa: UP007 (Python 3.9)


def save(
    namespace: dict[str, object],
    write: Callable[[Any], None],
    extra: dict[str, Any],
    around: dict[str, Any],
    lost: Losses,
) -> dict[str, Any]:
    """Write everything that can be saved. The report says what was saved, and what not, and why.

    `extra`, which must be JSON, is returned by `load`. `around` and `lost` come from
    `surroundings.gather` and `surroundings.running`, which a fork could not call itself.
    """
    settings = surroundings.settings()
    order = [name for name in namespace if name not in _OWN]
    selves = [name for name in order if namespace[name] is namespace]
    names = sorted((name for name in order if name not in selves), key=_rank(namespace))
    views = Views(namespace, names)
    roots: dict[Root, Any] = {("surroundings", ""): around}
    roots.update({("variable", name): namespace[name] for name in names})
    roots.update({("setting", name): value for name, value in settings.items()})
    findings = examine(namespace, roots, views)
    names = [name for kind, name in findings.roots if kind == "variable"]
    lost = [*lost, *findings.lost]
    kept = {*names, *selves}
    header = {
        "python": _PYTHON,
        "names": names,
        "selves": selves,
        "settings": [name for kind, name in findings.roots if kind == "setting"],
        "order": [name for name in order if name in kept],
        "lost": lost,
        "extra": extra,
        "numpy": "numpy" in sys.modules,
    }
    writer = StateWriter(write, header)
    if not findings.trial.replay(writer):
        findings.trial = Trial()
        pickler = StatePickler(writer, namespace, views, findings.bad)
        for value in findings.roots.values():
            pickler.add(value)
    writer.finish()
    report: dict[str, object] = {"kept": header["order"], "lost": lost}
    return {**report, "size": writer.size, "checksum": writer.checksum}


def _rank(namespace: dict[str, object]) -> Callable[[str], int]:
    """A sort key: values that others may need while they are loaded come first."""

    def rank(name: str) -> int:
        value = namespace[name]
        if type(value) in _SIMPLE or isinstance(value, types.ModuleType):
            return 0
        return 1 if isinstance(value, _CODE) else 2

    return rank


# loading


@dataclass
class Passes:
    """What happened in earlier passes over the same state."""

    failed: set[str] | None = None  # None: no pass has read it to the end
    count: int = 0
    before: dict[str, object] = field(default_factory=dict)  # the namespace before the first pass


def load(
    namespace: dict[str, object], read: Callable[[int], bytes], passes: Passes | None = None
) -> dict[str, Any]:
    """Set the variables that were saved. The answer says which could not be loaded, and why.

    `read` returns as many bytes as asked for, or fewer at the end. If the answer has `again`, call
    this once more, with the same state and the same `passes`. Damage is reported in the answer.
    """
    passes = passes or Passes()
    if not passes.count:
        passes.before = dict(namespace)
    passes.count += 1
    builtins = namespace.get("__builtins__")
    collects = gc.isenabled()
    gc.disable()  # none of the new objects is garbage
    set_namespace(namespace)
    try:
        return _load(namespace, _opened(read), passes)
    except (BadState, MemoryError) as error:
        namespace.clear()
        namespace.update(passes.before)
        why = str(error) if isinstance(error, BadState) else "there is not enough memory for it"
        return {"kept": [], "lost": [["everything", why]], "extra": {}, "again": False}
    finally:
        set_namespace({})
        namespace["__builtins__"] = builtins  # unpickled functions replace it
        if collects:
            gc.enable()


def _opened(read: Callable[[int], bytes]) -> Source:
    magic = read(len(MAGIC))
    if magic == FIRST_MAGIC:
        return FirstFormat(read)
    if magic != MAGIC:
        raise BadState("this is not the saved state of a kernel, or that of a newer version")
    return StateReader(read)


def _load(namespace: dict[str, Any], source: Source, passes: Passes) -> dict[str, Any]:
    header = source.header
    other_python = header["python"] != _PYTHON
    lost: Losses = list(header["lost"])
    if passes.count == 1 and not other_python:
        try:
            around, settings = _quickly(namespace, source, lost)
        except (BadState, MemoryError):
            raise
        except BaseException:
            return {"kept": [], "lost": [], "extra": {}, "again": True}
        failed: Losses = []
    else:
        around, settings, failed = _carefully(namespace, source, lost, other_python)
    now = {what for what, _ in failed}
    if failed and passes.count < MOST_PASSES and (passes.failed is None or now < passes.failed):
        passes.failed = now
        return {"kept": [], "lost": [], "extra": {}, "again": True}
    for name in header["selves"]:
        namespace[name] = namespace
    values = {name: namespace.pop(name) for name in header["order"] if name in namespace}
    namespace.update(values)
    lost += [*failed, *surroundings.apply_settings(settings), *surroundings.apply_last(around)]
    return {"kept": list(values), "lost": lost, "extra": header["extra"], "again": False}


def _quickly(
    namespace: dict[str, Any], source: Source, lost: Losses
) -> tuple[dict[str, Any], dict[str, object]]:
    """Load everything. Raises what loading a value raises."""
    unpickler = StateUnpickler(source)
    around = source.around if isinstance(source, FirstFormat) else unpickler.load()
    lost += surroundings.apply(around)
    for name in source.header["names"]:
        namespace[name] = unpickler.load()
    settings = {name: unpickler.load() for name in source.header.get("settings", ())}
    source.finish()
    return around, settings


def _carefully(
    namespace: dict[str, object], source: Source, lost: Losses, other_python: bool
) -> tuple[dict[str, object], dict[str, object], Losses]:
    """Load what can be loaded. Also returns what failed."""
    salvage = Salvage(source, iter(source), source.text, other_python)
    around = source.around if isinstance(source, FirstFormat) else salvage.load()
    lost += surroundings.apply(around)
    failed: Losses = []
    settings: dict[str, object] = {}
    places = [(name, namespace) for name in source.header["names"]]
    places += [(name, settings) for name in source.header.get("settings", ())]
    for name, place in places:
        value = salvage.load()
        why, missing = salvage.missing(name, value, namespace)
        if missing is None:
            failed.append([name, why])
            place.pop(name, None)  # an earlier pass may have set it
        else:
            failed += missing
            place[name] = value
    source.finish()
    salvage.finish()
    return around, settings, failed


# --- loading in spite of failures -------------------------------------------------------
#
# Opcodes of a pickle refer to objects by the order in which they were made, so an unpickler must go
# through all of it. It puts a `Missing` in the place of what fails, which accepts whatever is done
# to it. In the end, a variable without one is good. One that has some where they can be separated
# from the rest, as in a list or an attribute, is kept with a `Lost` in these places. Any other is
# lost.


# Why a value is lost, or else what is missing in it: where, and why.
Verdict = tuple[str, Optional[list[list[str]]]]  # noqa: UP045 (Python 3.9)

_Unpickler: Any = pickle._Unpickler


class Missing:
    """Stands for an object, a class or a function that could not be loaded."""

    why = ""

    def __new__(cls, *args: object, **options: object) -> Missing:
        return super().__new__(cls)

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def __call__(self, *args: object, **options: object) -> Missing:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    append = extend = add = __call__


class Placeholder(Missing):
    """Stands for one object."""


def _missing(error: BaseException) -> type[Missing]:
    # As if defined in a cell: the walk looks at such classes only.
    return type("Missing", (Missing,), {"why": in_short(error), "__module__": "__main__"})


class Salvage(_Unpickler):  # type: ignore[misc]
    """An unpickler that continues after failures. Slow: used only if the fast one has failed."""

    def __init__(
        self, file: Any, buffers: Any, texts: Callable[[int], str], other_python: bool
    ) -> None:
        """`texts` returns the long text with a number."""
        super().__init__(file, buffers=buffers)
        self._texts = texts
        self._other_python = other_python
        self._placeholders: Bad = {}
        # Half-made objects, by id. They are kept so that no other object gets the same id.
        self._broken: dict[int, tuple[object, str]] = {}
        self._places: dict[int, int] = {}  # by id: places of objects in the memo

    def persistent_load(self, number: int) -> str:
        return self._texts(number)

    def missing(self, name: str, value: object, namespace: dict[str, Any]) -> Verdict:
        """Why a value is lost, or else what is missing in it."""
        why, inside = "", set()
        for thing in Walk(namespace, Kinds(), budget=sys.maxsize).everything(value):
            if id(thing) in self._placeholders:
                inside.add(id(thing))
                why = why or self._placeholders[id(thing)][1]
            elif isinstance(thing, type) and issubclass(thing, Missing):
                return thing.why, None
            elif id(thing) in self._broken:
                return self._broken[id(thing)][1], None
        if not inside:
            return "", []
        places = list(Places(namespace, self._placeholders, loaded=True).of(name, value))
        separable = not any(whole for _, _, _, whole in places)
        if separable and inside == {id(thing) for _, thing, _, _ in places}:
            return "", [[written(place), why] for place, _, why, _ in places]
        return why, None

    def finish(self) -> None:
        """Turn placeholders into `Lost`, whose use is an error."""
        for thing, why in self._placeholders.values():
            thing.__class__ = Lost
            thing.why = why

    def _stand_in(self, why: str) -> Missing:
        placeholder = Placeholder()
        self._placeholders[id(placeholder)] = placeholder, why
        return placeholder

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (BadState, MemoryError):
            raise
        except BaseException as error:
            return _missing(error)

    def make(self, opcode: int, width: int) -> None:
        """Run an opcode that makes one object of the topmost items."""
        below = len(self.stack) - width
        lacking = [item for item in self.stack[below + 1] if isinstance(item, Missing)]
        if lacking:
            self.stack[below:] = lacking[:1]
            return
        try:
            # Its bytecode would mean something else here.
            if self._other_python and self.stack[below] is types.CodeType:
                raise CannotBeSaved("it was compiled by another version of Python")
            _Unpickler.dispatch[opcode](self)
            kind = type(self.stack[-1])
            if kind is not Placeholder and Missing in kind.__bases__:
                self.stack[-1] = self._stand_in(kind.why)
        except (BadState, MemoryError):
            raise
        except BaseException as error:
            del self.stack[below:]
            self.append(self._stand_in(in_short(error)))

    def fill(self, opcode: int) -> None:
        """Run an opcode that puts the topmost items into the object below them."""
        try:
            _Unpickler.dispatch[opcode](self)
        except (BadState, MemoryError):
            raise
        except BaseException as error:
            half_made = self.stack[-1]
            self._broken[id(half_made)] = half_made, in_short(error)
            # Later references to it get a placeholder, which can be found and replaced.
            self.stack[-1] = self._stand_in(in_short(error))
            place = self._places.get(id(half_made))
            if place is not None:
                self.memo[place] = self.stack[-1]

    def memoize(self) -> None:
        self._places[id(self.stack[-1])] = len(self.memo)
        self.memo[len(self.memo)] = self.stack[-1]


_MAKING = {pickle.REDUCE: 2, pickle.NEWOBJ: 2, pickle.NEWOBJ_EX: 3}
_FILLING = (
    pickle.BUILD,
    pickle.APPEND,
    pickle.APPENDS,
    pickle.SETITEM,
    pickle.SETITEMS,
    pickle.ADDITEMS,
)


def _making(opcode: int, width: int) -> object:
    return lambda self: self.make(opcode, width)


def _filling(opcode: int) -> object:
    return lambda self: self.fill(opcode)


Salvage.dispatch = {
    **_Unpickler.dispatch,
    **{name[0]: _making(name[0], width) for name, width in _MAKING.items()},
    **{name[0]: _filling(name[0]) for name in _FILLING},
    pickle.MEMOIZE[0]: Salvage.memoize,
}
