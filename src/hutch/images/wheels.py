"""The metadata of a wheel, read in a confined process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from hutch.errors import InvalidRequest

from .environment import base_interpreter, base_prefix
from .installer import confinement, outside_usr, started
from .progress import Progress, Report, printable
from .requirements import LONGEST

MOST_NEEDS = 10_000


@dataclass(frozen=True)
class WheelInfo:
    """`direct`: the requirements that have a URL instead of a version."""

    name: str
    version: Version
    direct: tuple[Requirement, ...]


def read_wheel(wheel: Path, lock: int, report: Report) -> WheelInfo:
    """Read the metadata of a wheel. `lock`: as for `started`.

    Raises InvalidRequest if it is not a wheel or its metadata is malformed, and what `started`
    raises.
    """
    script = Path(__file__).with_name("metadata.py")
    argv = [str(base_interpreter()), "-I", "-S", str(script), str(wheel)]
    seen = confinement({}, [], [*outside_usr([base_prefix(), script]), wheel])
    text = []
    with started(argv, {}, lock, seen) as (process, lines):
        for line in lines:
            report(Progress("reading", wheel.name))
            text += [line] if line else []
    if process.returncode:
        raise InvalidRequest(f"{wheel.name}: {printable(' '.join(text)[-300:])}")
    about, _ = parse_email("\n".join(text))
    needs = about.get("requires_dist", [])
    if len(needs) > MOST_NEEDS or any(len(need) > LONGEST for need in needs):
        raise InvalidRequest(f"{wheel.name} needs more packages than anything could")
    try:
        version = Version(about.get("version", ""))
        direct = tuple(need for need in map(Requirement, needs) if need.url is not None)
    except (ValueError, RecursionError) as exc:  # all errors of `packaging` are a ValueError
        raise InvalidRequest(f"the metadata of {wheel.name} is malformed: {exc}") from None
    return WheelInfo(canonicalize_name(about.get("name", "")), version, direct)
