"""transformers' Trainer by a plan: its losses, weights and checkpoints beside those of the plan's own run."""

from __future__ import annotations

import copy

import pytest
import torch
from support.bits import same_bits

import lowbit as lb
from lowbit.plan import TrainingPlan
from lowbit.plan.fitting import Run
from lowbit.plan.fitting.identity import identity_of
from lowbit.plan.fitting.predict import Prediction
from lowbit.plan.settings import TrainingSettings, make_optimizer
from lowbit.plan.subject import Subject

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lowbit.integrations.trainer import plan_arguments  # noqa: E402

DELAYED = lb.Cast("fp8_e4m3:tensor", scale="delayed", history=3)
DRAWN = lb.Gemm(lb.Cast("fp8_e5m2:tensor", scale="delayed", rounding="stochastic", history=3), "reuse")
STATEFUL = lb.Recipe(lb.Gemm(DELAYED, DELAYED), DRAWN, DRAWN, name="delayed and drawn")
SETTINGS = {
    "plain": TrainingSettings(),
    "parts": TrainingSettings(checkpoint="block", micro_batches=2),
    "bf16, 8 bits, disk": TrainingSettings(precision="bf16", bits=8, offload_states=True, micro_batches=4),
    "fp8 with a state": TrainingSettings(recipe=STATEFUL, checkpoint="sqrt", micro_batches=2),
    "fp8 in bf16": TrainingSettings(
        precision="bf16", recipe="fp8", activation_codes=True, bits=8, offload_activations=True
    ),
}


def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def data():
    rows = torch.randint(64, (16, 24), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def plan_of(settings):
    chosen, plain = Prediction(settings, 1, 1.0), Prediction(TrainingSettings(), 1, 1.0)
    return TrainingPlan(chosen, 1, plain, [], identity=identity_of(Subject(model(), None)))


def arguments(directory, **more):
    given = {
        "max_steps": 4, "per_device_train_batch_size": 4, "save_steps": 2, "logging_steps": 1, "report_to": [],
        "seed": 3, "use_cpu": True, "disable_tqdm": True, "lr_scheduler_type": "constant", "learning_rate": 1e-3,
        **more,
    }  # fmt: skip
    return transformers.TrainingArguments(str(directory), **given)


def trainer(plan, args, directory, **more):
    made = transformers.Trainer(
        model(), train_dataset=data(), **plan_arguments(plan, args, directory=directory), **more
    )
    made.pop_callback(transformers.PrinterCallback)
    return made


class Recorded:
    """A collator that remembers what it has made."""

    def __init__(self):
        self.made = []

    def __call__(self, rows):
        batch = transformers.default_data_collator(rows)
        self.made.append(batch)
        return batch


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_plan_in_trainer_is_its_own_run(name, tmp_path):
    """Trainer divides the sum over a part by the number of all targets; ``loss`` does so too. It makes groups of
    parameters, whose order chooses the random bits of states of 8 bits.
    """
    settings, collator = SETTINGS[name], Recorded()
    args = arguments(tmp_path, max_grad_norm=0, save_strategy="no")
    made = trainer(plan_of(settings), args, tmp_path, data_collator=collator)
    made.train()
    losses = [row["loss"] for row in made.state.log_history if "loss" in row]
    assert made.args.per_device_train_batch_size * settings.micro_batches == 4 == args.per_device_train_batch_size

    def loss(output, part):
        return output.loss * settings.micro_batches

    run = Run(model(), settings, loss, tmp_path, {"lr": 1e-3})
    run.model.train()
    decay = made.get_decay_parameter_names(run.model)
    groups = [[p for n, p in run.model.named_parameters() if (n in decay) == first] for first in (True, False)]
    before = run.optimizer
    run.optimizer = make_optimizer([{"params": group} for group in groups], settings, lr=1e-3, weight_decay=0.0)
    run.optimizer.state.update(before.state)  # on disk masters are states already
    parts = collator.made
    found = []
    for step in range(4):
        taken = parts[step * settings.micro_batches : (step + 1) * settings.micro_batches]
        batch = {key: torch.cat([part[key] for part in taken]) for key in taken[0]}
        found.append(run.step({**batch, "num_items_in_batch": batch["labels"][:, 1:].ne(-100).sum()}))
    assert losses == pytest.approx(found, abs=1e-6)
    assert all(
        map(same_bits, (p.detach() for p in made.model.parameters()), (p.detach() for p in run.model.parameters()))
    )


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["parts", "bf16, 8 bits, disk", "fp8 with a state"])
def test_it_resumes_in_every_bit(name, tmp_path):
    plan, args = plan_of(SETTINGS[name]), arguments(tmp_path)
    straight = trainer(plan, args, tmp_path)
    straight.train()
    resumed = trainer(plan, args, tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert hasattr(resumed.optimizer.optimizer, lb.optim.offload.OFFLOADED) == plan.settings.offload_states
    assert resumed.state.global_step == 4
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert same_bits(a.detach(), b.detach())


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated")
def test_checkpointing_of_the_arguments_gives_way(tmp_path):
    calls = {}
    for own in (False, True):
        args = arguments(tmp_path, max_steps=1, gradient_checkpointing=own, save_strategy="no")
        made = trainer(plan_of(TrainingSettings(checkpoint="block")), args, tmp_path)
        count = calls[own] = []
        made.model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_, count=count: count.append(1))
        made.train()
        assert args.gradient_checkpointing == own
    assert len(calls[False]) == len(calls[True]) == 2


def test_parts_that_do_not_divide_the_batch_are_more(tmp_path):
    for rows, micro, parts in ((6, 4, 6), (6, 2, 2), (9, 2, 3), (5, 8, 5)):
        args = arguments(tmp_path, per_device_train_batch_size=rows, gradient_accumulation_steps=3)
        changed = plan_arguments(plan_of(TrainingSettings(micro_batches=micro)), args)["args"]
        assert (changed.per_device_train_batch_size, changed.gradient_accumulation_steps) == (rows // parts, 3 * parts)
        assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (rows, 3)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"bf16": True}, r"mixed precision.*leave out fp16 and bf16"),
        ({"auto_find_batch_size": True}, r"auto_find_batch_size, which cannot be combined"),
        ({"optim": "adafactor"}, r"other than AdamW.*set optim to one of adamw_torch"),
    ],
)
def test_what_trainer_cannot_do_is_refused(more, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        plan_arguments(plan_of(TrainingSettings()), arguments(tmp_path, **more))
    with pytest.raises(ValueError, match=r"ask for AdamW.*this plan uses another optimizer"):
        plan_arguments(plan_of(TrainingSettings(optimizer="lion", bits=8)), arguments(tmp_path))
    if "bf16" in more:
        plan_arguments(plan_of(TrainingSettings(precision="bf16")), arguments(tmp_path, **more))


def test_what_the_plan_did_not_make_is_refused(tmp_path):
    args, net = arguments(tmp_path), model()
    given = plan_arguments(plan_of(TrainingSettings(bits=8)), args)
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(ValueError, match=r"got optimizers=\(...\); leave it out"):
        only = {"args": given["args"], "callbacks": given["callbacks"]}
        transformers.Trainer(net, train_dataset=data(), optimizers=(optimizer, None), **only)
    made = transformers.Trainer(net, train_dataset=data(), **only)
    with pytest.raises(ValueError, match=r"expected the plan's lowbit.optim.adamw.AdamW, got torch.optim.adamw.AdamW"):
        made.train()
    with pytest.raises(ValueError, match=r"another Trainer's; call plan_arguments for each"):
        transformers.Trainer(model(), train_dataset=data(), **given)
    made = trainer(plan_of(TrainingSettings()), copy.copy(args), tmp_path)
    made.model = made.model_wrapped = model()
    with pytest.raises(ValueError, match=r"give Trainer a model, not model_init"):
        made.train()
