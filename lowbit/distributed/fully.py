"""Strategies that shard parameters: ``fully_shard`` of the blocks of a model, with its optimizer.

Source: Zhao et al., "PyTorch FSDP", arXiv 2304.11277.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit.combinations import refusal
from lowbit.distributed.all_gather import encoded_, gathered_layers
from lowbit.distributed.arguments import Arguments, check_options
from lowbit.distributed.parameters import begin_with, states_of
from lowbit.models.blocks import find_blocks

__all__ = ["fully_shard_"]


def fully_shard_(
    model: nn.Module, optimizer: torch.optim.Optimizer, arguments: Arguments, mesh: Any, reshard_after_forward: bool
) -> nn.Module:
    """Shard a model and its optimizer in place, each block as a unit of its own, and return the model.

    Raises:
        ValueError: An option is unknown, or two blocks share a parameter. The model is then unchanged.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard  # takes seconds

    check_options(fully_shard, arguments.options, ("module",))
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
    if arguments.prefetch is not None:
        _prefetch(units[:-1], arguments.prefetch)
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


def _prefetch(blocks: list[nn.Module], depth: int) -> None:
    """Gather ``depth`` blocks ahead: the following ones in forward, the preceding ones in backward."""
    from torch.distributed.fsdp import FSDPModule

    units = [[m for m in _inside(block, set(blocks) - {block}) if isinstance(m, FSDPModule)] for block in blocks]
    for index, unit in enumerate(units):
        after = units[index + 1 : index + 1 + depth]
        before = units[max(index - depth, 0) : index][::-1]
        for module in unit:
            module.set_modules_to_forward_prefetch([m for other in after for m in other])
            module.set_modules_to_backward_prefetch([m for other in before for m in other])
