"""The benchmark of fine-tuning: every program trains on the same numbers, and cells of equal settings are run once."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")
pytest.importorskip("accelerate")
import transformers

from lowbit.bench import finetune
from lowbit.bench.finetune_ways import LENGTH, RANK, ROWS, WAYS, Job, _by_plan, _by_trainer, config_of
from lowbit.finetune.texts import Document

BY_NAME = {way.name: way for way in WAYS}


@pytest.mark.parametrize("way", ["Trainer, all weights", "peft, adapters"])
def test_trainer_and_lowbit_train_on_the_same_rows_at_the_same_rates(way, tmp_path):
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    ids = torch.arange(8 * LENGTH).remainder(37).numpy()
    documents = [Document(ids, ids >= 0)]
    settings = config_of(BY_NAME[way], 6, 4)
    job = Job(tmp_path / "model", documents, documents, settings, tmp_path)
    found = {}
    for name, prepared in (
        ("lowbit", _by_plan(job, None)),
        ("whole", _by_trainer(job, BY_NAME[way].variants[0])),
        ("parts", _by_trainer(job, BY_NAME[way].variants[2])),
    ):
        steps = []
        prepared.train(lambda steps=steps: steps.append(None))
        assert len(steps) == 6
        found[name] = prepared.results()["held_out"]
    assert found["whole"] == pytest.approx(found["lowbit"], rel=1e-6)
    assert found["parts"] == pytest.approx(found["lowbit"], rel=1e-6)


def test_cells_of_equal_settings_are_measured_once_and_others_take_the_first_variant_that_runs(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("text")
    asked = []

    def ask(self, task, way, steps, **arguments):
        asked.append((task, way.name, steps, arguments.get("budget"), arguments.get("variant")))
        if task == "plan":
            settings = "small" if arguments["budget"] < 1 << 30 else "large"
            return {"fits": True, "settings": settings, "predicted": 1 << 20, "plan": {}}
        if arguments.get("variant", 0) < 2 and arguments.get("budget") is not None and way.variants:
            return {"fits": False, "why": "memory ran out in step 1"}
        return {"fits": True, "peak": 1 << 20, "seconds": 2.0, "processor_seconds": 3.0, "held_out": 3.0, "before": 3.5}

    monkeypatch.setattr(finetune._Bench, "ask", ask)
    monkeypatch.setattr(finetune._Bench, "make_model", lambda self: None)
    only = "plain|^lowbit, adapters|^peft, adapters"
    page = finetune.run(tmp_path, text, only)
    planned = [row for row in asked if row[1] == "lowbit, adapters" and row[3] is not None]
    assert [row[0] for row in planned] == ["plan", "measure", "plan", "plan", "plan", "measure", "plan"]
    others = [row for row in asked if row[1] == "peft, adapters"]
    assert [(row[2], row[4]) for row in others[:4]] == [(3, 0), (3, 1), (3, 2), (200, 2)]
    assert [row[4] for row in others[4:]] == [0, 1] * 4, "the third variant is known to run within the least budget"
    records = [json.loads(line) for line in (tmp_path / "finetune.jsonl").read_text().splitlines()]
    assert len(records) == 2 + 2 * len(finetune.BUDGETS)
    assert {record.get("measured_within") for record in records if "peft, adapters" in record["name"]} == {None, 250}
    assert f"rank {RANK}" in page.read_text()
    assert f"| {ROWS * LENGTH // 2} |" in page.read_text(), "tokens/s of steps of 2 s"
    asked.clear()
    finetune.run(tmp_path, text, only)
    assert not asked, "a finished run measures nothing"
