"""Many rollouts of a policy at once, each in its own sandbox. Install: pip install .

For reinforcement learning and for evaluations: each rollout ends with one outcome, and a rollout
whose sandbox failed is told apart from one that earned no reward. The policy here is a script.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass

from hutch import AsyncSandbox, HutchError

ROLLOUTS, AT_ONCE = 12, 4
CHECK = "from solution import double; assert double(21) == 42"  # the reward: does this pass?


@dataclass
class Outcome:
    number: int
    status: str  # "solved", "wrong", "timed out", "out of memory", "no sandbox"
    reward: float | None  # None: this says nothing about the policy; leave it out, or run it again
    seconds: float = 0.0


def policy(number: int) -> str:
    """The code that rollout `number` tries."""
    # A real policy instead: sample from your model here.
    attempts = ["return 2 * x", "return x + x", "return x ** 2", "while True: pass"]
    attempts += ["return x << 1", "return [x] * 10**9"]
    return f"def double(x):\n    {attempts[number % len(attempts)]}\n"


async def rollout(number: int, places: asyncio.Semaphore) -> Outcome:
    async with places:
        try:
            async with await AsyncSandbox.create(memory="128m", cpus=1, pids=32) as box:
                await box.files.write("solution.py", policy(number))
                result = await box.commands.run(["python3", "-c", CHECK], timeout=5)
        except HutchError as exc:
            return Outcome(number, f"no sandbox: {exc}", None)
    seconds = result.duration_ms / 1000
    if result.timed_out:
        return Outcome(number, "timed out", 0.0, seconds)
    if result.oom:
        return Outcome(number, "out of memory", 0.0, seconds)
    return Outcome(number, "solved" if result.ok else "wrong", float(result.ok), seconds)


async def main() -> None:
    places = asyncio.Semaphore(AT_ONCE)
    outcomes = []
    for next_one in asyncio.as_completed([rollout(n, places) for n in range(ROLLOUTS)]):
        outcome = await next_one
        outcomes.append(outcome)
        print(f"rollout {outcome.number:2}: {outcome.status}, {outcome.seconds:.2f} s", flush=True)
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    print(dict(Counter(outcome.status for outcome in outcomes)))
    if rewards:
        print(f"mean reward {sum(rewards) / len(rewards):.2f} of {len(rewards)} rollouts")


if __name__ == "__main__":
    asyncio.run(main())
