"""The gradient of a weight that an embedding shares with the last layer, beside autograd's sum of the parts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.models.wrap import unwrap, wrapper_of, wrappers
from lowbit.tiled.causal_loss import FusedEmbedding

transformers = pytest.importorskip("transformers", minversion="5")

VOCABULARY = 300
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48, "tie_word_embeddings": True}  # fmt: skip
#: Few different ones, so that rows have many terms.
IDS = torch.randint(1, 40, (2, 30), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


def llama(**options: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **options}))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "padding": lambda: llama(pad_token_id=7),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0,
                                attn_pdrop=0, bos_token_id=1, eos_token_id=2)
    ),
    "scaled rows": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SHAPE, head_dim=8)),
}  # fmt: skip


def fused(model: nn.Module) -> nn.Module:
    lb.memory.fuse_loss_(model)
    assert is_tied(model)
    return model.train()


def made(name: str = "llama", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return fused(MODELS[name]().to(dtype))


def is_tied(model: nn.Module) -> bool:
    return wrapper_of(model.get_input_embeddings(), FusedEmbedding) is not None


def separate(model: nn.Module) -> nn.Module:
    """A copy whose embedding and last layer have gradients of their own, which autograd adds up."""
    copied = copy.deepcopy(model)
    table = copied.get_input_embeddings()
    unwrap(table, wrapper_of(table, FusedEmbedding))
    return copied


def step(model: nn.Module) -> None:
    model(**BATCH).loss.backward()


def twice_before_backward(model: nn.Module) -> None:
    (model(**BATCH).loss + 0.3 * model(input_ids=IDS.flip(1), labels=IDS).loss).backward()


def twice_and_one_after_the_other(model: nn.Module) -> None:
    first, second = model(**BATCH).loss, model(input_ids=IDS.flip(1), labels=IDS).loss
    second.backward()
    first.backward()


def in_parts(model: nn.Module) -> None:
    for part, weight in lb.memory.micro_batches(BATCH, 2):
        (model(**part).loss * weight).backward()


def retained(model: nn.Module) -> None:
    loss = model(**BATCH).loss
    loss.backward(retain_graph=True)
    loss.backward()


def by_hidden_states_alone(model: nn.Module) -> None:
    model(**BATCH, output_hidden_states=True).hidden_states[-1].square().mean().backward()


def with_hidden_states(model: nn.Module) -> None:
    output = model(**BATCH, output_hidden_states=True)
    (output.loss + output.hidden_states[0].square().mean()).backward()


def of_embeddings(model: nn.Module) -> None:
    rows = model.get_input_embeddings()(IDS)
    model(inputs_embeds=rows, labels=IDS).loss.backward()


def of_constant_embeddings(model: nn.Module) -> None:
    rows = torch.randn(*IDS.shape, 32, generator=torch.Generator().manual_seed(1))
    model(inputs_embeds=rows.to(model.dtype), labels=IDS).loss.backward()


def asked_for(model: nn.Module) -> None:
    weight = model.get_input_embeddings().weight
    (weight.grad,) = torch.autograd.grad(model(**BATCH).loss, [weight])


def under_autocast(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**BATCH).loss
    loss.backward()


def with_moved_activations(model: nn.Module) -> None:
    with lb.memory.offload_activations(min_bytes=0):
        loss = model(**BATCH).loss
    loss.backward()


STEPS = [
    step, twice_before_backward, twice_and_one_after_the_other, in_parts, retained, by_hidden_states_alone,
    with_hidden_states, of_embeddings, of_constant_embeddings, asked_for, under_autocast, with_moved_activations,
]  # fmt: skip


def gradients(model: nn.Module, run: Callable[[nn.Module], None] = step) -> dict[str, Tensor | None]:
    model.zero_grad()
    run(model)
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same(model: nn.Module, run: Callable[[nn.Module], None] = step) -> None:
    expected, found = gradients(separate(model), run), gradients(model, run)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradient is None) == (found[name] is None), name
        assert gradient is None or torch.equal(gradient, found[name]), name


@pytest.mark.parametrize("run", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_of_a_gradient_changes(run, dtype):
    assert_same(made("llama", dtype), run)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("run", [step, twice_before_backward])
def test_no_bit_changes_in_other_models(name, run):
    assert_same(made(name), run)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda m: m.gradient_checkpointing_enable({"use_reentrant": False}),
        lambda m: m.gradient_checkpointing_enable({"use_reentrant": True}),
        lambda m: lb.memory.checkpoint_(m, "block"),
        lambda m: lb.memory.attention_(m),
        lambda m: lb.train.mixed_(m, "bf16", working_copies=True),
    ],
)
@pytest.mark.filterwarnings("ignore:train.mixed_")
def test_no_bit_changes_together_with_other_techniques(prepare):
    model = made()
    prepare(model)
    assert_same(model)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", ["all", "all but the loss"])
def test_no_bit_changes_where_the_embedding_is_recomputed(inside, reentrant):
    from torch.utils.checkpoint import checkpoint

    def whole(model):
        anchor = torch.ones((), requires_grad=True)
        checkpoint(lambda one: one * model(**BATCH).loss, anchor, use_reentrant=reentrant).backward()

    def body(model):
        own, anchor = model.model.forward, torch.ones((), requires_grad=True)

        def forward(**kwargs):
            run = checkpoint(lambda _: own(**kwargs).last_hidden_state, anchor, use_reentrant=reentrant)
            return transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=run)

        model.model.forward = forward
        try:
            step(model)
        finally:
            del model.model.forward

    assert_same(made(), whole if inside == "all" else body)


class Twice(transformers.LlamaForCausalLM):
    """Whose forward looks ids up once more, for another sum of rows."""

    def forward(self, input_ids, labels=None):
        rows = self.get_input_embeddings()(input_ids) + self.get_input_embeddings()(input_ids.flip(1))
        logits = self.lm_head(self.model(inputs_embeds=rows).last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


def test_an_embedding_may_be_called_more_than_once():
    torch.manual_seed(0)
    assert_same(fused(Twice(transformers.LlamaConfig(**SHAPE))))


@pytest.mark.parametrize(
    "options", [{"padding_idx": 7}, {"scale_grad_by_freq": True}, {"max_norm": 0.05}, {"sparse": True}]
)
def test_options_of_embeddings_are_kept(options):
    torch.manual_seed(0)
    model = llama()
    table = nn.Embedding(VOCABULARY, 32, **options)
    table.weight = model.lm_head.weight
    model.set_input_embeddings(table)
    assert_same(fused(model))


@pytest.mark.parametrize("rows", [1, 5, 32, 33, 64, 300])
def test_rows_are_those_of_torch_for_vocabularies_of_any_size(rows):
    torch.manual_seed(0)
    ids = torch.randint(0, rows, (3, 7))
    model = fused(llama(vocab_size=rows, pad_token_id=0, bos_token_id=0, eos_token_id=0))
    assert_same(model, lambda m: m(input_ids=ids, labels=ids).loss.backward())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_gradient_as_large_as_the_weight_is_held(dtype, monkeypatch):
    """By autograd two."""
    monkeypatch.setattr(lb.tiled.loss, "TILE", 1 << 18)  # beside which this weight is a large one
    torch.manual_seed(0)
    model = fused(llama(vocab_size=20_000, hidden_size=128, num_hidden_layers=1).to(dtype))
    size, batch = model.lm_head.weight.nbytes, {"input_ids": IDS[:1, :16], "labels": IDS[:1, :16]}

    def peak(model: nn.Module) -> float:
        run = lb.memory.allocated_peak(lambda: model(**batch).loss.backward()) / size
        model.zero_grad()
        return run

    estimated = lb.estimate(model, batch, optimizer=None)
    held = peak(model)
    assert held < 1.5 and peak(separate(model)) > 1.95
    weights = sum(p.nbytes for p in model.parameters())
    assert 0.99 <= (estimated.peak_bytes - weights) / (held * size) <= 1.04


def test_hooks_see_the_whole_gradient_once():
    model = made()
    expected = gradients(separate(model))["model.embed_tokens.weight"]
    weight, seen = model.lm_head.weight, []
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    step(model)
    assert len(seen) == 2 and all(torch.equal(gradient, expected) for gradient in seen)


def test_steps_within_backward_are_those_after_it():
    model = made()
    other = separate(model)
    lb.optim.in_backward_(model, lb.optim.AdamW, lr=1e-2)
    after = lb.optim.AdamW(other.named_parameters(), lr=1e-2)
    for _ in range(2):
        step(model)
        after.zero_grad()
        step(other)
        after.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("unused", [False, True])
def test_data_parallel_training_reduces_the_whole_gradient(unused, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = made()
        expected = gradients(separate(model))
        parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
        found = gradients(model, lambda _: step(parallel))
    finally:
        torch.distributed.destroy_process_group()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_an_interrupted_backward_leaves_nothing_to_the_next():
    model = made()
    expected = gradients(separate(model))
    model.zero_grad()
    loss = model(**BATCH).loss
    norm = model.model.norm.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    norm.remove()
    model.zero_grad()
    loss.backward()
    assert torch.equal(model.lm_head.weight.grad, expected["model.embed_tokens.weight"])


def test_gradients_of_gradients_are_refused():
    model = made()
    hidden = model(**BATCH, output_hidden_states=True).hidden_states[-1]
    with pytest.raises(RuntimeError, match=r"create_graph=True; call lowbit\.memory\.unfuse_loss_"):
        torch.autograd.grad(hidden.sum(), [model.lm_head.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        torch.autograd.grad(model(**BATCH).loss, [model.lm_head.weight], create_graph=True)


def test_weights_that_are_frozen_or_whose_gradient_is_wider_are_as_before():
    model = made()
    model.lm_head.weight.requires_grad_(False)
    assert_same(model)
    model = made("llama", torch.bfloat16)
    for one in (model, separate(model)):
        lb.train.mixed_(one, "bf16", fp32_gradients=True)
        assert gradients(one)["model.embed_tokens.weight"].dtype == torch.float32
    assert torch.equal(gradients(model)["model.embed_tokens.weight"], gradients(one)["model.embed_tokens.weight"])


def test_weights_that_are_not_shared_are_left_alone():
    model = llama(tie_word_embeddings=False)
    lb.memory.fuse_loss_(model)
    assert not is_tied(model)
    model = made()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert_same(model)
    quantized = made()
    lb.quantize_(quantized, {"model.embed_tokens": "int8"})
    quantized.train()
    step(quantized)


def test_evaluation_and_forwards_without_labels_are_as_before():
    model = made()
    plain = separate(model)
    lb.memory.unfuse_loss_(plain)
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert torch.equal(model.eval()(**BATCH).loss, plain.eval()(**BATCH).loss)

    def by_logits(model):
        model.train()(IDS).logits.square().mean().backward()

    assert_same(model, by_logits)


def test_names_states_and_hooks_stay_and_so_does_the_way_back():
    torch.manual_seed(0)
    model = llama()
    names, state = [name for name, _ in model.named_parameters()], list(model.state_dict())
    fused(model)
    table = model.get_input_embeddings()
    assert [name for name, _ in model.named_parameters()] == names and list(model.state_dict()) == state
    assert not table._forward_hooks and not table.weight._backward_hooks
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_tied(copied) and copied.get_input_embeddings().weight is copied.lm_head.weight
        assert_same(copied)
    lb.memory.unfuse_loss_(model)
    assert not any(wrappers(module) for module in model.modules())


def test_a_forward_that_was_replaced_since_leaves_the_model_fused():
    model = made()
    for module in (model, model.get_input_embeddings()):
        module.forward = partial(lambda forward, *args, **kwargs: forward(*args, **kwargs), module.forward)
        with pytest.raises(ValueError, match="has been replaced since"):
            lb.memory.unfuse_loss_(model)
        assert is_tied(model) and wrappers(model.lm_head)
        del module.forward
    lb.memory.unfuse_loss_(model)
    assert not is_tied(model)
