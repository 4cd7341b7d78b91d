"""Hugging Face directories with quantized matrices, in the layouts of several programs, read with their codes."""

from lowbit.interop.directories.reading import contents, read
from lowbit.interop.directories.rules import Rules

__all__ = ["Rules", "contents", "read"]
