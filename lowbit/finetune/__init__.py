"""Fine-tuning of models of transformers on a text, within a memory budget."""

from lowbit.finetune.session import Session, TuneConfig, add_adapters
from lowbit.finetune.texts import Document, read, split

__all__ = ["Document", "Session", "TuneConfig", "add_adapters", "read", "split"]
