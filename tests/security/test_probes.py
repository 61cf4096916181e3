"""What code in a box cannot do, one promise each. The attacks themselves are in probes.py."""

from __future__ import annotations

import re
from pathlib import Path

from . import probes
from .findings import Findings

# --- files ------------------------------------------------------------------------------


def test_a_box_cannot_read_a_file_of_the_host(findings: Findings) -> None:
    assert findings.open("F01") == {}


def test_a_box_cannot_look_into_its_guest_or_the_keepers(findings: Findings) -> None:
    assert findings.open("F02") == {}


def test_a_box_cannot_change_a_setting_of_the_kernel(findings: Findings) -> None:
    assert findings.open("F03") == {}


def test_a_box_has_no_sysfs_and_no_cgroup_file_system(findings: Findings) -> None:
    assert findings.open("F04") == {}


def test_a_box_cannot_read_memory_logs_or_addresses_of_the_kernel(findings: Findings) -> None:
    assert findings.open("F05") == {}


def test_a_box_cannot_make_a_device_or_use_one_it_was_given(findings: Findings) -> None:
    assert findings.open("F06") == {}


def test_a_box_has_the_harmless_devices_only(findings: Findings) -> None:
    assert findings.open("F07") == {}


def test_a_box_cannot_mount_anything(findings: Findings) -> None:
    assert findings.open("F08", "F09") == {}


def test_a_box_cannot_take_a_mask_off(findings: Findings) -> None:
    assert findings.open("F10") == {}


def test_a_box_cannot_gain_rights_from_a_set_user_id_program(findings: Findings) -> None:
    assert findings.open("F13") == {}


def test_a_box_cannot_gain_rights_from_a_program_with_capabilities(findings: Findings) -> None:
    assert findings.open("F14") == {}


def test_a_box_cannot_write_to_its_system(findings: Findings) -> None:
    assert findings.open("F15") == {}


# --- the kernel -------------------------------------------------------------------------


def test_a_box_cannot_make_a_namespace(findings: Findings) -> None:
    assert findings.open("K01", "K02") == {}


def test_a_box_cannot_enter_a_namespace(findings: Findings) -> None:
    assert findings.open("K03") == {}


def test_a_box_cannot_have_the_kernel_run_its_programs(findings: Findings) -> None:
    assert findings.open("K04") == {}


def test_a_box_cannot_queue_work_past_the_filter(findings: Findings) -> None:
    assert findings.open("K06") == {}


def test_a_box_cannot_measure_the_machine(findings: Findings) -> None:
    assert findings.open("K07") == {}


def test_a_box_cannot_make_calls_that_are_for_administrators(findings: Findings) -> None:
    assert findings.open("K09") == {}


def test_a_box_cannot_set_the_clock(findings: Findings) -> None:
    assert findings.open("K10") == {}


def test_a_box_cannot_speak_another_abi(findings: Findings) -> None:
    assert findings.open("K11") == {}


def test_a_box_cannot_have_a_socket_of_an_unusual_family(findings: Findings) -> None:
    assert findings.open("K12") == {}


def test_a_box_cannot_talk_to_the_kernel_by_netlink_except_about_routes(findings: Findings) -> None:
    assert findings.open("K13") == {}


def test_a_box_is_under_the_filter(findings: Findings) -> None:
    assert findings.open("K16") == {}


def test_calls_of_the_future_look_unimplemented_in_a_box(findings: Findings) -> None:
    assert findings.open("K17") == {}


def test_a_box_cannot_use_up_what_the_machine_has_once_for_all(findings: Findings) -> None:
    assert findings.open("K18") == {}


# --- processes --------------------------------------------------------------------------


def test_a_box_cannot_see_a_process_of_the_host(findings: Findings) -> None:
    assert findings.open("P01") == {}


def test_a_box_cannot_signal_a_process_of_the_host(findings: Findings) -> None:
    assert findings.open("P02") == {}


def test_a_box_cannot_trace_slow_down_or_limit_its_guest(findings: Findings) -> None:
    assert findings.open("P03") == {}


def test_a_program_in_a_box_inherits_no_descriptor(findings: Findings) -> None:
    assert findings.open("P05") == {}


def test_a_box_cannot_type_on_a_terminal_or_choose_its_driver(findings: Findings) -> None:
    assert findings.open("P08") == {}


def test_a_box_does_not_know_its_operator_s_environment(findings: Findings) -> None:
    assert findings.open("P09") == {}


def test_a_program_in_a_box_has_no_capability_and_no_group(findings: Findings) -> None:
    assert findings.open("P12") == {}


# --- the network ------------------------------------------------------------------------


def test_a_box_cannot_reach_the_host_the_metadata_address_or_the_internet(
    findings: Findings,
) -> None:
    assert findings.open("N01") == {}


def test_a_box_cannot_connect_to_an_abstract_socket_of_the_host(findings: Findings) -> None:
    assert findings.open("N02") == {}


def test_a_box_cannot_connect_to_a_service_of_the_host(findings: Findings) -> None:
    assert findings.open("N03") == {}


def test_a_box_cannot_read_shared_memory_of_the_host(findings: Findings) -> None:
    assert findings.open("S01") == {}


def test_every_probe_belongs_to_a_promise_above() -> None:
    promised = re.findall(r'"([FKPNS]\d\d)"', Path(__file__).read_text())
    assert {id.partition(".")[0] for id in probes.PROBES} == set(promised)
