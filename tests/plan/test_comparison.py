"""Losses that nothing was recorded of: known by what they compute, and compared in fp32 and in the precision."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowbit as lb
from lowbit.memory.fake import fake_tensors
from lowbit.models.wrap import wrappers
from lowbit.plan import TrainingPlan
from lowbit.plan.fitting.comparison import compare, is_mean_of_cross_entropies
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject
from lowbit.sizes import share_changed

TOKENS = torch.randint(50, (16, 24), generator=torch.Generator().manual_seed(0))


def rows(logits, targets):
    return logits.flatten(0, 1), targets.flatten()


def log_probabilities(logits, targets):
    return logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def preference(logits, targets):
    of_sequences = log_probabilities(logits, targets).sum(-1)
    return -F.logsigmoid(of_sequences[::2] - of_sequences[1::2]).mean()


def choice_of_a_sequence(logits, targets):
    of_sequences = log_probabilities(logits, targets).sum(-1)
    return F.cross_entropy(of_sequences.view(-1, 2), torch.zeros(len(targets) // 2, dtype=torch.long))


def counted(logits, targets):
    return F.cross_entropy(*rows(logits, targets), reduction="sum") / (targets != 0).sum()


def weighed(logits, targets):
    return 0.5 * F.cross_entropy(*rows(logits, targets)) + F.cross_entropy(*rows(logits, targets), label_smoothing=0.1)


def by_image(logits, targets):
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")[1:].mean()


MEANS = {
    "cross_entropy": lambda logits, targets: F.cross_entropy(*rows(logits, targets)),
    "ignored": lambda logits, targets: F.cross_entropy(*rows(logits, targets), ignore_index=0) * 2,
    "nll_loss": lambda logits, targets: F.nll_loss(*rows(logits.log_softmax(-1), targets)),
    "by hand": lambda logits, targets: -log_probabilities(logits, targets).mean(),
    "sums of rows": lambda logits, targets: -log_probabilities(logits, targets).sum(-1).mean(),
    "counted": counted,
    "weighed": weighed,
    "by image": by_image,
}
OTHERS = {
    "preference": preference,
    "choice of a sequence": choice_of_a_sequence,
    "difference": lambda logits, t: F.cross_entropy(*rows(logits, t)) - 0.5 * F.cross_entropy(*rows(logits, 0 * t)),
    "negative weight": lambda logits, t: (
        F.cross_entropy(*rows(logits, t)) + -0.5 * F.cross_entropy(*rows(logits, 0 * t))
    ),
    "perplexity": lambda logits, t: F.cross_entropy(*rows(logits, t)).exp(),
    "squares": lambda logits, t: logits.square().mean(),
    "router": lambda logits, t: F.cross_entropy(*rows(logits, t)) + 0.01 * logits.square().mean(),
    "reinforce": lambda logits, t: -(log_probabilities(logits, t) * torch.linspace(-1, 1, t.shape[1])).mean(),
    "unlikely": lambda logits, t: log_probabilities(logits, t).mean(),
    "entropy": lambda logits, t: (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean(),
    "product": lambda logits, t: F.cross_entropy(*rows(logits, t)) * logits.mean(),
}


@pytest.mark.parametrize("name", [*MEANS, *OTHERS])
def test_the_graph_tells_means_of_cross_entropies_from_other_losses(name):
    loss = {**MEANS, **OTHERS}[name]

    def answered():
        logits = torch.randn(4, 8, 10, requires_grad=True) * 2
        return is_mean_of_cross_entropies(loss(logits, torch.randint(10, (4, 8))))

    with fake_tensors():
        fake = answered()
    assert answered() == fake == (name in MEANS)


def test_a_cross_entropy_without_logits_is_one_too():
    hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(10, 8, requires_grad=True)
    value = lb.memory.linear_cross_entropy(hidden, weight, torch.randint(10, (12,)))
    assert is_mean_of_cross_entropies(value) and not is_mean_of_cross_entropies(-value)
    assert not is_mean_of_cross_entropies(value.square())


class Head(nn.Module):
    """Logits; in training it draws, counts in a buffer and moves a table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner, self.out = nn.Embedding(50, 32), nn.Linear(32, 256), nn.Linear(256, 50)
        self.register_buffer("calls", torch.zeros(1))
        self.norm, self.drop = nn.BatchNorm1d(256), nn.Dropout(0.5)

    def forward(self, ids):
        random.random()
        self.calls += 1
        inner = F.gelu(self.inner(self.table(ids)))
        return self.out(self.drop(self.norm(inner.transpose(1, 2)).transpose(1, 2))) * 4


def planned(loss, model=None, batch=TOKENS, **options):
    options = {"require": ("bf16", "adamw"), "exclude": ("disk", "micro-batches"), "progress": False} | options
    return lb.fit(model or Head(), batch, "400%", loss, **options)


def of_answers(loss):
    return lambda output, batch: loss(output[:, :-1].float(), batch[:, 1:])


def test_a_plan_says_what_the_precision_makes_of_a_preference_loss(tmp_path):
    plan, model = planned(of_answers(preference)), Head().eval()
    with torch.no_grad():
        reference = of_answers(preference)(model(TOKENS), TOKENS).item()
        lb.train.mixed_(model, "bf16")
        lower = of_answers(preference)(model(TOKENS), TOKENS).item()
    assert (plan.compared.reference, plan.compared.lower) == (reference, lower) and reference != lower
    said = (
        f"yields {reference:.4g} in fp32 and {lower:.4g} in bf16, {share_changed((lower - reference) / reference, 2)}"
    )
    assert said in str(plan) and f"{share_changed(plan.compared.change / 100, 2)} (one forward)" in str(plan)
    loaded = TrainingPlan.load(plan.save(tmp_path / "plan.json"))
    assert loaded.compared == plan.compared and str(loaded) == str(plan)


def test_nothing_is_compared_where_records_or_a_caller_say_it():
    mean = of_answers(MEANS["cross_entropy"])
    plan = planned(mean)
    assert plan.compared is None and "cross-entropies" not in str(plan)
    assert planned(of_answers(preference), losses={"bf16": 0.1}).compared is None


def test_a_precision_that_is_not_chosen_is_compared_too():
    plan = planned(of_answers(preference), require=("adamw",), quality=0)
    assert plan.compared.precision == "bf16"
    assert ("bf16 (not chosen)" in str(plan)) == (plan.settings.precision is None)


def test_recipes_are_compared_with_fp32():
    model, settings = (
        Head(),
        {"bf16": TrainingSettings(precision="bf16"), "nvfp4": TrainingSettings(precision="bf16", recipe="nvfp4")},
    )
    bf16, nvfp4 = (
        compare(Subject(model, TOKENS, of_answers(preference)), one, name, 0) for name, one in settings.items()
    )
    assert bf16.reference == nvfp4.reference and abs(nvfp4.change) > abs(bf16.change) > 0


def test_comparing_leaves_no_trace():
    model = Head()
    model.out.bias.grad = torch.ones(50)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    ids, training = TOKENS.clone(), [module.training for module in model.modules()]
    found = compare(
        Subject(model, ids, of_answers(preference)), TrainingSettings(precision="bf16", recipe="fp8"), "fp8", 1 << 40
    )
    assert not found.why and found.reference != found.lower
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert torch.equal(ids, TOKENS) and [module.training for module in model.modules()] == training
    assert model.out.bias.grad.eq(1).all() and type(model.inner) is nn.Linear and not wrappers(model)


def test_a_loss_of_training_alone_is_compared_in_training():
    def loss(output, batch):
        return output["loss"]

    class Detector(Head):
        def forward(self, ids):
            logits = super().forward(ids)
            return {"loss": preference(logits[:, :-1].float(), ids[:, 1:])} if self.training else {}

    found = compare(Subject(Detector(), TOKENS, loss), TrainingSettings(precision="bf16"), "bf16", 1 << 40)
    assert found.reference is not None and found.lower is not None and found.reference != found.lower


def test_what_cannot_be_compared_says_why():
    squares = of_answers(OTHERS["squares"])
    on_meta = compare(Subject(Head().to("meta"), TOKENS, squares), TrainingSettings(precision="bf16"), "bf16", 1 << 40)
    assert "on meta, without data" in on_meta.words(True)
    large = compare(
        Subject(Head().bfloat16(), TOKENS, squares),
        TrainingSettings(bf16_params=True, loaded="bf16"),
        "as loaded",
        1000,
    )
    assert "need more memory than a step" in large.words(True)

    def fails(output, batch):
        raise RuntimeError("only on Mondays\nand so on")

    assert "RuntimeError: only on Mondays)" in compare(
        Subject(Head(), TOKENS, fails), TrainingSettings(), "bf16", 0
    ).words(True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_compared_with_fp32(dtype):
    model = Head().to(dtype).eval()
    plan = planned(of_answers(preference), model.train(), require=("as loaded", "adamw"))
    with torch.no_grad():
        lower = of_answers(preference)(model.eval()(TOKENS), TOKENS).item()
        reference = of_answers(preference)(model.float()(TOKENS), TOKENS).item()
    assert (plan.compared.reference, plan.compared.lower) == (reference, lower)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "fp16"), (torch.float64, "fp64")])
def test_models_in_fp16_and_fp64_train_as_loaded(dtype, name):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).to(dtype)

    def squares(output, batch):
        return (output.float() - batch.float()).square().mean()

    batch = torch.randn(8, 16, dtype=dtype)
    plan = lb.fit(model(), batch, "400%", squares, exclude=("disk", "micro-batches"), progress=False, quality="any")
    assert plan.settings.loaded == name and f"weights in {name}, the model's own precision" in str(plan)
    with pytest.raises(ValueError, match=f"'fp32' needs a model in fp32.*has weights in {name}"):
        lb.fit(model(), batch, "400%", squares, require=("fp32",))
    trained = model()
    run = plan.apply_(trained, lr=1e-2)
    losses = [run.step(batch) for _ in range(10)]
    assert losses[-1] < 0.9 * losses[0] and trained[0].weight.dtype == dtype
    if name == "fp16":
        assert run.optimizer.state[trained[0].weight]["master"].dtype == torch.float32
        assert plan.settings.master == TrainingSettings.master and "stores fp32 masters" in str(plan)


def test_adapters_beside_a_frozen_model_in_bf16_train_as_loaded():
    model = nn.Sequential(nn.Linear(16, 64).bfloat16().requires_grad_(False), nn.Linear(64, 16).bfloat16())
    assert planned(OTHERS["squares"], model, torch.randn(8, 16).bfloat16(), require=("as loaded",)).settings.bf16_params
    model[1].requires_grad_(False)
    model.append(nn.Linear(16, 16).bfloat16())
    model[2].weight.data = model[2].weight.data.bfloat16()
    plan = planned(OTHERS["squares"], model, torch.randn(8, 16).bfloat16(), require=("as loaded",))
    assert plan.settings.loaded == "bf16" and "weights in bf16, the model's own precision" in str(plan)
