"""Observers: static scales of activations from the ranges of a layer's inputs, for calibrate and qat.

``quantize`` computes the scale and the zero point from the two ends of a range, so there is only one such rule.
"""

from lowbit.observers.ranges import MOMENTUM, Ranges
from lowbit.observers.table import OBSERVERS, Observer, find_observer

__all__ = ["MOMENTUM", "OBSERVERS", "Observer", "Ranges", "find_observer"]
