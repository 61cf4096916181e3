"""The commands that talk to a server, against one that runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt import PATIENCE, Served, Terminal, boxes, hutch, start  # noqa: F401

from layers_of_tests import busybox, tar_of

pytestmark = pytest.mark.usefixtures("boxes")


@pytest.fixture
def session(served: Served) -> Iterator[str]:
    made = served.session()
    yield made
    served("rm", made)


def test_a_session_is_listed_until_it_is_removed(served: Served) -> None:
    made = served.session(labels={"of": "\x1b[2J"})
    table = [line.split() for line in served("ps").splitlines()]
    assert table[0] == ["SESSION", "IMAGE", "STATUS", "CREATED", "EXPIRES", "OWNER", "WORKSPACE"]
    assert [made, "host", "running"] in [row[:3] for row in table]
    listed = {entry["id"]: entry for entry in json.loads(served("ps", "--json"))}
    assert listed[made]["status"] == "running" and listed[made]["labels"] == {"of": "\x1b[2J"}
    assert served("rm", made) == f"{made}\n"
    assert made not in served("ps") and made in served("ps", "--all")


def test_a_command_in_a_session_has_its_own_output_and_exit_code(
    served: Served, session: str
) -> None:
    done = hutch("exec", session, "--", "sh", "-c", "echo out; echo err >&2; exit 7",
                 env=served.env)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    assert served(
        "exec", "--env", "A=1", "--workdir", "/tmp", session, "sh", "-c", "pwd; echo $A"
    ) == ("/tmp\n1\n")
    assert "no such program" in served("exec", session, "--", "nonesuch", code=127)
    assert "timed out" in served("exec", "--timeout", "0.2", session, "sleep", "60", code=124)


def test_only_a_program_that_is_missing_is_told_as_one(served: Served, session: str) -> None:
    said = served("exec", "--workdir", "/nowhere", session, "true", code=125)
    assert "no such working directory" in said and "program" not in said


def test_a_pip_that_cannot_install_in_a_session_is_told_what_works(
    served: Served, session: str
) -> None:
    for words in (
        ["exec", session, "--", "pip", "install", "six"],
        ["exec", "--shell", session, "pip install six"],
        ["python", "--session", session, "-c", "%pip install six"],
    ):
        last = served(*words, code=1).splitlines()[-1]
        assert last.startswith("hutch: a box has no network for pip.")
        assert "--packages six," in last


def test_a_session_that_cannot_wake_says_why_when_a_command_is_run(
    served: Served, tmp_path: Path
) -> None:
    (tmp_path / "root.tar").write_bytes(tar_of(*busybox()))
    served("image", "import", str(tmp_path / "root.tar"), "gone")
    made = served.session(image="gone")
    asleep = "import sys, hutch; hutch.Sandbox.connect(sys.argv[1], url=sys.argv[2]).hibernate()"
    url = f"unix:{served.data}/run/hutch.sock"
    subprocess.run([sys.executable, "-c", asleep, made, url], timeout=PATIENCE, check=True)
    served("image", "rm", "gone")
    for words in (["true"], ["nonesuch"]):
        said = served("exec", made, "--", *words, code=125)
        assert "gone" in said and "cannot run" not in said
    assert "not_woken" in served("logs", made)
    served("rm", made)


def test_the_shell_of_a_session_stays_from_one_command_to_the_next(
    served: Served, session: str
) -> None:
    served("exec", "--shell", session, "cd /tmp; export A=kept")
    assert served("exec", "--shell", session, "pwd; echo $A") == "/tmp\nkept\n"


def test_stdin_reaches_a_command_in_a_session(served: Served, session: str) -> None:
    data = os.urandom(300_000)
    done = hutch("exec", "--stdin", session, "--", "sh", "-c", "wc -c; exit 3", input=data,
                 env=served.env)  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (3, [b"300000"])


def test_output_comes_while_the_command_runs_and_ctrl_c_stops_it(
    served: Served, session: str
) -> None:
    with start("exec", session, "--", "sh", "-c", "echo first; sleep 600", env=served.env) as doing:
        assert doing.stdout and doing.stdout.readline() == b"first\n"
        doing.send_signal(signal.SIGINT)
        assert doing.wait(PATIENCE) == 130
    deadline = time.monotonic() + PATIENCE
    while served("exec", session, "--", "sh", "-c", "pgrep sleep || echo none") != "none\n":
        assert time.monotonic() < deadline


def test_a_cell_has_the_variables_of_the_cell_before(served: Served, session: str) -> None:
    served("python", "--session", session, "-c", "x = 20")
    assert served("python", "--session", session, "-c", "x + 22") == "42\n"
    words = ("python", "--session", session, "--memory", "1g", "-c", "1")
    assert "--memory is for a new box" in served(*words, code=125)


def test_a_terminal_in_a_session_leaves_the_session_as_it_is(served: Served, session: str) -> None:
    with Terminal("shell", session, **served.env) as terminal:
        terminal.expect("$ ")
        terminal.type("echo $((6 * 7)); exit 5\r")
        terminal.expect("42")
        assert terminal.end() == 5
    assert session in served("ps")


def test_files_and_folders_are_copied_both_ways(
    served: Served, session: str, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    (tree / "a/b").mkdir(parents=True)
    (tree / "a/b/data").write_bytes(bytes(range(256)) * 5000)
    (tree / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("/etc/passwd")
    assert "skipped 1" in served("cp", str(tree), f"{session}:")
    assert served("exec", session, "--", "/workspace/tree/run.sh") == "ran\n"
    served("cp", f"{session}:tree", str(tmp_path / "back"))
    assert (tmp_path / "back/a/b/data").read_bytes() == (tree / "a/b/data").read_bytes()
    assert os.access(tmp_path / "back/run.sh", os.X_OK) and not (tmp_path / "back/link").exists()
    served("cp", f"{session}:tree/run.sh", str(tmp_path / "back"))
    done = hutch("cp", "-", f"{session}:/tmp/typed", input=b"typed\n", env=served.env)
    assert done.returncode == 0, done.stderr
    assert served("cp", f"{session}:/tmp/typed", "-") == "typed\n"
    assert "nonesuch does not exist" in served("cp", f"{session}:nonesuch", ".", code=125)
    assert "neither side" in served("cp", "a", "b", code=125)


def test_a_workspace_is_filled_listed_and_removed_without_a_session(
    served: Served, tmp_path: Path
) -> None:
    (tmp_path / "note").write_text("kept")
    with tarfile.open(tmp_path / "notes.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "note", "deep/note")
    assert "unpacked 1 file into notes" in served(
        "workspace", "import", "notes", str(tmp_path / "notes.tar.gz")
    )
    served("workspace", "cp", str(tmp_path / "note"), "notes:second")
    assert served("cp", "workspace/notes:deep/note", "-") == "kept"
    assert re.search(r"^notes +[0-9.]+ (B|KiB)  ", served("workspace", "ls"), re.MULTILINE)
    served("workspace", "export", "notes", str(tmp_path / "out.tar"))
    with tarfile.open(tmp_path / "out.tar") as archive:
        names = {name.removeprefix("./") for name in archive.getnames()}
    assert {"deep/note", "second"} <= names
    assert served("workspace", "rm", "notes") == "notes\n"
    assert "notes" not in served("workspace", "ls")


def test_the_journal_of_a_session_can_be_read_and_exported(served: Served, session: str) -> None:
    served("exec", "--shell", session, "echo to be remembered")
    served("python", "--session", session, "-c", "print(6 * 7)")
    text = served("logs", session)
    assert "echo to be remembered" in text and "print(6 * 7)" in text
    entries = [
        json.loads(line) for line in served("logs", "--format", "json", session).splitlines()
    ]
    assert [entry["number"] for entry in entries] == sorted(entry["number"] for entry in entries)
    cast = served("logs", "--format", "asciicast", session).splitlines()
    assert json.loads(cast[0])["version"] == 2
    assert json.loads(served("logs", "--format", "notebook", session))["nbformat"] == 4


# 101 is ptrace on x86_64, 117 on aarch64.
TRACE = (
    "import ctypes, platform; number = 101 if platform.machine() == 'x86_64' else 117; "
    "print([ctypes.CDLL(None).syscall(number, 0, 0, 0, 0) for _ in range(3)])"
)


def test_refused_system_calls_are_logged_also_after_the_session(served: Served) -> None:
    made = served.session()
    assert served("logs", "--security", made) == ""
    assert served("exec", made, "--", "python3", "-c", TRACE) == "[-1, -1, -1]\n"
    assert re.search(
        r"denied +ptrace +program=python3\S* +count=3 ", served("logs", "--security", made)
    )
    served("exec", made, "--", "python3", "-c", TRACE)
    served("exec", "--shell", made, "unshare --user true", code=1)
    served("rm", made)
    lines = served("logs", "--security", "--format", "json", made).splitlines()
    counts = {json.loads(line)["body"]["call"]: json.loads(line)["body"]["count"] for line in lines}
    assert counts == {"ptrace": 6, "unshare": 1}


def test_a_journal_is_followed_until_its_session_ends(served: Served) -> None:
    made = served.session()
    with start("logs", "-f", made, env=served.env) as following:
        served("exec", "--shell", made, "echo now")
        assert following.stdout
        for line in following.stdout:
            if b"echo now" in line:
                break
        served("rm", made)
        following.stdout.read()
        assert following.wait(PATIENCE) == 0


def test_stats_tell_what_a_session_uses(served: Served, session: str) -> None:
    served("exec", "--shell", session, "true")
    rows = json.loads(served("stats", session, "--json"))
    assert rows[0]["session"] == session and rows[0]["memory"]
    assert session in served("stats") and " 1 GiB " in served("stats", session)


def test_a_key_opens_the_server_over_tcp_until_it_is_revoked(served: Served) -> None:
    out = hutch("key", "create", "--owner", "them", "--label", "test", env=served.env)
    key = out.stdout.decode().strip()
    listed = next(k for k in json.loads(served("key", "ls", "--json")) if k["owner"] == "them")
    assert key.startswith(listed["prefix"]) and listed["key"] is None and listed["label"] == "test"
    there = served.env | {"HUTCH_URL": served.url, "HUTCH_API_KEY": key}
    assert served("run", "--", "echo", "over there", env=there) == "over there\n"
    assert "admin" in served("key", "ls", code=125, env=there)
    assert served("key", "revoke", listed["id"]) == f"{listed['id']}\n"
    assert "revoked" in served("ps", code=125, env=there)
    assert "needs a key" in served("ps", "--url", served.url, code=125)


def test_a_key_can_be_made_to_expire_extended_and_rotated(served: Served) -> None:
    def listed() -> str:
        return next(line for line in served("key", "ls").splitlines() if "rita" in line)

    made = hutch("key", "create", "--owner", "rita", "--expires", "3d", env=served.env)
    assert b"expires at 20" in made.stderr
    there = served.env | {"HUTCH_URL": served.url, "HUTCH_API_KEY": made.stdout.decode().strip()}
    id = listed().split()[0]
    assert " in 2d" in listed() or " in 3d" in listed()
    assert served("key", "extend", id, "--expires", "never") == f"{id} never\n"
    assert "never" in listed()
    served("ps", env=there)
    rotated = hutch("key", "rotate", id, "--overlap", "0s", env=served.env)
    assert rotated.returncode == 0 and b"never expires" in rotated.stderr
    assert f"key {id} no longer works" in rotated.stderr.decode()
    assert "revoked" in served("ps", code=125, env=there)
    served("ps", env=there | {"HUTCH_API_KEY": rotated.stdout.decode().strip()})
    assert "was revoked" in served("key", "extend", id, "--expires", "1d", code=125)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["create", "--owner", "x", "--expires", "soon"], "12h, 30d, 2027-01-01 or never"),
        (["create", "--owner", "x", "--expires", "2020-01-01"], "in the past"),
        (["create", "--owner", "x", "--scope", "admin", "--image", "host"], "only read and run"),
        (["create", "--owner", "x", "--expires", "0s"], "would be useless: use a duration"),
        (["create", "--owner", "x", "--expires", ""], "--expires is empty"),
        (["create", "--owner", "x", "--workspace", "BAD NAME"], "'BAD NAME' does not"),
        (["create", "--owner", "x", "--image", "py*"], "no image can be called 'py*'"),
        (["rotate", "k", "--overlap", ""], "--overlap is empty"),
        (["extend", "k"], "--expires is missing"),
        (["rotate", "a", "b"], "give one key"),
        (["rotate", "nope"], "there is no key 'nope'"),
        (["revoke", "k", "--expires", "1d"], "--expires is for"),
    ],
)
def test_a_mistake_about_keys_is_explained(served: Served, words: list[str], says: str) -> None:
    assert says in served("key", *words, code=125)


def test_the_audit_log_says_who_did_what_and_whether_it_was_changed(served: Served) -> None:
    def key_of(owner: str, scope: str) -> dict[str, str]:
        made = hutch("key", "create", "--owner", owner, "--scope", scope, env=served.env)
        key = made.stdout.decode().strip()
        return served.env | {"HUTCH_URL": served.url, "HUTCH_API_KEY": key}

    assert "server_started" in served("audit", "--event", "server_started")
    walter, boss = key_of("walter", "run"), key_of("boss", "admin")
    served("workspace", "rm", "nope", code=125, env=walter)
    said = served("audit", "--owner", "walter")
    assert "RemoveWorkspace" in said and "not_found" in said and "MakeKey" not in said
    assert served("audit", "--owner", "walter", env=boss) == said  # over HTTP
    assert 'needs an admin key; this key has scope "run"' in served("audit", code=125, env=walter)
    assert served("audit", "--since", "2100-01-01") == ""
    assert "since must be" in served("audit", "--since", "soon", code=125)
    for number, env in enumerate((served.env, boss)):
        with start("audit", "-f", "--owner", "walter", env=env) as following:
            served("workspace", "rm", f"again-{number}", code=125, env=walter)
            assert following.stdout
            for line in following.stdout:
                if b"again-%d" % number in line:
                    break
            following.terminate()
    assert "are as they were written; head " in served("audit", "--verify")
    copy = served.data.parent / "changed"
    shutil.copytree(served.data / "audit", copy / "audit")
    (path,) = (copy / "audit").iterdir()
    path.write_bytes(path.read_bytes().replace(b'"walter"', b'"nobody"'))
    env = served.env | {"HUTCH_DATA_DIR": str(copy)}
    assert "was changed, or is damaged" in served("audit", "--verify", code=1, env=env)


def test_a_copy_of_the_audit_log_can_be_checked_like_the_log_itself(served: Served) -> None:
    made = hutch("key", "create", "--owner", "boss", "--scope", "admin", env=served.env)
    boss = served.env | {"HUTCH_URL": served.url, "HUTCH_API_KEY": made.stdout.decode().strip()}
    copy = served.data.parent / "copied"
    for name, env in (("here", served.env), ("http", boss)):
        lines = served("audit", "--json", env=env)
        assert json.loads(lines.splitlines()[0])["number"] == 1
        (copy / name / "audit").mkdir(parents=True)
        (copy / name / "audit" / "1.jsonl").write_text(lines)
        checked = served("audit", "--verify", env=served.env | {"HUTCH_DATA_DIR": str(copy / name)})
        assert "are as they were written" in checked


def test_what_the_audit_log_cannot_answer_is_refused(served: Served) -> None:
    said = served("audit", "--event", "typo", code=125)
    assert "no event 'typo': there are request, denied, auth_failed" in said
    said = served("audit", "--verify", "--since", "1h", code=125)
    assert "--verify checks the whole log on this machine: leave --since out" in said


def test_folders_of_this_machine_are_not_offered_to_a_server(served: Served) -> None:
    there = served.env | {"HUTCH_URL": f"unix:{served.data}/run/hutch.sock"}
    said = served("run", "--workspace", ".", "--", "ls", code=125, env=there)
    assert "which a server cannot see" in said


def test_what_is_not_there_is_said_to_be_not_there(served: Served) -> None:
    for words in (["exec", "00000000-000", "--", "ls"], ["logs", "00000000-000"],
                  ["stats", "00000000-000"], ["rm", "00000000-000"],
                  ["python", "--session", "00000000-000", "-c", "1"]):  # fmt: skip
        assert "00000000-000" in served(*words, code=125)


def test_a_second_server_on_the_folder_is_refused_by_name(served: Served) -> None:
    said = served("serve", "--listen", "127.0.0.1:0", code=125)
    assert served.url in said and "hutch stop" in said


def test_in_a_session_that_is_none_nothing_is_run(served: Served) -> None:
    assert "nope" in served("exec", "nope", "--", "ls", code=125)
    key = hutch("key", "create", "--owner", "eve", "--scope", "read", env=served.env).stdout
    there = served.env | {"HUTCH_URL": served.url, "HUTCH_API_KEY": key.decode().strip()}
    said = served("create", code=125, env=there)
    assert 'needs a run key; this key has scope "read": use another key' in said
    assert "unset HUTCH_URL" in said


def test_what_is_asked_for_and_makes_no_sense_is_refused(served: Served) -> None:
    assert "--workspace-id" in served("create", "--exclusive", code=125)
    assert "at most 64 GiB here" in served("create", "--memory", "65g", code=125)


def test_a_tar_that_is_broken_leaves_no_workspace(served: Served, tmp_path: Path) -> None:
    (tmp_path / "broken.tar.gz").write_bytes(b"\x1f\x8b nonsense")
    served("workspace", "import", "half", str(tmp_path / "broken.tar.gz"), code=125)
    assert "half" not in served("workspace", "ls")


def test_an_admin_sees_the_workspaces_of_others(served: Served) -> None:
    key = hutch("key", "create", "--owner", "zoe", env=served.env).stdout.decode().strip()
    there = served.env | {"HUTCH_URL": served.url, "HUTCH_API_KEY": key}
    done = hutch("workspace", "cp", "-", "hers:note", input=b"hi", env=there)
    assert done.returncode == 0, done.stderr
    assert "hers" not in served("workspace", "ls")
    assert "hers" in served("workspace", "ls", "--owner", "zoe")
    assert served("workspace", "rm", "hers", "--owner", "zoe") == "hers\n"
    assert "hers" not in served("workspace", "ls", env=there)


def test_the_journal_tells_errors_terminals_and_what_was_broken_off(
    served: Served, session: str
) -> None:
    served("python", "--session", session, "-c", "1 / 0", code=1)
    with Terminal("shell", session, **served.env) as terminal:
        terminal.expect("$ ")
        terminal.type("exit\r")
        terminal.end()
    served("exec", session, "--", "nonesuch", code=127)
    text = served("logs", session)
    assert "error=ZeroDivisionError: division by zero" in text
    assert re.search(r" {2}terminal {4}\S", text) and "broken_off  nonesuch\n" in text


# --- starting and stopping ---------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Served]:
    server = Served(tmp_path)
    yield server
    server.end()


def test_sessions_outlive_a_server_that_is_stopped(own: Served) -> None:
    own.begin()
    made = own.session(ttl=600)
    own("exec", "--shell", made, "A=kept")
    said = own("stop")
    assert re.search(r"stopped; 1 session goes on, until \d{4}-", said), said
    assert "no server is running here" in own("ps", code=125)
    assert "no server is running on" in own("stop")
    own.begin()
    assert own("exec", "--shell", made, "echo $A") == "kept\n"
    assert "1 session ended" in own("stop", "--kill")
    own.begin()
    assert made not in own("ps")


def test_a_server_that_was_killed_is_not_waited_for(own: Served) -> None:
    own.begin()
    pid = json.loads((own.data / "run/daemon.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    assert "no server is running here" in own("ps", code=125)
    own.begin()
    own("ps")


def test_what_a_killed_server_left_is_ended_and_known_to_have_been(own: Served) -> None:
    own.begin()
    made = own.session(ttl=600)
    pid = json.loads((own.data / "run/daemon.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    said = own("stop", "--kill")
    assert "ended 1 session that" in said and "ended 1 box that" in said
    own.begin()
    listed = {entry["id"]: entry for entry in json.loads(own("ps", "--all", "--json"))}
    assert listed[made]["status"] == "destroyed"


def test_settings_that_are_wrong_do_not_keep_what_is_left_from_being_ended(own: Served) -> None:
    scope = own.data / "run/docker.yard"  # a server with containers was here
    scope.parent.mkdir(mode=0o700)
    scope.write_text("0" * 32)
    config = own.data / "hutch.toml"
    config.write_text("nonsense = 1\n")
    engine = f"unix://{own.data}/engine.sock"
    env = own.env | {"HUTCH_CONFIG": str(config), "DOCKER_HOST": engine}
    said = own("stop", "--kill", env=env, code=125)
    assert "engine.sock" in said and "nonsense" not in said  # the engine was asked
    scope.unlink()


def test_a_server_whose_card_is_broken_keeps_its_boxes(own: Served) -> None:
    own.begin()
    made = own.session()
    card = own.data / "run/daemon.json"
    kept = card.read_bytes()
    card.write_bytes(b"nonsense")
    for words in (["stop"], ["stop", "--kill"]):
        said = own(*words, code=125)
        assert "its pid is unknown" in said and "Nothing was stopped" in said
    assert own("exec", made, "--", "echo", "on") == "on\n"
    card.write_bytes(kept)


def test_a_server_of_another_folder_is_told_how_to_be_found(own: Served, tmp_path: Path) -> None:
    other = tmp_path / "other folder"
    env = {name: value for name, value in own.env.items() if name != "HUTCH_DATA_DIR"}
    words = ("serve", "--detach", "--listen", "127.0.0.1:0", "--data-dir", str(other))
    hint = re.findall("`([^`]*)`", own(*words, env=env))
    names = [command.rpartition("hutch ")[2] for command in hint]
    assert names == ["stop", "logs --daemon", "dashboard"]
    hint[2] += " --print"
    assert "no server is running on" in own("stop", env=env) and "--data-dir" in own(
        "stop", env=env
    )
    for command in reversed(hint):
        done = subprocess.run(
            command.replace("hutch ", f"{sys.executable} -m hutch "),
            shell=True, env=env, capture_output=True, text=True, timeout=PATIENCE, check=True,
        )  # fmt: skip
    assert "stopped" in done.stdout


def test_a_journal_is_followed_across_a_restart_of_the_server(own: Served) -> None:
    own.begin()
    made = own.session(ttl=600)
    with start("logs", "-f", "--format", "json", made, env=own.env) as following:
        assert following.stdout and json.loads(following.stdout.readline())["kind"] == "start"
        own("stop")
        own.begin()
        own("exec", "--shell", made, "echo again")
        own("rm", made)
        rest = [json.loads(line) for line in following.stdout]
        assert following.wait(PATIENCE) == 0
    assert [entry["number"] for entry in rest] == list(range(2, 2 + len(rest)))
    assert [entry["kind"] for entry in rest][-2:] == ["command", "end"]


def test_a_log_that_became_long_is_put_aside(own: Served) -> None:
    (own.data / "run").mkdir(mode=0o700, parents=True)
    with open(own.data / "run/hutch.log", "wb") as log:
        log.truncate((16 << 20) + 1)
    own.begin()
    assert (own.data / "run/hutch.log").stat().st_size < 1 << 20
    assert (own.data / "run/hutch.log.1").stat().st_size > 16 << 20


def test_the_log_of_a_server_behind_is_for_its_user_alone(own: Served) -> None:
    own.begin()
    assert (own.data / "run/hutch.log").stat().st_mode & 0o777 == 0o600
    assert "listening" in own("logs", "--daemon")


def test_a_server_behind_that_cannot_start_says_why(own: Served) -> None:
    own.begin()
    said = own("serve", "--detach", "--listen", "127.0.0.1:0", code=125)
    assert "another server has" in said and "`hutch stop`" in said and "--data-dir" in said
    assert "another server" not in (own.data / "run/hutch.log").read_text()


def test_a_server_in_front_ends_with_ctrl_c(own: Served) -> None:
    with start("serve", "--listen", "127.0.0.1:0", env=own.env) as serving:
        assert serving.stdout and serving.stdout.readline().startswith(b"serving at http://127")
        serving.send_signal(signal.SIGINT)
        assert serving.wait(PATIENCE) == 0


def test_a_config_file_says_where_the_server_is(own: Served, tmp_path: Path) -> None:
    own.begin()
    config = tmp_path / "hutch.toml"
    config.write_text(f'data_dir = "{own.data}"\n')
    env = {name: value for name, value in own.env.items() if name != "HUTCH_DATA_DIR"}
    assert "SESSION" in own("ps", env=env | {"HUTCH_CONFIG": str(config)})
    assert "SESSION" in own("ps", env=env, cwd=tmp_path)


def test_sessions_are_found_by_their_labels(served: Served) -> None:
    both = served("create", "--label", "team=red", "--label", "task=1").strip()
    one = served("create", "--label", "team=red").strip()
    served("create", "--label", "team=blue")
    assert set(served("ps", "-q", "--label", "team=red").split()) == {both, one}
    assert served("ps", "-q", "--label", "team=red", "--label", "task").split() == [both]
    assert served("ps", "-q", "--label", "team=red", "--label", "task=2") == ""
