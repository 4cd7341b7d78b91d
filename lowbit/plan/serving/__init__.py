"""``lb.fit_generation``: the settings for text generation with the least loss that fit a memory budget.

``settings`` has the table of choices, ``decoders`` the supported models and ``layers`` their layers that can be
quantized. ``losses`` and ``predict`` estimate the loss and the memory of each choice, and ``search`` finds the best.
``plan`` is the result, and ``run`` generates with it.
"""

from lowbit.plan.serving.decoders import DECODERS, Decoder
from lowbit.plan.serving.plan import GenerationPlan
from lowbit.plan.serving.run import GenerationRun
from lowbit.plan.serving.search import fit_generation
from lowbit.plan.serving.settings import CHOICES, ServingSettings

__all__ = ["CHOICES", "DECODERS", "Decoder", "GenerationPlan", "GenerationRun", "ServingSettings", "fit_generation"]
