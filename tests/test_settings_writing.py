"""Settings are changed in their file: as a whole, checked, and without losing a comment."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path

import pytest

from hutch.errors import Conflict, InvalidRequest
from hutch.serving import Setting
from hutch.settings import FIELDS
from hutch.settings.reading import NO_FILE, load
from hutch.settings.writing import SettingsFile

TEXT = """\
# How our server is set up.
listen = "127.0.0.1:8080"   # behind a proxy
api_key = "a-secret-of-the-operator"
max_sessions = 10

[pool]
# Two are enough.
images = { host = 2 }

[limits.max]
memory = "4g"

[quotas]
"""
SECRET = "a-secret-of-the-operator"


class Place:
    def __init__(self, folder: Path, text: str | None = TEXT, name: str = "hutch.toml") -> None:
        self.file = folder / name
        self.data = folder / "data"
        if text is not None:
            self.file.write_text(text)

    def settings(
        self, env: dict[str, str] | None = None, options: dict[str, str] | None = None
    ) -> SettingsFile:
        env = {"HUTCH_CONFIG": str(self.file), **(env or {})}
        loaded = load(self.data, options, None, env) if self.file.exists() else None
        if loaded is None:
            env = {"XDG_CONFIG_HOME": str(self.file.parent.parent)}
            loaded = load(self.data, options, None, env)
        return SettingsFile(loaded, self.data, options, None, env)

    def read(self) -> str:
        return self.file.read_text()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path)


def of(settings: SettingsFile, key: str) -> Setting:
    return next(one for one in settings.report(True).settings if one.key == key)


def test_each_key_is_explained_with_its_value_and_where_it_is_from(place: Place) -> None:
    settings = place.settings({"HUTCH_POOL_ENABLED": "no"}, {"drain_seconds": "3"})
    report = settings.report(True)
    assert [one.key for one in report.settings] == list(FIELDS)
    assert all(one.about and one.allowed for one in report.settings)
    most = of(settings, "max_sessions")
    assert (most.value, most.origin, most.kind) == ("10", f"{place.file}:4", "number")
    memory = of(settings, "limits.max.memory")
    assert (memory.section, memory.value, memory.kind) == ("limits.max", "4g", "size")
    assert of(settings, "pool.images").value == "host=2"
    backend = of(settings, "backend")
    assert (backend.choices, backend.origin) == (("namespaces", "docker", "kubernetes"), "default")
    pool, drain = of(settings, "pool.enabled"), of(settings, "drain_seconds")
    assert (pool.origin, pool.fixed, pool.kind) == ("HUTCH_POOL_ENABLED", True, "truth")
    assert (drain.origin, drain.fixed) == ("--drain", True)
    assert not most.fixed and most.needs_restart and most.pending is None
    assert of(settings, "data_dir").value == str(place.data)


def test_a_secret_never_comes_out(place: Place) -> None:
    settings = place.settings()
    check = settings.check({"max_sessions": 20, "api_key": "another-secret-0123"})
    made = settings.change({"api_key": "another-secret-0123"}, check.digest)
    wrong = settings.check({"api_key": "short", "max_sessions": "x"})
    assert set(wrong.problems) == {"api_key", "max_sessions"}
    told = repr((settings.report(True), settings.report(False), check, made, wrong))
    assert SECRET not in told and "another-secret" not in told and "short" not in told
    assert of(settings, "api_key").value == of(settings, "api_key").pending == "(set)"
    assert '-api_key = "(set)"\n+api_key = "(another)"' in made.diff
    assert 'api_key = "another-secret-0123"' in place.read()


def test_a_change_is_shown_as_a_diff_before_it_is_made(place: Place) -> None:
    settings = place.settings()
    changes = {"max_sessions": "25", "pool.enabled": False, "limits.max.memory": None}
    check = settings.check(changes)
    assert check.problems == {} and place.read() == TEXT
    assert "-max_sessions = 10\n+max_sessions = 25\n" in check.diff
    assert '-memory = "4g"' in check.diff and "+enabled = false" in check.diff
    assert set(check.needs_restart) == set(changes)
    done = settings.change(changes, check.digest)
    assert done.diff == check.diff and done.digest != check.digest
    text = place.read()
    assert "# How our server" in text and "# behind a proxy" in text and "# Two are" in text
    values = tomllib.loads(text)
    assert values["max_sessions"] == 25
    assert values["pool"] == {"images": {"host": 2}, "enabled": False}
    assert "memory" not in values.get("limits", {}).get("max", {})
    most = of(settings, "max_sessions")
    assert (most.value, most.pending) == ("10", "25")  # after a restart
    assert place.settings().report(True).settings[list(FIELDS).index("max_sessions")].value == "25"


def test_every_setting_can_be_given_the_value_that_it_is_shown_with(place: Place) -> None:
    settings = place.settings()
    given = {one.key: one.value for one in settings.report(True).settings if not one.secret}
    check = settings.check(given)
    assert check.problems == {}, check.problems
    settings.change(given, check.digest)
    after = {one.key: one.value for one in place.settings().report(True).settings}
    assert {key: after[key] for key in given} == given


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("max_sessions", 0, "a whole number from 1 up, not 0"),
        ("max_sessions", 10**400, "a whole number"),
        ("max_sessions", "9" * 5000, "a whole number"),
        ("max_sessions", [1], "not this value"),
        ("max_sessions", {"a": 1}, "not this value"),
        ("max_sessions", True, "a whole number"),
        ("drain_seconds", "nan", "a number"),
        ("drain_seconds", 10**400, "a number"),
        ("listen", "here\nbackend = 1", "an address and a port"),
        ("backend", "magic", "docker or kubernetes"),
        ("mounts", ["relative"], "a list of absolute paths"),
        ("mounts", "/a\x00b", "a list"),
        ("pool.images", {"../x": 1}, "images, and how many"),
        ("pool.images", {"host": -1}, "images, and how many"),
        ("allowed_images", [["host"]], "a list of images"),
        ("pool.enabled", "perhaps", "true or false"),
        ("quotas.session", 1, "did you mean quotas.sessions?"),
        ("__proto__", 1, "unknown key"),
        ("pool", {"enabled": True}, "unknown key"),
        ("security.seccomp", "off", "unknown key"),
        ("x" * 100_000, 1, "unknown key"),
    ],
)
def test_a_wrong_change_is_a_problem_of_its_key(
    place: Place, key: str, value: object, said: str
) -> None:
    settings = place.settings()
    check = settings.check({key: value, "max_starts": 5})
    assert set(check.problems) == {key} and said in check.problems[key]
    assert len(check.problems[key]) < 5000 and check.diff == ""
    with pytest.raises(InvalidRequest, match=r"must be|unknown"):
        settings.change({key: value}, check.digest)
    assert place.read() == TEXT


def test_keys_that_contradict_each_other_are_found(place: Place) -> None:
    check = place.settings().check({"max_ttl_seconds": 60, "allowed_images": ["python"]})
    assert set(check.problems) == {"session_ttl_seconds", "pool.images"}
    assert "more than max_ttl_seconds" in check.problems["session_ttl_seconds"]


def test_a_key_that_a_variable_or_an_option_sets_is_not_changed_in_vain(place: Place) -> None:
    settings = place.settings({"HUTCH_MAX_SESSIONS": "7"}, {"drain_seconds": "3"})
    check = settings.check({"max_sessions": 9, "drain_seconds": 9})
    assert "HUTCH_MAX_SESSIONS, which takes precedence" in check.problems["max_sessions"]
    assert "--drain" in check.problems["drain_seconds"]


def test_what_someone_else_changed_meanwhile_is_not_overwritten(place: Place) -> None:
    settings = place.settings()
    check = settings.check({"max_sessions": 20})
    place.file.write_text(TEXT.replace("max_sessions = 10", "max_sessions = 11"))
    with pytest.raises(Conflict, match="has changed"):
        settings.change({"max_sessions": 20}, check.digest)
    assert "max_sessions = 11" in place.read()
    place.file.unlink()
    with pytest.raises(Conflict):
        settings.change({"max_sessions": 20}, check.digest)


def test_the_file_keeps_its_mode_and_its_link_and_nothing_lies_beside_it(place: Place) -> None:
    real = place.file.with_name("real.toml")
    place.file.rename(real)
    real.chmod(0o640)
    place.file.symlink_to(real)
    settings = place.settings()
    settings.change({"max_sessions": 20}, settings.check({}).digest)
    assert place.file.is_symlink() and "max_sessions = 20" in real.read_text()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert sorted(os.listdir(real.parent)) == ["hutch.toml", "real.toml"]


def test_a_file_that_cannot_be_written_stays_as_it_is(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = place.settings()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InvalidRequest, match=r"cannot write .*: No space left"):
        settings.change({"max_sessions": 20}, settings.check({}).digest)
    assert place.read() == TEXT and os.listdir(place.file.parent) == ["hutch.toml"]


def test_a_change_of_nothing_writes_nothing(place: Place) -> None:
    settings = place.settings()
    before = place.file.stat()
    check = settings.check({})
    assert (check.problems, check.diff) == ({}, "")
    assert settings.change({}, check.digest).digest == check.digest
    settings.change({"quotas.sessions": None}, check.digest)  # it was not there
    assert place.file.stat().st_ino == before.st_ino


def test_the_first_change_makes_the_users_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    settings = SettingsFile(load(tmp_path, None, None, env), tmp_path, None, None, env)
    report = settings.report(True)
    file = tmp_path / "config/hutch/hutch.toml"
    assert (report.file, report.digest, report.editable) == (str(file), "", True)
    check = settings.check({"pool.images": {"hutch/python:1": 2}, "limits.max.cpus": 2.5})
    settings.change({"pool.images": {"hutch/python:1": 2}, "limits.max.cpus": 2.5}, check.digest)
    assert tomllib.loads(file.read_text()) == {
        "pool": {"images": {"hutch/python:1": 2}},
        "limits": {"max": {"cpus": 2.5}},
    }
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert load(tmp_path, None, None, env).settings.limits_max_cpus == 2.5


@pytest.mark.parametrize(
    "text",
    [
        'listen = "127.0.0.1:1"\npool.enabled = true\npool.images = {host = 1}\n',
        'pool = { enabled = true }\n[quotas]\nsessions = 1\n[limits]\nmax = { cpus = 3 }\n',
        '[limits]\n[limits.max]\ncpus = 3\n[pool.images]\nhost = 1\n',
        "# nothing\n",
        "",
        '"max_sessions" = 3\n[ pool ]\n"enabled" = true\n',
        "[pool]\n[quotas]\n",
    ],
)  # fmt: skip
def test_however_a_file_is_written_the_values_are_right(place: Place, text: str) -> None:
    place.file.write_text(text)
    settings = place.settings()
    changes: dict[str, object] = {
        "max_sessions": 5, "pool.enabled": False, "pool.images": {"host": 3},
        "limits.max.cpus": 2, "quotas.sessions": 9, "default_image": "host",
    }  # fmt: skip
    settings.change(changes, settings.check(changes).digest)
    new = place.settings()
    shown = {key: of(new, key).value for key in changes}
    assert shown == {
        "max_sessions": "5", "pool.enabled": "false", "pool.images": "host=3",
        "limits.max.cpus": "2", "quotas.sessions": "9", "default_image": "host",
    }  # fmt: skip
    new.change(dict.fromkeys(changes), new.check({}).digest)
    assert all(of(place.settings(), key).origin == "default" for key in changes)


def test_a_file_that_is_broken_or_yaml_is_not_touched(place: Place, tmp_path: Path) -> None:
    settings = place.settings()
    place.file.write_text("listen = \n")
    with pytest.raises(InvalidRequest, match="invalid TOML"):
        settings.check({"max_sessions": 5})
    assert of(settings, "max_sessions").value == "10"  # what is in force can still be seen
    place.file.write_bytes(b"\xff")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        settings.report(True)
    place.file.write_bytes(b"#" * (2 << 20))
    with pytest.raises(InvalidRequest, match="more than"):
        settings.report(True)
    yaml = Place(tmp_path, "max_sessions: 3\n", "sandkasten.yaml").settings()
    report = yaml.report(True)
    assert not report.editable and "not TOML" in report.why_not
    assert of(yaml, "max_sessions").value == "3"
    with pytest.raises(InvalidRequest, match="not TOML"):
        yaml.check({"max_sessions": 5})


def test_a_server_without_a_file_has_settings_that_cannot_be_changed(tmp_path: Path) -> None:
    env = {"HUTCH_CONFIG": str(NO_FILE)}
    settings = SettingsFile(load(tmp_path, None, None, env), tmp_path, None, None, env)
    report = settings.report(True)
    assert (report.file, report.editable) == ("", False)
    with pytest.raises(InvalidRequest, match="no config file"):
        settings.check({"max_sessions": 5})


def test_from_elsewhere_settings_are_changed_only_if_the_operator_said_so(place: Place) -> None:
    settings = place.settings()
    assert settings.why_not(True) == ""
    assert "dashboard.edit_settings" in settings.why_not(False)
    assert not settings.report(False).editable and settings.report(True).editable
    place.file.write_text(TEXT + "[dashboard]\nedit_settings = true\n")
    assert "dashboard" in settings.why_not(False)  # not before a restart
    assert place.settings().why_not(False) == ""


def test_at_most_so_many_keys_are_changed_at_once(place: Place) -> None:
    with pytest.raises(InvalidRequest, match="at most 200"):
        place.settings().check({str(number): 1 for number in range(201)})
