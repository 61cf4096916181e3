"""What was hidden comes back in one step, in a real box."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hutch import Sandbox
from hutch.engine.outputs import KEPT_OUTPUTS, SHORT, Outputs
from hutch.errors import NotFound
from hutch.tools import Toolbox


@pytest.fixture(scope="module", autouse=True)
def ledger_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("data")
        patch.setattr("hutch.tools.usage.file", lambda: folder / "gain.jsonl")
        patch.setenv("HUTCH_GAIN", "on")
        patch.setenv("HUTCH_FILTERS", str(folder / "none.toml"))
        (folder / "none.toml").touch()
        yield folder / "gain.jsonl"


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with Sandbox.create() as box:
        yield box


LONG = "for i in $(seq 2000); do echo \"step $i of many\"; done; echo 'E: it failed' >&2; (exit 3)"


def test_what_is_hidden_is_named_and_can_be_had_again(box: Sandbox) -> None:
    answer = box.tools.bash(command=LONG)
    assert answer.exit_code == 3
    assert answer.text.endswith("E: it failed\n[exit code 3]")
    assert len(answer.text) < 300
    (id,) = re.findall(r'hidden: recall\("(\w+)"\)', answer.text)
    again = box.tools.recall(id=id, offset=1000, limit=2)
    assert again.text.splitlines()[:2] == ["step 1001 of many", "step 1002 of many"]
    found = box.tools.recall(id=id, containing="STEP 177", offset=3, limit=1)
    again = f'[more: recall("{id}", offset=4, containing="step 177")]'
    assert found.text == f"1772:step 1772 of many\n{again}"


def test_a_page_says_where_the_next_begins(box: Sandbox) -> None:
    kept = box.tools.bash(command="seq 100").details["kept"]
    assert box.tools.recall(id=kept, limit=2).text == f'1\n2\n[more: recall("{kept}", offset=2)]'
    assert box.tools.recall(id=kept, offset=98).text == "99\n100"
    assert "it has 100 lines" in box.tools.recall(id=kept, offset=100).text


def test_an_unknown_name_is_told(box: Sandbox) -> None:
    answer = box.tools.recall(id="o999")
    assert answer.failed and "there was no output 'o999'" in answer.text


def test_a_text_to_look_for_is_never_a_regular_expression(box: Sandbox) -> None:
    line = "a" * 30 + "!"
    kept = box.tools.bash(command=f"echo {line}; echo '(a+)+$'").details["kept"]
    assert box.tools.recall(id=kept, containing="(a+)+$").text == "2:(a+)+$"
    none = box.tools.recall(id=kept, containing="a.a")
    assert none.text == "[no line after the first 0 contains that: it has 2 lines]"


def test_the_part_of_an_endless_line_that_is_looked_for_is_shown(box: Sandbox) -> None:
    zeros = "head -c 900000 /dev/zero | tr '\\0'"
    kept = box.tools.bash(command=f"{zeros} x; printf needle; {zeros} y").details["kept"]
    found = box.tools.recall(id=kept, containing="Needle").text
    assert "xxneedleyy" in found and len(found) < 2000


def test_pages_inside_one_very_long_line_make_up_the_line(box: Sandbox) -> None:
    answer = box.tools.bash("printf 'é%06d' $(seq 12000); echo; echo end")
    call = {"id": answer.details["kept"]}
    pages = []
    while call:
        text = box.tools.recall(**call).text
        page, _, more = text.partition("\n[more: recall(")
        pages.append(page)
        assert len(pages) < 50, "pages do not advance"
        found = re.fullmatch(r'"(\w+)", offset=(\d+)(?:, column=(\d+))?\)\]', more)
        call = {}
        if found:
            call = {"id": found[1], "offset": int(found[2]), "column": int(found[3] or 0)}
    line = "".join(f"é{n:06}" for n in range(1, 12001))
    assert len(pages) > 2 and all(len(page) <= 30_000 for page in pages)
    assert "".join(pages) == f"{line}\nend"


def test_a_search_goes_on_inside_one_very_long_line(box: Sandbox) -> None:
    kept = box.tools.bash("printf '%02000dat%02d' $(seq 60)").details["kept"]
    first = box.tools.recall(kept, containing="at").text
    found = re.search(r"column=(\d+)\)\]$", first)
    assert found and "at20" in first and "at22" not in first
    second = box.tools.recall(kept, containing="at", column=int(found[1])).text
    assert "at22" in second and "at40" in second and "at42" not in second


def test_a_line_of_many_megabytes_is_searched_in_bounded_memory(box: Sandbox) -> None:
    kept = box.tools.bash(command="head -c 21M /dev/zero | tr '\\0' x; echo needle").details["kept"]
    found = box.tools.recall(id=kept, containing="xneedle").text
    assert found.endswith("xxneedle") and len(found) < 2000
    assert "it has 5 lines" in box.tools.recall(id=kept, offset=10**9).text


def test_output_past_what_the_engine_has_at_hand_is_seen_whole(box: Sandbox) -> None:
    command = "seq 200000; echo 'fatal: in the middle' >&2; seq 200000"
    answer = box.tools.bash(command=command)
    assert "fatal: in the middle" in answer.text
    found = box.tools.recall(id=answer.details["kept"], containing="fatal")
    assert re.fullmatch(r"\d+:\d*fatal: in the middle", found.text)


def test_raw_shows_it_as_it_was_printed(box: Sandbox) -> None:
    answer = box.tools.bash(command="printf '\\033[1mbold\\033[0m\\n'; seq 3000", raw=True)
    assert answer.text.startswith("\x1b[1mbold\x1b[0m\n1\n2\n") and answer.text.endswith("3000\n")


@pytest.mark.parametrize("last", [30_000, 200_000])  # the engine has the second not at hand
def test_of_raw_output_that_is_too_long_both_ends_are_shown(box: Sandbox, last: int) -> None:
    plain = Toolbox(box, condense=False)
    for answer in (box.tools.bash(f"seq {last}", raw=True), plain.bash(f"seq {last}")):
        assert len(answer.text) < 101_000
        assert answer.text.startswith("1\n2\n") and answer.text.endswith(f"{last}\n")
        gap = r'the middle of [\d,]+ bytes is hidden: recall\("(\w+)"\)'
        (id,) = re.findall(gap, answer.text)
        assert box.tools.recall(id, last // 2, 1).text.startswith(f"{last // 2 + 1}\n")


def test_a_command_that_prints_nothing_is_said_to(box: Sandbox) -> None:
    for command in ("true", "echo"):
        assert box.tools.bash(command).text == "(no output)"
    assert box.tools.bash("(exit 3)").text == "[exit code 3]"


def test_a_whole_marker_will_do_for_the_name_in_it(box: Sandbox) -> None:
    kept = box.tools.bash("echo hi").details["kept"]
    for id in (f'recall("{kept}")', f"recall('{kept}', offset=3)", f'[9 hidden: recall("{kept}")]'):
        assert box.tools.recall(id).text == "hi"


def test_what_python_prints_is_shortened_as_what_a_command_prints(box: Sandbox) -> None:
    answer = box.tools.python("for n in range(2000): print('step', n)\nprint('E: it failed')")
    assert answer.text.endswith("E: it failed") and len(answer.text) < 300
    (id,) = re.findall(r'hidden: recall\("(\w+)"\)', answer.text)
    assert box.tools.recall(id, 1000, 1).text.startswith("step 1000\n")
    plain = Toolbox(box, condense=False).python("for n in range(20_000): print('step', n)")
    assert plain.text.startswith("step 0\nstep 1\nstep 2\nstep 3\n")
    assert 90_000 < len(plain.text) < 101_000 and "the middle is hidden: recall(" in plain.text


def test_a_timeout_and_a_new_shell_are_told(box: Sandbox) -> None:
    answer = box.tools.bash(command="echo begun; sleep 60", timeout=1)
    assert answer.text == (
        "begun\n[timed out after 1 s: killed, with all it started; raise timeout, or run it in "
        "the background with &]"
    )
    assert answer.exit_code == 124
    box.tools.bash(command="exit 0")
    assert box.tools.bash(command="true").text.startswith("[the shell was restarted: ")


def test_git_takes_its_arguments_as_one_string(box: Sandbox) -> None:
    box.tools.git(args="init -q repo")
    box.tools.bash(command="cd repo && touch 'a b'")
    assert "?? " in box.tools.git(args="status -s").text
    assert box.tools.git(args="add 'a b'").exit_code == 0
    assert "quote them" in box.tools.git(args="add 'a b").text


def test_only_where_there_is_no_git_it_is_said_so_and_what_was_printed_stays(box: Sandbox) -> None:
    box.tools.bash(command="git() { echo 'hook: not found'; return 127; }")
    own = box.tools.git(args="commit")
    assert own.text == "hook: not found\n[exit code 127]" and not own.failed
    box.tools.bash(command="unset -f git; was=$PATH; PATH=/nowhere")
    none = box.tools.git(args="status")
    box.tools.bash(command="PATH=$was")
    assert none.failed and none.exit_code == 127
    assert "not found" in none.text and "no git in this box" in none.text


def test_short_output_is_kept_only_if_asked_for(box: Sandbox) -> None:
    assert box.shell.run("echo hi").kept is None
    kept = box.shell.run("echo hi; echo oh >&2", keep=True).kept
    assert kept and box.read_output(kept).data == b"hi\noh\n"
    kept = box.commands.run(["echo", "there"], keep=True).kept
    assert kept and box.read_output(kept).data == b"there\n"
    assert box.shell.run("true", keep=True).kept is None
    with pytest.raises(NotFound):
        box.read_output("o99999")


def test_what_was_recalled_is_counted_against_what_was_saved(
    box: Sandbox, ledger_of_its_own: Path
) -> None:
    ledger_of_its_own.unlink(missing_ok=True)
    kept = box.tools.bash(command=LONG).details["kept"]
    box.tools.recall(id=kept, limit=10)
    run, recalled = ledger_of_its_own.read_text().splitlines()
    assert '"program": "for"' not in run and "step" not in run
    assert '"recalled_bytes": ' in recalled and '"family": "other"' in recalled


def test_what_was_kept_at_a_server_is_there_after_its_restart(tmp_path: Path) -> None:
    before = Outputs(tmp_path, 1 << 20, persistent=True)
    output = before.new(keep=True)
    output.add(b"hello\n", is_stderr=False)
    before.finish(output)
    assert output.stays and before.read(output.id, 0, 99).data == b"hello\n"
    before.leave()
    after = Outputs(tmp_path, 1 << 20, persistent=True)
    after.recover()
    assert after.read(output.id, 0, 99).data == b"hello\n"
    after.close()
    assert list(tmp_path.iterdir()) == []


def test_outputs_that_are_kept_hold_no_file_open(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path, 1 << 20)
    before = len(os.listdir("/proc/self/fd"))
    first = ""
    for _ in range(KEPT_OUTPUTS + 10):
        output = outputs.new(keep=True)
        output.add(b"x", is_stderr=False)
        outputs.finish(output)
        first = first or output.id
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(list(tmp_path.iterdir())) == KEPT_OUTPUTS
    kept = f"the last {KEPT_OUTPUTS}, "
    with pytest.raises(NotFound, match=f"{first!r} is not kept any more: {kept}"):
        outputs.read(first, 0, 9)
    outputs.close()


def test_many_short_outputs_do_not_push_out_a_long_one(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path, 1 << 20)
    names = []
    for size in (SHORT + 1, *[SHORT] * (KEPT_OUTPUTS + 1)):
        output = outputs.new(keep=True)
        names.append(output.id)
        output.add(b"x" * size, is_stderr=False)
        outputs.finish(output)
    assert len(outputs.read(names[0], 0, 9999).data) == SHORT + 1
    with pytest.raises(NotFound):
        outputs.read(names[1], 0, 9)
    outputs.close()
