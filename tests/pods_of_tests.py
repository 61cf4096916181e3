"""What cannot be in a Pod, by the test that would need it. All other tests run there as elsewhere.

The guide on Kubernetes has the same list for users.
"""

from __future__ import annotations

NO_MOUNTS = "folders of this machine cannot be mounted in a Pod"
NO_STATS = "a cluster measures no Pods by itself"

# The beginning of a test's id -> why it cannot pass.
CANNOT: dict[str, str] = {}


def why_not_in_a_pod(test: str) -> str:
    return next((why for beginning, why in CANNOT.items() if test.startswith(beginning)), "")
