"""Models in the formats of other programs, with codes and scales unchanged. One folder or file per format."""

from lowbit.interop.files import Refusal
from lowbit.interop.table import FORMATS, ModelFormat, export, format_of, load_model, tokenizer_of

__all__ = ["FORMATS", "ModelFormat", "Refusal", "export", "format_of", "load_model", "tokenizer_of"]
