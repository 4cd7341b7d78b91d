"""``lowbit doctor`` says what a machine can use, and what to do."""

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from support.processes import run_processes

import lowbit as lb


@pytest.mark.parametrize("gpu", [False, True], ids=["no GPU", "GPU"])
def test_doctor_says_what_a_machine_can_use(run, monkeypatch, gpu):
    """Without a GPU nobody is told to install what only a GPU needs, and nothing for one is called ready."""
    from lowbit.backends import registry
    from lowbit.cli import doctor

    monkeypatch.setattr(doctor, "_has_gpu", lambda: gpu)
    monkeypatch.setattr(registry, "absent", lambda: {"cuda": "this torch has no CUDA; get another"})
    report = json.loads(run("doctor", "--json"))
    assert report["backends"]["reference"].endswith("ops on cpu, cuda" if gpu else "ops on cpu")
    assert report["backends"]["cuda"].startswith(
        "missing: this torch" if gpu else "idle: not installed, and this machine"
    )
    assert any("get another" in line for line in report["advice"]) == gpu
    interpreted = any(impl.backend == "triton" for impl in registry.impls("encode", "cpu"))
    if not interpreted and any(impl.backend == "triton" for impl in registry.impls("encode", "cuda")):
        assert report["backends"]["triton"].startswith("ready" if gpu else "idle: installed")


def test_doctor_repeats_no_record_of_an_earlier_build(run, monkeypatch):
    """As after an installation without native code and a build in place."""
    from lowbit.backends import native, registry

    pytest.importorskip("lowbit._native")
    monkeypatch.setattr(native, "build_notice", lambda: "switched off by LOWBIT_NATIVE=0")
    assert "switched off" not in " ".join(json.loads(run("doctor", "--json"))["advice"])
    monkeypatch.setattr(registry, "absent", lambda: {"cpu": "lowbit_ops.so cannot be loaded"})
    assert "switched off" in " ".join(json.loads(run("doctor", "--json"))["advice"])


def test_doctor_names_every_backend(run):
    report = json.loads(run("doctor", "--json"))
    assert set(report["backends"]) == set(lb.backends.BACKENDS)
    assert report["backends"]["reference"].startswith("ready")
    assert report["versions"]["torch"] == torch.__version__
    assert "advice" in run("doctor")


@pytest.mark.parametrize(
    ("set_to", "advised"),
    [
        ({}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "99"}, True),
        ({"LD_PRELOAD": "libtcmalloc.so"}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "99", "MALLOC_MMAP_THRESHOLD_": "99"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=99"}, False),
    ],
)
def test_doctor_advises_to_keep_memory_where_glibc_gives_it_back(run, monkeypatch, set_to, advised):
    from lowbit.cli import doctor

    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    for libc, here in (("glibc", advised), ("", False)):
        monkeypatch.setattr(doctor.platform, "libc_ver", lambda libc=libc: (libc, ""))
        report = json.loads(run("doctor", "--json"))
        assert any("MALLOC_TRIM_THRESHOLD_=" in line for line in report["advice"]) == here
        assert set_to.items() <= report["settings"].items()


def _doctor(rank: int, settings: dict[str, str], told: Path) -> None:
    import lowbit.cli

    os.environ.update(settings)
    sys.argv = ["lowbit", "doctor"]
    with told.open("w") as out, contextlib.redirect_stdout(out), pytest.raises(SystemExit) as stop:
        lowbit.cli.main()
    assert not stop.value.code


@pytest.mark.parametrize("variable", ["LOWBIT_ISA", "LOWBIT_WITHOUT"])
def test_doctor_shows_a_setting_that_the_kernels_refuse(tmp_path, variable):
    """In a process that has not asked the kernels for anything yet."""
    pytest.importorskip("lowbit._native")
    run_processes(_doctor, ({variable: "sse9", "COLUMNS": "200"}, tmp_path / "told"), 1)
    told = (tmp_path / "told").read_text()
    assert "'sse9'" in told and "unusable: " in told and f"{variable}" in told
    assert "correct or unset LOWBIT_ISA and LOWBIT_WITHOUT" in told.split("advice")[1]


def test_results_say_what_the_kernels_saw():
    from lowbit.backends.cpu import processor
    from lowbit.machine import provenance

    seen = processor()
    told = provenance(kernels=seen)["kernels"]
    assert all(f"{key} {value}" in told for key, value in seen.items())


@pytest.mark.parametrize("has", [True, False])
def test_float_precision_is_known_without_capabilities(monkeypatch, has):
    """As on versions of torch that tell by another function."""
    import platform
    from types import SimpleNamespace

    from lowbit.machine import float_precision

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch, "cpu", SimpleNamespace(_is_avx512_bf16_supported=lambda: has))
    assert float_precision() == ("bf16" if has else "fp32")
