"""`hutch init` and `hutch config check`, from the outside."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest
from prompt import hutch


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str, code: int = 0) -> tuple[str, str]:
    done = hutch(*words)
    assert done.returncode == code, done.stderr.decode()
    return done.stdout.decode(), done.stderr.decode()


def test_init_writes_a_file_for_you_alone_and_shows_the_key_once(home: Path) -> None:
    out, said = run("init")
    path = home / "config/hutch/hutch.toml"
    assert said == "" and f"wrote {path}" in out and "next: hutch serve --detach" in out
    assert path.stat().st_mode & 0o777 == 0o600
    found = re.search(r"^  (hutch_\S+)$", out, re.MULTILINE)
    assert found and found[1] not in path.read_text()
    kept = (home / "data/hutch.db").read_bytes()
    assert found[1].encode() not in kept and (home / "data").stat().st_mode & 0o777 == 0o700
    assert "/hutch.toml" not in run("config", "check")[0]  # nothing in it is set


def test_init_replaces_nothing_unless_it_is_told_to(home: Path) -> None:
    words = ("init", "--config", "mine.toml", "--data-dir", "boxes", "--listen", "[::1]:9000")
    assert f"next: hutch serve --config {home}/mine.toml --detach" in run(*words)[0]
    before = (home / "mine.toml").read_text()
    assert f'\ndata_dir = "{home}/boxes"\n' in before and '\nlisten = "[::1]:9000"\n' in before
    assert "mine.toml exists already; --force replaces it" in run(*words, code=125)[1]
    assert (home / "mine.toml").read_text() == before
    run(*words, "--force")
    with sqlite3.connect(home / "boxes/hutch.db") as database:
        assert database.execute("select count(*) from keys").fetchone() == (2,)
    database.close()
    assert not list(home.glob(".mine.toml*"))


@pytest.mark.parametrize(
    ("words", "says"),
    [(["init", "--listen", "nowhere"], "--listen: listen must be an address and a port"),
     (["init", "--config", "a.yaml"], "must be named *.toml"),
     (["init", "--confg", "a"], "did you mean --config?"),
     (["config", "chek"], "check"),
     (["config", "check", "nowhere.toml"], "cannot read nowhere.toml: No such file"),
     (["serve", "--listen", "80"], "--listen: listen must be an address and a port"),
     (["serve", "--drain", "-1"], "--drain"),
     (["serve", "--config", "nowhere.toml"], "cannot read nowhere.toml"),
     (["serve", "--backend", "magic"], 'backend must be namespaces, docker or kubernetes')],
)  # fmt: skip
def test_a_mistake_gives_125_and_one_line(words: list[str], says: str, home: Path) -> None:
    out, said = run(*words, code=125)
    assert out == "" and said.startswith("hutch: ") and says in said and said.count("\n") == 1
    assert not (home / "data").exists()


def test_check_tells_every_mistake_in_a_line_of_its_own(home: Path) -> None:
    (home / "hutch.yaml").write_text("pool:\n  imges: {}\nlisten: '\x1b[2J'\n".replace("\x1b", "e"))
    out, said = run("config", "check", code=125)
    assert out == "" and said.splitlines() == [
        "hutch: hutch.yaml:2: unknown key pool.imges: did you mean pool.images?",
        "hutch: hutch.yaml:3: listen must be an address and a port, such as 127.0.0.1:8080 or "
        '[::1]:8080, not "e[2J"',
    ]  # fmt: skip
    assert len(json.loads(run("config", "check", "--json", code=125)[0])["problems"]) == 2


def test_check_shows_where_each_value_came_from_and_no_secret(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "hutch.toml").write_text('api_key = "a-long-secret"\n[quotas]\nmemory = "16g"\n')
    (home / "hutch.toml").chmod(0o600)
    monkeypatch.setenv("HUTCH_MAX_SESSIONS", "7")
    out, said = run("config", "check")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert said == "" and "a-long-secret" not in out
    assert rows["api_key"] == ["*****", "hutch.toml:1"]
    assert rows["quotas.memory"] == ["16g", "hutch.toml:3"]
    assert rows["max_sessions"] == ["7", "HUTCH_MAX_SESSIONS"]
    assert rows["session_ttl_seconds"] == ["1800", "default"]
    found = json.loads(run("config", "check", "--json")[0])
    assert found["file"] == "hutch.toml" and found["notes"] == []
    assert found["settings"]["quotas.memory"] == {"value": "16g", "from": "hutch.toml:3"}


def test_check_names_images_that_are_not_built(home: Path) -> None:
    (home / "sandkasten.yaml").write_text("default_image: base\n")
    said = run("config", "check", code=1)[1]
    assert "there is no image 'base'" in said and "base is the default image" in said
    (home / "sandkasten.yaml").write_text("allowed_images: [base]\n")
    assert "default" not in run("config", "check")[1]


def test_a_server_that_others_can_reach_does_not_start_without_a_key() -> None:
    said = run("serve", "--listen", "0.0.0.0:0", code=125)[1]
    assert "can be reached from other machines, and there is no key" in said


def test_a_file_may_be_named_before_or_after_an_option(home: Path) -> None:
    (home / "a.toml").write_text("max_sessions = 7\n")
    for words in (["--json", "a.toml"], ["a.toml", "--json"]):
        assert json.loads(run("config", "check", *words)[0])["file"] == "a.toml"
