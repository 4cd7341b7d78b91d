"""``lowbit export``, and commands on the files that it and other programs write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit as lb
from lowbit.cli import fit, memory
from lowbit.cli.models import tokenizer_in
from lowbit.convert.engine import quantized_layers
from lowbit.evaluate import cell, models
from lowbit.evaluate import run as evaluation
from lowbit.evaluate.data import Wanted
from lowbit.files import write_record
from lowbit.interop import tokenizer_of

transformers = pytest.importorskip("transformers", minversion="5")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("gguf")
pytest.importorskip("compressed_tensors")

FORMATS = ("gguf", "compressed-tensors")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """``llama``, a directory as transformers writes it, with a byte-level tokenizer; and ``book.txt``."""
    root = tmp_path_factory.mktemp("export")
    alphabet = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "th"]
    vocabulary = {text: index for index, text in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("t", "h")]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    words.chat_template = "{{ messages[0]['content'] }}"
    words.save_pretrained(root / "llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=288, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(root / "llama")
    (root / "book.txt").write_text("the other path that they then bathe in there. " * 12)
    return root


@pytest.fixture(scope="module")
def small(root) -> Path:
    """The model in q4_0, as ``lowbit quantize`` writes it."""
    model = transformers.LlamaForCausalLM.from_pretrained(root / "llama").eval()
    lb.quantize_(model, "q4_0")
    lb.save_model(model, root / "small")
    transformers.AutoTokenizer.from_pretrained(root / "llama").save_pretrained(root / "small")
    return root / "small"


@pytest.fixture(scope="module")
def exported(small) -> dict[str, Path]:
    """``small`` in each format."""
    paths = {"gguf": small.with_name("small.gguf"), "compressed-tensors": small.with_name("small-ct")}
    for name, path in paths.items():
        lb.export(lb.load_model(small), name, path, small)
    return paths


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(torch.arange(24)[None]).logits


# -- lowbit export -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_directory_is_exported_with_its_codes_and_tokenizer(run, small, name, tmp_path):
    target = tmp_path / "out"
    made = json.loads(run("export", str(small), "--to", name, "--out", str(target), "--json"))
    assert made["out"] == str(target) and len(made["layers"]) == 7
    model, back = lb.load_model(small), lb.load_model(target)
    assert {row.recipe for row in quantized_layers(back).values()} == {lb.recipe("q4_0")}
    assert torch.equal(logits(back), logits(model))
    words = tokenizer_of(target)
    assert words("the path")["input_ids"] == tokenizer_of(small)("the path")["input_ids"]
    assert words.chat_template == "{{ messages[0]['content'] }}"


@pytest.mark.parametrize(("source", "name"), [("gguf", "compressed-tensors"), ("compressed-tensors", "gguf")])
def test_a_format_is_exported_to_the_other(run, exported, source, name, tmp_path):
    told = run("export", str(exported[source]), "--to", name, "--out", str(tmp_path / "out"))
    assert f"in {tmp_path / 'out'}" in told and "no tokenizer" not in told
    assert torch.equal(logits(lb.load_model(tmp_path / "out")), logits(lb.load_model(exported[source])))
    assert tokenizer_of(tmp_path / "out")("the")["input_ids"] == tokenizer_of(exported[source])("the")["input_ids"]


def test_without_a_tokenizer_the_command_says_so(run, small, root, tmp_path):
    bare = tmp_path / "bare"
    lb.save_model(lb.load_model(small), bare)
    told = run("export", str(bare), "--to", "gguf", "--out", str(tmp_path / "bare.gguf"))
    assert "no tokenizer, because MODEL has none: pass --tokenizer DIR" in told
    again = ("export", str(tmp_path / "bare.gguf"), "--to", "gguf", "--out", str(tmp_path / "again.gguf"))
    assert "it has no tokenizer" in run(*again)
    with pytest.warns(UserWarning, match=r"bare.gguf has no tokenizer; give the directory"):
        assert tokenizer_in(tmp_path / "bare.gguf") is None
    (tmp_path / "again.gguf").unlink()
    run("export", str(bare), "--to", "gguf", "--out", str(tmp_path / "again.gguf"), "--tokenizer", str(root / "llama"))
    assert tokenizer_of(tmp_path / "again.gguf")("the")["input_ids"]


def test_what_cannot_be_exported_is_one_line(run, small, root, tmp_path):
    lb.save_model(_quantized(root / "llama", "nf4"), tmp_path / "nf4")
    target, nothing = tmp_path / "out", tmp_path / "nothing.gguf"
    for source, name, told in (
        (small, "ggml", "unknown format 'ggml'; expected one of gguf, compressed-tensors"),
        (tmp_path / "nf4", "gguf", "no block type"),
        (tmp_path / "nf4", "compressed-tensors", "nf4"),
        (nothing, "gguf", f"{nothing} does not exist; expected a Hugging Face model directory"),
        (root / "book.txt", "gguf", "book.txt is not a saved model; expected a Hugging Face model directory"),
    ):
        error = run("export", str(source), "--to", name, "--out", str(target), code=1)
        assert told in error.splitlines()[-1] and "Traceback" not in error  # above it may be bars of transformers
        assert not target.exists()
    target.write_text("mine")
    assert f"{target} exists; remove it" in run("export", str(small), "--to", "gguf", "--out", str(target), code=1)
    assert target.read_text() == "mine"


def _quantized(directory: Path, recipe: str) -> Any:
    model = transformers.LlamaForCausalLM.from_pretrained(directory).eval()
    lb.quantize_(model, recipe)
    return model


# -- lowbit quantize, calibrate ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_model_is_decoded_before_it_is_quantized_again(run, exported, name, tmp_path):
    target = tmp_path / "again"
    made = json.loads(run("quantize", str(exported[name]), "q8_0", "--out", str(target), "--json"))
    (note,) = (note for note in made["notes"] if "decoded from q4-0 first" in note or "decoded from q4_0 first" in note)
    assert "original is more accurate" in note
    model = lb.load_model(exported[name])
    lb.dequantize_(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    lb.quantize_(model, "q8_0")
    assert torch.equal(logits(lb.load_model(target)), logits(model))
    words = transformers.AutoTokenizer.from_pretrained(target)
    assert words("the path")["input_ids"] == tokenizer_of(exported[name])("the path")["input_ids"]
    run("export", str(target), "--to", "gguf", "--out", str(tmp_path / "again.gguf"))
    assert torch.equal(logits(lb.load_model(tmp_path / "again.gguf")), logits(model))


def test_a_float_file_is_quantized_as_its_directory(run, root, tmp_path):
    run("export", str(root / "llama"), "--to", "gguf", "--out", str(tmp_path / "llama.gguf"))
    text = ("--text", str(root / "book.txt"), "--windows", "3", "--length", "32")
    found = []
    for path in (root / "llama", tmp_path / "llama.gguf"):
        target = tmp_path / f"{path.name} in q4_0"
        made = json.loads(run("quantize", str(path), "q4_0", *text, "--out", str(target), "--json"))
        assert not any("decoded" in note for note in made["notes"])
        found.append(logits(lb.load_model(target)))
    assert torch.equal(*found)
    made = json.loads(run("quantize", str(tmp_path / "llama.gguf"), "q8_0,q4_0", "--bits", "6", *text, "--json"))
    assert made["out"] == str(tmp_path / "llama-6bit")
    error = run("quantize", str(tmp_path / "llama.gguf"), "int8", "--from-disk", code=1)
    assert "is a gguf model, and --from-disk reads unquantized safetensors files; leave it out" in error


def test_calibrate_and_quantize_decode_the_same_weights(run, exported, root, tmp_path):
    path, found = str(exported["gguf"]), str(tmp_path / "found")
    text = ("--text", str(root / "book.txt"), "--windows", "2", "--length", "32", "--method", "gptq")
    told = json.loads(run("calibrate", path, "int8", *text, "--out", found, "--json"))
    assert "decoded from" in told["notes"][0]
    run("quantize", path, "int8", "--calibration", found, "--out", str(tmp_path / "one"))
    run("quantize", path, "int8", *text, "--out", str(tmp_path / "two"))
    assert torch.equal(logits(lb.load_model(tmp_path / "one")), logits(lb.load_model(tmp_path / "two")))


# -- lowbit evaluate, fit, doctor --------------------------------------------------------------------------------------
def _measured(cells: list[evaluation.Cell]) -> list[evaluation.Cell]:
    for one in cells:
        write_record(Path(one.request.table), one.request.name, cell.measure(one.request))
    return [evaluation.read(one) for one in cells]


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_file_is_measured_as_it_is_and_decoded(exported, root, name, tmp_path):
    row = models.find(str(exported[name]))
    assert row.recipe in ("q4_0", "q4-0") and row.needs_text and "already quantized" in row.about
    cells = evaluation.cells_of(row, None, Wanted(root / "book.txt", 3, 8), tmp_path, "fp32")
    decoded, _, own, _ = cells
    decoded, own = _measured([decoded, own])
    model = lb.load_model(exported[name])
    tokens = torch.tensor(tokenizer_of(exported[name])((root / "book.txt").read_text())["input_ids"][: 3 * 64])
    with torch.no_grad():
        found = model(tokens.view(3, 64)).logits[:, :-1].double()
    expected = torch.nn.functional.cross_entropy(found.transpose(1, 2), tokens.view(3, 64)[:, 1:], reduction="none")
    assert own.result["values"]["loss"] == pytest.approx(expected.mean(1).tolist(), rel=1e-5)
    assert own.result["bytes"] < decoded.result["bytes"] and decoded.note == evaluation.DECODED


def test_types_without_a_scheme_are_decoded_and_named(root, tmp_path, run):
    gguf = pytest.importorskip("gguf")
    run("export", str(root / "llama"), "--to", "gguf", "--out", str(tmp_path / "plain.gguf"))
    reader, path = gguf.GGUFReader(tmp_path / "plain.gguf"), tmp_path / "iq4.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":  # codes of zero, each of which decodes to zero times a scale of zero
            raw = torch.zeros(288, 64 // 32 * 18, dtype=torch.uint8).numpy()
            writer.add_tensor(tensor.name, raw, raw_dtype=gguf.GGMLQuantizationType.IQ4_NL)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    row = models.find(str(path))
    assert row.recipe is None and "IQ4_NL weights in it are decoded" in row.about
    told = run("quantize", str(path), "q4_0")
    assert "the weights were decoded from IQ4_NL first" in told and (tmp_path / "iq4-q4-0").is_dir()


def test_an_encoder_is_measured_by_its_embeddings(tmp_path):
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnop", *(f"##{letter}" for letter in "abcdefghijkl")]
    vocabulary = {text: index for index, text in enumerate(texts)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=512,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    lb.quantize_(model, "q8_0")
    lb.export(model, "gguf", tmp_path / "bert.gguf", words)
    row = models.find(str(tmp_path / "bert.gguf"))
    assert row.recipe is not None and not row.needs_text
    cells = evaluation.cells_of(row, None, Wanted(None, 2, 8), tmp_path / "out")
    _, own = _measured([cells[0], cells[2]])  # the first computes what all are compared with
    assert own.result["task"] == "embeddings" and all(0.99 < value <= 1.001 for value in own.result["values"]["cosine"])


@pytest.mark.parametrize("name", FORMATS)
def test_plans_take_the_float_model(exported, name):
    model, batch, loss = memory.find(str(exported[name]), 2, 16, "MODEL")
    assert type(model).__name__ == "LlamaForCausalLM" and model.training and loss is None
    assert all(parameter.is_meta for parameter in model.parameters()) and not quantized_layers(model)
    assert batch["input_ids"].shape == (2, 16)
    lines = fit._model_lines(str(exported[name]), model, batch, "")
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)
    assert type(scope["model"].model.layers[0].mlp.up_proj) is torch.nn.Linear and scope["model"].training


# -- errors of lb.load_model -------------------------------------------------------------------------------------------
def test_paths_that_are_no_model_name_the_formats(exported, root, tmp_path):
    for path, told in (
        (tmp_path / "absent", "does not exist"),
        (root / "book.txt", "is not a directory that"),
        (root, "is not"),
    ):
        with pytest.raises(
            FileNotFoundError, match=rf"{path.name} {told}.*a GGUF file, or a directory of compressed-tensors, gptq"
        ):
            lb.load_model(path)
    with pytest.raises(ValueError, match=r"quantized by 'compressed-tensors'; lowbit.load_model loads"):
        lb.serialize.load_model(exported["compressed-tensors"])
