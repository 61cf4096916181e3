"""The links of a session, one after another: some boxes live on when a link breaks.

Where a cluster or an engine carries the connection to a guest, it ends with what carries it, such
as an API server that is restarted. The guest then stops the requests of that connection, and keeps
shells, kernels and background programs. So whoever waits for an answer gets an error that says what
is known (`explain`), whoever comes now waits for the next link (`working`), and background programs
continue on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import NoReturn, TypeVar

from hutch.backends.base import Box, ByteStream
from hutch.errors import BackendUnavailable, BoxLost, HutchError, IncompatibleBox

from .link import Link
from .survey import BoxSurvey, survey

T = TypeVar("T")
PATIENCE = 60.0  # seconds that a request waits for the next link, or for what became of it
ANSWER = 30.0  # seconds for a guest to report what runs: a busy machine is not a crash
SILENT = 10  # connections in a row on which a guest says nothing: it hangs
# Seconds between two attempts. The longest is short, as every session waits for it after an outage.
PAUSE, LONGEST_PAUSE = 0.1, 2.0


class Links:
    """The link that a session has now, and whether there will be another one."""

    def __init__(self, box: Box, link: Link) -> None:
        self._box = box
        self.current = link
        self._lost: HutchError | None = None  # why no other link will follow
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Links of {self._box.id}, {'lost' if self._lost else self.current!r}>"

    @property
    def may_follow(self) -> bool:
        """Whether a link may follow the current one, should that be over."""
        failure = self.current.failure
        trusted = failure is None or isinstance(failure, BoxLost)
        return trusted and self._lost is None and self._box.outlives_links

    @property
    def is_broken(self) -> bool:
        """Whether the link is over, and another one may follow."""
        return self.current.failure is not None and self.may_follow

    def replace(self, link: Link) -> None:
        self.current = link
        self._tell()

    def end(self, why: HutchError) -> None:
        """No other link will follow. The first reason stays."""
        self._lost = self._lost or why
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def after(self, link: Link) -> Link:
        """The link that follows one that is over. Raises why there is none."""
        while self.current is link:
            if self._lost:
                raise self._lost
            await self._changed.wait()
        return self.current

    async def working(self) -> None:
        """Wait for the next link if the current one is broken.

        Raises why there is none, and BackendUnavailable if it takes long.
        """
        while self.is_broken:
            broken = self.current
            try:
                async with asyncio.timeout(PATIENCE):
                    await self.after(broken)
            except TimeoutError:
                raise BackendUnavailable(
                    f"box {self._box.id} cannot be reached now: the connection to it broke "
                    f"({broken.failure}), and could not be made again in {PATIENCE:g} seconds. It "
                    "is tried further; nothing was done for this request"
                ) from None

    async def carry(self, work: Awaitable[T]) -> T:
        """What `work` returns, which uses the current link. Raises as `explain`."""
        link = self.current
        try:
            return await work
        except HutchError as exc:
            await self.explain(exc, link)

    async def explain(self, exc: HutchError, link: Link) -> NoReturn:
        """Raise the error of a request; if it is what ended its link, what became of the box.

        Waits until that is known, but not for long.
        """
        if exc is link.failure and (known := await self._fate(link)) is not exc:
            raise known from exc
        raise exc

    async def _fate(self, link: Link) -> HutchError:
        broke = (
            f"the connection to box {self._box.id} broke while this was under way ({link.failure})"
        )
        try:
            async with asyncio.timeout(PATIENCE):
                await self.after(link)
        except TimeoutError:
            return BackendUnavailable(
                f"{broke}, and cannot be made again yet: it is not known how far this came"
            )
        except HutchError as exc:
            return exc
        return BackendUnavailable(
            f"{broke}, and was made again. It is stopped, unless it had just ended; what it had "
            "done by then stays. Shells, kernels and background programs go on. Do it again if it "
            "may be done twice"
        )


async def connect_again(box: Box) -> tuple[Link, BoxSurvey]:
    """Another link to a box, and what its guest has kept.

    Tries until it is known whether the box lives. Raises BoxLost if it does not or if its guest
    hangs, GuestMisbehaved and IncompatibleBox.
    """
    silent, pause = 0, PAUSE
    while True:
        try:
            stream = await box.connect()
        except IncompatibleBox:
            raise
        except BackendUnavailable:
            silent = 0  # what leads to the box is away, and the box may live
        else:
            try:
                return await _greet(stream)
            except BoxLost:  # the next attempt shows whether it is gone
                silent += 1
                if silent == SILENT:
                    raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


async def _greet(stream: ByteStream) -> tuple[Link, BoxSurvey]:
    link = await Link.open(stream)
    try:
        async with asyncio.timeout(ANSWER):
            kept = await survey(link)
        if link.failure:  # with its last answer
            raise link.failure
        return link, kept
    except TimeoutError:
        await link.close()
        raise BoxLost(f"the guest did not answer within {ANSWER:g} seconds") from None
    except BaseException:
        await link.close()
        raise
