"""Ranges of user ids: which of them a box on this machine has."""

from __future__ import annotations

import fcntl
import os

from hutch.errors import NoCapacity

from .plan import MAX_BOXES


class Slots:
    """Uid ranges, one per box on this machine: a byte lock each, which cannot outlive us."""

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._fd = os.open(f"{folder}/uids", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._mine: set[int] = set()

    def take(self) -> int:
        for _ in range(1000):
            slot = int.from_bytes(os.urandom(4), "little") % MAX_BOXES
            if slot in self._mine:
                continue
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
            except OSError:
                continue
            self._mine.add(slot)
            return slot
        raise NoCapacity("no range of user ids is free for another box")

    def give_back(self, slot: int) -> None:
        self._mine.discard(slot)
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, slot)
