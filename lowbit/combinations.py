"""Techniques that cannot be combined: which, why, and what to do instead. Errors and docs/memory.md have these words.

The code that refuses a pair raises ``refusal(name, who)``; a pair that it cannot notice says so in the table.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COMBINATIONS", "Combination", "refusal"]


class Combination(NamedTuple):
    """``noticed``: whether the second technique raises where the first is on; else nothing tells."""

    first: str
    second: str
    why: str
    instead: str
    noticed: bool = True

    @property
    def words(self) -> str:
        return f"{self.first} cannot be combined with {self.second}: {self.why}; {self.instead}"


_IN_BACKWARD = "an optimizer that steps in the backward pass (lb.optim.in_backward_)"

COMBINATIONS = {
    "in_backward ddp": Combination(
        _IN_BACKWARD, "DistributedDataParallel",
        "gradients are reduced after they are complete, and a step would see one process' gradients",
        "shard the model with FSDP2 (fully_shard), whose gradients are complete when reduced",
    ),
    "in_backward processes": Combination(
        _IN_BACKWARD, "whole parameters in several processes", "each would step by one process' gradient",
        "shard the model with FSDP2 (fully_shard) first",
    ),
    "in_backward offload": Combination(
        _IN_BACKWARD, "lb.optim.offload_", "states are moved around step(), which does nothing here",
        "use one of them; offload_(optimizer, where, gradients=True) moves gradients too",
    ),
    "in_backward scaler": Combination(
        _IN_BACKWARD, "LossScaler", "parameters have moved by scaled gradients before anything can look at these",
        "train in bf16, which needs no scaler, or step after the backward pass",
    ),
    "in_backward clip": Combination(
        _IN_BACKWARD, "lb.optim.clip_grad_norm_", "gradients are gone when their norm is asked for",
        "step after the backward pass, with lb.optim.offload_(optimizer, where, gradients=True) where memory is short",
    ),
    "in_backward torch clip": Combination(
        _IN_BACKWARD, "torch.nn.utils.clip_grad_norm_", "it finds no gradients, and answers 0",
        "use lb.optim.clip_grad_norm_, which raises, and step after the backward pass", noticed=False,
    ),
    "in_backward accumulation": Combination(
        _IN_BACKWARD, "accumulation of gradients", "each backward pass is a step",
        "step after the backward pass, or take smaller batches with a smaller learning rate",
    ),
    "offload dtensor": Combination(
        "lb.optim.offload_", "DTensors (FSDP2)", "their states are sharded already",
        "use fully_shard(..., offload_policy=CPUOffloadPolicy())",
    ),
    "offload shard": Combination(
        "lb.optim.offload_", "lb.distributed.shard_ by zero1, zero2, zero3 or hsdp", "states are sharded instead",
        "call lb.optim.unoffload_ first, and shard_(..., offload=True) to keep shares in host memory",
    ),
    "tied blocks": Combination(
        "a weight that several blocks share, or a block and the rest of the model",
        "lb.distributed.shard_ by zero2, zero3 or hsdp",
        "each block is gathered and freed on its own, and would free the other's weight",
        "take strategy='ddp' or 'zero1', or give blocks=[...] of which one module holds all that share the weight "
        "(blocks=[]: the model is one)",
    ),
    "offload gradients torch clip": Combination(
        "lb.optim.offload_(gradients=True) on CUDA", "torch.nn.utils.clip_grad_norm_",
        "gradients are on the host, and it finds none", "use lb.optim.clip_grad_norm_", noticed=False,
    ),
    "offload activations shard": Combination(
        "lb.memory.offload_activations", "lb.distributed.shard_ by zero2, zero3 or hsdp",
        "no plan predicts what FSDP2 gathers while activations come back",
        "take strategy='ddp' or 'zero1', or keep activations in memory",
    ),
    "stream processes": Combination(
        "lb.memory.stream_blocks_", "several processes of a plan", "each would move the whole model",
        "share it with strategy='zero3', whose blocks are gathered one at a time, or plan for a single process",
    ),
    "stochastic fp32": Combination(
        "master='stochastic'", "weights in fp32", "it is of weights in bf16, which random bits round",
        "require 'bf16' or a recipe with it",
    ),
    "stochastic fp16": Combination(
        "master='stochastic'", "weights in fp16", "of these the optimizer keeps masters in fp32 alone",
        "leave 'stochastic' out, or call model.bfloat16() first",
    ),
    "stream dtensor": Combination(
        "lb.memory.stream_blocks_", "DTensors (FSDP2)", "their shards are gathered and freed by FSDP2 itself",
        "use fully_shard(..., offload_policy=CPUOffloadPolicy())",
    ),
    "segments compile": Combination(
        'segments of checkpoints ("sqrt", "segments:k") and checkpoint_(to=...)',
        "torch.compile(fullgraph=True)",
        "compiled code recomputes one module at a time, and moves nothing (without fullgraph=True they run uncompiled)",
        'use a policy of single modules such as "block", without to=..., or uncheckpoint_ before torch.compile',
    ),
    "checkpoint func": Combination(
        "lb.memory.checkpoint_", "torch.func (grad, vmap, jvp, jacrev and so on) and forward-mode derivatives",
        "the second run of a block is outside of the transform, whose tensors are gone by then",
        "call lb.memory.uncheckpoint_(model) first, or take gradients by backward(), torch.autograd.grad or "
        "torch.autograd.functional; under torch.no_grad() vmap runs",
    ),
    "wrapped estimate": Combination(
        "DistributedDataParallel or FullyShardedDataParallel", "lb.estimate",
        "they exchange gradients with data, and an estimate has none",
        "estimate the module within, model.module; DistributedDataParallel holds one more copy of the gradients, "
        "unless gradient_as_bucket_view=True",
    ),
    "dtensor estimate": Combination(
        "DTensors (FSDP2, tensor parallelism)", "lb.estimate", "an estimate is one of whole tensors",
        "estimate the model before fully_shard or parallelize_module; of what is sharded each process holds its part",
    ),
    "stream estimate": Combination(
        "lb.memory.stream_blocks_", "lb.estimate", "no estimate follows weights that come and go",
        "estimate the model without it, and take off the weights of all its blocks but two",
    ),
    "offload estimate": Combination(
        "lb.optim.offload_", "lb.estimate", "an estimate has no states with data, which could be moved",
        "estimate with the plain optimizer, and take off its states (by_kind says their bytes)",
    ),
    "memory strategy": Combination(
        "lowbit train --memory", "--strategy, several processes", "it plans a run in one process",
        "train in one process, without torchrun; lowbit fit --gpus plans runs of several",
    ),
    "tail strategy": Combination(
        "lowbit train --tail", "--strategy, several processes", "it changes what a state holds in the last steps",
        "leave --tail out, or train in one process, without torchrun",
    ),
    "watch strategy": Combination(
        "lowbit train --watch", "--strategy, several processes", "it looks at the casts of one process",
        "leave --watch out, or train in one process, without torchrun",
    ),
    "profile strategy": Combination(
        "lowbit train --profile-memory", "--strategy, several processes", "it profiles one process",
        "leave --profile-memory out, or train in one process, without torchrun",
    ),
    "checkpointing memory": Combination(
        "lowbit train --checkpointing", "--memory", "checkpointing is what a plan chooses",
        "leave --checkpointing out",
    ),
    "tail memory": Combination(
        "lowbit train --tail", "--memory", "it computes the last steps without codes, in more memory than is planned",
        "leave one of the two out",
    ),
    "watch memory": Combination(
        "lowbit train --watch", "--memory", "steps that are watched hold more than is planned",
        "leave one of the two out",
    ),
    "explain memory": Combination(
        "lowbit train --explain", "--memory", "it is of runs without a plan",
        "leave --memory out, or ask lowbit fit demo --memory",
    ),
    "profile profiler": Combination(
        "lb.memory.profile", "torch.profiler or another lb.memory.profile", "torch's profiler cannot run twice",
        "end the other one first",
    ),
}  # fmt: skip


def refusal(name: str, who: str) -> str:
    """The words of an error that ``who`` raises for a pair of the table."""
    return f"{who}: {COMBINATIONS[name].words}"
