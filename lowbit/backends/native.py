"""What the CPU and CUDA backends share: calls of ops as calls of ``torch.ops.lowbit_native.*``.

Native ops take matrices with unit column stride, plain integers for formats and schemes, and outputs to fill; here
tensors of any rank and stride become that.  Schemas: csrc/ops.cpp.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit import formats, scaling
from lowbit.backends.registry import Impl, forced
from lowbit.ops import codec, optimizer
from lowbit.ops import quantize as q
from lowbit.ops.spec import as_rows

__all__ = [
    "LIBRARY",
    "RUN",
    "adamw",
    "build_notice",
    "features",
    "load",
    "loading_error",
    "scheme_number",
    "with_warning",
]

#: The torch ops, built by CMake into the package.
LIBRARY = Path(__file__).parents[1] / "lowbit_ops.so"

_REBUILD = (
    "with a C++ compiler there, run `make build` in a checkout, or install lowbit again: "
    "`pip install -v --force-reinstall --no-deps --no-cache-dir .` in the folder of its sources"
)


# -- the library -------------------------------------------------------------------------------------------------------
def build_notice() -> str | None:
    """What the build of the native code had to leave out, and how to get it; None where nothing is missing."""
    record = _record()
    if record is None:
        return f"the native code was not built; {_REBUILD}"
    notice = record["notice"]
    return None if notice is None else str(notice)


def _record() -> dict[str, Any] | None:
    """What setup.py wrote of the build."""
    path = LIBRARY.with_name("_build.json")
    return dict(json.loads(path.read_text())) if path.exists() else None


@cache
def loading_error() -> str | None:
    """Load the native ops once; None, or why they cannot be had and how to get them."""
    if not LIBRARY.exists():
        return build_notice() or f"{LIBRARY.name} is not in the package; {_REBUILD}"
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        return f"{LIBRARY} cannot be loaded ({error.__cause__ or error}); build it for this torch: {_REBUILD}"
    return _stale()


def _stale() -> str | None:
    """Why the library that was loaded is not used: it was generated from another table of formats."""
    ops = torch.ops.lowbit_native
    if hasattr(ops, "fingerprint") and ops.fingerprint() == formats.fingerprint():
        return None
    return f"{LIBRARY.name} was built with another table of formats than lowbit/formats.py has; rebuild: make build"


def with_warning(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``rows`` of the reference; where the native library is absent and was wanted, they warn once on the CPU.

    pip shows no notices of a build, so this is the first that a user hears of it. Silent under ``use_backend``.
    """
    if loading_error() is None or not (_record() or {}).get("wanted", True):
        return rows
    return tuple(replace(row, run=_warning(row.run)) for row in rows)


def _warning(run: Callable[[tuple[Tensor, ...], Any], None]) -> Callable[[tuple[Tensor, ...], Any], None]:
    def run_and_say(outs: tuple[Tensor, ...], call: Any) -> None:
        if outs[0].device.type == "cpu" and forced() is None:
            _warn()
        run(outs, call)

    return run_and_say


@cache
def _warn() -> None:
    warnings.warn(
        f"lowbit runs on its reference, which is slow: {loading_error()}. To be silent: install with LOWBIT_NATIVE=0, "
        "or warnings.filterwarnings('ignore', 'lowbit runs on its reference')",
        RuntimeWarning,
        stacklevel=3,
    )


def load() -> Any:
    """``torch.ops.lowbit_native``. Raises RuntimeError where it cannot be had."""
    error = loading_error()
    if error is not None:
        raise RuntimeError(error)
    return torch.ops.lowbit_native


def features() -> list[str]:
    """The processor features that kernels ask for, those present; none without the module that knows them."""
    try:
        from lowbit import _native  # type: ignore[attr-defined]
    except ImportError:
        return []
    return list(_native.cpu_features())


# -- arguments ---------------------------------------------------------------------------------------------------------
@cache
def _format(name: str) -> int:
    """A format as native ops take it: the number under which they keep it."""
    number: int = torch.ops.lowbit_native.keep(formats.find(name).params())
    return number


@cache
def scheme_number(name: str | None) -> int:
    """The same of a scheme; of a float matrix, which has none, -1."""
    number: int = -1 if name is None else torch.ops.lowbit_native.keep(scaling.scheme(name).params())
    return number


def _matrix(x: Tensor) -> Tensor:
    """``x`` as ``[rows, cols]`` with unit column stride, copied only where its strides ask for it."""
    matrix = as_rows(x)
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def _filled(out: Tensor) -> Tensor:
    """An output, which is contiguous, as a matrix."""
    return out if out.dim() == 2 else out.view(-1, out.shape[-1]) if out.dim() else out.view(1, 1)


def _dense(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _rng(call: Any, cols: int) -> list[int]:
    """Where the random bits of stochastic rounding come from; nothing asks for rounding to nearest."""
    if call.rounding == "nearest":
        return []
    return [call.seed, call.step, call.stream, call.offset, cols if call.pitch is None else call.pitch]


# -- ops ---------------------------------------------------------------------------------------------------------------
def _encode(outs: tuple[Tensor, ...], call: codec.Encode) -> None:
    x = _matrix(call.x)
    torch.ops.lowbit_native.encode(x, _filled(outs[0]), _format(call.format), call.saturate, _rng(call, x.shape[1]))


def _decode(outs: tuple[Tensor, ...], call: codec.Decode) -> None:
    torch.ops.lowbit_native.decode(_filled(call.codes.contiguous()), _filled(outs[0]), _format(call.format))


def _pack(outs: tuple[Tensor, ...], call: codec.Pack) -> None:
    torch.ops.lowbit_native.pack(_filled(call.codes.contiguous()), _filled(outs[0]), call.bits)


def _unpack(outs: tuple[Tensor, ...], call: codec.Unpack) -> None:
    torch.ops.lowbit_native.unpack(_filled(call.packed.contiguous()), _filled(outs[0]), call.bits)


def _outer_scale(outs: tuple[Tensor, ...], call: q.OuterScale) -> None:
    x = _matrix(call.x)
    torch.ops.lowbit_native.outer_scale(x, outs[0], scheme_number(call.scheme))


def _quantize(outs: tuple[Tensor, ...], call: q.Quantize) -> None:
    x = _matrix(call.x)
    zero_point = outs[2] if outs[2].dim() == 2 else None
    torch.ops.lowbit_native.quantize(
        x, call.outer_scale, _filled(outs[0]), outs[1], zero_point, scheme_number(call.scheme),
        _rng(call, x.shape[1]),
    )  # fmt: skip


def _quantize_static(outs: tuple[Tensor, ...], call: q.QuantizeStatic) -> None:
    x = _matrix(call.x)
    torch.ops.lowbit_native.quantize_static(
        x, call.scale.contiguous(), _dense(call.zero_point), call.outer_scale, _filled(outs[0]),
        scheme_number(call.scheme), _rng(call, x.shape[1]),
    )  # fmt: skip


def _dequantize(outs: tuple[Tensor, ...], call: q.Dequantize) -> None:
    y = _filled(outs[0])
    torch.ops.lowbit_native.dequantize(
        _filled(call.codes.contiguous()), call.scale.contiguous(), _dense(call.zero_point), call.outer_scale, y,
        scheme_number(call.scheme),
    )  # fmt: skip


def _fake_quantize(outs: tuple[Tensor, ...], call: q.FakeQuantize) -> None:
    x = _matrix(call.x)
    torch.ops.lowbit_native.fake_quantize(
        x, _dense(call.scale), _dense(call.zero_point), call.outer_scale, _filled(outs[0]),
        scheme_number(call.scheme), _rng(call, x.shape[1]),
    )  # fmt: skip


def _fake_quantize_backward(outs: tuple[Tensor, ...], call: q.FakeQuantizeBackward) -> None:
    x = _matrix(call.x)
    torch.ops.lowbit_native.fake_quantize_backward(
        _matrix(call.grad), x, _dense(call.scale), _dense(call.zero_point), call.outer_scale, _filled(outs[0]),
        None if call.scale is None else outs[1], scheme_number(call.scheme),
    )  # fmt: skip


def adamw(outs: tuple[Tensor, ...], call: optimizer.AdamW) -> None:
    param, avg, rms = _matrix(call.param), call.exp_avg.contiguous(), call.exp_rms.contiguous()
    made, new_avg, new_avg_scale, new_rms, new_rms_scale = outs
    torch.ops.lowbit_native.adamw(
        param, _matrix(call.grad), _filled(avg), call.exp_avg_scale.contiguous(),
        _filled(rms), call.exp_rms_scale.contiguous(),
        _filled(made), _filled(new_avg), new_avg_scale, _filled(new_rms), new_rms_scale,
        scheme_number(call.scheme), scheme_number(call.rms_scheme), list(optimizer.factors(call)),
        _rng(call, param.shape[1]),
    )  # fmt: skip


#: The ``run`` function of each op that native code serves, for rows of the registry.
RUN: dict[str, Callable[[tuple[Tensor, ...], Any], None]] = {
    "encode": _encode,
    "decode": _decode,
    "pack": _pack,
    "unpack": _unpack,
    "outer_scale": _outer_scale,
    "quantize": _quantize,
    "quantize_static": _quantize_static,
    "dequantize": _dequantize,
    "fake_quantize": _fake_quantize,
    "fake_quantize_backward": _fake_quantize_backward,
}
