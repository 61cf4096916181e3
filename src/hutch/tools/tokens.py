"""Counts tokens, if a tokenizer is installed that needs no network."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

# tiktoken caches downloaded vocabularies under these names. Without one it would use the network,
# which we must not do unasked.
_VOCABULARIES = {
    "o200k_base": "fb374d419588a4632f3f557e76b4b70aebbca790",
    "cl100k_base": "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
}


Tokenizer = tuple[str, Callable[[str], int]]


@cache
def found() -> Tokenizer | None:
    """The name of a tokenizer, and a function that counts with it; None if none is installed."""
    for tokenizer in (_rs_bpe, _tiktoken):
        # Foreign packages: whatever they raise must not break a tool call.
        with contextlib.suppress(Exception):
            if known := tokenizer():
                return known
    return None


def counter() -> Callable[[str], int] | None:
    tokenizer = found()
    return tokenizer and tokenizer[1]


def _rs_bpe() -> Tokenizer | None:
    """rs_bpe ships its vocabularies."""
    if find_spec("rs_bpe") is None:
        return None
    count = import_module("rs_bpe.bpe").openai.o200k_base().count
    return "rs_bpe o200k_base", lambda text: int(count(_sound(text)))


def _tiktoken() -> Tokenizer | None:
    if find_spec("tiktoken") is None:
        return None
    folder = (
        os.environ.get("TIKTOKEN_CACHE_DIR")
        or os.environ.get("DATA_GYM_CACHE_DIR")
        or os.path.join(tempfile.gettempdir(), "data-gym-cache")
    )
    name = next((name for name, file in _VOCABULARIES.items() if Path(folder, file).is_file()), "")
    if not name:
        return None
    encode = import_module("tiktoken").get_encoding(name).encode_ordinary
    return f"tiktoken {name}", lambda text: len(encode(_sound(text)))


def _sound(text: str) -> str:
    """The text without lone surrogates, which no tokenizer accepts."""
    return text.encode("utf-8", "replace").decode()
