"""The order of kernels, of all backends, whether they are available here or not."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest

from lowbit.backends import BACKENDS, registry

_PRODUCTS = [
    "delegated_fp8_wide", "delegated_fp8", "delegated_fp8_blocks", "triton_codes", "triton_codes_medium",
    "delegated_int8", "delegated_bf16", "delegated_rounded", "triton", "cuda", "reference",
]  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[registry.Impl]:
    """Those of all backends; of the backend ``cuda``, which few builds have, by Triton's ops."""
    known = [row for name in BACKENDS for row in import_module(f"lowbit.backends.{name}").IMPLS if name != "cuda"]
    return [*known, *(replace(row, name="cuda") for row in known if row.name == "triton" and "cuda" in row.devices)]


@pytest.mark.parametrize(
    ("op", "device", "names"),
    [
        ("scaled_mm", "cuda", _PRODUCTS),
        ("linear", "cuda", _PRODUCTS),
        ("conv", "cuda", ["triton_implicit", *_PRODUCTS]),
        ("scaled_grouped_mm", "cuda", ["triton_codes", "triton_codes_medium", "triton", "cuda", "reference"]),
        ("quantize_both", "cuda", ["triton", "triton_apart", "cuda", "reference"]),
        ("quantize_global", "cuda", ["triton", "triton_apart", "cuda", "reference"]),
        ("encode", "cuda", ["triton", "cuda", "reference"]),
        ("scaled_mm", "cpu", ["cpu_bf16", "cpu", "reference"]),
        ("linear", "cpu", ["cpu_bf16", "cpu", "reference"]),
        ("conv", "cpu", ["cpu", "cpu_patches", "reference"]),
        ("encode", "cpu", ["cpu", "reference"]),
    ],
)
def test_the_best_kernel_comes_first(rows, op, device, names):
    served = [row for row in rows if row.op == op and device in row.devices]
    if device == "cpu":  # the interpreter's are there under TRITON_INTERPRET alone, and cpu's in a build alone
        served = [row for row in served if row.backend not in ("triton", "cuda")]
        names = [name for name in names if name in {row.name for row in served}]
    assert [row.name for row in sorted(served, key=lambda row: registry.place(row, device))] == names


def test_what_the_interpreter_runs_comes_last():
    implicit, plain, apart, reference = (
        registry.Impl("conv", name, ("cpu",), lambda outs, call: None)
        for name in ("triton_implicit", "triton", "triton_apart", "reference")
    )
    ordered = sorted((apart, plain, implicit, reference), key=lambda row: registry.place(row, "cpu"))
    assert ordered == [reference, implicit, plain, apart]


def test_every_kernel_has_a_place_and_every_place_a_kernel(rows):
    assert {row.name for row in rows} <= set(registry.ORDER)
    assert set(registry.ORDER) - {row.name for row in rows} <= {"cpu", "cpu_bf16", "cpu_patches"}
