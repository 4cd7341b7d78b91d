"""A tokenizer without files."""

from __future__ import annotations

from typing import Any


def byte_tokenizer() -> Any:
    """A byte-level tokenizer of transformers with one merge, and 257 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    backend = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(alphabet)}, merges=[("t", "h")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
