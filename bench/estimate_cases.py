"""Test models for memory estimates: models whose peak one op determines, and random networks.

Each model begins with a Linear, so the input of the op is an activation that needs a gradient.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Case", "cases", "random_network"]

#: Rows, tokens and channels of the activations.
_B, _T, _C = 8, 256, 32


class Case(NamedTuple):
    """A model, a batch, and a loss of output and batch."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[Any, Any], Tensor]


class Applied(nn.Module):
    """A Linear, then ``function(hidden, *parts)`` of its output."""

    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(_C, _C)
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x), *self.parts)


class ExpClamp(torch.autograd.Function):
    """A custom function whose backward allocates temporaries."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp().clamp(max=5)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return grads[0] * torch.where(y < 5, x.exp(), 0)


def _image(x: Tensor) -> Tensor:
    """``[B, T, C]`` as images ``[B, 32, 16, 16]``."""
    return x.transpose(1, 2).unflatten(2, (16, -1))


#: Layouts of ``[B, T, C]`` activations.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "sliced": lambda x: x[:, :-1],
    "permuted": lambda x: x.permute(1, 0, 2),
    "transposed": lambda x: x.transpose(1, 2),
}

#: Layouts of the same numbers as images.
IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: _image(x).contiguous(),
    "sliced": lambda x: _image(x)[:, :, :-2, 1:],
    "permuted": _image,
    "transposed": lambda x: _image(x).contiguous().transpose(2, 3),
    "channels-last": lambda x: _image(x).contiguous(memory_format=torch.channels_last),
}


def _normalized(x: Tensor) -> tuple[int, ...]:
    return (x.shape[-1],)


#: Functions of ``[B, T, C]`` in any layout.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "layer_norm": lambda x: F.layer_norm(x, _normalized(x)),
    "rms_norm": lambda x: F.rms_norm(x, _normalized(x)),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "hardswish": F.hardswish,
    "glu": lambda x: F.glu(x[..., : x.shape[-1] // 2 * 2]),
    "dropout": lambda x: F.dropout(x, 0.1),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(1)[0],
    "topk": lambda x: x.topk(8, -1)[0],
    "gather": lambda x: x.gather(-1, torch.zeros(*x.shape[:-1], 4, dtype=torch.long)),
    "index_select": lambda x: x.index_select(1, torch.arange(4)),
    "masked_fill": lambda x: x.masked_fill(torch.zeros(x.shape[-1], dtype=torch.bool), 0.0),
    "var": lambda x: x.var(1),
    "norm": lambda x: x.norm(dim=1),
    "amax": lambda x: x.amax(1),
    "matmul": lambda x: x @ x.mT,
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "cdist": lambda x: torch.cdist(x, x),
    "pad": lambda x: F.pad(x, (1, 2)),
    "fft": lambda x: torch.fft.fft(x, dim=1).abs(),
    "rfft": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), dim=1),
    "sdpa": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
    "custom Function": ExpClamp.apply,
}

#: Functions of images.
IMAGE_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[[], nn.Module] | None]] = {
    "conv2d": (lambda x, m: m(x), lambda: nn.Conv2d(32, 32, 3, padding=1)),
    "conv2d 1x1": (lambda x, m: m(x), lambda: nn.Conv2d(32, 64, 1)),
    "conv2d dilated": (lambda x, m: m(x), lambda: nn.Conv2d(32, 32, 3, padding=2, dilation=2)),
    "conv2d depthwise": (lambda x, m: m(x), lambda: nn.Conv2d(32, 32, 7, padding=3, groups=32)),
    "conv2d stride 2": (lambda x, m: m(x), lambda: nn.Conv2d(32, 64, 3, stride=2, padding=1)),
    "conv_transpose2d": (lambda x, m: m(x), lambda: nn.ConvTranspose2d(32, 16, 2, 2)),
    "batch_norm": (lambda x, m: m(x), lambda: nn.BatchNorm2d(32)),
    "group_norm": (lambda x, m: m(x), lambda: nn.GroupNorm(4, 32)),
    "instance_norm": (lambda x, m: m(x), lambda: nn.InstanceNorm2d(32, affine=True)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), None),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), None),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 4), None),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), None),
    "unfold": (lambda x: F.unfold(x, 3), None),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), None),
}


def _square(output: Tensor, batch: Any) -> Tensor:
    return output.abs().square().mean()


def _total(output: Tensor, batch: Any) -> Tensor:
    return output.abs().sum()


class _Tokens(nn.Module):
    """Token ids to logits."""

    def __init__(self, sparse: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 32, sparse=sparse)
        self.head = nn.Linear(32, 1000)
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(ids))
        return logits


def _ids() -> Tensor:
    return torch.randint(1000, (8, 128))


#: Losses of logits ``[B, T, V]`` and ids ``[B, T]``.
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda o, x: F.cross_entropy(o[:, :-1].flatten(0, 1), x[:, 1:].flatten()),
    "cross_entropy of a transpose": lambda o, x: F.cross_entropy(o[:, :-1].transpose(1, 2), x[:, 1:]),
    "label smoothing": lambda o, x: F.cross_entropy(o.flatten(0, 1), x.flatten(), label_smoothing=0.1),
    "gathered log_softmax": lambda o, x: -o[:, :-1].log_softmax(-1).gather(-1, x[:, 1:, None]).mean(),
    "gathered logsumexp": lambda o, x: (o[:, :-1].logsumexp(-1) - o[:, :-1].gather(-1, x[:, 1:, None])[..., 0]).mean(),
    "entropy": lambda o, x: -(o[:, :-1].softmax(-1) * o[:, :-1].log_softmax(-1)).sum(-1).mean(),
    "kl_div": lambda o, x: F.kl_div(o[:, 1:].log_softmax(-1), o[:, :-1].detach().softmax(-1), reduction="batchmean"),
    "nll of float": lambda o, x: F.nll_loss(o[:, :-1].float().log_softmax(-1).flatten(0, 1), x[:, 1:].flatten()),
    "one-hot": lambda o, x: F.mse_loss(o[:, :-1], F.one_hot(x[:, 1:], 1000).float()),
    "binary": lambda o, x: F.binary_cross_entropy_with_logits(o[:, :-1], torch.ones_like(o[:, :-1])),
}


def _recurrent() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    for name, cls in (("LSTM", nn.LSTM), ("GRU", nn.GRU), ("RNN", nn.RNN)):
        yield name, partial(cls, _C, 48, batch_first=True)
        yield f"{name} of 2 layers", partial(cls, _C, 48, 2, batch_first=True)
        yield f"{name} in both directions", partial(cls, _C, 24, bidirectional=True, batch_first=True)
    yield "LSTM with projections", lambda: nn.LSTM(_C, 48, proj_size=16, batch_first=True)
    yield "LSTM of time first", lambda: nn.LSTM(_C, 48)


#: Layers with other input shapes: how the input is made from ``[B, T, C]``, and the layer.
OTHERS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], nn.Module]]] = {
    "conv1d": (lambda x: x.transpose(1, 2), lambda: nn.Conv1d(32, 32, 3, padding=1)),
    "conv1d dilated": (lambda x: x.transpose(1, 2), lambda: nn.Conv1d(32, 32, 3, padding=2, dilation=2)),
    "conv1d depthwise": (lambda x: F.pad(x.transpose(1, 2), (3, 0)), lambda: nn.Conv1d(32, 32, 4, groups=32)),
    "conv_transpose1d": (lambda x: x.transpose(1, 2), lambda: nn.ConvTranspose1d(32, 16, 4, 2)),
    "conv3d": (lambda x: x.unflatten(1, (16, 4, 4)).permute(0, 4, 1, 2, 3), lambda: nn.Conv3d(32, 16, 3, padding=1)),
    "conv_transpose3d": (
        lambda x: x.unflatten(1, (16, 4, 4)).permute(0, 4, 1, 2, 3).contiguous(),
        lambda: nn.ConvTranspose3d(32, 8, 2, 2),
    ),
    "bilinear": (lambda x: x, lambda: _Twice(nn.Bilinear(_C, _C, 8))),
    "PReLU": (lambda x: x, nn.PReLU),
    "weight_norm": (lambda x: x, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(_C, 64))),
    "spectral_norm": (lambda x: x, lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(_C, 64))),
    "MultiheadAttention": (lambda x: x, lambda: _Attends(nn.MultiheadAttention(_C, 4, batch_first=True))),
    "TransformerEncoderLayer": (lambda x: x, lambda: nn.TransformerEncoderLayer(_C, 4, 64, 0.1, batch_first=True)),
    "GRUCell": (lambda x: x.flatten(0, 1), lambda: nn.GRUCell(_C, 48)),
}  # fmt: skip


class _Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x, x)
        return y


class _Attends(_Twice):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x, x, x, need_weights=False)[0]
        return y


def _batch() -> Tensor:
    return torch.randn(_B, _T, _C)


def _first(x: Tensor, part: nn.Module) -> Any:
    return part(x)[0]


def _viewed(view: Callable[[Tensor], Tensor], x: Tensor, part: nn.Module) -> Any:
    return part(view(x))


def _applied(function: Callable[..., Tensor], part: Callable[[], nn.Module] | None, dtype: torch.dtype) -> Any:
    return lambda: Applied(function, *([part()] if part else [])).to(dtype)


def cases() -> Iterator[Case]:
    """Each function in each layout, losses, recurrent and other layers: in fp32, and some in bf16 and fp64."""
    for name, function in FUNCTIONS.items():
        for layout, view in LAYOUTS.items():
            made = _applied(lambda x, function=function, view=view: function(view(x)), None, torch.float32)
            yield Case(f"{name}, {layout}", made, _batch, _total)
    for name, (function, part) in IMAGE_FUNCTIONS.items():
        for layout, view in IMAGES.items():
            call = lambda x, *m, function=function, view=view: function(view(x), *m)
            yield Case(f"{name}, {layout}", _applied(call, part, torch.float32), _batch, _total)
    for dtype in (torch.float64, torch.bfloat16):
        short, batch = str(dtype).removeprefix("torch."), lambda dtype=dtype: _batch().to(dtype)
        for name in ("conv2d", "conv2d 1x1", "conv_transpose2d", "batch_norm"):
            function, part = IMAGE_FUNCTIONS[name]
            call = lambda x, *m, function=function: function(_image(x).contiguous(), *m)
            yield Case(f"{name}, {short}", _applied(call, part, dtype), batch, _total)
        for name in ("softmax", "layer_norm", "gelu", "matmul", "sdpa"):
            yield Case(f"{name}, {short}", _applied(FUNCTIONS[name], None, dtype), batch, _total)
    for name, layer in _recurrent():
        yield Case(name, _applied(_first, layer, torch.float32), _batch, _square)
    for name, (view, layer) in OTHERS.items():
        yield Case(name, _applied(partial(_viewed, view), layer, torch.float32), _batch, _square)
    for name, loss in LOSSES.items():
        yield Case(f"loss: {name}", _Tokens, _ids, loss)
        yield Case(f"loss: {name}, bfloat16", lambda: _Tokens(dtype=torch.bfloat16), _ids, loss)
    yield Case("sparse embedding", lambda: _Tokens(sparse=True), _ids, LOSSES["cross_entropy"])


# -- random networks ---------------------------------------------------------------------------------------------------
class Residual(nn.Module):
    """A layer with a residual connection."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y = y[0] if isinstance(y, tuple) else y
        return x + y


class Through(nn.Module):
    """A layer for images or sequences ``[B, C, ...]``, applied to ``[B, T, C]``."""

    def __init__(self, layer: nn.Module, image: bool) -> None:
        super().__init__()
        self.layer, self.image = layer, image

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(_image(x) if self.image else x.transpose(1, 2))
        return (y.flatten(2) if self.image else y).transpose(1, 2)


def random_network(seed: int) -> Case:
    """3 to 8 random parts with random widths, a random activation dtype, and a loss."""
    draw = random.Random(seed)
    width = draw.choice((16, 24, 32, 48, 64))
    heads = draw.choice((2, 4))
    parts: list[Callable[[], nn.Module]] = [
        lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
        lambda: nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)),
        lambda: _Attends(nn.MultiheadAttention(width, heads, batch_first=True)),
        lambda: nn.LSTM(width, width, batch_first=True),
        lambda: nn.GRU(width, width, batch_first=True),
        lambda: Through(nn.Conv1d(width, width, 3, padding=1), False),
        lambda: Through(nn.Conv2d(width, width, 3, padding=1), True),
        lambda: Through(nn.Conv2d(width, width, 7, padding=3, groups=width), True),
        lambda: Through(nn.Sequential(nn.Conv2d(width, width, 1), nn.GroupNorm(4, width), nn.ReLU()), True),
        lambda: Through(nn.BatchNorm1d(width), False),
        lambda: nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.Softmax(-1)),
        lambda: nn.TransformerEncoderLayer(width, heads, 2 * width, 0.1, batch_first=True),
    ]
    chosen = [draw.randrange(len(parts)) for _ in range(draw.randint(3, 8))]
    classes, rows, side = draw.choice((10, 500)), draw.choice((2, 4, 8)), draw.choice((8, 12, 16))

    def make() -> nn.Module:
        layers = [Residual(parts[index]()) for index in chosen]
        return nn.Sequential(nn.Linear(width, width), *layers, nn.LayerNorm(width), nn.Linear(width, classes))

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), torch.zeros(output.shape[0] * output.shape[1], dtype=torch.long))

    return Case(f"network {seed}", make, lambda: torch.randn(rows, 16 * side, width), loss)
