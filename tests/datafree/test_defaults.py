"""What quantize_ does where it is told nothing else: rules by scheme, and the layers that keep their precision."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.datafree import DATA_FREE, DEFAULT, default_data_free
from lowbit.models import find_input_layers
from lowbit.nn.linear import QuantLinear

transformers = pytest.importorskip("transformers")

EXPECTED = {
    "int8": "nearest", "int8-weight-only": "nearest", "int4-weight-only": "magnitude", "w4a8": "magnitude",
    "nf4": "nearest",
    "int4-weight-only:group32": "magnitude", "uint4-weight-only": "nearest", "mxfp4": "mse", "mxfp4-weight-only": "mse",
    "nvfp4": "mse", "nvfp4-weight-only": "mse", "mxfp6": "nearest", "mxfp8": "nearest", "fp8": "nearest",
    "int2-weight-only:group32": "magnitude", "q4_0": "magnitude", "q5_0": "magnitude", "q8_0": "nearest",
}  # fmt: skip
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize("recipe", EXPECTED)
def test_one_default_in_memory_calibrated_and_by_name(recipe):
    rule = EXPECTED[recipe]
    plain = nn.Sequential(nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 24))
    silent, named, calibrated = (copy.deepcopy(plain) for _ in range(3))
    assert default_data_free(lb.recipe(recipe).weight) is DATA_FREE[rule]
    lb.quantize_(silent, recipe)
    lb.quantize_(named, recipe, method=rule)
    found = lb.calibrate(plain, recipe, None)
    lb.quantize_(calibrated, recipe, found)
    assert {row.method for row in found.rows.values()} == {rule}
    for model in (named, calibrated):
        for name, part in silent.state_dict().items():
            assert torch.equal(model.state_dict()[name], part), name


def test_the_readme_says_the_default_as_the_rules_do():
    words = re.findall(r"[a-z]+", DEFAULT)
    assert set(EXPECTED.values()) <= set(words)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert DEFAULT in readme.replace("`", "")


def test_the_defaults_lose_less_than_nearest():
    weight = torch.randn(64, 256)
    for recipe in ("int4-weight-only:group32", "mxfp4-weight-only", "nvfp4-weight-only"):
        errors = []
        for method in (None, "nearest"):
            model = nn.Sequential(nn.Linear(256, 64, bias=False))
            model[0].weight.data.copy_(weight)
            report = lb.quantize_(model, recipe, method=method)
            decoded = model[0].weight.dequantize()
            errors.append(float((decoded - weight).square().sum()))
            signal = float(weight.square().sum())
            measured = 10 * torch.tensor(signal / errors[-1]).log10()
            assert report.layers[0].sqnr == pytest.approx(float(measured), abs=1e-3)
        assert errors[0] < 0.97 * errors[1], recipe


@pytest.mark.parametrize("scheme", ["int4:group32", "int3:group128", "int4:row:bf16"])
def test_magnitude_finds_the_least_weighted_error_of_its_candidates(scheme):
    """In float64, block by block: no scale that is tried, and no refit of the codes that it gives, loses less."""
    weight = torch.randn(6, 256) * torch.rand(6, 1)
    found = DATA_FREE["magnitude"].solve(weight, lb.scheme(scheme))
    width = 256 if "row" in scheme else int(scheme.partition("group")[2])
    format, blocks = lb.scheme(scheme).format, weight.double().view(6, -1, width)
    extreme = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))

    def error(scale):
        codes = (blocks / scale).round().clamp(format.qmin, format.qmax)
        return (blocks.abs() * (codes * scale - blocks).square()).sum(2)

    least = error(blocks.abs().amax(2, keepdim=True) / format.qmax)
    for beyond in range(-4, 41, 4):
        least = torch.minimum(least, error(extreme / (format.qmin - 0.1 * beyond)))
    decoded = found.dequantize(torch.float32).double().view(6, -1, width)
    lost = (blocks.abs() * (decoded - blocks).square()).sum(2)
    slack = 1.02 if "bf16" in scheme else 1 + 1e-5  # bf16 rounds scales
    assert bool((lost <= slack * least).all()) and bool((lost < 0.999 * least).any()), "refits find more"


def test_methods_that_quantize_cannot_take():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    found = lb.calibrate(model, "int4-weight-only", None)
    for arguments, error, match in (
        ({"method": "gptq"}, ValueError, r"quantize_ needs a data-free method, one of nearest, .*lowbit.calibrate"),
        ({"method": "neerest"}, ValueError, "did you mean nearest"),
        ({"method": 3}, TypeError, "method must be a name"),
        ({"calibration": found, "method": "mse"}, ValueError, "give one of the two"),
    ):
        with pytest.raises(error, match=match):
            lb.quantize_(model, "int4-weight-only", **arguments)
    with pytest.raises(ValueError, match="method 'signed' does not support this weight"):
        lb.quantize_(model, "nf4", method="signed")
    assert type(model[0]) is nn.Linear


# -- layers that read raw input ---------------------------------------------------------------------------------------
class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(self.stem(x).relu()).mean((2, 3)))


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)))

    def forward(self, x):
        return self.blocks(self.embed(x))


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def clip() -> nn.Module:
    vision = {**SMALL, "image_size": 16, "patch_size": 8}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=SMALL, vision_config=vision))


MODELS = {
    "images": (Images, ["stem"]),
    "patches": (Patches, ["embed"]),
    "whisper": (whisper, ["model.encoder.conv1"]),
    "clip": (clip, ["vision_model.embeddings.patch_embedding"]),
    "llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, vocab_size=64)), []),
    "bert": (lambda: transformers.BertModel(transformers.BertConfig(**SMALL, vocab_size=64)), []),
    "layers": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), []),
    "blocks": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2), []),
    "alone": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), []),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_reads_raw_input(name):
    make, expected = MODELS[name]
    model = make()
    names = {id(module): name for name, module in model.named_modules()}
    assert list(dict.fromkeys(names[id(layer)] for layer in find_input_layers(model))) == expected


@pytest.mark.parametrize("name", ["images", "patches", "whisper", "clip"])
@pytest.mark.parametrize("recipe", ["int4-weight-only:group16", "nf4:group16", "mxfp6"])
def test_they_stay_below_eight_bits_and_the_report_says_so(name, recipe):
    make, (stem,) = MODELS[name]
    model = make()
    report = lb.quantize_(model, recipe)
    assert "reads raw input" in report.left[stem] and "skip=()" in report.left[stem]
    assert (
        not isinstance(model.get_submodule(stem), QuantLinear) and model.get_submodule(stem).weight.is_floating_point()
    )
    assert [other for other, reason in report.left.items() if "raw input" in reason] == [stem]
    for convert in (lb.qat.prepare_, lambda model, recipe: lb.calibrate(model, recipe, None)):
        other = make()
        result = convert(other, recipe)
        rows = result.rows if isinstance(result, lb.Calibration) else result.converted
        assert rows and stem not in rows


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("int8", {}),
        ("int4-weight-only:group16", {"skip": ()}),
        ({"*": "int4-weight-only:group16", "stem": "nf4:group16"}, {}),
        ({"*": "nf4:group16", "stem": "int8"}, {}),
    ],
)
def test_they_are_converted_at_eight_bits_and_where_they_are_named(recipe, options):
    report = lb.quantize_(Images(), recipe, **options)
    assert report.converted == ("stem", "body", "head")
