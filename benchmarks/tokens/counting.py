"""Tokens as a real tokenizer counts them, where one is installed that needs no download."""

from __future__ import annotations

from collections.abc import Callable

from hutch.tools import tokens


def counter() -> tuple[str, Callable[[str], int]]:
    """What is counted, and how: "tokens (rs_bpe o200k_base)" or "bytes"."""
    if tokenizer := tokens.found():
        name, count = tokenizer
        return f"tokens ({name})", count
    return "bytes", lambda text: len(text.encode())
