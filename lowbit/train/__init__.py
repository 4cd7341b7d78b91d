"""Training in low precision: ``prepare_`` a model, train it as usual, ``convert_`` it back."""

from lowbit.train.linear import TrainLinear, convert_, prepare_, state
from lowbit.train.loss_scale import LossScaler
from lowbit.train.state import State

__all__ = ["LossScaler", "State", "TrainLinear", "convert_", "prepare_", "state"]
