"""Models in the formats of other programs, with codes and scales unchanged. One folder or file per format."""

from lowbit.interop.exportable import exportable
from lowbit.interop.files import Contents, Refusal
from lowbit.interop.modules import adopt_
from lowbit.interop.table import (
    FORMATS,
    KINDS,
    WRITTEN,
    ModelFormat,
    export,
    find_format,
    format_of,
    load_model,
    tokenizer_of,
)

__all__ = [
    "FORMATS", "KINDS", "WRITTEN", "Contents", "ModelFormat", "Refusal", "adopt_", "export", "exportable",
    "find_format", "format_of", "load_model", "tokenizer_of",
]  # fmt: skip
