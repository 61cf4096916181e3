"""mini-swe-agent: `environment_class: hutch.adapters.minisweagent.HutchEnvironment`."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import hutch
from hutch.client._sync import Sandbox
from hutch.errors import BoxLost, CallerError

from . import needs, order_of

with needs("mini-swe-agent"):
    from minisweagent.exceptions import Submitted
    from minisweagent.utils.serialize import recursive_merge
    from pydantic import BaseModel

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
# One pipe for both streams: two would not preserve the order of the output.
IN_ORDER = ("sh", "-c", 'exec "$@" 2>&1', "sh")
UNAME = ("system", "node", "release", "version", "machine")


class HutchEnvironmentConfig(BaseModel):
    """The options of the box, as `Sandbox.create` takes them, and of the commands in it."""

    image: str | None = None
    memory: int | str = "1g"
    cpus: float = 2.0
    pids: int = 512
    disk: int | str | None = None
    user: str = "user"
    env: dict[str, str] = {}
    workspace: str | None = None  # a folder of this machine, mounted at /workspace
    backend: str | None = None
    url: str | None = None
    idle: float | None = 3600  # seconds without a command; then the box ends by itself
    cwd: str = "/workspace"
    timeout: int = 30
    interpreter: list[str] = ["bash", "-lc"]


class HutchEnvironment:
    """One box for one run of the agent. It ends with `close`, or with the process."""

    def __init__(self, **config: Any) -> None:
        self.config = HutchEnvironmentConfig(**config)

    @cached_property
    def box(self) -> Sandbox:
        """The box; created when it is first needed."""
        return hutch.Sandbox.create(**order_of(self.config, "cwd", "timeout", "interpreter"))

    def execute(
        self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None
    ) -> dict[str, Any]:
        """Run a command. Returns what the agent's templates expect.

        Raises Submitted after the final command, and BoxLost, which ends the run, if the box is
        gone.
        """
        seconds = timeout or self.config.timeout
        try:
            result = self.box.commands.run(
                [*IN_ORDER, *self.config.interpreter, action.get("command", "")],
                cwd=cwd or self.config.cwd,
                timeout=seconds,
            )
        except CallerError as exc:
            return {"output": "", "returncode": -1, "exception_info": str(exc)}
        if result.timed_out:
            why = f"the command was killed after {seconds} seconds, with all it had started"
            return {"output": result.output, "returncode": -1, "exception_info": why}
        output = {"output": result.output, "returncode": result.exit_code, "exception_info": ""}
        self._check_finished(result.output, result.exit_code)
        return output

    def _check_finished(self, output: str, code: int) -> None:
        first, _, rest = output.lstrip().partition("\n")
        if first.strip() == SUBMIT and code == 0:
            extra = {"exit_status": "Submitted", "submission": rest}
            raise Submitted({"role": "exit", "content": rest, "extra": extra})

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """The config, and the system of the box, which is not the one that the agent runs on."""
        merged: dict[str, Any] = recursive_merge(self.config.model_dump(), self._system, kwargs)
        return merged

    @cached_property
    def _system(self) -> dict[str, str]:
        uname = self.box.commands.run("for flag in s n r v m; do uname -$flag; done", check=True)
        return dict(zip(UNAME, uname.stdout.splitlines(), strict=True))

    def serialize(self) -> dict[str, Any]:
        kind = f"{type(self).__module__}.{type(self).__name__}"
        config = {"environment": self.config.model_dump(mode="json"), "environment_type": kind}
        return {"info": {"config": config}}

    def close(self) -> None:
        if "box" in self.__dict__:
            try:
                self.box.close()
            except BoxLost:
                pass

    def __enter__(self) -> HutchEnvironment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
