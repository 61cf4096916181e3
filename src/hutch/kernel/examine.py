"""Finds the values that cannot be saved, and where they are, before anything is written.

Everything is pickled once on trial, which usually succeeds. If not, it is done again with every
failure attributed to the object that caused it, and that object is searched for in the variables.
In a list, a dict or an attribute, it is replaced by a `Lost`, and the rest of its container is
kept. An object of a library that contains it is lost as a whole, as it may not work with a part
missing.
"""

from __future__ import annotations

import collections
import gc
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

from .pickling import Bad, StatePickler, Views, in_short
from .reach import Kinds
from .stream import Trial

_ATOMS = {int, str, bytes, float, bool, complex, type(None), range, bytearray, types.ModuleType}
_SEQUENCES = (list, tuple, collections.deque)
_SETS = (set, frozenset)
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)
_LONGEST_LABEL = 60
_REMEMBERED = 32 << 20  # bytes

# How to get to a value: the place of its container, and a label.
Place = tuple[Optional["Place"], str]

# The kind of a value (such as "variable"), and its name.
Root = tuple[str, str]


@dataclass
class Findings:
    """What will be saved, and what cannot be."""

    roots: dict[Root, Any]  # in the order in which they will be written
    bad: Bad = field(default_factory=dict)  # objects to replace; `lost` reports them
    lost: list[list[str]] = field(default_factory=list)
    trial: Trial = field(default_factory=Trial)  # the last one, in which nothing failed


def examine(namespace: dict[str, object], roots: dict[Root, Any], views: Views) -> Findings:
    """Try to save these values. User code runs, but nothing is written."""
    findings = Findings(dict(roots))
    failed = _failures(namespace, findings, views)
    if not failed:
        return findings
    # Only in these: it takes many times as long as a trial.
    causes = _causes(namespace, findings, views, failed)
    if causes:
        _place(namespace, findings, causes, failed)
    # What still fails with those replaced is lost as a whole.
    while failed := _failures(namespace, findings, views):
        for root, why in failed.items():
            findings.lost.append([root[1], why])
            del findings.roots[root]
    return findings


def _failures(namespace: dict[str, object], findings: Findings, views: Views) -> dict[Root, str]:
    """The roots that fail, and why. After the first failure, each is tried with its own pickler."""
    findings.trial = Trial(_REMEMBERED)
    pickler = StatePickler(findings.trial, namespace, views, findings.bad)
    names = iter(list(findings.roots))
    failed = {}
    for name in names:
        if why := _tried(pickler, findings.roots[name]):
            failed[name] = why
            break
    for name in names:
        if why := _tried(
            StatePickler(Trial(), namespace, views, findings.bad), findings.roots[name]
        ):
            failed[name] = why
    return failed


def _tried(pickler: StatePickler, value: object) -> str:
    try:
        pickler.add(value)
    except MemoryError:
        raise
    except BaseException as error:
        return in_short(error)
    return ""


def _causes(
    namespace: dict[str, object], findings: Findings, views: Views, failed: Iterable[Root]
) -> Bad:
    """The objects that cause failures, as far as these can be attributed to one object."""
    causes: Bad = {}
    pickler = StatePickler(Trial(), namespace, views, causes, catching=True)
    for root in failed:
        _tried(pickler, findings.roots[root])
    return causes


def _place(
    namespace: dict[str, object], findings: Findings, causes: Bad, failed: Iterable[Root]
) -> None:
    walk = Places(namespace, causes)
    for root in failed:
        places = list(walk.of(root[1], findings.roots[root]))
        if any(whole for _, _, _, whole in places):
            findings.lost.append([root[1], places[0][2]])
            del findings.roots[root]
            continue
        for place, thing, why, _ in places:
            findings.bad[id(thing)] = thing, why
            findings.lost.append([written(place), why])


class Places:
    """Finds bad objects in values, and says how to get there."""

    def __init__(self, namespace: dict[str, object], bad: Bad, loaded: bool = False) -> None:
        """`loaded`: the values were loaded, with placeholders for bad objects."""
        self._namespace = namespace
        self._loaded = loaded
        self._bad = bad
        self._arrays = Kinds().arrays
        self._clean: set[int] = set()  # ids of objects that reach nothing bad
        modules = [one for one in list(sys.modules.values()) if isinstance(one, types.ModuleType)]
        self._outside = {id(vars(module)) for module in modules} | {id(namespace)}

    def of(self, name: str, value: object) -> Iterator[tuple[Place, Any, str, bool]]:
        """For each bad object: its place, itself, why, and whether the whole value is lost."""
        stack: list[tuple[object, Place]] = [(value, (None, name))]
        seen: set[int] = set()
        while stack:
            thing, place = stack.pop()
            if id(thing) in seen or type(thing) in _ATOMS or id(thing) in self._outside:
                continue
            seen.add(id(thing))
            if id(thing) in self._bad:
                # Without its class or function, nothing that uses it can be loaded.
                code = isinstance(thing, (type, types.FunctionType))
                yield place, thing, self._bad[id(thing)][1], place[0] is None or code
                continue
            parts = _parts(thing)
            if parts is not None:
                stack += [(part, (place, label)) for label, part in reversed(parts)]
            elif why := self._behind(thing):
                yield place, thing, why, place[0] is None or isinstance(thing, type)

    def _behind(self, thing: object) -> str:
        """Why an object that cannot be taken apart fails; empty if it does not."""
        if not self._reaches_bad(thing):
            return ""
        if self._loaded:
            return "a part of it is missing"
        # It may refer to a bad object without pickling it.
        causes: Bad = {}
        none = Views(self._namespace, [])
        why = _tried(StatePickler(Trial(), self._namespace, none, causes, catching=True), thing)
        return next((why for _, why in causes.values()), why)

    def _reaches_bad(self, thing: object) -> bool:
        visited: set[int] = set()
        queue = [thing]
        while queue:
            part = queue.pop()
            at = id(part)
            if at in visited or at in self._clean or at in self._outside:
                continue
            if at in self._bad:
                return True
            visited.add(at)
            if isinstance(part, types.ModuleType):
                continue
            if isinstance(part, type) and part.__module__ != "__main__":
                continue
            queue += [inner for inner in gc.get_referents(part) if type(inner) not in _ATOMS]
            if isinstance(part, self._arrays) and part.dtype.hasobject:
                queue += part.ravel().tolist()  # the collector does not see into arrays
        self._clean |= visited
        return False


def _parts(thing: Any) -> list[tuple[str, Any]] | None:
    """What a container holds, with labels; None if it is not one that can be taken apart."""
    kind = type(thing)
    if kind in _MAPPINGS:
        return _items(thing)
    if kind in _SEQUENCES:
        return [(f"[{at}]", one) for at, one in enumerate(thing)]
    if kind in _SETS:
        return [("{…}", one) for one in thing]
    if isinstance(thing, types.FunctionType):
        return _parts_of_function(thing) if thing.__module__ == "__main__" else None
    if isinstance(thing, types.MethodType):
        return [(".__self__", thing.__self__), (".__func__", thing.__func__)]
    if isinstance(thing, type):
        made_here = thing.__module__ == "__main__"
        return _parts_of_class(thing) if made_here else None
    if kind is types.SimpleNamespace or kind.__module__ == "__main__":
        return _parts_of_instance(thing)
    return None


def _items(mapping: Any) -> list[tuple[str, Any]]:
    parts = []
    for key, value in dict.items(mapping):
        if type(key) not in _ATOMS:
            parts.append((f"'s key {type(key).__name__}", key))
        if type(value) not in _ATOMS:
            parts.append((f"[{_label(key)}]", value))
    return parts


def _label(key: object) -> str:
    simple = type(key) in _ATOMS
    text = repr(key) if simple else f"<{type(key).__name__}>"
    return text if len(text) <= _LONGEST_LABEL else text[:_LONGEST_LABEL] + "…"


def _parts_of_class(kind: type) -> list[tuple[str, Any]]:
    slots = (types.GetSetDescriptorType, types.MemberDescriptorType)
    return [(f".{k}", one) for k, one in list(vars(kind).items()) if not isinstance(one, slots)]


def _parts_of_function(function: types.FunctionType) -> list[tuple[str, Any]]:
    parts = [(f".{key}", one) for key, one in vars(function).items()]
    parts += [(" (a default)", one) for one in function.__defaults__ or ()]
    parts += [(f" (default of {k})", one) for k, one in (function.__kwdefaults__ or {}).items()]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):  # noqa: B905
        try:
            parts.append((f" (closure variable {name})", cell.cell_contents))
        except ValueError:
            pass  # it is empty
    return parts


def _parts_of_instance(thing: object) -> list[tuple[str, Any]]:
    try:
        own = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        own = {}
    parts = [(f".{key}", one) for key, one in own.items()]
    for kind in type(thing).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType) and kind.__module__ == "__main__":
                try:
                    parts.append((f".{name}", slot.__get__(thing)))
                except AttributeError:
                    pass  # it is not set
    if isinstance(thing, dict):
        parts += _items(thing)
    # Not with the class's own `__iter__`, which is user code.
    for kind in (list, tuple):
        if isinstance(thing, kind):
            parts += [(f"[{at}]", one) for at, one in enumerate(_iterate(kind, thing))]
    for kind in (set, frozenset):
        if isinstance(thing, kind):
            parts += [("{…}", one) for one in _iterate(kind, thing)]
    return parts


def _iterate(kind: Any, thing: object) -> Iterator[Any]:
    items: Iterator[Any] = kind.__iter__(thing)
    return items


def written(place: Place | None) -> str:
    """A place as code: `hl.l`, `d['k'][3]`."""
    labels = []
    while place is not None:
        labels.append(place[1])
        place = place[0]
    return "".join(reversed(labels))
