"""Mixed precision: matrix products in 16 bits, everything else in fp32, of any model in place.

``PARTS`` is the table of what is computed in what; torch's autocast does it, and a test holds each row against it.
Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mkldnn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lowbit.machine import float_precision, multiplies
from lowbit.models.check import check_model
from lowbit.models.ties import model_bytes, tensor_bytes
from lowbit.models.wrap import Wrapper, unwrap, wrap, wrapper_of
from lowbit.optim import Optimizer, masters
from lowbit.optim.shards import is_dtensor, local
from lowbit.report import LayerReport, Report
from lowbit.torch_private import ConvNd, is_fake
from lowbit.user_warnings import warn

__all__ = ["PARTS", "PRECISIONS", "Part", "mixed_", "unmixed_"]

#: What a model can be mixed with fp32.
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Part:
    """A part of training: what it gives of fp32 numbers and of 16-bit ones (``on_cuda``: where CUDA differs), and why.

    ``ops``: the functions that it is of, by the names that tests call them by; none where no function decides it.
    """

    name: str
    of_fp32: str
    of_short: str
    why: str
    ops: tuple[str, ...] = ()
    on_cuda: str | None = None


_SHORT, _FULL = "16 bits", "fp32"

#: What mixed precision computes in what.
PARTS = (
    Part("matrix products", _SHORT, _SHORT, "nearly all of the time; sums inside are in fp32",
         ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")),
    Part("convolutions", _SHORT, _SHORT, "likewise",
         ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")),
    Part("attention", _SHORT, _SHORT, "two products; the softmax between them is in fp32 inside",
         ("scaled_dot_product_attention", "multi_head_attention")),
    Part("norms", _FULL, _SHORT, "their input is the residual sum, in fp32; of 16 bits their sums are fp32 inside",
         ("layer_norm", "rms_norm", "group_norm"), on_cuda=_FULL),
    Part("softmax", _FULL, _SHORT, "exponentials leave the range of fp16", ("softmax", "log_softmax"), on_cuda=_FULL),
    Part("losses", _FULL, _FULL, "a mean over many terms",
         ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
          "binary_cross_entropy_with_logits")),
    Part("embeddings", _FULL, _SHORT, "rows of a table that is in fp32", ("embedding",)),
    Part("residual sums", _FULL, _FULL, "fp32 and 16 bits add up in fp32, so that small terms are not lost",
         ("residual_sum",)),
    Part("activations, dropout, batch norm", _FULL, _SHORT, "they follow a product, and stay in what it gives",
         ("gelu", "silu", "relu", "dropout", "batch_norm")),
    Part("weights", _FULL, _SHORT, "products see copies in 16 bits; working copies have masters in fp32"),
    Part("gradients of weights", _FULL, _SHORT, "in the dtype of the weight, or in fp32 where asked"),
    Part("optimizer", _FULL, _FULL, "masters and states of lowbit.optim, which may have fewer bits; steps are in fp32"),
)  # fmt: skip

#: Layers whose matrices autocast casts in every forward, with the matrices' names.
_MATRICES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("weight",),
    ConvNd: ("weight",),
    nn.MultiheadAttention: ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
}


@dataclass(eq=False)
class Mixed(Wrapper):
    """How a model is mixed; ``copies``: by name, what was cut off parameters that were stored in 16 bits.
    ``context``: makes one of each forward.
    """

    precision: str
    copies: dict[str, masters.Remainder]
    fp32_gradients: bool
    context: Callable[[], AbstractContextManager[object]] = nullcontext

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # A copy of the model, and one that has moved, have forgotten what its parameters were given.
            if self.fp32_gradients:
                _refuse_ddp()
                _widen_gradients(module)
            _attach(module, self.copies)
        short = torch.autocast(_device_type(module, (*args, *kwargs.values())), PRECISIONS[self.precision])
        with short, self.context():
            return _widened(forward(*args, **kwargs))


class _LSTMsWithoutOneDNN(TorchFunctionMode):
    """LSTMs by torch's own kernels: under autocast oneDNN's raise if the processor has no instructions for 16 bits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.lstm or not mkldnn.enabled:
            return func(*args, **(kwargs or {}))
        mkldnn.enabled = False  # type: ignore[assignment]
        try:
            return func(*args, **(kwargs or {}))
        finally:
            mkldnn.enabled = True  # type: ignore[assignment]


def mixed_(
    model: nn.Module, precision: str = "bf16", *, working_copies: bool = False, fp32_gradients: bool | None = None
) -> Report:
    """Make the forward of ``model`` compute in mixed precision, in place, as ``PARTS`` says.

    ``precision``: ``"bf16"``, or ``"fp16"``, which needs a ``LossScaler``. The forward runs under autocast of the
    device of its inputs; floats that it returns in 16 bits, also within containers and dataclasses, come back in fp32.
    Parameters and their names stay, and so do layers of ``prepare_``, checkpointing and DDP. Methods other than
    ``forward`` run as before.

    ``working_copies``: the matrices that autocast would cast in each forward (of Linear, convolutions and attention)
    are stored in 16 bits; norms, embeddings with what shares their table, and biases stay in fp32. Use it with the
    optimizers of ``lowbit.optim`` and ``master="residual"`` or ``"fp32"``, made afterwards: their masters are then the
    weights. Until the first step the model keeps the bits that rounding cut off weights that require gradients: in
    bf16 1 byte per weight (the leading 24 bits of fp32 are kept), in fp16 2. Load fp32 weights before ``mixed_``: later
    they are rounded as they are copied. Other optimizers lose the bits that rounding cuts off.
    ``fp32_gradients``: gradients of parameters in 16 bits accumulate in fp32. None: only where the scaler needs it,
    with working copies in fp16. DDP cannot reduce such gradients, which is an error of the forward.

    Call it on a plain model, before DDP or FSDP2 wraps it. ``unmixed_`` is the way back.
    Raises, with the model untouched: ValueError for another precision, for a model that is mixed already, and for an
    option that finds nothing to change or parameters that it cannot change; TypeError for what is no module.
    """
    check_model(model)
    if hasattr(model, "_orig_mod"):
        raise ValueError("train.mixed_: expected the plain model, got what torch.compile made; call mixed_ before it")
    if precision not in PRECISIONS:
        raise ValueError(f"train.mixed_: precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    before = wrapper_of(model, Mixed)
    if before is not None:
        raise ValueError(
            f"train.mixed_: the model computes in mixed {before.precision} already; call lowbit.train.unmixed_(model) "
            f"first"
        )
    dtype, sizes, left = PRECISIONS[precision], _sizes(model), _to_leave(model) if working_copies else {}
    copies = _to_store(model, left, dtype) if working_copies else {}
    wide = bool(copies) and precision == "fp16" if fp32_gradients is None else fp32_gradients
    short = [p for p in model.parameters() if p.dtype in PRECISIONS.values() and p.requires_grad]
    if wide and not (short or copies):
        raise ValueError(
            "train.mixed_: fp32_gradients is for parameters in 16 bits, and the model has none: its gradients "
            "accumulate in fp32 already; leave it out, or give working_copies=True too"
        )
    _require_plain(model, [*short, *copies.values()] if wide else list(copies.values()))
    remainders = {name: masters.store_short(param, dtype) for name, param in copies.items()}
    slowness = _slowness(model, precision)
    lacks = bool(slowness) and any(isinstance(module, nn.LSTM) for module in model.modules())
    wrap(model, Mixed(precision, remainders, wide, _LSTMsWithoutOneDNN if lacks else nullcontext))
    if wide:
        _widen_gradients(model)
    notes = ("floats in 16 bits come back in fp32", *slowness)
    report = _report("train.mixed_", model, sizes, f"multiply in {precision}")
    return replace(report, recipe=precision, left=left, notes=notes)


def unmixed_(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Report:
    """Make the forward of ``model`` what it was before ``mixed_``, in place, with parameters in fp32 again.

    ``optimizer``: whose masters the weights of working copies become; without one they are the copies, in fp32, with
    what rounding cut off if nothing has stepped since. Make another afterwards, which takes this one's ``state_dict``.
    Raises ValueError, with the model untouched, for a model that is not mixed, whose forward was replaced since, or an
    optimizer without masters of its working copies.
    """
    check_model(model)
    mixed = wrapper_of(model, Mixed)
    if mixed is None:
        raise ValueError("train.unmixed_: expected a model that lowbit.train.mixed_ changed")
    sizes, params = _sizes(model), dict(model.named_parameters())
    copies = {name: params[name] for name in mixed.copies}
    weights = {name: masters.widened(param) if optimizer is None else _master(optimizer, name, param)
               for name, param in copies.items()}  # fmt: skip
    unwrap(model, mixed, "train.unmixed_")
    for name, param in copies.items():
        param.grad, param.data = None, weights[name]
        masters.forget(param)
    for param in model.parameters() if mixed.fp32_gradients else ():
        if param.requires_grad and param.dtype in PRECISIONS.values():
            param.grad, param.grad_dtype = None, param.dtype
    return _report("train.unmixed_", model, sizes, "multiply in their own dtype")


# -- the forward ------------------------------------------------------------------------------------------------------
def _device_type(model: nn.Module, given: Iterable[Any]) -> str:
    """Of the first tensor that the forward is given; of the first parameter where there is none."""
    found = next((x for x in given if isinstance(x, Tensor)), None)
    found = next(model.parameters(), None) if found is None else found
    return "cpu" if found is None else found.device.type


def _widened(result: Any) -> Any:
    """``result`` with its floats of 16 bits in fp32, in the containers that torch knows and in dataclasses."""
    return tree_map(_widened_leaf, result)


def _widened_leaf(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.float() if x.dtype in PRECISIONS.values() else x
    if not is_dataclass(x) or isinstance(x, (type, dict)):  # torch knows those of dict that transformers makes
        return x
    held = {field.name: getattr(x, field.name) for field in fields(x) if hasattr(x, field.name)}
    wide = {name: _widened(value) for name, value in held.items()}
    if all(wide[name] is held[name] for name in held):
        return x
    made = object.__new__(type(x))  # __init__ may ask for more than fields, and frozen ones take no setattr
    for name, value in {**getattr(x, "__dict__", {}), **wide}.items():
        object.__setattr__(made, name, value)
    return made


def _refuse_ddp() -> None:
    """Its buckets have the parameters' dtype, which torch says in words of its own, in the backward pass."""
    if getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise ValueError(
            "train.mixed_: DistributedDataParallel reduces gradients in the dtype of their parameters, not in fp32; "
            "leave out fp32_gradients, or in fp16 working_copies, or shard the model with fully_shard and its "
            "MixedPrecisionPolicy"
        )


def _attach(model: nn.Module, copies: dict[str, masters.Remainder]) -> None:
    waiting = {name: remainder for name, remainder in copies.items() if remainder.bits is not None}
    params = dict(model.named_parameters()) if waiting else {}
    for name in waiting.keys() & params.keys():
        masters.attach(params[name], waiting[name])


def _widen_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        if param.requires_grad and param.dtype in PRECISIONS.values() and param.grad_dtype != torch.float32:
            param.grad_dtype = torch.float32


# -- parameters -------------------------------------------------------------------------------------------------------
def _matrices(model: nn.Module) -> dict[str, tuple[nn.Module, list[nn.Parameter]]]:
    """By name, the layers that autocast runs in 16 bits, with their matrices; not those that have no shape yet."""
    found = {}
    for path, module in model.named_modules():
        names = next((names for cls, names in _MATRICES.items() if isinstance(module, cls)), ())
        mine = [p for name in names if (p := module._parameters.get(name)) is not None and not is_lazy(p)]
        if mine:
            found[path] = module, mine
    return found


def _to_leave(model: nn.Module) -> dict[str, str]:
    """By name, the layers whose matrices other modules compute with too, with the reason to leave them."""
    others: dict[int, set[str]] = {}
    for module in model.modules():
        for param in () if isinstance(module, tuple(_MATRICES)) else module._parameters.values():
            others.setdefault(id(param), set()).add(type(module).__name__)
    return {
        path: f"its weight is also that of {', '.join(sorted(shared))}, and stays as it is"
        for path, (_, mine) in _matrices(model).items()
        if (shared := set().union(*(others.get(id(param), ()) for param in mine)))
    }


def _to_store(model: nn.Module, left: Container[str], dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """By name, the parameters that become working copies."""
    inside = {id(param) for path, (_, mine) in _matrices(model).items() if path not in left for param in mine}
    found = {name: p for name, p in model.named_parameters() if id(p) in inside and p.dtype == torch.float32}
    if not found:
        raise ValueError(
            "train.mixed_: working_copies is for matrices in fp32 of Linear, convolutions and attention that no other "
            "module shares, and the model has none; leave it out, or run a forward first if its layers are lazy"
        )
    largest = torch.finfo(dtype).max
    for name, param in found.items():
        if param.grad is not None:
            raise ValueError(f"train.mixed_: {name} has a gradient in fp32; call optimizer.zero_grad() first")
        if not (param.is_meta or is_fake(param)) and bool((local(param).abs() > largest).any()):
            raise ValueError(
                f"train.mixed_: {name} holds numbers beyond {dtype}, whose largest is {largest:g}; use 'bf16'"
            )
    return found


def _require_plain(model: nn.Module, params: list[Tensor]) -> None:
    """Raises ValueError for parameters that something else has laid out by their dtype."""
    if any(is_dtensor(param) for param in params):
        raise ValueError(
            "train.mixed_: expected plain parameters for working_copies and fp32_gradients, got shards (DTensor); call "
            "mixed_ before fully_shard, or leave the options to its MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        )
    if params and isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "train.mixed_: DistributedDataParallel has laid out gradients in the dtype that parameters had; call "
            "mixed_ with working_copies before it"
        )


def _master(optimizer: torch.optim.Optimizer, name: str, param: Tensor) -> Tensor:
    state = optimizer.state.get(param, {})
    if param.requires_grad and not (isinstance(optimizer, Optimizer) and "master" in state):
        raise ValueError(
            f"train.unmixed_: the optimizer has no master of {name}; give one of lowbit.optim with master='fp32' that "
            f"has stepped, or leave it out to keep the weights in 16 bits as they are"
        )
    return masters.number(local(param), local(state["master"])) if "master" in state else masters.widened(param)


# -- the report -------------------------------------------------------------------------------------------------------
def _sizes(model: nn.Module) -> tuple[int, dict[str, int]]:
    """Bytes of the model, and of each layer by name."""
    layers = {path: (*layer.parameters(), *layer.buffers()) for path, (layer, _) in _matrices(model).items()}
    return model_bytes(model), {path: tensor_bytes(tensors) for path, tensors in layers.items()}


def _report(what: str, model: nn.Module, before: tuple[int, dict[str, int]], done: str) -> Report:
    after, rows = _sizes(model), []
    for path, (layer, mine) in _matrices(model).items():
        count = sum(p.numel() for p in mine)
        bits = 8 * tensor_bytes(mine) / max(count, 1)
        rows.append(LayerReport(path, type(layer).__name__, None, count, bits, before[1][path], after[1][path]))
    return Report(what, None, tuple(rows), bytes_before=before[0], bytes_after=after[0], done=done)


def _slowness(model: nn.Module, precision: str) -> list[str]:
    if _device_type(model, ()) != "cpu" or multiplies(precision):
        return []
    better = float_precision()
    told = (
        f"this processor has no instructions that multiply {precision}, so products take longer than in {better}"
        f"{', many times' if precision == 'fp16' else ''}; train in {better}, or on a GPU"
    )
    warn(f"train.mixed_: {told}")
    return [told]
