"""Fixtures of several formats."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def words() -> Any:
    """A byte-level tokenizer with one merge."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    backend = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(alphabet)}, merges=[("t", "h")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
