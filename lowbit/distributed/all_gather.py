"""All-gather of weights as 8-bit codes with ``fully_shard``, with scales exchanged once per step.

Each process quantizes its own rows with the scales of the full weight. For a per-tensor scale, the processes first
all-reduce the largest magnitude. Scales within rows are all-gathered. So the gathered weight is bit-identical to
``lb.fake_quantize`` of the full weight, on any number of processes.

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
from lowbit.convert.protect import output_layers_protected
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

#: Attributes of a layer: the scheme of its gathered weight, and the hook that raises if ``shard_`` was not called.
_SCHEME, _WAITING = "_lowbit_all_gather", "_lowbit_all_gather_waiting"


def all_gather_(model: nn.Module, bits: str | Scheme = "fp8", *, skip: Skip = DEFAULT_SKIP) -> Report:
    """Make ``shard_`` gather the weights of the Linear layers of ``model`` as 8-bit codes.

    Call it before ``shard_`` with ``zero2``, ``zero3`` or ``hsdp``. If the model is trained on several processes
    without ``shard_`` (``fully_shard`` alone, or a Trainer), the first forward pass raises RuntimeError.

    A layer multiplies by ``lb.fake_quantize`` of its weight ``[out, in]``. Gradients, optimizer and checkpoints have
    the weight itself. If the recipe of a ``train.prepare_`` layer has the same weight scheme, the layer multiplies the
    gathered codes directly. Its results are then bit-identical to training without ``all_gather_``. Each process
    stores the codes of its rows between steps, one byte per element. A layer that shares its weight with a module that
    is not converted is not converted either. Weights of nn.MultiheadAttention are gathered in their own dtype.

    Args:
        model: The model.
        bits: ``"fp8"`` (E4M3, one scale per row), ``"fp8-tensor"`` or ``"int8"`` (one scale per row). Or a scheme with
            8-bit codes, and one scale per tensor or scales within a row.
        skip: Layers to leave unquantized, as for ``quantize_``.

    Returns:
        A Report of the layers.

    Raises:
        ValueError: The scheme is unknown or not supported, or there is no layer to convert.
        ValueError: Weights are sharded already, or a layer's recipe quantizes its weight with another scheme.
    """
    scheme = _scheme(bits)
    protect = output_layers_protected(model, skip)
    selection = select(model, lambda names, module: _judged(names, module, scheme), skip=skip, protect=protect)
    layers = {name: chosen.module for name, chosen in selection.chosen.items()}
    converted, owners = set(map(id, layers.values())), holders(model)
    for name, layer in list(layers.items()):
        other = next((holder.path for holder in owners[id(layer.weight)] if id(holder.module) not in converted), None)
        if other is not None:
            selection.left[name] = f"it shares its weight with {other}"
            del layers[name]
    if not layers:
        raise ValueError(nothing_found(model, selection, "distributed.all_gather_", "nn.Linear"))
    for layer in layers.values():
        setattr(layer, _SCHEME, scheme)
        if _WAITING not in vars(layer):
            setattr(layer, _WAITING, layer.register_forward_pre_hook(_require_shards))
    report = report_on("distributed.all_gather_", model, layers, f"gathered in {scheme}")
    return replace(report, skipped=tuple(selection.skipped), left=dict(selection.left))


def _require_shards(layer: nn.Module, args: Any) -> None:
    """A forward hook that ``shard_`` removes."""
    if torch.is_grad_enabled() and processes() > 1:
        raise RuntimeError(
            f"distributed.all_gather_: {processes()} processes train this model, and its weights are not gathered in "
            f"{vars(layer)[_SCHEME]}, which only lb.distributed.shard_ with zero2, zero3 or hsdp does; shard the model "
            "with it, or do not call all_gather_"
        )


def gathered_layers(model: nn.Module) -> list[nn.Linear]:
    """The layers that ``all_gather_`` has selected."""
    return [module for module in model.modules() if _SCHEME in vars(module) and isinstance(module, nn.Linear)]


def encoded_(model: nn.Module) -> Exchange:
    """Replace each weight of ``gathered_layers`` by an ``AllGatherWeight``, which ``fully_shard`` then shards.

    Returns:
        Their ``Exchange``, whose ``stepped`` must be a hook of the optimizer.

    Raises:
        ValueError: A layer was prepared with another recipe after ``all_gather_``. The model has not changed.
    """
    layers, exchange = gathered_layers(model), Exchange()
    for layer in layers:
        reason = _refused(layer, vars(layer)[_SCHEME])
        if reason is not None:
            raise ValueError(f"distributed.shard_: a layer of all_gather_ {reason}")
    owners = holders(model)
    for layer in layers:
        vars(layer).pop(_WAITING).remove()
        if isinstance(layer.weight, AllGatherWeight):
            continue  # a tied weight, replaced already
        old: Any = layer.weight
        weight = Weight(layer, vars(layer)[_SCHEME], torch.Size(old.shape), exchange)
        new = nn.Parameter(AllGatherWeight(old.detach(), weight), old.requires_grad)
        for holder in owners[id(old)]:
            _replace(holder, old, new)
            if isinstance(holder.module, TrainLinear):
                holder.module.gathered = weight.operands
        layer.register_load_state_dict_post_hook(weight.loaded)
        exchange.weights.append(weight)
    return exchange


def _replace(holder: Holder, old: nn.Parameter, new: nn.Parameter) -> None:
    for name, parameter in holder.module._parameters.items():
        if parameter is old:
            holder.module._parameters[name] = new


# -- supported schemes and layers -------------------------------------------------------------------------------------
def _scheme(bits: str | Scheme) -> Scheme:
    known = ", ".join(SHORT_NAMES_8BIT)
    try:
        scheme = scheme_8bit(bits)
    except ValueError as error:
        close = did_you_mean(bits, [*SHORT_NAMES_8BIT, *SHORT_NAMES]) if isinstance(bits, str) else ""
        raise ValueError(
            f"distributed.all_gather_: expected one of {known}, or a scheme, got {bits!r}{close}; {error}"
        ) from None
    within = scheme.block[0] == 1 or scheme.block == (None, None)
    if scheme.format.bits != 8 or not within or scheme.affine or scheme.full or scheme.global_scale is not None:
        raise ValueError(
            f"distributed.all_gather_: expected 8-bit codes with one scale per tensor or scales within a row, and "
            f"neither zero points nor a global scale, got {scheme}; use one of {known}, or a scheme such as "
            f"'int8:group64' or 'mxfp8'"
        )
    return scheme


def _judged(names: list[str], module: nn.Module, scheme: Scheme) -> Verdict:
    if isinstance(module, nn.MultiheadAttention):
        return Verdict(reason="the weights of an nn.MultiheadAttention are gathered in their own dtype")
    if not isinstance(module, TrainLinear):
        verdict = plain_layers(only=(nn.Linear,), replaced=False)(names, module)
        if kind_of(module) is not None:
            return Verdict(reason="it is quantized already, and its codes are gathered")
        if verdict.adapter is None:
            return verdict
    reason = _refused(module, scheme)
    return Verdict(find(nn.Linear(1, 1, device="meta")).adapter) if reason is None else Verdict(error=reason)


def _refused(layer: Any, scheme: Scheme) -> str | None:
    """Why the weight of a Linear cannot be gathered in this scheme, or None."""
    if is_dtensor(layer.weight):
        return "has a weight that is sharded already (DTensor); call all_gather_ before shard_"
    if not isinstance(layer, TrainLinear):
        return None
    cast, name = layer.products.weight, layer.recipe.name
    if cast != Cast(scheme):
        how = "does not quantize its weight" if cast is None else f"quantizes its weight by {cast.scheme}, {cast.scale}"
        return (
            f"trains with the recipe {name!r}, which {how}, but all_gather_ would quantize it by {scheme} first; pass "
            f"the recipe's weight scheme as bits=..., or name the layer in skip=..."
        )
    if layer.products.grad_input.save != "codes":
        return (
            f"trains with the recipe {name!r}, whose backward needs the weight in addition to its codes; use a recipe "
            f"that multiplies the codes of forward (fp8, fp8-tensor, int8), or name the layer in skip=..."
        )
    return None


# -- weights ----------------------------------------------------------------------------------------------------------
class Weight:
    """One weight ``[out, in]`` on this process: the codes of its rows, and all scales.

    ``quantized`` is the full weight while it is gathered. Its codes are in memory of ``fully_shard``.
    """

    def __init__(self, layer: nn.Module, scheme: Scheme, shape: torch.Size, exchange: Exchange) -> None:
        self.layer, self.scheme, self.shape, self.exchange = layer, scheme, shape, exchange
        self.quantized: Quantized | None = None
        self.codes: Tensor | None = None
        self.scale: Tensor | None = None
        self._contribution: Tensor | None = None
        self._param: Any = None
        self._version: tuple[int, ...] | None = None
        self._address = 0

    @property
    def per_tensor(self) -> bool:
        """Whether one scale spans the rows of all processes."""
        return self.scheme.block[0] is None

    @property
    def shard(self) -> AllGatherWeight | None:
        """This process' rows; None if ``fully_shard`` ignores the weight."""
        param = self.layer._parameters["weight"]
        if is_dtensor(param):  # while it is gathered, the layer has another parameter, and the last one is its shard
            self._param = param
        local = None if self._param is None else local_part(self._param)
        return local if isinstance(local, AllGatherWeight) else None

    def changed(self) -> bool:
        """Whether the rows have changed since they were quantized, or an optimizer has stepped the weight."""
        return self._version != self._now()

    def stepped(self, params: Container[int]) -> None:
        """Note that an optimizer has stepped the parameters with these ids."""
        if self.shard is not None and id(self._param) in params:
            torch.autograd.graph.increment_version(self._param)

    def _now(self) -> tuple[int, ...]:
        return id(self._param), self._param._version, local_part(self._param)._version

    def contribution(self, shard: Tensor, count: int) -> Tensor:
        """This process' input to the exchange of scales among ``count`` processes.

        That is fp32 ``[1]``, the largest magnitude, for a per-tensor scale. Otherwise it is the bytes of the scales,
        padded to the number of rows of the first process; the codes are computed too.
        """
        if self.changed() or self._contribution is None:
            rows = -(-self.shape[0] // count)
            if self.per_tensor:
                low, high = (
                    call("block_range", shard, self.scheme.name) if shard.numel() else (shard.new_zeros(1, 1),) * 2
                )
                self._contribution = torch.where(high >= low.abs(), high, low.abs()).float().reshape(1)
            else:
                q = quantize(shard, self.scheme)
                self.codes = _padded(q.codes, rows)
                self._contribution = _padded(q.scale, rows).view(torch.uint8).reshape(-1)
        return self._contribution

    def encode(self, shard: Tensor, count: int) -> None:
        """Compute the codes by a per-tensor scale."""
        assert self.scale is not None
        if self.per_tensor and (self.changed() or self.codes is None):
            self.codes = _padded(quantize(shard, self.scheme, self.scale).codes, -(-self.shape[0] // count))
        self._version = self._now()

    def decode(self, codes: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """The full weight in ``dtype`` from gathered codes, in ``out`` if it is given."""
        assert self.scale is not None
        scale = self.scale.to(codes.device)
        self.quantized = Quantized(codes[: self.shape[0]], scale, None, None, self.scheme, self.shape, dtype)
        weight = self.quantized.dequantize(out=out) if out is not None else self.quantized.dequantize()
        self._address = weight.data_ptr()
        return weight

    def operands(self, weight: Tensor, products: Products) -> WeightOperands | None:
        """The operands of a layer's matmuls, if ``weight`` is the weight that was gathered last."""
        if self.quantized is None or transformed() or is_dtensor(weight) or weight.data_ptr() != self._address:
            return None
        return WeightOperands.given(self.quantized)

    def loaded(self, layer: nn.Module, keys: Any) -> None:
        """Restore the tensor class of the shard, which ``load_state_dict(assign=True)`` replaces by a plain tensor."""
        param: Any = layer._parameters["weight"]
        if is_dtensor(param) and not isinstance(local_part(param), AllGatherWeight):
            set_local_part(param, AllGatherWeight(local_part(param), self))


class Exchange:
    """The weights of a model that are gathered as codes, with one exchange of scales for all of them."""

    def __init__(self) -> None:
        self.weights: list[Weight] = []

    def stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """A step hook of the optimizer. A step changes no memory of a process without rows, but it must know of it."""
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for weight in self.weights:
            weight.stepped(params)

    @torch.no_grad()
    def update(self, mesh: Any) -> None:
        """Quantize the weights that have changed, and exchange their scales.

        Either all processes do so or none, because only optimizer steps and loading change weights, on all processes.
        """
        shards = [(weight, shard) for weight in self.weights if (shard := weight.shard) is not None]
        if not any(weight.changed() for weight, _ in shards):
            return
        count = mesh.size()
        parts = [(weight, weight.contribution(shard.plain, count)) for weight, shard in shards]
        self._reduce_amax([part for part in parts if part[0].per_tensor], mesh)
        self._gather_scales([part for part in parts if not part[0].per_tensor], mesh)
        for weight, shard in shards:
            weight.encode(shard.plain, count)

    def _reduce_amax(self, parts: Sequence[tuple[Weight, Tensor]], mesh: Any) -> None:
        if not parts:
            return
        # Magnitudes have the order of their bits as integers, in which NaN is the largest; a float maximum may drop it.
        bits = torch.cat([amax for _, amax in parts]).view(torch.int32).to(mesh.device_type)
        if mesh.size() > 1:
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=mesh.get_group())
        for (weight, local), amax in zip(parts, bits.view(torch.float32), strict=True):
            weight.scale = quantize(amax.to(local.device).reshape(1, 1), weight.scheme).scale

    def _gather_scales(self, parts: Sequence[tuple[Weight, Tensor]], mesh: Any) -> None:
        if not parts:
            return
        sent = torch.cat([raw for _, raw in parts]).to(mesh.device_type)
        got = (gather_flat(sent, mesh.get_group()) if mesh.size() > 1 else sent).view(mesh.size(), -1)
        for (weight, local), raw in zip(parts, got.split([len(raw) for _, raw in parts], 1), strict=True):
            shape = weight.scheme.scale_shape(*weight.shape)
            scales = raw.to(local.device).contiguous().view(-1).view(scale_dtype(weight.scheme))
            weight.scale = scales.view(-1, shape[1])[: shape[0]]


def _padded(rows: Tensor, count: int) -> Tensor:
    """The rows, padded to ``count``, because all processes must send as many rows as the first one has."""
    return rows.contiguous() if len(rows) == count else nn.functional.pad(rows, (0, 0, 0, count - len(rows)))


# -- the tensor -------------------------------------------------------------------------------------------------------
#: Ops whose results stay an ``AllGatherWeight``: ``fully_shard`` creates and moves shards with them.
_PRESERVING = frozenset(
    getattr(torch.ops.aten, name).default for name in ("detach", "alias", "new_zeros", "_to_copy", "_pin_memory")
) | {torch.ops.aten.slice.Tensor}


class AllGatherWeight(Tensor):
    """A high-precision weight, or rows of one, that ``fully_shard`` gathers as codes.

    It shares memory and version counter with the tensor that it is made from. Results of other ops are plain tensors.
    Saving and copying give plain tensors too.
    """

    of: Weight

    __torch_function__ = disabled_torch_function

    def __new__(cls, rows: Tensor, of: Weight) -> AllGatherWeight:
        tensor: AllGatherWeight = make_subclass(cls, rows)
        tensor.of = of
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with below_torch_dispatch():
            result = func(*args, **(kwargs or {}))
            return cls(result, args[0].of) if func in _PRESERVING else result

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
                f"distributed.all_gather_: expected shards with full rows of a weight {list(outer_size)}, got "
                f"{list(self.shape)}; do not pass shard_placement_fn, or name the layer in skip=... of all_gather_"
            )
        self.of.exchange.update(mesh)
        assert self.of.codes is not None
        return (self.of.codes.to(mesh.device_type, non_blocking=True),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The full weight from the codes of all processes."""
        if out is None:
            weight = self.of.decode(outputs[0], param_dtype, None)
            return weight, (weight,)
        # Autograd may have saved ``out``. Its version must not change, since the same numbers are written again.
        with torch.no_grad(), preserved_version(out):
            self.of.decode(outputs[0], param_dtype, out.detach())
        return None
