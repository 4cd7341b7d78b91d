"""Models that several test files use, and what is done to them first."""

from __future__ import annotations

import torch
from support.bits import same_bits
from torch import nn

import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig


def decoded_(model: nn.Module) -> nn.Module:
    """Put what each weight decodes to in the place of its original: the oracle of weight-only layers, run by torch."""
    for module in model.modules():
        for name in ("weight", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            p = module._parameters.get(name)
            if p is not None and p.dim() > 1:
                with torch.no_grad():
                    flat = p.flatten(1)
                    p.copy_(lb.fake_quantize(flat, "int8:row").reshape(p.shape))
    return model


def trained_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Statistics and affine parameters as training leaves them, in eval mode."""
    g = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            with torch.no_grad():
                if module.running_mean is not None:
                    module.running_mean.copy_(torch.randn(module.num_features, generator=g))
                    module.running_var.copy_(torch.rand(module.num_features, generator=g) * 4 + 0.01)
                if module.affine:
                    module.weight.copy_(torch.randn(module.num_features, generator=g))
                    module.bias.copy_(torch.randn(module.num_features, generator=g))
    return model.eval()


def gpt(dtype: torch.dtype = torch.float32) -> GPT:
    model = GPT(GPTConfig(vocab=60, dim=48, layers=2, heads=4, context=32)).to(dtype).eval()
    with torch.no_grad():  # a few columns are large, as trained norms make them
        for block in model.blocks:
            block.norm1.weight[::7] *= 20
            block.norm2.weight[3] *= 50
    return model


def same_state(a: nn.Module, b: nn.Module) -> bool:
    """Whether all tensors of both states are there under the same names, in every bit."""
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(same_bits(left[name], right[name]) for name in left)
