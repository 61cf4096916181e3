"""Fetches a revision of a git repository, confined, and explains a failure in one line.

Neither the repository nor the caller who named it is trusted. git sees no configuration,
credentials or agent of the user. It uses HTTPS only, runs no hooks and fetches no submodules.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from hutch.backends.namespaces.confine import Bounds, Confinement
from hutch.errors import BackendUnavailable, HutchError, InvalidRequest, NoSpace

from .installer import remove_tree, started
from .progress import Progress, Report
from .uv import NO_SPACE

COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
BOUNDS = Bounds(seconds=900, disk_bytes=4 << 30, file_bytes=2 << 30)
LOOK_BOUNDS = Bounds(seconds=120)
MOST_LINES, LONGEST_LINE = 200, 500  # of git's output
HOSTS = "HUTCH_GIT_HOSTS"  # separated by commas; any host if unset

# Not the PATH of the user: a project may have put its own `git` there.
_PLACES = "/usr/local/bin:/usr/bin:/bin:/run/current-system/sw/bin"
_PROXIES = re.compile(r"(HTTPS|ALL|NO)_PROXY|(https|all|no)_proxy")
# Certificates for git to trust: git's variables, and those that uv reads.
_TRUSTED = [
    ("GIT_SSL_CAINFO", "GIT_SSL_CAINFO"),
    ("GIT_SSL_CAPATH", "GIT_SSL_CAPATH"),
    ("SSL_CERT_FILE", "GIT_SSL_CAINFO"),
    ("SSL_CERT_DIR", "GIT_SSL_CAPATH"),
]
_VARIABLES = {
    "HOME": "/tmp",
    "PATH": "/usr/bin:/bin",
    "LC_ALL": "C.UTF-8",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ALLOW_PROTOCOL": "https",
    "GIT_LFS_SKIP_SMUDGE": "1",
}
_SETTINGS = (
    "core.hooksPath=/dev/null",
    "core.askPass=",
    "core.fsmonitor=false",
    "credential.helper=",
    "protocol.allow=never",
    "protocol.https.allow=always",
    "http.followRedirects=initial",
    "http.lowSpeedLimit=100",
    "http.lowSpeedTime=60",
    "submodule.recurse=false",
    "fetch.recurseSubmodules=false",
    "gc.auto=0",
    "maintenance.auto=false",
    "init.defaultBranch=main",
    "init.templateDir=",
    "advice.detachedHead=false",
    "safe.directory=*",
)
_ALL_REFS = ("+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*")


def find_git() -> str | None:
    found = shutil.which("git", path=_PLACES)
    return os.path.realpath(found) if found else None


def resolve(url: str, revision: str, report: Report) -> str:
    """The commit of a branch or tag, or of HEAD if `revision` is empty.

    A prefix of a commit is returned unchanged, as it takes a whole repository to resolve it.
    Raises InvalidRequest if there is no such revision, and BackendUnavailable if there is no git
    or the host cannot be reached.
    """
    if COMMIT.fullmatch(revision):
        return revision
    # `^{}` is the commit that an annotated tag points to, rather than the tag object.
    if not revision:
        wanted = ["HEAD"]
    elif revision.startswith("refs/"):
        wanted = [f"{revision}^{{}}", revision]
    else:
        wanted = [f"refs/heads/{revision}", f"refs/tags/{revision}^{{}}", f"refs/tags/{revision}"]
    null = os.open("/dev/null", os.O_RDONLY)  # nothing is written, so there is nothing to lock
    try:
        words = ["ls-remote", "--", url, *wanted]
        lines = _git(words, url, revision, null, report, Confinement(bounds=LOOK_BOUNDS))
    finally:
        os.close(null)
    refs = {name: commit for commit, _, name in (line.partition("\t") for line in lines)}
    for name in wanted:
        if COMMIT.fullmatch(refs.get(name, "")):
            return refs[name]
    if re.fullmatch(r"[0-9a-f]{7,39}", revision):
        return revision
    raise _unknown(url, revision)


def check_out(url: str, revision: str, folder: Path, lock: int, report: Report) -> str:
    """Fetch a commit, which a prefix may name, into a new folder. Returns the full commit.

    `lock` is a descriptor that stays locked while git runs, even if this process is killed.
    Raises InvalidRequest if there is no such commit, BackendUnavailable and NoSpace.
    """
    folder.mkdir()
    seen = Confinement(writable=(str(folder),), measured=(str(folder),), bounds=BOUNDS)

    def git(*words: str) -> list[str]:
        return _git(["-C", str(folder), *words], url, revision, lock, report, seen)

    git("init", "-q")
    commit = revision
    is_whole = COMMIT.fullmatch(revision) is not None
    try:
        if is_whole:
            git("fetch", "-q", "--no-tags", "--depth", "1", "--", url, revision)
    except InvalidRequest:
        is_whole = False  # not every server lets a client fetch a single commit
    if not is_whole:
        git("fetch", "-q", "--no-tags", "--", url, *_ALL_REFS)
        (commit, *_) = git("rev-parse", "--verify", "-q", f"{revision}^{{commit}}")
    # A tag may have a name that looks like a commit.
    if not COMMIT.fullmatch(commit) or not commit.startswith(revision):
        raise _unknown(url, revision)
    git("checkout", "-q", "--detach", commit)
    return commit


def fetch_history(url: str, folder: Path, lock: int, report: Report) -> None:
    """Fetch all branches and tags, for a package that computes its version from them."""
    seen = Confinement(writable=(str(folder),), measured=(str(folder),), bounds=BOUNDS)
    words = ["-C", str(folder), "fetch", "-q", "--no-tags"]
    if (folder / ".git/shallow").is_file():
        words.append("--unshallow")
    _git([*words, "--", url, *_ALL_REFS], url, "", lock, report, seen)


def drop_history(folder: Path) -> None:
    remove_tree(folder / ".git")


def _git(
    words: Iterable[str], url: str, revision: str, lock: int, report: Report, seen: Confinement
) -> list[str]:
    """Run git, and return the lines it printed. Raises what `_explained` makes of a failure."""
    git = find_git()
    if git is None:
        raise BackendUnavailable("there is no git on this machine: install it (apt install git)")
    env = dict(_VARIABLES)
    env |= {name: value for name, value in os.environ.items() if _PROXIES.fullmatch(name)}
    for source, name in _TRUSTED:
        if os.environ.get(source) and name not in env:
            env[name] = os.path.abspath(os.environ[source])
    certificates = tuple(env[name] for _, name in _TRUSTED[:2] if name in env)
    seen = Confinement(certificates, seen.writable, measured=seen.measured, bounds=seen.bounds)
    settings = [word for setting in _SETTINGS for word in ("-c", setting)]
    if HOSTS in os.environ:  # git would contact another host before we could check it
        settings += ["-c", "http.followRedirects=false"]
    progress = Progress("fetching", url)
    # Much of the output comes from the server, so it is bounded.
    output: deque[str] = deque(maxlen=MOST_LINES)
    with started([git, *settings, *words], env, lock, seen) as (process, lines):
        for line in lines:
            report(progress)
            if line:
                output.append(line[:LONGEST_LINE])
    if process.returncode:
        raise _explained(list(output), url, revision, process.returncode)
    return list(output)


# --- why it failed -----------------------------------------------------------------------


def _unknown(url: str, revision: str) -> InvalidRequest:
    what = f"revision {revision!r}" if revision else "branch in it"
    return InvalidRequest(f"{url} has no {what}: name a branch, a tag or a commit that is there")


def _explained(output: list[str], url: str, revision: str, code: int) -> HutchError:
    text = "\n".join(output)
    host = url.split("/")[2]
    if NO_SPACE.search(text):
        return NoSpace("the disk is full, or has no room for more files: git could not go on")
    if re.search(r"could not read (Username|Password)|Authentication failed| 40[13]\b", text):
        return InvalidRequest(
            f"{url} does not exist, or needs a login, and git has no credentials here: put a wheel "
            "of it into the project (pip wheel --no-deps git+https://…)"
        )
    if re.search(r"repository .{1,300} not found|not valid: is this a git repository| 404\b", text):
        return InvalidRequest(f"there is no git repository at {url}")
    if re.search(r"[Cc]ertificate|CAfile|SSL peer", text):
        return BackendUnavailable(
            f"the certificate of {host} is not trusted: for an internal CA, set GIT_SSL_CAINFO or "
            "SSL_CERT_FILE to its file"
        )
    if match := re.search(
        r"(Could not resolve \w+|Failed to connect|Connection \w+|[\w ]{0,80}timed out"
        r"|Proxy CONNECT|Operation too slow|Empty reply|Couldn't connect)[^:\n]*",
        text,
    ):
        return BackendUnavailable(
            f"{host} cannot be reached ({match[0].strip()}); with HUTCH_GIT_HOSTS= in the "
            "environment, packages from git are left out"
        )
    if re.search(r"find remote ref|not our ref|unadvertised|Needed a single revision", text) or (
        not output and revision
    ):
        return _unknown(url, revision)
    if re.search(r"transport '[^']*' not allowed", text):
        return InvalidRequest(f"{url} leads to an address that is not https")
    last = re.sub(r"^(fatal|error): ", "", output[-1])[:300] if output else "it said nothing"
    return InvalidRequest(f"git could not fetch {url} (exit code {code}): {last}")
