"""What ``import lowbit`` and its layers change in other libraries: nothing but what these tests list."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

import lowbit as lb

transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")

PROGRAM = Path(__file__).parents[1] / "support" / "foreign.py"
LLAMA = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
ROWS = [
    "transformers.masking_utils.AttentionMaskInterface._global_mapping['lowbit']",
    "transformers.modeling_utils.AttentionInterface._global_mapping['lowbit']",
    "transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING['lowbit']",
]
WITH_LAYERS = [
    "peft.tuners.tuners_utils.BaseTuner.__init__",
    "peft.tuners.tuners_utils.BaseTuner.inject_adapter",
    "transformers.trainer.DEFAULT_CALLBACKS[1]",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "order, kind, switch",
    [("after", "trained", "1"), ("before", "unpickled", "1"), ("after", "quantized", "0")],
)
def test_what_changes_in_other_libraries(tmp_path, order, kind, switch):
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    lb.quantize_(model, "int8", skip=())
    torch.save(model, tmp_path / "layer.pt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LOWBIT_INTEGRATIONS": switch}
    done = subprocess.run(
        [sys.executable, PROGRAM, order, kind, tmp_path / "layer.pt"],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    imported, with_layers = map(json.loads, done.stdout.splitlines())
    assert (imported, with_layers) == ((ROWS, WITH_LAYERS) if switch == "1" else ([], []))


def quantized():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()
    lb.quantize_(model, "int8")
    return model


def moved(model, tmp_path, way):
    if way == "saved":
        model.save_pretrained(tmp_path)
        return transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    return {"itself": lambda m: m, "copied": copy.deepcopy, "pickled": lambda m: pickle.loads(pickle.dumps(m))}[way](
        model
    )


@pytest.mark.parametrize("way", ["itself", "copied", "pickled", "saved"])
def test_a_quantized_model_casts_itself_and_no_other(tmp_path, way):
    first = quantized()
    model = moved(first, tmp_path, way)
    codes = model.model.layers[0].mlp.up_proj.codes.clone()
    assert model.half() is model and {p.dtype for p in model.parameters() if p.is_floating_point()} == {torch.float16}
    assert torch.equal(model.model.layers[0].mlp.up_proj.codes, codes)
    assert first is model or first.lm_head.weight.dtype == torch.float32
    assert model.float() is model and model.lm_head.weight.dtype == torch.float32

    lb.dequantize_(model)
    assert model.half().model.layers[0].mlp.up_proj.weight.dtype == torch.float16


def test_a_chain_of_calls_casts_a_model_that_nothing_else_holds(tmp_path):
    quantized().save_pretrained(tmp_path / "theirs")
    half = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "theirs").half()
    assert half.lm_head.weight.dtype == torch.float16 and half.float() is half
    lb.save_model(quantized(), tmp_path / "own")
    assert lb.load_model(tmp_path / "own").half().lm_head.weight.dtype == torch.float16


def test_another_quantizer_goes_on_to_refuse_casts():
    model = quantized()
    model.hf_quantizer = object()
    with pytest.raises(ValueError, match="not supported for quantized model"):
        model.half()


def test_a_model_that_casts_itself_is_freed_at_once():
    model = quantized()
    gc.collect()
    gc.disable()
    try:
        alive = weakref.ref(model.lm_head.weight)
        del model
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_without_integrations_named_calls_still_work(tmp_path):
    script = f"""
import torch, transformers, peft, lowbit as lb
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{LLAMA!r}))
lb.quantize_(model, "int8")
model.save_pretrained({str(tmp_path)!r})
try:
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
except ValueError as error:
    print("QuantLinear" in str(error))
from lowbit.integrations.peft import get_peft_model
print(type(get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))).__name__)
import lowbit.integrations.transformers
print(type(transformers.LlamaForCausalLM.from_pretrained({str(tmp_path)!r}).model.layers[0].mlp.up_proj).__name__)
print(len(lb.memory.attention_(transformers.LlamaForCausalLM(transformers.LlamaConfig(**{LLAMA!r}))).layers))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LOWBIT_INTEGRATIONS": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == ["True", "PeftModel", "QuantLinear", "1"], done.stderr
