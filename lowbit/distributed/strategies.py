"""Sharding strategies for distributed training (DataParallel, DDP, ZeRO, FSDP, HSDP), and ``shard_``.

Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054; Zhao et al., "PyTorch FSDP", arXiv 2304.11277.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.combinations import refusal
from lowbit.distributed.all_gather import encoded_, gathered_layers
from lowbit.distributed.parameters import begin_with, named, states_of
from lowbit.distributed.zero import share_states_
from lowbit.models.blocks import find_blocks
from lowbit.name_tables import did_you_mean
from lowbit.optim.offload import OFFLOADED

__all__ = ["STRATEGIES", "Strategy", "shard_"]


class Arguments(NamedTuple):
    """Arguments of ``shard_``."""

    blocks: list[nn.Module] | None
    group_size: int | None
    precision: torch.dtype | None
    reduce: torch.dtype | None
    offload: bool
    options: dict[str, Any]


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
        sends: Bytes that a process sends in forward, in backward and after the optimizer's step, as multiples of the
            bytes of the parameters times ``(n - 1) / n`` for ``n`` processes. Each micro-batch has its own forward and
            backward: gradients that are summed only after the last one would need memory besides their buckets.
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
    sends: tuple[float, float, float]
    shard: Callable[[nn.Module, torch.optim.Optimizer, Arguments], nn.Module]
    grouped: bool = False
    one_process: bool = False

    @property
    def sent(self) -> float:
        """The sum of ``sends``."""
        return sum(self.sends)

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
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Prepare ``model`` and ``optimizer`` for distributed training with a sharding strategy.

    All processes call it after ``torch.distributed.init_process_group``, each with the same model on its own device.
    Call ``lb.quantize_``, ``lb.train.prepare_``, ``mixed_`` and ``checkpoint_`` first. Schedulers may be created before
    or after ``shard_``.

    Args:
        model: The model.
        optimizer: An optimizer of the model's parameters. It keeps its states.
        strategy: Name of a row of ``STRATEGIES``: ``"dp"``, ``"ddp"``, ``"zero1"``, ``"zero2"``, ``"zero3"`` or
            ``"hsdp"``.
        blocks: Modules that are gathered one at a time, for ``zero2``, ``zero3`` and ``hsdp``. Default: ``find_blocks``
            of the model.
        group_size: Number of processes within which ``hsdp`` shards. Default: the processes of one machine.
        precision: Dtype in which parameters are gathered (``MixedPrecisionPolicy``), for ``zero2``, ``zero3`` and
            ``hsdp``.
        reduce: Dtype in which gradients are summed (``MixedPrecisionPolicy``), for ``zero2``, ``zero3`` and ``hsdp``.
        offload: Whether to store the shards of parameters, gradients and states in host memory (``CPUOffloadPolicy``),
            for ``zero2``, ``zero3`` and ``hsdp``.
        options: Extra keyword arguments for DistributedDataParallel, DataParallel or ``fully_shard``.

    Returns:
        The model to call in place of ``model``, and the same optimizer.

    Raises:
        ValueError: The strategy is unknown, an argument is for other strategies, or there is no process group.
        ValueError: The optimizer has parameters that the model does not have.
    """
    if strategy not in STRATEGIES:
        known = list(STRATEGIES)
        raise ValueError(
            f"distributed.shard_: unknown strategy {strategy!r}{did_you_mean(strategy, known)}; use one of {known}"
        )
    row = STRATEGIES[strategy]
    sharding = {"blocks": blocks, "precision": precision, "reduce": reduce, "offload": offload or None}
    unsupported = [name for name, value in sharding.items() if value is not None]
    if unsupported and not row.parameters:
        raise ValueError(
            f"distributed.shard_: {', '.join(unsupported)} are for {_FULLY}, got strategy={strategy!r}; do not pass "
            f"them"
        )
    if group_size is not None and not row.grouped:
        raise ValueError(f"distributed.shard_: group_size is for {_GROUPED}, got strategy={strategy!r}; do not pass it")
    if not row.parameters and gathered_layers(model):
        raise ValueError(
            f"distributed.shard_: all_gather_ is for strategies that gather weights, {_FULLY}, got "
            f"strategy={strategy!r}; use one of them, or a model without all_gather_"
        )
    arguments = Arguments(None if blocks is None else list(blocks), group_size, precision, reduce, offload, options)
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
    return nn.DataParallel(model, **arguments.options)


def _ddp(model: nn.Module, optimizer: torch.optim.Optimizer, arguments: Arguments) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, **arguments.options)


def _zero1(model: nn.Module, optimizer: torch.optim.Optimizer, arguments: Arguments) -> nn.Module:
    share_states_(model, optimizer, _mesh(model, (dist.get_world_size(),), ("shard",)))
    return _ddp(model, optimizer, arguments)


def _zero2(model: nn.Module, optimizer: torch.optim.Optimizer, arguments: Arguments) -> nn.Module:
    return _fully(model, optimizer, arguments, _mesh(model, (dist.get_world_size(),), ("shard",)), False)


def _zero3(model: nn.Module, optimizer: torch.optim.Optimizer, arguments: Arguments) -> nn.Module:
    return _fully(model, optimizer, arguments, _mesh(model, (dist.get_world_size(),), ("shard",)), True)


def _hsdp(model: nn.Module, optimizer: torch.optim.Optimizer, arguments: Arguments) -> nn.Module:
    count, size = dist.get_world_size(), arguments.group_size or int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if size < 1 or count % size:
        raise ValueError(
            f"distributed.shard_: hsdp needs groups of equal size, got group_size={arguments.group_size} for {count} "
            f"processes; give a divisor of {count} (with torchrun, the default is the processes of one machine)"
        )
    return _fully(model, optimizer, arguments, _mesh(model, (count // size, size), ("replicate", "shard")), True)


def _mesh(model: nn.Module, sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return init_device_mesh(device, sizes, mesh_dim_names=names)


def _fully(
    model: nn.Module, optimizer: torch.optim.Optimizer, arguments: Arguments, mesh: Any, reshard_after_forward: bool
) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard  # takes seconds

    options = {"mesh": mesh, "reshard_after_forward": reshard_after_forward, **arguments.options}
    if arguments.precision is not None or arguments.reduce is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=arguments.precision, reduce_dtype=arguments.reduce)
    if arguments.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    units = list(dict.fromkeys((*(find_blocks(model) if arguments.blocks is None else arguments.blocks), model)))
    _refuse_shared(units, model)
    states = states_of(model, optimizer)
    before = dict(model.named_parameters(remove_duplicate=False))
    if gathered_layers(model) and type(options["reshard_after_forward"]) is int:
        raise ValueError(
            f"distributed.shard_: backward gathers weights of all_gather_ from all processes again, got "
            f"reshard_after_forward={options['reshard_after_forward']}; give True or False"
        )
    gathered = encoded_(model)
    for block in units:
        for module in _of_other_dtypes(block, model):
            fully_shard(module, **options)
        fully_shard(block, **options)
    after = dict(model.named_parameters(remove_duplicate=False))
    new: dict[Tensor, Tensor] = {old: after[name] for name, old in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [new[parameter] for parameter in group["params"]]
    begin_with(optimizer, new, model, states)
    if gathered.weights:
        optimizer.register_step_post_hook(gathered.stepped)
    return model


def _refuse_shared(units: list[nn.Module], model: nn.Module) -> None:
    """Raise ValueError for a parameter of two units, because each unit is gathered and freed separately."""
    owner: dict[Tensor, nn.Module] = {}
    for unit in units:
        for parameter in dict.fromkeys(p for module in _inside(unit, set(units)) for p in module._parameters.values()):
            if parameter is None:
                continue
            if owner.setdefault(parameter, unit) is not unit:
                tied = [name for name, other in model.named_parameters(remove_duplicate=False) if other is parameter]
                raise ValueError(f"{refusal('tied blocks', 'distributed.shard_')} ({', '.join(tied)})")


def _inside(unit: nn.Module, units: set[nn.Module]) -> list[nn.Module]:
    """The modules of a unit, without those of other units inside it."""
    modules, pending = dict[nn.Module, None](), [unit]
    while pending:
        module = pending.pop()
        if module not in modules:
            modules[module] = None
            pending += [child for child in module.children() if child not in units]
    return list(modules)


def _of_other_dtypes(block: nn.Module, model: nn.Module) -> list[nn.Module]:
    """Modules of a block to shard separately, because ``fully_shard`` trains parameters of one dtype.

    Their parameters have another dtype than most of the block, such as fp32 norms in a block of bf16 working copies.

    Raises:
        ValueError: The parameters of one module have several dtypes.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    sizes: dict[torch.dtype, int] = {}
    dtypes: dict[nn.Module, set[torch.dtype]] = {}
    for module in block.modules():
        if isinstance(module, FSDPModule):
            continue
        trained = [p for p in module.parameters(recurse=False) if p.requires_grad and not isinstance(p, DTensor)]
        dtypes[module] = {p.dtype for p in trained}
        for parameter in trained:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.nbytes
        if len(dtypes[module]) > 1:
            name = next(name for name, other in model.named_modules() if other is module)
            raise ValueError(
                f"distributed.shard_: fully_shard gathers parameters of one dtype, but {name or 'the model'} "
                f"({type(module).__name__}) has {', '.join(sorted(map(str, dtypes[module])))}; keep parameters in fp32 "
                "and pass precision=torch.bfloat16 (mixed_: working_copies=False), or use strategy='ddp' or 'zero1'"
            )
    most = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return [module for module, module_dtypes in dtypes.items() if module_dtypes - {most} and module is not block]


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("dp", "one process copies the model to every GPU in each forward pass (torch.nn.DataParallel)",
            False, False, False, "", (1, 1, 0), _dp, one_process=True),
        Strategy("ddp", "nothing is sharded; gradients are summed (DistributedDataParallel)",
            False, False, False, "", (0, 2, 0), _ddp),
        Strategy("zero1", "optimizer states are sharded", False, False, True, "", (0, 2, 1), _zero1),
        Strategy("zero2", "everything is sharded; parameters are gathered once per step (fully_shard)",
            True, True, True, "all", (1, 1, 0), _zero2),
        Strategy("zero3", "everything is sharded; each block gathers its parameters in forward and in backward "
            "(fully_shard)", True, True, True, "a block", (1, 2, 0), _zero3),
        Strategy("hsdp", "zero3 within groups of processes; gradients are summed over groups",
            True, True, True, "a block", (1, 2, 0), _hsdp, grouped=True),
    )
}  # fmt: skip

#: Names for errors: the strategies that shard parameters, and those that have a ``group_size``.
_FULLY, _GROUPED = (
    ", ".join(name for name, strategy in STRATEGIES.items() if getattr(strategy, field))
    for field in ("parameters", "grouped")
)
