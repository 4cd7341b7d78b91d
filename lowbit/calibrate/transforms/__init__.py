"""Transforms that make a model easier to quantize without changing its output."""

from lowbit.calibrate.transforms.base import TRANSFORMS, Transform, transform_
from lowbit.calibrate.transforms.maps import MAPS, Map

__all__ = ["MAPS", "TRANSFORMS", "Map", "Transform", "transform_"]
