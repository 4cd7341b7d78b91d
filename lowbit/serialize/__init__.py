"""save_model and load_model: a directory with ``lowbit.json`` and one safetensors file.

Each save writes a weights' file with a name of its own. ``lowbit.json``, which names it with its SHA-256, is replaced
last and in one step: a save that is interrupted anywhere leaves the model that was there before. A save then removes
the weights that the config before it named. What a killed save leaves (a ``weights-*.safetensors`` that no config
names, ``.lowbit.json.*.tmp``) stays, because another save may be writing it. Loading checks everything (files, hash,
layers, names, shapes) before it touches the model.

Tensors are those of ``state_dict``: QuantLinear's ``codes`` are packed rows of uint8 (docs/numerics.md section 8), its
scales the integers of their bits.
"""

from lowbit.serialize.empty import empty_weights
from lowbit.serialize.loading import load_model
from lowbit.serialize.saving import save_model

__all__ = ["empty_weights", "load_model", "save_model"]
