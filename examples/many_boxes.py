"""Ten boxes at once, each with its own work, none aware of the others."""

import asyncio

from hutch import AsyncSandbox


async def work(number: int) -> str:
    async with await AsyncSandbox.create() as box:
        await box.files.write("input", str(number))
        return (await box.shell.run("echo $(($(cat input) * $(cat input)))")).stdout.strip()


async def main() -> None:
    print(await asyncio.gather(*(work(n) for n in range(10))))


asyncio.run(main())
