"""Mixed precision: run matmuls in 16 bits and everything else in fp32, for any model in place.

The table ``PARTS`` says which computations run in which precision. torch's autocast implements it, and a test checks
each row. Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740.
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
from lowbit.models.replicas import Replicas
from lowbit.models.ties import model_bytes, tensor_bytes
from lowbit.models.wrap import Wrapper, unwrap, wrap, wrapper_of
from lowbit.optim import Optimizer, masters
from lowbit.optim.shards import is_dtensor, local
from lowbit.report import LayerReport, Report
from lowbit.torch_private import ConvNd, is_fake
from lowbit.user_warnings import warn

__all__ = ["PARTS", "PRECISIONS", "Part", "mixed_", "unmixed_"]

#: The 16-bit dtypes of mixed precision, by name.
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Part:
    """One row of the table of precisions: the results of a kind of computation, and why.

    Attributes:
        name: the kind of computation.
        of_fp32: precision of the result for fp32 inputs.
        of_short: precision of the result for 16-bit inputs.
        why: the reason.
        ops: names of the functions, as tests call them; empty if the precision does not depend on a function.
        on_cuda: precision of the result for 16-bit inputs on CUDA, if it differs.
    """

    name: str
    of_fp32: str
    of_short: str
    why: str
    ops: tuple[str, ...] = ()
    on_cuda: str | None = None


_SHORT, _FULL = "16 bits", "fp32"

#: The precision of each kind of computation.
PARTS = (
    Part("matmuls", _SHORT, _SHORT, "they take nearly all of the time, and accumulate in fp32",
         ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")),
    Part("convolutions", _SHORT, _SHORT, "likewise",
         ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")),
    Part("attention", _SHORT, _SHORT, "two matmuls; the softmax between them is computed in fp32",
         ("scaled_dot_product_attention", "multi_head_attention")),
    Part("norms", _FULL, _SHORT, "their input is the residual sum, in fp32; 16-bit inputs are summed in fp32",
         ("layer_norm", "rms_norm", "group_norm"), on_cuda=_FULL),
    Part("softmax", _FULL, _SHORT, "exponentials leave the range of fp16", ("softmax", "log_softmax"), on_cuda=_FULL),
    Part("losses", _FULL, _FULL, "a mean over many terms",
         ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
          "binary_cross_entropy_with_logits")),
    Part("embeddings", _FULL, _SHORT, "rows of an fp32 table", ("embedding",)),
    Part("residual sums", _FULL, _FULL, "fp32 plus 16 bits is added in fp32, so small terms are not lost",
         ("residual_sum",)),
    Part("activations, dropout, batch norm", _FULL, _SHORT, "they follow a matmul and keep the dtype of its result",
         ("gelu", "silu", "relu", "dropout", "batch_norm")),
    Part("weights", _FULL, _SHORT, "matmuls read 16-bit copies; working copies have fp32 masters"),
    Part("gradients of weights", _FULL, _SHORT, "in the dtype of the weight, or in fp32 with fp32_gradients"),
    Part("optimizer", _FULL, _FULL, "steps are in fp32; masters and states of lowbit.optim may have fewer bits"),
)  # fmt: skip

#: Layer classes whose matrices autocast casts in every forward, with the names of the matrices.
_MATRICES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("weight",),
    ConvNd: ("weight",),
    nn.MultiheadAttention: ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
}


@dataclass(eq=False)
class Mixed(Wrapper):
    """Wrapper of the forward of a mixed-precision model.

    Attributes:
        precision: key of ``PRECISIONS``.
        copies: for each working copy by name, the bits that rounding to 16 bits cut off.
        fp32_gradients: whether gradients of 16-bit parameters accumulate in fp32.
        context: returns a context manager that each forward enters.
    """

    precision: str
    copies: dict[str, masters.Remainder]
    fp32_gradients: bool
    context: Callable[[], AbstractContextManager[object]] = nullcontext

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Copying or moving the model drops attributes of its parameters.
            if self.fp32_gradients:
                _refuse_ddp()
                _widen_gradients(module)
            _attach(module, self.copies)
        short = torch.autocast(_device_type(module, (*args, *kwargs.values())), PRECISIONS[self.precision])
        with short, self.context():
            return _widened(forward(*args, **kwargs))


class _LSTMsWithoutOneDNN(TorchFunctionMode):
    """Run LSTMs with torch's own kernels: under autocast, oneDNN raises on processors without 16-bit instructions."""

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
    """Make the forward of ``model`` compute in mixed precision, in place.

    The forward runs under ``torch.autocast`` for the device of the first input tensor. ``lowbit.train.mixed.PARTS``
    lists the precision of each kind of operation. 16-bit outputs, also inside containers and dataclasses, are converted
    to fp32. Parameters and their names do not change. It works with ``prepare_``, checkpointing and DDP. Methods other
    than ``forward`` are unchanged. Call it on a plain model, before DDP or FSDP2 wraps it; ``unmixed_`` undoes it.

    Args:
        model: the model, which is changed in place.
        precision: ``"bf16"``, or ``"fp16"``, which needs a ``LossScaler``.
        working_copies: store the matrices that autocast would cast in each forward (of Linear, convolutions and
            attention) in 16 bits. Norms, biases, embeddings and layers that share their table stay in fp32. Create an
            optimizer of ``lowbit.optim`` afterwards with ``master="residual"`` or ``"fp32"``: its masters become the
            weights. Until its first step the model stores the bits that rounding cut off trainable weights. These are 1
            byte per weight in bf16, which preserves 24 of the 32 bits of fp32, and 2 bytes in fp16. Other optimizers
            lose these bits. Load fp32 weights before ``mixed_``: afterwards they are rounded as they are copied.
        fp32_gradients: accumulate gradients of 16-bit parameters in fp32. Default None: only with working copies in
            fp16, because the scaler needs it. DDP cannot reduce such gradients, and the forward raises an error.

    Returns:
        A report of the matrices, with their bytes before and after.

    Raises:
        ValueError: an unknown precision, a model that is in mixed precision already, or an option that has no
            parameters to change or cannot change them. The model is unchanged.
        TypeError: ``model`` is not a module.
    """
    check_model(model)
    if hasattr(model, "_orig_mod"):
        raise ValueError("train.mixed_: expected the plain model, got a compiled one; call mixed_ before torch.compile")
    if precision not in PRECISIONS:
        raise ValueError(f"train.mixed_: precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    mixed = wrapper_of(model, Mixed)
    if mixed is not None:
        raise ValueError(
            f"train.mixed_: the model computes in mixed {mixed.precision} already; call lowbit.train.unmixed_(model) "
            f"first"
        )
    dtype, sizes, left = PRECISIONS[precision], _sizes(model), _to_leave(model) if working_copies else {}
    copies = _to_store(model, left, dtype) if working_copies else {}
    wide = bool(copies) and precision == "fp16" if fp32_gradients is None else fp32_gradients
    short = [p for p in model.parameters() if p.dtype in PRECISIONS.values() and p.requires_grad]
    if wide and not (short or copies):
        raise ValueError(
            "train.mixed_: fp32_gradients is for parameters in 16 bits, and the model has none: its gradients "
            "accumulate in fp32 already; leave it out, or pass working_copies=True too"
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
    """Undo ``mixed_`` in place, with parameters in fp32 again.

    Args:
        model: a model that ``mixed_`` changed.
        optimizer: its masters become the weights that were working copies. Without it the copies are converted to fp32,
            with the bits that rounding cut off if no optimizer has stepped. Create a new optimizer afterwards; it
            accepts the ``state_dict`` of this one.

    Returns:
        A report of the matrices, with their bytes before and after.

    Raises:
        ValueError: the model is not mixed, its forward was replaced since, or the optimizer has no masters of the
            working copies. The model is unchanged.
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
def _device_type(model: nn.Module, inputs: Iterable[Any]) -> str:
    """Device type of the first tensor among the inputs, or else of the first parameter."""
    first = next((x for x in inputs if isinstance(x, Tensor)), None)
    first = next(model.parameters(), None) if first is None else first
    return "cpu" if first is None else first.device.type


def _widened(result: Any) -> Any:
    """Convert 16-bit tensors to fp32, in torch's pytree containers and in dataclasses."""
    return tree_map(_widened_leaf, result, is_leaf=_is_cache)


def _is_cache(x: Any) -> bool:
    """Return whether ``x`` is a key-value cache: the model's next call reads it in the dtype that it has.

    Exporters of transformers register its caches as containers, for the rest of the process.
    """
    return callable(getattr(type(x), "get_seq_length", None))


def _widened_leaf(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.float() if x.dtype in PRECISIONS.values() else x
    if not is_dataclass(x) or isinstance(x, (type, dict)):  # dict subclasses of transformers are pytree containers
        return x
    values = {field.name: getattr(x, field.name) for field in fields(x) if hasattr(x, field.name)}
    wide = {name: _widened(value) for name, value in values.items()}
    if all(wide[name] is values[name] for name in values):
        return x
    copy = object.__new__(type(x))  # __init__ may need more than the fields, and frozen dataclasses reject setattr
    for name, value in {**getattr(x, "__dict__", {}), **wide}.items():
        object.__setattr__(copy, name, value)
    return copy


def _refuse_ddp() -> None:
    """Raise before torch does: DDP's buckets have the parameters' dtype, and torch's error comes only in backward."""
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
    """Layers that autocast runs in 16 bits, by name, with their matrices; layers whose weight has no shape yet are left
    out.
    """
    layers = {}
    for path, module in model.named_modules():
        names = next((names for cls, names in _MATRICES.items() if isinstance(module, cls)), ())
        matrices = [p for name in names if (p := module._parameters.get(name)) is not None and not is_lazy(p)]
        if matrices:
            layers[path] = module, matrices
    return layers


def _to_leave(model: nn.Module) -> dict[str, str]:
    """Layers whose matrices other modules use too, by name, with the reason to leave them."""
    users: dict[int, set[str]] = {}
    for module in model.modules():
        for param in () if isinstance(module, tuple(_MATRICES)) else module._parameters.values():
            users.setdefault(id(param), set()).add(type(module).__name__)
    return {
        path: f"its weight is shared with {', '.join(sorted(classes))}, and stays as it is"
        for path, (_, matrices) in _matrices(model).items()
        if (classes := set().union(*(users.get(id(param), ()) for param in matrices)))
    }


def _to_store(model: nn.Module, left: Container[str], dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """The parameters that become working copies, by name."""
    inside = {id(param) for path, (_, matrices) in _matrices(model).items() if path not in left for param in matrices}
    copies = {name: p for name, p in model.named_parameters() if id(p) in inside and p.dtype == torch.float32}
    if not copies:
        raise ValueError(
            "train.mixed_: expected fp32 matrices of Linear, convolutions or attention that no other module shares for "
            "working_copies, and the model has none; leave it out, or run a forward first if its layers are lazy"
        )
    largest = torch.finfo(dtype).max
    for name, param in copies.items():
        if param.grad is not None:
            raise ValueError(f"train.mixed_: {name} has a gradient in fp32; call optimizer.zero_grad() first")
        if not (param.is_meta or is_fake(param)) and bool((local(param).abs() > largest).any()):
            raise ValueError(f"train.mixed_: {name} has values beyond the largest of {dtype}, {largest:g}; use 'bf16'")
    return copies


def _require_plain(model: nn.Module, params: list[Tensor]) -> None:
    """Raise ValueError for parameters whose gradients DTensor or DDP has laid out by dtype."""
    if any(is_dtensor(param) for param in params):
        raise ValueError(
            "train.mixed_: expected plain parameters for working_copies and fp32_gradients, got shards (DTensor); call "
            "mixed_ before fully_shard, or leave the options to its MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        )
    if params and isinstance(model, nn.parallel.DistributedDataParallel | Replicas):
        raise ValueError(
            f"train.mixed_: {type(model).__name__} has laid out gradients in the dtype that parameters had; call "
            "mixed_ with working_copies before it"
        )


def _master(optimizer: torch.optim.Optimizer, name: str, param: Tensor) -> Tensor:
    state = optimizer.state.get(param, {})
    if param.requires_grad and not (isinstance(optimizer, Optimizer) and "master" in state):
        raise ValueError(
            f"train.unmixed_: the optimizer has no master of {name}; give one of lowbit.optim with master='fp32' that "
            f"has stepped, or leave it out to keep the 16-bit values of the weights"
        )
    return masters.number(local(param), local(state["master"])) if "master" in state else masters.widened(param)


# -- the report -------------------------------------------------------------------------------------------------------
def _sizes(model: nn.Module) -> tuple[int, dict[str, int]]:
    """Bytes of the model, and bytes of each layer by name."""
    layers = {path: (*layer.parameters(), *layer.buffers()) for path, (layer, _) in _matrices(model).items()}
    return model_bytes(model), {path: tensor_bytes(tensors) for path, tensors in layers.items()}


def _report(what: str, model: nn.Module, before: tuple[int, dict[str, int]], done: str) -> Report:
    after, rows = _sizes(model), []
    for path, (layer, matrices) in _matrices(model).items():
        count = sum(p.numel() for p in matrices)
        bits = 8 * tensor_bytes(matrices) / max(count, 1)
        rows.append(LayerReport(path, type(layer).__name__, None, count, bits, before[1][path], after[1][path]))
    return Report(what, None, tuple(rows), bytes_before=before[0], bytes_after=after[0], done=done)


def _slowness(model: nn.Module, precision: str) -> list[str]:
    if _device_type(model, ()) != "cpu" or multiplies(precision):
        return []
    better = float_precision()
    message = (
        f"this processor has no instructions that multiply {precision}, so products take longer than in {better}"
        f"{', many times' if precision == 'fp16' else ''}; train in {better}, or on a GPU"
    )
    warn(f"train.mixed_: {message}")
    return [message]
