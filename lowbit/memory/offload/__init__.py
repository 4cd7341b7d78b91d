"""Moving to host memory or to files what is not needed now: activations between forward and backward."""

from lowbit.memory.offload.activations import Offloading, offload_activations
from lowbit.memory.offload.bandwidth import Bandwidth, bandwidth

__all__ = ["Bandwidth", "Offloading", "bandwidth", "offload_activations"]
