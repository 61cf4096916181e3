"""All families there are. The first one that knows a call has it."""

from __future__ import annotations

from .builds import BUILDS
from .changes import DIFF
from .checks import CHECKS
from .data import DATA
from .engines import ENGINES
from .family import Family
from .git import GIT
from .installs import INSTALLS
from .listing import LISTING
from .logs import LOGS
from .reading import READING
from .search import SEARCH
from .tests import TESTS

FAMILIES: tuple[Family, ...] = (
    *TESTS, *INSTALLS, *CHECKS, *BUILDS, *ENGINES,
    *GIT, *LISTING, *SEARCH, DIFF, *DATA, *LOGS, *READING,
)  # fmt: skip
