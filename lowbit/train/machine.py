"""What a result was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from lowbit._version import __version__

__all__ = ["commit", "cpu_name", "float_precision", "provenance"]


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def float_precision() -> str:
    """``"bf16"`` where the processor multiplies bf16 numbers itself; else ``"fp32"``, which is then twice as fast."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return "bf16" if any(has for name, has in capabilities.items() if "bf16" in name) else "fp32"


def provenance(command: str) -> dict[str, str]:
    """The machine, the versions and the commit behind a result."""
    return {
        "command": f"`{command}`",
        "machine": f"{cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "system": platform.platform(),
        "versions": f"lowbit {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "commit": commit(),
    }


def commit() -> str:
    folder = Path(__file__).parent
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown (git is not there)"
    return told.stdout.strip() or "unknown (not a git checkout)"
