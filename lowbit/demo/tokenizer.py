"""A byte-level BPE tokenizer of the library ``tokenizers``, trained in a second or two on the text it is for.

Tokens 0 to 255 are the bytes; each later token is a pair of earlier ones, in the order in which they were merged. Of
pairs that are equally frequent the smaller one is merged first, so the same text gives the same tokens everywhere.
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

#: Merges never cross these pieces: a word with its leading space, a run of digits, a mark, or white space.
_PIECE = r" ?[A-Za-z\x{80}-\x{10ffff}]+| ?[0-9]+| ?[^ \t\n\r\f\vA-Za-z0-9\x{80}-\x{10ffff}]+|[ \t\n\r\f\v]+"


def train(text: str, vocab: int) -> Tokenizer:
    """Merge the most frequent pair until there are ``vocab`` tokens or no pair repeats.

    Raises: ValueError when ``vocab`` is below the 256 bytes; ImportError without the library.
    """
    if vocab < 256:
        raise ValueError(f"a byte-level vocabulary has at least 256 tokens, got {vocab}")
    if find_spec("tokenizers") is None:
        raise ImportError(_MISSING)
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    # As special tokens the bytes come first and in their order, which the trainer's own alphabet has not.
    trainer = BpeTrainer(vocab_size=vocab, min_frequency=2, special_tokens=_bytes(), show_progress=False)
    trained = _of(BPE())
    trained.train_from_iterator([text], trainer)
    model = json.loads(trained.to_str())["model"]
    return _of(BPE(model["vocab"], [tuple(pair) for pair in model["merges"]]))  # whose bytes are no special tokens


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Write it in the library's own format, atomically. Raises: OSError."""
    text = tokenizer.to_str(pretty=True).encode()
    write_atomically(path, lambda file: file.write(text))


def load(path: Path) -> Tokenizer:
    """What ``save`` wrote. Raises: FileNotFoundError; ImportError without the library; ValueError for anything else."""
    if find_spec("tokenizers") is None:
        raise ImportError(_MISSING)
    from tokenizers import Tokenizer

    check_regular(path, MOST_JSON)
    try:
        return Tokenizer.from_str(path.read_bytes().decode())
    except Exception as error:  # the library has no class of its own for a file that it cannot read
        raise ValueError(f"{path} is damaged ({error}); copy the whole directory again, or train anew") from None


_MISSING = "the demo's tokenizer needs the library tokenizers; pip install 'lowbit[demo]', or pip install tokenizers"


def _of(model: Any) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    pieces = pre_tokenizers.Split(Regex(_PIECE), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bytes() -> list[str]:
    """The letter by which the library shows each byte: its own where it is visible, else one from U+0100 on."""
    letters, more = [], iter(range(256, 512))
    for byte in range(256):
        visible = chr(byte).isprintable() and byte != ord(" ")
        letters.append(chr(byte if visible else next(more)))
    return letters
