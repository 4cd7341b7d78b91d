"""QuantLinear: a Linear layer whose weight is one Quantized, for inference and for adapters on top of it.

Codes and scales are integer parameters without gradient, rows as dim 0: FSDP2 shards parameters (not buffers), and
neither ``model.bfloat16()`` nor a mixed-precision policy casts integers, so no bit of them ever changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.functional import BoundLinear, linear, panels_serve
from lowbit.panels import are_panels
from lowbit.quantized import Quantized, scale_dtype, zero_dtype
from lowbit.recipes import Recipe
from lowbit.scaling import Scheme, as_matrix

__all__ = ["QuantLinear", "empty", "result_dtype"]

#: The parameters that make up the weight.
_PARTS = ("codes", "scale", "zero_point", "outer_scale")

#: What ``_bound`` is without one: a BoundLinear, the parameters that it is for (``_PARTS``), and the bias.
_UNBOUND: tuple[Any, ...] = (None,) * (2 + len(_PARTS))

#: The integer dtype whose bits hold those of a floating-point scale.
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}

#: Held while codes change their layout, and while what is copied of them must not.
_LAYOUT = threading.RLock()

_compiling = torch.compiler.is_compiling

#: Whether autocast is on for any kind of device.
_autocast = torch._C._is_any_autocast_enabled


def result_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a Linear answers: autocast's inside autocast, else that of its input."""
    if not _autocast():
        return x.dtype
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind):  # the meta device, for one
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def empty(
    shape: tuple[int, ...], scheme: Scheme, dtype: torch.dtype, device: torch.device | str | None = None
) -> Quantized:
    """A Quantized of that shape whose tensors are allocated but not filled; ``load_model`` fills them."""
    rows, cols = as_matrix(shape)
    scales = scheme.scale_shape(rows, cols)

    def make(size: tuple[int, ...], kind: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=kind, device=device)

    return Quantized(
        make((*shape[:-1], scheme.packed_cols(cols)), torch.uint8),
        make(scales, scale_dtype(scheme)),
        make(scales, zero_dtype(scheme)) if scheme.affine else None,
        make(scheme.outer_shape(rows), torch.float32) if scheme.outer else None,
        scheme, torch.Size(shape), dtype,
    )  # fmt: skip


class QuantLinear(nn.Module):
    """``y = x @ weight.T + bias`` with a quantized weight, and with ``recipe.input`` a dynamically quantized input.

    ``weight``: Quantized ``[out_features, in_features]``; ``bias [out_features]`` stays in high precision. Input
    ``[..., in_features]`` fp32, bf16 or fp16; the result has its dtype (inside autocast: autocast's). The gradient of
    the input passes straight through its quantization: ``grad @ weight.dequantize()``.

    Parameters: ``codes``, ``scale``, ``zero_point`` (affine schemes) and ``outer_scale`` (two-level schemes); floating
    scales are kept as the integers of their bits, and ``.weight`` shows them as the numbers they are. Integers have no
    gradient, so torch raises for ``model.requires_grad_(True)``; set it on the floating-point parameters instead. What
    averages parameters (``AveragedModel``) would average these integers too, which moves the scales a little at every
    update: average the floating-point ones only, for instance with
    ``multi_avg_fn=lambda a, b, n: ema(a, b, n) if a[0].is_floating_point() else None``.
    ``state_dict`` also holds the scheme's name, as ``_extra_state``: ASCII in a uint8 tensor, which every container of
    tensors keeps (safetensors, distributed checkpoints). ``load_state_dict`` refuses codes of another scheme, since
    most would fit, and mean something else. Backward runs on the backend of its forward; inside torch.compile each
    call chooses anew.

    Where kernels are faster on another layout of the codes (lowbit/panels.py), the first call on the CPU without grad
    mode, any other mode or a forced backend puts the parameter in it, in place. ``weight.codes``, ``state_dict``,
    copies and pickles show rows all the same; only the bare parameter (``layer.codes``, ``parameters()``) shows panels.
    State, copies and moves turn it back to rows, and the next call packs it again. Compiled and exported code takes the
    layout that it finds: call the layer once before compiling it; shard it, or begin an ``AveragedModel`` of it, before
    that. Codes that processes share stay rows, and so do those that a sharding (torch.distributed is initialized) or a
    forward replaced on the layer itself may exchange.
    Raises TypeError for inputs of other dtypes, ValueError for another last axis.
    """

    codes: nn.Parameter
    scale: nn.Parameter
    zero_point: nn.Parameter | None
    outer_scale: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, weight: Quantized, bias: nn.Parameter | None, recipe: Recipe) -> None:
        super().__init__()
        if weight.ndim != 2:
            raise ValueError(f"QuantLinear needs a weight [out, in], got shape {list(weight.shape)}")
        self.out_features, self.in_features = weight.shape
        self.recipe, self.scheme = recipe, weight.scheme
        self.weight_dtype = weight.dtype
        parts = weight.parts
        for name in _PARTS:
            part = parts.get(name)
            self.register_parameter(name, None if part is None else _as_integers(part))
        self._scale_dtype: torch.dtype = weight.scale.dtype
        self._shown: Quantized | None = None
        self._settled: Quantized | None = None  # that whose layout has been chosen
        self._bound = _UNBOUND
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Quantized:
        """The weight; views of this layer's parameters, made anew where these have moved."""
        own: dict[str, Any] = self._parameters
        codes, scale, outer = own["codes"], own["scale"], own["outer_scale"]
        if torch.compiler.is_compiling():
            return self._show(own)
        shown = self._shown
        if (
            shown is None
            or not (shown.stored is codes or shown.stored.data_ptr() == codes.data_ptr() != 0)
            or shown.zero_point is not own["zero_point"]
            or shown.dtype is not self.weight_dtype
            or shown.scale.data_ptr() != scale.data_ptr()
            or (outer is not None and shown.outer_scale.data_ptr() != outer.data_ptr())  # type: ignore[union-attr]
        ):
            with _LAYOUT:
                # Of codes that may be packed an alias: a call on its way keeps what it reads, whatever becomes of them.
                aliased = {"codes": codes.detach()} if _on_cpu(codes) else {}
                shown = self._shown = self._show({**own, **aliased})
        return shown

    def _show(self, own: dict[str, Any]) -> Quantized:
        scale, outer = own["scale"], own["outer_scale"]
        if scale.dtype != self._scale_dtype:
            scale = scale.view(self._scale_dtype)
        if outer is not None:
            outer = outer.view(torch.float32)
        shape = torch.Size((self.out_features, self.in_features))
        return Quantized(own["codes"], scale, own["zero_point"], outer, self.scheme, shape, self.weight_dtype)

    def __getstate__(self) -> dict[str, Any]:
        self._to_rows()
        return {**self.__dict__, "_settled": None, "_shown": None, "_bound": _UNBOUND}

    def share_weight(self, other: QuantLinear) -> None:
        """Hold the very parameters of ``other``'s weight: tied layers have one Quantized."""
        for name in _PARTS:
            self._parameters[name] = other._parameters[name]

    def forward(self, x: Tensor) -> Tensor:
        if _compiling():
            x, dtype = self._taken(x)
            return linear(x, self.weight, self.bias, self.recipe.input, dtype)
        own, (bound, codes, scale, zero_point, outer, bias) = self._parameters, self._bound
        if (
            bound is not None
            and own["codes"] is codes
            and own["scale"] is scale
            and own["zero_point"] is zero_point
            and own["outer_scale"] is outer
            and own["bias"] is bias
            and bound.dtype is x.dtype
            and not _autocast()
        ):
            y: Tensor | None = bound.again(x)
            if y is not None:
                return y
        return self._look_up(x)

    def _taken(self, x: Tensor) -> tuple[Tensor, torch.dtype]:
        """What is multiplied for ``x``, and the dtype of the answer."""
        dtype = result_dtype(x)
        return x.to(dtype) if self.recipe.input is None and x.dtype != dtype else x, dtype

    def _look_up(self, x: Tensor) -> Tensor:
        """``forward`` where anything may have changed since the last call."""
        x, dtype = self._taken(x)
        # Before the weight: should another thread replace one meanwhile, the next call sees it.
        own = [self._parameters[name] for name in (*_PARTS, "bias")]
        weight, bound = self.weight, self._bound[0]
        if weight is not self._settled and not torch.is_grad_enabled():
            weight = self._settle()
        if bound is None or bound.weight is not weight or bound.bias is not own[-1] or bound.dtype is not dtype:
            views = zip(own, (weight.stored, weight.scale, None, weight.outer_scale), strict=False)
            moves = tuple((part, view) for part, view in views if part is not None and view is not None)
            bound = BoundLinear(weight, own[-1], self.recipe.input, dtype, moves)
        self._bound = (bound, *own)
        y: Tensor = bound(x)
        return y

    def _settle(self) -> Quantized:
        """The weight, put in panels where the kernels in use are faster on those and nobody else moves its codes."""
        codes: Any = self._parameters["codes"]
        alone = _on_cpu(codes) and not codes.is_inference() and "forward" not in vars(self) and not _distributed()
        with _LAYOUT:
            serve = alone and panels_serve(self.weight, self.recipe.input)
            if serve:
                with torch.inference_mode(False):
                    codes.data = self.weight.in_panels().stored
            if serve is not None:
                self._settled = self.weight
            return self.weight

    def _to_rows(self) -> None:
        """Put packed codes back in rows; all that looks at the parameters from outside comes here first."""
        codes: Any = self._parameters["codes"]
        with _LAYOUT:
            if type(codes) is nn.Parameter and are_panels(codes):
                with torch.inference_mode(False):
                    codes.data = self.weight.codes
                self._settled, self._shown, self._bound = None, None, _UNBOUND

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"recipe={self.recipe.name}, weight={self.scheme}, input={self.recipe.input or 'float'}"
        )

    def get_extra_state(self) -> Tensor:
        return torch.tensor(list(self.scheme.name.encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """``_load_from_state_dict`` has compared it already, before any parameter was written."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with _LAYOUT:
            self._to_rows()
            super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        wrong = self._misfits(state_dict, prefix)
        if wrong:  # nothing of this layer is written
            error_msgs.extend(wrong)
            return
        self._to_rows()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _misfits(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """Why codes and scales of ``state_dict`` mean something else than this layer would read in them."""
        held = state_dict.get(f"{prefix}_extra_state")
        if isinstance(held, Tensor) and not held.is_meta:
            name = bytes(held.tolist()).decode(errors="replace")
            if not self.scheme.is_named(name):
                return [
                    f"{prefix}codes: the state has a weight in scheme {name!r}, and this layer one in "
                    f"{self.scheme.name!r}; quantize the model with the recipe that the state was saved with"
                ]
        return [
            f"{prefix}{part}: the state has dtype {given.dtype}, and this layer {own.dtype}, whose bits it must be"
            for part in _PARTS
            if (own := self._parameters[part]) is not None
            and isinstance(given := state_dict.get(prefix + part), Tensor)
            and given.dtype != own.dtype
        ]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        """Casts and moves reach the bias and the dtype that ``weight`` answers; codes and scales are only moved."""
        self._to_rows()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._settled, self._shown, self._bound = None, None, _UNBOUND  # lest they keep what was moved away
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype
        return self


def _on_cpu(codes: Tensor) -> bool:
    """Whether these are codes that a layer may pack: a parameter of torch's own class, on the CPU."""
    return type(codes) is nn.Parameter and codes.device.type == "cpu"


def _distributed() -> bool:
    """Whether parameters may belong to a sharding, which puts them together and apart around each call."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _as_integers(part: Tensor) -> nn.Parameter:
    held = part.detach()
    return nn.Parameter(held.view(_BITS[held.dtype]) if held.is_floating_point() else held, requires_grad=False)
