"""Models whose export tests many recipes at once."""

import torch
from torch import nn

import lowbit as lb
from lowbit.recipes import recipe

__all__ = ["Many", "Words", "quantized"]


class Many(nn.Module):
    """Layers side by side."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return [layer(x) for layer in self.layers]


class Words(nn.Module):
    """Embeddings side by side, attention and a head."""

    def __init__(self, tables):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 64) for _ in range(tables))
        self.block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu")
        self.out = nn.Linear(64, 10)

    def forward(self, ids):
        return self.out(self.block(torch.stack([table(ids) for table in self.tables]).sum(0)))


def quantized(model, chosen, batches):
    """The model, quantized to nearest with a recipe or recipes by layer; static scales come from the batches."""
    rows = [recipe(row) for row in chosen.values()] if isinstance(chosen, dict) else [recipe(chosen)]
    options = {"method": "nearest", "progress": False, "skip": ()}
    static = any(row.static for row in rows)
    lb.quantize_(model, chosen, lb.calibrate(model, chosen, batches, **options) if static else None, skip=())
    return model
