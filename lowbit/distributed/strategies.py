"""The ways to train one model on several processes, and what each process then holds.

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


class Strategy(NamedTuple):
    """``parameters``, ``gradients``, ``states``: whether a process holds its share of them alone between steps.
    ``gathered``: which parameters it has whole beside its share while it computes, ``""``, ``"all"`` or ``"a block"``.
    ``sent``: bytes that it sends in a step, as a multiple of those of the parameters and of ``(n - 1) / n`` for ``n``
    processes.
    """

    name: str
    about: str
    parameters: bool
    gradients: bool
    states: bool
    gathered: str
    sent: float

    def bytes(self, parameters: int, gradients: int, states: int, processes: int) -> int:
        """What one of so many processes holds between steps, of these bytes of the whole model."""
        held = zip((parameters, gradients, states), (self.parameters, self.gradients, self.states), strict=True)
        return sum(-(-size // processes) if shared else size for size, shared in held)


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("dp", "one process copies the model to every GPU in each forward (torch.nn.DataParallel)",
            False, False, False, "", 2),
        Strategy("ddp", "every process has all; gradients are summed (DistributedDataParallel)",
            False, False, False, "", 2),
        Strategy("zero1", "every process has the optimizer's states of its share", False, False, True, "", 3),
        Strategy("zero2", "every process has its share of all; parameters are gathered once a step (fully_shard)",
            True, True, True, "all", 2),
        Strategy("zero3", "its share of all; blocks gather their parameters, in forward and in backward (fully_shard)",
            True, True, True, "a block", 3),
        Strategy("hsdp", "zero3 within groups of processes, over which gradients are summed",
            True, True, True, "a block", 3),
    )
}  # fmt: skip


class _Asked(NamedTuple):
    """Arguments of ``shard_``."""

    blocks: list[nn.Module] | None
    group_size: int | None
    precision: torch.dtype | None
    reduce: torch.dtype | None
    offload: bool
    options: dict[str, Any]


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
    """Train ``model`` with ``optimizer`` on the processes of ``torch.distributed`` by a row of ``STRATEGIES``.

    Every process calls it after ``torch.distributed.init_process_group``, with the same model on its device, and uses
    what is returned: the model to call, and the same optimizer, whose states are kept. Prepare the model before:
    ``lb.quantize_``, ``lb.train.prepare_``, ``mixed_``, ``checkpoint_``. Schedulers may come before or after.

    ``blocks``: modules that are gathered one at a time, those of ``find_blocks`` unless given; for ``zero2``, ``zero3``
    and ``hsdp``. ``group_size``: processes within which ``hsdp`` shards, those of one machine unless given.
    ``precision`` and ``reduce``: the dtypes in which parameters are gathered and gradients are summed
    (``MixedPrecisionPolicy``). ``offload``: shares of parameters, gradients and states are in host memory
    (``CPUOffloadPolicy``). ``options``: of DistributedDataParallel, DataParallel or ``fully_shard``.

    Raises ValueError for an unknown strategy, arguments of another strategy, without a process group, and for an
    optimizer of other parameters.
    """
    if strategy not in STRATEGIES:
        known = list(STRATEGIES)
        raise ValueError(
            f"distributed.shard_: no strategy is called {strategy!r}{did_you_mean(strategy, known)}; there are {known}"
        )
    sharding = {"blocks": blocks, "precision": precision, "reduce": reduce, "offload": offload or None}
    given = [name for name, value in sharding.items() if value is not None]
    if given and strategy not in _FULLY:
        raise ValueError(
            f"distributed.shard_: {', '.join(given)} are for {', '.join(_FULLY)}, got strategy={strategy!r}; leave "
            f"them out"
        )
    if group_size is not None and strategy != "hsdp":
        raise ValueError(f"distributed.shard_: group_size is for hsdp, got strategy={strategy!r}; leave it out")
    if strategy not in _FULLY and gathered_layers(model):
        raise ValueError(
            f"distributed.shard_: all_gather_ is for strategies that gather weights, {', '.join(_FULLY)}, got "
            f"strategy={strategy!r}; "
            f"use one of them, or a model without all_gather_"
        )
    if strategy == "dp":
        return nn.DataParallel(model, **options), optimizer
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"distributed.shard_: {strategy!r} needs a process group; start the script with torchrun, and call "
            f"torch.distributed.init_process_group() first"
        )
    if getattr(optimizer, "in_backward", False):
        raise ValueError(refusal("in_backward processes", "distributed.shard_"))
    if hasattr(optimizer, OFFLOADED) and STRATEGIES[strategy].states:
        raise ValueError(refusal("offload shard", "distributed.shard_"))
    names = named(model)
    strangers = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if strangers:
        raise ValueError(
            f"distributed.shard_: the optimizer steps {len(strangers)} parameters that the model does not have, the "
            f"first of shape {list(strangers[0].shape)}; make it of model.parameters()"
        )
    asked = _Asked(None if blocks is None else list(blocks), group_size, precision, reduce, offload, options)
    return _SHARD[strategy](model, optimizer, asked), optimizer


# -- by strategy -----------------------------------------------------------------------------------------------------
def _ddp(model: nn.Module, optimizer: torch.optim.Optimizer, asked: _Asked) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, **asked.options)


def _zero1(model: nn.Module, optimizer: torch.optim.Optimizer, asked: _Asked) -> nn.Module:
    share_states_(model, optimizer, _mesh(model, (dist.get_world_size(),), ("shard",)))
    return _ddp(model, optimizer, asked)


def _zero2(model: nn.Module, optimizer: torch.optim.Optimizer, asked: _Asked) -> nn.Module:
    return _fully(model, optimizer, asked, _mesh(model, (dist.get_world_size(),), ("shard",)), False)


def _zero3(model: nn.Module, optimizer: torch.optim.Optimizer, asked: _Asked) -> nn.Module:
    return _fully(model, optimizer, asked, _mesh(model, (dist.get_world_size(),), ("shard",)), True)


def _hsdp(model: nn.Module, optimizer: torch.optim.Optimizer, asked: _Asked) -> nn.Module:
    count, size = dist.get_world_size(), asked.group_size or int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if size < 1 or count % size:
        raise ValueError(
            f"distributed.shard_: hsdp shards within groups of equal size, got group_size={asked.group_size} of "
            f"{count} processes; give a divisor of {count} (torchrun says how many are on a machine)"
        )
    return _fully(model, optimizer, asked, _mesh(model, (count // size, size), ("replicate", "shard")), True)


_FULLY = ("zero2", "zero3", "hsdp")
_SHARD: dict[str, Callable[[nn.Module, torch.optim.Optimizer, _Asked], nn.Module]] = {
    "ddp": _ddp, "zero1": _zero1, "zero2": _zero2, "zero3": _zero3, "hsdp": _hsdp,
}  # fmt: skip


def _mesh(model: nn.Module, sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return init_device_mesh(device, sizes, mesh_dim_names=names)


def _fully(
    model: nn.Module, optimizer: torch.optim.Optimizer, asked: _Asked, mesh: Any, reshard_after_forward: bool
) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard  # takes seconds

    options = {"mesh": mesh, "reshard_after_forward": reshard_after_forward, **asked.options}
    if asked.precision is not None or asked.reduce is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=asked.precision, reduce_dtype=asked.reduce)
    if asked.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    units = list(dict.fromkeys((*(find_blocks(model) if asked.blocks is None else asked.blocks), model)))
    _refuse_shared(units, model)
    states = states_of(model, optimizer)
    before = dict(model.named_parameters(remove_duplicate=False))
    if gathered_layers(model) and type(options["reshard_after_forward"]) is int:
        raise ValueError(
            f"distributed.shard_: weights of all_gather_ are gathered among all processes again in backward, got "
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
    """Raises ValueError for a parameter that two units hold, each of which would be gathered and freed on its own."""
    holder: dict[Tensor, nn.Module] = {}
    for unit in units:
        for parameter in dict.fromkeys(p for one in _inside(unit, set(units)) for p in one._parameters.values()):
            if parameter is None:
                continue
            if holder.setdefault(parameter, unit) is not unit:
                tied = [name for name, one in model.named_parameters(remove_duplicate=False) if one is parameter]
                raise ValueError(f"{refusal('tied blocks', 'distributed.shard_')} ({', '.join(tied)})")


def _inside(unit: nn.Module, units: set[nn.Module]) -> list[nn.Module]:
    """The modules of a unit that are not within another unit inside of it."""
    found, pending = dict[nn.Module, None](), [unit]
    while pending:
        module = pending.pop()
        if module not in found:
            found[module] = None
            pending += [child for child in module.children() if child not in units]
    return list(found)


def _of_other_dtypes(block: nn.Module, model: nn.Module) -> list[nn.Module]:
    """Modules of a block to shard on their own, since ``fully_shard`` trains parameters of one dtype: those whose
    parameters have another dtype than most of the block, such as norms in fp32 beside working copies in bf16.

    Raises ValueError for a module whose own parameters have several.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    sizes: dict[torch.dtype, int] = {}
    kinds: dict[nn.Module, set[torch.dtype]] = {}
    for module in block.modules():
        if isinstance(module, FSDPModule):
            continue
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and not isinstance(p, DTensor)]
        kinds[module] = {p.dtype for p in own}
        for parameter in own:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.nbytes
        if len(kinds[module]) > 1:
            name = next(name for name, one in model.named_modules() if one is module)
            raise ValueError(
                f"distributed.shard_: fully_shard gathers parameters of one dtype, and {name or 'the model'} "
                f"({type(module).__name__}) has {', '.join(sorted(map(str, kinds[module])))}; keep parameters in fp32 "
                "and pass precision=torch.bfloat16 (of mixed_ working_copies=False), or take strategy='ddp' or 'zero1'"
            )
    most = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return [module for module, found in kinds.items() if found - {most} and module is not block]
