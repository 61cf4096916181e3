"""What is running in an adopted box. Its guest reports it and is not trusted: all is validated."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from hutch import wire
from hutch.errors import GuestMisbehaved, InvalidRequest

from .check import argv_of, env_of, guest_field, name_of, path_of, user_of
from .link import Link

MAX_FOUND = 4096  # programs, shells and contexts
_JOB = re.compile(r"p([1-9][0-9]{0,8})")


@dataclass(frozen=True)
class SurveyedJob:
    id: str
    number: int
    argv: tuple[str, ...]
    pid: int
    terminal: bool
    started_at: float
    takes_input: bool
    total: int  # bytes it has printed
    answer: dict[str, object] | None  # the result of Attach, once it has ended


@dataclass
class BoxSurvey:
    jobs: list[SurveyedJob] = field(default_factory=list)
    shells: dict[str, str | None] = field(default_factory=dict)  # by name: the user
    contexts: dict[str, wire.StartKernel] = field(default_factory=dict)


async def survey(link: Link) -> BoxSurvey:
    """Ask the guest what is in its box. Raises GuestMisbehaved if the answer is not valid."""
    result, count = BoxSurvey(), 0
    async with link.call(wire.Survey()) as call:
        async for event in call:
            count += 1
            if count > MAX_FOUND or not isinstance(event, wire.Note):
                raise GuestMisbehaved("the guest reported more than a box can hold")
            try:
                _take(result, event.body)
            except InvalidRequest as exc:
                raise GuestMisbehaved(f"malformed report from guest: {exc}") from None
    return result


def _take(found: BoxSurvey, body: dict[str, object]) -> None:
    if "job" in body:
        found.jobs.append(_job(guest_field(body, "job", dict)))
    elif "shell" in body:
        shell = guest_field(body, "shell", dict)
        found.shells[name_of(shell.get("name"))] = user_of(shell.get("user"))
    elif "context" in body:
        context = guest_field(body, "context", dict)
        name = name_of(context.get("name"), "a context's name")
        cwd = None if context.get("cwd") is None else path_of(context["cwd"])
        found.contexts[name] = wire.StartKernel(
            name, cwd, env_of(guest_field(context, "env", dict))
        )


def _job(body: dict[str, object]) -> SurveyedJob:
    name = _JOB.fullmatch(guest_field(body, "name", str))
    started = guest_field(body, "started", float)
    numbers = guest_field(body, "pid", int), guest_field(body, "total", int)
    if not name or not math.isfinite(started) or not all(0 <= n < 1 << 62 for n in numbers):
        raise GuestMisbehaved(f"malformed program from guest: {body!r:.100}")
    answer = None if body.get("result") is None else guest_field(body, "result", dict)
    if answer is not None:
        guest_field(answer, "exit_code", int)
    return SurveyedJob(
        id=name[0],
        number=int(name[1]),
        argv=tuple(argv_of(guest_field(body, "argv", list))),
        pid=numbers[0],
        terminal=guest_field(body, "tty", bool),
        started_at=started,
        takes_input=guest_field(body, "input", bool),
        total=numbers[1],
        answer=answer,
    )
