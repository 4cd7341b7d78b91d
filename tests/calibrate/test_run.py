"""calibrate: which layers it sees with which inputs, what comes out and is saved, and what it refuses."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.processes import run_processes
from torch import Tensor, nn

import lowbit as lb
from lowbit.calibrate import METHODS
from lowbit.calibrate.methods import signround
from lowbit.calibrate.resume import Finished
from lowbit.calibrate.statistics import Statistics
from lowbit.models.blocks import Chain
from lowbit.models.wrap import wrappers
from lowbit.recipes import layer_recipes

ROOT = os.path.dirname(os.path.dirname(lb.__file__))


class Block(nn.Module):
    """A residual block that is also given a mask, answers a tuple, and keeps its dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.5)
        self.up, self.gate, self.down = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)  # fmt: skip  # noqa: E501

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> tuple[Tensor, str]:
        x = self.norm(hidden)
        y = self.down(torch.sigmoid(self.gate(x)) * self.up(x))
        return hidden + self.drop(y if mask is None else y * mask), "more"


class Stack(nn.Module):
    """Embedding, blocks, a linear between, and an output layer."""

    def __init__(self, blocks: int = 3, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = nn.Linear(width, 20)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x, _ = block(x, mask=mask)
        return self.out(x)


def tokens(number: int = 4, length: int = 24) -> list[Tensor]:
    return [torch.randint(20, (2, length + i)) for i in range(number)]  # batches of different lengths


def same_state(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_the_inputs_of_a_block_are_those_that_quantized_blocks_before_it_give():
    """The oracle: the whole model run with hooks, after the blocks before were quantized by hand."""
    model, batches = Stack(), tokens()
    calibration = lb.calibrate(model, "int4-weight-only:group32", batches, "gptq", skip=())
    reference = copy.deepcopy(model).eval()
    called = (("gate", "up"), ("down",))  # in this order, those together that are given the same
    stages = [[f"blocks.{i}.{n}" for n in names] for i in range(3) for names in called] + [["out"]]
    for names in stages:
        layers = {name: reference.get_submodule(name) for name in names}
        found = {name: Statistics(layer.in_features, "gram") for name, layer in layers.items()}
        hooks = [
            layer.register_forward_pre_hook(lambda m, args, counted=found[name]: counted.update(args[0]))
            for name, layer in layers.items()
        ]
        with torch.no_grad():
            for batch in batches:
                reference(batch)
        for hook in hooks:
            hook.remove()
        for name, layer in layers.items():
            expected = METHODS["gptq"].solve(layer.weight.detach(), lb.scheme("int4:group32"), found[name])
            assert torch.equal(calibration.weights[name].codes, expected.codes), name
            layer.weight.data = calibration.weights[name].dequantize(torch.float32)


def test_the_model_stays_as_it_is_and_quantize_takes_the_codes():
    model = Stack().train()
    before, hidden = copy.deepcopy(model), model.blocks[0].forward
    calibration = lb.calibrate(model, "int4-weight-only:group32", tokens())
    assert same_state(model, before)
    assert all(module.training for module in model.modules())
    assert model.blocks[0].forward == hidden
    assert not wrappers(model.blocks[0])
    report = lb.quantize_(model, "int4-weight-only:group32", calibration)
    for name, made in calibration.weights.items():
        assert torch.equal(model.get_submodule(name).weight.codes, made.codes)
    sqnr = {row.name: row.sqnr for row in report.layers}
    for name, row in calibration.rows.items():
        assert row.sqnr == pytest.approx(sqnr[name], abs=1e-3)


@pytest.mark.parametrize("form", ["positional", "tuple", "dict"])
def test_batches_are_passed_as_the_model_takes_them(form):
    model, mask = Stack(), torch.tensor(0.5)
    given = tokens()
    batches = {
        "positional": given, "tuple": [(t, mask) for t in given], "dict": [{"tokens": t, "mask": mask} for t in given]
    }[form]  # fmt: skip
    made = lb.calibrate(model, "int4-weight-only:group32", iter(batches), "gptq", skip=())
    blended = form != "positional"
    plain = lb.calibrate(model, "int4-weight-only:group32", given, "gptq", skip=())
    assert torch.equal(made.weights["blocks.0.up"].codes, plain.weights["blocks.0.up"].codes)
    assert torch.equal(made.weights["blocks.1.up"].codes, plain.weights["blocks.1.up"].codes) != blended


@pytest.mark.parametrize(
    ("recipe", "given"),
    [
        ("int8", [torch.ones(2, 24)]),
        (lb.recipe("int8"), (torch.ones(2, 24),)),
        ({"0": "int8"}, [{"input": torch.ones(2, 24)}]),
        (layer_recipes("int8"), [(torch.ones(2, 24),)]),
        ("int8", None),
    ],
    ids=["name", "recipe", "by layer", "layer_recipes", "no data"],
)
def test_the_recipe_comes_before_the_batches(recipe, given):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 4))
    calibration = lb.calibrate(model, recipe, given, "search")
    assert calibration.rows["0"].recipe == lb.recipe("int8")
    assert (calibration.rows["0"].output_sqnr is None) == (given is None)
    with pytest.raises(TypeError, match=r"before the batches, calibrate\(model, recipe, batches\)"):
        lb.calibrate(model, given, recipe, "search")


def test_one_batch_is_not_taken_for_a_recipe():
    model, one = nn.Sequential(nn.Linear(24, 4)), {"input": torch.ones(2, 24)}
    with pytest.raises(TypeError, match=r"expected several of them, got one dict; write \[batch\]"):
        lb.calibrate(model, {"*": "int8"}, one)
    with pytest.raises(TypeError, match=r"expected a recipe for .input., or None .*got Tensor"):
        lb.calibrate(model, one, "int8")


def test_padding_does_not_count():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.linear(x)

    model, x = Masked(), torch.randn(3, 40, 16)
    mask = torch.arange(40) < torch.tensor([[40], [10], [25]])
    made = lb.calibrate(model, "int4-weight-only:group16", [{"x": x, "attention_mask": mask.long()}], "gptq")
    statistics = Statistics(16, "gram")
    statistics.update(x[mask])
    expected = METHODS["gptq"].solve(model.linear.weight.detach(), lb.scheme("int4:group16"), statistics)
    assert torch.equal(made.weights["linear"].codes, expected.codes)


def test_a_model_without_blocks_is_taken_whole():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    x = torch.randn(200, 16)
    calibration = lb.calibrate(model, "int4-weight-only:group16", [x], "gptq")
    hidden = Statistics(32, "gram")
    hidden.update(model[:2](x))
    expected = METHODS["gptq"].solve(model[2].weight.detach(), lb.scheme("int4:group16"), hidden)
    assert torch.equal(calibration.weights["2"].codes, expected.codes)


class Twice(nn.Module):
    """Blocks that are called twice are no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x, _ = block(x)
        return x


@pytest.mark.thinned(4)
@pytest.mark.parametrize("recipe", ["int4-weight-only:group16", "nf4", "mxfp4", "nvfp4"])
def test_learned_rounding_comes_closer_to_the_outputs_of_blocks(recipe):
    model, batches = Stack(2).eval(), tokens(4)
    method = METHODS["signround"]._replace(tune=partial(signround.tune, iterations=30))
    before = copy.deepcopy(model)
    with torch.no_grad():
        targets = [model.blocks[0](model.embed(batch))[0] for batch in batches]

    def error(how):
        other = copy.deepcopy(model)
        made = lb.calibrate(model, recipe, batches, how, skip=())
        lb.quantize_(other, recipe, made, skip=())
        with torch.no_grad():
            found = [other.blocks[0](other.embed(batch))[0] for batch in batches]
        return sum(float((a - b).square().sum()) for a, b in zip(found, targets, strict=True)), made

    learned, made = error(method)
    assert learned < 0.9 * error("search")[0]
    assert made.rows["blocks.0.up"].method == "signround"
    assert same_state(model, before)
    assert all(parameter.grad is None for parameter in model.parameters())
    again = lb.calibrate(model, recipe, batches, method, skip=())
    assert all(torch.equal(q.codes, again.weights[name].codes) for name, q in made.weights.items())


def test_blocks_that_are_no_chain_are_taken_whole():
    model, x = Twice(), torch.randn(30, 16)
    assert not Chain(model.blocks).record(model, [x])
    calibration = lb.calibrate(model.eval(), "int4-weight-only:group16", [x], "gptq")
    inputs = Statistics(16, "gram")
    first = model.blocks[0].norm
    hook = first.register_forward_hook(lambda m, args, y: inputs.update(y))
    with torch.no_grad():
        model(x)
    hook.remove()
    weight = model.blocks[0].up.weight.detach()
    expected = METHODS["gptq"].solve(weight, lb.scheme("int4:group16"), inputs)
    assert torch.equal(calibration.weights["blocks.0.up"].codes, expected.codes)
    for method in ("ls-gptq", "signround"):
        with pytest.raises(ValueError, match=rf"{method} compares each block.*use method='gptq'"):
            lb.calibrate(model, "int4-weight-only:group16", [x], method)


def test_layers_of_every_class_are_calibrated():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.linear = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x).flatten(2).transpose(1, 2)
            return self.linear(self.attention(y, y, y, need_weights=False)[0])

    model, x = Mixed().eval(), torch.randn(4, 3, 6, 6)
    calibration = lb.calibrate(model, "int8-weight-only", [x], "gptq")
    assert set(calibration.rows) == {"conv", "attention", "attention#1", "attention#2", "attention#3", "linear"}
    plain = model(x)
    lb.quantize_(model, "int8-weight-only", calibration)
    assert float((model(x) - plain).norm() / plain.norm()) < 0.02


def test_tied_layers_are_calibrated_once_and_stay_tied():
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    model[2].weight = model[0].weight
    calibration = lb.calibrate(model, "int8-weight-only", [torch.randn(64, 16)])
    assert list(calibration.rows) == ["0"]
    lb.quantize_(model, "int8-weight-only", calibration)
    assert model[2].codes is model[0].codes


def test_a_calibration_is_saved_and_loaded_in_every_bit(tmp_path):
    model = Stack()
    for recipe in ("int4-weight-only:group32", "uint4-weight-only", "nvfp4-weight-only", "mxfp4"):
        made = lb.calibrate(model, recipe, tokens(), "search")
        made.save(tmp_path / recipe)
        again = lb.Calibration.load(tmp_path / recipe)
        assert again.rows == made.rows
        assert (again.data, again.seconds) == (made.data, made.seconds)
        for name, q in made.weights.items():
            assert all(torch.equal(a, b) for a, b in zip(q.parts.values(), again.weights[name].parts.values(), strict=True))  # fmt: skip  # noqa: E501
        one, other = copy.deepcopy(model), copy.deepcopy(model)
        lb.quantize_(one, recipe, made)
        lb.quantize_(other, recipe, again)
        assert same_state(one, other)
        told = json.loads((tmp_path / recipe / "calibration.json").read_text())
        assert told["layers"]["blocks.0.up"]["method"] == "search"


def test_damaged_and_strange_files_are_refused(tmp_path):
    lb.calibrate(Stack(1), "int8", None, "search").save(tmp_path)
    config = tmp_path / "calibration.json"
    told = json.loads(config.read_text())
    config.write_text(json.dumps({**told, "data": "edited"}))
    assert lb.Calibration.load(tmp_path).data == "edited"
    config.write_text(json.dumps(told)[:-1])
    with pytest.raises(ValueError, match="damaged: it is not JSON"):
        lb.Calibration.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        lb.Calibration.load(tmp_path / "other")
    for damage, error in (
        ({"version": 99}, "not written by this version"),
        ({"data": 7}, "is damaged .TypeError"),
        ({"layers": {"blocks.0.up": {}}}, "is damaged .KeyError"),
        ({"weights": {**told["weights"], "file": "../x"}}, "outside of its directory"),
        ({"weights": {**told["weights"], "sha256": "0" * 64}}, "sha256|checksum|damaged"),
    ):
        config.write_text(json.dumps({**told, **damage}))
        with pytest.raises(ValueError, match=error):
            lb.Calibration.load(tmp_path)


def test_another_model_recipe_or_choice_of_layers_is_named():
    model = Stack()
    made = lb.calibrate(model, "int4-weight-only:group32", tokens())
    with pytest.raises(ValueError, match=r"calibration of 'blocks.0.up' is for .*group32.* the recipe is nf4"):
        lb.quantize_(model, "nf4", made)
    other = copy.deepcopy(model)
    other.blocks[1].gate.weight.data[3, 4] += 1
    with pytest.raises(ValueError, match=r"weight 'blocks\.1\.gate' is not the one that was calibrated"):
        lb.quantize_(other, "int4-weight-only:group32", made)
    with pytest.raises(ValueError, match=r"the calibration has no 'blocks\.3\.up'.*same skip"):
        lb.quantize_(Stack(4), {"*.3.*": "int4-weight-only:group32"}, made)
    for wrong in (other, model):
        assert all(type(layer) is nn.Linear for layer in (wrong.blocks[0].up, wrong.blocks[2].down, wrong.out))


def test_recipes_by_layer_and_layers_that_are_left():
    model = Stack()
    recipe = {"*": "int4-weight-only:group32", "*.down": "int8", "out": None}
    made = lb.calibrate(model, recipe, tokens())
    assert {row.recipe.name for name, row in made.rows.items() if name.endswith("down")} == {"int8"}
    assert "out" not in made.rows
    lb.quantize_(model, recipe, made)
    assert model.blocks[0].down.recipe.name == "int8"


def test_functions_choose_layers_where_no_file_is_written(tmp_path):
    def down(module, path):
        return path.endswith("down")

    model, recipe = Stack(), {"*": "int4-weight-only:group32", "out": None}
    made = lb.calibrate(model, recipe, tokens(), skip=down)
    assert made.rows.keys() == lb.calibrate(model, recipe, tokens(), skip="down").rows.keys()
    assert lb.calibrate(model, {down: "int8"}, tokens()).rows.keys() == {f"blocks.{i}.down" for i in range(3)}
    for recipes, skip, words in ((recipe, down, "skip"), ({down: "int8"}, (), "recipes by layer")):
        with pytest.raises(ValueError, match=f"{words}: the function down cannot be written to a file"):
            lb.calibrate(model, recipes, tokens(), skip=skip, directory=tmp_path)


def test_layers_that_had_the_same_inputs_until_now_are_counted_apart():
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor, apart: bool) -> Tensor:
            return self.a(x) + self.b(x.flip(-1) if apart else x)

    model, x = Branching(), torch.randn(50, 16)
    made = lb.calibrate(model, "int4-weight-only:group16", [(x, False), (x, True)], "gptq")
    for name, inputs in (("a", (x, x)), ("b", (x, x.flip(-1)))):
        statistics = Statistics(16, "gram")
        for one in inputs:
            statistics.update(one)
        weight = model.get_submodule(name).weight.detach()
        expected = METHODS["gptq"].solve(weight, lb.scheme("int4:group16"), statistics)
        assert torch.equal(made.weights[name].codes, expected.codes)


# -- bad input --------------------------------------------------------------------------------------------------------
def test_a_layer_that_no_batch_reaches_is_chosen_without_data():
    class Aside(Stack):
        def __init__(self) -> None:
            super().__init__(2)
            self.aside = nn.Linear(48, 4)

    model = Aside()
    with pytest.warns(UserWarning, match="no batch reaches aside; its weight is chosen without data"):
        made = lb.calibrate(model, "int4-weight-only:group32", tokens(), "gptq", skip=())
    expected = METHODS["search"].solve(model.aside.weight.detach(), lb.scheme("int4:group32"), None)
    assert torch.equal(made.weights["aside"].codes, expected.codes)
    assert made.rows["aside"].method == "search"
    assert made.rows["aside"].output_sqnr is None


def test_numbers_that_are_none_are_refused_by_layer_and_batch():
    model, batches = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [torch.ones(3, 4) for _ in range(3)]
    batches[1][2, 3] = torch.nan
    with pytest.raises(ValueError, match=r"layer '0', batch 1: an input has NaN or Inf"):
        lb.calibrate(model, "int8-weight-only", batches)
    model[1].weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"layer '1': 1 of the weight's 16 elements are NaN or Inf"):
        lb.calibrate(model, "int8-weight-only", [torch.ones(3, 4)])


def test_what_cannot_be_calibrated_is_refused():
    model = Stack()
    with pytest.raises(ValueError, match="method 'gptq' needs data; give batches, or one of nearest"):
        lb.calibrate(model, "int8", None, "gptq")
    with pytest.raises(ValueError, match=r"there are no batches \(an iterator yields them only once\)"):
        lb.calibrate(model, "int8", iter([]))
    with pytest.raises(TypeError, match=r"the model must be an nn.Module, got str"):
        lb.calibrate("int8", model, tokens())
    with pytest.raises(ValueError, match=r"method 'hqq' does not support this weight: nf4.* does not have integers"):
        lb.calibrate(model, "nf4", tokens(), "hqq")
    with pytest.raises(TypeError, match=r"a batch is a tensor, a tuple.*got str"):
        lb.calibrate(model, "int8", ["text"], "gptq")
    with pytest.raises(ValueError, match="unknown method 'magic'"):
        lb.calibrate(model, "int8", tokens(), "magic")
    with torch.device("meta"):
        empty = Stack()
    with pytest.raises(ValueError, match="meta device, without values; load the model first"):
        lb.calibrate(empty, "int8", None, "search")
    lb.quantize_(model, "int8", skip=())
    with pytest.raises(ValueError, match="quantized"):
        lb.calibrate(model, "int8", tokens())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_16_bits(dtype):
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8)).to(dtype), torch.randn(100, 32).to(dtype)
    made = lb.calibrate(model, "int4-weight-only:group16", [x])
    lb.quantize_(model, "int4-weight-only:group16", made)
    assert model(x).dtype == dtype
    assert model[0].weight.dtype == dtype


# -- two processes ----------------------------------------------------------------------------------------------------
def _process(rank: int, model: nn.Module, batches: list[Tensor], methods: list[str], path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        for method in methods:
            lb.calibrate(model, "int4-weight-only:group32", batches[rank::2], method).save(f"{path}/{method}{rank}")
    finally:
        dist.destroy_process_group()


def test_two_processes_with_half_of_the_batches_find_what_one_does(tmp_path):
    model, batches, methods = Stack(2), tokens(4), ["gptq", "guided-gptq"]
    run_processes(_process, (model, batches, methods, str(tmp_path)))
    for method in methods:
        whole = lb.calibrate(model, "int4-weight-only:group32", batches, method)
        first, second = (lb.Calibration.load(tmp_path / f"{method}{rank}") for rank in range(2))
        for name, q in whole.weights.items():
            assert torch.equal(first.weights[name].codes, second.weights[name].codes), f"{method}: {name}"
            one, other = (made.dequantize(torch.float32) for made in (first.weights[name], q))
            if method == "gptq" or name in ("blocks.0.gate", "blocks.0.up"):  # before codes differ, and later inputs
                # Sums in another order: where one decides a code otherwise, all that follows in that row may differ.
                equal = ((one - other).abs() < 1e-5).double().mean(dim=1)
                assert (equal == 1).double().mean() >= 0.96 and equal.mean() > 0.97


# -- a run that is stopped --------------------------------------------------------------------------------------------
_KILLED = """
import os, sys, lowbit as lb
sys.path[:0] = [{here!r}, os.path.dirname({here!r})]
from test_run import half_done
half_done({directory!r}, 2, lambda: os.kill(os.getpid(), 9))
"""


def half_done(directory: str, stop: int, end) -> lb.Calibration:
    """A run with every kind of result, in which ``end`` is called before block ``stop``."""
    from support.models import gpt

    torch.manual_seed(0)
    model, batches, calls = gpt(), [torch.randint(60, (2, 32)) for _ in range(2)], []

    def progress(what, done, total):
        calls.append(done)
        if len(calls) == stop:
            end()

    recipe = {"*": "int8-static", "*.down": "int4-weight-only:group32"}
    return lb.calibrate(model, recipe, batches, ("smoothquant", "gptq"), directory=directory, progress=progress)


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    whole = half_done(str(tmp_path / "whole"), 0, None)
    script = _KILLED.format(here=os.path.dirname(__file__), directory=str(tmp_path / "2"))
    killed = subprocess.run([sys.executable, "-c", script], check=False, env={**os.environ, "PYTHONPATH": ROOT})
    assert killed.returncode == -9
    for stop in (1, 3):  # before the first block, before what is outside of blocks
        with pytest.raises(KeyboardInterrupt):
            half_done(str(tmp_path / f"{stop}"), stop, interrupt)
    for stop in (1, 2, 3):
        assert len(list((tmp_path / f"{stop}").glob("blocks/*"))) == stop - 1
        again = half_done(str(tmp_path / f"{stop}"), 0, None)
        assert again.rows == whole.rows
        for name, q in whole.weights.items():
            other = again.weights[name].parts
            assert all(torch.equal(part, other[key]) for key, part in q.parts.items())
        assert {name: float(one.scale) for name, (one, _) in again.inputs.items()} == {
            name: float(one.scale) for name, (one, _) in whole.inputs.items()
        }
        assert [edit.name for edit in again.edits] == [edit.name for edit in whole.edits]
        assert all(torch.equal(a.value, b.value) for a, b in zip(again.edits, whole.edits, strict=True))
        assert not (tmp_path / f"{stop}" / "blocks").exists()


def test_a_directory_of_another_run_is_refused(tmp_path):
    model, batches = Stack(2), tokens(2)
    first = lb.calibrate(model, "int8", batches, "gptq", directory=tmp_path / "a")
    again = lb.calibrate(model, "int8", batches, "gptq", directory=tmp_path / "a")
    assert again.rows == first.rows
    for name, (m, b, r, how) in {
        "model": (Stack(2), batches, "int8", "gptq"), "data": (model, tokens(2), "int8", "gptq"),
        "recipe": (model, batches, "nf4", "gptq"), "method": (model, batches, "int8", "search"),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"holds a calibration of another run: its {name} is"):
            lb.calibrate(m, r, b, how, directory=tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match="not empty and has no run"):
        lb.calibrate(model, "int8", batches, "gptq", directory=tmp_path / "b")


def test_what_a_kill_in_the_first_write_leaves_is_no_other_run(tmp_path):
    run = lb.calibrate(Stack(1), "int8", None, "search", directory=tmp_path / "whole")
    (tmp_path / "run").mkdir()
    for name in (f".run.json.{'a' * 16}.tmp", f".run.json.{'b' * 16}.tmp"):
        (tmp_path / "run" / name).write_text("{")
    model = Stack(1)
    made = lb.calibrate(model, "int8", None, "search", directory=tmp_path / "run")
    assert made.rows.keys() == run.rows.keys() and not list((tmp_path / "run").glob(".*"))
    (tmp_path / "run" / f".calibration.json.{'c' * 16}.tmp").write_text("{")
    assert lb.calibrate(model, "int8", None, "search", directory=tmp_path / "run").rows == made.rows
    assert not list((tmp_path / "run").glob(".*"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".thesis.txt.tmp").write_text("")
    with pytest.raises(ValueError, match="not empty and has no run"):
        lb.calibrate(model, "int8", None, "search", directory=tmp_path / "other")


def test_a_full_disk_leaves_what_was_finished(tmp_path, monkeypatch):
    from lowbit.serialize import safetensors

    model, batches, write = Stack(3), tokens(2), safetensors.write
    written = []

    def full(path, tensors):
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(path)
        return write(path, tensors)

    monkeypatch.setattr(safetensors, "write", full)
    with pytest.raises(
        OSError, match=rf"No space left.*finished parts in {tmp_path} are intact.*: '{tmp_path}/blocks/0002/"
    ):
        lb.calibrate(model, "int8", batches, "gptq", directory=tmp_path)
    monkeypatch.undo()
    done = []
    made = lb.calibrate(model, "int8", batches, "gptq", directory=tmp_path, progress=lambda *row: done.append(row))
    plain = lb.calibrate(model, "int8", batches, "gptq")
    assert made.rows == plain.rows


@pytest.mark.parametrize("parts", ["{}", '{"parts": "3"}', '{"parts": null}', '{"parts": true}'])
def test_a_run_whose_end_is_damaged_is_named(tmp_path, parts):
    finished = Finished(tmp_path, {"model": "a"})
    (tmp_path / "closed.json").write_text(parts)
    with pytest.raises(ValueError, match=r"closed.json is damaged: its parts are .*; remove it"):
        finished.opened()
