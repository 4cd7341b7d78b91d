"""``lowbit calibrate``, and ``lowbit quantize --calibration``: what Python does, on a directory."""

import importlib
import json
import runpy
import sys

import pytest
import torch

import lowbit as lb
from lowbit.sizes import bytes_in

WORDS = [f"w{i}" for i in range(90)]


@pytest.fixture
def llama(tmp_path):
    """A directory as transformers writes it, with a tokenizer of words; the model in bf16; a text."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "llama")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "llama")
    numbers = torch.randint(90, (400,))
    (tmp_path / "book.txt").write_text(" ".join(WORDS[i] for i in numbers))
    for parameter in model.parameters():  # and not the tables of rotary embeddings
        parameter.data = parameter.data.bfloat16()
    return tmp_path, model, numbers


def test_what_is_found_is_what_python_finds(run, llama):
    root, model, numbers = llama
    found, text = str(root / "found"), str(root / "book.txt")
    arguments = ("--text", text, "--windows", "5", "--length", "32", "--method", "gptq,mse")
    told = json.loads(run("calibrate", str(root / "llama"), "int8-static", "--out", found, *arguments, "--json"))
    assert told["layers"]["model.layers.0.mlp.up_proj"]["method"] == "gptq"
    assert told["peak_bytes"] > 0
    batches = list(numbers[: 5 * 32].view(5, 1, 32))
    expected = lb.calibrate(model, "int8-static", batches, ("gptq", "mse"))
    made = lb.Calibration.load(found)
    assert made.rows == expected.rows
    assert all(torch.equal(made.weights[name].codes, q.codes) for name, q in expected.weights.items())

    run("quantize", str(root / "llama"), "int8-static", "--calibration", found, "--out", str(root / "small"))
    lb.quantize_(model, "int8-static", expected)
    loaded, x = lb.load_model(root / "small"), numbers[None, :20]
    with torch.no_grad():
        assert torch.equal(loaded(x).logits, model(x).logits)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("method", "options"), [(None, ()), ("smoothquant,gptq", ("--method", "smoothquant,gptq"))])
def test_quantize_calibrates_with_a_text_in_memory_and_from_disk(run, llama, method, options):
    root, model, numbers = llama
    text = ("--text", str(root / "book.txt"), "--windows", "3", "--length", "32")
    given = ("quantize", str(root / "llama"), "int8", *text, *options)
    for where in ("--in-memory", "--from-disk"):
        table = run(*given, where, "--out", str(root / where.strip("-")))
        assert " s, peak memory " in table
    data = list(numbers[: 3 * 32].view(3, 1, 32))
    lb.quantize_(model, "int8", lb.calibrate(model, "int8", data, None if method is None else method.split(",")))
    x = numbers[None, :20]
    with torch.no_grad():
        for where in ("in-memory", "from-disk"):
            assert torch.equal(lb.load_model(root / where)(x).logits, model(x).logits), where
    error = run(*given, "--calibration", "found", "--out", str(root / "t"), code=1)
    assert "leave out --method and --text" in error


def test_without_data_and_with_other_layers_left(run, llama):
    root, _, _ = llama
    found = str(root / "found")
    options = ("--skip", "*.down_proj", "--skip", "lm_head")
    table = run("calibrate", str(root / "llama"), "nf4", "--method", "search", "--out", found, *options)
    assert "up_proj" in table
    assert "down_proj" not in table
    assert f"lowbit quantize {root / 'llama'} nf4 --calibration {found}" in table
    told = json.loads(
        run(
            "quantize", str(root / "llama"), "nf4", "--calibration", found, *options, "--out", str(root / "s"), "--json"
        )
    )
    assert len(told["converted"]) == 12
    error = run("quantize", str(root / "llama"), "nf4", "--calibration", found, "--out", str(root / "t"), code=1)
    assert "has no 'model.layers.0.mlp.down_proj'" in error
    assert not (root / "t").exists()


def test_errors_say_what_to_give(run, llama):
    root, _, _ = llama
    model, found = str(root / "llama"), str(root / "found")
    assert "--text FILE, or use one of int8" in run("calibrate", model, "int8-static", "--out", found, code=1)
    assert "unknown method 'gtpq' (did you mean gptq?)" in run(
        "calibrate", model, "int8", "--method", "gtpq", "--out", found, code=1
    )
    short = root / "short.txt"
    short.write_text("w1 w2")
    told = run("calibrate", model, "int8", "--text", str(short), "--out", found, code=1)
    assert "2 tokens do not fill one window of 512; use a longer text" in told
    (root / "llama" / "tokenizer.json").unlink()
    (root / "llama" / "tokenizer_config.json").unlink()
    told = run("calibrate", model, "int8", "--text", str(root / "book.txt"), "--out", found, code=1)
    assert "has no tokenizer" in told


def test_a_budget_chooses_recipes_by_layer_as_python_does(run, llama):
    root, model, numbers = llama
    given = ("quantize", str(root / "llama"), "int4-weight-only:group32,int8", "--text", str(root / "book.txt"))
    options = ("--windows", "5", "--length", "32", "--method", "search", "--plot", str(root / "plot.png"), "--json")
    told = json.loads(run(*given, "--bits", "6.2", *options))
    assert told["out"] == f"{root / 'llama'}-6.2bit" and (root / "plot.png").exists()
    batches = list(numbers[: 5 * 32].view(5, 1, 32))
    found = lb.sensitivity(model, ["int4-weight-only:group32", "int8"], batches, method="search")
    chosen = found.choose(bits=6.2)
    assert len(set(chosen.values())) == 2
    lb.quantize_(model, chosen, lb.calibrate(model, chosen, None, "search"))
    loaded, x = lb.load_model(told["out"]), numbers[None, :20]
    assert {name: row.recipe.name for name, row in lb.convert.engine.quantized_layers(loaded).items()} == {
        name: recipe.name for name, recipe in chosen.items()
    }
    with torch.no_grad():
        assert torch.equal(loaded(x).logits, model(x).logits)

    size = found.size(chosen)
    told = json.loads(run(*given, "--size", f"{size}B", "--out", str(root / "sized"), *options))
    assert told["bytes"] <= size


def test_budgets_that_cannot_be_met_say_why(run, llama):
    root, _, _ = llama
    text = ("--text", str(root / "book.txt"), "--length", "32")
    for arguments, message in (
        ((), "expected a recipe: one of"),
        (("--bits", "4.5"), "pass one with --text FILE"),
        (("--bits", "4.5", "--size", "1MB", *text), "both set; pass only one"),
        (("--size", "1 parsec", *text), "'1 parsec' is no size; write for instance 80MB"),
        (("--bits", "1.5", *text), "the smallest recipe, int4-weight-only, has"),
        (("--bits", "4.5", "--calibration", "found", *text), "leave out --bits and --size"),
        (("--bits", "4.5", "--from-disk", *text), "load the model into memory"),
    ):
        assert message in run("quantize", str(root / "llama"), *arguments, code=1)
    assert bytes_in("80MB") == 80_000_000 and bytes_in("1.5 gib") == 3 << 29 and bytes_in("7B") == 7


def test_arguments_are_checked_before_the_model_is_loaded(run, llama, monkeypatch):
    root, _, _ = llama
    model, found, text = str(root / "llama"), str(root / "found"), ("--text", str(root / "book.txt"))

    def loaded(directory: object, dtype: object) -> None:
        raise AssertionError("the model is loaded")

    for name in ("quantize", "calibrate"):
        monkeypatch.setattr(importlib.import_module(f"lowbit.cli.{name}"), "load_float", loaded)
    both = [
        (("--text", "nope.txt"), "nope.txt cannot be read (No such file or directory)"),
        (("--method", "foo"), "unknown method 'foo'"),
        (("--method", "smoothquant,search"), "--method smoothquant needs data; pass --text FILE"),
        (("--method", "gptq"), "--method gptq needs data; pass --text FILE, or use one of nearest, signed"),
        ((*text, "--length", "1000"), "do not fill one window of 1000"),
    ]
    for command, more in (("quantize", ()), ("calibrate", ("--out", found))):
        for arguments, message in both:
            assert message in run(command, model, "int8", *more, *arguments, code=1)
        assert "is not a saved model" in run(command, str(root), "int8", *more, *text, code=1)
    for arguments, message in (
        (("--bits", "1.5"), "--bits 1.5: the smallest recipe, int4-weight-only, has 4.250 bits per weight"),
        (("--bits", "nan"), "expect a finite number"),
        (("none", "--bits", "8"), "at least one recipe other than none"),
        (("--bits", "5", "--method", "gptq"), "a data-free method, one of nearest, signed"),
    ):
        assert message in run("quantize", model, *arguments, *text, code=1)


def test_an_interrupt_says_what_goes_on(run, llama, monkeypatch):
    root, _, _ = llama
    given = (str(root / "llama"), "int4-weight-only:group32", "--text", str(root / "book.txt"), "--length", "32")

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("lowbit.cli.calibrate"), "run", stop)
    told = run("calibrate", *given, "--out", str(root / "found"), code=130)
    assert told.strip().endswith("stopped; repeat the command to continue")
    command = importlib.import_module("lowbit.cli.quantize")
    monkeypatch.setattr(command, "quantize_files", stop)
    monkeypatch.setattr(command, "quantize_", stop)
    assert "stopped; repeat the command to continue" in run("quantize", *given, "--from-disk", code=130)
    assert run("quantize", str(root / "llama"), "int8", code=130).strip().endswith("stopped")


def test_a_method_without_data_is_that_of_python(run, llama):
    root, model, numbers = llama
    made = json.loads(run("quantize", str(root / "llama"), "mxfp4-weight-only", "--method", "mse", "--json"))["out"]
    lb.quantize_(model, "mxfp4-weight-only", lb.calibrate(model, "mxfp4-weight-only", None, "mse"))
    with torch.no_grad():
        assert torch.equal(lb.load_model(made)(numbers[None, :9]).logits, model(numbers[None, :9]).logits)


def test_the_package_is_the_command_and_its_help_names_static_recipes(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lowbit", "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("lowbit", run_name="__main__")
    assert not stop.value.code and capsys.readouterr().out.strip() == f"lowbit {lb.__version__}"
    told = run("quantize", "--help")
    assert "int8-static" in told and "fp8-static" in told and "signed" in told


def test_columns_of_a_calibration_stay_apart():
    name = "a_name_of_a_layer_that_is_longer_than_any_column_would_be_if_it_had_a_fixed_width"
    model = torch.nn.Sequential()
    model.add_module(name, torch.nn.Linear(32, 32))
    model.add_module("short", torch.nn.Linear(32, 32))
    table = str(lb.calibrate(model, "uint4-weight-only:group32:bf16", [torch.randn(8, 32)], "gptq", skip=()))
    head, first, second = (line.split() for line in table.splitlines())
    assert head[0] == "layer" and first[:3] == [name, "uint4-weight-only:group32:bf16", "gptq"]
    assert second[:3] == ["short", *first[1:3]] and len({line.index("gptq") for line in table.splitlines()[1:]}) == 1
