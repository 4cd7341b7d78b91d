"""Calibration: codes and scales of weights, and static scales of inputs, chosen by looking at what layers are given."""

from lowbit.calibrate.bias import correct_bias_
from lowbit.calibrate.calibration import Calibration
from lowbit.calibrate.choice import register_method
from lowbit.calibrate.files import quantize_files
from lowbit.calibrate.methods import METHODS, Method
from lowbit.calibrate.observers import OBSERVERS, Observer
from lowbit.calibrate.run import calibrate
from lowbit.calibrate.scores import Sensitivity
from lowbit.calibrate.sensitivity import sensitivity
from lowbit.calibrate.transforms import MAPS, TRANSFORMS, Map, Transform

__all__ = [
    "MAPS",
    "METHODS",
    "OBSERVERS",
    "TRANSFORMS",
    "Calibration",
    "Map",
    "Method",
    "Observer",
    "Sensitivity",
    "Transform",
    "calibrate",
    "correct_bias_",
    "quantize_files",
    "register_method",
    "sensitivity",
]  # fmt: skip
