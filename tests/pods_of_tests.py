"""What cannot be in a Pod, by the test that would need it. All other tests run there as elsewhere.

docs/guides/kubernetes.md has it for users. What probes find there is in security/elsewhere.py.
"""

from __future__ import annotations

NO_MOUNTS = "folders of this machine cannot be mounted in a Pod"

# The beginning of a test's id -> why it cannot pass.
CANNOT = {
    "tests/client/test_sandbox.py::test_a_box_that_cannot_be_is_refused_with_a_reason"
    "[{'mounts': ['/tmp:": NO_MOUNTS,
    "tests/client/test_sandbox.py::test_a_path_object_is_as_good_as_a_text": NO_MOUNTS,
    "tests/client/test_sandbox.py::test_every_option_does_something": NO_MOUNTS,
    "tests/client/test_sandbox.py::test_the_folder_of_a_server_is_not_mounted": NO_MOUNTS,
    "tests/engine/test_hibernation.py::test_a_mounted_workspace_is_left_where_it_is": NO_MOUNTS,
    "tests/files/test_reading_and_writing.py::test_four_terabytes_of_nothing": NO_MOUNTS,
    "tests/files/test_reading_and_writing.py::test_a_search_passes_over_four_terabytes": NO_MOUNTS,
    "tests/files/test_reading_and_writing.py::test_a_mounted_file_can_be_written": NO_MOUNTS,
    "tests/security/test_exhaustion.py::test_the_number_of_files_is_bounded": (
        "a cluster cannot say how many files a folder in memory may have: their names count as "
        "memory of the box"
    ),
}


def why_not_in_a_pod(test: str) -> str:
    return next((why for beginning, why in CANNOT.items() if test.startswith(beginning)), "")
