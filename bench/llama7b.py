"""Estimates the memory of training a 7B model by training method, and which GPUs it fits.

``lowbit bench llama7b`` writes llama7b.md and llama7b.json. The model has the shape of Llama-2-7B and is on the meta
device, so nothing is allocated. Each estimate takes about half a minute of processor time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.convert.maker import Allocated
from lowbit.convert.quantize import quantize_from
from lowbit.convert.select import DEFAULT_SKIP
from lowbit.machine import provenance
from lowbit.memory.fake import numbers_are_one
from lowbit.recipes import layer_recipes
from lowbit.tables import markdown

__all__ = ["CARDS", "LAYERS", "PART", "WAYS", "Way", "estimated", "record", "run", "table"]

#: Decoder layers of the model, and of the smaller model that tests estimate again.
LAYERS, PART = 32, 2
LENGTH, RANK = 2048, 16

#: GPU memory in GiB, and the share that an estimate may use: an estimate excludes the CUDA context and fragmentation.
CARDS, USABLE = (24, 16), 0.9

_ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_GIB = 2**30


@dataclass(frozen=True)
class Way:
    """A training method.

    ``weights``: the dtype of the model. ``adapters``: the recipe of the frozen weights under LoRA, or ``"bf16"``; None
    trains all weights. ``in_backward``: whether the optimizer steps during backward.
    """

    name: str
    optimizer: Callable[..., torch.optim.Optimizer]
    weights: torch.dtype = torch.bfloat16
    precision: str | None = None
    recipe: str | None = None
    checkpoint: str | None = "block"
    adapters: str | None = None
    in_backward: bool = False
    rows: int = 1


_FP32 = partial(torch.optim.AdamW, lr=1e-4, fused=True)
_MASTERS = partial(lb.optim.AdamW, lr=1e-4, bits=32, master="fp32")
_RESIDUAL = partial(lb.optim.AdamW8bit, lr=1e-4, master="residual")
_STOCHASTIC = partial(lb.optim.AdamW4bit, lr=1e-4, master="stochastic")
_ADAPTERS = partial(lb.optim.AdamW8bit, lr=1e-4)

WAYS = (
    Way("fp32, AdamW", _FP32, torch.float32, checkpoint=None),
    Way("fp32 weights, bf16 autocast, AdamW", _FP32, torch.float32, "bf16", checkpoint=None),
    Way("bf16 weights, fp32 masters, AdamW", _MASTERS, checkpoint=None),
    Way("bf16 weights, residual masters, AdamW8bit", _RESIDUAL, checkpoint=None),
    Way("the same, checkpointed blocks", _RESIDUAL),
    Way("the same, matrix products in fp8", _RESIDUAL, recipe="fp8"),
    Way("bf16 weights, residual masters, AdamW8bit in backward, checkpointed blocks", _RESIDUAL, in_backward=True),
    Way("bf16 weights, stochastic rounding, AdamW4bit, checkpointed blocks", _STOCHASTIC),
    Way("the same, optimizer steps in backward", _STOCHASTIC, in_backward=True),
    Way("LoRA on bf16, checkpointed blocks", _ADAPTERS, adapters="bf16"),
    Way("LoRA on int8-weight-only, checkpointed blocks", _ADAPTERS, adapters="int8-weight-only"),
    Way("LoRA on nf4 (QLoRA), checkpointed blocks", _ADAPTERS, adapters="nf4"),
    Way(f"the same, 4 x {LENGTH:,} tokens", _ADAPTERS, adapters="nf4", rows=4),
    Way("LoRA on nf4 (QLoRA), everything kept", _ADAPTERS, checkpoint=None, adapters="nf4"),
)


def model_of(way: Way, layers: int) -> nn.Module:
    """The model on the meta device, quantized and with adapters if the method has them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=32, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(shape).to(way.weights).train()
        if way.adapters is None:
            return model
        from peft import LoraConfig, get_peft_model

        model.requires_grad_(False)
        if way.adapters != "bf16":
            quantize_from(model, layer_recipes(way.adapters), Allocated(), DEFAULT_SKIP)
        adapted: nn.Module = get_peft_model(model, LoraConfig(r=RANK, target_modules=list(_ADAPTED)))
    return adapted


def _accumulate(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor]) -> None:
    """Forward and backward. An optimizer in backward may read its step count."""
    value = loss(model(**batch), batch)
    with numbers_are_one():
        value.backward()  # type: ignore[no-untyped-call]


def estimated(way: Way, layers: int) -> dict[str, int]:
    """Bytes at the peak of a step: weights, states (with masters), gradients, rest, and their sum, the peak.

    If the optimizer steps in backward, its gradients (one at a time) count in the rest.
    """
    tokens = torch.zeros(way.rows, LENGTH, dtype=torch.long, device="meta")
    model, batch = model_of(way, layers), {"input_ids": tokens, "labels": tokens}
    made: list[lb.optim.Optimizer] = []

    def step_in_backward(copied: nn.Module) -> None:
        made.append(lb.optim.in_backward_(copied, cast(Any, way.optimizer)))
        made[0].begin()

    options: dict[str, Any] = {"optimizer": way.optimizer}
    if way.in_backward:
        options = {"optimizer": None, "prepare": step_in_backward, "accumulate": _accumulate}
    found = lb.estimate(model, batch, recipe=way.recipe, checkpoint=way.checkpoint, precision=way.precision, **options)
    kinds = found.by_kind
    weights = kinds["parameters"] + kinds.get("buffers", 0)
    states = kinds.get("optimizer state", 0) + kinds.get("master copies", 0)
    states += sum(t.nbytes for one in made for state in one.state.values() for t in state.values() if t.dim())
    gradients = kinds.get("gradients", 0)
    rest = found.peak_bytes - weights - states - gradients
    return {"weights": weights, "states": states, "gradients": gradients, "rest": rest, "peak": found.peak_bytes}


def record() -> dict[str, Any]:
    """The bytes of a step by number of layers and training method."""
    return {
        "parameters": sum(p.numel() for p in model_of(WAYS[0], LAYERS).parameters()),
        **{str(layers): {way.name: estimated(way, layers) for way in WAYS} for layers in (PART, LAYERS)},
    }


def table(found: dict[str, Any]) -> str:
    """The training methods in GiB, with the GPUs that each fits."""
    head = ("training method", "weights", "states, masters", "gradients", "activations and the rest", "peak, GiB")

    def row(name: str, sizes: dict[str, int]) -> tuple[str, ...]:
        fits = ("yes" if sizes["peak"] <= USABLE * card * _GIB else "no" for card in CARDS)
        return (
            name,
            *(f"{sizes[kind] / _GIB:.2f}" for kind in ("weights", "states", "gradients", "rest", "peak")),
            *fits,
        )

    rows = (row(*one) for one in found[str(LAYERS)].items())
    return markdown((*head, *(f"fits {card} GB" for card in CARDS)), rows, numbers=range(1, 6))


def run(directory: Path) -> Path:
    """Estimate all methods, and write ``llama7b.md`` and ``llama7b.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    found = record()
    about = provenance(packages=("transformers", "peft"))
    text = [
        "# The memory of training a 7B model\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        f"\nEstimates by `lb.estimate` for a model of the shape of Llama-2-7B, on the meta device: "
        f"{found['parameters']:,} parameters. A batch is 1 x {LENGTH:,} tokens unless the row says otherwise. LoRA has "
        f"rank {RANK} on all matrices of a block. Sizes are the CPU allocator's at the peak of a step, in GiB. A "
        f"method fits a card if its peak is at most {USABLE:.0%} of the card's GiB. The rest is activations, logits, "
        "temporaries, casts of weights, and the gradients of optimizers that step in backward.\n",
        f"<!-- table: llama7b -->\n{table(found)}\n<!-- end -->",
    ]
    (directory / "llama7b.json").write_text(json.dumps(found, indent=1) + "\n")
    path = directory / "llama7b.md"
    path.write_text("\n".join(text) + "\n")
    return path
