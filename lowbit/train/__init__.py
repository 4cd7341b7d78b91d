"""Training in mixed and low precision: ``mixed_`` or ``prepare_`` a model, train it as usual, change it back."""

from lowbit.train.activations import compress_activations_, uncompress_activations_
from lowbit.train.attention import TrainMultiheadAttention
from lowbit.train.fused import fuse_layers_, unfuse_layers_
from lowbit.train.linear import TrainLinear
from lowbit.train.loss_scale import LossScaler
from lowbit.train.mixed import mixed_, unmixed_
from lowbit.train.nonfinite import find_nonfinite
from lowbit.train.preference import dpo_loss, group_advantages, grpo_loss, kto_loss, orpo_loss
from lowbit.train.prepare import convert_, prepare_, state
from lowbit.train.states import State
from lowbit.train.watcher import Watch, watch

__all__ = [
    "LossScaler",
    "State",
    "TrainLinear",
    "TrainMultiheadAttention",
    "Watch",
    "compress_activations_",
    "convert_",
    "dpo_loss",
    "find_nonfinite",
    "fuse_layers_",
    "group_advantages",
    "grpo_loss",
    "kto_loss",
    "mixed_",
    "orpo_loss",
    "prepare_",
    "state",
    "uncompress_activations_",
    "unfuse_layers_",
    "unmixed_",
    "watch",
]
