"""Our skills for AnythingLLM: in node, by a stand-in for its loader, against a real server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon_of_tests import Daemon, wait_for
from hutch import Sandbox

FRAMEWORK = "AnythingLLM"
PACKAGE = ""
VERSION = "1.16"  # no package: the contract of its loader, as published then
PLUGGED = "agent skills python-sandbox-skill and hutch-skill"

SKILLS = Path(__file__).parents[2] / "integrations" / "anythingllm"

# What AnythingLLM does with a skill: its settings become `runtimeArgs`, the handler is called with
# a `this` that has them, and must answer with text.
LOADER = """
const path = require("node:path");
const [folder, conversation, calls] = process.argv.slice(1);
const config = require(path.join(folder, "plugin.json"));
const said = [];
const runtimeArgs = {};
for (const [name, setting] of Object.entries(config.setup_args)) {
  if (setting.required && !setting.value) continue;
  runtimeArgs[name] = setting.value || setting.default || null;
}
const skill = {
  super: conversation ? { handlerProps: { invocation: { uuid: conversation } } } : {},
  name: config.hubId, config, runtimeArgs, description: config.description,
  logger: () => {}, introspect: (text) => said.push(text), examples: config.examples,
  parameters: { type: "object", properties: config.entrypoint.params, additionalProperties: false },
  ...require(path.join(folder, config.entrypoint.file)).runtime,
};
(async () => {
  const answers = [];
  for (const args of JSON.parse(calls)) answers.push(await skill.handler(args));
  console.log(JSON.stringify({ answers, said }));
})();
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("anythingllm") / "data") as daemon:
        yield daemon


class Skill:
    """A skill as it is installed, with its settings filled in."""

    def __init__(self, name: str, folder: Path, **settings: str) -> None:
        self.folder = folder / name
        shutil.copytree(SKILLS / name, self.folder)
        config = json.loads((self.folder / "plugin.json").read_text())
        for key, value in settings.items():
            config["setup_args"][key]["value"] = value
        (self.folder / "plugin.json").write_text(json.dumps(config))
        self.said: list[str] = []

    def calls(self, *calls: dict[str, Any], conversation: str = "one") -> list[str]:
        done = subprocess.run(
            ["node", "-e", LOADER, "--", str(self.folder), conversation, json.dumps(calls)],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        self.said = told["said"]
        assert all(isinstance(answer, str) and answer for answer in told["answers"])
        answers: list[str] = told["answers"]
        return answers

    def begin(self, *calls: dict[str, Any]) -> subprocess.Popen[str]:
        argv = ["node", "-e", LOADER, "--", str(self.folder), "one", json.dumps(calls)]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)

    def __call__(self, **arguments: Any) -> str:
        return self.calls(arguments)[0]


@pytest.fixture
def projects(tmp_path: Path) -> Path:
    """A folder with one project in it, and something beside it."""
    shop = tmp_path / "projects" / "my shop"
    (shop / "src" / "deep").mkdir(parents=True)
    (shop / "main.py").write_text("print('hello from', __file__)\n")
    (shop / "src" / "deep" / ("long" * 30 + ".py")).write_text("x = 1\n")
    (shop / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (shop / "run.sh").chmod(0o755)
    (shop / "__pycache__").mkdir()
    (shop / "__pycache__" / "junk.pyc").write_text("")
    (tmp_path / "secret").write_text("mine\n")
    (shop / "link").symlink_to(tmp_path / "secret")
    return tmp_path / "projects"


@pytest.fixture
def python(server: Daemon, tmp_path: Path, projects: Path) -> Skill:
    key = server.key or ""
    folders = {"PROJECTS_FOLDER": str(projects)}
    skills = tmp_path / "skills"
    return Skill("python-sandbox-skill", skills, HUTCH_URL=server.url, HUTCH_API_KEY=key, **folders)


@pytest.fixture
def general(server: Daemon, tmp_path: Path) -> Skill:
    skills = tmp_path / "skills"
    return Skill("hutch-skill", skills, HUTCH_URL=server.url, HUTCH_API_KEY=server.key or "")


def live(server: Daemon, label: str) -> list[str]:
    found = Sandbox.list(label=label, url=server.url, api_key=server.key)
    return [info.id for info in found]


@pytest.mark.parametrize("name", ["python-sandbox-skill", "hutch-skill"])
def test_a_manifest_is_as_anythingllm_wants_it(name: str) -> None:
    manifest = json.loads((SKILLS / name / "plugin.json").read_text())
    assert (manifest["active"], manifest["imported"]) == (True, True)
    assert (manifest["hubId"], manifest["schema"]) == (name, "skill-1.0.0")
    assert all(isinstance(manifest[key], str) for key in ("name", "version", "description"))
    assert set(manifest["entrypoint"]) == {"file", "params"}
    assert (SKILLS / name / manifest["entrypoint"]["file"]).is_file()
    for parameter in manifest["entrypoint"]["params"].values():
        assert set(parameter) == {"description", "type"}
        assert parameter["type"] in ("string", "number", "boolean")
    for setting in manifest["setup_args"].values():
        assert set(setting) <= {"type", "required", "input", "value"}
        assert set(setting["input"]) <= {"type", "default", "placeholder", "hint"}
    for example in manifest["examples"]:
        call = json.loads(example["call"])
        assert set(example) == {"prompt", "call"} and set(call) <= set(
            manifest["entrypoint"]["params"]
        )


def test_both_skills_have_the_same_client_and_start_nothing_on_the_host() -> None:
    copies = [(SKILLS / name / "hutch.js").read_text() for name in SKILL_NAMES]
    assert copies[0] == copies[1]
    for script in SKILLS.rglob("*.js"):
        wanted = set(re.findall(r'require\("([^"]+)"\)', script.read_text()))
        ours = {"./hutch.js", "./project.js"}
        assert wanted <= ours | {"node:crypto", "node:fs", "node:path", "node:stream"}


SKILL_NAMES = ("python-sandbox-skill", "hutch-skill")


def test_a_command_runs_in_a_copy_of_the_project_and_the_box_is_gone_after(
    python: Skill, projects: Path, server: Daemon
) -> None:
    shop = projects / "my shop"
    command = "python main.py && ./run.sh && find . -name 'long*' | wc -l && rm main.py && ls -a"
    answer = python(projectPath=str(shop), command=command)
    assert answer.splitlines()[:3] == ["hello from /workspace/main.py", "ran", "1"]
    assert "__pycache__" not in answer  # left out
    assert (shop / "main.py").exists()  # a copy
    assert any("Running:" in line for line in python.said)
    assert not live(server, "anythingllm.skill=python-sandbox-skill")


def test_a_link_of_the_project_shows_the_box_nothing_of_the_host(
    python: Skill, projects: Path
) -> None:
    answer = python(projectPath=str(projects / "my shop"), command="cat link")
    assert "mine" not in answer and answer.startswith("Failed with exit code 1:")


def test_nothing_of_a_command_is_read_by_a_shell_of_the_host(
    python: Skill, projects: Path, tmp_path: Path
) -> None:
    owned = tmp_path / "owned"
    command = f"echo \"$(touch {owned} 2>/dev/null; echo '`id -u`')\""
    assert python(projectPath=str(projects / "my shop"), command=command) == "`id -u`\n"
    assert not owned.exists()


def test_a_timeout_stops_the_command_and_says_so(python: Skill, projects: Path) -> None:
    shop = str(projects / "my shop")
    answer = python(projectPath=shop, command="echo begun; sleep 600", timeout="1")
    assert (
        answer
        == "Stopped after 1 s, with everything it had started. Its output until then:\nbegun\n"
    )


def test_results_come_back_when_asked_for_and_only_into_the_project(
    python: Skill, projects: Path, tmp_path: Path
) -> None:
    shop = projects / "my shop"
    (shop / "out").symlink_to(tmp_path)  # a link of the project's own is not written through
    command = (
        "mkdir -p dist/a; echo 1 > dist/a/one; echo 2 > 'dist/two words'; ln -s /etc dist/etc;"
        "rm -f out; mkdir -p out .git/hooks; echo x > out/x; echo x > .git/hooks/post-commit"
    )
    wanted = "dist, ../secret, /etc/passwd, out/x, .git/hooks/post-commit, nothing"
    answer = python(projectPath=str(shop), command=command, copyBack=wanted)
    assert "Copied back into the project: dist/a/one, dist/two words" in answer
    assert (shop / "dist" / "a" / "one").read_text() == "1\n"
    assert not (shop / "dist" / "etc").exists() and not (tmp_path / "x").exists()
    assert not (shop / ".git").exists()
    assert answer.count("Note: not copied back: ") == 5
    assert (tmp_path / "secret").read_text() == "mine\n"
    assert not list(projects.rglob(".hutch-*"))


def test_a_persistent_box_is_the_projects_own_and_sees_what_changes_in_it(
    python: Skill, projects: Path, server: Daemon
) -> None:
    shop, other = projects / "my shop", projects / "other"
    other.mkdir()
    (other / "main.py").write_text("")
    kept = {"mode": "persistent", "projectPath": str(shop)}
    first = {**kept, "command": "export NAME=kept; echo mine > made; echo changed > run.sh"}
    assert python(**first) == "(no output; exit code 0)"

    (shop / "main.py").write_text("print('new')\n")
    (shop / "src" / "deep" / ("long" * 30 + ".py")).unlink()
    command = "echo $NAME; cat made run.sh; python3 main.py; ls src/deep | wc -l"
    assert python(**kept, command=command) == "kept\nmine\nchanged\nnew\n0\n"

    elsewhere = python(mode="persistent", projectPath=str(other), command="ls; echo $NAME")
    assert elsewhere == "main.py\n\n"

    (again,) = python.calls({**kept, "command": "ls made", "reset": True})
    assert again.startswith("Failed with exit code")
    for project in (shop, other):
        assert "was removed" in python(projectPath=str(project), reset=True)
    assert not live(server, "anythingllm.project")


def test_requirements_that_a_key_may_not_install_are_told_of_and_the_command_runs(
    server: Daemon, tmp_path: Path, projects: Path
) -> None:
    made = server.hutch("key", "create", "--owner", "llm")
    key = next(word for word in made.stdout.split() if word.startswith("hutch_"))
    told = {"HUTCH_URL": server.url, "HUTCH_API_KEY": key, "PROJECTS_FOLDER": str(projects)}
    skill = Skill("python-sandbox-skill", tmp_path / "skills", **told)
    needs = "six==1.17.0  # old\n-r other.txt\ngit+https://example.com/x\n"
    (projects / "my shop" / "requirements.txt").write_text(needs)
    answer = skill(projectPath=str(projects / "my shop"), command="echo ran")
    assert answer.startswith("ran\n")
    assert "requirements.txt was not installed" in answer and "hutch image build" in answer
    assert "names and versions only: -r other.txt, git+https://example.com/x" in answer


def test_a_list_that_the_box_has_rewritten_is_not_believed(python: Skill, projects: Path) -> None:
    kept = {"mode": "persistent", "projectPath": str(projects / "my shop")}
    lists = [
        "[1, 2]", "None", "{'../../etc/passwd': ['file', 1, 1, 1], '/etc/passwd': ['file']}",
        "{'__proto__': ['file'], 'main.py': {'toString': 1}, 'a': [[1]], 'b': 7}",
        "{f'x{n}': ['file', 1, 1, 1] for n in range(200_000)}", "'x' * (17 << 20)",
    ]  # fmt: skip
    write = "import json; json.dump({}, open('/tmp/.anythingllm-project.json', 'w'))"
    calls = [{**kept, "command": f'python3 -c "{write.replace("{}", each)}"'} for each in lists]
    seen = {**kept, "command": "python3 main.py; test -s /etc/passwd && echo there"}
    *done, last = python.calls(*calls, seen)
    assert done == ["(no output; exit code 0)"] * len(lists)
    assert last == "hello from /workspace/main.py\nthere\n"

    many = write.replace("{}", "{f'x{n}': ['file', 1, 1, 1] for n in range(600)}")
    after = {**kept, "command": "true"}
    noted = python.calls(
        {**kept, "command": f'python3 -c "{many}"'}, after, {**kept, "reset": True}
    )
    assert "of 600 files that the project no longer has" in noted[1]


def test_copying_a_project_has_an_end(python: Skill, projects: Path, server: Daemon) -> None:
    script = python.folder / "handler.js"
    script.write_text(f"let now = 0; Date.now = () => (now += 700000);\n{script.read_text()}")
    answer = python(projectPath=str(projects / "my shop"), command="true")
    assert answer.startswith("Copying the project took more than 600 s")
    assert not live(server, "anythingllm.skill=python-sandbox-skill")


def test_names_that_cannot_be_read_are_left_out_and_told_of(python: Skill, projects: Path) -> None:
    shop = projects / "my shop"
    Path(os.fsdecode(bytes(shop) + b"/not-\xff-utf8")).write_text("x")
    for name in ("__proto__", "toString"):
        (shop / name).write_text(f"{name}\n")
    answer = python(projectPath=str(shop), command="cat __proto__ toString")
    assert answer.startswith("__proto__\ntoString\n")
    assert "Note: not copied into the box, because they could not be read: not-" in answer


def of_project(script: str, *words: str) -> Any:
    """What project.js makes of something."""
    module = json.dumps(str(SKILLS / "python-sandbox-skill" / "project.js"))
    code = f"const project = require({module}); const words = process.argv.slice(1);\n{script}"
    argv = ["node", "-e", code, "--", *words]
    return json.loads(subprocess.run(argv, capture_output=True, timeout=60, check=True).stdout)


def test_a_file_that_vanishes_while_it_is_copied_is_left_out(projects: Path) -> None:
    script = """
(async () => {
  const tree = project.scan(words[0], () => {}), skipped = [], names = Object.keys(tree);
  require("node:fs").unlinkSync(`${words[0]}/main.py`);
  let size = 0;
  for await (const piece of project.tar(words[0], tree, names, (name) => skipped.push(name)))
    size += piece.length;
  console.log(JSON.stringify([skipped, size % 512]));
})();"""
    assert of_project(script, str(projects / "my shop")) == [["main.py"], 0]


def test_a_project_may_have_any_name_and_nothing_is_copied_into_git(projects: Path) -> None:
    (projects / "..shop").mkdir()
    locate = "console.log(JSON.stringify(project.locate(...words)))"
    assert of_project(locate, str(projects / "..shop"), str(projects)) == str(projects / "..shop")
    bad = [".git", ".GIT/x", ".git ", ".git./x", "a/git~1/x", ".g\u200cit/config", ".git\ufeff",
           ".git::$INDEX_ALLOCATION/x", ".\uff47it", "../x", "/x", ".", "a\\b"]  # fmt: skip
    good = [".gitignore", ".github/a", "git", "digit~1", "..."]
    script = """
const refused = (name) => { try { project.parts(name); return false; } catch { return true; } };
console.log(JSON.stringify(words.filter(refused)))"""
    assert of_project(script, *bad, *good) == bad


def test_what_cannot_be_done_is_told_as_text(python: Skill, projects: Path, tmp_path: Path) -> None:
    shop = str(projects / "my shop")
    assert "must be inside" in python(projectPath=str(tmp_path), command="ls")
    (projects / "way-out").symlink_to(tmp_path)
    assert "must be inside" in python(projectPath=str(projects / "way-out"), command="ls")
    assert "absolute path" in python(projectPath="shop", command="ls")
    assert "no folder" in python(projectPath=f"{shop}/nothing", command="ls")
    assert "command is missing" in python(projectPath=shop)
    assert 'not "forever"' in python(projectPath=shop, command="ls", mode="forever")
    assert "timeout is a number" in python(projectPath=shop, command="ls", timeout="soon")


def test_a_skill_without_its_settings_says_which_to_set(tmp_path: Path, server: Daemon) -> None:
    none = Skill("python-sandbox-skill", tmp_path / "a")
    assert "PROJECTS_FOLDER" in none(projectPath="/tmp", command="ls")
    nowhere = Skill("hutch-skill", tmp_path / "b", HUTCH_URL="http://127.0.0.1:9")
    assert "cannot be reached" in nowhere(action="run", command="ls")
    keyless = Skill("hutch-skill", tmp_path / "c", HUTCH_URL=server.url)
    assert "HUTCH_API_KEY" in keyless(action="run", command="ls")


def test_a_conversation_keeps_its_shell_its_python_and_its_files(general: Skill) -> None:
    answers = general.calls(
        {"action": "run", "command": "cd /tmp; export A=1"},
        {"action": "run", "command": "echo $PWD $A; exit 3"},
        {"action": "python", "code": "x = 20"},
        {"action": "python", "code": "print('hi'); x + 1"},
        {"action": "python", "code": "1/0"},
        {"action": "write", "path": "a b.txt", "content": "one\ntwo\nthree\n"},
        {"action": "edit", "path": "a b.txt", "oldText": "two", "newText": "2"},
        {"action": "read", "path": "a b.txt", "offset": 1, "limit": 1},
        {"action": "ls"},
        {"action": "search", "pattern": "thr.e"},
        {"action": "delete", "path": "a b.txt"},
        {"action": "read", "path": "a b.txt"},
        {"action": "run", "command": "sleep 600", "timeout": 1},
    )
    assert answers[0] == "(no output; exit code 0)"
    assert answers[1] == "Failed with exit code 3:\n/tmp 1\n"
    assert answers[3] == "hi\n\n21"
    assert "ZeroDivisionError" in answers[4]
    assert answers[7] == "2\t2\n[1 more lines: read again with offset=2]"
    assert answers[8] == "a b.txt 12"
    assert answers[9] == "/workspace/a b.txt:3:three"
    assert "Deleted" in answers[10] and "No such file" in answers[11]
    assert answers[12].startswith("Stopped after 1 s")
    (reset,) = general.calls({"action": "reset"})
    assert "was removed" in reset


def begun(server: Daemon, general: Skill) -> tuple[subprocess.Popen[str], Sandbox]:
    """A conversation in whose box a command runs that has no end."""
    running = general.begin({"action": "run", "command": "sleep 98765", "timeout": 600})
    label = "anythingllm.conversation=one"
    assert wait_for(lambda: live(server, label))
    box = Sandbox.connect(live(server, label)[0], url=server.url, api_key=server.key)
    assert wait_for(lambda: sleeps(box))
    return running, box


def sleeps(box: Sandbox) -> bool:
    return box.commands.run("grep -laz '9876[5]' /proc/[0-9]*/cmdline").exit_code == 0


def test_when_anythingllm_dies_its_command_is_stopped(server: Daemon, general: Skill) -> None:
    running, box = begun(server, general)
    running.kill()
    running.communicate()
    assert wait_for(lambda: not sleeps(box))
    general.calls({"action": "reset"})


def test_a_box_that_dies_is_not_a_command_that_failed(server: Daemon, general: Skill) -> None:
    running, box = begun(server, general)
    box.close()
    said, _ = running.communicate(timeout=60)
    (answer,) = json.loads(said)["answers"]
    assert answer.startswith("Hutch: ") and "exit code" not in answer


def test_conversations_have_boxes_of_their_own(general: Skill, server: Daemon) -> None:
    general.calls({"action": "run", "command": "echo a > mine"}, conversation="a")
    (seen,) = general.calls({"action": "run", "command": "cat mine"}, conversation="b")
    assert seen.startswith("Failed with exit code 1")
    general.calls({"action": "run", "command": "true"}, {"action": "reset"}, conversation="")
    assert len(live(server, "anythingllm.conversation")) == 2
    for each in "ab":
        general.calls({"action": "reset"}, conversation=each)
    assert not live(server, "anythingllm.conversation")


def test_a_general_skill_says_what_is_missing(general: Skill) -> None:
    unknown, missing = general.calls({"action": "format"}, {"action": "read"})
    assert unknown.startswith("action is one of run, python, read") and "path is missing" in missing
    general.calls({"action": "reset"})


def test_long_output_is_shortened_and_says_so(general: Skill) -> None:
    (answer, _) = general.calls({"action": "run", "command": "seq 20000"}, {"action": "reset"})
    assert answer.startswith("1\n2\n") and answer.endswith("20000\n")
    assert "characters are left out here" in answer and len(answer) < 21000
