"""Weights that ``fully_shard`` gathers as codes of one byte, with scales that are exchanged once a step.

Each process encodes its own rows. Scales are those of the whole weight: of a scheme with a scale for the tensor, the
processes agree on the largest magnitude first; of one with scales within a row, they send each other the scales. So the
gathered weight has the bits of ``lb.fake_quantize`` of the whole one, on any number of processes.

Source: the all-gather extensions of torch.distributed.fsdp (``fsdp_pre_all_gather``, ``fsdp_post_all_gather``).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.autograd import transformed
from lowbit.convert.adapters import find
from lowbit.convert.select import DEFAULT_SKIP, Skip, Verdict, nothing_found, plain_layers, select
from lowbit.dist_utils import gather_flat, processes
from lowbit.functional import quantize
from lowbit.models.ties import Holder, holders
from lowbit.name_tables import did_you_mean
from lowbit.nn.base import kind as kind_of
from lowbit.op_calls import call
from lowbit.optim.shards import is_dtensor
from lowbit.recipes import Cast
from lowbit.report import Report, report_on
from lowbit.scaling import SHORT_NAMES, SHORT_NAMES_8BIT, Scheme, scheme_8bit
from lowbit.tensor.quantized import Quantized, scale_dtype
from lowbit.torch_private import (
    below_torch_dispatch,
    disabled_torch_function,
    local_part,
    make_subclass,
    preserved_version,
    set_local_part,
)
from lowbit.train.gemms import Products, WeightOperands
from lowbit.train.linear import TrainLinear

__all__ = ["AllGatherWeight", "all_gather_", "encoded_", "gathered_layers"]

#: The attributes of a layer that have the scheme in which its weight is to be gathered, and the hook that waits for
#: ``shard_``.
_SCHEME, _WAITING = "_lowbit_all_gather", "_lowbit_all_gather_waiting"


def all_gather_(model: nn.Module, bits: str | Scheme = "fp8", *, skip: Skip = DEFAULT_SKIP) -> Report:
    """Have ``shard_`` gather the weights of the Linear layers of ``model`` in codes of one byte.

    Call it before ``shard_`` by ``zero2``, ``zero3`` or ``hsdp``. ``bits``: ``"fp8"`` (E4M3, a scale a row),
    ``"fp8-tensor"``, ``"int8"`` (a scale a row), or a scheme of 8-bit codes with a scale for the tensor or scales
    within a row. ``skip``: layers that are gathered as before, as for ``quantize_``.

    A layer multiplies what ``lb.fake_quantize`` makes of its weight ``[out, in]``; gradients, the optimizer and
    checkpoints have the weight itself. A layer of ``train.prepare_`` whose recipe quantizes the weight in this very
    scheme takes the codes as they come, and has the bits that it has without. Each process keeps the codes of its rows
    from one step to the next, a byte a number.

    Only ``shard_`` gathers so. Training on several processes that were sharded otherwise, by ``fully_shard`` or by a
    Trainer, raises RuntimeError in the first forward.

    Returns a Report of the layers. A layer that shares its weight with a module that is not gathered so is left.
    Raises ValueError for an unknown scheme or one that cannot be gathered, for weights that are shards already, for a
    layer whose recipe quantizes its weight otherwise, and where there is no layer.
    """
    kind = _kind(bits)
    found = select(model, lambda names, module: _judged(names, module, kind), skip=skip)
    layers = {name: chosen.module for name, chosen in found.chosen.items()}
    taken, owners = set(map(id, layers.values())), holders(model)
    for name, layer in list(layers.items()):
        other = next((held.path for held in owners[id(layer.weight)] if id(held.module) not in taken), None)
        if other is not None:
            found.left[name] = f"it shares its weight with {other}"
            del layers[name]
    if not layers:
        raise ValueError(nothing_found(model, found, "distributed.all_gather_", "nn.Linear"))
    for layer in layers.values():
        setattr(layer, _SCHEME, kind)
        if _WAITING not in vars(layer):
            setattr(layer, _WAITING, layer.register_forward_pre_hook(_require_shards))
    report = report_on("distributed.all_gather_", model, layers, f"gathered in {kind}")
    return replace(report, skipped=tuple(found.skipped), left=dict(found.left))


def _require_shards(layer: nn.Module, args: Any) -> None:
    """A hook until ``shard_`` takes it away."""
    if torch.is_grad_enabled() and processes() > 1:
        raise RuntimeError(
            f"distributed.all_gather_: {processes()} processes train this model, and its weights are not gathered in "
            f"{vars(layer)[_SCHEME]}: only lb.distributed.shard_ by zero2, zero3 or hsdp does that; shard the model by "
            "it, or leave all_gather_ out"
        )


def gathered_layers(model: nn.Module) -> list[nn.Linear]:
    """The layers that ``all_gather_`` has chosen."""
    return [module for module in model.modules() if _SCHEME in vars(module) and isinstance(module, nn.Linear)]


def encoded_(model: nn.Module) -> Exchange:
    """Make the weights of ``gathered_layers`` an ``AllGatherWeight`` each, of which ``fully_shard`` makes its shards.

    Returns their ``Exchange``, which the optimizer has to tell of its steps.
    Raises ValueError, with the model untouched, for a layer that was prepared since with another recipe.
    """
    layers, every = gathered_layers(model), Exchange()
    for layer in layers:
        reason = _refused(layer, vars(layer)[_SCHEME])
        if reason is not None:
            raise ValueError(f"distributed.shard_: a layer of all_gather_ {reason}")
    owners = holders(model)
    for layer in layers:
        vars(layer).pop(_WAITING).remove()
        if isinstance(layer.weight, AllGatherWeight):
            continue  # it is shared, and its other holder came first
        old: Any = layer.weight
        together = owners[id(old)]
        weight = Weight(layer, vars(layer)[_SCHEME], torch.Size(old.shape), every)
        made = nn.Parameter(AllGatherWeight(old.detach(), weight), old.requires_grad)
        for held in together:
            _replace(held, old, made)
            if isinstance(held.module, TrainLinear):
                held.module.gathered = weight.operands
        layer.register_load_state_dict_post_hook(weight.loaded)
        every.weights.append(weight)
    return every


def _replace(held: Holder, old: nn.Parameter, made: nn.Parameter) -> None:
    for name, parameter in held.module._parameters.items():
        if parameter is old:
            held.module._parameters[name] = made


# -- what can be gathered ---------------------------------------------------------------------------------------------
def _kind(bits: str | Scheme) -> Scheme:
    known = ", ".join(SHORT_NAMES_8BIT)
    try:
        kind = scheme_8bit(bits)
    except ValueError as error:
        close = did_you_mean(bits, [*SHORT_NAMES_8BIT, *SHORT_NAMES]) if isinstance(bits, str) else ""
        raise ValueError(
            f"distributed.all_gather_: expected one of {known}, or a scheme, got {bits!r}{close}; {error}"
        ) from None
    within = kind.block[0] == 1 or kind.block == (None, None)
    if kind.format.bits != 8 or not within or kind.affine or kind.full or kind.global_scale is not None:
        raise ValueError(
            f"distributed.all_gather_: expected 8-bit codes with a scale for the tensor or scales within a row, and "
            f"neither zero points nor a global scale, got {kind}; use one of {known}, or a scheme such as "
            f"'int8:group64' or 'mxfp8'"
        )
    return kind


def _judged(names: list[str], module: nn.Module, kind: Scheme) -> Verdict:
    if not isinstance(module, TrainLinear):
        verdict = plain_layers(only=(nn.Linear,), replaced=False)(names, module)
        if kind_of(module) is not None:
            return Verdict(reason="it has codes already, which are gathered as they are")
        if verdict.adapter is None:
            return verdict
    reason = _refused(module, kind)
    return Verdict(find(nn.Linear(1, 1, device="meta")).adapter) if reason is None else Verdict(error=reason)


def _refused(layer: Any, kind: Scheme) -> str | None:
    """Why the weight of a Linear cannot be gathered in this scheme, or None."""
    if is_dtensor(layer.weight):
        return "has a weight that is a shard already (DTensor); call all_gather_ before shard_"
    if not isinstance(layer, TrainLinear):
        return None
    cast, name = layer.products.weight, layer.recipe.name
    if cast != Cast(kind):
        how = "leaves its weight as it is" if cast is None else f"quantizes its weight by {cast.scheme}, {cast.scale}"
        return (
            f"trains with the recipe {name!r}, which {how}, and gathering it in {kind} would quantize it by another "
            f"scheme first; give the recipe's own scheme, or name the layer in skip=..."
        )
    if layer.products.grad_input.save != "codes":
        return (
            f"trains with the recipe {name!r}, whose backward needs the weight beside its codes; use a recipe that "
            f"multiplies the codes of forward (fp8, fp8-tensor, int8), or name the layer in skip=..."
        )
    return None


# -- weights ----------------------------------------------------------------------------------------------------------
class Weight:
    """What this process knows of one weight ``[out, in]``: codes of its rows, and scales of all.

    ``quantized``: the whole weight while it is gathered; its codes are in memory of ``fully_shard``.
    """

    def __init__(self, layer: nn.Module, kind: Scheme, shape: torch.Size, every: Exchange) -> None:
        self.layer, self.kind, self.shape, self.every = layer, kind, shape, every
        self.quantized: Quantized | None = None
        self.codes: Tensor | None = None
        self.scale: Tensor | None = None
        self._own: Tensor | None = None
        self._param: Any = None
        self._version: tuple[int, ...] | None = None
        self._place = 0

    @property
    def spans(self) -> bool:
        """Whether one scale spans the rows of all processes."""
        return self.kind.block[0] is None

    @property
    def shard(self) -> AllGatherWeight | None:
        """This process' rows; None where ``fully_shard`` was told to ignore the weight."""
        param = self.layer._parameters["weight"]
        if is_dtensor(param):  # else it is gathered at the moment, and the one from before is still its shard
            self._param = param
        local = None if self._param is None else local_part(self._param)
        return local if isinstance(local, AllGatherWeight) else None

    def changed(self) -> bool:
        """Whether the rows are others than those that were encoded, or the weight was stepped."""
        return self._version != self._now()

    def stepped(self, params: Container[int]) -> None:
        """An optimizer of parameters with these ids has stepped."""
        if self.shard is not None and id(self._param) in params:
            torch.autograd.graph.increment_version(self._param)

    def _now(self) -> tuple[int, ...]:
        return id(self._param), self._param._version, local_part(self._param)._version

    def measured(self, shard: Tensor, count: int) -> Tensor:
        """What the other processes need of these rows: their amax fp32 ``[1]``, or bytes of scales for as many rows as
        the first process has. Of scales within rows, codes are made too.
        """
        if self.changed() or self._own is None:
            rows = -(-self.shape[0] // count)
            if self.spans:
                low, high = (
                    call("block_range", shard, self.kind.name) if shard.numel() else (shard.new_zeros(1, 1),) * 2
                )
                self._own = torch.where(high >= low.abs(), high, low.abs()).float().reshape(1)
            else:
                q = quantize(shard, self.kind)
                self.codes, self._own = _padded(q.codes, rows), _padded(q.scale, rows).view(torch.uint8).reshape(-1)
        return self._own

    def encode(self, shard: Tensor, count: int) -> None:
        """Codes by the scale that all have agreed on."""
        assert self.scale is not None
        if self.spans and (self.changed() or self.codes is None):
            self.codes = _padded(quantize(shard, self.kind, self.scale).codes, -(-self.shape[0] // count))
        self._version = self._now()

    def decode(self, codes: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """The whole weight in ``dtype``, of codes that are gathered; ``out`` is filled."""
        assert self.scale is not None
        scale = self.scale.to(codes.device)
        self.quantized = Quantized(codes[: self.shape[0]], scale, None, None, self.kind, self.shape, dtype)
        made = self.quantized.dequantize(out=out) if out is not None else self.quantized.dequantize()
        self._place = made.data_ptr()
        return made

    def operands(self, weight: Tensor, products: Products) -> WeightOperands | None:
        """The operands of a layer's products, if ``weight`` is what was gathered last."""
        if self.quantized is None or transformed() or is_dtensor(weight) or weight.data_ptr() != self._place:
            return None
        return WeightOperands.given(self.quantized)

    def loaded(self, layer: nn.Module, keys: Any) -> None:
        """``load_state_dict(assign=True)`` puts plain rows in place of these."""
        param: Any = layer._parameters["weight"]
        if is_dtensor(param) and not isinstance(local_part(param), AllGatherWeight):
            set_local_part(param, AllGatherWeight(local_part(param), self))


class Exchange:
    """The weights of a model that are gathered in codes: one exchange serves all of them."""

    def __init__(self) -> None:
        self.weights: list[Weight] = []

    def stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """A hook of the optimizer. A process without rows of a weight has nothing that its step changes, and has to
        know of it all the same.
        """
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for weight in self.weights:
            weight.stepped(params)

    @torch.no_grad()
    def update(self, mesh: Any) -> None:
        """Encode the weights that have changed, and exchange what their scales need.

        Every process takes part, or none: what changes a weight is a step of the optimizer or a load, in all of them.
        """
        shards = [(weight, shard) for weight in self.weights if (shard := weight.shard) is not None]
        if not any(weight.changed() for weight, _ in shards):
            return
        count = mesh.size()
        parts = [(weight, weight.measured(shard.plain, count)) for weight, shard in shards]
        self._agree([part for part in parts if part[0].spans], mesh)
        self._collect([part for part in parts if not part[0].spans], mesh)
        for weight, shard in shards:
            weight.encode(shard.plain, count)

    def _agree(self, parts: Sequence[tuple[Weight, Tensor]], mesh: Any) -> None:
        if not parts:
            return
        # Magnitudes compare as their bits do, and NaN, which a maximum of floats may drop, has the largest.
        bits = torch.cat([amax for _, amax in parts]).view(torch.int32).to(mesh.device_type)
        if mesh.size() > 1:
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=mesh.get_group())
        for (weight, own), amax in zip(parts, bits.view(torch.float32), strict=True):
            weight.scale = quantize(amax.to(own.device).reshape(1, 1), weight.kind).scale

    def _collect(self, parts: Sequence[tuple[Weight, Tensor]], mesh: Any) -> None:
        if not parts:
            return
        sent = torch.cat([raw for _, raw in parts]).to(mesh.device_type)
        got = (gather_flat(sent, mesh.get_group()) if mesh.size() > 1 else sent).view(mesh.size(), -1)
        for (weight, own), raw in zip(parts, got.split([len(raw) for _, raw in parts], 1), strict=True):
            shape = weight.kind.scale_shape(*weight.shape)
            scales = raw.to(own.device).contiguous().view(-1).view(scale_dtype(weight.kind))
            weight.scale = scales.view(-1, shape[1])[: shape[0]]


def _padded(rows: Tensor, count: int) -> Tensor:
    """So many rows; all processes send as many as the first has."""
    return rows.contiguous() if len(rows) == count else nn.functional.pad(rows, (0, 0, 0, count - len(rows)))


# -- the tensor -------------------------------------------------------------------------------------------------------
#: Of these the results stay weights: those that ``fully_shard`` makes shards with, and moves.
_KEEPS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("detach", "alias", "new_zeros", "_to_copy", "_pin_memory")
) | {torch.ops.aten.slice.Tensor}


class AllGatherWeight(Tensor):
    """A weight, or rows of one, in high precision, which ``fully_shard`` gathers in codes.

    It has the memory and the versions of the tensor that it is made of. Results of operations are plain tensors, and it
    is saved and copied as one.
    """

    of: Weight

    __torch_function__ = disabled_torch_function

    def __new__(cls, rows: Tensor, of: Weight) -> AllGatherWeight:
        made: AllGatherWeight = make_subclass(cls, rows)
        made.of = of
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with below_torch_dispatch():
            found = func(*args, **(kwargs or {}))
            return cls(found, args[0].of) if func in _KEEPS else found

    @property
    def plain(self) -> Tensor:
        """The same rows as a plain tensor."""
        return self.view(self.shape)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.plain.detach().clone()

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """The codes of this process' rows."""
        if self.shape[1:] != outer_size[1:]:
            raise ValueError(
                f"distributed.all_gather_: expected shards of whole rows of a weight {list(outer_size)}, got "
                f"{list(self.shape)}; leave shard_placement_fn out, or the layer out of all_gather_"
            )
        self.of.every.update(mesh)
        assert self.of.codes is not None
        return (self.of.codes.to(mesh.device_type, non_blocking=True),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight, of the codes of all processes."""
        if out is None:
            made = self.of.decode(outputs[0], param_dtype, None)
            return made, (made,)
        # Backward may have saved it: what is filled again are the same numbers.
        with torch.no_grad(), preserved_version(out):
            self.of.decode(outputs[0], param_dtype, out.detach())
        return None
