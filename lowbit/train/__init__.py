"""Training in low precision: ``prepare_`` a model, train it as usual, ``convert_`` it back."""

from lowbit.train.linear import TrainLinear, convert_, prepare_

__all__ = ["TrainLinear", "convert_", "prepare_"]
