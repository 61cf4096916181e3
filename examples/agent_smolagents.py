"""A code agent with smolagents. Install: pip install '.[smolagents]'

The code that the model writes runs in a sandbox, in one Python that keeps its variables. The tool
stays here, with its keys and connections: the code in the sandbox calls it. The model is scripted.
"""

from typing import Any

from smolagents import ActionStep, ChatMessage, CodeAgent, MessageRole, Model, tool
from smolagents.monitoring import AgentLogger, LogLevel

from hutch.adapters.smolagents import HutchExecutor


class ScriptedModel(Model):
    def __init__(self, *steps: str) -> None:
        super().__init__(model_id="scripted")
        self.steps = list(steps)

    def generate(self, messages: list[ChatMessage], *args: Any, **options: Any) -> ChatMessage:
        return ChatMessage(role=MessageRole.ASSISTANT, content=self.steps.pop(0))


@tool
def price(fruit: str) -> float:
    """The price of a kilogram of fruit, in euros.

    Args:
        fruit: Its name.
    """
    return {"apples": 2.5, "pears": 3.0}[fruit]


model: Model = ScriptedModel(
    "<code>apples = 4 * price(fruit='apples')\nprint(apples)</code>",
    "<code>pears = 2 * price(fruit='plums')</code>",
    "<code>while True: pass</code>",
    "<code>final_answer(apples + 2 * price(fruit='pears'))</code>",
)
# from smolagents import InferenceClientModel; model = InferenceClientModel()  # a real model


def main() -> None:
    quiet = AgentLogger(level=LogLevel.OFF)
    executor = HutchExecutor(tools_on_host=True, timeout=5, memory="512m", pids=64, logger=quiet)
    with CodeAgent([price], model, executor=executor, max_steps=10, logger=quiet) as agent:
        answer = agent.run("What do 4 kg of apples and 2 kg of pears cost?")
        for step in agent.memory.steps:
            if isinstance(step, ActionStep):
                print(f"step {step.step_number}: {step.code_action}")
                print(str(step.error).splitlines()[-1] if step.error else step.observations)
    print("answer:", answer)


if __name__ == "__main__":
    main()
