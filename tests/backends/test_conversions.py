"""FP8 and FP4 codes by the instructions that GPUs have: where they are used, and that the bits stay the same.

Triton's interpreter rounds conversions to FP8 in a way of its own. Here it follows the PTX ISA: ``cvt.rn.satfinite``
rounds to nearest even, takes what is too large, Inf too, for the largest number, and has one NaN, 0x7f.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from support.interpreter import within_arguments
from support.ptx import run
from triton.runtime import interpreter

import lowbit as lb
from lowbit.kernels import arguments, bits, launch
from lowbit.testing.inputs import random_matrix

FP8 = {"fp8e4nv": ml_dtypes.float8_e4m3fn, "fp8e5": ml_dtypes.float8_e5m2}


@pytest.fixture
def converted(monkeypatch):
    """Kernels convert FP8, as on a GPU; the list has a name for each conversion."""
    done = []

    def as_hardware(source, to, rounding):
        name = str(to.scalar)
        if name not in FP8:
            return plain(source, to, rounding)
        done.append(name)
        kind = FP8[name]
        most, x = float(ml_dtypes.finfo(kind).max), source.data
        codes = np.clip(x, -most, most).astype(kind).view(np.uint8)
        return interpreter.TensorHandle(np.where(np.isnan(x), np.uint8(0x7F), codes), to.scalar)

    plain = interpreter.interpreter_builder.create_fp_to_fp
    monkeypatch.setattr(interpreter.interpreter_builder, "create_fp_to_fp", as_hardware)
    monkeypatch.setattr(launch, "rounds_once", lambda name, device: name in ("e4m3", "e5m2"))
    return done


def numbers(dtype):
    """Random ones of all sizes, and a row each of every 16-bit pattern's kind: NaN of both signs, Inf, zeros."""
    x = random_matrix(37, 300, "cpu", seed=3)
    special = [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1e-8, 447.9, 464.0, -1e9]
    x[5, : len(special)] = torch.tensor(special)
    return x.to(dtype)


def same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_codes_without_scales(format, dtype, converted):
    x = numbers(dtype)
    with lb.use_backend("reference"):
        expected = lb.encode(x, format)
    with lb.use_backend("triton"), within_arguments():
        same_bits(lb.encode(x, format), expected)
    assert converted


@pytest.mark.parametrize(
    "scheme", ["fp8_e4m3:row", "fp8_e4m3:tensor", "fp8_e4m3:block128x128", "fp8_e5m2:row", "mxfp8"]
)
def test_codes_with_scales_and_what_they_stand_for(scheme, converted):
    for x in (numbers(torch.float32), numbers(torch.bfloat16).nan_to_num(0, 0, 0)):
        with lb.use_backend("reference"):
            expected, faked = lb.quantize(x, scheme), lb.fake_quantize(x, scheme)
        with lb.use_backend("triton"), within_arguments():
            found = lb.quantize(x, scheme)
            same_bits(found.codes, expected.codes)
            same_bits(found.scale, expected.scale)
            same_bits(lb.fake_quantize(x, scheme), faked)
    assert converted


@pytest.mark.parametrize("options", [{"saturate": False}, {"rounding": "stochastic"}])
def test_what_the_instruction_does_not_do_is_done_without(options, converted):
    x, codes = numbers(torch.float32), {}
    for backend in ("reference", "triton"):
        with lb.use_backend(backend):
            torch.manual_seed(1)
            codes[backend] = lb.encode(x, "fp8_e4m3", **options)
    same_bits(codes["triton"], codes["reference"])
    assert not converted


def test_fp4_is_what_the_instruction_makes():
    """Over every bf16 number, and fp32 ones beside each boundary between two codes."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = lb.decode(torch.arange(16, dtype=torch.uint8), "fp4_e2m1").unique()
    middles = ((codes[1:] + codes[:-1]) / 2).numpy()
    beside = [np.nextafter(middles, np.float32(to), dtype=np.float32) for to in (-np.inf, np.inf)]
    x = torch.cat([every, torch.from_numpy(np.concatenate([middles, *beside, middles[:2]]))])
    x = torch.cat([x, x.new_zeros(-len(x) % 4)])
    patterns = x.view(torch.int32).numpy().view(np.uint32)
    made = [run(bits.FP4.value, {f"${at + 1}": int(one) for at, one in enumerate(four)})["$0"]
            for four in patterns.reshape(-1, 4)]  # fmt: skip
    found = torch.tensor(made).to(torch.int64)
    found = torch.stack([found >> 8 * at & 255 for at in range(4)], 1).flatten().to(torch.uint8)
    with lb.use_backend("reference"):
        same_bits(found, lb.encode(x, "fp4_e2m1"))


def test_only_devices_that_have_the_instruction_are_asked_for_it(monkeypatch):
    device, capability = torch.device("cuda"), (8, 9)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda of: capability)
    assert not arguments.INTERPRETED or not arguments.converts("e4m3", device)
    monkeypatch.setattr(arguments, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not arguments.converts("e4m3", device), "an estimate without a GPU is of the oldest"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert arguments.converts("e4m3", device) and not arguments.converts("e2m1", device)
    for least in ((8, 9), (9, 0)):  # of Triton from 3.9 on, and before
        monkeypatch.setattr(arguments, "ROUNDED_ONCE_FROM", least)
        assert arguments.rounds_once("e4m3", device) == (least == capability)
        assert not arguments.rounds_once("e2m1", device)
    capability = (8, 6)
    assert not arguments.converts("e5m2", device)
    capability = (12, 0)
    assert arguments.converts("e4m3", device) and arguments.converts("e2m1", device)
