"""Sharding strategies for distributed training (DataParallel, DDP, ZeRO, FSDP, HSDP), and ``shard_``.

Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054; Zhao et al., "PyTorch FSDP", arXiv 2304.11277.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lowbit.combinations import refusal
from lowbit.distributed.all_gather import gathered_layers
from lowbit.distributed.arguments import Arguments, bucket_in, check_options, prefetch_in
from lowbit.distributed.fully import fully_shard_
from lowbit.distributed.parameters import named
from lowbit.distributed.replicated import ShardedGradients
from lowbit.distributed.zero import share_states_
from lowbit.name_tables import did_you_mean
from lowbit.optim import masters
from lowbit.optim.offload import OFFLOADED

__all__ = ["STRATEGIES", "Strategy", "shard_"]


class Strategy(NamedTuple):
    """A sharding strategy, a row of ``STRATEGIES``.

    Attributes:
        name: Key of ``STRATEGIES``.
        about: Description.
        parameters: Whether parameters are sharded between steps.
        gradients: Whether gradients are sharded between steps.
        states: Whether optimizer states are sharded.
        gathered: Full parameters that a process has in addition to its shard during forward and backward: ``""``,
            ``"all"`` or ``"a block"``.
        gathers: Bytes that a process sends to gather parameters in forward and in backward, as multiples of the bytes
            of all parameters times ``(n - 1) / n`` for ``n`` processes.
        reduces: Bytes that it sends in backward to sum gradients, as multiples of the bytes of the gradients times
            ``(n - 1) / n``. Each micro-batch has its own forward and backward: gradients that are summed only after the
            last one would need memory besides their buckets.
        updates: Bytes that it sends after the optimizer's step, as multiples of the same bytes.
        shard: Shards a model and its optimizer in place and returns the model to call.
        grouped: Whether it shards within groups of ``group_size`` processes.
        one_process: Whether one process trains on several GPUs. Plans do not choose it.
    """

    name: str
    about: str
    parameters: bool
    gradients: bool
    states: bool
    gathered: str
    gathers: tuple[float, float]
    reduces: float
    updates: float
    shard: Callable[[nn.Module, torch.optim.Optimizer, Arguments], nn.Module]
    grouped: bool = False
    one_process: bool = False

    @property
    def sent(self) -> float:
        """Bytes that a process sends if all parameters are trained, as multiples of theirs times ``(n - 1) / n``."""
        return sum(self.sends(1, 1))

    def sends(self, parameters: float, gradients: float) -> tuple[float, float, float]:
        """Bytes that a process sends in forward, in backward and after the optimizer's step, over ``(n - 1) / n``.

        Args:
            parameters: Bytes of all parameters, also of frozen ones.
            gradients: Bytes of all gradients.
        """
        forward, backward = (times * parameters for times in self.gathers)
        return forward, backward + self.reduces * gradients, self.updates * gradients

    def bytes(self, parameters: int, gradients: int, states: int, processes: int) -> int:
        """Bytes per process between steps.

        Args:
            parameters: Bytes of all parameters.
            gradients: Bytes of all gradients.
            states: Bytes of all optimizer states.
            processes: Number of processes.
        """
        sizes = zip((parameters, gradients, states), (self.parameters, self.gradients, self.states), strict=True)
        return sum(-(-size // processes) if sharded else size for size, sharded in sizes)


def shard_(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: str,
    *,
    blocks: Iterable[nn.Module] | None = None,
    group_size: int | None = None,
    precision: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
    offload: bool = False,
    prefetch: int | None = None,
    bucket: str | int | None = None,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Prepare ``model`` and ``optimizer`` for distributed training with a sharding strategy.

    All processes call it after ``torch.distributed.init_process_group``, each with the same model on its own device.
    Call ``lb.quantize_``, ``lb.train.prepare_``, ``mixed_`` and ``checkpoint_`` first. Schedulers may be created before
    or after ``shard_``.

    Args:
        model: The model.
        optimizer: An optimizer of the model's parameters. It keeps its states.
        strategy: Name of a row of ``STRATEGIES``: ``"dp"``, ``"ddp"``, ``"zero1"``, ``"zero2-replicated"``,
            ``"zero2"``, ``"zero3"`` or ``"hsdp"``.
        blocks: Modules that are gathered one at a time, for ``zero2``, ``zero3`` and ``hsdp``. Default: ``find_blocks``
            of the model.
        group_size: Number of processes within which ``hsdp`` shards. Default: the processes of one machine.
        precision: Dtype in which parameters are gathered (``MixedPrecisionPolicy``), for ``zero2``, ``zero3`` and
            ``hsdp``.
        reduce: Dtype in which gradients are summed (``MixedPrecisionPolicy``), for ``zero2``, ``zero3`` and ``hsdp``.
        offload: Whether to store the shards of parameters, gradients and states in host memory (``CPUOffloadPolicy``),
            for ``zero2``, ``zero3`` and ``hsdp``.
        prefetch: Number of blocks that are gathered ahead of the computing block, in forward and in backward, for
            ``zero2``, ``zero3`` and ``hsdp``. Each needs the memory of its full parameters. Blocks must run in the
            order of ``blocks``. Default: torch's, the next block in backward.
        bucket: Size of the buckets in which gradients are reduced, and updated parameters gathered: bytes, or a size
            such as ``"25MB"``, for ``ddp``, ``zero1`` and ``zero2-replicated``. Default: 25 MiB for gradients, 32 MiB
            for parameters. ``zero2-replicated`` uses at most an eighth of the gradients.
        options: Extra keyword arguments for DistributedDataParallel (``ddp``, ``zero1``), DataParallel (``dp``) or
            ``fully_shard`` (``zero2``, ``zero3``, ``hsdp``); ``find_unused_parameters`` and ``broadcast_buffers`` as
            in DistributedDataParallel for ``zero2-replicated``.

    Returns:
        The model to call in place of ``model``, and the same optimizer.

    Raises:
        ValueError: The strategy or an option is unknown, an argument is for other strategies, or there is no process
            group.
        ValueError: The optimizer has parameters that the model does not have.
    """
    if strategy not in STRATEGIES:
        known = list(STRATEGIES)
        raise ValueError(
            f"distributed.shard_: unknown strategy {strategy!r}{did_you_mean(strategy, known)}; use one of {known}"
        )
    row = STRATEGIES[strategy]
    sharding = {
        "blocks": blocks, "precision": precision, "reduce": reduce, "offload": offload or None, "prefetch": prefetch,
    }  # fmt: skip
    unsupported = [name for name, value in sharding.items() if value is not None]
    if unsupported and not row.parameters:
        raise ValueError(
            f"distributed.shard_: {', '.join(unsupported)} are for {_FULLY}, got strategy={strategy!r}; do not pass "
            f"them"
        )
    if group_size is not None and not row.grouped:
        raise ValueError(f"distributed.shard_: group_size is for {_GROUPED}, got strategy={strategy!r}; do not pass it")
    if bucket is not None and (row.parameters or row.one_process):
        raise ValueError(
            f"distributed.shard_: bucket is for {_BUCKETS}, got strategy={strategy!r}; do not pass it. fully_shard "
            f"reduces the gradients of one block at a time, see blocks"
        )
    if not row.parameters and gathered_layers(model):
        raise ValueError(
            f"distributed.shard_: all_gather_ is for strategies that gather weights, {_FULLY}, got "
            f"strategy={strategy!r}; use one of them, or a model without all_gather_"
        )
    arguments = Arguments(
        None if blocks is None else list(blocks), group_size, precision, reduce, offload,
        None if prefetch is None else prefetch_in(prefetch), None if bucket is None else bucket_in(bucket), options,
    )  # fmt: skip
    if row.one_process:
        return row.shard(model, optimizer, arguments), optimizer
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"distributed.shard_: {strategy!r} needs a process group; start the script with torchrun, and call "
            f"torch.distributed.init_process_group() first"
        )
    if getattr(optimizer, "in_backward", False):
        raise ValueError(refusal("in_backward processes", "distributed.shard_"))
    if hasattr(optimizer, OFFLOADED) and row.states:
        raise ValueError(refusal("offload shard", "distributed.shard_"))
    names = named(model)
    strangers = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if strangers:
        raise ValueError(
            f"distributed.shard_: the optimizer steps {len(strangers)} parameters that the model does not have, the "
            f"first with shape {list(strangers[0].shape)}; create it with model.parameters()"
        )
    return row.shard(model, optimizer, arguments), optimizer


# -- by strategy -----------------------------------------------------------------------------------------------------
def _dp(model: nn.Module, optimizer: torch.optim.Optimizer, arguments: Arguments) -> nn.Module:
    check_options(nn.DataParallel, arguments.options, ("module",))
    return nn.DataParallel(model, **arguments.options)


def _ddp(model: nn.Module, optimizer: torch.optim.Optimizer, arguments: Arguments) -> nn.Module:
    wrapper = nn.parallel.DistributedDataParallel
    check_options(wrapper, arguments.options, ("module",))
    bucket = {} if arguments.bucket is None else {"bucket_cap_mb": arguments.bucket / 2**20}
    with masters.unchanged(model.parameters()):  # the wrapper writes the values of the first process
        return wrapper(model, **bucket, **arguments.options)  # type: ignore[arg-type]


def _zero1(model: nn.Module, optimizer: torch.optim.Optimizer, arguments: Arguments) -> nn.Module:
    check_options(nn.parallel.DistributedDataParallel, arguments.options, ("module",))
    share_states_(model, optimizer, _mesh(model, (dist.get_world_size(),), ("shard",)), arguments.bucket)
    return _ddp(model, optimizer, arguments)


def _zero2_replicated(model: nn.Module, optimizer: torch.optim.Optimizer, arguments: Arguments) -> nn.Module:
    check_options(ShardedGradients, arguments.options, ("module", "mesh", "bucket"))
    mesh = _mesh(model, (dist.get_world_size(),), ("shard",))
    share_states_(model, optimizer, mesh, arguments.bucket)
    return ShardedGradients(model, mesh, arguments.bucket, **arguments.options)


def _zero2(model: nn.Module, optimizer: torch.optim.Optimizer, arguments: Arguments) -> nn.Module:
    return fully_shard_(model, optimizer, arguments, _mesh(model, (dist.get_world_size(),), ("shard",)), False)


def _zero3(model: nn.Module, optimizer: torch.optim.Optimizer, arguments: Arguments) -> nn.Module:
    return fully_shard_(model, optimizer, arguments, _mesh(model, (dist.get_world_size(),), ("shard",)), True)


def _hsdp(model: nn.Module, optimizer: torch.optim.Optimizer, arguments: Arguments) -> nn.Module:
    count, size = dist.get_world_size(), arguments.group_size or int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if size < 1 or count % size:
        raise ValueError(
            f"distributed.shard_: hsdp needs groups of equal size, got group_size={arguments.group_size} for {count} "
            f"processes; give a divisor of {count} (with torchrun, the default is the processes of one machine)"
        )
    return fully_shard_(model, optimizer, arguments, _mesh(model, (count // size, size), ("replicate", "shard")), True)


def _mesh(model: nn.Module, sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return init_device_mesh(device, sizes, mesh_dim_names=names)


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("dp", "one process copies the model to every GPU in each forward pass (torch.nn.DataParallel)",
            False, False, False, "", (1, 0), 1, 0, _dp, one_process=True),
        Strategy("ddp", "nothing is sharded; gradients are summed (DistributedDataParallel)",
            False, False, False, "", (0, 0), 2, 0, _ddp),
        Strategy("zero1", "optimizer states are sharded", False, False, True, "", (0, 0), 2, 1, _zero1),
        Strategy("zero2", "everything is sharded; parameters are gathered once per step (fully_shard)",
            True, True, True, "all", (1, 0), 1, 0, _zero2),
        Strategy("zero3", "everything is sharded; each block gathers its parameters in forward and in backward "
            "(fully_shard)", True, True, True, "a block", (1, 1), 1, 0, _zero3),
        Strategy("zero2-replicated", "gradients and optimizer states are sharded (stage 2 of DeepSpeed)",
            False, True, True, "", (0, 0), 1, 1, _zero2_replicated),
        Strategy("hsdp", "zero3 within groups of processes; gradients are summed over groups",
            True, True, True, "a block", (1, 1), 1, 0, _hsdp, grouped=True),
    )
}  # fmt: skip

#: Names for errors: the strategies that shard parameters, those that have a ``group_size``, and those with buckets.
_FULLY, _GROUPED = (
    ", ".join(name for name, strategy in STRATEGIES.items() if getattr(strategy, field))
    for field in ("parameters", "grouped")
)
_BUCKETS = ", ".join(name for name, row in STRATEGIES.items() if not (row.parameters or row.one_process))
