"""The main loop of a kernel: one request after the other, until the guest hangs up.

A cell runs in the main thread, where signals and deep recursion work. Interrupts take effect from
the start of a cell until its answer is complete, so they also stop a `__repr__` that never ends.
Between cells they are ignored.

Whatever a cell does to the interpreter (streams, handlers, tracing) is reset before the next one. A
process that a cell forks never acts as a second kernel.
"""

from __future__ import annotations

import builtins
import faulthandler
import fcntl
import io
import os
import sys
import termios
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn, TextIO

from . import charts, data, display, hooks, saving, sleep, state, surroundings, variables, warm
from .calls import HostCalls
from .cells import Cells, describe_briefly, describe_error, format_error
from .channel import LOWEST_FD, Channel, Closed
from .signals import accept_signals, ignore_signals

LEAST_RECURSION = 1000

Message = dict[str, Any]

MAX_FAULTS = 5  # failures of ours in a row, before the kernel exits
BROKEN = 70  # its exit code then


def main(fd: int, *, forked: bool = False, environ: dict[str, str] | None = None) -> NoReturn:
    """Serve the channel on `fd`. Never returns.

    `forked`: this process is a fork of a warm one, whose state is removed first. `environ` is then
    its environment.
    """
    try:
        ignore_signals()
        if forked:
            warm.part(environ or {})
        Kernel(Channel(fd), forked).serve()
    except Closed:
        pass
    finally:
        # Without atexit and without waiting for threads: the guest is gone.
        os._exit(0)


class Kernel:
    """The namespace of a context, and the requests that work on it."""

    def __init__(self, channel: Channel, forked: bool) -> None:
        self._channel = channel
        self._forked = forked
        self._streams = Streams()
        self._site: str | None = None  # the folder of packages that the box installs
        self._swap: sleep.Swap | None = None
        self._request: Message | None = None  # the one that is not answered yet
        self._fault: BaseException | None = None
        self.cells = Cells(_fresh_main())
        self._passes: state.Passes | None = None  # over a state that has to be loaded again
        self._lost: dict[str, str] = {}  # names that could not be saved or loaded, and why
        self._calls: HostCalls | None = None  # None until a cell may call the host
        self._handlers: dict[str, Callable[[Message], Message]] = {
            "start": self._start,
            "run": self._run,
            "variables": self._variables,
            "sleep": self._sleep,
            "save": self._save,
            "load": self._load,
        }

    def serve(self) -> NoReturn:
        """Answer one request after the other. Raises Closed when the guest hangs up."""
        faults = 0
        while True:
            try:
                self._serve_one()
                faults = 0
            except Closed:
                raise
            except BaseException as exc:
                # A bug of ours, or a signal handler of user code that raised after the cell and
                # before `ignore_signals`. The request must be answered all the same.
                self._fault = exc
                faults += 1
                if faults > MAX_FAULTS:  # user code broke what we need to answer
                    os._exit(BROKEN)

    def _serve_one(self) -> None:
        ignore_signals()
        if self._request is None:
            self._request = self._channel.request()
            answer = self._handlers[self._request["do"]](self._request)
            ignore_signals()
        else:
            self._clean_up()
            error = describe_error(self._fault or RuntimeError())
            answer = {"count": self.cells.count, "error": error}
        self._channel.answer(answer)
        self._request = self._fault = None

    def _start(self, request: Message) -> Message:
        if self._forked:
            self._site = warm.settle(request)
        if sys.path[:1] != [""]:
            sys.path.insert(0, "")
        sys.argv = [""]
        if request.get("cwd"):
            os.chdir(request["cwd"])
        if swap := request.get("swap"):
            self._swap = sleep.Swap(swap["fd"], swap["offset"], swap["size"])
        # Reports the line of a crash. On a copy of stderr, as user code may close the original.
        faulthandler.enable(self._streams.stderr_copy, all_threads=False)
        vars(builtins).update(display=display.display, input=_input, __magic__=self.cells.magic)
        data.install(vars(builtins))
        hooks.install()
        surroundings.begin()
        version = ".".join(map(str, sys.version_info[:3]))
        return {"python": version, "pid": os.getpid()}

    # --- cells --------------------------------------------------------------------------

    def _run(self, request: Message) -> Message:
        cells = self.cells
        cells.count += 1
        error: Message | None = None
        if self._site and os.path.isdir(self._site):
            warm.use_packages(self._site)
            self._site = None
        display.stage.begin(cells.count, self._show)
        self._offer(request)
        try:
            accept_signals()
            error = self._attempt(request["code"])
        except BaseException as exc:  # interrupted while the error was described
            ignore_signals()
            error = describe_briefly(exc)
        finally:
            ignore_signals()
            self._clean_up()
        return {"count": cells.count, "error": error}

    def _attempt(self, code: str) -> Message | None:
        """Run a cell, and show its open figures even if it failed. Returns its error."""
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
        """Add to a NameError that the name was lost. Not as a note: Python 3.10 has none."""
        name = getattr(exc, "name", None)
        if type(exc) is NameError and isinstance(name, str) and name in self._lost:
            exc.args = (f"{exc}: it was lost when this session slept ({self._lost[name]})",)

    def _offer(self, request: Message) -> None:
        """Define the functions of the host for this cell."""
        if names := request.get("functions"):
            self._calls = self._calls or HostCalls(self._channel)
            self._calls.begin(names, request["awaitable"], self.cells.namespace)

    def _show(self, result: Message) -> None:
        self._streams.drain()
        is_last = result["main"] and not charts.open_figures()
        self._channel.note({"result": result}, hold=is_last)

    def _leave_if_forked(self, exc: BaseException | None) -> None:
        """Exit if this is a child that the cell forked: it ends with the cell, like a script."""
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

    # --- other requests -----------------------------------------------------------------

    def _variables(self, request: Message) -> Message:
        return {"variables": variables.describe(self.cells.namespace)}

    def _sleep(self, request: Message) -> Message:
        if self._swap is None:
            return {"slept": [], "bytes": 0, "awake": []}
        sizes = request["frame_bytes"], request["array_bytes"]
        return self._swap.sleep(self.cells.namespace, *sizes, self._channel.pending)

    def _save(self, request: Message) -> Message:
        patience = request.get("patience", saving.PATIENCE)
        try:
            memory = self.cells.memory()
            return saving.save(self.cells.namespace, self._channel, memory, patience)
        except saving.StateNotSaved as error:
            why = {"name": "NotSaved", "value": str(error), "traceback": ""}
            return {"error": why}
        finally:
            self._channel.end()

    def _load(self, request: Message) -> Message:
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


def _fresh_main() -> dict[str, object]:
    """The namespace of user code: a real module, for pickle and `if __name__ == …`."""
    module = ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return vars(module)


def _input(prompt: object = "") -> NoReturn:
    raise EOFError("input() is not available here: put the value into the code")


# --- standard streams -------------------------------------------------------------------
#
# User code may close, replace or redirect stdin, stdout and stderr, in Python or below. The next
# cell starts with the original ones.


DRAIN_PATIENCE = 0.5  # seconds to wait for the reader; after that, order is not guaranteed


class Streams:
    """Keeps copies of descriptors 0, 1 and 2, and puts back what is missing."""

    def __init__(self) -> None:
        self._copies = [_copy(fd) for fd in range(3)]
        self.stderr_copy = self._copies[2]
        self._identities = [_identity(fd) for fd in self._copies]
        self._stdin, self._stdout, self._stderr = _reader(), _writer(1), _writer(2)
        self.restore()

    def restore(self) -> None:
        """Flush what was written, and put the original streams and descriptors back."""
        if not _usable(self._stdin):
            self._stdin = _reader()
        if not _usable(self._stdout):
            self._stdout = _writer(1)
        if not _usable(self._stderr):
            self._stderr = _writer(2)
        self._restore_descriptors()
        _flush(self._stdout)
        _flush(self._stderr)
        vars(sys).update(
            stdin=self._stdin,
            __stdin__=self._stdin,
            stdout=self._stdout,
            __stdout__=self._stdout,
            stderr=self._stderr,
            __stderr__=self._stderr,
        )

    def drain(self) -> None:
        """Wait until all output has been read, so that a result comes after it."""
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        patience = time.monotonic() + DRAIN_PATIENCE
        while any(map(_unread, self._copies[1:])) and time.monotonic() < patience:
            time.sleep(0.0001)

    def _restore_descriptors(self) -> None:
        for fd, (copy, identity) in enumerate(zip(self._copies, self._identities)):  # noqa: B905
            if _identity(fd) != identity:
                # What is still in the buffer was meant for the replacement.
                _flush((self._stdin, self._stdout, self._stderr)[fd])
                os.dup2(copy, fd)
            elif not os.get_inheritable(fd):
                os.set_inheritable(fd, True)  # user code opened the same file in its place
            if not os.get_blocking(fd):
                os.set_blocking(fd, True)


def flush_current() -> None:
    """Flush what user code has put in place of stdout and stderr. May take long."""
    for name in ("stdout", "stderr"):
        _flush(getattr(sys, name, None))


def _unread(fd: int) -> bool:
    """Whether the pipe has unread bytes. On Linux the writer's end can tell, too."""
    try:
        return any(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
    except OSError:
        return False


def _copy(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOWEST_FD)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, fd)
        return null


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        info = os.fstat(fd)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _reader() -> TextIO:
    return open(0, encoding="utf-8", errors="replace", closefd=False)


def _writer(fd: int) -> TextIO:
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw, 1 << 16),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def _usable(stream: TextIO) -> bool:
    try:
        return not stream.closed
    except ValueError:  # its buffer was detached
        return False


def _flush(stream: Any) -> None:
    try:
        stream.flush()
    except Exception:
        pass  # an object of user code, or a closed pipe
