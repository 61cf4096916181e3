"""The kernel's life: one request after the other, until the guest hangs up.

A cell runs in the main thread, where signals and deep recursion belong. An interrupt is heard from
the moment a cell begins until its answer is made, our own part of it included: a `__repr__` that
never ends is part of the cell. Between cells the kernel is deaf.

Whatever a cell does to the interpreter it runs in (streams, handlers, tracing), the next one finds
it as it should be. What a cell forks is never a second kernel.
"""

from __future__ import annotations

import builtins
import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from . import charts, data, display, hooks, saving, sleep, state, variables, warm
from .calls import HostCalls
from .cells import Cells, describe_briefly, describe_error, format_error
from .channel import Channel, Closed
from .signals import deafen, listen
from .streams import Streams, flush_current

LEAST_RECURSION = 1000

Message = dict[str, Any]

MAX_FAULTS = 5  # in a row
BROKEN = 70  # the exit code that says so


def main(fd: int, *, forked: bool = False, environ: dict[str, str] | None = None) -> NoReturn:
    """Serve the channel on `fd`. Never returns.

    `forked` says that this process was not exec'ed but is a fork of a warm one, whose traces are
    removed first; `environ` is then what exec would have been given.
    """
    try:
        deafen()
        if forked:
            warm.part(environ or {})
        Kernel(Channel(fd), forked).serve()
    except Closed:
        pass
    finally:
        # No atexit, no waiting for threads: the guest is gone.
        os._exit(0)


class Kernel:
    """What a context is: a namespace, and the requests that work on it."""

    def __init__(self, channel: Channel, forked: bool) -> None:
        self._channel = channel
        self._forked = forked
        self._streams = Streams()
        self._site: str | None = None  # packages of the box's own, once there are any
        self._swap: sleep.Swap | None = None
        self._asked: Message | None = None  # and not answered yet
        self._fault: BaseException | None = None
        self.cells = Cells(_fresh_main())
        self._passes: state.Passes | None = None  # over a state that is to be loaded again
        self._lost: dict[str, str] = {}  # names that a loaded state did not have, and why
        self._calls: HostCalls | None = None  # none before a cell may call the host
        self._requests: dict[str, Callable[[Message], Message]] = {
            "start": self._start,
            "run": self._run,
            "variables": self._variables,
            "sleep": self._sleep,
            "save": self._save,
            "load": self._load,
        }

    def serve(self) -> NoReturn:
        """One request after the other. Raises Closed."""
        faults = 0
        while True:
            try:
                self._serve_one()
                faults = 0
            except Closed:
                raise
            except BaseException as exc:
                # A bug of ours, or a signal handler of user code that raised after the cell and
                # before `deafen`. The request must be answered nevertheless.
                self._fault = exc
                faults += 1
                if faults > MAX_FAULTS:  # user code broke what we need to answer
                    os._exit(BROKEN)

    def _serve_one(self) -> None:
        deafen()
        if self._asked is None:
            self._asked = self._channel.request()
            answer = self._requests[self._asked["do"]](self._asked)
            deafen()
        else:
            self._clean_up()
            error = describe_error(self._fault or RuntimeError())
            answer = {"count": self.cells.count, "error": error}
        self._channel.answer(answer)
        self._asked = self._fault = None

    def _start(self, asked: Message) -> Message:
        if self._forked:
            self._site = warm.settle(asked)
        if sys.path[:1] != [""]:
            sys.path.insert(0, "")
        sys.argv = [""]
        if asked.get("cwd"):
            os.chdir(asked["cwd"])
        if swap := asked.get("swap"):
            self._swap = sleep.Swap(swap["fd"], swap["offset"], swap["size"])
        # A crash says in which line it was. To a copy of stderr, for the user may close that one.
        faulthandler.enable(self._streams.stderr_copy, all_threads=False)
        builtins.display = display.display  # type: ignore[attr-defined]
        builtins.input = _input
        builtins.__magic__ = self.cells.magic  # type: ignore[attr-defined]
        data.install(vars(builtins))
        hooks.install()
        state.begin()
        version = ".".join(map(str, sys.version_info[:3]))
        return {"python": version, "pid": os.getpid()}

    # cells

    def _run(self, asked: Message) -> Message:
        cells = self.cells
        cells.count += 1
        error: Message | None = None
        if self._site and os.path.isdir(self._site):
            warm.use_packages(self._site)
            self._site = None
        display.stage.begin(cells.count, self._show)
        self._offer(asked)
        try:
            listen()
            error = self._attempt(asked["code"])
        except BaseException as exc:  # interrupted while the error was described
            deafen()
            error = describe_briefly(exc)
        finally:
            deafen()
            self._clean_up()
        return {"count": cells.count, "error": error}

    def _attempt(self, code: str) -> Message | None:
        """Run, and show what was drawn, whether or not it went well."""
        error: Message | None = None
        try:
            self.cells.run(code)
        except BaseException as exc:
            self._leave_if_forked(exc)
            self._explain(exc)
            error = describe_error(exc)
        self._leave_if_forked(None)
        self.cells.magic.stop_clock()
        display.show_open_figures()
        flush_current()
        return error

    def _explain(self, exc: BaseException) -> None:
        """A name that is missing since the session slept. Not a note: Python 3.10 has none."""
        name = getattr(exc, "name", None)
        if type(exc) is NameError and isinstance(name, str) and name in self._lost:
            exc.args = (f"{exc}: it was lost when this session slept ({self._lost[name]})",)

    def _offer(self, asked: Message) -> None:
        """Functions of the host, for this cell."""
        if names := asked.get("functions"):
            self._calls = self._calls or HostCalls(self._channel)
            self._calls.begin(names, asked["awaitable"], self.cells.namespace)

    def _show(self, result: Message) -> None:
        self._streams.drain()
        is_last = result["main"] and not charts.open_figures()
        self._channel.note({"result": result}, hold=is_last)

    def _leave_if_forked(self, exc: BaseException | None) -> None:
        """A child that a cell has forked ends where the cell ends, as a script would."""
        if os.getpid() == self._channel.pid:
            return
        status = 0
        if isinstance(exc, SystemExit):
            status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        elif exc is not None:
            sys.stderr.write(format_error(exc))
            status = 1
        self._streams.restore()
        os._exit(status & 0xFF)

    def _clean_up(self) -> None:
        display.stage.end()
        if self._calls:
            self._calls.end(self.cells.namespace)
        self._streams.restore()
        threading.settrace(None)
        threading.setprofile(None)
        if sys.getrecursionlimit() < LEAST_RECURSION:
            sys.setrecursionlimit(LEAST_RECURSION)

    # the rest

    def _variables(self, asked: Message) -> Message:
        return {"variables": variables.describe(self.cells.namespace)}

    def _sleep(self, asked: Message) -> Message:
        if self._swap is None:
            return {"slept": [], "bytes": 0, "awake": []}
        sizes = asked["frame_bytes"], asked["array_bytes"]
        return self._swap.sleep(self.cells.namespace, *sizes, self._channel.pending)

    def _save(self, asked: Message) -> Message:
        patience = asked.get("patience", saving.PATIENCE)
        try:
            memory = self.cells.memory()
            return saving.save(self.cells.namespace, self._channel, memory, patience)
        except saving.StateNotSaved as error:
            why = {"name": "NotSaved", "value": str(error), "traceback": ""}
            return {"error": why}
        finally:
            self._channel.end()

    def _load(self, asked: Message) -> Message:
        incoming = self._channel.incoming()
        passes = self._passes or state.Passes()
        try:
            answer = state.load(self.cells.namespace, incoming.read, passes)
        finally:
            incoming.drain()
        self._passes = passes if answer["again"] else None
        self._lost = {name: why for name, why in answer["lost"]}
        self.cells.recall(answer.pop("extra"))
        return {**answer, "count": self.cells.count}


def _fresh_main() -> dict[str, Any]:
    """The module that user code runs in: a real one, for pickle and `if __name__ == …`."""
    module = ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return vars(module)


def _input(prompt: object = "") -> NoReturn:
    raise EOFError("input() is not available here: put the value into the code")
