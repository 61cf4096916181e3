"""Settings: what is read, what is refused, and where each value is said to come from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hutch.cli.init import template
from hutch.errors import InvalidRequest
from hutch.factory import NAMES
from hutch.settings import FIELDS, SANDKASTEN_KEYS, Settings, variable_of
from hutch.settings.reading import NO_FILE, Loaded, examine, find_file, load
from hutch.settings.values import ListenAddress
from hutch.types import GiB, Limits, MiB

DATA = Path("/data")
SANDKASTEN = """\
listen: "127.0.0.1:9090"
api_key: "sk-0123456789abcdef"
data_dir: /srv/boxes
db_path: /srv/boxes/sandkasten.db
db_max_open_conns: 4
default_image: python
allowed_images: [host, python]
session_ttl_seconds: 600
playground_config_path: ""
defaults:
  cpu_limit: 1.5
  mem_limit_mb: 512
  pids_limit: 256
  max_exec_timeout_ms: 120000
  network_mode: none
  readonly_rootfs: true
  exec_mode: stateful
  shell_prefer: bash
pool:
  enabled: true
  images:
    python: 3
workspace:
  enabled: true
  persist_by_default: false
security:
  seccomp: off
dashboard:
  enabled: false
"""
Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o600)
        return path

    return write


def loaded(file: Path = NO_FILE, env: dict[str, str] | None = None, **options: str) -> Loaded:
    return load(DATA, options, file, env or {})


def problems(file: Path, env: dict[str, str] | None = None) -> list[str]:
    found, told = examine(DATA, {}, file, env or {})
    assert found is None
    return told


def test_without_anything_the_rules_are_those_that_are_built_in() -> None:
    settings = loaded().settings
    assert settings == Settings(DATA)
    assert settings.listen == ListenAddress("127.0.0.1", 8080) and settings.api_key is None
    assert settings.rules().default_limits == Limits()
    assert set(loaded().origins.values()) == {"default"}


def test_a_file_of_sandkastens_is_understood(write: Write) -> None:
    found = loaded(write("sandkasten.yaml", SANDKASTEN))
    rules = found.settings.rules()
    assert found.settings.data_dir == Path("/srv/boxes")
    assert rules.default_image == "python" and rules.allowed_images == ("host", "python")
    assert rules.default_limits == Limits(memory=512 * MiB, cpus=1.5, pids=256)
    assert (rules.default_ttl, rules.max_exec_timeout, rules.pool) == (600, 120, {"python": 3})


def test_what_means_nothing_here_is_said_to_mean_nothing(write: Write) -> None:
    notes = "\n".join(loaded(path := write("sandkasten.yaml", SANDKASTEN)).notes)
    assert f"{path}:4: db_path has no effect: the database is in data_dir" in notes
    assert (
        f"{path}:27: security.seccomp has no effect: the filter of system calls is always" in notes
    )
    assert "network_mode" not in notes and "readonly_rootfs" not in notes


@pytest.mark.parametrize("mode", ["bridge", "host", "full"])
def test_a_network_that_boxes_do_not_have_is_refused(write: Write, mode: str) -> None:
    path = write("hutch.yaml", f"defaults:\n  network_mode: {mode}\n")
    assert problems(path) == [
        f"{path}:2: defaults.network_mode: boxes have no network yet; remove the key, "
        "or set it to none"
    ]


def test_pool_sizes_can_come_from_the_environment() -> None:
    found = loaded(env={"HUTCH_POOL_IMAGES": "host=4, python=2"})
    assert found.settings.rules().pool == {"host": 4, "python": 2}
    assert found.origins["pool.images"] == "HUTCH_POOL_IMAGES"
    off = loaded(env={"HUTCH_POOL_IMAGES": "host=4", "HUTCH_POOL_ENABLED": "false"})
    assert off.settings.rules().pool == {}


def test_an_option_counts_more_than_a_variable_and_that_more_than_the_file(write: Write) -> None:
    path = write("hutch.toml", 'listen = "127.0.0.1:1"\ndrain_seconds = 1\nmax_sessions = 1\n')
    env = {"HUTCH_LISTEN": "127.0.0.1:2", "HUTCH_DRAIN_SECONDS": "2"}
    found = loaded(path, env, listen="127.0.0.1:3")
    assert found.settings.listen.port == 3 and found.origins["listen"] == "--listen"
    assert found.settings.drain_seconds == 2
    assert found.origins["drain_seconds"] == "HUTCH_DRAIN_SECONDS"
    assert found.settings.max_sessions == 1 and found.origins["max_sessions"] == f"{path}:3"
    assert found.origins["history_days"] == "default"


def test_keys_cannot_live_longer_by_default_than_they_may(write: Write) -> None:
    path = write("hutch.toml", '[keys]\ndefault_ttl = "60d"\nmax_ttl = "30d"\n')
    assert problems(path) == [f"{path}:2: keys.default_ttl: more than keys.max_ttl, 30d"]
    path = write("hutch.toml", "[keys]\nmax_ttl = 30\n")
    assert 'a time like "12h", "30d" or "52w"' in problems(path)[0]


def test_an_empty_variable_sets_nothing() -> None:
    assert loaded(env={"HUTCH_API_KEY": "", "HUTCH_LISTEN": ""}).settings == Settings(DATA)


@pytest.mark.parametrize("name", NAMES)
def test_a_server_can_have_each_backend_that_there_is(name: str) -> None:
    assert loaded(backend=name).settings.backend == name


@pytest.mark.parametrize("key", FIELDS)
def test_every_key_can_be_set_by_its_variable(key: str) -> None:
    samples = {
        "data_dir": "/srv/other", "listen": "[::1]:99", "api_key": "a-secret-key",
        "allowed_hosts": "a.example,b.example", "backend": "namespaces", "default_image": "python",
        "allowed_images": "host,python", "mounts": "/srv/a,/srv/b", "pool.enabled": "false",
        "pool.images": "host=1", "limits.max.memory": "9g", "limits.max.disk": "3g",
        "max_ttl_seconds": "5000", "limits.max.cpus": "7", "limits.max.pids": "700",
        "defaults.cpu_limit": "0.5", "relax": "network,user",
        "tls.cert": "/etc/cert.pem", "tls.key": "/etc/key.pem", "keys.default_ttl": "30d",
        "keys.max_ttl": "52w", "workspace.quota_mode": "kernel", "kubernetes.bundle": "copy",
        "kubernetes.volume_folder": "/mnt/hutch",
        "kubernetes.user_namespaces": "on",
        "dashboard.enabled": "false", "dashboard.edit_settings": "true",
    }  # fmt: skip
    value = samples.get(key, "300")
    others = {"HUTCH_TLS_CERT": "/c.pem", "HUTCH_TLS_KEY": "/k.pem"} if "tls" in key else {}
    settings = loaded(env={**others, variable_of(key): value}).settings
    name, kind = FIELDS[key].name, FIELDS[key].metadata["kind"]
    assert getattr(settings, name) == kind.read(value)
    assert kind.read(kind.show(getattr(settings, name))) == kind.read(value)
    settings.rules()


def test_sizes_have_units_as_people_write_them(write: Write) -> None:
    path = write("hutch.toml", '[quotas]\nmemory = "16g"\n[defaults]\nmem_limit_mb = "1.5g"\n')
    settings = loaded(path, {"HUTCH_JOURNAL_SIZE": "65536"}).settings
    assert settings.quotas_memory == 16 * GiB and settings.journal_size == 65536
    assert settings.rules().default_limits.memory == 1536 * MiB


def test_everything_that_is_wrong_is_told_with_its_line(write: Write) -> None:
    path = write("hutch.toml", "\n".join([
        'lissten = "127.0.0.1:1"',
        "mem_limit_mb = 512",
        "[pool]",
        "# a comment = here",
        "max_age_seconds = 0",
        'images = { "host" = "many" }',
        "[nothing.like.it]",
        "a = 1",
    ]))  # fmt: skip
    told = problems(path)
    assert f"{path}:1: unknown key lissten: did you mean listen?" in told
    assert f"{path}:2: unknown key mem_limit_mb: did you mean defaults.mem_limit_mb?" in told
    assert f"{path}:5: pool.max_age_seconds must be a number from 1 up, not 0" in told
    assert any(t.startswith(f"{path}:6: pool.images must be images, and how") for t in told)
    assert any(t.startswith(f"{path}:7: unknown section [nothing]; known:") for t in told)
    assert len(told) == 5
    with pytest.raises(InvalidRequest, match="and 4 more: see `hutch config check`"):
        loaded(path)


def test_a_wrong_value_of_a_variable_names_the_variable() -> None:
    told = problems(NO_FILE, {"HUTCH_POOL_IMAGES": "host"})
    assert told == [
        "HUTCH_POOL_IMAGES: pool.images must be images, and how many boxes of each: "
        'host=4,python=2, not "host"'
    ]


def test_a_variable_that_is_nearly_one_of_ours_is_noticed() -> None:
    notes = loaded(env={"HUTCH_POOL_IMAGE": "host=1", "HUTCH_URL": "x", "HUTCHES": "1"}).notes
    assert notes == ("HUTCH_POOL_IMAGE has no effect: did you mean HUTCH_POOL_IMAGES?",)


def test_a_variable_that_is_like_none_of_ours_gets_no_suggestion() -> None:
    assert loaded(env={"HUTCH_HOME": "/opt"}).notes == (
        "HUTCH_HOME has no effect: there is no such setting",
    )


def test_a_key_in_the_wrong_section_is_suggested_by_its_own_name(write: Write) -> None:
    path = write("hutch.toml", "[limits]\nlistn = '127.0.0.1:1'\n")
    assert problems(path) == [f"{path}:2: unknown key limits.listn: did you mean listen?"]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [("hutch.toml", "listen = \n", ":1: invalid TOML: Invalid value"),
     ("hutch.toml", "\n\nlisten\n", ":3: invalid TOML: "),
     ("hutch.yaml", "a: b\n c: d\n", ":2: invalid YAML: "),
     ("hutch.yaml", "- a\n- b\n", ":1: expected keys and values"),
     ("hutch.yaml", "pool:\n  enabled: true\npool:\n", ":3: pool was already set in line 1"),
     ("hutch.yaml", "pool: 7\n", ":1: pool is a section, not 7"),
     ("hutch.json", "{}", "must be named *.toml or *.yaml"),
     ("hutch.toml", "session_ttl_seconds = 10\nmax_ttl_seconds = 5\n",
      ":1: session_ttl_seconds: more than max_ttl_seconds, 5"),
     ("hutch.toml", 'allowed_images = ["host"]\npool.images = { data = 1 }\n',
      ":2: pool.images: data is not in allowed_images: host"),
     ("hutch.toml", "defaults.mem_limit_mb = 4\n", "memory must be at least 16 MiB"),
     ("hutch.toml", "limits.max.pids = 100\n", "defaults.pids_limit: more than limits.max.pids"),
     ("hutch.toml", 'backend = "kubernetes"\nworkspace.quota_mode = "kernel"\n',
      ":2: workspace.quota_mode: nodes do not see file systems that the server mounts"),
     ("hutch.toml", 'kubernetes.volume_claim = "a/b"\n', "the name of an object of a cluster"),
     ("hutch.toml", 'mounts = ["/"]\n', ":1: mounts: callers could mount anything"),
     ("hutch.toml", 'data_dir = "here"\n', 'the absolute path of a folder, not "here"'),
     ("hutch.toml", "max_sessions = true\n", "a whole number from 1 up, not true"),
     ("hutch.toml", "drain_seconds = nan\n", "a number from 0 up, not nan")],
)  # fmt: skip
def test_a_file_that_cannot_be_used_says_why(write: Write, name: str, text: str, says: str) -> None:
    told = problems(path := write(name, text))
    assert len(told) == 1 and says in told[0]
    assert str(path) in told[0] or "defaults.pids_limit" in told[0]


def test_an_empty_file_is_fine(write: Write) -> None:
    assert loaded(write("hutch.yaml", "# nothing\n")).settings == Settings(DATA)
    assert loaded(write("hutch.yaml", "pool:\n")).settings == Settings(DATA)


def test_a_file_that_is_named_and_not_there_is_an_error(tmp_path: Path) -> None:
    assert "No such file" in problems(tmp_path / "hutch.toml")[0]
    assert "No such file" in examine(DATA, env={"HUTCH_CONFIG": "/nowhere.toml"})[1][0]


def test_a_key_is_never_repeated_in_a_message(write: Write) -> None:
    path = write("hutch.toml", 'api_key = "se cret"\n')
    assert "se cret" not in problems(path)[0] and "not this value" in problems(path)[0]


def test_a_key_that_others_can_read_gives_a_warning(write: Write) -> None:
    path = write("hutch.toml", 'api_key = "0123456789"\n')
    assert loaded(path).notes == ()
    path.chmod(0o644)
    assert f"is readable by others: chmod 600 {path}" in loaded(path).notes[0]
    path.chmod(0o602)
    assert "is writable by all users" in loaded(path).notes[0]


def test_files_are_looked_for_from_here_to_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    own = tmp_path / "config/hutch/hutch.toml"
    own.parent.mkdir(parents=True)
    for path in (own, Path("sandkasten.yaml"), Path("hutch.yaml"), Path("hutch.toml")):
        path.write_text("")
        assert find_file(env) == path
    assert find_file(env | {"HUTCH_CONFIG": "/a.toml"}) == Path("/a.toml")


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [("127.0.0.1:80", "127.0.0.1", 80, True), ("127.9.9.9:0", "127.9.9.9", 0, True),
     ("localhost:80", "localhost", 80, True), ("[::1]:80", "::1", 80, True),
     (":80", "0.0.0.0", 80, False), ("0.0.0.0:80", "0.0.0.0", 80, False),
     ("[::]:80", "::", 80, False), ("example.org:80", "example.org", 80, False),
     ("localhost.example.org:80", "localhost.example.org", 80, False)],
)  # fmt: skip
def test_an_address_knows_who_can_reach_it(text: str, host: str, port: int, loopback: bool) -> None:
    found = loaded(listen=text).settings.listen
    assert (found.host, found.port, found.is_loopback) == (host, port, loopback)


@pytest.mark.parametrize(
    "text", ["80", "a:b", "127.0.0.1:65536", "::1:80", "[::1", "[x]:1", "a b:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--listen: listen must be an address and a port"):
        loaded(listen=text)


def test_the_commented_file_has_every_key_and_is_right_with_and_without_comments(
    write: Write,
) -> None:
    text = template({})
    assert loaded(write("hutch.toml", text)).settings == Settings(DATA)
    lines = [line[1:] if line[:1] == "#" and line[1:2] not in " #" else line
             for line in text.splitlines()]  # fmt: skip
    found = loaded(write("hutch.toml", "\n".join(lines)))
    assert all("hutch.toml" in place for place in found.origins.values())


def test_the_reference_explains_every_key() -> None:
    page = (Path(__file__).parent.parent / "docs/reference/config.md").read_text()
    for key, made in FIELDS.items():
        kind = made.metadata["kind"]
        shown = "" if key == "data_dir" else kind.show(getattr(Settings(DATA), made.name))
        assert f"| `{key}` | {f'`{shown}`' if shown else ''} | {made.metadata['about']} |" in page
    for key in SANDKASTEN_KEYS:
        assert f"`{key}`" in page


def test_variables_that_are_set_while_tests_run_are_known() -> None:
    examine(DATA, file=NO_FILE, env=dict(os.environ))


def test_mistakes_are_told_in_the_order_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "hutch.toml"
    path.write_text('listen = 1\nlistn = 2\n[pool]\nimages = "host"\nimges = 1\n')
    told = [p.removeprefix(f"{path}:") for p in examine(tmp_path, file=path, env={})[1]]
    assert [line[:2] for line in told] == ["1:", "2:", "4:", "5:"]
    assert told[2].endswith('of each: { host = 4, python = 2 }, not "host"')


def test_a_key_that_is_set_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hutch.toml"
    path.write_text("[quotas]\nsessions = 1\nrate = 2\nsessions = 3\n")
    told = examine(tmp_path, file=path, env={})[1]
    assert told == [f"{path}:4: quotas.sessions was already set in line 2"]


def test_a_variable_that_sets_nothing_is_told_and_those_of_other_parts_are_not() -> None:
    env = {"HUTCH_IDLE": "5", "HUTCH_URL": "x", "HUTCH_MUST_WORK": "all", "HUTCH_CONFIG": ""}
    loaded, _ = examine(Path("/nowhere"), file=NO_FILE, env=env)
    assert loaded and loaded.notes == (
        "HUTCH_IDLE has no effect: did you mean HUTCH_IDLE_SECONDS?",
    )


def test_a_certificate_and_its_key_are_given_both_or_not_at_all(write: Write) -> None:
    for given, missing in (("cert", "key"), ("key", "cert")):
        path = write("hutch.toml", f'[tls]\n{given} = "/etc/{given}.pem"\n')
        [told] = problems(path)
        assert f"tls.{given}: tls.{missing} is missing" in told
    found = loaded(**{"tls.cert": "/c.pem", "tls.key": "/k.pem"})
    assert found.origins["tls.cert"] == "--tls-cert"
