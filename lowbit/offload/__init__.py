"""Offload of activations between forward and backward, and of weights of blocks between their uses."""

from lowbit.offload.activations import Offloading, offload_activations
from lowbit.offload.streaming import stream_blocks_, unstream_

__all__ = ["Offloading", "offload_activations", "stream_blocks_", "unstream_"]
