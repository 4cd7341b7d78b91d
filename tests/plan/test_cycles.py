"""A step of every technique leaves no tensor to the garbage collector: what is in a cycle is held until that comes."""

from __future__ import annotations

import gc
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.plan.fitting.run import Run
from lowbit.plan.settings import TrainingSettings

ROWS = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(0))

TECHNIQUES = {
    "plain": TrainingSettings(),
    "block": TrainingSettings(checkpoint="block", micro_batches=2),
    "mlp": TrainingSettings(checkpoint="mlp"),
    "lion": TrainingSettings(optimizer="lion", bits=8),
    "save_matmuls": TrainingSettings(checkpoint="save_matmuls"),
    "sqrt": TrainingSettings(checkpoint="sqrt"),
    "options of blocks": TrainingSettings(checkpoint=("block", "mlp")),
    "fp8": TrainingSettings(recipe="fp8", precision="bf16", bits=8),
    "mxfp8 in blocks": TrainingSettings(recipe="mxfp8", checkpoint="block"),
    "codes of activations": TrainingSettings(activation_codes=True, micro_batches=2),
    "codes in blocks": TrainingSettings(
        activation_codes=True, checkpoint="block", recipe="fp8", precision="bf16", bits=4
    ),
    "codes in feed-forward layers": TrainingSettings(activation_codes=True, checkpoint="mlp"),
    "activations on disk": TrainingSettings(offload_activations=True),
    "activations of blocks on disk": TrainingSettings(
        offload_activations=True, checkpoint="block", activation_codes=True
    ),
    "tiles": TrainingSettings(tiles=16),
    "adapters": TrainingSettings(adapters=4),
    "adapters on codes": TrainingSettings(adapters=4, base="nf4", checkpoint="block"),
    "states on disk": TrainingSettings(offload_states=True, bits=8),
    "weights on disk": TrainingSettings(offload_weights=True, offload_states=True, bits=8, precision="bf16"),
    "weights of one block in memory": TrainingSettings(offload_weights=True, offload_states=True, resident=1),
    "weights of checkpoints on disk": TrainingSettings(
        offload_weights=True, offload_states=True, bits=8, checkpoint="block"
    ),
    "stochastic rounding": TrainingSettings(precision="bf16", bits=8, master="stochastic"),
}


def left(step) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The tensors that only the collector would let go of after two steps."""
    step()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        step()
        step()
        gc.collect()
        return [(tuple(one.shape), one.dtype) for one in gc.garbage if isinstance(one, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_step_leaves_no_tensor_in_a_cycle(name, tmp_path):
    run = Run(GPT(GPTConfig(vocab=64, layers=2, heads=2, dim=32, hidden=64)), TECHNIQUES[name], None, tmp_path, {})
    assert left(lambda: run.step(ROWS)) == []


@pytest.mark.parametrize("name", ["attention", "fused_loss"])
def test_a_step_of_a_model_of_transformers_leaves_none(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    settings = replace(TrainingSettings(checkpoint="block", activation_codes=True), **{name: True})
    run = Run(transformers.LlamaForCausalLM(config), settings, None, tmp_path, {})
    assert left(lambda: run.step({"input_ids": ROWS, "labels": ROWS})) == []


def test_every_technique_is_here():
    """Those of one process; ``facts`` are properties of the model, and micro-batches are in several rows."""
    changed = {
        field.name for field in fields(TrainingSettings) for one in TECHNIQUES.values()
        if getattr(one, field.name) != getattr(TrainingSettings(), field.name)
    }  # fmt: skip
    facts = {"bf16_params", "frozen", "loaded", "loss_outside"}
    assert changed | facts | {"attention", "fused_loss", "gpus", "strategy", "group_size"} == {
        field.name for field in fields(TrainingSettings)
    }


def test_a_cycle_is_found():
    def step():
        held = [torch.zeros(3)]
        held.append(held)

    assert left(step) == 2 * [((3,), torch.float32)]
