"""What the demo's tests share: one thread, a text, a tokenizer."""

import pytest
import torch
from support.runs import ENGLISH, TINY
from tokenizers import Tokenizer

from lowbit.demo.data import Corpus


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small gain nothing from a second thread, and lose a lot where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.load(ENGLISH, TINY.vocab)


@pytest.fixture(scope="module")
def trained(corpus) -> Tokenizer:
    return corpus.tokenizer
