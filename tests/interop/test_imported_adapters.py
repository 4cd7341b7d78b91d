"""Adapters of peft on models of other programs: they train, and an evaluation in between changes no bit."""

import copy

import pytest
import torch
import transformers
from torch import nn

import lowbit as lb
from tests.support.producers import DIRECTORIES, llama, made

peft = pytest.importorskip("peft")

IDS = torch.arange(3, 35).view(2, 16)


def of_compressed_tensors(recipe, directory):
    model = llama(torch.bfloat16)
    lb.quantize_(model, recipe, method="nearest")
    lb.export(model, "compressed-tensors", directory)
    return lb.load_model(directory)


def of_gguf(recipe, path):
    pytest.importorskip("gguf")
    model = llama(torch.bfloat16)
    lb.quantize_(model, recipe, method="nearest")
    lb.export(model, "gguf", path)
    return lb.load_model(path)


def of_bitsandbytes(recipe, path):
    bnb = pytest.importorskip("bitsandbytes")
    model = llama(torch.float32)
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                layer = bnb.nn.Linear4bit(child.in_features, child.out_features, bias=False, quant_type=recipe)
                layer.load_state_dict(child.state_dict())
                setattr(module, name, layer.to("cpu"))
    lb.interop.adopt_(model)
    return model


def of_producer(recipe, directory):
    made(recipe, directory)
    return lb.load_model(directory)


_COMPRESSED = (
    "int4-weight-only:group32", "uint4-weight-only:group32", "nvfp4-weight-only", "mxfp4-weight-only", "fp8", "int8",
    "mxfp8",
)  # fmt: skip

#: Models of other programs, by name.
SOURCES = {
    **{f"compressed-tensors {name}": (of_compressed_tensors, name) for name in _COMPRESSED},
    **{f"gguf {name}": (of_gguf, name) for name in ("q4_0", "q8_0", "mxfp4-weight-only", "nvfp4-weight-only")},
    **{name: (of_producer, name) for name in DIRECTORIES},
    "bitsandbytes nf4": (of_bitsandbytes, "nf4"),
}


def trained(model, evaluates):
    """The adapters after three steps, and the logits, with an evaluation after each step or without."""
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "down_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, r=4, lora_dropout=0.1))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], 1e-2)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        loss = adapted.train()(IDS, labels=IDS).loss
        loss.backward()
        grads = {name: p.grad for name, p in adapted.named_parameters() if p.grad is not None}
        assert grads and all("lora_" in name for name in grads)
        assert all(grad.any() for name, grad in grads.items() if "lora_B" in name)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if evaluates:
            with torch.no_grad():
                adapted.eval()(IDS)
    assert losses[-1] < losses[0]
    return {name: p.detach() for name, p in adapted.named_parameters() if "lora_" in name}, adapted.eval()(IDS).logits


@pytest.mark.thinned(4)
@pytest.mark.parametrize("source", SOURCES)
def test_evaluation_between_steps_changes_no_bit(source, tmp_path):
    make, recipe = SOURCES[source]
    model = make(recipe, tmp_path / "model.gguf" if source.startswith("gguf") else tmp_path / "in").float()
    assert isinstance(model, transformers.PreTrainedModel)
    assert any(type(module).__name__ == "QuantLinear" for module in model.modules())
    (adapters, logits), (others, other) = (trained(copy.deepcopy(model), evaluates) for evaluates in (False, True))
    assert all(torch.equal(adapters[name], others[name]) for name in adapters)
    assert torch.equal(logits, other)
