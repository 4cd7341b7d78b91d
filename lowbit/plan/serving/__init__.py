"""A budget in bytes goes in, the generation of least loss that fits comes out.

``settings`` is the table of what may be chosen, ``decoders`` says which models generate and how, ``layers`` what of
them can be quantized, ``losses`` what each choice loses and ``predict`` what it holds; ``search`` takes the best, and
``plan`` is the result.
"""

from lowbit.plan.serving.decoders import DECODERS, Decoder
from lowbit.plan.serving.plan import GenerationPlan
from lowbit.plan.serving.search import serve
from lowbit.plan.serving.settings import Settings

__all__ = ["DECODERS", "Decoder", "GenerationPlan", "Settings", "serve"]
