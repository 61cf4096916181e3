"""File operations of one box. Requests are validated, and so are the guest's answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from hutch import operations as op
from hutch import wire
from hutch.errors import GuestMisbehaved, InvalidRequest, LimitReached
from hutch.types import CHANGE_KINDS, FILE_KINDS, Change, Entry, Match

from .check import guest_field, path_of, seconds_of, text_of, whole_of
from .link import GuestCall, Link

# Bytes of one answer on the wire: some 250,000 files. Keeps a guest from filling the host's memory.
NOTES_LIMIT = 64 * 1024 * 1024
MAX_CONTEXT = 20  # lines: with what they are cut to (guest/search.py), they fit into a frame


class BoxFiles:
    def __init__(self, link: Link) -> None:
        self._link = link

    async def read(self, o: op.ReadFile) -> AsyncGenerator[bytes, None]:
        length = None if o.length is None else whole_of("length", o.length)
        limit = None if o.limit is None else whole_of("limit", o.limit)
        request = wire.Read(path_of(o.path), whole_of("offset", o.offset), length, limit)
        pieces = _pieces(self._link.call(request), limit)
        await anext(pieces)  # so that errors are raised here, not by the first read
        return pieces

    async def write(self, o: op.WriteFile) -> int:
        if o.mode is not None and not 0 <= whole_of("mode", o.mode) <= 0o1777:
            raise InvalidRequest(f"not a mode for a file in a box: {o.mode:#o}")
        expect = None if o.expect is None else text_of("what is expected", o.expect)
        request = wire.Write(path_of(o.path), o.mode, bool(o.append), expect)
        async with self._link.call(request) as call:
            feeding = asyncio.ensure_future(call.feed(o.data))
            try:
                async for _ in call:
                    pass
            finally:
                feeding.cancel()
                failures = await asyncio.gather(feeding, return_exceptions=True)
            for failure in failures:
                if isinstance(failure, Exception):
                    raise failure
            return guest_field(call.result, "written", int)

    async def edit(self, o: op.EditFile) -> int:
        old = text_of("the old text", o.old, nul=True)
        new = text_of("the new text", o.new, nul=True)
        answer = await self._link.ask(wire.Edit(path_of(o.path), old, new, bool(o.replace_all)))
        return guest_field(answer, "replaced", int)

    async def stat(self, o: op.StatFile) -> Entry:
        return _entry(await self._link.ask(wire.Stat(path_of(o.path))))

    async def make_dir(self, o: op.MakeDir) -> bool:
        return guest_field(await self._link.ask(wire.MakeDir(path_of(o.path))), "created", bool)

    async def move(self, o: op.MoveFile) -> None:
        await self._link.ask(wire.Move(path_of(o.path), path_of(o.to), bool(o.overwrite)))

    async def remove(self, o: op.RemoveFile) -> None:
        await self._link.ask(wire.Remove(path_of(o.path), bool(o.recursive)))

    async def search(self, o: op.SearchFiles) -> list[Match]:
        request = wire.Search(
            path_of(o.path),
            text_of("a pattern", o.pattern),
            None if o.glob is None else text_of("a glob", o.glob),
            bool(o.ignore_case),
            whole_of("limit", o.limit, least=1),
            None if o.type is None else text_of("a type", o.type),
            _lines_around(o.context),
            bool(o.gitignore),
            seconds_of(o.timeout),
        )
        return [_match(note) async for note in self._notes(request)]

    async def glob(self, o: op.GlobFiles) -> list[str]:
        if o.kind is not None and o.kind not in FILE_KINDS:
            raise InvalidRequest(f"a kind is one of {', '.join(FILE_KINDS)}, not {o.kind!r}")
        request = wire.Glob(
            path_of(o.path),
            text_of("a pattern", o.pattern),
            o.kind,
            bool(o.gitignore),
            bool(o.newest),
        )
        paths = [guest_field(note, "path", str) async for note in self._notes(request)]
        return paths if o.newest else sorted(paths)

    async def diff(self, o: op.DiffFiles) -> str:
        request = wire.Diff(path_of(o.a), path_of(o.b), _lines_around(o.context))
        return "".join([guest_field(note, "text", str) async for note in self._notes(request)])

    async def list(self, o: op.ListFiles) -> list[Entry]:
        request = wire.List(path_of(o.path), whole_of("depth", o.depth, least=1))
        return [_entry(note) async for note in self._notes(request)]

    async def watch(self, o: op.WatchFiles) -> AsyncGenerator[Change | None, None]:
        return _changes(self._link.call(wire.Watch(path_of(o.path), bool(o.recursive))))

    async def _notes(self, request: Any) -> AsyncIterator[dict[str, Any]]:
        size = 0
        async with self._link.call(request) as call:
            async for event in call:
                size += wire.cost(event)
                if size > NOTES_LIMIT:
                    raise LimitReached("too much for one answer: request a smaller part")
                if isinstance(event, wire.Note):
                    for note in guest_field(event.body, "found", list):
                        if not isinstance(note, dict):
                            raise GuestMisbehaved(f"malformed file from guest: {note!r:.100}")
                        yield note


async def _pieces(call: GuestCall, limit: int | None) -> AsyncGenerator[bytes, None]:
    """First an empty piece, once the guest has begun to answer; then the content."""
    async with call:
        event = await anext(call, None)
        yield b""
        size = 0
        while event is not None:
            if isinstance(event, wire.Data):
                size += len(event.data)
                if limit is not None and size > limit:
                    raise GuestMisbehaved(f"the guest sent more than {limit} bytes")
                yield event.data
            event = await anext(call, None)


async def _changes(call: GuestCall) -> AsyncGenerator[Change | None, None]:
    async with call:
        async for event in call:
            if isinstance(event, wire.Note):
                if event.body.get("ready"):
                    yield None
                else:
                    kind: Any = guest_field(event.body, "kind", str)
                    if kind not in CHANGE_KINDS:
                        raise GuestMisbehaved(f"malformed change from guest: {kind!r:.100}")
                    yield Change(guest_field(event.body, "path", str), kind)


def _lines_around(value: object) -> int:
    if (lines := whole_of("context", value)) > MAX_CONTEXT:
        raise InvalidRequest(f"context is at most {MAX_CONTEXT} lines, not {lines}")
    return lines


def _match(note: dict[str, Any]) -> Match:
    before, after = guest_field(note, "before", list), guest_field(note, "after", list)
    if not all(isinstance(line, str) for line in (*before, *after)):
        raise GuestMisbehaved("malformed match from guest")
    return Match(
        guest_field(note, "path", str),
        guest_field(note, "line", int),
        guest_field(note, "text", str),
        tuple(before),
        tuple(after),
    )


def _entry(note: dict[str, Any]) -> Entry:
    modified, target = note.get("modified"), note.get("target")
    kind: Any = guest_field(note, "kind", str)
    if (
        kind not in FILE_KINDS
        or not isinstance(modified, (int, float))
        or not abs(modified) < 1 << 62  # neither NaN nor larger than a float
        or not isinstance(target, (str, type(None)))
    ):
        raise GuestMisbehaved("malformed file from guest")
    return Entry(
        path=guest_field(note, "path", str),
        kind=kind,
        size=guest_field(note, "size", int),
        mode=guest_field(note, "mode", int),
        modified=float(modified),
        uid=guest_field(note, "uid", int),
        gid=guest_field(note, "gid", int),
        target=target,
    )
