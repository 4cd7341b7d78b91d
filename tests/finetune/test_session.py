"""Fine-tuning runs: stopped and resumed, with adapters, within a budget, and from the command line."""

import copy
import os
import signal
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import lowbit as lb
from lowbit.cli import app
from lowbit.combinations import refusal
from lowbit.files import write_checked
from lowbit.finetune import Session, TuneConfig, add_adapters, read, split
from lowbit.finetune.session import first_batch, held_out_loss
from lowbit.interrupts import Interrupted
from lowbit.tiled.lazy_mask import LazyMask

transformers = pytest.importorskip("transformers", minversion="5")

CONFIG = TuneConfig(steps=4, rows=2, length=16, lr=1e-2, warmup=1, eval_every=2, save_every=2)


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


@pytest.mark.parametrize("adapters", [0, 2])
def test_packed_rows_train_without_a_mask_to_the_losses_with_one(adapters, directory, tmp_path, monkeypatch):
    config = replace(CONFIG, adapters=adapters)
    without = session_of(directory, tmp_path / "without", config)
    assert without.model.config._attn_implementation == "lowbit"
    made = []
    monkeypatch.setattr(LazyMask, "dense", lambda mask: made.append(mask))
    found = without.train()
    assert not made
    monkeypatch.undo()
    monkeypatch.setattr("lowbit.finetune.session.attention_", lambda model: None)
    masked = session_of(directory, tmp_path / "with", config)
    assert masked.model.config._attn_implementation == "sdpa"
    expected = masked.train()
    assert found.train == pytest.approx(expected.train, rel=1e-5)
    assert dict(found.held_out) == pytest.approx(dict(expected.held_out), rel=1e-5)


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
    assert "lowbit" not in (tmp_path / "out/model/config.json").read_text()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out/model")
    base = transformers.AutoModelForCausalLM.from_pretrained(directory)
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, base.state_dict()[name])]
    assert any("q_proj" in name for name in changed) and (adapters == "0") == any("norm" in name for name in changed)
    assert (tmp_path / "out/adapter").exists() == (adapters != "0")
    again = runner.invoke(app, command)
    assert again.exit_code and "holds a run" in str(again.output) + str(again.exception)


TAIL, WATCH = (refusal(name, "train") for name in ("tail memory", "watch memory"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--text", "x.txt", "--layers", "2"], "--layers applies to the demo"),
        ([], "expects --text"),
        (["--text", "missing.txt"], "missing.txt does not exist"),
        (["--text", "x.txt", "--precision", "fp8", "--precision", "bf16"], "MODEL is trained once"),
        (["--text", "x.txt", "--precision", "fp16"], "bf16 needs no loss scaling"),
        (["--text", "x.txt", "--precision", "int8-weight-only"], "int8-weight-only"),
        (["--text", "x.txt", "--watch", "5"], "watch needs a precision that is a training recipe"),
        (
            ["--text", "x.txt", "--precision", "bf16", "--tail", "0.5"],
            "tail needs a precision that is a training recip",
        ),
        (
            ["--text", "x.txt", "--precision", "fp8", "--tail", "0.5", "--memory", "1GiB"],
            refusal("tail memory", "train"),
        ),
        (
            ["--text", "x.txt", "--precision", "fp8", "--watch", "5", "--memory", "1GiB"],
            refusal("watch memory", "train"),
        ),
        (["--text", "x.txt", "--precision", "mxfp4", "--memory", "1GiB"], "plans know fp32, as loaded, bf16, fp8"),
        (["--text", "x.txt", "--strategy", "zero1"], "torchrun --nproc-per-node 2 -m lowbit train"),
    ],
)
def test_options_that_do_not_apply_are_refused(options, reason, directory, tmp_path):
    result = CliRunner().invoke(app, ["train", str(directory), "--out", str(tmp_path), *options])
    assert result.exit_code and reason in str(result.output) + str(result.exception)


# -- precisions --------------------------------------------------------------------------------------------------------
FP8 = replace(CONFIG, precision="fp8", outside="fp32", steps=6, save_every=3)


def test_watching_changes_no_bit_and_records_the_casts_of_the_watched_steps(directory, tmp_path):
    plain, watched = (session_of(directory, tmp_path / str(every), replace(FP8, watch=every)) for every in (0, 3))
    assert plain.train().train == watched.train().train
    rows = watched.watch.rows
    assert {row.step for row in rows} == {0, 3} and all(torch.equal(a, b) for a, b in zip(
        state(plain).values(), state(watched).values(), strict=True))  # fmt: skip
    fp8 = {row.layer for row in rows if row.role == "output.a" and row.cast.startswith("fp8_e4m3")}
    assert len(fp8) == 2 * 7, "each Linear of two blocks, and not the head"


def test_the_tail_computes_without_the_recipe(directory, tmp_path):
    """The oracle takes the weights and states at the start of the tail, and goes on in plain fp32 by torch."""
    session = session_of(directory, tmp_path, replace(FP8, tail=0.5))
    before = {}

    def note(now):
        if now.step == 3:
            before.update(model=state(now), optimizer=copy.deepcopy(now.run.optimizer.state_dict()))

    losses = session.train(note).train
    model = transformers.LlamaForCausalLM.from_pretrained(directory).train()
    names = dict(model.named_parameters())
    model.load_state_dict({name: value for name, value in before["model"].items() if name in names}, strict=False)
    model.tie_weights()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    optimizer.load_state_dict(before["optimizer"])
    for step in range(3, 6):
        for group in optimizer.param_groups:
            group["lr"] = FP8.lr_at(step)
        loss = model(**session.rows.batch(step, FP8.rows), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), FP8.clip)
        optimizer.step()
        optimizer.zero_grad()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-6)
    full = session_of(directory, tmp_path / "full", FP8).train().train
    assert full[:4] != losses[:4] or full[4:] != losses[4:]


@pytest.mark.parametrize("stop_at", [2, 4])
def test_a_run_with_watch_and_tail_resumes_with_the_same_bits(stop_at, directory, tmp_path):
    config = replace(FP8, watch=2, tail=0.5)
    whole = session_of(directory, tmp_path / "whole", config)
    whole.train()
    stopped = session_of(directory, tmp_path / "stopped", config)
    with pytest.raises(Interrupted):
        stopped.train(lambda now: os.kill(os.getpid(), signal.SIGINT) if now.step == stop_at else None)
    resumed = session_of(directory, tmp_path / "stopped", config)
    resumed.load()
    assert resumed.train() == replace(
        whole.history, seconds=resumed.history.seconds, peak_bytes=resumed.history.peak_bytes
    )
    assert all(torch.equal(value, state(whole)[name]) for name, value in state(resumed).items())
    assert resumed.watch.rows == whole.watch.rows


@pytest.mark.parametrize("adapters", [0, 4])
def test_a_recipe_trains_and_leaves_a_plain_model(adapters, directory, tmp_path):
    config = replace(FP8, steps=30, adapters=adapters, precision="fp8-block", outside="bf16")
    session = session_of(directory, tmp_path, config)
    losses = session.train().held_out
    assert losses[-1][1] < losses[0][1] - 0.5
    session.write_model(tmp_path / "model", transformers.AutoTokenizer.from_pretrained(directory))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {type(layer).__name__ for layer in model.modules() if "Linear" in type(layer).__name__} == {"Linear"}
    assert held_out_loss(model, session.held_out, 32, 2) == pytest.approx(losses[-1][1], abs=0.05)


# -- memory ------------------------------------------------------------------------------------------------------------
def test_a_held_out_loss_of_a_fused_model_needs_no_logits(directory):
    """Logits of 24 rows of 64 tokens are 24 x 64 x 257 fp32 numbers, more than all other tensors of the forward."""
    model = transformers.LlamaForCausalLM.from_pretrained(directory)
    ids = torch.randint(257, (24, 64), generator=torch.Generator().manual_seed(0))
    rows = {"input_ids": ids, "labels": ids}
    expected = held_out_loss(model, rows, 24, 24)
    plain = lb.memory.allocated_peak(lambda: held_out_loss(model, rows, 24, 24), "cpu")
    lb.memory.fuse_loss_(model)
    fused = lb.memory.allocated_peak(lambda: held_out_loss(model, rows, 24, 24), "cpu")
    assert held_out_loss(model, rows, 24, 24) == pytest.approx(expected, rel=1e-5)
    assert plain - fused > ids.numel() * 257 * 4 / 2
    with torch.no_grad():
        assert model.eval()(**rows).logits.shape == (24, 64, 257), "as before the measurement"


def test_a_state_is_written_without_a_copy_of_it_in_memory(directory, tmp_path, monkeypatch):
    pieces = []

    def note(path, write):
        class File:
            def write(self, piece):
                pieces.append(len(piece))
                return len(piece)

            def flush(self):
                pass

        write(File())
        write_checked(path, write)

    monkeypatch.setattr("lowbit.finetune.session.write_checked", note)
    session = session_of(directory, tmp_path)
    session.train()
    largest = max(value.nbytes for value in session.model.state_dict().values())
    assert max(pieces) <= largest < sum(pieces) / 4
    session_of(directory, tmp_path).load()
