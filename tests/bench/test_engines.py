"""Exported models with a KV cache give torch's tokens in both programs, and the page of recorded tables."""

import json
import re

import pytest
import torch

import lowbit as lb
from lowbit.bench import engines, engines_causal
from lowbit.bench.engines_programs import PROGRAMS, Table

PROGRAM = {program.format: program for program in PROGRAMS}


def opened(format, path):
    if format != "openvino":
        return PROGRAM[format].open(path)
    import openvino

    return openvino.Core().compile_model(path, "CPU", lb.interop.openvino.EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [None, "int4-weight-only:group32"])
@pytest.mark.parametrize("format", ["onnx", "openvino"])
@torch.no_grad()
def test_a_file_with_a_cache_gives_the_tokens_of_torch(format, recipe, tmp_path):
    pytest.importorskip("transformers.exporters.exporter_openvino")
    pytest.importorskip({"onnx": "onnxruntime", "openvino": "openvino"}[format])
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=None)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.copy_(torch.randn(100, 64))  # tokens repeat with small logits
    if recipe is not None:
        lb.quantize_(model, recipe)
    path = tmp_path / f"model{PROGRAM[format].suffix}"
    engines_causal.write(model, format, path)
    decoder = engines_causal.DECODERS[format](opened(format, path))
    seen = set()
    for length in (9, 5, 1):  # another prompt empties the cache
        ids = torch.randint(3, 100, (1, length))
        expected = model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)[:, length:]
        seen |= set(expected.flatten().tolist())
        assert torch.equal(engines_causal.generate(decoder, ids, 11).tokens, expected)
        decoder.reset()
        torch.testing.assert_close(decoder(ids), model(ids).logits, rtol=1e-4, atol=1e-4)
    assert len(seen) > 4


def test_one_table_is_measured_again(tmp_path, monkeypatch, capsys):
    """A record is replaced, and other rows stay; facts that differ are both on the page."""
    section, other = engines.SECTIONS
    facts = iter(["first", "second"])
    monkeypatch.setattr(engines, "provenance", lambda *_, **__: {"machine": "one", "commit": next(facts)})
    figures = iter("123")

    def table(name, section):
        cells = ("x",) * (len(section.head) - 1)
        return Table(name, section, lambda directory: [(f"{name} {next(figures)}", *cells)])

    names = {"A, P": section, "B, P": other}
    monkeypatch.setattr(engines.engines_encoders, "tables", lambda: [table("A, P", names["A, P"])])
    monkeypatch.setattr(engines.engines_causal, "tables", lambda text: [table("B, P", names["B, P"])])
    threads = torch.get_num_threads()
    try:
        engines.run(tmp_path)
        text = engines.run(tmp_path, "^A").read_text()
    finally:
        torch.set_num_threads(threads)
    assert re.findall(r"^\| ([AB], P \d)", text, re.MULTILINE) == ["A, P 3", "B, P 2"]
    assert "- machine: one\n" in text and "- commit: second; first\n" in text
    assert text.index(section.title) < text.index("A, P 3") < text.index(other.title) < text.index("B, P 2")
    with pytest.raises(ValueError, match=r"no table matches --only 'C'; expected .*A, P; B, P"):
        engines.select("C")
    with pytest.raises(ValueError, match="no regular expression"):
        engines.select("(")


def test_the_page_is_that_of_the_records():
    results = engines.Path(engines.__file__).parent / "results"
    records = engines.read_records(results / "engines.jsonl")
    assert (results / "engines.md").read_text() == engines.page(records)
    sections = {section.title: section for section in engines.SECTIONS}
    for record in records.values():
        assert {len(row) for row in record["rows"]} == {len(sections[record["section"]].head)}
    assert records == json.loads(json.dumps(records)) and set(records) <= {table.name for table in engines.select()}
