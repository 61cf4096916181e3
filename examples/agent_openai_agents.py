"""An agent with the OpenAI Agents SDK. Install: pip install '.[openai-agents]'

The agent's shell and files are in a sandbox that is made for the run and closed at its end. The
model is scripted, so this needs no key and no network.
"""

import asyncio

from agents import Model, RunConfig, Runner, ToolCallItem, ToolCallOutputItem
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.entries import File
from agents.testing import ScriptedModel, assistant_message, function_call

from hutch.adapters.openai_agents import HutchSandboxClient, HutchSandboxClientOptions

NOTES = b"one two three\n"
model: Model | str = ScriptedModel(
    [
        [function_call("exec_command", {"cmd": "python3 count.py"}, call_id="1")],
        [function_call("exec_command", {"cmd": "wc -w < notes.txt"}, call_id="2")],
        [assistant_message("There are three words.")],
    ]
)
# model = "gpt-5"  # a real model instead; the key is in OPENAI_API_KEY


async def main() -> None:
    instructions = "Answer questions about the files in your workspace."
    agent = SandboxAgent(name="Counter", model=model, instructions=instructions)
    sandbox = SandboxRunConfig(
        client=HutchSandboxClient(),
        options=HutchSandboxClientOptions(memory="512m", pids=64),
        manifest=Manifest(entries={"notes.txt": File(content=NOTES)}),
    )
    result = await Runner.run(
        agent,
        "How many words are in notes.txt?",
        max_turns=10,  # a model that never finishes must not run forever
        run_config=RunConfig(sandbox=sandbox, tracing_disabled=True),
    )
    for item in result.new_items:
        if isinstance(item, ToolCallItem):
            print("call:", getattr(item.raw_item, "arguments", item.raw_item))
        elif isinstance(item, ToolCallOutputItem):
            print("output:", item.output)
    print("answer:", result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
