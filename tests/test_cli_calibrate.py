"""``lowbit calibrate``, and ``lowbit quantize --calibration``: what Python does, on a directory."""

import json

import pytest
import torch

import lowbit as lb
from lowbit.cli.budget import bytes_in

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
    expected = lb.calibrate(model, batches, "int8-static", ("gptq", "mse"))
    made = lb.Calibration.load(found)
    assert made.rows == expected.rows
    assert all(torch.equal(made.weights[name].codes, q.codes) for name, q in expected.weights.items())

    run("quantize", str(root / "llama"), "int8-static", "--calibration", found, "--out", str(root / "small"))
    lb.quantize_(model, "int8-static", expected)
    loaded, x = lb.load_model(root / "small"), numbers[None, :20]
    with torch.no_grad():
        assert torch.equal(loaded(x).logits, model(x).logits)


@pytest.mark.parametrize(("method", "options"), [(None, ()), ("smoothquant,gptq", ("--method", "smoothquant,gptq"))])
def test_quantize_calibrates_with_a_text_in_memory_and_from_disk(run, llama, method, options):
    root, model, numbers = llama
    text = ("--text", str(root / "book.txt"), "--windows", "3", "--length", "32")
    given = ("quantize", str(root / "llama"), "int8", *text, *options)
    for where in ("--in-memory", "--from-disk"):
        table = run(*given, where, "--out", str(root / where.strip("-")))
        assert " s, peak memory " in table
    data = list(numbers[: 3 * 32].view(3, 1, 32))
    lb.quantize_(model, "int8", lb.calibrate(model, data, "int8", None if method is None else method.split(",")))
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
    assert "give batches" in run("calibrate", model, "int8-static", "--out", found, code=1)
    assert "unknown method 'gtpq' (did you mean gptq?)" in run(
        "calibrate", model, "int8", "--method", "gtpq", "--out", found, code=1
    )
    short = root / "short.txt"
    short.write_text("w1 w2")
    told = run("calibrate", model, "int8", "--text", str(short), "--out", found, code=1)
    assert "2 tokens do not fill one window of 512; give a longer text" in told
    (root / "llama" / "tokenizer.json").unlink()
    (root / "llama" / "tokenizer_config.json").unlink()
    told = run("calibrate", model, "int8", "--text", str(root / "book.txt"), "--out", found, code=1)
    assert "holds no tokenizer" in told


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
    lb.quantize_(model, chosen, lb.calibrate(model, None, chosen, "search"))
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
        ((), "give a recipe, one of"),
        (("--bits", "4.5"), "give a text with --text FILE"),
        (("--bits", "4.5", "--size", "1MB", *text), "two budgets; give one"),
        (("--size", "1 parsec", *text), "'1 parsec' is no size; write for instance 80MB"),
        (("--bits", "1.5", *text), "the smallest choice takes"),
        (("--bits", "4.5", "--calibration", "found", *text), "leave out --bits and --size"),
        (("--bits", "4.5", "--from-disk", *text), "need the model in memory"),
    ):
        assert message in run("quantize", str(root / "llama"), *arguments, code=1)
    assert bytes_in("80MB") == 80_000_000 and bytes_in("1.5 gib") == 3 << 29 and bytes_in("7") == 7
