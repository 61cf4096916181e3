"""A program cannot rewrite the process that reports how it ended."""

from __future__ import annotations

import pytest

from hutch.guest.shell import only_exports

from .hosts import LAST_WORDS, LAST_WORDS_FILE, FarThing

# Makes the builtin `false` of the bash that started us return 0: writes machine code over it,
# which the kernel allows, also in read-only pages, to a process that may open /proc/PID/mem.
PATCH_BASH = r"""
import os, platform, struct, sys
parent = int(sys.argv[1])
return_0 = {"x86_64": "31c0c3", "aarch64": "00008052c0035fd6"}[platform.machine()]
elf = open("/bin/bash", "rb").read()
(table,), (size, count) = struct.unpack_from("=Q", elf, 40), struct.unpack_from("=HH", elf, 58)
sections = [struct.unpack_from("=IIQQQQIIQQ", elf, table + size * n) for n in range(count)]
symbols = next(s for s in sections if s[1] == 11)
names = sections[symbols[6]][4]
for at in range(symbols[4], symbols[4] + symbols[5], 24):
    name, _, _, _, address, _ = struct.unpack_from("=IBBHQQ", elf, at)
    if elf[names + name :].startswith(b"false_builtin\0"):
        break
else:
    sys.exit("no false_builtin in this bash")
try:
    base = int(open(f"/proc/{parent}/maps").readline().partition("-")[0], 16)
    with open(f"/proc/{parent}/mem", "r+b", buffering=0) as memory:
        memory.seek(base + address)
        memory.write(bytes.fromhex(return_0))
except OSError as exc:
    sys.exit(f"refused: {exc.strerror}")
print("written")
"""

# Every way to a process's memory or descriptors that /proc has.
REACH = r"""
import os, sys
pid, found = int(sys.argv[1]), []
for name, flags in {"mem": os.O_RDWR, "maps": os.O_RDONLY, "environ": os.O_RDONLY}.items():
    try:
        os.close(os.open(f"/proc/{pid}/{name}", flags))
        found.append(name)
    except OSError:
        pass
try:
    found += [f"fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
except OSError:
    pass
print(*found)
"""


def test_a_child_of_a_shell_cannot_make_false_return_0(box: FarThing) -> None:
    box.files.write("/tmp/patch.py", PATCH_BASH)
    tried = box.shell.run("python3 /tmp/patch.py $$")
    assert "refused" in tried.stderr, tried.output
    assert box.shell.run("false").exit_code == 1


def test_a_sibling_of_a_shell_cannot_reach_its_memory_or_descriptors(box: FarThing) -> None:
    pid = int(box.shell.run("echo $$").stdout)
    box.files.write("/tmp/reach.py", REACH)
    assert box.commands.run(f"python3 /tmp/reach.py {pid}").stdout == "\n"


@pytest.mark.parametrize("start", ["exit", "kill -9 $$"])
def test_the_successor_of_a_shell_is_closed_to_children_too(box: FarThing, start: str) -> None:
    box.files.write("/tmp/reach.py", REACH)
    box.shell.run(start)
    assert box.shell.run("python3 /tmp/reach.py $$").stdout == "\n"


LAST_WORDS_OF_A_CHILD = """
import os, signal, sys
with open(sys.argv[1], "wb") as file:
    file.write(b"{start}/tmp\\0false() {{ return 0; }}\\nexport FORGED='1'\\n")
os.kill(os.getppid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("start", ["", "0123456789abcdef\\\\0"], ids=["no token", "a token"])
def test_a_child_cannot_write_the_last_words_of_its_shell(box: FarThing, start: str) -> None:
    code = LAST_WORDS_OF_A_CHILD.format(start=start.replace("\\\\", "\\"))
    box.files.write("/tmp/words.py", code)
    assert box.shell.run(f"python3 /tmp/words.py {LAST_WORDS_FILE}").exit_code == 137
    result = box.shell.run("pwd; echo [$FORGED]; false")
    assert (result.exit_code, result.stdout) == (1, "/workspace\n[]\n")


# Where the shell's state is more than a pipe holds, the shell waits for the reader, and
# until then the reader has the token and can put a file of its own in the pipe's place.
PIPE_OF_A_CHILD = f"""
import os
path = "{LAST_WORDS}/shell-main"
os.mkfifo(path)
print("ready", flush=True)
with open(path, "rb", buffering=0) as pipe:
    token = pipe.read(16)
    os.unlink(path)
    with open(path, "wb") as file:
        file.write(token + b"\\0/tmp\\0export FORGED='1'\\n")
    while pipe.read(65536):
        pass
"""


def test_a_child_cannot_wait_for_the_last_words_of_its_shell(box: FarThing) -> None:
    box.files.write("/tmp/pipe.py", PIPE_OF_A_CHILD)
    box.shell.run(
        "python3 /tmp/pipe.py >/tmp/said 2>&1 & until [ -s /tmp/said ]; do sleep 0.05; done"
    )
    assert box.files.read("/tmp/said") == "ready\n"
    command = "export BIG=$(head -c 300000 /dev/zero | tr '\\0' x); exit 3"
    assert box.shell.run(command, timeout=30).exit_code == 3
    assert box.shell.run("echo $PWD [$FORGED] ${#BIG}").stdout == "/workspace [] 300000\n"


@pytest.mark.parametrize(
    "text",
    [
        "false() { return 0; }\n",
        "enable -n false\n",
        'declare -x A="$(id)"\n',
        'declare -x A="`id`"\n',
        "declare -x A=$(id)\n",
        'declare -x A="1"; id\n',
        'declare -x A="1" B=$(id)\n',
        'declare -ix A="b[\\$(id)]"\n',
        'declare -nx A="B"\n',
        'declare -x __hutch_last="0"\n',
        'declare -x BASH_FUNC_false%%="() { return 0; }"\n',
        "export A='it'$(id)'s'\n",
    ],
)
def test_last_words_of_a_shell_are_variables_and_nothing_else(text: str) -> None:
    kept = 'declare -x SHLVL="1"\n'
    assert only_exports(text) == ""
    assert only_exports(kept + text + kept) == kept * 2


ODD = 'it\'s "q" $x `y` \\ \n tab\t \x01 ünï'


def test_every_value_of_a_variable_survives_an_exit(box: FarThing) -> None:
    box.files.write("/tmp/odd", ODD)
    box.shell.run("export ODD=$(cat /tmp/odd) EMPTY= UNSET; declare -ix NUMBER=-5; cd /tmp; exit 3")
    assert box.shell.run('printf %s "$ODD"').stdout == ODD
    result = box.shell.run("printf '%s ' $PWD ${EMPTY-unset} ${UNSET-unset} $NUMBER")
    assert result.stdout == "/tmp unset -5 "


def test_a_shell_can_still_look_at_itself(box: FarThing) -> None:
    command = (
        "while read -r line; do echo $line; done < <(echo one); source <(echo echo two); "
        "cat <(echo three); cat < /dev/stdin <<< four; echo five > /dev/stdout; "
        "read -r name < /proc/self/status; echo ${name%%:*}; ps -o args= -p $$; echo $0 $BASH"
    )
    result = box.shell.run(command)
    shell = "/bin/bash"
    expected = ["one", "two", "three", "four", "five", "Name", f"{shell} --norc --noprofile"]
    assert result.stdout.splitlines() == [*expected, f"{shell} {shell}"], result.output
