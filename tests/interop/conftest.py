"""Fixtures of several formats."""

from __future__ import annotations

from typing import Any

import pytest
from support.words import byte_tokenizer


@pytest.fixture(scope="module")
def words() -> Any:
    """A byte-level tokenizer with one merge."""
    pytest.importorskip("transformers")
    return byte_tokenizer()
