"""What can be had of a pickle of which something fails to load.

Opcodes refer to objects by the order in which they were made, so the whole must be gone through.
In the place of what fails stands a `Missing`, which takes whatever is done to it. In the end a
variable is lost if it holds one, and good if it does not.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from typing import Any

from .pickling import CannotBeSaved, in_short
from .reach import Kinds, Walk

_Unpickler: Any = pickle._Unpickler


class Missing:
    """In the place of what could not be loaded: an object, a class or a function."""

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


def _missing(error: BaseException) -> type[Missing]:
    # As if made in a cell, which is where classes are looked at.
    return type("Missing", (Missing,), {"why": in_short(error), "__module__": "__main__"})


class Salvage(_Unpickler):  # type: ignore[misc]
    """An unpickler that goes on. It is slow, and used only once the quick one has failed."""

    def __init__(self, metadata: bytes, buffers: list[Any], other_python: bool) -> None:
        super().__init__(io.BytesIO(metadata), buffers=iter(buffers))
        self._other_python = other_python
        # Half-made objects. They are kept so that no other gets their identity.
        self._broken: dict[int, tuple[object, str]] = {}

    def why_lost(self, value: object, namespace: dict[str, Any]) -> str:
        """What is missing in a value; empty if nothing is."""
        walk = Walk(namespace, Kinds(), budget=sys.maxsize)
        for thing in walk.everything(value):
            if isinstance(thing, Missing):
                return thing.why
            if isinstance(thing, type) and issubclass(thing, Missing):
                return thing.why
            if id(thing) in self._broken:
                return self._broken[id(thing)][1]
        return ""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except BaseException as error:
            return _missing(error)

    def make(self, opcode: int, width: int) -> None:
        """An opcode that makes one object of the topmost items."""
        below = len(self.stack) - width
        lacking = [one for one in self.stack[below + 1] if isinstance(one, Missing)]
        if lacking:
            self.stack[below:] = lacking[:1]
            return
        try:
            # The bytes of its code would mean something else here.
            if self._other_python and self.stack[below] is types.CodeType:
                raise CannotBeSaved("it was compiled by another version of Python")
            _Unpickler.dispatch[opcode](self)
        except BaseException as error:
            del self.stack[below:]
            self.append(_missing(error)())

    def fill(self, opcode: int) -> None:
        """An opcode that takes the topmost items, and puts them into the object below."""
        try:
            _Unpickler.dispatch[opcode](self)
        except BaseException as error:
            self._broken[id(self.stack[-1])] = (self.stack[-1], in_short(error))


_MAKING = {pickle.REDUCE: 2, pickle.NEWOBJ: 2, pickle.NEWOBJ_EX: 3}
_FILLING = (
    pickle.BUILD,
    pickle.APPEND,
    pickle.APPENDS,
    pickle.SETITEM,
    pickle.SETITEMS,
    pickle.ADDITEMS,
)


def _making(opcode: int, width: int) -> Any:
    return lambda self: self.make(opcode, width)


def _filling(opcode: int) -> Any:
    return lambda self: self.fill(opcode)


Salvage.dispatch = {
    **_Unpickler.dispatch,
    **{name[0]: _making(name[0], width) for name, width in _MAKING.items()},
    **{name[0]: _filling(name[0]) for name in _FILLING},
}
