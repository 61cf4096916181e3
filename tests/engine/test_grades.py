"""How well a box must be isolated, and what becomes of one that is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hutch import operations as op
from hutch.backends.base import Box, Spec
from hutch.engine.box_request import make_box_request, start
from hutch.errors import BackendUnavailable
from hutch.testing.fake import FakeBackend
from hutch.types import Grade


class Containers(FakeBackend):
    """As with an engine, the runtime decides."""

    best = "vm"
    has_runtimes = True

    async def start(self, spec: Spec, id: str | None = None) -> Box:
        box = await super().start(spec, id)
        box.isolation = "gvisor" if spec.runtime == "runsc" else "ns"
        return box


def go(backend: FakeBackend, work: Any) -> None:
    async def main() -> None:
        try:
            await work()
            assert await backend.list() == []
        finally:
            await backend.close()

    asyncio.run(main())


async def started(backend: FakeBackend, wanted: Grade, runtime: str = "") -> None:
    o = op.OpenSession(min_isolation=wanted, runtime=runtime)
    await (await start(backend, await make_box_request(o, backend, None))).close()


def test_a_box_of_a_better_runtime_is_as_good_as_was_asked() -> None:
    backend = Containers()
    go(backend, lambda: started(backend, "gvisor", "runsc"))


@pytest.mark.parametrize(("wanted", "names"), [("gvisor", "runsc"), ("vm", "kata")])
def test_a_box_that_is_not_as_good_is_gone_and_what_would_be_is_named(
    wanted: Grade, names: str
) -> None:
    async def work() -> None:
        with pytest.raises(BackendUnavailable, match=f"gives 'ns': .* with runtime {names} "):
            await started(backend, wanted)

    backend = Containers()
    go(backend, work)


def test_what_a_backend_can_never_give_is_refused_before_a_box_is_made() -> None:
    class Idle(FakeBackend):
        async def start(self, spec: Spec, id: str | None = None) -> Box:
            raise AssertionError("a box was made")

    async def work() -> None:
        with pytest.raises(BackendUnavailable, match="gives 'ns'"):
            await started(backend, "gvisor")

    backend = Idle()
    go(backend, work)
