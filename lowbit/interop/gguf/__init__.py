"""GGUF files, which llama.cpp and programs that are built on it run. Codes and scales are unchanged."""

from lowbit.interop.gguf.adapters import write_adapters
from lowbit.interop.gguf.architectures import ARCHITECTURES, Architecture, Change, register_architecture
from lowbit.interop.gguf.blocks import BLOCK_TYPES, block_type
from lowbit.interop.gguf.header import detect
from lowbit.interop.gguf.reading import contents, read
from lowbit.interop.gguf.tokens import tokenizer
from lowbit.interop.gguf.vocabulary import PRE_TOKENIZERS
from lowbit.interop.gguf.writing import refuses, write

__all__ = [
    "ARCHITECTURES", "BLOCK_TYPES", "PRE_TOKENIZERS", "Architecture", "Change", "block_type", "contents",
    "detect", "read", "refuses", "register_architecture", "tokenizer", "write", "write_adapters",
]  # fmt: skip
