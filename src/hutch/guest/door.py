"""`python -m hutch.guest.door`: waits, until the engine ends it.

It is the first process of a container beside that of a box, which has another user and the same
network. There the engine starts relays (see relay.py), where it cannot start them under a user of
their own in the container of the box.
"""

from __future__ import annotations

import signal


def main() -> None:
    # Blocked, for process 1 would not get a signal that it has no handler for.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signal.sigwait([signal.SIGTERM])


if __name__ == "__main__":
    main()
