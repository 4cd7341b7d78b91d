"""``save_model`` and ``load_model``: a directory with ``lowbit.json`` and one safetensors file.

Each save writes the weights to a new file name. It then replaces ``lowbit.json``, which has that name and the file's
SHA-256, in one atomic step. An interrupted save therefore leaves the previous model intact. A finished save removes
the weights of the previous config. Files of a killed save (``weights-*.safetensors`` that no config names,
``.lowbit.json.*.tmp``) are not removed, because another save may be writing them. Loading checks files, hash, layers,
names and shapes before it changes the model.

The file has the tensors of ``state_dict``. ``codes`` of a ``QuantLinear`` are packed uint8 rows (docs/numerics.md
section 8). Scales are stored as the integers of their bit patterns.
"""

from lowbit.serialize.empty import empty_weights
from lowbit.serialize.loading import load_model
from lowbit.serialize.saving import save_model

__all__ = ["empty_weights", "load_model", "save_model"]
