"""An agent with LangChain. Install: pip install '.[langchain]'

The tools work in one sandbox. A command that fails or hangs is an answer to the model, with its
exit code. The model is scripted, so this needs no key and no network.
"""

from collections.abc import Sequence
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.messages.tool import tool_call

from hutch import Sandbox
from hutch.adapters.langchain import hutch_tools
from hutch.tools import PROMPT, Answer


class ScriptedModel(GenericFakeChatModel):
    def bind_tools(self, tools: Sequence[Any], **options: Any) -> "ScriptedModel":
        return self  # a script does not read descriptions


def bash(command: str, timeout: int = 30) -> AIMessage:
    arguments = {"command": command, "timeout": timeout}
    return AIMessage("", tool_calls=[tool_call(name="bash", args=arguments, id=command)])


model: Any = ScriptedModel(
    messages=iter(
        [
            bash("python3 -c 'print(2 ** 1000 / 0)'"),
            bash("yes | sort", timeout=1),
            bash("python3 -c 'print(sum(map(int, str(2 ** 1000))))'"),
            AIMessage("The sum of the digits is 1366."),
        ]
    )
)
# model = "openai:gpt-5"  # a real model instead; needs langchain-openai and OPENAI_API_KEY


def main() -> None:
    with Sandbox.create(memory="512m", pids=64) as box:
        agent = create_agent(model, tools=hutch_tools(box), system_prompt=PROMPT)
        question = "What is the sum of the digits of 2 to the power of 1000?"
        limit = {"recursion_limit": 30}  # a model that never finishes must not run forever
        result = agent.invoke({"messages": [("user", question)]}, limit)
    for message in result["messages"]:
        if isinstance(message, AIMessage) and message.tool_calls:
            print("call:", message.tool_calls[0]["args"])
        elif isinstance(message, ToolMessage):
            answer: Answer = message.artifact
            print(f"exit code {answer.exit_code}:", answer.text)
    print("answer:", result["messages"][-1].content)


if __name__ == "__main__":
    main()
