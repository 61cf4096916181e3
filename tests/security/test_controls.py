"""Outside a box the probes get through. Where they do not, a box that stops them proves nothing."""

from __future__ import annotations

import pytest

from . import probes
from .findings import Found

# Seen on Linux 6.18 as an ordinary user in no box, by group.
OPEN_TO_ALL = """
F01 folder_of_guest inherited_folder own_root path relative root_of_guest shared_memory
F01 temporary_files
F02 command_line descriptors environment folder memory memory_map name_of_the_host program root
F04 listed
F05 config_gz interrupts iomem ioports softirqs
F07 devices
F09 by_handle chroot handle listmount mount_setattr open_tree_attr statmount
F13 devices mounts no_new_privileges
K01 clone clone3 user
K02 depth
K03 own_user user
K04 socket_filter
K06 aio io_uring
K09 advise_others ask_for_key capabilities compare descriptor_table file_system_user kernel_types
K09 keyring move_pages new_key no_randomness page_gift quota remap_pages secret_memory
K09 security_modules user_faults watch_the_disk
K10 adjust adjust_clock set set_time_of_day
K11 i386
K12 pair udplite vsock
K13 audit generic netfilter socket_diagnosis uevent xfrm
K16 filter
K18 inotify pending_signals terminals
N01 interfaces internet loopback loopback_elsewhere metadata names
N02 abstract_socket sockets_are_listed
N03 socket_of_the_host
P01 kernel_threads process_of_the_host
P02 signal signal_by_descriptor
P03 affinity limits memory out_of_memory_score priority priority_of_all read_guest references
P03 take_descriptor trace_guest user_map write_guest
P05 descriptors
P08 driver
P09 environment environment_of_others
P12 bounding_set
S01 shared_memory
"""
# These need a gift or a group that only root can give, or are root's in the first place.
OPEN_WITH_ROOTS_HELP = """
F06 gift
F13 set_user_id
F14 file_capabilities
P12 groups
"""
OPEN_TO_ROOT = """
F01 home_of_root shadow
F02 descriptors_of_keeper environment_of_keeper memory_of_keeper
F03 irq_default_smp_affinity sys_kernel_core_pattern sys_kernel_hostname sys_net_ipv4_ip_forward
F03 sys_vm_drop_caches
F05 addresses kmsg kpageflags slabinfo timer_list vmallocinfo
F06 fuse tunnel zero
F08 bind proc remount tmpfs
F09 fsmount fsopen fspick move_mount open_tree pivot_root
F10 unmask
F15 library loader program top users usr
K01 cgroup ipc mount network pid time uts
K03 mnt net own_mnt own_net own_pid pid
K09 accounting domain_name host_name kernel_log reboot swapoff swapon
K12 old_packet packet raw raw6
K13 change_a_link
P03 limits_of_keeper memory_of_keeper take_descriptor_of_keeper trace_keeper
P12 capabilities
"""

# The machine has no such call, file or protocol, so there is nothing to keep a box from.
NOT_HERE = ("BLOCKED ENOSYS", "BLOCKED ENOENT", "BLOCKED EAFNOSUPPORT", "BLOCKED EPROTONOSUPPORT")


def ids(*tables: str) -> set[str]:
    rows = [line.split() for table in tables for line in table.strip().splitlines()]
    return {f"{row[0]}.{name}" for row in rows for name in row[1:]}


def closed(expected: set[str], said: Found) -> Found:
    """Those that should have been open and were not, though there was something to open."""
    return {
        id: said[id]
        for id in sorted(expected)
        if not said[id].startswith("OPEN") and not said[id].startswith(NOT_HERE)
    }


def test_outside_a_box_the_probes_get_through_as_an_ordinary_user(
    controls: dict[str, Found],
) -> None:
    helped = OPEN_WITH_ROOTS_HELP if "root" in controls else ""
    assert closed(ids(OPEN_TO_ALL, helped), controls["user"]) == {}


def test_outside_a_box_still_more_of_them_get_through_as_root(controls: dict[str, Found]) -> None:
    if "root" not in controls:
        pytest.skip("only root can try as root")
    assert closed(ids(OPEN_TO_ROOT), controls["root"]) == {}


def test_at_least_forty_probes_can_tell_a_box_from_no_box(controls: dict[str, Found]) -> None:
    got_through = {id for said in controls.values() for id in said if said[id].startswith("OPEN")}
    assert len(got_through) >= 40


def test_no_probe_breaks_outside_a_box(controls: dict[str, Found]) -> None:
    broken = [(id, text) for said in controls.values() for id, text in said.items()
              if text.startswith("BROKEN")]  # fmt: skip
    assert broken == []


def test_the_lists_name_only_probes_that_exist() -> None:
    assert ids(OPEN_TO_ALL, OPEN_WITH_ROOTS_HELP, OPEN_TO_ROOT) <= set(probes.PROBES)
