"""Output that is never lost, and never fills the host."""

from __future__ import annotations

import asyncio
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docker_of_tests import RUNTIME
from hutch import Limits, NotFound, Result, Sandbox, factory
from hutch import operations as op
from hutch.engine.engine import Engine
from hutch.engine.output import HEAD, MAX_MARKS, TAIL, Clip, Output
from hutch.engine.outputs import Outputs

MiB = 1024 * 1024


def numbered(size: int) -> bytes:
    """Bytes that tell where they are: eight digits and a newline, over and over."""
    return b"".join(b"%08d\n" % n for n in range(size // 9 + 1))[:size]


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Output]:
    made = Output("o1", tmp_path / "o1", 4 * MiB)
    yield made
    made.close()
    assert not list(tmp_path.iterdir())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 400_000), max_size=12))
def test_a_clip_is_the_whole_or_its_two_ends(sizes: list[int]) -> None:
    whole, clip = numbered(sum(sizes)), Clip()
    at = 0
    for size in sizes:
        clip.add(whole[at : at + size])
        at += size
    if len(whole) <= HEAD + TAIL:
        assert clip.data() == whole and not clip.truncated
    else:
        gap = f"\n[... {len(whole) - HEAD - TAIL} bytes not shown ...]\n".encode()
        assert clip.data() == whole[:HEAD] + gap + whole[-TAIL:] and clip.truncated


def test_a_clip_of_small_pieces_is_no_larger_than_one_of_pages() -> None:
    clip = Clip()
    for _ in range((HEAD + 2 * TAIL) // 4):
        clip.add(b"four")
    assert sum(map(len, clip._tail)) < 2 * TAIL and len(clip._tail) < 100


def test_short_output_needs_no_file_and_can_be_read(output: Output, tmp_path: Path) -> None:
    output.add(b"abc", False)
    output.add(b"def", True)
    assert (output.stdout.data(), output.stderr.data()) == (b"abc", b"def")
    assert output.read(2, 3).data == b"cde" and output.read(6, 3).data == b""
    assert not list(tmp_path.iterdir())


def test_long_output_can_be_read_at_any_offset(output: Output) -> None:
    whole = numbered(3 * MiB)
    for at in range(0, len(whole), 100_000):
        output.add(whole[at : at + 100_000], is_stderr=at % 200_000 == 0)
    output.end()
    for offset in (0, 1, HEAD - 1, HEAD, 2 * MiB + 7, len(whole) - 1):
        piece = output.read(offset, 1000)
        assert (piece.data, piece.start) == (whole[offset : offset + 1000], offset)
    last = output.read(len(whole), 10)
    assert (last.data, last.total, last.ended) == (b"", len(whole), True)


def test_past_the_limit_the_newest_is_kept_and_says_where_it_starts(output: Output) -> None:
    whole = numbered(20 * MiB)
    for at in range(0, len(whole), 300_000):
        output.add(whole[at : at + 300_000], False)
    piece = output.read(0, 1000)
    assert len(whole) - 4 * MiB <= piece.start < len(whole) - 2 * MiB
    assert piece.data == whole[piece.start : piece.start + 1000]
    assert output.read(len(whole) - 5, 10).data == whole[-5:]
    assert os.fstat(output._file).st_blocks * 512 <= 4 * MiB + 8192


def test_a_full_disk_of_the_host_costs_the_middle_and_nothing_else(tmp_path: Path) -> None:
    output = Output("o1", tmp_path / "no such folder" / "o1", 4 * MiB)
    whole = numbered(3 * MiB)
    for at in range(0, len(whole), 300_000):
        output.add(whole[at : at + 300_000], False)
    assert output.stdout.data().startswith(whole[:HEAD])
    piece = output.read(0, 10 * MiB)
    assert (piece.data, piece.start) == (whole[-TAIL:], len(whole) - TAIL)


async def _run(engine: Engine, operation: op.RunShell | op.RunProgram) -> Result:
    return await engine.perform(operation)


def test_a_box_keeps_as_much_output_as_its_limits_say() -> None:
    async def work() -> None:
        engine = Engine(factory.backend())
        try:
            info = await engine.perform(op.OpenSession(limits=Limits(output=2 * MiB)))
            result = await _run(engine, op.RunShell(info.id, "seq -f %08.0f 1 1000000"))
            piece = await engine.perform(op.ReadOutput(info.id, result.kept, 0, 9))
            assert result.total_bytes == 9_000_000 and piece.start >= 9_000_000 - 2 * MiB
            piece = await engine.perform(op.ReadOutput(info.id, result.kept, 8_999_991, 99))
            assert piece.data == b"01000000\n"
        finally:
            await engine.close()

    asyncio.run(work())


def test_outputs_are_forgotten_in_order_and_small_ones_push_out_none() -> None:
    async def work() -> None:
        engine = Engine(factory.backend())
        try:
            info = await engine.perform(op.OpenSession(limits=Limits(output=8 * MiB)))
            big = op.RunShell(info.id, "head -c 3000000 /dev/zero")
            kept = [(await _run(engine, big)).kept]
            for _ in range(80):
                assert (await _run(engine, op.RunShell(info.id, "echo small"))).kept is None
            kept += [(await _run(engine, big)).kept for _ in range(3)]
            for gone in kept[:2]:
                with pytest.raises(NotFound):
                    await engine.perform(op.ReadOutput(info.id, gone, 0, 1))
            for there in kept[2:]:
                assert (await engine.perform(op.ReadOutput(info.id, there, 0, 1))).data == b"\0"
        finally:
            await engine.close()

    asyncio.run(work())


# The pipes of gVisor pass a tenth of what others do, and the host's memory is the same there.
MUCH = 128 * MiB if RUNTIME == "runsc" else 1024 * MiB


def test_a_gibibyte_passes_with_the_host_s_memory_flat(box: Sandbox) -> None:
    box.shell.run("true")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    script = f"head -c {MUCH - 4} /dev/zero | tr '\\0' x; printf tail"
    result = box.commands.run(script, timeout=300)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert (result.exit_code, result.total_bytes, result.truncated) == (0, MUCH, True)
    assert result.stdout.startswith("x" * HEAD) and result.stdout.endswith("xtail")
    assert result.kept and box.read_output(result.kept, MUCH // 3 * 2, 5).data == b"xxxxx"
    assert box.read_output(result.kept, MUCH - 5, 99).data == b"xtail"
    assert grown <= 32 * 1024, f"{grown} KiB"


# --- outputs that outlive their process -----------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "session"
    made.mkdir()
    return made


def again(outputs: Outputs) -> Outputs:
    """As the next process finds them. This one has written all it had to, and closes nothing."""
    found = Outputs(outputs.folder, outputs._limit, persistent=True)
    found.recover()
    return found


def shown(output: Output) -> tuple[bytes, bytes, bytes]:
    return output.stdout.data(), output.stderr.data(), output.both.data()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 700_000), st.booleans()), max_size=10),
    st.integers(0, 10),
)
def test_an_output_is_found_again_as_it_was_and_goes_on(
    pieces: list[tuple[int, bool]], cut: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        outputs = Outputs(Path(name), 64 * MiB, persistent=True)
        memory, lasting = Output("m", Path(name) / "m", 64 * MiB), outputs.of_program("p1")
        whole, at = numbered(sum(size for size, _ in pieces)), 0
        for n, (size, is_stderr) in enumerate(pieces):
            if n == cut:  # a crash
                outputs.leave()
                outputs = again(outputs)
                lasting = outputs.of_program("p1")
            memory.add(whole[at : at + size], is_stderr)
            lasting.add(whole[at : at + size], is_stderr)
            at += size
        assert shown(lasting) == shown(memory)
        outputs.leave()
        found = again(outputs).of_program("p1")
        assert found.total == len(whole)
        assert shown(found) == shown(memory)
        for offset in (0, 1, HEAD - 1, HEAD, len(whole) // 2, len(whole)):
            assert found.read(offset, 1000).data == whole[offset : offset + 1000]
        memory.close()


def test_what_was_written_but_not_marked_is_written_again(folder: Path) -> None:
    outputs = Outputs(folder, 64 * MiB, persistent=True)
    outputs.of_program("p1").add(b"kept", False)
    outputs.leave()
    with open(folder / "p1", "ab") as file:
        file.write(b"half of wha")  # and here it died
    found = again(outputs).of_program("p1")
    assert (found.total, found.read(0, 99).data) == (4, b"kept")
    found.add(b" and more", True)
    assert found.both.data() == b"kept and more" and found.read(2, 99).data == b"pt and more"
    found.close()
    assert not list(folder.iterdir())


def test_past_the_limit_both_ends_are_found_again(folder: Path) -> None:
    outputs, whole = Outputs(folder, 4 * MiB, persistent=True), numbered(20 * MiB)
    output = outputs.of_program("p1")
    for at in range(0, len(whole), 300_000):
        output.add(whole[at : at + 300_000], False)
    before = shown(output)
    outputs.leave()
    assert (folder / "p1").stat().st_blocks * 512 <= 5 * MiB
    found = again(outputs).of_program("p1")
    assert shown(found) == before
    assert found.read(7, 20).data == whole[7:27]
    middle = found.read(2 * MiB, 1000)
    assert len(whole) - 4 * MiB <= middle.start < len(whole) - 2 * MiB
    assert middle.data == whole[middle.start : middle.start + 1000]


def test_what_is_gone_in_the_guest_is_a_gap_and_said_to_be_one(folder: Path) -> None:
    outputs = Outputs(folder, 64 * MiB, persistent=True)
    output = outputs.of_program("p1")
    output.add(b"before", False)
    output.skip(1000)
    output.add(b"after", True)
    for each in (output, again(outputs).of_program("p1")):
        assert each.total == 1005
        assert each.both.data() == b"before\n[... 994 bytes not shown ...]\nafter"
        piece = each.read(0, 10)
        assert (piece.data, piece.start) == (b"after", 1000)
    outputs.close()


def test_a_gap_where_the_beginning_was_is_not_read_as_zeros(folder: Path) -> None:
    outputs = Outputs(folder, 64 * MiB, persistent=True)
    lost, torn = outputs.of_program("p1"), outputs.of_program("p2")
    torn.add(b"before", False)
    for output in (lost, torn):
        output.skip(2 * MiB)
        output.add(b"after", False)
    found = again(outputs)
    for before, after in ((lost, found.of_program("p1")), (torn, found.of_program("p2"))):
        for each in (before, after):
            for offset in (6, HEAD - 1, HEAD, 2 * MiB):
                piece = each.read(offset, 10)
                assert (piece.data, piece.start) == (b"after", 2 * MiB)
    assert found.read("p1", 0, 10).data == b"after" and found.read("p2", 0, 10).data == b"before"
    outputs.close()


def test_a_program_that_changes_streams_with_every_byte_does_not_fill_the_disk(
    folder: Path,
) -> None:
    outputs = Outputs(folder, 64 * MiB, persistent=True)
    output = outputs.of_program("p1")
    for n in range(2 * MAX_MARKS):
        output.add(b"x", n % 2 == 0)
    assert (folder / "p1.index").stat().st_size <= MAX_MARKS * 8
    found = again(outputs).of_program("p1")
    assert found.total == 2 * MAX_MARKS and found.both.data() == b"x" * (2 * MAX_MARKS)
    outputs.close()


def test_kept_outputs_of_commands_are_found_again_and_numbers_go_on(folder: Path) -> None:
    outputs, whole = Outputs(folder, 64 * MiB, persistent=True), numbered(3 * MiB)
    long, short = outputs.new(), outputs.new()
    long.add(whole, False)
    short.add(b"short", False)
    outputs.finish(long)
    outputs.finish(short)
    outputs.of_program("p7").add(b"x", False)
    outputs.leave()
    found = Outputs(folder, 64 * MiB, persistent=True)
    assert found.recover() == 7
    assert found.read(long.id, 2 * MiB, 9).data == whole[2 * MiB : 2 * MiB + 9]
    piece = found.read(long.id, len(whole), 9)
    assert (piece.data, piece.total, piece.ended) == (b"", len(whole), True)
    with pytest.raises(NotFound):
        found.read(short.id, 0, 1)
    assert found.new().id == short.id
    found.close()
    assert not list(folder.iterdir())


def test_no_box_has_an_output_with_the_name_of_anothers(folder: Path) -> None:
    one, other = Outputs(folder, MiB), Outputs(folder, MiB)
    for outputs in (one, other):
        output = outputs.new(keep=True)
        output.add(b"of one" if outputs is one else b"of the other", False)
        outputs.finish(output)
    with pytest.raises(NotFound, match="if it was in another, name that one"):
        one.read(output.id, 0, 99)
    assert other.read(output.id, 0, 99).data == b"of the other"
    one.close()
    other.close()


def test_names_from_before_they_had_letters_are_still_found(folder: Path) -> None:
    outputs = Outputs(folder, MiB, persistent=True)
    output = outputs.new(keep=True)
    output.add(b"old", False)
    outputs.finish(output)
    outputs.leave()
    for path in folder.iterdir():
        path.rename(folder / path.name.replace(output.id, "o1"))
    found = again(outputs)
    assert found.read("o1", 0, 9).data == b"old" and found.new().id.startswith("o2")
    found.close()


def test_files_that_are_not_ours_are_left_alone(folder: Path) -> None:
    for name in ("journal.jsonl", "asleep-1", "o0", "p1.json", "x1"):
        (folder / name).touch()
    found = Outputs(folder, MiB, persistent=True)
    assert found.recover() == 0
    found.close()
    assert len(list(folder.iterdir())) == 5


def test_a_full_disk_under_a_lasting_output_costs_the_middle_and_nothing_else(
    tmp_path: Path,
) -> None:
    output = Outputs(tmp_path / "no such folder", 4 * MiB, persistent=True).of_program("p1")
    whole = numbered(3 * MiB)
    for at in range(0, len(whole), 300_000):
        output.add(whole[at : at + 300_000], False)
    assert output.stdout.data().startswith(whole[:HEAD])
    assert output.read(0, 10 * MiB).data == whole[-TAIL:]


# --- room for all of them ---------------------------------------------------------------------


@pytest.mark.parametrize("lasting", [True, False])
def test_what_ended_last_is_kept_and_what_still_goes_on(folder: Path, lasting: bool) -> None:
    outputs = Outputs(folder, 4 * MiB, lasting)
    first, second, third, running = (outputs.of_program(f"p{n}") for n in range(1, 5))
    for output in (first, second, third, running):
        output.add(bytes(3 * MiB), False)
    command = outputs.new()
    command.add(bytes(3 * MiB), False)
    for output in (second, third):
        outputs.settle(output)
    outputs.finish(command)
    outputs.settle(first)  # it began first, and ended last
    outputs.settle(first)
    for gone in ("p2", "p3", command.id):
        with pytest.raises(NotFound, match=f"{gone!r} is not kept any more"):
            outputs.read(gone, 0, 1)
    for there in ("p1", "p4"):
        assert outputs.read(there, 0, 4 * MiB).data == bytes(3 * MiB)
    with pytest.raises(NotFound, match="there was no output 'p5'"):
        outputs.read("p5", 0, 1)
    assert sum(path.stat().st_blocks * 512 for path in folder.iterdir()) < 7 * MiB
    outputs.close()
    assert not list(folder.iterdir())


def test_a_name_whose_output_is_gone_is_never_given_again(folder: Path) -> None:
    outputs = Outputs(folder, 4 * MiB, persistent=True)
    command, program = outputs.new(), outputs.of_program("p7")
    command.add(bytes(3 * MiB), False)
    outputs.finish(command)
    program.add(bytes(3 * MiB), False)
    outputs.settle(program)
    outputs.forget(program)
    outputs.leave()
    found = Outputs(folder, 4 * MiB, persistent=True)
    assert found.recover() == 7 and found.new().id == command.id.replace("1", "2")
    for gone in (command.id, "p7"):
        with pytest.raises(NotFound, match="not kept any more"):
            found.read(gone, 0, 1)
    found.close()


def test_what_another_process_left_makes_room_as_well(folder: Path) -> None:
    outputs = Outputs(folder, 4 * MiB, persistent=True)
    for age, n in enumerate((8, 10, 9)):
        outputs.of_program(f"p{n}").add(bytes(MiB), False)
        for name in (f"p{n}", f"p{n}.index"):
            os.utime(folder / name, (1000 - age, 1000 - age))
    outputs.leave()
    found = again(outputs)
    output = found.of_program("p11")
    output.add(bytes(2 * MiB), False)
    found.settle(output)
    assert {path.name for path in folder.iterdir()} == {
        "p8", "p8.index", "p9.index", "p10.index", "p11", "p11.index", "names",
    }  # fmt: skip
    found.close()
