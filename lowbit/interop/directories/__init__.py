"""Hugging Face directories with quantized matrices, in the layouts of several programs, with unchanged codes."""

from lowbit.interop.directories.reading import contents, read
from lowbit.interop.directories.rules import Rules
from lowbit.interop.directories.writing import Layout, write

__all__ = ["Layout", "Rules", "contents", "read", "write"]
