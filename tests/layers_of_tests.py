"""Layers and roots that tests make themselves, and boxes of them."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from must_work import need

from hutch import wire
from hutch.backends.base import Box, Spec
from hutch.backends.namespaces import NamespacesBackend
from hutch.backends.namespaces.unpack import unpack
from hutch.engine.link import Link
from hutch.errors import BackendUnavailable
from hutch.types import Root

BUSYBOX = Path("/bin/busybox")  # of busybox-static: it needs nothing else
PROGRAMS = (
    "sh", "cat", "chmod", "dd", "echo", "env", "grep", "id", "ln", "ls", "mkdir", "mknod", "mount",
    "mv", "readlink", "rm", "rmdir", "sha256sum", "stat", "touch", "true",
)  # fmt: skip

Entry = tuple[tarfile.TarInfo, bytes]


def file(name: str, content: bytes | str = b"", mode: int = 0o644, **more: Any) -> Entry:
    data = content.encode() if isinstance(content, str) else content
    return _entry(name, tarfile.REGTYPE, data, mode=mode, size=len(data), **more)


def folder(name: str, mode: int = 0o755, **more: Any) -> Entry:
    return _entry(name, tarfile.DIRTYPE, mode=mode, **more)


def link(name: str, target: str, **more: Any) -> Entry:
    return _entry(name, tarfile.SYMTYPE, linkname=target, **more)


def hard_link(name: str, target: str) -> Entry:
    return _entry(name, tarfile.LNKTYPE, linkname=target)


def special(name: str, kind: bytes, **more: Any) -> Entry:
    return _entry(name, kind, **more)


def _entry(name: str, kind: bytes, data: bytes = b"", **more: Any) -> Entry:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def tar_of(*entries: Entry) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def layer_of(where: Path, *entries: Entry) -> str:
    """A new folder with these in it."""
    where.mkdir(parents=True)
    unpack_bytes(tar_of(*entries), where)
    return str(where)


def unpack_bytes(data: bytes, where: Path, **more: Any) -> None:
    with open(os.memfd_create("tar"), "w+b") as tar:
        tar.write(data)
        tar.flush()
        tar.seek(0)
        try:
            unpack(tar.fileno(), str(where), **more)
        except BackendUnavailable as exc:
            need("namespaces", str(exc))


def busybox() -> list[Entry]:
    """A shell and some programs, and no library: an image as small as they come."""
    if not BUSYBOX.exists():
        need("busybox", "needs busybox-static: apt-get install it")
    links = (link(f"bin/{name}", "busybox") for name in PROGRAMS)
    return [folder("bin"), file("bin/busybox", BUSYBOX.read_bytes(), 0o755), *links]


def root_of(layers: Iterable[str], **more: Any) -> Root:
    return Root(tuple(layers), "sha256:" + "5" * 64, **more)


class Inside:
    """A box, as tests ask it."""

    def __init__(self, box: Box, link: Link) -> None:
        self.box, self.link = box, link

    async def run(self, request: Any) -> tuple[dict[str, Any], str]:
        """Its result, and what it printed."""
        printed = b""
        async with self.link.call(request) as call:
            async for event in call:
                if isinstance(event, wire.Data):
                    printed += event.data
            return call.result, printed.decode()

    async def sh(self, command: str) -> str:
        return (await self.run(wire.ShellCommand("main", command)))[1]


def in_box(root: Root, work: Callable[[Inside], Awaitable[None]], **wishes: Any) -> None:
    in_boxes(root, work, count=1, **wishes)


def in_boxes(
    root: Root, work: Callable[..., Awaitable[None]], *, count: int = 2, **wishes: Any
) -> None:
    """Do something with boxes of a root, which end with it."""

    async def main() -> None:
        backend = NamespacesBackend()
        links: list[Link] = []
        try:
            async with asyncio.timeout(60):
                boxes = []
                for _ in range(count):
                    box = await backend.start(Spec(image="test", root=root, **wishes))
                    links.append(await Link.open(await box.connect()))
                    boxes.append(Inside(box, links[-1]))
                await work(*boxes)
        except BackendUnavailable as exc:
            need("namespaces", str(exc))
        finally:
            for link in links:
                await link.close()
            await backend.close()

    asyncio.run(main())
