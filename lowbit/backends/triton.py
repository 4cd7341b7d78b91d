"""The Triton backend: ``lowbit.kernels`` on CUDA devices; on the CPU, interpreted, for tests.

With ``TRITON_INTERPRET=1`` set before lowbit is imported, the kernels also run on the CPU, slowly. They come after the
reference, so only ``use_backend("triton")`` selects them. Kernels are imported at the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from lowbit import (
    checkout,  # noqa: F401  (finds lowbit.kernels)
    formats,
    scaling,
)
from lowbit.backends import composed, replay
from lowbit.backends.registry import Impl, matmul_precision
from lowbit.ops import codec, conv, dual, fused, grouped, matmul, optim, rotation
from lowbit.ops import quantize as q
from lowbit.ops.spec import Numerics, as_rows, matrix_shape

_HAS_KERNELS = find_spec("lowbit.kernels") is not None

#: Whether kernels run in Triton's interpreter.
INTERPRETED = _HAS_KERNELS and import_module("lowbit.kernels.spec").INTERPRETED

#: Kernels index an axis with 32 bits, and the last tile may extend past the end.
_LONGEST = 2**31 - 2**18
#: The largest Hadamard block that one program transforms.
_LARGEST_BLOCK = 1024


@cache
def _launch() -> Any:
    from lowbit.kernels import launch

    return launch


@cache
def products() -> Any:
    """The host side of matmuls, ``lowbit.kernels.products``."""
    from lowbit.kernels import products

    return products


@cache
def operands() -> Any:
    """Operands in the form that matmul kernels take, ``lowbit.kernels.operands``."""
    from lowbit.kernels import operands

    return operands


def start(launches: Any, device: torch.device) -> None:
    """Launch kernels in order on the current stream of a device; nothing on the meta device."""
    if device.type == "meta":
        return
    with replay.on(device):
        _starts().run(launches)
        replay.note(lambda: [replay.Bound(*_starts().bound(launch)) for launch in launches])


@cache
def arguments() -> Any:
    """Kernel arguments from tensors and devices, ``lowbit.kernels.arguments``."""
    from lowbit.kernels import arguments

    return arguments


@cache
def _starts() -> Any:
    from lowbit.kernels import start

    return start


def _rounding(call: Any) -> Any:
    pitch = matrix_shape(call[0])[1] if call.pitch is None else call.pitch
    rng = call.rng.contiguous() if call.rounding == "stochastic" else None
    return _launch().Rounding(rng, call.stream, call.offset, pitch)


def _encode(outs: tuple[Tensor, ...], call: codec.Encode) -> None:
    x = as_rows(call.x)
    out = outs[0].view(x.shape)
    start(_launch().encode(x, out, formats.find(call.format), call.saturate, _rounding(call)), x.device)


def _decode(outs: tuple[Tensor, ...], call: codec.Decode) -> None:
    codes = as_rows(call.codes)
    start(_launch().decode(codes, outs[0].view(codes.shape), formats.find(call.format)), codes.device)


def _pack(outs: tuple[Tensor, ...], call: codec.Pack) -> None:
    start(_launch().pack(as_rows(call.codes), as_rows(outs[0]), call.bits), call.codes.device)


def _unpack(outs: tuple[Tensor, ...], call: codec.Unpack) -> None:
    start(_launch().unpack(as_rows(call.packed), as_rows(outs[0]), call.bits), call.packed.device)


def _transpose(outs: tuple[Tensor, ...], call: codec.Transpose) -> None:
    start(_launch().transpose(call.packed, outs[0], call.bits, call.cols), call.packed.device)


def _global_scale(outs: tuple[Tensor, ...], call: q.GlobalScale) -> None:
    start(_launch().global_scale(as_rows(call.x), outs[0], scaling.scheme(call.scheme)), call.x.device)


def _block_range(outs: tuple[Tensor, ...], call: q.BlockRange) -> None:
    start(_launch().block_range(as_rows(call.x), *outs, scaling.scheme(call.scheme)), call.x.device)


def _quantize(outs: tuple[Tensor, ...], call: q.Quantize) -> None:
    codes, scale, zero_point = outs
    scheme, x = scaling.scheme(call.scheme), q.with_factors(call)
    launches = _launch().quantize_dynamic(
        x, scheme, call.global_scale, as_rows(codes), scale, zero_point if scheme.affine else None, _rounding(call)
    )
    start(launches, x.device)


def _quantize_global(outs: tuple[Tensor, ...], call: q.QuantizeGlobal) -> None:
    codes, scale, global_scale = outs
    launches = _launch().quantize_rows(
        as_rows(call.x), scaling.scheme(call.scheme), as_rows(codes), scale, global_scale
    )  # fmt: skip
    start(launches, call.x.device)


def _supports_quantize_global(call: q.QuantizeGlobal) -> str | None:
    fits = _launch().whole_rows(*matrix_shape(call.x), scaling.scheme(call.scheme))
    return _fits(call.x) or (None if fits else f"no tile of its kernel has whole rows in blocks of {call.scheme}")


def _quantize_static(outs: tuple[Tensor, ...], call: q.QuantizeStatic) -> None:
    launches = _launch().quantize_static(
        as_rows(call.x), scaling.scheme(call.scheme), call.scale, call.zero_point, call.global_scale,
        as_rows(outs[0]), _rounding(call),
    )  # fmt: skip
    start(launches, call.x.device)


def _dequantize(outs: tuple[Tensor, ...], call: q.Dequantize) -> None:
    launches = _launch().dequantize(
        as_rows(call.codes), scaling.scheme(call.scheme), call.scale, call.zero_point, call.global_scale,
        as_rows(outs[0]),
    )  # fmt: skip
    start(launches, call.codes.device)


def _fake_quantize(outs: tuple[Tensor, ...], call: q.FakeQuantize) -> None:
    scheme, x, out, rounding = scaling.scheme(call.scheme), as_rows(call.x), as_rows(outs[0]), _rounding(call)
    if call.scale is None:
        launches = _launch().quantize_dynamic(x, scheme, call.global_scale, out, None, None, rounding, fake=True)
    else:
        launches = _launch().quantize_static(
            x, scheme, call.scale, call.zero_point, call.global_scale, out, rounding, fake=True
        )
    start(launches, x.device)


def _fake_quantize_backward(outs: tuple[Tensor, ...], call: q.FakeQuantizeBackward) -> None:
    launches = _launch().fake_quantize_backward(
        as_rows(call.grad), as_rows(call.x), scaling.scheme(call.scheme), call.scale, call.zero_point,
        call.global_scale, as_rows(outs[0]), None if call.scale is None else outs[1],
    )  # fmt: skip
    start(launches, call.x.device)


@cache
def _dual() -> Any:
    from lowbit.kernels import dual_launch

    return dual_launch


def _quantize_both(outs: tuple[Tensor, ...], call: dual.QuantizeBoth) -> None:
    start(_dual().quantize_both(call, outs), call.x.device)


def _hadamard(outs: tuple[Tensor, ...], call: rotation.Hadamard) -> None:
    x, out = (call.x, outs[0]) if call.axis == 1 else (call.x.t(), outs[0].t())
    start(_launch().hadamard(x, out, call.block, call.signed), x.device)


def _scaled_mm(outs: tuple[Tensor, ...], call: matmul.ScaledMM) -> None:
    start(products().scaled_mm(call, outs[0]), outs[0].device)


@cache
def _of_codes() -> Any:
    from lowbit.kernels import scaled_products

    return scaled_products


def _scaled_mm_of_codes(outs: tuple[Tensor, ...], call: matmul.ScaledMM) -> None:
    start(_of_codes().scaled_mm(call, outs[0]), outs[0].device)


def _scaled_grouped_mm_of_codes(outs: tuple[Tensor, ...], call: grouped.ScaledGroupedMM) -> None:
    start(_of_codes().scaled_grouped_mm(call, outs[0]), outs[0].device)


def _scaled_grouped_mm(outs: tuple[Tensor, ...], call: grouped.ScaledGroupedMM) -> None:
    start(products().scaled_grouped_mm(call, outs[0]), outs[0].device)


@cache
def _convolutions() -> Any:
    from lowbit.kernels import convolutions

    return convolutions


def _conv(outs: tuple[Tensor, ...], call: conv.Conv) -> None:
    y = outs[0] if call.out_scheme is None else torch.empty(outs[0].shape, device=call.x.device)
    coded, launches = _convolutions().quantized(call)
    start(launches, y.device)
    start(_convolutions().convolve(coded, y), y.device)
    if call.out_scheme is not None:
        assert call.out_scale is not None
        rows = y.view(-1, y.shape[-1])
        _quantize_static(outs, q.QuantizeStatic(rows, call.out_scheme, call.out_scale, call.out_zero_point))


def _optimizer_step(outs: tuple[Tensor, ...], call: optim.OptimizerStep) -> None:
    launch, param = _launch(), as_rows(call.param)
    new_param, new_master, *new = (as_rows(t) for t in outs)
    weight = launch.Weight(
        param, None if call.master is None else as_rows(call.master), new_param,
        None if call.master is None else new_master, call.param_rounding == "stochastic",
    )  # fmt: skip
    moments = [
        launch.Moment(
            None if moment.scheme in optim.FLOAT_STATES else scaling.scheme(moment.scheme),
            as_rows(moment.codes), moment.scale, *new[2 * i : 2 * i + 2],
        )
        for i, moment in enumerate(optim.moments(call))
    ]  # fmt: skip
    stochastic = call.rounding == "stochastic"
    random = _rounding(call._replace(rounding="stochastic") if weight.stochastic else call)
    factors = optim.fp32_factors(call)
    launches = launch.optimizer_step(weight, as_rows(call.grad), moments, call.rule, factors, random, stochastic)
    start(launches, param.device)


@cache
def _fused() -> Any:
    from lowbit.kernels import fused_launch

    return fused_launch


def _run_fused(op: str, outs: tuple[Tensor, ...], call: Any) -> None:
    start(getattr(_fused(), op)(call, *outs), call[0].device)


#: The lowest compute capability with bf16 tensor cores, which the kernels use.
OLDEST_DEVICE = (8, 0)


def too_old(device: torch.device) -> str | None:
    """Why the kernels do not support a device, or None."""
    if device.type != "cuda" or capability(device) >= OLDEST_DEVICE:
        return None
    actual, least = (".".join(map(str, pair)) for pair in (capability(device), OLDEST_DEVICE))
    return f"its kernels need compute capability {least}, and this device has {actual}"


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device. Without CUDA, as for an estimate, the oldest supported one."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else OLDEST_DEVICE


def _fits(x: Tensor) -> str | None:
    reason = too_old(x.device)
    if reason is not None:
        return reason
    rows, cols = matrix_shape(x)
    if max(rows, cols) > _LONGEST:
        return f"its kernels index at most {_LONGEST} rows or columns, got [{rows}, {cols}]; split the tensor"
    return None


def _fits_first(call: Any) -> str | None:
    return _fits(call[0])


def _supports_hadamard(call: rotation.Hadamard) -> str | None:
    if call.block > _LARGEST_BLOCK:
        return f"its kernel has blocks of at most {_LARGEST_BLOCK} elements, got {call.block}"
    return _fits(call.x)


def _supports_both(call: dual.QuantizeBoth) -> str | None:
    return _fits(call.x) or cast(str | None, _dual().supports(call))


def _supports_norm(call: fused.RMSNorm) -> str | None:
    return _fits(call.x) or cast(str | None, _fused().supports_norm(call))


def _supports_norm_backward(call: fused.RMSNormBackward) -> str | None:
    return _fits(call.x) or cast(str | None, _fused().supports_norm_backward(call))


def _fits_cols(call: Any) -> str | None:
    return _fits(call[0]) or _fits(call[0].new_empty((1, call.cols), device="meta"))


def _supports_mm(call: matmul.ScaledMM) -> str | None:
    return _fits(call.a) or _fits(call.b) or products().supports(call)


def keeps_fp32(device: torch.device) -> bool:
    """Whether a device sums FP8 and FP4 products as accurately as in fp32 (docs/numerics.md section 9)."""
    return capability(device)[0] == 10


def _supports_codes(call: matmul.ScaledMM) -> str | None:
    return _fits(call.a) or _fits(call.b) or _of_wide_sums(call) or _of_codes().supports(call)


def _of_wide_sums(call: matmul.ScaledMM) -> str | None:
    return None if keeps_fp32(call.b.device) else "it needs a device of compute capability 10.x"


def _supports_codes_in_short(call: matmul.ScaledMM) -> str | None:
    return _fits(call.a) or _fits(call.b) or _of_short_sums(call) or _of_codes().supports(call)


def _of_short_sums(call: matmul.ScaledMM) -> str | None:
    if capability(call.b.device)[0] != 12:
        return "it needs a device of compute capability 12.x"
    if matmul_precision() != "medium":
        return 'its sums may keep 14 bits; torch.set_float32_matmul_precision("medium") allows that'
    schemes = [scaling.scheme(side.scheme) for side in matmul.sides(call) if side.scheme is not None]
    if len({scheme.format.bits == 4 for scheme in schemes}) > 1:
        return "it multiplies FP4 by FP4, and other codes by other codes"
    return None


def _supports_product(supports: Callable[[matmul.ScaledMM], str | None], call: grouped.ScaledGroupedMM) -> str | None:
    """The refusal for the matmul with one expert, or None."""
    return supports(grouped.product(call, 0, slice(None)))


def _supports_conv(call: conv.Conv) -> str | None:
    matrix = call.x.new_empty((call.x.shape[0] * prod(conv.out_sizes(call)), conv.columns(call)), device="meta")
    return _fits(call.x) or _fits(matrix) or _fits(call.weight) or _convolutions().supports(call)


_ROWS: dict[str, tuple[Callable[[tuple[Tensor, ...], Any], None], Callable[[Any], str | None]]] = {
    "encode": (_encode, _fits_first),
    "decode": (_decode, _fits_first),
    "pack": (_pack, _fits_first),
    "unpack": (_unpack, _fits_cols),
    "transpose": (_transpose, _fits_cols),
    "global_scale": (_global_scale, _fits_first),
    "block_range": (_block_range, _fits_first),
    "quantize": (_quantize, _fits_first),
    "quantize_global": (_quantize_global, _supports_quantize_global),
    "quantize_static": (_quantize_static, _fits_first),
    "dequantize": (_dequantize, _fits_cols),
    "fake_quantize": (_fake_quantize, _fits_first),
    "fake_quantize_backward": (_fake_quantize_backward, _fits_first),
    "scaled_mm": (_scaled_mm, _supports_mm),
    "scaled_grouped_mm": (_scaled_grouped_mm, partial(_supports_product, _supports_mm)),
    "optimizer_step": (_optimizer_step, _fits_first),
    "hadamard": (_hadamard, _supports_hadamard),
    "quantize_both": (_quantize_both, _supports_both),
    "rms_norm": (partial(_run_fused, "rms_norm"), _supports_norm),
    "rms_norm_backward": (partial(_run_fused, "rms_norm_backward"), _supports_norm_backward),
    "swiglu": (partial(_run_fused, "swiglu"), _fits_first),
    "swiglu_backward": (partial(_run_fused, "swiglu_backward"), _fits_first),
    "rotary": (partial(_run_fused, "rotary"), _fits_first),
}

#: Operands that are not exact in bf16 are split into bf16 terms.
_NUMERICS = Numerics("fp32", "fp32")

_IMPLS = tuple(
    Impl(op, "triton", (device,), run, supports, _NUMERICS)
    for device in ("cuda", *(("cpu",) if INTERPRETED else ()))
    for op, (run, supports) in _ROWS.items()
)
#: For two schemes without a common tile: one after the other. If no tile has whole rows: the global scale first.
_APART = tuple(
    replace(row, name="triton_apart") for row in (*composed.quantize_both(_IMPLS), *composed.quantize_global(_IMPLS))
)
#: Convolutions that read patches from images; the others store patches, for these matmuls or torch's.
_IMPLICIT = tuple(
    Impl("conv", "triton_implicit", impl.devices, _conv, _supports_conv, _NUMERICS)
    for impl in _IMPLS
    if impl.op == "scaled_mm"
)
#: Matmuls of FP8 and FP4 codes by tensor cores, without conversion to bf16.
_CODES = (
    Impl("scaled_mm", "triton_codes", ("cuda",), _scaled_mm_of_codes, _supports_codes, Numerics("fp8", "fp32")),
    Impl(
        "scaled_mm", "triton_codes_medium", ("cuda",), _scaled_mm_of_codes, _supports_codes_in_short,
        Numerics("fp8", "fp22"),
    ),
)  # fmt: skip
#: ``_CODES`` for mixtures of experts.
_CODES_OF_EXPERTS = tuple(
    replace(
        row, op="scaled_grouped_mm", run=_scaled_grouped_mm_of_codes, supports=partial(_supports_product, row.supports)
    )
    for row in _CODES
)
#: Kernels other than matmuls, for composites with another matmul.
CODECS = tuple(row for row in _IMPLS if row.devices == ("cuda",) and row.op != "scaled_mm")


def with_codecs(products: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """Matmuls, each with the composites of it and ``CODECS``."""
    rows = ((mm, *composed.linear((*CODECS, mm)), *composed.conv((*CODECS, mm))) for mm in products)
    return tuple(row for group in rows for row in group)


IMPLS = (
    _IMPLS
    + _APART
    + composed.linear(_IMPLS)
    + composed.conv(_IMPLS)
    + _IMPLICIT
    + with_codecs(_CODES)
    + _CODES_OF_EXPERTS
)


#: The oldest Triton version whose PTX keeps subnormal numbers (docs/numerics.md section 1); torch 2.10 installs it.
_OLDEST = (3, 6)


def _version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:  # nightly builds of torch bundle it under another name
        return str(import_module("triton").__version__)


def unavailable() -> str | None:
    """Why this backend is absent, and the remedy; None if it is present."""
    if find_spec("triton") is None:
        return "triton is not installed; pip install triton (Linux only)"
    if torch.version.hip is not None:
        return "its kernels are for CUDA devices, and this torch is built for ROCm"
    installed = _version()
    if tuple(int(part) for part in installed.split(".")[:2]) < _OLDEST:
        return f"triton {installed} rounds subnormal numbers to zero; pip install 'triton>=3.6'"
    if not _HAS_KERNELS:
        return "the package lowbit.kernels is missing; install lowbit (`pip install .` in its checkout)"
    return None
