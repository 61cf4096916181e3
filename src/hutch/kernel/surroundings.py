"""The state of a process besides its variables: directory, environment, paths, loggers, …

Only changes since the start of the kernel are saved: what the box itself provides may rightly
differ in the next one.
"""

from __future__ import annotations

import gc
import importlib
import linecache
import os
import random
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

from .pickling import Lost, in_short

Losses = list[list[str]]  # what could not be kept, and why

# How cells are named in tracebacks, and where `linecache` has their source.
CELL = "<cell "


# As they were when the kernel started.
_environ_then = dict(os.environ)
_path_then = list(sys.path)
_then: dict[str, Any] = {"warnings": [], "loggers": {}, "signals": {}}


def begin() -> None:
    """Record the present state. Later changes count as the user's."""
    _environ_then.clear()
    _environ_then.update(os.environ)
    _path_then[:] = sys.path
    _then["warnings"] = list(warnings.filters)
    _then["loggers"] = {name: _look_of(logger) for name, logger in _loggers()}
    _then["signals"] = _handlers()


def gather() -> dict[str, Any]:
    """What has changed and is plain data."""
    now = dict(os.environ)
    return {
        "directory": _directory(),
        "path": [entry for entry in sys.path if isinstance(entry, str) and entry not in _path_then],
        "environ": {k: v for k, v in now.items() if _environ_then.get(k) != v},
        "unset": [key for key in _environ_then if key not in now],
        "random": random.getstate(),
        "numpy": _numpy_random(),
        "recursion": sys.getrecursionlimit(),
        "umask": _umask(),
        "timezone": time.tzname,
        "sources": {
            name: entry[2]
            for name, entry in linecache.cache.items()
            if name.startswith(CELL) and len(entry) == 4  # others are not read yet
        },
    }


def settings() -> dict[str, Any]:
    """What has changed and may contain anything, such as classes and functions of cells."""
    changed: dict[str, Any] = {}
    before = _then["loggers"]
    loggers = {name: logger for name, logger in _loggers() if _look_of(logger) != before.get(name)}
    if loggers:
        changed["logging"] = {name: _setting_of(logger) for name, logger in loggers.items()}
    if warnings.filters != _then["warnings"]:
        changed["warning filters"] = list(warnings.filters)
    if decimal := sys.modules.get("decimal"):
        changed["decimal context"] = decimal.getcontext()
    then = _then["signals"]
    handlers = {
        name: handler for name, handler in _handlers().items() if handler is not then.get(name)
    }
    if handlers:
        changed["signal handlers"] = handlers
    return changed


def apply_settings(changed: dict[str, Any]) -> Losses:
    """Restore settings. Returns those that failed; a `Lost` in them is skipped."""
    lost: Losses = []
    for name, act in _APPLY.items():
        if name in changed:
            try:
                act(changed[name])
            except Exception as error:
                lost.append([name, in_short(error)])
    return lost


def _loggers() -> list[tuple[str, Any]]:
    logging = sys.modules.get("logging")
    if logging is None:
        return []
    known = list(logging.root.manager.loggerDict.items())
    return [("root", logging.root), *(i for i in known if isinstance(i[1], logging.Logger))]


def _look_of(logger: Any) -> tuple[Any, ...]:
    return logger.level, logger.propagate, logger.disabled, *logger.handlers, *logger.filters


def _setting_of(logger: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        level=logger.level,
        propagate=logger.propagate,
        disabled=logger.disabled,
        handlers=list(logger.handlers),
        filters=list(logger.filters),
    )


def _apply_logging(loggers: dict[str, Any]) -> None:
    logging = importlib.import_module("logging")
    for name, setting in loggers.items():
        logger = logging.root if name == "root" else logging.getLogger(name)
        logger.setLevel(setting.level)
        logger.propagate, logger.disabled = setting.propagate, setting.disabled
        logger.handlers[:] = [one for one in setting.handlers if not isinstance(one, Lost)]
        logger.filters[:] = [one for one in setting.filters if not isinstance(one, Lost)]


def _apply_warnings(filters: list[Any]) -> None:
    warnings.filters[:] = [one for one in filters if not isinstance(one, Lost)]  # type: ignore[index]
    getattr(warnings, "_filters_mutated", lambda: None)()


def _apply_decimal(context: Any) -> None:
    importlib.import_module("decimal").setcontext(context)


def _handlers() -> dict[str, Any]:
    """The signal handlers, as the user set them. That of SIGINT is ours."""
    handlers = {}
    for number in signal.valid_signals() - {signal.SIGINT, signal.SIGKILL, signal.SIGSTOP}:
        handler: Any = signal.getsignal(number)
        handler = getattr(handler, "handler", handler)  # while no cell runs, it is wrapped
        if handler is not None and isinstance(number, signal.Signals):
            handlers[number.name] = handler
    return handlers


def _apply_handlers(handlers: dict[str, Any]) -> None:
    for name, handler in handlers.items():
        if not isinstance(handler, Lost):
            signal.signal(signal.Signals[name], handler)


_APPLY: dict[str, Callable[[Any], None]] = {
    "logging": _apply_logging,
    "warning filters": _apply_warnings,
    "decimal context": _apply_decimal,
    "signal handlers": _apply_handlers,
}


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""  # it was removed


def _numpy_random() -> Any:
    random = getattr(sys.modules.get("numpy"), "random", None)
    if random is None:
        return None
    try:
        kind, keys, *rest = random.get_state()
        return [kind, keys.tolist(), *rest]
    except Exception:
        return None  # the user has set another generator, which has no such state


def apply(state: dict[str, Any]) -> Losses:
    """Restore what `gather` returned, as far as loading variables may depend on it."""
    os.environ.update(state["environ"])
    for key in state["unset"]:
        os.environ.pop(key, None)
    if time.tzname != tuple(state.get("timezone", time.tzname)):
        time.tzset()
    os.umask(state.get("umask", _umask()))
    # Loading may need a stack as deep as saving had.
    sys.setrecursionlimit(max(state.get("recursion", 0), sys.getrecursionlimit()))
    sys.path += [one for one in state["path"] if one not in sys.path]
    for name, lines in state["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    if state["directory"]:
        try:
            os.chdir(state["directory"])
        except OSError as error:
            return [["directory", f"{state['directory']}: {error.strerror}"]]
    return []


def apply_last(kept: dict[str, Any]) -> Losses:
    """Restore the rest, once variables are loaded: loading may use random numbers."""
    sys.setrecursionlimit(kept.get("recursion", sys.getrecursionlimit()))
    random.setstate(kept["random"])
    if kept["numpy"] is not None:
        try:
            importlib.import_module("numpy").random.set_state(tuple(kept["numpy"]))
        except Exception as error:
            return [["numpy.random", in_short(error)]]
    return []


def running() -> Losses:
    """Threads, processes and tasks, which end with this process."""
    main = threading.main_thread()
    threads = [thread.name for thread in threading.enumerate() if thread is not main]
    return [
        *[[f"thread {name}", "a thread cannot be saved"] for name in threads],
        *[[f"process {name}", "a running process cannot be saved"] for name in _children()],
        *[[f"task {name}", "a running task cannot be saved"] for name in _tasks()],
    ]


def _children() -> list[str]:
    children = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                head, _, tail = file.read().rpartition(b")")
        except OSError:
            continue
        state, parent = tail.split()[:2]
        if int(parent) == os.getpid() and state != b"Z":
            children.append(f"{process} ({head.partition(b'(')[2].decode(errors='replace')})")
    return children


def _tasks() -> list[str]:
    kind = getattr(sys.modules.get("asyncio"), "Task", None)
    if kind is None:
        return []
    return [one.get_name() for one in gc.get_objects() if isinstance(one, kind) and not one.done()]
