"""The page on a 7B model: sizes that can be counted by hand, and a part of the record computed again."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
from lowbit.bench import llama7b

RECORD = json.loads((Path(__file__).parents[2] / "bench" / "results" / "llama7b.json").read_text())
WAYS = {way.name: way for way in llama7b.WAYS}
PARAMETERS = 2 * 32000 * 4096 + 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)


@pytest.mark.parametrize(
    "name", [
        "the same, checkpointed blocks", "the same, optimizer steps in backward",
        "LoRA on nf4 (QLoRA), checkpointed blocks",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_part_of_the_record_is_computed_again(name):
    """Two decoder layers of the same width."""
    found, recorded = llama7b.estimated(WAYS[name], llama7b.PART), RECORD[str(llama7b.PART)][name]
    assert (found["weights"], found["states"]) == (recorded["weights"], recorded["states"])
    assert found["peak"] == pytest.approx(recorded["peak"], rel=0.01)


def test_the_record_has_every_way_and_its_columns_add_up():
    assert RECORD["parameters"] == PARAMETERS
    for layers in (llama7b.PART, llama7b.LAYERS):
        assert list(RECORD[str(layers)]) == list(WAYS)
        for sizes in RECORD[str(layers)].values():
            assert sizes["peak"] == sum(sizes[kind] for kind in ("weights", "states", "gradients", "rest"))
            assert min(sizes.values()) >= 0


@pytest.mark.parametrize(
    ("name", "weights", "states"),
    [
        ("fp32, AdamW", 4, 8),
        ("bf16 weights, fp32 masters, AdamW", 2, 12),
        ("the same, checkpointed blocks", 2, 3 + 8 / 256),
        ("bf16 weights, residual masters, AdamW8bit in backward, checkpointed blocks", 2, 3 + 8 / 256),
        ("bf16 weights, stochastic rounding, AdamW4bit, checkpointed blocks", 2, 1 + 8 / 128),
    ],
)
def test_weights_and_states_are_what_their_bytes_per_parameter_make(name, weights, states):
    sizes = RECORD[str(llama7b.LAYERS)][name]
    assert sizes["weights"] == pytest.approx(weights * PARAMETERS, rel=1e-4)
    assert sizes["states"] == pytest.approx(states * PARAMETERS, rel=1e-3)


def test_gradients_of_all_weights_are_in_a_step_that_has_no_activations():
    sizes = RECORD[str(llama7b.LAYERS)]["the same, checkpointed blocks"]
    assert sizes["gradients"] == pytest.approx(2 * PARAMETERS, rel=1e-4)


def test_the_table_says_what_fits():
    sizes = {"weights": 1 << 30, "states": 0, "gradients": 0, "rest": 20 << 30, "peak": 21 << 30}
    row = llama7b.table({"32": {"some way": sizes}}).splitlines()[-1]
    assert row == "| some way | 1.00 | 0.00 | 0.00 | 20.00 | 21.00 | yes | no |"
    sizes["peak"] = 22 << 30  # above nine tenths of 24
    assert llama7b.table({"32": {"some way": sizes}}).endswith("| 22.00 | no | no |")
