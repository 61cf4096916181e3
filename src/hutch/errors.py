"""All errors of this library, sorted by who has to act.

    HutchError
    ├── CallerError             the caller: sending it again will not help
    │   ├── InvalidRequest      the request itself is wrong
    │   │   ├── IsFolder        it is for files, and this is a folder
    │   │   └── NotFolder       it is for folders, and this is not one
    │   ├── NotFound            no such box, shell, process, file or image
    │   │   └── NoImage         a server has no such image, or does not allow it
    │   ├── Conflict            it exists already, or is not in a state for this
    │   ├── NotPermitted        the box's user may not do this to that file
    │   ├── Unauthorized        a server needs a key, or another one
    │   └── CommandFailed       check=True, and the exit code was not 0
    ├── LimitReached            the caller, with a different request or later
    │   ├── QuotaReached        the owner has, or asks for, more than the operator allows
    │   ├── TimedOut            it ran longer than its timeout, and was killed
    │   ├── NoSpace             the box's disk or memory is full
    │   ├── NoCapacity          the machine has no room for another box
    │   └── ServerBusy          too many boxes wait to be started; nothing was done
    ├── BoxError                no one: open a new box
    │   ├── StartFailed         the box did not start; nothing is left of it
    │   ├── BoxLost             it died, or was closed
    │   │   ├── NoSession       there is no session with this id, or it is another owner's
    │   │   └── SessionEnded    it was closed, or its deadline passed
    │   └── GuestMisbehaved     it broke the wire protocol and was stopped
    ├── BackendUnavailable      the operator: this machine cannot do what was asked
    │   └── IncompatibleBox     the session's box is of another version of Hutch; it lives on
    └── ServerUnavailable       the operator: the server cannot be reached, or is shutting down

A command that exits with 1 is not an error: it ran, and that is a Result.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from .types import Execution, Result


class HutchError(Exception):
    """The base of all errors of this library. `code` is the same in the API and in the docs."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500


class CallerError(HutchError):
    """The request cannot be carried out as it is; sending it again will not help."""

    code, status = "caller_error", 400


class InvalidRequest(CallerError):
    """The request itself is wrong. The message says what is expected."""

    code = "invalid_request"


class IsFolder(InvalidRequest):
    """This is a folder, and the operation is for files."""

    code = "is_folder"


class NotFolder(InvalidRequest):
    """This is not a folder, and the operation is for folders."""

    code = "not_folder"


class NotFound(CallerError):
    """There is no such box, shell, process, program, file or image."""

    code, status = "not_found", 404


class NoImage(NotFound):
    """A server has no such image, or its operator does not allow it."""

    code, status = "invalid_image", 400


class Conflict(CallerError):
    """It already exists, or is in the wrong state for this."""

    code, status = "conflict", 409


class NotPermitted(CallerError):
    """The box's user may not do this."""

    code, status = "not_permitted", 403


class Unauthorized(CallerError):
    """The server needs a key, or one with more rights."""

    code, status = "unauthorized", 401


class CommandFailed(CallerError):
    """A command with check=True did not exit with 0, or a cell with check=True raised.

    `result` is the command's Result; for a cell, `execution` is its Execution.
    """

    code = "command_failed"
    result: Result
    execution: Execution

    def __init__(
        self, message: str, result: Result | None = None, execution: Execution | None = None
    ) -> None:
        super().__init__(message)
        if result is not None:
            self.result = result
        if execution is not None:
            self.execution = execution


class LimitReached(HutchError):
    """A limit was reached: use less, or try again later."""

    code, status = "limit_reached", 429


class QuotaReached(LimitReached):
    """The owner of the key uses, or requests, more than the operator of the server allows."""

    code = "quota_reached"


class TimedOut(LimitReached):
    """The timeout of a command or cell with check=True passed.

    `result` is the command's Result with the output so far; for a cell, `execution` is its
    Execution.
    """

    code, status = "timed_out", 408
    result: Result
    execution: Execution

    def __init__(
        self, message: str, result: Result | None = None, execution: Execution | None = None
    ) -> None:
        super().__init__(message)
        if result is not None:
            self.result = result
        if execution is not None:
            self.execution = execution


class NoSpace(LimitReached):
    """The box's disk or memory is full. Existing files are not affected."""

    code, status = "no_space", 507


class NoCapacity(LimitReached):
    """This machine has no room for another box."""

    code, status = "no_capacity", 503


class ServerBusy(LimitReached):
    """Too many boxes wait to be started on this server. Nothing was done.

    `retry_after`: seconds until it is worth trying again.
    """

    code, status = "server_busy", 503

    def __init__(self, message: str, retry_after: float = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class BoxError(HutchError):
    """The box failed, not the request: open a new one."""

    code, status = "box_error", 502


class StartFailed(BoxError):
    """The box did not start. Nothing is left of it."""

    code = "start_failed"


class BoxLost(BoxError):
    """The box died, or was closed. Whatever ran in it is gone."""

    code = "box_lost"


class NoSession(BoxLost):
    """There is no session with this id, or it belongs to another owner."""

    code, status = "session_not_found", 404


class SessionEnded(BoxLost):
    """The session was closed, or its deadline passed. The message says which."""

    code, status = "session_expired", 410


class GuestMisbehaved(BoxError):
    """The guest broke the wire protocol and was disconnected. Trust nothing that it sent."""

    code = "guest_misbehaved"


class BackendUnavailable(HutchError):
    """This machine cannot do this, or not now: `hutch doctor` says what is missing.

    Also if a box cannot be reached for now, or a request was stopped because the connection to its
    box broke: the message says which, and what is known.
    """

    code, status = "backend_unavailable", 503


class IncompatibleBox(BackendUnavailable):
    """The box of the session runs a version of Hutch that this one cannot talk to.

    It is healthy, and lives until its deadline. A server of its version can use it again.
    """

    code = "incompatible_box"


class ServerUnavailable(HutchError):
    """The server cannot be reached, or is shutting down. Safe requests were retried."""

    code, status = "server_unavailable", 503


def _tree(cls: type[HutchError]) -> list[type[HutchError]]:
    return [cls, *(error for child in cls.__subclasses__() for error in _tree(child))]


BY_CODE: dict[str, type[HutchError]] = {cls.code: cls for cls in _tree(HutchError)}


def from_code(code: str, message: str) -> HutchError:
    """The error with this code; a plain HutchError for an unknown code."""
    return BY_CODE.get(code, HutchError)(message)


# For EMFILE and ENFILE on the host, which a caller of a server cannot change.
TOO_MANY_FILES = (
    "too many files open: raise its limit (`ulimit -n`, or LimitNOFILE= in a systemd unit), or "
    "use fewer boxes at once"
)


@contextmanager
def as_answers() -> Iterator[None]:
    """Turn an OSError for a full disk into NoSpace, and one for too many files into NoCapacity."""
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace("the server's disk is full, or has no room for more files") from exc
        if exc.errno in (errno.EMFILE, errno.ENFILE):
            raise NoCapacity(f"the server has {TOO_MANY_FILES}") from exc
        raise
