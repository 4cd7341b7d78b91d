"""The command line: published examples, JSON, errors without tracebacks, and Ctrl-C that loses nothing."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lowbit as lb
from lowbit.formats import FORMATS

torch = pytest.importorskip("torch")

ENGLISH = Path(__file__).parent / "data" / "english.txt"
TINY = (
    f"--data {ENGLISH} --batch 2 --context 32 --dim 32 --heads 2 --hidden 64 --layers 2 --vocab 300 --steps 60 "
    "--eval-every 20 --save-every 5 --precision bf16 --precision fp8 --recipe int8 --recipe int4-weight-only:group32"
).split()


@pytest.fixture
def run(monkeypatch, capsys):
    """The command in this process, which is quicker: ``run("formats")`` gives what it prints, or complains of."""
    import lowbit.cli as cli

    def call(*arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["lowbit", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as stop:
            cli.main()
        told = capsys.readouterr()
        assert (stop.value.code or 0) == code, told.err
        return told.err if code else told.out

    return call


@pytest.fixture
def one_thread():
    """As the interrupted process runs: another number of threads could round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- formats ---------------------------------------------------------------------------------------------------------
def lines_of(text: str) -> dict[str, str]:
    """Value by bits."""
    return dict(re.findall(r"^0x[0-9a-f]+  (\S+)\s+(\S+)", text, re.MULTILINE))


def test_formats_lists_every_format(run):
    table = run("formats")
    assert [line.split()[0] for line in table.splitlines()[1:] if line][: len(FORMATS)] == list(FORMATS)
    assert max(map(len, table.splitlines())) <= 80
    assert {row["name"] for row in json.loads(run("formats", "--json"))} == set(FORMATS)


def test_published_examples_come_out(run):
    e4m3 = lines_of(run("formats", "fp8_e4m3"))
    assert len(e4m3) == 256
    expected = {
        "0|0110|100": "0.75",
        "1|1010|011": "-11",
        "0|0000|010": "2^-8",
        "0|1111|110": "448",
        "0|1111|111": "NaN",
    }
    assert {bits: e4m3[bits] for bits in expected} == expected
    e5m2 = lines_of(run("formats", "fp8_e5m2"))
    assert (e5m2["0|11111|00"], e5m2["1|11111|00"]) == ("Inf", "-Inf")
    biased = lines_of(run("formats", "e2m1b3"))
    assert (biased["0|00|1"], biased["0|11|1"], biased["1|11|0"]) == ("0.125", "1.5", "-1")
    assert lines_of(run("formats", "int8", "--scale", "2^-4"))["10000001"] == "-7.9375"
    assert lines_of(run("formats", "int4", "--scale", "0.25"))["0111"] == "1.75"


@pytest.mark.parametrize("name", [name for name, row in FORMATS.items() if row.bits <= 8])
def test_json_codes_decode_to_their_values(run, name):
    listed = json.loads(run("formats", name, "--json"))["codes"]
    codes = torch.tensor([line["code"] for line in listed], dtype=torch.uint8)
    values = torch.tensor([float(line["value"]) for line in listed])
    assert torch.equal(lb.decode(codes, name).nan_to_num(nan=7e4), values.nan_to_num(nan=7e4))
    assert [int(line["bits"].replace("|", ""), 2) for line in listed] == codes.tolist()


def test_formats_describes_schemes_and_wide_formats(run):
    assert "4.25" in run("formats", "mxfp4") and "1 x 128" in run("formats", "int4:group128")
    assert "too many to list" in run("formats", "bf16")


def test_the_version_is_printed(run):
    assert run("--version").strip() == f"lowbit {lb.__version__}"


@pytest.mark.parametrize("gpu", [False, True], ids=["no GPU", "GPU"])
def test_doctor_says_what_a_machine_can_use(run, monkeypatch, gpu):
    """Without a GPU nobody is told to install what only a GPU needs, and nothing for one is called ready."""
    from lowbit.backends import registry
    from lowbit.cli import doctor

    monkeypatch.setattr(doctor, "_has_gpu", lambda: gpu)
    monkeypatch.setattr(registry, "absent", lambda: {"cuda": "this torch has no CUDA; get another"})
    report = json.loads(run("doctor", "--json"))
    assert report["backends"]["reference"].endswith("ops on cpu, cuda" if gpu else "ops on cpu")
    assert report["backends"]["cuda"].startswith("missing: this torch" if gpu else "idle: not installed, and there")
    assert any("get another" in line for line in report["advice"]) == gpu
    interpreted = any(impl.backend == "triton" for impl in registry.impls("encode", "cpu"))
    if not interpreted and any(impl.backend == "triton" for impl in registry.impls("encode", "cuda")):
        assert report["backends"]["triton"].startswith("ready" if gpu else "idle: installed")


def test_doctor_repeats_no_record_of_an_earlier_build(run, monkeypatch):
    """As after an installation without native code and a build in place."""
    from lowbit.backends import native, registry

    pytest.importorskip("lowbit._native")
    monkeypatch.setattr(native, "build_notice", lambda: "switched off by LOWBIT_NATIVE=0")
    assert "switched off" not in " ".join(json.loads(run("doctor", "--json"))["advice"])
    monkeypatch.setattr(registry, "absent", lambda: {"cpu": "lowbit_ops.so cannot be loaded"})
    assert "switched off" in " ".join(json.loads(run("doctor", "--json"))["advice"])


def test_doctor_names_every_backend(run):
    report = json.loads(run("doctor", "--json"))
    assert set(report["backends"]) == set(lb.backends.BACKENDS)
    assert report["backends"]["reference"].startswith("ready")
    assert report["versions"]["torch"] == torch.__version__
    assert "advice" in run("doctor")


@pytest.mark.parametrize(
    ("set_to", "advised"),
    [
        ({}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "99"}, True),
        ({"LD_PRELOAD": "libtcmalloc.so"}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "99", "MALLOC_MMAP_THRESHOLD_": "99"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=99"}, False),
    ],
)
def test_doctor_advises_to_keep_memory_where_glibc_gives_it_back(run, monkeypatch, set_to, advised):
    from lowbit.cli import doctor

    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    for libc, here in (("glibc", advised), ("", False)):
        monkeypatch.setattr(doctor.platform, "libc_ver", lambda libc=libc: (libc, ""))
        report = json.loads(run("doctor", "--json"))
        assert any("MALLOC_TRIM_THRESHOLD_=" in line for line in report["advice"]) == here
        assert set_to.items() <= report["settings"].items()


# -- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["formats", "fp9"], "unknown format 'fp9'"),
        *[
            (["formats", "int8", f"--scale={scale}"], f"real number or power, such as 0.25 or 2^-3, got '{scale}'")
            for scale in ("x", "1^", "nan", "-8^0.5", "10^400", "0^-1")
        ],
        (["formats", "[/foo]"], "unknown format '[/foo]'"),
        (["quantize", "my[run]", "int8"], "my[run]/lowbit.json does not exist"),
        (["quantize", "[/foo]", "int8"], "[/foo]/lowbit.json does not exist"),
        (["formats", "int4:row:e9m9"], "unknown or repeated option"),
        (["quantize", "/nowhere", "int9"], "unknown recipe 'int9'"),
        (["quantize", "/nowhere", "int8"], "does not exist"),
        (["train", "--resume", "--out", "/nowhere"], "nothing to resume"),
        (["train", "--out", "{tmp}", "--dim", "33"], "multiple of 2 * heads"),
        (["train", "--out", "{tmp}", "--recipe", "int9"], "unknown recipe"),
        (["train", "--out", "{tmp}", "--precision", "int8"], "for inference only"),
        (["train", "--out", "{tmp}", "--data", "/nowhere"], "/nowhere cannot be read (No such file or directory)"),
        (["train", "--out", "{tmp}", *TINY, "--lr", "nan"], "lr must be positive and finite, got nan"),
        (["train", "--out", "{tmp}", *TINY, "--seed", "-1"], "seed must be from 0"),
        (["train", "--out", "{tmp}", *TINY, "--context", "1000000"], "do not fill one window of 1000000"),
        (["train", "--out", "{tmp}", *TINY, "--context", "8"], "too short for the sample text"),
        (["train", "--out", str(ENGLISH), *TINY], "english.txt is a file; give a directory with --out"),
        (["train", "--out", "/dev/null/run", *TINY], "give another directory with --out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_message(run, tmp_path, arguments, message):
    told = run(*(a.format(tmp=tmp_path / "run") for a in arguments), code=1)
    assert told.startswith("error: ") and message in told
    assert not (tmp_path / "run").exists(), "a mistake must leave nothing behind"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[]", "a JSON list, not an object"),
        ("{}", "a list of merges"),
        ('{"merges": 3}', "a list of merges"),
        ('{"merges": [[1, 2], [257, 1]]}', "token 257 must be a pair of earlier tokens, got [257, 1]"),
        ('{"merges": [[1, -2]]}', "pair of earlier tokens"),
        ('{"merges": [[1, "a"]]}', "pair of earlier tokens"),
        ('{"merges": [7]}', "token 256 must be a pair of earlier tokens, got 7"),
        (json.dumps({"merges": [[k, k] for k in range(255, 400)]}), "token 272 stands for 131072 bytes, and may for"),
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
    assert "tokenizer.json is damaged" in told and why in told and "copy" in told


# -- train -----------------------------------------------------------------------------------------------------------
def interrupted(directory: Path, number: int) -> str:
    """Start a run in a process of its own, stop it with a signal once it has saved a state, return what it says."""
    command = [sys.executable, "-m", "lowbit.cli", "train", "--out", str(directory), *TINY]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    while not (directory / "bf16" / "checkpoint.pt").exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    err = process.communicate(timeout=120)[1]
    assert process.returncode == 130, err
    assert "Traceback" not in err
    return err


def test_ctrl_c_loses_nothing(tmp_path, run, one_thread):
    pytest.importorskip("matplotlib")
    straight, stopped = str(tmp_path / "a"), str(tmp_path / "b")
    assert f"lowbit train --out {stopped} --resume" in interrupted(tmp_path / "b", signal.SIGINT)
    assert "unfinished run" in run("train", "--out", stopped, *TINY, code=1)
    assert "goes on with lr 0.005, not 0.5" in run("train", "--out", stopped, "--resume", "--lr", "0.5", code=1)
    resumed = json.loads(run("train", "--out", stopped, "--resume", "--json"))
    whole = json.loads(run("train", "--out", straight, *TINY, "--json"))
    for precision in ("bf16", "fp8"):
        for curve in ("train", "held_out"):
            assert resumed["runs"][precision][curve] == whole["runs"][precision][curve]
    kept = ("recipe", "loss", "bytes", "sample")
    assert [[row[k] for k in kept] for row in resumed["recipes"]] == [
        [row[k] for k in kept] for row in whole["recipes"]
    ]

    report = (tmp_path / "a" / "report.md").read_text()
    for link in re.findall(r"!\[.*?\]\((.*?)\)", report):
        assert (tmp_path / "a" / link).read_bytes().startswith(b"\x89PNG")
    assert all(name in report for name in ("fp32", "bf16", "fp8", "int8", "int4-weight-only:group32"))

    quantize = ("quantize", str(tmp_path / "a" / "model"), "int4-weight-only:group32")
    made = json.loads(run(*quantize, "--json"))
    assert made["bytes"] < 0.75 * made["bytes_before"] and made["skipped"] == ["lm_head"]
    model = lb.load_model(made["out"])
    assert (Path(made["out"]) / "tokenizer.json").read_bytes() == (tmp_path / "a/model/tokenizer.json").read_bytes()
    assert model(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 300)
    assert "exists" in run(*quantize, code=1)


def test_training_needs_no_matplotlib(tmp_path, run, monkeypatch, one_thread):
    from lowbit.demo import report

    find = report.find_spec
    monkeypatch.setattr(report, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    directory = tmp_path / "run"
    run("train", "--out", str(directory), *TINY, "--steps", "2", "--precision", "bf16", "--recipe", "int8")
    text = (directory / "report.md").read_text()
    assert "![" not in text and "| int8 |" in text
    assert not list(directory.glob("*.png")) and (directory / "report.json").exists()
    assert f"{sys.executable} -m pip install matplotlib" in report.without_plots()


# -- quantize ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def llama(tmp_path):
    """A directory as transformers writes it, with files of a tokenizer, and the model."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    directory = tmp_path / "llama"
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer.model", "LICENSE"):
        (directory / name).write_text(f"this is {name}")
    for name in (".hidden.json", "pytorch_model.bin", "model.safetensors.index.json", "code.py"):
        (directory / name).write_text("not to be copied")
    (directory / "model.safetensors.index.json").unlink()
    return directory, model


@pytest.mark.parametrize("dtype", ["auto", "fp32", "fp16"])
def test_quantize_takes_a_directory_of_transformers(run, llama, dtype):
    directory, model = llama
    made = json.loads(run("quantize", str(directory), "int8", "--dtype", dtype, "--json"))
    assert made["out"] == f"{directory}-int8" and len(made["converted"]) == 14 and made["skipped"] == ["lm_head"]
    assert made["bytes"] < made["bytes_before"]
    target = Path(made["out"])
    copied = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "LICENSE"}
    (weights,) = target.glob("weights-*.safetensors")
    assert {path.name for path in target.iterdir()} == {*copied, "lowbit.json", weights.name}
    assert all((target / name).read_bytes() == (directory / name).read_bytes() for name in copied)

    kind = {"auto": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[dtype]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(kind)
    lb.quantize_(model, "int8")
    loaded, x = lb.load_model(target), torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(loaded(x)[0], model(x)[0])
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight and loaded.lm_head.weight.dtype == kind


def test_quantize_prints_the_report_of_the_conversion(run, llama):
    directory, model = llama
    told = run("quantize", str(directory), "int8")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    assert str(lb.quantize_(model, "int8")) in told and f"saved in {directory}-int8; load it with" in told
    assert "quantized already" in run("quantize", f"{directory}-int8", "nf4", code=1)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda d: os.truncate(d / "model.safetensors", 100), "transformers cannot load {d}: "),
        (lambda d: (d / "model.safetensors").unlink(), "transformers cannot load {d}: OSError"),
        (lambda d: (d / "config.json").write_text("{"), "{d}/config.json is damaged: it is not JSON"),
        (lambda d: (d / "config.json").write_text("[" * 100_000), "{d}/config.json is damaged: it is nested too"),
        (lambda d: (d / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1000000000000}'),
         "transformers cannot load {d}: ValueError: 'num_hidden_layers' is 1000000000000, and may be 2048 at most"),
        (lambda d: (d / "config.json").write_text('{"model_type": "mine"}'), "transformers cannot load {d}: "),
        (lambda d: (d / "config.json").unlink(), "{d} is no saved model"),
    ],
)  # fmt: skip
def test_directories_that_transformers_cannot_load_are_one_message(run, llama, spoil, told):
    directory, _ = llama
    spoil(directory)
    assert told.format(d=directory) in run("quantize", str(directory), "int8", code=1)
    assert not Path(f"{directory}-int8").exists()


def test_quantize_without_transformers_says_what_to_install(run, llama, monkeypatch):
    directory, _ = llama
    monkeypatch.setitem(sys.modules, "transformers", None)
    told = run("quantize", str(directory), "int8", code=1)
    assert f"loading {directory} needs transformers: {sys.executable} -m pip install 'transformers>=4.56'" in told


@pytest.mark.parametrize(
    ("given", "precisions", "outside"),
    [
        ([], "{default} fp8", "{default}"),
        (["--precision", "fp8"], "fp8", "{default}"),
        (["--precision", "fp32", "--precision", "mxfp8"], "fp32 mxfp8", "fp32"),
        (["--precision", "fp8", "--precision", "bf16"], "fp8 bf16", "bf16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("default", ["bf16", "fp32"])
def test_the_precision_of_a_run_is_the_processors_unless_given(
    run, monkeypatch, tmp_path, default, given, precisions, outside
):
    """Stopped before the first step, which leaves the settings that the run would have had."""
    from lowbit.demo.experiment import Settings

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    command = importlib.import_module("lowbit.cli.train")  # the package has a function of that name
    monkeypatch.setattr(command, "float_precision", lambda: default)
    monkeypatch.setattr(command, "_train", stop)
    run("train", "--out", str(tmp_path), "--data", str(ENGLISH), "--vocab", "300", *given, code=130)
    settings = Settings.load(tmp_path)
    assert settings.precisions == tuple(precisions.format(default=default).split())
    assert settings.train.outside == outside.format(default=default)
    assert {settings.of("fp8").outside, settings.of("fp8").precision} == {settings.train.outside, "fp8"}


def test_sigterm_saves_as_well(tmp_path):
    assert "saved in" in interrupted(tmp_path / "c", signal.SIGTERM)


# -- what a new run may remove -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["report.md", "report.json", "loss.png", "model/notes.txt", "bf16/checkpoint.pt"])
def test_train_overwrites_no_file_that_it_did_not_write(run, tmp_path, name):
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    for options in ([], ["--overwrite"]):
        told = run("train", "--out", str(tmp_path), *TINY, *options, code=1)
        assert "no settings.json beside it" in told and "another --out" in told
    assert mine.read_text() == "mine" and not (tmp_path / "settings.json").exists()


def test_train_refuses_the_settings_of_something_else(run, tmp_path):
    for text in ('{"editor.tabSize": 4}', "[]", "no json", "\xff"):
        (tmp_path / "settings.json").write_bytes(text.encode("latin-1"))
        (tmp_path / "report.md").write_text("mine")
        told = run("train", "--out", str(tmp_path), *TINY, "--overwrite", code=1)
        assert "is not what this lowbit train writes" in told and "another --out" in told
        assert (tmp_path / "report.md").read_text() == "mine"


def test_a_new_run_removes_the_states_of_the_last_one_alone(tmp_path):
    from lowbit.cli import train
    from lowbit.demo import experiment

    settings = experiment.Settings(precisions=("bf16", "fp8"))
    train._begin(settings, tmp_path, overwrite=False)
    for name in ("bf16", "fp8", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.pt").write_text(name)
    with pytest.raises(ValueError, match="holds an unfinished run; add --resume to go on with it, --overwrite to"):
        train._begin(settings, tmp_path, overwrite=False)
    (tmp_path / "report.md").write_text("of this run")
    with pytest.raises(ValueError, match="holds a finished run; add --overwrite to start over, or give another --out"):
        train._begin(settings, tmp_path, overwrite=False)
    train._begin(experiment.Settings(precisions=("fp32",)), tmp_path, overwrite=True)
    assert [path.parent.name for path in tmp_path.glob("*/checkpoint.pt")] == ["other"]


# -- when something is wrong -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variable", ["LOWBIT_ISA", "LOWBIT_WITHOUT"])
def test_doctor_shows_a_setting_that_the_kernels_refuse(variable):
    pytest.importorskip("lowbit._native")
    command = [sys.executable, "-m", "lowbit.cli", "doctor"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, variable: "sse9", "COLUMNS": "200"}, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "'sse9'" in done.stdout and "unusable: " in done.stdout and f"{variable}" in done.stdout
    assert "correct or unset LOWBIT_ISA and LOWBIT_WITHOUT" in done.stdout.split("advice")[1]


def test_results_say_what_the_kernels_saw():
    from lowbit.backends.cpu import processor
    from lowbit.machine import provenance

    seen = processor()
    told = provenance(kernels=seen)["kernels"]
    assert all(f"{key} {value}" in told for key, value in seen.items())


@pytest.mark.parametrize("has", [True, False])
def test_float_precision_is_known_without_capabilities(monkeypatch, has):
    """As on versions of torch that tell by another function."""
    import platform
    from types import SimpleNamespace

    from lowbit.machine import float_precision

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch, "cpu", SimpleNamespace(_is_avx512_bf16_supported=lambda: has))
    assert float_precision() == ("bf16" if has else "fp32")


@pytest.mark.parametrize(
    ("given", "finished", "replaces"), [("", True, True), ("", False, False), ("--steps 9", True, False)]
)
def test_make_demo_replaces_its_own_report_alone(tmp_path, given, finished, replaces):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    if finished:
        (tmp_path / "out/demo").mkdir(parents=True)
        (tmp_path / "out/demo/report.md").write_text("")
    makefile = Path(__file__).parents[1] / "Makefile"
    command = ["make", "-n", "-f", str(makefile), "demo", f"PYTHON={sys.executable}", f"ARGS={given}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and given in done.stdout, done.stderr
    assert ("train --overwrite" in done.stdout) == replaces


@pytest.mark.parametrize(("given", "recorded"), [("", True), ("--quick", False), ("--only encode", False)])
def test_make_bench_records_whole_runs_alone(given, recorded):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    command = ["make", "-n", "bench", f"PYTHON={sys.executable}", f"ARGS={given}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=60)
    assert done.returncode == 0 and given in done.stdout, done.stderr
    assert ("bench/results" in done.stdout) == recorded
