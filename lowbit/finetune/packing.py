"""Rows of equal length from documents of any length.

``Packed`` fills each row with documents: no padding, positions restart with each document, and attention does not cross
documents. ``Padded`` is for models that cannot keep documents of a row apart: a row has one document, or a piece of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from lowbit.finetune.texts import Document

__all__ = ["Packed", "Padded", "Rows", "keeps_documents_apart"]

#: The label that a loss leaves out.
IGNORED = -100

Batch = dict[str, Tensor]


class Rows(Protocol):
    """A source of batches that depend only on the seed and the number of the step."""

    def batch(self, step: int, rows: int) -> Batch:
        """Batch ``step`` of ``rows`` rows, as keyword arguments of a causal model of transformers."""

    def all(self) -> Batch:
        """Every row once, in order."""

    @property
    def fingerprint(self) -> int:
        """CRC-32 of the tokens, to recognize the text when a run resumes."""


class _Source:
    """Documents, in a new order each epoch.

    Args:
        documents: The documents.
        length: Tokens per row.
        seed: Seed of the order.
    """

    def __init__(self, documents: Sequence[Document], length: int, seed: int = 0) -> None:
        self.documents, self.length, self.seed = list(documents), length, seed
        self.epoch = lru_cache(maxsize=1)(self._epoch)

    @property
    def fingerprint(self) -> int:
        crc = 0
        for document in self.documents:
            crc = zlib.crc32(document.trained.tobytes(), zlib.crc32(document.ids.tobytes(), crc))
        return crc

    def batch(self, step: int, rows: int) -> Batch:
        per_epoch = len(self.epoch(0)["input_ids"])
        parts = []
        for index in range(step * rows, (step + 1) * rows):
            epoch, position = divmod(index, per_epoch)
            values = self.epoch(epoch)  # epochs differ by a few rows
            position %= len(values["input_ids"])
            parts.append({name: part[position] for name, part in values.items()})
        return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}

    def all(self) -> Batch:
        return self._rows(range(len(self.documents)), 0)

    def _epoch(self, epoch: int) -> Batch:
        """The rows of an epoch with a token to train on, in the order of their batches."""
        random = np.random.default_rng([self.seed, epoch])
        rows = self._rows(random.permutation(len(self.documents)), int(random.integers(self.length)))
        trained = np.flatnonzero((rows["labels"] != IGNORED).any(1).numpy())  # the mean over no token is no number
        if not len(trained):
            raise ValueError(f"no token of the text is trained on in rows of {self.length}; use longer rows")
        order = torch.from_numpy(random.permutation(trained))
        return {name: values[order] for name, values in rows.items()}

    def _rows(self, order: Iterable[int], offset: int) -> Batch:
        raise NotImplementedError


class Packed(_Source):
    """Rows full of documents; the last row of an epoch is left out unless it is full."""

    def _rows(self, order: Iterable[int], offset: int) -> Batch:
        documents = [self.documents[index] for index in order]
        ids, trained = (np.concatenate(parts) for parts in zip(*documents, strict=True))
        first: Any = np.zeros(len(ids), dtype=bool)
        first[np.cumsum([0, *(len(document.ids) for document in documents[:-1])])] = True
        offset = min(offset, len(ids) % self.length) if len(ids) < 2 * self.length else offset
        count = (len(ids) - offset) // self.length
        if count < 1:
            raise ValueError(
                f"{len(ids)} tokens do not fill one row of {self.length}; use a longer text or fewer tokens"
            )
        ids, trained, first = (
            part[offset : offset + count * self.length].reshape(count, self.length) for part in (ids, trained, first)
        )
        first[:, 0] = True
        places = np.arange(self.length)
        starts = np.maximum.accumulate(np.where(first, places, 0), axis=1)
        labels = np.where(trained & ~first, ids, IGNORED)
        return _tensors(input_ids=ids, labels=labels, position_ids=places - starts)


class Padded(_Source):
    """Rows with one document, or a piece of it, and padding after it."""

    def _rows(self, order: Iterable[int], offset: int) -> Batch:
        pieces = [
            Document(document.ids[start : start + self.length], document.trained[start : start + self.length])
            for document in (self.documents[index] for index in order)
            for start in range(0, len(document.ids), self.length)
        ]
        ids = np.zeros((len(pieces), self.length), dtype=np.int64)
        labels, mask = np.full_like(ids, IGNORED), np.zeros_like(ids)
        for row, piece in enumerate(pieces):
            count = len(piece.ids)
            ids[row, :count], mask[row, :count] = piece.ids, 1
            labels[row, 1:count] = np.where(piece.trained[1:], piece.ids[1:], IGNORED)
        return _tensors(input_ids=ids, labels=labels, attention_mask=mask)


def _tensors(**arrays: np.ndarray) -> Batch:
    return {name: torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)) for name, array in arrays.items()}


@torch.no_grad()
def keeps_documents_apart(model: nn.Module, vocab: int) -> bool:
    """Whether a document in a row does not depend on the documents before it, by a forward pass of a few tokens.

    Args:
        model: A causal model of transformers.
        vocab: Tokens of the vocabulary.
    """
    generator = torch.Generator().manual_seed(0)
    first, other, second = torch.randint(vocab, (3, 6), generator=generator)
    places = torch.arange(6)
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        logits = [
            _logits(model, torch.cat((before, second))[None].to(device), torch.cat((places, places))[None].to(device))
            for before in (first, other)
        ]
    except (TypeError, ValueError, RuntimeError):  # no argument position_ids
        return False
    finally:
        model.train(training)
    one, two = (values[:, 6:].float() for values in logits)
    return torch.allclose(one, two, rtol=1e-3, atol=1e-4)


def _logits(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return logits
