"""``lb.fit`` for generation: the peak is what is held, less memory loses more, and the bits are those of quantizing by
hand.
"""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch
from support.models import same_state
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

import lowbit as lb
from lowbit.convert import prepack
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.demo.gpt import generate as generate_by_gpt
from lowbit.nn.packed import PackedLinear
from lowbit.plan import GenerationPlan, TrainingPlan
from lowbit.plan.fitting.identity import Identity
from lowbit.plan.fitting.predict import Prediction as TrainingPrediction
from lowbit.plan.settings import TrainingSettings

CONTEXT, VOCAB = 200, 512
TOKENS = torch.randint(VOCAB, (2, 64), generator=torch.Generator().manual_seed(0))
PROMPT = torch.randint(VOCAB, (1, CONTEXT - 4), generator=torch.Generator().manual_seed(1))
#: Of what the model holds as it is, falling. A GPT makes all logits of a prompt, which no plan takes away.
SHARES = {"gpt": (100, 90, 80), "llama": (100, 60, 30)}
FEW = ("plain cache", "nf4:group32", "parts of 64")


def gpt():
    return GPT(GPTConfig(vocab=VOCAB, context=CONTEXT, layers=2, heads=4, dim=128, hidden=256)).eval()


def llama():
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=True, eos_token_id=None,
        bos_token_id=None, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def mixture(kind, **settings):
    """Of experts: ``kind`` and ``settings`` are of a configuration of transformers."""
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_experts_per_tok=2, max_position_embeddings=CONTEXT, eos_token_id=None, bos_token_id=None, pad_token_id=0,
        **settings,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


MIXTURES = {
    "mixtral": lambda: mixture("Mixtral", intermediate_size=160, num_local_experts=5),
    "gpt-oss": lambda: mixture("GptOss", intermediate_size=160, num_local_experts=5, head_dim=16, sliding_window=24),
}
MAKE = {"gpt": gpt, "llama": llama}
each = pytest.mark.parametrize("kind", MAKE)


@pytest.fixture(scope="module")
def plans():
    """By model and budget, as shares of the model as it is, falling; each model's once."""
    made: dict[str, dict[int, GenerationPlan]] = {}

    def of(kind: str) -> dict[int, GenerationPlan]:
        if kind not in made:
            model, batch = MAKE[kind](), {"gpt": TOKENS, "llama": None}[kind]
            made[kind] = {}
            for share in SHARES[kind]:
                keep = FEW if kind == "llama" and share < 100 else ()
                made[kind][share] = lb.fit_generation(model, batch, f"{share}%", context=CONTEXT, require=keep)
        return made[kind]

    return of


def size_of(model):
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(model)}
    return sum(storages.values())


def tensors_of(model):
    return [*model.parameters(), *model.buffers()]


def held(run, prompt=PROMPT):
    """The most bytes that torch's allocator holds while the model generates to the end of the context."""
    return lb.memory.allocated_peak(lambda: run.generate(prompt)) + size_of(run.model) + prompt.nbytes


def alive():
    """The bytes of all tensors that Python knows of, each storage once."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in found
        if not isinstance(t, FakeTensor) and not is_lazy(t) and t.device.type == "cpu" and t.layout == torch.strided
    }
    return sum(storages.values())


def by_hand(model, settings):
    lb.quantize_(model, {name: recipe for name, recipe in settings.weights.items() if recipe != "float"})
    return model


def logits_of(model, tokens, scheme):
    if isinstance(model, GPT):
        return model(tokens, model.kv_cache(len(tokens), scheme))
    from lowbit.integrations.kv_cache import quantized_cache

    return model(tokens, cache=None if scheme is None else quantized_cache(model, scheme)).logits


# -- bytes and losses -------------------------------------------------------------------------------------------------
@pytest.mark.thinned(2)
@each
def test_a_generation_holds_what_the_plan_says_and_no_more_than_the_budget(plans, kind):
    for plan in plans(kind).values():
        measured = held(plan.apply_(MAKE[kind]()))
        assert plan.peak_bytes <= plan.budget and measured <= 1.03 * plan.budget
        assert 0.96 * measured <= plan.peak_bytes <= 1.04 * measured, plan


@pytest.mark.thinned(2)
@each
def test_less_memory_loses_more(plans, kind):
    plain = logits_of(MAKE[kind](), TOKENS, None).log_softmax(-1)
    measured = []
    for plan in plans(kind).values():
        model, scheme = plan.apply_(MAKE[kind]()).model, plan.settings.cache
        with torch.no_grad():
            lost = logits_of(model, TOKENS, scheme).log_softmax(-1)
        measured.append((plain.exp() * (plain - lost)).sum(-1).mean().item())
    assert measured[0] == 0 and all(more < less for more, less in itertools.pairwise(measured)), measured
    for more, less in itertools.pairwise(plans(kind).values()):
        assert less.peak_bytes < more.peak_bytes and less.loss > more.loss
        peaks, losses = ([getattr(one, name) for one in less.frontier] for name in ("peak_bytes", "loss"))
        assert peaks == sorted(peaks) and losses == sorted(losses, reverse=True) and len(peaks) > 3


def test_layers_of_their_own_recipes_lose_no_more_than_one_recipe_for_all(plans):
    plan = plans("gpt")[80]
    keep = (plan.settings.cache or "plain cache",)
    for recipe in ("fp6_e2m3-weight-only:group32", "int4-weight-only:group32"):
        other = lb.fit_generation(gpt(), TOKENS, plan.budget, context=CONTEXT, require=(recipe, *keep))
        assert set(other.settings.weights.values()) == {recipe} and plan.loss <= other.loss
    assert len(set(plan.settings.weights.values())) > 1


def test_several_sequences_and_a_model_on_meta():
    with torch.device("meta"):
        model = gpt()
    plan = lb.fit_generation(model, None, "85%", context=CONTEXT, rows=3)
    measured = held(plan.apply_(gpt()), PROMPT.expand(3, -1).contiguous())
    assert 0.96 * measured <= plan.peak_bytes <= 1.04 * measured and measured <= 1.03 * plan.budget
    assert "the model is on meta" in str(plan)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_hold_no_more_than_where_all_tokens_choose_the_same(kind):
    """How many tokens an expert is given, nobody knows before."""
    keep = ("int4-weight-only:group32", "parts of 64")
    plan = lb.fit_generation(MIXTURES[kind](), TOKENS, "60%", context=CONTEXT, require=keep)
    assert any("experts" in name and one != "float" for name, one in plan.settings.weights.items())
    spread, same = MIXTURES[kind](), MIXTURES[kind]()
    with torch.no_grad():
        for name, parameter in same.named_parameters():
            if ".mlp.gate." in name or ".router." in name:
                parameter.zero_()
    least, most = (held(plan.apply_(model)) for model in (spread, same))
    assert least <= most <= 1.03 * plan.budget and 0.96 * most <= plan.peak_bytes <= 1.04 * most, plan


# -- generation -------------------------------------------------------------------------------------------------------
@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "keep", [(), ("plain cache", "int4-weight-only:group32"), ("int8:group32", "int8", "whole prompt")], ids=str
)
@each
def test_generation_is_that_of_the_model_quantized_by_hand(plans, kind, keep):
    if keep:
        plan = lb.fit_generation(MAKE[kind](), TOKENS, "90%", context=CONTEXT, require=keep)
    else:
        plan = plans(kind)[SHARES[kind][-1]]
    settings, prompt = plan.settings, PROMPT[:, :150]
    run, other = plan.apply_(MAKE[kind]()), by_hand(MAKE[kind](), settings)
    assert same_state(run.model, other)
    if kind == "gpt":
        new = list(generate_by_gpt(other, prompt, 8, temperature=0, kv_cache=settings.cache))
        expected = torch.cat([prompt, torch.stack(new, 1)], 1)
    else:
        from lowbit.integrations.kv_cache import quantized_cache

        cache = {} if settings.cache is None else {"cache": quantized_cache(other, settings.cache)}
        expected = other.generate(prompt, max_new_tokens=8, do_sample=False, prefill_chunk_size=settings.part, **cache)
    assert torch.equal(run.generate(prompt, 8), expected)
    assert torch.equal(run.generate(prompt, 8), expected)  # the cache is a new one


def test_a_packed_model(monkeypatch):
    monkeypatch.setattr(prepack, "no_gain_by_packing", lambda weight, input, cols: None)
    keep = ("int8", "plain cache")
    plan = lb.fit_generation(gpt(), TOKENS, "90%", context=CONTEXT, require=keep)
    stored = lb.fit_generation(gpt(), TOKENS, "90%", context=CONTEXT, require=(*keep, "as stored"))
    assert plan.settings.packed and not stored.settings.packed and "prepacked" in str(plan)
    run = plan.apply_(gpt())
    assert any(isinstance(module, PackedLinear) for module in run.model.modules())
    assert torch.equal(run.generate(PROMPT[:, :150], 8), stored.apply_(gpt()).generate(PROMPT[:, :150], 8))
    measured = held(run)
    assert 0.96 * measured <= plan.peak_bytes <= 1.04 * measured


def test_options_of_the_own_generate_of_a_model(plans):
    plan = plans("llama")[30]
    run = plan.apply_(llama())
    assert plan.settings.cache is not None and plan.settings.part == 64
    assert run.options()["prefill_chunk_size"] == 64
    assert torch.equal(run.model.generate(PROMPT, max_new_tokens=4, **run.options()), run.generate(PROMPT))


def test_the_model_stays_as_it_is_while_a_plan_is_made():
    model = gpt()
    before, version = copy.deepcopy(model), [p._version for p in model.parameters()]
    lb.fit_generation(model, TOKENS, "90%", context=CONTEXT, require=("plain cache",))
    assert same_state(model, before) and version == [p._version for p in model.parameters()]
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.slow
@each
def test_a_plan_by_a_batch_leaves_nothing_in_memory(kind):
    model, keep = MAKE[kind](), ("plain cache", "whole prompt")
    lb.fit_generation(model, TOKENS, "90%", context=CONTEXT, require=keep)  # what is made once a process
    gc.collect()
    gc.disable()  # nothing waits for the collector
    try:
        before = alive()
        for _ in range(2):
            lb.fit_generation(model, TOKENS, "90%", context=CONTEXT, require=keep)
            assert alive() <= before + 4096
    finally:
        gc.enable()


# -- a plan's files and words -----------------------------------------------------------------------------------------
@pytest.mark.thinned(2)
@each
def test_a_saved_plan_is_the_same(plans, kind, tmp_path):
    for share, plan in plans(kind).items():
        read = GenerationPlan.load(plan.save(tmp_path / f"{share}.json"))
        assert read.as_dict() == plan.as_dict()
        assert (str(read), read.table()) == (str(plan), plan.table())
    assert same_state(read.apply_(MAKE[kind]()).model, plan.apply_(MAKE[kind]()).model)
    (tmp_path / "other.json").write_text('{"budget": 1}')
    with pytest.raises(ValueError, match="has no plan for generation"):
        GenerationPlan.load(tmp_path / "other.json")


def test_a_file_of_the_other_task_says_which_class_reads_it(plans, tmp_path):
    chosen = TrainingPrediction(TrainingSettings(), 1000, 1.0)
    training = TrainingPlan(chosen, 2000, chosen, [], identity=Identity("Linear", {}, None)).save(
        tmp_path / "training.json"
    )
    with pytest.raises(ValueError, match=r"training.json, got one for training.*use lb.plan.TrainingPlan.load"):
        GenerationPlan.load(training)
    generation = plans("gpt")[80].save(tmp_path / "generation.json")
    with pytest.raises(ValueError, match=r"generation.json, got one for generation.*lb.plan.GenerationPlan.load"):
        TrainingPlan.load(generation)


def test_what_a_plan_says(plans):
    by_batch, by_weights = str(plans("gpt")[80]), str(plans("llama")[30])
    assert "perplexity" in by_batch and "which needs a batch" in by_weights
    assert "in prefill of" in by_batch and "parts of 64" in by_weights
    assert "because nothing is quantized" in str(plans("gpt")[100]) and "unchanged" in plans("gpt")[100].table()


# -- refusals ---------------------------------------------------------------------------------------------------------
def test_what_cannot_fit_says_the_least_that_would():
    with pytest.raises(ValueError, match="no choice fits generation of 200 tokens") as error:
        lb.fit_generation(gpt(), None, 100_000, context=CONTEXT)
    least = int(str(error.value).split(" bytes)")[0].split("(")[-1])
    plan = lb.fit_generation(gpt(), None, least, context=CONTEXT)
    assert plan.peak_bytes == least and set(plan.settings.weights.values()) == {"int2-weight-only:group32"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"context": None}, "context must be an integer from 2"),
        ({"rows": 0}, "rows must be an integer from 1"),
        ({"budget": None}, "budget is bytes, a size such as '6GiB'"),
        ({"budget": "0%"}, "budget is bytes, a size such as '6GiB', or a share such as '60%', got '0%'"),
        (
            {"budget": "-5%"},
            "budget is bytes, a size such as '6GiB', or a share such as '60%'; '-5%' is no size",
        ),
        ({"require": ("int5",)}, "no choice is called 'int5'"),
        ({"exclude": ("prepacked", "as stored")}, "leave no choice for the layout"),
    ],
)
def test_arguments_that_say_nothing(given, said):
    with pytest.raises(ValueError, match=said):
        lb.fit_generation(gpt(), None, **{"budget": "90%", "context": CONTEXT, **given})


def test_models_and_batches_that_do_not_serve():
    def plan(model, batch=None, context=CONTEXT):
        return lb.fit_generation(model, batch, "50%", context=context)

    with pytest.raises(ValueError, match="got Sequential without one"):
        plan(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match="it has 200 positions; pass context=200 or less"):
        plan(llama(), context=201)
    with pytest.raises(ValueError, match="201 positions exceed the model's context of 200"):
        plan(gpt(), context=201)
    for batch, got in (
        (torch.randn(2, 8), r"float32 of the shape \[2, 8\]"), ("some text", "str"), (["one", "two"], "list of str"),
        ([1, 2, 3], "list of int"), (TOKENS.numpy(), "ndarray"), (7, "int"), ({"text": TOKENS}, "dict"), ([], "list"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=rf"expected token ids.*got {got}\. Tokenize text with tokenizer\(text"):
            plan(gpt(), batch)
    with torch.device("meta"):
        model = gpt()
    with pytest.raises(ValueError, match="on meta cannot run batches"):
        plan(model, TOKENS)


def test_generations_beyond_the_plan(plans):
    run = plans("llama")[60].apply_(llama())
    for tokens, options, said in (
        (PROMPT, {"max_new_tokens": 5}, "at most 200 tokens, the planned context, got a prompt of 196 and 5"),
        (PROMPT.expand(2, -1), {}, "at most 1 sequences, as planned, got 2"),
        (PROMPT, {"num_beams": 3}, "at most 1 sequences, as planned, got 3"),
        (PROMPT[0], {}, "expected token ids.*got int64 of the shape \\[196\\]"),
        (PROMPT.float(), {}, "expected token ids.*got float32 of the shape \\[1, 196\\]"),
    ):
        with pytest.raises(ValueError, match=said):
            run.generate(tokens, **options)
    for tokens, said in (
        ("hi", r"got str\. Tokenize text with tokenizer\(text, return_tensors='pt'\).input_ids"),
        (PROMPT.numpy(), r"got ndarray.*torch.tensor\(\[numbers\]\)"),
        ([1, 2, 3], "got list of int"),
    ):
        with pytest.raises(TypeError, match=f"generate: expected token ids, an integer tensor.*{said}"):
            run.generate(tokens)
    with pytest.raises(ValueError, match="supports only greedy generation"):
        plans("gpt")[90].apply_(gpt()).generate(PROMPT, 2, temperature=1.0)
    before = llama()
    model = copy.deepcopy(before)
    with pytest.raises(ValueError, match="the plan is for a model with the layer"):
        plans("gpt")[90].apply_(model)
    assert same_state(model, before)
