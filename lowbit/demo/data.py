"""A tokenized corpus, and batches that depend only on seed and step.

A resumed run therefore needs no saved position, and two runs with the same seed see the same batches.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lowbit.demo import text, tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Corpus"]


@dataclass(frozen=True)
class Corpus:
    """Tokens for training and evaluation.

    Attributes:
        tokenizer: The tokenizer, trained on the training text.
        train: Training tokens [N].
        held_out: Held-out tokens [M].
        held_out_bytes: Length of the held-out text in UTF-8.
        origin: Source of the text, for messages and the report.
    """

    tokenizer: Tokenizer
    train: Tensor
    held_out: Tensor
    held_out_bytes: int
    origin: str

    @classmethod
    def build(cls, documents: list[text.Document], vocab: int, origin: str) -> Corpus:
        """Split documents, train a tokenizer on the training part and encode both parts.

        Raises:
            ValueError: One of the parts is empty.
        """
        train, held_out = text.split(documents)
        if not train or not held_out:
            raise ValueError(
                f"{origin}: {len(documents)} documents leave {len(train)} to train on and {len(held_out)} held out; "
                f"give a longer text (about 200 KB or more)"
            )
        train_text, held_text = ("".join(d.text for d in part) for part in (train, held_out))
        bpe = tokenizer.train(train_text, vocab)
        train_tokens, held_tokens = (torch.tensor(bpe.encode(part).ids) for part in (train_text, held_text))
        return cls(bpe, train_tokens, held_tokens, len(held_text.encode()), origin)

    @classmethod
    def load(cls, path: Path | None, vocab: int) -> Corpus:
        """The standard library's documentation, or the text of a file."""
        if path is None:
            return cls.build(text.standard_library(), vocab, "the documentation in Python's standard library")
        return cls.build(text.file_documents(path), vocab, str(path))

    @property
    def fingerprint(self) -> int:
        """CRC-32 of all tokens; a resumed run checks it."""
        return zlib.crc32(self.held_out.numpy().tobytes(), zlib.crc32(self.train.numpy().tobytes()))

    def batch(self, step: int, size: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [size, context] of step ``step``.

        Each epoch cuts the text into windows at a random offset, and shuffles them.

        Raises:
            ValueError: The text is shorter than two windows.
        """
        if len(self.train) < 2 * context + 1:
            raise ValueError(
                f"{self.origin}: {len(self.train)} tokens are fewer than two windows of {context}; use a longer text"
            )
        per_epoch = len(self.train) // context - 1
        rows = []
        for index in range(step * size, (step + 1) * size):
            epoch, position = divmod(index, per_epoch)
            offset, order = _epoch(seed, epoch, per_epoch, context)
            start = offset + int(order[position]) * context
            rows.append(self.train[start : start + context + 1])
        window = torch.stack(rows)
        return window[:, :-1], window[:, 1:]

    def held_out_windows(self, count: int, context: int) -> Tensor:
        """At most ``count`` windows [n, context + 1], evenly spread over the held-out text."""
        available = (len(self.held_out) - 1) // context
        if available < 1:
            raise ValueError(
                f"{self.origin}: {len(self.held_out)} held-out tokens do not fill one window of {context}; "
                f"use a longer text or a shorter context"
            )
        indices = np.linspace(0, available - 1, min(count, available)).round().astype(int)
        return torch.stack([self.held_out[k * context : (k + 1) * context + 1] for k in indices])


def _epoch(seed: int, epoch: int, windows: int, context: int) -> tuple[int, np.ndarray]:
    """The start of an epoch's first window, and the order of its windows."""
    random = np.random.default_rng([seed, epoch])
    return int(random.integers(context)), random.permutation(windows)
