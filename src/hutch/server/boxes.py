"""Where the boxes of sessions come from: the pool, or a new start."""

from __future__ import annotations

from typing import Literal

from hutch import wire
from hutch.backends.base import Backend
from hutch.engine.box_request import (
    BoxRequest,
    ImageSource,
    StartedBox,
    make_box_request,
    own_name,
    start,
)
from hutch.engine.starts import Starts
from hutch.errors import BoxLost, NoImage, NotFound
from hutch.operations import OpenSession

from .pool import Pool
from .rules import Rules


class BoxSource:
    """Takes boxes from the pool if they fit, and starts others."""

    def __init__(self, backend: Backend, images: ImageSource | None, rules: Rules) -> None:
        self._backend, self._images, self._rules = backend, images, rules
        self.starts = Starts(rules.max_starts, rules.max_waiting)
        sizes = {own_name(name, backend.default_image): n for name, n in rules.pool.items()}
        self.pool: Pool[StartedBox] = Pool(self._start_warm, sizes, rules.pool_max_age)

    async def request(
        self, o: OpenSession, digest: str | None = None, workspace: str | None = None
    ) -> BoxRequest:
        """`digest`: of the image that an earlier box of the session had. Raises NoImage."""
        try:
            return await make_box_request(o, self._backend, self._images, digest, workspace)
        except NotFound as exc:
            raise NoImage(str(exc)) from None

    async def acquire(
        self, request: BoxRequest, owner: str, *, has_workspace: bool
    ) -> tuple[StartedBox, Literal["cold", "pool"], str | None]:
        """A box from the pool, or a new one; where it came from; and why not from the pool."""
        image, digest = request.spec.image, None
        if self.pool.has(image):  # its tag may stand for another image by now
            digest = await self._backend.digest_of(image)
        warm, detail = self.pool.take(image, lambda warm: _fits(warm, request, digest))
        if warm:
            try:
                await _give_env(warm, request)
                return warm, "pool", None
            except BaseException as exc:
                await warm.close()
                if not isinstance(exc, BoxLost):
                    raise
            detail = "pool_box_lost"
        if detail and has_workspace:
            detail = "pool_workspace_mismatch"
        return await self.start(request, owner), "cold", detail

    async def start(
        self, request: BoxRequest, owner: str, *, may_be_refused: bool = True
    ) -> StartedBox:
        """Start a box when it is the owner's turn. Raises ServerBusy if it may be refused."""
        turn = self.starts.turn(owner, may_be_refused=may_be_refused)
        return await start(self._backend, request, turn=turn)

    async def _start_warm(self, image: str) -> StartedBox:
        """A box for the pool. Its main shell is open already: most sessions use it first."""
        rules = self._rules
        o = OpenSession(image, limits=rules.default_limits, runtime=rules.runtime)
        ready = await start(self._backend, await self.request(o))
        try:
            await ready.link.ask(wire.ShellCommand("main", ":"))
        except BaseException:
            await ready.close()
            raise
        return ready


def _fits(warm: StartedBox, request: BoxRequest, digest: str | None) -> bool:
    """Whether a box of the pool fits a request, even if its image was built again since.

    `digest`: of the image as it is now, if the backend knows it.
    """
    own = warm.request
    is_same = (own.spec, own.min_isolation) == (request.spec, request.min_isolation)
    return is_same and digest in (None, warm.box.digest)


async def _give_env(warm: StartedBox, request: BoxRequest) -> None:
    if request.env:
        await warm.link.ask(wire.SetEnv(request.env))
        await warm.link.ask(wire.EndShell("main"))  # it was started without these variables
