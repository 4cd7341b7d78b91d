"""Facts about the machine for measured results, and the time of a call."""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from lowbit._version import __version__
from lowbit.torch_private import multiplies_bf16

__all__ = ["cpu_name", "fastest", "float_precision", "multiplies", "provenance", "version"]


def cpu_name() -> str:
    """The processor's name as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def float_precision() -> str:
    """The faster of ``"bf16"`` and ``"fp32"`` on this processor: bf16 if it has instructions that multiply bf16."""
    return "bf16" if multiplies("bf16") else "fp32"


def multiplies(precision: str) -> bool:
    """Whether the processor has instructions that multiply numbers in ``"bf16"`` or ``"fp16"``."""
    get_capabilities = getattr(torch.cpu, "get_capabilities", None)
    if get_capabilities is not None:
        return any(supported for name, supported in get_capabilities().items() if precision in name)
    if platform.machine() in ("aarch64", "arm64"):  # on other processors this is also true for emulation
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{precision}_supported")())
    return precision == "bf16" and multiplies_bf16()


def version(package: str) -> str:
    """The version of an optional package, or ``"not installed"``."""
    try:
        return str(importlib.import_module(package).__version__)
    except (ImportError, AttributeError):
        return "not installed"


def provenance(
    command: str | None = None, packages: Iterable[str] = (), kernels: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The machine, versions, commit and time of a measured result.

    Args:
        command: The command that measured it.
        packages: Further packages whose versions are included.
        kernels: The machine as lowbit's kernels see it (``lowbit.backends.cpu.processor``).
    """
    versions = {"lowbit": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    versions |= {name: version(name) for name in packages}
    isa = torch.backends.cpu.get_cpu_capability()
    load = os.getloadavg() if hasattr(os, "getloadavg") else ()
    return {
        **({} if command is None else {"command": f"`{command}`"}),
        "machine": f"{cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch sees {isa}",
        **({} if kernels is None else {"kernels": "; ".join(f"{key} {value}" for key, value in kernels.items())}),
        "system": platform.platform(),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "commit": _commit(),
        "load before": " ".join(f"{average:.1f}" for average in load) + " (1, 5, 15 minutes)",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _commit() -> str:
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        run = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown (git is not installed)"
    return run.stdout.strip() or "unknown (not a git checkout)"


def fastest(run: Callable[[], object], device: torch.device | None = None, times: int = 5) -> float:
    """Seconds of the fastest of several runs; a CUDA ``device`` is synchronized after each."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
