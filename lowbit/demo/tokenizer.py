"""A byte-level BPE tokenizer from the library ``tokenizers``, trained on the demo's text.

Tokens 0 to 255 are the bytes. Each later token is a pair of earlier ones, in the order of merges. If pairs are equally
frequent, the smaller one is merged first, so that the same text gives the same tokens everywhere.
Source: Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", arXiv 1508.07909.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.files import MOST_JSON, check_regular, write_atomically

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["load", "save", "train"]

#: Merges stay within these pieces: a word with its leading space, a run of digits, punctuation, or white space.
_PIECE = r" ?[A-Za-z\x{80}-\x{10ffff}]+| ?[0-9]+| ?[^ \t\n\r\f\vA-Za-z0-9\x{80}-\x{10ffff}]+|[ \t\n\r\f\v]+"


def train(text: str, vocab: int) -> Tokenizer:
    """Train a tokenizer: merge the most frequent pair until there are ``vocab`` tokens or no pair repeats.

    Raises:
        ValueError: ``vocab`` is below 256.
        ImportError: tokenizers is not installed.
    """
    if vocab < 256:
        raise ValueError(f"a byte-level vocabulary has at least 256 tokens, got {vocab}")
    if find_spec("tokenizers") is None:
        raise ImportError(_MISSING)
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    # Special tokens come first and in order; the trainer's own alphabet does not.
    trainer = BpeTrainer(vocab_size=vocab, min_frequency=2, special_tokens=_bytes(), show_progress=False)
    trained = _tokenizer(BPE())
    trained.train_from_iterator([text], trainer)
    model = json.loads(trained.to_str())["model"]
    return _tokenizer(BPE(model["vocab"], [tuple(pair) for pair in model["merges"]]))  # bytes as normal tokens


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Write the tokenizer in the library's format, atomically. Raises OSError."""
    text = tokenizer.to_str(pretty=True).encode()
    write_atomically(path, lambda file: file.write(text))


def load(path: Path) -> Tokenizer:
    """Load a tokenizer.

    Raises:
        FileNotFoundError: There is no file.
        ImportError: tokenizers is not installed.
        ValueError: The file is damaged.
    """
    if find_spec("tokenizers") is None:
        raise ImportError(_MISSING)
    from tokenizers import Tokenizer

    check_regular(path, MOST_JSON)
    try:
        return Tokenizer.from_str(path.read_bytes().decode())
    except Exception as error:  # the library raises plain Exception for invalid files
        raise ValueError(f"{path} is damaged ({error}); copy the whole directory again, or train again") from None


_MISSING = "the demo's tokenizer needs the library tokenizers; pip install 'lowbit[demo]', or pip install tokenizers"


def _tokenizer(model: Any) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    pieces = pre_tokenizers.Split(Regex(_PIECE), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bytes() -> list[str]:
    """The library's character for each byte: the byte's own if it is visible, else the next from U+0100 on."""
    letters, substitutes = [], iter(range(256, 512))
    for byte in range(256):
        visible = chr(byte).isprintable() and byte != ord(" ")
        letters.append(chr(byte if visible else next(substitutes)))
    return letters
