"""An agent with Pydantic AI. Install: pip install '.[pydantic-ai]'

The sandbox is the workspace of the agent's runs, and the tools work in it. A second question of the
same conversation finds the files of the first. The model is scripted: no key, no network.
"""

import asyncio

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.usage import UsageLimits

from hutch.adapters.pydantic_ai import HutchWorkspace, hutch_toolset
from hutch.tools import PROMPT

BROKEN = "a, b = 0, 1\nwhile a < 90 a, b = b, a + b\nprint(a)\n"
STEPS: list[ToolCallPart | TextPart] = [
    ToolCallPart("write", {"path": "fib.py", "content": BROKEN}),
    ToolCallPart("bash", {"command": "python3 fib.py"}),
    ToolCallPart("edit", {"path": "fib.py", "old_string": "90 a", "new_string": "90: a"}),
    ToolCallPart("bash", {"command": "python3 fib.py"}),
    TextPart("It is 144."),
    ToolCallPart("bash", {"command": "while true; do :; done", "timeout": 1}),
    ToolCallPart("bash", {"command": "ls"}),
    TextPart("Yes, fib.py is still there."),
]


def script(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """The next step: one for each answer that the model has given."""
    return ModelResponse([STEPS[sum(message.kind == "response" for message in messages)]])


model: Model | str = FunctionModel(script)
# model = "openai:gpt-5"  # a real model instead; needs pydantic-ai-slim[openai], OPENAI_API_KEY
workspace = HutchWorkspace(memory="512m", pids=64, idle=600)
toolset = hutch_toolset(only=["bash", "read", "write", "edit"])
agent = Agent(model, instructions=PROMPT, capabilities=[workspace], toolsets=[toolset])


async def main() -> None:
    history: list[ModelMessage] = []
    limits = UsageLimits(request_limit=20)  # a model that never finishes must not run forever
    for question in ("Which Fibonacci number is the first above 90?", "Is your file still there?"):
        print("question:", question)
        result = await agent.run(question, message_history=history, usage_limits=limits)
        for message in result.new_messages():
            for part in message.parts:
                if isinstance(part, ToolCallPart):
                    print("call:", part.tool_name, part.args)
                elif isinstance(part, ToolReturnPart):
                    print("output:", part.content)
        print("answer:", result.output)
        history = result.all_messages()
    # The sandbox waits for the next question, until it was idle for too long, or until this:
    refs = {message.workspace_ref for message in history if isinstance(message, ModelResponse)}
    for ref in refs - {None}:
        await workspace.destroy(ref)


if __name__ == "__main__":
    asyncio.run(main())
