"""Probes that get through in a container or a Pod, and why that is no way out of it.

All others must be blocked there as in a box of the namespaces backend.
"""

from __future__ import annotations

from docker_of_tests import RUNTIME
from hutch import factory

IN_A_CONTAINER = {
    "F02.command_line": "the guest is started by the engine: its paths are those of the box",
    "F04.cgroup_mount": "the engine mounts it, read-only, and an empty folder hides it",
    "F06.gift": "the engine's list of devices is what counts, not who made the node",
    "F07.devices": "mqueue is the box's own, and none can be made: RLIMIT_MSGQUEUE is 0",
    "F13.mounts": "the engine mounts without nosuid; no_new_privs is what counts",
    "F13.devices": "the engine mounts without nodev; its list of devices is what counts",
    "K02.depth": "a setting of the machine; the filter refuses the calls",
    "K18.inotify": "counted for each user of the machine, and a box is a user of its own",
    "K18.terminals": "the engine mounts devpts without a bound; the machine keeps 1024 for itself",
    "N03.services": "/run/hutch is the box's own",
}

# There, whatever a box sees belongs to a kernel of its own.
ON_GVISOR = {
    **{f"F02.{name}": "gVisor shows this of any process of the same user; there is no secret in it"
       for name in ("environment", "memory_map", "descriptors", "environment_of_keeper",
                    "descriptors_of_keeper")},
    "F04.listed": "a /sys of gVisor's own",
    **{f"F06.{name}": "a device of gVisor's own, or of no driver"
       for name in ("disk", "zero", "tunnel", "fuse")},
    "F13.no_new_privileges": "gVisor does not say",
    "K11.i386": "taken for a call of the usual ABI",
    "K13.change_a_link": "refused, with another error",
}  # fmt: skip


# A node decides what of /proc and /sys is hidden, and a program cannot mount anything over it.
IN_A_POD = {
    **IN_A_CONTAINER,
    "F04.listed": "the node mounts /sys, read-only",
    **{f"F05.{name}": "anyone on the node may read it, and all addresses in it are zero"
       for name in ("config_gz", "iomem", "ioports", "key-users", "softirqs")},
    **{f"N01.{name}": "closed where NetworkPolicy is enforced, which the tests' cluster does not"
       for name in ("interfaces", "internet", "metadata", "names")},
}  # fmt: skip


def excused() -> dict[str, str]:
    if factory.default() == "kubernetes":
        return IN_A_POD
    if factory.default() != "docker":
        return {}
    return IN_A_CONTAINER | (ON_GVISOR if RUNTIME == "runsc" else {})
