"""What can be had of a pickle of which something fails to load.

Opcodes refer to objects by the order in which they were made, so the whole must be gone through.
In the place of what fails stands a `Missing`, which takes whatever is done to it. In the end a
variable that holds none is good. One that holds some where they can be separated from the rest, as
in a list or an attribute, is kept with a `Lost` in these places. Any other is lost.
"""

from __future__ import annotations

import pickle
import sys
import types
from typing import Any, Optional

from .examine import Places, written
from .pickling import Bad, CannotBeSaved, Lost, in_short
from .reach import Kinds, Walk
from .stream import BadState

# Why a value is lost, or else what is missing in it: where, and why.
Verdict = tuple[str, Optional[list[list[str]]]]  # noqa: UP045 (Python 3.9)

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


class Placeholder(Missing):
    """In the place of one object."""


def _missing(error: BaseException) -> type[Missing]:
    # As if made in a cell, which is where classes are looked at.
    return type("Missing", (Missing,), {"why": in_short(error), "__module__": "__main__"})


class Salvage(_Unpickler):  # type: ignore[misc]
    """An unpickler that goes on. It is slow, and used only once the quick one has failed."""

    def __init__(self, file: Any, buffers: Any, texts: Any, other_python: bool) -> None:
        """`texts` gives the long text of a number."""
        super().__init__(file, buffers=buffers)
        self._texts = texts
        self._other_python = other_python
        self._placeholders: Bad = {}
        # Half-made objects. They are kept so that no other gets their identity.
        self._broken: dict[int, tuple[object, str]] = {}
        self._places: dict[int, int] = {}  # of objects in the memo, by identity

    def persistent_load(self, number: Any) -> Any:
        return self._texts(number)

    def missing(self, name: str, value: object, namespace: dict[str, Any]) -> Verdict:
        """What is missing in a value."""
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
        """From here on, a use of what is missing is an error."""
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
            made = type(self.stack[-1])
            if made is not Placeholder and Missing in made.__bases__:
                self.stack[-1] = self._stand_in(made.why)
        except (BadState, MemoryError):
            raise
        except BaseException as error:
            del self.stack[below:]
            self.append(self._stand_in(in_short(error)))

    def fill(self, opcode: int) -> None:
        """An opcode that takes the topmost items, and puts them into the object below."""
        try:
            _Unpickler.dispatch[opcode](self)
        except (BadState, MemoryError):
            raise
        except BaseException as error:
            half_made = self.stack[-1]
            self._broken[id(half_made)] = half_made, in_short(error)
            # What refers to it from here on gets a stand-in, which can be told from the rest.
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


def _making(opcode: int, width: int) -> Any:
    return lambda self: self.make(opcode, width)


def _filling(opcode: int) -> Any:
    return lambda self: self.fill(opcode)


Salvage.dispatch = {
    **_Unpickler.dispatch,
    **{name[0]: _making(name[0], width) for name, width in _MAKING.items()},
    **{name[0]: _filling(name[0]) for name in _FILLING},
    pickle.MEMOIZE[0]: Salvage.memoize,
}
