"""Text to train on that every machine has: the sources of Python's own standard library."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from functools import lru_cache
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from offload.workloads.base import Batch, BatchMaker

__all__ = [
    "BYTE_VOCABULARY",
    "Vocabulary",
    "corpus_tokens",
    "next_token_batches",
    "stdlib_text",
    "token_windows",
]

BYTE_VOCABULARY = 256
HELD_OUT_EVERY = 10  # one module in ten is never trained on
_WORD = re.compile(r"\w+|\s+|[^\w\s]", re.ASCII)


@lru_cache(maxsize=2)
def stdlib_text(held_out: bool = False) -> str:
    """The top-level modules of the standard library, about 5 MB, in the order of their names.

    Args:
        held_out: every tenth module, which training never sees, instead of the other nine.

    Raises:
        FileNotFoundError: this Python was installed without its sources.
    """
    directory = Path(sysconfig.get_path("stdlib"))
    sources = sorted(directory.glob("*.py"), key=lambda path: path.name)
    chosen = [p for i, p in enumerate(sources) if (i % HELD_OUT_EVERY == 0) == held_out]
    if not chosen:
        raise FileNotFoundError(
            f"no Python sources in {directory}: this workload trains on the standard library's own "
            "source code; use a Python that was installed with it"
        )
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in chosen)


class Vocabulary:
    """The most frequent words of a text, over the 256 bytes that spell every other word.

    Token ids below 256 are bytes, the others are words (runs of letters, of blanks, or one sign).
    With ``size`` 256 a token is a character, as far as a source file is plain ASCII.

    Example:
        >>> vocabulary = Vocabulary("import os, os.path", size=258)
        >>> ids = vocabulary.encode("os is")
        >>> len(ids), vocabulary.decode(ids)                # "os" and " ", then "i" and "s"
        (4, 'os is')
    """

    def __init__(self, text: str, size: int) -> None:
        if size < BYTE_VOCABULARY:
            raise ValueError(f"a vocabulary has at least {BYTE_VOCABULARY} tokens, not {size}")
        counts = Counter(_WORD.findall(text)) if size > BYTE_VOCABULARY else Counter[str]()
        words = ((word, n) for word, n in counts.items() if len(word.encode()) > 1 or n > 1)
        ranked = sorted(words, key=lambda item: (-item[1], item[0]))
        self.words = [word for word, _ in islice(ranked, size - BYTE_VOCABULARY)]
        self._ids = {word: BYTE_VOCABULARY + i for i, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; ``decode`` gives the text back."""
        if not self._ids:
            return list(text.encode())
        ids: list[int] = []
        for word in _WORD.findall(text):
            known = self._ids.get(word)
            if known is None:
                ids.extend(word.encode())
            else:
                ids.append(known)
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text that ``ids`` spell."""
        spelled = (
            bytes([i]) if i < BYTE_VOCABULARY else self.words[i - BYTE_VOCABULARY].encode()
            for i in ids
        )
        return b"".join(spelled).decode(errors="replace")


@lru_cache(maxsize=8)
def corpus_tokens(vocabulary_size: int, held_out: bool = False) -> Tensor:
    """The corpus as int32 token ids of shape ``(tokens,)``, in the training part's vocabulary.

    Raises:
        FileNotFoundError: see ``stdlib_text``.
        ValueError: ``vocabulary_size`` is below 256.
    """
    vocabulary = Vocabulary(stdlib_text(), vocabulary_size)
    return torch.tensor(vocabulary.encode(stdlib_text(held_out)), dtype=torch.int32)


def token_windows(tokens: Tensor, rows: int, length: int, generator: torch.Generator) -> Batch:
    """Random windows of a token stream with the token that follows each.

    Returns:
        inputs and targets, both int64 of shape ``(rows, length)``.
    """
    starts = torch.randint(0, len(tokens) - length, (rows,), generator=generator)
    windows = torch.stack([tokens[int(s) : int(s) + length + 1] for s in starts]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def next_token_batches(vocabulary_size: int, rows: int, length: int) -> BatchMaker:
    """What draws ``token_windows`` of the corpus."""

    def make_batch(generator: torch.Generator, held_out: bool) -> Batch:
        return token_windows(corpus_tokens(vocabulary_size, held_out), rows, length, generator)

    return make_batch
