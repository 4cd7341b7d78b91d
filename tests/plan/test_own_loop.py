"""A plan in a training loop of one's own: the parts of ``Run.parts``, and the warning of a forward that takes more."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.plan import TrainingPlan
from lowbit.plan.fitting import Run
from lowbit.plan.fitting.rows import Rows
from lowbit.plan.settings import TrainingSettings

CONFIG = GPTConfig(vocab=64, layers=2, heads=2, dim=32, hidden=64)
ROWS = torch.randn(22, 8, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(22) % 4
TOKENS = torch.randint(64, (7, 16), generator=torch.Generator().manual_seed(1))


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)), nn.Sequential(nn.Linear(8, 4)))


def gpt():
    torch.manual_seed(0)
    return GPT(CONFIG)


def of_classes(output, batch):
    return F.cross_entropy(output, batch[1])


def llama():
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config).train()


def labeled():
    labels = TOKENS.clone()
    labels[0], labels[1, :9] = -100, -100
    return {"input_ids": TOKENS, "labels": labels}


def losses_by_parts(run, batch, of):
    """Two steps by hand."""
    losses = []
    for _ in range(2):
        total = 0.0
        for part, weight in run.parts(batch):
            loss = of(run.model, part) * weight
            loss.backward()
            total += loss.item()
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize(
    "settings",
    [
        TrainingSettings(micro_batches=3), TrainingSettings(micro_batches=4, checkpoint="block"),
        TrainingSettings(micro_batches=2, precision="bf16", bits=8),
        TrainingSettings(micro_batches=3, offload_activations=True),
        TrainingSettings(micro_batches=2, offload_states=True),
    ],
    ids=["parts", "checkpoints", "bf16", "activations on disk", "states on disk"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:train.mixed_. this processor")
@pytest.mark.parametrize("kind", ["classes", "tokens", "labels"])
def test_a_loop_over_parts_is_a_step_in_every_bit(settings, kind, tmp_path):
    make, batch, loss, of = {
        "classes": (classifier, (ROWS, CLASSES), of_classes, lambda model, part: of_classes(model(part[0]), part)),
        "tokens": (gpt, TOKENS, None, lambda model, part: lb.memory.usual_loss(model(part), part)),
        "labels": (llama, labeled(), None, lambda model, part: model(**part).loss),
    }[kind]
    runs = [Run(make(), settings, loss, tmp_path, {"lr": 1e-2}) for _ in range(2)]
    assert losses_by_parts(runs[1], batch, of) == [runs[0].step(batch) for _ in range(2)]
    assert all(map(torch.equal, *(run.model.parameters() for run in runs)))


def test_parts_without_labels_are_left_out_and_others_weigh_by_theirs(tmp_path):
    model, batch = llama(), labeled()
    run = Run(model, TrainingSettings(micro_batches=7), None, tmp_path, {})
    counted = (batch["labels"][:, 1:] != -100).sum(1).tolist()
    weights = [weight for _, weight in run.parts(batch)]
    assert weights == [count / sum(counted) for count in counted[1:]]


# -- the warning ------------------------------------------------------------------------------------------------------
def planned(model, batch, loss, **options):
    plan = lb.fit(
        model, batch, "100%", loss, require=("fp32", "adamw", "micro-batches", "everything kept"), exclude=("disk",),
        progress=False, **options,
    )  # fmt: skip
    return plan, plan.apply_(model, lr=1e-3)


def told(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught]


def test_a_loop_that_takes_the_whole_batch_is_warned_of_once(tmp_path):
    plan, run = planned(classifier(), (ROWS, CLASSES), of_classes)
    assert plan.settings.micro_batches == 2 and plan.identity.rows == Rows(22)

    def own():
        of_classes(run.model(ROWS), (ROWS, CLASSES)).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()

    (said,) = told(own)
    assert "a forward of Sequential got 22 rows, but the plan is for 2 micro-batches of at most 11 rows" in said
    assert "for part, weight in run.parts(batch)" in said
    assert told(own) == [], "once"

    loaded = TrainingPlan.load(plan.save(tmp_path / "plan.json"))
    assert loaded.identity == plan.identity
    model = classifier()
    again = loaded.apply_(model, of_classes)
    assert told(lambda: again.step((ROWS, CLASSES))) == []
    assert len(told(lambda: model(ROWS))) == 1, "a plan from a file knows the rows"


def test_what_takes_no_more_rows_or_does_not_train_is_not_warned_of():
    _, run = planned(classifier(), (ROWS, CLASSES), of_classes)
    model = run.model

    def quiet():
        run.step((ROWS, CLASSES))
        losses_by_parts(run, (ROWS, CLASSES), lambda model, part: of_classes(model(part[0]), part))
        with torch.no_grad():
            model(ROWS)
        model.eval()(ROWS)
        model.train()(ROWS[:11])
        lb.estimate(model, ROWS)
        run.refit("200%")
        copy.deepcopy(model)

    assert told(quiet) == []
    assert "got 12 rows" in told(lambda: model(ROWS[:12]))[0]


def test_a_wrong_forward_within_the_loop_is_warned_of():
    _, run = planned(classifier(), (ROWS, CLASSES), of_classes)

    def wrong():
        for _, weight in run.parts((ROWS, CLASSES)):
            (of_classes(run.model(ROWS), (ROWS, CLASSES)) * weight).backward()

    assert len(told(wrong)) == 1


def test_rows_are_those_of_the_argument_that_has_them():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, mask, inputs):
            return self.inner(inputs) + mask.sum()

    mask = torch.ones(40, 40)
    model, batch = Masked(), {"targets": CLASSES, "inputs": ROWS, "mask": mask}
    _, run = planned(model, batch, lambda output, batch: F.cross_entropy(output, batch["targets"]))
    assert told(lambda: run.model(mask=mask, inputs=ROWS[:11])) == []
    assert "got 13 rows" in told(lambda: run.model(inputs=ROWS[:13], mask=mask))[0]


def test_a_larger_batch_than_planned_is_told_of_once_by_the_loop_too():
    _, run = planned(classifier(), (ROWS, CLASSES), of_classes)
    large = torch.cat([ROWS, ROWS]), torch.cat([CLASSES, CLASSES])
    (said,) = told(lambda: list(run.parts(large)))
    assert "run.step: the batch has" in said
    assert told(lambda: run.step(large)) == [], "was said"


def test_the_watch_of_rows_keeps_no_model_and_no_run():
    _, run = planned(classifier(), (ROWS, CLASSES), of_classes)
    run.step((ROWS, CLASSES))
    gone = weakref.ref(run.model)
    gc.collect()
    gc.disable()
    try:
        del run
        assert gone() is None
    finally:
        gc.enable()


# -- the answer of the model ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings", [TrainingSettings(), TrainingSettings(micro_batches=2, checkpoint="block")], ids=["whole", "parts"]
)
@pytest.mark.parametrize("kind", ["own loss", "a loss that is given"])
def test_the_answer_is_gone_before_backward(settings, kind, tmp_path):
    loss = None if kind == "own loss" else lambda output, batch: output.loss
    model, alive, held = llama(), [], []
    model.register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output.logits)))
    model.lm_head.weight.register_hook(lambda grad: held.append(alive[-1]() is not None))
    run = Run(model, settings, loss, tmp_path, {})
    gc.disable()
    try:
        run.step(labeled())
    finally:
        gc.enable()
    assert len(held) == settings.micro_batches and not any(held)
