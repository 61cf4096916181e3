"""Builds one of Hutch's own images in an engine, on a plain Debian that is pulled or made here.

The Dockerfiles are the same in both cases. If a Debian can be pulled, their steps install the
Debian packages. If not, mmdebstrap makes one that contains all of them, so the steps have nothing
to install and need no network. Python packages are always installed on this machine, by uv, so that
its settings do not get into the image.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import BinaryIO, NamedTuple

from hutch.backends.docker.images import OURS, ImageBuild, ImageClient, chunks
from hutch.backends.linux import temporary
from hutch.errors import HutchError, InvalidRequest
from hutch.images.progress import describe
from hutch.images.stopping import in_thread
from hutch.images.uv import Progress, pip_install

from . import FOLDER, Recipe, chain, debian, fingerprint, pack

FINGERPRINT = "hutch.recipe"  # a label
PULL_WITHIN = 600  # seconds
PYTHON = "3.11"  # the version in debian.SUITE
PLATFORMS = {"amd64": "x86_64-unknown-linux-gnu", "arm64": "aarch64-unknown-linux-gnu"}

Report = Callable[[str], None]


class BuildStart(NamedTuple):
    """Where a build starts: the base image, the network of its steps, and the recipes to build."""

    image: str
    network: str
    recipes: list[Recipe]


async def make(images: ImageClient, name: str, report: Report, folder: Path = FOLDER) -> bool:
    """Build an image, unless the engine has it already. Returns whether it was built.

    On failure, nothing is left behind. Raises InvalidRequest if there is no such recipe or a step
    fails, and BackendUnavailable if no Debian can be pulled or made.
    """
    recipes = chain(name, folder)
    wanted = recipes[-1]
    before = await images.find(wanted.tag)
    if before and before.labels.get(FINGERPRINT) == fingerprint(recipes):
        return False
    made: set[str] = set()
    try:
        base, network, left = await _start(images, recipes, report, made)
        for recipe in left:
            done = recipes[: recipes.index(recipe) + 1]
            labels = {FINGERPRINT: fingerprint(done)}
            with TemporaryFile() as context:
                await _pack(images, recipe, context, report)
                build = ImageBuild(
                    context,
                    {"BASE": base},
                    labels,
                    recipe.tag if recipe == wanted else "",
                    network,
                    made,
                )
                base = await _build(images, build, recipe, report)
    finally:
        await images.tidy(made)
    if before:
        await images.remove_replaced(before.id)
    return True


async def _build(images: ImageClient, build: ImageBuild, recipe: Recipe, report: Report) -> str:
    try:
        made = await images.build(build, lambda step: report(f"{recipe.name}: {step}"))
    except InvalidRequest as exc:
        raise InvalidRequest(f"the image {recipe.tag} was not built: {exc}") from None
    build.made.add(made)
    return made


async def _start(
    images: ImageClient, recipes: list[Recipe], report: Report, made: set[str]
) -> BuildStart:
    latest = await _latest(images, recipes)
    needs = [package for recipe in latest.recipes for package in recipe.packages]
    if latest.image and not needs:
        return latest
    plain = recipes[0].base
    why = await _why_not(images, plain, report)
    if not why:
        network = "default" if await images.has_network("bridge") else "host"
        return BuildStart(latest.image or plain, network, latest.recipes)
    facts = await images.engine.facts()
    packages = [package for recipe in recipes for package in recipe.packages]
    with TemporaryFile() as root:
        await debian.make(packages, facts.architecture, why, root, report)
        report("giving the Debian to the engine")
        image = await images.import_root(chunks(root), f"LABEL {OURS}=debian")
    made.add(image)
    return BuildStart(image, "none", recipes)


async def _latest(images: ImageClient, recipes: list[Recipe]) -> BuildStart:
    """Start from the latest image of the chain that the engine has and that is up to date."""
    for count in range(len(recipes) - 1, 0, -1):
        found = await images.find(recipes[count - 1].tag)
        if found and found.labels.get(FINGERPRINT) == fingerprint(recipes[:count]):
            return BuildStart(found.id, "none", recipes[count:])
    return BuildStart("", "none", recipes)


async def _why_not(images: ImageClient, plain: str, report: Report) -> str:
    """Pull an image, unless the engine has it. Returns why that failed, or an empty string."""
    if await images.find(plain):
        return ""
    report(f"pulling {plain}")
    try:
        async with asyncio.timeout(PULL_WITHIN):
            await images.pull(plain, report)
    except TimeoutError:
        return f"the engine did not pull {plain} in {PULL_WITHIN} seconds"
    except HutchError as exc:
        return f"the engine cannot pull {plain} ({exc})"
    return ""


async def _pack(images: ImageClient, recipe: Recipe, context: BinaryIO, report: Report) -> None:
    if not recipe.requirements:
        pack(recipe, None, context)
        return
    facts = await images.engine.facts()
    last: Progress | None = None

    def tell(progress: Progress) -> None:
        nonlocal last
        if progress != last:  # a repetition only means that it is still running
            report(f"{recipe.name}: {describe(progress)}")
        last = progress

    # With this prefix, it is removed later if this process is killed.
    with TemporaryDirectory(prefix=temporary.prefix()) as folder:
        site = Path(folder, "site")
        await in_thread(partial(_install, recipe, site, facts.architecture), tell)
        await asyncio.to_thread(pack, recipe, site, context)


def _install(
    recipe: Recipe, site: Path, architecture: str, report: Callable[[Progress], None]
) -> None:
    assert recipe.requirements
    words = [
        "--target",
        str(site),
        "--python-version",
        PYTHON,
        "--python-platform",
        PLATFORMS.get(architecture, architecture),
        "-r",
        str(recipe.requirements),
    ]
    site.mkdir()
    with open(recipe.requirements, "rb") as file:
        shown = [str(recipe.requirements)]
        pip_install(words, site, file.fileno(), report, PYTHON, shown)
    (site / ".lock").unlink(missing_ok=True)
