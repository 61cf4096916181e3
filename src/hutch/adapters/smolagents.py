"""smolagents: the code of a CodeAgent runs in a box.

    with CodeAgent(tools, model, executor=HutchExecutor()) as agent:
        agent.run("...")

As with every remote executor, tools are sent to the box as source. With `tools_on_host=True` they
stay in this process, with their keys and connections, and code in the box calls them here. Managed
agents always stay here.
"""

from __future__ import annotations

import copy
import inspect
import io
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import hutch
from hutch.client._sync import Sandbox
from hutch.errors import InvalidRequest
from hutch.types import CellResult, Execution

from . import checked, needs

with needs("smolagents"):
    import PIL.Image
    from smolagents import serialization
    from smolagents.local_python_executor import CodeOutput
    from smolagents.monitoring import AgentLogger, LogLevel
    from smolagents.remote_executors import RemotePythonExecutor
    from smolagents.tools import Tool, get_tools_definition_code
    from smolagents.utils import AgentError

__all__ = ["HutchExecutor"]

FINAL, CALL = "_hutch_final_answer", "_hutch_call_tool"  # functions that the box can call here
MAX_FINAL = 64 << 20  # characters of a final answer

# Runs in the box, after the source of smolagents' own serialization.
_BOX = '''
import sys

PIECE = 1 << 20


class FinalAnswerException(BaseException):
    """The cell ends here: its answer is with the host."""


def _host(name):
    return getattr(sys.modules["__main__"], name)


def finish(answer):
    text = SafeSerializer.dumps(answer, allow_pickle=ALLOW_PICKLE)
    for at in range(0, len(text), PIECE):
        _host("_hutch_final_answer")(text[at : at + PIECE], at == 0)
    raise FinalAnswerException()


class HostTool:
    """A tool that stays with the host."""

    def __init__(self, name):
        self.name = self.__name__ = name

    def __call__(self, *args, **kwargs):
        given = SafeSerializer.dumps([list(args), kwargs])
        return SafeSerializer.loads(_host("_hutch_call_tool")(self.name, given))
'''
_PRELUDE = """
import sys, types
_module = types.ModuleType("hutch_smolagents")
exec(compile({source!r}, "<hutch_smolagents>", "exec"), vars(_module))
sys.modules["hutch_smolagents"] = _module
del _module
"""
# Not with `import hutch_smolagents`: an import in a tool counts as a package to install.
_FORWARD = """\
    def forward(self, *args, **kwargs):
        import sys
        sys.modules["hutch_smolagents"].finish(self._forward(*args, **kwargs))
"""
_MISSING = """
import importlib.util as _util
[name for name in {names!r} if _util.find_spec(name) is None]
"""
_IMPORTED_AS = {
    "pillow": "PIL",
    "pil": "PIL",
    "scikit-learn": "sklearn",
    "opencv-python": "cv2",
    "beautifulsoup4": "bs4",
    "pyyaml": "yaml",
}


class HutchExecutor(RemotePythonExecutor):
    """Runs an agent's code in a box of its own, in one kept Python.

    `order` is what `Sandbox.create` takes (`image`, `memory`, `network`, …); `box`: an existing
    box, which is not closed here. Errors of the code are AgentError, which the model can correct;
    if the box is gone, BoxLost is raised. `timeout`: seconds for each step.
    """

    def __init__(
        self,
        additional_imports: Sequence[str] = (),
        logger: AgentLogger | None = None,
        allow_pickle: bool = False,
        *,
        box: Sandbox | None = None,
        tools_on_host: bool = False,
        timeout: float | None = None,
        **order: Any,
    ) -> None:
        super().__init__(list(additional_imports), logger or AgentLogger(), allow_pickle)
        checked(order, box)
        if not isinstance(box, Sandbox | None):
            raise InvalidRequest(f"a box is a Sandbox here, not {box!r}")
        self._owned = box is None
        self.box: Sandbox = hutch.Sandbox.create(**order) if box is None else box
        self._tools_on_host, self._timeout = tools_on_host, timeout
        self._tools: dict[str, Callable[..., Any]] = {}  # those that stay in this process
        self._defined: dict[str, str] = {}  # code that a fresh kernel must run again
        self._fresh = True
        self._final: list[str] = []
        self._turn = threading.Lock()  # all callers share the state of the box
        try:
            self.installed_packages = self.install_packages(list(additional_imports))
        except BaseException:
            self.cleanup()
            raise
        self.logger.log(f"Box {self.box.id} is running", level=LogLevel.INFO)

    def __repr__(self) -> str:
        return f"<HutchExecutor of {self.box.id}>"

    # --- code -------------------------------------------------------------------------

    def run_code_raise_errors(self, code: str) -> CodeOutput:
        with self._turn:
            if self._fresh:
                self._prepare()
            done = self._run(code)
        return self._output(done)

    def interrupt(self) -> bool:
        """Stop running code, and all it started; variables stay. False if no code was running."""
        return self.box.interrupt()

    def _prepare(self) -> None:
        """Define everything in a fresh kernel: the definitions of one that died are gone."""
        source = f"{inspect.getsource(serialization)}\nALLOW_PICKLE = {self.allow_pickle}\n{_BOX}"
        for code in (_PRELUDE.format(source=source), *self._defined.values()):
            self._run(code).check()
        self._fresh = False

    def _run(self, code: str) -> Execution:
        self._final = []
        functions: dict[str, Callable[..., Any]] = {
            FINAL: self._take_final,
            CALL: self._call_tool,
        }
        done = self.box.run_code(code, timeout=self._timeout, functions=functions)
        self._fresh = self._fresh or done.died is not None
        return done

    def _output(self, done: Execution) -> CodeOutput:
        logs = done.logs.stdout + done.logs.stderr
        if done.error is None and not done.timed_out:
            return CodeOutput(_value(done), logs, is_final_answer=False)
        if done.error is not None and done.error.name == self.FINAL_ANSWER_EXCEPTION:
            answer = self._deserialize_final_answer("".join(self._final), self.allow_pickle)
            return CodeOutput(answer, logs, is_final_answer=True)
        raise AgentError(f"{logs}\n{self._what_went_wrong(done)}".lstrip(), self.logger)

    def _what_went_wrong(self, done: Execution) -> str:
        if done.timed_out:
            left = "its variables are gone" if done.died else "its variables are kept"
            return f"The code was stopped after {self._timeout:g} seconds; {left}."
        assert done.error is not None
        reason = done.error.traceback or f"{done.error.name}: {done.error.value}"
        return f"Executing code yielded an error:\n{reason}"

    # --- tools ------------------------------------------------------------------------

    def send_tools(self, tools: Mapping[str, Any]) -> None:
        here = {name: tool for name, tool in tools.items() if self._stays(name, tool)}
        there = {name: tool for name, tool in tools.items() if name not in here}
        if "final_answer" in there:
            there["final_answer"] = _finishing(there["final_answer"])
        self._tools = here
        needed = {name for tool in there.values() for name in tool.to_dict()["requirements"]}
        needed -= {"smolagents", *self.installed_packages}
        self.installed_packages += self.install_packages(sorted(needed))
        if there:
            self._define("tools", get_tools_definition_code(there))
        if here:
            module = "sys.modules['hutch_smolagents']"
            lines = (f"{name} = {module}.HostTool({name!r})\n" for name in here)
            self._define("tools on the host", "".join(lines))

    def send_variables(self, variables: dict[str, Any]) -> None:
        if variables:
            text = serialization.SafeSerializer.dumps(variables, allow_pickle=self.allow_pickle)
            load = "sys.modules['hutch_smolagents'].SafeSerializer.loads"
            allow = f"allow_pickle={self.allow_pickle}"
            self._define("variables", f"globals().update({load}({text!r}, {allow}))")

    def _define(self, what: str, code: str) -> None:
        self._defined[what] = f"import sys\n{code}"
        self.run_code_raise_errors(self._defined[what])

    def _stays(self, name: str, tool: Any) -> bool:
        if not isinstance(tool, Tool):
            return True  # a managed agent has no source that could be sent
        return self._tools_on_host and name != "final_answer"

    def _take_final(self, piece: str, first: bool) -> None:
        if first:
            self._final = []
        if sum(map(len, self._final)) + len(piece) > MAX_FINAL:
            raise ValueError("this is too long for a final answer: write it to a file instead")
        self._final.append(piece)

    def _call_tool(self, name: str, given: str) -> str:
        if name not in self._tools:
            raise NameError(f"there is no tool {name!r}")
        args, kwargs = serialization.SafeSerializer.loads(given)
        value = self._tools[name](*args, **kwargs)
        text: str = serialization.SafeSerializer.dumps(value)
        return text

    # --- packages ---------------------------------------------------------------------

    def install_packages(self, additional_imports: list[str]) -> list[str]:
        """Install the packages that the box lacks; if it has all of them, no network is needed."""
        wanted = {name: _IMPORTED_AS.get(name.lower(), name) for name in additional_imports}
        names = [_module_of(name) for name in wanted.values() if name != "*"]
        if names:
            with self._turn:
                found = self._run(_MISSING.format(names=names)).check().text or "[]"
            missing = [name for name in wanted if repr(_module_of(wanted[name])) in found]
            if missing:
                named = " ".join("pillow" if name == "PIL" else name for name in missing)
                self.logger.log(self.run_code_raise_errors(f"%pip install {named}").logs)
        return additional_imports

    # --- the end ----------------------------------------------------------------------

    def cleanup(self) -> None:
        """Close the box, if it was created here."""
        if self._owned:
            self.box.close()

    def __enter__(self) -> HutchExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.cleanup()


def _finishing(tool: Tool) -> Tool:
    """The final-answer tool for the box: it sends its result to the host, and ends the cell."""
    given: Any = type(tool)

    class FinalAnswer(given):
        pass

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def original(self: Any, *args: Any, **kwargs: Any) -> Any:
        return given.forward(self, *args, **kwargs)

    source = getattr(given.forward, "__source__", None) or inspect.getsource(given.forward)
    source = textwrap.indent(textwrap.dedent(source), "    ")
    sources = {forward: _FORWARD, original: source.replace("def forward(", "def _forward(", 1)}
    for function, text in sources.items():
        vars(function)["__source__"] = text
    FinalAnswer.forward, FinalAnswer._forward = forward, original
    finishing = copy.copy(tool)
    finishing.__class__ = FinalAnswer
    return finishing


def _value(done: Execution) -> Any:
    """The value of the last expression: a picture as a picture, anything else as text."""
    main: CellResult | None = next((result for result in done.results if result.is_main), None)
    if main is None:
        return None
    forms: tuple[Literal["png", "jpeg"], ...] = ("png", "jpeg")
    for form in forms:
        if getattr(main, form) is not None:
            return PIL.Image.open(io.BytesIO(main.bytes_of(form)))
    return main.text


def _module_of(package: str) -> str:
    """The module of a requirement: `numpy` for `numpy>=2` and for `numpy.random`."""
    name = package.split(".")[0].replace("-", "_")
    return next((name[:at] for at, c in enumerate(name) if not (c.isalnum() or c == "_")), name)
