"""Validates what callers send: each function returns the value, or raises InvalidRequest.

`guest_field` is for what guests send, which is not trusted: it raises GuestMisbehaved.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from hutch.errors import GuestMisbehaved, InvalidRequest

T = TypeVar("T")
MAX_CODE = 16 * 1024 * 1024
MAX_COMMAND = 1024 * 1024
MAX_LABELS = 32
MAX_FUNCTIONS, MAX_FUNCTION_NAME = 256, 200
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def guest_field(body: Mapping[str, object], name: str, kind: type[T]) -> T:
    """A field of a guest's message. Raises GuestMisbehaved if it has another type."""
    value = body.get(name)
    if type(value) is not kind:
        raise GuestMisbehaved(f"the guest sent {name}={value!r:.100}")
    return value


def text_of(what: str, value: object, *, nul: bool = False) -> str:
    """Text that a system call can take: without NUL, and without lone surrogates."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{what} must be text, not {type(value).__name__}")
    if "\0" in value and not nul:
        raise InvalidRequest(f"{what} cannot contain a NUL character")
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as exc:
        raise InvalidRequest(f"{what} has a lone surrogate at position {exc.start}") from None
    return value


def labels_of(value: object) -> dict[str, str]:
    """Labels of a session."""
    if not isinstance(value, Mapping) or len(value) > MAX_LABELS:
        raise InvalidRequest(f"labels must be at most {MAX_LABELS} names, each with a text")
    for name, text in value.items():
        if not isinstance(name, str) or not _LABEL.fullmatch(name):
            allowed = "1 to 63 letters, digits, dots, dashes, underscores and slashes"
            raise InvalidRequest(f"the name of a label must be {allowed}, not {name!r:.100}")
        if len(text_of(f"label {name}", text)) > 256:
            raise InvalidRequest(f"label {name} can have at most 256 characters")
    return dict(value)


def path_of(value: object, what: str = "a path") -> str:
    path = text_of(what, value)
    if not path:
        raise InvalidRequest(f"{what} cannot be empty")
    if len(path) > 4096:
        raise InvalidRequest(f"{what} can have at most 4096 characters")
    return path


def command_of(value: object) -> str:
    command = text_of("a command", value)
    if not command.strip():
        raise InvalidRequest("an empty command")
    if (size := len(command.encode("utf-8", "surrogateescape"))) > MAX_COMMAND:
        raise InvalidRequest(
            f"too long: a command may have {MAX_COMMAND >> 20} MiB, and this one has {size} bytes; "
            "write it to a file in the box, and run that"
        )
    return command


def code_of(value: object) -> bytes:
    if not isinstance(value, str):
        raise InvalidRequest(f"code must be text, not {type(value).__name__}")
    code = value.encode("utf-8", "surrogatepass")
    if len(code) > MAX_CODE:
        raise InvalidRequest(f"too long: a cell may have {MAX_CODE >> 20} MiB of code")
    return code


def functions_of(value: Sequence[str]) -> list[str]:
    """Names of functions that code in a box can call."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidRequest(f"functions are a list of names, not {value!r:.100}")
    names = list(value)
    if len(names) > MAX_FUNCTIONS:
        raise InvalidRequest(f"a cell can be given {MAX_FUNCTIONS} functions, not {len(names)}")
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise InvalidRequest(f"not a name for a function in Python: {name!r:.100}")
        if len(name) > MAX_FUNCTION_NAME:
            raise InvalidRequest(f"a function's name can have {MAX_FUNCTION_NAME} characters")
    return names


def name_of(value: object, what: str = "a shell's name") -> str:
    name = text_of(what, value)
    if not 0 < len(name) <= 256:
        raise InvalidRequest(f"{what} has 1 to 256 characters, not {len(name)}")
    return name


def user_of(value: object) -> str | None:
    return None if value is None else name_of(value, "a user")


def argv_of(value: Sequence[str]) -> list[str]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidRequest(f"a command is text or a list of texts, not {value!r:.100}")
    argv = [text_of("an argument", item) for item in value]
    if not argv or not argv[0]:
        raise InvalidRequest("an empty command")
    return argv


def env_of(value: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"an environment is names and values, not {value!r:.100}")
    for name, content in value.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequest(f"not a name for an environment variable: {name!r}")
        text_of(f"the value of {name}", content)
    return dict(value)


def whole_of(what: str, value: object, *, least: int = 0) -> int:
    """A whole number that is not below `least`, and that a file offset can hold."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{what} must be a whole number, not {value!r}")
    if not least <= value < 1 << 62:
        raise InvalidRequest(f"{what} must be at least {least}, not {value}")
    return value


def seconds_of(value: float | None, name: str = "a timeout") -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} is a number of seconds, not {value!r}")
    if not 0 < value < math.inf:
        raise InvalidRequest(f"{name} must be more than 0 seconds, not {value}")
    return float(value)
