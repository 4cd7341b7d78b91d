"""Static scales of activations: ranges of the numbers that a layer is given, for calibrate and qat alike.

The scale and the zero point of a range are those that ``quantize`` makes of its two ends, so that there is one rule.
"""

from lowbit.observers.ranges import MOMENTUM, Ranges
from lowbit.observers.table import OBSERVERS, Observer, find_observer

__all__ = ["MOMENTUM", "OBSERVERS", "Observer", "Ranges", "find_observer"]
