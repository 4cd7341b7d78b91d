"""Distributed training: sharding strategies, compressed communication and checkpoints.

See docs/distributed.md.
"""

from lowbit.distributed.all_gather import all_gather_
from lowbit.distributed.checkpoint import load, save
from lowbit.distributed.deepspeed import FromDeepSpeed, from_deepspeed
from lowbit.distributed.hooks import compress_gradients_, order_gradients_
from lowbit.distributed.processes import Processes, start
from lowbit.distributed.strategies import STRATEGIES, Strategy, shard_
from lowbit.distributed.traffic_meter import Traffic, traffic

__all__ = [
    "STRATEGIES",
    "FromDeepSpeed",
    "Processes",
    "Strategy",
    "Traffic",
    "all_gather_",
    "compress_gradients_",
    "from_deepspeed",
    "load",
    "order_gradients_",
    "save",
    "shard_",
    "start",
    "traffic",
]  # fmt: skip
