"""What the documents say is so: their code runs and prints what it shows, tables are current, links lead on."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import re
import socket
from pathlib import Path

import pytest
import torch
from support.words import byte_tokenizer

import lowbit as lb

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

#: The block of README.md with a model of transformers, which has a test of its own.
PRETRAINED = "from transformers import AutoModelForCausalLM, AutoTokenizer"


@pytest.mark.parametrize("page, needs", [
    ("README.md", ()), ("docs/formats.md", ()), ("docs/answers.md", ()),
    *(pytest.param(f"docs/{page}.md", needs, marks=pytest.mark.slow) for page, needs in {
        "training": (), "qat": ("onnxscript", "onnxruntime"), "ladder": (), "distributed": (),
        "optimizers": ("transformers",), "memory": ("transformers",),
        "7b-on-24gb": ("transformers",), "with-other-libraries": ("transformers", "peft", "accelerate"),
    }.items()),
])  # fmt: skip
def test_code_prints_what_it_shows(tmp_path, monkeypatch, steady_times, page, needs):
    for package in needs:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    text = (ROOT / page).read_text()
    names: dict[str, object] = {"__name__": "readme"}
    blocks = list(BLOCK.finditer(text))
    assert blocks
    for block in blocks:
        if page == "README.md" and PRETRAINED in block[1]:
            continue
        line = text[: block.start(1)].count("\n")
        code = compile("\n" * line + block[1], str(ROOT / page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        shown = re.findall(r"^# -> (.*)$", block[1], re.MULTILINE)
        assert printed.getvalue().splitlines() == shown, f"the block at {page}:{line + 1}"


@pytest.mark.slow
def test_the_readme_fine_tunes_quantizes_and_exports_a_pretrained_model(tmp_path, monkeypatch):
    """A tiny model and tokenizer are at the name that the block downloads."""
    pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers", minversion="5")
    monkeypatch.chdir(tmp_path)
    (code,) = (block[1] for block in BLOCK.finditer((ROOT / "README.md").read_text()) if PRETRAINED in block[1])
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, dtype="bfloat16",
    )  # fmt: skip
    name = re.search(r'from_pretrained\("([\w/.-]+)"', code)[1]
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).bfloat16()
    plain.save_pretrained(name)
    byte_tokenizer().save_pretrained(name)
    names = {"lb": lb, "texts": ["the cat sat on the mat", "on the mat sat the cat"] * 20}
    exec(code.replace("lr=1e-5", "lr=1e-3"), names)
    batch = names["batches"][0]
    loss = {key: float(m(**batch, labels=batch["input_ids"]).loss) for key, m in (
        ("plain", plain), ("trained", names["model"].eval()), ("file", lb.load_model("SmolLM2.gguf"))
    )}  # fmt: skip
    assert loss["file"] == pytest.approx(loss["trained"], rel=1e-3) and loss["trained"] < 0.9 * loss["plain"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def _tables():
    spec = importlib.util.spec_from_file_location("generate_tables", ROOT / "docs" / "generate_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", _tables().FILES)
def test_tables_are_current(name):
    text = (ROOT / name).read_text()
    assert "<!-- table:" in text
    assert _tables().filled(text) == text, f"{name} has a table that the code has outgrown; run `make tables`"


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_changes_in_percent_are_quoted_by_tables_that_read_the_record(name):
    """A figure that is typed stays as it was when the record grows: whoever quotes one adds a table of it."""
    prose = re.sub(r"<!-- table: \w+ -->.*?<!-- end -->", "", (ROOT / name).read_text(), flags=re.DOTALL)
    assert re.findall(r"(?<![\w.])[+\-−±] ?\d+(?:\.\d+)? ?%", prose) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def _public():
    """By the name that users write, the functions of lowbit and of its subpackages, each once."""
    # lowbit.reference is the specification of ops by the same names, torch_private is torch's.
    hidden = ("reference", "torch_private")
    parts = {name: one for name, one in vars(lb).items() if inspect.ismodule(one) and name not in hidden}
    packages = {"lb": lb} | {f"lb.{name}": one for name, one in parts.items()}
    found = {}
    for prefix, package in packages.items():
        for name in getattr(package, "__all__", ()):
            thing = getattr(package, name)
            if package.__name__.startswith("lowbit") and inspect.isfunction(thing):
                found.setdefault(thing, f"{prefix}.{name}")
    return set(found.values())


def test_every_way_back_is_in_the_tables_of_answers():
    """A function with a counterpart by name (unX and X, deX and X or enX) is in a row with it; whatever else changes
    its argument in place is in a row, or among those that nothing undoes."""
    section = (
        (ROOT / "docs" / "answers.md").read_text().partition("## How do I undo a change?")[2].partition("\n## ")[0]
    )
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    public, missing = _public(), []
    for strategy in public:
        package, _, name = strategy.rpartition(".")
        stem = re.fullmatch(r"(?:un|de)(\w+)", name)
        if stem is None:
            continue
        made = [f"{package}.{prefix}{stem[1]}" for prefix in ("", "en")]
        made += [other for other in public if other.startswith(f"{package}.{stem[1].rstrip('_')}_")]
        if public & set(made) and not any(f"`{strategy}" in row and any(f"`{m}`" in row for m in made) for row in rows):
            missing.append(strategy)
    assert missing == []
    assert {"lb.train.uncompress_activations_", "lb.memory.unstream_", "lb.decode", "lb.dequantize_"} <= public
    assert [strategy for strategy in sorted(public) if strategy.endswith("_") and f"`{strategy}" not in section] == []
