"""``lowbit doctor``: versions, usable kernels, settings, and how to install missing parts."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from lowbit._version import __version__
from lowbit.cli.console import out, print_json
from lowbit.machine import cpu_name
from lowbit.tables import rich_table

PACKAGES = ("torch", "numpy", "triton", "transformers", "ml_dtypes", "matplotlib")

#: Backends that a machine without a GPU does not need.
_FOR_GPUS = ("cuda", "triton")

#: Prefixes of the environment variables to report.
_SETTINGS = ("LOWBIT_", "TRITON_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    memory: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Estimate the memory for training this model, and how much each technique saves: demo, a Hugging Face "
            "model directory (config.json), or MODULE:FUNCTION, which returns (model, batch).",
        ),
    ] = "",
    batch: Annotated[int, typer.Option(min=1, help="Rows per batch, with --memory.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens per row, with --memory.")] = 512,
    optimizer: Annotated[str, typer.Option(help="adamw, adamw8bit, lion8bit ..., with --memory.")] = "adamw",
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16, with --memory.")] = "fp32",
    recipe: Annotated[str, typer.Option(help="Training recipe, such as fp8, with --memory.")] = "",
) -> None:
    """Check the installation: versions, backends, CPU features, settings, and how to install missing parts.

    Include the output in bug reports. With --memory: a checklist against out-of-memory errors.
    """
    if memory:
        from lowbit.cli.memory import report as report_memory

        report_memory(
            memory, batch, length, optimizer, None if precision == "fp32" else precision, recipe or None, json
        )
        return
    report = examine()
    if json:
        print_json(report)
        return
    for title, values in report.items():
        if isinstance(values, dict):
            out.print(f"\n{title}", style="bold")
            out.print(rich_table((), ((f"  {key}", _mark(value)) for key, value in values.items())))
    out.print("\nadvice", style="bold")
    for line in report["advice"] or ["none: everything that this machine can use is installed"]:
        out.print(f"  - {line}", soft_wrap=True)


def examine() -> dict[str, Any]:
    """The report of ``lowbit doctor``, as a dict."""
    import torch

    from lowbit.backends import registry
    from lowbit.backends.cpu import processor
    from lowbit.backends.native import build_notice
    from lowbit.memory import system_memory

    native, notice = processor(), build_notice()
    backends = _backends()
    precision = registry.matmul_precision()
    advice = [
        f"{name}: {state.removeprefix('missing: ')}" for name, state in backends.items() if state.startswith("missing")
    ]
    advice += [state.removeprefix("unusable: ") for state in native.values() if state.startswith("unusable")]
    # If the library is there, the record of a failed build is outdated: a later build succeeded.
    if notice and "cpu" in registry.absent() and not any(notice in line for line in advice):
        advice.append(f"build: {notice}")
    if precision == "highest":
        advice.append(
            "torch.set_float32_matmul_precision('medium') rounds the operands of fp32 matmuls to bf16, also in layers "
            "with low-bit weights; on CPUs with bf16 instructions matmuls are at least twice as fast"
        )
    if _gives_pages_back():
        advice.append(
            "set MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_THRESHOLD_=33554432 in the environment, or preload "
            "tcmalloc or jemalloc: glibc then keeps the memory of activations between layers, which saves a fifth of "
            "the time of a small encoder on CPUs (docs/measured.md)"
        )
    return {
        "versions": {
            "lowbit": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
        "machine": {
            "system": platform.platform(),
            "cpu": cpu_name(),
            "memory": str(system_memory()),
            "cores": os.cpu_count(),
            "threads of torch": torch.get_num_threads(),
            "torch sees": torch.backends.cpu.get_cpu_capability(),
            **native,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            **({"memory of the gpu": str(system_memory("cuda"))} if torch.cuda.is_available() else {}),
        },
        "backends": backends,
        "settings": {
            "float32 matmul precision": precision,
            **{key: value for key, value in sorted(os.environ.items()) if key.startswith(_SETTINGS)},
        },
        "advice": advice,
    }


def _gives_pages_back() -> bool:
    """Whether glibc with default thresholds allocates memory. Setting only one of the two thresholds does not help."""
    thresholds = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} <= os.environ.keys()
    other = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or "malloc" in os.environ.get("LD_PRELOAD", "")
    return platform.libc_ver()[0] == "glibc" and not (thresholds or other)


def _backends() -> dict[str, str]:
    """The state of each backend: ``ready``, ``idle`` (needs a GPU), or ``missing`` and the reason."""
    from lowbit.backends import BACKENDS, registry
    from lowbit.ops import OPS

    missing, gpu = registry.absent(), _has_gpu()
    states = {}
    for name in BACKENDS:
        rows = {impl for op in OPS for device in ("cpu", "cuda") for impl in registry.impls(op, device)}
        impls = [impl for impl in rows if impl.backend == name]
        devices = {device for impl in impls for device in impl.devices} - (set() if gpu else {"cuda"})
        count = f"{len({impl.op for impl in impls})} of {len(OPS)} ops"
        if name in missing and (gpu or name not in _FOR_GPUS):
            states[name] = f"missing: {missing[name]}"
        elif name in missing:
            states[name] = "idle: not installed, and this machine has no GPU"
        elif devices:
            states[name] = f"ready: {count} on {', '.join(sorted(devices))}"
        else:
            states[name] = f"idle: installed, {count}, and this machine has no GPU"
    return states


def _has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, even if torch was built without CUDA."""
    import torch

    return torch.cuda.is_available() or Path("/dev/nvidiactl").exists()


def _version(name: str) -> str:
    if name in sys.modules and hasattr(sys.modules[name], "__version__"):
        return str(sys.modules[name].__version__)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _mark(value: Any) -> Text:
    text = str(value)
    return Text(text, "yellow" if text.startswith(("missing", "unusable", "not installed")) else "")
