"""What a plan is of, and what it says of models, batches, losses and arguments that it does not go with."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowbit as lb
from lowbit.plan import TECHNIQUES, TrainingPlan
from lowbit.plan.fitting import Run
from lowbit.plan.fitting.adapt import fallback, permits
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject
from lowbit.plan.techniques import MICRO_BATCHES

INPUTS, CLASSES = torch.randn(64, 32), torch.randint(10, (64,))


def classifier(classes=10):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, classes))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = classifier()

    def forward(self, inputs, mask=None):
        return self.inner(inputs)


def by_hand(steps):
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = F.cross_entropy(model(INPUTS), CLASSES)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@pytest.mark.parametrize(
    ("make", "batch", "loss"),
    [
        (classifier, (INPUTS, CLASSES), lambda output, batch: F.cross_entropy(output, batch[1])),
        (
            Named,
            {"inputs": INPUTS, "classes": CLASSES},
            lambda output, batch: F.cross_entropy(output, batch["classes"]),
        ),
    ],
)
def test_what_the_forward_does_not_take_is_for_the_loss_that_is_given(make, batch, loss):
    plan = lb.fit(make(), batch, "90%", loss, require=("fp32", "adamw", "memory", "activations in memory"))
    torch.manual_seed(0)
    model = make()
    run = plan.apply_(model, lr=1e-2)
    assert [run.step(batch) for _ in range(3)] == pytest.approx(list(by_hand(3)), rel=1e-5)
    with pytest.raises(TypeError, match=r"does not take the batch: .*; it takes \((input|inputs, mask=None)\).*loss="):
        lb.fit(make(), batch, "90%")


def test_a_plan_is_of_one_model_and_one_loss(tmp_path):
    def loss(output, batch):
        return F.cross_entropy(output, batch[1])

    batch = INPUTS, CLASSES
    plan = lb.fit(classifier(), batch, "100%", loss, require="fp32")
    again = TrainingPlan.load(plan.save(tmp_path / "plan.json"))
    with pytest.raises(ValueError, match=r"is for the loss function .*loss, which is not in the file; .*loss=\.\.\."):
        again.apply_(classifier())
    assert again.apply_(classifier(), loss).step(batch) == pytest.approx(next(by_hand(1)))
    with pytest.raises(ValueError, match=r"Sequential with '2.weight' of \[10, 64\] in float32, .* of \[11, 64\]"):
        plan.apply_(classifier(11), loss)
    frozen = classifier()
    frozen[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"float32, frozen; plan for this model"):
        plan.apply_(frozen)
    with pytest.raises(ValueError, match="on the meta device, without data"):
        plan.apply_(classifier().to("meta"))
    model = classifier()
    plan.apply_(model)
    with pytest.raises(ValueError, match=r"already trains with a plan; .*run\.refit"):
        plan.apply_(model)


def test_a_larger_batch_than_planned_is_told_of(recwarn):
    def loss(output, batch):
        return F.cross_entropy(output, batch[1])

    plan = lb.fit(classifier(), (INPUTS, CLASSES), "100%", loss, require=("fp32", "adamw"))
    run, larger = plan.apply_(classifier()), (INPUTS.repeat(2, 1), CLASSES.repeat(2))
    run.step((INPUTS[:8], CLASSES[:8]))
    assert not recwarn.list
    for _ in range(2):
        run.step(larger)
    (one,) = recwarn.list
    assert "the batch has 4224 elements, and the plan is of one with 2112" in str(one.message)
    run.step((INPUTS.repeat(3, 1), CLASSES.repeat(3)))
    assert len(recwarn.list) == 2, "larger than the one that was told of"
    run.refit("100MiB", larger)
    run.step(larger)
    assert len(recwarn.list) == 2, "the run is of the larger one by now"


def test_a_model_in_evaluation_mode_is_told_of():
    with pytest.warns(UserWarning, match=r"fit: Sequential is in evaluation mode.*call model\.train\(\)") as told:
        plan = lb.fit(classifier().eval(), INPUTS, "100%", require=("fp32", "adamw"))
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match=r"plan\.apply_: Sequential is in evaluation mode"):
        plan.apply_(classifier().eval())


@pytest.mark.parametrize(
    ("model", "batch", "options", "message"),
    [
        (Named, INPUTS, {}, "got the class Named; "),
        (classifier(), INPUTS.numpy(), {}, r"got ndarray; .*torch\.from_numpy"),
        (classifier(), [INPUTS].__iter__(), {}, r"got list_iterator; from a DataLoader pass one batch"),
        (classifier(), INPUTS, {"budget": "0%"}, "or a share such as '60%', got '0%'"),
        (classifier(), INPUTS, {"loss": lambda output, batch: output}, r"got shape \[64, 10\]; take its mean"),
        (classifier(), INPUTS, {"loss": lambda output, batch: output.detach().mean()}, "has no gradient"),
        (classifier(), INPUTS, {"loss": lambda output, batch: output.mean() * output.max().item()},
         r"the loss reads values of tensors .*; return a tensor, without item\(\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_says_why(model, batch, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        lb.fit(model, batch, **({"budget": "90%"} | options))


def test_a_batch_of_wrong_shapes_raises_without_a_log(caplog):
    with pytest.raises(RuntimeError, match=r"\[4, 31\] X \[32, 64\]"):
        lb.fit(classifier(), torch.randn(4, 31), "90%")
    assert not caplog.records


def test_optimizers_and_recipes_that_take_no_fp64_are_left_out():
    plan = lb.fit(classifier().double(), INPUTS.double(), "100%")
    assert plan.settings.bits == 32 and plan.settings.precision is None
    assert lb.fit(classifier(), INPUTS, "100%", require="adamw8bit").settings.bits == 8, "one name is a name"


# -- parts ------------------------------------------------------------------------------------------------------------
def summed(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum")


def masked(output, batch):
    return F.cross_entropy(output, batch[1].masked_fill(batch[1] > 6, -100))


def test_a_summed_loss_is_not_taken_in_parts(tmp_path):
    batch = INPUTS, CLASSES
    run = Run(classifier(), TrainingSettings(micro_batches=4), summed, tmp_path, {})
    before = copy.deepcopy(run.model.state_dict())
    with pytest.raises(
        ValueError, match=r"the loss of some rows is .*, the sum of .*; divide the loss .*exclude=\('micro-batches',\)"
    ):
        run.step(batch)
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    assert all(parameter.grad is None for parameter in run.model.parameters())
    assert Run(classifier(), TrainingSettings(), summed, tmp_path, {}).step(batch) == pytest.approx(
        64 * next(by_hand(1))
    )
    for loss in (masked, lambda output, batch: output.square().mean(), lambda output, batch: output.var(0).sum()):
        Run(classifier(), TrainingSettings(micro_batches=4), loss, tmp_path, {}).step(batch)


def test_plans_without_parts_are_in_one_and_stay_so():
    loss = lambda output, batch: F.cross_entropy(output, batch[1])
    plan = lb.fit(classifier(), (INPUTS, CLASSES), "100%", loss, exclude=("micro-batches",), require=("fp32",))
    predictions = list(plan._others.values())
    assert {one.settings.micro_batches for one in predictions} == {1} and not permits(
        predictions, TECHNIQUES[MICRO_BATCHES][1]
    )
    kept = lb.fit(classifier(), (INPUTS, CLASSES), "100%", loss, require=("fp32", "micro-batches"))
    assert kept.settings.micro_batches == 2 and "2 micro-batches" in kept.table()
    with pytest.raises(ValueError, match="the batch has no 'micro-batches': it has one row"):
        lb.fit(classifier(), (INPUTS[:1], CLASSES[:1]), "100%", loss, require=("micro-batches",))


def test_parts_of_a_batch_norm_have_two_rows_at_least():
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    loss, left_out = lambda output, batch: F.cross_entropy(output, batch[1]), ("fp8", "fp8-compressed", "disk")
    plan = lb.fit(model, (INPUTS[:63], CLASSES[:63]), "60%", loss, exclude=left_out)
    assert max(one.settings.micro_batches for one in plan._others.values()) == 24
    assert plan.apply_(model).step((INPUTS[:63], CLASSES[:63])) > 0
    few = fallback(TrainingSettings(micro_batches=31), Subject(model.train(), INPUTS[:63]))
    assert few is not None and few.micro_batches == 31


def test_a_loss_that_is_no_mean_over_rows_is_told_of_in_parts(tmp_path):
    labels = torch.randint(10, (8, 12))
    labels[1:, 2:] = -100

    def of_labels(output, batch):
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())

    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 10))
    run = Run(model, TrainingSettings(micro_batches=2), of_labels, tmp_path, {})
    message = r"the loss of some rows is .*, and not the mean of .*exclude=\('micro-batches',\)"
    with pytest.warns(UserWarning, match=message):
        run.step((labels.clamp_min(0), labels))


def test_padding_that_parts_have_different_shares_of_is_told_of(tmp_path, recwarn):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 10))

        def forward(self, input_ids, attention_mask):
            return self.layers(input_ids)

    mask = torch.ones(8, 12, dtype=torch.long)
    batch = {"input_ids": torch.randint(10, (8, 12)), "attention_mask": mask}
    run = Run(Model(), TrainingSettings(micro_batches=2), None, tmp_path, {})
    run.step(batch)
    assert not [str(one.message) for one in recwarn if "not the mean" in str(one.message)]
    mask[1:, 3:] = 0
    with pytest.warns(UserWarning, match=r"the loss of some rows is .*, and not the mean of"):
        run.step(batch)


def test_a_loss_among_rows_that_transformers_names_is_not_taken_in_parts():
    parts = next(technique for technique in TECHNIQUES[MICRO_BATCHES] if technique.name == "micro-batches")
    assert parts.why_not(Subject(nn.Linear(1, 1), {"return_loss": True})) == "its loss compares rows of the batch"
    for batch in ({"return_loss": False}, INPUTS):
        assert parts.why_not(Subject(nn.Linear(1, 1), batch)) is None


def test_options_of_the_optimizer_are_looked_at_before_the_model_changes():
    plan, model = lb.fit(classifier(), INPUTS, "100%", require=("bf16",)), classifier()
    with pytest.raises(TypeError, match="learning_rate"):
        plan.apply_(model, learning_rate=1e-3)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    plan.apply_(model, lr=1e-3)


def test_a_criterion_of_torch_is_told_how_it_becomes_a_loss():
    with pytest.raises(TypeError, match=r"the loss failed: .*criterion\(output, batch\[1\]\)"):
        lb.fit(classifier(), (INPUTS, CLASSES), "100%", nn.CrossEntropyLoss())


def test_a_model_in_bf16_has_the_masters_that_its_plan_says():
    made = [classifier().bfloat16() for _ in range(2)]
    plan = lb.fit(made[0], INPUTS.bfloat16(), "300%", require=("adamw", "residual", "whole batch"))
    assert plan.settings.bf16_params and "weights in bf16, the model's own precision" in str(plan)
    run, rows = plan.apply_(made[0], lr=1e-5), INPUTS.bfloat16()
    optimizer = lb.optim.AdamW(made[1].parameters(), lr=1e-5, master="residual")
    for _ in range(20):
        run.step(rows)
        lb.memory.usual_loss(made[1](rows), rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(run.optimizer, lb.optim.AdamW)
    for one, other in zip(*(model.parameters() for model in made), strict=True):
        assert torch.equal(one, other)


def test_labels_of_encoders_with_decoders_are_not_shifted():
    transformers = pytest.importorskip("transformers", minversion="5")
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, dropout_rate=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model, labels = transformers.T5ForConditionalGeneration(config).train(), torch.randint(64, (8, 12))
    labels[1:, 3:] = -100
    batch = {"input_ids": torch.randint(64, (8, 10)), "labels": labels}
    expected = model(**batch).loss.item()
    assert Run(model, TrainingSettings(micro_batches=4), None, None, {}).step(batch) == pytest.approx(
        expected, rel=1e-6
    )


# -- models and losses that are more than a model and its rows -------------------------------------------------------
class Pairs(nn.Module):
    """Of an even number of rows."""

    def __init__(self):
        super().__init__()
        self.inner = classifier()

    def forward(self, inputs):
        first, second = self.inner(inputs).chunk(2)
        return first - second


class Prior(nn.Module):
    """With a number for each class, of as many as there may be rows."""

    def __init__(self):
        super().__init__()
        self.inner = classifier()

    def forward(self, inputs, prior):
        return self.inner(inputs) + prior


def squares(output, batch):
    return output.square().mean()


def test_parameters_that_the_loss_depends_on_keep_their_gradients():
    torch.manual_seed(0)
    net, other = classifier(), nn.Linear(10, 1)
    other(torch.randn(2, 10)).sum().backward()
    kept = [p.grad for p in other.parameters()]
    before = [p.grad.clone() for p in other.parameters()]

    def loss(output, batch):
        return other(output).square().mean() + 1e-3 * sum(p.square().sum() for p in net.parameters())

    lb.fit(net, INPUTS, "100%", loss, require=("fp32", "adamw"))
    lb.estimate(net, INPUTS, loss)
    assert all(p.grad is None for p in net.parameters())
    assert all(
        p.grad is one and torch.equal(one, was) for p, one, was in zip(other.parameters(), kept, before, strict=True)
    )


@pytest.mark.parametrize(
    ("make", "batch"),
    [(Pairs, INPUTS), (Prior, (INPUTS[:10], torch.rand(10))), (Prior, (INPUTS[:20], torch.rand(10)))],
)
def test_a_batch_that_cannot_be_cut_is_kept_whole(make, batch):
    torch.manual_seed(0)
    for no in ((), ("micro-batches",)):
        plan = lb.fit(make(), batch, "100%", squares, require=("fp32", "adamw"), exclude=no)
        assert plan.settings.micro_batches == 1 and all(one.settings.micro_batches == 1 for one in plan.frontier)
        assert plan.apply_(make()).step(batch) > 0
    with pytest.raises(
        ValueError, match="the batch has no 'micro-batches': it has one row, or the model or the loss fails"
    ):
        lb.fit(make(), batch, "100%", squares, require=("micro-batches",))


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_models_within_others_take_targets_beside_the_batch(wrap):
    def loss(output, batch):
        return F.cross_entropy(output, batch[1])

    assert lb.fit(wrap(classifier()), (INPUTS, CLASSES), "100%", loss, require=("fp32", "adamw")).peak_bytes > 0


def test_a_model_without_blocks_fits_with_activations_elsewhere(tmp_path):
    torch.manual_seed(0)
    sizes = (32, 512, 384, 640, 10)
    layers = [m for one, other in itertools.pairwise(sizes) for m in (nn.Linear(one, other), nn.GELU())]
    model, batch = nn.Sequential(nn.Sequential(*layers[:3]), *layers[3:]), torch.randn(4096, 32)
    limits = {"exclude": ("micro-batches",)}
    whole = lb.fit(model, batch, "100%", squares, require=("fp32", "adamw", "activations on disk"), **limits)
    share = whole.peak_bytes / whole.plain.peak_bytes
    assert share < 0.8
    fitting = lb.fit(model, batch, f"{100 * share + 2:.0f}%", squares, require=("fp32", "adamw"), **limits)
    assert fitting.settings.offload_activations and fitting.peak_bytes <= fitting.budget
