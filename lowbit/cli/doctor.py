"""``lowbit doctor``: what is installed, which kernels can run, and how to get what is missing."""

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

#: Backends that a machine without a GPU can do without.
_FOR_GPUS = ("cuda", "triton")

#: What variables that matter here begin with.
_SETTINGS = ("LOWBIT_", "TRITON_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    memory: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="What training this model takes of memory, and what each technique would save: demo, a directory "
            "with a config.json of transformers, or MODULE:FUNCTION, which returns a model and a batch.",
        ),
    ] = "",
    batch: Annotated[int, typer.Option(min=1, help="Rows of a batch, with --memory.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a row, with --memory.")] = 512,
    optimizer: Annotated[str, typer.Option(help="adamw, adamw8bit, lion8bit ..., with --memory.")] = "adamw",
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16, with --memory.")] = "fp32",
    recipe: Annotated[str, typer.Option(help="A recipe that trains, such as fp8, with --memory.")] = "",
) -> None:
    """Check the installation: versions, backends and how to get the missing ones, CPU features, settings.

    Send its output along when something does not work. With --memory: the usual checklist for out of memory.
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
    for line in report["advice"] or ["none: everything that this machine can have is there"]:
        out.print(f"  - {line}", soft_wrap=True)


def examine() -> dict[str, Any]:
    """Everything ``lowbit doctor`` prints."""
    import torch

    from lowbit.backends import registry
    from lowbit.backends.cpu import processor
    from lowbit.backends.native import build_notice

    native, notice = processor(), build_notice()
    backends = _backends()
    precision = registry.matmul_precision()
    advice = [
        f"{name}: {state.removeprefix('missing: ')}" for name, state in backends.items() if state.startswith("missing")
    ]
    advice += [state.removeprefix("unusable: ") for state in native.values() if state.startswith("unusable")]
    # A record of a build says nothing where the library is there: a later build in place may have made it.
    if notice and "cpu" in registry.absent() and not any(notice in line for line in advice):
        advice.append(f"build: {notice}")
    if precision == "highest":
        advice.append(
            "torch.set_float32_matmul_precision('medium') lets fp32 layers, torch's own and those on low-bit weights, "
            "round their operands to bf16, which processors with bf16 products multiply twice as fast or more"
        )
    if _gives_pages_back():
        advice.append(
            "MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_THRESHOLD_=33554432 in the environment (or a preloaded "
            "tcmalloc or jemalloc) let a process on the CPU keep the memory of its activations, which glibc otherwise "
            "gives back and takes anew at every layer: a fifth of the time of a small encoder (docs/measured.md)"
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
            "cores": os.cpu_count(),
            "threads of torch": torch.get_num_threads(),
            "torch sees": torch.backends.cpu.get_cpu_capability(),
            **native,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        },
        "backends": backends,
        "settings": {
            "float32 matmul precision": precision,
            **{key: value for key, value in sorted(os.environ.items()) if key.startswith(_SETTINGS)},
        },
        "advice": advice,
    }


def _gives_pages_back() -> bool:
    """Whether memory comes from a glibc that nobody told to keep it; each of its two thresholds alone is no help."""
    kept = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} <= os.environ.keys()
    other = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or "malloc" in os.environ.get("LD_PRELOAD", "")
    return platform.libc_ver()[0] == "glibc" and not (kept or other)


def _backends() -> dict[str, str]:
    """The state of each backend: ``ready``, ``idle`` where only a GPU would need it, or ``missing`` and the reason."""
    from lowbit.backends import BACKENDS, registry
    from lowbit.ops import OPS

    missing, gpu = registry.absent(), _has_gpu()
    states = {}
    for name in BACKENDS:
        rows = {impl for op in OPS for device in ("cpu", "cuda") for impl in registry.impls(op, device)}
        mine = [impl for impl in rows if impl.backend == name]
        devices = {device for impl in mine for device in impl.devices} - (set() if gpu else {"cuda"})
        count = f"{len({impl.op for impl in mine})} of {len(OPS)} ops"
        if name in missing and (gpu or name not in _FOR_GPUS):
            states[name] = f"missing: {missing[name]}"
        elif name in missing:
            states[name] = "idle: not installed, and there is no GPU here"
        elif devices:
            states[name] = f"ready: {count} on {', '.join(sorted(devices))}"
        else:
            states[name] = f"idle: installed, {count}, and there is no GPU here"
    return states


def _has_gpu() -> bool:
    """Whether this machine has a GPU of NVIDIA's, also where torch was built without CUDA."""
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
