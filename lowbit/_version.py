"""The version; it stands here alone."""

__version__ = "0.2.0.dev0"
