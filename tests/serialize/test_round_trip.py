"""save_model and load_model: the same bits back, errors before anything is touched, and no way to lose a model."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.bits import same_bits
from support.layers import DYNAMIC
from support.models import same_state
from torch import nn

import lowbit as lb
from lowbit import files
from lowbit.convert import prepack
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.nn import QuantConv2d, QuantLinear, QuantMultiheadAttention
from lowbit.serialize import safetensors

TINY = GPTConfig(vocab=32, context=8, layers=2, heads=2, dim=36, hidden=50)
TOKENS = torch.arange(12).reshape(2, 6)


def gpt(recipe: str | None = None, seed: int = 1, config: GPTConfig = TINY) -> GPT:
    model = GPT(config, seed=seed)
    if recipe:
        lb.quantize_(model, recipe)
    return model


def weights_of(directory: Path) -> Path:
    (path,) = directory.glob("weights-*.safetensors")
    return path


@pytest.mark.parametrize("recipe", [None, *DYNAMIC, "int4-weight-only:group32"])
def test_round_trip(tmp_path, recipe):
    model = gpt(recipe).bfloat16()
    lb.save_model(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lowbit.json", weights_of(tmp_path).name]
    expected = model(TOKENS)
    alone = lb.load_model(tmp_path)
    assert type(alone) is GPT and alone.config == TINY
    plain, quantized, meta = gpt(seed=2).bfloat16(), gpt(recipe, seed=2).bfloat16(), gpt(seed=2).bfloat16().to("meta")
    for other in (alone, *(lb.load_model(tmp_path, m) for m in (plain, quantized, meta))):
        assert same_state(other, model)
        assert same_bits(other(TOKENS), expected)
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        assert other.blocks[0].mlp.down.weight.dtype == torch.bfloat16


def test_other_layers_and_mixed_recipes(tmp_path):
    def build():
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        return nn.ModuleDict({"conv": nn.Conv2d(3, 16, 2, stride=2), "body": nn.TransformerEncoder(layer, 1)}).eval()

    def run(model):
        with torch.no_grad():
            return model["body"](
                model["conv"](torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8)).flatten(2).transpose(1, 2)
            )

    model = build()
    lb.quantize_(model, "int8", skip=("body",))
    lb.quantize_(model, lb.Recipe(lb.Gemm(None, "uint4:group8:affine:bf16"), name="mine"), skip=("conv",))
    lb.save_model(model, tmp_path)
    other = lb.load_model(tmp_path, build())
    kinds = [type(m) for m in other.modules()]
    assert QuantConv2d in kinds and QuantMultiheadAttention in kinds and kinds.count(QuantLinear) == 7
    assert same_state(other, model) and same_bits(run(other), run(model))
    assert other["body"].layers[0].linear1.recipe.name == "mine"


def test_tied_tensors_are_saved_once_and_stay_tied(tmp_path):
    def build():
        model = nn.Sequential(nn.Embedding(9, 9), nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9, bias=False))
        model[2].weight = model[1].weight
        return model

    model = build()
    model[3].weight = model[0].weight
    lb.quantize_(model, "int8", skip=("3",))
    lb.save_model(model, tmp_path)
    config = json.loads((tmp_path / "lowbit.json").read_text())
    assert config["tied"] == {"2.codes": "1.codes", "2.scale": "1.scale", "3.weight": "0.weight"}
    other = lb.load_model(tmp_path, build())
    assert other[1].codes is other[2].codes and same_state(other, model)

    untied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    lb.save_model(untied, tmp_path / "untied")
    tied = copy.deepcopy(untied)
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"the model shares one tensor where the file has two: 0.weight and 1.weight"):
        lb.load_model(tmp_path / "untied", tied)


def test_tied_packed_layers_are_saved_once_and_load_as_plain_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(prepack, "no_gain_by_packing", lambda weight, input, cols: None)

    def build():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
        model[2].weight = model[1].weight
        return model

    model = build()
    lb.quantize_(model, "int8", skip=())
    plain = copy.deepcopy(model)
    lb.prepack_(model)
    assert model[1].packed is model[2].packed
    lb.save_model(model, tmp_path)
    config = json.loads((tmp_path / "lowbit.json").read_text())
    assert config["tied"] == {"2.codes": "1.codes", "2.scale": "1.scale"}
    other = lb.load_model(tmp_path, build())
    assert other[1].codes is other[2].codes and same_state(other, plain)
    packed = lb.load_model(tmp_path, build(), prepack=True)
    assert packed[1].packed is packed[2].packed and same_state(packed, plain)


def test_meta_models_keep_their_ties_and_dtypes(tmp_path):
    def build():
        model = nn.ModuleDict({"embed": nn.Embedding(9, 9), "a": nn.Linear(9, 9), "b": nn.Linear(9, 9)})
        model["lm_head"] = nn.Linear(9, 9, bias=False)
        model["lm_head"].weight, model["b"].weight = model["embed"].weight, model["a"].weight
        return model

    model = build()
    model["a"].bias.requires_grad_(False)
    lb.quantize_(model, "int8")
    lb.save_model(model, tmp_path)
    with torch.device("meta"):
        born = build().bfloat16()
    for start in (born, build().bfloat16().to("meta"), copy.deepcopy(model).bfloat16().to("meta")):
        other = lb.load_model(tmp_path, start)
        assert other["lm_head"].weight is other["embed"].weight and other["a"].codes is other["b"].codes
        assert {p.dtype for p in other.parameters() if p.is_floating_point()} == {torch.bfloat16}
        assert other["a"].weight.dtype == torch.bfloat16 and not any(p.is_meta for p in other.parameters())
        assert same_state(other, copy.deepcopy(model).bfloat16())

    half = build()
    half["a"], half["b"] = half["a"].to("meta"), half["b"].to("meta")
    kept = half["embed"].weight
    lb.load_model(tmp_path, half)
    assert half["embed"].weight is kept and same_bits(kept, model["embed"].weight)


def test_a_recipe_of_ones_own_can_be_loaded_into_its_model(tmp_path):
    named = lb.recipe("fp8")
    mine = replace(named, name="mine", about="about it")
    model = gpt()
    lb.quantize_(model, mine)
    lb.save_model(model, tmp_path)
    other = gpt(seed=2)
    lb.quantize_(other, mine)
    assert same_state(lb.load_model(tmp_path, other), model)
    lb.quantize_(third := gpt(), lb.Recipe(lb.Gemm(None, named.weight), name="mine"))
    with pytest.raises(ValueError, match="is quantized with recipe mine"):
        lb.load_model(tmp_path, third)


@pytest.mark.parametrize("recipe", ["fp8", {"name": "mine", "weight": "int4:group32", "input": "int8:row"}])
def test_a_description_that_is_no_recipe_is_refused(tmp_path, recipe):
    lb.save_model(gpt("fp8"), tmp_path)
    path = tmp_path / "lowbit.json"
    config = json.loads(path.read_text())
    for layer in config["layers"].values():
        layer["recipe"] = recipe
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"lowbit.json: layer .*: Recipe: expected (a dict|the keys name, output)"):
        lb.load_model(tmp_path)


def test_views_of_one_storage_and_strided_tensors(tmp_path):
    model = nn.Module()
    base = torch.randn(6, 4)
    model.register_buffer("whole", base)
    model.register_buffer("part", base[2:])
    model.register_buffer("turned", base.t())
    lb.save_model(model, tmp_path)
    other = nn.Module()
    for name, shape in (("whole", (6, 4)), ("part", (4, 4)), ("turned", (4, 6))):
        other.register_buffer(name, torch.zeros(shape))
    assert same_state(lb.load_model(tmp_path, other), model)


def test_a_prepared_model_saves_its_masters(tmp_path):
    model = gpt()
    lb.train.prepare_(model, "fp8")
    lb.save_model(model, tmp_path)
    assert same_state(lb.load_model(tmp_path), gpt())


# -- what does not fit -----------------------------------------------------------------------------------------------
@pytest.fixture
def saved(tmp_path) -> Path:
    lb.save_model(gpt("int8"), tmp_path / "model")
    return tmp_path / "model"


#: The recipe int8, as files describe it.
INT8 = lb.recipe("int8").to_dict()


def edit(directory: Path, **changes) -> None:
    """Change the config."""
    path = directory / "lowbit.json"
    files.write_json(path, {**files.read_json(path), **changes})


def without(directory: Path, key: str) -> None:
    """Take an entry out of the config."""
    path = directory / "lowbit.json"
    files.write_json(path, {name: value for name, value in files.read_json(path).items() if name != key})


def altered(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda d: weights_of(d).unlink(), FileNotFoundError, "does not exist; copy the whole directory"),
        (lambda d: os.truncate(weights_of(d), 1000), ValueError, "truncated or altered: 1000 bytes instead of"),
        (lambda d: os.truncate(weights_of(d), 0), ValueError, "truncated or altered"),
        (lambda d: altered(weights_of(d), -1), ValueError, "is altered: its SHA-256"),
        (lambda d: altered(weights_of(d), 0), ValueError, "is altered: its SHA-256"),
        (lambda d: altered(d / "lowbit.json", 0), ValueError, "lowbit.json is damaged: it is not JSON"),
        (lambda d: without(d, "format"), ValueError, "not written by lowbit"),
        (lambda d: without(d, "version"), ValueError, "format version None"),
        *[(lambda d, key=key: without(d, key), ValueError, f"lowbit.json is damaged: KeyError '{key}'")
          for key in ("layers", "weights", "tied", "model")],
        *[(lambda d, key=key: edit(d, **{key: 7}), ValueError, "lowbit.json is damaged: (Type|Attribute)Error")
          for key in ("layers", "weights", "tied", "model")],
        (lambda d: (d / "lowbit.json").unlink(), FileNotFoundError, "is not a directory that save_model wrote"),
        (lambda d: os.truncate(d / "lowbit.json", 200), ValueError, "lowbit.json is damaged"),
        (lambda d: (d / "lowbit.json").write_bytes(b"\xff\xfe"), ValueError, "lowbit.json is damaged"),
        (lambda d: (d / "lowbit.json").write_text("[]"), ValueError, "expected a JSON object, got a list"),
        (lambda d: edit(d, format="gguf"), ValueError, "not written by lowbit"),
        (lambda d: edit(d, version=2), ValueError, "format version 2 .* reads version 1"),
        (lambda d: edit(d, layers={"blocks.0.mlp.down": {"recipe": "int7", "dtype": "float32"}}), ValueError,
         "'blocks.0.mlp.down': Recipe: expected a dict, got 'int7'"),
        (lambda d: edit(d, layers={"blocks.0.mlp.down": {"recipe": INT8, "dtype": "float7"}}), ValueError, "float7"),
        (lambda d: edit(d, layers={"blocks.0.mlp.down": {"recipe": INT8, "dtype": "int8"}}), ValueError,
         "has a weight of dtype 'int8'; expected one of float32, bfloat16, float16"),
        (lambda d: edit(d, layers={"blocks.0.mlp.down": {"recipe": INT8, "dtype": "bool"}}), ValueError, "'bool'"),
        (lambda d: edit(d, layers={"x": {}}), ValueError, "is damaged"),
        (lambda d: edit(d, layers={"nowhere": {"recipe": INT8, "dtype": "float32"}}), ValueError,
         "does not fit this model: the model has no module 'nowhere'"),
        (lambda d: edit(d, layers={"norm": {"recipe": INT8, "dtype": "float32"}}), ValueError, "'norm' is a RMSNorm"),
        (lambda d: edit(d, tied={"a": "b"}), ValueError, "'a' is tied to 'b'"),
        (lambda d: edit(d, weights={"file": "../x", "sha256": "", "bytes": 0}), ValueError, "not a name that save"),
        (lambda d: edit(d, weights={"file": "w" * 300, "sha256": "", "bytes": 0}), ValueError, "not a name that save"),
        (lambda d: edit(d, weights={}), ValueError, "is damaged"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused_and_the_model_is_left_alone(saved, spoil, error, message):
    spoil(saved)
    model = gpt(seed=5)
    before = copy.deepcopy(model)
    with pytest.raises(error, match=message):
        lb.load_model(saved, model)
    assert same_state(model, before) and [type(m) for m in model.modules()] == [type(m) for m in before.modules()]


@pytest.mark.parametrize(
    ("build", "messages"),
    [
        (lambda: gpt(config=GPTConfig(vocab=32, context=8, layers=3, heads=2, dim=36, hidden=50)),
         ["the file lacks blocks.2.attention.out.weight, .*blocks.2.norm2.weight"]),
        (lambda: gpt(config=GPTConfig(vocab=32, context=8, layers=1, heads=2, dim=36, hidden=50)),
         ["the model has no module 'blocks.1.attention.qkv'"]),
        (lambda: gpt(config=GPTConfig(vocab=33, context=8, layers=2, heads=2, dim=36, hidden=40)),
         [r"shapes differ: blocks.0.mlp.down.codes \(file \[36, 50\], model \[36, 40\]\)", "lm_head.weight"]),
        (lambda: gpt("nf4"), ["'blocks.0.attention.qkv' of the model is quantized with recipe nf4, .* with int8"]),
        (lambda: nn.Linear(4, 4), ["the model has no module"]),
    ],
)  # fmt: skip
def test_another_model_is_refused_and_left_alone(saved, build, messages):
    model = build()
    before = copy.deepcopy(model)
    with pytest.raises(ValueError) as caught:
        lb.load_model(saved, model)
    for message in messages:
        caught.match(message)
    assert same_state(model, before) and [type(m) for m in model.modules()] == [type(m) for m in before.modules()]


def test_a_quantized_model_is_no_place_for_a_plain_one(tmp_path):
    lb.save_model(gpt(), tmp_path)
    with pytest.raises(ValueError, match="it is not quantized; pass an unquantized model"):
        lb.load_model(tmp_path, gpt("int8"))


def test_models_that_lowbit_cannot_build(tmp_path):
    lb.save_model(nn.Sequential(nn.Linear(3, 3)), tmp_path)
    with pytest.raises(ValueError, match=r"does not say how to build its model .*load_model\(directory, model\)"):
        lb.load_model(tmp_path)
    lb.save_model(gpt(), tmp_path)
    edit(tmp_path, model={"class": "lowbit.demo.gpt.GPT", "config": {"depth": 3}})
    with pytest.raises(ValueError, match=r"cannot build 'lowbit.demo.gpt.GPT'"):
        lb.load_model(tmp_path)


def test_only_the_weights_that_the_config_before_named_are_removed(tmp_path):
    others = ["weights-0123456789abcdef.safetensors", "weights-of-another.safetensors", ".lowbit.json.1.tmp", "a.json"]
    for name in others:
        (tmp_path / name).write_bytes(b"precious")
    lb.save_model(gpt(), tmp_path)
    first = json.loads((tmp_path / "lowbit.json").read_text())["weights"]["file"]
    lb.save_model(gpt("int8"), tmp_path)
    second = json.loads((tmp_path / "lowbit.json").read_text())["weights"]["file"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*others, "lowbit.json", second]) and first != second
    (tmp_path.parent / "outside").write_bytes(b"")
    edit(tmp_path, weights={"file": "../outside"})
    lb.save_model(gpt(), tmp_path)
    assert (tmp_path.parent / "outside").exists()


@pytest.mark.parametrize("nested", [False, True])
def test_a_compiled_model_is_saved_as_the_one_that_was_compiled(tmp_path, nested):
    model = gpt("int8")
    compiled = copy.deepcopy(model)
    if nested:
        compiled.blocks[0] = torch.compile(compiled.blocks[0])
    else:
        compiled = torch.compile(compiled)
    lb.save_model(compiled, tmp_path)
    assert same_state(lb.load_model(tmp_path), model)
    other = torch.compile(gpt(seed=2))
    assert lb.load_model(tmp_path, other) is other and same_state(other._orig_mod, model)
    if nested:
        with pytest.raises(ValueError, match=r"compiled \(blocks.0._orig_mod\); load first, then compile"):
            lb.load_model(tmp_path, compiled)


def test_what_cannot_be_saved(tmp_path):
    (tmp_path / "lowbit.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ValueError, match=r"lowbit.json was not written by lowbit.save_model; .*save to, another"):
        lb.save_model(gpt(), tmp_path)
    with pytest.raises(TypeError, match="'weight' is on the meta device"):
        lb.save_model(nn.Linear(2, 2, device="meta"), tmp_path / "a")

    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(TypeError, match="'_extra_state' is a dict, not a plain tensor"):
        lb.save_model(Extra(2, 2), tmp_path / "b")


# -- interrupted saves -----------------------------------------------------------------------------------------------
class Stopped(BaseException):
    pass


@pytest.mark.parametrize("step", range(20))
def test_a_save_that_fails_anywhere_leaves_one_whole_model(tmp_path, monkeypatch, step):
    """Every file operation of a second save fails in turn: the directory holds the first model, or the second."""
    old, new = gpt("int8"), gpt("nf4", seed=3)
    lb.save_model(old, tmp_path)
    done = 0

    def failing(function):
        def run(*args, **kwargs):
            nonlocal done
            done += 1
            if done == step + 1:
                raise Stopped
            return function(*args, **kwargs)

        return run

    with monkeypatch.context() as patch:
        for owner, name in (
            (os, "fsync"),
            (os, "replace"),
            (os, "open"),
            (safetensors, "write"),
            (Path, "unlink"),
        ):
            patch.setattr(owner, name, failing(getattr(owner, name)))
        try:
            lb.save_model(new, tmp_path)
        except Stopped:
            pass
    loaded = lb.load_model(tmp_path)
    assert same_state(loaded, old) or same_state(loaded, new)
    if done <= step:  # nothing failed: the steps before this one were all there are
        assert step >= 8 and same_state(loaded, new)
    assert not list(tmp_path.glob(".*")) or step >= 6, "a save that failed leaves no temporary file"
    lb.save_model(new, tmp_path)
    assert same_state(lb.load_model(tmp_path), new)


KILLED = """
import os, signal, sys, torch
from pathlib import Path
import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig

torch.set_num_threads(1)
config = GPTConfig(vocab=32, context=8, layers=1, heads=2, dim=36, hidden=50)
old, new = GPT(config, seed=1), GPT(config, seed=2)
lb.quantize_(old, "int8"), lb.quantize_(new, "nf4")
directory = Path(sys.argv[1])


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def audit(event, args):
    # Every file that is opened, renamed or removed; the weights are written by native code, which ends in a rename.
    global left
    if event in ("open", "os.rename", "os.remove", "os.mkdir") and str(directory) in repr(args):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


outcomes = []
for point in range(1, 40):
    lb.save_model(old, directory)
    child = os.fork()
    if child == 0:
        left = point
        sys.addaudithook(audit)
        lb.save_model(new, directory)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    loaded = lb.load_model(directory)
    assert same(loaded, old) or same(loaded, new), point
    outcomes.append("new" if same(loaded, new) else "old")
    if not os.WIFSIGNALED(status):
        break
assert "old" in outcomes and outcomes == sorted(outcomes, reverse=True), outcomes
assert outcomes[-1] == "new" and len(outcomes) > 6, outcomes
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_save_leaves_one_whole_model(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_files_keep_the_usual_permissions(tmp_path):
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    files.write_atomically(tmp_path / "made", lambda out: out.write(b"x"))
    assert (tmp_path / "made").stat().st_mode == plain.stat().st_mode
