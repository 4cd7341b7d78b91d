"""Moving to host memory or to files what is not needed now: activations between forward and backward."""

from lowbit.memory.offload.activations import Offloading, offload_activations

__all__ = ["Offloading", "offload_activations"]
