"""Prompts for common tasks, worded to make good use of a box."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcp import types
from mcp.shared.exceptions import MCPError

from .catalog import sayable


@dataclass(frozen=True)
class Prompt:
    title: str
    description: str
    text: str  # with {arguments} in it
    arguments: Mapping[str, tuple[str, str | None]]  # name -> meaning, and default if optional


PROMPTS = {
    "solve": Prompt(
        "Solve it in a box",
        "Do a task by writing and running code, and prove that it works",
        "{task}\n\nWork in the box: write the code there, run it, and check the outcome with a "
        "test that could fail. Nothing in the box can harm this machine, so try things out rather "
        "than guess. There is no network in it. At the end, say what you did, what you ran to "
        "check it, and which files hold the result.",
        {"task": ("What is to be done", None)},
    ),
    "fix_tests": Prompt(
        "Make the tests pass",
        "Run a project's tests, find out why some fail, and repair the code",
        "In {folder} of the box is a project. Find out how its tests are run, and run them. For "
        "each that fails, find the cause in the code and repair it there; change a test only if it "
        "is wrong itself, and say why. Run all of them again at the end, and report what failed, "
        "the cause, and the change.",
        {"folder": ("Where the project is", "/workspace")},
    ),
    "analyse": Prompt(
        "Analyse a file",
        "Answer a question about data, with Python and pictures",
        "Look at the file {file} in the box: its form, its size, and what is odd about it. Then "
        "answer this: {question}\n\nUse Python, whose variables stay from call to call. Draw a "
        "picture where one says more than a number, and give the numbers that the answer rests on.",
        {
            "file": ("Its path in the box", None),
            "question": ("What you want to know", "what is in it, and what stands out?"),
        },
    ),
}


def listed() -> list[types.Prompt]:
    return [
        types.Prompt(
            name=name,
            title=prompt.title,
            description=prompt.description,
            arguments=[
                types.PromptArgument(name=argument, description=meaning, required=default is None)
                for argument, (meaning, default) in prompt.arguments.items()
            ],
        )
        for name, prompt in PROMPTS.items()
    ]


def filled(name: str, given: Mapping[str, str]) -> types.GetPromptResult:
    """A prompt with its arguments. Raises MCPError if it is unknown, or one is missing."""
    prompt = PROMPTS.get(name)
    if prompt is None:
        raise MCPError(
            types.INVALID_PARAMS, f"there is no prompt {name!r:.100}, only {', '.join(PROMPTS)}"
        )
    values = {}
    for argument, (meaning, default) in prompt.arguments.items():
        value = given.get(argument) or default
        if value is None:
            raise MCPError(types.INVALID_PARAMS, f"{name} needs {argument!r}: {meaning}")
        values[argument] = value
    text = types.TextContent(text=sayable(prompt.text.format(**values)))
    return types.GetPromptResult(
        description=prompt.description, messages=[types.PromptMessage(role="user", content=text)]
    )
