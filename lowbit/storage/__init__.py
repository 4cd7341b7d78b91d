"""Bytes outside of tensors: scratch directories, mapped files, offload targets, and what goes to and fro."""
