"""Low-bit numbers for PyTorch, bit-identical on every backend.

``import lowbit as lb``; README.md is a tour, docs/numerics.md specifies the arithmetic.

This package has the functions on tensors and on deployed models, their types, and the tables of names. Submodules have
the rest: ``nn`` layers, ``train`` and ``qat`` training, ``optim`` optimizers, ``memory`` checkpointing and peak memory,
``convert`` the table of layer classes, ``recipes`` per-layer recipes. ``distributed`` is imported on first use, because
that takes a second.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from lowbit import autograd as _autograd  # noqa: F401  (registers gradients)
from lowbit import backends as _backends  # noqa: F401  (registers torch.ops.lowbit)
from lowbit import checkout as _checkout  # noqa: F401  (finds bench and kernels)
from lowbit import convert, memory, nn, optim, qat, train
from lowbit import integrations as _integrations  # noqa: F401  (registers lowbit's quantizer with transformers)
from lowbit._version import __version__
from lowbit.backends.registry import BackendError, impls, use_backend
from lowbit.calibrate import METHODS, Calibration, Method, calibrate, correct_bias_, register_method
from lowbit.convert import (
    Report,
    dequantize_,
    fold_,
    fuse_requantize_,
    prepack_,
    quantize_,
    unfuse_requantize_,
    unprepack_,
)
from lowbit.formats import FORMATS, Format, float_format
from lowbit.functional import (
    adamw_,
    decode,
    encode,
    explain,
    fake_quantize,
    hadamard,
    linear,
    pack,
    quantize,
    rms_norm,
    rotary,
    round_to,
    scaled_mm,
    swiglu,
    unpack,
)
from lowbit.interop import export, load_model
from lowbit.out_of_core import quantize_files
from lowbit.plan import Sensitivity, estimate, fit, fit_generation, sensitivity
from lowbit.recipes import RECIPES, Cast, Gemm, Recipe, recipe, register_recipe
from lowbit.rounding import Rounding
from lowbit.scaling import Scheme, scheme
from lowbit.serialize import save_model
from lowbit.tensor.quantized import Quantized

if TYPE_CHECKING:
    from lowbit import distributed

__all__ = [
    "FORMATS",
    "METHODS",
    "RECIPES",
    "BackendError",
    "Calibration",
    "Cast",
    "Format",
    "Gemm",
    "Method",
    "Quantized",
    "Recipe",
    "Report",
    "Rounding",
    "Scheme",
    "Sensitivity",
    "__version__",
    "adamw_",
    "calibrate",
    "convert",
    "correct_bias_",
    "decode",
    "dequantize_",
    "distributed",
    "encode",
    "estimate",
    "explain",
    "export",
    "fake_quantize",
    "fit",
    "fit_generation",
    "float_format",
    "fold_",
    "fuse_requantize_",
    "hadamard",
    "impls",
    "linear",
    "load_model",
    "memory",
    "nn",
    "optim",
    "pack",
    "prepack_",
    "qat",
    "quantize",
    "quantize_",
    "quantize_files",
    "recipe",
    "register_method",
    "register_recipe",
    "rms_norm",
    "rotary",
    "round_to",
    "save_model",
    "scaled_mm",
    "scheme",
    "sensitivity",
    "swiglu",
    "train",
    "unfuse_requantize_",
    "unpack",
    "unprepack_",
    "use_backend",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "distributed":
            return _import_module("lowbit.distributed")
        raise AttributeError(f"module 'lowbit' has no attribute {name!r}")
