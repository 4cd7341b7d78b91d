"""Fine-tuning runs: stopped and resumed, with adapters, within a budget, and from the command line."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import lowbit as lb
from lowbit.cli import app
from lowbit.finetune import Session, TuneConfig, add_adapters, read, split
from lowbit.finetune.session import first_batch
from lowbit.interrupts import Interrupted

transformers = pytest.importorskip("transformers", minversion="5")
tokenizers = pytest.importorskip("tokenizers")

CONFIG = TuneConfig(steps=4, rows=2, length=16, lr=1e-2, warmup=1, eval_every=2, save_every=2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A Hugging Face model with a byte-level tokenizer, and a text next to it."""
    path = tmp_path_factory.mktemp("model")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: i for i, letter in enumerate(["<e>", *alphabet])}, [])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>").save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    rows = [{"prompt": f"{a} plus {b} is ", "completion": f"{a + b}."} for a in range(12) for b in range(12)]
    (path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def session_of(directory, tmp_path, config=CONFIG, recipe=None, budget=None):
    model = transformers.LlamaForCausalLM.from_pretrained(directory).train()
    if recipe is not None:
        lb.quantize_(model, recipe)
    if config.adapters:
        model = add_adapters(model, config.adapters).train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    train, held_out = split(read(directory / "sums.jsonl", tokenizer), config.length)
    tmp_path.mkdir(exist_ok=True)
    plan, saved = None, tmp_path.parent / "plan.json"
    if budget is not None:
        if not saved.exists():
            lb.fit(model, first_batch(model, train, config), budget, require=("adamw8bit", "disk")).save(saved)
        plan = lb.plan.TrainingPlan.load(saved)
    return Session(model, train, held_out, config, tmp_path, plan)


def state(session):
    return {name: value.clone() for name, value in session.model.state_dict().items()}


@pytest.mark.parametrize(("adapters", "budget"), [(0, None), (2, None), pytest.param(0, "70%", marks=pytest.mark.slow)])
def test_a_stopped_run_resumes_with_the_same_bits(adapters, budget, directory, tmp_path):
    config = replace(CONFIG, adapters=adapters)
    whole = session_of(directory, tmp_path / "whole", config, budget=budget)
    whole.train()
    stopped = session_of(directory, tmp_path / "stopped", config, budget=budget)
    with pytest.raises(Interrupted):
        stopped.train(lambda session: os.kill(os.getpid(), signal.SIGINT) if session.step == 3 else None)
    resumed = session_of(directory, tmp_path / "stopped", config, budget=budget)
    resumed.load()
    assert resumed.step == 3
    resumed.train()
    assert resumed.history.held_out == whole.history.held_out and resumed.history.train == whole.history.train
    assert all(torch.equal(value, state(whole)[name]) for name, value in state(resumed).items())


def test_adapters_learn_on_a_quantized_base_and_its_codes_stay(directory, tmp_path):
    config = replace(CONFIG, adapters=4, steps=30)
    session = session_of(directory, tmp_path, config, recipe="nf4")
    before = {name: value for name, value in state(session).items() if "lora" not in name}
    losses = session.train().held_out
    assert losses[-1][1] < losses[0][1] - 0.5
    assert all(torch.equal(state(session)[name], value) for name, value in before.items())


def test_a_state_of_another_run_is_refused(directory, tmp_path):
    session_of(directory, tmp_path).train()
    other = session_of(directory, tmp_path, replace(CONFIG, lr=1e-3))
    with pytest.raises(ValueError, match=r"another run \(lr 0.01 -> 0.001\)"):
        other.load()


def test_a_recurrent_model_gets_rows_of_one_document(directory, tmp_path):
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=257, hidden_size=32, num_hidden_layers=1, state_size=4)
    model = transformers.MambaForCausalLM(config).train()
    train, held_out = split(read(directory / "sums.jsonl", transformers.AutoTokenizer.from_pretrained(directory)), 16)
    with pytest.warns(UserWarning, match="MambaForCausalLM does not keep packed documents apart"):
        session = Session(model, train, held_out, replace(CONFIG, steps=20), tmp_path)
    losses = session.train().held_out
    assert losses[-1][1] < losses[0][1] - 0.5


@pytest.mark.parametrize("adapters", ["0", "2"])
def test_the_command_writes_a_model_that_others_load(adapters, directory, tmp_path):
    command = [
        "train", str(directory), "--text", str(directory / "sums.jsonl"), "--steps", "3", "--batch", "2", "--context",
        "16", "--lr", "1e-2", "--adapters", adapters, "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    runner = CliRunner()
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "held-out loss:" in result.output and (tmp_path / "out/report.md").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out/model")
    base = transformers.AutoModelForCausalLM.from_pretrained(directory)
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, base.state_dict()[name])]
    assert any("q_proj" in name for name in changed) and (adapters == "0") == any("norm" in name for name in changed)
    assert (tmp_path / "out/adapter").exists() == (adapters != "0")
    again = runner.invoke(app, command)
    assert again.exit_code and "holds a run" in str(again.output) + str(again.exception)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--text", "x.txt", "--precision", "fp8"], "--precision applies to the demo"),
        ([], "expects --text"),
        (["--text", "missing.txt"], "missing.txt does not exist"),
    ],
)
def test_options_that_do_not_apply_are_refused(options, reason, directory, tmp_path):
    result = CliRunner().invoke(app, ["train", str(directory), "--out", str(tmp_path), *options])
    assert result.exit_code and reason in str(result.output) + str(result.exception)
