"""The table of methods that quantize weights. Each file is one method or family."""

from lowbit.calibrate.methods.base import METHODS, Method, default_method

__all__ = ["METHODS", "Method", "default_method"]
