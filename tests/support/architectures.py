"""Tiny models of the architectures that people train, each with one batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit.demo.gpt import GPT, GPTConfig

#: How many blocks each transformer has: enough for segments of two.
BLOCKS = 4


class Residual(nn.Module):
    """A block of a residual net."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(y)
        return result


class ResNet(nn.Module):
    """Two stages of two blocks, with the names that torchvision's have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16))
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))
        result: Tensor = self.fc(x.mean((2, 3)))
        return result


def _tokens(size: int = 60) -> Tensor:
    return torch.randint(3, size, (2, 12))


def _gpt() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    tokens = _tokens()
    config = GPTConfig(vocab=64, layers=BLOCKS, heads=2, dim=32, hidden=64, context=16)
    return GPT(config), lambda model: model(tokens).float().square().mean()


def _of_transformers(name: str, config: dict[str, Any], batch: Callable[[], dict[str, Tensor]]) -> Callable[[], Any]:
    def made() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        transformers = pytest.importorskip("transformers")
        cls = getattr(transformers, name)
        inputs = batch()

        def loss(model: nn.Module) -> Tensor:
            result: Tensor = model(**inputs).loss
            return result

        return cls(cls.config_class(**config)).train(), loss

    return made


def _language() -> dict[str, Tensor]:
    tokens = _tokens()
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


_DECODER = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": BLOCKS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip

#: By name: what makes a model, and a function of the model that gives its loss on one batch.
ARCHITECTURES: dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]] = {
    "gpt": _gpt,
    "llama": _of_transformers("LlamaForCausalLM", {**_DECODER, "attention_dropout": 0.1}, _language),
    "mixtral": _of_transformers(
        "MixtralForCausalLM", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}, _language
    ),
    "gpt2": _of_transformers(
        "GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 32, "n_layer": BLOCKS, "n_head": 2, "n_positions": 32,
                            "bos_token_id": 1, "eos_token_id": 2}, _language
    ),
    "bert": _of_transformers(
        "BertForMaskedLM", {name: size for name, size in _DECODER.items() if "key" not in name}, _language
    ),
    "vit": _of_transformers(
        "ViTForImageClassification",
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": BLOCKS, "num_attention_heads": 2,
         "image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.1},
        lambda: {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])},
    ),
    "t5": _of_transformers(
        "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": BLOCKS, "num_heads": 4,
         "decoder_start_token_id": 0, "pad_token_id": 0,
         "use_cache": False},  # with a cache, gradients of its position bias are summed in another order
        lambda: {"input_ids": _tokens(), "labels": _tokens()},
    ),
    "whisper": _of_transformers(
        "WhisperForConditionalGeneration",
        {"vocab_size": 64, "d_model": 32, "encoder_layers": BLOCKS, "decoder_layers": BLOCKS, "num_mel_bins": 8,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
         "max_source_positions": 16, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "decoder_start_token_id": 1, "encoder_layerdrop": 0.3},
        lambda: {"input_features": torch.randn(2, 8, 32), "labels": _tokens()},
    ),
    "resnet": lambda: (ResNet(), _image_loss(torch.randn(4, 3, 16, 16))),
}  # fmt: skip


def _image_loss(images: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(images).square().mean()
