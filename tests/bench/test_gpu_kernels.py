"""The table of kernels for GPUs: what it says of calls, of machine code and of time; a few cells from end to end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from lowbit.bench import gpu_page, gpu_roofline, gpu_rows, gpu_trace
from lowbit.kernels import aot, machine_code
from lowbit.ops.grouped import has_rows_of_its_own
from lowbit.recipes.table import RECIPES

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "bench" / "results" / "gpu_kernels.json"


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """What ``--quick`` writes, in a process of its own: interpreted kernels cannot be compiled."""
    directory = tmp_path_factory.mktemp("kernels")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "lowbit", "bench", "kernels", "--quick", "--workers", "1", "--out", directory]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def cell(held, section, of, architecture):
    wanted = (section, of, architecture)
    return next(c for c in held["cells"] if (c["section"], c["of"], c["architecture"]) == wanted)


@pytest.mark.slow
def test_a_quick_run_says_what_serves_and_what_its_machine_code_holds(quick):
    held = json.loads((quick / "gpu_kernels.json").read_text())
    assert len(held["cells"]) == held["asked"] > 0
    for architecture, matrix in ((80, "mma.sync bf16 (HMMA)"), (90, "wgmma bf16 (HGMMA)")):
        made = cell(held, "linear, 1 row", "int4-weight-only", architecture)
        first = made["work"][0]
        assert (made["backend"], first["kernel"], first["matrix"]) == ("triton", "weight_only", [matrix])
        assert 0 < first["registers"] <= 255 and first["spilled"] == 0 and first["flops"] == 2 * 4096 * 4096
        assert made["ideal"] == 2 * 4096 + 4096 * 2048 + 4 * 4096 * 32 + 2 * 4096
    many = cell(held, "linear, 8192 rows", "int8-weight-only", 90)
    assert many["backend"] == "delegated_bf16"
    (product,) = [one for one in many["work"] if one.get("torch") == "mm"]
    assert product["flops"] == 2 * 8192 * 4096 * 4096 and product["bytes"] == 2 * (8192 + 4096) * 4096 + 4 * 8192 * 4096
    page = (quick / "gpu_kernels.md").read_text()
    assert "torch: mm" in page and f"reference: {gpu_rows.NO_KERNEL['square_sums']}" in page


@pytest.mark.slow
def test_what_was_made_is_not_made_again(quick):
    """Without processes, from the files of the cache alone."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    before = (quick / "gpu_kernels.json").read_text()
    (quick / "gpu_kernels.json").unlink()
    command = [sys.executable, "-m", "lowbit", "bench", "kernels", "--quick", "--workers", "0", "--out", quick]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300, cwd=ROOT)
    assert (quick / "gpu_kernels.json").read_text() == before


def traced(section, of, architecture):
    row = next(row for row in gpu_rows.rows() if (row.section, row.of) == (section, of))
    with gpu_trace.pretended(row.precision):
        return gpu_trace.trace(row.op, row.call(architecture))


@pytest.mark.parametrize(
    "section, of, architecture, backend",
    [
        ("linear, 512 rows", "int8, int8-stochastic", 90, "triton"),
        ("linear, 8192 rows", "int8, int8-stochastic", 90, "delegated_int8"),
        ("linear, 8192 rows", "fp8", 90, "delegated_bf16"),
        ("linear, 512 rows", "fp8; precision medium", 90, "delegated_fp8"),
        ("linear, 512 rows", "fp8; precision medium", 80, "triton"),
        ("linear, 512 rows", "fp8", 100, "triton_codes"),
        ("linear, 8192 rows", "fp8", 100, "delegated_fp8_wide"),
        ("linear, 1 row", "nvfp4, nvfp4-eden", 100, "triton_codes"),
        ("linear, 8192 rows", "nvfp4, nvfp4-eden", 120, "delegated_bf16"),
        ("experts", "nvfp4, nvfp4-eden", 100, "triton_codes"),
        ("experts", "nvfp4, nvfp4-eden", 90, "triton"),
        ("quantize_both", "nvfp4:global_row and nvfp4:T, transformed in 16", 90, "triton"),
        ("quantize", "mxfp8:ceil", 120, "triton"),
    ],
)
def test_the_registry_answers_as_for_a_device_that_is_there(section, of, architecture, backend):
    assert traced(section, of, architecture).impl == backend


def test_rows_are_of_every_recipe_and_of_calls_that_ops_accept():
    listed = gpu_rows.rows()
    assert len({(row.section, row.of) for row in listed}) == len(listed)
    for section in gpu_rows.PRODUCTS:
        names = {name for row in listed if row.section == section for name in row.of.split(";")[0].split(", ")}
        wanted = [name for name, row in RECIPES.items() if not row.weight.reference_only]
        if section == "experts":  # whose rows are quantized together
            wanted = [n for n in wanted if (input := RECIPES[n].input) is None or has_rows_of_its_own(input)]
        assert names == set(wanted)
    with gpu_trace.pretended():
        for row in listed:
            gpu_trace.check(row.op, row.call(90))


def test_a_device_is_pretended_only_within():
    available, table = torch.cuda.is_available, gpu_trace.registry._table
    with gpu_trace.pretended("medium"):
        assert torch.cuda.is_available() and torch.get_float32_matmul_precision() == "medium"
    assert torch.cuda.is_available is available and gpu_trace.registry._table is table
    assert torch.get_float32_matmul_precision() != "medium"


@pytest.mark.parametrize(
    "ptx, name",
    [
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "mma.sync bf16 (HMMA)"),
        ("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32", "mma.sync int8 (IMMA)"),
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", "wgmma bf16 (HGMMA)"),
        ("wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8", "wgmma int8 (IGMMA)"),
        ("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3", "wgmma fp8 (QGMMA)"),
        ("tcgen05.mma.cta_group::1.kind::f16", "tcgen05 bf16 (UTCHMMA)"),
        ("tcgen05.mma.cta_group::1.kind::i8", "tcgen05 int8 (UTCIMMA)"),
        ("tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::2X", "tcgen05 block-scaled mxfp4 (UTCOMMA)"),
    ],
)
def test_matrix_instructions_have_names(ptx, name):
    assert machine_code.matrix_instructions(f"  {ptx} {{%r1}};\n  add.f32 %r1, %r2, %r3;") == [name]


def test_a_roofline_takes_the_longer_of_moving_and_multiplying():
    peak = gpu_roofline.PEAKS[90]
    moved = {"bytes": int(peak.bandwidth), "flops": 0, "multiplies": ""}
    multiplied = {"bytes": 1, "flops": int(3 * peak.int8), "multiplies": "int8"}
    assert gpu_roofline.seconds([moved, multiplied], 90) == pytest.approx(4)
    assert set(gpu_roofline.PEAKS) == set(aot.ARCHITECTURES)


def test_findings_are_what_a_kernel_should_not_have():
    kernel = {"kernel": "k", "registers": 255, "spilled": 8, "matrix": [], "faults": ["runs on no tensor core"]}
    kernel |= {"bytes": 1, "flops": 1, "count": 1}
    here = {"section": "linear, 1 row", "of": "int8", "architecture": 80, "op": "linear", "backend": "triton"}
    other = {"kernel": "k", "error": "no", "count": 1}
    cells = [here | {"work": [kernel]}, here | {"work": [other]}]
    cells += [here | {"architecture": 90, "work": [kernel | {"spilled": 0, "faults": []}]}]
    found = [text.removeprefix("sm_80 linear, 1 row, int8: k ") for text in gpu_page.faults(cells)]
    assert found == ["runs on no tensor core", "does not compile: no"]
    assert gpu_page.spills(cells) == {("linear, 1 row", "int8", "k"): {80: (8, 255)}}
    (said,) = gpu_page.faults([here | {"backend": "reference", "work": [], "refused": ["triton: why"]}])
    assert said.endswith("runs on the reference: triton: why")


@pytest.mark.thinned(4)
@pytest.mark.parametrize("part", range(4))
def test_no_row_is_on_the_reference_but_those_that_gpu_md_names(part):
    held, page = json.loads(COMMITTED.read_text()), (ROOT / "docs" / "gpu.md").read_text()
    assert {c["op"] for c in held["cells"] if c["backend"] == "reference"} <= set(gpu_rows.NO_KERNEL)
    assert all(reason in page for reason in gpu_rows.NO_KERNEL.values())
    for row in gpu_rows.rows()[part::4]:
        if row.section != "conv":  # whose product is that of ``linear``
            on_reference = traced(row.section, row.of, 80).impl == "reference"
            assert on_reference == (row.op in gpu_rows.NO_KERNEL), (row.section, row.of)


def test_the_committed_page_is_that_of_its_cells(tmp_path):
    copy = tmp_path / COMMITTED.name
    copy.write_text(COMMITTED.read_text())
    assert gpu_page.write(copy).read_text() == COMMITTED.with_suffix(".md").read_text()
