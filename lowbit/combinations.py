"""The table of techniques that cannot be combined, with reasons and remedies; source of errors and docs/memory.md.

Code that detects a pair raises an error with ``refusal(name, who)``.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COMBINATIONS", "Combination", "refusal"]


class Combination(NamedTuple):
    """Two techniques that cannot be combined."""

    first: str
    second: str
    why: str
    #: The remedy.
    instead: str
    #: Whether an error is raised.
    raises: bool = True

    @property
    def words(self) -> str:
        """The error message without its caller."""
        return f"{self.first} cannot be combined with {self.second}: {self.why}; {self.instead}"


_IN_BACKWARD = "an optimizer that steps in the backward pass (lb.optim.in_backward_)"

COMBINATIONS = {
    "base weights": Combination(
        "a quantized base", "training of all weights", "codes have no gradients",
        "train adapters: lb.fit(..., adapters=16), or freeze the weights", raises=False,
    ),
    "base recipe": Combination(
        "a quantized base", "a training recipe such as fp8", "both quantize the frozen layers",
        "use one of them",
    ),
    "fused loss fully_shard": Combination(
        "lb.memory.fuse_loss_ of a hand-written model", "fully_shard",
        "it frees the weight of the last layer before the loss reads it",
        "call lowbit.memory.unfuse_loss_(model), or train with DistributedDataParallel or ZeRO-1",
    ),
    "in_backward ddp": Combination(
        _IN_BACKWARD, "DistributedDataParallel",
        "the step would run before gradients are reduced over processes",
        "shard the model with FSDP2 (fully_shard), which reduces gradients before the step",
    ),
    "in_backward processes": Combination(
        _IN_BACKWARD, "unsharded parameters in several processes",
        "each process would step with its own gradient only",
        "shard the model with FSDP2 (fully_shard) first",
    ),
    "in_backward offload": Combination(
        _IN_BACKWARD, "lb.optim.offload_", "states are loaded and offloaded in step(), which does nothing here",
        "use one of them; offload_(optimizer, to, gradients=True) also offloads gradients",
    ),
    "in_backward scaler": Combination(
        _IN_BACKWARD, "LossScaler", "parameters are updated before scaled gradients can be checked",
        "train in bf16, which needs no scaler, or step after the backward pass",
    ),
    "in_backward clip": Combination(
        _IN_BACKWARD, "lb.optim.clip_grad_norm_", "gradients are freed before their norm is computed",
        "step after the backward pass, with lb.optim.offload_(optimizer, to, gradients=True) if memory is short",
    ),
    "in_backward torch clip": Combination(
        _IN_BACKWARD, "torch.nn.utils.clip_grad_norm_", "it finds no gradients, and returns 0",
        "use lb.optim.clip_grad_norm_, which raises, and step after the backward pass", raises=False,
    ),
    "in_backward accumulation": Combination(
        _IN_BACKWARD, "gradient accumulation", "each backward pass is a step",
        "step after the backward pass, or use smaller batches with a smaller learning rate",
    ),
    "offload dtensor": Combination(
        "lb.optim.offload_", "DTensors (FSDP2)", "their states are sharded already",
        "use fully_shard(..., offload_policy=CPUOffloadPolicy())",
    ),
    "offload shard": Combination(
        "lb.optim.offload_", "lb.distributed.shard_ by zero1 to hsdp", "states are sharded instead",
        "call lb.optim.unoffload_ first; shard_(..., offload=True) keeps shards in host memory",
    ),
    "tied blocks": Combination(
        "a weight that several blocks share, or a block and the rest of the model",
        "lb.distributed.shard_ by zero2, zero3 or hsdp",
        "each block is gathered and freed separately, and would free the weight of the other",
        "use strategy='ddp', 'zero1' or 'zero2-replicated', or pass blocks=[...] with a module that contains all users "
        "of the weight (blocks=[]: the whole model)",
    ),
    "offload gradients torch clip": Combination(
        "lb.optim.offload_(gradients=True) on CUDA", "torch.nn.utils.clip_grad_norm_",
        "gradients are in host memory, and it finds none", "use lb.optim.clip_grad_norm_", raises=False,
    ),
    "offload activations shard": Combination(
        "lb.memory.offload_activations", "lb.distributed.shard_ by zero2, zero3 or hsdp",
        "plans do not predict the memory of FSDP2's all-gathers while activations are loaded",
        "use strategy='ddp', 'zero1' or 'zero2-replicated', or keep activations in memory",
    ),
    "stream processes": Combination(
        "lb.memory.stream_blocks_", "a plan for several processes", "each process would move the whole model",
        "shard it with strategy='zero3', which gathers one block at a time, or plan for a single process",
    ),
    "stochastic fp32": Combination(
        "master='stochastic'", "weights in fp32", "stochastic rounding is for weights in bf16",
        "require 'bf16' or a recipe with bf16 weights",
    ),
    "stochastic fp16": Combination(
        "master='stochastic'", "weights in fp16", "for fp16 weights the optimizer only supports fp32 masters",
        "drop 'stochastic', or call model.bfloat16() first",
    ),
    "stream dtensor": Combination(
        "lb.memory.stream_blocks_", "DTensors (FSDP2)", "FSDP2 gathers and frees their shards itself",
        "use fully_shard(..., offload_policy=CPUOffloadPolicy())",
    ),
    "segments compile": Combination(
        'segments of checkpoints ("sqrt", "segments:k") and checkpoint_(to=...)',
        "torch.compile(fullgraph=True)",
        "compiled code recomputes one module at a time, without offload (without fullgraph=True they run uncompiled)",
        'use a policy of single modules such as "block", without to=..., or uncheckpoint_ before torch.compile',
    ),
    "checkpoint func": Combination(
        "lb.memory.checkpoint_", "torch.func (grad, vmap, jvp, jacrev and so on) and forward-mode derivatives",
        "blocks are recomputed after the transform has ended",
        "call lb.memory.uncheckpoint_(model) first, or compute gradients with backward(), torch.autograd.grad or "
        "torch.autograd.functional; vmap works under torch.no_grad()",
    ),
    "wrapped estimate": Combination(
        "DistributedDataParallel or FullyShardedDataParallel", "lb.estimate",
        "they exchange gradients, which have no data in an estimate",
        "estimate model.module; DistributedDataParallel allocates one more copy of the gradients, unless "
        "gradient_as_bucket_view=True",
    ),
    "dtensor estimate": Combination(
        "DTensors (FSDP2, tensor parallelism)", "lb.estimate", "an estimate needs unsharded tensors",
        "estimate the model before fully_shard or parallelize_module; each process then holds its share of sharded "
        "tensors",
    ),
    "stream estimate": Combination(
        "lb.memory.stream_blocks_", "lb.estimate", "an estimate does not track weights that are loaded and freed",
        "estimate the model without it, and subtract the weights of all blocks except two",
    ),
    "offload estimate": Combination(
        "lb.optim.offload_", "lb.estimate", "states have no data in an estimate, so they cannot be moved",
        "estimate with the plain optimizer, and subtract its states (by_kind has their bytes)",
    ),
    "memory strategy": Combination(
        "lowbit train --memory without MODEL", "--strategy, several processes", "it plans a run in one process",
        "train in one process, without torchrun; lowbit train MODEL and lowbit fit --gpus plan for several",
    ),
    "tail strategy": Combination(
        "lowbit train --tail", "--strategy, several processes", "it changes the training state in the last steps",
        "drop --tail, or train in one process, without torchrun",
    ),
    "watch strategy": Combination(
        "lowbit train --watch", "--strategy, several processes", "it watches the casts of one process",
        "drop --watch, or train in one process, without torchrun",
    ),
    "profile strategy": Combination(
        "lowbit train --profile-memory", "--strategy, several processes", "it profiles one process",
        "drop --profile-memory, or train in one process, without torchrun",
    ),
    "checkpointing memory": Combination(
        "lowbit train --checkpointing", "--memory", "the plan chooses checkpointing",
        "drop --checkpointing",
    ),
    "tail memory": Combination(
        "lowbit train --tail", "--memory", "its last steps are not quantized and need more memory than is planned",
        "drop one of the two",
    ),
    "watch memory": Combination(
        "lowbit train --watch", "--memory", "watched steps need more memory than is planned",
        "drop one of the two",
    ),
    "explain memory": Combination(
        "lowbit train --explain", "--memory", "it explains runs without a plan",
        "drop --memory, or run lowbit fit demo --memory",
    ),
    "profile profiler": Combination(
        "lb.memory.profile", "torch.profiler or another lb.memory.profile", "torch's profiler cannot be nested",
        "end the other profiler first",
    ),
}  # fmt: skip


def refusal(name: str, who: str) -> str:
    """The error message that ``who`` raises for a pair of the table."""
    return f"{who}: {COMBINATIONS[name].words}"
