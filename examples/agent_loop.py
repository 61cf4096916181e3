"""Your own agent loop, without a framework. Install: pip install .

The model asks for tools, the sandbox runs them, the answers go back to the model. The model here is
a script that makes the mistakes of real ones: a syntax error, a command that never ends.
"""

from dataclasses import dataclass

from hutch import Sandbox
from hutch.tools import PROMPT


@dataclass
class ToolCall:
    name: str
    arguments: dict[str, object]


PROGRAM = "print([n for n in range(2, 30) if all(n % k for k in range(2, n))])\n"
SCRIPT: list[ToolCall | str] = [
    ToolCall("write", {"path": "primes.py", "content": "print([2, 3"}),
    ToolCall("bash", {"command": "python3 primes.py"}),
    ToolCall("bash", {"command": "while true; do :; done", "timeout": 1}),
    ToolCall("write", {"path": "primes.py", "content": PROGRAM}),
    ToolCall("bash", {"command": "python3 primes.py"}),
    "The primes below 30 are 2, 3, 5, 7, 11, 13, 17, 19, 23 and 29.",
]


def ask_model(messages: list[dict[str, str]], tools: list[dict[str, object]]) -> ToolCall | str:
    """The next tool call, or the final answer."""
    # A real model instead: send messages and tools to your provider, return what it chose.
    return SCRIPT[sum(message["role"] == "tool" for message in messages)]


def main() -> None:
    messages = [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": "Which numbers below 30 are prime?"},
    ]
    with Sandbox.create(memory="256m", pids=64) as box:
        tools: list[dict[str, object]] = [
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            for tool in box.tools.tools.values()
        ]
        print("tools:", ", ".join(str(tool["name"]) for tool in tools))
        for _ in range(20):  # a model that never finishes must not run forever
            step = ask_model(messages, tools)
            if isinstance(step, str):
                print(f"\nanswer: {step}")
                return
            # A failing command, a wrong tool name, bad arguments: each is an answer to the model.
            answer = box.tools.call(step.name, step.arguments)
            print(f"\n{step.name} {step.arguments}\nexit code {answer.exit_code}: {answer.text}")
            messages.append({"role": "assistant", "content": f"{step.name} {step.arguments}"})
            messages.append({"role": "tool", "content": answer.text})
        print("\nno answer after 20 steps")


if __name__ == "__main__":
    main()
