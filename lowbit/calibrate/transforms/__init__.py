"""The table of transforms: what is done to a model, without changing what it computes, so that it quantizes better."""

from lowbit.calibrate.transforms.base import TRANSFORMS, Transform, transform_
from lowbit.calibrate.transforms.maps import MAPS, Map

__all__ = ["MAPS", "TRANSFORMS", "Map", "Transform", "transform_"]
