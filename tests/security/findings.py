"""What the probes said, and how to ask about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .elsewhere import excused
from .hosts import FarThing

PROBES = Path(__file__).parent / "probes"

Found = dict[str, str]


def probe(box: FarThing, canary: dict[str, Any]) -> Findings:
    """Run every probe in a box into which the canary's gift was mounted at /srv/gift."""
    for path in PROBES.glob("*.py"):
        box.files.write(f"/tmp/probes/{path.name}", path.read_text())
    inside = canary | {"inside": True, "gift": "/srv/gift"}
    box.files.write("/tmp/canary.json", json.dumps(inside))
    result = box.commands.run(["python3", "-m", "probes", "canary.json"], cwd="/tmp")
    assert result.exit_code == 0, result.output
    return Findings(parse(result.stdout))


def parse(output: str) -> Found:
    """Of each probe, by its id, what it said."""
    return dict(line.split(" ", 1) for line in output.splitlines())


class Findings:
    """What the probes said in a box."""

    def __init__(self, said: Found) -> None:
        self.said = said

    def of(self, *groups: str) -> Found:
        """Those of these groups: `F01` is all whose id starts with `F01.`."""
        prefixes = tuple(group + "." for group in groups)
        found = {id: said for id, said in self.said.items() if id.startswith(prefixes)}
        assert found, f"no probes {groups}"
        return found

    def open(self, *groups: str) -> Found:
        """Those that got through, or broke. A box that keeps its promise has none."""
        found = {id: s for id, s in self.of(*groups).items() if not s.startswith("BLOCKED")}
        return {id: said for id, said in found.items() if id not in excused()}
