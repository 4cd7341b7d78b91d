"""The command line: its version, errors without tracebacks, and the Makefile's targets that call it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lowbit as lb

ENGLISH = Path(__file__).parents[1] / "data" / "english.txt"
TINY = (
    f"--data {ENGLISH} --batch 2 --context 32 --dim 32 --heads 2 --hidden 64 --layers 2 --vocab 300 --steps 60 "
    "--eval-every 20 --save-every 5 --precision bf16 --precision fp8 --recipe int8 --recipe int4-weight-only:group32"
).split()


def test_the_version_is_printed(run):
    assert run("--version").strip() == f"lowbit {lb.__version__}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["formats", "fp9"], "unknown format 'fp9'"),
        *[
            (["formats", "int8", f"--scale={scale}"], f"real number or power, such as 0.25 or 2^-3, got '{scale}'")
            for scale in ("x", "1^", "nan", "-8^0.5", "10^400", "0^-1")
        ],
        (["formats", "[/foo]"], "unknown format '[/foo]'"),
        (["quantize", "my[run]", "int8"], "my[run] does not exist; expected a"),
        (["quantize", "[/foo]", "int8"], "[/foo] does not exist; expected a"),
        (["formats", "int4:row:e9m9"], "unknown or repeated option"),
        (["quantize", "/nowhere", "int9"], "unknown recipe 'int9'"),
        (["quantize", "/nowhere", "int8"], "does not exist"),
        (["train", "--resume", "--out", "/nowhere"], "nothing to resume"),
        (["train", "--out", "{tmp}", "--dim", "33"], "multiple of 2 * heads"),
        (["train", "--out", "{tmp}", "--recipe", "int9"], "unknown recipe"),
        (["train", "--out", "{tmp}", "--precision", "int8-weight-only"], "for inference only"),
        (["train", "--out", "{tmp}", "--data", "/nowhere"], "/nowhere cannot be read (No such file or directory)"),
        (["train", "--out", "{tmp}", *TINY, "--lr", "nan"], "lr must be positive and finite, got nan"),
        (["train", "--out", "{tmp}", *TINY, "--seed", "-1"], "seed must be from 0"),
        (["train", "--out", "{tmp}", *TINY, "--context", "1000000"], "do not fill one window of 1000000"),
        (["train", "--out", "{tmp}", *TINY, "--context", "8"], "too short for the sample text"),
        (["train", "--out", str(ENGLISH), *TINY], "english.txt is a file; pass a directory with --out"),
        (["train", "--out", "/dev/null/run", *TINY], "pass another directory with --out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_message(run, tmp_path, arguments, message):
    told = run(*(a.format(tmp=tmp_path / "run") for a in arguments), code=1)
    *warnings, error = told.splitlines()
    assert error.startswith("error: ") and message in error
    assert all(line.startswith("warning: train.mixed_: this processor has no") for line in warnings)
    assert not (tmp_path / "run").exists(), "a mistake must leave nothing behind"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "EOF"),
        ("[]", "model"),
        ("{}", "model"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}', "out of vocabulary"),
        ('{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', "integer `-1`"),
        ('{"model": {"type": "BPE", "vocab": {"a": 256}, "merges": []}}', "tokens beyond the model's 256"),
    ],
)
def test_a_damaged_tokenizer_is_one_message(tmp_path, text, why):
    from lowbit.demo import experiment
    from lowbit.demo.gpt import GPT, GPTConfig

    lb.save_model(GPT(GPTConfig(vocab=256, context=4, layers=1, heads=1, dim=2, hidden=2)), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        experiment.load(tmp_path / "model")
    told = str(caught.value)
    assert "tokenizer.json" in told and why in told and "copy" in told


@pytest.mark.parametrize(
    ("given", "finished", "replaces"), [("", True, True), ("", False, False), ("--steps 9", True, False)]
)
def test_make_demo_replaces_its_own_report_alone(tmp_path, given, finished, replaces):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    if finished:
        (tmp_path / "out/demo").mkdir(parents=True)
        (tmp_path / "out/demo/report.md").write_text("")
    makefile = Path(__file__).parents[2] / "Makefile"
    command = ["make", "-n", "-f", str(makefile), "demo", f"PYTHON={sys.executable}", f"ARGS={given}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and given in done.stdout, done.stderr
    assert ("train --overwrite" in done.stdout) == replaces


@pytest.mark.parametrize(("given", "recorded"), [("", True), ("--quick", False), ("--only encode", False)])
def test_make_bench_records_whole_runs_alone(given, recorded):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    command = ["make", "-n", "bench", f"PYTHON={sys.executable}", f"ARGS={given}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60)
    assert done.returncode == 0 and given in done.stdout, done.stderr
    assert ("bench/results" in done.stdout) == recorded
