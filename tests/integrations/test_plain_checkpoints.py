"""Checkpoints for programs that do not know lowbit: they look like those of a model that lowbit never changed."""

import copy
import json

import pytest
import torch

import lowbit as lb

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


def _quantized(model):
    lb.quantize_(model, "int4-weight-only:group32")
    lb.dequantize_(model)


def _trained(model):
    lb.train.prepare_(model, "fp8")
    optimizer = lb.optim.AdamW8bit(model.parameters(), lr=1e-3, master="residual")
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def _tuned(model):
    lb.qat.prepare_(model, "int8-weight-only")
    lb.qat.convert_(model)
    lb.dequantize_(model)


@pytest.mark.parametrize("change_", [_quantized, _trained, _tuned])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_are_those_of_a_plain_model(tmp_path, change_, dtype):
    shape = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    plain = transformers.LlamaForCausalLM(shape).to(dtype)
    changed = copy.deepcopy(plain)
    change_(changed)
    files = {}
    for name, model in (("plain", plain), ("changed", changed)):
        model.save_pretrained(tmp_path / name)
        tensors = safetensors.load_file(tmp_path / name / "model.safetensors")
        files[name] = {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()}
    assert files["plain"] == files["changed"]
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in files]
    assert configs[0] == configs[1]
