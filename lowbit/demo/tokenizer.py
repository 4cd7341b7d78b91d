"""A byte-level BPE tokenizer, trained in a second or two on the text it is for.

Tokens 0 to 255 are the bytes; each later token is a pair of earlier ones, in the order in which they were merged.
Source: Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", arXiv 1508.07909.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from lowbit.files import shown

__all__ = ["Tokenizer"]

#: No token of a text stands for as many bytes; in a file, tokens that double each other soon would.
LONGEST = 1 << 16

#: Merges never cross these pieces: a word with its leading space, a run of digits, a mark, or white space.
_PIECE = re.compile(rb" ?[A-Za-z\x80-\xff]+| ?[0-9]+| ?[^\sA-Za-z0-9\x80-\xff]+|\s+")


class Tokenizer:
    """Text to tokens and back; ``merges[k]`` is the pair of tokens that token ``256 + k`` stands for."""

    def __init__(self, merges: Sequence[tuple[int, int]] = ()) -> None:
        self.merges = [(int(a), int(b)) for a, b in merges]
        self.rank = {pair: 256 + k for k, pair in enumerate(self.merges)}
        self.tokens = [bytes([b]) for b in range(256)]
        for a, b in self.merges:
            self.tokens.append(self.tokens[a] + self.tokens[b])
        self._known: dict[bytes, tuple[int, ...]] = {}

    @property
    def vocab(self) -> int:
        return len(self.tokens)

    @classmethod
    def train(cls, text: str, vocab: int) -> Tokenizer:
        """Merge the most frequent pair (the smaller one of equals) until there are ``vocab`` tokens or no pair repeats.

        Raises: ValueError when ``vocab`` is below the 256 bytes.
        """
        if vocab < 256:
            raise ValueError(f"a byte-level vocabulary has at least 256 tokens, got {vocab}")
        counted = Counter(_PIECE.findall(text.encode()))
        words, counts = [list(word) for word in counted], list(counted.values())
        total: Counter[tuple[int, int]] = Counter()
        where: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        for index, word in enumerate(words):
            for pair in _pairs(word):
                total[pair] += counts[index]
                where[pair].add(index)
        heap = [(-count, pair) for pair, count in total.items()]
        heapq.heapify(heap)
        merges: list[tuple[int, int]] = []
        while heap and 256 + len(merges) < vocab:
            count, pair = heapq.heappop(heap)
            if -count != total[pair]:  # counted again since it was pushed: what is current goes back in its place
                if total[pair] > 1:
                    heapq.heappush(heap, (-total[pair], pair))
                continue
            if -count < 2:
                break
            token, touched = 256 + len(merges), set()
            merges.append(pair)
            for index in where.pop(pair):
                before, after = words[index], _merge(words[index], pair, token)
                for old in _pairs(before):
                    total[old] -= counts[index]
                for new in _pairs(after):
                    total[new] += counts[index]
                    where[new].add(index)
                    touched.add(new)
                words[index] = after
            for new in touched:
                heapq.heappush(heap, (-total[new], new))
        return cls(merges)

    def to_dict(self) -> dict[str, Any]:
        """What JSON holds of it."""
        return {"kind": "byte-level BPE", "merges": self.merges}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Tokenizer:
        """What ``to_dict`` made. Raises: ValueError for anything else."""
        merges = saved.get("merges")
        if not isinstance(merges, list):
            raise ValueError("expected an object with a list of merges")
        lengths = [1] * 256
        for token, pair in enumerate(merges, 256):
            if not (isinstance(pair, list) and len(pair) == 2 and all(type(k) is int and 0 <= k < token for k in pair)):
                raise ValueError(f"token {token} must be a pair of earlier tokens, got {shown(pair)}")
            lengths.append(lengths[pair[0]] + lengths[pair[1]])
            if lengths[-1] > LONGEST:
                raise ValueError(f"token {token} stands for {lengths[-1]} bytes, and may for {LONGEST} at most")
        return cls(merges)

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``."""
        return [token for piece in _PIECE.findall(text.encode()) for token in self._piece(piece)]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ``tokens``; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.tokens[token] for token in tokens).decode(errors="replace")

    def _piece(self, piece: bytes) -> tuple[int, ...]:
        if piece not in self._known:
            word = list(piece)
            while len(word) > 1:
                token, pair = min((self.rank.get(p, self.vocab), p) for p in _pairs(word))
                if token == self.vocab:
                    break
                word = _merge(word, pair, token)
            self._known[piece] = tuple(word)
        return self._known[piece]


def _pairs(word: list[int]) -> Iterable[tuple[int, int]]:
    return zip(word, word[1:], strict=False)  # noqa: RUF007


def _merge(word: list[int], pair: tuple[int, int], token: int) -> list[int]:
    """``word`` with each ``pair``, from the left, made one ``token``."""
    out, index = [], 0
    while index < len(word):
        if index + 1 < len(word) and (word[index], word[index + 1]) == pair:
            out.append(token)
            index += 2
        else:
            out.append(word[index])
            index += 1
    return out
