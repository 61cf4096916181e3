"""Checks an engine, and a real box from the inside, and suggests fixes for what is missing.

The box has an image without a single file, as a guest needs nothing from an image. What counts is
what we find, not what we asked the engine for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from hutch.backends.base import Spec
from hutch.backends.contained import BUNDLE, GUEST_MEMORY, GVISOR_MEMORY, RuntimeBundle
from hutch.backends.linux import temporary
from hutch.errors import BackendUnavailable, HutchError, NotFound
from hutch.guest.relay import RELAY
from hutch.types import Grade, Layer, Limits, MiB, Report, Status, show_size

from . import bundled, owner_scope
from .box import DockerBox
from .config import START_ONE
from .engine import DockerEngine, Facts
from .images import PREFIX, build_command
from .launch import ReachedEngine

LIMITS = Limits(memory=256 * MiB, pids=64)
PATIENCE = 30  # seconds for the program in the box

# Runs in the box, beside the guest, with the bundle's own Python.
LOOK = r"""
import json, os
def text(path):
    try:
        return open(path).read()
    except OSError:
        return ""
fields = (line.partition(":") for line in text("/proc/1/status").splitlines())
print(json.dumps({
    "guest": {name: value.strip() for name, _, value in fields},
    "read_only": bool(os.statvfs("/").f_flag & os.ST_RDONLY),
    "interfaces": [l.partition(":")[0].strip() for l in text("/proc/net/dev").splitlines()[2:]],
}))
"""

Start = Callable[[Spec], Awaitable[DockerBox]]


async def report(name: str, here: ReachedEngine, image: str, start: Start) -> Report:
    """Check the engine. `image`: the default one. `start` starts a box on this engine."""
    engine, bundle = here.engine, here.bundle
    facts = await engine.facts(fresh=True)
    left = await _leftovers(engine, bundle, here.scope.swept)  # first, as a start sweeps too
    layers = [_engine(engine, facts), _runtimes(facts), *_settings(facts)]
    try:
        layers += judge(await _look(engine, bundle, start), facts)
    except HutchError as exc:
        layers.append(Layer("box", Status.MISSING, str(exc), "docker run --rm IMAGE true"))
    layers += [await _default_image(engine, image), left]
    whole = all(layer.status is not Status.MISSING for layer in layers if layer.required)
    grade: Grade = facts.grade("") if whole else "none"
    return Report(name, grade, tuple(layers))


def unreachable(name: str, error: BackendUnavailable) -> Report:
    fix = "systemctl start docker" if START_ONE in str(error) else ""
    return Report(name, "none", (Layer("engine", Status.MISSING, str(error), fix),))


def _engine(engine: DockerEngine, facts: Facts) -> Layer:
    kind = "Podman" if facts.is_podman else "Docker"
    where = "" if facts.is_local else ", on another machine"
    rights = ", rootless" if facts.is_rootless else ", user ids mapped" if facts.maps_users else ""
    text = f"{kind} {facts.version} at {engine.address}{where}{rights}, cgroup v{facts.cgroup}"
    return Layer("engine", Status.ACTIVE, text)


def _runtimes(facts: Facts) -> Layer:
    text = ", ".join(f"{name} ({facts.grade(name)})" for name in facts.names)
    text = text or facts.default_runtime
    return Layer("runtimes", Status.ACTIVE, text, required=False)


def _settings(facts: Facts) -> list[Layer]:
    """What only the engine's administrator can change."""
    live = Layer("live restore", Status.ACTIVE, "boxes survive a restart of it", required=False)
    if not facts.live_restore:
        why = "boxes end when the engine is restarted"
        fix = '"live-restore": true in /etc/docker/daemon.json'
        live = Layer("live restore", Status.DEGRADED, why, fix, required=False)
    limits = Layer("limits", Status.ACTIVE, "memory, processes, cpu time")
    if facts.unlimited:
        why = f"the engine's machine cannot bound {', '.join(facts.unlimited)}"
        limits = Layer(
            "limits", Status.DEGRADED, why, "boot with cgroup_enable=memory swapaccount=1"
        )
    return [live, limits]


async def _default_image(engine: DockerEngine, name: str) -> Layer:
    try:
        inspected = await engine.image(name)
    except NotFound:
        why = f"the engine has no {name}: every box has to name an image"
        fix = build_command(name.removeprefix(PREFIX))
        return Layer("default image", Status.DEGRADED, why, fix, required=False)
    return Layer(
        "default image", Status.ACTIVE, f"{name}, {show_size(inspected['Size'])}", required=False
    )


async def _look(engine: DockerEngine, bundle: RuntimeBundle, start: Start) -> dict[str, object]:
    """What a box finds out about itself. Raises BackendUnavailable if it gives no usable answer."""
    image = await engine.empty_image(owner_scope.name_of_process())
    try:
        box = await start(Spec(image=image, limits=LIMITS))
        try:
            # The last two are `-m` and the module.
            argv = [*bundle.command("", at=BUNDLE)[:-2], "-c", LOOK]
            async with asyncio.timeout(PATIENCE):
                printed = await engine.output(box.container, argv, f"{RELAY}:{RELAY}")
                used = await engine.stats(box.container) or {}
        except TimeoutError:
            raise BackendUnavailable(f"the box did not answer in {PATIENCE} seconds") from None
        finally:
            await box.kill()
    finally:
        await engine.remove_image(image)
    try:
        found = dict(json.loads(printed))
    except (ValueError, TypeError):
        raise BackendUnavailable(f"the box printed {printed[:200]!r}") from None
    # The box cannot see its control groups, so the engine has to read these limits.
    for name in ("memory", "pids"):
        found[name] = str((used.get(f"{name}_stats") or {}).get("limit", ""))
    return found


def judge(found: Mapping[str, Any], facts: Facts) -> list[Layer]:
    """Which layers a box found. A layer that is missing says what was found instead."""
    guest: dict[str, str] = found["guest"]
    is_shared = facts.grade("") == "ns"
    uid = guest.get("Uid", "0").split()[0]
    reserve = GUEST_MEMORY if is_shared else GVISOR_MEMORY
    outside = [name for name in found["interfaces"] if name != "lo"]
    capabilities = guest.get("CapBnd", "?")
    holds_none = set(capabilities) == {"0"}
    memory, pids = found["memory"], found["pids"]
    size = f"{int(memory) // MiB} MiB" if memory.isdigit() else "no bound"
    return [
        _layer("box", True, "it starts, from an image without a file"),
        _layer("user", uid != "0", f"uid {uid}"),
        _layer("capabilities", holds_none, "none" if holds_none else capabilities),
        _layer(
            "no new privileges",
            guest.get("NoNewPrivs") == "1" or not is_shared,
            "set-uid programs gain nothing" if is_shared else "another kernel's",
            otherwise="set-uid programs gain the rights of their owner",
        ),
        _layer(
            "system calls",
            guest.get("Seccomp") == "2" or not is_shared,
            f"{guest.get('Seccomp_filters', '1')} filters" if is_shared else "another kernel's",
            otherwise="not filtered",
        ),
        _layer("root file system", bool(found["read_only"]), "read-only", otherwise="writable"),
        _layer("network", not outside, "none" if not outside else ", ".join(outside)),
        _layer(
            "memory",
            _bounded(memory, LIMITS.memory + reserve),
            f"{size}, of which {reserve // MiB} are the guest's",
            otherwise=size,
            required=is_shared,
        ),
        _layer(
            "processes",
            _bounded(pids, LIMITS.pids * 64),
            f"{pids} at most" if pids else "no bound",
            required=is_shared,
        ),
    ]


def _layer(
    name: str, holds: bool, text: str, *, otherwise: str = "", required: bool = True
) -> Layer:
    """`otherwise`: what was found if the layer does not hold; the same text by default."""
    if holds:
        return Layer(name, Status.ACTIVE, text, required=required)
    fix = "see what the settings of the engine take away"
    return Layer(name, Status.MISSING, f"the box finds: {otherwise or text}", fix, required)


def _bounded(text: str, at_most: int) -> bool:
    return text.strip().isdigit() and int(text) <= at_most


async def _leftovers(engine: DockerEngine, bundle: RuntimeBundle, swept: int) -> Layer:
    """Remove what dead owners left. `swept`: the number of folders that were removed before."""
    folders = swept + len(await asyncio.to_thread(temporary.sweep_folders))
    try:
        removed = await owner_scope.remove_abandoned(engine)
        volumes = await bundled.remove_old(engine, bundle)
    except HutchError as exc:
        return Layer("leftovers", Status.DEGRADED, str(exc), required=False)
    images = sum(name.startswith("sha256:") for name in removed)
    counts = {
        "container": len(removed) - images,
        "image": images,
        "folder": folders,
        "volume": volumes,
    }
    gone = [f"{n} {what}{'s' * (n > 1)}" for what, n in counts.items() if n]
    text = f"removed {', '.join(gone)} of dead owners" if gone else "none"
    return Layer("leftovers", Status.ACTIVE, text, required=False)
