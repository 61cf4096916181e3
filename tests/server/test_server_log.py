"""The server's own log, as operators read it from elsewhere."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from services import ADMIN, ALICE, in_loop, service

from hutch import serving
from hutch.errors import InvalidRequest, NotPermitted
from hutch.server.log import ServerLog
from hutch.serving import LogRecord


def logger_of(log: ServerLog) -> logging.Logger:
    logger = logging.Logger("hutch.of.tests", logging.DEBUG)
    logger.addHandler(log)
    return logger


async def next_of(stream: AsyncGenerator[LogRecord, None]) -> LogRecord:
    async with asyncio.timeout(120):
        return await anext(stream)


def test_records_are_numbered_and_read_by_number_and_level() -> None:
    log = ServerLog()
    logger = logger_of(log)
    logger.info("first %d", 1)
    logger.debug("details")
    logger.warning("third")
    assert [(r.number, r.level, r.message) for r in log.read(0, 10, "info")] == [
        (1, "info", "first 1"), (3, "warning", "third"),
    ]  # fmt: skip
    assert [r.number for r in log.read(1, 10, "debug")] == [2, 3]
    assert [r.number for r in log.read(0, 2, "debug")] == [2, 3]  # the newest
    assert [r.number for r in log.read(1, 1, "debug")] == [2]  # the next
    assert log.read(3, 10, "debug") == []
    assert log.read(0, 10, "debug")[0].logger == "hutch.of.tests"


def test_levels_of_their_own_are_the_known_one_below() -> None:
    log = ServerLog()
    logger_of(log).log(35, "between")
    logger_of(log).log(60, "above")
    low = logging.Logger("low", 1)
    low.addHandler(log)
    low.log(5, "below")
    assert [r.level for r in log.read(0, 10, "debug")] == ["warning", "critical", "debug"]


def test_only_the_last_records_are_kept_and_long_ones_are_cut() -> None:
    log = ServerLog(most=5)
    logger = logger_of(log)
    for number in range(20):
        logger.info("%d", number)
    assert [r.number for r in log.read(0, 2000, "debug")] == [16, 17, 18, 19, 20]
    logger.info("x" * 1_000_000)
    assert len(log.read(20, 1, "debug")[0].message) < 5000


def test_what_is_hostile_in_a_message_is_escaped() -> None:
    log = ServerLog()
    logger = logger_of(log)
    logger.info("a\nb\r\x1b[2Jc\u202ed\u2028e\x9bf\x00 \udc80 ü")
    try:
        raise ValueError("\x1b]0;title\x07 in\nlines")
    except ValueError:
        logger.exception("failed")
    message, failed = log.read(0, 10, "debug")
    assert message.message == ("a\\nb\\r\\x1b[2Jc\\u202ed\\u2028e\\x9bf\\x00 \\udc80 ü")
    assert failed.traceback.startswith("Traceback") and "\n" in failed.traceback
    assert "\x1b" not in failed.traceback and "\x07" not in failed.traceback


def test_a_message_that_cannot_be_formatted_breaks_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = ServerLog()
    logger = logger_of(log)
    logger.info("%d", "no number")
    logger.info("next")
    assert [r.message for r in log.read(0, 10, "debug")] == ["next"]
    assert "no number" in capsys.readouterr().err or not sys.stderr


@in_loop
async def test_a_follower_gets_what_was_and_what_comes_from_any_thread() -> None:
    log = ServerLog()
    logger = logger_of(log)
    logger.info("one")
    logger.info("two")
    follower = log.follow(1, "info")
    assert (await next_of(follower)).message == "two"
    thread = threading.Thread(target=logger.warning, args=("three",))
    thread.start()
    assert (await next_of(follower)).message == "three"
    thread.join()
    await follower.aclose()
    assert not log._followers
    logger.info("four")


@in_loop
async def test_a_follower_that_is_too_slow_sees_a_gap_and_no_more() -> None:
    log = ServerLog(most=3)
    logger = logger_of(log)
    logger.info("1")
    follower = log.follow(0, "info")
    assert (await next_of(follower)).number == 1
    for number in range(2, 12):
        logger.info("%d", number)
    assert [(await next_of(follower)).number for _ in range(3)] == [9, 10, 11]
    await follower.aclose()


@in_loop
async def test_only_an_admin_reads_it(tmp_path: Path) -> None:
    async with service(tmp_path) as server:
        logger_of(server.watching.log).info("hello")
        (record,) = await server.perform(serving.ReadServerLog(), ADMIN)
        assert record.message == "hello"
        follower = await server.stream(serving.FollowServerLog(), ADMIN)
        assert (await next_of(follower)).message == "hello"
        await follower.aclose()
        with pytest.raises(NotPermitted):
            await server.perform(serving.ReadServerLog(), ALICE)
        with pytest.raises(NotPermitted):
            await server.stream(serving.FollowServerLog(), ALICE)
        for asked in (serving.ReadServerLog(-1), serving.ReadServerLog(limit=0)):
            with pytest.raises(InvalidRequest):
                await server.perform(asked, ADMIN)
        with pytest.raises(InvalidRequest):
            await server.stream(serving.FollowServerLog(-1), ADMIN)
