"""What gVisor cannot do, by the test that would need it. All other tests run there as elsewhere."""

from __future__ import annotations

NO_SUBREAPER = "it has no subreapers: what left its session and its parent has no reaper"
NO_STATX = "it refuses a flag of stat(2) that `stat`, `ls -l` and `du` use"
ONE_MEMORY = "it takes memory as one process: a box that takes too much is lost as a whole"
NO_SIGNAL_TO_ALL = "a signal to all would reach the guest, so it is refused"
UNSEEN = "the host does not see the processes of its boxes, by which this test knows them"
OPEN_FILES = "it lists what another process of the same user has open, though it cannot be written"
LINK_TO_ROOT = "a path through a link to / ends there"

# The beginning of a test's id -> why it cannot pass. Seen with Debian's runsc, of 2022.
CANNOT = {
    "tests/client/test_code.py::test_a_timeout_ends_what_the_cell_started": NO_SUBREAPER,
    "tests/engine/test_hibernation.py::test_a_box_that_kills_its_own_packing": UNSEEN,
    "tests/engine/test_hibernation.py::test_a_kernel_that_fills_its_box": ONE_MEMORY,
    "tests/engine/test_hibernation.py::test_while_it_sleeps_there_is_no_process": UNSEEN,
    "tests/files/test_folders.py::test_a_hopeless_search_dies": (
        "on a busy machine it takes long to stop what makes no calls"
    ),
    "tests/files/test_folders.py::test_a_move_to_another_file_system_keeps": NO_STATX,
    "tests/files/test_hostile_names_and_paths.py::test_h02_links_lead_to_the_box": LINK_TO_ROOT,
    "tests/files/test_reading_and_writing.py::test_a_file_and_its_parents_are_made": NO_STATX,
    "tests/files/test_watching.py::test_a_watch_that_nobody_reads": (
        "it does not say that events were lost, and takes minutes for so many"
    ),
    "tests/hangs/test_ends.py::test_a_client_that_goes_away_takes_its_command": NO_SUBREAPER,
    "tests/hangs/test_ends.py::test_a_timeout_kills_what_the_command_started": NO_SUBREAPER,
    "tests/hangs/test_hangs.py::test_a_command_ends_by_itself_in_a_shell[killing-everyone]": (
        NO_SIGNAL_TO_ALL
    ),
    "tests/hangs/test_hangs.py::test_a_program_ends_by_itself[killing-everyone]": NO_SIGNAL_TO_ALL,
    "tests/hangs/test_hangs_of_an_ordinary_user.py::test_what_hits_its_own_keeper_hurts_only_itself"
    "[a shell that stops everyone]": NO_SIGNAL_TO_ALL,
    "tests/hangs/test_kernel_zoo.py::test_a_cell_ends_and_says_how[python-a-million-lines]": (
        "a million calls take it most of a minute"
    ),
    "tests/hangs/test_kernel_zoo.py::test_a_dead_kernel_takes_all_it_started": NO_SUBREAPER,
    "tests/hangs/test_kernel_zoo.py::test_out_of_memory_is_told": ONE_MEMORY,
    "tests/security/test_forged_results.py::test_a_sibling_of_a_shell_cannot_reach": OPEN_FILES,
    "tests/security/test_forged_results.py::test_the_successor_of_a_shell_is_closed": OPEN_FILES,
    "tests/security/test_signals_and_descriptors.py::test_a_program_on_a_terminal_has": NO_STATX,
    "tests/security/test_signals_and_descriptors.py::test_a_program_starts_with_default": (
        "it does not say which signals a process ignores"
    ),
    "tests/security/test_signals_and_descriptors.py::test_only_a_box_of_an_ordinary_user": (
        NO_SIGNAL_TO_ALL
    ),
}


def why_not_on_gvisor(test: str) -> str:
    return next((why for beginning, why in CANNOT.items() if test.startswith(beginning)), "")
