"""The table of methods that choose codes and scales for a weight. One file here is one method (or a family)."""

from lowbit.calibrate.methods.base import METHODS, Method, default_method

__all__ = ["METHODS", "Method", "default_method"]
