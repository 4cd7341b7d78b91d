"""The layouts of programs that quantize models and have no package of their own here. One file per program."""

from lowbit.interop.producers.awq import AWQ
from lowbit.interop.producers.fp8 import FP8
from lowbit.interop.producers.gptq import GPTQ
from lowbit.interop.producers.modelopt import ModelOpt
from lowbit.interop.producers.mxfp4 import MXFP4

__all__ = ["AWQ", "FP8", "GPTQ", "MXFP4", "ModelOpt"]
