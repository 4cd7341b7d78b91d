"""Calibration: codes and scales of weights, chosen by looking at what the layers are given."""

from lowbit.calibrate.calibration import Calibration
from lowbit.calibrate.methods import METHODS, Method
from lowbit.calibrate.run import calibrate

__all__ = ["METHODS", "Calibration", "Method", "calibrate"]
