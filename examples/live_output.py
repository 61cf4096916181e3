"""Output while it is made, and a command that is stopped when enough was seen."""

from hutch import Chunk, Sandbox

with Sandbox.create() as box:
    stream = box.commands.stream("i=0; while :; do echo line $i; i=$((i + 1)); sleep 0.05; done")
    seen = 0
    for item in stream:
        if isinstance(item, Chunk):
            print(item.text, end="")
            seen += 1
        if seen == 3:
            stream.close()  # the loop in the box is dead now
            break
