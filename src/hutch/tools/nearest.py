"""Where in a text a model may have meant, when it did not say it exactly."""

from __future__ import annotations

from collections.abc import Sequence

LOOKED_AT = 10_000  # lines; it is only a hint, and shall be a quick one
LIKE = 0.4  # how much must be the same
SHOWN = 200  # characters of a line


def nearest(lines: Sequence[str], wanted: Sequence[str]) -> str:
    """A sentence about the lines that `wanted` is most like; or that there are none."""
    aims = [line for line in wanted if line.strip()]
    if not aims:
        return "There is nothing like it."
    exact = [line.strip() for line in lines[:LOOKED_AT]]
    stripped = [line.strip() for line in wanted]
    for at in range(len(exact) - len(stripped) + 1):
        if exact[at] == stripped[0] and exact[at : at + len(stripped)] == stripped:
            found = lines[at : at + len(stripped)]
            return f"Only white space differs. What is there: {quoted(at, found)}"
    at, likeness = _most_like(exact, aims[0].strip())
    if likeness < LIKE:
        return "There is nothing like it."
    before = min(at, wanted.index(aims[0]))
    return f"The nearest: {quoted(at - before, lines[at - before :][: min(len(wanted), 5)])}"


def _most_like(lines: Sequence[str], aim: str) -> tuple[int, float]:
    best, at, ours = 0.0, 0, _triples(aim)
    for number, line in enumerate(lines):
        theirs = _triples(line)
        likeness = len(ours & theirs) / len(ours | theirs)
        if likeness > best:
            best, at = likeness, number
    return at, best


def _triples(line: str) -> set[str]:
    """Its letters, three by three."""
    text = f" {line[:SHOWN]} "
    return {text[at : at + 3] for at in range(max(1, len(text) - 2))}


def quoted(at: int, lines: Sequence[str]) -> str:
    """Lines with their numbers; `at` is that of the first, counted from 0."""
    shown = [f"{at + n + 1}\t{line[:SHOWN]}" for n, line in enumerate(lines[:12])]
    return "\n" + "\n".join(shown)
