"""What the command line says when something is wrong: what it is, and what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prompt import Served, Terminal, boxes, hutch  # noqa: F401

pytestmark = pytest.mark.usefixtures("boxes")


def said(served: Served, *words: str, **env: str) -> str:
    """The one line of a failure."""
    message = served(*words, code=125, env=served.env | env)
    assert message.startswith("hutch: ") and message.count("\n") == 1, message
    return message


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("schlüssel", "not ASCII"), ("hutch_abc\n", "a line break at its end"),
     ("hutch\r\nX-Other: 1", "a line break in it"), ("two words", "a space"),
     ("k" * 600, "more than 512")],
)  # fmt: skip
def test_a_key_that_cannot_be_one_is_refused_before_it_is_sent(
    served: Served, key: str, wrong: str
) -> None:
    message = said(served, "ps", HUTCH_URL=served.url, HUTCH_API_KEY=key)
    assert message.startswith("hutch: HUTCH_API_KEY is not a key: ") and wrong in message
    assert key[:5] not in message.partition(": ")[2]


def test_a_key_that_no_client_could_send_is_refused_by_a_server_too(served: Served) -> None:
    message = said(served, "config", "check", HUTCH_API_KEY="schlüssel")
    assert "HUTCH_API_KEY" in message and "ASCII" in message


def test_a_wrong_key_is_told_with_the_variable_that_holds_it(served: Served) -> None:
    message = said(served, "ps", HUTCH_URL=served.url, HUTCH_API_KEY="hutch_abcdefgh_wrong")
    assert "unknown or revoked key" in message and message.endswith(" in HUTCH_API_KEY\n")


def test_a_port_in_use_is_told_once_and_with_the_option(served: Served, tmp_path: Path) -> None:
    address = served.url.removeprefix("http://")
    for words in (["--detach"], []):
        done = hutch(
            "serve", "--listen", address, *words, env=served.env | {"HUTCH_DATA_DIR": str(tmp_path)}
        )
        message = done.stderr.decode().splitlines()[-1]
        assert done.returncode == 125 and "--listen" in message
        assert message.count(address) == 1
        assert b"started in" not in done.stderr


def test_a_deadline_that_is_too_late_is_told_as_it_was_asked_for(served: Served) -> None:
    message = said(served, "create", "--ttl", "99999999h")
    assert message == "hutch: --ttl can be at most 86400 (1d) here (setting max_ttl_seconds)\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--memory", "99999t"], "memory can be at most 64 TiB"),
        (["--disk", "99999t"], "disk (99999 TiB) is kept in memory"),
        (["--pids", "9" * 12], "pids"),
    ],
)
def test_a_limit_that_limits_nothing_is_refused(
    served: Served, words: list[str], says: str
) -> None:
    assert says in said(served, "run", *words, "--", "true")


def test_a_file_that_cannot_be_imported_is_named(served: Served) -> None:
    missing = said(served, "workspace", "import", "notes", "/nowhere/it.tar")
    assert missing == "hutch: /nowhere/it.tar: No such file or directory\n"
    assert "notes.tar" in said(served, "workspace", "import")
    no_tar = said(served, "workspace", "import", "notes", "/etc/passwd")
    assert no_tar.startswith("hutch: /etc/passwd: not a tar, or a broken one: text in a header")
    assert said(served, "workspace", "import", "notes").startswith("hutch: stdin: not a tar")


def test_an_import_does_not_wait_for_a_terminal(served: Served) -> None:
    with Terminal("workspace", "import", "notes", **served.env) as terminal:
        terminal.expect("no file given")
        assert terminal.end() == 125


def test_an_image_that_is_not_there_is_not_offered_to_be_pulled_for_removal(served: Served) -> None:
    message = said(served, "image", "rm", "nosuch")
    assert "pull" not in message and "hutch image ls" in message
    assert "did you mean 'python'?" in said(served, "image", "rm", "pyton")


@pytest.mark.parametrize("words", [["run", "--image", "pyton", "--", "true"],
                                   ["image", "build", "pyton"],
                                   ["create", "--image", "pyton"]])  # fmt: skip
def test_the_nearest_image_is_suggested(served: Served, words: list[str]) -> None:
    assert "did you mean 'python'?" in said(served, *words)


def test_the_nearest_section_of_a_config_file_is_suggested(served: Served, tmp_path: Path) -> None:
    config = tmp_path / "hutch.toml"
    config.write_text("[workspaces]\nquota = '1g'\n")
    message = said(served, "config", "check", str(config))
    assert "unknown section [workspaces]: did you mean [workspace]?" in message
    config.write_text("[nonsense]\na = 1\n")
    assert "known: [tls], " in said(served, "config", "check", str(config))


def test_a_session_that_does_nothing_still_uses_something(served: Served) -> None:
    made = served.session()
    (row,) = json.loads(served("stats", "--json", made))
    (info,) = (each for each in json.loads(served("ps", "--json")) if each["id"] == made)
    weaker = " ".join(info["degraded"])
    for name, least, without in (("memory", 100_000, "memory is"), ("pids", 1, "processes are")):
        may_be_unknown = without in weaker  # there is no control group for it
        assert (may_be_unknown and row[name] is None) or row[name] >= least


def test_times_in_json_are_dates(served: Served) -> None:
    made = served.session()
    served("exec", made, "--", "true")
    key = served("key", "create", "--owner", "ada").split("\n")[0]
    printed = [
        *json.loads(served("ps", "--json")), *json.loads(served("key", "ls", "--json")),
        *map(json.loads, served("logs", "--format", "json", made).splitlines()),
        json.loads(served("run", "--json", "--", "true"))["box"],
    ]  # fmt: skip
    times = [value for record in printed for name, value in record.items() if name.endswith("_at")]
    dates = [value for value in times if value is not None]
    assert key.startswith("hutch_") and len(dates) > 5
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", date) for date in dates)


def test_times_for_people_have_the_offset_of_their_zone(served: Served) -> None:
    made = served.session()
    env = served.env | {"TZ": "XXX-05:30"}
    printed = [
        served("logs", made, env=env), served("audit", "--since", "1h", env=env),
        served("key", "create", "--owner", "ada", "--expires", "2031-01-01", env=env),
    ]  # fmt: skip
    for text in printed:
        assert re.search(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d \+0530", text)


def test_json_of_a_box_that_is_gone_says_so(served: Served) -> None:
    socket = f"unix:{served.data}/run/hutch.sock"
    printed = [
        served("run", "--json", "--", "true"),
        served("run", "--url", socket, "--json", "--", "true"),
        served("python", "--image", "host", "--json", "-c", "1"),
    ]
    for text in printed:
        box = json.loads(text)["box"]
        assert box["status"] == "destroyed" and box["ended_at"] >= box["created_at"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("key rm", "did you mean `hutch key revoke`? Known: create, ls, extend, rotate,"),
        ("key --json", "hutch key needs an action: create, ls, extend, rotate or revoke"),
        ("config show", "unknown command `hutch config show`: did you mean `hutch config check`?"),
        ("config foo", "unknown command `hutch config foo`; there is only `hutch config check`"),
        ("image nonsense", "; known: build, pull, import, ls, rm, prune"),
        ("workspace create notes", "hutch create --workspace-id NAME"),
        ("key create --scope all", "--scope must be metrics, read, run or admin, not 'all'"),
        ("run --timeout", "--timeout needs a value; see hutch run --help"),
        ("ps foo", "unexpected argument 'foo'; see hutch ps --help"),
        ("cp a", "hutch cp needs destination; see hutch cp --help"),
        ("gain --since x", "--since must be a number of days, like 7, 7d or 2w, not 'x'"),
        ("logs --tail x", "--tail must be a whole number, not 'x'; see"),
        ("logs --tail -1 x", "--tail must be a number of entries, at least 0"),
        ("logs -n 1 --daemon", "--tail is for the formats text and json, of a session"),
        ("create alpine", "unexpected argument 'alpine': an image is named with --image NAME"),
        ("ps --json=yes", "--json takes no value; see hutch ps --help"),
        ("ps --format json", "hutch ps has no option --format: did you mean --json?"),
        ("run --pull always -- true", "no option --pull: `hutch image pull` pulls an image"),
        ("run --cwd /tmp -- true", "no option --cwd: did you mean --workdir?"),
        (
            "stop 1f4c",
            "stops the server, and sessions keep running; to end a session: hutch rm 1f4c",
        ),
        (
            "workspace import a.tar",
            "no name given. For example: hutch workspace import notes a.tar",
        ),
        ("workspace import a.tar notes", "the name of a workspace has 2 to 64 of a-z"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_ones(
    served: Served, words: str, says: str
) -> None:
    message = said(served, *words.split())
    assert says in message and "choose from" not in message
    assert "argument " not in message.replace("unexpected argument ", "")
