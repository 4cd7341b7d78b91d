"""A budget in bytes goes in, the generation of least loss that fits comes out.

``settings`` is the table of what may be chosen, ``decoders`` says which models generate and how, ``layers`` what of
them can be quantized, ``losses`` what each choice loses and ``predict`` what it holds; ``search`` takes the best, and
``plan`` is the result, by which ``run`` generates.
"""

from lowbit.plan.serving.decoders import DECODERS, Decoder
from lowbit.plan.serving.plan import GenerationPlan
from lowbit.plan.serving.run import GenerationRun
from lowbit.plan.serving.search import fit_generation
from lowbit.plan.serving.settings import CHOICES, ServingSettings

__all__ = ["CHOICES", "DECODERS", "Decoder", "GenerationPlan", "GenerationRun", "ServingSettings", "fit_generation"]
