"""EfficientNet-Lite0 (ImageNet) with the parameter names of its PyTorch checkpoint.

Source: M. Tan and Q. Le, arXiv 1905.11946; the Lite variants of google/tpu (no squeeze-excite, ReLU6, fixed stem and
head). Padding is TensorFlow's "same", which for stride 2 is uneven.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, fx, nn

__all__ = ["MEAN", "SCALE", "SIDE", "EfficientNetLite0"]

#: Input of the model: images SIDE x SIDE as (x - MEAN) / SCALE, for x from 0 to 255.
SIDE, MEAN, SCALE = 224, 127.0, 128.0

#: Stages: number of blocks, kernel, stride of the first block, expansion, output channels.
STAGES = (
    (1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112), (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)  # fmt: skip


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


@fx.wrap  # code that depends on sizes cannot be traced
def _same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """TensorFlow's "same" padding of [B, C, H, W]: ceil(size / stride) outputs, an odd row or column at the end."""
    need = [max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in (x.shape[3], x.shape[2])]
    return F.pad(x, [part for total in need for part in (total // 2, total - total // 2)])


class Block(nn.Module):
    """1x1 expansion, depthwise convolution and 1x1 projection; the input is added if shapes are equal."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels * expansion
        self.expands = expansion > 1
        if self.expands:
            self._expand_conv, self._bn0 = nn.Conv2d(channels, wide, 1, bias=False), _norm(wide)
        self._depthwise_conv = nn.Conv2d(wide, wide, kernel, stride, groups=wide, bias=False)
        self._bn1 = _norm(wide)
        self._project_conv, self._bn2 = nn.Conv2d(wide, out, 1, bias=False), _norm(out)
        self.kernel, self.stride, self.adds = kernel, stride, stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = F.relu6(self._bn1(self._depthwise_conv(_same(y, self.kernel, self.stride))))
        projected: Tensor = self._bn2(self._project_conv(y))
        return x + projected if self.adds else projected


class EfficientNetLite0(nn.Module):
    """4.65 million parameters, 49 convolutions; images [B, 3, 224, 224] to logits [B, 1000]."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = nn.Conv2d(3, 32, 3, 2, bias=False), _norm(32)
        channels, blocks = 32, []
        for count, kernel, stride, expansion, out in STAGES:
            for index in range(count):
                blocks.append(Block(channels, out, kernel, stride if index == 0 else 1, expansion))
                channels = out
        self._blocks = nn.ModuleList(blocks)
        self._conv_head, self._bn1 = nn.Conv2d(channels, 1280, 1, bias=False), _norm(1280)
        self._fc = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self._bn0(self._conv_stem(_same(x, 3, 2))))
        for block in self._blocks:
            x = block(x)
        x = F.relu6(self._bn1(self._conv_head(x)))
        logits: Tensor = self._fc(x.mean((2, 3)))
        return logits
