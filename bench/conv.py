"""Benchmarks convolutions with static int8 scales against torch: layers of ResNet-18 and MobileNets, and ResNet-18.

``lowbit bench conv`` writes conv.md. Inputs and weights are random: errors show the distance from fp32, not accuracy.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.backends.cpu import processor
from lowbit.bench.timing import Budget, Case, Group, measure, usable
from lowbit.machine import provenance
from lowbit.memory.rss import peak_bytes, reset_peak
from lowbit.tables import markdown


class Shape(NamedTuple):
    """A layer: channels, kernel, image size, stride, groups."""

    name: str
    channels: int
    out: int
    kernel: int
    side: int
    stride: int = 1
    groups: int = 1

    def layer(self) -> nn.Module:
        """The layer, with a bias like a folded layer."""
        return nn.Conv2d(self.channels, self.out, self.kernel, self.stride, self.kernel // 2, groups=self.groups).eval()


SHAPES = (
    Shape("7x7, stride 2", 3, 64, 7, 224, 2), Shape("3x3", 64, 64, 3, 56), Shape("3x3", 128, 128, 3, 28),
    Shape("3x3", 256, 256, 3, 14), Shape("3x3", 512, 512, 3, 7), Shape("1x1, stride 2", 64, 128, 1, 56, 2),
    Shape("1x1", 192, 32, 1, 28), Shape("1x1", 80, 480, 1, 14), Shape("depthwise 3x3", 144, 144, 3, 56, 1, 144),
    Shape("depthwise 5x5", 480, 480, 5, 14, 1, 480),
)  # fmt: skip
BATCHES = (1, 8)


# -- ResNet-18 ---------------------------------------------------------------------------------------------------------
class Basic(nn.Module):
    """A residual block of two 3x3 convolutions."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and channels == out
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet18() -> nn.Module:
    """He et al., arXiv 1512.03385: 11.7 million parameters, images [N, 3, 224, 224] to logits [N, 1000]."""
    blocks: list[nn.Module] = []
    for channels, out, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        blocks += [Basic(channels, out, stride), Basic(out, out, 1)]
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000),
    ).eval()  # fmt: skip


# -- contenders ------------------------------------------------------------------------------------------------------
Run = Callable[[Tensor], Tensor]


def _folded(model: nn.Module) -> nn.Module:
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        lb.fold_(model)
    return model


def _last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


def _plain(model: nn.Module, x: Tensor) -> tuple[Run, Tensor]:
    return _folded(model), x


def _channels_last(model: nn.Module, x: Tensor) -> tuple[Run, Tensor]:
    return cast(Any, _folded(model)).to(memory_format=torch.channels_last), _last(x)


def _bf16(model: nn.Module, x: Tensor) -> tuple[Run, Tensor]:
    return cast(Any, _folded(model)).to(torch.bfloat16, memory_format=torch.channels_last), _last(x).bfloat16()


def _lowbit(dtype: torch.dtype, join: bool = False) -> Callable[[nn.Module, Tensor], tuple[Run, Tensor]]:
    def make(model: nn.Module, x: Tensor) -> tuple[Run, Tensor]:
        model = nn.Sequential(_folded(model))
        lb.quantize_(model, "int8-static", lb.calibrate(model, "int8-static", [x], "nearest"))
        if join:
            lb.fuse_requantize_(model)
        return model.to(dtype), _last(x).to(dtype)

    return make


def _torch_static(model: nn.Module, x: Tensor) -> tuple[Run, Tensor]:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.backends.quantized.engine = "onednn"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the interface is deprecated
        prepared = prepare_fx(nn.Sequential(model), get_default_qconfig_mapping("onednn"), (x,))
        prepared(x)
        return convert_fx(prepared), _last(x)


MAKERS: dict[str, Callable[[nn.Module, Tensor], tuple[Run, Tensor]]] = {
    "fp32": _plain,
    "fp32 channels-last": _channels_last,
    "bf16 channels-last": _bf16,
    "lowbit int8-static": _lowbit(torch.float32),
    "lowbit int8-static, joined": _lowbit(torch.float32, join=True),
    "lowbit int8-static, bf16 between": _lowbit(torch.bfloat16),
    "torch static int8 (fx, onednn)": _torch_static,
}


def cases(model: nn.Module, x: Tensor) -> Iterator[tuple[Case, Tensor]]:
    """All available contenders, with their outputs."""
    for who, make in MAKERS.items():

        def case(who: str = who, make: Callable[[nn.Module, Tensor], tuple[Run, Tensor]] = make) -> Case:
            run, own = make(copy.deepcopy(model), x)
            return Case(who, lambda: run(own))

        for one in usable(case):
            yield one, one.run()  # type: ignore[misc]


# -- memory ------------------------------------------------------------------------------------------------------------
def peak(who: str, batch: int) -> int:
    """Peak bytes of this process in a second run of ResNet-18, minus the bytes before the model was built."""
    torch.manual_seed(0)
    x = torch.randn(batch, 3, 224, 224)
    with torch.no_grad():
        nn.Conv2d(3, 8, 3)(x)
        _give_back()
        reset_peak()
        before = peak_bytes()
        run, own = MAKERS[who](resnet18(), x)
        run(own)
        _give_back()
        reset_peak()
        run(own)
    return peak_bytes() - before


def _give_back() -> None:
    """Return freed memory, such as that of calibration, to the system, if the C library supports it."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def peak_elsewhere(who: str, batch: int) -> int:
    """``peak`` in a separate process."""
    code = f"from lowbit.bench import conv; print(conv.peak({who!r}, {batch}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(found.stdout.split()[-1])


# -- the page ----------------------------------------------------------------------------------------------------------
@torch.no_grad()
def run(directory: Path) -> Path:
    """Measure, and write ``conv.md``."""
    lines = ["# Convolutions\n", "Cases took turns; medians in ms. BatchNorm is folded everywhere.\n"]
    lines += [f"- {key}: {value}" for key, value in provenance(kernels=processor()).items()]
    whos = list(MAKERS)
    rows = []
    torch.manual_seed(0)
    for batch in BATCHES:
        for shape in SHAPES:
            x = torch.randn(batch, shape.channels, shape.side, shape.side).relu()
            found = [case for case, _ in cases(shape.layer(), x)]
            took = measure(Group("conv", shape.name, "", 0, 0, tuple(found), ()), Budget(21, 0.004, 6.0))
            size = f"{shape.name} {shape.channels} to {shape.out}, {batch}x{shape.side}x{shape.side}"
            rows.append([size, *(f"{1e3 * took[who]:.2f}" if who in took else "" for who in whos)])
    lines += ["\n## Layers\n", markdown(["layer", *whos], rows, numbers=range(1, len(whos) + 1))]
    for batch in BATCHES:
        lines += _network(batch)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "conv.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _network(batch: int) -> list[str]:
    model, x = resnet18(), torch.randn(batch, 3, 224, 224)
    found = list(cases(model, x))
    took = measure(Group("conv", "resnet18", "", 0, 0, tuple(case for case, _ in found), ()), Budget(21, 0.0, 40.0))
    exact = found[0][1].double()
    rows = []
    for case, y in found:
        error = float((y.double() - exact).norm() / exact.norm())
        ratio = took["fp32 channels-last"] / took[case.who]
        peak = peak_elsewhere(case.who, batch) / 2**20
        rows.append((case.who, f"{1e3 * took[case.who]:.1f}", f"{ratio:.2f}x", f"{peak:.0f}", f"{error:.1e}"))
    head = ("", "ms", "to fp32 channels-last", "MiB", "relative error of logits")
    return [
        f"\n## ResNet-18, batch {batch}\n",
        "Memory: the most that a process held, beyond what it held before the model.\n",
        markdown(head, rows, numbers=range(1, 5)),
    ]
