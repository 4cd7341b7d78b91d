"""Triton kernels compiled without a GPU: the interpreter sees neither how it divides, nor flushing, nor contraction."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
from lowbit.backends import triton as backend
from lowbit.kernels import aot

CLEAN = """
    div.rn.f32  %r1, %r2, %r3;
    add.rn.f32  %r1, %r2, 0f4B000000;
    mul.rn.f32  %r1, %r2, %r3;
    mad.lo.s32  %r1, %r2, %r3, %r4;
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
"""


@pytest.mark.parametrize(
    "line",
    [
        "div.full.f32 %r1, %r2, %r3;",
        "div.approx.f32 %r1, %r2, %r3;",
        "div.rn.ftz.f32 %r1, %r2, %r3;",
        "@%p1 mul.ftz.f32 %r1, %r2, %r3;",
        "@!%p1 fma.rn.f32 %r1, %r2, %r3, %r4;",
        "mad.rn.f32 %r1, %r2, %r3, %r4;",
        "rcp.approx.f32 %r1, %r2;",
        "ex2.approx.f32 %r1, %r2;",
    ],
)
def test_check_finds_what_codecs_may_not_hold(line):
    assert aot.faults("quantize", CLEAN, 90) == []
    assert aot.faults("quantize", f"{CLEAN}\t{line}\n", 90) != []


def test_check_wants_tensor_cores():
    wgmma, mma = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", "mma.sync.aligned.m16n8k16.row.col.f32.bf16"
    none = ["runs on no tensor core"]
    assert aot.faults("weight_only", CLEAN, 80) == aot.faults("weight_only", mma, 90) == none
    assert aot.faults("weight_only", wgmma, 90) == aot.faults("weight_only", mma, 80) == []
    assert aot.faults("integers", CLEAN, 90) == aot.faults("conv_integers", CLEAN, 90) == none
    assert aot.faults("conv_weight_only", CLEAN, 80) == none and aot.faults("depthwise", CLEAN, 80) == []
    assert aot.faults("integers", wgmma, 90) == aot.faults("integers", mma, 90) == []
    assert aot.faults("scaled", mma, 120) == aot.faults("scaled", "tcgen05.mma.cta_group::1.kind::f16", 100) == none
    blocks = "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16", "tcgen05.mma.cta_group::1.kind::f8f6f4"
    assert aot.faults("scaled", blocks[0], 100) == aot.faults("scaled", blocks[1], 100) == []
    assert aot.faults("scaled", "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32", 120) == []


def test_pairs_of_16_bits_alone_are_multiplied_and_added_at_once_in_products():
    for line, allowed in (("fma.rn.bf16x2 %r1, %r2, %r3, %r4;", True), ("fma.rn.f32 %r1, %r2, %r3, %r4;", False)):
        text = f"mma.sync.aligned.m16n8k16.row.col.f32.bf16\n\t{line}\n"
        assert (aot.faults("weight_only", text, 80) == []) == allowed
        assert aot.faults("quantize", text, 80) != []


def test_fast_jobs_cover_every_kernel_on_every_architecture():
    listed = aot.cases()
    every = {one.kernel.__name__ for case in listed for one in case.launches}
    for architecture in aot.ARCHITECTURES:
        here = [job for job in aot.jobs(False, aot.ARCHITECTURES) if job.architecture == architecture]
        names = [listed[job.case].launches[number].kernel.__name__ for job in here for number in job.launches]
        assert set(names) == every - (set() if architecture in aot.CODES else set(aot.OF_CODES))
        assert architecture == 90 or len(names) == len(set(names)) or architecture in aot.CODES
    elsewhere = sum(80 not in case.architectures for case in listed)
    assert elsewhere > 0 and len(aot.jobs(True, (80, 100))) == 2 * len(listed) - elsewhere


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of a process in which kernels are compiled, each once: the processes of a run of tests keep what they make."""
    cache = tmp_path_factory.getbasetemp()
    cache = cache.parent if "PYTEST_XDIST_WORKER" in os.environ else cache
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"TRITON_CACHE_DIR": str(cache / "triton")}


@pytest.mark.slow
def test_every_kernel_compiles_for_every_architecture(environment):
    """In a process of its own, because interpreted kernels cannot be compiled."""
    command = [sys.executable, "-m", "lowbit.kernels.aot", "--workers", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = dict(re.findall(r"sm_(\d+) (\d+)", done.stdout))
    assert set(compiled) == {str(a) for a in aot.ARCHITECTURES} and min(map(int, compiled.values())) >= 10


SEGMENTS = r"""
import re
import torch
from lowbit.kernels import aot, cases, products
from lowbit.ops.matmul import ScaledMM
for a, b in (("int8:row", "int4:group128"), ("int8:group128", "int8:group128"), ("int8:row", "int8:row")):
    for rows in (1, 512):
        call = ScaledMM(**cases.side("a", rows, a), **cases.side("b", 512, b), cols=4096)
        launch, = products.scaled_mm(call, cases.meta(rows, 512, dtype=torch.bfloat16))
        ptx = aot.compile_launch(launch, 80)[0]
        assert not re.findall(r"ld\.global\S*\.[bu]8\b", ptx), (a, b, rows)
        assert re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x(?:10|8)\b", ptx), (a, b, rows)
"""

LONG_SEGMENTS = r"""
import torch
from lowbit.kernels import aot, cases, machine_code, products
from lowbit.ops.matmul import ScaledMM
for a, b in (("int8:row", "int4:group256"), ("int8:group512", "int8:group512"), ("int8:row", "uint4:group256:affine")):
    call = ScaledMM(**cases.side("a", 512, a), **cases.side("b", 512, b), cols=4096)
    launch, = products.scaled_mm(call, cases.meta(512, 512, dtype=torch.bfloat16))
    assert not launch.arguments["ONE"], (a, b)
    for architecture in (90, 100):
        made = aot.compile_launch(launch, architecture)
        assert not aot.faults("integers", made.ptx, architecture), (a, b, architecture)
        assert not machine_code.usage(made).spilled, (a, b, architecture)
"""


BOTH = r"""
from lowbit.kernels import aot, machine_code
for case in aot.cases():
    if case.name.startswith("quantize_both") and "group128" not in case.name and case.name.endswith("nearest"):
        for one in case.launches:
            assert not machine_code.usage(aot.compile_launch(one, 90)).spilled, case.name
"""


CONVERSIONS = r"""
from lowbit.kernels import aot, arguments
least = 10 * arguments.ROUNDED_ONCE_FROM[0] + arguments.ROUNDED_ONCE_FROM[1]
names = {"fp8_e4m3:row": "e4m3", "fp8_e5m2:row": "e5m2", "nvfp4": "e2m1", "mxfp4": "e2m1"}
for case in aot.cases():
    name = names.get(case.name.removeprefix("quantize "))
    if name is not None:
        for architecture in (80, 89, 90, 100, 120):
            ptx = aot.compile_launch(case.launches[-1], architecture).ptx
            has = architecture >= (100 if name == "e2m1" else least)
            assert (f"cvt.rn.satfinite.{name}x2.f32" in ptx) == has, (case.name, architecture)
        del names[case.name.removeprefix("quantize ")]
assert not names
"""


@pytest.mark.slow
def test_chosen_launches_have_the_machine_code_that_they_should(environment):
    """Codes in segments are loaded many at a time; segments of several steps compile, whose sums a selection set to
    zero did not for tcgen05; two schemes at once stay in registers; an instruction converts to FP8 and FP4 where there
    is one.
    """
    script = "".join((SEGMENTS, LONG_SEGMENTS, BOTH, CONVERSIONS))
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_triton_that_flushes_subnormal_numbers_is_refused(monkeypatch):
    monkeypatch.setattr(backend, "version", lambda name: "3.5.1")
    assert "3.5.1" in backend.unavailable() and "triton>=3.6" in backend.unavailable()
    monkeypatch.setattr(backend, "version", lambda name: "3.10.0+git")
    assert backend.unavailable() is None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "built for ROCm" in backend.unavailable()
