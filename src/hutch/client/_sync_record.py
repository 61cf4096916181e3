# Generated from _async_record.py by scripts/unasync. Change that file, and run the script.
"""What is known of a box: its record, what it uses, what happened in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hutch
from hutch import operations as op
from hutch.types import BoxInfo, Stats

from . import transport
from ._sync_stream import Stream

if TYPE_CHECKING:  # what only a server knows is loaded when it is asked for
    import hutch.serving
    from hutch.serving import JournalEntry
    from hutch.types import Port


class Record:
    """What can be asked about a box. Every box is one of these."""

    info: BoxInfo
    _transport: transport.Transport

    def refresh(self) -> BoxInfo:
        """Ask again how the box is, also if it has ended; the answer is in `info` from now on."""
        self.info = self._transport.perform(op.GetSession(self.info.id))
        return self.info

    def extend(self, ttl: float) -> BoxInfo:
        """Move its deadline to `ttl` seconds from now, if that is later than it was.

        SessionEnded if it came too late.
        """
        self.info = self._transport.perform(op.ExtendSession(self.info.id, ttl))
        return self.info

    def ports(self) -> list[Port]:
        """TCP ports that something in the box listens on. Needs a server."""
        return self._transport.perform(hutch.serving.ListPorts(self.info.id))

    def journal(self, after: int = 0, *, limit: int = 1000) -> list[JournalEntry]:
        """What happened in the box, after line number `after`, oldest first. Needs a server."""
        return self._transport.perform(hutch.serving.ReadJournal(self.info.id, after, limit))

    def follow_journal(self, after: int = 0) -> Stream[JournalEntry]:
        """The same, and then each line as it is written, until the box has ended."""
        operation = hutch.serving.FollowJournal(self.info.id, after)
        return Stream(self._transport.stream(operation))

    def stats(self) -> Stats:
        """What the box uses now."""
        return self._transport.perform(op.GetStats(self.info.id))
