"""save_model and load_model: a directory with ``config.json`` and one safetensors file.

The weights' file is named after its content, and ``config.json``, which names it with its SHA-256, is replaced last and
in one step: a save that is interrupted anywhere leaves the model that was there before. A save removes one file, the
weights that the config before it named. What a killed save leaves (``.weights.PID.tmp``; ``.tmpXXXXXX``, in which
safetensors writes that; ``.config.json.PID.tmp``; weights that no config names) stays, because it cannot be told from
another program's files. Loading checks everything (files, hash, layers, names, shapes) before it touches the model.

Tensors are those of ``state_dict``: QuantLinear's ``codes`` are packed rows of uint8 (docs/numerics.md section 8), its
scales the integers of their bits.
"""

from lowbit.serialize.loading import load_model
from lowbit.serialize.saving import save_model

__all__ = ["load_model", "save_model"]
