"""Calibration: chooses quantized weights and static input scales from the inputs of the layers."""

from lowbit.calibrate.bias import correct_bias_
from lowbit.calibrate.calibration import Calibration
from lowbit.calibrate.choice import register_method
from lowbit.calibrate.methods import METHODS, Method
from lowbit.calibrate.run import calibrate
from lowbit.calibrate.transforms import MAPS, TRANSFORMS, Map, Transform
from lowbit.observers import OBSERVERS, Observer

__all__ = [
    "MAPS",
    "METHODS",
    "OBSERVERS",
    "TRANSFORMS",
    "Calibration",
    "Map",
    "Method",
    "Observer",
    "Transform",
    "calibrate",
    "correct_bias_",
    "register_method",
]  # fmt: skip
