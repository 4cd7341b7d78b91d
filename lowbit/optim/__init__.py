"""Low-bit optimizers: ``torch.optim.Optimizer`` classes whose steps are bit-identical on any sharding."""

from lowbit.optim.adafactor import Adafactor
from lowbit.optim.adamw import AdamW, AdamW4bit, AdamW8bit
from lowbit.optim.apollo import Apollo, Apollo8bit
from lowbit.optim.base import Optimizer
from lowbit.optim.galore import GaLore, GaLore8bit
from lowbit.optim.in_backward import in_backward_
from lowbit.optim.lion import Lion, Lion4bit, Lion8bit
from lowbit.optim.muon import Muon, Muon8bit
from lowbit.optim.offload import clip_grad_norm_, offload_, unoffload_
from lowbit.optim.sgd import SGD, SGD8bit
from lowbit.optim.states import STATES, States
from lowbit.optim.watch import saturation

__all__ = [
    "SGD",
    "STATES",
    "Adafactor",
    "AdamW",
    "AdamW4bit",
    "AdamW8bit",
    "Apollo",
    "Apollo8bit",
    "GaLore",
    "GaLore8bit",
    "Lion",
    "Lion4bit",
    "Lion8bit",
    "Muon",
    "Muon8bit",
    "Optimizer",
    "SGD8bit",
    "States",
    "clip_grad_norm_",
    "in_backward_",
    "offload_",
    "saturation",
    "unoffload_",
]
